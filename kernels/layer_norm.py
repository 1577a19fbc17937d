"""Layer normalisation, alone and after a residual add: `layer_norm`, `add_layer_norm`.

Math: mean and rstd = 1 / sqrt(mean((x - mean)^2) + eps) of each row, y = w (x - mean) rstd + b; gradients in
    derivations/layer_norm.py.
Shapes: x, y, residual, s (..., D); w, b (D,) or None; mean, rstd (...), float32 (float64 for float64 x).
Numerics: float32 inside. Without `cast_before_weight` (F.layer_norm, Cohere): y is rounded once, last, to `dtype`,
    which is x.dtype unless given. With it (DeBERTa): (x - mean) rstd is rounded to x.dtype, then multiplied and added
    to in the promoted dtypes, the last of which is y's. The variance is that of x - mean, so nothing cancels.
Cost: forward reads and writes each tensor once; backward reads dy, x (and ds), writes dx once.

T rows, D columns. A program takes a tile of ROWS rows; a row always fits, so nothing is read twice. Strided
views are read in place (see _rows.py); outputs are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivations import layer_norm as formulas
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

_xhat, _scaled, _shifted = inline(formulas.xhat), inline(formulas.scaled), inline(formulas.shifted)
_g, _c_term, _d, _dx = inline(formulas.g), inline(formulas.c_term), inline(formulas.d), inline(formulas.dx)
_dw_term, _d_residual = inline(formulas.dw_term), inline(formulas.d_residual)


@triton.jit(do_not_specialize=["T"])
def layer_norm_fwd_kernel(
    x_ptr, x_s0, x_s1, x_s2,  # (T, D)
    residual_ptr, r_s0, r_s1, r_s2,  # (T, D)
    w_ptr, b_ptr,  # (D,), (D,)
    y_ptr, s_ptr, mean_ptr, rstd_ptr,  # (T, D), (T, D), (T,), (T,)
    T, D, n1, n2, eps,
    RESIDUAL: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RESIDUAL: s = x + residual is normalised, and kept."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < T) & (col < D)
    out = row.to(tl.int64) * D + col

    x = tl.load(x_ptr + row_offsets(row, n1, n2, x_s0, x_s1, x_s2) + col, mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row_offsets(row, n1, n2, r_s0, r_s1, r_s2) + col, mask, other=0.0)
        s = (x + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(s_ptr + out, s, mask)
        x = s.to(tl.float32)

    mean = tl.sum(x, axis=1, keep_dims=True) / D
    # Once more, of what is left: a sum of many large numbers has lost digits, and `/` is good to two units only.
    mean += tl.sum(tl.where(col < D, x - mean, 0.0), axis=1, keep_dims=True) / D
    centred = tl.where(col < D, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=1, keep_dims=True) / D
    # Rounded to nearest, as torch does; tl.rsqrt is an approximation good to two units in the last place.
    rstd = tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance + tl.cast(eps, tl.float32)))
    tl.store(mean_ptr + row, mean, row < T)
    tl.store(rstd_ptr + row, rstd, row < T)
    y = _xhat(x, mean, rstd)
    if CAST:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if HAS_W:
        y = _scaled(tl.load(w_ptr + col, col < D, other=0.0).to(tl.float32), y)
        if CAST and w_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if HAS_B:
        y = _shifted(y, tl.load(b_ptr + col, col < D, other=0.0).to(tl.float32))
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["T"])
def layer_norm_bwd_kernel(
    dy_ptr, dy_s0, dy_s1, dy_s2,  # (T, D)
    x_ptr, x_s0, x_s1, x_s2,  # (T, D): what was normalised, s in the residual form
    ds_ptr, ds_s0, ds_s1, ds_s2,  # (T, D)
    w_ptr, mean_ptr, rstd_ptr,  # (D,), (T,), (T,)
    dx_ptr, dw_partial_ptr, db_partial_ptr,  # (T, D), twice (programs, D) float32
    T, D, n1, n2,
    RESIDUAL: tl.constexpr, HAS_W: tl.constexpr, CAST: tl.constexpr,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walks tiles of rows with a stride of the grid; w and this program's shares of dw and db stay in registers."""
    col = tl.arange(0, BLOCK)[None, :]
    w = 1.0
    if HAS_W:
        w = tl.load(w_ptr + col, col < D, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < T) & (col < D)
        out = row.to(tl.int64) * D + col
        x = tl.load(x_ptr + row_offsets(row, n1, n2, x_s0, x_s1, x_s2) + col, mask, other=0.0)
        dy = tl.load(dy_ptr + row_offsets(row, n1, n2, dy_s0, dy_s1, dy_s2) + col, mask, other=0.0)
        if RESIDUAL:
            ds = tl.load(ds_ptr + row_offsets(row, n1, n2, ds_s0, ds_s1, ds_s2) + col, mask, other=0.0)
        mean = tl.load(mean_ptr + row, row < T, other=0.0)
        rstd = tl.load(rstd_ptr + row, row < T, other=0.0)
        dy = dy.to(tl.float32)

        xhat = _xhat(x.to(tl.float32), mean, rstd)
        if NEED_DW:
            weighted = xhat
            if CAST:
                # The value that w multiplied in the forward was rounded.
                weighted = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
            dw += _dw_term(dy, weighted)
        if NEED_DB:
            db += dy
        g = _g(dy, w)  # 0 in columns beyond D
        c = tl.sum(_c_term(g, xhat), axis=1, keep_dims=True) / D
        d = tl.where(col < D, _d(g, xhat, c), 0.0)
        dx = _dx(d, tl.sum(d, axis=1, keep_dims=True) / D, rstd)
        if RESIDUAL:
            dx = _d_residual(dx, ds.to(tl.float32))  # pyright: ignore
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask)
    share = tl.program_id(0).to(tl.int64) * D + col
    if NEED_DW:
        tl.store(dw_partial_ptr + share, tl.sum(dw, axis=0, keep_dims=True), col < D)
    if NEED_DB:
        tl.store(db_partial_ptr + share, tl.sum(db, axis=0, keep_dims=True), col < D)


# One forward and one backward serve both operators: `residual` (`ds` in the backward) is None in the plain one. Each
# exists as kernel launch, as plain torch and as shapes alone.


def _forward(x, residual, w, b, eps, cast, dtype):
    """Returns y, s (x itself without a residual), mean, rstd."""
    _check(x, residual, w, b, cast, dtype, sizes=True)
    if not one_program_takes_a_row(x, w, b):
        return _forward_reference(x, residual, w, b, eps, cast, dtype)
    (x, residual), (n1, n2), (x_strides, r_strides) = row_levels(x, residual)
    y, s, mean, rstd = _forward_fake(x, residual, w, b, eps, cast, dtype)
    D, tile = x.shape[-1], row_tile(x.shape[-1])
    T = x.numel() // D
    layer_norm_fwd_kernel[(cdiv(T, tile["ROWS"]),)](
        x, *x_strides, x if residual is None else residual, *r_strides,
        x if w is None else w.contiguous(), x if b is None else b.contiguous(), y, s, mean, rstd, T, D, n1, n2, eps,
        RESIDUAL=residual is not None, HAS_W=w is not None, HAS_B=b is not None, CAST=cast, **tile,
    )  # fmt: skip
    return y, s, mean, rstd


def _backward(dy, ds, x, w, b, mean, rstd, cast, need_dw, need_db):
    """Returns dx, dw, db; the last two are empty unless needed. Of b only the dtype matters."""
    if not one_program_takes_a_row(x, w, b, dy):
        return _backward_reference(dy, ds, x, w, b, mean, rstd, cast, need_dw, need_db)
    (dy, x, ds), (n1, n2), (dy_strides, x_strides, ds_strides) = row_levels(dy, x, ds)
    dx, dw, db = _backward_fake(dy, ds, x, w, b, mean, rstd, cast, need_dw, need_db)
    need_dw, need_db = need_dw and w is not None, need_db and b is not None
    D, tile = x.shape[-1], summing_tile(x.shape[-1], sums=2)
    T = x.numel() // D
    programs = cdiv(T, tile["ROWS"])
    if need_dw or need_db:
        programs = summing_programs(programs, D, x.device)
    partial = x.new_empty((need_dw + need_db, programs, D), dtype=torch.float32)
    layer_norm_bwd_kernel[(programs,)](
        dy, *dy_strides, x, *x_strides, x if ds is None else ds, *ds_strides,
        x if w is None else w.contiguous(), mean.contiguous(), rstd.contiguous(),
        dx, partial[0] if need_dw else dx, partial[-1] if need_db else dx, T, D, n1, n2,
        RESIDUAL=ds is not None, HAS_W=w is not None, CAST=cast, NEED_DW=need_dw, NEED_DB=need_db, **tile,
    )  # fmt: skip
    if need_dw:
        add_partials(partial[0], dw)
    if need_db:
        add_partials(partial[-1], db)
    return dx, dw, db


def _forward_reference(x, residual, w, b, eps, cast, dtype):
    _check(x, residual, w, b, cast, dtype, sizes=True)
    s = x if residual is None else (x + residual).contiguous()
    wide = s.to(statistics_dtype(x))
    mean = wide.mean(-1)
    mean = (mean + (wide - mean.unsqueeze(-1)).mean(-1)).contiguous()  # what the sum, made in sequence, has lost
    rstd = torch.rsqrt((wide - mean.unsqueeze(-1)).square().mean(-1) + eps).contiguous()
    y = formulas.xhat(wide, mean.unsqueeze(-1), rstd.unsqueeze(-1))
    if cast:
        y = y.to(x.dtype)
    if w is not None:
        y = formulas.scaled(w if cast else w.to(wide.dtype), y)
    if b is not None:
        y = formulas.shifted(y, b if cast else b.to(wide.dtype))
    return y.to(_y_dtype(x, w, b, cast, dtype)).contiguous(), s, mean, rstd


def _backward_reference(dy, ds, x, w, b, mean, rstd, cast, need_dw, need_db):
    rstd = rstd.unsqueeze(-1)
    xhat = formulas.xhat(x.to(statistics_dtype(x)), mean.unsqueeze(-1), rstd)
    dy = dy.to(xhat.dtype)
    dw, db = _empty_gradients(x, w, b, need_dw, need_db)
    if dw.numel():
        weighted = xhat.to(x.dtype).to(xhat.dtype) if cast else xhat
        dw = formulas.dw_term(dy, weighted).reshape(-1, x.shape[-1]).sum(0).to(dw.dtype)
    if db.numel():
        db = dy.reshape(-1, x.shape[-1]).sum(0).to(db.dtype)
    g = formulas.g(dy, 1.0 if w is None else w.to(xhat.dtype))
    d = formulas.d(g, xhat, formulas.c_term(g, xhat).mean(-1, keepdim=True))
    dx = formulas.dx(d, d.mean(-1, keepdim=True), rstd)
    if ds is not None:
        dx = formulas.d_residual(dx, ds)
    return dx.to(x.dtype).contiguous(), dw, db


def _forward_fake(x, residual, w, b, eps, cast, dtype):
    _check(x, residual, w, b, cast, dtype, sizes=False)
    y = x.new_empty(x.shape, dtype=_y_dtype(x, w, b, cast, dtype))
    s = x if residual is None else x.new_empty(x.shape)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=statistics_dtype(x)) for _ in range(2))
    return y, s, mean, rstd


def _backward_fake(dy, ds, x, w, b, mean, rstd, cast, need_dw, need_db):
    return x.new_empty(x.shape), *_empty_gradients(x, w, b, need_dw, need_db)


def _y_dtype(x: Tensor, w: Tensor | None, b: Tensor | None, cast: bool, dtype: torch.dtype | None) -> torch.dtype:
    out = dtype or x.dtype
    for t in (w, b) if cast else ():
        out = out if t is None else torch.promote_types(out, t.dtype)
    return out


def _empty_gradients(x, w, b, need_dw, need_db) -> list[Tensor]:
    """dw and db to be written; without elements where nobody needs them."""
    pairs = ((w, need_dw), (b, need_db))
    return [(x if t is None else t).new_empty(x.shape[-1] if need and t is not None else 0) for t, need in pairs]


def _check(x, residual, w, b, cast, dtype, *, sizes):
    """Raises: ValueError when the inputs do not fit together. Fakes must not compare sizes: `sizes=False`."""
    name = "layer_norm" if residual is None else "add_layer_norm"
    if not x.is_floating_point() or x.ndim == 0:
        raise ValueError(f"{name}: x must be floating point (..., D), got {x.dtype} with {x.ndim} dimensions")
    if dtype is not None and (cast or not dtype.is_floating_point):
        raise ValueError(f"{name}: dtype {dtype} must be floating point, and None with cast_before_weight")
    for letter, t in (("w", w), ("b", b)):
        if t is not None and (t.ndim != 1 or (sizes and t.shape[0] != x.shape[-1])):
            shapes = f"{letter} {tuple(t.shape)} for x {tuple(x.shape)}"
            raise ValueError(f"{name}: {letter} must be (D,), got {shapes}. Flatten {letter}")
    if residual is None:
        return
    if residual.ndim != x.ndim or (sizes and residual.shape != x.shape):
        shapes = f"{tuple(x.shape)} and {tuple(residual.shape)}"
        raise ValueError(f"{name}: x and residual must have one shape, got {shapes}. Expand one")
    if residual.dtype != x.dtype:
        raise ValueError(f"{name}: x and residual must share a dtype, got {x.dtype}, {residual.dtype}. Cast one")


class _Operators:
    """The three operators over one way of computing them."""

    def __init__(self, forward: Any, backward: Any) -> None:
        self._forward, self.layer_norm_bwd = forward, backward

    def layer_norm(self, x, w, b, eps, cast_before_weight, dtype):
        y, _, mean, rstd = self._forward(x, None, w, b, eps, cast_before_weight, dtype)
        return y, mean, rstd

    def add_layer_norm(self, x, residual, w, b, eps, cast_before_weight, dtype):
        return self._forward(x, residual, w, b, eps, cast_before_weight, dtype)


TRITON = _Operators(_forward, _backward)
REFERENCE = _Operators(_forward_reference, _backward_reference)
FAKE = _Operators(_forward_fake, _backward_fake)


def _define(schema: str, flops_per_element: int, bytes_moved: Any) -> torch._ops.OpOverload:
    name = schema.split("(")[0]
    ways = {"reference": REFERENCE, "triton": TRITON, "fake": FAKE}
    return define_op(
        schema,
        **{way: getattr(operators, name) for way, operators in ways.items()},
        flops=lambda first, *rest: flops_per_element * first.numel(),
        bytes_moved=bytes_moved,
    )


def _y_bytes(x: Tensor, w: Tensor | None, b: Tensor | None, cast: bool, dtype: torch.dtype | None) -> int:
    return x.numel() * _y_dtype(x, w, b, cast, dtype).itemsize


layer_norm = _define(
    "layer_norm(Tensor x, Tensor? w, Tensor? b, float eps, bool cast_before_weight, ScalarType? dtype)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    8,
    lambda x, w, b, eps, cast, dtype: nbytes(x, w, b) + _y_bytes(x, w, b, cast, dtype),
)
add_layer_norm = _define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? w, Tensor? b, float eps, bool cast_before_weight,"
    " ScalarType? dtype) -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    9,
    lambda x, residual, w, b, eps, cast, dtype: nbytes(x, residual, x, w, b) + _y_bytes(x, w, b, cast, dtype),
)
layer_norm_bwd = _define(
    "layer_norm_bwd(Tensor dy, Tensor? ds, Tensor x, Tensor? w, Tensor? b, Tensor mean, Tensor rstd,"
    " bool cast_before_weight, bool need_dw, bool need_db) -> (Tensor dx, Tensor dw, Tensor db)",
    14,
    lambda dy, ds, x, w, b, *rest: nbytes(dy, ds, x, x, w, w if rest[-2] else None, b if rest[-1] else None),
)


def _save(ctx: Any, x: Tensor, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """b is kept (as what it is, a parameter) for its dtype, and so that the forward can run again."""
    w, b, _, ctx.cast, _ = inputs[-5:]
    ctx.save_for_backward(x, w, b, *output[-2:])
    ctx.mark_non_differentiable(*output[-2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor, ds: Tensor | None) -> tuple[Any, ...]:
    """dx, dw, db; None where nobody needs them."""
    need_dw, need_db = ctx.needs_input_grad[-5:-3]
    dx, dw, db = layer_norm_bwd(dy, ds, *ctx.saved_tensors, ctx.cast, need_dw, need_db)
    return dx, dw if need_dw else None, db if need_db else None


def _layer_norm_setup(ctx, inputs, output):
    _save(ctx, inputs[0], inputs, output)


def _layer_norm_backward(ctx, dy, *_):
    gradients = (None, None, None) if dy is None else _gradients(ctx, dy, None)
    return *gradients, None, None, None


def _add_layer_norm_setup(ctx, inputs, output):
    _save(ctx, output[1], inputs, output)


def _add_layer_norm_backward(ctx, dy, ds, *_):
    ds, dw, db = (ds, None, None) if dy is None else _gradients(ctx, dy, ds)
    return ds, ds, dw, db, None, None, None


define_backward(layer_norm, setup_context=_layer_norm_setup, backward=_layer_norm_backward)
define_backward(add_layer_norm, setup_context=_add_layer_norm_setup, backward=_add_layer_norm_backward)
refuse_double_backward(layer_norm_bwd)
remade(layer_norm)
remade(add_layer_norm, lambda args, out: (layer_norm, (out(1), *args[2:])))
