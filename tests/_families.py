"""Every family that AutoModelForCausalLM knows, built tiny: what transformers lists, no list of ours.

A family is a configuration class of the auto mapping. Its published default configuration tells which sizes it has;
each is made small by what its name says it counts. Layers that differ in kind are all kept, one of each: a model whose
every fourth layer attends keeps one that attends and one that does not.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _training import VOCABULARY, batch, roughen
from transformers import AutoModelForCausalLM

POSITIONS = 64
WINDOW = 8  # below the length of a batch, so that a window cuts something off
_MOST_PARAMETERS = 50_000_000

# What a setting counts, by its name, and the tiny value; the first that matches. None: left as published.
_SIZES: tuple[tuple[str, int | float | None], ...] = (
    (r".*(drop|dropout|pdrop|dropout_prob|layerdrop|jitter_noise|router_jitter|dropout_rate)", 0.0),
    (r"(type|task_type|segment)_vocab_size|.*(token_id|_index|_idx)", None),
    (r"attention_hidden_size|attention_head_dim|mamba_headdim|qk_head_dim", None),  # follow from others
    (r".*vocab.*", VOCABULARY),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|context_length|max_target_positions|model_max_length",
     POSITIONS),
    (r"(num_|n_)?(hidden_|decoder_|encoder_|input_|output_)?layers?|num_layers_per_stack|num_blocks|depth", 2),
    (r"n_recurrent_layers", 2),
    (r"num_kv_shared_layers", 0),
    (r".*_period", 2),
    (r".*(layer|attn|expert)_offset", 1),
    (r"image_size", 32),
    (r".*mamba.*_heads|num_mamba_heads", 8),
    (r"mamba_d_ssm", 128),
    (r".*(intermediate|ffn|feed_forward|inner|d_ff|dff|dim_ff|mlp_ratio).*(size|dim|mlp)?", 128),
    (r".*(kv|key_value)_heads?|num_query_groups|(linear|mamba)_num_key_heads", 2),
    (r".*(attention_heads|n_heads?|num_heads|value_heads|heads)", 4),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r".*(head_dim|d_head|dim_head|head_size|headdim)|kv_channels", 16),
    (r".*(num|n)_.*experts?_per_tok(en)?|moe_(topk|k)|num_experts_per_token|top_k|.*_topk", 2),
    (r"(n|num)_shared_experts|moe_num_shared_experts", 1),
    (r"zero_expert_num", 2),
    (r".*(num|n)_.*experts|num_experts|n_experts", 4),
    (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_?groups", 1),
    (r".*(_rank|lowrank)", 16),
    (r".*(state_size|d_state)", 16),
    (r".*(window|window_size|chunk_size|block_size|chunk_length|local_attention|window_len)", WINDOW),
    (r"first_k_dense_replace|num_dense_layers|max_window_layers", 1),
    (r"(hidden|embedding|.*embedding)_size|d_model|n_embd|(emb|embedding)_dim|word_embed_proj_dim"
     r"|lru_width", 64),
)  # fmt: skip


def families() -> dict[str, type]:
    """{model type: its configuration class}, as the auto mapping of transformers has them."""
    mapping = AutoModelForCausalLM._model_mapping
    return {config_class.model_type: config_class for config_class in mapping}


def tiny_value(name: str) -> int | float | None:
    return next((value for pattern, value in _SIZES if re.fullmatch(pattern, name)), None)


# What is tried in turn until a family builds and trains: sizes that depend on each other differ from family to family.
# A value holds where the configuration has that setting; of two names, the setting is to equal the other one.
_UNSET = "every size that is not set as published"
_OF_EACH_KIND = "layers of each kind"
_LEAST = "layers at least"
_ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": "qk_rope_head_dim"},
    {_UNSET: True},
    {"num_key_value_heads": "num_attention_heads"},
    {"num_heads": 8},
    {"mamba_d_head": 16},
    {"use_cache": False},
    {_OF_EACH_KIND: 2},
    {"default_language": "languages"},
    {"layer_types": ["full_attention", "full_attention"]},
    {"intermediate_size": 128, "block_auto_adjust_ff_dim": False},
)


def tiny_configs(config_class: type, least_layers: int) -> Iterator[Callable[[], Any]]:
    """Makers of tiny configurations to try in turn: the default one with every size small and one layer of each kind.

    Of a composite one all parts are made small; the last to be tried is its text part alone.
    """
    default = config_class()
    singles = [*_ATTEMPTS, *(a | b for a, b in itertools.combinations(_ATTEMPTS[1:], 2))]
    for changes in ({_LEAST: least_layers} | single for single in singles):
        yield lambda changes=changes: config_class(**_settings(default, changes))
    text = default.get_text_config(decoder=True)
    if type(text) is not config_class:
        yield from tiny_configs(type(text), least_layers)


def _settings(default: Any, changes: dict[str, Any]) -> dict[str, Any]:
    settings, published = _shrunk(default, changes.get(_OF_EACH_KIND, 1), changes[_LEAST]), default.to_dict()
    if _UNSET in changes:
        unset = {name: tiny_value(name) for name, value in published.items() if value is None}
        settings |= {name: value for name, value in unset.items() if value is not None}
    for name, value in changes.items():
        if name not in published:
            continue
        if not isinstance(value, str):
            settings[name] = value
        elif (other := settings.get(value, published.get(value))) is not None:
            settings[name] = other[0] if isinstance(other, list) else other
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None and type(part).model_type:
            settings[name] = _settings(part, changes)
    return settings


def _shrunk(default: Any, of_each_kind: int, least: int) -> dict[str, Any]:
    published = {k: v for k, v in default.to_dict().items() if k not in default.sub_configs}
    aliases = default.attribute_map
    layers = next((n for n in (published.get(k) for k in _layer_counts(published, aliases)) if n), 0)
    kept = _layers_of_every_kind(published, layers, of_each_kind, least)
    settings: dict[str, Any] = {}
    for name, value in published.items():
        tiny = tiny_value(name)
        if isinstance(value, list) and value:
            shortened = _shorten(name, value, layers, kept)
            if shortened is not None:
                settings[name] = shortened
        elif name in _layer_counts(published, aliases):
            settings[name] = len(kept)
        elif isinstance(value, bool) or value is None or tiny is None:
            continue
        elif isinstance(value, (int, float)) and isinstance(tiny, type(value)):
            settings[name] = min(value, tiny) if value >= 0 else value
        elif isinstance(value, float):
            settings[name] = float(tiny)
    if "is_decoder" in published:
        settings["is_decoder"] = True
    for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        if name in published:
            settings[name] = token
    return settings


def _layer_counts(published: dict[str, Any], aliases: dict[str, str]) -> list[str]:
    names = [aliases.get("num_hidden_layers", "num_hidden_layers"), "num_hidden_layers", "n_layer", "decoder_layers",
             "num_layers", "n_layers"]  # fmt: skip
    return [n for n in dict.fromkeys(names) if isinstance(published.get(n), int)]


def _layers_of_every_kind(published: dict[str, Any], layers: int, of_each: int, least: int) -> list[int]:
    """Indices of as few layers as show every value of every list that has one value for each layer."""
    kept: set[int] = set()
    for value in published.values():
        if _is_per_layer(value, layers):
            for kind in {repr(v) for v in value}:
                kept |= set([i for i, v in enumerate(value) if repr(v) == kind][:of_each])
        elif _is_indices(value, layers):
            kept |= {*value[:of_each], *[i for i in range(layers) if i not in value][:of_each]}
    for index in range(layers):
        if len(kept) >= min(least * of_each, layers):
            break
        kept.add(index)
    return sorted(kept)


def _is_per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers > 2 and value != list(range(layers))


def _is_indices(value: Any, layers: int) -> bool:
    ints = isinstance(value, list) and value and all(type(v) is int for v in value)
    return bool(ints) and value == sorted(set(value)) and value[-1] < layers and len(value) < layers


def _shorten(name: str, value: list[Any], layers: int, kept: list[int]) -> list[Any] | None:
    if value == list(range(layers)):
        return list(range(len(kept)))
    if _is_per_layer(value, layers):
        chosen = [value[i] for i in kept]
        tiny = tiny_value(name)
        return [min(v, tiny) if type(v) is int and type(tiny) is int else v for v in chosen]
    if _is_indices(value, layers):
        return [new for new, old in enumerate(kept) if old in value]
    if all(isinstance(v, list) and len(v) == 2 and isinstance(v[0], list) for v in value):  # gpt_neo: [[kinds, times]]
        return [[kinds, 1] for kinds, _ in value]
    return None


@dataclass(frozen=True)
class Built:
    """A tiny model of a family, or why there is none."""

    family: str
    model: torch.nn.Module | None
    why_not: str = ""
    config: Any = None


def build(family: str, least_layers: int = 2) -> Built:
    """The first tiny configuration that makes one training step, with random weights that show a misplaced one."""
    reasons: list[str] = []
    try:
        for make in tiny_configs(families()[family], least_layers):
            try:
                config = make()
                model = _train_once(config)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[-160:]}")
                continue
            return Built(family, model, config=config)
    except Exception as error:
        reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[-160:]}")
    return Built(family, None, reasons[0])


def _train_once(config: Any) -> torch.nn.Module:
    """The model, after one eager training step on tokens alone. Raises: whatever stands in the way."""
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size} parameters: no setting makes it smaller")
    model = AutoModelForCausalLM.from_config(config).train()
    roughen(model)
    loss = model(**batch()).loss
    loss.backward()
    if not torch.isfinite(loss):
        raise ValueError(f"its first loss is {loss.item()}")
    model.zero_grad(set_to_none=True)
    return model
