"""The options of `torch.compile(model, backend="fused", options={...})`, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import unknown

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
LOWERINGS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    memory_budget  None, bytes, "20GiB" or "auto": the allocator peak a training step may reach
    host_budget    under a budget, the host memory that activations may be sent to, in the same forms; 0: none;
                   None: half of the host's, shared by the processes on it
    respect_checkpointing  under a budget, obey `gradient_checkpointing_enable()` instead of taking it for a hint
    fusions        "all", "none", "rms_norm,rope" (only these) or "-rope" (all but these)
    lowering       "inductor", or "aot_eager": the same graphs without Inductor, quick to compile
    strict         a refused site or an internal error raises instead of being reported
    max_rewrites   stop after this many rewrites in each graph: halve it to find a rewrite that misbehaves
    """

    memory_budget: int | str | None = None
    host_budget: int | str | None = None
    respect_checkpointing: bool = False
    fusions: str = "all"
    lowering: str = "inductor"
    strict: bool = False
    max_rewrites: int | None = None

    @staticmethod
    def parse(given: Mapping[str, Any] | None, known_fusions: Iterable[str]) -> Options:
        """Raises: ValueError naming the key or value that is wrong and what is valid."""
        given = dict(given or {})
        names = [f.name for f in fields(Options)]
        for key in given:
            if key not in names:
                raise unknown("option", key, names)
        options = Options(**given)
        options._check(list(known_fusions))
        return options

    def _check(self, known_fusions: list[str]) -> None:
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "memory_budget")
        if self.host_budget not in (None, 0) or isinstance(self.host_budget, bool):
            parse_bytes(self.host_budget, "host_budget")
        if not isinstance(self.respect_checkpointing, bool):
            raise ValueError(
                f"backend 'fused': option respect_checkpointing must be True or False, "
                f"got {self.respect_checkpointing!r}"
            )
        if self.lowering not in LOWERINGS:
            raise unknown("lowering", str(self.lowering), LOWERINGS)
        if not isinstance(self.strict, bool):
            raise ValueError(f"backend 'fused': option strict must be True or False, got {self.strict!r}")
        rewrites = self.max_rewrites
        if rewrites is not None and (isinstance(rewrites, bool) or not isinstance(rewrites, int) or rewrites < 0):
            raise ValueError(f"backend 'fused': option max_rewrites must be an integer >= 0, got {rewrites!r}")
        self.enabled(known_fusions)

    def enabled(self, known_fusions: Iterable[str]) -> list[str]:
        """Names of the fusions to apply, of those that exist."""
        known = list(known_fusions)
        if not isinstance(self.fusions, str):
            raise ValueError(f"backend 'fused': option fusions must be a string, got {self.fusions!r}")
        words = [w.strip() for w in self.fusions.split(",") if w.strip()]
        if words in (["none"], ["all"]):
            return known if words == ["all"] else []
        for word in words:
            if word.removeprefix("-") not in known:
                raise unknown("fusion", word.removeprefix("-"), [*known, "all or none (alone)"])
        wanted = {w for w in words if not w.startswith("-")}
        unwanted = {w.removeprefix("-") for w in words if w.startswith("-")}
        return [name for name in known if name not in unwanted and (name in wanted or not wanted)]


def parse_bytes(budget: Any, option: str = "memory_budget") -> int | None:
    """Bytes of `20GiB`, `1_000_000` and the like; None for "auto".

    Raises: ValueError for anything else.
    """
    if budget == "auto":
        return None
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    parsed = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(budget).replace("_", ""))
    if isinstance(budget, str) and parsed and parsed[2] in _UNITS and float(parsed[1]) > 0:
        return int(float(parsed[1]) * _UNITS[parsed[2]])
    raise ValueError(
        f"backend 'fused': option {option} must be None, a number of bytes, 'auto', or a string such as "
        f"'20GiB' (units {', '.join(u for u in _UNITS if u)}), got {budget!r}"
    )
