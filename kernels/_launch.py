"""What every kernel launch shares: Triton when it is there, formulas inlined, launch sizes.

Triton is optional: a CPU-only machine runs every operator through its torch reference, so a missing Triton
must not break the import of a kernel file.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


class _NoTriton:
    """Stands in for `triton` and `triton.language` so that kernel files import without them."""

    def __getattr__(self, name: str) -> Any:
        return _NoTriton()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getitem__(self, item: Any) -> Any:
        raise RuntimeError("this operator needs Triton on a GPU. Install it with `pip install triton`")


triton: Any
if TYPE_CHECKING:
    # `tl.constexpr` is an annotation; `triton` stays Any, for jitted functions take more than they declare.
    import triton.language as tl
elif HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = tl = _NoTriton()


def inline(formula: Callable) -> Any:
    """Make a proven formula callable from inside a kernel: the same function object in both places.

    The interpreter runs kernel bodies as Python and must see the plain function; the compiler needs it jitted.
    """
    if not HAS_TRITON or triton.knobs.runtime.interpret:
        return formula
    return triton.jit(formula)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of the device; a small stand-in for the interpreter, so that loops over rows run."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).max_compute_units
    return 4


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that tiles of one program may take: a tenth is left to the compiler's own."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin * 9 // 10
    return 1 << 16


def pipelined(device: torch.device, bytes_per_column: int, block_n: int) -> dict[str, int]:
    """BLOCK_N and num_stages of a loop over tiles of BLOCK_N columns: the widest, then the deepest, that fit."""
    fitting = (
        {"BLOCK_N": width, "num_stages": stages}
        for width in (block_n, block_n // 2, block_n // 4)
        for stages in (3, 2)
        if stages * bytes_per_column * width <= shared_memory(device)
    )
    return next(fitting, {"BLOCK_N": max(16, block_n // 4), "num_stages": 1})
