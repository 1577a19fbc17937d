"""The mathematics, proven: one file per fusion.

Each file reads as a page: the statement and its source, the symbols, the forward, what is saved and why that is
enough, each backward formula with its argument, and `THEOREMS`. A formula is a plain function of `+ - * /`; sympy
proves it equal to the derivative of the forward for every size, and the kernel compiles that same function.
`python -m pytest tests/test_derivations.py` checks every theorem.
"""
