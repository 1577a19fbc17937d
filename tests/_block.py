"""A small hand-written block with an RMSNorm, a gated MLP and a loss, and its gradients compiled and not."""

import torch
import torch.nn.functional as F
from torch import nn

OPTIONS = {"lowering": "aot_eager"}


def compiled(model, **options):
    return torch.compile(model, backend="fused", options=OPTIONS | options)


class Block(nn.Module):
    """An RMSNorm, a gated MLP and a loss, written by hand."""

    def __init__(self, d=32, f=64, v=50):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d))
        self.gate, self.up, self.down = nn.Linear(d, f), nn.Linear(d, f), nn.Linear(f, d)
        self.head = nn.Linear(d, v, bias=False)

    def body(self, x):
        h = x.float()
        h = self.w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x, target):
        return F.cross_entropy(self.head(self.body(x)).view(-1, 50), target.view(-1))


def data(rows=2, length=8):
    return torch.randn(rows, length, 32), torch.randint(0, 50, (rows, length))


def gradients(model, call, *args):
    model.zero_grad(set_to_none=True)
    call(*args).backward()
    return [p.grad for p in model.parameters()]


def assert_same_gradients(model, call, *args):
    want = gradients(model, model, *args)
    got = gradients(model, call, *args)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
