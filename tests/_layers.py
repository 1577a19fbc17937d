"""Adapted layers as functions, their inputs, and how many of them each of our operators computes."""

import torch
import torch.nn.functional as F
from fused_backend.compiler import Options
from fused_backend.compiler.backend import rewrite

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
K, N, R = 24, 20, 4


def trained(*shape, dtype=F32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def layer_inputs(*tokens, k=K, n=N, r=R, dtype=F32, adapter=None):
    """x, the frozen W, A and B."""
    tokens, adapter = tokens or (3, 5), adapter or dtype
    return [
        trained(*tokens, k, dtype=dtype),
        torch.randn(n, k, dtype=dtype),
        trained(r, k, dtype=adapter),
        trained(n, r, dtype=adapter),
    ]


def several(count, dtype=BF16, **how):
    """x, then W, A and B for each of several layers of different sizes.

    In bfloat16 roundings outweigh the order in which a product is summed, which differs if products are stacked.
    """
    how["dtype"] = dtype
    x, *first = layer_inputs(**how)
    rest = [layer_inputs(**({"n": N + 4 * i, "r": R + i} | how))[1:] for i in range(1, count)]
    return [x, *first, *(t for layer in rest for t in layer)]


def up(x, a, b, s=2.0):
    return F.linear(F.linear(x, a), b) * s


def adapted(x, w, a, b, s=2.0):
    return F.linear(x, w) + up(x, a, b, s)


def layers_of(fn, inputs):
    """How many layers each of our operators in the rewritten graph computes."""
    found = []

    def collect(gm, example_inputs):
        _, finish = rewrite(gm, Options())
        nodes = (n for n in gm.graph.nodes if n.target is torch.ops.fused_backend.lora_linear.default)
        found.extend(len(n.args[8]) for n in nodes)
        return finish(gm.forward)

    torch._dynamo.reset()
    torch.compile(fn, backend=collect)(*inputs)
    return found


def in_no_grad(fn, *args):
    with torch.no_grad():
        return fn(*args)
