"""The pipeline around the fusions: modes, shapes, graph breaks, graphs with nothing to match."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from _block import OPTIONS, Block, assert_same_gradients, compiled, data, gradients
from _models import batch, draws, tiny
from _training import assert_step_as_accurate, step
from fused_backend.compiler import explain, fused
from torch import nn

# --- modes


def test_inference_and_no_grad_and_train_again():
    model, (x, t) = Block(), data()
    call = compiled(model)
    want = model(x, t)
    with torch.no_grad():
        torch.testing.assert_close(call(x, t), want)
    with torch.inference_mode():
        torch.testing.assert_close(call(x, t), want)
    model.eval()
    torch.testing.assert_close(call(x, t), want)
    model.train()
    assert_same_gradients(model, call, x, t)


def test_no_grad_region_inside_the_graph():
    class Half(Block):
        def forward(self, x, target):
            with torch.no_grad():
                x = self.body(x)
            return super().forward(x, target)

    model = Half()
    assert_same_gradients(model, compiled(model), *data())
    assert explain(model, *data()).counts()["rms_norm"] == (2, 0)


def test_variance_computed_without_gradient_is_refused():
    class Detached(Block):
        def body(self, x):
            with torch.no_grad():
                rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.w * (x * rstd)

    model = Detached()
    x, t = data()
    x.requires_grad_()
    (decision,) = [d for d in explain(model, x, t).decisions if d.fusion == "rms_norm"]
    assert decision.status == "refused" and "without gradients" in decision.reason
    assert_same_gradients(model, compiled(model), x, t)


def test_an_input_modified_in_place_is_refused():
    class InPlace(Block):
        def body(self, x):
            h = x * 1.5
            variance = h.pow(2).mean(-1, keepdim=True)
            h.mul_(2.0)
            return self.w * (h * torch.rsqrt(variance + 1e-6))

    model = InPlace()
    (decision,) = [d for d in explain(model, *data()).decisions if d.fusion == "rms_norm"]
    assert decision.status == "refused" and "in place" in decision.reason
    x, t = data()
    torch.testing.assert_close(compiled(model)(x, t), model(x, t))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_region_and_ambient(inside):
    class Cast(Block):
        def forward(self, x, target):
            if not inside:
                return super().forward(x, target)
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, target)

    model, (x, t) = Cast(), data()
    call = compiled(model)

    def run(f):
        if inside:
            return gradients(model, f, x, t)
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = f(x, t)
        loss.backward()
        return [p.grad for p in model.parameters()]

    for got, want in zip(run(call), run(torch.compile(model, backend="eager")), strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() <= 0.02 * want.norm() + 1e-6
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        counts = explain(model, x, t).counts()
    assert counts == {"linear_cross_entropy": (1, 0), "rms_norm": (1, 0), "swiglu": (1, 0)}


def test_activation_checkpointing_bodies_are_looked_into():
    model = tiny("llama", use_cache=False)
    model.gradient_checkpointing_enable()
    report = assert_step_as_accurate(model, draws()).report
    assert {k: v[0] for k, v in report.counts().items()} == {
        "rms_norm": 5, "rope": 2, "attention": 2, "swiglu": 2, "linear_cross_entropy": 1
    }  # fmt: skip
    assert report.graph_count == 1


def test_autograd_function_bodies_are_looked_into():
    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return F.silu(a) * b

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            s = torch.sigmoid(a)
            return g * b * s * (1 + a * (1 - s)), g * a * s

    class Custom(Block):
        def body(self, x):
            return x + self.down(Silu.apply(self.gate(x), self.up(x)))

    model = Custom()
    assert explain(model, *data()).counts()["swiglu"] == (1, 0)
    assert_same_gradients(model, compiled(model), *data())


# --- shapes and graphs


def test_second_length_makes_one_dynamic_graph_and_third_none():
    model = tiny("llama", num_hidden_layers=1)
    calls = []

    def counting(gm, inputs):
        calls.append(1)
        return fused(gm, inputs, options=OPTIONS)

    call = torch.compile(model, backend=counting)
    for length in (16, 24, 32, 13):
        inputs = batch(length=length)
        model.zero_grad(set_to_none=True)
        call(**inputs).loss.backward()
        got = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert len(calls) == 2


def test_dynamic_graph_fuses_every_site():
    model = tiny("llama", num_hidden_layers=1)
    report = explain(model, **batch())
    inputs = batch(length=24)
    for value in inputs.values():
        torch._dynamo.mark_dynamic(value, 1)
    assert explain(model, **inputs).counts() == report.counts()


def test_several_graphs_after_a_graph_break():
    class Broken(Block):
        def forward(self, x, target):
            x = self.body(x)
            torch._dynamo.graph_break()
            return super().forward(x, target)

    model = Broken()
    report = explain(model, *data())
    assert report.graph_count == 2 and report.graph_breaks == 1
    assert report.counts()["swiglu"] == (2, 0)
    assert_same_gradients(model, compiled(model), *data())


def test_logits_used_after_a_graph_break():
    class Broken(Block):
        def forward(self, x, target):
            logits = self.head(self.body(x))
            loss = F.cross_entropy(logits.view(-1, 50), target.view(-1))
            torch._dynamo.graph_break()
            return loss + (logits * 1.5).sin().mean()

    model = Broken()
    assert_same_gradients(model, compiled(model), *data())


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_nothing_to_fuse(lowering):
    linear = nn.Linear(4, 4)
    small = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(2))
    for model, x in ((linear, torch.randn(2, 4)), (small, torch.randn(2, 3, 6, 6))):
        model(x)
        call = compiled(model, lowering=lowering)
        torch.testing.assert_close(call(x), model(x))
        assert explain(model, x).decisions == []


@pytest.mark.slow
def test_inductor_trains_as_eager_does():
    model = Block()
    assert_same_gradients(model, compiled(model, lowering="inductor"), *data())


def test_empty_batch_and_single_token():
    model = Block()
    for shape in ((0, 8), (1, 1)):
        x, t = data(*shape)
        assert_same_gradients(model, compiled(model), x, t)


def test_label_out_of_range_fails_as_in_eager():
    model, (x, t) = Block(), data()
    t[0, 0] = 99
    with pytest.raises(IndexError, match="out of bounds"):
        model(x, t)
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(model)(x, t)


def test_works_without_triton():
    """The torch implementation alone, in a process where Triton cannot be imported."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "import torch, torch.nn.functional as F\n"
        "options = {'lowering': 'aot_eager', 'strict': True}\n"
        "f = torch.compile(lambda g, u: F.silu(g) * u, backend='fused', options=options)\n"
        "g, u = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)\n"
        "f(g, u).sum().backward(); assert g.grad is not None\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd="/")


def test_retain_graph_gives_the_same_gradients_twice():
    model, (x, t) = Block(), data()
    loss = compiled(model)(x, t)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_model_compile_keeps_state_dict_keys():
    model, inputs = tiny("llama", num_hidden_layers=1), batch()
    keys = list(model.state_dict())
    model.compile(backend="fused", options=OPTIONS)
    step(model, inputs)
    assert list(model.state_dict()) == keys
