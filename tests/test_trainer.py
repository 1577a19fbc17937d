"""The Hugging Face Trainer: the backend by name, padded batches, steps as without us."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from _models import VOCABULARY, tiny
from fused_backend.compiler import backend as backend_module

IGNORED = -100


class Sentences(torch.utils.data.Dataset):
    """Random tokens of different lengths."""

    def __init__(self, lengths):
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def pad(rows, side="right"):
    """As collators do: to the longest, with a mask, pads no labels."""
    length = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        ids, room = row["input_ids"], length - len(row["input_ids"])
        both = (0, room) if side == "right" else (room, 0)
        batch["input_ids"].append(torch.nn.functional.pad(ids, both, value=0))
        batch["attention_mask"].append(torch.nn.functional.pad(torch.ones_like(ids), both, value=0))
        batch["labels"].append(torch.nn.functional.pad(ids, both, value=IGNORED))
    return {name: torch.stack(tensors) for name, tensors in batch.items()}


def train(model, lengths, folder, collate=pad, **arguments):
    """Losses of three steps; the model is trained."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=3, logging_steps=1, learning_rate=1e-2,
        lr_scheduler_type="constant", report_to="none", save_strategy="no", use_cpu=True, bf16=False, seed=1,
        disable_tqdm=True, optim="sgd", **arguments,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=Sentences(lengths), data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def decisions(monkeypatch):
    """Without Inductor, which takes a CPU minutes; what was decided about attention is kept."""
    found, lower, rewrite = [], backend_module.lower, backend_module.rewrite

    def without_inductor(gm, example_inputs, options, *rest):
        return lower(gm, example_inputs, replace(options, lowering="aot_eager"), *rest)

    def noted(gm, options):
        report, finish = rewrite(gm, options)
        found.extend(d for d in report.decisions if d.fusion == "attention")
        return report, finish

    monkeypatch.setattr(backend_module, "lower", without_inductor)
    monkeypatch.setattr(backend_module, "rewrite", noted)
    return found


def assert_alike(ours, eager, losses, eager_losses):
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    trained = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, trained[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batches(side, decisions, tmp_path):
    model = tiny("llama", num_hidden_layers=1)
    eager = copy.deepcopy(model)
    model.compile(backend="fused")
    collate = lambda rows: pad(rows, side)  # noqa: E731
    lengths = [16, 9, 12, 16, 16, 5]
    assert_alike(model, eager, train(model, lengths, tmp_path, collate), train(eager, lengths, tmp_path, collate))
    assert decisions and {d.reason for d in decisions} == {"padding read once per step"}


def test_batches_without_a_mask(decisions, tmp_path):
    def stack(rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    model = tiny("llama", num_hidden_layers=1)
    model.config.use_cache = False
    eager = copy.deepcopy(model)
    model.compile(backend="fused")
    assert_alike(model, eager, train(model, [16] * 6, tmp_path, stack), train(eager, [16] * 6, tmp_path, stack))
    assert decisions and {d.reason for d in decisions} == {"causal mask folded"}


def test_the_backend_by_name(decisions, tmp_path, monkeypatch):
    for name in ("BACKEND", "MODE"):  # TrainingArguments sets them for good
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "no" if name == "BACKEND" else "default")
    model = tiny("llama", num_hidden_layers=1)
    eager = copy.deepcopy(model)
    plain = train(eager, [16] * 6, tmp_path)
    losses = train(model, [16] * 6, tmp_path, torch_compile=True, torch_compile_backend="fused")
    assert decisions
    assert_alike(model, eager, losses, plain)


@pytest.mark.parametrize("first", ["accelerate.utils", "fused_backend.compiler"])
def test_accelerate_knows_the_name_in_either_order(first):
    second = {"accelerate.utils": "fused_backend.compiler", "fused_backend.compiler": "accelerate.utils"}[first]
    check = (
        f"import {first}, {second}, os, sys, copy, pickle\n"
        "from accelerate.utils import DynamoBackend, TorchDynamoPlugin\n"
        "plugin = TorchDynamoPlugin(backend='fused')\n"
        "assert plugin.backend is DynamoBackend.FUSED and plugin.to_kwargs()['backend'] == 'fused'\n"
        "assert DynamoBackend('FUSED') is DynamoBackend['FUSED'] and 'FUSED' in DynamoBackend.list()\n"
        "assert copy.deepcopy(plugin.backend) is plugin.backend\n"
        "assert pickle.loads(pickle.dumps(plugin.backend)) is plugin.backend\n"
        "assert [b for b in DynamoBackend if b == 'FUSED'] and DynamoBackend('INDUCTOR').value == 'INDUCTOR'\n"
        "assert not [f for f in sys.meta_path if 'fused_backend' in type(f).__module__]\n"
    )
    subprocess.run([sys.executable, "-P", "-c", check], check=True)


def test_accelerate_is_not_imported_for_it():
    check = "import sys, fused_backend.compiler; sys.exit('accelerate' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", check], check=True)
