"""A training step of a Llama-3-8B-width model: eager, Inductor and fused, each in its own process.

    python bench/model.py [--layers 2] [--train full,lora] [--stacks eager,inductor,fused]

Prints ms per step (forward and backward, median), peak memory, compile time, and the first step's loss and gradient
norm of every stack side by side. The model has random weights; attention takes the causal path in every stack.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import _harness as harness
import torch

STACKS = ("eager", "inductor", "fused")


def build(layers: int, train: str) -> torch.nn.Module:
    """The model in bf16; `full` trains every weight, `lora` adapters of rank 16 on all linear layers but the head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5,
    )  # fmt: skip
    with torch.device("cuda"):
        model: torch.nn.Module = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    if train == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)  # type: ignore[arg-type]
        # B starts at zero, which would leave A without a gradient to compare.
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def measure(stack: str, train: str, layers: int, rows: int, length: int, steps: int) -> dict[str, Any]:
    """One stack in this process."""
    model = build(layers, train)
    if stack != "eager":
        model.compile(backend=stack)
    trained = [p for p in model.parameters() if p.requires_grad]
    ids = torch.randint(0, 128256, (steps + 4, rows, length), device="cuda")

    def step(i: int) -> torch.Tensor:
        for p in trained:
            p.grad = None
        loss = model(input_ids=ids[i], labels=ids[i]).loss
        loss.backward()
        return loss

    started = time.perf_counter()
    loss = step(0).item()
    compile_s = time.perf_counter() - started
    norm = torch.stack([p.grad.float().norm() for p in trained if p.grad is not None]).norm().item()
    for i in range(1, 4):
        step(i)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for i in range(4, steps + 4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return {
        "stack": stack, "train": train, "layers": layers, "tokens": rows * length,
        "ms": times[len(times) // 2], "ms_low": times[len(times) // 10], "ms_high": times[-1 - len(times) // 10],
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30, "held_GiB": before / 2**30,
        "first_step_s": compile_s, "loss": loss, "grad_norm": norm,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--train", default="full,lora")
    parser.add_argument("--stacks", default=",".join(STACKS))
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--one", help="measure this stack here and print one JSON line (used by the command itself)")
    options = parser.parse_args(arguments)
    if options.one:
        row = measure(options.one, options.train, options.layers, options.rows, options.length, options.steps)
        print("ROW " + json.dumps(row), flush=True)
        return [row]
    rows: list[dict[str, Any]] = []
    for train in options.train.split(","):
        for stack in options.stacks.split(","):
            command = [
                sys.executable,
                str(pathlib.Path(__file__).resolve()),
                "--one",
                stack,
                "--train",
                train,
            ]
            for name in ("layers", "rows", "length", "steps"):
                command += [f"--{name}", str(getattr(options, name))]
            done = subprocess.run(command, capture_output=True, text=True)
            found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
            if not found:
                error = done.stderr.strip().splitlines()[-1:] or ["no output"]
                harness.report({"stack": stack, "train": train, "failed": error[0]}, rows)
                continue
            harness.report(json.loads(found[0][4:]), rows)
        _ratios(train, rows)
    harness.save("model", rows)
    return rows


def _ratios(train: str, rows: list[dict[str, Any]]) -> None:
    by_stack = {r["stack"]: r for r in rows if r["train"] == train and "ms" in r}
    ours = by_stack.get("fused")
    for stack, row in by_stack.items():
        if ours is not None and stack != "fused":
            time_ratio, peak_ratio = ours["ms"] / row["ms"], ours["peak_GiB"] / row["peak_GiB"]
            print(f"{train}: fused / {stack}: time {time_ratio:.3f}, peak {peak_ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
