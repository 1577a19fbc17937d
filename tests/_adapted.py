"""Layers with adapters that share their input, computed as PEFT and bitsandbytes do and as `lora_linear` does.

Truth multiplies with the weight as bitsandbytes does, rounded to `base_dtype`: nobody computes with a finer one.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import bitsandbytes as bnb
import bitsandbytes.functional as bnb_functional
import pytest
import torch
import torch.nn.functional as F
from _oracle import assert_as_accurate, exact, leaves, run
from conftest import HAS_GPU
from fused_backend.kernels import _lora as lora
from fused_backend.kernels import _nf4 as nf4
from torch import Tensor

OPS = torch.ops.fused_backend
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Out_features and rank of the layers that share x; rank 0 is a layer without an adapter.
GROUPS = {
    "one": [(45, 8)],
    "qkv": [(37, 8), (20, 3), (29, 2)],
    "gate-up": [(35, 4), (35, 4)],
    "bare": [(31, 0), (18, 0)],
}


class Size(NamedTuple):
    """Leading shape of x, K, blocksize, and how often all but the weights are drawn: one number decides nothing."""

    lead: tuple[int, ...]
    K: int
    blocksize: int = 64
    draws: int = 1


SIZES = {
    "T=1": Size((1,), 33, 64, 40),
    "T=7": Size((7,), 67, 4096, 6),
    "T=127": Size((127,), 64, 64),
    "T=3x15": Size((3, 15), 35, 4096),
}


ROWS = Size((45,), 50)
# Layers and x where the size does not matter.
SMALL, SIX = [(9, 2), (5, 3)], Size((6,), 16)


class Case(NamedTuple):
    """`bias` is the layer's own ("base") or lora_B's ("lora")."""

    x: torch.dtype
    base: torch.dtype
    adapter: torch.dtype
    autocast: torch.dtype | None = None
    dropout: float = 0.0
    quant_type: str = "nf4"
    nested: bool = True
    bias: str = "no-bias"
    group: str = "one"
    size: str = "T=127"

    @property
    def lora(self) -> torch.dtype:
        return self.base if self.group == "bare" else self.autocast or self.adapter

    @property
    def out(self) -> torch.dtype:
        if self.quant_type == "none":
            return self.base
        adapted = self.autocast if self.group != "bare" else None
        return torch.promote_types(self.x, adapted) if adapted else self.x

    def exists(self) -> bool:
        four_bit, bare = self.quant_type != "none", self.group == "bare"
        if bare and (self.dropout or self.bias == "lora"):
            return False
        return self.base == (self.autocast or (self.base if four_bit else self.x)) and (four_bit or not self.nested)


def pairwise(*low: torch.dtype) -> list[Any]:
    """Few cases in which any two values of two axes meet that can meet at all. `low`: the 16-bit dtypes."""
    floats, two = (F32, *low), (False, True)
    axes = (
        floats, floats, (F32, low[0]), (None, low[0]), (0.0, 0.1), ("none", "nf4", "fp4"), two,
        ("no-bias", "base", "lora"), GROUPS, SIZES,
    )  # fmt: skip
    every = [case for case in itertools.starmap(Case, itertools.product(*axes)) if case.exists()]
    pairs = lambda case: set(itertools.combinations(enumerate(case), 2))  # noqa: E731
    missing, chosen, draw = set().union(*map(pairs, every)), [], random.Random(0)
    while missing:
        chosen.append(max(draw.sample(every, 100), key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return [pytest.param(c, id=" ".join(str(v).removeprefix("torch.") for v in c)) for c in chosen]


class Arguments(NamedTuple):
    """Of the operator."""

    x: Tensor
    weight: Sequence[Tensor]
    absmax: Sequence[Tensor]
    nested: Sequence[Tensor]
    bias: Sequence[Tensor]
    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]
    keep: Sequence[Tensor]
    out_features: Sequence[int]
    scaling: Sequence[float]
    dropout: float
    quant_type: str
    blocksize: int
    base_dtype: torch.dtype
    lora_dtype: torch.dtype
    out_dtype: torch.dtype

    def outputs(self) -> list[Tensor]:
        return OPS.lora_linear(*self)[: len(self.out_features)]

    def trained(self) -> list[Tensor]:
        return [self.x, *self.lora_a, *self.lora_b, *self.bias]

    def gradients(self, cotangents: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Outputs, then the gradient of what requires one; cotangents are ones unless given."""
        ys = self.outputs()
        cotangents = [torch.ones_like(y) for y in ys] if cotangents is None else cotangents
        return [*ys, *torch.autograd.grad(ys, [t for t in self.trained() if t.requires_grad], cotangents)]


class Layers:
    """A group of layers. `inputs` are x, then every weight, A, B and bias; all but the weights in several draws."""

    def __init__(
        self, case: Case, device: Any = "cpu", group: Sequence[tuple[int, int]] | None = None, size: Size | None = None
    ):
        self.case, group = case, group or GROUPS[case.group]
        self.lead, self.K, self.blocksize, self.draws = size or SIZES[case.size]
        self.out_features, self.ranks = [n for n, _ in group], [r for _, r in group if r]
        self.scaling = [2.0, 0.3, 1.0][: len(self.ranks)]
        new = lambda *shape: torch.randn(shape, device=device) / shape[-1] ** 0.5  # noqa: E731
        drawn = lambda dtype, *shape: new(self.draws, *shape).to(dtype).requires_grad_()  # noqa: E731
        dense = [new(n, self.K) for n in self.out_features]
        self.quantized = [self._quantize(w) for w in dense] if case.quant_type != "none" else []
        decoded = [nf4.decode_reference(q, case.base) for q, _ in self.quantized]
        x = torch.randn(self.draws, *self.lead, self.K, device=device).to(case.x).requires_grad_()
        a = [drawn(case.adapter, r, self.K) for r in self.ranks]
        b = [drawn(case.adapter, n, r) for n, r in zip(self.out_features, self.ranks, strict=False)]
        bias_dtype = {"base": case.base, "lora": case.adapter}.get(case.bias)
        bias = [drawn(bias_dtype, n) for n in self.out_features] if bias_dtype else []
        self.inputs = [x, *(decoded or [w.to(case.base) for w in dense]), *a, *b, *bias]
        self.counts = [len(dense), len(a), len(b), len(bias)]
        self.keep = [torch.rand(x.shape, device=device) >= case.dropout for _ in a] if case.dropout else []
        self.cotangents = [torch.randn(self.draws, *self.lead, n, device=device) for n in self.out_features]

    def _quantize(self, w: Tensor) -> tuple[nf4.Quantized, Any]:
        """A weight as our kernels describe it, and as bitsandbytes does."""
        # As one long row: its blocks are then those of the flat weight in each of bitsandbytes' code paths.
        row, (_, _, _, _, _, quant_type, nested, *_) = w.view(1, -1), self.case
        codes, state = bnb_functional.quantize_4bit(row, None, None, self.blocksize, nested, quant_type)
        state.shape, state.dtype = w.shape, self.case.base
        more = (state.state2.code, state.state2.absmax, state.offset) if nested else ()
        return nf4.Quantized(codes, state.absmax, more, tuple(w.shape), quant_type, self.blocksize), (codes, state)

    def peft(self, *inputs: Tensor) -> list[Tensor]:
        return self._each(self._peft, inputs)

    def fused(self, *inputs: Tensor) -> list[Tensor]:
        return self._each(lambda *one: self._arguments(*one).outputs(), inputs)

    def judge(self) -> None:
        """Assert that the operator is as accurate as PEFT, in every output and every gradient."""
        cotangents = [c.to(self.case.out) for c in self.cotangents]
        # bitsandbytes would compile its plain PyTorch path, taken for odd sizes, for seconds per size.
        with torch.compiler.set_stance("force_eager"):
            values = [run(fn, leaves(self.inputs), cotangents) for fn in (self.fused, self.peft)]
            values.append(exact(self.peft, self.inputs, cotangents))
        for i, (a, b, t) in enumerate(zip(*values, strict=True)):
            assert_as_accurate(a, b, t, what=f"value {i}", largest=False)
            # A float32 result of 16-bit products may be off by one of their units in its largest error.
            coarsest = max(a.dtype, self.case.base, self.case.lora, key=lambda dtype: torch.finfo(dtype).eps)
            assert_as_accurate(a, b, t, what=f"value {i}", ulp_of=coarsest)

    def first(self) -> Arguments:
        """The operator's arguments for the first draw, what is trained as leaves."""
        weights = self.counts[0] + 1
        leaf = lambda t: t[0].detach().clone().requires_grad_()  # noqa: E731
        parts = self._split([leaf(self.inputs[0]), *self.inputs[1:weights], *map(leaf, self.inputs[weights:])])
        return self._arguments(*parts, [k[0] for k in self.keep])

    def _split(self, inputs: Sequence[Tensor]) -> list[Any]:
        parts: list[Any] = [inputs[0]]
        at = 1
        for count in self.counts:
            parts.append(list(inputs[at : at + count]))
            at += count
        return parts

    def _each(self, one: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        """`one` for every draw, stacked."""
        x, weights, *drawn = self._split(inputs)
        draws = range(self.draws)
        outs = [one(x[d], weights, *([t[d] for t in p] for p in drawn), [k[d] for k in self.keep]) for d in draws]
        return [torch.stack(ys) for ys in zip(*outs, strict=True)]

    def _arguments(self, x: Any, weights: Any, lora_a: Any, lora_b: Any, bias: Any, keep: Any) -> Arguments:
        c, q = self.case, [q for q, _ in self.quantized]
        if c.bias == "lora":
            bias = [b * s for b, s in zip(bias, self.scaling, strict=True)]
        return Arguments(
            x, [one.codes for one in q] or weights, [one.absmax for one in q], [t for one in q for t in one.nested],
            bias, lora_a, lora_b, keep, self.out_features, self.scaling, c.dropout, c.quant_type, self.blocksize,
            c.base, c.lora, c.out,
        )  # fmt: skip

    def _peft(self, x: Any, weights: Any, lora_a: Any, lora_b: Any, bias: Any, keep: Any) -> list[Tensor]:
        own, of_b = ([], bias) if self.case.bias == "lora" else (bias, [])
        scale = 1.0 / (1.0 - self.case.dropout)
        with torch.autocast(x.device.type, self.case.autocast, enabled=self.case.autocast is not None):
            results = [self._base(i, x, w, own[i] if own else None) for i, w in enumerate(weights)]
            for i, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
                dtype, four_bit = results[i].dtype, bool(self.quantized)
                # Over 4-bit layers PEFT leaves the casts to autocast.
                convert = not (four_bit and self.case.autocast)
                dropped = x.to(a.dtype) if convert else x
                dropped = dropped * keep[i] * scale if keep else dropped
                up = F.linear(F.linear(dropped, a), b, of_b[i] if of_b else None) * self.scaling[i]
                total = results[i] + (up.to(dtype) if four_bit and convert else up)
                results[i] = total if four_bit else total.to(dtype)
        return results

    def _base(self, i: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.quantized or x.dtype == torch.float64:
            return F.linear(x, weight, bias)
        codes, state = self.quantized[i][1]
        return bnb.matmul_4bit(x.to(self.case.base), codes, bias=bias, quant_state=state).to(x.dtype)


class Where(NamedTuple):
    """`low` is the 16-bit dtype to use: the interpreter multiplies bfloat16 matrices wrongly."""

    device: torch.device
    low: torch.dtype

    def plain(self, **options: Any) -> Case:
        """Everything in the 16-bit dtype, without autocast."""
        return Case(self.low, self.low, self.low, **options)

    def arguments(self, case: Case, group: Sequence[tuple[int, int]] = SMALL, size: Size = SIX) -> Arguments:
        """What is trained are leaves."""
        return Layers(case, self.device, group, size).first()


@contextlib.contextmanager
def running(parts: str) -> Iterator[Where]:
    """Where the operators run through `parts`, "torch" or "triton": without a GPU, Triton's run in the interpreter."""
    if parts == "torch" or HAS_GPU:
        yield Where(torch.device("cpu" if parts == "torch" else "cuda"), BF16)
        return
    library = torch.library.Library("fused_backend", "IMPL")
    library.impl("lora_linear", lambda *args: lora.forward(lora.TRITON, *args), "CPU")
    library.impl("lora_linear_bwd", lambda *args: lora.backward(lora.TRITON, *args), "CPU")
    try:
        yield Where(torch.device("cpu"), F16)
    finally:
        library._destroy()


def spy(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every call of `module.name`, from now on."""
    calls, original = [], getattr(module, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, called)
    return calls
