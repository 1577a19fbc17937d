"""Where a training step's time goes, kernel by kernel, and what nothing can avoid beside it.

    python bench/breakdown.py --model llama3-8b --mode qlora --stacks fused,eager
    python bench/breakdown.py --tiny --device cpu --layers 2 --stacks fused      # a dry run: operators for kernels
    python bench/breakdown.py --draw                                             # the picture of the rows there are

A few steps are recorded by torch.profiler. Every moment counts once: where kernels overlap, for the one that began
last, and for a copy only while nothing else runs; a moment without any is idle. The floor is the time of the step's
products (of the bf16 weights), attention and head alone, of the same shapes, measured in the same process. Attention
there is causal and plain, and experts are one batched product with equally many tokens each.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import pathlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import _harness as harness
import _kernel_names as kernel_names
import _records as records
import _shapes
import _stacks
import _steps as steps
import torch
from model import expected_s

KEY = ("model", "mode", "layers", "batch", "seq", "dtype", "device", "stack")
PICTURE = "breakdown.png"
PROFILED = 3  # steps
TOP = 25  # kernels that a row names
# Ranges that some versions of torch mark on the GPU's time line, kernels and gaps in them alike.
ANNOTATIONS = ("## ", "ProfilerStep", "Optimizer.", "Torch-Compiled", "CompiledFunction")
FLOOR_S = 30  # that the recording and the floor take beside the steps

Span = tuple[str, float, float]  # kernel, start and end in microseconds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One stack in this process: its step undisturbed, then recorded, then the floor."""
    stack, device, dtype = _stacks.Stack.parse(options.one), options.device, steps.DTYPES[options.dtype]
    _stacks.import_first(stack, device)
    config = _shapes.config_of(options.model, options.layers, options.tiny)
    row = _step(stack, config, options)
    if device == "cuda":
        torch.cuda.empty_cache()
    return row | {"floor": floor(config, options.mode, options.batch, options.seq, device, dtype)}


def _step(stack: _stacks.Stack, config: Any, options: argparse.Namespace) -> dict[str, Any]:
    model = _stacks.build(stack, config, options.mode, steps.DTYPES[options.dtype], options.device, options.seq)
    step, _ = steps.training_step(model, config, options, with_state=stack.budget is not None)
    row, _ = steps.warmed_up(step, options.device)
    row |= steps.timed(lambda i: step(steps.WARM_UP + i), options.steps, options.device)
    return row | summary(recorded(lambda: step(0), options.device), PROFILED)


def recorded(step: Callable[[], Any], device: str) -> list[Span]:
    """The kernels of some steps; on a CPU the operators, those that others call too."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            step()
        steps.synchronize(device)
    events = [e for e in profiler.events() or [] if not getattr(e, "is_user_annotation", False)]
    events = [e for e in events if not e.name.startswith(ANNOTATIONS)]
    operators = ("aten::", "fused_backend::")
    chosen = [e for e in events if (e.device_type == DeviceType.CUDA if on_gpu else e.name.startswith(operators))]
    return [(e.name, e.time_range.start, e.time_range.end) for e in chosen]


def summary(spans: list[Span], count: int) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, which with the idle ones add up to `recorded_ms`."""
    kinds = {name: kernel_names.classify(name) for name, *_ in spans}
    alone, idle = exclusive((kinds[name], start, end) for name, start, end in spans)
    launches: dict[str, int] = defaultdict(int)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, start, end in spans:
        launches[kinds[name]] += 1
        kernels[name][0] += 1
        kernels[name][1] += end - start
    ms = lambda us: us / count / 1e3  # noqa: E731
    top = sorted(kernels.items(), key=lambda item: -item[1][1])[:TOP]
    return {
        "recorded_ms": ms(sum(alone.values()) + idle), "idle_ms": ms(idle),
        "parts_ms": {kind: ms(us) for kind, us in sorted(alone.items(), key=lambda item: -item[1])},
        "launches": {kind: n / count for kind, n in launches.items()},
        "top": [
            {"kernel": name[:160], "kind": kinds[name], "launches": n / count, "ms": ms(us)} for name, (n, us) in top
        ],
    }  # fmt: skip


def exclusive(spans: Iterable[Span]) -> tuple[dict[str, float], float]:
    """({kind: time}, time without any), every moment from the first start to the last end counted once."""
    edges = sorted((at, begins, kind) for kind, *ends in spans for at, begins in zip(ends, (True, False), strict=True))
    times: dict[str, float] = defaultdict(float)
    running: list[str] = []  # in the order in which they began
    idle, before = 0.0, edges[0][0] if edges else 0.0
    for at, begins, kind in edges:
        if running:
            times[next((k for k in reversed(running) if not k.startswith("copies")), running[-1])] += at - before
        else:
            idle += at - before
        before = at
        if begins:
            running.append(kind)
        else:
            running.reverse()
            running.remove(kind)
            running.reverse()
    return dict(times), idle


def products(config: Any, tokens: int) -> list[tuple[int, int, int, int, int]]:
    """(how many, experts, rows, in, out) of the products with one layer's matrices."""
    D, F, K = config.hidden_size, config.intermediate_size, config.head_dim
    H, Hkv = config.num_attention_heads, config.num_key_value_heads
    found = [(1, 1, tokens, D, H * K), (2, 1, tokens, D, Hkv * K), (1, 1, tokens, H * K, D)]
    if not hasattr(config, "num_experts"):
        return [*found, (2, 1, tokens, D, F), (1, 1, tokens, F, D)]
    E, F = config.num_experts, config.moe_intermediate_size
    rows = math.ceil(tokens * config.num_experts_per_tok / E)
    return [*found, (1, E, rows, D, 2 * F), (1, E, rows, F, D)]


def floor(config: Any, mode: str, batch: int, seq: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of what every implementation of this step computes, each piece timed alone."""
    tokens, layers, trained = batch * seq, config.num_hidden_layers, mode == "full"
    with torch.device(device):
        linear = sum(n * product_ms(e, r, i, o, trained, dtype) for n, e, r, i, o in products(config, tokens))
        head = product_ms(1, tokens, config.hidden_size, config.vocab_size, trained, dtype)
        attention = attention_ms(config, batch, seq, device, dtype)
    found: dict[str, float] = {"linear_ms": layers * linear, "attention_ms": layers * attention, "head_ms": head}
    return found | {"ms": sum(found.values())}


def product_ms(experts: int, rows: int, wide: int, out: int, trained: bool, dtype: torch.dtype) -> float:
    """Forward, gradient of the input, and of the weight where that is trained."""
    x, w, dy = (torch.randn(experts, *s, dtype=dtype) for s in ((rows, wide), (out, wide), (rows, out)))
    if experts == 1:
        x, w, dy = x[0], w[0], dy[0]
    device = x.device.type
    us = clock_us(lambda: x @ w.mT, device) + clock_us(lambda: dy @ w, device)
    return (us + (clock_us(lambda: dy.mT @ x, device) if trained else 0.0)) / 1e3


def attention_ms(config: Any, batch: int, seq: int, device: str, dtype: torch.dtype) -> float:
    """Causal attention, forward and backward, by the faster of torch's two backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    heads, kv = config.num_attention_heads, config.num_key_value_heads
    q, k, v = (torch.randn(batch, n, seq, config.head_dim, dtype=dtype, requires_grad=True) for n in (heads, kv, kv))
    times = []
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if device == "cuda" else (SDPBackend.MATH,)
    for backend in backends:
        with sdpa_kernel(backend), contextlib.suppress(RuntimeError):  # not every head size has both
            out = sdpa(q, k, v, is_causal=True, enable_gqa=True)
            dy = torch.randn_like(out)
            us = clock_us(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True), device)
            back = lambda o=out, do=dy: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)  # noqa: E731
            times.append(us + clock_us(back, device))
    return min(times) / 1e3


def clock_us(fn: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        return harness.time_us(fn)
    walls = []
    for _ in range(3):
        begun = time.perf_counter()
        fn()
        walls.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(walls)


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """A stacked bar for each row, and its floor's beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        name = f"{row['model']} {row['mode']}\n{row['stack']}"
        bars[name] = row["parts_ms"] | {"idle": row["idle_ms"]}
        least = row["floor"]
        bars[name + "'s floor"] = {"GEMM": least["linear_ms"] + least["head_ms"], "attention": least["attention_ms"]}
    order = (
        "GEMM",
        "attention",
        "fused: ",
        "Inductor",
        "optimizer",
        "bitsandbytes",
        "copies",
        kernel_names.REST,
        "idle",
    )
    place = lambda kind: next(i for i, start in enumerate(order) if kind.startswith(start))  # noqa: E731
    kinds = sorted({k for parts in bars.values() for k in parts}, key=lambda k: (place(k), k))
    figure, axes = pyplot.subplots(figsize=(2 + 1.3 * len(bars), 6))
    below = [0.0] * len(bars)
    for i, kind in enumerate(kinds):
        heights = [parts.get(kind, 0.0) for parts in bars.values()]
        colour = "0.85" if kind == "idle" else pyplot.get_cmap("tab20")(i % 20)
        axes.bar(list(bars), heights, bottom=below, label=kind, color=colour)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set(ylabel="ms per step", ylim=(0, 1.05 * max(below)))
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def show(row: dict[str, Any]) -> str:
    lines = [f"{kind:28} {ms:9.2f} ms {row['launches'][kind]:7.0f} launches" for kind, ms in row["parts_ms"].items()]
    lines += [f"{'idle':28} {row['idle_ms']:9.2f} ms", f"{'all':28} {row['recorded_ms']:9.2f} ms recorded"]
    lines += [f"{'undisturbed':28} {row['ms']:9.2f} ms, the floor {row['floor']['ms']:.2f} ms"]
    return "\n".join(lines + [f"{k['ms']:9.2f} ms {k['launches']:6.0f} x {k['kernel'][:100]}" for k in row["top"]])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps.add_arguments(parser, list(_shapes.MODELS), steps=5)
    parser.add_argument("--mode", choices=steps.MODES, default="qlora")
    parser.add_argument("--stacks", default="fused", help=f"some of {', '.join(_stacks.spellings())}")
    parser.add_argument("--draw", action="store_true", help="draw what bench/results has, measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    steps.shrink(options)
    if options.one:
        records.print_row(lambda: measure(options))
        return
    stacks = [str(s) for s in options.stacks.split(",") if _stacks.Stack.parse(s)]
    kept = records.Rows("breakdown", KEY, saved=not options.tiny)
    about = records.provenance("breakdown.py", arguments) | ({"device": "cpu"} if options.device == "cpu" else {})
    layers = _shapes.config_of(options.model, options.layers, options.tiny).num_hidden_layers
    ends = time.perf_counter() + options.seconds
    for stack in [] if options.draw else stacks:
        row = {"model": options.model, "mode": options.mode, "stack": stack, "layers": layers}
        row |= {name: getattr(options, name) for name in ("batch", "seq", "dtype")} | about
        left = ends - time.perf_counter()
        late = left < expected_s(_stacks.Stack.parse(stack), layers, None) + FLOOR_S
        if late or (kept.measured(row) and not options.again):
            print(f"{stack}: {f'not started, {left:.0f} s left' if late else 'measured at this commit'}")
            continue
        own = ["--one", stack, "--mode", options.mode, *steps.passed_on(options)]
        row |= records.in_own_process("breakdown.py", own, min(options.limit_s, left))
        kept.add(row)
        print(show(row) if "parts_ms" in row else "", flush=True)
    drawn = [r for r in kept.rows if "parts_ms" in r]
    if drawn and kept.saved:
        draw(drawn, harness.folder() / PICTURE)


if __name__ == "__main__":
    main()
