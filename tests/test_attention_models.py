"""attention in Hugging Face models: every mask they build, what is decided about it, and exact steps either way."""

import pytest
import torch
from _models import VOCABULARY, batch, tiny
from _training import OPTIONS, assert_step_as_accurate
from fused_backend.compiler import Options, explain
from fused_backend.compiler.backend import rewrite
from torch._dynamo import lookup_backend

FOLDED, READ, DOCUMENTS = "causal mask folded", "padding read once per step", "documents read once per step"
WINDOW = "sliding window"


def inputs_of(kind, length=16):
    """A batch under one kind of mask. Labels of pads are not ignored: pads must come out as in eager too."""
    made = batch(length=length) | {"use_cache": False}
    mask = torch.ones_like(made["input_ids"])
    if kind == "cache":
        return made | {"use_cache": True}
    if kind == "packed":
        ids = torch.cat([torch.arange(5), torch.arange(length - 5)])
        return made | {"position_ids": ids[None].expand(2, -1).clone()}
    if kind == "packed otherwise":
        ids = torch.cat([torch.arange(length - 6), torch.arange(1), torch.arange(3), torch.arange(2)])
        return made | {"position_ids": torch.stack((ids, torch.arange(length)))}
    if kind == "one document":
        return made | {"position_ids": torch.arange(length)[None].expand(2, -1).clone()}
    if kind == "right":
        mask[0, -5:] = 0
    if kind == "left":
        mask[1, :6] = 0
    if kind == "holes":
        mask[0, 4] = 0
    if kind in ("ones", "right", "left", "holes", "boolean", "with a cache"):
        made["attention_mask"] = mask
    if kind == "boolean":
        mask[0, -5:] = 0
        made["attention_mask"] = mask.bool()
    if kind == "with a cache":
        made["use_cache"] = True
    if kind == "given":
        made["attention_mask"] = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    return made


def decided(model, inputs):
    """{(status, reason)} of every attention site, and their number."""
    found = [d for d in explain(model, **inputs).decisions if d.fusion == "attention"]
    return {(d.status, d.reason) for d in found}, len(found)


LLAMA = {
    "no mask": {("fused", FOLDED)},
    "ones": {("fused", READ)},
    "right": {("fused", READ)},
    "left": {("fused", READ)},
    "holes": {("fused", READ)},
    "boolean": {("fused", READ)},
    "with a cache": {("fused", READ)},
    "packed": {("fused", DOCUMENTS)},
    "one document": {("fused", DOCUMENTS)},
}


@pytest.mark.parametrize("kind", LLAMA)
def test_every_mask_of_llama(kind):
    model = tiny("llama")
    assert decided(model, inputs_of(kind)) == (LLAMA[kind], 2)
    assert_step_as_accurate(model, [inputs_of(kind) for _ in range(2)])


def test_a_mask_that_is_given_is_refused():
    model = tiny("llama")
    decisions, count = decided(model, inputs_of("given"))
    assert count == 2 and all(s == "refused" and "depends on" in reason for s, reason in decisions), decisions
    assert_step_as_accurate(model, [inputs_of("given") for _ in range(2)])


def test_without_a_mask_and_with_a_cache():
    """transformers leaves the mask out here, or (before 5.24) builds it: either way nothing of it is left."""
    decisions, count = decided(tiny("llama"), inputs_of("cache"))
    assert count == 2 and decisions <= {("fused", FOLDED), ("fused", "causal")}


MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "qwen2": {},
    "phi3": {},
    "mistral": {"sliding_window": 64},
    "gemma3_text": MIXED | {"sliding_window": 64},
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", ["no mask", "right"])
def test_other_models(family, kind):
    model = tiny(family, **MODELS[family])
    assert decided(model, inputs_of(kind)) == (LLAMA[kind], 2)
    assert_step_as_accurate(model, [inputs_of(kind) for _ in range(2)])


SLIDING = {
    "mistral": {"sliding_window": 8},
    "qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": MIXED | {"sliding_window": 8},
    "phi3": {"sliding_window": 5},
}
EVERYWHERE = ("mistral", "phi3")  # others have layers without a window


@pytest.mark.parametrize(("family", "kind"), [
    ("mistral", "no mask"), ("mistral", "right"), ("mistral", "packed"), ("qwen2", "no mask"), ("phi3", "packed"),
    ("gemma3_text", "no mask"), ("gemma3_text", "right"), ("gemma3_text", "packed"),
])  # fmt: skip
def test_a_window_shorter_than_the_sequence(family, kind):
    model = tiny(family, **SLIDING[family])
    sliding = {("fused", ", ".join([WINDOW, *(reason for _, reason in LLAMA[kind] if reason != FOLDED)]))}
    assert decided(model, inputs_of(kind)) == (sliding | (set() if family in EVERYWHERE else LLAMA[kind]), 2)
    assert_step_as_accurate(model, [inputs_of(kind) for _ in range(2)])


def test_documents_that_change_compile_nothing_again():
    """Their number and lengths are no part of the graph; one row in two documents, or in four, is right."""
    model, counts = tiny("mistral", sliding_window=8), []

    def count(gm, example_inputs):
        counts.append(gm)
        return lookup_backend("fused")(gm, example_inputs, options=OPTIONS)

    compiled = torch.compile(model, backend=count)
    for kind in ("packed", "packed otherwise", "one document", "packed"):
        inputs = inputs_of(kind)
        torch.testing.assert_close(compiled(**inputs).loss, model(**inputs).loss)
    assert len(counts) == 1


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_other_implementations_are_no_sites(implementation):
    model = tiny("llama", attn_implementation=implementation).requires_grad_(False)
    assert decided(model, inputs_of("no mask") | {"labels": None}) == (set(), 0)


@pytest.mark.parametrize("kind", ["no mask", "right", "packed"])
def test_inside_checkpointed_layers(kind):
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    assert decided(model, inputs_of(kind)) == (LLAMA[kind], 2)
    assert_step_as_accurate(model, [inputs_of(kind) for _ in range(2)])


@pytest.mark.parametrize(("kind", "read", "operator"), [
    ("right", "kept_runs", "attention"), ("packed", "document_starts", "packed_attention"),
])  # fmt: skip
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_read_is_read_once_for_all_layers(kind, read, operator, checkpointed):
    """Also where each layer is a checkpointed body: all get what one node outside computes. And with windows: Gemma's
    two kinds of masks say the same of documents."""
    family = {"family": "gemma3_text", "layer_types": [*MIXED["layer_types"], "sliding_attention"], "sliding_window": 8}
    model, counts = tiny(**family, num_hidden_layers=3), []
    if checkpointed:
        model.gradient_checkpointing_enable()

    def collect(gm, example_inputs):
        rewrite(gm, Options())
        graphs = [m.graph for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
        targets = [n.target for g in graphs for n in g.nodes]
        counts.extend(targets.count(getattr(torch.ops.fused_backend, name).default) for name in (read, operator))
        return gm.forward

    torch.compile(model, backend=collect)(**inputs_of(kind))
    assert counts == [1, 3]


def test_lengths_that_vary():
    model = tiny("llama")
    compiled = torch.compile(model, backend="fused", options=OPTIONS)
    for length in (16, 12, 21):
        for kind in ("right", "ones", "packed"):
            inputs = inputs_of(kind, length)
            torch.testing.assert_close(compiled(**inputs).loss, model(**inputs).loss)


def test_bfloat16():
    model = tiny("llama").to(torch.bfloat16)
    assert_step_as_accurate(model, [inputs_of(kind) for kind in ("right", "left", "ones", "packed")])


def test_padding_moves_nothing_where_labels_of_pads_are_ignored():
    """The step of a padded batch is that of its rows one by one, without padding."""
    model = tiny("llama")
    ids = torch.randint(3, VOCABULARY, (2, 16))
    mask = torch.ones_like(ids)
    mask[0, 11:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    compiled = torch.compile(model, backend="fused", options=OPTIONS)
    compiled(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    padded = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    counts = (labels[:, 1:] != -100).sum(1)
    for row, length in ((0, 11), (1, 16)):
        own = {"input_ids": ids[row : row + 1, :length], "labels": labels[row : row + 1, :length]}
        (model(**own).loss * counts[row] / counts.sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(padded[name], p.grad, rtol=1e-4, atol=1e-5)
