"""The gated unit h = act(gate) * up and its gradients, from two tensors or from the two halves of one.

One forward and one backward kernel serve every form: the halves of a packed (..., 2F) buffer are rows with a
stride of 2F, so neither a split nor a concatenation copies anything; interleaved ones are read side by side and
parted in registers. Limits and offset are compiled in where there are any.

Math: h = act(min(gate, limit)) * (min(max(up, -limit), limit) + offset), act in silu (x sigmoid(alpha x)), gelu,
    gelu_tanh, relu2; without limit and offset act(gate) * up; see derivations/swiglu.py, Theorems act, dgate, dup.
Shapes: gate, up, h (..., F); gate_up (..., 2F); F ffn.
Numerics: act in fp32, rounded to the dtype, then times up, as in eager. The backward is fp32, rounded once.
Cost: forward reads 2 F and writes F elements per row; backward reads 3 F and writes 2 F.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivations import swiglu as formulas
from ._gated import (
    Form,
    check,
    check_sizes,
    halves,
    swiglu_bwd_reference,
    swiglu_packed_bwd_reference,
    swiglu_packed_reference,
    swiglu_reference,
)
from ._launch import cdiv, inline, next_power_of_2, tl, triton
from ._op import define_backward, define_op, nbytes, refuse_double_backward, remade

_act = inline(formulas.act)
_dgate = inline(formulas.dgate)
_dup = inline(formulas.dup)
_logistic_pdf = inline(formulas.logistic_pdf)
_scaled_pdf = inline(formulas.scaled_pdf)
_normal_pdf = inline(formulas.normal_pdf)
_tanh_argument = inline(formulas.tanh_argument)
_tanh_pdf = inline(formulas.tanh_pdf)


@triton.jit
def _distribution(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """P(gate) and its density p(gate); what a caller drops is never computed."""
    if ACTIVATION == "silu":
        argument = gate if ALPHA == 1.0 else gate * ALPHA
        cdf = tl.sigmoid(argument)
        pdf = _logistic_pdf(cdf, tl.sigmoid(-argument))
        if ALPHA != 1.0:
            pdf = _scaled_pdf(pdf, ALPHA)
    elif ACTIVATION == "relu2":
        cdf = gate
        pdf = tl.zeros_like(gate) + 1.0
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        pdf = _normal_pdf(tl.exp(gate * gate * -0.5), 0.3989422804014327)
    else:
        argument = _tanh_argument(gate, 0.7978845608028654, 0.044715)
        cdf = tl.sigmoid(argument)
        pdf = _tanh_pdf(cdf, tl.sigmoid(-argument), gate, 0.7978845608028654, 0.044715)
    return cdf, pdf


@triton.jit
def _limited(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """What the activation and the product see. A comparison with NaN is false, so that NaN stays."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "relu2":
        gate = tl.where(gate < 0.0, 0.0, gate)
    if OFFSET != 0.0:
        up += OFFSET
    return gate, up


@triton.jit
def _block(cols, BLOCK: tl.constexpr):
    """This program's row and first column, both 64-bit, and how many columns there are from there on."""
    blocks = tl.cdiv(cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    return row, start, cols - start


@triton.jit
def _load(gate_ptr, up_ptr, gate_row, up_row, start, left, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """gate and up, fp32. With PAIRS they are neighbours in memory, and `gate_ptr` points at the first of both."""
    if PAIRS == "":
        offsets = tl.arange(0, BLOCK)
        gate = tl.load(gate_ptr + (gate_row + start) + offsets, mask=offsets < left)
        up = tl.load(up_ptr + (up_row + start) + offsets, mask=offsets < left)
    else:
        offsets = tl.arange(0, 2 * BLOCK)  # one wide load, parted in registers
        both = tl.load(gate_ptr + (gate_row + 2 * start) + offsets, mask=offsets < 2 * left)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
        if PAIRS == "up first":
            gate, up = up, gate
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store(gate_ptr, up_ptr, row, start, left, gate, up, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """The reverse of `_load`, rounded."""
    dtype = gate_ptr.dtype.element_ty
    if PAIRS == "":
        offsets = tl.arange(0, BLOCK)
        tl.store(gate_ptr + (row + start) + offsets, gate.to(dtype), mask=offsets < left)
        tl.store(up_ptr + (row + start) + offsets, up.to(dtype), mask=offsets < left)
    else:
        if PAIRS == "up first":
            gate, up = up, gate
        offsets = tl.arange(0, 2 * BLOCK)
        both = tl.interleave(gate.to(dtype), up.to(dtype))
        tl.store(gate_ptr + (row + 2 * start) + offsets, both, mask=offsets < 2 * left)


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
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, left = _block(cols, BLOCK)
    gate, up = _load(gate_ptr, up_ptr, row * gate_row_stride, row * up_row_stride, start, left, PAIRS, BLOCK)
    gate, up = _limited(gate, up, ACTIVATION, LIMIT, OFFSET)

    dtype = h_ptr.dtype.element_ty
    cdf, _ = _distribution(gate, ACTIVATION, ALPHA)
    activated = _act(gate, cdf).to(dtype).to(tl.float32)

    offsets = tl.arange(0, BLOCK)
    tl.store(h_ptr + (row * cols + start) + offsets, (activated * up).to(dtype), mask=offsets < left)


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
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, left = _block(cols, BLOCK)
    offsets = tl.arange(0, BLOCK)
    dh = tl.load(dh_ptr + (row * dh_row_stride + start) + offsets, mask=offsets < left).to(tl.float32)
    g, u = _load(gate_ptr, up_ptr, row * gate_row_stride, row * up_row_stride, start, left, PAIRS, BLOCK)
    gate, up = _limited(g, u, ACTIVATION, LIMIT, OFFSET)

    cdf, pdf = _distribution(gate, ACTIVATION, ALPHA)
    dgate = _dgate(dh, gate, up, cdf, pdf)
    dup = _dup(dh, gate, cdf)
    # Where a limit holds the slope is zero, whatever it is multiplied by.
    if LIMIT is not None:
        dgate = tl.where(g <= LIMIT, dgate, 0.0)
        dup = tl.where(tl.abs(u) <= LIMIT, dup, 0.0)
    if ACTIVATION == "relu2":
        dgate = tl.where(g <= 0.0, 0.0, dgate)

    _store(dgate_ptr, dup_ptr, row * out_row_stride, start, left, dgate, dup, PAIRS, BLOCK)


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


def _launch_fwd(gate: Tensor, up: Tensor, h: Tensor, form: Form, pairs: str = "") -> None:
    """With `pairs`, gate and up are one tensor, the interleaved one."""
    if h.numel() == 0:
        return
    # h joins the fold so that all three agree on what a row is.
    gate, up, h = _fold(gate, up, h)
    rows, cols = h.shape
    grid, block = _launch_sizes(rows, cols)
    activation, limit, alpha, offset = form
    swiglu_fwd_kernel[grid](
        gate, up, h, cols, gate.stride(0), up.stride(0), ACTIVATION=activation, LIMIT=limit, ALPHA=alpha,
        OFFSET=offset, PAIRS=pairs, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _launch_bwd(dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, form: Form, pairs: str = "") -> None:
    if dh.numel() == 0:
        return
    dh, gate, up, dgate, dup = _fold(dh, gate, up, dgate, dup)
    rows, cols = dh.shape
    grid, block = _launch_sizes(rows, cols)
    activation, limit, alpha, offset = form
    swiglu_bwd_kernel[grid](
        dh, gate, up, dgate, dup, cols, dh.stride(0), gate.stride(0), up.stride(0), dgate.stride(0),
        ACTIVATION=activation, LIMIT=limit, ALPHA=alpha, OFFSET=offset, PAIRS=pairs, BLOCK=block, num_warps=4,
    )  # fmt: skip


def swiglu_triton(gate: Tensor, up: Tensor, *form: Any) -> Tensor:
    h = swiglu_fake(gate, up, *form)
    check_sizes(gate, up)
    if gate.dtype is torch.float64:
        return swiglu_reference(gate, up, *form)
    _launch_fwd(gate, up, h, Form(*form))
    return h


def swiglu_bwd_triton(dh: Tensor, gate: Tensor, up: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
    check(gate, up, Form(*form))
    check_sizes(gate, up, dh)
    if gate.dtype is torch.float64:
        return swiglu_bwd_reference(dh, gate, up, *form)
    dgate, dup = swiglu_bwd_fake(dh, gate, up, *form)
    _launch_bwd(dh, gate, up, dgate, dup, Form(*form))
    return dgate, dup


def swiglu_packed_triton(
    gate_up: Tensor, activation: str, gate_first: bool, interleaved: bool = False, *how: Any
) -> Tensor:
    form = Form(activation, *how)
    gate, up = halves(gate_up, form, gate_first, interleaved)
    if not interleaved or gate_up.dtype is torch.float64:
        return swiglu_triton(gate, up, *form)
    h = swiglu_fake(gate, up, *form)
    _launch_fwd(gate_up, gate_up, h, form, _PAIRS[gate_first])
    return h


_PAIRS = {True: "gate first", False: "up first"}


def swiglu_packed_bwd_triton(
    dh: Tensor, gate_up: Tensor, activation: str, gate_first: bool, interleaved: bool = False, *how: Any
) -> Tensor:
    form = Form(activation, *how)
    gate, up = halves(gate_up, form, gate_first, interleaved)
    check_sizes(gate, up, dh)
    if gate.dtype is torch.float64:
        return swiglu_packed_bwd_reference(dh, gate_up, activation, gate_first, interleaved, *how)
    d_gate_up = swiglu_packed_bwd_fake(dh, gate_up)
    if interleaved:
        _launch_bwd(dh, gate_up, gate_up, d_gate_up, d_gate_up, form, _PAIRS[gate_first])
    else:
        _launch_bwd(dh, gate, up, *halves(d_gate_up, form, gate_first, False), form)
    return d_gate_up


def swiglu_fake(gate: Tensor, up: Tensor, *form: Any) -> Tensor:
    check(gate, up, Form(*form))
    return gate.new_empty(gate.shape)


def swiglu_bwd_fake(dh: Tensor, gate: Tensor, up: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def swiglu_packed_fake(gate_up: Tensor, activation: str, gate_first: bool, interleaved: bool = False, *how: Any):
    check(gate_up, gate_up, Form(activation, *how))
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def swiglu_packed_bwd_fake(dh: Tensor, gate_up: Tensor, *form: Any) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _no_flops(*args: Any) -> int:
    """Counted as torch counts its own pointwise operators: matrix products only."""
    return 0


_HOW = "float? limit=None, float alpha=1.0, float offset=0.0"
_PACKED = f"str activation, bool gate_first, bool interleaved=False, {_HOW}"
swiglu = define_op(
    f"swiglu(Tensor gate, Tensor up, str activation, {_HOW}) -> Tensor",
    reference=swiglu_reference,
    triton=swiglu_triton,
    fake=swiglu_fake,
    flops=_no_flops,
    bytes_moved=lambda gate, up, *form: nbytes(gate, up, gate),
)
swiglu_bwd = define_op(
    f"swiglu_bwd(Tensor dh, Tensor gate, Tensor up, str activation, {_HOW}) -> (Tensor, Tensor)",
    reference=swiglu_bwd_reference,
    triton=swiglu_bwd_triton,
    fake=swiglu_bwd_fake,
    flops=_no_flops,
    bytes_moved=lambda dh, gate, up, *form: nbytes(dh, gate, up, gate, up),
)
swiglu_packed = define_op(
    f"swiglu_packed(Tensor gate_up, {_PACKED}) -> Tensor",
    reference=swiglu_packed_reference,
    triton=swiglu_packed_triton,
    fake=swiglu_packed_fake,
    flops=_no_flops,
    bytes_moved=lambda gate_up, *form: nbytes(gate_up) * 3 // 2,
)
swiglu_packed_bwd = define_op(
    f"swiglu_packed_bwd(Tensor dh, Tensor gate_up, {_PACKED}) -> Tensor",
    reference=swiglu_packed_bwd_reference,
    triton=swiglu_packed_bwd_triton,
    fake=swiglu_packed_bwd_fake,
    flops=_no_flops,
    bytes_moved=lambda dh, gate_up, *form: nbytes(dh, gate_up, gate_up),
)
remade(swiglu)
remade(swiglu_packed)


def _save_inputs(ctx: Any, inputs: tuple, output: Any) -> None:
    """The tensors of the call, and its remaining arguments: all that either backward needs."""
    ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
    ctx.rest = [a for a in inputs if not isinstance(a, Tensor)]


def _backward(ctx: Any, dh: Tensor) -> tuple:
    dgate, dup = swiglu_bwd(dh, *ctx.saved_tensors, *ctx.rest)
    wanted = (dgate if ctx.needs_input_grad[0] else None), (dup if ctx.needs_input_grad[1] else None)
    return (*wanted, *(None for _ in ctx.rest))


def _packed_backward(ctx: Any, dh: Tensor) -> tuple:
    return (swiglu_packed_bwd(dh, *ctx.saved_tensors, *ctx.rest), *(None for _ in ctx.rest))


define_backward(swiglu, setup_context=_save_inputs, backward=_backward)
define_backward(swiglu_packed, setup_context=_save_inputs, backward=_packed_backward)
refuse_double_backward(swiglu_bwd)
refuse_double_backward(swiglu_packed_bwd)
