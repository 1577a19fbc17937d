"""Triton kernels and the operators built on them: one file per fusion.

Read a file top to bottom: the kernels, the host functions that launch them, a plain torch reference of the
same signature, then the operator (`fused_backend::<name>`) that ties both to shapes, gradients and costs.
`_op.py` is how an operator is defined, `_launch.py` what every launch shares.
"""
