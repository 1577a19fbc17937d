"""Define an operator: a schema, two implementations, shapes, a backward and its cost, in one call.

Operators are registered with `torch.library` directly rather than through `custom_op`: a training step runs
hundreds of them and the decorator's checks cost tens of microseconds per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula

from ._launch import HAS_TRITON

NAMESPACE = "fused_backend"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# op -> bytes read and written by one call, as a function of the call's arguments. The planner's cost model.
BYTES_MOVED: dict[torch._ops.OpOverload, Callable[..., int]] = {}
# op -> bytes that one call allocates beside its outputs and frees again, where that is worth counting.
WORKSPACE: dict[torch._ops.OpOverload, Callable[..., int]] = {}


def define_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    triton: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
    bytes_moved: Callable[..., int],
    workspace: Callable[..., int] | None = None,
) -> torch._ops.OpOverload:
    """Register `fused_backend::<schema>` and return its overload.

    `reference` (plain torch) serves CPU and every device without Triton; `triton` serves CUDA (ROCm too) and XPU.
    `fake` gives output shapes and must add no guards: no comparisons of sizes. `flops`, `bytes_moved` and `workspace`
    take the call's own arguments. The operator never writes to an input.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def without_autocast(*args: Any) -> Any:
        # The rewrite has made every cast explicit; autocast must not add its own inside.
        with torch._C._DisableAutocast():
            return reference(*args)

    def on_the_tensors_device(*args: Any) -> Any:
        # Triton launches on the current device, which need not be where the tensors are.
        device = next(a.device for a in tree_leaves(args) if isinstance(a, torch.Tensor))
        with torch._C._DisableAutocast():
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return triton(*args)
            return triton(*args)

    _LIBRARY.impl(name, without_autocast, "CompositeExplicitAutograd")
    for key in ("CUDA", "XPU") if HAS_TRITON else ():
        _LIBRARY.impl(name, on_the_tensors_device, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    packet = getattr(getattr(torch.ops, NAMESPACE), name)
    register_flop_formula(packet, get_raw=True)(lambda *args, out_val=None, **kwargs: flops(*args, **kwargs))
    BYTES_MOVED[packet.default] = bytes_moved
    if workspace is not None:
        WORKSPACE[packet.default] = workspace
    return packet.default


def define_backward(
    op: torch._ops.OpOverload,
    *,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Give `op` its gradient. `setup_context(ctx, inputs, output)`, `backward(ctx, *d_outputs)`."""
    torch.library.register_autograd(op, backward, setup_context=setup_context, lib=_LIBRARY)


# op -> how a backward makes the op's first output again instead of keeping it: None for by the same call, or a function
# from the call's arguments and outputs to another operator and its arguments.
REMADE: dict[torch._ops.OpOverload, Callable[..., tuple[Any, tuple]] | None] = {}


def remade(op: torch._ops.OpOverload, by: Callable[..., tuple[Any, tuple]] | None = None) -> None:
    """Allow the first output to be computed again in the backward: the op moves bytes, and its backward reads these
    inputs anyhow, so that nothing more is kept."""
    REMADE[op] = by


def refuse_double_backward(*ops: torch._ops.OpOverload) -> None:
    """Make differentiating a backward operator raise one clear sentence instead of silently giving nothing."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    def refusing(name: str) -> Callable[..., Any]:
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(
                f"{name} has no second derivative. Where gradients of gradients are needed, compile with "
                f"options={{'fusions': 'none'}} or without backend='fused'"
            )

        return backward

    for op in ops:
        define_backward(op, setup_context=setup_context, backward=refusing(op.name()))


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of all elements: what reading or writing each tensor once moves."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
