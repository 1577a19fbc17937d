"""The project's own files, for the tests of layout and packaging."""

from __future__ import annotations

import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In the order in which they may import: each only from itself and from those before it.
SHIPPED = ("derivations", "kernels", "patterns", "compiler")
_GENERATED = {"build", "dist", "demo_out", "__pycache__"}


def project_files() -> list[pathlib.PurePath]:
    """Paths relative to the root of every file that is, or would be, committed; generated ones left out."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [pathlib.PurePath(name) for name in found.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # no git, or an unpacked sdist
        paths = list(_walk())
    return sorted(path for path in paths if (ROOT / path).is_file())


def _walk():
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            n for n in subfolders if n not in _GENERATED and not n.startswith(".") and not n.endswith(".egg-info")
        ]
        for name in names:
            yield pathlib.PurePath(folder).relative_to(ROOT) / name


def python_files(*folders: str) -> list[pathlib.PurePath]:
    """The Python files of these top-level folders."""
    return [path for path in project_files() if path.suffix == ".py" and path.parts[0] in folders]
