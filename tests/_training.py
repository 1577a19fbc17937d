"""One training step of a model, in float64 too, and the yardstick over all its numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _backend import Backend
from _oracle import Float64, assert_as_accurate

Step = dict[str, torch.Tensor | None]
VOCABULARY = 128
OPTIONS = {"lowering": "aot_eager", "strict": False}


def roughen(model: torch.nn.Module) -> None:
    """Random norm weights, and larger matrices, so that activations are not in their linear range."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name:
                parameter.mul_(5)


def batch(rows: int = 2, length: int = 16, device: Any = None) -> dict[str, torch.Tensor]:
    """Random tokens as inputs and labels, a few labels ignored."""
    ids = torch.randint(3, VOCABULARY, (rows, length), device=device)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, inputs: dict[str, Any], logits: bool = True) -> Step:
    """{name: value} of the loss, the logits and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    named = model.named_parameters()
    grads = {n.removeprefix("_orig_mod."): None if p.grad is None else p.grad.clone() for n, p in named}
    values = {"loss": out.loss.detach().clone()} | ({"logits": out.logits.detach().clone()} if logits else {})
    return values | grads


def exact_step(model: torch.nn.Module, inputs: dict[str, Any], logits: bool = True) -> Step:
    """The same in float64, eagerly."""
    wide = copy.deepcopy(model).double()
    if getattr(wide, "is_gradient_checkpointing", False):
        wide.gradient_checkpointing_disable()  # recomputation would happen outside Float64
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")  # grouped products have no float64
    with Float64():
        return step(wide, inputs, logits)


def assert_step_as_accurate(model: Any, draws: Sequence[dict[str, Any]], options: dict[str, Any] = OPTIONS) -> Backend:
    """The yardstick over several batches at once; the eager model is the graph as Dynamo wrote it.

    Rounding errors of a whole model are random: on a single batch, one number's error may be twice eager's by luck
    alone. Root-mean-square errors over all batches are stable (measured: ours / eager's is 0.92 to 1.07).
    """
    truth = [exact_step(model, inputs) for inputs in draws]
    torch._dynamo.reset()
    backend = Backend(**options)
    compiled = torch.compile(model, backend=backend)
    ours = [step(compiled, inputs) for inputs in draws]
    backend.as_traced = True
    eager = [step(compiled, inputs) for inputs in draws]
    wrong = inaccurate(ours, eager, truth, next(model.parameters()).dtype)
    assert not wrong, wrong
    return backend


def inaccurate(ours: Sequence[Step], eager: Sequence[Step], truth: Sequence[Step], dtype: torch.dtype) -> list[str]:
    """What is less accurate than the yardstick allows, over the steps of several batches; one sentence each."""
    wrong: list[str] = []
    for name in truth[0]:
        values = [[s[name] for s in steps] for steps in (ours, eager, truth)]
        if values[2][0] is None:
            if values[0][0] is not None and values[0][0].any():
                wrong.append(f"{name}: eager has no gradient, ours has one")
            continue
        if values[0][0] is None:
            wrong.append(f"{name}: eager has a gradient, ours has none")
            continue
        try:
            stacked = (torch.stack(v) for v in values)  # type: ignore[arg-type]
            assert_as_accurate(*stacked, what=name, ulp_of=dtype, largest=False)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


def guarded(call: Callable[[], Any]) -> tuple[Any, str]:
    """Its result and "", or None and the error in one line."""
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
