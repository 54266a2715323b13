"""Checks of chapter 06: masks and loop peeling."""

import math

import torch

from jfa.course import kinds
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output, Property
from jfa.masks import UNBOUNDED, Band, allowed_pairs, block_kinds


def _spans(offsets):
    bounds = offsets.tolist()
    return list(zip(bounds, bounds[1:]))


# -- 6.1 ---------------------------------------------------------------------------------------------------------------


def _band_cases(seed):
    shift = seed % 5

    def case(causal, window, len_q, len_kv):
        said = f"causal {causal}, window {window}, {len_q} queries, {len_kv} keys"
        return Case(said, (causal, window, len_q, len_kv + shift))

    return [
        case(None, None, 4, 9),
        case("top_left", None, 4, 9),
        case("bottom_right", None, 4, 9),
        case("bottom_right", None, 20, 9),
        case(None, 3, 4, 9),
        case(None, 0, 4, 9),
        case(None, (3, 1), 4, 9),
        case(None, (-1, 2), 4, 9),
        case(None, (0, -1), 20, 9),
        case("top_left", (2, 5), 4, 9),
        case("top_left", (2, 5), 20, 3),
        case("bottom_right", 6, 20, 9),
        case("bottom_right", (4, 2), 7, 30),
        case("bottom_right", 3, 4, 30),
        case(None, 40, 4, 9),
        case(None, (40, 50), 4, 9),
        case("bottom_right", (1, 1), 20, 9),
    ]


BAND = Exercise(
    id="6.1",
    title="The band of a call",
    name="band",
    cases=_band_cases,
    reference=lambda causal, window, n, m: Band.make(causal or False, window).offsets(n, m),
    outputs=(Output("lo", dtype="int"), Output("hi", dtype="int")),
    difficulty=1,
    minutes=30,
    forbid=("jfa.masks", "jfa.schedule"),
    hints=(
        "Begin with both sides open. A window sets both, causal lowers hi. What is d for each of the two alignments?",
        "A pair counts from the bottom-right diagonal: lo = d - left, hi = d + right. An int counts from the starts: no d.",
        "causal: hi = min(hi, 0) for top_left, hi = min(hi, d) for bottom_right.",
    ),
    mutants=(
        Mutant(
            "top left for bottom right",
            "bottom_right was aligned to the top left: hi must be d, for the last query stands at the last key.",
            edit=("hi = min(hi, d)", "hi = min(hi, 0)"),
        ),
        Mutant(
            "d with the wrong sign",
            "d is len_kv - len_q, not the other way round.",
            edit=("len_kv - len_q", "len_q - len_kv"),
        ),
        Mutant(
            "pair counted from the starts",
            "A pair (left, right) counts from the bottom-right diagonal: d is missing.",
            edit=(("else d - left", "else -left"), ("else d + right", "else right")),
        ),
        Mutant(
            "int counted from the diagonal",
            "An int window counts both positions from their starts: no d.",
            edit=("lo, hi = -window, window", "lo, hi = d - window, d + window"),
        ),
        Mutant(
            "causal replaces the window's right side",
            "causal and window hold together: hi is the smaller of the two.",
            edit=("hi = min(hi, d)", "hi = d"),
        ),
        Mutant(
            "top left replaces the window's right side",
            "A window may end before the top-left diagonal does: hi is the smaller of the two.",
            edit=("hi = min(hi, 0)", "hi = 0"),
        ),
        Mutant(
            "-1 taken as a number",
            "-1 leaves a side open; here it moved the side by one.",
            edit=(("lo if left == -1 else d - left", "d - left"), ("hi if right == -1 else d + right", "d + right")),
        ),
        Mutant(
            "closed sides cut to the lengths",
            "A closed side was cut to the keys that there are; the band is asked for as the call says it.",
            edit=("    return lo, hi", "    return lo, hi if hi == 2**30 else min(hi, len_kv - 1)"),
        ),
        Mutant(
            "window one short",
            "Both ends of a window belong to it.",
            edit=("lo, hi = -window, window", "lo, hi = -window + 1, window - 1"),
        ),
        Mutant(
            "0 taken for no window",
            "A window of 0 is a window: each query sees the key at its own position.",
            edit=("if isinstance(window, int):", "if isinstance(window, int) and window:"),
            caught_by="runs",
            expect="TypeError",
            recognise=False,
        ),
    ),
    variants=(
        """
def band(causal, window, len_q, len_kv):
    OPEN = 1 << 30
    diagonal = len_kv - len_q
    lows, highs = [-OPEN], [OPEN]
    match window:
        case None:
            pass
        case (left, right):
            lows += [diagonal - left] if left >= 0 else []
            highs += [diagonal + right] if right >= 0 else []
        case w:
            lows.append(-w)
            highs.append(w)
    highs += {"top_left": [0], "bottom_right": [diagonal]}.get(causal, [])
    return max(lows), min(highs)
""",
        """
def band(causal, window, len_q, len_kv):
    d = len_kv - len_q
    a, b = (None, None) if window is None else window if not isinstance(window, int) else (window + d, window - d)
    lo = -1073741824 if a is None or a == -1 and not isinstance(window, int) else d - a
    hi = 1073741824 if b is None or b == -1 and not isinstance(window, int) else d + b
    stop = {None: hi, "top_left": 0, "bottom_right": d}[causal]
    return lo, stop if stop < hi else hi
""",
    ),
)

# -- 6.2 ---------------------------------------------------------------------------------------------------------------


def _tiles_of_bands(problems, rows, seed=0):
    """Return [T, 6] int32 rows (row0, rows, len_q, len_kv, lo, hi) of all tiles of (len_q, len_kv, lo, hi) problems."""
    found = [(r, rows, n, m, lo, hi) for n, m, lo, hi in problems for r in range(0, n, rows)]
    return torch.tensor(found, dtype=torch.int32)


def _range_cases(seed):
    s = seed % 4
    far = UNBOUNDED

    def case(name, problems, rows=16, block=16):
        return Case(name, (_tiles_of_bands(problems, rows), block))

    return [
        case("no mask, 64 keys", [(40, 64, -far, far)]),
        case("hi 33, 50 keys: the last block hangs over", [(40, 50 + s, -far, 33)]),
        case("no mask, 50 keys", [(40, 50 + s, -far, far)]),
        case("causal, as many queries as keys", [(70, 70, -far, s)]),
        case("causal, 3 queries and 90 keys", [(3, 90 + s, -far, 87)]),
        case("causal, 90 queries and 20 keys", [(90, 20, -far, s - 70)]),
        case("window of 20 on each side, near the start", [(60, 60, -20 - s, 20)]),
        case("window far to the left: some tiles see nothing", [(80, 40, -90 - s, -30)]),
        case("window that begins past the start", [(20, 80, 33 + s, 60)]),
        case("lo > hi: nothing counts", [(40, 64, 5, 2 - s)]),
        case("no keys at all; one key", [(40, 0, -far, far), (20, 0, -5 - s, 3), (20, 1, -far, far)]),
        case("tiles of 64 queries, blocks of 32 keys", [(150, 260, -70 - s, 110)], 64, 32),
        case("lo at the edge of a block", [(64, 64, x + s, x + 40) for x in (-17, -16, -15, -1, 0, 1, 15, 16, 17)]),
        case("hi at the edge of a block", [(64, 64, x - 40, x + s) for x in (-17, -16, -15, -1, 0, 1, 15, 16, 17)]),
    ]


def _range_launch(kernel, tiles, block):
    import torch

    ranges = torch.full((len(tiles), 4), -99, dtype=torch.int32)
    kernel[(len(tiles),)](tiles, ranges, BN=block)
    return ranges


def _ranges(tiles, block):
    """Count by looking at every pair."""
    found = []
    for row0, rows, n, m, lo, hi in tiles.tolist():
        i = torch.arange(row0, min(row0 + rows, n))[:, None]
        j = torch.arange(-(-m // block) * block)[None, :]
        seen = (j - i >= lo) & (j - i <= hi) & (j < m)
        blocks = seen.unflatten(1, (-1, block))
        some = torch.nonzero(blocks.any(2).any(0)).flatten().tolist()
        full = torch.nonzero(blocks.all(2).all(0)).flatten().tolist()
        if not some:
            found.append((0, 0, 0, 0))
        else:
            end = some[-1] + 1
            found.append((some[0], *((full[0], full[-1] + 1) if full else (end, end)), end))
    return torch.tensor(found, dtype=torch.int32)


_SIMPLE_RANGES = """
@triton.jit
def ranges_kernel(tiles_ptr, ranges_ptr, BN: tl.constexpr):
    t = tl.program_id(0)
    at = tiles_ptr + 6 * t
    row0, len_q, len_kv, lo, hi = tl.load(at), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    last = tl.minimum(row0 + tl.load(at + 1), len_q) - 1
    blocks = tl.cdiv(len_kv, BN)
    first = 0
    while (first < blocks) & (first * BN + BN - 1 - row0 < lo):       # walk from the left over blocks out of reach
        first += 1
    end = blocks
    while (end > first) & ((end - 1) * BN - last > hi):               # and from the right
        end -= 1
    if lo > hi:
        end = first
    begin = first
    while (begin < end) & (begin * BN - last < lo):
        begin += 1
    stop = end
    while (stop > begin) & (((stop * BN - 1) - row0 > hi) | (stop * BN > len_kv)):
        stop -= 1
    if begin >= stop:
        begin = end
        stop = end
    if first >= end:
        first = 0
        begin = 0
        stop = 0
        end = 0
    tl.store(ranges_ptr + 4 * t + 0, first)
    tl.store(ranges_ptr + 4 * t + 1, begin)
    tl.store(ranges_ptr + 4 * t + 2, stop)
    tl.store(ranges_ptr + 4 * t + 3, end)
"""

_BLOCK_RANGES = """
@triton.jit
def ranges_kernel(tiles_ptr, ranges_ptr, BN: tl.constexpr):
    # all blocks at once, as lanes: which are touched, which are full
    t = tl.program_id(0)
    at = tiles_ptr + 6 * t
    row0, len_q, len_kv, lo, hi = tl.load(at), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    last = tl.minimum(row0 + tl.load(at + 1), len_q) - 1
    b = tl.arange(0, 32)
    left = b * BN
    right = tl.minimum(left + BN, len_kv) - 1
    some = (left < len_kv) & (left - last <= hi) & (right - row0 >= lo) & (lo <= hi)
    full = some & (left - last >= lo) & (left + BN - 1 - row0 <= hi) & (left + BN <= len_kv)
    end = tl.max(tl.where(some, b + 1, 0), 0)
    first = tl.where(end > 0, tl.min(tl.where(some, b, 99), 0), 0)
    stop = tl.max(tl.where(full, b + 1, 0), 0)
    begin = tl.min(tl.where(full, b, 99), 0)
    begin = tl.where(stop > 0, begin, end)
    stop = tl.where(stop > 0, stop, end)
    lane = tl.arange(0, 4)
    row = tl.where(lane == 0, first, tl.where(lane == 1, begin, tl.where(lane == 2, stop, end)))
    tl.store(ranges_ptr + 4 * t + lane, row)
"""

RANGES = Exercise(
    id="6.2",
    title="The four block numbers, inside a kernel",
    name="ranges_kernel",
    kind="kernel",
    call=_range_launch,
    cases=_range_cases,
    reference=_ranges,
    outputs=(Output("ranges", ("tile", "number"), dtype="int32"),),
    difficulty=2,
    minutes=40,
    time_limit=15.0,
    forbid=("jfa.masks", "jfa.schedule"),
    allow=(),
    hints=(
        "The tile's last query is min(row0 + rows, len_q) - 1. The first query reaches farthest to the left, the last one farthest to the right: "
        "that gives the keys that some query sees. For the keys that all of them see, exchange the two.",
        "Clamp to 0 before you divide. Visited blocks are rounded outwards (floor, ceiling), full ones inwards (ceiling, floor).",
        "Visited keys [max(0, row0 + lo), min(len_kv, last + hi + 1)), full keys [max(0, last + lo), min(len_kv, row0 + hi + 1)). "
        "Nothing counts if the first range is empty or lo > hi.",
    ),
    mutants=(
        Mutant(
            "bulk_end rounded up",
            "bulk_end is rounded up: its last block is partial.",
            edit=(
                "bulk_end = tl.maximum(0, tl.minimum(len_kv, row0 + hi + 1)) // BN",
                "bulk_end = tl.cdiv(tl.maximum(0, tl.minimum(len_kv, row0 + hi + 1)), BN)",
            ),
        ),
        Mutant(
            "bulk_begin rounded down",
            "bulk_begin is rounded down: its first block is partial.",
            edit=("tl.cdiv(tl.maximum(0, last + lo), BN)", "tl.maximum(0, last + lo) // BN"),
        ),
        Mutant(
            "end rounded down",
            "end is rounded down: the last block that is touched is missing.",
            edit=("end = tl.cdiv(tl.maximum(key_end, 0), BN)", "end = tl.maximum(key_end, 0) // BN"),
        ),
        Mutant(
            "truncated before it is clamped",
            "The full range was divided before it was clamped: in a kernel // rounds toward zero, and a negative end becomes block 0.",
            edit=("tl.cdiv(tl.maximum(0, last + lo), BN)", "(last + lo + BN) // BN"),
        ),
        Mutant(
            "first and last row mixed up",
            "The full range uses the first query on the left and the last on the right; it must be what all queries see.",
            edit=(
                ("tl.maximum(0, last + lo), BN)", "tl.maximum(0, row0 + lo), BN)"),
                ("tl.minimum(len_kv, row0 + hi + 1)) // BN", "tl.minimum(len_kv, last + hi + 1)) // BN"),
            ),
        ),
        Mutant(
            "hi excluded",
            "The key i + hi is seen as well: the end of the range is i + hi + 1.",
            edit=(("last + hi + 1", "last + hi"), ("row0 + hi + 1", "row0 + hi")),
        ),
        Mutant(
            "queries past the end",
            "The last query of a tail tile does not exist: the tile ends at len_q.",
            edit=("last = tl.minimum(row0 + rows, len_q) - 1", "last = row0 + rows - 1"),
        ),
        Mutant(
            "lo > hi not asked",
            "A band with lo > hi holds no pair, yet blocks are visited.",
            edit=("(key_begin >= key_end) | (lo > hi)", "key_begin >= key_end"),
        ),
        Mutant(
            "end from the last key's number",
            "The last key's number was divided: of no keys it is -1, and // rounds it toward zero, to block 0.",
            edit=(
                (
                    "end = tl.cdiv(tl.maximum(key_end, 0), BN)",
                    "end = (tl.minimum(len_kv, tl.maximum(key_end, 0)) - 1) // BN + 1",
                ),
                (
                    "if (key_begin >= key_end) | (lo > hi):",
                    "if (row0 + lo >= tl.maximum(len_kv, 1)) | (last + hi < 0) | (lo > hi):",
                ),
            ),
        ),
        Mutant(
            "no keys gives one block",
            "A tile that sees nothing visits a block.",
            edit=("        first = 0\n        end = 0\n", "        first = 0\n        end = 1\n"),
        ),
        Mutant(
            "bulk past the end",
            "Keys past the end of the sequence count as seen: the bulk must end at len_kv.",
            edit=("tl.minimum(len_kv, row0 + hi + 1)) // BN", "row0 + hi + 1) // BN"),
        ),
    ),
    variants=(_SIMPLE_RANGES, _BLOCK_RANGES),
)

# -- 6.3 ---------------------------------------------------------------------------------------------------------------

FAR_BELOW = ["near -30000"]  # alone: its roundings would widen the tolerance of the others
HARD = [kind for kind in kinds.SCORES if kind not in FAR_BELOW]


def _window_cases(seed):
    g = kinds.generator(seed)

    def case(name, len_q, len_kv, left, right, heads=2, dim=16, poison=None, scale=None, **tile):
        q = torch.randn(sum(len_q), heads, dim, generator=g)
        k, v = (torch.randn(sum(len_kv), heads, dim, generator=g) + x for x in (0.0, 0.5))
        qo, ko = kinds.offsets(len_q), kinds.offsets(len_kv)
        if poison is not None:
            for x in (k, v):
                kinds.poison(x, slice(int(ko[poison]), int(ko[poison + 1])))
        scale = scale or 1 / math.sqrt(dim)
        return Case(name, (q, k, v, qo, ko, scale, left, right), tile, offsets=tuple(qo.tolist()))

    def hard(names, len_q, len_kv, left, right, said=""):
        parts = [kinds.query_and_key(name, len_q, len_kv, 16, 16, g, heads=1) for name in names]
        q, k = (torch.cat(x) for x in zip(*parts))
        qo, ko = kinds.offsets([len_q] * len(names)), kinds.offsets([len_kv] * len(names))
        several = f"sequences with hard scores: {', '.join(names)}"
        said = said or (kinds.SCORES[names[0]].says if len(names) == 1 else several)
        v = torch.randn(k.shape, generator=g)
        return Case(said, (q, k, v, qo, ko, 0.25, left, right), offsets=tuple(qo.tolist()))

    return [
        case("16 queries, 16 keys, all seen", [16], [16], 20, 20, heads=1),
        case("40 queries and keys, a window (5, 0)", [40], [40], 5, 0, heads=1),
        case("a wide window: a bulk between two edges", [40], [90], 45, 3),
        case("lengths 5, 0, 33, 1, 17; one without keys", kinds.RAGGED, [17, 4, 40, 0, 21], 12, 4),
        case("more queries than keys: rows that see nothing", [50, 20], [20, 9], 6, 2),
        hard(HARD, 5, 36, 60, 2),
        hard(FAR_BELOW, 17, 40, 60, 0),
        hard(["near -400"], 20, 44, 6, 2, "all scores near -400, rows that see nothing of their tile's first blocks"),
        case("a neighbor of NaN, which has no queries", [7, 0, 19], [9, 18, 6], 30, 30, poison=1),
        case("D 32, 32 queries per tile", [40], [60], 12, 4, heads=1, dim=32, BM=32),
        case("32 keys per block", [20], [70], 40, 3, heads=1, BN=32),
        case(f"D 32, a scale of {kinds.OWN_SCALE}", [20], [30], 9, 3, heads=1, dim=32, scale=kinds.OWN_SCALE),
    ]


def _window_launch(kernel, q, k, v, q_offsets, k_offsets, scale, left, right, BM=16, BN=16):
    import torch

    lengths = (q_offsets[1:] - q_offsets[:-1]).tolist()
    tiles = torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n, BM)], dtype=torch.int32)
    out, heads = torch.full(q.shape, float("nan")), q.shape[1]
    kernel[(len(tiles), heads)](
        q, k, v, q_offsets, k_offsets, tiles, out, scale, left, right, heads, D=q.shape[2], BM=BM, BN=BN
    )
    return out


def _window(q, k, v, q_offsets, k_offsets, scale, left, right, **tile):
    out = torch.zeros_like(q)
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
        if k1 > k0 and q1 > q0:
            seen = Band.make(window_size=(left, right)).dense(q1 - q0, k1 - k0)
            s = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * scale
            s = s.masked_fill(~seen, float("-inf"))
            p = torch.nan_to_num(torch.softmax(s, 2))  # a row that sees nothing
            out[q0:q1] = torch.einsum("hqk,khd->qhd", p, v[k0:k1])
    return out


def _tile(case):
    return case.kwargs.get("BM", 16), case.kwargs.get("BN", 16)


def _window_blocks(case):
    """Return (programs, visited blocks, partial blocks), all heads together."""
    q, _, _, q_offsets, k_offsets, _, left, right = case.args
    programs = visited = partial = 0
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
        found = block_kinds(Band.make(window_size=(left, right)), q1 - q0, k1 - k0, *_tile(case))
        programs += -(-(q1 - q0) // _tile(case)[0])
        visited += int((found > 0).sum())
        partial += int((found == 1).sum())
    return q.shape[1] * programs, q.shape[1] * visited, q.shape[1] * partial


def _masked_lanes(case):
    (programs, _, partial), (rows, columns) = _window_blocks(case), _tile(case)
    return 3 * rows * columns * partial + 256 * programs


def _window_exponentials(case):
    (programs, visited, _), (rows, columns) = _window_blocks(case), _tile(case)
    return (rows * columns + 2 * rows) * visited + 2 * rows * programs


_MASKED = "blocks of scores for partial blocks only, so each at most 3 times their number of scores and 256 elements more per program"

WINDOW = Exercise(
    id="6.3",
    title="The peeled kernel of a jagged window",
    name="window_kernel",
    kind="kernel",
    call=_window_launch,
    cases=_window_cases,
    reference=_window,
    outputs=(Output("out", ("token", "head", "dim")),),
    difficulty=3,
    minutes=65,
    tol=3e-6,
    time_limit=20.0,
    forbid=("jfa.masks",),
    hints=(
        "lo = len_kv - len_q - left and hi = len_kv - len_q + right, per sequence. Then 6.2 gives the four block numbers of your tile.",
        "Three loops over one body, or one jit function with APPLY_MASK: tl.constexpr called from three loops. "
        "Take exponents from an anchor: m, or 0 while m is -inf.",
        "The full blocks' loads need no mask either. At the end divide by tl.where(l > 0, l, 1.0).",
    ),
    limits=(
        Limit("masks at the edges only", "selects", at_most=_masked_lanes, text=_MASKED),
        Limit("comparisons at the edges only", "compares", at_most=_masked_lanes, text=_MASKED),
        Limit(
            "empty blocks skipped",
            "exponentials",
            at_most=_window_exponentials,
            text="no more exponentials than visited blocks have scores, and 32 more per block and per program",
        ),
    ),
    mutants=(
        Mutant(
            "window from the starts",
            "The window is counted from the sequences' starts; it belongs to the bottom-right diagonal, d = len_kv - len_q.",
            edit=("lo, hi = len_kv - len_q - left, len_kv - len_q + right", "lo, hi = -left, right"),
        ),
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=('input_precision="ieee") * scale', 'input_precision="ieee") * (1.0 / (D**0.5))'),
        ),
        Mutant(
            "left side one short",
            "The key at the window's left end is seen, too.",
            edit=("(distance >= lo)", "(distance > lo)"),
        ),
        Mutant(
            "bulk_end rounded up",
            "The bulk's end was rounded up: its last block needs a mask.",
            edit=(
                "bulk_end = tl.maximum(0, tl.minimum(len_kv, row0 + hi + 1)) // BN",
                "bulk_end = tl.cdiv(tl.maximum(0, tl.minimum(len_kv, row0 + hi + 1)), BN)",
            ),
            caught_by="runs",
            expect="outside the tensor",
            recognise=False,
        ),
        Mutant(
            "bulk's end counted from the last query",
            "The bulk ends at the last key that the tile's last query sees; its first query sees fewer keys.",
            edit=("tl.minimum(len_kv, row0 + hi + 1)", "tl.minimum(len_kv, last + hi + 1)"),
        ),
        Mutant(
            "tail visited twice",
            "Blocks of the bulk are visited again by the last loop.",
            edit=("(bulk_begin if part == 1 else bulk_end)", "(bulk_begin if part == 1 else bulk_begin)"),
        ),
        Mutant(
            "no anchor",
            "-inf minus -inf is NaN.",
            caught_by="returns",
            edit=('anchor = tl.where(m_new == float("-inf"), 0.0, m_new)', "anchor = m_new"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "the anchor kept as the maximum",
            "A row that has seen nothing so far keeps a maximum of 0, the anchor: lower scores that follow vanish.",
            edit=("            m = m_new\n", "            m = anchor\n"),
        ),
        Mutant(
            "values of head 0 in the bulk",
            "The full blocks' values are those of head 0, whatever head the program has.",
            edit=("v = tl.load(v_ptr + at_keys)\n", "v = tl.load(v_ptr + at_keys - head * D)\n"),
        ),
        Mutant(
            "-1e9 for minus infinity",
            "A query that may see nothing averages the keys it must not see: -1e9 is a score like any other.",
            edit=('s = tl.where(seen, s, float("-inf"))', "s = tl.where(seen, s, -1e9)"),
        ),
        Mutant(
            "V not masked",
            "V is read past the sequence's end.",
            caught_by="runs",
            edit=("v = tl.load(v_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)", "v = tl.load(v_ptr + at_keys)"),
            expect="v_ptr",
            recognise=False,
        ),
        Mutant(
            "every block masked",
            "no bulk without a mask.",
            caught_by="masks at the edges only",
            edit=(
                ("if part != 1:\n                k =", "if True:\n                k ="),
                ("if part != 1:\n                distance", "if True:\n                distance"),
            ),
            expect="tl.where",
            recognise=False,
        ),
        Mutant(
            "empty blocks visited",
            "all blocks of the sequence are visited.",
            caught_by="comparisons at the edges only",
            edit=(
                "first, end = key_begin // BN, tl.cdiv(tl.maximum(key_end, 0), BN)",
                "first, end = 0, tl.cdiv(len_kv, BN)",
            ),
            expect="comparisons made",
            recognise=False,
        ),
        Mutant(
            "products in TF32",
            "tl.dot rounded its fp32 operands to TF32, 10 bits of mantissa. Ask for input_precision='ieee'.",
            edit=(
                ('tl.dot(q, tl.trans(k), input_precision="ieee")', "tl.dot(q, tl.trans(k))"),
                ('tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")', "tl.dot(p, v, acc * alpha[:, None])"),
            ),
        ),
    ),
    variants=(
        """
@triton.jit
def _join(m, l, acc, q, i, block, k_base, v_base, scale, lo, hi, nk, row_stride, D: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr):
    d = tl.arange(0, D)[None, :]
    j = block * BN + tl.arange(0, BN)
    if EDGE:
        k = tl.load(k_base + j[:, None] * row_stride + d, mask=(j < nk)[:, None], other=0.0)
        v = tl.load(v_base + j[:, None] * row_stride + d, mask=(j < nk)[:, None], other=0.0)
    else:
        k = tl.load(k_base + j[:, None] * row_stride + d)
        v = tl.load(v_base + j[:, None] * row_stride + d)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
    if EDGE:
        low, high = tl.maximum(i + lo, 0), tl.minimum(i + hi, nk - 1)       # two comparisons for each score
        s = tl.where((j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None]), s, float("-inf"))
    new = tl.maximum(m, tl.maximum(tl.max(s, 1), -1e37))                   # m begins at -1e37, a finite floor
    a, p = tl.exp2(m - new), tl.exp2(s - new[:, None])
    return new, l * a + tl.sum(p, 1), acc * a[:, None] + tl.dot(p, v, input_precision="ieee")


@triton.jit
def window_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, left, right, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    seq, row0, h = tl.load(tiles_ptr + 2 * tl.program_id(0)), tl.load(tiles_ptr + 2 * tl.program_id(0) + 1), tl.program_id(1)
    q0, k0 = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)
    nq, nk = tl.load(q_offsets_ptr + seq + 1) - q0, tl.load(k_offsets_ptr + seq + 1) - k0
    lo, hi = nk - nq - left, nk - nq + right
    i = row0 + tl.arange(0, BM)
    at = ((q0 + i)[:, None] * H + h) * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + at, mask=(i < nq)[:, None], other=0.0)
    last = tl.minimum(row0 + BM, nq) - 1
    start = tl.minimum(tl.maximum(row0 + lo, 0), nk) // BN
    stop = tl.cdiv(tl.minimum(tl.maximum(last + hi + 1, 0), nk), BN)
    inner = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last + lo, 0), BN), start), tl.maximum(stop, start))
    outer = tl.maximum(tl.minimum(tl.minimum(tl.maximum(row0 + hi + 1, 0), nk) // BN, stop), inner)
    m, l, acc = tl.full((BM,), -1e37, tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)
    kb, vb = k_ptr + (k0 * H + h) * D, v_ptr + (k0 * H + h) * D
    for b in range(inner, outer):                                          # the bulk first, the edges in any order
        m, l, acc = _join(m, l, acc, q, i, b, kb, vb, scale, lo, hi, nk, H * D, D, BN, False)
    for b in range(outer, stop):
        m, l, acc = _join(m, l, acc, q, i, b, kb, vb, scale, lo, hi, nk, H * D, D, BN, True)
    for b in range(start, inner):
        m, l, acc = _join(m, l, acc, q, i, b, kb, vb, scale, lo, hi, nk, H * D, D, BN, True)
    tl.store(out_ptr + at, acc / tl.maximum(l, 1e-30)[:, None], mask=(i < nq)[:, None])
""",
        # one loop, with the mask behind a branch that the whole program takes
        (
            (
                "    for part in tl.static_range(3):  # left edge, bulk, right edge\n"
                "        begin = first if part == 0 else (bulk_begin if part == 1 else bulk_end)\n"
                "        stop = bulk_begin if part == 0 else (bulk_end if part == 1 else end)\n"
                "        for block in range(begin, stop):\n",
                "    if True:\n        for block in range(first, end):\n            MASKED = (block < bulk_begin) | (block >= bulk_end)\n",
            ),
            (
                "            if part != 1:\n                k = tl.load(k_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)\n"
                "                v = tl.load(v_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)\n"
                "            else:\n                k = tl.load(k_ptr + at_keys)\n                v = tl.load(v_ptr + at_keys)\n",
                "            k = tl.load(k_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)\n"
                "            v = tl.load(v_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)\n",
            ),
            ("            if part != 1:\n                distance", "            if MASKED:\n                distance"),
        ),
    ),
)

# -- 6.4 ---------------------------------------------------------------------------------------------------------------


def _one_window_cases(seed):
    g = kinds.generator(seed)

    def case(name, n, m, left, right, block=8, lift=1.0):
        q, k, v = (
            torch.randn(n, 8, generator=g) * lift,
            torch.randn(m, 8, generator=g),
            torch.randn(m, 8, generator=g) + 0.5,
        )
        return Case(name, (q, k, v, left, right, block))

    def hard(kind):
        q, k = kinds.query_and_key(kind, 6, 30, 16, 8, g)
        return Case(kinds.SCORES[kind].says, (q, k, torch.randn(30, 8, generator=g), 40, 0, 8))

    return [
        case("as many queries as keys", 12, 12, 3, 0),
        case("8 queries, 24 keys, a window (20, 3)", 8, 24, 20, 3),
        case("4 queries, 20 keys, a window (3, 1)", 4, 20, 3, 1),
        case("30 queries, 9 keys: rows that see nothing", 30, 9, 2, 2),
        case("one query, 50 keys", 1, 50, 20, 0),
        case("50 queries, one key", 50, 1, 4, 0),
        case("blocks of 7, a window (9, 5)", 25, 40, 9, 5, block=7),
        case("blocks of 16, a window (30, 10)", 25, 70, 30, 10, block=16),
        *map(hard, kinds.SCORES),
    ]


def _one_window(q, k, v, left, right, block):
    seen = Band.make(window_size=(left, right)).dense(len(q), len(k))
    s = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~seen, float("-inf"))
    return torch.nan_to_num(torch.softmax(s, 1)) @ v


def _window_products(case):
    q, k, _, left, right, block = case.args
    seen = Band.make(window_size=(left, right)).dense(len(q), len(k)).any(0)
    return 2 * sum(bool(part.any()) for part in seen.split(block))


ONE_WINDOW = Exercise(
    id="6.4",
    title="Bug hunt: counted from the wrong end",
    name="window_attention",
    hunt=True,
    cases=_one_window_cases,
    reference=_one_window,
    outputs=(Output("out", ("query", "dim")),),
    difficulty=2,
    minutes=15,
    tol=1e-5,
    forbid=("softmax", "jfa.masks"),
    hints=(
        "Write down lo and hi for 4 queries and 20 keys with the window (3, 1). Which keys should query 3, the last one, see?",
        "Mask, first block and last block all come from lo and hi. One line makes these.",
        "lo, hi = m - n - left, m - n + right.",
    ),
    limits=(
        Limit(
            "few products",
            "op:mm",
            at_most=_window_products,
            text="at most 2 matrix products per block of keys that some query sees",
        ),
        Limit(
            "block by block",
            "peak_numel",
            at_most=lambda case: max(case.args[0].shape[0] * case.args[5], *(x.numel() for x in case.args[:3])),
            text="no new tensor with more elements than n x block scores, or than q, k or v",
        ),
    ),
    mutants=(
        Mutant(
            "all scores at once",
            "right numbers, but all scores exist at the same time.",
            caught_by="block by block",
            source="""
def window_attention(q, k, v, left, right, block):
    n, m = len(q), len(k)
    i, j = torch.arange(n)[:, None], torch.arange(m)[None]
    s = q @ k.T / q.shape[1] ** 0.5
    s = s.masked_fill((j - i < m - n - left) | (j - i > m - n + right), -torch.inf)
    w = torch.exp(s - s.amax(1, keepdim=True).clamp(min=-1e30))
    return w @ v / w.sum(1, keepdim=True).clamp(min=1e-30)
""",
            recognise=False,
        ),
        Mutant(
            "shifted the other way",
            "The window was moved by n - m; the diagonal lies at m - n, so that the last query stands at the last key.",
            edit=("lo, hi = m - n - left, m - n + right", "lo, hi = n - m - left, n - m + right"),
        ),
        Mutant(
            "only the right side moved",
            "Only the right side was moved: the window became wider by m - n.",
            edit=("lo, hi = m - n - left, m - n + right", "lo, hi = -left, m - n + right"),
        ),
        Mutant(
            "only the left side moved",
            "Only the left side was moved.",
            edit=("lo, hi = m - n - left, m - n + right", "lo, hi = m - n - left, right"),
        ),
        Mutant(
            "moved in the mask alone",
            "The mask is right, and the loop is not: its first and last key still come from the unmoved window.",
            edit=(
                ("lo, hi = m - n - left, m - n + right", "lo, hi = -left, right"),
                ("(j - i >= lo) & (j - i <= hi)", "(j - i >= m - n + lo) & (j - i <= m - n + hi)"),
            ),
        ),
        Mutant(
            "moved by m - n only when there are more keys",
            "With more queries than keys the diagonal moves as well, to the left: the first queries see nothing.",
            edit=("lo, hi = m - n - left, m - n + right", "lo, hi = max(m - n, 0) - left, max(m - n, 0) + right"),
        ),
        Mutant(
            "moved in the loop alone",
            "The loop is right, and the mask is not.",
            edit=("(j - i >= lo) & (j - i <= hi)", "(j - i >= -left) & (j - i <= right)"),
        ),
        Mutant(
            "all blocks visited",
            "all blocks of keys are touched.",
            caught_by="few products",
            edit=(("begin // block * block, end, block", "0, m, block"),),
            expect="torch's mm ran",
            recognise=False,
        ),
        Mutant(
            "blocks of 8 keys for good",
            "right numbers, but 8 keys are taken at a time, whatever block is.",
            caught_by="few products",
            edit=("n, m = len(q), len(k)", "n, m, block = len(q), len(k), 8"),
            expect="at most 2 matrix products",
            recognise=False,
        ),
    ),
    variants=(
        """
def window_attention(q, k, v, left, right, block):
    n, m = len(q), len(k)
    i = torch.arange(n) + (m - n)                        # each query's place among the keys
    out = torch.zeros(n, v.shape[1])
    lse = torch.full((n,), float("-inf"))
    for first in range(0, m, block):
        j = torch.arange(first, min(first + block, m))
        seen = (j >= i[:, None] - left) & (j <= i[:, None] + right)
        if not seen.any():
            continue
        s = (q @ k[j].T / q.shape[1] ** 0.5).masked_fill(~seen, float("-inf"))
        high = s.amax(1).nan_to_num(neginf=0.0)
        part = high + torch.log(torch.exp(s - high[:, None]).sum(1))
        both = torch.logaddexp(lse, part)
        safe = torch.where(both == float("-inf"), 0.0, both)
        out = torch.exp(lse - safe)[:, None] * out + torch.exp(s - safe[:, None]) @ v[j]
        lse = both
    return out
""",
        """
def window_attention(q, k, v, left, right, block):
    q, k, v = q.flip(0), k.flip(0), v.flip(0)            # counted from the end the two diagonals are one
    n, m = len(q), len(k)
    i = torch.arange(n)[:, None]
    seen_keys = [j0 for j0 in range(0, m, 1) if j0 <= n - 1 + left and j0 >= -right]
    out = torch.zeros(n, v.shape[1])
    if not seen_keys:
        return out
    # the blocks are those of the keys as they were given
    edges = sorted({m - j for j in range(0, m, block)} | {0})
    top, total = torch.full((n, 1), -3e38), torch.zeros(n, 1)
    for a, b in zip(edges, edges[1:]):
        j = torch.arange(a, b)
        seen = (j - i <= left) & (j - i >= -right)
        if seen.any():
            s = torch.where(seen, q @ k[j].T * q.shape[1] ** -0.5, -torch.inf)
            new = torch.maximum(top, s.max(1, keepdim=True).values)
            p, f = torch.exp(s - new), torch.exp(top - new)
            total, out, top = total * f + p.sum(1, keepdim=True), out * f + p @ v[j], new
    return (out / total.clamp(min=1e-37)).flip(0)
""",
    ),
)

# -- 6.5 ---------------------------------------------------------------------------------------------------------------


def _step_cases(seed):
    g = kinds.generator(seed)

    def case(name, s, allowed, started=True):
        n = len(s)
        m = torch.randn(n, generator=g) if started else torch.full((n,), float("-inf"))
        l = 1 + torch.rand(n, generator=g) if started else torch.zeros(n)
        return Case(name, (s, allowed, m, l))

    def hard(kind):
        s = kinds.scores(kind, 5, 16, 8, g)
        return case(kinds.SCORES[kind].says, s, torch.rand(5, 16, generator=g) < 0.7, started=False)

    tame = torch.randn(4, 8, generator=g)
    some = torch.rand(4, 8, generator=g) < 0.5
    some[1], some[2] = False, True
    low = torch.randn(4, 8, generator=g) * 1e8 - 5e9
    return [
        case("every pair may be seen", torch.randn(3, 5, generator=g), torch.ones(3, 5, dtype=torch.bool)),
        case("row 1 may see nothing, and has seen something before", tame, some),
        case("the first block: row 1 has seen nothing so far", tame, some, started=False),
        case("every true score lies below -1e9", low, some, started=False),
        *map(hard, kinds.SCORES),
    ]


def _step(s, allowed, m, l):
    s = s.masked_fill(~allowed, float("-inf"))
    new = torch.maximum(m, s.max(1).values)
    anchor = torch.where(torch.isinf(new), 0.0, new)
    p = torch.where(allowed, torch.exp(s - anchor[:, None]), 0.0)
    alpha = torch.where(torch.isinf(m), 0.0, torch.exp(m - anchor))
    return p, alpha, new, l * alpha + p.sum(1)


def _alpha_of_a_blind_row(case, result):
    """Accept any alpha where nothing has been seen: it multiplies 0, so any finite number will do."""
    return None if torch.isfinite(result[1]).all() else "alpha is not finite in a row that has seen nothing so far."


STEP = Exercise(
    id="6.5",
    title="Bug hunt: the row that may see nothing",
    name="softmax_step",
    hunt=True,
    cases=_step_cases,
    reference=_step,
    outputs=(Output("p", ("row", "key")), Output("alpha", ("row",)), Output("m", ("row",)), Output("l", ("row",))),
    difficulty=1,
    minutes=20,
    tol=2e-6,
    properties=(Property("alpha is finite", _alpha_of_a_blind_row),),
    hints=(
        "What is the maximum of a row that may see nothing, if hidden scores are -1e9? And exp(-1e9 - that)?",
        "With -inf for hidden scores the maximum is -inf, and -inf minus -inf is NaN. Subtract something else in that case.",
        "anchor = torch.where(m_new == -torch.inf, 0.0, m_new), and both exponentials use the anchor.",
    ),
    mutants=(
        Mutant(
            "minus infinity without an anchor",
            "-inf minus -inf is NaN.",
            caught_by="returns",
            edit=("anchor = torch.where(m_new == -torch.inf, 0.0, m_new)", "anchor = m_new"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "a larger number",
            "A hidden score is still a number: a row that may see nothing has that number as its maximum, and weights of 1.",
            edit=("s = torch.where(allowed, s, -torch.inf)", "s = torch.where(allowed, s, -1e30)"),
        ),
        Mutant(
            "weights cleared, maximum kept",
            "The weights are cleared, but m took part of the hidden scores: it must stay as it was.",
            edit=(
                ("s = torch.where(allowed, s, -torch.inf)", "s = torch.where(allowed, s, -1e9)"),
                ("p = torch.exp(s - anchor[:, None])", "p = torch.where(allowed, torch.exp(s - anchor[:, None]), 0.0)"),
            ),
        ),
        Mutant(
            "maximum of hidden scores, too",
            "The maximum was taken before the mask: hidden scores raise it.",
            edit=(
                "    s = torch.where(allowed, s, -torch.inf)\n    m_new = torch.maximum(m, s.amax(1))\n",
                "    m_new = torch.maximum(m, s.amax(1))\n    s = torch.where(allowed, s, -torch.inf)\n",
            ),
        ),
        Mutant(
            "m set to 0",
            "m of a row that has seen nothing must stay -inf; only the anchor is 0.",
            edit=(
                "anchor = torch.where(m_new == -torch.inf, 0.0, m_new)",
                "m_new = torch.where(m_new == -torch.inf, 0.0, m_new)\n    anchor = m_new",
            ),
        ),
        Mutant(
            "maximum kept above 0",
            "The anchor is at least 0: all weights of a row of low scores vanish.",
            edit=("anchor = torch.where(m_new == -torch.inf, 0.0, m_new)", "anchor = m_new.clamp(min=0.0)"),
        ),
        Mutant(
            "alpha without the anchor",
            "-inf minus -inf is NaN.",
            caught_by="returns",
            edit=("alpha = torch.exp(m - anchor)", "alpha = torch.exp(m - m_new)"),
            expect="NaN",
            recognise=False,
        ),
    ),
    variants=(
        """
def softmax_step(s, allowed, m, l):
    hidden = ~allowed
    top = s.masked_fill(hidden, float("-inf")).max(dim=1)[0]
    m_new = torch.where(top > m, top, m)
    blind = torch.isneginf(m_new)
    p = (s - m_new.masked_fill(blind, 0.0)[:, None]).masked_fill(hidden, float("-inf")).exp()
    alpha = torch.nan_to_num((m - m_new).exp(), nan=0.0)
    return p, alpha, m_new, torch.addcmul(p.sum(1), l, alpha)
""",
        """
def softmax_step(s, allowed, m, l):
    m_new, p, alpha, total = m.clone(), torch.zeros_like(s), torch.zeros_like(m), l.clone()
    for row in range(len(s)):
        seen = s[row][allowed[row]]
        if len(seen):
            m_new[row] = max(m[row], seen.max())
            p[row][allowed[row]] = torch.exp(seen - m_new[row])
        if m_new[row] > -torch.inf:
            alpha[row] = torch.exp(m[row] - m_new[row])
        total[row] = l[row] * alpha[row] + p[row].sum()
    return p, alpha, m_new, total
""",
    ),
)

# -- 6.6 ---------------------------------------------------------------------------------------------------------------


def _work_cases(seed):
    s = seed % 6
    far = UNBOUNDED

    def case(name, problems, BM=16, BN=16):
        return Case(name, (*(list(x) for x in zip(*problems)), BM, BN))

    return [
        case("causal, 40 queries and keys", [(40 + s, 40, -far, 0)]),
        case("no mask, 33 queries, 50 keys", [(33, 50 + s, -far, far)]),
        case("a window, more keys than queries", [(20, 90, 50 - s, 75)], 8, 16),
        case("lengths 5, 0, 33, 1, 17, causal; one without keys",
             [(n, m, -far, m - n) for n, m in zip(kinds.RAGGED, [17 + s, 4, 40, 0, 21])]),
        case("queries that see nothing", [(70, 30, -far, -40 - s), (40, 20, 30, 60)]),
        case("lo > hi", [(40, 64, 5, 2 - s), (16, 16, 0, 0)]),
        case("one of 100,000, causal: more pairs than int32 holds", [(100_000 + s, 100_000, -far, 0)], 128, 128),
        case("one of 100,000, a window of 1000", [(100_000, 100_000 + s, -1000, 0), (3, 7, -2, 1)], 128, 64),
    ]  # fmt: skip


def _work(len_q, len_kv, lo, hi, BM, BN):
    pairs = full = partial = 0
    for n, m, low, high in zip(len_q, len_kv, lo, hi):
        band = Band(lo_start=low, hi_start=high)
        pairs += int(allowed_pairs(band, torch.tensor([n]), torch.tensor([m])))
        found = block_kinds(band, n, m, BM, BN)
        full, partial = full + int((found == 2).sum()), partial + int((found == 1).sum())
    return pairs, full, partial


WORK = Exercise(
    id="6.6",
    title="Predict pairs, full and partial blocks",
    name="work",
    cases=_work_cases,
    reference=_work,
    outputs=tuple(Output(name, dtype="int") for name in ("pairs", "full", "partial")),
    difficulty=2,
    minutes=35,
    forbid=("jfa.masks", "jfa.schedule"),
    hints=(
        "Query i sees the keys from max(0, i + lo) to min(len_kv, i + hi + 1). Sum the lengths that are positive.",
        "Per tile of queries 6.2 gives the visited and the full blocks. Partial ones are visited and not full.",
        "Visited: cdiv(min(m, last + hi + 1), BN) - max(0, row0 + lo) // BN, if the key range is not empty. "
        "Full: min(m, row0 + hi + 1) // BN - cdiv(max(0, last + lo), BN), if positive.",
    ),
    mutants=(
        Mutant(
            "pairs in int32",
            "Large batches have more pairs than int32 holds: count in 64 bits.",
            edit=("(end - begin).clamp(min=0).sum()", "(end - begin).clamp(min=0).sum(dtype=torch.int32)"),
        ),
        Mutant(
            "pairs in closed form without the edges",
            "Queries near the start or the end see fewer keys than the band is wide.",
            edit=(
                "begin, end = (i + low).clamp(min=0), (i + high + 1).clamp(max=m)",
                "begin, end = i + max(low, -n), i + min(high, m) + 1",
            ),
        ),
        Mutant(
            "hi excluded",
            "The key i + hi counts as well.",
            edit=("(i + high + 1).clamp(max=m)", "(i + high).clamp(max=m)"),
        ),
        Mutant(
            "negative rows counted",
            "A query that sees nothing counted negatively: its number of pairs is 0.",
            edit=("int((end - begin).clamp(min=0).sum())", "int((end - begin).sum())"),
        ),
        Mutant(
            "rows past the end",
            "The last tile's missing queries took part in the blocks' kinds.",
            edit=("last = min(row0 + BM, n) - 1", "last = row0 + BM - 1"),
        ),
        Mutant(
            "tail block counted as full",
            "A block with keys past the end counted as full.",
            edit=("min(m, row0 + high + 1) // BN", "-(-min(m, row0 + high + 1) // BN)"),
        ),
        Mutant(
            "blocks that overlap the window are full",
            "Blocks that some queries see counted as full; all must see all of it.",
            edit=(
                "bulk = min(m, row0 + high + 1) // BN - -(-max(0, last + low) // BN)",
                "bulk = min(m, last + high + 1) // BN - -(-max(0, row0 + low) // BN)",
            ),
        ),
        Mutant(
            "partial counts all visited",
            "partial holds every visited block; the full ones are none of them.",
            edit=("partial += visited - max(0, bulk)", "partial += visited"),
        ),
        Mutant(
            "lo > hi visits blocks",
            "A band with lo > hi holds no pair, and its blocks are empty.",
            edit=("if low > high:", "if False:"),
        ),
        Mutant(
            "every pair in a table",
            "a table of 100,000 x 100,000 pairs.",
            caught_by="runs",
            edit=(
                "        begin, end = (i + low).clamp(min=0), (i + high + 1).clamp(max=m)\n"
                "        pairs += int((end - begin).clamp(min=0).sum())\n",
                "        apart = torch.arange(m) - i[:, None]\n        pairs += int(((apart >= low) & (apart <= high)).sum())\n",
            ),
            expect="memory",
            recognise=False,
        ),
    ),
    variants=(
        """
def work(len_q, len_kv, lo, hi, BM, BN):
    pairs = full = partial = 0
    for n, m, a, b in zip(len_q, len_kv, lo, hi):
        for i in range(n):
            pairs += max(0, min(m, i + b + 1) - max(0, i + a))
        for top in range(0, n, BM):
            bottom = min(top + BM, n) - 1
            first, end = max(0, top + a) // BN, (max(0, min(m, bottom + b + 1)) + BN - 1) // BN
            if a > b or max(0, top + a) >= min(m, bottom + b + 1):
                continue
            for block in range(first, end):
                left, right = block * BN, block * BN + BN - 1
                if left >= bottom + a and right <= top + b and right < m:
                    full += 1
                else:
                    partial += 1
    return pairs, full, partial
""",
        """
def work(len_q, len_kv, lo, hi, BM, BN):
    def upto(n, m, c):                       # pairs with j <= i + c: a trapezoid
        c = max(-n, min(c, m))
        ramp = lambda x: (min(x, m) * (min(x, m) + 1) // 2 + max(x - m, 0) * m) if x > 0 else 0
        return ramp(c + n) - ramp(c)

    result = [0, 0, 0]
    for n, m, a, b in zip(len_q, len_kv, lo, hi):
        result[0] += max(0, upto(n, m, b) - upto(n, m, a - 1))
        if a > b or not n or not m:
            continue
        row0 = torch.arange(0, n, BM)
        last = (row0 + BM).clamp(max=n) - 1
        key0, key1 = (row0 + a).clamp(min=0), (last + b + 1).clamp(max=m)
        visited = torch.where(key0 < key1, (key1 + BN - 1) // BN - key0 // BN, 0)
        bulk = (row0 + b + 1).clamp(max=m) // BN - ((last + a).clamp(min=0) + BN - 1) // BN
        bulk = torch.where(key0 < key1, bulk.clamp(min=0), 0)
        result[1] += int(bulk.sum())
        result[2] += int((visited - bulk).sum())
    return tuple(result)
""",
    ),
)

EXERCISES = [BAND, RANGES, WINDOW, ONE_WINDOW, STEP, WORK]
