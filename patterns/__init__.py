"""What a fusion looks like in a graph: one file per fusion, each with one `FUSION`.

An idiom is a plain PyTorch function that reads like the model code it matches. It is traced once on small example
tensors, brought into the same canonical form as the model's graph (compiler/canonicalize.py), and unified with it
(compiler/match.py). So a pattern is written in one spelling and matches all of them: method, function or operator,
any rank, either order of a commutative product, casts that do nothing.

A file says three things: the idioms, when a structural match must still be refused, and how the operator is called.
"""
