"""What chapter 15's predictions are judged by is what the emulator's machine does."""

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa.course import catalog
from jfa.emulator.rates import B200

tlx = pytest.importorskip("triton.language.extra.tlx")
EXERCISES = {e.id: e for chapter in catalog.chapters() for e in chapter.exercises if chapter.number == 15}


@triton.jit
def _product(out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CTAS: tl.constexpr, A_TMEM: tl.constexpr):
    """A product of ones, each CTA with its share of B."""
    b = tlx.local_alloc((K, N // CTAS), tl.bfloat16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    ready = tlx.alloc_barriers(1, arrive_count=CTAS)
    done = tlx.alloc_barriers(1)
    a = tlx.local_alloc((M, K), tl.bfloat16, 1, tlx.storage_kind.tmem if A_TMEM else tlx.storage_kind.smem)
    tlx.local_store(a[0], tl.full((M, K), 1, tl.bfloat16))
    tlx.local_store(b[0], tl.full((K, N // CTAS), 1, tl.bfloat16))
    tlx.fence("async_shared")
    if CTAS == 2:
        tlx.barrier_arrive(ready[0], 1, remote_cta_rank=0)
    else:
        tlx.barrier_arrive(ready[0], 1)
    tlx.barrier_wait(ready[0], 0, pred=tlx.cluster_cta_rank() == 0)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, mBarriers=[done[0]], two_ctas=CTAS == 2)
    tlx.barrier_wait(done[0], 0)
    at = (tl.program_id(0) * M + tl.arange(0, M))[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tlx.local_load(acc[0]))


def _run(m, n, k, ctas, in_tmem):
    """Launch it; return the columns of tensor memory, and the bytes that the product took from one CTA's shared memory."""
    out = torch.zeros(ctas * m, n)
    with emulator.options(policy="timed", rates=B200, trace=True), emulator.counting() as counts:
        _product[(ctas,)](out, m, n, k, ctas, in_tmem, **({"ctas_per_cga": (2, 1, 1)} if ctas == 2 else {}))
    assert (out == k).all()
    spans = emulator.last().occupied[(0, 0, 0), "smem"]
    stored = 2 * (k * n // ctas + (0 if in_tmem else m * k))  # by the threads, before
    return counts.tmem_columns, sum(end - begin for begin, end in spans) * B200["smem"] - stored


@pytest.mark.parametrize("m, n", [(128, 128), (64, 128), (64, 64), (128, 64), (64, 256)])
@pytest.mark.parametrize("in_tmem", [False, True])
def test_bytes_and_columns_of_a_product_are_what_the_machine_takes(m, n, in_tmem):
    k = 64
    one, pair, one_columns, pair_columns = EXERCISES["15.1"].reference(m, n, k, in_tmem)
    for ctas, read, columns in ((1, one, one_columns), (2, pair, pair_columns)):
        taken, bytes_read = _run(m, n, k, ctas, in_tmem)
        assert bytes_read == pytest.approx(read)
        if not in_tmem:  # A would have columns of its own
            assert taken == columns
