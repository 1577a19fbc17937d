"""What a joint graph allocates, and when: storages, not tensors, at every position of forward and backward.

`Work` is a joint graph, or the part of it that belongs to one layer, in numbers: values that the forward makes, what
each operator reads and makes, how many bytes it works in. Equal layers give equal `Work`. `Work.peaks` walks through it
for a choice of what is kept and what is made again, the latter right before the backward first needs it.

Numerics: bytes of the unfused graph. What Inductor fuses is not allocated, so a peak is rather over- than understated.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..kernels._op import WORKSPACE
from .cost import Ceilings, arguments, nbytes_of, seconds
from .cost import is_view as _renames
from .planner import Value


@dataclass(frozen=True)
class Operation:
    """One call: values it reads and makes (indices), other bytes it reads from and makes for the backward alone."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    workspace: int = 0
    late: bool = False  # does not run in the forward, though it reads no gradient: the backward makes it, once


@dataclass(frozen=True)
class Work:
    """`values` are the forward's; indices from len(values) on are gradients, with their bytes in `gradients`."""

    values: tuple[Value, ...]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    gradients: tuple[int, ...]
    leave_forward: tuple[int, ...]  # values that something later in the forward, or the caller, still reads
    leave_backward: tuple[int, ...]  # gradients that something later, or the caller, still reads
    results: tuple[int, ...]  # of these the ones that are returned: gradients of parameters

    def peaks(self, choices: Sequence[str], keep_freed: bool = False) -> tuple[int, int]:
        """Peak bytes of the forward, and of the backward beyond what is kept.

        keep_freed  kept values are freed after their last use and count in the backward's peak: for a whole graph
        """
        kept = {i for i, c in enumerate(choices) if c == "keep" and self.values[i].choice != "free"}
        free = {i for i, v in enumerate(self.values) if v.choice == "free"}
        early = [op for op in self.forward if not op.late]
        forward = self._walk(early, free, kept | set(self.leave_forward), set())
        steps = self._with_recomputation(choices)
        start = kept if keep_freed else set()
        known = free | (set() if keep_freed else kept)
        return forward, self._walk(steps, known, set(self.leave_backward), start)

    def _with_recomputation(self, choices: Sequence[str]) -> list[Operation]:
        """The backward's operations, with those that make values again right before their first use."""
        makers = {i: op for op in self.forward for i in op.makes}
        made = {i for i, c in enumerate(choices) if c != "recompute"}
        steps: list[Operation] = []

        def ensure(wanted: Iterable[int]) -> None:
            stack = [i for i in wanted if i < len(self.values) and i not in made]
            while stack:
                op = makers.get(stack[-1])
                missing = [i for i in (op.reads if op else ()) if i not in made]
                if missing:
                    stack.extend(missing)
                    continue
                i = stack.pop()
                if i not in made and op is not None:
                    steps.append(op)
                    made.update(op.makes)
                made.add(i)

        for op in self.backward:
            ensure(op.reads)
            steps.append(op)
        return steps

    def _walk(self, steps: Sequence[Operation], unseen: set[int], stays: set[int], live: set[int]) -> int:
        """Peak bytes. `unseen` counts nowhere, `stays` is not freed, `live` is there at the start."""
        last = {i: at for at, op in enumerate(steps) for i in (*op.reads, *op.makes)}
        first_made = {i for op in steps for i in op.makes}
        live = {i for i in live if i not in unseen}
        # What is read and made nowhere here comes from outside: it is there from the start.
        live |= {i for i in last if i not in first_made and i not in unseen}
        now = peak = sum(map(self._bytes, live))
        for at, op in enumerate(steps):
            new = [i for i in op.makes if i not in live and i not in unseen]
            live.update(new)
            now += sum(map(self._bytes, new))
            peak = max(peak, now + op.workspace)
            for i in {*op.reads, *op.makes}:
                if i in live and last[i] == at and i not in stays:
                    live.remove(i)
                    now -= self._bytes(i)
        return peak

    def _bytes(self, i: int) -> int:
        return self.values[i].nbytes if i < len(self.values) else self.gradients[i - len(self.values)]


# --- From a graph --------------------------------------------------------------------------------------------------


class Storages:
    """The tensors of a joint graph, views merged into what they view."""

    def __init__(self, graph: Graph, backward: set[Node], num_fwd_outputs: int) -> None:
        self.backward = backward
        self.forward: set[Node] = set()  # what the outputs are made from; the rest is made in the backward, once
        results: Any = graph.output_node().args[0]
        todo = [n for n in results[:num_fwd_outputs] if isinstance(n, Node)]
        while todo:
            node = todo.pop()
            if node not in self.forward:
                self.forward.add(node)
                todo += node.all_input_nodes
        self.roots: dict[Node, Node] = {}
        for node in graph.nodes:
            self.roots[node] = self.roots[node.all_input_nodes[0]] if is_view(node) else node

    def is_late(self, node: Node) -> bool:
        """Is a call needed by the backward alone, though it reads no gradient?"""
        node = self.roots[node]
        call = node.args[0] if node.target is operator.getitem else node
        return call.op == "call_function" and call not in self.forward and call not in self.backward  # pyright: ignore

    def read(self, node: Node) -> list[Node]:
        """Roots of the tensors that a call reads, in order, each once."""
        return list(dict.fromkeys(self.roots[n] for n in node.all_input_nodes if _tensor(n) is not None))

    def made(self, node: Node) -> list[Node]:
        """Roots that a call makes: itself, or those of its outputs that are tensors."""
        if isinstance(node.meta.get("val"), (tuple, list)):
            return [u for u in node.users if u.target is operator.getitem and _tensor(u) is not None]
        return [node] if _tensor(node) is not None else []


def work_of(
    nodes: Sequence[Node], storages: Storages, ceilings: Ceilings, free: Iterable[Node] = ()
) -> tuple[Work, list[Node]]:
    """The `Work` of some calls of a joint graph, in graph order, and the node of each of its values.

    Values read but made elsewhere may only be kept, or are free where they are placeholders, in `free` or late.
    """
    calls = [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem and not is_view(n)]
    forward = [n for n in calls if n not in storages.backward]
    backward = [n for n in calls if n in storages.backward]
    own = {root: n for n in forward for root in storages.made(n)}
    read = [root for n in calls for root in storages.read(n) if root not in storages.backward]
    values = list(dict.fromkeys([*read, *own]))
    grads = list(dict.fromkeys(g for n in backward for g in [*storages.read(n), *storages.made(n)] if g not in values))
    at = {node: i for i, node in enumerate([*values, *grads])}
    needed = {root for n in backward for root in storages.read(n)}
    free = set(free)
    number = {n: i for i, n in enumerate(forward)}

    def value(root: Node) -> Value:
        call = own.get(root)
        there = _held(root) or root in free or storages.is_late(root)
        choice = _choice(root, call, storages) if call is not None else "free" if there else "keep"
        inputs = tuple(at[r] for r in storages.read(call)) if call is not None else ()
        time = seconds(call, ceilings) if call in storages.forward else 0.0
        node = number[call] if call is not None else -1 - at[root]
        read = root in needed or (call is not None and storages.is_late(call))
        return Value("", nbytes_of(root.meta["val"]), inputs, time, node, read, choice)

    def operation(n: Node) -> Operation:
        makes = tuple(at[r] for r in storages.made(n))
        return Operation(tuple(at[r] for r in storages.read(n)), makes, workspace(n), storages.is_late(n))

    here = set(nodes)
    leaving = {g: [u for u in _users(g, storages) if u not in here] for g in grads}
    work = Work(
        tuple(map(value, values)),
        tuple(map(operation, forward)),
        tuple(map(operation, backward)),
        tuple(nbytes_of(g.meta["val"]) for g in grads),
        tuple(at[v] for v in own if any(u not in here and u not in storages.backward for u in _users(v, storages))),
        tuple(at[g] for g, users in leaving.items() if users),
        tuple(at[g] for g, users in leaving.items() if any(u.op == "output" for u in users)),
    )
    return work, values


def _users(root: Node, storages: Storages) -> Iterable[Node]:
    for user in root.users:
        yield user
        if is_view(user):
            yield from _users(user, storages)


def _tensor(node: Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _held(root: Node) -> bool:
    return root.op in ("placeholder", "get_attr")


def _choice(root: Node, call: Node, storages: Storages) -> str:
    """Whether a value may be kept and may be made again."""
    policy = root.meta.get("recompute", call.meta.get("recompute"))
    if _acts(call) or policy is CheckpointPolicy.MUST_SAVE:
        return "keep"
    again = policy in _AGAIN and not _leaves_region(root, storages)
    return "recompute" if again or storages.is_late(call) else "any"


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _leaves_region(root: Node, storages: Storages) -> bool:
    """Does the next checkpointed region begin with it? Made again, it would take all regions before along."""
    region = root.meta.get("ac_graph_id", 0)
    return any(u.meta.get("recompute") in _AGAIN and u.meta.get("ac_graph_id", 0) > region
               for u in _users(root, storages))  # fmt: skip


def _acts(call: Node) -> bool:
    """Is a second call something else than the first: random numbers, collectives, writes, effects?"""
    if not isinstance(call.target, torch._ops.OpOverload):
        return isinstance(call.target, torch._ops.HigherOrderOperator)
    random = torch.Tag.nondeterministic_seeded in call.target.tags
    collective = call.target.namespace in ("_c10d_functional", "c10d_functional", "c10d", "_c10d_functional_autograd")
    return random or collective or call.target._schema.is_mutable


def is_view(node: Node) -> bool:
    """Does a node give (part of) the memory of its first input? One of several outputs does if all are views of it."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_view(node.args[0])
    return _renames(node)


def workspace(call: Node) -> int:
    """Bytes that an operator of this package allocates and frees again while it runs."""
    by: Any = WORKSPACE.get(call.target)  # pyright: ignore[reportArgumentType]
    if by is None:
        return 0
    args, kwargs = arguments(call)
    return by(*args, **kwargs)
