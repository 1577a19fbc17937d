"""Memory budgets on a GPU: a step at each of them, the peak and time that were predicted beside those measured.

    python bench/budget.py --model llama3-8b --mode qlora --budgets none,20GiB,11.6GiB
    python bench/budget.py --tiny --device cpu --layers 3 --budgets none,6MiB       # a dry run without a GPU

The model is traced once, and the one graph is compiled for every budget in turn. AdamW's state is there before the
first of them, so that plans count it. Rows go to bench/results/budget.json (or $OUT), `--draw` makes the picture there.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import _harness as harness
import _records as records
import _shapes
import _stacks
import _steps as steps
import torch

PICTURE = "budget.png"


class Sweep:
    """A backend that compiles one graph for several budgets; `now` says which of them runs."""

    def __init__(self, budgets: list[str], device: str, host: str | None = None) -> None:
        self.budgets, self.host = budgets, host
        self.lowering = "inductor" if device == "cuda" else "aot_eager"
        self.now, self.plans, self.made, self.compile_s = 0, {}, {}, {}
        self.graph: Any = None

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        self.graph = gm, example_inputs

        def run(*args: Any) -> Any:
            # Compiled where it is first needed: the allocator then holds what it holds in training.
            if self.now not in self.made:
                self.made[self.now] = self._compiled(*self.graph)
            return self.made[self.now](*args)

        return run

    def _compiled(self, gm: Any, example_inputs: Any) -> Any:
        from fused_backend.compiler.backend import lower, rewrite
        from fused_backend.compiler.bodies import backup
        from fused_backend.compiler.budget import Request
        from fused_backend.compiler.options import Options

        given = self.budgets[self.now]
        options = Options(None if given == "none" else given, self.host, lowering=self.lowering)
        restore, begun, request = backup(gm), time.perf_counter(), Request.of(options, gm)
        try:
            _, finish = rewrite(gm, options)
            return finish(lower(gm, example_inputs, options, None, request))
        finally:
            restore()
            self.plans[self.now] = request.made[-1] if request is not None and request.made else None
            self.compile_s[self.now] = time.perf_counter() - begun


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = _shapes.config_of(options.model, options.layers, options.tiny)
    dtype = torch.bfloat16
    model = _stacks.build(_stacks.Stack("eager"), config, options.mode, dtype, options.device, options.seq)
    sweep = Sweep(options.budgets.split(","), options.device)
    step, _ = steps.training_step(model, config, options, with_state=True)
    model.compile(backend=sweep)
    none_ms = None
    for i, budget in enumerate(sweep.budgets):
        sweep.now = i
        row = {
            "model": options.model, "mode": options.mode, "layers": config.num_hidden_layers, "budget": budget,
            "batch": options.batch, "seq": options.seq,
        }  # fmt: skip
        try:
            loss, norm = step(0, with_norm=True)
            row |= {"loss": loss.item(), "grad_norm": norm.item()}
            step(1)
            row |= steps.timed(lambda at: step(2 + at), options.steps, options.device)
            none_ms = row["ms"] if budget == "none" else none_ms
            row |= {"none_ms": none_ms}  # of the same run, for ratios
        except Exception as error:  # a budget that is refused is a row too
            row["failed"] = " ".join(str(error).split("\n\n")[0].split())[:300]
        row["compile_s"] = sweep.compile_s.get(sweep.now, 0.0)
        row |= predicted(sweep.plans.get(sweep.now))
        sweep.made.pop(sweep.now, None)
        yield row


def predicted(plan: Any) -> dict[str, Any]:
    """What a plan says of the step, beside what is measured of it."""
    if plan is None:
        return {}
    return {
        "predicted_peak_GiB": plan.peak / 2**30, "predicted_ms": 1e3 * plan.seconds,
        "predicted_extra_ms": 1e3 * plan.extra_seconds, "gap": plan.gap, "host_GiB": plan.host / 2**30,
        "peak_at": plan.peak_at, "planning_s": plan.planning_seconds,
        "kinds": [
            [r.name, r.kept, r.recomputed, r.offloaded]
            for r in plan.kinds
            if r.kept + r.recomputed + r.offloaded > 2**20
        ],
    }  # fmt: skip


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys((r["model"], r["mode"]) for r in rows):
        mine = sorted(
            (r for r in rows if (r["model"], r["mode"]) == name and "peak_GiB" in r), key=lambda r: r["peak_GiB"]
        )
        axes.plot([r["peak_GiB"] for r in mine], [r["ms"] for r in mine], "o-", label=f"{' '.join(name)}, measured")
    axes.set(xlabel="allocator peak, GiB", ylabel="ms per step")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(_shapes.MODELS), default="llama3-8b")
    parser.add_argument("--mode", choices=steps.MODES, default="qlora")
    parser.add_argument("--budgets", default="none,26GiB,20GiB,16GiB,13GiB,11.6GiB,10GiB")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--draw", action="store_true", help="draw what bench/results has, measure nothing")
    options = parser.parse_args(arguments)
    if options.draw:
        rows = json.loads((harness.RESULTS / "budget.json").read_text())["rows"]
        draw(rows, harness.RESULTS / PICTURE)
        return
    about = records.provenance("budget.py", arguments)
    kept = records.Rows("budget", ("model", "mode", "layers", "batch", "seq", "budget"), saved=not options.tiny)
    for row in measure(options):
        kept.add(row | about)


if __name__ == "__main__":
    main()
