"""Tiny random-weight Hugging Face models, and what each of them really contains."""

from __future__ import annotations

from typing import Any

import torch
from _training import VOCABULARY, batch, roughen
from transformers import AutoConfig, AutoModelForCausalLM

# Fused sites per model of two layers: (rms_norm, rope, swiglu, linear_cross_entropy), counted by reading the model.
SITES: dict[str, tuple[int, int, int, int]] = {
    "llama": (5, 2, 2, 1),
    "mistral": (5, 2, 2, 1),
    "qwen2": (5, 2, 2, 1),
    "qwen3": (9, 2, 2, 1),  # q-norm and k-norm
    "gemma": (5, 2, 2, 1),
    "gemma2": (9, 2, 2, 1),  # norms before and after both blocks; softcap on the logits
    "gemma3_text": (13, 2, 2, 1),
    "phi3": (5, 2, 2, 1),  # packed gate_up
    "olmo2": (9, 2, 2, 1),  # norms after the blocks, and over the flat q and k
    "granite": (5, 2, 2, 1),  # logits divided by a constant
    "cohere": (0, 2, 2, 1),  # LayerNorm, which has tests of its own; interleaved rotary
    "glm4": (9, 2, 2, 1),  # partial interleaved rotary
    "gpt_neox": (0, 2, 0, 1),  # LayerNorm; partial rotary
    "smollm3": (5, 2, 2, 1),
    "mixtral": (5, 2, 2, 1),  # the gate inside the experts
}
FUSIONS = ("rms_norm", "rope", "swiglu", "linear_cross_entropy")


def tiny(family: str, **changes: Any) -> torch.nn.Module:
    """Two layers, hidden size 64, random weights; norm weights too, so that a misplaced one shows.

    A size of None in `changes` is left to the family.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "head_dim": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **{k: v for k, v in (sizes | changes).items() if v is not None})
    model = AutoModelForCausalLM.from_config(config).train()
    roughen(model)
    return model


def draws(count: int = 6, device: Any = None) -> list[dict[str, torch.Tensor]]:
    """Several batches: enough for rounding errors to be compared as distributions."""
    return [batch(device=device) for _ in range(count)]
