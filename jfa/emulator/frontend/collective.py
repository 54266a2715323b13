"""Reductions, scans and per-element functions of a block: numpy where the combine function is one of Triton's own, else the user's
function on whole slices where that gives what it gives for scalars, and pair by pair where it does not (`_Combine`); a tree for
reductions, Hillis-Steele steps for scans."""

import numpy as np
import triton.language as tl

from .. import dtypes
from ..context import context
from ..errors import EmulatorError
from ..undefined import MARK, reduced, some, union
from .contraction import rounded, sum_in_pairs
from .own_stores import ordered
from .support import UnsupportedConstruct, assign
from .tensor import INT32, Hooks, Scalar, canonical, fix, held_dtype, joined, make, rearranged, wrap

_unwrap = tl.core._unwrap_if_constexpr


def _function_name(combine):
    """Return Triton's own combine functions by name; None for a user's."""
    python = getattr(combine, "python", combine)
    python = getattr(python, "fn", python)
    return python.__name__ if getattr(python, "__module__", "").startswith("triton.language.standard") else None


def _sum(data, axis, keep):
    return np.add.reduce(data, axis=axis, keepdims=keep)


def _max_number(data, axis, keep):
    return (
        np.fmax.reduce(data, axis=axis, keepdims=keep)
        if data.dtype.kind == "f"
        else np.maximum.reduce(data, axis=axis, keepdims=keep)
    )


def _min_number(data, axis, keep):
    return (
        np.fmin.reduce(data, axis=axis, keepdims=keep)
        if data.dtype.kind == "f"
        else np.minimum.reduce(data, axis=axis, keepdims=keep)
    )


_REDUCERS = {
    "_sum_combine": _sum,
    "_elementwise_max": _max_number,
    "_elementwise_min": _min_number,
    "_xor_combine": lambda data, axis, keep: np.bitwise_xor.reduce(data, axis=axis, keepdims=keep),
    "_or_combine": lambda data, axis, keep: np.bitwise_or.reduce(data, axis=axis, keepdims=keep),
    "_prod_combine": lambda data, axis, keep: np.multiply.reduce(data, axis=axis, keepdims=keep),
}
_ARG_REDUCERS = {
    "_argmax_combine_tie_break_left": np.argmax,
    "_argmax_combine_tie_break_fast": np.argmax,
    "_argmin_combine_tie_break_left": np.argmin,
    "_argmin_combine_tie_break_fast": np.argmin,
}


def _charge(kind, data):
    ordered()
    if context.launch.charge:
        context.launch.charge(kind, data.size)


def _axis_of(axis, rank):
    if not -rank <= axis < rank:
        raise ValueError(f"invalid axis {axis}. Expected {-rank} <= axis < {rank}")
    return axis % rank


def _typed(data, dtype, undefined=None):
    data = np.asarray(data)
    if dtype.name in dtypes.NARROW_FLOATS:
        data = dtypes.round_to(data, dtype.name)
    elif data.dtype != held_dtype(dtype):
        data = data.astype(held_dtype(dtype))
    return wrap(data, canonical(dtype), undefined=undefined)


def reduce_native(value, axis, keep_dims, function):
    """Return one block reduced by a numpy reducer, over `axis` or all axes (None)."""
    if type(value) is Scalar:
        raise ValueError("cannot reduce a scalar")
    data, marks = value.data, value.undefined
    _charge("reduce", data)
    along = -1 if axis is None else _axis_of(axis, data.ndim)
    if function is _sum and value.exact is not None and data.shape[along] > 1:
        data = sum_in_pairs(value.exact, data, along)
    if axis is None:
        result = function(data.reshape(-1), 0, False)
        if keep_dims:
            result = np.asarray(result).reshape((1,) * data.ndim)
    else:
        axis = along
        result = function(data, axis, keep_dims)
    return _typed(result, value.dtype, reduced(marks, axis, keep_dims))


def reduce(input, axis, combine_fn, keep_dims=False, reduction_ordering=None):
    """Emulate tl.reduce."""
    axis, keep_dims = _unwrap(axis), bool(_unwrap(keep_dims))
    single = isinstance(input, tl.tensor)
    values = [fix(input)] if single else [fix(v) for v in input]
    name = _function_name(combine_fn)
    if len(values) == 1 and name in _REDUCERS:
        result = reduce_native(values[0], axis, keep_dims, _REDUCERS[name])
        return result if single else (result,)
    if len(values) == 2 and name in _ARG_REDUCERS and axis is not None:
        return _arg_reduce(values, axis, keep_dims, _ARG_REDUCERS[name])
    result = _tree_reduce(values, axis, keep_dims, combine_fn)
    return result[0] if single else result


def _arg_reduce(values, axis, keep_dims, function):
    data, index = values[0].data, values[1].data
    axis = _axis_of(axis, data.ndim)
    _charge("reduce", data)
    where = np.expand_dims(function(np.nan_to_num(data, nan=-np.inf) if data.dtype.kind == "f" else data, axis), axis)
    best, at = (np.take_along_axis(d, where, axis) for d in (data, index))
    if not keep_dims:
        best, at = best.squeeze(axis), at.squeeze(axis)
    marks = reduced(union(*[v.undefined for v in values]), axis, keep_dims)
    return _typed(best, values[0].dtype, marks), _typed(at, values[1].dtype, marks)


class _Combine:
    """A user's combine function, whose arguments the language defines as scalars.

    It is first called on one pair of elements, as the compiler calls it, so constructs that the compiler refuses are
    refused. A function that gives the same result on whole slices is called on slices; one that does not (it branches,
    or uses shapes) is called pair by pair.
    """

    def __init__(self, function, types):
        self.function, self.types, self.pairwise = function, types, None

    def __call__(self, left, right):
        """Apply the function to two lists of blocks of one shape; returns a list of blocks."""
        if self.pairwise is None:
            return self._first(left, right)
        return self._pairs(left, right) if self.pairwise else self._slices(left, right)

    def _first(self, left, right):
        expected = self._pair([v.data.flat[0] for v in left], [v.data.flat[0] for v in right])
        try:
            merged, self.pairwise = self._slices(left, right), False
            same = all(
                m.data.shape == v.data.shape and _same(m.data.flat[0], e) for m, v, e in zip(merged, left, expected)
            )
        except EmulatorError:
            raise
        except Exception:  # the function does what only scalars can
            same = False
        if same:
            return merged
        self.pairwise = True
        return self._pairs(left, right)

    def _slices(self, left, right):
        return self._typed(self.function(*left, *right))

    def _pair(self, left, right):
        operands = [wrap(np.asarray(x, held_dtype(t)), t) for x, t in zip((*left, *right), self.types * 2)]
        return [r.value for r in self._typed(self.function(*operands))]

    def _pairs(self, left, right):
        out = [np.empty_like(v.data) for v in left]
        columns = [v.data.reshape(-1) for v in (*left, *right)]
        for i, operands in enumerate(zip(*columns)):
            for block, value in zip(out, self._pair(operands[: len(left)], operands[len(left) :])):
                block.flat[i] = value
        marks = union(*[v.undefined for v in (*left, *right)])
        return [make(block, t, undefined=marks) for block, t in zip(out, self.types)]

    def _typed(self, result):
        results = (
            (result,) if isinstance(result, tl.tensor) or not isinstance(result, tuple | tl.tuple) else tuple(result)
        )
        return [_as_type(assign(r), t) for r, t in zip(results, self.types)]


def _same(a, b):
    return a == b or (a != a and b != b)


def _slices(values, selection, axis):
    at = (slice(None),) * axis + (selection,)
    return [rearranged(v, lambda lanes: lanes[at]) for v in values]


def _tree_reduce(values, axis, keep_dims, combine_fn):
    rank = values[0].data.ndim
    if axis is None:
        values, work_axis = [rearranged(v, np.ravel) for v in values], 0
    else:
        work_axis = _axis_of(axis, rank)
    combine = _Combine(combine_fn, [v.dtype for v in values])
    values = [rounded(v) for v in values]
    while (n := values[0].data.shape[work_axis]) > 1:
        half = n // 2
        merged = combine(_slices(values, slice(0, half), work_axis), _slices(values, slice(half, 2 * half), work_axis))
        if n % 2:
            last = _slices(values, slice(2 * half, n), work_axis)
            merged = [joined(parts, lambda lanes: np.concatenate(lanes, work_axis)) for parts in zip(merged, last)]
        values = merged

    def finish(lanes):
        if axis is None:
            return lanes.reshape((1,) * rank if keep_dims else ())
        return lanes if keep_dims else lanes.squeeze(work_axis)

    return tuple(rearranged(v, finish) for v in values)


def _as_type(value, dtype):
    value = fix(value)
    return value if value.dtype.name == dtype.name else value.to(dtype)


def associative_scan(input, axis, combine_fn, reverse=False):
    """Emulate tl.associative_scan."""
    axis, reverse = _unwrap(axis), bool(_unwrap(reverse))
    single = isinstance(input, tl.tensor)
    values = [fix(input)] if single else [fix(v) for v in input]
    axis = _axis_of(axis, values[0].data.ndim)
    if reverse:
        values = [rearranged(v, lambda lanes: np.flip(lanes, axis)) for v in values]
    name = _function_name(combine_fn)
    _charge("reduce", values[0].data)
    if len(values) == 1 and name in ("_sum_combine", "_prod_combine"):
        function = np.cumsum if name == "_sum_combine" else np.cumprod
        data, marks = values[0].data, values[0].undefined
        marks = None if marks is None else np.maximum.accumulate(marks, axis)
        results = [_typed(function(data, axis=axis, dtype=data.dtype), values[0].dtype, marks)]
    else:
        results = _step_scan(values, axis, combine_fn)
    if reverse:
        results = [rearranged(r, lambda lanes: np.flip(lanes, axis)) for r in results]
    return results[0] if single else tuple(results)


def _step_scan(values, axis, combine_fn):
    n, step = values[0].data.shape[axis], 1
    combine = _Combine(combine_fn, [v.dtype for v in values])
    values = [rounded(v) for v in values]
    while step < n:
        earlier = [
            _beside(v, slice(0, step), v, slice(0, n - step), axis) for v in values
        ]  # whole blocks: types have such shapes
        merged = combine(earlier, values)
        values = [_beside(v, slice(0, step), m, slice(step, n), axis) for v, m in zip(values, merged)]
        step *= 2
    return values


def _beside(left, from_left, right, from_right, axis):
    """Return a slice of one block and a slice of another, side by side along `axis`."""
    parts = [*_slices([left], from_left, axis), *_slices([right], from_right, axis)]
    return joined(parts, lambda lanes: np.concatenate(lanes, axis))


def map_elementwise(scalar_fn, *args, pack=1):
    """Emulate tl.map_elementwise: a scalar function over all elements, `pack` neighbors at a time.

    A function without branches does the same on whole blocks, so that is tried first; one that asks for the truth of a block is
    called element by element.
    """
    values = [Hooks.semantic.to_tensor(_unwrap(a)) for a in args]
    values = list(Hooks.semantic.broadcast_tensors(*values)) if len(values) > 1 else values
    shape, pack = values[0].data.shape, _unwrap(pack)
    columns = [rearranged(fix(v), np.ravel) for v in values]
    try:
        return _map_blocks(scalar_fn, columns, values, shape, pack)
    except UnsupportedConstruct:
        return _map_elements(scalar_fn, columns, values, shape, pack)


def _map_blocks(scalar_fn, columns, values, shape, pack):
    operands = [rearranged(c, lambda lanes, j=j: lanes[j::pack]) for c in columns for j in range(pack)]
    out = scalar_fn(*operands)
    single = isinstance(out, tl.tensor)
    results = []
    out = [assign(o) for o in ((out,) if single else out)]
    for k in range(0, len(out), pack):
        parts = [
            rearranged(p, lambda lanes: np.broadcast_to(lanes, columns[0].data.size // pack)) for p in out[k : k + pack]
        ]
        results.append(joined(parts, lambda lanes: np.stack(lanes, axis=-1).reshape(shape)))
    return results[0] if single or len(results) == 1 else tuple(results)


def _map_elements(scalar_fn, columns, values, shape, pack):
    results, single = None, False
    size = columns[0].data.size
    for start in range(0, size, pack):
        operands = [rearranged(c, lambda lanes, j=j: lanes[start + j]) for c in columns for j in range(pack)]
        out = scalar_fn(*operands)
        single = isinstance(out, tl.tensor)
        out = [assign(o) for o in ((out,) if single else out)]
        if results is None:
            results = [(np.empty(size, held_dtype(o.dtype)), o.dtype, np.zeros(size, MARK)) for o in out[::pack]]
        for k, o in enumerate(out):
            results[k // pack][0][start + k % pack] = o.value
            results[k // pack][2][start + k % pack] = 0 if o.undefined is None else o.undefined
    made = tuple(make(data.reshape(shape), dtype, None, some(marks.reshape(shape))) for data, dtype, marks in results)
    return made[0] if single or len(made) == 1 else made


# ---- Triton's jit-ed reductions, done directly


def _narrow_to_wide(value):
    """Return what tl.max and tl.min compute in: 32 bits at least."""
    bits, dtype = value.dtype.primitive_bitwidth, value.dtype
    if dtype.name == "bf16" or (bits < 32 and dtype.is_floating()):
        return value.to(tl.float32)
    return value.to(tl.int32) if bits < 32 else value


def _extremum(native, arg):
    def extremum(
        input,
        axis=None,
        return_indices=False,
        return_indices_tie_break_left=True,
        keep_dims=False,
        reduction_ordering=None,
    ):
        input = fix(input)
        axis, keep_dims = _unwrap(axis), bool(_unwrap(keep_dims))
        if not _unwrap(return_indices):
            return reduce_native(_narrow_to_wide(input), axis, keep_dims, native)
        if input.dtype.name == "bf16" and INDEXED_BF16_IN_FP32:
            input = input.to(tl.float32)
        if axis is None:
            raise TypeError("return_indices needs an axis")
        index = np.arange(input.data.shape[axis], dtype=np.int32)
        shape = [1] * input.data.ndim
        shape[axis] = -1
        index = make(np.broadcast_to(index.reshape(shape), input.data.shape), INT32)
        return _arg_reduce([input, index], axis, keep_dims, arg)

    return extremum


maximum_of, minimum_of = _extremum(_max_number, np.argmax), _extremum(_min_number, np.argmin)


def argmax(input, axis, tie_break_left=True, keep_dims=False, reduction_ordering=None):
    return maximum_of(input, axis, True, tie_break_left, keep_dims)[1]


def argmin(input, axis, tie_break_left=True, keep_dims=False, reduction_ordering=None):
    return minimum_of(input, axis, True, tie_break_left, keep_dims)[1]


def _accumulation_type(value, dtype):
    """Return the type tl.sum and tl.cumsum accumulate in."""
    if dtype is not None:
        return value.to(dtype)
    own = value.dtype
    if own.is_int() and own.int_bitwidth < 32:
        return value.to(tl.int32 if own.is_int_signed() else tl.uint32)
    return value.to(tl.float32) if own.name == "bf16" and SUMS_BF16_IN_FP32 else value


SUMS_BF16_IN_FP32 = hasattr(tl, "async_task")  # fbtriton promotes; upstream keeps bf16
INDEXED_BF16_IN_FP32 = hasattr(tl.core, "_promote_bfloat16_to_float32")  # until Triton 3.8


def sum_of(input, axis=None, keep_dims=False, dtype=None, reduction_ordering=None):
    value = _accumulation_type(fix(input), _unwrap(dtype))
    return reduce_native(value, _unwrap(axis), bool(_unwrap(keep_dims)), _sum)


def sort(x, dim=None, descending=False):
    """Emulate tl.sort along the last dimension."""
    return _sorted(x, None, dim, descending)


def topk(x, k, dim=None, descending=True):
    return _sorted(x, _unwrap(k), dim, descending)


def _sorted(x, k, dim, descending):
    x, dim, descending = fix(x), _unwrap(dim), bool(_unwrap(descending))
    if dim is not None and dim % x.data.ndim != x.data.ndim - 1:
        raise AssertionError("only minor dimension is currently supported")
    _charge("shuffle", x.data)
    data = np.sort(x.data, axis=-1)
    if descending:
        data = np.flip(data, -1)
    data = data if k is None else data[..., :k]
    row = reduced(x.undefined, -1, True)  # an undefined lane may belong anywhere in its row
    return make(data, x.dtype, None, None if row is None else np.broadcast_to(row, data.shape))


def flip(x, dim=None):
    x, dim = fix(x), _unwrap(dim)
    if dim is None:
        raise TypeError("tl.flip needs the dimension: the compiler cannot take its default, None")
    return rearranged(x, lambda lanes: np.flip(lanes, dim))


NATIVE = {
    "reduce": reduce,
    "associative_scan": associative_scan,
    "map_elementwise": map_elementwise,
    "max": maximum_of,
    "min": minimum_of,
    "argmax": argmax,
    "argmin": argmin,
    "sum": sum_of,
    "sort": sort,
    "topk": topk,
    "flip": flip,
}
