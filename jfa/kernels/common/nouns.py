"""Values that travel together through a kernel: spans, bands, ranges of blocks, tiles.

Each is a Triton aggregate: the compiler splits it into its fields first, so it costs no register and no instruction.
Fields are read-only: to change a tile, build a new one. A field of type ``tl.tensor`` cannot hold a Python number;
``tl.to_tensor(0)`` converts one.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate  # private: imported here only

from jfa.kernels.common.band import in_band
from jfa.kernels.common.band import key_blocks as _key_blocks
from jfa.kernels.common.band import query_blocks as _query_blocks
from jfa.kernels.common.ragged import ragged_box

FIELDS = ("q_begin", "len_q", "row", "out_begin", "kv_begin", "len_kv", "lo", "hi", "pad_begin")
"""Names of the int32 numbers of a tile's record, in their order; see :class:`Tile`."""
RECORD = tl.constexpr(len(FIELDS))  # numbers per record


def aggregate(cls):
    """Make a class of annotated fields an aggregate, built from its fields in their order.

    A field is annotated with the class of its values: tl.tensor, tl.constexpr, a TLX type, or another aggregate.
    """
    if "__init__" not in vars(cls):
        cls.__init__ = _constructor(cls.__name__, tuple(cls.__annotations__))
    return _aggregate(cls)


def _constructor(name: str, fields: tuple[str, ...]):
    """Return the ``__init__`` that Triton 3.7 and later supply and 3.6 lacks."""

    def init(self, *values):
        if len(values) != len(fields):
            raise TypeError(f"{name} has the fields {', '.join(fields)}, got {len(values)} values")
        for field, value in zip(fields, values):
            setattr(self, field, value if isinstance(value, tl.core.base_value) else tl.constexpr(value))

    init.__triton_builtin__ = True
    return init


@aggregate
class Span:
    """Rows of one sequence in a packed tensor: [begin, begin + length)."""

    begin: tl.tensor
    length: tl.tensor

    @triton.jit
    def box(self, row, head, column=0):
        """Return the coordinates of the ragged box at ``row`` of the sequence; see jfa.kernels.common.ragged."""
        return ragged_box(self.begin, self.length, row, head, column)


@aggregate
class Band:
    """The pairs that count, i + lo <= j <= i + hi. Without ``has_lo`` or ``has_hi`` that side is unbounded, and its
    bound is not read."""

    lo: tl.tensor
    hi: tl.tensor
    has_lo: tl.constexpr
    has_hi: tl.constexpr


@aggregate
class Blocks:
    """Blocks of the other side that a tile visits: [first, end), of which [bulk_begin, bulk_end) need no mask."""

    first: tl.tensor
    bulk_begin: tl.tensor
    bulk_end: tl.tensor
    end: tl.tensor

    @triton.jit
    def count(self):
        """Return how many they are."""
        return self.end - self.first

    @triton.jit
    def at_least_one(self):
        """Return these blocks or, where there are none, block 0, wholly masked: so that no role waits for another forever."""
        none = self.end <= self.first
        first, bulk_begin = tl.where(none, 0, self.first), tl.where(none, 0, self.bulk_begin)
        return Blocks(first, bulk_begin, tl.where(none, 0, self.bulk_end), tl.where(none, 1, self.end))

    @triton.jit
    def nth(self, n):
        """Return the n-th block, counted from the front."""
        return self.first + n

    @triton.jit
    def block(self, back):
        """Return the block ``back`` places before the last one."""
        return self.end - 1 - back


@aggregate
class Tile:
    """The data of a tile from its record.

    Attributes:
        row: the tile's first row inside its sequence: a query in the forward's list, a key in the backward's.
        q, kv, out: where the sequence lies in the query, in key and value, and in the output.
        band: which pairs of the sequence count.
        pad_begin: where the sequence's queries begin in arrays padded to whole blocks (jfa.kernels.common.padded_rows).
    """

    row: tl.tensor
    q: Span
    kv: Span
    out: Span
    band: Band
    pad_begin: tl.tensor

    @triton.jit
    def key_blocks(self, rows, BLOCK_N: tl.constexpr):
        """Return the Blocks of BLOCK_N keys that the queries [row, row + rows) see; see jfa.kernels.common.band."""
        band = self.band
        first, bulk_begin, bulk_end, end = _key_blocks(
            self.row, rows, self.q.length, self.kv.length, band.lo, band.hi, BLOCK_N, band.has_lo, band.has_hi
        )
        return Blocks(first, bulk_begin, bulk_end, end)

    @triton.jit
    def query_blocks(self, keys, BLOCK_M: tl.constexpr):
        """Return the Blocks of BLOCK_M queries that see the keys [row, row + keys); see jfa.kernels.common.band."""
        band = self.band
        first, bulk_begin, bulk_end, end = _query_blocks(
            self.row, keys, self.q.length, self.kv.length, band.lo, band.hi, BLOCK_M, band.has_lo, band.has_hi
        )
        return Blocks(first, bulk_begin, bulk_end, end)

    @triton.jit
    def pair_mask(self, queries, keys):
        """Return which pairs count, for positions in the sequence that broadcast against each other."""
        band = self.band
        return in_band(queries, keys, self.kv.length, band.lo, band.hi, band.has_lo, band.has_hi)


@aggregate
class RowPointers:
    """Pointers to the log-sum-exp in base 2 and delta of every query row, [H, count] fp32, padded.

    See jfa.kernels.common.padded_rows.
    """

    lse: tl.tensor
    delta: tl.tensor
    count: tl.tensor

    @triton.jit
    def of_sequence(self, tile, head):
        """Return (lse, delta), pointers to the numbers of the first query of a tile's sequence."""
        begin = self.count.to(tl.int64) * head + tile.pad_begin
        return self.lse + begin, self.delta + begin


@triton.jit
def load_tile(records, index, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Read the record of a tile. Loads of fields that are not used are not made."""
    at = records + index * RECORD
    q_begin = tl.load(at)
    len_q = tl.load(at + 1)
    row = tl.load(at + 2)
    out_begin = tl.load(at + 3)
    kv_begin = tl.load(at + 4)
    len_kv = tl.load(at + 5)
    band = Band(tl.load(at + 6), tl.load(at + 7), HAS_LO, HAS_HI)
    pad_begin = tl.load(at + 8)
    return Tile(row, Span(q_begin, len_q), Span(kv_begin, len_kv), Span(out_begin, len_q), band, pad_begin)


@triton.jit
def store_record(records, index, tile, row, mask):
    """Write the records ``index`` (a block) of ``tile`` with ``row`` instead of its own; fields broadcast."""
    q, kv, out, band = tile.q, tile.kv, tile.out, tile.band
    fields = (q.begin, q.length, row, out.begin, kv.begin, kv.length, band.lo, band.hi, tile.pad_begin)
    for i in tl.static_range(RECORD):
        tl.store(records + index * RECORD + i, fields[i] + row * 0, mask=mask)
