"""RMS normalisation, alone, after a residual add, and gated: `rms_norm`, `add_rms_norm`, `gated_rms_norm`.

Math: rstd = 1 / sqrt(mean(x^2) + eps), y = (offset + w) x rstd; gradients in derivations/rms_norm.py.
Shapes: x, y, residual, s, z (..., D); w (D,) or None; rstd (...), float32 (float64 for float64 x).
Numerics: float32 inside. `cast_before_weight` (Llama): x rstd is rounded to x.dtype, then multiplied by w in
    the promoted dtype, which is y's. Otherwise (Gemma, OLMo 2, F.rms_norm): rounded to x.dtype once, last.
Cost: forward reads and writes each tensor once; backward reads dy, x (and ds, z), writes dx (and dz) once.

T rows, D columns. A program takes a tile of ROWS rows; a row always fits, so nothing is read twice. Strided
views are read in place (see _rows.py); outputs are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..derivations import rms_norm as formulas
from ._launch import cdiv, inline, tl, triton
from ._op import define_backward, define_op, nbytes, refuse_double_backward, remade
from ._rows import (
    add_partials,
    one_program_takes_a_row,
    row_levels,
    row_offsets,
    row_tile,
    statistics_dtype,
    summing_programs,
    summing_tile,
)

ACTIVATIONS = ("silu", "sigmoid")

_y, _gated, _silu = inline(formulas.y), inline(formulas.gated), inline(formulas.silu)
_dx, _c_term, _dw_term = inline(formulas.dx), inline(formulas.c_term), inline(formulas.dw_term)
_d_residual, _d_normed, _dz = inline(formulas.d_residual), inline(formulas.d_normed), inline(formulas.dz)
_d_silu, _d_sigmoid = inline(formulas.d_silu), inline(formulas.d_sigmoid)
_xhat = inline(formulas.xhat)


@triton.jit(do_not_specialize=["T"])
def rms_norm_fwd_kernel(
    x_ptr, x_s0, x_s1, x_s2,  # (T, D)
    other_ptr, o_s0, o_s1, o_s2,  # (T, D): the residual or the gate z, as FORM says
    w_ptr,  # (D,)
    y_ptr, s_ptr, rstd_ptr,  # (T, D), (T, D), (T,)
    T, D, n1, n2, eps, offset,
    FORM: tl.constexpr, HAS_W: tl.constexpr, CAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FORM: plain, residual (s = x + other is normalised), silu or sigmoid (times act(other) at the end)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < T) & (col < D)
    out = row.to(tl.int64) * D + col

    x = tl.load(x_ptr + row_offsets(row, n1, n2, x_s0, x_s1, x_s2) + col, mask, other=0.0).to(tl.float32)
    if FORM != "plain":
        other = tl.load(other_ptr + row_offsets(row, n1, n2, o_s0, o_s1, o_s2) + col, mask, other=0.0)
        other = other.to(tl.float32)
    if FORM == "residual":
        s = (x + other).to(x_ptr.dtype.element_ty)
        tl.store(s_ptr + out, s, mask)
        x = s.to(tl.float32)

    mean = tl.sum(x * x, axis=1, keep_dims=True) / D
    # Rounded to nearest, as torch does; tl.rsqrt is an approximation good to two units in the last place.
    rstd = tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + tl.cast(eps, tl.float32)))
    tl.store(rstd_ptr + row, rstd, row < T)
    y = _xhat(x, rstd)
    if CAST:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if HAS_W:
        w = tl.load(w_ptr + col, col < D, other=0.0).to(tl.float32)
        y = _y(w + tl.cast(offset, tl.float32), y)
        if CAST and w_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if FORM == "silu":
        y = _gated(y, _silu(other, tl.sigmoid(other)))
    if FORM == "sigmoid":
        y = _gated(y, tl.sigmoid(other))
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["T"])
def rms_norm_bwd_kernel(
    dy_ptr, dy_s0, dy_s1, dy_s2,  # (T, D)
    x_ptr, x_s0, x_s1, x_s2,  # (T, D): what was normalised, s in the residual form
    other_ptr, o_s0, o_s1, o_s2,  # (T, D): ds or the gate z, as FORM says
    w_ptr, rstd_ptr,  # (D,), (T,)
    dx_ptr, dz_ptr, partial_ptr,  # (T, D), (T, D), (programs, D) float32
    T, D, n1, n2, offset,
    FORM: tl.constexpr, HAS_W: tl.constexpr, CAST: tl.constexpr, NEED_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walks tiles of rows with a stride of the grid, w and this program's share of dw kept in registers."""
    col = tl.arange(0, BLOCK)[None, :]
    scale = 1.0
    if HAS_W:
        scale = tl.load(w_ptr + col, col < D, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < T) & (col < D)
        out = row.to(tl.int64) * D + col
        x = tl.load(x_ptr + row_offsets(row, n1, n2, x_s0, x_s1, x_s2) + col, mask, other=0.0)
        dy = tl.load(dy_ptr + row_offsets(row, n1, n2, dy_s0, dy_s1, dy_s2) + col, mask, other=0.0)
        if FORM != "plain":
            other = tl.load(other_ptr + row_offsets(row, n1, n2, o_s0, o_s1, o_s2) + col, mask, other=0.0)
            other = other.to(tl.float32)
        rstd = tl.load(rstd_ptr + row, row < T, other=0.0)
        dy = dy.to(tl.float32)

        xhat = _xhat(x.to(tl.float32), rstd)
        weighted = xhat
        if CAST:
            # The value that w multiplied in the forward was rounded.
            weighted = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
        if FORM == "silu" or FORM == "sigmoid":
            sigmoid, rest = tl.sigmoid(other), tl.sigmoid(-other)  # pyright: ignore
            if FORM == "silu":
                act, d_act = _silu(other, sigmoid), _d_silu(other, sigmoid, rest)
            else:
                act, d_act = sigmoid, _d_sigmoid(sigmoid, rest)
            dz = _dz(dy, _y(scale, weighted), d_act)
            tl.store(dz_ptr + out, dz.to(dz_ptr.dtype.element_ty), mask)
            dy = _d_normed(dy, act)
        if NEED_DW:
            dw += _dw_term(dy, weighted)
        c = tl.sum(_c_term(dy, scale, xhat), axis=1, keep_dims=True) / D
        dx = _dx(dy, scale, xhat, rstd, c)
        if FORM == "residual":
            dx = _d_residual(dx, other)
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask)
    if NEED_DW:
        partial = tl.sum(dw, axis=0, keep_dims=True)
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * D + col, partial, col < D)


# One forward and one backward serve all three operators: `form` is plain, residual, silu or sigmoid, `other` its
# second (..., D) tensor. Each exists as kernel launch, as plain torch and as shapes alone.


def _forward(x, other, w, eps, offset, cast, form):
    """Returns y, s (x itself unless `form` is residual), rstd."""
    _check(x, other, w, offset, cast, form, sizes=True)
    if not one_program_takes_a_row(x, other, w):
        return _forward_reference(x, other, w, eps, offset, cast, form)
    (x, other), (n1, n2), (x_strides, o_strides) = row_levels(x, other)
    y, s, rstd = _forward_fake(x, other, w, eps, offset, cast, form)
    D, tile = x.shape[-1], row_tile(x.shape[-1])
    T = x.numel() // D
    rms_norm_fwd_kernel[(cdiv(T, tile["ROWS"]),)](
        x, *x_strides, x if other is None else other, *o_strides, x if w is None else w.contiguous(),
        y, s, rstd, T, D, n1, n2, eps, offset, FORM=form, HAS_W=w is not None, CAST=cast, **tile,
    )  # fmt: skip
    return y, s, rstd


def _backward(dy, x, other, w, rstd, offset, cast, form, need_dw):
    """Returns dx, dw (empty unless needed), dz (None unless `form` is a gate)."""
    if not one_program_takes_a_row(x, other, w, dy):
        return _backward_reference(dy, x, other, w, rstd, offset, cast, form, need_dw)
    (dy, x, other), (n1, n2), (dy_strides, x_strides, o_strides) = row_levels(dy, x, other)
    dx, dw, dz = _backward_fake(dy, x, other, w, rstd, offset, cast, form, need_dw)
    need_dw = need_dw and w is not None
    D, tile = x.shape[-1], summing_tile(x.shape[-1])
    T = x.numel() // D
    programs, partial = cdiv(T, tile["ROWS"]), dx
    if need_dw:
        programs = summing_programs(programs, D, x.device)
        partial = x.new_empty((programs, D), dtype=torch.float32)
    rms_norm_bwd_kernel[(programs,)](
        dy, *dy_strides, x, *x_strides, x if other is None else other, *o_strides,
        x if w is None else w.contiguous(), rstd.contiguous(), dx, dx if dz is None else dz, partial,
        T, D, n1, n2, offset, FORM=form, HAS_W=w is not None, CAST=cast, NEED_DW=need_dw, **tile,
    )  # fmt: skip
    if need_dw:
        add_partials(partial, dw)
    return dx, dw, dz


def _activation(z, name):
    """act(z) and act'(z)."""
    sigmoid, rest = torch.sigmoid(z), torch.sigmoid(-z)
    if name == "silu":
        return formulas.silu(z, sigmoid), formulas.d_silu(z, sigmoid, rest)
    return sigmoid, formulas.d_sigmoid(sigmoid, rest)


def _forward_reference(x, other, w, eps, offset, cast, form):
    _check(x, other, w, offset, cast, form, sizes=True)
    s = (x + other).contiguous() if form == "residual" else x
    wide = s.to(statistics_dtype(x))
    rstd = torch.rsqrt((wide * wide).mean(-1) + eps).contiguous()
    y = formulas.xhat(wide, rstd.unsqueeze(-1))
    if cast:
        y = y.to(x.dtype)
    if w is not None:
        y = formulas.y(w if cast else w.to(wide.dtype) + offset, y)
    if form in ACTIVATIONS:
        y = formulas.gated(y, _activation(other.to(statistics_dtype(other)), form)[0])
    return y.to(_y_dtype(x, w, cast, form)).contiguous(), s, rstd


def _backward_reference(dy, x, other, w, rstd, offset, cast, form, need_dw):
    rstd = rstd.unsqueeze(-1)
    xhat = formulas.xhat(x.to(statistics_dtype(x)), rstd)
    weighted = xhat.to(x.dtype).to(xhat.dtype) if cast else xhat
    scale = 1.0 if w is None else w.to(xhat.dtype) + offset
    dy, dw, dz = dy.to(xhat.dtype), _empty_dw(x, w, need_dw), None
    if form in ACTIVATIONS:
        act, d_act = _activation(other.to(statistics_dtype(other)), form)
        dz = formulas.dz(dy, formulas.y(scale, weighted), d_act).to(other.dtype).contiguous()
        dy = formulas.d_normed(dy, act)
    if dw.numel():
        dw = formulas.dw_term(dy, weighted).reshape(-1, x.shape[-1]).sum(0).to(dw.dtype)
    c = formulas.c_term(dy, scale, xhat).mean(-1, keepdim=True)
    dx = formulas.dx(dy, scale, xhat, rstd, c)
    if form == "residual":
        dx = formulas.d_residual(dx, other)
    return dx.to(x.dtype).contiguous(), dw, dz


def _forward_fake(x, other, w, eps, offset, cast, form):
    _check(x, other, w, offset, cast, form, sizes=False)
    y = x.new_empty(x.shape, dtype=_y_dtype(x, w, cast, form))
    s = x.new_empty(x.shape) if form == "residual" else x
    return y, s, x.new_empty(x.shape[:-1], dtype=statistics_dtype(x))


def _backward_fake(dy, x, other, w, rstd, offset, cast, form, need_dw):
    dz = other.new_empty(x.shape) if form in ACTIVATIONS else None
    return x.new_empty(x.shape), _empty_dw(x, w, need_dw), dz


def _y_dtype(x: Tensor, w: Tensor | None, cast: bool, form: str) -> torch.dtype:
    if not cast or w is None or form in ACTIVATIONS:
        return x.dtype
    return torch.promote_types(x.dtype, w.dtype)


def _empty_dw(x: Tensor, w: Tensor | None, need_dw: bool) -> Tensor:
    return (x if w is None else w).new_empty(x.shape[-1] if need_dw and w is not None else 0)


def _check(x, other, w, offset, cast, form, *, sizes):
    """Raises: ValueError when the inputs do not fit together. Fakes must not compare sizes: `sizes=False`."""
    name = {"plain": "rms_norm", "residual": "add_rms_norm"}.get(form, "gated_rms_norm")
    if not x.is_floating_point() or x.ndim == 0:
        raise ValueError(f"{name}: x must be floating point (..., D), got {x.dtype} with {x.ndim} dimensions")
    if cast and offset != 0:
        raise ValueError(f"{name}: cast_before_weight needs offset 0, got {offset}. Add the offset to w")
    if w is not None and (w.ndim != 1 or (sizes and w.shape[0] != x.shape[-1])):
        raise ValueError(f"{name}: w must be (D,), got w {tuple(w.shape)} for x {tuple(x.shape)}. Flatten w")
    if other is None:
        return
    if other.ndim != x.ndim or (sizes and other.shape != x.shape):
        shapes = f"{tuple(x.shape)} and {tuple(other.shape)}"
        raise ValueError(f"{name}: both (..., D) inputs must have one shape, got {shapes}. Expand one")
    if form == "residual" and other.dtype != x.dtype:
        raise ValueError(f"{name}: x and residual must share a dtype, got {x.dtype}, {other.dtype}. Cast one")


class _Operators:
    """The five operators over one way of computing them."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        self._forward, self._backward = forward, backward

    def rms_norm(self, x, w, eps, offset, cast_before_weight):
        y, _, rstd = self._forward(x, None, w, eps, offset, cast_before_weight, "plain")
        return y, rstd

    def add_rms_norm(self, x, residual, w, eps, offset, cast_before_weight):
        return self._forward(x, residual, w, eps, offset, cast_before_weight, "residual")

    def gated_rms_norm(self, x, w, z, eps, offset, cast_before_weight, activation):
        if activation not in ACTIVATIONS:
            raise ValueError(f"gated_rms_norm: activation must be one of {ACTIVATIONS}, got {activation!r}")
        y, _, rstd = self._forward(x, z, w, eps, offset, cast_before_weight, activation)
        return y, rstd

    def rms_norm_bwd(self, dy, ds, x, w, rstd, offset, cast_before_weight, need_dw):
        form = "plain" if ds is None else "residual"
        return self._backward(dy, x, ds, w, rstd, offset, cast_before_weight, form, need_dw)[:2]

    def gated_rms_norm_bwd(self, dy, x, w, z, rstd, offset, cast_before_weight, activation, need_dw):
        return self._backward(dy, x, z, w, rstd, offset, cast_before_weight, activation, need_dw)


TRITON = _Operators(_forward, _backward)
REFERENCE = _Operators(_forward_reference, _backward_reference)
FAKE = _Operators(_forward_fake, _backward_fake)


def _define(schema: str, flops_per_element: int, bytes_moved: Callable[..., int]) -> torch._ops.OpOverload:
    name = schema.split("(")[0]
    ways = {"reference": REFERENCE, "triton": TRITON, "fake": FAKE}
    return define_op(
        schema,
        **{way: getattr(operators, name) for way, operators in ways.items()},
        flops=lambda first, *rest: flops_per_element * first.numel(),
        bytes_moved=bytes_moved,
    )


rms_norm = _define(
    "rms_norm(Tensor x, Tensor? w, float eps, float offset, bool cast_before_weight) -> (Tensor y, Tensor rstd)",
    4,
    lambda x, w, eps, offset, cast: nbytes(x, w) + x.numel() * _y_dtype(x, w, cast, "plain").itemsize,
)
add_rms_norm = _define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? w, float eps, float offset, bool cast_before_weight)"
    " -> (Tensor y, Tensor s, Tensor rstd)",
    5,
    lambda x, residual, w, eps, offset, cast: (
        nbytes(x, residual, x, w) + x.numel() * _y_dtype(x, w, cast, "residual").itemsize
    ),
)
gated_rms_norm = _define(
    "gated_rms_norm(Tensor x, Tensor? w, Tensor z, float eps, float offset, bool cast_before_weight,"
    " str activation) -> (Tensor y, Tensor rstd)",
    9,
    lambda x, w, z, *rest: nbytes(x, x, z, w),
)
rms_norm_bwd = _define(
    "rms_norm_bwd(Tensor dy, Tensor? ds, Tensor x, Tensor? w, Tensor rstd, float offset,"
    " bool cast_before_weight, bool need_dw) -> (Tensor dx, Tensor dw)",
    10,
    lambda dy, ds, x, w, *rest: nbytes(dy, ds, x, x, w, w if rest[-1] else None),
)
gated_rms_norm_bwd = _define(
    "gated_rms_norm_bwd(Tensor dy, Tensor x, Tensor? w, Tensor z, Tensor rstd, float offset,"
    " bool cast_before_weight, str activation, bool need_dw) -> (Tensor dx, Tensor dw, Tensor dz)",
    20,
    lambda dy, x, w, z, *rest: nbytes(dy, x, x, z, z, w, w if rest[-1] else None),
)


def _save(ctx: Any, output: tuple[Tensor, ...], *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors, output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _rms_norm_setup(ctx, inputs, output):
    x, w, _, *ctx.scalars = inputs
    _save(ctx, output, x, w)


def _rms_norm_backward(ctx, dy, _):
    if dy is None:
        return None, None, None, None, None
    need_dw = ctx.needs_input_grad[1]
    x, w, rstd = ctx.saved_tensors
    dx, dw = rms_norm_bwd(dy, None, x, w, rstd, *ctx.scalars, need_dw)
    return dx, dw if need_dw else None, None, None, None


def _add_rms_norm_setup(ctx, inputs, output):
    _, _, w, _, *ctx.scalars = inputs
    _save(ctx, output, output[1], w)


def _add_rms_norm_backward(ctx, dy, ds, _):
    need_dw, dw = ctx.needs_input_grad[2] and dy is not None, None
    if dy is not None:
        s, w, rstd = ctx.saved_tensors
        ds, dw = rms_norm_bwd(dy, ds, s, w, rstd, *ctx.scalars, need_dw)
    return ds, ds, dw if need_dw else None, None, None, None


def _gated_rms_norm_setup(ctx, inputs, output):
    x, w, z, _, *ctx.scalars = inputs
    _save(ctx, output, x, w, z)


def _gated_rms_norm_backward(ctx, dy, _):
    if dy is None:
        return None, None, None, None, None, None, None
    need_dw = ctx.needs_input_grad[1]
    x, w, z, rstd = ctx.saved_tensors
    dx, dw, dz = gated_rms_norm_bwd(dy, x, w, z, rstd, *ctx.scalars, need_dw)
    return dx, dw if need_dw else None, dz, None, None, None, None


define_backward(rms_norm, setup_context=_rms_norm_setup, backward=_rms_norm_backward)
define_backward(add_rms_norm, setup_context=_add_rms_norm_setup, backward=_add_rms_norm_backward)
define_backward(gated_rms_norm, setup_context=_gated_rms_norm_setup, backward=_gated_rms_norm_backward)
refuse_double_backward(rms_norm_bwd, gated_rms_norm_bwd)
remade(rms_norm)
remade(add_rms_norm, lambda args, out: (rms_norm, (out(1), *args[2:])))
