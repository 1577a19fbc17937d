"""What the norms' patterns share: telling one from another, rows of heads, the residual add before a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ._fusion import Emitter, Value, View

LOW = (torch.bfloat16, torch.float16)


def average_under(rsqrt: Value) -> Value | None:
    """The mean or variance m of rsqrt(m) and rsqrt(m + eps)."""
    if rsqrt.op != "rsqrt" or not isinstance(rsqrt.args[0], Value):
        return None
    under = rsqrt.args[0]
    return next((v for v in (under, *under.inputs()) if v.op in ("mean", "var")), None)


def is_variance(average: Value) -> bool:
    """Is it the mean square of rows less their own mean, so that dividing by its root makes a LayerNorm?"""
    if average.op == "var":
        return True
    square = uncast(average.args[0])
    centred = uncast(square.args[0]) if square.op == "pow" and square.args[1] == 2 else square
    if centred.op != "sub" or not all(isinstance(a, Value) for a in centred.args):
        return False
    mean = uncast(centred.args[1])
    return mean.op == "mean" and mean.args[1:] == ((-1,), True) and uncast(mean.args[0]) is uncast(centred.args[0])


def uncast(value: Value) -> Value:
    """What a cast was made of, the value itself where it is none."""
    while value.op == "convert":
        value = value.args[0]
    return value


def widened(view: View, value: Value) -> Value:
    """What a cast to float32 before a norm was made of, if the norm alone reads the cast.

    Were there other readers, eager would add their gradients in float32 before it rounds.
    """
    wide = value.op == "convert" and value.dtype == torch.float32 and value.args[0].dtype in LOW and not value.cut
    return value.args[0] if wide and len(view.users(value)) <= len(value.nodes) else value


def narrowed(view: View, value: Value) -> Value:
    """The cast of a norm's result, if only that is read of it: eager adds the gradients of several in float32."""
    users = view.users(value)
    if value.dtype != torch.float32 or len(users) != 1 or users[0].op == "output":
        return value
    cast = view.of(users[0])
    narrow = cast.op == "convert" and cast.dtype in LOW and not cast.cut
    return cast if narrow and cast.nodes == users else value


def over_rows(x: Value, emit: Emitter, norm: Callable[[Any], Node]) -> Node:
    """The first output of `norm` of x.

    (B, H, S, K) as a transposed view of (B, S, H, K) is normalised before it is transposed: there rows lie in order.
    """
    swapped = len(x.shape) == 4 and x.op == "transpose" and x.args[1:] == (-3, -2)
    y = emit.item(norm(emit.call("transpose", x, -3, -2) if swapped else x), 0)
    return emit.call("transpose", y, -3, -2) if swapped else y


def residual_add(fusion: str, add_norm: Any) -> Callable[[View], None]:
    """A pass: s = x + residual; y = norm(s), the operator `fusion`, become one operator that returns both.

    One read of both, and one backward kernel that adds the gradient of s.
    """

    def fuse_residual_add(view: View) -> None:
        taken: list[Value] = []
        for y in list(view.values):
            if y.op != "item" or y.args[1] != 0 or y.args[0].op != f"fused.{fusion}" or not y.nodes:
                continue
            s, *rest = y.args[0].args
            if s.op != "add" or not s.nodes or not all(isinstance(a, Value) for a in s.args):
                continue
            if any(s is other for other in taken):
                continue  # a second norm of one sum reads it: adding again would keep the sum twice
            a, b = s.args
            if not (a.dtype == b.dtype == s.dtype and [str(n) for n in a.shape] == [str(n) for n in b.shape]):
                continue
            if view.replace(fusion, [s, y], _added(add_norm, b, a, rest)) is None:
                taken.append(s)

    return fuse_residual_add


def _added(add_norm: Any, x: Value, residual: Value, rest: list[Any]) -> Callable[[Emitter], list[Node]]:
    def emit_both(emit: Emitter) -> list[Node]:
        out = emit.call(add_norm, x, residual, *rest)
        return [emit.item(out, 1), emit.item(out, 0)]

    return emit_both
