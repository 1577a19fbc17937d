"""Logits that compute themselves when somebody reads them.

Hugging Face models return `(loss, logits)`, so logits may not be dropped; computing them would undo what the fused
loss saves. The compiled graph returns the hidden states instead, and the caller gets a tensor that knows its shape,
dtype and device and runs the rest of the model's own code (lm_head, casts, softcap, slices) on first use. It is
differentiable: a loss on the logits reaches the hidden states and the weight as in eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

from .canonicalize import Mode
from .rewrite import Rewriter

_SHAPE_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_quantized", "is_meta")
_SHAPE_GETTERS = {getattr(torch.Tensor, name).__get__ for name in _SHAPE_PROPERTIES} | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.ndimension,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.element_size, torch.Tensor.__len__,
}  # fmt: skip
_GET_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_CASTS = {
    torch.Tensor.float: torch.float32, torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
}  # fmt: skip


class DeferredTensor(torch.Tensor):
    """A tensor whose values are computed on first use. Casts, slices and detach of it stay deferred.

    Raises: RuntimeError when it is read after a weight it depends on was changed (by an optimizer step, say): its
    values would no longer be those of the forward pass it came from. Writes through `.data`, which autograd does not
    see either, are not noticed.
    """

    _compute: Callable[[], torch.Tensor]
    _depends: list[tuple[torch.Tensor, int]]
    _leaves: list[torch.Tensor]
    _value: torch.Tensor | None
    _computed_version: int
    _needs_grad: bool

    @staticmethod
    def __new__(
        cls,
        compute: Callable[[], torch.Tensor],
        like: torch.Tensor | _OnDevice,
        depends: list[tuple[torch.Tensor, int]],
        leaves: list[torch.Tensor],
        grad: bool,
    ) -> DeferredTensor:
        def make() -> Any:
            return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
            )

        self = _Attached.apply(make, compute, *leaves) if grad else make()
        self._compute, self._depends, self._leaves, self._value, self._needs_grad = compute, depends, leaves, None, grad
        return self

    def materialize(self) -> torch.Tensor:
        """The ordinary tensor, with the gradient it would have had, whatever mode it is first read in."""
        if self._value is not None:
            return self._value
        for tensor, version in self._depends:
            if _version(tensor) != version:
                raise RuntimeError(
                    "backend 'fused': these logits are computed when first read, and a weight they depend on has "
                    "changed since the forward pass. Read them (for example logits = logits.clone()) before "
                    "optimizer.step(), or compile with options={'fusions': '-linear_cross_entropy'}"
                )
        # The hooks: a checkpointed reader must not count what the head saves among its own.
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with torch.inference_mode(False), torch.set_grad_enabled(self._needs_grad), keep:
            self._value = self._compute()
        self._computed_version = _version(self._value)
        return self._value

    def original(self) -> torch.Tensor:
        """The values as computed, also after somebody wrote to the tensor."""
        value = self.materialize()
        return value if _version(value) == self._computed_version else self._compute()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.materialize())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.materialize().detach().clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _intercept(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


@torch._dynamo.disable(reason="a deferred tensor is read between graphs, not inside one")
def _intercept(func: Any, args: Any, kwargs: Any) -> Any:
    """Shapes are known, casts and slices stay deferred, anything else reads the values."""
    if func in _SHAPE_GETTERS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    me = args[0] if args and isinstance(args[0], DeferredTensor) else None
    if me is not None and me._value is None:
        if func == _GET_REQUIRES_GRAD.__get__:  # `is` fails: every access makes a new object
            return me._needs_grad
        derived = _derive(me, func, args, kwargs)
        if derived is not None:
            return derived
    args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (tuple(args), kwargs))
    return func(*args, **kwargs)


class _Attached(torch.autograd.Function):
    """Gives a deferred tensor its gradient where no Python call asks for its values: functorch, a custom Function."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Any], compute: Any, *leaves: torch.Tensor) -> Any:
        ctx.compute, ctx.leaves = compute, leaves
        return make()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:  # type: ignore[override]
        wanted = [leaf for leaf, needs in zip(ctx.leaves, ctx.needs_input_grad[2:], strict=True) if needs]
        with torch.enable_grad():
            value = ctx.compute()
        found = iter(torch.autograd.grad(value, wanted, dy, retain_graph=True, allow_unused=True))
        return None, None, *(next(found) if needs else None for needs in ctx.needs_input_grad[2:])


def _derive(me: DeferredTensor, func: Any, args: Any, kwargs: Any) -> DeferredTensor | None:
    """The deferred result of a cast, a basic slice or detach; None for anything else."""
    is_cast = func in _CASTS or (
        func is torch.Tensor.to and all(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values()))
    )
    is_slice = func is torch.Tensor.__getitem__ and all(
        isinstance(i, (slice, int, type(None), type(Ellipsis))) and not isinstance(i, bool)
        for i in (args[1] if isinstance(args[1], tuple) else (args[1],))
    )
    if not (is_cast or is_slice or func is torch.Tensor.detach):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        like = func(torch.empty_strided(me.shape, me.stride(), dtype=me.dtype, device="meta"), *args[1:], **kwargs)
        like = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    if is_cast and like.dtype == me.dtype and not kwargs.get("copy"):
        return me
    grad = me._needs_grad and func is not torch.Tensor.detach and torch.is_grad_enabled()
    # A slice sees what is written to its source later; a cast is a copy of the values as they were.
    source = me.original if is_cast else me.materialize
    return DeferredTensor(
        lambda: func(source(), *args[1:], **kwargs),
        _OnDevice(like, me.device),
        [],
        me._leaves,
        grad and (like.is_floating_point() or like.is_complex()),
    )


class _OnDevice:
    """Shape, strides and dtype of a meta tensor with the device it stands for."""

    def __init__(self, like: torch.Tensor, device: torch.device):
        self.shape, self.dtype, self.device, self.stride = like.shape, like.dtype, device, like.stride


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# --- the compiled graph's side -------------------------------------------------------------------------------------


def defer_outputs(gm: GraphModule, rewriter: Rewriter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let the graph return the leaves of its deferred outputs; the function returned restores the signature."""
    if not rewriter.deferred:
        return lambda compiled: compiled
    output = gm.graph.output_node()
    outs = list(output.args[0])  # type: ignore[arg-type]
    wanted = {node: (leaves, modes) for node, leaves, modes in rewriter.deferred}
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    tails: list[tuple[int, _Tail]] = []
    extra: list[Node] = []
    for slot, node in enumerate(outs):
        if not isinstance(node, Node) or node not in wanted:
            continue
        leaves, modes = wanted[node]
        tail = _Tail(gm, node, leaves, modes)
        for leaf in tail.leaves:
            if leaf in inputs:
                tail.sources.append((True, inputs[leaf]))
                continue
            if leaf not in extra:
                extra.append(leaf)
            tail.sources.append((False, len(outs) + extra.index(leaf)))
        tails.append((slot, tail))
    # A slot must hold something; the first leaf stands in and is thrown away.
    for slot, tail in tails:
        outs[slot] = tail.leaves[0]
    output.args = ((*outs, *extra),)
    count = len(outs)
    rewriter.refresh()
    gm.graph.lint()
    gm.recompile()

    def finish(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = list(compiled(*args))
            outputs = results[:count]
            for slot, tail in tails:
                outputs[slot] = tail([args[i] if is_input else results[i] for is_input, i in tail.sources])
            return tuple(outputs)

        return run

    return finish


class _UnderTheirModes(torch.fx.Interpreter):
    """Runs every node under the autocast state it had in the model: the head's may differ from a later cast's."""

    def __init__(self, program: GraphModule, modes: dict[str, Mode]):
        super().__init__(program)
        self.modes = modes

    def run_node(self, n: Node) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in self.modes[n.name].autocast if n.name in self.modes else ():
                if dtype is not None or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
            return super().run_node(n)


class _Tail:
    """The part of the model from the leaves (hidden states, weight) to a deferred output, as a program of its own."""

    def __init__(self, gm: GraphModule, output: Node, leaves: Sequence[Node], modes: dict[Node, Mode]):
        self.modes: dict[str, Mode] = {}
        self.like = output.meta["example_value"]
        self.grad = bool(self.like.requires_grad)
        self.leaves: list[Node] = []
        self.sources: list[tuple[bool, int]] = []
        graph, copied = Graph(), {}

        def copy(node: Node) -> Node:
            if node not in copied:
                if node in leaves or node.op in ("placeholder", "get_attr"):
                    self.leaves.append(node)
                    copied[node] = graph.placeholder(f"leaf_{len(self.leaves)}")
                else:
                    for source in node.all_input_nodes:
                        copy(source)
                    copied[node] = graph.node_copy(node, lambda n: copied[n])
                    self.modes[copied[node].name] = modes[node]
            return copied[node]

        # Placeholders must come first in the new graph, so walk it once to find them.
        graph.output(copy(output))
        for node in [n for n in graph.nodes if n.op == "placeholder"][::-1]:
            next(iter(graph.nodes)).prepend(node)
        self.program = GraphModule(gm, graph)

    def __call__(self, leaves: list[Any]) -> DeferredTensor:
        def compute() -> torch.Tensor:
            return _UnderTheirModes(self.program, self.modes).run(*leaves)

        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        like = self.like
        if any(isinstance(n, torch.SymInt) for n in like.shape):
            with torch.no_grad():
                meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in leaves]
                sizes = self.program(*meta)  # the dtype is the graph's: autocast does nothing here
                like = _OnDevice(sizes.to(self.like.dtype), tensors[0].device)
        return DeferredTensor(
            compute,
            like,
            [(t, _version(t)) for t in tensors],
            tensors,
            self.grad and any(t.requires_grad for t in tensors),
        )
