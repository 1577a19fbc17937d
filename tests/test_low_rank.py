"""Products with one thin side: each Triton kernel against its plain torch counterpart in float64."""

import numpy as np
import pytest
import torch
from _oracle import assert_as_accurate
from conftest import HAS_GPU
from fused_backend.kernels import _low_rank as low_rank
from fused_backend.kernels._adapter_grad import adapter_grad, adapter_grad_reference
from fused_backend.kernels._low_rank import Dropout
from hypothesis import given, settings
from hypothesis import strategies as st

F32, F16 = torch.float32, torch.float16
# The interpreter multiplies bfloat16 matrices wrongly.
LOW = torch.bfloat16 if HAS_GPU else F16
SHAPES = [
    pytest.param((1, 7, 1), id="one-row"),
    pytest.param((45, 131, 8), id="odd"),
    pytest.param((67, 530, 40), id="several-tiles"),
    pytest.param((130, 64, 128), id="widest"),
    pytest.param((33, 40, 130), id="too-wide"),
]
EMPTY = [
    pytest.param((0, 600, 4), id="no-rows"),
    pytest.param((5, 0, 4), id="no-columns"),
]


def dropout(T, N, p, device):
    if not p:
        return None
    return Dropout(low_rank.pack_reference(torch.rand(T, N, device=device) >= p), 1.0 / (1.0 - p))


LAYOUTS = {
    "contiguous": lambda t: t,
    "columns of a wider one": lambda t: t.new_empty(t.shape[0], t.shape[1] + 9)[:, 5:-4].copy_(t),
    "transposed": lambda t: t.t().contiguous().t(),
    "every second row": lambda t: t.new_empty(2 * t.shape[0], t.shape[1])[::2].copy_(t),
    "one row": lambda t: t[:1].expand(t.shape),
}


def randn(*shape, dtype, device, layout="contiguous"):
    return LAYOUTS[layout](torch.randn(*shape, device=device).to(dtype))


def assert_like_reference(ours, reference, *args, dtype=None):
    """`reference` is run in the inputs' dtype, for its error, and in float64, for the truth."""
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    eager = reference(*args)
    assert_as_accurate(ours, eager if dtype is None else eager.to(dtype), reference(*wide))


def down(shape, z_dtype, v_dtype, p, layout, device):
    T, N, R = shape
    z, v = randn(T, N, dtype=z_dtype, device=device, layout=layout), randn(R, N, dtype=v_dtype, device=device)
    args = z, v, 0.3, dropout(T, N, p, device)
    assert_like_reference(low_rank.down(*args), low_rank.down_reference, *args)


def outer(shape, z_dtype, u_dtype, p, layout, device):
    T, N, R = shape
    u, z = (randn(T, n, dtype=d, device=device, layout=layout) for n, d in ((R, u_dtype), (N, z_dtype)))
    args = u, z, dropout(T, N, p, device)
    ours = low_rank.outer(*args)
    assert ours.dtype == F32 or R > low_rank.MAX_RANK
    assert_like_reference(ours, low_rank.outer_reference, *args, dtype=ours.dtype)


def update(shape, base_dtype, u_dtype, p, layout, device):
    """Into another dtype, whose rows are strided; then in place."""
    T, N, R = shape
    base, u = (randn(T, n, dtype=d, device=device, layout=layout) for n, d in ((N, base_dtype), (R, u_dtype)))
    base = base.contiguous() if layout in ("transposed", "one row") else base
    v, drop = randn(N, R, dtype=u_dtype, device=device).t(), dropout(T, N, p, device)

    def reference(base, u, v):
        out = torch.empty(T, N, dtype=base.dtype if base.dtype == torch.float64 else u_dtype, device=device)
        return low_rank.update_reference(base, u, v, 0.3, drop, out)

    out = torch.empty(T, N + 3, dtype=u_dtype, device=device)[:, 1:-2]
    assert low_rank.update(base, u, v, 0.3, drop, out) is out
    assert_like_reference(out, reference, base, u, v)
    again = low_rank.update(base, u, v.contiguous(), 0.3, drop, torch.empty_like(out))
    assert torch.equal(again, out)
    if base_dtype == u_dtype:
        assert torch.equal(low_rank.update(base, u, v, 0.3, drop, base), out)


KERNELS = (down, outer, update)
# Of the wide input, and of the thin one.
PAIRS = [(F32, F32), (LOW, LOW), (F32, LOW), (LOW, F32)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_thin_products(kernel, shape, dtypes, p, device):
    kernel(shape, *dtypes, p, "contiguous", device)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(kernel, layout, p, device):
    kernel((45, 70, 9), LOW, LOW, p, layout, device)


@settings(max_examples=20)
@given(
    kernel=st.sampled_from(KERNELS),
    # Enough rows that the largest error is a property of the method and not of one number.
    shape=st.tuples(st.integers(40, 100), st.integers(1, 200), st.integers(1, 40) | st.sampled_from([127, 128, 129])),
    dtypes=st.sampled_from(PAIRS),
    p=st.sampled_from([0.0, 0.1, 0.5]),
    layout=st.sampled_from(list(LAYOUTS)),
    seed=st.integers(0, 2**16),
)
def test_any_shape(kernel, shape, dtypes, p, layout, seed, device):
    torch.manual_seed(seed)
    kernel(shape, *dtypes, p, layout, device)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1), (7, 13), (5, 16), (2, 1031), (40, 2048)], ids=str)
@pytest.mark.parametrize("offset", [0, 3])
def test_eight_booleans_to_a_byte(shape, offset, device):
    T, N = shape
    # A slice of a longer mask need not start at a whole word.
    keep = (torch.rand(offset + T * N, device=device) < 0.7)[offset:].view(T, N)
    expected = torch.from_numpy(np.packbits(keep.cpu().numpy(), axis=1, bitorder="little")).to(device)
    for pack in (low_rank.pack_reference, low_rank.pack):
        bits = pack(keep)
        assert torch.equal(bits, expected)
        assert torch.equal(low_rank.dropped_reference(torch.ones(T, N, device=device), Dropout(bits, 2.0)), keep * 2.0)


def test_a_mask_of_any_layout(device):
    keep = torch.rand(7, 16, device=device) < 0.7
    for layout in LAYOUTS.values():
        assert torch.equal(low_rank.pack(layout(keep)), low_rank.pack(layout(keep).contiguous()))


@pytest.mark.parametrize("dtype", [F32, LOW], ids=str)
@pytest.mark.parametrize("shape", [(1, 7, 1), (45, 131, 8), (70, 600, 64), (33, 257, 65), (5, 64, 128)], ids=str)
def test_down_beside_its_input(dtype, shape, device):
    """z bit for bit, u, and zeros to the end of the row, for a product that reads all of them."""
    T, N, R = shape
    z = randn(T, N, dtype=dtype, device=device, layout="columns of a wider one")
    v = randn(R, N, dtype=dtype, device=device)
    wide = torch.full((T, N + low_rank.extension(R)), float("nan"), dtype=dtype, device=device)
    u = low_rank.down(z, v, 0.3, None, wide)
    assert torch.equal(wide[:, :N], z)
    assert torch.equal(wide[:, N : N + R], u)
    assert not wide[:, N + R :].any()
    assert_like_reference(u, low_rank.down_reference, z, v, 0.3, None)


def both_products(shape, dtypes, layout, device):
    T, N, R = shape
    dy, u = (randn(T, n, dtype=d, device=device, layout=layout) for n, d in ((N, dtypes[0]), (R, dtypes[1])))
    b = randn(N, R, dtype=dtypes[1], device=device, layout="transposed" if layout == "contiguous" else layout)
    for i, ours in enumerate(adapter_grad(dy, b, u, 0.3)):
        reference = lambda *args, i=i: adapter_grad_reference(*args)[i]  # noqa: E731
        assert_like_reference(ours, reference, dy, b, u, 0.3, dtype=ours.dtype)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY, pytest.param((530, 150, 40), id="several-parts")])
def test_both_products_of_dy(shape, dtypes, device):
    both_products(shape, dtypes, "contiguous", device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_products_of_dy_in_every_layout(layout, device):
    both_products((45, 70, 9), (LOW, LOW), layout, device)


@pytest.mark.parametrize("p", [0.1, 0.11, 0.3])
def test_the_scale_of_dropout_is_not_rounded(p, device):
    """To 16 bits it would be the same error in every element, which no sum averages away."""
    T, N, R = 40, 200, 16
    z, v, u = (torch.ones(*shape, dtype=LOW, device=device) for shape in ((T, N), (R, N), (T, R)))
    drop = dropout(T, N, p, device)
    kept = low_rank.dropped_reference(z, Dropout(drop.bits, 1.0)).double()
    for ours, exact in (
        (low_rank.down(z, v, 1.0, drop), kept.sum(1, keepdim=True).expand(T, R)),
        (low_rank.outer(u, z, drop), kept.sum(0).expand(R, N)),
    ):
        exact = exact * drop.scale
        once = 0.501 * torch.finfo(ours.dtype).eps + torch.finfo(F32).eps
        assert ((ours - exact).abs() <= once * exact).all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_dropped_is_multiplied_by_zero(device):
    """So NaN and inf stay visible, as in eager."""
    z = torch.randn(40, 70, device=device)
    z[3, 5], z[6, 7] = float("nan"), float("inf")
    drop = Dropout(low_rank.pack_reference(torch.zeros_like(z)), 2.0)
    u = low_rank.down(z, torch.randn(4, 70, device=device), 1.0, drop)
    assert u.isnan().all(1).nonzero().flatten().tolist() == [3, 6]
    assert not u[~u.isnan()].any()


def test_same_bits_every_run_and_inputs_untouched(device):
    z, dy, u = (torch.randn(150, n, device=device).to(LOW) for n in (300, 170, 12))
    a, b = torch.randn(12, 300, device=device).to(LOW), torch.randn(170, 12, device=device).to(LOW)
    before = [t.clone() for t in (z, dy, u, a, b)]
    drop = dropout(150, 300, 0.1, device)

    def run():
        out = torch.empty(150, 170, dtype=LOW, device=device)
        return [
            low_rank.down(z, a, 0.3, drop),
            low_rank.outer(u, z, drop),
            low_rank.update(dy, u, b.t(), 0.3, None, out),
            *adapter_grad(dy, b, u, 0.3),
        ]

    first = run()
    assert all(torch.equal(x, y) for x, y in zip(run(), first, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((z, dy, u, a, b), before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(F32, LOW), (LOW, LOW), (F32, F32)], ids=str)
@pytest.mark.parametrize("shape", [(8192, 4096, 16), (4097, 1031, 48), (2048, 14336, 64), (777, 4096, 128)], ids=str)
def test_at_model_size(shape, dtypes, device):
    for p in (0.0, 0.1):
        for kernel in KERNELS:
            kernel(shape, *dtypes, p, "contiguous", device)
    both_products(shape, dtypes, "contiguous", device)
    test_down_beside_its_input(dtypes[1], shape, device)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    """More than 2^31 elements: the last rows are what they are alone."""
    T, N, R = (1 << 19) + 3, 4096, 16
    z, u = torch.randn(T, N, device=device, dtype=LOW), torch.randn(T, R, device=device, dtype=LOW)
    v, drop = torch.randn(R, N, device=device, dtype=LOW), dropout(T, N, 0.1, device)
    last = Dropout(drop.bits[-3:], drop.scale)
    near = lambda a, b: torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-2)  # noqa: E731
    near(low_rank.down(z, v, 1.0, drop)[-3:], low_rank.down(z[-3:], v, 1.0, last))
    wide = torch.empty(T, N + 64, device=device, dtype=LOW)
    near(low_rank.down(z, v, 1.0, None, wide)[-3:], low_rank.down(z[-3:], v, 1.0, None))
    assert torch.equal(wide[-3:, :N], z[-3:])
    del wide
    u[:-3] = 0
    near(low_rank.outer(u, z, drop), low_rank.outer(u[-3:], z[-3:], last))
    v_last, db = adapter_grad(z, v.t(), u, 1.0)
    near(v_last[-3:], low_rank.down(z[-3:], v, 1.0, None))
    near(db, low_rank.outer(u[-3:], z[-3:], None).t())
    low_rank.update(z, u, v, 1.0, drop, out := torch.empty_like(z))
    near(out[-3:], low_rank.update(z[-3:], u[-3:], v, 1.0, last, z.new_empty(3, N)))
