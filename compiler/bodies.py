"""Rewrite a graph module and the bodies of its higher-order ops: the layers of a checkpointed model, say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Graph, GraphModule, Node

from ..patterns._fusion import Fusion
from .canonicalize import Mode, is_transform
from .report import Decision
from .rewrite import Caller, Rewriter, rewrite_graph

# Higher-order ops whose bodies are ordinary model code. Other bodies (flex attention's, say) have rules of their own.
_BODIES_LOOKED_INTO = {
    "tag_activation_checkpoint", "invoke_subgraph", "wrap", "wrap_with_set_grad_enabled", "wrap_with_autocast",
    "autograd_function_apply", "checkpoint_wrapped",
}  # fmt: skip


def rewrite_module(
    gm: GraphModule,
    fusions: list[Fusion],
    mode: Mode,
    decisions: list[Decision],
    max_rewrites: int | None = None,
    caller: Caller | None = None,
) -> Rewriter:
    """Rewrite a Dynamo graph module in place, the bodies of its higher-order ops included."""
    rewriter = Rewriter(gm.graph, mode, decisions, max_rewrites)
    rewriter.caller = caller
    if any(is_transform(n) for n in gm.graph.nodes):
        return rewriter  # inside grad or jvp our operators would need rules of their own
    rewrite_graph(rewriter, fusions)
    # After the graph itself: a fusion may recognise an autograd.Function by its bodies, as the user wrote them.
    for name, body_mode in _bodies(rewriter):
        left = None if max_rewrites is None else max(0, max_rewrites - rewriter.rewrites)
        body = getattr(gm, name)
        inner = rewrite_module(body, fusions, body_mode, decisions, left, _caller(rewriter, name, body))
        rewriter.rewrites += inner.rewrites
    gm.graph.lint()
    gm.recompile()
    return rewriter


def _caller(rewriter: Rewriter, name: str, body: GraphModule) -> Caller | None:
    """The op that runs a body, where it is the only one and names its operands in the order of the body's inputs."""
    users = [user for n in rewriter.graph.find_nodes(op="get_attr") if n.target == name for user in n.users]
    inputs = body.graph.find_nodes(op="placeholder")
    if len(users) != 1 or len(inputs) >= len(users[0].args):
        return None
    first, *given = users[0].args[len(users[0].args) - len(inputs) - 1 :]
    if not (isinstance(first, Node) and first.op == "get_attr" and first.target == name):
        return None
    return Caller(rewriter, users[0], {i: n for i, n in zip(inputs, given, strict=True) if isinstance(n, Node)})


def _bodies(rewriter: Rewriter) -> list[tuple[str, Mode]]:
    """Attribute names of the sub-graphs to look into, with the modes they run in."""
    found: dict[str, Mode] = {}
    for node in rewriter.graph.nodes:
        name = getattr(node.target, "_name", None) or getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in _BODIES_LOOKED_INTO:
            continue
        mode = rewriter.canonical.mode[node]
        if name == "autograd_function_apply":
            mode = replace(mode, grad=False)
        for arg in node.args:
            if isinstance(arg, Node) and arg.op == "get_attr" and str(arg.target) not in found:
                found[str(arg.target)] = mode
    return list(found.items())


def backup(gm: GraphModule) -> Callable[[], None]:
    """Copies the graph and those of its bodies; the function returned puts the copies back."""
    saved: list[tuple[GraphModule, Graph]] = []
    for module in gm.modules():
        if isinstance(module, GraphModule):
            copy, remap = Graph(), {}
            result = copy.graph_copy(module.graph, remap)
            copy.output(result).meta = dict(module.graph.output_node().meta)
            for old, new in remap.items():
                if hasattr(old, "_dynamo_source"):  # AOTAutograd looks for it on every placeholder
                    new._dynamo_source = old._dynamo_source
            saved.append((module, copy))

    def restore() -> None:
        for module, graph in saved:
            module.graph = graph

    return restore
