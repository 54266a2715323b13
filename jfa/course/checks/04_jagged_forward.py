"""Checks of chapter 04: the jagged forward."""

import math

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output, Property


def _rng(seed):
    return torch.Generator().manual_seed(seed)


def _offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _tiles(offsets, block):
    """Return the learner's tile list, which the judge makes: [tiles, 2] int32."""
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    return torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n, block)], dtype=torch.int32).reshape(
        -1, 2
    )


def _jagged(g, len_q, len_kv, heads, dim, dim_v=None, lift=1.0):
    """Return q, k, v, q_offsets, k_offsets of random packed sequences; ``lift`` scales the queries and so the scores."""
    q = torch.randn(sum(len_q), heads, dim, generator=g) * lift
    k = torch.randn(sum(len_kv), heads, dim, generator=g)
    v = torch.randn(sum(len_kv), heads, dim_v or dim, generator=g) + 0.5
    return q, k, v, _offsets(len_q), _offsets(len_kv)


def _spans(offsets):
    bounds = offsets.tolist()
    return list(zip(bounds, bounds[1:]))


def _share(elements):
    """Check that every program does a share: no element of the result is stored twice. ``elements(case)`` counts the result's."""
    return Limit("its own share", "store_elements", at_most=elements, text="each element of a result is stored once")


HARD = (
    ("scores that need the maximum, one kind per sequence", kinds.MODERATE),
    ("scores near -30,000", ["near -30000"]),
)
"""Names of cases, and the kinds of scores of their sequences."""


# -- 4.1 ---------------------------------------------------------------------------------------------------------------


def _tile_cases(seed):
    shift = seed % 3  # other numbers for another seed, the same number of sequences

    def case(name, lengths, block):
        return Case(name, (_offsets(lengths), block))

    return [
        case("one sequence", [5 + shift], 4),
        case("lengths 3, 0, 5", [3, 0, 5 + shift], 2),
        case("lengths 5, 0, 33, 1, 17, 0", [5, 0, 33 + shift, 1, 17, 0], 16),
        case("a length that is a multiple of the block", [32, 16 + shift], 16),
        case("lengths around blocks of 128", [*kinds.around_block(128), 1 + shift], 128),
        case("blocks of 1000", [*kinds.around_block(1000), 5 + shift], 1000),
        case("only empty sequences", [0, 0, 0], 16),
    ]


TILE_LIST = Exercise(
    id="4.1",
    title="A tile list without empty tiles",
    name="tile_list",
    cases=_tile_cases,
    reference=_tiles,
    outputs=(Output("tiles", ("tile", "field"), dtype="int32"),),
    difficulty=1,
    minutes=10,
    forbid=("jfa.schedule",),
    hints=(
        "Lengths are differences of neighboring offsets. Which first rows does a sequence of length n have?",
        "range(0, n, block) gives exactly the first rows, and nothing for n = 0. An empty list still needs the shape [0, 2].",
        "tiles = [(b, row) for b, n in enumerate(lengths) for row in range(0, n, block)]; torch.tensor(tiles, dtype=torch.int32).reshape(-1, 2).",
    ),
    mutants=(
        Mutant(
            "drops the tail tile",
            "the last, partly filled tile of a sequence is missing.",
            caught_by="returns",
            edit=("range(0, n, block)", "range(0, n - n % block, block)"),
            expect="shape",
        ),
        Mutant(
            "one tile too many on full blocks",
            "a length that is a multiple of the block gets an empty tile.",
            caught_by="returns",
            edit=("range(0, n, block)", "range(0, n + 1, block)"),
            expect="shape",
        ),
        Mutant(
            "rounds instead of rounding up",
            "a sequence that hangs a few rows into another block loses those rows: ceil is not round(x + 0.49).",
            caught_by="returns",
            edit=("for row in range(0, n, block)]", "for row in range(0, round(n / block + 0.49) * block, block)]"),
            expect="shape",
        ),
        Mutant(
            "rows counted from the packed start",
            "The second number is the row in the packed tensor; it should be counted from the sequence's own start.",
            edit=("[(b, row) for", "[(b, int(offsets[b]) + row) for"),
        ),
        Mutant(
            "tile numbers instead of rows",
            "The second number counts tiles; it should be the tile's first row.",
            edit=("[(b, row) for", "[(b, row // block) for"),
        ),
        Mutant(
            "empty sequences keep a tile",
            "a sequence without rows gets a tile.",
            caught_by="returns",
            edit=("range(0, n, block)", "range(0, max(n, 1), block)"),
            expect="shape",
        ),
    ),
    variants=(
        """
def tile_list(offsets, block):
    lengths = offsets.diff().long()
    counts = (lengths + block - 1) // block
    seq = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    before = torch.cumsum(counts, 0) - counts
    row = (torch.arange(len(seq)) - before[seq]) * block
    return torch.stack([seq, row], dim=1).to(torch.int32)
""",
        """
def tile_list(offsets, block):
    out = []
    for b in range(len(offsets) - 1):
        row, n = 0, int(offsets[b + 1]) - int(offsets[b])
        while row < n:
            out.append([b, row])
            row += block
    if not out:
        return torch.zeros((0, 2), dtype=torch.int32)
    return torch.tensor(out).int()
""",
    ),
)

# -- 4.2 ---------------------------------------------------------------------------------------------------------------


def _lse_cases(seed):
    g = _rng(seed)

    def case(name, len_q, len_kv, heads=2, dim=16, lift=1.0, shift=0.0, scale=None, **tile):
        q, k, _, qo, ko = _jagged(g, len_q, len_kv, heads, dim, lift=lift)
        if shift:
            q, k = q.abs() * shift, k.abs()  # every score far from 0, all of one sign
        return Case(name, (q, k, qo, ko, scale or 1 / math.sqrt(dim)), tile, offsets=tuple(qo.tolist()))

    def hard(name, names):
        q, k, qo, ko = kinds.packed(names, 16, 37, 16, 16, g, heads=1)
        return Case(name, (q, k, qo, ko, 0.25), offsets=tuple(qo.tolist()), labels=tuple(names))

    # sequence 1 has keys but no queries, so nothing but a leak can carry its NaN into a result
    poisoned = case("the neighbor's keys are NaN", [4, 0, 19], [5, 18, 6])
    poisoned.args[1][5:23] = float("nan")
    return [
        case("one sequence, one tile", [9], [7], heads=1),
        case("two sequences", [5, 18], [20, 33]),
        case("lengths 5, 0, 33, 1; one without keys", [5, 0, 33, 1], [17, 4, 40, 0], dim=32),
        case("every score far below 0", [6, 3], [21, 35], shift=-40.0),
        poisoned,
        case("a sequence of 200", [3, 20], [2, 200], heads=1, lift=4.0),
        case("32 queries per tile", [35, 3], [20, 7], heads=1, BM=32),
        case(f"32 keys per block, a scale of {kinds.OWN_SCALE}", [5, 18], [40, 33], 1, scale=kinds.OWN_SCALE, BN=32),
        *(hard(*h) for h in HARD),
    ]


def _lse_launch(kernel, q, k, q_offsets, k_offsets, scale, BM=16, BN=16):
    import torch

    lengths = (q_offsets[1:] - q_offsets[:-1]).tolist()
    tiles = torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n, BM)], dtype=torch.int32)
    total, heads, dim = q.shape
    out = unwritten(heads, total)
    kernel[(len(tiles), heads)](q, k, q_offsets, k_offsets, tiles, out, scale, total, heads, D=dim, BM=BM, BN=BN)
    return out


def _lse(q, k, q_offsets, k_offsets, scale, **tile):
    out = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
        if k1 > k0 and q1 > q0:
            out[:, q0:q1] = torch.logsumexp(torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * scale, dim=-1)
    return out


LSE = Exercise(
    id="4.2",
    title="The log-sum-exp of every query",
    name="lse_kernel",
    kind="kernel",
    call=_lse_launch,
    cases=_lse_cases,
    reference=_lse,
    outputs=(Output("lse", ("head", "token")),),
    difficulty=2,
    minutes=30,
    tol=2e-6,
    time_limit=20.0,
    hints=(
        "The rows of your tile are q_offsets[seq] + first + 0..BM-1; those at or past q_offsets[seq + 1] are not yours to store.",
        "Mask the scores of keys past the sequence's end with -inf, and carry m and l as in exercise 3.4, one pair for each row.",
        "l = l * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new[:, None]), axis=1). At the end m + tl.log(l): with no key at all that is -inf + -inf.",
    ),
    limits=(
        Limit("tiled", "peak_tile", at_most=512, text="no block larger than 512 elements"),
        _share(lambda case: case.args[0].shape[0] * case.args[0].shape[1]),
    ),
    mutants=(
        Mutant(
            "-1e4 in masked places",
            "Keys past the end have the score -1e4, which is a score like any other once all are lower.",
            edit=(
                's = tl.where(cols[None, :] < k_end, s, float("-inf"))',
                "s = tl.where(cols[None, :] < k_end, s, -1e4)",
            ),
        ),
        Mutant(
            "tail keys not masked",
            "Keys past the end of the sequence take part: the last block of keys needs its scores set to -inf there.",
            edit=('s = tl.where(cols[None, :] < k_end, s, float("-inf"))', "s = s"),
        ),
        Mutant(
            "sum not rescaled",
            "When the maximum rose, the sum so far was not multiplied by exp(old - new).",
            edit=("l = l * tl.exp(m - m_new) +", "l = l +"),
        ),
        Mutant(
            "one maximum for the whole tile",
            "All queries of a tile share one maximum: a row whose scores lie far below it loses every exponential.",
            edit=("m_new = tl.maximum(m, tl.max(s, axis=1))", "m_new = tl.maximum(m, tl.max(s))"),
        ),
        Mutant(
            "the first block's maximum is kept",
            "The maximum of the first block of keys was kept: later scores may be far larger, and their exponentials overflow.",
            edit=(
                "m_new = tl.maximum(m, tl.max(s, axis=1))",
                'm_new = tl.where(m == float("-inf"), tl.max(s, axis=1), m)',
            ),
        ),
        Mutant(
            "no running maximum",
            "The maximum is 0 throughout: where all scores are far below it, every exponential vanishes.",
            edit=("m_new = tl.maximum(m, tl.max(s, axis=1))", "m_new = tl.maximum(m, 0.0)"),
        ),
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=('input_precision="ieee") * scale', 'input_precision="ieee") * (1.0 / (D**0.5))'),
        ),
        Mutant(
            "forgets the scale",
            "The scores are not multiplied by scale.",
            edit=('input_precision="ieee") * scale', 'input_precision="ieee")'),
        ),
        Mutant(
            "products in TF32",
            "tl.dot rounded its fp32 operands to TF32, 10 bits of mantissa. Ask for input_precision='ieee'.",
            edit=(', input_precision="ieee"', ""),
        ),
        Mutant(
            "query tile starts at the sequence",
            "Every tile of a sequence works on its first rows: the tile's own first row is not added.",
            caught_by="returns",
            edit=("rows = q_begin + first +", "rows = q_begin + 0 * first +"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "stores past the sequence",
            "a tile that hangs over the end writes into the next sequence.",
            caught_by="runs",
            edit=("mask=rows < q_end)", "mask=rows < total_q + BM)"),
            expect="store of `lse_ptr` outside",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def lse_kernel(q_ptr, k_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, lse_ptr, scale, total_q, H, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    seq = tl.load(tiles_ptr + 2 * tl.program_id(0))
    i = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BM)
    h = tl.program_id(1)
    q0 = tl.load(q_offsets_ptr + seq)
    nq = tl.load(q_offsets_ptr + seq + 1) - q0
    k0 = tl.load(k_offsets_ptr + seq)
    nk = tl.load(k_offsets_ptr + seq + 1) - k0
    d = tl.arange(0, D)
    q = tl.load(q_ptr + ((q0 + i) * H + h)[:, None] * D + d[None, :], mask=(i < nq)[:, None], other=0.0) * scale
    lse = tl.full((BM,), float("-inf"), tl.float32)
    for block in range(tl.cdiv(nk, BN)):
        j = block * BN + tl.arange(0, BN)
        k = tl.load(k_ptr + ((k0 + j) * H + h)[:, None] * D + d[None, :], mask=(j < nk)[:, None], other=0.0)
        s = tl.where((j < nk)[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        m = tl.max(s, 1)
        part = m + tl.log(tl.sum(tl.exp(s - m[:, None]), 1))
        top = tl.maximum(lse, part)
        lse = top + tl.log(tl.exp(lse - top) + tl.exp(part - top))
    tl.store(lse_ptr + h * total_q + q0 + i, lse, mask=i < nq)
""",
        """
@triton.jit
def lse_kernel(q_ptr, k_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, lse_ptr, scale, total_q, H, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    seq = tl.load(tiles_ptr + 2 * tl.program_id(0))
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    h = tl.program_id(1)
    q0, q1 = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k0, k1 = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    d = tl.arange(0, D)[None, :]
    for r in range(q0 + first, tl.minimum(q1, q0 + first + BM)):      # one query after another
        q = tl.load(q_ptr + (r * H + h) * D + d)
        m = float("-inf")
        l = 0.0
        for start in range(k0, k1, BN):
            j = start + tl.arange(0, BN)[:, None]
            k = tl.load(k_ptr + (j * H + h) * D + d, mask=j < k1, other=0.0)
            s = tl.where(start + tl.arange(0, BN) < k1, tl.sum(q * k, 1) * scale, float("-inf"))
            new = tl.maximum(m, tl.max(s, 0))
            l = l * tl.exp(m - new) + tl.sum(tl.exp(s - new), 0)
            m = new
        if k1 > k0:
            tl.store(lse_ptr + h * total_q + r, m + tl.log(l))
        else:
            tl.store(lse_ptr + h * total_q + r, float("-inf"))
""",
    ),
)

# -- 4.3 ---------------------------------------------------------------------------------------------------------------


def _pv_cases(seed):
    g = _rng(seed)

    def case(name, valid, poison, rows=16, keys=16, dim=16, lift=1.0):
        p = torch.rand(rows, keys, generator=g)
        p[:, valid:] = 0.0
        v = lift * torch.randn(keys, dim, generator=g)
        v[valid:] = torch.tensor(poison)[: keys - valid].repeat(keys)[: keys - valid, None]
        return Case(name, (p, v, torch.randn(rows, dim, generator=g), valid))

    nan, inf = float("nan"), float("inf")
    return [
        case("all 16 keys valid", 16, [0.0]),
        case("5 valid, then huge numbers", 5, [1e30]),
        case("11 valid, then NaN and infinities", 11, [nan, inf, -inf]),
        case("9 valid of about a million, then NaN", 9, [nan], lift=1e6),
        case("32 rows, 64 keys, D = 32: 37 valid, then NaN", 37, [nan], 32, 64, 32),
        case("16 rows, 32 keys, D = 64: one valid, then infinities", 1, [inf, -inf], 16, 32, 64),
    ]


def _pv_launch(kernel, p, v, acc, valid):
    out = acc.clone()
    kernel[(1,)](p, v, out, valid, ROWS=p.shape[0], KEYS=v.shape[0], D=v.shape[1])
    return out


PV = Exercise(
    id="4.3",
    title="The poisoned neighbor",
    name="pv_kernel",
    kind="kernel",
    call=_pv_launch,
    cases=_pv_cases,
    reference=lambda p, v, acc, valid: acc + p[:, :valid] @ v[:valid],
    outputs=(Output("acc", ("row", "dim")),),
    difficulty=2,
    minutes=10,
    tol=2e-6,
    hints=(
        "A probability of 0 does not save you: 0 * NaN and 0 * inf are NaN. What must the rows of V from `valid` on hold?",
        "A masked lane does not touch memory; it holds `other`. Mask V's rows.",
        "v = tl.load(..., mask=j[:, None] < valid, other=0.0); acc = tl.dot(p, v, acc, input_precision='ieee').",
    ),
    limits=(Limit("three loads", "loads", at_most=3, text="at most 3 loads"),),
    mutants=(
        Mutant(
            "trusts the zero probabilities",
            "0 * NaN is NaN.",
            caught_by="returns",
            edit=(", mask=j[:, None] < valid, other=0.0", ""),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "multiplies V by the mask",
            "a multiplication cannot remove a NaN.",
            caught_by="returns",
            edit=(
                "v = tl.load(v_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < valid, other=0.0)",
                "v = tl.load(v_ptr + j[:, None] * D + d[None, :]) * (j[:, None] < valid).to(tl.float32)",
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "masks with no other",
            "masked lanes hold undefined values.",
            caught_by="runs",
            edit=("mask=j[:, None] < valid, other=0.0", "mask=j[:, None] < valid"),
            expect="other",
            recognise=False,
        ),
        Mutant(
            "products in TF32",
            "tl.dot rounded its fp32 operands to TF32, 10 bits of mantissa. Ask for input_precision='ieee'.",
            edit=(', input_precision="ieee"', ""),
        ),
        Mutant(
            "forgets what was accumulated",
            "What acc held before is gone: the product must be added to it.",
            edit=("acc = tl.dot(p, v, acc,", "acc = tl.dot(p, v,"),
        ),
        Mutant(
            "one key too few",
            "The last valid key is masked too: keys 0 .. valid - 1 count.",
            edit=("mask=j[:, None] < valid,", "mask=j[:, None] < valid - 1,"),
        ),
        Mutant(
            "columns masked instead of rows",
            "V is masked along its columns; keys are its rows.",
            edit=("mask=j[:, None] < valid", "mask=d[None, :] < valid"),
        ),
        Mutant(
            "16 columns of V for good",
            "V has D columns, whatever D is.",
            caught_by="runs",
            edit=(
                "v = tl.load(v_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < valid, other=0.0)",
                "v = tl.load(v_ptr + j[:, None] * 16 + tl.arange(0, 16)[None, :], mask=j[:, None] < valid, other=0.0)",
            ),
            expect="16",
            recognise=False,
        ),
        Mutant(
            "rows of 16 for good",
            "Row j of V begins D * j elements after the first, whatever D is.",
            edit=("v_ptr + j[:, None] * D + d[None, :], mask", "v_ptr + j[:, None] * 16 + d[None, :], mask"),
        ),
        Mutant(
            "large numbers are cut off",
            "Values were cut off at a number that the neighbor's exceed, and so may a sequence's own.",
            edit=(
                "mask=j[:, None] < valid, other=0.0)\n",
                "mask=j[:, None] < KEYS, other=0.0)\n    v = tl.minimum(tl.maximum(v, -1000.0), 1000.0)\n",
            ),
        ),
    ),
    variants=(
        """
@triton.jit
def pv_kernel(p_ptr, v_ptr, acc_ptr, valid, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    r, j, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    p = tl.load(p_ptr + r[:, None] * KEYS + j[None, :])
    acc = tl.load(acc_ptr + r[:, None] * D + d[None, :])
    v = tl.load(v_ptr + j[:, None] * D + d[None, :])
    v = tl.where(j[:, None] < valid, v, 0.0)
    acc += tl.dot(p, v, input_precision="ieee")
    tl.store(acc_ptr + r[:, None] * D + d[None, :], acc)
""",
        """
@triton.jit
def pv_kernel(p_ptr, v_ptr, acc_ptr, valid, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    r, j, d = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS), tl.arange(0, D)[None, :]
    p = tl.load(p_ptr + r * KEYS + j[None, :])
    acc = tl.load(acc_ptr + r * D + d)
    rows = tl.minimum(j, valid - 1)[:, None]        # tail lanes read the last valid row again: finite, and times 0
    acc = tl.dot(p, tl.load(v_ptr + rows * D + d), acc, input_precision="ieee")
    tl.store(acc_ptr + r * D + d, acc)
""",
    ),
)

# -- 4.4 ---------------------------------------------------------------------------------------------------------------


def _alibi_cases(seed):
    g = _rng(seed)

    def case(name, len_q, len_kv, heads=2, dim=16, dim_v=16, lift=1.0, scale=None, **tile):
        q, k, v, qo, ko = _jagged(g, len_q, len_kv, heads, dim, dim_v, lift)
        slope = 0.05 + 0.3 * torch.rand(heads, generator=g)
        scale = scale or 1 / math.sqrt(dim)
        return Case(name, (q, k, v, slope, qo, ko, scale), tile, offsets=tuple(qo.tolist()))

    def hard(name, names):
        q, k, qo, ko = kinds.packed(names, 16, 37, 16, 16, g, heads=1)
        v = torch.randn(len(k), 1, 16, generator=g)
        return Case(
            name, (q, k, v, torch.tensor([0.125]), qo, ko, 0.25), offsets=tuple(qo.tolist()), labels=tuple(names)
        )

    # sequence 1 has keys but no queries, so nothing but a leak can carry its NaN into a result
    poisoned = case("the neighbor's keys and values are NaN", [4, 0, 19], [5, 18, 6])
    for tensor in poisoned.args[1:3]:
        tensor[5:23] = float("nan")
    return [
        case("one sequence, one tile", [7], [9], heads=1),
        case("lengths 5, 0, 33, 1; one without keys", [5, 0, 33, 1], [17, 4, 40, 0]),
        case("Dv 32, scores up to 100", [20, 6], [18, 35], dim_v=32, lift=12.0),
        poisoned,
        case("one of 200 keys", [18, 2], [200, 3], heads=1),
        case("D 32", [6, 3], [9, 20], heads=1, dim=32),
        case("32 queries per tile", [35], [20], heads=1, BM=32),
        case(f"32 keys per block, a scale of {kinds.OWN_SCALE}", [5, 18], [40, 33], 1, scale=kinds.OWN_SCALE, BN=32),
        *(hard(*h) for h in HARD),
    ]


def _alibi_launch(kernel, q, k, v, slope, q_offsets, k_offsets, scale, BM=16, BN=16):
    import torch

    lengths = (q_offsets[1:] - q_offsets[:-1]).tolist()
    tiles = torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n, BM)], dtype=torch.int32)
    out = unwritten(q.shape[0], q.shape[1], v.shape[2])
    grid = (len(tiles), q.shape[1])
    kernel[grid](
        q, k, v, slope, q_offsets, k_offsets, tiles, out, scale, q.shape[1], D=q.shape[2], DV=v.shape[2], BM=BM, BN=BN
    )
    return out


def _alibi(q, k, v, slope, q_offsets, k_offsets, scale, **tile):
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
        if k1 > k0 and q1 > q0:
            s = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * scale
            far = (torch.arange(q1 - q0)[:, None] - torch.arange(k1 - k0)[None, :]).abs()
            p = torch.softmax(s - slope[:, None, None] * far, dim=-1)
            out[q0:q1] = torch.einsum("hqk,khd->qhd", p, v[k0:k1])
    return out


ALIBI = Exercise(
    id="4.4",
    title="Attention with a distance penalty",
    name="alibi_kernel",
    kind="kernel",
    call=_alibi_launch,
    cases=_alibi_cases,
    reference=_alibi,
    outputs=(Output("out", ("token", "head", "dim")),),
    difficulty=3,
    minutes=50,
    tol=3e-6,
    time_limit=20.0,
    hints=(
        "Start from the chapter's forward. Two position blocks are new: i counts rows from the start of the query sequence, j keys from the start of theirs.",
        "Subtract slope * |i - j| after the scale and before the mask; |i - j| is tl.abs(i[:, None] - j[None, :]). The online softmax does not change.",
        "s = tl.dot(q, kt) * scale - slope * tl.abs(i[:, None] - j[None, :]); then mask, m_new, alpha, p, l, acc as in the chapter; 0 where l is 0.",
    ),
    limits=(
        Limit("tiled", "peak_tile", at_most=512, text="no block larger than 512 elements"),
        _share(lambda case: case.args[0].shape[0] * case.args[2].shape[1] * case.args[2].shape[2]),
    ),
    mutants=(
        Mutant(
            "-1e4 in masked places",
            "Keys past the end have the score -1e4, which is a score like any other once all are lower.",
            edit=('s = tl.where(mine[None, :], s, float("-inf"))', "s = tl.where(mine[None, :], s, -1e4)"),
        ),
        Mutant(
            "distance without absolute value",
            "Keys after the query gain instead of losing: the distance is |i - j|.",
            edit=("tl.abs(i[:, None] - j[None, :])", "(i[:, None] - j[None, :])"),
        ),
        Mutant(
            "one maximum for the whole tile",
            "All queries of a tile share one maximum: a row whose scores lie far below it loses every weight.",
            edit=("m_new = tl.maximum(m, tl.max(s, axis=1))", "m_new = tl.maximum(m, tl.max(s))"),
        ),
        Mutant(
            "the first block's maximum is kept",
            "The maximum of the first block of keys was kept: later scores may be far larger, and their exponentials overflow.",
            caught_by="returns",
            edit=(
                "m_new = tl.maximum(m, tl.max(s, axis=1))",
                'm_new = tl.where(m == float("-inf"), tl.max(s, axis=1), m)',
            ),
            expect="NaN",
        ),
        Mutant(
            "maximum starts at 0",
            "The running maximum starts at 0 and never goes below it: where all scores are far lower, every weight vanishes.",
            edit=('m = tl.full((BM,), float("-inf"), tl.float32)', "m = tl.zeros((BM,), tl.float32)"),
        ),
        Mutant(
            "positions in the packed tensor",
            "The distance is taken between packed row numbers: count i and j from the start of their own sequences.",
            edit=("tl.abs(i[:, None] - j[None, :])", "tl.abs(rows[:, None] - keys[None, :])"),
        ),
        Mutant(
            "products in TF32",
            "tl.dot rounded its fp32 operands to TF32, 10 bits of mantissa. Ask for input_precision='ieee'.",
            edit=(
                ('kt, input_precision="ieee"', "kt"),
                (', input_precision="ieee")\n        m = m_new', ")\n        m = m_new"),
            ),
        ),
        Mutant(
            "one slope for all heads",
            "Every head uses the slope of head 0.",
            edit=("tl.load(slope_ptr + head)", "tl.load(slope_ptr)"),
        ),
        Mutant(
            "accumulator not rescaled",
            "acc was summed with an older maximum: multiply it by exp(old - new) when the maximum rises.",
            edit=("acc * alpha[:, None], input", "acc, input"),
        ),
        Mutant(
            "tail of V not masked",
            "V is read past the sequence's end.",
            caught_by="runs",
            edit=("+ dv[None, :], mask=mine[:, None], other=0.0\n", "+ dv[None, :]\n"),
            expect="v_ptr",
            recognise=False,
        ),
        Mutant(
            "no keys gives NaN",
            "0 / 0 for a sequence without keys.",
            caught_by="returns",
            edit=(
                "out = tl.where(l[:, None] > 0, acc / tl.where(l > 0, l, 1.0)[:, None], 0.0)",
                "out = acc / l[:, None]",
            ),
            expect="NaN",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def alibi_kernel(q_ptr, k_ptr, v_ptr, slope_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, H, D: tl.constexpr, DV: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr):
    seq, h = tl.load(tiles_ptr + 2 * tl.program_id(0)), tl.program_id(1)
    i = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BM)
    q0, k0 = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)
    nq, nk = tl.load(q_offsets_ptr + seq + 1) - q0, tl.load(k_offsets_ptr + seq + 1) - k0
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    LOG2E: tl.constexpr = 1.4426950408889634
    q = tl.load(q_ptr + ((q0 + i)[:, None] * H + h) * D + d[None, :], mask=(i < nq)[:, None], other=0.0)
    slope = tl.load(slope_ptr + h) * LOG2E
    m = tl.full((BM,), -1e30, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DV), tl.float32)
    for block in range(tl.cdiv(nk, BN)):
        j = block * BN + tl.arange(0, BN)
        ok = (j < nk)[:, None]
        k = tl.load(k_ptr + ((k0 + j)[:, None] * H + h) * D + d[None, :], mask=ok, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        s -= slope * tl.abs(i[:, None] - j[None, :]).to(tl.float32)
        s = tl.where((j < nk)[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        a = tl.exp2(m - new)
        l = l * a + tl.sum(p, 1)
        v = tl.load(v_ptr + ((k0 + j)[:, None] * H + h) * DV + dv[None, :], mask=ok, other=0.0)
        acc = acc * a[:, None] + tl.dot(p, v, input_precision="ieee")
        m = new
    acc = acc / tl.maximum(l, 1e-30)[:, None]
    tl.store(out_ptr + ((q0 + i)[:, None] * H + h) * DV + dv[None, :], acc, mask=(i < nq)[:, None])
""",
        """
@triton.jit
def alibi_kernel(q_ptr, k_ptr, v_ptr, slope_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, H, D: tl.constexpr, DV: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr):
    seq, h = tl.load(tiles_ptr + 2 * tl.program_id(0)), tl.program_id(1)
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    q0, q1 = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k0, k1 = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    slope = tl.load(slope_ptr + h)
    i = first + tl.arange(0, BM)[:, None]
    q = tl.load(q_ptr + ((q0 + i) * H + h) * D + d[None, :], mask=q0 + i < q1, other=0.0)
    top = tl.full((BM, 1), -1e30, tl.float32)
    for start in range(k0, k1, BN):              # first walk: the maximum only
        j = start + tl.arange(0, BN)[None, :]
        kt = tl.load(k_ptr + (j * H + h) * D + d[:, None], mask=j < k1, other=0.0)
        s = tl.dot(q, kt, input_precision="ieee") * scale - slope * tl.abs(i - (j - k0))
        top = tl.maximum(top, tl.max(tl.where(j < k1, s, -1e30), 1)[:, None])
    l = tl.zeros((BM, 1), tl.float32)
    acc = tl.zeros((BM, DV), tl.float32)
    for start in range(k0, k1, BN):              # second walk: sums with the final maximum
        j = start + tl.arange(0, BN)[None, :]
        jj = start + tl.arange(0, BN)[:, None]
        kt = tl.load(k_ptr + (j * H + h) * D + d[:, None], mask=j < k1, other=0.0)
        s = tl.dot(q, kt, input_precision="ieee") * scale - slope * tl.abs(i - (j - k0))
        p = tl.where(j < k1, tl.exp(s - top), 0.0)
        l += tl.sum(p, 1)[:, None]
        v = tl.load(v_ptr + (jj * H + h) * DV + dv[None, :], mask=jj < k1, other=0.0)
        acc = tl.dot(p, v, acc, input_precision="ieee")
    if k1 > k0:
        acc = acc / l
    tl.store(out_ptr + ((q0 + i) * H + h) * DV + dv[None, :], acc, mask=q0 + i < q1)
""",
    ),
)

# -- 4.5 ---------------------------------------------------------------------------------------------------------------


def _pool_cases(seed):
    g = _rng(seed)

    def case(name, lengths, heads=2, dim=16, lift=1.0, scale=None, **block):
        _, k, v, _, ko = _jagged(g, [1], lengths, heads, dim)
        q, scale = torch.randn(heads, dim, generator=g) * lift, scale or 1 / math.sqrt(dim)
        return Case(name, (q, k, v, ko, scale), block)

    def hard(name, names):
        q, _ = kinds.query_and_key("rising", 1, 1, 16, 16, g)
        _, k, _, ko = kinds.packed(names, 1, 37, 16, 16, g, heads=1)
        return Case(name, (q, k, torch.randn(len(k), 1, 16, generator=g), ko, 0.25), labels=tuple(names))

    return [
        case("lengths 3 and 4", [3, 4], heads=1),
        case("lengths 5, 0, 33, 1, 17", [5, 0, 33, 1, 17]),
        case("scores up to 300", [40, 7], lift=100.0),
        case("one of 200", [2, 200], dim=32),
        case(f"blocks of 8 keys, a scale of {kinds.OWN_SCALE}", [19, 3], heads=1, scale=kinds.OWN_SCALE, BN=8),
        *(hard(*h) for h in HARD),
    ]


def _pool_launch(kernel, q, k, v, k_offsets, scale, BN=16):
    batches, (heads, dim) = k_offsets.numel() - 1, q.shape
    out = unwritten(batches, heads, dim)
    kernel[(batches, heads)](q, k, v, k_offsets, out, scale, heads, D=dim, BN=BN)
    return out


def _pool(q, k, v, k_offsets, scale, BN=16):
    out = q.new_zeros(k_offsets.numel() - 1, *q.shape)
    for b, (k0, k1) in enumerate(_spans(k_offsets)):
        if k1 > k0:
            p = torch.softmax(torch.einsum("hd,khd->hk", q, k[k0:k1]) * scale, dim=-1)
            out[b] = torch.einsum("hk,khd->hd", p, v[k0:k1])
    return out


def _pool_loads(case):
    (q, _, _, offsets, _), block = case.args, case.kwargs.get("BN", 16)
    return q.shape[0] * sum(3 + 2 * -(-(k1 - k0) // block) for k0, k1 in _spans(offsets))


def _between(case, out):
    """Check that a weighted mean lies between the smallest and the largest value of its sequence."""
    _, _, v, offsets, _ = case.args
    for b, (k0, k1) in enumerate(_spans(offsets)):
        if k1 > k0:
            low, high = v[k0:k1].amin(0) - 1e-4, v[k0:k1].amax(0) + 1e-4
            if bool(((out[b] < low) | (out[b] > high)).any()):
                return f"sequence {b}: a mean lies outside the range of the values it is a mean of; do the weights sum to 1?"
    return None


POOL = Exercise(
    id="4.5",
    title="One query that pools a sequence",
    name="pool_kernel",
    kind="kernel",
    call=_pool_launch,
    cases=_pool_cases,
    reference=_pool,
    outputs=(Output("out", ("sequence", "head", "dim")),),
    difficulty=3,
    minutes=45,
    tol=3e-6,
    time_limit=20.0,
    hints=(
        "m and l are scalars here, acc is a vector of D. The loop and the recurrence are those of the chapter.",
        "Scores: tl.sum(q[None, :] * k, axis=1). Values: tl.sum(p[:, None] * v, axis=0). Mask the scores of rows past the end.",
        "alpha = tl.exp(m - m_new); p = tl.exp(s - m_new); l = l * alpha + tl.sum(p, axis=0); acc = acc * alpha + tl.sum(p[:, None] * v, axis=0).",
    ),
    properties=(Property("means stay in range", _between),),
    limits=(
        Limit(
            "tiled",
            "peak_tile",
            at_most=lambda case: case.kwargs.get("BN", 16) * case.args[0].shape[1],
            text="no block larger than `BN` rows of `D` columns",
        ),
        Limit(
            "loads",
            "loads",
            at_most=_pool_loads,
            text="at most 2 loads for each block of keys and 3 more for each program",
        ),
        _share(lambda case: case.args[0].numel() * (len(case.args[3]) - 1)),
    ),
    mutants=(
        Mutant(
            "-1e4 in masked places",
            "Rows past the end have the score -1e4, which is a score like any other once all are lower.",
            edit=(
                's = tl.where(mine, tl.sum(q[None, :] * k, axis=1), float("-inf"))',
                "s = tl.where(mine, tl.sum(q[None, :] * k, axis=1), -1e4)",
            ),
        ),
        Mutant(
            "tail keys not masked",
            "Rows past the sequence's end count as keys with score 0.",
            edit=(
                's = tl.where(mine, tl.sum(q[None, :] * k, axis=1), float("-inf"))',
                "s = tl.sum(q[None, :] * k, axis=1)",
            ),
        ),
        Mutant(
            "accumulator not rescaled",
            "acc was summed with an older maximum: multiply it by exp(old - new) when the maximum rises.",
            edit=("acc = acc * alpha +", "acc = acc +"),
        ),
        Mutant(
            "the first block's maximum is kept",
            "The maximum of the first block of keys was kept: later scores may be far larger, and their exponentials overflow.",
            caught_by="returns",
            edit=(
                "m_new = tl.maximum(m, tl.max(s, axis=0))",
                'm_new = tl.where(m == float("-inf"), tl.max(s, axis=0), m)',
            ),
            expect="NaN",
        ),
        Mutant(
            "maximum starts at 0",
            "The running maximum starts at 0 and never goes below it: where all scores are far lower, every weight vanishes.",
            caught_by="returns",
            edit=('m = float("-inf")', "m = 0.0"),
            expect="NaN",
        ),
        Mutant(
            "never divides",
            "The weights do not sum to one: divide by l at the end.",
            edit=("acc = acc / l", "acc = acc * 1.0"),
        ),
        Mutant(
            "no keys gives NaN",
            "0 / 0 for a sequence without keys.",
            caught_by="returns",
            edit=("if end > begin:\n        acc = acc / l", "acc = acc / l"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "every program uses head 0's query",
            "Every head pools with the query of head 0.",
            edit=("tl.load(q_ptr + head * D + d)", "tl.load(q_ptr + d)"),
        ),
        Mutant(
            "16 keys at a time for good",
            "right numbers, but 16 keys are taken at a time, whatever BN is.",
            caught_by="tiled",
            edit=(
                ("for start in range(begin, end, BN):", "for start in range(begin, end, 16):"),
                ("rows = start + tl.arange(0, BN)", "rows = start + tl.arange(0, 16)"),
            ),
            expect="no block larger",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def pool_kernel(q_ptr, k_ptr, v_ptr, k_offsets_ptr, out_ptr, scale, H, D: tl.constexpr, BN: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    begin = tl.load(k_offsets_ptr + b)
    n = tl.load(k_offsets_ptr + b + 1) - begin
    d = tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + h * D + d)
    m = tl.full((BN,), -1e30, tl.float32)      # every lane of the block keeps its own running softmax
    l = tl.zeros((BN,), tl.float32)
    acc = tl.zeros((BN, D), tl.float32)
    for block in range(tl.cdiv(n, BN)):
        j = block * BN + tl.arange(0, BN)
        at = ((begin + j)[:, None] * H + h) * D + d
        s = tl.sum(q * tl.load(k_ptr + at, mask=(j < n)[:, None], other=0.0), 1) * scale
        new = tl.where(j < n, tl.maximum(m, s), m)
        p = tl.where(j < n, tl.exp(s - new), 0.0)
        a = tl.exp(m - new)
        l = l * a + p
        acc = acc * a[:, None] + p[:, None] * tl.load(v_ptr + at, mask=(j < n)[:, None], other=0.0)
        m = new
    w = tl.exp(m - tl.max(m, 0))
    total = tl.maximum(tl.sum(w * l, 0), 1e-30)
    tl.store(out_ptr + (b * H + h) * D + tl.arange(0, D), tl.sum(acc * w[:, None], 0) / total)
""",
        """
@triton.jit
def pool_kernel(q_ptr, k_ptr, v_ptr, k_offsets_ptr, out_ptr, scale, H, D: tl.constexpr, BN: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    first, last = tl.load(k_offsets_ptr + b), tl.load(k_offsets_ptr + b + 1)
    q = tl.load(q_ptr + h * D + d)
    lse = float("-inf")
    mean = tl.zeros((D,), tl.float32)
    for start in range(first, last, BN):       # merge normalized means by their log-sum-exps
        rows = start + tl.arange(0, BN)
        at = (rows[:, None] * H + h) * D + d[None, :]
        k = tl.load(k_ptr + at, mask=rows[:, None] < last, other=0.0)
        v = tl.load(v_ptr + at, mask=rows[:, None] < last, other=0.0)
        s = tl.where(rows < last, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
        top = tl.max(s, 0)
        e = tl.exp(s - top)
        part = top + tl.log(tl.sum(e, 0))
        both = tl.maximum(lse, part)
        both = both + tl.log(tl.exp(lse - both) + tl.exp(part - both))
        mean = mean * tl.exp(lse - both) + tl.sum(e[:, None] * v, 0) / tl.sum(e, 0) * tl.exp(part - both)
        lse = both
    tl.store(out_ptr + (b * H + h) * D + d, mean)
""",
    ),
)

# -- 4.6 ---------------------------------------------------------------------------------------------------------------


def _merge_cases(seed):
    g = _rng(seed)

    def case(name, parts, total, heads=2, dim=16, spread=1.0, shift=0.0, **tile):
        outs = torch.randn(parts, total, heads, dim, generator=g)
        lses = torch.randn(parts, heads, total, generator=g) * spread + shift
        return Case(name, (outs, lses), tile)

    def without(made, keep):
        """Return rows whose part has no key: where ``keep`` [parts, heads, rows] is False."""
        outs, lses = made.args
        lses[~keep] = -math.inf
        outs.transpose(1, 2)[~keep] = math.nan  # never written
        return made

    holes = case("parts without keys for some rows", 3, 21)
    holes = without(holes, torch.rand(3, 2, 21, generator=g) > 0.4)
    nobody = case("a row without any key", 2, 5, heads=1)
    keep = torch.ones(2, 1, 5, dtype=torch.bool)
    keep[:, 0, 3] = False
    nobody = without(nobody, keep)
    late = case("the first parts have no key", 4, 17)
    keep = torch.ones(4, 2, 17, dtype=torch.bool)
    keep[:2] = False
    late = without(late, keep)
    return [
        case("one part", 1, 7, heads=1),
        case("two parts", 2, 16),
        case("three parts, 33 rows, D 32", 3, 33, dim=32),
        nobody,
        holes,
        late,
        case("lses near -30,000", 3, 9, shift=-30000.0),
        case("lses near 30,000", 3, 9, shift=30000.0),
        case("lses hundreds apart", 3, 18, spread=300.0),
        case("nine parts", 9, 18),
        case("32 rows per tile", 2, 40, heads=1, BM=32),
    ]


def _merge_launch(kernel, outs, lses, BM=16):
    import triton

    parts, total, heads, dim = outs.shape
    out, lse = unwritten(total, heads, dim), unwritten(heads, total)
    kernel[(triton.cdiv(total, BM), heads)](outs, lses, out, lse, parts, total, heads, D=dim, BM=BM)
    return out, lse


def _merge(outs, lses, BM=16):
    lse = torch.logsumexp(lses, 0)
    shares = torch.exp(lses - torch.where(lse > -math.inf, lse, 0.0)).transpose(1, 2)[..., None]
    return torch.where(shares > 0, shares * outs, 0.0).sum(0), lse


def _merge_loads(case):
    parts, total, heads, _ = case.args[0].shape
    return 2 * parts * -(-total // case.kwargs.get("BM", 16)) * heads


MERGE = Exercise(
    id="4.6",
    title="Merge the parts",
    name="merge_kernel",
    kind="kernel",
    call=_merge_launch,
    cases=_merge_cases,
    reference=_merge,
    outputs=(Output("out", ("row", "head", "dim")), Output("lse", ("head", "row"))),
    difficulty=3,
    minutes=40,
    tol=3e-6,
    time_limit=20.0,
    limits=(
        Limit("tiled", "peak_tile", at_most=512, text="no block larger than 512 elements"),
        Limit("each part once", "loads", at_most=_merge_loads, text="at most 2 loads for each part and program"),
        _share(lambda case: case.args[0][0].numel() + case.args[1][0].numel()),
    ),
    hints=(
        "It is the online softmax with parts in the place of blocks of keys: lses[p] is the score of a part, outs[p] its value. Carry m, l and acc.",
        "Two things can give NaN: -inf - (-inf) where all parts so far have no key, and 0 * NaN for a row that was never written. Subtract 0 in the first case, and mask the load of the row in the second.",
        "anchor = tl.where(m_new > -inf, m_new, 0.0); alpha = tl.exp(m - anchor); share = tl.exp(part - anchor); l = l * alpha + share; acc = acc * alpha[:, None] + share[:, None] * out; lse = m + tl.log(l).",
    ),
    mutants=(
        Mutant(
            "rows that were never written",
            "0 * NaN is NaN: a row of a part without keys must not be loaded.",
            caught_by="returns",
            edit=("mask=written[:, None], other=0.0", "mask=rows[:, None] < total_q, other=0.0"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "-inf minus -inf",
            "where no part so far has a key, -inf - (-inf) is NaN.",
            caught_by="returns",
            edit=('tl.where(m_new > float("-inf"), m_new, 0.0)', "m_new"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "no maximum",
            "The exponential of an lse of minus thousands vanishes, and that of thousands overflows: measure against the largest of the parts.",
            edit=(
                (
                    "alpha, share = tl.exp(m - anchor), tl.exp(part - anchor)",
                    "alpha, share = tl.exp(anchor - anchor), tl.exp(part)",
                ),
                ("        m = m_new\n", ""),
                ("m + tl.log(l)", "tl.log(l)"),
            ),
        ),
        Mutant(
            "the parts are averaged",
            "All parts got the same share. A part's share is exp(lses[p] - lse).",
            edit=(
                "alpha, share = tl.exp(m - anchor), tl.exp(part - anchor)",
                "alpha, share = tl.exp(anchor - anchor), tl.where(written, 1.0, 0.0)",
            ),
        ),
        Mutant(
            "acc is not rescaled",
            "When the maximum rises, acc must be multiplied by alpha as well as l.",
            edit=("acc * alpha[:, None]", "acc"),
        ),
        Mutant(
            "not normalized",
            "The sum of the parts was not divided by the sum of their shares.",
            edit=("acc / tl.where(l > 0, l, 1.0)[:, None]", "acc"),
        ),
        Mutant(
            "lse of the largest part",
            "lse is the log of the sum over all parts, not the largest of them.",
            edit=("m + tl.log(l)", "m + tl.log(tl.where(l > 0, 1.0, l))"),
        ),
        Mutant(
            "lses read with rows first",
            "lses is [parts, H, total_q]: heads first.",
            edit=("at = (p * H + head) * total_q + rows", "at = (p * total_q + rows) * H + head"),
        ),
    ),
    variants=(
        (
            (
                "        alpha, share = tl.exp(m - anchor), tl.exp(part - anchor)\n        l = l * alpha + share\n        acc = acc * alpha[:, None] + share[:, None] * out\n        m = m_new\n",
                '        alpha = tl.where(m > float("-inf"), tl.exp(m - anchor), 0.0)\n        share = tl.where(written, tl.exp(part - anchor), 0.0)\n        l, m = l * alpha + share, m_new\n        acc = acc * alpha[:, None] + share[:, None] * out\n',
            ),
        ),
        """
@triton.jit
def merge_kernel(outs_ptr, lses_ptr, out_ptr, lse_ptr, parts, total_q, H, D: tl.constexpr, BM: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1)
    exists = rows < total_q
    d = tl.arange(0, D)[None, :]
    lse = tl.full((BM,), float("-inf"), tl.float32)   # carried normalized: out and lse of all parts so far
    out = tl.zeros((BM, D), tl.float32)
    for p in range(parts):
        new = tl.load(lses_ptr + (p * H + head) * total_q + rows, mask=exists, other=float("-inf"))
        has = new > float("-inf")
        value = tl.load(outs_ptr + ((p * total_q + rows)[:, None] * H + head) * D + d, mask=has[:, None], other=0.0)
        top = tl.maximum(tl.maximum(lse, new), -1e30)
        old_share, new_share = tl.exp(lse - top), tl.exp(new - top)
        both = old_share + new_share
        weight = tl.where(both > 0, new_share / tl.where(both > 0, both, 1.0), 0.0)
        out = out * (1 - weight)[:, None] + value * weight[:, None]
        lse = tl.where(both > 0, top + tl.log(both), float("-inf"))
    tl.store(out_ptr + (rows[:, None] * H + head) * D + d, out, mask=exists[:, None])
    tl.store(lse_ptr + head * total_q + rows, lse, mask=exists)
""",
    ),
)

# -- 4.7 ---------------------------------------------------------------------------------------------------------------


def _cross_cases(seed):
    g = _rng(seed)

    def case(name, len_q, len_kv, heads=2, dim=16, scale=None, **tile):
        q, k, v, qo, ko = _jagged(g, len_q, len_kv, heads, dim)
        return Case(name, (q, k, v, qo, ko, scale or 1 / math.sqrt(dim)), tile, offsets=tuple(qo.tolist()))

    poisoned = case("the neighbor's keys and values are NaN", [4, 0, 19], [5, 18, 6])
    for tensor in poisoned.args[1:3]:
        tensor[5:23] = math.nan
    return [
        case("as many keys as queries", [7, 20], [7, 20]),
        case("fewer keys than queries", [19, 33], [5, 9]),
        case("more keys than queries", [5, 9], [40, 33]),
        case("lengths 5, 0, 33, 1, 17; one without keys", [5, 0, 33, 1, 17], [17, 4, 40, 0, 21]),
        poisoned,
        case("one head, D 32, 32 queries per tile", [35], [20], heads=1, dim=32, BM=32),
        case(f"32 keys per block, a scale of {kinds.OWN_SCALE}", [5, 18], [40, 33], 1, scale=kinds.OWN_SCALE, BN=32),
    ]


def _cross_launch(kernel, q, k, v, q_offsets, k_offsets, scale, BM=16, BN=16):
    import torch

    lengths = (q_offsets[1:] - q_offsets[:-1]).tolist()
    tiles = torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n, BM)], dtype=torch.int32)
    out = unwritten(*q.shape)
    kernel[(len(tiles), q.shape[1])](
        q, k, v, q_offsets, k_offsets, tiles, out, scale, q.shape[1], D=q.shape[2], BM=BM, BN=BN
    )
    return out


CROSS = Exercise(
    id="4.7",
    title="Bug hunt: right for self-attention",
    name="cross_kernel",
    kind="kernel",
    hunt=True,
    call=_cross_launch,
    cases=_cross_cases,
    reference=lambda q, k, v, qo, ko, scale, **tile: _alibi(
        q, k, v, torch.zeros(q.shape[1], dtype=q.dtype), qo, ko, scale
    ),
    outputs=(Output("out", ("token", "head", "dim")),),
    difficulty=2,
    minutes=25,
    tol=3e-6,
    time_limit=20.0,
    limits=(_share(lambda case: case.args[0].numel()),),
    hints=(
        "The mask lets through what is below k_end. Which value does k_end have for the sequence of the report, and which should it have?",
        "With as many keys as queries the two tensors of offsets are equal, and a kernel may read either.",
        "k_begin and k_end come from k_offsets_ptr.",
    ),
    mutants=(
        Mutant(
            "only the end is right",
            "The loop over the keys starts at the queries' offset.",
            edit=("k_begin, k_end = tl.load(k_offsets_ptr + seq),", "k_begin, k_end = tl.load(q_offsets_ptr + seq),"),
        ),
        Mutant(
            "only the begin is right",
            "keys past the end of their sequence, or of the tensor, are read.",
            caught_by="runs",
            edit=(
                "k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)",
                "k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)",
            ),
            recognise=False,
        ),
        Mutant(
            "as many keys as queries",
            "as many keys were read as the sequence has queries.",
            caught_by="runs",
            edit=(
                "k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)",
                "k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq) + q_end - q_begin",
            ),
            recognise=False,
        ),
        Mutant(
            "a second mask",
            "the bounds are still those of the queries: the mask only hides reads outside the tensor, and sequences see others' keys.",
            caught_by="returns",
            edit=(
                (
                    "k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)",
                    "k_begin, k_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)",
                ),
                ("mine = keys < k_end", "mine = (keys < k_end) & (keys < tl.load(k_offsets_ptr + seq + 1))"),
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "the last sequence's end",
            "Keys of the sequences behind were attended as well: a sequence ends at its own offset.",
            edit=(
                "tl.load(k_offsets_ptr + seq + 1)",
                "tl.load(k_offsets_ptr + tl.load(tiles_ptr + 2 * (tl.num_programs(0) - 1)) + 1)",
            ),
        ),
        Mutant(
            "one key too many",
            "The offset behind a sequence belongs to the next one: the end is not included.",
            edit=(
                "mine = keys < k_end",
                "mine = keys < tl.minimum(k_end + 1, tl.load(k_offsets_ptr + tl.load(tiles_ptr + 2 * (tl.num_programs(0) - 1)) + 1))",
            ),
        ),
    ),
    variants=(
        (
            (
                "    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)\n",
                "    k_begin = tl.load(k_offsets_ptr + seq)\n    k_end = tl.load(k_offsets_ptr + seq + 1)\n",
            ),
        ),
        (
            (
                "    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)\n",
                "    bounds = k_offsets_ptr + seq\n    k_begin, k_end = tl.load(bounds), tl.load(bounds + 1)\n",
            ),
        ),
    ),
)

EXERCISES = [TILE_LIST, LSE, PV, ALIBI, POOL, MERGE, CROSS]
