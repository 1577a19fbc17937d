"""swiglu: the operators against float64 autograd of the eager idiom, through torch and through Triton."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from _oracle import exact, judge
from fused_backend.kernels import swiglu as kernels
from hypothesis import given, settings
from hypothesis import strategies as st

OPS = torch.ops.fused_backend
LIMIT = 0.75  # so low that it holds for many numbers
# form -> activation, limit, alpha, offset
FORMS = {
    "silu": ("silu",),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_tanh",),
    "relu2": ("relu2",),
    "scaled silu": ("silu", None, 1.702),
    "limited": ("silu", LIMIT),
    "limited gelu": ("gelu", LIMIT, 1.0, 1.0),
    "limited relu2": ("relu2", LIMIT, 1.0, -0.5),
    "gpt_oss": ("silu", LIMIT, 1.702, 1.0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    pytest.param((3, 5, 7), id="odd"),
    pytest.param((499, 1), id="one-column"),
    pytest.param((2, 1031), id="prime-longer-than-a-block"),
    pytest.param((2, 3, 128), id="aligned"),
    pytest.param((0, 16), id="no-rows"),
    pytest.param((4, 0), id="no-columns"),
]
LAYOUTS = ("contiguous", "halves", "transposed", "every-second-row")

EAGER = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu2": lambda gate, up: torch.square(F.relu(gate)) * up,
    "scaled silu": lambda gate, up: gate * torch.sigmoid(gate * 1.702) * up,
    "limited": lambda gate, up: F.silu(gate.clamp(max=LIMIT)) * up.clamp(min=-LIMIT, max=LIMIT),
    "limited gelu": lambda gate, up: F.gelu(gate.clamp(max=LIMIT)) * (up.clamp(min=-LIMIT, max=LIMIT) + 1),
    "limited relu2": lambda gate, up: F.relu(gate.clamp(max=LIMIT)).pow(2) * (up.clamp(-LIMIT, LIMIT) - 0.5),
    "gpt_oss": lambda gate, up: gpt_oss(gate.clamp(min=None, max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)),
}


def gpt_oss(gate, up):
    glu = gate * torch.sigmoid(gate * 1.702)
    return (up + 1) * glu


def eager_packed(gate_up, form, gate_first, interleaved=False):
    first, second = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    return EAGER[form](first, second) if gate_first else EAGER[form](second, first)


class Hosts(torch.autograd.Function):
    """The host functions of one implementation, joined as the operator joins them."""

    @staticmethod
    def forward(ctx, forward, backward, rest, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.backward, ctx.rest = backward, rest
        return forward(*tensors, *rest)

    @staticmethod
    def backward(ctx, dh):
        grads = ctx.backward(dh, *ctx.saved_tensors, *ctx.rest)
        return (None, None, None, *(grads if isinstance(grads, tuple) else (grads,)))


def hosts(name, implementation, *rest):
    """`swiglu` or `swiglu_packed` through `reference` or `triton`, whatever the device."""
    forward = getattr(kernels, f"{name}_{implementation}")
    backward = getattr(kernels, f"{name}_bwd_{implementation}")
    return lambda *tensors: Hosts.apply(forward, backward, rest, *tensors)


def pair(shape, layout, dtype, device):
    """gate and up of one shape in one layout, both requiring gradients."""
    *lead, cols = shape
    if layout == "halves":
        made = torch.randn(*lead, 2 * cols, device=device).to(dtype).chunk(2, dim=-1)
    elif layout == "transposed":
        made = [torch.randn(cols, *lead, device=device).to(dtype).movedim(0, -1) for _ in range(2)]
    elif layout == "every-second-row" and lead:
        made = [torch.randn(2 * lead[0], *lead[1:], cols, device=device).to(dtype)[::2] for _ in range(2)]
    else:
        made = [torch.randn(*shape, device=device).to(dtype) for _ in range(2)]
    return [t.detach().requires_grad_() for t in made]


def packed(shape, dtype, device):
    return torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_is_as_accurate_as_eager(implementation, form, dtype, shape, device):
    gate, up = pair(shape, "contiguous", dtype, device)
    fused = hosts("swiglu", implementation, *FORMS[form])
    judge(fused, EAGER[form], [gate, up], [torch.randn(shape, device=device)])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_one_element_is_computed_as_among_many(implementation, device):
    gate, up = pair((64,), "contiguous", torch.float32, device)
    fused = hosts("swiglu", implementation, "silu")
    assert torch.equal(fused(gate, up)[:1], fused(gate[:1], up[:1]))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 1031)], ids=str)
def test_swiglu_takes_every_layout(implementation, layout, shape, device):
    gate, up = pair(shape, layout, torch.bfloat16, device)
    fused = hosts("swiglu", implementation, "silu")
    judge(fused, EAGER["silu"], [gate, up], [torch.randn(shape, device=device)])
    h = fused(gate, up)
    assert h.is_contiguous()
    assert all(g.is_contiguous() for g in torch.autograd.grad(h.sum(), [gate, up]))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("form", ["silu", "gelu", "gpt_oss"])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES[:3] + SHAPES[4:])
def test_packed_is_as_accurate_as_eager(implementation, form, gate_first, interleaved, shape, device):
    activation, *how = FORMS[form]
    fused = hosts("swiglu_packed", implementation, activation, gate_first, interleaved, *how)
    idiom = lambda gate_up: eager_packed(gate_up, form, gate_first, interleaved)  # noqa: E731
    gate_up = packed(shape, torch.bfloat16, device)
    judge(fused, idiom, [gate_up], [torch.randn(shape, device=device)])


@settings(max_examples=25)
@given(
    # Enough rows, or none, that the largest error is a property of the method and not of one number.
    lead=st.builds(lambda rows, rest: [rows, *rest], st.sampled_from([0, 60]), st.lists(st.integers(1, 3), max_size=2)),
    cols=st.integers(1, 40) | st.sampled_from([127, 129, 1025]),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(sorted(FORMS)),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_layout_and_scale(lead, cols, layout, dtype, form, scale, seed, device):
    torch.manual_seed(seed)
    shape = (*lead, cols)
    gate, up = ((t.detach() * scale).requires_grad_() for t in pair(shape, layout, dtype, device))
    fused = hosts("swiglu", "triton", *FORMS[form])
    judge(fused, EAGER[form], [gate, up], [torch.randn(shape, device=device)])


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_in_float64(form):
    activation, *how = FORMS[form]
    gate, up = pair((3, 5), "contiguous", torch.float64, "cpu")
    assert torch.autograd.gradcheck(lambda gate, up: OPS.swiglu(gate, up, activation, *how), (gate, up))
    for layout in itertools.product((True, False), repeat=2):
        gate_up = packed((3, 5), torch.float64, "cpu")
        op = lambda gate_up, layout=layout: OPS.swiglu_packed(gate_up, activation, *layout, *how)  # noqa: E731
        assert torch.autograd.gradcheck(op, (gate_up,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout, device):
    gate, up = pair((3, 4, 6), layout, torch.float32, device)
    torch.library.opcheck(OPS.swiglu.default, (gate, up, "silu"))
    torch.library.opcheck(OPS.swiglu.default, (gate, up, *FORMS["gpt_oss"]))
    dh, gate, up = torch.randn(3, 4, 6, device=device), gate.detach(), up.detach()
    torch.library.opcheck(OPS.swiglu_bwd.default, (dh, gate, up, *FORMS["gpt_oss"]))


@pytest.mark.parametrize("layout", [(True,), (False,), (True, True), (False, True, LIMIT)], ids=str)
def test_opcheck_packed(layout, device):
    gate_up = packed((3, 4, 6), torch.float32, device)
    torch.library.opcheck(OPS.swiglu_packed.default, (gate_up, "gelu", *layout))
    args = (torch.randn(3, 4, 6, device=device), gate_up.detach(), "gelu", *layout)
    torch.library.opcheck(OPS.swiglu_packed_bwd.default, args)


def test_only_the_wanted_gradient_is_returned(device):
    gate, up = pair((4, 6), "contiguous", torch.float32, device)
    OPS.swiglu(gate, up.detach(), "silu").sum().backward()
    assert gate.grad is not None
    assert up.grad is None


def test_gradient_that_is_expanded_or_transposed(device):
    """sum().backward() hands over a gradient of stride 0, a transposed loss one of stride (1, n)."""
    gate, up = pair((4, 6), "contiguous", torch.float32, device)
    for dh in (torch.ones((), device=device).expand(4, 6), torch.randn(6, 4, device=device).T):
        ours = kernels.swiglu_bwd_triton(dh, gate.detach(), up.detach(), "silu")
        truth = exact(EAGER["silu"], [gate, up], [dh])[1:]
        for a, t in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, t.float())


def test_double_backward_is_refused_in_words(device):
    gate, up = pair((4, 6), "contiguous", torch.float32, device)
    (dgate,) = torch.autograd.grad(OPS.swiglu(gate, up, "silu").sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu_bwd has no second derivative"):
        dgate.sum().backward()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_nan_and_inf_go_where_eager_sends_them(implementation, form, device):
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, LIMIT, -LIMIT], device=device)
    gate = special.repeat(6).requires_grad_()
    up = special.repeat_interleave(6).requires_grad_()
    fused, eager = hosts("swiglu", implementation, *FORMS[form]), EAGER[form]
    torch.testing.assert_close(fused(gate, up), eager(gate, up), equal_nan=True)
    ours = torch.autograd.grad(fused(gate, up).sum(), [gate, up])
    theirs = torch.autograd.grad(eager(gate, up).sum(), [gate, up])
    if form == "scaled silu":  # written out, eager's backward has 0 * inf where the gradient is infinite
        ours = [torch.where(a.isinf() & b.isnan(), b, a) for a, b in zip(ours, theirs, strict=True)]
    torch.testing.assert_close(list(ours), list(theirs), equal_nan=True)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_act_is_rounded_before_the_product(implementation, activation, device):
    """Nearly every bit as eager has it; with one rounding less a quarter of them would differ."""
    gate, up = (t.detach() for t in pair((4, 1000), "contiguous", torch.bfloat16, device))
    h = getattr(kernels, f"swiglu_{implementation}")(gate, up, activation)
    assert (h == EAGER[activation](gate, up)).float().mean() > 0.98


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if LIMIT in form])
def test_at_a_limit_all_of_the_gradient_passes_and_beyond_it_none(implementation, form, device):
    """As torch's clamp, to the last bit of the limit and in every dtype."""
    at = torch.tensor([-LIMIT, LIMIT], dtype=torch.bfloat16, device=device)
    beyond, short = at * (1 + 2**-7), at * (1 - 2**-8)  # its neighbours
    grid = torch.cat([at, beyond, short, 4 * at])
    assert len(grid.unique()) == 8
    for dtype in DTYPES:
        gate = grid.repeat(8).to(dtype).requires_grad_()
        up = grid.repeat_interleave(8).to(dtype).requires_grad_()
        at_both = (gate == LIMIT) & (up.abs() == LIMIT)
        for fn in (hosts("swiglu", implementation, *FORMS[form]), EAGER[form]):
            dgate, dup = torch.autograd.grad(fn(gate, up).sum(), [gate, up])
            assert not dgate[gate > LIMIT].any() and not dup[up.abs() > LIMIT].any()
            assert dgate[at_both].all() and dup[at_both].all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_packed_and_separate_give_the_same_bits(interleaved, device):
    gate_up = packed((5, 300), torch.bfloat16, device).detach()
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    dh = torch.randn(5, 300, device=device).bfloat16()
    h = kernels.swiglu_packed_triton(gate_up, "silu", True, interleaved)
    assert torch.equal(kernels.swiglu_triton(gate, up, "silu"), h)
    dgate, dup = kernels.swiglu_bwd_triton(dh, gate, up, "silu")
    d_gate_up = kernels.swiglu_packed_bwd_triton(dh, gate_up, "silu", True, interleaved)
    assert torch.equal(dgate, d_gate_up[..., ::2] if interleaved else d_gate_up[..., :300])
    assert torch.equal(dup, d_gate_up[..., 1::2] if interleaved else d_gate_up[..., 300:])


@pytest.mark.parametrize("rows", [slice(None), slice(None, None, 2)], ids=["contiguous", "every second row"])
def test_an_interleaved_buffer_is_never_copied(rows, device, monkeypatch):
    gate_up = packed((6, 40), torch.bfloat16, device).detach()[rows]
    dh = torch.randn(len(gate_up), 40, device=device).bfloat16()
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *_: pytest.fail("a copy"))
    kernels.swiglu_packed_triton(gate_up, "silu", True, True)
    kernels.swiglu_packed_bwd_triton(dh, gate_up, "silu", True, True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_torch_compile_with_dynamic_rows(backend, device):
    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def compiled(gate, up, gate_up):
        return OPS.swiglu(gate, up, "silu") + OPS.swiglu_packed(gate_up, "silu", True)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 5, 8):
            gate, up = pair((rows, 6), "contiguous", torch.float32, device)
            gate_up = packed((rows, 6), torch.float32, device)
            args = [gate, up, gate_up]
            ours = torch.autograd.grad(compiled(*args).sum(), args)
            h = EAGER["silu"](gate, up) + eager_packed(gate_up, "silu", True)
            torch.testing.assert_close(ours, torch.autograd.grad(h.sum(), args))


def test_cost_is_three_and_five_arrays():
    from fused_backend.kernels._op import BYTES_MOVED

    gate, up, dh = (torch.empty(4, 6, dtype=torch.bfloat16) for _ in range(3))
    one = gate.numel() * 2
    assert BYTES_MOVED[OPS.swiglu.default](gate, up, "silu") == 3 * one
    assert BYTES_MOVED[OPS.swiglu_bwd.default](dh, gate, up, "silu") == 5 * one
    gate_up = torch.empty(4, 12, dtype=torch.bfloat16)
    assert BYTES_MOVED[OPS.swiglu_packed.default](gate_up, "silu", True) == 3 * one
    assert BYTES_MOVED[OPS.swiglu_packed_bwd.default](dh, gate_up, "silu", True) == 5 * one


def test_errors_say_the_rule_what_came_and_the_way_out(device):
    gate, up = (t.detach() for t in pair((4, 6), "contiguous", torch.float32, device))
    with pytest.raises(ValueError, match="one of silu, gelu, gelu_tanh, relu2, got 'relu'"):
        OPS.swiglu(gate, up, "relu")
    with pytest.raises(ValueError, match=r"one dtype, got torch.float32 and torch.float16.*Cast"):
        OPS.swiglu(gate, up.half(), "silu")
    with pytest.raises(ValueError, match=r"floating point, got torch\.int32"):
        OPS.swiglu(gate.int(), up.int(), "silu")
    with pytest.raises(ValueError, match=r"one shape, got \(4, 6\) and \(4, 1\).*Expand"):
        OPS.swiglu(gate, up[:, :1], "silu")
    with pytest.raises(ValueError, match=r"limit must not be negative, got -1.0"):
        OPS.swiglu(gate, up, "silu", -1.0)
    with pytest.raises(ValueError, match=r"alpha is silu's, got 2.0 for gelu"):
        OPS.swiglu(gate, up, "gelu", None, 2.0)
    with pytest.raises(ValueError, match=r"must be even, got 5 \(gate_up is \(4, 5\)\).*Pad"):
        OPS.swiglu_packed(gate[:, :5], "silu", True)


@pytest.mark.gpu
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("layout", [(False,), (True, 1.0, 1.702, 1.0)], ids=["halves", "interleaved, limited"])
def test_offsets_beyond_32_bits(gate_first, layout, device):
    """More than 2^31 elements, as one long row and as packed rows: the last ones are right."""
    gate_up = torch.randn((1 << 17) + 3, 2 * 8193, device=device, dtype=torch.bfloat16)
    h = OPS.swiglu_packed(gate_up, "silu", gate_first, *layout)
    assert torch.equal(h[-3:], OPS.swiglu_packed(gate_up[-3:].clone(), "silu", gate_first, *layout))
    assert torch.equal(OPS.swiglu(gate_up, gate_up, "silu")[-3:], OPS.swiglu(*[gate_up[-3:].clone()] * 2, "silu"))
