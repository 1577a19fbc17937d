"""norm_rope: the operator against float64 autograd of norms and rotation one after the other, torch and Triton."""

import itertools

import pytest
import torch
from _oracle import judge
from _rows import running
from conftest import HAS_GPU
from fused_backend.derivations import norm_rope as page
from fused_backend.derivations._prove import residual
from fused_backend.kernels import norm_rope as kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rope import cotangents, eager_qk, inputs

OPS = torch.ops.fused_backend
EPS = 1e-3
# B, H, Hk, S, K, R. Weights have their gradients from all heads and positions: few would only measure luck.
SHAPES = [
    pytest.param((2, 4, 2, 33, 16, 16), id="grouped-query"),
    pytest.param((1, 3, 3, 50, 12, 12), id="no-power-of-two"),
    pytest.param((2, 5, 1, 40, 20, 10), id="partial-with-an-odd-half"),
    pytest.param((1, 67, 5, 7, 128, 128), id="more-heads-than-a-program"),
    pytest.param((2, 4, 2, 0, 16, 16), id="no-positions"),
]


class Triton:
    norm_rope_qk = staticmethod(kernels._forward)
    norm_rope_qk_bwd = staticmethod(kernels._backward)


@pytest.fixture(params=["reference", "triton"])
def where(request):
    with running(request.param, Triton, ("norm_rope_qk", "norm_rope_qk_bwd")) as device:
        yield device


def norm(x, w, offset, cast):
    """As models write it: over the last dimension, the weight before or after the cast."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    if cast:
        return xhat.to(x.dtype) if w is None else w * xhat.to(x.dtype)
    return (xhat if w is None else xhat * (offset + w.float())).to(x.dtype)


def one_after_the_other(rotary_dim, interleaved, offset, cast, out_dtype):
    def eager(q, k, wq, wk, cos, sin):
        q, k = norm(q, wq, offset, cast), norm(k, wk, offset, cast)
        return eager_qk(q, k, cos, sin, rotary_dim, interleaved, False, out_dtype)

    return eager


def ours(rotary_dim, interleaved, offset, cast, out_dtype):
    def fused(q, k, wq, wk, cos, sin):
        return OPS.norm_rope_qk(
            q, k, wq, wk, cos, sin, EPS, offset, cast, rotary_dim, interleaved, out_dtype
        )[:2]  # fmt: skip

    return fused


def compare(shape, device, dtype, layout="projected", weight=torch.bfloat16, cast=True, offset=0.0, **how):
    interleaved, out_dtype = how.pop("interleaved", False), how.pop("out_dtype", dtype)
    q, k, cos, sin = inputs(shape, layout, dtype, device, **how)
    weights = [torch.randn(shape[4], device=device).to(weight).requires_grad_() if weight else None for _ in "qk"]
    config = (shape[5], interleaved, offset, cast, out_dtype)
    judge(ours(*config), one_after_the_other(*config), [q, k, *weights, cos, sin], cotangents(shape, device))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_as_accurate_as_one_after_the_other(shape, interleaved, where):
    compare(shape, where, torch.bfloat16, interleaved=interleaved)


DTYPES, WEIGHTS = (torch.float32, torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16, None)
FORMS = ("rounded first", "rounded last", "one plus")
# The interpreter takes seconds for each: any two values of dtype, weight and form meet, and what rounds u otherwise.
MEET = {(dtype, weight, FORMS[(i + j + 2) % 3]) for i, dtype in enumerate(DTYPES) for j, weight in enumerate(WEIGHTS)}
MEET |= {(torch.float16, torch.bfloat16, "rounded first"), (torch.bfloat16, torch.bfloat16, "one plus")}
EVERY = [(torch.float64, torch.float32, "rounded first"), *itertools.product(DTYPES, WEIGHTS, FORMS)]


@pytest.mark.parametrize(
    ("where", "dtype", "weight", "form"),
    [("reference", *c) for c in itertools.product((*DTYPES, torch.float64), WEIGHTS, FORMS)]
    + [("triton", *c) for c in EVERY if c in MEET or c[0] == torch.float64 or HAS_GPU],
    indirect=["where"],
    ids=str,
)
def test_every_rounding_and_dtype(where, dtype, weight, form):
    cast, offset = form == "rounded first", float(form == "one plus" and weight is not None)
    out_dtype = dtype if not cast or weight is None else torch.promote_types(dtype, weight)
    compare((2, 4, 2, 33, 16, 16), where, dtype, weight=weight, cast=cast, offset=offset, out_dtype=out_dtype)


LAYOUTS = {"contiguous": True, "packed": False, "channels-strided": True}  # and the tables that the interpreter reads


@pytest.mark.parametrize(
    ("where", "layout", "wide"),
    [("reference", *c) for c in itertools.product(LAYOUTS, (True, False))]
    + [("triton", *c) for c in itertools.product(LAYOUTS, (True, False)) if HAS_GPU or c in LAYOUTS.items()],
    indirect=["where"],
    ids=str,
)
def test_every_layout_in_place(where, layout, wide):
    compare((2, 4, 2, 33, 16, 12), where, torch.bfloat16, layout, wide=wide, batched=True)


@settings(max_examples=6)
@given(
    sizes=st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 4), st.integers(17, 28)),
    half=st.integers(2, 9),
    rest=st.integers(0, 7),
    interleaved=st.booleans(),
)
def test_any_sizes(sizes, half, rest, interleaved):
    with running("triton", Triton, ("norm_rope_qk", "norm_rope_qk_bwd")) as device:
        compare(
            (*sizes, 2 * half + rest, 2 * half), device, torch.float32, weight=torch.float32, interleaved=interleaved
        )


@pytest.mark.parametrize("frozen", ["weights", "q", "tables only"])
def test_what_is_frozen_has_no_gradient(frozen, where):
    q, k, cos, sin = inputs((2, 4, 2, 5, 16, 16), "projected", torch.float32, where)
    wq, wk = (torch.randn(16, device=where, requires_grad=frozen != "weights") for _ in "qk")
    if frozen == "q":
        q.requires_grad_(False)
    yq, yk = ours(16, False, 0.0, True, torch.float32)(q, k, wq, wk, cos, sin)
    (yq.sum() + yk.square().sum()).backward()
    assert (wq.grad is None) == (wk.grad is None) == (frozen == "weights") and k.grad is not None
    assert (q.grad is None) == (frozen == "q")


def test_what_does_not_fit_is_refused():
    q, k, cos, sin = inputs((2, 4, 2, 5, 16, 16), "projected", torch.float32, torch.device("cpu"))
    w = torch.ones(16)
    call = lambda *args, r=16, offset=0.0: OPS.norm_rope_qk(  # noqa: E731
        *args, EPS, offset, True, r, False, torch.float32
    )
    for wrong, match in (
        (lambda: call(q, k[..., :8], w, w, cos, sin), "q and k differ in heads only"),
        (lambda: call(q, k, w, None, cos, sin), "wq and wk are"),
        (lambda: call(q, k, w[:8], w, cos, sin), "there are K weights"),
        (lambda: call(q, k, w, w, cos, sin, r=5), "rotary_dim is even"),
        (lambda: call(q, k, w, w, cos[:, :3], sin[:, :3]), "cos and sin are"),
        (lambda: call(q, k, w, w, cos, sin, offset=1.0), "needs offset 0"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()


def test_a_second_derivative_is_refused():
    q, k, cos, sin = inputs((1, 2, 1, 3, 8, 8), "projected", torch.float32, torch.device("cpu"))
    yq, yk = ours(8, False, 0.0, True, torch.float32)(q, k, None, None, cos, sin)
    (dq,) = torch.autograd.grad(yq.square().sum() + yk.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


MUTANTS = {
    "xhat": lambda x, rstd: x,
    "scaled": lambda scale, xhat: xhat,
    "du_first": lambda dy1, dy2, c1, s2: dy1 * c1 - dy2 * s2,
    "du_second": lambda dy1, dy2, c2, s1: dy2 * c2 + dy1 * s1,
    "c_term": lambda du, scale, xhat: du * xhat,
    "dx": lambda du, scale, xhat, rstd, c: rstd * (scale * du),
    "dw_term": lambda du, xhat: du,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_formula_matters(name, monkeypatch):
    monkeypatch.setattr(page, name, MUTANTS[name])
    dw_of_a_pair = page.THEOREMS[3:5] if name in ("du_first", "du_second", "dw_term") else page.THEOREMS[:1]
    assert any(residual(theorem) != 0 for theorem in dw_of_a_pair)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(2, 32, 8, 300, 128, 128), (1, 16, 16, 257, 256, 64)])
def test_natively(shape):
    for interleaved in (False, True):
        compare(shape, torch.device("cuda"), torch.bfloat16, interleaved=interleaved)
