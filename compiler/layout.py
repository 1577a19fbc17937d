"""Memory layout: would a later view fail on what an operator returns?

Our operators return contiguous results where eager may keep the strides of its inputs. Values do not depend on
strides, but `.view()` does; so where they differ, the shapes downstream are computed again until they agree.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves


def same_strides(a: Any, b: Any) -> bool:
    """Do two fake results lie alike in memory? Sizes of one do not count, and nothing is guarded."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(_strides(x) == _strides(y) for x, y in pairs if isinstance(x, torch.Tensor))


def _strides(fake: torch.Tensor) -> list[str]:
    return [str(stride) for size, stride in zip(fake.shape, fake.stride(), strict=True) if str(size) != "1"]


def a_view_would_fail(changed: dict[Node, Any]) -> bool:
    """`changed` are nodes with the fake result they would have; their readers are run on it, and theirs in turn."""
    changed = dict(changed)
    mode = next(fake.fake_mode for fake in changed.values() if isinstance(fake, FakeTensor))
    todo = [user for node in changed for user in node.users]
    heapq.heapify(todo)
    done: set[Node] = set()
    while todo:
        node = heapq.heappop(todo)
        if node.op == "output":
            return True  # whoever gets the result may view it as they could eager's
        if node in done or node in changed:
            continue
        done.add(node)
        old = node.meta.get("example_value")
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: changed.get(n, n.meta.get("example_value")))  # type: ignore[misc]
        try:
            with mode, torch.no_grad():
                target = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
                new = target(*(args[1:] if isinstance(node.target, str) else args), **kwargs)  # type: ignore[operator]
            agrees = same_strides(new, old)
        except Exception:  # a view that fails, or an op that fakes cannot run: either way nothing is known to hold
            return True
        if not agrees:
            changed[node] = new
            for user in node.users:
                heapq.heappush(todo, user)
    return False
