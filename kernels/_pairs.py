"""Heads whose channels form pairs, in place in any layout, and the tables that pairs are multiplied with.

A pair's channels are half of the rotary channels apart, or neighbours (interleaved).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import tl, triton


@triton.jit
def load_pairs(rows, stride, mask, R: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both channels of every pair, (heads, BLOCK_N) fp32 each; `rows` (heads, 1) points at channel 0."""
    if INTERLEAVED:
        # Partners are neighbours in memory: one wide load, parted in registers.
        channels = tl.arange(0, 2 * BLOCK_N)[None, :]
        x = tl.load(rows + channels.to(tl.int64) * stride, mask=mask & (channels < R), other=0.0)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], BLOCK_N, 2)))
    else:
        pairs = tl.arange(0, BLOCK_N)[None, :]
        mask = mask & (pairs < R // 2)
        x1 = tl.load(rows + pairs.to(tl.int64) * stride, mask=mask, other=0.0)
        x2 = tl.load(rows + (pairs + R // 2).to(tl.int64) * stride, mask=mask, other=0.0)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def store_pairs(rows, y1, y2, mask, R: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The reverse of `load_pairs`, rounded, into adjacent channels."""
    dtype = rows.dtype.element_ty
    if INTERLEAVED:
        channels = tl.arange(0, 2 * BLOCK_N)[None, :]
        tl.store(rows + channels, tl.interleave(y1, y2).to(dtype), mask=mask & (channels < R))
    else:
        pairs = tl.arange(0, BLOCK_N)[None, :]
        mask = mask & (pairs < R // 2)
        tl.store(rows + pairs, y1.to(dtype), mask=mask)
        tl.store(rows + (pairs + R // 2), y2.to(dtype), mask=mask)


@triton.jit
def load_table(row, stride, R: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """What multiplies the first and the second channel of every pair, (1, BLOCK_N) fp32 each."""
    pairs = tl.arange(0, BLOCK_N)[None, :]
    mask = pairs < R // 2
    at = pairs * 2 if WIDE and INTERLEAVED else pairs
    t1 = tl.load(row + at.to(tl.int64) * stride, mask=mask, other=0.0).to(tl.float32)
    t2 = t1
    if WIDE:
        at = at + (1 if INTERLEAVED else R // 2)
        t2 = tl.load(row + at.to(tl.int64) * stride, mask=mask, other=0.0).to(tl.float32)
    return t1, t2


def parted(t: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second channel of every pair."""
    if interleaved:
        return t[..., ::2], t[..., 1::2]
    first, second = t.chunk(2, dim=-1)
    return first, second


def parted_tables(cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, wide: torch.dtype) -> list[Tensor]:
    """c1, c2, s1, s2 of every pair, to broadcast over heads."""
    tables = [t.to(wide).unsqueeze(1) for t in (cos, sin)]
    per_channel = cos.shape[-1] == rotary_dim
    return [part for t in tables for part in (parted(t, interleaved) if per_channel else (t, t))]


def empty_heads(x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(B, H, S, K) over (B, S, H, K) memory: as projections lay q out, so later transposes back are free."""
    b, h, s, channels = x.shape
    return x.new_empty((b, s, h, channels), dtype=out_dtype).transpose(1, 2)


def table_strides(table: Tensor) -> tuple[int, int, int]:
    batch, position, channel = table.stride()
    return (0 if table.shape[0] == 1 else batch), position, channel
