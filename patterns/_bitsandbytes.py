"""bitsandbytes' 4-bit linear in a Dynamo graph: is a node exactly that, and what are its operands?

y = x·Wᵀ + bias, with W decoded from 4-bit codes, comes in four forms:

    our own gemm_4bit          one operator call, where compiler/tracing.py spared Dynamo the bodies of the next
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
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..kernels._gemm_4bit import gemm_4bit
from ._decoding import (
    FLOATS,
    NESTED_BLOCKSIZE,
    Scales,
    Unread,
    Weight,
    evaluate,
    fake_of,
    is_operator,
    name_of,
    product,
    static,
)


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
        if node.target is gemm_4bit:
            return _four_bit(product(*node.args[:10]), node, differentiable=True)  # type: ignore[arg-type]
        name = name_of(node)
        if name == "bitsandbytes.gemm_4bit.default":
            return _four_bit(_outer(node, always=True), node, differentiable=False)
        if name == "bitsandbytes.dequantize_4bit.default":
            return _read_written_out(node)
        if name == "bitsandbytes.gemv_4bit.default":
            return "gemv_4bit, the product with a single token in inference, is not read"
        return f"{name} is not a form of the 4-bit linear"
    except Unread as reason:
        return str(reason)


def _read_function(node: Node) -> FourBit:
    forward, backward = (_body(node, arg) for arg in node.args[:2])
    if not forward or not backward:
        raise Unread("the bodies of its autograd.Function are not graphs")
    options, operands = dict(node.kwargs), list(node.args[2:])
    mask, _ = (options.pop(name, None) for name in ("args_tensor_mask", "saved_for_backward_idx"))
    if changed := [k for k, v in options.items() if v or k not in ("non_differentiable_idx", "dirty_idx")]:
        raise Unread(f"its autograd.Function is applied with {', '.join(changed)}")

    returned, result, others = _run(forward, operands), node, []
    if len(returned) != 2 or not isinstance(returned[1], (tuple, list)):
        raise Unread("its forward body does not return an output and what the backward needs")
    output, saved = returned
    match output:
        # torch 2.11 returns the codes as well, as one more output that nothing reads and whose gradient is nothing.
        case (("linear", *_), *others) if all(isinstance(o, tuple) and o[0] == "codes" for o in others):
            users = list(node.users)
            if len(users) != 1 or users[0].target is not operator.getitem or users[0].args[1] != 0:
                raise Unread("its output is read in another way than once by its index")
            output, result = output[0], users[0]
    four = _four_bit(output, result, differentiable=True)

    gradients = list(_run(backward, [("dy",), *[("nothing",)] * len(others), *saved]))
    # Older torch lists captured tensors after the function's own and returns gradients for these alone.
    expected = len(operands) if mask is None else sum(map(bool, mask))  # type: ignore[arg-type]
    if len(gradients) != expected or expected > len(operands):
        raise Unread(f"its backward body returns {len(gradients)} gradients for {expected} operands")
    _check_gradients(four, output[2], operands, gradients + [None] * (len(operands) - expected))
    return four


def _run(body: Graph, inputs: list[Any]) -> tuple[Any, ...]:
    """What a body returns. Older torch hands it a context first, which is None by the time the body runs."""
    placeholders = body.find_nodes(op="placeholder")
    if len(placeholders) - len(inputs) not in (0, 1):
        raise Unread(f"a body of its autograd.Function takes {len(placeholders)} arguments, not {len(inputs)}")
    context = [("nothing",)] * (len(placeholders) - len(inputs))
    value: dict[Node, Any] = dict(zip(placeholders, context + inputs, strict=True))
    for node in body.nodes:
        if node.op == "output" and isinstance(node.args[0], (tuple, list)):
            return tuple(map_arg(node.args[0], value.__getitem__))  # type: ignore[arg-type]
        if node not in value:
            args, kwargs = map_arg(node.args, value.__getitem__), map_arg(node.kwargs, value.__getitem__)
            value[node] = evaluate(node, args, kwargs)  # type: ignore[arg-type]
    raise Unread("a body of its autograd.Function returns no tuple")


def _check_gradients(four: FourBit, weight: Weight, operands: list[Any], gradients: list[Any]) -> None:
    """dx = dy·W and dbias = sum of dy, each once; nothing for the other operands."""
    rank, given = fake_of(four.result).dim(), []
    for operand, gradient in zip(operands, gradients, strict=True):
        match gradient:
            case None:
                continue
            case ("dx", other) if operand is four.x:
                # On its way here W may pass through a narrower dtype (bitsandbytes decodes to the dtype the weight had
                # before it was quantized). That rounding is not the forward's: its derivative is dy·W without it.
                if replace(other, rounded=None) != weight:
                    raise Unread("its backward decodes the weight in another way than its forward")
            case ("dbias", dims, dtype) if operand is four.bias and rank > 1:
                # Leading dimensions, the first among them: autograd sums over those that are left.
                if sorted(d % rank for d in dims) != list(range(len(dims))) or len(dims) >= rank:
                    raise Unread(f"its backward sums dy over {dims} for the bias")
                if dtype not in (None, weight.dtype):
                    raise Unread(f"its backward sums dy as {dtype} for the bias")
            case _:
                raise Unread(f"its backward gives {operand} another gradient than that of a linear")
        given.append(operand)
    if len(set(given)) != len(given) or four.x is four.bias:
        raise Unread("its backward gives one operand two gradients")
    for operand in (four.x, four.bias):
        if operand is not None and fake_of(operand).requires_grad and operand not in given:
            raise Unread(f"its backward gives {operand} no gradient")


def _read_written_out(node: Node) -> FourBit:
    while True:
        if len(node.users) != 1:
            raise Unread("the decoded weight is used by something else than one linear")
        node = next(iter(node.users))
        if node.op != "call_method" or node.target not in ("t", "to"):
            return _four_bit(_outer(node, always=True), node, differentiable=True)


def _outer(arg: Any, always: bool = False) -> Any:
    """Value of a node of the outer graph as far as it decodes a weight; everything else is an operand."""
    if not isinstance(arg, Node) or not (always or _decodes(arg)):
        return arg
    return evaluate(arg, map_arg(arg.args, _outer), map_arg(arg.kwargs, _outer))  # type: ignore[arg-type]


def _decodes(node: Node) -> bool:
    if is_operator(node):
        return name_of(node).startswith("bitsandbytes.dequantize_")
    passes_on = node.target is operator.iadd or (node.op == "call_method" and node.target in ("t", "to", "float"))
    return passes_on and isinstance(node.args[0], Node) and _decodes(node.args[0])


def _four_bit(value: Any, result: Node, differentiable: bool) -> FourBit:
    match value:
        case ("linear", Node() as x, Weight() as weight, (Node() | None) as bias):
            pass
        case _:
            raise Unread("its result is not the product of x and the decoded weight")
    match weight.absmax:
        case Scales(Node() as absmax, Node() as absmax2, Node() as code, Node() as offset):
            nested = (code, absmax2, offset)
        case Node() as absmax:
            nested = ()
        case _:
            raise Unread("its nested scales are incomplete")
    if weight.rounded is not None:
        raise Unread(f"its weight is rounded twice, to {weight.rounded} and then to {weight.dtype}")
    form = weight.shape, weight.blocksize, weight.quant_type
    four = FourBit(x, weight.codes, absmax, nested, bias, *form, result, differentiable)
    _check_tensors(four, weight.dtype)
    return four


def _check_tensors(four: FourBit, decoded: torch.dtype) -> None:
    (n, k), x, y = four.shape, fake_of(four.x), fake_of(four.result)
    if x.dtype not in FLOATS or not x.dtype == decoded == y.dtype:
        raise Unread(f"x is {x.dtype}, its weight {decoded} and its result {y.dtype}: one floating dtype is read")
    if x.dim() == 0 or static(x.shape[-1]) != k:
        raise Unread(f"x has the shape {tuple(x.shape)} and the weight {four.shape}")
    if four.blocksize not in [2**i for i in range(5, 13)] or four.quant_type not in ("nf4", "fp4"):
        raise Unread(f"{four.quant_type} in blocks of {four.blocksize} is no format of bitsandbytes")
    codes, blocks = fake_of(four.codes), -(-n * k // four.blocksize)
    wanted = [(four.codes, codes.dtype, -(-n * k // (2 * codes.element_size())))]
    wanted += [(four.absmax, torch.uint8 if four.nested else torch.float32, blocks)]
    for node, count in zip(four.nested, (256, -(-blocks // NESTED_BLOCKSIZE), 1), strict=False):
        wanted += [(node, torch.float32, count)]
    if four.bias is not None:
        wanted += [(four.bias, x.dtype, n)]
    for node, dtype, count in wanted:
        fake = fake_of(node)
        sizes = [static(size) for size in fake.shape]
        if None in sizes or fake.dtype != dtype or fake.numel() != count:
            raise Unread(f"{node} is {fake.dtype} {tuple(fake.shape)}, where {count} of {dtype} belong")
        if fake.device != x.device or not fake.is_contiguous():
            raise Unread(f"{node} is not contiguous or not where x is")


def _is_function_apply(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "autograd_function_apply"


def _body(node: Node, arg: Any) -> Graph | None:
    if isinstance(arg, Node) and arg.op == "get_attr":
        owner = node.graph.owning_module
        arg = None if owner is None else owner.get_submodule(str(arg.target))
    return arg.graph if isinstance(arg, GraphModule) else None


def _reads_codes(node: Node) -> bool:
    if node.target is gemm_4bit:
        return True
    return is_operator(node) and name_of(node).split(".")[1] in ("gemm_4bit", "gemv_4bit", "dequantize_4bit")
