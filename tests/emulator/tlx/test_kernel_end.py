"""A CTA's memory and its start and end: what must be over before it ends, and who may not write to it before it has started."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.emulator import errors

tlx = pytest.importorskip("triton.language.extra.tlx")
every_policy = pytest.mark.parametrize("policy", ["eager", "lazy", "random", "timed"])


@triton.jit
def _prefetches(desc, out, tiles, N: tl.constexpr, AHEAD: tl.constexpr):
    """A ring of two; with AHEAD one tile more is loaded than is used."""
    ring = tlx.local_alloc((N, N), tl.float32, 2)
    fulls = tlx.alloc_barriers(2, arrive_count=1)
    tlx.barrier_expect_bytes(fulls[0], N * N * 4)
    tlx.async_descriptor_load(desc, ring[0], [0, 0], fulls[0])
    total = 0.0
    for k in range(tiles):
        if k + 1 < tiles + AHEAD:
            tlx.barrier_expect_bytes(fulls[(k + 1) % 2], N * N * 4)
            tlx.async_descriptor_load(desc, ring[(k + 1) % 2], [(k + 1) * N, 0], fulls[(k + 1) % 2])
        tlx.barrier_wait(fulls[k % 2], (k // 2) & 1)
        total += tl.sum(tl.sum(tlx.local_load(ring[k % 2]), 0), 0)
    tl.store(out, total)


@every_policy
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tiles", [1, 70])
def test_a_load_that_nobody_waits_for(policy, ahead, tiles):
    x = torch.randn(tiles * 16, 16)
    with emulator.options(policy=policy):
        run = emulator.run(
            _prefetches, (1,), TensorDescriptor.from_tensor(x, [16, 16]), torch.zeros(1), tiles, 16, ahead
        )
    assert [type(f) for f in run.findings] == [errors.InFlightError] * ahead
    if ahead:
        assert f"TMA load of ring[{tiles % 2}]" in str(run.findings[0]) and "test_kernel_end.py" in str(run.findings[0])


@triton.jit
def _leaves(x, desc, N: tl.constexpr, PARTS: tl.constexpr, HOW: tl.constexpr, PENDING: tl.constexpr, WHO: tl.constexpr):
    """Stores its block in PARTS; at most PENDING stores may still read shared memory when WHO has waited."""
    parts = tlx.local_alloc((N, N), tl.float32, PARTS)
    full = tlx.alloc_barriers(1)
    for k in tl.static_range(PARTS):
        tlx.local_store(parts[k], tl.zeros((N, N), tl.float32) + k)
    tlx.fence("async_shared")
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for k in tl.static_range(PARTS):
                if HOW == "bulk":
                    tlx.async_store(x + k * N * N, parts[k], N * N * 4)
                else:
                    tlx.async_descriptor_store(desc, parts[k], [k * N, 0], store_reduce=HOW)
            if WHO == "default":
                tlx.async_descriptor_store_wait(PENDING)
            tlx.barrier_arrive(full[0], 1)
        with tlx.async_task(num_warps=1):
            tlx.barrier_wait(full[0], 0)
            if WHO == "other":
                tlx.async_descriptor_store_wait(PENDING)
    if WHO == "main":  # on the warps of the default task
        tlx.async_descriptor_store_wait(PENDING)
    if WHO == "overwrites":
        tlx.local_store(parts[PARTS - 1], tl.zeros((N, N), tl.float32))
        tlx.async_descriptor_store_wait(PENDING)


@every_policy
@pytest.mark.parametrize("how", ["", "add", "bulk"])
@pytest.mark.parametrize(
    "who, pending, found", [("main", 0, 0), ("default", 0, 0), ("main", 1, 1), ("other", 0, 3), ("nobody", 0, 3)]
)
def test_a_store_that_nobody_waits_for(policy, how, who, pending, found):
    """Bulk groups belong to the thread that issued them: the default task and the code around it are one, others are not."""
    out = torch.zeros(3 * 16, 16)
    with emulator.options(policy=policy):
        run = emulator.run(_leaves, (1,), out, TensorDescriptor.from_tensor(out, [16, 16]), 16, 3, how, pending, who)
    assert [type(f) for f in run.findings] == [errors.InFlightError] * bool(found) and not run.warnings
    assert torch.equal(out, torch.arange(3.0).repeat_interleave(16)[:, None].expand(48, 16))
    for finding in run.findings:
        line = next(
            k
            for k, text in enumerate(open(__file__), 1)
            if ("tlx.async_store(" if how == "bulk" else "store_reduce=HOW") in text
        )
        assert f"parts[{3 - found}]" in str(finding) and f"test_kernel_end.py:{line}" in str(finding)


@every_policy
@pytest.mark.parametrize("how", ["", "bulk"])
def test_a_buffer_overwritten_at_the_end_while_its_store_reads_it(policy, how):
    out = torch.zeros(2 * 16, 16)
    with emulator.options(policy=policy):
        run = emulator.run(_leaves, (1,), out, TensorDescriptor.from_tensor(out, [16, 16]), 16, 2, how, 0, "overwrites")
    assert [type(f) for f in run.findings] == [errors.RaceError] and "parts[1]" in str(run.findings[0])


@triton.jit
def _gathers(x, y, N: tl.constexpr, PARTS: tl.constexpr, WHERE: tl.constexpr, PENDING: tl.constexpr):
    """Copies PARTS blocks by cp.async; at most PENDING groups may be outstanding when it has waited, if it waits."""
    parts = tlx.local_alloc((N,), tl.float32, PARTS)
    i = tl.arange(0, N)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for k in tl.static_range(PARTS):
                token = tlx.async_load(x + k * N + tl.arange(0, N), parts[k])
                tlx.async_load_commit_group([token])
            if WHERE == "task":
                tlx.async_load_wait_group(PENDING)
        with tlx.async_task(num_warps=1):
            tl.store(y + PARTS * N, 1.0)
    if WHERE == "behind":
        tlx.async_load_wait_group(PENDING)
        if PENDING == 0:
            for k in tl.static_range(PARTS):
                tl.store(y + k * N + i, tlx.local_load(parts[k]))


@every_policy
@pytest.mark.parametrize(
    "where, pending, left", [("task", 0, 0), ("behind", 0, 0), ("task", 1, 1), ("behind", 2, 2), ("nowhere", 0, 3)]
)
def test_a_gather_that_nobody_waits_for(policy, where, pending, left):
    """Groups belong to the threads that issued them: the default task and the code around it are the same ones."""
    x, y = torch.randn(3 * 32), torch.zeros(3 * 32 + 1)
    with emulator.options(policy=policy):
        run = emulator.run(_gathers, (1,), x, y, 32, 3, where, pending)
    assert not run.findings and [type(w) for w in run.warnings] == [errors.InFlightError] * bool(left)
    if left:
        what = "cp.async into parts[2]" if left == 1 else f"{left} cp.async, the first into parts[{3 - left}],"
        assert what in str(run.warnings[0]) and "test_kernel_end.py" in str(run.warnings[0])
    if where == "behind" and not pending:
        assert torch.equal(y[:-1], x)


@triton.jit
def _announces(out, N: tl.constexpr, BYTES: tl.constexpr):
    full = tlx.alloc_barriers(1, arrive_count=1)
    if BYTES:
        tlx.barrier_expect_bytes(full[0], BYTES)
    tl.store(out, 1.0)


@every_policy
def test_bytes_that_never_come(policy):
    with emulator.options(policy=policy):
        assert emulator.run(_announces, (1,), torch.zeros(1), 16, 0).clean
        found = emulator.run(_announces, (1,), torch.zeros(1), 16, 96).findings
    assert [type(f) for f in found] == [errors.ExpectBytesError] and "96 bytes more were announced" in str(found[0])


@triton.jit
def _ring_of_ctas(x, y, N: tl.constexpr, HOW: tl.constexpr, SIZE: tl.constexpr):
    """Each CTA gives its right neighbour a block; `HOW` says what, if anything, orders the neighbour's end."""
    rank = tlx.cluster_cta_rank()
    right = (rank + 1) % SIZE
    inbox = tlx.local_alloc((N,), tl.float32, 1)
    come = tlx.alloc_barriers(1, arrive_count=1)
    read = tlx.alloc_barriers(1, arrive_count=1)
    i = tl.arange(0, N)
    tlx.barrier_expect_bytes(come[0], N * 4)
    tlx.cluster_barrier()
    tlx.async_remote_shmem_store(inbox[0], tl.load(x + rank * N + i), right, come[0])
    if HOW != "nobody waits":
        tlx.barrier_wait(come[0], 0)
        tl.store(y + rank * N + i, tlx.local_load(inbox[0]))
    if HOW == "answered" or HOW == "answered, not awaited":
        tlx.barrier_arrive(read[0], 1, (rank + SIZE - 1) % SIZE)
    if HOW == "answered":
        tlx.barrier_wait(read[0], 0)


@every_policy
@pytest.mark.parametrize(
    "how, found",
    [("come", 0), ("answered", 0), ("nobody waits", "a copy to inbox[0]"), ("answered, not awaited", "an arrive at")],
)
def test_what_other_ctas_do_to_a_cta_comes_before_its_end(policy, how, found):
    with emulator.options(policy=policy):
        run = emulator.run(_ring_of_ctas, (4,), torch.randn(128), torch.zeros(128), 32, how, 4, ctas_per_cga=(4, 1, 1))
    assert bool(run.findings) == bool(found) and all(type(f) is errors.EndedCtaError for f in run.findings)
    if found:
        assert len({str(f) for f in run.findings}) == 4 and all(found in str(f) for f in run.findings)


@triton.jit
def _sends(x, y, N: tl.constexpr, HOW: tl.constexpr, ENTRY: tl.constexpr):
    """Each CTA gives its neighbour a block; ENTRY says what, if anything, lets it know that the neighbour has started."""
    peer = tlx.cluster_cta_rank() ^ 1
    boxes = tlx.local_alloc((N,), tl.float32, 2)
    come = tlx.alloc_barriers(1)
    told = tlx.alloc_barriers(1)
    value = tl.load(x + tlx.cluster_cta_rank() * N + tl.arange(0, N))
    if ENTRY == "cluster barrier":
        tlx.cluster_barrier()
    if ENTRY == "arrive":
        tlx.barrier_arrive(told[0], 1, remote_cta_rank=peer)
        tlx.barrier_wait(told[0], 0)
    if ENTRY == "own fence":
        tlx.fence("async_shared")
    if HOW == "plain":
        tlx.remote_shmem_store(boxes[0], value, peer)
        tlx.cluster_barrier()
    else:
        tlx.barrier_expect_bytes(come[0], N * 4)
        if HOW == "words":
            tlx.async_remote_shmem_store(boxes[0], value, peer, come[0])
        else:
            tlx.local_store(boxes[1], value)
            tlx.fence("async_shared")
            tlx.async_remote_shmem_copy(boxes[0], boxes[1], peer, come[0])
        tlx.barrier_wait(come[0], 0)
    if ENTRY == "arrives elsewhere":  # the compiler puts its cluster barrier in front of everything
        tlx.barrier_arrive(told[0], 1, remote_cta_rank=peer)
        tlx.barrier_wait(told[0], 0)
    tl.store(y + tlx.cluster_cta_rank() * N + tl.arange(0, N), tlx.local_load(boxes[0]))
    if HOW == "copy":
        tlx.cluster_barrier()


@every_policy
@pytest.mark.parametrize("how", ["plain", "words", "copy"])
@pytest.mark.parametrize("entry", ["nothing", "own fence", "cluster barrier", "arrive", "arrives elsewhere"])
def test_a_write_to_a_cta_that_may_not_have_started(policy, how, entry):
    x, y = torch.randn(2, 32), torch.zeros(2, 32)
    with emulator.options(policy=policy):
        run = emulator.run(_sends, (2,), x, y, 32, how, entry, ctas_per_cga=(2, 1, 1))
    wrong = entry in ("nothing", "own fence")
    assert [type(f) for f in run.findings] == [errors.UnstartedCtaError] * 2 * wrong
    for finding in run.findings:
        assert "boxes[0]" in str(finding) and "has started" in str(finding) and "test_kernel_end.py" in str(finding)
    assert torch.equal(y, x.flip(0))


@every_policy
def test_a_copy_to_another_cta_that_its_source_does_not_outlive(policy):
    x, y = torch.randn(2, 32), torch.zeros(2, 32)
    with emulator.options(policy=policy):
        run = emulator.run(_sends, (2,), x, y, 32, "copy, no barrier behind", "cluster barrier", ctas_per_cga=(2, 1, 1))
    assert [type(f) for f in run.findings] == [errors.InFlightError] * 2 and not run.warnings
    assert all("a copy of boxes[1] to another CTA" in str(f) and "test_kernel_end.py" in str(f) for f in run.findings)


@triton.jit
def _pair(out, M: tl.constexpr, K: tl.constexpr, NO_SYNC: tl.constexpr):
    """The leader's MMA reads both CTAs' memory; the follower ends without waiting for it."""
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, M // 2), tl.bfloat16, 1)
    acc = tlx.local_alloc((M, M), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1, arrive_count=1)
    tlx.local_store(a[0], tl.zeros((M, K), tl.bfloat16))
    tlx.local_store(b[0], tl.zeros((K, M // 2), tl.bfloat16))
    tlx.fence("async_shared")
    tlx.cluster_barrier()
    with tlx.async_tasks(no_ending_cluster_sync=NO_SYNC):
        with tlx.async_task("default"):
            if tlx.cluster_cta_rank() == 0:
                tlx.barrier_wait(done[0], 0)
        with tlx.async_task(num_warps=4):
            tlx.async_dot(a[0], b[0], acc[0], use_acc=False, mBarriers=[done[0]], two_ctas=True)


@every_policy
@pytest.mark.parametrize("no_sync", [False, True])
def test_the_compiler_ends_paired_kernels_with_a_cluster_barrier(policy, no_sync):
    """Compiled for sm_100, such a kernel ends with barrier.cluster unless no_ending_cluster_sync says otherwise."""
    with emulator.options(policy=policy, arch=100):
        run = emulator.run(_pair, (2,), torch.zeros(1), 128, 64, no_sync, ctas_per_cga=(2, 1, 1))
    assert bool(run.findings) == no_sync and all(type(f) is errors.EndedCtaError for f in run.findings)
