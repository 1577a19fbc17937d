"""lora_nf4: layers that share an input, an adapter or memory."""

import pytest
import torch
import torch.nn.functional as F
from _graphs import assert_fused, assert_refused, assert_right
from _layers import BF16, K, N, R, adapted, in_no_grad, layer_inputs, layers_of, several, trained, up
from fused_backend.compiler import Options, explain
from fused_backend.compiler.backend import rewrite

# --- used elsewhere, used twice --------------------------------------------------------------------------------------


def test_the_adapters_own_results_may_be_used_elsewhere():
    def inner(x, w, a, b):
        u = F.linear(x, a)
        return F.linear(x, w) + F.linear(u, b) * 2.0, u.sin()

    def outer(x, w, a, b):
        delta = up(x, a, b)
        return F.linear(x, w) + delta, delta.pow(2)

    for fn in (inner, outer):
        assert_fused(fn, layer_inputs(), "lora_nf4")


def test_the_sum_used_twice_and_returned():
    def layer(x, w, a, b):
        y = adapted(x, w, a, b)
        return y, y.sin(), y.view(-1, N) * 2

    assert_fused(layer, layer_inputs(), "lora_nf4")


def test_one_adapter_for_two_layers():
    def layers(x, w, a, b, w2):
        delta = up(x, a, b)
        return F.linear(x, w) + delta, F.linear(x, w2) + delta

    inputs = [*layer_inputs(), torch.randn(N, K)]
    assert_fused(layers, inputs, "lora_nf4", 2)
    assert layers_of(layers, inputs) == [2]


def test_one_layer_on_two_inputs():
    def layers(x, w, a, b):
        return adapted(adapted(x, w, a, b).sin(), w, a, b)

    assert_fused(layers, layer_inputs(k=N), "lora_nf4", 2)
    assert layers_of(layers, layer_inputs(k=N)) == [1, 1]


def test_one_layer_twice_on_one_input():
    assert_fused(lambda *i: (adapted(*i).sin(), adapted(*i).cos()), layer_inputs(), "lora_nf4")


def test_one_base_with_two_adapters_apart():
    def layers(x, w, a, b, a2, b2):
        y = F.linear(x, w)
        return y + up(x, a, b), y + up(x, a2, b2)

    inputs = [*layer_inputs(), trained(R, K), trained(N, R)]
    assert_refused(layers, inputs, "lora_nf4", "used elsewhere")


def test_a_shared_a():
    def layers(x, w, a, b, w2, b2):
        return adapted(x, w, a, b), adapted(x, w2, a, b2, 0.5)

    inputs = [*layer_inputs(), torch.randn(N, K), trained(N, R)]
    assert_fused(layers, inputs, "lora_nf4", 2)
    assert layers_of(layers, inputs) == [2]


def test_two_adapters_on_one_layer():
    """The first joins the layer; the second is added to what they give."""

    def layer(x, w, a, b, a2, b2):
        return adapted(x, w, a, b) + up(x, a2, b2)

    inputs = [*layer_inputs(), trained(R, K), trained(N, R)]
    report = explain(layer, *inputs)
    assert report.counts()["lora_nf4"] == (1, 1), str(report)
    assert any("second adapter" in d.reason for d in report.decisions), str(report)
    assert_right(layer, inputs)


# --- groups ----------------------------------------------------------------------------------------------------------


def three(x, *rest):
    return tuple(adapted(x, *rest[i : i + 3]) for i in range(0, len(rest), 3))


def test_layers_that_share_x_become_one_operator():
    inputs = several(3)
    assert_fused(three, inputs, "lora_nf4", 3)
    assert layers_of(three, inputs) == [3]


def test_different_ranks_and_scalings_share_an_operator():
    def layers(x, *rest):
        return tuple(adapted(x, *rest[i : i + 3], s=float(i + 1)) for i in range(0, len(rest), 3))

    inputs = several(3)
    assert {a.shape[0] for a in inputs[2::3]} == {R, R + 1, R + 2}
    assert_fused(layers, inputs, "lora_nf4", 3)
    assert layers_of(layers, inputs) == [3]


def test_outputs_read_before_the_last_layer_is_computed():
    def attention_like(x, *rest):
        q = adapted(x, *rest[:3]).view(3, 5, 4, -1).transpose(1, 2)
        k = adapted(x, *rest[3:6]).view(3, 5, 4, -1).transpose(1, 2)
        return q.sin(), k, adapted(x, *rest[6:])

    assert_fused(attention_like, several(3), "lora_nf4", 3)
    assert layers_of(attention_like, several(3)) == [3]


def test_a_layer_that_waits_for_another_is_left_out():
    def chained(x, w, a, b, w2, a2, b2):
        y = adapted(x, w, a, b)
        return adapted(x, w2, a2 * y.mean(), b2)

    inputs = several(2)
    assert_fused(chained, inputs, "lora_nf4", 2)
    assert layers_of(chained, inputs) == [1, 1]


def test_unlike_layers_do_not_share():
    def dtypes(x, w, a, b, w2, a2, b2):
        return adapted(x, w, a, b), F.linear(x, w2) + up(x.float(), a2.float(), b2.float()).to(BF16)

    def with_and_without_bias(x, w, a, b, w2, a2, b2, bias):
        return adapted(x, w, a, b), F.linear(x, w2, bias) + up(x, a2, b2)

    assert_fused(dtypes, several(2), "lora_nf4", 2)
    assert layers_of(dtypes, several(2)) == [1, 1]
    inputs = [*several(2, n=N), torch.randn(N, dtype=BF16)]
    assert_fused(with_and_without_bias, inputs, "lora_nf4", 2)
    assert layers_of(with_and_without_bias, inputs) == [1, 1]


def test_a_layer_without_gradient_beside_one_with():
    def layers(x, *rest):
        return adapted(x, *rest[:3]), in_no_grad(adapted, x, *rest[3:6]), adapted(x, *rest[6:])

    assert_fused(layers, several(3), "lora_nf4", 3)
    assert sorted(layers_of(layers, several(3))) == [1, 2]


# --- memory that is written to ---------------------------------------------------------------------------------------


def written_afterwards(x, w, a, b):
    y = adapted(x, w, a, b)
    y.mul_(2.0)
    return y.sin()


def accumulated(x, w, a, b):
    y = F.linear(x, w)
    y += up(x, a, b)
    return y * 2


def scaled_in_place(x, w, a, b):
    delta = F.linear(F.linear(x, a), b)
    delta.mul_(2.0)
    return F.linear(x, w) + delta


def input_written_between(x, w, a, b):
    h = x * 1.0001
    y = F.linear(h.detach(), w)
    h.mul_(2.0)
    return y + up(h, a, b)


def cast_written_between(x, w, a, b):
    h = x.to(BF16)
    h.mul_(2.0)
    return F.linear(h, w.to(BF16)) + up(x, a, b).to(BF16)


def weight_cast_written(x, w, a, b):
    narrow = a.to(BF16)
    narrow.mul_(2.0)
    return F.linear(x, w) + up(x.to(BF16), narrow, b.to(BF16)).float()


WRITTEN = [
    written_afterwards, accumulated, scaled_in_place, input_written_between, cast_written_between, weight_cast_written,
]  # fmt: skip


@pytest.mark.parametrize("fn", WRITTEN)
def test_memory_that_is_written_to_is_left_alone(fn):
    report = explain(fn, *layer_inputs())
    assert report.counts().get("lora_nf4", (0, 0))[0] == 0, str(report)
    assert_right(fn, layer_inputs())


# --- sizes that change -----------------------------------------------------------------------------------------------


def test_a_new_number_of_tokens_compiles_once_more_and_never_again():
    count = torch._dynamo.testing.CompileCounter()

    def backend(gm, example_inputs):
        count.frame_count += 1
        _, finish = rewrite(gm, Options())
        return finish(gm.forward)

    compiled = torch.compile(three, backend=backend)
    _, *rest = several(3)
    for tokens in (5, 7, 11, 16, 3):
        x = trained(2, tokens, K, dtype=BF16)
        for ours, eager in zip(compiled(x, *rest), three(x, *rest), strict=True):
            assert (ours - eager).norm() <= 0.01 * eager.norm()
    assert count.frame_count == 2
