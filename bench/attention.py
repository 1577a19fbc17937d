"""attention on a GPU: every kernel torch has, ours as it chooses, and the explicit mask that models bring.

Run: `python bench/attention.py`. A case is judged against float64 before it is timed. Padded cases: `right` pads the
rows to half of the length on average, `holes` masks one token in the middle of a row. `W` is a sliding window, `packed`
a number of documents of equal length; beside them is the explicit mask as Inductor compiles it. Masks are made before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """Padding, a window and documents by name and number, for any length."""

    padding: str = "none"
    window: int | None = None
    documents: int = 0

    def __str__(self) -> str:
        window = "" if self.window is None else f" W{self.window}"
        return self.padding + window + (f" packed {self.documents}" if self.documents else "")

    def sees(self, B: int, S: int) -> Sees:
        window = None if self.window is None else min(self.window, S // 4)
        return Sees(keep_of(self.padding, B, S), window, documents_of(min(self.documents, S // 32), B, S))

    def scores(self, S: int) -> float:
        """Of one row and head, those that no causal mask, window or other document hides; pads are not subtracted."""
        length = S / (self.documents or 1)
        window = min(self.window or length, length)
        return (self.documents or 1) * (length * window - window * window / 2)


# Mistral's and Gemma's layers with a window, one row of packed documents, both; a window and padding.
SEEN = [
    ((2, 32, 8, 4096, 128), Case(window=1024)),
    ((2, 8, 4, 4096, 256), Case(window=1024)),
    ((1, 32, 8, 8192, 128), Case(documents=8)),
    ((1, 32, 8, 8192, 128), Case(documents=64)),
    ((1, 32, 8, 8192, 128), Case(window=512, documents=8)),
    ((2, 32, 8, 4096, 128), Case("right", window=1024)),
]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


@dataclass(frozen=True)
class Sees:
    """What a query sees beside causality."""

    keep: Tensor | None = None
    window: int | None = None
    documents: Tensor | None = None


def masked(sees: Sees, B: int, S: int) -> Attention:
    """As Hugging Face models compiled without us have it: one mask for all layers."""
    at = torch.arange(S, device="cuda")
    mask = (at <= at[:, None])[None, None].expand(B, -1, -1, -1)
    if sees.window is not None:
        mask = mask & (at > at[:, None] - sees.window)
    if sees.keep is not None:
        mask = mask & sees.keep[:, None, None, :]
    if sees.documents is not None:
        mask = mask & (sees.documents[:, None, :, None] == sees.documents[:, None, None, :])

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeated(k, q), repeated(v, q), attn_mask=mask)

    return attention


def causal(backend: SDPBackend | None) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return attention


def ours(sees: Sees) -> Attention:
    if sees.documents is None:
        runs = None if sees.keep is None else kernels.kept_runs(sees.keep)
        operator = functools.partial(kernels.attention, keep=sees.keep, runs=runs)
    else:
        starts, counts = kernels.document_starts(sees.documents)
        operator = functools.partial(kernels.packed_attention, documents=sees.documents, starts=starts, counts=counts)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return operator(q, k, v, window=sees.window, scale=q.shape[3] ** -0.5, steady=True)[0]

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


def documents_of(count: int, B: int, S: int) -> Tensor | None:
    """So many of equal length in each row."""
    return (torch.arange(S, device="cuda") * count // S).expand(B, -1).contiguous() if count else None


def candidates(sees: Sees, B: int, S: int) -> dict[str, Attention]:
    mask = masked(sees, B, S)
    if sees.window is not None or sees.documents is not None:
        return {"explicit mask": torch.compile(mask, dynamic=False), "fused": ours(sees)}
    if sees.keep is not None:
        return {"explicit mask": mask, "fused": ours(sees)}
    named = {"explicit mask": mask, "torch's choice": causal(None)}
    return named | {name: causal(backend) for name, backend in BACKENDS.items()} | {"fused": ours(sees)}


def step(attention: Attention, inputs: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, list(inputs), dout)]


def check(B: int, H: int, G: int, K: int, case: Case) -> float:
    """Our largest error at a length of 256, in units of the explicit mask's; raises above 1.5."""
    inputs, dout = tensors(B, H, G, 256, K)
    sees = case.sees(B, 256)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    mask = masked(sees, B, 256)
    truth = step(mask, wide, dout.double())
    errors = [
        [((a.double() - t).norm() / t.norm()).item() for a, t in zip(step(call, inputs, dout), truth, strict=True)]
        for call in (ours(sees), mask)
    ]
    worst = max(a / b for a, b in zip(*errors, strict=True))
    if worst > 1.5:
        raise AssertionError(f"attention {(B, H, G, K)} {case}: error {worst:.2f} times the explicit mask's")
    return worst


def tensors(B: int, H: int, G: int, S: int, K: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and dout in the layout that models have: (B, S, H, K) in memory."""
    made = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = (made(B, S, heads, K).transpose(1, 2) for heads in (H, G, G, H))
    return [t.requires_grad_() for t in (q, k, v)], dout


def measure(shape: tuple[int, int, int, int, int], case: Case, rows: list[dict[str, Any]]) -> None:
    B, H, G, S, K = shape
    error = check(B, H, G, K, case)
    sees = case.sees(B, S)
    inputs, dout = tensors(*shape)
    flops = 4 * B * H * K * case.scores(S)
    for name, call in candidates(sees, B, S).items():
        row: dict[str, Any] = {"fusion": "attention", "case": f"B{B} H{H}/{G} S{S} K{K} {case}", "candidate": name}
        try:
            out = call(*inputs)
            forward = time_us(lambda call=call: call(*inputs))
            back = time_us(lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True))
            row |= {"forward_us": forward, "backward_us": back}
            row["extra_bytes"] = peak_extra_bytes(lambda call=call: step(call, inputs, dout))
            row["of_matmul_percent"] = 100 * flops / (forward * 1e-6) / matmul_flops()
            if name == "fused" and sees == Sees():
                row["kind"] = sdpa.kind_of(inputs[0], inputs[1], True)
            if name == "fused" and sees.keep is None and sees != Sees():
                row["kind"] = "flash"
            if name == "fused":
                row["error_over_mask"] = error
        except RuntimeError as refused:  # torch has no such kernel for this shape
            row["refused"] = str(refused).splitlines()[0]
        report(row, rows)


def measure_reads(rows: list[dict[str, Any]]) -> None:
    """The one read of the padding or of the documents, an idle device on the other side."""
    keep, documents = keep_of("right", 8, 4096), documents_of(8, 1, 8192)
    assert keep is not None and documents is not None
    for case, name, read in (
        ("B8 S4096", "kept_runs", lambda: kernels.kept_runs(keep)),
        ("B1 S8192", "document_starts", lambda: kernels.document_starts(documents)),
    ):
        report({"fusion": "attention", "case": case, "candidate": name, "forward_us": time_us(read)}, rows)


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        measure(shape, Case(), rows)
    for shape in SHAPES[:2]:
        for padding in ("right", "holes"):
            measure(shape, Case(padding), rows)
    for shape, case in SEEN:
        measure(shape, case, rows)
    measure_reads(rows)
    save("attention", rows)
    return rows


if __name__ == "__main__":
    main()
