"""Checks of chapter 07: packed heads, grouped keys, shared queries with output slots, and their dQ."""

import math

import torch

from jfa.course import kinds
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output, Property


def _spans(offsets):
    bounds = offsets.tolist()
    return list(zip(bounds, bounds[1:]))


# -- 7.1 ---------------------------------------------------------------------------------------------------------------


def _rows_cases(seed):
    shift = seed % 3

    def case(name, first, rows, len_q, group, kv_head):
        return Case(name, (first, rows, len_q, group, kv_head))

    return [
        case("two heads, a whole tile", 0, 8, 5 + shift, 2, 1),
        case("the second tile of nine positions", 4, 6, 9 + shift, 2, 0),
        case("group 1", 4, 4, 9, 1, 3),
        case("a tail tile that ends inside a position's heads", 8, 8, 3 + shift, 3, 2),
        case("a tail tile of one position", 12, 16, 4, 4, 0),
        case("no rows at all", 0, 8, 0, 4, 1),
        case("one row, eight heads", 0, 16, 1, 8, 5 + shift),
        case("far into a long sequence", 960, 64, 200 + shift, 5, 1),
    ]


def _rows(first, rows, len_q, group, kv_head):
    table = [
        (r // group, kv_head * group + r % group, True) if r < len_q * group else (-1, -1, False)
        for r in range(first, first + rows)
    ]
    position, head, exists = zip(*table)
    return torch.tensor(position), torch.tensor(head), torch.tensor(exists)


ROWS = Exercise(
    id="7.1",
    title="Packed rows",
    name="packed_rows",
    cases=_rows_cases,
    reference=_rows,
    outputs=(Output("position", ("row",)), Output("head", ("row",)), Output("exists", ("row",))),
    difficulty=1,
    minutes=15,
    hints=(
        "Number the tile's rows: r = first + 0, 1, 2, ... Neighboring r are the heads of one position.",
        "position = r // group, head inside the group = r % group. The group of key/value head c begins at query head c * group.",
        "exists = r < len_q * group; torch.where(exists, ..., -1) for the other two.",
    ),
    mutants=(
        Mutant(
            "all positions of a head first",
            "Rows are ordered head by head. Here the heads of one position stand side by side.",
            edit=(
                ("r // group, -1)", "r % max(len_q, 1), -1)"),
                ("kv_head * group + r % group", "kv_head * group + r // max(len_q, 1)"),
            ),
        ),
        Mutant(
            "position and head exchanged",
            "Position and head are exchanged: r // group counts positions.",
            edit=(
                ("r // group, -1)", "r % group, -1)"),
                ("kv_head * group + r % group", "kv_head * group + r // group"),
            ),
        ),
        Mutant(
            "the head inside the group",
            "The head is counted inside its group; the query head of all H is asked for.",
            edit=("kv_head * group + r % group", "r % group"),
        ),
        Mutant(
            "heads of a group lie apart",
            "Heads of a group are taken h % H_kv apart. They are neighbors.",
            edit=("kv_head * group + r % group", "kv_head + (r % group) * group"),
        ),
        Mutant(
            "exists by position",
            "It compares rows with positions: a sequence of len_q positions has len_q * group packed rows.",
            edit=("r < len_q * group", "r < len_q"),
        ),
        Mutant(
            "first is a position",
            "`first` is a packed row, not a position.",
            edit=("first + torch.arange(rows)", "first * group + torch.arange(rows)"),
        ),
        Mutant("one row too many", "One packed row too many exists.", edit=("r < len_q * group", "r <= len_q * group")),
    ),
    variants=(
        """
def packed_rows(first, rows, len_q, group, kv_head):
    all_heads = torch.arange(group).repeat(len_q) + kv_head * group
    all_positions = torch.arange(len_q).repeat_interleave(group)
    gone = torch.full((first + rows,), -1)
    heads, positions = torch.cat([all_heads, gone]), torch.cat([all_positions, gone])
    tile = slice(first, first + rows)
    return positions[tile], heads[tile], positions[tile] >= 0
""",
        """
def packed_rows(first, rows, len_q, group, kv_head):
    out = []
    for r in range(first, first + rows):
        i, g = divmod(r, group)
        out.append([i, kv_head * group + g, 1] if i < len_q else [-1, -1, 0])
    out = torch.tensor(out)
    return out[:, 0], out[:, 1], out[:, 2].bool()
""",
    ),
)

# -- 7.2 ---------------------------------------------------------------------------------------------------------------


def _with_kind(kind, len_q, len_kv, heads, kv_heads, dim, g):
    """Return q [total_q, heads, dim], k [total_kv, kv_heads, dim] whose scores are of a kind in every sequence and group."""
    drawn = [kinds.drawn(kind, a, b, dim, 16, g, heads=heads) for a, b in zip(len_q, len_kv)]
    q, k = (torch.cat(parts) for parts in zip(*drawn))
    return q, k[:, :kv_heads].contiguous()


def _grouped_cases(seed):
    g = kinds.generator(seed)

    def case(name, len_q, len_kv, heads=4, kv_heads=2, dim=16, kind=None, scale=None, **tile):
        q, k = _with_kind(kind, len_q, len_kv, heads, kv_heads, dim, g)
        q = q + 0.1 * torch.randn(q.shape, generator=g)
        v = torch.randn(k.shape, generator=g) + 0.5
        return Case(
            name,
            (q, k, v, kinds.offsets(len_q), kinds.offsets(len_kv), scale or 1 / math.sqrt(dim)),
            tile,
            offsets=tuple(kinds.offsets(len_q).tolist()),
        )

    poisoned = case("the neighbor's keys and values are NaN", [4, 0, 9], [5, 18, 6])
    for tensor in poisoned.args[1:3]:
        kinds.poison(tensor, slice(5, 23))
    return [
        case("one sequence, one tile", [3], [9], 2, 1),
        case("a group of three, two key heads", [6, 2], [20, 5], 6, 2),
        case("lengths 5, 0, 33, 1, 17; one without keys", kinds.RAGGED, [17, 4, 20, 0, 3], 4, 2),
        poisoned,
        *(case(found.says, [7, 2], [37, 18], 2, 1, kind=name) for name, found in kinds.SCORES.items()),
        case("as many key heads as query heads, D 32", [5], [18], 2, 2, dim=32),
        case("32 rows per tile", [20, 1], [20, 9], 2, 1, BM=32),
        case(f"32 keys per block, a scale of {kinds.OWN_SCALE}", [3], [40], 2, 1, scale=kinds.OWN_SCALE, BN=32),
    ]


def _grouped_launch(kernel, q, k, v, q_offsets, k_offsets, scale, BM=16, BN=16):
    import torch

    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    lengths = (q_offsets[1:] - q_offsets[:-1]).tolist()
    tiles = torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n * group, BM)], dtype=torch.int32)
    out = torch.full(q.shape, float("nan"))
    kernel[(len(tiles), kv_heads)](
        q, k, v, q_offsets, k_offsets, tiles, out, scale, heads, kv_heads, GROUP=group, D=q.shape[2], BM=BM, BN=BN
    )
    return out


def _grouped(q, k, v, q_offsets, k_offsets, scale, **tile):
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
        if k1 > k0 and q1 > q0:
            keys, values = (x[k0:k1].repeat_interleave(group, 1) for x in (k, v))
            p = torch.softmax(torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * scale, dim=-1)
            out[q0:q1] = torch.einsum("hqk,khd->qhd", p, values)
    return out


def _grouped_loads(case):
    q, k, _, q_offsets, k_offsets, _ = case.args
    group, total = q.shape[1] // k.shape[1], 0
    rows, columns = case.kwargs.get("BM", 16), case.kwargs.get("BN", 16)
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
        total += -(-(q1 - q0) * group // rows) * k.shape[1] * (7 + 2 * -(-(k1 - k0) // columns))
    return total


def _own_values_only(case, out):
    """Check that a weighted mean lies between the smallest and the largest value of its own sequence and key head."""
    q, k, v, q_offsets, k_offsets, _ = case.args
    group = q.shape[1] // k.shape[1]
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(_spans(q_offsets), _spans(k_offsets))):
        if k1 > k0 and q1 > q0 and not v[k0:k1].isnan().any():
            values = v[k0:k1].repeat_interleave(group, 1)
            if bool(((out[q0:q1] < values.amin(0) - 1e-4) | (out[q0:q1] > values.amax(0) + 1e-4)).any()):
                return (
                    f"sequence {b}: a mean lies outside the range of the values it is a mean of; whose values are they?"
                )
    return None


_GROUPED_HEAD = """
@triton.jit
def grouped_kernel(q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, H, H_KV, GROUP: tl.constexpr, D: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr):
    tile, c = tl.program_id(0), tl.program_id(1)
    seq, first = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    q0, q1 = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k0, k1 = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
"""

GROUPED = Exercise(
    id="7.2",
    title="A forward that reads each key once per group",
    name="grouped_kernel",
    kind="kernel",
    call=_grouped_launch,
    cases=_grouped_cases,
    reference=_grouped,
    outputs=(Output("out", ("token", "head", "dim")),),
    difficulty=2,
    minutes=60,
    tol=3e-6,
    time_limit=30.0,
    hints=(
        "Only the first and the last step differ from chapter 04: where the tile's rows lie in q and out. In between a packed row is a row like any other.",
        "Packed row r is position q_begin + r // GROUP and query head kv_head * GROUP + r % GROUP. It exists where r < (q_end - q_begin) * GROUP. Keys and values use kv_head and H_KV.",
        "at = ((q_begin + r // GROUP) * H + kv_head * GROUP + r % GROUP)[:, None] * D + d[None, :] for the load of q and the store of out; then chapter 04's loop with (j * H_KV + kv_head) * D.",
    ),
    properties=(Property("means of their own values", _own_values_only),),
    limits=(
        Limit(
            "keys once per group",
            "loads",
            at_most=_grouped_loads,
            text="at most 2 loads for each block of keys of each program, and 7 more for each program",
        ),
        Limit("tiled", "peak_tile", at_most=512, text="no block larger than 512 elements"),
    ),
    mutants=(
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=('input_precision="ieee") * scale', 'input_precision="ieee") * (1.0 / (D**0.5))'),
        ),
        Mutant(
            "keys of head 0",
            "The keys are those of key head 0, whatever head the program has.",
            edit=("k_ptr + (j[None, :] * H_KV + kv_head) * D", "k_ptr + j[None, :] * H_KV * D"),
        ),
        Mutant(
            "h % H_kv",
            "Query head h reads key head h % H_kv; it should be h // G: neighbors share.",
            edit=("H + kv_head * GROUP + r % GROUP)", "H + kv_head + (r % GROUP) * H_KV)"),
        ),
        Mutant(
            "stored in another order",
            "Queries were read as position r // G, head r % G, and stored head after head.",
            edit=(
                "tl.store(out_ptr + at, out, mask=exists[:, None])",
                "n = tl.maximum(q_end - q_begin, 1)\n    tl.store(out_ptr + ((q_begin + r % n) * H + kv_head * GROUP + r // n)[:, None] * D + d[None, :], out, mask=exists[:, None])",
            ),
            recognise=False,
            expect="out is wrong",
        ),
        Mutant(
            "keys with the query's stride",
            "K and V have H_KV heads per row, not H.",
            caught_by="runs",
            edit=(
                ("(j[None, :] * H_KV + kv_head)", "(j[None, :] * H + kv_head)"),
                ("(j[:, None] * H_KV + kv_head)", "(j[:, None] * H + kv_head)"),
            ),
            expect="k_ptr",
            recognise=False,
        ),
        Mutant(
            "exists by position",
            "rows past the first len_q packed ones are left out.",
            caught_by="returns",
            edit=("r < (q_end - q_begin) * GROUP", "r < q_end - q_begin"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "V's tail not masked",
            "V is read past the sequence's end: 0 * NaN is NaN.",
            caught_by="runs",
            edit=(
                "+ d[None, :],\n            mask=j[:, None] < k_end,\n            other=0.0,\n        )",
                "+ d[None, :]\n        )",
            ),
            expect="v_ptr",
            recognise=False,
        ),
        Mutant(
            "one maximum for the tile",
            "One maximum for all rows of the tile: a row far below it vanishes.",
            edit=("tl.maximum(m, tl.max(s, 1))", "tl.maximum(m, tl.max(tl.max(s, 1), 0))"),
            caught_by="values",
            recognise=False,
            expect="out is wrong",
        ),
        Mutant(
            "not rescaled",
            "acc was summed with an older maximum: multiply it by exp(old - new) when the maximum rises.",
            edit=("acc * alpha[:, None], input", "acc, input"),
        ),
        Mutant(
            "no keys gives NaN",
            "0 / 0 for a sequence without keys.",
            caught_by="returns",
            edit=("tl.where(l > 0, l, 1.0)[:, None]", "l[:, None]"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "scale twice",
            "The scores were scaled twice.",
            edit=(
                's = tl.dot(q, kt, input_precision="ieee") * scale',
                's = tl.dot(q, kt, input_precision="ieee") * scale * scale',
            ),
        ),
        Mutant(
            "a loop over the heads",
            "right, but keys and values are loaded again for each head of the group.",
            caught_by="keys once per group",
            source=_GROUPED_HEAD
            + """
    d = tl.arange(0, D)
    r = first + tl.arange(0, BM)
    for g in range(GROUP):
        mine = (r % GROUP == g) & (r < (q1 - q0) * GROUP)
        at = ((q0 + r // GROUP) * H + c * GROUP + g)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + at, mask=mine[:, None], other=0.0)
        m, l, acc = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)
        for start in range(k0, k1, BN):
            j = start + tl.arange(0, BN)
            kt = tl.load(k_ptr + (j[None, :] * H_KV + c) * D + d[:, None], mask=j[None, :] < k1, other=0.0)
            v = tl.load(v_ptr + (j[:, None] * H_KV + c) * D + d[None, :], mask=j[:, None] < k1, other=0.0)
            s = tl.where(j[None, :] < k1, tl.dot(q, kt, input_precision="ieee") * scale, float("-inf"))
            new = tl.maximum(m, tl.max(s, 1))
            p, a = tl.exp(s - new[:, None]), tl.exp(m - new)
            l, acc, m = l * a + tl.sum(p, 1), tl.dot(p, v, acc * a[:, None], input_precision="ieee"), new
        tl.store(out_ptr + at, acc / tl.maximum(l, 1e-30)[:, None], mask=mine[:, None])
""",
            expect="2 loads",
            recognise=False,
        ),
    ),
    variants=(
        _GROUPED_HEAD
        + """
    r, d = first + tl.arange(0, BM), tl.arange(0, D)
    there = (r < (q1 - q0) * GROUP)[:, None]
    # with G heads in a row, packed row r of a group lies r // G * (H - G) + r elements of D behind the group's first
    where = (q0 * H + c * GROUP + r + r // GROUP * (H - GROUP))[:, None] * D + d[None, :]
    q = tl.load(q_ptr + where, there, 0.0) * (scale * 1.4426950408889634)
    m, l, acc = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)
    for n in range(tl.cdiv(k1 - k0, BN)):
        j = (n * BN + tl.arange(0, BN))[:, None]
        at = ((k0 + j) * H_KV + c) * D + d[None, :]
        k = tl.load(k_ptr + at, j < k1 - k0, 0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.where(n * BN + tl.arange(0, BN)[None, :] < k1 - k0, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p, a = tl.exp2(s - new[:, None]), tl.exp2(m - new)
        l = l * a + tl.sum(p, 1)
        acc = acc * a[:, None] + tl.dot(p, tl.load(v_ptr + at, j < k1 - k0, 0.0), input_precision="ieee")
        m = new
    tl.store(out_ptr + where, acc / tl.maximum(l, 1e-30)[:, None], there)
""",
        (  # rows of a sequence in another order, the same one for reading and writing: head after head
            (
                "(q_begin + r // GROUP) * H + kv_head * GROUP + r % GROUP)",
                "(q_begin + r % n) * H + kv_head * GROUP + tl.minimum(r // n, GROUP - 1))",
            ),
            ("    d = tl.arange(0, D)\n", "    d = tl.arange(0, D)\n    n = tl.maximum(q_end - q_begin, 1)\n"),
            ("tl.where(l > 0, l, 1.0)[:, None]", "tl.where(k_end > k_begin, l, 1.0)[:, None]"),
        ),
    ),
)

# -- 7.3 ---------------------------------------------------------------------------------------------------------------


def _pooled_cases(seed):
    g = kinds.generator(seed)

    def case(name, len_q, lengths, slots, rows, heads=1, dim=16, kind=None, scale=None, **tile):
        drawn = [kinds.drawn(kind, len_q, n, dim, 16, g, heads=heads) for n in lengths]
        q = drawn[0][0] + 0.1 * torch.randn(len_q, heads, dim, generator=g)
        k = torch.cat([k for _, k in drawn])
        v = torch.randn(k.shape, generator=g) + 0.5
        tail = torch.full((3, heads, dim), math.nan)
        out = torch.randn(rows, heads, dim, generator=g)
        args = (
            q,
            torch.cat([k, tail]),
            torch.cat([v, tail]),
            kinds.offsets(lengths),
            torch.tensor(slots, dtype=torch.int32),
            out,
            scale or 1 / math.sqrt(dim),
        )
        return Case(name, args, tile)

    # sequence 1 answers nowhere, so nothing but a leak can carry its NaN into a result
    poisoned = case("the neighbor is NaN and answers nowhere", 2, [5, 18, 6], [0, -1, 2], 4)
    for tensor in poisoned.args[1:3]:
        kinds.poison(tensor, slice(5, 23))
    return [
        case("two sequences, one after the other", 2, [3, 20], [0, 2], 4),
        case("between other rows", 3, [7, 4], [5, 1], 9, heads=2),
        case("a slot before the first row, one behind the last", 2, [5, 9, 4, 6], [-1, 3, 7, 100], 8),
        case("the last slot that fits", 4, [6, 5], [4, 0], 8),
        case("lengths 5, 0, 33, 1, 17", 3, kinds.RAGGED, [12, 9, 6, 3, 0], 16),
        poisoned,
        *(case(found.says, 4, [37, 18], [0, 4], 8, kind=name) for name, found in kinds.SCORES.items()),
        case("16 queries, D 32", 16, [18], [1], 17, dim=32),
        case("32 queries per tile", 20, [18], [1], 24, BL=32),
        case(f"32 keys per block, a scale of {kinds.OWN_SCALE}", 2, [40], [1], 4, scale=kinds.OWN_SCALE, BN=32),
    ]


def _pooled_launch(kernel, q, k, v, k_offsets, slots, out, scale, BL=16, BN=16):
    out = out.clone()
    kernel[(len(slots), q.shape[1])](
        q, k, v, k_offsets, slots, out, scale, q.shape[0], out.shape[0], q.shape[1], D=q.shape[2], BL=BL, BN=BN
    )
    return out


def _pooled(q, k, v, k_offsets, slots, out, scale, **tile):
    out = out.clone()
    for (begin, end), slot in zip(_spans(k_offsets), slots.tolist()):
        if 0 <= slot <= len(out) - len(q):
            p = torch.softmax(torch.einsum("qhd,khd->hqk", q, k[begin:end]) * scale, dim=-1)
            out[slot : slot + len(q)] = torch.einsum("hqk,khd->qhd", p, v[begin:end]) if end > begin else 0.0
    return out


def _pooled_loads(case):
    (q, _, _, k_offsets, *_), block = case.args, case.kwargs.get("BN", 16)
    return q.shape[1] * sum(4 + 2 * -(-(end - begin) // block) for begin, end in _spans(k_offsets))


def _untouched(case, out):
    """Check that rows that no slot covers keep what they held."""
    q, _, _, _, slots, before, _ = case.args
    covered = torch.zeros(len(before), dtype=torch.bool)
    for slot in slots.tolist():
        if 0 <= slot <= len(before) - len(q):
            covered[slot : slot + len(q)] = True
    changed = (out != before).flatten(1).any(1) & ~covered
    return f"row {int(changed.nonzero()[0])} of out belongs to no slot and was written." if changed.any() else None


POOLED = Exercise(
    id="7.3",
    title="One query for all, and an answer where it is wanted",
    name="pooled_kernel",
    kind="kernel",
    call=_pooled_launch,
    cases=_pooled_cases,
    reference=_pooled,
    outputs=(Output("out", ("row", "head", "dim"), may_alias=True),),
    difficulty=2,
    minutes=55,
    tol=3e-6,
    time_limit=30.0,
    hints=(
        "The query's rows are i * H + head, whatever b is. Only the output rows depend on b: slots[b] + i.",
        "A slot is good if slot >= 0 and slot + LQ <= ROWS. In a kernel an `if` on a scalar is fine: compute and store inside it.",
        "tl.store(out_ptr + ((slot + i[:, None]) * H + head) * D + d[None, :], acc / tl.where(l > 0, l, 1.0)[:, None], mask=i[:, None] < LQ), inside `if (slot >= 0) & (slot + LQ <= ROWS):`.",
    ),
    properties=(Property("other rows untouched", _untouched),),
    limits=(
        Limit(
            "query read in place",
            "loads",
            at_most=_pooled_loads,
            text="at most 2 loads for each block of keys and 4 more for each program",
        ),
        Limit("tiled", "peak_tile", at_most=512, text="no block larger than 512 elements"),
    ),
    mutants=(
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=('input_precision="ieee") * scale', 'input_precision="ieee") * (1.0 / (D**0.5))'),
        ),
        Mutant(
            "keys of the first head",
            "The keys are those of head 0, whatever head the program has.",
            edit=("k_ptr + (j[None, :] * H + head) * D", "k_ptr + j[None, :] * H * D"),
        ),
        Mutant(
            "the slots are ignored",
            "Sequence b is stored at row b * LQ, whatever its slot says.",
            edit=("((slot + i[:, None])", "((b * LQ + i[:, None])"),
            recognise=False,
            expect="out is wrong",
        ),
        Mutant(
            "one row for each sequence",
            "The outputs overlap: sequence b begins at row slot + b instead of slot, and has LQ rows.",
            caught_by="runs",
            edit=("((slot + i[:, None])", "((slot + b + i[:, None])"),
            expect="out_ptr",
            recognise=False,
        ),
        Mutant(
            "a query for each sequence",
            "The query is read at b * LQ, as if each sequence had its own.",
            caught_by="runs",
            edit=("tl.load(q_ptr + (i[:, None] * H", "tl.load(q_ptr + ((b * LQ + i[:, None]) * H"),
            expect="q_ptr",
            recognise=False,
        ),
        Mutant(
            "no test of the slot",
            "A slot outside of out was written.",
            caught_by="runs",
            edit=("(slot >= 0) & (slot + LQ <= ROWS)", "slot + LQ <= ROWS"),
            expect="out_ptr",
            recognise=False,
        ),
        Mutant(
            "the last slot is refused",
            "A slot that ends exactly with out is inside it.",
            edit=("slot + LQ <= ROWS", "slot + LQ < ROWS"),
        ),
        Mutant(
            "slots cut to fit",
            "A slot that is partly outside was written in part. It must not be written at all.",
            edit=(
                ("(slot >= 0) & (slot + LQ <= ROWS)", "(slot >= 0) & (slot < ROWS)"),
                ("out, mask=mine)", "out, mask=mine & (slot + i[:, None] < ROWS))"),
            ),
            recognise=False,
            expect="out is wrong",
        ),
        Mutant(
            "no keys, no answer",
            "A sequence without keys stores zeros; here its slot was left as it was.",
            edit=("(slot >= 0) & (slot + LQ <= ROWS)", "(slot >= 0) & (slot + LQ <= ROWS) & (end > begin)"),
        ),
        Mutant(
            "stores all BL rows",
            "rows past LQ were stored over those of another sequence.",
            caught_by="runs",
            edit=("out, mask=mine)", "out)"),
            expect="out_ptr",
            recognise=False,
        ),
        Mutant(
            "not rescaled",
            "acc was summed with an older maximum: multiply it by exp(old - new) when the maximum rises.",
            edit=("acc * alpha[:, None], input", "acc, input"),
        ),
        Mutant(
            "divided by the batch",
            "The answers were divided by the number of sequences: pooling is no mean over the batch.",
            edit=(
                "out = acc / tl.where(l > 0, l, 1.0)[:, None]",
                "out = acc / tl.where(l > 0, l, 1.0)[:, None] / tl.num_programs(0)",
            ),
        ),
        Mutant(
            "no keys gives NaN",
            "0 / 0 for a sequence without keys.",
            caught_by="returns",
            edit=("tl.where(l > 0, l, 1.0)[:, None]", "l[:, None]"),
            expect="NaN",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "    if (slot >= 0) & (slot + LQ <= ROWS):\n",
                "    good = (slot >= 0) & (slot + LQ <= ROWS)\n    end = tl.where(good, end, begin)\n    if True:\n",
            ),
            ("out, mask=mine)", "out, mask=mine & good)"),
        ),
        (
            ("m_new = tl.maximum(m, tl.max(s, 1))", "m_new = tl.maximum(tl.max(s, 1), m)"),
            (
                "if (slot >= 0) & (slot + LQ <= ROWS):",
                "last = ROWS - LQ\n    if slot == tl.minimum(tl.maximum(slot, 0), last):",
            ),
        ),
    ),
)

# -- 7.4 ---------------------------------------------------------------------------------------------------------------


def _traffic_cases(seed):
    g = kinds.generator(seed)
    many = torch.randint(0, 300, (64,), generator=g).tolist()

    def case(name, way, lengths, block=16, workers=8, len_q=4, heads=2, dim=16):
        return Case(name, (way, lengths, block, workers, len_q, heads, dim))

    ways = ("contended", "partials", "resident")
    return [
        *(case(f"{way}, lengths 20 and 5", way, [20 + seed % 9, 5]) for way in ways),
        *(case(f"{way}, lengths 5, 0, 33, 1, 17", way, kinds.RAGGED, len_q=3, heads=1) for way in ways),
        *(case(f"{way}, 64 sequences", way, many, block=64, workers=16, len_q=32, heads=4, dim=128) for way in ways),
        *(case(f"{way}, fewer sequences than workers", way, [40, 0, 0, 90], workers=132) for way in ways),
        *(case(f"{way}, no keys at all", way, [0, 0, 0]) for way in ways),
        *(case(f"{way}, lengths around a block", way, kinds.around_block(16), workers=3) for way in ways),
    ]


def _traffic(way, lengths, block, workers, len_q, heads, dim):
    one, some = len_q * heads * dim, [n for n in lengths if n]
    tiles = sum(math.ceil(n / block) for n in some)
    if way == "contended":
        return tiles, 0, tiles * one
    partials = {"partials": len(some), "resident": min(workers, len(some))}[way]
    return 0, partials * one, (partials + 1) * one


TRAFFIC = Exercise(
    id="7.4",
    title="Predict: who adds how often, and what it costs",
    name="dq_traffic",
    cases=_traffic_cases,
    reference=_traffic,
    outputs=tuple(Output(name, dtype="int") for name in ("adds", "extra", "moved")),
    difficulty=1,
    minutes=20,
    hints=(
        "All of dQ is Lq * heads * dim elements. Each contribution is a whole dQ. So count contributions.",
        "Contended: one contribution for each tile of keys. Partials: one for each sequence with keys. Resident: one for each worker that gets a sequence.",
        "contended: (tiles, 0, tiles * one). Otherwise with n partials: (0, n * one, n * one + one); n is at most the number of workers in the resident way.",
    ),
    mutants=(
        Mutant(
            "a sequence adds once",
            "Contended, each tile of keys adds, not each sequence.",
            edit=("sum(-(-n // block) for n in lengths)", "with_keys"),
        ),
        Mutant(
            "drops the last tile",
            "The last tile of a sequence, if it is not full, adds as well.",
            edit=("-(-n // block) for n", "n // block for n"),
        ),
        Mutant(
            "sequences without keys leave partials",
            "A sequence without keys leaves no partial.",
            edit=("sum(n > 0 for n in lengths)", "len(lengths)"),
        ),
        Mutant(
            "every worker leaves a partial",
            "Workers that get no sequence leave nothing.",
            edit=("min(workers, with_keys)", "workers"),
        ),
        Mutant(
            "the final dQ is not counted",
            "The pass over the partials writes dQ, too.",
            edit=("partials * one + one", "partials * one"),
        ),
        Mutant(
            "the heads are forgotten", "Every head has a dQ of its own.", edit=("len_q * heads * dim", "len_q * dim")
        ),
        Mutant(
            "adds of all elements",
            "`adds` counts what one element of dQ gets, not all of them together.",
            edit=("return tiles, 0, tiles * one", "return tiles * one, 0, tiles * one"),
        ),
        Mutant(
            "partials by tile",
            "The partials are one for each sequence, not one for each tile of keys.",
            edit=("partials = with_keys if", "partials = sum(-(-n // block) for n in lengths) if"),
        ),
    ),
    variants=(
        """
def dq_traffic(way, lengths, block, workers, len_q, heads, dim):
    tiles = [(n + block - 1) // block for n in lengths if n > 0]
    count = {"contended": sum(tiles), "partials": len(tiles), "resident": min(len(tiles), workers)}[way]
    each = len_q * dim * heads
    atomic = way == "contended"
    return count * atomic, count * each * (not atomic), count * each + each * (not atomic)
""",
        """
def dq_traffic(way, lengths, block, workers, len_q, heads, dim):
    n = torch.tensor(lengths)
    one = torch.tensor(len_q * heads * dim)
    if way == "contended":
        adds = torch.div(n + block - 1, block, rounding_mode="floor").sum()
        return adds, 0, adds * one
    k = (n > 0).sum()
    k = k.clamp(max=workers) if way == "resident" else k
    return 0, k * one, (k + 1) * one
""",
    ),
)

# -- 7.5 ---------------------------------------------------------------------------------------------------------------


def _sum_cases(seed):
    g = kinds.generator(seed)

    def case(name, parts, n=32, lift=1.0, factor=1.0, **block):
        return Case(name, ((factor * (lift + 0.25 * torch.randn(parts, n, generator=g))).to(torch.bfloat16),), block)

    return [
        case("three parts", 3),
        case("40 parts of both signs", 40, lift=0.0),
        case("512 parts of one sign", 512),
        case("512 parts, large numbers", 512, n=16, factor=kinds.LARGE_BF16),
        case("one part", 1, n=16),
        case("300 small parts behind a large one", 300, n=16, lift=1.0),
        case("64 elements per program", 5, n=128, block=64),
    ]


def _sum_launch(kernel, part, block=16):
    import torch

    dq = torch.full((part.shape[1],), float("nan"))
    kernel[(part.shape[1] // block,)](part, dq, part.shape[0], part.shape[1], BLOCK=block)
    return dq


SUM = Exercise(
    id="7.5",
    title="Bug hunt: the gradient that stops growing",
    name="sum_kernel",
    kind="kernel",
    hunt=True,
    call=_sum_launch,
    cases=_sum_cases,
    reference=lambda part, block=16: part.sum(0),
    outputs=(Output("dq", ("element",)),),
    schedules=(("lazy", 1), ("random", 1)),
    difficulty=2,
    minutes=15,
    tol=2e-6,
    time_limit=30.0,
    hints=(
        "bf16 has 8 bits of mantissa. Add 1 to 256 in bf16: what is the result?",
        "It is not the parts that are too coarse, it is the place where they are added up.",
        "total = tl.zeros((BLOCK,), tl.float32), and total += tl.load(...).to(tl.float32). No rounding on the way.",
    ),
    limits=(
        Limit(
            "each part once",
            "loads",
            at_most=lambda case: case.args[0].shape[0] * (case.args[0].shape[1] // case.kwargs.get("block", 16)),
            text="at most as many loads as there are parts, for each program",
        ),
    ),
    mutants=(
        Mutant(
            "wider sum, rounded each time",
            "The sum is fp32 in name: it is still rounded to bf16 after each part.",
            edit=(
                "total += tl.load(part_ptr + b * N + at).to(tl.float32)",
                "total = (total + tl.load(part_ptr + b * N + at).to(tl.float32)).to(tl.bfloat16).to(tl.float32)",
            ),
            recognise=False,
            expect="dq is wrong",
        ),
        Mutant(
            "sum in fp16",
            "fp16 has more digits, and ends at 65,504: gradients that bf16 holds become infinite.",
            caught_by="values",
            edit=(
                ("tl.zeros((BLOCK,), tl.float32)", "tl.zeros((BLOCK,), tl.float16)"),
                (
                    "total += tl.load(part_ptr + b * N + at).to(tl.float32)",
                    "total = (total.to(tl.float32) + tl.load(part_ptr + b * N + at).to(tl.float32)).to(tl.float16)",
                ),
                ("dq_ptr + at, total)", "dq_ptr + at, total.to(tl.float32))"),
            ),
            recognise=False,
            expect="dq is wrong",
        ),
        Mutant(
            "widened after the loop",
            "Only the finished sum was widened: what bf16 lost on the way does not come back.",
            edit=(
                ("tl.zeros((BLOCK,), tl.float32)", "tl.zeros((BLOCK,), tl.bfloat16)"),
                (
                    "total += tl.load(part_ptr + b * N + at).to(tl.float32)",
                    "total = total + tl.load(part_ptr + b * N + at)",
                ),
                ("dq_ptr + at, total)", "dq_ptr + at, total.to(tl.float32))"),
            ),
        ),
        Mutant(
            "sixteen at a time",
            "Sums of 16 in bf16, then fp32: the loss is smaller, and it is still there.",
            edit=(
                (
                    "    total = tl.zeros((BLOCK,), tl.float32)\n",
                    "    total = tl.zeros((BLOCK,), tl.float32)\n    few = tl.zeros((BLOCK,), tl.bfloat16)\n",
                ),
                (
                    "        total += tl.load(part_ptr + b * N + at).to(tl.float32)",
                    "        few = (few + tl.load(part_ptr + b * N + at)).to(tl.bfloat16)\n        if b % 16 == 15:\n            total += few.to(tl.float32)\n            few = tl.zeros((BLOCK,), tl.bfloat16)",
                ),
                ("dq_ptr + at, total)", "dq_ptr + at, total + few.to(tl.float32))"),
            ),
            recognise=False,
            expect="dq is wrong",
        ),
        Mutant(
            "the mean",
            "The sum was divided by the number of parts. Each sequence's share counts in full.",
            edit=("dq_ptr + at, total)", "dq_ptr + at, total / parts)"),
        ),
        Mutant(
            "scaled down first",
            "Each part was made smaller before it was added in bf16, and the sum larger at the end: bf16 loses the same digits at any size.",
            edit=(
                ("tl.zeros((BLOCK,), tl.float32)", "tl.zeros((BLOCK,), tl.bfloat16)"),
                (
                    "total += tl.load(part_ptr + b * N + at).to(tl.float32)",
                    "total = (total + tl.load(part_ptr + b * N + at) / 512).to(tl.bfloat16)",
                ),
                ("dq_ptr + at, total)", "dq_ptr + at, total.to(tl.float32) * 512)"),
            ),
            recognise=False,
            expect="dq is wrong",
        ),
        Mutant(
            "the last part is left out",
            "One part is missing.",
            edit=("range(parts)", "range(parts - 1)"),
            recognise=False,
            expect="dq is wrong",
        ),
        Mutant("the last part wins", "Only the last part arrives.", edit=("total += tl", "total = tl")),
    ),
    variants=(
        """
@triton.jit
def sum_kernel(part_ptr, dq_ptr, parts, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high = tl.zeros((BLOCK,), tl.float32)
    low = tl.zeros((BLOCK,), tl.float32)              # Kahan: what the sum could not hold
    for b in range(parts):
        y = tl.load(part_ptr + b * N + at).to(tl.float32) - low
        t = high + y
        low = (t - high) - y
        high = t
    tl.store(dq_ptr + at, high)
""",
        """
@triton.jit
def sum_kernel(part_ptr, dq_ptr, parts, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, 4):
        b = start + tl.arange(0, 4)[:, None]
        block = tl.load(part_ptr + b * N + at[None, :], mask=b < parts, other=0.0)
        total += tl.sum(block.to(tl.float32), 0)
    tl.store(dq_ptr + at, total)
""",
    ),
)

# -- 7.6 ---------------------------------------------------------------------------------------------------------------


def _resident_cases(seed):
    g = kinds.generator(seed)

    def case(name, len_q, lengths, workers, dim=16, kind=None, scale=None):
        drawn = [kinds.drawn(kind, len_q, n, dim, 16, g) for n in lengths]
        q = drawn[0][0] + 0.1 * torch.randn(len_q, dim, generator=g)
        k = torch.cat([*(k for _, k in drawn), torch.full((3, dim), math.nan)])
        v = torch.randn(k.shape, generator=g)
        v[len(k) - 3 :] = math.nan
        dout = torch.randn(len(lengths), len_q, dim, generator=g) + 0.3
        scale, offsets = scale or 1 / math.sqrt(dim), kinds.offsets(lengths)
        lse, delta = torch.full((len(lengths), len_q), -math.inf), torch.zeros(len(lengths), len_q)
        for b, (begin, end) in enumerate(_spans(offsets)):
            if end > begin:
                s = q.double() @ k[begin:end].double().T * scale
                lse[b] = torch.logsumexp(s, 1).float()
                delta[b] = ((torch.softmax(s, 1) @ v[begin:end].double()) * dout[b]).sum(1).float()
        return Case(name, (q, k, v, dout, lse, delta, offsets, scale, workers))

    return [
        case("two sequences, one worker", 2, [3, 20], 1),
        case("five sequences, two workers", 4, [9, 4, 18, 2, 7], 2),
        case("lengths 5, 0, 33, 1, 17, three workers", 3, kinds.RAGGED, 3),
        case("more workers than sequences", 16, [6, 5], 4),
        case("only sequences without keys", 2, [0, 0], 2),
        case("D 32, seven workers, 20 sequences", 5, [(7 * b) % 23 for b in range(20)], 7, dim=32),
        case(f"a scale of {kinds.OWN_SCALE}", 2, [20, 3], 2, scale=kinds.OWN_SCALE),
        case("scores rise from -100 to 100 along the keys", 3, [37, 18], 2, kind="rising"),
        case("all scores near -400", 3, [37, 18], 2, kind="near -400"),
        case("one score of 95 among small ones", 3, [37, 18], 2, kind="above 90"),
    ]


def _resident(q, k, v, dout, lse, delta, k_offsets, scale, workers):
    dq = torch.zeros_like(q)
    for b, (begin, end) in enumerate(_spans(k_offsets)):
        if end > begin:
            p = torch.exp(q @ k[begin:end].T * scale - lse[b][:, None])
            dq += p.mul(dout[b] @ v[begin:end].T - delta[b][:, None]) @ k[begin:end] * scale
    return dq


RESIDENT = Exercise(
    id="7.6",
    title="The resident dQ",
    name="resident_dq",
    where="emulator",
    cases=_resident_cases,
    reference=_resident,
    outputs=(Output("dq", ("row", "dim")),),
    schedules=(("lazy", 1), ("random", 1), ("random", 2)),
    difficulty=3,
    minutes=95,
    tol=2e-5,
    time_limit=40.0,
    hints=(
        "First kernel: load q once, dq = zeros; for b in range(worker, B, workers): this sequence's dout, lse, delta; over its blocks of keys dq += block_dq(...). After the loop store dq as partial `worker`.",
        "Rows i >= LQ and keys past `end` are loaded as 0; a worker without a sequence stores zeros. dout of sequence b begins at b * LQ * D, lse and delta at b * LQ.",
        "Second kernel, one program for each row: total = 0; for w in range(workers): total += partial[w, row]; store. The host allocates partials [workers, LQ, D] and launches both.",
    ),
    limits=(
        Limit(
            "few partials",
            "store_elements",
            at_most=lambda case: (case.args[8] + 1) * case.args[0].numel(),
            text="at most `W * LQ * D + LQ * D` elements stored",
        ),
        Limit(
            "kernels multiply",
            "dots",
            at_least=lambda case: sum(-(-(e - b) // 16) for b, e in _spans(case.args[6])),
            text="the kernels make the products, at least one per block of keys",
        ),
    ),
    mutants=(
        Mutant(
            "no kernels",
            "right numbers, but torch makes them: nothing stays on a chip.",
            caught_by="kernels multiply",
            source="""
def resident_dq(q, k, v, dout, lse, delta, k_offsets, scale, workers):
    dq, o = torch.zeros_like(q), k_offsets.tolist()
    for b in range(len(o) - 1):
        keys, values = k[o[b] : o[b + 1]], v[o[b] : o[b + 1]]
        p = torch.exp(q @ keys.T * scale - lse[b][:, None])
        dq += (p * (dout[b] @ values.T - delta[b][:, None])) @ keys * scale
    return dq
""",
            expect="the kernels make the products",
            recognise=False,
        ),
        Mutant(
            "atomics",
            "added with atomics: the sum depends on who comes first.",
            caught_by="same bits",
            edit=(
                (
                    "    tl.store(partial_ptr + worker * LQ * D + row, dq, mask=i[:, None] < LQ)",
                    "    tl.atomic_add(partial_ptr + row, dq, mask=i[:, None] < LQ)",
                ),
                ("partials = torch.empty(workers, len_q, dim)", "partials = torch.zeros(workers, len_q, dim)"),
            ),
            expect="in another order",
            recognise=False,
        ),
        Mutant(
            "everybody stores to one place",
            "several programs store to the same dQ.",
            caught_by="runs",
            edit=("tl.store(partial_ptr + worker * LQ * D + row", "tl.store(partial_ptr + row"),
            expect="partial_ptr",
            recognise=False,
        ),
        Mutant(
            "a partial for each sequence",
            "right and repeatable, but every sequence leaves a partial.",
            caught_by="few partials",
            edit=(
                (
                    "    walk_kernel[(workers,)](",
                    "    workers = len(k_offsets) - 1\n    partials = torch.empty(workers, len_q, dim)\n    walk_kernel[(workers,)](",
                ),
            ),
            expect="W * LQ * D",
            recognise=False,
        ),
        Mutant(
            "mean over the batch",
            "dQ was divided by the number of sequences. The loss is a sum over them, and so is dQ.",
            edit=(
                "    tl.store(partial_ptr + worker * LQ * D + row, dq,",
                "    dq = dq / B\n    tl.store(partial_ptr + worker * LQ * D + row, dq,",
            ),
        ),
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=("    len_q, dim = q.shape\n", "    len_q, dim = q.shape\n    scale = dim**-0.5\n"),
        ),
        Mutant(
            "dQ starts again for each sequence",
            "Only the last sequence of each worker is in dQ.",
            edit=(
                "        begin, end = tl.load(k_offsets_ptr + b), tl.load(k_offsets_ptr + b + 1)\n        dout",
                "        dq = tl.zeros((BL, D), tl.float32)\n        begin, end = tl.load(k_offsets_ptr + b), tl.load(k_offsets_ptr + b + 1)\n        dout",
            ),
        ),
        Mutant(
            "delta of the first sequence",
            "delta was read by the shared query's row. Each sequence has its own, as it has its own output.",
            edit=("tl.load(delta_ptr + b * LQ + i", "tl.load(delta_ptr + i"),
        ),
        Mutant(
            "lse of the first sequence",
            "lse was read by the shared query's row. Each sequence has its own, since it has its own keys.",
            edit=("tl.load(lse_ptr + b * LQ + i", "tl.load(lse_ptr + i"),
            recognise=False,
            expect="dq",
        ),
        Mutant(
            "dout of the first sequence",
            "dout was read by the shared query's row. Each sequence has its own answer, and its own gradient.",
            edit=("tl.load(dout_ptr + b * LQ * D + row", "tl.load(dout_ptr + row"),
        ),
        Mutant(
            "the last worker is left out",
            "One partial is not added.",
            edit=("for w in range(workers):", "for w in range(workers - 1):"),
            recognise=False,
            expect="dq is wrong",
        ),
        Mutant(
            "scale once more",
            "dQ was scaled twice: block_dq scales already.",
            edit=("    tl.store(dq_ptr + at, total)", "    tl.store(dq_ptr + at, total * 0.25)"),
            recognise=False,
            expect="dq is wrong",
        ),
        Mutant(
            "V's tail not masked",
            "V is read past the sequence's end.",
            caught_by="returns",
            edit=(
                "v = tl.load(v_ptr + at, mask=j[:, None] < end, other=0.0)",
                "v = tl.load(v_ptr + at, mask=j[:, None] < end + 3, other=0.0)",
            ),
            expect="NaN",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "dq += block_dq(q, k, v, dout, lse, delta, j < end, scale)",
                "dq = dq + block_dq(q, k, v, dout, lse, delta, j < end, scale)",
            ),
            (
                "    for w in range(workers):\n        total += tl.load(partial_ptr + w * LQ * D + at)\n",
                "    for back in range(workers):\n        total += tl.load(partial_ptr + (workers - 1 - back) * LQ * D + at)\n",
            ),
        ),
        (
            (
                "    for b in range(worker, B, workers):\n",
                "    share = tl.cdiv(B, workers)\n    for b in range(worker * share, tl.minimum((worker + 1) * share, B)):\n",
            ),
            (
                "    add_kernel[(len_q,)](partials, dq, workers, len_q, D=dim)\n    return dq",
                "    for partial in partials:\n        dq = partial if partial is partials[0] else dq + partial\n    return partials.sum(0)",
            ),
        ),
    ),
)

EXERCISES = [ROWS, GROUPED, POOLED, TRAFFIC, SUM, RESIDENT]
