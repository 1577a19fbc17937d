"""RMS normalisation: each row of x divided by its root mean square, then scaled.

Statement. For a row x of n numbers, scales a_i = offset + w_i (offset is 0, or 1 in Gemma) and eps >= 0,

    rstd = 1 / sqrt(mean_j x_j^2 + eps)        xhat_i = x_i rstd        y_i = a_i xhat_i

and with cotangents dy_i the gradients are

    dx_k = rstd (a_k dy_k - xhat_k c)          c = mean_i a_i dy_i xhat_i
    dw_k = sum over rows t of dy_tk xhat_tk

Two forms add to it. Residual: s = x + residual is both normalised and passed on, so its gradient is the sum
of the norm's and of its own, ds, and goes to x and to residual alike. Gated: y_i = a_i xhat_i act(z_i); the
norm then sees dy_i act(z_i), and dz_i = dy_i (a_i xhat_i) act'(z_i). All holds for every n and T.

Symbols: T rows, n = D columns; t a row; i, j, k columns; act is silu or sigmoid.
Source: Zhang & Sennrich, Root Mean Square Layer Normalization, 2019, section 3 and appendix A.
"""

from __future__ import annotations

from typing import Any

import sympy as sp

from ._prove import Theorem, differentiate

n, T = sp.symbols("n T", integer=True, positive=True)
i, j, k, t = sp.symbols("i j k t", integer=True, nonnegative=True)
eps, offset = sp.Symbol("epsilon", positive=True), sp.Symbol("offset", real=True)
x: Any = sp.IndexedBase("x", real=True)
residual: Any = sp.IndexedBase("residual", real=True)
z: Any = sp.IndexedBase("z", real=True)
w: Any = sp.IndexedBase("w")
dy: Any = sp.IndexedBase("dy")
ds: Any = sp.IndexedBase("ds")


# The forward, element by element. `scale` is a_i = offset + w_i; the kernels add the offset as they load w.
# Formulas carry no annotations: Triton compiles them and would look the names up.


def xhat(x, rstd):
    return x * rstd


def y(scale, xhat):
    return scale * xhat


def gated(normed, act):
    return normed * act


def silu(z, sigmoid):
    return z * sigmoid


# What is saved, and why it is enough: x, w and one number per row, rstd. xhat = x rstd costs one product to
# make again, and the row statistic c needs the cotangent, so only the backward can know it. y is not saved.


# dx. y_k depends on x_k directly, and every y_i through rstd, where d rstd / d x_k = -rstd^3 x_k / n
# = -rstd^2 xhat_k / n. Summing a_i dy_i x_i over the second path gives -rstd xhat_k c.


def dx(dy, scale, xhat, rstd, c):
    return rstd * (scale * dy - xhat * c)


def c_term(dy, scale, xhat):
    """One column's share of n c."""
    return scale * dy * xhat


# dw. y_tk is linear in w_k in every row t, with slope xhat_tk; other columns do not see w_k.


def dw_term(dy, xhat):
    """One row's share of dw."""
    return dy * xhat


# Residual. s reaches the loss through y and as itself; d s / d x = d s / d residual = 1.


def d_residual(dx, ds):
    return dx + ds


# Gate. The product rule; a cotangent of the norm's own output takes the place of dy in dx and dw above.


def d_normed(dy, act):
    return dy * act


def dz(dy, normed, d_act):
    return dy * normed * d_act


# With s = sigmoid(z): s' = s (1 - s), so (z s)' = s + z s (1 - s).


# `rest` is 1 - sigmoid(z), taken as sigmoid(-z): the difference would cancel for large z.


def d_sigmoid(sigmoid, rest):
    return sigmoid * rest


def d_silu(z, sigmoid, rest):
    return sigmoid * (1 + z * rest)


# The proofs. A row is `row(k) -> expression`; a loss is the inner product of an output with its cotangent.


def _sigmoid(v: Any) -> Any:
    return 1 / (1 + sp.exp(-v))


def _scale(col: Any) -> Any:
    return offset + w[col]


def _rstd(row: Any) -> Any:
    return 1 / sp.sqrt(sp.Sum(row(j) ** 2, (j, 0, n - 1)) / n + eps)


def _y(row: Any, col: Any) -> Any:
    return y(_scale(col), xhat(row(col), _rstd(row)))


def _dx(row: Any, cotangent: Any) -> Any:
    """The claimed dx_k for a row and the cotangent of its norm."""
    rstd = _rstd(row)
    c = sp.Sum(c_term(cotangent(i), _scale(i), xhat(row(i), rstd)), (i, 0, n - 1)) / n
    return dx(cotangent(k), _scale(k), xhat(row(k), rstd), rstd, c)


def _claim_dx() -> tuple[Any, Any]:
    row = lambda col: x[col]  # noqa: E731
    loss: Any = sp.Sum(dy[i] * _y(row, i), (i, 0, n - 1))
    return differentiate(loss, x[k]), _dx(row, lambda col: dy[col])


def _claim_dw() -> tuple[Any, Any]:
    row_of = lambda r: lambda col: x[r, col]  # noqa: E731
    loss: Any = sp.Sum(dy[t, i] * _y(row_of(t), i), (i, 0, n - 1), (t, 0, T - 1))
    claimed = sp.Sum(dw_term(dy[t, k], xhat(x[t, k], _rstd(row_of(t)))), (t, 0, T - 1))
    return differentiate(loss, w[k]), claimed


def _claim_residual(wrt: Any) -> tuple[Any, Any]:
    row = lambda col: x[col] + residual[col]  # noqa: E731
    loss: Any = sp.Sum(dy[i] * _y(row, i) + ds[i] * row(i), (i, 0, n - 1))
    return differentiate(loss, wrt), d_residual(_dx(row, lambda col: dy[col]), ds[k])


def _act(name: str, v: Any) -> Any:
    return silu(v, _sigmoid(v)) if name == "silu" else _sigmoid(v)


def _gated_loss(name: str) -> Any:
    row = lambda col: x[col]  # noqa: E731
    return sp.Sum(dy[i] * gated(_y(row, i), _act(name, z[i])), (i, 0, n - 1))


def _claim_gated_dx(name: str) -> tuple[Any, Any]:
    cotangent = lambda col: d_normed(dy[col], _act(name, z[col]))  # noqa: E731
    return differentiate(_gated_loss(name), x[k]), _dx(lambda col: x[col], cotangent)


def _claim_gated_dw(name: str) -> tuple[Any, Any]:
    """One row; rows add up as in `dw`."""
    xhat_k = xhat(x[k], _rstd(lambda col: x[col]))
    return differentiate(_gated_loss(name), w[k]), dw_term(d_normed(dy[k], _act(name, z[k])), xhat_k)


def _claim_dz(name: str) -> tuple[Any, Any]:
    s, rest = _sigmoid(z[k]), _sigmoid(-z[k])
    d_act = d_silu(z[k], s, rest) if name == "silu" else d_sigmoid(s, rest)
    return differentiate(_gated_loss(name), z[k]), dz(dy[k], _y(lambda col: x[col], k), d_act)


THEOREMS = [
    Theorem("dx", _claim_dx),
    Theorem("dw", _claim_dw),
    Theorem("residual form: gradient of x", lambda: _claim_residual(x[k])),
    Theorem("residual form: gradient of residual", lambda: _claim_residual(residual[k])),
    Theorem("gated form: dx, silu", lambda: _claim_gated_dx("silu")),
    Theorem("gated form: dx, sigmoid", lambda: _claim_gated_dx("sigmoid")),
    Theorem("gated form: dw, silu", lambda: _claim_gated_dw("silu")),
    Theorem("gated form: dw, sigmoid", lambda: _claim_gated_dw("sigmoid")),
    Theorem("gated form: dz, silu", lambda: _claim_dz("silu")),
    Theorem("gated form: dz, sigmoid", lambda: _claim_dz("sigmoid")),
]
