"""Deferred logits: the gradient and the values of eager, however and in whatever mode they are read."""

import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from _block import Block, compiled, data, gradients
from _models import batch, tiny


class Returned(Block):
    def forward(self, x, target):
        logits = self.head(self.body(x))
        return F.cross_entropy(logits.view(-1, 50), target.view(-1)), logits


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0].cos()


def doubled_in_place(logits):
    with torch.no_grad():
        logits.mul_(2.0)
    return logits.sin()


def cast_without_gradient(logits):
    with torch.no_grad():
        cast = logits.double()
    return cast * logits


READERS = {
    "custom function": Sine.apply,
    "vmap": torch.vmap(torch.sin),
    "checkpoint": lambda logits: torch.utils.checkpoint.checkpoint(torch.sin, logits, use_reentrant=False),
    "in place under no_grad": doubled_in_place,
    "cast under no_grad": cast_without_gradient,
}


@pytest.mark.parametrize("reader", READERS)
def test_deferred_logits_have_their_gradient_however_they_are_read(reader):
    def through(call):
        def run(x, t):
            loss, logits = call(x, t)
            return loss + READERS[reader](logits).sum()

        return run

    model, (x, t) = Returned(), data()
    want = gradients(model, through(model), x, t)
    for a, b in zip(gradients(model, through(compiled(model)), x, t), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_deferred_logits_of_a_forward_without_gradient_have_none():
    model, (x, t) = Returned(), data()
    with torch.no_grad():
        logits = compiled(model)(x, t)[1]
    assert not (logits * 1).requires_grad
    torch.testing.assert_close(logits.numpy(), model(x, t)[1].detach().numpy(), rtol=1e-4, atol=1e-5)


def llama_output(**options):
    model = tiny("llama", num_hidden_layers=1)
    inputs = batch()
    return model, inputs, model(**inputs), compiled(model, **options)(**inputs)


def test_logits_stay_deferred_until_read():
    _, _, want, got = llama_output()
    logits = got.logits
    assert type(logits).__name__ == "DeferredTensor"
    assert logits.shape == want.logits.shape and logits.dtype == want.logits.dtype and logits.requires_grad
    assert logits.float()._value is None and logits[:, :-1]._value is None and logits.detach()._value is None
    got.loss.backward()
    assert logits._value is None
    assert torch.equal(logits.argmax(-1), want.logits.argmax(-1))
    torch.testing.assert_close(logits.detach().float()[:, -1], want.logits.detach()[:, -1])
    assert logits[:, :-1].shape == want.logits[:, :-1].shape


def test_a_loss_on_the_logits_has_its_gradient():
    model, _, want, got = llama_output()
    for out in (want, got):
        model.zero_grad(set_to_none=True)
        (out.loss + out.logits.sin().mean()).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        if out is want:
            expected = grads
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-5, msg=name)


def test_logits_read_after_the_weights_changed_raise():
    model, _, _, got = llama_output()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"before optimizer\.step"):
        got.logits.sum()


def test_logits_can_be_pickled_and_printed():
    _, _, want, got = llama_output()
    assert repr(got.logits).startswith("tensor(")
    torch.testing.assert_close(pickle.loads(pickle.dumps(got.logits.detach())), want.logits.detach())


CONSUMERS = {
    "in a dict, cast and sliced": (lambda d: d["logits"].float()[:, 1:].sin(), lambda logits: {"logits": logits}),
    "in a tuple": (lambda pair: pair[0][..., :-1, :].logsumexp(-1), lambda logits: (logits, 1)),
    "itself": (lambda logits: logits.to(torch.float64)[:, -1].exp(), lambda logits: logits),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_another_compiled_function_reads_the_logits(name):
    function, wrap = CONSUMERS[name]
    _, _, want, got = llama_output()
    result = torch.compile(function, backend="aot_eager")(wrap(got.logits))
    torch.testing.assert_close(result, function(wrap(want.logits)), rtol=1e-4, atol=1e-5)
    assert result.requires_grad


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_keeps_its_own_autocast(weight_dtype):
    """The head runs inside an autocast region, the cast that the graph returns outside it."""

    def model(h, w, target):
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(h, w)
        logits = logits.float()
        return F.cross_entropy(logits, target), logits

    h = torch.randn(6, 8, dtype=weight_dtype).requires_grad_()
    args = (h, torch.randn(10, 8).requires_grad_(), torch.randint(0, 10, (6,)))
    _, logits = compiled(model)(*args)
    torch.testing.assert_close(logits.detach() + 0, model(*args)[1], rtol=0, atol=0)


def test_a_deferred_cast_is_a_copy_and_a_slice_is_not():
    _, _, want, got = llama_output()
    wide, part = got.logits.double(), got.logits[:, :1]
    with torch.no_grad():
        got.logits.mul_(2.0)
    torch.testing.assert_close(wide.float(), want.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(part + 0, want.logits[:, :1] * 2.0, rtol=1e-4, atol=1e-5)
