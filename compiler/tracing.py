"""What Dynamo need not look into while it traces for this backend: bitsandbytes' 4-bit linear.

Its gradient is an autograd.Function. Dynamo traces both passes of it into bodies, for each linear layer of each
decoder layer: 40 % of the time it needs for a QLoRA model. Here the call becomes the one operator that has the same
two passes, `fused_backend::gemm_4bit`. Other backends in the same process are given what they are always given, and so
is this one where the function is not word for word the one that the operator was written after.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import sys
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack

from ..kernels._gemm_4bit import gemm_4bit

log = logging.getLogger("fused_backend")

_MODULE, _FUNCTION = "bitsandbytes.autograd._functions", "MatMul4Bit"
# SHA-256 of the text of MatMul4Bit and of the two functions that its backward calls.
_READ = {
    "da60213408f294545a9b875d6fa5e1bb6c00b22cdf5264d1547b7003736539a5",  # 0.50.0 to 0.50.2
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def trace_less() -> None:
    """Make Dynamo ask us about every autograd.Function that it meets for a backend marked by `ours`."""
    try:
        from torch._dynamo.variables import UserFunctionVariable
        from torch._dynamo.variables.misc import AutogradFunctionVariable

        call_apply = AutogradFunctionVariable.call_apply
    except (ImportError, AttributeError) as error:  # another torch: it traces what it always does
        log.debug("Dynamo traces bitsandbytes' functions: %s", error)
        return
    if getattr(call_apply, "asks_fused_backend", False):
        return

    @functools.wraps(call_apply)
    def asking(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        # Inside grad or vmap, which Dynamo enters while it traces them, an operator would need rules for these.
        plain = len(args) == 5 and not kwargs and peek_interpreter_stack() is None
        if plain and _is_read(self.fn_cls) and _for_us(tx.output.compiler_fn):
            product = UserFunctionVariable(_matmul_4bit).call_function(tx, list(args), {})
            if not product.is_python_constant():
                return product
        return call_apply(self, tx, args, kwargs)

    asking.asks_fused_backend = True  # type: ignore[attr-defined]
    AutogradFunctionVariable.call_apply = asking  # type: ignore[method-assign]


def ours(backend: Any) -> Any:
    """Mark a backend as one of this package's."""
    backend.of_fused_backend = True
    return backend


def _for_us(backend: Any) -> bool:
    """Is this, under what torch.compile and Dynamo wrap backends in, one that `ours` marked?"""
    for _ in range(8):
        if getattr(backend, "of_fused_backend", False):
            return True
        inner = [getattr(backend, name, None) for name in ("_torchdynamo_orig_backend", "compiler_fn", "func")]
        backend = next((b for b in inner if b is not None), None)
    return False


def _is_read(function: type) -> bool:
    return (function.__module__, function.__qualname__) == (_MODULE, _FUNCTION) and _text(function) in _READ


@functools.cache
def _text(function: type) -> str:
    functional = sys.modules["bitsandbytes.functional"]
    try:
        parts = [inspect.getsource(f) for f in (function, functional.dequantize_4bit, functional.dequantize_blockwise)]
    except (OSError, TypeError, AttributeError):
        return ""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _matmul_4bit(x: Any, codes: Any, out: Any, bias: Any, state: Any) -> Any:
    """Traced by Dynamo in the place of MatMul4Bit.apply; None where that does something else."""
    if out is not None or state.dtype not in _FLOATS:
        return None
    form, absmax, scales = (state.blocksize, state.quant_type), state.absmax, (None, None, None)
    if state.nested:
        second = state.state2
        if second.nested or second.blocksize != 256 or second.dtype != torch.float32:
            return None
        if second.code.device != codes.device:
            return None
        absmax, scales = second.absmax, (absmax, second.code, state.offset)
    return gemm_4bit(x, codes.view(-1, 1), state.shape, absmax, *form, bias, *scales, state.dtype)
