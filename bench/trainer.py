"""Steps of the unmodified Hugging Face Trainer beside the same steps in a plain loop, eagerly and fused.

    python bench/trainer.py --mode qlora,full
    python bench/trainer.py --tiny --device cpu --layers 2 --dtype fp32      # a dry run without a GPU

Both do the same work: a batch with an attention mask from host memory, bf16 autocast, forward, backward, the gradient
norm clipped at 1, fused AdamW. Attention is what transformers chooses, "sdpa" with the mask that it builds. The Trainer
has its defaults but for saving, reporting and a constant rate. A process of its own for each; what this commit has
measured is not measured again. Rows go to bench/results/trainer.json, or to $OUT.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import _records as records
import _shapes
import _stacks
import _steps as steps
import torch
from model import expected_s

KEY = ("model", "mode", "layers", "batch", "seq", "dtype", "device", "stack", "trained_by")
STACKS, DRIVERS = ("fused", "eager"), ("trainer", "loop")
MODEL_OF = {"qlora": "llama3-8b", "lora": "llama3-8b", "full": "llama3.2-1b"}
CLIP = 1.0


class Tokens(torch.utils.data.Dataset):
    """Random tokens of one length, which are their own labels, with a mask that hides none."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.rows = torch.randint(5, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "attention_mask": torch.ones_like(self.rows[i]), "labels": self.rows[i]}


class Marks:
    """When steps ended; asking for it waits for nothing."""

    def __init__(self, device: str) -> None:
        self.device, self.marks = device, []

    def __call__(self) -> None:
        if self.device == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def times_ms(self) -> list[float]:
        """Of every step after the first."""
        steps.synchronize(self.device)
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        return [a.elapsed_time(b) if self.device == "cuda" else 1e3 * (b - a) for a, b in pairs]


def loop(model: Any, data: Tokens, options: argparse.Namespace, mixed: bool, mark: Marks) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)
    for batch in torch.utils.data.DataLoader(data, options.batch, pin_memory=options.device == "cuda"):
        batch = {name: t.to(options.device, non_blocking=True) for name, t in batch.items()}
        with torch.autocast(options.device, torch.bfloat16, enabled=mixed):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark()


def train(model: Any, data: Tokens, options: argparse.Namespace, mixed: bool, mark: Marks) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Marking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mark()

    with tempfile.TemporaryDirectory(prefix="bench_trainer_") as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=options.batch, num_train_epochs=1, bf16=mixed,
            learning_rate=1e-4, lr_scheduler_type="constant", max_grad_norm=CLIP, optim="adamw_torch_fused",
            use_cpu=options.device == "cpu", report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Marking()]).train()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One stack under one driver, in this process."""
    stack, driver, mode = options.one.split(",")
    config, compiled = _shapes.config_of(options.model, options.layers, options.tiny), steps.fused_log()
    dtype, parsed = steps.DTYPES[options.dtype], _stacks.Stack.parse(stack)
    model = _stacks.build(parsed, config, mode, dtype, options.device, options.seq, attention="sdpa")
    data = Tokens(options.batch * (steps.WARM_UP + options.steps), options.seq, config.vocab_size)
    mark = Marks(options.device)
    (train if driver == "trainer" else loop)(model, data, options, options.dtype == "bf16", mark)
    times = sorted(mark.times_ms()[steps.WARM_UP - 1 :])
    row = {"ms": times[len(times) // 2], "ms_low": times[0], "ms_high": times[-1], "steps": len(times)}
    return row | steps.memory(options.device, "peak_GiB") | steps.graphs(compiled)


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """The Trainer over the loop, and fused over eager, for each model."""
    found = {(r["mode"], r["stack"], r["trained_by"]): r["ms"] for r in rows if "ms" in r}
    lines = []
    for mode, stack, driver in found:
        for other in ((mode, stack, "loop"), (mode, "eager", driver)):
            if other in found and other != (mode, stack, driver):
                ratio = found[mode, stack, driver] / found[other]
                lines.append(f"{mode}: {stack} {driver} over {other[1]} {other[2]}: {ratio:.3f}")
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps.add_arguments(parser, list(_shapes.MODELS), steps=6)
    parser.set_defaults(model=None)
    parser.add_argument("--mode", default="qlora,full", help=f"some of {', '.join(steps.MODES)}, {MODEL_OF} by default")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    steps.shrink(options)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.one:
        records.print_row(lambda: measure(options))
        return
    ends = time.perf_counter() + options.seconds
    kept = records.Rows("trainer", KEY, saved=not options.tiny)
    about = {name: getattr(options, name) for name in ("batch", "seq", "dtype")}
    about |= records.provenance("trainer.py", arguments)
    about |= {"device": "cpu"} if options.device == "cpu" else {}
    rows = []
    for mode in options.mode.split(","):
        name = options.model or MODEL_OF[mode]
        given = argparse.Namespace(**(vars(options) | {"model": name}))
        layers = _shapes.config_of(name, options.layers, options.tiny).num_hidden_layers
        for stack, driver in ((s, d) for s in STACKS for d in DRIVERS):
            row = about | {"model": name, "mode": mode, "layers": layers, "stack": stack, "trained_by": driver}
            known = None if options.again else kept.measured(row)
            left, takes = ends - time.perf_counter(), expected_s(_stacks.Stack.parse(stack), layers, None)
            if known is None and left < takes:
                print(f"{mode} {stack} {driver} not started: {left:.0f} s left, it takes about {takes:.0f} s")
                continue
            if known is None:
                own = ["--one", f"{stack},{driver},{mode}", *steps.passed_on(given)]
                known = row | records.in_own_process("trainer.py", own, min(options.limit_s, left))
                kept.add(known)
            rows.append(known)
    print("\n".join(ratios(rows)))


if __name__ == "__main__":
    main()
