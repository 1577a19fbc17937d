"""bitsandbytes' 4-bit linear as one operator: the same bits, and only where it is the function that was read."""

import bitsandbytes as bnb
import pytest
import torch
from _peft import BF16, F16, F32, adapted, adapted_block, rows, step
from bitsandbytes.autograd._functions import MatMul4Bit
from fused_backend.compiler import tracing
from torch._dynamo.output_graph import OutputGraph

OURS = "fused_backend::gemm_4bit"


def layer(device, nested=True, quant_type="nf4", dtype=F32, bias=True, blocksize=64):
    """A 4-bit weight, 24 by 64, and a bias."""
    weight = torch.randn(24, 64, device=device, dtype=dtype)
    codes, state = bnb.functional.quantize_4bit(
        weight, compress_statistics=nested, quant_type=quant_type, blocksize=blocksize
    )
    return codes, state, torch.randn(24, device=device, dtype=dtype) if bias else None


def both(codes, state, bias, x, trained=("x", "bias")):
    """[(ours, bitsandbytes')] of y, dx and dbias."""
    found = []
    for apply in (tracing._matmul_4bit, MatMul4Bit.apply):
        x = x.detach().requires_grad_("x" in trained)
        own = None if bias is None else bias.detach().requires_grad_("bias" in trained)
        y = apply(x, codes, None, own, state)
        if y.requires_grad:
            torch.manual_seed(1)
            y.backward(torch.randn_like(y))
        found.append((y.detach(), x.grad, None if own is None else own.grad))
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("trained", [("x", "bias"), ("x",), ("bias",), ()], ids=lambda t: "and".join(t) or "nothing")
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_the_same_bits_as_bitsandbytes(nested, trained, device):
    for dtype, quantized, quant_type in ((F32, F32, "nf4"), (BF16, BF16, "fp4"), (F16, F32, "nf4"), (BF16, F16, "nf4")):
        codes, state, _ = layer(device, nested, quant_type, quantized)
        bias = torch.randn(24, device=device, dtype=dtype)
        for shape in ((5, 64), (2, 3, 64), (0, 64)):
            for ours, theirs in both(codes, state, bias, torch.randn(shape, device=device).to(dtype), trained):
                assert (ours is None) == (theirs is None)
                assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


def test_what_the_operator_does_not_do_is_left_to_bitsandbytes(device):
    codes, state, bias = layer(device)
    x = torch.randn(3, 64, device=device)
    assert tracing._matmul_4bit(x, codes, torch.empty(3, 24), bias, state) is None
    state.state2.blocksize = 128
    assert tracing._matmul_4bit(x, codes, None, bias, state) is None


@pytest.fixture
def graphs(monkeypatch):
    """Every graph that Dynamo hands over during the test, as it was handed over."""
    seen = []
    call = OutputGraph.call_user_compiler

    def calling(self, gm, *args, **kwargs):
        seen.append({getattr(n.target, "_name", str(n.target)) for n in gm.graph.nodes})
        return call(self, gm, *args, **kwargs)

    monkeypatch.setattr(OutputGraph, "call_user_compiler", calling)
    return seen


def run(model, inputs, backend, **options):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, **({"options": options} if options else {}))
    return step(compiled, inputs)


def test_other_backends_are_given_what_they_always_are(graphs):
    block, inputs = adapted_block(), rows(1)[0]
    ours = run(block, inputs, "fused", lowering="aot_eager", fusions="none")
    theirs = run(block, inputs, "aot_eager_decomp_partition")
    run(block, inputs, lambda gm, _: gm.forward)
    assert [OURS in g for g in graphs] == [True, False, False]
    assert ["autograd_function_apply" in g for g in graphs] == [False, True, True]
    for name, value in ours.items():
        assert value is theirs[name] is None or torch.equal(value, theirs[name])


@pytest.mark.parametrize("changed", ["text", "torch"])
def test_an_unknown_bitsandbytes_is_traced_and_fused_as_ever(changed, graphs, monkeypatch):
    if changed == "text":
        monkeypatch.setattr(tracing, "_READ", {})
    else:
        monkeypatch.setattr(tracing, "_for_us", lambda backend: False)
    model = adapted("llama", dtype=F32)
    ids = torch.randint(0, 64, (2, 16))
    ours = run(model, {"input_ids": ids, "labels": ids}, "fused", lowering="aot_eager", strict=True)
    assert "autograd_function_apply" in graphs[0] and OURS not in graphs[0]
    assert all(v is None or torch.isfinite(v).all() for v in ours.values())


def test_the_installed_bitsandbytes_is_one_that_was_read():
    assert tracing._is_read(MatMul4Bit)


def test_only_that_function(graphs):
    """A function of the same name elsewhere, or with five operands, is traced."""

    class MatMul4Bit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, codes, out, bias, state):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 3, None, None, None, None

    x = torch.randn(3, requires_grad=True)
    torch.compile(
        lambda x: MatMul4Bit.apply(x, None, None, None, None), backend="fused", options={"lowering": "aot_eager"}
    )(x).sum().backward()
    assert x.grad.tolist() == [3.0] * 3 and "autograd_function_apply" in graphs[0]


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_do_what_they_do_without_us(transform, graphs):
    block, x = adapted_block(), rows(1)[0]["x"].detach()
    call = {
        "grad": lambda x: torch.func.grad(lambda x: block(x).loss)(x),
        "vmap": lambda x: torch.func.vmap(lambda x: block(x).loss, in_dims=1)(x),
        "jvp": lambda x: torch.func.jvp(lambda x: block(x).loss, (x,), (torch.ones_like(x),))[1],
    }[transform]
    ours = torch.compile(call, backend="fused", options={"lowering": "aot_eager"})(x)
    torch.testing.assert_close(ours, call(x) if transform != "grad" else torch.compile(call, backend="eager")(x))
    assert OURS not in graphs[0]
