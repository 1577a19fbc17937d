"""The backend of tests: each graph as Dynamo wrote it and as we lower it, of one trace."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fused_backend.compiler import Options, Report
from fused_backend.compiler.backend import lower, rewrite
from fused_backend.compiler.budget import Request
from fused_backend.compiler.report import where_of


class Backend:
    """backend="fused", lowering="aot_eager" unless another is given, whose report is kept and whose errors are raised.

    `fused`, `refused` count sites by (fusion, module path) each time that a graph runs: after a graph break, one graph
    may serve several layers. Rotations count by the tensors that the operators turn. With `as_traced` set, the graphs
    run as Dynamo wrote them, as under backend="eager": the parity reference, without tracing the model once more.
    """

    def __init__(self, **options: Any) -> None:
        self.options = Options(**{"lowering": "aot_eager"} | options)
        self.report = Report()
        self.as_traced = False
        self.fused: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        traced = copy.deepcopy(gm)
        found, finish = rewrite(gm, self.options)
        self.report.decisions += found.decisions
        self.report.graph_count += 1
        fused = Counter((d.fusion, d.where) for d in found.decisions if d.status == "fused" and d.fusion != "rope")
        refused = Counter((d.fusion, d.where) for d in found.decisions if d.status == "refused")
        for module in gm.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                name = node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""
                fused["rope", where_of(node)] += {"rope": 1, "rope_qk": 2, "norm_rope_qk": 2}.get(name, 0)
        compiled = finish(lower(gm, example_inputs, self.options, None, Request.of(self.options, gm)))

        def run(*args: Any) -> Any:
            if self.as_traced:
                return traced.forward(*args)
            self.fused.update(fused)
            self.refused.update(refused)
            return compiled(*args)

        return run
