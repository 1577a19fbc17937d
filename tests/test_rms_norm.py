"""rms_norm: the operators against float64 autograd of the eager idiom, through torch and through Triton."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from _oracle import assert_as_accurate, exact, judge
from conftest import HAS_GPU
from fused_backend.kernels import rms_norm as kernels
from fused_backend.kernels._op import BYTES_MOVED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

OPS = torch.ops.fused_backend
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    pytest.param((3, 5, 7), id="odd"),
    pytest.param((1, 1), id="one-element"),
    pytest.param((13,), id="one-row"),
    pytest.param((2, 1031), id="prime"),
    pytest.param((600, 100), id="more-rows-than-programs"),
    pytest.param((2, 5000), id="row-longer-than-a-tile"),
    pytest.param((0, 16), id="no-rows"),
]


@contextlib.contextmanager
def running(implementation):
    """The device on which the operators run through `implementation`, gradients included.

    Without a GPU the Triton host functions stand in as the CPU's and their kernels run in the interpreter.
    """
    if implementation == "reference" or HAS_GPU:
        yield torch.device("cpu" if implementation == "reference" else "cuda")
        return
    library = torch.library.Library("fused_backend", "IMPL")
    for name in ("rms_norm", "add_rms_norm", "gated_rms_norm", "rms_norm_bwd", "gated_rms_norm_bwd"):
        library.impl(name, getattr(kernels.TRITON, name), "CPU")
    try:
        yield torch.device("cpu")
    finally:
        library._destroy()


@pytest.fixture(params=["reference", "triton"])
def where(request):
    with running(request.param) as device:
        yield device


# What models write.


def normalise(x):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def llama(x, w):
    hidden = normalise(x).to(x.dtype)
    return hidden if w is None else w * hidden


def gemma(x, w):
    return (normalise(x) * (1.0 + w.float())).to(x.dtype)


def olmo2(x, w):
    return (w.float() * normalise(x)).to(x.dtype)


def torch_rms_norm(x, w):
    return F.rms_norm(x, x.shape[-1:], w, EPS)


# idiom -> (offset, cast_before_weight)
IDIOMS = {llama: (0.0, True), gemma: (1.0, False), olmo2: (0.0, False), torch_rms_norm: (0.0, False)}
by_name = {"ids": lambda idiom: idiom.__name__}


def added(idiom):
    def add_norm(x, residual, w):
        s = x + residual
        return idiom(s, w), s

    return add_norm


def gated(idiom, activation):
    act = F.silu if activation == "silu" else torch.sigmoid
    return lambda x, w, z: (idiom(x, w) * act(z.float())).to(x.dtype)


def gated_gemma(activation):
    """One rounding, at the end."""
    act = F.silu if activation == "silu" else torch.sigmoid
    return lambda x, w, z: (normalise(x) * (1.0 + w.float()) * act(z.float())).to(x.dtype)


def fused_norm(idiom):
    return lambda x, w: OPS.rms_norm(x, w, EPS, *IDIOMS[idiom])[0]


def fused_add_norm(idiom):
    return lambda x, residual, w: OPS.add_rms_norm(x, residual, w, EPS, *IDIOMS[idiom])[:2]


def fused_gated_norm(idiom, activation):
    return lambda x, w, z: OPS.gated_rms_norm(x, w, z, EPS, *IDIOMS[idiom], activation)[0]


def randn(shape, dtype, device, grad=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


# Accuracy.


@pytest.mark.parametrize("idiom", IDIOMS, **by_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_is_as_accurate_as_eager(where, idiom, dtype, shape):
    x, w = randn(shape, dtype, where), randn(shape[-1:], dtype, where)
    judge(fused_norm(idiom), idiom, [x, w], [torch.randn(shape, device=where)])


@pytest.mark.parametrize("idiom", [llama, gemma], **by_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_norm_is_as_accurate_as_eager(where, idiom, dtype, shape):
    x, residual, w = randn(shape, dtype, where), randn(shape, dtype, where), randn(shape[-1:], dtype, where)
    cotangents = [torch.randn(shape, device=where) for _ in range(2)]
    judge(fused_add_norm(idiom), added(idiom), [x, residual, w], cotangents)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("idiom", [llama, gemma], **by_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_norm_is_as_accurate_as_eager(where, idiom, activation, dtype, shape):
    x, w, z = randn(shape, dtype, where), randn(shape[-1:], dtype, where), randn(shape, dtype, where)
    eager = gated(idiom, activation) if idiom is llama else gated_gemma(activation)
    judge(fused_gated_norm(idiom, activation), eager, [x, w, z], [torch.randn(shape, device=where)])


MIXED = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("idiom", [llama, gemma], **by_name)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), MIXED, ids=str)
def test_weight_may_have_its_own_dtype(where, idiom, x_dtype, w_dtype):
    x, w = randn((9, 33), x_dtype, where), randn((33,), w_dtype, where)
    judge(fused_norm(idiom), idiom, [x, w], [torch.randn(9, 33, device=where)])
    z = randn((9, 33), x_dtype, where)
    eager = gated(idiom, "silu") if idiom is llama else gated_gemma("silu")
    judge(fused_gated_norm(idiom, "silu"), eager, [x, w, z], [torch.randn(9, 33, device=where)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_may_be_absent(where, dtype):
    x, residual = randn((9, 33), dtype, where), randn((9, 33), dtype, where)
    cotangents = [torch.randn(9, 33, device=where) for _ in range(2)]
    judge(fused_norm(llama), llama, [x, None], cotangents[:1])
    judge(fused_add_norm(torch_rms_norm), added(torch_rms_norm), [x, residual, None], cotangents)
    judge(fused_gated_norm(llama, "silu"), gated(llama, "silu"), [x, None, residual], cotangents[:1])


# Layouts.

LAYOUTS = {
    "slice of qkv": lambda t: t.new_empty(2, 5, 9, 16)[:, :, 3:6].copy_(t),
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batch innermost": lambda t: t.movedim(0, 2).contiguous().movedim(2, 0),
    "four levels": lambda t: t.new_empty(4, 10, 6, 16)[::2, ::2, ::2].copy_(t),
    "last dimension strided": lambda t: t.new_empty(2, 5, 3, 32)[..., ::2].copy_(t),
    "rows repeated": lambda t: t[:, :1].expand(2, 5, 3, 16),
    "one number": lambda t: t[:1, :1, :1, :1].expand(2, 5, 3, 16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "other", "dy", "all"])
def test_every_layout_is_read(where, layout, which):
    """Inputs and cotangents in one layout, then all; expanded ones share memory, so they carry no gradient."""
    x, other, dy = (torch.randn(2, 5, 3, 16, device=where) for _ in range(3))
    laid = lambda name, t: LAYOUTS[layout](t) if which in (name, "all") else t  # noqa: E731
    x, other, dy = laid("x", x), laid("other", other), laid("dy", dy)
    w = torch.randn(16, device=where)
    want = OPS.rms_norm(x.contiguous(), w, EPS, 0.0, True)
    got = OPS.rms_norm(x, w, EPS, 0.0, True)
    assert_same(got, want)
    assert_same(
        OPS.rms_norm_bwd(dy, other, x, w, got[1], 0.0, True, True),
        OPS.rms_norm_bwd(dy.contiguous(), other.contiguous(), x.contiguous(), w, got[1], 0.0, True, True),
    )
    assert_same(
        OPS.add_rms_norm(x, other, w, EPS, 0.0, True),
        OPS.add_rms_norm(x.contiguous(), other.contiguous(), w, EPS, 0.0, True),
    )
    rest = (0.0, True, "silu")
    assert_same(
        OPS.gated_rms_norm(x, w, other, EPS, *rest),
        OPS.gated_rms_norm(x.contiguous(), w, other.contiguous(), EPS, *rest),
    )
    contiguous = dy.contiguous(), x.contiguous(), w, other.contiguous(), got[1]
    assert_same(
        OPS.gated_rms_norm_bwd(dy, x, w, other, got[1], *rest, True),
        OPS.gated_rms_norm_bwd(*contiguous, *rest, True),
    )


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_broadcast_cotangent_reaches_the_backward(where):
    x, w = randn((4, 6, 32), torch.bfloat16, where), randn((32,), torch.bfloat16, where)
    for dy in (torch.ones((), device=where), torch.randn(4, 1, 32, device=where)):
        judge(fused_norm(llama), llama, [x, w], [dy.bfloat16().expand(4, 6, 32)])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_stride_and_dtype(where, data):
    """A permuted, sliced view of any small shape."""
    dtype = data.draw(st.sampled_from(DTYPES))
    lead = data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=4))
    D, step = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 2))
    order = data.draw(st.permutations(range(len(lead))))
    idiom = data.draw(st.sampled_from([llama, gemma]))
    base = torch.randn(*[lead[i] * step for i in order], D + 3, device=where).to(dtype)
    base = base[tuple(slice(None, None, step) for _ in order)][..., 2 : 2 + D]
    x = base.permute(*[order.index(d) for d in range(len(lead))], len(lead)).detach().requires_grad_()
    residual, w = randn(x.shape, dtype, where), randn((D,), dtype, where)
    cotangents = [torch.randn(x.shape, device=where) for _ in range(2)]
    judge(fused_add_norm(idiom), added(idiom), [x, residual, w], cotangents)


# Gradients that nobody asked for.


def test_frozen_weight_gets_no_gradient_and_costs_nothing(where, monkeypatch):
    def fail(*args):
        raise AssertionError("dw was computed")

    monkeypatch.setattr(kernels, "add_partials", fail)
    monkeypatch.setattr(kernels.formulas, "dw_term", fail)
    x, z, w = (
        randn((4, 9), torch.float32, where),
        randn((4, 9), torch.float32, where),
        torch.ones(9).to(where),
    )
    outs = [
        fused_norm(llama)(x, w),
        *fused_add_norm(llama)(x, z, w),
        fused_gated_norm(llama, "silu")(x, w, z),
    ]
    sum(o.sum() for o in outs).backward()
    assert x.grad is not None
    rstd = OPS.rms_norm(x.detach(), w, EPS, 0.0, True)[1]
    _, dw = OPS.rms_norm_bwd(z.detach(), None, x.detach(), w, rstd, 0.0, True, False)
    assert dw.shape == (0,)


@pytest.mark.parametrize("used", ["y", "s", "neither w"])
def test_add_norm_with_one_gradient_missing(where, used):
    x, residual = randn((5, 33), torch.bfloat16, where), randn((5, 33), torch.bfloat16, where)
    w = randn((33,), torch.bfloat16, where, grad=used != "neither w")
    pick = (lambda outs: outs[1]) if used == "s" else (lambda outs: outs[0])
    judge(
        lambda *a: pick(fused_add_norm(llama)(*a)),
        lambda *a: pick(added(llama)(*a)),
        [x, residual, w],
        [torch.randn(5, 33, device=where)],
    )


def test_rstd_is_not_differentiable(where):
    y, rstd = OPS.rms_norm(randn((3, 8), torch.float32, where), None, EPS, 0.0, True)
    assert y.requires_grad
    assert not rstd.requires_grad
    assert rstd.shape == (3,)


def test_second_derivative_is_refused(where):
    x = randn((3, 8), torch.float32, where)
    y, _ = OPS.rms_norm(x, None, EPS, 0.0, True)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        dx.sum().backward()


# Exactness.


def test_nan_and_inf_propagate_row_by_row(where):
    x, w = torch.randn(4, 9, device=where), torch.randn(9, device=where)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    z, dy = torch.randn(4, 9, device=where), torch.randn(4, 9, device=where)
    inputs = [x.requires_grad_(), w.requires_grad_(), z.requires_grad_()]
    judge(fused_gated_norm(llama, "silu"), gated(llama, "silu"), inputs, [dy])
    judge(fused_norm(llama), llama, inputs[:2], [dy])


def test_the_same_bits_every_run(where):
    x, w = randn((700, 70), torch.bfloat16, where), randn((70,), torch.bfloat16, where)
    dy = torch.randn(700, 70, device=where).bfloat16()
    runs = []
    for _ in range(3):
        y = fused_norm(llama)(x, w)
        runs.append((y, *torch.autograd.grad(y, (x, w), dy)))
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_inputs_are_left_alone(where):
    x, z, w, dy = (torch.randn(5, 12, device=where) for _ in range(4))
    w = w[0]
    before = [t.clone() for t in (x, z, w, dy)]
    y, s, rstd = OPS.add_rms_norm(x, z, w, EPS, 0.0, True)
    OPS.rms_norm_bwd(dy, z, x, w, rstd, 0.0, True, True)
    OPS.gated_rms_norm_bwd(dy, x, w, z, rstd, 0.0, True, "silu", True)
    assert all(torch.equal(a, b) for a, b in zip((x, z, w, dy), before, strict=True))
    owned = {t.untyped_storage().data_ptr() for t in (x, z, w, dy)}
    assert owned.isdisjoint(t.untyped_storage().data_ptr() for t in (y, s, rstd))


def test_dw_of_many_rows_loses_nothing(where):
    """A bfloat16 running sum would stop growing at 256; partial sums are float32."""
    x = torch.ones(3000, 8, device=where, dtype=torch.bfloat16)
    w = torch.ones(8, device=where, dtype=torch.bfloat16, requires_grad=True)
    fused_norm(llama)(x, w).sum().backward()
    (truth,) = exact(llama, [x, w], [torch.ones(3000, 8, device=where)])[1:]
    assert_as_accurate(w.grad, truth.bfloat16(), truth)


def test_float64_is_computed_in_float64(where):
    x, w = randn((3, 7), torch.float64, where), randn((7,), torch.float64, where)
    y = fused_norm(gemma)(x, w)
    torch.testing.assert_close(
        y, exact(gemma, [x, w], [torch.ones(3, 7, device=where)])[0], rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("offset, cast", [(0.0, True), (1.0, False)])
def test_gradcheck(offset, cast):
    x, z = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda x, w: OPS.rms_norm(x, w, EPS, offset, cast)[0], (x, w))
    assert check(lambda x, z, w: OPS.add_rms_norm(x, z, w, EPS, offset, cast)[:2], (x, z, w))
    for act in ("silu", "sigmoid"):
        assert check(lambda x, w, z, a=act: OPS.gated_rms_norm(x, w, z, EPS, offset, cast, a)[0], (x, w, z))


# Operators as PyTorch sees them.


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(torch.float32,) * 2, *MIXED[:1]], ids=str)
def test_opcheck(where, layout, x_dtype, w_dtype):
    x, z, dy = (torch.randn(4, 3, 10, device=where).to(x_dtype) for _ in range(3))
    if layout == "transposed":
        x, z, dy = x.transpose(0, 1), z.transpose(0, 1), dy.transpose(0, 1)
    w = torch.randn(10, device=where).to(w_dtype)
    rstd = torch.rand(x.shape[:-1], device=where)
    leaf = lambda t: t.detach().requires_grad_()  # noqa: E731
    check = torch.library.opcheck
    check(OPS.rms_norm.default, (leaf(x), leaf(w), EPS, 0.0, True))
    check(OPS.rms_norm.default, (leaf(x), None, EPS, 0.0, False))
    check(OPS.add_rms_norm.default, (leaf(x), leaf(z), leaf(w), EPS, 1.0, False))
    check(OPS.gated_rms_norm.default, (leaf(x), leaf(w), leaf(z), EPS, 0.0, True, "silu"))
    for ds, need_dw in ((z, True), (None, False)):
        check(OPS.rms_norm_bwd.default, (dy, ds, x, w, rstd, 0.0, True, need_dw))
    check(OPS.gated_rms_norm_bwd.default, (dy, x, w, z, rstd, 1.0, False, "sigmoid", True))


def test_a_new_length_does_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")

    def step(x, residual, w):
        y, s, _ = OPS.add_rms_norm(x, residual, w, EPS, 0.0, True)
        return OPS.gated_rms_norm(y, w, s, EPS, 0.0, True, "silu")[0]

    compiled = torch.compile(step, backend=counter, dynamic=True)
    w = torch.randn(16, requires_grad=True)
    for T in (5, 7, 12, 64):
        compiled(torch.randn(T, 16, requires_grad=True), torch.randn(T, 16), w).sum().backward()
    assert counter.frame_count == 1


def test_bytes_moved_counts_every_tensor_once():
    x, w = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.float32)
    rstd, xb, wb = torch.empty(8), 8 * 16 * 2, 16 * 4
    bytes_of = lambda op, *args: BYTES_MOVED[op.default](*args)  # noqa: E731
    assert bytes_of(OPS.rms_norm, x, w, EPS, 0.0, True) == xb + wb + 2 * xb
    assert bytes_of(OPS.rms_norm, x, w, EPS, 0.0, False) == xb + wb + xb
    assert bytes_of(OPS.add_rms_norm, x, x, w, EPS, 0.0, False) == 4 * xb + wb
    assert bytes_of(OPS.gated_rms_norm, x, w, x, EPS, 0.0, True, "silu") == 3 * xb + wb
    assert bytes_of(OPS.rms_norm_bwd, x, x, x, w, rstd, 0.0, True, True) == 4 * xb + 2 * wb
    assert bytes_of(OPS.rms_norm_bwd, x, None, x, w, rstd, 0.0, True, False) == 3 * xb + wb
    assert bytes_of(OPS.gated_rms_norm_bwd, x, x, w, x, rstd, 0.0, True, "silu", False) == 5 * xb + wb


X, W = torch.empty(3, 8), torch.empty(8)
REFUSED = {
    "rms_norm: x must be floating": lambda: OPS.rms_norm(X.int(), W, EPS, 0.0, True),
    "rms_norm: w must be": lambda: OPS.rms_norm(X, W[:4], EPS, 0.0, True),
    "rms_norm: cast_before_weight": lambda: OPS.rms_norm(X, W, EPS, 1.0, True),
    "add_rms_norm: both": lambda: OPS.add_rms_norm(X, X[:1], W, EPS, 0.0, True),
    "add_rms_norm: x and residual must share": lambda: OPS.add_rms_norm(X, X.half(), W, EPS, 0.0, True),
    "gated_rms_norm: activation": lambda: OPS.gated_rms_norm(X, W, X, EPS, 0.0, True, "residual"),
    "gated_rms_norm: both": lambda: OPS.gated_rms_norm(X, W, X[0], EPS, 0.0, True, "silu"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_input_is_one_clear_error(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
