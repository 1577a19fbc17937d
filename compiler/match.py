"""Unify an idiom with a value of a graph; when they differ, say where.

An idiom is traced by running it on small tensors while every PyTorch call is recorded, in the same canonical form
as graphs. Unification then walks both from the result down. Both orders of a commutative product are tried; a cast
in the idiom may be absent from the graph where it would do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map

from ..patterns._fusion import Hole, Idiom, Match, Value
from .canonicalize import ValueTable

_COMMUTATIVE = ("add", "mul")


@dataclass(frozen=True)
class Traced:
    """An idiom in canonical form. `markers` tells which parameter a cast to a marker dtype refers to."""

    idiom: Idiom
    root: Value
    params: dict[int, str]
    markers: dict[torch.dtype, str]


class _Record(TorchFunctionMode):
    """Turns every PyTorch call into a Value of `table`."""

    def __init__(self, table: ValueTable, known: dict[int, Value]):
        super().__init__()
        self.table = table
        self.known = known
        self.keep: list[Any] = []  # so that ids stay unique while recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = (resolve_name(func) or func.__name__).split(".")[-1].strip("_")
        if name != "get" and isinstance(result, (torch.Tensor, tuple, list)):
            self.keep.append(result)
            values, named = tree_map(self._value, (tuple(args), kwargs))
            value = self.table.canonical(name, values, named, result)
            self.known[id(result)] = value
            parts = result if isinstance(result, (tuple, list)) else ()
            for i, part in enumerate(p for p in parts if isinstance(p, torch.Tensor)):
                self.known[id(part)] = self.table.canonical("getitem", (value, i), {}, part)
        return result

    def _value(self, a: Any) -> Any:
        return self.known[id(a)] if isinstance(a, torch.Tensor) else a


@functools.cache
def traced(idiom: Idiom) -> Traced:
    """Run the idiom once on its example tensors, whatever modes the caller is in."""
    with torch.device("cpu"), torch.no_grad(), torch._C._DisableAutocast():
        return _trace(idiom, idiom.arguments())


def _trace(idiom: Idiom, arguments: dict[str, Any]) -> Traced:
    table, known, params, markers = ValueTable(), {}, {}, {}
    for name, argument in arguments.items():
        if isinstance(argument, torch.Tensor):
            value = known[id(argument)] = table.unique("param", name, argument)
            params[id(value)] = name
            if argument.dtype != torch.float32:
                markers.setdefault(argument.dtype, name)
    recorder = _Record(table, known)
    with recorder:
        result = idiom.function(**arguments)
    return Traced(idiom, known[id(result)], params, markers)


@dataclass
class Near:
    """The closest an idiom came: how much of it matched, and what was found instead of what."""

    idiom: str = ""
    matched: int = 0
    expected: Value | None = None
    found: Any = None

    def reason(self) -> str:
        return f"unlike {self.idiom}: expected {self.expected}, found {_describe(self.found)}"


def _describe(found: Any) -> str:
    return str(found) if isinstance(found, Value) else repr(found)


@dataclass
class _Attempt:
    """One unification: bindings so far. Copied at every choice, so that choices can be undone."""

    pattern: Traced
    near: Near
    bound: dict[str, Any] = field(default_factory=dict)
    paired: dict[int, Value] = field(default_factory=dict)
    dtypes: list[tuple[torch.dtype | None, torch.dtype]] = field(default_factory=list)

    def copy(self) -> _Attempt:
        return _Attempt(self.pattern, self.near, dict(self.bound), dict(self.paired), list(self.dtypes))


def unify(idiom: Idiom, value: Value, near: Near | None = None) -> Match | None:
    """The match of `idiom` whose result is `value`, or None with the closest point of failure left in `near`."""
    pattern = traced(idiom)
    if near is None and pattern.root.op not in (value.op, "convert"):
        return None
    near = near if near is not None else Near()
    for attempt in _unify(pattern.root, value, _Attempt(pattern, near)):
        if all(_dtype_holds(attempt, *check) for check in attempt.dtypes):
            params = set(pattern.params)
            interior = tuple({id(v): v for p, v in attempt.paired.items() if p not in params}.values())
            return Match(idiom, value, attempt.bound, interior)
    return None


def _dtype_holds(attempt: _Attempt, actual: torch.dtype | None, wanted: torch.dtype) -> bool:
    """A cast to a marker dtype means: to the dtype of the parameter that carried the marker."""
    name = attempt.pattern.markers.get(wanted)
    return actual == (attempt.bound[name].dtype if name is not None else wanted)


def _unify(p: Any, v: Any, attempt: _Attempt) -> Iterator[_Attempt]:
    """Every way in which pattern `p` can stand for `v`, as attempts with the bindings made."""
    if isinstance(p, Value):
        yield from _unify_values(p, v, attempt)
    elif isinstance(p, (tuple, list)):
        if isinstance(v, (tuple, list)) and len(p) == len(v):
            yield from _unify_all(list(zip(p, v, strict=True)), attempt)
    elif isinstance(p, Hole):
        number = isinstance(v, (int, float)) and not isinstance(v, bool)
        if number and attempt.bound.get(p.name, v) == v:
            attempt = attempt.copy()
            attempt.bound[p.name] = v
            yield attempt
    elif p is v or (type(p) in (int, float) and type(v) in (int, float) and p == v) or (p == v and type(p) is type(v)):
        yield attempt


def _unify_values(p: Value, v: Any, attempt: _Attempt) -> Iterator[_Attempt]:
    if not isinstance(v, Value):
        return
    if id(p) in attempt.paired:
        if attempt.paired[id(p)] is v:
            yield attempt
        else:
            _note(attempt, p, v)
        return
    name = attempt.pattern.params.get(id(p))
    if name is not None:
        if isinstance(v.fake, torch.Tensor):
            attempt = attempt.copy()
            attempt.bound[name] = attempt.paired[id(p)] = v
            yield attempt
        return
    if p.op == "convert":
        yield from _unify_cast(p, v, attempt)
        return
    if p.op != v.op or len(p.args) != len(v.args):
        _note(attempt, p, v)
        return
    attempt = attempt.copy()
    attempt.paired[id(p)] = v
    found = False
    for args in (v.args, v.args[::-1]) if p.op in _COMMUTATIVE else (v.args,):
        for result in _unify_all(list(zip(p.args, args, strict=True)), attempt):
            found = True
            yield result
    if not found and not any(isinstance(a, Value) for a in p.args[1:]):
        _note(attempt, p, v)


def _unify_cast(p: Value, v: Value, attempt: _Attempt) -> Iterator[_Attempt]:
    source, dtype = p.args
    if v.op == "convert":
        inner = attempt.copy()
        inner.paired[id(p)] = v
        inner.dtypes.append((v.dtype, dtype))
        yield from _unify(source, v.args[0], inner)
    without = attempt.copy()
    without.dtypes.append((v.dtype, dtype))
    yield from _unify(source, v, without)


def _unify_all(pairs: list[tuple[Any, Any]], attempt: _Attempt) -> Iterator[_Attempt]:
    if not pairs:
        yield attempt
        return
    (p, v), *rest = pairs
    for result in _unify(p, v, attempt):
        yield from _unify_all(rest, result)


def _note(attempt: _Attempt, expected: Value, found: Any) -> None:
    """Remember the failure that came furthest: its reason is the one worth telling."""
    matched = len(attempt.paired)
    if matched > attempt.near.matched:
        near = attempt.near
        near.idiom, near.matched, near.expected, near.found = (
            attempt.pattern.idiom.name,
            matched,
            expected,
            found,
        )
