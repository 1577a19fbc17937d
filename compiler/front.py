"""What one layer can keep, make again or send to the host: choices, each the fastest for the bytes it keeps.

An integer program on bytes and seconds alone, solved by HiGHS through scipy.

Source: keep or recompute as an integer program: Checkmate, Jain et al., MLSys 2020.
"""

from __future__ import annotations

import functools
import graphlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

LEVELS = 10  # points of a front, and two close to its end; with offloading as many, and half of them without
FEW = 4  # levels for what holds little
SLOWDOWN = 0.02  # of a transfer's time, what the compute beside it loses (measured on an H200)
NODES = 2_000  # of the branch-and-bound tree. No limit in seconds: every rank of a job must get the same plan
SCALE = 1e4  # costs are scaled to this size, far above the solver's absolute tolerance of 1e-6
ROW = 1.0  # rows in bytes are, to this one: larger, an integer off by 1e-6 breaks them, and HiGHS repairs and fails
TIE = 1e-3  # weight of all bytes against all seconds (1e-7 of them): of equally fast choices the smallest


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


class Program:
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


def front(
    segment: Segment, host_bandwidth: float | None = None, host_budget: int | None = None, levels: int = LEVELS
) -> list[Choice]:
    """Choices for one copy, from the fastest to the smallest: each is the fastest for the bytes it keeps.

    Points that are no better in anything `plan` looks at (kept bytes, both peaks, host bytes, seconds) are left out.
    host_bandwidth, in bytes a second, allows offloading: transfers of a copy, out and back, must fit into its
    `compute_seconds` and are charged `SLOWDOWN` of their time. It may hold `host_budget` bytes on the host. Points
    without offloading are found as well, which the host's budget or a low peak may call for, at half as many levels.

    Raises: ValueError for values that are made from each other or have an unknown choice.
    """
    _check(segment)
    values = tuple(replace(v, name="") for v in segment.values)  # equal layers have other names, and are solved once
    away = host_bandwidth is not None
    found = dict.fromkeys(_selections(values, None, 0.0, None, max(levels // 2, 2) if away else levels))
    if away:
        found |= dict.fromkeys(_selections(values, host_bandwidth, segment.compute_seconds, host_budget, levels))
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
def _selections(
    values: tuple[Value, ...], host_bandwidth: float | None, compute: float, host_budget: int | None, levels: int
) -> tuple[tuple[str, ...], ...]:
    """The fastest choices for bytes kept at so many levels, from those of the fastest down to the least possible."""
    if not values:
        return ((),)
    program, keep, send, cost = _layer_program(values, host_bandwidth, compute, host_budget)
    unit = ROW / (sum(v.nbytes for v in values) or 1)
    size = [(k, v.nbytes * unit) for k, v in zip(keep, values, strict=True)]

    def solved(cost: dict[int, float]) -> tuple[str, ...] | None:
        x = program.minimise(cost).x
        return None if x is None else _completed(values, [x[k] > 0.5 for k in keep], [x[k] > 0.5 for k in send])

    everything = _completed(values, [v.choice in ("any", "keep") for v in values], [False] * len(values))
    fastest = solved(cost) or everything  # which is always a solution, should HiGHS have none
    smallest = solved({k: nbytes * SCALE for k, nbytes in size}) or fastest
    found, most, least = [fastest], _bytes(values, fastest), _bytes(values, smallest)
    program.row(size)
    parts = [1 - level / (levels - 1) for level in range(1, levels)]
    # Where there are many, two more at the end: to be rid of the last small values is what costs most.
    for part in [*parts[:-1], *([0.25 / levels, 0.0625 / levels] if levels > FEW else []), 0.0]:
        bound = least + int((most - least) * part)
        if _bytes(values, found[-1]) > bound:
            program.rows[-1] = size, -math.inf, (bound + 0.5) * unit  # half a byte more: rounding forbids no exact fit
            found.append(solved(cost) or smallest)
    return tuple(found)


def _layer_program(
    values: Sequence[Value], host_bandwidth: float | None, compute: float, host_budget: int | None
) -> tuple[Program, list[int], list[int], dict[int, float]]:
    """All there is to say of one copy but the bytes it may keep; its variables for keeping and sending; its cost."""
    program = Program()
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
    second = SCALE / (sum(seconds.values()) or 1.0)
    byte = TIE / (sum(v.nbytes for v in values) or 1)
    cost = {nodes[n]: s * second for n, s in seconds.items()}
    cost |= {k: v.nbytes * byte for ks in (keep, send) for k, v in zip(ks, values, strict=True)}
    if host_bandwidth is not None:
        transfers = [(k, 2 * v.nbytes / host_bandwidth) for k, v in zip(send, values, strict=True)]
        for k, transfer in transfers:
            cost[k] += SLOWDOWN * transfer * second
        unit = compute or max(t for _, t in transfers) or 1.0
        program.row([(k, t / unit) for k, t in transfers], high=compute / unit)
        if host_budget is not None:
            held = [(k, (v.host_nbytes or v.nbytes) / host_budget) for k, v in zip(send, values, strict=True)]
            program.row(held, high=1.0)
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
