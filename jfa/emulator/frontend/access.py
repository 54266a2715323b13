"""tl.load, tl.store, the atomics and tensor descriptors, on the launch's `GlobalMemory`.

These replace Triton's versions whole (they differ between Triton versions in nothing that matters here), with Triton's checks kept.
A masked lane without `other` is undefined (see ..undefined); its data is NaN or a conspicuous integer. Undefined lanes
are reported here where a store, an address, a mask or a descriptor's offset uses one.
"""

import numpy as np
import triton.language as tl

from .. import dtypes
from ..context import context
from ..counting import Active, count_lanes, uncounted
from ..locations import here
from ..machine.running import pause
from ..memory import TensorMap
from ..undefined import MARK, check, mark, some, union
from . import carry, own_stores, threads
from .builder import Builder
from .tensor import BOOL, Hooks, Scalar, Tensor, canonical, fix, held_dtype, make, marks_of, rearranged, scalar, wrap

_LOUD = {n: int.from_bytes(bytes([0xBA, 0xAD, 0xC5, 0x5A] * (n // 4)), "big", signed=True) for n in (4, 8)} | {
    1: -0x46,
    2: -0x4553,
}


def garbage(dtype):
    """Return what undefined lanes of a type hold: NaN or an integer that leaps to the eye."""
    held = held_dtype(dtype)
    return held.type(np.nan) if held.kind == "f" else np.array(_LOUD[held.itemsize]).astype(held)[()]


def _value(x):
    """Return an argument that may be a constexpr, a Python number, a value or None."""
    if type(x) is tl.constexpr:
        x = x.value
    if x is None or isinstance(x, tl.tensor):
        return fix(x)
    return fix(Hooks.semantic.to_tensor(x))


def _pointee(pointer, what):
    if isinstance(pointer, tl.constexpr):
        raise TypeError(f"`tl.{what}` of a pointer under the annotation tl.constexpr: leave the annotation out")
    dtype = pointer.dtype
    if type(dtype) is not tl.pointer_type and not dtype.is_ptr():
        raise ValueError(f"Unsupported ptr type {pointer.type!r} in `tl.{what}`")
    return dtype.element_ty


def _check_scalar_operands(pointer, **operands):
    if type(pointer) is Scalar:
        for name, operand in operands.items():
            if type(operand) is Tensor:
                raise ValueError(f"{name} argument cannot be block type if pointer argument is not a block")


def _spread(value, shape, what):
    """Return `value`'s array broadcast to the pointers' shape (leading dimensions may be missing, as in Triton)."""
    data = value.data
    if data.shape == shape:
        return data
    try:
        return np.broadcast_to(data, shape)
    except ValueError:
        raise ValueError(
            f"Cannot make_shape_compatible: {what} has shape {list(data.shape)}, the pointers {list(shape)}"
        ) from None


def _addresses(pointer):
    return np.array(pointer.value, np.int64) if type(pointer) is Scalar else pointer.data


_EVICTION = ("", None, "evict_first", "evict_last")
_LOAD_CACHE, _STORE_CACHE = ("", None, ".ca", ".cg", ".cs", ".cv"), ("", None, ".wb", ".cg", ".cs", ".wt")
_HINTS = {"latency", "cache_policy", "is_volatile"}


def _check_hints(function, cache_modifier, allowed_cache, eviction_policy, hints):
    cache_modifier, eviction_policy = (
        tl.core._unwrap_if_constexpr(cache_modifier),
        tl.core._unwrap_if_constexpr(eviction_policy),
    )
    if cache_modifier not in allowed_cache:
        raise ValueError(f"Cache modifier {cache_modifier} not supported")
    if eviction_policy not in _EVICTION:
        raise ValueError(f"Eviction policy {eviction_policy} not supported")
    for name in hints:
        if name not in _HINTS:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")


def load(
    pointer,
    mask=None,
    other=None,
    boundary_check=(),
    padding_option="",
    cache_modifier="",
    eviction_policy="",
    volatile=False,
    latency=None,
    **hints,
):
    """Emulate tl.load."""
    if getattr(pointer, "__triton_block_ptr__", False):
        return _load_block_pointer(pointer, mask, other, boundary_check, padding_option)
    element = _pointee(pointer, "load")
    if cache_modifier or eviction_policy or hints:
        _check_hints("load", cache_modifier, _LOAD_CACHE, eviction_policy, hints)
    mask, other = _value(tl.core._unwrap_if_constexpr(mask)), _value(other)
    if mask is None and other is not None:
        raise ValueError("`other` cannot be provided without `mask`")
    if padding_option or boundary_check:
        raise ValueError(
            "`padding_option` or `boundary_check` argument is not supported for loading a tensor of pointers "
            "or a scalar; use block pointers (made by `make_block_ptr`) instead"
        )
    _check_scalar_operands(pointer, Mask=mask, Other=other)
    mask, lost = _reachable(pointer, mask)
    addresses, name = _addresses(pointer), _stored_name(element)
    if context.launch.charge:
        context.launch.charge("load", addresses.size * dtypes.itemsize(name))
    if volatile:
        pause()
    if Active.counts is not None:
        Active.counts.load(addresses.size if mask is None else np.count_nonzero(_spread(mask, addresses.shape, "mask")))
    if mask is None:
        own_stores.check(pointer.allocation, addresses, dtypes.itemsize(name))
        stored = context.launch.memory.read(
            addresses if addresses.ndim else addresses.reshape(1), name, pointer.allocation
        )
        return _loaded(stored.reshape(addresses.shape), element)
    return _masked_load(pointer, addresses, element, mask, other, lost)


def _reachable(pointer, mask):
    """Return (mask of the lanes that can be accessed, marks of those that cannot): an undefined mask or address is reported."""
    if not context.launch.has_undefined or (pointer.undefined is None and marks_of(mask) is None):
        return mask, None
    shape = _addresses(pointer).shape
    active = np.ones(shape, np.bool_) if mask is None else _spread(_as_mask(mask), shape, "mask")
    lost = np.zeros(shape, MARK)
    if marks_of(mask) is not None:
        check(mask.undefined, "mask")
        lost = np.maximum(lost, mask.undefined)
    if pointer.undefined is not None:
        reached = np.where(active & (lost == 0), pointer.undefined, MARK.type(0))
        check(reached, "address")
        lost = np.maximum(lost, reached)
    if some(lost) is None:
        return mask, None
    return wrap(active & (lost == 0), BOOL), lost


def _stored_name(element):
    """Return the number format of what a pointer points to: pointers lie in memory as integers."""
    return "int64" if element.is_ptr() else element.name


def _masked_load(pointer, addresses, element, mask, other, lost=None):
    """Return `lost`: marks of lanes that an undefined mask or address keeps from being loaded."""
    name = _stored_name(element)
    if other is not None:
        other = other.to(element) if other.dtype.name != element.name else other
    active = _spread(_as_mask(mask), addresses.shape, "mask")
    own_stores.check(pointer.allocation, addresses, dtypes.itemsize(name), active)
    if active.all():
        flat = addresses if addresses.ndim else addresses.reshape(1)
        return _loaded(context.launch.memory.read(flat, name, pointer.allocation).reshape(addresses.shape), element)
    marks = None
    if other is not None:
        fill, marks = _spread(other, addresses.shape, "other"), marks_of(other)
    elif context.launch.follows_undefined:
        fill, marks = garbage(element), mark("masked load", here())
    else:
        fill = held_dtype(element).type(0)
    marks = union(lost, None if marks is None else np.where(active, MARK.type(0), marks))
    result = np.empty(addresses.shape, held_dtype(element))
    result[...] = fill
    if active.any():
        result[active] = dtypes.decode(context.launch.memory.read(addresses[active], name, pointer.allocation), name)
    return wrap(result, element if element.is_ptr() else canonical(element), undefined=marks)


def _loaded(stored, element):
    return wrap(dtypes.decode(stored, _stored_name(element)), element if element.is_ptr() else canonical(element))


def _as_mask(mask):
    if mask.dtype is not BOOL:
        raise ValueError("Mask must have boolean scalar type")
    return mask


def store(pointer, value, mask=None, boundary_check=(), cache_modifier="", eviction_policy="", **hints):
    """Emulate tl.store."""
    if getattr(pointer, "__triton_block_ptr__", False):
        return _store_block_pointer(pointer, value, mask, boundary_check)
    element = _pointee(pointer, "store")
    if cache_modifier or eviction_policy or hints:
        _check_hints("store", cache_modifier, _STORE_CACHE, eviction_policy, hints)
    if pointer.dtype.is_const():
        raise ValueError("Cannot store to a constant pointer")
    if boundary_check:
        raise ValueError(
            "`boundary_check` argument is not supported for storing a tensor of pointers or storing a scalar; "
            "use block pointers (made by `make_block_ptr`) instead"
        )
    value, mask = _value(value), _value(tl.core._unwrap_if_constexpr(mask))
    _check_scalar_operands(pointer, Value=value, Mask=mask)
    addresses = _addresses(pointer)
    _check_pointer_shape(pointer, value, mask)
    if value.dtype.name != element.name:
        value = value.to(element)
    mask, _ = _reachable(pointer, mask)
    data, name = _spread(value, addresses.shape, "value"), _stored_name(element)
    if context.launch.charge:
        context.launch.charge("store", addresses.size * dtypes.itemsize(name))
    active = None if mask is None else _spread(_as_mask(mask), addresses.shape, "mask")
    active, shape = threads.active(active, addresses.shape), addresses.shape
    if value.undefined is not None:
        check_lanes(value.undefined, active)
    if active is not None and not active.all():
        addresses, data = addresses[active], data[active]
    own_stores.note(pointer.allocation, addresses, dtypes.itemsize(name), shape, active)
    if Active.counts is not None:
        Active.counts.store(addresses.size)
    if not addresses.ndim:
        addresses, data = addresses.reshape(1), data.reshape(1)
    context.launch.memory.write(addresses, dtypes.encode(data, name), name, pointer.allocation)
    return None


def _check_pointer_shape(pointer, *operands):
    shape = pointer.data.shape if type(pointer) is Tensor else ()
    full = np.broadcast_shapes(shape, *[o.data.shape for o in operands if o is not None])
    if shape != full:
        raise ValueError(f"Expected pointer argument to have shape {list(full)} but got {list(shape)}")


def check_lanes(marks, active=None, use="store"):
    """Report undefined lanes among the active ones (None: all)."""
    if marks is not None:
        check(marks if active is None else np.where(active, marks, MARK.type(0)), use)


def check_box(tensor_map, offsets, marks, where=None):
    """Report undefined lanes of a box that lie inside the tensor it is stored to."""
    inside = None if some(marks) is None else tensor_map.inside(offsets)
    if inside is not None:
        check(marks.reshape(tensor_map.block_shape)[inside], "store", where)


def _materialized(pointer, boundary_check):
    """Return a block pointer's pointers and mask. A checked side counts as one comparison per row or column, as a mask does."""
    with uncounted("compares"):
        pointers, mask = pointer._materialize(boundary_check, _semantic=Hooks.semantic)
    sides = boundary_check if isinstance(boundary_check, tuple | list | tl.tuple) else (boundary_check,)
    for side in sides if mask is not None else ():
        length = tl.core._unwrap_if_constexpr(pointer.block_shape[tl.core._unwrap_if_constexpr(side)])
        count_lanes("compares", np.empty(length, np.bool_))
    return pointers, mask


def _load_block_pointer(pointer, mask, other, boundary_check, padding_option):
    if mask is not None or other is not None:
        raise ValueError("`mask` and `other` arguments cannot be specified for loading block pointers")
    padding_option = tl.core._unwrap_if_constexpr(padding_option) or ""
    if padding_option not in ("", "zero", "nan"):
        raise ValueError(f"Padding option {padding_option} not supported")
    if padding_option == "nan" and pointer.base.dtype.element_ty.is_int():
        raise ValueError("Padding option `nan` is not supported for integer block pointers")
    pointers, mask = _materialized(pointer, boundary_check)
    fill = {"": None, "zero": 0, "nan": float("nan")}[padding_option]
    return load(fix(pointers), mask, None if mask is None else fill)


def _store_block_pointer(pointer, value, mask, boundary_check):
    if mask is not None:
        raise ValueError("`mask` argument cannot be specified for storing block pointers")
    pointers, mask = _materialized(pointer, boundary_check)
    return store(fix(pointers), value, mask)


_BLOCK_POINTER = getattr(tl.core, "_block_ptr", None)  # a class of its own in some versions of Triton, else a tensor

if _BLOCK_POINTER is not None:

    class BlockPointer(_BLOCK_POINTER):
        """A block pointer whose methods run here."""

        @property
        def compiled_type(self):
            """What must not change from one iteration of a loop to the next."""
            return f"block_ptr<{self.base.type}, {self.block_shape}, {self.order}>"

        def advance(self, offsets):
            return advance(self, offsets)

        def load(self, mask=None, other=None, boundary_check=(), padding_option="", **hints):
            return load(self, mask, other, boundary_check, padding_option, **hints)

        def store(self, value, mask=None, boundary_check=(), **hints):
            return store(self, value, mask, boundary_check, **hints)

    def _block_pointer(made):
        object.__setattr__(made, "__class__", BlockPointer)
        return made

    def make_block_ptr(base, shape, strides, offsets, block_shape, order):
        """Emulate tl.make_block_ptr."""
        raw = tl.make_block_ptr.__wrapped__
        return _block_pointer(raw(base, shape, strides, offsets, block_shape, order, _semantic=Hooks.semantic))

    def advance(base, offsets):
        """Emulate tl.advance."""
        if not isinstance(base, _BLOCK_POINTER):
            raise ValueError("`tl.advance` only supports block pointers created by `tl.make_block_ptr`")
        return _block_pointer(_BLOCK_POINTER.advance(base, offsets, _semantic=Hooks.semantic))


# ---- atomics


_COMBINE = {
    "add": lambda old, new: old + new,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "xchg": lambda old, new: new,
}


_BITWISE = ("and", "or", "xor")


def _check_atomic(pointer, op):
    element = _pointee(pointer, f"atomic_{op}")
    if pointer.dtype.is_const():
        raise ValueError("Cannot store to a constant pointer")
    name = element.name
    if name in ("fp16", "bf16") and op != "add":
        raise ValueError(f"atomic_{op} does not support {name}")
    if name in ("int16", "uint16") or element.primitive_bitwidth < 16:
        raise ValueError(f"atomic_{op} does not support {name}")
    return element


def _check_constant_mask(pointer, op, element):
    """Refuse mask=True or False where the compiler does: everywhere but in a maximum or minimum of one floating-point number."""
    if pointer.type.is_block() or op not in ("max", "min") or not element.is_floating():
        raise AttributeError(
            f"the compiler cannot take a constant for the mask of atomic_{op}: leave it out, or write a comparison"
        )


def _on_bits(combine):
    """Return `combine` of integers for floating-point values: on their bits."""

    def combined(old, new):
        bits = np.dtype(f"i{old.dtype.itemsize}")
        return combine(old.view(bits), new.astype(old.dtype, copy=False).view(bits)).view(old.dtype)

    return combined


def _atomic(op):
    combine = _COMBINE[op]

    def atomic(pointer, val, mask=None, sem=None, scope=None, **_):
        element = _check_atomic(pointer, op)
        if isinstance(tl.core._unwrap_if_constexpr(mask), bool):
            _check_constant_mask(pointer, op, element)
        val, mask = _value(val), _value(mask)
        Hooks.semantic._str_to_sem(tl.core._unwrap_if_constexpr(sem))
        Hooks.semantic._str_to_scope(tl.core._unwrap_if_constexpr(scope))
        _check_scalar_operands(pointer, Value=val, Mask=mask)
        _check_pointer_shape(pointer, val, mask)
        val = val.to(element)
        merge = _on_bits(combine) if op in _BITWISE and element.is_floating() else combine
        return _combine_lanes(pointer, element, val, mask, lambda old, new, lanes: merge(old, new))

    atomic.__name__ = f"atomic_{op}"
    return atomic


def _combine_lanes(pointer, element, val, mask, combine):
    own_stores.ordered()
    pause()
    mask, lost = _reachable(pointer, mask)
    addresses = _addresses(pointer)
    shape = addresses.shape
    data = _spread(val, shape, "value").reshape(-1)
    flat = addresses.reshape(-1)
    if context.launch.charge:
        context.launch.charge("atomic", flat.size)
    active = None if mask is None else _spread(_as_mask(mask), shape, "mask")
    check_lanes(val.undefined, active)
    if Active.counts is not None:
        Active.counts.atomic(flat.size if mask is None else np.count_nonzero(active))
    if active is None:
        old = context.launch.memory.atomic(flat, data, element.name, combine, pointer.allocation)
        return wrap(old.reshape(shape), canonical(element))
    chosen = active.reshape(-1)
    old = np.zeros(flat.shape, held_dtype(element))
    if chosen.any():
        old[chosen] = context.launch.memory.atomic(
            flat[chosen], data[chosen], element.name, combine, pointer.allocation
        )
    if not context.launch.follows_undefined or chosen.all():
        return wrap(old.reshape(shape), canonical(element))
    marks = union(lost, np.where(active, MARK.type(0), mark("masked atomic", here())))
    return wrap(old.reshape(shape), canonical(element), undefined=marks)


def atomic_cas(pointer, cmp, val, sem=None, scope=None, **_):
    """Emulate tl.atomic_cas: store `val` where memory equals `cmp`; return the old values."""
    element = _pointee(pointer, "atomic_cas")
    if element.primitive_bitwidth not in (16, 32, 64):
        raise ValueError("atomic_cas only supports elements with width {16, 32, 64}")
    cmp, val = _value(cmp).to(element), _value(val).to(element)
    check(cmp.undefined, "compare")
    expected = _spread(cmp, _addresses(pointer).shape, "cmp").reshape(-1)
    return _combine_lanes(
        pointer, element, val, None, lambda old, new, lanes: np.where(old == expected[lanes], new, old)
    )


def atomic_load(pointer, mask=None, sem=None, scope=None, **_):
    """Emulate tl.atomic_load (Triton 3.9): a load that acquires."""
    _synchronise(pointer)
    return load(pointer, mask, None if mask is None else 0)


def atomic_store(pointer, value, mask=None, sem=None, scope=None, **_):
    """Emulate tl.atomic_store (Triton 3.9): a store that releases."""
    element = _pointee(pointer, "atomic_store")
    value = _value(value).to(element)
    _combine_lanes(pointer, element, value, _value(mask), lambda old, new, lanes: new)


def atomic_poll(pointer, expected_value, sem=None, scope=None, timeout_ns=None, **_):
    """Emulate tl.atomic_poll (Triton 3.9): wait until memory holds the expected value."""
    timeout_ns = tl.core._unwrap_if_constexpr(timeout_ns)
    expected = _value(expected_value)
    check(expected.undefined, "compare")
    while True:
        seen = load(pointer) == expected
        if timeout_ns is not None or seen.data.all() or context.launch.task is None:
            _synchronise(pointer)
            return seen
        pause()


def _synchronise(pointer):
    pause()
    check(pointer.undefined, "address")
    for address in np.unique(_addresses(pointer))[:1024]:
        context.launch.memory.synchronise(int(address))


FUNCTIONS = {f"atomic_{op}": _atomic(op) for op in _COMBINE}
FUNCTIONS |= {
    "load": load,
    "store": store,
    "atomic_cas": atomic_cas,
    "atomic_load": atomic_load,
    "atomic_store": atomic_store,
    "atomic_poll": atomic_poll,
}
if _BLOCK_POINTER is not None:
    FUNCTIONS |= {"make_block_ptr": make_block_ptr, "advance": advance}


@carry.carrying_builder
class MemoryBuilder(Builder):
    """The builder's memory operations, for builtins that call them through Triton's semantic layer."""

    def origin(self, addresses):
        if context.launch.memory is None or not addresses.size:
            return None
        found = context.launch.memory.find_live(int(addresses.min()))
        return found if found is not None and int(addresses.max()) < found.hi else None

    @carry.carries(carry.itself)
    def create_load(self, pointer, *_):
        return load(pointer)

    @carry.carries(carry.itself)
    def create_masked_load(self, pointer, mask, other, *_):
        return load(pointer, mask, other)

    @carry.carries(carry.itself)
    def create_store(self, pointer, value, *_):
        return store(pointer, value)

    @carry.carries(carry.itself)
    def create_masked_store(self, pointer, value, mask, *_):
        return store(pointer, value, mask)

    @carry.carries(carry.itself)
    def create_atomic_rmw(self, op, pointer, value, mask, *_):
        kind = op.name.lower().removeprefix("f").removeprefix("u")
        return FUNCTIONS[f"atomic_{kind}"](pointer, value, mask)

    @carry.carries(carry.itself)
    def create_atomic_cas(self, pointer, expected, value, *_):
        return atomic_cas(pointer, expected, value)

    @carry.carries(carry.itself)
    def create_descriptor_load(self, descriptor, offsets, *_):
        return descriptor.load(offsets)

    @carry.carries(carry.itself)
    def create_descriptor_store(self, descriptor, value, offsets, *_):
        return descriptor.store(offsets, value)

    @carry.carries(carry.itself)
    def create_grid_dependency_wait(self, *_):
        """Do nothing for programmatic dependent launch: launches are one after the other here."""

    create_grid_dependency_launch_dependents = create_grid_dependency_wait


# ---- tensor descriptors


class Descriptor(tl.tensor_descriptor):
    """A tensor descriptor value: `map` is the TensorMap, `block_shape` plain ints, `shape` and `strides` of scalars."""

    def __init__(self, tensor_map, dtype, shape, strides, name=None):
        self.map, self._dtype, self.name = tensor_map, canonical(dtype), name
        self.shape, self.strides = tl.tuple(shape), tl.tuple(strides)
        self.type = tl.core.tensor_descriptor_base_type(tl.block_type(dtype, list(tensor_map.block_shape)))

    @property
    def handle(self):
        return self

    @property
    def compiled_type(self):
        """What must not change from one iteration of a loop to the next."""
        return f"tensor_descriptor<{self.block_shape}, {self._dtype}>"

    @property
    def dtype(self):
        return self._dtype

    @property
    def block_shape(self):
        return list(self.map.block_shape)

    def _offsets(self, offsets):
        offsets = tl.core._unwrap_if_constexpr(offsets)
        if len(offsets) != len(self.map.block_shape):
            raise ValueError(f"expected {len(self.map.block_shape)} offsets, but got {len(offsets)}")
        values, undefined = [], False
        for offset in offsets:
            offset = tl.core._unwrap_if_constexpr(offset)
            offset = _whole(offset, "offset")
            if isinstance(offset, tl.tensor):
                if offset.dtype.name in ("int64", "uint64"):
                    raise ValueError("descriptor offsets must be 32 bit: add a `.to(tl.int32)`")
                undefined |= check(fix(offset).undefined, "offset")
                offset = fix(offset).data.reshape(-1)[0].item()
            values.append(int(offset))
        if undefined:  # reported: what it happens to hold is no second mistake
            return [0] * len(values)
        if values[-1] * self.map.stored.itemsize % 16:
            raise ValueError(f"descriptor offset {values[-1]} in the last dimension is not a multiple of 16 bytes")
        return values

    def load(self, offsets, cache_modifier="", eviction_policy="", latency=None, _semantic=None, **_):
        box = self.map.load(self._offsets(offsets))
        if context.launch.charge:
            context.launch.charge("load", box.nbytes)
        return make(dtypes.decode(box, self._dtype.name), self._dtype)

    def _box(self, value, offsets):
        """Return a value to store at these offsets, in stored form."""
        value = _value(value)
        if list(value.data.shape) != list(self.map.block_shape):
            raise ValueError(
                f"the value's shape {list(value.data.shape)} is not the descriptor's block shape {self.block_shape}"
            )
        if value.dtype.name.removeprefix("u") != self._dtype.name.removeprefix("u"):
            raise TypeError(
                f"the value is {value.dtype}, the descriptor's blocks are {self._dtype}: add .to({self._dtype})"
            )
        value = value.to(self._dtype)
        check_box(self.map, offsets, value.undefined)
        return dtypes.encode(value.data, self._dtype.name)

    def store(self, offsets, value, store_reduce="", _semantic=None, **_):
        kind = tl.core._unwrap_if_constexpr(store_reduce)
        if kind:
            return self._reduce(offsets, value, kind)
        at = self._offsets(offsets)
        stored = self._box(value, at)
        if context.launch.charge:
            context.launch.charge("store", stored.nbytes)
        self.map.store(at, stored)

    _REDUCIBLE = {
        "add": {"uint32", "int32", "uint64", "fp32", "fp16", "bf16"},
        "min": {"uint32", "int32", "uint64", "int64", "fp16", "bf16"},
        "and": {"uint32", "int32", "uint64", "int64"},
    }

    def _reduce(self, offsets, value, kind):
        allowed = self._REDUCIBLE[{"max": "min", "or": "and", "xor": "and"}.get(kind, kind)]
        if self._dtype.name not in allowed:
            raise TypeError(f"Unsupported dtype {self._dtype} for a descriptor's atomic {kind}")
        at = self._offsets(offsets)
        stored = self._box(value, at)
        if context.launch.charge:
            context.launch.charge("atomic", stored.nbytes)
        self.map.reduce(at, stored, kind)

    def gather(self, x_offsets, y_offset, _semantic=None):
        rows = self._rows(x_offsets)
        y_offset = fix(_value(_whole(y_offset, "offset")))
        return make(np.concatenate([self.load([int(x), y_offset]).data for x in rows]), self._dtype)

    def scatter(self, value, x_offsets, y_offset, _semantic=None):
        y_offset = fix(_value(_whole(y_offset, "offset")))
        value, rows = _value(value), self._rows(x_offsets)
        if list(value.data.shape[:1]) != [rows.size]:
            raise ValueError(f"the value has shape {list(value.data.shape)}, there are {rows.size} row offsets")
        for i, x in enumerate(rows):
            self.store([int(x), y_offset], rearranged(value, lambda lanes, i=i: lanes[i : i + 1]))

    def _rows(self, x_offsets):
        if len(self.map.block_shape) != 2 or self.map.block_shape[0] != 1:
            raise ValueError(f"descriptor must be 2D with a block of 1 row, but got {self.block_shape}")
        x_offsets = _value(x_offsets)
        check(x_offsets.undefined, "offset")
        rows = x_offsets.data
        if rows.dtype.itemsize != 4 or rows.dtype.kind not in "iu":
            raise TypeError(
                f"descriptor gather and scatter need offsets of 32 bits, not {x_offsets.dtype}: add .to(tl.int32)"
            )
        if rows.ndim != 1 or rows.size < 8:
            raise ValueError(
                f"descriptor gather and scatter need 1D offsets of at least 8 rows, but got {list(rows.shape)}"
            )
        columns = 32 // self._dtype.primitive_bitwidth * 8
        if self.map.block_shape[1] < columns:
            raise ValueError(
                f"descriptor gather of {self._dtype} must have at least {columns} columns, got {self.map.block_shape[1]}"
            )
        return rows


def _whole(number, what):
    """Check a descriptor's extent, stride or offset: an integer, or a scalar that the kernel computes."""
    number = tl.core._unwrap_if_constexpr(number)
    if type(number) is Tensor:
        raise AssertionError(f"Expected a scalar in shape/strides/offsets, the {what} is {number.type}")
    if isinstance(number, float) or isinstance(number, tl.tensor) and not number.dtype.is_int():
        raise TypeError(f"a descriptor's {what} is an integer, not {number!r}")
    return number


def _atomic_member(kind):
    def member(self, offsets, value, _semantic=None):
        return self._reduce(offsets, value, kind)

    return member


for _kind in ("add", "min", "max", "and", "or", "xor"):
    setattr(Descriptor, f"atomic_{_kind}", _atomic_member(_kind))


def check_descriptor(address, shape, strides, block_shape, itemsize, what="tensor descriptor"):
    """Check the rules that hardware and Triton's front end have for a TMA descriptor; ValueError names the broken one."""
    rank = len(block_shape)
    if not 1 <= rank <= 5:
        raise ValueError(f"Expected 1 <= ndim <= 5 but got {rank} dimensions")
    if len(shape) != rank or len(strides) != rank:
        raise ValueError(f"Expected {rank} extents and strides but got {len(shape)} and {len(strides)}")
    if block_shape[-1] * itemsize < 16:
        raise ValueError(
            "Descriptor block shape must have at least 16 bytes in the last dimension, but got "
            f"{block_shape[-1]} * {itemsize} = {block_shape[-1] * itemsize} bytes"
        )
    if strides[-1] != 1:
        raise ValueError(f"Tensor descriptor last dim must be 1 but got {strides[-1]}")
    if address % 16:
        raise ValueError(f"{what}: the base address must be a multiple of 16 bytes")
    for axis, stride in enumerate(strides[:-1]):
        if stride * itemsize % 16:
            raise ValueError(
                f"{what}: stride {stride} of dimension {axis} is {stride * itemsize} bytes, no multiple of 16"
            )


def make_tensor_descriptor(base, shape, strides, block_shape, padding_option="zero", **_):
    """Emulate tl.make_tensor_descriptor."""
    unwrap = tl.core._unwrap_if_constexpr
    base, padding = fix(base), unwrap(padding_option) or "zero"
    if type(base) is not Scalar or not base.dtype.is_ptr():
        raise TypeError("the base of a tensor descriptor must be a scalar pointer")
    block_shape = [int(unwrap(b)) for b in unwrap(block_shape)]
    for extent in block_shape:
        if extent & (extent - 1) or extent <= 0:
            raise ValueError(f"Shape element must be a power of 2, got {extent}")
    if isinstance(unwrap(unwrap(strides)[-1]), tl.tensor):
        raise ValueError("Tensor descriptor last dim must be 1 but got a run-time value: write the constant 1")
    shape = [_value(_whole(s, "extent")) for s in unwrap(shape)]
    strides = [_value(_whole(s, "stride")) for s in unwrap(strides)]
    element = base.dtype.element_ty
    if element.name == "int1":
        raise ValueError("a tensor descriptor has no blocks of int1")
    if padding not in ("zero", "nan"):
        raise ValueError(f"Padding option {padding} not supported")
    if element.is_int() and padding == "nan":
        raise ValueError("Padding option `nan` is not supported for integer blocks")
    for value in (base, *shape, *strides):
        check(value.undefined, "address" if value is base else "offset")
    extents, steps = [int(s.value) for s in shape], [int(s.value) for s in strides]
    check_descriptor(base.value, extents, steps, block_shape, dtypes.itemsize(element.name))
    tensor_map = TensorMap(
        context.launch.memory, base.value, extents, steps, block_shape, element.name, padding, base.allocation
    )
    return Descriptor(tensor_map, element, [scalar(e, tl.int32) for e in extents], [scalar(s, tl.int64) for s in steps])


def load_tensor_descriptor(desc, offsets, *args, **kwargs):
    return desc.load(offsets, *args, **kwargs)


def store_tensor_descriptor(desc, offsets, value, *args, **kwargs):
    return desc.store(offsets, value, *args, **kwargs)


FUNCTIONS |= {
    "make_tensor_descriptor": make_tensor_descriptor,
    "load_tensor_descriptor": load_tensor_descriptor,
    "store_tensor_descriptor": store_tensor_descriptor,
    "_experimental_descriptor_load": lambda desc, offsets, shape=None, dtype=None: desc.load(offsets),
    "_experimental_descriptor_store": lambda desc, value, offsets, store_reduce="": desc.store(
        offsets, value, store_reduce
    ),
}
