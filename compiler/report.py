"""What was fused, what was refused and why: one `Decision` per site, gathered in a `Report`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.fx import Node


@dataclass(frozen=True)
class Decision:
    """What happened at one site.

    where        module path ("model.layers.0.input_layernorm"), empty when the code is in no module
    source       file:line of the code
    status       "fused" or "refused"
    reason       for a refused site, one sentence; for a fused one, the idiom it was written in
    saved_bytes  what the fused operator keeps for the backward
    """

    fusion: str
    where: str
    source: str
    status: str
    reason: str
    saved_bytes: int = 0


@dataclass
class Report:
    """Decisions over all graphs of a model. `print(report)` shows a table."""

    decisions: list[Decision] = field(default_factory=list)
    graph_count: int = 0
    graph_breaks: int = 0
    plan: Any = None

    def counts(self) -> dict[str, tuple[int, int]]:
        """{fusion: (fused, refused)}"""
        fused = Counter(d.fusion for d in self.decisions if d.status == "fused")
        refused = Counter(d.fusion for d in self.decisions if d.status == "refused")
        return {name: (fused[name], refused[name]) for name in sorted(fused | refused)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"counts": {k: list(v) for k, v in self.counts().items()}}

    def summary(self) -> str:
        """`rms_norm 65/65, rope 32/32`: fused sites of all sites seen."""
        return ", ".join(f"{k} {f}/{f + r}" for k, (f, r) in self.counts().items()) or "nothing to fuse"

    def __str__(self) -> str:
        lines = [f"{self.graph_count} graph(s), {self.graph_breaks} graph break(s): {self.summary()}"]
        rows = Counter((d.fusion, d.status, d.reason, _layerless(d.where), d.source) for d in self.decisions)
        table = [("sites", "fusion", "status", "where", "form, or why not", "source")]
        table += [
            (str(n), fusion, status, where, reason, src) for (fusion, status, reason, where, src), n in rows.items()
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        if rows:
            lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines += [str(self.plan)] if self.plan is not None else []
        return "\n".join(lines)


def _layerless(where: str) -> str:
    """Layer numbers replaced by *, so that equal layers share a row of the table."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", where)


def where_of(node: Node) -> str:
    """Module path of a node: `model.layers.0.mlp`."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = re.sub(r"^L\['[^']*'\](\[\d+\])?", "", str(list(stack.values())[-1][0]))
    words = re.findall(r"[A-Za-z0-9_]+", path)
    # How Dynamo reached the module (`self.__dict__['_modules']['model']`) is no part of its name.
    return ".".join(w for w in words if w not in ("_modules", "__dict__", "_orig_mod"))


def source_of(node: Node) -> str:
    """file:line of the innermost code of a node."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not found:
        return ""
    path, line = found[-1]
    return f"{'/'.join(path.split('/')[-2:])}:{line}"
