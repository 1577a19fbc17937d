"""attention: which masks are proven causal, whichever way they are built, and which are refused with a reason."""

import pytest
import torch
import torch.nn.functional as F
from _graphs import OPTIONS, assert_fused, assert_refused, assert_right, assert_unseen
from fused_backend.compiler import Options, explain
from fused_backend.compiler.backend import rewrite

S = 6


def qkv(heads=4, kv_heads=2, dtype=torch.float32, length=S):
    shapes = [(2, heads, length, 8), (2, kv_heads, length, 8), (2, kv_heads, length, 8)]
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def repeat_kv(x, repeats):
    B, H, S, K = x.shape
    return x[:, :, None, :, :].expand(B, H, repeats, S, K).reshape(B, H * repeats, S, K)


def attend(mask_of, repeat=repeat_kv):
    """Attention as models write it, under the mask that `mask_of(positions)` builds."""

    def attention(q, k, v):
        k, v = repeat(k, 2), repeat(v, 2)
        mask = mask_of(torch.arange(q.shape[2], device=q.device))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    return attention


def packed(positions):
    """Whether tokens belong to one sequence, as Hugging Face tells it from position ids."""
    ids = positions[None].expand(2, -1)
    which = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    b = torch.arange(2)[:, None, None, None]
    q, k = positions[None, None, :, None], positions[None, None, None, :]
    return q.new_ones((), dtype=torch.bool) & (ids[b, k] <= ids[b, q]) & (which[b, q] == which[b, k])


INF = float("inf")
CAUSAL = {
    "compare": lambda p: p[None, :] <= p[:, None],
    "greater or equal": lambda p: p[:, None] >= p[None, :],
    "strictly less than the next": lambda p: p < p[:, None] + 1,
    "negated": lambda p: ~(p[None, :] > p[:, None]),
    "difference": lambda p: (p.unsqueeze(0) - p.unsqueeze(1)) <= 0,
    "both shifted": lambda p: (p + 3)[None, :] <= (p + 3)[:, None],
    "tril": lambda p: torch.ones(S, S, dtype=torch.bool).tril(),
    "not triu": lambda p: torch.logical_not(torch.triu(torch.ones(S, S, dtype=torch.bool), diagonal=1)),
    "a cast of tril": lambda p: torch.full((S, S), 1).bool().tril()[None, None],
    "four dimensions": lambda p: (p[None, None, None, :] <= p[None, None, :, None]).expand(2, -1, S, S),
    "viewed": lambda p: (p[None, :] <= p[:, None]).view(1, 1, S, S),
    "and what always holds": lambda p: (p[None, :] <= p[:, None]) & (p[None, :] >= 0) & (p[:, None] < S),
    "or what never holds": lambda p: (p[None, :] <= p[:, None]) | (p[None, :] > p[:, None] + S).new_zeros(()),
    "a wide window": lambda p: (p[None, :] <= p[:, None]) & (p[None, :] > p[:, None] - S),
    "a slice": lambda p: torch.arange(9)[None, 1:7] <= torch.arange(9)[1:7, None],
    "rows by position": lambda p: p[p][None, :] <= p[p[:, None]],
    "packed, one sequence": packed,
    "added, full and triu": lambda p: torch.triu(torch.full((S, S), -INF), diagonal=1),
    "added, behind nothing": lambda p: torch.hstack([torch.zeros((S, 0)), torch.full((S, S), -INF).triu(1)]),
    "added, masked_fill": lambda p: torch.zeros(S, S).masked_fill(p[None, :] > p[:, None], -INF),
    "added, where": lambda p: torch.where(p[None, :] <= p[:, None], 0.0, -INF)[None, None],
    "added, where with tensors": lambda p: torch.where(
        torch.ones(S, S, dtype=torch.bool).tril(), torch.zeros(()), torch.full((), torch.finfo(torch.float32).min)
    ).expand(2, 1, S, S),
    "added, the least number": lambda p: torch.full((S, S), torch.finfo(torch.float32).min).triu(1) + 0.0,
    "added, in two parts": lambda p: (
        torch.zeros(S, S).masked_fill(p[None, :] > p[:, None], -INF)
        + torch.where(p[None, :] > p[:, None] + S, -INF, 0.0)
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_folded(name):
    assert_fused(attend(CAUSAL[name]), qkv(), "attention")


def later(p):
    p = p.clone()
    p[3] = 0
    return p[None, :] <= p[:, None]


OTHER = {
    "strict": (lambda p: p[None, :] < p[:, None], "key - query + 1 <= 0"),
    "one more": (lambda p: p[None, :] <= p[:, None] + 1, "not causal"),
    "reversed": (lambda p: p[None, :] >= p[:, None], "-key + query <= 0"),
    "tril of another diagonal": (lambda p: torch.ones(S, S, dtype=torch.bool).tril(1), "not causal"),
    "everything": (lambda p: p[None, :] <= p[:, None] + S, "not causal"),
    "nothing": (lambda p: p[None, :] > p[:, None] + S, "not causal"),
    "chunks": (lambda p: (p[None, :] <= p[:, None]) & (p[None, :] // 3 == p[:, None] // 3), "depends on"),
    "strided": (lambda p: p[None, :] <= torch.arange(0, 2 * S, 2)[:, None], "not causal"),
    "wrapped around": (lambda p: p[None, :] <= (p[(p - 1)] + 1)[:, None], "depends on"),
    "or": (lambda p: (p[None, :] <= p[:, None]) | (p[None, :] == 0), "depends on"),
    "the first token": (lambda p: (p[None, :] <= p[:, None]) & (p[None, :] == 0), "only keys where key == 0"),
    "written to": (later, "modified in place"),
    "added, of another diagonal": (lambda p: torch.full((S, S), -INF).triu(2), "not causal"),
    "added, reversed": (lambda p: torch.full((S, S), -INF).tril(-1), "-key + query <= 0"),
    "added, above all": (lambda p: torch.where(p[None, :] <= p[:, None], -INF, 0.0).tril(-1), "added to the scores"),
    "added, not so much": (lambda p: torch.full((S, S), -9.0).triu(1), "added to the scores"),
    "added, with a slope": (
        lambda p: torch.full((S, S), -INF).triu(1) + (p[None, :] - p[:, None]) * 0.5,
        "added to the scores",
    ),
    "added, all hidden": (lambda p: torch.full((S, S), torch.finfo(torch.float32).min), "lets no query see any key"),
    "added, written to": (lambda p: torch.zeros(S, S).fill_(-INF).triu(1), "modified in place"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_mask_is_refused(name):
    mask_of, reason = OTHER[name]
    assert_refused(attend(mask_of), qkv(), "attention", reason)


def test_a_mask_that_is_given_is_refused():
    def attention(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask)

    inputs = [*qkv(4, 4), torch.ones(2, 1, S, S, dtype=torch.bool).tril()]
    assert_refused(attention, inputs, "attention", "depends on")


def interleave(x, repeats):
    return x.repeat_interleave(repeats, dim=1)


def before_they_are_moved(x, repeats):
    B, H, S, K = x.shape
    x = x.transpose(1, 2)
    return x[:, :, :, None, :].expand(B, S, H, repeats, K).reshape(B, S, H * repeats, K).transpose(1, 2)


def interleaved_before(x, repeats):
    return torch.repeat_interleave(x.transpose(1, 2), repeats, dim=2).transpose(1, 2)


def tiled(x, repeats):
    """Another order of the heads: the first of each group, then the second."""
    return x.repeat(1, repeats, 1, 1)


def along_the_sequence(x, repeats):
    """As many numbers in the same places of memory, but what is repeated are positions."""
    B, H, S, K = x.shape
    x = x.transpose(1, 2).reshape(B, S // 2, H * 2, K)
    return x[:, :, None].expand(B, S // 2, repeats, H * 2, K).reshape(B, S, H * repeats, K).transpose(1, 2)


@pytest.mark.parametrize("repeat", [tiled, along_the_sequence])
def test_what_is_repeated_otherwise_stays(repeat):
    fn = attend(CAUSAL["compare"], repeat)
    assert_fused(fn, qkv(), "attention")
    assert call_of(fn, qkv())[1] == [(2, 4, S, 8)] * 2


def call_of(fn, inputs):
    """The attention of the rewritten graph: its node, and the shapes of k and v."""
    found = []

    def collect(gm, example_inputs):
        rewrite(gm, Options())
        for node in gm.graph.nodes:
            if node.target in (F.scaled_dot_product_attention, torch.ops.fused_backend.attention.default):
                found.append((node, [tuple(a.meta["example_value"].shape) for a in node.args[1:3]]))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=collect)(*inputs)
    return found[0]


@pytest.mark.parametrize("repeat", [repeat_kv, interleave, before_they_are_moved, interleaved_before])
def test_heads_are_not_repeated(repeat):
    fn = attend(CAUSAL["compare"], repeat)
    assert_fused(fn, qkv(), "attention")
    node, shapes = call_of(fn, qkv())
    assert shapes == [(2, 2, S, 8)] * 2 and node.args[3:] == (None, None, None, 0.3, True)


def test_where_our_operator_has_no_kernel_torchs_own_takes_the_place():
    fn = attend(CAUSAL["compare"])
    q, k, _ = qkv()
    inputs = [q, k, torch.randn(2, 2, S, 16).requires_grad_()]
    assert_fused(fn, inputs, "attention")
    node, shapes = call_of(fn, inputs)
    assert node.kwargs == {
        "attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.3, "enable_gqa": True
    }  # fmt: skip
    assert shapes == [(2, 2, S, 8), (2, 2, S, 16)]


def padded(q, k, v, kept):
    p = torch.arange(S)
    mask = (p[None, :] <= p[:, None])[None, None] & kept[:, None, None, :].bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def kept(of=2):
    mask = torch.ones(of, S, dtype=torch.int64)
    mask[0, 4:] = 0
    return mask


def test_padding():
    assert_fused(padded, [*qkv(4, 4), kept()], "attention")
    assert_refused(padded, [*qkv(4, 4), kept(of=1)], "attention", "depends on")  # one row for the whole batch


def test_padding_where_our_operator_has_no_kernel():
    inputs = [*qkv(4, 4)[:2], torch.randn(2, 4, S, 16).requires_grad_(), kept()]
    assert_refused(padded, inputs, "attention", "channels")


def test_two_paddings_are_refused():
    def attention(q, k, v, a, b):
        return padded(q, k, v, a.bool() & b.bool())

    def apart(q, k, v, a, b):
        p = torch.arange(S)
        mask = (p[None, :] <= p[:, None])[None, None] & a[:, None, None, :].bool() & b[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for fn in (attention, apart):
        assert_refused(fn, [*qkv(4, 4), kept(), kept()], "attention", "depends on")


def test_padding_of_queries_is_refused():
    def attention(q, k, v, kept):
        p = torch.arange(S)
        mask = (p[None, :] <= p[:, None])[None, None] & kept[:, None, :, None].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert_refused(attention, [*qkv(4, 4), kept()], "attention", "depends on")


def test_padding_that_is_written_to_is_refused():
    def attention(q, k, v, kept):
        out = padded(q, k, v, kept)
        kept.add_(1)
        return out

    decisions = explain(attention, *qkv(4, 4), kept()).decisions
    assert [d.status for d in decisions] == ["refused"] and "modified in place" in decisions[0].reason


def test_kernels_that_are_switched_off_stay_off():
    fn = attend(CAUSAL["compare"])
    try:
        torch.backends.cuda.enable_flash_sdp(False)
        assert call_of(fn, qkv())[0].target is F.scaled_dot_product_attention
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def tile(x, repeats):
    return x.repeat(1, repeats, 1, 1)


def expand_outside(x, repeats):
    B, H, S, K = x.shape
    return x[:, None].expand(B, repeats, H, S, K).reshape(B, H * repeats, S, K)


@pytest.mark.parametrize("repeat", [tile, expand_outside])
def test_heads_in_another_order_stay_repeated(repeat):
    fn = attend(CAUSAL["compare"], repeat)
    assert_fused(fn, qkv(), "attention")
    assert call_of(fn, qkv())[1] == [(2, 4, S, 8)] * 2


def test_only_keys_repeated():
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), v, is_causal=True)

    q, k, _ = qkv()
    assert_fused(attention, [q, k, torch.randn(2, 4, S, 8).requires_grad_()], "attention")


def test_keys_repeated_without_gradient_are_refused():
    def attention(q, k, v):
        with torch.no_grad():
            k = repeat_kv(k, 2)
        return F.scaled_dot_product_attention(q, k, repeat_kv(v, 2), is_causal=True)

    assert_refused(attention, qkv(), "attention", "without gradients")


def test_dropout_is_refused():
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)

    decisions = explain(attention, *qkv(4, 4)).decisions
    assert [d.status for d in decisions] == ["refused"] and "dropout" in decisions[0].reason


def test_attention_without_a_mask_is_no_site():
    assert_unseen(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), qkv(4, 4), "attention")


SHAPES = {  # (batch, heads) of q, k, v
    "k and v for all of a batch": ((2, 4), (1, 4), (1, 4)),
    "v for all of a batch": ((2, 4), (2, 4), (1, 4)),
    "v for all heads": ((2, 4), (2, 4), (2, 1)),
    "q for all of a batch": ((1, 4), (2, 4), (2, 4)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_are_broadcast_are_refused(name):
    """torch's kernels check nothing and read beyond the smaller tensor."""
    inputs = [torch.randn(*shape, S, 8).requires_grad_() for shape in SHAPES[name]]
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    assert_refused(fn, inputs, "attention", "of different batches, or k and v of different heads")


def test_the_least_float16_in_a_wider_mask_is_refused():
    """Large scores outweigh it."""
    mask = lambda: torch.full((S, S), -65504.0).triu(1)  # noqa: E731
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(), scale=1e4)  # noqa: E731
    assert_refused(fn, [3 * torch.randn(2, 4, S, 8) for _ in "qkv"], "attention")


def test_more_keys_than_queries_are_refused():
    def attention(q, k, v):
        mask = torch.arange(S)[None, :] <= torch.arange(S)[2:, None]
        return F.scaled_dot_product_attention(q[:, :, 2:], k, v, mask)

    assert_refused(attention, qkv(4, 4), "attention", "queries and")


LENGTH_UNKNOWN = {
    "compare": CAUSAL["compare"],
    "packed, one sequence": packed,
    "expanded": lambda p: (p[None, :] <= p[:, None])[None, None].expand(2, -1, -1, -1),
    "tril": lambda p: torch.ones(len(p), len(p), dtype=torch.bool).tril()[None, None],
}


@pytest.mark.parametrize("name", LENGTH_UNKNOWN)
def test_a_length_that_is_not_known(name):
    fn, graphs = attend(LENGTH_UNKNOWN[name]), []

    def collect(gm, example_inputs):
        graphs.append(rewrite(gm, Options())[0].summary())
        return gm.forward

    inputs = qkv()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    torch.compile(fn, backend=collect)(*inputs)
    assert graphs == ["attention 1/1"]
    compiled = torch.compile(fn, backend="fused", options=OPTIONS, dynamic=True)
    for length in (5, 9):
        inputs = qkv(length=length)
        torch.testing.assert_close(compiled(*inputs), fn(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    assert_fused(attend(CAUSAL["compare"]), qkv(dtype=dtype), "attention")


def test_under_autocast():
    def attention(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(CAUSAL["compare"])(q, k, v)

    assert explain(attention, *qkv()).counts() == {"attention": (1, 0)}
    assert_right(attention, qkv())
