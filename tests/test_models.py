"""Tiny Hugging Face models: one graph, every site fused, loss and every gradient as accurate as without us."""

import pytest
import torch
from _models import FUSIONS, SITES, batch, draws, tiny
from _training import assert_step_as_accurate
from fused_backend.compiler import explain


@pytest.mark.parametrize("family", SITES)
def test_every_site_is_fused(family):
    report = explain(tiny(family), **batch())
    fused = tuple(report.counts().get(name, (0, 0))[0] for name in FUSIONS)
    assert report.graph_count == 1 and report.graph_breaks == 0
    assert fused == SITES[family], str(report)
    assert not [d for d in report.decisions if d.status == "refused"], str(report)


@pytest.mark.parametrize("family", SITES)
def test_loss_logits_and_every_gradient(family):
    assert_step_as_accurate(tiny(family), draws())


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "glm4"])
def test_bfloat16(family):
    assert_step_as_accurate(tiny(family).to(torch.bfloat16), draws())
