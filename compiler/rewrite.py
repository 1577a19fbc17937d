"""Find the sites of every fusion in a graph and put our operators there, or say why not.

Replacing a value by an equal one is always right, so a rewrite needs no permission from the value's other users: they
keep reading the same numbers. What can go wrong is the gradient (part of a match computed without one) and memory
(part of a match overwritten in place); both are checked for every match here, the rest by the fusion itself.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_leaves

from ..patterns._fusion import Emitter, Fusion, Match, Value
from .canonicalize import Canonical, Mode, canonicalize, storage
from .layout import a_view_would_fail, same_strides
from .match import Near, unify
from .report import Decision, source_of, where_of

_MAX_STEPS_TO_RESULT = 8
_ORIGIN = ("nn_module_stack", "stack_trace", "custom")  # where in the user's program a node comes from


@dataclass(frozen=True)
class Caller:
    """The one op that runs a body: where it is, and what it gives for the body's inputs."""

    rewriter: Rewriter
    node: Node
    given: dict[Node, Node]


class Rewriter:
    """One graph being rewritten; what patterns know as `View`."""

    def __init__(self, graph: Graph, mode: Mode, decisions: list[Decision], max_rewrites: int | None = None):
        self.graph = graph
        self.mode = mode
        self.decisions = decisions
        self.max_rewrites = max_rewrites
        self.deferred: list[tuple[Node, list[Node], dict[Node, Mode]]] = []
        self.rewrites = 0
        self.caller: Caller | None = None
        self.brought: dict[Any, list[Node]] = {}  # what bodies have had computed here
        self.written = False  # since the graph was read
        self._pure: set[Node] = set()
        self._canonical: Canonical | None = None

    # --- reading

    @property
    def canonical(self) -> Canonical:
        if self._canonical is None:
            self._canonical, self.written = canonicalize(self.graph, self.mode), False
        return self._canonical

    @property
    def values(self) -> list[Value]:
        return self.canonical.values

    def of(self, node: Node) -> Value:
        return self.canonical.of_node[node]

    def users(self, value: Value) -> list[Node]:
        return self.canonical.users(value)

    def outside(self, value: Value) -> tuple[Rewriter, Value] | None:
        if self.caller is None or value.op != "input" or not value.nodes:
            return None
        given = self.caller.given.get(value.nodes[0])
        return None if given is None else (self.caller.rewriter, self.caller.rewriter.of(given))

    # --- deciding

    def fused(self, fusion: str, site: Value, saved_bytes: int = 0, idiom: str = "") -> None:
        self._decide(fusion, site, "fused", idiom, saved_bytes)

    def refused(self, fusion: str, site: Value, reason: str) -> None:
        self._decide(fusion, site, "refused", reason, 0)

    def absorbed(self, fusion: str, site: Value) -> None:
        where = where_of(site.nodes[0])
        for i in reversed(range(len(self.decisions))):
            decision = self.decisions[i]
            if (decision.fusion, decision.where, decision.status) == (fusion, where, "fused"):
                del self.decisions[i]
                return

    def _decide(self, fusion: str, site: Value, status: str, reason: str, saved_bytes: int) -> None:
        node = self._node_at(site)
        self.decisions.append(Decision(fusion, where_of(node), source_of(node), status, reason, saved_bytes))

    def _node_at(self, site: Value) -> Node:
        """The site's node; for a value that only the canonical form has (x / sqrt(v) as x * rsqrt(v)), its user's."""
        while not site.nodes:
            site = next(v for v in self.values if any(i is site for i in v.inputs()))
        return site.nodes[0]

    # --- checking

    def unsafe(self, root: Value, interior: Iterable[Value]) -> str | None:
        """Why replacing `root` by one operator would change a gradient or read overwritten memory."""
        touched: list[tuple[Node, Any]] = []
        for value in interior:
            if root.requires_grad and value.cut:
                return f"{value.op} is computed without gradients"
            inputs = value.inputs()
            while hidden := [v for v in inputs if not v.nodes and v.inputs()]:  # what autocast makes of something
                inputs = [v for v in inputs if v not in hidden] + [i for v in hidden for i in v.inputs()]
            touched += [(node, v.fake) for node in value.nodes for v in (value, *inputs)]
        if self.written_since(touched, [root]):
            return "an input or part of it is modified in place, and not before all of it is computed"
        return None

    def written_since(self, touched: Iterable[tuple[Node, Any]], roots: Iterable[Value] = ()) -> bool:
        """Is a tensor, or a view of it, written to after the first node that touches it?

        What is written to before is as good as any other. After, an operator may have kept it for its backward.
        """
        own = {storage(root.fake) for root in roots if self.may_be_written(root)}
        for node, fake in touched:
            writers = self.canonical.mutated.get(storage(fake) or 0)
            if writers is not None and storage(fake) not in own and (not writers or any(node <= w for w in writers)):
                return True
        return False

    def may_be_written(self, root: Value) -> bool:
        """Is it a loss, made anew, that the model then adds to in place? No backward of ours reads such a result."""
        key = storage(root.fake)
        same = (n for n in self.graph.nodes if storage(n.meta.get("example_value")) == key)
        return root.shape == () and bool(self.canonical.mutated.get(key or 0)) and next(same) in root.nodes

    # --- writing

    def replace(self, fusion: str, roots: list[Value], emit: Callable[[Emitter], list[Node]]) -> str | None:
        if self.max_rewrites is not None and self.rewrites >= self.max_rewrites:
            return f"option max_rewrites={self.max_rewrites} is used up"
        writer = _Writer(self, max(root.nodes[0] for root in roots), roots)
        try:
            results = emit(writer)
            reason = writer.misfit(results) or writer.settle(results)
        except ValueError as error:  # an operator's own check
            reason = str(error)
        if reason is not None:
            writer.undo()
            return reason
        for root, result in zip(roots, results, strict=True):
            if result in writer.emitted:  # reported where its own root was, not where the last of them was
                result.meta |= {k: v for k, v in root.nodes[0].meta.items() if k in _ORIGIN}
            for node in root.nodes:
                node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in writer.emitted)
            # From here on the value is what the operator returns.
            root.nodes[:] = [result]
            self.canonical.of_node[result] = root
        self.rewrites += 1
        self.written = True
        return None

    def defer(self, output: Value, leaves: list[Value]) -> None:
        # Under any of their names: the path from the output may meet a copy or an equal computation first.
        nodes = [node for node, value in self.canonical.of_node.items() if any(value is leaf for leaf in leaves)]
        for node in self.graph.output_node().all_input_nodes:
            if self.canonical.of_node.get(node) is output:
                self.deferred.append((node, nodes, self.canonical.mode))

    @property
    def around(self) -> Rewriter | None:
        takes_any_number = self.caller and getattr(self.caller.node.target, "_name", "") == "tag_activation_checkpoint"
        return self.caller.rewriter if self.caller and takes_any_number else None

    def bring_in(self, key: Any, emit: Callable[[Emitter], list[Node]]) -> list[Node]:
        assert self.caller is not None
        outer, op = self.caller.rewriter, self.caller.node
        if key not in outer.brought:
            outer.brought[key] = emit(_Writer(outer, op))
        inputs = []
        for node in outer.brought[key]:
            last = self.graph.find_nodes(op="placeholder")[-1]
            self.written = True
            with self.graph.inserting_after(last):
                inputs.append(self.graph.placeholder(node.name))
            inputs[-1].meta["example_value"] = node.meta["example_value"]
            self.canonical.mode[inputs[-1]] = self.mode
            op.args = (*op.args, node)
        return inputs

    def pure(self, node: Node) -> None:
        self._pure.add(node)

    def refresh(self) -> None:
        """Erase what nothing reads any more and read the graph anew.

        Only computations the canonical rules or a fusion know go: they have no effect but their value. Anything else
        that nothing reads (a mode switch, logging, an in-place update) stays where the user's program put it.
        """
        for node in reversed(self.graph.nodes):
            value = self.canonical.of_node.get(node)
            known = node in self._pure or (value is not None and value.op != "opaque")
            removable = node.op == "get_attr" or (node.op in ("call_function", "call_method") and known)
            if removable and not node.users:
                self.graph.erase_node(node)
                self.written = True
        if self.written:
            self._canonical = None


class _Writer:
    """Writes the nodes of one rewrite, then moves them to where their inputs are ready and their users are not yet."""

    def __init__(self, rewriter: Rewriter, at: Node, roots: Sequence[Value] = ()):
        self.rewriter = rewriter
        self.roots = roots
        self.emitted: dict[Node, None] = {}
        self.at = at

    def node(self, value: Value) -> Node:
        if value.nodes:
            return value.nodes[0]
        if value.op != "convert":
            raise ValueError(f"{value} is not in the graph by itself")
        source, dtype = value.args  # a cast that autocast hides
        return self.call("to", source, dtype)

    def item(self, node: Node, index: int) -> Node:
        return self.call(operator.getitem, node, index)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        graph = self.rewriter.graph
        to_node = lambda a: self.node(a) if isinstance(a, Value) else a  # noqa: E731
        args, kwargs = map_aggregate((args, kwargs), to_node)  # type: ignore[misc,assignment]
        kind, self.rewriter.written = "call_method" if isinstance(target, str) else "call_function", True
        with graph.inserting_before(self.at):
            node = graph.create_node(kind, target, args, kwargs)
        self.emitted[node] = None  # before its shapes are asked for: an operator may refuse its arguments
        node.meta = {k: v for k, v in self.at.meta.items() if k in _ORIGIN}
        node.meta["example_value"] = self._fake(target, args, kwargs)
        self.rewriter.canonical.mode[node] = self.rewriter.canonical.mode[self.at]
        return node

    def _fake(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Shapes and dtypes of the new node, from those of its arguments."""
        fakes = map_arg((args, kwargs), lambda n: n.meta["example_value"])
        # Dynamo's own mode: by now the ambient one is another, made for the backend.
        mode = next(f.fake_mode for f in tree_leaves(fakes) if isinstance(f, FakeTensor))
        grad = self.rewriter.canonical.mode[self.at].grad
        with mode, torch.set_grad_enabled(grad), torch._C._DisableAutocast():
            fake_args, fake_kwargs = fakes  # type: ignore[misc]
            if isinstance(target, str):
                return getattr(fake_args[0], target)(*fake_args[1:], **fake_kwargs)
            return target(*fake_args, **fake_kwargs)

    def misfit(self, results: list[Node]) -> str | None:
        """The last line of defence: the operator's result must look like what it replaces and read what it read."""
        rewriter, mutated = self.rewriter, self.rewriter.canonical.mutated
        if any(storage(root.fake) in mutated and not rewriter.may_be_written(root) for root in self.roots):
            return "the result is modified in place"
        if mutated and rewriter.written_since(self._touched(), self.roots):
            return "an input is modified in place, and not before all of it is read"
        for root, result in zip(self.roots, results, strict=True):
            fake = result.meta["example_value"]
            sizes = zip(fake.shape, root.shape, strict=False)
            same = len(fake.shape) == len(root.shape) and all(statically_known_true(a == b) for a, b in sizes)
            if not same or fake.dtype != root.dtype or fake.device != root.fake.device:
                return f"the operator gives {fake.dtype} {tuple(fake.shape)}, the model has {root.dtype} {root.shape}"
            if fake.requires_grad != root.requires_grad:
                return "the operator's result would differ in whether it has a gradient"
        pairs = [(root, result.meta["example_value"]) for root, result in zip(self.roots, results, strict=True)]
        changed = {node: fake for root, fake in pairs if not same_strides(fake, root.fake) for node in root.nodes}
        if changed and a_view_would_fail(changed):
            return "a later view relies on the memory layout of the result"
        return None

    def _inputs(self) -> set[Node]:
        return {n for e in self.emitted for n in e.all_input_nodes if n not in self.emitted}

    def _touched(self) -> list[tuple[Node, Any]]:
        """Every node that is replaced with every tensor it reads or makes: from the roots up to what is read now."""
        value_of, covered, todo = self.rewriter.canonical.of_node, set[Node](), [r.nodes[0] for r in self.roots]
        read = {id(value_of.get(n, n)) for n in self._inputs()}
        while todo:
            node = todo.pop()
            inner = node.op not in ("placeholder", "get_attr") and id(value_of.get(node, node)) not in read
            if inner and node not in covered:
                covered.add(node)
                todo += node.all_input_nodes
        return [(n, i.meta.get("example_value")) for n in covered for i in (n, *n.all_input_nodes)]

    def settle(self, results: list[Node]) -> str | None:
        """Leave the nodes before the last root, or move them up to just after their inputs."""
        canonical = self.rewriter.canonical
        modes = {canonical.mode[root.nodes[0]].place for root in self.roots}
        if len(modes) > 1:
            return "its parts are computed in different grad modes"
        if all(user > self.at for user in self._live_users()):
            return None
        last = max(self._inputs())
        if any(user <= last for user in self._live_users()):
            return "its inputs are not ready before its first use"
        if {(self.rewriter.mode if last.op == "placeholder" else canonical.mode[last]).place} != modes:
            return "its inputs are computed in another grad mode, or under vmap"
        if self.rewriter.written_since((last, n.meta.get("example_value")) for n in self._inputs()):
            return "an input is modified in place after it is computed"
        for node in self.emitted:
            last.append(node)
            last = node
        return None

    def _live_users(self) -> list[Node]:
        """Readers of the roots that will still read them: not what is emitted, nor what only feeds another root."""
        old = {n for root in self.roots for n in root.nodes}
        users = {u for n in old for u in n.users}
        return [u for u in users - old if u not in self.emitted and not (u.users and set(u.users) <= old)]

    def undo(self) -> None:
        for node in reversed(self.emitted):
            self.rewriter.graph.erase_node(node)


# --- the pass ------------------------------------------------------------------------------------------------------


def rewrite_graph(rewriter: Rewriter, fusions: Iterable[Fusion]) -> None:
    """Apply every fusion to one graph: its idioms, then its passes."""
    for fusion in fusions:
        if fusion.idioms:
            _apply_idioms(rewriter, fusion)
            rewriter.refresh()
        for run in fusion.passes:
            run(rewriter)
            rewriter.refresh()


def _apply_idioms(rewriter: Rewriter, fusion: Fusion) -> None:
    sites = {id(v): v for v in rewriter.values if fusion.anchor(v)}
    open_sites = dict(sites)
    reasons: dict[int, str] = {}
    matches: list[Match] = []
    # Outermost first: a spelling that ends in a cast would match without it too, its input then being a cast as well.
    for value, idiom in itertools.product(reversed(list(rewriter.values)), fusion.idioms):
        if not open_sites:
            break
        match = unify(idiom, value) if value.nodes else None
        covered = [id(v) for v in match.interior if id(v) in sites] if match else []
        if match is None or not covered or not all(c in open_sites for c in covered):
            continue
        reason = rewriter.unsafe(match.root, match.interior) or fusion.refuse(match) or _emit(rewriter, fusion, match)
        if reason is not None:
            reasons.setdefault(covered[0], reason)
            continue
        for c in covered:
            del open_sites[c]
        matches.append(match)
    for match in reversed(matches):
        rewriter.fused(fusion.name, match.root, fusion.saved_bytes(match), match.idiom.name)
    for key, site in open_sites.items():
        rewriter.refused(fusion.name, site, reasons.get(key) or _nearest_miss(rewriter, fusion, site))


def _emit(rewriter: Rewriter, fusion: Fusion, match: Match) -> str | None:
    replace = fusion.replace
    assert replace is not None
    return rewriter.replace(fusion.name, [match.root], lambda emitter: [replace(match, emitter)])


def _nearest_miss(rewriter: Rewriter, fusion: Fusion, site: Value) -> str:
    """Why no idiom matched: the difference to the one that came furthest, over all results the site feeds."""
    near = Near()
    reached, results = {id(site)}, [site]
    for _ in range(_MAX_STEPS_TO_RESULT):
        new = [v for v in rewriter.values if id(v) not in reached and any(id(i) in reached for i in v.inputs())]
        reached |= {id(v) for v in new}
        results += new
    for idiom in fusion.idioms:
        for value in results:
            unify(idiom, value, near)
    return near.reason() if near.matched else "no known form has this shape"
