"""The frontend's share of TLX: tasks as functions, private names, names of buffers, the stand-in on upstream Triton."""

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator

emulator.install()

import triton.language.extra.tlx as tlx  # noqa: E402  (the stand-in exists once the hook is in)
from triton.language.extra.tlx import local_view  # noqa: E402


@triton.jit
def doubled(v):
    return v * 2


@triton.jit
def producer_consumer(x, o, n, N: tl.constexpr, BUFFERS: tl.constexpr):
    tiles = tlx.local_alloc((N,), tl.float32, BUFFERS)
    full = tlx.alloc_barriers(BUFFERS, arrive_count=1)
    empty = tlx.alloc_barriers(BUFFERS, arrive_count=1)
    phase = 0
    slot = 0
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for k in range(n):
                tlx.barrier_wait(empty[slot], phase ^ 1)
                tlx.local_store(local_view(tiles, slot), doubled(tl.load(x + k * N + tl.arange(0, N))))
                tlx.barrier_arrive(full[slot])
                slot = slot + 1
                if slot == BUFFERS:
                    slot = 0
                    phase = phase ^ 1
        # consumer
        with tlx.async_task(num_warps=4):
            for k in range(n):
                tlx.barrier_wait(full[slot], phase)
                v = tlx.local_load(tiles[slot])
                tlx.barrier_arrive(empty[slot])
                tl.store(o + k * N + tl.arange(0, N), v + 1)
                slot = slot + 1
                if slot == BUFFERS:
                    slot = 0
                    phase = phase ^ 1
    tl.store(o + n * N, slot + 100 * phase)


@pytest.mark.parametrize("policy", ["eager", "lazy", "random", "timed"])
def test_tasks_have_private_copies_of_the_names_they_assign(policy):
    x, out = torch.randn(5, 64), torch.zeros(5 * 64 + 1)
    with emulator.options(policy=policy, seed=3):
        producer_consumer[(1,)](x, out, 5, 64, 2, num_warps=4)
    assert torch.equal(out[:-1].reshape(5, 64), x * 2 + 1)
    assert out[-1] == 0  # the enclosing function's names are as they were


@triton.jit
def replicas(o, N: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(o + tl.arange(0, N), 0.0)
        with tlx.async_task(num_warps=1, replicate=3):
            me = tlx.async_task_replica_id()
            tl.store(o + (1 + me) * N + tl.arange(0, N), me + 1.0)


def test_replicas_run_the_body_once_each():
    out = torch.full((4, 32), -1.0)
    replicas[(1,)](out, 32)
    assert torch.equal(out[:, 0], torch.tensor([0.0, 1.0, 2.0, 3.0]))


@triton.jit
def forgets_to_arrive(o, N: tl.constexpr):
    ready = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(ready[0], 0)
        with tlx.async_task(num_warps=4):
            tl.store(o + tl.arange(0, N), 0.0)


def test_reports_use_the_kernels_own_names_and_lines():
    with pytest.raises(emulator.EmulatorError, match=r"ready\[0\]") as error:
        forgets_to_arrive[(1,)](torch.zeros(32), 32)
    assert "tlx.barrier_wait(ready[0], 0)" in str(error.value)


def test_a_mistake_inside_a_task_is_a_compile_error_at_its_line():
    @triton.jit
    def kernel(o):
        with tlx.async_tasks():
            with tlx.async_task("default"):
                v = tl.arange(0, 32)
                if v > 3:
                    tl.store(o, 1.0)

    with pytest.raises(triton.compiler.errors.CompilationError, match="if v > 3"):
        kernel[(1,)](torch.zeros(1))


def test_a_block_made_outside_cannot_be_used_in_a_task_of_other_warps():
    @triton.jit
    def kernel(o, N: tl.constexpr):
        i = tl.arange(0, N)
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tl.store(o + i, 1.0)
            with tlx.async_task(num_warps=4):
                tl.store(o + N + i, 2.0)

    with pytest.raises(triton.compiler.errors.CompilationError, match="should not capture RankedTensorType"):
        kernel[(1,)](torch.zeros(64), 32)


@pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="the rule is that of the installed TLX")
def test_what_is_no_run_time_value_cannot_be_assigned_to_a_plain_name():
    @triton.jit
    def kernel(o):
        a = tlx.local_alloc((64, 32), tl.float32, 1, tlx.storage_kind.tmem)
        inside = tlx.reuse_group(a, group_type=tlx.reuse_group_type.shared)  # noqa: F841
        tl.store(o, 1.0)

    with pytest.raises(triton.compiler.errors.CompilationError, match="cannot convert"):
        kernel[(1,)](torch.zeros(1))
