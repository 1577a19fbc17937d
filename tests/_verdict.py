"""What the backend does to one family: does it train, are its numbers right, how many of its sites are fused."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from _backend import Backend
from _census import Sites, census
from _training import Step, batch, exact_step, guarded, inaccurate, step
from torch._dynamo.utils import counters

FUSIONS = ("rms_norm", "layer_norm", "rope", "swiglu", "linear_cross_entropy")
DRAWS = 4
# Without a float64 run, what the fused gradients may differ by from the compiled eager ones, relative to their size.
_FLOAT32_ALLOWED = 2e-5
# Where eager float32 itself is this far from float64 (a router that picks another expert), the yardstick is blind.
_BLIND = 3e-3


def verdict(model: torch.nn.Module, draws: int = DRAWS, plain: bool = True) -> dict[str, Any]:
    """Facts of one family. `wrong` lists the numbers outside the yardstick; an `..._error` is empty where all went
    well; `sites` are [fused, refused, unseen] by fusion, `reasons` why sites were refused. Plain torch.compile is asked
    where it matters, that is where ours fails or makes several graphs; with `plain`, always.
    """
    torch.manual_seed(1)
    batches = [batch() for _ in range(draws)]
    facts: dict[str, Any] = {}
    found, facts["census_error"] = guarded(lambda: census(model, batches[0]))
    backend = Backend()
    with _counted() as facts["graphs"]:
        compiled = torch.compile(model, backend=backend)
        ours, facts["fused_error"] = guarded(lambda: _steps(compiled, batches))
    if found is not None:
        in_one_graph = {name: facts["graphs"] == [1, 0] and name != "linear_cross_entropy" for name in FUSIONS}
        facts["sites"] = {name: _sites(found, backend, name, draws, one) for name, one in in_one_graph.items()}
    reasons = Counter((d.fusion, d.reason, d.source) for d in backend.report.decisions if d.status == "refused")
    facts["reasons"] = [[n, *reason] for reason, n in reasons.items()]
    facts |= _judged(model, backend, compiled, batches, ours)
    if facts.get("wrong"):
        # A gradient of a handful of numbers may be outside by luck: the same tolerance over more of them decides.
        more = [batch() for _ in range(8 * draws)]
        facts |= _judged(model, backend, compiled, more, guarded(lambda: _steps(compiled, more))[0])
    torch._dynamo.reset()
    # A model of one graph has no fewer without us.
    if plain or ours is None or facts["graphs"] != [1, 0]:
        with _counted() as facts["plain_graphs"]:
            compiled = torch.compile(model, backend="aot_eager")
            facts["plain_error"] = guarded(lambda: _steps(compiled, batches))[1]
        torch._dynamo.reset()
    return facts


def _judged(model: Any, backend: Backend, compiled: Any, batches: list[Any], ours: list[Step] | None) -> dict[str, Any]:
    """The numbers of these steps beside those of the graphs as Dynamo wrote them."""
    backend.as_traced = True
    eager, error = guarded(lambda: _steps(compiled, batches))
    backend.as_traced = False
    judged = _numbers(model, batches, ours, eager) if ours is not None and eager is not None else {}
    return {"eager_error": error} | judged


def _steps(compiled: Any, batches: list[Any]) -> list[Step]:
    torch.manual_seed(2)
    return [step(compiled, inputs, logits=False) for inputs in batches]


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """[graphs, graph breaks] that Dynamo makes; filled in at the end."""
    torch._dynamo.reset()
    counters.clear()
    result: list[int] = []
    yield result
    result += [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


def _numbers(model: torch.nn.Module, batches: list[Any], ours: list[Step], eager: list[Step]) -> dict[str, Any]:
    """The yardstick against float64; where that cannot run or tells nothing, against the compiled eager model."""
    truth, why_not = guarded(lambda: [exact_step(model, inputs, logits=False) for inputs in batches])
    if truth is not None:
        off = max(_distances(eager, truth).values())
        if off < _BLIND:
            return {"oracle": "float64", "wrong": inaccurate(ours, eager, truth, torch.float32)}
        why_not = f"eager float32 is {off:.1e} from float64"
    distances = _distances(ours, eager)
    wrong = [f"{n}: {d:.1e} from the compiled eager model" for n, d in distances.items() if not d <= _FLOAT32_ALLOWED]
    return {"oracle": "float32", "no_float64": why_not, "wrong": wrong}


def _distances(ours: list[Step], eager: list[Step]) -> dict[str, float]:
    """{name: root-mean-square difference over that of the value}; infinite where only one has a value.

    A gradient that is nothing but rounding (that of a key's bias, which softmax does not see) counts as one of a
    thousandth of the largest gradient.
    """
    stacked = {n: [None if s[0][n] is None else _stack([t[n] for t in s]) for s in (ours, eager)] for n in eager[0]}
    least = 1e-3 * max(_rms(y) for n, (_, y) in stacked.items() if y is not None and n != "loss")
    result: dict[str, float] = {}
    for name, (x, y) in stacked.items():
        if x is None or y is None:
            result[name] = 0.0 if x is y else float("inf")
        else:
            result[name] = _rms(x - y) / max(_rms(y), least)
    return result


def _stack(values: list[Any]) -> torch.Tensor:
    return torch.stack(values).double()


def _rms(t: torch.Tensor) -> float:
    return t.pow(2).mean().sqrt().item()


def _sites(found: Sites, backend: Backend, name: str, steps: int, by_path: bool) -> list[int]:
    """[fused, refused, unseen] of one fusion in one of `steps` training steps.

    What only we see counts as a site where it is fused. Where it is refused it does not: a look-alike, such as the
    LayerNorm that was refused as an RMSNorm. After graph breaks Dynamo's paths begin at other modules: then, as for
    the loss, which is in no module, only the totals are compared.
    """
    counts: list[dict[str, int]] = [dict(found[name])]
    for seen in (backend.fused, backend.refused):
        counts.append({path: n // steps for (fusion, path), n in seen.items() if fusion == name})
    counted, fused, refused = counts if by_path else [{"": sum(c.values())} for c in counts]
    missing = {path: max(0, n - fused.get(path, 0)) for path, n in counted.items()}
    told = sum(min(n, refused.get(path, 0)) for path, n in missing.items())
    return [sum(fused.values()), told, sum(missing.values()) - told]
