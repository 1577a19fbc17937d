"""One rank of a job of two: a step under a memory budget; `python -m _ranks FOLDER RANK`, see test_ranks.py."""

import os
import pathlib
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from _stack import Stack, compiled, data
from fused_backend.compiler import BudgetError, budget
from fused_backend.compiler.cost import NOMINAL
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel


def main(folder: str, rank: int) -> None:
    """Writes what is planned, and the gradients, into a file named as the rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/job", rank=rank, world_size=2)
    # To one rank products are free, to the other all that costs anything: they would make other values again.
    flops = {dtype: rate * (1e9, 1e-9)[rank] for dtype, rate in NOMINAL.matmul_flops.items()}
    rates = replace(NOMINAL, matmul_flops=flops, host_bandwidth=None)
    budget.ceilings = lambda device: rates
    summary, plans = budget.summary, []

    def spy(joint, answer, chosen, *rest):
        plans.append(sorted((node.name, what) for node, what in chosen.items()))
        return summary(joint, answer, chosen, *rest)

    budget.summary = spy
    torch.manual_seed(0)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1  # several buckets for a model of this size
    model = DistributedDataParallel(Stack(3), bucket_cap_mb=0.01)
    try:
        compiled(model, "1GiB")(data())
        raise AssertionError("buckets were planned one by one")
    except (BudgetError, BackendCompilerFailed) as error:
        assert "optimize_ddp = False" in str(error), error
    torch._dynamo.config.optimize_ddp = False
    compiled(model, 300_000)(data()).backward()
    gradients = [p.grad.sum().item() for p in model.parameters()]
    (pathlib.Path(folder) / str(rank)).write_text(repr((plans, gradients)))
    dist.barrier()
    os._exit(0)  # taking gloo and DDP down in order sometimes never ends


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
