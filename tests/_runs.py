"""Several optimizer steps of a model, fused, eager and in float64, and the yardstick over all their numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _backend import Backend
from _oracle import Float64
from _training import Step, batch, inaccurate

RUNS, STEPS = 2, 4


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Its steps are as large as the gradients are: one that divides by them turns rounding into other steps."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def forward_backward(call: Any, inputs: dict[str, Any]) -> torch.Tensor:
    loss = call(**inputs).loss
    loss.backward()
    return loss


def trained(
    model: torch.nn.Module,
    call: Any,
    batches: Sequence[Any],
    run: Callable[[Any, Any], torch.Tensor] = forward_backward,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    before_step: Callable[[torch.nn.Module], Any] = lambda model: None,
) -> list[Step]:
    """{name: value} of the loss and the gradients of every step, then what all of them changed in each parameter.

    run          forward and backward of one batch, or of several whose gradients add up; returns the loss
    before_step  between the backward and the optimizer's step: clipping, say
    """
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    stepper = optimizer(p for p in model.parameters() if p.requires_grad)
    steps: list[Step] = []
    for inputs in batches:
        stepper.zero_grad(set_to_none=True)
        loss = run(call, inputs)
        before_step(model)
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        steps.append({"loss": loss.detach().clone()} | grads)
        stepper.step()
    return [*steps, {f"change of {n}": p.detach() - first[n] for n, p in model.named_parameters()}]


def repeated(model: torch.nn.Module, call: Any, runs: Sequence[Sequence[Any]], **loop: Any) -> list[list[Step]]:
    """`trained` from the same weights for each list of batches: [steps of all runs, changes of all runs]."""
    first = copy.deepcopy(model.state_dict())
    steps: list[Step] = []
    changes: list[Step] = []
    for batches in runs:
        model.load_state_dict(first)
        *of_run, change = trained(model, call, batches, **loop)
        steps += of_run
        changes.append(change)
    model.load_state_dict(first)
    return [steps, changes]


def assert_training_as_accurate(
    model: torch.nn.Module,
    make: Callable[[], Any] = batch,
    around: Callable[[Any], Any] = lambda model: model,
    options: dict[str, Any] | None = None,
    ulp_of: torch.dtype | None = None,
    **loop: Any,
) -> Backend:
    """The yardstick over training runs: loss and every gradient of their steps, and the trained parameters.

    In one run all numbers share the rounding of its first step: what is outside is judged over more runs, by the same
    tolerance, before it is called wrong. `around` is what of the model is compiled; `ulp_of` is the dtype that the
    model computes in, where that is not its parameters'.
    """
    torch.manual_seed(1)
    backend = Backend(**(options or {}))
    torch._dynamo.reset()
    compiled = torch.compile(around(model), backend=backend)
    wide = copy.deepcopy(model).double()
    if getattr(wide, "is_gradient_checkpointing", False):
        wide.gradient_checkpointing_disable()  # recomputation would happen outside Float64
    dtype = ulp_of or next(model.parameters()).dtype
    for count in (RUNS, 6 * RUNS):
        runs = [[make() for _ in range(STEPS)] for _ in range(count)]
        ours = repeated(model, compiled, runs, **loop)
        backend.as_traced = True
        eager = repeated(model, compiled, runs, **loop)
        backend.as_traced = False
        with Float64():
            truth = repeated(wide, around(wide), runs, **loop)
        assert all(value is not None for value in truth[1][0].values())
        wrong = [w for three in zip(ours, eager, truth, strict=True) for w in inaccurate(*three, dtype)]
        if not wrong:
            return backend
    raise AssertionError(wrong)
