"""One spelling per computation: every node of a Dynamo graph becomes a `Value` in canonical form.

The graph itself is not touched; a node that nothing matches reaches Inductor exactly as Dynamo wrote it. Methods,
functions and operators of one name are one op, dimensions are counted from the end, halves of the last dimension
have names, casts and slices that do nothing vanish, casts that autocast hides are written out, equal computations
share one Value. The rules for each op are in `spelling.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..patterns._fusion import Hole, Value
from . import spelling_activations, spelling_losses, spelling_masks, spelling_norms  # noqa: F401  (add to RULES)
from .spelling import RULES, Aliased, Drawn

# The casts that autocast makes without showing them: these ops run in its low precision.
_AUTOCAST_LOW = {"linear", "matmul", "mm", "bmm", "scaled_dot_product_attention"}
# ... and these in float32, where the result shows it.
_AUTOCAST_FLOAT32 = {
    "pow", "rsqrt", "sqrt", "mean", "rms_norm", "layer_norm", "log_softmax", "nll_loss", "cross_entropy",
}  # fmt: skip

_INPLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.imatmul,
    operator.ifloordiv, operator.imod, operator.ior, operator.iand, operator.ixor, operator.setitem,
}  # fmt: skip
# Where `inplace` stands among the positional arguments.
_INPLACE_ARGUMENT = {
    "silu": 1, "relu": 1, "relu6": 1, "mish": 1, "selu": 1, "hardswish": 1, "hardsigmoid": 1, "elu": 2, "celu": 2,
    "leaky_relu": 2, "threshold": 3, "dropout": 3, "alpha_dropout": 3, "feature_alpha_dropout": 3, "rrelu": 4,
}  # fmt: skip

_OF_VMAP = {
    "lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim",
    "_remove_batch_dim",
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """Grad mode, autocast and how many vmaps a node is under: a rewrite must not move a computation between modes."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...] = ()
    vmaps: int = 0

    @staticmethod
    def ambient() -> Mode:
        """The modes in force where the compiled function is called."""
        autocast = []
        for device in ("cpu", "cuda", "xpu"):
            enabled = torch.is_autocast_enabled(device)
            autocast.append((device, torch.get_autocast_dtype(device) if enabled else None))
        return Mode(torch.is_grad_enabled(), tuple(autocast))

    @property
    def place(self) -> tuple[bool, int]:
        """What a node may not be moved across."""
        return self.grad, self.vmaps

    def low_precision(self, device_type: str) -> torch.dtype | None:
        return dict(self.autocast).get(device_type)


class ValueTable:
    """Hands out Values so that equal computations get the same one.

    `overwritten` are the storages that the graph writes to: what is read from or kept in them depends on when.
    `detached` says that the nodes being read run under no_grad in a graph that has gradients elsewhere.
    """

    def __init__(self, overwritten: Set[int] = frozenset()) -> None:
        self.values: list[Value] = []
        self.overwritten = overwritten
        self.detached = False
        self._seen: dict[Any, Value] = {}

    def make(self, op: str, args: tuple[Any, ...], fake: Any, node: Node | None = None) -> Value:
        read = [storage(n.meta.get("example_value")) for n in node.all_input_nodes] if node is not None else []
        shared = not any(s in self.overwritten for s in (storage(fake), *read))
        # A value computed under no_grad is another value than the same one with a gradient.
        grad = isinstance(fake, torch.Tensor) and fake.requires_grad and not self.detached
        keys = [_key(a) for a in args]
        key = (op, grad, *(sorted(keys, key=repr) if op in ("add", "mul") else keys))
        value = self._seen.get(key) if shared else None
        if value is None:
            value = Value(op, args, fake, detached=self.detached)
            self.values.append(value)
            if shared:
                self._seen[key] = value
        if node is not None:
            value.nodes.append(node)
        return value

    def unique(self, op: str, name: str, fake: Any, node: Node | None = None) -> Value:
        """A value that equals no other: an input, or an op that the rules do not know (dropout, say)."""
        value = Value(op, (name,), fake, [node] if node is not None else [], self.detached)
        self.values.append(value)
        return value

    def canonical(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], fake: Any, node: Node | None = None
    ) -> Value:
        """The Value of a call of the op `name`; unknown ops and unusual arguments give an opaque one."""
        if name.startswith("fused."):  # our own operators: later rules build on what is already fused
            return self.make(name, args, fake, node)
        rule = RULES.get(name)
        result = None
        if rule is not None:
            try:
                result = rule(self, args, kwargs, fake)
            except (TypeError, ValueError, IndexError, KeyError, AttributeError):
                result = None  # an argument form no rule knows: opaque, so nothing is assumed about it
        if isinstance(result, Aliased):
            if self._is_alias(fake, result.value):
                return result.value
            result = None
        if isinstance(result, Drawn):
            self.values.append(Value(result.op, result.args, fake, [node] if node is not None else [], self.detached))
            return self.values[-1]
        if result is None:
            return self.unique("opaque", name, fake, node)
        op, op_args = result
        return self.make(op, op_args, fake, node)

    def _is_alias(self, fake: Any, source: Value) -> bool:
        """May a call that changes nothing stand for its input: same gradient, and no copy that is written to?"""
        # Under no_grad a view says requires_grad=True and yet stops the gradient.
        grad = getattr(fake, "requires_grad", None)
        same_grad = (
            fake is source.fake or (not self.detached and grad == source.requires_grad) or not source.requires_grad
        )
        own = storage(fake)
        return same_grad and (own not in self.overwritten or own == storage(source.fake))


def _key(arg: Any) -> Any:
    if isinstance(arg, (Value, Hole)):
        return ("value", id(arg))
    if isinstance(arg, (tuple, list)):
        return ("list", *(_key(a) for a in arg))
    return (type(arg).__name__, str(arg))


@dataclass
class Canonical:
    """A graph in canonical form. `of_node[node]` is its Value, `mode[node]` the modes it runs in."""

    graph: Graph
    table: ValueTable = field(default_factory=ValueTable)
    of_node: dict[Node, Value] = field(default_factory=dict)
    mode: dict[Node, Mode] = field(default_factory=dict)
    mutated: dict[int, list[Node]] = field(default_factory=dict)

    @property
    def values(self) -> list[Value]:
        return self.table.values

    def users(self, value: Value) -> list[Node]:
        """Nodes that read the value under any of its names; nodes that only rename it are looked through."""
        found: dict[Node, None] = {}
        todo = list(value.nodes)
        while todo:
            for user in todo.pop().users:
                if self.of_node.get(user) is value and user not in value.nodes:
                    todo.append(user)
                elif user not in value.nodes:
                    found[user] = None
        return list(found)


def canonicalize(graph: Graph, mode: Mode) -> Canonical:
    """Read a Dynamo graph whose nodes carry `example_value`. `mode` is what is in force where it starts."""
    mutated = _overwritten(graph)
    canonical = Canonical(graph, ValueTable(mutated.keys()), mutated=mutated)
    switches_grad = any(getattr(n.target, "__name__", "") == "_set_grad_enabled" for n in graph.nodes)
    entered: dict[Node, Mode] = {}
    for node in graph.nodes:
        canonical.mode[node] = mode
        if node.op in ("placeholder", "get_attr"):
            canonical.of_node[node] = _leaf(canonical.table, node)
        elif node.op in ("call_function", "call_method"):
            name = getattr(node.target, "__name__", "")
            if name == "_set_grad_enabled":
                mode = replace(mode, grad=bool(node.args[0]))
            elif name in ("_vmap_increment_nesting", "_vmap_decrement_nesting"):
                mode = replace(mode, vmaps=mode.vmaps + (1 if name == "_vmap_increment_nesting" else -1))
            elif name == "_enter_autocast":
                entered[node] = mode
                mode = _with_autocast(mode, node.args)
            elif name == "_exit_autocast" and isinstance(node.args[0], Node):
                mode = entered.get(node.args[0], mode)
            canonical.table.detached = switches_grad and not mode.grad
            canonical.of_node[node] = _call(canonical, node, mode)
            canonical.table.detached = False
    return canonical


def _with_autocast(mode: Mode, args: tuple[Any, ...]) -> Mode:
    device, dtype, enabled = args[0], args[1], args[2]
    states = dict(mode.autocast)
    states[str(device)] = (dtype or torch.get_autocast_dtype(str(device))) if enabled else None
    return replace(mode, autocast=tuple(sorted(states.items())))


def _leaf(table: ValueTable, node: Node) -> Value:
    fake = node.meta.get("example_value")
    if isinstance(fake, torch.SymInt):
        return table.make("sym", (str(fake.node.expr),), fake, node)
    return table.unique("input", node.name, fake, node)


def _call(canonical: Canonical, node: Node, mode: Mode) -> Value:
    table = canonical.table
    fake = node.meta.get("example_value")
    name = op_name(node)
    if _mutates(node) or mode.vmaps:  # under vmap a tensor has dimensions that its shape does not show
        return table.unique("opaque", str(name or node.target), fake, node)
    if isinstance(fake, torch.SymInt):
        return table.make("sym", (str(fake.node.expr),), fake, node)
    if name is None or fake is None:
        return table.unique("opaque", str(name or node.target), fake, node)
    value_of: Any = canonical.of_node.__getitem__
    args = map_arg(node.args, value_of)
    kwargs = map_arg(node.kwargs, value_of)
    args = tuple(_show_hidden_cast(table, name, a, fake, mode) for a in args)  # type: ignore[union-attr]
    kwargs = {k: _show_hidden_cast(table, name, a, fake, mode) for k, a in kwargs.items()}  # type: ignore[union-attr]
    return table.canonical(name, args, kwargs, fake, node)


def _overwritten(graph: Graph) -> dict[int, list[Node]]:
    """Storages that are written to: {storage: the nodes that do it}, none of them where that is not known."""
    written: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for touched in (node, *_written_arguments(node)) if _mutates(node) else ():
            key = storage(touched.meta.get("example_value"))
            if key is not None and node not in written.setdefault(key, []):
                written[key].append(node)
    for node in graph.nodes:
        fake, key = node.meta.get("example_value"), storage(node.meta.get("example_value"))
        # Dynamo ran the program on the fake tensors: one that was written to has counted how often.
        if key is not None and not fake.is_inference() and fake._version > len(written.get(key, ())):
            written[key] = []
    return written


def _written_arguments(node: Node) -> list[Node]:
    """Which arguments a node that writes to some may write to: by convention the first, else any of them."""
    names_its_own = isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    by_convention = node.op == "call_method" or node.target in _INPLACE_OPERATORS
    if by_convention and not names_its_own and node.kwargs.get("out") is None and isinstance(node.args[0], Node):
        return [node.args[0]]
    return node.all_input_nodes


def _show_hidden_cast(table: ValueTable, name: str, arg: Any, fake: Any, mode: Mode) -> Any:
    """Write out the cast that autocast makes on an argument of this op."""
    if not (isinstance(arg, Value) and isinstance(arg.fake, torch.Tensor) and isinstance(fake, torch.Tensor)):
        return arg
    low = mode.low_precision(arg.fake.device.type)
    if low is None or not arg.fake.is_floating_point() or arg.dtype == torch.float64:
        return arg
    wanted = low if name in _AUTOCAST_LOW else None
    if name in _AUTOCAST_FLOAT32 and fake.dtype == torch.float32:
        wanted = torch.float32
    if wanted is None or arg.dtype == wanted:
        return arg
    # `to` on a fake tensor needs its mode; an empty one of that dtype says as much.
    cast = arg.fake.new_empty(arg.shape, dtype=wanted)
    cast.requires_grad_(arg.requires_grad and mode.grad)
    return table.make("convert", (arg, wanted), cast)


def op_name(node: Node) -> str | None:
    """The op's bare name; None for anything that is not PyTorch's own (`fused.` marks our operators)."""
    if node.op == "call_method":
        return str(node.target).strip("_")
    target = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, name = str(target).partition(".")
        name = name.partition(".")[0]
        return f"fused.{name}" if namespace == "fused_backend" else name if namespace == "aten" else None
    module = getattr(target, "__module__", None) or ""
    if module and module.split(".")[0] not in ("torch", "_operator", "operator", "math"):
        return None
    name = getattr(target, "__name__", "")
    return name.strip("_") or None


def _mutates(node: Node) -> bool:
    """Does the node write to one of its arguments?"""
    if node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None:
        return True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") if not name.endswith("__") else name.startswith("__i") or name == "__setitem__"
    if node.target in _INPLACE_OPERATORS:
        return isinstance(node.meta.get("example_value"), torch.Tensor) or node.target is operator.setitem
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, o)._schema.is_mutable for o in node.target.overloads())
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _body_mutates(node)
    if getattr(node.target, "__module__", "") in ("_operator", "operator"):
        return False  # operator.and_ and its like carry the underscore because of Python's keywords
    name = getattr(node.target, "__name__", "")
    position = _INPLACE_ARGUMENT.get(name)
    if position is not None and len(node.args) > position and node.args[position] is True:
        return True
    return name.endswith("_") and not name.endswith("__")


def _body_mutates(node: Node) -> bool:
    """Does a higher-order op write to its inputs: a Triton kernel, or an op in one of its bodies?"""
    if "mutation" in node.target._name:  # type: ignore[union-attr]
        return True
    root = node.graph.owning_module
    names = [str(a.target) for a in node.all_input_nodes if a.op == "get_attr"]
    for body in (getattr(root, name, None) for name in names):
        if isinstance(body, GraphModule):
            inputs = {storage(n.meta.get("example_value")) for n in body.graph.find_nodes(op="placeholder")}
            if not inputs.isdisjoint(_overwritten(body.graph)):
                return True
    return False


def is_transform(node: Node) -> bool:
    """Does the node belong to a function transform? Those of vmap do not count: what is between them is left alone."""
    of_functorch = str(getattr(node.target, "__module__", "")).startswith("torch._functorch")
    return of_functorch and getattr(node.target, "__name__", "") not in _OF_VMAP


def storage(fake: Any) -> int | None:
    """Identity of a fake tensor's storage: views of one tensor share it."""
    if not isinstance(fake, torch.Tensor):
        return None
    try:
        return fake.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None  # a layout without storage (sparse, nested)
