"""How masks are spelled: positions, constants, comparisons, logic, indexing, and the attention that reads the mask.

Rules as in `spelling.py`, which these complete.
"""

from __future__ import annotations

from typing import Any

import torch

from ..patterns._fusion import Value
from .spelling import RULES, Aliased, Drawn, _is_number, _negative, same_shape, size_key

Result = Aliased | Drawn | tuple[str, tuple[Any, ...]] | None


def _like(fake: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor that is made from nothing differs in, beside its elements."""
    return tuple(size_key(n) for n in fake.shape), fake.dtype, str(fake.device)


# --- made from nothing ---------------------------------------------------------------------------------------------


def _arange(table, args, kwargs, fake) -> Result:
    """("arange", (start, step, ...)): element i is start + step i."""
    given = dict(zip(("start", "end", "step") if len(args) > 1 else ("end",), args, strict=False)) | kwargs
    if fake.dtype not in (torch.int64, torch.int32):
        return None
    return "arange", (given.get("start", 0), given.get("step", 1), *_like(fake))


def _filled(value: Any, at: int | None = None):
    """("filled", (number, ...)): every element is that number, a constant or the argument number `at`."""

    def rule(table, args, kwargs, fake) -> Result:
        number = value if at is None else kwargs["fill_value"] if "fill_value" in kwargs else args[at]
        if not isinstance(number, (int, float)) or fake.requires_grad:
            return None  # two leaves are two values
        return "filled", (number, *_like(fake))

    return rule


# --- elementwise ---------------------------------------------------------------------------------------------------


def _compare(name: str, swapped: bool = False):
    def rule(table, args, kwargs, fake) -> Result:
        if kwargs or len(args) != 2 or not isinstance(fake, torch.Tensor):
            return None
        return name, args[::-1] if swapped else args

    return rule


def _logic(name: str):
    def rule(table, args, kwargs, fake) -> Result:
        booleans = all(isinstance(a, Value) and a.dtype == torch.bool for a in args)
        return (name, tuple(args)) if booleans and not kwargs else None

    return rule


def _floor_divide(table, args, kwargs, fake) -> Result:
    return None if kwargs or fake.is_floating_point() else ("floordiv", tuple(args))


def _where(table, args, kwargs, fake) -> Result:
    return None if kwargs or len(args) != 3 else ("where", tuple(args))


def _masked_fill(table, args, kwargs, fake) -> Result:
    given = dict(zip(("input", "mask", "value"), args, strict=False)) | kwargs
    return ("masked_fill", tuple(given[n] for n in ("input", "mask", "value"))) if _is_number(given["value"]) else None


# --- along a dimension ---------------------------------------------------------------------------------------------


def _cumsum(table, args, kwargs, fake) -> Result:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return "cumsum", (args[0], _negative(dim, len(fake.shape)), fake.dtype)


def _diff(table, args, kwargs, fake) -> Result:
    given = dict(zip(("input", "n", "dim", "prepend", "append"), args, strict=False)) | kwargs
    if given.get("n", 1) != 1 or given.get("append") is not None:
        return None
    return "diff", (given["input"], _negative(given.get("dim", -1), len(fake.shape)), given.get("prepend"))


def _triangle(name: str):
    def rule(table, args, kwargs, fake) -> Result:
        diagonal = kwargs.get("diagonal", args[1] if len(args) > 1 else 0)
        return name, (args[0], diagonal)

    return rule


def _hstack(table, args, kwargs, fake) -> Result:
    return RULES["cat"](table, (args[0] if args else kwargs["tensors"], min(1, len(fake.shape) - 1)), {}, fake)


def _expand(table, args, kwargs, fake) -> Result:
    x = args[0]
    if same_shape(x.shape, fake.shape):
        return Aliased(x)
    return "expand", (x, tuple(size_key(n) for n in fake.shape))


# --- indexing ------------------------------------------------------------------------------------------------------

_simple_getitem = RULES["getitem"]


def _getitem(table, args, kwargs, fake) -> Result:
    """x[...] by name where one part of the index does anything, else ("index", (x, parts)), see `_part`."""
    x, index = args
    simple = _simple_getitem(table, args, kwargs, fake)
    if simple is not None or not isinstance(x.fake, torch.Tensor) or not isinstance(fake, torch.Tensor):
        return simple  # type: ignore[return-value]
    index = index if isinstance(index, tuple) else (index,)
    taken = sum(part is not None and part is not Ellipsis for part in index)
    at = next((i for i, part in enumerate(index) if part is Ellipsis), len(index))
    rest = [slice(None)] * (len(x.shape) - taken)
    return "index", (x, tuple(_part(part) for part in (*index[:at], *rest, *index[at + 1 :])))


def _part(part: Any) -> Any:
    """None: a new dimension; an int; a Value of int64: rows to take; ("slice", start, stop, step)."""
    if part is None or (isinstance(part, int) and not isinstance(part, bool)):
        return part
    if isinstance(part, Value) and part.dtype in (torch.int64, torch.int32):
        return part
    if isinstance(part, slice) and all(n is None or _is_number(n) or isinstance(n, Value) for n in _ends(part)):
        return ("slice", part.start or 0, part.stop, part.step or 1)
    raise ValueError(f"an index that no rule knows: {part}")


def _ends(part: slice) -> tuple[Any, Any, Any]:
    return part.start, part.stop, part.step


# --- attention -----------------------------------------------------------------------------------------------------


def _attention(table, args, kwargs, fake) -> Result:
    """("attention", (q, k, v, mask, dropout_p, is_causal, scale, grouped)): torch's own, whatever was left out."""
    order = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(order[:6], args, strict=False)) | kwargs
    if not set(given) <= set(order):
        return None
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    given = tuple((defaults | given)[name] for name in order)
    return Drawn("attention", given) if given[4] else ("attention", given)


RULES.update(
    {
        "arange": _arange, "ones": _filled(1), "new_ones": _filled(1), "ones_like": _filled(1),
        "zeros": _filled(0), "new_zeros": _filled(0), "zeros_like": _filled(0),
        "full": _filled(None, 1), "full_like": _filled(None, 1), "new_full": _filled(None, 2),
        "bool": RULES["to"], "long": RULES["to"], "int": RULES["to"],
        "le": _compare("le"), "lt": _compare("lt"), "ge": _compare("le", True), "gt": _compare("lt", True),
        "less_equal": _compare("le"), "less": _compare("lt"),
        "greater_equal": _compare("le", True), "greater": _compare("lt", True),
        "eq": _compare("eq"), "ne": _compare("ne"), "not_equal": _compare("ne"),
        "and": _logic("and"), "bitwise_and": _logic("and"), "logical_and": _logic("and"),
        "or": _logic("or"), "bitwise_or": _logic("or"), "logical_or": _logic("or"),
        "invert": _logic("not"), "bitwise_not": _logic("not"), "logical_not": _logic("not"),
        "floordiv": _floor_divide, "floor_divide": _floor_divide,
        "cumsum": _cumsum, "diff": _diff, "tril": _triangle("tril"), "triu": _triangle("triu"),
        "where": _where, "masked_fill": _masked_fill, "hstack": _hstack,
        "expand": _expand, "broadcast_to": _expand, "expand_as": _expand,
        "getitem": _getitem, "scaled_dot_product_attention": _attention,
    }
)  # fmt: skip
