"""The planner against brute force: every point and every plan is the best there is, none over its budget."""

import itertools
import math
import time

import pytest
import scipy.optimize
from fused_backend.compiler import front as layer
from fused_backend.compiler.front import SLOWDOWN, Choice, Segment, Value, front
from fused_backend.compiler.planner import DIFFERENT, Infeasible, plan
from hypothesis import given, settings
from hypothesis import strategies as st

GIB = 2**30
fresh = itertools.count(1000)


def value(nbytes, inputs=(), seconds=1.0, node=None, needed=False, choice="any", **rest):
    node = next(fresh) if node is None else node
    return Value("v", nbytes, tuple(inputs), seconds, node, needed, choice, **rest)


def of_chain(*needed):
    """a -> b -> c, of 4, 8 and 16 bytes and 1, 2 and 4 seconds."""
    return tuple(
        value(4 * 2**i, (i - 1,) if i else (), 2.0**i, node=i, needed=name in needed) for i, name in enumerate("abc")
    )


def cost(values, kept, sent=frozenset(), bandwidth=math.inf):
    """Seconds where `kept` and `sent` are there and all else that is needed is made again; None if that may not be.

    Written as the rules are, by a fixed point, and not as the planner is.
    """
    if any(values[i].choice not in ("any", "keep") for i in kept | sent):
        return None
    there = kept | sent | {i for i, v in enumerate(values) if v.choice == "free"}
    again = {i for i, v in enumerate(values) if v.needed} - there
    while more := {u for i in again for u in values[i].inputs} - there - again:
        again |= more
    if any(values[i].choice == "keep" for i in again):
        return None
    nodes = {values[i].node: values[i].seconds for i in again}
    return sum(nodes.values()) + sum(SLOWDOWN * 2 * values[i].nbytes / bandwidth for i in sent)


def subsets(n):
    return (frozenset(s) for size in range(n + 1) for s in itertools.combinations(range(n), size))


def size(values, which):
    return sum(values[i].nbytes for i in which)


@st.composite
def graphs(draw, most=8):
    values: list[Value] = []
    seconds: dict[int, float] = {}
    for i in range(draw(st.integers(1, most))):
        node = i if i == 0 or draw(st.integers(0, 3)) else values[-1].node  # one in four comes with the one before it
        twin = bool(values) and node == values[-1].node
        earlier = st.sets(st.integers(0, i - 1), max_size=3) if i else st.just(set())
        inputs = values[-1].inputs if twin else tuple(sorted(draw(earlier)))
        seconds.setdefault(node, float(draw(st.integers(0, 9))))
        choice = draw(st.sampled_from(["any"] * 5 + ["free", "keep", "recompute"]))
        values.append(value(draw(st.integers(0, 30)), inputs, seconds[node], node, draw(st.booleans()), choice))
    return tuple(values)


@settings(max_examples=60)
@given(graphs())
def test_each_point_is_the_fastest_for_the_bytes_it_keeps(values):
    possible = [(size(values, kept), c) for kept in subsets(len(values)) if (c := cost(values, kept)) is not None]
    points = front(Segment("layer", values))
    for p in points:
        kept = frozenset(i for i, c in enumerate(p.choices) if c == "keep" and values[i].choice != "free")
        assert p.kept == size(values, kept) and p.seconds == cost(values, kept)
        assert p.seconds == min(seconds for nbytes, seconds in possible if nbytes <= p.kept)
        again = {i for i, c in enumerate(p.choices) if c == "recompute"}
        assert all(p.choices[u] != "drop" for i in again for u in values[i].inputs)
        assert all(c != "drop" for v, c in zip(values, p.choices, strict=True) if v.needed)
    # From the fastest, with no more bytes than that takes, to the smallest.
    assert (points[0].seconds, points[0].kept) == min((seconds, nbytes) for nbytes, seconds in possible)
    assert points[-1].kept == min(possible)[0]


def test_a_chain_is_charged_as_a_chain():
    fast, *_, small = front(Segment("layer", of_chain("c")))
    assert (fast.choices, fast.kept, fast.seconds) == (("drop", "drop", "keep"), 16, 0.0)
    assert (small.choices, small.kept, small.seconds) == (("recompute",) * 3, 0, 7.0)
    between = [p for p in front(Segment("layer", of_chain("c"))) if 0 < p.kept < 16]
    assert {(p.kept, p.seconds) for p in between} == {(8, 4.0), (4, 6.0)}


def test_a_node_with_two_outputs_is_charged_once():
    both = tuple(value(10, node=7, needed=True, seconds=3.0) for _ in range(2))
    assert [(p.kept, p.seconds) for p in front(Segment("layer", both))] == [(20, 0.0), (0, 3.0)]


def test_what_must_be_kept_is_and_what_must_not_be_is_not():
    _, b, c = of_chain("b", "c")
    random = value(4, choice="keep", seconds=0.0)
    points = front(Segment("layer", (random, b, value(16, (1,), 4.0, needed=True, choice="recompute"))))
    assert {p.choices[0] for p in points if p.choices[1] == "recompute"} == {"keep"}
    assert {p.choices[0] for p in points if p.choices[1] == "keep"} == {"drop"}
    assert {p.choices[2] for p in points} == {"recompute"} and min(p.kept for p in points) == 4
    free = value(4, choice="free")
    assert front(Segment("layer", (free, b, c)))[-1].kept == 0
    with pytest.raises(ValueError, match="unknown choice 'sometimes'"):
        front(Segment("layer", (value(1, choice="sometimes"),)))
    with pytest.raises(ValueError, match="made from each other"):
        front(Segment("layer", (value(1, (1,)), value(1, (0,)))))


def test_a_segment_that_keeps_nothing():
    assert front(Segment("head", ())) == [Choice((), 0, 0, 0.0, 0, 0)]


@settings(max_examples=40)
@given(graphs(most=5), st.integers(0, 3), st.sampled_from([0.0, 5.0, 20.0]))
def test_each_offloading_point_is_the_fastest_too(values, which, compute):
    values = tuple(
        Value(v.name, v.nbytes, v.inputs, v.seconds, v.node, v.needed, v.choice, i % 4 >= which)
        for i, v in enumerate(values)
    )
    bandwidth = 4.0
    possible = []
    for sent in subsets(len(values)):
        if all(values[i].offloadable for i in sent) and 2 * size(values, sent) <= bandwidth * compute:
            for kept in subsets(len(values)):
                if not kept & sent and (c := cost(values, kept, sent, bandwidth)) is not None:
                    possible.append((size(values, kept), c, size(values, sent)))
    points = front(Segment("layer", values, compute_seconds=compute), bandwidth)
    for p in points:
        best = min(c for nbytes, c, sent in possible if nbytes <= p.kept and (p.offloaded or not sent))
        assert p.seconds == pytest.approx(best, abs=1e-4)
        assert 2 * p.offloaded <= bandwidth * compute
    assert min(p.kept for p in points) == min(possible)[0]


def peak_of(segments, layers, base, followed=False):
    """The formula of `plan`, copy by copy."""
    copies = [(c, s.grad_nbytes) for s, some in zip(segments, layers, strict=True) for c in some]
    peaks = [base + sum(g for _, g in copies)]
    for i, (c, _) in enumerate(copies):
        peaks.append(base + sum(d.kept for d, _ in copies[:i]) + c.forward)
        peaks.append(base + sum(d.kept for d, _ in copies[: i + 1]) + c.backward + sum(g for _, g in copies[i + 1 :]))
    return max(*peaks, base + followed * 2 * sum(c.kept for c, _ in copies))


def assert_holds(made, segments, base, budget, host_budget=0, followed=False):
    assert made.peak == peak_of(segments, made.layers, base, followed) <= budget
    assert made.host == sum(c.offloaded for some in made.layers for c in some) <= host_budget
    assert [len(some) for some in made.layers] == [s.count for s in segments]
    assert all(len(set(some)) <= DIFFERENT for some in made.layers)
    assert 0 <= made.lower_bound <= made.seconds


def transient_of(values, workspace=5):
    """Made again: all at once. The forward holds what it keeps and some more, never above the backward."""

    def transient(choices):
        kept = sum(v.nbytes for v, c in zip(values, choices, strict=True) if c == "keep" and v.choice != "free")
        again = sum(v.nbytes for v, c in zip(values, choices, strict=True) if c == "recompute")
        return kept + workspace, again + workspace

    return transient


@settings(max_examples=40)
@given(
    graphs(most=6), graphs(most=4), st.integers(2, 3), st.integers(0, 25), st.integers(0, 20), st.booleans(), st.data()
)
def test_a_plan_is_the_best_of_all(values, others, count, grad, workspace, followed, data):
    segments = [
        Segment("first", others, 1, 3, transient_of(others, workspace)),
        Segment("layers", values, count, grad, transient_of(values, 5)),
    ]
    points = [front(s) for s in segments]
    every = [(first, *rest) for first in points[0] for rest in itertools.product(points[1], repeat=count)]
    figures = sorted((peak_of(segments, [p[:1], p[1:]], 100, followed), sum(c.seconds for c in p)) for p in every)
    least, fastest = figures[0][0], min(seconds for _, seconds in figures)
    with pytest.raises(Infeasible) as error:
        plan(segments, 100, least - 1, followed=followed)
    assert error.value.smallest == least
    for budget in {least, data.draw(st.integers(least, max(peak for peak, _ in figures)))}:
        made = plan(segments, 100, budget, followed=followed)
        assert_holds(made, segments, 100, budget, followed=followed)
        assert made.seconds == min(seconds for peak, seconds in figures if peak <= budget) - fastest
        assert made.gap == 0


@pytest.fixture
def failing(monkeypatch):
    """Sets for which options HiGHS fails, as 1.12 does where it rejects its own solution ("Solve error")."""
    milp = scipy.optimize.milp

    def install(fails):
        layer._selections.cache_clear()
        failed = scipy.optimize.OptimizeResult(x=None, status=4)
        monkeypatch.setattr(scipy.optimize, "milp", lambda *a, **k: failed if fails(k["options"]) else milp(*a, **k))

    yield install
    layer._selections.cache_clear()


def test_what_the_solver_fails_at_is_solved_without_presolve_or_has_a_plan_without_it(failing):
    values = of_chain("b", "c")
    segments = [Segment(n, values, count, 2, transient_of(values)) for n, count in (("first", 1), ("layers", 3))]
    with pytest.raises(Infeasible) as least:
        plan(segments, 100, 1)
    failing(lambda options: options.get("presolve", True))
    with pytest.raises(Infeasible) as error:
        plan(segments, 100, 1)
    assert error.value.smallest == least.value.smallest
    failing(lambda options: True)
    with pytest.raises(Infeasible) as error:
        plan(segments, 100, 1)
    stated = error.value.smallest
    assert stated >= least.value.smallest
    assert_holds(plan(segments, 100, stated), segments, 100, stated)


def of_one_value(kept, again, **rest):
    """Ten bytes, kept or made again in a second; the two transients of each."""
    return Segment("one", (value(10, needed=True),), transient=lambda c: kept if c[0] == "keep" else again, **rest)


def test_the_peak_may_lie_in_the_forward():
    made = plan([of_one_value((100, 0), (20, 20))], 0, 50)
    assert (made.seconds, made.peak, made.peak_at) == (1.0, 20, "forward of one")


def test_where_gradients_outweigh_what_is_kept_the_lowest_peak_comes_first():
    made = plan([of_one_value((10, 90), (0, 5), count=2, grad_nbytes=50)], 0, 100)
    assert (made.seconds, [c.kept for c in made.layers[0]]) == (1.0, [0, 10])


def random_layer(n, seed, **rest):
    """Of the size and the make of a real layer: n values, of which the backward reads half."""
    import random

    rng = random.Random(seed)
    values = []
    for i in range(n):
        inputs = sorted({rng.randrange(max(0, i - 8), i) for _ in range(rng.choice([1, 1, 2, 3]))}) if i else ()
        nbytes = rng.choice([8, 64, 64, 64, 224]) * 2**20
        seconds = rng.choice([3e-5, 5e-5, 1e-4, 2e-4, 1.5e-3]) * rng.uniform(0.9, 1.1)
        values.append(value(nbytes, inputs, seconds, i, rng.random() < 0.5, "any" if i else "free", offloadable=True))
    return Segment(f"layer{seed}", tuple(values), transient=transient_of(values, 400 * 2**20), **rest)


def test_a_larger_budget_is_never_slower_and_never_overrun():
    segments = [random_layer(8, 1), random_layer(30, 2, count=12, grad_nbytes=50 * 2**20), random_layer(10, 3)]
    most = plan(segments, 4 * GIB, None)
    assert most.seconds == most.lower_bound == most.gap == 0 and most.peak == peak_of(segments, most.layers, 4 * GIB)
    with pytest.raises(Infeasible, match=r"memory_budget 1\.0 GiB is below the least this step can run in") as error:
        plan(segments, 4 * GIB, GIB)
    least = error.value.smallest
    before = math.inf
    for i in range(20):
        budget = least + (most.peak - least) * i // 19
        made = plan(segments, 4 * GIB, budget)
        assert_holds(made, segments, 4 * GIB, budget)
        assert made.seconds <= before * (1 + 1e-6)
        kept = [c.kept for c in made.layers[1]]
        assert kept == sorted(kept)  # what works in much memory comes first, where the least is kept
        before = made.seconds
    assert before == 0


def test_the_host_holds_no_more_than_it_may():
    layer = random_layer(20, 5, count=6, compute_seconds=0.03)
    with pytest.raises(Infeasible) as error:
        plan([layer], GIB, 1, 50e9, 0)
    budget = error.value.smallest + GIB // 4
    made = [plan([layer], GIB, budget, 50e9, host_budget) for host_budget in (0, GIB // 2, 40 * GIB)]
    for some, host_budget in zip(made, (0, GIB // 2, 40 * GIB), strict=True):
        assert_holds(some, [layer], GIB, budget, host_budget)
    assert made[0].host == 0 < made[1].host < made[2].host
    assert made[0].seconds > made[1].seconds > made[2].seconds


@pytest.mark.parametrize("count", [32, 80])
def test_time_to_plan(count):
    """Prints what planning takes; a figure to read, not to fail on."""
    segments = [random_layer(10, 1), random_layer(100, count, count=count, grad_nbytes=2**20), random_layer(20, 3)]
    start = time.perf_counter()
    most = plan(segments, 5 * GIB, None)
    fronts = time.perf_counter() - start
    made = plan(segments, 5 * GIB, most.peak // 2)
    assert_holds(made, segments, 5 * GIB, most.peak // 2)
    print(f"\n{count} copies of 100 values: fronts {fronts:.2f} s, all {time.perf_counter() - start:.2f} s")
