"""What the backward makes again: less is saved, and every gradient keeps its bits."""

import operator
from typing import Any

import pytest
import torch
from _block import Block, data
from _models import batch, tiny
from fused_backend.compiler import partition
from torch._functorch import partitioners

OPTIONS = {"lowering": "aot_eager"}


def saved_and_gradients(model, call, monkeypatch, remake):
    """Names and sizes of what the forward hands to the backward, the backward's code, and the gradients."""
    saved, codes = [], []
    split = partitioners.min_cut_rematerialization_partition

    def spy(gm, joint_inputs, **kwargs):
        forward, backward = split(gm, joint_inputs, **kwargs)
        outputs: Any = forward.graph.output_node().args[0]
        made = [
            o
            for o in outputs[kwargs["num_fwd_outputs"] :]
            if o.op != "placeholder" and isinstance(o.meta.get("val"), torch.Tensor)
        ]
        saved.extend((o.name, o.meta["val"].nbytes) for o in made)
        codes.append(backward.code)
        return forward, backward

    with monkeypatch.context() as patch:
        patch.setattr(partition, "min_cut_rematerialization_partition", spy)
        if not remake:
            patch.setattr(partition, "recompute_what_is_cheap", lambda graph: None)
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        call(torch.compile(model, backend="fused", options=OPTIONS)).backward()
    return saved, "\n".join(codes), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def models():
    inputs = batch()
    x, target = data()
    yield "llama", tiny("llama"), lambda m: m(**inputs).loss
    yield "gemma2", tiny("gemma2"), lambda m: m(**inputs).loss
    yield "bfloat16 llama", tiny("llama").to(torch.bfloat16), lambda m: m(**inputs).loss
    yield "by hand", Block(), lambda m: m(x, target)


@pytest.mark.parametrize("index", range(4))
def test_less_is_saved_and_gradients_keep_their_bits(index, monkeypatch):
    _, model, call = list(models())[index]
    kept, _, before = saved_and_gradients(model, call, monkeypatch, remake=False)
    fewer, code, after = saved_and_gradients(model, call, monkeypatch, remake=True)
    assert sum(n for _, n in fewer) < 0.9 * sum(n for _, n in kept)
    assert "fused_backend.swiglu.default" in code
    assert len(after) == len(before) and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_residual_norm_is_made_from_the_sum_that_is_kept(monkeypatch):
    inputs = batch()
    _, code, _ = saved_and_gradients(tiny("llama"), lambda m: m(**inputs).loss, monkeypatch, remake=True)
    assert "fused_backend.rms_norm.default" in code and "fused_backend.add_rms_norm" not in code


@pytest.mark.parametrize("kept", [False, True])
def test_what_would_have_to_be_kept_for_it_is_not_made_again(kept):
    """swiglu whose gate and up no backward reads: running it again would keep two tensors for one."""
    graph = torch.fx.Graph()
    gate, up, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    gate, up = (graph.call_function(torch.ops.aten.neg.default, (t,)) for t in (gate, up))
    h = graph.call_function(torch.ops.fused_backend.swiglu.default, (gate, up, "silu"))
    gradients = [graph.call_function(operator.mul, (t, tangent)) for t in ((h, gate, up) if kept else (h,))]
    graph.output((gate, gradients))
    partition.recompute_what_is_cheap(graph)
    assert ("recompute" in h.meta) == kept


def test_a_sum_that_nothing_keeps():
    """A residual norm before the first trained weight: there is no sum to make its output from again."""
    w_norm, w, a, b = torch.randn(24), torch.randn(16, 24), torch.randn(4, 24), torch.randn(16, 4)
    a.requires_grad_()
    b.requires_grad_()

    def block(x, r):
        h = torch.nn.functional.rms_norm(x + r, (24,), w_norm, 1e-6)
        return torch.sin(h @ w.t() + (h @ a.t()) @ b.t() * 2)

    x, r = torch.randn(5, 24), torch.randn(5, 24)
    y = torch.compile(block, backend="fused", options=OPTIONS | {"strict": True})(x, r)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (a, b)), torch.autograd.grad(block(x, r).sum(), (a, b)))


def test_a_plan_that_fails_is_told_and_the_model_still_trains(monkeypatch, caplog):
    """The budget is lost then, and the log says so; with strict=True it raises."""

    def broken(*args):
        raise KeyError("planner")

    monkeypatch.setattr("fused_backend.compiler.partition.apply", broken)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()), torch.randn(3, 8)
    for strict in (False, True):
        torch._dynamo.reset()
        options = {"memory_budget": "1GiB", "lowering": "aot_eager", "strict": strict}
        run = torch.compile(model, backend="fused", options=options)
        if strict:
            with pytest.raises(Exception, match="planner"):
                run(x)
        else:
            run(x).sum().backward()
            assert "'1GiB' is NOT kept" in caplog.text
            assert model[0].weight.grad is not None
