"""Models in the spellings of other code than Hugging Face's, and of other tasks than text: what is fused of them, and
that training them is right.
"""

import pytest
import torch
import torch.nn.functional as F
from _models import tiny
from _runs import assert_training_as_accurate
from _styles import STYLES, styled
from _tasks import task
from _training import VOCABULARY, batch
from fused_backend.compiler import explain

FUSIONS = ("rms_norm", "rope", "attention", "swiglu", "linear_cross_entropy")
# Sites fused in one layer, the norm after it and the loss, in the order of FUSIONS, counted by reading the styles.
# q and k are one site of rope where nothing reads the rotated q before there is a k.
SITES = {
    "meta, explicit mask": (3, 2, 0, 1, 1),  # attention written as softmax(q k + mask) v is no site
    "meta, mask for SDPA": (3, 2, 1, 1, 1),
    "meta, causal SDPA": (3, 2, 1, 1, 1),
    "nanoGPT": (3, 0, 1, 1, 1),
    "lit-gpt": (3, 1, 1, 1, 1),
    "lit-gpt, unit offset": (3, 1, 1, 1, 1),
    "torchtune": (3, 2, 1, 1, 1),
    "torchtune, torch's norm": (3, 2, 1, 1, 1),
    "torchtune, chunks of logits": (3, 2, 1, 1, 0),
    "torchtitan": (3, 2, 1, 1, 1),
}
REFUSED = {"torchtune, chunks of logits": {"linear_cross_entropy": "also used by chunk"}}


def assert_sites(report, expected, refused=None):
    """In one graph, as many fused sites as there are; of those refused, each for the reason given."""
    assert (report.graph_count, report.graph_breaks) == (1, 0)
    assert tuple(report.counts().get(name, (0, 0))[0] for name in FUSIONS) == expected, str(report)
    left = {d.fusion: d.reason for d in report.decisions if d.status == "refused"}
    refused = refused or {}
    assert left.keys() == refused.keys() and all(refused[f] in left[f] for f in left), str(report)


@pytest.mark.parametrize("name", STYLES)
def test_every_site_in_bfloat16(name):
    report = explain(styled(name).to(torch.bfloat16), **batch())
    assert_sites(report, SITES[name], REFUSED.get(name))
    norms = [d for d in report.decisions if d.fusion == "rms_norm"]
    assert all(d.saved_bytes == 2 * 16 * 64 * 2 for d in norms), "a float32 copy is kept"


@pytest.mark.parametrize("name", STYLES)
def test_training(name):
    assert_sites(assert_training_as_accurate(styled(name)).report, SITES[name], REFUSED.get(name))


# --- loops of one's own ----------------------------------------------------------------------------------------------


def tokens():
    return {"ids": batch()["input_ids"]}


def shifted_inside(model):
    def loss(ids):
        logits = model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    return loss


def classes_in_the_middle(model):
    def loss(ids):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])

    return loss


def negative_log_likelihood(model):
    def loss(ids):
        logp = F.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), dim=-1)
        return F.nll_loss(logp[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / ids[:, 1:].numel()

    return loss


def gathered(model):
    def loss(ids):
        logp = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        return -logp.gather(-1, ids[:, 1:, None]).squeeze(-1).mean()

    return loss


LOOPS = {
    shifted_inside: (3, 1, 1, 1, 1),
    classes_in_the_middle: (3, 1, 1, 1, 1),
    negative_log_likelihood: (3, 1, 1, 1, 1),
    gathered: (3, 1, 1, 1, 0),  # unseen: a log-probability for each token is no loss of torch's
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loss_of_ones_own_inside_the_compiled_function(loop):
    def run(call, inputs):
        loss = call(**inputs)
        loss.backward()
        return loss

    backend = assert_training_as_accurate(tiny("llama", num_hidden_layers=1), tokens, loop, run=run)
    assert_sites(backend.report, LOOPS[loop])


def test_a_loss_outside_of_the_compiled_model():
    """The head is a product like any other then: the logits are what the model returns."""

    def run(call, inputs):
        logits = call(inputs["ids"], use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), inputs["ids"][:, 1:].flatten())
        loss.backward()
        return loss

    backend = assert_training_as_accurate(tiny("llama", num_hidden_layers=1), tokens, run=run)
    assert_sites(backend.report, (3, 1, 1, 1, 0))


# --- other tasks -----------------------------------------------------------------------------------------------------


def text():
    """No token of it stands for a picture."""
    inputs = batch()
    return {name: t.masked_fill((t >= 5) & (t <= 7), 8) for name, t in inputs.items()}


def in_three_axes():
    """Positions in time, height and width, as beside a picture."""
    return text() | {"position_ids": torch.randint(0, 16, (3, 2, 16)).sort(-1).values}


def embedded():
    return {"inputs_embeds": torch.randn(2, 16, 64), "labels": batch()["labels"]}


def classes():
    ids = batch()["input_ids"]
    ids[0, -4:] = 0  # padding: the class is read off the last token before it
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.randint(3, (2,))}


BIASED = {"attention": "the mask is"}
TASKS = {
    # T5's position bias is learned and added to the scores, and what the decoder reads of the encoder is not causal.
    "t5": (batch, (7, 0, 0, 2, 1), BIASED),
    "llava": (text, (3, 1, 1, 1, 1), None),
    "qwen2_vl": (in_three_axes, (3, 1, 1, 1, 1), None),
    # One row of scores a text: read from all of the head's by an index that depends on the padding.
    "classifier": (classes, (3, 1, 1, 1, 0), {"linear_cross_entropy": "logits come from index"}),
}


@pytest.mark.parametrize("name", TASKS)
def test_other_tasks(name):
    make, expected, refused = TASKS[name]
    assert_sites(assert_training_as_accurate(task(name), make).report, expected, refused)


def test_embeddings_for_tokens():
    backend = assert_training_as_accurate(tiny("llama", num_hidden_layers=1), embedded)
    assert_sites(backend.report, (3, 1, 1, 1, 1))
