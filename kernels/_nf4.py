"""Weights in blocks of 4-bit codes: decoding them, and products of few rows with them that never decode to memory.

The codes are those of bitsandbytes: row-major over the flat weight, two to a byte, the earlier one in the upper
half. A block is `blocksize` consecutive elements of the flat weight: it may cross rows, and the last may be short.

Math: W = value absmax, absmax = code absmax2 + offset; see derivations/lora_nf4.py.
Shapes: W (N, K); x (T, K), y (T, N) and their gradients; T tokens, K in_features, N out_features.
Numerics: every product and sum of the formulas is rounded to float32 by itself, W once more to the dtype asked
for: the bits of bitsandbytes. FP4 has a second zero, here -0. The products accumulate in float32 and add the parts of
a split sum in a fixed order: the same bits from run to run.
Cost: decode reads half a byte per element and writes one element. The products read half a byte per element,
x once per tile of W, and where the sum is split, write and read as many float32 copies of the result.
Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, section 3 and appendix E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..derivations import lora_nf4 as formulas
from ._launch import cdiv, inline, next_power_of_2, sm_count, tl, triton
from ._rows import add_parts

_nested_absmax = inline(formulas.nested_absmax)
_decoded = inline(formulas.decoded)

# One bit of sign, two of exponent, one of fraction, in bitsandbytes' own numbering; twelfths.
_FP4 = tuple(v / 12.0 for v in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))

CODEBOOKS: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": _FP4 + tuple(-v for v in _FP4),
}  # fmt: skip
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)

# Launch sizes, to be measured. A word is what one thread decodes at once, 16 bytes of W.
DECODE = {"WORDS": 1024, "num_warps": 4}
# A tile of W is BN by BK; T is padded to a power of two, at least 16. By bytes per element of x: float32 is multiplied
# without matrix instructions, exactly, and needs the registers.
SMALL = {
    2: {"BN": 64, "BK": 128, "num_warps": 4, "num_stages": 3},
    4: {"BN": 32, "BK": 64, "num_warps": 4, "num_stages": 3},
}
SMALL_TRANSPOSED = {
    2: {"BN": 64, "BK": 128, "num_warps": 4, "num_stages": 2},
    4: {"BN": 32, "BK": 64, "num_warps": 4, "num_stages": 3},
}
SMALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL_T = 64  # most rows; with more, decoding once and cuBLAS is the faster way
PROGRAMS_PER_SM = 2  # a sum is split until there are this many


@dataclass(frozen=True)
class Quantized:
    """One 4-bit weight, as bitsandbytes' quant state describes it."""

    codes: Tensor  # (N K + 1) // 2 bytes, stored as any dtype
    absmax: Tensor  # a float32 for each block; with double quantization a uint8 index into code
    nested: tuple[Tensor, Tensor, Tensor] | tuple[()]  # code (256,), absmax2, offset: float32; or nothing
    shape: tuple[int, int]  # (N, K)
    quant_type: str
    blocksize: int
    nested_blocksize: int = 256


def _refuse(rule: str, came: Any) -> NoReturn:
    raise ValueError(
        f'lora_nf4: {rule}, got {came}. Quantize the weight again or disable with options={{"fusions": "-lora_nf4"}}'
    )


def _codes(q: Quantized) -> Tensor:
    """The codes as flat bytes, after the checks."""
    n = q.shape[0] * q.shape[1]
    if q.quant_type not in CODEBOOKS:
        _refuse(f"quant_type must be one of {', '.join(CODEBOOKS)}", repr(q.quant_type))
    if q.blocksize not in BLOCKSIZES:
        _refuse(f"blocksize must be one of {BLOCKSIZES}", q.blocksize)
    codes, blocks = q.codes.contiguous().view(-1).view(torch.uint8), cdiv(n, q.blocksize)
    if codes.numel() < cdiv(n, 2):
        _refuse(f"a weight {q.shape} has {cdiv(n, 2)} bytes of codes", codes.numel())
    if q.absmax.numel() != blocks:
        _refuse(f"a weight {q.shape} in blocks of {q.blocksize} has {blocks} absmax", q.absmax.numel())
    dtypes = [t.dtype for t in (q.absmax, *q.nested)]
    if dtypes != ([torch.uint8] + [torch.float32] * 3 if q.nested else [torch.float32]):
        _refuse("absmax must be float32, or uint8 with float32 code, absmax2 and offset", dtypes)
    sizes = [t.numel() for t in q.nested]
    if q.nested and sizes != [256, cdiv(blocks, q.nested_blocksize), 1]:
        _refuse("nested must have 256 code, an absmax2 for each nested block of absmax and one offset", sizes)
    if any(t.device != codes.device for t in (q.absmax, *q.nested)):
        _refuse("all tensors must be on one device", [str(t.device) for t in (codes, q.absmax, *q.nested)])
    return codes


@triton.jit
def _values(codes, CODEBOOK: tl.constexpr):
    """Bytes (rows, n) to what their codes stand for, (rows, 2 n) in float32."""
    entry = tl.arange(0, 16)
    table = tl.zeros([16], tl.float32)
    for i in tl.static_range(16):  # pyright: ignore[reportGeneralTypeIssues]
        table = tl.where(entry == i, CODEBOOK[i], table)
    ROWS: tl.constexpr = codes.shape[0]
    COLS: tl.constexpr = codes.shape[1] * 2
    # join keeps both halves of a byte in the thread that loaded it; gather goes through 64 bytes of shared memory.
    half = tl.join(codes >> 4, codes & 15).to(tl.int32)
    return tl.gather(table, tl.reshape(half, (ROWS * COLS,)), 0).reshape(ROWS, COLS)


@triton.jit
def _absmax(absmax_ptr, code_ptr, absmax2_ptr, offset_ptr, first, block, mask, NESTED: tl.constexpr):
    """absmax of blocks `first + block`. NESTED is the nested blocksize, 0 without double quantization."""
    absmax = tl.load(absmax_ptr + first + block, mask, other=0)
    if NESTED:
        code = tl.load(code_ptr + absmax.to(tl.int32))
        absmax2 = tl.load(absmax2_ptr + first // NESTED + (first % NESTED + block) // NESTED, mask, other=0.0)
        absmax = _nested_absmax(code, absmax2, tl.load(offset_ptr))
    return absmax


# One program: WORDS words of one row of the output.
@triton.jit
def nf4_decode_kernel(
    codes_ptr, absmax_ptr,  # bytes; one per block
    code_ptr, absmax2_ptr, offset_ptr,  # (256,), one per nested block, one
    w_ptr,  # (rows, cols); a row is whole words, or there is one
    cols, row_bytes, row_stride,
    CODEBOOK: tl.constexpr, BLOCKSIZE: tl.constexpr, NESTED: tl.constexpr,
    WORDS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    WORD: tl.constexpr = BYTES * 2  # elements of a word
    tiles = tl.cdiv(cols, WORDS * WORD)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)

    # Word by word: a thread loads its bytes at once and stores their elements at once.
    byte = word[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    codes = tl.load(codes_ptr + (row * row_bytes + first * BYTES) + byte, byte < row_bytes - first * BYTES, other=0)

    # A word lies in one block, for blocksize is a multiple of it.
    start = row * cols + first * WORD
    block = ((start % BLOCKSIZE).to(tl.int32) + word * WORD) // BLOCKSIZE
    inside = word * WORD < cols - first * WORD
    absmax = _absmax(absmax_ptr, code_ptr, absmax2_ptr, offset_ptr, start // BLOCKSIZE, block, inside, NESTED)

    w = _decoded(_values(codes, CODEBOOK), absmax[:, None]).to(w_ptr.dtype.element_ty)
    col = word[:, None] * WORD + tl.arange(0, WORD)[None, :]
    tl.store(w_ptr + (row * row_stride + first * WORD) + col, w, col < cols - first * WORD)


@triton.jit
def _tile(
    codes_ptr, absmax_ptr, code_ptr, absmax2_ptr, offset_ptr, n, k, N, K,
    CODEBOOK: tl.constexpr, BLOCKSIZE: tl.constexpr, NESTED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """W[n : n + BN, k : k + BK] in float32, 0 outside of W."""
    GROUP: tl.constexpr = min(BLOCKSIZE, BK)
    row = n + tl.arange(0, BN).to(tl.int64)[:, None]
    byte = k // 2 + tl.arange(0, BK // 2)[None, :]
    codes = tl.load(codes_ptr + row * (K // 2) + byte, (row < N) & (byte < K // 2), other=0)
    # K is a multiple of GROUP: a group lies in one block, and all of it inside of W or all outside.
    group = k + tl.arange(0, BK // GROUP)[None, :] * GROUP
    block = (row * K + group) // BLOCKSIZE
    inside = (row < N) & (group < K)
    absmax = _absmax(absmax_ptr, code_ptr, absmax2_ptr, offset_ptr, 0, block, inside, NESTED)
    absmax = tl.where(inside, absmax, 0.0)
    values = tl.reshape(_values(codes, CODEBOOK), (BN, BK // GROUP, GROUP))
    return tl.reshape(_decoded(values, absmax[:, :, None]), (BN, BK))


# One program: BN columns of y = x W^T for all rows, over one part of K.
@triton.jit(do_not_specialize=["T"])
def nf4_matmul_kernel(
    x_ptr, codes_ptr, absmax_ptr,  # (T, K), bytes, one per block
    code_ptr, absmax2_ptr, offset_ptr,
    y_ptr,  # (parts, T, N)
    T, N, K, row_stride, part,
    CODEBOOK: tl.constexpr, BLOCKSIZE: tl.constexpr, NESTED: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN
    begin = tl.program_id(1) * part
    t = tl.arange(0, BT)[None, :].to(tl.int64)
    # y^T = W x^T, because W, not x, has the 64 rows that Hopper's matrix instruction wants.
    y = tl.zeros([BN, BT], tl.float32)
    for k in range(begin, tl.minimum(begin + part, K), BK):
        w = _tile(
            codes_ptr, absmax_ptr, code_ptr, absmax2_ptr, offset_ptr, n, k, N, K, CODEBOOK, BLOCKSIZE, NESTED, BN, BK
        ).to(x_ptr.dtype.element_ty)  # fmt: skip
        col = k + tl.arange(0, BK)[:, None]
        x = tl.load(x_ptr + t * row_stride + col, (t < T) & (col < K), other=0.0)
        y = tl.dot(w, x, y, input_precision="ieee")
    col = n + tl.arange(0, BN)[:, None]
    y_ptr += tl.program_id(1).to(tl.int64) * T * N
    tl.store(y_ptr + t * N + col, y.to(y_ptr.dtype.element_ty), (t < T) & (col < N))


# One program: BK columns of dx = dy W for all rows, over one part of N.
@triton.jit(do_not_specialize=["T"])
def nf4_matmul_transposed_kernel(
    dy_ptr, codes_ptr, absmax_ptr,  # (T, N), bytes, one per block
    code_ptr, absmax2_ptr, offset_ptr,
    dx_ptr,  # (parts, T, K)
    T, N, K, row_stride, part,
    CODEBOOK: tl.constexpr, BLOCKSIZE: tl.constexpr, NESTED: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BK
    begin = tl.program_id(1) * part
    t = tl.arange(0, BT)[:, None].to(tl.int64)
    dx = tl.zeros([BT, BK], tl.float32)
    for n in range(begin, tl.minimum(begin + part, N), BN):
        w = _tile(
            codes_ptr, absmax_ptr, code_ptr, absmax2_ptr, offset_ptr, n, k, N, K, CODEBOOK, BLOCKSIZE, NESTED, BN, BK
        ).to(dy_ptr.dtype.element_ty)  # fmt: skip
        col = n + tl.arange(0, BN)[None, :]
        dy = tl.load(dy_ptr + t * row_stride + col, (t < T) & (col < N), other=0.0)
        dx = tl.dot(dy, w, dx, input_precision="ieee")
    col = k + tl.arange(0, BK)[None, :]
    dx_ptr += tl.program_id(1).to(tl.int64) * T * K
    tl.store(dx_ptr + t * K + col, dx.to(dx_ptr.dtype.element_ty), (t < T) & (col < K))


def _pointers(q: Quantized, codes: Tensor) -> tuple[Tensor, ...]:
    """What every kernel reads; without double quantization the last three are never touched."""
    nested = q.nested or (q.absmax, q.absmax, q.absmax)
    return codes, q.absmax.contiguous(), *(t.contiguous() for t in nested)


def _constants(q: Quantized) -> dict[str, Any]:
    return {
        "CODEBOOK": CODEBOOKS[q.quant_type],
        "BLOCKSIZE": q.blocksize,
        "NESTED": q.nested_blocksize if q.nested else 0,
        # A fused multiply-add would round once where bitsandbytes rounds twice.
        "enable_fp_fusion": False,
    }


def decode_reference(q: Quantized, dtype: torch.dtype) -> Tensor:
    """W (N, K) in plain torch."""
    codes = _codes(q)
    n, nested = q.shape[0] * q.shape[1], q.nested
    absmax = q.absmax.view(-1)
    if nested:
        code, absmax2, offset = nested
        absmax2 = absmax2.view(-1).repeat_interleave(q.nested_blocksize)[: absmax.numel()]
        absmax = formulas.nested_absmax(code.view(-1)[absmax.int()], absmax2, offset.view(()))
    table = torch.tensor(CODEBOOKS[q.quant_type], dtype=torch.float32, device=codes.device)
    values = table[torch.stack((codes >> 4, codes & 15), dim=1).view(-1)[:n].int()]
    return formulas.decoded(values, absmax.repeat_interleave(q.blocksize)[:n]).to(dtype).view(q.shape)


def decode(q: Quantized, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """W (N, K), into `out` if given: contiguous, or columns of a wider buffer, so rows of any stride.

    Cost: one extra copy of W if `out` is strided and K not a multiple of 8.
    """
    codes, (N, K) = _codes(q), q.shape
    if out is None:
        out = torch.empty(N, K, dtype=dtype, device=codes.device)
    if (out.shape, out.dtype, out.device) != (torch.Size(q.shape), dtype, codes.device):
        raise ValueError(
            f"lora_nf4: out must be {(N, K)} of {dtype} on {codes.device}, "
            f"got {tuple(out.shape)} of {out.dtype} on {out.device}. Allocate it so"
        )
    if out.is_contiguous():
        rows, cols, row_stride = 1, N * K, 0
    elif K % 8 == 0 and out.stride(1) == 1:
        rows, cols, row_stride = N, K, out.stride(0)
    else:
        return out.copy_(decode(q, dtype))
    if out.numel() == 0:
        return out
    size = max(1, 8 // out.element_size())
    words = min(DECODE["WORDS"], max(16, next_power_of_2(cdiv(cols, 2 * size))))
    nf4_decode_kernel[(rows * cdiv(cols, 2 * size * words),)](
        *_pointers(q, codes), out, cols, cdiv(cols, 2), row_stride,
        BYTES=size, **_constants(q), **(DECODE | {"WORDS": words}),
    )  # fmt: skip
    return out


def supports_small(q: Quantized, T: int) -> bool:
    """Whether the products of T rows without a decoded weight are right and fast; else decode."""
    N, K = q.shape
    # A tile's row is whole blocks, or a part of one.
    launches = (*SMALL.values(), *SMALL_TRANSPOSED.values())
    whole = all(K % min(q.blocksize, launch["BK"]) == 0 for launch in launches)
    return 0 < T <= SMALL_T and N > 0 and K > 0 and whole


def _small(kernel: Any, launches: dict, a: Tensor, q: Quantized, out_dtype: torch.dtype, summed: int) -> Tensor:
    """`a` times W along dimension `summed` of W."""
    codes, (T, width) = _codes(q), a.shape
    if not supports_small(q, T) or width != q.shape[summed] or a.dtype not in SMALL_DTYPES:
        raise ValueError(
            f"lora_nf4: a product without decoding takes 1 to {SMALL_T} rows of {q.shape[summed]} float32, bfloat16 "
            f"or float16 and a weight whose rows are whole blocks, got {tuple(a.shape)} of {a.dtype} and {q.shape} in "
            f"blocks of {q.blocksize}. Use decode"
        )
    a = a if a.stride(1) == 1 else a.contiguous()
    launch, kept = launches[a.element_size()], q.shape[1 - summed]
    tile = launch["BN"], launch["BK"]
    tiles, steps = cdiv(kept, tile[1 - summed]), cdiv(width, tile[summed])
    steps_per_part = cdiv(steps, min(steps, cdiv(PROGRAMS_PER_SM * sm_count(a.device), tiles)))
    parts = cdiv(steps, steps_per_part)

    out = torch.empty(T, kept, dtype=out_dtype, device=a.device)
    sums = out if parts == 1 else torch.empty(parts, T, kept, dtype=torch.float32, device=a.device)
    kernel[(tiles, parts)](
        a, *_pointers(q, codes), sums, T, *q.shape, a.stride(0), steps_per_part * tile[summed],
        BT=max(16, next_power_of_2(T)), **_constants(q), **launch,
    )  # fmt: skip
    if parts > 1:
        add_parts(sums, out)
    return out


def matmul_small(x: Tensor, q: Quantized, out_dtype: torch.dtype) -> Tensor:
    """y = x W^T, with W rounded to x.dtype.

    Shapes: x (T, K), y (T, N).
    Raises: ValueError where `supports_small` says no.
    """
    return _small(nf4_matmul_kernel, SMALL, x, q, out_dtype, summed=1)


def matmul_small_transposed(dy: Tensor, q: Quantized, out_dtype: torch.dtype) -> Tensor:
    """dx = dy W, with W rounded to dy.dtype.

    Shapes: dy (T, N), dx (T, K).
    Raises: ValueError where `supports_small` says no.
    """
    return _small(nf4_matmul_transposed_kernel, SMALL_TRANSPOSED, dy, q, out_dtype, summed=0)
