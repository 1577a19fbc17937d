"""Bytes at every position, against peaks that are worked out by hand in the test."""

import operator

import pytest
import torch
from fused_backend.compiler.cost import ceilings, workspace
from fused_backend.compiler.front import Value
from fused_backend.compiler.memory import Operation, Storages, Work, is_view, work_of
from fused_backend.compiler.partition import backward_nodes
from fused_backend.kernels._op import WORKSPACE
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

ATEN = torch.ops.aten
CEILINGS = ceilings(torch.device("cpu"))
KEEP, AGAIN, DROP = "keep", "recompute", "drop"


class Made:
    """A joint graph written by hand. Sizes are counted in float32, so n elements are 4·n bytes."""

    def __init__(self):
        self.graph, self.mode = Graph(), FakeTensorMode()

    def given(self, name, *shape):
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, op, *args, name=None):
        name = name or getattr(op, "_opname", op.__name__)
        node = self.graph.call_function(op, args, name=name)
        with self.mode:
            node.meta["val"] = op(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def work(self, outputs, gradients):
        self.graph.output((*outputs, *gradients))
        self.backward = backward_nodes(self.graph)
        self.storages = Storages(self.graph, self.backward, len(outputs))
        self.part, self.values = work_of(
            [n for n in self.graph.nodes if n.op == "call_function"], self.storages, CEILINGS
        )
        return self.part

    def peaks(self, whole=False, **choices):
        """Of `Work.peaks` with the values named here kept or made again, the free ones kept, the others dropped."""
        free = [v.choice == "free" for v in self.part.values]
        assert set(choices) <= {v.name for v in self.values}
        picked = [KEEP if f else choices.get(v.name, DROP) for v, f in zip(self.values, free, strict=True)]
        return self.part.peaks(picked, keep_freed=whole)


def chain():
    """x -> a -> b -> c -> loss, each of 100 elements; the backward reads c, b, a in this order, then x."""
    made = Made()
    x, tangent = made.given("primals_1", 100), made.given("tangents_1")
    a = made.call(ATEN.sin.default, x)
    b = made.call(ATEN.cos.default, a)
    c = made.call(ATEN.exp.default, b)
    loss = made.call(ATEN.sum.default, c)
    g = made.call(ATEN.mul.Tensor, c, tangent)
    for at in (b, a, x):
        g = made.call(ATEN.mul.Tensor, g, at)
    made.work([loss], [g])
    return made


# --- Storages --------------------------------------------------------------------------------------------------------


def test_a_view_is_what_it_views():
    made = Made()
    x, tangent = made.given("primals_1", 4, 6), made.given("tangents_1", 6, 4)
    y = made.call(ATEN.sin.default, x)
    t = made.call(ATEN.t.default, y)
    v = made.call(ATEN.view.default, made.call(ATEN.clone.default, made.call(ATEN.view.default, y, [24])), [24])
    e = made.call(ATEN.expand.default, made.call(ATEN.unsqueeze.default, v, 0), [5, 24])
    work = made.work([t], [made.call(ATEN.mul.Tensor, made.call(ATEN.sum.dim_IntList, e, [0]), made.call(
        ATEN.view.default, tangent, [24]))])  # fmt: skip
    roots = made.storages.roots
    assert roots[t] is y and roots[e] is roots[v] and roots[v].target is ATEN.clone.default and is_view(t)
    assert [n.name for n in made.values] == ["primals_1", "sin", "clone", "sum_1"]
    assert [v.nbytes for v in work.values] == [96] * 4
    # sum_1 has expand's storage as its input, and only that.
    assert [v.inputs for v in work.values] == [(), (0,), (1,), (2,)]


def split():
    """One call with three outputs of 40 elements, of which two are read."""
    made = Made()
    x, tangent = made.given("primals_1", 120), made.given("tangents_1", 40)
    parts = made.call(ATEN.split_copy.Tensor, x, 40)
    first, third = (made.call(operator.getitem, parts, i) for i in (0, 2))
    y = made.call(ATEN.sin.default, first)
    made.work([y], [made.call(ATEN.mul.Tensor, made.call(ATEN.mul.Tensor, tangent, first), third)])
    return made


def test_outputs_of_one_call_are_values_made_together():
    made = split()
    assert [n.name for n in made.values] == ["primals_1", "getitem", "getitem_1", "sin"]
    first, third = made.part.values[1:3]
    assert first.node == third.node and first.nbytes == third.nbytes == 160 and first.needed and third.needed
    assert made.part.forward[0].makes == (1, 2)
    # One call makes both again: 160·2 for them, one gradient that the first product reads, one that it makes.
    forward, backward = made.peaks(getitem=AGAIN, getitem_1=AGAIN)
    assert backward == 160 * 4
    # first and third, then first and sin with third gone.
    assert forward == 160 * 2


def test_what_only_the_backward_needs_is_made_there_once():
    made = Made()
    x, tangent = made.given("primals_1", 50), made.given("tangents_1", 50)
    y = made.call(ATEN.sin.default, x)
    late = made.call(ATEN.cos.default, x)  # as autograd's formula of sin writes it
    made.work([y], [made.call(ATEN.mul.Tensor, tangent, late)])
    assert made.storages.is_late(late) and not made.storages.is_late(y)
    value = made.part.values[made.values.index(late)]
    assert value.choice == AGAIN and value.seconds == 0 and value.needed
    # The forward makes y alone; the backward holds late, the tangent and the product.
    assert made.peaks(cos=AGAIN) == (200, 600)


# --- Peaks -----------------------------------------------------------------------------------------------------------


def test_everything_kept():
    made = chain()
    # Forward: a, b, c stay, and the loss of 4 bytes. Backward: a gradient read and one made at a time. First c is read
    # with the tangent's 4 bytes; kept values count only in the whole graph, where c and then b are freed once read.
    assert made.peaks(sin=KEEP, cos=KEEP, exp=KEEP) == (1204, 800)
    assert made.peaks(True, sin=KEEP, cos=KEEP, exp=KEEP) == (1204, 1200 + 4 + 400)


def test_kept_values_go_after_their_last_use():
    made = chain()
    kept = {"sin": KEEP, "cos": KEEP, "exp": KEEP}
    # Were c (and the tangent) not freed after the first product, the second would hold a, b, c and two gradients.
    assert made.peaks(True, **kept)[1] == 1604 < 3 * 400 + 2 * 400


def test_a_chain_made_again():
    made = chain()
    # Forward: two of the chain at a time.
    # Backward: a, b, c are made first, since c is read first; then as if all had been kept.
    assert made.peaks(sin=AGAIN, cos=AGAIN, exp=AGAIN) == (800, 1604)
    assert made.peaks(True, sin=AGAIN, cos=AGAIN, exp=AGAIN) == (800, 1604)
    # c and b from a that is kept: what is kept is counted once, in the whole graph only.
    assert made.peaks(sin=KEEP, cos=AGAIN, exp=AGAIN) == (1200, 1204)
    assert made.peaks(True, sin=KEEP, cos=AGAIN, exp=AGAIN) == (1200, 1604)


def test_a_value_is_made_right_before_it_is_needed():
    made = chain()
    # b and c kept; a is made after c is gone. At b's product: a, b and two gradients? No: a is made after it, with the
    # gradient that is left; then two gradients and a. So the first product decides: b, c, the tangent, its result. In
    # the forward a is gone before the loss is made beside b and c.
    assert made.peaks(True, sin=AGAIN, cos=KEEP, exp=KEEP) == (804, 1204)
    # a kept, b made from it after c is gone: a and c, tangent, result; then a, b, two gradients.
    assert made.peaks(True, sin=KEEP, cos=AGAIN, exp=KEEP) == (1200, 1600)


def test_outputs_stay():
    made = Made()
    x, tangent = made.given("primals_1", 10), made.given("tangents_1", 10)
    y = made.call(ATEN.sin.default, x)
    z = made.call(ATEN.cos.default, y)
    g = made.call(ATEN.mul.Tensor, tangent, x)  # returned, so that it stays
    h = made.call(ATEN.mul.Tensor, tangent, g)
    h = made.call(ATEN.mul.Tensor, h, h)
    made.work([y, z], [g, h])
    # y is returned and stays beside z. Backward: tangent, g, h, but the tangent goes before h·h is made.
    assert made.peaks() == (80, 120)
    assert len(made.part.results) == 2
    y_alone = chain()
    assert y_alone.peaks()[0] == 800


def test_workspace_is_counted_and_goes_again(monkeypatch):
    made = chain()
    plain = made.peaks(sin=KEEP, cos=KEEP, exp=KEEP)
    monkeypatch.setitem(WORKSPACE, ATEN.sin.default, lambda x: 10_000 + x.numel())
    node = next(n for n in made.graph.nodes if n.target is ATEN.sin.default)
    assert workspace(node) == 10_100
    again = chain()
    # While sin runs there is nothing but its result.
    assert again.peaks(sin=KEEP, cos=KEEP, exp=KEEP) == (10_500, plain[1])
    # Made again, in the backward as well, beside the tangent.
    assert again.peaks(sin=AGAIN, cos=AGAIN, exp=AGAIN) == (10_500, 10_504)


def test_parameters_and_inputs_count_nowhere():
    made = Made()
    x, w, tangent = made.given("primals_1", 8, 8), made.given("primals_2", 8, 8), made.given("tangents_1", 8, 8)
    y = made.call(ATEN.mm.default, x, w)
    made.work([y], [made.call(ATEN.mm.default, tangent, w), made.call(ATEN.mm.default, x, tangent)])
    # Of x, w and y none but y, and in the backward the tangent and both gradients.
    assert {n.name: v.choice for n, v in zip(made.values, made.part.values, strict=True)} == {
        "primals_1": "free", "primals_2": "free", "mm": "any",
    }  # fmt: skip
    assert made.peaks() == made.peaks(True) == (256, 3 * 256)


# --- What may be made again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, choice", [(ATEN.rand_like.default, KEEP), (ATEN.sin.default, "any")])
def test_random_numbers_are_kept(op, choice):
    made = Made()
    x, tangent = made.given("primals_1", 5), made.given("tangents_1", 5)
    y = made.call(op, x)
    made.work([y], [made.call(ATEN.mul.Tensor, y, tangent)])
    assert made.part.values[made.values.index(y)].choice == choice


@pytest.mark.parametrize(
    "policy, choice", [(CheckpointPolicy.MUST_SAVE, KEEP), (CheckpointPolicy.MUST_RECOMPUTE, AGAIN), (None, "any")]
)
def test_policies(policy, choice):
    made = Made()
    x, tangent = made.given("primals_1", 5), made.given("tangents_1", 5)
    y = made.call(ATEN.sin.default, x)
    z = made.call(ATEN.cos.default, y)
    if policy is not None:
        y.meta["recompute"] = policy
    made.work([z], [made.call(ATEN.mul.Tensor, y, tangent)])
    assert made.part.values[made.values.index(y)].choice == choice


# --- Parts -----------------------------------------------------------------------------------------------------------


def test_equal_layers_are_equal_work():
    made = Made()
    x, tangent = made.given("primals_1", 30), made.given("tangents_1", 30)
    layers, values = [], [x]
    for _ in range(3):
        values.append(made.call(ATEN.sin.default, values[-1]))
    g = tangent
    for i in (2, 1, 0):
        layers.insert(0, [values[i + 1], g := made.call(ATEN.mul.Tensor, g, values[i + 1])])
    made.work([values[-1]], [g])
    works = [work_of(nodes, made.storages, CEILINGS)[0] for nodes in layers]
    assert works[1] == work_of(layers[1], made.storages, CEILINGS)[0]
    assert [v.choice for v in works[1].values] == [KEEP, "any"] and works[0].values[0].choice == "free"
    # Of its own value and of a gradient that comes in and one that goes out; what it keeps is not counted.
    assert works[1].peaks([KEEP, KEEP]) == (240, 240)


def test_work_by_hand():
    """Bytes 1, 10, 100: one digit for each value, gradients in thousands."""
    values = tuple(Value("", 10**i, (i - 1,) if i else (), 1.0, i, i != 1) for i in range(3))
    forward = tuple(Operation((i - 1,) if i else (), (i,)) for i in range(3))
    backward = (Operation((2, 3), (4,)), Operation((0, 4), (5,)))
    work = Work(values, forward, backward, (1_000, 2_000, 4_000), (), (5,), (5,))
    # Two neighbours of the chain; the last pair is the larger.
    assert work.peaks([AGAIN, AGAIN, AGAIN])[0] == 110
    assert work.peaks([KEEP, DROP, KEEP])[0] == 111
    # 3 (from outside), 0, 2 and 4; then 0, 4 and 5.
    assert work.peaks([KEEP, DROP, KEEP], keep_freed=True)[1] == max(3_101, 6_001)
    assert work.peaks([KEEP, DROP, KEEP])[1] == 6_000
    # 1 is freed once 2 is made from it, 0 is kept until it is read.
    assert work.peaks([KEEP, AGAIN, AGAIN], keep_freed=True)[1] == 6_001
