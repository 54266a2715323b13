"""Checks of chapter 17: pooled scores, the choice, lists and their transpose, a kernel over lists, kinds, what sparse costs.

Blocks of all sequences are numbered one after another, without gaps. This is simpler than the package's grid, and the
package's code is no answer.
"""

import math

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output
from jfa.masks import Band, Block, block_kinds

CLOSED = ("jfa.block_sparse", "jfa.block_select", "jfa.masks")


def _spans(offsets):
    bounds = offsets.tolist()
    return list(zip(bounds, bounds[1:]))


def _blocks(lengths, block):
    return [-(-n // block) for n in lengths]


# -- 17.1 --------------------------------------------------------------------------------------------------------------


def _score_cases(seed):
    g = kinds.generator(seed)

    def case(name, len_q, len_kv, heads=1, kv_heads=1, block=16, dim=8, spare=0, poison=None, scale=0.5):
        q = torch.randn(sum(len_q) + spare, heads, dim, generator=g) + 0.5
        k = torch.randn(sum(len_kv) + spare, kv_heads, dim, generator=g) + 0.5
        if spare:
            for x in (q, k):
                kinds.poison(x, slice(len(x) - spare, None))
        qo, ko = kinds.offsets(len_q), kinds.offsets(len_kv)
        if poison is not None:
            kinds.poison(k, slice(int(ko[poison]), int(ko[poison + 1])))
        return Case(name, (q, k, qo, ko, scale, block))

    return [
        case("one sequence of two whole blocks", [32], [32]),
        case("20 queries, 35 keys: tails of 4 and 3 rows", [20], [35]),
        case("NaN in rows behind the last offset", [20, 9], [35, 18], spare=7),
        case("lengths 5, 0, 33, 1, 17; one without keys", kinds.RAGGED, [17, 4, 40, 0, 21], 2, 2),
        case("four heads on two key heads, head dim 12", [20, 33], [40, 7], 4, 2, dim=12),
        case("a neighbor of NaN, which has no queries", [40, 0, 19], [20, 18, 36], poison=1),
        case("one of 200 among short ones", [4, 200, 1], [4, 200, 1], 2, 1),
        case("blocks of 5", kinds.around_block(5), kinds.around_block(5)[::-1], 1, 1, block=5, dim=3),
        case("a negative scale", [20, 3], [35, 50], scale=-0.25),
        case("empty ones at both ends", [0, 7, 0, 0, 3, 0], [0, 7, 0, 5, 3, 0], 2, 1),
    ]


def _scores(q, k, q_offsets, k_offsets, scale, block):
    group = q.shape[1] // k.shape[1]
    q_spans, k_spans = _spans(q_offsets), _spans(k_offsets)
    width = max(-(-(b - a) // block) for a, b in k_spans)
    rows = []
    for (q0, q1), (k0, k1) in zip(q_spans, k_spans):
        for i in range(q0, q1, block):
            row = torch.full((q.shape[1], width), float("-inf"), dtype=torch.float64)
            for n, j in enumerate(range(k0, k1, block)):
                a, b = q[i : min(i + block, q1)].mean(0), k[j : min(j + block, k1)].mean(0)
                row[:, n] = (a * b.repeat_interleave(group, 0)).sum(1) * scale
            rows.append(row)
    return torch.stack(rows, 1)


def _padded_size(case):
    q, k, q_offsets, k_offsets, _, block = case.args
    most = max(sum(_blocks([b - a for a, b in _spans(o)], block)) for o in (q_offsets, k_offsets))
    return block * q.shape[1] * q.shape[2] * most


_MEANS = "means = [rows.mean(0) for rows in x[begin:end].split(block) if len(rows)]"

SCORES = Exercise(
    id="17.1",
    title="Pooled block scores of a jagged batch",
    name="block_scores",
    cases=_score_cases,
    reference=_scores,
    outputs=(Output("scores", ("head", "query block", "key block"), dtype="float32"),),
    difficulty=1,
    minutes=35,
    forbid=CLOSED,
    hints=(
        "Pool q and k alike: cut each sequence, not the packed tensor, into blocks. What does a last block of 3 rows divide by?",
        "x[begin:end].split(block) gives a sequence's blocks, the last one shorter; rows.mean(0) is then the mean over the rows that exist. Of an empty slice, split gives one empty part.",
        'Begin with torch.full((H, R, W), float("-inf")) and fill out[:, row : row + n, : m] per sequence with the product of [n, H, D] and [m, H, D]; repeat_interleave(H // H_kv, 1) brings the key heads to H.',
    ),
    limits=(
        Limit(
            "pooled first",
            "peak_numel",
            at_most=_padded_size,
            text="no new tensor has more elements than `block * H * D` times the number of blocks",
        ),
    ),
    mutants=(
        Mutant(
            "fp64 back",
            "fp32 is asked for.",
            caught_by="returns",
            edit=('float("-inf"))', 'float("-inf"), dtype=torch.float64)'),
        ),
        Mutant(
            "divides by the block",
            "A tail block was divided by the block's size: its mean is over the rows that exist.",
            edit=(_MEANS, _MEANS.replace("rows.mean(0)", "rows.sum(0) / block")),
        ),
        Mutant(
            "blocks cross sequences",
            "Blocks were cut from the packed rows: they run over the end of a sequence into the next one.",
            edit=(
                _MEANS,
                "means = [x[r : r + block].mean(0) for r in range(begin, end, block)]",
            ),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "the scale is missing",
            "The scores are not multiplied by the scale: the order stays, unless the scale is negative.",
            edit=("torch.einsum('ihd,jhd->hij', a, b) * scale".replace("'", '"'), 'torch.einsum("ihd,jhd->hij", a, b)'),
        ),
        Mutant(
            "heads by remainder",
            "Query head h went to key head h % H_kv. Neighboring query heads share a key head: h // (H // H_kv).",
            edit=("b = b.repeat_interleave(group, 1)", "b = b.repeat(1, group, 1)"),
        ),
        Mutant(
            "zeros where there is no block",
            "Blocks that a sequence does not have scored 0, more than many that it has. They score minus infinity.",
            caught_by="values",
            edit=('float("-inf")', "0.0"),
        ),
        Mutant(
            "sums for means",
            "The rows of a block were added up: whole blocks then win over tails because they are longer.",
            edit=(_MEANS, _MEANS.replace("rows.mean(0)", "rows.sum(0)")),
        ),
        Mutant(
            "all scores first",
            "every score of the sequence was made and then averaged: the same numbers for the price of dense attention.",
            caught_by="pooled first",
            expect="elements",
            recognise=False,
            source="""
def block_scores(q, k, q_offsets, k_offsets, scale, block):
    group, qs, ks = q.shape[1] // k.shape[1], q_offsets.tolist(), k_offsets.tolist()
    sizes = [(-(-(b - a) // block), -(-(d - c) // block)) for a, b, c, d in zip(qs, qs[1:], ks, ks[1:])]
    out = torch.full((q.shape[1], sum(n for n, _ in sizes), max(m for _, m in sizes)), float("-inf"))
    row = 0
    for a, b, c, d, (n, m) in zip(qs, qs[1:], ks, ks[1:], sizes):
        s = torch.einsum("ihd,jhd->hij", q[a:b], k[c:d].repeat_interleave(group, 1)) * scale
        for i in range(n):
            for j in range(m):
                out[:, row + i, j] = s[:, i * block : (i + 1) * block, j * block : (j + 1) * block].mean((1, 2))
        row += n
    return out
""",
        ),
    ),
    variants=(
        """
def block_scores(q, k, q_offsets, k_offsets, scale, block):
    def pool(x, offsets):
        length = offsets.diff().long()
        count = (length + block - 1) // block
        first = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)])
        total = int(offsets[-1])
        seq = torch.repeat_interleave(torch.arange(len(length)), length)
        at = first[seq] + (torch.arange(total) - offsets[seq]) // block
        sums = torch.zeros(int(first[-1]), *x.shape[1:]).index_add_(0, at, x[:total])
        return sums / torch.bincount(at, minlength=int(first[-1]))[:, None, None], first, count
    a, fq, cq = pool(q, q_offsets)
    b, fk, ck = pool(k, k_offsets)
    h = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    out = a.new_full((q.shape[1], len(a), int(ck.max())), -torch.inf)
    for s in range(len(cq)):
        for r in range(int(fq[s]), int(fq[s + 1])):
            out[:, r, : int(ck[s])] = (a[r][None] * b[int(fk[s]) : int(fk[s + 1])][:, h]).sum(2).T * scale
    return out
""",
        """
def block_scores(q, k, q_offsets, k_offsets, scale, block):
    group, rows = q.shape[1] // k.shape[1], []
    q_at, k_at = q_offsets.tolist(), k_offsets.tolist()
    width = max((b - a + block - 1) // block for a, b in zip(k_at, k_at[1:]))
    for s in range(len(q_at) - 1):
        keys = [k[r : min(r + block, k_at[s + 1])].double().mean(0) for r in range(k_at[s], k_at[s + 1], block)]
        for r in range(q_at[s], q_at[s + 1], block):
            mean = q[r : min(r + block, q_at[s + 1])].double().mean(0)
            line = [torch.stack([mean[h] @ key[h // group] for h in range(q.shape[1])]) * scale for key in keys]
            line += [torch.full((q.shape[1],), float("-inf"), dtype=torch.float64)] * (width - len(line))
            rows.append(torch.stack(line, 1))
    return torch.stack(rows, 1).float()
""",
    ),
)

# -- 17.2 --------------------------------------------------------------------------------------------------------------


def _choice_cases(seed):
    g = kinds.generator(seed)

    def case(
        name, heads, rows, width, share, parts, counts=None, always=0.0, ties=False, nan=0.0, wild=False, infinite=False
    ):
        scores = torch.randn(heads, rows, width, generator=g)
        if infinite:  # among the candidates, in this order and in the other
            order = torch.arange(rows)[:, None] + torch.arange(width)
            scores = (
                torch.tensor([math.inf, math.nan, -math.inf, 1.0, math.nan, math.inf])[order % 6]
                .expand_as(scores)
                .clone()
            )
        if ties:
            scores = (2 * scores).round() / 2
        if nan:
            scores[torch.rand(scores.shape, generator=g) < nan] = math.nan
        candidates = torch.ones(rows, width, dtype=torch.bool)
        if counts is not None:
            candidates = torch.arange(width) < torch.tensor(counts)[:, None]
        if wild:  # candidates in the middle, and high or broken scores beside them
            candidates &= torch.rand(rows, width, generator=g) < 0.6
            scores = torch.where(candidates, scores, torch.tensor([9.0, math.nan, math.inf])[torch.arange(width) % 3])
        return Case(name, (scores, candidates, torch.rand(rows, width, generator=g) < always, share, parts))

    return [
        case("one row, half of 6", 1, 1, 6, 1, 2),
        case("half of 5: three", 1, 2, 5, 1, 2),
        case("a quarter of 1, 2, 3, 4, 5, 0", 1, 6, 5, 1, 4, counts=[1, 2, 3, 4, 5, 0]),
        case("7 tenths of 10: seven", 2, 3, 10, 7, 10),
        case("7 twenty-fifths of 25", 1, 2, 25, 7, 25),
        case("7 thirteenths of 13", 1, 2, 13, 7, 13),
        case("many equal scores", 2, 6, 9, 1, 3, ties=True),
        case("all scores equal", 1, 3, 7, 2, 5, ties=True, nan=1.0),
        case("some NaN", 1, 5, 8, 1, 4, nan=0.15),
        case("high and broken scores outside the candidates", 2, 8, 9, 1, 3, wild=True),
        case("always: fewer and more than the share", 2, 8, 8, 1, 4, always=0.3),
        case("always, also where there is no candidate", 2, 8, 9, 1, 5, always=0.5, wild=True),
        case("infinities and NaN among the candidates", 1, 12, 7, 2, 5, infinite=True),
        case("infinities, and blocks that must be chosen", 1, 12, 8, 1, 3, always=0.3, infinite=True),
        case(
            "minus infinity, and some keys are not candidates", 1, 6, 6, 4, 5, counts=[1, 2, 3, 4, 5, 6], infinite=True
        ),
        case("minus infinity behind no candidates", 1, 12, 9, 9, 10, wild=True, infinite=True),
        case("everything", 2, 3, 4, 1, 1),
        case("rows without candidates at both ends", 1, 5, 4, 1, 2, counts=[0, 2, 4, 3, 0], always=0.4),
    ]


def _choice(scores, candidates, always, share, parts):
    heads, rows, width = scores.shape
    starts, columns = [0], []
    for h in range(heads):
        for r in range(rows):
            able = candidates[r].nonzero().flatten().tolist()
            kept = [j for j in able if always[r, j]]
            value = {j: math.inf if scores[h, r, j].isnan() else float(scores[h, r, j]) for j in able}
            count = max(-(-len(able) * share // parts), len(kept))
            columns += sorted(sorted(able, key=lambda j: (j not in kept, -value[j], j))[:count])
            starts.append(len(columns))
    columns += [-1] * (heads * rows * width - len(columns))
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(columns, dtype=torch.int32)


CHOOSE = Exercise(
    id="17.2",
    title="Choose the best blocks, as lists",
    name="choose",
    cases=_choice_cases,
    reference=_choice,
    outputs=(
        Output("starts", ("list",), dtype="int32"),
        Output("columns", ("entry",), dtype="int32"),
    ),
    difficulty=2,
    minutes=40,
    forbid=CLOSED,
    hints=(
        "First the counts: n candidates give (n * share + parts - 1) // parts in whole numbers. Which three rules may change that?",
        "A stable sort by score, descending, keeps the lower block first among equals. A second stable sort by (always, candidate, neither) then moves those of `always` to the front and non-candidates to the end.",
        "Mark the first `count` places of that order in a bool table [H, R, W] with scatter_; chosen.nonzero()[:, 2] are then all columns, list after list and rising; chosen.sum(2) gives the starts.",
    ),
    mutants=(
        Mutant(
            "infinity for always, minus infinity for no candidates",
            "Infinities stand for always and for no candidate: a candidate's own score may be infinite as well.",
            edit=(
                (
                    'torch.where(scores.isnan(), float("inf"), scores)',
                    'torch.where(scores.isnan() | kept, float("inf"), torch.where(candidates, scores, -float("inf")))',
                ),
                ("order = by_score.gather(2, by_tier)", "order = by_score"),
            ),
        ),
        Mutant(
            "NaN before infinity",
            "NaN counts as plus infinity, not as more.",
            edit=('torch.where(scores.isnan(), float("inf"), scores)', "scores"),
        ),
        Mutant(
            "rounded down",
            "The share was rounded down. ceil(n * share / parts) is meant.",
            edit=("(n * share + parts - 1) // parts", "n * share // parts"),
        ),
        Mutant(
            "at least one, also of none",
            "Without candidates a row chooses nothing: its list is empty.",
            edit=("// parts, kept.sum(1))", "// parts, kept.sum(1)).clamp(min=1)"),
        ),
        Mutant(
            "ceil of a float product",
            "The share was rounded up from a float: 25 * (7 / 25) is a little more than 7, and its ceil is 8. Whole numbers are exact.",
            edit=("(n * share + parts - 1) // parts", "(n.double() * (share / parts)).ceil().long()"),
        ),
        Mutant(
            "ceil of an fp32 product",
            "The share was rounded up in fp32: 13 * (7 / 13) is a little more than 7 there, and its ceil is 8. Whole numbers are exact.",
            edit=("(n * share + parts - 1) // parts", "(n * (share / parts)).ceil().long()"),
        ),
        Mutant(
            "share of all blocks",
            "The share is of the candidates, not of all key blocks.",
            edit=("(n * share + parts - 1) // parts", "(0 * n + width * share + parts - 1) // parts"),
        ),
        Mutant(
            "best first",
            "The columns come in the order of their scores. A list must be in ascending order.",
            edit=(
                (
                    "found = chosen.nonzero()[:, 2]",
                    "first = torch.arange(width) < count[:, None].expand(heads, rows, 1)\n    found = order[first & chosen.gather(2, order)]",
                ),
            ),
        ),
        Mutant(
            "higher block among equals",
            "Of equal scores the higher block was chosen; the lower one comes first.",
            edit=(
                "by_score = rank.sort(dim=2, descending=True, stable=True).indices",
                "by_score = width - 1 - rank.flip(2).sort(dim=2, descending=True, stable=True).indices",
            ),
        ),
        Mutant(
            "non-candidates chosen",
            "A block that is no candidate was chosen, for its score was high.",
            edit=(
                "tier = (kept.int() + candidates.int())",
                "tier = kept.int()",
            ),
        ),
        Mutant(
            "always outside the candidates",
            "A block of `always` that is no candidate was chosen.",
            edit=("kept = always & candidates", "kept = always"),
        ),
        Mutant(
            "always forgotten",
            "The blocks of `always` were chosen only where their score was high enough.",
            edit=("tier = (kept.int() + candidates.int())", "tier = candidates.int()"),
        ),
        Mutant(
            "always on top of the share",
            "The blocks of `always` came on top of the share. They count toward it.",
            edit=(
                "torch.maximum((n * share + parts - 1) // parts, kept.sum(1))",
                "torch.minimum((n * share + parts - 1) // parts + kept.sum(1), n)",
            ),
        ),
        Mutant(
            "always cut off by the share",
            "There are more blocks in `always` than the share is; all of them are chosen.",
            edit=(
                "torch.maximum((n * share + parts - 1) // parts, kept.sum(1))",
                "(n * share + parts - 1) // parts",
            ),
        ),
        Mutant(
            "one choice for all heads",
            "All heads have the lists of the first. Each head chooses for itself.",
            edit=(
                'rank = torch.where(scores.isnan(), float("inf"), scores)',
                'rank = torch.where(scores.isnan(), float("inf"), scores)[:1].expand(heads, rows, width)',
            ),
        ),
        Mutant(
            "NaN comes last",
            "NaN counted as minus infinity. A block with NaN must be chosen, so that NaN reaches the output and is noticed.",
            edit=('float("inf"), scores', '-float("inf"), scores'),
        ),
        Mutant(
            "zeros behind the last list",
            "Behind the last list the columns are 0, which is a block. They must be -1.",
            edit=("torch.full((heads * rows * width,), -1,", "torch.full((heads * rows * width,), 0,"),
        ),
    ),
    variants=(
        """
def choose(scores, candidates, always, share, parts):
    heads, rows, width = scores.shape
    starts, columns = [0], []
    for h in range(heads):
        for r in range(rows):
            able = [j for j in range(width) if candidates[r, j]]
            must = [j for j in able if always[r, j]]
            key = {j: float("inf") if scores[h, r, j] != scores[h, r, j] else scores[h, r, j].item() for j in able}
            rest = sorted((j for j in able if j not in must), key=lambda j: key[j], reverse=True)
            want = max(1, -(-share * len(able) // parts)) if able else 0
            picked = must + rest[: max(0, want - len(must))]
            columns.extend(sorted(picked))
            starts.append(len(columns))
    columns += [-1] * (scores.numel() - len(columns))
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(columns, dtype=torch.int32)
""",
        """
def choose(scores, candidates, always, share, parts):
    H, R, W = scores.shape
    x = torch.nan_to_num(scores.double(), nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    j = torch.arange(W)
    level = candidates.long() * (1 + always.long())
    # rank of a block: how many beat it
    higher = (x[..., None, :] > x[..., :, None]) | (x[..., None, :] == x[..., :, None]) & (j[None, :] < j[:, None])
    beats = (level[:, None, :] > level[:, :, None]) | (level[:, None, :] == level[:, :, None]) & higher
    place = beats.sum(-1)
    n, must = candidates.sum(1), (level == 2).sum(1)
    c = torch.stack([-(-n * share // parts), must, (n > 0).long()]).amax(0)
    chosen = (place < c[None, :, None]) & candidates
    flat = chosen.reshape(-1)
    at = torch.where(flat, flat.cumsum(0) - 1, H * R * W)
    columns = torch.full((H * R * W + 1,), -1, dtype=torch.int32).scatter(0, at, j.int().expand(H, R, W).reshape(-1))
    columns[-1] = -1
    starts = torch.nn.functional.pad(chosen.sum(-1).reshape(-1).cumsum(0), (1, 0)).to(torch.int32)
    return starts, columns[:-1]
""",
    ),
)

# -- 17.3 --------------------------------------------------------------------------------------------------------------


def _first(counts):
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(torch.int32)


def _random_lists(g, q_blocks, k_blocks, heads, share, spare):
    """Return (starts, columns, kinds): about ``share`` of all pairs, and ``spare`` entries of rubbish."""
    starts, columns = [0], []
    for _ in range(heads):
        for n, m in zip(q_blocks, k_blocks):
            for _ in range(n):
                columns += (torch.rand(m, generator=g) < share).nonzero().flatten().tolist()
                starts.append(len(columns))
    end = len(columns)
    columns = torch.tensor(columns + [0] * spare, dtype=torch.int32)
    sorts = torch.randint(1, 3, (len(columns),), generator=g).to(torch.int8)
    columns[end:] = torch.randint(-(10**6), 10**6, (len(columns) - end,), generator=g)
    sorts[end:] = 2
    return torch.tensor(starts, dtype=torch.int32), columns, sorts


def _turn_cases(seed):
    def case(name, q_blocks, k_blocks, heads=1, share=0.5, room=None):
        room = sum(n * m for n, m in zip(q_blocks, k_blocks)) * heads + 3 if room is None else room
        g = kinds.generator(1000 * seed + room)
        starts, columns, sorts = _random_lists(g, q_blocks, k_blocks, heads, share, room)
        args = (starts, columns[:room].clone(), sorts[:room].clone(), _first(q_blocks), _first(k_blocks), heads)
        return Case(name, (*args, sum(k_blocks)))

    return [
        case("one sequence, 3 by 3 blocks", [3], [3]),
        case("one sequence, everything chosen, no room behind", [2], [4], share=1.1, room=8),
        case("two sequences of 2 and 3 blocks", [2, 3], [4, 2]),
        case("two heads", [3], [4], heads=2),
        case("lengths 5, 0, 33, 1, 17 in blocks of 8", [1, 0, 5, 1, 3], [3, 1, 5, 0, 1], heads=3),
        case("few chosen: empty lists on both sides", [6, 5], [7, 4], heads=2, share=0.15),
        case("nothing chosen", [3, 2], [3, 2], share=0.0),
        case("a sequence without keys at both ends", [1, 4, 2], [0, 5, 0], heads=2),
        case("a long one: 40 by 30 blocks", [40, 2], [30, 2], heads=2, share=0.3),
    ]


def _turn(starts, columns, sorts, q_first, k_first, heads, k_blocks):
    rows = (len(starts) - 1) // heads
    found = [[] for _ in range(heads * k_blocks)]
    for h in range(heads):
        for b, (q0, q1) in enumerate(_spans(q_first)):
            for r in range(q0, q1):
                for e in range(int(starts[h * rows + r]), int(starts[h * rows + r + 1])):
                    found[h * k_blocks + int(k_first[b]) + int(columns[e])].append((r - q0, int(sorts[e])))
    flat = [pair for one in found for pair in one]
    flat += [(-1, 0)] * (len(columns) - len(flat))
    return (
        torch.tensor([0, *map(len, found)]).cumsum(0).to(torch.int32),
        torch.tensor([i for i, _ in flat], dtype=torch.int32),
        torch.tensor([kind for _, kind in flat], dtype=torch.int8),
    )


_TARGET = "target = head * k_blocks + k_first.long()[seq] + columns"

TURN = Exercise(
    id="17.3",
    title="Transpose the lists",
    name="turn",
    cases=_turn_cases,
    reference=_turn,
    outputs=(
        Output("starts", ("list",), dtype="int32"),
        Output("columns", ("entry",), dtype="int32"),
        Output("kinds", ("entry",), dtype="int8"),
    ),
    difficulty=2,
    minutes=40,
    forbid=(*CLOSED, "host reads"),
    hints=(
        "Give each entry three numbers: the list that it is in (searchsorted over the starts), hence head and block of queries; its sequence (searchsorted over q_first); and the list it must go to.",
        "The new list of an entry is head * k_blocks + k_first[seq] + column. Give rubbish a list behind all others. A stable sort by the new list then keeps the queries rising.",
        "counts = zeros(heads * k_blocks + 1).scatter_add_(0, target, ones); the new starts are their running sum; columns and kinds are permuted by target.argsort(stable=True), rubbish set to -1 and 0 before.",
    ),
    mutants=(
        Mutant(
            "kinds stay where they were",
            "The kinds were not moved with their entries.",
            edit=("new_kinds[order].to(torch.int8)", "new_kinds.to(torch.int8)"),
        ),
        Mutant(
            "columns over all sequences",
            "Columns count blocks of queries over all sequences; they count inside the sequence.",
            edit=("row - q_first.long()[seq], -1", "row, -1"),
        ),
        Mutant(
            "key blocks of all sequences together",
            "A column was taken as a block over all sequences; it counts inside its own: the sequence's first key block is missing.",
            edit=(_TARGET, "target = head * k_blocks + columns.long()"),
        ),
        Mutant(
            "heads together",
            "The entries of all heads went into the lists of the first.",
            edit=(_TARGET, "target = 0 * head + k_first.long()[seq] + columns"),
        ),
        Mutant(
            "rubbish counts",
            "Entries behind the last start were counted as if they were chosen.",
            edit=(
                "target = torch.where(real, target, heads * k_blocks)",
                "target = target.clamp(0, heads * k_blocks - 1)",
            ),
        ),
        Mutant(
            "falling lists",
            "The blocks of queries fall within a list. They must be in ascending order, which fixes the order of the backward's sums.",
            edit=(
                "order = target.argsort(stable=True)",
                "order = entries.flip(0)[target.flip(0).argsort(stable=True)]",
            ),
        ),
        Mutant(
            "a first block goes to the sequence before",
            "A sequence's first block of queries was taken for one of the sequence before it.",
            edit=("q_first[1:].long(), row, right=True", "q_first[1:].long(), row, right=False"),
        ),
        Mutant(
            "starts without the zero",
            "The starts are shifted by one list: the first one begins at 0.",
            edit=("new_starts[1:] = counts[:-1].cumsum(0)", "new_starts[:-1] = counts[:-1].cumsum(0)"),
        ),
        Mutant(
            "reads a number on the host",
            "a number of a tensor is asked for.",
            caught_by="allowed operations",
            edit=("real = entries < starts[-1]", "real = entries < int(starts[-1])"),
            expect="int()",
            recognise=False,
        ),
        Mutant(
            "nonzero",
            "nonzero has a size that depends on numbers.",
            caught_by="allowed operations",
            edit=("real = entries < starts[-1]", "real = entries < starts[-1]\n    real.nonzero()"),
            expect="nonzero",
            recognise=False,
        ),
    ),
    variants=(
        """
def turn(starts, columns, kinds, q_first, k_first, heads, k_blocks):
    # a table of all pairs, read by columns
    rows, cap = (starts.shape[0] - 1) // heads, columns.shape[0]
    e = torch.arange(cap)
    at = torch.zeros(cap + 1, dtype=torch.int64)
    at.scatter_add_(0, starts[1:].long().clamp(max=cap), torch.ones(heads * rows, dtype=torch.int64))
    owner = at.cumsum(0)[:-1].clamp(max=heads * rows - 1)     # how many lists have ended
    real = e < starts[-1]
    r = owner % rows
    s = (r[:, None] >= q_first[None, 1:]).sum(1).clamp(max=q_first.shape[0] - 2)
    k = torch.where(real, k_first[s] + columns, k_blocks).long()
    table = torch.zeros(heads, k_blocks + 1, rows, dtype=torch.int64)
    table.view(-1).scatter_(0, (owner // rows * (k_blocks + 1) + k) * rows + r, torch.where(real, kinds, 0).long())
    table = table[:, :-1]
    some = table > 0
    new = torch.zeros(heads * k_blocks + 1, dtype=torch.int32)
    new[1:] = some.sum(2).view(-1).cumsum(0)
    place = torch.where(some.reshape(-1), some.reshape(-1).cumsum(0) - 1, cap)
    row = torch.arange(rows)
    inside = row - q_first[(row[:, None] >= q_first[None, 1:]).sum(1)]
    inside = inside.expand(heads, k_blocks, rows).reshape(-1)
    cols = torch.full((cap + 1,), -1, dtype=torch.int32).scatter_(0, place, inside.int())
    sort = torch.zeros(cap + 1, dtype=torch.int8).scatter_(0, place, table.reshape(-1).to(torch.int8))
    return new, cols[:-1], sort[:-1]
""",
        """
def turn(starts, columns, kinds, q_first, k_first, heads, k_blocks):
    rows = (len(starts) - 1) // heads
    counts = torch.cat([starts.diff().long(), (len(columns) - starts[-1:]).long()])
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=len(columns))
    garbage = owner == heads * rows
    owner = torch.where(garbage, 0, owner)
    block = owner.remainder(rows)
    seq = torch.bucketize(block, q_first[1:-1].long().contiguous(), right=True)
    goal = owner.div(rows, rounding_mode="floor") * k_blocks + k_first[seq] + columns
    goal = torch.where(garbage, heads * k_blocks, goal)
    key = goal * (rows + 1) + block
    order = torch.sort(key).indices
    sorted_goal = goal[order]
    new = torch.searchsorted(sorted_goal.contiguous(), torch.arange(heads * k_blocks + 1), right=False)
    keep = ~garbage[order]
    cols = torch.where(keep, (block - q_first[seq])[order], -1)
    return new.int(), cols.int(), (kinds[order] * keep).to(torch.int8)
""",
    ),
)

# -- 17.4 --------------------------------------------------------------------------------------------------------------

FAR_BELOW = ["near -30000"]  # alone: its roundings would widen the tolerance of the others
HARD = [kind for kind in kinds.SCORES if kind not in FAR_BELOW]


def _causal_lists(g, len_q, len_kv, heads, share, BM=16, BN=16):
    """Return lists of random candidates under the causal mask, with their kinds; blocks of BM queries and BN keys."""
    starts, columns, sorts = [0], [], []
    for _ in range(heads):
        for n, m in zip(len_q, len_kv):
            found = block_kinds(Band.make(True), n, m, BM, BN)
            for i, row in enumerate(found):
                for j, kind in enumerate(row):
                    if kind != Block.EMPTY and torch.rand(1, generator=g) < share:
                        columns.append(j)
                        sorts.append(2 if kind == Block.FULL and BM * i + BM <= n else 1)
                starts.append(len(columns))
    return (
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(columns, dtype=torch.int32),
        torch.tensor(sorts, dtype=torch.int8),
    )


def _sparse_cases(seed):
    def lists(name, len_q, len_kv, heads, share, **tile):
        g = kinds.generator(sum(name.encode()))  # not of the seed: shapes must not depend on it
        return _causal_lists(g, len_q, len_kv, heads, share, **tile)

    g = kinds.generator(seed)

    def case(name, len_q, len_kv, heads=1, kv_heads=1, share=0.5, poison=None, dim=16, scale=0.25, **tile):
        q = torch.randn(sum(len_q), heads, dim, generator=g)
        k, v = (torch.randn(sum(len_kv), kv_heads, dim, generator=g) + x for x in (0.0, 0.5))
        qo, ko = kinds.offsets(len_q), kinds.offsets(len_kv)
        if poison is not None:
            for x in (k, v):
                kinds.poison(x, slice(int(ko[poison]), int(ko[poison + 1])))
        args = (q, k, v, qo, ko, *lists(name, len_q, len_kv, heads, share, **tile), scale)
        return Case(name, args, tile, offsets=tuple(qo.tolist()))

    def hard(names, len_q, len_kv):
        q, k, qo, ko = kinds.packed(names, len_q, len_kv, 16, 16, g, heads=1)
        said = kinds.SCORES[names[0]].says if len(names) == 1 else f"sequences with hard scores: {', '.join(names)}"
        chosen = lists(said, [len_q] * len(names), [len_kv] * len(names), 1, 1.1)
        v = torch.randn(k.shape, generator=g)
        return Case(said, (q, k, v, qo, ko, *chosen, 0.25), offsets=tuple(qo.tolist()))

    return [
        case("16 queries, 16 keys, the only block", [16], [16], share=1.1),
        case("48 queries and keys, some blocks", [48], [48], share=0.6),
        case("40 queries, 70 keys: tails on both sides", [40], [70], share=0.7),
        case("64 queries, 160 keys: most blocks are FULL", [64], [160], share=0.9),
        case("lengths 5, 0, 33, 1, 17; one without keys", kinds.RAGGED, [17, 4, 40, 0, 21], 2, 2, 0.7),
        case("four heads on two key heads", [40, 20], [60, 20], 4, 2),
        case("few chosen: empty lists", [64], [64], 2, 1, share=0.2),
        case("more queries than keys: rows that see nothing", [50], [20], 1, 1, share=1.1),
        hard(HARD, 5, 36),
        hard(FAR_BELOW, 17, 40),
        case("a neighbor of NaN, which has no queries", [7, 0, 19], [9, 18, 6], 1, 1, 1.1, poison=1),
        case("head dim 32, a scale of its own", [40], [50], 2, 1, 0.9, dim=32, scale=0.1),
        case("32 queries per tile", [70, 20], [90, 35], 2, 1, 0.8, BM=32),
        case("32 keys per block", [40, 20], [110, 35], 2, 1, 0.8, BN=32),
    ]


def _sparse_launch(kernel, q, k, v, q_offsets, k_offsets, starts, columns, sorts, scale, BM=16, BN=16):
    import torch

    lengths = (q_offsets[1:] - q_offsets[:-1]).tolist()
    tiles = torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n, BM)], dtype=torch.int32)
    rows, heads, dim = q.shape
    out, lse = unwritten(rows, heads, dim), unwritten(rows, heads)
    kernel[(len(tiles), heads)](
        q, k, v, q_offsets, k_offsets, tiles, starts, columns, sorts, out, lse, scale, len(tiles), heads,
        GROUP=heads // k.shape[1], D=dim, BM=BM, BN=BN,
    )  # fmt: skip
    return out, lse


def _sparse(q, k, v, q_offsets, k_offsets, starts, columns, sorts, scale, BM=16, BN=16):
    rows, heads, _ = q.shape
    out, lse = torch.zeros_like(q), torch.full((rows, heads), float("-inf"), dtype=q.dtype)
    tiles = (len(starts) - 1) // heads
    for h in range(heads):
        tile, kv = h * tiles, h * k.shape[1] // heads
        for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
            for r in range(q0, q1, BM):
                chosen = columns[int(starts[tile]) : int(starts[tile + 1])].tolist()
                tile += 1
                i = torch.arange(r, min(r + BM, q1))[:, None] - q0
                j = [x for c in chosen for x in range(BN * c, min(BN * c + BN, k1 - k0))]
                if not j:
                    continue
                j = torch.tensor(j)
                seen = j - i <= (k1 - k0) - (q1 - q0)
                s = (q[q0 + i[:, 0], h] @ k[k0 + j, kv].T * scale).masked_fill(~seen, float("-inf"))
                lse[q0 + i[:, 0], h] = torch.logsumexp(s, 1)
                out[q0 + i[:, 0], h] = torch.nan_to_num(torch.softmax(s, 1)) @ v[k0 + j, kv]
    return out, lse


def _sizes(case):
    return case.kwargs.get("BM", 16), case.kwargs.get("BN", 16)


def _sparse_loads(case):
    (starts, columns), dim = case.args[5:7], case.args[0].shape[2]
    rows, keys = _sizes(case)
    return (2 * keys * dim + 8) * len(columns) + (rows * dim + 16) * (len(starts) - 1)


def _sparse_selects(case):
    (starts, columns, sorts), (rows, keys) = case.args[5:8], _sizes(case)
    return 2 * rows * keys * int((sorts == 1).sum()) + 4 * rows * (len(columns) + len(starts) - 1)


_SEEN = "seen = (j[None, :] - i[:, None] <= len_kv - len_q) & (j < len_kv)[None, :]"

SPARSE = Exercise(
    id="17.4",
    title="The forward kernel over lists",
    name="sparse_kernel",
    kind="kernel",
    call=_sparse_launch,
    cases=_sparse_cases,
    reference=_sparse,
    outputs=(Output("out", ("token", "head", "dim")), Output("lse", ("token", "head"))),
    difficulty=2,
    minutes=50,
    tol=3e-6,
    time_limit=20.0,
    forbid=CLOSED,
    hints=(
        "The chapter's loop over entries stays. What changes is the address of a row: row (k_begin + j) of head h // GROUP is at ((k_begin + j) * (H // GROUP) + h // GROUP) * D.",
        "The list of this program: starts[h * T + t] to starts[h * T + t + 1]. Mask only `if` the entry's kind is 1: j - i <= len_kv - len_q, and j < len_kv.",
        "Take exponents from an anchor: m, or 0 while m is -inf. At the end: out = acc / l and lse = m + log(l), or 0 and -inf where l is 0. Store rows i < len_q only.",
    ),
    limits=(
        Limit(
            "loads what is chosen",
            "load_elements",
            at_most=_sparse_loads,
            text="at most `2 * BN * D + 8` elements per list entry, and `BM * D + 16` per program",
        ),
        Limit(
            "masks for PARTIAL only",
            "selects",
            at_most=_sparse_selects,
            text="for PARTIAL entries only: at most 2 blocks of `BM * BN` each, and `4 * BM` lanes more per entry and per program",
        ),
    ),
    mutants=(
        Mutant(
            "list of the wrong head",
            "All heads walk the lists of head 0.",
            edit=(
                ("begin = tl.load(starts_ptr + head * T + tile)", "begin = tl.load(starts_ptr + tile)"),
                ("end = tl.load(starts_ptr + head * T + tile + 1)", "end = tl.load(starts_ptr + tile + 1)"),
            ),
        ),
        Mutant(
            "wrong stride between heads",
            "Keys of one row are H heads apart in this answer; k and v have H // GROUP heads.",
            edit=("(k_begin + j) * (H // GROUP) + head // GROUP", "(k_begin + j) * H + head // GROUP"),
            caught_by="runs",
            expect="outside the tensor",
            recognise=False,
        ),
        Mutant(
            "heads by remainder",
            "Query head h went to key head h % (H // GROUP). Neighboring query heads share a key head.",
            edit=("+ head // GROUP)[:, None]", "+ head % (H // GROUP))[:, None]"),
        ),
        Mutant(
            "columns over all sequences",
            "A column counts key blocks inside its sequence: the sequence's first key row is missing.",
            edit=("((k_begin + j) * (H", "(j * (H"),
            caught_by="values",
        ),
        Mutant(
            "never masked",
            "PARTIAL pairs were not masked: later keys count, and rows behind the sequence.",
            edit=("if tl.load(kinds_ptr + entry) == 1:", "if tl.load(kinds_ptr + entry) == 0:"),
        ),
        Mutant(
            "the diagonal never moves to the left",
            "With more queries than keys the diagonal moves to the left, and the first queries see nothing: len_kv - len_q may be negative.",
            edit=("<= len_kv - len_q) & (j", "<= tl.maximum(len_kv - len_q, 0)) & (j"),
        ),
        Mutant(
            "causal from the top left",
            "The mask is aligned to the top left: the last query must stand at the last key, i + len_kv - len_q.",
            edit=(_SEEN, "seen = (j[None, :] <= i[:, None]) & (j < len_kv)[None, :]"),
        ),
        Mutant(
            "count 0 leaves its rows unwritten",
            "rows whose list is empty were never written.",
            caught_by="returns",
            edit=(
                ("mask=(i < len_q)[:, None])\n    tl.store(lse", "mask=((i < len_q) & (end > begin))[:, None])\n    tl.store(lse"),
            ),
            expect="Nothing was ever stored",
            recognise=False,
        ),
        Mutant(
            "lse of the count 0 rows is 0",
            "A query that sees nothing has the lse 0, as if it had seen one key with the score 0. It is minus infinity.",
            edit=('tl.where(some, l, 1.0)), float("-inf"))', "tl.where(some, l, 1.0)), 0.0)"),
        ),
        Mutant(
            "lse in base 2",
            "The lse is in base 2. The natural logarithm is asked for.",
            edit=("m + tl.log(tl.where(some, l, 1.0))", "(m + tl.log(tl.where(some, l, 1.0))) * 1.4426950408889634"),
        ),
        Mutant(
            "lse without the maximum",
            "The lse is log(l): the maximum is missing.",
            edit=("m + tl.log(tl.where(some, l, 1.0))", "tl.log(tl.where(some, l, 1.0))"),
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
            "not rescaled",
            "The sum and the output are not rescaled when the maximum grows.",
            edit=(("l = l * alpha + tl.sum", "l = l + tl.sum"), ("acc * alpha[:, None]", "acc")),
        ),
        Mutant(
            "all blocks loaded",
            "blocks that the list does not name are loaded.",
            caught_by="loads what is chosen",
            edit=(
                "    for entry in range(begin, end):\n",
                "    for other in range(tl.cdiv(len_kv, BN)):\n"
                "        jj = other * BN + tl.arange(0, BN)\n"
                "        near = ((k_begin + jj) * (H // GROUP) + head // GROUP)[:, None] * D + d[None, :]\n"
                "        acc += 0.0 * tl.sum(tl.where(tl.load(k_ptr + near, mask=(jj < len_kv)[:, None], other=0.0) > 1e30, 1.0, 0.0))\n"
                "    for entry in range(begin, end):\n",
            ),
            expect="elements",
            recognise=False,
        ),
        Mutant(
            "every block masked",
            "FULL pairs are masked, too.",
            caught_by="masks for PARTIAL only",
            edit=("if tl.load(kinds_ptr + entry) == 1:", "if tl.load(kinds_ptr + entry) >= 1:"),
            expect="tl.where",
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
        Mutant(
            "blocks of 16 keys for good",
            "A column counts blocks of BN keys, whatever BN is: here it was multiplied by 16.",
            edit=(
                "tl.load(columns_ptr + entry) * BN + tl.arange(0, BN)",
                "tl.load(columns_ptr + entry) * 16 + tl.arange(0, 16)",
            ),
        ),
        Mutant(
            "tiles of 16 queries for good",
            "A tile has BM queries, whatever BM is.",
            edit=(
                ("i = row0 + tl.arange(0, BM)", "i = row0 + tl.arange(0, 16)"),
                ('m = tl.full((BM,), float("-inf"), tl.float32)', 'm = tl.full((16,), float("-inf"), tl.float32)'),
                ("l = tl.zeros((BM,), tl.float32)", "l = tl.zeros((16,), tl.float32)"),
                ("acc = tl.zeros((BM, D), tl.float32)", "acc = tl.zeros((16, D), tl.float32)"),
            ),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
    ),
    variants=(
        # from the last entry back, in base 2, with a finite floor
        (
            ('m = tl.full((BM,), float("-inf"), tl.float32)', "m = tl.full((BM,), -1e37, tl.float32)"),
            ("    for entry in range(begin, end):\n", "    for back in range(end - begin):\n        entry = end - 1 - back\n"),
            ('input_precision="ieee") * scale', 'input_precision="ieee") * (scale * 1.4426950408889634)'),
            ('anchor = tl.where(m_new == float("-inf"), 0.0, m_new)', "anchor = m_new"),
            ("alpha = tl.exp(m - anchor)", "alpha = tl.math.exp2(m - anchor)"),
            ("p = tl.exp(s - anchor[:, None])", "p = tl.math.exp2(s - anchor[:, None])"),
            ("m + tl.log(tl.where(some, l, 1.0))", "m * 0.6931471805599453 + tl.log(tl.where(some, l, 1.0))"),
        ),
        # causal, so that no query that exists sees a key behind the last one
        ((_SEEN, "seen = j[None, :] - i[:, None] <= len_kv - len_q"),),
        # pointers of the head first, a bias for the mask's rows, stores in the other order
        (
            ("        at = ((k_begin + j) * (H // GROUP) + head // GROUP)[:, None] * D + d[None, :]\n", "        at = k_begin * (H // GROUP) * D + head // GROUP * D + j[:, None] * (H // GROUP * D) + d[None, :]\n"),
            (_SEEN, "last = tl.minimum(i + len_kv - len_q, len_kv - 1)\n            seen = j[None, :] <= last[:, None]"),
            ("    some = l > 0\n    out = acc / tl.where(some, l, 1.0)[:, None]\n", "    some = l > 0\n    out = acc / tl.maximum(l, 1e-37)[:, None]\n"),
        ),
    ),
)  # fmt: skip

# -- 17.5 --------------------------------------------------------------------------------------------------------------


def _kind_cases(seed):
    g = kinds.generator(seed)

    def case(name, problems, block, entries=30):
        """Return random pairs of blocks of (len_q, len_kv, lo, hi) problems that are not empty."""
        found = []
        for n, m, lo, hi in problems:
            for i in range(-(-n // block)):
                for j in range(-(-m // block)):
                    q1, k1 = min(i * block + block, n) - 1, min(j * block + block, m) - 1
                    if j * block - q1 <= hi and k1 - i * block >= lo:
                        found.append((i, j, n, m, lo, hi))
        picked = torch.randint(0, len(found), (entries,), generator=g)
        rows = torch.tensor(found, dtype=torch.int64)[picked]
        return Case(name, (*(c.clone() for c in rows.T), block))

    far = 1 << 30
    return [
        case("no mask, lengths of whole blocks", [(32, 48, -far, far)], 16),
        case("no mask, 40 queries and 48 keys", [(40, 48, -far, far)], 16),
        case("no mask, 32 queries and 35 keys", [(32, 35, -far, far)], 16),
        case("a window of 30 on each side", [(100, 100, -30, 30), (64, 50, -30, 30)], 16, 90),
        case("causal, 70 queries and 90 keys", [(70, 90, -far, 20)], 16, 60),
        case(
            "causal, lengths 5, 0, 33, 1, 17",
            [(n, n, -far, 0) for n in kinds.RAGGED] + [(33, 40, -far, 7)],
            16,
            60,
        ),
        case("lengths around a block of 8", [(n, m, -far, far) for n in (7, 8, 9) for m in (15, 16, 17)], 8, 60),
        case("blocks of 5, causal with a window", [(23, 31, -4, 8), (25, 25, -10, 0)], 5, 90),
        case("a band at the edges of blocks", [(64, 64, x - 32, x) for x in (-1, 0, 1, 15, 16, 17)], 16, 90),
        case("a band wider than the sequence, 20 keys", [(20, 20, -16, 16), (16, 20, -40, 31)], 16, 40),
    ]


def _kinds(i, j, len_q, len_kv, lo, hi, block):
    found = []
    for a, b, n, m, low, high in torch.stack([i, j, len_q, len_kv, lo, hi], 1).tolist():
        rows = torch.arange(a * block, a * block + block)[:, None]
        cols = torch.arange(b * block, b * block + block)[None, :]
        counts = (rows < n) & (cols < m) & (cols - rows >= low) & (cols - rows <= high)
        found.append(2 if counts.all() else 1)
    return torch.tensor(found, dtype=torch.int8)


_WHOLE = "whole = (q_begin + block <= len_q) & (k_begin + block <= len_kv)"

KINDS = Exercise(
    id="17.5",
    title="Bug hunt: the last block counts as full",
    name="pair_kinds",
    hunt=True,
    cases=_kind_cases,
    reference=_kinds,
    outputs=(Output("kinds", ("entry",), dtype="int8"),),
    difficulty=2,
    minutes=10,
    forbid=CLOSED,
    hints=(
        "Take 35 keys in blocks of 16. Which rows of key block 2 exist? What does the function return for it?",
        "A block that begins inside the sequence need not end inside it. And it is not only the keys that have an end.",
        "whole = (q_begin + block <= len_q) & (k_begin + block <= len_kv).",
    ),
    mutants=(
        Mutant(
            "keys only",
            "Only the keys' end is looked at. Queries that do not exist must add nothing to dK and dV, so a pair with a tail of queries is PARTIAL, too.",
            edit=(_WHOLE, "whole = k_begin + block <= len_kv"),
        ),
        Mutant(
            "queries only",
            "Only the queries' end is looked at: keys that do not exist count.",
            edit=(_WHOLE, "whole = q_begin + block <= len_q"),
        ),
        Mutant(
            "every last block is partial",
            "Each sequence's last block counts as PARTIAL, also where all of its rows exist: right results, and a mask that is not needed.",
            edit=(_WHOLE, "whole = (q_begin + block < len_q) & (k_begin + block < len_kv)"),
        ),
        Mutant(
            "one row too many",
            "A block that lacks its last row counts as whole.",
            edit=(_WHOLE, "whole = (q_begin + block - 1 <= len_q) & (k_begin + block - 1 <= len_kv)"),
        ),
        Mutant(
            "whole lengths only",
            "No block of a sequence counts as FULL unless the sequence's length is a multiple of the block.",
            edit=(_WHOLE, "whole = (len_q % block == 0) & (len_kv % block == 0)"),
        ),
        Mutant(
            "the band forgotten",
            "Whole blocks count as FULL although the band cuts them.",
            edit=("full = whole & (k_begin - q_last >= lo) & (k_last - q_begin <= hi)", "full = whole"),
        ),
        Mutant(
            "lo against the farthest pair",
            "The band's lower side was compared with the last key and the first query: the pair nearest to it is first key, last query.",
            edit=("(k_begin - q_last >= lo)", "(k_last - q_begin >= lo)"),
        ),
        Mutant(
            "hi against the nearest pair",
            "The band's upper side was compared with the first key and the last query: the pair nearest to it is last key, first query.",
            edit=("(k_last - q_begin <= hi)", "(k_begin - q_last <= hi)"),
        ),
        Mutant(
            "one end against the other's length",
            "The queries' end was compared with the number of keys, and the keys' with that of queries.",
            edit=(_WHOLE, "whole = (q_begin + block <= len_kv) & (k_begin + block <= len_q)"),
        ),
        Mutant(
            "the last row of the batch",
            "Only the longest sequence's end is an end: each entry has lengths of its own.",
            edit=(_WHOLE, "whole = (q_begin + block <= len_q.max()) & (k_begin + block <= len_kv.max())"),
        ),
    ),
    variants=(
        """
def pair_kinds(i, j, len_q, len_kv, lo, hi, block):
    rows = i[:, None, None] * block + torch.arange(block)[:, None]
    cols = j[:, None, None] * block + torch.arange(block)
    far = cols - rows
    n, m, low, high = (x[:, None, None] for x in (len_q, len_kv, lo, hi))
    good = (rows < n) & (cols < m) & (far >= low) & (far <= high)
    return 1 + good.flatten(1).all(1).to(torch.int8)
""",
        """
def pair_kinds(i, j, len_q, len_kv, lo, hi, block):
    shift = (j - i) * block                      # the band, seen from the pair of blocks
    spare = block - 1
    tight = torch.stack([len_q // block - 1 - i, len_kv // block - 1 - j, hi - shift - spare, shift - spare - lo])
    return torch.where(tight.amin(0) >= 0, 2, 1).char()
""",
    ),
)

# -- 17.6 --------------------------------------------------------------------------------------------------------------


def _pay_cases(seed):
    import random

    rng = random.Random(seed)

    def case(
        name, candidates, key_blocks, heads=1, kv_heads=1, start=None, step=None, lost=None, pool=None, score=None
    ):
        start = rng.randint(200, 900) if start is None else start
        step = rng.randint(700, 1200) if step is None else step
        lost = rng.randint(20, 200) if lost is None else lost
        pool = rng.randint(20, 90) if pool is None else pool
        score = rng.randint(1, 6) if score is None else score
        args = (candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score)
        return Case(name, args)

    return [
        case("one query block, one candidate: it never pays", [1], 1),
        case("one query block, two candidates", [2], 2),
        case("much of the overlap lost", [25] * 25, 25, 2, 2, lost=800, step=900),
        case("8 by 8 blocks", [8] * 8, 8),
        case("64 by 64 blocks, four heads", [64] * 64, 64, 4, 4),
        case("causal: 1 to 20 candidates", list(range(1, 21)), 20, 2, 2),
        case("16 heads on 2 key heads", [30] * 10, 30, 16, 2),
        case("choosing costs more than attention", [3] * 3, 3, 1, 1, step=50, pool=900),
        case("nothing lost, nothing to pool", [10] * 4, 10, lost=0, pool=0, score=0),
        case("a score costs a third of a step", [60] * 20, 60, 2, 1, step=900, score=rng.randint(290, 310)),
        case("some tiles without candidates", [0, 5, 0, 9, 3], 9, 3, 1),
        case("100 candidates: a percent is a block", [100, 100], 100, 2, 1, pool=300),
        case("no queries", [], 7, 4, 2),
        case(
            "one tile of 100 candidates",
            [100],
            100,
            step=1000,
            lost=2500,
            pool=rng.randint(5, 10),
            score=rng.randint(1, 8),
        ),
    ]


def _pay(candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score):
    from fractions import Fraction

    dense = sum(heads * (start + n * step) for n in candidates)
    choice = heads * sum(pool + score * n for n in candidates) + kv_heads * key_blocks * pool
    best = 0
    for r in range(1, 101):
        chosen = [math.ceil(Fraction(r * n, 100)) for n in candidates]
        if choice + sum(heads * (start + c * (step + lost)) for c in chosen) < dense:
            best = r
    return dense, choice, best


_PAYING = "paying = [r for r in range(1, 101) if sparse(r) < dense]"

PREDICT = Exercise(
    id="17.6",
    title="Predict: the ratio at which sparse stops paying",
    name="predict",
    cases=_pay_cases,
    reference=_pay,
    outputs=tuple(Output(name, dtype="int") for name in ("dense", "choice", "percent")),
    difficulty=2,
    minutes=20,
    forbid=CLOSED,
    hints=(
        "dense is a sum over tiles, times heads. In choice, query blocks are pooled once per head and key blocks once per key head.",
        "ceil(r * n / 100) in whole numbers: (r * n + 99) // 100. With floats, 7 / 100 * 100 is a little more than 7.",
        "Try r from 1 to 100 and keep the last one with choice + heads * sum(start + (step + lost) * c) < dense.",
    ),
    mutants=(
        Mutant(
            "ceil of floats",
            "The count was rounded up from a float: 0.07 * 100 is 7.000000000000001, and its ceil is 8.",
            edit=(
                "chosen = [(percent * n + 99) // 100 for n in candidates]",
                "chosen = [-int(-(percent / 100 * n) // 1) for n in candidates]",
            ),
        ),
        Mutant(
            "rounded down",
            "The count was rounded down: a tile with few candidates then chooses nothing.",
            edit=("(percent * n + 99) // 100", "percent * n // 100"),
        ),
        Mutant(
            "no rounding",
            "The count is a fraction of a block; a tile chooses whole blocks.",
            edit=("(percent * n + 99) // 100", "percent * n / 100"),
        ),
        Mutant(
            "pools keys once per query head",
            "Keys were pooled once per query head. Heads that share keys share their pooled keys.",
            edit=("kv_heads * key_blocks", "heads * key_blocks"),
        ),
        Mutant(
            "pools queries once",
            "Query blocks are pooled for each of the query heads.",
            edit=("pool * (heads * len(candidates)", "pool * (len(candidates)"),
        ),
        Mutant(
            "scores once for all heads",
            "Each query head scores its candidates.",
            edit=("score * heads * sum(candidates)", "score * sum(candidates)"),
        ),
        Mutant(
            "scores the whole square",
            "Only candidates are scored, not every key block.",
            edit=("score * heads * sum(candidates)", "score * heads * len(candidates) * key_blocks"),
        ),
        Mutant(
            "scores what is chosen",
            "Every candidate is scored, chosen or not: the choice takes the same time at every ratio.",
            edit=(
                "return choice + heads * sum",
                "return choice + score * heads * (sum(chosen) - sum(candidates)) + heads * sum",
            ),
        ),
        Mutant(
            "choosing is free",
            "The choice's cycles are missing where sparse and dense are compared.",
            edit=("return choice + heads * sum", "return heads * sum"),
        ),
        Mutant(
            "nothing is lost",
            "The cycles that a chosen block loses are missing.",
            edit=("(step + lost) * c", "step * c"),
        ),
        Mutant(
            "lost once per tile",
            "`lost` is per chosen block, not per tile.",
            edit=("start + (step + lost) * c", "start + lost + step * c"),
        ),
        Mutant(
            "equal counts as paying",
            "At the ratio where both take the same cycles sparse no longer pays: fewer is asked for.",
            edit=("sparse(r) < dense", "sparse(r) <= dense"),
        ),
        Mutant(
            "the first ratio that does not pay",
            "This is the first ratio that does not pay, one more than asked for.",
            edit=("max(paying, default=0)", "min(max(paying, default=0) + 1, 100)"),
        ),
    ),
    variants=(
        """
def predict(candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score):
    total = sum(candidates)
    dense = heads * (len(candidates) * start + total * step)
    choice = heads * len(candidates) * pool + kv_heads * key_blocks * pool + heads * total * score
    low, high = 0, 101                                  # the cost never falls with r: bisect
    while high - low > 1:
        r = (low + high) // 2
        blocks = sum(-(-r * n // 100) for n in candidates)
        if choice + heads * (len(candidates) * start + blocks * (step + lost)) < dense:
            low = r
        else:
            high = r
    return dense, choice, low
""",
        """
def predict(candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score):
    n = torch.tensor(candidates, dtype=torch.int64)
    r = torch.arange(1, 101)[:, None]
    chosen = torch.div(r * n + 99, 100, rounding_mode="floor").sum(1)
    saved = heads * (int(n.sum()) * step - chosen * (step + lost))
    choice = pool * (heads * n.numel() + kv_heads * key_blocks) + heads * score * int(n.sum())
    good = int((saved > choice).sum())
    return int(heads * (start * n.numel() + step * n.sum())), choice, good
""",
    ),
)

EXERCISES = [SCORES, CHOOSE, TURN, SPARSE, KINDS, PREDICT]
