"""A byte budget over a joint graph: what the planner is asked, and how its answer reaches the partitioner.

joint.py has the graph planned, rematerialize.py writes the plan into it; here is what a user gives and is told.
"""

from __future__ import annotations

import operator
import os
import pathlib
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._guards import CompileContext
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from .cost import ceilings, nbytes_of
from .joint import Joint, base_of, device_of
from .options import Options, parse_bytes
from .planner import Infeasible, Plan
from .ranks import Terms, agreed, job
from .rematerialize import rematerialize
from .sizes import hold

MARGIN = 0.03  # of a budget: what allocators round up and keep apart
EFFICIENCY = 0.85  # of its ceilings, what a whole step reaches: 0.83 and 0.87 for two models on an H200


@dataclass(frozen=True)
class Row:
    """What one kind of operator, or one layer, keeps, makes again and sends to the host, in bytes."""

    name: str
    kept: int
    recomputed: int
    offloaded: int


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of one graph. Bytes include what is on the device anyway."""

    budget: int | None
    peak: int
    peak_at: str
    seconds: float  # predicted, of forward and backward
    extra_seconds: float  # of these, what making values again costs
    gap: float
    host: int  # bytes of pinned host memory
    kinds: tuple[Row, ...]
    layers: tuple[Row, ...]
    planning_seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        head = f"predicted peak {_gib(self.peak)} ({self.peak_at}), "
        head += f"budget {_gib(self.budget)}, " if self.budget is not None else "no budget, "
        head += f"step {1e3 * self.seconds:.2f} ms, of it {1e3 * self.extra_seconds:.2f} ms making values again, "
        head += f"{_gib(self.host)} of host memory, " if self.host else ""
        columns = ["kept", "made again", *(["offloaded"] if self.host else [])]
        lines = [f"{head}gap {100 * self.gap:.1f} %", f"{'':30}" + "".join(f" {column:>11}" for column in columns)]
        for row in (*self.kinds, *self.layers):
            figures = (row.kept, row.recomputed, row.offloaded)[: len(columns)]
            lines.append(f"{row.name:30}" + "".join(f" {_gib(n):>11}" for n in figures))
        return "\n".join(lines)


def _gib(n: int) -> str:
    return f"{n / 2**30:.3f} GiB" if n >= 2**27 else f"{n / 2**20:.2f} MiB"


@dataclass(frozen=True)
class Request:
    """A memory budget as the user gave it, made bytes once the device is known."""

    budget: int | str | None
    host_budget: int | str | None = None
    respect_checkpointing: bool = False
    strict: bool = False
    followed: bool = False  # by other graphs of the step, after a graph break
    made: list[MemoryPlan] = field(default_factory=list, compare=False, repr=False)  # a report of each graph, in order

    @staticmethod
    def of(options: Options, gm: GraphModule) -> Request | None:
        """Raises: BudgetError for a part of a graph that DistributedDataParallel has cut."""
        if options.memory_budget is None:
            return None
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is not None and reason.reason.startswith("DDPOptimizer"):
            raise BudgetError(
                "memory_budget is for whole graphs, and DistributedDataParallel cuts them into buckets. Set "
                "torch._dynamo.config.optimize_ddp = False"
            )
        followed = reason is not None and reason.graph_break
        return Request(
            options.memory_budget, options.host_budget, options.respect_checkpointing, options.strict, followed
        )

    def state(self) -> str:
        """What a plan depends on beside the graph: it is part of cache keys. Rounded, so that it seldom changes."""
        if job()[1] > 1:
            return f"{uuid.uuid4()}"  # agreed on anew by each job
        if not torch.cuda.is_available():
            return ""
        device = torch.device("cuda", torch.cuda.current_device())
        return f"{ceilings(device)} {torch.cuda.memory_allocated(device) >> 26} {self.host_bytes_on(device) >> 26}"

    def bytes_on(self, device: torch.device, base: int) -> int | None:
        """Raises: BudgetError where the device has no such memory."""
        if self.budget is None:
            return None
        asked, what = parse_bytes(self.budget, "memory_budget"), f"memory_budget {self.budget!r}"
        if device.type != "cuda":
            if asked is None:
                raise BudgetError(f"{what} reads how much memory a GPU has free. On {device.type}, give it in bytes")
            return asked
        free, total = torch.cuda.mem_get_info(device)
        if asked is None:
            return int((base + free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) * 0.95)
        if asked > total:
            raise BudgetError(f"{what} is more than the {_gib(total)} of the device. Lower it, or use 'auto'")
        return asked

    def host_bytes_on(self, device: torch.device) -> int:
        """Bytes of host memory to send values to: as asked, else half of this process's share of what the host has."""
        if device.type != "cuda" or self.host_budget == 0:
            return 0
        if self.host_budget is not None and (asked := parse_bytes(self.host_budget, "host_budget")) is not None:
            return asked
        return _host_memory() // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _host_memory() -> int:
    """Of the machine, or what a container is limited to."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0  # a system that does not say
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(pathlib.Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return total


class BudgetError(ValueError):
    """A memory budget that no plan can meet, or that means nothing on this device."""


# --- Into the graph ------------------------------------------------------------------------------------------------


def apply(gm: GraphModule, backward: set[Node], request: Request, num_fwd_outputs: int) -> MemoryPlan:
    """Plan a joint graph, and have its backward do as planned. Raises: BudgetError."""
    if not request.respect_checkpointing:
        forget_hints(gm.graph)
    hold(gm)
    begun = time.perf_counter()
    terms = agreed(gm.graph, terms_of(gm, request))
    joint = Joint(gm, backward, num_fwd_outputs, terms, request.followed)
    try:
        answer, chosen, peak = joint.plan(None if terms.budget is None else int(terms.budget * (1 - MARGIN)))
    except Infeasible as error:
        raise BudgetError(_too_small(request, terms.budget or 0, error.smallest)) from None
    made = replace(summary(joint, answer, chosen, peak, terms.budget), planning_seconds=time.perf_counter() - begun)
    if not request.followed:
        _unused.clear()
    elif terms.budget is not None:
        _unused[_frame()] = (int(terms.budget * (1 - MARGIN)) - joint.base) // 2 - joint.kept(chosen)
    request.made.append(made)
    rematerialize(gm.graph, joint.storages, chosen, joint.values, joint.calls, joint.steps(chosen))
    gm.recompile()
    return made


# Of each frame of this step so far, all followed by others: bytes that its graph might keep and does not.
_unused: dict[int | None, int] = {}


def _frame() -> int | None:
    """Which piece of the user's program is being compiled: the same one again has the same number."""
    compiled = CompileContext.current_compile_id()
    return compiled.frame_id if compiled is not None else None


def _too_small(request: Request, budget: int, smallest: int) -> str:
    text = "this step can run in. Raise it, or shorten the batch or the sequence"
    if request.followed:
        text = f"{text}, or remove the graph break after this graph: as much as it keeps is left to those behind it"
    elif _unused:
        # Of what is added, every graph before takes half of what the one before it left.
        text = f"{text}, or remove the graph break before this graph: what came before it keeps its part"
        within = int(budget * (1 - MARGIN))
        smallest = within + 2 ** len(_unused) * (smallest + sum(_unused.values()) - within)
    _unused.clear()  # this step ends here
    least = int(smallest / (1 - MARGIN)) + 1
    shown = _gib(least + (2**20 if least >= 2**27 else 2**14))  # rounded, and so still enough
    return f"memory_budget {request.budget!r} is below {shown}, the least that {text}"


def terms_of(gm: GraphModule, request: Request) -> Terms:
    """Raises: BudgetError where the device has no such memory."""
    device = device_of(gm)
    base = base_of(gm, device)
    return Terms(base, request.bytes_on(device, base), request.host_bytes_on(device), ceilings(device))


def forget_hints(graph: Graph) -> None:
    """Take off the marks of `gradient_checkpointing_enable()`; a user's own policy (MUST_...) stays."""
    for node in graph.nodes:
        if node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE:
            del node.meta["recompute"]


def summary(joint: Joint, answer: Plan, chosen: dict[Node, str], peak: int, budget: int | None) -> MemoryPlan:
    kinds: dict[str, list[int]] = {}
    layers: dict[str, list[int]] = {}
    names = {node: name for name, _, nodes in reversed(joint.parts) for node in nodes}
    for root, what in chosen.items():
        if root.op == "placeholder" or what == "drop":
            continue
        call = root.args[0] if root.target is operator.getitem else root
        target: Any = call.target if isinstance(call, Node) else call
        kind = getattr(target, "_opname", None) or str(target)
        for table, key in ((kinds, kind), (layers, names[root])):
            column = ("keep", "recompute", "offload").index(what)
            table.setdefault(key, [0, 0, 0])[column] += nbytes_of(root.meta["val"])
    rows = [tuple(Row(k, *v) for k, v in sorted(t.items(), key=_by_size)) for t in (kinds, layers)]
    extra = sum(c.seconds for copies in answer.layers for c in copies)
    time = (joint.seconds + extra) / EFFICIENCY, extra / EFFICIENCY
    return MemoryPlan(budget, peak, joint.peak_at(chosen), *time, answer.gap, answer.host, rows[0], rows[1])


def _by_size(item: tuple[str, list[int]]) -> tuple[int, str]:
    return -sum(item[1]), item[0]
