"""What only a GPU can show: native kernels inside compiled models, bf16, Inductor, memory."""

import pytest
import torch
import torch.nn.functional as F
from _models import SITES, batch, draws, tiny
from _oracle import assert_as_accurate
from _training import assert_step_as_accurate

pytestmark = pytest.mark.gpu
INDUCTOR = {"lowering": "inductor"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "glm4", "phi3", "cohere"])
def test_models_under_inductor(family, dtype):
    model = tiny(family).to("cuda", dtype)
    assert_step_as_accurate(model, draws(device="cuda"), INDUCTOR)


@pytest.mark.parametrize("kind", ["window", "documents", "padding"])
def test_windows_and_documents_under_inductor(kind):
    """Long enough that flash takes the documents; one layer has a window and one has none."""
    sizes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
    model = tiny("gemma3_text", **sizes).to("cuda", torch.bfloat16)
    inputs = [batch(length=64, device="cuda") | {"use_cache": False} for _ in range(6)]
    for i, given in enumerate(inputs):
        at = torch.arange(64, device="cuda")
        if kind == "documents":
            given["position_ids"] = torch.where(at < 20 + i, at, at - 20 - i)[None].expand(2, -1).clone()
        if kind == "padding":
            given["attention_mask"] = (at < torch.tensor([[64], [40 + i]], device="cuda")).long()
    assert_step_as_accurate(model, inputs, INDUCTOR)


@pytest.mark.parametrize("family", SITES)
def test_models_without_inductor(family):
    assert_step_as_accurate(tiny(family).cuda(), draws(device="cuda"))


def test_autocast_with_float32_weights():
    model, inputs = tiny("llama").cuda(), batch(device="cuda")

    def step(call):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(**inputs).loss
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    wide = {n: g.double() for n, g in step(model).items()}
    ours, eager = step(torch.compile(model, backend="fused")), step(torch.compile(model, backend="eager"))
    for name, grad in eager.items():
        assert ours[name].dtype == grad.dtype
        difference, size = (ours[name].double() - wide[name]).norm(), wide[name].norm()
        assert difference <= 0.03 * size, name


def test_the_logits_never_exist():
    T, V, D = 8192, 128256, 4096
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(V, D, device="cuda", dtype=torch.bfloat16) * 0.02
    target = torch.randint(0, V, (T,), device="cuda")
    call = torch.compile(lambda x: F.cross_entropy(F.linear(x, w).float(), target), backend="fused")
    call(x).backward()
    torch.cuda.synchronize()
    x.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(x).backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**29


def test_linear_cross_entropy_at_model_size():
    T, V, D = 2048, 32000, 2048
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(V, D, device="cuda", dtype=torch.bfloat16) * 0.05).requires_grad_()
    target = torch.randint(0, V, (T,), device="cuda")
    target[::3] = -100

    def loss(x, w):
        return F.cross_entropy(F.linear(x, w).float(), target)

    def run(call, *inputs):
        value = call(*inputs)
        return [value.detach(), *torch.autograd.grad(value, inputs)]

    ours, eager = run(torch.compile(loss, backend="fused"), x, w), run(loss, x, w)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = run(lambda x, w: F.cross_entropy(F.linear(x, w), target), *wide)
    for name, a, b, t in zip(("loss", "dx", "dw"), ours, eager, truth, strict=True):
        assert_as_accurate(a, b, t, what=name)


@pytest.mark.parametrize("lowering", ["inductor", "aot_eager"])
def test_a_step_waits_for_nothing(lowering):
    """Without a padding mask no step reads anything back to the host, once what is compiled and tuned is there."""
    model, inputs = tiny("llama").to("cuda", torch.bfloat16), batch(device="cuda")
    inputs["labels"] = inputs["input_ids"]  # ignored labels would be counted, which waits
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled = torch.compile(model, backend="fused", options={"lowering": lowering})

    def step():
        compiled(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graphs():
    """mode="reduce-overhead": recorded steps give what steps launched one by one give."""
    model, batches = tiny("llama").to("cuda", torch.bfloat16), draws(5, device="cuda")

    def run(**how):
        torch._dynamo.reset()
        compiled, found = torch.compile(model, backend="fused", **how), []
        for inputs in batches:
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad(set_to_none=True)
            loss = compiled(**inputs).loss
            loss.backward()
            found.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters())])
        return found

    for ours, theirs in zip(run(mode="reduce-overhead"), run(), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).float().norm() <= 0.02 * b.float().norm()
