"""Families that differ in how they write norms, rotations, gates and heads: right, and every site fused.

A sample of what `python bench/families.py` runs over all of them; those of test_models.py are not repeated.
"""

import pytest
import torch
import torch.nn.functional as F
from _census import census
from _families import build, families
from _verdict import FUSIONS, verdict
from fused_backend.patterns import swiglu
from torch import nn

# What is not fused, by fusion: [refused, unseen]. All else is.
SAMPLE: dict[str, dict[str, list[int]]] = {
    "bamba": {},  # Mamba-2: a norm gated before it
    "bart": {},  # a decoder of the older kind
    "bitnet": {},  # gated by a squared relu
    "deepseek_v2": {},  # complex numbers
    "deepseek_v3": {},  # from pairs to halves; latent attention, shared experts
    "ernie4_5": {},  # interleaved, tables repeated
    "exaone4": {},  # norms after the blocks
    "falcon_h1": {},  # logits and MLP with multipliers
    "falcon_mamba": {},  # vmap in the graph
    "gemma4_text": {},  # weightless norms; rows written in place before one
    "gpt_oss": {},  # half-width tables; limited gates, interleaved
    "gptj": {},  # partial, interleaved; a head with a bias
    "helium": {},
    "hunyuan_v1_dense": {},  # norms after the rotation
    "llama4_text": {},  # dense experts
    "minimax_m3_vl_text": {},  # limited gates
    "modernbert-decoder": {},  # erf-gelu, packed
    "nanochat": {},  # rotated backwards
    "olmo": {},
    "phi": {},
    "qwen3_next": {},  # gated delta net: a norm gated after it
    "recurrent_gemma": {},
    "vaultgemma": {},
}


def test_the_sample_is_of_what_transformers_has():
    known = families()
    assert not [family for family in SAMPLE if family not in known]


@pytest.mark.parametrize("family", SAMPLE)
def test_right_and_every_site_fused(family):
    built = build(family, least_layers=1)
    assert built.model is not None, built.why_not
    facts = verdict(built.model, draws=2, plain=False)
    assert not facts["census_error"] and not facts["fused_error"] and not facts["eager_error"], facts
    assert facts["wrong"] == [], facts
    assert facts["graphs"] == [1, 0], facts
    missed = {name: facts["sites"][name][1:] for name in FUSIONS if name != "layer_norm"}
    assert {name: m for name, m in missed.items() if any(m)} == SAMPLE[family], facts


def test_a_wrong_rewrite_is_seen(monkeypatch):
    """gelu computed where the model has silu: the loss hardly moves, every gradient does."""
    silu = next(idiom for idiom in swiglu.FUSION.idioms if idiom.name == "silu_gate")
    monkeypatch.setitem(silu.means, "activation", "gelu")
    facts = verdict(build("llama", least_layers=1).model, draws=1, plain=False)
    assert any("gate_proj" in wrong for wrong in facts["wrong"]), facts


class Everything(nn.Module):
    """A norm by its formula, one that is LayerNorm, a gate by an activation that no pattern has, a product that is no
    gate, a loss."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer_norm = nn.RMSNorm(8), nn.LayerNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x, labels):
        h = self.norm(x)
        h = h * (h.float().pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5
        h = self.layer_norm(h) + self.down(F.softplus(self.gate(h)) * self.up(h))
        h = h * torch.sigmoid(self.down(self.up(h)))
        return F.cross_entropy(self.head(h), labels)


def test_the_census_counts_what_modules_do():
    found = census(
        Everything(), {"x": torch.randn(7, 8) * torch.arange(1.0, 8)[:, None], "labels": torch.arange(7) % 5}
    )
    assert dict(found["rms_norm"]) == {"norm": 1, "": 1}
    assert dict(found["layer_norm"]) == {"layer_norm": 1}
    assert dict(found["swiglu"]) == {"": 1}
    assert dict(found["linear_cross_entropy"]) == {"": 1}
