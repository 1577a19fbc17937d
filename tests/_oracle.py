"""The independent judge: float64 autograd of the eager idiom, and the yardstick that compares with it.

`exact()` runs an ordinary PyTorch function in float64, its own casts to float32 and below included. `judge()` holds
the fused result to the eager idiom's own error in the same dtype: at most 1.5 times it, plus one unit in the last
place of the result's dtype. No fixed tolerances, so none can be loosened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LOW = (torch.float32, torch.bfloat16, torch.float16)


class Float64(TorchFunctionMode):
    """Read every cast to a floating dtype as a cast to float64, so that an idiom's own casts lose nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("float", "half", "bfloat16"):
            return args[0].double()
        wide = lambda a: torch.float64 if isinstance(a, torch.dtype) and a in _LOW else a  # noqa: E731
        return func(*tree_map(wide, tuple(args)), **tree_map(wide, kwargs or {}))


def leaves(tensors: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Fresh leaf copies that keep strides; floating ones require gradients and take `dtype` if it is given."""

    def leaf(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
        if not t.is_floating_point():
            return copy
        return (copy.to(dtype) if dtype else copy).requires_grad_(t.requires_grad)

    return [leaf(t) for t in tensors]


def run(fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[torch.Tensor]) -> list[Any]:
    """Outputs of `fn`, then the gradient of every input that requires one."""
    out = fn(*inputs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    grads: Sequence[Any] = ()
    if wanted:
        cots = [c.to(o.dtype) for c, o in zip(cotangents, outs, strict=True)]
        used = [(o, c) for o, c in zip(outs, cots, strict=True) if o.requires_grad]
        grads = torch.autograd.grad([o for o, _ in used], wanted, [c for _, c in used], allow_unused=True)
    return [o.detach() for o in outs] + list(grads)


def exact(fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[torch.Tensor]) -> list[Any]:
    """`run` in float64."""
    with Float64():
        return run(fn, leaves(inputs, torch.float64), [c.double() for c in cotangents])


def judge(
    fused: Callable[..., Any],
    idiom: Callable[..., Any],
    inputs: Sequence[Any],
    cotangents: Sequence[torch.Tensor],
    *,
    factor: float = 1.5,
    largest: bool = True,
) -> None:
    """Assert that `fused` is as accurate as `idiom`, in every output and every gradient."""
    with torch.no_grad():
        out = idiom(*leaves(inputs))
    # The cotangent is an input: rounded once, for everybody, so that its rounding is nobody's error.
    dtypes = [o.dtype for o in (out if isinstance(out, (tuple, list)) else (out,))]
    cotangents = [c.to(dtype) for c, dtype in zip(cotangents, dtypes, strict=True)]
    ours = run(fused, leaves(inputs), cotangents)
    eager = run(idiom, leaves(inputs), cotangents)
    truth = exact(idiom, inputs, cotangents)
    for i, (a, b, t) in enumerate(zip(ours, eager, truth, strict=True)):
        assert_as_accurate(a, b, t, factor=factor, what=f"value {i}", largest=largest)


def assert_as_accurate(
    ours: Any,
    eager: Any,
    truth: Any,
    *,
    factor: float = 1.5,
    what: str = "value",
    ulp_of: torch.dtype | None = None,
    largest: bool = True,
) -> None:
    """The yardstick: largest and root-mean-square error at most `factor` times eager's, plus one ulp.

    The ulp is that of the result's dtype unless `ulp_of` names the dtype it was computed in.
    """
    if truth is None or eager is None:
        assert ours is None or not ours.any(), f"{what}: eager has no gradient, ours has one"
        return
    assert ours is not None, f"{what}: eager has a gradient, ours has none"
    assert ours.dtype == eager.dtype, f"{what}: dtype {ours.dtype}, eager {eager.dtype}"
    assert ours.shape == eager.shape, f"{what}: shape {tuple(ours.shape)}, eager {tuple(eager.shape)}"
    if truth.numel() == 0:
        return
    ulp = torch.finfo(ulp_of or ours.dtype).eps if ours.is_floating_point() else 0.0
    ours, eager, truth = ours.double().cpu(), eager.double().cpu(), truth.double().cpu()
    finite = torch.isfinite(eager)
    assert torch.equal(torch.isfinite(ours), finite), f"{what}: NaN or inf where eager has none, or the reverse"
    ours, eager, truth = ours[finite], eager[finite], truth[finite]
    if truth.numel() == 0:
        return
    for kind, size in (("largest", _largest), ("rms", _rms))[0 if largest else 1 :]:
        error, allowed = size(ours - truth), factor * size(eager - truth) + ulp * size(truth)
        assert error <= allowed, (
            f"{what}: {kind} error {error:.3g}, allowed {allowed:.3g} (eager {size(eager - truth):.3g})"
        )


def _largest(t: torch.Tensor) -> float:
    return t.abs().max().item()


def _rms(t: torch.Tensor) -> float:
    return t.pow(2).mean().sqrt().item()
