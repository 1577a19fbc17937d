"""What a joint graph allocates, and when: storages, not tensors, at every position of forward and backward.

`Work` is a joint graph, or the part of it that belongs to one layer, in numbers: values that the forward makes, what
each operator reads and makes, how many bytes it works in. Equal layers give equal `Work`. `Work.peaks` walks through it
for a choice of what is kept and what is made again, the latter right before the backward first needs it.

Numerics: bytes of the unfused graph. What Inductor fuses is not allocated, so a peak is rather over- than understated.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from ..kernels._offload import host_nbytes
from ..kernels._op import REMADE
from .cost import Ceilings, move_seconds, nbytes_of, seconds, workspace
from .cost import is_view as _renames
from .front import Value

LEAST_SENT = 2**20  # bytes: a transfer of less is all latency


@dataclass(frozen=True)
class Operation:
    """One call: values it reads and makes (indices), other bytes it reads from and makes for the backward alone."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    workspace: int = 0
    late: bool = False  # does not run in the forward, though it reads no gradient: the backward makes it, once
    seconds: float = 0.0


class Step(NamedTuple):
    """What runs at one place of a forward or backward.

    kind   "call": `index` counts in `Work.forward` or `Work.backward`; in the backward also "again": in `Work.forward`,
           and "twin": of a value. "store", of a value: its copy to the host is waited for; "load": one back begins
    """

    kind: str
    index: int
    op: Operation


Highest = tuple[int, Step | None]  # bytes, and at which step; None: before the first


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
    twins: tuple[tuple[int, Operation], ...] = ()  # values that another call makes again, from less
    returned: tuple[int, ...] = ()  # values that are gradients as they are

    def peaks(
        self, choices: Sequence[str], keep_freed: bool = False, host_bandwidth: float | None = None
    ) -> tuple[int, int]:
        """Peak bytes of the forward, and of the backward beyond what is kept.

        keep_freed  kept values are freed after their last use and count in the backward's peak: for a whole graph
        """
        forward, backward = self.walks(choices, keep_freed, host_bandwidth)
        return forward[0], backward[0]

    def walks(self, choices: Sequence[str], keep_freed: bool, host_bandwidth: float | None) -> tuple[Highest, Highest]:
        """The same, and at which step each peak is."""
        kept = {i for i, c in enumerate(choices) if c == "keep" and self.values[i].choice != "free"}
        free = {i for i, v in enumerate(self.values) if v.choice == "free"}
        forward = self._walk(self.forward_steps(choices, host_bandwidth), free, kept | set(self.leave_forward), set())
        start = kept if keep_freed else set()
        known = free | (set() if keep_freed else kept)
        steps = self.backward_steps(choices, host_bandwidth)
        return forward, self._walk(steps, known, {*self.leave_backward, *self.returned}, start)

    def forward_steps(self, choices: Sequence[str], host_bandwidth: float | None = None) -> list[Step]:
        """The forward's calls, each offloaded value's memory held until its copy has had the time to end.

        Copies run one after the other, each as soon as its value is made.
        """
        away = {i for i, c in enumerate(choices) if c == "offload"}
        steps: list[Step] = []
        now = busy = 0.0
        under_way: list[tuple[float, int]] = []
        for index, op in enumerate(self.forward):
            if op.late:
                continue
            while under_way and under_way[0][0] <= now:
                steps.append(self._store(under_way.pop(0)[1]))
            steps.append(Step("call", index, op))
            now += op.seconds
            for i in away.intersection(op.makes):
                busy = max(busy, now) + self.values[i].nbytes / (host_bandwidth or math.inf)
                under_way.append((busy, i))
        return [*steps, *(self._store(i) for _, i in under_way)]

    def _store(self, i: int) -> Step:
        return Step("store", i, Operation((i,), ()))

    def backward_steps(self, choices: Sequence[str], host_bandwidth: float | None = None) -> list[Step]:
        """The backward's calls, with those that make values again right before their first use.

        Offloaded values come back one after the other, each as late as lets all be there when first read.
        """
        steps = self._with_recomputation(choices)
        away = {i for i, c in enumerate(choices) if c == "offload"}
        begins = list(itertools.accumulate((step.op.seconds for step in steps), initial=0.0))
        first: dict[int, int] = {}
        for at, step in enumerate(steps):
            for i in away.intersection(step.op.reads):
                first.setdefault(i, at)
        free_until = math.inf
        loads: list[tuple[int, int]] = []
        for i, at in sorted(first.items(), key=lambda item: (item[1], item[0]), reverse=True):
            free_until = min(free_until, begins[at]) - self.values[i].nbytes / (host_bandwidth or math.inf)
            loads.append((min(at, max(0, bisect.bisect_right(begins, free_until) - 1)), i))
        for at, i in loads:  # from the last on, so that earlier places stay what they are
            steps.insert(at, Step("load", i, Operation((), (i,))))
        return steps

    def _with_recomputation(self, choices: Sequence[str]) -> list[Step]:
        makers = {i: Step("again", at, op) for at, op in enumerate(self.forward) for i in op.makes}
        makers |= {i: Step("twin", i, op) for i, op in self.twins}
        made = {i for i, c in enumerate(choices) if c != "recompute"}
        steps: list[Step] = []

        def ensure(wanted: Iterable[int]) -> None:
            stack = [i for i in wanted if i < len(self.values) and i not in made]
            while stack:
                i = stack[-1]
                maker = makers.get(i)
                missing = [r for r in (maker.op.reads if maker else ()) if r not in made]
                if i not in made and missing:
                    stack.extend(missing)
                    continue
                stack.pop()
                if i not in made and maker is not None:
                    steps.append(maker)
                    made.update(maker.op.makes)
                made.add(i)

        for at, op in enumerate(self.backward):
            ensure(op.reads)
            steps.append(Step("call", at, op))
        ensure(self.returned)
        return steps

    def _walk(self, steps: Sequence[Step], unseen: set[int], stays: set[int], live: set[int]) -> Highest:
        """`unseen` counts nowhere, `stays` is not freed, `live` is there at the start."""
        last = {i: at for at, step in enumerate(steps) for i in (*step.op.reads, *step.op.makes)}
        first_made = {i for step in steps for i in step.op.makes}
        live = {i for i in live if i not in unseen}
        # What is read and made nowhere here comes from outside: it is there from the start.
        live |= {i for i in last if i not in first_made and i not in unseen}
        now = peak = sum(map(self._bytes, live))
        highest = None
        for at, step in enumerate(steps):
            op = step.op
            new = [i for i in op.makes if i not in live and i not in unseen]
            live.update(new)
            now += sum(map(self._bytes, new))
            if now + op.workspace > peak:
                peak, highest = now + op.workspace, step
            for i in {*op.reads, *op.makes}:
                if i in live and last[i] == at and i not in stays:
                    live.remove(i)
                    now -= self._bytes(i)
        return peak, highest

    def _bytes(self, i: int) -> int:
        return self.values[i].nbytes if i < len(self.values) else self.gradients[i - len(self.values)]


# --- From a graph --------------------------------------------------------------------------------------------------


class Storages:
    """The tensors of a joint graph, views merged into what they view."""

    def __init__(self, graph: Graph, backward: set[Node], num_fwd_outputs: int) -> None:
        self.backward = backward
        self.forward: set[Node] = set()  # what the outputs are made from; the rest is made in the backward, once
        results: Any = graph.output_node().args[0]
        self.num_fwd_outputs = num_fwd_outputs
        self.outputs, self.gradients = (
            [n for n in some if isinstance(n, Node)] for some in (results[:num_fwd_outputs], results[num_fwd_outputs:])
        )
        todo = list(self.outputs)
        while todo:
            node = todo.pop()
            if node not in self.forward:
                self.forward.add(node)
                todo += node.all_input_nodes
        self._times: dict[Node, float] = {}
        copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        self.written: set[Node] = {n.args[0] for n in copies if isinstance(n.args[0], Node)}  # inputs, at the end
        self.roots: dict[Node, Node] = {}
        for node in graph.nodes:
            self.roots[node] = self.roots[node.all_input_nodes[0]] if is_view(node) else node

    def is_late(self, node: Node) -> bool:
        """Is a call needed by the backward alone, though it reads no gradient?"""
        node = self.roots[node]
        call = node.args[0] if node.target is operator.getitem else node
        return call.op == "call_function" and call not in self.forward and call not in self.backward  # pyright: ignore

    def may_leave(self, root: Node) -> bool:
        """Can a value be sent to the host and back: large, in one piece, and held by nobody else meanwhile?"""
        value = root.meta["val"]
        if any(not isinstance(n, int) for n in (*value.shape, *value.stride())) or nbytes_of(value) < LEAST_SENT:
            return False
        returned = any(user.op == "output" for user in _users(root))
        return _in_one_piece(value) and not returned

    def seconds(self, node: Node, ceilings: Ceilings) -> float:
        if node not in self._times:
            self._times[node] = seconds(node, ceilings)
        return self._times[node]

    def read(self, node: Node) -> list[Node]:
        """Roots of the tensors that a call reads, in order, each once."""
        return list(dict.fromkeys(self.roots[n] for n in node.all_input_nodes if _tensor(n) is not None))

    def made(self, node: Node) -> list[Node]:
        """Roots that a call makes: itself, or those of its outputs that are tensors."""
        if isinstance(node.meta.get("val"), (tuple, list)):
            return [u for u in node.users if u.target is operator.getitem and _tensor(u) is not None]
        return [node] if _tensor(node) is not None else []


def calls_of(nodes: Iterable[Node], storages: Storages) -> tuple[list[Node], list[Node]]:
    """What allocates or computes, of the forward and of the backward: the nodes that a `Work`'s operations mean."""
    calls = [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem and not is_view(n)]
    return [n for n in calls if n not in storages.backward], [n for n in calls if n in storages.backward]


def work_of(
    nodes: Sequence[Node], storages: Storages, ceilings: Ceilings, free: Iterable[Node] = ()
) -> tuple[Work, list[Node]]:
    """The `Work` of some calls of a joint graph, in graph order, and the node of each of its values.

    Values read but made elsewhere may only be kept, or are free where they are placeholders, in `free` or late.
    """
    forward, backward = calls_of(nodes, storages)
    calls = [*forward, *backward]
    own = {root: n for n in forward for root in storages.made(n)}
    read = [root for n in calls for root in storages.read(n) if root not in storages.backward]
    values = dict.fromkeys([*read, *own])
    grads = dict.fromkeys(g for n in backward for g in [*storages.read(n), *storages.made(n)] if g not in values)
    at = {node: i for i, node in enumerate([*values, *grads])}
    needed = {root for n in backward for root in storages.read(n)}
    returned = {storages.roots[n] for n in storages.gradients if n not in storages.backward}
    given = {storages.roots[n] for n in storages.outputs}
    free = set(free)
    number = {n: i for i, n in enumerate(forward)}

    def value(root: Node) -> Value:
        call, twin = own.get(root), twins.get(root)
        there = _held(root) or root in free or storages.is_late(root)
        choice = _choice(root, call, storages) if call is not None else "free" if there else "keep"
        inputs = tuple(at[r] for r in storages.read(call)) if call is not None else ()
        if choice == "any" and call is not None and not storages.written.isdisjoint(storages.read(call)):
            choice = "keep"  # what it was made from is overwritten by the time that it would be made again
        time = storages.seconds(call, ceilings) if call in storages.forward else 0.0
        node = number[call] if call is not None else -1 - at[root]
        if twin is not None:
            inputs, time, node = twin.reads, twin.seconds, len(forward) + at[root]
        read = root in needed or root in returned or (call is not None and storages.is_late(call))
        away = call in storages.forward and ceilings.host_bandwidth is not None and storages.may_leave(root)
        nbytes = nbytes_of(root.meta["val"])
        return Value("", nbytes, inputs, time, node, read, choice, away, host_nbytes(nbytes) if away else 0)

    def operation(n: Node) -> Operation:
        reads, makes = (tuple(at[r] for r in roots(n)) for roots in (storages.read, storages.made))
        return Operation(reads, makes, workspace(n), storages.is_late(n), storages.seconds(n, ceilings))

    def twin(root: Node, target: Any, args: tuple[Any, ...]) -> Operation:
        given = [n for n in dict.fromkeys(tree_leaves(args)) if isinstance(n, Node) and _tensor(n) is not None]
        reads = tuple(at[r] for r in dict.fromkeys(storages.roots[n] for n in given))
        return Operation(reads, (at[root],), seconds=move_seconds(target, args, ceilings))

    first = [(root, n) for root, n in own.items() if n in storages.forward and root.target is operator.getitem]
    twins = {root: twin(root, *by) for root, n in first if root.args[1] == 0 and (by := remaking(n)) is not None}
    here = set(nodes)
    elsewhere = lambda user: user.op != "output" and user not in here and user not in storages.backward  # noqa: E731
    leaving = {g: [u for u in _users(g) if u not in here] for g in grads}
    work = Work(
        tuple(map(value, values)),
        tuple(map(operation, forward)),
        tuple(map(operation, backward)),
        tuple(nbytes_of(g.meta["val"]) for g in grads),
        tuple(at[v] for v in own if v in given or any(map(elsewhere, _users(v)))),
        tuple(at[g] for g, users in leaving.items() if users),
        tuple(at[g] for g, users in leaving.items() if any(u.op == "output" for u in users)),
        tuple((at[root], op) for root, op in twins.items()),
        tuple(at[v] for v in own if v in returned),
    )
    return work, list(values)


def remaking(call: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The other call, with its arguments, that makes the first output of `call` from its other outputs."""
    by = REMADE.get(call.target)  # pyright: ignore[reportArgumentType]
    outputs = {u.args[1]: u for u in call.users if u.target is operator.getitem}
    try:
        return by and by(call.args, outputs.__getitem__)
    except KeyError:
        return None  # made from an output that nothing reads


def _users(root: Node) -> Iterable[Node]:
    for user in root.users:
        yield user
        if is_view(user):
            yield from _users(user)


def _tensor(node: Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _in_one_piece(value: torch.Tensor) -> bool:
    """Does a tensor fill its memory without holes, in whatever order of its dimensions?"""
    filled = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return value.layout is torch.strided


def _held(root: Node) -> bool:
    return root.op in ("placeholder", "get_attr")


def _choice(root: Node, call: Node, storages: Storages) -> str:
    """Whether a value may be kept and may be made again."""
    policy = root.meta.get("recompute", call.meta.get("recompute"))
    if _acts(call) or policy is CheckpointPolicy.MUST_SAVE:
        return "keep"
    again = policy in _AGAIN and not _leaves_region(root)
    return "recompute" if again or storages.is_late(call) else "any"


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _leaves_region(root: Node) -> bool:
    """Does the next checkpointed region begin with it? Made again, it would take all regions before along."""
    region = root.meta.get("ac_graph_id", 0)
    return any(u.meta.get("recompute") in _AGAIN and u.meta.get("ac_graph_id", 0) > region
               for u in _users(root))  # fmt: skip


def _acts(call: Node) -> bool:
    """Is a second call something else than the first: random numbers, collectives, writes, effects?"""
    if not isinstance(call.target, torch._ops.OpOverload):
        return isinstance(call.target, torch._ops.HigherOrderOperator)
    random = torch.Tag.nondeterministic_seeded in call.target.tags and not _draws_nothing(call)
    collective = call.target.namespace in ("_c10d_functional", "c10d_functional", "c10d", "_c10d_functional_autograd")
    return random or collective or call.target._schema.is_mutable


def _draws_nothing(call: Node) -> bool:
    """Attention that is told to drop nothing is as fixed as any other operator, and draws no numbers."""
    schema = call.target._schema.arguments  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    named = [(i, a) for i, a in enumerate(schema) if a.name == "dropout_p"]
    given = [call.args[i] if i < len(call.args) else call.kwargs.get(a.name, a.default_value) for i, a in named]
    return bool(given) and all(isinstance(p, (int, float)) and p == 0 for p in given)


def is_view(node: Node) -> bool:
    """Does a node give (part of) the memory of its first input? One of several outputs does if all are views of it."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_view(node.args[0])
    return _renames(node)
