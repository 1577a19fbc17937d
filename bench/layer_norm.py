"""layer_norm on a GPU: our operators against torch's own fused norm and Inductor (and Liger where installed).

Run: `python bench/layer_norm.py`. A case is judged against float64 before it is timed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import fused_backend.kernels.layer_norm  # noqa: F401  (registers the operators)
import torch
import torch.nn.functional as F
from _harness import autograd_times, report_bandwidth, save, time_us, worst_error
from torch import Tensor

OPS = torch.ops.fused_backend
EPS = 1e-5
FORM = (False, None)  # rounded once, in x's dtype
# (rows, D, form, weights trained): GPT-2 XL, Falcon-7B / StarCoder2-7B, GPT-NeoX-20B, Phi-2, q-norm of heads.
CASES = [
    (8192, 4096, "plain", True),
    (8192, 4096, "plain", False),
    (8192, 4096, "residual", True),
    (8192, 4096, "residual", False),
    (8192, 1600, "residual", True),
    (8192, 2560, "residual", True),
    (8192, 4544, "residual", True),
    (8192, 6144, "residual", True),
    (8192 * 32, 128, "plain", True),
    (8192 * 32, 64, "plain", True),
]
# Arrays of rows x D read or written, each once: forward, backward.
ARRAYS = {"plain": (2, 3), "residual": (4, 4)}
Function = Callable[..., tuple[Tensor, ...]]


def by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As Cohere writes it, with a bias."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h - h.mean(-1, keepdim=True)
    return (w.to(h.dtype) * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)) + b.to(h.dtype)).to(x.dtype)


def torch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b, EPS)


def in_form(norm: Callable[[Tensor, Tensor, Tensor], Tensor], form: str) -> Function:
    """Outputs of one site: (y,), or (y, s) in the residual form."""

    def add_norm(x: Tensor, w: Tensor, b: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        s = x + residual
        return norm(s, w, b), s

    return add_norm if form == "residual" else lambda x, w, b: (norm(x, w, b),)


def fused(form: str) -> Function:
    if form == "plain":
        return lambda x, w, b: OPS.layer_norm(x, w, b, EPS, *FORM)[:1]
    return lambda x, w, b, residual: OPS.add_layer_norm(x, residual, w, b, EPS, *FORM)[:2]


def candidates(form: str) -> dict[str, Function]:
    """Name -> differentiable function of (x, w, b) or (x, w, b, residual)."""
    named = {
        "eager": in_form(torch_norm, form),
        "by hand": in_form(by_hand, form),
        "inductor": torch.compile(in_form(torch_norm, form), dynamic=False),
        "fused": fused(form),
    }
    if importlib.util.find_spec("liger_kernel") and form == "plain":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # type: ignore[import-not-found]

        named["liger"] = lambda x, w, b: (LigerLayerNormFunction.apply(x, w, b, EPS),)
    return named


def raw_times(form: str, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], need: bool) -> tuple[float, float]:
    """Forward and backward operators alone, without autograd."""
    x, w, b, *rest = (t.detach() for t in inputs)
    dy = cotangents[0]
    if form == "plain":
        stats = OPS.layer_norm(x, w, b, EPS, *FORM)[1:]
        return (
            time_us(lambda: OPS.layer_norm(x, w, b, EPS, *FORM)),
            time_us(lambda: OPS.layer_norm_bwd(dy, None, x, w, b, *stats, False, need, need)),
        )
    _, s, *stats = OPS.add_layer_norm(x, *rest, w, b, EPS, *FORM)
    return (
        time_us(lambda: OPS.add_layer_norm(x, *rest, w, b, EPS, *FORM)),
        time_us(lambda: OPS.layer_norm_bwd(dy, cotangents[1], s, w, b, *stats, False, need, need)),
    )


def measure(T: int, D: int, form: str, trained: bool, rows: list[dict[str, Any]]) -> None:
    torch._dynamo.reset()
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    inputs = [make(T, D).requires_grad_(), *(make(D).requires_grad_(trained) for _ in range(2))]
    if form == "residual":
        inputs.append(make(T, D).requires_grad_())
    cotangents = [make(T, D) for _ in range(2 if form == "residual" else 1)]
    case = f"{T}x{D} bf16 {form}{'' if trained else ' frozen w'}"
    error = worst_error(f"layer_norm {case}", fused(form), in_form(torch_norm, form), inputs, cotangents)

    times = {"fused ops": raw_times(form, inputs, cotangents, trained)}
    for name, fn in candidates(form).items():
        times[name] = autograd_times(fn, inputs, cotangents)
    forward, backward = (arrays * T * D * 2 for arrays in ARRAYS[form])
    report_bandwidth("layer_norm", case, times, (forward, backward), error, rows)


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        measure(*case, rows)
    save("layer_norm", rows)
    return rows


if __name__ == "__main__":
    main()
