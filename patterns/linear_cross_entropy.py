"""lm_head and cross-entropy: the loss of a causal language model without its logits.

From the loss the rule walks up to the linear layer through what models put between: casts, reshapes, slices of rows,
a logit scale, a softcap. The logits themselves, where the model returns them, become deferred.

Shapes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..kernels import linear_cross_entropy as kernels
from ._fusion import Emitter, Fusion, Value, View, static_bytes

NAME = "linear_cross_entropy"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class _Chain:
    """What lies between the linear layer and the loss."""

    linear: Value
    values: list[Value]
    rows: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    logit_scale: float = 1.0
    softcap: float = 0.0


def anchor(value: Value) -> bool:
    """torch's loss, in one call or in two: nll_loss of rows of a log_softmax."""
    rows = value.args[0] if value.op == "nll_loss" else None
    while rows is not None and rows.op in ("reshape", "merge_last", "narrow", "select"):
        rows = rows.args[0]
    return value.op == "cross_entropy" or (rows is not None and rows.op == "log_softmax")


def fuse_linear_cross_entropy(view: View) -> None:
    """Every cross_entropy whose input comes from one linear layer."""
    for loss in list(view.values):
        if anchor(loss) and loss.nodes:
            reason = _fuse(view, loss)
            if reason is not None:
                view.refused(NAME, loss, reason)


def _fuse(view: View, loss: Value) -> str | None:
    reason = _refuse_loss(loss)
    if reason is not None:
        return reason
    chain = _walk(loss)
    if isinstance(chain, str):
        return chain
    reason = _refuse_linear(chain) or view.unsafe(loss, [loss, *chain.values]) or _other_readers(view, loss, chain)
    if reason is not None:
        return reason
    outputs = _returned(view, chain)
    reason = view.replace(NAME, [loss], lambda emit: [_emit(loss, chain, emit)])
    if reason is not None:
        return reason
    leaves = [view.of(n) for n in chain.linear.nodes[0].all_input_nodes]
    for output in outputs:
        view.defer(output, leaves)
    x, w = chain.linear.args[:2]
    saved = [v for v in (x, w) if loss.requires_grad and v.requires_grad]
    view.fused(NAME, loss, static_bytes(saved), "deferred logits" if outputs else "no logits")
    return None


def _refuse_loss(loss: Value) -> str | None:
    logits, target, weight, ignore_index, reduction, smoothing = loss.args
    if weight is not None:
        return "the loss has class weights"
    if reduction not in ("mean", "sum"):
        return f"reduction={reduction!r}: the gradient of every row would be needed on its own"
    if not isinstance(target, Value) or target.dtype is None or target.fake.is_floating_point():
        return "the targets are probabilities, not class indices"
    if target.dtype != torch.int64:
        return f"no kernel for targets of {target.dtype}"
    if not isinstance(ignore_index, int) or not isinstance(smoothing, (int, float)):
        return "ignore_index or label_smoothing is not known at compile time"
    if not _classes_in_the_middle(loss) and (len(logits.shape) != 2 or len(target.shape) != 1):
        return f"logits have shape {logits.shape}; only (tokens, vocabulary) is supported"
    return None


def _classes_in_the_middle(loss: Value) -> bool:
    """(batch, vocabulary, length) with targets (batch, length), made by a transposition that can be left out."""
    logits, target = loss.args[:2]
    moved = loss.op == "cross_entropy" and logits.op == "transpose" and logits.args[1:] == (-2, -1)
    return moved and len(logits.shape) == 3 and len(target.shape) == 2


def _walk(loss: Value) -> _Chain | str:
    """Up from the loss's input to the linear layer."""
    value, values = loss.args[0], list[Value]()
    rows: list[tuple[str, tuple[Any, ...]]] = []
    scale, softcap = 1.0, 0.0
    if _classes_in_the_middle(loss):
        values, value = [value], value.args[0]
    normalised = loss.op == "nll_loss"
    while value.op != "linear" or normalised:
        values.append(value)
        capped = _softcap(value)
        if normalised and value.op == "log_softmax" and value.args[1] == -1:
            normalised, value = False, value.args[0]
        elif value.op in ("reshape", "merge_last") and str(value.shape[-1]) == str(value.args[0].shape[-1]):
            if rows and len(value.shape) != 2:
                return f"rows are selected of {value.shape}, which the hidden states are not reshaped to"
            rows += [("flatten", ())] if rows else []
            value = value.args[0]
        elif value.op in ("narrow", "select") and value.args[1] < -1:
            if not all(isinstance(a, (int, type(None))) for a in value.args[2:]):
                return "rows are selected by a length that is not known at compile time"
            rows.append((value.op, value.args[1:]))
            value = value.args[0]
        elif normalised:
            return f"nll_loss reads {value}, which is no log_softmax over the vocabulary"
        elif capped is not None:
            inner, softcap_here, between = capped
            if softcap or scale != 1.0:
                return "the logits are capped and then scaled again"
            softcap, value = softcap_here, inner
            values += between
        elif value.op in ("mul", "div") and isinstance(value.args[1], (int, float)) and value.args[1] != 0:
            # Met after the softcap on the way up, so applied before it: the order the operator has.
            scale *= value.args[1] if value.op == "mul" else 1.0 / value.args[1]
            value = value.args[0]
        elif value.op == "convert":
            if value.dtype not in (torch.float32, torch.float64):
                return f"the logits are rounded to {value.dtype} before the loss"
            value = value.args[0]
        elif value.op == "item" and value.args[0].op == "fused.lora_linear":
            return "the head has an adapter"
        elif value.op == "input":
            return "the logits are an input of this graph: they are computed before a graph break, or by the caller"
        else:
            return f"the logits come from {value}, not from a linear layer"
    return _Chain(value, [*values, value], rows[::-1], scale, softcap)


def _softcap(value: Value) -> tuple[Value, float, list[Value]] | None:
    """x and c, when value is c * tanh(x / c)."""
    if value.op != "mul" or not isinstance(value.args[1], (int, float)):
        return None
    tanh, cap = value.args
    if tanh.op == "convert":  # computed in another precision than it is scaled in
        return None
    if tanh.op != "tanh" or tanh.args[0].op != "div" or tanh.args[0].args[1] != cap or cap <= 0:
        return None
    return tanh.args[0].args[0], float(cap), [tanh, tanh.args[0]]


def _refuse_linear(chain: _Chain) -> str | None:
    x, w, bias = chain.linear.args
    if len(w.shape) != 2:
        return f"the head's weight has shape {w.shape}"
    if bias is not None and bias.shape != w.shape[:1]:
        return f"the head's bias has shape {bias.shape}"
    if w.dtype not in _FLOATS or x.dtype != w.dtype or (bias is not None and bias.dtype != w.dtype):
        return f"no kernel for hidden states of {x.dtype} with a head of {w.dtype}"
    if not isinstance(x.shape[-1], int) or not isinstance(w.shape[0], int):
        return "the sizes of the head are not known at compile time"
    return None


def _other_readers(view: View, loss: Value, chain: _Chain) -> str | None:
    """Who else needs the logits? The caller may have them later; a computation in the graph needs them now."""
    own = {n for v in (loss, *chain.values) for n in v.nodes}
    for value in chain.values:
        for user in view.users(value):
            if user not in own and not _only_returned(view, user):
                name = view.of(user).op if view.of(user).op != "opaque" else str(view.of(user))
                return f"the logits are also used by {name}, which needs all of them"
    return None


def _only_returned(view: View, node: Node) -> bool:
    """Is it the graph's output, or a cast or slice that only the output reads?"""
    if node.op == "output":
        return True
    return view.of(node).op in ("convert", "narrow", "select") and all(_only_returned(view, u) for u in node.users)


def _returned(view: View, chain: _Chain) -> list[Value]:
    """The logits that the graph returns, and casts or slices of them."""
    found: dict[int, Value] = {}
    todo = list(chain.values)
    while todo:
        value = todo.pop()
        for user in view.users(value):
            if user.op == "output":
                found[id(value)] = value
            elif user.op != "placeholder" and view.of(user).op in ("convert", "narrow", "select"):
                todo.append(view.of(user))
    return list(found.values())


def _emit(loss: Value, chain: _Chain, emit: Emitter) -> Node:
    _logits, target, _weight, ignore_index, reduction, label_smoothing = loss.args
    x, w, bias = chain.linear.args
    rows = emit.node(x)
    for op, args in chain.rows:
        if op == "flatten":
            rows = emit.call("reshape", rows, -1, x.shape[-1])
            continue
        dim, part = args[0], args[1] if op == "select" else slice(*args[1:])
        rows = emit.call(operator.getitem, rows, (Ellipsis, part, *[slice(None)] * (-dim - 1)))
    if len(rows.meta["example_value"].shape) != 2:
        rows = emit.call("reshape", rows, -1, x.shape[-1])
    flat = emit.call("reshape", target, -1) if len(target.shape) == 2 else target
    needs = [bool(loss.requires_grad and v is not None and v.requires_grad) for v in (x, w, bias)]
    out = emit.call(
        kernels.linear_cross_entropy, rows, w, bias, flat, reduction, ignore_index, float(label_smoothing),
        float(chain.logit_scale), chain.softcap, *needs,
    )  # fmt: skip
    result = emit.item(out, 0)
    return result if loss.dtype == result.meta["example_value"].dtype else emit.call("to", result, loss.dtype)


FUSION = Fusion(
    name=NAME,
    anchor=anchor,
    passes=(fuse_linear_cross_entropy,),
    priority=40,
)
