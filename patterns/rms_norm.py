"""RMSNorm in the forms that models write it in, alone, after a residual add, and gated.

What separates the forms is where they round: Llama rounds the normalised value before it multiplies by the weight,
Gemma and OLMo-2 after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..kernels import rms_norm as kernels
from ._fusion import Emitter, Fusion, Idiom, Match, Value, View, static_bytes
from ._norms import average_under, is_variance, narrowed, over_rows, residual_add, widened


def llama_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def t5_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def olmo2_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (w * h).to(x.dtype)


def helium_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (w.to(torch.float32) * h).to(x.dtype)


def gemma_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + w.float())).type_as(x)


def weightless_rms_norm(x: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def weightless_t5_rms_norm(x: Tensor, eps: float) -> Tensor:
    return (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    return (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def _example() -> dict[str, Tensor]:
    # Markers: a cast to bfloat16 means "to x's dtype", one to float16 "to w's dtype".
    return {"x": torch.zeros(2, 8, dtype=torch.bfloat16), "w": torch.zeros(8, dtype=torch.float16)}


_ROUND_FIRST = {"offset": 0.0, "cast_before_weight": True}
_ROUND_LAST = {"offset": 0.0, "cast_before_weight": False}
_OF_SUM = _ROUND_LAST | {"of_sum": True}
_ONE_PLUS = {"offset": 1.0, "cast_before_weight": False}


def anchor(value: Value) -> bool:
    """1 / sqrt of a mean that is no variance, or of a sum of squares: a norm of some kind (not PyTorch's own)."""
    average = average_under(value)
    if average is not None:
        return average.op == "mean" and not is_variance(average)
    if value.op != "rsqrt" or not isinstance(value.args[0], Value):
        return False
    under = value.args[0]
    return any(v.op == "sum" and v.args[0].op == "pow" for v in (under, *under.inputs()))


def refuse(match: Match) -> str | None:
    x, w = match["x"], match.get("w")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"no kernel for {x.dtype}"
    if len(x.shape) < 2:
        return f"x has {len(x.shape)} dimension(s); at least two are needed"
    if match.idiom.means.get("of_sum") and not isinstance(x.shape[-1], int):
        return "the number of channels is not known at compile time"
    if w is not None:
        if len(w.shape) != 1 or str(w.shape[0]) != str(x.shape[-1]):
            return f"weight {w.shape} is not one number per channel of x {x.shape}"
        if w.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            return f"no kernel for a weight of {w.dtype}"
    return None


def replace(match: Match, emit: Emitter) -> Node:
    x, w, means = match["x"], match.get("w"), match.idiom.means
    eps, offset, cast = float(match["eps"]), means["offset"], means["cast_before_weight"]

    def norm(rows: Any) -> Node:
        if not means.get("of_sum"):
            return emit.call(kernels.rms_norm, rows, w, eps, offset, cast)
        D = x.shape[-1]  # a sum is D means: rsqrt(sum + eps) = rsqrt(mean + eps / D) / sqrt(D)
        scale = emit.call("new_full", rows, (D,), D**-0.5, dtype=torch.float32)
        return emit.call(kernels.rms_norm, rows, scale, eps / D, offset, cast)

    return over_rows(x, emit, norm)


# --- torch's own rms_norm: its arguments are in the call, so it needs no unification -------------------------------


def fuse_torch_rms_norm(view: View) -> None:
    """F.rms_norm and nn.RMSNorm: the fused operator has the same rounding and a faster backward."""
    for value in list(view.values):
        if value.op != "rms_norm" or not value.nodes:
            continue
        x, shape, w, eps = value.args
        if len(shape) != 1:
            view.refused("rms_norm", value, f"normalises over {len(shape)} dimensions, the operator over the last one")
            continue
        if w is not None and w.dtype != x.dtype:
            view.refused("rms_norm", value, f"weight {w.dtype} and activations {x.dtype} differ in F.rms_norm")
            continue
        if not isinstance(eps, (int, float, type(None))):
            view.refused("rms_norm", value, "eps is not known at compile time")
            continue
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        root, source = narrowed(view, value), widened(view, x)
        if root.dtype != source.dtype or view.unsafe(root, (root, value)) is not None:
            root, source = value, x  # the casts stay
        elif source is not x and w is not None:
            w = widened(view, w)
        reason = view.replace("rms_norm", [root], _torch_norm(source, w, float(eps)))
        if reason is None:
            view.fused("rms_norm", value, static_bytes([source]), "torch_rms_norm")
        else:
            view.refused("rms_norm", value, reason)


def _torch_norm(x: Value, w: Value | None, eps: float):
    return lambda emit: [emit.item(emit.call(kernels.rms_norm, x, w, eps, 0.0, False), 0)]


# --- larger forms, found once the norm itself is an operator -------------------------------------------------------


def fuse_gate(view: View) -> None:
    """rms_norm(x) * act(z.float()), rounded to x's dtype: the gated norm of linear-attention models."""
    for value in list(view.values):
        product = value.args[0] if value.op == "convert" else value
        if product.op != "mul" or not value.nodes:
            continue
        found = _gated_parts(product)
        if found is None:
            continue
        norm, gate = found
        x, w, eps, offset, cast_before_weight = norm.args[0].args
        z = gate.args[0].args[0] if gate.args[0].op == "convert" else gate.args[0]
        if value.dtype != x.dtype or [str(n) for n in z.shape] != [str(n) for n in x.shape]:
            continue
        if view.unsafe(value, [value, product, norm, gate, *gate.inputs()]) is not None:
            continue
        arguments = (x, w, z, eps, offset, cast_before_weight, gate.op)
        view.replace("rms_norm", [value], _gated(arguments))


def _gated_parts(product: Value) -> tuple[Value, Value] | None:
    for norm, gate in (product.args, product.args[::-1]):
        if not (isinstance(norm, Value) and isinstance(gate, Value)):
            continue
        is_norm = norm.op == "item" and norm.args[1] == 0 and norm.args[0].op == "fused.rms_norm"
        # The activation must be computed in fp32, as the operator does.
        if is_norm and gate.op in ("silu", "sigmoid") and gate.dtype == torch.float32:
            return norm, gate
    return None


def _gated(arguments: tuple):
    return lambda emit: [emit.item(emit.call(kernels.gated_rms_norm, *arguments), 0)]


FUSION = Fusion(
    name="rms_norm",
    anchor=anchor,
    idioms=(
        Idiom(gemma_rms_norm, _example, _ONE_PLUS),
        Idiom(llama_rms_norm, _example, _ROUND_FIRST),
        Idiom(t5_rms_norm, _example, _ROUND_FIRST),
        Idiom(helium_rms_norm, _example, _ROUND_LAST),
        Idiom(olmo2_rms_norm, _example, _ROUND_LAST),
        Idiom(weightless_rms_norm, _example, _ROUND_LAST),
        Idiom(weightless_t5_rms_norm, _example, _ROUND_LAST),
        Idiom(l2_norm, _example, _OF_SUM),
    ),
    refuse=refuse,
    replace=replace,
    saved_bytes=lambda match: static_bytes([match["x"]]),
    passes=(fuse_torch_rms_norm, fuse_gate, residual_add("rms_norm", kernels.add_rms_norm)),
    priority=10,
)
