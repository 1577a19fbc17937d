"""layer_norm: which spellings the pattern recognises, which look-alikes it refuses, and that the numbers are right."""

import pytest
import torch
import torch.nn.functional as F
from _graphs import OPTIONS, assert_fused, assert_refused, assert_right, assert_unseen, operators
from _models import batch, draws, tiny
from _training import assert_step_as_accurate
from fused_backend.compiler import explain

EPS = 1e-6
BF16 = torch.bfloat16


def pattern_inputs(*shape, dtype=torch.float32, w_dtype=None):
    """x, w, b."""
    x = (torch.randn(*shape) + 2).to(dtype).requires_grad_()
    return [x, *(torch.randn(shape[-1], dtype=w_dtype or dtype).requires_grad_() for _ in range(2))]


def centred(h, dim=-1):
    return h - h.mean(dim, keepdim=True)


def rstd_of(c, power=2, dim=-1):
    return torch.rsqrt(c.pow(power).mean(dim, keepdim=True) + EPS)


def normalised(x):
    c = centred(x.float())
    return c * rstd_of(c)


def torch_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b, EPS)


def by_division(x, w, b):
    h = x.float()
    mean = torch.mean(h, -1, keepdim=True)
    return (w * ((h - mean) / torch.sqrt(EPS + torch.square(h - mean).mean([-1], True))).to(x.dtype)) + b


def by_variance(x, w, b):
    h = x.float()
    h = (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, unbiased=False, keepdim=True) + EPS)
    return (b.float() + h * w.float()).type_as(x)


def by_corrected_variance(x, w, b):
    h = x.float()
    variance = torch.var(h, dim=h.ndim - 1, correction=0, keepdim=True)
    return (((h - h.mean(-1, True)) * (variance + EPS) ** -0.5) * w.float() + b.float()).to(x.dtype)


SPELLINGS = {
    "torch": torch_norm,
    "torch, keywords": lambda x, w, b: F.layer_norm(x, bias=b, weight=w, normalized_shape=[x.shape[-1]]),
    "torch in float32": lambda x, w, b: F.layer_norm(x.float(), (8,), w.float(), b.float()).type_as(x),
    "torch in float32, result kept": lambda x, w, b: F.layer_norm(x.float(), (8,), w.float(), b.float()) * 2.0,
    "cohere": lambda x, w, b: (w.to(torch.float32) * normalised(x)).to(x.dtype) * b,
    "with bias": lambda x, w, b: (w.float() * normalised(x) + b.float()).to(x.dtype),
    "deberta": by_division,
    "deberta without bias": lambda x, w, b: w * normalised(x).to(x.dtype),
    "variance": by_variance,
    "corrected variance": by_corrected_variance,
    "float32 result": lambda x, w, b: normalised(x).sin(),
    "no-op casts and slices": lambda x, w, b: torch_norm(x.contiguous()[:, 0:], w, b.to(b.dtype) * 1.0) * 1.0,
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_are_fused(spelling, dtype):
    inputs = pattern_inputs(3, 5, 8, dtype=dtype)
    assert_fused(SPELLINGS[spelling], inputs, "layer_norm")
    assert operators(SPELLINGS[spelling], inputs)["layer_norm"][0].meta["example_value"].dtype == dtype
    assert_unseen(SPELLINGS[spelling], inputs, "rms_norm")


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_without_weight_or_bias_is_fused(dtype):
    x, w, b = pattern_inputs(3, 8, dtype=dtype)
    assert_fused(lambda x: F.layer_norm(x, (8,)), [x], "layer_norm")
    assert_fused(lambda x, w: F.layer_norm(x, (8,), w), [x, w], "layer_norm")
    assert_fused(lambda x, b: F.layer_norm(x, (8,), None, b), [x, b], "layer_norm")
    assert_fused(lambda x: normalised(x).to(x.dtype), [x], "layer_norm")


def test_modules_are_fused():
    for norm in (torch.nn.LayerNorm(8), torch.nn.LayerNorm(8, bias=False), torch.nn.LayerNorm(8, elementwise_affine=0)):
        assert explain(norm, pattern_inputs(3, 8)[0]).counts() == {"layer_norm": (1, 0)}


def test_weights_of_their_own_dtype_are_fused_where_written_by_hand():
    inputs = pattern_inputs(3, 5, 8, dtype=BF16, w_dtype=torch.float32)
    assert_fused(by_division, inputs, "layer_norm")
    assert_fused(SPELLINGS["with bias"], inputs, "layer_norm")


def test_float64_is_fused_where_it_is_computed_in_float64():
    inputs = pattern_inputs(3, 5, 8, dtype=torch.float64)
    assert explain(torch_norm, *inputs).counts() == {"layer_norm": (1, 0)}


def test_a_cast_from_float64_stays_outside():
    inputs = pattern_inputs(3, 5, 8, dtype=torch.float64)
    assert_fused(SPELLINGS["cohere"], inputs, "layer_norm")
    assert operators(SPELLINGS["cohere"], inputs)["layer_norm"][0].meta["example_value"].dtype == torch.float32


def test_a_weight_of_ones_more_is_an_ordinary_weight():
    assert_fused(lambda x, w, b: torch_norm(x, w + 1, b), pattern_inputs(3, 5, 8, dtype=BF16), "layer_norm")


# --- casts around it


def dtypes_read(fn, inputs):
    """dtypes of x, w and b of the operator, and the dtype that it is asked for."""
    x, w, b, *_, dtype = operators(fn, inputs)["layer_norm"]
    return [t.meta["example_value"].dtype for t in (x, w, b)], dtype


def test_casts_in_front_and_behind_are_part_of_it():
    inputs = pattern_inputs(3, 5, 8, dtype=BF16)
    assert dtypes_read(SPELLINGS["torch in float32"], inputs) == ([BF16] * 3, None)
    assert dtypes_read(SPELLINGS["torch in float32, result kept"], inputs) == ([BF16] * 3, torch.float32)
    wide = pattern_inputs(3, 5, 8)
    assert dtypes_read(lambda x, w, b: torch_norm(x, w, b).to(BF16), wide) == ([torch.float32] * 3, BF16)


def test_casts_that_others_read_stay():
    """Eager adds the gradients of two readers in float32; the operator would round its own first."""

    def shared(x, w, b):
        h = x.float()
        return F.layer_norm(h, (8,), w.float(), b.float()).to(BF16) + h.sin().to(BF16)

    def several(x, w, b):
        y = torch_norm(x, w, b)
        return y.to(BF16) + y.to(BF16).sin()

    inputs = pattern_inputs(3, 5, 8, dtype=BF16)
    assert_fused(shared, inputs, "layer_norm")
    assert dtypes_read(shared, inputs) == ([torch.float32, BF16, BF16], BF16)
    wide = pattern_inputs(3, 5, 8)
    assert_fused(several, wide, "layer_norm")
    assert dtypes_read(several, wide)[1] is None


def test_a_cast_without_gradient_stays():
    def stopped(x, w, b):
        with torch.no_grad():
            h = x.float()
        return F.layer_norm(h, (8,), w.float(), b.float()) + 0 * x

    inputs = pattern_inputs(3, 5, 8, dtype=BF16)
    assert_fused(stopped, inputs, "layer_norm")
    assert dtypes_read(stopped, inputs)[0][0] == torch.float32


# --- the residual add


def block(x, r, w, b):
    s = r + x
    return s, torch_norm(s, w, b)


def residual_inputs(dtype=torch.float32):
    x, w, b = pattern_inputs(3, 5, 8, dtype=dtype)
    return [x, torch.randn(3, 5, 8, dtype=dtype).requires_grad_(), w, b]


def olmo_block(x, r, w, b):
    s = r + x
    return s, F.layer_norm(s.to(torch.float32), (8,), None, None).to(s.dtype) * w + b


def cohere_block(x, r, w, b):
    s = r + x
    return s + b, SPELLINGS["cohere"](s, w, b)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("fn", [block, olmo_block, cohere_block])
def test_residual_add_becomes_one_operator(fn, dtype):
    inputs = residual_inputs(dtype)
    assert_fused(fn, inputs, "layer_norm")
    found = operators(fn, inputs)
    assert "add_layer_norm" in found and "layer_norm" not in found


def test_residual_add_with_broadcasting_stays_outside():
    x, _, w, b = residual_inputs()
    inputs = [x, torch.randn(5, 8).requires_grad_(), w, b]
    assert_fused(block, inputs, "layer_norm")
    assert "add_layer_norm" not in operators(block, inputs)


def test_a_sum_with_two_norms_is_kept_once():
    """Attention and MLP of GPT-NeoX and Falcon-40B normalise one sum, each with its own weight."""

    def parallel(x, r, w, b):
        s = r + x
        return s + torch_norm(s, w, b) + torch_norm(s, b, w).sin()

    inputs = residual_inputs()
    assert_fused(parallel, inputs, "layer_norm", 2)
    assert {"add_layer_norm", "layer_norm"} <= set(operators(parallel, inputs))


def test_a_residual_written_to_before_the_norm_stays_outside():
    def written(r, w, b):
        a = r.sin()
        s = a + r
        a.zero_()
        return torch_norm(s, w, b)

    x, w, b = pattern_inputs(3, 5, 8)
    inputs = [x.detach(), w, b]
    assert_fused(written, inputs, "layer_norm")
    assert "add_layer_norm" not in operators(written, inputs)


# --- near misses

NEAR_MISSES = {
    "wrong dim": (lambda x, w, b: w * (centred(x, -2) * rstd_of(centred(x, -2), dim=-2)), None),
    "mean over another dim": (lambda x, w, b: w * (centred(x, -2) * rstd_of(centred(x))), ""),
    "centred twice": (lambda x, w, b: w * (centred(x) * rstd_of(centred(centred(x).sin()))), ""),
    "not centred above": (lambda x, w, b: w * (x * rstd_of(centred(x))), "sub"),
    "mean added": (lambda x, w, b: w * ((x + x.mean(-1, keepdim=True)) * rstd_of(centred(x))), "sub"),
    "unbiased": (lambda x, w, b: w * (centred(x) * torch.rsqrt(x.var(-1, keepdim=True) + EPS)), "var"),
    "keepdim false": (lambda x, w, b: centred(x) * torch.rsqrt(x.var(-1, correction=0) + EPS).unsqueeze(-1), ""),
    "eps a tensor": (
        lambda x, w, b: centred(x) * torch.rsqrt(centred(x).pow(2).mean(-1, keepdim=True) + w.sum().abs()), ""
    ),
    "rounded between": (lambda x, w, b: w * (centred(x) * rstd_of(centred(x)).to(BF16)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused(name):
    fn, reason = NEAR_MISSES[name]
    inputs = pattern_inputs(3, 5, 8)
    if reason is None:
        assert_unseen(fn, inputs, "layer_norm")
    else:
        assert_refused(fn, inputs, "layer_norm", reason)


def test_narrow_arithmetic_is_refused():
    """Without a cast to float32 every step rounds to bfloat16."""
    narrow = lambda x, w, b: w * (centred(x) * rstd_of(centred(x)))  # noqa: E731
    assert_refused(narrow, pattern_inputs(3, 5, 8, dtype=BF16), "layer_norm")


def test_torch_norm_over_two_dimensions_is_refused():
    x, w, b = pattern_inputs(3, 5, 8)[0], torch.randn(5, 8).requires_grad_(), torch.randn(5, 8).requires_grad_()
    assert_refused(lambda x, w, b: F.layer_norm(x, (5, 8), w, b), [x, w, b], "layer_norm", "2 dimensions")


def test_weights_of_another_dtype_in_torch_norm_are_refused():
    report = explain(torch_norm, *pattern_inputs(3, 5, 8, dtype=BF16, w_dtype=torch.float32))
    assert report.counts() == {"layer_norm": (0, 1)} and "differ" in report.decisions[0].reason


def test_a_bias_or_weight_that_is_no_vector_stays_outside():
    x, w, _ = pattern_inputs(3, 5, 8)
    wide = torch.randn(5, 8).requires_grad_()
    assert_fused(SPELLINGS["with bias"], [x, w, wide], "layer_norm")
    assert_fused(SPELLINGS["with bias"], [x, wide, w], "layer_norm")
    heads = pattern_inputs(3, 5, 8, dtype=BF16)[0]
    assert_fused(SPELLINGS["cohere"], [heads, wide.detach().to(BF16).requires_grad_(), w], "layer_norm")


def written_clone(x, w, b):
    h = x.clone()
    h.mul_(2.0)
    return torch_norm(h, w, b)


def written_result(x, w, b):
    y = torch_norm(x, w, b)
    y.mul_(2.0)
    return y


def written_by_hand(x, w, b):
    h = x * 1.5
    y = SPELLINGS["cohere"](h, w, b)
    h.add_(1.0)
    return y + h


def test_what_was_written_to_before_is_fused():
    assert_fused(written_clone, pattern_inputs(3, 5, 8), "layer_norm")


@pytest.mark.parametrize("fn", [written_result, written_by_hand])
def test_what_is_written_to_is_refused(fn):
    assert_refused(fn, pattern_inputs(3, 5, 8), "layer_norm", "in place")


def test_a_normalisation_without_gradient_is_refused():
    def constant_rstd(x, w, b):
        with torch.no_grad():
            rstd = rstd_of(centred(x))
        return w * (centred(x) * rstd)

    def constant_x(x, w, b):
        with torch.no_grad():
            h = x.float()
        return (w.float() * (centred(h) * rstd_of(centred(h)))).to(x.dtype) + 0 * x

    assert_refused(constant_rstd, pattern_inputs(3, 5, 8), "layer_norm")
    assert_refused(constant_x, pattern_inputs(3, 5, 8, dtype=BF16), "layer_norm")


def test_norm_over_head_dim_keeps_strides():
    def heads(norm):
        def fn(x, w, b):
            q = x.view(2, 6, 4, 8).transpose(1, 2)
            return norm(q, w, b).transpose(1, 2).reshape(2, 6, 32)

        return fn

    x, w, b = torch.randn(2, 6, 32).requires_grad_(), *pattern_inputs(3, 8)[1:]
    for norm in (torch_norm, SPELLINGS["with bias"]):
        assert_fused(heads(norm), [x, w, b], "layer_norm")


def test_a_quotient_of_an_activation_is_not_taken_for_a_norm():
    """x / sqrt(v) is read as x * rsqrt(v), which no node of the graph computes: nothing may be built on it."""
    assert_right(lambda g, v, b: F.silu(g) / torch.sqrt(v.abs() + 1) + b, pattern_inputs(3, 5, 8))
    assert_right(lambda x, w, b: F.silu(x) * (x / x.var(-1, correction=0, keepdim=True).sqrt()), pattern_inputs(3, 8))


def test_autocast_computes_it_in_float32():
    def autocast(x, w, b):
        with torch.autocast("cpu", BF16):
            return F.linear(F.layer_norm(x, (8,), w, b), x[0, :5])

    assert_fused(autocast, pattern_inputs(3, 5, 8), "layer_norm")


def test_a_new_length_keeps_the_graph():
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="fused", options=OPTIONS, dynamic=True)
    for length in (3, 4, 7):
        x, r, w, b = residual_inputs()
        x, r = (t.repeat(length, 1, 1) for t in (x, r))
        for ours, eager in zip(compiled(x, r, w, b), block(x, r, w, b), strict=True):
            torch.testing.assert_close(ours, eager)


# --- models: sites of layer_norm in two layers, counted by reading the model

MODELS = {
    "gpt2": (5, {}),
    "gpt_neox": (5, {}),  # attention and MLP read two norms of one sum
    "phi": (3, {}),  # one norm feeds both attention and MLP
    "phi with q and k norm": (7, {"qk_layernorm": True}),
    "starcoder2": (5, {}),
    "stablelm": (5, {}),
    "stablelm with norms of heads": (17, {"qk_layernorm": True}),  # 4 heads of q, 2 of k
    "falcon": (3, {"head_dim": None}),  # one norm feeds both attention and MLP
    "falcon with new decoder": (5, {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmo": (5, {}),  # without weights
    "cohere": (3, {}),  # one norm feeds both attention and MLP
    "cohere with q and k norm": (7, {"use_qk_norm": True}),
    "nemotron": (5, {}),  # weight + 1
    "opt": (5, {}),
    "gptj": (3, {"rotary_dim": 8}),
    "phimoe": (5, {"num_local_experts": 4}),
}  # fmt: skip


def model(name):
    return tiny(name.split(" ")[0], **MODELS[name][1])


@pytest.mark.parametrize("name", MODELS)
def test_every_norm_of_a_model_is_fused_and_every_gradient_right(name):
    """Of variants of a model that is trained here, only what is decided."""
    report = explain(model(name), **batch()) if "with" in name else assert_step_as_accurate(model(name), draws()).report
    assert report.counts()["layer_norm"] == (MODELS[name][0], 0), str(report)
    assert "rms_norm" not in report.counts(), str(report)


@pytest.mark.parametrize("name", ["gpt_neox", "olmo", "cohere"])
def test_models_in_bfloat16(name):
    assert_step_as_accurate(model(name).to(BF16), draws())
