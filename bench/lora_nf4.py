"""LoRA on NF4 on a GPU: decoding, adapted linear layers and groups, few tokens; against PEFT with bitsandbytes.

Run: `python bench/lora_nf4.py [decode linear few]`. The products alone (dense bf16 weight, no adapter) are the floor of
a layer; the copy bandwidth is that of decoding. A case is judged against float64 before it is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _harness import copy_bandwidth, report, save, time_us
from fused_backend.kernels import _crossover as crossover
from fused_backend.kernels import _nf4 as nf4
from fused_backend.kernels import lora_nf4 as kernels
from torch import Tensor

BF16 = torch.bfloat16
RANK, SCALING, BLOCKSIZE = 16, 2.0, 64
# Name: in_features, out_features of the layers that share x. The widths of Llama-3-8B.
LAYERS = {
    "4096 -> 14336": (4096, [14336]),
    "14336 -> 4096 (down)": (14336, [4096]),
    "4096 -> 4096 (o)": (4096, [4096]),
    "4096 -> 4096, 1024, 1024 (q k v)": (4096, [4096, 1024, 1024]),
    "4096 -> 14336, 14336 (gate up)": (4096, [14336, 14336]),
}
FEW = (1, 4, 16, 32, 64)
Row = dict[str, Any]


def quantized(N: int, K: int) -> tuple[nf4.Quantized, Any]:
    """A random weight as our kernels and as bitsandbytes take it, doubly quantised."""
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(
        torch.randn(N, K, device="cuda", dtype=BF16) * K**-0.5, quant_type="nf4", compress_statistics=True
    )
    assert state.state2 is not None
    nested = (state.state2.code, state.state2.absmax, state.offset)
    return nf4.Quantized(codes, state.absmax, nested, (N, K), "nf4", BLOCKSIZE), (codes, state)


def decoding(rows: list[Row]) -> None:
    for N, K in ((14336, 4096), (4096, 4096), (1024, 4096)):
        decode(N, K, rows)


def decode(N: int, K: int, rows: list[Row]) -> None:
    import bitsandbytes.functional as bnb

    q, (codes, state) = quantized(N, K)
    if not torch.equal(nf4.decode(q, BF16), bnb.dequantize_4bit(codes, state)):
        raise AssertionError("decoding differs from bitsandbytes")
    moved = N * K * 2.5 + q.absmax.numel()
    out, wide = (torch.empty(N, width, device="cuda", dtype=BF16) for width in (K, K + 64))
    candidates: dict[str, Callable[[], Any]] = {
        "bitsandbytes": lambda: bnb.dequantize_4bit(codes, state),
        "fused": lambda: nf4.decode(q, BF16, out=out),
        "fused, beside the adapter": lambda: nf4.decode(q, BF16, out=wide[:, :K]),
    }
    for name, fn in candidates.items():
        us = time_us(fn)
        share = 100 * moved / (us * 1e-6) / copy_bandwidth()
        row = {"part": "decode", "case": f"{N}x{K}", "candidate": name, "time_us": us, "of_copy_percent": share}
        report(row, rows)


class Layers:
    """Adapted 4-bit layers that share x, as PEFT computes them under autocast and as the operator does."""

    def __init__(self, K: int, widths: list[int]):
        self.K, self.widths = K, widths
        both = [quantized(N, K) for N in widths]
        self.q, self.theirs = [a for a, _ in both], [b for _, b in both]
        new = lambda *shape: (torch.randn(*shape, device="cuda") * 0.02).requires_grad_()  # noqa: E731
        self.a, self.b = [new(RANK, K) for _ in widths], [new(N, RANK) for N in widths]

    def eager(self, x: Tensor) -> list[Tensor]:
        import bitsandbytes as bnb

        outs = []
        for (codes, state), a, b in zip(self.theirs, self.a, self.b, strict=True):
            base = bnb.matmul_4bit(x, codes, quant_state=state).clone()
            up = F.linear(F.linear(x, a.to(BF16)), b.to(BF16)) * SCALING
            outs.append(base + up)
        return outs

    def fused(self, x: Tensor) -> list[Tensor]:
        nested = [t for q in self.q for t in q.nested]
        count = len(self.q)
        return kernels.lora_linear(
            x, [q.codes for q in self.q], [q.absmax for q in self.q], nested, [], self.a, self.b, [], self.widths,
            [SCALING] * count, 0.0, "nf4", BLOCKSIZE, BF16, BF16, BF16,
        )[:count]  # fmt: skip

    def exact(self, x: Tensor) -> list[Tensor]:
        outs = []
        for q, a, b in zip(self.q, self.a, self.b, strict=True):
            w = nf4.decode(q, BF16).double()
            outs.append(x.double() @ w.t() + SCALING * (x.double() @ a.double().t()) @ b.double().t())
        return outs

    def error_over_eager(self) -> float:
        """Our largest rms error, in units of eager's, over outputs and gradients; raises above 1.5."""
        x = torch.randn(256, self.K, device="cuda", dtype=BF16)
        dys = [torch.randn(256, N, device="cuda", dtype=BF16) for N in self.widths]

        def values(fn: Callable[[Tensor], list[Tensor]], dtype: torch.dtype = BF16) -> list[Tensor]:
            own = x.to(dtype).detach().requires_grad_()
            ys = fn(own)
            cotangents = [d.to(y.dtype) for d, y in zip(dys, ys, strict=True)]
            return [y.detach() for y in ys] + list(torch.autograd.grad(ys, [own, *self.a, *self.b], cotangents))

        truth = [t.double() for t in values(self.exact, torch.float64)]
        errors = [
            [((v.double() - t).norm() / t.norm()).item() for v, t in zip(values(fn), truth, strict=True)]
            for fn in (self.fused, self.eager)
        ]
        worst = max(ours / max(eager, 1e-5) for ours, eager in zip(*errors, strict=True))
        if worst > 1.5:
            raise AssertionError(f"lora_nf4 {self.K} -> {self.widths}: error {worst:.2f} times eager's")
        return worst


def layers(rows: list[Row]) -> None:
    for case, (K, widths) in LAYERS.items():
        torch._dynamo.reset()
        layer(case, Layers(K, widths), rows)


def products(K: int, widths: list[int], x: Tensor, dys: list[Tensor]) -> tuple[float, float]:
    """The GEMMs that no implementation can avoid, forward and backward, over dense weights."""
    weights = [torch.randn(N, K, device="cuda", dtype=BF16) * K**-0.5 for N in widths]

    def backward() -> None:
        dx = dys[0] @ weights[0]
        for dy, w in zip(dys[1:], weights[1:], strict=True):
            dx.addmm_(dy, w)

    return time_us(lambda: [F.linear(x, w) for w in weights]), time_us(backward)


def times(fn: Callable[[Tensor], list[Tensor]], group: Layers, x: Tensor, dys: list[Tensor]) -> tuple[float, float]:
    ys, wanted = fn(x), [x, *group.a, *group.b]
    backward = lambda: torch.autograd.grad(ys, wanted, dys, retain_graph=True)  # noqa: E731
    return time_us(lambda: fn(x), 30, head_start_ms=6), time_us(backward, 30, head_start_ms=6)


def layer(case: str, group: Layers, rows: list[Row], tokens: int = 8192) -> None:
    error = group.error_over_eager()
    x = torch.randn(tokens, group.K, device="cuda", dtype=BF16).requires_grad_()
    dys = [torch.randn(tokens, N, device="cuda", dtype=BF16) for N in group.widths]
    floor = products(group.K, group.widths, x.detach(), dys)
    measured = {"products alone": floor}
    named = {"eager": group.eager, "inductor": torch.compile(group.eager, dynamic=False), "fused": group.fused}
    measured |= {name: times(fn, group, x, dys) for name, fn in named.items()}
    for name, (forward, backward) in measured.items():
        row = {
            "part": "linear", "case": f"{tokens} tokens, {case}", "candidate": name, "forward_us": forward,
            "backward_us": backward, "forward_over_products": forward / floor[0],
            "both_over_products": (forward + backward) / sum(floor),
        }  # fmt: skip
        report(row | ({"error_over_eager": error} if name == "fused" else {}), rows)


def few_tokens(rows: list[Row]) -> None:
    for N, K in ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)):
        q, theirs = quantized(N, K)
        for tokens in FEW:
            few(q, theirs, tokens, rows)
        limit = crossover._limit(torch.device("cuda", 0), crossover.Kind(N, K, "nf4", BLOCKSIZE, True), BF16)
        report({"part": "few", "case": f"{K} -> {N}", "candidate": "registers up to", "tokens": limit}, rows)


def few(q: nf4.Quantized, theirs: Any, tokens: int, rows: list[Row]) -> None:
    import bitsandbytes as bnb

    N, K = q.shape
    x, dy = (torch.randn(tokens, n, device="cuda", dtype=BF16) for n in (K, N))
    candidates: dict[str, Callable[[], Any]] = {
        "decoded, then GEMM": lambda: F.linear(x, nf4.decode(q, BF16)),
        "decoded in registers": lambda: nf4.matmul_small(x, q, BF16),
        "bitsandbytes": lambda: bnb.matmul_4bit(x, theirs[0], quant_state=theirs[1]),
        "backward: decoded, then GEMM": lambda: dy @ nf4.decode(q, BF16),
        "backward: decoded in registers": lambda: nf4.matmul_small_transposed(dy, q, BF16),
    }
    for name, fn in candidates.items():
        row = {"part": "few", "case": f"{tokens} tokens, {K} -> {N}", "candidate": name, "time_us": time_us(fn, 20)}
        report(row, rows)


PARTS = {"decode": decoding, "linear": layers, "few": few_tokens}


def main(parts: list[str] | None = None) -> list[Row]:
    rows: list[Row] = []
    for name in parts or PARTS:
        PARTS[name](rows)
    save("lora_nf4", rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:] or None)
