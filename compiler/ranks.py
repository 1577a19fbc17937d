"""The same plan on every rank of a job: what a plan depends on beside the graph, agreed on without waiting.

The rank that plans a graph first leaves its terms in the job's key-value store, and the others plan by them. Nobody
waits: a rank that compiles alone, for a batch as long as no other rank has seen, cannot hang the job.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass

from torch.fx import Graph
from torch.utils._pytree import tree_leaves

from .cost import Ceilings, from_plain, nbytes_of, plain

log = logging.getLogger("fused_backend")


@dataclass(frozen=True)
class Terms:
    """What a plan depends on beside the graph.

    base         bytes that are there whatever is planned
    budget       bytes, those included; None: no budget
    host_budget  bytes of host memory that values may be sent to; 0: none are
    """

    base: int
    budget: int | None
    host_budget: int
    ceilings: Ceilings


_NEARLY = 64  # of a budget, one part: how much more than agreed a rank may hold
_planned: Counter[str] = Counter()  # graphs planned in this process: the same one again is another agreement


def job() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    import torch.distributed as dist

    there = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if there else (0, 1)


def agreed(graph: Graph, terms: Terms) -> Terms:
    """The terms of the rank that asked first about this graph; its own where no others are, or where these would not do
    here because this rank holds more."""
    if job()[1] == 1:
        return terms
    from torch.distributed import PrefixStore, distributed_c10d

    name = digest(graph)
    _planned[name] += 1
    own = json.dumps(asdict(terms) | {"ceilings": plain(terms.ceilings)})
    try:
        store = PrefixStore("fused_backend", distributed_c10d._get_default_store())
        told = json.loads(store.compare_set(f"{name} {_planned[name]}", "", own))
    except (RuntimeError, ValueError) as error:  # a store that cannot, or is gone
        log.info("this rank plans for itself: %s", error)
        return terms
    first = Terms(**told | {"ceilings": from_plain(told["ceilings"])})
    if terms.base > first.base + (first.budget or 0) // _NEARLY:
        log.info("this rank holds %d bytes, the first had %d: it plans for itself", terms.base, first.base)
        return terms
    return first


def digest(graph: Graph) -> str:
    """Of what is computed, on which shapes."""
    found = hashlib.sha256()
    for node in graph.nodes:
        sizes = [(v.dtype, tuple(map(str, v.shape)), nbytes_of(v)) for v in tree_leaves(node.meta.get("val"))
                 if hasattr(v, "shape")]  # fmt: skip
        found.update(f"{node.name} {node.target} {node.args} {node.kwargs} {sizes}\n".encode())
    return found.hexdigest()
