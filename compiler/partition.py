"""Where AOTAutograd asks what to save for the backward: the seam that the checkpoint planner takes.

For now the answer is torch's own min-cut. The operators of this package carry their gradients, so what they save is
decided by them and only the rest of the graph is partitioned.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule


def partition(gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph into forward and backward."""
    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


class Partitioner(CustomPartitionerFn):
    """`partition` in the form Inductor's configuration takes."""

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Part of Inductor's cache key: a changed operator or pattern must not meet a graph cached before it."""
        return source_hash()


@functools.cache
def source_hash() -> str:
    """Hash of all source files of the package and of the torch version."""
    digest = hashlib.sha256(torch.__version__.encode())
    root = pathlib.Path(__file__).resolve().parent.parent
    for folder in ("compiler", "patterns", "kernels", "derivations"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
