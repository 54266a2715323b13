"""Who computes which tile, and in which order.

:mod:`jfa.schedule.tiles` builds lists of tiles from offsets, on any device and without reading anything back;
:mod:`jfa.schedule.assign` deals tiles to workers (host side, to plan, to test and to teach);
:mod:`jfa.schedule.clc` models Blackwell's work-stealing queue; :mod:`jfa.schedule.split` cuts mega-tiles along their keys.
"""

from jfa.schedule.assign import Balance, balance, longest_first, round_robin, zigzag, zigzag_slot
from jfa.schedule.clc import ClcQueue, simulate_queue
from jfa.schedule.split import split_decision, split_tiles
from jfa.schedule.tiles import Tiles, key_tiles, max_tiles, query_tiles, zigzag_list

__all__ = [
    "Balance", "ClcQueue", "Tiles", "balance", "key_tiles", "longest_first", "max_tiles", "query_tiles", "round_robin",
    "simulate_queue", "split_decision", "split_tiles", "zigzag", "zigzag_list", "zigzag_slot",
]  # fmt: skip
