"""The curve of peak memory against time that a training step can choose from, and where well-known plans lie on it.

The joint graph is captured once and planned at many budgets: nothing is compiled and no backward runs. Besides the
planner's own points it holds three that others would choose: keep everything, full checkpointing, Inductor's default.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from .backend import Compiled, rewrite, run_untouched
from .budget import EFFICIENCY, Request, forget_hints, terms_of
from .front import Segment, _completed, _priced, front
from .fusions import fusion_names
from .joint import Joint
from .options import Options
from .partition import backward_nodes, merge_equal_calls
from .planner import Infeasible, Plan


@dataclass(frozen=True)
class Point:
    """One plan of a training step: its predicted peak in bytes, the predicted seconds of forward and backward."""

    budget: int | None  # bytes that it was planned for; None for a plan of another's
    peak: int
    seconds: float
    label: str = ""  # of a plan of another's: whose


def frontier(
    model: Callable[..., Any],
    *args: Any,
    points: int = 12,
    path: str | os.PathLike[str] | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[Point]:
    """Plans of `model`'s training step on these arguments, from the least memory to the least time, then the marked.

    points   budgets, evenly from the least peak that can be reached to that of the fastest plan
    path     a picture of the curve is written there (matplotlib)
    options  as for the backend; a `memory_budget` among them is not looked at
    Marked are `keep everything` (whatever the backward reads is kept, as eager does), `full checkpointing` (each layer
    keeps as little as it can) and `Inductor's default` (what torch's min-cut keeps of the same graph).

    Of several graphs the largest is planned. Runs the model's forward once, rewritten but not compiled, and leaves the
    model, its gradients and buffers, the random state and what is compiled already as they were.
    Raises: ValueError for a model of which nothing trains, or for fewer than two points.
    """
    if points < 2:
        raise ValueError(f"frontier: points must be at least 2, got {points}")
    parsed = Options.parse(options, fusion_names())
    captured = capture(model, *args, options=options, **kwargs)
    joint = captured.joint(Request(None, parsed.host_budget, parsed.respect_checkpointing))
    found = [*planned(joint, points), *marked(joint, captured)]
    if path is not None:
        draw(found, path)
    return found


# --- The graph -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """A joint graph as AOTAutograd made it, before anything is decided about it."""

    module: GraphModule
    num_fwd_outputs: int
    static_inputs: list[int] | None  # parameters, which are there anyway

    def copied(self) -> GraphModule:
        """With what is computed twice merged, as the backend and torch's partitioner do first."""
        gm = _copy(self.module)
        merge_equal_calls(gm)
        return gm

    def joint(self, request: Request | None = None) -> Joint:
        """As the backend plans it."""
        gm, request = self.copied(), request or Request(None, 0)
        if not request.respect_checkpointing:
            forget_hints(gm.graph)
        return Joint(gm, backward_nodes(gm.graph), self.num_fwd_outputs, terms_of(gm, request))

    def unmarked(self) -> tuple[GraphModule, Joint]:
        """As others plan it: without marks."""
        gm = self.copied()
        for node in gm.graph.nodes:
            node.meta.pop("recompute", None)
        return gm, Joint(gm, backward_nodes(gm.graph), self.num_fwd_outputs, terms_of(gm, Request(None, 0)))

    def saved_by_torch(self, gm: GraphModule) -> set[str]:
        """Names of the values of `unmarked`'s graph that torch's own partitioner saves for the backward."""
        forward, _ = min_cut_rematerialization_partition(
            _copy(gm), None, num_fwd_outputs=self.num_fwd_outputs, static_lifetime_input_indices=self.static_inputs
        )
        outputs: Any = forward.graph.output_node().args[0]
        return {n.name for n in outputs[self.num_fwd_outputs :] if isinstance(n, Node)}


def capture(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Captured:
    """The largest joint graph of one forward of `model`, rewritten as the backend would, with all left as it was.

    Raises: ValueError where there is none.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table

    parsed, found = Options.parse(options, fusion_names()), []

    def split(gm: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **given: Any) -> Any:
        found.append(Captured(_copy(gm), num_fwd_outputs, given.get("static_lifetime_input_indices")))
        return min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **given)

    def lowered(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        _, finish = rewrite(gm, parsed)
        aot = aot_autograd(fw_compiler=boxed_nop, partition_fn=split, decompositions=select_decomp_table)
        return finish(aot(gm, example_inputs))

    run_untouched(model, lowered, args, kwargs)
    if not found:
        raise ValueError(
            "frontier: nothing here trains, so there is no backward to keep values for. Give a model with parameters "
            "that require gradients, call it outside torch.no_grad(), with labels if it computes its own loss"
        )
    return max(found, key=lambda captured: len(captured.module.graph.nodes))


def _copy(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, copy.deepcopy(gm.graph))


# --- Plans ---------------------------------------------------------------------------------------------------------


def planned(joint: Joint, points: int) -> list[Point]:
    """The planner's plans at evenly spaced budgets."""
    most = joint.plan(None)[2]
    try:
        least = joint.plan(1)[2]
    except Infeasible as error:
        least = error.smallest
    budgets = [least + (most - least) * i // (points - 1) for i in range(points)]
    return [at_budget(joint, budget) for budget in budgets]


def at_budget(joint: Joint, budget: int) -> Point:
    """Raises: Infeasible."""
    _, chosen, peak = joint.plan(budget)
    return Point(budget, peak, _seconds(joint, chosen))


def _seconds(joint: Joint, chosen: dict[Node, str]) -> float:
    """The graph's own, and those of making again: each call once, whoever reads it."""
    choices = tuple(joint._choices(chosen))
    return (joint.seconds + _priced(Segment("", joint.work.values), choices, None).seconds) / EFFICIENCY


def marked(joint: Joint, captured: Captured) -> list[Point]:
    """The plans that others would make, each with its label."""
    segments, parts = joint._segments()
    smallest = [min(front(s), key=lambda c: (c.kept, c.seconds)) for s in segments]
    layers = tuple((c,) * s.count for c, s in zip(smallest, segments, strict=True))
    chosen, peak = joint._weighed(Plan(layers, 0, "", 0.0, 0.0, 0.0, 0), parts)
    gm, others = captured.unmarked()
    everything = {node.name for node in others.values}
    return [
        keeping(others, everything, "keep everything"),
        Point(None, peak, _seconds(joint, chosen), "full checkpointing"),
        keeping(others, captured.saved_by_torch(gm), "Inductor's default"),
    ]


def keeping(joint: Joint, names: Collection[str], label: str) -> Point:
    """The plan that keeps these nodes, whatever they are views of, and makes again what else the backward reads.

    Random numbers that are not among them are kept all the same: drawn again they would be others.
    """
    storages = joint.storages
    roots = {root for node, root in storages.roots.items() if node.name in names}
    read = {root for node in storages.backward for root in storages.read(node)}
    # What only the backward makes need not be made where what comes of it is kept.
    values = [replace(v, needed=node in read) for v, node in zip(joint.work.values, joint.values, strict=True)]
    keep = [v.choice == "keep" or node in roots for v, node in zip(values, joint.values, strict=True)]
    choices = _completed(values, keep, [False] * len(values))
    chosen = dict(zip(joint.values, choices, strict=True))
    return Point(None, joint.peak(chosen), _seconds(joint, chosen), label)


# --- The picture ---------------------------------------------------------------------------------------------------


def draw(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
    """Peak against time: the planner's points as a line, the marked ones with their labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, so that only who draws pays for the import
    from matplotlib.figure import Figure

    unit, scale = ("GiB", 2**30) if max(p.peak for p in points) >= 2**30 else ("MiB", 2**20)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ours = [p for p in points if not p.label]
    axes.plot([p.peak / scale for p in ours], [1e3 * p.seconds for p in ours], "o-", ms=4, label="planned")
    labels: dict[tuple[float, float], list[str]] = {}
    for p in points:
        if p.label:
            labels.setdefault((p.peak / scale, 1e3 * p.seconds), []).append(p.label)
    middle = (min(p.peak for p in points) + max(p.peak for p in points)) / 2 / scale
    for at, names in labels.items():
        axes.plot(*at, "s", color="tab:red", ms=6)
        side, away = ("right", -6) if at[0] > middle else ("left", 6)
        axes.annotate("\n".join(names), at, xytext=(away, 6), textcoords="offset points", fontsize=9, ha=side)
    axes.set_xlabel(f"predicted peak, {unit}")
    axes.set_ylabel("predicted forward and backward, ms")
    axes.margins(x=0.15, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
