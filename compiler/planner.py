"""The planner: what a training step keeps for its backward, what it makes again, what it sends to the host.

`front.py` has the choices for one layer. Here an integer program says how many of the equal layers take which of them,
so that the peak stays in the budget.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .front import FEW, LEVELS, ROW, SCALE, TIE, Choice, Program, Segment, Value, front

DIFFERENT = 3  # different choices among the copies of a segment
_MANY = 8  # copies, from which on only the points of a front are looked at that mixtures of others do not beat


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


def plan(
    segments: Sequence[Segment],
    base: int,
    budget: int | None,
    host_bandwidth: float | None = None,
    host_budget: int = 0,
    followed: bool = False,
) -> Plan:
    """The fastest plan whose peak is at most `budget` bytes and which holds at most `host_budget` bytes on the host.

    segments  in forward order
    base      bytes that are there all the time: parameters, optimizer state
    budget    None: the fastest choice everywhere
    followed  more runs after the last forward, nobody knows yet what: as much as is kept is left free for it

    Memory, over the copies i of all segments in forward order:
        forward of i     base + sum of kept over j < i + forward of i
        backward of i    base + sum of kept over j <= i + backward of i + sum of grad_nbytes over j > i
        at the end       base + sum of grad_nbytes over all
        if followed      base + twice the sum of kept over all
    A segment's copies take at most `DIFFERENT` different choices of its front, in the order of `_in_order`.
    Among such plans the result is optimal, to 1e-7 of the largest sum of seconds and some 1e-6 of the budget, so a
    larger budget never gives a slower plan. Only a search cut off after `NODES` nodes leaves a gap, which dozens of
    segments can cause: layers of two kinds that alternate are better given as one segment of a pair.

    Raises: Infeasible, with the least peak that can be reached.
    """
    points = [_in_order(p, s) for s, p in zip(segments, _fronts(segments, host_bandwidth, host_budget), strict=True)]
    layers = [[min(p, key=lambda c: (c.seconds, c.kept))] * s.count for p, s in zip(points, segments, strict=True)]
    least = bound = sum(c.seconds for copies in layers for c in copies)
    if budget is not None and _peak(segments, layers, base, followed)[0] > budget:
        layers, bound = _fitted(segments, points, base, budget, host_budget, followed)
    copies = [c for some in layers for c in some]
    seconds = max(sum(c.seconds for c in copies) - least, 0.0)
    lower = min(max(bound - least, 0.0), seconds)
    gap = (seconds - lower) / seconds if seconds else 0.0
    host = sum(c.offloaded for c in copies)
    return Plan(tuple(map(tuple, layers)), *_peak(segments, layers, base, followed), seconds, lower, gap, host)


def _fronts(segments: Sequence[Segment], host_bandwidth: float | None, host_budget: int) -> list[list[Choice]]:
    """Points of each segment, few where all its equals hold less than one part in `_MANY` of all bytes."""
    sizes = [s.count * sum(v.nbytes for v in s.values if v.choice != "free") for s in segments]
    alike: Counter[tuple[Value, ...]] = Counter()
    for s, size in zip(segments, sizes, strict=True):
        alike[s.values] += size
    small = sum(sizes) / _MANY
    fronts = []
    for s, size in zip(segments, sizes, strict=True):
        points = front(s, host_bandwidth, host_budget or None, LEVELS if alike[s.values] >= small else FEW)
        points = [p for p in points if p.offloaded <= host_budget]
        fronts.append(_useful(points) if s.count >= _MANY or size < small else points)
    return fronts


def _useful(points: Sequence[Choice]) -> list[Choice]:
    """Those on the lower hulls of seconds over bytes."""
    on = {id(p) for backward in (0, 1) for p in _lower_hull(points, lambda p, b=backward: p.kept + b * p.backward)}
    return [p for p in points if id(p) in on]


def _lower_hull(points: Sequence[Choice], nbytes: Callable[[Choice], int]) -> list[Choice]:
    hull: list[Choice] = []
    for p in sorted(points, key=lambda p: (nbytes(p), p.seconds)):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (b.seconds - a.seconds) * (nbytes(p) - nbytes(a)) < (p.seconds - a.seconds) * (nbytes(b) - nbytes(a)):
                break
            hull.pop()
        hull.append(p)
    return hull


def _in_order(points: Sequence[Choice], segment: Segment) -> list[Choice]:
    """Forward order in which copies of one segment reach the lowest peak in the backward.

    Exchanging two neighbours shows it: first those that leave the memory no higher than they found it, by ascending
    peak; then the others, by descending transient. As a rule that puts small kept bytes first: what works in much
    memory does so where the least is kept. Forward peaks follow where none is above its own copy's backward peak.
    """
    falls = [p for p in points if p.kept <= segment.grad_nbytes]
    rises = [p for p in points if p.kept > segment.grad_nbytes]
    return [*sorted(falls, key=lambda p: p.kept + p.backward), *sorted(rises, key=lambda p: (-p.backward, p.kept))]


def _peak(
    segments: Sequence[Segment], layers: Sequence[Sequence[Choice]], base: int, followed: bool
) -> tuple[int, str]:
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
    if followed:
        peaks.append((2 * kept - base, "what follows"))
    return max(peaks, key=lambda peak: peak[0])


def _fitted(
    segments: Sequence[Segment], points: list[list[Choice]], base: int, budget: int, host_budget: int, followed: bool
) -> tuple[list[list[Choice]], float]:
    """Choices for each copy within the budget, and the least seconds that any can have. Raises: Infeasible"""
    room = budget - base
    while (solved := _solved(segments, points, room, host_budget, followed)) is not None:
        if (peak := _peak(segments, solved[0], base, followed)[0]) <= budget:
            return solved
        room -= 2 * (peak - base - room)  # over by the solver's tolerance; three times as far below the next time
    solved = _solved(segments, points, None, host_budget, followed)
    layers = solved[0] if solved is not None else _uniform(segments, points, base, followed)
    if (least := _peak(segments, layers, base, followed)[0]) > budget:
        raise Infeasible(budget, least)
    return layers, 0.0


def _uniform(
    segments: Sequence[Segment], points: Sequence[list[Choice]], base: int, followed: bool
) -> list[list[Choice]]:
    """Without HiGHS, should it fail: one choice for all copies of a segment, none offloaded, that lowers the peak."""
    layers = [[min(p, key=lambda p: (p.offloaded, p.kept))] * s.count for p, s in zip(points, segments, strict=True)]
    for i, mine in enumerate(points):
        some = [[*layers[:i], [p] * segments[i].count, *layers[i + 1 :]] for p in mine if not p.offloaded]
        layers = min(some, key=lambda layers: _peak(segments, layers, base, followed)[0])
    return layers


def _solved(
    segments: Sequence[Segment], points: Sequence[list[Choice]], room: int | None, host_budget: int, followed: bool
) -> tuple[list[list[Choice]], float] | None:
    """The fastest counts of points with a peak of at most `room` bytes beyond `base`; without it, the least peak.

    Equal copies differ only in their place, and `_in_order` gives the best one: so a segment has a number of copies for
    each point, and these lie in runs. In a run the peak is at its last copy where copies leave more than they found,
    else at its first. A point not used (used = 0) gives a row that the memory between two copies meets anyway.
    """
    program = Program()
    pairs = list(zip(segments, points, strict=True))
    grads = sum(s.grad_nbytes * s.count for s in segments)
    most = grads + sum(max(p.kept + p.backward + p.forward for p in mine) * s.count for s, mine in pairs)
    least_peak, room = room is None, most if room is None else room
    if room < grads:
        return None
    unit = ROW / max(room, 1)
    peak, before = program.variable(room * unit, grads * unit), program.variable(0.0)
    counts: list[list[tuple[int, Choice]]] = []
    for segment, mine in pairs:
        grads -= segment.grad_nbytes * segment.count
        n = list(zip(_runs(program, segment, mine, before, peak, grads, unit), mine, strict=True))
        before, earlier = program.variable(), before  # bytes that earlier segments keep
        program.row([(earlier, 1.0), (before, -1.0), *((v, p.kept * unit) for v, p in n)], 0.0, 0.0)
        counts.append(n)
    if followed:
        program.row([(before, 2.0), (peak, -1.0)], high=0.0)
    flat = [pair for some in counts for pair in some]
    program.row([(v, p.offloaded / max(host_budget, 1)) for v, p in flat], high=min(host_budget, 1))
    second = SCALE / (sum(max(p.seconds for p in mine) * s.count for s, mine in pairs) or 1.0)
    cost = {v: p.seconds * second + (p.kept + p.offloaded) * unit * TIE for v, p in flat}
    if (result := program.minimise({peak: SCALE} if least_peak else cost)).x is None:
        return None
    layers = [[p for v, p in n for _ in range(round(result.x[v]))] for n in counts]
    slack = 0.0 if result.status == 0 else (result.fun - result.mip_dual_bound) / second
    return layers, sum(c.seconds for copies in layers for c in copies) - slack


def _runs(
    program: Program, segment: Segment, points: Sequence[Choice], before: int, peak: int, grads: int, unit: float
) -> list[int]:
    """The variables that say how many copies take each point, and the rows that hold their peaks; see `_solved`."""
    count, grad = segment.count, segment.grad_nbytes
    n = [program.variable(count, integral=True) for _ in points]
    used = n if count == 1 else [program.variable(1.0, integral=True) for _ in points]
    program.row([(v, 1.0) for v in n], count, count)
    if count > 1:
        program.row([(v, 1.0) for v in used], high=DIFFERENT)
    for i, p in enumerate(points):
        if count > 1:
            program.row([(n[i], 1.0), (used[i], -count)], high=0.0)
        grows = p.kept > grad
        left = [(n[q], (points[q].kept - grad) * unit) for q in range(i + 1 if grows else i)]
        own = p.backward if grows else p.kept + p.backward - grad
        program.row([(before, 1.0), (peak, -1.0), *left, (used[i], own * unit)], high=-(grads + count * grad) * unit)
        left = [(n[q], points[q].kept * unit) for q in range(i + 1)]
        program.row([(before, 1.0), (peak, -1.0), *left, (used[i], (p.forward - p.kept) * unit)], high=0.0)
    return n
