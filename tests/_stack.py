"""Models written by hand, quick to trace, and steps of them under memory budgets."""

from typing import Any

import torch
import torch.nn.functional as F
from _alive import Sweep, needed
from torch import nn

HUGE = "8GiB"


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


def close_to_eager(model, call, got):
    for mine, expected in zip(
        got.want if isinstance(got, Sweep) else got, step(model, lambda: call(model)), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
