"""Answers to chapter 06's exercises."""

from tests.course.answers import right, wrong

LOOP = """        j = torch.arange(start, min(start + block, m))
"""
STEP = """    s = torch.where(allowed, s, -torch.inf)
    m_new = torch.maximum(m, s.amax(1))
    anchor = torch.where(m_new == -torch.inf, 0.0, m_new)
    alpha = torch.exp(m - anchor)
    p = torch.exp(s - anchor[:, None])
    return p, alpha, m_new, l * alpha + p.sum(1)
"""
SEEN = "seen = (distance >= lo) & (distance <= hi) & (j[None, :] < len_kv)"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 6.1
    wrong("6.1", "causal forgets the window", ("hi = min(hi, 0)", "hi = 0")),
    wrong("6.1", "bottom right forgets the window", ("hi = min(hi, d)", "hi = d")),
    wrong(
        "6.1",
        "an int around the bottom-right diagonal",
        ("lo, hi = -window, window", "lo, hi = d - window, d + window"),
    ),
    wrong("6.1", "a pair around the top-left diagonal", ("d - left", "-left"), ("d + right", "right")),
    wrong("6.1", "-1 as a number", ("lo = lo if left == -1 else d - left", "lo = d - left")),
    wrong("6.1", "right's -1 as a number", ("hi = hi if right == -1 else d + right", "hi = d + right")),
    wrong("6.1", "0 is open", ("left == -1", "left <= 0"), ("right == -1", "right <= 0")),
    wrong(
        "6.1",
        "a window of 0 is none",
        ("    if isinstance(window, int):", "    if not window:\n        pass\n    elif isinstance(window, int):"),
    ),
    wrong("6.1", "d the other way round", ("d = len_kv - len_q", "d = len_q - len_kv")),
    wrong("6.1", "strict window", ("lo, hi = -window, window", "lo, hi = -window + 1, window - 1")),
    wrong("6.1", "causal cuts below", ("hi = min(hi, 0)", "lo = max(lo, 0)")),
    wrong(
        "6.1",
        "any causal is bottom right",
        ('if causal == "top_left":', 'if causal == "nothing":'),
        ('elif causal == "bottom_right":', "elif causal:"),
    ),
    wrong("6.1", "infinite sides", ("lo, hi = -(2**30), 2**30", 'lo, hi = float("-inf"), float("inf")')),
    wrong("6.1", "d moved without a window", ("lo, hi = -(2**30), 2**30", "lo, hi = d - 2**30, d + 2**30")),
    wrong("6.1", "the whole length for open", ("lo, hi = -(2**30), 2**30", "lo, hi = -len_q, len_kv")),
    right(
        "6.1",
        "lists of bounds",
        source="""
OPEN = 1 << 30

def band(causal, window, len_q, len_kv):
    lows, highs = [-OPEN], [OPEN]
    diagonal = len_kv - len_q
    match causal:
        case "top_left":
            highs.append(0)
        case "bottom_right":
            highs.append(diagonal)
    if window is not None:
        if isinstance(window, int):
            lows.append(-window)
            highs.append(window)
        else:
            if window[0] != -1:
                lows.append(diagonal - window[0])
            if window[1] != -1:
                highs.append(diagonal + window[1])
    return max(lows), min(highs)
""",
    ),
    right(
        "6.1",
        "numpy integers, a list back",
        source="""
import numpy as np

def band(causal: str | None, window, len_q: int, len_kv: int):
    d = np.int64(len_kv) - np.int64(len_q)
    hi = {None: 2**30, "top_left": 0, "bottom_right": int(d)}[causal]
    lo = -(2**30)
    if window is None:
        return [lo, hi]
    try:
        left, right = window
        left, right = (d - left if left >= 0 else lo), (d + right if right >= 0 else 2**30)
    except TypeError:
        left, right = -window, window
    return [int(max(lo, left)), int(min(hi, right))]
""",
    ),
    # ------------------------------------------------------------------------------------------ 6.2
    wrong("6.2", "rows past the end", ("last = tl.minimum(row0 + rows, len_q) - 1", "last = row0 + rows - 1")),
    wrong("6.2", "first rounded towards zero", ("key_begin = tl.maximum(0, row0 + lo)", "key_begin = row0 + lo")),
    wrong("6.2", "end one key short", ("tl.minimum(len_kv, last + hi + 1)", "tl.minimum(len_kv, last + hi)")),
    wrong("6.2", "end one key long", ("tl.minimum(len_kv, last + hi + 1)", "tl.minimum(len_kv, last + hi + 2)")),
    wrong("6.2", "end by the first row", ("tl.minimum(len_kv, last + hi + 1)", "tl.minimum(len_kv, row0 + hi + 1)")),
    wrong(
        "6.2", "end rounded down", ("end = tl.cdiv(tl.maximum(key_end, 0), BN)", "end = tl.maximum(key_end, 0) // BN")
    ),
    wrong("6.2", "first by the last row", ("tl.maximum(0, row0 + lo)", "tl.maximum(0, last + lo)")),
    wrong("6.2", "bulk begins at first's rows", ("tl.maximum(0, last + lo), BN)", "tl.maximum(0, row0 + lo), BN)")),
    wrong(
        "6.2", "bulk begins rounded down", ("tl.cdiv(tl.maximum(0, last + lo), BN)", "tl.maximum(0, last + lo) // BN")
    ),
    wrong(
        "6.2",
        "bulk ends by the last row",
        ("tl.minimum(len_kv, row0 + hi + 1)) // BN", "tl.minimum(len_kv, last + hi + 1)) // BN"),
    ),
    wrong(
        "6.2",
        "bulk ends rounded up",
        (
            "bulk_end = tl.maximum(0, tl.minimum(len_kv, row0 + hi + 1)) // BN",
            "bulk_end = tl.cdiv(tl.maximum(0, tl.minimum(len_kv, row0 + hi + 1)), BN)",
        ),
    ),
    wrong(
        "6.2",
        "the last keys' block in the bulk",
        ("tl.minimum(len_kv, row0 + hi + 1)) // BN", "tl.minimum(tl.cdiv(len_kv, BN) * BN, row0 + hi + 1)) // BN"),
    ),
    wrong(
        "6.2",
        "no bulk: 0, 0",
        ("        bulk_begin = end\n        bulk_end = end\n", "        bulk_begin = 0\n        bulk_end = 0\n"),
    ),
    wrong(
        "6.2",
        "no bulk: first",
        (
            "        bulk_begin = end\n        bulk_end = end\n",
            "        bulk_begin = first\n        bulk_end = first\n",
        ),
    ),
    wrong(
        "6.2",
        "no bulk left as it is",
        ("    if bulk_begin >= bulk_end:\n        bulk_begin = end\n        bulk_end = end\n", ""),
    ),
    wrong("6.2", "nothing counts: end, end", ("        first = 0\n        end = 0\n", "        first = end\n")),
    wrong("6.2", "an empty band not seen", (" | (lo > hi)", "")),
    wrong(
        "6.2",
        "columns exchanged",
        (
            "tl.store(ranges_ptr + 4 * tile + 2, bulk_end)\n    tl.store(ranges_ptr + 4 * tile + 3, end)",
            "tl.store(ranges_ptr + 4 * tile + 3, bulk_end)\n    tl.store(ranges_ptr + 4 * tile + 2, end)",
        ),
    ),
    right(
        "6.2",
        "selections only",
        source="""
@triton.jit
def floor_div(x, n: tl.constexpr):
    return tl.where(x >= 0, x // n, 0)


@triton.jit
def ranges_kernel(tiles_ptr, ranges_ptr, BN: tl.constexpr):
    p = tiles_ptr + 6 * tl.program_id(0)
    row0, rows, len_q = tl.load(p), tl.load(p + 1), tl.load(p + 2)
    len_kv, lo, hi = tl.load(p + 3), tl.load(p + 4), tl.load(p + 5)
    last_row = tl.minimum(row0 + rows - 1, len_q - 1)
    from_key = tl.maximum(row0 + lo, 0)
    to_key = tl.minimum(last_row + hi, len_kv - 1)
    some = (from_key <= to_key) & (lo <= hi) & (row0 <= last_row)
    first = tl.where(some, floor_div(from_key, BN), 0)
    end = tl.where(some, floor_div(to_key, BN) + 1, 0)
    b0 = floor_div(tl.maximum(last_row + lo, 0) + BN - 1, BN)
    b1 = floor_div(tl.minimum(row0 + hi, len_kv - 1) + 1, BN)
    b0, b1 = tl.maximum(b0, first), tl.minimum(b1, end)
    bulk = some & (b0 < b1)
    out = ranges_ptr + 4 * tl.program_id(0)
    tl.store(out, first)
    tl.store(out + 1, tl.where(bulk, b0, end))
    tl.store(out + 2, tl.where(bulk, b1, end))
    tl.store(out + 3, end)
""",
    ),
    right(
        "6.2",
        "counts blocks in a loop",
        source="""
@triton.jit
def ranges_kernel(tiles_ptr, ranges_ptr, BN: tl.constexpr):
    tile = tl.program_id(0)
    row0 = tl.load(tiles_ptr + 6 * tile)
    rows = tl.load(tiles_ptr + 6 * tile + 1)
    len_q = tl.load(tiles_ptr + 6 * tile + 2)
    len_kv = tl.load(tiles_ptr + 6 * tile + 3)
    lo = tl.load(tiles_ptr + 6 * tile + 4)
    hi = tl.load(tiles_ptr + 6 * tile + 5)
    last = tl.minimum(row0 + rows, len_q) - 1
    first, bulk_begin, bulk_end, end = -1, -1, -1, 0
    for block in range(0, tl.cdiv(len_kv, BN)):
        low, high = block * BN, tl.minimum(block * BN + BN, len_kv) - 1
        touched = (tl.maximum(low, row0 + lo) <= tl.minimum(high, last + hi)) & (lo <= hi) & (row0 <= last)
        whole = touched & (block * BN + BN <= len_kv) & (low - last >= lo) & (high - row0 <= hi)
        first = tl.where(touched & (first < 0), block, first)
        end = tl.where(touched, block + 1, end)
        bulk_begin = tl.where(whole & (bulk_begin < 0), block, bulk_begin)
        bulk_end = tl.where(whole, block + 1, bulk_end)
    tl.store(ranges_ptr + 4 * tile, tl.maximum(first, 0))
    tl.store(ranges_ptr + 4 * tile + 1, tl.where(bulk_begin < 0, end, bulk_begin))
    tl.store(ranges_ptr + 4 * tile + 2, tl.where(bulk_begin < 0, end, bulk_end))
    tl.store(ranges_ptr + 4 * tile + 3, end)
""",
    ),
    # ------------------------------------------------------------------------------------------ 6.3
    wrong(
        "6.3", "from the starts", ("lo, hi = len_kv - len_q - left, len_kv - len_q + right", "lo, hi = -left, right")
    ),
    wrong(
        "6.3",
        "d the other way round",
        (
            "lo, hi = len_kv - len_q - left, len_kv - len_q + right",
            "lo, hi = len_q - len_kv - left, len_q - len_kv + right",
        ),
    ),
    wrong(
        "6.3",
        "left and right exchanged",
        ("len_kv - len_q - left, len_kv - len_q + right", "len_kv - len_q - right, len_kv - len_q + left"),
    ),
    wrong("6.3", "strict on the left", ("(distance >= lo)", "(distance > lo)")),
    wrong("6.3", "strict on the right", ("(distance <= hi)", "(distance < hi)")),
    wrong("6.3", "keys past the end", (" & (j[None, :] < len_kv)", "")),
    wrong(
        "6.3",
        "everything masked",
        ("            if part != 1:\n                distance", "            if True:\n                distance"),
    ),
    wrong(
        "6.3",
        "the right edge not masked",
        ("            if part != 1:\n                distance", "            if part == 0:\n                distance"),
    ),
    wrong(
        "6.3",
        "the left edge not masked",
        ("            if part != 1:\n                distance", "            if part == 2:\n                distance"),
    ),
    wrong(
        "6.3",
        "the bulk a block too long",
        (
            "bulk_end = tl.maximum(0, tl.minimum(len_kv, row0 + hi + 1)) // BN",
            "bulk_end = tl.cdiv(tl.maximum(0, tl.minimum(len_kv, row0 + hi + 1)), BN)",
        ),
    ),
    wrong(
        "6.3",
        "the bulk a block too early",
        ("tl.cdiv(tl.maximum(0, last + lo), BN)), end)", "tl.maximum(0, last + lo) // BN), end)"),
    ),
    wrong(
        "6.3",
        "all blocks visited",
        ("first, end = key_begin // BN, tl.cdiv(tl.maximum(key_end, 0), BN)", "first, end = 0, tl.cdiv(len_kv, BN)"),
    ),
    wrong("6.3", "from the first block", ("first, end = key_begin // BN, tl", "first, end = 0, tl")),
    wrong("6.3", "to the last block", ("tl.cdiv(tl.maximum(key_end, 0), BN)\n", "tl.cdiv(len_kv, BN)\n")),
    wrong(
        "6.3", "maximum from 0", ('m = tl.full((BM,), float("-inf"), tl.float32)', "m = tl.zeros((BM,), tl.float32)")
    ),
    wrong("6.3", "-1e9 for hidden scores", ('s = tl.where(seen, s, float("-inf"))', "s = tl.where(seen, s, -1.0e9)")),
    wrong("6.3", "-1e4 for hidden scores", ('s = tl.where(seen, s, float("-inf"))', "s = tl.where(seen, s, -1.0e4)")),
    wrong("6.3", "no anchor", ('anchor = tl.where(m_new == float("-inf"), 0.0, m_new)', "anchor = m_new")),
    wrong("6.3", "NaN for rows that see nothing", ("acc / tl.where(l > 0, l, 1.0)[:, None]", "acc / l[:, None]")),
    wrong(
        "6.3", "keys of other heads", ("((k_begin + j[:, None]) * H + head) * D", "((k_begin + j[:, None]) * H) * D")
    ),
    wrong(
        "6.3",
        "rows of the neighbour stored",
        ("tl.store(out_ptr + at_rows, out, mask=i[:, None] < len_q)", "tl.store(out_ptr + at_rows, out)"),
    ),
    wrong(
        "6.3",
        "values of the neighbour",
        ("v = tl.load(v_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)", "v = tl.load(v_ptr + at_keys)"),
    ),
    wrong("6.3", "scale twice", ("* scale\n            if part", "* scale * scale\n            if part")),
    wrong("6.3", "output not rescaled", ("acc * alpha[:, None], input", "acc, input")),
    wrong("6.3", "one maximum per tile", ("tl.max(s, axis=1))", "tl.max(tl.max(s, axis=1), axis=0))")),
    wrong("6.3", "q0 for all tiles", ("    i = row0 + tl.arange(0, BM)", "    i = tl.arange(0, BM)")),
    right(
        "6.3",
        "two loops and a helper",
        source="""
@triton.jit
def visit(q, k_ptr, v_ptr, k_begin, len_kv, i, lo, hi, head, H, scale, m, l, acc, start, stop, MASK: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    d = tl.arange(0, D)
    for block in range(start, stop):
        j = block * BN + tl.arange(0, BN)
        at = ((k_begin + j)[:, None] * H + head) * D + d[None, :]
        if MASK:
            k = tl.load(k_ptr + at, mask=(j < len_kv)[:, None], other=0.0)
            v = tl.load(v_ptr + at, mask=(j < len_kv)[:, None], other=0.0)
        else:
            k = tl.load(k_ptr + at)
            v = tl.load(v_ptr + at)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASK:
            low, high = tl.maximum(i + lo, 0), tl.minimum(i + hi, len_kv - 1)
            s = tl.where((j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None]), s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        keep = tl.exp(m - safe)
        p = tl.exp(s - safe[:, None])
        l = keep * l + tl.sum(p, 1)
        acc = acc * keep[:, None]
        acc += tl.dot(p, v, input_precision="ieee")
        m = new
    return m, l, acc


@triton.jit
def window_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, left, right, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    row0 = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, k_begin = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)
    len_q = tl.load(q_offsets_ptr + seq + 1) - q_begin
    len_kv = tl.load(k_offsets_ptr + seq + 1) - k_begin
    lo, hi = len_kv - len_q - left, len_kv - len_q + right
    last = tl.minimum(row0 + BM, len_q) - 1
    i = row0 + tl.arange(0, BM)
    at_rows = ((q_begin + i)[:, None] * H + head) * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + at_rows, mask=(i < len_q)[:, None], other=0.0) * scale
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    first = tl.maximum(row0 + lo, 0) // BN
    end = tl.cdiv(tl.maximum(tl.minimum(len_kv, last + hi + 1), 0), BN)
    b0 = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last + lo, 0), BN), first), end)
    b1 = tl.maximum(tl.minimum(tl.maximum(tl.minimum(len_kv, row0 + hi + 1), 0) // BN, end), b0)
    m, l, acc = visit(q, k_ptr, v_ptr, k_begin, len_kv, i, lo, hi, head, H, 1.0, m, l, acc, b0, b1, False, D, BN)
    m, l, acc = visit(q, k_ptr, v_ptr, k_begin, len_kv, i, lo, hi, head, H, 1.0, m, l, acc, first, b0, True, D, BN)
    m, l, acc = visit(q, k_ptr, v_ptr, k_begin, len_kv, i, lo, hi, head, H, 1.0, m, l, acc, b1, end, True, D, BN)
    tl.store(out_ptr + at_rows, acc / tl.where(l == 0, 1.0, l)[:, None], mask=(i < len_q)[:, None])
""",
    ),
    # ------------------------------------------------------------------------------------------ 6.4
    wrong("6.4", "hi only", ("lo, hi = m - n - left, m - n + right", "lo, hi = -left, m - n + right")),
    wrong("6.4", "lo only", ("lo, hi = m - n - left, m - n + right", "lo, hi = m - n - left, right")),
    wrong(
        "6.4", "d the other way round", ("lo, hi = m - n - left, m - n + right", "lo, hi = n - m - left, n - m + right")
    ),
    wrong(
        "6.4",
        "left and right exchanged",
        ("lo, hi = m - n - left, m - n + right", "lo, hi = m - n - right, m - n + left"),
    ),
    wrong("6.4", "every block", ("range(begin // block * block, end, block)", "range(0, m, block)")),
    wrong("6.4", "from the first block", ("range(begin // block * block, end, block)", "range(0, end, block)")),
    right(
        "6.4",
        "to the last block: the window ends there anyway",
        ("range(begin // block * block, end, block)", "range(begin // block * block, m, block)"),
    ),
    wrong(
        "6.4",
        "from begin itself",
        ("range(begin // block * block, end, block)", "range(begin, end, block)"),
        (LOOP, LOOP.replace("start + block, m", "start + block - 1, m")),
    ),
    wrong("6.4", "one key short", ("min(m, n - 1 + hi + 1)", "min(m, n - 1 + hi)")),
    wrong(
        "6.4",
        "all at once",
        source="""
def window_attention(q, k, v, left, right, block):
    n, m = len(q), len(k)
    i, j = torch.arange(n)[:, None], torch.arange(m)[None]
    s = q @ k.T / q.shape[1] ** 0.5
    s = s.masked_fill((j - i < m - n - left) | (j - i > m - n + right), -torch.inf)
    w = torch.exp(s - s.amax(1, keepdim=True).clamp(min=-1e30)) if m else s
    return w @ v / w.sum(1, keepdim=True).clamp(min=1e-30)
""",
    ),
    wrong("6.4", "mask by -1e9", ("(j - i <= hi), s, -torch.inf)", "(j - i <= hi), s, -1e9)")),
    wrong("6.4", "NaN where nothing is seen", ("acc / torch.where(total > 0, total, 1.0)", "acc / total")),
    wrong("6.4", "strict window", ("(j - i >= lo) & (j - i <= hi)", "(j - i > lo) & (j - i < hi)")),
    wrong(
        "6.4",
        "queries moved instead",
        ("    i = torch.arange(n)[:, None]", "    i = torch.arange(n)[:, None] + (m - n)"),
    ),
    right(
        "6.4",
        "queries moved, band as it was",
        ("lo, hi = m - n - left, m - n + right", "lo, hi = -left, right"),
        ("    i = torch.arange(n)[:, None]", "    d = m - n\n    i = torch.arange(d, d + n)[:, None]"),
        ("begin, end = max(0, lo), min(m, n - 1 + hi + 1)", "begin, end = max(0, d + lo), min(m, d + n + hi)"),
    ),
    right(
        "6.4",
        "from begin, blocks moved",
        ("range(begin // block * block, end, block)", "range(begin, end, block)"),
        (LOOP, "        j = torch.arange(start, min(start + block, end))\n"),
    ),
    # ------------------------------------------------------------------------------------------ 6.5
    wrong("6.5", "-1e30 for -1e9", (STEP, STEP.replace("-torch.inf)\n    m_new", "-1e30)\n    m_new"))),
    wrong(
        "6.5",
        "the smallest fp32",
        (STEP, STEP.replace("-torch.inf)\n    m_new", "torch.finfo(torch.float32).min)\n    m_new")),
    ),
    wrong(
        "6.5",
        "minus infinity without an anchor",
        (STEP, STEP.replace("anchor = torch.where(m_new == -torch.inf, 0.0, m_new)", "anchor = m_new")),
    ),
    wrong("6.5", "the anchor returned", (STEP, STEP.replace("m_new, l *", "anchor, l *"))),
    wrong(
        "6.5",
        "weights cleaned only",
        (
            STEP,
            STEP.replace("torch.where(m_new == -torch.inf, 0.0, m_new)", "m_new").replace(
                "    return", "    p = p.nan_to_num(0.0)\n    return"
            ),
        ),
    ),
    wrong(
        "6.5",
        "all of it cleaned with 0",
        (
            STEP,
            STEP.replace("torch.where(m_new == -torch.inf, 0.0, m_new)", "m_new").replace(
                "    return",
                "    p, alpha, m_new = p.nan_to_num(0.0), alpha.nan_to_num(0.0), m_new.nan_to_num(0.0)\n    return",
            ),
        ),
    ),
    wrong(
        "6.5",
        "clamped maximum",
        (STEP, STEP.replace("torch.maximum(m, s.amax(1))", "torch.maximum(m, s.amax(1)).clamp(min=-1e9)")),
    ),
    wrong("6.5", "state not rescaled", (STEP, STEP.replace("l * alpha + p", "l + p"))),
    wrong(
        "6.5",
        "weights multiplied by the mask",
        (
            STEP,
            STEP.replace("torch.where(allowed, s, -torch.inf)", "torch.where(allowed, s, -1e9)").replace(
                "    return", "    p = p * allowed\n    return"
            ),
        ),
    ),
    wrong(
        "6.5",
        "scores plus minus infinity times the mask",
        (STEP, STEP.replace("torch.where(allowed, s, -torch.inf)", "s + (~allowed) * -torch.inf")),
    ),
    wrong(
        "6.5",
        "mask after the maximum",
        (
            STEP,
            STEP.replace("    s = torch.where(allowed, s, -torch.inf)\n", "").replace(
                "    p = torch.exp(s", "    s = torch.where(allowed, s, -torch.inf)\n    p = torch.exp(s"
            ),
        ),
    ),
    wrong("6.5", "exp2", (STEP, STEP.replace("p = torch.exp(", "p = torch.exp2("))),
    wrong(
        "6.5",
        "the state changed in place",
        (STEP, STEP.replace("l * alpha + p.sum(1)", "l.mul_(alpha).add_(p.sum(1))")),
    ),
    wrong(
        "6.5",
        "scores changed in place",
        (STEP, STEP.replace("s = torch.where(allowed, s, -torch.inf)", "s.masked_fill_(~allowed, -torch.inf)")),
    ),
    wrong(
        "6.5",
        "alpha 1 for rows that have seen nothing",
        (
            STEP,
            STEP.replace(
                "    p = torch.exp(s", "    alpha = torch.where(m == -torch.inf, 1.0, alpha)\n    p = torch.exp(s"
            ),
        ),
    ),
    right(
        "6.5",
        "differences cleaned",
        source="""
def softmax_step(s, allowed, m, l):
    hidden = s.masked_fill(torch.logical_not(allowed), float("-inf"))
    new = torch.max(m, hidden.max(dim=1).values)
    nothing = torch.isneginf(new)
    p = (hidden - new.masked_fill(nothing, 0).unsqueeze(1)).exp()
    a = (m - new.masked_fill(nothing, 0)).exp()
    return p, a, new, a * l + p.sum(dim=1)
""",
    ),
    right(
        "6.5",
        "alpha by another road",
        (
            STEP,
            STEP.replace(
                "    anchor = torch.where(m_new == -torch.inf, 0.0, m_new)\n",
                "    anchor = torch.where(torch.isneginf(m_new), torch.zeros_like(m_new), m_new)\n",
            ),
        ),
    ),
    # ------------------------------------------------------------------------------------------ 6.6
    wrong("6.6", "rows past the end", ("last = min(row0 + BM, n) - 1", "last = row0 + BM - 1")),
    wrong("6.6", "full by the first row", ("-(-max(0, last + low) // BN)", "-(-max(0, row0 + low) // BN)")),
    wrong("6.6", "full by the last row", ("min(m, row0 + high + 1) // BN", "min(m, last + high + 1) // BN")),
    wrong("6.6", "the last keys' block full", ("min(m, row0 + high + 1) // BN", "-(-min(m, row0 + high + 1) // BN)")),
    wrong("6.6", "strict band in the pairs", ("(i + high + 1).clamp(max=m)", "(i + high).clamp(max=m)")),
    wrong("6.6", "keys past the end in the pairs", ("(i + high + 1).clamp(max=m)", "(i + high + 1)")),
    wrong("6.6", "keys before the start in the pairs", ("(i + low).clamp(min=0)", "(i + low)")),
    wrong("6.6", "negative counts", ("(end - begin).clamp(min=0)", "(end - begin)")),
    wrong("6.6", "empty bands", ("        if low > high:\n            continue\n", "")),
    wrong("6.6", "all blocks visited", ("visited = -(-key_end // BN) - key_begin // BN", "visited = -(-m // BN)")),
    wrong(
        "6.6",
        "visited rounded down",
        ("visited = -(-key_end // BN) - key_begin // BN", "visited = -(-(key_end - key_begin) // BN)"),
    ),
    wrong("6.6", "partial includes full", ("partial += visited - max(0, bulk)", "partial += visited")),
    wrong(
        "6.6",
        "bulk below zero",
        (
            "                full += max(0, bulk)\n                partial += visited - max(0, bulk)\n",
            "                full += bulk\n                partial += visited - bulk\n",
        ),
    ),
    wrong(
        "6.6",
        "a partial tile of queries is partial",
        (
            "                full += max(0, bulk)\n",
            "                bulk = bulk if last - row0 + 1 == BM else 0\n                full += max(0, bulk)\n",
        ),
    ),
    wrong(
        "6.6",
        "BM and BN exchanged",
        (
            "for row0 in range(0, n, BM):\n            last = min(row0 + BM, n) - 1",
            "for row0 in range(0, n, BN):\n            last = min(row0 + BN, n) - 1",
        ),
    ),
    wrong(
        "6.6",
        "blocks over all rows",
        (
            "    for n, m, low, high in zip(len_q, len_kv, lo, hi):",
            "    for n, m, low, high in zip(len_q[:1], len_kv[:1], lo[:1], hi[:1]):",
        ),
    ),
    wrong(
        "6.6",
        "pairs in int32",
        ("int((end - begin).clamp(min=0).sum())", "int((end - begin).clamp(min=0).int().sum(dtype=torch.int32))"),
    ),
    wrong(
        "6.6",
        "pairs in fp32",
        ("int((end - begin).clamp(min=0).sum())", "int((end - begin).clamp(min=0).float().sum())"),
    ),
    wrong(
        "6.6",
        "a loop over pairs",
        source="""
def work(len_q, len_kv, lo, hi, BM, BN):
    pairs = full = partial = 0
    for n, m, low, high in zip(len_q, len_kv, lo, hi):
        for r in range(0, n, BM):
            for c in range(0, m, BN):
                seen = sum(low <= j - i <= high for i in range(r, min(r + BM, n)) for j in range(c, min(c + BN, m)))
                pairs += seen
                whole = c + BN <= m and seen == (min(r + BM, n) - r) * BN
                full += whole
                partial += bool(seen) and not whole
    return pairs, full, partial
""",
    ),
    right(
        "6.6",
        "numpy by tiles",
        source="""
import numpy as np

def work(len_q, len_kv, lo, hi, BM, BN):
    total, whole, part = 0, 0, 0
    for n, m, a, b in zip(len_q, len_kv, lo, hi):
        if n == 0 or m == 0 or a > b:
            continue
        i = np.arange(n, dtype=np.int64)
        total += int(np.maximum(np.minimum(i + b, m - 1) - np.maximum(i + a, 0) + 1, 0).sum())
        for top in range(0, n, BM):
            bottom = min(top + BM, n) - 1
            block = np.arange(-(-m // BN), dtype=np.int64)
            left, right = block * BN, np.minimum(block * BN + BN, m) - 1
            touched = np.maximum(left, top + a) <= np.minimum(right, bottom + b)
            full = touched & (block * BN + BN <= m) & (left - bottom >= a) & (right - top <= b)
            whole += int(full.sum())
            part += int((touched & ~full).sum())
    return total, whole, part
""",
    ),
    # ------------------------------------------------------------------------------------------ tried later
    wrong(
        "6.1",
        "window cut to the keys",
        (
            "    return lo, hi",
            "    if window is not None and hi < 2**30:\n        hi = min(hi, len_kv - 1)\n    return lo, hi",
        ),
    ),
    right(
        "6.1",
        "classes",
        source="""
from dataclasses import dataclass

@dataclass
class _Side:
    at: int

OPEN = 2**30

def _clip(low: int, high: int, low2: int, high2: int) -> tuple[int, int]:
    return max(low, low2), min(high, high2)

def band(causal: str | None, window: int | tuple[int, int] | None, len_q: int, len_kv: int) -> tuple[int, int]:
    '''The band as two offsets.'''
    if causal is None and window is None:
        return -OPEN, OPEN
    diagonal = len_kv - len_q
    low, high = -OPEN, OPEN
    if window is not None:
        if type(window) is tuple:
            low = diagonal - window[0] if window[0] >= 0 else -OPEN
            high = diagonal + window[1] if window[1] >= 0 else OPEN
        else:
            low, high = -window, +window
    if causal is None:
        return low, high
    return _clip(low, high, -OPEN, {"top_left": 0, "bottom_right": diagonal}[causal])
""",
    ),
    wrong(
        "6.2",
        "end from the last key: one block without keys",
        (
            "    if (key_begin >= key_end) | (lo > hi):",
            "    end = (tl.minimum(len_kv - 1, last + hi)) // BN + 1\n    if (key_begin > key_end) | (lo > hi) | (last + hi < 0) | (row0 + lo >= tl.maximum(len_kv, 1)):",
        ),
    ),
    right(
        "6.2",
        "helpers and floor division of one's own",
        source="""
@triton.jit
def _floor(x, n: tl.constexpr):
    return tl.where(x >= 0, x // n, -((-x + n - 1) // n))

@triton.jit
def _ceil(x, n: tl.constexpr):
    return -_floor(-x, n)

@triton.jit
def ranges_kernel(tiles_ptr, ranges_ptr, BN: tl.constexpr):
    t = tl.program_id(axis=0)
    p = tiles_ptr + t * 6
    row0 = tl.load(p)
    n, m = tl.load(p + 2), tl.load(p + 3)
    lo, hi = tl.load(p + 4), tl.load(p + 5)
    end_row = min(row0 + tl.load(p + 1), n) - 1
    a = max(row0 + lo, 0)
    b = min(end_row + hi, m - 1)
    out = ranges_ptr + t * 4
    if a > b or lo > hi:
        for c in tl.static_range(4):
            tl.store(out + c, 0)
        return
    first, end = _floor(a, BN), _floor(b, BN) + 1
    x = max(first, _ceil(end_row + lo, BN))
    y = min(end, _floor(min(row0 + hi + 1, m), BN))
    if x >= y:
        x = end
        y = end
    tl.store(out, first)
    tl.store(out + 1, x)
    tl.store(out + 2, y)
    tl.store(out + 3, end)
""",
    ),
    wrong("6.3", "scale from D", ('input_precision="ieee") * scale', 'input_precision="ieee") * (1.0 / (D ** 0.5))')),
    wrong("6.3", "m never updated", ("            m = m_new\n", "            m = tl.maximum(m, anchor)\n")),
    wrong(
        "6.3",
        "edges of the bulk: V of the next head",
        ("v = tl.load(v_ptr + at_keys)", "v = tl.load(v_ptr + at_keys + 0 * H + (head + 1) % H * D - head * D)"),
    ),
    right(
        "6.3",
        "additive mask, early return, block pointers",
        source="""
@triton.jit
def _visit(acc, l, m, q, kb, vb, scale, i, j, lo, hi, n, EDGE: tl.constexpr):
    if EDGE:
        k = tl.load(kb, boundary_check=(0,), padding_option="zero")
        v = tl.load(vb, boundary_check=(0,), padding_option="zero")
    else:
        k = tl.load(kb)
        v = tl.load(vb)
    s = tl.dot(q, k.T, input_precision="ieee") * scale
    if EDGE:
        gap = j[None, :] - i[:, None]
        s += tl.where((gap >= lo) & (gap <= hi) & (j < n)[None, :], 0.0, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(new > float("-inf"), new, 0.0)
    p = tl.exp(s - base[:, None])
    a = tl.exp(m - base)
    return acc * a[:, None] + tl.dot(p, v, input_precision="ieee"), l * a + tl.sum(p, 1), new

@triton.jit
def window_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, left, right, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    row0 = tl.load(tiles_ptr + 2 * tile + 1)
    q0, k0 = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)
    nq = tl.load(q_offsets_ptr + seq + 1) - q0
    nk = tl.load(k_offsets_ptr + seq + 1) - k0
    lo = nk - nq - left
    hi = nk - nq + right
    ob = tl.make_block_ptr(out_ptr + (q0 * H + head) * D, (nq, D), (H * D, 1), (row0, 0), (BM, D), (1, 0))
    acc = tl.zeros((BM, D), tl.float32)
    end_row = min(row0 + BM, nq)
    begin = max(row0 + lo, 0)
    stop = min(end_row + hi, nk)
    if begin >= stop:
        tl.store(ob, acc, boundary_check=(0,))
        return
    b0 = begin // BN
    b3 = (stop + BN - 1) // BN
    b1 = min(max((max(end_row - 1 + lo, 0) + BN - 1) // BN, b0), b3)
    b2 = max(min(max(min(row0 + hi + 1, nk), 0) // BN, b3), b1)
    q = tl.load(tl.make_block_ptr(q_ptr + (q0 * H + head) * D, (nq, D), (H * D, 1), (row0, 0), (BM, D), (1, 0)), boundary_check=(0,), padding_option="zero")
    kb = tl.make_block_ptr(k_ptr + (k0 * H + head) * D, (nk, D), (H * D, 1), (b0 * BN, 0), (BN, D), (1, 0))
    vb = tl.make_block_ptr(v_ptr + (k0 * H + head) * D, (nk, D), (H * D, 1), (b0 * BN, 0), (BN, D), (1, 0))
    i = row0 + tl.arange(0, BM)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for b in range(b0, b1):
        acc, l, m = _visit(acc, l, m, q, kb, vb, scale, i, b * BN + tl.arange(0, BN), lo, hi, nk, True)
        kb, vb = tl.advance(kb, (BN, 0)), tl.advance(vb, (BN, 0))
    for b in range(b1, b2):
        acc, l, m = _visit(acc, l, m, q, kb, vb, scale, i, b * BN + tl.arange(0, BN), lo, hi, nk, False)
        kb, vb = tl.advance(kb, (BN, 0)), tl.advance(vb, (BN, 0))
    for b in range(b2, b3):
        acc, l, m = _visit(acc, l, m, q, kb, vb, scale, i, b * BN + tl.arange(0, BN), lo, hi, nk, True)
        kb, vb = tl.advance(kb, (BN, 0)), tl.advance(vb, (BN, 0))
    tl.store(ob, acc / tl.where(l == 0, 1.0, l)[:, None], boundary_check=(0,))
""",
    ),
]
