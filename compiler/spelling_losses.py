"""How losses may be spelled; rules as in `spelling.py`."""

from __future__ import annotations

from .spelling import _negative, _rule


@_rule("cross_entropy")
def _cross_entropy(table, args, kwargs, fake):
    order = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(order, args, strict=False)) | kwargs
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    return "cross_entropy", (
        given["input"], given["target"], given.get("weight"), given.get("ignore_index", -100),
        given.get("reduction", "mean"), given.get("label_smoothing", 0.0),
    )  # fmt: skip


@_rule("nll_loss")
def _nll_loss(table, args, kwargs, fake):
    """("nll_loss", ...) with the arguments that a cross_entropy of the same numbers has."""
    order = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = dict(zip(order, args, strict=False)) | kwargs
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    return "nll_loss", (
        given["input"], given["target"], given.get("weight"), given.get("ignore_index", -100),
        given.get("reduction", "mean"), 0.0,
    )  # fmt: skip


@_rule("log_softmax")
def _log_softmax(table, args, kwargs, fake):
    given = dict(zip(("input", "dim", "_stacklevel", "dtype"), args, strict=False)) | kwargs
    if fake.dtype != given["input"].dtype:  # in a dtype of its own; as a method it has no `_stacklevel`
        return None
    return "log_softmax", (given["input"], _negative(given["dim"], len(fake.shape)))
