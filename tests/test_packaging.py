"""Wheel, sdist and editable install hold the whole package, and each registers the backend by itself."""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile

import pytest
from _tree import ROOT, SHIPPED, project_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Run by an interpreter that reads no .pth file, so that no install of this environment is in sight.
CHECK = """
    import os, site, sys
    target, root, *packages = sys.argv[1:]
    sys.path += packages
    sys.path.insert(0, target)
    site.addsitedir(target)  # reads the .pth file of an editable install
    import torch

    assert not any(name.startswith("fused_backend") for name in sys.modules)
    assert "fused" in torch._dynamo.list_backends(), torch._dynamo.list_backends()

    def f(x, gate):
        return torch.nn.functional.silu(gate) * x

    x, gate = torch.randn(2, 3, 64, requires_grad=True), torch.randn(2, 3, 64)
    compiled = torch.compile(f, backend="fused", options={"lowering": "aot_eager"})
    compiled(x, gate).sum().backward()
    torch.testing.assert_close(compiled(x, gate), f(x, gate))
    torch.testing.assert_close(x.grad, torch.nn.functional.silu(gate))

    import fused_backend.compiler, fused_backend.patterns
    from fused_backend.compiler.fusions import fusion_names

    assert all(os.path.realpath(p) != root for p in sys.path), sys.path
    print(os.path.dirname(fused_backend.compiler.__file__))
    print(*fusion_names())
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> pathlib.Path:
    """The project's files alone: what a fresh clone holds."""
    root = tmp_path_factory.mktemp("copy").resolve()
    for path in project_files():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, root / path)
    return root


@pytest.fixture(scope="module")
def dist(copy, tmp_path_factory) -> pathlib.Path:
    """An sdist, and a wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", folder, copy, cwd=folder)
    return folder


def python(*args, cwd: pathlib.Path) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def check_install(target: pathlib.Path, root: pathlib.Path) -> tuple[pathlib.Path, set[str]]:
    """Use the package installed in `target`; where its compiler lies, and the fusions that it finds."""
    packages = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    out = python("-I", "-S", "-c", textwrap.dedent(CHECK), target, root, *packages, cwd=target)
    folder, names = out.splitlines()[-2:]
    return pathlib.Path(folder), set(names.split())


def pip_install(wheel: pathlib.Path, target: pathlib.Path) -> None:
    python("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target.parent)


def shipped_files() -> set[str]:
    return {p.as_posix() for p in project_files() if p.parts[0] in SHIPPED}


def fusions() -> set[str]:
    return {p.stem for p in project_files() if p.parts[0] == "patterns" and p.suffix == ".py" and p.stem[0] != "_"}


@pytest.mark.slow
def test_wheel_holds_the_four_folders_and_nothing_else(dist):
    [wheel] = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if ".dist-info/" not in n} == {f"fused_backend/{n}" for n in shipped_files()}
    assert {f"fused_backend/{folder}/py.typed" for folder in SHIPPED} <= set(names)
    assert [n for n in names if n.endswith(".dist-info/licenses/LICENSE")]


@pytest.mark.slow
def test_sdist_holds_what_a_build_needs(dist):
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped_files() | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.slow
def test_installed_wheel_registers_the_backend(dist, copy, tmp_path):
    [wheel] = dist.glob("*.whl")
    target = tmp_path / "installed"
    pip_install(wheel, target)
    folder, names = check_install(target, copy)
    assert folder == target.resolve() / "fused_backend" / "compiler"
    assert names == fusions()


@pytest.mark.slow
def test_editable_install_registers_the_backend(copy, tmp_path):
    """By the hook that `pip install -e` calls: folders are used in place, the root stays off sys.path."""
    build = "import setuptools.build_meta as b, sys; b.build_editable(sys.argv[1])"
    python("-c", build, tmp_path, cwd=copy)
    [wheel] = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    pip_install(wheel, target)
    folder, names = check_install(target, copy)
    assert folder == copy / "compiler"
    assert names == fusions()


def test_license_is_apache():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n" in text and "END OF TERMS AND CONDITIONS" in text


def test_constraints_pin_every_requirement_to_a_version_it_allows():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in pinned}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for requirement in map(Requirement, required):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_ci_runs_what_a_developer_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").rstrip().endswith("make test")
