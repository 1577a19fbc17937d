"""What a kernel of a profile is, by its name: one of ours, a product, attention, and so on.

The names of our kernels are read off kernels/*.py, so that a new one is classified without an edit here.
"""

from __future__ import annotations

import ast
import functools
import re

import _harness as harness

# The first that matches. Attention stands before the products, because its kernels are built of cutlass too. Operators
# of a CPU's profile (aten::mm) are here as well, for dry runs.
RULES = (
    ("copies, casts", r"^memcpy|^memset|direct_copy_kernel|batchedcopy|^aten::(copy_|cat|zero_|fill_)$"),
    ("attention", r"flash|fmha|sdpa|cudnn|attention"),
    ("bitsandbytes", r"quantize|4bit|bitsandbytes"),
    ("optimizer", r"adam|multi_tensor_apply"),
    ("GEMM", r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|^triton_tem|^aten::_?(add|b|badd|grouped_|scaled_)?mm_?$"),
    ("Inductor", r"^triton_"),
)
REST = "the rest"


@functools.cache
def ours() -> dict[str, str]:
    """{kernel: the file of kernels/ it is in, without a leading underscore}, of all that Triton compiles."""
    found = {}
    for path in sorted((harness.ROOT / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(_is_jit(d) for d in node.decorator_list):
                found[node.name] = path.stem.lstrip("_")
    return found


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("triton.jit", "jit")


def classify(name: str) -> str:
    """`fused: rms_norm` and the like for our kernels, else one of RULES, else `the rest`."""
    own = ours().get(re.sub(r"_\d+$", "", name)) or ours().get(name)
    # On a CPU an operator of ours runs as what it is made of; its own time has the operator's name.
    operator = re.match(r"fused_backend::(\w+?)(_backward)?$", name)
    if own or operator:
        return f"fused: {own or operator[1]}"  # type: ignore[index]
    return next((kind for kind, pattern in RULES if re.search(pattern, name.lower())), REST)
