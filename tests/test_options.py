"""Options, the log line, strict mode, and what happens after an internal error."""

import logging

import pytest
import torch
import torch.nn.functional as F
from _block import Block, assert_same_gradients, compiled, data
from fused_backend.compiler import InternalError, RefusedError
from fused_backend.compiler import backend as backend_module
from fused_backend.compiler.options import Options, parse_bytes
from torch import nn


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory": 1}, "unknown option 'memory'.*memory_budget"),
        ({"fusions": "rms_norn"}, "unknown fusion 'rms_norn'.*did you mean 'rms_norm'"),
        ({"fusions": "all,rope"}, "unknown fusion 'all'.*alone"),
        ({"lowering": "inducto"}, "unknown lowering.*inductor"),
        ({"strict": 1}, "strict must be True or False"),
        ({"max_rewrites": -1}, "max_rewrites must be an integer"),
        ({"memory_budget": "20 gigs"}, "memory_budget must be"),
        ({"memory_budget": -1}, "memory_budget must be"),
        ({"host_budget": "much"}, "host_budget must be"),
        ({"host_budget": True}, "host_budget must be"),
        ({"respect_checkpointing": 1}, "respect_checkpointing must be True or False"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(Exception, match=message) as caught:
        torch.compile(nn.Linear(2, 2), backend="fused", options=options)(torch.randn(1, 2))
    assert isinstance(caught.value, ValueError) or isinstance(
        getattr(caught.value, "inner_exception", None), ValueError
    )


def test_budget_strings():
    assert parse_bytes("20GiB") == 20 * 2**30 and parse_bytes(5) == 5 and parse_bytes("1.5 MB") == 1_500_000
    assert parse_bytes("auto") is None
    for bad in ("", "GiB", "-1GiB", "0", 0, True, 1.5, "20 XB"):
        with pytest.raises(ValueError, match="memory_budget must be"):
            parse_bytes(bad)


def test_fusions_option_selects():
    names = ["rms_norm", "rope", "swiglu"]
    assert Options(fusions="all").enabled(names) == names
    assert Options(fusions="none").enabled(names) == []
    assert Options(fusions="rms_norm,rope").enabled(names) == ["rms_norm", "rope"]
    assert Options(fusions="-rope").enabled(names) == ["rms_norm", "swiglu"]


def test_max_rewrites_bisects(caplog):
    x, t = data()
    for limit in range(4):
        torch._dynamo.reset()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="fused_backend"):
            compiled(Block(), max_rewrites=limit)(x, t)
        assert sum(int(p.split("/")[0].split()[-1]) for p in caplog.messages[0].split(",")) == limit


def test_one_info_line_per_graph_and_nothing_on_stdout(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="fused_backend"):
        compiled(Block())(*data())
    assert [r.message for r in caplog.records if r.name == "fused_backend"] == [
        "fused linear_cross_entropy 1/1, rms_norm 1/1, swiglu 1/1"
    ]
    assert capsys.readouterr().out == ""


def test_strict_raises_a_refusal():
    class Odd(Block):
        def body(self, x):
            gate = self.gate(x)
            return x + self.down(F.silu(gate) * gate)

    with pytest.raises(Exception, match="strict=True: swiglu refused") as caught:
        compiled(Odd(), strict=True)(*data())
    assert isinstance(caught.value, RefusedError) or isinstance(caught.value.inner_exception, RefusedError)


def test_internal_error_compiles_the_graph_unrewritten(monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise KeyError("planted")

    monkeypatch.setattr(backend_module, "rewrite_module", broken)
    model = Block()
    with caplog.at_level(logging.WARNING, logger="fused_backend"):
        assert_same_gradients(model, compiled(model), *data())
    assert len([r for r in caplog.records if r.name == "fused_backend"]) == 1 and "please report" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(Exception, match="planted") as caught:
        compiled(model, strict=True)(*data())
    assert isinstance(caught.value, InternalError) or isinstance(caught.value.inner_exception, InternalError)
