"""torch's flash kernels for what they alone do: sliding windows, and rows that hold several documents.

Of T keys, the query at position i of S sees those from i + T - S - left to i + T - S + right, both included; None is
without an end. With documents, positions and lengths are those inside of a document, and no key of another is seen.

Shapes: q, out (B, H, S, K), k and v (B, G, T, K), lse (B, H, S); G divides H. With documents S = T.
Numerics: scores and sums in fp32. As in torch, dq is summed up by atomic additions unless deterministic algorithms are
asked for.
Cost: the backward allocates 4 H K bytes for each token, and for 128 more with every document.
Source: Dao, FlashAttention-2, 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Documents(NamedTuple):
    """Token starts[i] of the whole batch, row after row, is the first of document i; the last element is B S."""

    starts: Tensor  # int32
    longest: int


def refuse(device: torch.device, dtype: torch.dtype, K: int) -> str | None:
    """Why these kernels cannot be taken; None if they can."""
    if device.type != "cuda" or torch.version.hip:
        return "no flash kernel but on CUDA"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"no flash kernel for {dtype}"
    if K % 8 or K > 256 or 192 < K <= 224:  # the last have no backward on some devices
        return f"no flash kernel for {K} channels"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "no flash kernel for devices before Ampere"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, left: int | None, right: int | None, scale: float,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse."""
    starts, longest_q, longest_k = _lengths(q, k, documents)
    out, lse = aten._flash_attention_forward(
        *(_tokens(x, documents) for x in (q, k, v)), starts, starts, longest_q, longest_k, 0.0, right == 0, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )[:2]  # fmt: skip
    if documents is not None:
        lse = lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
    return _heads(out, q, documents), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, left: int | None, right: int | None,
    scale: float, documents: Documents | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of `forward`."""
    starts, longest_q, longest_k = _lengths(q, k, documents)
    if documents is not None:
        lse = lse.transpose(0, 1).flatten(1)
    state = q.new_empty((2,), dtype=torch.uint64)  # of the random numbers that no dropout draws
    found = aten._flash_attention_backward(
        *(_tokens(x, documents) for x in (dout, q, k, v, out)), lse.contiguous(), starts, starts, longest_q, longest_k,
        0.0, right == 0, state, state[0], scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (_heads(d, x, documents) for d, x in zip(found, (q, k, v), strict=True))
    return dq, dk, dv


def _lengths(q: Tensor, k: Tensor, documents: Documents | None) -> tuple[Tensor | None, int, int]:
    if documents is None:
        return None, q.shape[2], k.shape[2]
    return documents.starts, documents.longest, documents.longest


def _tokens(x: Tensor, documents: Documents | None) -> Tensor:
    """(B, S, H, K), or (B S, H, K) where documents lie one behind the other, with channels side by side."""
    x = x.transpose(1, 2)
    x = x if documents is None else x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(x: Tensor, like: Tensor, documents: Documents | None) -> Tensor:
    x = x if documents is None else x.unflatten(0, (like.shape[0], -1))
    return x.transpose(1, 2)
