"""Shared and tensor memory of a CTA, and views into them.

A `Storage` is one piece of memory: flat bytes (SMEM) or 128 lanes of bytes (TMEM). Buffers that alias share a Storage,
so a write through one is seen through the other, as on the chip. Fresh storage holds 0xFF bytes: NaN in every
floating-point format used here. A storage to which undefined values were written has marks, one per byte (see
..undefined); the race detector's shadow knows which bytes were never written.

A `View` is a typed window. Most windows are strided numpy views. A tensor-memory tile whose rows are not simply lanes
(64 rows, 256 rows, the half tiles of a two-CTA MMA) is a strided window whose C-order reading is the tile
(`arr.shape != shape`); a window cut from such a tile that strides cannot express falls back to a table of offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BufferIndexError
from ..undefined import MARK
from . import limits
from .shadow import Shadow

if TYPE_CHECKING:
    from .shadow import Region
    from .tasks import CTA


Rectangle = tuple[tuple[int, ...], int, int]
"""Of a tile in tensor memory: (groups of 16 lanes, first byte, bytes per lane)."""

_LANES = 16  # tensor memory is watched in cells of 16 lanes x 4 bytes: every layout below moves 16 lanes together
_SMALL = 4096  # storages up to this size are watched byte by byte, larger ones in words of 4 bytes


class Storage:
    """`nbytes` bytes of SMEM, or (TMEM) 128 lanes of `columns` 4-byte columns."""

    def __init__(self, cta: CTA, space: str, nbytes: int, name: str, poison: bool = True, watch: bool = True) -> None:
        self.cta, self.space, self.name, self.nbytes = cta, space, name, nbytes
        self.data = np.full(nbytes, 0xFF, np.uint8) if poison else np.zeros(nbytes, np.uint8)
        if space == "tmem":
            self.row = nbytes // limits.TMEM_LANES
        granule = 4 if space == "tmem" or nbytes > _SMALL else 1
        cells = nbytes // 4 // _LANES if space == "tmem" else -(-nbytes // granule)
        self.shadow: Any = Shadow(cells, granule, self) if watch else None
        self.undefined: Any = None  # marks of the bytes, once there are any

    def typed(self, dtype: Any) -> np.ndarray:
        """Return all bytes as a flat array of dtype."""
        return self.data.view(dtype)


class View:
    """A typed window: `shape` elements of numpy type `dtype`, read and written in C order."""

    __slots__ = ("storage", "shape", "dtype", "arr", "offsets", "rectangle", "_region", "_shares")

    def __init__(
        self,
        storage: Storage,
        shape: Sequence[int],
        dtype: Any,
        arr: np.ndarray | None = None,
        offsets: np.ndarray | None = None,
        rectangle: Rectangle | None = None,
    ) -> None:
        self.storage, self.shape, self.dtype = storage, tuple(shape), np.dtype(dtype)
        self.arr: Any = arr  # the elements themselves, or None: then at `offsets` of the storage
        self.offsets: Any = offsets
        self._region: Region | None = None
        self._shares: list[Region | None] | None = None
        self.rectangle: Any = rectangle  # of a tile in tensor memory: (groups of 16 lanes, first byte, bytes in a lane)

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for s in self.shape:
            n *= s
        return n

    def read(self) -> np.ndarray:
        """Return the elements, possibly as a view of the memory itself: copy before keeping."""
        if self.arr is not None:
            return self.arr if self.arr.shape == self.shape else self.arr.reshape(self.shape)
        return self.storage.typed(self.dtype)[self.offsets]

    def write(self, values: Any, undefined: np.ndarray | None = None) -> None:
        """Store the elements; `undefined`: their marks, in a shape that broadcasts to the view's."""
        if undefined is not None or self.storage.undefined is not None:
            self._mark(undefined)
        if self.arr is not None:
            self.arr[...] = (
                values if self.arr.shape == self.shape else np.broadcast_to(values, self.shape).reshape(self.arr.shape)
            )
        else:
            self.storage.typed(self.dtype)[self.offsets] = values

    @property
    def undefined(self) -> np.ndarray | None:
        """Marks of the elements: a new array of the view's shape, or None where no byte of them is marked."""
        if self.storage.undefined is None:
            return None
        words = self._words()
        if not words.any():
            return None
        marks = words & 0xFFFF
        for shift in range(16, 8 * words.itemsize, 16):
            np.maximum(marks, words >> shift & 0xFFFF, out=marks)
        return marks.max(axis=-1).astype(MARK).reshape(self.shape)

    def _mark(self, marks: np.ndarray | None) -> None:
        """Set the marks of the elements' bytes (None: defined); a storage without marks forgets them."""
        storage = self.storage
        if storage.undefined is None:
            if marks is None:
                return
            storage.undefined = np.zeros(storage.nbytes + -storage.nbytes % 8, MARK)
        words = self._words()
        if marks is None:
            if not words.any():
                return
            value = words.dtype.type(0)
        else:
            repeated = words.dtype.type(0x0001000100010001 & (1 << 8 * words.itemsize) - 1)
            value = np.broadcast_to(marks, self.shape)[..., None].astype(words.dtype) * repeated
        if self.arr is None:
            storage.undefined.view(words.dtype).reshape(-1, words.shape[-1])[self.offsets] = value
        else:
            words[...] = value if marks is None else value.reshape(*self.arr.shape, 1)
        if marks is None and not storage.undefined.view(np.uint64).any():
            storage.undefined = None

    def _words(self) -> np.ndarray:
        """Return the marks of every element's bytes, up to four in an integer: a last axis longer than `arr`, or than `offsets`."""
        marks, size = self.storage.undefined, self.dtype.itemsize
        together = min(size, 4)
        word = np.dtype(f"u{together * MARK.itemsize}")
        if self.arr is None:
            return marks.view(word).reshape(-1, size // together)[self.offsets]
        start = self.arr.__array_interface__["data"][0] - self.storage.data.__array_interface__["data"][0]
        strides = [s * MARK.itemsize for s in (*self.arr.strides, together)]
        return np.ndarray((*self.arr.shape, size // together), word, marks.data, start * MARK.itemsize, strides)

    def unwritten(self, mark: int) -> np.ndarray:
        """Return marks of the elements of which the race detector has seen no write."""
        if all(atom.write is None for atom in self.region.atoms):
            return np.full(self.shape, mark, MARK)
        shadow, size = self.storage.shadow, self.dtype.itemsize
        fresh = np.array([atom.write is None for atom in shadow.atoms])[shadow.owner]
        first = self.element_offsets() * size
        if self.storage.space == "tmem":
            lane, byte = np.divmod(first, self.storage.row)
            return np.where(fresh[lane // _LANES * (self.storage.row // 4) + byte // 4], mark, MARK.type(0))
        found = fresh[(first + size - 1) // shadow.granule]
        for extra in range(0, size, shadow.granule):
            found |= fresh[(first + extra) // shadow.granule]
        return np.where(found, mark, MARK.type(0))

    def element_offsets(self) -> np.ndarray:
        """Return element offset in the storage of every element, as an array of the view's shape."""
        if self.offsets is not None:
            return self.offsets
        base = self.storage.data.__array_interface__["data"][0]
        size = self.dtype.itemsize
        out = np.full(self.arr.shape, (self.arr.__array_interface__["data"][0] - base) // size, np.int64)
        for axis, (n, stride) in enumerate(zip(self.arr.shape, self.arr.strides)):
            index = np.arange(n, dtype=np.int64) * (stride // size)
            out += index.reshape([-1 if k == axis else 1 for k in range(self.arr.ndim)])
        return out.reshape(self.shape) if self.shape else out

    def derive(self, function: Callable[[np.ndarray], np.ndarray]) -> View:
        """Return the view whose array is function(array): a slice, transpose or reshape."""
        if self.arr is not None and self.arr.shape == self.shape:
            arr = function(self.arr)
            if np.may_share_memory(arr, self.arr):
                return View(self.storage, arr.shape, self.dtype, arr)
        offsets = function(self.element_offsets())
        return View(self.storage, offsets.shape, self.dtype, offsets=np.ascontiguousarray(offsets))

    def columns(self, offset: int, size: int) -> View:
        """Return a slice of the last axis, kept strided where the tile's layout allows."""
        shape = (*self.shape[:-1], size)
        if self.arr is not None:
            last = self.arr.shape[-1]
            if last == self.shape[-1]:
                rectangle = self.rectangle and self._sub_rectangle(offset, size, self.dtype.itemsize)
                return View(self.storage, shape, self.dtype, self.arr[..., offset : offset + size], rectangle=rectangle)
            if offset // last == (offset + size - 1) // last:  # inside one half of a two-CTA tile
                half = self.arr[:, offset // last, offset % last : offset % last + size]
                return View(self.storage, shape, self.dtype, half)
        return self.derive(lambda a: a[..., offset : offset + size])

    def _sub_rectangle(self, offset: int, size: int, itemsize: int) -> Rectangle:
        groups, start, _ = self.rectangle
        return groups, start + offset * itemsize, size * itemsize

    def retype(self, dtype: Any, shape: Sequence[int] | None = None) -> View:
        """Reinterpret the bytes. Without a shape the shape in elements stays, so a narrower type sees the first part of
        the bytes."""
        dtype = np.dtype(dtype)
        shape = self.shape if shape is None else tuple(shape)
        count = int(np.prod(shape))
        if self.storage.space == "tmem":
            rows, cols = shape
            arr = self.arr if self.arr.flags.c_contiguous or self.arr.strides[-1] == self.arr.itemsize else None
            if arr is None:
                raise ValueError("a tensor-memory view cut across its columns cannot be reinterpreted")
            if cols * dtype.itemsize > arr.shape[-1] * arr.itemsize:
                raise self._too_small(rows * cols * dtype.itemsize, arr.size * arr.itemsize)
            arr = arr[..., : cols * dtype.itemsize // arr.itemsize].view(dtype)
            return View(
                self.storage,
                shape,
                dtype,
                arr,
                rectangle=self.rectangle and self._sub_rectangle(0, cols, dtype.itemsize),
            )
        start = int(self.element_offsets().flat[0]) * self.dtype.itemsize
        raw = self.storage.data[start : start + count * dtype.itemsize]
        if raw.nbytes < count * dtype.itemsize:
            raise self._too_small(count * dtype.itemsize, raw.nbytes)
        return View(self.storage, shape, dtype, raw.view(dtype).reshape(shape))

    def _too_small(self, wanted: int, there: int) -> BufferIndexError:
        return BufferIndexError(
            f"a view of {wanted} bytes of {self.storage.name}, which has {there} from there on, ends past its buffer",
            cause="a wider type in the same shape. The compiler takes such a view; on a GPU it shows the next buffer, too.",
        )

    # ------------------------------------------------------------ race detection
    @property
    def region(self) -> Region:
        if self._region is None:
            self._region = self._find_region()
        return self._region

    def shares(self, groups: int) -> list:
        """Return regions of a tile in tensor memory that each of `groups` groups of four warps loads and stores (see warps.py).

        The groups split the columns; a tile of 256 rows, two tiles of 128 side by side, between the two. A tile of fewer
        columns than groups belongs to all groups.
        """
        if self._shares is None or len(self._shares) != groups:
            self._shares = [self._share(k, groups) for k in range(groups)]
        return self._shares

    def _share(self, number: int, groups: int) -> Region | None:
        arr = self.arr
        if arr is None or arr.shape[-1] % groups:
            return self.region
        if self.shape[0] > limits.TMEM_LANES and arr.ndim == 3 and arr.shape[0] % groups == 0:
            step = arr.shape[0] // groups
            return View(self.storage, (), self.dtype, arr[number * step : (number + 1) * step]).region
        step = arr.shape[-1] // groups
        if arr.ndim == 2 and arr.shape == self.shape:
            return self.columns(number * step, step).region
        return View(self.storage, (), self.dtype, arr[..., number * step : (number + 1) * step]).region

    def _find_region(self) -> Region:
        key: tuple
        shadow = self.storage.shadow
        if self.storage.space == "tmem":
            if self.rectangle is not None:
                return shadow.region_of(self.rectangle, self._rectangle_cells)
            key = (self.element_offsets().tobytes(), self.dtype.itemsize)
            return shadow.region_of(key, self._lane_cells)
        g = shadow.granule
        if self.arr is not None:
            start = self.arr.__array_interface__["data"][0] - self.storage.data.__array_interface__["data"][0]
            if self.arr.flags.c_contiguous or self.arr.T.flags.c_contiguous:
                return shadow.region_of_range(start // g, -(-(start + self.arr.nbytes) // g))
            key = (start, self.arr.shape, self.arr.strides, self.dtype.itemsize)
        else:
            key = (self.offsets.tobytes(), self.dtype.itemsize)
        return shadow.region_of(key, lambda: self._byte_cells(g))

    def _rectangle_cells(self) -> np.ndarray:
        groups, start, length = self.rectangle
        columns = np.arange(start // 4, -(-(start + length) // 4))
        return (np.array(groups)[:, None] * (self.storage.row // 4) + columns).ravel()

    def _lane_cells(self) -> np.ndarray:
        lane, byte = np.divmod(self.element_offsets().ravel() * self.dtype.itemsize, self.storage.row)
        return np.unique(lane // _LANES * (self.storage.row // 4) + byte // 4)

    def _byte_cells(self, g: int) -> np.ndarray:
        size = self.dtype.itemsize
        first = self.element_offsets().ravel() * size
        cells = [(first + extra) // g for extra in range(0, size, g)]
        cells.append((first + size - 1) // g)
        return np.unique(np.concatenate(cells))


def smem_view(storage: Storage, offset: int, shape: Sequence[int], dtype: Any) -> View:
    """Return `shape` elements of dtype at byte `offset` of an SMEM storage."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    return View(
        storage, shape, dtype, storage.data[offset : offset + count * dtype.itemsize].view(dtype).reshape(tuple(shape))
    )


def tmem_columns(shape: Sequence[int], itemsize: int, mode: str = "plain") -> int:
    """Return 4-byte columns that a tile of `shape` takes."""
    rows, cols = shape
    if mode == "scales":  # 32 rows per column, 4 scales per cell, repeated in the four 32-lane quarters
        return max(1, -(-rows // 32) * -(-cols // 4))
    width = -(-cols * itemsize // 4)
    if mode == "half":
        return max(1, width // 2)
    return width * max(1, rows // limits.TMEM_LANES)


def tmem_view(storage: Storage, column: int, shape: Sequence[int], dtype: Any, mode: str = "plain") -> View:
    """Return a tile in tensor memory from 4-byte `column` on.

    plain: 128 rows are the 128 lanes; 256 rows are two such tiles side by side; 64 rows take lanes 0-15, 32-47, 64-79
    and 96-111 (PTX layout F); fewer rows take the first lanes.
    half: the accumulator of a two-CTA MMA with 64 rows per CTA: lanes 0-63 hold the left half of the columns, lanes
    64-127 the right half.
    scales: 8-bit block scales; row r, column c lie in lane r % 32, cell (r // 32, c // 4), byte c % 4.
    """
    dtype = np.dtype(dtype)
    rows, cols = shape
    lanes = storage.data.reshape(limits.TMEM_LANES, storage.row)
    if mode == "scales":
        r, c = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
        group = -(-cols // 4)
        offsets = (r % 32) * storage.row + 4 * (column + (r // 32) * group + c // 4) + c % 4
        return View(storage, shape, dtype, offsets=offsets)
    start, width = 4 * column, cols * dtype.itemsize
    if mode == "half":
        half = lanes[:, start : start + width // 2].view(dtype).reshape(2, 64, cols // 2)
        return View(storage, shape, dtype, half.transpose(1, 0, 2))
    if rows > limits.TMEM_LANES:
        parts = rows // limits.TMEM_LANES
        arr = (
            lanes[:, start : start + parts * width]
            .view(dtype)
            .reshape(limits.TMEM_LANES, parts, cols)
            .transpose(1, 0, 2)
        )
        return View(storage, shape, dtype, arr)
    block = lanes[:, start : start + width].view(dtype)
    if rows == 64:
        return View(storage, shape, dtype, block.reshape(4, 32, cols)[:, :16], rectangle=((0, 2, 4, 6), start, width))
    groups = tuple(range(-(-rows // _LANES)))
    return View(storage, shape, dtype, block[:rows], rectangle=(groups, start, width))
