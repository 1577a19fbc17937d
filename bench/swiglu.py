"""swiglu on a GPU: our operators against eager and Inductor (and Liger where it is installed).

Run: `python bench/swiglu.py`. A case is judged against float64 before it is timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import fused_backend.kernels.swiglu  # noqa: F401  (registers the operators)
import torch
import torch.nn.functional as F
from _harness import report_bandwidth, save, time_us
from torch import Tensor

OPS = torch.ops.fused_backend


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


IDIOMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu2": lambda gate, up: F.relu(gate).pow(2) * up,
    "gpt_oss": gpt_oss,
}
HOW: dict[str, tuple[Any, ...]] = {"gpt_oss": (7.0, 1.702, 1.0)}  # limit, alpha, offset
# (tokens, ffn, form, layout): the widths of Llama-3-8B and Llama-2-7B, an odd one, those of BitNet and gpt-oss.
CASES = [
    (8192, 14336, "silu", ""),
    (8192, 11008, "silu", ""),
    (8192, 14336, "gelu_tanh", ""),
    (8192, 14336, "gelu", ""),
    (8192, 14336, "silu", "packed"),
    (4096, 4095, "silu", ""),
    (4096, 4095, "silu", "packed"),
    (8192, 6912, "relu2", ""),
    (32768, 2880, "gpt_oss", "interleaved"),
    (32768, 2880, "gpt_oss", "packed"),
]


def idiom_of(form: str, layout: str) -> Callable[..., Tensor]:
    idiom = IDIOMS[form]
    if layout == "interleaved":
        return lambda gate_up: idiom(gate_up[..., ::2], gate_up[..., 1::2])
    return (lambda gate_up: idiom(*gate_up.chunk(2, dim=-1))) if layout else idiom


def arguments(form: str, layout: str) -> tuple[Any, ...]:
    """Those of the operator behind its tensors."""
    activation = "silu" if form in HOW else form
    how = HOW.get(form, ())
    return (activation, True, layout == "interleaved", *how) if layout else (activation, *how)


def candidates(form: str, layout: str) -> dict[str, Callable[..., Tensor]]:
    """Name -> differentiable function of the case's inputs."""
    idiom, rest = idiom_of(form, layout), arguments(form, layout)
    op = OPS.swiglu_packed if layout else OPS.swiglu
    named = {
        "eager": idiom,
        "inductor": torch.compile(idiom, dynamic=False),
        "fused": lambda *inputs: op(*inputs, *rest),
    }
    if importlib.util.find_spec("liger_kernel") and form == "silu" and not layout:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found]

        # Its backward writes over gate and up: it works on copies, made outside the timed region.
        named["liger"] = LigerSiLUMulFunction.apply
    return named


def relative_errors(fn: Callable[..., Tensor], inputs: Sequence[Tensor], dh: Tensor, truth: Sequence[Tensor]):
    """RMS error of the output and of every gradient, relative to the float64 values."""
    h = fn(*inputs)
    values = [h.detach(), *torch.autograd.grad(h, list(inputs), dh)]
    return [((v.double() - t).norm() / t.norm()).item() for v, t in zip(values, truth, strict=True)]


def check(form: str, layout: str, inputs: Sequence[Tensor], dh: Tensor) -> float:
    """Our largest error, in units of eager's; raises above 1.5, the project's yardstick."""
    few = [t.detach()[:64].clone().requires_grad_() for t in inputs]
    exact_inputs = [t.detach().double().requires_grad_() for t in few]
    named = candidates(form, layout)
    h = named["eager"](*exact_inputs)
    truth = [h.detach(), *torch.autograd.grad(h, exact_inputs, dh[:64].double())]
    eager = relative_errors(named["eager"], few, dh[:64], truth)
    fused = relative_errors(named["fused"], few, dh[:64], truth)
    worst = max(a / b for a, b in zip(fused, eager, strict=True))
    if worst > 1.5:
        raise AssertionError(f"swiglu {form} {layout}: error {worst:.2f} times eager's")
    return worst


def raw_times(form: str, layout: str, inputs: Sequence[Tensor], dh: Tensor) -> tuple[float, float]:
    """Forward and backward operators alone, without autograd."""
    plain, rest = [t.detach() for t in inputs], arguments(form, layout)
    forward, backward = (OPS.swiglu_packed, OPS.swiglu_packed_bwd) if layout else (OPS.swiglu, OPS.swiglu_bwd)
    return time_us(lambda: forward(*plain, *rest)), time_us(lambda: backward(dh, *plain, *rest))


def autograd_times(fn: Callable[..., Tensor], inputs: Sequence[Tensor], dh: Tensor) -> tuple[float, float]:
    own = [t.detach().clone().requires_grad_() for t in inputs]
    h = fn(*own)
    return (
        time_us(lambda: fn(*own)),
        time_us(lambda: torch.autograd.grad(h, own, dh, retain_graph=True)),
    )


def measure(tokens: int, ffn: int, form: str, layout: str, rows: list[dict[str, Any]]) -> None:
    torch._dynamo.reset()
    options = {"device": "cuda", "dtype": torch.bfloat16}
    width, count = (2 * ffn, 1) if layout else (ffn, 2)
    inputs = [torch.randn(tokens, width, **options).requires_grad_() for _ in range(count)]
    dh = torch.randn(tokens, ffn, **options)
    error = check(form, layout, inputs, dh)

    times = {"fused ops": raw_times(form, layout, inputs, dh)}
    for name, fn in candidates(form, layout).items():
        times[name] = autograd_times(fn, inputs, dh)
    array = tokens * ffn * 2
    case = f"{tokens}x{ffn} bf16 {form} {layout}".rstrip()
    report_bandwidth("swiglu", case, times, (3 * array, 5 * array), error, rows)


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        measure(*case, rows)
    save("swiglu", rows)
    return rows


if __name__ == "__main__":
    main()
