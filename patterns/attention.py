"""Attention under a mask that is causal: the mask is proven so and goes, and grouped heads are not repeated.

Hugging Face hands scaled_dot_product_attention an explicit boolean mask wherever tracing keeps it from looking at
values, and keys and values repeated to the number of query heads with it. A mask keeps attention from the kernels
that skip half of the work. What the mask says is read off the graph that builds it (`_predicate.py`).

Shapes: B batch, H query heads, S sequence, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy as sp
import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ._fusion import Emitter, Fusion, Value, View, static_bytes
from ._predicate import Evaluator, Predicate, size_of

NAME = "attention"
_B, _H, _Q, _K = (sp.Symbol(name, integer=True, nonnegative=True) for name in ("batch", "head", "query", "key"))
_CAUSAL = ("<=", _K - _Q)


@dataclass(frozen=True)
class _Grouped:
    """Keys or values: `source` has a head for every `repeats` query heads; `covered` are the values in between."""

    source: Value
    repeats: int
    covered: tuple[Value, ...]
    cast: torch.dtype | None = None  # made after the heads were repeated


def anchor(value: Value) -> bool:
    """Attention that is causal or has a mask."""
    return value.op == "attention" and (value.args[5] is not False or value.args[3] is not None)


def fuse_attention(view: View) -> None:
    """Every call of torch's attention that is causal or has a mask."""
    evaluator = Evaluator(view)
    for site in list(view.values):
        if anchor(site) and site.nodes:
            reason = _fuse(view, site, evaluator)
            if reason is not None:
                view.refused(NAME, site, reason)


def _fuse(view: View, site: Value, evaluator: Evaluator) -> str | None:
    q, k, v, mask = site.args[:4]
    reason = _refuse_call(site)
    if reason is None and mask is not None:
        reason = _refuse_mask(evaluator, q, k, mask)
    if reason is not None:
        return reason
    keys, values = _grouped(k), _grouped(v)
    if keys.repeats != values.repeats:
        keys, values = _Grouped(k, 1, ()), _Grouped(v, 1, ())
    reason = view.unsafe(site, [site, *keys.covered, *values.covered])
    reason = reason or view.replace(NAME, [site], lambda emit: [_emit(site, keys, values, emit)])
    if reason is None:
        saved = static_bytes([q, keys.source, values.source, site]) if site.requires_grad else 0
        view.fused(NAME, site, saved, "causal" if mask is None else "causal mask folded")
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
    return None


# --- what the mask says --------------------------------------------------------------------------------------------


def _refuse_mask(evaluator: Evaluator, q: Value, k: Value, mask: Any) -> str | None:
    """Why the mask is not exactly key <= query, or None."""
    if not isinstance(mask, Value) or len(mask.shape) > 4:
        return "the mask is not a tensor of four dimensions"
    if mask.dtype != torch.bool:
        return f"the mask is added to the scores ({mask.dtype}), it is not a condition"
    index = tuple(
        sp.Integer(0) if isinstance(n, int) and n == 1 else i
        for i, n in zip((_B, _H, _Q, _K)[4 - len(mask.shape) :], mask.shape, strict=True)
    )
    found = evaluator.element(mask, index)
    for view, value in evaluator.read:  # of other masks too: what two share was evaluated once
        reason = view.unsafe(value, [value])
        if reason is not None:
            return f"the mask cannot be relied on: {reason}"
    assert isinstance(found, Predicate)
    return _refuse_predicate(evaluator, found, q, k)


def _refuse_predicate(evaluator: Evaluator, found: Predicate, q: Value, k: Value) -> str | None:
    if found.atoms is None:
        return "the mask lets no query see any key"
    rest = [atom for atom in found.atoms if atom != _CAUSAL]
    rest = [atom for atom in rest if not _always(*atom, q, k)]
    for _, e in rest:
        if e.atoms(sp.Function):
            return _depends(evaluator, found)
    if _CAUSAL not in found.atoms:
        conditions = " and ".join(f"{e} {relation} 0" for relation, e in rest) or "any"
        return f"the mask is not causal: a query sees keys where {conditions}"
    for relation, e in rest:
        window = _Q - _K + 1 - e
        if relation != "<=" or not window.is_Integer:
            return f"a query sees only keys where {e} {relation} 0"
        if not statically_known_true(k.shape[2] <= int(window)):
            return f"a query sees the last {window} keys of {k.shape[2]}"
    return None


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


def _depends(evaluator: Evaluator, found: Predicate) -> str:
    """Names what the mask is read from, beside positions."""
    names = {str(f.func) for _, e in found.atoms or () for f in e.atoms(sp.Function)}
    sources = [str(evaluator.unknown[n][1]) for n in sorted(names) if n in evaluator.unknown]
    return f"who sees whom depends on {' and '.join(sources) or 'a rounded position'}"


# --- grouped heads -------------------------------------------------------------------------------------------------


def _grouped(x: Value) -> _Grouped:
    """x as heads of which each was repeated, where it is that."""
    if x.op == "convert":
        inner = _grouped(x.args[0])
        if inner.repeats > 1 and inner.cast is None:
            return _Grouped(inner.source, inner.repeats, (x, *inner.covered), x.dtype)
        return _Grouped(x, 1, ())
    if x.op == "repeat_interleave" and x.args[2] == -3 and isinstance(x.args[1], int) and len(x.shape) == 4:
        return _Grouped(x.args[0], x.args[1], (x,))
    if x.op == "reshape" and x.args[0].op == "expand" and x.args[0].args[0].op == "unsqueeze":
        expanded, inserted = x.args[0], x.args[0].args[0]
        source = inserted.args[0]
        B, H, S, K = (str(n) for n in source.shape) if len(source.shape) == 4 else ("",) * 4
        repeats = expanded.shape[2] if len(expanded.shape) == 5 else None
        as_repeated = [str(n) for n in expanded.shape] == [B, H, str(repeats), S, K]
        if inserted.args[1] == -3 and isinstance(repeats, int) and as_repeated and isinstance(source.shape[1], int):
            if [str(n) for n in x.shape] == [B, str(source.shape[1] * repeats), S, K]:
                return _Grouped(source, repeats, (x, expanded, inserted))
    return _Grouped(x, 1, ())


def _emit(site: Value, keys: _Grouped, values: _Grouped, emit: Emitter) -> Node:
    q, scale, grouped = site.args[0], site.args[6], site.args[7] or keys.repeats > 1
    k, v = (emit.call("to", x.source, x.cast) if x.cast else emit.node(x.source) for x in (keys, values))
    return emit.call(
        F.scaled_dot_product_attention, q, k, v,
        attn_mask=None, dropout_p=0.0, is_causal=True, scale=scale, enable_gqa=grouped,
    )  # fmt: skip


FUSION = Fusion(name=NAME, anchor=anchor, passes=(fuse_attention,), priority=30)
