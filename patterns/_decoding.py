"""The values that a body of bitsandbytes' 4-bit linear computes, node by node; see `_bitsandbytes.py`."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NESTED_BLOCKSIZE = 256


class Unread(Exception):
    """Why a node is not read as a 4-bit linear."""


# The values a body computes. A Node among them is an operand: a value of the outer graph.
#   Scales, Weight              below
#   ("codes", node)               the codes as a column, as a row, or flat
#   ("linear", x, weight, bias)   x·Wᵀ + bias
#   ("dy",)                       the gradient that the backward body is given
#   ("dx", weight)                dy·W
#   ("dbias", dims, dtype)        dy summed over dimensions
#   ("number",)                   a size or a comparison of sizes, left behind by Dynamo where sizes are symbolic
#   ("nothing",)                  the context of the autograd.Function, the result of a grad-mode switch


@dataclass(frozen=True)
class Scales:
    """Nested scales, code[absmax]·absmax2 by blocks of 256, without or with the offset added."""

    absmax: Node
    absmax2: Node
    code: Node
    offset: Node | None = None


@dataclass(frozen=True)
class Weight:
    """The decoded W, rounded to `dtype`; if `rounded` is set, to that dtype before."""

    codes: Node
    absmax: Node | Scales
    blocksize: int
    quant_type: str
    shape: tuple[int, int]
    dtype: torch.dtype
    rounded: torch.dtype | None = None
    transposed: bool = False


# By identity: a function of the user's may be called `linear` as well.
_FUNCTIONS: dict[Any, str] = {
    torch.nn.functional.linear: "linear", torch.matmul: "matmul", operator.matmul: "matmul", torch.sum: "sum",
    operator.iadd: "iadd", torch._C._set_grad_enabled: "_set_grad_enabled", operator.getitem: "number",
    operator.mul: "number", operator.eq: "number", operator.or_: "number", operator.not_: "number",
}  # fmt: skip


def evaluate(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Value of a node whose arguments are evaluated already."""
    name = name_of(node) if node.op == "call_method" else _FUNCTIONS.get(node.target)
    if is_operator(node):
        declared = node.target._schema.arguments[len(args) :]  # type: ignore[union-attr]
        args, kwargs = (*args, *(kwargs.get(a.name, a.default_value) for a in declared)), {}
        name = name_of(node)
    match (name, *args):
        case ("bitsandbytes.dequantize_blockwise.default", Node() as absmax, Node() as absmax2, Node() as code, *how):
            if how != [NESTED_BLOCKSIZE, torch.float32]:
                raise Unread(f"nested scales in blocks of {how[0]}, as {how[1]}: only 256 and float32 are read")
            return Scales(absmax, absmax2, code)
        case ("iadd", Scales(offset=None) as scales, Node() as offset):
            # The tensor written to is new; if nobody else reads it, adding in place is adding.
            if list(node.args[0].users) != [node]:  # type: ignore[union-attr]
                raise Unread("the nested scales are used without their offset as well")
            return replace(scales, offset=offset)
        case ("bitsandbytes.dequantize_4bit.default", codes, absmax, blocksize, quant_type, shape, dtype):
            return _weight(codes, absmax, blocksize, quant_type, shape, dtype)
        case ("bitsandbytes.gemm_4bit.default", Node() as x, *given) if len(given) == 9:
            return product(x, *given)
        case ("t", Weight() as weight):
            return replace(weight, transposed=not weight.transposed)
        case ("view" | "reshape" | "t", codes, *shape) if not kwargs and shape in ([], [-1], [-1, 1], [1, -1]):
            return _line(codes)
        case ("to", source, *wanted) if not kwargs.keys() - {"dtype", "device"}:
            return _cast(source, *wanted, *kwargs.values())
        case ("float", source):
            return _cast(source, torch.float32)
        case ("linear", Node() as x, Weight(transposed=False) as weight, *bias) if not kwargs.keys() - {"bias"}:
            return ("linear", x, weight, *bias, *kwargs.values(), *(() if bias or kwargs else (None,)))
        case ("matmul", Node() as x, Weight(transposed=True) as weight):
            return ("linear", x, replace(weight, transposed=False), None)
        case ("matmul", ("dy",), Weight(transposed=False) as weight):
            return ("dx", weight)
        case ("sum", ("dy",), int() | (int(), *_) as dims) if not kwargs.keys() - {"dtype"}:
            return ("dbias", (dims,) if isinstance(dims, int) else tuple(dims), kwargs.get("dtype"))
        case ("_set_grad_enabled", bool()):
            return ("nothing",)
        case ("size" | "numel", *_):
            return ("number",)
        case ("number", *numbers) if all(map(_is_number, numbers)):
            return ("number",)
    raise Unread(f"it has a {name_of(node)} that a 4-bit linear does not have")


def product(
    x: Node, codes: Any, shape: Any, absmax: Any, blocksize: Any, quant_type: Any, bias: Any, absmax8: Any, code: Any,
    offset: Any,
) -> Any:  # fmt: skip
    """The value of a `gemm_4bit`."""
    if any((absmax8, code, offset)):
        absmax = Scales(absmax8, absmax, code, offset)
    return ("linear", x, _weight(codes, absmax, blocksize, quant_type, shape, fake_of(x).dtype), bias)


def _weight(codes: Any, absmax: Any, blocksize: Any, quant_type: Any, shape: Any, dtype: Any) -> Weight:
    if not isinstance(shape, (tuple, list)) or not all(type(n) is int for n in (*shape, blocksize)):
        raise Unread("its shape or its block size is not a constant of the graph")
    match (codes, absmax, *shape):
        case (("codes", Node() as line) | (Node() as line), Node() | Scales(), n, k):
            return Weight(line, absmax, blocksize, quant_type, (n, k), dtype)
    raise Unread("it decodes something else than its operands, or not a matrix")


def _line(source: Any) -> Any:
    """A line of codes made a column, a row or flat again: the same codes in the same order."""
    if isinstance(source, Node):
        sizes = [static(n) for n in fake_of(source).shape]
        if None not in sizes and sum(n != 1 for n in sizes) <= 1 and fake_of(source).is_contiguous():
            return ("codes", source)
    if not isinstance(source, tuple) or source[0] != "codes":
        raise Unread("it reshapes something else than a line of codes")
    return source


def _cast(source: Any, *wanted: Any) -> Any:
    """`to` a dtype and a device: nothing may change but the dtype of the decoded weight."""
    match source:
        case Weight():
            node, now = source.codes, source.dtype
        case Scales():
            node, now = source.absmax, torch.float32
        case Node():
            node, now = source, fake_of(source).dtype
        case _:
            raise Unread("it casts something else than its operands and the decoded weight")
    for to in wanted:
        if to == now or (isinstance(to, (torch.device, str)) and torch.device(to) == fake_of(node).device):
            continue
        if not isinstance(source, Weight) or to not in FLOATS or source.rounded is not None:
            raise Unread(f"it casts or moves a tensor of {now} to {to}")
        # Decoding computes in float32: rounding that is decoding to the other dtype.
        source = replace(source, dtype=to, rounded=None if now == torch.float32 else now)
    return source


def fake_of(node: Node) -> FakeTensor:
    fake = node.meta.get("example_value")
    if not isinstance(fake, FakeTensor):
        raise Unread(f"{node} is not a plain tensor")
    return fake


def static(n: Any) -> int | None:
    """A size that is the same in every run. Asking a symbolic one for its value would add a guard."""
    return n if isinstance(n, int) else n.node.maybe_as_int()


def _is_number(value: Any) -> bool:
    known = value.meta.get("example_value") if isinstance(value, Node) else value
    return isinstance(known, (int, torch.SymInt, torch.SymBool)) or (isinstance(known, tuple) and known == ("number",))


def is_operator(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "bitsandbytes"


def name_of(node: Node) -> str:
    target = node.target
    return str(target) if isinstance(target, (str, torch._ops.OpOverload)) else getattr(target, "__name__", str(target))
