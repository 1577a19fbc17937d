"""Rotary position embedding in the forms that models write it in; q and k of one layer become one launch.

Shapes: B batch, H heads, S sequence, K head dim, R rotary channels (the first R of K; the rest pass through).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from ..kernels import rope as kernels
from ._fusion import Emitter, Fusion, Idiom, Match, Value, View, static_bytes


def _rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _rotate_pairs(x: Tensor) -> Tensor:
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def llama_rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _rotate_half(x) * sin


def olmo_rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos + _rotate_half(x) * sin).to(x.dtype)


def float32_rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.float()
    return (h * cos + _rotate_half(h) * sin).to(x.dtype)


def nanochat_rotate_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((x2, -x1), dim=-1) * sin


def gpt_oss_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def nanogpt_halves_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos), dim=-1)


def halves_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


def deepseek_pairs_to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def glm_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _rotate_pairs(x) * sin


def ernie_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos + _rotate_pairs(x) * sin).to(x.dtype)


def cohere_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.float()
    return (h * cos + _rotate_pairs(h) * sin).to(x.dtype)


def torchtune_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.float().reshape(*x.shape[:-1], -1, 2)
    x1, x2 = h[..., 0], h[..., 1]
    return torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).flatten(-2).type_as(x)


def meta_complex(x: Tensor, freqs: Tensor) -> Tensor:
    h = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(h * freqs).flatten(-2).type_as(x)


def _example() -> dict[str, Tensor]:
    x = torch.zeros(2, 3, 5, 8, dtype=torch.bfloat16)
    return {"x": x, "cos": torch.zeros(2, 1, 5, 8), "sin": torch.zeros(2, 1, 5, 8)}


def _example_half_width() -> dict[str, Tensor]:
    return _example() | {"cos": torch.zeros(2, 1, 5, 4), "sin": torch.zeros(2, 1, 5, 4)}


def _example_complex() -> dict[str, Tensor]:
    return {"x": _example()["x"], "freqs": torch.zeros(2, 1, 5, 4, dtype=torch.complex64)}


def anchor(value: Value) -> bool:
    """A pair (-b, a), two products joined, or a complex product: a rotation of some kind."""
    if value.op == "view_as_real":
        return isinstance(value.args[0], Value) and value.args[0].op == "mul"
    if value.op not in ("cat", "stack") or value.args[1] != -1 or len(value.args[0]) != 2:
        return False
    a, b = value.args[0]
    return "neg" in (a.op, b.op) or {a.op, b.op} == {"sub", "add"} or _turned(a, b)


def _turned(a: Value, b: Value) -> bool:
    """Are both sums of two products, with the same four factors but for a sign?"""
    if not a.op == b.op == "add" or not all(isinstance(p, Value) and p.op == "mul" for p in (*a.args, *b.args)):
        return False
    factors = [[f for p in s.args for f in p.args if isinstance(f, Value)] for s in (a, b)]
    unsigned = [{id(f.args[0]) if f.op == "neg" else id(f) for f in of_one} for of_one in factors]
    return len(unsigned[0]) == 4 and unsigned[0] == unsigned[1]


def refuse(match: Match) -> str | None:
    x = match["x"]
    tables = [match["freqs"]] if "freqs" in match.bound else [match["cos"], match["sin"]]
    if len(x.shape) != 4:
        return f"x has shape {x.shape}, not (batch, heads, sequence, channels)"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"no kernel for {x.dtype}"
    if any(t.requires_grad for t in tables):
        return "cos and sin have a gradient, which the kernel does not compute"
    if not isinstance(x.shape[-1], int):
        return "the number of channels is not known at compile time"
    return _refuse_tables(match, x, tables)


def _refuse_tables(match: Match, x: Value, tables: list[Value]) -> str | None:
    shapes = " and ".join(str(t.shape) for t in tables)
    if any(_heads_dim(x, t) is None for t in tables):
        return f"cos/sin of shape {shapes} are not one row per position of x {x.shape}"
    padded = [["1"] * (4 - len(t.shape)) + [str(n) for n in t.shape] for t in tables]
    if any(p != padded[0] for p in padded):
        return f"cos and sin differ in shape: {shapes}"
    # An idiom with tables half as wide as x was traced with them.
    width = x.shape[-1] // 2 if match.idiom.example is not _example else x.shape[-1]
    if any(t.shape[-1] != width for t in tables):
        return f"cos/sin of shape {shapes} do not have {width} channels"
    if "freqs" in match.bound and not match["freqs"].fake.is_complex():
        return "the factors are not complex"
    if any(t.dtype in (torch.float64, torch.complex128) for t in tables) and x.dtype != torch.float64:
        return "cos and sin are computed in float64, the operator in float32"
    if not all(t.fake.is_complex() or t.fake.is_floating_point() for t in tables):
        return "cos and sin are not floating point"
    return None


def _heads_dim(x: Value, table: Value) -> int | None:
    """Which dimension of x the tables are broadcast over: 1 in (B, H, S, K), 2 in (B, S, H, K)."""
    shape = [str(n) for n in table.shape]
    shape = ["1"] * (4 - len(shape)) + shape
    want = [str(n) for n in x.shape]
    if len(table.shape) not in (2, 3, 4) or shape[0] not in ("1", want[0]):
        return None
    if shape[1] == "1" and shape[2] == want[2]:
        return 1
    return 2 if shape[2] == "1" and shape[1] == want[1] else None


def replace(match: Match, emit: Emitter) -> Node:
    x, dtype = match["x"], match.root.dtype
    if "freqs" in match.bound:
        heads = _heads_dim(x, match["freqs"])
        row = emit.call(torch.resolve_conj, _row_per_position(match["freqs"], heads, emit))
        parts = emit.call(torch.view_as_real, row)
        cos, sin = (emit.call("select", parts, -1, i) for i in (0, 1))
    else:
        heads = _heads_dim(x, match["cos"])
        cos, sin = (_row_per_position(match[name], heads, emit) for name in ("cos", "sin"))
        if match.idiom.means.get("backwards"):
            sin = emit.call("neg", sin)
    interleaved = match.idiom.means["interleaved"]
    source = emit.call("transpose", x, 1, 2) if heads == 2 else x
    if match.idiom.means.get("parts_pairs"):
        # Pairs lie side by side in x and half a row apart in the result: part them first, then turn halves.
        source = emit.call("unflatten", source, -1, (x.shape[-1] // 2, 2))
        source = emit.call("flatten", emit.call("transpose", source, -1, -2), -2)
    y = emit.call(kernels.rope, source, cos, sin, x.shape[-1], interleaved, False, dtype)
    return emit.call("transpose", y, 1, 2) if heads == 2 else y


def _row_per_position(table: Value, heads: int | None, emit: Emitter) -> Node:
    """(1|B, S, R): the table without the dimension that is broadcast over heads."""
    if len(table.shape) == 2:
        return emit.call("unsqueeze", table, 0)
    if len(table.shape) == 3:
        # (H=1, S, R) or (S, H=1, R) with no batch dimension: the head dimension becomes the batch of one.
        return emit.node(table) if heads == 1 else emit.call("transpose", table, 0, 1)
    if table.op == "unsqueeze" and table.args[1] == (heads or 0) - 4:
        return emit.node(table.args[0])
    return emit.call("squeeze", table, heads)


# --- larger forms, found once single rotations are operators -------------------------------------------------------


def fuse_partial(view: View) -> None:
    """cat(rope(x[..., :R]), x[..., R:]): the operator itself passes the other channels through."""
    for value in list(view.values):
        if value.op != "cat" or value.args[1] != -1 or len(value.args[0]) != 2 or not value.nodes:
            continue
        rotated, passed = value.args[0]
        rope, swapped = _look_through_transpose(rotated)
        if rope.op != "fused.rope":
            continue
        part, also_swapped = _look_through_transpose(rope.args[0]) if swapped else (rope.args[0], False)
        source = _leading_part(part, passed)
        if source is None or swapped != also_swapped or value.dtype != source.dtype:
            continue
        view.replace("rope", [value], _whole(source, rope.args[1:], swapped))


def _look_through_transpose(value: Value) -> tuple[Value, bool]:
    return (value.args[0], True) if value.op == "transpose" and value.args[1:] == (-3, -2) else (value, False)


def _leading_part(first: Value, rest: Value) -> Value | None:
    """x, when the two are x[..., :R] and x[..., R:]."""
    if first.op != rest.op or first.op not in ("half", "narrow") or first.args[0] is not rest.args[0]:
        return None
    if first.cut != rest.cut:
        return None
    x = first.args[0]
    if first.op == "half":
        return x if (first.args[1], rest.args[1]) == (0, 1) else None
    r = first.args[3]
    return x if first.args[1:] == (-1, 0, r, 1) and rest.args[1:] == (-1, r, x.shape[-1], 1) else None


def _whole(source: Value, rest: tuple, swapped: bool):
    def emit_whole(emit: Emitter) -> list[Node]:
        x = emit.call("transpose", source, 1, 2) if swapped else source
        y = emit.call(kernels.rope, x, *rest)
        return [emit.call("transpose", y, 1, 2) if swapped else y]

    return emit_whole


def fuse_pairs(view: View) -> None:
    """q and k of one layer, rotated by the same tables: one launch reads cos and sin once."""
    previous: Value | None = None
    ropes = [v for v in view.values if v.op == "fused.rope" and v.nodes]
    for value in sorted(ropes, key=lambda v: v.nodes[0]):
        if previous is not None and _pair(previous, value) and _launch_together(view, previous, value):
            previous = None
        else:
            previous = value


def _launch_together(view: View, q: Value, k: Value) -> bool:
    if view.replace("rope", [q, k], _both(q, k)) is not None:
        return False  # k depends on what q becomes
    view.absorbed("rope", k)
    return True


def _pair(q: Value, k: Value) -> bool:
    a, b = q.args[0], k.args[0]
    same = all(x is y or (not isinstance(x, Value) and x == y) for x, y in zip(q.args[1:], k.args[1:], strict=True))
    sizes = [(str(v.shape[0]), str(v.shape[2]), v.shape[3], v.dtype) for v in (a, b)]
    return same and sizes[0] == sizes[1]


def _both(q: Value, k: Value):
    def emit_both(emit: Emitter) -> list[Node]:
        out = emit.call(kernels.rope_qk, q.args[0], k.args[0], *q.args[1:])
        return [emit.item(out, 0), emit.item(out, 1)]

    return emit_both


_HALF, _PAIRS = {"interleaved": False}, {"interleaved": True}
_BACKWARDS = _HALF | {"backwards": True}
_PAIRS_TO_HALVES = _HALF | {"parts_pairs": True}

FUSION = Fusion(
    name="rope",
    anchor=anchor,
    idioms=(
        Idiom(float32_rotate_half, _example, _HALF),
        Idiom(olmo_rotate_half, _example, _HALF),
        Idiom(llama_rotate_half, _example, _HALF),
        Idiom(nanochat_rotate_back, _example, _BACKWARDS),
        Idiom(gpt_oss_halves, _example_half_width, _HALF),
        Idiom(nanogpt_halves_back, _example_half_width, _BACKWARDS),
        Idiom(halves_back, _example_half_width, _BACKWARDS),
        Idiom(deepseek_pairs_to_halves, _example_half_width, _PAIRS_TO_HALVES),
        Idiom(cohere_interleaved, _example, _PAIRS),
        Idiom(ernie_interleaved, _example, _PAIRS),
        Idiom(glm_interleaved, _example, _PAIRS),
        Idiom(torchtune_pairs, _example_half_width, _PAIRS),
        Idiom(meta_complex, _example_complex, _PAIRS),
    ),
    refuse=refuse,
    replace=replace,
    saved_bytes=lambda match: static_bytes(
        [match["freqs"]] if "freqs" in match.bound else [match["cos"], match["sin"]]
    ),
    passes=(fuse_partial, fuse_pairs),
    priority=5,  # before rms_norm: the sum in a rotation is no residual of a norm that follows
)
