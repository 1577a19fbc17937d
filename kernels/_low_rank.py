"""Products with one thin side: what a rank-R adapter adds to a linear layer, forward and backward.

Each exists twice, in plain torch (`*_reference`: CPU, float64, any rank) and in Triton. Dropout is a mask of one bit
per element, so that a dropped copy of the activation is neither written nor saved.

Shapes: T tokens, N the wide side, R the sum of the adapters' ranks, at most MAX_RANK in Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..derivations import lora_nf4 as formulas
from ._launch import cdiv, inline, next_power_of_2, pipelined, tl, triton

MAX_RANK = 128

_updated = inline(formulas.updated)
_dropped = inline(formulas.dropped)


@dataclass(frozen=True)
class Dropout:
    """Inverted dropout: `bits` (T, ceil(N / 8)) says which elements stay, lowest bit first, times 1 / (1 - p)."""

    bits: Tensor
    scale: float


def pack_reference(keep: Tensor) -> Tensor:
    """Eight booleans of a row to a byte: keep (T, N) to (T, ceil(N / 8))."""
    rows, cols = keep.shape
    padded = torch.nn.functional.pad(keep.to(torch.uint8), (0, -cols % 8)).view(rows, cdiv(cols, 8), 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=keep.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def _unpacked(bits: Tensor, cols: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).view(bits.shape[0], 8 * bits.shape[1])[:, :cols]


def _accumulator(*tensors: Tensor | None) -> torch.dtype:
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def dropped_reference(z: Tensor, drop: Dropout | None) -> Tensor:
    return z if drop is None else formulas.dropped(z, _unpacked(drop.bits, z.shape[1]).to(z.dtype), drop.scale)


def down_reference(z: Tensor, v: Tensor, scaling: float, drop: Dropout | None) -> Tensor:
    """scaling * drop(z)·vᵀ in v's dtype: z (T, N), v (R, N) to (T, R)."""
    return dropped_reference(z.to(v.dtype), drop) @ (v if scaling == 1.0 else v * scaling).t()


def outer_reference(u: Tensor, z: Tensor, drop: Dropout | None) -> Tensor:
    """uᵀ·drop(z) in u's dtype: u (T, R), z (T, N) to (R, N)."""
    return u.t() @ dropped_reference(z.to(u.dtype), drop)


def update_reference(base: Tensor, u: Tensor, v: Tensor, scaling: float, drop: Dropout | None, out: Tensor) -> Tensor:
    """out = base + scaling * drop(u·v), rounded once: u (T, R), v (R, N), base and out (T, N), which may be one."""
    wide = _accumulator(base, u, v)
    up = dropped_reference(u.to(wide) @ v.to(wide), drop)
    return out.copy_(formulas.updated(base.to(wide), scaling, up))


# --- Triton --------------------------------------------------------------------------------------------------------


@triton.jit
def _keep(bits_ptr, row, exists, first, N, bits_stride, BLOCK_N: tl.constexpr):
    """1 where dropout keeps an element of a tile, 0 elsewhere. `first`: its first column."""
    byte = first // 8 + tl.arange(0, BLOCK_N // 8)
    mask = exists & (byte * 8 < N)[None, :]
    bits = tl.load(bits_ptr + row[:, None] * bits_stride + byte[None, :], mask=mask, other=0).to(tl.int32)
    keep = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(keep, (row.shape[0], BLOCK_N))


# One program: eight columns to a byte, BLOCK bytes of one row.
@triton.jit(do_not_specialize=["cols"])
def pack_kernel(keep_ptr, bits_ptr, cols, bytes_per_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    keep = tl.load(keep_ptr + row * cols + col, mask=col < cols, other=0).to(tl.int32)
    packed = tl.sum(keep << tl.arange(0, 8)[None, :], axis=1)
    tl.store(bits_ptr + row * bytes_per_row + byte, packed.to(tl.uint8), mask=byte < bytes_per_row)


# One program: BLOCK words of eight booleans, where a row is whole words.
@triton.jit(do_not_specialize=["n"])
def pack_words_kernel(words_ptr, bits_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at, mask=at < n, other=0)
    # Byte i of a word is 0 or 1; the product puts its bit at 56 + i and nothing else above bit 55.
    tl.store(bits_ptr + at, ((words * 0x0102040810204080) >> 56).to(tl.uint8), mask=at < n)


# Offsets inside a tile are 32-bit, that of its first row is 64-bit; loop counters are 32-bit and count tiles, so that
# the compiler knows how loads are aligned and pipelines them (with neither, `down` took five times as long).


# One program: BLOCK_T rows of one of the parts of N; parts are added afterwards, in order.
@triton.jit(do_not_specialize=["T", "tiles_per_part"])
def down_kernel(
    z_ptr,  # (T, N)
    v_ptr,  # (R, N), contiguous
    u_ptr,  # (parts, T, R) fp32, or (T, R) when there is one part
    extended_ptr,  # (T, extended_stride): gets z, then u, then zeros
    bits_ptr,
    T,
    N,
    R,
    z_stride,
    extended_stride,
    bits_stride,
    tiles_per_part,
    scaling,
    DROPOUT: tl.constexpr,
    EXTEND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_T
    row, ranks = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    exists = (row < T - first)[:, None]
    z_ptr += first.to(tl.int64) * z_stride
    bits_ptr += first.to(tl.int64) * bits_stride
    extended_ptr += first.to(tl.int64) * extended_stride
    dtype = v_ptr.dtype.element_ty
    u = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    tile = tl.program_id(1) * tiles_per_part
    for at in range(tile, tl.minimum(tile + tiles_per_part, tl.cdiv(N, BLOCK_N))):
        cols = at * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = exists & (cols[None, :] < N)
        z = tl.load(z_ptr + row[:, None] * z_stride + cols[None, :], mask=mask, other=0.0)
        if EXTEND:
            tl.store(extended_ptr + row[:, None] * extended_stride + cols[None, :], z, mask=mask)
        z = z.to(dtype)
        if DROPOUT:
            # 1 / (1 - p) is in `scaling`: here it would be rounded, and to the same side in every element.
            z *= _keep(bits_ptr, row, exists, at * BLOCK_N, N, bits_stride, BLOCK_N).to(dtype)
        v_mask = (ranks[:, None] < R) & (cols[None, :] < N)
        v = tl.load(v_ptr + ranks[:, None] * N + cols[None, :], mask=v_mask, other=0.0)
        # Scaled here, not after the loop, so that each product is waited for: a tile that passed registers has one
        # place in shared memory, and triton 3.6 fills it anew while an asynchronous product still reads it.
        u += tl.dot(z, tl.trans(v), input_precision="ieee") * tl.cast(scaling, tl.float32)
    u_ptr += (tl.program_id(1).to(tl.int64) * T + first) * R
    u_mask = exists & (ranks[None, :] < R)
    tl.store(u_ptr + row[:, None] * R + ranks[None, :], u.to(u_ptr.dtype.element_ty), mask=u_mask)
    if EXTEND:  # columns from R to BLOCK_R are zero, since v has no such rows
        beside = extended_ptr + row[:, None] * extended_stride + N + ranks[None, :]
        tl.store(beside, u.to(extended_ptr.dtype.element_ty), mask=exists)


# One program: BLOCK_N columns over the rows of one part; parts are added afterwards, in order.
@triton.jit(do_not_specialize=["T", "tiles_per_part"])
def outer_kernel(
    u_ptr,  # (T, R)
    z_ptr,  # (T, N)
    out_ptr,  # (parts, R, N) fp32
    bits_ptr,
    T,
    N,
    R,
    u_stride,
    z_stride,
    bits_stride,
    tiles_per_part,
    scaling,
    DROPOUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, ranks = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    dtype = u_ptr.dtype.element_ty
    out = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    tile = tl.program_id(1) * tiles_per_part
    for at in range(tile, tl.minimum(tile + tiles_per_part, tl.cdiv(T, BLOCK_T))):
        first = tl.cast(at * BLOCK_T, tl.int64)
        exists = (row < T - at * BLOCK_T)[:, None]
        mask = exists & (cols[None, :] < N)
        z = tl.load(z_ptr + first * z_stride + row[:, None] * z_stride + cols[None, :], mask=mask, other=0.0).to(dtype)
        if DROPOUT:
            bits = bits_ptr + first * bits_stride
            z *= _keep(bits, row, exists, tl.program_id(0) * BLOCK_N, N, bits_stride, BLOCK_N).to(dtype)
        u_mask = exists & (ranks[None, :] < R)
        u = tl.load(u_ptr + first * u_stride + row[:, None] * u_stride + ranks[None, :], mask=u_mask, other=0.0)
        out += tl.dot(tl.trans(u), z, input_precision="ieee") * tl.cast(scaling, tl.float32)  # waited for, as above
    mask = (ranks[:, None] < R) & (cols[None, :] < N)
    out_ptr += tl.program_id(1).to(tl.int64) * R * N
    tl.store(out_ptr + ranks[:, None] * N + cols[None, :], out, mask=mask)


# One program: a (BLOCK_T, BLOCK_N) tile.
@triton.jit(do_not_specialize=["T"])
def update_kernel(
    base_ptr,  # (T, N)
    u_ptr,  # (T, R)
    v_ptr,  # (R, N), any strides
    out_ptr,  # (T, N)
    bits_ptr,
    T,
    N,
    R,
    base_stride,
    u_stride,
    v_rank_stride,
    v_col_stride,
    out_stride,
    bits_stride,
    scaling,
    drop_scale,
    DROPOUT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = (tl.program_id(1) * BLOCK_T).to(tl.int64)
    row, cols = tl.arange(0, BLOCK_T), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = (row < T - tl.program_id(1) * BLOCK_T)[:, None]
    mask = exists & (cols[None, :] < N)
    base = tl.load(base_ptr + first * base_stride + row[:, None] * base_stride + cols[None, :], mask=mask, other=0.0)
    up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for step in tl.static_range(STEPS):  # pyright: ignore[reportGeneralTypeIssues]
        ranks = step * BLOCK_R + tl.arange(0, BLOCK_R)
        u_mask = exists & (ranks[None, :] < R)
        u = tl.load(u_ptr + first * u_stride + row[:, None] * u_stride + ranks[None, :], mask=u_mask, other=0.0)
        v_mask = (ranks[:, None] < R) & (cols[None, :] < N)
        v = tl.load(v_ptr + ranks[:, None] * v_rank_stride + cols[None, :] * v_col_stride, mask=v_mask, other=0.0)
        # Scaled here, so that the sum over ranks is one of partial sums: float32 is summed one by one within a product.
        up += tl.dot(u, v, input_precision="ieee") * tl.cast(scaling, tl.float32)
    if DROPOUT:
        bits = bits_ptr + first * bits_stride
        keep = _keep(bits, row, exists, tl.program_id(0) * BLOCK_N, N, bits_stride, BLOCK_N).to(tl.float32)
        up = _dropped(up, keep, tl.cast(drop_scale, tl.float32))
    out = _updated(base.to(tl.float32), 1.0, up)
    at = out_ptr + first * out_stride + row[:, None] * out_stride + cols[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


def _drop_arguments(drop: Dropout | None, other: Tensor) -> tuple[Tensor, int, float]:
    """Pointer, row stride and scale for a kernel; any pointer where there is no dropout."""
    return (other, 0, 1.0) if drop is None else (drop.bits, drop.bits.stride(0), drop.scale)


def pack(keep: Tensor) -> Tensor:
    """`pack_reference` in Triton."""
    keep = keep.contiguous()
    rows, cols = keep.shape
    bits = torch.empty(rows, cdiv(cols, 8), dtype=torch.uint8, device=keep.device)
    if bits.numel() and cols % 8 == 0 and keep.storage_offset() % 8 == 0:
        pack_words_kernel[(cdiv(bits.numel(), 1024),)](keep.view(torch.int64), bits, bits.numel(), BLOCK=1024)
    elif bits.numel():
        pack_kernel[(rows, cdiv(bits.shape[1], 128))](keep, bits, cols, bits.shape[1], BLOCK=128)
    return bits


def extension(ranks: int) -> int:
    """Columns that `ranks` more columns take in a buffer of which tensor cores still read whole tiles."""
    return max(64, next_power_of_2(ranks))


def down(z: Tensor, v: Tensor, scaling: float, drop: Dropout | None, extended: Tensor | None = None) -> Tensor:
    """`down_reference` in Triton; `extended` (T, N + extension(R)) gets z, the result and zeros side by side."""
    (T, N), R = z.shape, v.shape[0]
    if not (T and N and R):
        return torch.zeros(T, R, dtype=v.dtype, device=z.device)
    if extended is None and (R > MAX_RANK or (drop is None and z.is_cuda)):
        return down_reference(z, v, scaling, drop)  # the vendor's product is as fast: 26 us of 16 for 8192 x 4096
    z, v = z if z.stride(1) == 1 else z.contiguous(), v.contiguous()
    block_r = extension(R) if extended is not None else max(16, next_power_of_2(R))
    wide = extended is not None or (v.dtype != torch.float32 and block_r <= 64)
    block_t = 64 if wide else 32
    launch = pipelined(z.device, block_t * z.element_size() + block_r * v.element_size(), 256 if wide else 64)
    block_n = launch["BLOCK_N"]
    split = 1 if extended is not None or cdiv(T, block_t) >= 128 else max(1, min(cdiv(N, block_n), 4))
    tiles = cdiv(cdiv(N, block_n), split)
    u = torch.empty(split, T, R, dtype=v.dtype if split == 1 else torch.float32, device=z.device)
    bits, bits_stride, drop_scale = _drop_arguments(drop, z)
    beside = z if extended is None else extended
    down_kernel[(cdiv(T, block_t), split)](
        z, v, u, beside, bits, T, N, R, z.stride(0), beside.stride(0), bits_stride, tiles, scaling * drop_scale,
        DROPOUT=drop is not None, EXTEND=extended is not None,
        BLOCK_R=block_r, BLOCK_T=block_t, num_warps=4, **launch,
    )  # fmt: skip
    return u[0] if split == 1 else u.sum(0).to(v.dtype)


def outer(u: Tensor, z: Tensor, drop: Dropout | None) -> Tensor:
    """`outer_reference` in Triton, summed in float32 whatever u's dtype."""
    (T, N), R = z.shape, u.shape[1]
    if not (T and N and R):
        return torch.zeros(R, N, dtype=torch.float32, device=z.device)
    if R > MAX_RANK or (drop is None and z.is_cuda):
        z = dropped_reference(z.to(u.dtype), drop)
        wide = z.is_cuda and z.dtype in (torch.bfloat16, torch.float16)
        return torch.mm(u.t(), z, out_dtype=torch.float32) if wide else u.t() @ z
    z, u = (t if t.stride(1) == 1 else t.contiguous() for t in (z, u))
    block_r, block_t = max(16, next_power_of_2(R)), 64 if u.dtype != torch.float32 else 32
    launch = pipelined(z.device, block_t * z.element_size() + block_r * u.element_size(), 128 if block_r <= 32 else 64)
    block_n = launch["BLOCK_N"]
    tiles = cdiv(cdiv(T, block_t), max(1, 512 // cdiv(N, block_n)))
    parts = cdiv(T, tiles * block_t)
    out = torch.empty(parts, R, N, dtype=torch.float32, device=z.device)
    bits, bits_stride, drop_scale = _drop_arguments(drop, z)
    outer_kernel[(cdiv(N, block_n), parts)](
        u, z, out, bits, T, N, R, u.stride(0), z.stride(0), bits_stride, tiles, drop_scale,
        DROPOUT=drop is not None, BLOCK_R=block_r, BLOCK_T=block_t, num_warps=4, **launch,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def update(base: Tensor, u: Tensor, v: Tensor, scaling: float, drop: Dropout | None, out: Tensor) -> Tensor:
    """`update_reference` in Triton."""
    (T, N), R = base.shape, u.shape[1]
    if not base.numel():
        return out
    if u.stride(1) != 1:
        u = u.contiguous()
    bits, bits_stride, drop_scale = _drop_arguments(drop, base)
    # Deeper float32 products run out of registers: rank 48 at once took 45 times as long as rank 16.
    block_r = 16 if u.dtype == torch.float32 else min(64, max(16, next_power_of_2(R)))
    block_t, block_n = 32, 128
    update_kernel[(cdiv(N, block_n), cdiv(T, block_t))](
        base, u, v, out, bits, T, N, R, base.stride(0), u.stride(0), v.stride(0), v.stride(1), out.stride(0),
        bits_stride, scaling, drop_scale,
        DROPOUT=drop is not None, STEPS=cdiv(R, block_r), BLOCK_R=block_r, BLOCK_T=block_t, BLOCK_N=block_n,
        num_warps=4,
    )  # fmt: skip
    return out
