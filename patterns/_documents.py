"""Packed documents in what a mask says: a query sees keys of its own document only, wherever tokens say which it is.

A mask has the condition d(batch, query) = d(batch, key) for a tensor d of integers. Where d counts boundaries up,
d = cumsum(new), no boundary lies between two tokens of one document, new = 0 there. Hugging Face finds boundaries
where position ids do not go on by one, new_i = (p_i - p_{i-1} != 1), and compares position ids instead of positions
in the rest of the mask: inside a document p(key) = p(query) + key - query, whichever of them comes first.
"""

from __future__ import annotations

from typing import Any

import sympy as sp
import torch
from sympy.core.function import AppliedUndef

from ._fusion import Value, View
from ._predicate import ALWAYS, Evaluator, Predicate, compare

Atoms = frozenset[tuple[str, Any]]


def same_document(evaluator: Evaluator, atoms: Atoms, query: sp.Symbol, key: sp.Symbol) -> tuple[Any, Predicate] | None:
    """d(.., query) of the condition d(.., query) = d(.., key), and what the other conditions are inside a document."""
    for relation, e in atoms:
        at_query = [f for f in e.atoms(AppliedUndef) if f.args[-1:] == (query,) and key not in f.free_symbols]
        if relation != "==" or len(at_query) != 1:
            continue
        (of,) = at_query
        at_key = of.subs(query, key)
        if str(of.func) in evaluator.unknown and (sp.expand(e - of + at_key) == 0 or sp.expand(e + of - at_key) == 0):
            return of, _inside(evaluator, of, atoms - {(relation, e)}, query, key)
    return None


def _inside(evaluator: Evaluator, of: Any, atoms: Atoms, query: sp.Symbol, key: sp.Symbol) -> Predicate:
    """The conditions, with all that goes on by a known step in a document written as a difference of positions."""
    step = _step(evaluator, of)
    found = ALWAYS
    for relation, e in atoms:
        if step is not None:
            p, d = step
            e = e.subs(p.subs(query, key), p + d * (key - query))
        found = found & compare(relation, e)
    return found


def _step(evaluator: Evaluator, of: Any) -> tuple[Any, int] | None:
    """(p(.., query), d) where tokens i and i + 1 are of one document only if p(.., i + 1) = p(.., i) + d."""
    view, tensor = evaluator.unknown[str(of.func)]
    boundary = _counted(view, tensor)
    if boundary is None:
        return None
    *rows, query = of.args
    i = sp.Dummy("i", integer=True, nonnegative=True)
    found = evaluator.element(boundary[1], (*rows, i + 1), boundary[0])
    if not isinstance(found, Predicate) or found.atoms is None or len(found.atoms) != 1:
        return None
    ((relation, e),) = found.atoms
    for later in e.atoms(AppliedUndef):
        earlier = later.subs(i, i - 1)
        for sign in (1, -1):
            d = sp.expand(later - earlier - sign * e)
            if relation == "!=" and later.args[-1:] == (i + 1,) and d.is_Integer:
                return later.subs(i, query - 1), int(d)
    return None


def _counted(view: View, tensor: Value) -> tuple[View, Value] | None:
    """The booleans that a tensor counts up along its last dimension."""
    if tensor.op != "cumsum" or tensor.args[1] != -1:
        return None
    source = tensor.args[0]
    if source.op == "convert" and source.args[0].dtype == torch.bool:
        source = source.args[0]
    return (view, source) if source.dtype == torch.bool else None
