"""The benchmarks' own parts that could be wrong without anybody noticing until a GPU's time is spent on them."""

from __future__ import annotations

import argparse
import json
import re
import sys

import pytest
import torch
from _tree import ROOT

sys.path.append(str(ROOT / "bench"))

import _kernel_names
import _records
import _shapes
import _stacks
import _steps
import breakdown
import compile_time
import context
import model
import on_gpu
import table

# Each in the mode that bench/on_gpu.py trains it in; Gemma's two layers are of two kinds.
TRAINED = {
    "llama3-8b": ("qlora", 1), "llama3.2-1b": ("full", 1), "qwen3-4b": ("full", 1), "gemma2-2b": ("lora", 2),
    "qwen3-30b-a3b-16l": ("lora", 1),
    "smollm2-360m": ("full", 1),
}  # fmt: skip


def first_step(name: str, stack: str) -> tuple[float, float, list[str]]:
    mode, layers = TRAINED[name]
    config = _shapes.config_of(name, layers, tiny=True)
    built = _stacks.build(_stacks.Stack.parse(stack), config, mode, torch.float32, "cpu", 32)
    options = argparse.Namespace(device="cpu", mode=mode, dtype="fp32", steps=0, batch=2, seq=32)
    log = _steps.fused_log()
    loss, norm = _steps.training_step(built, config, options)[0](0, with_norm=True)
    return loss.item(), norm.item(), log


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_model_trains_the_same_weights_eagerly_and_fused(name):
    loss, norm, _ = first_step(name, "eager")
    ours, our_norm, log = first_step(name, "fused")
    assert loss == pytest.approx(ours, rel=1e-6) and norm == pytest.approx(our_norm, rel=1e-5)
    assert "rms_norm" in " ".join(log) and "linear_cross_entropy 1/1" in " ".join(log)


def test_every_model_of_the_list_is_trained_here():
    assert set(TRAINED) == set(_shapes.MODELS)


# --- Stacks ----------------------------------------------------------------------------------------------------------


def test_stacks_are_read():
    assert _stacks.Stack.parse("liger+inductor") == _stacks.Stack("liger", ("inductor",))
    assert _stacks.Stack.parse("fused@11.6GiB") == _stacks.Stack("fused", (), "11.6GiB")
    assert _stacks.Stack.parse("inductor+auto-chunker+checkpointing").extras == ("auto-chunker", "checkpointing")
    for text in model.EVERY:
        _stacks.Stack.parse(text)


@pytest.mark.parametrize(
    "text", ["", "fusd", "eager+inductor", "liger+liger", "eager@20GiB", "fused+", "fused@", "fused@x"]
)
def test_an_unknown_stack_is_one_clear_error(text, capsys):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        _stacks.Stack.parse(text)
    with pytest.raises(SystemExit):
        model.parse(["--stacks", f"eager,{text}"])
    assert repr(text) in capsys.readouterr().err


def test_a_peer_that_is_missing_is_a_row_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(_stacks.importlib.util, "find_spec", lambda name: None)
    _records.print_row(lambda: _stacks.import_first(_stacks.Stack("liger"), "cpu") or {})
    assert json.loads(capsys.readouterr().out.removeprefix("ROW ")) == {"skipped": "liger_kernel is not installed"}


def test_the_commands_for_a_gpu_can_be_run():
    for command in (c for part in on_gpu.PARTS.values() for c in part if c.script):
        assert (ROOT / "bench" / command.script).is_file()
        words = command.arguments.split()
        if "--stacks" in words:
            parse = compile_time.parse if command.script == "compile_time.py" else model.parse
            assert parse(words).mode == TRAINED[words[1]][0] or words[1] == "llama3-8b"
    missing = [f for f in on_gpu.test_command() if f.endswith(".py") and not (ROOT / "tests" / f).is_file()]
    assert not missing


# --- Kernels ---------------------------------------------------------------------------------------------------------


def test_every_kernel_of_ours_is_known_as_ours():
    found = 0
    for path in (ROOT / "kernels").glob("*.py"):
        names = re.findall(r"^\s*@triton\.jit.*\n(?:\s*@.*\n)*\s*def (\w+)", path.read_text(), re.MULTILINE)
        kind = f"fused: {path.stem.lstrip('_')}"
        assert [_kernel_names.classify(name) for name in names] == [kind] * len(names)
        assert [_kernel_names.classify(f"{name}_0") for name in names] == [kind] * len(names)
        found += len(names)
    assert found > 20


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel>>", "GEMM"),
        ("triton_tem_fused_mm_3", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("triton_poi_fused__to_copy_mul_silu_4", "Inductor"),
        ("triton_red_fused__log_softmax_0", "Inductor"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "bitsandbytes"),
        ("Memcpy DtoH (Device -> Pinned)", "copies, casts"),
        ("Memset (Device)", "copies, casts"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies, casts"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>>", "the rest"),
    ],
)
def test_kernels_of_others_are_told_apart(name, kind):
    assert _kernel_names.classify(name) == kind


def test_every_moment_of_a_step_counts_once():
    spans = [("GEMM", 0.0, 10.0), ("copies, casts", 2.0, 14.0), ("Inductor", 9.0, 12.0), ("GEMM", 20.0, 21.0)]
    times, idle = breakdown.exclusive(spans)
    assert times == {"GEMM": 10.0, "Inductor": 3.0, "copies, casts": 2.0} and idle == 6.0


# --- Rows ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def out(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path


def test_rows_are_kept_as_they_come_and_none_is_lost(out):
    key = ("stack",)
    rows = _records.Rows("some", key)
    rows.add({"stack": "eager", "ms": 1.0, "commit": "a"})
    rows.add({"stack": "eager", "stopped": "after 3 s", "commit": "a-dirty"})
    rows.add({"stack": "fused", "stopped": "after 3 s", "commit": "a"})
    kept = _records.Rows("some", key)
    assert [r.get("ms") for r in kept.rows] == [1.0, None]
    assert kept.measured({"stack": "eager", "commit": "a"}) and not kept.measured({"stack": "eager", "commit": "b"})
    assert not kept.measured({"stack": "fused", "commit": "a"})
    kept.add({"stack": "eager", "stopped": "after 3 s", "commit": "b"})
    assert "ms" in kept.rows[0]
    kept.add({"stack": "eager", "failed": "out of memory", "commit": "b"})
    assert [r["stack"] for r in kept.rows] == ["fused", "eager"] and "failed" in kept.rows[1]


@pytest.mark.parametrize("fit", range(0, 200, 7))
def test_the_longest_context_is_found(fit):
    low, high = context.longest(lambda n: n <= fit, grain=8, start=32) or (-1, -1)
    assert low <= fit < high == low + 8 and low % 8 == 0


def test_a_search_without_an_answer_gives_none():
    assert context.longest(lambda n: None if n == 48 else n < 40, grain=8, start=32) is None
    assert context.longest(lambda n: None, grain=8, start=32) is None


def test_the_tables_of_what_was_measured_later(out, monkeypatch):
    monkeypatch.setattr(table, "RESULTS", out)
    step = {"model": "m", "mode": "full", "stack": "fused", "ms": 2.0, "floor": {"ms": 1.5}}
    spans = [("nvjet_1", 0.0, 3000.0), ("rms_norm_fwd_kernel", 3500.0, 4000.0)]
    _records.Rows("breakdown", ("stack",)).add(step | breakdown.summary(spans, 2))
    assert "| m full, fused | 1.5 | 0.0 | 0.2 | 0.0 | 0.0 | 0.0 | 0.0 | 0.2 | 2.0 | 1.5 |" in table.breakdowns()
    rows = _records.Rows("context", ("budget", "seq"))
    common = {"model": "m", "mode": "qlora", "budget": "24GiB"}
    rows.add(common | {"seq": 64, "fits": True, "ms": 2000.0, "tokens_per_s": 32.0, "peak_GiB": 20.0})
    rows.add(common | {"seq": 96, "fits": False, "failed": "too long"})
    assert "| m qlora | 24GiB | 64 fit, 96 do not | | | | | | |" in table.contexts()
    rows = _records.Rows("compile_time", ("stack", "layers", "caches"))
    for stack, layers, caches, seconds in (("fused", 16, "cold", 30.2), ("fused", 32, "cold", 51.0)):
        rows.add({"model": "m", "mode": "qlora", "stack": stack, "layers": layers, "caches": caches, "ms": 1.0}
                 | {"compile_s": seconds})  # fmt: skip
    assert "| m qlora, fused, cold | 30 | 51 |" in table.compile_times()
    rows = _records.Rows("trainer", ("stack", "trained_by"))
    for stack, by, ms in (("fused", "loop", 100.0), ("fused", "trainer", 102.0), ("eager", "trainer", 204.0)):
        rows.add({"model": "m", "mode": "full", "stack": stack, "trained_by": by, "ms": ms})
    assert "| m full, fused | 100 | 102 | 1.02 | 0.50 |" in table.trainers()
