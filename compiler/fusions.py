"""Finds the fusions: every file of patterns/ without a leading underscore has one. Nothing is registered by hand."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from .. import patterns
from ..patterns._fusion import Fusion


@functools.cache
def all_fusions() -> tuple[Fusion, ...]:
    """Every FUSION, in the order in which they are applied."""
    names = [m.name for m in pkgutil.iter_modules(patterns.__path__) if not m.name.startswith("_")]
    found = [importlib.import_module(f"{patterns.__name__}.{name}").FUSION for name in names]
    return tuple(sorted(found, key=lambda fusion: (fusion.priority, fusion.name)))


def fusion_names() -> list[str]:
    return [fusion.name for fusion in all_fusions()]
