"""Send a tensor to pinned host memory while the device computes on, and bring it back in time.

Each way is two operators, so that a graph says both when a copy begins and when it is waited for:
    ticket = offload(x)              the copy begins, on a stream of its own
    host = offloaded(ticket, x)      the device waits for it; until then this call keeps x alive
    ticket = reload(host, device)    memory is taken and the copy back begins, on another stream
    x = arrived(ticket, host, device)

Host memory is kept and used again as soon as the copy that last read or wrote it has been queued: the next copy waits
for that one on the device. (torch's own allocator of pinned memory asks whether it has ended, and takes more memory
where the host runs ahead.)
On a CPU the same operators copy at once.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from ._op import define_op

_tickets = itertools.count(1)
_under_way: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}


def host_nbytes(nbytes: int) -> int:
    """Bytes of host memory that a tensor of `nbytes` takes: pinned memory comes in powers of two."""
    return 1 << max(nbytes - 1, 0).bit_length()


class _Block:
    """Host memory, and the last copy that used it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.key = nbytes, pinned
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.event: Any = None


_free: dict[tuple[int, bool], list[_Block]] = {}
_used: dict[int, _Block] = {}  # by address


def _host_tensor(x: Tensor) -> tuple[Tensor, _Block]:
    """Host memory laid out as `x` is; it goes back to `_free` with the last tensor that lies in it."""
    key = host_nbytes(max(x.numel() * x.element_size(), 1)), x.device.type == "cuda"
    known = _free.setdefault(key, [])
    block = known.pop() if known else _Block(*key)
    view = block.memory.numpy()[:]  # dies with the storage that is made of it
    weakref.finalize(view, _give_back, block).atexit = False
    _used[block.memory.data_ptr()] = block
    flat = torch.from_numpy(view)[: x.numel() * x.element_size()].view(x.dtype)
    return flat.as_strided(x.size(), x.stride()), block


def _give_back(block: _Block) -> None:
    _used.pop(block.memory.data_ptr(), None)
    _free[block.key].append(block)


@functools.cache
def _stream(direction: str, device: torch.device) -> torch.cuda.Stream:
    """One for each way: a link carries both at once."""
    del direction
    return torch.cuda.Stream(device)


def _copy(x: Tensor, to: Tensor, block: _Block | None, direction: str, device: torch.device) -> Tensor:
    """Begin a copy; the ticket says which."""
    event = None
    if device.type == "cuda":
        # What `x` is written by, and what last read the memory that `to` lies in, is queued on the current stream.
        here = torch.cuda.current_stream(device)
        stream = _stream(direction, device)
        stream.wait_stream(here)
        if block is not None and block.event is not None:
            stream.wait_event(block.event)
        with torch.cuda.stream(stream):
            to.copy_(x, non_blocking=True)
            event = stream.record_event()
        if block is not None:
            block.event = event
    else:
        to.copy_(x)
    number = next(_tickets)
    _under_way[number] = to, event
    return torch.tensor([number])


def _wait(ticket: Tensor, device: torch.device) -> Tensor:
    to, event = _under_way.pop(int(ticket))
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
    return to


def _offload(x: Tensor) -> Tensor:
    return _copy(x, *_host_tensor(x), "out", x.device)


def _offloaded(ticket: Tensor, x: Tensor) -> Tensor:
    return _wait(ticket, x.device)


def _reload(host: Tensor, device: torch.device) -> Tensor:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    x = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    return _copy(host, x, _used.get(host.data_ptr()), "back", device)


def _arrived(ticket: Tensor, host: Tensor, device: torch.device) -> Tensor:
    return _wait(ticket, torch.device(device))


def _ticket_like(*args: Any) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _host_like(ticket: Tensor, x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


def _device_like(ticket: Tensor, host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


def _none(*args: Any) -> int:
    return 0  # nothing that a kernel of the device's own computes or moves


offload = define_op(
    "offload(Tensor x) -> Tensor",
    reference=_offload, triton=_offload, fake=_ticket_like, flops=_none, bytes_moved=_none,
)  # fmt: skip
offloaded = define_op(
    "offloaded(Tensor ticket, Tensor x) -> Tensor",
    reference=_offloaded, triton=_offloaded, fake=_host_like, flops=_none, bytes_moved=_none,
)  # fmt: skip
reload = define_op(
    "reload(Tensor host, Device device) -> Tensor",
    reference=_reload, triton=_reload, fake=_ticket_like, flops=_none, bytes_moved=_none,
)  # fmt: skip
arrived = define_op(
    "arrived(Tensor ticket, Tensor host, Device device) -> Tensor",
    reference=_arrived, triton=_arrived, fake=_device_like, flops=_none, bytes_moved=_none,
)  # fmt: skip
