"""The models that are trained: published shapes, random weights made on the device, and adapters on them.

Nothing is downloaded. A weight depends on its name alone, so that all stacks of one configuration train the same
numbers, whatever order they build them in.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# D hidden_size, F intermediate_size, H/Hkv heads, K head_dim, V vocabulary: as in the published configurations.
# `family` is transformers' model_type.
MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "family": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama3.2-1b": {
        "family": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "bos_token_id": 128000, "eos_token_id": 128001,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-4b": {
        "family": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "bos_token_id": 151643, "eos_token_id": 151645,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "gemma2-2b": {
        "family": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "smollm2-360m": {
        "family": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    # Qwen3-30B-A3B, of whose 48 layers 16 are kept; every other size is the published one. The experts of all layers
    # take 54 GiB in bf16, too many beside what an eager step saves of them.
    "qwen3-30b-a3b-16l": {
        "family": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "bos_token_id": 151643, "eos_token_id": 151645,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 16384,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY_OF = {
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 24},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION_PROJECTIONS, "gate_proj", "up_proj", "down_proj")
RANK = 16
ATTENTION = "sdpa_causal"


def config_of(name: str, layers: int | None, tiny: bool) -> Any:
    """Configuration of a model; `tiny` shrinks every size and keeps what else tells the models apart."""
    from transformers import CONFIG_MAPPING

    sizes: dict[str, Any] = MODELS[name] | {"use_cache": False}
    family = sizes.pop("family")
    sizes |= TINY | TINY_OF.get(family, {}) if tiny else {}
    sizes |= {"num_hidden_layers": layers} if layers else {}
    kind: Any = CONFIG_MAPPING[family]
    return kind(**sizes)


def adapted(config: Any) -> list[str]:
    """The layers that get adapters: with experts those of the attention alone, since PEFT's adapters on experts add
    B A to the weights of all of them in every step."""
    return list(ATTENTION_PROJECTIONS if hasattr(config, "num_experts") else PROJECTIONS)


def attention_of(config: Any) -> str:
    """SDPA without a mask; transformers' own eager attention where scores are capped, which SDPA cannot do."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else ATTENTION


def base_model(config: Any, mode: str, dtype: torch.dtype, device: str, attention: str | None = None) -> nn.Module:
    """Hugging Face's model. Module by module its weights are drawn on the device and, for `qlora`, quantised.

    The whole model in bf16 never exists: peak memory is that of the quantised model and one layer's weight.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention or attention_of(config)
        )
    norms = 0.0 if config.model_type == "gemma2" else 1.0  # Gemma multiplies by 1 + w
    # By name: a list of the modules would keep every dense weight until the loop ends.
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        if name == "lm_head" and config.tie_word_embeddings:
            continue
        for key, weight in list(module.named_parameters(recurse=False)):
            values = torch.empty(weight.shape, dtype=dtype, device=device)
            # A norm's weights differ from one another, so that a misplaced one shows in the gradients.
            mean, std = (0.0, config.initializer_range) if values.ndim > 1 else (norms, 0.1)
            values.normal_(mean, std, generator=_generator(f"{name}.{key}", device))
            setattr(module, key, nn.Parameter(values, requires_grad=mode == "full"))
        if mode == "qlora" and name.endswith(PROJECTIONS):
            model.set_submodule(name, quantised(module, dtype, device))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    _make_buffers(model, config, dtype, device)
    if mode == "qlora":
        _mark_quantised(model, dtype)
    return model


def _make_buffers(model: Any, config: Any, dtype: torch.dtype, device: str) -> None:
    """What a constructor computes: on the meta device it came to nothing."""
    with _default_dtype(dtype):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    embedding = model.model.embed_tokens
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale = torch.tensor(config.hidden_size**0.5, device=device)
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    assert not left, left


def quantised(linear: Any, dtype: torch.dtype, device: str) -> nn.Module:
    """A linear layer in NF4 with double quantisation, block size 64, products in `dtype`."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    result = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    weight = bitsandbytes.nn.Params4bit(linear.weight.data, quant_type="nf4", module=result)
    result.weight = weight.to(device)  # this quantises
    return result


def decoder_layers(model: Any) -> list[nn.Module]:
    return list(base_of(model).model.layers)


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _generator(name: str, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As while transformers constructs a model; Unsloth keeps its tables in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def register_attention() -> None:
    """An attention function for which transformers builds no mask, neither eagerly nor while compiling.

    Under torch.compile transformers cannot look into position_ids for packed sequences and gives "sdpa" an explicit
    four-dimensional mask, with which attention leaves its causal kernels.
    """
    from transformers import AttentionInterface

    def causal(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        del mask
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION, causal)


def _mark_quantised(model: Any, dtype: torch.dtype) -> None:
    """What loading a checkpoint in four bits leaves behind, and PEFT, Unsloth and the Trainer ask for."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    model.config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    model.hf_quantizer = AutoHfQuantizer.from_config(model.config.quantization_config)


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules=adapted(model.config), task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def fill_adapters(model: nn.Module) -> None:
    """A and B in fp32 with the same numbers in every stack; B not zero, which would leave A without a gradient."""
    for name, weight in model.named_parameters():
        if "lora_" in name:
            values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            std = weight.shape[1] ** -0.5 if "lora_A" in name else 0.02
            label = name[name.index("layers.") :].replace("_orig_mod.", "")
            weight.data = values.normal_(0, std, generator=_generator(label, str(weight.device)))
