"""Tiles, bands and rings as kernels carry them: right on the emulator, and the compiler takes them for every target."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from jfa import emulator
from jfa.kernels.common.nouns import FIELDS, Blocks, Tile, load_tile

tlx = pytest.importorskip("triton.language.extra.tlx")
from jfa.kernels.common.ring import alloc_ring  # noqa: E402

emulator.install()


@triton.jit
def _next_tile(records, tile, number, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    if tile.row > 0:
        number += 1
    return load_tile(records, number, HAS_LO, HAS_HI)


@triton.jit
def _walk(records, out, blocks_out, mask_out, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
          HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):  # fmt: skip
    """A tile and its blocks are carried by a loop, and handed to functions."""
    tile = load_tile(records, 0, HAS_LO, HAS_HI)
    for number in range(n):
        at = out + number * 9
        tl.store(at, tile.q.begin)
        tl.store(at + 1, tile.q.length)
        tl.store(at + 2, tile.row)
        tl.store(at + 3, tile.out.begin)
        tl.store(at + 4, tile.kv.begin)
        tl.store(at + 5, tile.kv.length)
        tl.store(at + 6, tile.band.lo)
        tl.store(at + 7, tile.band.hi)
        tl.store(at + 8, tile.pad_begin)
        if KEYS:
            blocks = tile.query_blocks(ROWS, BLOCK)
        else:
            blocks = tile.key_blocks(ROWS, BLOCK)
        tl.store(blocks_out + number * 4, blocks.first)
        tl.store(blocks_out + number * 4 + 1, blocks.bulk_begin)
        tl.store(blocks_out + number * 4 + 2, blocks.bulk_end)
        tl.store(blocks_out + number * 4 + 3, blocks.end)
        i = tl.arange(0, 64)
        pairs = tile.pair_mask(i[:, None], i[None, :])
        tl.store(mask_out + number * 4096 + i[:, None] * 64 + i[None, :], pairs.to(tl.int32))
        tile = _next_tile(records, tile, tl.minimum(number, n - 2), HAS_LO, HAS_HI)


RECORDS = [
    [100, 50, 16, 7, 300, 60, -5, 3, 128],
    [0, 40, 32, 1, 2, 64, 0, 30, 64],
    [9, 64, 16, 5, 6, 33, -40, -2, 192],
]


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("has_lo, has_hi", [(False, False), (True, False), (False, True), (True, True)])
def test_a_tile_says_what_its_record_says(has_lo, has_hi, keys):
    records = torch.tensor(RECORDS, dtype=torch.int32)
    out, blocks, mask = torch.zeros(3, 9).int(), torch.zeros(3, 4).int(), torch.zeros(3, 64, 64).int()
    _walk[(1,)](records, out, blocks, mask, 3, 16, 8, keys, has_lo, has_hi)
    assert out.tolist() == RECORDS
    for found, pairs, record in zip(blocks.tolist(), mask, RECORDS):
        named = dict(zip(FIELDS, record))
        lo = named["lo"] if has_lo else -(2**20)
        hi = named["hi"] if has_hi else 2**20
        i, j = torch.arange(64)[:, None], torch.arange(64)[None, :]
        expected = (j < named["len_kv"]) & (i + lo <= j) & (j <= i + hi)
        assert torch.equal(pairs.bool(), expected)
        seen = expected[: named["len_q"]]
        mine = (
            seen[:, named["row"] : named["row"] + 16].any(1) if keys else seen[named["row"] : named["row"] + 16].any(0)
        )
        first, bulk_begin, bulk_end, end = found
        assert first <= bulk_begin <= bulk_end <= end
        if mine.any():
            where = mine.nonzero().flatten()
            assert first == int(where.min()) // 8 and end == int(where.max()) // 8 + 1
        else:
            assert end - first == (0 if keys else 1)


@triton.jit
def _through_rings(x, o, n, N: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Two rings of different length hand the same blocks on, one after the other."""
    near = alloc_ring(1, N, tl.float32, A, 1)
    far = alloc_ring(1, N, tl.float32, B, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            i = tl.arange(0, N)[None, :]
            for k in range(n):
                slot, phase = near.slot(k)
                tlx.barrier_wait(near.empties[slot], phase ^ 1)
                tlx.local_store(near.buffers[slot], tl.load(x + k * N + i))
                tlx.barrier_arrive(near.fulls[slot], 1)
        with tlx.async_task(num_warps=4):
            for k in range(n):
                hand_on(near, far, k)
        with tlx.async_task(num_warps=4):
            i = tl.arange(0, N)[None, :]
            for k in range(n):
                slot, phase = far.slot(k)
                tlx.barrier_wait(far.fulls[slot], phase)
                tl.store(o + k * N + i, tlx.local_load(far.buffers[slot]) + 1)
                tlx.barrier_arrive(far.empties[slot], 1)


@triton.jit
def hand_on(near, far, k):
    a, a_phase = near.slot(k)
    b, b_phase = far.slot(k)
    tlx.barrier_wait(near.fulls[a], a_phase)
    block = tlx.local_load(near.buffers[a])
    tlx.barrier_arrive(near.empties[a], 1)
    tlx.barrier_wait(far.empties[b], b_phase ^ 1)
    tlx.local_store(far.buffers[b], block * 2)
    tlx.barrier_arrive(far.fulls[b], 1)


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("lengths", [(2, 3), (1, 4), (3, 2)])
def test_rings_of_different_lengths_keep_their_own_phases(policy, lengths):
    x, out = torch.randn(9, 32), torch.zeros(9, 32)
    with emulator.options(policy=policy, seed=1):
        _through_rings[(1,)](x, out, 9, 32, *lengths)
    assert torch.equal(out, x * 2 + 1)


@triton.jit
def _wrong(records, HOW: tl.constexpr):
    tile = load_tile(records, 0, False, False)
    if HOW == "too few":
        Blocks(tile.row, tile.row)
    if HOW == "not a span":
        Tile(tile.row, tile.row, tile.kv, tile.out, tile.band, tile.row)


@pytest.mark.parametrize("how", ["too few", "not a span"])
def test_a_noun_with_wrong_fields_is_refused(how):
    with pytest.raises(triton.compiler.errors.CompilationError):
        _wrong[(1,)](torch.zeros(9, dtype=torch.int32), how)


compiles = pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="compiling TLX needs fbtriton")


@compiles
@pytest.mark.parametrize("arch", [90, 100])
def test_the_compiler_keeps_two_rings_and_two_bands_apart(arch):
    from jfa.compiled import compile_kernel

    report = compile_kernel(
        _through_rings, {"x": "*fp32", "o": "*fp32", "n": "i32"}, {"N": 128, "A": 2, "B": 3}, arch=arch
    )
    assert not report.problems and report.counts["mbarrier.init"] == 10


@pytest.mark.parametrize("arch", [90, 100])
def test_unused_fields_are_not_loaded(arch):
    from jfa.compiled import compile_kernel

    signature = {"records": "*i32", "out": "*i32", "index": "i32"}
    report = compile_kernel(_one_field, signature, {}, arch=arch)
    assert not report.problems and report.counts["ld.global"] == 1


@triton.jit
def _one_field(records, out, index):
    tl.store(out, load_tile(records, index, True, True).kv.length)
