"""Kernels over the rows of (..., D): reading strided views in place, tile sizes, sums over all rows.

Leading dimensions collapse to at most three levels of rows, enough for a slice of a fused qkv projection and
for heads moved before the sequence. The last dimension must have stride 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._launch import cdiv, next_power_of_2, sm_count, tl, triton

# Elements of a tile when rows are short: 16 per thread of 8 warps, two 16-byte loads of bf16.
TILE = 4096
MAX_D = 65536  # a longer row would not fit one program


def one_program_takes_a_row(x: Tensor, *others: Tensor | None) -> bool:
    """Is there a kernel for these? Zero rows need no launch; float64 and very long rows are left to plain torch."""
    double = any(t is not None and t.dtype == torch.float64 for t in (x, *others))
    return x.numel() > 0 and x.shape[-1] <= MAX_D and not double


def statistics_dtype(x: Tensor) -> torch.dtype:
    """What is computed along a row is float32, of float64 rows float64."""
    return torch.promote_types(x.dtype, torch.float32)


def row_tile(D: int, elements: int = TILE, per_warp: int = 512) -> dict[str, int]:
    """A tile of whole rows, several where they are short, as launch arguments."""
    block = next_power_of_2(D)
    rows = min(128, max(1, elements // block))
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(4, rows * block // per_warp))}


def summing_tile(D: int, sums: int = 1) -> dict[str, int]:
    """A tile for a backward that keeps `sums` gradients of (D,), its shares of sums over all rows, in registers.

    Measured on an H200 for one: short rows do best in few large programs (every share costs), long ones in small.
    """
    return row_tile(D, 8192, 1024 // sums) if D <= 256 else row_tile(D, 2048)


def summing_programs(tiles: int, D: int, device: torch.device) -> int:
    """Enough programs to fill the device, few, so that their shares of the sums stay small."""
    return min(tiles, sm_count(device) * (2 if D <= 256 else max(1, min(4, 8192 // D))))


@triton.jit
def row_offsets(row, n1, n2, s0, s1, s2):
    """Where each row starts, for rows numbered over (n0, n1, n2) with strides (s0, s1, s2)."""
    q = row // n2
    i0 = q // n1
    i1 = q - i0 * n1
    i2 = row - q * n2
    return i0.to(tl.int64) * s0 + i1.to(tl.int64) * s1 + i2.to(tl.int64) * s2


def row_levels(*tensors: Tensor | None) -> tuple[list[Any], tuple[int, int], list[tuple[int, ...]]]:
    """View leading dimensions as at most three common levels of rows; copy only what cannot be read in place.

    Returns the tensors, the sizes (n1, n2) of the two inner levels, and three row strides for each tensor.
    """
    out = [t.contiguous() if t is not None and t.stride(-1) != 1 else t for t in tensors]
    levels = _levels(out)
    if len(levels) > 3:
        out = [None if t is None else t.contiguous() for t in out]
        levels = _levels(out)
    levels += [(1, [0] * len(out))] * (3 - len(levels))
    strides = [tuple(level[1][i] for level in levels) for i in range(len(out))]
    return out, (levels[1][0], levels[2][0]), strides


def _levels(tensors: list[Tensor | None]) -> list[tuple[int, list[int]]]:
    """(size, stride of each tensor) of the leading dimensions, merged where every tensor allows it."""
    some = next(t for t in tensors if t is not None)
    levels: list[tuple[int, list[int]]] = []
    for d in reversed(range(some.ndim - 1)):
        size, strides = some.shape[d], [0 if t is None else t.stride(d) for t in tensors]
        if size == 1:
            continue
        if levels and strides == [levels[0][0] * s for s in levels[0][1]]:
            levels[0] = (levels[0][0] * size, levels[0][1])
        else:
            levels.insert(0, (size, strides))
    return levels


@triton.jit
def add_partials_kernel(partial_ptr, out_ptr, P, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(P, D) float32 to (D,): P programs' shares of a gradient, added in a fixed order."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial_ptr + row.to(tl.int64) * D + col, (row < P) & (col < D), other=0.0)
    out = tl.sum(total, axis=0, keep_dims=True)
    tl.store(out_ptr + col, out.to(out_ptr.dtype.element_ty), col < D)


def add_partials(partial: Tensor, out: Tensor) -> None:
    """Write the sum over the rows of `partial` (P, D) to `out` (D,): one launch, rounded once."""
    P, D = partial.shape
    add_partials_kernel[(cdiv(D, 32),)](partial, out, P, D, ROWS=128, BLOCK=32, num_warps=8)


@triton.jit(do_not_specialize=["parts", "n"])
def add_parts_kernel(parts_ptr, out_ptr, parts, n, scaling, BLOCK: tl.constexpr):
    """(parts, n) float32 to (n,), times `scaling`: few parts of many numbers, added in the order of the parts."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(parts):
        total += tl.load(parts_ptr + tl.cast(i, tl.int64) * n + at, mask=at < n, other=0.0)
    total *= tl.cast(scaling, tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < n)


def add_parts(parts: Tensor, out: Tensor, scaling: float = 1.0) -> Tensor:
    """Write `scaling` times the sum over the first dimension of `parts` to `out`: one launch, rounded once."""
    n = out.numel()
    add_parts_kernel[(cdiv(n, 256),)](parts, out, parts.shape[0], n, scaling, BLOCK=256)
    return out
