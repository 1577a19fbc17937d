"""LoRA on a frozen, possibly 4-bit, linear layer; and a group of such layers that share their input.

Statement. A row x_t of K numbers meets the frozen W (N, K) and, after dropout, the adapters A (R, K), B (N, R):

    y_tn = sum_k x_tk W_nk + bias_n + s sum_r u_tr B_nr          u_tr = sum_k m_tk x_tk A_rk

s is alpha / R, or alpha / sqrt(R) in rsLoRA; nothing below depends on which. m = keep / (1 - p) is the factor
of inverted dropout, keep being 0 with probability p < 1 and else 1; without dropout m = 1. For cotangents dy,

    v_tr = s sum_n dy_tn B_nr                dbias_n = sum_t dy_tn
    dB_nr = s sum_t dy_tn u_tr               dA_rk = sum_t v_tr m_tk x_tk
    dx_tk = sum_n dy_tn W_nk + m_tk sum_r v_tr A_rk

for every T, N, K and R. Between x and y, and between dy and dx, the adapter only ever has R columns.

W may be stored in blocks of 4-bit codes. A code stands for a value in [-1, 1] (NF4: the quantiles of a normal
distribution; FP4: a small float), its block for the largest magnitude in it, absmax. Double quantization stores
absmax itself in blocks of 8-bit codes, after taking the mean of all, `offset`, away:

    W = value absmax          absmax = code absmax2 + offset

Symbols: T tokens, K in_features, N out_features, R rank; t a row, k, n, r columns; i, c, j, q the entry of a
gradient that is asked for; s scaling; [a | b] columns side by side, [a ; b] rows below each other.
Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1.
Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, section 3 (NF4, double quantization).
Source: Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023 (the scaling).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import sympy as sp

from ._prove import Theorem, differentiate

# The decode, element by element. bitsandbytes rounds absmax to float32 twice, after the product and after the sum, so
# a kernel that wants the same bits may not contract the two into one fused multiply-add. The element is rounded to
# float32 and then to its dtype.


def nested_absmax(code, absmax2, offset):
    return code * absmax2 + offset


def decoded(value, absmax):
    return value * absmax


# The forward. keep is 0 or 1, so its product is exact and `dropped` rounds once; as in eager, 0 * NaN stays NaN.


def dropped(x, keep, inverse_keep_probability):
    return x * keep * inverse_keep_probability


# `base` is x W^T + bias and `up` is u B^T. A bias b of lora_B enters y as s b, next to bias: the same formula with
# base = bias and up = b folds the two into one bias, once for all rows.


def updated(base, scaling, up):
    return base + scaling * up


# What is saved, and why it is enough: x, u (T, R) and keep, one bit per element. W, A and B are parameters that
# stay anyway; W stays in its codes and is decoded again for dx. m x is one product away from x and keep, and base
# and up enter y linearly, so no gradient asks for them. W is frozen: it has no gradient, and its codes could have none.


# v and dB. y_tn is linear in u_tr with slope s B_nr, and in B_nr with slope s u_tr; s leaves both products.


def scaled(product, scaling):
    return scaling * product


# dA. A_rk reaches the loss only through u_tr, whose cotangent is v_tr, with slope m_tk x_tk: the product of v and
# `dropped` over all rows. dbias. The slope of y_tn in bias_n is 1.

# dx. x_tk reaches y_tn with slope W_nk, and u_tr with slope m_tk A_rk. m_tk is outside the sum over r, so dropout
# is applied to the finished product v A.


def dx(through_w, through_a, keep, inverse_keep_probability):
    return through_w + through_a * keep * inverse_keep_probability


# A group. Projections that share x add up in dx: x_tk reaches the loss through each of them. Without dropout their
# A's stacked give all u in one product, x [A1 ; A2]^T = [u1 | u2], and all adapter parts of dx in another,
# [v1 | v2] [A1 ; A2]. With dropout each projection has an m of its own, on its own part of dx alone.

# K-extension. R more columns let one product do base and adapter, with or without dropout, since u is already dropped:
#     [x | u] [W | s B]^T = x W^T + s u B^T          [dy | v] [W ; A] = dy W + v A
# The second is dx only where m = 1.


# The proofs. T, K and every N and R stay symbolic. A projection's keep and bias are functions of their indices, so
# that one can be replaced by another expression.


class _Projection(NamedTuple):
    """One layer of the group: its sizes, indices and arrays. `inverse` is 1 / (1 - p)."""

    N: Any
    R: Any
    n: Any
    r: Any
    s: Any
    w: Any
    a: Any
    b: Any
    dy: Any
    keep: Callable[[Any, Any], Any]
    inverse: Any
    bias: Callable[[Any], Any]


def _projection(tag: str) -> _Projection:
    N, R = sp.symbols(f"N{tag} R{tag}", integer=True, positive=True)
    n, r = sp.symbols(f"n{tag} r{tag}", integer=True, nonnegative=True)
    s, inverse = sp.symbols(f"s{tag} inverse{tag}", real=True)
    arrays: Any = (sp.IndexedBase(name + tag) for name in ("W", "A", "B", "dy", "keep", "bias"))
    w, a, b, dy, keep, bias = arrays
    return _Projection(N, R, n, r, s, w, a, b, dy, lambda t, k: keep[t, k], inverse, lambda n: bias[n])


T, K = sp.symbols("T K", integer=True, positive=True)
t, k, i, c, j, q, e = sp.symbols("t k i c j q e", integer=True, nonnegative=True)
x: Any = sp.IndexedBase("x")
u: Any = sp.IndexedBase("u")
lora_bias: Any = sp.IndexedBase("lora_bias")
one, other = _projection("1"), _projection("2")


def _without_dropout(p: _Projection) -> _Projection:
    return p._replace(keep=lambda t, k: sp.Integer(1), inverse=sp.Integer(1))


# The forward as the statement writes it; the theorem "y" compares the formulas with it.


def _u(p: _Projection, t: Any, r: Any) -> Any:
    return sp.Sum(p.keep(t, k) * p.inverse * x[t, k] * p.a[r, k], (k, 0, K - 1))


def _base(p: _Projection, t: Any, n: Any) -> Any:
    return sp.Sum(x[t, k] * p.w[n, k], (k, 0, K - 1)) + p.bias(n)


def _up(p: _Projection, t: Any, n: Any, u_of: Any = _u) -> Any:
    return sp.Sum(u_of(p, t, p.r) * p.b[n, p.r], (p.r, 0, p.R - 1))


def _y(p: _Projection, t: Any, n: Any) -> Any:
    return _base(p, t, n) + p.s * _up(p, t, n)


def _loss(p: _Projection, y: Any = _y) -> Any:
    """sum dy * y: its derivatives are the gradients for the cotangent dy."""
    return sp.Sum(p.dy[t, p.n] * y(p, t, p.n), (t, 0, T - 1), (p.n, 0, p.N - 1))


def _dropped(p: _Projection, t: Any, k: Any) -> Any:
    return dropped(x[t, k], p.keep(t, k), p.inverse)


def _v(p: _Projection, t: Any, r: Any) -> Any:
    return scaled(sp.Sum(p.dy[t, p.n] * p.b[p.n, r], (p.n, 0, p.N - 1)), p.s)


def _through_w(p: _Projection, t: Any, k: Any) -> Any:
    return sp.Sum(p.dy[t, p.n] * p.w[p.n, k], (p.n, 0, p.N - 1))


def _dx(p: _Projection, t: Any, k: Any) -> Any:
    through_a = sp.Sum(_v(p, t, p.r) * p.a[p.r, k], (p.r, 0, p.R - 1))
    return dx(_through_w(p, t, k), through_a, p.keep(t, k), p.inverse)


def _flat(expr: Any) -> Any:
    """Each product under one sum over all its indices, in one order: finite sums of fixed ranges may trade places.

    Raises: ValueError where a factor would be captured by the index of a sum that it does not belong to.
    """
    out: Any = sp.Integer(0)
    for term in sp.Add.make_args(sp.expand(expr)):
        total = next((factor for factor in sp.Mul.make_args(term) if isinstance(factor, sp.Sum)), None)
        if total is None:
            out += term
            continue
        rest = term / total
        if rest.free_symbols & set(total.variables):
            raise ValueError(f"{rest} would be captured by {total}")
        for inner in sp.Add.make_args(_flat(total.function * rest)):
            body, limits = (inner.function, inner.limits) if isinstance(inner, sp.Sum) else (inner, ())
            out += sp.Sum(body, *sorted((*limits, *total.limits), key=str))
    return out


def _equal(left: Any, right: Any) -> tuple[Any, Any]:
    return _flat(left), _flat(right)


def _claim_y(p: _Projection) -> tuple[Any, Any]:
    u_of = lambda p, t, r: sp.Sum(_dropped(p, t, k) * p.a[r, k], (k, 0, K - 1))  # noqa: E731
    return _equal(_y(p, i, j), updated(_base(p, i, j), p.s, _up(p, i, j, u_of)))


# Each gradient by its definition: the derivative of the whole forward. v is the cotangent of u held as an array.


def _claim_v(p: _Projection) -> tuple[Any, Any]:
    y = lambda p, t, n: _base(p, t, n) + p.s * _up(p, t, n, lambda p, t, r: u[t, r])  # noqa: E731
    return _equal(differentiate(_loss(p, y), u[i, q]), _v(p, i, q))


def _claim_db(p: _Projection) -> tuple[Any, Any]:
    product: Any = sp.Sum(p.dy[t, j] * _u(p, t, q), (t, 0, T - 1))
    return _equal(differentiate(_loss(p), p.b[j, q]), scaled(product, p.s))


def _claim_da(p: _Projection) -> tuple[Any, Any]:
    product: Any = sp.Sum(_v(p, t, q) * _dropped(p, t, c), (t, 0, T - 1))
    return _equal(differentiate(_loss(p), p.a[q, c]), product)


def _claim_dbias(p: _Projection) -> tuple[Any, Any]:
    return _equal(differentiate(_loss(p), p.bias(j)), sp.Sum(p.dy[t, j], (t, 0, T - 1)))


def _claim_dx(*group: _Projection) -> tuple[Any, Any]:
    loss, claimed = sp.Add(*map(_loss, group)), sp.Add(*(_dx(p, i, c) for p in group))
    return _equal(differentiate(loss, x[i, c]), claimed)


# A bias of lora_B: in y it is a bias, and its gradient is s times that of one.


def _y_biased(p: _Projection, t: Any, n: Any) -> Any:
    return _base(p, t, n) + p.s * (_up(p, t, n) + lora_bias[n])


def _claim_lora_bias(p: _Projection) -> tuple[Any, Any]:
    folded = p._replace(bias=lambda n: updated(p.bias(n), p.s, lora_bias[n]))
    return _equal(_y_biased(p, i, j), _y(folded, i, j))


def _claim_dlora_bias(p: _Projection) -> tuple[Any, Any]:
    dbias: Any = sp.Sum(p.dy[t, j], (t, 0, T - 1))
    return _equal(differentiate(_loss(p, _y_biased), lora_bias[j]), scaled(dbias, p.s))


# Arrays side by side, as functions of the shared index e; a product sums over both lengths.


def _joined(left: Any, right: Any, border: Any) -> Any:
    return lambda e: sp.Piecewise((left(e), e < border), (right(e - border), True))


def _product(left: Any, right: Any, low: Any, high: Any) -> Any:
    """sum_e left(e) right(e) over e < border + more, in two parts; `low` is (index, border), `high` (index, more).

    A finite sum is the sum of its parts. Below the border e counts down, border - 1 - e with e >= 0, from which
    sympy decides e < border by itself; the index then turns back.
    """
    (k, border), (r, more) = low, high
    below: Any = (left(border - 1 - e) * right(border - 1 - e)).subs(e, border - 1 - k)
    above = left(border + r) * right(border + r)
    low_sum: Any = sp.Sum(below, (k, 0, border - 1))
    return low_sum + sp.Sum(above, (r, 0, more - 1))


def _claim_extended_y(p: _Projection) -> tuple[Any, Any]:
    """[x | u] [W | s B]^T + bias, with dropout in u."""
    row = _joined(lambda k: x[i, k], lambda r: _u(p, i, r), K)
    column = _joined(lambda k: p.w[j, k], lambda r: scaled(p.b[j, r], p.s), K)
    return _equal(_y(p, i, j), _product(row, column, (k, K), (p.r, p.R)) + p.bias(j))


def _claim_extended_dx(p: _Projection) -> tuple[Any, Any]:
    """[dy | v] [W ; A], without dropout."""
    p = _without_dropout(p)
    row = _joined(lambda n: p.dy[i, n], lambda r: _v(p, i, r), p.N)
    column = _joined(lambda n: p.w[n, c], lambda r: p.a[r, c], p.N)
    return _equal(differentiate(_loss(p), x[i, c]), _product(row, column, (p.n, p.N), (p.r, p.R)))


def _claim_stacked_dx(p: _Projection, o: _Projection) -> tuple[Any, Any]:
    """[v1 | v2] [A1 ; A2] is what the adapters of two projections add to dx, without dropout."""
    p, o = _without_dropout(p), _without_dropout(o)
    row = _joined(lambda r: _v(p, i, r), lambda r: _v(o, i, r), p.R)
    column = _joined(lambda r: p.a[r, c], lambda r: o.a[r, c], p.R)
    through_w = _through_w(p, i, c) + _through_w(o, i, c)
    through_a = _product(row, column, (p.r, p.R), (o.r, o.R))
    return _equal(differentiate(_loss(p) + _loss(o), x[i, c]), dx(through_w, through_a, 1, 1))


# The decode undoes the division by absmax that the encoder starts with; what the encoder then rounds away in a
# value or code, `error`, comes back times the scale of the block.

_absmax, _absmax2 = sp.symbols("absmax absmax2", positive=True)
_weight, _offset, _error = sp.symbols("weight offset error", real=True)


def _claim_decoded() -> tuple[Any, Any]:
    return decoded(_weight / _absmax + _error, _absmax), _weight + _absmax * _error


def _claim_nested() -> tuple[Any, Any]:
    return nested_absmax((_absmax - _offset) / _absmax2 + _error, _absmax2, _offset), _absmax + _absmax2 * _error


THEOREMS = [
    Theorem("decoded inverts the encoder's division", _claim_decoded),
    Theorem("nested_absmax inverts the encoder's shift and division", _claim_nested),
    Theorem("y", lambda: _claim_y(one)),
    Theorem("v", lambda: _claim_v(one)),
    Theorem("dB", lambda: _claim_db(one)),
    Theorem("dA", lambda: _claim_da(one)),
    Theorem("dx", lambda: _claim_dx(one)),
    Theorem("dbias", lambda: _claim_dbias(one)),
    Theorem("bias of lora_B: folded", lambda: _claim_lora_bias(one)),
    Theorem("bias of lora_B: gradient", lambda: _claim_dlora_bias(one)),
    Theorem("group: dx is the sum over projections", lambda: _claim_dx(one, other)),
    Theorem("group: stacked A, dx", lambda: _claim_stacked_dx(one, other)),
    Theorem("K-extension: y", lambda: _claim_extended_y(one)),
    Theorem("K-extension: dx", lambda: _claim_extended_dx(one)),
]
