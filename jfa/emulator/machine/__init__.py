"""The emulated machine, without Triton: CTAs, tasks, barriers, memories, engines, a race detector. README.md has the
picture."""

from . import limits
from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .machine import Machine, Run, launch
from .running import charge, current, exchange
from .storage import Storage, View, smem_view, tmem_columns, tmem_view
from .tasks import CTA, AsyncOp, Cluster, Task

__all__ = [
    "CTA",
    "AsyncOp",
    "Cluster",
    "ClusterBarrier",
    "MBarrier",
    "Machine",
    "NamedBarrier",
    "Run",
    "Storage",
    "Task",
    "View",
    "charge",
    "current",
    "exchange",
    "launch",
    "limits",
    "smem_view",
    "tmem_columns",
    "tmem_view",
]
