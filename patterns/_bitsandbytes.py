"""bitsandbytes' 4-bit linear in a Dynamo graph: is a node exactly that, and what are its operands?

y = x·Wᵀ + bias, with W decoded from 4-bit codes, comes in three forms:

    gemm_4bit                  one operator call, without a gradient (0.50, where nothing needs one)
    autograd_function_apply    a forward body and a backward body (where something needs a gradient)
    dequantize_4bit, linear    the forward of 0.48 and 0.49 written out (where nothing needs one)

What makes it this linear and no other stands inside the bodies: shape, block size, number format, the gradient. So
both are evaluated, node by node, to the few values listed below. A node that computes none of them, or a gradient other
than dx = dy·W with the very W of the forward, gives a reason: an autograd.Function may return any gradient it likes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NESTED_BLOCKSIZE = 256


@dataclass(frozen=True)
class FourBit:
    """A 4-bit linear: y = x·Wᵀ + bias. Every Node is one of the outer graph.

    W is (N, K) = `shape`, two values a byte in `codes`, rounded once, to the dtype of x. The scale of its i-th block
    of `blocksize` values is absmax[i], or, with `nested` = (code, absmax2, offset), where the scales are themselves
    kept in 8 bits, code[absmax[i]]·absmax2[i // 256] + offset.

    `result` is the node whose value is y. `differentiable`: does this form have a gradient for x and bias? The bare
    operator call has none.
    """

    x: Node
    codes: Node
    absmax: Node
    nested: tuple[Node, Node, Node] | tuple[()]
    bias: Node | None
    shape: tuple[int, int]
    blocksize: int
    quant_type: str
    result: Node
    differentiable: bool


def is_four_bit_site(node: Node) -> bool:
    """Could this be a 4-bit linear: does it, or one of its bodies, read 4-bit codes of bitsandbytes?"""
    if not _is_function_apply(node):
        return _reads_codes(node)
    return any(_reads_codes(n) for arg in node.args[:2] if (body := _body(node, arg)) for n in body.nodes)


def read_four_bit(node: Node) -> FourBit | str:
    """The 4-bit linear that a node stands for (one for which `is_four_bit_site` holds), or why it is none."""
    try:
        if _is_function_apply(node):
            return _read_function(node)
        name = _name(node)
        if name == "bitsandbytes.gemm_4bit.default":
            return _four_bit(_outer(node, always=True), node, differentiable=False)
        if name == "bitsandbytes.dequantize_4bit.default":
            return _read_written_out(node)
        if name == "bitsandbytes.gemv_4bit.default":
            return "gemv_4bit, the product with a single token in inference, is not read"
        return f"{name} is not a form of the 4-bit linear"
    except _Unread as reason:
        return str(reason)


class _Unread(Exception):
    """Why a node is not read as a 4-bit linear."""


# The values a body computes. A Node among them is an operand: a value of the outer graph.
#   _Scales, _Weight              below
#   ("codes", node)               the codes as a column, as a row, or flat
#   ("linear", x, weight, bias)   x·Wᵀ + bias
#   ("dy",)                       the gradient that the backward body is given
#   ("dx", weight)                dy·W
#   ("dbias", dims, dtype)        dy summed over dimensions
#   ("number",)                   a size or a comparison of sizes, left behind by Dynamo where sizes are symbolic
#   ("nothing",)                  the context of the autograd.Function, the result of a grad-mode switch


@dataclass(frozen=True)
class _Scales:
    """Nested scales, code[absmax]·absmax2 by blocks of 256, without or with the offset added."""

    absmax: Node
    absmax2: Node
    code: Node
    offset: Node | None = None


@dataclass(frozen=True)
class _Weight:
    """The decoded W, rounded to `dtype`; if `rounded` is set, to that dtype before."""

    codes: Node
    absmax: Node | _Scales
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


def _evaluate(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Value of a node whose arguments are evaluated already."""
    name = _name(node) if node.op == "call_method" else _FUNCTIONS.get(node.target)
    if _is_operator(node):
        declared = node.target._schema.arguments[len(args) :]  # type: ignore[union-attr]
        args, kwargs = (*args, *(kwargs.get(a.name, a.default_value) for a in declared)), {}
        name = _name(node)
    match (name, *args):
        case ("bitsandbytes.dequantize_blockwise.default", Node() as absmax, Node() as absmax2, Node() as code, *how):
            if how != [_NESTED_BLOCKSIZE, torch.float32]:
                raise _Unread(f"nested scales in blocks of {how[0]}, as {how[1]}: only 256 and float32 are read")
            return _Scales(absmax, absmax2, code)
        case ("iadd", _Scales(offset=None) as scales, Node() as offset):
            # The tensor written to is new; if nobody else reads it, adding in place is adding.
            if list(node.args[0].users) != [node]:  # type: ignore[union-attr]
                raise _Unread("the nested scales are used without their offset as well")
            return replace(scales, offset=offset)
        case ("bitsandbytes.dequantize_4bit.default", codes, absmax, blocksize, quant_type, shape, dtype):
            return _weight(codes, absmax, blocksize, quant_type, shape, dtype)
        case ("bitsandbytes.gemm_4bit.default", Node() as x, *given) if len(given) == 9:
            return _gemm(x, given)
        case ("t", _Weight() as weight):
            return replace(weight, transposed=not weight.transposed)
        case ("view" | "reshape" | "t", codes, *shape) if not kwargs and shape in ([], [-1], [-1, 1], [1, -1]):
            return _line(codes)
        case ("to", source, *wanted) if not kwargs.keys() - {"dtype", "device"}:
            return _cast(source, *wanted, *kwargs.values())
        case ("float", source):
            return _cast(source, torch.float32)
        case ("linear", Node() as x, _Weight(transposed=False) as weight, *bias) if not kwargs.keys() - {"bias"}:
            return ("linear", x, weight, *bias, *kwargs.values(), *(() if bias or kwargs else (None,)))
        case ("matmul", Node() as x, _Weight(transposed=True) as weight):
            return ("linear", x, replace(weight, transposed=False), None)
        case ("matmul", ("dy",), _Weight(transposed=False) as weight):
            return ("dx", weight)
        case ("sum", ("dy",), int() | (int(), *_) as dims) if not kwargs.keys() - {"dtype"}:
            return ("dbias", (dims,) if isinstance(dims, int) else tuple(dims), kwargs.get("dtype"))
        case ("_set_grad_enabled", bool()):
            return ("nothing",)
        case ("size" | "numel", *_):
            return ("number",)
        case ("number", *numbers) if all(map(_is_number, numbers)):
            return ("number",)
    raise _Unread(f"it has a {_name(node)} that a 4-bit linear does not have")


def _gemm(x: Node, given: list[Any]) -> Any:
    codes, shape, absmax, blocksize, quant_type, bias, absmax8, code, offset = given
    if any((absmax8, code, offset)):
        absmax = _Scales(absmax8, absmax, code, offset)
    return ("linear", x, _weight(codes, absmax, blocksize, quant_type, shape, _fake(x).dtype), bias)


def _weight(codes: Any, absmax: Any, blocksize: Any, quant_type: Any, shape: Any, dtype: Any) -> _Weight:
    if not isinstance(shape, (tuple, list)) or not all(type(n) is int for n in (*shape, blocksize)):
        raise _Unread("its shape or its block size is not a constant of the graph")
    match (codes, absmax, *shape):
        case (("codes", Node() as line) | (Node() as line), Node() | _Scales(), n, k):
            return _Weight(line, absmax, blocksize, quant_type, (n, k), dtype)
    raise _Unread("it decodes something else than its operands, or not a matrix")


def _line(source: Any) -> Any:
    """A line of codes made a column, a row or flat again: the same codes in the same order."""
    if isinstance(source, Node):
        sizes = [_static(n) for n in _fake(source).shape]
        if None not in sizes and sum(n != 1 for n in sizes) <= 1 and _fake(source).is_contiguous():
            return ("codes", source)
    if not isinstance(source, tuple) or source[0] != "codes":
        raise _Unread("it reshapes something else than a line of codes")
    return source


def _cast(source: Any, *wanted: Any) -> Any:
    """`to` a dtype and a device: nothing may change but the dtype of the decoded weight."""
    match source:
        case _Weight():
            node, now = source.codes, source.dtype
        case _Scales():
            node, now = source.absmax, torch.float32
        case Node():
            node, now = source, _fake(source).dtype
        case _:
            raise _Unread("it casts something else than its operands and the decoded weight")
    for to in wanted:
        if to == now or (isinstance(to, (torch.device, str)) and torch.device(to) == _fake(node).device):
            continue
        if not isinstance(source, _Weight) or to not in _FLOATS or source.rounded is not None:
            raise _Unread(f"it casts or moves a tensor of {now} to {to}")
        # Decoding computes in float32: rounding that is decoding to the other dtype.
        source = replace(source, dtype=to, rounded=None if now == torch.float32 else now)
    return source


def _read_function(node: Node) -> FourBit:
    forward, backward = (_body(node, arg) for arg in node.args[:2])
    if not forward or not backward:
        raise _Unread("the bodies of its autograd.Function are not graphs")
    options, operands = dict(node.kwargs), list(node.args[2:])
    mask, _ = (options.pop(name, None) for name in ("args_tensor_mask", "saved_for_backward_idx"))
    if changed := [k for k, v in options.items() if v or k not in ("non_differentiable_idx", "dirty_idx")]:
        raise _Unread(f"its autograd.Function is applied with {', '.join(changed)}")

    returned, result, others = _run(forward, operands), node, []
    if len(returned) != 2 or not isinstance(returned[1], (tuple, list)):
        raise _Unread("its forward body does not return an output and what the backward needs")
    output, saved = returned
    match output:
        # torch 2.11 returns the codes as well, as one more output that nothing reads and whose gradient is nothing.
        case (("linear", *_), *others) if all(isinstance(o, tuple) and o[0] == "codes" for o in others):
            users = list(node.users)
            if len(users) != 1 or users[0].target is not operator.getitem or users[0].args[1] != 0:
                raise _Unread("its output is read in another way than once by its index")
            output, result = output[0], users[0]
    four = _four_bit(output, result, differentiable=True)

    gradients = list(_run(backward, [("dy",), *[("nothing",)] * len(others), *saved]))
    # Older torch lists captured tensors after the function's own and returns gradients for these alone.
    expected = len(operands) if mask is None else sum(map(bool, mask))  # type: ignore[arg-type]
    if len(gradients) != expected or expected > len(operands):
        raise _Unread(f"its backward body returns {len(gradients)} gradients for {expected} operands")
    _check_gradients(four, output[2], operands, gradients + [None] * (len(operands) - expected))
    return four


def _run(body: Graph, inputs: list[Any]) -> tuple[Any, ...]:
    """What a body returns. Older torch hands it a context first, which is None by the time the body runs."""
    placeholders = body.find_nodes(op="placeholder")
    if len(placeholders) - len(inputs) not in (0, 1):
        raise _Unread(f"a body of its autograd.Function takes {len(placeholders)} arguments, not {len(inputs)}")
    context = [("nothing",)] * (len(placeholders) - len(inputs))
    value: dict[Node, Any] = dict(zip(placeholders, context + inputs, strict=True))
    for node in body.nodes:
        if node.op == "output" and isinstance(node.args[0], (tuple, list)):
            return tuple(map_arg(node.args[0], value.__getitem__))  # type: ignore[arg-type]
        if node not in value:
            args, kwargs = map_arg(node.args, value.__getitem__), map_arg(node.kwargs, value.__getitem__)
            value[node] = _evaluate(node, args, kwargs)  # type: ignore[arg-type]
    raise _Unread("a body of its autograd.Function returns no tuple")


def _check_gradients(four: FourBit, weight: _Weight, operands: list[Any], gradients: list[Any]) -> None:
    """dx = dy·W and dbias = sum of dy, each once; nothing for the other operands."""
    rank, given = _fake(four.result).dim(), []
    for operand, gradient in zip(operands, gradients, strict=True):
        match gradient:
            case None:
                continue
            case ("dx", other) if operand is four.x:
                # On its way here W may pass through a narrower dtype (bitsandbytes decodes to the dtype the weight had
                # before it was quantized). That rounding is not the forward's: its derivative is dy·W without it.
                if replace(other, rounded=None) != weight:
                    raise _Unread("its backward decodes the weight in another way than its forward")
            case ("dbias", dims, dtype) if operand is four.bias and rank > 1:
                # Leading dimensions, the first among them: autograd sums over those that are left.
                if sorted(d % rank for d in dims) != list(range(len(dims))) or len(dims) >= rank:
                    raise _Unread(f"its backward sums dy over {dims} for the bias")
                if dtype not in (None, weight.dtype):
                    raise _Unread(f"its backward sums dy as {dtype} for the bias")
            case _:
                raise _Unread(f"its backward gives {operand} another gradient than that of a linear")
        given.append(operand)
    if len(set(given)) != len(given) or four.x is four.bias:
        raise _Unread("its backward gives one operand two gradients")
    for operand in (four.x, four.bias):
        if operand is not None and _fake(operand).requires_grad and operand not in given:
            raise _Unread(f"its backward gives {operand} no gradient")


def _read_written_out(node: Node) -> FourBit:
    while True:
        if len(node.users) != 1:
            raise _Unread("the decoded weight is used by something else than one linear")
        node = next(iter(node.users))
        if node.op != "call_method" or node.target not in ("t", "to"):
            return _four_bit(_outer(node, always=True), node, differentiable=True)


def _outer(arg: Any, always: bool = False) -> Any:
    """Value of a node of the outer graph as far as it decodes a weight; everything else is an operand."""
    if not isinstance(arg, Node) or not (always or _decodes(arg)):
        return arg
    return _evaluate(arg, map_arg(arg.args, _outer), map_arg(arg.kwargs, _outer))  # type: ignore[arg-type]


def _decodes(node: Node) -> bool:
    if _is_operator(node):
        return _name(node).startswith("bitsandbytes.dequantize_")
    passes_on = node.target is operator.iadd or (node.op == "call_method" and node.target in ("t", "to", "float"))
    return passes_on and isinstance(node.args[0], Node) and _decodes(node.args[0])


def _four_bit(value: Any, result: Node, differentiable: bool) -> FourBit:
    match value:
        case ("linear", Node() as x, _Weight() as weight, (Node() | None) as bias):
            pass
        case _:
            raise _Unread("its result is not the product of x and the decoded weight")
    match weight.absmax:
        case _Scales(Node() as absmax, Node() as absmax2, Node() as code, Node() as offset):
            nested = (code, absmax2, offset)
        case Node() as absmax:
            nested = ()
        case _:
            raise _Unread("its nested scales are incomplete")
    if weight.rounded is not None:
        raise _Unread(f"its weight is rounded twice, to {weight.rounded} and then to {weight.dtype}")
    form = weight.shape, weight.blocksize, weight.quant_type
    four = FourBit(x, weight.codes, absmax, nested, bias, *form, result, differentiable)
    _check_tensors(four, weight.dtype)
    return four


def _check_tensors(four: FourBit, decoded: torch.dtype) -> None:
    (n, k), x, y = four.shape, _fake(four.x), _fake(four.result)
    if x.dtype not in _FLOATS or not x.dtype == decoded == y.dtype:
        raise _Unread(f"x is {x.dtype}, its weight {decoded} and its result {y.dtype}: one floating dtype is read")
    if x.dim() == 0 or _static(x.shape[-1]) != k:
        raise _Unread(f"x has the shape {tuple(x.shape)} and the weight {four.shape}")
    if four.blocksize not in [2**i for i in range(5, 13)] or four.quant_type not in ("nf4", "fp4"):
        raise _Unread(f"{four.quant_type} in blocks of {four.blocksize} is no format of bitsandbytes")
    codes, blocks = _fake(four.codes), -(-n * k // four.blocksize)
    wanted = [(four.codes, codes.dtype, -(-n * k // (2 * codes.element_size())))]
    wanted += [(four.absmax, torch.uint8 if four.nested else torch.float32, blocks)]
    for node, count in zip(four.nested, (256, -(-blocks // _NESTED_BLOCKSIZE), 1), strict=False):
        wanted += [(node, torch.float32, count)]
    if four.bias is not None:
        wanted += [(four.bias, x.dtype, n)]
    for node, dtype, count in wanted:
        fake = _fake(node)
        sizes = [_static(size) for size in fake.shape]
        if None in sizes or fake.dtype != dtype or fake.numel() != count:
            raise _Unread(f"{node} is {fake.dtype} {tuple(fake.shape)}, where {count} of {dtype} belong")
        if fake.device != x.device or not fake.is_contiguous():
            raise _Unread(f"{node} is not contiguous or not where x is")


def _fake(node: Node) -> FakeTensor:
    fake = node.meta.get("example_value")
    if not isinstance(fake, FakeTensor):
        raise _Unread(f"{node} is not a plain tensor")
    return fake


def _static(n: Any) -> int | None:
    """A size that is the same in every run. Asking a symbolic one for its value would add a guard."""
    return n if isinstance(n, int) else n.node.maybe_as_int()


def _is_number(value: Any) -> bool:
    known = value.meta.get("example_value") if isinstance(value, Node) else value
    return isinstance(known, (int, torch.SymInt, torch.SymBool)) or (isinstance(known, tuple) and known == ("number",))


def _is_function_apply(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "autograd_function_apply"


def _body(node: Node, arg: Any) -> Graph | None:
    if isinstance(arg, Node) and arg.op == "get_attr":
        owner = node.graph.owning_module
        arg = None if owner is None else owner.get_submodule(str(arg.target))
    return arg.graph if isinstance(arg, GraphModule) else None


def _is_operator(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "bitsandbytes"


def _reads_codes(node: Node) -> bool:
    return _is_operator(node) and _name(node).split(".")[1] in ("gemm_4bit", "gemv_4bit", "dequantize_4bit")


def _name(node: Node) -> str:
    target = node.target
    return str(target) if isinstance(target, (str, torch._ops.OpOverload)) else getattr(target, "__name__", str(target))
