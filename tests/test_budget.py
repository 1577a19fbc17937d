"""A memory budget from end to end: same bits, never over, no slower with more room, and clear about what cannot be.

Peaks are read off the partitioned graphs by `_alive`, which shares no code with the planner.
"""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _alive import PRODUCTS, Sweep, Watch, called, needed
from _models import batch, tiny
from _peft import adapted
from fused_backend.compiler import BudgetError, MemoryPlan, budget, explain
from fused_backend.compiler.budget import MARGIN
from fused_backend.compiler.planner import Infeasible
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

F32 = torch.float32
HUGE = "8GiB"


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def compiled(model, budget: Any = None, **options):
    torch._dynamo.reset()
    given = {"lowering": "aot_eager", **options} | ({} if budget is None else {"memory_budget": budget})
    return torch.compile(model, backend="fused", options=given)


def step(model, call, seed=1):
    """Loss and gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = call()
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(got, want):
    assert len(got) == len(want) > 1
    assert all(map(torch.equal, got, want))


def least_of(model, call, watch):
    """Most and least bytes that a budget of the last graph of `call` is about."""
    call(compiled(model, HUGE))
    return needed(watch.halves[-1].joint)


class Layer(nn.Module):
    """Attention and a gated MLP, written by hand: quick to trace."""

    def __init__(self, d: int = 16, dropout=lambda t: t, activation=F.silu):
        super().__init__()
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.w = nn.Parameter(torch.rand(d) + 0.5)
        self.dropout, self.activation = dropout, activation

    def forward(self, x):
        q, k, v = self.qkv(F.rms_norm(x, (x.shape[-1],), self.w, 1e-6)).chunk(3, -1)
        x = x + self.o(self.dropout(torch.softmax(q @ k.transpose(-1, -2), -1)) @ v)
        return x + self.down(self.activation(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    def __init__(self, layers: int = 3, d: int = 16, around=lambda i, layer, x: layer(x), **rest: Any):
        super().__init__()
        self.first, self.w = nn.Linear(d, d), nn.Parameter(torch.rand(d) + 0.5)
        self.layers = nn.ModuleList(Layer(d, **rest) for _ in range(layers))
        self.around = around

    def forward(self, x):
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = self.around(i, layer, x)
        return F.rms_norm(x, (x.shape[-1],), self.w, 1e-6).square().mean()


def data(length=64, d=16):
    return torch.randn(2, length, d)


def assert_same_under_budgets(model, call, watch, graphs=1, steps=2, **options):
    """The same bits without a plan and from the most to the least bytes that each graph can do with; never over."""
    torch._dynamo.reset()
    sweep = Sweep(watch, steps, **options)
    module = torch.compile(model, backend=sweep)
    sweep.want = step(model, lambda: call(module))
    assert len(sweep.halves) == graphs
    for sweep.now in range(steps):
        assert_same(step(model, lambda: call(module)), sweep.want)
    for most, half in sweep.pairs():
        assert half.peak() <= most
    assert any(halves[-1].again() for halves in sweep.halves)
    return sweep


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
    sweep = assert_same_under_budgets(model, lambda m: m(**inputs).loss, watch, steps=6)
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


# --- Other graphs ----------------------------------------------------------------------------------------------------


def close_to_eager(model, call, got):
    for mine, expected in zip(
        got.want if isinstance(got, Sweep) else got, step(model, lambda: call(model)), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_two_graphs_in_a_step(watch):
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(), Stack(3)

        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    model, x = Halves(), data()
    close_to_eager(model, lambda m: m(x), assert_same_under_budgets(model, lambda m: m(x), watch, graphs=2))


def test_a_backward_twice(watch):
    model, x = Stack(2), data()
    _, least = least_of(model, lambda m: m(x), watch)
    loss = compiled(model, least)(x)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert_same(second, first)


def dynamic(model, budget, watch):
    torch._dynamo.reset()
    del watch.halves[:]
    return torch.compile(
        model, backend="fused", dynamic=True, options={"lowering": "aot_eager", "memory_budget": budget}
    )


def test_one_graph_for_the_lengths_that_it_was_planned_for(watch):
    """A little more than the first seen; beyond that another is planned, with a budget of its own kept."""
    model, x = Stack(2), data(72)
    dynamic(model, HUGE, watch)(x)
    most, least = needed(watch.halves[-1].joint)
    module = dynamic(model, (most + least) // 2, watch)
    for length, graphs in ((72, 1), (48, 1), (80, 1), (88, 2), (64, 2), (96, 2)):
        x = data(length)
        close_to_eager(model, lambda m, x=x: m(x), step(model, lambda x=x: module(x)))
        assert len(watch.halves) == graphs, length
    small, large = (half.joint.work for half in watch.halves)
    ratio = {b.nbytes / a.nbytes for a, b in zip(small.values, large.values, strict=True) if a.nbytes != b.nbytes}
    assert {96 / 80, (96 / 80) ** 2} == ratio and watch.halves[1].again()


def test_a_declared_length_is_planned_for(watch):
    model, x = Stack(2), data(48)
    torch._dynamo.mark_dynamic(x, 1, min=2, max=120)
    torch.compile(model, backend="fused", options={"lowering": "aot_eager", "memory_budget": HUGE})(x)
    torch._dynamo.reset()
    compiled(model, HUGE)(data(120))
    declared, fixed = (max(v.nbytes for v in half.joint.work.values) for half in watch.halves)
    assert declared == fixed


def test_a_model_without_layers(watch):
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(), Layer()

        def forward(self, x):
            return self.b(self.a(x)).square().mean()

    model, x = Flat(), data()
    close_to_eager(model, lambda m: m(x), assert_same_under_budgets(model, lambda m: m(x), watch))


def test_two_lists_of_layers(watch):
    """Of an encoder and a decoder that reads its output in every layer."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = (nn.ModuleList(Layer() for _ in range(2)) for _ in range(2))

        def forward(self, x, y):
            for layer in self.encoder:
                x = layer(x)
            for layer in self.decoder:
                y = layer(y + x)
            return y.square().mean()

    model, x, y = Both(), data(), data()
    close_to_eager(model, lambda m: m(x, y), assert_same_under_budgets(model, lambda m: m(x, y), watch))


def test_a_buffer_that_the_forward_writes(watch):
    class Normed(Stack):
        def __init__(self):
            super().__init__(2)
            self.norm = nn.BatchNorm1d(16)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2) * self.calls)

    model, x = Normed(), data()
    before = {n: b.clone() for n, b in model.named_buffers()}

    def call(m):
        for name, buffer in model.named_buffers():
            buffer.data.copy_(before[name])
        return m(x)

    close_to_eager(model, call, assert_same_under_budgets(model, call, watch))
    assert model.calls == 1 and not torch.equal(model.norm.running_mean, before["norm.running_mean"])


def test_random_numbers_are_drawn_once(watch):
    model, x = Stack(2, dropout=lambda t: t * torch.rand_like(t).round()), data()
    sweep = assert_same_under_budgets(model, lambda m: m(x), watch)
    close_to_eager(model, lambda m: m(x), sweep)
    assert not any(half.again("aten::rand_like", "aten::rand") for _, half in sweep.pairs())


def test_what_the_caller_holds_counts(watch):
    """Large outputs beside the loss stay there while the backward runs."""

    class Telling(Stack):
        def forward(self, x):
            kept = [self.layers[0](x).repeat(8, 1, 1), self.layers[1](x)]
            return kept[0].sin().mean() + super().forward(kept[1]), kept[0].cos()

    model, x = Telling(2), data()
    most, least = least_of(model, lambda m: m(x), watch)
    for bytes_ in (most, least):
        compiled(model, bytes_)(x)
        assert watch.halves[-1].peak() <= bytes_


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
    text = str(report)
    assert "predicted peak" in text and all(row.name in text for row in (*plan.kinds, *plan.layers))
    assert explain(model, x).plan is None
