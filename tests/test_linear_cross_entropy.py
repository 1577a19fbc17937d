"""linear_cross_entropy: the operator against float64 autograd of F.linear and F.cross_entropy."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from _oracle import judge
from fused_backend.kernels import linear_cross_entropy as kernels
from fused_backend.kernels._op import BYTES_MOVED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# The padding of the last columns is computed and never read.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

OP = torch.ops.fused_backend.linear_cross_entropy
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLEMENTATIONS = ("reference", "triton")
# T, D, V: prime V, V past a block of the kernel, tiny, aligned, one word.
SIZES = [(13, 7, 127), (2, 5, 16411), (1, 3, 2), (6, 16, 1024), (3, 4, 1)]


class Hosts(torch.autograd.Function):
    """A host function, the last argument, joined to the backward as the operator joins them."""

    @staticmethod
    def forward(*args):
        return args[-1](*args[:-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        kernels._save(ctx, inputs[:-1], output)

    @staticmethod
    def backward(ctx, *grads):
        return (*kernels._backward(ctx, *grads), None)


def fused(implementation, **loss):
    """(x, w, bias, target) -> loss, asking for the gradients of what requires one."""
    host = getattr(kernels, f"linear_cross_entropy_{implementation}")

    def call(*tensors):
        needs = [t is not None and t.requires_grad for t in tensors[:3]]
        return Hosts.apply(*tensors, *rest(**loss, needs=needs), host)[0]

    return call


def rest(reduction="mean", ignore_index=-100, smoothing=0.0, scale=1.0, softcap=0.0, needs=(True,) * 3):
    """The operator's arguments behind the tensors."""
    return (reduction, ignore_index, smoothing, scale, softcap, *needs)


def eager(reduction="mean", ignore_index=-100, smoothing=0.0, scale=1.0, softcap=0.0):
    def call(x, w, bias, target):
        z = F.linear(x, w, bias).float() * scale
        z = softcap * torch.tanh(z / softcap) if softcap > 0 else z
        return F.cross_entropy(z, target, None, None, ignore_index, None, reduction, smoothing)

    return call


def inputs(T, D, V, dtype, device, needs=(True, True, True), ignored=0.0, ignore_index=-100):
    x = torch.randn(T, D, device=device).to(dtype).requires_grad_(needs[0])
    w = torch.randn(V, D, device=device).to(dtype).requires_grad_(needs[1])
    b = torch.randn(V, device=device).to(dtype).requires_grad_(needs[2])
    target = torch.randint(0, V, (T,), device=device)
    target[torch.rand(T, device=device) < ignored] = ignore_index
    return [x, w, b, target]


def agree(implementation, args, device, **loss):
    judge(fused(implementation, **loss), eager(**loss), args, [torch.tensor(0.7, device=device)])


def chunks_of(monkeypatch, rows):
    monkeypatch.setattr(kernels, "_chunk_rows", lambda T, V, D, itemsize, need_dw: rows)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "D", "V"), SIZES)
def test_as_accurate_as_eager(implementation, dtype, T, D, V, device):
    agree(implementation, inputs(T, D, V, dtype, device), device)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("reduction", "smoothing", "softcap", "rows"),
    [("mean", 0.0, 0.0, 1), ("sum", 0.1, 0.0, 4), ("mean", 0.1, 30.0, 9), ("sum", 0.0, 2.0, 9)],
)
def test_every_form_of_the_loss_in_chunks(
    implementation, dtype, reduction, smoothing, softcap, rows, device, monkeypatch
):
    chunks_of(monkeypatch, rows)
    args = inputs(9, 16, 127, dtype, device, ignored=0.3, ignore_index=5)
    form = {"reduction": reduction, "smoothing": smoothing, "softcap": softcap}
    agree(implementation, args, device, **form, ignore_index=5, scale=0.3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_only_what_requires_a_gradient(implementation, needs, device, monkeypatch):
    chunks_of(monkeypatch, 3)
    args = inputs(5, 16, 67, torch.bfloat16, device, needs=needs)
    agree(implementation, args, device)
    out = OP(*args, *rest(needs=needs))
    assert [t.numel() > 0 for t in out[1:]] == list(needs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_bias_and_from_strided_inputs(implementation, device):
    x = torch.randn(8, 2 * 7, device=device)[:, ::2].requires_grad_()
    w = torch.randn(7, 65, device=device).t().requires_grad_()
    target = torch.randint(0, 65, (16,), device=device)[::2]
    agree(implementation, [x, w, None, target], device)
    w = torch.randn(65, 2 * 7, device=device)[:, ::2].requires_grad_()
    agree(implementation, [x, w, None, target], device, reduction="sum")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("T", [0, 3])
def test_no_valid_row(implementation, reduction, smoothing, T, device):
    """A mean over nothing is NaN, a sum 0, and the gradients are 0 in both."""
    args = inputs(T, 4, 10, torch.float32, device, ignored=2.0)
    loss = {"reduction": reduction, "smoothing": smoothing}
    ours, theirs = fused(implementation, **loss)(*args), eager(**loss)(*args)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours.isnan() == (reduction == "mean")
    ours, theirs = torch.autograd.grad(ours, args[:3]), torch.autograd.grad(theirs, args[:3])
    assert not any(g.any() for g in theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("words", [[7, 250], list(range(300))], ids=["two-words", "all-words"])
def test_nan_and_inf_go_where_eager_sends_them(implementation, smoothing, value, words, device):
    args = inputs(5, 4, 300, torch.float32, device)
    with torch.no_grad():
        args[0].abs_()
        args[1].abs_()
        args[2][words] = value
        args[3][:] = torch.tensor([7, 3, 299, 250, 0], device=device)
    for reduction in ("mean", "sum"):
        loss = {"reduction": reduction, "smoothing": smoothing}
        ours, theirs = fused(implementation, **loss)(*args), eager(**loss)(*args)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        ours, theirs = torch.autograd.grad(ours, args[:3]), torch.autograd.grad(theirs, args[:3])
        torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)


FIXTURE = HealthCheck.function_scoped_fixture


@settings(max_examples=20, suppress_health_check=[FIXTURE])
@given(
    # Enough rows, or none, that the largest error is a property of the method and not of one number.
    T=st.just(0) | st.integers(40, 60),
    D=st.integers(1, 20),
    V=st.integers(2, 70) | st.sampled_from([127, 513]),
    rows=st.integers(1, 30),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.05, 1.0, 3.0]),
    softcap=st.sampled_from([0.0, 5.0, 50.0]),
    smoothing=st.sampled_from([0.0, 0.3, 1.0]),
    ignored=st.sampled_from([0.0, 0.5]),
    transposed=st.booleans(),
)
def test_any_size_and_loss(T, D, V, rows, dtype, scale, softcap, smoothing, ignored, transposed, device):
    with pytest.MonkeyPatch.context() as monkeypatch:
        chunks_of(monkeypatch, rows)
        args = inputs(T, D, V, dtype, device, ignored=ignored)
        if transposed:
            args[0] = args[0].detach().t().contiguous().t().requires_grad_()
        agree("triton", args, device, reduction="sum", scale=scale, softcap=softcap, smoothing=smoothing)


def test_softcap_is_accurate_for_small_and_large_logits(device):
    """The tanh of the kernel: its polynomial, its exp form, and where they meet."""
    V = 4096
    x = torch.ones(1, 1, device=device)
    w = torch.linspace(-1.0, 1.0, V, device=device).pow(3)[:, None].requires_grad_()
    target = torch.tensor([17], device=device)
    for scale in (0.3, 1.0, 40.0):
        agree("triton", [x, w, None, target], device, scale=scale, softcap=1.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
def test_float16_gradients_survive_the_loss_scale(implementation, loss_scale, device):
    """Rare words have tiny gradients, sums over tokens huge ones; eager rounds after the loss scale."""
    x, w, b, target = (t.detach() for t in inputs(12, 8, 127, torch.float16, device))
    x[:, 0], w[:, 0], target[:] = 20000.0, 0.0, 3
    b[5] += 18.0
    b.clamp_(max=20.0)
    w.mul_(0.2)
    factor = loss_scale / 64
    head = lambda call: lambda x, common, rare, *rest: call(x, torch.cat([common, rare]), *rest) * factor  # noqa: E731
    for common, rare in ((w[:6], w[6:].requires_grad_()), (w[:6].requires_grad_(), w[6:].detach())):
        args = [x, common, rare, b, target]
        judge(head(fused(implementation)), head(eager()), args, [torch.ones((), device=device)])


def test_gradcheck_in_float64():
    x, w, b, target = inputs(5, 3, 7, torch.float64, "cpu", ignored=0.3)
    for reduction, smoothing, softcap in (("mean", 0.0, 0.0), ("sum", 0.1, 2.0)):
        form = rest(reduction, -100, smoothing, 0.7, softcap)
        assert torch.autograd.gradcheck(lambda *args, form=form: OP(*args, target, *form)[0], (x, w, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, False, False)], ids=str)
def test_opcheck(dtype, needs, device):
    x, w, b, target = inputs(6, 4, 20, dtype, device, needs=needs, ignored=0.3)
    args = (x, w, b, target, *rest("mean", -100, 0.1, 0.5, 20.0, needs))
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(OP.default, args, test_utils=tests)
    # This one differentiates every output; only the loss can be.
    args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    torch.library.opcheck(OP.default, args, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_torch_compile_with_dynamic_rows(backend, device):
    form = rest()
    compiled = torch.compile(lambda *a: OP(*a, *form)[0], backend=backend, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (3, 8):
            args = inputs(T, 6, 20, torch.float32, device, ignored=0.3)
            args[3][0] = 2
            ours = torch.autograd.grad(compiled(*args), args[:3])
            torch.testing.assert_close(ours, torch.autograd.grad(eager()(*args), args[:3]))


def test_backward_twice_gives_the_same_bits(device):
    args = inputs(7, 8, 130, torch.bfloat16, device)
    loss = OP(*args, *rest())[0]
    first = torch.autograd.grad(loss, args[:3], torch.tensor(0.3, device=device), retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(loss, args[:3], torch.tensor(0.3, device=device))
    for a, b, c in zip(first, second, copies, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_same_bits_every_run_and_inputs_untouched(device):
    args = [a.detach() for a in inputs(7, 8, 1030, torch.bfloat16, device, ignored=0.2)]
    before = [a.clone() for a in args]
    form = rest(smoothing=0.1, softcap=30.0)
    first, *others = (kernels.linear_cross_entropy_triton(*args, *form) for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_autocast_changes_nothing_inside(device):
    args = inputs(7, 8, 130, torch.float32, device)
    plain = OP(*args, *rest())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = OP(*args, *rest())
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def test_the_graph_frees_its_gradients(device):
    """Outputs saved for the backward must not keep themselves alive."""
    args = inputs(4, 8, 20, torch.float32, device)
    out = OP(*args, *rest())
    alive = weakref.ref(out[2])
    gc.disable()
    try:
        del out
        assert alive() is None
    finally:
        gc.enable()


class Largest(TorchDispatchMode):
    """The most bytes that any operator put out."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.nbytes = max([self.nbytes, *(t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("needs", [(True, False, False), (False, False, False)], ids=str)
def test_logits_of_all_rows_never_exist(implementation, needs, device, monkeypatch):
    T, D, V, rows = 24, 8, 512, 2
    chunks_of(monkeypatch, rows)
    x, w, _, target = (a.detach() for a in inputs(T, D, V, torch.float32, device))
    host = getattr(kernels, f"linear_cross_entropy_{implementation}")
    with Largest() as largest:
        host(x, w, None, target, *rest(smoothing=0.1, softcap=30.0, needs=needs))
    assert largest.nbytes <= max(rows * V, V * D) * 4 < T * V * 4


def test_chunk_sizes():
    """Figures of Llama-3-8B: V = 128256, D = 4096, in bf16."""
    V, D = 128256, 4096
    assert kernels._chunk_rows(8192, V, D, 2, False) == 1024
    assert kernels._chunk_rows(8192, V, D, 2, True) == 8192
    assert kernels._chunk_rows(3 * 8192, V, D, 2, True) == 4096
    assert kernels._chunk_rows(100, V, D, 2, False) == 100
    assert kernels._chunk_rows(0, V, D, 2, False) == 0
    for T, need_dw in itertools.product((1, 257, 8193, 100_003), (True, False)):
        rows = kernels._chunk_rows(T, V, D, 2, need_dw)
        assert 1 <= rows <= T
        assert rows * V * 2 <= (4 * V * D if need_dw else 2**28 + 64 * V * 2)


def test_ignored_rows_are_not_computed_on_a_cpu(monkeypatch):
    x, w, b, target = (a.detach() for a in inputs(16, 4, 9, torch.float32, "cpu"))
    target[3:] = -100
    seen = []
    step = lambda logits, *rest: seen.append(logits.shape[0]) or kernels._step_torch(logits, *rest)  # noqa: E731
    some = kernels.linear_cross_entropy_reference(x, w, b, target, *rest(), step=step)
    assert seen == [3]
    assert not some[1][3:].any()
    monkeypatch.setattr(kernels, "_valid_rows", lambda *a: None)
    every = kernels.linear_cross_entropy_reference(x, w, b, target, *rest(), step=step)
    assert seen == [3, 16]
    torch.testing.assert_close(some, every)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_skips_ignored_rows(dtype, device, monkeypatch):
    monkeypatch.setattr(kernels, "_valid_rows", lambda *a: None)
    chunks_of(monkeypatch, 4)
    args = inputs(11, 8, 127, dtype, device, ignored=0.5)
    args[3][:2] = torch.tensor([-100, 1], device=device)
    agree("triton", args, device, smoothing=0.1)


@pytest.mark.parametrize("label", [20, -1])
def test_a_label_out_of_bounds_is_an_index_error(label):
    args = inputs(4, 8, 20, torch.float32, "cpu")
    args[3][2] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        eager()(*args)
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        OP(*args, *rest())
    OP(*args, *rest(ignore_index=label))


def test_second_derivatives_are_refused_in_words(device):
    args = inputs(4, 8, 20, torch.float32, device)
    loss = OP(*args, *rest())[0]
    (dx,) = torch.autograd.grad(loss, args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        (loss + dx.norm()).backward()


def test_a_gradient_that_the_forward_did_not_make_is_refused_in_words(device):
    args = inputs(4, 8, 20, torch.float32, device)
    loss = OP(*args, *rest(needs=(True, False, True)))[0]
    with pytest.raises(RuntimeError, match="w requires a gradient, but the forward ran with need_dw=False"):
        loss.backward()


def test_cost(device):
    x, w, b, target = (a.detach() for a in inputs(6, 8, 20, torch.bfloat16, device))
    for need_dx, need_dw, products in ((False, False, 1), (True, False, 2), (True, True, 3)):
        args = (x, w, b, target, *rest(needs=(need_dx, need_dw, False)))
        with FlopCounterMode(display=False) as counter:
            OP(*args)
        assert counter.get_total_flops() == 2 * 6 * 8 * 20 * products
        assert BYTES_MOVED[OP.default](*args) > products * 2 * (x.numel() + w.numel())


def test_errors_say_the_rule_what_came_and_the_way_out(device):
    x, w, b, target = (a.detach() for a in inputs(4, 8, 20, torch.float32, device))

    def rejects(match, *args, **form):
        with pytest.raises(ValueError, match=match):
            OP(*args, *rest(**form))

    rejects(r"x must be \(T, D\).*got \[3, 2, 1, 1\].*disable", x[None], w, b, target)
    rejects("share a floating dtype, got.*float32.*float16", x, w.half(), b, target)
    rejects("int64 word numbers, got torch.int32", x, w, b, target.int())
    rejects("'mean' or 'sum', got 'none'", x, w, b, target, reduction="none")
    rejects(r"label_smoothing must lie in \[0, 1\], got 1.5", x, w, b, target, smoothing=1.5)
    rejects("softcap must be positive, or 0 for none, got -1", x, w, b, target, softcap=-1.0)
    rejects("need_dbias needs a bias", x, w, None, target)
    rejects(r"sizes must agree.*w \(8, 20\).*Transpose", x, w.t(), b, target)
    rejects(r"sizes must agree.*target \(3,\)", x, w, b, target[:3])
