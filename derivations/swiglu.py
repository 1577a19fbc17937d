"""The gated unit: h = act(gate) * up, elementwise, for silu, gelu, gelu_tanh and relu2; limited and offset.

The activations have one shape: the gate times the probability that a random variable lies below it,

    act(g) = g P(g),        P a distribution function, p = dP/dg its density,

    silu        P = sigmoid(alpha g)              the logistic distribution, alpha its inverse scale (1: silu itself)
    gelu        P = (1 + erf(g / sqrt 2)) / 2     the normal distribution
    gelu_tanh   P = sigmoid(2 z(g))               z = beta (g + kappa g^3), close to the normal one
    relu2       P = g, p = 1, of max(g, 0)        no distribution, but the same product: g P = max(g, 0)^2

with beta = sqrt(2 / pi) and kappa = 0.044715. The last line is the tanh form in disguise,
(1 + tanh z) / 2 = sigmoid(2 z): no tanh is needed and nothing cancels where tanh z is close to -1. So one
forward and one backward serve every activation; only P and p differ.

Limited and offset (gpt-oss, DeepSeek-V4): h = act(min(gate, l)) (min(max(up, -l), l) + o). The formulas are those
above at the limited values; what a limit changed gets no gradient, what lies exactly on it gets all of it, as in
torch: a clamp has no derivative there, and 1 is a subgradient.

Saved: gate and up, the inputs themselves. P, p and h are formed again from them in registers, so no (T, F)
array is kept beside the inputs.

Shapes: gate, up, h and their gradients (T, F); T tokens, F ffn. Every formula is elementwise.
Source: Shazeer, GLU Variants Improve Transformer, 2020.
Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
"""

from typing import Any

import sympy as sp

from ._prove import Theorem, differentiate


# The forward is act * up. The product with up is left to the caller, who rounds act first, as eager does.
def act(gate, cdf):
    return gate * cdf


# d act = (dg) P + g (p dg), the product rule; up is the factor that h = act * up leaves in front.
def dgate(dh, gate, up, cdf, pdf):
    return dh * up * (cdf + gate * pdf)


# h is linear in up, and act(gate) = gate P is the factor.
def dup(dh, gate, cdf):
    return dh * (gate * cdf)


# silu: p = P (1 - P), the logistic density. `tail` = 1 - P = sigmoid(-g), which cancels nowhere.
def logistic_pdf(cdf, tail):
    return cdf * tail


# silu at scale alpha: P = sigmoid(alpha g), and the chain rule leaves alpha in front of the density there.
def scaled_pdf(pdf, alpha):
    return alpha * pdf


# gelu: p = peak * bell, the normal density; peak = 1 / sqrt(2 pi) and bell = exp(-g^2 / 2).
def normal_pdf(bell, peak):
    return peak * bell


# gelu_tanh: P = sigmoid of this, 2 z(g).
def tanh_argument(gate, beta, kappa):
    return 2 * beta * (gate + kappa * gate * gate * gate)


# The chain rule through 2 z(g): the logistic density there times d(2 z)/dg.
def tanh_pdf(cdf, tail, gate, beta, kappa):
    return cdf * tail * (2 * beta * (1 + 3 * kappa * gate * gate))


# The proofs. T and F stay symbolic; [t, f] is one element of the arrays that the loss sums over.

_T, _F = sp.symbols("T F", integer=True, positive=True)
_t, _f = sp.symbols("t f", integer=True, nonnegative=True)
_i, _j = sp.symbols("i j", integer=True)
_dh: Any = sp.IndexedBase("dh")
_gate: Any = sp.IndexedBase("gate")
_up: Any = sp.IndexedBase("up")
_g, _u, _o, _dy = sp.symbols("g u o dy", real=True)
_alpha, _beta, _kappa, _limit = sp.symbols("alpha beta kappa l", positive=True)
_clamp: Any = sp.Function("clamp", real=True)


def _sigmoid(v):
    return 1 / (1 + sp.exp(-v))


def _normal_cdf(v):
    return (1 + sp.erf(v / sp.sqrt(2))) / 2


def _gelu_tanh(v):
    """As the papers and frameworks write it."""
    return v / 2 * (1 + sp.tanh(_beta * (v + _kappa * v**3)))


def _loss(activation) -> Any:
    """sum dh * act(gate) * up: its derivatives are the gradients for the cotangent dh."""
    term = _dh[_i, _j] * activation(_gate[_i, _j]) * _up[_i, _j]
    return sp.Sum(term, (_i, 0, _T - 1), (_j, 0, _F - 1))


def _gate_gradient(activation, cdf, pdf):
    g = _gate[_t, _f]
    left = differentiate(_loss(activation), g)
    return left, dgate(_dh[_t, _f], g, _up[_t, _f], cdf(g), pdf(g))


def _up_gradient(activation, cdf):
    g = _gate[_t, _f]
    return differentiate(_loss(activation), _up[_t, _f]), dup(_dh[_t, _f], g, cdf(g))


def _silu_pdf(v):
    return logistic_pdf(_sigmoid(v), _sigmoid(-v))


def _gelu_pdf(v):
    return normal_pdf(sp.exp(-(v**2) / 2), 1 / sp.sqrt(2 * sp.pi))


def _tanh_cdf(v):
    return _sigmoid(tanh_argument(v, _beta, _kappa))


def _gelu_tanh_pdf(v):
    argument = tanh_argument(v, _beta, _kappa)
    return tanh_pdf(_sigmoid(argument), _sigmoid(-argument), v, _beta, _kappa)


def _silu(v):
    return v * _sigmoid(v)


def _gelu(v):
    return v * _normal_cdf(v)


def _scaled_silu(v):
    return v * _sigmoid(_alpha * v)


def _scaled_cdf(v):
    return _sigmoid(_alpha * v)


def _scaled_pdf(v):
    return scaled_pdf(_silu_pdf(_alpha * v), _alpha)


def _clamped_gate_gradient(activation, cdf, pdf):
    """The limited and offset unit with c(g), d(u) for the clamps: the formulas at c and d, times the clamp's slope."""
    c, d = _clamp(_g), _clamp(_u)
    left = sp.diff(_dy * activation(c) * (d + _o), _g)
    return left, dgate(_dy, c, d + _o, cdf(c), pdf(c)) * c.diff(_g)


def _clamped_up_gradient(activation, cdf):
    c, d = _clamp(_g), _clamp(_u)
    return sp.diff(_dy * activation(c) * (d + _o), _u), dup(_dy, c, cdf(c)) * d.diff(_u)


def _slope(inside, limit):
    """(slope of a clamp at one limit, 1 inside and 0 outside): what the kernels write as a selection.

    At the limit itself torch and the kernels have 1. relu is the clamp at 0 from below.
    """
    clamp, one = sp.Piecewise((_u, inside), (limit, True)), sp.Piecewise((1, inside), (0, True))
    return sp.piecewise_fold(sp.diff(clamp, _u) - one), sp.Integer(0)


def _rational(expr):
    """tanh in exponentials, so that both sides are fractions in exp of one argument and meet in simplify."""
    return expr.rewrite(sp.exp)


THEOREMS = [
    Theorem("silu: p is the density of P", lambda: (sp.diff(_sigmoid(_g), _g), _silu_pdf(_g))),
    Theorem("gelu: p is the density of P", lambda: (sp.diff(_normal_cdf(_g), _g), _gelu_pdf(_g))),
    Theorem("gelu_tanh: p is the density of P", lambda: (sp.diff(_tanh_cdf(_g), _g), _gelu_tanh_pdf(_g))),
    Theorem("silu: act", lambda: (_silu(_g), act(_g, _sigmoid(_g)))),
    Theorem("gelu: act", lambda: (_gelu(_g), act(_g, _normal_cdf(_g)))),
    Theorem("gelu_tanh: act", lambda: (_rational(_gelu_tanh(_g)), act(_g, _tanh_cdf(_g)))),
    Theorem("silu: dgate", lambda: _gate_gradient(_silu, _sigmoid, _silu_pdf)),
    Theorem("gelu: dgate", lambda: _gate_gradient(_gelu, _normal_cdf, _gelu_pdf)),
    Theorem(
        "gelu_tanh: dgate",
        lambda: tuple(map(_rational, _gate_gradient(_gelu_tanh, _tanh_cdf, _gelu_tanh_pdf))),
    ),
    Theorem("silu: dup", lambda: _up_gradient(_silu, _sigmoid)),
    Theorem("gelu: dup", lambda: _up_gradient(_gelu, _normal_cdf)),
    Theorem("gelu_tanh: dup", lambda: tuple(map(_rational, _up_gradient(_gelu_tanh, _tanh_cdf)))),
    Theorem("scaled silu: p is the density of P", lambda: (sp.diff(_scaled_cdf(_g), _g), _scaled_pdf(_g))),
    Theorem("scaled silu: act", lambda: (_g * _sigmoid(_alpha * _g), act(_g, _scaled_cdf(_g)))),
    Theorem("scaled silu: dgate", lambda: _gate_gradient(_scaled_silu, _scaled_cdf, _scaled_pdf)),
    Theorem("limited scaled silu: dgate", lambda: _clamped_gate_gradient(_scaled_silu, _scaled_cdf, _scaled_pdf)),
    Theorem("limited scaled silu: dup", lambda: _clamped_up_gradient(_scaled_silu, _scaled_cdf)),
    Theorem("relu2: act", lambda: (_clamp(_g) ** 2, act(_clamp(_g), _clamp(_g)))),
    Theorem("relu2: dgate", lambda: _clamped_gate_gradient(lambda v: v**2, lambda v: v, lambda v: 1)),
    Theorem("relu2: dup", lambda: _clamped_up_gradient(lambda v: v**2, lambda v: v)),
    Theorem("limited from above: the slope", lambda: _slope(_u <= _limit, _limit)),
    Theorem("limited from below: the slope", lambda: _slope(_u >= -_limit, -_limit)),
]
