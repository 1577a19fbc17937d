"""How norms and what they are made of may be spelled; rules as in `spelling.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..patterns._fusion import Value
from .spelling import RULES, _kept


def _given(order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], default: Mapping[str, Any]):
    return {**default, **dict(zip(order, args, strict=False)), **kwargs}


def _rms_norm(table, args, kwargs, fake):
    given = _given(("input", "normalized_shape", "weight", "eps"), args, kwargs, {"weight": None, "eps": None})
    return "rms_norm", (given["input"], tuple(given["normalized_shape"]), given["weight"], given["eps"])


def _layer_norm(table, args, kwargs, fake):
    order = ("input", "normalized_shape", "weight", "bias", "eps")
    given = _given(order, args, kwargs, {"weight": None, "bias": None, "eps": 1e-5})
    return "layer_norm", (given["input"], tuple(given["normalized_shape"]), *(given[name] for name in order[2:]))


def _var(table, args, kwargs, fake):
    """With correction 0 and keepdim it is written out, as most models write it: the mean of (x - mean)^2."""
    given = _given(("input", "dim", "unbiased", "keepdim"), args, kwargs, {"keepdim": False})
    x, dims, correction = given["input"], given["dim"], given.get("correction", given.get("unbiased", True))
    if dims is None or isinstance(dims, bool):
        return None
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    over = (tuple(sorted(d if d < 0 else d - len(x.shape) for d in dims)), bool(given["keepdim"]))
    correction = 1 if correction is None else int(correction)
    if correction or not given["keepdim"]:
        return "var", (x, *over, correction)
    centred = table.make("sub", (x, table.make("mean", (x, *over), fake)), x.fake)
    return "mean", (table.make("pow", (centred, 2), x.fake), *over)


_quotient = RULES["div"]


def _div(table, args, kwargs, fake):
    """A sum divided by how many numbers it is of is their mean."""
    a, b = args
    if not kwargs and isinstance(a, Value) and a.op == "sum" and isinstance(b, int) and not isinstance(b, bool):
        x, dims, _ = a.args
        if math.prod(n if isinstance(n := x.shape[d], int) else 0 for d in dims) == b and _kept(a, fake):
            return "mean", a.args
    return _quotient(table, args, kwargs, fake)


RULES.update(dict.fromkeys(("div", "truediv", "true_divide", "divide"), _div))
RULES.update(rms_norm=_rms_norm, layer_norm=_layer_norm, var=_var)
