"""The vocabulary patterns are written in: values of a canonical graph, idioms, matches, fusions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Node


@dataclass(eq=False)
class Value:
    """One value of a graph in canonical form: what is computed, whichever way it was spelled.

    `op` is a canonical name ("mul", "convert", "half", ...), "input" or "opaque"; `args` are Values and constants.
    Dimensions are counted from the end. Equal computations share one Value. `nodes` are the FX nodes that compute
    it, earliest first, and is empty for a cast that autocast makes without showing it. `detached` values are computed
    under no_grad: a view then says requires_grad=True and yet has no gradient.
    """

    op: str
    args: tuple[Any, ...]
    fake: Any
    nodes: list[Node] = field(default_factory=list)
    detached: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        return self.fake.dtype if isinstance(self.fake, torch.Tensor) else None

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.fake.shape) if isinstance(self.fake, torch.Tensor) else ()

    @property
    def requires_grad(self) -> bool:
        return isinstance(self.fake, torch.Tensor) and self.fake.requires_grad and not self.detached

    @property
    def cut(self) -> bool:
        """Computed under no_grad from something that has a gradient: the gradient ends here."""
        floating = isinstance(self.fake, torch.Tensor) and self.fake.is_floating_point()
        return floating and not self.requires_grad and any(v.requires_grad for v in self.inputs())

    def inputs(self) -> list[Value]:
        """The Values among the arguments, those inside lists included."""
        found: list[Value] = []
        for arg in self.args:
            found += [a for a in (arg if isinstance(arg, (tuple, list)) else (arg,)) if isinstance(a, Value)]
        return found

    def __str__(self) -> str:
        if self.op in ("input", "opaque", "param"):
            return self.args[0] if self.args and isinstance(self.args[0], str) else self.op
        return f"{self.op}({', '.join(_show(a) for a in self.args)})"


def _show(arg: Any) -> str:
    if isinstance(arg, Value):
        return "…" if arg.inputs() else str(arg)
    if isinstance(arg, (tuple, list)):
        return "[" + ", ".join(_show(a) for a in arg) + "]"
    return str(arg).removeprefix("torch.")


class Hole(float):
    """A number in an idiom that the match fills in (eps, a scale): a float that is recognised by identity."""

    name: str

    def __new__(cls, name: str) -> Hole:
        self = super().__new__(cls, 0.5)
        self.name = name
        return self


@dataclass(frozen=True, eq=False)
class Idiom:
    """One spelling of a fusion: a plain PyTorch function, example arguments to trace it with, what it means.

    The dtype of an example argument is a marker: a cast to it inside the function means "to that argument's dtype".
    `means` are the constants this spelling implies for the operator.
    """

    function: Callable[..., torch.Tensor]
    example: Callable[..., dict[str, torch.Tensor]]
    means: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__

    def arguments(self) -> dict[str, Any]:
        """Example tensors for the tensor parameters, a Hole for each `float` parameter."""
        tensors = self.example()
        names = inspect.signature(self.function).parameters
        return {name: tensors[name] if name in tensors else Hole(name) for name in names}


@dataclass(frozen=True)
class Match:
    """An idiom found in a graph: `root` is its result, `bound` its arguments, `interior` all that it covers."""

    idiom: Idiom
    root: Value
    bound: dict[str, Any]
    interior: tuple[Value, ...]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def get(self, name: str) -> Any:
        return self.bound.get(name)


class Emitter(Protocol):
    """Writes nodes into the graph at the place of the match (compiler/rewrite.py implements it)."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Call a function, an operator, or (given as a string) a method; Values, in lists too, name their nodes."""
        ...

    def item(self, node: Node, index: int) -> Node:
        """One output of an operator with several."""
        ...

    def node(self, value: Value) -> Node:
        """The node that computes a Value; writes the cast that autocast kept hidden."""
        ...


class View(Protocol):
    """A graph in canonical form, as fusions with rules beyond idioms see it (compiler/rewrite.py implements it)."""

    @property
    def values(self) -> list[Value]: ...

    def of(self, node: Node) -> Value: ...

    def users(self, value: Value) -> list[Node]:
        """Nodes that read the value, those that only rename it (a cast that does nothing) looked through."""
        ...

    def replace(self, fusion: str, roots: list[Value], emit: Callable[[Emitter], list[Node]]) -> str | None:
        """Write what `emit` calls, one node for each root, and let it stand for the roots.

        Returns why it could not be done, or None. Nothing is written in that case.
        """
        ...

    def fused(self, fusion: str, site: Value, saved_bytes: int = 0, idiom: str = "") -> None:
        """Record that the site was rewritten."""
        ...

    def refused(self, fusion: str, site: Value, reason: str) -> None:
        """Record why a site was left alone."""
        ...

    def absorbed(self, fusion: str, site: Value) -> None:
        """A site recorded as fused became part of another: count the two as one."""
        ...

    def unsafe(self, root: Value, interior: Iterable[Value]) -> str | None:
        """Why replacing `root` by one operator would change a gradient or read overwritten memory."""
        ...

    def outside(self, value: Value) -> tuple[View, Value] | None:
        """In the body of a higher-order op: the graph around it and the Value there that an input stands for."""
        ...

    @property
    def around(self) -> View | None:
        """The graph around a body whose op can be given further operands."""
        ...

    def bring_in(self, key: Any, emit: Callable[[Emitter], list[Node]]) -> list[Node]:
        """In a body: compute values in the graph `around` it, once for a key; they become inputs of the body."""
        ...

    def pure(self, node: Node) -> None:
        """The node has no effect but its value: it may go once nothing reads it."""
        ...

    def defer(self, output: Value, leaves: list[Value]) -> None:
        """Let a graph output be computed from `leaves` only when somebody reads it."""
        ...


@dataclass(frozen=True)
class Fusion:
    """All that the compiler knows of one fusion.

    anchor       does this value mark a site (so that a site which matches no idiom is reported, not overlooked)?
    idioms       the spellings, the most specific first
    refuse       a reason why a structural match must be left alone, or None
    replace      emit the operator and return the node that stands for the match's root
    saved_bytes  what the operator keeps for the backward
    passes       rules that are not one function of their arguments, run in order after the idioms
    priority     fusions run in ascending order
    """

    name: str
    anchor: Callable[[Value], bool]
    idioms: tuple[Idiom, ...] = ()
    refuse: Callable[[Match], str | None] = lambda match: None
    replace: Callable[[Match, Emitter], Node] | None = None
    saved_bytes: Callable[[Match], int] = lambda match: 0
    passes: tuple[Callable[[View], None], ...] = ()
    priority: int = 100


def static_bytes(values: Iterable[Value]) -> int:
    """Bytes of the values' tensors; a symbolic size counts by its hint."""
    total = 0
    for value in values:
        size = value.fake.element_size()
        for n in value.shape:
            size *= n if isinstance(n, int) else (n.node.hint or 1)
        total += size
    return total
