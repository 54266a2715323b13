"""Measure the emulator's speed on public kernels: `python -m jfa.emulator.benchmark`.

Times are CPU seconds on one core with race detection on, the best of a few runs. Rates per step are differences between
two problem sizes, so the costs of the launch and the prologue cancel.
"""

import resource
import time

import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa.emulator import tutorials

emulator.install()

GEMM = dict(
    BLOCK_SIZE_M=128, BLOCK_SIZE_N=128, BLOCK_SIZE_K=128, GROUP_SIZE_M=8, NUM_SMEM_BUFFERS=2, NUM_TMEM_BUFFERS=2, NUM_MMA_GROUPS=1,
    EPILOGUE_SUBTILE=2, NUM_CTAS=1, SPLIT_K=1, INTERLEAVE_EPILOGUE=0,
)  # fmt: skip


def best(function, runs=5):
    """Return least CPU seconds of a call."""
    function()
    times = []
    for _ in range(runs):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def attention(length, heads=1, dim=128):
    """Run fa_ws on `length` queries and keys: length/256 CTAs of length/128 steps each."""
    module = tutorials.load("blackwell_fa_ws")
    q, k, v = (torch.randn(1, heads, length, dim).half() for _ in range(3))
    return lambda: module.attention(q, k, v, dim**-0.5)


def matmul(k):
    """Run gemm_ws on one 128x128 tile, k/128 steps."""
    module = tutorials.load("blackwell_gemm_ws")
    a, b = torch.randn(128, k).half(), torch.randn(k, 128).half()
    return lambda: module.matmul(a, b, config=dict(GEMM))


@triton.jit
def tiny(x, o, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + i, mask=i < n, other=0.0) + 1, mask=i < n)


def launches(count):
    """Run a small launch `count` times."""
    x, out = torch.randn(100), torch.empty(100)

    def run():
        for _ in range(count):
            tiny[(1,)](x, out, 100, BLOCK=128)

    return run


def resident():
    """Return peak resident memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    torch.set_num_threads(1)
    with tutorials.answering_gpu():
        short, long = best(attention(512)), best(attention(1024))
        print(f"fa_ws, D=128: {(long - short) / 24 * 1e3:.2f} ms per 256x128 KV step (limit 3)")
        short, long = best(matmul(1024)), best(matmul(5120))
        step = (long - short) / 32
        fixed = short - 8 * step
        print(
            f"gemm_ws: {step * 1e3:.2f} ms per 128x128x128 step (limit 1); launch, prologue and epilogue {fixed * 1e3:.2f} ms"
        )
    print(f"a small plain launch: {best(launches(100)) * 10:.2f} ms (limit 5)")
    launches(1000)()
    before = resident()
    launches(10000)()
    print(f"10,000 launches: peak memory grows by {resident() - before:.1f} MB")


if __name__ == "__main__":
    main()
