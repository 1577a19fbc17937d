"""Attention of a batch under padding and a sliding window as calls of kernels that have no mask.

Padding that leaves a run [start, end) of a row: inside of it attention is causal, a query behind it sees the whole run
(under a window its end), a query before it nothing. A row with holes in it needs a mask.

Shapes: B batch, S sequence; runs (B, 2) int64 on the host, -1 for a row with holes; keep (B, S) bool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# B H S^2 K that attention under a mask gets through while one more call is made and added up: 0.32 ms, and 0.2 ns for
# each 4096 of them, on an H200 (bench/attention.py, 8 x 1024 and 2 x 4096 padded at the right).
_CALL = 6_500_000_000


class Part(NamedTuple):
    """Queries of the batch rows `rows`, and keys they see: those up to themselves if causal, and of these what `left`,
    as in `_flash.py`, or a mask leaves.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    masked: bool = False
    left: int | None = None


def parts_of(runs: Tensor | None, q: Tensor, window: int | None, masked: bool) -> Iterator[Part]:
    """The calls that make up a batch, or one with a mask; rows with equal runs that follow each other share calls."""
    B, H, S, K = q.shape
    found = [[0, S]] * B if runs is None else runs.tolist()
    many = runs is not None and q.device.type == "cuda" and _many(found, B * H * S * S * K)
    if many or masked:
        yield Part(slice(0, B), slice(0, S), slice(0, S), False, True)
        return
    first = 0
    for row in range(1, B + 1):
        if row < B and found[row] == found[first]:
            continue
        rows, (start, end) = slice(first, row), found[first]
        if start < 0:
            yield Part(rows, slice(0, S), slice(0, S), False, True)
        elif start < end:
            run = slice(start, end)
            yield Part(rows, run, run, True, left=None if window is None else window - 1)
            yield from _after(rows, run, S, window)
        first = row


def _after(rows: slice, run: slice, S: int, window: int | None) -> Iterator[Part]:
    """Queries behind a run that see some of it."""
    start, end = run.start, run.stop
    last, first = (S, start) if window is None else (min(S, end + window - 1), max(start, end - window + 1))
    queries, keys = slice(end, last), slice(first, end)
    if window is None and end < S:
        yield Part(rows, queries, keys, False)
    elif window is not None and end < last:
        # With more queries than keys, flash has no window that is open to the right.
        yield Part(rows, queries, keys, False, last - end > end - first, window - 1 - (last - end))


def _many(runs: list[list[int]], scores: int) -> bool:
    """Do so many short calls cost more than one with a mask, whose time goes with `scores` (B H S^2 K)?"""
    calls = 2 * sum(a != b for a, b in itertools.pairwise([None, *runs]))
    return any(run != runs[0] for run in runs) and calls * _CALL > scores


def seen_by(part: Part, keep: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """(batch or 1, 1, queries, keys) of a part: does a query see a key?"""
    query, key = (torch.arange(x.start, x.stop, device=device) for x in (part.queries, part.keys))
    seen = (key <= query[:, None])[None, None]
    if window is not None:
        seen = seen & (key > query[:, None] - window)
    return seen if keep is None else seen & keep[part.rows, None, None, part.keys]


def is_whole(parts: list[Part], B: int, S: int) -> bool:
    return len(parts) == 1 and parts[0].rows == slice(0, B) and parts[0].queries == slice(0, S)
