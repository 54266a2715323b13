"""Which (query, key) pairs count: causal and window masks, exact pair counts and FLOPs.

Every mask that jfa supports is a *band*: query ``i`` of a sequence sees the keys ``lo(i) <= j <= hi(i)``, both bounds
moving one key a query. Two anchors exist: a bound tied to the sequences' starts (``i + c``), and one tied to their ends
(``i + c + len_kv - len_q``). So four numbers describe causal (either alignment) and window (either kind) masks and all
their combinations; the reference, the pair counts and every kernel read the same four.
"""

from __future__ import annotations

from dataclasses import dataclass

UNBOUNDED = 1 << 30  # a bound no int32 sequence position can reach, still safe to add lengths to


@dataclass(frozen=True)
class Band:
    """Keys seen by query ``i``: ``max(i + lo_start, i + lo_end + d) <= j <= min(i + hi_start, i + hi_end + d)``.

    ``d = len_kv - len_q``. ``None`` means that the bound does not exist. ``0 <= j < len_kv`` always holds besides.
    """

    lo_start: int | None = None
    lo_end: int | None = None
    hi_start: int | None = None
    hi_end: int | None = None

    @classmethod
    def make(cls, causal: bool | str = False, window_size: int | tuple[int, int] | None = None) -> Band:
        """The band of a call's ``causal`` and ``window_size`` arguments.

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
                left, right = window_size
                if left < -1 or right < -1:
                    sides = tuple(window_size)
                    raise ValueError(f"window_size sides must be >= 0, or -1 for an open side, got {sides}")
                lo_end = None if left == -1 else -left
                hi_end = None if right == -1 else right
            elif _is_int(window_size):
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
    def has_lo(self) -> bool:
        """Whether any lower bound exists (a window)."""
        return self.lo_start is not None or self.lo_end is not None

    @property
    def has_hi(self) -> bool:
        """Whether any upper bound exists (causal, or a window)."""
        return self.hi_start is not None or self.hi_end is not None

    def offsets(self, len_q: int, len_kv: int) -> tuple[int, int]:
        """(lo, hi) of one pair of sequences, in keys: query i sees ``i + lo <= j <= i + hi``; +-UNBOUNDED if open."""
        d = len_kv - len_q
        los = [c for c in (self.lo_start, None if self.lo_end is None else self.lo_end + d) if c is not None]
        his = [c for c in (self.hi_start, None if self.hi_end is None else self.hi_end + d) if c is not None]
        return max(los, default=-UNBOUNDED), min(his, default=UNBOUNDED)


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
