"""Activations written out: what is a polynomial of x inside a tanh or erf is gelu, however its terms are arranged.

Rules as in `spelling.py`, which these complete.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..patterns._fusion import Value
from .spelling import RULES, Rule, _is_number, _kept, _unary

# 0.5 x (1 + outer(p(x))): p by degree.
_GELUS = {
    "tanh": ("gelu_tanh", {1: math.sqrt(2 / math.pi), 3: 0.044715 * math.sqrt(2 / math.pi)}),
    "erf": ("gelu", {1: math.sqrt(0.5)}),
}
_CLOSE = 1e-6  # of the coefficients, relative: they are written with seven digits and more


def _or_gelu(rule: Rule) -> Rule:
    """The rule of a product or quotient, whose result may be all of a gelu."""

    def completed(table, args, kwargs, fake):
        found = rule(table, args, kwargs, fake)
        # In float16 the cube overflows where gelu does not; float64 shows a shortened constant.
        if not isinstance(found, tuple) or fake.dtype not in (torch.float32, torch.bfloat16):
            return found
        op, (a, *rest) = found
        b: Any = rest[0] if op in ("mul", "div") else None
        if op == "div":
            b = 1 / b if _is_number(b) and b != 0 else None
        return (_gelu(a, b, fake) if b is not None else None) or found

    return completed


def _gelu(a: Any, b: Any, fake: torch.Tensor) -> tuple[str, tuple[Any, ...]] | None:
    """The product a b, when it is 0.5 x (1 + outer(p(x)))."""
    scale = 1.0
    if not isinstance(a, Value):
        return None
    if _is_number(b):
        scale, a = _scaled(a, fake)
        scale *= b
        if a.op != "mul" or _is_number(a.args[1]) or not _kept(a, fake):
            return None
        a, b = a.args
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return None
    (by_a, a), (by_b, b) = _scaled(a, fake), _scaled(b, fake)
    if not math.isclose(scale * by_a * by_b, 0.5, rel_tol=_CLOSE):
        return None
    for x, s in ((a, b), (b, a)):
        if s.op != "add" or not _is_number(s.args[1]) or s.args[1] != 1 or x.dtype != fake.dtype:
            continue
        outer = s.args[0]
        name, wanted = _GELUS.get(outer.op, ("", {}))
        if not name or not all(_kept(v, fake) for v in (s, outer)):
            continue
        terms = {degree: c for degree, c in (_polynomial(outer.args[0], x, fake) or {}).items() if c}
        if terms.keys() == wanted.keys() and all(math.isclose(terms[d], wanted[d], rel_tol=_CLOSE) for d in wanted):
            return name, (x,)
    return None


def _scaled(value: Any, fake: torch.Tensor) -> tuple[float, Any]:
    """c and y, when value is c y."""
    scale = 1.0
    while value.op in ("mul", "div") and _is_number(value.args[1]) and value.args[1] != 0 and _kept(value, fake):
        scale = scale * value.args[1] if value.op == "mul" else scale / value.args[1]
        value = value.args[0]
    return scale, value


def _polynomial(value: Any, x: Value, fake: torch.Tensor) -> dict[int, float] | None:
    """{degree: coefficient} of the value as a polynomial of x of degree 3 at most."""
    if value is x:
        return {1: 1.0}
    if _is_number(value):
        return {0: float(value)}
    if not isinstance(value, Value) or value.dtype != x.dtype or not _kept(value, fake):
        return None
    if value.op == "pow" and value.args[0] is x and value.args[1] in (2, 3):
        return {int(value.args[1]): 1.0}
    if value.op not in ("add", "mul", "div") or (value.op == "div" and not _is_number(value.args[1])):
        return None
    a, b = (_polynomial(v, x, fake) for v in value.args)
    if a is None or b is None or (value.op == "div" and not b[0]):
        return None
    if value.op == "add":
        return {n: a.get(n, 0.0) + b.get(n, 0.0) for n in a | b}
    if value.op == "div":
        return {n: c / b[0] for n, c in a.items()}
    product: dict[int, float] = {}
    for n, c in a.items():
        for m, d in b.items():
            product[n + m] = product.get(n + m, 0.0) + c * d
    return product if max(product) <= 3 else None


_OPS = ("mul", "rmul", "multiply", "div", "truediv", "true_divide", "divide")
RULES.update({name: _or_gelu(RULES[name]) for name in _OPS}, erf=_unary("erf"))
