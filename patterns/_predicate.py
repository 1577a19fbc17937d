"""What a mask says: its value at (batch, head, query, key) as a predicate, by evaluating the graph that builds it.

An element of a tensor is an integer expression in the element's indices, or a conjunction of comparisons of such
expressions with 0. Each operation is evaluated at one symbolic position, so that a proof covers every position at
once and it does not matter how the mask is spelled. What cannot be evaluated stays as it is: an unknown element
of a known tensor.

Indices are natural numbers, 0 <= index < size of the dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy as sp
import torch
from sympy.core.function import AppliedUndef

from ._fusion import Value, View

_POSITIONS = (torch.int64, torch.int32)  # dtypes whose arithmetic is taken for that of the integers


@dataclass(frozen=True)
class Predicate:
    """All of `atoms` hold; never, if `atoms` is None. An atom ("<=" | "==" | "!=", e) compares e with 0."""

    atoms: frozenset[tuple[str, Any]] | None

    def __and__(self, other: Predicate) -> Predicate:
        if self.atoms is None or other.atoms is None:
            return NEVER
        return Predicate(self.atoms | other.atoms)

    def __invert__(self) -> Predicate | None:
        """The opposite; None where that is no conjunction."""
        if self.atoms is None:
            return ALWAYS
        if len(self.atoms) != 1:
            return None if self.atoms else NEVER
        ((relation, e),) = self.atoms
        if relation == "<=":
            return compare("<=", sp.Integer(1) - e)
        return compare("!=" if relation == "==" else "==", e)


ALWAYS, NEVER = Predicate(frozenset()), Predicate(None)


def compare(relation: str, expression: Any) -> Predicate:
    """The expression <= 0, == 0 or != 0, decided where the signs of its parts decide it."""
    e: Any = sp.expand(expression)
    if relation == "<=":
        holds = True if e.is_nonpositive else False if e.is_positive else None
    else:
        zero = True if e == 0 else e.is_zero
        holds = None if zero is None else zero == (relation == "==")
    if holds is None:
        return Predicate(frozenset({(relation, e)}))
    return ALWAYS if holds else NEVER


def size_of(n: Any) -> sp.Expr:
    return n.node.expr if isinstance(n, torch.SymInt) else sp.Integer(n)


class Unknown(Exception):
    """This element cannot be evaluated."""


Index = tuple[sp.Expr, ...]
Element = sp.Expr | Predicate


class Evaluator:
    """Evaluates elements of the Values of one graph, and of the graph around it.

    read     all that was looked into, with the graph it is in
    unknown  name -> the Value whose elements an expression calls so
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.read: list[tuple[View, Value]] = []
        self.unknown: dict[str, tuple[View, Value]] = {}
        self._names: dict[int, str] = {}
        self._memo: dict[tuple[int, Index], Element] = {}

    def element(self, value: Any, index: Index, view: View | None = None) -> Element:
        """The element of `value` at `index`, one expression for each of its dimensions."""
        return _In(self, view or self.view).element(value, index)


class _In:
    """Evaluation inside one graph."""

    def __init__(self, evaluator: Evaluator, view: View) -> None:
        self.evaluator, self.view = evaluator, view

    def element(self, value: Any, index: Index) -> Element:
        if not isinstance(value, Value):
            return _number(value)
        if isinstance(value.fake, torch.SymInt):
            return size_of(value.fake)
        memo, key = self.evaluator._memo, (id(value), index)
        if key not in memo:
            memo[key] = self._evaluate(value, index)
        return memo[key]

    def _evaluate(self, value: Value, index: Index) -> Element:
        outside = self.view.outside(value)
        if outside is not None:
            return self.evaluator.element(outside[1], index, outside[0])
        self.evaluator.read.append((self.view, value))
        floating = value.dtype is not None and value.dtype.is_floating_point
        rule = (FLOATING if floating else _RULES).get(value.op)
        known = floating or value.dtype == torch.bool or value.dtype in _POSITIONS
        if rule is not None and known:
            try:
                return rule(self, value, index)
            except Unknown:
                pass
        return self.load(value, index)

    def load(self, value: Value, index: Index) -> Element:
        """The element as an unknown of its own."""
        evaluator = self.evaluator
        name = evaluator._names.setdefault(id(value), f"x{len(evaluator._names)}")
        evaluator.unknown[name] = (self.view, value)
        found = sp.Function(name, integer=True)(*index)
        return compare("!=", found) if value.dtype == torch.bool else found

    def integer(self, value: Any, index: Index) -> sp.Expr:
        """As a number: what is surely true is 1."""
        found = self.element(value, index)
        if not isinstance(found, Predicate):
            return found
        if found in (ALWAYS, NEVER):
            return sp.Integer(found == ALWAYS)
        raise Unknown

    def truth(self, value: Any, index: Index) -> Predicate:
        """As a condition: what is not zero."""
        found = self.element(value, index)
        return found if isinstance(found, Predicate) else compare("!=", found)


def _number(value: Any) -> Element:
    if isinstance(value, bool):
        return ALWAYS if value else NEVER
    if isinstance(value, (int, float)) and float(value).is_integer():
        return sp.Integer(int(value))
    raise Unknown


def _broadcast(value: Any, index: Index) -> Index:
    """Where an operand is read for the result's element: from the right, a dimension of size 1 at 0."""
    shape: Sequence[Any] = value.shape if isinstance(value, Value) else ()
    own = index[len(index) - len(shape) :]
    return tuple(sp.Integer(0) if isinstance(n, int) and n == 1 else i for n, i in zip(shape, own, strict=True))


# --- rules: (where, value, index) -> element -----------------------------------------------------------------------


def _arange(where: _In, value: Value, index: Index) -> Element:
    start, step = (where.integer(a, ()) for a in value.args[:2])
    return start + step * index[0]


def _filled(where: _In, value: Value, index: Index) -> Element:
    number = _number(value.args[0])
    if value.dtype == torch.bool and not isinstance(number, Predicate):
        return compare("!=", number)
    return where.integer(value.args[0], ()) if isinstance(number, Predicate) and value.dtype != torch.bool else number


def _integers(combine: Callable[[sp.Expr, sp.Expr], Element]):
    def rule(where: _In, value: Value, index: Index) -> Element:
        if not all(_positions(a) for a in value.args):
            raise Unknown
        found = combine(*(where.integer(a, _broadcast(a, index)) for a in value.args))
        if value.dtype == torch.bool and not isinstance(found, Predicate):  # True + True is True, not 2
            raise Unknown
        return found

    return rule


def _positions(a: Any) -> bool:
    return not isinstance(a, Value) or a.dtype == torch.bool or a.dtype in _POSITIONS or a.dtype is None


def _floordiv(a: sp.Expr, b: sp.Expr) -> Element:
    if b.is_positive and a.is_nonnegative:
        return sp.floor(a / b)
    raise Unknown


def _convert(where: _In, value: Value, index: Index) -> Element:
    source = value.args[0]
    if value.dtype == torch.bool:
        known = source.dtype == torch.bool or source.dtype in _POSITIONS
        return where.truth(source, index) if known else compare("!=", _raw(where.load(source, index)))
    found = where.integer(source, index) if _positions(source) else None
    if found is None or (found.atoms(AppliedUndef) and (source.dtype, value.dtype) == (torch.int64, torch.int32)):
        raise Unknown  # what is not known may not fit
    return found


def _raw(element: Element) -> sp.Expr:
    assert not isinstance(element, Predicate)
    return element


def _and(where: _In, value: Value, index: Index) -> Element:
    a, b = (where.truth(a, _broadcast(a, index)) for a in value.args)
    return a & b


def _or(where: _In, value: Value, index: Index) -> Element:
    a, b = (where.truth(a, _broadcast(a, index)) for a in value.args)
    if ALWAYS in (a, b):
        return ALWAYS
    if a in (b, NEVER):
        return b
    if b == NEVER:
        return a
    raise Unknown


def _not(where: _In, value: Value, index: Index) -> Element:
    found = ~where.truth(value.args[0], index)
    if found is None:
        raise Unknown
    return found


def _expand(where: _In, value: Value, index: Index) -> Element:
    return where.element(value.args[0], _broadcast(value.args[0], index))


def _unsqueeze(where: _In, value: Value, index: Index) -> Element:
    at = len(index) + value.args[1]
    return where.element(value.args[0], index[:at] + index[at + 1 :])


def _squeeze(where: _In, value: Value, index: Index) -> Element:
    source = value.args[0]
    at = len(source.shape) + value.args[1]
    if not (isinstance(source.shape[at], int) and source.shape[at] == 1):
        raise Unknown
    return where.element(source, (*index[:at], sp.Integer(0), *index[at:]))


def _transpose(where: _In, value: Value, index: Index) -> Element:
    source, a, b = value.args
    moved = list(index)
    moved[a], moved[b] = index[b], index[a]
    return where.element(source, tuple(moved))


def _reshape(where: _In, value: Value, index: Index) -> Element:
    """Dimensions of size 1 come and go; others keep their order."""
    source = value.args[0]
    kept = [(str(n), i) for n, i in zip(value.shape, index, strict=True) if str(n) != "1"]
    old = [str(n) for n in source.shape if str(n) != "1"]
    if [n for n, _ in kept] != old:
        raise Unknown
    left = iter(i for _, i in kept)
    return where.element(source, tuple(sp.Integer(0) if str(n) == "1" else next(left) for n in source.shape))


def _narrow(where: _In, value: Value, index: Index) -> Element:
    source, dim, start, _, step = value.args
    return where.element(source, _moved(index, dim, _natural(start) + _natural(step) * index[dim]))


def _half(where: _In, value: Value, index: Index) -> Element:
    source, which = value.args
    return where.element(source, _moved(index, -1, index[-1] + which * sp.Integer(source.shape[-1] // 2)))


def _select(where: _In, value: Value, index: Index) -> Element:
    source, dim, number = value.args
    at = len(source.shape) + dim
    return where.element(source, (*index[:at], _natural(number), *index[at:]))


def _moved(index: Index, dim: int, to: sp.Expr) -> Index:
    moved = list(index)
    moved[dim] = to
    return tuple(moved)


def _natural(n: Any) -> sp.Expr:
    """A position counted from the start, known to be one."""
    if isinstance(n, int) and not isinstance(n, bool) and n >= 0:
        return sp.Integer(n)
    raise Unknown


def _index(where: _In, value: Value, index: Index) -> Element:
    """Basic indexing, and rows taken by tensors that stand side by side."""
    source, parts = value.args
    taken = [part for part in parts if isinstance(part, Value)]
    rank = max((len(part.shape) for part in taken), default=0)
    first = next((i for i, part in enumerate(parts) if isinstance(part, Value)), 0)
    together = all(isinstance(part, Value) for part in parts[first : first + len(taken)])
    if taken and (not together or any(isinstance(part, int) for part in parts)):
        raise Unknown
    todo, own = list(index), []
    rows: Index | None = None
    for part in parts:
        if part is None:
            todo.pop(0)
        elif isinstance(part, Value):
            if rows is None:
                rows, todo = tuple(todo[:rank]), todo[rank:]
            at = where.integer(part, _broadcast(part, rows))
            if not at.is_nonnegative:  # a negative one would count from the end
                raise Unknown
            own.append(at)
        elif isinstance(part, tuple):
            _, start, _, step = part
            own.append(_natural(start) + _natural(step) * todo.pop(0))
        else:
            own.append(_natural(part))
    return where.element(source, tuple(own))


def _cumsum(where: _In, value: Value, index: Index) -> Element:
    """Of zeros: 0. Of anything else it is not evaluated."""
    source, dim, _ = value.args
    up_to = sp.Dummy(integer=True, nonnegative=True)
    if where.integer(source, _moved(index, dim, up_to)) != 0:
        raise Unknown
    return sp.Integer(0)


def _diff(where: _In, value: Value, index: Index) -> Element:
    """x[i] - x[i - 1]; with one element before x, what holds at i = 0 must be what the formula says there."""
    source, dim, before = value.args
    if not _positions(source) or source.dtype == torch.bool:
        raise Unknown
    i = index[dim]
    if before is None:
        return where.integer(source, _moved(index, dim, i + 1)) - where.integer(source, index)
    if not (isinstance(before, Value) and isinstance(before.shape[dim], int) and before.shape[dim] == 1):
        raise Unknown
    if i.is_positive:
        return where.integer(source, index) - where.integer(source, _moved(index, dim, i - 1))
    zero = sp.Integer(0)
    at = sp.Dummy(integer=True, nonnegative=True)
    anywhere = where.integer(source, _moved(index, dim, at))
    previous = anywhere.subs(at, at - 1)
    first = where.integer(before, _moved(index, dim, zero))
    if sp.expand(previous.subs(at, zero) - first) != 0:
        raise Unknown
    return sp.expand((anywhere - previous).subs(at, i))


def _triangle(sign: int):
    def rule(where: _In, value: Value, index: Index) -> Element:
        source, diagonal = value.args
        if value.dtype != torch.bool or not isinstance(diagonal, int):
            raise Unknown
        below = index[-1] - index[-2] - diagonal  # <= 0 in the lower triangle
        return where.truth(source, index) & compare("<=", sign * below)

    return rule


_RULES: dict[str, Callable[[_In, Value, Index], Element]] = {
    "arange": _arange, "filled": _filled, "convert": _convert,
    "add": _integers(lambda a, b: a + b), "sub": _integers(lambda a, b: a - b), "mul": _integers(lambda a, b: a * b),
    "floordiv": _integers(_floordiv), "neg": lambda where, value, index: -where.integer(value.args[0], index),
    "le": _integers(lambda a, b: compare("<=", a - b)), "lt": _integers(lambda a, b: compare("<=", a - b + 1)),
    "eq": _integers(lambda a, b: compare("==", a - b)), "ne": _integers(lambda a, b: compare("!=", a - b)),
    "and": _and, "or": _or, "not": _not, "expand": _expand, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "transpose": _transpose, "reshape": _reshape, "merge_last": _reshape, "narrow": _narrow, "half": _half,
    "select": _select, "index": _index, "cumsum": _cumsum, "diff": _diff, "tril": _triangle(1), "triu": _triangle(-1),
}  # fmt: skip
# For tensors of floating point: none but those of `_added_masks.py`.
FLOATING: dict[str, Callable[[_In, Value, Index], Element]] = {}
