"""Move block scales to the tensor cores: from memory to SMEM together with the tile that they scale, then to TMEM.

A scale tile holds the E8M0 codes of 128 rows and four groups of 32, as the tensor cores want them: 512 contiguous
bytes, so one bulk copy loads it and one ``tcgen05.cp`` takes it to TMEM. A sequence owns whole tiles
(:mod:`jfa.mxfp8`): none of its own holds a neighbor's code.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK, BLOCK_N
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ring import Ring, alloc_ring
from jfa.kernels.common.sequences import sequence_of

GROUPS = tl.constexpr(4)  # groups of 32 in a tile
TILE_BYTES = tl.constexpr(BLOCK * GROUPS.value)
P_BITS = tl.constexpr(8)  # P is stored as P * 2**8, so that its largest value, 1, lies at the top of e4m3's range
P_CODE = tl.constexpr(127 - P_BITS.value)  # E8M0 of 2**-8, which the tensor cores multiply it by


@aggregate
class ScaleTiles:
    """The scale tiles of a quantized tensor: [heads, blocks] x 512 bytes."""

    ptr: tl.tensor
    blocks: tl.tensor  # per head

    @triton.jit
    def at(self, head, block):
        """Return the address of the tile of ``block``, counted as :func:`first_key_block` and :func:`first_query_block` do."""
        return self.ptr + (head.to(tl.int64) * self.blocks + block) * TILE_BYTES


@triton.jit
def first_key_block(tile, BROADCAST_Q: tl.constexpr):
    """Return the scale block of the tile's sequence's first key. Each sequence owns one block more than its rows fill."""
    return tile.kv.begin // BLOCK_N + sequence_of(tile, BLOCK_N, BROADCAST_Q, False)


@triton.jit
def first_query_block(tile, BROADCAST_Q: tl.constexpr):
    """Return the scale block of the tile's sequence's first query."""
    return 0 if BROADCAST_Q else tile.pad_begin // BLOCK_N


@aggregate
class ScaledRing:
    """A ring of e4m3 boxes, each with its scale tile, which arrives on the same barrier."""

    ring: Ring
    scales: tlx.buffered_tensor  # a buffer [512] uint8 per buffer of the ring

    @triton.jit
    def slot(self, count):
        """Return (slot, phase) of the count-th use; see :class:`jfa.kernels.common.ring.Ring`."""
        return self.ring.slot(count)

    @triton.jit
    def nth(self, number: tl.constexpr):
        """Return the ring that lies ``number`` rings behind this one."""
        return ScaledRing(self.ring.nth(number), self.scales)

    @triton.jit
    def load(self, count, desc, box, scales):
        """Fill the count-th slot with a box and the scale tile at ``scales``, once its readers have left."""
        ring = self.ring
        slot, phase = ring.slot(count)
        tlx.barrier_wait(ring.empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(ring.fulls[slot], ring.bytes + TILE_BYTES)
        tlx.async_descriptor_load(desc, ring.buffers[slot], box, ring.fulls[slot])
        tlx.async_load(scales, self.scales[slot], bulk=True, barrier=ring.fulls[slot])

    @triton.jit
    def copy_codes(self, slot, target):
        """Copy a slot's scales to a scale tile in TMEM, in order with this warp's products."""
        copy_scales(self.scales[slot], target)


@triton.jit
def alloc_scaled_ring(ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, RINGS: tl.constexpr = 1):
    """Allocate RINGS rings of e4m3 boxes [ROWS, COLUMNS] with their scales side by side, which one role empties."""
    ring = alloc_ring(ROWS, COLUMNS, tl.float8e4nv, STAGES, 1, RINGS)
    return ScaledRing(ring, tlx.local_alloc((TILE_BYTES,), tl.uint8, RINGS * STAGES))


@triton.jit
def copy_scales(tile, target):
    """Copy a scale tile [512] from SMEM to TMEM [128, 4], in order with this warp's products."""
    tlx.tmem_copy(tlx.local_reshape(tile, [1, 1, 32, 16]), target)


@triton.jit
def alloc_p_scales():
    """Allocate a scale tile in SMEM that holds P's one scale. Runs before the roles part, so all of them see it."""
    tile = tlx.local_alloc((TILE_BYTES,), tl.uint8, 1)
    tlx.local_store(tile[0], tl.full([TILE_BYTES], P_CODE, tl.uint8))
    tlx.fence("async_shared")
    return tile
