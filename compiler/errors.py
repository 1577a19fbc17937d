"""The exceptions a user can meet, and the form of their messages: what rule, what came, the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RefusedError(RuntimeError):
    """A site was refused and `strict=True` asked for an error instead of a line in the report."""


class InternalError(RuntimeError):
    """The rewrite itself failed and `strict=True` asked to see it; otherwise the graph compiles unrewritten."""


def unknown(kind: str, got: str, valid: Iterable[str]) -> ValueError:
    """`unknown option 'memory': valid are ...; did you mean 'memory_budget'?`"""
    names = sorted(valid)
    close = difflib.get_close_matches(got, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"backend 'fused': unknown {kind} {got!r}. Valid: {', '.join(names)}{hint}")
