"""The tensor core: async_dot, async_dot_scaled, commits, and copies from shared to tensor memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl

from .. import dtypes, errors
from ..counting import Active
from ..frontend import access, values
from ..frontend.carry import carries, itself
from ..locations import show
from ..machine import MBarrier, engines, sync
from ..undefined import MARK, everywhere, mark, product, union
from .api import LEFT_OUT, Value, api, begin, constant, integer, plain, running, truth
from .buffers import buffered_tensor

if TYPE_CHECKING:
    from ..locations import Where
    from ..machine.tasks import CTA, Task
    from .barriers import mbarrier


_FORMATS = {"e4m3": "fp8e4nv", "e5m2": "fp8e5", "e2m1": None}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_MX = 32  # elements that share a scale
_FLOATS = ("fp16", "bf16", "fp32", "fp8e4nv", "fp8e5")


# ---------------------------------------------------------------- tcgen05 (Blackwell) and wgmma (Hopper)


@api
@carries(itself)
def async_dot(
    A: Any,
    B: Any,
    acc: Any = None,
    use_acc: Value = None,
    pred: Value = LEFT_OUT,
    mBarriers: Any = (),
    two_ctas: Value = False,
    force_async: Value = False,
    input_precision: Any = None,
    out_dtype: Any = tl.float32,
) -> Value:
    """Compute acc += A @ B on the tensor core, or acc = A @ B with use_acc=False.

    acc in TMEM (Blackwell): asynchronous if a barrier or force_async is given. acc a block or None (Hopper): returns
    the new accumulator, which is valid after async_dot_wait.
    """
    A = A.one() if isinstance(A, buffered_tensor) else A
    B = B.one()
    _check_shapes(A, B)
    if acc is not None:
        _check_accumulator_type(A, acc, plain(out_dtype))
    if isinstance(acc, buffered_tensor):
        return _tcgen05(A, B, acc.one(), use_acc, pred, plain(mBarriers), truth(two_ctas), truth(force_async))
    assert running().machine.options.arch != 100 or acc is not None, (
        "the accumulator must be in tensor memory on Blackwell"
    )
    return _wgmma(A, B, acc, plain(out_dtype))


def _shape(x: Value) -> list[int]:
    return [int(s) for s in x.shape]


def _check_shapes(A: Any, B: Any) -> None:
    a, b = _shape(A), _shape(B)
    assert len(a) == 2 and len(b) == 2, f"async_dot takes two-dimensional operands, got {a} and {b}"
    assert a[1] == b[0], (
        f"First input shape ({a}) and second input shape {b} are not compatible for matmul "
        f"(second index of first shape ({a[1]}) must be equal to first index of second shape ({b[0]})"
    )
    assert a[0] >= 64, "M must be at least 64"
    assert a[1] >= 16, "K must be at least 16"
    assert b[1] >= 32, "N must be at least 32"
    da, db = A.dtype.name, B.dtype.name
    mixed = da.startswith("fp8") and db.startswith("fp8")
    assert da == db or mixed, f"Both operands must be same dtype. Got {A.dtype} and {B.dtype}"


def _check_accumulator_type(A: Any, acc: Any, out_dtype: Any) -> None:
    """Choose the sums' type by Triton's rules: int32 for integers, fp16 for fp16 and fp8 if out_dtype says so, else fp32."""
    name = A.dtype.name
    narrow = out_dtype.name == "fp16" and name not in ("fp32", "bf16")
    wanted = "int32" if A.dtype.is_int() else "fp16" if narrow else "fp32"
    assert acc.dtype.name == wanted, (
        f"a product of {name} operands accumulates in {wanted}, the accumulator is {acc.dtype.name}"
    )


def _check_major(A: Any, B: Any, types: Sequence[str]) -> None:
    """Require operands of these types to lie K-major in shared memory: the tensor core transposes 16-bit elements only."""
    for tile, k_axis in ((A, 1), (B, 0)):
        if isinstance(tile, buffered_tensor) and tile.space == "smem" and tile.dtype_name in types:
            # a view that strides cannot say is let through
            strides = (0, 0) if tile.view.arr is None else tile.view.arr.strides
            if strides[k_axis] > strides[1 - k_axis]:
                mend = "keep B as [N, K] and pass tlx.local_trans" if tile is B else "keep A as [M, K], untransposed"
                what = f"{tile.dtype_name} operands lie K-major in shared memory, {tile.name} does not"
                raise ValueError(f"async_dot: {what}: {mend}")


def _check_operands(A: Any, B: Any, without: Sequence[str], instead: str) -> None:
    """Refuse operands of types that async_dot does not multiply on this architecture."""
    for tile in (A, B):
        if tile.dtype.name in without:
            what = getattr(tile, "name", "the left operand")
            raise ValueError(f"async_dot does not multiply {tile.dtype.name} here, which {what} holds: {instead}")


def _pair(task: Task, two: bool, where: Where) -> Sequence[CTA]:
    """Return the CTAs whose memory an MMA uses: the task's own, or the pair it leads."""
    if not two:
        return [task.cta]
    ctas = task.cta.cluster.ctas
    first = task.cta.rank & ~1
    if len(ctas) < first + 2:
        raise errors.ClusterError("two_ctas needs a cluster of two CTAs", [f"at {show(where)}"], where=where)
    task.cta.cluster.paired = True
    return ctas[first : first + 2]


def _commit_targets(task: Task, bars: Sequence[mbarrier], pair: Sequence[CTA], where: Where) -> list[MBarrier]:
    """Return an MMA's barriers: the CTA's own, or those of both CTAs of the pair."""
    return [bar.machine_barrier(task, where, cta if bar.rank is None else None) for bar in bars for cta in pair]


def _check_accumulator(acc: Any, m: int, n: int, two: bool, where: Where) -> None:
    if acc.space != "tmem":
        raise ValueError("the accumulator of a Blackwell MMA lies in tensor memory (storage_kind.tmem)")
    if acc.shape != [m, n]:
        raise ValueError(f"async_dot: the accumulator {acc.name} is {acc.shape}, the product is {[m, n]}")
    bad = m % 64 or (m > 128 and m % 128) or n % 16 or (n > 256 and n % 256)
    if bad:
        raise errors.MmaShapeError(f"the tensor core has no {m} x {n} tile", [f"at {show(where)}"], where=where)
    if two:
        acc.allocation.set_mode("half" if m == 64 else "plain")
    elif acc.allocation.mode == "half":
        acc.allocation.set_mode("plain")


def _refuse_pred(pred: Value) -> None:
    assert pred is LEFT_OUT, (
        "TLX hands `pred` of a product to the compiler as it is, which takes no value of a kernel: use `if`"
    )


def _tcgen05(
    A: Any, B: Any, acc: Any, use_acc: Value, pred: Value, bars: Sequence[mbarrier], two: bool, force_async: bool
) -> None:
    task, where, fault = begin("async_dot" if bars else "async_dot_waited", acc.name)
    _refuse_pred(pred)
    if not isinstance(A, buffered_tensor):
        raise AssertionError("register operand is not supported on Blackwell")
    if B.space != "smem":
        raise ValueError("the second operand of an MMA lies in shared memory")
    _check_operands(A, B, ("int8", "uint8"), "convert them to fp8 or bf16 first, or scale blocks: async_dot_scaled")
    _check_major(A, B, ("fp32",))
    pair = _pair(task, two, where)
    waits = not (bars or force_async)
    if two and task.cta.rank % 2:  # only the leader of a pair issues
        _wait_for_pair(task, waits, where)
        return None
    m, k, n = A.shape[0], A.shape[1], B.shape[1] * len(pair)
    As, Bs, Cs = ([x.twin(task, cta, where) for cta in pair] for x in (A, B, acc))
    for c in Cs:
        _check_accumulator(c, m, n, two, where)
    if fault == "drop":
        return None
    targets = [] if fault == "nobar" else _commit_targets(task, bars, pair, where)
    targets += _pair_barriers(pair) if two and waits else []
    accumulate = True if use_acc is None else truth(use_acc)
    reads = [(x.view, x.name) for x in (*As, *Bs)]
    writes = [(c.view, c.name) for c in Cs]
    if accumulate:
        reads += writes
    _count(accumulate)

    def compute() -> None:
        halves = [_matrix(x.view.read(), x.dtype_name) for x in Bs]
        b = np.concatenate(halves, axis=1) if two else halves[0]
        b_marks = _side_by_side(Bs)
        for a, c in zip(As, Cs):
            marks = product(a.view.undefined, b_marks)
            _accumulate(c, _product(_matrix(a.view.read(), a.dtype_name), b), accumulate, marks)

    facts = dict(
        m=m * len(pair), n=n, k=k, itemsize_a=dtypes.itemsize(A.dtype_name), a_space=A.space, two_cta=two, scaled=False
    )
    title = f"{acc.name} {'+=' if accumulate else '='} {A.name} @ {B.name}"
    peers = [cta for cta in pair if cta is not task.cta]
    engines.mma(task, compute, reads, writes, targets, where, title, facts, wait=waits and not two, peers=peers)
    _wait_for_pair(task, two and waits, where)
    return None


def _count(accumulate: bool) -> None:
    """Count a product into tensor memory, inside `counting()`."""
    if Active.counts is not None:
        Active.counts.mmas += 1
        Active.counts.accumulated += bool(accumulate)


def _pair_barriers(pair: Sequence[CTA]) -> list[MBarrier]:
    """Return the barriers by which the compiler makes both CTAs of a pair wait for an MMA without barriers."""
    bars = []
    for cta in pair:
        if cta.pair_barrier is None:
            cta.pair_barrier = MBarrier("the pair's MMA", cta, 1)
        bars.append(cta.pair_barrier)
    return bars


def _wait_for_pair(task: Task, waits: bool, where: Where) -> None:
    if waits:
        cta = task.cta
        [bar] = _pair_barriers([cta])
        parity, cta.pair_parity = cta.pair_parity, cta.pair_parity ^ 1
        sync.wait(task, bar, parity, where)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind in "iu":
        return a.astype(np.int32) @ b.astype(np.int32)
    # torch's, for numpy's matrix product ignores torch.set_num_threads and wastes the cores of a busy machine
    return torch.mm(torch.from_numpy(a), torch.from_numpy(b)).numpy()


def _matrix(stored: np.ndarray, name: str) -> np.ndarray:
    """Return an operand as the tensor core reads it. fp32 is taken as tf32: the low 13 bits are ignored (asked of an H200)."""
    if name != "fp32":
        return dtypes.decode(stored, name)
    return (np.ascontiguousarray(stored).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _side_by_side(Bs: Sequence[buffered_tensor]) -> np.ndarray | None:
    """Return marks of B, of which each CTA of a pair holds half the columns; None where nothing is undefined."""
    marks = [x.view.undefined for x in Bs]
    if all(m is None for m in marks):
        return None
    return np.concatenate([np.zeros(x.view.shape, MARK) if m is None else m for x, m in zip(Bs, marks)], axis=1)


def _accumulate(c: buffered_tensor, product: np.ndarray, accumulate: bool, marks: np.ndarray | None = None) -> None:
    """Add a product to an accumulator, or put it there; `marks`: of the product."""
    view = c.view
    if accumulate:
        marks = union(marks, view.undefined)
        held = dtypes.decode(view.read(), c.dtype_name)
        if c.dtype_name == "fp32" and view.arr is not None and view.arr.shape == view.shape and marks is None:
            view.arr += product
            return
        product = held + product
    view.write(dtypes.encode(product, c.dtype_name), marks)


def _wgmma(A: Any, B: Any, acc: Any, out_dtype: Any) -> Value:
    task, where, _ = begin("async_dot_waited", B.name)  # it has no barriers that a fault could take away
    m, k, n = *_shape(A), _shape(B)[1]
    if acc is not None and _shape(acc) != [m, n]:
        raise ValueError(f"async_dot: the accumulator is {_shape(acc)}, the product is {[m, n]}")
    _check_operands(A, B, ("uint8",), "convert it to int8")
    _check_major(A, B, ("fp32", "fp8e4nv", "fp8e5", "int8"))
    operands = [x for x in (A, B) if isinstance(x, buffered_tensor)]
    in_memory = isinstance(A, buffered_tensor)
    a = A.view.read() if in_memory else values.to_stored(A)
    result = _product(_matrix(a, A.dtype.name), _matrix(B.view.read(), B.dtype_name))
    marks = product(A.view.undefined if in_memory else values.undefined(A), B.view.undefined)
    dtype = acc.dtype if acc is not None else out_dtype
    if acc is not None:
        before, before_marks = values.to_numpy(acc), values.undefined(acc)
        pending = task.results.get(id(before))
        if pending is not None:  # still on its way: MMAs of a task that share an accumulator follow each other
            before, before_marks = pending.result, pending.result_marks
        result, marks = result + before, union(marks, before_marks)
    facts = dict(
        m=m,
        n=n,
        k=k,
        itemsize_a=dtypes.itemsize(A.dtype.name),
        a_space=A.space if isinstance(A, buffered_tensor) else "reg",
        two_cta=False,
        scaled=False,
    )
    result = dtypes.round_to(result, dtype.name)
    block, unknown = result, None
    if task.machine.options.poison:
        block = np.full_like(result, access.garbage(dtype))
        unknown = np.full(result.shape, mark("unwaited product", where), MARK)
    engines.wgmma(
        task,
        [(x.view, x.name) for x in operands],
        where,
        f"{B.name}",
        facts,
        engines.Pending(block, unknown, result, marks),
    )
    return values.from_numpy(block, dtype, marks if unknown is None else unknown)


@api
def async_dot_wait(pendings: Value, inp: Value = None) -> Value:
    """Wait until at most `pendings` MMAs of this task are in flight (Hopper); return `inp`."""
    task, where, fault = begin("async_dot_wait", "")
    if fault != "drop":
        engines.wgmma_wait(task, integer(constant(pendings, "pendings")), where)
    return inp


@api
def tcgen05_commit(mBarrier: mbarrier, two_ctas: Value = False) -> None:
    """Arrive once on the barrier when all earlier tensor-core operations of this task have finished."""
    task, where, fault = begin("tcgen05_commit", mBarrier.array.name)
    two = truth(two_ctas)
    if fault == "drop" or (two and task.cta.rank % 2):
        return
    pair = _pair(task, two, where)
    engines.commit(task, _commit_targets(task, [mBarrier], pair, where), where, f"commit {mBarrier.array.name}")


# ---------------------------------------------------------------- block scales


def _unpack_scales(raw: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Return scales [rows, cols] from their form in SMEM (blocks of 128 rows x 4 columns as [32][4][4] bytes)."""
    blocks = raw.reshape(-(-rows // 128), -(-cols // 4), 32, 4, 4)
    full = blocks.transpose(0, 3, 2, 1, 4).reshape(blocks.shape[0] * 128, blocks.shape[1] * 4)
    return full[:rows, :cols]


def _scale_matrix(buffer: buffered_tensor, rows: int, cols: int) -> np.ndarray:
    """Return factors 2^(e - 127) as float32 [rows, cols]; 255 is NaN."""
    raw = buffer.view.read()
    if (
        buffer.space == "tmem"
        and (raw.shape[0] < rows or raw.shape[1] < cols)
        and len(buffer.path) == 1
        and raw.size == rows * cols
    ):
        raw = buffer.as_scales(rows, cols).read()  # the tensor core goes by what the product needs
    if buffer.space == "smem" and not (list(raw.shape) == [rows, cols] and raw.size % 512):
        if raw.size != -(-rows // 128) * 128 * -(-cols // 4) * 4:
            raise ValueError(
                f"async_dot_scaled: {buffer.name} {buffer.shape} does not hold the scales of a {rows} x {cols * _MX} operand"
            )
        raw = _unpack_scales(np.ascontiguousarray(raw), rows, cols)
    elif raw.shape[0] < rows or raw.shape[1] < cols:
        raise ValueError(
            f"async_dot_scaled: {buffer.name} {buffer.shape} does not hold the scales of a {rows} x {cols * _MX} operand"
        )
    code = raw[:rows, :cols].astype(np.uint8)
    return np.where(
        code == 255, np.float32(np.nan), np.ldexp(np.float32(1), code.astype(np.int32) - 127).astype(np.float32)
    )


def _operand(buffer: buffered_tensor, fmt: str, along: int) -> np.ndarray:
    """Return a scaled operand's values; fp4 is packed two a byte along axis `along`."""
    raw = buffer.view.read()
    if fmt != "e2m1":
        return dtypes.decode(raw.view(np.uint8) if raw.dtype != np.uint8 else raw, _FORMATS[fmt])
    low, high = _E2M1[raw & 15], _E2M1[(raw >> 4) & 15]
    shape = list(raw.shape)
    shape[along] *= 2
    return np.stack([low, high], axis=along + 1).reshape(shape)


@api
def async_dot_scaled(
    A: Any,
    B: Any,
    acc: Any,
    A_scale: Any,
    A_format: Any,
    B_scale: Any,
    B_format: Any,
    use_acc: Value = None,
    pred: Value = LEFT_OUT,
    mBarriers: Any = (),
    two_ctas: Value = False,
    force_async: Value = False,
    out_dtype: Any = tl.float32,
) -> None:
    """Compute acc (+)= (A * A_scale) @ (B * B_scale): fp8 or fp4 operands with one power-of-two scale per 32 values along K."""
    A, B, acc, A_scale, B_scale = (_buffer(x).one() for x in (A, B, acc, A_scale, B_scale))
    a_format, b_format = plain(A_format), plain(B_format)
    assert A.shape[0] >= 64, "M must be at least 64"
    assert A.shape[1] >= 16, "K must be at least 16"
    assert B.shape[1] >= 32, "N must be at least 32"
    assert running().machine.options.arch != 90, "async_dot_scaled is only available on Blackwell"
    assert B.space == "smem", "input must be a shared memory tensor"
    assert a_format in _FORMATS, f"Unsupported A_format: {a_format}"
    assert b_format in _FORMATS, f"Unsupported B_format: {b_format}"
    _refuse_pred(pred)
    two, bars = truth(two_ctas), plain(mBarriers)
    assert not two or A.shape[0] == 128, f"async_dot_scaled of two CTAs takes 128 rows of each, got {A.shape[0]}"
    task, where, fault = begin("async_dot_scaled" if bars else "async_dot_waited", acc.name)
    waits = not (bars or truth(force_async))
    pair = _pair(task, two, where)
    if two and task.cta.rank % 2:
        _wait_for_pair(task, waits, where)
        return None
    m, n = A.shape[0], B.shape[1] * len(pair)
    k = A.shape[1] * (2 if a_format == "e2m1" else 1)
    k_of_b = B.shape[0] * (2 if b_format == "e2m1" else 1)
    assert k == k_of_b, f"K differs: {k} of {A.name} ({a_format}), {k_of_b} of {B.name} ({b_format})"
    As, Bs, Cs, SAs, SBs = ([x.twin(task, cta, where) for cta in pair] for x in (A, B, acc, A_scale, B_scale))
    for c in Cs:
        _check_accumulator(c, m, n, two, where)
    for scales in (*SAs, *SBs):
        scales.allocation.scales_taken = True
    if fault == "drop":
        return None
    targets = [] if fault == "nobar" else _commit_targets(task, bars, pair, where)
    targets += _pair_barriers(pair) if two and waits else []
    accumulate = True if use_acc is None else truth(use_acc)
    reads = [(x.view, x.name) for x in (*As, *Bs, *SAs, *SBs)]
    writes = [(c.view, c.name) for c in Cs]
    groups = -(-k // _MX)
    _count(accumulate)

    def compute() -> None:
        b, b_marks = np.concatenate([_operand(x, b_format, 0) for x in Bs], axis=1), _side_by_side(Bs)
        for a, sa, sb, c in zip(As, SAs, SBs, Cs):
            b_scale = _b_scales(sb, SBs, n, groups)
            left = _operand(a, a_format, 1) * np.repeat(_scale_matrix(sa, m, groups), _MX, axis=1)[:, :k]
            right = b * np.repeat(b_scale, _MX, axis=1)[:, :k].T
            marks = union(product(a.view.undefined, b_marks), *[everywhere(x.view.undefined) for x in (sa, sb)])
            _accumulate(c, _product(left, right), accumulate, marks)

    facts = dict(m=m * len(pair), n=n, k=k, itemsize_a=1, a_space=A.space, two_cta=two, scaled=True)
    title = f"{acc.name} {'+=' if accumulate else '='} scaled {A.name} @ {B.name}"
    engines.mma(
        task,
        compute,
        reads + writes if accumulate else reads,
        writes,
        targets,
        where,
        title,
        facts,
        wait=waits and not two,
        peers=[cta for cta in pair if cta is not task.cta],
    )
    _wait_for_pair(task, two and waits, where)
    return None


def _b_scales(own: buffered_tensor, both: Sequence[buffered_tensor], n: int, groups: int) -> np.ndarray:
    """Return scales of all n columns of B: each CTA of a pair holds all of them, or its half."""
    rows = own.shape[0] if own.space == "tmem" else own.view.read().size // (-(-groups // 4) * 4)
    if rows >= n or len(both) == 1:
        return _scale_matrix(own, n, groups)
    return np.concatenate([_scale_matrix(s, n // len(both), groups) for s in both])


def _buffer(x: Value) -> buffered_tensor:
    assert isinstance(x, buffered_tensor), "input must be a buffered tensor"
    return x


@api
def tmem_copy(src: Any, dst: Any) -> None:
    """Copy SMEM to TMEM on the tensor core's pipe (so later MMAs of this task see it without a barrier)."""
    assert isinstance(src, buffered_tensor), "source must be a buffered tensor"
    assert isinstance(dst, buffered_tensor), "destination must be a buffered tensor"
    assert src.space == "smem", "source must be in shared memory"
    assert dst.space == "tmem", "destination must be in tensor memory"
    src, dst = src.one(), dst.one()
    scales = dst.dtype_name in ("int8", "uint8")
    if scales:
        _check_scale_copy(src, dst)
    elif int(np.prod(src.shape)) * dtypes.itemsize(src.dtype_name) != int(np.prod(dst.shape)) * dtypes.itemsize(
        dst.dtype_name
    ):
        raise ValueError(f"tmem_copy: {src.name} {src.shape} and {dst.name} {dst.shape} differ in size")
    task, where, fault = begin("tmem_copy", dst.name)
    if fault == "drop":
        return

    def compute() -> None:
        raw, marks = np.ascontiguousarray(src.view.read()), src.view.undefined
        if scales:
            dst.view.write(
                _unpack_scales(raw, *dst.shape), None if marks is None else _unpack_scales(marks, *dst.shape)
            )
            return
        same = src.view.dtype.itemsize == dst.view.dtype.itemsize
        marks = marks.reshape(dst.shape) if same and marks is not None else everywhere(marks)
        dst.view.write(raw.view(dst.view.dtype).reshape(dst.shape), marks)

    engines.mma(task, compute, [(src.view, src.name)], [(dst.view, dst.name)], [], where, f"copy {src.name}", None)


def _check_scale_copy(src: Any, dst: Any) -> None:
    message = (
        "scale tmem_copy requires an explicit packed i8 SMEM shape matching the rank-2 TMEM scale shape; "
        "accepted source shapes are [rows / 128, cols / 4, 32, 16], [rows / 128, cols / 4, 32, 4, 4], "
        "[1, rows / 128, cols / 4, 2, 256], or [rows / 128, (cols / 4) * 512]"
    )
    assert src.dtype_name in ("int8", "uint8"), message
    rows, cols = dst.shape
    assert rows % 128 == 0 and cols % 4 == 0, message
    r, c = rows // 128, cols // 4
    assert src.shape in ([r, c, 32, 16], [r, c, 32, 4, 4], [1, r, c, 2, 256], [r, c * 512]), message


@api
def require_layout(x: Value, layout: Any) -> Value:
    """Pin a register layout; values do not change."""
    return x


__all__ = ["async_dot", "async_dot_scaled", "async_dot_wait", "require_layout", "sync", "tcgen05_commit", "tmem_copy"]
