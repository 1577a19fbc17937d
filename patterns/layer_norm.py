"""LayerNorm: PyTorch's own and those that models write by hand, alone and after a residual add.

What separates the forms is where they round: F.layer_norm and Cohere round once, last; DeBERTa rounds the normalised
value before it multiplies by the weight. A cast to float32 in front of the norm and the cast back behind it are part
of it: the operator reads and writes the narrow tensors and computes in float32 anyhow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from ..kernels import layer_norm as kernels
from ._fusion import Emitter, Fusion, Idiom, Match, Value, View, static_bytes
from ._norms import LOW, average_under, is_variance, narrowed, over_rows, residual_add, widened


def _normalised(x: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return (h - mean) * torch.rsqrt(variance + eps)


def cohere_layer_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (w.to(torch.float32) * _normalised(x, eps)).to(x.dtype)


def biased_layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return (w.to(torch.float32) * _normalised(x, eps) + b.to(torch.float32)).to(x.dtype)


def deberta_layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return w * _normalised(x, eps).to(x.dtype) + b


def unbiased_deberta_layer_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * _normalised(x, eps).to(x.dtype)


def weightless_layer_norm(x: Tensor, eps: float) -> Tensor:
    return _normalised(x, eps).to(x.dtype)


def float32_layer_norm(x: Tensor, eps: float) -> Tensor:
    return _normalised(x, eps)


def _example() -> dict[str, Tensor]:
    # A cast to bfloat16 means "to x's dtype"; w and b are not float32 either, or a cast to that would not show.
    w, b = torch.zeros(8, dtype=torch.float16), torch.zeros(8, dtype=torch.float64)
    return {"x": torch.zeros(2, 8, dtype=torch.bfloat16), "w": w, "b": b}


_ROUND_FIRST = {"cast_before_weight": True}
_ROUND_LAST = {"cast_before_weight": False}


def anchor(value: Value) -> bool:
    """1 / sqrt of a variance: a LayerNorm of some kind. PyTorch's own is the business of a pass."""
    average = average_under(value)
    return average is not None and is_variance(average)


def refuse(match: Match) -> str | None:
    x = match["x"]
    if x.dtype == torch.float64:
        return "x is float64 and normalised in float32, where the operator would compute in float64"
    if x.dtype not in (torch.float32, *LOW):
        return f"no kernel for {x.dtype}"
    if len(x.shape) < 2:
        return f"x has {len(x.shape)} dimension(s); at least two are needed"
    if x.op == "convert" and x.args[0].dtype in LOW:
        # The same norm, read from its middle; it matches as a whole too, unless its result is something else.
        return f"x is a cast from {x.args[0].dtype}, which must be part of the norm"
    for name, v in (("weight", match.get("w")), ("bias", match.get("b"))):
        if v is None:
            continue
        if len(v.shape) != 1 or str(v.shape[0]) != str(x.shape[-1]):
            return f"{name} {v.shape} is not one number per channel of x {x.shape}"
        if v.dtype not in (torch.float32, *LOW):
            return f"no kernel for a {name} of {v.dtype}"
    return None


def replace(match: Match, emit: Emitter) -> Node:
    x, w, b, cast = match["x"], match.get("w"), match.get("b"), match.idiom.means["cast_before_weight"]
    dtype = None if cast or match.root.dtype == x.dtype else match.root.dtype
    arguments = (w, b, float(match["eps"]), cast, dtype)
    return over_rows(x, emit, lambda rows: emit.call(kernels.layer_norm, rows, *arguments))


# --- torch's own layer_norm: its arguments are in the call, so it needs no unification -----------------------------


def fuse_torch_layer_norm(view: View) -> None:
    """F.layer_norm and nn.LayerNorm: the fused operator has the same rounding and a faster backward."""
    for value in list(view.values):
        if value.op != "layer_norm" or not value.nodes:
            continue
        reason = _unknown(value) or _fuse_call(view, value)
        if reason is None:
            view.fused("layer_norm", value, static_bytes([value.args[0]]), "torch_layer_norm")
        else:
            view.refused("layer_norm", value, reason)


def _unknown(value: Value) -> str | None:
    """Why this call is not one that the operator computes."""
    x, shape, w, b, eps = value.args
    if len(shape) != 1:
        return f"normalises over {len(shape)} dimensions, the operator over the last one"
    for name, v in (("weight", w), ("bias", b)):
        if v is not None and v.dtype != x.dtype:
            return f"{name} {v.dtype} and activations {x.dtype} differ in F.layer_norm"
    if not isinstance(eps, (int, float)):
        return "eps is not known at compile time"
    return None


def _fuse_call(view: View, value: Value) -> str | None:
    x, _, w, b, eps = value.args
    root, source = narrowed(view, value), widened(view, x)
    reason = view.unsafe(root, (root, value))
    if reason is not None:
        return reason
    w, b = (None if t is None else widened(view, t) for t in (w, b))
    dtype = None if root.dtype == source.dtype else root.dtype
    arguments = (source, w, b, float(eps), False, dtype)
    return view.replace("layer_norm", [root], lambda emit: [emit.item(emit.call(kernels.layer_norm, *arguments), 0)])


FUSION = Fusion(
    name="layer_norm",
    anchor=anchor,
    idioms=(
        Idiom(biased_layer_norm, _example, _ROUND_LAST),
        Idiom(cohere_layer_norm, _example, _ROUND_LAST),
        Idiom(deberta_layer_norm, _example, _ROUND_FIRST),
        Idiom(unbiased_deberta_layer_norm, _example, _ROUND_FIRST),
        Idiom(weightless_layer_norm, _example, _ROUND_LAST),
        Idiom(float32_layer_norm, _example, _ROUND_LAST),
    ),
    refuse=refuse,
    replace=replace,
    saved_bytes=lambda match: static_bytes([match["x"]]),
    passes=(fuse_torch_layer_norm, residual_add("layer_norm", kernels.add_layer_norm)),
    priority=9,  # before rms_norm
)
