"""Families that differ in how they write norms, rotations, gates and heads: right, and every site fused.

A sample of what `python bench/families.py` runs over all of them; those of test_models.py are not repeated.
"""

import pytest
from _families import build, families
from _verdict import FUSIONS, verdict

# What is not fused, by fusion: [refused, unseen]. All else is.
SAMPLE: dict[str, dict[str, list[int]]] = {
    "bamba": {},  # Mamba-2: a norm gated before it
    "bart": {},  # a decoder of the older kind
    "bitnet": {"swiglu": [0, 1]},  # gated by a squared relu
    "deepseek_v2": {},  # complex numbers
    "deepseek_v3": {},  # from pairs to halves; latent attention, shared experts
    "ernie4_5": {},  # interleaved, tables repeated
    "exaone4": {},  # norms after the blocks
    "falcon_h1": {},  # logits and MLP with multipliers
    "falcon_mamba": {},  # vmap in the graph
    "gemma4_text": {},  # weightless norms; rows written in place before one
    "gpt_oss": {"swiglu": [0, 2]},  # half-width tables; clamped gates
    "gptj": {},  # partial, interleaved; a head with a bias
    "helium": {},
    "hunyuan_v1_dense": {},  # norms after the rotation
    "llama4_text": {},  # dense experts
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
