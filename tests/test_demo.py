"""The demo's parts that need no model: its text, its picture, its comparison."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
from _tree import ROOT


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "bench" / "demo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(losses: list[float], **changes) -> dict:
    facts = {"losses": losses, "median_ms": 1234.5, "first_step_extra_s": 6.7, "peak_bytes": 890 * 2**20}
    facts |= {"B": 2, "S": 256, "device": "CPU, 2 threads", "torch": "2.13.0", "lowering": None}
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
    assert "aot_eager" in text and "On a CPU" in text


def test_summary_warns_of_no_limit_on_a_gpu_under_inductor(demo):
    text = demo.summary(run([3.0], device="H200"), run([3.0], device="H200", lowering="inductor"))
    assert "aot_eager" not in text and "On a CPU" not in text and "allocated" in text


def test_a_nan_in_either_curve_is_the_largest_difference(demo):
    text = demo.summary(run([3.0, 2.0, 1.0]), run([3.0, float("nan"), 1.5], lowering="inductor"))
    assert "nan (step 2 of 3)" in text


def test_picture_is_written(demo, tmp_path):
    path = demo.draw(run([3.0, 2.5]), run([3.0, 2.4]), tmp_path / "loss.png")
    assert path.read_bytes().startswith(b"\x89PNG")
