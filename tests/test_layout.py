"""The house rules: one row of files for each fusion, imports in one direction, small files."""

from __future__ import annotations

import ast
import pathlib
import re
import runpy
import sys
from collections.abc import Iterator

import pytest
from _tree import ROOT, SHIPPED, project_files, python_files

CODE = (*SHIPPED, "tests", "bench")
MAX_FILE_LINES = 400
# Without signature and docstring: a page of documentation is no reason to split a function.
MAX_BODY_LINES = 60


def fusions(folder: str) -> set[str]:
    """A fusion is a file whose name has no leading underscore."""
    return {path.stem for path in python_files(folder) if not path.stem.startswith("_")}


FUSIONS = fusions("derivations") | fusions("kernels") | fusions("patterns")


def parse(path: pathlib.PurePath) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def own_imports(path: pathlib.PurePath) -> Iterator[tuple[str, str, int]]:
    """(folder, module, line) of every import of the package's own code; no module where it is a whole folder.

    `from ..kernels import rope as r`, `from ..kernels.rope import rope`, `import fused_backend.kernels.rope`:
    each gives ("kernels", "rope").
    """
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            base = ["fused_backend", path.parts[0]][: 3 - node.level] if node.level else []
            prefix = base + (node.module.split(".") if node.module else [])
            dotted = [[*prefix, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            dotted = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for parts in dotted:
            if parts[0] == "fused_backend" and len(parts) > 1:
                module = parts[2] if len(parts) > 2 else ""
                is_file = (ROOT / parts[1] / f"{module}.py").is_file()
                yield parts[1], module if is_file else "", node.lineno


def absolute_imports(path: pathlib.PurePath) -> Iterator[str]:
    """First part of the name of every module imported by its absolute name."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def test_every_fusion_is_one_row_of_files():
    rows = {
        "derivations/": fusions("derivations"),
        "kernels/": fusions("kernels"),
        "patterns/": fusions("patterns"),
        "tests/test_": {p.stem.removeprefix("test_") for p in python_files("tests")},
        "bench/": {p.stem for p in python_files("bench")},
    }
    missing = [f"{place}{name}.py" for place, names in rows.items() for name in sorted(FUSIONS - names)]
    assert FUSIONS and not missing


def test_imports_point_one_way():
    wrong = []
    for path in python_files(*SHIPPED):
        allowed = SHIPPED[: SHIPPED.index(path.parts[0]) + 1]
        wrong += [f"{path}:{line} imports {folder}" for folder, _, line in own_imports(path) if folder not in allowed]
    assert not wrong


def test_no_fusion_is_imported_by_anything_but_its_own_row():
    """What two fusions share lives in a `_name.py`; the compiler finds fusions by listing the folder.

    A row whose kernels take several files keeps them in `_name.py` too, which may then use the row's formulas.
    """
    wrong = []
    for path in python_files(*SHIPPED):
        for folder, module, line in own_imports(path):
            helper = path.parts[0] == "kernels" and path.stem.startswith("_") and folder == "derivations"
            if folder != "compiler" and module in FUSIONS and module != path.stem and not helper:
                wrong.append(f"{path}:{line} imports {folder}/{module}.py")
    assert not wrong


def test_shipped_code_imports_itself_relatively():
    """Type checkers then follow it on disk, and the import name is written in pyproject.toml alone."""
    own = [(path, name) for path in python_files(*SHIPPED) for name in absolute_imports(path)]
    assert not [f"{path} imports {name}" for path, name in own if name == "fused_backend"]


def test_derivations_need_only_sympy():
    allowed = {"sympy", *sys.stdlib_module_names}
    needed = [(path, name) for path in python_files("derivations") for name in absolute_imports(path)]
    assert not [f"{path} imports {name}" for path, name in needed if name not in allowed]


def test_folders_are_flat():
    nested = [str(p) for p in project_files() if p.parts[0] in CODE and len(p.parts) > 2]
    assert not [p for p in nested if not p.startswith("bench/results/")]


def test_no_file_is_a_drawer():
    assert not [
        str(p) for p in python_files(*CODE) if p.stem.strip("_") in {"utils", "util", "helpers", "misc", "common"}
    ]


def test_tests_and_benchmarks_are_no_packages():
    assert not [str(p) for p in python_files("tests", "bench") if p.stem == "__init__"]


def test_files_are_short():
    lengths = {str(p): len((ROOT / p).read_text(encoding="utf-8").splitlines()) for p in python_files(*CODE)}
    assert not {path: n for path, n in lengths.items() if n > MAX_FILE_LINES}


def test_functions_are_short():
    long = {}
    for path in python_files(*CODE):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                if lines > MAX_BODY_LINES:
                    long[f"{path}:{node.lineno} {node.name}"] = lines
    assert not long


@pytest.mark.parametrize("kind", ["home folders", "folders of one machine"])
def test_no_path_of_one_machine(kind):
    names = {"home folders": "home|Users|root", "folders of one machine": "work|opt|mnt|scratch|workspace"}[kind]
    path_of_a_machine = re.compile(rf"(?<![\w.~/\\$}}*-])/(?:{names})/\w")
    found = []
    for path in project_files():
        try:
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{path}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if path_of_a_machine.search(line)]
    assert not found


def test_the_readme_and_the_matrix_hold_what_was_measured(monkeypatch):
    """`python bench/table.py --write` was run after the last measurement."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    made = runpy.run_path(str(ROOT / "bench" / "table.py"))
    assert made["table"]() in (ROOT / "README.md").read_text()
    assert made["families"]() + "\n" == (ROOT / "bench" / "results" / "families.md").read_text()
