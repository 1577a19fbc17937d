"""norm_rope: which norms and rotations become one operator, which do not, and that training is right."""

import pytest
import torch
from _graphs import assert_fused, assert_refused, assert_unseen, operators
from _models import draws, tiny
from _training import assert_step_as_accurate

OP = "norm_rope_qk"


def norm(x, w, eps=1e-6):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def inputs(dtype=torch.float32, heads=(4, 2), channels=8):
    q, k = (torch.randn(2, 5, h, channels, dtype=dtype).requires_grad_() for h in heads)
    wq, wk = (torch.rand(channels, dtype=dtype).requires_grad_() for _ in heads)
    angle = torch.randn(1, 1, 5, channels // 2)
    angle = torch.cat((angle, angle), -1)
    return [q, k, wq, wk, angle.cos().to(dtype), angle.sin().to(dtype)]


def before_the_transpose(q, k, wq, wk, cos, sin):
    q, k = norm(q, wq).transpose(1, 2), norm(k, wk).transpose(1, 2)
    return rotate(q, cos, sin) @ rotate(k, cos, sin).repeat_interleave(2, 1).mT


def behind_it(q, k, wq, wk, cos, sin):
    q, k = norm(q.transpose(1, 2), wq), norm(k.transpose(1, 2), wk)
    return rotate(q, cos, sin) @ rotate(k, cos, sin).repeat_interleave(2, 1).mT


def partial(q, k, wq, wk, cos, sin):
    q, k = norm(q, wq).transpose(1, 2), norm(k, wk).transpose(1, 2)
    cos, sin = (torch.cat((t[..., :2], t[..., :2]), -1) for t in (cos, sin))
    q, k = (torch.cat((rotate(x[..., :4], cos, sin), x[..., 4:]), -1) for x in (q, k))
    return q @ k.repeat_interleave(2, 1).mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("written", [before_the_transpose, behind_it, partial], ids=lambda f: f.__name__)
def test_both_norms_and_the_rotation_are_one(written, dtype):
    assert_fused(written, inputs(dtype), "norm_rope")
    found = operators(written, inputs(dtype))
    assert list(found) == [OP] and found[OP][-1] == dtype


NEAR_MISSES = {
    "the normalised q is read as well": lambda q, k, wq, wk, c, s: (
        rotate(n := norm(q.transpose(1, 2), wq), c, s)
        @ rotate(norm(k.transpose(1, 2), wk), c, s).repeat_interleave(2, 1).mT
        + n.sum()
    ),
    "another eps": lambda q, k, wq, wk, c, s: (
        rotate(norm(q.transpose(1, 2), wq), c, s)
        @ rotate(norm(k.transpose(1, 2), wk, 1e-5), c, s).repeat_interleave(2, 1).mT
    ),
    "k is not normalised": lambda q, k, wq, wk, c, s: (
        rotate(norm(q.transpose(1, 2), wq), c, s) @ rotate(k.transpose(1, 2), c, s).repeat_interleave(2, 1).mT
    ),
    "other tables": lambda q, k, wq, wk, c, s: (
        rotate(norm(q.transpose(1, 2), wq), c, s)
        @ rotate(norm(k.transpose(1, 2), wk), c, -s).repeat_interleave(2, 1).mT
    ),
}


REASONS = {
    "the normalised q is read as well": "something else reads",
    "another eps": "the norms of q and k differ in eps",
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay_apart(name):
    assert OP not in operators(NEAR_MISSES[name], inputs())
    if name in REASONS:
        assert_refused(NEAR_MISSES[name], inputs(), "norm_rope", REASONS[name])
    else:
        assert_unseen(NEAR_MISSES[name], inputs(), "norm_rope")


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_models(family):
    report = assert_step_as_accurate(tiny(family), draws()).report
    assert report.counts()["norm_rope"] == (2, 0), str(report)
