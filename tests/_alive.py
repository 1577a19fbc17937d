"""What the two halves of a training step hold, found from the graphs themselves and not as the planner finds it.

Two tensors share memory where torch's fake tensors do; all else is a walk through the nodes in the order they run.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fused_backend.compiler import Options, budget, partition
from fused_backend.compiler.backend import lower, rewrite
from fused_backend.compiler.budget import Request
from fused_backend.compiler.joint import Joint
from fused_backend.kernels._op import WORKSPACE
from torch.fx import GraphModule, Node

# What costs much to make again.
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "fused_backend::lora_linear")


SENT, FETCHED, ARRIVED = (f"fused_backend::{name}" for name in ("offloaded", "reload", "arrived"))


def tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, torch.Tensor)]


def memory(gm: GraphModule, given: dict[str, list[Hashable]] | None = None) -> tuple[dict[Node, list], dict]:
    """For each node the pieces of memory that its tensors lie in, and the bytes of each piece.

    given  pieces of inputs, by their names: of a backward, what the forward says of them
    """
    pieces: dict[Node, list] = {}
    size: dict[Hashable, int] = {}
    for node in gm.graph.nodes:
        pieces[node] = []
        if node.target is operator.getitem and node.args[0].op != "placeholder":
            position = [i for i, v in enumerate(node.args[0].meta["val"]) if isinstance(v, torch.Tensor)]
            if node.args[1] in position:
                pieces[node] = [pieces[node.args[0]][position.index(node.args[1])]]
            continue
        if named(node) in (SENT, FETCHED, ARRIVED):
            # Host memory does not count; what comes back takes memory from when its copy begins.
            source = tensors(node.args[-1 if named(node) == SENT else 0])[0]
            piece = pieces[node.args[0]][0] if named(node) == ARRIVED else (node.name, 0)
            pieces[node] = [piece]
            size.setdefault(piece, source.untyped_storage().nbytes() if named(node) == FETCHED else 0)
            continue
        for i, t in enumerate(tensors(node) if node.op != "output" else []):
            inputs = [(p, u) for n in node.all_input_nodes for p, u in zip(pieces[n], tensors(n), strict=True)]
            shared = [p for p, u in inputs if u.untyped_storage()._cdata == t.untyped_storage()._cdata]
            known = given[node.name] if given is not None and node.op == "placeholder" and node.name in given else []
            piece = (known or shared or [(node.name, i)])[0]
            size.setdefault(piece, t.untyped_storage().nbytes())
            pieces[node].append(piece)
    return pieces, size


def highest(gm: GraphModule, pieces: dict[Node, list], size: dict, always: set) -> int:
    """The most bytes at any time beyond what is there `always`. Inputs and values go after their last reader."""
    nodes = list(gm.graph.nodes)
    last = {p: at for at, n in enumerate(nodes) for m in (n, *n.all_input_nodes) for p in pieces[m]}
    live = {p for n in nodes if n.op == "placeholder" for p in pieces[n]} - always
    most = sum(size[p] for p in live)
    for at, node in enumerate(nodes):
        if node.op in ("placeholder", "output"):
            continue
        live |= set(pieces[node]) - always
        work = WORKSPACE[node.target](*_values(node.args), **_values(node.kwargs)) if node.target in WORKSPACE else 0
        most = max(most, sum(size[p] for p in live) + work)
        live -= {p for p in live if last[p] <= at}
    return most


def _values(arguments: Any) -> Any:
    return torch.fx.node.map_arg(arguments, lambda n: n.meta["val"])


@dataclass
class Half:
    """One partitioned graph."""

    forward: GraphModule
    backward: GraphModule
    outputs: int  # of the forward that the user sees
    joint: Joint | None = None
    chosen: dict[Node, str] = field(default_factory=dict)
    pieces: dict[Node, tuple] = field(default_factory=dict)  # of the values that were chosen, before the graph changed

    def peak(self) -> int:
        """Bytes of the whole: parameters and inputs, and the higher of the two halves."""
        mine, size = memory(self.forward)
        base = {p for n in self.forward.graph.nodes if n.op == "placeholder" for p in mine[n]}
        theirs, other = memory(self.backward, {n.name: p for n, p in mine.items() if p})
        other |= {p: 0 for p in other if size.get(p) == 0}
        held = sum(size[p] for p in base)
        backward = highest(self.backward, theirs, other, base)
        return held + max(highest(self.forward, mine, size, base), backward)

    def saved(self) -> set:
        """Pieces that the forward makes and hands to the backward."""
        mine, _ = memory(self.forward)
        inputs = {p for n in self.forward.graph.nodes if n.op == "placeholder" for p in mine[n]}
        outputs: Any = self.forward.graph.output_node().args[0]
        return {p for n in outputs[self.outputs :] if isinstance(n, Node) for p in mine[n]} - inputs

    def sizes(self) -> dict:
        """Bytes of each piece that the forward makes or that the plan keeps."""
        planned = {p: n.meta["val"].untyped_storage().nbytes() for n, p in self.pieces.items()}
        return planned | memory(self.forward)[1]

    def planned(self) -> set:
        """Pieces that the plan keeps."""
        return {self.pieces[n] for n, what in self.chosen.items() if what == "keep" and n.op == "call_function"}

    def products(self) -> int:
        """Products made in both halves together."""
        return sum(count(half, *PRODUCTS) for half in (self.forward, self.backward))

    def again(self, *names: str) -> list[str]:
        """Calls of the forward that the backward repeats."""
        first = {n.name for n in self.forward.graph.nodes if n.op == "call_function"}
        calls = [n for n in self.backward.graph.nodes if n.op == "call_function" and (not names or named(n) in names)]
        return [n.name for n in calls if re.sub(r"_again(_\d+)?$", "", n.name) in first]


def _piece(node: Node) -> tuple:
    return (node.args[0].name, node.args[1]) if node.target is operator.getitem else (node.name, 0)  # type: ignore


def named(node: Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


def called(node: Node) -> str:
    """What makes a value: the call, where it is one of several outputs."""
    return named(node.args[0] if node.target is operator.getitem else node)  # type: ignore[arg-type]


def count(gm: GraphModule, *names: str) -> int:
    return sum(named(n) in names for n in gm.graph.nodes)


class Watch:
    """Sees every partitioned graph while it is in force."""

    def __init__(self, monkeypatch: Any) -> None:
        self.halves: list[Half] = []
        summary = budget.summary
        planned: list[tuple[Joint, dict[Node, str], dict[Node, tuple]]] = []

        def spy_summary(joint: Joint, answer: Any, chosen: dict[Node, str], *rest: Any) -> Any:
            planned.append((joint, chosen, {n: _piece(n) for n in chosen}))
            return summary(joint, answer, chosen, *rest)

        def spied(split: Callable[..., Any]) -> Callable[..., Any]:
            def spy(gm: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
                forward, backward = split(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)
                self.halves.append(Half(forward, backward, num_fwd_outputs, *(planned.pop() if planned else ())))
                return forward, backward

            return spy

        for name in ("min_cut_rematerialization_partition", "default_partition"):
            monkeypatch.setattr(partition, name, spied(getattr(partition, name)))
        monkeypatch.setattr(budget, "summary", spy_summary)


class Sweep:
    """A backend that lowers each traced graph without a plan, and with plans from its most down to its least bytes."""

    def __init__(self, watch: Watch, steps: int = 3, respect_checkpointing: bool = False, host_budget: Any = 0) -> None:
        self.watch, self.steps, self.given = watch, steps, (host_budget, respect_checkpointing)
        self.budgets: list[list[int]] = []  # of each graph
        self.halves: list[list[Half]] = []
        self.now = -1  # which step runs; -1: the one without a plan

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options, made = Options(lowering="aot_eager"), self.watch.halves
        _, finish = rewrite(gm, options)
        start = len(made)

        def lowered(request: Request | None) -> Callable[..., Any]:
            return finish(lower(copy.deepcopy(gm), example_inputs, options, None, request))

        without = lowered(None)
        if len(made) == start:
            return without  # nothing in it trains
        widest = lowered(Request(None, *self.given))
        most, least = needed(made[-1].joint)
        budgets = [most - (most - least) * i // (self.steps - 1) for i in range(self.steps)]
        compiled = [widest, *(lowered(Request(b, *self.given)) for b in budgets[1:]), without]
        self.budgets.append(budgets)
        self.halves.append(made[start + 1 :])
        return lambda *args: compiled[self.now](*args)

    def pairs(self) -> list[tuple[int, Half]]:
        return [p for both in zip(self.budgets, self.halves, strict=True) for p in zip(*both, strict=True)]


def needed(joint: Joint | None) -> tuple[int, int]:
    """The most bytes that a budget can be used for, and the least that one can have."""
    assert joint is not None
    try:
        least = joint.plan(1)[2]
    except budget.Infeasible as error:
        least = error.smallest
    return tuple(int(bytes_ / (1 - budget.MARGIN)) + 2 for bytes_ in (joint.plan(None)[2], least))  # type: ignore
