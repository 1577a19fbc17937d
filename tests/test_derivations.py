"""Every theorem of every derivation, found by listing the folder; and a prover that is able to fail."""

import importlib
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
import sympy as sp
from fused_backend import derivations
from fused_backend.derivations import layer_norm, rms_norm
from fused_backend.derivations._prove import Theorem, apart, contract, differentiate, prove, residual

MODULES = sorted(m.name for m in pkgutil.iter_modules(derivations.__path__) if not m.name.startswith("_"))


def load(name):
    return importlib.import_module(f"fused_backend.derivations.{name}")


THEOREMS = [pytest.param(t, id=f"{name}: {t.name}") for name in MODULES for t in load(name).THEOREMS]


@pytest.mark.parametrize("theorem", THEOREMS)
def test_theorem_holds(theorem):
    prove(theorem)


@pytest.mark.parametrize("name", MODULES)
def test_page_has_source_and_distinct_theorems(name):
    page = load(name)
    assert page.__doc__ is not None
    assert "Source:" in page.__doc__
    names = [t.name for t in page.THEOREMS]
    assert names
    assert len(set(names)) == len(names)


def test_derivations_need_only_sympy():
    """A fresh interpreter imports every page without torch or Triton."""
    imports = "; ".join(f"import fused_backend.derivations.{name}" for name in MODULES)
    check = f"import sys; {imports}; sys.exit(bool({{'torch', 'triton', 'numpy'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-P", "-c", check], check=True)


def test_a_wrong_formula_is_not_proven():
    """The right dx with its mean term dropped, then with the sign of that term flipped."""
    row = lambda col: rms_norm.x[col]  # noqa: E731
    derivative, formula = rms_norm._claim_dx()
    direct = rms_norm._rstd(row) * rms_norm._scale(rms_norm.k) * rms_norm.dy[rms_norm.k]
    for name, wrong in {"term dropped": direct, "sign flipped": 2 * direct - formula}.items():
        theorem = Theorem(name, lambda wrong=wrong: (derivative, wrong))
        assert residual(theorem) != 0
        with pytest.raises(AssertionError, match=f"{name}.*does not hold"):
            prove(theorem)


MUTANTS = {
    "d": lambda g, xhat, c: g,
    "c_term": lambda g, xhat: g,
    "dx": lambda d, mean_d, rstd: d * rstd,
    "dw_term": lambda dy, xhat: dy,
    "d_residual": lambda dx, ds: dx,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_formula_of_layer_norm_matters(name, monkeypatch):
    monkeypatch.setattr(layer_norm, name, MUTANTS[name])
    assert any(residual(theorem) != 0 for theorem in layer_norm.THEOREMS)


def test_equal_sums_look_equal_and_others_do_not():
    n, i, j = sp.Symbol("n", integer=True, positive=True), *sp.symbols("i j", integer=True, nonnegative=True)
    v: Any = sp.IndexedBase("v")
    total = sp.Sum(v[i], (i, 0, n - 1))
    assert apart(sp.Sum(v[j] - total / n, (j, 0, n - 1))) == 0
    assert apart(sp.Sum((v[j] - total / n) ** 2, (j, 0, n - 1)) - sp.Sum(v[i] ** 2, (i, 0, n - 1))) != 0
    assert apart(sp.Sum(v[j] * total, (j, 0, n - 1)) - total**2) == 0
    assert apart(sp.Sum(v[i + 1], (i, 0, n - 1)) - total) != 0


def test_a_formula_true_for_one_size_only_is_not_proven():
    n, i, k = sp.Symbol("n", integer=True, positive=True), *sp.symbols("i k", integer=True, nonnegative=True)
    v: Any = sp.IndexedBase("v")
    mean = sp.Sum(v[i], (i, 0, n - 1)) / n
    prove(Theorem("mean", lambda: (differentiate(mean, v[k]), 1 / n)))
    with pytest.raises(AssertionError):
        prove(Theorem("mean of four", lambda: (differentiate(mean, v[k]), sp.Rational(1, 4))))


def test_contract_picks_one_term_of_nested_sums():
    n, m = sp.symbols("n m", integer=True, positive=True)
    i, j, k, q = sp.symbols("i j k q", integer=True, nonnegative=True)
    a: Any = sp.IndexedBase("a")
    both = sp.Sum(a[i, j] * sp.KroneckerDelta(i, k) * sp.KroneckerDelta(j, q), (i, 0, n - 1), (j, 0, m - 1))
    one = sp.Sum(a[i, j] * sp.KroneckerDelta(i, k), (i, 0, n - 1), (j, 0, m - 1))
    assert contract(both) == a[k, q]
    assert contract(one) == sp.Sum(a[k, j], (j, 0, m - 1))
