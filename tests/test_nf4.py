"""4-bit weights: decoded as bitsandbytes decodes them, bit for bit, and products that decode in registers."""

import copy

import bitsandbytes.functional as bnb
import pytest
import torch
from fused_backend.kernels import _nf4
from fused_backend.kernels._nf4 import Quantized
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TYPES = ("nf4", "fp4")
SHAPES = [
    pytest.param((1, 1), id="one-element"),
    pytest.param((7, 257), id="odd-number-of-elements"),
    pytest.param((61, 130), id="blocks-cross-rows"),
    pytest.param((64, 128), id="aligned"),
    pytest.param((3, 2731), id="two-programs-and-one-element-left"),
]
DECODERS = (_nf4.decode_reference, _nf4.decode)


def quantize(shape, device, quant_type="nf4", blocksize=64, nested=False, dtype=torch.float32, storage=torch.uint8):
    """A random weight as `Quantized`, and what bitsandbytes on the same device decodes it to.

    Quantized as one long row, so that its blocks are those of the flat weight in each of bitsandbytes' code paths.
    On a CPU with AVX-512 bitsandbytes rounds float16 otherwise than on a GPU; one without agrees with the GPU.
    """
    w = torch.randn(1, shape[0] * shape[1]).to(dtype)
    codes, state = bnb.quantize_4bit(w, None, None, blocksize, nested, quant_type, storage)
    # Compiling its plain PyTorch path, taken for odd sizes, would need seconds per size.
    with torch.compiler.set_stance("force_eager"):
        there = copy.deepcopy(state)
        there.to(device)
        expected = bnb.dequantize_4bit(codes.to(device), there).reshape(shape)
    more = (state.state2.code, state.state2.absmax, state.offset) if nested else ()
    codes, absmax, *more = (t.to(device) for t in (codes, state.absmax, *more))
    return Quantized(codes, absmax, tuple(more), shape, quant_type, blocksize), expected.to(device)


def assert_same_bits(ours, expected):
    """Zeros of either sign are equal: for FP4's second zero, bitsandbytes' own paths differ."""
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("quant_type", TYPES)
def test_codebooks_are_those_of_bitsandbytes(quant_type):
    ours = torch.tensor(_nf4.CODEBOOKS[quant_type], dtype=torch.float32)
    assert_same_bits(ours, bnb.get_4bit_type(quant_type, device="cpu"))


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", [64, 128, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_gives_the_bits_of_bitsandbytes(quant_type, nested, dtype, blocksize, shape, device):
    q, expected = quantize(shape, device, quant_type, blocksize, nested, dtype)
    for decode in DECODERS:
        assert_same_bits(decode(q, dtype), expected)


@pytest.mark.parametrize("storage", DTYPES, ids=str)
def test_codes_stored_as_any_dtype(storage, device):
    q, expected = quantize((6, 66 * 4), device, nested=True, storage=storage)
    assert q.codes.dtype is storage
    for decode in DECODERS:
        assert_same_bits(decode(q, torch.float32), expected)


def test_more_than_one_nested_block(device):
    q, expected = quantize((40, 1000), device, blocksize=32, nested=True, dtype=torch.bfloat16)
    assert q.nested[1].numel() == 5
    for decode in DECODERS:
        assert_same_bits(decode(q, torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 40), (5, 136), (2, 8200), (4, 67), (6, 132)], ids=str)
@pytest.mark.parametrize("beside", [8, 3])
def test_decode_beside_other_columns(dtype, shape, beside, device):
    (N, K), (q, expected) = shape, quantize(shape, device, nested=True, dtype=dtype)
    buffer = torch.full((N, K + 2 * beside), 7.0, dtype=dtype, device=device)
    out = buffer[:, beside : beside + K]
    assert _nf4.decode(q, dtype, out=out) is out
    assert_same_bits(out, expected)
    assert (buffer[:, :beside] == 7.0).all()
    assert (buffer[:, beside + K :] == 7.0).all()


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every-second-column"])
def test_decode_into_any_buffer(layout, device):
    q, expected = quantize((5, 48), device)
    out = {
        "contiguous": lambda: torch.empty(5, 48, device=device),
        "transposed": lambda: torch.empty(48, 5, device=device).T,
        "every-second-column": lambda: torch.empty(5, 96, device=device)[:, ::2],
    }[layout]()
    assert _nf4.decode(q, torch.float32, out=out) is out
    assert_same_bits(out, expected)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 70) | st.sampled_from([128, 255, 256]),
    quant_type=st.sampled_from(TYPES),
    blocksize=st.sampled_from(_nf4.BLOCKSIZES),
    nested=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    beside=st.sampled_from([0, 1, 16]),
    seed=st.integers(0, 2**16),
)
def test_any_shape(rows, cols, quant_type, blocksize, nested, dtype, beside, seed, device):
    torch.manual_seed(seed)
    q, expected = quantize((rows, cols), device, quant_type, blocksize, nested, dtype)
    assert_same_bits(_nf4.decode_reference(q, dtype), expected)
    out = torch.empty(rows, cols + beside, dtype=dtype, device=device)[:, :cols]
    assert_same_bits(_nf4.decode(q, dtype, out=out), expected)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_a_weight_without_elements(shape, device):
    empty = torch.empty(0, device=device)
    q = Quantized(empty.byte(), empty, (), shape, "nf4", 64)
    for decode in DECODERS:
        assert decode(q, torch.bfloat16).shape == shape
    assert not _nf4.supports_small(q, 1)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_inf_go_where_the_product_sends_them(device):
    q, _ = quantize((4, 128), device)
    q.absmax[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")], device=device)
    expected, ours = (decode(q, torch.float32) for decode in DECODERS)
    torch.testing.assert_close(ours, expected, equal_nan=True, rtol=0, atol=0)
    assert expected.isnan().sum() >= 64
    assert expected.isinf().any()


def assert_close_to_product(ours, a, b):
    """a @ b in float64, but for what float32 sums and one rounding may lose."""
    truth, terms = a @ b, a.abs() @ b.abs()
    lost = torch.finfo(torch.float32).eps * len(b) ** 0.5 * terms + torch.finfo(ours.dtype).eps * truth.abs()
    assert ((ours - truth).abs() <= lost).all()


def assert_products(q, dtype, T, out_dtype, device, x=None, dy=None):
    """Both products against float64, with the decoded weight."""
    (N, K), w = q.shape, _nf4.decode_reference(q, dtype).double()
    x = torch.randn(T, K, device=device).to(dtype) if x is None else x
    dy = torch.randn(T, N, device=device).to(dtype) if dy is None else dy
    assert _nf4.supports_small(q, T)
    for ours, a, b in (
        (_nf4.matmul_small(x, q, out_dtype), x.double(), w.T),
        (_nf4.matmul_small_transposed(dy, q, out_dtype), dy.double(), w),
    ):
        assert ours.dtype is out_dtype
        assert_close_to_product(ours, a, b)


SMALL_SHAPES = [
    pytest.param((97, 192), 64, id="odd-N"),
    pytest.param((64, 256), 4096, id="blocks-cross-rows"),
    pytest.param((20, 64), 64, id="one-part"),
    pytest.param((70, 672), 32, id="many-tiles-the-last-short"),
    pytest.param((1, 320), 32, id="one-column"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("T", "nested"), [(1, True), (7, False), (16, True), (31, False)])
@pytest.mark.parametrize(("shape", "blocksize"), SMALL_SHAPES)
def test_small_products(dtype, T, nested, shape, blocksize, device):
    q, _ = quantize(shape, device, blocksize=blocksize, nested=nested)
    assert_products(q, dtype, T, dtype, device)


def test_small_products_of_fp4_with_float32_results(device):
    """Tight enough to see that W is rounded to float16 first."""
    q, _ = quantize((97, 192), device, "fp4", nested=True)
    assert_products(q, torch.float16, 7, torch.float32, device)


def test_small_products_of_strided_rows(device):
    q, _ = quantize((70, 128), device)
    x, dy = torch.randn(7, 140, device=device)[:, 3:131], torch.randn(70, 7, device=device).T
    assert_products(q, torch.float32, 7, torch.float32, device, x, dy)


def test_small_products_are_parts_of_the_whole(device):
    """A row of x is computed as among many rows, and every run gives the same bits."""
    q, _ = quantize((97, 320), device, nested=True)
    for product, width in ((_nf4.matmul_small, 320), (_nf4.matmul_small_transposed, 97)):
        a = torch.randn(9, width, device=device)
        before = a.clone()
        y = product(a, q, torch.float32)
        assert torch.equal(product(a, q, torch.float32), y)
        torch.testing.assert_close(product(a[:1], q, torch.float32), y[:1])
        assert torch.equal(a, before)


def test_where_small_products_are_right(device):
    q, _ = quantize((8, 192), device)
    assert [_nf4.supports_small(q, T) for T in (0, 1, 64, 65)] == [False, True, True, False]
    for shape, blocksize, right in (((8, 96), 64, False), ((8, 96), 32, True), ((8, 63), 32, False)):
        assert _nf4.supports_small(quantize(shape, device, blocksize=blocksize)[0], 1) is right
    for product, a in (
        (_nf4.matmul_small, torch.zeros(65, 192)),
        (_nf4.matmul_small, torch.zeros(1, 8)),
        (_nf4.matmul_small_transposed, torch.zeros(1, 192)),
        (_nf4.matmul_small, torch.zeros(1, 192).double()),
    ):
        with pytest.raises(ValueError, match="without decoding takes 1 to 64 rows"):
            product(a.to(device), q, torch.float32)


def test_errors_say_the_rule_what_came_and_the_way_out(device):
    q, _ = quantize((4, 128), device, nested=True)
    for change, message in (
        ({"quant_type": "int4"}, "one of nf4, fp4, got 'int4'"),
        ({"blocksize": 48}, "blocksize must be one of"),
        ({"shape": (5, 128)}, r"\(5, 128\) has 320 bytes of codes, got 256"),
        ({"blocksize": 128}, r"in blocks of 128 has 4 absmax, got 8\. Quantize"),
        ({"nested": ()}, "must be float32, or uint8 with float32 code"),
        ({"nested": (q.nested[0], q.nested[0], q.nested[2])}, r"nested must have 256 code.*got \[256, 256, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            _nf4.decode(Quantized(**{**vars(q), **change}), torch.float32)
    with pytest.raises(ValueError, match=r"out must be \(4, 128\) of torch.float32.*got \(4, 64\)"):
        _nf4.decode(q, torch.float32, out=torch.empty(4, 64, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 14336), (97, 192)], ids=str)
@pytest.mark.parametrize("T", [1, 16, 31, 64])
def test_small_products_at_model_size(dtype, shape, T, device):
    q, _ = quantize(shape, device, nested=True)
    assert_products(q, dtype, T, dtype, device)
    x = torch.randn(T, shape[1], device=device).to(dtype)
    y = _nf4.matmul_small(x, q, dtype)
    assert all(torch.equal(_nf4.matmul_small(x, q, dtype), y) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [0, 16])
def test_offsets_beyond_32_bits(beside, device):
    """More than 2^31 elements: the last rows are right."""
    N, K = (1 << 19) + 3, 4096
    codes = torch.randint(0, 256, (N * K // 2,), dtype=torch.uint8, device=device)
    q = Quantized(codes, torch.rand(N * K // 64, device=device), (), (N, K), "nf4", 64)
    last = Quantized(codes[-3 * K // 2 :], q.absmax[-3 * K // 64 :], (), (3, K), "nf4", 64)
    out = torch.empty(N, K + beside, dtype=torch.bfloat16, device=device)[:, :K]
    w_last = _nf4.decode_reference(last, torch.bfloat16)
    assert torch.equal(_nf4.decode(q, torch.bfloat16, out=out)[-3:], w_last)
    x = torch.randn(4, K, device=device, dtype=torch.bfloat16)
    assert_close_to_product(_nf4.matmul_small(x, q, torch.float32)[:, -3:], x.double(), w_last.double().T)
