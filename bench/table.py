"""The README's table of measurements and families.md, made from bench/results: `python bench/table.py --write`.

Without --write the table is printed. A test checks that both hold what this command makes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import _families_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FAMILIES = RESULTS / "families.md"
BEGIN, END = "<!-- made by bench/table.py -->", "<!-- end -->"

# Which rows of each result file the README shows; the files hold many more.
SHOWN = {
    "rms_norm": ("8192x4096 bf16 plain", "8192x4096 bf16 residual", "262144x128 bf16 plain"),
    "rope": ("B2 S4096 H32/8 K128 R128 bf16", "B2 S4096 H32/8 K128 R128 bf16 interleaved"),
    "swiglu": ("8192x14336 bf16 silu", "8192x14336 bf16 silu packed"),
}
HEADS = (
    "llama3_8b, frozen head", "llama3_8b, trained head", "llama3_8b, 60 % ignored, frozen head",
    "gemma2_2b, frozen head",
)  # fmt: skip


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def memory_bound() -> list[str]:
    """Forward and backward of the kernels that move bytes: microseconds, share of the copy bandwidth."""
    lines = [
        "| kernel (bf16) | pass | eager µs | Inductor µs | fused µs | of copy bandwidth |",
        "|---|---|---|---|---|---|",
    ]
    for name, cases in SHOWN.items():
        rows = load(name)["rows"]
        for case in cases:
            for direction in ("forward", "backward"):
                found = {r["candidate"]: r for r in rows if (r["case"], r["direction"]) == (case, direction)}
                ours = found["fused ops"]
                times = [f"{found[c]['time_us']:.0f}" for c in ("eager", "inductor")]
                lines.append(
                    f"| {name} {case.replace(' bf16', '')} | {direction} | {times[0]} | {times[1]} "
                    f"| {ours['time_us']:.0f} | {ours['of_copy_percent']:.0f} % |"
                )
    return lines


def heads() -> list[str]:
    """lm_head and cross-entropy, forward and backward."""
    lines = [
        "| lm_head + cross-entropy, forward + backward, 8192 tokens | eager | Inductor | fused | its products alone |",
        "|---|---|---|---|---|",
    ]
    rows = load("linear_cross_entropy")["rows"]
    for case in HEADS:
        found = {r["impl"]: r for r in rows if r.get("case") == case}
        stacks = [found[name] for name in ("eager", "inductor", "fused")]
        cells = [f"{r['time_us'] / 1e3:.1f} ms, +{r['extra_GiB']:.2f} GiB" for r in stacks]
        lines.append(f"| {case} | {' | '.join(cells)} | {found['products alone']['time_us'] / 1e3:.1f} ms |")
    return lines


def steps() -> list[str]:
    """Whole training steps, every stack beside eager; in brackets between the extremes of the steps."""
    lines = []
    rows = load("model")["rows"]
    for key in dict.fromkeys(configuration(r) for r in rows):
        own = [r for r in rows if configuration(r) == key]
        eager = next((r for r in own if r["stack"] == "eager" and "ms" in r), None)
        model, mode, layers, batch, seq = key
        lines += [
            f"| {model} {mode}, {layers} layers, B{batch} x S{seq} | ms/step | of eager | peak GiB "
            "| of eager | first loss | its gradient norm | compile s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for r in own:
            if "ms" not in r:
                why = next((r[k] for k in ("skipped", "stopped", "failed") if k in r), "")
                lines.append(f"| {r['stack']} | not measured: {why[:100]} | | | | | | |")
                continue
            time = peak = ""
            if eager:
                low, high = r["ms_low"] / eager["ms_high"], r["ms_high"] / eager["ms_low"]
                time = f"{r['ms'] / eager['ms']:.2f}" + (f" ({low:.2f} – {high:.2f})" if r is not eager else "")
                peak = f"{r['peak_GiB'] / eager['peak_GiB']:.2f}"
            lines.append(
                f"| {r['stack']} | {r['ms']:.0f} | {time} | {r['peak_GiB']:.1f} | {peak} | {r['loss']:.4f} "
                f"| {r['grad_norm']:.4f} | {r['compile_s']:.0f} |"
            )
        lines.append("")
    return lines[:-1]


def configuration(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("model", "mode", "layers", "batch", "seq"))


def breakdowns() -> list[str]:
    """Where the time of a step goes, and the floor beside it."""
    kinds = ("GEMM", "attention", "Inductor", "optimizer", "copies, casts")
    lines = [
        "| ms of one step, by `python bench/breakdown.py` | GEMM | attention | our kernels | Inductor's | optimizer "
        "| copies, casts | the rest | idle | recorded | products, attention and head alone |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in load("breakdown")["rows"]:
        if "parts_ms" not in row:
            continue
        parts = row["parts_ms"]
        ours = sum(ms for kind, ms in parts.items() if kind.startswith("fused: "))
        named = [parts.get(kind, 0.0) for kind in kinds]
        rest = sum(parts.values()) - ours - sum(named)
        cells = [*named[:2], ours, *named[2:], rest, row["idle_ms"], row["recorded_ms"], row["floor"]["ms"]]
        name = f"{row['model']} {row['mode']}, {row['stack']}"
        lines.append(f"| {name} | {' | '.join(f'{ms:.1f}' for ms in cells)} |")
    return [*lines, "", "![where a step's time goes](bench/results/breakdown.png)"]


def contexts() -> list[str]:
    """Steps of one long sequence under memory budgets, and the longest that fits each."""
    lines = [
        "| `python bench/context.py`, B1 | budget | tokens | s/step | predicted | tokens/s | peak GiB | predicted "
        "| host GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = load("context")["rows"]
    for row in sorted((r for r in rows if "ms" in r), key=lambda r: (r["model"], r["budget"], r["seq"])):
        predicted = [f"{row[k] / d:.{n}f}" if k in row else "" for k, d, n in PREDICTED]
        lines.append(
            f"| {row['model']} {row['mode']} | {row['budget']} | {row['seq']} | {row['ms'] / 1e3:.2f} | {predicted[0]} "
            f"| {row['tokens_per_s']:.0f} | {row['peak_GiB']:.2f} | {predicted[1]} | {predicted[2]} |"
        )
    for model, budget in dict.fromkeys((r["model"], r["budget"]) for r in rows if r.get("fits") is False):
        own = [r for r in rows if (r["model"], r["budget"]) == (model, budget)]
        fits = max((r["seq"] for r in own if r.get("fits")), default=0)
        fails = min(r["seq"] for r in own if r.get("fits") is False)
        lines.append(f"| {model} {own[0]['mode']} | {budget} | {fits} fit, {fails} do not | | | | | | |")
    return lines


def compile_times() -> list[str]:
    """Seconds that the first steps take beyond plain ones, with empty caches and with filled ones."""
    rows = [r for r in load("compile_time")["rows"] if "compile_s" in r]
    layers, stacks = sorted({r["layers"] for r in rows}), list(dict.fromkeys(r["stack"] for r in rows))
    lines = [
        f"| `python bench/compile_time.py`, s | {' | '.join(f'{n} layers' for n in layers)} |",
        f"|---|{'---|' * len(layers)}",
    ]
    for stack in stacks:
        for caches in ("cold", "warm"):
            found = {r["layers"]: r for r in rows if (r["stack"], r["caches"]) == (stack, caches)}
            cells = [f"{found[n]['compile_s']:.0f}" if n in found else "" for n in layers]
            lines.append(f"| {rows[0]['model']} {rows[0]['mode']}, {stack}, {caches} | {' | '.join(cells)} |")
    return lines


def trainers() -> list[str]:
    """Steps of the unmodified Trainer beside those of a plain loop."""
    lines = [
        "| `python bench/trainer.py`, ms/step | plain loop | Trainer | of the loop | of eager's Trainer |",
        "|---|---|---|---|---|",
    ]
    found = {
        (r["model"], r["mode"], r["stack"], r["trained_by"]): r["ms"] for r in load("trainer")["rows"] if "ms" in r
    }
    for model, mode, stack in dict.fromkeys(key[:3] for key in found):
        loop, own, eager = (
            found.get((model, mode, of, by)) for of, by in ((stack, "loop"), (stack, "trainer"), ("eager", "trainer"))
        )
        cells = [f"{ms:.0f}" if ms else "" for ms in (loop, own)]
        cells += [f"{own / other:.2f}" if own and other else "" for other in (loop, eager)]
        lines.append(f"| {model} {mode}, {stack} | {' | '.join(cells)} |")
    return lines


# Key, divisor, digits.
PREDICTED = (("predicted_ms", 1e3, 2), ("predicted_peak_GiB", 1, 2), ("host_GiB", 1, 1))
# Tables of results that need not be there, and what makes them.
OPTIONAL = {"breakdown": breakdowns, "context": contexts, "compile_time": compile_times, "trainer": trainers}


def budgets() -> list[str]:
    """Training steps under a memory budget: time beside the step without one, peak beside the predicted one."""
    lines = [
        "| `python bench/budget.py`, B2 x S4096 | budget | ms | predicted | of none | peak GiB | predicted | host |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = load("budget")["rows"]
    for row in sorted(rows, key=lambda r: (r["model"], -r.get("peak_GiB", 0))):
        name = f"| {row['model']} {row['mode']} | {row['budget']} |"
        if "failed" in row:
            lines.append(f"{name} refused: {row['failed'].split('. Raise')[0]} | | | | | |")
            continue
        ratio = f"{row['ms'] / row['none_ms']:.2f}" if row.get("none_ms") else ""
        time, peak, host = (
            f"{row[key]:.{digits}f}" if key in row else ""
            for key, digits in (("predicted_ms", 0), ("predicted_peak_GiB", 2), ("host_GiB", 1))
        )
        lines.append(f"{name} {row['ms']:.0f} | {time} | {ratio} | {row['peak_GiB']:.2f} | {peak} | {host} |")
    return lines


def attention() -> list[str]:
    """Attention under the mask that models bring, and without it."""
    lines = [
        "| causal attention (bf16), forward + backward \u00b5s | explicit mask | flash | fused | takes |",
        "|---|---|---|---|---|",
    ]
    rows = [r for r in load("attention")["rows"] if "forward_us" in r and "backward_us" in r]
    for case in dict.fromkeys(r["case"] for r in rows):
        found = {r["candidate"]: r for r in rows if r["case"] == case}
        names = ("explicit mask", "flash", "fused")
        times = [f"{r['forward_us']:.0f} + {r['backward_us']:.0f}" if (r := found.get(n)) else "" for n in names]
        label = case.replace(" none", "").replace(" right", ", padded at the right").replace(" packed", ", documents:")
        lines.append(f"| {label} | {' | '.join(times)} | {found['fused'].get('kind', 'runs')} |")
    return lines


def two_layers() -> list[str]:
    """Training steps of two layers."""
    lines = [
        "| training step, Llama-3-8B width, 2 layers, 8192 tokens | eager | Inductor | fused |",
        "|---|---|---|---|",
    ]
    rows = [r for r in load("model_2_layers")["rows"] if "ms" in r]
    names = {"full": "all weights trained", "lora": "LoRA r=16 on all linear layers"}
    for train in dict.fromkeys(r["train"] for r in rows):
        found = {r["stack"]: r for r in rows if r["train"] == train}
        stacks = [found.get(name) for name in ("eager", "inductor", "fused")]
        cells = [f"{r['ms']:.1f} ms, {r['peak_GiB']:.1f} GiB" if r else "not measured" for r in stacks]
        lines.append(f"| {names[train]} | {' | '.join(cells)} |")
    return lines


def adapted_layers() -> list[str]:
    """LoRA on NF4 layer by layer: a ratio to the products that nothing can avoid."""
    rows = load("lora_nf4")["rows"]
    stacks = ("eager", "inductor", "fused")
    lines = [
        "| LoRA r=16 on NF4, 8192 tokens, time over its bf16 products alone | products, forward + backward µs "
        "| eager | Inductor | fused | fused, forward alone |",
        "|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(r["case"] for r in rows if r["part"] == "linear"):
        found = {r["candidate"]: r for r in rows if r["case"] == case}
        floor = found["products alone"]
        ratios = [f"{found[name]['both_over_products']:.2f}" for name in stacks]
        lines.append(
            f"| {case.removeprefix('8192 tokens, ')} | {floor['forward_us']:.0f} + {floor['backward_us']:.0f} "
            f"| {' | '.join(ratios)} | {found['fused']['forward_over_products']:.2f} |"
        )
    lines += ["", "| NF4 decode to bf16 | bitsandbytes µs | fused µs | of copy bandwidth |", "|---|---|---|---|"]
    for case in dict.fromkeys(r["case"] for r in rows if r["part"] == "decode"):
        found = {r["candidate"]: r for r in rows if r["case"] == case}
        ours = found["fused"]
        lines.append(
            f"| {case} | {found['bitsandbytes']['time_us']:.0f} | {ours['time_us']:.0f} "
            f"| {ours['of_copy_percent']:.0f} % |"
        )
    return lines


def table() -> str:
    machine = load("model")["machine"]
    on_gpu = [path.stem for path in RESULTS.glob("*.json") if path.stem != "families"]
    commits = {load(name)["machine"]["commit"] for name in on_gpu}
    where = (
        f"One {machine['device']}, torch {machine['torch']}, triton {machine['triton']}, commits "
        f'{", ".join(sorted(commits))} ("not measured": the run was stopped at its time limit)'
    )
    optional = [line for name, lines in OPTIONAL.items() if name in on_gpu for line in [*lines(), ""]]
    text = [
        f"{where}; repeat with `python bench/on_gpu.py`, all rows in [bench/results](bench/results).",
        "", *steps(), "", *optional, *budgets(), "", *adapted_layers(), "", *two_layers(), "", *attention(), "",
        *heads(), "", *memory_bound(), "",
        f"{_families_table.summary(load('families'))} All of them: [families.md](bench/results/families.md).",
    ]  # fmt: skip
    return "\n".join(text)


def families() -> str:
    return _families_table.document(load("families"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if not parser.parse_args().write:
        print(table())
        return
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    FAMILIES.write_text(families() + "\n")
    readme.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
