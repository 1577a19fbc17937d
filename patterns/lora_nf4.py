"""Linear layers with a low-rank adapter, over a frozen weight that is dense or in 4-bit codes.

An adapted layer is a sum, base(x) + s·linear(linear(drop(x), A), B), with casts anywhere between. What shares x is
gathered in a group and becomes one operator: q, k and v, gate and up. A 4-bit layer without an adapter is a site too.
What an adapter and a layer look like is in `_adapters.py`, what a 4-bit product looks like in `_bitsandbytes.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..kernels import lora_nf4 as kernels
from ._adapters import (
    FLOATS,
    Adapter,
    Layer,
    bias_of,
    is_gather,
    is_product,
    joined,
    read_adapter,
    refuse_base,
    uncast,
    unscaled,
)
from ._bitsandbytes import FourBit, is_four_bit_site, read_four_bit
from ._fusion import Emitter, Fusion, Value, View, static_bytes

NAME = "lora_nf4"
# Parts of the names of functions that draw random numbers.
_DRAWS = ("drop", "rand", "bernoulli", "normal", "uniform", "exponential", "cauchy", "geometric", "poisson", "multinom")
_READ = "lora_nf4_read"

# --- reading -------------------------------------------------------------------------------------------------------


class _Reader:
    """Finds the layers of one graph."""

    def __init__(self, view: View):
        self.view = view
        self.four_bits: dict[int, FourBit | str] = {}
        self.calls: dict[int, Node] = {}
        self.reported: set[int] = set()  # products that are part of a layer, or of the reason why there is none
        self.refused: set[int] = set()  # the frozen part of sums that are no layers
        for value in view.values:
            for node in value.nodes:
                if node.op == "call_function" and is_four_bit_site(node) and not node.meta.get(_READ):
                    _mark_bodies(node)
                    found = read_four_bit(node)
                    result = value if isinstance(found, str) else view.of(found.result)
                    self.four_bits[id(result)], self.calls[id(result)] = found, node

    def layers(self) -> Iterator[Layer | tuple[Value, str]]:
        """Every site: a layer, or why it is none."""
        values = list(self.view.values)
        for value in values:
            if value.op == "add" and value.nodes and all(isinstance(a, Value) for a in value.args):
                yield from self._sum(value)
        for value in values:
            if id(value) in self.reported or not value.nodes:
                continue
            if is_product(value) and read_adapter(value) is not None:
                if (way := self._way_to_a_layer(value)) is not None:
                    yield value, f"the adapter's output meets the layer's through {way}, not only a sum"
            elif (found := self.four_bits.get(id(value))) is not None:
                layer = found if isinstance(found, str) else self._checked(self._base(value, value, None))
                if isinstance(layer, Layer):
                    yield layer
                elif id(value) not in self.refused:
                    yield value, layer

    def _sum(self, total: Value) -> Iterator[Layer | tuple[Value, str]]:
        """The layer that a sum is; if an adapter is added and it is none, why."""
        reasons: list[str] = []
        for base, up in (total.args, total.args[::-1]):
            adapter = read_adapter(up)
            if adapter is None:
                outer = unscaled(up)[0]
                if is_gather(uncast(base)) and is_product(outer) and is_gather(outer.args[0]):
                    reasons.append("an adapter of an embedding is a gather, not a product")
                continue
            layer = self._checked(self._adapted(total, base, adapter))
            self.reported.add(id(adapter.outer))
            if isinstance(layer, Layer):
                self.reported.add(id(layer.base))
                yield layer
                return
            self.refused.add(id(uncast(base)))
            reasons.append(layer)
        if reasons:
            yield total, reasons[0]

    def _way_to_a_layer(self, outer: Value) -> str | None:
        """The operation by which an adapter's output meets that of a frozen layer, if it does."""
        reached: dict[int, str | None] = {id(outer): None}
        for value in self.view.values:
            parts = value.inputs()
            came = [reached[id(p)] for p in parts if id(p) in reached]
            if not came or value.op not in ("convert", "mul", "neg", "div", "dropout", "add", "sub"):
                continue
            if len(parts) > 1 and any(self._is_frozen(p) for p in parts):
                return came[0] or value.op
            scales = value.op == "convert" or (value.op == "mul" and len(parts) == 1)
            reached[id(value)] = came[0] or (None if scales else value.op)
        return None

    def _is_frozen(self, value: Value) -> bool:
        value = unscaled(value)[0]
        return id(value) in self.four_bits or (is_product(value) and not value.args[1].requires_grad)

    def _checked(self, layer: Layer | str) -> Layer | str:
        """The layer, unless the graph around it forbids."""
        if isinstance(layer, str):
            return layer
        reason = self.view.unsafe(layer.root, layer.interior)
        if reason is None and layer.adapter is not None and _used_elsewhere(self.view, [layer.base], layer.interior):
            reason = "the layer's output without its adapter is used elsewhere as well"
        return reason or layer

    def _adapted(self, total: Value, base: Value, adapter: Adapter) -> Layer | str:
        """The layer whose output is `total` = base + adapter."""
        passed: list[Value] = []
        layer = self._base(total, uncast(base, passed), adapter)
        if isinstance(layer, str):
            return layer
        readers = self.view.users(total)
        followed = {id(v): v for v in (self.view.of(u) for u in readers if u.op != "output")}
        if len(followed) == 1 and all(u.op != "output" for u in readers):
            (only,) = followed.values()
            # `total` is only an intermediate: 16-bit layers with float32 adapters are added in float32 and cast back.
            if only.op == "convert" and only.dtype in FLOATS and only.nodes:
                layer.root = only
        layer.interior += [total, *passed, *adapter.values, *adapter.casts]
        return layer

    def _base(self, root: Value, base: Value, adapter: Adapter | None) -> Layer | str:
        """The frozen layer, with or without what is added to it."""
        four_bit, weight = self.four_bits.get(id(base)), None
        if isinstance(four_bit, str):
            return four_bit
        if four_bit is not None:
            x = self.view.of(four_bit.x)
            bias = None if four_bit.bias is None else self.view.of(four_bit.bias)
        elif is_product(base):
            (x, weight), bias = base.args[:2], bias_of(base)
        elif base.op == "add" and any(isinstance(a, Value) and read_adapter(a) for a in base.args):
            return "it is a second adapter on one layer"
        else:
            base = base.args[0] if base.op == "item" else base
            name = base.args[0] if base.op == "opaque" else base.op
            return f"the base layer is {name}, neither a linear layer nor a 4-bit product"
        layer = Layer(root, root, x, base, four_bit, weight, base.op == "matmul", bias, x.dtype, adapter, [base])  # type: ignore[arg-type]
        reason = refuse_base(layer, adapter)
        return reason or (layer if adapter is None else joined(layer, adapter))


def _mark_bodies(node: Node) -> None:
    """A 4-bit product is reported once, where it is called, and not again in the bodies that compute it."""
    for arg in node.args:
        if isinstance(arg, Node) and arg.op == "get_attr":
            body = getattr(node.graph.owning_module, str(arg.target), None)
            for inner in body.graph.nodes if isinstance(body, GraphModule) else ():
                inner.meta[_READ] = True


def _used_elsewhere(view: View, values: list[Value], known: list[Value]) -> bool:
    ids = {id(v) for v in known}
    return any(u.op == "output" or id(view.of(u)) not in ids for v in values for u in view.users(v))


# --- writing -------------------------------------------------------------------------------------------------------


def fuse_lora(view: View) -> None:
    """Every adapted or 4-bit linear layer; those that share x together."""
    reader = _Reader(view)
    groups: dict[Any, list[Layer]] = {}
    for found in reader.layers():
        if isinstance(found, Layer):
            groups.setdefault(found.kind(), []).append(found)
        else:
            view.refused(NAME, *found)
    for group in groups.values():
        for part in _parts(reader, group):
            if _replace(view, reader, part) is None:
                continue
            for layer in part:  # together they do not fit; perhaps each alone
                reason = _replace(view, reader, [layer])
                if reason is not None:
                    view.refused(NAME, layer.site, reason)


def _parts(reader: _Reader, group: list[Layer]) -> list[list[Layer]]:
    """The group; apart if drawing their masks together would exchange them with something else that is drawn."""
    if group[0].dropout is None or len(group) == 1:
        return [group]
    group = sorted(group, key=lambda layer: layer.dropout.nodes[0])  # type: ignore[union-attr]
    own = {node for layer in group for node in layer.dropout.nodes}  # type: ignore[union-attr]
    x = group[0].x if group[0].x.nodes else group[0].x.inputs()[0]  # a cast that autocast hides is at no place
    node, last = x.nodes[0], max(layer.root.nodes[0] for layer in group)
    deterministic = {*own, *reader.calls.values()}
    while node is not last:
        node = node.next
        if node not in deterministic and _draws(node):
            return [[layer] for layer in group]
    return [group]


def _exchanges(reader: _Reader, layer: Layer) -> bool:
    """Is something else drawn between a layer's dropout and the layer, where its mask will be drawn?"""
    if layer.dropout is None:
        return False
    node, last = layer.dropout.nodes[0], layer.root.nodes[0]
    deterministic = {*layer.dropout.nodes, *reader.calls.values()}
    while node is not last:
        node = node.next
        if node not in deterministic and _draws(node):
            return True
    return False


def _draws(node: Node) -> bool:
    """Does the node, or a body it runs, draw random numbers: is it not known that it does not?"""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
    return any(part in name for part in _DRAWS) or bool(node.kwargs.get("dropout_p"))


def _replace(view: View, reader: _Reader, group: list[Layer]) -> str | None:
    interior = [v for layer in group for v in layer.interior]
    if _used_elsewhere(view, [v for layer in group for v in layer.drawn_once], interior):
        return "what the adapter makes of the input after dropout is used elsewhere as well"
    if len(group) == 1 and _exchanges(reader, group[0]):
        return "something else is drawn between the adapter's dropout and the layer's output"
    reason = view.replace(NAME, [layer.root for layer in group], lambda emit: _emit(group, emit))
    if reason is not None:
        return reason
    saved = static_bytes([group[0].x]) if any(layer.adapter for layer in group) else 0
    for i, layer in enumerate(group):
        call = reader.calls.get(id(layer.base))
        if call is not None:
            view.pure(call)
        view.fused(NAME, layer.root, saved if i == 0 else 0, _words(group))
    return None


def _words(group: list[Layer]) -> str:
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


def _emit(group: list[Layer], emit: Emitter) -> list[Node]:
    first = group[0]
    adapters = [layer.adapter for layer in group if layer.adapter is not None]
    masks: dict[int, Node] = {}
    drops = [layer.dropout for layer in group if layer.dropout is not None]
    for drop in drops:
        if id(drop) not in masks:
            # The operator that dropout itself becomes: it draws what would have been drawn.
            masks[id(drop)] = emit.item(emit.call(torch.native_dropout, *drop.args, True), 1)
    keep, dropout = [masks[id(drop)] for drop in drops], drops[0].args[1] if drops else 0.0
    stored = lambda w, transposed: emit.call("t", w) if transposed else w  # noqa: E731
    fours = [layer.four_bit for layer in group if layer.four_bit is not None]
    quant_type, blocksize = (fours[0].quant_type, fours[0].blocksize) if fours else ("none", 0)
    weights = [_stored(q.codes) for q in fours]
    weights = weights or [stored(layer.weight, layer.transposed) for layer in group]
    biases = [_bias(layer, emit) for layer in group]
    out = emit.call(
        kernels.lora_linear, first.x, weights, [q.absmax for q in fours], [n for q in fours for n in q.nested],
        [b for b in biases if b is not None], [stored(a.lora_a, a.transposed[0]) for a in adapters],
        [stored(a.lora_b, a.transposed[1]) for a in adapters], keep, [layer.shape()[0] for layer in group],
        [a.scaling for a in adapters], dropout, quant_type, blocksize, first.base_dtype,
        adapters[0].inner.dtype if adapters else first.base_dtype, first.root.dtype,
    )  # fmt: skip
    return [emit.item(out, i) for i in range(len(group))]


def _stored(codes: Node) -> Node:
    """The codes as they are stored: a view of them would tie the operator to the place where it is made."""
    while codes.op == "call_method" and codes.target in ("view", "reshape", "t") and isinstance(codes.args[0], Node):
        if codes.args[0].meta["example_value"].dtype != codes.meta["example_value"].dtype:
            break
        codes = codes.args[0]
    return codes


def _bias(layer: Layer, emit: Emitter) -> Node | Value | None:
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
