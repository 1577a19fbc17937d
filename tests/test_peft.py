"""PEFT models, dense and quantised: every adapted layer fused, loss and every gradient as accurate as without us."""

import copy

import pytest
import torch
from _models import batch, draws
from _peft import (
    BF16,
    F16,
    F32,
    LINEARS,
    BothWays,
    Output,
    adapted,
    adapted_block,
    assert_alike,
    assert_as_accurate_as_eager,
    assert_close,
    exact_steps,
    fill,
    quantized,
    rows,
    step,
)
from fused_backend.compiler import explain
from peft import LoraConfig, prepare_model_for_kbit_training

OPTIONS = {"lowering": "aot_eager"}
NARROW = {"autocast_adapter_dtype": False}  # adapters in the model's dtype; PEFT makes them float32 unless told
RANKS = {"r": 6, "rank_pattern": {"q_proj": 4, "up_proj": 16}, "alpha_pattern": {"k_proj": 3}, "use_rslora": True}


def prepared(model):
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


# The families, and with each of them something else that people choose.
MODELS = {
    "llama nf4": ("llama", {}),
    "llama float32": ("llama", {"base": None, "dtype": F32}),
    "qwen2 nf4, biases trained": ("qwen2", {"bias": "all"}),
    "qwen2 bfloat16, biases of layers and adapters": ("qwen2", {"base": None, "bias": "lora_only", "lora_bias": True}),
    "qwen3 nf4, ranks that differ": ("qwen3", RANKS),
    "gemma2 nf4, prepared for training": ("gemma2", {"prepare": prepared}),
    "mistral fp4 with plain scales, bfloat16 adapters": ("mistral", {"base": "fp4", "nested": False, "peft": NARROW}),
    "phi3 nf4 float16": ("phi3", {"dtype": F16}),
    "phi3 float32, nf4 in bfloat16": ("phi3", {"dtype": F32, "compute": BF16}),
    "phi3 bfloat16, nf4 in float32": ("phi3", {"compute": F32}),
    "phi3 bfloat16, bfloat16 adapters": ("phi3", {"base": None, "peft": NARROW}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_adapted_layer_is_fused_and_every_gradient_right(name):
    family, how = MODELS[name]
    backend = assert_as_accurate_as_eager(adapted(family, **how))
    assert backend.counts() == (LINEARS[family], 0), str(backend.report)
    assert backend.report.graph_count == 1 and backend.report.graph_breaks == 0
    assert all(refused == 0 for _, refused in backend.report.counts().values()), str(backend.report)


@pytest.mark.parametrize(("family", "base", "dtype"), [("llama", "nf4", BF16), ("mistral", None, F32)])
def test_autocast_around_the_compiled_model(family, base, dtype):
    backend = assert_as_accurate_as_eager(adapted(family, base, dtype), autocast=BF16)
    assert backend.counts() == (LINEARS[family], 0), str(backend.report)


def test_autocast_inside_the_compiled_model():
    """accelerate wraps the forward: Dynamo then writes the switches into the graph."""

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = adapted_block("nf4", BF16)

        def forward(self, x):
            with torch.autocast("cpu", BF16):
                return self.model(x)

    backend = assert_as_accurate_as_eager(Wrapped(), rows(dtype=BF16))
    assert backend.counts() == (7, 0), str(backend.report)


def test_two_layers_and_the_report():
    model = adapted(layers=2)
    report = explain(model, **batch())
    assert (report.graph_count, report.graph_breaks) == (1, 0)
    assert report.counts()["lora_nf4"] == (14, 0), str(report)
    decisions = [d for d in report.decisions if d.fusion == "lora_nf4"]
    where = [d.where.removeprefix("base_model.model.model.layers.") for d in decisions]
    parts = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert sorted(where) == sorted(f"{layer}.{part}" for layer in (0, 1) for part in parts)
    forms = sorted(d.reason.split(";")[0].removeprefix("nf4, double quantised") for d in decisions)
    assert forms == 4 * [""] + 4 * [", 2 share x"] + 6 * [", 3 share x"]


# --- checkpointing ---------------------------------------------------------------------------------------------------


def checkpointed(reentrant):
    how = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    return adapted(prepare=lambda model: prepare_model_for_kbit_training(model, **how))


def test_checkpointing_in_one_graph():
    model = checkpointed(reentrant=False)
    model.disable_input_require_grads()  # its hook breaks the graph
    backend = assert_as_accurate_as_eager(model)
    assert backend.counts() == (7, 0) and backend.report.graph_count == 1, str(backend.report)


def test_checkpointing_with_the_hook_that_breaks_the_graph():
    model, backend = checkpointed(reentrant=False), BothWays()
    model.base_model.model.model.compile(backend=backend)
    ours = step(model, batch())
    assert backend.counts() == (7, 0) and backend.report.graph_count == 2, str(backend.report)
    torch.manual_seed(0)
    inputs = batch()
    ours = step(model, inputs)
    backend.rewritten = False
    assert_close(ours, step(model, inputs), 0.02)


def test_layers_compiled_one_by_one_inside_a_checkpoint():
    model, backend, inputs = checkpointed(reentrant=True), BothWays(), batch()
    for layer in model.base_model.model.model.layers:
        layer.compile(backend=backend)
    ours = step(model, inputs)
    assert backend.counts() == (7, 0), str(backend.report)
    backend.rewritten = False
    assert_close(ours, step(model, inputs), 0.02)


# --- dropout ---------------------------------------------------------------------------------------------------------


def assert_same_draws(model, inputs, count):
    """Loss and every gradient of one seed, against torch's own compiler: only rounding may differ."""
    backend, results = BothWays(), []
    for how in (backend, "aot_eager_decomp_partition"):
        torch._dynamo.reset()
        torch.manual_seed(3)
        results.append(step(torch.compile(model, backend=how), inputs))
    assert backend.counts() == (count, 0), str(backend.report)
    assert_close(*results)


def test_dropout_draws_what_would_have_been_drawn():
    model = adapted("llama", None, F32, lora_dropout=0.1, changes={"attention_dropout": 0.2})
    assert_same_draws(model, batch(), 7)


def test_dropout_on_four_bit_layers():
    assert_same_draws(adapted_block(lora_dropout=0.1), rows(1)[0], 7)


# --- which layers have an adapter ------------------------------------------------------------------------------------


def test_only_q_and_v():
    """k, o and the MLP stay 4-bit layers; the gradient of x goes through them and each is a site."""
    model = adapted_block(target_modules=["q_proj", "v_proj"])
    backend = assert_as_accurate_as_eager(model, rows())
    assert backend.counts() == (7, 0), str(backend.report)
    forms = [d.reason.split(";")[0] for d in backend.report.decisions if d.fusion == "lora_nf4"]
    assert sum("no adapter" in form for form in forms) == 5
    assert [f for f in forms if "no adapter" not in f] == ["nf4, double quantised, 2 share x"] * 2


def test_a_four_bit_layer_without_adapter_or_gradient_is_left_to_bitsandbytes():
    model = adapted_block(target_modules=["q_proj", "v_proj"])
    backend = assert_as_accurate_as_eager(model, rows(trained=False))
    assert backend.counts() == (6, 1) and "left to bitsandbytes" in backend.reasons()[0], str(backend.report)


def test_adapters_of_head_and_embedding():
    model = adapted("llama", None, F32, target_modules=["q_proj", "lm_head", "embed_tokens"])
    backend = assert_as_accurate_as_eager(model)
    assert backend.counts() == (2, 1) and "embedding" in backend.reasons()[0], str(backend.report)


def test_a_head_that_is_trained_whole():
    model = adapted("llama", None, F32, target_modules=["q_proj"], modules_to_save=["lm_head"])
    backend = assert_as_accurate_as_eager(model)
    assert backend.counts() == (1, 0), str(backend.report)


# --- forms that are not this one -------------------------------------------------------------------------------------


def test_dora_is_right_and_not_fused():
    for base, fused in ((None, 0), ("nf4", 7)):  # the 4-bit layers themselves are sites, DoRA's among them
        model = adapted_block(base, use_dora=True, target_modules=["q_proj"])
        backend = assert_as_accurate_as_eager(model, rows())
        assert backend.counts()[0] == fused, str(backend.report)
        decisions = [d for d in backend.report.decisions if d.fusion == "lora_nf4" and d.status == "fused"]
        assert all("no adapter" in d.reason for d in decisions)


def test_eight_bit_layers_are_refused():
    model, backend = adapted_block("int8", BF16, target_modules=["q_proj", "up_proj"]), BothWays()
    compiled, inputs = torch.compile(model, backend=backend), rows(1, BF16)[0]
    model(**inputs)  # bitsandbytes quantises on the first call
    assert_alike(compiled, backend, inputs, 0.02)
    assert backend.counts() == (0, 2), str(backend.report)
    assert all("neither a linear layer nor a 4-bit product" in reason for reason in backend.reasons())


def written_to_afterwards(base, up, x):
    h = x * 1.5
    y = base(h)
    h.mul_(2.0)
    return y


def without_gradients(layer, x):
    with torch.no_grad():
        return layer(x)


FOUR_BIT = {
    "another input": (lambda base, up, x: base(x) + up(x.sin()), 1, "the adapter reads sin"),
    "adapter without gradients": (lambda base, up, x: base(x) + without_gradients(up, x), 1, "without gradients"),
    "base without gradients": (lambda base, up, x: without_gradients(base, x) + up(x), 0, "without gradients"),
    "base used elsewhere": (lambda base, up, x: (lambda y: y * (y + up(x)))(base(x)), 1, "used elsewhere"),
    "subtracted": (lambda base, up, x: base(x) - up(x), 1, "through sub"),
    "written to": (lambda base, up, x: (base(x) + up(x)).mul_(2.0), 1, "in place"),
    "input written to": (written_to_afterwards, 0, "in place"),
}


@pytest.mark.parametrize("name", FOUR_BIT)
def test_four_bit_near_misses_are_refused_once(name):
    """The layer itself is fused where it can be; nothing is said of the bodies that compute it."""
    fn, fused, reason = FOUR_BIT[name]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = quantized(torch.nn.Sequential(torch.nn.Linear(64, 32)), "nf4", True, F32)
            self.a, self.b = torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(8, 32, bias=False)

        def forward(self, x):
            return Output(fn(self.base, lambda x: self.b(self.a(x)) * 2.0, x).pow(2).mean())

    model, backend = Model(), BothWays()
    assert_alike(torch.compile(model, backend=backend), backend, rows(1)[0])
    assert backend.counts() == (fused, 1), str(backend.report)
    assert reason in backend.reasons()[0]


# --- several adapters ------------------------------------------------------------------------------------------------


def with_another():
    model = adapted_block()
    model.add_adapter("other", LoraConfig(r=4, lora_alpha=3, target_modules=["q_proj", "up_proj"]))
    fill(model)
    return model


def test_set_adapter_compiles_once_more():
    model, backend, inputs = with_another(), BothWays(), rows(1)[0]
    compiled = torch.compile(model, backend=backend)
    for name, graphs in (("default", 1), ("other", 2), ("default", 2), ("other", 2)):
        model.set_adapter(name)
        assert_alike(compiled, backend, inputs)
        assert backend.report.graph_count == graphs
        trained = {n for n, g in step(compiled, inputs).items() if "lora_" in n and g is not None}
        assert trained and all(f".{name}." in n for n in trained)
    assert backend.counts() == (14, 0), str(backend.report)


def test_two_active_adapters():
    """The first of them is fused with its layer."""
    model = with_another()
    model.base_model.set_adapter(["default", "other"])
    backend = assert_as_accurate_as_eager(model, rows())
    assert backend.counts() == (7, 2), str(backend.report)
    assert set(backend.reasons()) == {"it is a second adapter on one layer"}


def test_disabled_adapters():
    model, inputs = adapted_block(), rows(1)[0]
    compiled = torch.compile(model, backend=BothWays())
    with_adapters = compiled(**inputs).loss
    with model.disable_adapter():
        without = compiled(**inputs).loss
        torch.testing.assert_close(without, model(**inputs).loss)
    assert not torch.isclose(with_adapters, without)
    torch.testing.assert_close(compiled(**inputs).loss, with_adapters)


# --- training --------------------------------------------------------------------------------------------------------


def test_two_optimizer_steps():
    """All that two steps changed, in one vector: as accurate as eager's."""
    changes = []
    batches = rows(2, trained=False)
    for how in ("fused", "eager", "exact"):
        model = adapted_block()
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        torch._dynamo.reset()
        if how != "exact":
            compiled = torch.compile(model, backend=how, options=OPTIONS if how == "fused" else None)
        for inputs in batches:
            optimizer.zero_grad()
            if how == "exact":
                (gradients,) = exact_steps(model, [inputs])
                for name, parameter in model.named_parameters():
                    parameter.grad = None if gradients[name] is None else gradients[name].float()
            else:
                compiled(**inputs).loss.backward()
            optimizer.step()
        changes.append(torch.cat([(p - before[n]).flatten() for n, p in model.named_parameters() if n in before]))
    ours, eager, truth = changes
    assert truth.norm() > 0.01
    assert (ours - truth).norm() <= 1.5 * (eager - truth).norm() + torch.finfo(F32).eps * truth.norm()


def test_the_standard_script_compiles_once():
    """QLoRA as its guides write it: prepare, adapt, AdamW; then merge what was learned."""
    losses = []
    for backend in (BothWays(), None):
        model = adapted(prepare=prepared)
        called = model if backend is None else torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        torch.manual_seed(1)
        inputs = draws(3)
        for _ in range(2):
            for each in inputs:
                optimizer.zero_grad()
                loss = called(**each).loss
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        if backend is not None:
            assert backend.report.graph_count == 1 and backend.counts() == (7, 0), str(backend.report)
    ours, eager = torch.tensor(losses[:6]), torch.tensor(losses[6:])
    assert (ours - eager).abs().max() < 0.02 and ours[3:].sum() < ours[:3].sum() - 0.1


@pytest.mark.parametrize("base", [None, "nf4"])
def test_evaluation_and_merging_after_training(base):
    model, inputs = adapted_block(base, lora_dropout=0.1), rows(1)[0]
    compiled = torch.compile(model, backend="fused", options=OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = copy.deepcopy(model).eval()(**inputs).loss
    for _ in range(2):
        optimizer.zero_grad()
        compiled(**inputs).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        ours, eager = compiled(**inputs).loss, model(**inputs).loss
    torch.testing.assert_close(ours, eager)
    assert ours < before * 0.99
    if base is None:
        torch.testing.assert_close(model.merge_and_unload()(**inputs).loss, eager, rtol=1e-4, atol=1e-5)
