"""Whole training steps: Hugging Face + PEFT + bitsandbytes eagerly, compiled, under peers, and fused.

    python bench/model.py --model llama3-8b --mode qlora --stacks eager,inductor-per-layer,liger,unsloth,fused
    python bench/model.py --quick                                                  # two layers, full and lora
    python bench/model.py --tiny --device cpu --layers 2 --stacks eager,fused      # a dry run without a GPU

One step is forward, backward and fused AdamW on random tokens that are their own labels. LoRA has rank 16 on all seven
projections, no dropout, fp32 adapters under bf16 autocast. Every stack has a process of its own and the same weights,
so the first step's loss and gradient norm must agree between stacks up to rounding. Attention is SDPA with is_causal
and no mask in every stack, through a function for which transformers builds none (unsloth: its own).

`STACK+checkpointing` recomputes every decoder layer (for unsloth: its own, offloaded). Rows are added to
bench/results/model.json, or to $OUT/model.json where that is set: a list of stacks may be spread over several commands.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any

import _harness as harness
import _models
import torch

STACKS = ("eager", "eager+checkpointing", "inductor-per-layer", "liger", "unsloth", "fused")
KNOWN = ("eager", "inductor", "inductor-per-layer", "liger", "unsloth", "fused")
MODES = ("qlora", "lora", "full")
QUICK = {"mode": "full,lora", "layers": 2, "stacks": "eager,inductor,fused"}
WARM_UP = 3
# What makes two rows measurements of the same thing: the later one replaces the earlier one.
KEY = ("model", "mode", "layers", "batch", "seq", "dtype", "device", "stack")
PACKAGES = ("transformers", "peft", "bitsandbytes", "accelerate", "liger_kernel", "unsloth", "unsloth_zoo")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One stack in this process: build, compile, warm up, time, and perhaps profile."""
    stack, device = options.one, options.device
    _models.import_first(stack, device)
    compiled = _fused_log()
    started = time.perf_counter()
    config = _models.config_of(options.model, options.layers, options.tiny)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    model = _models.build(stack, config, options.mode, dtype, device, options.seq)
    _synchronize(device)
    row: dict[str, Any] = {"build_s": time.perf_counter() - started, **_memory(device, "build_peak_GiB")}
    step, trained = _training_step(model, config, options)
    walls: list[float] = []
    for i in range(WARM_UP):
        begun = time.perf_counter()
        loss, norm = step(i, with_norm=i == 0)
        _synchronize(device)
        walls.append(time.perf_counter() - begun)
        if i == 0:
            row |= {"loss": loss.item(), "grad_norm": norm.item(), "trained": trained}
    row |= _timed(lambda i: step(WARM_UP + i), options.steps, device)
    # What the warm-up took beyond plain steps: compilation, autotuning, first launches.
    row |= {"first_step_s": walls[0], "compile_s": max(0.0, sum(walls) - len(walls) * row["ms"] / 1e3)}
    row |= _graphs(compiled)
    if options.profile:
        _profile(lambda: step(0), stack, options)
    return row


def _training_step(
    model: Any, config: Any, options: argparse.Namespace, with_state: bool = False
) -> tuple[Callable[..., Any], int]:
    """A function that makes step i and returns its loss, with the gradient norm if asked; number of trained weights.

    with_state  AdamW's moments are there before the first step, made by one of zero gradients, which changes no weight
    """
    device = options.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)
    if with_state:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    # As Trainer(bf16=True) does: autocast is what brings fp32 adapters to the dtype of the rest.
    mixed = options.mode != "full" and options.dtype == "bf16"
    generator = torch.Generator(device).manual_seed(0)
    shape = (WARM_UP + options.steps, options.batch, options.seq)
    ids = torch.randint(5, config.vocab_size, shape, device=device, generator=generator)

    def step(i: int, with_norm: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device, torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = model(input_ids=ids[i], labels=ids[i]).loss
        loss.backward()
        norm = torch.zeros(())
        if with_norm:
            norm = torch.stack([p.grad.float().norm() for p in parameters if p.grad is not None]).norm()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    return step, sum(p.numel() for p in parameters)


def _timed(step: Callable[[int], Any], steps: int, device: str) -> dict[str, Any]:
    """Milliseconds per step, from one step's start to the next one's, with no host synchronisation between them."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() / 2**30
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        step(0)  # refills the allocator's cache, which was emptied so that the peak is that of the steps alone
        marks[0].record()
        for i in range(steps):
            step(i)
            marks[i + 1].record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        memory = {"held_GiB": held} | _memory(device, "peak_GiB")
    else:
        walls = [time.perf_counter()]
        for i in range(steps):
            step(i)
            walls.append(time.perf_counter())
        times = [1e3 * (b - a) for a, b in itertools.pairwise(walls)]
        memory = {}
    return {"ms": statistics.median(times), "ms_low": min(times), "ms_high": max(times), "steps": steps, **memory}


def _memory(device: str, name: str) -> dict[str, float]:
    return {name: torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _fused_log() -> list[str]:
    """What the backend logs of each graph, `fused rms_norm 65/65, ...`, gathered as it comes."""
    lines: list[str] = []

    class Gather(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("fused_backend")
    logger.setLevel(logging.INFO)
    logger.addHandler(Gather())
    return lines


def _graphs(compiled: list[str]) -> dict[str, Any]:
    from torch._dynamo.utils import compilation_time_metrics, counters

    phases = {name: round(sum(times), 1) for name, times in compilation_time_metrics.items()}
    row: dict[str, Any] = {
        "graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values()),
        "compile_phases_s": {name: seconds for name, seconds in phases.items() if seconds >= 1},
    }  # fmt: skip
    return row | ({"fused": compiled} if compiled else {})


def _profile(step: Callable[[], Any], stack: str, options: argparse.Namespace) -> None:
    """Print the 25 kernels of one step with the largest total time (on a CPU: operators, by their own time)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = options.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        begun = time.perf_counter()
        step()
        _synchronize(options.device)
        wall_ms = 1e3 * (time.perf_counter() - begun)
    totals: dict[str, list[float]] = {}
    events = [e for e in profiler.events() or [] if not getattr(e, "is_user_annotation", False)]
    for event in events:
        if not on_gpu or event.device_type == DeviceType.CUDA:
            us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            total = totals.setdefault(event.name, [0, 0.0])
            total[0] += 1
            total[1] += us / 1e3
    busy = sum(ms for _, ms in totals.values()) or 1.0
    lines = [f"{options.model} {options.mode} {stack}: {wall_ms:.1f} ms under the profiler, {busy:.1f} ms in kernels"]
    for name, (count, ms) in sorted(totals.items(), key=lambda item: -item[1][1])[:25]:
        lines.append(f"{ms:10.2f} ms {100 * ms / busy:5.1f} % {int(count):6d} x  {name[:150]}")
    print("\n".join(lines), flush=True)
    if "OUT" in os.environ:
        path = pathlib.Path(os.environ["OUT"]) / f"profile_{options.model}_{options.mode}_{stack}.txt"
        path.write_text("\n".join(lines) + "\n")


def in_own_process(stack: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one stack, measured by a fresh interpreter, or the reason why there is none."""
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--one", stack, "--mode", mode]
    for name in ("model", "layers", "batch", "seq", "steps", "dtype", "device"):
        value = getattr(options, name)
        command += [f"--{name}", str(value)] if value is not None else []
    command += ["--tiny"] * options.tiny + ["--profile"] * options.profile
    # A process group of its own, so that compiler workers are stopped along with it.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    try:
        text, _ = child.communicate(timeout=options.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return {"failed": f"stopped after {options.limit_s:.0f} s"}
    lines = text.splitlines()
    found = [line for line in lines if line.startswith("ROW ")]
    row = json.loads(found[-1][4:]) if found else {"failed": f"ended with {child.returncode}: {' | '.join(lines[-2:])}"}
    if options.profile or "failed" in row:
        print("\n".join(line for line in lines[-60:] if not line.startswith("ROW ")), flush=True)
    return row


def _one(options: argparse.Namespace) -> dict[str, Any]:
    try:
        row = measure(options)
    except Exception as error:  # a missing or failing peer is a row too
        traceback.print_exc()
        row = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    print("ROW " + json.dumps(row), flush=True)
    return row


def provenance() -> dict[str, Any]:
    """What a row depends on, kept with it: rows of one file may come from several commands."""
    found: dict[str, Any] = dict(harness.machine())
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return found


def merge(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with `new` in the place of an earlier measurement of the same thing."""
    return [row for row in rows if any(row.get(k) != new[k] for k in KEY)] + [new]


def earlier_rows(name: str) -> list[dict[str, Any]]:
    """The rows measured before: those of this $OUT, else those of the repository."""
    for folder in (pathlib.Path(os.environ.get("OUT", harness.RESULTS)), harness.RESULTS):
        if (folder / f"{name}.json").exists():
            rows = json.loads((folder / f"{name}.json").read_text())["rows"]
            return [row for row in rows if "mode" in row]
    return []


def compare(rows: list[dict[str, Any]]) -> str:
    """One line for each stack: time, memory, the first step's numbers, and ratios to eager where it was measured."""
    lines = []
    for row in rows:
        title = f"{row['model']} {row['mode']} {row['dtype']} L{row['layers']} B{row['batch']} S{row['seq']}"
        title += f" {row['stack']:<20}"
        if "failed" in row:
            lines.append(f"{title} failed: {row['failed'][:150]}")
            continue
        same = [r for r in rows if r["stack"] == "eager" and all(r[k] == row[k] for k in KEY[:-1]) and "ms" in r]
        line = f"{title} {row['ms']:9.2f} ms ({row['ms_low']:.2f} to {row['ms_high']:.2f})"
        line += f" {row['peak_GiB']:7.2f} GiB" if "peak_GiB" in row else ""
        line += f"  loss {row['loss']:.5f} gradient {row['grad_norm']:.6f}  compile {row['compile_s']:.1f} s"
        for eager in same:
            line += f"  of eager: time {row['ms'] / eager['ms']:.3f}"
            line += f", peak {row['peak_GiB'] / eager['peak_GiB']:.3f}" if "peak_GiB" in row else ""
        lines.append(line)
    return "\n".join(lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(_models.MODELS), default="llama3-8b")
    parser.add_argument("--mode", default="qlora", help=f"one or more of {', '.join(MODES)}")
    parser.add_argument("--stacks", default=",".join(STACKS), help=f"of {', '.join(KNOWN)}, each also +checkpointing")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=420.0, help="a stack is stopped after so many seconds")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of one step, to $OUT too")
    parser.add_argument("--tiny", action="store_true", help="small sizes; saved only where $OUT is set")
    parser.add_argument("--quick", action="store_true", help=f"defaults for a short run: {QUICK}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.batch, options.seq = min(options.batch, 2), min(options.seq, 64)
    for mode in options.mode.split(","):
        if mode not in MODES:
            parser.error(f"--mode {mode}: not one of {', '.join(MODES)}")
    for stack in options.stacks.split(","):
        if stack.removesuffix("+checkpointing") not in KNOWN:
            parser.error(f"--stacks {stack}: not one of {', '.join(KNOWN)}")
    return options


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    options = _parse(arguments)
    if options.one:
        return [_one(options)]
    file = "model_tiny" if options.tiny else "model"
    shown = shlex.join(sys.argv[1:] if arguments is None else arguments)
    about = {"command": f"python bench/model.py {shown}".strip(), **provenance()}
    layers = _models.config_of(options.model, options.layers, options.tiny).num_hidden_layers
    if options.device == "cpu":
        about["device"] = "cpu"
    rows = earlier_rows(file)
    measured: list[tuple[Any, ...]] = []
    for mode in options.mode.split(","):
        for stack in options.stacks.split(","):
            row: dict[str, Any] = {"model": options.model, "mode": mode, "stack": stack, "layers": layers}
            row |= {name: getattr(options, name) for name in ("batch", "seq", "dtype")}
            row["attention"] = "unsloth's own" if stack.startswith("unsloth") else "is_causal, no mask"
            row |= in_own_process(stack, mode, options)
            harness.report(row, [])
            rows = merge(rows, row | about)
            measured.append((mode, stack))
            if not options.tiny or "OUT" in os.environ:
                harness.save(file, rows)  # after every stack: a run may be stopped at a time limit
    print("\n" + compare([row for row in rows if row["model"] == options.model]))
    return [r for r in rows if (r["mode"], r["stack"]) in measured]


if __name__ == "__main__":
    main()
