"""Answers to chapter 16's exercises."""

from tests.course.answers import right, wrong

K_CODES = "        tlx.async_descriptor_load(k_codes_desc, k_codes[0], [j, 0, 0, 0], full[0])\n"
AGAIN = "        tlx.tmem_copy(kt_codes[0], k_scale[0])  # behind S, on the same pipe\n"
TOKENS = """    row = begin + g * 32 + tl.arange(0, 32)
    d = tl.arange(0, D)
    if begin + g * 32 < end:
        at = (row[:, None] * H + h) * D + d[None, :]
        x = tl.load(x_ptr + at, mask=row[:, None] < end, other=0.0)
        bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
        code = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        code = tl.where(bits > 0x7F800000, 255, tl.maximum(code, 0))
        inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
        tl.store(data_ptr + at, (x * inverse[None, :]).to(tl.float8e4nv), mask=row[:, None] < end)
        place = begin // 32 + b + g
        tl.store(codes_ptr + (place * H + h) * D + d, code.to(tl.uint8))
"""
SOFTMAX = """        m_new = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))
        alpha = tl.math.exp2(m - m_new)
        p = tl.math.exp2(x - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        tlx.local_store(p_tile[0], (256.0 * p).to(tl.float8e4nv))
"""

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 16.1
    wrong(
        "16.1",
        "log2 and ceil",
        source="""
def quantise(x):
    g = x.unflatten(-1, (-1, 32))
    amax = g.abs().amax(-1)
    e = torch.ceil(torch.log2(amax / 448)).clamp(-127, 127)
    codes = (e + 127).nan_to_num(255)
    codes = torch.where(amax.isinf(), 254, codes)
    codes = torch.where(amax.isnan(), 255, codes)
    data = torch.ldexp(g, (127 - codes).int()[..., None]).clamp(-448, 448)
    return data.flatten(-2).to(torch.float8_e4m3fn), codes.to(torch.uint8)
""",
    ),
    wrong(
        "16.1",
        "floor of log2, as MX's own rule",
        source="""
def quantise(x):
    g = x.unflatten(-1, (-1, 32))
    amax = g.abs().amax(-1)
    _, e = torch.frexp(amax)
    codes = (e - 1 - 8 + 127).clamp(0, 254)
    codes = torch.where(amax == 0, 0, codes)
    codes = torch.where(amax.isinf(), 254, codes)
    codes = torch.where(amax.isnan(), 255, codes)
    data = torch.ldexp(g, (127 - codes)[..., None]).clamp(-448, 448)
    return data.flatten(-2).to(torch.float8_e4m3fn), codes.to(torch.uint8)
""",
    ),
    wrong("16.1", "at least 448 needs the next code", ("(mantissa > 0.875)", "(mantissa >= 0.875)")),
    wrong("16.1", "256 for 448", ("(mantissa > 0.875)", "(mantissa > 0.5)")),
    wrong(
        "16.1", "zeros have code 127", ("torch.where(largest == 0, 0, codes)", "torch.where(largest == 0, 127, codes)")
    ),
    wrong(
        "16.1",
        "zeros as frexp gives them",
        ("codes = torch.where(largest == 0, 0, codes).clamp(min=0)", "codes = codes.clamp(min=0)"),
    ),
    wrong("16.1", "no least code", (".clamp(min=0)", "")),
    wrong("16.1", "codes from 1", (".clamp(min=0)", ".clamp(min=1)")),
    wrong(
        "16.1",
        "infinity before NaN",
        (
            "    codes = torch.where(largest.isinf(), 254, codes)\n    codes = torch.where(largest.isnan(), 255, codes)\n",
            "    codes = torch.where(largest.isnan(), 255, codes)\n    codes = torch.where(groups.isinf().any(-1), 254, codes)\n",
        ),
    ),
    wrong(
        "16.1",
        "NaN not seen by the maximum",
        ("groups.abs().amax(-1)", "groups.abs().nan_to_num(0.0, posinf=float('inf')).amax(-1)"),
    ),
    wrong("16.1", "infinity has 255", ("largest.isinf(), 254", "largest.isinf(), 255")),
    right("16.1", "not clamped: the conversion saturates", ("scaled.clamp(-448, 448)", "scaled")),
    wrong(
        "16.1",
        "infinity loses its sign",
        ("scaled.clamp(-448, 448)", "torch.where(groups.isinf(), 448.0, scaled.clamp(-448, 448))"),
    ),
    wrong("16.1", "rounded twice, by way of bf16", ("scaled.clamp(-448, 448)", "scaled.clamp(-448, 448).bfloat16()")),
    wrong("16.1", "rounded twice, by way of fp16", ("scaled.clamp(-448, 448)", "scaled.clamp(-448, 448).half()")),
    wrong("16.1", "times the scale", ("(127 - codes)[", "(codes - 127)[")),
    right(
        "16.1",
        "divided by the scale in fp32, which is exact",
        ("torch.ldexp(groups, (127 - codes)[..., None])", "groups / torch.exp2((codes - 127).float())[..., None]"),
    ),
    wrong("16.1", "largest without its sign", ("groups.abs().amax(-1)", "groups.amax(-1)")),
    wrong("16.1", "two dimensions only", ("x.unflatten(-1, (-1, 32))", "x.reshape(x.shape[0], -1, 32)")),
    wrong("16.1", "codes int32", ("codes.to(torch.uint8)", "codes.to(torch.int32)")),
    wrong("16.1", "e5m2", ("torch.float8_e4m3fn", "torch.float8_e5m2")),
    wrong(
        "16.1",
        "truncated",
        (
            "scaled.clamp(-448, 448)",
            "(scaled.clamp(-448, 448).contiguous().view(torch.int32) & ~0xFFFFF).view(torch.float32)",
        ),
    ),
    right(
        "16.1",
        "by bits",
        source="""
def quantise(x):
    groups = x.reshape(*x.shape[:-1], -1, 32)
    bits = groups.contiguous().view(torch.int32) & 0x7FFFFFFF
    top = bits.amax(-1)
    code = (top >> 23) - 8 + ((top & 0x7FFFFF) > 0x600000).int()
    code = code.clamp(0, 254)
    code[top == 0x7F800000] = 254
    code[top > 0x7F800000] = 255
    y = (groups.double() * torch.exp2(127.0 - code.double())[..., None]).clamp(-448, 448).float()
    return y.reshape(x.shape).to(torch.float8_e4m3fn), code.to(torch.uint8)
""",
    ),
    right(
        "16.1",
        "counts codes in fp64",
        source="""
def quantise(x: torch.Tensor):
    groups = x.double().reshape(x.shape[:-1] + (x.shape[-1] // 32, 32))
    amax = groups.abs().amax(-1)
    limits = 448.0 * torch.exp2(torch.arange(255, dtype=torch.float64) - 127)
    codes = torch.searchsorted(limits, torch.nan_to_num(amax, nan=1.0, posinf=1.0).contiguous())
    codes = torch.where(amax == float("inf"), 254, codes)
    codes = torch.where(amax != amax, 255, codes)
    scaled = torch.clamp(groups / torch.exp2(codes.double() - 127).unsqueeze(-1), -448.0, 448.0)
    return scaled.float().to(torch.float8_e4m3fn).reshape(x.shape), codes.to(dtype=torch.uint8)
""",
    ),
    # ------------------------------------------------------------------------------------------ 16.2
    wrong("16.2", "tiles rounded down", ("(columns + 3) // 4", "max(1, columns // 4)")),
    wrong("16.2", "a tile too many", ("(columns + 3) // 4", "columns // 4 + 1")),
    wrong(
        "16.2",
        "tiles downwards first",
        ("tile = row // 128 * across + column // 4", "tile = column // 4 * ((rows + 127) // 128) + row // 128"),
    ),
    wrong("16.2", "rows in order", ("row % 32 * 16 + row % 128 // 32 * 4", "row % 128 * 4")),
    wrong(
        "16.2",
        "quarters and lines exchanged",
        ("row % 32 * 16 + row % 128 // 32 * 4", "row % 128 // 4 * 16 + row % 4 * 4"),
    ),
    wrong("16.2", "the quarter not within the tile", ("row % 128 // 32 * 4", "row // 32 * 4")),
    wrong("16.2", "columns before quarters", ("row % 128 // 32 * 4 + column % 4", "row % 128 // 32 + column % 4 * 4")),
    wrong("16.2", "rows behind the last owned", ("(its_row < rows) & (its_column < columns)", "its_column < columns")),
    wrong("16.2", "columns behind the last owned", ("(its_row < rows) & (its_column < columns)", "its_row < rows")),
    wrong(
        "16.2",
        "either for both",
        ("(its_row < rows) & (its_column < columns)", "(its_row < rows) | (its_column < columns)"),
    ),
    wrong("16.2", "-1 in the row only", ("torch.where(real, its_column, -1)", "its_column")),
    wrong(
        "16.2",
        "-1 by each",
        (
            "torch.where(real, its_row, -1), torch.where(real, its_column, -1)",
            "torch.where(its_row < rows, its_row, -1), torch.where(its_column < columns, its_column, -1)",
        ),
    ),
    wrong(
        "16.2",
        "one tile across in the way back",
        ("its_row = tile // across * 128", "its_row = tile * 128"),
        ("its_column = tile % across * 4", "its_column = 0"),
    ),
    wrong("16.2", "int32", ("return at, torch", "return at.int(), torch")),
    wrong(
        "16.2", "byte 512 in the first tile", ("byte // 512, byte % 512 // 16", "(byte - 1) // 512, byte % 512 // 16")
    ),
    right(
        "16.2",
        "a table of all bytes",
        source="""
def locate(row, column, byte, rows, columns):
    down, across = -(-rows // 128), -(-columns // 4)
    where = torch.arange(down * across * 512).view(down, across, 32, 4, 4)  # tile, tile, line, quarter, column
    table = where.permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)
    back = torch.full((down * across * 512, 2), -1)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    back[table[:rows, :columns].flatten()] = torch.stack((r.flatten(), c.flatten()), 1)
    return table[row, column], back[byte, 0], back[byte, 1]
""",
    ),
    right(
        "16.2",
        "bit arithmetic",
        source="""
def to_byte(row, column, across):
    inside = ((row & 31) << 4) | (((row >> 5) & 3) << 2) | (column & 3)
    return ((row >> 7) * across + (column >> 2)) * 512 + inside

def locate(row, column, byte, rows, columns):
    across = -(-columns // 4)
    t = byte >> 9
    r = torch.div(t, across, rounding_mode="floor") * 128 + ((byte >> 2) & 3) * 32 + ((byte >> 4) & 31)
    c = t.remainder(across) * 4 + (byte & 3)
    nobody = (r >= rows).logical_or(c >= columns)
    return to_byte(row, column, across), r.masked_fill(nobody, -1), c.masked_fill(nobody, -1)
""",
    ),
    # ------------------------------------------------------------------------------------------ 16.3
    wrong("16.3", "power forgotten", ("math.log2(largest) - power", "math.log2(largest)")),
    wrong("16.3", "power added", ("math.log2(largest) - power", "math.log2(largest) + power")),
    wrong("16.3", "natural logarithm", ("math.log2(largest) - power", "math.log(largest) - power")),
    wrong("16.3", "whole octaves", ("math.log2(largest) - power", "float(math.floor(math.log2(largest)) - power)")),
    wrong("16.3", "e5m2 up to its largest field", ("57344.0", "114688.0")),
    wrong("16.3", "e4m3 without its last field", ("448.0", "240.0")),
    wrong("16.3", "e4m3 up to 480", ("448.0", "480.0")),
    wrong("16.3", "the smallest subnormal", ("tiny - power, moved", "tiny + 1 - power, moved")),
    wrong("16.3", "the tie rounds up", ("tiny - power, moved", "tiny - 1 - power, moved")),
    wrong(
        "16.3", "the smallest normal", ('(448.0, -9), "e5m2": (57344.0, -16)', '(448.0, -6), "e5m2": (57344.0, -14)')
    ),
    wrong("16.3", "0.0 where none fits", ("threshold if threshold >= 0 else -1.0", "max(threshold, 0.0)")),
    right(
        "16.3",
        "0 does not fit: no format's largest number is a power of two",
        ("threshold if threshold >= 0", "threshold if threshold > 0"),
    ),
    wrong("16.3", "-1 without a look", ("threshold if threshold >= 0 else -1.0", "threshold")),
    wrong("16.3", "moved rounded down", ("exps * work // flops)", "-(-exps * work // flops))")),
    wrong(
        "16.3",
        "moved in floats, rounded",
        ("max(0, rows * keys - exps * work // flops)", "max(0, round(rows * keys - exps * work / flops))"),
    ),
    wrong(
        "16.3",
        "less than none moved",
        ("max(0, rows * keys - exps * work // flops)", "rows * keys - exps * work // flops"),
    ),
    wrong("16.3", "one product", ("4 * rows * keys * dim", "2 * rows * keys * dim")),
    wrong("16.3", "strictly less fits", ("<= work * fmas", "< work * fmas")),
    wrong("16.3", "all exponentials on the FMA pipe", ("fits = moved * operations", "fits = rows * keys * operations")),
    wrong("16.3", "fits with one operation each", ("moved * operations * flops", "moved * flops")),
    right(
        "16.3",
        "fractions",
        source="""
from fractions import Fraction

FORMATS = {"e4m3": (1.75 * 2**8, -9), "e5m2": (1.75 * 2**15, -16)}

def predict(form, power, rows, keys, dim, flops, exps, fmas, operations):
    largest, least = FORMATS[form]
    t = math.log2(largest / 2.0**power)
    tensor = Fraction(4 * rows * keys * dim, flops)
    scores = rows * keys
    stay = min(scores, math.floor(tensor * exps))
    moved = scores - stay
    fits = Fraction(moved * operations, fmas) <= tensor
    return (t if t >= 0 else -1.0), least - power, moved, fits
""",
    ),
    right(
        "16.3",
        "torch's formats asked",
        source="""
def predict(form, power, rows, keys, dim, flops, exps, fmas, operations):
    dtype = torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2
    threshold = math.log2(torch.finfo(dtype).max) - power
    n = -40
    while float(torch.tensor(2.0**n).to(dtype).float()) == 0:
        n += 1
    moved, total = 0, rows * keys
    need = total * flops - 4 * rows * keys * dim * exps
    if need > 0:
        moved = -(-need // flops)
    if threshold < 0:
        threshold = -1.0
    return threshold, n - power, moved, bool(moved * operations * flops <= 4 * rows * keys * dim * fmas)
""",
    ),
    # ------------------------------------------------------------------------------------------ 16.4
    wrong(
        "16.4",
        "the neighbour's tokens in the last group",
        ("x = tl.load(x_ptr + at, mask=row[:, None] < end, other=0.0)", "x = tl.load(x_ptr + at)"),
    ),
    wrong(
        "16.4",
        "the neighbour's tokens masked by a product",
        (
            "x = tl.load(x_ptr + at, mask=row[:, None] < end, other=0.0)",
            "x = tl.load(x_ptr + at) * (row[:, None] < end)",
        ),
    ),
    wrong(
        "16.4", "stores the neighbour's rows", (".to(tl.float8e4nv), mask=row[:, None] < end)", ".to(tl.float8e4nv))")
    ),
    wrong(
        "16.4",
        "one scale per group and head",
        (
            "        code = tl.where(bits",
            "        code = code * 0 + tl.max(code, axis=0)\n        code = tl.where(bits",
        ),
    ),
    wrong("16.4", "groups along D", ("axis=0)\n", "axis=1)\n")),
    wrong("16.4", "places without b", ("begin // 32 + b + g", "begin // 32 + g")),
    wrong("16.4", "places rounded up", ("begin // 32 + b + g", "(begin + 31) // 32 + b + g")),
    wrong(
        "16.4", "places by the first row", ("place = begin // 32 + b + g", "place = (begin + g * 32 + 31) // 32 + b")
    ),
    wrong("16.4", "empty groups write a code", ("    if begin + g * 32 < end:", "    if begin + g * 32 <= end:")),
    wrong("16.4", "every program writes", ("    if begin + g * 32 < end:", "    if begin >= 0:")),
    wrong("16.4", "whole groups only", ("    if begin + g * 32 < end:", "    if begin + g * 32 + 31 < end:")),
    wrong(
        "16.4",
        "groups from the batch's start",
        ("    row = begin + g * 32 + tl.arange(0, 32)", "    row = begin // 32 * 32 + g * 32 + tl.arange(0, 32)"),
    ),
    wrong("16.4", "448 rounds up", ("> 0x600000", ">= 0x600000")),
    wrong("16.4", "never a code more", (" + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)", "")),
    wrong("16.4", "always a code more", (" + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)", " + 1")),
    wrong(
        "16.4",
        "log2",
        (
            "code = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)",
            "code = tl.ceil(tl.math.log2(bits.to(tl.float32, bitcast=True) / 448.0)).to(tl.int32) + 127",
        ),
    ),
    wrong(
        "16.4",
        "NaN swallowed by the maximum",
        (
            "bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)",
            "bits = tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True)",
        ),
    ),
    wrong("16.4", "NaN has 254", ("255, tl.maximum", "254, tl.maximum")),
    wrong("16.4", "codes below 0 wrap", ("tl.maximum(code, 0))", "code)")),
    wrong("16.4", "heads one behind the other", ("(row[:, None] * H + h) * D", "(h * H + row[:, None]) * D")),
    wrong("16.4", "one head of codes", ("(place * H + h) * D + d", "place * D + d")),
    wrong("16.4", "data not divided", ("(x * inverse[None, :])", "(x * 1.0)")),
    wrong(
        "16.4",
        "loaded twice",
        ("        inverse =", "        x = tl.load(x_ptr + at, mask=row[:, None] < end, other=0.0)\n        inverse ="),
    ),
    right(
        "16.4",
        "exp2 of whole numbers, a return at the top",
        (
            TOKENS,
            """    first = begin + 32 * g
    if first >= end:
        return
    t = first + tl.arange(0, 32)
    d = tl.arange(0, D)
    inside = (t < end)[:, None]
    where = t[:, None] * (H * D) + (h * D + d)[None, :]
    value = tl.load(x_ptr + where, mask=inside, other=0)
    raw = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(raw, 0)
    e = top >> 23
    rest = top & 8388607
    code = tl.where(rest > 6291456, e - 7, e - 8)
    code = tl.where(code < 0, 0, code)
    code = tl.where(top > 2139095040, 255, code)
    small = tl.minimum(code, 254)
    factor = ((254 - small) << 23).to(tl.float32, bitcast=True)
    tl.store(data_ptr + where, (value * factor[None, :]).to(tl.float8e4nv), mask=inside)
    tl.store(codes_ptr + ((begin // 32 + b + g) * H + h) * D + d, code.to(tl.uint8))
""",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 16.5
    wrong("16.5", "K's own codes for both", (AGAIN, "")),
    wrong(
        "16.5",
        "the codes exchanged",
        ("        tlx.tmem_copy(k_codes[0], k_scale[0])\n", "        tlx.tmem_copy(kt_codes[0], k_scale[0])\n"),
        (AGAIN, AGAIN.replace("kt_codes", "k_codes")),
    ),
    wrong("16.5", "codes of block 0", (K_CODES, K_CODES.replace("[j, 0, 0, 0]", "[0, 0, 0, 0]"))),
    wrong("16.5", "kt's codes by row", ("[0, j, 0, 0], full", "[j, 0, 0, 0], full")),
    wrong("16.5", "bytes as before", ("3 * OPERAND)", "3 * OPERAND - BLOCK * D // 32)")),
    wrong("16.5", "K with D's groups for dQ as well", ("ds[0], kt[0], dq[0]", "ds[0], k[0], dq[0]"), (AGAIN, "")),
    wrong(
        "16.5",
        "K with keys' groups for S as well",
        ("local_trans(k[0])", "local_trans(kt[0])"),
        ("        tlx.tmem_copy(k_codes[0], k_scale[0])\n", "        tlx.tmem_copy(kt_codes[0], k_scale[0])\n"),
        (AGAIN, ""),
    ),
    wrong(
        "16.5",
        "both copies before both products",
        (AGAIN, ""),
        (
            "        tlx.tmem_copy(k_codes[0], k_scale[0])\n",
            "        tlx.tmem_copy(k_codes[0], k_scale[0])\n        tlx.tmem_copy(kt_codes[0], k_scale[0])\n",
        ),
    ),
    wrong("16.5", "dq starts anew", ("use_acc=j > 0, mBarriers=[done[0]]", "use_acc=False, mBarriers=[done[0]]")),
    wrong("16.5", "dS's codes of block 0", ("ds_codes[0], [i, j, 0, 0]", "ds_codes[0], [i, 0, 0, 0]")),
    wrong(
        "16.5",
        "the codes loaded into one buffer",
        ("tlx.async_descriptor_load(kt_codes_desc, kt_codes[0]", "tlx.async_descriptor_load(kt_codes_desc, k_codes[0]"),
        (AGAIN, AGAIN.replace("kt_codes", "k_codes")),
    ),
    right(
        "16.5",
        "a second scale buffer",
        (
            "    q_full = tlx",
            "    kt_scale = tlx.local_alloc((D, BLOCK // 32), tl.uint8, 1, tlx.storage_kind.tmem)\n    q_full = tlx",
        ),
        (AGAIN, ""),
        (
            "        tlx.tmem_copy(k_codes[0], k_scale[0])\n",
            "        tlx.tmem_copy(k_codes[0], k_scale[0])\n        tlx.tmem_copy(kt_codes[0], kt_scale[0])\n",
        ),
        ('dq[0], ds_scale[0], "e4m3", k_scale[0]', 'dq[0], ds_scale[0], "e4m3", kt_scale[0]'),
    ),
    right(
        "16.5",
        "waits between the products",
        (
            "    done = tlx.alloc_barriers(1)\n",
            "    done = tlx.alloc_barriers(1)\n    s_done = tlx.alloc_barriers(1)\n",
        ),
        ("use_acc=False, force_async=True,", "use_acc=False, mBarriers=[s_done[0]],"),
        (AGAIN, "        tlx.barrier_wait(s_done[0], j & 1)\n        tlx.tmem_copy(kt_codes[0], k_scale[0])\n"),
    ),
    # ------------------------------------------------------------------------------------------ 16.6
    wrong(
        "16.6",
        "256 in the sum, divided nowhere",
        (SOFTMAX, SOFTMAX.replace("m_new[:, None])", "m_new[:, None] + 8.0)").replace("(256.0 * p)", "p")),
    ),
    wrong("16.6", "lse 8 octaves too high", ("m + tl.math.log2(l))", "m + 8.0 + tl.math.log2(l))")),
    wrong("16.6", "lse 8 octaves too low", ("m + tl.math.log2(l))", "m - 8.0 + tl.math.log2(l))")),
    wrong("16.6", "P without its 256", ("(256.0 * p)", "p")),
    wrong(
        "16.6",
        "a threshold of 8 octaves",
        (
            SOFTMAX,
            SOFTMAX.replace(
                "m_new = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))",
                "grown = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))\n        m_new = tl.where(grown - m > 8.0, grown, m)",
            ),
        ),
    ),
    wrong(
        "16.6",
        "a threshold of 1 octave",
        (
            SOFTMAX,
            SOFTMAX.replace(
                "m_new = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))",
                "grown = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))\n        m_new = tl.where(grown - m > 1.0, grown, m)",
            ),
        ),
    ),
    wrong("16.6", "the maximum not rounded up", ("tl.ceil(tl.max(x, axis=1))", "tl.max(x, axis=1)")),
    wrong("16.6", "the maximum rounded down", ("tl.ceil(tl.max(x, axis=1))", "tl.floor(tl.max(x, axis=1))")),
    wrong(
        "16.6",
        "sum of the rounded P",
        ("tl.sum(p, axis=1)", "tl.sum((256.0 * p).to(tl.float8e4nv).to(tl.float32), axis=1) / 256.0"),
    ),
    wrong("16.6", "natural logarithm", ("tl.math.log2(l))", "tl.log(l))")),
    wrong("16.6", "scale byte for 1", ("119, tl.uint8", "127, tl.uint8")),
    wrong("16.6", "scale byte for 2**8", ("119, tl.uint8", "135, tl.uint8")),
    wrong("16.6", "sum not rescaled", ("l = l * alpha + tl.sum", "l = l + tl.sum")),
    wrong(
        "16.6",
        "output not rescaled",
        ("            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])\n", "            pass\n"),
    ),
    wrong("16.6", "V's codes as K's", ("v_codes[0], [j, 0, 0, 0], kv_full", "v_codes[0], [0, 0, 0, 0], kv_full")),
    wrong(
        "16.6",
        "no running maximum",
        ("m_new = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))", "m_new = tl.ceil(tl.max(x, axis=1))"),
    ),
    wrong(
        "16.6",
        "output divided by 256",
        ("tlx.local_load(acc[0]) / l[:, None])", "tlx.local_load(acc[0]) / l[:, None] / 256.0)"),
    ),
    right(
        "16.6",
        "256 inside the exponent",
        (
            SOFTMAX,
            SOFTMAX.replace("m_new[:, None])", "m_new[:, None] + 8.0)")
            .replace("tl.sum(p, axis=1)", "tl.sum(p, axis=1) / 256.0")
            .replace("(256.0 * p)", "p"),
        ),
    ),
    right(
        "16.6",
        "256 taken out at the end",
        (SOFTMAX, SOFTMAX.replace("m_new[:, None])", "(m_new[:, None] - 8.0))").replace("(256.0 * p)", "p")),
        ("tlx.local_load(acc[0]) / l[:, None])", "tlx.local_load(acc[0]) / (l[:, None] * 0.00390625))"),
        ("m + tl.math.log2(l))", "m + (tl.math.log2(l) - 8.0))"),
    ),
    # ------------------------------------------------------------------------------------------ tried later
    wrong("16.6", "scale hard", ("* scale_log2\n", "* 0.0625\n")),
    # ------------------------------------------------------------------------------------------ tried once more
    wrong("16.1", "the maximum in bf16", ("groups.abs().amax(-1)", "groups.bfloat16().abs().amax(-1).float()")),
    wrong("16.1", "small numbers count as zero", ("largest == 0, 0", "largest < 1e-30, 0")),
    wrong(
        "16.1",
        "an infinity saturates like any number",
        ("largest = groups.abs().amax(-1)", "largest = groups.abs().clamp(max=3.4028234e38).amax(-1)"),
        ("    codes = torch.where(largest.isinf(), 254, codes)\n", ""),
    ),
    wrong("16.1", "the largest code is 253", ("largest.isinf(), 254", "largest.isinf(), 253")),
    wrong(
        "16.1", "a NaN anywhere spoils the row", ("largest.isnan(), 255", "largest.isnan().any(-1, keepdim=True), 255")
    ),
    wrong(
        "16.1",
        "powers within fp32's normal range",
        ("(127 - codes)[..., None]", "(127 - codes).clamp(-126, 126)[..., None]"),
    ),
    wrong(
        "16.1", "codes as E8M0 numbers", ("codes.to(torch.uint8)", "codes.to(torch.uint8).view(torch.float8_e8m0fnu)")
    ),
    wrong(
        "16.1",
        "data as bytes",
        ("flatten(-2).to(torch.float8_e4m3fn)", "flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8)"),
    ),
    wrong("16.1", "data in groups", (".flatten(-2).to(", ".to(")),
    wrong("16.1", "signs lost", ("torch.ldexp(groups,", "torch.ldexp(groups.abs(),")),
    wrong(
        "16.1",
        "tiny data flushed",
        ("scaled.clamp(-448, 448)", "torch.where(scaled.abs() < 2**-6, 0, scaled).clamp(-448, 448)"),
    ),
    right(
        "16.1",
        "a loop over powers of two",
        source="""
def quantise(x):
    groups = x.double().unflatten(-1, (-1, 32))
    amax = groups.abs().max(-1).values
    codes = torch.zeros_like(amax, dtype=torch.int64)
    for e in range(254):
        codes += (amax > math.ldexp(448.0, e - 127)) & amax.isfinite()
    codes[amax == math.inf] = 254
    codes[amax.isnan()] = 255
    scaled = groups * torch.pow(2.0, (127 - codes).double())[..., None]
    return scaled.clip(-448, 448).float().to(torch.float8_e4m3fn).reshape(x.shape), codes.to(torch.uint8)
""",
    ),
    right(
        "16.1",
        "without unflatten, zeros by the clamp",
        source="""
def quantise(x):
    rows = x.reshape(-1, 32)
    top = rows.abs().amax(1, keepdim=True)
    m, e = torch.frexp(torch.where(top.isfinite() & (top > 0), top, 1e-45))
    code = (e + torch.where(m > 7 / 8, 1, 0) + 118).clamp_min(0)
    code = code.masked_fill(top == float("inf"), 254).masked_fill(top.isnan(), 255)
    data = torch.ldexp(rows, 127 - code).clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn)
    return data.view(x.shape), code.to(torch.uint8).view(*x.shape[:-1], x.shape[-1] // 32)
""",
    ),
    wrong("16.2", "the last row is nobody's", ("its_row < rows", "its_row < rows - 1")),
    wrong("16.2", "the row behind the last is somebody's", ("its_row < rows", "its_row <= rows")),
    wrong("16.2", "the group behind the last is somebody's", ("its_column < columns", "its_column <= columns")),
    wrong(
        "16.2",
        "rows for columns in the number of tiles",
        ("across = (columns + 3) // 4", "across = (rows + 127) // 128"),
    ),
    wrong("16.2", "0 where nobody is", ("torch.where(real, its_row, -1)", "torch.where(real, its_row, 0)")),
    wrong(
        "16.2",
        "-1 for the whole result if a byte is free",
        ("torch.where(real, its_row, -1)", "torch.where(real.all(), its_row, -1)"),
    ),
    wrong("16.2", "tiles of 1024 bytes", ("at = tile * 512", "at = tile * 1024")),
    wrong(
        "16.2",
        "across and down exchanged on the way back",
        ("tile // across * 128", "tile % across * 128"),
        ("tile % across * 4", "tile // across * 4"),
    ),
    wrong(
        "16.2",
        "line and quarter exchanged on the way back",
        ("place // 4 * 32 + line", "line // 8 * 32 + place // 4 * 8 + line % 8"),
    ),
    wrong("16.2", "a line of 32 bytes", ("row % 32 * 16 +", "row % 32 * 32 +")),
    wrong(
        "16.2",
        "the way back by the full width",
        ("its_column = tile % across * 4 + place % 4", "its_column = byte % columns"),
    ),
    right(
        "16.2",
        "divmod all the way",
        source="""
def locate(row, column, byte, rows, columns):
    width = math.ceil(columns / 4)
    shape = (width, 32, 4, 4)  # of the tiles of 128 rows: tile, line, quarter, group
    at = row // 128
    for size, digit in zip(shape, (column // 4, row % 32, row // 32 % 4, column % 4)):
        at = at * size + digit
    digits, left = [], byte
    for size in reversed(shape):
        digits.append(left % size)
        left = left // size
    c, quarter, line, tile = digits
    r, c = left * 128 + quarter * 32 + line, tile * 4 + c
    mine = torch.logical_and(r < rows, c < columns)
    return at, r * mine - (~mine).long(), c * mine - (~mine).long()
""",
    ),
    right(
        "16.2",
        "strides of a view",
        source="""
def locate(row, column, byte, rows, columns):
    t = -(-columns // 4)
    index = torch.stack([row // 128, column // 4, row % 32, row % 128 // 32, column % 4])
    at = (index * torch.tensor([512 * t, 512, 16, 4, 1])[:, None]).sum(0)
    i, j, line, q, c = torch.unravel_index(byte, (int(byte.max()) // (512 * t) + 1, t, 32, 4, 4))
    r, c = 128 * i + 32 * q + line, 4 * j + c
    free = (r >= rows) | (c >= columns)
    r[free], c[free] = -1, -1
    return at, r, c
""",
    ),
    wrong(
        "16.3",
        "the exp2 unit's time for the tensor core's",
        (
            "fits = moved * operations * flops <= work * fmas",
            "fits = moved * operations * exps <= (rows * keys - moved) * fmas",
        ),
    ),
    wrong("16.3", "an FMA is two FLOPs", ("<= work * fmas", "<= 2 * work * fmas")),
    wrong("16.3", "128 for the head dim", ("4 * rows * keys * dim", "4 * rows * keys * 128")),
    wrong("16.3", "256 for the rows", ("4 * rows * keys * dim", "4 * 256 * keys * dim")),
    wrong(
        "16.3",
        "exponentials that stay",
        ("moved = max(0, rows * keys - exps * work // flops)", "moved = min(rows * keys, exps * work // flops)"),
    ),
    wrong(
        "16.3",
        "the scores that remain, too",
        ("moved * operations * flops", "(rows * keys + moved * operations) * flops"),
    ),
    wrong("16.3", "cycles of the tensor core rounded up", ("exps * work // flops)", "exps * -(-work // flops))")),
    wrong("16.3", "-inf where none fits", ("else -1.0", "else -math.inf")),
    wrong(
        "16.3",
        "threshold as a factor",
        ("return threshold if threshold >= 0", "return 2.0**threshold if threshold >= 0"),
    ),
    wrong(
        "16.3",
        "the smallest P that is exact",
        ('(448.0, -9), "e5m2": (57344.0, -16)', '(448.0, -8), "e5m2": (57344.0, -15)'),
    ),
    wrong("16.3", "e5m2 with e4m3's bias", ('"e5m2": (57344.0, -16)', '"e5m2": (57344.0, -8)')),
    wrong("16.3", "FMA pipe shared with the exp2 unit", ("<= work * fmas", "<= work * (fmas - exps)")),
    wrong("16.3", "fits only if something moves", ("fits = moved *", "fits = moved > 0 and moved *")),
    right(
        "16.3",
        "floats for the exponent, integers for the rest",
        source="""
def predict(form, power, rows, keys, dim, flops, exps, fmas, operations):
    exponent, mantissa = int(form[1]), int(form[3])
    bias = (1 << exponent - 1) - 1
    top = 1.75 * 2.0 ** (8 if form == "e4m3" else bias)
    t = math.log2(top / 2.0**power)
    free = (4 * rows * keys * dim * exps) // flops  # exponentials in the time of the products
    moved = rows * keys - min(free, rows * keys)
    fits = moved * operations * flops <= 4 * rows * keys * dim * fmas
    return (-1.0 if t < 0 else t), (1 - bias - mantissa) - power, moved, fits
""",
    ),
    right(
        "16.3",
        "decimal, and a formula per format",
        source="""
from decimal import Decimal, getcontext
getcontext().prec = 60

def predict(form, power, rows, keys, dim, flops, exps, fmas, operations):
    threshold = math.log2(1.75) + (8 if form == "e4m3" else 15) - power
    smallest = {"e4m3": -9, "e5m2": -16}[form] - power
    need = rows * keys * flops - exps * 4 * rows * keys * dim  # times 1 / flops
    moved = 0 if need <= 0 else (need + flops - 1) // flops
    fits = Decimal(moved) * operations * flops <= Decimal(4 * rows * keys * dim) * fmas
    return threshold if threshold > 0 else -1.0, smallest, moved, fits
""",
    ),
    wrong(
        "16.4",
        "zeros only have code 0, codes below wrap",
        ("tl.maximum(code, 0))", "tl.where(bits == 0, 0, code))"),
    ),
    wrong(
        "16.4",
        "at least 1e-30",
        (
            "        code = (bits >> 23) - 8 +",
            "        bits = tl.where(bits == 0, 0, tl.maximum(bits, 0x0DA24260))\n        code = (bits >> 23) - 8 +",
        ),
    ),
    wrong(
        "16.4",
        "a floor under the maximum, as for int8",
        (
            "        code = (bits >> 23) - 8 +",
            "        bits = tl.maximum(bits, 0x2EDBE6FF)\n        code = (bits >> 23) - 8 +",
        ),
    ),
    wrong(
        "16.4",
        "tiny data flushed",
        (
            "(x * inverse[None, :]).to(tl.float8e4nv)",
            "tl.where(tl.abs(x * inverse[None, :]) < 0.015625, 0.0, x * inverse[None, :]).to(tl.float8e4nv)",
        ),
    ),
    wrong(
        "16.4",
        "the maximum in bf16",
        ("x.to(tl.int32, bitcast=True)", "x.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True)"),
    ),
    wrong(
        "16.4",
        "data by way of bf16",
        ("(x * inverse[None, :]).to(tl.float8e4nv)", "(x * inverse[None, :]).to(tl.bfloat16).to(tl.float8e4nv)"),
    ),
    wrong(
        "16.4",
        "the neighbour's maximum, its data kept out",
        (
            "x = tl.load(x_ptr + at, mask=row[:, None] < end, other=0.0)",
            "x = tl.load(x_ptr + at, mask=row[:, None] < tl.load(offsets_ptr + tl.num_programs(1)), other=0.0)",
        ),
    ),
    wrong("16.4", "the tail filled with 1", ("other=0.0", "other=1.0")),
    wrong(
        "16.4",
        "the tail filled with its own last row",
        (
            "x = tl.load(x_ptr + at, mask=row[:, None] < end, other=0.0)",
            "x = tl.load(x_ptr + (tl.minimum(row, end - 1)[:, None] * H + h) * D + d[None, :])\n        x = x * 1.0",
        ),
    ),
    wrong("16.4", "one head's stride for all", ("(row[:, None] * H + h) * D", "(row[:, None] * 2 + h) * D")),
    wrong("16.4", "16 columns", ("d = tl.arange(0, D)", "d = tl.arange(0, 16)")),
    wrong("16.4", "sequence 0's first place", ("place = begin // 32 + b + g", "place = b + g")),
    wrong(
        "16.4",
        "an empty sequence takes no place",
        ("place = begin // 32 + b + g", "place = begin // 32 + g + (begin > 0).to(tl.int32) * b"),
    ),
    right(
        "16.4",
        "a column at a time",
        (
            TOKENS,
            """    t = g * 32 + tl.arange(0, 32)
    here = t < end - begin
    if begin + g * 32 < end:
        for d in range(D):
            at = ((begin + t) * H + h) * D + d
            x = tl.load(x_ptr + at, mask=here, other=0.0)
            top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            code = tl.maximum((top + 0x1FFFFF) // 0x800000 - 8, 0)
            factor = ((254 - code) << 23).to(tl.float32, bitcast=True)
            tl.store(data_ptr + at, (x * factor).to(tl.float8e4nv), mask=here)
            code = tl.where(top > 0x7F800000, 255, code)
            tl.store(codes_ptr + ((begin // 32 + b + g) * H + h) * D + d, code.to(tl.uint8))
""",
        ),
    ),
    right(
        "16.4",
        "masks instead of an if",
        (
            TOKENS,
            """    n = end - begin - g * 32
    i, d = tl.arange(0, 32), tl.arange(0, D)
    real = (i < n)[:, None] & (d >= 0)[None, :]
    at = (begin + g * 32 + i).to(tl.int64)[:, None] * H * D + h * D + d[None, :]
    x = tl.load(x_ptr + at, mask=real, other=0.0)
    nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=0).to(tl.int32, bitcast=True)
    code = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 0)
    y = x * ((254 - code) << 23).to(tl.float32, bitcast=True)[None, :]
    tl.store(data_ptr + at, y.to(tl.float8e4nv), mask=real)
    where = codes_ptr + (begin // 32 + b + g) * H * D + h * D + d
    tl.store(where, tl.where(nan, 255, code).to(tl.uint8), mask=(d >= 0) & (n > 0))
""",
        ),
    ),
    wrong("16.5", "the codes of D loaded at [0, j]", (K_CODES, K_CODES.replace("[j, 0, 0, 0]", "[0, j, 0, 0]"))),
    wrong(
        "16.5",
        "the codes of D loaded for the queries' block",
        (K_CODES, K_CODES.replace("[j, 0, 0, 0]", "[i, 0, 0, 0]")),
    ),
    wrong("16.5", "the codes of keys loaded at [i, j]", ("kt_codes[0], [0, j, 0, 0]", "kt_codes[0], [i, j, 0, 0]")),
    wrong(
        "16.5",
        "copied behind both products",
        (AGAIN, ""),
        ("        tlx.barrier_wait(done[0], j & 1)\n", AGAIN + "        tlx.barrier_wait(done[0], j & 1)\n"),
    ),
    wrong(
        "16.5",
        "dQ has dS's scales twice",
        ('dq[0], ds_scale[0], "e4m3", k_scale[0]', 'dq[0], ds_scale[0], "e4m3", ds_scale[0]'),
    ),
    wrong(
        "16.5", "dQ has Q's scales", ('dq[0], ds_scale[0], "e4m3", k_scale[0]', 'dq[0], q_scale[0], "e4m3", k_scale[0]')
    ),
    wrong("16.5", "K not transposed for S", ("tlx.local_trans(k[0])", "k[0]")),
    wrong("16.5", "S adds up", ("use_acc=False, force_async=True", "use_acc=j > 0, force_async=True")),
    wrong("16.5", "no wait for the products", ("        tlx.barrier_wait(done[0], j & 1)\n", "")),
    wrong(
        "16.5", "the load's parity stands still", ("tlx.barrier_wait(full[0], j & 1)", "tlx.barrier_wait(full[0], 0)")
    ),
    wrong("16.5", "more bytes than arrive", ("3 * OPERAND)", "4 * OPERAND)")),
    wrong(
        "16.5",
        "the second codes loaded into the first's buffer behind S, without a wait",
        ("        tlx.async_descriptor_load(kt_codes_desc, kt_codes[0], [0, j, 0, 0], full[0])\n", ""),
        ("3 * OPERAND)", "3 * OPERAND - BLOCK * D // 32)"),
        (
            AGAIN,
            "        tlx.async_descriptor_load(kt_codes_desc, k_codes[0], [0, j, 0, 0], full[0])\n"
            + AGAIN.replace("kt_codes", "k_codes"),
        ),
    ),
    right(
        "16.5",
        "a barrier of its own for the codes",
        (
            "    done = tlx.alloc_barriers(1)\n",
            "    done = tlx.alloc_barriers(1)\n    codes_full = tlx.alloc_barriers(1)\n",
        ),
        (
            "3 * OPERAND)",
            "3 * OPERAND - BLOCK * D // 32)\n        tlx.barrier_expect_bytes(codes_full[0], BLOCK * D // 32)",
        ),
        ("kt_codes[0], [0, j, 0, 0], full[0]", "kt_codes[0], [0, j, 0, 0], codes_full[0]"),
        (AGAIN, "        tlx.barrier_wait(codes_full[0], j & 1)\n" + AGAIN),
    ),
    right(
        "16.5",
        "dQ first",
        ("        tlx.tmem_copy(k_codes[0], k_scale[0])\n", "        tlx.tmem_copy(kt_codes[0], k_scale[0])\n"),
        (
            """        k_transposed = tlx.local_trans(k[0])
        tlx.async_dot_scaled(
            q[0], k_transposed, s[0], q_scale[0], "e4m3", k_scale[0], "e4m3",
            use_acc=False, force_async=True,
        )  # fmt: skip
""",
            "",
        ),
        (AGAIN, ""),
        (
            "use_acc=j > 0, mBarriers=[done[0]],\n        )  # fmt: skip\n",
            """use_acc=j > 0, force_async=True,
        )
        tlx.tmem_copy(k_codes[0], k_scale[0])
        tlx.async_dot_scaled(
            q[0], tlx.local_trans(k[0]), s[0], q_scale[0], "e4m3", k_scale[0], "e4m3",
            use_acc=False, mBarriers=[done[0]],
        )
""",
        ),
    ),
    wrong(
        "16.6",
        "clamped instead of a closer maximum",
        (
            SOFTMAX,
            SOFTMAX.replace(
                "m_new = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))",
                "grown = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))\n        m_new = tl.where(grown - m > 8.0, grown, m)",
            ).replace("256.0 * p", "tl.minimum(256.0 * p, 448.0)"),
        ),
    ),
    wrong("16.6", "448 P", ("256.0 * p", "448.0 * p")),
    wrong("16.6", "128 P", ("256.0 * p", "128.0 * p")),
    wrong(
        "16.6",
        "the first program's rows",
        ("rows, d = i * BLOCK + tl.arange(0, BLOCK)", "rows, d = tl.arange(0, BLOCK)"),
    ),
    wrong("16.6", "the first program's queries", ("q[0], [i * BLOCK, 0]", "q[0], [0, 0]")),
    wrong("16.6", "the first program's codes", ("q_codes[0], [i, 0, 0, 0]", "q_codes[0], [0, 0, 0, 0]")),
    wrong("16.6", "alpha the wrong way round", ("tl.math.exp2(m - m_new)", "tl.math.exp2(m_new - m)")),
    wrong("16.6", "rescaled from the third block on", ("        if j > 0:", "        if j > 1:")),
    wrong("16.6", "the new part rescaled, too", ("l * alpha + tl.sum(p, axis=1)", "(l + tl.sum(p, axis=1)) * alpha")),
    wrong(
        "16.6", "the largest of the block before", ("        m = m_new\n", "        m = tl.ceil(tl.max(x, axis=1))\n")
    ),
    wrong("16.6", "lse natural", ("m + tl.math.log2(l))", "(m + tl.math.log2(l)) * 0.6931471805599453)")),
    wrong(
        "16.6",
        "P's scale by the tile of V's",
        (
            "tlx.tmem_copy(v_codes[0], v_scale[0])",
            "tlx.tmem_copy(v_codes[0], v_scale[0])\n        tlx.tmem_copy(v_codes[0], p_scale[0])",
        ),
    ),
    wrong(
        "16.6",
        "the output starts anew",
        ('v_scale[0], "e4m3",\n            use_acc=j > 0', 'v_scale[0], "e4m3",\n            use_acc=False'),
    ),
    wrong(
        "16.6",
        "divided by the last block's sum",
        ("l = l * alpha + tl.sum(p, axis=1)", "l = l * 0.0 + tl.sum(p, axis=1)"),
    ),
    right(
        "16.6",
        "a threshold below one octave never holds",
        (
            SOFTMAX,
            SOFTMAX.replace(
                "m_new = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))",
                "grown = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))\n        m_new = tl.where(grown - m > 0.8, grown, m)",
            ),
        ),
    ),
    right(
        "16.6",
        "rescaled always, the scale written in every step",
        (
            "        if j > 0:\n            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])\n",
            "        if j == 0:\n            tlx.local_store(acc[0], tl.zeros((BLOCK, D), tl.float32))\n        else:\n            tlx.local_store(acc[0], alpha[:, None] * tlx.local_load(acc[0]))\n",
        ),
        (
            'p_scale[0], "e4m3", v_scale[0], "e4m3",\n            use_acc=j > 0',
            'p_scale[0], "e4m3", v_scale[0], "e4m3",\n            use_acc=True',
        ),
    ),
]
