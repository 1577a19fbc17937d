"""rms_norm: which spellings the pattern recognises, which look-alikes it refuses, and that the numbers are right."""

import pytest
import torch
import torch.nn.functional as F
from _graphs import assert_fused, assert_refused, assert_unseen, operators

EPS = 1e-6


def pattern_inputs(*shape, dtype=torch.float32, w_dtype=None):
    x = torch.randn(*shape, dtype=dtype).requires_grad_()
    w = torch.randn(shape[-1], dtype=w_dtype or dtype).requires_grad_()
    return [x, w]


def rstd_of(h, power=2, dim=-1):
    return torch.rsqrt(h.pow(power).mean(dim, keepdim=True) + EPS)


SPELLINGS = {
    "llama": lambda x, w: w * (x.float() * rstd_of(x.float())).to(x.dtype),
    "weight on the right": lambda x, w: (x.float() * rstd_of(x.float())).type_as(x) * w,
    "operators": lambda x, w: w * (x.float() * ((x.float() ** 2).mean(-1, keepdim=True) + EPS) ** -0.5).to(x.dtype),
    "a product with itself": lambda x, w: (
        w * (x.float() / torch.sqrt((x.float() * x.float()).mean(dim=-1, keepdim=True) + EPS)).to(x.dtype)
    ),
    "reciprocal": lambda x, w: (
        w * (x.float() * (1.0 / torch.sqrt(EPS + torch.square(x.float()).mean([-1], True)))).to(x.dtype)
    ),
    "positive dim": lambda x, w: w * (x.float() * rstd_of(x.float(), dim=x.ndim - 1)).to(x.dtype),
    "t5": lambda x, w: w * (x * rstd_of(x.to(torch.float32))).to(w.dtype),
    "olmo2": lambda x, w: (w * (x.float() * rstd_of(x.float()))).to(x.dtype),
    "helium": lambda x, w: (w.to(torch.float32) * (x.float() * rstd_of(x.float()))).to(x.dtype),
    "gemma": lambda x, w: (x.float() * rstd_of(x.float()) * (1.0 + w.float())).type_as(x),
    "no-op casts and slices": lambda x, w: (w.contiguous() * (x.float()[:, 0:] * rstd_of(x.float())).to(x.dtype)) * 1.0,
    "torch": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
    "a sum over their number": lambda x, w: (
        w * (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / x.shape[-1] + EPS)).to(x.dtype)
    ),
    "torch in float32": lambda x, w: F.rms_norm(x.float(), (x.shape[-1],), w.float(), EPS).to(x.dtype),
    "torch without eps": lambda x, w: F.rms_norm(x, (x.shape[-1],), w),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_are_fused(spelling, dtype):
    assert_fused(SPELLINGS[spelling], pattern_inputs(3, 5, 8, dtype=dtype), "rms_norm")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_casts_to_float32_are_inside_the_operator(spelling):
    """It reads and keeps x as the model has it: a norm is not matched from behind its first cast."""
    inputs = pattern_inputs(3, 5, 8, dtype=torch.bfloat16)
    assert operators(SPELLINGS[spelling], inputs)["rms_norm"][0].meta["example_value"].dtype == torch.bfloat16


def test_a_norm_that_stays_in_float32_is_fused_behind_its_cast():
    def float32(x, w):
        h = x.float()
        return w * (h * rstd_of(h))

    for fn in (float32, lambda x, w: F.rms_norm(x.float(), (8,), w.float(), EPS)):
        assert_fused(fn, pattern_inputs(3, 5, 8, dtype=torch.bfloat16), "rms_norm")


def test_without_weight_is_fused():
    assert_fused(lambda x: (x.float() * rstd_of(x.float())).to(x.dtype), pattern_inputs(3, 8)[:1], "rms_norm")
    assert_fused(lambda x: F.rms_norm(x, (8,)), pattern_inputs(3, 8)[:1], "rms_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [8, 13, 64])
def test_the_l2_norm_is_fused(channels, dtype):
    """A sum where the others have a mean."""

    def l2(x):
        h = x.float()
        return (h * torch.rsqrt((h * h).sum(dim=-1, keepdim=True) + EPS)).to(x.dtype)

    inputs = pattern_inputs(37, channels, dtype=dtype)[:1]
    assert_fused(l2, inputs, "rms_norm")
    assert operators(l2, inputs)["rms_norm"][0].meta["example_value"].dtype == dtype


def test_module_and_mixed_dtypes_are_fused():
    norm = torch.nn.RMSNorm(8)
    assert_fused(lambda x: norm(x), pattern_inputs(3, 8)[:1], "rms_norm")
    mixed = pattern_inputs(3, 5, 8, dtype=torch.bfloat16, w_dtype=torch.float32)
    assert_fused(SPELLINGS["llama"], mixed, "rms_norm")


def test_norm_over_head_dim_keeps_strides():
    def heads(x, w):
        q = x.view(2, 6, 4, 8).transpose(1, 2)
        q = SPELLINGS["llama"](q, w)
        return q.transpose(1, 2).view(2, 6, 32)

    x, w = torch.randn(2, 6, 32).requires_grad_(), torch.randn(8).requires_grad_()
    assert_fused(heads, [x, w], "rms_norm")


def test_residual_add_becomes_one_operator():
    def block(x, r, w):
        s = r + x
        return s, SPELLINGS["llama"](s, w)

    x, w = pattern_inputs(3, 5, 8)
    inputs = [x, torch.randn(3, 5, 8).requires_grad_(), w]
    assert_fused(block, inputs, "rms_norm")
    assert "add_rms_norm" in operators(block, inputs)


WEIGHTLESS = {
    "weightless": lambda x, w: (x.float() * rstd_of(x.float())).to(x.dtype),
    "weightless t5": lambda x, w: (x * rstd_of(x.float())).type_as(x),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS | WEIGHTLESS)
def test_the_narrow_tensor_is_read_and_kept_whatever_casts_there_are(spelling, dtype):
    """A float32 copy as the operand would be the same numbers in twice the memory, and no residual add."""
    norm = (SPELLINGS | WEIGHTLESS)[spelling]

    def block(x, r, w):
        s = r + x
        return s, norm(s, w)

    x, w = pattern_inputs(3, 5, 8, dtype=dtype)
    assert operators(norm, [x, w])["rms_norm"][0].meta["example_value"].dtype == dtype
    inputs = [x, torch.randn(3, 5, 8, dtype=dtype).requires_grad_(), w]
    assert_fused(block, inputs, "rms_norm")
    assert [t.meta["example_value"].dtype for t in operators(block, inputs)["add_rms_norm"][:2]] == [dtype] * 2


@pytest.mark.parametrize("spelling", ["gemma", "olmo2", "helium"])
def test_a_float32_result_of_a_narrow_input_keeps_its_dtype(spelling):
    """Without the last cast the operator reads the float32 copy: its result has the dtype of what it reads."""

    def wide(x, w):
        return SPELLINGS[spelling](x.float(), w) * 2.0

    assert_fused(wide, pattern_inputs(3, 5, 8, dtype=torch.bfloat16), "rms_norm")


def test_residual_add_with_broadcasting_stays_outside():
    def block(x, r, w):
        s = r + x
        return s, SPELLINGS["llama"](s, w)

    x, w = pattern_inputs(3, 5, 8)
    inputs = [x, torch.randn(5, 8).requires_grad_(), w]
    assert_fused(block, inputs, "rms_norm")
    assert "add_rms_norm" not in operators(block, inputs)


@pytest.mark.parametrize("act", ["silu", "sigmoid"])
def test_gated_norm_becomes_one_operator(act):
    def gated(x, w, z):
        return (SPELLINGS["llama"](x, w) * getattr(torch.nn.functional, act)(z.to(torch.float32))).to(x.dtype)

    inputs = [
        *pattern_inputs(3, 5, 8, dtype=torch.bfloat16),
        torch.randn(3, 5, 8, dtype=torch.bfloat16).requires_grad_(),
    ]
    assert_fused(gated, inputs, "rms_norm")
    assert "gated_rms_norm" in operators(gated, inputs)


NEAR_MISSES = {
    "a sum over rows": (lambda x, w: w * x * torch.rsqrt(x.pow(2).sum(0, keepdim=True) + EPS), ""),
    "a sum of cubes": (lambda x, w: w * x * torch.rsqrt(x.abs().pow(3).sum(-1, keepdim=True) + EPS), "abs"),
    "wrong dim": (lambda x, w: w * (x * rstd_of(x, dim=-2)), "mean"),
    "all dims": (lambda x, w: w * (x * rstd_of(x, dim=(-2, -1))), "mean"),
    "mean of |x|": (lambda x, w: w * (x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + EPS)), "pow"),
    "cube": (lambda x, w: w * (x * torch.rsqrt((x.abs() ** 3).mean(-1, keepdim=True) + EPS)), "abs"),
    "another tensor's mean": (lambda x, w: w * (x * rstd_of(x.sin())), ""),
    "keepdim false": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + EPS).unsqueeze(-1)), "unsqueeze"),
    "eps a tensor": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w.sum().abs())), ""),
    "rounded between": (lambda x, w: w * (x * rstd_of(x).to(torch.bfloat16)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused(name):
    fn, reason = NEAR_MISSES[name]
    assert_refused(fn, pattern_inputs(3, 5, 8), "rms_norm", reason)


def test_a_sum_over_another_number_is_no_mean():
    def norm(x, w):
        return w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 5 + EPS))

    assert_unseen(norm, pattern_inputs(3, 5, 8), "rms_norm")


def test_layer_norm_written_by_hand_is_no_site():
    def layer_norm(x, w):
        centred = x - x.mean(-1, keepdim=True)
        return w * (centred * rstd_of(centred))

    assert_unseen(layer_norm, pattern_inputs(3, 5, 8), "rms_norm")


def test_rms_norm_of_what_was_centred_along_another_dimension_is_fused():
    def norm(x, w):
        x = x - x.mean(-2, keepdim=True)
        return w * (x * rstd_of(x))

    assert_fused(norm, pattern_inputs(3, 5, 8), "rms_norm")


def test_a_sum_with_two_norms_is_kept_once():
    def block(x, r, w):
        s = r + x
        return SPELLINGS["torch"](s, w) + SPELLINGS["torch"](s, w * 2).sin()

    x, w = pattern_inputs(3, 5, 8)
    inputs = [x, torch.randn(3, 5, 8).requires_grad_(), w]
    assert_fused(block, inputs, "rms_norm", 2)
    assert {"add_rms_norm", "rms_norm"} <= set(operators(block, inputs))


def test_a_weight_that_is_no_vector_leaves_the_weightless_norm():
    def odd(x, w):
        return w * (x.float() * rstd_of(x.float())).to(x.dtype)

    x = torch.randn(3, 5, 8).requires_grad_()
    assert_fused(odd, [x, torch.randn(5, 8).requires_grad_()], "rms_norm")


def test_torch_norm_over_two_dimensions_is_refused():
    w = torch.randn(5, 8).requires_grad_()
    assert_refused(
        lambda x, w: F.rms_norm(x, (5, 8), w, EPS),
        [pattern_inputs(3, 5, 8)[0], w],
        "rms_norm",
        "2 dimensions",
    )


# --- memory that is written to, gradients that stop


def written_clone(x, w):
    h = x.clone()
    h.mul_(2.0)
    return SPELLINGS["llama"](h, w)


def written_equal(x, w):
    a, b = x * 2.0, x * 2.0
    b.add_(1.0)
    return SPELLINGS["llama"](b, w) + a


@pytest.mark.parametrize(("fn", "count"), [(written_clone, 1), (written_equal, 1)])
def test_a_copy_that_is_written_to_is_not_its_source(fn, count):
    """Written to before the norm: fused, and of the right numbers."""
    assert_fused(fn, pattern_inputs(3, 5, 8), "rms_norm", count)


def written_by_foreach(x, w):
    """The norm is complete by then, but its backward would read what it normalised."""
    h = x * 2.0
    y = SPELLINGS["llama"](h.detach(), w)
    torch._foreach_mul_([h], 3.0)
    return y + h.sin()


def written_after_a_slice(x, w):
    h = x * 2.0
    part = h[..., :4].float()
    variance = h.pow(2).mean(-1, keepdim=True)
    h[..., 1:] += 1.0
    return w * (h * torch.rsqrt(variance + EPS)) + part.sum()


def written_through_a_view(x, w):
    h = x * 2.0
    rows = h.view(-1, 8)
    variance = h.pow(2).mean(-1, keepdim=True)
    rows.mul_(3.0)
    return w * (h * torch.rsqrt(variance + EPS))


@pytest.mark.parametrize("fn", [written_after_a_slice, written_through_a_view, written_by_foreach])
def test_what_is_written_to_in_the_middle_or_later_is_refused(fn):
    x, w = pattern_inputs(3, 5, 8)
    assert_refused(fn, [x.detach(), w], "rms_norm", "in place")


def test_a_result_that_is_written_to_is_refused():
    def model(x):
        y = (x.float() * rstd_of(x.float())).to(x.dtype)
        y.mul_(2.0)
        return y

    assert_refused(model, pattern_inputs(3, 5, 8)[:1], "rms_norm", "in place")


def test_a_residual_written_to_before_the_norm_stays_outside():
    def block(r, w):
        a = r.sin()
        s = a + r
        a.zero_()
        return SPELLINGS["llama"](s, w)

    x, w = pattern_inputs(3, 5, 8)
    assert_fused(block, [x.detach(), w], "rms_norm")
    assert "add_rms_norm" not in operators(block, [x.detach(), w])


def test_a_gate_without_gradient_stays_outside():
    def gated(x, w, z):
        with torch.no_grad():
            gate = F.silu(z)
        return SPELLINGS["llama"](x, w) * gate + 0 * z

    inputs = [*pattern_inputs(3, 5, 8), torch.randn(3, 5, 8).requires_grad_()]
    assert_fused(gated, inputs, "rms_norm")
    assert "gated_rms_norm" not in operators(gated, inputs)


def test_a_later_view_of_eager_strides_is_not_broken():
    """(B, H, S, K) normalised as it lies: eager's result can be viewed as (B, S, H * K), a contiguous one cannot."""

    def heads(x, w):
        y = SPELLINGS["llama"](x.transpose(1, 2).sin(), w)
        return y.transpose(1, 2).view(2, 6, 32)

    x, w = torch.randn(2, 6, 4, 8).requires_grad_(), torch.randn(8).requires_grad_()
    assert_refused(heads, [x, w], "rms_norm", "memory layout")


def test_other_strides_without_a_later_view_are_fused():
    def heads(x, w):
        y = SPELLINGS["llama"](x.transpose(1, 2).sin(), w)
        return y.transpose(1, 2).reshape(2, 6, 32) * 2

    x, w = torch.randn(2, 6, 4, 8).requires_grad_(), torch.randn(8).requires_grad_()
    assert_fused(heads, [x, w], "rms_norm")


def test_rows_filled_one_after_the_other_are_fused():
    """As linear attention does it step by step: the buffer is complete before it is normalised."""

    def model(x, w):
        h = torch.zeros_like(x)
        for i in range(x.shape[1]):
            h[:, i] = x[:, i].sin()
        return SPELLINGS["llama"](h, w)

    assert_fused(model, pattern_inputs(3, 4, 8), "rms_norm")


@pytest.mark.parametrize("inside", [SPELLINGS["llama"], lambda x, w: x * w], ids=["a norm", "a product"])
def test_around_vmap_norms_are_fused(inside):
    """What is under vmap is left alone: its tensors have a dimension that their shape does not show."""

    def model(x, w):
        y = SPELLINGS["llama"](x, w)
        return SPELLINGS["llama"](torch.vmap(inside, in_dims=(0, None))(y, w), w)

    assert_fused(model, pattern_inputs(3, 5, 8), "rms_norm", count=2)


def test_a_norm_is_not_moved_into_vmap():
    def model(x, w):
        y = torch.vmap(torch.sin)(x)
        return SPELLINGS["llama"](y, w), y.cos()

    assert_fused(model, pattern_inputs(3, 5, 8), "rms_norm")
