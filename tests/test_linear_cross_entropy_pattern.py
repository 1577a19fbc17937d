"""linear_cross_entropy: which losses the pattern recognises, which it refuses, and that the numbers are right."""

import pytest
import torch
import torch.nn.functional as F
from _graphs import assert_fused, assert_refused, assert_unseen, operators

VOCABULARY = 50


def head_inputs(batch=2, length=6, d=8, bias=False, dtype=torch.float32):
    h = torch.randn(batch, length, d, dtype=dtype).requires_grad_()
    w = torch.randn(VOCABULARY, d, dtype=dtype).requires_grad_()
    target = torch.randint(0, VOCABULARY, (batch, length))
    target[:, 0] = -100
    return [h, w, target, *([torch.randn(VOCABULARY, dtype=dtype).requires_grad_()] if bias else [])]


def causal(logits, target, **kwargs):
    """Hugging Face's loss: labels shifted by padding."""
    shifted = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), shifted.view(-1), ignore_index=-100, **kwargs)


SPELLINGS = {
    "hugging face": lambda h, w, t: causal(F.linear(h, w), t),
    "num_items_in_batch": lambda h, w, t: causal(F.linear(h, w), t, reduction="sum") / 7,
    "num_items tensor": lambda h, w, t: causal(F.linear(h, w), t, reduction="sum") / (t != -100).sum(),
    "logits_to_keep": lambda h, w, t: causal(F.linear(h[:, -4:, :], w), t[:, -4:]),
    "nothing sliced": lambda h, w, t: causal(F.linear(h[:, slice(0, None), :], w), t),
    "shifted logits": lambda h, w, t: F.cross_entropy(
        F.linear(h, w)[..., :-1, :].contiguous().view(-1, VOCABULARY), t[..., 1:].reshape(-1)
    ),
    "plain": lambda h, w, t: F.cross_entropy(F.linear(h.view(-1, 8), w), t.view(-1)),
    "nanogpt": lambda h, w, t: F.cross_entropy(
        (h @ w.t()).view(-1, VOCABULARY), t.view(-1), ignore_index=-100
    ),
    "module": lambda h, w, t: torch.nn.CrossEntropyLoss()(F.linear(h, w).view(-1, VOCABULARY), t.view(-1)),
    "label smoothing": lambda h, w, t: causal(F.linear(h, w), t, label_smoothing=0.1),
    "softcap": lambda h, w, t: causal(torch.tanh(F.linear(h, w) / 3.0) * 3.0, t),
    "scale": lambda h, w, t: causal(F.linear(h, w) * 0.25, t),
    "divided": lambda h, w, t: causal(F.linear(h, w) / 6.0, t),
    "scale, then softcap": lambda h, w, t: causal(3.0 * torch.tanh(F.linear(h, w) * 0.5 / 3.0), t),
    "sum": lambda h, w, t: causal(F.linear(h, w), t, reduction="sum"),
    "in two calls": lambda h, w, t: F.nll_loss(
        F.log_softmax(F.linear(h, w).view(-1, VOCABULARY), dim=1), t.view(-1), ignore_index=-100
    ),
    "in two calls, in float32": lambda h, w, t: F.nll_loss(
        F.linear(h, w)[:, :-1].float().log_softmax(-1).reshape(-1, VOCABULARY), t[:, 1:].reshape(-1), reduction="sum"
    ),
    "modules, rows of it": lambda h, w, t: torch.nn.NLLLoss(ignore_index=-1)(
        F.linear(h, w).log_softmax(-1).view(-1, VOCABULARY).narrow(0, 0, 11),
        t.view(-1)[1:].clamp(min=-1),
    ),
    "classes in the middle": lambda h, w, t: F.cross_entropy(F.linear(h, w).transpose(1, 2), t),
    "classes in the middle, shifted": lambda h, w, t: F.cross_entropy(
        F.linear(h, w)[:, :-1].float().permute(0, 2, 1), t[:, 1:], reduction="sum"
    ),
    "rows of the flattened": lambda h, w, t: F.cross_entropy(F.linear(h, w).view(-1, VOCABULARY)[:-1], t.view(-1)[1:]),
    "rows of rows": lambda h, w, t: F.cross_entropy(
        F.linear(h, w)[:, 1:].reshape(-1, VOCABULARY)[2:], t[:, 1:].reshape(-1)[2:]
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_are_fused(spelling):
    assert_fused(SPELLINGS[spelling], head_inputs(), "linear_cross_entropy")


def added(h, w, t):
    """A mixture of experts adds the loss that balances its router."""
    loss = causal(F.linear(h, w), t)
    loss += 0.1 * h.sin().mean()
    return loss


def scaled(h, w, t):
    loss = causal(F.linear(h, w), t)
    loss.mul_(2.0)
    loss /= 3.0
    return loss


def read_before_and_after(h, w, t):
    loss = causal(F.linear(h, w), t)
    before = loss * 3.0
    loss += h.sin().mean()
    return before, loss, loss.detach().clone()


def through_a_view(h, w, t):
    loss = causal(F.linear(h, w), t)
    loss.view(1).mul_(0.5)
    return loss * 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [added, scaled, read_before_and_after, through_a_view])
def test_a_loss_that_is_written_to_is_fused(fn, dtype):
    assert_fused(fn, head_inputs(dtype=dtype), "linear_cross_entropy")


def test_logits_that_are_written_to_are_refused():
    def model(h, w, t):
        logits = F.linear(h, w)
        loss = causal(logits, t)
        logits.detach().mul_(0.5)
        return loss

    assert_refused(model, head_inputs(), "linear_cross_entropy")


def test_bias_and_bfloat16_are_fused():
    def with_bias(h, w, t, b):
        return causal(F.linear(h, w, b), t)

    assert_fused(with_bias, head_inputs(bias=True), "linear_cross_entropy")
    assert_fused(SPELLINGS["hugging face"], head_inputs(dtype=torch.bfloat16), "linear_cross_entropy")


@pytest.mark.parametrize("frozen", ["w", "h", "both"])
def test_nothing_is_computed_for_what_is_frozen(frozen):
    h, w, t = head_inputs()
    h.requires_grad_(frozen == "w")
    w.requires_grad_(frozen == "h")
    assert_fused(SPELLINGS["hugging face"], [h, w, t], "linear_cross_entropy")
    arguments = operators(SPELLINGS["hugging face"], [h, w, t])["linear_cross_entropy"]
    assert arguments[-3:] == (frozen == "w", frozen == "h", False)


def test_logits_returned_beside_the_loss():
    def model(h, w, t):
        logits = F.linear(h, w)
        return causal(logits, t), logits.float(), logits[:, -1:]

    assert_fused(model, head_inputs(), "linear_cross_entropy")


def test_tied_weight():
    def model(w, t):
        h = F.embedding(t.clamp(min=0), w).sin()
        return causal(F.linear(h, w), t)

    assert_fused(model, head_inputs()[1:], "linear_cross_entropy")


NEAR_MISSES = {
    "a second loss on the logits": (
        lambda h, w, t: causal(F.linear(h, w), t) + F.linear(h, w).logsumexp(-1).pow(2).mean(), "logsumexp",
    ),
    "accuracy in the graph": (
        lambda h, w, t: (causal(F.linear(h, w), t), F.linear(h, w).argmax(-1).float().mean().expand(2) + 0 * h.sum()),
        "argmax",
    ),
    "class weights": (lambda h, w, t: causal(F.linear(h, w), t, weight=w.detach()[:, 0].abs()), "class weights"),
    "reduction none": (lambda h, w, t: causal(F.linear(h, w), t, reduction="none").mean(), "none"),
    "soft labels": (
        lambda h, w, t: F.cross_entropy(F.linear(h, w).view(-1, VOCABULARY), h.new_ones(12, VOCABULARY).softmax(-1)),
        "probabilities",
    ),
    "adapter on the head": (lambda h, w, t: causal(F.linear(h, w) + 0.5 * F.linear(h.sin(), w), t), "add"),
    "tokens for classes": (
        lambda h, w, t: F.cross_entropy(F.linear(h, w), t.new_zeros(2, VOCABULARY) + t.clamp(min=0)[:, :1] % 6),
        "(tokens, vocabulary)",
    ),
    "two rows of heads in the middle": (
        lambda h, w, t: F.cross_entropy(F.linear(h.unflatten(1, (2, 3)), w).movedim(-1, 1), t.view(2, 2, 3)),
        "(tokens, vocabulary)",
    ),
    "log_softmax over the tokens": (
        lambda h, w, t: F.nll_loss(F.log_softmax(F.linear(h, w).view(-1, VOCABULARY), 0), t.view(-1)), "log_softmax",
    ),
    "log_softmax scaled": (
        lambda h, w, t: F.nll_loss(0.5 * F.linear(h, w).view(-1, VOCABULARY).log_softmax(-1)[1:], t.view(-1)[1:]), None,
    ),
    "log_softmax twice": (
        lambda h, w, t: F.nll_loss(F.linear(h, w).log_softmax(-1).log_softmax(-1).view(-1, VOCABULARY), t.view(-1)),
        "log_softmax",
    ),
    "log_softmax read again": (
        lambda h, w, t: (lambda p: F.nll_loss(p.view(-1, VOCABULARY), t.view(-1)) + p.exp().pow(2).sum())(
            F.linear(h, w).log_softmax(-1)
        ),
        "also used",
    ),
    "part of the vocabulary": (
        lambda h, w, t: F.cross_entropy(F.linear(h, w)[..., :40].reshape(-1, 40), t.view(-1).clamp(max=39)), "narrow",
    ),
    "rounded before the loss": (
        lambda h, w, t: causal(F.linear(h, w).to(torch.bfloat16), t), "rounded",
    ),
    "scaled after the softcap": (lambda h, w, t: causal(torch.tanh(F.linear(h, w) / 3.0) * 3.0 * 2.0, t), ""),
    "softcap with two constants": (lambda h, w, t: causal(torch.tanh(F.linear(h, w) / 3.0) * 4.0, t), ""),
    "noise on the logits": (lambda h, w, t: causal(F.linear(h, w).sin(), t), "sin"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused(name):
    fn, reason = NEAR_MISSES[name]
    if reason is None:
        return assert_unseen(fn, head_inputs(), "linear_cross_entropy")
    assert_refused(fn, head_inputs(), "linear_cross_entropy", reason)


def test_logits_from_before_a_graph_break_are_refused():
    def loss(h, w, t):
        logits = F.linear(h, w)
        torch._dynamo.graph_break()
        return causal(logits, t)

    assert_refused(loss, head_inputs(), "linear_cross_entropy", "before a graph break")


def test_rows_selected_of_another_shape_are_refused():
    def loss(h, w, t):
        logits = F.linear(h, w).view(3, 4, VOCABULARY)[1:]
        return F.cross_entropy(logits.flatten(0, 1), t.view(3, 4)[1:].flatten())

    assert_refused(loss, head_inputs(), "linear_cross_entropy", "not reshaped")


def test_rows_counted_from_the_end_are_fused():
    def loss(h, w, t):
        return causal(F.linear(h, w).narrow(1, -4, 4).contiguous(), t[:, -4:])

    assert_fused(loss, head_inputs(), "linear_cross_entropy")
