"""The models that bench/model.py trains: published shapes, random weights made on the device, and every peer's set-up.

Nothing is downloaded. A weight depends on its name alone, so that all stacks of one configuration train the same
numbers, whatever order they build them in.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

# D hidden_size, F intermediate_size, H/Hkv heads, K head_dim, V vocabulary: as in the published configurations.
MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 16384,
}  # fmt: skip
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16
ATTENTION = "sdpa_causal"


def import_first(stack: str, device: str) -> None:
    """Unsloth patches what is imported after it, so it comes before transformers."""
    if stack.startswith("unsloth"):
        folder = tempfile.mkdtemp(prefix="bench_unsloth_")
        os.environ |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": folder}
        os.environ |= {} if device == "cuda" else {"UNSLOTH_ALLOW_CPU": "1"}
        importlib.import_module("unsloth")


def config_of(name: str, layers: int | None, tiny: bool) -> Any:
    """Llama configuration of a model; `tiny` shrinks every size and keeps what else tells the models apart."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = MODELS[name] | (TINY if tiny else {}) | ({"num_hidden_layers": layers} if layers else {})
    ends: dict[str, Any] = (
        {"bos_token_id": 1, "eos_token_id": 2} if tiny else {"bos_token_id": 128000, "eos_token_id": 128001}
    )
    return LlamaConfig(**(sizes | ends), use_cache=False)


def build(stack: str, config: Any, mode: str, dtype: torch.dtype, device: str, length: int) -> nn.Module:
    """The model of one stack, ready to train; compilation is set up but not run.

    mode `full` trains every weight, `lora` fp32 adapters on dense weights, `qlora` fp32 adapters on NF4 weights.
    """
    name, _, extra = stack.partition("+")
    if name == "unsloth":
        model = _unsloth(config, mode, dtype, device, length, "unsloth" if extra else False)
    else:
        model = base_model(config, mode, dtype, device)
        if name == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=model)
        if mode != "full":
            model = _with_adapters(model)
        if extra:
            _checkpoint(model)
    _fill_adapters(model)
    _compile(model, name, device)
    return model.train()


def base_model(config: Any, mode: str, dtype: torch.dtype, device: str, attention: str = ATTENTION) -> nn.Module:
    """Hugging Face's Llama. Module by module its weights are drawn on the device and, for `qlora`, quantised.

    The whole model in bf16 never exists: peak memory is that of the quantised model and one layer's weight.
    """
    from transformers import LlamaForCausalLM

    _register_attention()
    with torch.device("meta"):
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
    # By name: a list of the modules would keep every dense weight until the loop ends.
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        if name == "lm_head" and config.tie_word_embeddings:
            continue
        for key, weight in list(module.named_parameters(recurse=False)):
            values = torch.empty(weight.shape, dtype=dtype, device=device)
            # A norm's weights differ from one another, so that a misplaced one shows in the gradients.
            mean, std = (0.0, config.initializer_range) if values.ndim > 1 else (1.0, 0.1)
            values.normal_(mean, std, generator=_generator(f"{name}.{key}", device))
            setattr(module, key, nn.Parameter(values, requires_grad=mode == "full"))
        if mode == "qlora" and name.endswith(PROJECTIONS):
            model.set_submodule(name, quantised(module, dtype, device))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    # Its frequencies are computed when it is constructed, which on the meta device gave none.
    with _default_dtype(dtype):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    assert not left, left
    if mode == "qlora":
        _mark_quantised(model, dtype)
    return model


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
    return list(_base_of(model).model.layers)


def _base_of(model: Any) -> Any:
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


def _register_attention() -> None:
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
    """What loading a checkpoint in four bits leaves behind, and PEFT and Unsloth ask for."""
    from transformers import BitsAndBytesConfig
    from transformers.utils.quantization_config import QuantizationMethod

    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    model.config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def _with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def _fill_adapters(model: nn.Module) -> None:
    """A and B in fp32 with the same numbers in every stack; B not zero, which would leave A without a gradient."""
    for name, weight in model.named_parameters():
        if "lora_" in name:
            values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            std = weight.shape[1] ** -0.5 if "lora_A" in name else 0.02
            label = name[name.index("layers.") :].replace("_orig_mod.", "")
            weight.data = values.normal_(0, std, generator=_generator(label, str(weight.device)))


def _checkpoint(model: Any) -> None:
    """Hugging Face's checkpointing of every decoder layer, in the form that does not re-enter autograd."""
    base = _base_of(model)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Only the re-entrant form needs the embedding's output to ask for a gradient; the hook breaks compiled graphs.
    base.disable_input_require_grads()


def _compile(model: Any, name: str, device: str) -> None:
    if name == "inductor":
        model.compile()
    elif name == "inductor-per-layer":
        # Layers whose guards differ are compiled apart; more than eight would otherwise run eagerly.
        torch._dynamo.config.recompile_limit = 64
        for layer in decoder_layers(model):
            layer.compile()
    elif name == "fused":
        # On a CPU Inductor's C++ compiler takes minutes; a dry run needs only the graphs.
        model.compile(backend="fused", options={} if device == "cuda" else {"lowering": "aot_eager"})


def _unsloth(config: Any, mode: str, dtype: torch.dtype, device: str, length: int, checkpointing: Any) -> nn.Module:
    """Unsloth's loader and adapters, with the same random model in the place of a checkpoint.

    The loader reads a folder that holds a configuration and a tokenizer; its one call for weights is answered by
    `base_model`. All else, patched forwards and LoRA kernels, is Unsloth's own, its attention too.
    """
    import transformers
    from unsloth import FastLanguageModel

    if mode == "full":
        raise NotImplementedError("only lora and qlora are set up for unsloth")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench_model_"))
    config.architectures, config.dtype = ["LlamaForCausalLM"], dtype
    config.save_pretrained(folder)
    _word_tokenizer(config).save_pretrained(folder)

    def weights(*_: Any, attn_implementation: str = "sdpa", **__: Any) -> Any:
        model: Any = base_model(config, mode, dtype, device, attn_implementation)
        model.config._name_or_path = model.name_or_path = str(folder)
        return model

    with mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", weights):
        model, _ = FastLanguageModel.from_pretrained(
            str(folder), max_seq_length=length, dtype=dtype, load_in_4bit=mode == "qlora", local_files_only=True
        )
    model = FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", target_modules=list(PROJECTIONS),
        use_gradient_checkpointing=checkpointing, max_seq_length=length,
    )  # fmt: skip
    with contextlib.suppress(TypeError):  # older releases take no such argument
        FastLanguageModel.for_training(model, use_gradient_checkpointing=checkpointing)
    return model


def _word_tokenizer(config: Any) -> Any:
    """The smallest tokenizer that a loader accepts; no text is ever tokenised."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<pad>"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), unk_token="<unk>", bos_token="<s>",
        eos_token="</s>", pad_token="<pad>", model_max_length=config.max_position_embeddings,
    )  # fmt: skip
