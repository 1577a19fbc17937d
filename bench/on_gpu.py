"""Everything that needs a GPU, in parts of at most ten minutes: tests natively, then every benchmark.

    python bench/on_gpu.py --part models                # one part, stopped in time, its rows kept
    python bench/on_gpu.py --list                       # the parts, and how long each is expected to take
    python bench/on_gpu.py                              # every part
    python bench/on_gpu.py --part models --dry-run      # the same on a CPU, tiny; nothing of it is a measurement

Results go to bench/results (or $OUT) row by row, so that a run that is stopped loses nothing. A part that needs more
than one run goes on where it stopped, as long as its rows are in bench/results (or $OUT) and the commit is the same;
`python bench/table.py --write` brings them into the README.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import time

import _harness as harness
import _shapes
import _stacks
from model import expected_s

ROOT = harness.ROOT
FUSIONS = sorted(p.stem for p in (ROOT / "kernels").glob("[a-z]*.py"))
SHARED = ("nf4", "low_rank", "lora", "offload", "flash", "tracing", "attention_windows")  # what several files share
DRY = ["--tiny", "--device", "cpu", "--layers", "2", "--steps", "2"]
DRY_OF = {
    "context.py": ["--lengths", "64", "--budgets", "3MiB"],
    "compile_time.py": ["--layer-counts", "2"],
    "budget.py": ["--seq", "64", "--budgets", "none,3MiB"],
}


@dataclasses.dataclass(frozen=True)
class Command:
    """One script and its arguments.

    expected_s   on one H200; a guess wherever no run is noted in bench/results
    continues    it takes --seconds, and measures only what this commit has not
    """

    script: str
    arguments: str
    expected_s: float
    continues: bool = True


def model(name: str, mode: str, stacks: str, sizes: str = "") -> Command:
    layers = _shapes.MODELS[name]["num_hidden_layers"]
    seconds = sum(expected_s(_stacks.Stack.parse(stack), layers, None) for stack in stacks.split(","))
    arguments = f"--model {name} --mode {mode} --stacks {stacks} --steps {20 if sizes else 6} {sizes}"
    return Command("model.py", arguments.strip(), round(seconds, -1))


# In the order of what they are worth: what does not fit into a part's time is at its end.
PARTS: dict[str, list[Command]] = {
    "tests": [Command("", "", 400, continues=False)],
    "fusions": [Command(f"{name}.py", "", 60, continues=False) for name in FUSIONS],
    "models": [
        model("llama3-8b", "qlora", "fused,unsloth,liger,inductor-per-layer,eager,unsloth+checkpointing"),
        model("llama3.2-1b", "full", "fused,inductor,liger,eager"),
        model("qwen3-4b", "full", "fused,liger,inductor-per-layer,eager"),
        model("llama3-8b", "qlora", "fused@11.6GiB,eager+checkpointing"),
        model("llama3-8b", "lora", "fused,unsloth,liger,inductor-per-layer,eager"),
        model("gemma2-2b", "lora", "fused,liger,inductor-per-layer,eager"),
        model("qwen3-30b-a3b-16l", "lora", "fused,liger,inductor-per-layer,eager"),
        model("smollm2-360m", "full", "fused,inductor,liger,eager", "--batch 1 --seq 2048"),
        model("llama3-8b", "qlora", "inductor,inductor+auto-chunker,liger+inductor"),
    ],
    "trainer": [Command("trainer.py", "--mode qlora,full", 550)],
    "compile": [
        Command("compile_time.py", "--model llama3-8b --stacks fused --layer-counts 32,16,64", 420),
        Command("compile_time.py", "--model llama3-8b --stacks inductor --layer-counts 16,32", 750),
    ],
    "profile": [
        Command("breakdown.py", "--model llama3-8b --mode qlora --stacks fused,eager", 210),
        Command("breakdown.py", "--model llama3.2-1b --mode full --stacks fused", 100),
        Command("breakdown.py", "--model qwen3-4b --mode full --stacks fused", 150),
        Command("breakdown.py", "--model gemma2-2b --mode lora --stacks fused", 130),
        Command("breakdown.py", "--model qwen3-30b-a3b-16l --mode lora --stacks fused", 110),
    ],
    "context": [
        Command("context.py", "--budgets 24GiB --lengths 32768,65536", 230),
        Command("context.py", "--budgets 80GiB --lengths 131072 --limit-s 400", 250),
        Command("context.py", "--budgets auto --lengths 131072 --limit-s 400", 250),
        Command("context.py", "--budgets 24GiB --lengths 131072 --limit-s 400", 250),
        Command("context.py", "--budgets 80GiB,auto --lengths 32768,65536", 450),
        Command("context.py", "--budgets 24GiB,80GiB,auto --longest --limit-s 550", 3000),
    ],
    "budget": [
        Command("budget.py", "--steps 4 --budgets none,11.6GiB,8GiB,20GiB,16GiB,10GiB", 260, continues=False),
        Command(
            "budget.py", "--model llama3.2-1b --mode full --budgets none,12GiB,14GiB,13GiB,16GiB", 150, continues=False
        ),
    ],
}  # fmt: skip


def test_command() -> list[str]:
    """The tests of every kernel, and those marked gpu."""
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in [*FUSIONS, *SHARED, "cost", "gpu"]]
    workers = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    return ["-P", "-m", "pytest", "-q", "--tb=short", "--durations=5", *files, *workers]


def command_line(command: Command, left_s: float, dry: bool) -> list[str]:
    if not command.script:
        return [sys.executable, *test_command()]
    given = command.arguments.split()
    given += [*DRY, *DRY_OF.get(command.script, [])] if dry else []
    given += ["--seconds", f"{left_s:.0f}"] if command.continues else []
    return [sys.executable, str(ROOT / "bench" / command.script), *given]


def run(part: str, seconds: float, dry: bool) -> int:
    """One part within so many seconds. A command that is over them is stopped, with all that it started."""
    ends, failed = time.perf_counter() + seconds, 0
    expected = sum(c.expected_s for c in PARTS[part])
    print(f"=== {part}: about {expected:.0f} s on one H200 if nothing is measured yet; stopped after {seconds:.0f} s")
    for command in PARTS[part]:
        print(f"    {command.expected_s:5.0f} s  {shown(command)}", flush=True)
    for command in PARTS[part]:
        left = ends - time.perf_counter()
        if left < 20:
            print(f"--- no time left for {shown(command)}", flush=True)
            continue
        print(f"--- {shown(command)}", flush=True)
        begun = time.perf_counter()
        child = subprocess.Popen(command_line(command, left - 5, dry), cwd=ROOT, process_group=0)
        try:
            failed += child.wait(left) != 0
        except subprocess.TimeoutExpired:
            print("--- stopped at the time limit", flush=True)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGINT)  # its own children are in groups of their own: let it stop them
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
        print(f"--- {time.perf_counter() - begun:.0f} s", flush=True)
    return failed


def shown(command: Command) -> str:
    return f"bench/{command.script} {command.arguments}".strip() if command.script else "the tests of all kernels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS), help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=580.0, help="a part is stopped after so many")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU; not for tests and fusions")
    options = parser.parse_args()
    parts = options.part.split(",")
    if unknown := [p for p in parts if p not in PARTS]:
        parser.error(f"--part {unknown[0]}: not one of {', '.join(PARTS)}")
    if options.dry_run and {"tests", "fusions"} & set(parts):
        parser.error("--dry-run: tests and fusions run kernels natively")
    if options.list:
        for part in parts:
            print(f"{part}: about {sum(c.expected_s for c in PARTS[part]):.0f} s")
            print("\n".join(f"    {c.expected_s:5.0f} s  {shown(c)}" for c in PARTS[part]))
        return
    sys.exit(1 if sum([run(part, options.seconds, options.dry_run) for part in parts]) else 0)


if __name__ == "__main__":
    main()
