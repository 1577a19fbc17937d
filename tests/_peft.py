"""Tiny Hugging Face models with PEFT adapters over dense, 4-bit or 8-bit weights, and what is asserted of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import bitsandbytes as bnb
import torch
from _models import draws, tiny
from _oracle import Float64, assert_as_accurate
from fused_backend.compiler import Options, Report
from fused_backend.compiler.backend import lower, rewrite
from peft import LoraConfig, get_peft_model
from torch import nn

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Adapted linear layers per decoder layer with target_modules="all-linear", counted by reading the models.
LINEARS = {"llama": 7, "mistral": 7, "qwen2": 7, "qwen3": 7, "gemma2": 7, "phi3": 4}


def quantized(model: nn.Module, kind: str, nested: bool, compute: torch.dtype) -> nn.Module:
    """Every linear layer but the head in 4 bits ("nf4", "fp4") or 8 ("int8"), as from_pretrained would load it."""
    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is not nn.Linear or name == "lm_head":
                continue
            bias = linear.bias is not None
            sizes = linear.in_features, linear.out_features
            if kind == "int8":
                layer = bnb.nn.Linear8bitLt(*sizes, bias=bias, has_fp16_weights=False)
                layer.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
                layer = layer.to("cpu")
            else:
                how: dict[str, Any] = {"compress_statistics": nested, "quant_type": kind}
                layer = bnb.nn.Linear4bit(*sizes, bias=bias, compute_dtype=compute, device="meta", **how)
                layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=layer, **how).to("cpu")
            if bias:
                layer.bias = nn.Parameter(linear.bias.data, requires_grad=False)
            setattr(module, name, layer)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"  # type: ignore[assignment]
    return model


class Output(NamedTuple):
    loss: torch.Tensor


class Block(nn.Module):
    """What a decoder layer does with its linear layers, quick to trace: three that share x, one alone, a gated MLP."""

    def __init__(self, K: int = 64, bias: bool = False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(K, K, bias=bias) for _ in range(4))
        self.gate_proj, self.up_proj = nn.Linear(K, 2 * K), nn.Linear(K, 2 * K)
        self.down_proj = nn.Linear(2 * K, K)

    def forward(self, x: torch.Tensor) -> Output:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        h = x + self.o_proj(torch.sin(q) * k + v)
        h = h + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))
        return Output(h.float().pow(2).mean())


NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted_block(base: str | None = "nf4", dtype: torch.dtype = F32, *, bias: bool = False, **lora: Any) -> Any:
    """A `Block` with adapters that are not zero."""
    torch.manual_seed(0)
    block = Block(bias=bias).to(dtype)
    if base is not None:
        block = quantized(block, base, True, dtype)
    block.requires_grad_(False)
    model = get_peft_model(block, LoraConfig(**({"r": 8, "lora_alpha": 16, "target_modules": NAMES} | lora)))
    fill(model)
    return model


def rows(count: int = 6, dtype: torch.dtype = F32, trained: bool = True) -> list[dict[str, torch.Tensor]]:
    """Inputs of a `Block`. With a gradient of their own, as those of any later layer have."""
    return [{"x": torch.randn(2, 5, 64, dtype=dtype).requires_grad_(trained)} for _ in range(count)]


def adapted(
    family: str = "llama",
    base: str | None = "nf4",
    dtype: torch.dtype = BF16,
    *,
    nested: bool = True,
    compute: torch.dtype | None = None,
    layers: int = 1,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    changes: dict[str, Any] | None = None,
    peft: dict[str, Any] | None = None,
    **lora: Any,
) -> Any:
    """A tiny model in `dtype`, its linear layers in the format `base`, with adapters that are not zero."""
    model = tiny(family, num_hidden_layers=layers, use_cache=False, **(changes or {})).to(dtype)
    if base is not None:
        model = quantized(model, base, nested, compute or dtype)
    given = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(prepare(model), LoraConfig(**(given | lora)), **(peft or {}))
    fill(model)
    return model


def fill(model: nn.Module) -> None:
    """Adapters begin at zero, where A has no gradient: random ones instead."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and ("_B" in name or name.endswith(".bias")):
                parameter.normal_(0, 0.1)


def step(model: Any, inputs: dict[str, torch.Tensor], autocast: torch.dtype | None = None) -> dict[str, Any]:
    """{name: value} of the loss and of the gradients of all parameters and inputs; autocast is outside of it all."""
    model.zero_grad(set_to_none=True)
    inputs = {name: t.detach().requires_grad_(t.requires_grad) for name, t in inputs.items()}
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = model(**inputs)
    out.loss.backward()
    gradients = {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}
    gradients |= {name: t.grad for name, t in inputs.items()}
    return {"loss": out.loss.detach().clone()} | {n: None if g is None else g.clone() for n, g in gradients.items()}


def widened(model: Any) -> Any:
    """The model in float64: 4-bit layers become dense ones that hold what they decode to in their compute dtype."""
    wide = copy.deepcopy(model)
    for module in list(wide.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, bnb.nn.Linear4bit):
                state = copy.copy(layer.weight.quant_state)
                state.dtype = layer.compute_dtype
                dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                weight = bnb.functional.dequantize_4bit(layer.weight.data, state).double()
                dense.weight = nn.Parameter(weight, requires_grad=False)
                if layer.bias is not None:
                    dense.bias = layer.bias
                setattr(module, name, dense)
    wide = wide.double()
    if getattr(wide, "is_gradient_checkpointing", False):
        wide.gradient_checkpointing_disable()  # recomputation would happen outside Float64
    return wide


class BothWays:
    """A backend that keeps each graph as Dynamo wrote it, and rewritten and lowered: one trace serves both."""

    def __init__(self) -> None:
        self.rewritten = True
        self.report = Report()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        eager, options = copy.deepcopy(gm), Options(lowering="aot_eager")
        found, finish = rewrite(gm, options)
        ours = finish(lower(gm, example_inputs, options, None))
        self.report.decisions += found.decisions
        self.report.graph_count += 1
        return lambda *args: (ours if self.rewritten else eager)(*args)

    def counts(self) -> tuple[int, int]:
        """Sites fused and refused."""
        return self.report.counts().get("lora_nf4", (0, 0))

    def reasons(self) -> list[str]:
        return [d.reason for d in self.report.decisions if d.fusion == "lora_nf4" and d.status == "refused"]


def exact_steps(model: Any, batches: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    wide = widened(model)
    doubled = [{n: t.double() if t.is_floating_point() else t for n, t in inputs.items()} for inputs in batches]
    with Float64():
        return [step(wide, inputs) for inputs in doubled]


def assert_as_accurate_as_eager(
    model: Any, batches: Sequence[dict[str, torch.Tensor]] | None = None, autocast: torch.dtype | None = None
) -> BothWays:
    """The yardstick over several batches at once, as in test_models.py; returns the backend with its report."""
    batches = batches or draws()
    truth = exact_steps(model, batches)
    torch._dynamo.reset()
    backend = BothWays()
    compiled = torch.compile(model, backend=backend)
    ours = [step(compiled, inputs, autocast) for inputs in batches]
    backend.rewritten = False
    eager = [step(compiled, inputs, autocast) for inputs in batches]
    backend.rewritten = True
    floating = (t.dtype for t in (*batches[0].values(), *model.parameters()) if t.is_floating_point())
    dtype = autocast or next(floating)
    for name in truth[0]:
        values = [[s[name] for s in steps] for steps in (ours, eager, truth)]
        if values[2][0] is None:
            assert values[0][0] is None, name
            continue
        assert all(v is not None for v in values[0]), f"{name} has no gradient"
        stacked = (torch.stack(v) for v in values)
        assert_as_accurate(*stacked, what=name, ulp_of=dtype, largest=False)
    assert any("lora_A" in name and value is not None and value.any() for name, value in ours[0].items())
    return backend


def assert_alike(compiled: Any, backend: BothWays, inputs: dict[str, torch.Tensor], within: float = 1e-4) -> None:
    """One step of a float32 model both ways: the same gradients exist, and they differ by rounding."""
    backend.rewritten = True
    ours = step(compiled, inputs)
    backend.rewritten = False
    eager = step(compiled, inputs)
    backend.rewritten = True
    assert_close(ours, eager, within)


def assert_close(ours: dict[str, Any], expected: dict[str, Any], within: float = 1e-4) -> None:
    """Relative distance of each tensor, and no gradient where there should be none."""
    assert {n for n, v in ours.items() if v is not None} == {n for n, v in expected.items() if v is not None}
    for name, value in expected.items():
        if value is not None:
            distance = (ours[name] - value).norm() / value.norm().clamp_min(1e-30)
            assert distance <= within, f"{name}: {distance:.2g} away"
