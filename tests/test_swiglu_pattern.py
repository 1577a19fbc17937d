"""swiglu: which spellings the pattern recognises, which look-alikes it refuses, and that the numbers are right."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from _graphs import OPTIONS, assert_fused, assert_refused, assert_right, assert_unseen, operators
from _oracle import judge
from fused_backend.compiler import explain
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts


def gate_and_up(*shape, dtype=torch.float32):
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for _ in range(2)]


LIMIT = 0.75


def gpt_oss(gate, up, alpha=1.702):
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + 1) * glu


SPELLINGS = {
    "silu": lambda g, u: F.silu(g) * u,
    "up first": lambda g, u: u * F.silu(g),
    "sigmoid": lambda g, u: g * torch.sigmoid(g) * u,
    "module": lambda g, u: torch.nn.SiLU()(g) * u,
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu module": lambda g, u: torch.mul(torch.nn.GELU(approximate="none")(g), u),
    "gelu tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "scaled silu": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "relu2": lambda g, u: torch.square(F.relu(g)) * u,
    "relu2 module": lambda g, u: torch.nn.ReLU()(g).pow(2) * u,
    "relu2 product": lambda g, u: u * (torch.relu(g) * torch.relu(g)),
    "gpt_oss": lambda g, u: gpt_oss(g.clamp(min=None, max=LIMIT), u.clamp(min=-LIMIT, max=LIMIT)),
    "gpt_oss with silu": lambda g, u: gpt_oss(g.clamp(max=LIMIT), u.clamp(min=-LIMIT, max=LIMIT), alpha=1.0),
    "deepseek_v4": lambda g, u: F.silu(g.clamp(max=LIMIT)) * u.clamp(min=-LIMIT, max=LIMIT),
    "other clamps": lambda g, u: F.gelu(torch.clamp_max(g, LIMIT)) * torch.clip(u, -LIMIT, LIMIT),
    "gelu tanh by powers": lambda g, u: (
        0.5 * g * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0)))) * u
    ),
    "gelu tanh by products": lambda g, u: u * (g * (0.5 * (1 + torch.tanh(g * 0.7978845608 * (1 + 0.044715 * g * g))))),
    "gelu tanh, halved last": lambda g, u: (
        (g * (torch.tanh(0.7978845608 * g + 0.0356774081 * g * g * g) + 1)) / 2 * 1.0 * u
    ),
    "gelu by erf": lambda g, u: g * 0.5 * (1.0 + torch.erf(g / math.sqrt(2.0))) * u,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_are_fused(spelling, dtype):
    inputs = gate_and_up(3, 5, 8, dtype=dtype)
    assert_fused(SPELLINGS[spelling], inputs, "swiglu")
    gate, up, _, *how = operators(SPELLINGS[spelling], inputs)["swiglu"]
    # The projections themselves, not what a limit made of them, are read and kept.
    assert gate.op == up.op == "placeholder"
    assert (how[0] == LIMIT) == ("gpt_oss" in spelling or spelling in ("deepseek_v4", "other clamps"))


PACKED = {
    "chunk": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], True),
    "gate second": (lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]), False),
    "split": (lambda x: F.silu(x.split(8, dim=-1)[0]) * x.split(8, dim=-1)[1], True),
    "slices": (lambda x: F.gelu(x[..., :8]) * x[..., 8:], True),
    "gpt_oss": (lambda x: SPELLINGS["gpt_oss"](x[..., ::2], x[..., 1::2]), True),
    "interleaved, gate second": (lambda x: F.silu(x[..., 1::2]) * x[..., ::2], False),
    "minimax_m3": (lambda x: SPELLINGS["gpt_oss"](*x.chunk(2, dim=-1)), True),
}


@pytest.mark.parametrize("name", PACKED)
def test_halves_of_one_projection_become_the_packed_operator(name):
    fn, gate_first = PACKED[name]
    x = torch.randn(3, 5, 16).requires_grad_()
    assert_fused(fn, [x], "swiglu")
    _, _, *layout = operators(fn, [x])["swiglu_packed"][:4]
    assert layout == [gate_first, name in ("gpt_oss", "interleaved, gate second")]


def test_thirds_of_one_projection_use_the_plain_operator():
    def thirds(x):
        return F.silu(x[..., :4]) * x[..., 8:]

    x = torch.randn(3, 12).requires_grad_()
    assert_fused(thirds, [x], "swiglu")
    assert "swiglu_packed" not in operators(thirds, [x])


NEAR_MISSES = {
    "gate times itself": (lambda g, u: F.silu(g) * g + u, "same value"),
    "broadcast up": (lambda g, u: F.silu(g) * u[..., :1], "alike"),
    "dtypes differ": (lambda g, u: F.silu(g) * u.to(torch.bfloat16), "alike"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused(name):
    fn, reason = NEAR_MISSES[name]
    assert_refused(fn, gate_and_up(3, 5, 8), "swiglu", reason)


NO_SITES = {
    "relu": lambda g, u: F.relu(g) * u,
    "sum": lambda g, u: F.silu(g) + u,
    "sigmoid gate": lambda g, u: torch.sigmoid(g) * u,
    "sigmoid of another": lambda g, u: g * torch.sigmoid(u) * u.sin(),
    "no gate": lambda g, u: F.gelu(g) @ u.transpose(-1, -2),
    "constant": lambda g, u: F.silu(g) * 2.0 + u,
    "sigmoid scaled by a tensor": lambda g, u: g * torch.sigmoid(u * g) * u,
    "relu cubed": lambda g, u: F.relu(g).pow(3) * u,
    "non-gated": lambda g, u: F.relu(g).pow(2) + u,
    "gelu of another": lambda g, u: 0.5 * g * (1 + torch.erf(u.sin() / math.sqrt(2.0))) * u,
    "gelu not halved": lambda g, u: g * (1 + torch.erf(g / math.sqrt(2.0))) * u,
    "gelu by another constant": lambda g, u: 0.5 * g * (1 + torch.erf(g / 1.5)) * u,
    "gelu with another cube": lambda g, u: 0.5 * g * (1 + torch.tanh(0.7978845608 * (g + 0.04 * g**3))) * u,
    "gelu with a square": lambda g, u: 0.5 * g * (1 + torch.tanh(0.7978845608 * (g + 0.044715 * g**2))) * u,
    "gelu with a constant": lambda g, u: 0.5 * g * (1 + torch.tanh(0.7978845608 * (g + 0.044715 * g**3) + 0.1)) * u,
    "gelu less": lambda g, u: 0.5 * g * (torch.erf(g / math.sqrt(2.0)) - 1) * u,
    "leaky": lambda g, u: F.leaky_relu(g) * u,
}


@pytest.mark.parametrize("name", NO_SITES)
def test_other_products_are_no_sites(name):
    assert_unseen(NO_SITES[name], gate_and_up(3, 5, 8), "swiglu")


PARTLY = {
    "another limit of gate": lambda g, u: F.silu(g.clamp(max=2.0)) * u.clamp(min=-0.5, max=0.5),
    "gate limited below": lambda g, u: F.silu(g.clamp(-1.0, 1.0)) * u.clamp(-1.0, 1.0),
    "limits differ": lambda g, u: F.silu(g.clamp(max=1.0)) * u.clamp(min=-0.5, max=1.0),
    "up alone": lambda g, u: F.silu(g) * u.clamp(-1.0, 1.0),
    "after the activation": lambda g, u: (F.silu(g) * u).clamp(max=0.5),
    "by tensors": lambda g, u: F.silu(torch.clamp(g, max=u.detach())) * u,
}


@pytest.mark.parametrize("name", PARTLY)
def test_other_limits_stay_outside(name):
    inputs = gate_and_up(3, 5, 8)
    assert_fused(PARTLY[name], inputs, "swiglu")
    assert operators(PARTLY[name], inputs)["swiglu"][3] is None


def test_a_limit_that_is_no_number_of_the_dtype_stays_outside():
    """Eager rounds it or does not, by device; in float32 it is one like any other."""
    fn = lambda g, u: F.silu(g.clamp(max=0.7)) * u.clamp(min=-0.7, max=0.7)  # noqa: E731
    for dtype, limit in ((torch.bfloat16, None), (torch.float32, 0.7)):
        inputs = gate_and_up(3, 5, 8, dtype=dtype)
        assert_fused(fn, inputs, "swiglu")
        assert operators(fn, inputs)["swiglu"][3] == limit


def test_a_limit_without_gradient_stays_outside():
    def mlp(gate, up):
        with torch.no_grad():
            limited = gate.clamp(max=LIMIT)
        return F.silu(limited) * up.clamp(min=-LIMIT, max=LIMIT) + 0 * gate

    inputs = gate_and_up(3, 8)
    assert_fused(mlp, inputs, "swiglu")
    assert operators(mlp, inputs)["swiglu"][3] is None


def test_halves_taken_without_gradient_are_not_one_projection():
    def mlp(gate_up):
        gate = gate_up[..., :4]
        with torch.no_grad():
            up = gate_up[..., 4:]
        return F.silu(gate) * up

    inputs = [torch.randn(3, 8).requires_grad_()]
    assert_fused(mlp, inputs, "swiglu")
    assert "swiglu_packed" not in operators(mlp, inputs)


def test_a_sigmoid_without_gradient_is_no_silu():
    def mlp(gate, up):
        with torch.no_grad():
            sigmoid = torch.sigmoid(gate)
        return (gate * sigmoid) * up

    assert_unseen(mlp, gate_and_up(3, 5, 8), "swiglu")


@pytest.mark.parametrize("detached", ["half", "cube", "erf"])
def test_a_part_without_gradient_makes_no_gelu(detached):
    def without(part, value):
        return value.detach() if part == detached else value

    def mlp(gate, up):
        p = without("cube", 0.044715 * gate**3)
        t = torch.tanh(0.7978845608 * (gate + p)) if detached == "cube" else torch.erf(gate * 0.5**0.5)
        return without("half", 0.5 * gate) * (1 + without("erf", t)) * up

    assert_unseen(mlp, gate_and_up(3, 5, 8), "swiglu")


def test_gelu_of_what_is_written_to_halfway_is_refused():
    def mlp(gate, up):
        h = gate * 1.0001
        t = torch.erf(h / math.sqrt(2.0))
        h.mul_(2.0)
        return 0.5 * h * (1 + t) * up

    fused, _ = explain(mlp, *gate_and_up(3, 5, 8)).counts().get("swiglu", (0, 0))
    assert fused == 0
    assert_right(mlp, gate_and_up(3, 5, 8))


def test_a_result_viewed_after_a_graph_break_keeps_its_strides():
    def model(g, u):
        y = F.silu(g) * u
        torch._dynamo.graph_break()
        return y.transpose(1, 2).view(2, 8, 64)

    inputs = [t.transpose(1, 2).detach().requires_grad_() for t in gate_and_up(2, 8, 4, 16)]
    assert_refused(model, inputs, "swiglu", "memory layout")


def test_the_operand_of_an_in_place_sum_is_only_read():
    def fn(gate, up):
        total = torch.zeros_like(gate)
        total += gate
        return F.silu(gate) * up + total

    assert_fused(fn, gate_and_up(3, 8), "swiglu")


def test_an_operator_that_refuses_its_arguments_leaves_the_graph_alone(monkeypatch):
    def refuse(*args):
        raise ValueError("not these")

    monkeypatch.setattr("fused_backend.kernels.swiglu.check", refuse)
    assert_refused(lambda gate, up: F.silu(gate) * up, gate_and_up(3, 8), "swiglu", "not these")


def experts_of(kind, implementation):
    """The layer as a function of hidden states, routing weights and parameters."""
    config = SimpleNamespace(
        num_local_experts=2, hidden_size=16, intermediate_size=16, hidden_act="silu", swiglu_alpha=1.702,
        swiglu_limit=LIMIT, _experts_implementation=implementation,
    )  # fmt: skip
    module, chosen = kind(config), torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]])
    named = dict(module.named_parameters())

    def run(x, weights, *parameters):
        return torch.func.functional_call(module, dict(zip(named, parameters, strict=True)), (x, chosen, weights))

    return run, [p.shape for p in named.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("kind", [GptOssExperts, MiniMaxM3VLExperts, DeepseekV4Experts])
def test_limited_experts_are_fused_however_they_are_multiplied(kind, implementation, dtype):
    run, shapes = experts_of(kind, implementation)
    inputs = [(torch.randn(shape) / 2).to(dtype).requires_grad_() for shape in ((5, 16), (5, 2), *shapes)]
    if implementation != "grouped_mm":
        assert_fused(run, inputs, "swiglu")
        return
    assert explain(run, *inputs).counts() == {"swiglu": (1, 0)}
    torch._dynamo.reset()
    by_batches, _ = experts_of(kind, "batched_mm")  # grouped products have no float64
    judge(torch.compile(run, backend="fused", options=OPTIONS), by_batches, inputs, [torch.randn(5, 16)], largest=False)


def test_gelu_written_out_in_float64_is_left_as_it_is():
    """Seven digits of a constant are not all that float64 shows."""
    inputs = [t.double() for t in gate_and_up(2, 3, 8)]
    assert_unseen(lambda g, u: g * 0.5 * (1.0 + torch.erf(g * 0.70710678)) * u, inputs, "swiglu")
