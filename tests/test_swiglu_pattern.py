"""swiglu: which spellings the pattern recognises, which look-alikes it refuses, and that the numbers are right."""

import math

import pytest
import torch
import torch.nn.functional as F
from _graphs import assert_fused, assert_refused, assert_right, assert_unseen, operators
from fused_backend.compiler import explain


def gate_and_up(*shape, dtype=torch.float32):
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for _ in range(2)]


SPELLINGS = {
    "silu": lambda g, u: F.silu(g) * u,
    "up first": lambda g, u: u * F.silu(g),
    "sigmoid": lambda g, u: g * torch.sigmoid(g) * u,
    "module": lambda g, u: torch.nn.SiLU()(g) * u,
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu module": lambda g, u: torch.mul(torch.nn.GELU(approximate="none")(g), u),
    "gelu tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
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
    assert_fused(SPELLINGS[spelling], gate_and_up(3, 5, 8, dtype=dtype), "swiglu")


PACKED = {
    "chunk": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], True),
    "gate second": (lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]), False),
    "split": (lambda x: F.silu(x.split(8, dim=-1)[0]) * x.split(8, dim=-1)[1], True),
    "slices": (lambda x: F.gelu(x[..., :8]) * x[..., 8:], True),
}


@pytest.mark.parametrize("name", PACKED)
def test_halves_of_one_projection_become_the_packed_operator(name):
    fn, gate_first = PACKED[name]
    x = torch.randn(3, 5, 16).requires_grad_()
    assert_fused(fn, [x], "swiglu")
    assert f"swiglu_packed:{gate_first}" in [f"{n}:{a[-1]}" for n, a in operators(fn, [x]).items()]


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
    "scaled sigmoid": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
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

    monkeypatch.setattr("fused_backend.kernels.swiglu._check", refuse)
    assert_refused(lambda gate, up: F.silu(gate) * up, gate_and_up(3, 8), "swiglu", "not these")
