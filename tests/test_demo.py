"""The demo's parts: its text, its picture, its comparison, and its adapters on a tiny model."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from _models import batch, tiny
from _tree import ROOT
from fused_backend.compiler import explain
from fused_backend.compiler.fusions import fusion_names


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "bench" / "demo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(losses: list[float], **changes) -> dict:
    facts = {"losses": losses, "median_ms": 1234.5, "first_step_extra_s": 6.7, "peak_bytes": 890 * 2**20}
    facts |= {"B": 2, "S": 256, "examples": 2, "method": "qlora", "device": "CPU, 2 threads", "torch": "2.13.0"}
    facts |= {"lowering": None}
    return facts | {"graphs": 0, "recompiled": 0} | changes


def test_texts_are_distinct_and_in_a_fixed_order(demo):
    first = list(itertools.islice(demo.docstrings(), 300))
    assert len(set(first)) == 300
    assert first == list(itertools.islice(demo.docstrings(), 300))


def test_summary_gives_the_largest_difference_and_says_what_did_not_run(demo):
    eager = run([3.0, 2.5, 2.0])
    fused = run([3.0, 2.501, 2.0002], lowering="aot_eager", graphs=1, recompiled=2)
    text = demo.summary(eager, fused)
    assert "loss 3.0000 → 2.0000" in text and "0.001 (step 2 of 3)" in text
    assert "1 / 2" in text and "1234.5" in text and "890" in text
    assert "aot_eager" in text and "On a CPU" in text and "the same 512 tokens" in text
    assert text.startswith("qlora on CPU, 2 threads")


def test_summary_warns_of_no_limit_on_a_gpu_under_inductor(demo):
    where = {"device": "H200", "examples": 16}
    text = demo.summary(run([3.0], **where), run([3.0], **where, lowering="inductor"))
    assert "aot_eager" not in text and "the same" not in text and "On a CPU" not in text and "allocated" in text


def test_a_nan_in_either_curve_is_the_largest_difference(demo):
    text = demo.summary(run([3.0, 2.0, 1.0]), run([3.0, float("nan"), 1.5], lowering="inductor"))
    assert "nan (step 2 of 3)" in text


def test_picture_is_written(demo, tmp_path):
    path = demo.draw(run([3.0, 2.5]), run([3.0, 2.4]), tmp_path / "loss.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_qlora_trains_adapters_on_double_quantised_nf4_weights(demo):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = demo.with_adapters(tiny("llama"), "qlora")
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 2 * len(demo.PROJECTIONS)
    states = [layer.weight.quant_state for layer in layers]
    assert all((s.quant_type, s.blocksize, s.nested) == ("nf4", 64, True) for s in states)
    assert len(trained(model)) == 2 * 2 * len(demo.PROJECTIONS) and all("lora_" in name for name in trained(model))
    assert type(model.get_base_model().lm_head) is torch.nn.Linear


@pytest.mark.parametrize("method", ["qlora", "lora"])
def test_every_adapted_layer_is_fused(demo, method):
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    model = demo.with_adapters(tiny("llama"), method)
    report = explain(model, **batch())
    assert (report.graph_count, report.graph_breaks) == (1, 0), str(report)
    if "lora_nf4" in fusion_names():
        assert report.counts()["lora_nf4"] == (2 * len(demo.PROJECTIONS), 0), str(report)
    refused = [d for d in report.decisions if d.status == "refused"]
    assert not refused, str(report)


def test_full_training_changes_nothing_of_the_model(demo):
    model = tiny("llama")
    assert demo.with_adapters(model, "full") is model and trained(model) == {n for n, _ in model.named_parameters()}
