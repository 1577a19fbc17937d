"""How a group of adapted linear layers is computed: which product over which buffer, and what rides along.

The same steps run in plain torch and with Triton; `TORCH` and `TRITON` hold the parts that differ. The operator that
wraps them, with the statement of what it computes, is in `lora_nf4.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _low_rank as low_rank
from . import _nf4 as nf4
from ._adapter_grad import adapter_grad, adapter_grad_reference
from ._crossover import Kind, prefers_small
from ._low_rank import Dropout

_LOW = (torch.bfloat16, torch.float16)


class On(NamedTuple):
    """The parts that exist in plain torch and in Triton."""

    decode: Callable[..., Tensor]
    down: Callable[..., Tensor]
    outer: Callable[..., Tensor]
    update: Callable[..., Tensor]
    grad: Callable[..., tuple[Tensor, Tensor]]
    pack: Callable[[Tensor], Tensor]
    triton: bool


def _decode_reference(q: nf4.Quantized, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    w = nf4.decode_reference(q, dtype)
    return w if out is None else out.copy_(w)


TORCH = On(
    _decode_reference, low_rank.down_reference, low_rank.outer_reference, low_rank.update_reference,
    adapter_grad_reference, low_rank.pack_reference, False,
)  # fmt: skip
TRITON = On(nf4.decode, low_rank.down, low_rank.outer, low_rank.update, adapter_grad, low_rank.pack, True)


@dataclass(frozen=True)
class Group:
    """The operator's arguments that forward and backward share."""

    on: On
    weight: Sequence[Tensor]
    absmax: Sequence[Tensor]
    nested: Sequence[Tensor]
    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]
    out_features: Sequence[int]
    scaling: Sequence[float]
    quant_type: str
    blocksize: int
    base_dtype: torch.dtype
    lora_dtype: torch.dtype
    in_features: int

    @property
    def ranks(self) -> list[int]:
        return [a.shape[0] for a in self.lora_a]

    def quantized(self, i: int) -> nf4.Quantized:
        nested = tuple(self.nested[3 * i : 3 * i + 3])
        shape = (self.out_features[i], self.in_features)
        return nf4.Quantized(self.weight[i], self.absmax[i], nested, shape, self.quant_type, self.blocksize)  # type: ignore[arg-type]

    def base(self, i: int) -> Tensor:
        """W_i (N_i, K) in the base's dtype."""
        if self.quant_type == "none":
            return self.weight[i].to(self.base_dtype)
        return self.on.decode(self.quantized(i), self.base_dtype)

    def product(self, i: int, x: Tensor, bias: Tensor | None) -> Tensor:
        """x·W_iᵀ + bias_i."""
        if self._small(i, x):
            y = nf4.matmul_small(x, self.quantized(i), self.base_dtype)
            return y if bias is None else y.add_(bias)
        return F.linear(x, self.base(i), bias)

    def transposed_product(self, i: int, dy: Tensor, onto: Tensor | None) -> Tensor:
        """dy·W_i, added to `onto` in place where it is given."""
        if self._small(i, dy):
            dx = nf4.matmul_small_transposed(dy, self.quantized(i), self.base_dtype)
            return dx if onto is None else onto.add_(dx)
        if onto is None:
            return dy @ self.base(i)
        if onto.dtype == self.base_dtype:
            return onto.addmm_(dy, self.base(i))
        return onto.add_(dy @ self.base(i))

    def _small(self, i: int, rows: Tensor) -> bool:
        if not self.on.triton or self.quant_type == "none" or not nf4.supports_small(self.quantized(i), rows.shape[0]):
            return False
        kind = Kind(self.out_features[i], self.in_features, self.quant_type, self.blocksize, bool(self.nested))
        return prefers_small(rows.device, kind, rows.shape[0], rows.dtype)

    def stacked_a(self) -> Tensor:
        """[A_1; A_2; ...] (ΣR, K): one product serves the group."""
        return torch.cat([a.to(self.lora_dtype) for a in self.lora_a])

    def b(self, i: int) -> Tensor:
        return self.lora_b[i].to(self.lora_dtype)

    def parts(self, stacked: Tensor, dim: int) -> Sequence[Tensor]:
        return stacked.split(self.ranks, dim)

    def rides_along(self, dtype: torch.dtype, wide_in: int, wide_out: int) -> bool:
        """Is the adapter worth extra columns of the base GEMM?

        The input is then copied beside u, which costs less than another pass over the output where that is wider.
        A dense weight would have to be copied as well; one that is decoded is written there in the first place.
        """
        same = self.base_dtype == self.lora_dtype == dtype and dtype in _LOW
        few = sum(self.ranks) <= low_rank.MAX_RANK
        return self.on.triton and same and few and self.quant_type != "none" and wide_in <= wide_out


def forward(
    on: On, x: Tensor, weight: Sequence[Tensor], absmax: Sequence[Tensor], nested: Sequence[Tensor],
    bias: Sequence[Tensor], lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], keep: Sequence[Tensor],
    out_features: Sequence[int], scaling: Sequence[float], dropout: float, quant_type: str, blocksize: int,
    base_dtype: torch.dtype, lora_dtype: torch.dtype, out_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    K = x.shape[-1]
    group = Group(
        on, weight, absmax, nested, lora_a, lora_b, out_features, scaling, quant_type, blocksize, base_dtype,
        lora_dtype, K,
    )  # fmt: skip
    rows = x.reshape(-1, K)
    biases: list[Tensor | None] = list(bias) or [None] * len(out_features)
    if not lora_a:
        rows = rows.to(base_dtype)
        ys = [_with_bias(group, i, rows, b).to(out_dtype) for i, b in enumerate(biases)]
        return [y.view(*x.shape[:-1], n) for y, n in zip(ys, out_features, strict=True)]
    drops = [Dropout(on.pack(k.reshape(-1, K)), 1.0 / (1.0 - dropout)) for k in keep]
    few = group._small(0, rows)
    if not drops and not few and out_dtype == base_dtype and group.rides_along(x.dtype, K, sum(out_features)):
        ys, u = _forward_extended(group, rows, biases)
    else:
        ys, u = _forward_apart(group, rows, biases, drops, out_dtype)
    ys = [y.view(*x.shape[:-1], n) for y, n in zip(ys, out_features, strict=True)]
    return [*ys, u, *(d.bits for d in drops)]


def _with_bias(group: Group, i: int, rows: Tensor, bias: Tensor | None) -> Tensor:
    """The base layer's output; a bias of another dtype (an adapter's, say) is not rounded to the base's first."""
    if bias is None or bias.dtype == group.base_dtype:
        return group.product(i, rows, bias)
    return group.product(i, rows, None).add_(bias)


def _forward_extended(group: Group, rows: Tensor, biases: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor]:
    """[x | u]·[W | s B]ᵀ: the adapter inside the base GEMM's sum."""
    (T, K), extension = rows.shape, low_rank.extension(sum(group.ranks))
    wide = rows.new_empty(T, K + extension)
    u = group.on.down(rows, group.stacked_a(), 1.0, None, wide)
    ys, at = [], K
    for i, bias in enumerate(biases):
        w = rows.new_empty(group.out_features[i], K + extension)
        group.on.decode(group.quantized(i), group.base_dtype, out=w[:, :K])
        w[:, K:] = 0
        torch.mul(group.lora_b[i], group.scaling[i], out=w[:, at : at + group.ranks[i]])
        at += group.ranks[i]
        same = bias is None or bias.dtype == w.dtype
        ys.append(F.linear(wide, w, bias) if same else F.linear(wide, w).add_(bias))
        del w  # before the next one is allocated
    return ys, u


def _forward_apart(
    group: Group, rows: Tensor, biases: Sequence[Tensor | None], drops: Sequence[Dropout], out_dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """The base product, then s u·Bᵀ added to it in one pass."""
    on = group.on
    if drops:
        each = zip(group.lora_a, drops, strict=True)
        u = torch.cat([on.down(rows, a.to(group.lora_dtype), 1.0, drop) for a, drop in each], dim=1)
    else:
        u = on.down(rows, group.stacked_a(), 1.0, None)
    based, ys = rows.to(group.base_dtype), []
    for i, (bias, u_i) in enumerate(zip(biases, group.parts(u, 1), strict=True)):
        y = _with_bias(group, i, based, bias)
        out = y if y.dtype == out_dtype else torch.empty_like(y, dtype=out_dtype)
        ys.append(on.update(y, u_i, group.b(i).t(), group.scaling[i], None, out))
    return ys, u


def backward(
    on: On, dy: Sequence[Tensor], x: Tensor | None, u: Tensor | None, bits: Sequence[Tensor],
    weight: Sequence[Tensor], absmax: Sequence[Tensor], nested: Sequence[Tensor], lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor], out_features: Sequence[int], scaling: Sequence[float], dropout: float, quant_type: str,
    blocksize: int, base_dtype: torch.dtype, lora_dtype: torch.dtype, in_features: int, x_dtype: torch.dtype,
    bias_dtype: torch.dtype, needs_dx: bool, needs_adapters: bool, needs_bias: bool,
) -> list[Tensor]:  # fmt: skip
    group = Group(
        on, weight, absmax, nested, lora_a, lora_b, out_features, scaling, quant_type, blocksize, base_dtype,
        lora_dtype, in_features,
    )  # fmt: skip
    dys = [d.reshape(-1, n) for d, n in zip(dy, out_features, strict=True)]
    drops = [Dropout(b, 1.0 / (1.0 - dropout)) for b in bits]
    dx = v = None
    dbs: list[Tensor] = []
    if needs_dx and x_dtype == base_dtype and not drops and _rides_back(group, dys):
        dx, v = _dx_extended(group, dys[0])
        dbs = [on.outer(u, dys[0], None).t() * scaling[0]] if needs_adapters and u is not None else []
    elif lora_a:
        # Frozen adapters have no u. The pass is the same, so that dx has the same bits whoever else wants a gradient.
        u = dys[0].new_zeros(dys[0].shape[0], sum(group.ranks), dtype=lora_dtype) if u is None else u
        each = zip(dys, group.parts(u, 1), scaling, strict=True)
        both = [on.grad(d, group.b(i), u_i, s) for i, (d, u_i, s) in enumerate(each)]
        v, dbs = torch.cat([v_i for v_i, _ in both], dim=1), [db for _, db in both]
    grads: list[Tensor] = []
    if needs_dx:
        dx = _dx(group, dys, v, drops, x_dtype) if dx is None else dx
        grads.append(dx.view(*dy[0].shape[:-1], in_features))
    if needs_adapters:
        assert x is not None and v is not None
        grads += _fresh([*_da(group, x.reshape(-1, in_features), v, drops), *dbs], [*lora_a, *lora_b])
    if needs_bias:
        grads += [d.sum(0, dtype=torch.promote_types(d.dtype, torch.float32)).to(bias_dtype) for d in dys]
    return grads


def _rides_back(group: Group, dys: Sequence[Tensor]) -> bool:
    """Does the adapter's part of dx fit into the one product that gives dx?"""
    alone = len(dys) == 1 and bool(group.lora_a) and not group._small(0, dys[0])
    return alone and group.rides_along(dys[0].dtype, group.out_features[0], group.in_features - 1)


def _dx_extended(group: Group, dy: Tensor) -> tuple[Tensor, Tensor]:
    """[dy | v]·[W ; A]."""
    (T, N), K = dy.shape, group.in_features
    rank = group.ranks[0]
    extension = low_rank.extension(rank)
    wide = dy.new_empty(T, N + extension)
    v = group.on.down(dy, group.b(0).t(), group.scaling[0], None, wide)
    w = dy.new_empty(N + extension, K)
    group.on.decode(group.quantized(0), group.base_dtype, out=w[:N])
    w[N : N + rank] = group.lora_a[0]
    w[N + rank :] = 0
    return wide @ w, v


def _dx(
    group: Group, dys: Sequence[Tensor], v: Tensor | None, drops: Sequence[Dropout], x_dtype: torch.dtype
) -> Tensor:
    """Σ dy_i·W_i + drop_i(v_i·A_i), summed in place."""
    dx: Tensor | None = None
    for i, dy in enumerate(dys):
        dx = group.transposed_product(i, dy.to(group.base_dtype), dx)
        # A wider x gets its sum in its own dtype, as autograd adds it up.
        dx = dx if dx.dtype == x_dtype else dx.to(x_dtype)
    assert dx is not None
    if v is None:
        return dx
    if not drops:
        return group.on.update(dx, v, group.stacked_a(), 1.0, None, dx)
    for a, v_i, drop in zip(group.lora_a, group.parts(v, 1), drops, strict=True):
        dx = group.on.update(dx, v_i, a.to(group.lora_dtype), 1.0, drop, dx)
    return dx


def _da(group: Group, x: Tensor, v: Tensor, drops: Sequence[Dropout]) -> Sequence[Tensor]:
    """dA_i = v_iᵀ·drop_i(x)."""
    if not drops:
        return group.parts(group.on.outer(v, x, None), 0)
    return [group.on.outer(v_i, x, drop) for v_i, drop in zip(group.parts(v, 1), drops, strict=True)]


def _fresh(grads: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """In the dtype of the parameters, contiguous and of their own: an operator's results may not share memory."""
    return [
        g if g.dtype == p.dtype and g.is_contiguous() and g.untyped_storage().nbytes() == g.nbytes
        else torch.empty_like(p, memory_format=torch.contiguous_format).copy_(g)
        for g, p in zip(grads, like, strict=True)
    ]  # fmt: skip
