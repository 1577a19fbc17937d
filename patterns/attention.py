"""Attention under a causal mask, with padding, a window or packed documents: the mask goes, heads are not repeated.

Hugging Face hands scaled_dot_product_attention an explicit boolean mask wherever tracing keeps it from looking at
values, and keys and values repeated to the number of query heads with it. A mask keeps attention from the kernels
that skip half of the work. What the mask says is read off the graph that builds it (`_predicate.py`): where it is
key <= query, nothing of it is left. Where beside that it is key > query - window, or a (batch, key) tensor of what is
kept, or one of which query and key have equal elements (`_documents.py`), the operator gets this.

Shapes: B batch, H query heads, S sequence, K head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy as sp
import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..kernels import _flash as flash
from ..kernels import attention as kernels
from . import _added_masks  # noqa: F401  (adds to what can be evaluated)
from ._documents import same_document
from ._fusion import Emitter, Fusion, Value, View, static_bytes
from ._predicate import Evaluator, Predicate, size_of

NAME = "attention"
_B, _H, _Q, _K = (sp.Symbol(name, integer=True, nonnegative=True) for name in ("batch", "head", "query", "key"))
_CAUSAL = ("<=", _K - _Q)
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class _Grouped:
    """Keys or values: `source` has a head for every `repeats` query heads; `covered` are the values in between."""

    source: Value
    repeats: int
    covered: tuple[Value, ...]
    cast: torch.dtype | None = None  # made after the heads were repeated
    moved: bool = False  # source is (batch, sequence, heads, channels): heads were repeated before they were moved


def anchor(value: Value) -> bool:
    """Attention that is causal or has a mask."""
    return value.op == "attention" and (value.args[5] is not False or value.args[3] is not None)


class _Sees(NamedTuple):
    """What a query sees beside causality: keys that are kept, the last `window`, those of its document."""

    window: int | None = None
    kept: tuple[View, Value] | None = None
    documents: tuple[View, Value] | None = None

    @property
    def form(self) -> str:
        window = "" if self.window is None else "sliding window"
        read = "padding" if self.kept else "documents" if self.documents else ""
        return ", ".join(part for part in (window, read and f"{read} read once per step") if part)


class _Site(NamedTuple):
    """A call of attention: its arguments, the heads of k and v that there are, and what a query sees."""

    call: Value
    keys: _Grouped
    values: _Grouped
    sees: _Sees


def fuse_attention(view: View) -> None:
    """Every call of torch's attention that is causal or has a mask."""
    masks = _Masks(view)
    for call in list(view.values):
        if anchor(call) and call.nodes:
            reason = _fuse(view, call, masks)
            if reason is not None:
                view.refused(NAME, call, reason)


def _fuse(view: View, call: Value, masks: _Masks) -> str | None:
    q, k, v, mask = call.args[:4]
    sees = _refuse_call(call) or (masks.read(q, k, mask) if mask is not None else _Sees())
    if isinstance(sees, str):
        return sees
    keys, values = _grouped(k), _grouped(v)
    if keys.repeats != values.repeats:
        keys, values = _Grouped(k, 1, ()), _Grouped(v, 1, ())
    site, before = _Site(call, keys, values, sees), dict(masks.written)
    reason = _refuse_sees(view, site) or view.unsafe(call, [call, *keys.covered, *values.covered])
    reason = reason or view.replace(NAME, [call], lambda emit: [_emit(view, site, masks, emit)])
    if reason is not None:
        masks.written = before  # what a refused site wrote is erased again
    else:
        saved = static_bytes([q, keys.source, values.source, call]) if call.requires_grad else 0
        view.fused(NAME, call, saved, sees.form or ("causal mask folded" if mask is not None else "causal"))
    return reason


def _refuse_call(site: Value) -> str | None:
    q, k, v, mask, dropout, is_causal, scale, grouped = site.args
    if not all(isinstance(x, Value) and len(x.shape) == 4 for x in (q, k, v)):
        return "q, k and v are not (batch, heads, sequence, channels)"
    if dropout != 0:
        return "attention has dropout, which draws other numbers under other kernels"
    if not isinstance(is_causal, bool) or not isinstance(grouped, bool) or isinstance(scale, Value):
        return "an argument is not known at compile time"
    if mask is not None and is_causal:
        return "both a mask and is_causal are given"
    if not (q.dtype == k.dtype == v.dtype == site.dtype):
        return f"q, k and v are {q.dtype}, {k.dtype}, {v.dtype}"
    if str(q.shape[2]) != str(k.shape[2]):
        return f"there are {q.shape[2]} queries and {k.shape[2]} keys"
    batches, heads = {str(x.shape[0]) for x in (q, k, v)}, [str(x.shape[1]) for x in (q, k, v)]
    if len(batches) > 1 or heads[1] != heads[2]:  # torch's kernels would read beyond the smaller ones
        return f"q {q.shape}, k {k.shape} and v {v.shape} are of different batches, or k and v of different heads"
    return None


# --- what the mask says --------------------------------------------------------------------------------------------


class _Masks:
    """What the masks of one graph say; each is read once."""

    def __init__(self, view: View) -> None:
        self.evaluator = Evaluator(view)
        self.written: dict[int, list[Node]] = {}  # what is kept or which document, and what was read of it
        self.brought: dict[int, list[Node]] = {}  # the same, read outside of this graph

    def read(self, q: Value, k: Value, mask: Any) -> _Sees | str:
        """What a query sees by a mask that is causal; or why it is not known to be that."""
        if not isinstance(mask, Value) or len(mask.shape) > 4:
            return "the mask is not a tensor of four dimensions"
        added = "" if mask.dtype == torch.bool else f"the mask is added to the scores ({mask.dtype})"
        if mask.requires_grad:
            return f"{added} and has a gradient"
        index = tuple(
            sp.Integer(0) if isinstance(n, int) and n == 1 else i
            for i, n in zip((_B, _H, _Q, _K)[4 - len(mask.shape) :], mask.shape, strict=True)
        )
        found = self.evaluator.element(mask, index)
        documents = None
        if isinstance(found, Predicate) and found.atoms:
            documents, found = self._documents(found, q, k)
        for view, value in self.evaluator.read:  # of other masks too: what two share was evaluated once
            reason = view.unsafe(value, [value])
            if reason is not None:
                return f"the mask cannot be relied on: {reason}"
        if not isinstance(found, Predicate):
            return f"{added}, it is not a condition"
        if found.atoms is None:
            return "the mask lets no query see any key"
        rest = [atom for atom in found.atoms if atom != _CAUSAL and not _always(*atom, q, k)]
        windows = {atom: width for atom in rest if (width := _width(*atom)) is not None}
        kept = {atom: source for atom in rest if (source := self._kept(*atom, q, k)) is not None}
        first = next(iter(kept), None) if documents is None else None
        known = {*windows, first} if _CAUSAL in found.atoms else {first}
        reason = self._refuse(found, [atom for atom in rest if atom not in known])
        if kept and documents is not None:
            return "documents are padded"
        if added and not reason and first is not None:  # of a row without any key, torch makes other numbers then
            return f"{added} and hides more than later keys"
        window = min(windows.values(), default=None)
        if window is not None and statically_known_true(k.shape[2] <= window):
            window = None
        return reason or _Sees(window, None if first is None else kept[first], documents)

    def write(
        self, view: View, told: tuple[View, Value], read: Callable[[Value, Emitter], list[Node]], emit: Emitter
    ) -> list[Node]:
        """A tensor and what is read of it, written once for all that ask."""
        where, tensor = told
        make, known = functools.partial(read, tensor), self.written if where is view else self.brought
        if id(tensor) not in known:
            known[id(tensor)] = make(emit) if where is view else view.bring_in((NAME, id(tensor)), make)
        return known[id(tensor)]

    def _documents(self, found: Predicate, q: Value, k: Value) -> tuple[tuple[View, Value] | None, Predicate]:
        """The tensor (batch, position) that says which document a token is of; the conditions inside a document."""
        assert found.atoms is not None
        told = same_document(self.evaluator, found.atoms, _Q, _K)
        if told is None or told[0].args != (_batch(q), _Q):
            return None, found
        view, tensor = self.evaluator.unknown[str(told[0].func)]
        whole = [str(n) for n in tensor.shape] == [str(q.shape[0]), str(k.shape[2])]
        return ((view, tensor), told[1]) if whole and tensor.dtype in _INTEGERS else (None, found)

    def _kept(self, relation: str, e: sp.Expr, q: Value, k: Value) -> tuple[View, Value] | None:
        """The tensor, when the condition is that its element (batch, key) is not 0."""
        if relation != "!=" or str(e.func) not in self.evaluator.unknown:
            return None
        view, tensor = self.evaluator.unknown[str(e.func)]
        whole = [str(n) for n in tensor.shape] == [str(q.shape[0]), str(k.shape[2])]
        return (view, tensor) if whole and e.args == (_batch(q), _K) else None

    def _refuse(self, found: Predicate, rest: list[tuple[str, sp.Expr]]) -> str | None:
        for _, e in rest:
            if e.atoms(sp.Function):
                names = {str(f.func) for _, e in rest for f in e.atoms(sp.Function)} & set(self.evaluator.unknown)
                sources = " and ".join(str(self.evaluator.unknown[name][1]) for name in sorted(names))
                return f"who sees whom depends on {sources or 'a rounded position'}"
        if _CAUSAL not in (found.atoms or ()):
            conditions = " and ".join(f"{e} {relation} 0" for relation, e in rest)
            sees = f"a query sees keys where {conditions}" if rest else "every query sees every key"
            return f"the mask is not causal: {sees}"
        return next((f"a query sees only keys where {e} {relation} 0" for relation, e in rest), None)


def _batch(q: Value) -> sp.Expr:
    """The index of a batch's row."""
    return _B if str(q.shape[0]) != "1" else sp.Integer(0)


def _width(relation: str, e: sp.Expr) -> int | None:
    """w, when the condition is key > query - w and lets a query see itself."""
    window = _Q - _K + 1 - e
    return int(window) if relation == "<=" and window.is_Integer and window >= 1 else None


def _always(relation: str, e: sp.Expr, q: Value, k: Value) -> bool:
    """Does e <= 0 hold at the position where e is largest?"""
    sizes = {_B: q.shape[0], _H: q.shape[1], _Q: q.shape[2], _K: k.shape[2]}
    if relation != "<=":
        return False
    for symbol, size in sizes.items():
        slope = sp.diff(e, symbol)
        if slope.is_nonnegative:
            e = e.subs(symbol, size_of(size) - 1)
        elif slope.is_nonpositive:
            e = e.subs(symbol, 0)
        else:
            return False
    return bool(sp.expand(e).is_nonpositive)


# --- grouped heads -------------------------------------------------------------------------------------------------


def _grouped(x: Value) -> _Grouped:
    """x as heads of which each was repeated, where it is that."""
    if x.op == "convert":
        inner = _grouped(x.args[0])
        if inner.repeats > 1 and inner.cast is None:
            return replace(inner, covered=(x, *inner.covered), cast=x.dtype)
    elif x.op == "transpose" and x.args[1:] == (-3, -2):
        inner = _repeated(x.args[0], -2)
        if inner is not None:
            return replace(inner, covered=(x, *inner.covered), moved=True)
    return _repeated(x, -3) or _Grouped(x, 1, ())


def _repeated(x: Value, heads: int) -> _Grouped | None:
    """x as a tensor of four dimensions that was repeated along its dimension `heads`, each row of it in turn."""
    if x.op == "repeat_interleave" and x.args[2] == heads and isinstance(x.args[1], int) and len(x.shape) == 4:
        return _Grouped(x.args[0], x.args[1], (x,))
    if x.op != "reshape" or x.args[0].op != "expand" or x.args[0].args[0].op != "unsqueeze":
        return None
    expanded, inserted = x.args[0], x.args[0].args[0]
    source = inserted.args[0]
    if len(expanded.shape) != 5 or len(source.shape) != 4 or inserted.args[1] != heads:
        return None
    repeats, sizes = expanded.shape[heads], [str(n) for n in source.shape]
    if not isinstance(repeats, int) or not sizes[heads].isdigit():
        return None
    at = 4 + heads
    as_expanded = [*sizes[: at + 1], str(repeats), *sizes[at + 1 :]]
    as_repeated = [*sizes[:at], str(int(sizes[at]) * repeats), *sizes[at + 1 :]]
    whole = [str(n) for n in expanded.shape] == as_expanded and [str(n) for n in x.shape] == as_repeated
    return _Grouped(source, repeats, (x, expanded, inserted)) if whole else None


# --- writing -------------------------------------------------------------------------------------------------------


def _refuse_operator(call: Value) -> str | None:
    """Why our operator cannot stand here; torch's own can."""
    q, v = call.args[0], call.args[2]
    K = q.shape[3]
    if q.fake.device.type not in ("cpu", "cuda") or torch.version.hip:
        return f"not tried on {'ROCm' if torch.version.hip else q.fake.device.type}"
    cuda = torch.backends.cuda
    if not (cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled() and cuda.cudnn_sdp_enabled()):
        return "some of torch's attention kernels are switched off"
    if not isinstance(K, int) or v.shape[3] != K:
        return f"queries have {K} channels, values {v.shape[3]}"
    if q.fake.device.type == "cuda" and (K % 8 or K > 256 or q.dtype == torch.float64):
        return f"no kernel for {K} channels of {q.dtype}"
    return None


def _refuse_sees(view: View, site: _Site) -> str | None:
    """Why the operator cannot have what a query sees; a causal mask alone needs nothing of it."""
    q, sees = site.call.args[0], site.sees
    for read, what in ((sees.kept, "the padding is"), (sees.documents, "documents are")):
        if read is not None and read[0] not in (view, view.around):
            return f"{what} known only outside of the body that reads it"
    reason = _refuse_operator(site.call) if sees != _Sees() else None
    if reason is None and q.fake.device.type == "cuda" and (sees.window is not None or sees.documents):
        return flash.refuse(q.fake.device, q.dtype, q.shape[3])
    return reason


def _emit(view: View, site: _Site, masks: _Masks, emit: Emitter) -> Node:
    q, scale = site.call.args[0], site.call.args[6]
    k, v = (_heads(x, emit) for x in (site.keys, site.values))
    if site.sees == _Sees() and _refuse_operator(site.call):
        grouped = site.call.args[7] or site.keys.repeats > 1
        return emit.call(
            F.scaled_dot_product_attention, q, k, v,
            attn_mask=None, dropout_p=0.0, is_causal=True, scale=scale, enable_gqa=grouped,
        )  # fmt: skip
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    steady = all(isinstance(n, int) for n in q.shape)
    operator, read = kernels.attention, [None, None]
    if site.sees.documents is not None:
        operator, read = kernels.packed_attention, masks.write(view, site.sees.documents, _starts, emit)
    elif site.sees.kept is not None:
        read = masks.write(view, site.sees.kept, _runs, emit)
    return emit.item(emit.call(operator, q, k, v, *read, site.sees.window, scale, steady), 0)


def _runs(tensor: Value, emit: Emitter) -> list[Node]:
    keep = emit.node(tensor) if tensor.dtype == torch.bool else emit.call(torch.ne, tensor, 0)
    return [keep, emit.call(kernels.kept_runs, keep)]


def _starts(tensor: Value, emit: Emitter) -> list[Node]:
    found = emit.call(kernels.document_starts, tensor)
    return [emit.node(tensor), emit.item(found, 0), emit.item(found, 1)]


def _heads(x: _Grouped, emit: Emitter) -> Node:
    """Keys or values (batch, heads, sequence, channels) before they were repeated."""
    heads = emit.call("transpose", x.source, 1, 2) if x.moved else emit.node(x.source)
    return emit.call("to", heads, x.cast) if x.cast else heads


FUSION = Fusion(name=NAME, anchor=anchor, passes=(fuse_attention,), priority=30)
