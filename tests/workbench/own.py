"""A file of kernels as a user would write it, for the tools to work on."""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

WIDTH = tl.constexpr(128)


@triton.jit
def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr, POWER: tl.constexpr = 1):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    for _ in tl.static_range(POWER):
        x = x * factor
    tl.store(y_ptr + at, x, mask=at < n)


@triton.jit
def first_box(x_desc, y_ptr, COPIES: tl.constexpr):
    box = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # reader
            tlx.barrier_wait(full[0], 0)
            total = tl.sum(tlx.local_load(box[0]).to(tl.float32), 1)
            tl.store(y_ptr + tl.arange(0, 64), total)
        with tlx.async_task(num_warps=1, registers=24):  # loader
            tlx.barrier_expect_bytes(full[0], 64 * 64 * 2)
            tlx.async_descriptor_load(x_desc, box[0], [0, 0], full[0])
        with tlx.async_task(num_warps=1, registers=24, replicate=COPIES):
            tl.store(y_ptr + 64 + tlx.async_task_replica_id(), 1.0)


@triton.jit
def spills(x_ptr, y_ptr):
    box = tlx.local_alloc((64, 64), tl.float32, 1)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # idle
            tlx.barrier_wait(done[0], 0)
        with tlx.async_task(num_warps=4, registers=24):  # greedy
            at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
            x, y = tl.load(x_ptr + at), tl.load(x_ptr + 4096 + at)
            tlx.local_store(box[0], x + y)
            tl.store(y_ptr + at, x * y + tlx.local_load(box[0]))
            tlx.barrier_arrive(done[0], 1)


def launch():
    x = torch.arange(200.0)
    y = torch.empty_like(x)
    scale[(2,)](x, y, 200, 0.5, BLOCK=WIDTH, num_warps=2)
    return y


def launch_box():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.zeros(128)
    first_box[(1,)](TensorDescriptor.from_tensor(x, [64, 64]), y, 2)
    return y


def launch_two():
    return launch(), launch_box()


def reads_its_result():
    y = launch()
    if y[-1] != 99.5:
        raise RuntimeError("the kernel did not run")
    return y


def launches_nothing():
    return torch.zeros(1)


def fails():
    x = torch.zeros(3)
    return x[5]


def returns_nothing():
    launch_box()


def needs(size):
    return size


def out_of_bounds():
    x = torch.zeros(4)
    scale[(1,)](x, torch.empty(4), 8, 1.0, BLOCK=8)
    return x


SOME_NUMBER = 3
