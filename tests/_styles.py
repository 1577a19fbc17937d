"""Small language models written in the ways of code that is not Hugging Face's; how the maths is spelled is the point.

Every model takes input_ids and labels and returns (loss, logits). Sizes are shared: what differs between two models is
their spelling alone.

Shapes: B batch, S sequence, D model, H query heads, G key heads, K head dim, F hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _training import VOCABULARY as V
from _training import roughen
from torch import Tensor, nn

D, H, G, K, HIDDEN, POSITIONS = 64, 4, 2, 16, 96, 64
EPS = 1e-2  # large enough for another one to be noticed


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


def linear(n: int, m: int) -> nn.Linear:
    return nn.Linear(n, m, bias=False)


def angles(channels: int = K) -> Tensor:
    """(POSITIONS, channels / 2)"""
    return torch.outer(torch.arange(POSITIONS).float(), 1e4 ** (-torch.arange(0, channels, 2).float() / channels))


class Decoder(nn.Module):
    """Embedding, pre-norm layers with residuals, head and loss; the parts are the style's."""

    def __init__(self, norm: Any, attention: Any, mlp: Any, loss: Callable[[Tensor, Tensor], Tensor], layers: int = 1):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.attention_norms, self.mlp_norms = (nn.ModuleList(norm() for _ in range(layers)) for _ in "am")
        self.attentions = nn.ModuleList(attention() for _ in range(layers))
        self.mlps = nn.ModuleList(mlp() for _ in range(layers))
        self.norm, self.head, self.loss = norm(), linear(D, V), loss

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def context(self, h: Tensor) -> tuple[Any, ...]:
        """What every attention is given beside its input: mask, rotation tables."""
        return ()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        h = self.embedded(input_ids)
        context = self.context(h)
        for norm, attention, mlp_norm, mlp in zip(
            self.attention_norms, self.attentions, self.mlp_norms, self.mlps, strict=True
        ):
            h = h + attention(norm(h), *context)
            h = h + mlp(mlp_norm(h))
        logits = self.head(self.norm(h))
        return Output(self.loss(logits, labels), logits)


# --- Meta's Llama ----------------------------------------------------------------------------------------------------


class MetaNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


def against(table: Tensor, x: Tensor) -> Tensor:
    """A (S, K/2) table shaped to be broadcast over batch and heads of x (B, S, H, K/2)."""
    return table.view(*[n if i in (1, x.ndim - 1) else 1 for i, n in enumerate(x.shape)])


def rotate_complex(xq: Tensor, xk: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    k = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    table = against(table, q)
    q, k = torch.view_as_real(q * table).flatten(3), torch.view_as_real(k * table).flatten(3)
    return q.type_as(xq), k.type_as(xk)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    B, S, heads, channels = x.shape
    return x[:, :, :, None, :].expand(B, S, heads, times, channels).reshape(B, S, heads * times, channels)


class MetaAttention(nn.Module):
    def __init__(self, explicit: bool = True):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = linear(D, H * K), linear(D, G * K), linear(D, G * K), linear(H * K, D)
        self.explicit = explicit

    def forward(self, x, table, mask):
        B, S, _ = x.shape
        xq, xk, xv = self.wq(x).view(B, S, H, K), self.wk(x).view(B, S, G, K), self.wv(x).view(B, S, G, K)
        xq, xk = rotate_complex(xq, xk, table)
        q, k, v = (t.transpose(1, 2) for t in (xq, repeat_heads(xk, H // G), repeat_heads(xv, H // G)))
        if self.explicit:
            scores = torch.matmul(q, k.transpose(2, 3)) / K**0.5
            scores = F.softmax((scores + mask).float(), dim=-1).type_as(q)
            out = torch.matmul(scores, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.wo(out.transpose(1, 2).contiguous().view(B, S, -1))


class MetaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = linear(D, HIDDEN), linear(HIDDEN, D), linear(D, HIDDEN)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def shifted_slices(logits: Tensor, labels: Tensor) -> Tensor:
    """The loop's own shift."""
    logits = logits.float()[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels[:, 1:].contiguous().view(-1))


class Meta(Decoder):
    """`attention`: "explicit" softmax, "mask" given to SDPA, "causal" for SDPA's own flag."""

    def __init__(self, attention: str = "explicit", norm: Any = MetaNorm, loss: Any = shifted_slices):
        super().__init__(norm, lambda: MetaAttention(attention == "explicit"), MetaMLP, loss)
        self.table = torch.polar(torch.ones_like(angles()), angles())  # no buffer: a cast would drop imaginary parts
        self.masked = attention != "causal"

    def context(self, h):
        S, start = h.shape[1], 0
        mask = None
        if self.masked:
            mask = torch.full((S, S), float("-inf"), device=h.device)
            mask = torch.hstack([torch.zeros((S, start), device=h.device), torch.triu(mask, diagonal=1)]).type_as(h)
        return self.table[start : start + S], mask


# --- torchtitan: the same with torch's own norm, and targets that the data loader has shifted ------------------------


def flattened(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def titan() -> Decoder:
    return Meta("causal", lambda: nn.RMSNorm(D, eps=EPS), flattened)


# --- nanoGPT with RMSNorm and SwiGLU ---------------------------------------------------------------------------------


class NanoNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(D))

    def forward(self, x):
        rms = x.float().square().mean(dim=-1, keepdim=True).add(EPS).sqrt()
        return (x.float() / rms).to(x.dtype) * self.g


class NanoAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, H, C // H).transpose(1, 2)
        q = q.view(B, T, H, C // H).transpose(1, 2)
        v = v.view(B, T, H, C // H).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.dropout(self.c_proj(y))


class NanoMLP(nn.Module):
    """Gate and up in one projection; x * sigmoid(x) written out."""

    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj, self.dropout = nn.Linear(D, 2 * HIDDEN), nn.Linear(HIDDEN, D), nn.Dropout(0.0)

    def forward(self, x):
        x, gate = self.c_fc(x).chunk(2, dim=-1)
        return self.dropout(self.c_proj(x * (gate * torch.sigmoid(gate))))


def minus_one_ignored(logits: Tensor, targets: Tensor) -> Tensor:
    targets = torch.where(targets < 0, -1, targets)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Nano(Decoder):
    def __init__(self):
        super().__init__(NanoNorm, NanoAttention, NanoMLP, minus_one_ignored)
        self.wpe, self.drop = nn.Embedding(POSITIONS, D), nn.Dropout(0.0)
        self.embed.weight = self.head.weight

    def embedded(self, ids):
        pos = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        return self.drop(self.embed(ids) + self.wpe(pos))


# --- lit-gpt: one qkv by groups, rotation of a part of the head, unit offset -----------------------------------------

ROTARY = 8


class LitNorm(nn.Module):
    def __init__(self, add_unit_offset: bool = False):
        super().__init__()
        self.weight, self.add_unit_offset = nn.Parameter(torch.ones(D)), add_unit_offset

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + EPS)
        weight = (1 + self.weight) if self.add_unit_offset else self.weight
        return (x_normed * weight.float()).to(dtype=dtype)


def rope_by_cat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = x.size(-1)
    rotated = torch.cat((-x[..., n // 2 :], x[..., : n // 2]), dim=-1)
    return (x * cos + rotated * sin).to(dtype=x.dtype)


class LitAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.proj = linear(D, (H + 2 * G) * K), linear(D, D)

    def forward(self, x, cos, sin):
        B, T, C = x.size()
        q_per_kv = H // G
        qkv = self.attn(x).view(B, T, G, q_per_kv + 2, K).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        k, v = (t.expand(B, G, q_per_kv, T, K).reshape(B, -1, T, K) for t in (k, v))
        q = q.reshape(B, -1, T, K)
        q = torch.cat((rope_by_cat(q[..., :ROTARY], cos, sin), q[..., ROTARY:]), dim=-1)
        k = torch.cat((rope_by_cat(k[..., :ROTARY], cos, sin), k[..., ROTARY:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, scale=1.0 / K**0.5, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class LitMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_1, self.fc_2, self.proj = linear(D, HIDDEN), linear(D, HIDDEN), linear(HIDDEN, D)

    def forward(self, x):
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


def shifted_views(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels = logits[..., :-1, :], labels[..., 1:]
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100)


class Lit(Decoder):
    cos: Tensor
    sin: Tensor

    def __init__(self, add_unit_offset: bool = False):
        super().__init__(lambda: LitNorm(add_unit_offset), LitAttention, LitMLP, shifted_views)
        idx_theta = angles(ROTARY).repeat(1, 2)
        self.register_buffer("cos", idx_theta.cos(), persistent=False)
        self.register_buffer("sin", idx_theta.sin(), persistent=False)

    def context(self, h):
        return self.cos[: h.size(1)], self.sin[: h.size(1)]


# --- torchtune -------------------------------------------------------------------------------------------------------


class TuneNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    def forward(self, x):
        return (self._norm(x.float()) * self.scale).type_as(x)


class WideTuneNorm(TuneNorm):
    """torch's norm, everything in float32."""

    def forward(self, x):
        return F.rms_norm(x.float(), normalized_shape=(D,), weight=self.scale.float(), eps=EPS).to(x.dtype)


class TuneAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = linear(D, H * K), linear(D, G * K), linear(D, G * K)
        self.output_proj = linear(D, D)

    def rotate(self, x, cache):
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        out = torch.stack(
            [
                pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
                pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return out.flatten(3).type_as(x)

    def forward(self, x, cache):
        B, S, _ = x.shape
        q = self.rotate(self.q_proj(x).view(B, S, G * (H // G), K), cache).transpose(1, 2)
        k = self.rotate(self.k_proj(x).view(B, S, -1, K), cache).transpose(1, 2)
        v = self.v_proj(x).view(B, S, -1, K).transpose(1, 2)
        k, v = (t.unsqueeze(2).expand(B, G, H // G, S, K).flatten(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.output_proj(out.transpose(1, 2).contiguous().view(B, S, -1))


class TuneMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3, self.activation = linear(D, HIDDEN), linear(HIDDEN, D), linear(D, HIDDEN), nn.SiLU()

    def forward(self, x):
        return self.w2(self.w3(x) * self.activation(self.w1(x)))


def labels_moved_left(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels are shifted, logits are not; a criterion module, its sum divided by hand."""
    ignored = torch.full((labels.size(0), 1), -100, device=labels.device)
    labels = torch.hstack((labels[..., 1:], ignored)).reshape(-1)
    total = nn.CrossEntropyLoss(reduction="sum", ignore_index=-100)(logits.reshape(-1, logits.size(-1)).float(), labels)
    return total / (labels != -100).sum()


def chunked(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum over pieces of the logits, so that less of them is float32 at a time."""
    labels = torch.hstack((labels[..., 1:], torch.full((labels.size(0), 1), -100)))
    pieces = zip(logits.chunk(2, dim=1), labels.chunk(2, dim=1), strict=True)
    total = sum(F.cross_entropy(x.float().reshape(-1, V), t.reshape(-1), reduction="sum") for x, t in pieces)
    return total / (labels != -100).sum()


class Tune(Decoder):
    cache: Tensor

    def __init__(self, norm: Any = TuneNorm, loss: Any = labels_moved_left):
        super().__init__(norm, TuneAttention, TuneMLP, loss)
        cache = torch.stack([angles().cos(), angles().sin()], dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def context(self, h):
        return (self.cache[: h.size(1)],)


STYLES: dict[str, Callable[[], Decoder]] = {
    "meta, explicit mask": Meta,
    "meta, mask for SDPA": lambda: Meta("mask"),
    "meta, causal SDPA": lambda: Meta("causal"),
    "nanoGPT": Nano,
    "lit-gpt": Lit,
    "lit-gpt, unit offset": lambda: Lit(add_unit_offset=True),
    "torchtune": Tune,
    "torchtune, torch's norm": lambda: Tune(WideTuneNorm),
    "torchtune, chunks of logits": lambda: Tune(loss=chunked),
    "torchtitan": titan,
}


def styled(name: str) -> Decoder:
    """The model of a style, its weights away from their initial values."""
    torch.manual_seed(0)
    model = STYLES[name]().train()
    roughen(model)
    return model
