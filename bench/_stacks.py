"""The stacks that are compared, and every peer's set-up: what `liger+inductor` or `fused@20GiB` stands for.

A stack is an engine with extras: ENGINE[+EXTRA...][@BUDGET], a budget for `fused` alone. A stack that this machine or
this torch cannot run raises `Unavailable` with the reason, which becomes its row.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pathlib
import tempfile
from dataclasses import dataclass
from typing import Any
from unittest import mock

import _shapes
import torch
from torch import nn

ENGINES: dict[str, tuple[str, ...]] = {
    "eager": ("checkpointing",),
    "inductor": ("auto-chunker", "checkpointing"),
    "inductor-per-layer": ("checkpointing",),
    "liger": ("inductor", "checkpointing"),
    "unsloth": ("checkpointing",),
    "fused": ("checkpointing",),
}
NEEDS = {"liger": "liger_kernel", "unsloth": "unsloth"}


class Unavailable(Exception):
    """This stack cannot run here, which says nothing about it: its row is skipped, not failed."""


@dataclass(frozen=True)
class Stack:
    """One way to train a model.

    extras  of those of its engine: `checkpointing` recomputes every decoder layer (unsloth: its own, offloaded),
            `auto-chunker` is Inductor's chunked lm_head and loss, `inductor` compiles what liger has patched
    budget  memory budget of `fused`, as its option takes it
    """

    engine: str
    extras: tuple[str, ...] = ()
    budget: str | None = None

    @staticmethod
    def parse(text: str) -> Stack:
        """Raises: ValueError naming the stack and all that there are."""
        name, at, budget = text.partition("@")
        engine, *extras = name.split("+")
        known = engine in ENGINES and set(extras) <= set(ENGINES[engine]) and len(set(extras)) == len(extras)
        if not known or (at and engine != "fused"):
            raise ValueError(f"stack {text!r} is none of {', '.join(spellings())}")
        if at:
            from fused_backend.compiler.options import parse_bytes

            parse_bytes(budget, f"memory_budget of stack {text!r}")
        return Stack(engine, tuple(extras), budget if at else None)


def spellings() -> list[str]:
    return [engine + "".join(f"[+{extra}]" for extra in extras) for engine, extras in ENGINES.items()] + [
        "fused@BUDGET"
    ]


def import_first(stack: Stack, device: str) -> None:
    """What must be there, and what must come before transformers: Unsloth patches what is imported after it.

    Raises: `Unavailable` for a peer that is not installed, or an option that this torch does not have.
    """
    package = NEEDS.get(stack.engine)
    if package and importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")
    if "auto-chunker" in stack.extras:
        import torch._inductor.config as inductor

        if not hasattr(inductor, "auto_chunker"):
            raise Unavailable(f"torch {torch.__version__} has no auto chunker")
        inductor.auto_chunker.enable = True
    if stack.engine == "unsloth":
        folder = tempfile.mkdtemp(prefix="bench_unsloth_")
        os.environ |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": folder}
        os.environ |= {} if device == "cuda" else {"UNSLOTH_ALLOW_CPU": "1"}
        importlib.import_module("unsloth")


def build(
    stack: Stack, config: Any, mode: str, dtype: torch.dtype, device: str, length: int, attention: str | None = None
) -> nn.Module:
    """The model of one stack, ready to train; compilation is set up but not run.

    mode       `full` trains every weight, `lora` fp32 adapters on dense weights, `qlora` fp32 adapters on NF4 weights
    attention  transformers' name of an attention, instead of the one without masks; not for unsloth, which has its own
    """
    checkpointing = "checkpointing" in stack.extras
    if stack.engine == "unsloth":
        model = _unsloth(config, mode, dtype, device, length, "unsloth" if checkpointing else False)
    else:
        model = _shapes.base_model(config, mode, dtype, device, attention)
        if stack.engine == "liger":
            _patch_with_liger(model, config)
        if mode != "full":
            model = _shapes.with_adapters(model)
        if checkpointing:
            _checkpoint(model)
    _shapes.fill_adapters(model)
    _compile(model, stack, device)
    return model.train()


def _patch_with_liger(model: Any, config: Any) -> None:
    liger: Any = importlib.import_module("liger_kernel.transformers")
    patch = getattr(liger, f"apply_liger_kernel_to_{config.model_type}", None)
    if patch is None:
        raise Unavailable(f"this liger_kernel has no patch for {config.model_type}")
    patch(model=model)


def _checkpoint(model: Any) -> None:
    """Hugging Face's checkpointing of every decoder layer, in the form that does not re-enter autograd."""
    base = _shapes.base_of(model)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Only the re-entrant form needs the embedding's output to ask for a gradient; the hook breaks compiled graphs.
    base.disable_input_require_grads()


def _compile(model: Any, stack: Stack, device: str) -> None:
    if stack.engine == "inductor" or "inductor" in stack.extras:
        model.compile()
    elif stack.engine == "inductor-per-layer":
        # Layers whose guards differ are compiled apart; more than eight would otherwise run eagerly.
        torch._dynamo.config.recompile_limit = 64
        for layer in _shapes.decoder_layers(model):
            layer.compile()
    elif stack.engine == "fused":
        # On a CPU Inductor's C++ compiler takes minutes; a dry run needs only the graphs.
        options: dict[str, Any] = {} if device == "cuda" else {"lowering": "aot_eager"}
        options |= {"memory_budget": stack.budget} if stack.budget else {}
        model.compile(backend="fused", options=options)


def _unsloth(config: Any, mode: str, dtype: torch.dtype, device: str, length: int, checkpointing: Any) -> nn.Module:
    """Unsloth's loader and adapters, with the same random model in the place of a checkpoint.

    The loader reads a folder that holds a configuration and a tokenizer; its one call for weights is answered by
    `base_model`. All else, patched forwards and LoRA kernels, is Unsloth's own, its attention too.
    """
    import transformers
    from unsloth import FastLanguageModel

    if mode == "full":
        raise Unavailable("only lora and qlora are set up for unsloth")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench_model_"))
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures, config.dtype = [kind.__name__], dtype
    config.save_pretrained(folder)
    _word_tokenizer(config).save_pretrained(folder)

    def weights(*_: Any, attn_implementation: str = "sdpa", **__: Any) -> Any:
        model: Any = _shapes.base_model(config, mode, dtype, device, attn_implementation)
        model.config._name_or_path = model.name_or_path = str(folder)
        return model

    with mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", weights):
        model, _ = FastLanguageModel.from_pretrained(
            str(folder), max_seq_length=length, dtype=dtype, load_in_4bit=mode == "qlora", local_files_only=True
        )
    model = FastLanguageModel.get_peft_model(
        model, r=_shapes.RANK, lora_alpha=_shapes.RANK, lora_dropout=0, bias="none",
        target_modules=_shapes.adapted(config), use_gradient_checkpointing=checkpointing, max_seq_length=length,
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
