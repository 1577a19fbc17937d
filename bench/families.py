"""Every family that AutoModelForCausalLM knows, trained tiny on a CPU: `python bench/families.py`.

For each: does it train eagerly, with plain torch.compile and with backend="fused"; are loss and every gradient within
the yardstick; how many norms, rotations, gated MLPs and losses are fused, refused, or not seen at all, by a census of
the eager model that knows nothing of our matcher (tests/_census.py). Families are asked of transformers; their tiny
configurations, one layer of each kind, are made from the published ones (tests/_families.py).

Every family runs in a process of its own with a time limit. bench/results/families.json is written after each, so the
command can be stopped and started again; --again measures what is there already.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import sys
import time
import warnings
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The repository root must stay off sys.path: kernels/ would shadow Hugging Face's `kernels` package.
sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != ROOT]
sys.path.append(str(ROOT / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import _families  # noqa: E402
import _families_table  # noqa: E402
import _harness as harness  # noqa: E402
import _verdict  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

PATH = harness.RESULTS / "families.json"


def measure(family: str, send: Any, plain: bool) -> None:
    """One family, in a process of its own."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    built = _families.build(family, least_layers=1)
    row: dict[str, Any] = {"family": family}
    if built.model is None:
        row["not_built"] = built.why_not
    else:
        row["class"], row["text_of"] = type(built.model).__name__, built.config.model_type
        row |= _verdict.verdict(built.model, plain=plain)
    send.send(row | {"seconds": round(time.perf_counter() - began, 1)})


def warm_up() -> None:
    """Import all that compiling needs before the forks: each would otherwise do it again."""
    weight = torch.ones(4, 4, requires_grad=True)
    torch.compile(lambda x: torch.nn.functional.silu(x @ weight).sum(), backend=_verdict.Backend())(weight).backward()
    _families.build("llama")
    torch._dynamo.reset()


def limited(family: str, limit_s: float, plain: bool) -> dict[str, Any]:
    """`measure`, stopped at its time limit. A fork: what is imported need not be imported again."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(family, send, plain))
    process.start()
    send.close()
    try:
        row = receive.recv() if receive.poll(limit_s) else {"family": family, "stopped": f"after {limit_s:.0f} s"}
    except EOFError:
        row = {"family": family, "stopped": "the process died"}
    process.terminate()
    process.join()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="only these")
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--plain", action="store_true", help="plain torch.compile also where ours trains in one graph")
    args = parser.parse_args()
    rows = {r["family"]: r for r in json.loads(PATH.read_text())["rows"]} if PATH.exists() else {}
    every = list(_families.families())
    todo = [f for f in args.families or every if args.again or args.families or f not in rows]
    warm_up()
    for i, family in enumerate(todo, 1):
        rows[family] = limited(family, args.limit_s, args.plain)
        print(
            f"[{i}/{len(todo)}] {family}: {_families_table.verdict_of(rows[family])} {rows[family].get('sites', '')}",
            flush=True,
        )
        versions = {"transformers": transformers.__version__, "families": str(len(every))}
        harness.save("families", [rows[f] for f in every if f in rows], **versions)


if __name__ == "__main__":
    main()
