"""Locate every sequence of a call in the packed tensors, inside their bounds even where offsets are wrong.

With ``margins`` sequences are numbered from 1: number 0 is the margin of rows before the first offset, batches + 1 the
margin after the last. No sequence covers those rows, so nothing attends to them or is attended by them, and their
results are zeros.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.nouns import Band, Span, Tile, aggregate


@triton.jit
def rows_of(offsets, b, rows):
    """Return (first row, number of rows) of sequence b, inside the tensor's ``rows`` whatever the offsets say, as int32."""
    begin = tl.minimum(tl.maximum(tl.load(offsets + b), 0), rows)
    end = tl.minimum(tl.maximum(tl.load(offsets + b + 1), begin), rows)
    return tl.cast(begin, tl.int32), tl.cast(end - begin, tl.int32)


@triton.jit
def band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end):
    """Return (lo, hi) of a sequence: query i sees the keys i + lo <= j <= i + hi. See jfa.masks.Band."""
    d = len_kv - len_q
    return tl.maximum(lo_start, lo_end + d), tl.minimum(hi_start, hi_end + d)


@aggregate
class Offsets:
    """The offset tensors of a call [B + 1], int32 or int64; ``output`` is None where shared queries have no slots of their own."""

    query: tl.tensor
    key: tl.tensor
    output: tl.core.base_value


@aggregate
class Sizes:
    """The number of sequences, and the rows of query, of key and value, and of the output."""

    batches: tl.tensor
    q: tl.tensor
    kv: tl.tensor
    out: tl.tensor


@aggregate
class BandConstants:
    """The constants of a :class:`jfa.masks.Band` that all sequences share; an open side gets a bound beyond any row."""

    lo_start: tl.tensor
    lo_end: tl.tensor
    hi_start: tl.tensor
    hi_end: tl.tensor


@aggregate
class Sequences:
    """All sequences of one call; see jfa.kernels.base.Problem.

    ``pad``: each sequence's queries are padded to a multiple of so many rows in arrays of a backward
    (jfa.kernels.common.padded_rows), and tiles have their ``pad_begin``; 0: no such arrays.
    """

    offsets: Offsets
    rows: Sizes
    band: BandConstants
    broadcast_q: tl.constexpr
    has_lo: tl.constexpr
    has_hi: tl.constexpr
    margins: tl.constexpr
    pad: tl.constexpr

    @triton.jit
    def span(self, offset, s, rows):
        """Return the Span of sequences ``s`` in a tensor of ``rows`` rows; past the last margin it means nothing."""
        if self.margins:
            begin = tl.load(offset + s - 1, mask=(s > 0) & (s < self.rows.batches + 2), other=0)
            end = tl.load(offset + s, mask=s <= self.rows.batches, other=rows)
            begin = tl.minimum(tl.maximum(begin, 0), rows)
            length = tl.maximum(tl.minimum(end, rows) - begin, 0)
            return Span(tl.cast(begin, tl.int32), tl.cast(length, tl.int32))
        else:
            begin, length = rows_of(offset, s, rows)
            return Span(begin, length)

    @triton.jit
    def tile(self, s, KEYS: tl.constexpr):
        """Return (tile, rows): all of sequences ``s`` as a Tile at row 0, and how many of its rows there are to cut.

        Those are rows of keys with KEYS, else of queries. A shared query's slot that is not inside the output leaves it no
        queries; neither has a margin's keys, nor a margin's queries keys.
        """
        number = s
        real = s < self.rows.batches
        if self.margins:
            number = s - 1
            real = (s > 0) & (s <= self.rows.batches)
        kv = self.span(self.offsets.key, s, self.rows.kv)
        if self.broadcast_q:
            q, cut, out_begin = self.shared_query(number, real)
        else:
            q = self.span(self.offsets.query, s, self.rows.q)
            cut = q.length
            out_begin = q.begin
        if KEYS:
            cut = kv.length
        if self.margins:
            if KEYS:
                q = Span(q.begin, tl.where(real, q.length, 0))
            else:
                kv = Span(kv.begin, tl.where(real, kv.length, 0))
            cut = tl.where(s < self.rows.batches + 2, cut, 0)
        c = self.band
        lo, hi = band_of(q.length, kv.length, c.lo_start, c.lo_end, c.hi_start, c.hi_end)
        band = Band(lo, hi, self.has_lo, self.has_hi)
        return Tile(s * 0, q, kv, Span(out_begin, q.length), band, self.pad_begin(s, q)), cut

    @triton.jit
    def pad_begin(self, s, q):
        """Return where the padded queries of the sequences ``s`` begin; each has grown by less than ``pad`` rows."""
        if self.pad == 0:
            return s * 0
        elif not self.broadcast_q:
            return (q.begin + s * self.pad) // self.pad * self.pad
        else:
            number = s
            if self.margins:
                number = tl.minimum(tl.maximum(s - 1, 0), self.rows.batches - 1)
            return number * (tl.cdiv(self.rows.q, self.pad) * self.pad)

    @triton.jit
    def shared_query(self, number, real):
        """Return (Span of the query, its rows to cut, first output row) for the sequences ``number`` that are ``real``."""
        length = number * 0 + self.rows.q
        if self.margins:
            length = tl.where(real, length, 0)
        cut = length
        out_begin = number * self.rows.q
        if self.offsets.output is not None:
            out_begin = tl.load(self.offsets.output + number, mask=real, other=0)
            length = tl.where((out_begin >= 0) & (out_begin <= self.rows.out - self.rows.q), length, 0)
            out_begin = tl.cast(tl.where(length > 0, out_begin, 0), tl.int32)
        return Span(number * 0, length), cut, out_begin


@triton.jit
def sequence_of(tile, PAD: tl.constexpr, BROADCAST_Q: tl.constexpr, MARGINS: tl.constexpr):
    """Return the number of a tile's sequence, which its record does not hold, from where its padded queries begin.

    The inverse of :meth:`Sequences.pad_begin`; the first sequence is number 0 with margins, too.
    """
    if BROADCAST_Q:
        rows_q = max(tile.q.length, 1)  # the same for all sequences, but 0 where no output is written
        return tile.pad_begin // (tl.cdiv(rows_q, PAD) * PAD)
    else:
        return tile.pad_begin // PAD - tile.q.begin // PAD - MARGINS
