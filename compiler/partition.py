"""Where AOTAutograd asks what to save for the backward: the seam that the checkpoint planner takes.

The answer is torch's own min-cut, told what it cannot know. An operator of this package whose backward keeps its inputs
anyhow, and which only moves bytes, is run again in the backward rather than kept: a gated MLP's product and a norm's
output are so made twice and held by nobody in between. Under a memory budget the planner decides, about everything.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import operator
import pathlib
from typing import Any

import torch
from torch._functorch import config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..kernels._op import REMADE
from .budget import BudgetError, Request, apply
from .memory import is_view, remaking
from .rematerialize import call_like

log = logging.getLogger("fused_backend")


def partition(
    gm: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, request: Request | None = None, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph into forward and backward, within a memory budget if one is requested.

    Raises: BudgetError where no plan fits. Should planning itself fail, that is logged and the budget is not kept.
    """
    if request is not None:
        untouched = copy.deepcopy(gm.graph)
        try:
            merge_equal_calls(gm)
            plan = apply(gm, backward_nodes(gm.graph), request, num_fwd_outputs)
            lifetimes = kwargs.get("static_lifetime_input_indices")
            # Not the min-cut, which decides for itself: this one saves what the backward reads, and no more is read.
            halves = default_partition(
                gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=lifetimes
            )
            log.info("%s", str(plan).splitlines()[0])
            return halves
        except BudgetError:
            raise
        except Exception as error:
            if request.strict:
                raise
            log.warning("memory_budget %r is NOT kept: planning failed; please report", request.budget, exc_info=error)
            gm.graph = untouched
    recompute_what_is_cheap(gm.graph)
    return min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)


def merge_equal_calls(gm: GraphModule) -> None:
    """As torch does before it splits: a plan made earlier would hold values that are gone, and marks would clash."""
    gm.graph.eliminate_dead_code()
    if config.cse:
        gm.graph = fx_graph_cse(gm.graph)


def recompute_what_is_cheap(graph: Graph) -> None:
    """Mark what the backward makes again: outputs of operators that are `remade`, where that keeps nothing more."""
    backward = backward_nodes(graph)
    kept = {_viewed(n) for b in backward for n in b.all_input_nodes if n not in backward}
    returned = {_viewed(n) for n in graph.output_node().all_input_nodes}
    for node in list(graph.nodes):
        if node.target not in REMADE or node in backward or "recompute" in node.meta:
            continue
        outputs = {int(user.args[1]): user for user in node.users if user.target is operator.getitem}
        first = outputs.get(0, None if outputs else node)
        if first is None or first not in kept or first in returned:
            continue
        by_itself = REMADE[node.target] is None
        made = (node.target, node.args) if by_itself else remaking(node)
        if made is None or any(_viewed(a) not in kept for a in made[1] if isinstance(a, Node)):
            continue
        if by_itself:
            for again in (node, *(user for user in node.users if user.target is operator.getitem)):
                again.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        else:
            _redirect(first, _twin(graph, outputs, *made), backward)


def _twin(graph: Graph, outputs: dict[int, Node], target: Any, args: tuple[Any, ...]) -> Node:
    """The first output of another call, which gives the same."""
    first = outputs[0]
    with graph.inserting_after(max(outputs.values())):
        call = call_like(graph, target, args, first)
    with graph.inserting_after(call):
        result = call_like(graph, operator.getitem, (call, 0), first)
    for made in (call, result):
        made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return result


def _redirect(old: Node, new: Node, backward: set[Node]) -> None:
    """Let the backward read `new` for `old`, where it reads a view of it as well."""
    for user in list(old.users):
        if user in backward:
            user.replace_input_with(old, new)
        elif is_view(user):
            with new.graph.inserting_after(new):
                view = new.graph.node_copy(user, lambda n: new if n is old else n)
            view.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            _redirect(user, view, backward)
            if not view.users:
                new.graph.erase_node(view)


def _viewed(node: Node) -> Node:
    """What a node is a view of: the tensor that is kept when it is."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def backward_nodes(graph: Graph) -> set[Node]:
    """What depends on the gradients that come in."""
    found: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or (node.op != "output" and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


class Partitioner(CustomPartitionerFn):
    """`partition` in the form Inductor's configuration takes."""

    def __init__(self, request: Request | None = None) -> None:
        self.request = request

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return partition(gm, joint_inputs, request=self.request, **kwargs)

    def uuid(self) -> str:
        """Part of Inductor's cache key: a changed operator, pattern or budget must not meet a graph cached before."""
        return source_hash() + (f" {self.request} {self.request.state()}" if self.request else "")


@functools.cache
def source_hash() -> str:
    """Hash of all source files of the package and of the torch version."""
    digest = hashlib.sha256(torch.__version__.encode())
    root = pathlib.Path(__file__).resolve().parent.parent
    for folder in ("compiler", "patterns", "kernels", "derivations"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
