"""torch's flash kernels in plain torch, by the rules of their C++, so that the CUDA path runs on a CPU.

Registered with the dispatcher, so that every call is held to the schema of the installed torch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def _seen(S: int, T: int, left: int | None, right: int | None, causal: bool, longest: int) -> Tensor:
    left = -1 if left is None else left
    right = 0 if causal else -1 if right is None else right
    left, right = (-1 if n >= longest else n for n in (left, right))
    if left < 0 and right < 0:
        return torch.ones(S, T, dtype=torch.bool)
    left, right = (longest if n < 0 else n for n in (left, right))
    at, key = torch.arange(S)[:, None] + T - S, torch.arange(T)
    return (key >= at - left) & (key <= at + right)


def _weights(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Probabilities (H, S, T) and lse (H, S) of one sequence, heads repeated; q (S, H, K), k (T, G, K)."""
    scores = torch.einsum("shk,thk->hst", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    return torch.exp(scores - lse[..., None]), lse


def _sequences(q: Tensor, k: Tensor, starts: Tensor | None, max_q: int, max_k: int) -> Iterator[tuple[Any, Any, int]]:
    """Where each sequence of the call lies among queries and keys, and the length its windows are compared with."""
    assert all(x.stride(-1) == 1 for x in (q, k)) and q.shape[-1] % 8 == 0
    if starts is None:
        assert q.dim() == 4
        yield from ((b, b, k.shape[1]) for b in range(q.shape[0]))
        return
    assert q.dim() == 3 and starts.dtype == torch.int32 and starts.is_contiguous() and len(starts) > 1
    bounds = starts.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(q) and max_q == max_k
    for first, last in itertools.pairwise(bounds):
        assert 0 < last - first <= max_q
        yield slice(first, last), slice(first, last), max_k


def _sums(q: Tensor) -> torch.dtype:
    """Flash has no float64; here it serves to compare with."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward(
    q, k, v, starts_q, starts_k, max_q, max_k, dropout, causal, debug, *, scale,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert dropout == 0 and not debug and (starts_q is starts_k or torch.equal(starts_q, starts_k))
    wide, out = [x.double() for x in (q, k, v)], torch.empty_like(q)
    shape = (q.shape[1], len(q)) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(shape, dtype=_sums(q))
    for a, b, longest in _sequences(q, k, starts_q, max_q, max_k):
        own, keys, values = wide[0][a], wide[1][b], wide[2][b].repeat_interleave(q.shape[-2] // k.shape[-2], 1)
        seen = _seen(len(own), len(keys), window_size_left, window_size_right, causal, longest)
        p, sums = _weights(own, keys, seen, scale)
        out[a] = torch.einsum("hst,thk->shk", p, values).to(q.dtype)
        lse[(slice(None), a) if q.dim() == 3 else a] = sums
    nothing = torch.empty(0)
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), nothing


def _backward(
    dout, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, dropout, causal, state, unused, *, scale,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert lse.is_contiguous() and lse.dtype == _sums(q) and dout.shape == out.shape == q.shape
    wide, repeats = [x.double() for x in (dout, q, k, v, out)], q.shape[-2] // k.shape[-2]
    grads = [torch.empty_like(x) for x in (q, k, v)]
    for a, b, longest in _sequences(q, k, starts_q, max_q, max_k):
        do, own, keys, values, o = (x[at] for x, at in zip(wide, (a, a, b, b, a), strict=True))
        seen = _seen(len(own), len(keys), window_size_left, window_size_right, causal, longest)
        p, sums = _weights(own, keys, seen, scale)
        assert torch.allclose(sums, lse[(slice(None), a) if q.dim() == 3 else a].double(), atol=1e-3)
        keys, values = (x.repeat_interleave(repeats, 1) for x in (keys, values))
        dp = torch.einsum("shk,thk->hst", do, values)
        ds = p * (dp - (do * o).sum(-1).T[..., None]) * scale
        grads[0][a] = torch.einsum("hst,thk->shk", ds, keys).to(q.dtype)
        dk, dv = torch.einsum("hst,shk->thk", ds, own), torch.einsum("hst,shk->thk", p, do)
        grads[1][b], grads[2][b] = (x.unflatten(1, (-1, repeats)).sum(2).to(q.dtype) for x in (dk, dv))
    return tuple(grads)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[list[str]]:
    """Gives the CPU flash kernels; yields the names of those that were called."""
    calls: list[str] = []

    def counted(name: str, call: Any) -> Any:
        def kernel(*args: Any, **named: Any) -> Any:
            calls.append(name)
            return call(*args, **named)

        return kernel

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, call in (("forward", _forward), ("backward", _backward)):
            library.impl(f"_flash_attention_{name}", counted(name, call), "CPU")
        yield calls
