"""Tiny models of transformers for other tasks than continuing text, one layer each, random weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from _styles import HIDDEN, D, G, H, K, V
from _training import roughen
from torch import nn


def t5(activation: str = "gated-gelu") -> nn.Module:
    """T5 v1.1: one layer each of encoder and decoder, and a head that is not tied."""
    config = transformers.T5Config(
        vocab_size=V, d_model=D, d_kv=K, d_ff=HIDDEN, num_layers=1, num_decoder_layers=1, num_heads=H,
        feed_forward_proj=activation, dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


TEXT = {
    "hidden_size": D, "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": H,
    "num_key_value_heads": G, "vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llava() -> nn.Module:
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32,
    }  # fmt: skip
    text = TEXT | {"model_type": "llama"}
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=5, image_seq_length=4, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = transformers.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": D, "num_heads": 2, "patch_size": 4},
        image_token_id=5, video_token_id=6, vision_start_token_id=7,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


def classifier() -> nn.Module:
    config = transformers.LlamaConfig(**TEXT, num_labels=3, problem_type="single_label_classification")
    return transformers.LlamaForSequenceClassification(config)


TASKS: dict[str, Callable[[], nn.Module]] = {
    "t5": t5, "llava": llava, "qwen2_vl": qwen2_vl, "classifier": classifier
}  # fmt: skip


def task(name: str) -> nn.Module:
    """The model, its weights away from their initial values."""
    torch.manual_seed(0)
    model = TASKS[name]().train()
    roughen(model)
    if name == "t5":  # its scores are not scaled: with larger matrices every softmax has one winner
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(5 if parameter.ndim > 1 else 1)
    return model
