"""Rotary position embedding: each pair of channels of q and k turns by an angle that grows with the position.

Channels form n = R/2 pairs (x1, x2). With tables c1, s1 for the first and c2, s2 for the second channel,

    y1 = x1 c1 - x2 s1,        y2 = x2 c2 + x1 s2.

Models keep c1 = c2 = cos(theta) and s1 = s2 = sin(theta), theta = position * frequency: a pair is rotated,

    y = R(theta) x,        R(theta) = [[cos, -sin], [sin, cos]],

which is multiplication of x1 + i x2 by exp(i theta). Attention sees relative positions only:
<R(m theta) q, R(p theta) k> = <R((m - p) theta) q, k>.

Backward: y is linear in x, so dx is the transposed map applied to dy,

    dx1 = dy1 c1 + dy2 s2,        dx2 = dy2 c2 - dy1 s1,

exact for unequal tables too. For a rotation it is the inverse, R(theta)^T = R(-theta). The transpose of the
transpose is the map itself, so second derivatives need nothing new.

Saved: cos and sin, which the model keeps anyway. Nothing of the size of q or k is saved.

Which channels form a pair is a permutation, nothing more: half style pairs (i, n + i), interleaved style
(2i, 2i + 1). The formulas know pairs only and serve both.

Shapes: x1, x2, y1, y2 and the tables (n,) per position and head; the channels above R pass through.
Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, sections 3.2 and 3.4.
"""

from typing import Any

import sympy as sp

from ._prove import Theorem, differentiate


# The forward. One channel of the pair each: a kernel that stores them separately needs no tuple.
def first(x1, x2, c1, s1):
    return x1 * c1 - x2 * s1


def second(x1, x2, c2, s2):
    return x2 * c2 + x1 * s2


# Column 1 of the map is (c1, s2): x1 reaches y1 with factor c1 and y2 with factor s2.
def transposed_first(dy1, dy2, c1, s2):
    return dy1 * c1 + dy2 * s2


# Column 2 is (-s1, c2).
def transposed_second(dy1, dy2, c2, s1):
    return dy2 * c2 - dy1 * s1


# The proofs, first for the whole map: n pairs, n symbolic, one entry of every array per pair; k is one pair.

_n = sp.Symbol("n", integer=True, positive=True)
_i = sp.Symbol("i", integer=True)
_k = sp.Symbol("k", integer=True, nonnegative=True)
_names = ("x1", "x2", "dy1", "dy2", "c1", "c2", "s1", "s2")
_arrays: Any = [sp.IndexedBase(name) for name in _names]
_x1, _x2, _dy1, _dy2, _c1, _c2, _s1, _s2 = _arrays


def _loss() -> Any:
    """<dy, y>: its derivatives in x are the gradients for the cotangent dy."""
    y1 = first(_x1[_i], _x2[_i], _c1[_i], _s1[_i])
    y2 = second(_x1[_i], _x2[_i], _c2[_i], _s2[_i])
    return sp.Sum(_dy1[_i] * y1 + _dy2[_i] * y2, (_i, 0, _n - 1))


def _transposed_loss() -> Any:
    """<x, dx>, for the second derivative: x plays the cotangent of dx, which is linear in dy."""
    dx1 = transposed_first(_dy1[_i], _dy2[_i], _c1[_i], _s2[_i])
    dx2 = transposed_second(_dy1[_i], _dy2[_i], _c2[_i], _s1[_i])
    return sp.Sum(_x1[_i] * dx1 + _x2[_i] * dx2, (_i, 0, _n - 1))


def _claim_dx1():
    return differentiate(_loss(), _x1[_k]), transposed_first(_dy1[_k], _dy2[_k], _c1[_k], _s2[_k])


def _claim_dx2():
    return differentiate(_loss(), _x2[_k]), transposed_second(_dy1[_k], _dy2[_k], _c2[_k], _s1[_k])


def _claim_ddy1():
    return differentiate(_transposed_loss(), _dy1[_k]), first(_x1[_k], _x2[_k], _c1[_k], _s1[_k])


def _claim_ddy2():
    return differentiate(_transposed_loss(), _dy2[_k]), second(_x1[_k], _x2[_k], _c2[_k], _s2[_k])


# Then for a rotation: pairs a and b, angles theta, m theta, p theta. The pairs of a head do not mix.

_theta, _m, _p = sp.symbols("theta m p", real=True)
_a: Any = sp.symbols("a1 a2", real=True)
_b: Any = sp.symbols("b1 b2", real=True)


def _rotate(pair, angle) -> Any:
    """R(angle) applied to a pair."""
    c, s = sp.cos(angle), sp.sin(angle)
    return first(pair[0], pair[1], c, s), second(pair[0], pair[1], c, s)


def _transposed(pair, angle) -> Any:
    """R(angle) transposed."""
    c, s = sp.cos(angle), sp.sin(angle)
    return transposed_first(pair[0], pair[1], c, s), transposed_second(pair[0], pair[1], c, s)


def _dot(a, b) -> Any:
    return a[0] * b[0] + a[1] * b[1]


def _claim_complex():
    y1, y2 = _rotate(_a, _theta)
    turned = (_a[0] + sp.I * _a[1]) * sp.exp(sp.I * _theta)
    return y1 + sp.I * y2, turned.rewrite(sp.cos)


def _claim_relative():
    scores = _dot(_rotate(_a, _m * _theta), _rotate(_b, _p * _theta))
    return scores, sp.expand_trig(_dot(_rotate(_a, (_m - _p) * _theta), _b))


# Last for the layouts: arrays are functions of the channel, 0 .. 2n - 1. The permutation P sends even
# channels to the first half, odd ones to the second; with permuted tables, half(P x) = P interleaved(x).

_rest = sp.Symbol("rest", integer=True, nonnegative=True)
_pairs = _k + 1 + _rest


def _permuted(array):
    """P array, as a function of the channel."""
    return lambda j: sp.Piecewise((array(2 * j), j < _pairs), (array(2 * (j - _pairs) + 1), True))


def _style(x, c, s, j1, j2) -> Any:
    """Channels j1 and j2 of y, when they form a pair of x."""
    return first(x(j1), x(j2), c(j1), s(j1)), second(x(j1), x(j2), c(j2), s(j2))


def _claim_layout(channel):
    x, c, s = (sp.Function(name) for name in ("x", "c", "s"))
    half = _style(_permuted(x), _permuted(c), _permuted(s), _k, _pairs + _k)
    interleaved = _style(x, c, s, 2 * _k, 2 * _k + 1)
    return half[channel], interleaved[channel]


THEOREMS = [
    Theorem("dx1", _claim_dx1),
    Theorem("dx2", _claim_dx2),
    Theorem("second derivative: ddy1", _claim_ddy1),
    Theorem("second derivative: ddy2", _claim_ddy2),
    Theorem("R^T R = I: row 1", lambda: (_transposed(_rotate(_a, _theta), _theta)[0], _a[0])),
    Theorem("R^T R = I: row 2", lambda: (_transposed(_rotate(_a, _theta), _theta)[1], _a[1])),
    Theorem("R(theta)^T = R(-theta): row 1", lambda: (_transposed(_a, _theta)[0], _rotate(_a, -_theta)[0])),
    Theorem("R(theta)^T = R(-theta): row 2", lambda: (_transposed(_a, _theta)[1], _rotate(_a, -_theta)[1])),
    Theorem("rotation is multiplication by exp(i theta)", _claim_complex),
    Theorem("scores depend on m - p only", _claim_relative),
    Theorem("half style is interleaved style permuted: first channel", lambda: _claim_layout(0)),
    Theorem("half style is interleaved style permuted: second channel", lambda: _claim_layout(1)),
]
