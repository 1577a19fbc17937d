"""rms_norm on a GPU: our operators against eager, torch's own norm and Inductor (and Liger where installed).

Run: `python bench/rms_norm.py`. A case is judged against float64 before it is timed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import fused_backend.kernels.rms_norm  # noqa: F401  (registers the operators)
import torch
import torch.nn.functional as F
from _harness import autograd_times, report_bandwidth, save, time_us, worst_error
from torch import Tensor

OPS = torch.ops.fused_backend
EPS = 1e-6
LLAMA = (0.0, True)
# (rows, D, form, weight trained): norms of Llama-3-8B and 3.2-1B, q-norm and gated norm of Qwen3 shapes.
CASES = [
    (8192, 4096, "plain", True),
    (8192, 4096, "plain", False),
    (8192, 4096, "residual", True),
    (8192, 4096, "residual", False),
    (8192, 2048, "residual", True),
    (8192, 8192, "residual", True),
    (8192 * 32, 128, "plain", True),
    (8192 * 32, 64, "plain", True),
    (8192 * 32, 128, "silu", True),
    (4096, 4095, "residual", True),
]
# Arrays of rows x D read or written, each once: forward, backward.
ARRAYS = {"plain": (2, 3), "residual": (4, 4), "silu": (3, 5)}


def llama(x: Tensor, w: Tensor) -> Tensor:
    """Computed in float32, or in float64 for float64 inputs, which is the truth here."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def torch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, EPS)


def in_form(norm: Callable[[Tensor, Tensor], Tensor], form: str) -> Callable[..., tuple[Tensor, ...]]:
    """Outputs of one site: (y,), or (y, s) in the residual form."""

    def add_norm(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        s = x + residual
        return norm(s, w), s

    def gated_norm(x: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(z.dtype, torch.float32)
        return ((norm(x, w) * F.silu(z.to(wide))).to(x.dtype),)

    return {"plain": lambda x, w: (norm(x, w),), "residual": add_norm, "silu": gated_norm}[form]


def fused(form: str) -> Callable[..., tuple[Tensor, ...]]:
    if form == "plain":
        return lambda x, w: OPS.rms_norm(x, w, EPS, *LLAMA)[:1]
    if form == "residual":
        return lambda x, w, residual: OPS.add_rms_norm(x, residual, w, EPS, *LLAMA)[:2]
    return lambda x, w, z: OPS.gated_rms_norm(x, w, z, EPS, *LLAMA, form)[:1]


def candidates(form: str) -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    """Name -> differentiable function of (x, w) or (x, w, residual or z)."""
    eager = in_form(llama, form)
    named = {
        "eager": eager,
        "torch norm": in_form(torch_norm, form),
        "inductor": torch.compile(eager, dynamic=False),
        "fused": fused(form),
    }
    if importlib.util.find_spec("liger_kernel") and form == "plain":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

        # Its last argument lets the backward write over dy; timing repeats need dy unharmed.
        named["liger"] = lambda x, w: (LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),)
    return named


def raw_times(form: str, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], need_dw: bool) -> tuple[float, float]:
    """Forward and backward operators alone, without autograd."""
    x, w, *rest = (t.detach() for t in inputs)
    dy = cotangents[0]
    if form == "plain":
        rstd = OPS.rms_norm(x, w, EPS, *LLAMA)[1]
        return (
            time_us(lambda: OPS.rms_norm(x, w, EPS, *LLAMA)),
            time_us(lambda: OPS.rms_norm_bwd(dy, None, x, w, rstd, *LLAMA, need_dw)),
        )
    if form == "residual":
        _, s, rstd = OPS.add_rms_norm(x, *rest, w, EPS, *LLAMA)
        return (
            time_us(lambda: OPS.add_rms_norm(x, *rest, w, EPS, *LLAMA)),
            time_us(lambda: OPS.rms_norm_bwd(dy, cotangents[1], s, w, rstd, *LLAMA, need_dw)),
        )
    rstd = OPS.gated_rms_norm(x, w, *rest, EPS, *LLAMA, form)[1]
    return (
        time_us(lambda: OPS.gated_rms_norm(x, w, *rest, EPS, *LLAMA, form)),
        time_us(lambda: OPS.gated_rms_norm_bwd(dy, x, w, *rest, rstd, *LLAMA, form, need_dw)),
    )


def measure(T: int, D: int, form: str, need_dw: bool, rows: list[dict[str, Any]]) -> None:
    torch._dynamo.reset()
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    inputs = [
        make(T, D).requires_grad_(),
        make(D).requires_grad_(need_dw),
    ]
    if form != "plain":
        inputs.append(make(T, D).requires_grad_())
    cotangents = [make(T, D) for _ in range(2 if form == "residual" else 1)]
    case = f"{T}x{D} bf16 {form}{'' if need_dw else ' frozen w'}"
    error = worst_error(f"rms_norm {case}", fused(form), in_form(llama, form), inputs, cotangents)

    times = {"fused ops": raw_times(form, inputs, cotangents, need_dw)}
    for name, fn in candidates(form).items():
        times[name] = autograd_times(fn, inputs, cotangents)
    forward, backward = (arrays * T * D * 2 for arrays in ARRAYS[form])
    report_bandwidth("rms_norm", case, times, (forward, backward), error, rows)


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        measure(*case, rows)
    save("rms_norm", rows)
    return rows


if __name__ == "__main__":
    main()
