"""Whole training steps: Hugging Face + PEFT + bitsandbytes eagerly, compiled, under peers, and fused.

    python bench/model.py --model llama3-8b --mode qlora --stacks eager,inductor-per-layer,liger,unsloth,fused
    python bench/model.py --model qwen3-4b --mode full --stacks all --seconds 570   # what fits into so many seconds
    python bench/model.py --quick                                                   # two layers, full and lora
    python bench/model.py --tiny --device cpu --layers 2 --stacks eager,fused       # a dry run without a GPU

One step is forward, backward and fused AdamW on random tokens that are their own labels. LoRA has rank 16 on all the
projections there are, no dropout, fp32 adapters under bf16 autocast. Every stack has a process of its own and the same
weights, so the first step's loss and gradient norm must agree between stacks up to rounding. Attention is SDPA with
is_causal and no mask in every stack, through a function for which transformers builds none; eager attention under
transformers' masks for a model that caps its scores (Gemma 2); for unsloth its own.

Rows are added to bench/results/model.json, or to $OUT/model.json where that is set, after every stack; those that this
commit has measured are not measured again, so a list that was cut short is finished by the same command.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import _records as records
import _shapes
import _stacks
import _steps as steps

EVERY = (
    "fused", "eager", "liger", "inductor-per-layer", "unsloth", "eager+checkpointing", "unsloth+checkpointing",
    "fused@11.6GiB", "inductor", "inductor+auto-chunker", "liger+inductor",
)  # fmt: skip
QUICK = {"mode": "full,lora", "layers": 2, "stacks": "eager,inductor,fused"}
KEY = ("model", "mode", "layers", "batch", "seq", "dtype", "device", "stack")
# Seconds until a stack that was never measured has its row, on one H200: imports and weights, then for each layer
# what compiles it. Only a guess, by which a list is cut to the time there is.
START_S = 30
LAYER_S = {"eager": 0.6, "liger": 0.7, "inductor": 7.0, "inductor-per-layer": 1.2, "unsloth": 1.5, "fused": 2.6}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One stack in this process: build, compile, warm up, time."""
    stack, device = _stacks.Stack.parse(options.one), options.device
    _stacks.import_first(stack, device)
    compiled = steps.fused_log()
    started = time.perf_counter()
    config = _shapes.config_of(options.model, options.layers, options.tiny)
    model = _stacks.build(stack, config, options.mode, steps.DTYPES[options.dtype], device, options.seq)
    steps.synchronize(device)
    row: dict[str, Any] = {"build_s": time.perf_counter() - started, **steps.memory(device, "build_peak_GiB")}
    # A plan counts the optimizer's state that it finds.
    step, trained = steps.training_step(model, config, options, with_state=stack.budget is not None)
    first, walls = steps.warmed_up(step, device)
    row |= first | {"trained": trained}
    row |= steps.timed(lambda i: step(steps.WARM_UP + i), options.steps, device)
    # What the warm-up took beyond plain steps: compilation, autotuning, first launches.
    row |= {"first_step_s": walls[0], "compile_s": max(0.0, sum(walls) - len(walls) * row["ms"] / 1e3)}
    return row | steps.graphs(compiled)


def attention_name(stack: str, config: Any) -> str:
    if stack.startswith("unsloth"):
        return "unsloth's own"
    return "is_causal, no mask" if _shapes.attention_of(config) == _shapes.ATTENTION else "eager, masks, softcap"


def expected_s(stack: _stacks.Stack, layers: int, earlier: dict[str, Any] | None) -> float:
    """Seconds from a process's start to its row."""
    if earlier and "ms" in earlier and "process_s" in earlier:
        return earlier["process_s"]
    engine = "inductor" if "inductor" in stack.extras else stack.engine
    return START_S + layers * LAYER_S[engine]


def planned(options: argparse.Namespace, kept: records.Rows, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that are still to be measured, as far as they are known before, with the seconds each may take."""
    config = _shapes.config_of(options.model, options.layers, options.tiny)
    rows = []
    for mode in options.mode.split(","):
        for stack in options.stacks.split(","):
            row = {"model": options.model, "mode": mode, "stack": stack, "layers": config.num_hidden_layers}
            row |= {name: getattr(options, name) for name in ("batch", "seq", "dtype")}
            row |= {"attention": attention_name(stack, config)} | about
            if options.again or not kept.measured(row):
                seconds = expected_s(_stacks.Stack.parse(stack), config.num_hidden_layers, kept.find(row))
                rows.append(row | {"expected_s": seconds})
    return rows


def ratios(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Time and peak of one row over another's; in brackets between the extremes of their steps."""
    low, high = row["ms_low"] / other["ms_high"], row["ms_high"] / other["ms_low"]
    text = f"{row['ms'] / other['ms']:.3f} ({low:.3f} to {high:.3f})"
    return text + (f", peak {row['peak_GiB'] / other['peak_GiB']:.3f}" if "peak_GiB" in row else "")


def compare(rows: list[dict[str, Any]]) -> str:
    """One line for each stack: time, memory, the first step's numbers, ratios to eager; then fused over every peer."""
    lines = []
    for row in rows:
        title = f"{row['model']} {row['mode']} {row['dtype']} L{row['layers']} B{row['batch']} S{row['seq']}"
        title += f" {row['stack']:<22}"
        if "ms" not in row:
            lines.append(f"{title} {outcome(row)[:150]}")
            continue
        line = f"{title} {row['ms']:9.2f} ms ({row['ms_low']:.2f} to {row['ms_high']:.2f})"
        line += f" {row['peak_GiB']:7.2f} GiB" if "peak_GiB" in row else ""
        line += f"  loss {row['loss']:.5f} gradient {row['grad_norm']:.6f}  compile {row['compile_s']:.1f} s"
        lines += [line] + [f"{'':>{len(title)}} of eager: {ratios(row, r)}" for r in beside(row, rows, ("eager",))]
    for ours in [r for r in rows if r["stack"].startswith("fused") and "ms" in r]:
        peers = [r for r in beside(ours, rows) if not r["stack"].startswith("fused")]
        lines += [f"{ours['model']} {ours['mode']} {ours['stack']} over {r['stack']}: {ratios(ours, r)}" for r in peers]
    return "\n".join(lines)


def beside(row: dict[str, Any], rows: list[dict[str, Any]], stacks: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Measured rows of the same configuration, the fastest first."""
    same = [r for r in rows if all(r[k] == row[k] for k in KEY[:-1]) and "ms" in r]
    return sorted((r for r in same if not stacks or r["stack"] in stacks), key=lambda r: r["ms"])


def outcome(row: dict[str, Any]) -> str:
    """Why a row has no numbers."""
    return next((f"{why}: {row[why]}" for why in ("skipped", "stopped", "failed") if why in row), "not measured")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps.add_arguments(parser, list(_shapes.MODELS))
    parser.add_argument("--mode", default="qlora", help=f"one or more of {', '.join(steps.MODES)}")
    parser.add_argument("--stacks", default="all", help=f"all, or some of {', '.join(_stacks.spellings())}")
    parser.add_argument("--quick", action="store_true", help=f"defaults for a short run: {QUICK}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    options.stacks = ",".join(EVERY) if options.stacks == "all" else options.stacks
    steps.shrink(options)
    for mode in options.mode.split(","):
        if mode not in steps.MODES:
            parser.error(f"--mode {mode}: not one of {', '.join(steps.MODES)}")
    for stack in options.stacks.split(","):
        try:
            _stacks.Stack.parse(stack)
        except ValueError as error:
            parser.error(f"--stacks: {error}")
    return options


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    options = parse(arguments)
    if options.one:
        records.print_row(lambda: measure(options))
        return []
    from tqdm import tqdm

    ends = time.perf_counter() + options.seconds
    kept = records.Rows("model_tiny" if options.tiny else "model", KEY, saved=not options.tiny)
    about = records.provenance("model.py", arguments)
    about |= {"device": "cpu"} if options.device == "cpu" else {}
    with tqdm(planned(options, kept, about), desc=options.model, unit="stack") as bar:
        for row in bar:
            bar.set_postfix_str(f"{row['mode']} {row['stack']}")
            seconds, left = row.pop("expected_s"), ends - time.perf_counter()
            if left < seconds:
                print(f"{row['mode']} {row['stack']} not started: {left:.0f} s left, it takes about {seconds:.0f} s")
                continue
            own = ["--one", row["stack"], "--mode", row["mode"], *steps.passed_on(options)]
            kept.add(row | records.in_own_process("model.py", own, min(options.limit_s, left)))

    # In one run: rows of other commits, or machines, are no measure for these.
    def same(row: dict[str, Any]) -> bool:
        return all(row.get(k) == about[k] for k in ("device", "torch")) and records.code(row) == records.code(about)

    rows = [r for r in kept.rows if r["model"] == options.model and r["mode"] in options.mode.split(",") and same(r)]
    print("\n" + compare(rows))
    return rows


if __name__ == "__main__":
    main()
