"""What a mask that is added to the scores says, where every element of it is 0 or hides a key.

An element of such a mask is a predicate too: 0 where it holds; elsewhere -inf, or the least number of a dtype, which
leaves a key nothing beside one that is seen. Rules as in `_predicate.py`, for tensors of floating point.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ._fusion import Value
from ._predicate import _RULES, ALWAYS, FLOATING, NEVER, Element, Index, Predicate, Unknown, _broadcast, _In, compare

_LEAST = {-math.inf, *(torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16))}
# Float16's own is small enough for a wider score to outweigh it, so it hides in float16 alone.
_LEAST_OF = {torch.float16: _LEAST | {torch.finfo(torch.float16).min}}
_LAYOUT = (
    "expand", "unsqueeze", "squeeze", "transpose", "reshape", "merge_last", "narrow", "half", "select", "index",
)  # fmt: skip


def _shows(where: _In, value: Any, index: Index, dtype: torch.dtype | None) -> Predicate:
    """Where the tensor, or the number in a tensor of `dtype`, is 0, known to hide a key elsewhere."""
    if not isinstance(value, Value):
        if value == 0 or value in _LEAST_OF.get(dtype, _LEAST):  # pyright: ignore[reportArgumentType, reportCallIssue]
            return ALWAYS if value == 0 else NEVER
        raise Unknown
    found = where.element(value, _broadcast(value, index)) if value.fake.is_floating_point() else None
    if not isinstance(found, Predicate):
        raise Unknown
    return found


def _filled(where: _In, value: Value, index: Index) -> Element:
    return _shows(where, value.args[0], (), value.dtype)


def _first(where: _In, value: Value, index: Index) -> Element:
    return _shows(where, value.args[0], index, value.dtype)


def _add(where: _In, value: Value, index: Index) -> Element:
    a, b = (_shows(where, a, index, value.dtype) for a in value.args)
    return a & b


def _where(where: _In, value: Value, index: Index) -> Element:
    condition, a, b = value.args
    return _chosen(
        where.truth(condition, _broadcast(condition, index)), *(_shows(where, x, index, value.dtype) for x in (a, b))
    )


def _masked_fill(where: _In, value: Value, index: Index) -> Element:
    x, mask, number = value.args
    hidden = where.truth(mask, _broadcast(mask, index))
    return _chosen(hidden, _shows(where, number, (), value.dtype), _shows(where, x, index, value.dtype))


def _chosen(condition: Predicate, a: Predicate, b: Predicate) -> Element:
    """a where the condition holds, b where not."""
    opposite = ~condition
    if a == b:
        return a
    if b == NEVER:
        return condition & a
    if a == NEVER and opposite is not None:
        return opposite & b
    raise Unknown


def _triangle(sign: int):
    def rule(where: _In, value: Value, index: Index) -> Element:
        source, diagonal = value.args
        if not isinstance(diagonal, int):
            raise Unknown
        inside = compare("<=", sign * (index[-1] - index[-2] - diagonal))  # and 0 outside
        return _chosen(inside, _shows(where, source, index, value.dtype), ALWAYS)

    return rule


FLOATING.update({name: _RULES[name] for name in _LAYOUT})
FLOATING.update(
    filled=_filled, convert=_first, add=_add, where=_where, masked_fill=_masked_fill,
    tril=_triangle(1), triu=_triangle(-1),
)  # fmt: skip
