"""Causal attention with grouped heads, and what padding, windows and documents do to it.

One query attends to the keys of a set N (causal: those up to itself) with probabilities p,

    s_j = scale q . k_j,    p_j = exp(s_j) / sum_{m in N} exp(s_m),    out = sum_{j in N} p_j v_j.

For the cotangent do, and with delta = do . out = sum_j p_j dp_j,

    dp_j = do . v_j,        ds_j = p_j (dp_j - delta),
    dq = scale sum_j ds_j k_j,      dk_j = scale sum_queries ds_j q,      dv_j = sum_queries p_j do.

Grouped heads: query head h reads the keys of head g(h), so that the gradient of a key sums over the queries of all
heads of its group. Repeating keys for every query head and attending head by head is the same: a repeated key
has one query head, and the gradient of a repetition is the sum over its copies.

Padding: a key with s_j = -inf has p_j = 0, so it takes no part in out and gets no gradient, whatever its value. If
the keys left are a run [start, end), a query inside sees what causal attention inside the run sees, a query after
it the whole run, a query before it nothing: three calls without a mask have the outputs of the masked one in every
row, and as each key's gradient is a sum over queries, the sum of theirs.

Windows and documents: N is smaller, the formulas are the same. Under a window w, query i sees the keys i - w < j <= i;
a query i >= end behind a run [start, end) sees what is left of its last w - 1, i - w < j < end. Tokens are of one
document where d_i = d_j; if d counts boundaries up, d_j - d_i is their number between i and j, so that equal ones have
none between them, and position ids that go on by one wherever there is no boundary differ by j - i.

Saved: q, k, v, out and each query's log sum exp(s): p_j = exp(s_j - lse) without a second pass over the keys.

Shapes: one query head at a time; N keys, K head dim, M queries that share a key, C copies.
Source: Vaswani et al., Attention Is All You Need, 2017. Dao et al., FlashAttention, 2022, for delta.
Source: Ainslie et al., GQA, 2023.
"""

from typing import Any

import sympy as sp

from ._prove import Theorem, differentiate


# d softmax: ds_j = p_j (dp_j - sum_m p_m dp_m), and s = scale q . k brings the factor scale to both of q and k.
def dscore(p, dp, delta, scale):
    return p * (dp - delta) * scale


# The proofs. N, K, M, C stay symbolic; g stands for ds where the chain rule goes on from it.

N, K, M, C = sp.symbols("N K M C", integer=True, positive=True)
i, j, c, n, d, e, m = sp.symbols("i j c n d e m", integer=True, nonnegative=True)
scale, others = sp.symbols("scale others", positive=True)
_arrays: Any = (sp.IndexedBase(name, real=True) for name in ("q", "k", "v", "do", "s", "dp", "p", "g"))
q, k, v, do, s, dp, p, g = _arrays


def _over_keys(term: Any) -> Any:
    return sp.Sum(term, (n, 0, N - 1))


def _claim_dscore() -> tuple[Any, Any]:
    """The loss do . out as a function of the scores: a mean of the dp_n, of which delta is the value."""
    total = _over_keys(sp.exp(s[n]))
    mean = _over_keys(sp.exp(s[n]) * dp[n]) / total
    return scale * differentiate(mean, s[j]), dscore(sp.exp(s[j]) / total, dp[j], mean, scale)


def _claim_delta() -> tuple[Any, Any]:
    """do . out = sum_n p_n dp_n: both are linear in v, so it is enough that every v has the same factor."""
    of_out = sp.Sum(do[d] * _over_keys(p[n] * v[n, d]), (d, 0, K - 1))
    of_dp = _over_keys(p[n] * sp.Sum(do[d] * v[n, d], (d, 0, K - 1)))
    return differentiate(of_out, v[j, e]), differentiate(of_dp, v[j, e])


def _claim_chain(wrt: Any, claimed: Any) -> tuple[Any, Any]:
    """Through s_in = scale q_i . k_n with d L / d s_in = g_in held fixed, over M queries."""
    score = sp.Sum(q[i, d] * k[n, d], (d, 0, K - 1))
    return differentiate(sp.Sum(_over_keys(g[i, n] * scale * score), (i, 0, M - 1)), wrt), claimed


def _claim_dv() -> tuple[Any, Any]:
    loss = sp.Sum(do[i, d] * _over_keys(p[i, n] * v[n, d]), (d, 0, K - 1), (i, 0, M - 1))
    return differentiate(loss, v[j, e]), sp.Sum(p[i, j] * do[i, e], (i, 0, M - 1))


def _claim_copies() -> tuple[Any, Any]:
    """C copies of k, each with the gradient g_c of its own: k gets their sum, as from the C query heads it serves."""
    return differentiate(sp.Sum(_over_keys(g[c, n] * k[n]), (c, 0, C - 1)), k[j]), sp.Sum(g[c, j], (c, 0, C - 1))


def _hidden(value: Any) -> Any:
    """With the score of one key at -inf; `others` is the sum of exp over the rest."""
    score = sp.Symbol("score", real=True)
    return sp.limit(value(sp.exp(score) / (sp.exp(score) + others)), score, -sp.oo)


def _claim_rest() -> tuple[Any, Any]:
    """The other keys are weighted as if the hidden one were not there."""
    score, own = sp.symbols("score own", real=True)
    return sp.limit(sp.exp(own) / (sp.exp(score) + others), score, -sp.oo), sp.exp(own) / others


THEOREMS = [
    Theorem("ds", _claim_dscore),
    Theorem("delta", _claim_delta),
    Theorem("dq", lambda: _claim_chain(q[m, e], scale * _over_keys(g[m, n] * k[n, e]))),
    Theorem("dk", lambda: _claim_chain(k[j, e], scale * sp.Sum(g[i, j] * q[i, e], (i, 0, M - 1)))),
    Theorem("dv", _claim_dv),
    Theorem("copies of a key", _claim_copies),
    Theorem("a hidden key has no weight", lambda: (_hidden(lambda weight: weight), 0)),
    Theorem("a hidden key has no gradient", lambda: (_hidden(lambda weight: dscore(weight, dp[j], d, scale)), 0)),
    Theorem("hiding a key is leaving it out", _claim_rest),
]
