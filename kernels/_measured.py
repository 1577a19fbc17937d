"""What is measured once on a device and remembered: timing, and one file for each kind of measurement on disk."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch

_REPEATS = 15


def median_ms(run: Callable[[], Any]) -> float:
    """Median milliseconds on the device, the compilation left out."""
    run()
    times = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # so that the kernels are queued before the clock starts
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@functools.cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def cache_path(kind: str, source: str) -> pathlib.Path:
    """One file beside Inductor's cache, renewed when the `source` file or torch change."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    digest = hashlib.sha256(pathlib.Path(source).read_bytes() + torch.__version__.encode()).hexdigest()
    return pathlib.Path(cache_dir()) / "fused_backend" / f"{kind}_{digest[:16]}.json"


def read(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(path: pathlib.Path, entries: dict[str, Any]) -> None:
    """Add entries. Replaced in one step: several processes of a training job may write at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(read(path) | entries, file)
        os.replace(file.name, path)
    except OSError:
        pass  # a read-only cache costs one measurement in each process
