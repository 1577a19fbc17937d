"""State and check theorems about gradients, for symbolic sizes.

A `Theorem` claims that two expressions are equal. Both are built lazily, so that importing a derivation for its
formulas costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy as sp

_INDICES = sp.symbols("_:9", integer=True, nonnegative=True)


@dataclass(frozen=True)
class Theorem:
    """`claim()` returns (derivative of the forward, formula); they are equal for every size and value."""

    name: str
    claim: Callable[[], tuple[Any, Any]]


def residual(theorem: Theorem) -> Any:
    """Left minus right side, simplified; zero when the theorem holds."""
    left, right = theorem.claim()
    difference = apart(contract(sp.expand(left - right)))
    # Sums and elements are numbers here, and as plain symbols simplify in a fraction of the time.
    plain = {e: sp.Dummy(str(e), real=e.is_real) for e in difference.atoms(sp.Sum, sp.Indexed)}
    return sp.simplify(difference.xreplace(plain)).xreplace({symbol: e for e, symbol in plain.items()})


def prove(theorem: Theorem) -> None:
    """Raises: AssertionError naming the theorem and what is left over, when the two sides differ."""
    left_over = residual(theorem)
    if left_over != 0:
        raise AssertionError(f"theorem {theorem.name!r} does not hold: left - right = {left_over}")


def differentiate(expr: Any, wrt: Any) -> Any:
    """d expr / d wrt, with sums over indices collapsed by `contract`."""
    return contract(sp.diff(expr, wrt))


def contract(expr: Any) -> Any:
    """Apply sum_i f(i) delta(i, k) = f(k): in `d x[i] / d x[k]` the delta picks one term of every sum.

    Assumes k lies inside the summation range, which holds for an index of the tensor that is summed over.
    """
    expr = sp.sympify(expr)
    return expr.replace(lambda e: isinstance(e, sp.Sum), _contract_sum)


def apart(expr: Any) -> Any:
    """Write every sum by sums of single products: constants in front, one name for each index, sum of 1 = length.

    Sums that are equal then look equal, whichever way they were written.
    """
    expr = sp.sympify(expr)
    if isinstance(expr, sp.Sum):
        return _sum_apart(expr)
    return expr.func(*(apart(arg) for arg in expr.args)) if expr.has(sp.Sum) else expr


def _sum_apart(total: sp.Sum) -> Any:
    body = total.function
    for index, low, high in total.limits:
        out: list[Any] = []
        for term in sp.Add.make_args(sp.expand(apart(body))):
            factored: Any = sp.factor(term)
            constant, rest = factored.as_independent(index, as_Add=False)
            if rest == 1:
                out.append(constant * (high - low + 1))
                continue
            taken = rest.free_symbols.union(*(inner.variables for inner in rest.atoms(sp.Sum)))
            name = next(name for name in _INDICES if name not in taken)
            out.append(constant * sp.Sum(rest.xreplace({index: name}), (name, low, high)))
        body = sp.Add(*out)
    return body


def _contract_sum(total: sp.Sum) -> Any:
    body = contract(total.function)
    limits = list(total.limits)
    terms = sp.Add.make_args(sp.expand(body))
    out: list[Any] = []
    for term in terms:
        remaining = []
        for limit in limits:
            index = limit[0]
            delta = next((d for d in term.atoms(sp.KroneckerDelta) if index in d.args), None)
            if delta is None:
                remaining.append(limit)
                continue
            other = delta.args[0] if delta.args[1] == index else delta.args[1]
            term = (term / delta).subs(index, other)
        out.append(sp.Sum(term, *remaining) if remaining else term)
    return sp.Add(*out)
