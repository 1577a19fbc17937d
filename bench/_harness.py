"""Timing protocol: median of many runs with a flushed cache, ceilings in the same process, one JSON row per case.

Inputs are fresh random numbers, never zeros (a GPU multiplies zeros faster). Every row carries the machine, the
versions and the commit, so that a number can be repeated.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# The repository root must stay off sys.path: kernels/ would shadow Hugging Face's `kernels` package.
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != ROOT]

import torch  # noqa: E402

BENCH = ROOT / "bench"
RESULTS = BENCH / "results"


def time_us(fn: Callable[[], Any], runs: int | None = None, head_start_ms: int = 1) -> float:
    """Median GPU time of `fn` in microseconds; L2 is flushed before every run.

    The GPU sleeps before the clock starts, so that what `fn` launches is queued by then: in a training step the CPU
    runs ahead too, and launch overhead of small kernels would otherwise be all that is seen. `fn`s of many launches
    need a longer head start.
    """
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    started = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    if runs is None:
        runs = 60 if time.perf_counter() - started < 3e-3 else 15
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for begin, end in events:
        flush.zero_()
        torch.cuda._sleep(2_000_000 * head_start_ms)  # cycles
        begin.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) * 1e3


def peak_extra_bytes(fn: Callable[[], Any]) -> int:
    """Allocator peak of one run of `fn` above what was allocated before it."""
    fn()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = fn()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


@functools.cache
def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read plus written: the ceiling of a memory-bound kernel."""
    src = torch.randn(2**29, device="cuda", dtype=torch.float32)
    dst = torch.empty_like(src)
    return 2 * src.numel() * 4 / (time_us(lambda: dst.copy_(src)) * 1e-6)


@functools.cache
def matmul_flops() -> float:
    """FLOP per second of an 8192-cubed bf16 product on random data: the ceiling of a GEMM."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / (time_us(lambda: a @ b) * 1e-6)


@functools.cache
def machine() -> dict[str, str]:
    """What a number depends on."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("FUSED_COMMIT", "unknown")
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def values(fn: Callable[..., Sequence[Any]], inputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Outputs, then the gradient of every trained input."""
    outs = fn(*inputs)
    trained = [t for t in inputs if t.requires_grad]
    return [o.detach() for o in outs] + list(torch.autograd.grad(outs, trained, cotangents))


def worst_error(
    what: str,
    ours: Callable[..., Sequence[Any]],
    eager: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    cotangents: Sequence[Any],
) -> float:
    """The largest error of `ours` over 512 rows, in units of `eager`'s; raises above 1.5, the project's yardstick."""
    cut = lambda t: t.detach() if t.ndim == 1 else t.detach()[:512]  # noqa: E731
    few = [cut(t).clone().requires_grad_(t.requires_grad) for t in inputs]
    exact = [cut(t).double().requires_grad_(t.requires_grad) for t in inputs]
    cots = [cut(c) for c in cotangents]
    truth = values(eager, exact, [c.double() for c in cots])

    def errors(fn: Callable[..., Sequence[Any]]) -> list[float]:
        got = values(fn, few, cots)
        return [((g.double() - t).norm() / t.norm()).item() for g, t in zip(got, truth, strict=True)]

    worst = max(a / b if b else float(a > 0) * 9 for a, b in zip(errors(ours), errors(eager), strict=True))
    if worst > 1.5:
        raise AssertionError(f"{what}: error {worst:.2f} times eager's")
    return worst


def autograd_times(
    fn: Callable[..., Sequence[Any]], inputs: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[float, float]:
    """Forward and backward of a differentiable function, in microseconds."""
    own = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    trained = [t for t in own if t.requires_grad]
    outs = fn(*own)
    return (
        time_us(lambda: fn(*own)),
        time_us(lambda: torch.autograd.grad(outs, trained, cotangents, retain_graph=True)),
    )


def show(row: dict[str, Any]) -> None:
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def report(row: dict[str, Any], out: list[dict[str, Any]]) -> None:
    """Print one row as it is measured and keep it, in rows.jsonl too: a run that is stopped saves nothing else."""
    show(row)
    out.append(row)
    with (folder() / "rows.jsonl").open("a") as journal:
        journal.write(json.dumps({"bench": pathlib.Path(sys.argv[0]).stem} | row | machine()) + "\n")


def report_bandwidth(
    fusion: str,
    case: str,
    times_us: dict[str, tuple[float, float]],
    bytes_moved: tuple[float, float],
    error_over_eager: float,
    out: list[dict[str, Any]],
) -> None:
    """Forward and backward of every candidate as GB/s and as a share of the copy bandwidth."""
    for name, pair in times_us.items():
        for direction, time_us, moved in zip(("forward", "backward"), pair, bytes_moved, strict=True):
            rate = moved / (time_us * 1e-6)
            row = {
                "fusion": fusion,
                "case": case,
                "direction": direction,
                "candidate": name,
                "time_us": time_us,
                "rate_GBps": rate / 1e9,
                "of_copy_percent": 100 * rate / copy_bandwidth(),
            }
            report(row | ({"error_over_eager": error_over_eager} if name == "fused ops" else {}), out)


def folder() -> pathlib.Path:
    """Where results go: bench/results, or $OUT where that is set."""
    path = pathlib.Path(os.environ.get("OUT", RESULTS))
    path.mkdir(parents=True, exist_ok=True)
    return path


def save(name: str, rows: list[dict[str, Any]], **versions: str) -> pathlib.Path:
    """Write the rows with the machine line to bench/results/<name>.json, or under $OUT where that is set.

    `versions` are those that matter beside the machine's.
    """
    path = folder() / f"{name}.json"
    path.write_text(json.dumps({"machine": machine() | versions, "rows": rows}, indent=1) + "\n")
    return path
