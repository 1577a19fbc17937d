"""`torch.compile(model, backend="fused")`: rewrite a graph, then hand it to AOTAutograd and Inductor."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from ..kernels._op import BYTES_MOVED
from .bodies import backup, rewrite_module
from .budget import BudgetError, Request
from .canonicalize import Mode
from .deferred import defer_outputs
from .errors import InternalError, RefusedError
from .fusions import all_fusions, fusion_names
from .options import Options
from .partition import Partitioner, partition
from .report import Decision, Report
from .tracing import ours

log = logging.getLogger("fused_backend")

Compiled = Callable[..., Any]


@ours
def fused(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """The backend. `mode` is passed on to Inductor; `options` are those of `Options`.

    Raises: ValueError for an unknown option or value. A model that plain torch.compile runs is never failed: if the
    rewrite breaks, that is logged once and the graph is compiled as Dynamo wrote it (unless strict=True).
    """
    parsed = Options.parse(options, fusion_names())
    request = Request.of(parsed, gm)
    restore = backup(gm)
    try:
        report, finish = rewrite(gm, parsed)
    except RefusedError:
        raise
    except Exception as error:
        restore()
        return _unrewritten(gm, example_inputs, parsed, mode, request, error)
    try:
        compiled = finish(lower(gm, example_inputs, parsed, mode, request))
    except (RestartAnalysis, BudgetError):  # the first is not a failure: Dynamo is asked to trace again
        raise
    except Exception as error:
        restore()
        return _unrewritten(gm, example_inputs, parsed, mode, request, error)
    log.info("fused %s", report.summary())
    return compiled


def rewrite(gm: GraphModule, options: Options) -> tuple[Report, Callable[[Compiled], Compiled]]:
    """Rewrite the graph in place. The function returned finishes its compiled form (it makes logits deferred)."""
    wanted = options.enabled(fusion_names())
    fusions = [fusion for fusion in all_fusions() if fusion.name in wanted]
    decisions: list[Decision] = []
    rewriter = rewrite_module(gm, fusions, Mode.ambient(), decisions, options.max_rewrites)
    refused = [d for d in decisions if d.status == "refused"]
    if options.strict and refused:
        first = refused[0]
        raise RefusedError(
            f"strict=True: {first.fusion} refused at {first.where or 'the graph'} ({first.source}): {first.reason}"
        )
    return Report(decisions, graph_count=1), defer_outputs(gm, rewriter)


def lower(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None, request: Request | None = None
) -> Compiled:
    """AOTAutograd, the partitioner, then Inductor or plain execution."""
    if options.lowering == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._inductor.decomposition import select_decomp_table

        # With Inductor's decompositions: without them some linear-attention models fail in the backward.
        split = functools.partial(partition, request=request)
        return aot_autograd(fw_compiler=boxed_nop, partition_fn=split, decompositions=select_decomp_table)(
            gm, example_inputs
        )
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    _register_fallbacks()
    patches: dict[str, Any] = dict(list_mode_options(mode)) if mode else {}
    patches["custom_partitioner_fn"] = Partitioner(request)
    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches)
    return compiled


@functools.cache
def _register_fallbacks() -> None:
    """Tell Inductor of our operators before it meets them.

    An operator that it does not know, torch 2.11 first describes in words, with all that its arguments are made of:
    deep in a model that takes minutes.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for op in BYTES_MOVED:
        if op not in lowerings:
            make_fallback(op, tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True)), warn=False)


def _unrewritten(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    mode: str | None,
    request: Request | None,
    error: Exception,
) -> Compiled:
    """The graph as Dynamo wrote it, after an internal error; a memory budget is kept all the same."""
    if options.strict:
        raise InternalError(f"strict=True: the rewrite failed: {error}") from error
    first = next((n for n in gm.graph.nodes if n.meta.get("stack_trace")), None)
    where = (first.meta["stack_trace"].strip().splitlines() or [""])[0].strip() if first is not None else "a graph"
    log.warning(
        "the rewrite of the graph at %s failed and the graph is compiled as it was; please report this",
        where,
        exc_info=error,
    )
    return lower(gm, example_inputs, options, mode, request)


def explain(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """What the backend does to `model` on these arguments: every site, fused or refused and why.

    With options={"memory_budget": ...} also `report.plan`: what is kept, what is made again, the predicted peak and
    time of the last graph that trains. Raises: BudgetError where no plan fits.
    Runs the model's forward once, rewritten but not compiled; parameters, gradients, buffers, the random state and
    what is compiled already are left as they were. A model that `model.compile()` was called on is looked through.
    """
    report, parsed = Report(), Options.parse(options, fusion_names())

    def collect(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        request = Request.of(parsed, gm)
        found, finish = rewrite(gm, parsed)
        report.decisions += found.decisions
        report.graph_count += 1
        if request is None:
            return finish(gm.forward)
        compiled = finish(lower(gm, example_inputs, replace(parsed, lowering="aot_eager"), None, request))
        report.plan = request.made[-1] if request.made else report.plan
        return compiled

    before = sum(counters["graph_break"].values())
    run_untouched(model, collect, args, kwargs)
    # Dynamo counts a break once for every frame it passes through; what it cuts is the graph.
    broken = sum(counters["graph_break"].values()) > before
    report.graph_breaks = max(1, report.graph_count - 1) if broken else 0
    return report


_runs = itertools.count()


def run_untouched(model: Callable[..., Any], backend: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One compiled forward after which parameters, buffers, the random state and what is compiled are as before."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Dynamo keeps what it compiles with the code object, up to a limit, and by the code's name what differed between
    # calls: a code object and a name of our own, for each model.
    run.__code__ = run.__code__.replace(co_name=f"run_{next(_runs)}")
    own = model if isinstance(model, torch.nn.Module) else None
    compiled_in_place = getattr(own, "_compiled_call_impl", None)
    buffers = [(b, b.detach().clone()) for b in own.buffers()] if own is not None else []
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        if own is not None:
            own._compiled_call_impl = None
        with torch.random.fork_rng(devices=devices):
            torch.compile(run, backend=ours(backend))(*args, **kwargs)
    finally:
        if own is not None:
            own._compiled_call_impl = compiled_in_place
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
