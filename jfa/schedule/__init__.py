"""Assign tiles to workers, and order them.

:mod:`jfa.schedule.tiles` builds lists of tiles from offsets, on any device and without synchronizing;
:mod:`jfa.schedule.assign` deals tiles to workers (on the host, for planning, tests and teaching);
:mod:`jfa.schedule.clc` models Blackwell's work-stealing queue; :mod:`jfa.schedule.split` cuts mega-tiles along their
keys.
"""

from jfa.schedule.assign import Balance, balance, longest_first, round_robin, zigzag, zigzag_slot
from jfa.schedule.clc import ClcQueue, simulate_queue
from jfa.schedule.split import split_decision, split_tiles
from jfa.schedule.tiles import Tiles, key_tiles, max_tiles, query_tiles, zigzag_list

__all__ = [
    "Balance", "ClcQueue", "Tiles", "balance", "key_tiles", "longest_first", "max_tiles", "query_tiles", "round_robin",
    "simulate_queue", "split_decision", "split_tiles", "zigzag", "zigzag_list", "zigzag_slot",
]  # fmt: skip
