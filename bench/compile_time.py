"""How long compiling takes: cold, with every cache empty, then warm, in a new process that finds the caches filled.

    python bench/compile_time.py --stacks fused,inductor --layer-counts 16,32,64
    python bench/compile_time.py --tiny --device cpu --layer-counts 2,4 --stacks fused     # a dry run without a GPU

Compile seconds are what the first steps take beyond plain ones: Dynamo, the backend, kernels compiled and tuned, caches
read. Tokens do not matter to them, so steps are short. Both processes of a pair share folders for Inductor's and
Triton's caches that are made for them alone. What this commit has measured is not measured again. Rows go to
bench/results/compile_time.json, or to $OUT.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import time

import _records as records
import _shapes
import _stacks
import _steps as steps
from model import expected_s

KEY = ("model", "mode", "layers", "batch", "seq", "dtype", "device", "stack", "caches")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps.add_arguments(parser, list(_shapes.MODELS), batch=1, steps=3)
    parser.set_defaults(seq=512)
    parser.add_argument("--layer-counts", default="16,32,64", help="numbers of layers, with commas")
    parser.add_argument("--mode", choices=steps.MODES, default="qlora")
    parser.add_argument("--stacks", default="fused,inductor", help=f"some of {', '.join(_stacks.spellings())}")
    options = parser.parse_args(arguments)
    steps.shrink(options)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    ends = time.perf_counter() + options.seconds
    kept = records.Rows("compile_time", KEY, saved=not options.tiny)
    about = {name: getattr(options, name) for name in ("model", "mode", "batch", "seq", "dtype")}
    about |= records.provenance("compile_time.py", arguments)
    about |= {"device": "cpu"} if options.device == "cpu" else {}
    for layers in (int(n) for n in options.layer_counts.split(",")):
        for stack in options.stacks.split(","):
            pair = [about | {"stack": stack, "layers": layers, "caches": caches} for caches in ("cold", "warm")]
            if not options.again and all(kept.measured(row) for row in pair):
                continue
            takes = 1.6 * expected_s(_stacks.Stack.parse(stack), layers, None)
            if ends - time.perf_counter() < takes:
                print(f"{stack}, {layers} layers not started: a cold and a warm start take about {takes:.0f} s")
                continue
            own = argparse.Namespace(**(vars(options) | {"layers": layers}))
            given = ["--one", stack, "--mode", options.mode, *steps.passed_on(own)]
            with tempfile.TemporaryDirectory(prefix="bench_caches_") as folder:
                os.environ |= {name: str(pathlib.Path(folder) / name.lower()) for name in CACHES}
                for row in pair:
                    limit = min(options.limit_s, ends - time.perf_counter())
                    kept.add(row | records.in_own_process("model.py", given, limit))


if __name__ == "__main__":
    main()
