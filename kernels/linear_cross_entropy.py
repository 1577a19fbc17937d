"""The loss of a linear layer followed by cross-entropy, and its gradients, without the (T, V) logits.

A loop over chunks of rows: a product fills one reused buffer with logits, one kernel turns them in place
into row losses and the gradient g of the logits, and products of that buffer give dx and dw. So the gradients
exist when the forward returns, those of the *summed* loss; the backward multiplies them by one number.

Math: z = cap tanh(s logits / cap), loss_i = -sum_v q_iv log softmax(z_i)_v, dx = s g w, dw = s g^T x,
dbias = s sum_i g. See derivations/linear_cross_entropy.py, Theorems row loss, dlogits, dx, dw, dbias.
Shapes: x (T, D), w (V, D), bias (V,), target (T,) int64, loss () fp32; T tokens, D model, V vocabulary.
Numerics: logits are rounded to x.dtype as in eager, from there to g all is fp32 (float64 for float64), g is
rounded to x.dtype, products accumulate in fp32. In float16 g is stored times 2^14 and the gradients wait in
fp32: the loss scale that must keep them from underflowing only arrives in the backward. A mean over no valid
row is NaN with gradients of 0, as in eager. An ignored row takes no part, even if its logits are NaN; eager
makes its gradient NaN then.
Cost: 2 T V D (1 + need_dx + need_dw) FLOPs; beside inputs and outputs, the buffer of `_chunk_rows` rows.
Raises: IndexError for a label outside [0, V) that is not ignore_index; on a GPU an assertion on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..derivations import linear_cross_entropy as formulas
from ._launch import cdiv, inline, next_power_of_2, tl, triton
from ._op import define_backward, define_op, nbytes

_grown = inline(formulas.grown)
_row_loss = inline(formulas.row_loss)
_wanted = inline(formulas.wanted)
_dz = inline(formulas.dz)
_dlogits = inline(formulas.dlogits)


@triton.jit
def _tanh(v):
    """Right to a few ulp in fp32: through exp, or our polynomial fit of tanh(v) / v where that cancels."""
    size, square = tl.abs(v), v * v
    fall = tl.exp(-2.0 * size)
    p = 0.1333138198 + square * (-0.05373531953 + square * (0.02062629163 + square * -0.0056919856))
    near = size + size * square * (-0.3333328068 + square * p)
    tanh = tl.where(size < 0.625, near, 1.0 - 2.0 * fall / (1.0 + fall))
    return tl.where(v < 0.0, -tanh, tanh)


@triton.jit
def _z(logits, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """Scaled and capped logits, and the tanh inside them (0 without a softcap)."""
    z = logits.to(tl.float32) * logit_scale
    tanh = tl.zeros_like(z)
    if SOFTCAP:
        tanh = _tanh(z / softcap)
        z = softcap * tanh
    return z, tanh


@triton.jit
def _row_sums(logits_ptr, columns, V, row_stride, logit_scale, softcap, SOFTCAP, SMOOTHED):
    """Over one row: the largest z, the sum of exp(z - largest), the mean z if SMOOTHED.

    `columns` is (lanes, 8): a thread owns groups of 8 neighbours, so the running maximum of a lane costs no
    exchange between threads and one more exp per 8 elements.
    """
    LANES: tl.constexpr = columns.shape[0]
    tops = tl.full([LANES], float("-inf"), tl.float32)
    totals = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * 8):
        v = start + columns
        # Masked at row_stride, a multiple of 16, and not at V, for vector loads; the padding is ours.
        z, _ = _z(tl.load(logits_ptr + v, mask=v < row_stride, other=0.0), logit_scale, softcap, SOFTCAP)
        if SMOOTHED:
            sums += tl.sum(tl.where(v < V, z, 0.0), axis=1)
        z = tl.where(v < V, z, float("-inf"))
        higher = tl.maximum(tops, tl.max(z, axis=1))
        # A lane of -inf alone must add 0, not exp(-inf + inf).
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        totals = _grown(totals, tl.exp(tops - anchor), tl.sum(tl.exp(z - anchor[:, None]), axis=1))
        tops = higher
    top = tl.max(tops, axis=0)
    return top, tl.sum(totals * tl.exp(tops - top), axis=0), tl.sum(sums, axis=0) / V if SMOOTHED else top


# One program: one row, read twice; the second time it is overwritten.
@triton.jit
def linear_cross_entropy_fwd_kernel(
    logits_ptr,  # (rows, V), its row padded to row_stride elements; becomes g * BOOST
    target_ptr,  # (rows,)
    loss_ptr,  # (rows,) fp32
    V,
    row_stride,
    ignore_index,
    smoothing,
    logit_scale,
    softcap,
    BOOST: tl.constexpr,
    NEED_GRAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    columns = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tiles = tl.cdiv(V, BLOCK)
    dtype = logits_ptr.dtype.element_ty
    smoothing, softcap = tl.cast(smoothing, tl.float32), tl.cast(softcap, tl.float32)
    logit_scale = tl.cast(logit_scale, tl.float32)
    target = tl.load(target_ptr + row)

    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if NEED_GRAD:
            for i in range(tiles):
                v = i * BLOCK + columns
                tl.store(logits_ptr + v, tl.zeros([BLOCK // 8, 8], dtype), mask=v < row_stride)
    else:
        z_target, _ = _z(tl.load(logits_ptr + target), logit_scale, softcap, SOFTCAP)
        top, total, z_mean = _row_sums(logits_ptr, columns, V, row_stride, logit_scale, softcap, SOFTCAP, SMOOTHED)
        tl.store(loss_ptr + row, _row_loss(tl.log(total), top, z_target, z_mean, smoothing))
        if NEED_GRAD:
            # Every thread has read the target's logit before any thread overwrites it.
            tl.debug_barrier()
            for i in range(tiles):
                # Backwards: the end of the row was read last and is still in the L2 cache.
                v = (tiles - 1 - i) * BLOCK + columns
                inside = v < row_stride
                z, tanh = _z(tl.load(logits_ptr + v, mask=inside, other=0.0), logit_scale, softcap, SOFTCAP)
                q = _wanted(tl.where(v == target, 1.0, 0.0), smoothing, 1.0 / V)
                g = _dlogits(_dz(tl.exp(z - top) * (1.0 / total), q), tanh)
                tl.store(logits_ptr + v, (g * BOOST).to(dtype), mask=inside)


Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # loss, dx, dw, dbias


class _Loss(NamedTuple):
    reduction: str
    ignore_index: int
    label_smoothing: float
    logit_scale: float
    softcap: float


def _step_triton(logits: Tensor, target: Tensor, out: Tensor, loss: _Loss, boost: float, grad: bool) -> None:
    """Row losses of a chunk into `out`, and its logits overwritten by g * boost if `grad`."""
    rows, V = logits.shape
    # 16 elements a thread and, in 16 bits, 1024 threads: two programs fill a multiprocessor of an H200 (32
    # registers, sm_90), so few enough rows are in flight for the second sweep to find part of them in L2.
    block = min(2**15 // logits.element_size(), max(512, next_power_of_2(V)))
    sizes = {"BLOCK": block, "num_warps": block // 512}
    flags = {"SOFTCAP": loss.softcap > 0, "SMOOTHED": loss.label_smoothing > 0}
    args = (logits, target, out, V, logits.stride(0), *loss[1:])
    linear_cross_entropy_fwd_kernel[(rows,)](*args, BOOST=boost, NEED_GRAD=grad, **flags, **sizes)


def _step_torch(logits: Tensor, target: Tensor, out: Tensor, loss: _Loss, boost: float, grad: bool) -> None:
    """`_step_triton` in torch."""
    z, tanh = logits.to(out.dtype) * loss.logit_scale, torch.zeros(())
    if loss.softcap > 0:
        tanh = torch.tanh(z / loss.softcap)
        z = loss.softcap * tanh
    valid = (target != loss.ignore_index)[:, None]
    hit = torch.where(valid[:, 0], target, 0)[:, None]
    top = z.amax(dim=1, keepdim=True)
    p = torch.exp(z - top)
    total = p.sum(dim=1, keepdim=True)
    z_mean = z.mean(dim=1, keepdim=True) if loss.label_smoothing > 0 else top
    rows = formulas.row_loss(total.log(), top, z.gather(1, hit), z_mean, loss.label_smoothing)
    out.copy_(torch.where(valid, rows, 0.0)[:, 0])
    if grad:
        q = torch.full_like(p, formulas.wanted(0.0, loss.label_smoothing, 1.0 / z.shape[1]))
        q.scatter_(1, hit, formulas.wanted(1.0, loss.label_smoothing, 1.0 / z.shape[1]))
        g = formulas.dlogits(formulas.dz(p / total, q), tanh)
        logits.copy_(torch.where(valid, g * boost, 0.0))


def _chunk_rows(T: int, V: int, D: int, itemsize: int, need_dw: bool) -> int:
    """Rows of logits that exist at a time.

    Frozen w: 256 MiB of logits, which keeps the products large (1024 rows of 128256 words in bf16). Trained w
    in 16 bits: chunks add up in an fp32 accumulator of 4 V D bytes, and each pays its traffic, 8 V D bytes.
    All T rows in one chunk need none and take 2 T V bytes: up to T = 2 D that is less memory, and faster.
    Beyond, a chunk of D rows takes just the room that rounding the accumulator to dw takes once the buffer is
    free again; below 1 GiB the traffic weighs more than the room. Chunks are equal, to within 64 rows.
    """
    rows = 2**28 // (V * itemsize)
    if need_dw and itemsize == 2:
        rows = max(2**30 // (V * itemsize), T if T <= 2 * D else D)
    chunks = cdiv(T, max(rows, 256))
    return T if chunks <= 1 else min(T, 64 * cdiv(cdiv(T, chunks), 64))


def _product(out: Tensor, a: Tensor, b: Tensor, *, alpha: float, accumulate: bool) -> None:
    """out = alpha a b, or out += alpha a b, in the precision of `out`."""
    beta = 1.0 if accumulate else 0.0
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif a.is_cuda and torch.version.hip is None:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)  # pyright: ignore[reportCallIssue]
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, alpha=alpha, out=out)


def _valid_rows(target: Tensor, ignore_index: int, work: int) -> Tensor | None:
    """Rows worth computing, or None for all of them.

    A GPU must be waited for to know how many are valid: done where T V D is at least 2^39 (milliseconds of
    products), never while a CUDA graph is captured, and used only if more than one row in 16 is ignored,
    because picked rows have to be copied.
    """
    T, on_cpu = target.shape[0], target.device.type == "cpu"
    if not on_cpu and (work < 2**39 or (target.is_cuda and torch.cuda.is_current_stream_capturing())):
        return None
    rows = (target != ignore_index).nonzero().squeeze(1)
    return rows if (rows.shape[0] < T if on_cpu else 16 * rows.shape[0] < 15 * T) else None


def _check_labels(target: Tensor, V: int, ignore_index: int) -> None:
    bad = ((target < 0) | (target >= V)) & (target != ignore_index)
    if target.device.type != "cpu":
        torch._assert_async(~bad.any(), "Target is out of bounds.")
    elif bad.any():
        raise IndexError(f"Target {int(target[bad][0])} is out of bounds.")


def _compute(step: Any, x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, loss: _Loss, need: tuple) -> Outputs:
    """The loop over chunks of rows; `step` is one of the two above."""
    (T, D), V = x.shape, w.shape[0]
    need_dx, need_dw, need_dbias = need
    wide = torch.promote_types(x.dtype, torch.float32)
    boost = 2.0**14 if x.dtype is torch.float16 else 1.0
    alpha = loss.logit_scale / boost
    target, w = target.contiguous(), w if 1 in w.stride() else w.contiguous()
    _check_labels(target, V, loss.ignore_index)
    rows = _valid_rows(target, loss.ignore_index, T * V * D)
    count = T if rows is None else rows.shape[0]
    chunk = max(1, _chunk_rows(count, V, D, x.element_size(), need_dw))
    if x.device.type == "cpu" and not need_dw:
        # The step in torch holds several copies of its chunk, and a CPU loses nothing with smaller products.
        chunk = min(chunk, max(64, 2**24 // (V * x.element_size())))

    losses, sums = x.new_empty(count, dtype=wide), w.new_zeros(V if need_dbias else 0, dtype=wide)
    dx, dw = _room(x, need_dx), _room(w, need_dw, None if chunk >= count else wide)
    if rows is not None:
        dx.zero_()
    if count == 0:
        dw.zero_()
    # Rows are padded to a multiple of 16 words, so that products and kernel see aligned ones.
    buffer = x.new_empty(min(chunk, count), 16 * cdiv(V, 16))[:, :V]
    for start in range(0, count, chunk):
        part = slice(start, min(start + chunk, count))
        x_part, labels = (t[part] if rows is None else t.index_select(0, rows[part]) for t in (x, target))
        g = buffer[: x_part.shape[0]]
        if bias is None:
            torch.mm(x_part, w.t(), out=g)
        else:
            torch.addmm(bias, x_part, w.t(), out=g)
        step(g, labels, losses[part], loss, boost, any(need))
        if need_dx:
            dx_part = dx[part] if rows is None else dx.new_empty(x_part.shape)
            _product(dx_part, g, w, alpha=alpha, accumulate=False)
            if rows is not None:
                dx.index_copy_(0, rows[part], dx_part)
        if need_dw:
            _product(dw, g.t(), x_part, alpha=alpha, accumulate=start > 0)
        if need_dbias:
            sums.add_(g.sum(dim=0, dtype=wide), alpha=alpha)
        del g
    del buffer
    total = losses.sum()
    if loss.reduction == "mean":
        total /= (target != loss.ignore_index).sum()
    return total, dx, dw.to(dx.dtype), sums.to(dx.dtype)


def _room(t: Tensor, needed: bool, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised gradient of `t` as kept for the backward, or an empty stand-in if nobody needs it."""
    kept = torch.float32 if t.dtype is torch.float16 else t.dtype
    return t.new_empty(t.shape if needed else (0,), dtype=dtype or kept)


def _check(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, loss: _Loss, need_dbias: bool) -> None:
    """The rules that compare no sizes; shapes under `fake` may be symbolic."""
    tensors = [t for t in (x, w, bias, target) if t is not None]
    dims, dtypes = [t.ndim for t in tensors], [t.dtype for t in tensors[:-1]]
    devices, smoothing = sorted({str(t.device) for t in tensors}), loss.label_smoothing
    for rule, kept, came in (
        ("x must be (T, D), w (V, D), bias (V,), target (T,)", dims in ([2, 2, 1], [2, 2, 1, 1]), dims),
        ("x, w and bias must share a floating dtype", x.is_floating_point() and len({*dtypes}) == 1, dtypes),
        ("target must be int64 word numbers", target.dtype is torch.int64, target.dtype),
        ("all tensors must be on one device", len(devices) == 1, devices),
        ("reduction must be 'mean' or 'sum'", loss.reduction in ("mean", "sum"), repr(loss.reduction)),
        ("label_smoothing must lie in [0, 1]", 0.0 <= smoothing <= 1.0, smoothing),
        ("softcap must be positive, or 0 for none", loss.softcap >= 0.0, loss.softcap),
        ("need_dbias needs a bias", bias is not None or not need_dbias, None),
    ):
        if not kept:
            raise ValueError(
                f"linear_cross_entropy: {rule}, got {came}. "
                'Change it or disable with options={"fusions": "-linear_cross_entropy"}'
            )


def _check_sizes(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor) -> None:
    (T, D), V = x.shape, w.shape[0]
    if w.shape[1] != D or target.shape[0] != T or (bias is not None and bias.shape[0] != V) or V == 0:
        shapes = {"x": x, "w": w, "bias": bias, "target": target}
        came = ", ".join(f"{name} {tuple(t.shape)}" for name, t in shapes.items() if t is not None)
        raise ValueError(
            "linear_cross_entropy: sizes must agree as x (T, D), w (V, D), bias (V,), target (T,), V > 0, "
            f"got {came}. Transpose or flatten what differs"
        )


def linear_cross_entropy_reference(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, *rest: Any, step: Any = _step_torch
) -> Outputs:
    """`rest` as in the schema below: what _Loss holds, then need_dx, need_dw, need_dbias."""
    loss, need = _Loss(*rest[:5]), rest[5:]
    _check(x, w, bias, target, loss, need[2])
    _check_sizes(x, w, bias, target)
    return _compute(step, x, w, bias, target, loss, need)


def linear_cross_entropy_triton(x: Tensor, *rest: Any) -> Outputs:
    return linear_cross_entropy_reference(x, *rest, step=_step_torch if x.dtype is torch.float64 else _step_triton)


def linear_cross_entropy_fake(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> Outputs:
    need_dx, need_dw, need_dbias = rest[5:]
    _check(x, w, bias, target, _Loss(*rest[:5]), need_dbias)
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    return loss, _room(x, need_dx), _room(w, need_dw), _room(w if bias is None else bias, need_dbias)


def _bytes_moved(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> int:
    """Inputs and gradients once; logits written, read twice, written as g and read by every product."""
    logits = x.shape[0] * w.shape[0] * x.element_size()
    sweeps = 2 + any(rest[5:]) * (2 + sum(rest[5:]))
    return nbytes(x, w, bias, target) + (rest[5] + rest[6]) * nbytes(x, w) + sweeps * logits


def _workspace(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> int:
    """A chunk of logits, and the wider sum of dw where there are several chunks."""
    chunk, size = _chunk_rows(len(x), len(w), x.shape[1], x.element_size(), rest[6]), x.element_size()
    return chunk * len(w) * size + (4 * w.numel() if rest[6] and chunk < len(x) else 0)


linear_cross_entropy = define_op(
    "linear_cross_entropy(Tensor x, Tensor w, Tensor? bias, Tensor target, str reduction, int ignore_index, "
    "float label_smoothing, float logit_scale, float softcap, bool need_dx, bool need_dw, bool need_dbias) "
    "-> (Tensor loss, Tensor dx, Tensor dw, Tensor dbias)",
    reference=linear_cross_entropy_reference,
    triton=linear_cross_entropy_triton,
    fake=linear_cross_entropy_fake,
    flops=lambda x, w, bias, target, *rest: 2 * x.shape[0] * w.numel() * (1 + rest[5] + rest[6]),
    bytes_moved=_bytes_moved,
    workspace=_workspace,
)


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    x, _, _, target, reduction, ignore_index, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:], target)
    ctx.made, ctx.dtype, ctx.mean, ctx.ignore_index = inputs[-3:], x.dtype, reduction == "mean", ignore_index


def _backward(ctx: Any, d_loss: Tensor | None, *d_gradients: Tensor | None) -> tuple:
    """Each gradient of the summed loss times one number: d_loss, over the count of valid rows for a mean.

    dx, dw and dbias stay differentiable outputs for one reason: a second derivative, which needs theirs, then
    arrives here and is refused instead of silently lost.
    """
    if any(d is not None for d in d_gradients):
        raise RuntimeError(
            "fused_backend::linear_cross_entropy has no second derivative. Run without backend='fused', or "
            "with options={'fusions': '-linear_cross_entropy'}, when gradients of gradients are needed"
        )
    *gradients, target = ctx.saved_tensors
    scaled: list[Tensor | None] = [None] * 12
    if d_loss is None:
        return tuple(scaled)
    scale = d_loss / (target != ctx.ignore_index).sum().clamp(min=1) if ctx.mean else d_loss
    for i, name in enumerate(("x", "w", "bias")):
        if ctx.needs_input_grad[i] and not ctx.made[i]:
            raise RuntimeError(
                f"linear_cross_entropy: {name} requires a gradient, but the forward ran with "
                f"need_d{name}=False. Pass need_d{name}=True, or detach {name}"
            )
        if ctx.needs_input_grad[i]:
            # A factor without dimensions would be rounded to the gradient's dtype first.
            scaled[i] = (gradients[i] * scale.reshape((1,) * gradients[i].ndim)).to(ctx.dtype)
    return tuple(scaled)


define_backward(linear_cross_entropy, setup_context=_save, backward=_backward)
