"""lora_nf4: which spellings are recognised, which look-alikes are refused, and that the numbers are right."""

import pytest
import torch
import torch.nn.functional as F
from _graphs import OPTIONS, assert_fused, assert_refused, assert_unseen, operators
from _layers import BF16, F16, F32, K, N, R, adapted, in_no_grad, layer_inputs, trained, up

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


# --- dtypes ----------------------------------------------------------------------------------------------------------


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
        out_dtype = operators(fn, layer_inputs(dtype=BF16, adapter=F32))["lora_linear"][-1]
        assert out_dtype == (F32 if fn is not_cast_back else BF16)


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


# --- near misses -----------------------------------------------------------------------------------------------------


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
        lambda x, w, a, b: F.conv1d(x.transpose(1, 2), w[:, :, None]).transpose(1, 2) + up(x, a, b),
        "the base layer is transpose",
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


# --- an adapter of an embedding --------------------------------------------------------------------------------------


def test_an_adapter_of_an_embedding_is_refused():
    def embedding(ids, w, a, b):
        return F.embedding(ids, w) + F.embedding(ids, a) @ b.t() * 2.0

    inputs = [torch.randint(0, 9, (3, 5)), torch.randn(9, N), trained(9, R), trained(N, R)]
    assert_refused(embedding, inputs, "lora_nf4", "embedding")
    assert_unseen(lambda ids, a, b: (F.embedding(ids, a) @ b.t()).sin(), [inputs[0], *inputs[2:]], "lora_nf4")
