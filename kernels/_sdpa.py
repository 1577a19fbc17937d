"""torch's attention kernels behind one signature, and which of them to take: measured once for each shape.

Every kind computes out = softmax(scale q k^T) v, the rows' logsumexp for the backward, and the backward. None
is ours: flash and cuDNN skip what a causal mask hides, efficient takes float32, math is plain torch.

Shapes: q, out (B, H, S, K), k and v (B, G, T, K), lse (B, H, S); G divides H: every k and v serves H / G query heads.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..derivations import attention as formulas
from ._launch import next_power_of_2
from ._measured import cache_path, device_name, median_ms, read, write

aten = torch.ops.aten
Grads = tuple[Tensor, Tensor, Tensor]
_ALIGNED_ROWS = 32  # to which the efficient kernel pads its logsumexp


def forward(kind: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse."""
    if kind == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if kind == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out, lse
    if kind == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        return out, lse.reshape(q.shape[:3])
    if kind == "efficient":
        k, v = _repeated(k, q), _repeated(v, q)
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        return out, lse[..., : q.shape[2]]
    return _math(q, k, v, causal, scale)


def backward(
    kind: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Grads:
    """dq, dk, dv of `forward` of the same kind."""
    if kind == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    S, T = q.shape[2], k.shape[2]
    if kind == "flash":
        state = q.new_empty((2,), dtype=torch.uint64)  # of the random numbers that no dropout draws
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, S, T, 0.0, causal, state, state[0], scale=scale
        )
    if kind == "cudnn":
        state = q.new_empty((), dtype=torch.int64)
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), state, state, None, None, None, S, T, 0.0, causal, scale=scale
        )
    if kind == "efficient":
        state = q.new_empty((), dtype=torch.int64)
        lse = torch.nn.functional.pad(lse, (0, -S % _ALIGNED_ROWS), value=float("inf"))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, _repeated(k, q), _repeated(v, q), None, out, lse, state, state, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        return dq, _summed(dk, k), _summed(dv, v)
    return _math_backward(dout, q, k, v, out, lse, causal, scale)


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """out under an explicit mask `seen` (B, 1, S, T) bool, as models ask torch for it."""
    k, v = _repeated(k, q), _repeated(v, q)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def masked_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Grads:
    """dq, dk, dv of `masked`, by torch's autograd: the forward runs again.

    An operator runs with autograd switched off, below its dispatch keys; here both are on again.
    """
    keys = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        keys = keys.remove(getattr(torch._C.DispatchKey, name))
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, keys), torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        dq, dk, dv = torch.autograd.grad(masked(q, k, v, seen, scale), (q, k, v), dout)
    return dq, dk, dv


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) if x.shape[1] != q.shape[1] else x


def _summed(dx: Tensor, x: Tensor) -> Tensor:
    return dx if dx.shape == x.shape else dx.unflatten(1, (x.shape[1], -1)).sum(2)


# --- plain torch ---------------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """(B, G, H / G, S, T) in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide).unflatten(1, (k.shape[1], -1)) @ k.to(wide).unsqueeze(2).mT * scale
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _math(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    out = _probabilities(scores, lse) @ v.to(scores.dtype).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """A row that sees no key has lse = -inf and probabilities of 0, as in torch."""
    return torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse).unsqueeze(-1))


def _math_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Grads:
    scores = _scores(q, k, causal, scale)
    wide, G = scores.dtype, k.shape[1]
    do, o, queries = (x.to(wide).unflatten(1, (G, -1)) for x in (dout, out, q))
    keys, values = k.to(wide).unsqueeze(2), v.to(wide).unsqueeze(2)
    p = _probabilities(scores, lse.unflatten(1, (G, -1)))
    ds = formulas.dscore(p, do @ values.mT, (do * o).sum(-1, keepdim=True), scale)
    dq = (ds @ keys).flatten(1, 2)
    dk, dv = (ds.mT @ queries).sum(2), (p.mT @ do).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# --- which one -----------------------------------------------------------------------------------------------------


def kind_of(q: Tensor, k: Tensor, causal: bool, steady: bool = True) -> str:
    """The kind for these tensors: forward and backward of one call ask alike and are told alike.

    steady  the lengths recur: cuDNN, which plans for each shape anew, may be worth it
    """
    if q.device.type != "cuda":
        return "cpu" if q.device.type == "cpu" else "math"
    key = _key(q, k, causal, steady)
    if key not in _KINDS:
        _KINDS.update(read(_path()))
    if key not in _KINDS:
        measurable = not torch.cuda.is_current_stream_capturing()
        with unset_fake_temporarily(), torch.no_grad(), torch.cuda.device(q.device):
            usable = [name for name in _usable(q, k, causal) if steady or name != "cudnn"]
            _KINDS[key] = _fastest(usable, q, k, causal) if measurable else usable[0]
        if measurable:
            write(_path(), _KINDS)
    return _KINDS[key]


_KINDS: dict[str, str] = {}


def _key(q: Tensor, k: Tensor, causal: bool, steady: bool) -> str:
    """What decides: the device and the shapes; batch and lengths that change, rounded up to a power of two."""
    (B, H, S, K), G, T = q.shape, k.shape[1], k.shape[2]
    if not steady:
        B, S, T = (next_power_of_2(n) for n in (B, S, T))
    shape = (B, H, G, S, T, K)
    strict = torch.are_deterministic_algorithms_enabled()
    return f"{device_name(q.device)} {q.dtype} {shape} {causal=} {steady=} {strict=}"


def _usable(q: Tensor, k: Tensor, causal: bool) -> list[str]:
    """Kinds that torch itself would allow; the one that it would take first."""
    cuda = torch.backends.cuda
    grouped = q.shape[1] != k.shape[1]
    params = cuda.SDPAParams(q, k, k, None, 0.0, causal, grouped)
    wide = _repeated(k, q)
    found = []
    if cuda.can_use_flash_attention(params):
        found.append("flash")
    if cuda.can_use_cudnn_attention(params):
        found.append("cudnn")
    if cuda.can_use_efficient_attention(cuda.SDPAParams(q, wide, wide, None, 0.0, causal, False)):
        found.append("efficient")
    return [*found, "math"]


def _fastest(kinds: list[str], q: Tensor, k: Tensor, causal: bool) -> str:
    """By the time of a forward and a backward on random tensors of this shape. Only flash and cuDNN are close."""
    rivals = [kind for kind in kinds if kind in ("flash", "cudnn")]
    if len(rivals) < 2:
        return kinds[0]
    random = torch.Generator(q.device).manual_seed(0)  # the user's own stays where it is
    made = functools.partial(torch.randn, device=q.device, dtype=q.dtype, generator=random)
    a, b, c = (made(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (q, k, k))

    def step(kind: str) -> Any:
        out, lse = forward(kind, a, b, c, causal, 0.125)
        return backward(kind, a, a, b, c, out, lse, causal, 0.125)

    times: dict[str, float] = {}
    for kind in rivals:
        try:
            times[kind] = median_ms(functools.partial(step, kind))
        except RuntimeError:  # allowed, and yet it does not run here
            continue
    return min(times, key=times.__getitem__) if times else next(k for k in kinds if k not in rivals)


def _path() -> pathlib.Path:
    """Renewed when this file changes."""
    return cache_path("attention", __file__)
