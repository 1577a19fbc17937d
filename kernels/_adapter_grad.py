"""Both products of an adapter's backward that read dy, in one pass over it: v = s·dy·B and dB = s·dyᵀ·u.

One sums over features and the other over tokens, so each program keeps its share of dB in registers while it walks
down its tokens, and writes its share of v at every step. The shares are added afterwards, in order.

Shapes: dy (T, N), B (N, R), u (T, R), v (T, R), dB (N, R). R at most MAX_RANK in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import cdiv, next_power_of_2, pipelined, tl, triton
from ._low_rank import down, down_reference, outer, outer_reference
from ._rows import add_parts

MAX_RANK = 64
_LOW = (torch.bfloat16, torch.float16)


def adapter_grad_reference(dy: Tensor, b: Tensor, u: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """v and dB, each by its own product, in the dtype of B."""
    return down_reference(dy, b.t(), scaling, None), outer_reference(u, dy, None).t() * scaling


# One program: BLOCK_N features over the tokens of one part.
@triton.jit(do_not_specialize=["T", "tiles_per_part"])
def adapter_grad_kernel(
    dy_ptr,  # (T, N)
    b_ptr,  # (N, R), contiguous
    u_ptr,  # (T, R)
    v_ptr,  # (N / BLOCK_N, T, R) fp32
    db_ptr,  # (parts, N, R) fp32
    T,
    N,
    R,
    dy_stride,
    u_stride,
    tiles_per_part,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.program_id(0)
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row, ranks = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    b_mask = (cols[:, None] < N) & (ranks[None, :] < R)
    b = tl.load(b_ptr + cols[:, None] * R + ranks[None, :], mask=b_mask, other=0.0)
    db = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    v_ptr += block.to(tl.int64) * T * R
    tile = tl.program_id(1) * tiles_per_part
    for at in range(tile, tl.minimum(tile + tiles_per_part, tl.cdiv(T, BLOCK_T))):
        first = tl.cast(at * BLOCK_T, tl.int64)
        exists = (row < T - at * BLOCK_T)[:, None]
        mask = exists & (cols[None, :] < N)
        dy = tl.load(dy_ptr + first * dy_stride + row[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0)
        r_mask = exists & (ranks[None, :] < R)
        u = tl.load(u_ptr + first * u_stride + row[:, None] * u_stride + ranks[None, :], mask=r_mask, other=0.0)
        db = tl.dot(tl.trans(dy), u, db, input_precision="ieee")
        v = tl.dot(dy, b, input_precision="ieee")
        tl.store(v_ptr + first * R + row[:, None] * R + ranks[None, :], v, mask=r_mask)
    db_ptr += tl.program_id(1).to(tl.int64) * N * R
    tl.store(db_ptr + cols[:, None] * R + ranks[None, :], db, mask=b_mask)


def adapter_grad(dy: Tensor, b: Tensor, u: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """`adapter_grad_reference` in Triton; dB is float32."""
    (T, N), R = dy.shape, b.shape[1]
    if dy.dtype not in _LOW or not dy.dtype == b.dtype == u.dtype or R > MAX_RANK or not dy.numel() or not R:
        return down(dy, b.t(), scaling, None), outer(u, dy, None).t() * scaling
    dy, u = (t if t.stride(1) == 1 else t.contiguous() for t in (dy, u))
    block_r = max(16, next_power_of_2(R))
    # dB's share takes BLOCK_N x BLOCK_R registers; the wider it is, the less of v's shares there is to add up.
    block_n = min(8192 // block_r, 128 if N < 2048 else 256 if N < 8192 else 512)
    block_t, part = (128, 512) if N < 2048 else (64, 1024 if N < 8192 else 2048)
    launch = pipelined(dy.device, block_t * dy.element_size(), block_n)
    blocks, parts = cdiv(N, launch["BLOCK_N"]), cdiv(T, part)
    v = torch.empty(blocks, T, R, dtype=torch.float32, device=dy.device)
    db = torch.empty(parts, N, R, dtype=torch.float32, device=dy.device)
    adapter_grad_kernel[(blocks, parts)](
        dy, b.contiguous(), u, v, db, T, N, R, dy.stride(0), u.stride(0), part // block_t,
        BLOCK_R=block_r, BLOCK_T=block_t, num_warps=4, **launch,
    )  # fmt: skip
    return (
        add_parts(v, torch.empty(T, R, dtype=b.dtype, device=dy.device), scaling),
        add_parts(db, torch.empty(N, R, dtype=torch.float32, device=dy.device), scaling),
    )
