"""rope on a GPU: our operator against eager and Inductor (and Liger where it is installed).

Run: `python bench/rope.py`. A case is judged against float64 before it is timed. B batch, S sequence, H heads
of q, Hk heads of k, K head dim, R rotary dim.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import fused_backend.kernels.rope  # noqa: F401  (registers the operators)
import torch
from _harness import report_bandwidth, save, time_us
from torch import Tensor

OPS = torch.ops.fused_backend
Rope = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# (B, S, H, Hk, K, R, interleaved): Llama-3-8B and 3.2-1B; Phi-3, Phi-2 (partial), GPT-J; then odd sizes.
CASES = [
    (2, 4096, 32, 8, 128, 128, False),
    (2, 4096, 32, 8, 64, 64, False),
    (2, 4096, 32, 32, 96, 96, False),
    (2, 4096, 32, 32, 80, 32, False),
    (2, 4096, 16, 16, 256, 64, True),
    (2, 4096, 32, 8, 128, 128, True),
    (3, 1021, 14, 2, 64, 64, False),
]


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def idiom(rotary_dim: int, interleaved: bool) -> Rope:
    """As model code writes it, with cos and sin in the dtype of q."""

    def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        y = turning * cos.unsqueeze(1) + rotate(turning, interleaved) * sin.unsqueeze(1)
        return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y

    return lambda q, k, cos, sin: (one(q, cos, sin), one(k, cos, sin))


def candidates(rotary_dim: int, head_dim: int, interleaved: bool) -> dict[str, Rope]:
    eager = idiom(rotary_dim, interleaved)
    named: dict[str, Rope] = {
        "eager": eager,
        "inductor": torch.compile(eager, dynamic=False),
        "fused": lambda q, k, cos, sin: OPS.rope_qk(q, k, cos, sin, rotary_dim, interleaved, False, q.dtype),
    }
    if importlib.util.find_spec("liger_kernel") and rotary_dim == head_dim and not interleaved:
        from liger_kernel.ops.rope import LigerRopeFunction  # type: ignore[import-not-found]

        # It writes over q and k, so it works on copies of its own; values drift, times do not.
        named["liger"] = LigerRopeFunction.apply
    return named


def tables(s: int, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device="cuda") / rotary_dim)
    angle = torch.arange(s, device="cuda")[:, None] * frequency
    angle = angle.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angle, angle), dim=-1)
    return angle.cos().bfloat16()[None], angle.sin().bfloat16()[None]


def projected(b: int, s: int, h: int, k: int) -> Tensor:
    """(B, H, S, K), transposed from what a projection writes."""
    return torch.randn(b, s, h, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def values(fn: Rope, inputs: Sequence[Tensor], grads: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of q and k, in float64, computed in `dtype`."""
    q, k, cos, sin = (t.detach().to(dtype) for t in inputs)
    turned = q.requires_grad_(), k.requires_grad_()
    outs = fn(*turned, cos, sin)
    found = [*outs, *torch.autograd.grad(outs, turned, [g.to(dtype) for g in grads])]
    return [t.detach().double() for t in found]


def check(named: dict[str, Rope], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> float:
    """Our largest RMS error in units of eager's; raises above 1.5, the project's yardstick."""
    truth = values(named["eager"], inputs, grads, torch.float64)
    eager = values(named["eager"], inputs, grads, torch.bfloat16)
    fused = values(named["fused"], inputs, grads, torch.bfloat16)
    worst = max(((f - t).norm() / (e - t).norm()).item() for f, e, t in zip(fused, eager, truth, strict=True))
    if worst > 1.5:
        raise AssertionError(f"rope {[tuple(t.shape) for t in inputs]}: error {worst:.2f} times eager's")
    return worst


def autograd_times(fn: Rope, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[float, float]:
    q, k = (t.detach().clone().requires_grad_() for t in inputs[:2])
    # Not the leaves themselves: a candidate that writes in place must be allowed to.
    turned = q.view_as(q), k.view_as(k)
    outs = fn(*turned, *inputs[2:])
    return (
        time_us(lambda: fn(*turned, *inputs[2:])),
        time_us(lambda: torch.autograd.grad(outs, turned, grads, retain_graph=True)),
    )


def raw_times(
    rotary_dim: int, interleaved: bool, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[float, float]:
    """The operator alone, without autograd; backward is the same operator inverted."""
    q, k, cos, sin = inputs
    return (
        time_us(lambda: OPS.rope_qk(q, k, cos, sin, rotary_dim, interleaved, False, q.dtype)),
        time_us(lambda: OPS.rope_qk(*grads, cos, sin, rotary_dim, interleaved, True, q.dtype)),
    )


def measure(case: tuple[int, int, int, int, int, int, bool], rows: list[dict[str, Any]]) -> None:
    torch._dynamo.reset()
    b, s, h, hk, head_dim, rotary_dim, interleaved = case
    inputs = [
        projected(b, s, h, head_dim),
        projected(b, s, hk, head_dim),
        *tables(s, rotary_dim, interleaved),
    ]
    grads = [projected(b, s, h, head_dim), projected(b, s, hk, head_dim)]
    named = candidates(rotary_dim, head_dim, interleaved)
    error = check(named, inputs, grads)

    label = f"B{b} S{s} H{h}/{hk} K{head_dim} R{rotary_dim} bf16{' interleaved' if interleaved else ''}"
    times = {"fused ops": raw_times(rotary_dim, interleaved, inputs, grads)}
    for name, fn in named.items():
        times[name] = autograd_times(fn, inputs, grads)
    moved = sum(2 * 2 * t.numel() for t in inputs[:2]) + sum(2 * t.numel() for t in inputs[2:])
    report_bandwidth("rope", label, times, (moved, moved), error, rows)


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        measure(case, rows)
    save("rope", rows)
    return rows


if __name__ == "__main__":
    main()
