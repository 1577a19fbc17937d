"""Linear layers that share x, each frozen (dense, or 4-bit codes) and each with a low-rank adapter.

One operator serves a group: q, k and v, gate and up, or one layer alone, with or without adapters. The base product
is the vendor's GEMM over a weight decoded into a buffer that lives as long as the call, or for few tokens a GEMM that
decodes in registers (`_nf4.py`); the adapter rides along as extra columns of that GEMM or as one more pass over the
output (`_low_rank.py`).

Math: y_i = x·W_iᵀ + bias_i + s_i (drop_i(x)·A_iᵀ)·B_iᵀ; see derivations/lora_nf4.py.
Shapes: x (..., K), W_i (N_i, K), A_i (R_i, K), B_i (N_i, R_i), y_i (..., N_i).
Numerics: W is rounded once, to `base_dtype`, as bitsandbytes does; A's and B's products run in `lora_dtype`; both
products are accumulated in float32 and their sum is rounded once where the base and the adapter share a GEMM.
Cost: forward 2 T (K N + R (K + N)) FLOPs a layer, backward twice the adapter's part and once the base's. Saved: x,
u = drop(x)·Aᵀ (T, R), one bit per element for dropout.
Source: Hu et al., LoRA, 2021, section 4; Dettmers et al., QLoRA, 2023, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _lora as lora
from ._crossover import Kind, prefers_small
from ._op import define_backward, define_op, nbytes, refuse_double_backward

QUANT_TYPES = ("none", "nf4", "fp4")
_SHARED = (
    "Tensor[] weight, Tensor[] absmax, Tensor[] nested, {bias}Tensor[] lora_a, Tensor[] lora_b, {keep}"
    "int[] out_features, float[] scaling, float dropout, str quant_type, int blocksize, ScalarType base_dtype, "
    "ScalarType lora_dtype"
)


def _wrong(rule: str, came: Any, way_out: str) -> ValueError:
    return ValueError(f'lora_nf4: {rule}, got {came}. {way_out} or disable with options={{"fusions": "-lora_nf4"}}')


def _check(
    weight: Sequence[Tensor], absmax: Sequence[Tensor], nested: Sequence[Tensor], bias: Sequence[Tensor],
    lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], keep: Sequence[Tensor], out_features: Sequence[int],
    scaling: Sequence[float], dropout: float, quant_type: str,
) -> None:  # fmt: skip
    """The rules that compare no sizes of x, for `fake` may not."""
    n = len(weight)
    if quant_type not in QUANT_TYPES:
        raise _wrong(f"quant_type must be one of {', '.join(QUANT_TYPES)}", repr(quant_type), "Choose one")
    if n == 0 or len(out_features) != n:
        raise _wrong("there must be one out_features for each weight", f"{len(out_features)} for {n}", "Give both")
    if len(absmax) != (0 if quant_type == "none" else n) or len(nested) not in (0, 3 * n):
        came = f"{len(absmax)} absmax and {len(nested)} nested tensors for {n} {quant_type} weights"
        raise _wrong("4-bit weights take one absmax each, and three tensors more if it is quantised", came, "Give all")
    if any(len(some) not in (0, n) for some in (bias, lora_a, lora_b, keep)) or len(lora_a) != len(lora_b):
        came = f"{len(bias)}, {len(lora_a)}, {len(lora_b)}, {len(keep)} for {n} weights"
        raise _wrong("bias, lora_a, lora_b and keep are each given for all layers of a group or none", came, "Split it")
    if len(scaling) != len(lora_a):
        raise _wrong("there must be one scaling for each adapter", f"{len(scaling)} for {len(lora_a)}", "Give it")
    if not 0.0 <= dropout < 1.0:
        raise _wrong("dropout must be in [0, 1)", dropout, "With 1 the adapter is off: leave it out")


def _fake(
    x, weight, absmax, nested, bias, lora_a, lora_b, keep, out_features, scaling, dropout, quant_type, blocksize,
    base_dtype, lora_dtype, out_dtype,
):  # fmt: skip
    _check(weight, absmax, nested, bias, lora_a, lora_b, keep, out_features, scaling, dropout, quant_type)
    outs = [x.new_empty((*x.shape[:-1], n), dtype=out_dtype) for n in out_features]
    tokens = math.prod(x.shape[:-1])
    if lora_a:
        outs.append(x.new_empty((tokens, sum(a.shape[0] for a in lora_a)), dtype=lora_dtype))
    return outs + [x.new_empty((tokens, (x.shape[-1] + 7) // 8), dtype=torch.uint8) for _ in keep]


def _flops(
    x, weight, absmax, nested, bias, lora_a, lora_b, keep, out_features, scaling, *rest: Any, **kwargs: Any
) -> int:  # fmt: skip
    tokens, K = math.prod(x.shape[:-1]), x.shape[-1]
    ranks = [a.shape[0] for a in lora_a]
    return 2 * tokens * (sum(n * K for n in out_features) + sum(r * K for r in ranks) + _thin(ranks, out_features))


def _thin(ranks: Sequence[int], out_features: Sequence[int]) -> int:
    return sum(r * n for r, n in zip(ranks, out_features, strict=False))


def _bytes_moved(
    x, weight, absmax, nested, bias, lora_a, lora_b, keep, out_features, scaling, dropout, quant_type, blocksize,
    base_dtype, lora_dtype, out_dtype,
) -> int:  # fmt: skip
    """x read, y written, weights read once and, where they are decoded, written and read once more."""
    decoded = 0 if quant_type == "none" else 2 * sum(out_features) * x.shape[-1] * base_dtype.itemsize
    ys = math.prod(x.shape[:-1]) * sum(out_features) * out_dtype.itemsize
    return nbytes(x, *weight, *absmax, *bias, *lora_a, *lora_b, *keep) + decoded + ys


def _workspace(
    x, weight, absmax, nested, bias, lora_a, lora_b, keep, out_features, scaling, dropout, quant_type, blocksize,
    base_dtype, lora_dtype, out_dtype,
) -> int:  # fmt: skip
    """A decoded weight and, where the adapter rides along, x beside u."""
    wide = x.shape[-1] + lora.low_rank.MAX_RANK
    return 0 if quant_type == "none" else (max(out_features) + math.prod(x.shape[:-1])) * wide * base_dtype.itemsize


def _forward(on: lora.On, *args: Any) -> list[Tensor]:
    _check(*args[1:-4])
    return lora.forward(on, *args)


lora_linear = define_op(
    "lora_linear(Tensor x, " + _SHARED.format(bias="Tensor[] bias, ", keep="Tensor[] keep, ")
    + ", ScalarType out_dtype) -> Tensor[]",
    reference=lambda *args: _forward(lora.TORCH, *args),
    triton=lambda *args: _forward(lora.TRITON, *args),
    fake=_fake,
    flops=_flops,
    bytes_moved=_bytes_moved,
    workspace=_workspace,
)  # fmt: skip


def _fake_bwd(
    dy, x, u, bits, weight, absmax, nested, lora_a, lora_b, out_features, scaling, dropout, quant_type, blocksize,
    base_dtype, lora_dtype, in_features, x_dtype, bias_dtype, needs_dx, needs_adapters, needs_bias,
):  # fmt: skip
    first = dy[0]
    grads = [first.new_empty((*first.shape[:-1], in_features), dtype=x_dtype)] if needs_dx else []
    if needs_adapters:
        grads += [p.new_empty(p.shape) for p in (*lora_a, *lora_b)]
    return grads + ([first.new_empty((n,), dtype=bias_dtype) for n in out_features] if needs_bias else [])


def _flops_bwd(
    dy, x, u, bits, weight, absmax, nested, lora_a, lora_b, out_features, scaling, dropout, quant_type, blocksize,
    base_dtype, lora_dtype, in_features, x_dtype, bias_dtype, needs_dx, needs_adapters, needs_bias, **kwargs: Any,
) -> int:  # fmt: skip
    tokens, K, ranks = math.prod(dy[0].shape[:-1]), in_features, [a.shape[0] for a in lora_a]
    through_a, through_b = K * sum(ranks), _thin(ranks, out_features)
    base = needs_dx * (sum(n * K for n in out_features) + through_a)
    return 2 * tokens * (base + through_b * (1 + needs_adapters) + through_a * needs_adapters)


def _bytes_moved_bwd(
    dy, x, u, bits, weight, absmax, nested, lora_a, lora_b, out_features, scaling, dropout, quant_type, blocksize,
    base_dtype, lora_dtype, in_features, x_dtype, bias_dtype, needs_dx, needs_adapters, needs_bias,
) -> int:  # fmt: skip
    tokens = math.prod(dy[0].shape[:-1])
    passes = needs_dx + (bool(lora_a) and (needs_dx or needs_adapters)) + needs_adapters + needs_bias
    decoded = 0 if quant_type == "none" else 2 * sum(out_features) * in_features * base_dtype.itemsize
    dx = tokens * in_features * x_dtype.itemsize * needs_dx
    saved = nbytes(x, u) if needs_adapters else 0
    return passes * nbytes(*dy) + saved + nbytes(*bits, *lora_a, *lora_b) + needs_dx * (nbytes(*weight) + decoded) + dx


def _workspace_bwd(
    dy, x, u, bits, weight, absmax, nested, lora_a, lora_b, out_features, scaling, dropout, quant_type, blocksize,
    base_dtype, lora_dtype, in_features, *rest: Any,
) -> int:  # fmt: skip
    """A decoded weight and, where the adapter rides along, dy beside v."""
    if quant_type == "none":
        return 0
    beside = math.prod(dy[0].shape[:-1]) if len(dy) == 1 and out_features[0] < in_features else 0
    return (max(out_features) * in_features + beside * out_features[0]) * base_dtype.itemsize


lora_linear_bwd = define_op(
    "lora_linear_bwd(Tensor[] dy, Tensor? x, Tensor? u, Tensor[] bits, " + _SHARED.format(bias="", keep="")
    + ", int in_features, ScalarType x_dtype, ScalarType bias_dtype, bool needs_dx, bool needs_adapters, "
    "bool needs_bias) -> Tensor[]",
    reference=lambda *args: lora.backward(lora.TORCH, *args),
    triton=lambda *args: lora.backward(lora.TRITON, *args),
    fake=_fake_bwd,
    flops=_flops_bwd,
    bytes_moved=_bytes_moved_bwd,
    workspace=_workspace_bwd,
)  # fmt: skip
refuse_double_backward(lora_linear_bwd)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    (
        x, weight, absmax, nested, bias, lora_a, lora_b, keep, out_features, scaling, dropout, quant_type, blocksize,
        base_dtype, lora_dtype, _,
    ) = inputs  # fmt: skip
    n = len(out_features)
    adapted = any(p.requires_grad for p in (*lora_a, *lora_b))
    saved = [x, output[n]] if adapted else []
    ctx.save_for_backward(*saved, *output[n + 1 :], *weight, *absmax, *nested, *lora_a, *lora_b)
    ctx.counts = [len(saved), len(keep), n, len(absmax), len(nested), len(lora_a), len(lora_b)]
    ctx.options = [out_features, scaling, dropout, quant_type, blocksize, base_dtype, lora_dtype, x.shape[-1], x.dtype]
    ctx.bias_dtype = bias[0].dtype if bias else base_dtype


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    tensors, parts = list(ctx.saved_tensors), []
    for count in ctx.counts:
        parts.append(tensors[:count])
        tensors = tensors[count:]
    saved, bits, weight, absmax, nested, lora_a, lora_b = parts
    x, u = saved or (None, None)
    needs = ctx.needs_input_grad
    needs_dx, needs_bias, needs_adapters = needs[0], any(needs[4]), any((*needs[5], *needs[6]))
    n = len(weight)
    out = lora_linear_bwd(
        grads[:n], x, u, bits, weight, absmax, nested, lora_a, lora_b, *ctx.options, ctx.bias_dtype, needs_dx,
        needs_adapters, needs_bias,
    )  # fmt: skip
    dx = out.pop(0) if needs_dx else None
    das, dbs = ([out.pop(0) for _ in range(n)] if needs_adapters else [None] * len(lora_a) for _ in range(2))
    dbias = out if needs_bias else [None] * len(needs[4])
    frozen = [[None] * len(part) for part in (weight, absmax, nested)]
    # Torch takes an empty list of numbers for one of tensors, and wants a list back.
    scaling = None if lora_a else []
    return dx, *frozen, dbias, das, dbs, [None] * len(bits), None, scaling, *[None] * 6


define_backward(lora_linear, setup_context=_setup_context, backward=_backward)


def choice(
    device: torch.device, shape: tuple[int, int], quant_type: str, blocksize: int, nested: bool, tokens: int,
    dtype: torch.dtype,
) -> str:  # fmt: skip
    """How a 4-bit product of so many tokens is computed, in words: on a GPU the faster of two, as measured."""
    small = prefers_small(device, Kind(*shape, quant_type, blocksize, nested), tokens, dtype)
    return "decoded in registers" if small else "decoded, then GEMM"
