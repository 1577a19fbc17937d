"""A byte budget over a joint graph: what the planner is asked, and how its answer reaches the partitioner.

The graph is cut into layers (the outermost numbered module of a node's path) and what lies before and after them; equal
neighbours are solved once. What is decided is written on the nodes as MUST_SAVE and MUST_RECOMPUTE, which torch's
partitioner obeys. The peak that is promised is that of the whole graph, walked through with the decision made.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from .cost import Ceilings, ceilings, nbytes_of, seconds
from .memory import Storages, Work, is_view, work_of
from .options import Options, parse_bytes
from .planner import Infeasible, Plan, Segment, plan

_NUMBERED = re.compile(r"\.(\d+)(?=\.|$)|\[(\d+)\]|\['(\d+)'\]")
MARGIN = 0.03  # of a budget: what allocators round up and keep apart
EFFICIENCY = 0.85  # of its ceilings, what a whole step reaches: 0.83 and 0.87 for two models on an H200
_RUNGS = 12  # of the ladder in `Joint.plan`
_HALVES = 4


@dataclass(frozen=True)
class Row:
    """What one kind of operator, or one layer, keeps and makes again, in bytes."""

    name: str
    kept: int
    recomputed: int


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of one graph. Bytes include what is on the device anyway."""

    budget: int | None
    peak: int
    peak_at: str
    seconds: float  # predicted, of forward and backward
    extra_seconds: float  # of these, what making values again costs
    gap: float
    kinds: tuple[Row, ...]
    layers: tuple[Row, ...]

    def __str__(self) -> str:
        head = f"predicted peak {_gib(self.peak)} ({self.peak_at}), "
        head += f"budget {_gib(self.budget)}, " if self.budget is not None else "no budget, "
        head += f"step {1e3 * self.seconds:.2f} ms, of it {1e3 * self.extra_seconds:.2f} ms making values again, "
        lines = [f"{head}gap {100 * self.gap:.1f} %", f"{'':30} {'kept':>11} {'made again':>11}"]
        lines += [
            f"{row.name:30} {_gib(row.kept):>11} {_gib(row.recomputed):>11}" for row in (*self.kinds, *self.layers)
        ]
        return "\n".join(lines)


def _gib(n: int) -> str:
    return f"{n / 2**30:.3f} GiB" if n >= 2**27 else f"{n / 2**20:.2f} MiB"


@dataclass(frozen=True)
class Request:
    """A memory budget as the user gave it, made bytes once the device is known."""

    budget: int | str | None
    respect_checkpointing: bool = False
    strict: bool = False
    made: list[MemoryPlan] = field(default_factory=list, compare=False, repr=False)  # a report of each graph, in order

    @staticmethod
    def of(options: Options) -> Request | None:
        if options.memory_budget is None:
            return None
        return Request(options.memory_budget, options.respect_checkpointing, options.strict)

    def state(self) -> str:
        """What a plan depends on beside the graph: it is part of cache keys. Rounded, so that it seldom changes."""
        if not torch.cuda.is_available():
            return ""
        device = torch.device("cuda", torch.cuda.current_device())
        return f"{ceilings(device)} {torch.cuda.memory_allocated(device) >> 26}"

    def bytes_on(self, device: torch.device, base: int) -> int | None:
        """Raises: BudgetError where the device has no such memory."""
        if self.budget is None:
            return None
        asked, what = parse_bytes(self.budget), f"memory_budget {self.budget!r}"
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


class BudgetError(ValueError):
    """A memory budget that no plan can meet, or that means nothing on this device."""


# --- Planning ------------------------------------------------------------------------------------------------------


class Joint:
    """A joint graph as the planner sees it."""

    def __init__(self, gm: GraphModule, backward: set[Node], num_fwd_outputs: int) -> None:
        self.graph = gm.graph
        self.storages = Storages(gm.graph, backward, num_fwd_outputs)
        self.device = _device(gm)
        self.ceilings: Ceilings = ceilings(self.device)
        nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        self.work, self.values = work_of(nodes, self.storages, self.ceilings)
        self.seconds = sum(seconds(n, self.ceilings) for n in nodes)
        self.parts = self._cut(nodes, backward)
        self.base = self._base()

    def _base(self) -> int:
        """Bytes that are there whatever is planned: on a GPU what is allocated, else what the graph is given."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        given = [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr") and "tangents" not in str(n.target)]
        return sum(nbytes_of(n.meta.get("val")) for n in given)

    def _cut(self, nodes: Sequence[Node], backward: set[Node]) -> list[tuple[str, Work, list[Node]]]:
        """Name, `Work` and value nodes of each part, in forward order."""
        places = _places([n for n in nodes if n not in backward and not self.storages.is_late(n)])
        named = [n for n in places if places[n] is not None]
        order: dict[Any, int] = {place: i + 1 for i, place in enumerate(dict.fromkeys(places[n] for n in named))}
        end, last = len(order) + 1, named[-1] if named else None
        part: dict[Node, int] = {}
        current = 0
        for n in places:
            current = max(current, order.get(places[n], 0))
            part[n] = current
            current = end if n is last else current
        for n in nodes:
            if n in backward or self.storages.is_late(n):
                # A backward step belongs to the earliest layer that it reads of: gradients flow towards the first. What
                # is made before the layers (tables of angles) is read by all of them.
                read = [part[r] for a in n.all_input_nodes if part.get(r := self.storages.roots[a])]
                part[n] = min(read, default=end)
            elif is_view(n):
                part[n] = part.get(self.storages.roots[n], part[n])
        shared = [root for root in self.storages.roots.values() if part.get(root) == 0]
        names = ["before the layers", *(f"{p[0].rsplit('.', 1)[-1]}.{p[1]}" for p in order), "after the layers"]
        groups: list[list[Node]] = [[] for _ in names]
        for n in nodes:
            groups[part[n]].append(n)
        return [
            (name, *work_of(group, self.storages, self.ceilings, shared))
            for name, group in zip(names, groups, strict=True)
            if group
        ]

    def plan(self, budget: int | None) -> tuple[Plan, dict[Node, str], int]:
        """The planner's answer, what it means for each value, and the peak of the whole graph with it.

        Layer by layer the peak is estimated a little higher or lower than it is over the whole. So the room that the
        planner is given is searched for: on a ladder from the most that is of use down to the least possible, then by
        halves of the rung above. The rungs are the same for every budget, so that more bytes never give a slower plan.

        Raises: Infeasible.
        """
        segments, parts = self._segments()

        def at(room: int | None) -> tuple[Plan, dict[Node, str], int]:
            answer = plan(segments, self.base, room)
            return answer, *self._weighed(answer, parts)

        best = at(None)
        if budget is None or best[2] <= budget:
            return best
        try:
            least = plan(segments, self.base, 1).peak
        except Infeasible as error:
            least = error.smallest
        high, smallest = best[0].peak, best[2]
        for room in [least + (high - least) * step // _RUNGS for step in reversed(range(_RUNGS))]:
            best = at(room)
            if best[2] <= budget:
                break
            high, smallest = room, min(smallest, best[2])
        else:
            raise Infeasible(budget, smallest)
        for _ in range(_HALVES):
            middle = (room + high) // 2
            found = at(middle)
            if found[2] <= budget:
                room, best = middle, found
            else:
                high = middle
        return best

    def _weighed(self, answer: Plan, parts: list[list[list[Node]]]) -> tuple[dict[Node, str], int]:
        chosen = self._chosen(answer, parts)
        self.check(chosen)
        return chosen, self.peak(chosen)

    def check(self, chosen: dict[Node, str]) -> None:
        """Whatever the backward reads, and whatever making that again reads, is there."""
        for i, value in enumerate(self.work.values):
            what = chosen.get(self.values[i], "drop")
            read = [i] if value.needed else []
            read += value.inputs if what == "recompute" else ()
            for j in read:
                there = self.work.values[j].choice == "free" or chosen.get(self.values[j], "drop") != "drop"
                assert there, f"{self.values[j]} is read by {self.values[i]} but neither kept nor made again"

    def peak(self, chosen: dict[Node, str]) -> int:
        choices = [chosen.get(node, "drop") for node in self.values]
        return self.base + max(self.work.peaks(choices, keep_freed=True))

    def _segments(self) -> tuple[list[Segment], list[list[list[Node]]]]:
        """Equal neighbours as one segment; for each segment the value nodes of each copy."""
        segments: list[Segment] = []
        parts: list[list[list[Node]]] = []
        works: list[Work] = []
        for name, work, nodes in self.parts:
            if works and works[-1] == work:
                parts[-1].append(nodes)
                continue
            works.append(work)
            parts.append([nodes])
            grads = sum(work.gradients[i - len(work.values)] for i in work.results)
            segments.append(Segment(name, work.values, 1, grads, functools.cache(work.peaks)))
        counted = [
            Segment(s.name, s.values, len(copies), s.grad_nbytes, s.transient)
            for s, copies in zip(segments, parts, strict=True)
        ]
        return counted, parts

    def _chosen(self, answer: Plan, parts: list[list[list[Node]]]) -> dict[Node, str]:
        """Of each value the strongest that its readers chose: what one keeps is there for all."""
        rank = {"drop": 0, "recompute": 1, "keep": 2}
        chosen: dict[Node, str] = {}
        for copies, choices in zip(parts, answer.layers, strict=True):
            for nodes, choice in zip(copies, choices, strict=True):
                for node, what in zip(nodes, choice.choices, strict=True):
                    late = what == "keep" and self.storages.is_late(node)
                    if rank[what] > rank.get(chosen.get(node, "drop"), 0):
                        chosen[node] = "recompute" if late else what
        return chosen


def _device(gm: GraphModule) -> torch.device:
    devices = [n.meta["val"].device for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), devices[0] if devices else torch.device("cpu"))


def _places(nodes: Sequence[Node]) -> dict[Node, tuple[str, int] | None]:
    """For each call the list of modules that it comes from, the outermost that has several, and its number there.

    Of several outputs it is the last one's: a sum and the norm after it, which starts the next layer.
    """
    found = {n: [(path[: m.start()], int(next(filter(None, m.groups())))) for m in _NUMBERED.finditer(path)]
             for n in nodes for path in [_path(n)]}  # fmt: skip
    numbers: dict[str, set[int]] = {}
    for prefix, number in (place for places in found.values() for place in places):
        numbers.setdefault(prefix, set()).add(number)
    own = {n: next((p for p in places if len(numbers[p[0]]) > 1), None) for n, places in found.items()}
    places = dict(own)
    for n in nodes:
        if n.target is not operator.getitem:
            outputs = [own[u] for u in n.users if u.target is operator.getitem and own.get(u) is not None]
            places[n] = max([p for p in (own[n], *outputs) if p is not None], key=lambda p: p[1], default=None)
    call = lambda n: n.args[0] if n.target is operator.getitem else n  # noqa: E731
    return {n: places.get(call(n), own[n]) for n in nodes}


def _path(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


# --- Into the graph ------------------------------------------------------------------------------------------------


def apply(gm: GraphModule, backward: set[Node], request: Request, num_fwd_outputs: int) -> MemoryPlan:
    """Plan and mark the nodes of a joint graph. Raises: BudgetError."""
    if not request.respect_checkpointing:
        forget_hints(gm.graph)
    joint = Joint(gm, backward, num_fwd_outputs)
    budget = request.bytes_on(joint.device, joint.base)
    try:
        answer, chosen, peak = joint.plan(None if budget is None else int(budget * (1 - MARGIN)))
    except Infeasible as error:
        smallest = int(error.smallest / (1 - MARGIN)) + 1
        least = _gib(smallest + (2**20 if smallest >= 2**27 else 2**14))  # shown rounded, and so still enough
        raise BudgetError(
            f"memory_budget {request.budget!r} is below {least}, the least that this step can run in. Raise it, or "
            f"shorten the batch or the sequence"
        ) from None
    mark(joint, chosen)
    made = summary(joint, answer, chosen, peak, budget)
    request.made.append(made)
    return made


def forget_hints(graph: Graph) -> None:
    """Take off the marks of `gradient_checkpointing_enable()`; a user's own policy (MUST_...) stays."""
    for node in graph.nodes:
        if node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE:
            del node.meta["recompute"]


def mark(joint: Joint, chosen: dict[Node, str]) -> None:
    """Write the decision on the nodes."""
    policy = {"keep": CheckpointPolicy.MUST_SAVE, "recompute": CheckpointPolicy.MUST_RECOMPUTE}
    tags: dict[Node, CheckpointPolicy] = {}
    for node, root in joint.storages.roots.items():
        what = chosen.get(root)
        # A call with several outputs is no tensor: they are saved, not it.
        possible = what == "recompute" or isinstance(node.meta.get("val"), torch.Tensor)
        if node.op != "placeholder" and node not in joint.storages.backward and what in policy and possible:
            tags[node] = policy[what]
    for node in list(tags):
        if node.target is operator.getitem and tags[node] is CheckpointPolicy.MUST_RECOMPUTE:
            tags[node.args[0]] = tags[node]  # pyright: ignore[reportArgumentType]
    for node in joint.graph.nodes:
        # What is dropped has no mark: torch would see to it that a marked value can be made, needed or not.
        node.meta.pop("recompute", None)
        if node in tags:
            # One region for all: torch saves what leaves a region of the user's, whatever its mark.
            node.meta |= {"recompute": tags[node], "ac_graph_id": 0}


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
            table.setdefault(key, [0, 0])[what == "recompute"] += nbytes_of(root.meta["val"])
    rows = [tuple(Row(k, *v) for k, v in sorted(t.items(), key=_by_size)) for t in (kinds, layers)]
    extra = sum(c.seconds for copies in answer.layers for c in copies)
    time = (joint.seconds + extra) / EFFICIENCY, extra / EFFICIENCY
    return MemoryPlan(budget, peak, answer.peak_at, *time, answer.gap, rows[0], rows[1])


def _by_size(item: tuple[str, list[int]]) -> tuple[int, str]:
    return -sum(item[1]), item[0]
