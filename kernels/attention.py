"""Causal attention over grouped heads without a mask: whole sequences, padded ones, windows, packed documents.

Padding that leaves one run [start, end) of a row needs no mask: inside the run attention is causal, a query after
it sees the whole run, a query before it nothing. So a batch is a few calls of kernels that skip what is hidden,
exact in every row, pads included. A row with holes gets the mask that was given. A sliding window and documents that
lie one behind the other are what torch's flash kernels know by themselves; where there are none, a mask is made.

Math: out_i = sum_j p_ij v_j, p_i = softmax of scale q_i . k_j over the keys j <= i that are seen: those kept, with
j > i - window, of the document of i; a query that sees no key gives 0. See derivations/attention.py, Theorems dq, dk,
dv, copies, hiding.
Shapes: q, out (B, H, S, K), k and v (B, G, S, K), keep (B, S) bool, documents (B, S) integers, equal inside of one; on
the host: runs (B, 2) int64.
Numerics: torch's kernels, see `_sdpa.py` and `_flash.py`: scores and sums in fp32. Keys that are seen from inside and
from after a run get their gradient as a sum of two rounded ones.
Cost: 4 B H S^2 K FLOPs forward, 10 backward, half of it skipped; under a window S min(S, 2 window) for S^2. Saved: q,
k, v, out, lse (B, H, S) fp32. `kept_runs` and `document_starts` are one copy to the host each, which waits for the
device, once per step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _flash as flash
from . import _parts as split
from . import _sdpa as sdpa
from ._op import define_backward, define_op, nbytes, refuse_double_backward

# Flash's backward allocates as much for a document's end as for 128 tokens: of shorter ones, several times of all else.
_TOKENS_PER_DOCUMENT = 32
Triple = tuple[Tensor, Tensor, Tensor]


def _of(part: split.Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # what the kernels ask for
    return q[part.rows, :, part.queries], k[part.rows, :, part.keys], v[part.rows, :, part.keys]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises: ValueError for shapes that torch's kernels, which check nothing, would read beyond."""
    (B, H, S, K), G = q.shape, k.shape[1]
    if k.shape != (B, G, S, K) or v.shape != k.shape or G == 0 or H % G:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"attention: q must be (B, H, S, K), k and v (B, G, S, K) with G dividing H, got {shapes}. Expand k and v, "
            'or disable with options={"fusions": "-attention"}'
        )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, runs: Tensor | None, window: int | None, scale: float,
    steady: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, k, v)
    B, S = q.shape[0], q.shape[2]
    window = None if window is None or window >= S else window
    parts = list(split.parts_of(runs, q, window, window is not None and _no_flash(q)))
    whole = split.is_whole(parts, B, S)
    out, lse = (None, None) if whole else (torch.zeros_like(q), _empty_lse(q).zero_())
    for part in parts:
        own, sums = _of(part, q, k, v), None
        if part.masked:
            found = sdpa.masked(*own, split.seen_by(part, keep, window, q.device), scale)
        elif part.left is not None:
            found, sums = flash.forward(*own, part.left, _right(part), scale)
        else:
            kind = sdpa.kind_of(own[0], own[1], part.causal, steady and whole)
            found, sums = sdpa.forward(kind, *own, part.causal, scale)
        if out is None or lse is None:
            return _laid_out(found, torch.empty_like(q)), _empty_lse(q).zero_() if sums is None else sums.contiguous()
        out[part.rows, :, part.queries] = found
        if sums is not None:
            lse[part.rows, :, part.queries] = sums
    assert out is not None and lse is not None
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keep: Tensor | None,
    runs: Tensor | None, window: int | None, scale: float, steady: bool,
) -> Triple:  # fmt: skip
    B, S = q.shape[0], q.shape[2]
    window = None if window is None or window >= S else window
    parts = list(split.parts_of(runs, q, window, window is not None and _no_flash(q)))
    whole = split.is_whole(parts, B, S)
    grads = None if whole else (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    for part in parts:
        own, rows, queries, keys = _of(part, q, k, v), part.rows, part.queries, part.keys
        do, o, sums = (x[rows, :, queries] for x in (dout, out, lse))
        if part.masked:
            found = sdpa.masked_backward(do, *own, split.seen_by(part, keep, window, q.device), scale)
        elif part.left is not None:
            found = flash.backward(do, *own, o, sums, part.left, _right(part), scale)
        else:
            kind = sdpa.kind_of(own[0], own[1], part.causal, steady and whole)
            found = sdpa.backward(kind, do, *own, o, sums.contiguous(), part.causal, scale)
        if grads is None:
            return _as(found, q, k, v)
        for grad, d, at in zip(grads, found, (queries, keys, keys), strict=True):
            grad[rows, :, at] += d
    assert grads is not None
    return grads


def _right(part: split.Part) -> int | None:
    return 0 if part.causal else None


def _as(grads: Triple, q: Tensor, k: Tensor, v: Tensor) -> Triple:
    dq, dk, dv = (_laid_out(d, torch.empty_like(x)) for d, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides promised: those of q, k and v, as of torch's kernels where these are dense."""
    return x if x.stride() == like.stride() else like.copy_(x)


def _no_flash(q: Tensor) -> bool:
    return flash.refuse(q.device, q.dtype, q.shape[3]) is not None


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any):
    return torch.empty_like(q), _empty_lse(q)


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _flops(q: Tensor, k: Tensor, window: int | None, products: int) -> int:
    """Of so many products of queries with the keys they see; the half that a causal kernel skips is not subtracted."""
    keys = k.shape[2] if window is None else min(k.shape[2], 2 * window)
    return 2 * products * q.numel() * keys


# --- whole and padded sequences ------------------------------------------------------------------------------------


def _runs(keep: Tensor) -> Tensor:
    """(B, 2): of each row the run [start, end) of kept positions; (S, S) if there is none, -1 if it has holes."""
    S = keep.shape[1]
    count = keep.sum(1)
    position = torch.arange(S, device=keep.device)
    start = torch.where(keep, position, S).amin(1) if S else count
    end = torch.where(keep, position + 1, 0).amax(1) if S else count
    end = torch.maximum(start, end)
    return torch.where((end - start == count)[:, None], torch.stack((start, end), 1), -1).cpu()


kept_runs = define_op(
    "kept_runs(Tensor keep) -> Tensor",
    reference=_runs,
    triton=_runs,
    fake=lambda keep: torch.empty((keep.shape[0], 2), dtype=torch.int64, device="cpu"),
    flops=lambda keep: 0,
    bytes_moved=lambda keep: nbytes(keep),
)

attention = define_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? runs, int? window, float scale, bool steady)"
    " -> (Tensor, Tensor)",
    reference=_forward,
    triton=_forward,
    fake=_fake,
    flops=lambda q, k, v, keep, runs, window, *_: _flops(q, k, window, 2),
    bytes_moved=lambda q, k, v, *_: nbytes(q, k, v, q),
)

attention_bwd = define_op(
    "attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? keep, Tensor? runs,"
    " int? window, float scale, bool steady) -> (Tensor, Tensor, Tensor)",
    reference=_backward,
    triton=_backward,
    fake=_fake_backward,
    flops=lambda dout, q, k, v, out, lse, keep, runs, window, *_: _flops(q, k, window, 5),
    bytes_moved=lambda dout, q, k, v, out, lse, *_: nbytes(dout, q, k, v, out, lse, q, k, v),
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, keep, runs, ctx.window, ctx.scale, ctx.steady = inputs
    ctx.save_for_backward(q, k, v, *output, keep, runs)
    ctx.mark_non_differentiable(output[1])


def _grad(ctx: Any, dout: Tensor, _: Any):
    q, k, v, out, lse, keep, runs = ctx.saved_tensors
    grads = attention_bwd(dout, q, k, v, out, lse, keep, runs, ctx.window, ctx.scale, ctx.steady)
    return *grads, None, None, None, None, None


define_backward(attention, setup_context=_setup, backward=_grad)
refuse_double_backward(attention_bwd)


# --- packed documents ----------------------------------------------------------------------------------------------


def _starts(documents: Tensor) -> tuple[Tensor, Tensor]:
    """(B S + 1) int32: the first token of each document, counted through the batch, then B S up to the end; and on the
    host, how many documents there are (-1 if one goes on behind another) and the tokens of the longest.

    A fixed size, whatever is in it: no graph depends on the number of documents.
    """
    B, S = documents.shape
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(first.flatten(), torch.arange(B * S, device=documents.device), B * S).sort().values
    starts = torch.nn.functional.pad(starts, (0, 1), value=B * S)
    together = documents.sort(dim=1).values  # as many that differ from the one before only if each lies in one piece
    pieces, numbers = (first.sum(), (together[:, 1:] != together[:, :-1]).sum() + B)
    longest = starts.diff().amax() if B * S else pieces
    return starts.int(), torch.stack((torch.where(pieces == numbers, pieces, -1), longest)).cpu()


def _packed(q: Tensor, documents: Tensor, starts: Tensor, counts: Tensor) -> flash.Documents | None:
    """The documents as flash takes them; None where it cannot, or should not."""
    number, longest = counts.tolist()
    few = number > 0 and number * _TOKENS_PER_DOCUMENT <= documents.numel()
    return None if _no_flash(q) or not few else flash.Documents(starts[: number + 1], longest)


def _one_per_row(counts: Tensor, q: Tensor) -> bool:
    return int(counts[0]) == q.shape[0]


def _seen_inside(documents: Tensor, window: int | None) -> Tensor:
    """(B, 1, S, S): does a query see a key?"""
    B, S = documents.shape
    whole = split.Part(slice(0, B), slice(0, S), slice(0, S), False)
    return split.seen_by(whole, None, window, documents.device) & (
        documents[:, None, :, None] == documents[:, None, None, :]
    )


def _packed_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, starts: Tensor, counts: Tensor, window: int | None,
    scale: float, steady: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if _one_per_row(counts, q):
        return _forward(q, k, v, None, None, window, scale, steady)
    _check(q, k, v)
    packed = _packed(q, documents, starts, counts)
    if packed is None:
        out, lse = sdpa.masked(q, k, v, _seen_inside(documents, window), scale), _empty_lse(q).zero_()
    else:
        out, lse = flash.forward(q, k, v, None if window is None else window - 1, 0, scale, packed)
    return _laid_out(out, torch.empty_like(q)), lse.contiguous()


def _packed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor, starts: Tensor,
    counts: Tensor, window: int | None, scale: float, steady: bool,
) -> Triple:  # fmt: skip
    if _one_per_row(counts, q):
        return _backward(dout, q, k, v, out, lse, None, None, window, scale, steady)
    packed = _packed(q, documents, starts, counts)
    if packed is None:
        grads = sdpa.masked_backward(dout, q, k, v, _seen_inside(documents, window), scale)
    else:
        left = None if window is None else window - 1
        grads = flash.backward(dout, q, k, v, out, lse, left, 0, scale, packed)
    return _as(grads, q, k, v)


document_starts = define_op(
    "document_starts(Tensor documents) -> (Tensor, Tensor)",
    reference=_starts,
    triton=_starts,
    fake=lambda documents: (
        documents.new_empty((documents.numel() + 1,), dtype=torch.int32),
        torch.empty((2,), dtype=torch.int64, device="cpu"),
    ),
    flops=lambda documents: 0,
    bytes_moved=lambda documents: nbytes(documents),
)

packed_attention = define_op(
    "packed_attention(Tensor q, Tensor k, Tensor v, Tensor documents, Tensor starts, Tensor counts, int? window,"
    " float scale, bool steady) -> (Tensor, Tensor)",
    reference=_packed_forward,
    triton=_packed_forward,
    fake=_fake,
    flops=lambda q, k, v, documents, starts, counts, window, *_: _flops(q, k, window, 2),
    bytes_moved=lambda q, k, v, *_: nbytes(q, k, v, q),
)

packed_attention_bwd = define_op(
    "packed_attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor documents,"
    " Tensor starts, Tensor counts, int? window, float scale, bool steady) -> (Tensor, Tensor, Tensor)",
    reference=_packed_backward,
    triton=_packed_backward,
    fake=_fake_backward,
    flops=lambda dout, q, k, v, out, lse, documents, starts, counts, window, *_: _flops(q, k, window, 5),
    bytes_moved=lambda dout, q, k, v, out, lse, *_: nbytes(dout, q, k, v, out, lse, q, k, v),
)


def _setup_packed(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, documents, starts, counts, ctx.window, ctx.scale, ctx.steady = inputs
    ctx.save_for_backward(q, k, v, *output, documents, starts, counts)
    ctx.mark_non_differentiable(output[1])


def _grad_packed(ctx: Any, dout: Tensor, _: Any):
    q, k, v, out, lse, *read = ctx.saved_tensors
    grads = packed_attention_bwd(dout, q, k, v, out, lse, *read, ctx.window, ctx.scale, ctx.steady)
    return *grads, None, None, None, None, None, None


define_backward(packed_attention, setup_context=_setup_packed, backward=_grad_packed)
refuse_double_backward(packed_attention_bwd)
