"""Asynchronous copies: TMA loads and stores, cp.async, shared memory of other CTAs, and tensor descriptors made in the
kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from .. import dtypes, errors
from ..counting import Active
from ..frontend import access, values
from ..locations import show
from ..machine import engines, sync
from ..undefined import check
from .api import LEFT_OUT, Value, api, begin, constant, integer, integers, plain, predicate, truth

if TYPE_CHECKING:
    from ..locations import Where
    from ..machine.barriers import MBarrier
    from ..machine.storage import View
    from ..machine.tasks import CTA, Task
    from .barriers import mbarrier
    from .buffers import buffered_tensor


_EVICTION = ("", "evict_first", "evict_last")
_REDUCTIONS = ("", "add", "min", "max", "and", "or", "xor")


# ---------------------------------------------------------------- TMA


def _check_descriptor(
    desc: Any, buffer: buffered_tensor, offsets: Any, eviction_policy: Any, what: str, where: Where
) -> None:
    if not hasattr(desc, "map"):
        raise AssertionError(f"{what} needs a tensor descriptor, got {type(desc).__name__}")
    assert eviction_policy in _EVICTION, (
        f"eviction_policy must be '', 'evict_first', or 'evict_last', got '{eviction_policy}'"
    )
    box = [int(b) for b in desc.block_shape]
    assert len(offsets) == len(box), f"expected {len(box)} offsets, but got {len(offsets)}"
    if buffer.space != "smem":
        raise ValueError(f"{what}: {buffer.name} must be in shared memory")
    if _without_units(box) != _without_units(buffer.shape):
        raise errors.DescriptorError(
            f"{what}: the descriptor's box is {box}, {buffer.name} is {buffer.shape}",
            [f"at {show(where)}"],
            "block_shape of the descriptor must be the shape of the buffer (leading dimensions of 1 aside).",
            where,
        )
    if dtypes.itemsize(desc.dtype.name) != dtypes.itemsize(buffer.dtype_name):
        raise errors.DescriptorError(
            f"{what}: the tensor holds {desc.dtype}, {buffer.name} holds {buffer.dtype}",
            [f"at {show(where)}"],
            where=where,
        )


def _without_units(shape: Any) -> list[int]:
    return [s for s in shape if s != 1]


@api
def async_descriptor_load(
    desc: Any,
    result: buffered_tensor,
    offsets: Any,
    barrier: mbarrier,
    pred: Value = LEFT_OUT,
    cache_modifier: Any = "",
    eviction_policy: Any = "",
    multicast_targets: Any = (),
    two_ctas: Value = False,
) -> None:
    """Copy the descriptor's box at `offsets` to an SMEM tile by TMA; its bytes count on `barrier`. Outside the tensor: zeros,
    counted in full."""
    result = result.one()
    task, where, fault = begin("async_descriptor_load", result.name)
    offsets = integers(offsets)
    _check_descriptor(desc, result, offsets, plain(eviction_policy), "async_descriptor_load", where)
    if fault == "drop" or not predicate(pred):
        return
    targets = _load_targets(task, result, barrier, integers(multicast_targets), truth(two_ctas), where)
    if Active.counts is not None:
        for view, *_ in targets:
            Active.counts.place("loaded_places", view)
    tensor_map, stored = desc.map, result.view.dtype

    def fetch() -> np.ndarray:
        data = tensor_map.load(offsets)
        return data if data.dtype == stored else data.view(stored)

    facts = {
        "bytes": result.nbytes,
        "multicast": len(targets),
        "cold": task.machine.clock.first_touch((tensor_map.base, *offsets)),
    }
    engines.tma_load(task, fetch, targets, result.nbytes, where, result.name, facts)


def _load_targets(
    task: Task, result: buffered_tensor, barrier: Any, multicast: list[int], two: bool, where: Where
) -> list[tuple[View, str, MBarrier]]:
    """Return [(view, name, barrier)] of every CTA that receives the box."""
    if not multicast and not two:
        return [(result.view, result.name, barrier.machine_barrier(task, where))]
    targets = []
    for rank in multicast or [task.cta.rank]:
        cta = sync.peer(task, rank, where)
        owner: CTA | None = sync.peer(task, rank & ~1, where) if two else cta  # a pair counts on its leader's barrier
        if barrier.rank is not None and not multicast:
            owner = None
        tile = result.twin(task, cta, where)
        targets.append((tile.view, tile.name, barrier.machine_barrier(task, where, owner)))
    return targets


@api
def async_descriptor_store(
    desc: Any, source: buffered_tensor, offsets: Any, eviction_policy: Any = "", store_reduce: Any = ""
) -> None:
    """Copy an SMEM tile to the descriptor's box at `offsets` by TMA, clipped to the tensor; store_reduce combines with what is
    there."""
    source = source.one()
    task, where, fault = begin("async_descriptor_store", source.name)
    offsets, reduce = integers(offsets), plain(store_reduce)
    _check_descriptor(desc, source, offsets, plain(eviction_policy), "async_descriptor_store", where)
    assert reduce in _REDUCTIONS, f"store_reduce must be '', 'add', 'min', 'max', 'and', 'or', or 'xor', got '{reduce}'"
    if fault == "drop":
        return
    if Active.counts is not None:
        Active.counts.place("stored_places", source.view)
    tensor_map = desc.map
    stored = dtypes.stored(desc.dtype.name)

    def put(data: np.ndarray, marks: np.ndarray | None = None) -> None:
        data = data.reshape([int(b) for b in desc.block_shape])
        data = data if data.dtype == stored else data.view(stored)
        access.check_box(tensor_map, offsets, marks, where)
        if reduce:
            tensor_map.reduce(offsets, data, reduce)
        else:
            tensor_map.store(offsets, data)

    engines.tma_store(task, put, source.view, source.name, source.nbytes, where, source.name, bool(reduce))


@api
def async_descriptor_store_wait(pendings: Value = 0) -> None:
    """Wait until at most `pendings` TMA stores of this task still read shared memory."""
    task, where, fault = begin("async_descriptor_store_wait", "")
    if fault != "drop":
        engines.store_wait(task, integer(constant(pendings, "pendings")), where)


@api
def async_descriptor_prefetch_tensor(
    desc: Any, offsets: Any, pred: Value = LEFT_OUT, eviction_policy: Any = ""
) -> None:
    """Take a hint: bring the box into the L2 cache. Changes nothing here."""
    assert len(offsets) == len(desc.block_shape), f"expected {len(desc.block_shape)} offsets, but got {len(offsets)}"
    predicate(pred)
    begin("async_descriptor_prefetch_tensor", "")


@api
def prefetch(pointer: Any, level: Any = "L2", mask: Any = None, tensormap: Any = False) -> None:
    """Take a hint: bring global memory into a cache. Changes nothing here."""
    if not truth(tensormap):
        assert plain(level) in ("L1", "L2"), f"level must be 'L1' or 'L2', got '{plain(level)}'"
    begin("prefetch", "")


@api
def async_store(dst_global_ptr: Value, src_smem: buffered_tensor, size: Value) -> None:
    """Copy `size` bytes in bulk from SMEM to global memory; wait with async_descriptor_store_wait."""
    source = src_smem.one()
    task, where, fault = begin("async_store", source.name)
    size = integer(size)
    if size % 16:
        raise errors.DescriptorError(
            f"async_store copies multiples of 16 bytes, not {size}", [f"at {show(where)}"], where=where
        )
    if size > source.nbytes:
        raise errors.DescriptorError(
            f"async_store of {size} bytes out of {source.name}, which has {source.nbytes}", where=where
        )
    if fault == "drop":
        return None
    count = size // dtypes.itemsize(source.dtype_name)
    pointer = _element_pointers(dst_global_ptr, count, source.dtype_name)

    def put(data: np.ndarray, marks: np.ndarray | None = None) -> None:
        check(None if marks is None else marks.reshape(-1)[:count], "store", where)
        access.store(pointer, values.from_stored(data.reshape(-1)[:count].copy(), source.dtype))

    engines.tma_store(task, put, source.view, source.name, size, where, source.name)


def _element_pointers(pointer: Any, count: int, name: str) -> Any:
    """Return a block of `count` consecutive pointers from a scalar one."""
    if dtypes.itemsize(pointer.dtype.element_ty.name) != dtypes.itemsize(name):
        raise ValueError(f"the pointer is to {pointer.dtype.element_ty}, the buffer holds {name}")
    return pointer + values.from_numpy(np.arange(count, dtype=np.int32), tl.int32)


# ---------------------------------------------------------------- cp.async


class async_token(tl.core.base_value):
    """The return value of an asynchronous copy; commit and wait accept it, as the compiler requires, and ignore it."""

    def __init__(self, handle: Any = None) -> None:
        self.handle = handle


@api
def async_load(
    src: Any,
    result: buffered_tensor,
    mask: Any = None,
    other: Value = None,
    cache_modifier: Any = "",
    eviction_policy: Any = "",
    is_volatile: Any = False,
    bulk: Any = False,
    bulk_size: Any = None,
    barrier: Any = None,
) -> async_token | None:
    """Copy a block of pointers to an SMEM tile (cp.async) (masked lanes without `other` become 0). bulk=True: consecutive
    bytes, on a barrier."""
    result = result.one()
    if truth(plain(bulk)):
        _bulk_load(src, result, mask, other, bulk_size, barrier)
        return async_token()
    assert bulk_size is None, "bulk_size requires bulk=True"
    assert barrier is None, "barrier requires bulk=True"
    task, where, fault = begin("async_load", result.name)
    if fault == "drop":
        return async_token()
    if [int(s) for s in src.shape] != result.shape:
        raise ValueError(f"async_load: the pointers are {[int(s) for s in src.shape]}, {result.name} is {result.shape}")
    mask = plain(mask)
    block = access.load(src, mask=mask, other=None if mask is None else (0 if plain(other) is None else other))
    data = values.to_stored(block, result.dtype_name)
    marks = values.undefined(block)
    engines.cp_async(task, lambda: data, result.view, result.name, result.nbytes, where, result.name, marks)
    return async_token()


def _bulk_load(src: Any, result: buffered_tensor, mask: Any, other: Value, bulk_size: Any, barrier: Any) -> None:
    assert len(result.shape) == 1, "bulk async_load requires a 1D result buffer"
    assert barrier is not None, "bulk async_load requires a barrier"
    assert mask is None, "bulk async_load does not support mask"
    assert other is None, "bulk async_load does not support other"
    task, where, fault = begin("async_load", result.name)
    size = result.nbytes if bulk_size is None else integer(bulk_size)
    assert size <= result.nbytes, f"bulk_size ({size}) exceeds destination buffer size ({result.nbytes} bytes)"
    if size % 16:
        raise errors.DescriptorError(
            f"a bulk copy moves multiples of 16 bytes, not {size}", [f"at {show(where)}"], where=where
        )
    if fault == "drop":
        return
    count = size // dtypes.itemsize(result.dtype_name)
    pointer = _element_pointers(src, count, result.dtype_name)
    tile = result.cut(("first", count), lambda v: v.derive(lambda a: a[:count]), [count])

    def fetch() -> np.ndarray:
        return values.to_stored(access.load(pointer), result.dtype_name)

    bar = barrier.machine_barrier(task, where)
    engines.tma_load(task, fetch, [(tile.view, result.name, bar)], size, where, result.name)


def _check_tokens(tokens: Any) -> None:
    for token in plain(tokens):
        if not isinstance(token, async_token):
            raise TypeError(f"tokens are what async_load and async_load_commit_group return, not {token!r}")


@api
def async_load_commit_group(tokens: Any = ()) -> async_token:
    """Close the group of this task's async_loads so far."""
    _check_tokens(tokens)
    task, where, fault = begin("async_load_commit_group", "")
    if fault != "drop":
        engines.commit_group(task)
    return async_token()


@api
def async_load_wait_group(pendings: Value, tokens: Any = ()) -> async_token:
    """Wait until at most `pendings` groups of this task are outstanding."""
    _check_tokens(tokens)
    task, where, fault = begin("async_load_wait_group", "")
    if fault != "drop":
        engines.wait_group(task, integer(constant(pendings, "pendings")), where)
    return async_token()


# ---------------------------------------------------------------- other CTAs' shared memory


def _remote_tile(task: Task, dst: Any, rank: Any, what: str, where: Where) -> buffered_tensor:
    assert dst.space == "smem", f"{what} only supports local smem for dst"
    assert rank is not None, f"remote_cta_rank is required for {what}"
    return dst.one().twin(task, sync.peer(task, integer(rank), where), where)


def _check_block(dst: Any, src: Any) -> None:
    if src.dtype.name != dst.dtype_name or [int(s) for s in src.shape] != dst.shape:
        raise ValueError(f"the block is {src.dtype}{[int(s) for s in src.shape]}, {dst.name} is {dst.dtype}{dst.shape}")


@api
def remote_shmem_store(dst: Any, src: Any, remote_cta_rank: Value) -> None:
    """Write a block to the same tile of another CTA; ordered by nothing but a later cluster barrier."""
    task, where, fault = begin("remote_shmem_store", dst.name)
    tile = _remote_tile(task, dst, remote_cta_rank, "remote_shmem_store", where)
    _check_block(tile, src)
    if fault != "drop":
        sync.store(task, tile.view, values.to_stored(src, tile.dtype_name), where, tile.name, values.undefined(src))


@api
def async_remote_shmem_store(dst: Any, src: Any, remote_cta_rank: Value, barrier: Any) -> None:
    """Write a block to the same tile of another CTA; the bytes count on that CTA's barrier."""
    assert barrier is not None, "barrier is required for async_remote_shmem_store"
    task, where, fault = begin("async_remote_shmem_store", dst.name)
    tile = _remote_tile(task, dst, remote_cta_rank, "async_remote_shmem_store", where)
    _check_block(tile, src)
    if tile.dtype.primitive_bitwidth < 32:
        raise ValueError(
            f"async_remote_shmem_store writes words of 32 or 64 bits, {tile.name} holds {tile.dtype}: "
            "send two 16-bit values as one int32, or store locally and use async_remote_shmem_copy"
        )
    if fault == "drop":
        return
    bar = _remote_barrier(task, barrier, remote_cta_rank, where)
    data = np.array(values.to_stored(src, tile.dtype_name))
    marks = values.undefined(src)
    engines.remote_copy(task, data, tile.view, tile.name, bar, tile.nbytes, where, tile.name, undefined=marks)


@api
def async_remote_shmem_copy(dst: Any, src: Any, remote_cta_rank: Value, barrier: Any) -> None:
    """Copy an SMEM tile to another CTA's tile; the bytes count on that CTA's barrier."""
    assert src.space == "smem", "async_remote_shmem_copy requires local smem src"
    assert barrier is not None, "barrier is required for async_remote_shmem_copy"
    task, where, fault = begin("async_remote_shmem_copy", dst.name)
    src = src.one()
    tile = _remote_tile(task, dst, remote_cta_rank, "async_remote_shmem_copy", where)
    if math.prod(src.shape) != math.prod(tile.shape):
        raise ValueError(f"async_remote_shmem_copy: {src.name} {src.shape} and {tile.name} {tile.shape} differ in size")
    if fault == "drop":
        return
    bar = _remote_barrier(task, barrier, remote_cta_rank, where)
    engines.remote_copy(task, src.view, tile.view, tile.name, bar, tile.nbytes, where, tile.name, source_name=src.name)


def _remote_barrier(task: Task, barrier: Any, rank: Any, where: Where) -> MBarrier:
    if barrier.rank is not None:
        return barrier.machine_barrier(task, where)
    return barrier.machine_barrier(task, where, sync.peer(task, integer(rank), where))


# ---------------------------------------------------------------- descriptors made in the kernel


class tensor_descriptor_ptr(tl.core.base_value):
    """Room for `num` descriptors in global scratch memory; ptr[i] is one of them."""

    descriptor_size = 128

    def __init__(self, slots: list, index: int = 0) -> None:
        self.slots, self.index = slots, index

    @property
    def num(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: Value) -> tensor_descriptor_ptr:
        if not isinstance(plain(index), (int, tl.tensor)):
            raise TypeError(f"Index must be int, constexpr, or tensor, got {type(index)}")
        return tensor_descriptor_ptr(self.slots, self.index + integer(index))

    def __add__(self, index: Value) -> tensor_descriptor_ptr:
        return self[index]

    def slot(self) -> int:
        if not 0 <= self.index < len(self.slots):
            raise errors.BufferIndexError(
                f"descriptor {self.index}: allocate_tensor_descriptor made room for {len(self.slots)}"
            )
        return self.index


@api
def allocate_tensor_descriptor(num: Value) -> tensor_descriptor_ptr:
    """Return global scratch memory for `num` descriptors."""
    return tensor_descriptor_ptr([None] * integer(constant(num, "num")))


@api
def make_tensor_descriptor(
    desc_ptr: Any, base: Value, shape: Any, strides: Any, block_shape: Any, padding_option: Any = "zero"
) -> Any:
    """Return a TMA descriptor made in the kernel, in the slot desc_ptr or (None) in scratch memory of its own."""
    desc_ptr = plain(desc_ptr)
    if desc_ptr is not None and not isinstance(desc_ptr, tensor_descriptor_ptr):
        raise TypeError(
            f"desc_ptr must be None or tlx.tensor_descriptor_ptr, got {type(desc_ptr)}. "
            "Use tlx.allocate_tensor_descriptor() to allocate descriptor storage."
        )
    shape, strides, block = plain(shape), plain(strides), integers(block_shape)
    ndim = len(shape)
    if not 1 <= ndim <= 5:
        raise ValueError(f"Expected 1 <= ndim <= 5 but got {ndim} dimensions")
    if len(strides) != ndim:
        raise ValueError(f"Expected {ndim} strides but got {len(strides)}")
    if len(block) != ndim:
        raise ValueError(f"Expected block_shape to have {ndim} dimensions but got {len(block)}")
    size = dtypes.itemsize(base.dtype.element_ty.name)
    if block[-1] * size < 16:
        raise ValueError(
            "Descriptor block shape must have at least 16 bytes in the last dimension, "
            f"but got {block[-1]} * {size} = {block[-1] * size} bytes"
        )
    last = plain(strides[-1])
    if not isinstance(last, tl.tensor) and last != 1:
        raise ValueError(f"Tensor descriptor last dim must be 1 but got {last}")
    begin("make_tensor_descriptor", "")
    desc = access.make_tensor_descriptor(base, shape, strides, block, plain(padding_option))
    if desc_ptr is not None:
        desc_ptr.slots[desc_ptr.slot()] = desc
    return desc


@api
def reinterpret_tensor_descriptor(desc_ptr: Any, block_shape: Any, dtype: Any) -> Any:
    """Return the descriptor that make_tensor_descriptor put into a slot."""
    desc_ptr = plain(desc_ptr)
    if not isinstance(desc_ptr, tensor_descriptor_ptr):
        raise TypeError(
            f"desc_ptr must be tlx.tensor_descriptor_ptr, got {type(desc_ptr)}. "
            "Use tlx.allocate_tensor_descriptor() to allocate descriptor storage."
        )
    desc = desc_ptr.slots[desc_ptr.slot()]
    if desc is None:
        raise errors.PoisonError(f"descriptor slot {desc_ptr.index} is read before make_tensor_descriptor wrote it")
    if [int(b) for b in desc.block_shape] != integers(block_shape):
        raise errors.DescriptorError(
            f"reinterpret_tensor_descriptor: block_shape {integers(block_shape)}, made with {list(desc.block_shape)}"
        )
    return desc


__all__ = [
    *(
        "allocate_tensor_descriptor",
        "async_descriptor_load",
        "async_descriptor_prefetch_tensor",
        "async_descriptor_store",
    ),
    *("async_descriptor_store_wait", "async_load", "async_load_commit_group", "async_load_wait_group", "async_store"),
    *("async_remote_shmem_copy", "async_remote_shmem_store", "async_token", "make_tensor_descriptor", "prefetch"),
    *(
        "reinterpret_tensor_descriptor",
        "remote_shmem_store",
        "tensor_descriptor_ptr",
        "buffered_tensor",
        "mbarrier",
        "running",
    ),
]
