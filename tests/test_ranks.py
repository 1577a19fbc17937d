"""Ranks of a job plan by the same terms, whoever comes first, and never wait for each other."""

import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fused_backend.compiler import ranks
from fused_backend.compiler.cost import NOMINAL
from fused_backend.compiler.ranks import Terms, agreed
from torch.fx import symbolic_trace

TERMS = Terms(1000, 64_000, 0, NOMINAL)


@pytest.fixture
def as_rank(monkeypatch):
    """Ask as one rank of a job of two."""
    store = dist.HashStore()
    planned = {0: ranks._planned.copy(), 1: ranks._planned.copy()}
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def become(rank):
        monkeypatch.setattr(ranks, "job", lambda: (rank, 2))
        monkeypatch.setattr(ranks, "_planned", planned[rank])

    return become


def graph(size=4):
    traced = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU()))
    for node in traced.graph.nodes:
        node.meta["val"] = torch.empty(size)
    return traced.graph


def test_the_first_to_ask_decides(as_rank):
    other = Terms(1010, 63_000, 5, replace(NOMINAL, copy_bandwidth=1.0, host_bandwidth=None))
    as_rank(1)
    assert agreed(graph(), TERMS) == TERMS
    as_rank(0)
    assert agreed(graph(), other) == TERMS
    assert agreed(graph(8), other) == other  # alone with this graph, at once
    assert agreed(graph(), other) == other  # the same graph compiled again is another question
    as_rank(1)
    assert agreed(graph(), TERMS) == other


def test_a_rank_that_holds_more_plans_for_itself(as_rank):
    as_rank(0)
    agreed(graph(), TERMS)
    as_rank(1)
    much = replace(TERMS, base=TERMS.base + TERMS.budget // 64 + 1)
    assert agreed(graph(), much) == much


def test_without_a_store_each_plans_for_itself(as_rank, monkeypatch):
    def gone():
        raise RuntimeError("the store is gone")

    as_rank(0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", gone)
    assert agreed(graph(), TERMS) == TERMS


def test_one_process_asks_nobody():
    assert ranks.job() == (0, 1) and agreed(graph(), TERMS) is TERMS


def test_two_processes_make_one_plan(tmp_path):
    """Though their devices differ in speed."""
    path = {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
    command = [sys.executable, "-P", "-m", "_ranks", str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], env=os.environ | path) for rank in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    plans = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert plans[0] == plans[1] and "recompute" in plans[0]
