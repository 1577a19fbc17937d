"""Gated MLPs: act(gate) * up, with gate and up apart or the two halves of one projection, limited or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ..kernels import swiglu as kernels
from ._fusion import Emitter, Fusion, Idiom, Match, Value, static_bytes


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).pow(2)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu2": relu2,
}  # fmt: skip


_HOW = {"limit": None, "alpha": 1.0, "offset": 0.0}  # numbers that a form may have, and what they are where it has not


def _idioms(activation: str, act: Callable[..., Tensor]) -> list[Idiom]:
    """The forms of one activation. The last two are DeepSeek-V4's and MiniMax-M3's."""

    def gate(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up

    def limited_gate(gate: Tensor, up: Tensor, low: float, limit: float) -> Tensor:
        return act(gate.clamp(max=limit)) * up.clamp(min=low, max=limit)

    def limited_offset_gate(gate: Tensor, up: Tensor, low: float, limit: float, offset: float) -> Tensor:
        return (up.clamp(min=low, max=limit) + offset) * act(gate.clamp(max=limit))

    found = []
    for function in (limited_offset_gate, limited_gate, gate):
        function.__name__ = f"{activation}_{function.__name__}"
        found.append(Idiom(function, _example, {"activation": activation}))
    return found


def scaled_silu_gate(gate: Tensor, up: Tensor, alpha: float) -> Tensor:
    return gate * torch.sigmoid(gate * alpha) * up


def gpt_oss_gate(gate: Tensor, up: Tensor, low: float, limit: float, alpha: float, offset: float) -> Tensor:
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=low, max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + offset) * glu


def _example() -> dict[str, Tensor]:
    return {"gate": torch.zeros(2, 4), "up": torch.zeros(2, 4)}


def anchor(value: Value) -> bool:
    """A product of an activation and another tensor."""
    factors = [a for a in value.args if isinstance(a, Value)]
    return value.op == "mul" and len(factors) == 2 and any(_activates(f) for f in factors)


def _activates(value: Value) -> bool:
    source = next(iter(value.inputs()), value)
    if value.op == "pow":
        return source.op == "relu" and value.args[1] == 2
    return value.op in _ACTIVATIONS or (value.op == "mul" and _scaled_silu(*value.args))


def _scaled_silu(a: Any, b: Any) -> bool:
    """x * sigmoid(x * number)."""
    return any(
        isinstance(s, Value) and s.op == "sigmoid" and s.args[0].op == "mul" and s.args[0].inputs() == [x]
        for x, s in ((a, b), (b, a))
    )


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
    limit = match.get("limit")
    if limit is not None and match["low"] != -limit:
        return f"up is limited to {match['low']} and {limit}, which are not one number"
    if limit is not None and torch.tensor(limit, dtype=gate.dtype).float() != torch.tensor(limit).float():
        return f"the limit {limit} is no number of {gate.dtype}"
    return None


def _same(a: Value, b: Value) -> bool:
    return a.dtype == b.dtype and [str(n) for n in a.shape] == [str(n) for n in b.shape]


def replace(match: Match, emit: Emitter) -> Node:
    gate, up, activation = match["gate"], match["up"], match.idiom.means["activation"]
    how = [float(match[name]) if name in match.bound else default for name, default in _HOW.items()]
    if _packed(gate, up):
        gate_first, interleaved = gate.args[1] == 0, gate.op == "every_other"
        return emit.call(kernels.swiglu_packed, gate.args[0], activation, gate_first, interleaved, *how)
    return emit.call(kernels.swiglu, gate, up, activation, *how)


def _packed(gate: Value, up: Value) -> bool:
    """Are they the two halves of one projection, one behind the other or interleaved?"""
    parts = gate.op == up.op and gate.op in ("half", "every_other")
    return parts and gate.args[0] is up.args[0] and gate.args[1] != up.args[1] and gate.cut == up.cut


_SCALED = {"activation": "silu"}

FUSION = Fusion(
    name="swiglu",
    anchor=anchor,
    idioms=(
        *(idiom for name, act in _ACTIVATIONS.items() for idiom in _idioms(name, act)),
        Idiom(gpt_oss_gate, _example, _SCALED),
        Idiom(scaled_silu_gate, _example, _SCALED),
    ),
    refuse=refuse,
    replace=replace,
    saved_bytes=lambda match: static_bytes([match["gate"], match["up"]]),
    priority=30,
)
