"""q and k normalised head by head and then rotated: the two norms and the rotation become one operator.

Found once each of them is an operator: nothing else may read a norm's result.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from ..kernels import norm_rope as kernels
from ._fusion import Emitter, Fusion, Value, View, static_bytes

NAME = "norm_rope"


class _Normed(NamedTuple):
    """A norm whose heads come out as (B, H, S, K); `swapped`: its rows are (B, S, H, K)."""

    result: Value
    operator: Value
    swapped: bool


def anchor(value: Value) -> bool:
    """A rotation of a q and a k that both come from norms."""
    return value.op == "fused.rope_qk" and all(_normed(x) is not None for x in value.args[:2])


def _normed(x: Value) -> _Normed | None:
    swapped = x.op == "transpose" and x.args[1:] == (-3, -2)
    result = x.args[0] if swapped else x
    is_norm = result.op == "item" and result.args[1] == 0 and result.args[0].op == "fused.rms_norm"
    return _Normed(result, result.args[0], swapped) if is_norm else None


def fuse_norm_rope(view: View) -> None:
    """Every rotation of two norms."""
    for rope in list(view.values):
        if not anchor(rope) or not rope.nodes:
            continue
        reason = _fuse(view, rope)
        if reason is None:
            view.fused(
                NAME, rope, static_bytes(norm.operator.args[0] for norm in _norms(rope)), "norms of q and k, rope"
            )
        else:
            view.refused(NAME, rope, reason)


def _norms(rope: Value) -> list[_Normed]:
    return [norm for x in rope.args[:2] if (norm := _normed(x)) is not None]


def _fuse(view: View, rope: Value) -> str | None:
    results = [v for v in view.values if v.op == "item" and v.args[0] is rope and v.nodes]
    if sorted(v.args[1] for v in results) != [0, 1]:
        return "only one of the rotated q and k is read"
    results.sort(key=lambda v: v.args[1])
    norms, inverse = _norms(rope), rope.args[6]
    if inverse:
        return "the rotation is an inverse"
    (q, wq, *how), (k, wk, *also) = (norm.operator.args for norm in norms)
    if how != also or (wq is None) != (wk is None) or (wq is not None and wq.dtype != wk.dtype):
        return "the norms of q and k differ in eps, offset, rounding or the weight's dtype"
    if q.dtype != k.dtype:
        return f"q is {q.dtype}, k {k.dtype}"
    for norm, x in zip(norms, rope.args[:2], strict=True):
        inner = [norm.result, x] if norm.swapped else [x]
        if any(len(set(view.users(v))) != 1 for v in inner):
            return "something else reads the normalised heads"
    interior = [
        rope,
        *(v for norm, x in zip(norms, rope.args[:2], strict=True) for v in (norm.operator, norm.result, x)),
    ]
    reason = view.unsafe(results[0], [*results, *interior])
    return reason or view.replace(NAME, results, lambda emit: _emit(rope, norms, emit))


def _emit(rope: Value, norms: list[_Normed], emit: Emitter) -> list[Node]:
    cos, sin, rotary_dim, interleaved, _, dtype = rope.args[2:]
    heads = [emit.call("transpose", n.operator.args[0], 1, 2) if n.swapped else n.operator.args[0] for n in norms]
    (_, wq, eps, offset, cast), (_, wk, *_) = (norm.operator.args for norm in norms)
    out = emit.call(
        kernels.norm_rope_qk, *heads, wq, wk, cos, sin, eps, offset, cast, rotary_dim, interleaved, dtype
    )  # fmt: skip
    return [emit.item(out, 0), emit.item(out, 1)]


FUSION = Fusion(
    name=NAME,
    anchor=anchor,
    passes=(fuse_norm_rope,),
    priority=20,  # after rope and rms_norm, whose operators it reads
)
