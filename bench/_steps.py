"""One training step of a model, its milliseconds and its memory: forward, backward and AdamW on random tokens.

The tokens are their own labels. LoRA trains fp32 adapters under bf16 autocast, as Trainer(bf16=True) does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

MODES = ("qlora", "lora", "full")
WARM_UP = 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def training_step(
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
    # Autocast is what brings fp32 adapters to the dtype of the rest.
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


def warmed_up(step: Callable[..., Any], device: str) -> tuple[dict[str, Any], list[float]]:
    """Loss and gradient norm of the first step, and the seconds of the steps that compile and fill caches."""
    walls: list[float] = []
    first: dict[str, Any] = {}
    for i in range(WARM_UP):
        begun = time.perf_counter()
        loss, norm = step(i, with_norm=i == 0)
        synchronize(device)
        walls.append(time.perf_counter() - begun)
        first = first or {"loss": loss.item(), "grad_norm": norm.item()}
    return first, walls


def timed(step: Callable[[int], Any], steps: int, device: str) -> dict[str, Any]:
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
        used = {"held_GiB": held} | memory(device, "peak_GiB")
    else:
        walls = [time.perf_counter()]
        for i in range(steps):
            step(i)
            walls.append(time.perf_counter())
        times = [1e3 * (b - a) for a, b in itertools.pairwise(walls)]
        used = {}
    return {"ms": statistics.median(times), "ms_low": min(times), "ms_high": max(times), "steps": steps, **used}


def memory(device: str, name: str) -> dict[str, float]:
    return {name: torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def fused_log() -> list[str]:
    """What the backend logs of each graph, `fused rms_norm 65/65, ...`, gathered as it comes."""
    lines: list[str] = []

    class Gather(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("fused_backend")
    logger.setLevel(logging.INFO)
    logger.addHandler(Gather())
    return lines


def graphs(compiled: list[str]) -> dict[str, Any]:
    """How a stack was compiled: graphs, breaks, phases, and whether Inductor's chunker found something to chunk."""
    from torch._dynamo.utils import compilation_time_metrics, counters
    from torch._inductor import config, metrics

    phases = {name: round(sum(times), 1) for name, times in compilation_time_metrics.items()}
    row: dict[str, Any] = {
        "graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values()),
        "compile_phases_s": {name: seconds for name, seconds in phases.items() if seconds >= 1},
    }  # fmt: skip
    if getattr(getattr(config, "auto_chunker", None), "enable", False):
        row["auto_chunked"] = getattr(metrics, "num_auto_chunking", None)
    return row | ({"fused": compiled} if compiled else {})


def add_arguments(parser: argparse.ArgumentParser, models: list[str], batch: int = 2, steps: int = 10) -> None:
    """What every benchmark of whole steps can be told."""
    parser.add_argument("--model", choices=models, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=steps, help="timed steps")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=420.0, help="a process is stopped after so many seconds")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing that would not end within so many")
    parser.add_argument("--again", action="store_true", help="measure also what has a row of this commit")
    parser.add_argument("--tiny", action="store_true", help="small sizes; saved only where $OUT is set")


def shrink(options: argparse.Namespace) -> None:
    if options.tiny:
        options.batch, options.seq = min(options.batch, 2), min(options.seq, 64)


def passed_on(options: argparse.Namespace) -> list[str]:
    """The arguments of `add_arguments` that describe what one process is to measure."""
    arguments: list[str] = []
    for name in ("model", "layers", "batch", "seq", "steps", "dtype", "device"):
        value = getattr(options, name)
        arguments += [f"--{name}", str(value)] if value is not None else []
    return arguments + ["--tiny"] * options.tiny
