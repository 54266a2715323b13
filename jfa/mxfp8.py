"""MXFP8: numbers in groups of 32 that share a power of two, for jagged tensors, in PyTorch.

A value is an *element* in e4m3 (4 exponent bits, 3 of mantissa, largest 448, no infinity) times the *scale* of its
group in E8M0: code ``c`` means 2**(c - 127), and 255 is NaN. Groups lie along the axis that a product contracts, so a
tensor that is contracted along both of its axes is encoded twice. Groups are counted from the start of each sequence:
none holds rows of two sequences, and a sequence's last group is treated as padded with zeros.

Source of the format: OCP Microscaling Formats (MX) Specification v1.0. The conversion described there takes the scale
2**(floor(log2 amax) - 8) for e4m3 and lets values above 448 times that saturate; here the scale is amax / 448 rounded
up to a power of two, as NVIDIA's libraries choose it, so only infinities saturate. The tiles of 128 x 4 scales are the
layout in which Blackwell's tensor cores read them.

:mod:`jfa.kernels.common.quantize` writes the same bits in one pass on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jfa.layout import check_offsets

GROUP = 32  # values that share a scale
BLOCK = 128  # rows of a tile of scales, and tokens to whose multiples a sequence's scales are padded
TILE_COLUMNS = 4  # groups of a tile of scales
E4M3_MAX = 448.0
NAN_CODE = 255
INF_CODE = 254  # the largest scale, 2**127
P_SCALE_LOG2 = -8  # of attention's probabilities, always: 256 * p never exceeds 448
P_CODE = 127 + P_SCALE_LOG2
AXES = ("head_dim", "tokens")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
E4M3_NAN = 0x7F


# ----------------------------------------------------------------------------------------------------------- the numbers
def scale_codes(amax: Tensor) -> Tensor:
    """Return the E8M0 codes (uint8) of groups whose largest magnitude is ``amax`` (fp32): amax / 448 rounded up to a power of two.

    The rounding is exact: no quotient is formed. A group of zeros gets 0 (2**-127), an infinity 254, NaN 255.
    """
    bits = amax.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    code = (exponent - 8 + (mantissa > 0x600000)).clamp(min=0)  # 448 = 1.75 * 2**8, and 1.75 has mantissa bits 0x600000
    code = torch.where(exponent == 255, torch.where(mantissa > 0, NAN_CODE, INF_CODE), code)
    return code.to(torch.uint8)


def scale_values(codes: Tensor) -> Tensor:
    """Return 2**(code - 127) in fp32, NaN for 255."""
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 0x00400000, bits)  # 2**-127 is a denormal number
    return torch.where(codes == NAN_CODE, 0x7FC00000, bits).view(torch.float32)


def encode(x: Tensor, codes: Tensor) -> Tensor:
    """Return ``x`` (fp32) divided by the scales, as e4m3: nearest even, beyond 448 saturated; NaN where x or the scale is NaN.

    ``codes`` broadcasts against ``x``.
    """
    bits = (254 - codes.int()) << 23
    inverse = torch.where(codes == INF_CODE, 0x00400000, bits).view(torch.float32)
    scaled = (x * inverse).clamp(-E4M3_MAX, E4M3_MAX)
    data = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(x) | (codes == NAN_CODE), E4M3_NAN, data).to(torch.uint8).view(torch.float8_e4m3fn)


def magnitude(x: Tensor, dim: int) -> Tensor:
    """Return the largest magnitude along ``dim``, fp32; NaN where there is one."""
    return x.abs().amax(dim)  # torch's amax lets NaN win


# ------------------------------------------------------------------------------------------------------- tiles of scales
def tile_place(row: Tensor | int, column: Tensor | int) -> tuple:
    """Return the index of scale (row, column) in a packed array [rows / 128, columns / 4, 32, 16]."""
    return row // BLOCK, column // TILE_COLUMNS, row % 32, row % BLOCK // 32 * 4 + column % TILE_COLUMNS


def pack_scales(codes: Tensor) -> Tensor:
    """Return scales [..., R, C] in tiles, [..., ceil(R / 128), ceil(C / 4), 32, 16]; places of no scale hold 0."""
    *lead, rows, columns = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -columns % TILE_COLUMNS, 0, -rows % BLOCK))
    tiles = codes.unflatten(-1, (-1, TILE_COLUMNS)).unflatten(-3, (-1, 4, 32))  # [..., R/128, 4, 32, C/4, 4]
    n = len(lead)
    return tiles.permute(*range(n), n, n + 3, n + 2, n + 1, n + 4).flatten(-2).contiguous()


def unpack_scales(tiles: Tensor) -> Tensor:
    """Return scales [..., R, C] of packed tiles [..., R / 128, C / 4, 32, 16]."""
    n = tiles.ndim - 4
    parts = tiles.unflatten(-1, (4, TILE_COLUMNS))  # [..., R/128, C/4, 32, 4, 4]
    return parts.permute(*range(n), n, n + 3, n + 2, n + 1, n + 4).flatten(n + 3).flatten(n, n + 2).contiguous()


# ------------------------------------------------------------------------------------------------------- jagged tensors
@dataclass(frozen=True)
class BlockScaled:
    """A packed jagged tensor in MXFP8.

    Attributes:
        data: e4m3 [rows, H, D], packed as the tensor it came from; rows of no sequence are 0.
        scales: uint8 E8M0 [H, blocks, T, 32, 16], T = ceil(D / 128): one tile of 128 x 4 scales per 128 tokens of a sequence,
            per head and per 128 of D. With groups along ``"head_dim"`` a tile's rows are tokens and its columns groups of D;
            with groups along ``"tokens"`` its rows are places of D and its columns groups of tokens. Places of no scale hold 0.
        axis: along which the groups lie, ``"head_dim"`` or ``"tokens"``.
        offsets: [B + 1]; sequence b's rows begin at ``offsets[b]``, its blocks at :func:`first_blocks`.
        length: the rows of every sequence, or None where the next offset ends it.
        other: the same values encoded along the other axis, which attention's backward multiplies; None if there is no backward.
        source: the tensor that receives the gradient of attention over these values, unrounded as it is; None if none does.
    """

    data: Tensor
    scales: Tensor
    axis: str
    offsets: Tensor
    length: int | None = None
    other: BlockScaled | None = None
    source: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the values, [rows, H, D]."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Return the device that holds the values."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Return bfloat16, the type of what attention over it returns, whatever type it was encoded from."""
        return torch.bfloat16

    def along(self, axis: str) -> BlockScaled:
        """Return the encoding whose groups lie along ``axis``: this one or the other.

        Raises:
            ValueError: there is none.
        """
        if axis == self.axis:
            return self
        if self.other is None:
            raise ValueError(f"the values are encoded along {self.axis!r} only: quantize_jagged(..., both=True)")
        return self.other

    def dequantize(self) -> Tensor:
        """Return the values in fp32 [rows, H, D]: 448 * 2**127, which an infinity is encoded as, comes out as infinity."""
        rows, _, dim = self.data.shape
        table = block_table(self.offsets, rows, self.length)
        if self.axis == "head_dim":
            codes = unpack_scales(self.scales.unsqueeze(2))  # [H, blocks, 128, groups]
            codes = codes.permute(1, 2, 0, 3).repeat_interleave(GROUP, 3)[..., :dim]
        else:
            codes = unpack_scales(self.scales.unsqueeze(3))[:, :, :dim]  # [H, blocks, D, groups]
            codes = codes.permute(1, 3, 0, 2).repeat_interleave(GROUP, 1)
        return table.packed(table.padded(self.data.float()) * scale_values(codes), rows)


def quantize_jagged(
    x: Tensor, offsets: Tensor, axis: str, *, length: int | None = None, both: bool = False
) -> BlockScaled:
    """Encode a packed jagged tensor in MXFP8.

    Args:
        x: [rows, H, D] bf16, fp16 or fp32, D at most 256, on any device.
        offsets: [B + 1] int32 or int64; sequence b has the rows ``offsets[b]`` to ``offsets[b + 1] - 1``. Their contents are
            checked on the CPU only.
        axis: "head_dim" for groups of 32 along D, each token by itself; "tokens" for groups of 32 tokens of a sequence.
            :func:`jfa.jagged_flash_attention` takes query and key along "head_dim" and value along "tokens".
        length: sequence b has ``length`` rows from ``offsets[b]`` on, in any order; a slot that does not fit belongs to nobody.
            Shared queries' outputs are placed so.
        both: encode along the other axis as well (``other``), as a backward of attention needs. Attention over the result
            is then differentiable: ``x``, if it requires a gradient, receives that of its values, straight through the rounding.

    Returns:
        :class:`BlockScaled`. Rows that no sequence has are 0 there.

    Raises:
        TypeError, ValueError: naming the argument that is wrong.
    """
    check_arguments(x, offsets, length)
    if axis not in AXES:
        raise ValueError(f"axis must be 'head_dim' or 'tokens', got {axis!r}")
    check_both(both)
    found = _quantize(x.detach(), offsets, axis, length)
    return joined(found, _quantize(x.detach(), offsets, other_axis(axis), length), x) if both else found


def other_axis(axis: str) -> str:
    """Return the axis of :data:`AXES` that ``axis`` is not."""
    return AXES[1 - AXES.index(axis)]


def joined(x: BlockScaled, other: BlockScaled, source: Tensor) -> BlockScaled:
    """Return the encoding ``x`` of ``source`` with that along the other axis; ``source`` gets a gradient if it requires one."""
    wanted = torch.is_grad_enabled() and source.requires_grad
    return replace(x, other=other, source=source if wanted else None)


def dequantize(x: BlockScaled) -> Tensor:
    """Return the fp32 values [rows, H, D] of :func:`quantize_jagged`'s result."""
    if not isinstance(x, BlockScaled):
        raise TypeError(f"x must come from quantize_jagged, got {type(x).__name__}")
    return x.dequantize()


def check_both(both) -> None:
    """Raise TypeError unless ``both`` is a bool."""
    if both is not True and both is not False:
        raise TypeError(f"both must be True or False, got {both!r}")


def check_arguments(x: Tensor, offsets: Tensor, length: int | None) -> None:
    """Raise TypeError or ValueError, naming the argument, unless they can be quantized. Contents are read on the CPU only."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 3:
        raise ValueError(f"x must be 3-D [rows, heads, head_dim], got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if not 1 <= x.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"x's head dim must be 1 to {MAX_HEAD_DIM}, got {x.shape[2]}")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
        raise ValueError(f"length must be a whole number of rows or None, got {length!r}")
    check_offsets(
        offsets, x.shape[0], contents=length is None and isinstance(offsets, Tensor) and offsets.device.type == "cpu"
    )
    if offsets.device != x.device:
        raise ValueError(f"offsets is on {offsets.device}, but x is on {x.device}")


# ------------------------------------------------------------------------------------------------- blocks of 128 tokens
def num_blocks(rows: int, batches: int, length: int | None = None) -> int:
    """Return how many blocks of 128 tokens the scales of a tensor have; no sequence's offsets are needed for it."""
    return batches * -(-length // BLOCK) if length is not None else -(-rows // BLOCK) + batches


def first_blocks(begin: Tensor, length: int | None = None) -> Tensor:
    """Return each sequence's first block [B], from its first row ``begin`` [B].

    A sequence begins at its first row plus a block for each sequence before it, in whole blocks: each of them takes less than a
    block more than its rows. So no sum over lengths is needed.
    """
    number = torch.arange(begin.numel(), device=begin.device)
    return number * -(-length // BLOCK) if length is not None else begin.long() // BLOCK + number


def spans(offsets: Tensor, rows: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (first row [B], number of rows [B]) of the sequences, inside a tensor of ``rows`` rows whatever the offsets say."""
    begin = offsets[:-1].long()
    if length is None:
        begin = begin.clamp(0, rows)
        return begin, (torch.maximum(offsets[1:].long(), begin).clamp(max=rows) - begin)
    fits = (begin >= 0) & (begin + length <= rows)
    return torch.where(fits, begin, 0), torch.where(fits, length, 0)


@dataclass(frozen=True)
class BlockTable:
    """The rows of each block in the packed tensor: ``index`` and ``exist`` [blocks, 128]; absent rows have index 0."""

    index: Tensor
    exist: Tensor

    def padded(self, x: Tensor) -> Tensor:
        """Return [blocks, 128, ...] of a packed tensor [rows, ...], zeros where there is no row."""
        if x.shape[0] == 0:
            return x.new_zeros(*self.index.shape, *x.shape[1:])
        return torch.where(self.exist.view(*self.exist.shape, *[1] * (x.ndim - 1)), x[self.index], 0)

    def packed(self, blocks: Tensor, rows: int) -> Tensor:
        """Return the packed tensor [rows, ...] of blocks [blocks, 128, ...]; rows that are in no block are 0."""
        out = blocks.new_zeros(rows, *blocks.shape[2:])
        out[self.index[self.exist]] = blocks[self.exist]
        return out


def block_table(offsets: Tensor, rows: int, length: int | None = None) -> BlockTable:
    """Return the table of a packed tensor with ``rows`` rows, inside it whatever the offsets say."""
    block = torch.arange(num_blocks(rows, offsets.numel() - 1, length), device=offsets.device)
    begin, lengths = spans(offsets, rows, length)
    if begin.numel() == 0:
        begin, lengths = (block.new_zeros(1) for _ in range(2))
    first = first_blocks(begin, length)
    seq = (torch.searchsorted(first, block, right=True) - 1).clamp(min=0)
    place = (block - first[seq])[:, None] * BLOCK + torch.arange(BLOCK, device=offsets.device)
    exist = (place >= 0) & (place < lengths[seq, None])
    return BlockTable(torch.where(exist, begin[seq, None] + place, 0), exist)


def _quantize(x: Tensor, offsets: Tensor, axis: str, length: int | None) -> BlockScaled:
    rows, _, dim = x.shape
    table = block_table(offsets, rows, length)
    blocks = table.padded(x.float())  # [blocks, 128, H, D]
    if axis == "head_dim":
        groups = torch.nn.functional.pad(blocks, (0, -dim % GROUP)).unflatten(3, (-1, GROUP))
        codes = scale_codes(magnitude(groups, 4))  # [blocks, 128, H, groups]
        scales = pack_scales(codes.permute(2, 0, 1, 3))[:, :, 0]
        codes = codes.repeat_interleave(GROUP, 3)[..., :dim]
    else:
        codes = scale_codes(magnitude(blocks.unflatten(1, (-1, GROUP)), 2))  # [blocks, 4, H, D]
        scales = pack_scales(codes.permute(2, 0, 3, 1))[:, :, :, 0]
        codes = codes.repeat_interleave(GROUP, 1)
    data = table.packed(encode(blocks, codes).view(torch.uint8), rows).view(torch.float8_e4m3fn)
    return BlockScaled(data, scales.contiguous(), axis, offsets, length)
