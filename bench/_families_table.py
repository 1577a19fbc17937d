"""bench/results/families.md, made from families.json by bench/table.py."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

# LayerNorm is counted beside the others.
FUSIONS = ("rms_norm", "rope", "swiglu", "linear_cross_entropy")
COLUMNS = (*FUSIONS, "layer_norm")


def verdict_of(row: dict[str, Any]) -> str:
    """ "right", or one sentence that says what is not."""
    if "not_built" in row:
        return f"not built: {row['not_built']}"
    if "stopped" in row:
        return f"stopped {row['stopped']}"
    if row["fused_error"]:
        return f"{_beside_plain(row)}: {row['fused_error']}"
    if row["eager_error"]:
        return f"nothing to compare with: {row['eager_error']}"
    if row["wrong"]:
        return f"{len(row['wrong'])} numbers outside the yardstick: {row['wrong'][0]}"
    if row["graphs"] != row.get("plain_graphs", row["graphs"]) and not row["plain_error"]:
        return f"[graphs, breaks] are {row['graphs']}, without us {row['plain_graphs']}"
    return "right"


def _beside_plain(row: dict[str, Any]) -> str:
    return "fails as plain torch.compile does" if row.get("plain_error") else "fails where plain torch.compile trains"


def summary(data: dict[str, Any]) -> str:
    """How many families are right, and how many of all sites are fused."""
    rows, known = data["rows"], data["machine"].get("families", "")
    built = [r for r in rows if "not_built" not in r]
    right = [r for r in built if verdict_of(r) == "right"]
    exact = [r for r in right if r["oracle"] == "float64"]
    counts = [r["sites"][name] for r in built for name in FUSIONS if "sites" in r]
    fused, total = sum(c[0] for c in counts), sum(map(sum, counts))
    norms = [sum(r["sites"]["layer_norm"]) for r in built if "sites" in r]
    fails = [r for r in built if verdict_of(r).startswith("fails where")]
    tried = f"the {known}" if str(len(rows)) == known else f"{len(rows)} of the {known}"
    return (
        f"Of {tried} causal-LM families of transformers {len(built)} build tiny and train on "
        "tokens alone; "
        f'{len(right)} of them are right with `backend="fused"` in loss, every gradient and number of graphs '
        f"({len(exact)} judged against float64), {len(fails)} fail where plain torch.compile trains. "
        f"{100 * fused / total:.1f} % of their {total} RMSNorms, rotated tensors, gated MLPs and losses are fused, "
        f"by a census of the eager models; LayerNorms ({sum(norms)}) are not counted in it."
    )


def document(data: dict[str, Any]) -> str:
    """The matrix: a line for each family, then why sites were refused."""
    rows = data["rows"]
    machine = data["machine"]
    lines = [
        "# Every family of AutoModelForCausalLM", "", summary(data), "",
        f"Made by `python bench/families.py` on a CPU, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, commit {machine['commit']}; one layer of each kind, hidden size 64, "
        "float32, training mode without dropout, `lowering=\"aot_eager\"`.", "",
        "Sites are fused / refused / not seen by us; empty where the model has none. Rotations count by tensors. "
        "\"float32\": the model does not run in float64 (or routes otherwise there) and is compared with itself "
        "compiled by `backend=\"eager\"`.", "",
        f"| family | class | verdict | judged in | {' | '.join(COLUMNS)} |",
        f"|---|---|---|---|{'---|' * len(COLUMNS)}",
    ]  # fmt: skip
    for r in rows:
        cells = ["/".join(map(str, r["sites"][c])) if any(r["sites"][c]) else "" for c in COLUMNS if "sites" in r]
        cells += [""] * (len(COLUMNS) - len(cells))
        text = f" (text model {r['text_of']})" if r.get("text_of", r["family"]) != r["family"] else ""
        verdict = re.sub(r"[|`<>]", " ", verdict_of(r))
        lines.append(
            f"| {r['family']}{text} | {r.get('class', '')} | {verdict} | {r.get('oracle', '')} | {' | '.join(cells)} |"
        )
    lines += ["", "| sites refused | fusion | why | in |", "|---|---|---|---|"]
    return "\n".join([*lines, *_refusals(rows)])


def _refusals(rows: list[dict[str, Any]]) -> list[str]:
    reasons: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], set[str]] = {}
    for r in rows:
        for n, fusion, reason, _source in r.get("reasons", []):
            key = fusion, re.sub(r"l_[a-z]+_\w+", "a weight", reason)
            reasons[key] += n
            where.setdefault(key, set()).add(r["family"])
    return [
        f"| {n} | {fusion} | {re.sub(r'[|`]', ' ', reason)} | {', '.join(sorted(where[fusion, reason]))} |"
        for (fusion, reason), n in reasons.most_common()
    ]
