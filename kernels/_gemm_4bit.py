"""bitsandbytes' 4-bit linear as one operator with its gradient, where bitsandbytes has an autograd.Function.

Both passes are bitsandbytes' own operators, in the order in which its `MatMul4Bit` calls them: the same bits. What
Dynamo meets is one call instead of a function whose two passes it would trace for every layer; see
compiler/tracing.py.

Math: y = x·Wᵀ + bias; dx = dy·W, dbias = Σ dy over the first dimension.
Shapes: x (..., K), codes: N·K/2 bytes in a column, absmax (N·K/blocksize) float32, y (..., N).
Numerics: the forward decodes W to x's dtype; the backward to `dtype`, that of the weight before it was quantized.
Cost: forward and backward 2 T K N FLOPs each. Saved: the weight's own tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._op import define_backward, define_op, nbytes


def _forward(
    x: Tensor, codes: Tensor, shape: Sequence[int], absmax: Tensor, blocksize: int, quant_type: str,
    bias: Tensor | None, absmax_8bit: Tensor | None, code: Tensor | None, offset: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if x.numel() == 0:
        return _fake(x, codes, shape)
    return torch.ops.bitsandbytes.gemm_4bit.default(
        x, codes, shape, absmax, blocksize, quant_type, bias, absmax_8bit, code, offset
    )


def _fake(x: Tensor, codes: Tensor, shape: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


gemm_4bit = define_op(
    "gemm_4bit(Tensor x, Tensor codes, int[] shape, Tensor absmax, int blocksize, str quant_type, Tensor? bias,"
    " Tensor? absmax_8bit, Tensor? code, Tensor? offset, ScalarType dtype) -> Tensor",
    reference=_forward,
    triton=_forward,
    fake=_fake,
    flops=lambda x, codes, shape, *_: 2 * x.numel() * shape[0],
    bytes_moved=lambda x, codes, shape, *_: nbytes(x, codes) + nbytes(x) // shape[1] * shape[0],
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, ctx.shape, absmax, ctx.blocksize, ctx.quant_type, bias, absmax_8bit, code, offset, ctx.dtype = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(codes, absmax, absmax_8bit, code, offset)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    codes, absmax, absmax_8bit, code, offset = ctx.saved_tensors
    dx = dbias = None
    if ctx.needs_input_grad[6]:
        dbias = dy.sum(0, dtype=ctx.bias_dtype)
    if ctx.needs_input_grad[0]:
        decode = torch.ops.bitsandbytes
        if absmax_8bit is not None:
            absmax = decode.dequantize_blockwise.default(absmax_8bit, absmax, code, 256, torch.float32) + offset
        weight = decode.dequantize_4bit.default(codes, absmax, ctx.blocksize, ctx.quant_type, ctx.shape, ctx.dtype)
        dx = torch.matmul(dy, weight.to(dy.dtype))
    return dx, None, None, None, None, None, dbias, None, None, None, None


define_backward(gemm_4bit, setup_context=_setup_context, backward=_backward)
