"""What the tests of norms share: where their operators run, shapes of rows, layouts in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import HAS_GPU

SHAPES = [
    pytest.param((3, 5, 7), id="odd"),
    # dx of one column cancels down to rounding noise, which only many rows measure.
    pytest.param((499, 1), id="one-column"),
    pytest.param((13,), id="one-row"),
    pytest.param((3, 257), id="prime"),
    pytest.param((0, 16), id="no-rows"),
]

# Of tensors of shape (2, 5, 3, 16).
LAYOUTS = {
    "slice of qkv": lambda t: t.new_empty(2, 5, 9, 16)[:, :, 3:6].copy_(t),
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batch innermost": lambda t: t.movedim(0, 2).contiguous().movedim(2, 0),
    "every second row": lambda t: t.new_empty(4, 10, 6, 16)[::2, ::2, ::2].copy_(t),
    "last dimension strided": lambda t: t.new_empty(2, 5, 3, 32)[..., ::2].copy_(t),
    "rows repeated": lambda t: t[:, :1].expand(2, 5, 3, 16),
    "one number": lambda t: t[:1, :1, :1, :1].expand(2, 5, 3, 16),
}


@contextlib.contextmanager
def running(implementation: str, triton: Any, operators: Sequence[str]) -> Iterator[torch.device]:
    """The device on which `operators` run through `implementation`, "reference" or "triton", gradients included.

    Without a GPU the host functions of `triton`, an attribute for each operator, stand in as the CPU's and their
    kernels run in the interpreter.
    """
    if implementation == "reference" or HAS_GPU:
        yield torch.device("cpu" if implementation == "reference" else "cuda")
        return
    library = torch.library.Library("fused_backend", "IMPL")
    for name in operators:
        library.impl(name, getattr(triton, name), "CPU")
    try:
        yield torch.device("cpu")
    finally:
        library._destroy()


def randn(shape: Sequence[int], dtype: torch.dtype, device: torch.device, grad: bool = True) -> torch.Tensor:
    return torch.randn(tuple(shape), device=device).to(dtype).requires_grad_(grad)


def any_rows(data: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A permuted, sliced view of any small shape, drawn by hypothesis."""
    from hypothesis import strategies as st

    # Enough rows that the largest error is a property of the method, not of one number.
    lead = [60 * data.draw(st.integers(0, 2)), *data.draw(st.lists(st.integers(1, 3), max_size=3))]
    D, step = data.draw(st.integers(3, 70)), data.draw(st.integers(1, 2))
    order = data.draw(st.permutations(range(len(lead))))
    base = torch.randn(*[lead[i] * step for i in order], D + 3, device=device).to(dtype)
    base = base[tuple(slice(None, None, step) for _ in order)][..., 2 : 2 + D]
    return base.permute(*[order.index(d) for d in range(len(lead))], len(lead)).detach().requires_grad_()


def assert_same_bits_every_run(every_operator, where):
    x, z, dy = torch.randn(3, 300, 190, device=where).bfloat16()
    w = torch.randn(190, device=where).bfloat16()
    first = every_operator(x, z, w, dy)
    for a, b in zip(first, every_operator(x, z, w, dy), strict=True):
        assert torch.equal(a, b)


def assert_inputs_are_left_alone(every_operator, where):
    inputs = [torch.randn(5, 12, device=where) for _ in range(4)]
    inputs[2] = inputs[2][0]
    before = [t.clone() for t in inputs]
    outs = every_operator(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    storages = [t.untyped_storage().data_ptr() for t in (*inputs, *outs)]
    assert len(set(storages)) == len(storages)
