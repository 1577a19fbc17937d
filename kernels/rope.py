"""Rotary position embedding of q and k in one launch, and its gradient by the same kernel.

Math: y1 = x1 c1 - x2 s1, y2 = x2 c2 + x1 s2 for every pair of channels; see derivations/rope.py. The backward
is the transposed map, Theorems dx1 and dx2, and its transpose is the map: one operator, every derivative.
Shapes: q (B, H, S, K), k (B, Hk, S, K); cos, sin (B or 1, S, R) or, one entry per pair, (B or 1, S, R/2);
B batch, S sequence, H heads, K head dim, R <= K rotary dim. Channels from R on are copied.
Numerics: fp32 from load to store, rounded once. Eager rounds both products and their sum.
Cost: q, k, cos and sin are read once, q and k written once. Any strides are read in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivations import rope as formulas
from ._launch import cdiv, inline, next_power_of_2, tl, triton
from ._op import define_backward, define_op, nbytes
from ._pairs import empty_heads, load_pairs, load_table, parted, parted_tables, store_pairs, table_strides

_first = inline(formulas.first)
_second = inline(formulas.second)
_transposed_first = inline(formulas.transposed_first)
_transposed_second = inline(formulas.transposed_second)


@triton.jit
def _turn(x1, x2, c1, c2, s1, s2, INVERSE: tl.constexpr):
    if INVERSE:
        y1 = _transposed_first(x1, x2, c1, s2)
        y2 = _transposed_second(x1, x2, c2, s1)
    else:
        y1 = _first(x1, x2, c1, s1)
        y2 = _second(x1, x2, c2, s2)
    return y1, y2


@triton.jit
def _copy_rest(x_rows, stride, y_rows, mask, R: tl.constexpr, K: tl.constexpr, BLOCK_REST: tl.constexpr):
    """The channels that do not turn."""
    if R < K:
        channels = R + tl.arange(0, BLOCK_REST)[None, :]
        mask = mask & (channels < K)
        x = tl.load(x_rows + channels.to(tl.int64) * stride, mask=mask)
        tl.store(y_rows + channels, x.to(y_rows.dtype.element_ty), mask=mask)


# One program: one position of one sequence, BLOCK_H heads of q and BLOCK_HK of k, usually all; they share one
# read of cos and sin.
@triton.jit
def rope_fwd_kernel(
    q_ptr,  # (B, H, S, K), any strides
    k_ptr,  # (B, Hk, S, K), any strides; unused without HAS_K
    cos_ptr,  # (B or 1, S, R or R/2), any strides; batch stride 0 for the 1
    sin_ptr,
    yq_ptr,  # (B, S, H, K), contiguous
    yk_ptr,  # (B, S, Hk, K), contiguous
    S,
    H,
    HK,
    q_batch_stride,
    q_head_stride,
    q_position_stride,
    q_channel_stride,
    k_batch_stride,
    k_head_stride,
    k_position_stride,
    k_channel_stride,
    cos_batch_stride,
    cos_position_stride,
    cos_channel_stride,
    sin_batch_stride,
    sin_position_stride,
    sin_channel_stride,
    K: tl.constexpr,
    R: tl.constexpr,
    WIDE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    HAS_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // S, token % S

    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    mask = heads < H
    q_rows = q_ptr + (batch * q_batch_stride + position * q_position_stride) + heads * q_head_stride
    yq_rows = yq_ptr + token * H * K + heads * K
    q1, q2 = load_pairs(q_rows, q_channel_stride, mask, R, BLOCK_N, INTERLEAVED)
    # k is loaded before anything waits for q.
    if HAS_K:
        k_heads = tl.program_id(1).to(tl.int64) * BLOCK_HK + tl.arange(0, BLOCK_HK)[:, None]
        k_mask = k_heads < HK
        k_rows = k_ptr + (batch * k_batch_stride + position * k_position_stride) + k_heads * k_head_stride
        yk_rows = yk_ptr + token * HK * K + k_heads * K
        k1, k2 = load_pairs(k_rows, k_channel_stride, k_mask, R, BLOCK_N, INTERLEAVED)

    cos_row = cos_ptr + (batch * cos_batch_stride + position * cos_position_stride)
    sin_row = sin_ptr + (batch * sin_batch_stride + position * sin_position_stride)
    c1, c2 = load_table(cos_row, cos_channel_stride, R, BLOCK_N, WIDE, INTERLEAVED)
    s1, s2 = load_table(sin_row, sin_channel_stride, R, BLOCK_N, WIDE, INTERLEAVED)

    y1, y2 = _turn(q1, q2, c1, c2, s1, s2, INVERSE)
    store_pairs(yq_rows, y1, y2, mask, R, BLOCK_N, INTERLEAVED)
    _copy_rest(q_rows, q_channel_stride, yq_rows, mask, R, K, BLOCK_REST)
    if HAS_K:
        y1, y2 = _turn(k1, k2, c1, c2, s1, s2, INVERSE)
        store_pairs(yk_rows, y1, y2, k_mask, R, BLOCK_N, INTERLEAVED)
        _copy_rest(k_rows, k_channel_stride, yk_rows, k_mask, R, K, BLOCK_REST)


def _wrong(rule: str, came: Any, x: Tensor, way_out: str) -> ValueError:
    return ValueError(
        f'rope: {rule}, got {came} (q is {tuple(x.shape)}). {way_out} or disable with options={{"fusions": "-rope"}}'
    )


def _check(x: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, *how: Any) -> None:
    """The rules that compare no sizes, for `fake` may not. `k` is `x` where there is one tensor only."""
    if rotary_dim % 2:
        raise _wrong("rotary dim must be even", rotary_dim, x, "Pad the head")
    if rotary_dim <= 0:
        raise _wrong("rotary dim must be positive", rotary_dim, x, "Leave the call out")
    if not x.ndim == k.ndim == 4:
        raise _wrong("q and k must have 4 dimensions", f"{x.ndim} and {k.ndim}", x, "Unsqueeze them")
    if not cos.ndim == sin.ndim == 3:
        raise _wrong("cos and sin must have 3 dimensions", f"{cos.ndim} and {sin.ndim}", x, "Unsqueeze them")
    if x.dtype != k.dtype:
        raise _wrong("q and k must have one dtype", f"{x.dtype} and {k.dtype}", x, "Cast one of them")
    for dtype in (x.dtype, cos.dtype, sin.dtype, how[-1]):
        if not dtype.is_floating_point:
            raise _wrong("inputs and output must be floating point", dtype, x, "Cast it")
    for t in (k, cos, sin):
        if t.device != x.device:
            raise _wrong("all inputs must be on one device", f"{x.device} and {t.device}", x, "Move them")


def _check_all(x: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, *how: Any) -> None:
    _check(x, k, cos, sin, rotary_dim, *how)
    b, _, s, channels = x.shape
    if rotary_dim > channels:
        raise _wrong("rotary dim must be at most the head dim", f"{rotary_dim} > {channels}", x, "Slice the tables")
    if (k.shape[0], *k.shape[2:]) != (b, s, channels):
        raise _wrong("q and k may differ in heads only", f"k {tuple(k.shape)}", x, "Rotate them one by one")
    if cos.shape != sin.shape:
        raise _wrong("cos and sin must have one shape", f"{tuple(cos.shape)} and {tuple(sin.shape)}", x, "Expand one")
    widths = (rotary_dim, rotary_dim // 2)
    if cos.shape[0] not in (1, b) or cos.shape[1] != s or cos.shape[2] not in widths:
        rule = f"cos and sin must be (B or 1, S, {widths[0]} or {widths[1]})"
        raise _wrong(rule, tuple(cos.shape), x, "Slice or expand them")


def _launch(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """q and k rotated; without k, both results are the rotated q."""
    b, h, s, channels = q.shape
    hk = 0 if k is None else k.shape[1]
    yq = empty_heads(q, out_dtype)
    yk = yq if k is None else empty_heads(k, out_dtype)
    if b * s * max(h, hk) == 0:
        return yq, yk
    # At most 4096 channels of q a program, 32 heads of 128: registers for several programs per processor.
    groups = cdiv(max(h, hk), max(1, 4096 // next_power_of_2(channels)))
    rope_fwd_kernel[(b * s, groups)](
        q,
        q if k is None else k,
        cos,
        sin,
        yq,
        yk,
        s,
        h,
        hk,
        *q.stride(),
        *(q if k is None else k).stride(),
        *table_strides(cos),
        *table_strides(sin),
        K=channels,
        R=rotary_dim,
        WIDE=cos.shape[2] == rotary_dim,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        HAS_K=k is not None,
        BLOCK_H=next_power_of_2(cdiv(h, groups)),
        BLOCK_HK=next_power_of_2(cdiv(hk, groups)),
        BLOCK_N=next_power_of_2(rotary_dim // 2),
        BLOCK_REST=next_power_of_2(channels - rotary_dim),
        num_warps=4,
    )
    return yq, yk


# Below, `how` is the operators' common tail: cos, sin, rotary_dim, interleaved, inverse, out_dtype.


def rope_triton(x: Tensor, *how: Any) -> Tensor:
    _check_all(x, x, *how)
    return _rotate(x, *how) if torch.float64 in (x.dtype, how[-1]) else _launch(x, None, *how)[0]


def rope_qk_triton(q: Tensor, k: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    _check_all(q, k, *how)
    if torch.float64 in (q.dtype, how[-1]):
        return _rotate(q, *how), _rotate(k, *how)
    return _launch(q, k, *how)


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """The kernel in torch."""
    wide = torch.float64 if torch.float64 in (x.dtype, out_dtype) else torch.float32
    c1, c2, s1, s2 = parted_tables(cos, sin, rotary_dim, interleaved, wide)
    x1, x2 = parted(x[..., :rotary_dim].to(wide), interleaved)

    y = empty_heads(x, out_dtype)
    y1, y2 = parted(y[..., :rotary_dim], interleaved)
    y1.copy_(formulas.transposed_first(x1, x2, c1, s2) if inverse else formulas.first(x1, x2, c1, s1))
    y2.copy_(formulas.transposed_second(x1, x2, c2, s1) if inverse else formulas.second(x1, x2, c2, s2))
    y[..., rotary_dim:].copy_(x[..., rotary_dim:])
    return y


def rope_reference(x: Tensor, *how: Any) -> Tensor:
    _check_all(x, x, *how)
    return _rotate(x, *how)


def rope_qk_reference(q: Tensor, k: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    _check_all(q, k, *how)
    return _rotate(q, *how), _rotate(k, *how)


def rope_fake(x: Tensor, *how: Any) -> Tensor:
    _check(x, x, *how)
    return empty_heads(x, how[-1])


def rope_qk_fake(q: Tensor, k: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, *how)
    return empty_heads(q, how[-1]), empty_heads(k, how[-1])


def _bytes_moved(*args: Any) -> int:
    *tensors, _, _, _, out_dtype = args
    return nbytes(*tensors) + sum(x.numel() for x in tensors[:-2]) * out_dtype.itemsize


_HOW = "Tensor cos, Tensor sin, int rotary_dim, bool interleaved, bool inverse, ScalarType out_dtype"

rope = define_op(
    f"rope(Tensor x, {_HOW}) -> Tensor",
    reference=rope_reference,
    triton=rope_triton,
    fake=rope_fake,
    flops=lambda *args: 0,
    bytes_moved=_bytes_moved,
)
rope_qk = define_op(
    f"rope_qk(Tensor q, Tensor k, {_HOW}) -> (Tensor, Tensor)",
    reference=rope_qk_reference,
    triton=rope_qk_triton,
    fake=rope_qk_fake,
    flops=lambda *args: 0,
    bytes_moved=_bytes_moved,
)


def _save_tables(ctx: Any, inputs: tuple, output: Any) -> None:
    *rotated, cos, sin, rotary_dim, interleaved, inverse, _ = inputs
    ctx.save_for_backward(cos, sin)
    # The transposed map, back to the dtype that came in.
    ctx.rest = rotary_dim, interleaved, not inverse, rotated[0].dtype


def _backward(ctx: Any, dy: Tensor) -> tuple:
    return rope(dy, *ctx.saved_tensors, *ctx.rest), *[None] * 6


def _qk_backward(ctx: Any, dyq: Tensor, dyk: Tensor) -> tuple:
    how = (*ctx.saved_tensors, *ctx.rest)
    need_q, need_k = ctx.needs_input_grad[:2]
    if need_q and need_k:
        dq, dk = rope_qk(dyq, dyk, *how)
    else:
        dq, dk = (rope(dyq, *how) if need_q else None), (rope(dyk, *how) if need_k else None)
    return dq, dk, *[None] * 6


define_backward(rope, setup_context=_save_tables, backward=_backward)
define_backward(rope_qk, setup_context=_save_tables, backward=_qk_backward)
