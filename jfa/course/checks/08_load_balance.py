"""Checks of chapter 08: zigzag, a tile list without host reads, mega-tiles, a queue, cutting and merging, empty tiles."""

import functools
import math

import numpy as np
import torch

from jfa.bench.shapes import SHAPES
from jfa.course import kinds
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output, Property
from jfa.layout import pareto_lengths

# -- 8.1 ---------------------------------------------------------------------------------------------------------------


def _seed_costs():
    """Return the 48 tiles of the text that the course grew from."""
    costs = np.random.default_rng(1).integers(32, 512, size=48)
    costs[:3] = [480, 450, 40]
    return torch.from_numpy(costs).sort(descending=True).values


SEED_LOADS = [1604, 1563, 1569, 1573, 1583, 1557, 1545, 1562]


def _zigzag_cases(seed):
    g = kinds.generator(seed)

    def case(name, count, workers):
        costs = torch.randint(1, 500, (count,), generator=g).sort(descending=True).values
        return Case(name, (costs, workers))

    return [
        case("12 tiles, 3 workers", 12, 3),
        case("7 tiles, 3 workers: a short last round", 7, 3),
        case("10 tiles, 4 workers: a short last round, dealt forwards", 10, 4),
        case("6 tiles, 4 workers: a short last round, dealt backwards", 6, 4),
        case("2 tiles, 5 workers", 2, 5),
        case("one worker", 5, 1),
        case("no tiles", 0, 3),
        Case("the chapter's 48 tiles, 8 workers", (_seed_costs(), 8)),
        case("200 tiles, 7 workers", 200, 7),
    ]


def _zigzag_call(zigzag_places, costs, workers):
    import torch

    dealt = [[int(p) for p in zigzag_places(w, workers, len(costs))] for w in range(workers)]
    turns = max(len(costs) // workers + 1, *map(len, dealt))
    places = torch.tensor([mine + [-1] * (turns - len(mine)) for mine in dealt])
    loads = torch.tensor([sum(int(costs[p]) for p in mine if 0 <= p < len(costs)) for mine in dealt])
    return places, loads


def _zigzag(costs, workers):
    turns = len(costs) // workers + 1
    places = torch.full((workers, turns), -1)
    for r in range(turns):
        order = range(workers) if r % 2 == 0 else reversed(range(workers))
        for place, w in enumerate(order, r * workers):
            places[w, r] = place if place < len(costs) else -1
    loads = torch.tensor([sum(int(costs[p]) for p in mine if p >= 0) for mine in places.tolist()])
    return places, loads


def _each_once(case, result):
    """Check that no place occurs twice and none is left out."""
    count = len(case.args[0])
    given = sorted(p for p in result[0].flatten().tolist() if p >= 0)
    missing, twice = set(range(count)) - set(given), {p for p in given if given.count(p) > 1}
    if missing:
        return f"No worker runs place {min(missing)} of {count}."
    return f"Place {min(twice)} is run twice." if twice else None


def _seed_loads(case, result):
    """Return the loads of the text."""
    if case.name.startswith("the chapter's") and result[1].tolist() != SEED_LOADS:
        return "The 48 tiles come out with other loads than in the chapter."
    return None


ZIGZAG = Exercise(
    id="8.1",
    title="Zigzag, as a persistent kernel computes it",
    name="zigzag_places",
    cases=_zigzag_cases,
    call=_zigzag_call,
    reference=_zigzag,
    outputs=(Output("places", ("worker", "round")), Output("loads", ("worker",))),
    difficulty=1,
    minutes=15,
    forbid=("jfa.schedule",),
    hints=(
        "In round r the places begin at r * workers. Which of them is worker w's in an even round, which in an odd one?",
        "Even: r * workers + w. Odd: r * workers + (workers - 1 - w). How many rounds are there, and what if the place is count or more?",
        "for r in range(ceil(count / workers)): compute the place, append it if place < count.",
    ),
    properties=(Property("each place once", _each_once), Property("the chapter's loads", _seed_loads)),
    mutants=(
        Mutant(
            "every round backwards",
            "Every round is dealt backwards: the last worker always gets the larger tile.",
            edit=("worker if r % 2 == 0 else workers - 1 - worker", "workers - 1 - worker"),
        ),
        Mutant(
            "every round forwards",
            "Every round is dealt forwards: that is round robin.",
            edit=("worker if r % 2 == 0 else workers - 1 - worker", "worker"),
        ),
        Mutant(
            "the first round backwards",
            "The even rounds are dealt backwards and the odd ones forwards.",
            edit=("if r % 2 == 0", "if r % 2 == 1"),
        ),
        Mutant(
            "the short last round is dropped",
            "The tiles of a last round that is not full are never run.",
            edit=("range(-(-count // workers))", "range(count // workers)"),
        ),
        Mutant(
            "places past the end",
            "It returns places that do not exist: the last round may be short.",
            edit=("if r * workers + turn < count:", "if True:"),
        ),
        Mutant(
            "one too far backwards",
            "A backward round is counted from workers, not from workers - 1.",
            edit=("workers - 1 - worker", "workers - worker"),
        ),
        Mutant(
            "the short round is turned within itself",
            "A short backward round was turned within the places that are left: deal it as if it were full, and drop the places past the end.",
            edit=("workers - 1 - worker", "min(workers, count - r * workers) - 1 - worker"),
        ),
    ),
    variants=(
        """
def zigzag_places(worker, workers, count):
    both = (worker, 2 * workers - 1 - worker)       # a forward and a backward round together
    return [p for start in range(0, count, 2 * workers) for p in (start + both[0], start + both[1]) if p < count]
""",
        """
def zigzag_places(worker, workers, count):
    r = torch.arange(count // workers + 2)
    place = r * workers + worker + (r & 1) * (workers - 1 - 2 * worker)
    return place[place < count]
""",
    ),
)

# -- 8.2 ---------------------------------------------------------------------------------------------------------------


def _list_cases(seed):
    shift = seed % 3

    def case(name, lengths, block_m, block_n, slack=0):
        return Case(name, (kinds.offsets(lengths), sum(lengths) + slack, block_m, block_n))

    return [
        case("lengths 6 and 3", [6, 3], 4, 4),
        case("lengths 9 and 4", [9 + shift, 4], 4, 4),
        *(case(name, [n + shift * (n > 4) for n in lengths], 16, 8) for name, lengths in kinds.LENGTHS.items()),
        case("lengths around a block", kinds.around_block(16), 16, 16),
        case("key blocks larger than query tiles", [70 + shift, 33, 5], 8, 32),
        case("rows of no sequence behind the last sequence", [5, 0, 33 + shift, 1, 17], 16, 16, slack=50),
        case("three hundred short sequences", [(7 * b + shift) % 5 for b in range(300)], 4, 4),
        case("only sequences of one row", [1] * 9, 16, 16),
    ]


def _list(offsets, total, block_m, block_n):
    lengths = offsets.diff().tolist()
    tiles = [(b, r, -(-min(r + block_m, n) // block_n)) for b, n in enumerate(lengths) for r in range(0, n, block_m)]
    tiles.sort(key=lambda t: -t[2])
    capacity = -(-total // block_m) + len(lengths)
    padded = torch.tensor(tiles + [(-1, -1, 0)] * (capacity - len(tiles))).T
    return padded[0], padded[1], padded[2], torch.tensor([len(tiles)])


_SLOT = ("slot",)

LIST = Exercise(
    id="8.2",
    title="A sorted tile list that never asks the host",
    name="sorted_tiles",
    cases=_list_cases,
    reference=_list,
    outputs=(Output("seq", _SLOT), Output("row", _SLOT), Output("cost", _SLOT), Output("count", ("number",))),
    difficulty=2,
    minutes=25,
    forbid=("jfa.schedule", "jfa.layout", "host reads"),
    hints=(
        "Count the tiles of each sequence, and take the running sum, ends. Slot i belongs to the first sequence whose running sum is above i.",
        "torch.searchsorted(ends, slot, right=True) finds it, empty sequences included. The sequence's first slot is ends - tiles, so the row is (slot - (ends - tiles)[seq]) * block_m. Slots from ends[-1] on hold nothing: torch.where, not a mask as an index.",
        "cost = where(slot < ends[-1], ceil(min(row + block_m, lengths[seq]) / block_n), 0); cost, order = torch.sort(cost, descending=True, stable=True); then seq[order], row[order], and -1 from the count on. clamp seq to B - 1 before you index with it.",
    ),
    limits=(
        Limit(
            "no loop over sequences",
            "ops",
            at_most=60,
            text="at most 60 torch operations, however many sequences there are",
        ),
    ),
    mutants=(
        Mutant(
            "capacity without + B",
            "the results have too few slots.",
            caught_by="returns",
            edit=(" + len(lengths), device", ", device"),
            expect="shape",
            recognise=False,
        ),
        Mutant(
            "sorts sequences, not tiles",
            "Tiles are in the order of their sequences' lengths: under a causal mask the tiles of one sequence cost different amounts.",
            edit=(
                "cost, order = torch.sort(cost, descending=True, stable=True)",
                "order = torch.sort(torch.where(slot < ends[-1], lengths[seq], -1), descending=True, stable=True).indices\n    cost = cost[order]",
            ),
        ),
        Mutant(
            "rising order",
            "The cheapest tiles come first.",
            edit=(
                "cost, order = torch.sort(cost, descending=True, stable=True)",
                "order = torch.sort(torch.where(slot < ends[-1], cost, 1 << 40), stable=True).indices\n    cost = cost[order]",
            ),
        ),
        Mutant(
            "every tile sees all keys",
            "Each tile costs all keys of its sequence, but the mask is causal.",
            edit=("torch.minimum(row + block_m, lengths[seq])", "lengths[seq]"),
        ),
        Mutant(
            "a short tile counts as full",
            "The last tile of a sequence is charged for keys beyond the sequence's end.",
            edit=("torch.minimum(row + block_m, lengths[seq])", "row + block_m"),
        ),
        Mutant(
            "cost in query rows",
            "The cost counts query rows. A tile takes as long as the key blocks it visits.",
            edit=(
                "(seen + block_n - 1) // block_n, 0)",
                "torch.minimum(lengths[seq] - row, torch.tensor(block_m)), 0)",
            ),
        ),
        Mutant(
            "cost in pairs",
            "The cost counts pairs that the mask allows. A block that is half masked takes as long as a full one.",
            edit=("(seen + block_n - 1) // block_n, 0)", "(seen * (seen + 1) - row * (row + 1)) // 2, 0)"),
        ),
        Mutant(
            "empty sequences own slots",
            "Slots at a border are given to the sequence before it, or to an empty one: which side does the search look to?",
            edit=("right=True).clamp", "right=False).clamp"),
        ),
        Mutant(
            "rows of the packed tensor",
            "The rows are counted in the packed tensor. They should start at 0 in each sequence.",
            edit=("row[order], -1)", "(row + offsets[:-1].long()[seq])[order], -1)"),
        ),
        Mutant(
            "counts on the host",
            "It asks the host how many tiles there are.",
            caught_by="allowed operations",
            edit=("there = slot < ends[-1]  #", "there = slot < int(ends[-1])  #"),
            expect="int()",
            recognise=False,
        ),
        Mutant(
            "repeat_interleave",
            "the size of its result depends on numbers.",
            caught_by="allowed operations",
            edit=(
                "seq = torch.searchsorted(ends, slot, right=True).clamp(max=len(lengths) - 1)",
                "seq = torch.repeat_interleave(torch.arange(len(lengths)), tiles)\n    seq = torch.nn.functional.pad(seq, (0, len(slot) - len(seq)))",
            ),
            expect="repeat_interleave without output_size",
            recognise=False,
        ),
        Mutant(
            "a mask as an index",
            "the size of its result depends on numbers.",
            caught_by="allowed operations",
            edit=(
                "there = slot < ends[-1]  #",
                "cost[~(slot < ends[-1])] = torch.zeros_like(cost)[~(slot < ends[-1])]\n    there = slot < ends[-1]  #",
            ),
            expect="mask",
            recognise=False,
        ),
        Mutant(
            "a loop over sequences",
            "Right, but the number of operations grows with the batch.",
            caught_by="no loop over sequences",
            edit=(
                "seq = torch.searchsorted(ends, slot, right=True).clamp(max=len(lengths) - 1)",
                "seq = torch.zeros_like(slot)\n    for b in range(len(lengths) - 1):\n        seq = seq + (slot >= ends[b])",
            ),
            expect="60",
        ),
    ),
    variants=(
        """
def sorted_tiles(offsets, total, block_m, block_n):
    n = offsets.diff().long()
    B, capacity = n.numel(), (total + block_m - 1) // block_m + n.numel()
    tiles = torch.div(n + block_m - 1, block_m, rounding_mode="floor")
    spare = (capacity - tiles.sum())[None]
    owner = torch.repeat_interleave(torch.arange(B + 1), torch.cat([tiles, spare]), output_size=capacity)
    begin = torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])
    row = (torch.arange(capacity) - begin[owner]) * block_m
    n = torch.cat([n, n.new_zeros(1)])
    cost = -((-torch.minimum(row + block_m, n[owner])) // block_n)
    cost = cost * (owner < B)
    order = torch.argsort(-cost * capacity + torch.arange(capacity))
    seq, row, cost = owner[order], row[order], cost[order]
    gone = seq == B
    return seq.masked_fill(gone, -1), row.masked_fill(gone, -1), cost, tiles.sum().reshape(1)
""",
        """
def sorted_tiles(offsets, total, block_m, block_n):
    lengths = (offsets[1:] - offsets[:-1]).to(torch.int32)
    slots = torch.arange(-(-total // block_m) + lengths.shape[0], dtype=torch.int32)
    ends = torch.cumsum((lengths + (block_m - 1)) // block_m, 0)
    seq = (slots[:, None] >= ends[None, :]).sum(1)                    # [slots, B] comparisons
    seq = torch.minimum(seq, torch.full_like(seq, lengths.shape[0] - 1))
    starts = torch.roll(ends, 1)
    starts[0] = 0
    row = (slots - starts.gather(0, seq)) * block_m
    valid = slots < ends[-1]
    cost = (torch.minimum(row + block_m, lengths.gather(0, seq)) + block_n - 1).div(block_n, rounding_mode="floor")
    cost = torch.where(valid, cost, -1)
    order = (-cost).argsort(stable=True)
    seq = torch.where(valid, seq, -1).gather(0, order)
    row = torch.where(valid, row, -1).gather(0, order)
    return seq, row, cost.gather(0, order).clamp(min=0), ends[-1].view(1)
""",
    ),
)

# -- 8.3 ---------------------------------------------------------------------------------------------------------------


def _mega_cases(seed):
    shift = 0.01 * (seed % 7)

    def case(alpha, tiles, heads, workers):
        return Case(
            f"alpha near {alpha:g}, {tiles} tiles, {heads} head{'s' * (heads > 1)}, {workers} workers",
            (round(alpha + shift, 2), tiles, heads, workers),
        )

    return [
        case(2.5, 64, 1, 12),
        case(1.0, 48, 1, 8),
        case(1.5, 200, 1, 32),
        case(1.5, 200, 4, 32),
        case(0.7, 100, 8, 16),
        case(3.0, 150, 2, 40),
        case(1.2, 20, 3, 132),
    ]


@functools.lru_cache(maxsize=64)
def _mega(alpha, tiles, heads, workers):
    """Draw 24,000 batches: a standard deviation of at most 0.0033."""
    rng, over, chunk = np.random.default_rng(12345), 0, 4_000
    for _ in range(6):
        cost = rng.pareto(alpha, (chunk, tiles)) + 1
        over += int((cost.max(1) * workers > heads * cost.sum(1)).sum())
    return over / (6 * chunk)


MEGA = Exercise(
    id="8.3",
    title="Predict: how often does a mega-tile decide?",
    name="mega_share",
    cases=_mega_cases,
    reference=_mega,
    outputs=(Output("share"),),
    difficulty=2,
    minutes=15,
    tol=0.015,
    time_limit=20.0,
    forbid=("jfa.schedule",),
    hints=(
        "Draw many batches of costs at once, [batches, tiles]. For each: the largest, and the mean load. The answer is a share of batches.",
        "The mean load sums over all tiles of all heads and divides by the workers. The heads make no tile larger.",
        "cost = u ** (-1 / alpha) with u = 1 - torch.rand(20_000, tiles); share = (cost.amax(1) > heads * cost.sum(1) / workers).double().mean().",
    ),
    mutants=(
        Mutant(
            "forgets the heads",
            "The heads are missing: every head has all these tiles, so the mean load grows with them.",
            edit=("heads * cost.sum(1)", "cost.sum(1)"),
        ),
        Mutant(
            "Pareto without its 1",
            "The costs begin at 0 in place of 1: numpy's pareto, for one, leaves the 1 out.",
            edit=("u ** (-1 / alpha)", "u ** (-1 / alpha) - 1"),
        ),
        Mutant(
            "alpha instead of 1 / alpha",
            "The exponent is -alpha. To turn a uniform number into a cost it must be -1 / alpha.",
            edit=("(-1 / alpha)", "(-alpha)"),
        ),
        Mutant(
            "the largest left out of the load",
            "The largest tile was left out of the mean load.",
            edit=("cost.sum(1) / workers", "(cost.sum(1) - cost.amax(1)) / workers"),
        ),
        Mutant(
            "averages first",
            "It compares averages over all batches, so the answer is 0 or 1. Compare in each batch, then average.",
            edit=("(cost.amax(1) > mean_load)", "(cost.amax(1).mean() > mean_load.mean())"),
        ),
        Mutant(
            "an expected sum",
            "It puts the expected sum, tiles * alpha / (alpha - 1), in place of the sum. With so heavy a tail the sum is mostly its largest term, and from alpha 1 down it has no expectation.",
            edit=(
                "heads * cost.sum(1) / workers",
                "torch.tensor(heads * tiles * (alpha / (alpha - 1) if alpha > 1 else torch.inf) / workers)",
            ),
        ),
        Mutant(
            "too few batches",
            "too few batches for this tolerance.",
            edit=("torch.rand(20_000, tiles", "torch.rand(60, tiles"),
            expect="share is",
            recognise=False,
        ),
    ),
    variants=(
        """
import numpy as np


def mega_share(alpha, tiles, heads, workers):
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(12_000):
        cost = rng.pareto(alpha, tiles) + 1.0
        hits += cost.max() > cost.sum() * heads / workers
    return hits / 12_000
""",
        """
def mega_share(alpha, tiles, heads, workers):
    # given the largest, m, the others are independent Pareto below m: draw m exactly, then the others
    n = 15_000
    top = (1 - torch.rand(n, dtype=torch.float64) ** (1 / tiles)).clamp(min=1e-300) ** (-1 / alpha)
    low = top[:, None] ** (-alpha)
    rest = (low + (1 - low) * torch.rand(n, tiles - 1, dtype=torch.float64)) ** (-1 / alpha)
    return (top * workers > heads * (top + rest.sum(1))).double().mean()
""",
    ),
)

# -- 8.4 ---------------------------------------------------------------------------------------------------------------


def _queue_cases(seed):
    g = kinds.generator(seed)

    def case(name, count, workers, gone=0, block=16):
        x, out = (torch.randn(count * block, generator=g) for _ in range(2))
        return Case(name, (x, out, count, workers, gone))

    return [
        case("seven tiles, three workers", 7, 3),
        case("one worker, three tiles", 3, 1),
        case("as many tiles as workers", 4, 4),
        case("fewer tiles than workers", 2, 5),
        case("one tile", 1, 4),
        case("forty tiles, six workers", 40, 6),
        case("another launch has drawn two tiles before", 9, 3, gone=2),
        case("another launch has drawn all that can be drawn", 9, 3, gone=6),
        case("tiles of 32", 5, 2, block=32),
    ]


def _queue_launch(kernel, x, out, count, workers, gone):
    import torch

    out, asked = out.clone(), torch.full((1,), gone, dtype=torch.int32)
    kernel[(workers,)](x, out, asked, count, BLOCK=len(x) // count)
    return out, int(asked)


def _queue(x, out, count, workers, gone):
    """Return each tile once; of the tiles that are drawn, the first ``gone`` belong to others. Asked: once per tile."""
    mine = torch.ones(count, 1, dtype=x.dtype)
    mine[workers : workers + gone] = 0
    return out + 2 * x * mine.expand(count, len(x) // count).reshape(-1), count


QUEUE = Exercise(
    id="8.4",
    title="Bug hunt: a queue worker that is too eager",
    name="queue_kernel",
    kind="kernel",
    hunt=True,
    call=_queue_launch,
    cases=_queue_cases,
    reference=_queue,
    outputs=(Output("out", ("element",)), Output("asked")),
    schedules=(("lazy", 1), ("random", 1), ("random", 2)),
    difficulty=2,
    minutes=20,
    time_limit=20.0,
    hints=(
        "Which tile does the first program that asks get? Which program has that tile already?",
        "The counter starts at 0, and the first W tiles are taken without asking. And count the questions: one before the loop and one at the end of every turn is one more than the tiles that were run.",
        "Ask at the top of the loop: upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1); run the tile; tile = upcoming. Nothing before the loop, nothing at its end.",
    ),
    mutants=(
        Mutant(
            "static, and the counter moved along",
            "Tiles are dealt, not drawn: the counter moves, and its answers are not used.",
            edit=(
                "upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)",
                "upcoming = tile + tl.num_programs(0)\n        tl.atomic_add(asked_ptr, 1)",
            ),
        ),
        Mutant(
            "overwrites",
            "The tile is added to what `out` holds, and does not replace it.",
            edit=("tl.load(out_ptr + at) + 2 * x", "2 * x"),
        ),
        Mutant(
            "adds without a race",
            "No race is left, but each of the first tiles is still added twice: making the addition atomic only hides the fault.",
            edit=(
                ("tl.num_programs(0) + tl.atomic_add", "tl.atomic_add"),
                ("tl.store(out_ptr + at, tl.load(out_ptr + at) + 2 * x)", "tl.atomic_add(out_ptr + at, 2 * x)"),
            ),
            recognise=False,
            expect="out is wrong",
        ),
        Mutant(
            "still asks after the end",
            "The tiles are right, but there are more questions than tiles: a program asks for its own first tile, or asks again after it was told that nothing is left.",
            edit=(
                (
                    "    while tile < count:\n        upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)\n",
                    "    upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)\n    while tile < count:\n",
                ),
                (
                    "        tile = upcoming",
                    "        tile = upcoming\n        upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)",
                ),
            ),
        ),
        Mutant(
            "asks for the first tile, too",
            "Each program asks for its first tile as well, so there are more questions than tiles: the first one is its own.",
            edit=(
                ("    while tile < count:\n", "    tile = tl.atomic_add(asked_ptr, 1)\n    while tile < count:\n"),
                ("tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)", "tl.atomic_add(asked_ptr, 1)"),
            ),
        ),
        Mutant(
            "no queue at all",
            "No program asks the queue: each takes every W-th tile. That is round robin, and no queue.",
            edit=("tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)", "tile + tl.num_programs(0)"),
        ),
        Mutant(
            "the first tiles are left out",
            "The first W tiles are never run.",
            edit=(
                "    while tile < count:\n",
                "    tile = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)\n    while tile < count:\n",
            ),
        ),
        Mutant(
            "tl.where does not stop an atomic",
            "tl.where chooses between two results; both are computed. The atomic add of a program that is done still counts.",
            edit=(
                (
                    "    while tile < count:\n        upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)\n",
                    "    upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)\n    while tile < count:\n",
                ),
                (
                    "        tile = upcoming",
                    "        tile = upcoming\n        upcoming = tl.where(tile < count, tl.num_programs(0) + tl.atomic_add(asked_ptr, 1), count)",
                ),
            ),
            recognise=False,
            expect="asked is",
        ),
        Mutant(
            "one tile ahead",
            "tiles are drawn from W - 1 on: one of them runs twice.",
            caught_by="runs",
            edit=("tl.num_programs(0) + tl.atomic_add", "tl.num_programs(0) - 1 + tl.atomic_add"),
            expect="out_ptr",
            recognise=False,
        ),
        Mutant(
            "one tile is skipped",
            "Tiles are drawn from W + 1 on: tile W is never run.",
            edit=("tl.num_programs(0) + tl.atomic_add", "tl.num_programs(0) + 1 + tl.atomic_add"),
        ),
        Mutant(
            "the last one for everybody",
            "a number past the end is cut to the last tile.",
            caught_by="runs",
            edit=("tile = upcoming", "tile = tl.where(tile == count - 1, count, tl.minimum(upcoming, count - 1))"),
            expect="out_ptr",
            recognise=False,
        ),
    ),
    variants=(
        (
            ("        upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)\n", ""),
            ("tile = upcoming", "tile = tl.atomic_add(asked_ptr, 1) + tl.num_programs(0)"),
        ),
        """
@triton.jit
def draw(asked_ptr):
    return tl.atomic_add(asked_ptr, 1, sem="relaxed") + tl.num_programs(0)


@triton.jit
def queue_kernel(x_ptr, out_ptr, asked_ptr, count, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    more = tile < count
    while more:
        following = draw(asked_ptr)
        for half in tl.static_range(2):
            at = tile * BLOCK + half * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
            x = tl.load(x_ptr + at)
            tl.store(out_ptr + at, tl.load(out_ptr + at) + x + x)
        tile = following
        more = tile < count
""",
    ),
)

# -- 8.5 ---------------------------------------------------------------------------------------------------------------


def _parts_cases(seed):
    g = kinds.generator(seed)

    def case(name, lengths, dim=4, workers=4, block=4, kind=None, slack=3):
        drawn = [kinds.drawn(kind, 1, n, dim, block, g) for n in lengths]
        q = torch.cat([q for q, _ in drawn])
        rows = torch.zeros(slack, dim)
        k = torch.cat([*(k for _, k in drawn), kinds.poison(rows.clone(), slice(None))])
        v = torch.randn(len(k), dim, generator=g) + 0.5
        v[len(k) - slack :] = math.nan
        return Case(name, (q, k, v, kinds.offsets(lengths), workers, block))

    return [
        case("two short sequences, nothing to cut", [3, 4], workers=2, kind="above 90"),
        case("one of 40 keys, cut in four", [40], kind="rising"),
        case("a last part with a tail", [37, 2], kind="falling"),
        *(case(kind.says, [6, 41, 3], kind=name) for name, kind in kinds.SCORES.items()),
        *(
            case(name, lengths, dim=8, kind="rising", workers=8)
            for name, lengths in kinds.LENGTHS.items()
            if sum(lengths)
        ),
        case("only empty sequences", [0, 0, 0]),
        case("exactly the mean load", [16, 16, 16, 16], kind="falling"),
        case("one of 203 keys, 16 workers", [5, 203, 0, 1], workers=16, kind="huge in one block"),
        case("one worker: nothing is cut", [20, 50], workers=1, kind="rising"),
        case("more workers than blocks", [9, 1], workers=50, kind="falling"),
        case("blocks of 3", [40, 8, 1], block=3, kind="rising"),
    ]


def _plan(k_offsets, workers, block):
    """Return (plan rows, largest part in blocks, parts of cut tiles)."""
    lengths = k_offsets.diff().tolist()
    costs = [math.ceil(n / block) for n in lengths]
    size = max(1, math.ceil(sum(costs) / workers))
    rows, cut = [], 0
    for b, cost in enumerate(costs):
        parts = math.ceil(cost / size)
        cut += parts if parts > 1 else 0
        rows += [(b, p * cost // parts, (p + 1) * cost // parts) for p in range(parts)]
    return rows, size, cut


def _in_parts(q, k, v, k_offsets, workers, block):
    out = torch.zeros_like(q)
    for b, (begin, end) in enumerate(zip(k_offsets.tolist(), k_offsets.tolist()[1:])):
        if end > begin:
            out[b] = torch.softmax(k[begin:end] @ q[b] / q.shape[1] ** 0.5, 0) @ v[begin:end]
    rows, _, cut = _plan(k_offsets, workers, block)
    return out, torch.tensor(rows, dtype=torch.int64).reshape(-1, 3), cut * (q.shape[1] + 1)


def _part_elements(case):
    q, _, _, k_offsets, workers, block = case.args
    rows, size, _ = _plan(k_offsets, workers, block)
    return max(size * block * q.shape[1], q.numel(), 3 * len(rows))


PARTS = Exercise(
    id="8.5",
    title="Cut the long tiles, and merge them",
    name="attend_in_parts",
    cases=_parts_cases,
    reference=_in_parts,
    outputs=(Output("out", ("sequence", "dim")), Output("plan", ("part", "field")), Output("moved", dtype="int")),
    difficulty=3,
    minutes=45,
    tol=1e-5,
    time_limit=15.0,
    forbid=("softmax", "jfa.schedule", "nested"),
    hints=(
        "First the plan, in whole numbers: costs, size, and for each sequence the borders of its parts. parts = ceil(cost / size) is 1 for a tile that is not cut and 0 for one without keys.",
        "A part is ordinary attention over its own rows: out_p normalized by its own sum, lse_p = its maximum + log of its sum. Its last row is the smaller of bounds[b] + end * block and the sequence's end.",
        "Merge: total = logaddexp of the parts' lse; out = sum over parts of out_p * exp(lse_p - total). Begin with out 0 and lse -inf, and take the parts one by one.",
    ),
    limits=(
        Limit(
            "in parts",
            "peak_numel",
            at_most=_part_elements,
            text="no tensor with more than size x block x D elements, unless it is `out` or `plan`",
        ),
    ),
    mutants=(
        Mutant(
            "mean of the parts",
            "The parts' outputs were averaged. A part weighs as much as its sum of exponentials: use the log-sum-exps.",
            edit=(
                ("acc = acc * torch.exp(lse - both) + part * torch.exp(part_lse - both)", "acc = acc + part / parts"),
            ),
        ),
        Mutant(
            "weighted by keys",
            "The parts were weighted by their numbers of keys. A part weighs as much as its sum of exponentials.",
            edit=(
                "acc = acc * torch.exp(lse - both) + part * torch.exp(part_lse - both)",
                "acc = acc + part * len(scores) / (bounds[b + 1] - bounds[b])",
            ),
        ),
        Mutant(
            "the last part wins",
            "Only the last part of a cut tile is in the output.",
            edit=("acc = acc * torch.exp(lse - both) + part * torch.exp(part_lse - both)", "acc = part"),
        ),
        Mutant(
            "lse without its maximum",
            "The parts' log-sum-exps lack the maximum that was taken off the scores.",
            edit=("top + torch.log(weights.sum())", "torch.log(weights.sum())"),
        ),
        Mutant(
            "older parts are not scaled down",
            "A part's weight is taken against the total so far, and what came before keeps its old weight.",
            edit=("acc * torch.exp(lse - both)", "acc"),
        ),
        Mutant(
            "reads past the end",
            "The last block of a sequence is read in full: rows of the next sequence, or of no sequence, are included.",
            caught_by="returns",
            edit=("min(bounds[b] + end * block, bounds[b + 1])", "bounds[b] + end * block"),
            expect="NaN",
        ),
        Mutant(
            "cut at the mean tile",
            "Tiles are cut at the mean cost of a tile. What matters is the mean load of a worker.",
            caught_by="returns",
            edit=("sum(costs) // workers", "sum(costs) // len(costs)"),
            expect="shape",
        ),
        Mutant(
            "mean load rounded down",
            "The mean load was rounded down, so there are more parts than asked for.",
            caught_by="returns",
            edit=("max(1, -(-sum(costs) // workers))", "max(1, sum(costs) // workers)"),
            expect="shape",
        ),
        Mutant(
            "a short last part",
            "Parts are cut off at `size`, and the last one gets what is left. They should be nearly equal.",
            edit=("p * cost // parts, (p + 1) * cost // parts", "p * size, min((p + 1) * size, cost)"),
        ),
        Mutant(
            "whole tiles are moved, too",
            "A tile that is not cut leaves no partial result, so it moves nothing.",
            edit=("if parts > 1 else 0", "if parts else 0"),
        ),
        Mutant(
            "moved without the LSE",
            "Each part also leaves its log-sum-exp: D + 1 numbers.",
            edit=("parts * (dim + 1)", "parts * dim"),
        ),
        Mutant(
            "not cut at all",
            "The plan is right, but each tile is computed in one piece.",
            caught_by="in parts",
            source="""
def attend_in_parts(q, k, v, k_offsets, workers, block):
    bounds, dim = k_offsets.tolist(), q.shape[1]
    costs = [-(-(end - begin) // block) for begin, end in zip(bounds, bounds[1:])]
    size = max(1, -(-sum(costs) // workers))
    out, plan, moved = torch.zeros_like(q), [], 0
    for b, cost in enumerate(costs):
        parts = -(-cost // size)
        plan += [(b, p * cost // parts, (p + 1) * cost // parts) for p in range(parts)]
        moved += parts * (dim + 1) if parts > 1 else 0
        if cost:
            rows = slice(bounds[b], bounds[b + 1])
            scores = k[rows] @ q[b] / dim**0.5
            weights = torch.exp(scores - scores.max())
            out[b] = weights @ v[rows] / weights.sum()
    return out, torch.tensor(plan, dtype=torch.int64).reshape(-1, 3), moved
""",
            expect="size x block x D",
        ),
    ),
    variants=(
        """
def attend_in_parts(q, k, v, k_offsets, workers, block):
    lengths = k_offsets.diff()
    costs = (lengths + block - 1) // block
    size = max(1, int((costs.sum() + workers - 1) // workers))
    plan = torch.tensor([[b, p * c // n, (p + 1) * c // n] for b, c in enumerate(costs.tolist())
                         for n in [-(-c // size)] for p in range(n)], dtype=torch.int32).reshape(-1, 3)
    total, best = torch.zeros(len(q)), torch.full((len(q),), -torch.inf)
    acc = torch.zeros_like(q)
    for b, first, end in plan.tolist():           # unnormalized, one running maximum for each sequence
        begin, last = int(k_offsets[b]), int(k_offsets[b + 1])
        keys = slice(begin + first * block, min(last, begin + end * block))
        s = (k[keys] * q[b]).sum(1) / q.shape[1] ** 0.5
        new = torch.maximum(best[b], s.amax())
        p, old = torch.exp(s - new), torch.exp(best[b] - new)
        total[b] = total[b] * old + p.sum()
        acc[b] = acc[b] * old + p @ v[keys]
        best[b] = new
    many = torch.bincount(plan[:, 0].long(), minlength=len(q))
    moved = int(many[many > 1].sum()) * (q.shape[1] + 1)
    return acc / torch.where(total > 0, total, 1.0)[:, None], plan, moved
""",
        """
def attend_in_parts(q, k, v, k_offsets, workers, block):
    def part(b, first, end):
        lo, hi = int(k_offsets[b]) + first * block, min(int(k_offsets[b]) + end * block, int(k_offsets[b + 1]))
        s = torch.mv(k[lo:hi].double(), q[b].double()) * q.shape[1] ** -0.5
        lse = s.max() + (s - s.max()).exp().sum().log()
        return (s - lse).exp() @ v[lo:hi].double(), lse

    n = [(int(b) - int(a) + block - 1) // block for a, b in zip(k_offsets, k_offsets[1:])]
    size = max((sum(n) + workers - 1) // workers, 1)
    plan, out, cut = [], [], 0
    for b, cost in enumerate(n):
        m = (cost + size - 1) // size
        mine = [[b, p * cost // m, (p + 1) * cost // m] for p in range(m)]
        plan += mine
        cut += m * (m > 1)
        results = [part(*row) for row in mine]
        top = max((float(lse) for _, lse in results), default=0.0)
        w = [torch.exp(lse - top) for _, lse in results]
        out.append(sum(wi * o for wi, (o, _) in zip(w, results)) / sum(w) if m else torch.zeros(q.shape[1]))
    return torch.stack(out).float(), torch.tensor(plan).reshape(-1, 3).long(), cut * (q.shape[1] + 1)
""",
    ),
)

# -- 8.6 ---------------------------------------------------------------------------------------------------------------


def _count_cases(seed):
    def case(name, lengths, block):
        return Case(name, (torch.as_tensor(lengths, dtype=torch.int32), block))

    return [
        case("lengths 5, 9", [5 + seed % 3, 9], 4),
        case("lengths 5, 0, 33, 1, 17", kinds.RAGGED, 16),
        case("lengths around a block", kinds.around_block(16), 16),
        case("one of 200 among short ones", [4, 200 + seed % 5, 1], 16),
        case("only empty sequences", [0, 0, 0], 16),
        case("Pareto lengths", pareto_lengths(300, 8, 2000, alpha=1.1, seed=seed), 64),
        case("the bench shape pma32", SHAPES["pma32"].len_kv(), 128),
        case("pairs that come out even", [32, 64, 96], 16),
        case("lengths that fp32 and int16 do not hold", kinds.LARGE_COUNTS, 16),
    ]


def _count(lengths, block):
    tiles = [math.ceil(n / block) for n in lengths.tolist()]
    paired = sum(2 * math.ceil(t / 2) for t in tiles)
    return len(tiles) * max(tiles), sum(tiles), (paired - sum(tiles)) / paired if paired else 0.0


COUNT = Exercise(
    id="8.6",
    title="Predict: empty tiles and sentinels",
    name="count_tiles",
    cases=_count_cases,
    reference=_count,
    outputs=(Output("launched", dtype="int"), Output("valid", dtype="int"), Output("share")),
    difficulty=1,
    minutes=15,
    tol=1e-6,
    forbid=("jfa.schedule",),
    hints=(
        "Tiles of one sequence: ceil(length / block). The grid has as many for every sequence as the longest one has.",
        "Pairs are made inside a sequence: an odd number of tiles is rounded up to the next even one, 0 stays 0.",
        "paired = sum of (tiles + 1) // 2 * 2; share = (paired - valid) / paired, or 0 if paired is 0.",
    ),
    mutants=(
        Mutant(
            "int16",
            "A length may be larger than int16 holds.",
            edit=("lengths.long()", "lengths.short()"),
        ),
        Mutant(
            "drops the last tile",
            "A last tile that is not full is not counted.",
            edit=("(lengths.long() + block - 1) // block", "lengths.long() // block"),
        ),
        Mutant(
            "one tile too many on full blocks",
            "A length that is a multiple of the block got a tile too many.",
            edit=("(lengths.long() + block - 1) // block", "lengths.long() // block + 1"),
        ),
        Mutant(
            "pairs across sequences",
            "Pairs were made over all tiles. They are made inside a sequence: two sequences have different keys.",
            edit=("int(((tiles + 1) // 2 * 2).sum())", "(valid + 1) // 2 * 2"),
        ),
        Mutant(
            "share of the valid ones",
            "The share is taken of the valid tiles. It is the share of all units that are launched in pairs.",
            edit=("(paired - valid) / paired if paired", "(paired - valid) / valid if paired"),
        ),
        Mutant(
            "in per cent",
            "The share is in per cent. A number between 0 and 1 is asked for.",
            edit=("(paired - valid) / paired if", "100 * (paired - valid) / paired if"),
        ),
        Mutant(
            "every sequence has a pair",
            "A sequence without rows got a pair of sentinels.",
            edit=("(tiles + 1) // 2 * 2", "tiles // 2 * 2 + 2 * (tiles % 2) + 2 * (tiles == 0)"),
        ),
        Mutant(
            "the grid of the packed tensor",
            "The grid was sized by all rows together. It has the longest sequence's tiles, for every sequence.",
            edit=("len(lengths) * int(tiles.max())", "-(-int(lengths.sum()) // block)"),
        ),
        Mutant(
            "sentinels against the grid",
            "The share compares with the grid of the longest. The pairs are launched from a list of valid tiles.",
            edit=(
                "(paired - valid) / paired if paired",
                "(paired - valid) / (len(lengths) * int(tiles.max())) if paired",
            ),
        ),
        Mutant(
            "nothing launched",
            "0 / 0 where all sequences are empty.",
            caught_by="runs",
            edit=(" if paired else 0.0", ""),
            expect="ZeroDivisionError",
            recognise=False,
        ),
    ),
    variants=(
        """
def count_tiles(lengths, block):
    n = [0] * len(lengths)
    for b, length in enumerate(lengths.tolist()):
        while n[b] * block < length:
            n[b] += 1
    odd = sum(t % 2 for t in n)
    return max(n) * len(n), sum(n), odd / max(sum(n) + odd, 1)
""",
        """
def count_tiles(lengths, block):
    t = torch.ceil(lengths.double() / block)
    odd = torch.remainder(t, 2).sum()
    return (t.max() * t.numel()).long(), t.sum().long(), torch.nan_to_num(odd / (t.sum() + odd))
""",
    ),
)

EXERCISES = [ZIGZAG, LIST, MEGA, QUEUE, PARTS, COUNT]
