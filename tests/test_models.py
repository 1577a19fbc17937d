"""Tiny Hugging Face models: one graph, every site fused, loss and every gradient as accurate as without us."""

import pytest
import torch
from _models import FUSIONS, SITES, draws, tiny
from _training import assert_step_as_accurate
from torch._dynamo.utils import counters


@pytest.mark.parametrize("family", SITES)
def test_every_site_is_fused_and_every_gradient_right(family):
    counters.clear()
    report = assert_step_as_accurate(tiny(family), draws()).report
    fused = tuple(report.counts().get(name, (0, 0))[0] for name in FUSIONS)
    assert report.graph_count == 1 and not counters["graph_break"]
    assert fused == SITES[family], str(report)
    assert not [d for d in report.decisions if d.status == "refused"], str(report)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "glm4"])
def test_bfloat16(family):
    assert_step_as_accurate(tiny(family).to(torch.bfloat16), draws())


EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_with_the_loss_that_balances_routers(family):
    """It is added to the other in place."""
    model = tiny(family, output_router_logits=True, router_aux_loss_coef=0.5, **EXPERTS[family])
    report = assert_step_as_accurate(model, draws()).report
    assert report.counts()["linear_cross_entropy"] == (1, 0)


MULTIPLIERS = {
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 4.0,
    },
    "cohere": {"logit_scale": 0.25},
    "minicpm3": {
        "scale_emb": 3.0, "scale_depth": 0.5, "dim_model_base": 16, "head_dim": None, "num_key_value_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MULTIPLIERS)
def test_multipliers_of_residuals_and_logits(family, dtype):
    model = tiny(family, **MULTIPLIERS[family]).to(dtype)
    report = assert_step_as_accurate(model, draws()).report
    assert not [d for d in report.decisions if d.status == "refused"], str(report)
    assert report.counts()["linear_cross_entropy"] == (1, 0) and report.counts()["swiglu"] == (2, 0)
