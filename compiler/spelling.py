"""How each op may be spelled: rules from a call's arguments to canonical (op, args).

A rule takes (table, args, kwargs, fake result) and returns a canonical op with its arguments, `Aliased(value)` when
the call returns its input unchanged, or None when this form of the call is not understood. Dimensions come out
counted from the end, so that a pattern is independent of rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from ..patterns._fusion import Value


@dataclass(frozen=True)
class Aliased:
    """The call does nothing: its result is this value."""

    value: Value


@dataclass(frozen=True)
class Drawn:  # the call draws random numbers: a known op, but two calls are two values
    op: str
    args: tuple[Any, ...]


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], "Aliased | Drawn | tuple[str, tuple[Any, ...]] | None"]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def same_shape(a: Any, b: Any) -> bool:
    """Equal sizes, known without adding a guard: symbolic sizes by expression."""
    return len(a) == len(b) and all(size_key(x) == size_key(y) for x, y in zip(a, b, strict=True))


def size_key(n: Any) -> Any:
    return f"sym {n.node.expr}" if isinstance(n, torch.SymInt) else n


def _kept(inner: Value, fake: Any) -> bool:
    """May a result skip over `inner`? Not when `inner` was computed under no_grad and so stops a gradient."""
    return not (inner.cut and isinstance(fake, torch.Tensor) and fake.requires_grad)


def _is_number(a: Any) -> bool:
    return isinstance(a, Number) and not isinstance(a, bool)


# --- elementwise ---------------------------------------------------------------------------------------------------


@_rule("to", "float", "half", "bfloat16", "double", "type_as", "type", "convert_element_type")
def _convert(table, args, kwargs, fake):
    x = args[0]
    if fake.device != x.fake.device:
        return None
    if fake.dtype == x.dtype:
        return Aliased(x)
    return "convert", (x, fake.dtype)


@_rule("add", "radd")
def _add(table, args, kwargs, fake):
    a, b = args
    if kwargs:
        return None
    if _is_number(a):
        a, b = b, a
    if _is_number(b) and b == 0 and fake.dtype == a.dtype:
        return Aliased(a)
    return "add", (a, b)


@_rule("sub")
def _sub(table, args, kwargs, fake):
    a, b = args
    if kwargs:
        return None
    return ("add", (a, -b)) if _is_number(b) else ("sub", (a, b))


@_rule("rsub")
def _rsub(table, args, kwargs, fake):
    return None if kwargs else ("sub", (args[1], args[0]))


@_rule("mul", "rmul", "multiply")
def _mul(table, args, kwargs, fake):
    a, b = args
    if kwargs:
        return None
    if _is_number(a):
        a, b = b, a
    if _is_number(b):
        if b == 1 and fake.dtype == a.dtype:
            return Aliased(a)
        return ("neg", (a,)) if b == -1 else ("mul", (a, b))
    if a is b:
        return "pow", (a, 2)
    for x, s in ((a, b), (b, a)):
        if s.op == "sigmoid" and s.args[0] is x and _kept(s, fake):
            return "silu", (x,)
    return "mul", (a, b)


@_rule("div", "truediv", "true_divide", "divide")
def _div(table, args, kwargs, fake):
    a, b = args
    if kwargs:
        return None
    if isinstance(b, Value) and b.op == "sqrt" and _kept(b, fake):
        inverse = table.make("rsqrt", b.args, b.fake)
        return ("rsqrt", b.args) if _is_number(a) and a == 1 else ("mul", (a, inverse))
    if _is_number(b) and b == 1 and fake.dtype == a.dtype:
        return Aliased(a)
    return "div", (a, b)


@_rule("rtruediv", "rdiv")
def _rdiv(table, args, kwargs, fake):
    return _div(table, (args[1], args[0]), kwargs, fake)


@_rule("pow")
def _pow(table, args, kwargs, fake):
    x, exponent = args[0], args[1] if len(args) > 1 else kwargs["exponent"]
    if exponent == -0.5:
        return "rsqrt", (x,)
    return ("sqrt", (x,)) if exponent == 0.5 else ("pow", (x, exponent))


RULES["reciprocal"] = lambda table, args, kwargs, fake: _div(table, (1, args[0]), kwargs, fake)
RULES["silu"] = lambda table, args, kwargs, fake: ("silu", (args[0],))
RULES["relu"] = lambda table, args, kwargs, fake: ("relu", (args[0],))
RULES["clamp_max"] = lambda table, args, kwargs, fake: _clamp(table, (args[0], None, *args[1:]), kwargs, fake)
RULES["square"] = lambda table, args, kwargs, fake: ("pow", (args[0], 2))


def _unary(name: str) -> Rule:
    def rule(table, args, kwargs, fake):
        return (name, (args[0],)) if len(args) == 1 and not kwargs else None

    return rule


for _name in ("neg", "rsqrt", "sqrt", "abs", "exp", "tanh", "sigmoid", "view_as_complex", "view_as_real"):
    RULES[_name] = _unary(_name)


@_rule("clamp", "clip")
def _clamp(table, args, kwargs, fake):
    x, low, high = (*args, *(kwargs.get(k) for k in ("min", "max")[len(args) - 1 :]))
    return ("clamp", (x, low, high)) if all(a is None or _is_number(a) for a in (low, high)) else None


@_rule("gelu")
def _gelu(table, args, kwargs, fake):
    approximate = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
    return {"none": "gelu", "tanh": "gelu_tanh"}[approximate], (args[0],)


@_rule("dropout")
def _dropout(table, args, kwargs, fake):
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    if p == 0 or not training:
        return Aliased(args[0])
    return Drawn("dropout", (args[0], p)) if isinstance(p, float) and training is True else None


# --- reductions, products, losses ----------------------------------------------------------------------------------


def _reduction(name: str) -> Rule:
    def rule(table, args, kwargs, fake):
        x = args[0]
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        if fake.dtype != x.dtype or dims is None:
            return None
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        negative = tuple(sorted(d if d < 0 else d - len(x.shape) for d in dims))
        return name, (x, negative, bool(keepdim))

    return rule


RULES |= {name: _reduction(name) for name in ("mean", "sum")}


@_rule("linear")
def _linear(table, args, kwargs, fake):
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    return "linear", (args[0], args[1] if len(args) > 1 else kwargs["weight"], bias)


@_rule("matmul", "mm", "bmm")
def _matmul(table, args, kwargs, fake):
    x, w = args[0], args[1]
    if len(w.shape) == 2 and w.op == "transpose" and _kept(w, fake):
        return "linear", (x, w.args[0], None)
    return "matmul", (x, w)


# --- shapes --------------------------------------------------------------------------------------------------------


@_rule("contiguous", "clone")
def _unchanged(table, args, kwargs, fake):
    return Aliased(args[0])


@_rule("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
def _reshape(table, args, kwargs, fake):
    x, old, new = args[0], args[0].shape, tuple(fake.shape)
    if fake.dtype != x.dtype:
        return None
    if same_shape(old, new):
        return Aliased(x)
    if len(old) == len(new) + 1 and same_shape(old[:-2], new[:-1]):
        return "merge_last", (x,)
    if len(new) == len(old) + 1 and new[-1] == 2 and same_shape(old[:-1], new[:-2]):
        return "pairs", (x,)
    return "reshape", (x, tuple(size_key(n) for n in new))


@_rule("unsqueeze")
def _unsqueeze(table, args, kwargs, fake):
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return "unsqueeze", (args[0], _negative(dim, len(fake.shape)))


@_rule("squeeze")
def _squeeze(table, args, kwargs, fake):
    return "squeeze", (args[0], _negative(args[1], len(args[0].shape)))


@_rule("transpose", "swapaxes")
def _transpose(table, args, kwargs, fake):
    n = len(args[0].shape)
    a, b = sorted((_negative(args[1], n), _negative(args[2], n)))
    return Aliased(args[0]) if a == b else ("transpose", (args[0], a, b))


RULES["t"] = lambda table, args, kwargs, fake: ("transpose", (args[0], -2, -1))


@_rule("permute")
def _permute(table, args, kwargs, fake):
    dims = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    n = len(dims)
    dims = [_negative(d, n) for d in dims]
    moved = [i - n for i in range(n) if dims[i] != i - n]
    if not moved:
        return Aliased(args[0])
    return ("transpose", (args[0], *moved)) if len(moved) == 2 else ("permute", (args[0], tuple(dims)))


@_rule("cat", "concat")
def _cat(table, args, kwargs, fake):
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    tensors = tuple(args[0] if args else kwargs["tensors"])
    if len(tensors) > 1:  # what has nothing in it adds nothing, unless all have
        tensors = tuple(t for t in tensors if len(t.shape) != len(fake.shape) or size_key(t.shape[dim]) != 0) or tensors
    if len(tensors) == 1 and tensors[0].dtype == fake.dtype:
        return Aliased(tensors[0])
    return "cat", (tensors, _negative(dim, len(fake.shape)))


@_rule("stack")
def _stack(table, args, kwargs, fake):
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return "stack", (tuple(args[0] if args else kwargs["tensors"]), _negative(dim, len(fake.shape)))


@_rule("repeat_interleave")
def _repeat_interleave(table, args, kwargs, fake):
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    return "repeat_interleave", (args[0], args[1], _negative(dim, len(fake.shape)))


@_rule("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def _chunk(table, args, kwargs, fake):
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    return "chunk", (args[0], _negative(dim, len(args[0].shape)), tuple(size_key(p.shape[dim]) for p in fake))


@_rule("unbind")
def _unbind(table, args, kwargs, fake):
    return "unbind", (args[0], _negative(kwargs.get("dim", args[1] if len(args) > 1 else 0), len(args[0].shape)))


@_rule("narrow")
def _narrow_rule(table, args, kwargs, fake):
    _, dim, start, length = args
    if not isinstance(start, int):
        return None
    if start < 0:  # counted from the end; a stop of zero would mean the beginning
        start += args[0].shape[dim]
    return _narrow(args[0], _negative(dim, len(fake.shape)), start, start + length, 1)


@_rule("getitem")
def _getitem(table, args, kwargs, fake):
    x, index = args
    if isinstance(x.fake, (tuple, list)):
        if x.op == "unbind":
            source, dim = x.args
            return _select(source, dim, index % len(x.fake))
        if x.op != "chunk":
            return "item", (x, index)
        source, dim, sizes = x.args
        index %= len(sizes)
        if not all(isinstance(n, int) for n in sizes):
            return None
        return _narrow(source, dim, sum(sizes[:index]), sum(sizes[: index + 1]), 1)
    return _index(x, index if isinstance(index, tuple) else (index,), fake)


def _index(x: Value, index: tuple[Any, ...], fake: Any):
    """x[index] when at most one part of the index does anything."""
    known = [i for i in index if i is not Ellipsis and i is not None]
    if any(not isinstance(i, (slice, int)) or isinstance(i, bool) for i in known):
        return None
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    fill = [slice(None)] * (len(x.shape) - len(known))
    full = [*index[:at], *fill, *index[at + 1 :]]
    steps, dim = [], 0
    for part in full:
        if part is None:
            steps.append(("unsqueeze", part, dim))
            continue
        if isinstance(part, int):
            steps.append(("select", part, dim - len(x.shape)))
        elif not _is_whole(part, x.shape[dim]):
            steps.append(("slice", part, dim - len(x.shape)))
        dim += 1
    if not steps:
        return Aliased(x)
    if len(steps) > 1:
        return None
    kind, part, at_dim = steps[0]
    if kind == "unsqueeze":
        return "unsqueeze", (x, full.index(None) - len(fake.shape))
    if kind == "select":
        return _select(x, at_dim, part)
    return _narrow(x, at_dim, part.start, part.stop, part.step)


def _select(x: Value, dim: int, index: int):
    if x.op == "pairs" and dim == -1 and index in (0, 1):
        return "every_other", (x.args[0], index)
    return "select", (x, dim, index)


@_rule("select")
def _select_rule(table, args, kwargs, fake):
    return _select(args[0], _negative(args[1], len(args[0].shape)), args[2])


def _is_whole(part: slice, size: Any) -> bool:
    """Does the slice keep everything? Decided without a guard when sizes are symbolic."""
    if part.step not in (None, 1) or part.start not in (None, 0):
        return False
    return part.stop is None or (isinstance(size, int) and isinstance(part.stop, int) and part.stop >= size)


def _narrow(x: Value, dim: int, start: Any, stop: Any, step: Any):
    """A slice of one dimension; halves and every second element of the last one by name."""
    size = x.shape[dim]
    start, step = start or 0, step or 1
    if isinstance(size, int) and isinstance(start, int) and (stop is None or isinstance(stop, int)):
        start, stop, step = slice(start, stop, step).indices(size)
        if (start, stop, step) == (0, size, 1):
            return Aliased(x)
        if dim == -1 and step == 1 and 2 * (stop - start) == size and start in (0, size // 2):
            return "half", (x, 0 if start == 0 else 1)
        if dim == -1 and step == 2 and size % 2 == 0 and start in (0, 1) and stop >= size - 1 + start:
            return "every_other", (x, start)
    return "narrow", (x, dim, start, stop, step)


def _negative(dim: int, rank: int) -> int:
    return dim if dim < 0 else dim - rank
