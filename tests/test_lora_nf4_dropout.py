"""lora_nf4: dropout before an adapter draws what would have been drawn, or the layer is refused."""

import pytest
import torch
import torch.nn.functional as F
from _graphs import OPTIONS
from _layers import BF16, F64, adapted, layer_inputs, layers_of, several, up
from fused_backend.compiler import explain


def assert_same_draws(fn, inputs, count):
    """Exactly `count` sites fused, none refused; in float64 and from one seed, nothing but rounding differs."""
    report = explain(fn, *inputs)
    assert report.counts().get("lora_nf4", (0, 0)) == (count, 0), str(report)
    assert_draws_right(fn, inputs)


def assert_draws_right(fn, inputs):
    results = []
    for how in ({"backend": "aot_eager_decomp_partition"}, {"backend": "fused", "options": OPTIONS}):
        torch._dynamo.reset()
        torch.manual_seed(7)
        out = torch.compile(fn, **how)(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad(sum(o.sin().sum() for o in outs), [t for t in inputs if t.requires_grad])
        results.append([*outs, *grads])
    assert all(t.dtype == F64 for t in results[0])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def dropped(x, w, a, b, p=0.4):
    return F.linear(x, w) + up(F.dropout(x, p), a, b)


def wide(**how):
    return layer_inputs(dtype=F64, **how)


def test_dropout_draws_what_would_have_been_drawn():
    assert_same_draws(dropped, wide(), 1)
    assert_same_draws(lambda x, w, a, b: F.linear(x, w) + up(torch.nn.Dropout(0.1)(x), a, b), wide(), 1)


def test_dropout_in_a_group():
    def layers(x, *rest):
        q = dropped(x, *rest[:3]).view(3, 5, 4, -1).transpose(1, 2)
        return q, dropped(x, *rest[3:6]), dropped(x, *rest[6:])

    inputs = several(3, dtype=F64)
    assert_same_draws(layers, inputs, 3)
    assert layers_of(layers, inputs) == [3]


def test_dropout_before_a_cast_and_after():
    def after(x, w, a, b):
        return F.linear(x, w) + up(F.dropout(x.to(F64), 0.4), a, b)

    def before(x, w, a, b):
        return F.linear(x, w) + up(F.dropout(x, 0.4).to(F64), a, b)

    x, w, a, b = wide()
    for fn in (after, before):
        # Whole numbers, so that float32 rounds nothing.
        inputs = [x.detach().round().float().requires_grad_(), w.round().float(), a, b]
        report = explain(fn, *inputs)
        assert report.counts()["lora_nf4"] == (1, 0), str(report)
        outs = []
        for how in ({"backend": "aot_eager_decomp_partition"}, {"backend": "fused", "options": OPTIONS}):
            torch._dynamo.reset()
            torch.manual_seed(7)
            y = torch.compile(fn, **how)(*inputs)
            outs.append([y, *torch.autograd.grad(y.sum(), inputs[2:])])
        for expected, ours in zip(*outs, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_dropout_of_an_input_that_was_rounded():
    def layer(x, w, a, b):
        return F.linear(x, w) + up(F.dropout(x.to(BF16), 0.4).to(F64), a, b)

    report = explain(layer, *wide())
    assert report.counts()["lora_nf4"] == (0, 1), str(report)


def test_dropout_that_is_the_models_own():
    """x = dropout(h) feeds the layer and its adapter: one mask for both, and the adapter has none of its own."""

    def layer(x, *rest):
        return adapted(F.dropout(x, 0.4), *rest)

    def both(x, *rest):
        return dropped(F.dropout(x, 0.4), *rest)

    assert_same_draws(layer, wide(), 1)
    assert_same_draws(both, wide(), 1)


def test_one_mask_for_several_layers():
    def shared(x, w, a, b, w2, a2, b2):
        d = F.dropout(x, 0.4)
        return F.linear(x, w) + up(d, a, b), F.linear(x, w2) + up(d, a2, b2)

    inputs = several(2, dtype=F64)
    assert_same_draws(shared, inputs, 2)
    assert layers_of(shared, inputs) == [2]


@pytest.mark.parametrize("where", ["dropped input", "inner", "outer"])
def test_a_mask_whose_result_is_used_elsewhere_is_refused(where):
    def layer(x, w, a, b):
        d = F.dropout(x, 0.4)
        u = F.linear(d, a)
        delta = F.linear(u, b)
        return F.linear(x, w) + delta, {"dropped input": d, "inner": u, "outer": delta}[where].sin()

    report = explain(layer, *wide())
    assert report.counts()["lora_nf4"] == (0, 1), str(report)
    assert "used elsewhere" in report.decisions[0].reason
    assert_draws_right(layer, wide())


def test_different_rates_do_not_share():
    def layers(x, *rest):
        return dropped(x, *rest[:3], p=0.1), dropped(x, *rest[3:6], p=0.4), dropped(x, *rest[6:], p=0.1)

    inputs = several(3, dtype=F64)
    assert_same_draws(layers, inputs, 3)
    assert layers_of(layers, inputs) == [1, 1, 1]


def test_a_draw_between_two_layers_keeps_its_place():
    def layers(x, *rest):
        y = dropped(x, *rest[:3])
        noise = torch.rand_like(x) + F.dropout(x, 0.5)
        return y, noise, dropped(x, *rest[3:])

    inputs = several(2, dtype=F64)
    assert_same_draws(layers, inputs, 2)
    assert layers_of(layers, inputs) == [1, 1]


def test_masks_drawn_in_another_order_than_the_layers():
    def layers(x, w, a, b, w2, a2, b2):
        second = up(F.dropout(x, 0.4), a2, b2)
        return F.linear(x, w) + up(F.dropout(x, 0.4), a, b), F.linear(x, w2) + second

    inputs = several(2, dtype=F64)
    assert_same_draws(layers, inputs, 2)
    assert layers_of(layers, inputs) == [2]


def test_dropout_of_everything_is_refused():
    report = explain(lambda *i: dropped(*i, p=1.0), *wide())
    assert report.counts()["lora_nf4"] == (0, 1), str(report)
    assert_draws_right(lambda *i: dropped(*i, p=1.0), wide())


@pytest.mark.parametrize("between", ["rand", "dropout", "attention", "another rate"])
def test_a_draw_between_dropout_and_its_layer_is_not_overtaken(between):
    """The mask is drawn where the layer is computed, so nothing else may be drawn on the way there."""

    def layers(x, w, a, b, w2, a2, b2):
        d = F.dropout(x, 0.5)
        if between == "another rate":
            d2 = F.dropout(x, 0.25)
            second = F.linear(x, w2) + up(d2, a2, b2)
            return F.linear(x, w) + up(d, a, b), second
        noise = {
            "rand": lambda: torch.rand_like(x),
            "dropout": lambda: F.dropout(x, 0.3),
            "attention": lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
        }[between]()
        return F.linear(x, w) + up(d, a, b), noise

    inputs = several(2, dtype=F64)
    inputs = inputs if between == "another rate" else [*inputs[:4], *(t.detach() for t in inputs[4:])]
    report = explain(layers, *inputs)
    assert any("is drawn between" in d.reason for d in report.decisions if d.fusion == "lora_nf4"), str(report)
    assert_draws_right(layers, inputs)
