"""MXFP8 in one pass: a packed jagged tensor is read once and written in one or both encodings, with its tiles of scales.

The bits are those of :mod:`jfa.mxfp8`, which defines them. Scales are computed in integers, from the bits of the
group's largest magnitude, so they are the same on every GPU and with every compiler. Plain Triton: runs on any GPU and
on the emulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa import mxfp8
from jfa.kernels.base import Problem
from jfa.kernels.common.launcher import Variant
from jfa.kernels.compile_config import CompileConfig
from jfa.mxfp8 import AXES, BLOCK, BlockScaled, check_arguments, check_both, joined, num_blocks, other_axis

TILE_WORDS = tl.constexpr(128)  # of 4 scales each, in a tile
ROWS = tl.constexpr(BLOCK)
NATIVE = (8, 9)  # compute capability from which on there is an instruction that rounds to e4m3


# ---------------------------------------------------------------------------------------------------------------- host
def quantize_jagged(
    x: Tensor,
    offsets: Tensor,
    axis: str,
    *,
    length: int | None = None,
    both: bool = False,
    records: Tensor | None = None,
) -> BlockScaled:
    """Encode ``x`` as :func:`jfa.mxfp8.quantize_jagged` does, by a kernel; CPU tensors run it on the emulator.

    ``records`` is what :func:`block_records` returned for as many rows, the same offsets and length: for K and V once.
    """
    if axis not in AXES:
        raise ValueError(f"axis must be 'head_dim' or 'tokens', got {axis!r}")
    check_both(both)
    if not both:
        return _quantize(x, offsets, (axis,), length, records)[0]
    found = dict(zip(AXES, _quantize(x, offsets, AXES, length, records)))
    return joined(found[axis], found[other_axis(axis)], x)


def quantize_both(
    x: Tensor, offsets: Tensor, *, length: int | None = None, records: Tensor | None = None
) -> tuple[BlockScaled, BlockScaled]:
    """Return ``x`` encoded along "head_dim" and along "tokens", from one read. Arguments as :func:`quantize_jagged`."""
    return _quantize(x, offsets, AXES, length, records)


def quantize_queries(problem: Problem, x: Tensor, axes: tuple[str, ...] = AXES) -> tuple[BlockScaled, ...]:
    """Return ``x`` [rows_q, H, D] of a call encoded along ``axes``; shared queries are one sequence, whose first block is 0."""
    if problem.broadcast_q:
        return _encode(x, torch.zeros(2, dtype=torch.int32, device=x.device), axes, problem.rows_q)
    return _encode(x, problem.query_offset, axes, None)


def quantize_keys(problem: Problem, *tensors: Tensor, axes: Sequence[tuple[str, ...]]) -> list[tuple[BlockScaled, ...]]:
    """Return tensors [rows_kv, H_kv, *] of a call, each encoded along its own of ``axes``; their blocks are described once."""
    records = None
    if tensors[0].is_cuda and tensors[0].numel():
        records = block_records(problem.key_offset, problem.rows_kv)
    return [_encode(x, problem.key_offset, mine, None, records) for x, mine in zip(tensors, axes, strict=True)]


def quantize_outputs(problem: Problem, x: Tensor, axes: tuple[str, ...] = AXES) -> tuple[BlockScaled, ...]:
    """Return ``x`` [rows_out, H, Dv] of a call, such as dout, encoded along ``axes``.

    With shared queries sequence b has the ``rows_q`` rows of its slot, and its first block is b * ceil(rows_q / 128).
    """
    if not problem.broadcast_q:
        return _encode(x, problem.query_offset, axes, None)
    slots = problem.output_offset
    if slots is None:
        slots = torch.arange(problem.num_batches + 1, dtype=torch.int32, device=x.device) * problem.rows_q
    return _encode(x, slots, axes, problem.rows_q)


def _encode(x: Tensor, offsets: Tensor, axes: tuple[str, ...], length: int | None, records: Tensor | None = None):
    """Encode by the kernel on a GPU; on a CPU by PyTorch, which writes the same bits sooner than the emulator."""
    if x.is_cuda:
        return _quantize(x, offsets, axes, length, records)
    return tuple(mxfp8.quantize_jagged(x, offsets, axis, length=length) for axis in axes)


def _quantize(
    x: Tensor, offsets: Tensor, axes: tuple[str, ...], length: int | None, records: Tensor | None
) -> tuple[BlockScaled, ...]:
    check_arguments(x, offsets, length)
    x = x.detach()
    if x.stride(2) != 1:
        x = x.contiguous()
    batches, (rows, heads, dim) = offsets.numel() - 1, x.shape
    blocks, tiles = num_blocks(rows, batches, length), -(-dim // BLOCK)
    # Slots that fill a tensor are all there is of it; other slots leave rows that no program visits.
    new_data = x.new_empty if length is None or batches * length == rows else x.new_zeros
    found = tuple(
        BlockScaled(
            new_data(rows, heads, dim, dtype=torch.float8_e4m3fn),
            torch.empty(heads, blocks, tiles, 32, 16, dtype=torch.uint8, device=x.device),
            axis,
            offsets,
            length,
        )
        for axis in axes
    )
    if blocks and heads:
        with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
            records = block_records(offsets, rows, length) if records is None else _checked(records, blocks, x)
            launch(x, records, found, variant_of(x, axes))
    return found


def _checked(records: Tensor, blocks: int, x: Tensor) -> Tensor:
    """Return records of as many blocks as ``x`` needs. Their row numbers are not checked."""
    if tuple(records.shape) != (blocks, 2) or records.dtype != torch.int32 or records.device != x.device:
        raise ValueError(
            f"records must be int32 [{blocks}, 2] on {x.device}, as block_records gives them for this x, "
            f"got {records.dtype} {tuple(records.shape)} on {records.device}"
        )
    return records


def block_records(offsets: Tensor, rows: int, length: int | None = None) -> Tensor:
    """Return (first row, rows) of each block of 128 tokens, [blocks, 2] int32; see :func:`records_kernel`."""
    batches = offsets.numel() - 1
    blocks = num_blocks(rows, batches, length)
    records = torch.empty(blocks, 2, dtype=torch.int32, device=offsets.device)
    options = dict(SLOTS=length is not None, STEPS=(batches + 1).bit_length(), N=128)
    grid = (triton.cdiv(blocks, 128),)
    _records_variant(**options).launch(offsets.device, grid, offsets, records, batches, rows, length or 0, blocks)
    return records


def launch(x: Tensor, records: Tensor, found: tuple[BlockScaled, ...], variant: Variant) -> None:
    """Write the encodings ``found`` of ``x``, whose last stride is 1; what is of the other axis is not touched."""
    of = {y.axis: y for y in found}
    data = [of[axis].data.view(torch.uint8) if axis in of else x for axis in AXES]
    scales = [of[axis].scales.view(torch.int32) if axis in of else x for axis in AXES]
    heads = x.shape[1]
    parts = 1 if x.shape[2] <= 64 else 2 * -(-x.shape[2] // BLOCK)
    grid = (records.shape[0] * heads * parts,)
    variant.launch(x.device, grid, x, *data, *scales, records, heads, records.shape[0], x.stride(0), x.stride(1))


def variant_of(x: Tensor, axes: tuple[str, ...]) -> Variant:
    """Return the kernel for ``x`` [rows, H, D] and these encodings."""
    return _variant(x.shape[2], "head_dim" in axes, "tokens" in axes, _is_native(x.device))


@cache
def _is_native(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= NATIVE


@cache
def _variant(dim: int, head_dim: bool, tokens: bool, native: bool) -> Variant:
    groups = 1 if dim <= 32 else 2
    choices = dict(HEAD_DIM=head_dim, TOKENS=tokens, NATIVE_E4M3=native)
    return Variant(quantize_kernel, DIM=dim, GROUPS=groups, **choices, num_warps=4)


@cache
def _records_variant(**options) -> Variant:
    return Variant(records_kernel, **options)


# ----------------------------------------------------------------------------------------------------------- the numbers
@triton.jit
def magnitude_bits(x):
    """Return the bits of abs(x), fp32, as int32: their order is that of the magnitudes, with infinity and then NaN on top."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_code(bits):
    """Return the E8M0 codes (int32) of groups whose largest magnitude has these ``bits``: amax / 448 rounded up; see jfa.mxfp8."""
    code = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)  # 448 is 1.75 * 2**8: a larger mantissa than 1.75 carries
    code = tl.where(bits >= 0x7F800000, 254, code)
    return tl.where(bits > 0x7F800000, 255, code)


@triton.jit
def inverse_scale(bits):
    """Return 2**(127 - scale_code(bits)) in fp32, and NaN where that is 255."""
    inverse = (254 - tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)) << 23
    inverse = tl.where(bits >= 0x7F800000, 0x00400000, inverse)  # 2**-127 is a denormal number
    return tl.where(bits > 0x7F800000, 0x7FC00000, inverse).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, NATIVE_E4M3: tl.constexpr = True):
    """Return fp32 numbers as the bytes (uint8) of e4m3: nearest even, saturated at 448, NaN as 0x7F."""
    if NATIVE_E4M3:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        a = bits & 0x7FFFFFFF
        normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960  # exponents are biased by 127 and by 7: 120 * 8
        # Added to 2**14 an fp32 number keeps multiples of 2**-9, e4m3's smallest: the addition rounds.
        tiny = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(a < 0x3C800000, tiny, tl.minimum(normal, 0x7E))  # below 2**-6
        return tl.where(a > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80)).to(tl.uint8)


# --------------------------------------------------------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=["batches", "rows", "length", "count"])
def records_kernel(
    offsets, records, batches, rows, length, count, SLOTS: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr
):
    """Write (first row, rows) of N blocks per program; minus the rows where they follow the last sequence.

    Sequence b has the blocks from begin // 128 + b on, the rows after the last sequence likewise; halving STEPS times finds a
    block's sequence. SLOTS: each sequence has ``length`` rows and as many blocks, or none if they do not fit.
    """
    block = tl.program_id(0) * N + tl.arange(0, N)
    if SLOTS:
        each = tl.cdiv(length, ROWS)
        seq = tl.minimum(block // each, batches - 1)
        begin = tl.load(offsets + seq).to(tl.int64)
        fits = (begin >= 0) & (begin <= rows - length)
        place = (block - seq * each) * ROWS
        exist = tl.where(fits, tl.minimum(length - place, ROWS), 0)
        begin = begin.to(tl.int32)
    else:
        seq = block * 0
        last = seq + batches
        for _ in range(STEPS):
            middle = (seq + last + 1) // 2
            begin = first_row(offsets, middle, rows)
            here = begin // ROWS + middle <= block
            seq = tl.where(here, middle, seq)
            last = tl.where(here, last, middle - 1)
        begin = first_row(offsets, seq, rows)
        end = tl.where(seq < batches, tl.maximum(first_row(offsets, tl.minimum(seq + 1, batches), rows), begin), rows)
        place = (block - (begin // ROWS + seq)) * ROWS
        exist = tl.minimum(tl.maximum(end - begin - place, 0), ROWS)
        exist = tl.where(place >= 0, tl.where(seq < batches, exist, -exist), 0)
    tl.store(records + 2 * block, tl.where(exist != 0, begin + place, 0), mask=block < count)
    tl.store(records + 2 * block + 1, exist, mask=block < count)


@triton.jit
def first_row(offsets, b, rows):
    """Return offset ``b`` as int32, inside the tensor."""
    return tl.minimum(tl.maximum(tl.load(offsets + b), 0), rows).to(tl.int32)


@triton.jit(do_not_specialize=["heads", "blocks"])
def quantize_kernel(
    x,
    head_dim_data,
    tokens_data,
    head_dim_scales,
    tokens_scales,
    records,
    heads,
    blocks,
    x_row,
    x_head,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
):
    """Encode 128 tokens and 32 * GROUPS places of D per program; those of a head and all heads lie side by side.

    Strides are in elements; scales are words of four. Tokens are held as [HIGH, 4, LOW]: token HIGH * LOW + LOW of each of four
    groups. With 16 places of D per thread, LOW and D take a warp's lanes and the groups the four warps. So a thread has HIGH tokens
    of a group, and no group needs a second warp. More than 64 places of D would need more registers than there are.
    """
    LOW: tl.constexpr = 16 // GROUPS
    HIGH: tl.constexpr = 32 // LOW
    TILES: tl.constexpr = (DIM + 127) // 128
    PARTS: tl.constexpr = 1 if DIM <= 64 else 2 * TILES
    part = tl.program_id(0) % PARTS
    head = (tl.program_id(0) // PARTS % heads).to(tl.int64)
    block = tl.program_id(0) // PARTS // heads
    begin = tl.load(records + 2 * block)
    exist = tl.load(records + 2 * block + 1)
    high = tl.arange(0, HIGH)[:, None, None, None, None]
    quarter = tl.arange(0, 4)[None, :, None, None, None]
    low = tl.arange(0, LOW)[None, None, :, None, None]
    group = tl.arange(0, GROUPS)[None, None, None, :, None]
    in_group = tl.arange(0, 32)[None, None, None, None, :]
    token = high * LOW + low
    place = quarter * 32 + token
    d = part * 64 + group * 32 + in_group
    row = (begin + place).to(tl.int64)
    inside = (place < exist) & (d < DIM)
    written = (place < tl.abs(exist)) & (d < DIM)
    values = tl.load(x + row * x_row + head * x_head + d, mask=inside, other=0.0).to(tl.float32)
    bits = magnitude_bits(values)
    at = (row * heads + head) * DIM + d
    words = ((head * blocks + block) * TILES + part // 2) * TILE_WORDS
    if HEAD_DIM:
        scales = head_dim_scales + words + token * 4 + quarter
        store_by_dim(head_dim_data + at, scales, values, bits, group, written, part % 2, PARTS == 1, NATIVE_E4M3)
    if TOKENS:
        scales = tokens_scales + words + in_group * 4 + part % 2 * 2 + group
        store_by_tokens(tokens_data + at, scales, values, bits, quarter, written, NATIVE_E4M3)
        if PARTS == 1:  # the rest of the tile
            rest = tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
            tl.store(tokens_scales + words + rest, tl.zeros((32, 4), tl.int32), mask=rest % 4 >= GROUPS)


@triton.jit
def store_by_dim(data, scales, values, bits, group, written, half, WHOLE: tl.constexpr, NATIVE_E4M3: tl.constexpr):
    """Write a program's e4m3 numbers and codes of groups along D: a word per token or, without WHOLE, one of its halves."""
    amax = tl.max(bits, 4, keep_dims=True)
    tl.store(data, to_e4m3(values * inverse_scale(amax), NATIVE_E4M3), mask=written)
    packed = tl.sum(scale_code(amax) << (8 * group), 3, keep_dims=True)
    if WHOLE:
        tl.store(scales, packed)
    else:
        tl.store(scales.to(tl.pointer_type(tl.int16)) + half, packed.to(tl.int16))


@triton.jit
def store_by_tokens(data, scales, values, bits, quarter, written, NATIVE_E4M3: tl.constexpr):
    """Write a program's e4m3 numbers and codes of groups along tokens: a word per place of D."""
    amax = tl.max(tl.max(bits, 0, keep_dims=True), 2, keep_dims=True)
    tl.store(data, to_e4m3(values * inverse_scale(amax), NATIVE_E4M3), mask=written)
    tl.store(scales, tl.sum(scale_code(amax) << (8 * quarter), 1, keep_dims=True))


# ------------------------------------------------------------------------------------------------------ compiled variants
def compile_configs() -> list[CompileConfig]:
    """Return the variants that `jfa compile` reports: both encodings, and one; bf16, contiguous."""
    return [_config(128, True, True), _config(64, True, True), _config(256, True, True), _config(128, False, True)]


def _config(dim: int, head_dim: bool, tokens: bool) -> CompileConfig:
    options = dict(_variant(dim, head_dim, tokens, True).options)
    signature = dict(x="*bf16:16", records="*i32:16", heads="i32", blocks="i32", x_row="i32:16", x_head="i32:16")
    signature |= dict(head_dim_data="*u8:16", tokens_data="*u8:16", head_dim_scales="*i32:16", tokens_scales="*i32:16")
    warps = options.pop("num_warps")
    return CompileConfig(
        name=f"quantize-d{dim}" + ("" if head_dim else "-tokens"),
        kernel=f"{__name__}:quantize_kernel",
        signature=signature,
        constexprs=options,
        targets=(90, 100),
        num_warps=warps,
    )
