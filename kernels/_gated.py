"""What both implementations of the gated unit share: its forms, their rules, and the one in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..derivations import swiglu as formulas

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


class Form(NamedTuple):
    """What is computed: the operators' common tail. `limit` bounds gate from above and up on both sides."""

    activation: str
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0


def _wrong(rule: str, came: Any, way_out: str) -> ValueError:
    return ValueError(f'swiglu: {rule}, got {came}. {way_out} or disable with options={{"fusions": "-swiglu"}}')


def check(gate: Tensor, up: Tensor, form: Form) -> None:
    """The rules that compare no sizes, for `fake` may not."""
    if form.activation not in ACTIVATIONS:
        raise _wrong(f"activation must be one of {', '.join(ACTIVATIONS)}", repr(form.activation), "Choose one")
    if form.alpha != 1.0 and form.activation != "silu":
        raise _wrong("alpha is silu's", f"{form.alpha} for {form.activation}", "Scale gate")
    if form.limit is not None and not form.limit >= 0:
        raise _wrong("limit must not be negative", form.limit, "Choose another")
    if not gate.is_floating_point():
        raise _wrong("gate and up must be floating point", gate.dtype, "Cast them")
    if gate.dtype != up.dtype:
        raise _wrong("gate and up must have one dtype", f"{gate.dtype} and {up.dtype}", "Cast one of them")
    if gate.device != up.device:
        raise _wrong("gate and up must be on one device", f"{gate.device} and {up.device}", "Move one of them")
    if gate.ndim == 0:
        raise _wrong("gate and up must have a last dimension", "a scalar", "Unsqueeze them")


def check_sizes(gate: Tensor, up: Tensor, dh: Tensor | None = None) -> None:
    if gate.shape != up.shape:
        raise _wrong("gate and up must have one shape", f"{tuple(gate.shape)} and {tuple(up.shape)}", "Expand one")
    if dh is not None and dh.shape != gate.shape:
        raise _wrong(f"dh must have gate's shape {tuple(gate.shape)}", tuple(dh.shape), "Expand it")


def halves(gate_up: Tensor, form: Form, gate_first: bool, interleaved: bool) -> tuple[Tensor, Tensor]:
    """gate and up as views of the packed buffer, after its checks."""
    check(gate_up, gate_up, form)
    if gate_up.shape[-1] % 2:
        came = f"{gate_up.shape[-1]} (gate_up is {tuple(gate_up.shape)})"
        raise _wrong("the packed dimension must be even", came, "Pad it")
    first, second = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype is torch.float64 else t.float()


def _distribution_reference(gate: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """`_distribution` in torch."""
    if form.activation == "silu":
        cdf = torch.sigmoid(gate * form.alpha)
        return cdf, formulas.scaled_pdf(formulas.logistic_pdf(cdf, torch.sigmoid(gate * -form.alpha)), form.alpha)
    if form.activation == "relu2":
        return gate, torch.ones_like(gate)
    if form.activation == "gelu":
        cdf = 0.5 * (1.0 + torch.erf(gate * 0.7071067811865476))
        return cdf, formulas.normal_pdf(torch.exp(gate * gate * -0.5), 0.3989422804014327)
    argument = formulas.tanh_argument(gate, 0.7978845608028654, 0.044715)
    cdf = torch.sigmoid(argument)
    return cdf, formulas.tanh_pdf(cdf, torch.sigmoid(-argument), gate, 0.7978845608028654, 0.044715)


def _limited_reference(gate: Tensor, up: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """`_limited` in torch."""
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    gate = gate.relu() if form.activation == "relu2" else gate
    return gate, (up + form.offset if form.offset else up)


def swiglu_reference(gate: Tensor, up: Tensor, *how: Any) -> Tensor:
    form = Form(*how)
    check(gate, up, form)
    check_sizes(gate, up)
    dtype = gate.dtype
    gate, up = _limited_reference(_wide(gate), _wide(up), form)
    cdf, _ = _distribution_reference(gate, form)
    return (_wide(formulas.act(gate, cdf).to(dtype)) * up).to(dtype).contiguous()


def swiglu_bwd_reference(dh: Tensor, gate: Tensor, up: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    form = Form(*how)
    check(gate, up, form)
    check_sizes(gate, up, dh)
    dtype = gate.dtype
    dh, g, u = _wide(dh), _wide(gate), _wide(up)
    gate, up = _limited_reference(g, u, form)
    cdf, pdf = _distribution_reference(gate, form)
    dgate, dup = formulas.dgate(dh, gate, up, cdf, pdf), formulas.dup(dh, gate, cdf)
    if form.limit is not None:
        dgate, dup = torch.where(g <= form.limit, dgate, 0.0), torch.where(u.abs() <= form.limit, dup, 0.0)
    if form.activation == "relu2":
        dgate = torch.where(g <= 0, 0.0, dgate)
    return dgate.to(dtype).contiguous(), dup.to(dtype).contiguous()


def swiglu_packed_reference(
    gate_up: Tensor, activation: str, gate_first: bool, interleaved: bool = False, *how: Any
) -> Tensor:
    form = Form(activation, *how)
    return swiglu_reference(*halves(gate_up, form, gate_first, interleaved), *form)


def swiglu_packed_bwd_reference(
    dh: Tensor, gate_up: Tensor, activation: str, gate_first: bool, interleaved: bool = False, *how: Any
) -> Tensor:
    form = Form(activation, *how)
    dgate, dup = swiglu_bwd_reference(dh, *halves(gate_up, form, gate_first, interleaved), *form)
    both = (dgate, dup) if gate_first else (dup, dgate)
    return torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
