"""The gated unit h = act(gate) * up and its gradients, from two tensors or from the two halves of one.

One forward and one backward kernel serve both forms: the halves of a packed (..., 2F) buffer are rows with a
stride of 2F, so neither a split nor a concatenation copies anything.

Math: h = act(gate) * up, act in silu, gelu, gelu_tanh; see derivations/swiglu.py, Theorems act, dgate, dup.
Shapes: gate, up, h (..., F); gate_up (..., 2F); F ffn.
Numerics: act in fp32, rounded to the dtype, then times up, as in eager. The backward is fp32, rounded once.
Cost: forward reads 2 F and writes F elements per row; backward reads 3 F and writes 2 F.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivations import swiglu as formulas
from ._launch import cdiv, inline, next_power_of_2, tl, triton
from ._op import define_backward, define_op, nbytes, refuse_double_backward, remade

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_act = inline(formulas.act)
_dgate = inline(formulas.dgate)
_dup = inline(formulas.dup)
_logistic_pdf = inline(formulas.logistic_pdf)
_normal_pdf = inline(formulas.normal_pdf)
_tanh_argument = inline(formulas.tanh_argument)
_tanh_pdf = inline(formulas.tanh_pdf)


@triton.jit
def _distribution(gate, ACTIVATION: tl.constexpr):
    """P(gate) and its density p(gate); what a caller drops is never computed."""
    if ACTIVATION == "silu":
        cdf = tl.sigmoid(gate)
        pdf = _logistic_pdf(cdf, tl.sigmoid(-gate))
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        pdf = _normal_pdf(tl.exp(gate * gate * -0.5), 0.3989422804014327)
    else:
        argument = _tanh_argument(gate, 0.7978845608028654, 0.044715)
        cdf = tl.sigmoid(argument)
        pdf = _tanh_pdf(cdf, tl.sigmoid(-argument), gate, 0.7978845608028654, 0.044715)
    return cdf, pdf


@triton.jit
def _block(cols, BLOCK: tl.constexpr):
    """This program's row and first column, both 64-bit, and which of its BLOCK columns exist."""
    blocks = tl.cdiv(cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    return row, start, tl.arange(0, BLOCK) < cols - start


# One program: BLOCK columns of one row.
@triton.jit
def swiglu_fwd_kernel(
    gate_ptr,  # (rows, cols)
    up_ptr,  # (rows, cols)
    h_ptr,  # (rows, cols), contiguous
    cols,
    gate_row_stride,
    up_row_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, mask = _block(cols, BLOCK)
    offsets = tl.arange(0, BLOCK)

    gate = tl.load(gate_ptr + (row * gate_row_stride + start) + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + (row * up_row_stride + start) + offsets, mask=mask).to(tl.float32)

    dtype = h_ptr.dtype.element_ty
    cdf, _ = _distribution(gate, ACTIVATION)
    activated = _act(gate, cdf).to(dtype).to(tl.float32)

    tl.store(h_ptr + (row * cols + start) + offsets, (activated * up).to(dtype), mask=mask)


# One program: BLOCK columns of one row.
@triton.jit
def swiglu_bwd_kernel(
    dh_ptr,  # (rows, cols)
    gate_ptr,  # (rows, cols)
    up_ptr,  # (rows, cols)
    dgate_ptr,  # (rows, cols)
    dup_ptr,  # (rows, cols)
    cols,
    dh_row_stride,
    gate_row_stride,
    up_row_stride,
    out_row_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, mask = _block(cols, BLOCK)
    offsets = tl.arange(0, BLOCK)

    dh = tl.load(dh_ptr + (row * dh_row_stride + start) + offsets, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + (row * gate_row_stride + start) + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + (row * up_row_stride + start) + offsets, mask=mask).to(tl.float32)

    cdf, pdf = _distribution(gate, ACTIVATION)
    dgate = _dgate(dh, gate, up, cdf, pdf)
    dup = _dup(dh, gate, cdf)

    out = row * out_row_stride + start
    tl.store(dgate_ptr + out + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + out + offsets, dup.to(dup_ptr.dtype.element_ty), mask=mask)


def _wrong(rule: str, came: Any, way_out: str) -> ValueError:
    return ValueError(f'swiglu: {rule}, got {came}. {way_out} or disable with options={{"fusions": "-swiglu"}}')


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    """The rules that compare no sizes, for `fake` may not."""
    if activation not in ACTIVATIONS:
        raise _wrong(f"activation must be one of {', '.join(ACTIVATIONS)}", repr(activation), "Choose one")
    if not gate.is_floating_point():
        raise _wrong("gate and up must be floating point", gate.dtype, "Cast them")
    if gate.dtype != up.dtype:
        raise _wrong("gate and up must have one dtype", f"{gate.dtype} and {up.dtype}", "Cast one of them")
    if gate.device != up.device:
        raise _wrong("gate and up must be on one device", f"{gate.device} and {up.device}", "Move one of them")
    if gate.ndim == 0:
        raise _wrong("gate and up must have a last dimension", "a scalar", "Unsqueeze them")


def _check_sizes(gate: Tensor, up: Tensor, dh: Tensor | None = None) -> None:
    if gate.shape != up.shape:
        raise _wrong("gate and up must have one shape", f"{tuple(gate.shape)} and {tuple(up.shape)}", "Expand one")
    if dh is not None and dh.shape != gate.shape:
        raise _wrong(f"dh must have gate's shape {tuple(gate.shape)}", tuple(dh.shape), "Expand it")


def _halves(gate_up: Tensor, activation: str, gate_first: bool) -> tuple[Tensor, Tensor]:
    """gate and up as views of the packed buffer, after its checks."""
    _check(gate_up, gate_up, activation)
    if gate_up.shape[-1] % 2:
        came = f"{gate_up.shape[-1]} (gate_up is {tuple(gate_up.shape)})"
        raise _wrong("the packed dimension must be even", came, "Pad it")
    first, second = gate_up.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def _fold(*tensors: Tensor) -> list[Tensor]:
    """Same-shaped tensors as (rows, cols) with adjacent columns: one long row when all are contiguous.

    A single row has no partly filled block at every row's end. Copies only where leading strides do not fold.
    """
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    adjacent = [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]
    return [t.reshape(-1, t.shape[-1]) for t in adjacent]


def _launch_sizes(rows: int, cols: int) -> tuple[tuple[int], int]:
    # 1024 columns over 4 warps: one 16-byte access per thread and tensor in bf16; the copy rate on an H200.
    block = min(1024, max(128, next_power_of_2(cols)))
    return (rows * cdiv(cols, block),), block


def _launch_fwd(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if h.numel() == 0:
        return h
    # h joins the fold so that all three agree on what a row is.
    gate, up, h_rows = _fold(gate, up, h)
    rows, cols = gate.shape
    grid, block = _launch_sizes(rows, cols)
    swiglu_fwd_kernel[grid](
        gate, up, h_rows, cols, gate.stride(0), up.stride(0), ACTIVATION=activation, BLOCK=block, num_warps=4
    )
    return h


def _launch_bwd(dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> None:
    if dh.numel() == 0:
        return
    dh, gate, up, dgate, dup = _fold(dh, gate, up, dgate, dup)
    rows, cols = gate.shape
    grid, block = _launch_sizes(rows, cols)
    swiglu_bwd_kernel[grid](
        dh,
        gate,
        up,
        dgate,
        dup,
        cols,
        dh.stride(0),
        gate.stride(0),
        up.stride(0),
        dgate.stride(0),
        ACTIVATION=activation,
        BLOCK=block,
        num_warps=4,
    )


def swiglu_triton(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check(gate, up, activation)
    _check_sizes(gate, up)
    if gate.dtype is torch.float64:
        return swiglu_reference(gate, up, activation)
    return _launch_fwd(gate, up, activation)


def swiglu_bwd_triton(dh: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    _check(gate, up, activation)
    _check_sizes(gate, up, dh)
    if gate.dtype is torch.float64:
        return swiglu_bwd_reference(dh, gate, up, activation)
    dgate, dup = swiglu_bwd_fake(dh, gate, up, activation)
    _launch_bwd(dh, gate, up, dgate, dup, activation)
    return dgate, dup


def swiglu_packed_triton(gate_up: Tensor, activation: str, gate_first: bool) -> Tensor:
    return swiglu_triton(*_halves(gate_up, activation, gate_first), activation)


def swiglu_packed_bwd_triton(dh: Tensor, gate_up: Tensor, activation: str, gate_first: bool) -> Tensor:
    gate, up = _halves(gate_up, activation, gate_first)
    _check_sizes(gate, up, dh)
    if gate.dtype is torch.float64:
        return swiglu_packed_bwd_reference(dh, gate_up, activation, gate_first)
    d_gate_up = swiglu_packed_bwd_fake(dh, gate_up, activation, gate_first)
    _launch_bwd(dh, gate, up, *_halves(d_gate_up, activation, gate_first), activation)
    return d_gate_up


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype is torch.float64 else t.float()


def _distribution_reference(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`_distribution` in torch."""
    if activation == "silu":
        cdf = torch.sigmoid(gate)
        return cdf, formulas.logistic_pdf(cdf, torch.sigmoid(-gate))
    if activation == "gelu":
        cdf = 0.5 * (1.0 + torch.erf(gate * 0.7071067811865476))
        return cdf, formulas.normal_pdf(torch.exp(gate * gate * -0.5), 0.3989422804014327)
    argument = formulas.tanh_argument(gate, 0.7978845608028654, 0.044715)
    cdf = torch.sigmoid(argument)
    return cdf, formulas.tanh_pdf(cdf, torch.sigmoid(-argument), gate, 0.7978845608028654, 0.044715)


def swiglu_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check(gate, up, activation)
    _check_sizes(gate, up)
    cdf, _ = _distribution_reference(_wide(gate), activation)
    return (formulas.act(_wide(gate), cdf).to(gate.dtype) * up).contiguous()


def swiglu_bwd_reference(dh: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    _check(gate, up, activation)
    _check_sizes(gate, up, dh)
    dtype = gate.dtype
    dh, gate, up = _wide(dh), _wide(gate), _wide(up)
    cdf, pdf = _distribution_reference(gate, activation)
    dgate = formulas.dgate(dh, gate, up, cdf, pdf)
    return dgate.to(dtype).contiguous(), formulas.dup(dh, gate, cdf).to(dtype).contiguous()


def swiglu_packed_reference(gate_up: Tensor, activation: str, gate_first: bool) -> Tensor:
    return swiglu_reference(*_halves(gate_up, activation, gate_first), activation)


def swiglu_packed_bwd_reference(dh: Tensor, gate_up: Tensor, activation: str, gate_first: bool) -> Tensor:
    dgate, dup = swiglu_bwd_reference(dh, *_halves(gate_up, activation, gate_first), activation)
    return torch.cat((dgate, dup) if gate_first else (dup, dgate), dim=-1)


def swiglu_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check(gate, up, activation)
    return gate.new_empty(gate.shape)


def swiglu_bwd_fake(dh: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def swiglu_packed_fake(gate_up: Tensor, activation: str, gate_first: bool) -> Tensor:
    _check(gate_up, gate_up, activation)
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def swiglu_packed_bwd_fake(dh: Tensor, gate_up: Tensor, activation: str, gate_first: bool) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _no_flops(*args: Any) -> int:
    """Counted as torch counts its own pointwise operators: matrix products only."""
    return 0


swiglu = define_op(
    "swiglu(Tensor gate, Tensor up, str activation) -> Tensor",
    reference=swiglu_reference,
    triton=swiglu_triton,
    fake=swiglu_fake,
    flops=_no_flops,
    bytes_moved=lambda gate, up, activation: nbytes(gate, up, gate),
)
swiglu_bwd = define_op(
    "swiglu_bwd(Tensor dh, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    reference=swiglu_bwd_reference,
    triton=swiglu_bwd_triton,
    fake=swiglu_bwd_fake,
    flops=_no_flops,
    bytes_moved=lambda dh, gate, up, activation: nbytes(dh, gate, up, gate, up),
)
swiglu_packed = define_op(
    "swiglu_packed(Tensor gate_up, str activation, bool gate_first) -> Tensor",
    reference=swiglu_packed_reference,
    triton=swiglu_packed_triton,
    fake=swiglu_packed_fake,
    flops=_no_flops,
    bytes_moved=lambda gate_up, activation, gate_first: nbytes(gate_up) * 3 // 2,
)
swiglu_packed_bwd = define_op(
    "swiglu_packed_bwd(Tensor dh, Tensor gate_up, str activation, bool gate_first) -> Tensor",
    reference=swiglu_packed_bwd_reference,
    triton=swiglu_packed_bwd_triton,
    fake=swiglu_packed_bwd_fake,
    flops=_no_flops,
    bytes_moved=lambda dh, gate_up, activation, gate_first: nbytes(dh, gate_up, gate_up),
)
remade(swiglu)
remade(swiglu_packed)


def _save_inputs(ctx: Any, inputs: tuple, output: Any) -> None:
    """The tensors of the call, and its remaining arguments: all that either backward needs."""
    ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
    ctx.rest = [a for a in inputs if not isinstance(a, Tensor)]


def _backward(ctx: Any, dh: Tensor) -> tuple:
    dgate, dup = swiglu_bwd(dh, *ctx.saved_tensors, *ctx.rest)
    return (dgate if ctx.needs_input_grad[0] else None), (dup if ctx.needs_input_grad[1] else None), None


def _packed_backward(ctx: Any, dh: Tensor) -> tuple:
    return swiglu_packed_bwd(dh, *ctx.saved_tensors, *ctx.rest), None, None


define_backward(swiglu, setup_context=_save_inputs, backward=_backward)
define_backward(swiglu_packed, setup_context=_save_inputs, backward=_packed_backward)
refuse_double_backward(swiglu_bwd)
refuse_double_backward(swiglu_packed_bwd)
