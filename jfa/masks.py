"""Masks, causal and windows: which (query, key) pairs count, exact pair counts and FLOPs.

Every mask that jfa supports is a *band*: query ``i`` of a sequence sees the keys ``lo(i) <= j <= hi(i)``, both bounds
moving one key per query. Two anchors exist: a bound tied to the sequences' starts (``i + c``), and one tied to their
ends (``i + c + len_kv - len_q``). So four numbers describe causal (either alignment) and window (either kind) masks and
all their combinations; the reference, the pair counts and every kernel use the same four numbers.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

UNBOUNDED = 1 << 30  # a bound no int32 sequence position can reach, still safe to add lengths to
WIDEST = 1 << 28  # keys of a window's side: sums and differences of bounds stay inside int32


@dataclass(frozen=True)
class Band:
    """Keys seen by query ``i``: ``max(i + lo_start, i + lo_end + d) <= j <= min(i + hi_start, i + hi_end + d)``.

    ``d = len_kv - len_q``. ``None`` means that the bound does not exist. ``0 <= j < len_kv`` always holds as well.
    """

    lo_start: int | None = None
    lo_end: int | None = None
    hi_start: int | None = None
    hi_end: int | None = None

    @classmethod
    def make(cls, causal: bool | str = False, window_size: int | tuple[int, int] | None = None) -> Band:
        """Return the band of a call's ``causal`` and ``window_size`` arguments.

        Args:
            causal: False, True or "bottom_right" (the last query sees the last key), or "top_left" (query i sees
                keys 0..i).
            window_size: None, W (keys with ``|i - j| <= W``, both counted from their own start), or (left, right)
                around the diagonal ``i + len_kv - len_q`` as in FlashAttention, where -1 leaves that side open.

        Raises:
            ValueError, TypeError: naming ``causal`` or ``window_size``.
        """
        if causal not in (False, True, "bottom_right", "top_left"):
            raise ValueError(f"causal must be False, True, 'bottom_right' or 'top_left', got {causal!r}")
        lo_start = lo_end = hi_start = hi_end = None
        if window_size is not None:
            if isinstance(window_size, tuple | list):
                if len(window_size) != 2 or not all(_is_int(w) for w in window_size):
                    raise TypeError(f"window_size must be an int or a pair of ints (left, right), got {window_size!r}")
                left, right = (_plain(w) for w in window_size)
                _check_width(window_size, max(left, right))
                if left < -1 or right < -1:
                    sides = tuple(window_size)
                    raise ValueError(f"window_size sides must be >= 0, or -1 for an open side, got {sides}")
                lo_end = None if left == -1 else -left
                hi_end = None if right == -1 else right
            elif _is_int(window_size):
                window_size = _plain(window_size)
                _check_width(window_size, window_size)
                if window_size < 0:
                    raise ValueError(f"window_size must be >= 0, or None for no window, got {window_size}")
                lo_start, hi_start = -window_size, window_size
            else:
                kind = type(window_size).__name__
                raise TypeError(f"window_size must be an int, a pair of ints (left, right) or None, got {kind}")
        if causal == "top_left":
            hi_start = 0 if hi_start is None else min(hi_start, 0)
        elif causal:
            hi_end = 0 if hi_end is None else min(hi_end, 0)
        return cls(lo_start, lo_end, hi_start, hi_end)

    @property
    def constants(self) -> tuple[int, int, int, int]:
        """(lo_start, lo_end, hi_start, hi_end) as a kernel takes them: 32 bits, an open side beyond any row."""
        lows = (-UNBOUNDED if c is None else max(c, -UNBOUNDED) for c in (self.lo_start, self.lo_end))
        highs = (UNBOUNDED if c is None else min(c, UNBOUNDED) for c in (self.hi_start, self.hi_end))
        return (*lows, *highs)

    @property
    def has_lo(self) -> bool:
        """Whether any lower bound exists (a window)."""
        return self.lo_start is not None or self.lo_end is not None

    @property
    def has_hi(self) -> bool:
        """Whether any upper bound exists (causal, or a window)."""
        return self.hi_start is not None or self.hi_end is not None

    def offsets(self, len_q: int, len_kv: int) -> tuple[int, int]:
        """Return (lo, hi) of one pair of sequences, in keys: query i sees ``i + lo <= j <= i + hi``; +-UNBOUNDED if open."""
        d = len_kv - len_q
        los = [c for c in (self.lo_start, None if self.lo_end is None else self.lo_end + d) if c is not None]
        his = [c for c in (self.hi_start, None if self.hi_end is None else self.hi_end + d) if c is not None]
        return max(los, default=-UNBOUNDED), min(his, default=UNBOUNDED)

    def bounds(self, len_q: Tensor, len_kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`offsets` for many sequences at once: [B] lengths -> (lo [B], hi [B]) int64, on the lengths' device."""
        len_q, len_kv = _as_int64(len_q), _as_int64(len_kv)
        d = len_kv - len_q
        lo, hi = torch.full_like(d, -UNBOUNDED), torch.full_like(d, UNBOUNDED)
        if self.lo_start is not None:
            lo = lo.clamp(min=self.lo_start)
        if self.lo_end is not None:
            lo = torch.maximum(lo, d + self.lo_end)
        if self.hi_start is not None:
            hi = hi.clamp(max=self.hi_start)
        if self.hi_end is not None:
            hi = torch.minimum(hi, d + self.hi_end)
        return lo, hi

    def dense(self, len_q: int, len_kv: int, *, device: torch.device | str | None = None) -> Tensor:
        """Return [len_q, len_kv] bool: True where query i may look at key j."""
        lo, hi = self.offsets(len_q, len_kv)
        distance = torch.arange(len_kv, device=device) - torch.arange(len_q, device=device)[:, None]  # j - i
        return (distance >= lo) & (distance <= hi)


def _is_int(x: object) -> bool:
    """Return whether it is an integer, NumPy's too; True and False are none."""
    return isinstance(x, int | numbers.Integral) and not isinstance(x, bool)


def _check_width(given: object, width: int) -> None:
    """Raise ValueError where positions plus or minus ``width`` would leave int32, in which kernels count."""
    if width > WIDEST:
        open_side = "None (-1 for one side) leaves it open"
        raise ValueError(f"window_size must be at most {WIDEST} keys per side ({open_side}), got {given}")


def _plain(x: int | numbers.Integral) -> int:
    return x if isinstance(x, int) else int(x)


def _as_int64(lengths: Tensor | np.ndarray | list[int] | int) -> Tensor:
    return torch.as_tensor(lengths).to(torch.int64)


# ------------------------------------------------------------------------------------------------------ pairs and FLOPs
def allowed_pairs(band: Band, len_q: Tensor, len_kv: Tensor) -> Tensor:
    """Return how many (query, key) pairs count in each sequence: [B] lengths -> [B] int64, in closed form, on any device."""
    len_q, len_kv = _as_int64(len_q), _as_int64(len_kv)
    lo, hi = band.bounds(len_q, len_kv)
    return (_pairs_up_to(hi, len_q, len_kv) - _pairs_up_to(lo - 1, len_q, len_kv)).clamp(min=0)


def _pairs_up_to(c: Tensor, len_q: Tensor, len_kv: Tensor) -> Tensor:
    """Return pairs with j <= i + c: the sum over queries of clamp(i + c + 1, 0, len_kv), as a difference of two such sums."""
    c = torch.minimum(torch.maximum(c, -len_q), len_kv)  # beyond these nothing changes; keeps products small
    return _ramp_sum(c + len_q, len_kv) - _ramp_sum(c, len_kv)


def _ramp_sum(x: Tensor, top: Tensor) -> Tensor:
    """Return the sum over t = 1 .. x of min(t, top); 0 for x <= 0."""
    x = x.clamp(min=0)
    below = torch.minimum(x, top)
    return below * (below + 1) // 2 + (x - below) * top


def attention_flops(
    pairs: int, num_heads: int, head_dim: int, head_dim_v: int | None = None, *, backward: bool = False
) -> int:
    """Return the FLOPs of the matrix products over ``pairs`` allowed pairs: 4 * pairs * H * D forward, and 2.5 times that backward.

    Forward multiplies twice (Q K^T over D, P V over Dv); backward five times (S, dQ, dK over D; dP, dV over Dv). A multiply
    and an add are two FLOPs.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    per_pair = 3 * head_dim + 2 * head_dim_v if backward else head_dim + head_dim_v
    return 2 * int(pairs) * num_heads * per_pair


def flop_waste(len_q: Tensor, len_kv: Tensor | None = None, band: Band | None = None) -> float:
    """Return the share of a padded batch's B * max_q * max_kv pairs that attention does not need; 0 if there is no pair
    at all."""
    len_q = _as_int64(len_q)
    len_kv = len_q if len_kv is None else _as_int64(len_kv)
    padded = len_q.numel() * int(len_q.max()) * int(len_kv.max()) if len_q.numel() else 0
    return 1.0 - int(allowed_pairs(band or Band(), len_q, len_kv).sum()) / padded if padded else 0.0


# ----------------------------------------------------------------------------------------------------------- blocks
class Block(IntEnum):
    """Kind of a tile of scores: empty, partly masked, or full (no mask needed)."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


def block_kinds(band: Band, len_q: int, len_kv: int, block_m: int, block_n: int) -> Tensor:
    """Return [ceil(len_q / block_m), ceil(len_kv / block_n)] int8 of :class:`Block` for one pair of sequences.

    A block that sticks out past the last key is PARTIAL (those columns must be masked); rows past the last query ask for
    nothing, as they are never stored.
    """
    lo, hi = band.offsets(len_q, len_kv)
    q0 = torch.arange(0, len_q, block_m)[:, None]
    q_last = (q0 + block_m).clamp(max=len_q) - 1
    k0 = torch.arange(0, len_kv, block_n)[None, :]
    k_last = (k0 + block_n).clamp(max=len_kv) - 1
    nearest, farthest = k0 - q_last, k_last - q0  # j - i takes every value between these two
    touched = (nearest <= hi) & (farthest >= lo) & torch.tensor(lo <= hi)
    full = (nearest >= lo) & (farthest <= hi) & (k0 + block_n <= len_kv)
    return touched.to(torch.int8) + (touched & full).to(torch.int8)


def key_ranges(
    band: Band, q_start: Tensor, q_end: Tensor, len_q: Tensor, len_kv: Tensor, block_n: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the key blocks that tiles of queries visit, and those among them that need no mask: what a peeled loop runs over.

    Args:
        q_start, q_end: [T] first query of each tile and one past its last, inside their sequences (0 <= start < end <= len_q).
        len_q, len_kv: [T] lengths of the sequences that the tiles belong to.
        block_n: keys per block.

    Returns:
        (first, full_first, full_end, end), each [T] int64 in blocks: [first, full_first) masked, [full_first, full_end)
        full, [full_end, end) masked. ``first == end`` if the tile sees no key.
    """
    return _ranges(*band.bounds(len_q, len_kv), q_start, q_end, len_kv, block_n)


def query_ranges(
    band: Band, k_start: Tensor, k_end: Tensor, len_q: Tensor, len_kv: Tensor, block_m: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mirror of :func:`key_ranges` for a backward that holds a tile of keys: the query blocks that see any of it.

    A query block that sticks out past ``len_q`` counts as masked: its surplus rows would add to dK and dV.
    """
    lo, hi = band.bounds(len_q, len_kv)
    return _ranges(-hi, -lo, k_start, k_end, len_q, block_m)


def _ranges(lo: Tensor, hi: Tensor, start: Tensor, end: Tensor, length: Tensor, block: int) -> tuple[Tensor, ...]:
    """Return blocks of the other side, of ``length`` positions, that [start, end) touches through lo <= other - own <= hi."""
    start, end, length = _as_int64(start), _as_int64(end), _as_int64(length)
    zero = torch.zeros_like(length)
    touch_from = torch.maximum(start + lo, zero)
    touch_to = torch.minimum(end + hi, length)  # one past the last
    some = (touch_from < touch_to) & (lo <= hi) & (start < end)
    first = torch.where(some, touch_from // block, 0)
    stop = torch.where(some, (touch_to + block - 1) // block, 0)
    full_from = torch.maximum(end - 1 + lo, zero)  # every row of the tile sees from here ...
    full_to = torch.minimum(start + hi + 1, length)  # ... to here
    full_first = torch.minimum(torch.maximum((full_from + block - 1) // block, first), stop)
    full_stop = torch.minimum(torch.maximum(full_to // block, full_first), stop)
    return first, full_first, full_stop, stop
