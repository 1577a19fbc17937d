"""The compiler: from a Dynamo graph to a compiled one with our operators in it.

Reading order: backend.py (the pipeline, start to end), canonicalize.py, spelling.py, spelling_masks.py,
spelling_norms.py, spelling_activations.py and spelling_losses.py (one spelling per op), match.py (an idiom against a
graph), rewrite.py (sites, checks, replacement), bodies.py (what higher-order ops run), layout.py (views that other
strides would break), deferred.py (logits that compute themselves when read), partition.py (what is saved), then for
memory budgets budget.py (what is asked and told), joint.py (a joint graph cut into layers, and planned), memory.py
(bytes at every position), cost.py (seconds of a node), front.py and planner.py (the integer programs, of a layer and
of the whole), rematerialize.py (the plan written into the graph), frontier.py (plans at many budgets, drawn);
report.py (what was decided), options.py, sizes.py, fusions.py, errors.py, tracing.py (what Dynamo need not trace),
trainer.py (the backend's name in accelerate).
"""

from .backend import explain, fused
from .budget import BudgetError, MemoryPlan
from .errors import InternalError, RefusedError
from .frontier import Point, frontier
from .options import Options
from .report import Decision, Report
from .tracing import trace_less
from .trainer import name_backend_in_accelerate

name_backend_in_accelerate()
trace_less()

__all__ = [
    "BudgetError",
    "Decision",
    "InternalError",
    "MemoryPlan",
    "Options",
    "Point",
    "RefusedError",
    "Report",
    "explain",
    "frontier",
    "fused",
]
