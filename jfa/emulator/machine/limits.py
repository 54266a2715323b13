"""Limits of the hardware, the same on sm_90 where they exist there.

Sources: CUDA C programming guide; PTX ISA, chapter on tcgen05.
"""

SHARED_MEMORY = 232_448  # bytes one CTA can use (227 KiB)
TMEM_LANES = 128
TMEM_COLUMNS = 512  # of 4 bytes
TMEM_MIN_COLUMNS = 32  # an allocation is a power of two of at least this many
REGISTERS = 65_536  # 32-bit registers of an SM
MIN_REGISTERS, MAX_REGISTERS, REGISTER_STEP = 24, 256, 8
MAX_THREADS = 1024
WARP = 32
NAMED_BARRIERS = 16
MAX_CLUSTER = 16
BARRIER_COUNT = (1 << 20) - 1
BARRIER_BYTES = (1 << 20) - 1  # the transaction counter of one phase
