"""rope: which spellings the pattern recognises, which look-alikes it refuses, and that the numbers are right."""

import pytest
import torch
from _graphs import assert_fused, assert_refused, assert_right, operators
from fused_backend.compiler import explain


def rotation_inputs(heads=3, sequence=5, channels=8, rotary=None, dtype=torch.float32, width=1):
    """x (2, heads, sequence, channels), cos and sin (1, 1, sequence, rotary * width)."""
    x = torch.randn(2, sequence, heads, channels, dtype=dtype).transpose(1, 2).requires_grad_()
    angle = torch.randn(1, 1, sequence, (rotary or channels) // 2)
    angle = torch.cat((angle, angle), -1) if width == 1 else angle
    return [x, angle.cos(), angle.sin()]


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_half_by_chunks(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotate_pairs_by_reshape(x):
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).reshape(x.shape)


SPELLINGS = {
    "rotate half": lambda x, c, s: x * c + rotate_half(x) * s,
    "chunks, sum the other way": lambda x, c, s: (rotate_half_by_chunks(x) * s) + (c * x),
    "rounded at the end": lambda x, c, s: (x * c + rotate_half(x) * s).to(x.dtype),
    "float32 inside": lambda x, c, s: (x.float() * c + rotate_half(x.float()) * s).type_as(x),
    "backwards": lambda x, c, s: x * c + torch.cat((x[..., x.shape[-1] // 2 :], -x[..., : x.shape[-1] // 2]), -1) * s,
    "pairs": lambda x, c, s: x * c + rotate_pairs(x) * s,
    "pairs by reshape": lambda x, c, s: (x.float() * c + rotate_pairs_by_reshape(x.float()) * s).to(x.dtype),
}
HALF_WIDTH = {
    "gpt_oss": lambda x, c, s: torch.cat(
        (x.chunk(2, -1)[0] * c - x.chunk(2, -1)[1] * s, x.chunk(2, -1)[1] * c + x.chunk(2, -1)[0] * s), -1
    ),
    "deepseek": lambda x, c, s: torch.cat(
        [x[..., 0::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., 0::2] * s], dim=-1
    ),
    "nanogpt, backwards": lambda x, c, s: torch.cat(
        [x[..., :4] * c + x[..., 4:] * s, x[..., :4] * (-s) + x[..., 4:] * c], 3
    ),
    "halves, backwards": lambda x, c, s: torch.cat(
        [x[..., :4] * c + x[..., 4:] * s, x[..., 4:] * c - x[..., :4] * s], -1
    ),
    "unbound": lambda x, c, s: torch.stack(
        [
            x.unflatten(-1, (-1, 2)).unbind(-1)[0] * c - x.unflatten(-1, (-1, 2)).unbind(-1)[1] * s,
            x.unflatten(-1, (-1, 2)).unbind(-1)[0] * s + x.unflatten(-1, (-1, 2)).unbind(-1)[1] * c,
        ],
        -1,
    ).flatten(-2),
    "torchtune": lambda x, c, s: torch.stack(
        [x[..., ::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., ::2] * s], -1
    ).flatten(3),
    "complex": lambda x, c, s: torch.view_as_real(
        torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.complex(c, s)
    ).flatten(3).type_as(x),
}  # fmt: skip


def laid_out(rotation):
    """As attention reads it: some spellings leave other strides, which matters only to who views the result."""
    return lambda x, c, s: rotation(x, c, s).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_are_fused(spelling, dtype):
    x, cos, sin = rotation_inputs(dtype=dtype)
    if spelling == "rotate half":
        cos, sin = cos.to(dtype), sin.to(dtype)
    assert_fused(laid_out(SPELLINGS[spelling]), [x, cos, sin], "rope")


@pytest.mark.parametrize("spelling", HALF_WIDTH)
def test_half_width_tables_are_fused(spelling):
    assert_fused(laid_out(HALF_WIDTH[spelling]), rotation_inputs(width=0.5), "rope")


def test_sequence_before_heads_is_fused():
    x, cos, sin = rotation_inputs()
    inputs = [x.detach().transpose(1, 2).requires_grad_(), cos.transpose(1, 2), sin.transpose(1, 2)]
    assert_fused(SPELLINGS["rotate half"], inputs, "rope")


def test_two_dimensional_tables_are_fused():
    x, cos, sin = rotation_inputs()
    assert_fused(SPELLINGS["rotate half"], [x, cos[0, 0], sin[0, 0]], "rope")


def test_partial_rotary_is_one_operator():
    def partial(x, c, s):
        return torch.cat((SPELLINGS["rotate half"](x[..., :4], c, s), x[..., 4:]), dim=-1)

    inputs = rotation_inputs(channels=12, rotary=4)
    assert_fused(partial, inputs, "rope")
    assert operators(partial, inputs)["rope"][3] == 4


def test_q_and_k_share_a_launch():
    def both(q, k, c, s):
        return SPELLINGS["rotate half"](q, c, s), SPELLINGS["rotate half"](k, c, s)

    q, cos, sin = rotation_inputs(heads=4)
    inputs = [q, rotation_inputs(heads=2)[0], cos, sin]
    assert_fused(both, inputs, "rope")
    assert "rope_qk" in operators(both, inputs)


def test_q_and_k_turned_backwards_share_a_launch():
    def both(q, k, c, s):
        return SPELLINGS["backwards"](q, c, s), SPELLINGS["backwards"](k, c, s)

    q, cos, sin = rotation_inputs(heads=4)
    assert_fused(both, [q, rotation_inputs(heads=2)[0], cos, sin], "rope")
    assert "rope_qk" in operators(both, [q, rotation_inputs(heads=2)[0], cos, sin])


def test_a_key_that_depends_on_the_query_is_not_paired():
    def chain(q, c, s):
        once = SPELLINGS["rotate half"](q, c, s)
        return SPELLINGS["rotate half"](once.sin(), c, s)

    inputs = rotation_inputs()
    assert_fused(chain, inputs, "rope", count=2)
    assert "rope_qk" not in operators(chain, inputs)


NEAR_MISSES = {
    "both signs flipped": (lambda x, c, s: x * c + torch.cat((-x[..., 4:], -x[..., :4]), -1) * s, ""),
    "halves not swapped": (lambda x, c, s: x * c + torch.cat((-x[..., :4], x[..., 4:]), -1) * s, "half"),
    "minus": (lambda x, c, s: x * c - rotate_half(x) * s, "sub"),
    "uneven split": (lambda x, c, s: x * c + torch.cat((-x[..., 3:], x[..., :3]), -1) * s, ""),
    "another tensor": (lambda x, c, s: x * c + rotate_half(x.sin()) * s, ""),
    "pairs misaligned": (lambda x, c, s: x * c + torch.stack((-x[..., ::2], x[..., 1::2]), -1).flatten(-2) * s, ""),
}  # fmt: skip


HALF_WIDTH_NEAR_MISSES = {
    "no sign": lambda x, c, s: torch.cat([x[..., :4] * c + x[..., 4:] * s, x[..., :4] * s + x[..., 4:] * c], -1),
    "both signs": lambda x, c, s: torch.cat([x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * c - x[..., :4] * s], -1),
    "the other half": lambda x, c, s: torch.cat(
        [x[..., 4:] * c + x[..., :4] * s, x[..., 4:] * (-s) + x[..., :4] * c], -1
    ),
    "bound the other way": lambda x, c, s: torch.cat(
        [x.unflatten(-1, (2, 4)).unbind(-2)[0] * c - x[..., ::2] * s, x[..., ::2] * c + x[..., 1::2] * s], -1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HALF_WIDTH_NEAR_MISSES)
def test_near_misses_of_half_width_are_refused_or_unseen(name):
    fn, inputs = HALF_WIDTH_NEAR_MISSES[name], rotation_inputs(width=0.5)
    assert explain(fn, *inputs).counts().get("rope", (0, 0))[0] == 0
    assert_right(fn, inputs)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused(name):
    fn, reason = NEAR_MISSES[name]
    assert_refused(fn, rotation_inputs(), "rope", reason)


def test_tables_with_a_gradient_are_refused():
    x, cos, sin = rotation_inputs()
    assert_refused(SPELLINGS["rotate half"], [x, cos.requires_grad_(), sin], "rope", "gradient")


def test_a_table_for_all_heads_is_refused():
    x, cos, sin = rotation_inputs()
    inputs = [x, cos.expand(1, 3, 5, 8).contiguous(), sin.expand(1, 3, 5, 8).contiguous()]
    assert_refused(SPELLINGS["rotate half"], inputs, "rope", "one row per position")


def test_three_dimensional_x_is_refused():
    x, cos, sin = rotation_inputs()
    inputs = [x[:, 0].detach().requires_grad_(), cos[:, 0], sin[:, 0]]
    assert_refused(SPELLINGS["rotate half"], inputs, "rope", "shape")


TABLES = {
    "one channel": ((1, 1, 5, 1), (1, 1, 5, 8)),
    "two batches": ((2, 1, 5, 8), (1, 1, 5, 8)),
    "heads and positions": ((1, 1, 5, 8), (1, 5, 1, 8)),
}


@pytest.mark.parametrize("shapes", TABLES)
def test_tables_of_two_shapes_are_refused(shapes):
    x = rotation_inputs(heads=5)[0]
    assert_refused(SPELLINGS["rotate half"], [x, *(torch.randn(s) for s in TABLES[shapes])], "rope", "shape")
