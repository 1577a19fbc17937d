"""A plan written into a joint graph: what the backward makes again becomes nodes of its own, where they are needed.

After that the backward reads of what the forward made only what is kept (of what was sent to the host, its copy there):
a partitioner that saves what the backward reads gives the planned graphs. New nodes stand in the order of the simulated
steps, so that what was predicted is what runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..kernels._offload import arrived, offload, offloaded, reload
from .memory import Step, Storages, remaking


def rematerialize(
    graph: Graph,
    storages: Storages,
    chosen: dict[Node, str],
    values: Sequence[Node],
    calls: tuple[Sequence[Node], Sequence[Node]],
    steps: tuple[Sequence[Step], Sequence[Step]],
) -> None:
    """Rewrite the backward of a joint graph.

    chosen  for each value "keep", "recompute", "offload"; dropped ones may be absent
    values, calls, steps  of the whole graph's `Work`: the nodes that indices mean; of the forward, of the backward
    """
    writer = _Writer(graph, storages, chosen)
    writer.send(values, calls[0], steps[0])
    waiting: list[Step] = []
    before: dict[Node, list[Step]] = {}
    for step in steps[1]:
        if step.kind == "call":
            before[calls[1][step.index]], waiting = waiting, []
        else:
            waiting.append(step)
    for node in list(graph.nodes):
        if node in storages.backward and node.op == "call_function":
            with graph.inserting_before(node):
                for step in before.get(node, ()):
                    writer.make(step, values, calls[0])
                node.args, node.kwargs = map_arg((node.args, node.kwargs), writer.stand_in)  # type: ignore[assignment]
    output = graph.output_node()
    with graph.inserting_before(output):
        for step in waiting:
            writer.make(step, values, calls[0])
        results: Any = output.args[0]
        first = storages.num_fwd_outputs
        output.args = ((*results[:first], *map_arg(tuple(results[first:]), writer.stand_in)),)
    for node in graph.nodes:
        node.meta.pop("recompute", None)
    graph.eliminate_dead_code()
    graph.lint()


class _Writer:
    def __init__(self, graph: Graph, storages: Storages, chosen: dict[Node, str]) -> None:
        self.graph, self.storages, self.chosen = graph, storages, chosen
        self.there: dict[Node, Node] = {}  # for a node of the forward, what the backward reads in its place
        self.hosted: dict[Node, Node] = {}
        self.on_the_way: dict[Node, Node] = {}

    def send(self, values: Sequence[Node], forward: Sequence[Node], steps: Iterable[Step]) -> None:
        """Each copy to the host begins where its value is made, and is waited for at its "store"."""
        last: Node | None = None
        for step in steps:
            if step.kind == "call":
                last = forward[step.index]
                continue
            value = values[step.index]
            with self.graph.inserting_after(value):
                ticket = self._call(offload, (value,), value, "is_forward")
            place = last if last is not None and last is not value else ticket
            while place.next.op == "call_function" and place.next.target is operator.getitem:
                place = place.next
            with self.graph.inserting_after(max(place, ticket)):
                self.hosted[value] = self._call(offloaded, (ticket, value), value, "is_forward")

    def make(self, step: Step, values: Sequence[Node], forward: Sequence[Node]) -> None:
        if step.kind == "again":
            self.there[forward[step.index]] = self._copy(forward[step.index])
            return
        value = values[step.index]
        if step.kind == "load":
            self.on_the_way[value] = self._call(reload, (self.hosted[value], value.meta["val"].device), value)
        else:
            self.there[value] = self._twin(value)

    def stand_in(self, node: Node) -> Node:
        """What the backward reads for a node."""
        if node in self.there:
            return self.there[node]
        known = node.op in ("placeholder", "get_attr") or node in self.storages.backward
        value = node.meta.get("val")
        if known or not isinstance(value, (Tensor, tuple, list)):
            return node
        if node is not self.storages.roots[node]:
            self.there[node] = self._copy(node)
        elif self.chosen.get(node) == "offload":
            given = self.on_the_way[node], self.hosted[node], value.device  # type: ignore[union-attr]
            self.there[node] = self._call(arrived, given, node)
        elif node.target is operator.getitem and node.args[0] in self.there and self.chosen.get(node) != "keep":
            self.there[node] = self._copy(node)
        else:
            assert self.chosen.get(node) == "keep", f"{node} is read by the backward, but neither kept nor made again"
            return node
        return self.there[node]

    def _copy(self, node: Node) -> Node:
        args, kwargs = map_arg((node.args, node.kwargs), self.stand_in)
        made = self.graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_again", node.type)
        made.meta = dict(node.meta)
        made.meta["partitioner_tag"] = "is_backward"
        return made

    def _twin(self, value: Node) -> Node:
        found = remaking(value.args[0])  # type: ignore[arg-type]
        assert found is not None
        call = self._call(found[0], map_arg(found[1], self.stand_in), value)
        return self._call(operator.getitem, (call, 0), value)

    def _call(self, target: Any, args: tuple[Any, ...], origin: Node, tag: str = "is_backward") -> Node:
        made = call_like(self.graph, target, args, origin)
        made.meta["partitioner_tag"] = tag
        return made


def call_like(graph: Graph, target: Any, args: tuple[Any, ...], origin: Node) -> Node:
    """A new call that is said to come from where `origin` does."""
    made = graph.call_function(target, args)
    # Only where it comes from: what else torch notes of a node describes the arguments of the old call.
    made.meta = {k: v for k, v in origin.meta.items() if k in ("nn_module_stack", "stack_trace", "custom")}
    with origin.meta["val"].fake_mode, torch.no_grad():
        made.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
    return made
