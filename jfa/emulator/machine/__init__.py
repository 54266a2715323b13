"""The emulated machine, without Triton: clusters, CTAs, tasks, barriers, memories, engines, a race detector. README.md
has the picture."""

from . import limits
from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .machine import Machine, Run, charge, current, launch
from .storage import Storage, View, smem_view, tmem_columns, tmem_view
from .tasks import CTA, AsyncOp, Cluster, Task

__all__ = [
    *("limits", "ClusterBarrier", "MBarrier", "NamedBarrier", "Machine", "Run", "charge", "current", "launch"),
    *("Storage", "View", "smem_view", "tmem_columns", "tmem_view", "CTA", "AsyncOp", "Cluster", "Task"),
]
