"""The RMS norms of q's and k's heads and their rotation, one launch each way.

Math: u = (offset + w) x / sqrt(mean(x^2) + eps) over a head's K channels, then its pairs turn; see
    derivations/norm_rope.py.
Shapes: q (B, H, S, K), k (B, Hk, S, K); wq, wk (K,) or both None; cos, sin (B or 1, S, R) or, one entry per pair,
    (B or 1, S, R/2); rstd_q (B, S, H), rstd_k (B, S, Hk); R <= K rotary dim, channels from R on are only normalised.
Numerics: fp32 inside. u is rounded where eager rounds it (`cast_before_weight` as in rms_norm: x rstd to x.dtype, then
    times w in the promoted dtype; else once, to x.dtype), y once. The backward rounds nothing in between.
Cost: forward reads and writes q and k once; backward reads them and dy once, writes dq and dk once. The norms and the
    rotation one after the other move twice as much forward and 5/3 as much backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivations import norm_rope as formulas
from ._launch import cdiv, inline, next_power_of_2, tl, triton
from ._op import define_backward, define_op, nbytes, refuse_double_backward
from ._pairs import empty_heads, load_pairs, load_table, parted, parted_tables, store_pairs, table_strides
from ._rows import add_partials, statistics_dtype, summing_programs

_xhat, _scaled = inline(formulas.xhat), inline(formulas.scaled)
_first, _second = inline(formulas.first), inline(formulas.second)
_du_first, _du_second = inline(formulas.du_first), inline(formulas.du_second)
_c_term, _dx, _dw_term = inline(formulas.c_term), inline(formulas.dx), inline(formulas.dw_term)


@triton.jit
def _load_rest(rows, stride, mask, R: tl.constexpr, K: tl.constexpr, BLOCK_REST: tl.constexpr):
    """The channels that do not turn, fp32; one column of zeros where all do."""
    channels = R + tl.arange(0, BLOCK_REST)[None, :]
    return tl.load(rows + channels.to(tl.int64) * stride, mask=mask & (channels < K), other=0.0).to(tl.float32)


@triton.jit
def _store_rest(rows, y, mask, R: tl.constexpr, K: tl.constexpr, BLOCK_REST: tl.constexpr):
    channels = R + tl.arange(0, BLOCK_REST)[None, :]
    tl.store(rows + channels, y.to(rows.dtype.element_ty), mask=mask & (channels < K))


@triton.jit
def _load_scales(
    w_ptr, offset, K: tl.constexpr, R: tl.constexpr, HAS_W: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """offset + w of the first and second channels of pairs and of the rest, (1, block) each; 1 without w."""
    here = tl.full((1, 1), 1, tl.int1)
    if HAS_W:
        row = w_ptr + tl.zeros((1, 1), tl.int32)
        a1, a2 = load_pairs(row, 1, here, R, BLOCK_N, INTERLEAVED)
        a3 = _load_rest(row, 1, here, R, K, BLOCK_REST)
        offset = tl.cast(offset, tl.float32)
        a1, a2, a3 = a1 + offset, a2 + offset, a3 + offset
    else:
        a1 = tl.full((1, BLOCK_N), 1.0, tl.float32)
        a2 = tl.full((1, BLOCK_N), 1.0, tl.float32)
        a3 = tl.full((1, BLOCK_REST), 1.0, tl.float32)
    return a1, a2, a3


@triton.jit
def _round(x, like_ptr, WANTED: tl.constexpr):
    if WANTED:
        x = x.to(like_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _forward_heads(
    rows, stride, y_rows, rstd_at, mask, a1, a2, a3, c1, c2, s1, s2, eps,
    K: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, CAST: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    x1, x2 = load_pairs(rows, stride, mask, R, BLOCK_N, INTERLEAVED)
    x3 = _load_rest(rows, stride, mask, R, K, BLOCK_REST)
    total = tl.sum(x1 * x1, axis=1, keep_dims=True) + tl.sum(x2 * x2, axis=1, keep_dims=True)
    mean = (total + tl.sum(x3 * x3, axis=1, keep_dims=True)) / K
    # Rounded to nearest, as torch does; tl.rsqrt is an approximation.
    rstd = tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + tl.cast(eps, tl.float32)))
    tl.store(rstd_at, rstd, mask)
    u1 = _round(_scaled(a1, _round(_xhat(x1, rstd), rows, CAST)), rows, ROUND)
    u2 = _round(_scaled(a2, _round(_xhat(x2, rstd), rows, CAST)), rows, ROUND)
    store_pairs(y_rows, _first(u1, u2, c1, s1), _second(u1, u2, c2, s2), mask, R, BLOCK_N, INTERLEAVED)
    u3 = _round(_scaled(a3, _round(_xhat(x3, rstd), rows, CAST)), rows, ROUND)
    _store_rest(y_rows, u3, mask, R, K, BLOCK_REST)


# One program: one position of one sequence, BLOCK_H heads of q and BLOCK_HK of k, usually all.
@triton.jit
def norm_rope_fwd_kernel(
    q_ptr, k_ptr, wq_ptr, wk_ptr,  # (B, H, S, K), (B, HK, S, K), any strides; (K,), (K,)
    cos_ptr, sin_ptr,  # (B or 1, S, R or R/2), any strides; batch stride 0 for the 1
    yq_ptr, yk_ptr, rq_ptr, rk_ptr,  # (B, S, H, K), (B, S, HK, K), (B, S, H), (B, S, HK), contiguous
    S, H, HK,
    q_b, q_h, q_s, q_c, k_b, k_h, k_s, k_c, cos_b, cos_s, cos_c, sin_b, sin_s, sin_c, eps, offset,
    K: tl.constexpr, R: tl.constexpr, HAS_W: tl.constexpr, CAST: tl.constexpr, ROUND: tl.constexpr,
    WIDE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // S, token % S
    c1, c2 = load_table(cos_ptr + (batch * cos_b + position * cos_s), cos_c, R, BLOCK_N, WIDE, INTERLEAVED)
    s1, s2 = load_table(sin_ptr + (batch * sin_b + position * sin_s), sin_c, R, BLOCK_N, WIDE, INTERLEAVED)

    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    a1, a2, a3 = _load_scales(wq_ptr, offset, K, R, HAS_W, INTERLEAVED, BLOCK_N, BLOCK_REST)
    _forward_heads(
        q_ptr + (batch * q_b + position * q_s) + heads * q_h, q_c, yq_ptr + (token * H + heads) * K,
        rq_ptr + token * H + heads, heads < H, a1, a2, a3, c1, c2, s1, s2, eps,
        K, R, INTERLEAVED, CAST, ROUND, BLOCK_N, BLOCK_REST,
    )  # fmt: skip
    heads = tl.program_id(1).to(tl.int64) * BLOCK_HK + tl.arange(0, BLOCK_HK)[:, None]
    a1, a2, a3 = _load_scales(wk_ptr, offset, K, R, HAS_W, INTERLEAVED, BLOCK_N, BLOCK_REST)
    _forward_heads(
        k_ptr + (batch * k_b + position * k_s) + heads * k_h, k_c, yk_ptr + (token * HK + heads) * K,
        rk_ptr + token * HK + heads, heads < HK, a1, a2, a3, c1, c2, s1, s2, eps,
        K, R, INTERLEAVED, CAST, ROUND, BLOCK_N, BLOCK_REST,
    )  # fmt: skip


@triton.jit
def _backward_heads(
    dy_rows, dy_stride, rows, stride, dx_rows, rstd_at, mask, a1, a2, a3, c1, c2, s1, s2,
    K: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, CAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Writes dx; returns these heads' shares of dw, a number per head and channel."""
    dy1, dy2 = load_pairs(dy_rows, dy_stride, mask, R, BLOCK_N, INTERLEAVED)
    x1, x2 = load_pairs(rows, stride, mask, R, BLOCK_N, INTERLEAVED)
    rstd = tl.load(rstd_at, mask, other=0.0)
    du1, du2 = _du_first(dy1, dy2, c1, s2), _du_second(dy1, dy2, c2, s1)
    h1, h2 = _xhat(x1, rstd), _xhat(x2, rstd)
    du3 = _load_rest(dy_rows, dy_stride, mask, R, K, BLOCK_REST)
    h3 = _xhat(_load_rest(rows, stride, mask, R, K, BLOCK_REST), rstd)
    c = tl.sum(_c_term(du1, a1, h1), axis=1, keep_dims=True) + tl.sum(_c_term(du2, a2, h2), axis=1, keep_dims=True)
    c = (c + tl.sum(_c_term(du3, a3, h3), axis=1, keep_dims=True)) / K
    store_pairs(dx_rows, _dx(du1, a1, h1, rstd, c), _dx(du2, a2, h2, rstd, c), mask, R, BLOCK_N, INTERLEAVED)
    _store_rest(dx_rows, _dx(du3, a3, h3, rstd, c), mask, R, K, BLOCK_REST)
    # What w multiplied in the forward was rounded.
    w1, w2 = _dw_term(du1, _round(h1, rows, CAST)), _dw_term(du2, _round(h2, rows, CAST))
    return w1, w2, _dw_term(du3, _round(h3, rows, CAST))


@triton.jit(do_not_specialize=["T"])
def norm_rope_bwd_kernel(
    dyq_ptr, dyk_ptr, q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, rq_ptr, rk_ptr,
    dq_ptr, dk_ptr, wq_partial_ptr, wk_partial_ptr,  # (B, S, H, K), (B, S, HK, K), (programs, K) float32 each
    T, S, H, HK,
    dyq_b, dyq_h, dyq_s, dyq_c, dyk_b, dyk_h, dyk_s, dyk_c, q_b, q_h, q_s, q_c, k_b, k_h, k_s, k_c,
    cos_b, cos_s, cos_c, sin_b, sin_s, sin_c, offset,
    K: tl.constexpr, R: tl.constexpr, HAS_W: tl.constexpr, CAST: tl.constexpr, NEED_DW: tl.constexpr,
    WIDE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Walks the T = B S tokens with a stride of the grid, its shares of dw kept in registers."""
    group = tl.program_id(1).to(tl.int64)
    q_heads = group * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    k_heads = group * BLOCK_HK + tl.arange(0, BLOCK_HK)[:, None]
    a1, a2, a3 = _load_scales(wq_ptr, offset, K, R, HAS_W, INTERLEAVED, BLOCK_N, BLOCK_REST)
    b1, b2, b3 = _load_scales(wk_ptr, offset, K, R, HAS_W, INTERLEAVED, BLOCK_N, BLOCK_REST)
    v1, v2, v3 = tl.zeros_like(a1), tl.zeros_like(a2), tl.zeros_like(a3)
    w1, w2, w3 = tl.zeros_like(b1), tl.zeros_like(b2), tl.zeros_like(b3)
    for step in range(tl.program_id(0), T, tl.num_programs(0)):
        token = tl.cast(step, tl.int64)
        batch, position = token // S, token % S
        c1, c2 = load_table(cos_ptr + (batch * cos_b + position * cos_s), cos_c, R, BLOCK_N, WIDE, INTERLEAVED)
        s1, s2 = load_table(sin_ptr + (batch * sin_b + position * sin_s), sin_c, R, BLOCK_N, WIDE, INTERLEAVED)
        d1, d2, d3 = _backward_heads(
            dyq_ptr + (batch * dyq_b + position * dyq_s) + q_heads * dyq_h, dyq_c,
            q_ptr + (batch * q_b + position * q_s) + q_heads * q_h, q_c, dq_ptr + (token * H + q_heads) * K,
            rq_ptr + token * H + q_heads, q_heads < H, a1, a2, a3, c1, c2, s1, s2,
            K, R, INTERLEAVED, CAST, BLOCK_N, BLOCK_REST,
        )  # fmt: skip
        e1, e2, e3 = _backward_heads(
            dyk_ptr + (batch * dyk_b + position * dyk_s) + k_heads * dyk_h, dyk_c,
            k_ptr + (batch * k_b + position * k_s) + k_heads * k_h, k_c, dk_ptr + (token * HK + k_heads) * K,
            rk_ptr + token * HK + k_heads, k_heads < HK, b1, b2, b3, c1, c2, s1, s2,
            K, R, INTERLEAVED, CAST, BLOCK_N, BLOCK_REST,
        )  # fmt: skip
        if NEED_DW:
            v1 += tl.sum(d1, axis=0, keep_dims=True)
            v2 += tl.sum(d2, axis=0, keep_dims=True)
            v3 += tl.sum(d3, axis=0, keep_dims=True)
            w1 += tl.sum(e1, axis=0, keep_dims=True)
            w2 += tl.sum(e2, axis=0, keep_dims=True)
            w3 += tl.sum(e3, axis=0, keep_dims=True)
    if NEED_DW:
        here = tl.full((1, 1), 1, tl.int1)
        row = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + group) * K + tl.zeros((1, 1), tl.int32)
        store_pairs(wq_partial_ptr + row, v1, v2, here, R, BLOCK_N, INTERLEAVED)
        _store_rest(wq_partial_ptr + row, v3, here, R, K, BLOCK_REST)
        store_pairs(wk_partial_ptr + row, w1, w2, here, R, BLOCK_N, INTERLEAVED)
        _store_rest(wk_partial_ptr + row, w3, here, R, K, BLOCK_REST)


def _check(q, k, wq, wk, cos, sin, offset, cast, rotary_dim, *, sizes):
    """Raises: ValueError when the inputs do not fit together. Fakes must not compare sizes: `sizes=False`."""

    def wrong(rule: str, came: Any) -> ValueError:
        way_out = 'Norm and rotate one after the other, or disable with options={"fusions": "-norm_rope"}'
        return ValueError(f"norm_rope_qk: {rule}, got {came}. {way_out}")

    if not q.ndim == k.ndim == 4 or not cos.ndim == sin.ndim == 3:
        raise wrong("q and k have 4 dimensions, cos and sin 3", f"{q.ndim}, {k.ndim}, {cos.ndim}, {sin.ndim}")
    if q.dtype != k.dtype or not q.dtype.is_floating_point:
        raise wrong("q and k have one floating dtype", f"{q.dtype} and {k.dtype}")
    if (wq is None) != (wk is None) or (wq is not None and not wq.ndim == wk.ndim == 1):
        raise wrong("wq and wk are (K,), or both None", [None if w is None else tuple(w.shape) for w in (wq, wk)])
    if wq is not None and wq.dtype != wk.dtype:
        raise wrong("wq and wk have one dtype", f"{wq.dtype} and {wk.dtype}")
    if rotary_dim <= 0 or rotary_dim % 2:
        raise wrong("rotary_dim is even and positive", rotary_dim)
    if cast and offset != 0:
        raise wrong("cast_before_weight needs offset 0", offset)
    if not sizes:
        return
    b, _, s, channels = q.shape
    if (k.shape[0], *k.shape[2:]) != (b, s, channels):
        raise wrong("q and k differ in heads only", f"{tuple(q.shape)} and {tuple(k.shape)}")
    if rotary_dim > channels or (wq is not None and not wq.shape[0] == wk.shape[0] == channels):
        raise wrong("there are K weights, and at most K channels turn", f"{rotary_dim} of {channels}")
    fits = cos.shape[0] in (1, b) and cos.shape[1] == s and cos.shape[2] in (rotary_dim, rotary_dim // 2)
    if cos.shape != sin.shape or not fits:
        raise wrong("cos and sin are (B or 1, S, R or R/2)", f"{tuple(cos.shape)} and {tuple(sin.shape)}")


def _rounds(x: Tensor, w: Tensor | None, cast: bool) -> bool:
    """Is u rounded to x's dtype? Not where a wider weight came last."""
    return not cast or w is None or torch.promote_types(x.dtype, w.dtype) == x.dtype


def _empty_rstd(x: Tensor) -> Tensor:
    b, h, s, _ = x.shape
    return x.new_empty((b, s, h), dtype=statistics_dtype(x))


def _blocks(q: Tensor, k: Tensor, rotary_dim: int) -> tuple[int, dict[str, int]]:
    """Programs for one position, and the launch arguments: at most 4096 channels of q each, as in rope."""
    channels, h, hk = q.shape[3], q.shape[1], k.shape[1]
    groups = cdiv(max(h, hk), max(1, 4096 // next_power_of_2(channels)))
    sizes = {"BLOCK_H": next_power_of_2(cdiv(h, groups)), "BLOCK_HK": next_power_of_2(cdiv(hk, groups))}
    sizes |= {"BLOCK_N": next_power_of_2(rotary_dim // 2), "BLOCK_REST": next_power_of_2(channels - rotary_dim)}
    return groups, sizes | {"K": channels, "R": rotary_dim, "num_warps": 4}


def _forward(q, k, wq, wk, cos, sin, eps, offset, cast, rotary_dim, interleaved, out_dtype):
    _check(q, k, wq, wk, cos, sin, offset, cast, rotary_dim, sizes=True)
    b, h, s, channels = q.shape
    if torch.float64 in (q.dtype, out_dtype) or b * s * h * k.shape[1] == 0 or channels > 4096:
        return _forward_reference(q, k, wq, wk, cos, sin, eps, offset, cast, rotary_dim, interleaved, out_dtype)
    out = _forward_fake(q, k, wq, wk, cos, sin, eps, offset, cast, rotary_dim, interleaved, out_dtype)
    groups, blocks = _blocks(q, k, rotary_dim)
    norm_rope_fwd_kernel[(b * s, groups)](
        q, k, q if wq is None else wq.contiguous(), k if wk is None else wk.contiguous(), cos, sin, *out,
        s, h, k.shape[1], *q.stride(), *k.stride(), *table_strides(cos), *table_strides(sin), eps, offset,
        HAS_W=wq is not None, CAST=cast, ROUND=_rounds(q, wq, cast), WIDE=cos.shape[2] == rotary_dim,
        INTERLEAVED=interleaved, **blocks,
    )  # fmt: skip
    return out


def _backward(dyq, dyk, q, k, wq, wk, rq, rk, cos, sin, offset, cast, rotary_dim, interleaved, need_dw):
    b, h, s, channels = q.shape
    need_dw = need_dw and wq is not None
    if torch.float64 in (q.dtype, dyq.dtype) or b * s * h * k.shape[1] == 0 or channels > 4096:
        return _backward_reference(
            dyq, dyk, q, k, wq, wk, rq, rk, cos, sin, offset, cast, rotary_dim, interleaved, need_dw
        )  # fmt: skip
    out = _backward_fake(dyq, dyk, q, k, wq, wk, rq, rk, cos, sin, offset, cast, rotary_dim, interleaved, need_dw)
    groups, blocks = _blocks(q, k, rotary_dim)
    # Without dw no program need take more than one token.
    programs = summing_programs(b * s, max(257, channels), q.device) if need_dw else b * s
    partial = q.new_empty((2, programs * groups if need_dw else 0, channels), dtype=torch.float32)
    norm_rope_bwd_kernel[(programs, groups)](
        dyq, dyk, q, k, q if wq is None else wq.contiguous(), k if wk is None else wk.contiguous(), cos, sin,
        rq.contiguous(), rk.contiguous(), out[0], out[1], partial[0], partial[1],
        b * s, s, h, k.shape[1], *dyq.stride(), *dyk.stride(), *q.stride(), *k.stride(),
        *table_strides(cos), *table_strides(sin), offset,
        HAS_W=wq is not None, CAST=cast, NEED_DW=need_dw, WIDE=cos.shape[2] == rotary_dim, INTERLEAVED=interleaved,
        **blocks,
    )  # fmt: skip
    for part, dw in zip(partial, out[2:], strict=True):
        if need_dw:
            add_partials(part, dw)
    return out


# --- in torch --------------------------------------------------------------------------------------------------------


def _forward_one(x, w, tables, eps, offset, cast, rotary_dim, interleaved, out_dtype):
    wide = statistics_dtype(x)
    rstd = torch.rsqrt((x.to(wide) ** 2).mean(-1) + eps)
    u = formulas.xhat(x.to(wide), rstd.unsqueeze(-1))
    u = u.to(x.dtype).to(wide) if cast else u
    u = u if w is None else formulas.scaled(w.to(wide) + offset, u)
    u = u.to(x.dtype).to(wide) if _rounds(x, w, cast) else u
    c1, c2, s1, s2 = tables
    u1, u2 = parted(u[..., :rotary_dim], interleaved)
    y = empty_heads(x, out_dtype)
    y1, y2 = parted(y[..., :rotary_dim], interleaved)
    y1.copy_(formulas.first(u1, u2, c1, s1))
    y2.copy_(formulas.second(u1, u2, c2, s2))
    y[..., rotary_dim:].copy_(u[..., rotary_dim:])
    return y, rstd.transpose(1, 2).contiguous()


def _forward_reference(q, k, wq, wk, cos, sin, eps, offset, cast, rotary_dim, interleaved, out_dtype):
    _check(q, k, wq, wk, cos, sin, offset, cast, rotary_dim, sizes=True)
    tables = parted_tables(cos, sin, rotary_dim, interleaved, statistics_dtype(q))
    how = (tables, eps, offset, cast, rotary_dim, interleaved, out_dtype)
    (yq, rq), (yk, rk) = _forward_one(q, wq, *how), _forward_one(k, wk, *how)
    return yq, yk, rq, rk


def _backward_one(dy, x, w, rstd, tables, offset, cast, rotary_dim, interleaved, need_dw):
    wide = statistics_dtype(x)
    dy, rstd = dy.to(wide), rstd.transpose(1, 2).unsqueeze(-1)
    c1, c2, s1, s2 = tables
    du = dy.clone()
    dy1, dy2 = parted(dy[..., :rotary_dim], interleaved)
    du1, du2 = parted(du[..., :rotary_dim], interleaved)
    du1.copy_(formulas.du_first(dy1, dy2, c1, s2))
    du2.copy_(formulas.du_second(dy1, dy2, c2, s1))
    xhat = formulas.xhat(x.to(wide), rstd)
    scale = 1.0 if w is None else w.to(wide) + offset
    c = formulas.c_term(du, scale, xhat).mean(-1, keepdim=True)
    dx = empty_heads(x, x.dtype).copy_(formulas.dx(du, scale, xhat, rstd, c))
    dw = _empty_dw(x, w, need_dw)
    if dw.numel():
        weighted = xhat.to(x.dtype).to(wide) if cast else xhat
        dw = formulas.dw_term(du, weighted).reshape(-1, x.shape[-1]).sum(0).to(dw.dtype)
    return dx, dw


def _backward_reference(dyq, dyk, q, k, wq, wk, rq, rk, cos, sin, offset, cast, rotary_dim, interleaved, need_dw):
    tables = parted_tables(cos, sin, rotary_dim, interleaved, statistics_dtype(q))
    how = (tables, offset, cast, rotary_dim, interleaved, need_dw)
    (dq, dwq), (dk, dwk) = _backward_one(dyq, q, wq, rq, *how), _backward_one(dyk, k, wk, rk, *how)
    return dq, dk, dwq, dwk


def _forward_fake(q, k, wq, wk, cos, sin, eps, offset, cast, rotary_dim, interleaved, out_dtype):
    _check(q, k, wq, wk, cos, sin, offset, cast, rotary_dim, sizes=False)
    return empty_heads(q, out_dtype), empty_heads(k, out_dtype), _empty_rstd(q), _empty_rstd(k)


def _empty_dw(x: Tensor, w: Tensor | None, need_dw: bool) -> Tensor:
    return (x if w is None else w).new_empty(x.shape[-1] if need_dw and w is not None else 0)


def _backward_fake(dyq, dyk, q, k, wq, wk, *rest):
    return empty_heads(q, q.dtype), empty_heads(k, k.dtype), _empty_dw(q, wq, rest[-1]), _empty_dw(k, wk, rest[-1])


_HOW = "bool cast_before_weight, int rotary_dim, bool interleaved"

norm_rope_qk = define_op(
    f"norm_rope_qk(Tensor q, Tensor k, Tensor? wq, Tensor? wk, Tensor cos, Tensor sin, float eps, float offset, {_HOW},"
    " ScalarType out_dtype) -> (Tensor yq, Tensor yk, Tensor rstd_q, Tensor rstd_k)",
    reference=_forward_reference,
    triton=_forward,
    fake=_forward_fake,
    flops=lambda q, k, *_: 0,
    bytes_moved=lambda q, k, wq, wk, cos, sin, *how: (
        nbytes(q, k, wq, wk, cos, sin) + (q.numel() + k.numel()) * how[-1].itemsize
    ),
)
norm_rope_qk_bwd = define_op(
    "norm_rope_qk_bwd(Tensor dyq, Tensor dyk, Tensor q, Tensor k, Tensor? wq, Tensor? wk, Tensor rstd_q, Tensor rstd_k,"
    f" Tensor cos, Tensor sin, float offset, {_HOW}, bool need_dw) -> (Tensor dq, Tensor dk, Tensor dwq, Tensor dwk)",
    reference=_backward_reference,
    triton=_backward,
    fake=_backward_fake,
    flops=lambda dyq, *_: 0,
    bytes_moved=lambda dyq, dyk, q, k, *rest: nbytes(dyq, dyk, q, k, q, k),
)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, wq, wk, cos, sin, _, *ctx.how, _ = inputs
    ctx.save_for_backward(q, k, wq, wk, *output[2:], cos, sin)
    ctx.mark_non_differentiable(*output[2:])


def _grad(ctx: Any, dyq: Tensor, dyk: Tensor, *_: Any) -> tuple:
    need_dw = any(ctx.needs_input_grad[2:4])
    dq, dk, dwq, dwk = norm_rope_qk_bwd(dyq, dyk, *ctx.saved_tensors, *ctx.how, need_dw)
    dwq, dwk = (dw if need else None for dw, need in zip((dwq, dwk), ctx.needs_input_grad[2:4], strict=True))
    return dq, dk, dwq, dwk, *[None] * 8


define_backward(norm_rope_qk, setup_context=_save, backward=_grad)
refuse_double_backward(norm_rope_qk_bwd)
