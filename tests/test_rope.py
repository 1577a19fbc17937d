"""rope: the operators against float64 autograd of the eager idiom, through torch and through Triton."""

import pytest
import torch
from _oracle import judge
from fused_backend.kernels import rope as kernels
from hypothesis import given, settings
from hypothesis import strategies as st

OPS = torch.ops.fused_backend
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("projected", "contiguous", "packed", "channels-strided")
# B, H, Hk, S, K, R
SHAPES = [
    pytest.param((2, 4, 2, 3, 16, 16), id="grouped-query"),
    pytest.param((1, 3, 3, 3, 12, 12), id="no-power-of-two"),
    pytest.param((2, 5, 1, 3, 20, 10), id="partial-with-an-odd-half"),
    pytest.param((1, 1, 1, 1, 2, 2), id="one-pair"),
    pytest.param((1, 67, 5, 2, 128, 128), id="more-heads-than-a-program"),
    pytest.param((2, 4, 2, 0, 16, 16), id="no-positions"),
    pytest.param((0, 4, 2, 3, 16, 8), id="no-sequences"),
]


def rotate(x, interleaved):
    """(x1, x2) -> (-x2, x1) for every pair."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def per_channel(table, rotary_dim, interleaved):
    if table.shape[-1] == rotary_dim:
        return table.unsqueeze(1)
    wide = table.repeat_interleave(2, dim=-1) if interleaved else torch.cat((table, table), dim=-1)
    return wide.unsqueeze(1)


def eager(x, *how):
    cos, sin, rotary_dim, interleaved, inverse, out_dtype = how
    cos, sin = (per_channel(t, rotary_dim, interleaved) for t in (cos, sin))
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if inverse:
        y = turning * cos - rotate(turning * sin, interleaved)
    else:
        y = turning * cos + rotate(turning, interleaved) * sin
    return torch.cat((y.to(out_dtype), rest.to(out_dtype)), dim=-1)


def eager_qk(q, k, *how) -> tuple[torch.Tensor, torch.Tensor]:
    return eager(q, *how), eager(k, *how)


class Hosts(torch.autograd.Function):
    """A host function joined to its gradient, the same function inverted, as the operator joins them."""

    @staticmethod
    def forward(ctx, host, tables, how, *tensors):
        ctx.host, ctx.tables, ctx.how, ctx.dtype = host, tables, how, tensors[0].dtype
        return host(*tensors, *tables, *how)

    @staticmethod
    def backward(ctx, *grads):
        rotary_dim, interleaved, inverse, _ = ctx.how
        grads = ctx.host(*grads, *ctx.tables, rotary_dim, interleaved, not inverse, ctx.dtype)
        return None, None, None, *(grads if isinstance(grads, tuple) else (grads,))


def hosts(name, implementation, *how):
    """f(x, cos, sin) or f(q, k, cos, sin) through `reference` or `triton`, whatever the device."""
    host = getattr(kernels, f"{name}_{implementation}")
    return lambda *args: Hosts.apply(host, args[-2:], how, *args[:-2])


def heads(shape, count, layout, dtype, device):
    """(B, count, S, K) in one of the layouts that models make."""
    b, _, _, s, k, _ = shape
    if layout == "contiguous":
        x = torch.randn(b, count, s, k, device=device).to(dtype)
    elif layout == "packed":
        # A slice of one fused projection, so rows are further apart than they are long.
        x = torch.randn(b, s, (count + 2) * k, device=device).to(dtype)[..., k : (count + 1) * k]
        x = x.unflatten(-1, (count, k)).transpose(1, 2)
    elif layout == "channels-strided":
        x = torch.randn(b, k, count, s, device=device).to(dtype).permute(0, 2, 3, 1)
    else:
        x = torch.randn(b, s, count, k, device=device).to(dtype).transpose(1, 2)
    return x.detach().requires_grad_()


def tables(shape, dtype, device, *, wide=True, batched=False, strided=False):
    """cos and sin with unrelated entries: halves need not be equal, nor squares sum to one."""
    b, _, _, s, _, r = shape
    size = (b if batched else 1, s, r if wide else r // 2)
    if strided:
        # The real and the imaginary part of one complex table.
        return torch.randn(*size, 2, device=device).to(dtype).unbind(-1)
    return torch.randn(size, device=device).to(dtype), torch.randn(size, device=device).to(dtype)


def cotangents(shape, device):
    b, h, hk, s, k, _ = shape
    return [torch.randn(b, n, s, k, device=device) for n in (h, hk)]


def inputs(shape, layout, dtype, device, **how):
    q, k = (heads(shape, count, layout, dtype, device) for count in shape[1:3])
    return [q, k, *tables(shape, dtype, device, **how)]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("wide", [True, False], ids=["per-channel", "per-pair"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rope_qk_is_as_accurate_as_eager(implementation, interleaved, wide, shape, device):
    how = (shape[-1], interleaved, False, torch.bfloat16)
    args = inputs(shape, "projected", torch.bfloat16, device, wide=wide)
    fused = hosts("rope_qk", implementation, *how)
    judge(fused, lambda *args: eager_qk(*args, *how), args, cotangents(shape, device))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=str)
def test_every_mix_of_dtypes(implementation, dtype, table_dtype, out_dtype, device):
    shape = (2, 3, 1, 1, 12, 8)
    how = (shape[-1], False, False, out_dtype)
    args = [heads(shape, 3, "projected", dtype, device), *tables(shape, table_dtype, device, batched=True)]
    fused = hosts("rope", implementation, *how)
    judge(fused, lambda *args: eager(*args, *how), args, cotangents(shape, device)[:1])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strided", [False, True], ids=["tables-adjacent", "tables-complex"])
def test_every_layout_in_place(implementation, layout, strided, device):
    shape = (2, 3, 2, 3, 12, 8)
    how = (shape[-1], strided, False, torch.float16)
    args = inputs(shape, layout, torch.float16, device, wide=not strided, strided=strided)
    fused = hosts("rope_qk", implementation, *how)
    judge(fused, lambda *args: eager_qk(*args, *how), args, cotangents(shape, device))
    for y in fused(*args):
        assert y.transpose(1, 2).is_contiguous()


@settings(max_examples=20)
@given(
    sizes=st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3)),
    half=st.integers(1, 12) | st.sampled_from([32, 48]),
    rest=st.integers(0, 9),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=3, max_size=3),
    flags=st.lists(st.booleans(), min_size=5, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_any_shape_layout_and_dtype(sizes, half, rest, layouts, dtypes, flags, seed, device):
    torch.manual_seed(seed)
    shape = (*sizes, 2 * half + rest, 2 * half)
    interleaved, inverse, wide, batched, strided = flags
    dtype, table_dtype, out_dtype = dtypes
    how = (2 * half, interleaved, inverse, out_dtype)
    q, k = (heads(shape, n, layout, dtype, device) for n, layout in zip(shape[1:3], layouts, strict=True))
    args = [q, k, *tables(shape, table_dtype, device, wide=wide, batched=batched, strided=strided)]
    fused = hosts("rope_qk", "triton", *how)
    judge(fused, lambda *args: eager_qk(*args, *how), args, cotangents(shape, device))


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_undoes_a_rotation(interleaved, device):
    shape = (2, 3, 1, 5, 16, 8)
    angle = torch.randn(1, 5, 4, device=device)
    how = (angle.cos(), angle.sin(), 8, interleaved)
    x = heads(shape, 3, "projected", torch.float32, device).detach()
    y = kernels.rope_triton(x, *how, False, torch.float32)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(kernels.rope_triton(y, *how, True, torch.float32), x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_gradients_of_gradients_in_float64(interleaved, wide):
    shape = (2, 3, 1, 2, 7, 4)
    q, k, cos, sin = inputs(shape, "projected", torch.float64, "cpu", wide=wide)
    how = (cos, sin, 4, interleaved, False, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: OPS.rope_qk(q, k, *how), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: OPS.rope_qk(q, k, *how), (q, k))
    assert torch.autograd.gradgradcheck(lambda q: OPS.rope(q, *how), (q,))


def test_second_derivative_reaches_the_kernel(device):
    """Linear in x: a gradient of |dy/dx v|^2 in v is the map applied after its transpose."""
    shape = (2, 3, 1, 4, 8, 8)
    q, _, cos, sin = inputs(shape, "projected", torch.float32, device)
    how = (cos, sin, 8, False, False, torch.float32)
    v = torch.randn(2, 3, 4, 8, device=device, requires_grad=True)
    (dq,) = torch.autograd.grad(OPS.rope(q, *how), q, v, create_graph=True)
    (dv,) = torch.autograd.grad(dq.pow(2).sum(), v)
    torch.testing.assert_close(dv, OPS.rope(2 * dq.detach(), *how))


def test_only_the_wanted_gradient_is_computed(device):
    q, k, cos, sin = inputs((2, 3, 1, 4, 8, 8), "projected", torch.float32, device)
    how = (cos, sin, 8, False, False, torch.float32)
    yq, yk = OPS.rope_qk(q, k.detach(), *how)
    (yq.sum() + yk.sum()).backward()
    assert q.grad is not None
    assert k.grad is None
    yq, yk = OPS.rope_qk(q.detach(), k, *how)
    yk.sum().backward()
    torch.testing.assert_close(k.grad, OPS.rope(torch.ones_like(k), cos, sin, 8, False, True, torch.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout, device):
    q, k, cos, sin = inputs((2, 3, 1, 4, 8, 6), layout, torch.float32, device)
    torch.library.opcheck(OPS.rope_qk.default, (q, k, cos, sin, 6, False, False, torch.bfloat16))


def test_opcheck_of_one_tensor(device):
    q, _, cos, sin = inputs((2, 3, 1, 4, 8, 6), "projected", torch.float32, device)
    torch.library.opcheck(OPS.rope.default, (q, cos, sin, 6, True, True, torch.float32))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_nan_and_inf_stay_in_their_pair(implementation, device):
    x = torch.ones(1, 1, 3, 8, device=device)
    x[0, 0, 0, 1], x[0, 0, 1, 5], x[0, 0, 2, 7] = float("nan"), float("inf"), float("-inf")
    cos, sin = torch.ones(1, 3, 6, device=device), torch.ones(1, 3, 6, device=device)
    how = (cos, sin, 6, False, False, torch.float32)
    y = getattr(kernels, f"rope_{implementation}")(x, *how)
    torch.testing.assert_close(y, eager(x, *how), equal_nan=True)
    assert y.isfinite().sum() == 24 - 5


def test_same_bits_every_run_and_inputs_untouched(device):
    q, k, cos, sin = (t.detach() for t in inputs((2, 5, 3, 2, 20, 12), "packed", torch.bfloat16, device))
    before = [t.clone() for t in (q, k, cos, sin)]
    how = (cos, sin, 12, True, False, torch.bfloat16)
    runs = [kernels.rope_qk_triton(q, k, *how) for _ in range(2)]
    for yq, yk in runs:
        assert torch.equal(yq, runs[0][0])
        assert torch.equal(yk, runs[0][1])
        # One launch for both or one for each: the same arithmetic.
        assert torch.equal(yq, kernels.rope_triton(q, *how))
        assert torch.equal(yk, kernels.rope_triton(k, *how))
    for t, copy in zip((q, k, cos, sin), before, strict=True):
        assert torch.equal(t, copy)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_torch_compile_with_dynamic_positions(backend, device):
    how = (8, False, False, torch.float32)

    def model(op, *args):
        yq, yk = op(*args, *how)
        # What attention blocks do next: back to (B, S, H * K), which copies nothing in this layout.
        return yq.transpose(1, 2).flatten(2).sin().sum() + (yk * 2).cos().sum()

    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for positions in (5, 7):
            args = inputs((2, 3, 2, positions, 12, 8), "projected", torch.float32, device)
            ours = torch.autograd.grad(compiled(OPS.rope_qk, *args), args[:2])
            torch.testing.assert_close(ours, torch.autograd.grad(model(eager_qk, *args), args[:2]))


def test_cost_is_one_read_and_one_write():
    from fused_backend.kernels._op import BYTES_MOVED

    q, k, cos, sin = inputs((2, 4, 2, 3, 16, 16), "projected", torch.bfloat16, "cpu")
    how = (cos, sin, 16, False, False)
    moved = BYTES_MOVED[OPS.rope_qk.default]
    assert moved(q, k, *how, torch.bfloat16) == 2 * 2 * (q.numel() + k.numel()) + 2 * 2 * cos.numel()
    assert moved(q, k, *how, torch.float32) == (2 + 4) * (q.numel() + k.numel()) + 2 * 2 * cos.numel()
    assert BYTES_MOVED[OPS.rope.default](q, *how, torch.bfloat16) == 4 * q.numel() + 4 * cos.numel()


def test_errors_say_the_rule_what_came_and_the_way_out(device):
    shape = (2, 8, 4, 3, 63, 63)
    q, k, cos, sin = (t.detach() for t in inputs(shape, "contiguous", torch.float32, device))
    f32 = torch.float32
    odd = (
        r"rope: rotary dim must be even, got 63 \(q is \(2, 8, 3, 63\)\)\. "
        r'Pad the head or disable with options=\{"fusions": "-rope"\}'
    )
    with pytest.raises(ValueError, match=odd):
        OPS.rope_qk(q, k, cos, sin, 63, False, False, f32)
    with pytest.raises(ValueError, match=r"at most the head dim, got 64 > 63"):
        OPS.rope(q, cos, sin, 64, False, False, f32)
    with pytest.raises(ValueError, match=r"must be \(B or 1, S, 62 or 31\), got \(1, 3, 63\)"):
        OPS.rope(q, cos, sin, 62, False, False, f32)
    with pytest.raises(ValueError, match=r"q and k may differ in heads only, got k \(2, 4, 2, 63\)"):
        OPS.rope_qk(q, k[:, :, :2], cos, sin, 62, False, False, f32)
    with pytest.raises(ValueError, match=r"one dtype, got torch\.float32 and torch\.float16"):
        OPS.rope_qk(q, k.half(), cos, sin, 62, False, False, f32)
    with pytest.raises(ValueError, match=r"one shape, got \(1, 3, 63\) and \(1, 2, 63\)"):
        OPS.rope(q, cos, sin[:, :2], 62, False, False, f32)
    with pytest.raises(ValueError, match="cos and sin must have 3 dimensions, got 2 and 2"):
        OPS.rope(q, cos[0], sin[0], 62, False, False, f32)
    with pytest.raises(ValueError, match=r"floating point, got torch\.int32"):
        OPS.rope(q, cos, sin, 62, False, False, torch.int32)
    with pytest.raises(ValueError, match=r"one device, got .* and meta"):
        kernels.rope_triton(q, cos.to("meta"), sin, 62, False, False, f32)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    """More than 2^31 elements: the last positions are right."""
    x = torch.randn(1, 17, 1 << 20, 128, device=device, dtype=torch.bfloat16)
    angle = torch.randn(1, 1 << 20, 64, device=device)
    how = (128, False, False, torch.bfloat16)
    y = OPS.rope(x, angle.cos(), angle.sin(), *how)
    tail = slice(-8, None)
    again = OPS.rope(x[:, :, tail].contiguous(), angle[:, tail].cos(), angle[:, tail].sin(), *how)
    assert torch.equal(y[:, :, tail], again)
