"""Layer normalisation: each row of x with its mean taken off, divided by its standard deviation, then scaled.

Statement. For a row x of n numbers, scales w_i, shifts b_i (w = 1 and b = 0 where absent) and eps >= 0,

    mean = mean_j x_j     rstd = 1 / sqrt(mean_j (x_j - mean)^2 + eps)
    xhat_i = (x_i - mean) rstd                y_i = w_i xhat_i + b_i

and with cotangents dy_i and g_i = w_i dy_i the gradients are

    dx_k = rstd (d_k - mean_i d_i)            d_i = g_i - xhat_i c, c = mean_i g_i xhat_i
    dw_k = sum over rows t of dy_tk xhat_tk   db_k = sum over rows t of dy_tk

Residual form: s = x + residual is both normalised and passed on, so its gradient is the sum of the norm's and of
its own, ds, and goes to x and to residual alike. All holds for every n and T.

Symbols: T rows, n = D columns; t a row; i, j, k columns.
Source: Ba, Kiros & Hinton, Layer Normalization, 2016, section 3.
"""

from __future__ import annotations

from typing import Any

import sympy as sp

from ._prove import Theorem, differentiate

n, T = sp.symbols("n T", integer=True, positive=True)
i, j, k, t = sp.symbols("i j k t", integer=True, nonnegative=True)
m = sp.Symbol("m", integer=True, nonnegative=True)
eps = sp.Symbol("epsilon", positive=True)
x: Any = sp.IndexedBase("x", real=True)
residual: Any = sp.IndexedBase("residual", real=True)
s: Any = sp.IndexedBase("s", real=True)
w: Any = sp.IndexedBase("w")
b: Any = sp.IndexedBase("b")
dy: Any = sp.IndexedBase("dy")
ds: Any = sp.IndexedBase("ds")


# The forward, element by element. Formulas carry no annotations: Triton compiles them and would look the names up.


def xhat(x, mean, rstd):
    return (x - mean) * rstd


def scaled(w, xhat):
    return w * xhat


def shifted(scaled, b):
    return scaled + b


# What is saved, and why it is enough: x, w and two numbers per row, mean and rstd. xhat is made again from them; the
# row statistics need the cotangent, so only the backward can know them. Neither y nor b is needed.


# dx. y_k depends on x_k directly, every y_i through the mean, where d mean / d x_k = 1 / n, and every y_i through
# rstd, where d rstd / d x_k = -rstd^2 xhat_k / n: the mean's own share of it is a sum of x_j - mean, which is 0.
# The mean of d is that of g, for xhat has none. What rounding leaves in xhat's is taken off with it: where |mean| is
# many times the deviation, that is most of the error.


def g(dy, w):
    return dy * w


def c_term(g, xhat):
    """One column's share of n c."""
    return g * xhat


def d(g, xhat, c):
    return g - xhat * c


def dx(d, mean_d, rstd):
    return (d - mean_d) * rstd


# dw, db. y_tk is linear in w_k and b_k in every row t, with slopes xhat_tk and 1; other columns do not see them.


def dw_term(dy, xhat):
    """One row's share of dw; that of db is dy itself."""
    return dy * xhat


# Residual. s reaches the loss through y and as itself; d s / d x = d s / d residual = 1.


def d_residual(dx, ds):
    return dx + ds


# The proofs. A row is `row(k) -> expression`; a loss is the inner product of an output with its cotangent.


def _mean(row: Any) -> Any:
    return sp.Sum(row(m), (m, 0, n - 1)) / n


def _rstd(row: Any) -> Any:
    return 1 / sp.sqrt(sp.Sum((row(j) - _mean(row)) ** 2, (j, 0, n - 1)) / n + eps)


def _y(row: Any, col: Any) -> Any:
    return shifted(scaled(w[col], xhat(row(col), _mean(row), _rstd(row))), b[col])


def _dx(row: Any) -> Any:
    """The claimed dx_k for a row."""
    at = lambda col: xhat(row(col), _mean(row), _rstd(row))  # noqa: E731
    c = sp.Sum(c_term(g(dy[i], w[i]), at(i)), (i, 0, n - 1)) / n
    along = lambda col: d(g(dy[col], w[col]), at(col), c)  # noqa: E731
    return dx(along(k), sp.Sum(along(i), (i, 0, n - 1)) / n, _rstd(row))


def _claim_dx() -> tuple[Any, Any]:
    row = lambda col: x[col]  # noqa: E731
    loss: Any = sp.Sum(dy[i] * _y(row, i), (i, 0, n - 1))
    return differentiate(loss, x[k]), _dx(row)


def _claim_weight(wrt: Any) -> tuple[Any, Any]:
    row_of = lambda r: lambda col: x[r, col]  # noqa: E731
    loss: Any = sp.Sum(dy[t, i] * _y(row_of(t), i), (i, 0, n - 1), (t, 0, T - 1))
    row = row_of(t)
    share = dw_term(dy[t, k], xhat(x[t, k], _mean(row), _rstd(row))) if wrt is w else dy[t, k]
    return differentiate(loss, wrt[k]), sp.Sum(share, (t, 0, T - 1))


def _claim_ds() -> tuple[Any, Any]:
    row = lambda col: s[col]  # noqa: E731
    loss: Any = sp.Sum(dy[i] * _y(row, i) + ds[i] * row(i), (i, 0, n - 1))
    return differentiate(loss, s[k]), d_residual(_dx(row), ds[k])


def _claim_sum(wrt: Any) -> tuple[Any, Any]:
    """To first order the loss is an inner product of s with its gradient, here dy."""
    return differentiate(sp.Sum(dy[i] * (x[i] + residual[i]), (i, 0, n - 1)), wrt[k]), dy[k]


THEOREMS = [
    Theorem("dx", _claim_dx),
    Theorem("dw", lambda: _claim_weight(w)),
    Theorem("db", lambda: _claim_weight(b)),
    Theorem("residual form: gradient of s", _claim_ds),
    Theorem("residual form: x gets the gradient of s", lambda: _claim_sum(x)),
    Theorem("residual form: residual gets the gradient of s", lambda: _claim_sum(residual)),
]
