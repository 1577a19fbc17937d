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
IDIOMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
}
# (tokens, ffn, activation, packed): the widths of Llama-3-8B and Llama-2-7B, then an odd one.
CASES = [
    (8192, 14336, "silu", False),
    (8192, 11008, "silu", False),
    (8192, 14336, "gelu_tanh", False),
    (8192, 14336, "gelu", False),
    (8192, 14336, "silu", True),
    (4096, 4095, "silu", False),
    (4096, 4095, "silu", True),
]


def packed_idiom(activation: str) -> Callable[[Tensor], Tensor]:
    return lambda gate_up: IDIOMS[activation](*gate_up.chunk(2, dim=-1))


def candidates(activation: str, packed: bool) -> dict[str, Callable[..., Tensor]]:
    """Name -> differentiable function of the case's inputs."""
    idiom = packed_idiom(activation) if packed else IDIOMS[activation]
    ours = (
        (lambda gate_up: OPS.swiglu_packed(gate_up, activation, True))
        if packed
        else (lambda gate, up: OPS.swiglu(gate, up, activation))
    )
    named = {"eager": idiom, "inductor": torch.compile(idiom, dynamic=False), "fused": ours}
    if importlib.util.find_spec("liger_kernel") and activation == "silu" and not packed:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found]

        # Its backward writes over gate and up: it works on copies, made outside the timed region.
        named["liger"] = LigerSiLUMulFunction.apply
    return named


def relative_errors(fn: Callable[..., Tensor], inputs: Sequence[Tensor], dh: Tensor, truth: Sequence[Tensor]):
    """RMS error of the output and of every gradient, relative to the float64 values."""
    h = fn(*inputs)
    values = [h.detach(), *torch.autograd.grad(h, list(inputs), dh)]
    return [((v.double() - t).norm() / t.norm()).item() for v, t in zip(values, truth, strict=True)]


def check(activation: str, packed: bool, inputs: Sequence[Tensor], dh: Tensor) -> float:
    """Our largest error, in units of eager's; raises above 1.5, the project's yardstick."""
    few = [t.detach()[:64].clone().requires_grad_() for t in inputs]
    exact_inputs = [t.detach().double().requires_grad_() for t in few]
    named = candidates(activation, packed)
    h = named["eager"](*exact_inputs)
    truth = [h.detach(), *torch.autograd.grad(h, exact_inputs, dh[:64].double())]
    eager = relative_errors(named["eager"], few, dh[:64], truth)
    fused = relative_errors(named["fused"], few, dh[:64], truth)
    worst = max(a / b for a, b in zip(fused, eager, strict=True))
    if worst > 1.5:
        raise AssertionError(f"swiglu {activation} packed={packed}: error {worst:.2f} times eager's")
    return worst


def raw_times(activation: str, inputs: Sequence[Tensor], dh: Tensor) -> tuple[float, float]:
    """Forward and backward operators alone, without autograd."""
    plain = [t.detach() for t in inputs]
    if len(plain) == 1:
        return (
            time_us(lambda: OPS.swiglu_packed(plain[0], activation, True)),
            time_us(lambda: OPS.swiglu_packed_bwd(dh, plain[0], activation, True)),
        )
    return (
        time_us(lambda: OPS.swiglu(*plain, activation)),
        time_us(lambda: OPS.swiglu_bwd(dh, *plain, activation)),
    )


def autograd_times(fn: Callable[..., Tensor], inputs: Sequence[Tensor], dh: Tensor) -> tuple[float, float]:
    own = [t.detach().clone().requires_grad_() for t in inputs]
    h = fn(*own)
    return (
        time_us(lambda: fn(*own)),
        time_us(lambda: torch.autograd.grad(h, own, dh, retain_graph=True)),
    )


def measure(tokens: int, ffn: int, activation: str, packed: bool, rows: list[dict[str, Any]]) -> None:
    torch._dynamo.reset()
    options = {"device": "cuda", "dtype": torch.bfloat16}
    width, count = (2 * ffn, 1) if packed else (ffn, 2)
    inputs = [torch.randn(tokens, width, **options).requires_grad_() for _ in range(count)]
    dh = torch.randn(tokens, ffn, **options)
    error = check(activation, packed, inputs, dh)

    times = {"fused ops": raw_times(activation, inputs, dh)}
    for name, fn in candidates(activation, packed).items():
        times[name] = autograd_times(fn, inputs, dh)
    array = tokens * ffn * 2
    case = f"{tokens}x{ffn} bf16 {activation}{' packed' if packed else ''}"
    report_bandwidth("swiglu", case, times, (3 * array, 5 * array), error, rows)


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        measure(*case, rows)
    save("swiglu", rows)
    return rows


if __name__ == "__main__":
    main()
