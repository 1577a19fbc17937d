"""Gated MLPs: act(gate) * up, with gate and up apart or the two halves of one projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ..kernels import swiglu as kernels
from ._fusion import Emitter, Fusion, Idiom, Match, Value, static_bytes

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def gelu_tanh_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _example() -> dict[str, Tensor]:
    return {"gate": torch.zeros(2, 4), "up": torch.zeros(2, 4)}


def anchor(value: Value) -> bool:
    """A product of an activation and another tensor."""
    factors = [a for a in value.args if isinstance(a, Value)]
    return value.op == "mul" and len(factors) == 2 and any(f.op in _ACTIVATIONS for f in factors)


def refuse(match: Match) -> str | None:
    gate, up = match["gate"], match["up"]
    if gate is up:
        return "gate and up are the same value, so this is no gated MLP"
    if not _same(gate, up):
        return f"gate is {gate.dtype} {gate.shape} and up {up.dtype} {up.shape}: they must be alike"
    if not gate.shape:
        return "gate and up are scalars"
    if gate.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"no kernel for {gate.dtype}"
    return None


def _same(a: Value, b: Value) -> bool:
    return a.dtype == b.dtype and [str(n) for n in a.shape] == [str(n) for n in b.shape]


def replace(match: Match, emit: Emitter) -> Node:
    gate, up, activation = match["gate"], match["up"], match.idiom.means["activation"]
    if _packed(gate, up):
        gate_first = gate.args[1] == 0
        return emit.call(kernels.swiglu_packed, gate.args[0], activation, gate_first)
    return emit.call(kernels.swiglu, gate, up, activation)


def _packed(gate: Value, up: Value) -> bool:
    """Are they the two halves of one projection?"""
    halves = gate.op == up.op == "half" and gate.args[0] is up.args[0] and gate.args[1] != up.args[1]
    return halves and gate.cut == up.cut


FUSION = Fusion(
    name="swiglu",
    anchor=anchor,
    idioms=(
        Idiom(silu_gate, _example, {"activation": "silu"}),
        Idiom(gelu_gate, _example, {"activation": "gelu"}),
        Idiom(gelu_tanh_gate, _example, {"activation": "gelu_tanh"}),
    ),
    refuse=refuse,
    replace=replace,
    saved_bytes=lambda match: static_bytes([match["gate"], match["up"]]),
    priority=30,
)
