"""The planner: what a training step keeps for its backward, what it makes again, what it sends to the host.

Two integer programs, both solved by HiGHS through scipy, on bytes and seconds alone:
1. `front`, for one layer: choices of keep / recompute / offload, each the fastest for the bytes it keeps.
2. `plan`, for the whole step: how many of the equal layers use which of those, so that the peak stays in the budget.

Source: keep or recompute as an integer program: Checkmate, Jain et al., MLSys 2020.
"""

from __future__ import annotations

import functools
import graphlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

LEVELS = 10  # points of a front, at most; as many again with offloading
DIFFERENT = 3  # different choices among the copies of a segment: each is compiled on its own
SLOWDOWN = 0.02  # of a transfer's time, what the compute beside it loses (measured on an H200)
NODES = 2_000  # of the branch-and-bound tree. No limit in seconds: every rank of a job must get the same plan
_SCALE = 1e4  # costs are scaled to this size, far above the solver's absolute tolerance of 1e-6
_ROW = 1.0  # rows in bytes are, to this one: larger, an integer off by 1e-6 breaks them, and HiGHS repairs and fails
_TIE = 1e-3  # weight of all bytes against all seconds (1e-7 of them): of equally fast choices the smallest


@dataclass(frozen=True)
class Value:
    """A storage that the forward makes."""

    name: str
    nbytes: int
    inputs: tuple[int, ...]  # indices into `Segment.values` of what making it again reads
    seconds: float  # of its node, to make it again
    node: int  # values with the same node number are made together: the node is charged once
    needed: bool  # the backward itself reads it
    # "free": there anyway (a parameter, something the caller holds); "keep": not made again; "recompute": not kept
    choice: str = "any"
    offloadable: bool = False
    host_nbytes: int = 0  # that it takes in host memory; 0: `nbytes`


@dataclass(frozen=True)
class Segment:
    """One joint graph: a repeated layer, or a part of the rest of the model.

    transient  of the choices, one of "keep", "recompute", "offload", "drop" for each value, two peaks in bytes: in its
               forward, of everything a copy holds, what it keeps included (less counts as what it keeps); in its
               backward, of everything beyond the kept values of all copies, its own included. Free values count in
               neither, offloaded ones in both for as long as they are on the device.
    """

    name: str
    values: tuple[Value, ...]
    count: int = 1  # copies, one after the other
    grad_nbytes: int = 0  # what the backward of a copy leaves behind
    transient: Callable[[Sequence[str]], tuple[int, int]] = lambda choices: (0, 0)
    compute_seconds: float = 0.0  # forward and backward of a copy: what its transfers can hide behind


@dataclass(frozen=True)
class Choice:
    """What one copy of a segment does, with its figures."""

    choices: tuple[str, ...]  # for each value; a free one is "keep" where it is read and "drop" where not
    kept: int  # bytes on the device, free values not counted
    offloaded: int  # bytes in host memory
    seconds: float  # of making again and of transfers
    forward: int  # both peaks as in `Segment.transient`
    backward: int


@dataclass(frozen=True)
class Plan:
    """What each copy of each segment does."""

    layers: tuple[tuple[Choice, ...], ...]  # for each segment, for each copy in forward order
    peak: int  # bytes, `base` included
    peak_at: str
    seconds: float  # beyond those of the fastest choice everywhere
    lower_bound: float  # of `seconds`, over all plans made of these fronts
    gap: float  # (seconds - lower_bound) / seconds; 0 is proven optimal
    host: int  # bytes in host memory


class Infeasible(ValueError):
    """No plan fits the budget. `smallest` is the peak of the plan that needs the least bytes."""

    def __init__(self, budget: int, smallest: int):
        self.smallest = smallest
        # Each rounded to the side on which the statement stays true.
        given, least = math.floor(budget / 2**30 * 10) / 10, math.ceil(smallest / 2**30 * 10) / 10
        super().__init__(
            f"memory_budget {given:.1f} GiB is below the least this step can run in, {least:.1f} GiB ({smallest} "
            f"bytes). Raise it, or shorten the batch or the sequence"
        )


class _Program:
    """A mixed-integer program, gathered variable by variable and row by row."""

    def __init__(self) -> None:
        self.variables: list[tuple[float, float, bool]] = []
        self.rows: list[tuple[list[tuple[int, float]], float, float]] = []

    def variable(self, upper: float = math.inf, lower: float = 0.0, integral: bool = False) -> int:
        self.variables.append((lower, upper, integral))
        return len(self.variables) - 1

    def row(self, terms: Iterable[tuple[int, float]], low: float = -math.inf, high: float = math.inf) -> None:
        self.rows.append((list(terms), low, high))

    def minimise(self, cost: dict[int, float]) -> Any:
        """scipy's result; `x` is None where nothing was found."""
        import numpy as np  # here, so that only who sets a budget pays for the imports
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        entries = np.array([(i, j, a) for i, (terms, _, _) in enumerate(self.rows) for j, a in terms]).reshape(-1, 3)
        places, shape = tuple(entries[:, :2].astype(int).T), (len(self.rows), len(self.variables))
        matrix = coo_array((entries[:, 2], places), shape=shape).tocsr()
        lower, upper, integral = (np.array(column, float) for column in zip(*self.variables, strict=True))
        low, high = (np.array([row[side] for row in self.rows]) for side in (1, 2))
        solve = functools.partial(
            milp,
            np.array([cost.get(i, 0.0) for i in range(len(lower))]),
            integrality=integral,
            bounds=Bounds(lower, upper),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(matrix, low, high),  # pyright: ignore[reportArgumentType]
        )
        result = solve(options={"mip_rel_gap": 0.0, "node_limit": NODES})
        if result.x is None and result.status == 4:  # a failure; some come of undoing the presolve
            result = solve(options={"mip_rel_gap": 0.0, "node_limit": NODES, "presolve": False})
        return result


def front(segment: Segment, host_bandwidth: float | None = None) -> list[Choice]:
    """Choices for one copy, from the fastest to the smallest: each is the fastest for the bytes it keeps.

    Points that are no better in anything `plan` looks at (kept bytes, both peaks, host bytes, seconds) are left out.
    host_bandwidth, in bytes a second, allows offloading: transfers of a copy, out and back, must fit into its
    `compute_seconds` and are charged `SLOWDOWN` of their time. Points without offloading are found as well.

    Raises: ValueError for values that are made from each other or have an unknown choice.
    """
    _check(segment)
    values = tuple(replace(v, name="") for v in segment.values)  # equal layers have other names, and are solved once
    found = dict.fromkeys(_selections(values, None, 0.0))
    if host_bandwidth is not None:
        found |= dict.fromkeys(_selections(values, host_bandwidth, segment.compute_seconds))
    points = [_priced(segment, choices, host_bandwidth) for choices in found]
    left: dict[tuple[int, ...], Choice] = {}
    # Only one before it, at least as fast, can be better in everything.
    for p in sorted(points, key=lambda p: (p.seconds, p.kept, p.offloaded, p.choices)):
        figures = p.kept, p.kept + p.backward, p.forward, p.offloaded
        if not any(all(a <= b for a, b in zip(better, figures, strict=True)) for better in left):
            left[figures] = p
    return list(left.values())


def _check(segment: Segment) -> None:
    for value in segment.values:
        if value.choice not in ("any", "free", "keep", "recompute"):
            raise ValueError(f"{segment.name}: value {value.name!r} has the unknown choice {value.choice!r}")
    try:
        graphlib.TopologicalSorter({i: v.inputs for i, v in enumerate(segment.values)}).prepare()
    except graphlib.CycleError as error:
        names = ", ".join(segment.values[i].name for i in error.args[1])
        raise ValueError(f"{segment.name}: values are made from each other: {names}") from None


def _bytes(values: Sequence[Value], choices: Sequence[str], of: str = "keep") -> int:
    return sum(v.nbytes for v, c in zip(values, choices, strict=True) if c == of and v.choice != "free")


@functools.lru_cache(maxsize=64)
def _selections(values: tuple[Value, ...], host_bandwidth: float | None, compute: float) -> tuple[tuple[str, ...], ...]:
    """The fastest choices for bytes kept at `LEVELS` levels, from those of the fastest down to the least possible."""
    if not values:
        return ((),)
    program, keep, send, cost = _layer_program(values, host_bandwidth, compute)
    unit = _ROW / (sum(v.nbytes for v in values) or 1)
    size = [(k, v.nbytes * unit) for k, v in zip(keep, values, strict=True)]

    def solved(cost: dict[int, float]) -> tuple[str, ...] | None:
        x = program.minimise(cost).x
        return None if x is None else _completed(values, [x[k] > 0.5 for k in keep], [x[k] > 0.5 for k in send])

    everything = _completed(values, [v.choice in ("any", "keep") for v in values], [False] * len(values))
    fastest = solved(cost) or everything  # which is always a solution, should HiGHS have none
    smallest = solved({k: nbytes * _SCALE for k, nbytes in size}) or fastest
    found, most, least = [fastest], _bytes(values, fastest), _bytes(values, smallest)
    program.row(size)
    for level in range(1, LEVELS):
        bound = most - (most - least) * level // (LEVELS - 1)
        if _bytes(values, found[-1]) > bound:
            program.rows[-1] = size, -math.inf, (bound + 0.5) * unit  # half a byte more: rounding forbids no exact fit
            found.append(solved(cost) or smallest)
    return tuple(found)


def _layer_program(
    values: Sequence[Value], host_bandwidth: float | None, compute: float
) -> tuple[_Program, list[int], list[int], dict[int, float]]:
    """All there is to say of one copy but the bytes it may keep; its variables for keeping and sending; its cost."""
    program = _Program()
    keep = [program.variable(v.choice in ("any", "keep"), integral=True) for v in values]
    away = [v.choice in ("any", "keep") and v.offloadable and host_bandwidth is not None for v in values]
    send = [program.variable(may, integral=True) for may in away]
    # With `keep` and `send` integral, the least `again` and `nodes` are so by themselves.
    again = [program.variable(v.choice in ("any", "recompute")) for v in values]
    nodes = {n: program.variable(1.0) for n in sorted({v.node for v in values})}
    there = [[(k, 1.0) for k in three] for three in zip(keep, send, again, strict=True)]
    for i, v in enumerate(values):
        if v.needed and v.choice != "free":
            program.row(there[i], low=1.0)
        for u in set(v.inputs):
            if values[u].choice != "free":
                program.row([*there[u], (again[i], -1.0)], low=0.0)
        program.row([(nodes[v.node], 1.0), (again[i], -1.0)], low=0.0)
    seconds = _node_seconds(values)
    second = _SCALE / (sum(seconds.values()) or 1.0)
    byte = _TIE / (sum(v.nbytes for v in values) or 1)
    cost = {nodes[n]: s * second for n, s in seconds.items()}
    cost |= {k: v.nbytes * byte for ks in (keep, send) for k, v in zip(ks, values, strict=True)}
    if host_bandwidth is not None:
        transfers = [(k, 2 * v.nbytes / host_bandwidth) for k, v in zip(send, values, strict=True)]
        for k, transfer in transfers:
            cost[k] += SLOWDOWN * transfer * second
        unit = compute or max(t for _, t in transfers) or 1.0
        program.row([(k, t / unit) for k, t in transfers], high=compute / unit)
    return program, keep, send, cost


def _node_seconds(values: Sequence[Value]) -> dict[int, float]:
    return {v.node: v.seconds for v in sorted(values, key=lambda v: v.seconds) if v.choice in ("any", "recompute")}


def _completed(values: Sequence[Value], keep: Sequence[bool], send: Sequence[bool]) -> tuple[str, ...]:
    """What follows from what is kept and sent: all else that is needed is made again, the rest is dropped."""
    choices = ["drop"] * len(values)
    todo = [i for i, v in enumerate(values) if v.needed]
    while todo:
        i = todo.pop()
        if choices[i] == "drop":
            choices[i] = "keep" if values[i].choice == "free" or keep[i] else "offload" if send[i] else "recompute"
            todo += values[i].inputs if choices[i] == "recompute" else ()
    return tuple(choices)


def _priced(segment: Segment, choices: tuple[str, ...], host_bandwidth: float | None) -> Choice:
    kept, sent = (_bytes(segment.values, choices, of) for of in ("keep", "offload"))
    held = sum(v.host_nbytes or v.nbytes for v, c in zip(segment.values, choices, strict=True) if c == "offload")
    again = {v.node for v, c in zip(segment.values, choices, strict=True) if c == "recompute"}
    seconds = math.fsum(s for node, s in _node_seconds(segment.values).items() if node in again)
    seconds += SLOWDOWN * 2 * sent / (host_bandwidth or math.inf)
    forward, backward = segment.transient(choices)
    return Choice(choices, kept, held, seconds, max(forward, kept), max(backward, 0))


def plan(
    segments: Sequence[Segment],
    base: int,
    budget: int | None,
    host_bandwidth: float | None = None,
    host_budget: int = 0,
) -> Plan:
    """The fastest plan whose peak is at most `budget` bytes and which holds at most `host_budget` bytes on the host.

    segments  in forward order
    base      bytes that are there all the time: parameters, optimizer state
    budget    None: the fastest choice everywhere

    Memory, over the copies i of all segments in forward order:
        forward of i     base + sum of kept over j < i + forward of i
        backward of i    base + sum of kept over j <= i + backward of i + sum of grad_nbytes over j > i
        at the end       base + sum of grad_nbytes over all
    A segment's copies take at most `DIFFERENT` different choices of its front, in the order of `_in_order`.
    Among such plans the result is optimal, to 1e-7 of the largest sum of seconds and some 1e-6 of the budget, so a
    larger budget never gives a slower plan. Only a search cut off after `NODES` nodes leaves a gap, which dozens of
    segments can cause: layers of two kinds that alternate are better given as one segment of a pair.

    Raises: Infeasible, with the least peak that can be reached.
    """
    points = [_in_order([p for p in front(s, host_bandwidth) if p.offloaded <= host_budget], s) for s in segments]
    layers = [[min(p, key=lambda c: (c.seconds, c.kept))] * s.count for p, s in zip(points, segments, strict=True)]
    least = bound = sum(c.seconds for copies in layers for c in copies)
    if budget is not None and _peak(segments, layers, base)[0] > budget:
        layers, bound = _fitted(segments, points, base, budget, host_budget)
    copies = [c for some in layers for c in some]
    seconds = max(sum(c.seconds for c in copies) - least, 0.0)
    lower = min(max(bound - least, 0.0), seconds)
    gap = (seconds - lower) / seconds if seconds else 0.0
    host = sum(c.offloaded for c in copies)
    return Plan(tuple(map(tuple, layers)), *_peak(segments, layers, base), seconds, lower, gap, host)


def _in_order(points: Sequence[Choice], segment: Segment) -> list[Choice]:
    """Forward order in which copies of one segment reach the lowest peak in the backward.

    Exchanging two neighbours shows it: first those that leave the memory no higher than they found it, by ascending
    peak; then the others, by descending transient. As a rule that puts small kept bytes first: what works in much
    memory does so where the least is kept. Forward peaks follow where none is above its own copy's backward peak.
    """
    falls = [p for p in points if p.kept <= segment.grad_nbytes]
    rises = [p for p in points if p.kept > segment.grad_nbytes]
    return [*sorted(falls, key=lambda p: p.kept + p.backward), *sorted(rises, key=lambda p: (-p.backward, p.kept))]


def _peak(segments: Sequence[Segment], layers: Sequence[Sequence[Choice]], base: int) -> tuple[int, str]:
    """The highest of the sums that `plan` lists, and where it is."""
    grads = sum(s.grad_nbytes * s.count for s in segments)
    kept, peaks = base, [(base + grads, "the end of the backward")]
    for segment, copies in zip(segments, layers, strict=True):
        for i, copy in enumerate(copies):
            name = segment.name if segment.count == 1 else f"{segment.name}[{i}]"
            peaks.append((kept + copy.forward, f"forward of {name}"))
            kept += copy.kept
            grads -= segment.grad_nbytes
            peaks.append((kept + copy.backward + grads, f"backward of {name}"))
    return max(peaks, key=lambda peak: peak[0])


def _fitted(
    segments: Sequence[Segment], points: list[list[Choice]], base: int, budget: int, host_budget: int
) -> tuple[list[list[Choice]], float]:
    """Choices for each copy within the budget, and the least seconds that any can have. Raises: Infeasible"""
    room = budget - base
    while (solved := _solved(segments, points, room, host_budget)) is not None:
        if (peak := _peak(segments, solved[0], base)[0]) <= budget:
            return solved
        room -= 2 * (peak - base - room)  # over by the solver's tolerance; three times as far below the next time
    layers, _ = _solved(segments, points, None, host_budget) or (_uniform(segments, points, base), 0.0)
    if (least := _peak(segments, layers, base)[0]) > budget:
        raise Infeasible(budget, least)
    return layers, 0.0


def _uniform(segments: Sequence[Segment], points: Sequence[list[Choice]], base: int) -> list[list[Choice]]:
    """Without HiGHS, should it fail: one choice for all copies of a segment, none offloaded, that lowers the peak."""
    layers = [[min(p, key=lambda p: (p.offloaded, p.kept))] * s.count for p, s in zip(points, segments, strict=True)]
    for i, mine in enumerate(points):
        some = [[*layers[:i], [p] * segments[i].count, *layers[i + 1 :]] for p in mine if not p.offloaded]
        layers = min(some, key=lambda layers: _peak(segments, layers, base)[0])
    return layers


def _solved(
    segments: Sequence[Segment], points: Sequence[list[Choice]], room: int | None, host_budget: int
) -> tuple[list[list[Choice]], float] | None:
    """The fastest counts of points with a peak of at most `room` bytes beyond `base`; without it, the least peak.

    Equal copies differ only in their place, and `_in_order` gives the best one: so a segment has a number of copies for
    each point, and these lie in runs. In a run the peak is at its last copy where copies leave more than they found,
    else at its first. A point not used (used = 0) gives a row that the memory between two copies meets anyway.
    """
    program = _Program()
    pairs = list(zip(segments, points, strict=True))
    grads = sum(s.grad_nbytes * s.count for s in segments)
    most = grads + sum(max(p.kept + p.backward + p.forward for p in mine) * s.count for s, mine in pairs)
    least_peak, room = room is None, most if room is None else room
    if room < grads:
        return None
    unit = _ROW / max(room, 1)
    peak, before = program.variable(room * unit, grads * unit), program.variable(0.0)
    counts: list[list[tuple[int, Choice]]] = []
    for segment, mine in pairs:
        grads -= segment.grad_nbytes * segment.count
        n = list(zip(_runs(program, segment, mine, before, peak, grads, unit), mine, strict=True))
        before, earlier = program.variable(), before  # bytes that earlier segments keep
        program.row([(earlier, 1.0), (before, -1.0), *((v, p.kept * unit) for v, p in n)], 0.0, 0.0)
        counts.append(n)
    flat = [pair for some in counts for pair in some]
    program.row([(v, p.offloaded / max(host_budget, 1)) for v, p in flat], high=min(host_budget, 1))
    second = _SCALE / (sum(max(p.seconds for p in mine) * s.count for s, mine in pairs) or 1.0)
    cost = {v: p.seconds * second + (p.kept + p.offloaded) * unit * _TIE for v, p in flat}
    if (result := program.minimise({peak: _SCALE} if least_peak else cost)).x is None:
        return None
    layers = [[p for v, p in n for _ in range(round(result.x[v]))] for n in counts]
    slack = 0.0 if result.status == 0 else (result.fun - result.mip_dual_bound) / second
    return layers, sum(c.seconds for copies in layers for c in copies) - slack


def _runs(
    program: _Program, segment: Segment, points: Sequence[Choice], before: int, peak: int, grads: int, unit: float
) -> list[int]:
    """The variables that say how many copies take each point, and the rows that hold their peaks; see `_solved`."""
    count, grad = segment.count, segment.grad_nbytes
    n = [program.variable(count, integral=True) for _ in points]
    used = [program.variable(1.0, integral=True) for _ in points]
    program.row([(v, 1.0) for v in n], count, count)
    program.row([(v, 1.0) for v in used], high=DIFFERENT)
    for i, p in enumerate(points):
        program.row([(n[i], 1.0), (used[i], -count)], high=0.0)
        grows = p.kept > grad
        left = [(n[q], (points[q].kept - grad) * unit) for q in range(i + 1 if grows else i)]
        own = p.backward if grows else p.kept + p.backward - grad
        program.row([(before, 1.0), (peak, -1.0), *left, (used[i], own * unit)], high=-(grads + count * grad) * unit)
        left = [(n[q], points[q].kept * unit) for q in range(i + 1)]
        program.row([(before, 1.0), (peak, -1.0), *left, (used[i], (p.forward - p.kept) * unit)], high=0.0)
    return n
