"""Predicted seconds of one node of a joint graph: what the checkpoint planner weighs against bytes.

A node takes as long as the slower of its arithmetic and its memory traffic, and a launch. Both rates are measured
once on each device. Pointwise nodes are costed as Inductor runs them, fused with their neighbours: they pay only for
what the fused kernel reads and writes.

Source: S. Williams, A. Waterman, D. Patterson, Roofline: an insightful visual performance model, 2009.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..kernels._measured import cache_path, device_name, median_ms, read, write
from ..kernels._op import BYTES_MOVED, WORKSPACE
from .sizes import largest

log = logging.getLogger("fused_backend")
aten = torch.ops.aten


@dataclass(frozen=True)
class Ceilings:
    """The rates that a device reaches at best.

    copy_bandwidth  bytes per second of a copy on the device, read and written together
    matmul_flops    floating-point operations per second of a large matrix product, by dtype
    host_bandwidth  bytes per second to pinned host memory and back; None where there is nowhere to offload to
    launch_seconds  what a kernel costs at least
    """

    copy_bandwidth: float
    matmul_flops: Mapping[torch.dtype, float] = field(hash=False)
    host_bandwidth: float | None
    launch_seconds: float

    def peak(self, dtype: torch.dtype) -> float:
        """Operations per second of a product in `dtype`; of an unmeasured dtype, those of the measured one nearest."""
        return self.matmul_flops.get(dtype) or self.matmul_flops[_FAST if dtype.itemsize <= 2 else torch.float32]


_FAST = torch.bfloat16
_LAUNCH_SECONDS = 3e-6
_COPIED = 2**28  # bytes
_SIDES = {torch.bfloat16: 8192, torch.float16: 8192, torch.float32: 4096, torch.float64: 2048}

# One H200, so that plans can be made and tested on any machine.
NOMINAL = Ceilings(
    copy_bandwidth=4.2e12,
    matmul_flops={torch.bfloat16: 7.0e14, torch.float16: 7.0e14, torch.float32: 5.0e13, torch.float64: 5.0e13},
    host_bandwidth=5.4e10,
    launch_seconds=_LAUNCH_SECONDS,
)


# --- the device ----------------------------------------------------------------------------------------------------


def ceilings(device: torch.device) -> Ceilings:
    """The rates of `device`: on CUDA measured once and kept on disk, elsewhere `NOMINAL`."""
    if device.type != "cuda":
        return replace(NOMINAL, host_bandwidth=None) if device.type == "cpu" else NOMINAL
    # A float32 product may use TF32 in one process and not in another.
    key = f"{device_name(device)} {torch.backends.cuda.matmul.fp32_precision}"
    if key not in _MEASURED:
        _MEASURED.update(_stored())
    if key not in _MEASURED:
        if torch.cuda.is_current_stream_capturing():
            return NOMINAL  # nothing can be timed while a graph is captured
        try:
            _MEASURED[key] = _measure(device)
        except RuntimeError as error:  # out of memory above all: a plan on nominal rates is better than none
            log.warning("the rates of %s could not be measured (%s); an H200's are assumed", device, error)
            return NOMINAL
        if _MEASURED[key].host_bandwidth is not None:  # else another process may find host memory to pin
            write(_path(), {key: plain(_MEASURED[key])})
    return _MEASURED[key]


_MEASURED: dict[str, Ceilings] = {}


def _measure(device: torch.device) -> Ceilings:
    with unset_fake_temporarily(), torch.no_grad(), torch._C._DisableAutocast(), torch.cuda.device(device):
        with torch.random.fork_rng([torch.cuda.current_device()], device_type="cuda"):
            flops = {dtype: _matmul_flops(device, dtype, n) for dtype, n in _SIDES.items()}
            copy, host = _copy_bandwidths(device)
        torch.cuda.empty_cache()  # the model needs it more
    return Ceilings(copy, flops, host, _LAUNCH_SECONDS)


def _matmul_flops(device: torch.device, dtype: torch.dtype, n: int) -> float:
    # Random numbers: a product of zeros draws less power and runs faster than any real one.
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return _rate(2 * n**3, median_ms(functools.partial(torch.mm, a, b, out=torch.empty_like(a))))


def _copy_bandwidths(device: torch.device) -> tuple[float, float | None]:
    """On the device; to pinned host memory and back."""
    source = torch.randn(_COPIED // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    on_device = _rate(2 * _COPIED, median_ms(functools.partial(target.copy_, source)))
    try:
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return on_device, None
    there = median_ms(functools.partial(host.copy_, source, non_blocking=True))
    back = median_ms(functools.partial(target.copy_, host, non_blocking=True))
    return on_device, _rate(2 * _COPIED, there + back)


def _rate(amount: float, milliseconds: float) -> float:
    """To two digits, so that the noise of a timing seldom changes a plan or the key it is cached under."""
    return float(f"{amount / milliseconds * 1e3:.2g}")


def _path() -> pathlib.Path:
    """Renewed when this file changes."""
    return cache_path("ceilings", __file__)


def _stored() -> dict[str, Ceilings]:
    """What is on disk, if it can be read."""
    try:
        return {key: from_plain(rates) for key, rates in read(_path()).items()}
    except (TypeError, KeyError, AttributeError):
        return {}


def plain(rates: Ceilings) -> dict[str, Any]:
    """As JSON can hold it."""
    return asdict(rates) | {"matmul_flops": {str(d).removeprefix("torch."): f for d, f in rates.matmul_flops.items()}}


def from_plain(rates: dict[str, Any]) -> Ceilings:
    flops = {getattr(torch, d): f for d, f in rates["matmul_flops"].items()}
    return Ceilings(**{**rates, "matmul_flops": flops})


# --- one node ------------------------------------------------------------------------------------------------------


def seconds(node: Node, ceilings: Ceilings) -> float:
    """Predicted time of one node; views, `getitem`, inputs and all that computes no tensor take none.

    Cost: max(FLOPs / peak of the product's dtype, bytes / copy bandwidth) + launch. A pointwise node that Inductor
    fuses moves only what its neighbours do not hand it in registers, and is launched only where its result is written.
    A node that runs other graphs takes the sum of their nodes.
    """
    bodies = list(_bodies(node))
    if bodies and node.target not in flop_registry:
        return sum(seconds(inner, ceilings) for body in bodies for inner in body.graph.nodes)
    if node.op != "call_function" or is_view(node) or node.target in _ALLOCATIONS or not _tensors(node):
        return 0.0
    if is_fusible(node):
        reads, writes = _fused_bytes(node)
        launch = ceilings.launch_seconds if writes else 0.0
        return (reads + writes) / ceilings.copy_bandwidth + launch
    flops = _flops(node)
    arithmetic = flops / ceilings.peak(_product_dtype(node)) if flops else 0.0
    return max(arithmetic, _bytes_moved(node) / ceilings.copy_bandwidth) + ceilings.launch_seconds


def move_seconds(target: Any, args: tuple[Any, ...], ceilings: Ceilings) -> float:
    """Predicted time of an operator of this package that only moves bytes, called with these nodes."""
    given = map_arg(args, lambda n: _hinted(n.meta.get("val")))
    return BYTES_MOVED[target](*given) / ceilings.copy_bandwidth + ceilings.launch_seconds


def workspace(call: Node) -> int:
    """Bytes that an operator of this package allocates and frees again while it runs."""
    by: Any = WORKSPACE.get(call.target)  # pyright: ignore[reportArgumentType]
    if by is None:
        return 0
    args, kwargs = arguments(call)
    return by(*args, **kwargs)


def nbytes_of(value: Any) -> int:
    """Bytes that a fake tensor addresses, symbolic sizes at their largest; 0 for what is no tensor.

    A dimension along which nothing is stored (stride 0, as `expand` makes) counts once.
    """
    if not isinstance(value, Tensor):
        return 0
    if value.layout is not torch.strided:
        return largest(value.numel()) * value.element_size()
    sizes = [largest(size) for size in value.shape]
    stored = (n for n, stride in zip(sizes, value.stride(), strict=True) if n == 0 or largest(stride) != 0)
    return math.prod(stored) * value.element_size()


def is_view(node: Node) -> bool:
    """Does a node only rename (part of) its first input?"""
    target = node.target
    if target is operator.getitem or target is aten._unsafe_view.default:
        return True
    return isinstance(target, torch._ops.OpOverload) and _only_aliases(target)


@functools.cache
def _only_aliases(target: torch._ops.OpOverload) -> bool:
    aliases = [a.alias_info for a in target._schema.arguments if a.alias_info is not None]
    return bool(aliases) and not any(a.is_write for a in aliases)


# Pointwise to Inductor, but not tagged so in torch.
_ALSO_POINTWISE = {
    aten._to_copy, aten.arange, aten.cat, aten.constant_pad_nd, aten.fill, aten.full, aten.full_like,
    aten.hardtanh_backward, aten.leaky_relu_backward, aten.lift_fresh_copy, aten.masked_fill, aten.ones, aten.ones_like,
    aten.scalar_tensor, aten.select_backward, aten.select_scatter, aten.slice_backward, aten.slice_scatter,
    aten.softplus_backward, aten.tril, aten.triu, aten.where, aten.zeros, aten.zeros_like,
    torch.ops.prims.convert_element_type, torch.ops.prims.iota,
}  # fmt: skip
_ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
# Of their first tensor they read as much as they return.
_GATHERS = {aten.embedding, aten.gather, aten.index, aten.index_select}


def is_fusible(node: Node) -> bool:
    """Does Inductor put a node into the kernel of its neighbours, element by element?"""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in _ALSO_POINTWISE


def _fused_bytes(node: Node) -> tuple[int, int]:
    """Bytes that the fused kernel reads and writes on behalf of a pointwise node."""
    reads = 0
    for given in node.all_input_nodes:
        source = _source(given)
        if not is_fusible(source) or len(_readers(source)) > 1:
            reads += _tensor_bytes(given)
    written = any(not is_fusible(reader) for reader in _readers(node))
    return reads, _tensor_bytes(node) if written else 0


def _source(node: Node) -> Node:
    """What a node is a view of."""
    while is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _readers(node: Node) -> set[Node]:
    """Nodes that read a node's values, itself or through views."""
    found, through = set(), [node]
    while through:
        for user in through.pop().users:
            (through.append if is_view(user) else found.add)(user)
    return found


def _bytes_moved(node: Node) -> int:
    formula = BYTES_MOVED.get(node.target)  # type: ignore[arg-type]
    if formula is not None:
        args, kwargs = arguments(node)
        return formula(*args, **kwargs)
    inputs, result = node.all_input_nodes, _tensor_bytes(node)
    if getattr(node.target, "overloadpacket", None) in _GATHERS:
        table, *rest = inputs
        return min(_tensor_bytes(table), result) + sum(map(_tensor_bytes, rest)) + result
    return sum(map(_tensor_bytes, inputs)) + result


def _flops(node: Node) -> int:
    """Floating-point operations by the formula registered for the operator; 0 where there is none or it refuses."""
    packet = getattr(node.target, "overloadpacket", node.target)
    formula = _ATTENTION.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = arguments(node)
    try:
        return formula(*args, **kwargs, out_val=_hinted(node.meta["val"]))
    except Exception as error:  # somebody else's formula, which may refuse in any way
        log.debug("no FLOPs for %s: %s", node.target, error)
        return 0


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, products: tuple[int, int] = (1, 1), **__: Any) -> int:
    """Of so many products as large as q·k and as large as p·v."""
    along_q, along_v = products
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (along_q * q.shape[-1] + along_v * v.shape[-1])


def _attention_backward_flops(dy: Tensor, *given: Any, **named: Any) -> int:
    return _attention_flops(*given, products=(3, 2), **named)  # scores again, dq, dk; dp, dv


# Here and not by torch's formulas: those know neither the CPU's variant nor, in some releases, grouped heads. As there,
# a causal mask is not subtracted; the half it saves is about what attention loses against a plain product.
_ATTENTION = {
    getattr(aten, name + suffix): formula
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for suffix, formula in (("", _attention_flops), ("_backward", _attention_backward_flops))
    if hasattr(aten, (name := f"_scaled_dot_product_{kind}") + suffix)
}


def _product_dtype(node: Node) -> torch.dtype:
    """The dtype that a node multiplies in: our operators name it, others take it from their first floating input."""
    args, kwargs = arguments(node)
    schema = getattr(node.target, "_schema", None)
    for argument, value in zip(schema.arguments if schema else (), args, strict=False):
        if argument.name == "base_dtype":
            return value
    tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point())
    return next((t.dtype for t in tensors), torch.float32)


# --- values --------------------------------------------------------------------------------------------------------


def arguments(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with tensors for nodes, all sizes numbers."""
    return map_arg((node.args, node.kwargs), lambda n: _hinted(n.meta.get("val")))


def _hinted(value: Any) -> Any:
    """Numbers for symbolic sizes. A formula that compared symbols would add guards to the user's graph."""
    if isinstance(value, torch.SymInt):
        return largest(value)
    if isinstance(value, (tuple, list)):
        return [_hinted(v) for v in value]
    if not isinstance(value, Tensor) or all(isinstance(size, int) for size in value.shape):
        return value
    with unset_fake_temporarily():
        return torch.empty([largest(size) for size in value.shape], dtype=value.dtype, device="meta")


def _tensors(node: Node) -> list[Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def _tensor_bytes(node: Node) -> int:
    return sum(map(nbytes_of, _tensors(node)))


def _bodies(node: Node) -> Iterator[GraphModule]:
    """Graphs that a node runs: the modules that it is given, or that it calls."""
    given = [n for n in node.all_input_nodes if n.op == "get_attr"] if node.op == "call_function" else []
    for named in [node] if node.op == "call_module" else given:
        if named.graph.owning_module is not None:
            found = operator.attrgetter(str(named.target))(named.graph.owning_module)
            if isinstance(found, GraphModule):
                yield found
