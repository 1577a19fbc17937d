"""lora_nf4: the operator against float64 autograd of PEFT over bitsandbytes, through torch and through Triton."""

import pytest
import torch
from _adapted import BF16, F16, F32, GROUPS, OPS, ROWS, SIX, SIZES, SMALL, Case, Layers, Size, pairwise, running, spy
from conftest import HAS_GPU
from fused_backend.kernels import lora_nf4 as kernels
from fused_backend.kernels._op import BYTES_MOVED
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode


@pytest.fixture(params=["torch", "triton"])
def where(request):
    with running(request.param) as found:
        yield found


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Accuracy.


@pytest.mark.parametrize("case", pairwise(BF16, F16))
def test_torch_is_as_accurate_as_peft(case):
    Layers(case).judge()


@pytest.mark.parametrize("case", pairwise(*(BF16, F16) if HAS_GPU else (F16,)))
def test_triton_is_as_accurate_as_peft(case):
    size = SIZES[case.size]
    with running("triton") as where:
        Layers(case, where.device, size=size if HAS_GPU else size._replace(draws=min(size.draws, 8))).judge()


def test_a_float32_result_of_16_bit_adapters(where):
    """Its last bits are those of the sum; its cotangent is float32."""
    case = Case(F32, where.low, where.low, where.low, group="qkv")
    assert case.out == F32
    Layers(case, where.device, size=ROWS).judge()
    grads = where.arguments(where.plain())._replace(out_dtype=F32).gradients()
    assert [g.dtype for g in grads] == [F32] * 2 + [where.low] * 5
    assert not any(torch.equal(y, y.to(where.low).float()) for y in grads[:2])


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nan_and_inf_go_where_eager_sends_them(where, dropout):
    for case in (Case(F32, F32, F32, None, dropout), where.plain(dropout=dropout, group="gate-up")):
        layers = Layers(case, where.device, size=ROWS)
        with torch.no_grad():
            layers.inputs[0][0, 3, 5], layers.inputs[0][0, 8, 7] = float("nan"), float("inf")
        layers.cotangents[0][0, 20, 4] = float("inf")
        layers.judge()


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_no_tokens(where, lead, dropout):
    for group in (SMALL,) if dropout else ([(9, 0), (5, 0)], SMALL):
        layers = Layers(where.plain(dropout=dropout, bias="base"), where.device, group, Size(lead, 16))
        layers.judge()
        args, rank = layers.first(), sum(layers.ranks)
        found = OPS.lora_linear(*args)
        expected = [(where.low, (*lead, n)) for n in layers.out_features]
        expected += [(where.low, (0, rank))] * bool(rank) + [(torch.uint8, (0, 2))] * len(args.keep)
        assert [(t.dtype, tuple(t.shape)) for t in found] == expected


# Layouts.

LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every second column": lambda t: t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t),
    "a slice of columns": lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 9)[..., 3:-6].copy_(t),
    "rows repeated": lambda t: t[:, :1].expand(t.shape),
    "one number": lambda t: t[:1, :1, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_layout_is_read(where, layout, dropout):
    """Of x, the mask and the cotangents, whose own is that of `sum().backward()`: the bits of contiguous ones."""
    change = LAYOUTS[layout]
    args = where.arguments(Case(F32, F32, F32, None, dropout, bias="base"), size=Size((3, 5), 16))
    dys = [change(torch.randn(3, 5, n, device=where.device)) for n in args.out_features]
    strided = args._replace(x=change(args.x.detach()).requires_grad_(), keep=[change(k) for k in args.keep])
    dense = [t.contiguous() for t in (strided.x.detach(), *strided.keep)]
    dense = args._replace(x=dense[0].requires_grad_(), keep=dense[1:])
    got, want = strided.gradients(dys), dense.gradients([d.contiguous() for d in dys])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert all(g.is_contiguous() for g in got)


# What is saved, what is computed.


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_saved(where, dropout, frozen):
    """x itself, u, and a bit per element for dropout; with frozen adapters neither x nor u; nothing in float32."""
    args = where.arguments(where.plain(dropout=dropout, bias="base"))
    if frozen:
        args = args._replace(lora_a=[a.detach() for a in args.lora_a], lora_b=[b.detach() for b in args.lora_b])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ys = args.outputs()
    given = {t.data_ptr() for t in (*args.weight, *args.absmax, *args.nested, *args.lora_a, *args.lora_b)}
    kept = [t for t in saved if t.data_ptr() not in given]
    (T, K), layers = args.x.shape, len(args.weight)
    bits = [(torch.uint8, (T, K // 8))] * layers if dropout else []
    x_and_u = [] if frozen else [(where.low, (T, K)), (where.low, (T, 5))]
    assert [(t.dtype, tuple(t.shape)) for t in kept] == x_and_u + bits
    assert frozen or kept[0].data_ptr() == args.x.data_ptr()
    assert all(dx is not None for dx in torch.autograd.grad(sum(y.sum() for y in ys), args.x))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("frozen", ["x", "adapters", "bias", "x and bias"])
def test_only_wanted_gradients_are_computed(where, monkeypatch, dropout, frozen):
    """And each is the same, bit for bit, as among all."""
    args = where.arguments(where.plain(dropout=dropout, bias="base"))
    dys = [torch.randn_like(y) for y in args.outputs()]
    everything = args.gradients(dys)
    calls = spy(monkeypatch, kernels, "lora_linear_bwd")
    fixed = lambda ts, name: [t.detach() if name in frozen else t for t in ts]  # noqa: E731
    some = args._replace(
        x=fixed([args.x], "x")[0],
        lora_a=fixed(args.lora_a, "adapters"),
        lora_b=fixed(args.lora_b, "adapters"),
        bias=fixed(args.bias, "bias"),
    )
    wanted = [g for g, t in zip(everything[2:], some.trained(), strict=True) if t.requires_grad]
    assert equal(some.gradients(dys)[2:], wanted)
    ((*_, needs_dx, needs_adapters, needs_bias),) = calls
    assert (needs_dx, needs_adapters, needs_bias) == ("x" not in frozen, "adapters" not in frozen, "bias" not in frozen)


def test_one_adapter_of_a_group_may_be_frozen(where):
    args = where.arguments(where.plain())
    everything = args.gradients()
    some = args._replace(lora_a=[args.lora_a[0].detach(), args.lora_a[1]])
    assert equal(some.gradients()[2:], [*everything[2:3], *everything[4:]])


def test_one_output_of_a_group_may_be_unused(where):
    args = where.arguments(where.plain())
    zero = args.gradients([torch.ones_like(y) * i for i, y in enumerate(args.outputs())])
    used = torch.autograd.grad(args.outputs()[1].sum(), args.trained())
    assert equal(used, zero[2:])


@pytest.mark.parametrize("group", ["one", "qkv", "bare"])
def test_the_same_bits_every_run_and_inputs_untouched(where, group):
    dropout = 0.0 if group == "bare" else 0.1
    args = where.arguments(where.plain(dropout=dropout, group=group, bias="base"), GROUPS[group], Size((33,), 64))
    inputs = [t for part in args for t in (part if isinstance(part, list) else [part]) if isinstance(t, torch.Tensor)]
    before = [t.detach().clone() for t in inputs]
    ys = args.outputs()
    dys = [torch.randn_like(y) for y in ys]
    first = torch.autograd.grad(ys, args.trained(), dys, retain_graph=True)
    assert equal(torch.autograd.grad(ys, args.trained(), dys, retain_graph=True), first)
    assert equal(args.gradients(dys), [*ys, *first])
    assert equal(inputs, before)
    storages = [t.untyped_storage().data_ptr() for t in (*inputs, *ys, *first)]
    assert len(set(storages)) == len(storages)


def test_double_backward_is_refused_in_words(where):
    args = where.arguments(Case(F32, F32, F32))
    for wanted in (args.x, args.lora_a[0]):
        (grad,) = torch.autograd.grad(args.outputs()[0].sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="lora_linear_bwd has no second derivative"):
            grad.sum().backward()


# The operator as PyTorch sees it.


def dense64(dropout, bias):
    f64 = torch.float64
    case = Case(f64, f64, f64, None, dropout, "none", False, bias)
    return Layers(case, group=[(4, 2), (3, 1)], size=Size((2, 2), 5)).first()


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_gradcheck_in_float64(dropout):
    args = dense64(dropout, "base")

    def outputs(x, *rest):
        return tuple(args._replace(x=x, lora_a=rest[:2], lora_b=rest[2:4], bias=rest[4:]).outputs())

    assert torch.autograd.gradcheck(outputs, args.trained())


KINDS = {
    "dropout": Case(F32, F16, F32, None, 0.1, bias="base"),
    "no-dropout": Case(BF16, BF16, BF16, nested=False),
    "dense": Case(BF16, BF16, F32, None, 0.1, "none", False, "base"),
    "bare": Case(F32, BF16, F32, bias="base", group="bare"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(device, monkeypatch, kind):
    """Mixed dtypes, so that the fakes' dtypes are seen."""
    case = KINDS[kind]
    group, size = GROUPS["bare"] if kind == "bare" else SMALL, Size((2, 3), 17)
    args = Layers(case, device, group, size).first()
    torch.library.opcheck(OPS.lora_linear.default, tuple(args))
    calls = spy(monkeypatch, kernels, "lora_linear_bwd")
    args.gradients()
    *rest, needs_dx, needs_adapters, needs_bias = tree_map_only(torch.Tensor, torch.Tensor.detach, calls[0])
    torch.library.opcheck(OPS.lora_linear_bwd.default, (*rest, needs_dx, needs_adapters, needs_bias))
    for needs in ((True, False, False), (False, needs_adapters, True)):
        torch.library.opcheck(
            OPS.lora_linear_bwd.default, (*rest, *needs), test_utils=("test_schema", "test_faketensor")
        )


def changing_tokens(device):
    """A step with a group and a layer without an adapter, and its inputs for several numbers of tokens."""
    adapted, bare = (
        Layers(Case(BF16, BF16, F32, None, dropout, bias="base"), device, group, SIX).first()
        for group, dropout in ((SMALL, 0.1), ([(16, 0)], 0.0))
    )
    before, after = adapted[1:7], adapted[8:]

    def step(x, keep):
        *ys, _, _, _ = OPS.lora_linear(x * 2.0, *before, keep, *after)
        return [*ys, *OPS.lora_linear(x, *bare[1:])]

    # No size of a weight: the compiler would take the two for one.
    for T in (41, 43, 47, 97):
        x = torch.randn(T, 16, device=device, dtype=BF16, requires_grad=True)
        keep = [torch.rand(T, 16, device=device) < 0.9 for _ in SMALL]
        yield step, x, keep, [*adapted.trained()[1:], *bare.trained()[1:]]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_any_number_of_tokens(device, backend):
    """Once, with the results of the operator outside."""
    counter, compiled, frames = CompileCounterWithBackend(backend), None, set()
    for step, x, keep, trained in changing_tokens(device):
        compiled = compiled or torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
        runs = []
        for fn in (compiled, step):
            ys = fn(x, keep)
            runs.append([*ys, *torch.autograd.grad(ys, [x, *trained], [torch.ones_like(y) for y in ys])])
        assert equal(*runs)
        frames.add(counter.frame_count)
    assert len(frames) == 1


def test_cost():
    """As many FLOPs as PEFT's; every tensor's bytes once, those of a decoded weight twice more."""
    layers = Layers(Case(F32, F32, F32, quant_type="none", nested=False, bias="base", group="qkv"), size=ROWS)
    flops = []
    for fn in (layers.fused, layers.peft):
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(fn(*layers.inputs), layers.cotangents)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0

    args = Layers(Case(BF16, BF16, BF16, nested=False), group=[(8, 2)], size=Size((4,), 64)).first()
    x, codes, absmax, adapter, y = 2 * 4 * 64, 8 * 64 // 2, 4 * 8, 2 * 2 * (64 + 8), 2 * 4 * 8
    decoded = 2 * 2 * 8 * 64
    assert BYTES_MOVED[OPS.lora_linear.default](*args) == x + codes + absmax + adapter + y + decoded


def wrong(**change):
    layers = Layers(Case(F32, F32, F32, None, 0.1, bias="base"), group=SMALL, size=SIX)
    args = layers.first()
    return args._replace(**{name: value(getattr(args, name)) for name, value in change.items()})


REFUSED = {
    "quant_type must be one of none, nf4, fp4, got 'int4'": {"quant_type": lambda _: "int4"},
    "one out_features for each weight, got 1 for 2": {"out_features": lambda v: v[:1]},
    "4-bit weights take one absmax each, .*, got 1 absmax and 6 nested": {"absmax": lambda v: v[:1]},
    "4-bit weights take one absmax each, .*, got 2 absmax and 5 nested": {"nested": lambda v: v[1:]},
    "each given for all layers of a group or none, got 1, 2, 2, 2 for 2": {"bias": lambda v: v[:1]},
    "each given for all layers of a group or none, got 2, 2, 0, 2 for 2": {"lora_b": lambda v: []},
    "each given for all layers of a group or none, got 2, 2, 2, 1 for 2": {"keep": lambda v: v[:1]},
    "one scaling for each adapter, got 1 for 2": {"scaling": lambda v: v[:1]},
    r"dropout must be in \[0, 1\), got 1.0": {"dropout": lambda _: 1.0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_input_is_one_clear_error(message):
    """Where shapes are only traced as well as where numbers are computed."""
    args = wrong(**REFUSED[message])
    with pytest.raises(ValueError, match=rf"lora_nf4: .*{message}.* or disable with options="):
        args.outputs()
