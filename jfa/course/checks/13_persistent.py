"""Checks of chapter 13: persistent kernels. Their launches run under several schedules and must give the same bits."""

import heapq

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Kept, Limit, Mutant, Output

SCHEDULES = (("lazy", 1), ("random", 1), ("random", 2))
BM = 16


def _packed(g, lengths, dim=16, spare=0, block=BM):
    """Return q, k, records of tiles of 2 * block queries; between sequences' keys lie unused rows, ``spare`` rows of q behind."""
    q = torch.randn(2 * block * len(lengths) + spare, dim, generator=g)
    k, records = [], []
    for n, length in enumerate(lengths):
        records.append([2 * block * n, sum(map(len, k)), length])
        k += [torch.randn(length, dim, generator=g) + 0.2, kinds.poison(torch.empty(5, dim), slice(None))]
    keys = torch.cat(k) if k else kinds.poison(torch.empty(block, dim), slice(None))
    return q, keys, torch.tensor(records, dtype=torch.int32)


def _sums(q, k, records, block=BM):
    """Return [rows of q] fp64: each query times the sum of its tile's keys; 0 in rows of no tile."""
    out = torch.zeros(len(q), dtype=torch.float64)
    for q_row, k_row, k_len in records.tolist():
        total = k[k_row : k_row + k_len].double().sum(0)
        out[q_row : q_row + 2 * block] = q[q_row : q_row + 2 * block].double() @ total
    return out


def _ring_of_k(records, sms, stages):
    """Require STAGES places for K beside two for Q; some program has at least its even share of all steps."""

    def most(case):
        return 2 + case.args[stages] if len(records(case)) else 0

    def least(case):
        block = case.kwargs.get("block", BM)
        steps = sum(-(-length // block) for _, _, length in records(case).tolist())
        programs = max(1, min(case.args[sms], len(records(case))))
        return 2 + min(case.args[stages], -(-steps // programs)) if len(records(case)) else 0

    text = "ring of K has STAGES buffers and uses them all"
    return Limit("all the buffers", "loaded_places", at_most=most, at_least=least, text=text)


# -- 13.1 --------------------------------------------------------------------------------------------------------------


def _phase_cases(seed):
    g = kinds.generator(seed)

    def case(name, lengths, programs, stages, dim=16, **tile):
        return Case(name, (*_packed(g, lengths, dim, **tile), programs, stages), tile)

    return [
        case("one tile of one step, NaN behind its keys", [10], 1, 2),
        case("two tiles of one step, one stage", [16, 3], 1, 1),
        case("tiles of 1, 3, 1 (no keys) and 2 steps", [10, 40, 0, 30], 1, 2),
        case("the same with one stage", [10, 40, 0, 30], 1, 1),
        case("the same with three stages", [10, 40, 0, 30], 1, 3),
        case("lengths 5, 0, 33, 1, 17 on two programs", kinds.RAGGED, 2, 2),
        case("one of 200 among short ones", [4, 200, 1], 1, 3),
        case("lengths around a block, two programs", kinds.around_block(BM), 2, 1),
        case("more programs than tiles", [20, 3], 4, 2),
        case("only tiles without keys", [0, 0, 0], 1, 2),
        case("blocks of 32 rows, D = 8", [70, 5, 0, 32], 1, 2, dim=8, block=32),
    ]


def _sum_launch(kernel, q, k, records, programs, stages, block=16):
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    out, dim = unwritten(len(q)), q.shape[1]
    boxes = [TensorDescriptor.from_tensor(t, [block, dim]) for t in (q, k)]
    with emulator.options(max_ctas=2):
        kernel[(programs,)](*boxes, out, records, len(records), BM=block, D=dim, STAGES=stages)
    return out


_MASKED = "total += tl.sum(tl.where(real[:, None], block, 0.0), axis=0)"

PHASES = Exercise(
    id="13.1",
    title="Phases that go on from tile to tile",
    name="sum_kernel",
    kind="kernel",
    call=_sum_launch,
    cases=_phase_cases,
    reference=lambda q, k, records, programs, stages, block=BM: _sums(q, k, records, block),
    outputs=(Output("out", ("row",)),),
    schedules=SCHEDULES,
    difficulty=2,
    minutes=40,
    tol=2e-5,
    time_limit=40.0,
    kept=Kept(("sum_kernel",), "the kernel stays as it is"),
    hints=(
        "The load role shows the loop: it, too, counts tiles and steps. Which of the two counters does each of the four barriers follow?",
        "q_fulls and o_empties complete once per tile: parities from `done` (for o_empties the opposite one, since no role empties before the first). The ring goes on: ring(steps_done + j, STAGES).",
        "while unit < units: steps = steps_of(k_len, BM); per step wait k_fulls[stage], load, arrive k_empties[stage], mask with tl.where; then wait q_fulls[half] (done & 1), multiply and sum, arrive q_empties[half], wait o_empties[half] ((done & 1) ^ 1), store, arrive o_fulls[half]; steps_done += steps; done += 1.",
    ),
    mutants=(
        Mutant(
            "phases begin again",
            "the ring is counted from 0 in each tile.",
            caught_by="runs",
            edit=(
                "        for j in range(steps):\n            stage, phase = ring(steps_done + j, STAGES)",
                "        for j in range(steps):\n            stage, phase = ring(j, STAGES)",
            ),
            expect="count phases differently",
            recognise=False,
        ),
        Mutant(
            "tile's parity from the steps",
            "q_fulls completes once per tile, not once per step.",
            caught_by="runs",
            edit=("tlx.barrier_wait(q_fulls[half], done & 1)", "tlx.barrier_wait(q_fulls[half], steps_done & 1)"),
            expect="q_fulls",
            recognise=False,
        ),
        Mutant(
            "zero steps",
            "a tile without keys does no step, and the load role does one.",
            caught_by="runs",
            edit=(
                "        steps = steps_of(k_len, BM)\n        total",
                "        steps = tl.cdiv(k_len, BM)\n        total",
            ),
            expect="k_",
            recognise=False,
        ),
        Mutant(
            "counts tiles as steps",
            "steps_done grew by one per tile.",
            caught_by="runs",
            edit=("        steps_done += steps\n", "        steps_done += 1\n"),
            expect="k_",
            recognise=False,
        ),
        Mutant(
            "first wait for o_empties never passes",
            "no role empties a buffer before its first use.",
            caught_by="runs",
            edit=("tlx.barrier_wait(o_empties[half], (done & 1) ^ 1)", "tlx.barrier_wait(o_empties[half], done & 1)"),
            expect="o_empties",
            recognise=False,
        ),
        Mutant(
            "does not wait for o_empties",
            "the store role may still read the result of the tile before.",
            caught_by="runs",
            edit=("        tlx.barrier_wait(o_empties[half], (done & 1) ^ 1)\n", ""),
            expect="o_",
            recognise=False,
        ),
        Mutant(
            "K is never given back",
            "the ring runs dry.",
            caught_by="runs",
            edit=("            tlx.barrier_arrive(k_empties[stage])\n            real", "            real"),
            expect="k_empties",
            recognise=False,
        ),
        Mutant(
            "K is given back before it is read",
            "the load role may overwrite what is being read.",
            caught_by="runs",
            edit=(
                "            block = tlx.local_load(k_tiles[stage])\n            tlx.barrier_arrive(k_empties[stage])\n",
                "            tlx.barrier_arrive(k_empties[stage])\n            block = tlx.local_load(k_tiles[stage])\n",
            ),
            expect="k_tiles",
            recognise=False,
        ),
        Mutant(
            "Q is given back before it is read",
            "the load role may overwrite Q while it is being read.",
            caught_by="runs",
            edit=(
                (
                    "        x = tl.sum(tlx.local_load(q_tiles[half]) * total[None, :], axis=1)\n        tlx.barrier_arrive(q_empties[half])\n",
                    "        tlx.barrier_arrive(q_empties[half])\n        x = tl.sum(tlx.local_load(q_tiles[half]) * total[None, :], axis=1)\n",
                ),
            ),
            expect="q_tiles",
            recognise=False,
        ),
        Mutant(
            "masks by a product",
            "0 times NaN is NaN: rows of no sequence must be selected away.",
            caught_by="returns",
            edit=(_MASKED, "total += tl.sum(block * real[:, None].to(tl.float32), axis=0)"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "one key too many",
            "key k_len itself counts.",
            caught_by="returns",
            edit=("real = j * BM + tl.arange(0, BM) < k_len", "real = j * BM + tl.arange(0, BM) <= k_len"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "the sum goes on from tile to tile",
            "The sum of the keys was kept from the tile before. It begins at 0 for each tile.",
            edit=(
                (
                    "    while unit < units:\n        _, _, k_len",
                    "    total = tl.zeros((D,), tl.float32)\n    while unit < units:\n        _, _, k_len",
                ),
                ("        total = tl.zeros((D,), tl.float32)\n        for j", "        for j"),
            ),
        ),
        Mutant(
            "only the last block",
            "Only the last block of a tile's keys is in the sum.",
            edit=(_MASKED, _MASKED.replace("+=", "=")),
        ),
        Mutant(
            "every block masked like the first",
            "Each block was masked as if it were the tile's first: the tail of the keys does not count, or too many do.",
            caught_by="returns",
            edit=("real = j * BM + tl.arange(0, BM) < k_len", "real = tl.arange(0, BM) < k_len"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "the load role was changed",
            "right numbers, but the load role was rewritten.",
            caught_by="given code kept",
            edit=(
                "                steps_done += steps_of(record[2], BM)\n",
                "                steps_done = steps_done + steps_of(record[2], BM)\n",
            ),
            expect="stays as it is",
            recognise=False,
        ),
        Mutant(
            "16 rows for good",
            "blocks have BM rows, whatever BM is.",
            caught_by="runs",
            edit=("steps = steps_of(k_len, BM)", "steps = steps_of(k_len, 16)"),
            expect="k_fulls",
            recognise=False,
        ),
    ),
    variants=(
        (  # stage and phase walk by themselves: no counter of steps at all
            (
                "    unit, done, steps_done = tl.program_id(0), 0, 0\n    while unit < units:\n        _, _, k_len",
                "    unit, done, stage, phase = tl.program_id(0), 0, 0, 0\n    while unit < units:\n        _, _, k_len",
            ),
            (
                "            stage, phase = ring(steps_done + j, STAGES)\n            tlx.barrier_wait(k_fulls[stage], phase)\n            block",
                "            tlx.barrier_wait(k_fulls[stage], phase)\n            block",
            ),
            (
                _MASKED + "\n",
                _MASKED
                + "\n            stage += 1\n            if stage == STAGES:\n                stage = 0\n                phase ^= 1\n",
            ),
            ("        steps_done += steps\n", ""),
        ),
        (  # Q first, a product per block, a for loop over the units
            (
                "    unit, done, steps_done = tl.program_id(0), 0, 0\n    while unit < units:\n        _, _, k_len",
                "    steps_done = 0\n    for unit in range(tl.program_id(0), units, tl.num_programs(0)):\n        done = (unit - tl.program_id(0)) // tl.num_programs(0)\n        _, _, k_len",
            ),
            (
                "        total = tl.zeros((D,), tl.float32)\n",
                "        tlx.barrier_wait(q_fulls[half], done % 2)\n        q = tlx.local_load(q_tiles[half])\n        tlx.barrier_arrive(q_empties[half], 1)\n        x = tl.zeros((BM,), tl.float32)\n",
            ),
            (_MASKED, "x += tl.sum(q * tl.sum(tl.where(real[:, None], block, 0.0), axis=0)[None, :], axis=1)"),
            (
                "        tlx.barrier_wait(q_fulls[half], done & 1)\n        x = tl.sum(tlx.local_load(q_tiles[half]) * total[None, :], axis=1)\n        tlx.barrier_arrive(q_empties[half])\n",
                "",
            ),
            ("(done & 1) ^ 1)\n        tlx.local_store(o_tiles", "(done + 1) % 2)\n        tlx.local_store(o_tiles"),
            (
                "        steps_done += steps\n        unit, done = unit + tl.num_programs(0), done + 1",
                "        steps_done += steps",
            ),
        ),
    ),
)

# -- 13.2 --------------------------------------------------------------------------------------------------------------


def _locate_cases(seed):
    g = kinds.generator(seed)
    spread = seed % 3

    def table(lengths, block, shared=0, slots=None):
        """Return records of the tiles of packed sequences, or of ``shared`` queries per sequence, and room behind."""
        rows, q_begin = [], 0
        for b, n in enumerate([shared] * len(lengths) if shared else lengths):
            begin = 0 if shared else q_begin
            out = slots[b] if slots else (b * shared if shared else q_begin)
            rows += [[begin, n, r, out, 10 * b, 10, -9, 9, 0] for r in range(0, n, 2 * block)]
            q_begin += n
        behind = torch.randint(-1000, 1000, (3, 9), generator=g)
        return torch.cat([torch.tensor(rows, dtype=torch.int64).reshape(-1, 9), behind]).to(torch.int32), len(rows)

    def case(name, unit, lengths, heads, kv_heads, block, **more):
        records, tiles = table(lengths, block, **more)
        return Case(name, (unit, records, tiles, heads, kv_heads, block))

    ragged = [40 + spread, 0, 7, 70]
    return [
        case("one head, the first tile", 0, [40], 1, 1, 16),
        case("a sequence of 20 rows", 0, [20 + spread], 1, 1, 16),
        case("one head, the tail of a sequence", 1, [40 + spread], 1, 1, 16),
        case("four heads, unit 6", 6, ragged, 4, 4, 16),
        case("GQA: eight heads on two key heads", 8 + 5 + spread, ragged, 8, 2, 16),
        case("as many heads as tiles", 3 * 4 + 1, ragged, 4, 2, 16),
        case("exactly one half", 0, [16], 3, 1, 16),
        case("one row more than a half", 2, [17], 3, 1, 16),
        case("exactly two halves", 1, [32], 3, 3, 16),
        case("shared queries", 2 * 3 + 1, [5, 0, 33, 1], 2, 1, 8, shared=12),
        case("shared queries into slots of the caller's choice", 5, [5, 0, 33], 2, 1, 8, shared=20, slots=[40, 0, 20]),
        case("the last unit", 4 * 5 - 1, ragged, 4, 1, 16),
        case("the first surplus unit", 4 * 5, ragged, 4, 1, 16),
        case("a surplus unit with room for its record", 4 * 6 + 1, ragged, 4, 1, 16),
        case("a surplus unit past all room", 1000, ragged, 4, 1, 16),
        case("no tiles at all", 0, [0, 0], 4, 1, 16),
    ]


def _locate(unit, records, tiles, heads, kv_heads, block):
    if unit >= tiles * heads:
        return (-1,) * 7
    tile, head = divmod(unit, heads)
    q_begin, q_len, row, out_begin = (int(x) for x in records[tile][:4])
    rows = [q_begin + r for r in range(row, min(row + 2 * block, q_len))]
    begin, end = rows[0], rows[-1] + 1
    middle = min(begin + block, end)
    return head, head * kv_heads // heads, begin, middle, end, out_begin + row, int(len(rows) <= block)


LOCATE = Exercise(
    id="13.2",
    title="From a unit to rows and heads",
    name="locate",
    cases=_locate_cases,
    reference=_locate,
    outputs=tuple(
        Output(name, dtype="int") for name in ("head", "kv_head", "begin", "middle", "end", "out_row", "shared")
    ),
    difficulty=1,
    minutes=20,
    forbid=("jfa.schedule",),
    hints=(
        "Which of tile and head changes from unit to unit? And how many units are there altogether?",
        "tile = unit // heads, head = unit % heads. Row numbers of a record count inside the sequence: add q_begin for the packed query, out_begin for the output.",
        "begin = q_begin + row; end = q_begin + min(row + 2 * block, q_len); middle = min(begin + block, end); kv_head = head // (heads // kv_heads); out_row = out_begin + row; shared where middle == end.",
    ),
    mutants=(
        Mutant(
            "head and tile exchanged",
            "Quotient and remainder were exchanged: unit // heads is the tile, unit % heads the head.",
            edit=("tile, head = unit // heads", "head, tile = unit // heads"),
        ),
        Mutant(
            "all rows in the first half",
            "The first half took the rows of both halves. It ends at most `block` rows behind `begin`.",
            edit=("min(begin + block, end)", "min(begin + 2 * block, end)"),
        ),
        Mutant(
            "end is the last row",
            "`end` was the last row. It is the row behind it: the second half is middle .. end - 1.",
            edit=("return head, kv_head, begin, middle, end,", "return head, kv_head, begin, middle, end - 1,"),
        ),
        Mutant(
            "key head by the tile",
            "The key head was chosen by the tile. It depends on the head alone.",
            edit=("head // (heads // kv_heads)", "tile % kv_heads"),
        ),
        Mutant(
            "heads lie apart",
            "The units of one head were taken to lie side by side. It is the heads of one tile that do.",
            edit=(
                "tile, head = unit // heads, unit % heads",
                "tile, head = (unit % tiles, unit // tiles) if unit < tiles * heads else (tiles, 0)",
            ),
        ),
        Mutant(
            "interleaved key heads",
            "Neighboring heads share a key head; here every kv_heads-th head does.",
            edit=("head // (heads // kv_heads)", "head % kv_heads"),
        ),
        Mutant(
            "divides by the number of key heads",
            "The key head is head // group, with group = heads / kv_heads.",
            edit=("head // (heads // kv_heads)", "head // kv_heads"),
        ),
        Mutant(
            "output beside the query",
            "The output row was counted from q_begin. Shared queries all begin at row 0, and their outputs do not.",
            edit=("out_begin + row, int", "q_begin + row, int"),
        ),
        Mutant(
            "output row of the sequence",
            "out_row is the first row of the sequence's output, not of the tile's.",
            edit=("out_begin + row, int", "out_begin, int"),
        ),
        Mutant(
            "length counted from the tile",
            "q_len is the length of the whole sequence; it was counted from the tile's first row.",
            edit=("min(row + 2 * block, q_len)", "row + min(2 * block, q_len)"),
        ),
        Mutant(
            "rows that do not exist",
            "A tail tile reaches past its sequence: into its neighbor.",
            edit=("q_begin + min(row + 2 * block, q_len)", "q_begin + row + 2 * block"),
        ),
        Mutant(
            "middle past the end",
            "The first half ends past the sequence where fewer than `block` rows are left.",
            edit=("min(begin + block, end)", "begin + block"),
        ),
        Mutant(
            "half of what is left",
            "The rows were divided evenly. The first half takes `block` rows, the second what is left.",
            edit=("min(begin + block, end)", "(begin + end + 1) // 2"),
        ),
        Mutant(
            "surplus by tiles",
            "Units were compared with the number of tiles. There are tiles * heads of them.",
            edit=("if tile >= tiles", "if unit >= tiles"),
        ),
        Mutant(
            "surplus by room",
            "Surplus was told by the room for records. What lies behind the tiles is not initialized.",
            edit=("if tile >= tiles", "if tile >= len(records)"),
        ),
        Mutant(
            "the last tile is surplus",
            "The last tile was taken for surplus.",
            edit=("if tile >= tiles", "if tile >= tiles - 1"),
        ),
        Mutant(
            "exactly a half is not shared",
            "A tile of exactly `block` rows has an empty second half, too.",
            edit=("int(middle == end)", "int(end - begin < block)"),
        ),
    ),
    variants=(
        """
def locate(unit, records, tiles, heads, kv_heads, block):
    if not unit < heads * tiles:
        return tuple([-1] * 7)
    head = unit
    tile = 0
    while head >= heads:
        head, tile = head - heads, tile + 1
    r = records[tile].long()
    left = torch.clamp(r[1] - r[2], max=2 * block)
    first = torch.clamp(left, max=block)
    start = r[0] + r[2]
    group = heads // kv_heads
    return head, (head - head % group) // group, int(start), int(start + first), int(start + left), int(r[2] + r[3]), int(left <= block)
""",
        """
def locate(unit, records, tiles, heads, kv_heads, block):
    tile = unit // heads
    if tile > tiles - 1:
        return -1, -1, -1, -1, -1, -1, -1
    q_begin, q_len, row, out_begin, *_ = records[tile].numpy()
    head = unit - tile * heads
    stop = [int(min(q_begin + q_len, q_begin + row + n * block)) for n in (1, 2)]
    return head, head * kv_heads // heads, int(q_begin + row), *stop, int(out_begin + row), 1 if stop[0] == stop[1] else 0
""",
    ),
)

# -- 13.3 --------------------------------------------------------------------------------------------------------------


def _clc_cases(seed):
    g = kinds.generator(seed)

    def case(name, lengths, sms, stages, dim=16, **tile):
        return Case(name, (*_packed(g, lengths, dim, **tile), sms, stages), tile)

    return [
        case("one tile, one SM", [20], 1, 2),
        case("two tiles, two SMs: nothing to steal", [10, 40], 2, 2),
        case("two tiles, one SM: one is stolen", [16, 3], 1, 2),
        case("tiles of 1, 3, 1 (no keys) and 2 steps, one SM", [10, 40, 0, 30], 1, 2),
        case("lengths 5, 0, 33, 1, 17 on two SMs", kinds.RAGGED, 2, 3),
        case("nine tiles on two SMs, one stage of K", [40, 33, 17, 16, 15, 9, 4, 1, 0], 2, 1),
        case("one of 200 among short ones, three SMs", [200, 9, 8, 7, 6, 5, 4, 3], 3, 2),
        case("more SMs than tiles", [20, 3], 4, 2),
        case("blocks of 32 rows, D = 8, two SMs", [70, 5, 0, 32], 2, 2, dim=8, block=32),
    ]


def _clc_launch(kernel, q, k, records, sms, stages, block=16):
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    out, dim = unwritten(len(q)), q.shape[1]
    boxes = [TensorDescriptor.from_tensor(t, [block, dim]) for t in (q, k)]
    with emulator.options(max_ctas=sms):
        kernel[(len(records),)](*boxes, out, records, BM=block, D=dim, STAGES=stages)
    counted = emulator.last().stats
    return out, int(counted["ctas"]), int(counted["clc queries"]), int(counted["clc failed queries"])


def _clc(q, k, records, sms, stages, block=BM):
    programs = min(sms, len(records))
    return _sums(q, k, records, block), programs, len(records) - programs, programs


_PRODUCER = "                tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)\n"
_CONSUMER = "unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)"
_STORE_END = f"read_record(records_ptr, unit), done, BM)\n                {_CONSUMER}"
_COMPUTE_END = (
    f"compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)\n                {_CONSUMER}"
)
_LOAD_CALL = "load_tile(q_desc, k_desc, queries, keys, record, done, steps_done, BM, D, STAGES)"
_LOAD_END = f"{_LOAD_CALL}\n                {_CONSUMER}"


def _consumers(**new):
    """Return edits that put other lines in place of the three consumers' (store, compute, load)."""
    ends = {"store": _STORE_END, "compute": _COMPUTE_END, "load": _LOAD_END}
    return tuple((ends[role], ends[role].replace(_CONSUMER, line)) for role, line in new.items())


_THIRDS = "unit = tlx.clc_consumer(queue, (done // 3) % 2, k=done % 3)"
_SINGLE = "unit = tlx.clc_consumer(queue, done & 1)"
_HALVES = "unit = tlx.clc_consumer(queue, done & 1, k=done & 1)"
_STATIC = "unit = unit + tl.num_programs(0)"

_STEPS_OF_16_ROWS = Mutant(
    "steps of 16 rows for good",
    "a tile's steps depend on BM.",
    caught_by="runs",
    edit=(
        _LOAD_END + "\n                steps_done += steps_of(record[2], BM)",
        _LOAD_END + "\n                steps_done += steps_of(record[2], 16)",
    ),
    expect="k_empties[1]",
    recognise=False,
)
_ONE_BUFFER = Mutant(
    "one buffer of K, whatever STAGES is",
    "every block of keys goes through one buffer, so no copy runs ahead.",
    caught_by="all the buffers",
    edit=tuple(
        (f"{call} done, steps_done, BM, D, STAGES)", f"{call} done, steps_done, BM, D, 1)")
        for call in (
            "load_tile(q_desc, k_desc, queries, keys, record,",
            "compute_tile(queries, keys, outs, half, record,",
        )
    ),
    expect="ring of K has STAGES buffers and uses them all",
    recognise=False,
)

STEAL = Exercise(
    id="13.3",
    title="The CLC loop of every role",
    name="clc_kernel",
    kind="kernel",
    call=_clc_launch,
    cases=_clc_cases,
    reference=_clc,
    outputs=(Output("out", ("row",)), Output("programs"), Output("questions"), Output("failed")),
    schedules=SCHEDULES,
    limits=(_ring_of_k(lambda case: case.args[2], 3, 4),),
    difficulty=3,
    minutes=65,
    tol=2e-5,
    time_limit=40.0,
    hints=(
        "How many groups of warps read each answer? The compute task is one task, but two groups. And the asking role reads the answer too.",
        "For turn `done` with two stages: stage done & 1, the consumer's parity (done >> 1) & 1, the producer's the opposite: a fresh stage counts as empty. A loop runs while unit >= 0.",
        "queue = tlx.clc_create_context(num_consumers=4, num_stages=2). load: while unit >= 0: tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1); load_tile(...); unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1); steps_done += ...; done += 1. The others are the same without the producer.",
    ),
    mutants=(
        _ONE_BUFFER,
        Mutant(
            "a consumer per task",
            "the compute task is two groups of warps: a stage is freed while one of them still reads it.",
            caught_by="runs",
            edit=("num_consumers=4", "num_consumers=3"),
            expect="CLC",
            recognise=False,
        ),
        Mutant(
            "a consumer too many",
            "a stage is never freed: there is no fifth consumer.",
            caught_by="runs",
            edit=("num_consumers=4", "num_consumers=5"),
            expect="clc_empty",
            recognise=False,
        ),
        Mutant(
            "the producer waits like a consumer",
            "no role frees a stage before its first use.",
            caught_by="runs",
            edit=("((done >> 1) & 1) ^ 1, k", "(done >> 1) & 1, k"),
            expect="clc_empty",
            recognise=False,
        ),
        Mutant(
            "parity of one stage",
            "with two stages a stage's phase changes every second turn.",
            caught_by="runs",
            edit=_consumers(store=_HALVES, compute=_HALVES, load=_HALVES),
            expect="clc_full",
            recognise=False,
        ),
        Mutant(
            "one stage only in one role",
            "the store role reads stage 0 every time.",
            caught_by="runs",
            edit=_consumers(store=_CONSUMER.replace("k=done & 1", "k=0")),
            expect="clc_",
            recognise=False,
        ),
        Mutant(
            "two producers",
            "the store role asks, too.",
            caught_by="runs",
            edit=_consumers(
                store=f"tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)\n                {_CONSUMER}"
            ),
            expect="clc_",
            recognise=False,
        ),
        Mutant(
            "only the asking role steals",
            "the other roles go on as in a static kernel.",
            caught_by="runs",
            edit=_consumers(store=_STATIC, compute=_STATIC),
            expect="",
            recognise=False,
        ),
        Mutant(
            "nothing is stolen",
            "Each program runs its own unit and ends. The programs that began should do all the work.",
            edit=((_PRODUCER, ""), *_consumers(store="unit = -1", compute="unit = -1", load="unit = -1")),
        ),
        Mutant(
            "asks again after -1",
            "a program that was told -1 may ask no more.",
            caught_by="runs",
            edit=_consumers(
                load=f"{_CONSUMER}\n                if unit < 0:\n                    tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=(done + 1) & 1)"
            ),
            expect="",
            recognise=False,
        ),
        Mutant(
            "-1 is not tested",
            "the store role takes -1 for a unit.",
            caught_by="runs",
            edit=(
                "            unit, done = tl.program_id(0), 0\n            while unit >= 0:",
                "            unit, done = tl.program_id(0), 0\n            while unit >= -1:",
            ),
            expect="",
            recognise=False,
        ),
        Mutant(
            "steps of the next tile",
            "steps_done grew by the steps of the tile that was just stolen, not of the one that was done.",
            caught_by="runs",
            edit=_consumers(
                compute=f"{_CONSUMER}\n                record = read_record(records_ptr, tl.maximum(unit, 0))"
            ),
            expect="k_",
            recognise=False,
        ),
        Mutant(
            "done is not counted",
            "the compute role's `done` stays 0.",
            caught_by="runs",
            edit=(
                "                compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)\n                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)\n                steps_done += steps_of(record[2], BM)\n                done += 1\n",
                "                compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)\n                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)\n                steps_done += steps_of(record[2], BM)\n",
            ),
            expect="",
            recognise=False,
        ),
        Mutant(
            "the program's own unit is asked for",
            "the first unit is the program's own: the store role begins with an answer instead.",
            caught_by="returns",
            edit=(
                "            unit, done = tl.program_id(0), 0\n            while unit >= 0:",
                "            unit, done = tlx.clc_consumer(queue, 0), 0\n            while unit >= 0:",
            ),
            expect="",
            recognise=False,
        ),
        _STEPS_OF_16_ROWS,
    ),
    variants=(
        (  # asked when the tile's loads are on their way
            (_PRODUCER, ""),
            (_LOAD_CALL + "\n", f"{_LOAD_CALL}\n{_PRODUCER}"),
        ),
        (  # three stages, written with // and %
            ("num_consumers=4, num_stages=2", "1 + 2 + 1, num_stages=3"),
            ("((done >> 1) & 1) ^ 1, k=done & 1", "1 - (done // 3) % 2, k=done % 3"),
            *_consumers(store=_THIRDS, compute=_THIRDS, load=_THIRDS),
        ),
        (  # one stage: right, if slow
            ("num_consumers=4, num_stages=2", "4"),
            ("((done >> 1) & 1) ^ 1, k=done & 1", "(done & 1) ^ 1"),
            *_consumers(store=_SINGLE, compute=_SINGLE, load=_SINGLE),
        ),
        (  # the store role reads its answer before it stores: the stage is free earlier
            (
                f"                store_tile(out_ptr, outs, {_STORE_END}",
                f"                record = read_record(records_ptr, unit)\n                {_CONSUMER}\n                store_tile(out_ptr, outs, record, done, BM)",
            ),
        ),
    ),
)

# -- 13.4 --------------------------------------------------------------------------------------------------------------


def _surplus_cases(seed):
    g = kinds.generator(seed)

    def case(name, lengths, surplus, sms, stages=2, dim=16, **tile):
        q, k, records = _packed(g, lengths, dim, spare=0 if lengths else 2 * BM, **tile)
        far = torch.randint(2**27, 2**30, (surplus, 2), generator=g, dtype=torch.int32)  # rows of no tensor
        behind = torch.cat([far, torch.randint(1, 40, (surplus, 1), generator=g, dtype=torch.int32)], dim=1)
        room = torch.cat([records.reshape(-1, 3), behind])
        return Case(name, (q, k, room, torch.tensor([len(lengths)], dtype=torch.int32), sms, stages), tile)

    return [
        case("no surplus, one SM", [20, 3], 0, 1),
        case("one surplus unit, one SM", [20], 1, 1),
        case("lengths 33, 17, 5, 1, 0 and four surplus units, two SMs", [33, 17, 5, 1, 0], 4, 2),
        case("fewer tiles than SMs", [20], 5, 3),
        case("more surplus than tiles, three SMs, one stage", [40, 30, 20, 10], 9, 3, 1),
        case("one surplus unit behind seven tiles, two SMs", [60, 33, 32, 17, 16, 15, 1], 1, 2, 3),
        case("nothing but surplus units", [], 3, 2),
        case("two surplus units, blocks of 32 rows, D = 8", [70, 33, 5], 2, 2, dim=8, block=32),
    ]


def _surplus_launch(kernel, q, k, room, count, sms, stages, block=16):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    out, dim = unwritten(len(q)) if int(count[0]) else torch.zeros(len(q)), q.shape[1]
    boxes = [TensorDescriptor.from_tensor(t, [block, dim]) for t in (q, k)]
    with emulator.options(max_ctas=sms):
        kernel[(len(room),)](*boxes, out, room, count, BM=block, D=dim, STAGES=stages)
    return out


def _asked(case):
    """Require that a program asks once per tile that it runs."""
    return int(case.args[3][0])


_BOTH = "while (unit >= 0) & (unit < count):"
_STORE_LOOP = f"""            unit, done = tl.program_id(0), 0
            {_BOTH}
                store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)
                {_CONSUMER}
                done += 1
"""
_STORE_SKIPS = f"""            unit, done = tl.program_id(0), 0
            while unit >= 0:
                if unit < count:
                    store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)
                {_CONSUMER}
                done += 1
"""
_COMPUTE_LOOP = f"""            half = tlx.async_task_replica_id()
            count = tl.load(count_ptr)
            unit, done, steps_done = tl.program_id(0), 0, 0
            {_BOTH}
                record = read_record(records_ptr, unit)
                compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)
                {_CONSUMER}
                steps_done += steps_of(record[2], BM)
                done += 1
"""
_COMPUTE_SKIPS = f"""            half = tlx.async_task_replica_id()
            count = tl.load(count_ptr)
            unit, done, steps_done = tl.program_id(0), 0, 0
            while unit >= 0:
                if unit < count:
                    record = read_record(records_ptr, unit)
                    compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)
                    steps_done += steps_of(record[2], BM)
                {_CONSUMER}
                done += 1
"""
_LOAD_LOOP = f"""            {_BOTH}
{_PRODUCER}                record = read_record(records_ptr, unit)
                {_LOAD_END}
                steps_done += steps_of(record[2], BM)
                done += 1"""
_LOAD_SKIPS = f"""            while unit >= 0:
{_PRODUCER}                if unit < count:
                    record = read_record(records_ptr, unit)
                    {_LOAD_CALL}
                    steps_done += steps_of(record[2], BM)
                {_CONSUMER}
                done += 1"""

SURPLUS = Exercise(
    id="13.4",
    title="Bug hunt: surplus units",
    name="surplus_kernel",
    kind="kernel",
    hunt=True,
    call=_surplus_launch,
    cases=_surplus_cases,
    reference=lambda q, k, room, count, sms, stages, block=BM: _sums(q, k, room[: int(count[0])], block),
    outputs=(Output("out", ("row",)),),
    schedules=SCHEDULES,
    difficulty=2,
    minutes=40,
    tol=2e-5,
    time_limit=40.0,
    hints=(
        "The report names who waits: on which barrier, and who should arrive there? Then look whether that role is still alive.",
        "The load role leaves at the first surplus unit, so no role asks for another answer. The store role wants one.",
        "Either all roles loop while (unit >= 0) & (unit < count), or all loop while unit >= 0 and skip the work of a surplus unit.",
    ),
    mutants=(
        _STEPS_OF_16_ROWS,
        _ONE_BUFFER,
        Mutant(
            "the store role takes surplus for tiles",
            "a record that was never initialized is read.",
            caught_by="runs",
            edit=(_STORE_LOOP, _STORE_LOOP.replace(_BOTH, "while unit >= 0:")),
            expect="",
            recognise=False,
        ),
        Mutant(
            "-1 is not tested",
            "-1 is smaller than the count, too: record -1 is read.",
            caught_by="runs",
            edit=(_STORE_LOOP, _STORE_LOOP.replace(_BOTH, "while unit < count:")),
            expect="",
            recognise=False,
        ),
        Mutant(
            "-1 is not tested by any role",
            "-1 is smaller than the count, too: record -1 is read.",
            caught_by="runs",
            edit=(
                (_STORE_LOOP, _STORE_LOOP.replace(_BOTH, "while unit < count:")),
                (_COMPUTE_LOOP, _COMPUTE_LOOP.replace(_BOTH, "while unit < count:")),
                (_LOAD_LOOP, _LOAD_LOOP.replace(_BOTH, "while unit < count:")),
            ),
            expect="",
            recognise=False,
        ),
        Mutant(
            "the load role goes on alone",
            "it waits for consumers that have left.",
            caught_by="runs",
            edit=((_STORE_LOOP, _STORE_SKIPS), (_LOAD_LOOP, _LOAD_SKIPS)),
            expect="",
            recognise=False,
        ),
        Mutant(
            "surplus counts from one",
            "the unit with the number `count` is surplus already.",
            caught_by="runs",
            edit=(
                (_STORE_LOOP, _STORE_LOOP.replace("unit < count", "unit <= count")),
                (_COMPUTE_LOOP, _COMPUTE_LOOP.replace("unit < count", "unit <= count")),
                (_LOAD_LOOP, _LOAD_LOOP.replace("unit < count", "unit <= count")),
            ),
            expect="",
            recognise=False,
        ),
        Mutant(
            "the last tile is dropped",
            "the last tile of the list is never run.",
            caught_by="returns",
            edit=(
                (_STORE_LOOP, _STORE_LOOP.replace("unit < count", "unit < count - 1")),
                (_COMPUTE_LOOP, _COMPUTE_LOOP.replace("unit < count", "unit < count - 1")),
                (_LOAD_LOOP, _LOAD_LOOP.replace("unit < count", "unit < count - 1")),
            ),
            expect="",
            recognise=False,
        ),
        Mutant(
            "surplus units do the last tile again",
            "right numbers, but every surplus unit does the last tile once more.",
            caught_by="runs",
            edit=tuple(
                (
                    loop,
                    loop.replace(_BOTH, "while unit >= 0:").replace(
                        "records_ptr, unit", "records_ptr, tl.minimum(unit, count - 1)"
                    ),
                )
                for loop in (_STORE_LOOP, _COMPUTE_LOOP, _LOAD_LOOP)
            ),
            expect="",
            recognise=False,
        ),
        Mutant(
            "surplus units do the last tile again, if there is one",
            "right numbers, but every surplus unit does the last tile once more.",
            caught_by="each tile once",
            edit=tuple(
                (
                    loop,
                    loop.replace(_BOTH, "while (unit >= 0) & (count > 0):").replace(
                        "records_ptr, unit", "records_ptr, tl.minimum(unit, count - 1)"
                    ),
                )
                for loop in (_STORE_LOOP, _COMPUTE_LOOP, _LOAD_LOOP)
            ),
            recognise=False,
        ),
        Mutant(
            "one tile per program",
            "right numbers, but no program steals: every program of the grid is started.",
            caught_by="steals",
            edit=(
                (_STORE_LOOP, _STORE_LOOP.replace(_CONSUMER, "unit = -1")),
                (_COMPUTE_LOOP, _COMPUTE_LOOP.replace(_CONSUMER, "unit = -1")),
                (_LOAD_LOOP, _LOAD_LOOP.replace(_CONSUMER, "unit = -1").replace(_PRODUCER, "")),
            ),
            expect="hands out the units",
            recognise=False,
        ),
        Mutant(
            "skipped without being counted",
            "the roles skip a surplus unit and read the same answer again.",
            caught_by="runs",
            edit=(
                (
                    _STORE_LOOP,
                    _STORE_SKIPS.replace("                done += 1\n", "                done += unit < count\n"),
                ),
                (
                    _COMPUTE_LOOP,
                    _COMPUTE_SKIPS.replace("                done += 1\n", "                done += unit < count\n"),
                ),
                (
                    _LOAD_LOOP,
                    _LOAD_SKIPS.replace("                done += 1", "                done += unit < count"),
                ),
            ),
            expect="",
            recognise=False,
        ),
    ),
    limits=(
        Limit("steals", "tlx:clc_producer", at_least=_asked, text="the queue still hands out the units"),
        Limit("each tile once", "stores", at_most=lambda case: 2 * _asked(case), text="no tile is done twice"),
        _ring_of_k(lambda case: case.args[2][: int(case.args[3])], 4, 5),
    ),
    variants=(
        ((_STORE_LOOP, _STORE_SKIPS), (_COMPUTE_LOOP, _COMPUTE_SKIPS), (_LOAD_LOOP, _LOAD_SKIPS)),
        (
            (
                _STORE_LOOP,
                _STORE_LOOP.replace(
                    f"            {_BOTH}\n", "            going = unit < count\n            while going:\n"
                ).replace(
                    "                done += 1\n",
                    "                going = (unit >= 0) & (unit < count)\n                done += 1\n",
                ),
            ),
            (_COMPUTE_LOOP, _COMPUTE_LOOP.replace(_BOTH, "while (unit > -1) and (count > unit):")),
        ),
    ),
)

# -- 13.5 --------------------------------------------------------------------------------------------------------------


def _reuse_cases(seed):
    g = kinds.generator(seed)

    def case(name, steps, programs=1, stages=2, block=64):
        q = torch.randn(block * len(steps), block, generator=g).bfloat16()
        k = (torch.randn(block * max(steps), block, generator=g) + 0.1).bfloat16()
        return Case(name, (q, k, torch.tensor(steps, dtype=torch.int32), programs, stages))

    return [
        case("one tile", [1]),
        case("two tiles", [2, 1]),
        case("three tiles: the first buffer comes round", [1, 3, 2]),
        case("five tiles of 3, 1, 2, 1, 1 blocks", [3, 1, 2, 1, 1]),
        case("seven tiles on two programs", [2, 1, 1, 3, 2, 1, 2], programs=2),
        case("eight tiles of two blocks each", [2] * 8),
        case("three tiles, three stages", [1, 4, 2], stages=3),
        case("three tiles, one stage", [2, 1, 3], stages=1),
        case("three tiles of 128 x 128", [1, 2, 1], block=128),
    ]


def _reuse_launch(kernel, q, k, steps, programs, stages):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    out = torch.full(q.shape, float("nan"), dtype=torch.bfloat16)
    block = q.shape[1]
    boxes = [TensorDescriptor.from_tensor(t, [block, block]) for t in (q, k, out)]
    with emulator.options(max_ctas=2, fences="strict"):
        kernel[(programs,)](*boxes, steps, len(steps), BM=block, D=block, STAGES=stages)
    return out.float()


def _reuse(q, k, steps, programs, stages):
    size = q.shape[1]
    blocks = [k[: size * n].reshape(n, size, -1).sum(0) for n in steps.tolist()]
    return torch.cat([tile @ block.T for tile, block in zip(q.split(size), blocks, strict=True)])


def _reuse_places(case):
    """Return the places that TMA fills in one program, at most: two of Q and STAGES of K, if it has as many turns."""
    _, _, steps, programs, stages = case.args
    mine = [steps[p::programs] for p in range(programs)]
    return max(min(2, len(tiles)) + min(stages, int(tiles.sum())) for tiles in mine)


_Q_WAIT = "                tlx.barrier_wait(q_empties[slot], phase ^ 1)\n"
_O_WAIT = "                tlx.barrier_wait(o_empties[slot], phase ^ 1)\n"
_LOAD_WAITS = _Q_WAIT + _O_WAIT
_EPILOGUE_WAIT = _O_WAIT + "                tlx.local_store(q_tiles[slot], o"
_STORE_ARRIVES = "                tlx.barrier_arrive(o_empties[slot])\n"
_COMMIT_Q = "                tlx.tcgen05_commit(q_empties[slot])\n"

REUSE = Exercise(
    id="13.5",
    title="Bug hunt: O leaves through Q's buffer",
    name="reuse_kernel",
    kind="kernel",
    hunt=True,
    call=_reuse_launch,
    cases=_reuse_cases,
    reference=_reuse,
    outputs=(Output("out", ("row", "dim")),),
    schedules=SCHEDULES,
    difficulty=3,
    minutes=40,
    tol=4e-3,
    time_limit=60.0,
    hints=(
        "The two parties are in different tiles: which units does the report name? Both use one buffer, two tiles apart.",
        "Neither the epilogue nor the store role can know that a later tile's Q is coming. Who writes Q, and what does that role wait for?",
        "q_empties says that the products have read Q; by then O has not even been written. The load role must wait for o_empties[slot], too, with the same parity.",
    ),
    limits=(
        Limit(
            "O in Q's buffer",
            "shared_bytes",
            at_most=lambda case: 34_000 if case.args[4] == 2 and case.args[0].shape[1] == 64 else None,
            text="at most 34,000 bytes",
        ),
        Limit(
            "loads run ahead",
            "cycles",
            at_most=lambda case: 16_000 if len(case.args[2]) == 8 else None,
            text="at most 16,000 modelled cycles",
        ),
        Limit(
            "all the buffers",
            "loaded_places",
            at_most=_reuse_places,
            at_least=_reuse_places,
            text="take both buffers of Q in turn, and the ring of K has STAGES buffers and uses them all",
        ),
    ),
    mutants=(
        Mutant(
            "no fence",
            "the TMA store may read the buffer as it was: threads wrote it, and nothing tells the copy engine.",
            caught_by="runs",
            edit=('                tlx.fence("async_shared")\n', ""),
            expect="fence",
            recognise=False,
        ),
        Mutant(
            "a buffer of its own for O",
            "right numbers, but O has buffers of its own: there is no room for them.",
            caught_by="O in Q's buffer",
            edit=(
                (_LOAD_WAITS, _Q_WAIT),
                (
                    "    accs = tlx.local_alloc",
                    "    o_tiles = tlx.local_alloc((BM, D), tl.bfloat16, 2)\n    accs = tlx.local_alloc",
                ),
                ("tlx.local_store(q_tiles[slot], o", "tlx.local_store(o_tiles[slot], o"),
                (
                    "tlx.async_descriptor_store(o_desc, q_tiles[slot]",
                    "tlx.async_descriptor_store(o_desc, o_tiles[slot]",
                ),
            ),
            expect="shared memory",
            recognise=False,
        ),
        Mutant(
            "waits for the tile before",
            "right numbers, but a tile's loads wait until the tile before has left.",
            caught_by="loads run ahead",
            edit=(
                _LOAD_WAITS,
                _Q_WAIT
                + "                if done > 0:\n                    before, b_phase = ring(done - 1, 2)\n                    tlx.barrier_wait(o_empties[before], b_phase)\n",
            ),
            expect="16,000",
            recognise=False,
        ),
        Mutant(
            "one Q at a time",
            "right numbers, but everything uses the first buffer, so no tile overlaps with the next.",
            caught_by="loads run ahead",
            edit=(
                (
                    "                tlx.barrier_wait(acc_fulls[slot], phase)\n",
                    "                slot, phase = 0, done & 1\n                tlx.barrier_wait(acc_fulls[slot], phase)\n",
                ),
                (
                    "                tlx.barrier_wait(q_fulls[slot], phase)\n",
                    "                slot, phase = 0, done & 1\n                tlx.barrier_wait(q_fulls[slot], phase)\n",
                ),
                (_LOAD_WAITS, "                slot, phase = 0, done & 1\n" + _LOAD_WAITS),
                (
                    "                tlx.barrier_wait(o_fulls[slot], phase)\n",
                    "                slot, phase = 0, done & 1\n                tlx.barrier_wait(o_fulls[slot], phase)\n",
                ),
            ),
            expect="16,000",
            recognise=False,
        ),
        Mutant(
            "the wrong parity",
            "the first tiles wait for an O that was not sent.",
            caught_by="runs",
            edit=(_LOAD_WAITS, _Q_WAIT + "                tlx.barrier_wait(o_empties[slot], phase)\n"),
            expect="o_empties",
            recognise=False,
        ),
        Mutant(
            "waits until O is written",
            "O is in the buffer then, and has not left it.",
            caught_by="runs",
            edit=(_LOAD_WAITS, _Q_WAIT + "                tlx.barrier_wait(o_fulls[slot], phase ^ 1)\n"),
            expect="q_tiles",
            recognise=False,
        ),
        Mutant(
            "the epilogue waits for Q",
            "the epilogue cannot hold back a load of a later tile.",
            caught_by="runs",
            edit=(
                (_LOAD_WAITS, _Q_WAIT),
                (_EPILOGUE_WAIT, "                tlx.barrier_wait(q_empties[slot], phase)\n" + _EPILOGUE_WAIT),
            ),
            expect="q_tiles",
            recognise=False,
        ),
        Mutant(
            "waits after the load",
            "the wait comes after Q was asked for: too late.",
            caught_by="runs",
            edit=(
                (_LOAD_WAITS, _Q_WAIT),
                ("[unit * BM, 0], q_fulls[slot])\n", "[unit * BM, 0], q_fulls[slot])\n" + _O_WAIT),
            ),
            expect="q_tiles",
            recognise=False,
        ),
        Mutant(
            "given back before O has left",
            "the store role gives the buffer back while the TMA still reads it.",
            caught_by="runs",
            edit=(
                "                tlx.async_descriptor_store_wait(0)\n" + _STORE_ARRIVES,
                _STORE_ARRIVES + "                tlx.async_descriptor_store_wait(0)\n",
            ),
            expect="q_tiles",
            recognise=False,
        ),
        Mutant(
            "two arrivals where one is counted",
            "the store role also arrives on q_empties, which counts one arrival per tile.",
            caught_by="runs",
            edit=(
                (_LOAD_WAITS, _Q_WAIT),
                (_STORE_ARRIVES, _STORE_ARRIVES + "                tlx.barrier_arrive(q_empties[slot])\n"),
            ),
            expect="q_",
            recognise=False,
        ),
        Mutant(
            "two stages for good",
            "K has STAGES buffers, whatever that is.",
            caught_by="runs",
            edit=(
                "stage, k_phase = ring(steps_done + j, STAGES)\n                    tlx.barrier_wait(k_empties",
                "stage, k_phase = ring(steps_done + j, 2)\n                    tlx.barrier_wait(k_empties",
            ),
            expect="k_",
            recognise=False,
        ),
        Mutant(
            "two buffers of K, whatever STAGES is",
            "right numbers, but the ring of K always has two buffers.",
            caught_by="all the buffers",
            edit=(
                ("tl.bfloat16, STAGES)", "tl.bfloat16, 2)"),
                ("k_fulls = tlx.alloc_barriers(STAGES)", "k_fulls = tlx.alloc_barriers(2)"),
                ("k_empties = tlx.alloc_barriers(STAGES)", "k_empties = tlx.alloc_barriers(2)"),
                *(
                    (f"{ring}STAGES){wait}", f"{ring}2){wait}")
                    for ring, wait in (
                        ("ring(steps_done + j, ", "\n                    tlx.barrier_wait(k_fulls"),
                        ("ring(steps_done + j, ", "\n                    tlx.barrier_wait(k_empties"),
                    )
                ),
            ),
            expect="STAGES buffers",
            recognise=False,
        ),
        Mutant(
            "bytes of a tile of 64 x 64",
            "the announced bytes depend on BM and D.",
            caught_by="runs",
            edit=(
                "tlx.barrier_expect_bytes(q_fulls[slot], 2 * BM * D)",
                "tlx.barrier_expect_bytes(q_fulls[slot], 8192)",
            ),
            expect="q_fulls",
            recognise=False,
        ),
    ),
    variants=(
        ((_LOAD_WAITS, _O_WAIT),),  # that O has left says that the products are long done
        (  # one barrier for both: the products and the store role arrive on it
            (_LOAD_WAITS, _Q_WAIT),
            ("q_empties = tlx.alloc_barriers(2)", "q_empties = tlx.alloc_barriers(2, arrive_count=2)"),
            (_STORE_ARRIVES, _STORE_ARRIVES + "                tlx.barrier_arrive(q_empties[slot])\n"),
        ),
        (  # q_empties comes from the store role alone, and the epilogue need not wait: the next Q is not there before
            (_LOAD_WAITS, _Q_WAIT),
            (_COMMIT_Q, ""),
            (_STORE_ARRIVES, "                tlx.barrier_arrive(q_empties[slot])\n"),
            (_EPILOGUE_WAIT, "                tlx.local_store(q_tiles[slot], o"),
        ),
    ),
)

# -- 13.6 --------------------------------------------------------------------------------------------------------------


def _predict_cases(seed):
    g = kinds.generator(seed)

    def drawn(n, jitter=0.3, alpha=1.5):
        """Return a list sorted by planned cost, and what its tiles really take."""
        planned = (1 - torch.rand(n, generator=g, dtype=torch.float64)).pow(-1 / alpha).sort(descending=True).values
        return (planned * (1 + jitter * (2 * torch.rand(n, generator=g, dtype=torch.float64) - 1))).tolist()

    def pair(name, costs, sms):
        return [Case(f"{name}, asked {'early' if early else 'late'}", (costs, sms, early)) for early in (False, True)]

    return [
        *pair("seven tiles on three SMs", [4.25, 5.0 + seed % 3, 3.0, 2.5, 2.0, 1.5, 1.0], 3),
        *pair("fewer tiles than SMs", [3.0, 2.0], 4),
        *pair("as many tiles as SMs", [3.0, 2.0, 1.5], 3),
        *pair("equal costs: all ask at once", [2.0] * 11, 3),
        *pair("one SM", [3.0, 2.0, 1.5], 1),
        *pair("two SMs meet again and again", [1.0, 3.0, 2.0, 4.0, 1.0, 3.0, 2.0, 2.0, 5.0 + seed % 3], 2),
        *pair("three SMs meet in another order", [2.0, 5.0, 4.0, 3.0, 1.0, 2.0, 2.0, 3.0, 1.0, 4.0 + seed % 2], 3),
        *pair("16 tiles, as planned, on four SMs", drawn(16, jitter=0.0), 4),
        *pair("60 tiles with jitter on eight SMs", drawn(60), 8),
        *pair("the largest tile comes last", [1.0] * 9 + [7.5 + seed % 2], 3),
        *pair("300 tiles on 148 SMs", drawn(300, jitter=0.1), 148),
    ]


def _predict(costs, sms, early):
    costs = [float(c) for c in costs]
    owner, ends, failed, pending = [None] * len(costs), {}, 0, list(range(len(costs)))[::-1]
    queue = [(0.0, sm, pending.pop()) for sm in range(min(sms, len(costs)))]  # (time, SM, tile or None: it asks now)
    heapq.heapify(queue)
    while queue:
        now, sm, tile = heapq.heappop(queue)
        if tile is None:
            tile = pending.pop() if pending else -1
            failed += tile < 0
        if tile >= 0:
            owner[tile], ends[sm], then = sm, now + costs[tile], None
            if early:
                then = pending.pop() if pending else -1
                failed += then < 0
            heapq.heappush(queue, (ends[sm], sm, then))
    loads = [0.0] * sms
    for place, cost in enumerate(costs):
        turn, worker = divmod(place, sms)
        loads[sms - 1 - worker if turn % 2 else worker] += cost
    return owner, failed, max(ends.values()), max(loads)


PREDICT = Exercise(
    id="13.6",
    title="Predict: who gets which tile from the queue",
    name="predict",
    cases=_predict_cases,
    reference=_predict,
    outputs=(
        Output("owner"),
        Output("failed", dtype="int"),
        Output("queue_end", tol=1e-9),
        Output("zigzag_end", tol=1e-9),
    ),
    difficulty=2,
    minutes=45,
    forbid=("jfa.schedule",),
    hints=(
        "Play it with two SMs and five tiles on paper, once for each way of asking. When does each SM get free, and what does it know by then?",
        "Keep for each SM when it is free, and which tile it begins then: one that it was given before, or None, if it has yet to ask. Always go on with the SM that is free first; of those the smallest number.",
        "loop: (now, sm) = the smallest; tile = the one it holds, or the next pending one or -1 (count it); at -1 the SM is out; else owner[tile] = sm, it is free again at now + cost, and if early it asks at `now` for the tile after.",
    ),
    mutants=(
        Mutant(
            "zigzag over sorted costs",
            "The zigzag dealt sorted costs. It deals the list in its order.",
            edit=("enumerate(costs)", "enumerate(sorted(costs))"),
        ),
        Mutant(
            "zigzag turns with the SM",
            "Every second SM was dealt backwards. It is every second round.",
            edit=("sms - 1 - worker if turn % 2 else worker", "sms - 1 - worker if worker % 2 else worker"),
        ),
        Mutant(
            "-1 is counted twice",
            "A -1 that was told early was counted again when the tile ended. The program asks no more.",
            edit=("failed += upcoming[sm] is None and tile < 0", "failed += tile < 0"),
        ),
        Mutant(
            "the first to end",
            "queue_end was the time at which the first program ends. It is when the last one does.",
            edit=("max(ends), max(loads)", "min(e for e in ends if e), max(loads)"),
        ),
        Mutant(
            "the tile's own SM every time",
            "Stolen tiles were given to the SMs in turn. The SM that asks gets the tile.",
            edit=("owner[tile], ends[sm] = sm,", "owner[tile], ends[sm] = tile % sms,"),
        ),
        Mutant(
            "always asks late",
            "The programs asked when they had finished a tile. With `early` they ask when they begin one.",
            edit=(
                "next(answers, -1) if early else None\n        failed += early and",
                "None\n        failed += False and",
            ),
        ),
        Mutant(
            "always asks early",
            "The programs asked when they began a tile. Without `early` they ask when they have finished one.",
            edit=(
                "next(answers, -1) if early else None\n        failed += early and",
                "next(answers, -1)\n        failed +=",
            ),
        ),
        Mutant(
            "asks for the first tile",
            "The first tile is the program's own. It is not asked for, and so it cannot go to another.",
            edit=(
                ("iter(range(started, len(costs)))", "iter(range(len(costs)))"),
                ("upcoming = list(range(started))", "upcoming = [None] * started"),
            ),
        ),
        Mutant(
            "first question after the first tile",
            "In its first tile, too, a program asks when it begins.",
            edit=(
                "next(answers, -1) if early else None\n        failed += early and",
                "next(answers, -1) if early and tile >= started else None\n        failed += upcoming[sm] is not None and",
            ),
        ),
        Mutant(
            "one failed question",
            "-1 was counted once. Each program that began gets it once.",
            edit=("int(failed)", "int(failed > 0)"),
        ),
        Mutant(
            "every SM gets -1",
            "An SM without a program asks nothing, so it is not told -1.",
            edit=("int(failed)", "sms"),
        ),
        Mutant(
            "counts all questions",
            "All questions were counted, not those that were answered -1.",
            edit=("int(failed)", "int(failed) + len(costs) - started"),
        ),
        Mutant(
            "the larger number first",
            "Of questions at the same time the SM with the larger number went first.",
            edit=("min(free)", "min(free, key=lambda f: (f[0], -f[1]))"),
        ),
        Mutant(
            "asks in turn",
            "The SMs asked in turn. The SM that is free first asks first.",
            edit=("min(free)", "free[0]"),
        ),
        Mutant(
            "round robin",
            "The static launch dealt every round upwards. Odd rounds of a zigzag go backwards.",
            edit=("sms - 1 - worker if turn % 2 else worker", "worker"),
        ),
        Mutant(
            "sorts the costs",
            "The costs were sorted first. The list was sorted by plan; what tiles really take does not change its order.",
            edit=(
                "    started = min(len(costs), sms)\n",
                "    costs = sorted(costs, reverse=True)\n    started = min(len(costs), sms)\n",
            ),
        ),
        Mutant(
            "ends with the last tile",
            "queue_end is when the last tile of the list ends. Another one may end later.",
            edit=("max(ends), max(loads)", "ends[owner[-1]], max(loads)"),
        ),
        Mutant(
            "the mean load",
            "queue_end is the mean load: a bound that no schedule beats, and that few reach.",
            edit=("max(ends), max(loads)", "sum(costs) / sms, max(loads)"),
        ),
    ),
    variants=(
        """
def predict(costs, sms, early):
    import heapq
    n = len(costs)
    waiting, owner, failed, end = list(range(n - 1, -1, -1)), {}, 0, 0.0
    heap = [(0.0, w, waiting.pop()) for w in range(min(n, sms))]
    while heap:
        t, w, tile = heapq.heappop(heap)
        if tile == "ask":
            tile = waiting.pop() if waiting else None
            failed += tile is None
        if tile is None:
            continue
        owner[tile] = w
        ahead = "ask"
        if early:
            ahead = waiting.pop() if waiting else None
            failed += ahead is None
        end = max(end, t + costs[tile])
        heapq.heappush(heap, (t + costs[tile], w, ahead))
    load = torch.zeros(sms, dtype=torch.float64)
    for r in range(0, n, sms):
        part = torch.tensor(costs[r : r + sms], dtype=torch.float64)
        if r // sms % 2 == 0:
            load[: len(part)] += part
        else:
            load[sms - len(part) :] += part.flip(0)
    return [owner[t] for t in range(n)], failed, end, load.max().item()
""",
        """
def predict(costs, sms, early):
    began = list(range(min(len(costs), sms)))
    lanes = {w: [w] for w in began}             # tiles by SM; None: was told -1
    clock = dict.fromkeys(began, 0.0)
    at = dict.fromkeys(began, 0)
    pending = len(began)
    while clock:
        w = min(clock, key=lambda i: (clock[i], i))
        for attempt in range(2):
            wants = len(lanes[w]) == at[w] if attempt == 0 else early and lanes[w][at[w]] is not None
            if wants:
                lanes[w].append(pending if pending < len(costs) else None)
                pending += pending < len(costs)
        tile = lanes[w][at[w]]
        if tile is None:
            del clock[w]
        else:
            clock[w] += costs[tile]
            at[w] += 1
    owner = [next(w for w in began if t in lanes[w]) for t in range(len(costs))]
    ends = [sum(costs[t] for t in lanes[w] if t is not None) for w in began]
    loads = [0.0] * sms
    for t, c in enumerate(costs):
        back = (t // sms) & 1
        loads[(t % sms) * (1 - 2 * back) + back * (sms - 1)] += c
    return owner, sum(None in lanes[w] for w in began), max(ends), max(loads)
""",
    ),
)

EXERCISES = [PHASES, LOCATE, STEAL, SURPLUS, REUSE, PREDICT]
