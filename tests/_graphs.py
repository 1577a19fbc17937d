"""Match tests and near-miss tests: what was decided, and that the numbers are right either way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from _backend import Backend
from _oracle import judge
from fused_backend.compiler import Options, Report
from fused_backend.compiler.backend import rewrite

OPTIONS = {"lowering": "aot_eager"}


def assert_fused(fn: Callable[..., Any], inputs: Sequence[Any], fusion: str, count: int = 1) -> None:
    """Exactly `count` sites fused and none refused; outputs and gradients as accurate as eager's."""
    report = assert_right(fn, inputs)
    assert report.counts().get(fusion, (0, 0)) == (count, 0), str(report)


def assert_refused(fn: Callable[..., Any], inputs: Sequence[Any], fusion: str, reason: str = "") -> None:
    """No site fused, one refused for `reason`; outputs and gradients as accurate as eager's."""
    report = assert_right(fn, inputs)
    fused, refused = report.counts().get(fusion, (0, 0))
    assert fused == 0 and refused >= 1, str(report)
    reasons = [d.reason for d in report.decisions if d.fusion == fusion]
    assert any(reason in r for r in reasons), reasons


def assert_unseen(fn: Callable[..., Any], inputs: Sequence[Any], fusion: str) -> None:
    """Not a site at all: neither fused nor refused."""
    report = assert_right(fn, inputs)
    assert fusion not in report.counts(), str(report)


def assert_right(fn: Callable[..., Any], inputs: Sequence[Any]) -> Report:
    """The compiled function against the eager one by the yardstick, with random cotangents; what was decided."""
    with torch.no_grad():
        outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    cotangents = [torch.randn_like(o) for o in outputs]
    torch._dynamo.reset()
    # Of a handful of numbers the largest error is luck. A wrong rewrite is off by orders of magnitude; how accurate
    # the operators are is what their own tests judge.
    backend = Backend()
    judge(torch.compile(fn, backend=backend), fn, inputs, cotangents, largest=False)
    return backend.report


def operators(fn: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """Our operators in the rewritten graph of `fn`: name -> arguments of the last call."""
    found: dict[str, tuple[Any, ...]] = {}

    def collect(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        _, finish = rewrite(gm, Options())
        for node in gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fused_backend":
                found[node.target._opname] = tuple(node.args)
        return finish(gm.forward)

    torch._dynamo.reset()
    torch.compile(fn, backend=collect)(*inputs)
    return found
