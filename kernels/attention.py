"""Causal attention over grouped heads, of whole sequences or of padded ones, without a mask.

Padding that leaves one run [start, end) of a row needs no mask either: inside the run attention is causal, a query
after it sees the whole run, a query before it sees nothing. So a batch is a few calls of kernels that skip what
is hidden, exact in every row, pads included. A row with holes gets the mask that was given.

Math: out_i = sum_j p_ij v_j, p_i = softmax over keys j <= i that are kept of scale q_i . k_j; a query that sees
no key gives 0. See derivations/attention.py, Theorems dq, dk, dv, copies, hiding.
Shapes: q, out (B, H, S, K), k and v (B, G, S, K), keep (B, S) bool, windows (B, 2) int64 on the host.
Numerics: torch's kernels, see `_sdpa.py`: scores and sums in fp32. Keys that are seen from inside and from after a run
get their gradient as a sum of two rounded ones.
Cost: 4 B H S^2 K FLOPs forward, 10 backward, half of it skipped. Saved: q, k, v, out, lse (B, H, S) fp32.
`windows` is one copy to the host, which waits for the device, once per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _sdpa as sdpa
from ._op import define_backward, define_op, nbytes, refuse_double_backward

# B H S^2 K that attention under a mask gets through while one more call is made and added up: 0.32 ms, and 0.2 ns for
# each 4096 of them, on an H200 (bench/attention.py, 8 x 1024 and 2 x 4096 padded at the right).
_CALL = 6_500_000_000


class _Part(NamedTuple):
    """Queries [first, last) of the batch rows `rows`, and the keys they see."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    masked: bool = False


def _parts(windows: Tensor | None, q: Tensor) -> Iterator[_Part]:
    """The calls that make up a batch; rows with equal windows that follow each other share them."""
    B, H, S, K = q.shape
    runs = [[0, S]] * B if windows is None else windows.tolist()
    if windows is not None and q.device.type == "cuda" and _many(runs, B * H * S * S * K):
        yield _Part(slice(0, B), slice(0, S), slice(0, S), False, True)
        return
    first = 0
    for row in range(1, B + 1):
        if row < B and runs[row] == runs[first]:
            continue
        rows, (start, end) = slice(first, row), runs[first]
        run = slice(start, end)
        if start < 0:
            yield _Part(rows, slice(0, S), slice(0, S), False, True)
        elif start < end:
            yield _Part(rows, run, run, True)
            if end < S:
                yield _Part(rows, slice(end, S), run, False)
        first = row


def _many(runs: list[list[int]], scores: int) -> bool:
    """Do so many short calls cost more than one with a mask, whose time goes with `scores` (B H S^2 K)?"""
    calls = 2 * sum(a != b for a, b in itertools.pairwise([None, *runs]))
    return any(run != runs[0] for run in runs) and calls * _CALL > scores


def _seen(keep: Tensor) -> Tensor:
    """(B, 1, S, S): does a query see a key?"""
    S = keep.shape[1]
    return torch.ones(S, S, dtype=torch.bool, device=keep.device).tril() & keep[:, None, None, :]


def _of(part: _Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # what the kernels ask for
    return q[part.rows, :, part.queries], k[part.rows, :, part.keys], v[part.rows, :, part.keys]


def _is_whole(parts: list[_Part], B: int, S: int) -> bool:
    return len(parts) == 1 and parts[0].rows == slice(0, B) and parts[0].queries == slice(0, S)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises: ValueError for shapes that torch's kernels, which check nothing, would read beyond."""
    (B, H, S, K), G = q.shape, k.shape[1]
    if k.shape != (B, G, S, K) or v.shape != k.shape or G == 0 or H % G:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"attention: q must be (B, H, S, K), k and v (B, G, S, K) with G dividing H, got {shapes}. Expand k and v, "
            'or disable with options={"fusions": "-attention"}'
        )


def _forward(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, windows: Tensor | None, scale: float, steady: bool):
    _check(q, k, v)
    B, S = q.shape[0], q.shape[2]
    parts = list(_parts(windows, q))
    whole = _is_whole(parts, B, S)
    out, lse = (None, None) if whole else (torch.zeros_like(q), _empty_lse(q).zero_())
    for part in parts:
        own, sums = _of(part, q, k, v), None
        if part.masked and keep is not None:
            found = sdpa.masked(*own, _seen(keep[part.rows]), scale)
        else:
            kind = sdpa.kind_of(own[0], own[1], part.causal, steady and whole)
            found, sums = sdpa.forward(kind, *own, part.causal, scale)
        if out is None or lse is None:
            return _laid_out(found, torch.empty_like(q)), _empty_lse(q).zero_() if sums is None else sums.contiguous()
        out[part.rows, :, part.queries] = found
        if sums is not None:
            lse[part.rows, :, part.queries] = sums
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keep: Tensor | None,
    windows: Tensor | None, scale: float, steady: bool,
):  # fmt: skip
    B, S = q.shape[0], q.shape[2]
    parts = list(_parts(windows, q))
    whole = _is_whole(parts, B, S)
    grads = None if whole else [torch.zeros_like(x) for x in (q, k, v)]
    for part in parts:
        own, rows, queries, keys = _of(part, q, k, v), part.rows, part.queries, part.keys
        do, o, sums = (x[rows, :, queries] for x in (dout, out, lse))
        if part.masked and keep is not None:
            found = sdpa.masked_backward(do, *own, _seen(keep[rows]), scale)
        else:
            kind = sdpa.kind_of(own[0], own[1], part.causal, steady and whole)
            found = sdpa.backward(kind, do, *own, o, sums.contiguous(), part.causal, scale)
        if grads is None:
            return tuple(_laid_out(d, torch.empty_like(x)) for d, x in zip(found, (q, k, v), strict=True))
        for grad, d, at in zip(grads, found, (queries, keys, keys), strict=True):
            grad[rows, :, at] += d
    return tuple(grads or ())


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides promised: those of q, k and v, as of torch's kernels where these are dense."""
    return x if x.stride() == like.stride() else like.copy_(x)


def _fake(q: Tensor, k: Tensor, v: Tensor, keep: Any, windows: Any, scale: float, steady: bool):
    return torch.empty_like(q), _empty_lse(q)


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _products(q: Tensor, k: Tensor, count: int) -> int:
    """FLOPs of so many products of all queries with all keys; what a causal kernel skips is not subtracted."""
    return 2 * count * q.numel() * k.shape[2]


def _windows(keep: Tensor) -> Tensor:
    """(B, 2): of each row the run [start, end) of kept positions; (S, S) if there is none, -1 if it has holes."""
    S = keep.shape[1]
    count = keep.sum(1)
    position = torch.arange(S, device=keep.device)
    start = torch.where(keep, position, S).amin(1) if S else count
    end = torch.where(keep, position + 1, 0).amax(1) if S else count
    end = torch.maximum(start, end)
    return torch.where((end - start == count)[:, None], torch.stack((start, end), 1), -1).cpu()


kept_windows = define_op(
    "kept_windows(Tensor keep) -> Tensor",
    reference=_windows,
    triton=_windows,
    fake=lambda keep: torch.empty((keep.shape[0], 2), dtype=torch.int64, device="cpu"),
    flops=lambda keep: 0,
    bytes_moved=lambda keep: nbytes(keep),
)

attention = define_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? windows, float scale, bool steady)"
    " -> (Tensor, Tensor)",
    reference=_forward,
    triton=_forward,
    fake=_fake,
    flops=lambda q, k, *_: _products(q, k, 2),
    bytes_moved=lambda q, k, v, *_: nbytes(q, k, v, q),
)

attention_bwd = define_op(
    "attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? keep, Tensor? windows,"
    " float scale, bool steady) -> (Tensor, Tensor, Tensor)",
    reference=_backward,
    triton=_backward,
    fake=_fake_backward,
    flops=lambda dout, q, k, *_: _products(q, k, 5),
    bytes_moved=lambda dout, q, k, v, out, lse, *_: nbytes(dout, q, k, v, out, lse, q, k, v),
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, keep, windows, ctx.scale, ctx.steady = inputs
    ctx.save_for_backward(q, k, v, *output, keep, windows)
    ctx.mark_non_differentiable(output[1])


def _grad(ctx: Any, dout: Tensor, _: Any):
    q, k, v, out, lse, keep, windows = ctx.saved_tensors
    grads = attention_bwd(dout, q, k, v, out, lse, keep, windows, ctx.scale, ctx.steady)
    return *grads, None, None, None, None


define_backward(attention, setup_context=_setup, backward=_grad)
refuse_double_backward(attention_bwd)
