"""Sizes that are symbols: the largest that a plan is made for, and a guard that keeps graphs to it.

A length that may grow without limit is planned for at up to a quarter more than was seen. A longer one compiles a new
graph, planned at that length; shorter ones run in the graph that is there.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

_UNKNOWN = 4096  # a size that depends on data, as torch's own partitioner takes it


def largest(size: Any) -> int:
    """The number that a size is planned as: what is declared (`mark_dynamic(..., max=)`), else `_rounded` of what was
    seen. Adds no guard."""
    if not isinstance(size, torch.SymInt):
        return size
    node = size.node
    if node.expr is None or not hasattr(node.expr, "free_symbols"):
        return int(size)
    return int(node.expr.xreplace({s: sympy.Integer(_of(node.shape_env, s)) for s in node.expr.free_symbols}))


def _of(env: Any, symbol: sympy.Symbol) -> int:
    declared = _declared(env, symbol)
    if declared is not None:
        return declared
    seen = env.backed_var_to_val.get(symbol)
    return _UNKNOWN if seen is None else _rounded(int(seen))


def _declared(env: Any, symbol: sympy.Symbol) -> int | None:
    upper = env.var_to_range[symbol].upper if symbol in env.var_to_range else None
    return int(upper) if isinstance(upper, (int, sympy.Integer)) and upper < 2**31 else None


def _rounded(n: int) -> int:
    """Up, to three binary digits: 4096 stays, 4097 becomes 5120."""
    step = 1 << max(n.bit_length() - 3, 0)
    return -(-n // step) * step


def hold(gm: GraphModule) -> None:
    """Guard every symbol among the inputs to be no larger than it is planned as."""
    values = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor)]
    for size in [*tree_leaves(values), *(n for t in tensors for n in t.shape)]:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            env, symbol = size.node.shape_env, size.node.expr
            if symbol in env.backed_var_to_val and _declared(env, symbol) is None:
                bool(size <= _of(env, symbol))
