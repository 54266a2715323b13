"""Global memory of one launch, without Triton: the tensors' bytes, bounds, writers, and TMA boxes over them.

Addresses are real addresses, so a kernel may read pointers from a table. Each tensor argument is an `Allocation` (its
storage's bounds and its argument name), and a pointer carries the allocation it was made from, so an address outside of
it is reported with the tensor's name, even where another tensor happens to lie there.

Writes are remembered per program: a second program that writes a different value to the same place, without an atomic
between the two that orders them, is a race.
"""

import ctypes
import math
from bisect import bisect_right

import numpy as np

from . import dtypes
from .counting import Active
from .errors import DescriptorError, GlobalRaceError, OutOfBoundsError, warn
from .locations import here, show

_OWNER_BITS = 24
_OWNER_MASK = (1 << _OWNER_BITS) - 1
_PAGE = 4096
_CHUNK = 16  # bytes: what TMA moves and clips by in the inner dimension
_libc = ctypes.CDLL(None, use_errno=True)


def _bytes_at(address, count):
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=np.uint8)


def _is_mapped(lo, hi):
    """Return whether every page of [lo, hi) belongs to this process."""
    if lo < _PAGE or hi - lo > 1 << 40:
        return False
    start = lo & -_PAGE
    pages = (hi - start + _PAGE - 1) // _PAGE
    status = (ctypes.c_ubyte * pages)()
    return _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * _PAGE), status) == 0


class Allocation:
    """The storage behind a tensor argument: bytes [lo, hi), the argument's name, and which program wrote where."""

    def __init__(self, name, lo, hi, element_size=1):
        self.name, self.lo, self.hi, self.element_size = name, lo, hi, element_size
        self._views, self._owner, self._grain = {}, None, element_size

    def __repr__(self):
        return f"Allocation({self.name}, {self.hi - self.lo} bytes)"

    def view(self, dtype):
        """Return all of it as a flat array of a numpy dtype."""
        view = self._views.get(dtype)
        if view is None:
            count = (self.hi - self.lo) // dtype.itemsize
            view = self._views[dtype] = _bytes_at(self.lo, count * dtype.itemsize).view(dtype)
        return view

    def owners(self, size):
        """Return (owner per grain, grains per element of `size`): the last writer, program + 1, and its epoch above."""
        if self._owner is None:
            self._grain = min(self._grain, size)
            self._owner = np.zeros((self.hi - self.lo) // self._grain + 1, np.int64)
        elif size < self._grain:
            self._owner, self._grain = np.repeat(self._owner, self._grain // size), size
        return self._owner, size // self._grain


class GlobalMemory:
    """The global memory of a launch: `program()` returns the linear index of the running program."""

    def __init__(self, allocations=(), program=lambda: 0, races=True, report=None):
        self.allocations = sorted(allocations, key=lambda a: a.lo)
        self._starts = [a.lo for a in self.allocations]
        self.program, self.races, self.report = program, races, report or self._raise
        self._clocks, self._published = {}, {}
        self._foreign, self._live = {}, None
        self.live_tensors = list  # () -> Allocations of the process's other tensors
        self.warn, self._said_duplicate = warn, False

    @staticmethod
    def _raise(error):
        raise error

    # ---- finding the tensor

    def find(self, address):
        """Return the allocation that holds `address`, or None."""
        i = bisect_right(self._starts, address) - 1
        if i >= 0 and address < self.allocations[i].hi:
            return self.allocations[i]
        return None

    def locate(self, lo, hi, allocation, what, size, addresses=None):
        """Find the allocation that holds bytes [lo, hi), of which `addresses` are touched; raise OutOfBoundsError if none does."""
        if allocation is None:
            allocation = self.find(lo) or self._unknown(lo, hi, what)
        if lo < allocation.lo or hi > allocation.hi:
            raise self._out_of_bounds(lo, hi, allocation, what, size, addresses)
        return allocation

    def _unknown(self, lo, hi, what):
        """Return memory that no argument holds, reached through an integer: another tensor, else unchecked memory."""
        region = self.find_live(lo) or self._foreign.get((lo, hi))
        if region is None:
            if not _is_mapped(lo, hi):
                where = "a null pointer" if 0 <= lo < _PAGE else f"address {lo:#x}, which no tensor argument holds"
                raise OutOfBoundsError(
                    f"{what} through {where}",
                    [f"at {show(here())}"],
                    where=here(),
                    cause="an address made by arithmetic, or a tensor that was not passed as an argument.",
                )
            if len(self._foreign) > 4096:
                self._foreign.clear()
            self._say_unchecked(lo, what)
            region = self._foreign[lo, hi] = Allocation("memory outside the arguments", lo, hi)
        return region

    def find_live(self, address):
        """Return the tensor that holds `address`: an argument, or any other that is alive in the process; None if neither does."""
        found = self.find(address)
        if found is None:
            if self._live is None:
                self._live = sorted(self.live_tensors(), key=lambda a: a.lo)
            i = bisect_right(self._live, address, key=lambda a: a.lo) - 1
            found = self._live[i] if i >= 0 and address < self._live[i].hi else None
        return found

    def _say_unchecked(self, address, what):
        if not self._foreign:
            self.warn(
                OutOfBoundsError(
                    f"{what} at address {address:#x}, which lies in no tensor: such an access is not checked",
                    [f"at {show(here())}"],
                    "an address made from an integer, past the end of its tensor or of a freed tensor.",
                    here(),
                )
            )

    def _out_of_bounds(self, lo, hi, allocation, what, size, addresses=None):
        element = max(size, 1)
        first, last = (lo - allocation.lo) // element, (hi - allocation.lo) // element - 1
        count = (allocation.hi - allocation.lo) // element
        touched = f"element {first}" if first == last else f"elements {first} … {last}"
        if addresses is not None and addresses.size > 1:
            outside = addresses[(addresses < allocation.lo) | (addresses + element > allocation.hi)]
            touched += f", of which {(int(outside.min()) - allocation.lo) // element} is the first outside"
        return OutOfBoundsError(
            f"{what} of `{allocation.name}` outside the tensor",
            [f"at {show(here())}", f"it touches {touched}; `{allocation.name}` has elements 0 … {count - 1}"],
            cause=f"the mask lets these lanes through (or there is none), or an offset or stride is wrong.\n"
            f"  Fix: pass mask=offsets < size to the {what}" + (", and other=… beside it." if what == "load" else "."),
            where=here(),
        )

    # ---- element access

    def _indices(self, addresses, name, allocation, what):
        """Return (allocation, element index of each address)."""
        size = dtypes.itemsize(name)
        lo, hi = int(addresses.min()), int(addresses.max()) + size
        allocation = self.locate(lo, hi, allocation, what, size, addresses)
        index = addresses - allocation.lo
        if size > 1:
            if int(np.bitwise_or.reduce(index, axis=None)) & (size - 1):
                raise OutOfBoundsError(
                    f"misaligned {what} of `{allocation.name}`",
                    [f"at {show(here())}"],
                    where=here(),
                    cause=f"an address that is no multiple of the element's {size} bytes.",
                )
            index >>= size.bit_length() - 1
        return allocation, index

    def read(self, addresses, name, allocation=None):
        """Return stored values at an int64 array of addresses."""
        if not addresses.size:
            return np.empty(addresses.shape, dtypes.stored(name))
        try:
            allocation, index = self._indices(addresses, name, allocation, "load")
        except OutOfBoundsError:
            if allocation is not None or addresses.size == 1:
                raise
            return self._scattered_read(addresses, name)
        return np.take(allocation.view(dtypes.stored(name)), index)

    def _scattered_read(self, addresses, name):
        """Return addresses that came from integers and lie in several tensors: one by one."""
        self._check_scattered(addresses, dtypes.itemsize(name), "load")
        values = [self.read(np.array([a]), name)[0] for a in addresses.ravel()]
        return np.array(values, dtypes.stored(name)).reshape(addresses.shape)

    def _check_scattered(self, addresses, size, what):
        """Report an address outside every tensor where others lie in one: it has left its own."""
        nearest = None
        for address in np.unique(addresses):
            found = self.find_live(int(address))
            if found is None and nearest is not None:
                raise self._out_of_bounds(int(address), int(address) + size, nearest, what, size)
            nearest = found or nearest

    def write(self, addresses, values, name, allocation=None):
        """Store `values` (stored form) at an int64 array of addresses of the same shape."""
        if not addresses.size:
            return
        try:
            allocation, index = self._indices(addresses, name, allocation, "store")
        except OutOfBoundsError:
            if allocation is not None or addresses.size == 1:
                raise
            self._check_scattered(addresses, values.dtype.itemsize, "store")
            for a, v in zip(addresses.ravel(), values.ravel()):
                self.write(np.array([a]), np.array([v]), name)
            return
        flat = allocation.view(values.dtype)
        if self.races:
            self._claim(allocation, index, flat, values)
        flat[index] = values

    # ---- who wrote what

    def clock(self, program):
        """Return the epochs of every program that `program` is ordered after (its own included)."""
        clock = self._clocks.get(program)
        if clock is None:
            clock = self._clocks[program] = {program: 1}
        return clock

    def synchronise(self, address):
        """Order an atomic at `address`: acquire what earlier atomics there published, and publish."""
        me = self.program()
        mine = self.clock(me)
        theirs = self._published.setdefault(address, {})
        for program, epoch in theirs.items():
            if mine.get(program, 0) < epoch:
                mine[program] = epoch
        theirs.update(mine)
        mine[me] += 1

    def _claim(self, allocation, index, flat, values):
        """Mark elements as written by this program; report those that an unordered program wrote differently."""
        size = values.dtype.itemsize
        owners, grains = allocation.owners(size)
        if grains > 1:
            owners = owners[: len(owners) // grains * grains].reshape(-1, grains)[:, 0]
        me = self.program()
        before = np.take(owners, index)
        foreign = (before != 0) & ((before & _OWNER_MASK) != me + 1)
        if foreign.any():
            self._check_order(allocation, me, before, foreign, index, np.take(flat, index), values)
        owners[index] = (me + 1) | (self.clock(me)[me] << _OWNER_BITS)

    def _check_order(self, allocation, me, before, foreign, index, old, new):
        mine = self.clock(me)
        for mark in np.unique(before[foreign]):
            writer, epoch = int(mark & _OWNER_MASK) - 1, int(mark >> _OWNER_BITS)
            if mine.get(writer, 0) >= epoch:
                continue
            same_place = foreign & (before == mark)
            clash = same_place & (_raw(old) != _raw(new))
            if not clash.any():
                self._duplicate(allocation, writer, me, int(np.broadcast_to(index, same_place.shape)[same_place][0]))
            else:
                element = int(np.broadcast_to(index, clash.shape)[clash][0])
                self.report(
                    GlobalRaceError(
                        f"two programs write different values to `{allocation.name}` element {element}",
                        [
                            f"at {show(here())}",
                            f"program {writer} wrote it first, program {me} now; nothing orders the two",
                        ],
                        cause="offsets that do not depend on tl.program_id as the grid assumes, or a sum over programs "
                        "made with tl.store.\n  Fix: give each program elements of its own, or use tl.atomic_add.",
                        where=here(),
                    )
                )
                return

    def _duplicate(self, allocation, writer, me, element):
        """Warn of two programs that wrote one value to one place: harmless, but rarely meant; said once per launch."""
        if not self._said_duplicate:
            self._said_duplicate = True
            self.warn(
                GlobalRaceError(
                    f"two programs write the same value to `{allocation.name}` element {element}",
                    [f"at {show(here())}", f"program {writer} wrote it first, program {me} now"],
                    cause="every program does the same work: the offsets lack tl.program_id(0) * BLOCK.",
                    where=here(),
                )
            )

    # ---- atomics

    def atomic(self, addresses, values, name, combine, allocation=None):
        """Write combine(old, value) at each address, in order; return the old values (held). `values` are held."""
        if not addresses.size:
            return values.copy()
        allocation, index = self._indices(addresses, name, allocation, "atomic")
        flat, index = allocation.view(dtypes.stored(name)), index.ravel()
        values, old = values.ravel(), np.empty(values.size, values.dtype)
        for lanes in _rounds(index):
            here_index = index[lanes]
            current = dtypes.decode(np.take(flat, here_index), name)
            old[lanes] = current
            flat[here_index] = dtypes.encode(combine(current, values[lanes], lanes), name)
        for address in np.unique(addresses)[:1024]:
            self.synchronise(int(address))
        return old.reshape(addresses.shape)


def _raw(values):
    return values.view(f"uint{8 * values.dtype.itemsize}") if values.dtype.kind == "f" else values


def _rounds(index):
    """Yield lanes in rounds such that no round has two lanes of one address, each address's lanes in order."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    if index.size < 2 or (ordered[1:] != ordered[:-1]).all():
        yield np.arange(index.size)
        return
    first = np.r_[0, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1]
    rank = np.arange(index.size) - np.repeat(first, np.diff(np.r_[first, index.size]))
    for r in range(int(rank.max()) + 1):
        yield order[rank == r]


# ---- TMA

_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_WRAP = (1 << 64) - 1


def _signed(value):
    value &= _WRAP
    return value - (1 << 64) if value >> 63 else value


class TensorMap:
    """A TMA descriptor: a box of `block_shape` elements over a strided tensor in global memory.

    Offsets outside `shape` are filled (loads: zero or NaN) or dropped (stores); addresses wrap modulo 2^64, as the hardware's do.
    """

    def __init__(self, memory, base, shape, strides, block_shape, dtype, padding="zero", allocation=None):
        self.memory, self.base, self.shape, self.strides = memory, base, list(shape), list(strides)
        self.block_shape, self.dtype, self.padding, self.allocation = list(block_shape), dtype, padding, allocation
        self.stored = dtypes.stored(dtype)

    @property
    def nbytes(self):
        """Bytes of a full box: what a load adds to its barrier, clipped or not."""
        count = 1
        for extent in self.block_shape:
            count *= extent
        return count * self.stored.itemsize

    def _check(self, offsets, what):
        """Refuse corners that an H200 answers with an illegal instruction (tests/gpu/h200_facts.json)."""
        row = offsets[-1] * self.stored.itemsize
        if row % _CHUNK:
            raise DescriptorError(
                f"TMA {what} at inner coordinate {offsets[-1]}: {row} bytes is no multiple of {_CHUNK}",
                [f"at {show(here())}"],
                "the innermost coordinate times the element size must be a multiple of 16 bytes; the GPU traps.",
                here(),
            )
        if what != "load" and min(offsets) < 0:
            raise DescriptorError(
                f"TMA {what} at {list(offsets)}: a coordinate is negative",
                [f"at {show(here())}"],
                "loads may start before the tensor (and read zeros), stores may not; the GPU traps.",
                here(),
            )

    def _clip(self, offsets, whole_chunks=False):
        """Return (slices into the box, start per dimension, extents) of the part inside the tensor; None where nothing is.

        Stores clip the inner dimension in chunks of 16 bytes: all of the last element's chunk is written.
        """
        inside, start, extents = [], [], []
        shape = self.shape
        if whole_chunks:
            per = max(1, _CHUNK // self.stored.itemsize)
            shape = [*shape[:-1], -(-shape[-1] // per) * per]
        for offset, box, size in zip(offsets, self.block_shape, shape):
            lo, hi = max(offset, 0), min(offset + box, size)
            if lo >= hi:
                return None
            inside.append(slice(lo - offset, hi - offset))
            start.append(lo)
            extents.append(hi - lo)
        return tuple(inside), start, extents

    def inside(self, offsets):
        """Return slices of the box's part inside the tensor; None where nothing is."""
        clip = self._clip(offsets)
        return None if clip is None else clip[0]

    def _window(self, start, extents, what):
        """Return (allocation, first element, element strides): the clipped box as a strided window."""
        size = self.stored.itemsize
        first = (self.base + sum(s * stride for s, stride in zip(start, self.strides)) * size) & _WRAP
        strides = [_signed(stride * size) for stride in self.strides]
        reach = [(n - 1) * s for n, s in zip(extents, strides)]
        lo = first + sum(r for r in reach if r < 0)
        hi = first + sum(r for r in reach if r > 0) + size
        allocation = self.memory.locate(lo, hi, self.allocation, f"TMA {what}", size)
        return allocation, first - allocation.lo, strides

    def _strided(self, flat, first, extents, strides):
        step = flat.dtype.itemsize // self.stored.itemsize  # an owners array has wider elements than the data
        return np.ndarray(extents, flat.dtype, flat.data, first * step, [s * step for s in strides])

    def load(self, offsets):
        """Return the box at `offsets`, stored form."""
        if Active.counts is not None:
            Active.counts.load(math.prod(self.block_shape))
        self._check(offsets, "load")
        fill = _nan(self.dtype) if self.padding == "nan" else 0
        clip = self._clip(offsets)
        if clip is None:
            return np.full(self.block_shape, fill, self.stored)
        inside, start, extents = clip
        allocation, first, strides = self._window(start, extents, "load")
        window = self._strided(allocation.view(self.stored), first, extents, strides)
        if extents == self.block_shape:
            return window.copy()
        box = np.full(self.block_shape, fill, self.stored)
        box[inside] = window
        return box

    def store(self, offsets, values):
        """Write the part of the box that lies inside the tensor. `values`: stored form, block_shape."""
        if Active.counts is not None:
            Active.counts.store(math.prod(self.block_shape))
        self._check(offsets, "store")
        clip = self._clip(offsets, whole_chunks=True)
        if clip is None:
            return
        inside, start, extents = clip
        allocation, first, strides = self._window(start, extents, "store")
        values = values.reshape(self.block_shape)[inside]
        flat = allocation.view(self.stored)
        if self.memory.races:
            size = self.stored.itemsize
            index = np.full(extents, first // size, np.int64)
            for axis, (n, s) in enumerate(zip(extents, strides)):
                index += (np.arange(n) * (s // size)).reshape([-1] + [1] * (len(extents) - axis - 1))
            self.memory._claim(allocation, index, flat, values)
        self._strided(flat, first, extents, strides)[...] = values

    def reduce(self, offsets, values, kind):
        """Combine atomically the box into memory: add, min, max, and, or, xor; the sum is rounded to the dtype."""
        self._check(offsets, "reduction")
        clip = self._clip(offsets, whole_chunks=True)
        if clip is None:
            return
        inside, start, extents = clip
        allocation, first, strides = self._window(start, extents, "reduction")
        window = self._strided(allocation.view(self.stored), first, extents, strides)
        new = dtypes.decode(np.ascontiguousarray(values.reshape(self.block_shape)[inside]), self.dtype)
        old = dtypes.decode(np.ascontiguousarray(window), self.dtype)
        window[...] = dtypes.encode(_REDUCTIONS[kind](old, new), self.dtype)


def _nan(dtype):
    if dtype == "bf16":
        return 0x7FC0
    if dtype.startswith("fp8"):
        return 0x7F
    return np.nan if dtype.startswith("fp") else 0
