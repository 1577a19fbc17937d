"""layer_norm: the operators against float64 autograd of the eager idiom, through torch and through Triton."""

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
from fused_backend.kernels import layer_norm as kernels
from fused_backend.kernels._op import BYTES_MOVED, REMADE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

OPS = torch.ops.fused_backend
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERATORS = ("layer_norm", "add_layer_norm", "layer_norm_bwd")


@pytest.fixture(params=["reference", "triton"])
def where(request):
    with running(request.param, kernels.TRITON, OPERATORS) as device:
        yield device


# What models write.


def torch_layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def normalise(x):
    x = x.float()
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS)


def cohere(x, w, b):
    y = normalise(x)
    y = y if w is None else w.float() * y
    return (y if b is None else y + b.float()).to(x.dtype)


def deberta(x, w, b):
    y = normalise(x).to(x.dtype)
    y = y if w is None else w * y
    return y if b is None else y + b


def float32_result(x, w, b):
    """As autocast computes F.layer_norm."""
    wide = [None if t is None else t.float() for t in (x, w, b)]
    return F.layer_norm(wide[0], x.shape[-1:], *wide[1:], EPS)


# idiom -> (cast_before_weight, dtype)
IDIOMS = {
    torch_layer_norm: (False, None),
    cohere: (False, None),
    deberta: (True, None),
    float32_result: (False, torch.float32),
}


def added(idiom):
    def add_norm(x, residual, w, b):
        s = x + residual
        return idiom(s, w, b), s

    return add_norm


def fused_norm(idiom):
    return lambda x, w, b: OPS.layer_norm(x, w, b, EPS, *IDIOMS[idiom])[0]


def fused_add_norm(idiom):
    return lambda x, residual, w, b: OPS.add_layer_norm(x, residual, w, b, EPS, *IDIOMS[idiom])[:2]


def shifted(*args):
    """Rows with a mean of their own: a sum of squares that is not taken about it cancels."""
    x = randn(*args, grad=False)
    return (x + 3).requires_grad_()


def inputs_of(shape, dtype, where, w_dtype=None):
    """x, w, b."""
    w, b = (randn(shape[-1:], w_dtype or dtype, where) for _ in range(2))
    return [shifted(shape, dtype, where), w, b]


# Accuracy. Cotangents have the dtype of the result, so that float64 and eager start from the same numbers.


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_is_as_accurate_as_eager(where, idiom, dtype, shape):
    judge(fused_norm(idiom), idiom, inputs_of(shape, dtype, where), [torch.randn(shape, device=where)])


@pytest.mark.parametrize("idiom", [torch_layer_norm, deberta], ids=lambda idiom: idiom.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_norm_is_as_accurate_as_eager(where, idiom, dtype, shape):
    x, w, b = inputs_of(shape, dtype, where)
    cotangents = [torch.randn_like(x) for _ in range(2)]
    judge(fused_add_norm(idiom), added(idiom), [x, randn(shape, dtype, where), w, b], cotangents)


@pytest.mark.parametrize("shape", [(551, 100), (2, 4200)], ids=["many-tiles", "row-above-a-tile"])
def test_tile_edges(where, shape):
    x, w, b = inputs_of(shape, torch.bfloat16, where)
    cotangents = [torch.randn_like(x) for _ in range(2)]
    for idiom in (torch_layer_norm, deberta):
        judge(fused_add_norm(idiom), added(idiom), [x, randn(shape, x.dtype, where), w, b], cotangents)


MIXED = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("idiom", [cohere, deberta, float32_result], ids=lambda idiom: idiom.__name__)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), MIXED, ids=str)
def test_weight_and_bias_may_have_their_own_dtype(where, idiom, x_dtype, w_dtype):
    inputs = inputs_of((200, 131), x_dtype, where, w_dtype)
    judge(fused_norm(idiom), idiom, inputs, [torch.randn(200, 131, device=where)])


@pytest.mark.parametrize("present", ["w", "b", ""])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_and_bias_may_be_absent(where, dtype, present):
    x, w, b = inputs_of((9, 33), dtype, where)
    w, b = (t if name in present else None for name, t in (("w", w), ("b", b)))
    cotangents = [torch.randn_like(x) for _ in range(2)]
    for idiom in (torch_layer_norm, deberta):
        judge(fused_norm(idiom), idiom, [x, w, b], cotangents[:1])
        judge(fused_add_norm(idiom), added(idiom), [x, randn(x.shape, dtype, where), w, b], cotangents)


def test_a_large_mean_does_not_drown_the_variance(where):
    """mean(x^2) - mean^2 would be all rounding here."""
    x = (torch.randn(64, 300, device=where) + 1000).requires_grad_()
    w, b = randn((300,), torch.float32, where), randn((300,), torch.float32, where)
    judge(fused_norm(torch_layer_norm), torch_layer_norm, [x, w, b], [torch.randn_like(x)])


@pytest.mark.parametrize("idiom", [torch_layer_norm, cohere, deberta], ids=lambda idiom: idiom.__name__)
def test_it_rounds_where_eager_does(where, idiom):
    """One rounding more or less changes a quarter of all numbers; another order of a sum hardly any."""
    inputs = inputs_of((200, 131), torch.bfloat16, where)
    same = fused_norm(idiom)(*inputs) == idiom(*inputs)
    assert same.float().mean() > 0.99


# Layouts.


def every_operator(x, other, w, dy):
    """All their outputs; `other` is residual and ds in turn."""
    y, mean, rstd = OPS.layer_norm(x, w, w, EPS, False, None)
    return [
        *(y, mean, rstd),
        *OPS.add_layer_norm(x, other, w, w, EPS, True, None),
        *OPS.layer_norm_bwd(dy, other, x, w, w, mean, rstd, False, True, True),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "other", "dy", "all"])
def test_every_layout_is_read(where, layout, which):
    """One tensor in the layout, then all; the values are those of contiguous inputs."""
    x, other, dy = (
        LAYOUTS[layout](t) if which in (name, "all") else t
        for name, t in zip(("x", "other", "dy"), torch.randn(3, 2, 5, 3, 16, device=where), strict=True)
    )
    if layout == "one number" and which in ("x", "all"):
        # A constant row has no variance: its rstd is 1 / sqrt(eps) and multiplies whatever rounding leaves.
        x = torch.zeros(1, 1, 1, 1, device=where).expand(2, 5, 3, 16)
    w = torch.randn(16, device=where)
    got = every_operator(x, other, w, dy)
    want = every_operator(x.contiguous(), other.contiguous(), w, dy.contiguous())
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_strided_weights_are_read(where):
    x = torch.randn(40, 16, device=where)
    wide = torch.randn(2, 16, 3, device=where)
    w, b = wide[0, :, 1], wide[1, :, 2]
    y = OPS.layer_norm(x, w, b, EPS, False, None)[0]
    assert torch.equal(y, OPS.layer_norm(x, w.contiguous(), b.contiguous(), EPS, False, None)[0])


def test_broadcast_cotangent_reaches_the_backward(where):
    inputs = inputs_of((4, 6, 32), torch.bfloat16, where)
    for dy in (torch.ones((), device=where), torch.randn(4, 1, 32, device=where)):
        judge(fused_norm(torch_layer_norm), torch_layer_norm, inputs, [dy.bfloat16().expand(4, 6, 32)])


FIXTURE = HealthCheck.function_scoped_fixture


@settings(max_examples=20, suppress_health_check=[FIXTURE])
@given(data=st.data())
def test_any_shape_stride_and_dtype(where, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    idiom = data.draw(st.sampled_from([torch_layer_norm, deberta]))
    x = any_rows(data, dtype, where)
    residual, w, b = (randn(s, dtype, where) for s in (x.shape, x.shape[-1:], x.shape[-1:]))
    cotangents = [torch.randn_like(x) for _ in range(2)]
    judge(fused_add_norm(idiom), added(idiom), [x, residual, w, b], cotangents)


# Gradients that nobody asked for.


def test_frozen_weights_get_no_gradient_and_cost_nothing(where, monkeypatch):
    def fail(*args):
        raise AssertionError("dw or db was computed")

    monkeypatch.setattr(kernels, "add_partials", fail)
    monkeypatch.setattr(kernels.formulas, "dw_term", fail)
    x, z = randn((4, 9), torch.float32, where), randn((4, 9), torch.float32, where)
    w = torch.ones(9, device=where)
    y, s = fused_add_norm(cohere)(x, z, w, w)
    (y + s + fused_norm(cohere)(x, w, w)).sum().backward()
    assert x.grad is not None
    _, mean, rstd = OPS.layer_norm(x.detach(), w, w, EPS, False, None)
    _, dw, db = OPS.layer_norm_bwd(z.detach(), None, x.detach(), w, w, mean, rstd, False, False, False)
    assert dw.shape == db.shape == (0,)


@pytest.mark.parametrize("frozen", ["w", "b"])
@pytest.mark.parametrize("used", ["y", "s", "both"])
def test_add_norm_with_one_gradient_missing(where, used, frozen):
    x, w, b = inputs_of((50, 33), torch.bfloat16, where)
    (w if frozen == "w" else b).requires_grad_(False)
    residual = randn(x.shape, x.dtype, where)
    pick = {"y": lambda outs: outs[0], "s": lambda outs: outs[1], "both": lambda outs: outs}[used]
    judge(
        lambda *a: pick(fused_add_norm(torch_layer_norm)(*a)),
        lambda *a: pick(added(torch_layer_norm)(*a)),
        [x, residual, w, b],
        [torch.randn_like(x) for _ in range(2 if used == "both" else 1)],
    )


def test_second_derivative_and_gradient_of_statistics_are_refused(where):
    x = randn((3, 8), torch.float32, where)
    y, mean, rstd = OPS.layer_norm(x, None, None, EPS, False, None)
    assert not mean.requires_grad and not rstd.requires_grad
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        dx.sum().backward()


# Exactness.


def test_nan_and_inf_propagate_row_by_row(where):
    x, w, b = (torch.randn(s, device=where) for s in ((4, 9), (9,), (9,)))
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    inputs = [t.requires_grad_() for t in (x, w, b)]
    judge(fused_norm(torch_layer_norm), torch_layer_norm, inputs, [torch.randn(4, 9, device=where)])


def test_the_same_bits_every_run(where):
    assert_same_bits_every_run(every_operator, where)


def test_inputs_are_left_alone(where):
    assert_inputs_are_left_alone(every_operator, where)


def test_sums_over_many_rows_lose_nothing(where):
    """A bfloat16 running sum would stop growing at 256; partial sums are float32."""
    x = torch.randn(1, 8, device=where).bfloat16().repeat(3000, 1)
    w, b = (torch.ones(8, device=where, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    fused_norm(torch_layer_norm)(x, w, b).sum().backward()
    truth = exact(torch_layer_norm, [x, w, b], [torch.ones(3000, 8, device=where)])[1:]
    for grad, t in zip((w.grad, b.grad), truth, strict=True):
        assert_as_accurate(grad, t.bfloat16(), t)


def test_float64_is_computed_in_float64(where):
    inputs = inputs_of((3, 7), torch.float64, where)
    truth = exact(torch_layer_norm, inputs, [torch.ones(3, 7, device=where)])[0]
    torch.testing.assert_close(fused_norm(torch_layer_norm)(*inputs).detach(), truth, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("cast", [True, False])
def test_gradcheck(cast):
    x, z = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    check = torch.autograd.gradcheck
    assert check(lambda x, w, b: OPS.layer_norm(x, w, b, EPS, cast, None)[0], (x, w, b))
    assert check(lambda x, z, w, b: OPS.add_layer_norm(x, z, w, b, EPS, cast, None)[:2], (x, z, w, b))


# Operators as PyTorch sees them.


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_opcheck(where, layout):
    """Mixed dtypes, so that the fakes' dtypes are seen."""
    x_dtype, w_dtype = MIXED[0]
    x, z, dy = (torch.randn(4, 3, 10, device=where).to(x_dtype) for _ in range(3))
    if layout == "transposed":
        x, z, dy = x.transpose(0, 1), z.transpose(0, 1), dy.transpose(0, 1)
    w, b = torch.randn(10, device=where).to(w_dtype), torch.randn(10, device=where).to(x_dtype)
    mean, rstd = torch.rand(x.shape[:-1], device=where), torch.rand(x.shape[:-1], device=where)
    leaf = lambda t: t.detach().requires_grad_()  # noqa: E731
    check = torch.library.opcheck
    check(OPS.layer_norm.default, (leaf(x), leaf(w), leaf(b), EPS, True, None))
    check(OPS.layer_norm.default, (leaf(x), None, leaf(b), EPS, False, torch.float32))
    check(OPS.add_layer_norm.default, (leaf(x), leaf(z), leaf(w), None, EPS, False, None))
    for ds, need_dw, need_db in ((z, True, False), (None, False, True)):
        check(OPS.layer_norm_bwd.default, (dy, ds, x, w, b, mean, rstd, True, need_dw, need_db))


def test_a_new_length_does_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")

    def step(x, residual, w):
        y, s, *_ = OPS.add_layer_norm(x, residual, w, w, EPS, False, None)
        return OPS.layer_norm(y + s, w, w, EPS, True, None)[0]

    compiled = torch.compile(step, backend=counter, dynamic=True)
    w = torch.randn(16, requires_grad=True)
    frames = []
    for T in (5, 7, 12, 64):
        compiled(torch.randn(T, 16, requires_grad=True), torch.randn(T, 16), w).sum().backward()
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


def test_bytes_moved_counts_every_tensor_once():
    x, w, b = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16), torch.empty(16, dtype=torch.bfloat16)
    row, xb, wb, bb = torch.empty(8), 8 * 16 * 2, 16 * 4, 16 * 2
    bytes_of = lambda op, *args: BYTES_MOVED[op.default](*args)  # noqa: E731
    assert bytes_of(OPS.layer_norm, x, w, b, EPS, False, None) == 2 * xb + wb + bb
    assert bytes_of(OPS.layer_norm, x, w, b, EPS, True, None) == xb + wb + bb + 2 * xb
    assert bytes_of(OPS.layer_norm, x, None, b, EPS, False, torch.float32) == xb + bb + 2 * xb
    assert bytes_of(OPS.add_layer_norm, x, x, w, b, EPS, False, None) == 4 * xb + wb + bb
    assert bytes_of(OPS.layer_norm_bwd, x, x, x, w, b, row, row, False, True, True) == 4 * xb + 2 * wb + bb
    assert bytes_of(OPS.layer_norm_bwd, x, None, x, w, b, row, row, False, False, False) == 3 * xb + wb


def test_the_output_is_made_again_from_the_sum_that_is_kept():
    x, z, w, b = (torch.randn(s) for s in ((5, 12), (5, 12), (12,), (12,)))
    args = (x, z, w, b, EPS, True, None)
    outs = OPS.add_layer_norm(*args)
    by = REMADE[OPS.add_layer_norm.default]
    assert by is not None and REMADE[OPS.layer_norm.default] is None
    op, again = by(args, outs.__getitem__)
    assert torch.equal(op(*again)[0], outs[0])


X, W = torch.empty(3, 8), torch.empty(8)
REFUSED = {
    "layer_norm: x must be floating": lambda: OPS.layer_norm(X.int(), W, W, EPS, False, None),
    "layer_norm: w must be": lambda: OPS.layer_norm(X, W[:4], W, EPS, False, None),
    "layer_norm: b must be": lambda: OPS.layer_norm(X, W, X, EPS, False, None),
    "layer_norm: dtype": lambda: OPS.layer_norm(X, W, W, EPS, True, torch.float32),
    "add_layer_norm: x and residual must have": lambda: OPS.add_layer_norm(X, X[:1], W, W, EPS, False, None),
    "add_layer_norm: x and residual must share": lambda: OPS.add_layer_norm(X, X.half(), W, W, EPS, False, None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_input_is_one_clear_error(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
