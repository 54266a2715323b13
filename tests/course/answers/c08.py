"""Answers to chapter 08's exercises."""

from tests.course.answers import right, wrong

ASK = "        upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)\n"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 8.1
    wrong("8.1", "round robin", ("worker if r % 2 == 0 else workers - 1 - worker", "worker")),
    wrong("8.1", "odd rounds upwards", ("if r % 2 == 0 else", "if r % 2 == 1 else")),
    wrong("8.1", "one too far backwards", ("workers - 1 - worker", "workers - worker")),
    wrong(
        "8.1",
        "places that do not exist",
        ("        if r * workers + turn < count:\n            places", "        if True:\n            places"),
    ),
    wrong("8.1", "no short round", ("range(-(-count // workers))", "range(count // workers)")),
    wrong(
        "8.1",
        "the short round dealt among its places",
        ("workers - 1 - worker", "min(workers, count - r * workers) - 1 - worker"),
    ),
    wrong("8.1", "the last round upwards", ("if r % 2 == 0 else", "if r % 2 == 0 or (r + 1) * workers > count else")),
    wrong("8.1", "one place too many", ("turn < count:", "turn <= count:")),
    wrong("8.1", "largest first backwards", ("    return places", "    return places[::-1]")),
    wrong(
        "8.1",
        "rounds exchanged in pairs",
        ("places.append(r * workers + turn)", "places.append((r ^ 1) * workers + turn)"),
    ),
    wrong("8.1", "every worker's", ("    return places", "    return list(range(count))")),
    wrong(
        "8.1",
        "at least one round",
        ("range(-(-count // workers))", "range(max(1, -(-count // workers)))"),
        ("        if r * workers + turn < count:\n", "        if r * workers + turn < max(count, 1):\n"),
    ),
    right(
        "8.1",
        "steps",
        source="""
def zigzag_places(worker, workers, count):
    up = range(worker, count, 2 * workers)
    down = range(2 * workers - 1 - worker, count, 2 * workers)
    return sorted([*up, *down])
""",
    ),
    right(
        "8.1",
        "torch",
        source="""
def zigzag_places(worker: int, workers: int, count: int) -> list[int]:
    rounds = -(-count // workers)
    deal = torch.arange(rounds * workers).reshape(rounds, workers)
    deal[1::2] = deal[1::2].flip(1)
    mine = deal[:, worker]
    return mine[mine < count].tolist()
""",
    ),
    # ------------------------------------------------------------------------------------------ 8.2
    wrong(
        "8.2",
        "lists",
        source="""
def sorted_tiles(offsets, total, block_m, block_n):
    o = offsets.tolist()
    tiles = []
    for b in range(len(o) - 1):
        n = o[b + 1] - o[b]
        for r in range(0, n, block_m):
            tiles.append((b, r, -(-min(r + block_m, n) // block_n)))
    tiles.sort(key=lambda t: -t[2])
    pad = -(-total // block_m) + len(o) - 1 - len(tiles)
    tiles += [(-1, -1, 0)] * pad
    s, r, c = map(torch.tensor, zip(*tiles))
    return s, r, c, torch.tensor([len(tiles) - pad])
""",
    ),
    wrong(
        "8.2",
        "repeat_interleave",
        (
            "seq = torch.searchsorted(ends, slot, right=True).clamp(max=len(lengths) - 1)",
            "seq = torch.nn.functional.pad(torch.repeat_interleave(torch.arange(len(lengths)), tiles), (0, len(slot)))[: len(slot)]",
        ),
    ),
    wrong("8.2", "count asked", ("    there = slot < ends[-1]", "    n = int(ends[-1])\n    there = slot < n")),
    wrong(
        "8.2",
        "sequence from the left",
        ("torch.searchsorted(ends, slot, right=True)", "torch.searchsorted(ends, slot)"),
    ),
    wrong("8.2", "rising cost", ("torch.sort(cost, descending=True, stable=True)", "torch.sort(cost, stable=True)")),
    wrong(
        "8.2",
        "unstable",
        ("torch.sort(cost, descending=True, stable=True)", "torch.sort(cost.flip(0), descending=True, stable=True)"),
        ("    there = slot", "    order = len(slot) - 1 - order\n    there = slot"),
    ),
    wrong("8.2", "cost of the whole sequence", ("torch.minimum(row + block_m, lengths[seq])", "lengths[seq]")),
    wrong("8.2", "cost without the end", ("torch.minimum(row + block_m, lengths[seq])", "row + block_m")),
    wrong("8.2", "cost of the first row", ("torch.minimum(row + block_m, lengths[seq])", "row + 1")),
    wrong("8.2", "cost rounded down", ("(seen + block_n - 1) // block_n, 0)", "(seen // block_n).clamp(min=1), 0)")),
    wrong("8.2", "cost in keys", ("(seen + block_n - 1) // block_n, 0)", "seen, 0)")),
    wrong("8.2", "tiles rounded down", ("(lengths + block_m - 1) // block_m", "lengths // block_m")),
    wrong(
        "8.2",
        "no capacity",
        (
            "slot = torch.arange(-(-total // block_m) + len(lengths), device=offsets.device)",
            "slot = torch.arange(-(-total // block_m) + len(lengths) - 1, device=offsets.device)",
        ),
    ),
    wrong("8.2", "0 behind the last", ("torch.where(there, seq[order], -1)", "torch.where(there, seq[order], 0)")),
    wrong(
        "8.2",
        "rows in tiles",
        ("row = (slot - (ends - tiles)[seq]) * block_m", "row = slot - (ends - tiles)[seq]"),
        ("torch.minimum(row + block_m", "torch.minimum((row + 1) * block_m"),
    ),
    wrong(
        "8.2",
        "rows of the packed tensor",
        ("torch.where(there, row[order], -1), cost", "torch.where(there, (row + offsets[seq])[order], -1), cost"),
    ),
    wrong("8.2", "count as a number", ("cost, ends[-1:]", "cost, len(slot)")),
    wrong(
        "8.2",
        "a loop over sequences",
        source="""
def sorted_tiles(offsets, total, block_m, block_n):
    lengths = (offsets[1:] - offsets[:-1]).long()
    slot = torch.arange(-(-total // block_m) + len(lengths))
    tiles = (lengths + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    seq = torch.zeros_like(slot)
    for b in range(len(lengths) - 1):
        seq += slot >= ends[b]
    row = (slot - (ends - tiles)[seq]) * block_m
    seen = torch.minimum(row + block_m, lengths[seq])
    there = slot < ends[-1]
    cost, order = torch.sort(torch.where(there, (seen + block_n - 1) // block_n, 0), descending=True, stable=True)
    return torch.where(there, seq[order], -1), torch.where(there, row[order], -1), cost, ends[-1:]
""",
    ),
    right(
        "8.2",
        "argsort of a key",
        source="""
def sorted_tiles(offsets, total, block_m, block_n):
    n = offsets.diff().to(torch.int64)
    B = n.shape[0]
    size = (total + block_m - 1) // block_m + B
    per = torch.div(n + (block_m - 1), block_m, rounding_mode="trunc")
    first = torch.cumsum(per, 0) - per
    place = torch.arange(size)
    seq = (place[:, None] >= (first + per)[None, :]).sum(1).clamp(max=B - 1)
    valid = place < per.sum()
    row = (place - first.gather(0, seq)) * block_m
    top = torch.minimum(row + block_m, n.gather(0, seq))
    cost = torch.where(valid, torch.div(top + block_n - 1, block_n, rounding_mode="floor"), torch.zeros_like(top))
    order = (cost * -size + place).argsort()
    pick = lambda x: torch.where(valid[order], x[order], torch.full_like(x, -1))
    return pick(seq), pick(row), cost[order], valid.sum().reshape(1)
""",
    ),
    right(
        "8.2",
        "repeat_interleave with its size",
        (
            "seq = torch.searchsorted(ends, slot, right=True).clamp(max=len(lengths) - 1)",
            "rest = (len(slot) - ends[-1:]).clamp(min=0)\n    seq = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.cat((tiles, rest)), output_size=len(slot))\n    seq = seq.clamp(max=len(lengths) - 1)",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 8.3
    wrong("8.3", "heads forgotten", ("mean_load = heads * cost", "mean_load = cost")),
    wrong("8.3", "heads at the tile", ("cost.amax(1) > mean_load", "heads * cost.amax(1) > mean_load")),
    wrong("8.3", "workers forgotten", (" / workers", "")),
    wrong("8.3", "alpha the other way", ("u ** (-1 / alpha)", "u ** (-alpha)")),
    wrong("8.3", "u to 1 / alpha", ("u ** (-1 / alpha)", "u ** (1 / alpha)")),
    wrong("8.3", "median load", ("heads * cost.sum(1) / workers", "heads * tiles * cost.median(1).values / workers")),
    wrong(
        "8.3",
        "expected mean",
        (
            "heads * cost.sum(1) / workers",
            "heads * tiles * (alpha / (alpha - 1) if alpha > 1 else float('inf')) / workers",
        ),
    ),
    wrong("8.3", "exponential costs", ("u ** (-1 / alpha)", "-torch.log(u)")),
    wrong(
        "8.3",
        "heads drawn apart",
        ("torch.rand(20_000, tiles, dtype=torch.float64)", "torch.rand(20_000, tiles * heads, dtype=torch.float64)"),
        ("heads * cost.sum(1)", "cost.sum(1)"),
    ),
    wrong("8.3", "100 batches", ("20_000", "100")),
    wrong("8.3", "excess over 1", ("u ** (-1 / alpha)", "u ** (-1 / alpha) - 1")),
    wrong(
        "8.3", "the share of batches in which it does not", ("cost.amax(1) > mean_load", "cost.amax(1) <= mean_load")
    ),
    right(
        "8.3",
        "numpy's pareto",
        source="""
import numpy as np

def mega_share(alpha, tiles, heads, workers):
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(30):
        cost = 1 + rng.pareto(alpha, (1000, tiles))
        hits += int((cost.max(1) * workers > heads * cost.sum(1)).sum())
    return hits / 30_000
""",
    ),
    # ------------------------------------------------------------------------------------------ 8.4
    wrong(
        "8.4",
        "asks after the tile",
        (ASK, ""),
        ("        tile = upcoming\n", "        tile = tl.atomic_add(asked_ptr, 1)\n"),
    ),
    wrong("8.4", "draws from 0", (ASK, ASK.replace("tl.num_programs(0) + ", ""))),
    wrong("8.4", "static", (ASK, "        upcoming = tile + tl.num_programs(0)\n")),
    wrong(
        "8.4",
        "static, and the counter set",
        (ASK, "        upcoming = tile + tl.num_programs(0)\n        tl.atomic_add(asked_ptr, 1)\n"),
    ),
    wrong("8.4", "asks twice per tile", (ASK, ASK + "        tl.atomic_add(asked_ptr, 1)\n")),
    wrong(
        "8.4",
        "asks once more at the end",
        ("        tile = upcoming\n", "        tile = upcoming\n    tl.atomic_add(asked_ptr, 1)\n"),
    ),
    wrong(
        "8.4",
        "the first tile asked for",
        ("    tile = tl.program_id(0)\n", "    tile = tl.atomic_add(asked_ptr, 1)\n"),
        (ASK, ASK.replace("tl.num_programs(0) + ", "")),
    ),
    wrong(
        "8.4",
        "load and store for the counter",
        (
            ASK,
            "        upcoming = tl.num_programs(0) + tl.load(asked_ptr)\n        tl.store(asked_ptr, upcoming - tl.num_programs(0) + 1)\n",
        ),
    ),
    wrong("8.4", "one more than drawn", (ASK, ASK.replace("(asked_ptr, 1)", "(asked_ptr, 1) + 1"))),
    wrong("8.4", "stops before the last", ("while tile < count:", "while tile < count - 1:")),
    wrong(
        "8.4",
        "program 0 does all",
        (ASK, "        upcoming = tile + 1\n        tl.atomic_add(asked_ptr, 1)\n"),
        ("while tile < count:", "while (tile < count) & (tl.program_id(0) == 0):"),
    ),
    wrong(
        "8.4",
        "asks only while something is left",
        (ASK, "        upcoming = count\n        if tile + tl.num_programs(0) < count:\n    " + ASK),
    ),
    wrong("8.4", "the output overwritten", ("tl.load(out_ptr + at) + 2 * x", "2 * x")),
    right(
        "8.4",
        "asks behind the load",
        (ASK, ""),
        ("        x = tl.load(x_ptr + at)\n", "        x = tl.load(x_ptr + at)\n" + ASK),
    ),
    right(
        "8.4",
        "atomic adds to out",
        (
            "        tl.store(out_ptr + at, tl.load(out_ptr + at) + 2 * x)\n",
            "        tl.atomic_add(out_ptr + at, x + x)\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 8.5
    wrong("8.5", "size rounded down", ("max(1, -(-sum(costs) // workers))", "max(1, sum(costs) // workers)")),
    wrong(
        "8.5",
        "size in keys",
        ("size = max(1, -(-sum(costs) // workers))", "size = max(1, -(-bounds[-1] // (workers * block)))"),
    ),
    wrong("8.5", "no least size", ("max(1, -(-sum(costs) // workers))", "-(-sum(costs) // workers)")),
    wrong(
        "8.5",
        "parts of exactly size",
        ("first, end = p * cost // parts, (p + 1) * cost // parts", "first, end = p * size, min((p + 1) * size, cost)"),
    ),
    wrong("8.5", "parts rounded down", ("parts = -(-cost // size)", "parts = max(1, cost // size) if cost else 0")),
    wrong("8.5", "a part for no keys", ("parts = -(-cost // size)", "parts = max(1, -(-cost // size))")),
    wrong("8.5", "nothing cut", ("parts = -(-cost // size)", "parts = min(1, cost)")),
    wrong("8.5", "whole tiles moved as well", ("parts * (dim + 1) if parts > 1 else 0", "parts * (dim + 1)")),
    wrong("8.5", "the lse not moved", ("parts * (dim + 1) if", "parts * dim if")),
    wrong("8.5", "the last part not moved", ("parts * (dim + 1) if", "(parts - 1) * (dim + 1) if")),
    wrong(
        "8.5",
        "parts averaged",
        (
            "            acc = acc * torch.exp(lse - both) + part * torch.exp(part_lse - both)\n",
            "            acc = acc + part / parts\n",
        ),
    ),
    wrong(
        "8.5",
        "parts added",
        (
            "            acc = acc * torch.exp(lse - both) + part * torch.exp(part_lse - both)\n",
            "            acc = acc + part * torch.exp(part_lse - both)\n",
        ),
    ),
    wrong("8.5", "lse without its maximum", ("top + torch.log(weights.sum())", "torch.log(weights.sum())")),
    wrong("8.5", "no maximum", ("top = scores.max()", "top = torch.zeros(())")),
    wrong("8.5", "scores not scaled", (" / dim**0.5", "")),
    wrong("8.5", "rows past the sequence", ("min(bounds[b] + end * block, bounds[b + 1])", "bounds[b] + end * block")),
    wrong(
        "8.5",
        "sequences' offsets forgotten",
        (
            "slice(bounds[b] + first * block, min(bounds[b] + end * block, bounds[b + 1]))",
            "slice(first * block, min(end * block, bounds[b + 1] - bounds[b]))",
        ),
    ),
    wrong(
        "8.5",
        "plan in keys",
        (
            "plan.append((b, first, end))",
            "plan.append((b, first * block, min(end * block, bounds[b + 1] - bounds[b])))",
        ),
    ),
    wrong("8.5", "inclusive ends", ("plan.append((b, first, end))", "plan.append((b, first, end - 1))")),
    wrong(
        "8.5",
        "computed whole, planned in parts",
        source="""
def attend_in_parts(q, k, v, k_offsets, workers, block):
    o, D = k_offsets.tolist(), q.shape[1]
    costs = [-(-(b - a) // block) for a, b in zip(o, o[1:])]
    size = max(1, -(-sum(costs) // workers))
    out, plan, moved = torch.zeros_like(q), [], 0
    for b, cost in enumerate(costs):
        parts = -(-cost // size)
        plan += [(b, p * cost // parts, (p + 1) * cost // parts) for p in range(parts)]
        moved += parts * (D + 1) if parts > 1 else 0
        if cost:
            s = k[o[b] : o[b + 1]].mul(q[b]).sum(1) / D**0.5
            w = torch.exp(s - s.max())
            out[b] = w @ v[o[b] : o[b + 1]] / w.sum()
    return out, torch.tensor(plan, dtype=torch.int64).reshape(-1, 3), moved
""",
    ),
    right(
        "8.5",
        "parts kept, then merged",
        source="""
def part_of(q, k, v):
    s = torch.mv(k, q) * q.numel() ** -0.5
    m = s.amax()
    w = (s - m).exp()
    total = w.sum()
    return w @ v / total, m + total.log()

def attend_in_parts(q, k, v, k_offsets, workers, block):
    o = k_offsets.tolist()
    B, D = q.shape
    cost = [(o[b + 1] - o[b] + block - 1) // block for b in range(B)]
    size = max(1, (sum(cost) + workers - 1) // workers)
    rows, outs, moved = [], [], 0
    for b in range(B):
        parts = (cost[b] + size - 1) // size if cost[b] > size else min(cost[b], 1)
        found = []
        for p in range(parts):
            a, e = p * cost[b] // parts, (p + 1) * cost[b] // parts
            rows.append([b, a, e])
            where = slice(o[b] + a * block, min(o[b] + e * block, o[b + 1]))
            found.append(part_of(q[b], k[where], v[where]))
        if len(found) > 1:
            moved += len(found) * (D + 1)
        if not found:
            outs.append(torch.zeros(D))
            continue
        top = max(l for _, l in found)
        weight = [torch.exp(l - top) for _, l in found]
        outs.append(sum(w * x for w, (x, _) in zip(weight, found)) / sum(weight))
    plan = torch.tensor(rows, dtype=torch.int32) if rows else torch.zeros(0, 3, dtype=torch.int32)
    return torch.stack(outs), plan, moved
""",
    ),
    # ------------------------------------------------------------------------------------------ 8.6
    wrong("8.6", "rows for tiles", ("tiles = (lengths.long() + block - 1) // block", "tiles = lengths.long()")),
    wrong("8.6", "tiles rounded down", ("(lengths.long() + block - 1) // block", "lengths.long() // block")),
    wrong(
        "8.6",
        "a tile for no rows",
        ("(lengths.long() + block - 1) // block", "((lengths.long() + block - 1) // block).clamp(min=1)"),
    ),
    wrong(
        "8.6",
        "sentinels of launched",
        ("(paired - valid) / paired if paired", "(paired - valid) / (len(lengths) * int(tiles.max())) if paired"),
    ),
    wrong("8.6", "sentinels of valid", ("(paired - valid) / paired if paired", "(paired - valid) / valid if paired")),
    wrong(
        "8.6",
        "empty programs for sentinels",
        ("(paired - valid) / paired if paired", "1 - valid / (len(lengths) * int(tiles.max())) if paired"),
    ),
    wrong("8.6", "pairs over all sequences", ("int(((tiles + 1) // 2 * 2).sum())", "(valid + 1) // 2 * 2")),
    wrong("8.6", "0 / 0", (" if paired else 0.0", "")),
    wrong("8.6", "percent", ("(paired - valid) / paired if", "100 * (paired - valid) / paired if")),
    wrong(
        "8.6",
        "int32 sums",
        ("tiles = (lengths.long() + block - 1) // block", "tiles = (lengths.short() + block - 1) // block"),
    ),
    wrong("8.6", "launched by the sum", ("len(lengths) * int(tiles.max())", "int(tiles.sum())")),
    wrong(
        "8.6",
        "launched in pairs",
        ("len(lengths) * int(tiles.max())", "len(lengths) * int((tiles.max() + 1) // 2 * 2)"),
    ),
    right(
        "8.6",
        "lists",
        source="""
def count_tiles(lengths, block):
    tiles = [-(-n // block) for n in lengths.tolist()]
    odd = sum(t % 2 for t in tiles)
    valid = sum(tiles)
    return len(tiles) * max(tiles), valid, odd / (valid + odd) if valid else 0
""",
    ),
    right(
        "8.6",
        "numpy",
        source="""
import numpy as np

def count_tiles(lengths, block: int):
    t = np.ceil(lengths.numpy().astype(np.float64) / block).astype(np.int64)
    sentinels = int((t & 1).sum())
    units = int(t.sum()) + sentinels
    return int(t.max()) * t.size, int(t.sum()), sentinels / max(units, 1)
""",
    ),
    # ------------------------------------------------------------------------------------------ tried later
    right(
        "8.2",
        "comparison table instead of a search",
        source="""
def sorted_tiles(offsets, total, block_m, block_n):
    n = torch.diff(offsets).to(torch.int64)
    B = n.shape[0]
    per = torch.div(n + (block_m - 1), block_m, rounding_mode="trunc")
    stop = torch.cumsum(per, dim=0)
    begin = stop - per
    i = torch.arange((total + block_m - 1) // block_m + B)
    seq = (i[:, None] >= stop[None, :]).sum(1).clamp(0, B - 1)
    row = block_m * (i - begin.gather(0, seq))
    live = i < stop[-1]
    cost = torch.div(torch.minimum(row + block_m, n.gather(0, seq)) + (block_n - 1), block_n, rounding_mode="trunc")
    cost = torch.where(live, cost, torch.zeros_like(cost))
    key = -cost * (len(i) + 1) + i
    order = key.argsort()
    gone = ~live[order]
    return seq[order].masked_fill(gone, -1), row[order].masked_fill(gone, -1), cost[order], stop[-1].reshape(1)
""",
    ),
    wrong(
        "8.5",
        "moved float",
        (
            "return out, torch.tensor(plan, dtype=torch.int64).reshape(-1, 3), moved",
            "return out, torch.tensor(plan, dtype=torch.int64).reshape(-1, 3), moved * 1.0",
        ),
    ),
    right(
        "8.5",
        "parts collected, then merged by weights",
        source="""
import math
def _part(q, k, v):
    s = torch.mv(k, q) * (1.0 / math.sqrt(q.numel()))
    m = torch.amax(s)
    e = (s - m).exp()
    return e @ v / e.sum(), m + e.sum().log()

def attend_in_parts(q, k, v, k_offsets, workers, block):
    o = [int(x) for x in k_offsets]
    cost = [math.ceil((o[b + 1] - o[b]) / block) for b in range(len(o) - 1)]
    size = max(1, math.ceil(sum(cost) / workers))
    plan, moved, out = [], 0, torch.zeros(q.shape)
    for b in range(len(cost)):
        if cost[b] == 0:
            continue
        parts = 1 if cost[b] <= size else math.ceil(cost[b] / size)
        cuts = [p * cost[b] // parts for p in range(parts + 1)]
        done = []
        for a, z in zip(cuts, cuts[1:]):
            plan.append([b, a, z])
            lo, hi = o[b] + a * block, min(o[b] + z * block, o[b + 1])
            done.append(_part(q[b], k[lo:hi], v[lo:hi]))
        lses = torch.stack([l for _, l in done])
        w = (lses - lses.max()).exp()
        w = w / w.sum()
        for weight, (piece, _) in zip(w, done):
            out[b] += weight * piece
        if parts > 1:
            moved += parts * (q.shape[1] + 1)
    return out, torch.tensor(plan).view(-1, 3).to(torch.int64), moved
""",
    ),
    wrong(
        "8.6",
        "float launched",
        ("return len(lengths) * int(tiles.max())", "return 1.0 * len(lengths) * int(tiles.max())"),
    ),
]
