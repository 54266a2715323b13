"""What a kernel can observe of the hardware at its edges, asked with small TLX kernels.

    python tests/gpu/hardware_facts.py OUT.json         (a GPU: asks it; none: asks the emulator)

The answers of an H200 are kept beside this file (h200_facts.json), and tests/emulator/test_hardware_facts.py holds the
emulator to them. Each
function below asks one thing and returns numbers that JSON can hold; inputs are integers small enough to be exact in
every format.
"""

from __future__ import annotations

import glob
import json
import multiprocessing
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = "cuda" if glob.glob("/dev/nvidia[0-9]*") else "cpu"  # asked without touching CUDA: children are forked
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32}
FACTS = {}


def fact(function):
    """Register a question: function() -> {label: thunk}; each thunk asks once and returns numbers."""
    FACTS[function.__name__] = function
    return function


def numbers(tensor):
    """A tensor as nested lists of floats; NaN as the string "nan"."""

    def clean(x):
        return [clean(i) for i in x] if isinstance(x, list) else ("nan" if x != x else x)

    return clean(tensor.detach().cpu().double().tolist())


# ---------------------------------------------------------------- TMA boxes at the edges


@triton.jit
def load_box(desc, out, row, col, R: tl.constexpr, C: tl.constexpr):
    """One box into shared memory and out to `out`; the barrier expects the whole box."""
    tile = tlx.local_alloc((R, C), tlx.dtype_of(desc), 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], R * C * tlx.size_of(tlx.dtype_of(desc)))
    tlx.async_descriptor_load(desc, tile[0], [row, col], full[0])
    tlx.barrier_wait(full[0], 0)
    offsets = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + offsets, tlx.local_load(tile[0]))


@triton.jit
def store_box(desc, values, row, col, R: tl.constexpr, C: tl.constexpr, REDUCE: tl.constexpr):
    """`values` through shared memory to a box, plainly or with a reduction."""
    tile = tlx.local_alloc((R, C), tlx.dtype_of(desc), 1)
    offsets = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tlx.local_store(tile[0], tl.load(values + offsets))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, tile[0], [row, col], store_reduce=REDUCE)
    tlx.async_descriptor_store_wait(0)


CORNERS = [(0, 0), (3, 8), (-2, 0), (0, -3), (-1, -5), (4, 17), (6, 0), (0, 21), (0, 24), (1000, 1000), (-8, -16)]


def _tensor(name, rows=5, cols=21, pitch=24):
    """rows x cols inside rows of `pitch` elements; what lies outside is 99."""
    base = torch.full((rows + 2, pitch), 99.0)
    base[:rows, :cols] = torch.arange(rows * cols).reshape(rows, cols) % 100 + 1
    return base.to(DTYPES[name]).to(DEVICE)


def _descriptor(base, rows, cols, box):
    return TensorDescriptor(base, [rows, cols], [base.stride(0), 1], list(box))


@fact
def tma_load_clipping():
    """Boxes of 8 x 16 over a 5 x 21 tensor whose row is no multiple of 16 bytes, at many corners."""

    def ask(name, row, col):
        base = _tensor(name)
        got = torch.full((8, 16), -1, dtype=base.dtype, device=DEVICE)
        load_box[(1,)](_descriptor(base, 5, 21, (8, 16)), got, row, col, 8, 16)
        return numbers(got)

    return {f"{n} {r} {c}": partial(ask, n, r, c) for n in ("fp32", "bf16") for r, c in CORNERS}


@fact
def tma_store_clipping():
    """The same boxes stored: the whole surroundings afterwards."""

    def ask(name, row, col):
        values = (torch.arange(128).reshape(8, 16) + 101).to(DTYPES[name]).to(DEVICE)
        base = _tensor(name)
        store_box[(1,)](_descriptor(base, 5, 21, (8, 16)), values, row, col, 8, 16, "")
        return numbers(base)

    return {f"{n} {r} {c}": partial(ask, n, r, c) for n in ("fp32", "bf16") for r, c in CORNERS}


@fact
def store_reduce_at_edges():
    """Every reduction over a clipped box, in each type that has it."""
    every = ("add", "min", "max")
    kinds = {"fp32": ("add",), "bf16": every, "fp16": every, "int32": (*every, "and", "or", "xor")}

    def ask(name, reduce):
        values = ((torch.arange(128).reshape(8, 16) * 7) % 50 - 10).to(DTYPES[name]).to(DEVICE)
        base = _tensor(name)
        store_box[(1,)](_descriptor(base, 5, 21, (8, 16)), values, 3, 12, 8, 16, reduce)
        return numbers(base)

    return {f"{n} {r}": partial(ask, n, r) for n, reductions in kinds.items() for r in reductions}


@fact
def store_reduce_rounding():
    """add in bf16 and fp16 where the sum needs rounding: ties and an overflow."""
    pairs = {
        "bf16": [(256.0, 1.0), (256.0, 3.0), (258.0, 1.0), (-256.0, -1.0), (3.0e38, 3.0e38), (1.0, 0.00390625)],
        "fp16": [
            (2048.0, 1.0),
            (2048.0, 3.0),
            (2050.0, 1.0),
            (-2048.0, -1.0),
            (60000.0, 60000.0),
            (1.0, 0.00048828125),
        ],
    }

    def ask(name):
        base, values = (torch.zeros(8, 16).to(DTYPES[name]).to(DEVICE) for _ in range(2))
        for i, (a, b) in enumerate(pairs[name]):
            base[0, i], values[0, i] = a, b
        store_box[(1,)](_descriptor(base, 8, 16, (8, 16)), values, 0, 0, 8, 16, "add")
        return [x if abs(x) < 1e30 else str(x) for x in numbers(base[0, : len(pairs[name])])]

    return {name: partial(ask, name) for name in pairs}


# ---------------------------------------------------------------- ragged descriptors


@triton.jit
def ragged_box(desc, out, start, size, row, R: tl.constexpr, C: tl.constexpr):
    tile = tlx.local_alloc((R, C), tlx.dtype_of(desc), 1)
    full = tlx.alloc_barriers(1)
    x, y, z = to_ragged_indices(start, size, row)
    tlx.barrier_expect_bytes(full[0], R * C * tlx.size_of(tlx.dtype_of(desc)))
    tlx.async_descriptor_load(desc, tile[0], [x, y, z, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    offsets = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + offsets, tlx.local_load(tile[0]))


@triton.jit
def ragged_put(desc, values, start, size, row, R: tl.constexpr, C: tl.constexpr, REDUCE: tl.constexpr):
    tile = tlx.local_alloc((R, C), tlx.dtype_of(desc), 1)
    offsets = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tlx.local_store(tile[0], tl.load(values + offsets))
    tlx.fence("async_shared")
    x, y, z = to_ragged_indices(start, size, row)
    tlx.async_descriptor_store(desc, tile[0], [x, y, z, 0], store_reduce=REDUCE)
    tlx.async_descriptor_store_wait(0)


SEQUENCES = [(0, 5, 0), (5, 3, 0), (5, 3, 2), (8, 0, 0), (8, 11, 8), (19, 1, 0), (8, 11, -2), (5, 3, 8)]


@fact
def ragged_descriptors():
    """Loads, stores and adds that must stay inside rows start .. start + size, through addresses that wrap modulo 2**64."""

    def tensors():
        rows = torch.arange(20 * 16).reshape(20, 16).float().to(DEVICE) + 1
        return rows, -(torch.arange(128).reshape(8, 16).float().to(DEVICE) + 1)

    def ask_load(start, size, row):
        rows, _ = tensors()
        got = torch.full((8, 16), -1.0, device=DEVICE)
        ragged_box[(1,)](create_ragged_descriptor(rows, [8, 16]), got, start, size, row, 8, 16)
        return numbers(got)

    def ask_store(start, size, row, reduce):
        rows, values = tensors()
        ragged_put[(1,)](create_ragged_descriptor(rows, [8, 16]), values, start, size, row, 8, 16, reduce)
        return numbers(rows)

    out = {}
    for start, size, row in SEQUENCES:
        out[f"load {start} {size} {row}"] = partial(ask_load, start, size, row)
        for reduce in ("", "add"):
            out[f"store{reduce} {start} {size} {row}"] = partial(ask_store, start, size, row, reduce)
    return out


# ---------------------------------------------------------------- warps, cp.async, MMA


@triton.jit
def ballot(src, out, N: tl.constexpr, MASK: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tlx.vote_ballot_sync(MASK, tl.load(src + offsets) != 0))


@fact
def warp_ballot():
    """The ballot that each element of a block sees, for several sizes and numbers of warps."""

    def ask(n, warps):
        source = ((torch.arange(n) * 5) % 7 < 3).int().to(DEVICE)
        got = torch.zeros(n, dtype=torch.int32, device=DEVICE)
        ballot[(1,)](source, got, n, 0xFFFFFFFF, num_warps=warps)
        return [int(x) for x in got.cpu()]

    sizes = ((32, 1), (64, 1), (64, 2), (128, 4), (256, 4), (32, 4), (1024, 4))
    return {f"{n} elements, {w} warps": partial(ask, n, w) for n, w in sizes}


@triton.jit
def gather_masked(src, out, n, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tile = tlx.local_alloc((N,), tl.float32, 1)
    tlx.async_load(src + offsets, tile[0], mask=offsets < n)
    tlx.async_load_commit_group()
    tlx.async_load_wait_group(0)
    tl.store(out + offsets, tlx.local_load(tile[0]))


@fact
def async_load_masked_lanes():
    """What a masked lane of async_load leaves in shared memory."""

    def ask():
        source = torch.arange(128).float().to(DEVICE) + 1
        got = torch.full((128,), -1.0, device=DEVICE)
        gather_masked[(1,)](source, got, 77, 128)
        return numbers(got)

    return {"": ask}


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """One tile: TMA in, the tensor core, out. Two K steps, so the accumulator is used."""
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_tile = tlx.local_alloc((M, K), tlx.dtype_of(a), 2)
    b_tile = tlx.local_alloc((K, N), tlx.dtype_of(b), 2)
    for step in tl.static_range(2):
        ks = depth + step * K
        tlx.local_store(a_tile[step], tl.load(a + rows[:, None] * (2 * K) + ks[None, :]))
        tlx.local_store(b_tile[step], tl.load(b + ks[:, None] * N + cols[None, :]))
    tlx.fence("async_shared")
    acc = tl.zeros((M, N), tl.float32)
    for step in tl.static_range(2):
        acc = tlx.async_dot(a_tile[step], b_tile[step], acc)
    acc = tlx.async_dot_wait(0, acc)
    tl.store(c + rows[:, None] * N + cols[None, :], acc)


@fact
def integer_product():
    """A kernel of ours whose arithmetic is exact: small integers in bf16, sums below 2**24. Bit for bit."""

    def ask():
        a = ((torch.arange(64 * 128) * 37) % 17 - 8).reshape(64, 128).to(torch.bfloat16).to(DEVICE)
        b = ((torch.arange(128 * 64) * 29) % 13 - 6).reshape(128, 64).to(torch.bfloat16).to(DEVICE)
        c = torch.zeros(64, 64, device=DEVICE)
        product[(1,)](a, b, c, 64, 64, 64)
        return numbers(c)

    return {"": ask}


@triton.jit
def attention_tile(q, k, v, o, n, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """A kernel of ours with rounding: softmax(Q K^T) V over two key blocks, the second one ragged, warp-specialized."""
    q_tile = tlx.local_alloc((M, D), tl.bfloat16, 1)
    kv_tiles = tlx.local_alloc((N, D), tl.bfloat16, 4)
    kv_fulls = tlx.alloc_barriers(4)
    q_rows, q_dims = tl.arange(0, M), tl.arange(0, D)
    tlx.local_store(q_tile[0], tl.load(q + q_rows[:, None] * D + q_dims[None, :]))
    tlx.fence("async_shared")
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax
            rows, cols, dims = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
            m = tl.full((M,), float("-inf"), tl.float32)
            l = tl.zeros((M,), tl.float32)
            acc = tl.zeros((M, D), tl.float32)
            for block in range(2):
                tlx.barrier_wait(kv_fulls[2 * block], 0)
                s = tlx.async_dot(q_tile[0], tlx.local_trans(kv_tiles[2 * block]), tl.zeros((M, N), tl.float32))
                s = tlx.async_dot_wait(0, s)
                s = tl.where((block * N + cols < n)[None, :], s * 0.25, float("-inf"))
                new = tl.maximum(m, tl.max(s, 1))
                p = tl.exp2(s - new[:, None])
                scale = tl.exp2(m - new)
                l = l * scale + tl.sum(p, 1)
                tlx.barrier_wait(kv_fulls[2 * block + 1], 0)
                acc = tlx.async_dot(p.to(tl.bfloat16), kv_tiles[2 * block + 1], acc * scale[:, None])
                acc = tlx.async_dot_wait(0, acc)
                m = new
            tl.store(o + rows[:, None] * D + dims[None, :], acc / l[:, None])
        with tlx.async_task(num_warps=4):  # load
            cols, dims = tl.arange(0, N), tl.arange(0, D)
            for block in range(2):
                at = (block * N + cols)[:, None] * D + dims[None, :]
                tlx.local_store(kv_tiles[2 * block], tl.load(k + at, mask=(block * N + cols < n)[:, None], other=0.0))
                tlx.local_store(
                    kv_tiles[2 * block + 1], tl.load(v + at, mask=(block * N + cols < n)[:, None], other=0.0)
                )
                tlx.fence("async_shared")
                tlx.barrier_arrive(kv_fulls[2 * block])
                tlx.barrier_arrive(kv_fulls[2 * block + 1])


@fact
def ragged_attention():
    """Within rounding: bf16 products and exp2."""

    def ask():
        g = torch.Generator().manual_seed(7)
        q, k, v = (torch.randn(s, 64, generator=g).to(torch.bfloat16).to(DEVICE) for s in (64, 128, 128))
        o = torch.zeros(64, 64, device=DEVICE)
        attention_tile[(1,)](q, k, v, o, 101, 64, 64, 64)
        return numbers((o * 2**20).round() / 2**20)

    return {"": ask}


@triton.jit
def tf32_product(a, bt, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """a @ bt.T in fp32: the tensor core takes tf32 operands with K inside only."""
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_tile = tlx.local_alloc((M, K), tl.float32, 1)
    b_tile = tlx.local_alloc((N, K), tl.float32, 1)
    tlx.local_store(a_tile[0], tl.load(a + rows[:, None] * K + depth[None, :]))
    tlx.local_store(b_tile[0], tl.load(bt + cols[:, None] * K + depth[None, :]))
    tlx.fence("async_shared")
    acc = tlx.async_dot(a_tile[0], tlx.local_trans(b_tile[0]), tl.zeros((M, N), tl.float32))
    acc = tlx.async_dot_wait(0, acc)
    tl.store(c + rows[:, None] * N + cols[None, :], acc)


@fact
def tf32_operands():
    """fp32 operands of the tensor core: what becomes of the mantissa bits below tf32's ten."""

    def ask():
        bits = [1 + 2.0**-10, 1 + 2.0**-11, 1 + 2.0**-12, 1 + 3 * 2.0**-12, 1 + 2.0**-10 + 2.0**-11, -1 - 3 * 2.0**-12]
        a, b, c = torch.zeros(64, 32), torch.zeros(64, 32), torch.zeros(64, 64, device=DEVICE)
        for i, value in enumerate(bits):
            a[i, i], b[i, i] = value, 1.0
        tf32_product[(1,)](a.to(DEVICE), b.to(DEVICE), c, 64, 64, 32)
        return numbers(torch.diagonal(c)[: len(bits)])

    return {"": ask}


def answer(thunk):
    try:
        return thunk()
    except Exception as error:  # one question that cannot be asked must not silence the others
        return f"{type(error).__name__}: {str(error)[:200]}"


def _in_child(job):
    """A GPU question in a process of its own: one that faults or hangs takes only itself along."""
    name, label = job
    pipe, child = multiprocessing.Pipe()
    worker = multiprocessing.Process(target=lambda: child.send(answer(FACTS[name]()[label])))
    worker.start()
    got = pipe.recv() if pipe.poll(60) else "no answer within 60 s"
    worker.kill()
    return name, label, got


def ask_all():
    """{question: {label: answer}}"""
    jobs = [(name, label) for name, function in FACTS.items() for label in function()]
    if DEVICE == "cpu":
        answers = [(name, label, answer(FACTS[name]()[label])) for name, label in jobs]
    else:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(_in_child, jobs))
    out = {name: {} for name in FACTS}
    for name, label, got in answers:
        out[name][label] = got
    return out


def main(path):
    answers = ask_all()
    about = dict(torch=torch.__version__, triton=triton.__version__, python=platform.python_version())
    about["device"] = torch.cuda.get_device_name() if DEVICE == "cuda" else "emulator"
    with open(path, "w") as file:
        json.dump(dict(about=about, facts=answers), file, separators=(",", ":"))
    print(about["device"], "->", path)


if __name__ == "__main__":
    if DEVICE == "cpu":
        import jfa.emulator

        jfa.emulator.install()
    main(sys.argv[1])
