"""lora_nf4: which layers and adapters are recognised, which look-alikes are refused, and that numbers are right."""

import pytest
import torch
import torch.nn.functional as F
from _graphs import OPTIONS, assert_fused, assert_refused, assert_right, assert_unseen
from fused_backend.compiler import Options, explain
from fused_backend.compiler.backend import rewrite

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
K, N, R = 24, 20, 4


def trained(*shape, dtype=F32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def layer_inputs(*tokens, k=K, n=N, r=R, dtype=F32, adapter=None):
    """x, the frozen W, A and B."""
    tokens, adapter = tokens or (3, 5), adapter or dtype
    return [
        trained(*tokens, k, dtype=dtype),
        torch.randn(n, k, dtype=dtype),
        trained(r, k, dtype=adapter),
        trained(n, r, dtype=adapter),
    ]


def several(count, dtype=BF16, **how):
    """x, then W, A and B for each of several layers of different sizes.

    In bfloat16 roundings outweigh the order in which a product is summed, which differs if products are stacked.
    """
    how["dtype"] = dtype
    x, *first = layer_inputs(**how)
    rest = [layer_inputs(**({"n": N + 4 * i, "r": R + i} | how))[1:] for i in range(1, count)]
    return [x, *first, *(t for layer in rest for t in layer)]


def up(x, a, b, s=2.0):
    return F.linear(F.linear(x, a), b) * s


def adapted(x, w, a, b, s=2.0):
    return F.linear(x, w) + up(x, a, b, s)


def layers_of(fn, inputs):
    """How many layers each of our operators in the rewritten graph computes."""
    found = []

    def collect(gm, example_inputs):
        _, finish = rewrite(gm, Options())
        nodes = (n for n in gm.graph.nodes if n.target is torch.ops.fused_backend.lora_linear.default)
        found.extend(len(n.args[8]) for n in nodes)
        return finish(gm.forward)

    torch._dynamo.reset()
    torch.compile(fn, backend=collect)(*inputs)
    return found


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


# --- spellings -----------------------------------------------------------------------------------------------------


SPELLINGS = {
    "peft": adapted,
    "adapter first": lambda x, w, a, b: up(x, a, b) + F.linear(x, w),
    "scaling first": lambda x, w, a, b: F.linear(x, w) + 0.5 * F.linear(F.linear(x, a), b),
    "no scaling": lambda x, w, a, b: F.linear(x, w) + up(x, a, b, 1.0),
    "integer scaling": lambda x, w, a, b: torch.add(F.linear(x, w), up(x, a, b, 2)),
    "transposed products": lambda x, w, a, b: x @ w.t() + (x @ a.t() @ b.t()) * 2.0,
    "matmul": lambda x, w, a, b: torch.matmul(x, w.T) + 3.0 * torch.matmul(torch.matmul(x, a.mT), b.transpose(0, 1)),
    "cast and cloned": lambda x, w, a, b: (F.linear(x.to(x.dtype), w).clone() + up(x.contiguous(), a, b)).to(x.dtype),
    "dropout that is off": lambda x, w, a, b: (
        F.linear(x, w) + up(F.dropout(F.dropout(x, 0.1, training=False), 0.0), a, b)
    ),
    "viewed afterwards": lambda x, w, a, b: adapted(x, w, a, b).view(3, 5, 4, -1).transpose(1, 2) * 2,
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_are_fused(spelling, dtype):
    assert_fused(SPELLINGS[spelling], layer_inputs(dtype=dtype), "lora_nf4")


def test_weights_stored_transposed_are_fused():
    """The layer as it is often written by hand: x·A·B with A (K, R) and B (R, N)."""

    def by_hand(x, w, a, b):
        return F.linear(x, w) + 2.0 * (x @ a @ b)

    def all_by_hand(x, w, a, b):
        return x @ w + 2.0 * (x @ a @ b)

    x, _, _, _ = layer_inputs()
    for fn, w in ((by_hand, torch.randn(N, K)), (all_by_hand, torch.randn(K, N))):
        assert_fused(fn, [x, w, trained(K, R), trained(R, N)], "lora_nf4")


@pytest.mark.parametrize("tokens", [(7,), (2, 3), (2, 3, 4), (1, 1), (0, 3)], ids=str)
def test_any_number_of_dimensions(tokens):
    assert_fused(adapted, layer_inputs(*tokens), "lora_nf4")


def test_biases():
    def biased(x, w, a, b, bias, own):
        return F.linear(x, w, bias) + F.linear(F.linear(x, a), b, own) * 2.0

    inputs = layer_inputs()
    assert_fused(biased, [*inputs, torch.randn(N), trained(N)], "lora_nf4")
    assert_fused(biased, [*inputs, trained(N), torch.randn(N)], "lora_nf4")
    assert_fused(lambda x, w, a, b, own: biased(x, w, a, b, None, own), [*inputs, trained(N)], "lora_nf4")
    assert_fused(lambda x, w, a, b, bias: biased(x, w, a, b, bias, None), [*inputs, trained(N)], "lora_nf4")


def test_what_needs_no_gradient():
    x, w, a, b = layer_inputs()
    assert_fused(adapted, [x.detach(), w, a, b], "lora_nf4")
    assert_fused(adapted, [x, w, a.detach(), b], "lora_nf4")
    assert_fused(adapted, [x, w, a, b.detach()], "lora_nf4")
    assert_fused(lambda x, w, a, b: adapted(x.detach(), w, a, b.detach()) + x.sum(), [x, w, a, b], "lora_nf4")


def test_without_gradients_at_all():
    def inference(*inputs):
        with torch.no_grad():
            return adapted(*inputs)

    assert_fused(inference, layer_inputs(), "lora_nf4")


# --- dtypes --------------------------------------------------------------------------------------------------------


def test_float32_adapter_on_a_16_bit_layer():
    def four_bit_style(x, w, a, b):
        return F.linear(x, w) + up(x.to(a.dtype), a, b).to(x.dtype)

    def dense_style(x, w, a, b):
        return (F.linear(x, w) + up(x.to(a.dtype), a, b)).to(x.dtype)

    def not_cast_back(x, w, a, b):
        return F.linear(x, w) + up(x.to(a.dtype), a, b)

    for fn in (four_bit_style, dense_style, not_cast_back):
        for dtype in (BF16, F16):
            assert_fused(fn, layer_inputs(dtype=dtype, adapter=F32), "lora_nf4")


def test_a_wide_input_that_each_part_casts_for_itself():
    def layer(x, w, a, b):
        return F.linear(x.to(w.dtype), w).to(x.dtype) + up(x, a, b)

    x, w, a, b = layer_inputs()
    assert_fused(layer, [x, w.to(BF16), a, b], "lora_nf4")


def test_master_weights_cast_on_the_way():
    def layer(x, w, a, b):
        return F.linear(x, w) + up(x, a.to(x.dtype), b.to(x.dtype))

    assert_fused(layer, layer_inputs(dtype=BF16, adapter=F32), "lora_nf4")


def test_autocast():
    def layer(x, w, a, b):
        with torch.autocast("cpu", BF16):
            return adapted(x, w, a, b).float()

    assert_fused(layer, layer_inputs(), "lora_nf4")


def narrowed_for_the_adapter(x, w, a, b):
    return F.linear(x, w) + up(x.to(BF16).float(), a, b)


def narrowed_for_the_layer(x, w, a, b):
    return F.linear(x.to(BF16).float(), w) + up(x, a, b)


def narrowed_weight(x, w, a, b):
    return F.linear(x, w) + up(x, a.to(BF16).float(), b)


@pytest.mark.parametrize("fn", [narrowed_for_the_adapter, narrowed_for_the_layer])
def test_an_input_rounded_on_the_way_is_another_input(fn):
    assert_refused(fn, layer_inputs(), "lora_nf4", "reads")


def test_what_is_rounded_on_the_way_stays_rounded():
    """To 16-bit integers' worth of mantissa, so that skipping the rounding shows."""

    def both(x, w, a, b):
        narrow = x.to(F16).float()
        return adapted(narrow, w, a, b)

    x, w, a, b = layer_inputs()
    with torch.no_grad():
        x.mul_(1e-7)  # subnormal in float16: only a few bits are left
    for fn, inputs in ((both, [x, w, a, b]), (narrowed_weight, layer_inputs())):
        torch._dynamo.reset()
        ours = torch.compile(fn, backend="fused", options=OPTIONS)(*inputs)
        torch.testing.assert_close(ours, fn(*inputs), rtol=1e-5, atol=1e-5 * ours.abs().max().item())


def test_two_products_in_different_dtypes_are_refused():
    def layer(x, w, a, b):
        return F.linear(x, w) + F.linear(F.linear(x.to(BF16), a.to(BF16)).float(), b)

    assert_refused(layer, layer_inputs(), "lora_nf4", "in different dtypes")


# --- near misses ---------------------------------------------------------------------------------------------------


def in_no_grad(fn, *args):
    with torch.no_grad():
        return fn(*args)


NEAR_MISSES = {
    "another input": (lambda x, w, a, b: F.linear(x, w) + up(x.sin(), a, b), "the adapter reads sin"),
    "subtracted": (lambda x, w, a, b: F.linear(x, w) - up(x, a, b), "through sub"),
    "multiplied": (lambda x, w, a, b: F.linear(x, w) * up(x, a, b), "through mul"),
    "negated": (lambda x, w, a, b: F.linear(x, w) + up(x, a, b, -1.0), "through neg"),
    "scaling a tensor": (lambda x, w, a, b: F.linear(x, w) + up(x, a, b, a.sum()), "through mul"),
    "scaling a vector": (lambda x, w, a, b: F.linear(x, w) + up(x, a, b, b[:, 0]), "through mul"),
    "dropout of the layer's input": (
        lambda x, w, a, b: F.linear(F.dropout(x, 1e-9), w) + up(x, a, b), "the layer dropout",
    ),
    "only the sum is shared": (lambda x, w, a, b: F.linear(x, w) + (up(x, a, b) + up(x, a * 2, b)), ""),
    "adapter without gradients": (lambda x, w, a, b: F.linear(x, w) + in_no_grad(up, x, a, b), "without gradients"),
    "inner without gradients": (
        lambda x, w, a, b: F.linear(x, w) + F.linear(in_no_grad(F.linear, x, a), b), "without gradients",
    ),
    "base without gradients": (lambda x, w, a, b: in_no_grad(F.linear, x, w) + up(x, a, b), "without gradients"),
    "base cast without gradients": (
        lambda x, w, a, b: F.linear(in_no_grad(x.to, BF16), w.to(BF16)) + up(x, a, b), "without gradients",
    ),
    "weight cast without gradients": (
        lambda x, w, a, b: (F.linear(x, w) + up(x.to(BF16), in_no_grad(a.to, BF16), b.to(BF16))), "without gradients",
    ),
    "base used elsewhere": (
        lambda x, w, a, b: (lambda y: (y + up(x, a, b), y * 2))(F.linear(x, w)), "used elsewhere",
    ),
    "base returned": (lambda x, w, a, b: (lambda y: (y + up(x, a, b), y))(F.linear(x, w)), "used elsewhere"),
    "base a convolution": (
        lambda x, w, a, b: F.conv1d(x.transpose(1, 2), w[:, :, None]).transpose(1, 2) + up(x, a, b), "the base layer is transpose",
    ),
    "base of gpt2": (
        lambda x, w, a, b: (
            torch.addmm(x.new_zeros(N), x.view(-1, K), w.t().contiguous()).view(3, 5, N) + up(x, a, b)
        ), "the base layer is",
    ),
    "base with a nonlinearity": (lambda x, w, a, b: F.silu(F.linear(x, w)) + up(x, a, b), "the base layer is silu"),
    "dropout after": (lambda x, w, a, b: F.linear(x, w) + F.dropout(up(x, a, b), 1e-9), "through dropout"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused(name):
    fn, reason = NEAR_MISSES[name]
    assert_refused(fn, layer_inputs(), "lora_nf4", reason)


def test_a_trained_weight_is_refused():
    x, w, a, b = layer_inputs()
    assert_refused(adapted, [x, w.requires_grad_(), a, b], "lora_nf4", "trained as well")
    assert_refused(
        lambda x, w, a, b: adapted(x, w.detach() * w.mean(), a, b), [x, w, a, b], "lora_nf4", "trained as well"
    )


def test_sizes_that_do_not_fit():
    def broadcast_rows(x, w, a, b):
        return F.linear(x, w) + up(x[:, :1], a, b)

    def broadcast_features(x, w, a, b):
        return F.linear(x, w) + up(x, a, b)

    assert_refused(broadcast_rows, layer_inputs(), "lora_nf4", "the adapter reads")
    x, w, a, _ = layer_inputs()
    assert_refused(broadcast_features, [x, w, a, trained(1, R)], "lora_nf4", "the adapter maps")


NO_SITES = {
    "no base": lambda x, w, a, b: up(x, a, b).sin(),
    "bottleneck with a residual far away": lambda x, w, a, b: F.linear(F.relu(up(x, a, b)), w.t()) + x,
    "bottleneck as a gate": lambda x, w, a, b: torch.sigmoid(up(x, a, b)) * F.silu(F.linear(x, w)),
    "nonlinearity between": lambda x, w, a, b: F.linear(x, w) + F.linear(F.relu(F.linear(x, a)), b),
    "detached between": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a).detach(), b),
    "inner with a bias": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a, a[:, 0]), b),
    "one product": lambda x, w, a, b: F.linear(x, w) + F.linear(x, b @ a),
    "scaled between": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a) * a[:, 0], b),
    "added in part": lambda x, w, a, b: torch.add(F.linear(x, w), up(x, a, b), alpha=2),
    "frozen": lambda x, w, a, b: F.linear(x, w) + up(x, a.detach(), b.detach()),
}


@pytest.mark.parametrize("name", NO_SITES)
def test_other_sums_are_no_sites(name):
    assert_unseen(NO_SITES[name], layer_inputs(), "lora_nf4")


def test_a_bottleneck_as_wide_as_the_layer_is_no_adapter():
    assert_unseen(adapted, layer_inputs(r=K), "lora_nf4")


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


# --- groups --------------------------------------------------------------------------------------------------------


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
    def layers(x, w, a, b, w2, a2, b2):
        return adapted(x, w, a, b), in_no_grad(adapted, x, w2, a2, b2)

    assert_fused(layers, several(2), "lora_nf4", 2)
    assert layers_of(layers, several(2)) == [1, 1]


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


# --- dropout -------------------------------------------------------------------------------------------------------


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


# --- an adapter of an embedding --------------------------------------------------------------------------------------


def test_an_adapter_of_an_embedding_is_refused():
    def embedding(ids, w, a, b):
        return F.embedding(ids, w) + F.embedding(ids, a) @ b.t() * 2.0

    inputs = [torch.randint(0, 9, (3, 5)), torch.randn(9, N), trained(9, R), trained(N, R)]
    assert_refused(embedding, inputs, "lora_nf4", "embedding")
    assert_unseen(lambda ids, a, b: (F.embedding(ids, a) @ b.t()).sin(), [inputs[0], *inputs[2:]], "lora_nf4")


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
