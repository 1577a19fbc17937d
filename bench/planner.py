"""Our plans against torch's `activation_memory_budget`, at the same peak, by one model of bytes and of seconds.

    python bench/planner.py             # about four minutes of one CPU core
    python bench/planner.py --quick     # two layers, three ratios; printed only

For each of torch's ratios, torch's partitioner decides on a copy of the joint graph what it saves; our simulation gives
that plan's peak and the time that it spends making values again. Our planner then gets this peak as its budget. Nothing
is timed but the planning: peak and time of a step are predictions, at an H200's rates, from a CPU.

Values drawn at random that torch would draw again (other numbers, so wrong gradients) are kept in its plan all the
same; `redrawn` counts them. Whatever our planner holds for random is, so both plans obey the same rules.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import _harness as harness
import _shapes
import _stacks
import torch
import torch._functorch.config
from fused_backend.compiler import front
from fused_backend.compiler.frontier import Captured, at_budget, capture, keeping
from fused_backend.compiler.joint import Joint
from fused_backend.compiler.planner import Infeasible
from torch import nn

RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.15, 0.0)
MODELS = {"llama full": 8, "llama lora": 8, "gpt_neox dropout": 6}
SHAPE = (2, 512)  # B, S: activations outweigh the weights
SLOWER = 1e-3  # of the step: the planner weighs bytes against seconds by this little, and the solver has a tolerance


def build(name: str, layers: int) -> nn.Module:
    """A small model of one of `MODELS`, hidden size 128, bf16 (LoRA: fp32 adapters under autocast)."""
    family, mode = name.split()
    if family == "llama":
        config = _shapes.config_of("llama3-8b", layers, True)
        return _stacks.build(_stacks.Stack("eager"), config, mode, torch.bfloat16, "cpu", 512)
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    _shapes.register_attention()
    sizes: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 512, "num_hidden_layers": layers, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = GPTNeoXConfig(**sizes, hidden_dropout=0.1, attention_dropout=0.0, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=_shapes.ATTENTION)
    return model.train()


def captured(name: str, layers: int) -> Captured:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ids = torch.randint(5, 512, SHAPE)
    with torch.autocast("cpu", torch.bfloat16) if name.endswith("lora") else contextlib.nullcontext():
        return capture(build(name, layers), input_ids=ids, labels=ids)


def compare(name: str, layers: int, ratios: tuple[float, ...], rows: list[dict[str, Any]]) -> None:
    """One row for each ratio: torch's plan, and ours within its peak."""
    graph = captured(name, layers)
    gm, unmarked = graph.unmarked()
    joint, least = graph.joint(), unmarked.seconds
    for ratio in ratios:
        saved, torch_s = _torch(graph, gm, ratio)
        theirs = keeping(unmarked, saved, "torch")
        begun = time.perf_counter()
        try:
            ours, why = at_budget(joint, theirs.peak), ""
        except Infeasible as error:
            ours, why = None, f"no plan; the least peak found is {error.smallest / 2**20:.2f} MiB"
        row = {
            "model": name, "layers": layers, "ratio": ratio, "step_us": 1e6 * least,
            "torch_peak_MiB": theirs.peak / 2**20, "torch_again_us": 1e6 * (theirs.seconds - least),
            "redrawn": _redrawn(unmarked, saved), "torch_planning_s": torch_s,
        }  # fmt: skip
        if ours is not None:
            row |= {
                "our_peak_MiB": ours.peak / 2**20, "our_again_us": 1e6 * (ours.seconds - least),
                "worse": ours.seconds > theirs.seconds + SLOWER * least,
            }  # fmt: skip
        row |= {"our_planning_s": time.perf_counter() - begun} | ({"why": why} if why else {})
        harness.report(row, rows)


def _torch(graph: Captured, gm: torch.fx.GraphModule, ratio: float) -> tuple[set[str], float]:
    """What torch saves, and the seconds that its partitioner took to say so."""
    begun = time.perf_counter()
    with torch._functorch.config.patch(activation_memory_budget=ratio):
        saved = graph.saved_by_torch(gm)
    return saved, time.perf_counter() - begun


def _redrawn(joint: Joint, saved: set[str]) -> int:
    """Random values that a plan makes again: those that what it lacks is made from."""
    values, storages = joint.work.values, joint.storages
    kept = {root for node, root in storages.roots.items() if node.name in saved}
    todo, seen = [i for i, v in enumerate(values) if v.needed], set[int]()
    while todo:
        i = todo.pop()
        if i not in seen and values[i].choice != "free" and joint.values[i] not in kept:
            seen.add(i)
            todo += values[i].inputs
    return sum(values[i].choice == "keep" for i in seen)


def planning(layers: int, rows: list[dict[str, Any]]) -> None:
    """Seconds that both take to plan one model of this many layers at half of what can be saved, caches empty."""
    graph = captured("llama full", layers)
    gm, unmarked = graph.unmarked()
    saved, torch_s = _torch(graph, gm, 0.5)
    budget = keeping(unmarked, saved, "torch").peak
    front._selections.cache_clear()
    begun = time.perf_counter()
    joint = graph.joint()
    read = time.perf_counter()
    with contextlib.suppress(Infeasible):
        joint.plan(budget)
    row = {"model": "llama full", "layers": layers, "nodes": len(gm.graph.nodes), "torch_planning_s": torch_s}
    row |= {"our_reading_s": read - begun, "our_planning_s": time.perf_counter() - read}
    harness.report({"what": "planning"} | row, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers, three ratios; nothing is saved")
    quick = parser.parse_args().quick
    rows: list[dict[str, Any]] = []
    for name, layers in MODELS.items():
        compare(name, 2 if quick else layers, RATIOS[::4] if quick else RATIOS, rows)
    for layers in (2,) if quick else (8, 32, 80):
        planning(layers, rows)
    compared = [row for row in rows if "ratio" in row]
    worse = [row for row in compared if row.get("worse", True)]
    print(f"{len(compared)} plans of torch's; ours slower, or none, at the peak of {len(worse)}")
    if not quick:
        note = "simulated on a CPU: peak and time of a step are predicted at an H200's rates; planning_s is measured"
        print(harness.save("planner", [{"note": note}, *rows]))


if __name__ == "__main__":
    main()
