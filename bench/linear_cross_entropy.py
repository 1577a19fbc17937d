"""Linear + cross-entropy: time and memory of ours, eager, Inductor, Liger, and of the matrix products alone.

Run as `python bench/linear_cross_entropy.py` on a CUDA device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import _harness as harness
import torch
import torch.nn.functional as F
from fused_backend.kernels import linear_cross_entropy as kernels

OP = torch.ops.fused_backend.linear_cross_entropy
GIB = 2.0**30
# T tokens, D model, V vocabulary, softcap, share of ignored labels
CASES = [
    ("llama3_8b", 8192, 4096, 128256, 0.0, 0.0),
    ("llama3_8b, 60 % ignored", 8192, 4096, 128256, 0.0, 0.6),
    ("llama32_1b", 8192, 2048, 128256, 0.0, 0.0),
    ("gemma2_2b", 8192, 2304, 256000, 30.0, 0.0),
    ("long", 32768, 4096, 128256, 0.0, 0.0),
]


def idiom(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, softcap: float) -> torch.Tensor:
    z = F.linear(x, w).float()
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return F.cross_entropy(z, target)


def fused(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, softcap: float) -> torch.Tensor:
    needs = (x.requires_grad, w.requires_grad, False)
    return OP(x, w, None, target, "mean", -100, 0.0, 1.0, softcap, *needs)[0]


def liger() -> Callable[..., torch.Tensor] | None:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return None
    return lambda x, w, target, softcap: liger_fused_linear_cross_entropy(x, w, target, softcap=softcap or None)


def make(T: int, D: int, V: int, ignored: float, train_w: bool) -> tuple[torch.Tensor, ...]:
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(V, D, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_(train_w)
    target = torch.randint(0, V, (T,), device="cuda")
    target[torch.rand(T, device="cuda") < ignored] = -100
    return x, w, target


def step(loss: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, *rest: Any) -> Any:
    """Forward and backward; the gradients are returned, not accumulated."""
    wanted = [t for t in (x, w) if t.requires_grad]
    return torch.autograd.grad(loss(x, w, *rest), wanted)


def check(train_w: bool) -> dict[str, float]:
    """Relative error of every gradient against float64, ours over eager's, at a size that float64 affords."""
    x, w, target = make(1024, 1024, 8009, 0.2, train_w)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, w)]
    z = F.linear(*wide)
    truth = torch.autograd.grad(F.cross_entropy(z, target), [t for t in wide if t.requires_grad])
    ratios = {}
    for name, a, b, t in zip(
        ("dx", "dw"), step(fused, x, w, target, 0.0), step(idiom, x, w, target, 0.0), truth, strict=False
    ):
        ours, eager = (((g.double() - t).norm() / t.norm()).item() for g in (a, b))
        ratios[f"{name}_error"], ratios[f"{name}_error_of_eager"] = ours, eager
        assert ours <= 1.5 * eager + torch.finfo(torch.bfloat16).eps, f"{name}: {ours} against {eager} in eager"
    return ratios


def products(x: torch.Tensor, w: torch.Tensor) -> Callable[[], None]:
    """The matrix products alone, in our chunks: what no kernel can go below with these libraries."""
    (T, D), V, train_w = x.shape, w.shape[0], w.requires_grad
    rows = kernels._chunk_rows(T, V, D, 2, train_w)
    x, w = x.detach(), w.detach()
    g = torch.randn(rows, V, device="cuda", dtype=torch.bfloat16)
    dx, logits = torch.empty_like(x), torch.empty_like(g)
    dw = torch.empty(V, D, device="cuda", dtype=torch.bfloat16 if rows == T else torch.float32)

    def run() -> None:
        for start in range(0, T, rows):
            part = slice(start, min(start + rows, T))
            n = part.stop - start
            torch.mm(x[part], w.t(), out=logits[:n])
            torch.mm(g[:n], w, out=dx[part])
            if train_w:
                kernels._product(dw, g[:n].t(), x[part], alpha=1.0, accumulate=start > 0)

    return run


def kernel_rate(V: int, softcap: float, out: list[dict[str, Any]]) -> None:
    """The softmax-gradient kernel alone: two reads and a write of the logits."""
    logits = torch.randn(1024, V, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, V, (1024,), device="cuda")
    losses = torch.empty(1024, device="cuda")
    loss = kernels._Loss("mean", -100, 0.0, 1.0, softcap)
    for grad, passes in ((True, 3), (False, 1)):
        time = harness.time_us(lambda grad=grad: kernels._step_triton(logits, target, losses, loss, 1.0, grad))
        rate = passes * logits.nbytes / (time * 1e-6)
        row = {
            "case": f"kernel, V={V}, softcap={softcap}, grad={grad}",
            "time_us": time,
            "rate_GBps": rate / 1e9,
        }
        harness.report({**row, "of_copy": rate / harness.copy_bandwidth()}, out)


def measure(case: str, impl: str, run: Callable[[], Any], flops: float, out: list[dict[str, Any]], **more: Any) -> None:
    try:
        peak, time = harness.peak_extra_bytes(run), harness.time_us(run)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        harness.report({"case": case, "impl": impl, "failed": "out of memory"}, out)
        return
    rate = flops / (time * 1e-6)
    row = {"case": case, "impl": impl, "time_us": time, "rate_TFLOPs": rate / 1e12}
    harness.report({**row, "of_matmul": rate / harness.matmul_flops(), "extra_GiB": peak / GIB, **more}, out)
    torch.cuda.empty_cache()


def bench_case(
    name: str,
    T: int,
    D: int,
    V: int,
    softcap: float,
    ignored: float,
    train_w: bool,
    out: list[dict[str, Any]],
) -> None:
    x, w, target = make(T, D, V, ignored, train_w)
    case = f"{name}, {'trained' if train_w else 'frozen'} head"
    # FLOPs of every row, ignored or not: what the idiom does.
    flops = 2 * T * D * V * (3 if train_w else 2)
    measure(case, "products alone", products(x, w), flops, out)
    measure(case, "fused", functools.partial(step, fused, x, w, target, softcap), flops, out)
    needs = (True, train_w, False)
    op = lambda *needs: OP(x.detach(), w.detach(), None, target, "mean", -100, 0.0, 1.0, softcap, *needs)  # noqa: E731
    measure(case, "fused, operator alone", lambda: op(*needs), flops, out)
    measure(case, "fused, loss only", lambda: op(False, False, False), 2 * T * D * V, out)
    # Static shapes, and no memory of the case before: otherwise the second case compiles for dynamic ones.
    torch._dynamo.reset()
    others = {"eager": idiom, "inductor": torch.compile(idiom, dynamic=False), "liger": liger()}
    for impl, loss in others.items():
        if loss is not None:
            measure(case, impl, functools.partial(step, loss, x, w, target, softcap), flops, out)


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for train_w in (False, True):
        harness.report({"case": f"accuracy, trained head {train_w}", **check(train_w)}, rows)
    for V, softcap in ((128256, 0.0), (151936, 0.0), (50257, 0.0), (256000, 30.0)):
        kernel_rate(V, softcap, rows)
    for case in CASES:
        for train_w in (False, True):
            bench_case(*case, train_w, rows)
    harness.save("linear_cross_entropy", rows)
    return rows


if __name__ == "__main__":
    main()
