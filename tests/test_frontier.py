"""The curve of memory against time: its points are plans, it rises, and drawing it changes nothing."""

import itertools

import pytest
import torch
from _models import batch, tiny
from fused_backend.compiler import explain, frontier
from fused_backend.compiler.budget import MARGIN

LABELS = ["keep everything", "full checkpointing", "Inductor's default"]


@pytest.fixture(scope="module")
def points():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return frontier(tiny("llama"), points=6, **batch(length=64))


def test_more_memory_never_takes_more_time(points):
    ours = [p for p in points if not p.label]
    assert len(ours) == 6 and ours[0].seconds > ours[-1].seconds
    for less, more in itertools.pairwise(ours):
        assert less.budget <= more.budget and less.seconds >= more.seconds
    assert all(p.peak <= p.budget for p in ours)


def test_what_others_would_do_is_marked(points):
    everything, checkpointing, inductor = others = [p for p in points if p.label]
    assert [p.label for p in others] == LABELS and all(p.budget is None for p in others)
    assert everything.seconds == min(p.seconds for p in points)
    assert checkpointing.peak < everything.peak and checkpointing.seconds > everything.seconds
    assert checkpointing.peak <= inductor.peak <= everything.peak


def test_the_backend_reaches_the_points(points):
    """A budget of a point's, given to the backend, is met with the same peak and time."""
    point = points[2]
    budget = int(point.budget / (1 - MARGIN)) + 1
    plan = explain(tiny("llama"), options={"memory_budget": budget}, **batch(length=64)).plan
    assert plan.peak == point.peak and plan.seconds == pytest.approx(point.seconds)


def test_a_picture_is_drawn_and_the_model_left_as_it_was(tmp_path):
    model, inputs = tiny("llama", num_hidden_layers=1), batch()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda m, *_: m.calls.add_(1))
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random, path = torch.get_rng_state(), tmp_path / "frontier.png"
    frontier(model, points=2, path=path, **inputs)
    assert path.read_bytes().startswith(b"\x89PNG")
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert torch.equal(torch.get_rng_state(), random)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert list(grads) == ["lm_head.weight"] and bool((grads["lm_head.weight"] == 1).all())
    assert model._compiled_call_impl is None


def test_what_does_not_train_is_refused():
    model = tiny("llama", num_hidden_layers=1).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing here trains"):
        frontier(model, **batch())
    with pytest.raises(ValueError, match="at least 2, got 1"):
        frontier(model, points=1, **batch())
