"""What a model really contains, found by running it eagerly: a census that knows nothing of graphs and matchers.

`census(model, inputs)` counts, by module path,

    rms_norm, layer_norm    modules without children, told by what they do: the output is the input with every row
                            divided by its root-mean-square (or, mean subtracted, its deviation), times one number per
                            channel, perhaps times an activation of a gate; elsewhere, a reciprocal root of a mean of
                            squares, and calls of PyTorch's own norms
    rope                    tensors that functions called apply_*rotary* return
    swiglu                  products of an activation of one projection and another projection of the same input (or
                            another part of the same one), whatever the activation: gated MLPs, experts too
    linear_cross_entropy    calls of cross_entropy

A rotation under another name, or a norm that mixes rows, is not seen.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Sites = dict[str, Counter[str]]  # fusion -> {module path: sites}
_ROTATES = re.compile(r"_?apply_.*rotary.*")
_ACTIVATIONS = {"silu", "gelu", "relu", "relu6", "sigmoid", "tanh", "softplus", "mish", "hardswish", "elu", "relu_"}
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "grouped_mm", "__matmul__",
             "grouped_mm_fallback", "conv1d"}  # fmt: skip
_SELECTS = {"chunk", "split", "__getitem__", "narrow", "unbind", "select", "tensor_split", "split_with_sizes"}
_KEEPS = {
    "to", "float", "type_as", "half", "bfloat16", "double", "view", "reshape", "contiguous", "transpose", "permute",
    "unsqueeze", "squeeze", "clamp", "clip", "dropout", "flatten", "unflatten", "clone", "add", "__add__", "__radd__",
    "__mul__", "mul", "__rmul__", "div", "__truediv__", "type", "square", "pow", "__pow__", "minimum", "maximum",
    "sub", "__sub__", "__rsub__", "t", "expand", "swapaxes", "clamp_min", "movedim", "masked_fill", "index_select",
}  # fmt: skip


def census(model: nn.Module, inputs: dict[str, Any]) -> Sites:
    """Sites of every kind in one eager forward pass of the model."""
    watcher = _Watcher({id(m): name for name, m in model.named_modules()}, {id(p) for p in model.parameters()})
    hooks = [m.register_forward_pre_hook(watcher.enter, with_kwargs=True) for m in model.modules()]
    hooks += [m.register_forward_hook(watcher.leave, with_kwargs=True) for m in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]), _counted_rotations(watcher), watcher:
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for path, kind in watcher.norm_modules.items():
        # Its own arithmetic is the same site once more.
        for other in ("rms_norm", "layer_norm"):
            watcher.formulas[other].pop(path, None)
        watcher.sites[kind[0]][path] += kind[1]
    for name, found in watcher.formulas.items():
        watcher.sites[name].update(found)
    return watcher.sites


@dataclass
class _Tag:
    """What is known of a tensor: which projection of what it is (`source`, of input `x`), activated or not."""

    x: int = 0
    source: int = 0
    activated: bool = False
    moment: str = ""  # of the moments of its rows, which it is: "mean", "centred square", "root mean square", ...


class _Watcher(TorchFunctionMode):
    """Follows projections and moments through every PyTorch call, and looks at what modules return."""

    def __init__(self, paths: dict[int, str], parameters: set[int]):
        super().__init__()
        names = ("rms_norm", "layer_norm", "rope", "swiglu", "linear_cross_entropy")
        self.sites: Sites = {name: Counter() for name in names}
        self.formulas: Sites = {"rms_norm": Counter(), "layer_norm": Counter()}
        self.norm_modules: dict[str, list[Any]] = {}
        self.paths, self.parameters = paths, set(parameters)
        self.stack: list[str] = [""]
        self.tags: dict[int, _Tag] = {}
        self.keep: list[Any] = []  # so that ids stay unique

    @property
    def path(self) -> str:
        return self.stack[-1]

    # --- modules

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(self.paths.get(id(module), self.path))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        path = self.stack.pop()
        if next(module.children(), None) is None and isinstance(result, Tensor):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                kind = norm_kind([t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)], result)
            if kind:
                entry = self.norm_modules.setdefault(path, [kind, 0])
                entry[1] += 1

    # --- calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunction():
            self._note(name, args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if name == "cross_entropy":
            self.sites["linear_cross_entropy"][self.path] += 1
        elif name in ("rms_norm", "layer_norm"):
            self.formulas[name][self.path] += 1
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not tensors or not outputs:
            return
        first = self.tags.get(id(tensors[0]))
        if any(id(t) in self.parameters for t in tensors):
            self._of_parameter(name, tensors, outputs)
        if name in ("mul", "__mul__", "__rmul__", "multiply") and len(tensors) == 2:
            self._product(*tensors, outputs[0])
        elif name in _ACTIVATIONS and first and first.source:
            self._tag(outputs[0], _Tag(first.x, first.source, True))
        elif name == "glu" and first and first.source:
            self.sites["swiglu"][self.path] += 1
        elif name in _SELECTS and first and first.source:
            for output in outputs:
                self._tag(output, _Tag(first.x, id(output), first.activated))
        elif name in _KEEPS and id(outputs[0]) not in self.tags:
            tags = [t for t in (self.tags.get(id(t)) for t in tensors) if t and t.source]
            if len({t.source for t in tags}) == 1:
                self._tag(outputs[0], _Tag(tags[0].x, tags[0].source, any(t.activated for t in tags)))
        self._moments(name, args, kwargs, tensors, outputs[0])

    def _of_parameter(self, name: str, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        if name in _PRODUCTS:
            inputs = [t for t in tensors if id(t) not in self.parameters]
            self._tag(outputs[0], _Tag(self._input(inputs[0]) if inputs else 0, id(outputs[0])))
        elif name in _KEEPS | _SELECTS and all(id(t) in self.parameters for t in tensors):
            self.keep += outputs
            self.parameters |= {id(t) for t in outputs}

    def _input(self, x: Tensor) -> int:
        """A tensor's identity, whatever its shape and dtype: experts read a gathered copy of it each."""
        return self.tags[id(x)].x if id(x) in self.tags and not self.tags[id(x)].source else id(x)

    def _product(self, a: Tensor, b: Tensor, result: Tensor) -> None:
        for gate, up in ((a, b), (b, a)):
            g, u = self.tags.get(id(gate)), self.tags.get(id(up))
            if not (g and u and g.source and u.source and g.activated) or gate.shape != up.shape:
                continue
            if g.source == u.source:  # x * sigmoid(x): an activation written out
                self._tag(result, _Tag(g.x, g.source, True))
                return
            if g.x == u.x and not u.activated:
                self.sites["swiglu"][self.path] += 1
                self._tag(result, _Tag(0, 0))
                return

    def _moments(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], result: Tensor) -> None:
        """Reciprocal roots of means of squares: a norm written out as a formula."""
        before = self.tags.get(id(tensors[0]))
        moment = before.moment if before else ""
        exponent = args[1] if name in ("pow", "__pow__") and len(args) > 1 and not isinstance(args[1], Tensor) else None
        after = ""
        if name == "mean" and result.ndim and result.shape[-1] == 1:
            after = {"square": "mean square", "centred square": "variance"}.get(moment, "mean")
        elif name == "var":
            after = "variance"
        elif name in ("sub", "__sub__") and len(tensors) == 2:
            other = self.tags.get(id(tensors[1]))
            after = "centred" if other and other.moment == "mean" else ""
        elif name == "square" or exponent == 2 or (name in ("mul", "__mul__") and _same(tensors)):
            after = "centred square" if moment == "centred" else "square"
        elif name == "rsqrt" or exponent == -0.5:
            self._divided_by(moment)
        elif name == "sqrt" or exponent == 0.5:
            after = {"mean square": "root mean square", "variance": "deviation"}.get(moment, "")
        elif name in ("div", "__truediv__") and len(tensors) == 2:
            divisor = self.tags.get(id(tensors[1]))
            self._divided_by(divisor.moment if divisor else "")
        elif name in _KEEPS:
            after = moment
        if after:
            self._tag(result, replace(self.tags.get(id(result), _Tag()), moment=after))

    def _divided_by(self, moment: str) -> None:
        kinds = {"mean square": "rms_norm", "root mean square": "rms_norm"}
        kind = (kinds | {"variance": "layer_norm", "deviation": "layer_norm"}).get(moment)
        if kind:
            self.formulas[kind][self.path] += 1

    def _tag(self, tensor: Tensor, tag: _Tag) -> None:
        self.keep.append(tensor)
        self.tags[id(tensor)] = tag


@contextlib.contextmanager
def _counted_rotations(watcher: _Watcher) -> Iterator[None]:
    """Every function or method called apply_*rotary* of transformers' models counts what it returns."""
    depth = 0

    def counting(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                depth -= 1
            if depth == 0:
                watcher.sites["rope"][watcher.path] += sum(isinstance(t, Tensor) for t in tree_leaves(result))
            return result

        return wrapper

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("transformers.models.") or ".modeling_" not in name:
                continue
            places = [module, *(c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name)]
            for place in places:
                for key, value in list(vars(place).items()):
                    plain = value.__func__ if isinstance(value, staticmethod) else value
                    if isinstance(plain, FunctionType) and _ROTATES.fullmatch(key):
                        new = counting(plain)
                        patched = staticmethod(new) if isinstance(value, staticmethod) else new
                        stack.enter_context(mock.patch.object(place, key, patched))
        yield


def _same(tensors: list[Tensor]) -> bool:
    return len(tensors) == 2 and tensors[0] is tensors[1]


# --- norms by what they do -----------------------------------------------------------------------------------------


def norm_kind(inputs: list[Tensor], y: Tensor) -> str | None:
    """ "rms_norm", "layer_norm" or None: is y a norm of the first input, perhaps gated by the second?"""
    if not inputs or y.ndim < 2 or not y.is_floating_point() or inputs[0].shape != y.shape or y.numel() > 2**24:
        return None
    x, y = inputs[0].double(), y.double()
    gates: list[tuple[Tensor, Tensor]] = [(x, y)]
    if len(inputs) > 1 and inputs[1].shape == y.shape:
        for act in (F.silu, torch.sigmoid):
            g = act(inputs[1].double())
            gates += [(x, y / g), (x * g, y)]
    for x, y in gates:
        if _per_channel(x, y, centred=False):
            return "rms_norm"
        if _per_channel(x, y, centred=True):
            return "layer_norm"
    return None


def _per_channel(x: Tensor, y: Tensor, centred: bool) -> bool:
    """Is y, for some number of groups, the normalised x times one number per channel (plus another one)?"""
    width = x.shape[-1]
    for groups in (1, 2, 4, 8):
        if width % groups or width // groups < 2:
            continue
        h = x.reshape(-1, groups, width // groups)
        h = h - h.mean(-1, keepdim=True) if centred else h
        scale = h.pow(2).mean(-1, keepdim=True).sqrt()
        if h.shape[0] < 3 or not bool((scale > 0).all()) or scale.std() / scale.mean() < 0.03:
            continue  # rows of one size: anything linear would look like a norm
        n, out = (h / scale).reshape(-1, width), y.reshape(-1, width)
        if centred:  # the bias
            n, out = n - n.mean(0), out - out.mean(0)
        slope = (n * out).sum(0) / n.pow(2).sum(0).clamp_min(1e-30)
        rest = out - slope * n
        if out.pow(2).mean() > 0 and rest.pow(2).mean() <= 1e-5 * out.pow(2).mean():
            return True
    return False
