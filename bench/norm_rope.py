"""The norms of q and k and their rotation on a GPU: one operator against one after the other, and Inductor.

Run: `python bench/norm_rope.py`. A case is judged against float64 before it is timed. B batch, S sequence, H heads of
q, Hk heads of k, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fused_backend.kernels.norm_rope
import fused_backend.kernels.rms_norm
import fused_backend.kernels.rope  # noqa: F401  (registers the operators)
import torch
from _harness import report_bandwidth, save, time_us
from torch import Tensor

OPS = torch.ops.fused_backend
EPS = 1e-6
# (B, S, H, Hk, K): Qwen3-4B and -8B, Qwen3-0.6B, Gemma-3-4B; then odd sizes.
CASES = [(2, 4096, 32, 8, 128), (2, 4096, 16, 8, 128), (2, 4096, 8, 4, 256), (3, 1021, 14, 2, 64)]
Step = Callable[..., tuple[Tensor, Tensor]]


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)


def eager(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As Qwen3 writes it; q and k are (B, S, H, K)."""
    q, k = norm(q, wq).transpose(1, 2), norm(k, wk).transpose(1, 2)
    return turn(q, cos, sin), turn(k, cos, sin)


def apart(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Our operators one after the other."""
    q, k = (OPS.rms_norm(x, w, EPS, 0.0, True)[0].transpose(1, 2) for x, w in ((q, wq), (k, wk)))
    return OPS.rope_qk(q, k, cos, sin, q.shape[-1], False, False, q.dtype)


def fused(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    yq, yk, _, _ = OPS.norm_rope_qk(q, k, wq, wk, cos, sin, EPS, 0.0, True, q.shape[-1], False, q.dtype)
    return yq, yk


def values(fn: Step, inputs: Sequence[Tensor], grads: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients, in float64, computed in `dtype`."""
    leaves = [t.detach().to(dtype) for t in inputs]
    trained = [t.requires_grad_() for t in leaves[:4]]
    outs = fn(*leaves)
    found = [*outs, *torch.autograd.grad(outs, trained, [g.to(dtype) for g in grads])]
    return [t.detach().double() for t in found]


def check(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> float:
    """Our largest RMS error in units of eager's; raises above 1.5, the project's yardstick."""
    truth = values(eager, inputs, grads, torch.float64)
    theirs, ours = (values(fn, inputs, grads, torch.bfloat16) for fn in (eager, fused))
    worst = max(((f - t).norm() / (e - t).norm()).item() for f, e, t in zip(ours, theirs, truth, strict=True))
    if worst > 1.5:
        raise AssertionError(f"norm_rope {[tuple(t.shape) for t in inputs]}: error {worst:.2f} times eager's")
    return worst


def times(fn: Step, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[float, float]:
    leaves = [t.detach().clone() for t in inputs]
    trained = [t.requires_grad_() for t in leaves[:4]]
    outs = fn(*leaves)
    backward = lambda: torch.autograd.grad(outs, trained, grads, retain_graph=True)  # noqa: E731
    return time_us(lambda: fn(*leaves)), time_us(backward)


def measure(case: tuple[int, int, int, int, int], rows: list[dict[str, Any]]) -> None:
    torch._dynamo.reset()
    b, s, h, hk, channels = case
    made = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    frequency = 1e6 ** (-torch.arange(0, channels, 2, device="cuda") / channels)
    angle = torch.arange(s, device="cuda")[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)[None]
    inputs = [made(b, s, h, channels), made(b, s, hk, channels), made(channels), made(channels)]
    inputs += [angle.cos().bfloat16(), angle.sin().bfloat16()]
    grads = [made(b, s, n, channels).transpose(1, 2) for n in (h, hk)]
    error = check(inputs, grads)
    named = {"eager": eager, "inductor": torch.compile(eager, dynamic=False), "apart": apart, "fused": fused}
    found = {name: times(fn, inputs, grads) for name, fn in named.items()}
    one_way = sum(2 * t.numel() for t in inputs[:2])
    report_bandwidth(
        "norm_rope", f"B{b} S{s} H{h}/{hk} K{channels} bf16", found, (2 * one_way, 3 * one_way), error, rows
    )


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        measure(case, rows)
    save("norm_rope", rows)
    return rows


if __name__ == "__main__":
    main()
