"""bitsandbytes' 4-bit linear: every form is read with its operands, every look-alike is refused with a reason."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from fused_backend.patterns._bitsandbytes import FourBit, is_four_bit_site, read_four_bit

bnb = pytest.importorskip("bitsandbytes")
OPS = torch.ops.bitsandbytes
N, K, FORM = 64, 128, (64, "nf4")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Done(Exception):
    pass


def site_of(fn, *inputs, backend=None, dynamic=None):
    """The one site in the Dynamo graph of a function; the graph runs by `backend`, or not at all."""
    sites = []

    def collect(gm, example_inputs):
        sites.extend(node for node in gm.graph.nodes if is_four_bit_site(node))
        return stop if backend is None else backend(gm)

    def stop(*args):
        raise Done

    torch._dynamo.reset()
    with contextlib.suppress(Done):
        torch.compile(fn, backend=collect, fullgraph=True, dynamic=dynamic)(*inputs)
    (site,) = sites
    return site


def read(fn, *inputs):
    """What is read, and what each node of the graph is when it runs."""
    run = []

    def backend(gm):
        run.append(torch.fx.Interpreter(gm, garbage_collect_values=False))
        return run[0].run

    four = read_four_bit(site_of(fn, *inputs, backend=backend))
    assert isinstance(four, FourBit), four
    return four, run[0].env


def refused(reason, fn, *inputs, **options):
    why = read_four_bit(site_of(fn, *inputs, **options))
    assert isinstance(why, str) and re.search(reason, why), why


def inputs_of(compute=FP32, grad=True, shape=(2, 3, K)):
    return torch.randn(*shape, dtype=compute).requires_grad_(grad)


def quantized(bias=None, nested=True, quant_type="nf4", weight=FP32, compute=FP32, storage=torch.uint8):
    """A Linear4bit as transformers makes it. `bias` is None, "frozen" or "trained"."""
    linear = bnb.nn.Linear4bit(K, N, bias is not None, compute, nested, quant_type, storage, device="meta")
    values = torch.randn(N, K, dtype=weight)
    linear.weight = bnb.nn.Params4bit(values, False, None, 64, nested, quant_type, storage, linear).to("cpu")
    if bias is not None:
        linear.bias = torch.nn.Parameter(torch.randn(N, dtype=compute), requires_grad=bias == "trained")
    return linear


def assert_computes(four, value, table):
    """The result is x·Wᵀ + bias of the operands, with the sixteen values of the number format."""
    flat = value[four.codes].detach().contiguous().view(torch.uint8).reshape(-1)
    absmax, dtype = value[four.absmax], value[four.x].dtype
    if four.nested:
        code, absmax2, offset = (value[node].double() for node in four.nested)
        absmax = code[absmax.long()] * absmax2.repeat_interleave(256)[: len(absmax)] + offset
    halves = torch.stack([flat >> 4, flat & 15], dim=1).reshape(-1).long()
    w = (table.double()[halves] * absmax.double().repeat_interleave(four.blocksize)).reshape(four.shape)
    y = value[four.x].double() @ w.to(dtype).double().T
    y = y if four.bias is None else y + value[four.bias].double()
    tolerance = 1e-2 if dtype == BF16 else 1e-4
    torch.testing.assert_close(value[four.result].double(), y, rtol=tolerance, atol=tolerance)


FORMATS = itertools.product(("nf4", "fp4"), (True, False), (None, "frozen", "trained"))
MODULES = [(*options, compute) for options, compute in zip(FORMATS, itertools.cycle([FP32, BF16]), strict=False)]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize(("quant_type", "nested", "bias", "compute"), MODULES)
def test_the_module_is_read(quant_type, nested, bias, compute, grad):
    # Codes may be stored in wider units, as FSDP wants them.
    linear = quantized(bias, nested, quant_type, compute, compute, torch.uint8 if nested else compute)
    four, value = read(linear, inputs_of(compute, grad))
    assert (four.shape, four.blocksize, four.quant_type) == ((N, K), 64, quant_type)
    assert len(four.nested) == 3 * nested and (four.bias is None) == (bias is None)
    assert_computes(four, value, linear.weight.quant_state.code)
    assert four.differentiable or not (grad or bias == "trained")


@pytest.mark.parametrize("bias", [None, "trained"])
def test_a_symbolic_number_of_tokens_stays_symbolic(bias):
    linear, seen = quantized(bias), []

    def collect(gm, example_inputs):
        seen.append([read_four_bit(node) for node in gm.graph.nodes if is_four_bit_site(node)])
        return gm.forward

    compiled = torch.compile(linear, backend=collect, fullgraph=True, dynamic=True)
    for tokens in (3, 5, 8):
        compiled(inputs_of(shape=(tokens, 2, K)))
    ((four,),) = seen
    assert isinstance(four, FourBit), four


# -- the same function written by hand: the forms of other versions, and look-alikes


def weight(nested=False):
    """codes, absmax and, if nested, code, absmax2, offset."""
    codes, state = bnb.functional.quantize_4bit(torch.randn(N, K), None, None, 64, nested, "nf4")
    return codes, state.absmax, *((state.state2.code, state.state2.absmax, state.offset) if nested else ())


def scales(absmax, code=None, absmax2=None, offset=None, blocksize=256):
    if code is None:
        return absmax
    absmax = OPS.dequantize_blockwise.default(absmax, absmax2, code.to(absmax.device), blocksize, FP32)
    if offset is not None:
        absmax += offset
    return absmax


def decode(codes, *absmax, form=FORM, size=(N, K), dtype=FP32):
    return OPS.dequantize_4bit.default(codes, scales(*absmax), *form, size, dtype)


def by_rows(codes, *absmax):
    """The weight as 0.48 and 0.49 decode it: codes as a row, W turned twice."""
    return decode(codes.t(), *absmax).t().to(FP32).t()


def gemm(x, codes, absmax, *nested, bias=None):
    if not nested:
        return OPS.gemm_4bit.default(x, codes, (N, K), absmax, *FORM, bias=bias)
    code, absmax2, offset = nested
    return OPS.gemm_4bit.default(x, codes, (N, K), absmax2, *FORM, bias, absmax, code, offset)


def dx(dy, *weight):
    return torch.matmul(dy, decode(*weight).to(dy.dtype))


def function(forward, backward):
    """x, *weight -> y, with that forward and with that gradient for x (a tuple: for everything)."""

    class Written(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *weight):
            ctx.save_for_backward(*weight)
            return forward(x, *weight)

        @staticmethod
        def backward(ctx, dy, *others):
            weight = ctx.saved_tensors
            gradient = backward(dy, *weight)
            return gradient if isinstance(gradient, tuple) else (gradient, *[None] * len(weight))

    return Written.apply


EXACT = {
    "gemm": (gemm, dx),
    "codes reshaped": (lambda x, c, *a: gemm(x, c.view(-1, 1), *a), lambda dy, c, *a: dx(dy, c.reshape(-1), *a)),
    "0.49": (lambda x, *w: F.linear(x, by_rows(*w)), lambda dy, *w: dy.matmul(by_rows(*w))),
    "matmul": (lambda x, *w: x @ decode(*w).t(), lambda dy, *w: dy @ decode(*w)),
    "float": (lambda x, c, *a: F.linear(x, decode(c, scales(*a).float()), bias=None), dx),
    "backward in bfloat16": (gemm, lambda dy, *w: dy @ decode(*w, dtype=BF16).to(FP32)),
}


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("name", EXACT)
def test_other_spellings_are_read(name, nested):
    operands = weight(nested)
    four, value = read(function(*EXACT[name]), inputs_of(), *operands)
    found = [value[node] for node in (four.codes, four.absmax, *four.nested)]
    assert all(a is b for a, b in zip(found, operands, strict=True))
    assert four.differentiable and four.result.target is operator.getitem


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_the_forward_written_out_is_read(nested):
    operands = weight(nested)
    four, value = read(lambda x, *w: F.linear(x, by_rows(*w)) * 2.0, inputs_of(grad=False), *operands)
    assert value[four.codes].data_ptr() == operands[0].data_ptr() and value[four.absmax] is operands[1]
    assert four.result.target is F.linear


def test_the_bare_operator_has_no_gradient():
    four, _ = read(gemm, inputs_of(grad=False), *weight(nested=True))
    assert not four.differentiable and four.result.target is OPS.gemm_4bit.default


OTHER_GRADIENTS = {
    "scaled": (lambda dy, *w: dx(dy, *w) * 0.5, "a mul that"),
    "zero": (lambda dy, *w: torch.zeros_like(dx(dy, *w)), "zeros_like"),
    "none": (lambda dy, *w: None, "no gradient"),
    "straight through": (lambda dy, *w: torch.cat([dy, dy], -1), "a cat that"),
    "clipped": (lambda dy, *w: dx(dy.clamp(-1, 1), *w), "a clamp that"),
    "the incoming": (lambda dy, *w: dy, "another gradient"),
    "other block size": (lambda dy, *w: dy @ decode(*w, form=(128, "nf4")), "in another way"),
    "other number format": (lambda dy, *w: dy @ decode(*w, form=(64, "fp4")), "in another way"),
    "other shape": (lambda dy, *w: dy @ decode(*w, size=(K, N)).t(), "a matmul that"),
    "scaled scales": (lambda dy, c, a: dx(dy, c, a * 2), "a mul that"),
    "a second gradient": (lambda dy, c, a: (dx(dy, c, a), None, torch.zeros_like(a)), "zeros_like"),
    "for another operand": (lambda dy, c, a: (None, None, dx(dy, c, a)), "another gradient"),
    "float16": (lambda dy, *w: dy.to(FP16).to(FP32) @ decode(*w), "casts something else"),
}


@pytest.mark.parametrize("name", OTHER_GRADIENTS)
def test_another_gradient_is_refused(name):
    backward, reason = OTHER_GRADIENTS[name]
    refused(reason, function(gemm, backward), inputs_of(), *weight())


def offset_twice(x, codes, *absmax):
    scale = scales(*absmax)
    scale += absmax[-1]
    return F.linear(x, decode(codes, scale))


def read_before(x, codes, *absmax):
    scale = scales(*absmax[:3])
    w = decode(codes, scale)
    scale += absmax[3]
    return F.linear(x, w)


OTHER_FORWARDS = {
    "scaled": (lambda x, *w: gemm(x, *w) * 2, "a mul that"),
    "two outputs": (lambda x, *w: (gemm(x, *w), gemm(x, *w)), "not the product"),
    "not transposed": (lambda x, *w: F.linear(x, decode(*w, size=(K, N)).t()), "a linear that"),
    "rounded twice": (lambda x, *w: F.linear(x, decode(*w, dtype=BF16).to(FP32)), "rounded twice"),
    "part of the codes": (lambda x, c, *a: F.linear(x, decode(c[1:], *a)), "a getitem that"),
    "x is decoded too": (lambda x, *w: decode(*w) @ decode(*w).t(), "a matmul that"),
    "offset twice": (offset_twice, "a iadd that"),
    "no offset": (lambda x, c, *a: F.linear(x, decode(c, *a[:3])), "incomplete"),
    "scales read before the offset": (read_before, "without their offset"),
    "blocks of 512": (lambda x, c, *a: F.linear(x, decode(c, scales(*a, blocksize=512))), "blocks of 512"),
}


@pytest.mark.parametrize("name", OTHER_FORWARDS)
def test_another_forward_is_refused(name):
    forward, reason = OTHER_FORWARDS[name]
    refused(reason, function(forward, dx), inputs_of(), *weight(nested=True))


@torch.compiler.allow_in_graph
def linear(x, w):
    return x @ w.t() * 0.5


OTHER_USES = {
    "not transposed": (lambda x, *w: F.linear(x, decode(*w, size=(K, N)).t()), "a linear that"),
    "rounded twice": (lambda x, *w: F.linear(x, decode(*w, dtype=BF16).to(FP32)), "rounded twice"),
    "used twice": (lambda x, *w: F.linear(x, y := decode(*w)) + y.sum(), "something else than one linear"),
    "not a linear": (lambda x, *w: x + decode(*w).sum(0), "a sum that"),
    "only called linear": (lambda x, *w: linear(x, decode(*w)), "a linear that"),
    "one token": (lambda x, c, a: OPS.gemv_4bit.default(x, c, (N, K), a, x[0, 0, :16], 64), "single token"),
    "part of the scales": (lambda x, c, a: gemm(x, c, a[1:]), "belong"),
    "part of the codes": (lambda x, c, a: gemm(x, c[1:], a), "belong"),
    "scales with gaps": (lambda x, c, a: gemm(x, c, torch.stack([a, a], 1)[:, 0]), "not contiguous"),
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_other_uses_of_a_decoded_weight_are_refused(name):
    fn, reason = OTHER_USES[name]
    refused(reason, fn, inputs_of(grad=False), *weight())


def biased(gradient):
    """x, codes, absmax, bias -> y, with that gradient for the bias."""

    def backward(dy, codes, absmax, bias):
        return dx(dy, codes, absmax), None, None, gradient(dy)

    return function(lambda x, codes, absmax, bias: gemm(x, codes, absmax, bias=bias), backward)


OTHER_BIAS_GRADIENTS = {
    "none": (lambda dy: None, "no gradient"),
    "scaled": (lambda dy: dy.sum((0, 1)) * 2, "a mul that"),
    "not the first": (lambda dy: dy.sum(1), "for the bias"),
    "everything": (lambda dy: dy.sum((0, 1, 2)), "for the bias"),
    "keepdim": (lambda dy: dy.sum(0, keepdim=True), "a sum that"),
    "rounded": (lambda dy: dy.sum((0, 1), dtype=BF16), "as torch.bfloat16"),
}


@pytest.mark.parametrize("dims", [0, (0, 1), (-2, 0)], ids=str)
def test_the_gradient_of_the_bias_is_read(dims):
    bias = torch.randn(N, requires_grad=True)
    four, value = read(biased(lambda dy: torch.sum(dy, dims)), inputs_of(), *weight(), bias)
    assert value[four.bias] is bias


@pytest.mark.parametrize("name", OTHER_BIAS_GRADIENTS)
def test_another_gradient_of_the_bias_is_refused(name):
    gradient, reason = OTHER_BIAS_GRADIENTS[name]
    refused(reason, biased(gradient), inputs_of(), *weight(), torch.randn(N, requires_grad=True))


def test_a_linear_that_autocast_lowers_is_refused():
    linear = function(lambda x, *w: F.linear(x, decode(*w)), dx)
    with torch.autocast("cpu", BF16):
        refused("one floating dtype", linear, inputs_of(), *weight())


def test_a_symbolic_shape_is_refused():
    inputs = inputs_of(grad=False), *weight(), N
    refused("not a constant", lambda x, c, a, n: OPS.gemm_4bit.default(x, c, (n, K), a, *FORM), *inputs, dynamic=True)


def test_what_reads_no_4_bit_codes_is_no_site():
    plain = function(F.linear, torch.matmul)
    with pytest.raises(ValueError, match="not enough values"):
        site_of(lambda x, w: plain(x, w) + F.linear(x, w), inputs_of(), torch.randn(N, K))


# -- how an autograd.Function is applied


def as_older_torch(site, captured):
    """Rewrite the call: a context for both bodies, the output bare, x first, no gradients for the `captured` last."""
    bodies = [site.graph.owning_module.get_submodule(body.target).graph for body in site.args[:2]]
    operands, (forward, backward) = site.args[2:], bodies
    ((output,), saved), gradients = (body.output_node().args[0] for body in bodies)
    order = sorted(range(len(operands)), key=lambda i: gradients[i] is None)
    placeholders = forward.find_nodes(op="placeholder")
    for i in reversed(order):
        next(iter(forward.nodes)).prepend(placeholders[i])
    for body in bodies:
        with body.inserting_before(next(iter(body.nodes))):
            body.placeholder("ctx")
    count = len(operands) - captured
    forward.output_node().args = ((output, list(saved)),)
    backward.output_node().args = (tuple(gradients[i] for i in order)[:count],)
    (getitem,) = site.users
    site.meta["example_value"] = getitem.meta["example_value"]
    getitem.replace_all_uses_with(site)
    site.graph.erase_node(getitem)
    site.args = (*site.args[:2], *(operands[i] for i in order))
    site.kwargs = {"args_tensor_mask": [True] * count, "non_differentiable_idx": []}


@pytest.mark.parametrize("captured", [0, 2, 6])
def test_the_calling_convention_of_older_torch(captured):
    site = site_of(function(gemm, dx), inputs_of(), *weight(nested=True))
    now = read_four_bit(site)
    as_older_torch(site, captured)
    then = read_four_bit(site)
    assert "no gradient" in then if captured == 6 else then == dataclasses.replace(now, result=site)


def test_the_codes_as_one_more_output_of_torch_2_11():
    site = site_of(function(*EXACT["codes reshaped"]), inputs_of(), *weight())
    now = read_four_bit(site)
    forward, backward = (site.graph.owning_module.get_submodule(body.target).graph for body in site.args[:2])
    (codes,) = forward.find_nodes(op="call_method", target="view")
    (output, saved), (dy, *_) = forward.output_node().args[0], backward.nodes
    forward.output_node().args = (((*output, codes), saved),)
    with backward.inserting_after(dy):
        backward.placeholder("dcodes")
    assert isinstance(now, FourBit) and read_four_bit(site) == now
    forward.output_node().args = (((*output, saved[0]), saved),)
    assert isinstance(read_four_bit(site), str)


@pytest.mark.parametrize("option", [{"non_differentiable_idx": [0]}, {"dirty_idx": [0]}, {"something_new": None}])
def test_an_option_that_may_change_the_gradient_is_refused(option):
    site = site_of(function(gemm, dx), inputs_of(), *weight())
    site.kwargs = site.kwargs | option
    assert "is applied with" in read_four_bit(site)


def test_bodies_may_stand_in_the_call_itself():
    site = site_of(function(gemm, dx), inputs_of(), *weight())
    now, gm = read_four_bit(site), site.graph.owning_module
    site._update_args_kwargs((*(gm.get_submodule(b.target) for b in site.args[:2]), *site.args[2:]), site.kwargs)
    assert is_four_bit_site(site) and read_four_bit(site) == now
