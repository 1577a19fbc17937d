"""Tiny Hugging Face models: one graph, every site fused, loss and every gradient as accurate as without us."""

import copy

import pytest
import torch
from _models import FUSIONS, SITES, batch, tiny
from _oracle import Float64, assert_as_accurate

from fused_backend.compiler import explain

OPTIONS = {"lowering": "aot_eager", "strict": False}


def step(model, inputs):
    """Loss, logits and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    return out.loss.detach(), out.logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def exact_step(model, inputs):
    wide = copy.deepcopy(model).double()
    if getattr(wide, "is_gradient_checkpointing", False):
        wide.gradient_checkpointing_disable()  # recomputation would happen outside Float64
    with Float64():
        return step(wide, inputs)


def assert_step_as_accurate(model, inputs, options=OPTIONS):
    truth = exact_step(model, inputs)
    eager = step(torch.compile(model, backend="eager"), inputs)
    eager[2].update({n.removeprefix("_orig_mod."): g for n, g in eager[2].items()})
    torch._dynamo.reset()
    ours = step(torch.compile(model, backend="fused", options=options), inputs)
    assert_as_accurate(ours[0], eager[0], truth[0], what="loss")
    assert_as_accurate(ours[1], eager[1], truth[1], what="logits")
    for name, grad in truth[2].items():
        assert_as_accurate(ours[2]["_orig_mod." + name], eager[2][name], grad, what=name)


@pytest.mark.parametrize("family", SITES)
def test_every_site_is_fused(family):
    report = explain(tiny(family), **batch())
    fused = tuple(report.counts().get(name, (0, 0))[0] for name in FUSIONS)
    assert report.graph_count == 1 and report.graph_breaks == 0
    assert fused == SITES[family], str(report)
    refused = [d for d in report.decisions if d.status == "refused"]
    if family == "cohere":
        assert {d.fusion for d in refused} == {"rms_norm"} and "LayerNorm" in refused[0].reason
    else:
        assert not refused, str(report)


@pytest.mark.parametrize("family", SITES)
def test_loss_logits_and_every_gradient(family):
    assert_step_as_accurate(tiny(family), batch())


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "glm4"])
def test_bfloat16(family):
    assert_step_as_accurate(tiny(family).to(torch.bfloat16), batch())
