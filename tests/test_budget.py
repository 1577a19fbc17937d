"""A memory budget from end to end: same bits, never over, no slower with more room, and clear about what cannot be.

Peaks are read off the partitioned graphs by `_alive`, which shares no code with the planner.
"""

import functools
import re
from dataclasses import replace

import pytest
import torch
from _alive import PRODUCTS, called
from _models import batch, tiny
from _peft import adapted
from _stack import HUGE, Stack, assert_same, assert_same_under_budgets, compiled, data, least_of, step
from fused_backend.compiler import BudgetError, MemoryPlan, budget, explain
from fused_backend.compiler.budget import MARGIN
from fused_backend.compiler.planner import Infeasible
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

F32 = torch.float32


# --- The same bits, never over ---------------------------------------------------------------------------------------


def _full():
    return tiny("llama", max_position_embeddings=128, use_cache=False)


def _lora_with_dropout():
    return adapted("llama", None, F32, layers=2, lora_dropout=0.1, changes={"max_position_embeddings": 128})


def _attention_dropout():
    return tiny("llama", max_position_embeddings=128, use_cache=False, attention_dropout=0.1)


@pytest.mark.parametrize("make", [_full, _lora_with_dropout, _attention_dropout])
def test_every_budget_gives_the_same_bits_and_is_kept(make, watch):
    model, inputs = make(), batch(2, 64)
    sweep = assert_same_under_budgets(model, lambda m: m(**inputs).loss, watch, steps=4)
    for _, half in sweep.pairs():
        promised = half.joint.peak(half.chosen)
        assert abs(half.peak() - promised) <= 0.03 * promised
        # What is kept is what was planned, but for small change that torch finds nobody to need.
        saved, planned, size = half.saved(), half.planned(), half.sizes()
        assert saved <= planned
        assert sum(size[p] for p in planned - saved) <= 0.03 * sum(size[p] for p in planned)
    widest, *_, tightest = sweep.halves[0]
    assert tightest.peak() < 0.85 * widest.peak()
    assert tightest.again(*PRODUCTS) and not widest.again(*PRODUCTS)


# --- More room, less time --------------------------------------------------------------------------------------------


def test_more_bytes_never_make_a_step_slower(watch):
    most, least = least_of(Stack(2), lambda m: m(data()), watch)
    joint = watch.halves[-1].joint
    times, peaks = [], []
    for i in range(20):
        allowed = least + (most - least) * i // 19
        answer, _, peak = joint.plan(int(allowed * (1 - MARGIN)))
        assert peak <= allowed
        times.append(answer.seconds)
        peaks.append(peak)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == 0 and peaks[0] < peaks[-1]
    with pytest.raises(Infeasible):
        joint.plan(int(least * (1 - MARGIN)) - 64)


def test_a_little_less_than_all_makes_nothing_again_that_costs(watch, monkeypatch):
    # Sizes are so small that launches and bytes would be all that anything costs.
    given = budget.ceilings(torch.device("cpu"))
    large = replace(given, launch_seconds=0.0, copy_bandwidth=1e4 * given.copy_bandwidth)
    monkeypatch.setattr(budget, "ceilings", lambda device: large)
    # The sine and its product can be made again from what the backward reads anyhow.
    compiled(Stack(32, activation=torch.sin), HUGE)(data(32))
    joint = watch.halves[-1].joint
    segments, _ = joint._segments()
    assert sorted(s.count for s in segments)[-1] == 31 and len(segments) <= 4
    most = joint.plan(None)[2]
    answer, chosen, peak = joint.plan(int(most * 0.99))
    again = {called(n) for n, what in chosen.items() if what == "recompute"}
    assert peak <= most * 0.99 and answer.seconds > 0 and again and again.isdisjoint(PRODUCTS)


# --- Checkpointing that the user asked for ---------------------------------------------------------------------------


def test_checkpointing_is_a_hint_unless_it_is_to_be_obeyed(watch):
    model, x = Stack(2, around=lambda i, layer, x: checkpoint(layer, x, use_reentrant=False)), data()
    ours = assert_same_under_budgets(model, lambda m: m(x), watch)
    assert watch.halves[0].again(*PRODUCTS) and not ours.halves[0][0].again(*PRODUCTS)
    theirs = assert_same_under_budgets(model, lambda m: m(x), watch, respect_checkpointing=True)
    assert_same(theirs.want, ours.want)
    assert all(len(half.again(*PRODUCTS)) >= 8 for _, half in theirs.pairs())
    # What a layer gives is not made again from the model's first.
    assert not any("first" in name for _, half in theirs.pairs() for name in half.again("aten::addmm"))


def test_gradient_checkpointing_enable(watch):
    model, inputs = tiny("llama", num_hidden_layers=2, use_cache=False), batch()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    overridden = step(model, lambda: compiled(model, HUGE)(**inputs).loss)
    assert not watch.halves[-1].again(*PRODUCTS)
    obeyed = step(model, lambda: compiled(model, HUGE, respect_checkpointing=True)(**inputs).loss)
    assert watch.halves[-1].again(*PRODUCTS)
    assert_same(obeyed, overridden)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_a_policy_of_the_user_is_obeyed(policy, watch):
    """For one product among others."""

    def choose(ctx, op, *args, **kwargs):
        return policy if op == torch.ops.aten.bmm.default else CheckpointPolicy.PREFER_SAVE

    context = functools.partial(create_selective_checkpoint_contexts, choose)

    def around(i, layer, x):
        return checkpoint(layer, x, use_reentrant=False, context_fn=context)

    model, x = Stack(2, around=around), data()
    sweep = assert_same_under_budgets(model, lambda m: m(x), watch)
    for _, half in sweep.pairs():
        assert bool(half.again("aten::bmm")) == (policy is CheckpointPolicy.MUST_RECOMPUTE)


# --- What cannot be --------------------------------------------------------------------------------------------------


def refusal(call):
    with pytest.raises(BackendCompilerFailed) as caught:
        call()
    assert isinstance(caught.value.inner_exception, (BudgetError, ValueError))
    return str(caught.value.inner_exception)


def test_too_small_a_budget_says_what_would_do():
    model, x = Stack(2), data()
    message = refusal(lambda: compiled(model, "1KiB")(x))
    assert message.startswith("memory_budget '1KiB' is below ") and message.count("\n") == 0
    figure, unit = re.search(r"below ([0-9.]+) (MiB|GiB)", message).groups()
    compiled(model, f"{figure}{unit}")(x).backward()
    less = f"{0.9 * float(figure)}{unit}"
    assert figure in refusal(lambda: compiled(model, less)(x))
    with pytest.raises(BackendCompilerFailed, match="BudgetError"):
        explain(model, x, options={"memory_budget": "1KiB"})


@pytest.mark.parametrize(
    "budget, words",
    [
        ("auto", ["'auto'", "on cpu", "in bytes"]),
        ("20 gigs", ["memory_budget", "'20 gigs'", "'20GiB'"]),
        ("-1GiB", ["memory_budget", "'-1GiB'"]),
        (0, ["memory_budget", "got 0"]),
        (True, ["memory_budget", "got True"]),
        (1.5, ["memory_budget", "got 1.5"]),
    ],
)
def test_a_budget_that_means_nothing(budget, words):
    message = refusal(lambda: compiled(Stack(1), budget)(data()))
    assert all(word.lower() in message.lower() for word in words) and "\n" not in message


# --- What is told ----------------------------------------------------------------------------------------------------


def test_explain_tells_the_plan(watch):
    model, x = Stack(3), data()
    most, least = least_of(model, lambda m: m(x), watch)
    report = explain(model, x, options={"memory_budget": (most + least) // 2})
    plan = report.plan
    assert isinstance(plan, MemoryPlan) and plan.peak <= plan.budget == (most + least) // 2
    assert plan.extra_seconds > 0 and plan.seconds > plan.extra_seconds
    for column in ("kept", "recomputed"):
        sums = [sum(getattr(row, column) for row in rows) for rows in (plan.kinds, plan.layers)]
        assert sums[0] == sums[1] > 0
    half = watch.halves[-1]
    kept = sum(row.kept for row in plan.kinds)
    assert kept == pytest.approx(sum(half.sizes()[p] for p in half.saved()), rel=0.05)
    assert {f"layers.{i}" for i in range(3)} <= {row.name for row in plan.layers}
    where = re.fullmatch(r"(forward|backward) of (layers\.\d|before the layers|after the layers), (\w+)", plan.peak_at)
    assert where, plan.peak_at
    text = str(report)
    assert f"({plan.peak_at})" in text and all(row.name in text for row in (*plan.kinds, *plan.layers))
    assert explain(model, x).plan is None
