"""A joint graph as the planner sees it: cut into layers, planned, and the plan checked on the whole.

Layers are the outermost numbered modules of the nodes' paths; with what lies before and after them they are the parts.
Equal neighbours are solved once. The peak that is promised is that of the whole graph, walked through as decided.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .cost import Ceilings, nbytes_of
from .front import Segment
from .memory import Step, Storages, Work, calls_of, is_view, work_of
from .planner import Infeasible, Plan, plan
from .ranks import Terms

_NUMBERED = re.compile(r"\.(\d+)(?=\.|$)|\[(\d+)\]|\['(\d+)'\]")
_LINK = 0.8  # of the measured bandwidth to the host: others on the machine use it too
_ROOMS = 128  # that `Joint.plan` may look at


class Joint:
    """followed  other graphs of the step run while this one's kept values are held, and need room too"""

    def __init__(
        self, gm: GraphModule, backward: set[Node], num_fwd_outputs: int, terms: Terms, followed: bool = False
    ) -> None:
        self.graph = gm.graph
        self.storages = Storages(gm.graph, backward, num_fwd_outputs)
        self.base, self.host_budget, self.followed = terms.base, terms.host_budget, followed
        link = terms.ceilings.host_bandwidth if terms.host_budget else None
        self.ceilings: Ceilings = replace(terms.ceilings, host_bandwidth=link and _LINK * link)
        nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        self.work, self.values = work_of(nodes, self.storages, self.ceilings)
        self.calls = calls_of(nodes, self.storages)
        self.seconds = sum(self.storages.seconds(n, self.ceilings) for n in nodes)
        self.part_of: dict[Node, str] = {}
        self.parts = self._cut(nodes, backward)

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
            self.part_of[n] = names[part[n]]
        return [
            (name, *work_of(group, self.storages, self.ceilings, shared))
            for name, group in zip(names, groups, strict=True)
            if group
        ]

    def plan(self, budget: int | None) -> tuple[Plan, dict[Node, str], int]:
        """The planner's answer, what it means for each value, and the peak of the whole graph with it.

        Layer by layer the peak is estimated a little higher or lower than it is over the whole. So the room that the
        planner is given is searched for, between the least possible and the most that is of use, by halves. A larger
        budget turns to more room wherever a smaller one does, so that more bytes never give a slower plan.

        Raises: Infeasible.
        """
        segments, parts = self._segments()
        bandwidth, host = self.ceilings.host_bandwidth, self.host_budget

        def at(room: int | None) -> tuple[Plan, dict[Node, str], int]:
            answer = plan(segments, self.base, room, bandwidth, host, self.followed)
            return answer, *self._weighed(answer, parts)

        fastest = at(None)
        if budget is None or fastest[2] <= budget:
            return fastest
        try:
            least = plan(segments, self.base, 1, bandwidth, host, self.followed).peak
        except Infeasible as error:
            least = error.smallest
        rooms = [least + (fastest[0].peak - least) * i // _ROOMS for i in range(_ROOMS)]
        found = _Found(lambda i: at(rooms[i]))
        # How far off an estimate may be, for all budgets alike: what the fastest plan's shows, and two rooms.
        slack = 2 * (abs(fastest[2] - fastest[0].peak) + rooms[1] - rooms[0])

        def fits(i: int, sure: bool) -> bool:
            by_far = not sure and abs(rooms[i] - budget) > slack
            return rooms[i] < budget if by_far else found[i][2] <= budget

        best = _last(lambda i: fits(i, False), _ROOMS)
        if best < 0 or found[best][2] > budget:  # what seemed far from the budget was not
            best = _last(lambda i: fits(i, True), best if best > 0 else _ROOMS)
        if best < 0:
            raise Infeasible(budget, min(peak for _, _, peak in found.values()))
        return found[best]

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
        """Bytes that a budget must have; as `planner.plan` says for a graph that others follow."""
        highest = max(self.work.peaks(self._choices(chosen), True, self.ceilings.host_bandwidth))
        return self.base + max(highest, 2 * self.kept(chosen) if self.followed else 0)

    def kept(self, chosen: dict[Node, str]) -> int:
        """Bytes that the forward makes and keeps."""
        own = [node for node, value in zip(self.values, self.work.values, strict=True) if value.choice != "free"]
        return sum(nbytes_of(node.meta["val"]) for node in own if chosen.get(node) == "keep")

    def peak_at(self, chosen: dict[Node, str]) -> str:
        """Where the peak falls: in the forward or backward of which part, at which call."""
        walks = self.work.walks(self._choices(chosen), True, self.ceilings.host_bandwidth)
        backward = walks[1][0] > walks[0][0]
        step, half = walks[backward][1], "backward" if backward else "forward"
        if step is None:
            return f"the start of the {half}"
        calls = {"call": self.calls[backward], "again": self.calls[0]}.get(step.kind, self.values)
        node = calls[step.index]
        return f"{half} of {self.part_of.get(node, 'the graph')}, {node.name}"

    def steps(self, chosen: dict[Node, str]) -> tuple[list[Step], list[Step]]:
        """What runs in the forward, and in the backward."""
        choices, bandwidth = self._choices(chosen), self.ceilings.host_bandwidth
        return self.work.forward_steps(choices, bandwidth), self.work.backward_steps(choices, bandwidth)

    def _choices(self, chosen: dict[Node, str]) -> list[str]:
        return [chosen.get(node, "drop") for node in self.values]

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
            peaks = functools.cache(functools.partial(work.peaks, host_bandwidth=self.ceilings.host_bandwidth))
            # Copies to the host have the forward's time, those back the backward's.
            halves = [op.seconds for op in work.forward if not op.late], [op.seconds for op in work.backward]
            segments.append(Segment(name, work.values, 1, grads, peaks, 2 * min(map(sum, halves))))
        return [replace(s, count=len(copies)) for s, copies in zip(segments, parts, strict=True)], parts

    def _chosen(self, answer: Plan, parts: list[list[list[Node]]]) -> dict[Node, str]:
        """Of each value the strongest that its readers chose: what one keeps is there for all."""
        rank = {"drop": 0, "recompute": 1, "offload": 2, "keep": 3}
        chosen: dict[Node, str] = {}
        for copies, choices in zip(parts, answer.layers, strict=True):
            for nodes, choice in zip(copies, choices, strict=True):
                for node, what in zip(nodes, choice.choices, strict=True):
                    late = what in ("keep", "offload") and self.storages.is_late(node)
                    if rank[what] > rank.get(chosen.get(node, "drop"), 0):
                        chosen[node] = "recompute" if late else what
        return chosen


class _Found(dict[int, tuple[Plan, dict[Node, str], int]]):
    """What was looked at."""

    def __init__(self, look: Callable[[int], tuple[Plan, dict[Node, str], int]]) -> None:
        super().__init__()
        self.look = look

    def __missing__(self, key: int) -> tuple[Plan, dict[Node, str], int]:
        self[key] = self.look(key)
        return self[key]


def _last(holds: Callable[[int], bool], n: int) -> int:
    """By halves, the last of the numbers below `n` for which something holds that does for all before; -1: for none."""
    low, high = -1, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def base_of(gm: GraphModule, device: torch.device) -> int:
    """Bytes that are there whatever is planned: on a GPU what is allocated, else what the graph is given."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    given = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") and "tangents" not in str(n.target)]
    return sum(nbytes_of(n.meta.get("val")) for n in given)


def device_of(gm: GraphModule) -> torch.device:
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
