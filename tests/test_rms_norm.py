"""rms_norm: the operators against float64 autograd of the eager idiom, through torch and through Triton."""

import pytest
import torch
import torch.nn.functional as F
from _oracle import assert_as_accurate, exact, judge
from _rows import (
    LAYOUTS,
    SHAPES,
    any_rows,
    assert_inputs_are_left_alone,
    assert_same_bits_every_run,
    randn,
    running,
)
from fused_backend.kernels import rms_norm as kernels
from fused_backend.kernels._op import BYTES_MOVED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

OPS = torch.ops.fused_backend
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERATORS = ("rms_norm", "add_rms_norm", "gated_rms_norm", "rms_norm_bwd", "gated_rms_norm_bwd")


@pytest.fixture(params=["reference", "triton"])
def where(request):
    with running(request.param, kernels.TRITON, OPERATORS) as device:
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


def torch_rms_norm(x, w):
    return F.rms_norm(x, x.shape[-1:], w, EPS)


# idiom -> (offset, cast_before_weight)
IDIOMS = {llama: (0.0, True), gemma: (1.0, False), torch_rms_norm: (0.0, False)}


def added(idiom):
    def add_norm(x, residual, w):
        s = x + residual
        return idiom(s, w), s

    return add_norm


def gated(idiom, activation):
    act = F.silu if activation == "silu" else torch.sigmoid
    if idiom is gemma:
        # One rounding, at the end.
        return lambda x, w, z: (normalise(x) * (1.0 + w.float()) * act(z.float())).to(x.dtype)
    return lambda x, w, z: (idiom(x, w) * act(z.float())).to(x.dtype)


def fused_norm(idiom):
    return lambda x, w: OPS.rms_norm(x, w, EPS, *IDIOMS[idiom])[0]


def fused_add_norm(idiom):
    return lambda x, residual, w: OPS.add_rms_norm(x, residual, w, EPS, *IDIOMS[idiom])[:2]


def fused_gated_norm(idiom, activation):
    return lambda x, w, z: OPS.gated_rms_norm(x, w, z, EPS, *IDIOMS[idiom], activation)[0]


# Accuracy. Cotangents have the dtype of x, so that float64 and eager start from the same numbers.


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_is_as_accurate_as_eager(where, idiom, dtype, shape):
    x, w = randn(shape, dtype, where), randn(shape[-1:], dtype, where)
    judge(fused_norm(idiom), idiom, [x, w], [torch.randn_like(x)])


@pytest.mark.parametrize("idiom", [llama, gemma], ids=lambda idiom: idiom.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_norm_is_as_accurate_as_eager(where, idiom, dtype, shape):
    x, residual, w = randn(shape, dtype, where), randn(shape, dtype, where), randn(shape[-1:], dtype, where)
    cotangents = [torch.randn_like(x) for _ in range(2)]
    judge(fused_add_norm(idiom), added(idiom), [x, residual, w], cotangents)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("idiom", [llama, gemma], ids=lambda idiom: idiom.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[::2])
def test_gated_norm_is_as_accurate_as_eager(where, idiom, activation, dtype, shape):
    x, w, z = randn(shape, dtype, where), randn(shape[-1:], dtype, where), randn(shape, dtype, where)
    judge(fused_gated_norm(idiom, activation), gated(idiom, activation), [x, w, z], [torch.randn_like(x)])


@pytest.mark.parametrize("shape", [(551, 100), (2, 4200)], ids=["many-tiles", "row-above-a-tile"])
def test_tile_edges(where, shape):
    x, residual, w = (randn(s, torch.bfloat16, where) for s in (shape, shape, shape[-1:]))
    cotangents = [torch.randn_like(x) for _ in range(2)]
    judge(fused_add_norm(llama), added(llama), [x, residual, w], cotangents)
    judge(fused_gated_norm(gemma, "silu"), gated(gemma, "silu"), [x, w, residual], cotangents[:1])


MIXED = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("idiom", [llama, gemma], ids=lambda idiom: idiom.__name__)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), MIXED, ids=str)
def test_weight_may_have_its_own_dtype(where, idiom, x_dtype, w_dtype):
    x, w = randn((200, 131), x_dtype, where), randn((131,), w_dtype, where)
    judge(fused_norm(idiom), idiom, [x, w], [torch.randn_like(x)])
    z = randn((200, 131), x_dtype, where)
    judge(fused_gated_norm(idiom, "silu"), gated(idiom, "silu"), [x, w, z], [torch.randn_like(x)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_may_be_absent(where, dtype):
    x, residual = randn((9, 33), dtype, where), randn((9, 33), dtype, where)
    cotangents = [torch.randn_like(x) for _ in range(2)]
    judge(fused_norm(llama), llama, [x, None], cotangents[:1])
    judge(fused_add_norm(torch_rms_norm), added(torch_rms_norm), [x, residual, None], cotangents)
    judge(fused_gated_norm(llama, "silu"), gated(llama, "silu"), [x, None, residual], cotangents[:1])


# Layouts.


def every_operator(x, other, w, dy):
    """All their outputs; `other` is residual, gate and ds in turn."""
    y, rstd = OPS.rms_norm(x, w, EPS, 0.0, True)
    return [
        *(y, rstd),
        *OPS.add_rms_norm(x, other, w, EPS, 0.0, True),
        *OPS.gated_rms_norm(x, w, other, EPS, 0.0, True, "silu"),
        *OPS.rms_norm_bwd(dy, other, x, w, rstd, 0.0, True, True),
        *OPS.gated_rms_norm_bwd(dy, x, w, other, rstd, 0.0, True, "silu", True),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "other", "dy", "all"])
def test_every_layout_is_read(where, layout, which):
    """One tensor in the layout, then all; the values are those of contiguous inputs."""
    x, other, dy = (
        LAYOUTS[layout](t) if which in (name, "all") else t
        for name, t in zip(("x", "other", "dy"), torch.randn(3, 2, 5, 3, 16, device=where), strict=True)
    )
    w = torch.randn(16, device=where)
    got = every_operator(x, other, w, dy)
    want = every_operator(x.contiguous(), other.contiguous(), w, dy.contiguous())
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_broadcast_cotangent_reaches_the_backward(where):
    x, w = randn((4, 6, 32), torch.bfloat16, where), randn((32,), torch.bfloat16, where)
    for dy in (torch.ones((), device=where), torch.randn(4, 1, 32, device=where)):
        judge(fused_norm(llama), llama, [x, w], [dy.bfloat16().expand(4, 6, 32)])


FIXTURE = HealthCheck.function_scoped_fixture


@settings(max_examples=20, suppress_health_check=[FIXTURE])
@given(data=st.data())
def test_any_shape_stride_and_dtype(where, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    idiom = data.draw(st.sampled_from([llama, gemma]))
    x = any_rows(data, dtype, where)
    residual, w = randn(x.shape, dtype, where), randn(x.shape[-1:], dtype, where)
    cotangents = [torch.randn_like(x) for _ in range(2)]
    judge(fused_add_norm(idiom), added(idiom), [x, residual, w], cotangents)


# Gradients that nobody asked for.


def test_frozen_weight_gets_no_gradient_and_costs_nothing(where, monkeypatch):
    def fail(*args):
        raise AssertionError("dw was computed")

    monkeypatch.setattr(kernels, "add_partials", fail)
    monkeypatch.setattr(kernels.formulas, "dw_term", fail)
    x, z = randn((4, 9), torch.float32, where), randn((4, 9), torch.float32, where)
    w = torch.ones(9, device=where)
    y, s = fused_add_norm(llama)(x, z, w)
    (y + s + fused_norm(llama)(x, w) + fused_gated_norm(llama, "silu")(x, w, z)).sum().backward()
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
        [torch.randn_like(x)],
    )


def test_second_derivative_and_gradient_of_rstd_are_refused(where):
    x = randn((3, 8), torch.float32, where)
    y, rstd = OPS.rms_norm(x, None, EPS, 0.0, True)
    assert not rstd.requires_grad
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
    assert_same_bits_every_run(every_operator, where)


def test_inputs_are_left_alone(where):
    assert_inputs_are_left_alone(every_operator, where)


def test_dw_of_many_rows_loses_nothing(where):
    """A bfloat16 running sum would stop growing at 256; partial sums are float32."""
    x = torch.ones(3000, 8, device=where, dtype=torch.bfloat16)
    w = torch.ones(8, device=where, dtype=torch.bfloat16, requires_grad=True)
    fused_norm(llama)(x, w).sum().backward()
    (truth,) = exact(llama, [x, w], [torch.ones(3000, 8, device=where)])[1:]
    assert_as_accurate(w.grad, truth.bfloat16(), truth)


def test_float64_is_computed_in_float64(where):
    x, w = randn((3, 7), torch.float64, where), randn((7,), torch.float64, where)
    truth = exact(gemma, [x, w], [torch.ones(3, 7, device=where)])[0]
    torch.testing.assert_close(fused_norm(gemma)(x, w).detach(), truth, rtol=1e-14, atol=0)


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
def test_opcheck(where, layout):
    """Mixed dtypes, so that the fakes' dtypes are seen."""
    x_dtype, w_dtype = MIXED[0]
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
    frames = []
    for T in (5, 7, 12, 64):
        compiled(torch.randn(T, 16, requires_grad=True), torch.randn(T, 16), w).sum().backward()
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


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
