"""_lora: which product over which buffer, and what rides along; each way as accurate as PEFT."""

import contextlib
import json

import bitsandbytes.functional as bnb
import pytest
import torch
from _adapted import BF16, F16, F32, GROUPS, ROWS, Case, Layers, Size, running, spy
from conftest import HAS_GPU
from fused_backend.kernels import _crossover as crossover
from fused_backend.kernels import _lora as lora
from fused_backend.kernels import _nf4 as nf4
from fused_backend.kernels import lora_nf4 as kernels


@pytest.fixture(params=["torch", "triton"])
def where(request):
    with running(request.param) as found:
        yield found


@pytest.fixture
def always_decoded(monkeypatch):
    """As where registers are the slower place to decode in, whatever the GPU."""
    monkeypatch.setattr(lora, "prefers_small", lambda *args: False)


@pytest.fixture
def triton():
    with running("triton") as found:
        yield found


@pytest.mark.parametrize("rank", [1, 8, 40, 130])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_rank(where, rank, dropout):
    """130 is more than the Triton kernels hold."""
    for case in (Case(F32, F32, F32, None, dropout), where.plain(dropout=dropout, bias="lora")):
        Layers(case, where.device, [(70, rank)], ROWS._replace(K=151)).judge()


@pytest.mark.usefixtures("always_decoded")
@pytest.mark.parametrize("bias", ["no-bias", "base", "lora"])
@pytest.mark.parametrize("group", ["gate-up", "qkv"])
def test_the_adapter_rides_along_forward(triton, monkeypatch, group, bias):
    """As more columns of the base product, where all the outputs together are wider than x."""
    taken = spy(monkeypatch, lora, "_forward_extended")
    Layers(triton.plain(bias=bias, group=group), triton.device, size=ROWS).judge()
    assert taken
    for other in (triton.plain(dropout=0.1), Case(F32, F32, F32), triton.plain(quant_type="none", nested=False)):
        taken.clear()
        triton.arguments(other, GROUPS[group]).outputs()
        assert not taken


@pytest.mark.usefixtures("always_decoded")
@pytest.mark.parametrize("bias", ["no-bias", "base"])
def test_the_adapter_rides_along_backward(triton, monkeypatch, bias):
    """As more rows of the base product, where one layer has fewer outputs than inputs."""
    taken = spy(monkeypatch, lora, "_dx_extended")
    Layers(triton.plain(bias=bias), triton.device, size=ROWS).judge()
    assert taken
    for other in (triton.plain(group="qkv"), triton.plain(dropout=0.1), Case(F32, F32, F32)):
        taken.clear()
        triton.arguments(other, GROUPS[other.group], ROWS).gradients()
        assert not taken


@pytest.mark.parametrize("group", ["one", "qkv", "bare"])
def test_few_tokens_are_multiplied_without_decoding(triton, monkeypatch, group):
    monkeypatch.setattr(lora, "prefers_small", lambda *args: True)
    forward, backward = (spy(monkeypatch, nf4, f"matmul_small{name}") for name in ("", "_transposed"))
    for case in (
        triton.plain(group=group, bias="base"),
        Case(F32, triton.low, F32, group=group, bias="base" if group == "bare" else "lora"),
        Case(triton.low, F32, triton.low, None, 0.0 if group == "bare" else 0.1, "fp4", False, group=group),
    ):
        forward.clear()
        backward.clear()
        Layers(case, triton.device, size=Size((45,), 64)).judge()
        assert len(forward) == len(backward) == len(GROUPS[group])


KIND = crossover.Kind(256, 128, "nf4", 64, True)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The calls that measure; what is remembered is forgotten, and kept in a file of the test's own."""
    monkeypatch.setattr(crossover, "_LIMITS", {})
    monkeypatch.setattr(crossover, "_path", lambda: tmp_path / "new" / "crossover.json")
    if not HAS_GPU:
        monkeypatch.setattr(crossover, "HAS_TRITON", True)
        monkeypatch.setattr(crossover, "device_name", lambda device: "a GPU")
        monkeypatch.setattr(crossover, "_measure", lambda *args: 32)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return spy(monkeypatch, crossover, "_measure")


def test_where_decoding_pays_is_measured_once(measured, monkeypatch):
    """For each device, dtype and kind of weight; the next process reads it."""
    ask = lambda dtype=BF16, kind=KIND: [  # noqa: E731
        crossover.prefers_small(torch.device("cuda", 0), kind, tokens, dtype) for tokens in (1, 16, 17, 32, 33, 64, 65)
    ]
    answers = ask()
    assert answers == sorted(answers, reverse=True)
    assert not answers[-1]
    assert HAS_GPU or answers == [True] * 4 + [False] * 3
    assert ask() == answers
    assert len(measured) == 1
    path = crossover._path()
    assert all(limit in (0, *crossover.TOKENS) for limit in json.loads(path.read_text()).values())
    monkeypatch.setattr(crossover, "_LIMITS", {})
    assert ask() == answers
    assert len(measured) == 1
    ask(F16)
    ask(kind=KIND._replace(nested=False))
    assert len(measured) == 3
    assert len(json.loads(path.read_text())) == 3
    monkeypatch.setattr(crossover, "_LIMITS", {})
    path.write_text("{ cut off")
    ask()
    assert len(measured) == 4


def test_what_is_not_measured(measured):
    """Where the register kernel is not an option, and what to say of it."""
    cuda = torch.device("cuda", 0)
    for device, tokens, dtype in ((torch.device("cpu"), 1, BF16), (cuda, 65, BF16), (cuda, 1, F32)):
        assert not crossover.prefers_small(device, KIND, tokens, dtype)
        said = kernels.choice(device, KIND[:2], KIND.quant_type, KIND.blocksize, KIND.nested, tokens, dtype)
        assert said == "decoded, then GEMM"
    assert not measured


# What only a GPU shows.

MODEL = {"one": [(1024, 16)], "qkv": [(2048, 16), (512, 16), (512, 8)], "gate-up": [(5632, 16), (5632, 64)]}


@pytest.mark.gpu
@pytest.mark.usefixtures("always_decoded")
@pytest.mark.parametrize("low", [BF16, F16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("group", MODEL)
def test_at_model_size(low, dropout, group, device, monkeypatch):
    forward, backward = spy(monkeypatch, lora, "_forward_extended"), spy(monkeypatch, lora, "_dx_extended")
    for case in (
        Case(low, low, low, None, dropout, bias="base"),
        Case(low, low, F32, low, dropout, bias="lora"),
        Case(F32, low, F32, low, dropout, "fp4", False),
        Case(low, low, F32, None, dropout, "none", False),
    ):
        forward.clear()
        backward.clear()
        Layers(case, device, MODEL[group], Size((515,), 2048)).judge()
        rides = case.quant_type != "none" and case.x == case.lora and case.out == case.x and not dropout
        assert bool(forward) == (rides and group != "one")
        assert bool(backward) == (rides and group == "one")


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0, 64])
@pytest.mark.parametrize("low", [BF16, F16], ids=str)
def test_few_tokens_either_way(low, limit, device, monkeypatch):
    monkeypatch.setattr(crossover, "_limit", lambda *args: limit)
    forward, backward = (spy(monkeypatch, nf4, f"matmul_small{name}") for name in ("", "_transposed"))
    for tokens in (1, 16, 64, 65):
        for dropout in (0.0, 0.1):
            case = Case(low, low, F32, low, dropout, bias="base")
            forward.clear()
            backward.clear()
            Layers(case, device, MODEL["qkv"], Size((tokens,), 2048, 64, 2)).judge()
            assert bool(forward) == bool(backward) == (tokens <= limit)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [64, 4096])
def test_decoded_as_bitsandbytes_does_on_a_gpu(dtype, nested, quant_type, blocksize, device):
    """Bit for bit; zeros of either sign are equal."""
    for shape in ((1024, 4096), (97, 192), (33, 66)):
        w = torch.randn(shape, device=device, dtype=dtype)
        codes, state = bnb.quantize_4bit(w, None, None, blocksize, nested, quant_type)
        more = (state.state2.code, state.state2.absmax, state.offset) if nested else ()
        q = nf4.Quantized(codes, state.absmax, more, shape, quant_type, blocksize)
        expected = bnb.dequantize_4bit(codes, state)
        assert torch.equal(nf4.decode(q, dtype), expected)
        assert torch.equal(nf4.decode_reference(q, dtype), expected)
