"""Predicted seconds of the nodes of joint graphs, against what is counted by hand."""

import json
import operator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from _adapted import spy
from _block import Block, data
from fused_backend.compiler import cost
from fused_backend.compiler.cost import NOMINAL, nbytes_of, seconds
from fused_backend.kernels import linear_cross_entropy, lora_nf4, swiglu  # noqa: F401
from fused_backend.kernels._op import BYTES_MOVED
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

aten = torch.ops.aten
OPS = torch.ops.fused_backend
# Round numbers, and no launch, so that times can be counted by hand.
PLAIN = cost.Ceilings(1e9, {torch.bfloat16: 4e9, torch.float32: 2e9, torch.float64: 1e9}, None, 0.0)
# No rate limits: what is left is launches.
LAUNCHES = cost.Ceilings(float("inf"), {torch.float32: float("inf")}, None, 1.0)


def joint(fn, *inputs, dynamic=False) -> list[torch.fx.GraphModule]:
    """The joint graphs of `fn`, as a planner is given them."""
    graphs = []

    def look(gm, *args, **kwargs):
        graphs.append(gm)
        return min_cut_rematerialization_partition(gm, *args, **kwargs)

    backend = aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=look)
    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    return graphs


def calls(gm, *targets):
    found = [n for n in gm.graph.nodes if n.target in targets]
    assert found, targets
    return found


def traced(fn, *inputs):
    """Without gradients: the graph of aten calls that `fn` makes."""
    return make_fx(fn, tracing_mode="fake")(*inputs)


def predicted(gm, ceilings=PLAIN):
    return sum(seconds(n, ceilings) for n in gm.graph.nodes)


# --- one node --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_product_takes_its_flops_over_the_peak_of_its_dtype(dtype):
    x, w = torch.randn(96, 64, dtype=dtype, requires_grad=True), torch.randn(64, 80, dtype=dtype, requires_grad=True)
    (gm,) = joint(lambda x, w: x @ w, x, w)
    products = calls(gm, aten.mm.default)
    fast = replace(PLAIN, copy_bandwidth=1e15)
    assert len(products) == 3
    assert [seconds(n, fast) for n in products] == [2 * 96 * 64 * 80 / PLAIN.peak(dtype)] * 3
    slow = replace(PLAIN, copy_bandwidth=1e3)
    elements = 96 * 64 + 64 * 80 + 96 * 80
    assert [seconds(n, slow) for n in products] == [elements * dtype.itemsize / 1e3] * 3
    assert seconds(products[0], replace(fast, launch_seconds=5.0)) == 5.0 + seconds(products[0], fast)


def test_a_dtype_that_was_not_measured():
    assert PLAIN.peak(torch.float16) == PLAIN.peak(torch.int8) == PLAIN.peak(torch.float8_e4m3fn) == 4e9
    assert PLAIN.peak(torch.complex64) == 2e9
    assert hash(PLAIN) and replace(PLAIN, matmul_flops={torch.float32: 1.0}) != PLAIN


def test_our_operators_by_their_own_formulas():
    gate, up = (torch.randn(5, 6, requires_grad=True) for _ in range(2))
    (gm,) = joint(lambda gate, up: OPS.swiglu(gate, up, "silu"), gate, up)
    one = 5 * 6 * 4
    assert [seconds(n, PLAIN) for n in calls(gm, OPS.swiglu.default)] == [3 * one / 1e9]
    assert [seconds(n, PLAIN) for n in calls(gm, OPS.swiglu_bwd.default)] == [5 * one / 1e9]

    x, w, target = torch.randn(7, 8, requires_grad=True), torch.randn(90, 8), torch.randint(90, (7,))
    rest = (None, target, "mean", -100, 0.0, 1.0, 0.0, True, False, False)
    (gm,) = joint(lambda x, w: OPS.linear_cross_entropy(x, w, *rest)[0], x, w)
    (node,) = calls(gm, OPS.linear_cross_entropy.default)
    moved = BYTES_MOVED[OPS.linear_cross_entropy.default](x, w, *rest)
    assert seconds(node, PLAIN) == max(moved / 1e9, 2 * 2 * 7 * 90 * 8 / 2e9)
    assert seconds(node, replace(PLAIN, copy_bandwidth=1e15)) == 2 * 2 * 7 * 90 * 8 / 2e9


def test_a_product_with_adapters_multiplies_in_its_base_dtype():
    """float32 activations and adapters around bfloat16 products."""
    x, w, a, b = torch.randn(4, 16), torch.randn(24, 16).bfloat16(), torch.randn(2, 16), torch.randn(24, 2)
    dtypes = torch.bfloat16, torch.float32, torch.float32
    args = [x, [w], [], [], [], [a], [b], [], [24], [2.0], 0.0, "none", 0, *dtypes]
    gm = traced(lambda x, w, a, b: OPS.lora_linear(x, [w], [], [], [], [a], [b], *args[7:]), x, w, a, b)
    (node,) = calls(gm, OPS.lora_linear.default)
    flops = flop_registry[OPS.lora_linear](*args)
    assert flops > 0
    assert seconds(node, replace(PLAIN, copy_bandwidth=1e15)) == flops / 4e9


ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


@pytest.mark.parametrize("grouped", [False, True])
def test_attention(grouped):
    """As torch counts it for CUDA, and with fewer heads of keys as many products as there are heads of queries."""
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (5, 7, 7))
    (gm,) = joint(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v)
    forward, backward = (calls(gm, op)[0] for op in ATTENTION)
    if grouped:
        with forward.meta["val"][0].fake_mode:
            for node in {*forward.all_input_nodes[1:3], *backward.all_input_nodes[2:4]}:
                node.meta["val"] = torch.empty(2, 2, 7, 8)
    fast = replace(PLAIN, copy_bandwidth=1e15)
    shapes = q.shape, k.shape, v.shape
    theirs = flop_registry[aten._scaled_dot_product_flash_attention](*shapes, out_val=None)
    theirs_backward = flop_registry[aten._scaled_dot_product_flash_attention_backward](q.shape, *shapes, out_val=None)
    assert theirs == 4 * 2 * 4 * 5 * 7 * 8
    assert seconds(forward, fast) == theirs / 2e9
    assert seconds(backward, fast) == theirs_backward / 2e9
    dy, narrow = q[..., :6], v[..., :6]
    theirs = flop_registry[aten._scaled_dot_product_flash_attention_backward](
        dy.shape, q.shape, k.shape, narrow.shape, out_val=None
    )
    assert cost._attention_backward_flops(dy, q, k, narrow) == theirs


def test_a_formula_that_refuses_leaves_the_bytes(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError

    gm = traced(torch.mm, torch.randn(6, 5), torch.randn(5, 4))
    (node,) = calls(gm, aten.mm.default)
    for registry in ({aten.mm: refuse}, {}):
        monkeypatch.setattr(cost, "flop_registry", registry)
        assert seconds(node, PLAIN) == 4 * (30 + 20 + 24) / 1e9


def test_what_only_renames_is_free():
    def views(x):
        y = x.view(6, 4).t()[1:].unsqueeze(0).expand(3, 3, 6)
        first, second = y.split([1, 2], dim=1)
        return first.detach(), second, torch.ops.aten._unsafe_view(x, [24]), torch.ops.aten.alias(x), x.new_empty(9)

    gm = traced(views, torch.randn(4, 6))
    assert calls(gm, operator.getitem) and len(gm.graph.nodes) > 10
    assert predicted(gm, NOMINAL) == 0


def test_a_lookup_reads_only_its_rows():
    table, index = torch.randn(1000, 8), torch.tensor([3, 1, 4])
    gm = traced(lambda table, index: F.embedding(index, table), table, index)
    assert predicted(gm) == (2 * 3 * 8 * 4 + 3 * 8) / 1e9


# --- pointwise nodes -------------------------------------------------------------------------------------------------

SIZE = 40 * 30 * 4


def test_a_chain_is_read_once_and_written_once():
    gm = traced(lambda x: (x.sin() * 2).to(torch.float64), torch.randn(40, 30))
    sine, twice, cast = calls(gm, aten.sin.default, aten.mul.Tensor, aten._to_copy.default)
    assert [seconds(n, PLAIN) for n in (sine, twice, cast)] == [SIZE / 1e9, 0.0, 2 * SIZE / 1e9]
    assert [seconds(n, LAUNCHES) for n in (sine, twice, cast)] == [0.0, 0.0, 1.0]
    copy = traced(torch.clone, torch.randn(40, 30))
    assert predicted(copy) == 2 * SIZE / 1e9 and predicted(copy, LAUNCHES) == 1
    assert predicted(gm, NOMINAL) < 3 * predicted(copy, NOMINAL)


def test_views_between_pointwise_nodes_do_not_part_them():
    gm = traced(lambda x: x.sin().t().view(-1, 40)[:, None].cos(), torch.randn(40, 30))
    assert len(calls(gm, aten.t.default, aten.view.default, aten.unsqueeze.default)) == 3
    assert predicted(gm, LAUNCHES) == 1 and predicted(gm) == 2 * SIZE / 1e9


def test_what_a_product_reads_is_written_and_what_it_makes_is_read():
    gm = traced(lambda x, w: (x.sin() @ w).cos(), torch.randn(40, 30), torch.randn(30, 30))
    sine, cosine = calls(gm, aten.sin.default, aten.cos.default)
    assert seconds(sine, PLAIN) == seconds(cosine, PLAIN) == 2 * SIZE / 1e9
    assert predicted(gm, LAUNCHES) == 3


def test_what_several_read_is_read_again_by_each():
    gm = traced(lambda x: (lambda y: (y.cos(), y.exp()))(x.sin()), torch.randn(40, 30))
    sine, *others = calls(gm, aten.sin.default, aten.cos.default, aten.exp.default)
    assert seconds(sine, PLAIN) == SIZE / 1e9
    assert [seconds(n, PLAIN) for n in others] == [2 * SIZE / 1e9] * 2


def test_halves_swapped_in_one_kernel():
    """As a rotary embedding does: x is read in two parts and a whole is written."""
    gm = traced(lambda x: torch.cat((-x[:, 15:], x[:, :15]), -1), torch.randn(40, 30))
    assert predicted(gm) == 2 * SIZE / 1e9 and predicted(gm, LAUNCHES) == 1


def test_a_broadcast_input_is_read_at_its_own_size():
    gm = traced(lambda x, w: x * w.expand(40, 30), torch.randn(40, 30), torch.randn(30))
    assert predicted(gm) == (2 * SIZE + 30 * 4) / 1e9


# --- whole graphs ----------------------------------------------------------------------------------------------------


def layer(x, w):
    return torch.sin(F.rms_norm(x, (x.shape[-1],)) @ w).sum(-1)


def test_symbolic_sizes_count_as_their_hints_and_stay_symbolic():
    w = torch.randn(8, 12, requires_grad=True)
    x = torch.randn(6, 8, requires_grad=True)
    (fixed,) = joint(layer, x, w, dynamic=False)
    torch._dynamo.mark_dynamic(x, 0)
    (symbolic,) = joint(layer, x, w)
    value = next(n.meta["val"] for n in symbolic.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    assert isinstance(value.shape[0], torch.SymInt)
    env = value.fake_mode.shape_env
    known, frozen = len(env.guards), dict(env.replacements)
    assert {nbytes_of(n.meta["val"]) for n in symbolic.graph.find_nodes(op="placeholder")} >= {6 * 8 * 4, 8 * 12 * 4}
    assert predicted(symbolic) == pytest.approx(predicted(fixed)) != 0
    assert (len(env.guards), env.replacements) == (known, frozen)


def test_our_operators_with_symbolic_sizes():
    gate, up = (torch.randn(5, 6, requires_grad=True) for _ in range(2))
    torch._dynamo.mark_dynamic(gate, 0)
    torch._dynamo.mark_dynamic(up, 0)
    (gm,) = joint(lambda gate, up: OPS.swiglu(gate, up, "silu"), gate, up)
    (node,) = calls(gm, OPS.swiglu.default)
    assert isinstance(node.meta["val"].shape[0], torch.SymInt)
    assert seconds(node, PLAIN) == 3 * 5 * 6 * 4 / 1e9


def test_a_repeated_body_costs_its_nodes_at_every_call():
    region = torch.compiler.nested_compile_region(lambda x, w: torch.sin(x @ w))
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    *_, gm = joint(lambda x, w: region(region(x, w), w), x, w)  # its body is a joint graph of its own, split first
    (plain,) = joint(lambda x, w: torch.sin(x @ w), x, w)
    assert len(calls(gm, torch.ops.higher_order.invoke_subgraph)) == 4
    assert not [n for n in gm.graph.nodes if n.target is aten.mm.default]
    fast = replace(PLAIN, copy_bandwidth=float("inf"))
    assert predicted(gm, fast) == pytest.approx(2 * predicted(plain, fast))
    assert predicted(plain, fast) == pytest.approx(3 * 2 * 6 * 8 * 8 / 2e9)


def test_a_layer_does_the_work_that_torch_counts():
    x, target = data()
    block = Block()
    (gm,) = joint(lambda: block(x, target))
    assert all(seconds(n, NOMINAL) >= 0 for n in gm.graph.nodes)
    with FlopCounterMode(display=False) as counter:
        block(x, target).backward()
    counted = cost.Ceilings(float("inf"), {torch.float32: 1.0}, None, 0.0)
    assert sum(seconds(n, counted) for n in gm.graph.nodes if n.target not in ATTENTION) == counter.get_total_flops()
    assert predicted(gm, counted) >= counter.get_total_flops() > 0


def test_bytes_of_one_tensor():
    with FakeTensorMode():
        assert nbytes_of(torch.empty(3, 5, dtype=torch.bfloat16)) == 30
        assert nbytes_of(torch.empty(3, 5)[:, ::2]) == 36
        assert nbytes_of(torch.empty(5).expand(3, 5)) == 20
        assert nbytes_of(torch.empty(0).expand(3, 0)) == 0
        assert nbytes_of(torch.empty(())) == 4
    assert nbytes_of(3) == nbytes_of(None) == 0


# --- the device ------------------------------------------------------------------------------------------------------

CUDA = torch.device("cuda", 0)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The calls that measure; what is remembered is forgotten, and kept in a file of the test's own."""
    monkeypatch.setattr(cost, "_MEASURED", {})
    monkeypatch.setattr(cost, "_path", lambda: tmp_path / "new" / "ceilings.json")
    monkeypatch.setattr(cost, "device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    rates = replace(NOMINAL, copy_bandwidth=1e12)
    monkeypatch.setattr(cost, "_measure", lambda device: rates)
    return spy(monkeypatch, cost, "_measure")


def test_a_device_is_measured_once(measured, monkeypatch):
    """And the next process reads it."""
    rates = cost.ceilings(CUDA)
    assert rates.copy_bandwidth == 1e12
    assert cost.ceilings(CUDA) == rates and len(measured) == 1
    monkeypatch.setattr(cost, "_MEASURED", {})
    assert cost.ceilings(CUDA) == rates and len(measured) == 1
    cost.ceilings(torch.device("cuda", 1))
    assert len(measured) == 2 and len(json.loads(cost._path().read_text())) == 2
    for content in ("{ cut off", "[1]", '{"GPU 0 none": {"matmul_flops": {}}}', '{"GPU 0 none": 3}'):
        monkeypatch.setattr(cost, "_MEASURED", {})
        cost._path().write_text(content)
        before = len(measured)
        assert cost.ceilings(CUDA) == rates and len(measured) == before + 1


def test_tf32_has_rates_of_its_own(measured, monkeypatch):
    cost.ceilings(CUDA)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        cost.ceilings(CUDA)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written(measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cost, "_path", lambda: tmp_path / "file" / "new" / "ceilings.json")
    assert cost.ceilings(CUDA) == cost.ceilings(CUDA)
    assert len(measured) == 1


def test_no_host_memory_to_pin_is_not_kept_for_other_processes(measured, monkeypatch):
    monkeypatch.setattr(cost, "_measure", lambda device: replace(NOMINAL, host_bandwidth=None))
    assert cost.ceilings(CUDA).host_bandwidth is None
    assert cost._MEASURED and not cost._path().exists()


def test_a_device_that_cannot_be_measured(measured, monkeypatch, caplog):
    def fail(device):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cost, "_measure", fail)
    assert cost.ceilings(CUDA) == NOMINAL and "no room" in caplog.text
    assert not cost._MEASURED and not cost._path().exists()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cost, "_measure", lambda device: pytest.fail("measured while a graph is captured"))
    assert cost.ceilings(CUDA) == NOMINAL


def test_other_devices_have_nominal_rates(measured):
    assert cost.ceilings(torch.device("cpu")) == replace(NOMINAL, host_bandwidth=None)
    assert cost.ceilings(torch.device("xpu")) == NOMINAL
    assert not measured


@pytest.mark.gpu
def test_measured_on_a_gpu(monkeypatch, tmp_path):
    """Also while fake tensors are being made, under autocast, and with the user's random numbers left as they were."""
    monkeypatch.setattr(cost, "_MEASURED", {})
    monkeypatch.setattr(cost, "_path", lambda: tmp_path / "ceilings.json")
    torch.manual_seed(3)
    expected = torch.randn(4), torch.randn(4, device="cuda")
    torch.manual_seed(3)
    with FakeTensorMode(), torch.autocast("cuda", torch.bfloat16):
        rates = cost.ceilings(CUDA)
    drawn = torch.randn(4), torch.randn(4, device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    flops = rates.matmul_flops
    assert set(flops) == {torch.bfloat16, torch.float16, torch.float32, torch.float64}
    assert flops[torch.bfloat16] > flops[torch.float32] > 1e12
    assert rates.copy_bandwidth > rates.host_bandwidth > 1e9
    monkeypatch.setattr(cost, "_MEASURED", {})
    monkeypatch.setattr(cost, "_measure", lambda device: pytest.fail("measured again"))
    assert cost.ceilings(CUDA) == rates
