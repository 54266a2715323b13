"""Buffers in shared and tensor memory: allocation, views, aliasing, loads and stores."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import triton.language as tl

from .. import dtypes, errors
from ..context import context
from ..counting import Active
from ..frontend import values
from ..frontend.carry import carries, itself
from ..frontend.extension import Extension
from ..locations import here, show
from ..machine import limits, smem_view, sync, tmem_columns, tmem_view
from ..machine.storage import Storage
from ..undefined import MARK, check, mark, union
from .api import LEFT_OUT, Value, api, begin, constant, integer, integers, plain, running, wants_constants
from .types import layout_encoding, reuse_group_type, storage_kind

if TYPE_CHECKING:
    from ..locations import Where
    from ..machine.storage import View
    from ..machine.tasks import CTA, Task


Element: TypeAlias = "buffered_tensor | reuse_group"

_ALIGN = 128  # bytes between two SMEM allocations
_SLICES = ("slice", "columns")  # what views that show a part of each row or column are remembered under
_SWIZZLE_LEAST = 16  # bytes of a row that a tile in SMEM of two or more dimensions must have to be read by TMA or MMA
_SWIZZLE_ROWS = 8  # of a tile in SMEM: the pattern of its swizzle, which a slice must not cut


# ---------------------------------------------------------------- storage shared by allocations


class AliasSet:
    """The allocations that share one piece of storage. Its size is known once the kernel first uses a member."""

    def __init__(self, cta: CTA, space: str, name: str, fixed: int | None = None) -> None:
        self.cta, self.space, self.name, self.fixed = cta, space, name, fixed
        self.members: list[Allocation] = []
        self._storage: Storage | None = None
        self.overlap: reuse_group | None = None
        cta.alias_sets.append(self)

    @property
    def size(self) -> int:
        """Bytes (SMEM) or 4-byte columns (TMEM)."""
        return max([m.end for m in self.members] + [self.fixed or 0])

    def storage(self) -> Storage:
        if self._storage is None:
            machine = self.cta.machine
            size = self.size if self.space == "smem" else self.size * 4 * limits.TMEM_LANES
            self._storage = Storage(self.cta, self.space, size, self.name, machine.options.poison, machine.watch)
        return self._storage

    def grew(self, member: Allocation) -> None:
        if self._storage is not None and member.end > self.size_of_storage(self._storage):
            raise errors.NotSupported(
                f"{member.name} is larger than the storage it reuses, which is in use already; allocate it before the first access"
            )

    def size_of_storage(self, storage: Storage) -> int:
        return storage.nbytes if self.space == "smem" else storage.nbytes // (4 * limits.TMEM_LANES)


class Allocation:
    """The result of a local_alloc: `num` tiles of `shape`, tile i at offset(i) of the alias set's storage.

    `fields` is its path in an aggregate, which the kernel may hold in `variable`.
    """

    fields: tuple[str, ...] = ()
    variable: str = ""

    def __init__(self, cta: CTA, aliases: AliasSet, shape: Any, dtype: Any, num: int, name: str) -> None:
        self.cta, self.aliases, self.shape, self.dtype, self.num, self.name = (
            cta,
            aliases,
            tuple(shape),
            dtype,
            num,
            name,
        )
        self.space = aliases.space
        self.dtype_name = dtype.name
        self.mode = self._first_mode()
        self.kind_is_constexpr = False  # whether its storage was given as a constexpr
        self.reuses_view = ""  # the name of the view that it reuses, which it must not
        self.swizzled_as: tuple[Allocation, int] = (self, 0)  # see _swizzle_of
        self.scale, self.shift, self.group = 1, 0, 1  # see offset()
        self.scales_stored: Where | None = None  # where 8-bit integers were first stored in tensor memory
        self.scales_taken = False  # whether a product took them
        self.tiles: dict[int, buffered_tensor] = {}
        aliases.members.append(self)
        aliases.grew(self)
        self.number = sync.allocated(cta, self)

    def _first_mode(self) -> str:
        if self.space == "smem":
            return "plain"
        if self.dtype_name in _SCALES:
            return "scales"
        pair = len(self.cta.cluster.ctas) > 1 and self.shape[0] == 64 and self.dtype_name == "fp32"
        return "half" if pair else "plain"

    @property
    def unit(self) -> int:
        """Bytes or columns of one tile."""
        size = dtypes.itemsize(self.dtype_name)
        return math.prod(self.shape) * size if self.space == "smem" else tmem_columns(self.shape, size, self.mode)

    def offset(self, index: int) -> int:
        """Return where tile `index` lies. set_buffer_overlap spreads tiles: slot = scale * index + shift + index % group, in
        tiles of `unit`."""
        if self.scale == 1 and self.shift == 0:
            return self.unit * index
        return self.unit * (self.scale * index + self.shift + index % self.group)

    @property
    def end(self) -> int:
        num = max(1, self.num)
        return max(self.offset(i) for i in range(max(0, num - self.group), num)) + self.unit

    def tile(self, index: int) -> buffered_tensor:
        tile = self.tiles.get(index)
        if tile is None:
            if not 0 <= index < self.num:
                raise errors.BufferIndexError(
                    f"{self.name}[{index}]: there are {self.num} buffers", [f"at {show(here())}"], where=here()
                )
            _check_reuse(self)
            tile = self.tiles[index] = buffered_tensor(
                self, (index,), self.shape, self.dtype, 0, f"{self.name}[{index}]"
            )
        return tile

    def view(self, index: int) -> View:
        storage, dtype = self.aliases.storage(), dtypes.stored(self.dtype_name)
        if self.space == "smem":
            return smem_view(storage, self.offset(index), self.shape, dtype)
        return tmem_view(storage, self.offset(index), self.shape, dtype, self.mode)

    def set_mode(self, mode: str) -> None:
        """Move the contents: a two-CTA MMA with 64 rows keeps its accumulator in another layout."""
        if mode == self.mode:
            return
        if len(self.aliases.members) == 1 or self.aliases.overlap is None:
            needed = max(1, self.num) * tmem_columns(self.shape, dtypes.itemsize(self.dtype_name), mode)
            storage = self.aliases._storage
            if storage is not None and needed > self.aliases.size_of_storage(storage):
                raise errors.NotSupported(f"{self.name} is used by one-CTA and two-CTA MMAs")
        contents: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        if self.aliases._storage is not None:
            contents = {i: (self.view(i).read().copy(), self.view(i).undefined) for i in self.tiles}
        self.mode = mode
        for tile in self.tiles.values():
            tile.forget()
        for i, (data, marks) in contents.items():
            self.view(i).write(data, marks)


class _Type:
    """The value of `buffer.type`."""

    def __init__(self, buffer: buffered_tensor) -> None:
        self.shape, self.scalar, self.element_ty = list(buffer.shape), buffer.dtype, buffer.dtype
        self.num, self.storage, self.layout = buffer.num, buffer.storage, None

    def is_block(self) -> bool:
        return True


class buffered_tensor(tl.core.base_value):
    """A tile (num == 0) or an array of `num` tiles, in SMEM or TMEM. `path`: its indices and slices in its
    allocation."""

    __slots__ = ("allocation", "path", "shape", "dtype", "num", "name", "part", "_view", "_children")

    def __init__(self, allocation: Allocation, path: tuple, shape: Any, dtype: Any, num: int, name: str) -> None:
        self.allocation, self.path, self.shape, self.dtype, self.num, self.name = (
            allocation,
            path,
            list(shape),
            dtype,
            num,
            name,
        )
        self.part = False  # whether its strides are those of a larger tile
        self._view: View | None = None
        self._children: dict[tuple, buffered_tensor] = {}

    def __getitem__(self, index: Value) -> buffered_tensor:
        return local_view(self, index)

    @property
    def storage(self) -> storage_kind:
        return storage_kind.smem if self.allocation.space == "smem" else storage_kind.tmem

    @property
    def space(self) -> str:
        return self.allocation.space

    @property
    def type(self) -> _Type:
        return _Type(self)

    @property
    def whole_array(self) -> Allocation | None:
        """What an aggregate that holds this names; None for a part of it."""
        return self.allocation if self.num and not self.path else None

    def rename(self, name: str) -> None:
        """Give the array, its tiles, and storage that is its own another name."""
        allocation = self.allocation
        if len(allocation.aliases.members) == 1 and allocation.aliases.name == allocation.name:
            allocation.aliases.name = name
        allocation.name = self.name = name
        for i, tile in allocation.tiles.items():
            tile.name = f"{name}[{i}]"

    @property
    def compiled_type(self) -> str:
        """What must not change from one iteration of a loop to the next."""
        return f"buffered_tensor_<{self.dtype}, {self.shape}, {self.num}>"

    @property
    def dtype_name(self) -> str:
        return self.dtype.name

    @property
    def view(self) -> View:
        """The machine's view of this tile."""
        view = self._view
        if view is None:
            index, *cuts = self.path
            view = self.allocation.view(index)
            for _, cut in cuts:
                view = cut(view)
            self._view = view
        return view

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.itemsize(self.dtype.name)

    def as_scales(self, rows: int, cols: int) -> View:
        """Return a whole tile of block scales in tensor memory seen as rows x cols of them."""
        allocation = self.allocation
        column = allocation.offset(self.path[0])
        return tmem_view(allocation.aliases.storage(), column, (rows, cols), dtypes.stored(self.dtype.name), "scales")

    def forget(self) -> None:
        self._view = None
        for child in self._children.values():
            child.forget()

    def cut(
        self, key: tuple, function: Callable[[View], View], shape: Any, dtype: Any = None, label: str = ""
    ) -> buffered_tensor:
        """Return the tile that function(view) shows; remembered under `key`."""
        child = self._children.get(key)
        if child is None:
            path = (*self.path, (key, function))
            child = self._children[key] = buffered_tensor(
                self.allocation, path, shape, dtype or self.dtype, 0, self.name + label
            )
            child.part = list(shape) != self.shape if key[0] in _SLICES else self.part and key[0] == "trans"
        return child

    def one(self) -> buffered_tensor:
        """Return itself. An array of buffers, even of one, is no buffer: the compiler refuses its rank."""
        if self.num == 0:
            return self
        plural = "s" if self.num > 1 else ""
        raise ValueError(f"{self.name} is an array of {self.num} buffer{plural}: index it first, {self.name}[0]")

    def twin(self, task: Task, cta: CTA, where: Where) -> buffered_tensor:
        """Return the same tile in another CTA of the cluster."""
        if cta is self.allocation.cta:
            return self
        other = sync.twin(task, self.allocation.number, cta, where)
        tile = other.tile(self.path[0])
        for key, function in self.path[1:]:
            tile = tile.cut(key, function, self.shape, self.dtype)
        if len(self.path) > 1:
            tile.shape = list(self.shape)
        return tile

    def make_permute(self, handle: Any, dims: Any) -> buffered_tensor:
        return local_trans(self, dims)

    def __repr__(self) -> str:
        return f"<{self.name} {self.dtype}{self.shape}>"


# ---------------------------------------------------------------- aliasing


class reuse_group:
    """The overlap of buffers of a storage_alias_spec: "shared" ones have the same place, "distinct" ones do not
    overlap."""

    def __init__(self, *args: Any, group_type: Any = reuse_group_type.shared, group_size: Any = 1) -> None:
        if len(args) == 0:
            raise ValueError("reuse_group requires at least one element")
        group_size = plain(group_size)
        if not isinstance(group_size, int) or group_size < 1:
            raise ValueError(f"group_size must be a positive integer, got {group_size}")
        args = tuple(plain(a) for a in args)
        for element in args:
            if not isinstance(element, (reuse_group, buffered_tensor)):
                raise TypeError(
                    f"reuse_group elements must be buffered_tensor or reuse_group, got {type(element).__name__}"
                )
        self.args, self.group_type, self.group_size = args, plain(group_type), group_size
        self.type_is_constexpr = type(group_type) is tl.constexpr

    @property
    def distinct(self) -> bool:
        return self.group_type.value == "distinct"

    def __repr__(self) -> str:
        return f"reuse_group({self.args}, group_type={self.group_type.value}, group_size={self.group_size})"


def _check_group_types(group: reuse_group) -> None:
    if group.type_is_constexpr:
        raise TypeError(
            "the group_type of a reuse_group must not be a constexpr: write group_type="
            f"tlx.reuse_group_type.{group.group_type.name} itself"
        )
    for element in group.args:
        if isinstance(element, reuse_group):
            _check_group_types(element)


def _size(element: Element) -> int:
    if isinstance(element, buffered_tensor):
        return element.allocation.unit
    sizes = [_size(e) for e in element.args]
    if not element.distinct:
        return max(sizes) * element.group_size
    total = 0
    for child, size in zip(element.args, sizes):
        total = _up(total, _alignment(child)) + size
    return total * element.group_size


def _alignment(element: Element) -> int:
    if isinstance(element, buffered_tensor):
        return element.allocation.unit if element.space == "tmem" else _ALIGN
    return max(_alignment(e) for e in element.args)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _place(element: Element, offset: int, pitch: int, group: int, out: list[tuple[Allocation, int, int, int]]) -> None:
    """Collect (allocation, offset, pitch between tiles, tiles per group) of every buffer under `element`."""
    if isinstance(element, buffered_tensor):
        out.append((element.allocation, offset, pitch, group))
        return
    if not element.distinct:
        for child in element.args:
            _place(child, offset, pitch // element.group_size, group * element.group_size, out)
        return
    at = offset
    for child in element.args:
        at = _up(at, _alignment(child))
        _place(child, at, pitch, group, out)
        at += _size(child)
    if at - offset > pitch:
        raise ValueError(f"not enough space for distinct allocations: need {at - offset}, have {pitch}")


class storage_alias_spec(tl.core.base_value):
    """Storage that several local_allocs share; none of them owns it."""

    takes_name = True

    def __init__(self, storage: Any = storage_kind.smem, buffer_size_bytes: Value = None, _name: str = "alias") -> None:
        if not isinstance(storage, storage_kind):
            raise ValueError(f"storage must be a tlx.storage_kind itself, got {type(storage)}")
        if storage == storage_kind.smemCluster:
            raise ValueError("smemCluster storage is not supported for storage_alias_spec")
        size = None if buffer_size_bytes is None else integer(constant(buffer_size_bytes, "buffer_size_bytes"))
        if size is not None and size <= 0:
            raise ValueError(f"buffer_size_bytes must be positive, got {size}")
        self.storage, self.buffer_size_bytes = storage, size
        fixed = size if storage == storage_kind.smem or size is None else size // (4 * limits.TMEM_LANES)
        self.aliases = AliasSet(running().cta, storage.value, _name, fixed)

    def set_buffer_overlap(self, overlap_def: Any) -> None:
        """Lay the members out as the reuse_group tree says."""
        overlap_def = plain(overlap_def)
        if not isinstance(overlap_def, reuse_group):
            raise TypeError(f"overlap_def must be a reuse_group, got {type(overlap_def).__name__}")
        _check_group_types(overlap_def)
        aliases = self.aliases
        if aliases.overlap is not None:
            raise ValueError(
                "storage_alias_spec already has a set_buffer_overlap defined; each spec can only have one overlap definition"
            )
        out: list[tuple[Allocation, int, int, int]] = []
        alignment = _alignment(overlap_def)
        _place(overlap_def, 0, _up(_size(overlap_def), alignment), 1, out)
        for allocation, offset, pitch, _ in out:
            if allocation.aliases is not aliases:
                raise ValueError(f"{allocation.name} does not use this storage_alias_spec")
            if offset % allocation.unit or pitch % allocation.unit:
                raise ValueError(
                    f"{allocation.name}: offset {offset} and pitch {pitch} must be multiples of its size {allocation.unit}"
                )
        aliases.overlap = overlap_def
        for allocation, offset, pitch, group in out:
            _set_layout(allocation, offset, pitch, group)
        _check_capacity(aliases.cta)

    def __repr__(self) -> str:
        return f"storage_alias_spec(storage={self.storage.value}, size={self.buffer_size_bytes})"


def _set_layout(allocation: Allocation, offset: int, pitch: int, group: int) -> None:
    unit = allocation.unit
    scale, shift = pitch // unit, offset // unit
    if scale > 1 or shift > 0:
        allocation.scale, allocation.shift, allocation.group = scale, shift, group
    for tile in allocation.tiles.values():
        tile.forget()


# ---------------------------------------------------------------- allocation


@wants_constants(num=2)
@api
def local_alloc(
    shape: Any,
    dtype: Any,
    num: Value,
    storage: Any = storage_kind.smem,
    reuse: Any = None,
    layout: Any = LEFT_OUT,
    _name: str = "buffer",
) -> buffered_tensor:
    """Allocate `num` tiles of `shape` and dtype in SMEM or TMEM.

    reuse: a buffer or a storage_alias_spec to share storage with. Raises SharedMemoryError or TensorMemoryError beyond
    the hardware's size.
    """
    task = running()
    kind_is_constexpr, storage = type(storage) is tl.constexpr, plain(storage)
    shape = _extents(plain(shape), _name)
    dtype = values.triton_dtype(values.dtype_name(plain(dtype)))
    num = integer(constant(num, "num"))
    if num < 1:
        raise ValueError(f"local_alloc of {num} buffers for {_name}: at least one is needed")
    if not isinstance(storage, storage_kind):
        raise TypeError(
            f"storage must be a tlx.storage_kind, got {storage!r}: the compiler compares it with tlx.storage_kind.smem, "
            "and puts what differs into tensor memory"
        )
    has_layout, layout = layout is not LEFT_OUT, None if layout is LEFT_OUT else plain(layout)
    if has_layout:
        if storage != storage_kind.smem:
            raise NotImplementedError("User-specified layout encoding is only supported for shared memory (smem)")
        if not isinstance(layout, layout_encoding) and not type(layout).__name__.endswith(("layout", "encoding")):
            raise TypeError(f"`layout` must be a tlx.shared_layout_encoding, got {type(layout).__name__}")
        _check_layout(layout, shape, _name)
    if storage == storage_kind.tmem:
        _check_tmem_tile(task, shape, dtype, _name)
    aliases = _aliases(task.cta, storage, plain(reuse), _name)
    allocation = Allocation(task.cta, aliases, shape, dtype, num, _name)
    allocation.kind_is_constexpr = kind_is_constexpr
    allocation.swizzled_as = _swizzle_of(allocation, plain(reuse), layout)
    allocation.reuses_view = (
        plain(reuse).name if isinstance(plain(reuse), buffered_tensor) and not plain(reuse).num else ""
    )
    _check_capacity(task.cta)
    return buffered_tensor(allocation, (), shape, dtype, num, _name)


def _check_layout(layout: Any, shape: list[int], name: str) -> None:
    """Refuse layouts that the compiler cannot give a buffer in shared memory."""
    kind = type(layout).__name__
    if kind == "tensor_memory_layout_encoding":
        raise TypeError(f"{name} is in shared memory: with a {kind} the compiler aborts")
    order = getattr(layout, "order", None)
    if order is not None and len(order) != len(shape):
        raise ValueError(f"{name} has {len(shape)} dimensions, its layout {len(order)}: the compiler aborts")


def _swizzle_of(allocation: Allocation, reuse: Any, layout: Any) -> tuple[Allocation, int]:
    """Return (which buffer's layout this one in SMEM has, the elements that a row must have for it).

    A buffer that reuses another one takes over the layout that the compiler chose for that one: a swizzle as wide as its rows, of
    its own type's elements.
    """
    if isinstance(reuse, buffered_tensor):
        return reuse.allocation.swizzled_as
    *rows, row = allocation.shape
    if not rows or layout is not None or reuse is not None or allocation.aliases.space != "smem":
        return allocation, 0
    size = dtypes.itemsize(allocation.dtype_name)
    width = min(128, row * size) if math.prod(rows) >= _SWIZZLE_ROWS else 0
    return allocation, max(_SWIZZLE_LEAST, width) // size


def _check_reuse(allocation: Allocation) -> None:
    """Refuse to use a buffer that reuses another one in a way that the compiler cannot; it drops unused ones."""
    if allocation.reuses_view:
        view = allocation.reuses_view
        raise ValueError(f"{allocation.name} reuses {view}, which is a view: reuse the array, {view.partition('[')[0]}")
    base, least = allocation.swizzled_as
    if allocation.shape[-1] < least and base is not allocation:
        raise ValueError(
            f"{allocation.name} has {allocation.shape[-1]} elements in a row; it reuses {base.name}, whose layout needs {least}: "
            "let both share a storage_alias_spec"
        )


def _extents(shape: Any, name: str) -> list[int]:
    """Return a shape as ints, each a power of two."""
    extents = [integer(constant(s, "shape")) for s in shape]
    for extent in extents:
        if extent < 1 or extent & (extent - 1):
            raise ValueError(
                f"{name}: the shape of a buffer is made of powers of 2, not {extents}; round up and leave the rest unused"
            )
    return extents


def _aliases(cta: CTA, storage: Any, reuse: Any, name: str) -> AliasSet:
    if reuse is None:
        return AliasSet(cta, storage.value, name)
    if isinstance(reuse, buffered_tensor):
        if reuse.storage != storage:
            raise ValueError("reuse tensor has different storage")
        return reuse.allocation.aliases
    if isinstance(reuse, storage_alias_spec):
        if reuse.storage != storage:
            raise ValueError(
                f"storage_alias_spec storage ({reuse.storage.value}) doesn't match local_alloc storage ({storage.value})"
            )
        return reuse.aliases
    raise ValueError(f"reuse must be a buffered_tensor or storage_alias_spec, got {type(reuse)}")


_SCALES = ("int8", "uint8")  # what tensor memory holds in the layout of block scales
_TMEM_ROWS = (64, 128)  # of a tile in tensor memory; block scales (8-bit integers) are laid out in another way


def _check_tmem_tile(task: Task, shape: Any, dtype: Any, name: str) -> None:
    assert task.machine.options.arch != 90, "tmem is only available on Blackwell (sm_100)"
    if len(shape) != 2:
        raise ValueError(f"a tensor memory buffer has two dimensions, {name} has {len(shape)}")
    if shape[0] not in _TMEM_ROWS and dtype.name not in _SCALES:
        raise ValueError(f"a tile in tensor memory has 64 or 128 rows, {name} has {shape[0]}: the compiler aborts")


def _check_capacity(cta: CTA) -> None:
    """Require that everything allocated so far fits."""
    smem = sum(_up(a.size, _ALIGN) for a in cta.alias_sets if a.space == "smem" and a.members)
    smem += sum(8 * len(b.barriers) for b in cta.allocations if hasattr(b, "barriers"))
    if smem > limits.SHARED_MEMORY:
        raise errors.SharedMemoryError(
            f"{smem:,} bytes of shared memory are asked for, a CTA has {limits.SHARED_MEMORY:,}",
            _sizes(cta, "smem", "bytes"),
            where=here(),
        )
    columns = sum(a.size for a in cta.alias_sets if a.space == "tmem" and a.members)
    if columns > limits.TMEM_COLUMNS:
        raise errors.TensorMemoryError(
            f"{columns} columns of tensor memory are asked for, an SM has {limits.TMEM_COLUMNS}",
            _sizes(cta, "tmem", "columns"),
            where=here(),
        )
    if Active.counts is not None:
        Active.counts.most("shared_bytes", smem)
        Active.counts.most("tmem_columns", columns)


def _sizes(cta: CTA, space: str, unit: str) -> list[str]:
    lines = [f"at {show(here())}"]
    for aliases in cta.alias_sets:
        if aliases.space == space and aliases.members:
            names = ", ".join(f"{m.name} {m.num} x {list(m.shape)} {m.dtype_name}" for m in aliases.members)
            lines.append(f"{aliases.size:>8,} {unit}: {names}")
    return lines


# ---------------------------------------------------------------- views


@api
def local_view(local_allocated_buffers: Any, buffer_idx: Value) -> Any:
    """Return tile `index` of an array, or element `index` of a vector as a view of one."""
    buffers, index = local_allocated_buffers, integer(buffer_idx)
    if isinstance(buffer_idx, tl.tensor) and buffer_idx.dtype.name in ("int1", "int64", "uint64"):
        raise TypeError(f"a buffer's index must be a 32-bit integer, not {buffer_idx.dtype}: add .to(tl.int32)")
    if type(buffers) is not buffered_tensor:
        return buffers.at(index)
    if buffers.num:
        return buffers.allocation.tile(index)
    if len(buffers.shape) > 1:
        raise ValueError(
            f"{buffers.name} is one buffer: a second index, {buffers.name}[{index}], makes the compiler abort; "
            "take rows of it with tlx.local_slice"
        )
    if not 0 <= index < buffers.shape[0]:
        raise errors.BufferIndexError(
            f"{buffers.name}[{index}]: it has {buffers.shape[0]} rows", [f"at {show(here())}"], where=here()
        )
    return buffers.cut(("item", index), lambda v: v.derive(lambda a: a[index : index + 1]), [1], label=f"[{index}]")


@api
def local_slice(buffer: buffered_tensor, offset: Any, shape: Any) -> buffered_tensor:
    """Return a sub-tile. In TMEM only the inner dimension can be cut."""
    given, shape = plain(offset), [integer(constant(s, "shape")) for s in plain(shape)]
    buffer = buffer.one()
    offset = [integer(constant(o, "offset")) for o in given]
    if not len(offset) == len(shape) == len(buffer.shape):
        raise ValueError(
            f"local_slice: {buffer.name} has {len(buffer.shape)} dimensions; offset {offset}, shape {shape}"
        )
    if buffer.space == "tmem":
        assert len(offset) == 2 and len(shape) == 2
        assert offset[0] == 0, "a tensor memory slice takes all rows"
        assert shape[0] == buffer.shape[0], "a tensor memory slice takes all rows"
        return subslice(buffer, list(given)[1], shape[1])
    _check_split(buffer, offset, shape)
    for o, s, n in zip(offset, shape, buffer.shape):
        if o < 0 or o + s > n:
            _outside(f"local_slice: {offset} + {shape} lies outside {buffer.name}, which is {buffer.shape}")
    cut = tuple(slice(o, o + s) for o, s in zip(offset, shape))
    key = ("slice", tuple(offset), tuple(shape))
    label = str([f"{o}:{o + s}" for o, s in zip(offset, shape)])
    return buffer.cut(key, lambda v: v.derive(lambda a: a[cut]), shape, label=label)


def _outside(summary: str) -> NoReturn:
    """Report a part of a tile that is none: the compiler takes it, and on a GPU it is other memory."""
    raise errors.BufferIndexError(summary, [f"at {show(here())}"], where=here())


def _check_split(buffer: buffered_tensor, offset: list[int], shape: Any) -> None:
    """Require cuts of a tile in shared memory that the compiler takes: at multiples of the piece's size, and of 8 rows."""
    for axis, (o, s, n) in enumerate(zip(offset, shape, buffer.shape)):
        if s < 1 or s & (s - 1):
            raise ValueError(f"local_slice: extents are powers of 2, not {shape}")
        if s > n:
            raise ValueError(f"local_slice of {buffer.name}: {s} is more than its {n} in dimension {axis}")
        if s < n and o % s:
            raise ValueError(
                f"local_slice of {buffer.name}: offset {o} is no multiple of the slice's {s} in dimension {axis}"
            )
        if axis == 0 and len(shape) == 2 and n >= 32 and s < n and o % _SWIZZLE_ROWS:
            raise ValueError(f"local_slice of {buffer.name}: rows are cut at multiples of {_SWIZZLE_ROWS}, not at {o}")


@api
def subslice(local_allocated_buffer: Any, offset: Value, size: Value) -> buffered_tensor:
    """Return `size` columns of a TMEM tile from column `offset` on."""
    buffer = local_allocated_buffer.one()
    if type(plain(offset)) is not int:
        raise TypeError(
            "the offset of a tensor memory slice must be known when the kernel is compiled: a constexpr or a number, "
            "not a value that the kernel computes (tl.static_range and constexpr parameters give such numbers)"
        )
    offset, size = integer(offset), integer(size)
    assert buffer.space == "tmem", "subslice is only supported for tmem"
    if offset < 0 or offset + size > buffer.shape[-1]:
        raise ValueError(
            f"subslice {offset}:{offset + size} lies outside {buffer.name}, which has {buffer.shape[-1]} columns"
        )
    if size < 1 or size & (size - 1) or (size < buffer.shape[-1] and offset % size):
        raise ValueError(
            f"subslice {offset}:{offset + size} of {buffer.name}: a slice has 2^n columns and starts at a multiple of them"
        )
    shape = [*buffer.shape[:-1], size]
    return buffer.cut(
        ("columns", offset, size), lambda v: v.columns(offset, size), shape, label=f"[:, {offset}:{offset + size}]"
    )


@api
def local_trans(input: buffered_tensor, dims: Any = (1, 0)) -> buffered_tensor:
    """Return the tile with its dimensions permuted; no data moves."""
    buffer = input.one()
    if buffer.space != "smem":
        raise ValueError(
            f"local_trans takes a tile in shared memory; {buffer.name} is in tensor memory: the compiler aborts"
        )
    dims = tuple(integers(dims))
    if len(buffer.shape) != len(dims):
        raise ValueError("permute dims must have the same length as input shape")
    if sorted(dims) != list(range(len(dims))):
        raise ValueError(f"permute dims must be a permutation of 0, 1, ..., n-1, but were {dims}")
    return buffer.cut(
        ("trans", dims), lambda v: v.derive(lambda a: a.transpose(dims)), [buffer.shape[d] for d in dims], label=".T"
    )


@api
def local_reshape(src: Any, shape: Any) -> buffered_tensor:
    """Return the SMEM tile in another shape of as many elements."""
    assert isinstance(src, buffered_tensor) and src.space == "smem", "TLX local_reshape only supports SMEM"
    buffer, shape = src.one(), integers(shape)
    if math.prod(shape) != math.prod(buffer.shape):
        raise ValueError(f"local_reshape: {buffer.shape} and {shape} differ in their number of elements")
    return buffer.cut(("reshape", tuple(shape)), lambda v: v.derive(lambda a: a.reshape(shape)), shape)


@api
def local_reinterpret(src: Any, dtype: Any, shape: Any = LEFT_OUT) -> buffered_tensor:
    """Return the same bytes under another dtype, and in SMEM another shape. An array of tiles becomes one contiguous tile."""
    dtype = values.triton_dtype(values.dtype_name(plain(dtype)))
    if shape is LEFT_OUT:
        shape = list(src.shape)
    elif plain(shape) is None:
        raise TypeError("local_reinterpret takes no None for its shape: leave it out")
    else:
        assert isinstance(src, buffered_tensor) and src.space == "smem", (
            "TLX local_reinterpret with reshaping only supports SMEM"
        )
        shape = integers(shape)
        _check_layout_takes(src, shape)
    buffer = src if src.num == 0 else src.allocation.tile(0)
    stored = dtypes.stored(dtype.name)
    return buffer.cut(("retype", dtype.name, tuple(shape)), lambda v: v.retype(stored, shape), shape, dtype)


def _check_layout_takes(src: buffered_tensor, shape: list[int]) -> None:
    """Refuse a shape that the layout of the tile's allocation has no place for: reinterpreting keeps the layout.

    A transposed or reshaped tile has another layout, and so may one that reuses a buffer: of these nothing is said.
    """
    base, least = src.allocation.swizzled_as
    if base is not src.allocation or any(
        step[0][0] in ("trans", "reshape") for step in src.path if type(step) is tuple
    ):
        return
    rank = len(base.shape)
    if len(shape) - rank not in (0, 1):  # one more: an array of tiles
        raise ValueError(
            f"local_reinterpret keeps the layout of {base.name}, which has {rank} dimension{'s' * (rank > 1)}; "
            f"{list(shape)} has {len(shape)}: the compiler aborts"
        )
    if shape[-1] < least:
        raise ValueError(
            f"local_reinterpret keeps the layout of {base.name}, whose swizzle needs {least} elements in a row; "
            f"{list(shape)} has {shape[-1]}: the compiler aborts"
        )


# ---------------------------------------------------------------- loads and stores


@api
@carries(itself)
def local_load(src: Any, token: Any = None, layout: Any = None, relaxed: Any = False) -> Value:
    """Return the tile as a block in registers."""
    src = src.one()
    if src.space == "tmem" and src.dtype.name in ("int8", "uint8"):
        raise ValueError(f"8-bit integers in tensor memory are block scales: {src.name} cannot be loaded")
    task, where, fault = begin("local_load", src.name)
    _check_warps(task, src, "loads", where)
    if Active.counts is not None:
        Active.counts.tmem_loads += src.space == "tmem"
    view = src.view
    unwritten = task.machine.detector.tolerant_read(task, view, where, src.name) and task.machine.options.poison
    data = view.read()
    if task.machine.timed:
        task.machine.clock.spend(
            task, "local_load", f"load {src.name}", where, space=src.space, bytes=src.nbytes, warps=task.num_warps
        )
    if view.arr is not None:
        data = data.copy()
    marks = view.undefined
    if unwritten:
        marks = union(marks, view.unwritten(mark("unwritten memory", where, src.name)))
    return values.from_stored(data, src.dtype, marks)


@api
def local_store(dst: Any, src: Any) -> None:
    """Write a block to the tile: an ordinary store (see fence)."""
    dst = dst.one()
    task, where, fault = begin("local_store", dst.name)
    _check_warps(task, dst, "stores to", where)
    _check_block(dst, src)
    if dst.space == "tmem" and dst.dtype.name in _SCALES and not context.launch.names("async_dot_scaled"):
        raise TypeError(
            f"{dst.name} holds {dst.dtype} in tensor memory, where the compiler can lay out block scales only, and this kernel has "
            "no async_dot_scaled: keep 8-bit integers in shared memory"
        )
    if dst.space == "tmem" and dst.dtype.name in _SCALES:
        dst.allocation.scales_stored = dst.allocation.scales_stored or where
    if fault == "drop":
        return
    if Active.counts is not None:
        Active.counts.tmem_stores += dst.space == "tmem"
    sync.store(task, dst.view, values.to_stored(src, dst.dtype.name), where, dst.name, values.undefined(src))
    if task.machine.timed:
        task.machine.clock.spend(
            task, "local_store", f"store {dst.name}", where, space=dst.space, bytes=dst.nbytes, warps=task.num_warps
        )


def check_scales(cta: CTA) -> None:
    """Refuse 8-bit integers that a CTA stored in tensor memory and no product took: the compiler finds no layout for them.

    A CTA without scaled products says nothing, for its loops may have had no turn.
    """
    tiles = [a for a in cta.allocations if isinstance(a, Allocation) and a.scales_stored is not None]
    if all(a.scales_taken for a in tiles) or not any(getattr(a, "scales_taken", False) for a in cta.allocations):
        return
    tile = next(a for a in tiles if not a.scales_taken)
    raise errors.TensorMemoryError(
        f"{tile.name} holds {tile.dtype} in tensor memory, and no async_dot_scaled takes it for its scales",
        [f"stored at {show(tile.scales_stored)}"],
        cause="the compiler lays 8-bit integers out as a product's block scales only: keep others in shared memory.",
        where=tile.scales_stored,
    )


def _check_warps(task: Task, tile: buffered_tensor, what: str, where: Where) -> None:
    """Require a warp group's own tensor memory: warp w of four reaches lanes 32 w .. 32 w + 31 (PTX ISA, tcgen05.ld)."""
    if tile.space == "tmem" and task.num_warps < 4:
        warps = "1 warp" if task.num_warps == 1 else f"{task.num_warps} warps"
        summary = f"{task.label} {what} tensor memory {tile.name} with {warps}; it takes four"
        raise errors.TensorMemoryWarpsError(summary, where=where)


def _check_block(dst: Any, src: Any) -> None:
    if not isinstance(src, tl.tensor):
        raise TypeError(f"local_store needs a block, got {type(src).__name__}")
    if src.dtype.name != dst.dtype.name:
        raise ValueError(
            f"local_store: the block is {src.dtype}, {dst.name} holds {dst.dtype}; convert with .to({dst.dtype})"
        )
    shape = [int(s) for s in src.shape]
    if shape != dst.shape:
        raise ValueError(f"local_store: the block is {shape}, {dst.name} is {dst.shape}")


@api
@carries(itself)
def local_gather(src: Any, indices: Value, axis: Value, token: Any = None) -> Value:
    """Return result[.., i, ..] = src[.., indices[.., i, ..], ..] along `axis` of an SMEM tile."""
    src = src.one()
    assert src.space == "smem", "local_gather only supports shared memory!"
    task, where, fault = begin("local_gather", src.name)
    data = sync.load(task, src.view, where, src.name)
    index, lost = _indices(task, indices, where)
    if lost is not None:
        index = np.where(lost, 0, index)
    axis = integer(axis)
    _check_indices(index, src, axis)
    marks = src.view.undefined
    marks = union(lost, None if marks is None else np.take_along_axis(marks, index, axis))
    return values.from_stored(np.take_along_axis(data, index, axis), src.dtype, marks)


@api
def local_scatter(dst: Any, src: Any, indices: Value, axis: Value, token: Any = None) -> None:
    """Store dst[.., indices[.., i, ..], ..] = src[.., i, ..] along `axis` of an SMEM tile."""
    dst = dst.one()
    assert dst.space == "smem", "local_scatter only supports shared memory!"
    task, where, fault = begin("local_scatter", dst.name)
    index, lost = _indices(task, indices, where)
    check(lost, "number", where)
    axis = integer(axis)
    _check_indices(index, dst, axis)
    view = dst.view
    data, marks, new = view.read().copy(), view.undefined, values.undefined(src)
    np.put_along_axis(data, index, values.to_stored(src, dst.dtype.name), axis)
    if marks is not None or new is not None:
        marks = np.zeros(view.shape, MARK) if marks is None else marks
        np.put_along_axis(marks, index, MARK.type(0) if new is None else new, axis)
    sync.store(task, view, data, where, dst.name, marks)


def _indices(task: Task, indices: Value, where: Where) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (indices as int64, their marks)."""
    if isinstance(indices, buffered_tensor):
        indices = indices.one()
        return sync.load(task, indices.view, where, indices.name).astype(np.int64), indices.view.undefined
    return values.to_numpy(indices).astype(np.int64), values.undefined(indices)


def _check_indices(index: np.ndarray, buffer: buffered_tensor, axis: int) -> None:
    n = buffer.shape[axis]
    if index.size and (index.min() < 0 or index.max() >= n):
        raise errors.BufferIndexError(
            f"an index from {index.min()} to {index.max()} into axis {axis} of {buffer.name}, which has {n}",
            [f"at {show(here())}"],
            where=here(),
        )


# ---------------------------------------------------------------- calls of jit functions


def _buffer_handed(buffer: buffered_tensor, returned: bool) -> str | None:
    verb = "return" if returned else "take"
    if buffer.allocation.kind_is_constexpr:
        kind = f"tlx.storage_kind.{buffer.storage.name}"
        return f"a jit function cannot {verb} {buffer.name}, whose storage is a constexpr: write local_alloc(..., {kind}) itself"
    if not buffer.part:
        return None
    whole = re.sub(r"\[[^\[\]]*:[^\[]*\].*", "", buffer.name)
    return (
        f"a jit function cannot {verb} a slice, {buffer.name}, for the types of its arguments and results have no strides: "
        f"hand over the whole buffer, {whole}, and slice it where the slice is used"
    )


def _alias_handed(spec: storage_alias_spec, returned: bool) -> str | None:
    verb = "return" if returned else "take"
    return f"a jit function cannot {verb} a storage_alias_spec: allocate from it and call set_buffer_overlap where it is made"


def _group_handed(group: reuse_group, returned: bool) -> str | None:
    return "a jit function cannot return a reuse_group: write it as set_buffer_overlap's argument" if returned else None


Extension.at_end = check_scales
Extension.handed.update(
    {buffered_tensor: _buffer_handed, storage_alias_spec: _alias_handed, reuse_group: _group_handed}
)
