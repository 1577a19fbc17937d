"""Values sent to the host and brought back: the same bits, in less memory."""

import functools
from dataclasses import replace

import pytest
import torch
from _alive import count, named
from _models import tiny
from _stack import Stack, assert_same_under_budgets, data
from fused_backend.compiler import budget, memory
from fused_backend.compiler.budget import Request
from fused_backend.compiler.cost import NOMINAL
from fused_backend.compiler.memory import Step
from fused_backend.kernels import _offload
from fused_backend.kernels._offload import arrived, host_nbytes, offload, offloaded, reload
from test_memory import AGAIN, KEEP, chain

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
AWAY = "offload"


# --- The operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.transpose(0, 1), lambda t: t[:0]])
def test_there_and_back(device, make):
    """Many at once, while what they were made from is overwritten and its memory used again."""
    given = [make(torch.randn(300, 200, device=device)) for _ in range(20)]
    expected = [x.clone() for x in given]
    hosts = []
    for i in range(len(given)):
        ticket = offload(given[i])
        hosts.append(offloaded(ticket, given[i]))
        given[i].zero_()
        given[i] = None
    tickets = [reload(host, device) for host in hosts]
    back = [arrived(ticket, host, device) for ticket, host in zip(tickets, hosts, strict=True)]
    for x, host, want in zip(back, hosts, expected, strict=True):
        assert x.device == want.device and host.device == CPU and x.stride() == want.stride()
        assert host.is_pinned() == (device.type == "cuda")
        assert torch.equal(x, want)
    assert not _offload._under_way


@pytest.mark.parametrize("device", DEVICES)
def test_host_memory_is_used_again(device):
    """By the next step, though the host runs ahead; not while somebody still holds a tensor there."""
    _offload._free.clear()
    before = len(_offload._used)
    x = [torch.randn(2**20, device=device) for _ in range(3)]
    kept = None
    for step in range(6):
        hosts = [offloaded(offload(v + step), v) for v in x]
        back = [arrived(reload(host, device), host, device) for host in hosts]
        assert all(torch.equal(b, v + step) for b, v in zip(back, x, strict=True)) or device.type == "cuda"
        kept = kept or (hosts[0], hosts[0].clone())
        del hosts
        if step == 5:
            assert all(torch.equal(b, v + step) for b, v in zip(back, x, strict=True))
    assert kept is not None and torch.equal(*kept)
    (blocks,) = _offload._free.values()
    assert len(blocks) == 3 and len(_offload._used) == before + 1  # three at a time, and one that is held
    del kept
    assert len(blocks) == 4 and len(_offload._used) == before


def test_shapes_without_running():
    x = torch.empty(3, 5, device="meta").t()
    with torch._subclasses.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.empty(5, 3).t())
        host = offloaded(offload(x), x)
        assert host.shape == x.shape and host.stride() == x.stride() and host.device == CPU
        assert arrived(reload(host, CPU), host, CPU).stride() == x.stride()


def test_pinned_memory_comes_in_powers_of_two():
    assert [host_nbytes(n) for n in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]


# --- When copies begin and end ---------------------------------------------------------------------------------------


def steps(bandwidth, **choices):
    """Of `chain` (a, b, c of 400 bytes; the backward reads c, b, a, x), each call taking a second."""
    made = chain()
    work = replace(
        made.part,
        forward=tuple(replace(op, seconds=1.0) for op in made.part.forward),
        backward=tuple(replace(op, seconds=1.0) for op in made.part.backward),
    )
    picked = [choices.get(v.name, KEEP) for v in made.values]
    names = [v.name for v in made.values]

    def told(found: list[Step]) -> list[str]:
        return [f"{s.kind} {names[s.index]}" if s.kind in ("store", "load") else str(s.index) for s in found]

    peaks = work.peaks(picked, keep_freed=True, host_bandwidth=bandwidth)
    return told(work.forward_steps(picked, bandwidth)), told(work.backward_steps(picked, bandwidth)), peaks


def test_a_copy_is_given_the_time_it_takes():
    # One second each: a's ends while b is made, b's while c is, and they come back one call ahead.
    forward, backward, peaks = steps(400.0, sin=AWAY, cos=AWAY)
    assert forward == ["0", "1", "store sin", "2", "store cos", "3"]
    assert backward == ["load cos", "0", "load sin", "1", "2", "3"]
    # a and b, then b and c; backward: a, b and two gradients, beside the loss.
    assert peaks == (800, 1604)


def test_copies_run_one_after_the_other():
    # Two seconds each: b's copy waits for a's, and a's way back for b's.
    forward, backward, _ = steps(200.0, sin=AWAY, cos=AWAY)
    assert forward == ["0", "1", "2", "store sin", "3", "store cos"]
    assert backward == ["load cos", "load sin", "0", "1", "2", "3"]


def test_what_is_made_again_may_read_what_comes_back():
    _, backward, _ = steps(400.0, sin=AWAY, cos=AGAIN, exp=AGAIN)
    assert backward == ["load sin", "1", "2", "0", "1", "2", "3"]


# --- In a model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sending(monkeypatch):
    """A CPU that plans as if there were a host to send to, even the smallest values, and much time to do it."""
    given = replace(NOMINAL, host_bandwidth=1e15)
    monkeypatch.setattr(budget, "ceilings", lambda device: given)
    monkeypatch.setattr(memory, "LEAST_SENT", 1)
    monkeypatch.setattr(Request, "host_bytes_on", lambda self, device: 2**30 if self.host_budget is None else 0)


def test_the_same_bits_and_less_made_again(watch, sending):
    model, x = Stack(3), data()
    sweep = assert_same_under_budgets(model, lambda m: m(x), watch, steps=4, host_budget=None)
    tightest = sweep.halves[0][-1]
    sent = count(tightest.forward, "fused_backend::offload")
    assert sent == count(tightest.backward, "fused_backend::arrived") > 0
    assert not _offload._under_way
    without = assert_same_under_budgets(model, lambda m: m(x), watch, steps=4)
    assert len(tightest.again()) < len(without.halves[0][-1].again())
    assert sweep.budgets[0][-1] < without.budgets[0][-1]


def test_dropout_masks_travel_too(watch, sending):
    model, x = Stack(2, dropout=functools.partial(torch.nn.functional.dropout, p=0.1)), data()
    sweep = assert_same_under_budgets(model, lambda m: m(x), watch, host_budget=None)
    assert any(named(n) == "fused_backend::offload" for _, half in sweep.pairs() for n in half.forward.graph.nodes)


def test_the_hosts_budget_is_kept(watch, sending, monkeypatch):
    model, x = Stack(3), data()
    for host in (0, 10_000, 100_000):
        monkeypatch.setattr(Request, "host_bytes_on", lambda self, device, host=host: host)
        sweep = assert_same_under_budgets(model, lambda m: m(x), watch, host_budget=None)
        total = 0
        for _, half in sweep.pairs():
            sent = [n.args[0].meta["val"].nbytes for n in half.forward.graph.nodes if n.target is offload]
            assert sum(map(host_nbytes, sent)) <= host
            total += len(sent)
        assert bool(total) == bool(host)


# --- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_budgets_on_a_gpu(lowering):
    """Measured peaks stay below every budget. (Gradients keep their bits on a CPU: on a GPU torch's own backwards, of
    embeddings and of attention, add in no fixed order.)"""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, "use_cache": False}  # fmt: skip
    model = tiny("llama", **sizes).to("cuda", torch.bfloat16)
    ids = torch.randint(3, 128, (8, 2048), device="cuda")
    want, peaks = None, []
    for share in (None, 1.0, 0.85, 0.7):
        torch._dynamo.reset()
        options = {"lowering": lowering, "strict": True}
        budget = int(peaks[0] * share / (1 - 0.03)) + 1 if share is not None else None
        model.compile(backend="fused", options=options | ({} if budget is None else {"memory_budget": budget}))
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        got = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        want = want or got
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02 * theirs.abs().max().item())
        assert budget is None or peaks[-1] <= budget
    assert peaks[-1] <= 0.73 * peaks[0] and not _offload._under_way
