"""attention under sliding windows and over packed documents: every row and every gradient, with flash and without."""

import itertools

import _flash
import pytest
import torch
import torch.nn.functional as F
from _oracle import judge, run
from fused_backend.kernels import _flash as flash
from fused_backend.kernels import _parts as split
from fused_backend.kernels import attention as kernels
from torch._subclasses.fake_tensor import FakeTensorMode

SHAPES = {  # (B, H, G, S, K)
    "grouped": (3, 4, 2, 7, 16),
    "one key head": (3, 4, 1, 6, 8),
    "no groups": (3, 3, 3, 5, 32),
    "one token": (3, 2, 1, 1, 8),
    "longer": (3, 2, 1, 70, 24),
}
WINDOWS = (1, 2, 3, 6, 7, 9)
DOCUMENTS = {  # of three rows of seven tokens
    "one for each row": ["aaaaaaa", "bbbbbbb", "aaaaaaa"],
    "the same everywhere": ["aaaaaaa"] * 3,
    "two": ["aaabbbb", "aaaaaab", "abbbbbb"],
    "of one token": ["abcdefg"] * 3,
    "some of one token": ["abbbbcc", "aabcdee", "aaaaaaa"],
    "in any order": ["cccaabb", "baaaaaa", "bbbbbaa"],
    "one goes on behind another": ["aabbaaa", "aaaaaaa", "abababa"],
}


def documents_of(rows, device=None):
    return torch.tensor([[ord(letter) - ord("d") for letter in row] for row in rows], device=device)


def tensors(B, H, G, S, K, dtype=torch.float32, device=None):
    made = [torch.randn(B, S, heads, K, dtype=dtype, device=device).transpose(1, 2) for heads in (H, G, G)]
    return [t.requires_grad_() for t in made]


def keep_of(name, S, device=None):
    keep = torch.ones(3, S, dtype=torch.bool, device=device)
    if name in ("right", "both"):
        keep[0, S // 2 :] = keep[2, S - S // 3 :] = False
    if name in ("left", "both"):
        keep[1, : S // 2] = keep[0, : S // 4] = False
    if name == "few":
        keep[0, 2:] = keep[1, :2] = keep[1, 3:] = False
    if name == "holes":
        keep[1, S // 2] = False
    return keep


def fused(window, keep=None, documents=None):
    def call(q, k, v):
        if documents is not None:
            read = kernels.document_starts(documents)
            return kernels.packed_attention(q, k, v, documents, *read, window, 0.3, True)[0]
        runs = None if keep is None else kernels.kept_runs(keep)
        return kernels.attention(q, k, v, keep, runs, window, 0.3, True)[0]

    return call


def idiom(window, keep=None, documents=None):
    """As models write it: repeated heads under an explicit mask."""

    def call(q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        at = torch.arange(q.shape[2], device=q.device)
        mask = (at <= at[:, None])[None, None]
        if window is not None:
            mask = mask & (at > at[:, None] - window)
        if keep is not None:
            mask = mask & keep[:, None, None, :]
        if documents is not None:
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    return call


@pytest.fixture(params=["a mask", "flash"])
def path(request, monkeypatch):
    """The path that a CPU takes, and the one that a GPU does, there by kernels in plain torch."""
    if request.param == "a mask":
        yield None
        return
    monkeypatch.setattr(flash, "refuse", lambda *_: None)
    monkeypatch.setattr(kernels, "_TOKENS_PER_DOCUMENT", 0)
    with _flash.on_the_cpu() as calls:
        yield calls


def check(inputs, *how):
    """By the yardstick; in float64, exactly."""
    judge(fused(*how), idiom(*how), inputs, [torch.randn_like(inputs[0])], largest=False)


def exactly(inputs, *how):
    dout = torch.randn_like(inputs[0])
    ours, theirs = (run(call(*how), inputs, [dout]) for call in (fused, idiom))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_window(shape, window, dtype, path):
    check(tensors(*SHAPES[shape], dtype=dtype), window)
    shorter = window < SHAPES[shape][3]
    assert path is None or path == (["forward", "backward"] if shorter else [])


@pytest.mark.parametrize("padding", ["none", "right", "left", "both", "few", "holes"])
@pytest.mark.parametrize(("S", "window"), [(7, 2), (7, 4), (7, 6), (40, 1), (40, 5), (40, 13), (40, 39)])
def test_window_and_padding(S, window, padding, path):
    inputs = tensors(3, 4, 2, S, 16, dtype=torch.float64)
    exactly(inputs, window, keep_of(padding, S))
    check([t.detach().float().requires_grad_() for t in inputs], window, keep_of(padding, S))
    assert path is None or "forward" in path


def test_what_is_seen_from_behind_a_run():
    """Queries behind a run see the last of its keys through a window that is open to the right; flash opens it no
    further than the number of keys, so that more queries than keys take a mask."""
    parts = [
        (p.rows.start, p.queries.start, p.queries.stop, p.keys.start, p.keys.stop, p.causal, p.masked, p.left)
        for p in split.parts_of(torch.tensor([[0, 6], [2, 9], [0, 9], [0, 2]]), torch.empty(4, 1, 9, 1), 4, False)
    ]
    assert parts == [
        (0, 0, 6, 0, 6, True, False, 3), (0, 6, 9, 3, 6, False, False, 0),
        (1, 2, 9, 2, 9, True, False, 3), (2, 0, 9, 0, 9, True, False, 3),
        (3, 0, 2, 0, 2, True, False, 3), (3, 2, 5, 0, 2, False, True, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name, window, path):
    documents = documents_of(DOCUMENTS[name])
    inputs = tensors(*SHAPES["grouped"], dtype=torch.float64)
    exactly(inputs, window, None, documents)
    for dtype in (torch.float32, torch.bfloat16):
        check([t.detach().to(dtype).requires_grad_() for t in inputs], window, None, documents)
    alone = name in ("one for each row", "the same everywhere") and window in (None, 9)
    if path is not None:
        assert bool(path) != (alone or name == "one goes on behind another")


def test_one_row_of_documents(path):
    documents = documents_of(["a" * 33 + "b" * 2 + "c" * 65])
    check(tensors(1, 4, 2, 100, 16), None, None, documents)
    assert path is None or path == ["forward", "backward"]


STARTS = {  # starts, how many, the longest
    "aaaa": ([0, 4, 4, 4, 4], 1, 4), "aabb": ([0, 2, 4, 4, 4], 2, 2), "abcd": ([0, 1, 2, 3, 4], 4, 1),
    "daac": ([0, 1, 3, 4, 4], 3, 2), "abba": ([0, 1, 3, 4, 4], -1, 2), "": ([0], -1, 0),
}  # fmt: skip


@pytest.mark.parametrize("row", STARTS)
def test_starts(row):
    starts, counts = kernels.document_starts(documents_of([row]).long().reshape(1, -1))
    assert (starts.tolist(), *counts.tolist()) == STARTS[row]


def test_starts_of_a_batch():
    starts, counts = kernels.document_starts(documents_of(["aabb", "bbba", "aaaa"]))
    assert starts.tolist() == [0, 2, 4, 7, 8, *[12] * 8] and counts.tolist() == [5, 4] and starts.dtype == torch.int32
    assert kernels.document_starts(documents_of(["aabb", "abab"]))[1].tolist()[0] == -1


def test_many_short_documents_take_a_mask(path, monkeypatch):
    """Flash's backward would allocate more for them than all else takes."""
    monkeypatch.setattr(kernels, "_TOKENS_PER_DOCUMENT", 32)
    for length, flashes in ((64, True), (63, False)):
        documents = documents_of(["a" * 30 + "b" * (length - 30)])
        with torch.no_grad():
            fused(None, None, documents)(*tensors(1, 2, 1, length, 8))
        assert path is None or bool(path) == flashes
        if path is not None:
            path.clear()


def test_one_document_is_attention_without_a_mask(path, monkeypatch):
    monkeypatch.setattr(split, "seen_by", lambda *_: pytest.fail("a mask was made"))
    monkeypatch.setattr(flash, "forward", lambda *_: pytest.fail("a kernel for documents was taken"))
    fused(None, None, documents_of(["aaaa", "bbbb"]))(*tensors(2, 4, 2, 4, 8))


@pytest.mark.parametrize("layout", ["as models have it", "contiguous", "every second channel"])
@pytest.mark.parametrize("how", [(2, None, None), (None, None, "two"), (2, None, "two"), (2, "right", None)], ids=str)
def test_layouts_and_shapes(layout, how, path):
    def made(heads):
        if layout == "every second channel":
            return torch.randn(3, heads, 7, 32)[..., ::2].requires_grad_()
        if layout == "contiguous":
            return torch.randn(3, heads, 7, 16).requires_grad_()
        return torch.randn(3, 7, heads, 16).transpose(1, 2).requires_grad_()

    window, keep, documents = how
    keep = keep and keep_of(keep, 7)
    documents = documents_of(DOCUMENTS[documents]) if documents else None
    inputs = [made(4), made(2), made(2)]
    check(inputs, window, keep, documents)
    if documents is None:
        ops = kernels.attention, kernels.attention_bwd
        read = (keep, None if keep is None else kernels.kept_runs(keep))
    else:
        ops = kernels.packed_attention, kernels.packed_attention_bwd
        read = (documents, *kernels.document_starts(documents))
    q, k, v = (t.detach() for t in inputs)
    out, lse = ops[0](q, k, v, *read, window, 0.3, True)
    real = [out, lse, *ops[1](out, q, k, v, out, lse, *read, window, 0.3, True)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v, out, lse)]
        promised = [*ops[0](*fakes[:3], *read, window, 0.3, True), *ops[1](fakes[3], *fakes, *read, window, 0.3, True)]
    for ours, fake in zip(real, promised, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_opcheck():
    q, k, v = tensors(*SHAPES["grouped"])
    keep, documents = keep_of("right", 7), documents_of(DOCUMENTS["two"])
    read = kernels.document_starts(documents)
    torch.library.opcheck(kernels.document_starts, (documents,))
    torch.library.opcheck(kernels.attention, (q, k, v, None, None, 3, 0.3, True))
    torch.library.opcheck(kernels.attention, (q, k, v, keep, kernels.kept_runs(keep), 3, 0.3, False))
    torch.library.opcheck(kernels.packed_attention, (q, k, v, documents, *read, None, 0.3, True))
    torch.library.opcheck(kernels.packed_attention, (q, k, v, documents, *read, 3, 0.3, True))


def test_no_second_derivative():
    inputs = tensors(*SHAPES["grouped"])
    for how in ((3,), (None, None, documents_of(DOCUMENTS["two"]))):
        (dq,) = torch.autograd.grad(fused(*how)(*inputs).sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            dq.sum().backward()


@pytest.mark.parametrize("documents", [None, 5])
def test_torchs_own_shapes(documents):
    """What torch says of its CUDA kernels' results is what is made of them here."""
    made = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    q, k, v = (made(2, 9, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    packed = documents and flash.Documents(torch.empty(documents + 1, dtype=torch.int32, device="meta"), 9)
    out, lse = flash.forward(q, k, v, 3, 0, 0.3, packed)
    grads = flash.backward(out, q, k, v, out, lse, 3, 0, 0.3, packed)
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    for ours, x in zip((out, *grads), (q, q, k, v), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (x.shape, x.stride(), x.dtype)


def test_where_flash_is_refused():
    device = torch.device
    assert "CUDA" in flash.refuse(device("cpu"), torch.bfloat16, 64)
    assert "float32" in flash.refuse(device("cuda"), torch.float32, 64)
    assert all("channels" in flash.refuse(device("cuda"), torch.float16, K) for K in (12, 200, 264))


# --- on a GPU ------------------------------------------------------------------------------------------------------

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def calls(monkeypatch):
    """The calls of flash's forward."""
    found, forward = [], flash.forward
    monkeypatch.setattr(flash, "forward", lambda *args: (found.append(args), forward(*args))[1])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 8, 2, 200, 64), (2, 4, 4, 257, 128), (1, 4, 1, 130, 256), (3, 2, 1, 1, 8)], ids=str
)
@pytest.mark.parametrize("window", [1, 2, 64, 129, 199, 4096])
def test_windows_on_a_gpu(shape, window, dtype, calls):
    check(tensors(*shape, dtype=dtype, device="cuda"), window)
    assert bool(calls) == (window < shape[3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("padding", ["none", "right", "left", "both", "few", "holes"])
@pytest.mark.parametrize("window", [1, 17, 150])
def test_windows_and_padding_on_a_gpu(padding, window, dtype, monkeypatch, calls):
    monkeypatch.setattr(split, "_CALL", 0)
    check(tensors(3, 8, 2, 200, 64, dtype=dtype, device="cuda"), window, keep_of(padding, 200, "cuda"))
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 40, 150])
@pytest.mark.parametrize("rows", [
    ["a" * 100 + "b" * 100] * 3, ["a" * 200, "a" * 199 + "b", "a" + "b" * 199], ["a" * 64 + "b" * 65 + "c" * 71],
    ["".join(chr(ord("a") + i // 3) for i in range(200))] * 2, ["".join(chr(i) for i in range(200))] * 2,
], ids=["halves", "ends", "one row", "threes", "ones"])  # fmt: skip
def test_documents_on_a_gpu(rows, window, dtype, monkeypatch, calls):
    monkeypatch.setattr(kernels, "_TOKENS_PER_DOCUMENT", 0)
    documents = documents_of(rows, "cuda")
    check(tensors(len(rows), 8, 2, 200, 64, dtype=dtype, device="cuda"), window, None, documents)
    lengths = [len(list(document)) for row in rows for _, document in itertools.groupby(row)]
    assert calls and calls[0][6].longest == max(lengths) and len(calls[0][6].starts) == len(lengths) + 1


@pytest.mark.gpu
def test_where_flash_does_not_go_a_mask_is_taken(calls):
    documents = documents_of(["a" * 30 + "b" * 34] * 2, "cuda")
    for how in ((5,), (None, None, documents), (5, None, documents)):
        check(tensors(2, 4, 2, 64, 32, device="cuda"), *how)
    assert not calls
