"""Old helpers of backward_dq and backward_shared_q, until those have nouns."""
import triton
import triton.language.extra.tlx as tlx

from jfa.kernels.common.ragged import ragged_box


@triton.jit
def load_box(desc, ring, slot, parity, begin, length, row, head, BYTES):
    """One box into one buffer of a ring, once its readers have left."""
    tiles, fulls, empties = ring
    tlx.barrier_wait(empties[slot], parity ^ 1)
    tlx.barrier_expect_bytes(fulls[slot], BYTES)
    tlx.async_descriptor_load(desc, tiles[slot], ragged_box(begin, length, row, head), fulls[slot])


@triton.jit
def store_gradient(desc, stage, gradient, begin, length, row, head):
    """64 rows of dK or dV leave through a staging buffer, clipped at the sequence's end."""
    tlx.local_store(stage, gradient.to(stage.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, stage, ragged_box(begin, length, row, head))
