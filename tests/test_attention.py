"""attention: the operator against torch's own under the mask that padding makes, in every row and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from _oracle import judge, run
from fused_backend.kernels import _parts as split
from fused_backend.kernels import _sdpa as sdpa
from fused_backend.kernels import attention as kernels
from torch._subclasses.fake_tensor import FakeTensorMode

SHAPES = {
    "grouped": (3, 4, 2, 7, 16),
    "one key head": (3, 4, 1, 6, 8),
    "no groups": (3, 3, 3, 5, 32),
    "one token": (3, 2, 1, 1, 8),
    "longer": (3, 2, 1, 70, 24),
}


def tensors(B, H, G, S, K, dtype=torch.float32, device=None):
    made = [torch.randn(B, heads, S, K, dtype=dtype, device=device) for heads in (H, G, G)]
    return [t.requires_grad_() for t in made]


def paddings(S, device=None):
    """name -> (3, S) of what is kept."""
    none = torch.ones(3, S, dtype=torch.bool, device=device)
    right, left, both, holes, empty = (none.clone() for _ in range(5))
    right[0, S // 2 :] = right[2, S - S // 3 :] = False
    left[1, : S // 2] = False
    both[0, : S // 3] = both[0, S - S // 3 :] = both[2, S // 2 :] = False
    holes[1, S // 2] = holes[2, S - 1 :] = False
    empty[1] = False
    return {"none": none, "right": right, "left": left, "both": both, "holes": holes, "an empty row": empty}


def fused(keep=None, scale=0.3):
    def call(q, k, v):
        runs = None if keep is None else kernels.kept_runs(keep)
        return kernels.attention(q, k, v, keep, runs, None, scale, True)[0]

    return call


def idiom(keep=None, scale=0.3):
    """As models write it: repeated heads under an explicit mask."""

    def call(q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        S = q.shape[2]
        mask = torch.ones(S, S, dtype=torch.bool, device=q.device).tril()[None, None]
        mask = mask if keep is None else mask & keep[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return call


@pytest.fixture(params=["torch's kernel", "math"])
def kind(request, monkeypatch):
    if request.param == "math":
        monkeypatch.setattr(sdpa, "kind_of", lambda *args: "math")


def check(inputs, keep=None):
    judge(fused(keep), idiom(keep), inputs, [torch.randn_like(inputs[0])], largest=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_causal(shape, dtype, kind):
    check(tensors(*SHAPES[shape], dtype=dtype))


@pytest.mark.parametrize("padding", paddings(7))
def test_float64(padding, kind):
    """Where torch's own is no more exact than ours."""
    inputs, keep = tensors(*SHAPES["grouped"], dtype=torch.float64), paddings(7)[padding]
    dout = torch.randn_like(inputs[0])
    ours, theirs = (run(call(keep), inputs, [dout]) for call in (fused, idiom))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", paddings(7))
def test_padded(padding, dtype, kind):
    check(tensors(*SHAPES["grouped"], dtype=dtype), paddings(7)[padding])


@pytest.mark.parametrize("padding", paddings(1))
def test_padded_to_one_token(padding):
    check(tensors(*SHAPES["one token"]), paddings(1)[padding])


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient():
    keep = paddings(7)["left"]
    inputs = tensors(*SHAPES["grouped"])
    out = fused(keep)(*inputs)
    dq, dk, dv = torch.autograd.grad(out.sum(), inputs)
    assert not out[1, :, :3].any() and not dq[1, :, :3].any() and not dk[1, :, :3].any() and not dv[1, :, :3].any()


def test_values_of_pads_do_not_matter():
    keep = paddings(7)["right"]
    q, k, v = tensors(*SHAPES["grouped"])
    with torch.no_grad():
        before = fused(keep)(q, k, v)
        for x in (k, v):
            x[0, :, 4:] = float("nan")
        after = fused(keep)(q, k, v)
    assert torch.equal(before, after)


RUNS = {
    "1111": (0, 4), "1110": (0, 3), "0111": (1, 4), "0110": (1, 3), "1000": (0, 1), "0001": (3, 4),
    "0000": (4, 4), "1011": (-1, -1), "1001": (-1, -1), "0101": (-1, -1),
}  # fmt: skip


def test_runs():
    keep = torch.tensor([[bit == "1" for bit in row] for row in RUNS])
    assert [tuple(row) for row in kernels.kept_runs(keep).tolist()] == list(RUNS.values())


def test_rows_with_equal_runs_share_their_calls():
    runs = torch.tensor([[0, 6], [0, 6], [0, 4], [2, 6], [2, 6], [-1, -1]])
    parts = [(p.rows.start, p.rows.stop, p.queries.start, p.queries.stop, p.causal, p.masked) for p in
             split.parts_of(runs, torch.empty(6, 1, 6, 1), None, False)]  # fmt: skip
    assert parts == [
        (0, 2, 0, 6, True, False), (2, 3, 0, 4, True, False), (2, 3, 4, 6, False, False),
        (3, 5, 2, 6, True, False), (5, 6, 0, 6, False, True),
    ]  # fmt: skip


def test_many_short_calls_give_way_to_one_with_a_mask():
    few, many = [[0, 4096], [0, 3000]], [[0, n] for n in range(600, 1000, 50)]
    assert not split._many(few, 2 * 32 * 4096**2 * 128) and split._many(many, 8 * 32 * 1024**2 * 128)
    assert not split._many(many, 8 * 32 * 8192**2 * 128) and not split._many([[0, 9]] * 8, 1)


def test_no_padding_is_one_call_without_a_mask(monkeypatch):
    calls, forward = [], sdpa.forward

    def count(*args):
        calls.append(args)
        return forward(*args)

    monkeypatch.setattr(sdpa, "forward", count)
    monkeypatch.setattr(split, "seen_by", lambda *args: pytest.fail("a mask was made"))
    fused(paddings(7)["none"])(*tensors(*SHAPES["grouped"]))
    assert len(calls) == 1 and calls[0][4] is True


@pytest.mark.parametrize("layout", ["as models have it", "every second channel"])
def test_layouts_and_shapes(layout):
    def made(heads):
        if layout == "every second channel":
            return torch.randn(3, heads, 7, 32)[..., ::2].requires_grad_()
        return torch.randn(3, 7, heads, 16).transpose(1, 2).requires_grad_()

    inputs = [made(4), made(2), made(2)]
    check(inputs, paddings(7)["both"])
    check(inputs)
    for keep in (None, paddings(7)["both"], paddings(7)["none"]):
        q, k, v = (t.detach() for t in inputs)
        runs = None if keep is None else kernels.kept_runs(keep)
        out, lse = kernels.attention(q, k, v, keep, runs, None, 0.3, True)
        real = [out, lse, *kernels.attention_bwd(out, q, k, v, out, lse, keep, runs, None, 0.3, True)]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(t) for t in (q, k, v, out, lse)]
            promised = [
                *kernels.attention(*fakes[:3], None, None, None, 0.3, True),
                *kernels.attention_bwd(fakes[3], *fakes, None, None, None, 0.3, True),
            ]
        for ours, fake in zip(real, promised, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_opcheck():
    q, k, v = tensors(*SHAPES["grouped"])
    keep = paddings(7)["right"]
    torch.library.opcheck(kernels.attention, (q, k, v, None, None, None, 0.3, True))
    torch.library.opcheck(kernels.attention, (q, k, v, keep, kernels.kept_runs(keep), None, 0.3, False))
    torch.library.opcheck(kernels.kept_runs, (keep,))


@pytest.mark.parametrize("shape", [(1, 4, 6, 8), (2, 3, 6, 8), (2, 4, 5, 8), (2, 4, 6, 16)])
def test_shapes_that_do_not_fit_are_refused(shape):
    q, k = torch.randn(2, 4, 6, 8), torch.randn(shape)
    with pytest.raises(ValueError, match="with G dividing H"):
        torch.ops.fused_backend.attention(q, k, k, None, None, None, 0.3, True)


def test_no_second_derivative():
    inputs = tensors(*SHAPES["grouped"])
    (dq,) = torch.autograd.grad(fused()(*inputs).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()


# --- on a GPU ------------------------------------------------------------------------------------------------------

KINDS = ("flash", "cudnn", "efficient", "math")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padding", [None, *paddings(7)])
@pytest.mark.parametrize("call", [0, split._CALL])
def test_on_a_gpu(padding, dtype, call, monkeypatch):
    """Where calls cost nothing, runs are taken, and where they cost much, a mask."""
    monkeypatch.setattr(split, "_CALL", call)
    keep = None if padding is None else paddings(200, "cuda")[padding]
    check(tensors(3, 8, 2, 200, 64, dtype=dtype, device="cuda"), keep)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_that_torch_allows(name, causal):
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (t.detach() for t in tensors(2, 8, 2, 130, 64, dtype=dtype, device="cuda"))
        if name not in sdpa._usable(q, k, causal):
            continue
        dout = torch.randn_like(q)
        out, lse = sdpa.forward(name, q, k, v, causal, 0.3)
        ours = [out, *sdpa.backward(name, dout, q, k, v, out, lse.contiguous(), causal, 0.3)]
        wide = [t.double() for t in (q, k, v)]
        o, sums = sdpa.forward("math", *wide, causal, 0.3)
        truth = [o, *sdpa.backward("math", dout.double(), *wide, o, sums, causal, 0.3)]
        bound = 8 * torch.finfo(dtype).eps
        for a, b in zip(ours, truth, strict=True):
            assert (a.double() - b).norm() <= bound * b.norm(), (name, dtype)


@pytest.mark.gpu
def test_the_choice_is_measured_once(monkeypatch, tmp_path):
    monkeypatch.setattr(sdpa, "_KINDS", {})
    monkeypatch.setattr(sdpa, "_path", lambda: tmp_path / "attention.json")
    q, k, _ = (t.detach() for t in tensors(2, 8, 2, 256, 64, dtype=torch.bfloat16, device="cuda"))
    first = sdpa.kind_of(q, k, True)
    assert first in ("flash", "cudnn") and len(sdpa._KINDS) == 1
    monkeypatch.setattr(sdpa, "_fastest", lambda *args: pytest.fail("measured again"))
    assert sdpa.kind_of(q, k, True) == first
    sdpa._KINDS.clear()
    assert sdpa.kind_of(q, k, True) == first  # from disk
