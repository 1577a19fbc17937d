"""Training as people do it: autocast, scaling, accumulation, many lengths, checkpointing, evaluation, resuming.

Each against eager over several optimizer steps, by the yardstick of `_runs.py`, or bit for bit where nothing may
differ. The Trainer and PEFT have tests of their own, and so have masks.
"""

import copy
from typing import Any

import pytest
import torch
from _models import tiny
from _runs import assert_training_as_accurate, forward_backward, sgd, trained
from _training import OPTIONS, batch
from _verdict import Backend
from torch._dynamo.utils import counters

BF16, F16 = torch.bfloat16, torch.float16


def llama(**changes):
    return tiny("llama", num_hidden_layers=1, **changes)


def uncached() -> dict[str, Any]:
    return batch() | {"use_cache": False}


# --- precision -------------------------------------------------------------------------------------------------------


def under(dtype):
    """Forward under autocast, backward outside, as guides write it; float64 is left alone by autocast."""

    def run(call, inputs):
        with torch.autocast("cpu", dtype):
            loss = call(**inputs).loss
        loss.backward()
        return loss

    return run


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_autocast(dtype):
    backend = assert_training_as_accurate(llama(), run=under(dtype), ulp_of=dtype)
    assert all(refused == 0 for _, refused in backend.report.counts().values()), str(backend.report)


class Scaled:
    """SGD behind a gradient scaler, and the scale after every step."""

    def __init__(self, scale):
        self.scale, self.history = scale, []

    def __call__(self, parameters):
        parameters = list(parameters)
        scales = parameters[0].dtype != torch.float64
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=2, enabled=scales)
        self.sgd = sgd(parameters)
        self.zero_grad = self.sgd.zero_grad
        self.history.append([])
        return self

    def run(self, call, inputs):
        with torch.autocast("cpu", F16):
            loss = call(**inputs).loss
        self.scaler.scale(loss).backward()
        return loss

    def step(self):
        self.scaler.step(self.sgd)
        self.scaler.update()
        self.history[-1].append(self.scaler.get_scale())


def test_float16_with_a_gradient_scaler():
    """No step is skipped, and the scale grows."""
    scaled = Scaled(2.0**10)
    assert_training_as_accurate(llama(), run=scaled.run, optimizer=scaled, ulp_of=F16)
    assert scaled.history[0] == [2.0**10, 2.0**11, 2.0**11, 2.0**12]


def test_a_scale_that_overflows_skips_the_same_steps():
    scaled, model = Scaled(2.0**19), llama()
    batches = [batch() for _ in range(5)]
    for how, options in (("eager", None), ("fused", OPTIONS)):
        mine = copy.deepcopy(model)
        trained(mine, torch.compile(mine, backend=how, options=options), batches, run=scaled.run, optimizer=scaled)
    eager, ours = scaled.history
    assert ours == eager and eager[0] < 2.0**19 and max(eager) > min(eager)


# --- accumulation, clipping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [int, torch.tensor])
def test_gradient_accumulation(count):
    """Parts of one batch, each loss divided by the number of labels in all of them, which changes."""

    def run(call, parts):
        items = count(sum((part["labels"][:, 1:] != -100).sum().item() for part in parts))
        losses = [call(**part, num_items_in_batch=items).loss for part in parts]
        for loss in losses:
            loss.backward()
        return sum(losses)

    def parts():
        made = [uncached() for _ in range(3)]
        made[-1]["labels"][0, : torch.randint(4, 12, ()).item()] = -100
        return made

    backend = assert_training_as_accurate(llama(), parts, run=run)
    assert backend.report.counts()["linear_cross_entropy"][1] == 0
    assert backend.report.graph_count <= 2  # an int: with the number that came first, and with any


def test_clipped_gradients():
    norms = []
    clip = lambda model: norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))  # noqa: E731
    assert_training_as_accurate(llama(), before_step=clip)
    assert min(norms) > 1.0


# --- lengths, padding, packing ---------------------------------------------------------------------------------------


def padded(length, side):
    inputs = batch(length=length) | {"use_cache": False}
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, : length // 3] = 0
    mask = mask if side == "left" else mask.flip(1)
    return inputs | {"attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def graphs_of(backend, sizes, **options):
    """How many graphs the batches of these sizes take."""
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(llama(), backend=backend, **options)
    for rows, length in sizes:
        forward_backward(call, batch(rows, length) | {"use_cache": False})
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_no_more_graphs_than_without_us_whatever_the_sizes():
    """One for the sizes seen first, one for any length, one for any number of rows; of one row torch makes another."""
    sizes = [(4, 16), (4, 21), (3, 16), (2, 32), (4, 16)]
    assert graphs_of("fused", sizes, options=OPTIONS) <= graphs_of("aot_eager", sizes) == 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_of_many_lengths(side):
    lengths = iter(1000 * [16, 11, 23, 16])
    backend = assert_training_as_accurate(llama(), lambda: padded(next(lengths), side))
    assert backend.report.graph_count <= 2
    assert {d.reason for d in backend.report.decisions if d.fusion == "attention"} == {"padding read once per step"}


def test_packed_rows_are_trained_as_the_rows_they_hold():
    """position_ids that restart: one row of two texts gives what the texts give on their own."""
    model, ids = llama(), torch.randint(3, 128, (1, 16))
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    labels = ids.clone()
    labels[:, 6] = -100  # the first token of the second text follows nothing
    packed = {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}
    backend = Backend()
    forward_backward(torch.compile(model, backend=backend), packed)
    assert {d.reason for d in backend.report.decisions if d.fusion == "attention"} == {"documents read once per step"}
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for part, count in ((ids[:, :6], 5), (ids[:, 6:], 9)):
        (model(input_ids=part, labels=part).loss * count / 14).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-5, msg=name)


# --- checkpointing ---------------------------------------------------------------------------------------------------


CHECKPOINTED = {"rms_norm": 3, "rope": 1, "attention": 1, "swiglu": 1, "linear_cross_entropy": 1}
BUDGET = {"memory_budget": "8GiB"}


@pytest.mark.parametrize(
    ("reentrant", "options"),
    [(False, {}), (True, {}), (False, BUDGET), (True, BUDGET | {"respect_checkpointing": True})],
    ids=["plain", "reentrant", "under a budget", "reentrant, under a budget that respects it"],
)
def test_gradient_checkpointing(reentrant, options):
    """Trained under a budget with room; what a tight one does to it is the matter of test_budget_graphs.py."""
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    report = assert_training_as_accurate(model, uncached, options=options).report
    assert report.counts() == {name: (count, 0) for name, count in CHECKPOINTED.items()}, str(report)


def test_checkpointing_switched_on_and_off_after_compiling():
    model = llama()
    model.compile(backend="fused", options=OPTIONS)
    inputs, losses = uncached(), []
    for switch in (lambda: None, model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        switch()
        model.zero_grad()
        forward_backward(model, inputs)
        losses.append([p.grad.clone() for p in model.parameters()])
    for other in losses[1:]:
        assert all(map(torch.equal, losses[0], other))


# --- a cache, evaluation, generation ---------------------------------------------------------------------------------


def test_a_cache_in_training():
    model, inputs = llama(), batch() | {"use_cache": True}
    backend = assert_training_as_accurate(model, lambda: batch() | {"use_cache": True})
    assert backend.report.graph_count == 1
    out = torch.compile(model, backend="fused", options=OPTIONS)(**inputs)
    torch.testing.assert_close(out.past_key_values.layers[0].keys, model(**inputs).past_key_values.layers[0].keys)


def test_evaluation_between_steps_and_generation_afterwards():
    model = llama(attention_dropout=0.0)
    model.compile(backend="fused", options=OPTIONS)
    torch.manual_seed(1)
    inputs, seen = batch(), []

    def evaluated(model):
        model.eval()
        with torch.no_grad():
            out = model(**inputs)
        plain = copy.deepcopy(model)
        plain._compiled_call_impl = None
        with torch.no_grad():
            want = plain(**inputs)
        torch.testing.assert_close(out.loss, want.loss)
        torch.testing.assert_close(out.logits, want.logits, rtol=1e-4, atol=1e-4)
        seen.append(out.loss.item())
        model.train()

    trained(model, model, [inputs] * 4, before_step=evaluated)
    assert seen[-1] < seen[0]
    model.eval()
    plain = copy.deepcopy(model)
    plain._compiled_call_impl = None
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompt = inputs["input_ids"][:, :5]
    assert torch.equal(model.generate(prompt, **how), plain.generate(prompt, **how))


# --- save and resume -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", ["in place", "wrapped"])
def test_resuming_goes_on_as_if_nothing_had_happened(compiled, tmp_path):
    batches = [batch() for _ in range(4)]

    def run(model, optimizer, batches):
        call = model
        if compiled == "in place":
            model.compile(backend="fused", options=OPTIONS)
        else:
            call = torch.compile(model, backend="fused", options=OPTIONS)
        losses = []
        for inputs in batches:
            optimizer.zero_grad()
            losses.append(forward_backward(call, inputs).item())
            optimizer.step()
        return losses

    model = llama()
    keys = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run(model, optimizer, batches[:2])
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert list(model.state_dict()) == keys
    going_on = run(model, optimizer, batches[2:])
    resumed = type(model).from_pretrained(tmp_path).train()
    assert list(resumed.state_dict()) == keys
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert run(resumed, optimizer, batches[2:]) == going_on
    for (name, p), q in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name


# --- attention implementations ---------------------------------------------------------------------------------------


def test_eager_attention():
    backend = assert_training_as_accurate(llama(attn_implementation="eager"), uncached)
    assert "attention" not in backend.report.counts()


@pytest.mark.slow
def test_flex_attention_does_what_it_does_without_us():
    """Its backward is not made for a CPU, compiled or not: the same error, or the same numbers."""
    outcomes = []
    for how, options in (("fused", OPTIONS), ("aot_eager", None)):
        torch._dynamo.reset()
        model = llama(attn_implementation="flex_attention", hidden_size=64, head_dim=16)
        try:
            loss = forward_backward(torch.compile(model, backend=how, options=options), uncached_of_seed())
            outcomes.append([loss.detach(), *(p.grad for p in model.parameters())])
        except Exception as error:
            outcomes.append(type(error))
    if isinstance(outcomes[1], type):
        assert outcomes[0] is outcomes[1]
    else:
        for ours, plain in zip(*outcomes, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def uncached_of_seed():
    torch.manual_seed(1)
    return uncached()
