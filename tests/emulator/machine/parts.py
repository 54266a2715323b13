"""Small machines for the tests: barriers and buffers without TLX, written straight against jfa.emulator.machine."""

import numpy as np

from jfa.emulator.machine import MBarrier, Storage, current, launch, smem_view, sync  # noqa: F401
from jfa.emulator.options import Options

POLICIES = [
    Options(policy="eager"),
    Options(policy="lazy"),
    *(Options(policy="random", seed=s) for s in range(4)),
    Options(policy="timed"),
]


def name(options):
    return f"{options.policy}{options.seed or ''}"


class Bars:
    """An array of mbarriers of the running CTA."""

    def __init__(self, label, count, arrive_count=1):
        cta = current().cta
        self.barriers = [MBarrier(f"{label}[{i}]", cta, arrive_count) for i in range(count)]
        sync.allocated(cta, self)

    def __getitem__(self, index):
        return self.barriers[index]


class Buffers:
    """`count` SMEM buffers of `size` fp32 values."""

    def __init__(self, label, count, size=16):
        cta = current().cta
        machine = cta.machine
        self.label, self.size = label, size
        self.storage = Storage(cta, "smem", 4 * size * count, label, machine.options.poison, machine.watch)
        self.views = [smem_view(self.storage, 4 * size * i, (size,), np.float32) for i in range(count)]

    def load(self, index):
        return sync.load(current(), self.views[index], (), f"{self.label}[{index}]").copy()

    def store(self, index, value):
        sync.store(current(), self.views[index], value, (), f"{self.label}[{index}]")


def wait(bar, parity):
    task = current()
    task.machine.scheduler.step(task, "barrier_wait", bar.name, ())
    sync.wait(task, bar, parity & 1, ())


def arrive(bar, count=1):
    task = current()
    task.machine.scheduler.step(task, "barrier_arrive", bar.name, ())
    sync.arrive(task, bar, count, ())


def tasks(**bodies):
    """Run the bodies as tasks of one warp group each."""
    sync.run_region(current(), [(label, body, 4, 0) for label, body in bodies.items()], ())


def run(kernel, options=None, grid=1, cluster=1):
    return launch(kernel, grid, cluster, options=options)
