"""Everything that needs a GPU, in one command: the kernel tests natively, the GPU tests, then every benchmark.

    python bench/on_gpu.py [--tests-only | --bench-only]

Results go to bench/results (or $OUT); `python bench/table.py --write` brings them into the README.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import subprocess
import sys
import time

import _harness as harness

ROOT = pathlib.Path(__file__).resolve().parent.parent
FUSIONS = sorted(p.stem for p in (ROOT / "kernels").glob("[a-z]*.py"))
PARTS = ("nf4", "low_rank", "lora", "offload")  # kernels that several files share


def run_tests() -> int:
    """The tests of every kernel, and those marked gpu."""
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in [*FUSIONS, *PARTS, "cost", "gpu"]]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "--durations=5", *files]
    try:
        importlib.import_module("xdist")
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    except ImportError:
        pass
    return subprocess.run(command, cwd=ROOT).returncode


def run_benchmarks() -> int:
    failed = 0
    print(f"copy {harness.copy_bandwidth() / 1e12:.2f} TB/s, matmul {harness.matmul_flops() / 1e12:.0f} TFLOP/s")
    for name in [*FUSIONS, "model"]:
        started = time.perf_counter()
        print(f"--- {name}", flush=True)
        try:
            module = importlib.import_module(name)
            module.main(["--quick"]) if name == "model" else module.main()
        except Exception as error:
            failed += 1
            print(f"{name} failed: {type(error).__name__}: {error}")
        print(f"--- {name}: {time.perf_counter() - started:.0f} s", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests-only", action="store_true")
    parser.add_argument("--bench-only", action="store_true")
    options = parser.parse_args()
    failed = 0 if options.bench_only else run_tests()
    failed += 0 if options.tests_only else run_benchmarks()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
