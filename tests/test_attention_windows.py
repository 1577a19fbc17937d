"""attention: which masks are proven to be sliding windows or packed documents, and which look like it and are not."""

import functools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from _graphs import OPTIONS, assert_fused, assert_refused, assert_right, operators
from fused_backend.compiler import Options, explain
from fused_backend.compiler.backend import rewrite

checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
S, INF = 9, float("inf")
# Of one row three documents, of the other two; as positions that begin anew.
IDS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 2, 3, 4]])
NAMES = torch.tensor([[3, 3, 3, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 7, 7, 7]])
WIDE = NAMES + torch.arange(S) * 2**32  # as NAMES in 32 bits
AGAIN = torch.tensor([[3, 3, 1, 1, 3, 3, 2, 2, 2], [0, 1, 0, 1, 0, 1, 0, 1, 0]])


def qkv(dtype=torch.float32, rows=2):
    return [torch.randn(rows, heads, S, 8, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]


def attend(mask_of):
    """Attention under the mask that `mask_of(positions)` or `mask_of(positions, tensor)` builds."""

    def attention(q, k, v, *given):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        mask = mask_of(torch.arange(q.shape[2]), *given)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    return attention


def causal(p):
    return p[None, :] <= p[:, None]


WINDOWS = {
    "Hugging Face's": (4, lambda p: (p[None, :] > p[:, None] - 4) & causal(p)),
    "less": (4, lambda p: causal(p) & (p[:, None] - p[None, :] < 4)),
    "less or equal": (4, lambda p: causal(p) & (p[:, None] <= p[None, :] + 3)),
    "not outside": (4, lambda p: causal(p) & ~(p[:, None] - p[None, :] >= 4)),
    "triangles": (4, lambda p: torch.ones(S, S, dtype=torch.bool).tril().triu(-3)),
    "both shifted": (4, lambda p: causal(p) & ((p + 5)[None, :] > (p + 5)[:, None] - 4)),
    "one less than all": (S - 1, lambda p: causal(p) & (p[None, :] > p[:, None] - S + 1)),
    "itself alone": (1, lambda p: causal(p) & (p[None, :] >= p[:, None])),
    "two": (2, lambda p: causal(p) & (p[None, :] > p[:, None] - 5) & (p[None, :] > p[:, None] - 2)),
    "four dimensions": (4, lambda p: (causal(p) & (p[None, :] > p[:, None] - 4))[None, None].expand(2, -1, S, S)),
    "added": (4, lambda p: torch.full((S, S), -INF).triu(1) + torch.full((S, S), -INF).tril(-4)),
    "added, the least number": (4, lambda p: torch.where(
        causal(p) & (p[None, :] > p[:, None] - 4), 0.0, torch.finfo(torch.float32).min)),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window(name):
    window, mask_of = WINDOWS[name]
    assert_fused(attend(mask_of), qkv(), "attention")
    assert operators(attend(mask_of), qkv())["attention"][3:] == (None, None, window, 0.3, True)


def test_a_window_and_padding():
    kept = torch.ones(2, S, dtype=torch.int64)
    kept[0, 5:] = kept[1, :2] = 0
    mask_of = lambda p, kept: (WINDOWS["less"][1](p))[None, None] & kept[:, None, None, :].bool()  # noqa: E731
    assert_fused(attend(mask_of), [*qkv(), kept], "attention")
    assert operators(attend(mask_of), [*qkv(), kept])["attention"][5] == 4


NO_WINDOWS = {
    "into the future": (lambda p: p[None, :] < p[:, None] + 3, "not causal"),
    "into the past and the future": (
        lambda p: (p[None, :] < p[:, None] + 3) & (p[None, :] > p[:, None] - 3), "not causal"),
    "both ways": (lambda p: (p[None, :] - p[:, None]).abs() < 3, "depends on"),
    "empty": (lambda p: causal(p) & (p[None, :] > p[:, None]), "sees only keys where"),
    "before itself": (lambda p: (p[None, :] < p[:, None]) & (p[None, :] > p[:, None] - 4), "not causal"),
    "growing": (lambda p: causal(p) & (2 * p[None, :] >= p[:, None]), "sees only keys where"),
    "of half the rate": (lambda p: causal(p) & (2 * p[None, :] > 2 * p[:, None] - 4), "sees only keys where"),
    "the first tokens too": (lambda p: causal(p) & ((p[None, :] > p[:, None] - 4) | (p[None, :] < 1)), "depends on"),
    "of a head": (
        lambda p: causal(p) & (p[:, None] - p[None, :] < torch.arange(2, 6)[:, None, None]), "sees only keys where"),
    "given": (lambda p, of: causal(p) & (p[:, None] - p[None, :] < of[:, :1, None, None]), "depends on"),
    "given as a number": (lambda p, of: causal(p) & (p[:, None] - p[None, :] < of), "depends on"),
    "True + True": (
        lambda p: causal(p) & (p[:, None] - p[None, :] <= ((p >= 0) + (p >= 0)).long()), "depends on"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_WINDOWS)
def test_no_window(name):
    mask_of, reason = NO_WINDOWS[name]
    given = {"given": [torch.tensor([[3], [5]])], "given as a number": [torch.tensor(4)]}.get(name, [])
    assert_refused(attend(mask_of), [*qkv(), *given], "attention", reason)


def same(d):
    return d[:, None, :, None] == d[:, None, None, :]


def begun(p, where):
    """Documents counted up: a token for which `where` is not 0 begins the next."""
    return same(where.cumsum(-1)) & causal(p)


def hugging_face(p, ids, window=None, step=1, compared=None):
    """As transformers builds it: position ids in the place of positions."""
    compared = ids if compared is None else compared
    first = ids[:, :1] - step
    d = (torch.diff(ids, prepend=first, dim=-1) != step).cumsum(-1)
    b, q, k = torch.arange(ids.shape[0])[:, None, None, None], p[None, None, :, None], p[None, None, None, :]
    mask = q.new_ones((), dtype=torch.bool)
    if window is not None:
        mask = mask & (compared[b, k] > compared[b, q] - window)
    return mask & (compared[b, k] <= compared[b, q]) & (d[b, q] == d[b, k])


DOCUMENTS = {
    "Hugging Face's": (None, hugging_face),
    "Hugging Face's, with a window": (2, lambda p, ids: hugging_face(p, ids, 2)),
    "Hugging Face's, of one row": (None, lambda p, ids: hugging_face(p, ids[:1].expand(2, -1))),
    "Hugging Face's, narrow": (None, lambda p, ids: hugging_face(p, ids.int())),
    "Hugging Face's, before it compared position ids": (
        None, lambda p, ids: causal(p) & same((torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1))),
    "begun at 0": (None, lambda p, ids: begun(p, ids == 0)),
    "begun at 0, as numbers": (None, lambda p, ids: begun(p, (ids == 0).long())),
    "counted down by another": (None, lambda p, ids: begun(p, 1 - ids.clamp(max=1))),
    "named": (None, lambda p, ids: causal(p) & same(NAMES)),
    "named, with a window": (3, lambda p, ids: causal(p) & (p[None, :] > p[:, None] - 3) & same(NAMES)),
    "not different": (None, lambda p, ids: causal(p) & ~(NAMES[:, None, :, None] != NAMES[:, None, None, :])),
    "their difference": (None, lambda p, ids: causal(p) & (NAMES[:, None, :, None] - NAMES[:, None, None, :] == 0)),
    "in fewer bits": (None, lambda p, ids: causal(p) & same(WIDE.int())),
    "one goes on behind another": (None, lambda p, ids: causal(p) & same(AGAIN)),
    "added": (None, lambda p, ids: torch.where(causal(p) & same(NAMES), 0.0, -INF)),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name):
    window, mask_of = DOCUMENTS[name]
    inputs = [*qkv(), IDS]
    assert_fused(attend(mask_of), inputs, "attention")
    assert operators(attend(mask_of), inputs)["packed_attention"][6:] == (window, 0.3, True)


def test_documents_of_one_row():
    assert_fused(attend(hugging_face), [*qkv(rows=1), IDS[:1]], "attention")


def not_later(ids):
    return ids[:, None, None, :] <= ids[:, None, :, None]


NO_DOCUMENTS = {
    "all but its own": (lambda p, ids: causal(p) & (NAMES[:, None, :, None] != NAMES[:, None, None, :])),
    "earlier ones too": (lambda p, ids: causal(p) & (NAMES[:, None, :, None] <= NAMES[:, None, None, :])),
    "of the key before": (
        lambda p, ids: causal(p) & (NAMES[:, None, :, None] == NAMES[:, p[None, None, None, :] - 1].squeeze(1))),
    "a number": (lambda p, ids: causal(p) & (NAMES[:, None, None, :] == 0)),
    "of floating point": (lambda p, ids: causal(p) & same(NAMES * 0.5)),
    "of a head": (
        lambda p, ids: causal(p) & (NAMES[:, None, :, None] - NAMES[:, None, None] == torch.arange(4)[:, None, None])),
    "of all rows": (lambda p, ids: causal(p) & same(NAMES[:1])),
    "of two kinds": (lambda p, ids: causal(p) & same(NAMES) & same(ids)),
    "without causality": (lambda p, ids: same(NAMES).expand(2, 1, S, S)),
    "both ways, from position ids": (
        lambda p, ids: same((torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1))),
    "other position ids are compared": (lambda p, ids: hugging_face(p, ids, compared=ids.flip(-1))),
    "position ids in steps of two": (lambda p, ids: hugging_face(p, ids, step=2)),
    "position ids that fall begin nothing": (
        lambda p, ids: same((torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) > 1).cumsum(-1)) & not_later(ids)),
    "position ids, and names from elsewhere": (lambda p, ids: not_later(ids) & same(NAMES)),
    "counted along the batch": (
        lambda p, ids: same((torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(0)) & not_later(ids)),
    "and padding": (lambda p, ids: causal(p) & same(NAMES) & ids.bool()[:, None, None, :]),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_DOCUMENTS)
def test_no_documents(name):
    reason = "not causal" if name in ("without causality", "both ways, from position ids") else "depends on"
    reason = "documents are padded" if name == "and padding" else reason
    if name == "position ids in steps of two":
        reason = "not causal"
    assert_refused(attend(NO_DOCUMENTS[name]), [*qkv(), IDS], "attention", reason)


def test_documents_that_are_written_to_are_refused():
    def attention(q, k, v, ids):
        out = attend(lambda p, ids: causal(p) & same(ids))(q, k, v, ids)
        ids.add_(1)
        return out

    decisions = explain(attention, *qkv(), IDS.clone()).decisions
    assert [d.status for d in decisions] == ["refused"] and "modified in place" in decisions[0].reason


@pytest.mark.parametrize("run", [lambda layer, *inputs: layer(*inputs), checkpoint], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("sees", [same, lambda ids: ids.bool()[:, None, None, :]], ids=["documents", "padding"])
def test_a_refused_site_leaves_the_next_one_alone(sees, run):
    """What is read of documents or padding is written for the first site that is fused, not for one given up."""

    def layer(q, k, v, mask):
        q, k, v = (x[:, :2] for x in (q, k, v))
        columns = q.mT.contiguous().mT  # torch's result has rows, ours would be laid out as q
        first = F.scaled_dot_product_attention(columns, k, v, attn_mask=mask).view(2, -1)
        return F.scaled_dot_product_attention(first.view(q.shape), k, v, attn_mask=mask)

    def attention(q, k, v, ids):
        return run(layer, q, k, v, causal(torch.arange(S)) & sees(ids))

    inputs = [*qkv(), IDS]
    assert [d.status for d in explain(attention, *inputs).decisions] == ["refused", "fused"]
    assert_right(attention, inputs)


def test_where_our_operator_has_no_kernel():
    q, k, _ = qkv()
    inputs = [q, k, torch.randn(2, 2, S, 16).requires_grad_(), IDS]
    assert_refused(attend(lambda p, ids: WINDOWS["less"][1](p)), inputs, "attention", "channels")
    assert_refused(attend(hugging_face), inputs, "attention", "channels")


def test_a_window_and_a_length_that_is_not_known():
    """What it hides is known when the operator runs; a length that the window is sure to reach needs none."""
    fn, reasons = attend(lambda p: causal(p) & (p[None, :] > p[:, None] - 6)), []

    def collect(gm, example_inputs):
        reasons.extend(d.reason for d in rewrite(gm, Options())[0].decisions)
        return gm.forward

    inputs = qkv()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    torch.compile(fn, backend=collect)(*inputs)
    assert reasons == ["sliding window"]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="fused", options=OPTIONS)
    for length in (9, 4, 6, 7):  # of the second on, one graph for all
        inputs = [x[:, :, :length] for x in qkv()]
        torch.testing.assert_close(compiled(*inputs), fn(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    assert_fused(attend(WINDOWS["less"][1]), qkv(dtype), "attention")
    assert_fused(attend(hugging_face), [*qkv(dtype), IDS], "attention")
