"""An adapter and the layer it belongs to: what they are in a graph, and whether the operator can compute them.

An adapter is s·linear(linear(drop(x), A), B) with casts anywhere between; a layer is a linear with a frozen weight,
dense or in 4-bit codes. Which sums of the two a graph holds is read in `lora_nf4.py`.

Shapes: K in_features, N out_features, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ._bitsandbytes import FourBit
from ._fusion import Value

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MANTISSA_AND_RANGE = {torch.float16: (10, 5), torch.bfloat16: (7, 8), torch.float32: (23, 8), torch.float64: (52, 11)}


@dataclass
class Adapter:
    """s·linear(linear(x, A), B) + bias: what is added to a layer's output. x may have gone through dropout.

    `values` lead from x to it, `casts` from the stored A and B to those multiplied by. `transposed`: are they stored as
    (K, R) and (R, N)?
    """

    x: Value
    lora_a: Value
    lora_b: Value
    transposed: tuple[bool, bool]
    scaling: float
    bias: Value | None
    inner: Value
    outer: Value
    values: list[Value]
    casts: list[Value]

    def shape(self) -> tuple[int, int, int]:
        """K, R, N."""
        (r, k), (n, _) = (
            w.shape[::-1] if turned else w.shape
            for w, turned in zip((self.lora_a, self.lora_b), self.transposed, strict=True)
        )
        return k, r, n


@dataclass
class Layer:
    """One layer as the operator needs it.

    `site` is where it is reported, `root` what the operator replaces, `interior` all that is computed on the way,
    `drawn_once` those among it that depend on the random numbers of `dropout`. `transposed`: is W stored as (K, N)?
    """

    site: Value
    root: Value
    x: Value
    base: Value
    four_bit: FourBit | None
    weight: Value | None
    transposed: bool
    bias: Value | None
    base_dtype: torch.dtype
    adapter: Adapter | None
    interior: list[Value]
    dropout: Value | None = None
    drawn_once: list[Value] = field(default_factory=list)

    def shape(self) -> tuple[int, int]:
        """N, K."""
        if self.four_bit is not None:
            return self.four_bit.shape
        assert self.weight is not None
        n, k = self.weight.shape[::-1] if self.transposed else self.weight.shape
        return n, k

    def kind(self) -> tuple[Any, ...]:
        """Layers of one kind and one x can share an operator."""
        a, q = self.adapter, self.four_bit
        base = None if q is None else (q.quant_type, q.blocksize, bool(q.nested))
        adapter = None if a is None else (a.inner.dtype, self.dropout and self.dropout.args[1])
        biases = [b and b.dtype for b in (self.bias, a and a.bias)]
        # The gradients of a group are computed together, so its layers must agree in having one.
        return id(self.x), base, self.base_dtype, adapter, *biases, self.root.dtype, self.root.requires_grad


def _sources(value: Value, all_lossless: bool = False) -> list[Value]:
    """The value and what it is computed from by one cast: casts that lose nothing, under one that may."""
    found = [value]
    while value.op == "convert" and isinstance(value.args[0], Value):
        inner = value.args[0]
        if (all_lossless or len(found) > 1) and not _keeps_all(inner.dtype, value.dtype):
            break
        found.append(inner)
        value = inner
    return found


def _keeps_all(source: torch.dtype | None, target: torch.dtype | None) -> bool:
    a, b = _MANTISSA_AND_RANGE.get(source), _MANTISSA_AND_RANGE.get(target)  # type: ignore[arg-type]
    return a is not None and b is not None and a[0] <= b[0] and a[1] <= b[1]


def uncast(value: Value, passed: list[Value] | None = None) -> Value:
    """What is under casts between floating dtypes; the casts are added to `passed`."""
    while value.op == "convert" and value.dtype in FLOATS and value.args[0].dtype in FLOATS:
        if passed is not None:
            passed.append(value)
        value = value.args[0]
    return value


def is_product(value: Value) -> bool:
    """x·wᵀ, or x·w with a matrix w."""
    return value.op == "linear" or (value.op == "matmul" and len(value.args[1].shape) == 2)


def unscaled(value: Value, passed: list[Value] | None = None) -> tuple[Value, float]:
    value = uncast(value, passed)
    if value.op != "mul" or not isinstance(value.args[1], (int, float)):
        return value, 1.0
    if passed is not None:
        passed.append(value)
    return uncast(value.args[0], passed), float(value.args[1])


def read_adapter(value: Value) -> Adapter | None:
    """The adapter whose output, cast or not, is `value`."""
    values: list[Value] = []
    outer, scaling = unscaled(value, values)
    if not is_product(outer):
        return None
    inner = uncast(outer.args[0], values)
    if not is_product(inner) or bias_of(inner) is not None:
        return None
    (*casts_of_a, lora_a), (*casts_of_b, lora_b) = (_sources(product.args[1]) for product in (inner, outer))
    found = Adapter(
        inner.args[0], lora_a, lora_b, (inner.op == "matmul", outer.op == "matmul"), scaling, bias_of(outer), inner,
        outer, [*values, outer, inner], [*casts_of_a, *casts_of_b],
    )  # fmt: skip
    return found if _is_low_rank(found) else None


def bias_of(product: Value) -> Value | None:
    return product.args[2] if product.op == "linear" else None


def _is_low_rank(adapter: Adapter) -> bool:
    a, b = adapter.lora_a, adapter.lora_b
    if len(a.shape) != 2 or len(b.shape) != 2 or not all(isinstance(n, int) for n in (*a.shape, *b.shape)):
        return False
    k, r, n = adapter.shape()
    return (a.requires_grad or b.requires_grad) and r < max(k, n)


def joined(layer: Layer, adapter: Adapter) -> Layer | str:
    """The layer reading what its adapter reads as well, each through casts of its own or the adapter by dropout."""
    met = _meet(_sources(layer.x), _sources(adapter.x))
    if met is None:
        casts: list[Value] = []
        under = uncast(adapter.x, casts)
        if under.op == "dropout":
            # A cast after dropout: the mask falls on the same elements, so the operator may cast first.
            met = _meet(_sources(layer.x), _sources(under.args[0], all_lossless=bool(casts)))
            layer.dropout, layer.drawn_once = under, [under, *casts, *adapter.values]
            layer.interior += [under, *casts]
    if met is None:
        return f"the adapter reads {adapter.x} and the layer {layer.x}"
    if layer.dropout is not None and not layer.dropout.args[1] < 1:
        return "no kernel for a dropout of everything"
    layer.x = met[0]
    layer.interior += met[1:]
    return layer


def _meet(ours: list[Value], theirs: list[Value]) -> list[Value] | None:
    """The first of `ours` that is among `theirs`, then the casts passed on both ways to it."""
    for i, one in enumerate(ours):
        for j, other in enumerate(theirs):
            if one is other:
                return [one, *ours[:i], *theirs[:j]]
    return None


def refuse_base(layer: Layer, adapter: Adapter | None) -> str | None:
    """Why the operator cannot compute the frozen part of a layer, or not together with this adapter."""
    x, weight, four_bit = layer.x, layer.weight, layer.four_bit
    if x.dtype not in FLOATS or not x.shape or not isinstance(x.shape[-1], int):
        return f"no kernel for an input of {x.dtype} {x.shape}"
    if weight is not None:
        if len(weight.shape) != 2 or not all(isinstance(n, int) for n in weight.shape):
            return f"the base layer's weight has shape {weight.shape}"
        if weight.requires_grad:
            return "the base layer's weight is trained as well"
        if weight.dtype != x.dtype:
            return f"no kernel for an input of {x.dtype} with a weight of {weight.dtype}"
    if four_bit is not None and not four_bit.differentiable:
        if x.requires_grad or (layer.bias is not None and layer.bias.requires_grad):
            return "the base product is computed without gradients, and something in it has one"
        if adapter is None:
            return "a 4-bit product without an adapter or a gradient is left to bitsandbytes"
    N, K = layer.shape()
    if x.shape[-1] != K:
        return f"the input has {x.shape[-1]} features and the weight {K}"
    if adapter is not None:
        k, _, n = adapter.shape()
        if (k, n) != (K, N):
            return f"the adapter maps {k} to {n} features, the layer {K} to {N}"
        if adapter.inner.dtype not in FLOATS or adapter.inner.dtype != adapter.outer.dtype:
            return f"the adapter's products are in different dtypes, {adapter.inner.dtype} and {adapter.outer.dtype}"
    for bias in (layer.bias, adapter and adapter.bias):
        if bias is not None and (len(bias.shape) != 1 or bias.shape[0] != N or bias.dtype not in FLOATS):
            return f"the bias has shape {bias.shape}"
    return None


def is_gather(value: Value) -> bool:
    return value.op == "opaque" and value.args[0] == "embedding"
