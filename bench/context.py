"""How long one sequence can be: QLoRA steps of B1 under memory budgets that keep, make again and offload activations.

    python bench/context.py --budgets 24GiB,80GiB,auto --lengths 32768,65536,131072
    python bench/context.py --budgets 24GiB --longest            # the longest that fits, found by halving
    python bench/context.py --tiny --device cpu --layers 2 --budgets 3MiB,8MiB --longest     # a dry run without a GPU

`auto` is what the GPU has free. Lengths go beyond the positions that the published configuration names, which changes
what the numbers mean and not what they cost. Every step has a process of its own with a time limit, and every row is
written as it comes; what this commit has measured is not measured again, so that the same command goes on where the
last one was stopped, with --longest too. Rows go to bench/results/context.json, or to $OUT.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import _records as records
import _shapes
import _stacks
import _steps as steps
import torch
from budget import Sweep, predicted

KEY = ("model", "mode", "layers", "batch", "seq", "dtype", "device", "budget", "host_budget")
LENGTHS = {False: (32768, 65536, 131072), True: (64, 128)}
GRAIN = {False: 8192, True: 32}  # --longest tries multiples of this
MOST = 2**20


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One length under one budget; with no timed steps only whether a step fits."""
    config, device = _shapes.config_of(options.model, options.layers, options.tiny), options.device
    dtype = steps.DTYPES[options.dtype]
    model = _stacks.build(_stacks.Stack("eager"), config, options.mode, dtype, device, options.seq)
    sweep = Sweep([options.one], device, options.host_budget)
    step, _ = steps.training_step(model, config, options, with_state=True)
    model.compile(backend=sweep)
    row: dict[str, Any] = {}
    try:
        loss, norm = step(0, with_norm=True)
        row |= {"fits": True, "loss": loss.item(), "grad_norm": norm.item()} | steps.memory(device, "peak_GiB")
        if options.steps:
            row |= steps.timed(lambda i: step(1 + i), options.steps, device)
            row["tokens_per_s"] = 1e3 * options.batch * options.seq / row["ms"]
    except Exception as error:
        if not isinstance(error, torch.OutOfMemoryError) and "memory_budget" not in str(error):
            raise
        row = {"fits": False, "failed": " ".join(str(error).split("\n\n")[0].split())[:300]}
    return row | {"compile_s": sweep.compile_s.get(0, 0.0)} | predicted(sweep.plans.get(0))


def longest(fits: Callable[[int], bool | None], grain: int, start: int) -> tuple[int, int] | None:
    """(the longest length that fits, the shortest tried that does not), multiples of `grain`, by doubling and halving.

    fits  None where that cannot be told, which ends the search without an answer
    """
    low, high = 0, start
    while high < MOST and (known := fits(high)):
        low, high = high, 2 * high
    if high >= MOST:
        return low, high
    while known is not None and high - low > grain:
        middle = (low + high) // 2 // grain * grain
        known = fits(middle)
        low, high = (middle, high) if known else (low, middle)
    return None if known is None else (low, high)


def expected_s(seq: int, layers: int, timed: int) -> float:
    """Seconds of one process on an H200: a guess from Llama-3-8B's shorter steps, products and attention apart."""
    step = layers / 32 * (0.5 * seq / 8192 + 0.04 * (seq / 4096) ** 2)
    return 70 + step * (2 + timed if timed else 1)


class Runs:
    """Measures what no row of this commit tells yet, as long as there is time."""

    def __init__(self, options: argparse.Namespace, arguments: list[str] | None) -> None:
        self.options, self.ends = options, time.perf_counter() + options.seconds
        self.kept = records.Rows("context", KEY, saved=not options.tiny)
        layers = _shapes.config_of(options.model, options.layers, options.tiny).num_hidden_layers
        self.common = {"model": options.model, "mode": options.mode, "layers": layers, "batch": options.batch}
        self.common |= {"dtype": options.dtype, "host_budget": options.host_budget}
        self.common |= records.provenance("context.py", arguments)
        self.common |= {"device": "cpu"} if options.device == "cpu" else {}

    def row(self, budget: str, seq: int, timed: int) -> dict[str, Any]:
        row = self.common | {"budget": budget, "seq": seq}
        known = None if self.options.again else self.kept.measured(row)
        if known and ("ms" in known or "failed" in known or not timed):
            return known
        left = self.ends - time.perf_counter()
        if left < (takes := expected_s(seq, row["layers"], timed)):
            print(f"{budget}, {seq} tokens not started: {left:.0f} s left, it takes about {takes:.0f} s", flush=True)
            return row | {"stopped": "no time left"}
        given = argparse.Namespace(**(vars(self.options) | {"seq": seq, "steps": timed}))
        own = ["--one", budget, "--mode", self.options.mode, *steps.passed_on(given)]
        own += ["--host-budget", self.options.host_budget] if self.options.host_budget else []
        row |= records.in_own_process("context.py", own, min(self.options.limit_s, left))
        self.kept.add(row)
        return row

    def fits(self, budget: str, seq: int) -> bool | None:
        return self.row(budget, seq, 0).get("fits")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps.add_arguments(parser, list(_shapes.MODELS), batch=1, steps=1)
    parser.add_argument("--mode", choices=steps.MODES, default="qlora")
    parser.add_argument("--budgets", default="24GiB,80GiB,auto")
    parser.add_argument("--host-budget", help="host memory for activations, as the backend's option takes it")
    parser.add_argument("--lengths", help="tokens of the one sequence, several with commas")
    parser.add_argument("--longest", action="store_true", help="find the longest length that fits each budget")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        records.print_row(lambda: measure(options))
        return
    from tqdm import tqdm

    lengths = [int(n) for n in options.lengths.split(",")] if options.lengths else LENGTHS[options.tiny]
    runs, budgets = Runs(options, arguments), options.budgets.split(",")
    todo = [(b, 0) for b in budgets] if options.longest else [(b, n) for n in lengths for b in budgets]
    for budget, seq in tqdm(todo, desc="context", unit="row"):
        if options.longest:
            found = longest(lambda n, b=budget: runs.fits(b, n), GRAIN[options.tiny], lengths[0])
            answer = "not found in this time" if found is None else f"{found[0]} tokens fit, {found[1]} do not"
            print(f"{options.model} {options.mode} under {budget}: {answer}", flush=True)
        else:
            runs.row(budget, seq, options.steps)


if __name__ == "__main__":
    main()
