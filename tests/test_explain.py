"""The report: what it holds, how it prints, and that asking for it changes nothing."""

import json

import torch
import torch.nn.functional as F
from _block import OPTIONS, Block, data
from _models import batch, tiny
from _training import step
from fused_backend.compiler import explain, fused


def test_a_refused_site_tells_why_and_where():
    class Odd(Block):
        def body(self, x):
            gate = self.gate(x)
            return x + self.down(F.silu(gate) * gate)

    report = explain(Odd(), *data())
    (refused,) = [d for d in report.decisions if d.status == "refused"]
    assert refused.fusion == "swiglu" and "same value" in refused.reason
    assert refused.source.startswith("tests/test_explain.py:")
    assert report.counts() == {"linear_cross_entropy": (1, 0), "swiglu": (0, 1)}
    assert "same value" in str(report) and "swiglu 0/1" in str(report)


def test_decisions_name_modules_and_saved_bytes():
    report = explain(tiny("llama"), **batch())
    norms = [d for d in report.decisions if d.fusion == "rms_norm"]
    assert {d.where for d in norms} >= {"model.layers.0.input_layernorm", "model.norm"}
    assert all(d.saved_bytes == 2 * 16 * 64 * 4 for d in norms)
    assert "model.layers.*.input_layernorm" in str(report)


def test_a_report_is_plain_data():
    report = explain(Block(), *data())
    text = json.dumps(report.to_dict())
    assert json.loads(text)["counts"]["rms_norm"] == [1, 0]
    assert report.graph_count == 1 and report.graph_breaks == 0 and report.plan is None


def test_explain_looks_through_a_compiled_model_and_leaves_it_compiled():
    model, inputs = tiny("llama"), batch()
    calls = []

    def counting(gm, example_inputs):
        calls.append(1)
        return fused(gm, example_inputs, options=OPTIONS)

    model.compile(backend=counting)
    step(model, inputs)
    before = torch.get_rng_state()
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            assert explain(model, **inputs).counts()["rms_norm"] == (5, 0)
    assert torch.equal(torch.get_rng_state(), before)
    step(model, inputs)
    assert len(calls) == 1


def test_explaining_often_leaves_room_to_compile():
    model, calls = Block(), []

    def counting(gm, example_inputs):
        calls.append(1)
        return fused(gm, example_inputs, options=OPTIONS)

    model.compile(backend=counting)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in range(2, 6):
            explain(model, *data(2, length))
        model(*data(2, 5))
        model(*data(2, 6))
    assert len(calls) == 2


def test_buffers_are_left_as_they_were():
    model = torch.nn.BatchNorm1d(4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    explain(model, torch.randn(8, 4))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
