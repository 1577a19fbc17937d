"""Where tests run: natively on a GPU, through Triton's interpreter without one.

The repository root is kept off `sys.path`: its `kernels/` folder would shadow Hugging Face's `kernels`
package, which transformers imports.
"""

import gc
import os
import pathlib
import sys

ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != ROOT]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Before any kernel file is imported: triton.jit reads it when decorating.
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402


def _round_as_a_gpu_does() -> None:
    """Two things Triton's interpreter (3.6 to 3.9) does less accurately than any GPU.

    It truncates float32 to bfloat16 where a GPU rounds to nearest even (its way back is exact, but slow enough to be
    replaced as well), and it sums over rows one after the other where a GPU adds up a tree.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.float32, tl.bfloat16):
            data = torch.from_numpy(src.data.copy()).to(torch.bfloat16).view(torch.uint16)
        elif pair == (tl.bfloat16, tl.float32):
            data = torch.from_numpy(src.data.copy()).view(torch.bfloat16).to(torch.float32)
        else:
            return cast(self, src, dst_type)
        return interpreter.TensorHandle(data.numpy(), dst_type.scalar)

    def sum_as_a_tree(self, input):
        data = input.handle.data
        if self.axis is not None:
            data = data.swapaxes(self.axis, -1)
            while data.shape[-1] > 1:  # sizes are powers of two
                data = data[..., ::2] + data[..., 1::2]
            data = data.swapaxes(self.axis, -1) if self.keep_dims else data.swapaxes(self.axis, -1).squeeze(self.axis)
        else:
            data = data.sum(keepdims=self.keep_dims)
        return self.to_tensor(data, input.dtype)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter.ReduceOps.sum = sum_as_a_tree


def _patch_the_language_once() -> None:
    """The interpreter looks through all of triton.language for what to replace whenever a kernel calls a function of
    its own: a quarter of its time, for what the kernel's launch has replaced already."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang

    def patch_lang(fn):
        languages = {id(m): m for m in fn.__globals__.values() if m is tl or m is tl.core}.values()
        # Set last of a language's own, and back when the launch ends.
        return None if languages and all(m.static_print is print for m in languages) else patch(fn)

    interpreter._patch_lang = patch_lang


if not HAS_GPU:
    _round_as_a_gpu_does()
    _patch_the_language_once()


def pytest_collection_modifyitems(items):
    # What the imports made lives on: no collection needs to look through it again, and few of what compilers make.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    if not HAS_GPU:
        skip = pytest.mark.skip(reason="needs a CUDA device: run `python bench/on_gpu.py` there")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


class _Torch:
    """torch's generator as hypothesis seeds it: an example has the same tensors whenever it is run."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.random.get_rng_state)
    setstate = staticmethod(torch.random.set_rng_state)


GENERATOR = _Torch()  # hypothesis keeps a weak reference
hypothesis.register_random(GENERATOR)  # type: ignore[arg-type]
# The same examples everywhere. Others: pytest --hypothesis-profile=default.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device kernels run on: the GPU, or the CPU with the interpreter."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def watch(monkeypatch):
    """Every graph that is partitioned during the test."""
    from _alive import Watch

    return Watch(monkeypatch)
