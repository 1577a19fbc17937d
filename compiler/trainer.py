"""`TrainingArguments(torch_compile_backend="fused")`: the name accepted by accelerate, which has a list of its own.

accelerate looks a backend up in the enumeration `DynamoBackend` before torch is asked for it. Importing this package
adds the name there; where accelerate is imported later, at that moment. accelerate itself is never imported for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

log = logging.getLogger("fused_backend")

_MODULE, _NAME = "accelerate.utils.dataclasses", "FUSED"


def name_backend_in_accelerate() -> None:
    """Now if accelerate is imported, else once it is."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _extend(module)
    elif not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())


def _extend(module: ModuleType) -> None:
    """Give the enumeration one more member, as its class statement would have made it."""
    try:
        names: Any = module.DynamoBackend
        if _NAME in names.__members__:
            return
        member = str.__new__(names, _NAME)
        member._name_ = member._value_ = _NAME
        type.__setattr__(names, _NAME, member)
        names._member_map_[_NAME] = names._value2member_map_[_NAME] = member
        names._member_names_.append(_NAME)
    except (AttributeError, TypeError) as error:  # another accelerate: it says itself what it accepts
        log.debug("accelerate was not told of the backend: %s", error)


class _OnImport(importlib.abc.MetaPathFinder):
    """Waits for one module; finds it as everybody else does, and extends it when it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _extend(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
