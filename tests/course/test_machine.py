"""What chapter 09 says of the machine: cycles of a tile, Little's law for a ring, and why plain Triton stalls."""

import importlib

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from jfa import emulator  # noqa: E402
from jfa.course import catalog  # noqa: E402
from jfa.emulator.rates import B200  # noqa: E402

tlx = pytest.importorskip("triton.language.extra.tlx")

CHECKS = importlib.import_module("jfa.course.checks.09_the_machine_underneath")


@pytest.mark.parametrize(
    "found, published",
    [
        (CHECKS._tile(128, 128, 128, 2, CHECKS.B200), (1024, 1024, 768)),
        (CHECKS._tile(256, 128, 128, 2, CHECKS.B200), (2048, 2048, 1536)),
        (CHECKS._limit("backward", 128, 2, CHECKS.B200), ("smem", 3328)),
        (CHECKS._limit("forward", 128, 2, CHECKS.B200), ("exp and tensor", 2048)),
        (CHECKS._limit("forward", 64, 2, CHECKS.B200), ("exp", 2048)),
        (CHECKS._limit("forward", 128, 1, CHECKS.B200), ("exp", 2048)),
    ],
)
def test_cycles_of_a_tile_are_those_of_the_flash_attention_4_paper(found, published):
    assert found == published


@triton.jit
def ring_kernel(a_desc, b_desc, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BUFFERS: tl.constexpr):
    """acc += A B for a stream of tiles of B: a worker that loads, a worker that multiplies."""
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, N), tl.bfloat16, BUFFERS)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    a_full = tlx.alloc_barriers(1)
    fulls = tlx.alloc_barriers(BUFFERS)
    empties = tlx.alloc_barriers(BUFFERS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(a_full[0], 0)
            for step in range(steps):
                slot = step % BUFFERS
                tlx.barrier_wait(fulls[slot], (step // BUFFERS) & 1)
                tlx.async_dot(a[0], b[slot], acc[0], use_acc=step > 0, mBarriers=[empties[slot]])
            last = steps - 1
            tlx.barrier_wait(empties[last % BUFFERS], (last // BUFFERS) & 1)
        with tlx.async_task(num_warps=1):
            tlx.barrier_expect_bytes(a_full[0], 2 * M * K)
            tlx.async_descriptor_load(a_desc, a[0], [0, 0], a_full[0])
            for step in range(steps):
                slot = step % BUFFERS
                tlx.barrier_wait(empties[slot], ((step // BUFFERS) & 1) ^ 1)
                tlx.barrier_expect_bytes(fulls[slot], 2 * K * N)
                tlx.async_descriptor_load(b_desc, b[slot], [step * K, 0], fulls[slot])


def cycles_per_step(m, n, k, rates, buffers, few=24, many=72):
    """Modelled cycles that one more step takes, beginning and end left out."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    chip = B200
    for name, value in rates.items():
        chip = chip.scaled(name, value / chip[name])
    times = []
    for steps in (few, many):
        a, b = (torch.zeros(rows, columns, dtype=torch.bfloat16) for rows, columns in ((m, k), (steps * k, n)))
        boxes = TensorDescriptor.from_tensor(a, [m, k]), TensorDescriptor.from_tensor(b, [k, n])
        with emulator.options(policy="timed", rates=chip):
            ring_kernel[(1,)](*boxes, steps, M=m, N=n, K=k, BUFFERS=buffers)
        times.append(emulator.last().time)
    return (times[1] - times[0]) / (many - few)


RINGS = {case.name: case.args for case in catalog.exercise("9.3").cases(0)}
# Three buffers are too few to hide that in shared memory what is written waits for what is read: no sum of unhindered steps has it.
ONE_MORE = {"shared memory of half the speed": 1}


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_is_as_little_s_law_says(name):
    """One buffer: a step takes a round trip. As many as predicted: a step takes a period. Half as many: it does not."""
    m, n, k, rates = RINGS[name]
    round_trip, period, buffers = CHECKS._ring(m, n, k, rates)
    one, enough = (cycles_per_step(m, n, k, rates, count) for count in (1, buffers + ONE_MORE.get(name, 0)))
    assert one == pytest.approx(round_trip, rel=0.02)
    assert enough == pytest.approx(period, rel=0.10)
    if buffers > 1:
        assert cycles_per_step(m, n, k, rates, buffers // 2) > 1.4 * period


@triton.jit
def plain_loop(q_ptr, k_ptr, v_ptr, out_ptr, scale, blocks, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    d = tl.arange(0, D)
    i = tl.arange(0, BM)
    q = tl.load(q_ptr + i[:, None] * D + d[None, :])
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for block in range(blocks):
        j = block * BN + tl.arange(0, BN)
        k = tl.load(k_ptr + j[:, None] * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * scale
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.math.exp2(m - m_new)
        p = tl.math.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        v = tl.load(v_ptr + j[:, None] * D + d[None, :])
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
        m = m_new
    tl.store(out_ptr + i[:, None] * D + d[None, :], acc / l[:, None])


def test_plain_triton_takes_all_of_tensor_memory():
    """S, P and the accumulator apart, so that no second program fits beside it on the SM."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: "*bf16" for name in ("q_ptr", "k_ptr", "v_ptr")} | {"out_ptr": "*fp32", "scale": "fp32"}
    types |= {"blocks": "i32", "D": "constexpr", "BM": "constexpr", "BN": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(plain_loop, types, {"D": 128, "BM": 128, "BN": 128}, aligned)
    made = triton.compile(source, GPUTarget("cuda", 100, 32), {"num_warps": 4})
    assert made.metadata.tmem_size > 256 and made.metadata.shared > 232_448 // 2


def test_roles_are_what_keeps_the_tensor_cores_busy():
    """The same mathematics with one kind of warp and with roles, modelled, on a short and a longer sequence."""
    from jfa.kernels.blackwell import modelled

    for keys, times in ((128, 1.8), (512, 3.0)):
        plain, roles = (
            modelled.whole_busy(f(256, keys), B200) for f in (modelled.plain_launch, modelled.forward_launch)
        )
        assert plain < 0.2 and roles > times * plain
