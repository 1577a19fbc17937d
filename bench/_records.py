"""Rows of measurements: made in a process of their own, with what they depend on, kept in a file as they come.

A process prints `ROW {json}` for what it measured. A file's later row replaces an earlier one of the same thing, but
what was cut short, or cannot run here, replaces no measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any

import _harness as harness
from _stacks import Unavailable

PACKAGES = ("transformers", "peft", "bitsandbytes", "accelerate", "liger_kernel", "unsloth", "unsloth_zoo")


def in_own_process(script: str, arguments: list[str], limit_s: float) -> dict[str, Any]:
    """The row that `bench/SCRIPT ARGUMENTS` prints, or the reason why there is none, and the seconds it all took."""
    begun = time.perf_counter()
    command = [sys.executable, str(harness.BENCH / script), *arguments]
    # A process group of its own, so that compiler workers are stopped along with it.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    try:
        text, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return {"stopped": f"after {limit_s:.0f} s", "process_s": time.perf_counter() - begun}
    except BaseException:  # the bench itself is stopped: leave nothing running on the GPU
        os.killpg(child.pid, signal.SIGKILL)
        raise
    lines = text.splitlines()
    found = [line for line in lines if line.startswith("ROW ")]
    row = json.loads(found[-1][4:]) if found else {"failed": f"ended with {child.returncode}: {' | '.join(lines[-2:])}"}
    if "failed" in row:
        print("\n".join(line for line in lines[-40:] if not line.startswith("ROW ")), flush=True)
    return row | {"process_s": time.perf_counter() - begun}


def print_row(measure: Callable[[], dict[str, Any]]) -> None:
    """The other side of `in_own_process`. What fails or cannot run here is a row too."""
    try:
        row = measure()
    except Unavailable as error:
        row = {"skipped": str(error)}
    except Exception as error:
        traceback.print_exc()
        row = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    print("ROW " + json.dumps(row), flush=True)


def provenance(script: str, arguments: list[str] | None) -> dict[str, Any]:
    """What a row depends on, kept with it: rows of one file may come from several commands."""
    shown = shlex.join(sys.argv[1:] if arguments is None else arguments)
    found: dict[str, Any] = {"command": f"python bench/{script} {shown}".strip(), **harness.machine()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return found


def code(row: dict[str, Any]) -> str:
    """The commit that a row was measured at. Rows written back into a working tree make it dirty, not the code."""
    return str(row.get("commit", "unknown")).removesuffix("-dirty")


def same_commit(row: dict[str, Any], new: dict[str, Any]) -> bool:
    return code(row) == code(new) != "unknown"


class Rows:
    """The rows of bench/results/NAME.json, or of $OUT/NAME.json where $OUT is set, written after every new one.

    key    what makes two rows measurements of the same thing
    saved  False for a dry run, which writes only where $OUT is set
    """

    def __init__(self, name: str, key: tuple[str, ...], saved: bool = True) -> None:
        self.name, self.key, self.saved = name, key, saved or "OUT" in os.environ
        self.rows: list[dict[str, Any]] = []
        for folder in (harness.folder(), harness.RESULTS):
            if (folder / f"{name}.json").exists():
                self.rows = json.loads((folder / f"{name}.json").read_text())["rows"]
                break

    def find(self, new: dict[str, Any]) -> dict[str, Any] | None:
        return next((row for row in self.rows if self._same(row, new)), None)

    def measured(self, new: dict[str, Any]) -> dict[str, Any] | None:
        """The row of this thing at this commit, if it has an outcome: what was cut short or skipped has none."""
        row = self.find(new)
        return row if row and same_commit(row, new) and any(k in row for k in ("ms", "fits", "failed")) else None

    def add(self, new: dict[str, Any]) -> None:
        harness.show({k: v for k, v in new.items() if k not in HIDDEN})
        earlier = self.find(new)
        cut_short = "stopped" in new or "skipped" in new
        if earlier and "ms" in earlier and "ms" not in new and (cut_short or same_commit(earlier, new)):
            return
        self.rows = [row for row in self.rows if not self._same(row, new)] + [new]
        if self.saved:
            harness.save(self.name, self.rows)

    def _same(self, row: dict[str, Any], new: dict[str, Any]) -> bool:
        return all(row.get(k) == new.get(k) for k in self.key)


# Kept in the file, too long for a line on the screen.
HIDDEN = {
    *PACKAGES,
    "command",
    "driver",
    "python",
    "torch",
    "triton",
    "kinds",
    "compile_phases_s",
    "top",
    "fused",
    "launches",
    "parts_ms",
}
