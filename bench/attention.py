"""attention on a GPU: every kernel torch has, ours as it chooses, and the explicit mask that models bring.

Run: `python bench/attention.py`. A case is judged against float64 before it is timed. Padded cases: `right` pads the
rows to half of the length on average, `holes` masks one token in the middle of a row.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _harness import matmul_flops, peak_extra_bytes, report, save, time_us
from fused_backend.kernels import _sdpa as sdpa
from fused_backend.kernels import attention as kernels
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# (batch, query heads, key heads, length, head dim): Llama-3-8B, Llama-3.2-1B, Gemma-2-like, multi-head, short and long.
SHAPES = [
    (2, 32, 8, 4096, 128),
    (8, 32, 8, 1024, 128),
    (2, 32, 8, 4095, 128),
    (1, 32, 8, 16384, 128),
    (8, 32, 8, 512, 64),
    (2, 8, 4, 4096, 256),
    (4, 16, 16, 2048, 64),
]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def masked(keep: Tensor | None) -> Attention:
    """As Hugging Face models compiled without us have it."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = q.shape[2]
        mask = torch.ones(S, S, dtype=torch.bool, device=q.device).tril()[None, None].expand(q.shape[0], -1, -1, -1)
        mask = mask if keep is None else mask & keep[:, None, None, :]
        return F.scaled_dot_product_attention(q, repeated(k, q), repeated(v, q), attn_mask=mask)

    return attention


def causal(backend: SDPBackend | None) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return attention


def ours(keep: Tensor | None, windows: Tensor | None, steady: bool = True) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.attention(q, k, v, keep, windows, q.shape[3] ** -0.5, steady)[0]

    return attention


def keep_of(padding: str, B: int, S: int) -> Tensor | None:
    if padding == "none":
        return None
    keep = torch.ones(B, S, dtype=torch.bool, device="cuda")
    for row in range(B):
        if padding == "right":
            keep[row, S * (row + 1) // (B + 1) :] = False
        if padding == "holes" and row == 0:
            keep[row, S // 2] = False
    return keep


def candidates(keep: Tensor | None) -> dict[str, Attention]:
    if keep is not None:
        windows = kernels.kept_windows(keep)
        return {"explicit mask": masked(keep), "fused": ours(keep, windows)}
    named = {"explicit mask": masked(None), "torch's choice": causal(None)}
    return named | {name: causal(backend) for name, backend in BACKENDS.items()} | {"fused": ours(None, None)}


def step(attention: Attention, inputs: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, list(inputs), dout)]


def check(B: int, H: int, G: int, K: int, padding: str) -> float:
    """Our largest error at a length of 256, in units of the explicit mask's; raises above 1.5."""
    inputs, dout = tensors(B, H, G, 256, K)
    keep = keep_of(padding, B, 256)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = step(masked(keep), wide, dout.double())
    errors = [
        [((a.double() - t).norm() / t.norm()).item() for a, t in zip(step(call, inputs, dout), truth, strict=True)]
        for call in (candidates(keep)["fused"], masked(keep))
    ]
    worst = max(a / b for a, b in zip(*errors, strict=True))
    if worst > 1.5:
        raise AssertionError(f"attention {(B, H, G, K)} {padding}: error {worst:.2f} times the explicit mask's")
    return worst


def tensors(B: int, H: int, G: int, S: int, K: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and dout in the layout that models have: (B, S, H, K) in memory."""
    made = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = (made(B, S, heads, K).transpose(1, 2) for heads in (H, G, G, H))
    return [t.requires_grad_() for t in (q, k, v)], dout


def measure(shape: tuple[int, int, int, int, int], padding: str, rows: list[dict[str, Any]]) -> None:
    B, H, G, S, K = shape
    error = check(B, H, G, K, padding)
    keep = keep_of(padding, B, S)
    inputs, dout = tensors(*shape)
    flops = 4 * B * H * S * S * K / 2  # what is below the diagonal, forward
    for name, call in candidates(keep).items():
        row: dict[str, Any] = {"fusion": "attention", "case": f"B{B} H{H}/{G} S{S} K{K} {padding}", "candidate": name}
        try:
            out = call(*inputs)
            forward = time_us(lambda call=call: call(*inputs))
            back = time_us(lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True))
            row |= {"forward_us": forward, "backward_us": back}
            row["extra_bytes"] = peak_extra_bytes(lambda call=call: step(call, inputs, dout))
            row["of_matmul_percent"] = 100 * flops / (forward * 1e-6) / matmul_flops()
            if name == "fused" and padding == "none":
                row["kind"] = sdpa.kind_of(inputs[0], inputs[1], True)
            if name == "fused":
                row["error_over_mask"] = error
        except RuntimeError as refused:  # torch has no such kernel for this shape
            row["refused"] = str(refused).splitlines()[0]
        report(row, rows)


def measure_windows(rows: list[dict[str, Any]]) -> None:
    """The one read of the padding, an idle device on the other side."""
    keep = keep_of("right", 8, 4096)
    assert keep is not None
    report({"fusion": "attention", "case": "B8 S4096", "candidate": "kept_windows",
            "forward_us": time_us(lambda: kernels.kept_windows(keep))}, rows)  # fmt: skip


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        measure(shape, "none", rows)
    for shape in SHAPES[:2]:
        for padding in ("right", "holes"):
            measure(shape, padding, rows)
    measure_windows(rows)
    save("attention", rows)
    return rows


if __name__ == "__main__":
    main()
