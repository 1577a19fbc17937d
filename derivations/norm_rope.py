"""A head's RMS norm and its rotation in one step: what q and k go through between their projection and attention.

Statement. A head is n pairs of channels (x1_i, x2_i) that turn and m channels x3_i that do not; N = 2n + m. With scales
a = offset + w for every channel and tables c, s for every channel that turns,

    rstd = 1 / sqrt((sum x1^2 + sum x2^2 + sum x3^2) / N + eps)        xhat = x rstd        u = a xhat
    y1 = u1 c1 - u2 s1        y2 = u2 c2 + u1 s2        y3 = u3

and with cotangents dy the gradients are, with du the rotation transposed,

    du1 = dy1 c1 + dy2 s2        du2 = dy2 c2 - dy1 s1        du3 = dy3
    c = (sum over all channels of a du xhat) / N
    dx = rstd (a du - xhat c)        dw = sum over heads and positions of du xhat

for every n, m, eps, and tables of which no pair need be a rotation.

Saved: x and one number per head, rstd. u and y are not saved: xhat = x rstd is one product.

Symbols: i, j pairs or channels that pass, k the one that a derivative is taken in; t a head at a position.
Source: Zhang & Sennrich, Root Mean Square Layer Normalization, 2019, section 3; Su et al., RoFormer, 2021, section 3.2;
their succession on queries and keys: Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, 2023.
"""

from __future__ import annotations

from typing import Any

import sympy as sp

from ._prove import Theorem, differentiate

# The forward. `scale` is a = offset + w.


def xhat(x, rstd):
    return x * rstd


def scaled(scale, xhat):
    return scale * xhat


def first(u1, u2, c1, s1):
    return u1 * c1 - u2 * s1


def second(u1, u2, c2, s2):
    return u2 * c2 + u1 * s2


# The rotation is linear, so what reaches u is its transpose applied to dy. From there on the norm sees du as its
# cotangent: x_k reaches every u_i through rstd, and that path sums to -rstd xhat_k c.


def du_first(dy1, dy2, c1, s2):
    return dy1 * c1 + dy2 * s2


def du_second(dy1, dy2, c2, s1):
    return dy2 * c2 - dy1 * s1


def c_term(du, scale, xhat):
    """One channel's share of N c."""
    return scale * du * xhat


def dx(du, scale, xhat, rstd, c):
    return rstd * (scale * du - xhat * c)


def dw_term(du, xhat):
    """One head's share of dw."""
    return du * xhat


# The proofs. Channels are named by the part that they are in, 1, 2 or 3, and their place there.

n, m, T = sp.symbols("n m T", integer=True, positive=True)
i, j, k, t = sp.symbols("i j k t", integer=True, nonnegative=True)
eps, offset = sp.Symbol("epsilon", positive=True), sp.Symbol("offset", real=True)
_PARTS = (1, 2, 3)
_names = ("x", "w", "dy", "c", "s")
_arrays: Any = [{p: sp.IndexedBase(f"{name}{p}", real=True) for p in _PARTS} for name in _names]
_x, _w, _dy, _c, _s = _arrays
_LENGTH: Any = {1: n, 2: n, 3: m}


def _scale(p: int, at: Any) -> Any:
    return offset + _w[p][at]


def _total(term: Any, index: Any, *more: Any) -> Any:
    """Of term(part) over all channels."""
    sums: Any = [sp.Sum(term(p), (index, 0, _LENGTH[p] - 1), *more) for p in _PARTS]
    return sp.Add(*sums)


def _rstd(row: Any) -> Any:
    """row(p, at) is the channel."""
    return 1 / sp.sqrt(_total(lambda p: row(p, j) ** 2, j) / (2 * n + m) + eps)


def _u(row: Any, p: int, at: Any) -> Any:
    return scaled(_scale(p, at), xhat(row(p, at), _rstd(row)))


def _y(row: Any, p: int, at: Any) -> Any:
    if p == 3:
        return _u(row, 3, at)
    u1, u2 = _u(row, 1, at), _u(row, 2, at)
    return first(u1, u2, _c[1][at], _s[1][at]) if p == 1 else second(u1, u2, _c[2][at], _s[2][at])


def _du(p: int, at: Any, dy: Any) -> Any:
    if p == 3:
        return dy(3, at)
    if p == 1:
        return du_first(dy(1, at), dy(2, at), _c[1][at], _s[2][at])
    return du_second(dy(1, at), dy(2, at), _c[2][at], _s[1][at])


def _row(p: int, at: Any) -> Any:
    return _x[p][at]


def _cotangent(p: int, at: Any) -> Any:
    return _dy[p][at]


def _claim_dx(p: int) -> tuple[Any, Any]:
    loss, rstd = _total(lambda q: _dy[q][i] * _y(_row, q, i), i), _rstd(_row)
    c = _total(lambda q: c_term(_du(q, i, _cotangent), _scale(q, i), xhat(_row(q, i), rstd)), i) / (2 * n + m)
    claimed = dx(_du(p, k, _cotangent), _scale(p, k), xhat(_x[p][k], rstd), rstd, c)
    return differentiate(loss, _x[p][k]), claimed


def _claim_dw(p: int) -> tuple[Any, Any]:
    """Over T heads."""
    dy = lambda q, at: _dy[q][t, at]  # noqa: E731
    row = lambda q, at: _x[q][t, at]  # noqa: E731
    loss = _total(lambda q: dy(q, i) * _y(row, q, i), i, (t, 0, T - 1))
    return differentiate(loss, _w[p][k]), sp.Sum(dw_term(_du(p, k, dy), xhat(row(p, k), _rstd(row))), (t, 0, T - 1))


_NAMES = {1: "the first of a pair", 2: "the second of a pair", 3: "a channel that passes"}
THEOREMS = [
    *(Theorem(f"dx, {name}", lambda p=p: _claim_dx(p)) for p, name in _NAMES.items()),
    *(Theorem(f"dw, {name}", lambda p=p: _claim_dw(p)) for p, name in _NAMES.items()),
]
