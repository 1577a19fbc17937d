"""Linear layer and cross-entropy: the loss of T tokens over V words, without the (T, V) logits.

Statement. Row i of x meets word v of w; the logit may be scaled and capped,

    logits_iv = sum_d x_id w_vd + bias_v          z_iv = cap tanh(s logits_iv / cap)    or    s logits_iv

and its target t_i, smoothed by epsilon, asks for q_iv = (1 - epsilon) [v = t_i] + epsilon / V:

    loss_i = -sum_v q_iv log p_iv          p_iv = exp(z_iv) / sum_u exp(z_iu)

With weights r_i (the cotangent of row i; 0 where the target is ignored) and L = sum_i r_i loss_i,

    g_iv = r_i (p_iv - q_iv) (1 - tanh^2)
    dx_id = s sum_v g_iv w_vd          dw_vd = s sum_i g_iv x_id          dbias_v = s sum_i g_iv

for every T, D and V. So g of a few rows is all that ever has to exist: rows do not see each other, dx is a
row's own, and dw, dbias are sums over rows that may be taken a chunk at a time. r_i is one number for all
valid rows (1 in a sum, 1 / valid in a mean), so it and s leave g, and the products, as common factors.

Symbols: T tokens, D model, V vocabulary; i, m rows; u, v, k words; d, e columns of x and w; cap the softcap;
s logit_scale.
Source: gradients made in the forward, a chunk of rows at a time, are folklore; see Hsu et al., Liger Kernel,
2024, section 3.2. That logits need not exist: Wijmans et al., Cut Your Losses in Large-Vocabulary Language
Models, 2024. One-pass sums: Milakov & Gimelshein, Online normalizer calculation for softmax, 2018.
Smoothing: Szegedy et al., Rethinking the Inception Architecture, 2015, section 7.
"""

from __future__ import annotations

from typing import Any

import sympy as sp

from ._prove import Theorem, contract, differentiate

# The forward. A row is read tile by tile: `top` is the largest z so far, `total` the sum of exp(z - top). A
# tile that raises top fades total by exp(old top - new top); `part` is its own sum of exp(z - new top).


def grown(total, fade, part):
    return total * fade + part


# With log sum_u exp(z_u) = top + log_total and sum_v q_v = 1, sum_v q_v (top + log_total - z_v) splits into
# three parts. Differences to top are taken first: they are small where z is large.


def row_loss(log_total, top, z_target, z_mean, smoothing):
    return log_total + (1 - smoothing) * (top - z_target) + smoothing * (top - z_mean)


# What is kept of a row and why it is enough: top and total, in registers; p_v = exp(z_v - top) / total needs
# no more. Nothing is saved for the backward but the finished dx, dw, dbias, which only wait for a scalar.


def wanted(hit, smoothing, uniform):
    """q_v; `hit` is 1 at the target and 0 elsewhere, `uniform` is 1 / V."""
    return (1 - smoothing) * hit + smoothing * uniform


# dz. d log sum_u exp(z_u) / d z_v = p_v, and z_v enters the rest with the factor -q_v.


def dz(p, wanted):
    return p - wanted


# Softcap. z = cap tanh(y / cap) of y = s logits has slope 1 - tanh^2; without it tanh is 0. s stays outside.


def dlogits(dz, tanh):
    return dz * (1 - tanh * tanh)


# dx, dw, dbias. logits_iv is linear in each with slopes w_vd, x_id and 1: two products and a sum over rows.

T, D, V = sp.symbols("T D V", integer=True, positive=True)
i, m, d, e, u, v, k = sp.symbols("i m d e u v k", integer=True, nonnegative=True)
first, last = sp.symbols("first last", integer=True, nonnegative=True)
eps, s, cap = sp.symbols("epsilon s cap", positive=True)
_arrays: Any = (sp.IndexedBase(name, real=True) for name in ("x", "w", "bias", "logits", "z", "g", "r"))
x, w, bias, logits, z, g, r = _arrays
target: Any = sp.Function("t", integer=True, nonnegative=True)


def _softmax(row: Any, word: Any) -> Any:
    """p_v by its definition; `row(v)` gives z_v."""
    return sp.exp(row(word)) / sp.Sum(sp.exp(row(u)), (u, 0, V - 1))


def _wanted(word, i) -> Any:
    return wanted(sp.KroneckerDelta(word, target(i)), eps, 1 / V)


def _row_loss(row: Any, i: Any) -> Any:
    """The loss as the kernel forms it, with top = 0: Theorem `top cancels` allows it."""
    z_mean = sp.Sum(row(u), (u, 0, V - 1)) / V
    return row_loss(sp.log(sp.Sum(sp.exp(row(u)), (u, 0, V - 1))), 0, row(target(i)), z_mean, eps)


def _claim_grown() -> tuple[Any, Any]:
    """Both sides times exp(new top), so that they are sums of exp(z) over the columns seen."""
    old_top, new_top = sp.symbols("old_top new_top", real=True)
    seen: Any = sp.Sum(sp.exp(z[u]), (u, 0, first - 1))
    tile: Any = sp.Sum(sp.exp(z[u]), (u, first, last))
    total = grown(seen * sp.exp(-old_top), sp.exp(old_top - new_top), tile * sp.exp(-new_top))
    return seen + tile, sp.expand(total * sp.exp(new_top))


def _claim_top() -> tuple[Any, Any]:
    top, total, z_target, z_mean = sp.symbols("top total z_target z_mean", positive=True)
    shifted = row_loss(sp.log(total * sp.exp(-top)), top, z_target, z_mean, eps)
    return sp.expand_log(sp.expand(shifted)), sp.expand(row_loss(sp.log(total), 0, z_target, z_mean, eps))


def _claim_row_loss() -> tuple[Any, Any]:
    """-sum_v q_v log p_v, with log p_v = z_v - lse written out."""
    lse = sp.Symbol("lse", real=True)
    terms: Any = sp.Sum(-_wanted(v, i) * (z[i, v] - lse), (v, 0, V - 1))
    claimed = row_loss(lse, 0, z[i, target(i)], sp.Sum(z[i, v], (v, 0, V - 1)) / V, eps)
    return sp.expand(contract(sp.expand(terms)).doit()), sp.expand(claimed)


def _claim_dz() -> tuple[Any, Any]:
    row = lambda word: z[i, word]  # noqa: E731
    return differentiate(_row_loss(row, i), z[i, k]), dz(_softmax(row, k), _wanted(k, i))


def _claim_dlogits(word: Any, hit: int) -> tuple[Any, Any]:
    """Through the softcap, to one logit: the target's (hit 1) or another word's (hit 0)."""
    inner = lambda v: s * logits[i, v] / cap  # noqa: E731
    row = lambda v: cap * sp.tanh(inner(v))  # noqa: E731
    derivative = differentiate(_row_loss(row, i), logits[i, word]).subs(sp.KroneckerDelta(word, target(i)), hit)
    return derivative, s * dlogits(dz(_softmax(row, word), wanted(hit, eps, 1 / V)), sp.tanh(inner(word)))


# The rest is one chain rule: s g is d L / d logits, so a gradient is the derivative of
# sum_iv s g_iv logits_iv with g held fixed. The uncapped loss is also differentiated whole, as a check.


def _logits(i, word) -> Any:
    return sp.Sum(x[i, e] * w[word, e], (e, 0, D - 1)) + bias[word]


def _claim_chain(wrt: Any, claimed: Any) -> tuple[Any, Any]:
    loss: Any = sp.Sum(s * g[i, v] * _logits(i, v), (v, 0, V - 1), (i, 0, T - 1))
    return differentiate(loss, wrt), s * claimed


def _g(i: Any, word: Any) -> Any:
    row = lambda word: s * _logits(i, word)  # noqa: E731
    return r[i] * dlogits(dz(_softmax(row, word), _wanted(word, i)), 0)


def _claim_whole(wrt: Any, claimed: Any) -> tuple[Any, Any]:
    loss: Any = sp.Sum(r[i] * _row_loss(lambda word: s * _logits(i, word), i), (i, 0, T - 1))
    return differentiate(loss, wrt), s * claimed


THEOREMS = [
    Theorem("one-pass sum", _claim_grown),
    Theorem("top cancels", _claim_top),
    Theorem("row loss", _claim_row_loss),
    Theorem("dz", _claim_dz),
    Theorem("dlogits, the target", lambda: _claim_dlogits(target(i), 1)),
    Theorem("dlogits, another word", lambda: _claim_dlogits(k, 0)),
    Theorem("dx", lambda: _claim_chain(x[m, d], sp.Sum(g[m, v] * w[v, d], (v, 0, V - 1)))),
    Theorem("dw", lambda: _claim_chain(w[k, d], sp.Sum(g[i, k] * x[i, d], (i, 0, T - 1)))),
    Theorem("dbias", lambda: _claim_chain(bias[k], sp.Sum(g[i, k], (i, 0, T - 1)))),
    Theorem("dx, whole", lambda: _claim_whole(x[m, d], sp.Sum(_g(m, u) * w[u, d], (u, 0, V - 1)))),
    Theorem("dw, whole", lambda: _claim_whole(w[k, d], sp.Sum(_g(i, k) * x[i, d], (i, 0, T - 1)))),
    Theorem("dbias, whole", lambda: _claim_whole(bias[k], sp.Sum(_g(i, k), (i, 0, T - 1)))),
]
