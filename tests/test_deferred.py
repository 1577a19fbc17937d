"""Deferred logits: the gradient and the values of eager, however and in whatever mode they are read."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from test_backend import Block, compiled, data, gradients


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
