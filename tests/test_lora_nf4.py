"""lora_nf4: the operator against float64 autograd of PEFT over bitsandbytes, through torch and through Triton."""

import contextlib
from typing import NamedTuple

import pytest
import torch
from _adapted import BF16, F16, F32, GROUPS, OPS, SIZES, Case, Layers, Size, pairwise
from conftest import HAS_GPU
from fused_backend.kernels import _crossover as crossover
from fused_backend.kernels import _lora as lora
from fused_backend.kernels import _nf4 as nf4
from fused_backend.kernels import lora_nf4 as kernels
from fused_backend.kernels._op import BYTES_MOVED
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode


class Where(NamedTuple):
    """`low` is the 16-bit dtype to use: the interpreter multiplies bfloat16 matrices wrongly."""

    device: torch.device
    low: torch.dtype


@contextlib.contextmanager
def running(parts):
    """Where the operators run through `parts`: without a GPU, Triton's run in the interpreter."""
    if parts == "torch" or HAS_GPU:
        yield Where(torch.device("cpu" if parts == "torch" else "cuda"), BF16)
        return
    library = torch.library.Library("fused_backend", "IMPL")
    library.impl("lora_linear", lambda *args: lora.forward(lora.TRITON, *args), "CPU")
    library.impl("lora_linear_bwd", lambda *args: lora.backward(lora.TRITON, *args), "CPU")
    try:
        yield Where(torch.device("cpu"), F16)
    finally:
        library._destroy()


@pytest.fixture(params=["torch", "triton"])
def where(request):
    with running(request.param) as found:
        yield found


@pytest.fixture
def triton():
    with running("triton") as found:
        yield found


def spy(monkeypatch, module, name):
    """The arguments of every call of `module.name`, from now on."""
    calls, original = [], getattr(module, name)

    def called(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, called)
    return calls


# Of layers and x, where the size does not matter.
SMALL, SIX = [(9, 2), (5, 3)], Size((6,), 16)


def small(case, where, group=SMALL, size=SIX):
    """The operator's arguments, what is trained as leaves."""
    return Layers(case, where.device, group, size).first()


def plain(where, **options):
    """Everything in the 16-bit dtype, without autocast."""
    return Case(where.low, where.low, where.low, **options)


def gradients(args, cotangents=None, **kwargs):
    ys = args.outputs()
    cotangents = [torch.ones_like(y) for y in ys] if cotangents is None else cotangents
    wanted = [t for t in args.trained() if t.requires_grad]
    return [*ys, *torch.autograd.grad(ys, wanted, cotangents, **kwargs)]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Accuracy.


@pytest.mark.parametrize("case", pairwise(BF16, F16))
def test_torch_is_as_accurate_as_peft(case):
    Layers(case).judge()


@pytest.mark.parametrize("case", pairwise(BF16 if HAS_GPU else F16))
def test_triton_is_as_accurate_as_peft(case, triton):
    size = SIZES[case.size]
    Layers(case, triton.device, size=size if HAS_GPU else size._replace(draws=min(size.draws, 10))).judge()


ROWS = Size((45,), 50)


@pytest.mark.parametrize("rank", [1, 8, 40, 130])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_rank(where, rank, dropout):
    """130 is more than the Triton kernels hold."""
    for case in (Case(F32, F32, F32, None, dropout), plain(where, dropout=dropout, bias="lora")):
        Layers(case, where.device, [(70, rank)], ROWS._replace(K=151)).judge()


@pytest.mark.parametrize("bias", ["no-bias", "base", "lora"])
@pytest.mark.parametrize("group", ["gate-up", "qkv"])
def test_the_adapter_rides_along_forward(triton, monkeypatch, group, bias):
    """As more columns of the base product, where all the outputs together are wider than x."""
    taken = spy(monkeypatch, lora, "_forward_extended")
    Layers(plain(triton, bias=bias, group=group), triton.device, size=ROWS).judge()
    assert taken
    for other in (plain(triton, dropout=0.1), Case(F32, F32, F32), plain(triton, quant_type="none", nested=False)):
        taken.clear()
        small(other, triton, GROUPS[group]).outputs()
        assert not taken


@pytest.mark.parametrize("bias", ["no-bias", "base"])
def test_the_adapter_rides_along_backward(triton, monkeypatch, bias):
    """As more rows of the base product, where one layer has fewer outputs than inputs."""
    taken = spy(monkeypatch, lora, "_dx_extended")
    Layers(plain(triton, bias=bias), triton.device, size=ROWS).judge()
    assert taken
    for other in (plain(triton, group="qkv"), plain(triton, dropout=0.1), Case(F32, F32, F32)):
        taken.clear()
        gradients(small(other, triton, GROUPS[other.group], ROWS))
        assert not taken


@pytest.mark.parametrize("group", ["one", "qkv", "bare"])
def test_few_tokens_are_multiplied_without_decoding(triton, monkeypatch, group):
    monkeypatch.setattr(lora, "prefers_small", lambda *args: True)
    forward, backward = (spy(monkeypatch, nf4, f"matmul_small{name}") for name in ("", "_transposed"))
    for case in (
        plain(triton, group=group, bias="base"),
        Case(F32, triton.low, F32, group=group, bias="base" if group == "bare" else "lora"),
        Case(triton.low, F32, triton.low, None, 0.0 if group == "bare" else 0.1, "fp4", False, group=group),
    ):
        forward.clear(), backward.clear()
        Layers(case, triton.device, size=Size((23,), 64, 64, 2)).judge()
        assert len(forward) == len(backward) == 2 * len(GROUPS[group])


def test_a_float32_cotangent_of_16_bit_layers(where):
    layers = Layers(plain(where, group="qkv"), where.device, size=ROWS)
    layers.cotangents = [torch.randn_like(c) for c in layers.cotangents]
    layers.judge(lambda args: [y.to(where.low) for y in args._replace(out_dtype=F32).outputs()])
    args = small(plain(where), where)
    grads = gradients(args._replace(out_dtype=F32))
    assert [g.dtype for g in grads] == [F32] * 2 + [where.low] * 5


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nan_and_inf_go_where_eager_sends_them(where, dropout):
    for case in (Case(F32, F32, F32, None, dropout), plain(where, dropout=dropout, group="gate-up")):
        layers = Layers(case, where.device, size=ROWS)
        with torch.no_grad():
            layers.inputs[0][0, 3, 5], layers.inputs[0][0, 8, 7] = float("nan"), float("inf")
        layers.cotangents[0][0, 20, 4] = float("inf")
        layers.judge()


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_no_tokens(where, lead, dropout):
    for group in ("qkv",) if dropout else ("bare", "qkv"):
        layers = Layers(plain(where, group=group, dropout=dropout, bias="base"), where.device, size=Size(lead, 32))
        layers.judge()
        n, (args, ranks) = len(layers.out_features), (layers.first(), layers.ranks)
        ys, rest = (outs := OPS.lora_linear(*args))[:n], outs[n:]
        assert [y.shape for y in ys] == [(*lead, N) for N in layers.out_features]
        shapes = ([(where.low, (0, sum(ranks)))] if ranks else []) + [(torch.uint8, (0, 4)) for _ in args.keep]
        assert [(t.dtype, tuple(t.shape)) for t in rest] == shapes


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
    args = small(Case(F32, F32, F32, None, dropout, bias="base"), where, size=Size((3, 5), 16))
    dys = [change(torch.randn(3, 5, n, device=where.device)) for n in args.out_features]
    strided = args._replace(x=change(args.x.detach()).requires_grad_(), keep=[change(k) for k in args.keep])
    dense = [t.contiguous() for t in (strided.x.detach(), *strided.keep)]
    dense = args._replace(x=dense[0].requires_grad_(), keep=dense[1:])
    got, want = gradients(strided, dys), gradients(dense, [d.contiguous() for d in dys])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert all(g.is_contiguous() for g in got)


# What is saved, what is computed.


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_saved(where, dropout, frozen):
    """x itself, u, and a bit per element for dropout; with frozen adapters neither x nor u; nothing in float32."""
    args = small(plain(where, dropout=dropout, bias="base"), where)
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
    args = small(plain(where, dropout=dropout, bias="base"), where)
    dys = [torch.randn_like(y) for y in args.outputs()]
    everything = gradients(args, dys)
    calls = spy(monkeypatch, kernels, "lora_linear_bwd")
    fixed = lambda ts, name: [t.detach() if name in frozen else t for t in ts]  # noqa: E731
    some = args._replace(
        x=fixed([args.x], "x")[0],
        lora_a=fixed(args.lora_a, "adapters"),
        lora_b=fixed(args.lora_b, "adapters"),
        bias=fixed(args.bias, "bias"),
    )
    wanted = [g for g, t in zip(everything[2:], some.trained(), strict=True) if t.requires_grad]
    assert equal(gradients(some, dys)[2:], wanted)
    ((*_, needs_dx, needs_adapters, needs_bias),) = calls
    assert (needs_dx, needs_adapters, needs_bias) == ("x" not in frozen, "adapters" not in frozen, "bias" not in frozen)


def test_one_adapter_of_a_group_may_be_frozen(where):
    args = small(plain(where), where)
    everything = gradients(args)
    some = args._replace(lora_a=[args.lora_a[0].detach(), args.lora_a[1]])
    assert equal(gradients(some)[2:], [*everything[2:3], *everything[4:]])


def test_one_output_of_a_group_may_be_unused(where):
    args = small(plain(where), where)
    zero = gradients(args, [torch.ones_like(y) * i for i, y in enumerate(args.outputs())])
    used = torch.autograd.grad(args.outputs()[1].sum(), args.trained())
    assert equal(used, zero[2:])


@pytest.mark.parametrize("group", ["one", "qkv", "bare"])
def test_the_same_bits_every_run_and_inputs_untouched(where, group):
    dropout = 0.0 if group == "bare" else 0.1
    args = small(plain(where, dropout=dropout, group=group, bias="base"), where, GROUPS[group], Size((33,), 64))
    inputs = [t for part in args for t in (part if isinstance(part, list) else [part]) if isinstance(t, torch.Tensor)]
    before = [t.detach().clone() for t in inputs]
    ys = args.outputs()
    dys = [torch.randn_like(y) for y in ys]
    first = torch.autograd.grad(ys, args.trained(), dys, retain_graph=True)
    assert equal(torch.autograd.grad(ys, args.trained(), dys, retain_graph=True), first)
    assert equal(gradients(args, dys), [*ys, *first])
    assert equal(inputs, before)
    storages = [t.untyped_storage().data_ptr() for t in (*inputs, *ys, *first)]
    assert len(set(storages)) == len(storages)


def test_double_backward_is_refused_in_words(where):
    args = small(Case(F32, F32, F32), where)
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
    gradients(args)
    tree = torch.utils._pytree
    *rest, needs_dx, needs_adapters, needs_bias = tree.tree_map_only(torch.Tensor, torch.Tensor.detach, calls[0])
    for needs in ((needs_dx, needs_adapters, needs_bias), (True, False, False), (False, needs_adapters, True)):
        torch.library.opcheck(OPS.lora_linear_bwd.default, (*rest, *needs))


def changing_tokens(device):
    """A step with a group, a layer alone and one without an adapter, and its inputs for several numbers of tokens."""
    cases = [Case(BF16, BF16, F32, None, 0.1, bias="base"), Case(BF16, BF16, BF16), Case(BF16, BF16, F32, group="bare")]
    groups = [SMALL, [(16, 2)], [(7, 0)]]
    fixed = [Layers(c, device, g, SIX).first() for c, g in zip(cases, groups, strict=True)]

    def step(x, keep):
        x = x * 2.0
        return [y for args in fixed for y in args._replace(x=x, keep=keep if args.keep else []).outputs()]

    for T in (5, 6, 7, 12):
        x = torch.randn(2, T, 16, device=device, dtype=BF16, requires_grad=True)
        yield step, x, list(torch.rand(2, 2, T, 16, device=device) < 0.9), [t for a in fixed for t in a.trained()[1:]]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_any_number_of_tokens(device, backend):
    """Once, with the results of the operator outside."""
    counter, compiled = CompileCounterWithBackend(backend), None
    for step, x, keep, trained in changing_tokens(device):
        compiled = compiled or torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
        runs = []
        for fn in (compiled, step):
            ys = fn(x, keep)
            dys = [torch.ones_like(y) for y in ys]
            runs.append([*ys, *torch.autograd.grad(ys, [x, *trained], dys)])
        assert equal(*runs)
        assert counter.frame_count == 1


def test_cost():
    """As many FLOPs as PEFT's; the bytes of every tensor once, those of a decoded weight twice more."""
    case = Case(F32, F32, F32, quant_type="none", nested=False, bias="base", group="qkv")
    layers = Layers(case, size=ROWS)
    flops = []
    for fn in (layers.fused, layers.peft):
        with FlopCounterMode(display=False) as counter:
            ys = fn(*layers.inputs)
            torch.autograd.backward(ys, layers.cotangents)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0

    args = Layers(Case(BF16, BF16, BF16), group=[(8, 2)], size=Size((4,), 64)).first()
    moved = BYTES_MOVED[OPS.lora_linear.default](*args)
    x, codes, absmax, adapter, y = 2 * 4 * 64, 8 * 64 // 2, 8, 2 * 2 * (64 + 8), 2 * 4 * 8
    assert moved == x + codes + absmax + adapter + y + 2 * 2 * 8 * 64


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
