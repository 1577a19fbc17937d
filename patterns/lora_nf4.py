"""Linear layers with a low-rank adapter, over a frozen weight that is dense or in 4-bit codes.

An adapted layer is a sum, base(x) + s·linear(linear(drop(x), A), B), with casts anywhere between. What shares x is
gathered in a group and becomes one operator: q, k and v, gate and up. A 4-bit layer without an adapter is a site too.

Shapes: K in_features, N out_features, R rank.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..kernels import lora_nf4 as kernels
from ._bitsandbytes import FourBit, is_four_bit_site, read_four_bit
from ._fusion import Emitter, Fusion, Value, View, static_bytes

NAME = "lora_nf4"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MANTISSA_AND_RANGE = {torch.float16: (10, 5), torch.bfloat16: (7, 8), torch.float32: (23, 8), torch.float64: (52, 11)}


@dataclass
class _Adapter:
    """s·linear(linear(drop(x), A), B): what is added to a layer's output."""

    x: Value
    lora_a: Value
    lora_b: Value
    scaling: float
    bias: Value | None
    dropout: Value | None
    dtype: torch.dtype
    values: list[Value]


@dataclass
class _Layer:
    """One layer as the operator needs it. `site` is where it is reported, `root` what the operator replaces."""

    site: Value
    root: Value
    x: Value
    base: Value
    four_bit: FourBit | None
    weight: Value | None
    bias: Value | None
    base_dtype: torch.dtype
    adapter: _Adapter | None
    interior: list[Value] = field(default_factory=list)

    def kind(self) -> tuple[Any, ...]:
        """Layers of one kind and one x can share an operator."""
        a, q = self.adapter, self.four_bit
        bias = None if self.bias is None else self.bias.dtype
        base = ("none", self.weight.dtype) if q is None else (q.quant_type, q.blocksize, bool(q.nested))
        adapter = None if a is None else (a.dtype, a.dropout is not None and a.dropout.args[1], a.bias is None)
        # The gradients of a group are computed together, so its layers must agree in having one.
        return id(self.x), base, self.base_dtype, bias, adapter, self.root.dtype, self.root.requires_grad


# --- reading -------------------------------------------------------------------------------------------------------


def _sources(value: Value) -> list[Value]:
    """The value and what it may be computed from by one cast: the outermost cast, then those that lose nothing."""
    found = [value]
    while value.op == "convert" and isinstance(value.args[0], Value):
        inner = value.args[0]
        if len(found) > 1 and not _keeps_all(inner.dtype, value.dtype):
            break
        found.append(inner)
        value = inner
    return found


def _keeps_all(source: torch.dtype | None, target: torch.dtype | None) -> bool:
    a, b = _MANTISSA_AND_RANGE.get(source), _MANTISSA_AND_RANGE.get(target)  # type: ignore[arg-type]
    return a is not None and b is not None and a[0] <= b[0] and a[1] <= b[1]


def _uncast(value: Value, passed: list[Value]) -> Value:
    """What is under casts between floating dtypes; the casts are added to `passed`."""
    while value.op == "convert" and value.dtype in _FLOATS and value.args[0].dtype in _FLOATS:
        passed.append(value)
        value = value.args[0]
    return value


def _adapter(value: Value) -> _Adapter | None:
    """The adapter whose output, cast or not, is `value`."""
    values: list[Value] = []
    value, scaling = _uncast(value, values), 1.0
    if value.op == "mul" and isinstance(value.args[1], (int, float)):
        values.append(value)
        scaling, value = float(value.args[1]), _uncast(value.args[0], values)
    if value.op != "linear":
        return None
    outer, inner = value, _uncast(value.args[0], values)
    values.append(outer)
    if inner.op != "linear" or inner.args[2] is not None or inner.dtype is None:
        return None
    values.append(inner)
    x, dropout = inner.args[0], None
    under = _uncast(x, dropped := [])
    if under.op == "dropout":
        # A cast after dropout: the mask falls on the same elements, so the operator may cast first.
        values += [*dropped, under]
        x, dropout = under.args[0], under
    lora_a, lora_b = (_sources(w)[-1] for w in (inner.args[1], outer.args[1]))
    if not _is_low_rank(lora_a, lora_b):
        return None
    return _Adapter(x, lora_a, lora_b, scaling, outer.args[2], dropout, inner.dtype, values)


def _is_low_rank(lora_a: Value, lora_b: Value) -> bool:
    shapes = (*lora_a.shape, *lora_b.shape)
    if len(lora_a.shape) != 2 or len(lora_b.shape) != 2 or not all(isinstance(n, int) for n in shapes):
        return False
    trained = lora_a.requires_grad or lora_b.requires_grad
    return trained and lora_a.shape[0] == lora_b.shape[1] and lora_a.shape[0] < max(lora_a.shape[1], lora_b.shape[0])


class _Reader:
    """Finds the layers of one graph."""

    def __init__(self, view: View):
        self.view = view
        self.four_bits: dict[int, FourBit | str] = {}
        self.calls: dict[int, Node] = {}
        for value in view.values:
            for node in value.nodes:
                if node.op == "call_function" and is_four_bit_site(node):
                    found = read_four_bit(node)
                    result = value if isinstance(found, str) else view.of(found.result)
                    self.four_bits[id(result)], self.calls[id(result)] = found, node

    def layers(self) -> Iterator[_Layer | tuple[Value, str]]:
        """Every site: a layer, or why it is none."""
        taken: set[int] = set()
        for value in list(self.view.values):
            if value.op == "add" and value.nodes and all(isinstance(a, Value) for a in value.args):
                for base, up in (value.args, value.args[::-1]):
                    adapter = _adapter(up)
                    if adapter is None or id(adapter.values[-1]) in taken:
                        continue
                    layer = self._adapted(value, base, adapter)
                    if isinstance(layer, _Layer):
                        taken |= {id(adapter.values[-1]), id(layer.base)}
                        yield layer
                        break
        yield from self._rest(taken)

    def _rest(self, taken: set[int]) -> Iterator[_Layer | tuple[Value, str]]:
        """4-bit layers without an adapter, and adapters that are part of no layer."""
        for value in list(self.view.values):
            if value.op == "linear" and value.nodes and (adapter := _adapter(value)) is not None:
                if adapter.values[-1] is not None and id(adapter.values[-1]) not in taken and adapter.scaling == 1.0:
                    yield value, self._why_not(value)
            elif value.op == "linear" and value.nodes and _from_embedding(value):
                yield value, "an adapter of an embedding is a gather, not a product"
            found = self.four_bits.get(id(value))
            if isinstance(found, str):
                yield value, found
            elif found is not None and id(value) not in taken:
                layer = self._base(value, value, None)
                yield (value, layer) if isinstance(layer, str) else layer

    def _why_not(self, outer: Value) -> str:
        """The reason nearest to the sum that an adapter ends in."""
        reason = "the adapter's output is not added to a linear layer's"
        reached = {id(outer)}
        for value in self.view.values:
            if not any(id(i) in reached for i in value.inputs()):
                continue
            if value.op in ("convert", "mul"):
                reached.add(id(value))
            elif value.op == "add" and all(isinstance(a, Value) for a in value.args):
                for base, up in (value.args, value.args[::-1]):
                    adapter = _adapter(up)
                    if adapter is not None and adapter.values[-1] is not outer and outer in adapter.values:
                        layer = self._adapted(value, base, adapter)
                        reason = layer if isinstance(layer, str) else reason
        return reason

    def _adapted(self, total: Value, base: Value, adapter: _Adapter) -> _Layer | str:
        """The layer whose output is `total` = base + adapter."""
        passed: list[Value] = []
        under = _uncast(base, passed)
        layer = self._base(total, under, adapter)
        if isinstance(layer, str):
            return layer
        users = {id(self.view.of(u)): self.view.of(u) for u in self.view.users(total) if u.op != "output"}
        returned = any(u.op == "output" for u in self.view.users(total))
        if len(users) == 1 and not returned and (only := next(iter(users.values()))).op == "convert":
            # `total` is only an intermediate: 16-bit layers with float32 adapters are added in float32 and cast back.
            if only.dtype in _FLOATS and only.nodes:
                layer.root = only
                passed.append(total)
        layer.interior += [total, *passed, *adapter.values]
        return layer

    def _base(self, root: Value, base: Value, adapter: _Adapter | None) -> _Layer | str:
        """The frozen layer, with or without what is added to it."""
        four_bit = self.four_bits.get(id(base))
        if isinstance(four_bit, str):
            return four_bit
        if four_bit is not None:
            x, bias, weight = self.view.of(four_bit.x), four_bit.bias, None
            bias = None if bias is None else self.view.of(bias)
        elif base.op == "linear":
            x, weight, bias = base.args
        else:
            name = base.args[0] if base.op == "opaque" else base.op
            return f"the base layer is {name}, neither a linear layer nor a 4-bit product"
        reason = _refuse_base(x, weight, bias, four_bit, adapter)
        if reason is not None:
            return reason
        source = x
        if adapter is not None:
            ours = {id(v) for v in _sources(adapter.x)}
            common = [v for v in _sources(x) if id(v) in ours]
            if not common:
                return f"the adapter reads {adapter.x} and the layer {x}"
            source = common[0]
        return _Layer(root, root, source, base, four_bit, weight, bias, x.dtype, adapter, [base])  # type: ignore[arg-type]


def _refuse_base(
    x: Value, weight: Value | None, bias: Value | None, four_bit: FourBit | None, adapter: _Adapter | None
) -> str | None:
    if x.dtype not in _FLOATS or not x.shape or not isinstance(x.shape[-1], int):
        return f"no kernel for an input of {x.dtype} {x.shape}"
    if weight is not None:
        if len(weight.shape) != 2 or not all(isinstance(n, int) for n in weight.shape):
            return f"the base layer's weight has shape {weight.shape}"
        if weight.requires_grad:
            return "the base layer's weight is trained as well"
        if weight.dtype != x.dtype:
            return f"no kernel for an input of {x.dtype} with a weight of {weight.dtype}"
    if four_bit is not None:
        if not four_bit.differentiable and (x.requires_grad or (bias is not None and bias.requires_grad)):
            return "the base product is computed without gradients, and something in it has one"
        if adapter is None and not four_bit.differentiable:
            return "a 4-bit product without an adapter or a gradient is left to bitsandbytes"
        if x.dtype == torch.float64:
            return "bitsandbytes has no float64"
    N, K = four_bit.shape if four_bit is not None else weight.shape  # type: ignore[union-attr]
    if K != x.shape[-1]:
        return f"the input has {x.shape[-1]} features and the weight {K}"
    if adapter is not None and (adapter.lora_a.shape[1], adapter.lora_b.shape[0]) != (K, N):
        return f"the adapter maps {adapter.lora_a.shape[1]} to {adapter.lora_b.shape[0]} features, the layer {K} to {N}"
    biases = [b for b in (bias, adapter.bias if adapter else None) if b is not None]
    if any(len(b.shape) != 1 or b.shape[0] != N or b.dtype not in _FLOATS for b in biases):
        return f"the bias has shape {biases[0].shape}"
    return None


def _from_embedding(value: Value) -> bool:
    source = _uncast(value.args[0], [])
    named = source.op == "opaque" and source.args[0] == "embedding"
    return named and value.args[1].requires_grad and source.shape[-1] < value.shape[-1]


# --- writing -------------------------------------------------------------------------------------------------------


def fuse_lora(view: View) -> None:
    """Every adapted or 4-bit linear layer; those that share x together."""
    reader = _Reader(view)
    groups: dict[Any, list[_Layer]] = {}
    for found in reader.layers():
        if not isinstance(found, _Layer):
            view.refused(NAME, *found)
            continue
        reason = view.unsafe(found.root, found.interior)
        if reason is not None:
            view.refused(NAME, found.site, reason)
            continue
        groups.setdefault(found.kind(), []).append(found)
    for group in groups.values():
        if _replace(view, reader, group) is None:
            continue
        for layer in group:  # together they do not fit; perhaps each alone
            reason = _replace(view, reader, [layer])
            if reason is not None:
                view.refused(NAME, layer.site, reason)


def _replace(view: View, reader: _Reader, group: list[_Layer]) -> str | None:
    reason = view.replace(NAME, [layer.root for layer in group], lambda emit: _emit(view, group, emit))
    if reason is not None:
        return reason
    saved = static_bytes([group[0].x]) if any(layer.adapter for layer in group) else 0
    for i, layer in enumerate(group):
        call = reader.calls.get(id(layer.base))
        if call is not None:
            view.pure(call)
        view.fused(NAME, layer.root, saved if i == 0 else 0, _words(group))
    return None


def _words(group: list[_Layer]) -> str:
    """What the report says of a fused layer: the form of its weight, its group, the kernel that was measured best."""
    first, tokens = group[0], 1
    for n in first.x.shape[:-1]:
        tokens *= n if isinstance(n, int) else (n.node.hint or 1)
    q = first.four_bit
    words = "dense" if q is None else q.quant_type + (", double quantised" if q.nested else "")
    if first.adapter is None:
        words += ", no adapter"
    if len(group) > 1:
        words += f", {len(group)} share x"
    if q is None:
        return words
    kernel = kernels.choice(
        first.x.fake.device, q.shape, q.quant_type, q.blocksize, bool(q.nested), tokens, first.base_dtype
    )
    return f"{words}; {kernel}"


def _emit(view: View, group: list[_Layer], emit: Emitter) -> list[Node]:
    first = group[0]
    adapters = [layer.adapter for layer in group if layer.adapter is not None]
    dropout, keep = 0.0, []
    if adapters and adapters[0].dropout is not None:
        dropout = adapters[0].dropout.args[1]
        for adapter in adapters:
            source = adapter.dropout.args[0]  # type: ignore[union-attr]
            # The operator that dropout itself becomes: it draws what would have been drawn.
            keep.append(emit.item(emit.call(torch.native_dropout, source, dropout, True), 1))
    fours = [layer.four_bit for layer in group if layer.four_bit is not None]
    quant_type, blocksize = (fours[0].quant_type, fours[0].blocksize) if fours else ("none", 0)
    weights = [_stored(q.codes) for q in fours] or [layer.weight for layer in group]
    sizes = [q.shape[0] for q in fours] or [layer.weight.shape[0] for layer in group]  # type: ignore[union-attr]
    biases = [_bias(layer, emit) for layer in group]
    out = emit.call(
        kernels.lora_linear, first.x, weights, [q.absmax for q in fours], [n for q in fours for n in q.nested],
        [b for b in biases if b is not None], [a.lora_a for a in adapters], [a.lora_b for a in adapters], keep, sizes,
        [a.scaling for a in adapters], dropout, quant_type, blocksize, first.base_dtype,
        adapters[0].dtype if adapters else first.base_dtype, first.root.dtype,
    )  # fmt: skip
    return [emit.item(out, i) for i in range(len(group))]


def _stored(codes: Node) -> Node:
    """The codes as they are stored: a view of them would tie the operator to the place where it is made."""
    while codes.op == "call_method" and codes.target in ("view", "reshape", "t") and isinstance(codes.args[0], Node):
        if codes.args[0].meta["example_value"].dtype != codes.meta["example_value"].dtype:
            break
        codes = codes.args[0]
    return codes


def _bias(layer: _Layer, emit: Emitter) -> Node | Value | None:
    """The layer's bias, the adapter's own in it: s·(u·Bᵀ + b) adds s·b to every row."""
    adapter = layer.adapter
    if adapter is None or adapter.bias is None:
        return layer.bias
    own = emit.call(operator.mul, adapter.bias, adapter.scaling) if adapter.scaling != 1.0 else adapter.bias
    return own if layer.bias is None else emit.call(operator.add, layer.bias, own)


FUSION = Fusion(
    name=NAME,
    anchor=lambda value: False,  # the pass finds its sites itself
    passes=(fuse_lora,),
    priority=5,
)
