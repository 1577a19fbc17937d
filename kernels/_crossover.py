"""Which of two kernels for a 4-bit product: measured once on each device and shape, then remembered.

A product of few tokens is bound by reading the weight, so decoding in registers wins; with more tokens the vendor's
GEMM over a decoded copy does. Where the two cross depends on the device, so it is timed, not assumed.
"""

from __future__ import annotations

import functools
import pathlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import _nf4 as nf4
from ._launch import HAS_TRITON, cdiv
from ._measured import cache_path, device_name, median_ms, read, write

# Token counts that are timed. Past the last one the GEMM is bound by arithmetic, which decoding only delays.
TOKENS = (16, 32, 64)
_LOW = (torch.bfloat16, torch.float16)


class Kind(NamedTuple):
    """What the time of a product with a 4-bit weight depends on, beside the tokens."""

    out_features: int
    in_features: int
    quant_type: str
    blocksize: int
    nested: bool


def prefers_small(device: torch.device, kind: Kind, tokens: int, dtype: torch.dtype) -> bool:
    """Is the product of so many tokens with such a weight faster when decoded in registers?"""
    if device.type != "cuda" or not HAS_TRITON or tokens > TOKENS[-1] or dtype not in _LOW:
        return False
    return tokens <= _limit(device, kind, dtype)


_LIMITS: dict[str, int] = {}


def _limit(device: torch.device, kind: Kind, dtype: torch.dtype) -> int:
    """The largest token count for which the register kernel is faster; 0 if it never is."""
    key = f"{device_name(device)} {dtype} {tuple(kind)}"
    if key not in _LIMITS:
        _LIMITS.update(read(_path()))
    if key not in _LIMITS:
        if torch.cuda.is_current_stream_capturing():
            return 0  # nothing can be timed while a graph is captured
        with unset_fake_temporarily(), torch.no_grad(), torch.cuda.device(device):
            _LIMITS[key] = _measure(device, kind, dtype)
        write(_path(), _LIMITS)
    return _LIMITS[key]


def _measure(device: torch.device, kind: Kind, dtype: torch.dtype) -> int:
    random = torch.Generator(device).manual_seed(0)  # the user's own stays where it is
    q = _random_weight(device, kind, random)
    limit = 0
    for tokens in TOKENS:
        if not nf4.supports_small(q, tokens):
            break
        x = torch.randn(tokens, q.shape[1], device=device, dtype=dtype, generator=random)
        small = functools.partial(nf4.matmul_small, x, q, dtype)
        decoded = functools.partial(_decode_then_multiply, x, q, dtype)
        if median_ms(small) >= median_ms(decoded):
            break
        limit = tokens
    return limit


def _random_weight(device: torch.device, kind: Kind, random: torch.Generator) -> nf4.Quantized:
    blocks = cdiv(kind.out_features * kind.in_features, kind.blocksize)
    size = cdiv(kind.out_features * kind.in_features, 2)
    codes = torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=random)
    if not kind.nested:
        absmax, nested = torch.rand(blocks, device=device, generator=random), ()
    else:
        absmax = torch.randint(256, (blocks,), dtype=torch.uint8, device=device, generator=random)
        code, absmax2 = (torch.rand(n, device=device, generator=random) for n in (256, cdiv(blocks, 256)))
        nested = (code, absmax2, torch.zeros((), device=device))
    shape = (kind.out_features, kind.in_features)
    return nf4.Quantized(codes, absmax, nested, shape, kind.quant_type, kind.blocksize)  # type: ignore[arg-type]


def _decode_then_multiply(x: Tensor, q: nf4.Quantized, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.linear(x, nf4.decode(q, dtype))


def _path() -> pathlib.Path:
    """Renewed when the kernels change."""
    return cache_path("crossover", nf4.__file__)
