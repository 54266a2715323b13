"""Checks of chapter 09: the machine underneath. Cycles are modelled with a B200's rates, or with those of a case."""

import math
import random

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output

B200 = {"tensor_2": 8192, "tensor_1": 16384, "rows": 128, "mufu": 16, "smem": 128}
H200 = {"tensor_2": 4096, "tensor_1": 8192, "rows": 64, "mufu": 16, "smem": 128}


def _chip(seed, **other):
    """Return an invented chip; its numbers change with the seed."""
    return {"tensor_2": 6000 + 8 * seed, "tensor_1": 9000, "rows": 96, "mufu": 20 + seed % 5, "smem": 150} | other


def _cycles(products, exps, extra_bytes, itemsize, rates):
    """Return {unit: cycles}; products: (rows, columns, contracted over, whether the first operand comes from shared memory)."""
    flops = moved = 0
    for m, n, k, from_smem in products:
        groups = math.ceil(m / rates["rows"])
        flops += 2 * groups * rates["rows"] * n * k
        moved += groups * n * k * itemsize + (m * k * itemsize if from_smem else 0)
    tensor = flops / rates["tensor_2" if itemsize == 2 else "tensor_1"]
    return {"exp": exps / rates["mufu"], "smem": (moved + extra_bytes) / rates["smem"], "tensor": tensor}


def _forward_products(m, n, d):
    return [(m, n, d, True), (m, d, n, False)]


# -- 9.1 ---------------------------------------------------------------------------------------------------------------


def _tile_cases(seed):
    s = 2 * (seed % 8)

    def case(name, m, n, d, itemsize, rates):
        return Case(name, (m, n, d, itemsize, rates))

    return [
        case("one product's rows: 128 x 128, D = 128", 128, 128, 128, 2, B200),
        case("256 queries", 256, 128 + 16 * s, 128, 2, B200),
        case("8-bit inputs", 256, 128, 128 + 16 * s, 1, B200),
        case("32 queries: a partial group", 32 + s, 128, 128, 2, B200),
        case("200 queries: a full group and a partial one", 200 + s, 64, 64, 2, B200),
        case("an H200 takes 64 rows at a time", 128, 176, 64 + 16 * s, 2, H200),
        case("an H200, 8-bit inputs, 65 queries", 65 + s, 128, 256, 1, H200),
        case("an invented chip", 250, 112, 96, 2, _chip(seed)),
        case("the same chip, 8-bit inputs", 96, 112 + 16 * s, 80, 1, _chip(seed)),
    ]


def _tile(m, n, d, itemsize, rates):
    found = _cycles(_forward_products(m, n, d), m * n, 0, itemsize, rates)
    return found["tensor"], found["exp"], found["smem"]


TILE = Exercise(
    id="9.1",
    title="Cycles of a tile, unit by unit",
    name="tile_cycles",
    cases=_tile_cases,
    reference=_tile,
    outputs=(Output("tensor"), Output("exp"), Output("smem")),
    difficulty=1,
    minutes=15,
    tol=1e-6,
    hints=(
        'How many groups of rates["rows"] rows are M rows? Round up: groups = -(-M // rates["rows"]).',
        "Products: 2 products x 2 FLOPs x the rows of all groups x N x D. Exponentials: M x N. Operand bytes: Q once, K and V once per group.",
        'tensor = 4 * groups * rows * N * D / rates[f"tensor_{itemsize}"]; smem = (M * D + groups * 2 * N * D) * itemsize / rates["smem"].',
    ),
    mutants=(
        Mutant(
            "rows that exist instead of groups",
            "A partial group takes the tensor core as long as a full one: round M up.",
            edit=('2 * 2 * groups * rates["rows"] * N * D', "2 * 2 * M * N * D"),
        ),
        Mutant(
            "multiply-add as one FLOP",
            "The products count half: a multiply-add is two FLOPs, and there are two products.",
            edit=("2 * 2 * groups", "2 * groups"),
        ),
        Mutant(
            "second operand once",
            "K and V were counted once: each group of rows reads them again.",
            edit=("groups * 2 * N * D) * itemsize", "2 * N * D) * itemsize"),
        ),
        Mutant(
            "P from shared memory",
            "P was counted among the operands: it does not come from shared memory.",
            edit=("(M * D + groups", "(M * D + M * N + groups"),
        ),
        Mutant(
            "exponentials per FLOP",
            "There is one exponential per score, not one per element of Q or per multiply-add.",
            edit=('M * N / rates["mufu"]', 'M * N * D / rates["mufu"]'),
        ),
        Mutant(
            "exponentials of missing rows",
            "The tile has exactly M rows: exponentials of rows that round up the last group were counted.",
            edit=('M * N / rates["mufu"]', 'groups * rates["rows"] * N / rates["mufu"]'),
        ),
        Mutant(
            "always the 16-bit rate",
            "8-bit inputs have a tensor rate of their own.",
            edit=('rates[f"tensor_{itemsize}"]', 'rates["tensor_2"]'),
        ),
        Mutant(
            "elements for bytes",
            "Operands were counted in elements: shared memory delivers bytes.",
            edit=("* 2 * N * D) * itemsize", "* 2 * N * D)"),
        ),
        Mutant(
            "Q once per group and operand",
            "Q was counted by full groups: only the rows that exist are delivered.",
            edit=("(M * D + groups", '(groups * rates["rows"] * D + groups'),
        ),
        Mutant(
            "a B200 built in",
            "It uses a B200's numbers whatever the chip is.",
            edit=('rates["smem"]', "128"),
        ),
    ),
    variants=(
        """
def tile_cycles(M, N, D, itemsize, rates):
    import math
    R = rates["rows"]
    full = math.ceil(M / R)
    fma = 0
    traffic = 0.0
    for group in range(full):
        rows = min(R, M - group * R)
        fma += R * N * D + R * D * N
        traffic += itemsize * (rows * D + D * N) + itemsize * N * D
    speed = {1: rates["tensor_1"], 2: rates["tensor_2"]}[itemsize]
    return 2.0 * fma / speed, (M * N) / rates["mufu"], traffic / rates["smem"]
""",
        """
def tile_cycles(M, N, D, itemsize, rates):
    up = (M + rates["rows"] - 1) // rates["rows"] * rates["rows"]
    tensor = torch.tensor(4.0 * up * N * D, dtype=torch.float64) / rates["tensor_" + str(itemsize)]
    return [float(tensor), M * N / rates["mufu"], itemsize * D * (M + 2 * N * (up // rates["rows"])) / rates["smem"]]
""",
    ),
)

# -- 9.2 ---------------------------------------------------------------------------------------------------------------


def _limit_cases(seed):
    t = seed % 7

    def case(name, direction, d, itemsize, rates):
        return Case(f"{direction}, {name}", (direction, d, itemsize, rates))

    return [
        case("D = 128, bf16, B200", "forward", 128, 2, B200 | {"smem": 128 + t}),
        case("D = 64, bf16, B200", "forward", 64, 2, B200 | {"smem": 128 + t}),
        case("D = 256, bf16, H200", "forward", 256, 2, H200 | {"mufu": 16 + t}),
        case("D = 128, 8-bit, B200", "forward", 128, 1, B200 | {"mufu": 16 + t / 4}),
        case("two units just within 5 %", "forward", 128, 2, B200 | {"mufu": 16 / 0.951, "smem": 160 + t}),
        case("two units just beyond 5 %", "forward", 128, 2, B200 | {"mufu": 16 / 0.949, "smem": 160 + t}),
        case("two units exactly 5 % apart", "forward", 285, 2, B200 | {"tensor_2": 10240, "smem": 114, "mufu": 16 + t}),
        case("D = 128, 8-bit, B200", "backward", 128, 1, B200 | {"mufu": 16 + t}),
        case("D = 128, bf16, B200", "backward", 128, 2, B200 | {"mufu": 16 + t}),
        case("D = 64, bf16, B200", "backward", 64, 2, B200 | {"mufu": 16 + t}),
        case("D = 128, bf16, H200", "backward", 128, 2, H200 | {"mufu": 16 + t}),
        case("D = 32, 8-bit, few exp2 units", "backward", 32, 1, B200 | {"mufu": 8 + t / 4}),
        case("D = 256, bf16, SMEM twice as fast", "backward", 256, 2, B200 | {"smem": 240 + t / 2}),
        case("an invented chip", "backward", 96, 2, _chip(seed, smem=300)),
    ]


def _limit(direction, d, itemsize, rates):
    if direction == "forward":
        found = _cycles(_forward_products(256, 128, d), 256 * 128, 0, itemsize, rates)
    else:
        m = n = 128
        products = [(n, m, d, True)] * 2 + [(n, d, m, False)] * 2 + [(m, d, n, True)]
        found = _cycles(products, m * n, m * n * itemsize + 8 * m * d, itemsize, rates)
    top = max(found.values())
    return " and ".join(sorted(name for name, c in found.items() if c >= 0.95 * top)), top


LIMIT = Exercise(
    id="9.2",
    title="Predict the limit, forward and backward",
    name="limit",
    cases=_limit_cases,
    reference=_limit,
    outputs=(Output("names"), Output("cycles")),
    difficulty=2,
    minutes=45,
    tol=1e-6,
    hints=(
        "Write the products down as (rows, columns, contracted over, first operand from shared memory?) and sum over them. The forward has two, the backward five.",
        "FLOPs of a product: 2 x rows (rounded up to groups) x columns x contracted. Bytes: groups x columns x contracted, and rows x contracted if the first operand comes from shared memory; times itemsize.",
        "The backward's other bytes: M * N * itemsize for dS, and 2 * M * D * 4 for dQ. Then: names with cycles >= 0.95 * max(cycles).",
    ),
    mutants=(
        Mutant(
            "more than 0.95",
            "A unit at exactly 0.95 of the slowest one's cycles belongs to the answer: at least, not more than.",
            edit=("c >= 0.95 * slowest", "c > 0.95 * slowest"),
        ),
        Mutant(
            "dQ in 16 bits",
            "dQ goes out in fp32, four bytes each, whatever the inputs are.",
            edit=("2 * M * D * 4", "2 * M * D * itemsize"),
        ),
        Mutant(
            "dQ only written",
            "dQ is written to shared memory and read from it again.",
            edit=("2 * M * D * 4", "M * D * 4"),
        ),
        Mutant(
            "dS forgotten",
            "dS passes through shared memory, and was not counted there.",
            edit=("other = M * N * itemsize + 2", "other = 2"),
        ),
        Mutant(
            "every first operand from shared memory",
            "P and dS of two products come from tensor memory: they were counted as shared memory's bytes.",
            edit=("(groups * n * k + (m * k if from_smem else 0))", "(groups * n * k + m * k)"),
        ),
        Mutant(
            "backward as 2.5 forwards",
            "2.5 times the forward holds for FLOPs. Exponentials are one per score, and shared memory has the backward's own operands.",
            source="""
def limit(direction, D, itemsize, rates):
    M, N = (256, 128) if direction == "forward" else (128, 128)
    groups = -(-M // rates["rows"])
    factor = 1.0 if direction == "forward" else 2.5
    cycles = {
        "exp": M * N * factor / rates["mufu"],
        "smem": factor * (M * D + groups * 2 * N * D) * itemsize / rates["smem"],
        "tensor": factor * 4 * groups * rates["rows"] * N * D / rates[f"tensor_{itemsize}"],
    }
    slowest = max(cycles.values())
    return " and ".join(name for name, c in cycles.items() if c >= 0.95 * slowest), slowest
""",
        ),
        Mutant(
            "no ties",
            "Units within 5 % of the slowest belong to the answer, too.",
            edit=("if c >= 0.95 * slowest", "if c == slowest"),
        ),
        Mutant(
            "10 % for 5 %",
            "A unit that is further than 5 % from the slowest was named.",
            edit=("c >= 0.95 * slowest", "c >= 0.9 * slowest"),
        ),
        Mutant(
            "four products",
            "The backward's fifth product is missing: dQ = dS K.",
            edit=("        products.append((M, D, N, True))\n", ""),
        ),
        Mutant(
            "two exponentials",
            "P is recomputed, and that is all: one exponential per score in the backward.",
            edit=('"exp": M * N / rates["mufu"]', '"exp": (1 + (direction == "backward")) * M * N / rates["mufu"]'),
        ),
        Mutant(
            "sum for the slowest",
            "The units' cycles were added: with perfect overlap only the slowest counts.",
            edit=(
                "for name, c in cycles.items() if c >= 0.95 * slowest), slowest",
                "for name, c in cycles.items() if c >= 0.95 * slowest), sum(cycles.values())",
            ),
        ),
    ),
    variants=(
        """
def limit(direction, D, itemsize, rates):
    R = rates["rows"]
    up = lambda m: (m + R - 1) // R
    if direction == "forward":
        M, N = 256, 128
        macs = up(M) * R * N * D * 2
        reads = itemsize * (M * D + 2 * up(M) * N * D)
    else:
        M = N = 128
        macs = R * (up(N) * (M * D + M * D + D * M + D * M) + up(M) * D * N)
        first = N * D + N * D + M * N
        second = up(N) * 4 * M * D + up(M) * N * D
        reads = itemsize * (first + second + M * N) + 8 * M * D
    units = [("tensor", 2 * macs / rates["tensor_%d" % itemsize]), ("smem", reads / rates["smem"]), ("exp", M * N / rates["mufu"])]
    units.sort(key=lambda u: -u[1])
    worst = units[0][1]
    return " and ".join(sorted(n for n, c in units if c > worst * 0.95 - 1e-9)), worst
""",
        """
from collections import Counter

def limit(direction, D, itemsize, rates):
    M = 256 if direction == "forward" else 128
    N, time = 128, Counter()
    def product(m, n, k, where):
        while m > 0:
            part = min(m, rates["rows"])
            time["tensor"] += 2 * rates["rows"] * n * k / rates["tensor_1" if itemsize == 1 else "tensor_2"]
            time["smem"] += (n * k + (part * k if where == "smem" else 0)) * itemsize / rates["smem"]
            m -= part
    product(M, N, D, "smem")
    if direction == "forward":
        product(M, D, N, "tmem")
    else:
        product(N, M, D, "smem")
        product(N, D, M, "tmem")
        product(N, D, M, "tmem")
        product(M, D, N, "smem")
        time["smem"] += (M * N * itemsize + 4 * M * D + 4 * M * D) / rates["smem"]
    time["exp"] = M * N / rates["mufu"]
    top = time.most_common(1)[0][1]
    return " and ".join(sorted(u for u in time if time[u] / top >= 0.95)), top
""",
    ),
)

# -- 9.3 ---------------------------------------------------------------------------------------------------------------

RING_CHIP = {"tensor_2": 8192.0, "smem": 128.0, "tma_issue": 128.0, "l2": 20.5e12 / 148 / 1.965e9, "wakeup": 40.0}
RING_CHIP |= {"tma_latency": 1000.0, "mma_latency": 200.0}


def _ring_cases(seed):
    t = 1 + (seed % 5) / 1000

    def case(name, m, n, k, **other):
        return Case(name, (m, n, k, RING_CHIP | {key: RING_CHIP[key] * f for key, f in other.items()}))

    return [
        case("128 x 128 x 64 on a B200", 128, 128, 64, tma_latency=t),
        case("narrow tiles: 128 x 64 x 64", 128, 64, 64, tma_latency=t),
        case("a tensor core of half the speed", 128, 128, 64, tensor_2=0.5, tma_latency=t),
        case("64 rows of A", 64, 128, 64, tma_latency=t),
        case("memory twice as far away", 128, 128, 64, tma_latency=2 * t),
        case("L2 of a quarter of the speed", 128, 128, 64, l2=0.25, tma_latency=t),
        case("shared memory twice as fast", 128, 128, 64, smem=2.0, tma_latency=t),
        case("a TMA unit of a quarter of the speed", 128, 128, 64, tma_issue=0.25, tma_latency=t),
        case("shared memory of half the speed", 128, 128, 64, smem=0.5, tma_latency=t),
        case(
            "no latencies, shared memory of half the speed",
            64,
            64,
            64,
            smem=0.5,
            tma_latency=0,
            mma_latency=0,
            wakeup=0,
        ),
        case("waking takes 200 cycles, 64 rows of A", 64, 64, 128, wakeup=5 * t, tensor_2=2.0),
    ]


def _ring(m, n, k, rates):
    box = 2 * k * n
    transfer = max(box / rates[unit] for unit in ("tma_issue", "l2", "smem"))
    tensor, operands = 256 * n * k / rates["tensor_2"], (2 * m * k + box) / rates["smem"]
    trip = rates["tma_latency"] + transfer + 2 * rates["wakeup"] + max(tensor, operands) + rates["mma_latency"]
    period = max(transfer, tensor, operands + box / rates["smem"])
    return trip, period, math.ceil(trip / period)


RING = Exercise(
    id="9.3",
    title="Predict the ring",
    name="ring",
    cases=_ring_cases,
    reference=_ring,
    outputs=(Output("round_trip"), Output("period"), Output("buffers", dtype="int")),
    difficulty=2,
    minutes=20,
    tol=1e-6,
    hints=(
        "The round trip is a sum: six terms, in the order in which the text names them. The period is a largest: one term per unit.",
        "Shared memory takes each tile of B twice: the TMA writes it, the product reads it. In the round trip these come one after the other, in the period they add up on one unit.",
        "period = max(tensor, (2 * M * K + 2 * (2 * K * N)) / smem, 2 * K * N / l2, 2 * K * N / tma_issue); buffers = ceil(round_trip / period).",
    ),
    mutants=(
        Mutant(
            "never a single buffer",
            "Two buffers where one trip is one period: the smallest number was asked for.",
            edit=("-int(-round_trip // period)", "max(2, -int(-round_trip // period))"),
        ),
        Mutant(
            "shared memory written or read, not both",
            "The period counts shared memory once: the TMA writes each tile of B there, and the product reads it.",
            edit=('operands + moved / rates["smem"], transfer)', "operands, transfer)"),
        ),
        Mutant(
            "one buffer too few",
            "The number of buffers was rounded down: then the last trip is not filled.",
            edit=("-int(-round_trip // period)", "int(round_trip // period)"),
        ),
        Mutant(
            "one buffer too many",
            "One more than needed: a trip of exactly n periods needs n buffers, and every other one was rounded up already.",
            edit=("-int(-round_trip // period)", "-int(-round_trip // period) + 1"),
        ),
        Mutant(
            "shared memory never slows a transfer",
            "The transfer ends in shared memory, which is one of the three that may be the slowest.",
            edit=(', rates["smem"])\n    tensor', ")\n    tensor"),
        ),
        Mutant(
            "latency forgotten",
            "The latency of the load is missing in the round trip: it is the longest part.",
            edit=('round_trip = rates["tma_latency"] + transfer', "round_trip = transfer"),
        ),
        Mutant(
            "product's latency in the period",
            "The period contains a latency, but a unit is free while its result is in flight.",
            edit=("period = max(tensor,", 'period = max(tensor + rates["mma_latency"],'),
        ),
        Mutant(
            "short A is cheap",
            "64 rows take the tensor core as long as 128.",
            edit=("tensor = 2 * 128 * N * K", "tensor = 2 * M * N * K"),
        ),
        Mutant(
            "fastest path",
            "The transfer goes at the pace of the slowest of the three, not of the fastest.",
            edit=("transfer = moved / min(", "transfer = moved / max("),
        ),
        Mutant(
            "tensor and operands one after the other",
            "The tensor core works while its operands arrive: the slower of the two counts, not their sum.",
            edit=("round_trip += max(tensor, operands)", "round_trip += tensor + operands"),
        ),
        Mutant(
            "one wake-up",
            "Two workers wake in a round trip: the one who multiplies, and the one who loads.",
            edit=('rates["mma_latency"] + rates["wakeup"]', 'rates["mma_latency"]'),
        ),
        Mutant(
            "period as a sum",
            "The period is the busiest unit's time. The units work at the same time.",
            edit=(
                'max(tensor, operands + moved / rates["smem"], transfer)',
                'tensor + operands + moved / rates["smem"] + transfer',
            ),
        ),
        Mutant(
            "A loaded again",
            "A stays in shared memory: it is read in each step, but not loaded again.",
            edit=("moved = 2 * K * N\n", "moved = 2 * K * (M + N)\n"),
        ),
    ),
    variants=(
        """
import math

def ring(M, N, K, rates):
    tile, a = K * N * 2, M * K * 2
    paths = [tile / rates[p] for p in ("tma_issue", "l2", "smem")]
    fetch = rates["tma_latency"] + max(paths)
    matmul = max(2 * max(M, 128) * N * K / rates["tensor_2"], (a + tile) / rates["smem"])
    trip = fetch + rates["wakeup"] + matmul + rates["mma_latency"] + rates["wakeup"]
    units = {
        "tensor": 256 * N * K / rates["tensor_2"], "smem": (a + 2 * tile) / rates["smem"],
        "l2": tile / rates["l2"], "tma": tile / rates["tma_issue"],
    }
    period = max(units.values())
    return trip, period, math.ceil(trip / period)
""",
        """
def ring(M, N, K, rates):
    b = 2.0 * K * N
    busy = [b / rates["l2"], b / rates["tma_issue"], (2 * b + 2 * M * K) / rates["smem"], 2 * 128 * N * K / rates["tensor_2"]]
    product = max(busy[3], (b + 2 * M * K) / rates["smem"])
    trip = product + 2 * rates["wakeup"] + rates["mma_latency"] + rates["tma_latency"] + max(busy[0], busy[1], b / rates["smem"])
    n = 1
    while n * max(busy) < trip:
        n += 1
    return [trip, max(busy), n]
""",
    ),
)

# -- 9.4 ---------------------------------------------------------------------------------------------------------------


def _account_cases(seed):
    rng = random.Random(seed)
    shift = rng.randint(1, 9)

    def case(name, events, needs):
        return Case(name, ([tuple(e) for e in events], needs))

    def moved(events):
        return [(unit, a + shift, b + shift) for unit, a, b in events]

    step = [("TMA", 0, 1200), ("tensor", 1250, 1990), ("exp", 2000, 3100), ("tensor", 3150, 3900), ("TMA", 100, 1300)]
    several = [(rng.choice("abc"), a, a + rng.randint(0, 40)) for a in (rng.randint(0, 300) for _ in range(60))]
    order = list(range(60))
    rng.shuffle(order)
    place = {event: n for n, event in enumerate(order)}
    tangled = [[o for o in rng.sample(order, 3) if place[o] < place[i]] for i in range(60)]
    diamonds, ladder = [("x", 0, 2)], [[]]
    for i in range(1, 121, 3):
        diamonds += [("x", 3 * i, 3 * i + 1), ("y", 3 * i, 3 * i + 2 + shift / 16), ("z", 3 * i + 5, 3 * i + 6)]
        ladder += [[i - 1], [i - 1], [i, i + 1]]
    line = 3000
    return [
        case("one event", moved([("tensor", 0, 10)]), [[]]),
        case("no events", [], []),
        case("the first starts late", moved([("tensor", 1000, 1100), ("exp", 1100, 1150)]), [[], [0]]),
        case(
            "events of one unit overlap",
            moved([("a", 0, 10), ("a", 5, 20), ("a", 6, 8), ("b", 30, 40)]),
            [[], [], [], []],
        ),
        case("one inside another, then a gap", moved([("a", 0, 50), ("a", 10, 20), ("a", 60, 70)]), [[], [], [1]]),
        case("waiting between two events", moved([("a", 0, 10), ("b", 100, 110), ("c", 0, 15)]), [[], [0], []]),
        case("a step of version 1", moved(step), [[], [0], [1], [2, 4], []]),
        case("needs point forward", moved([("b", 10, 20), ("c", 20, 30), ("a", 0, 10)]), [[2], [0], []]),
        case("no time passes", [("a", shift, shift), ("b", shift, shift)], [[], [0]]),
        case("sixty events in any order", several, tangled),
        case("forty diamonds: 2 to the power of 40 paths", diamonds, ladder),
        case(
            "a chain of three thousand events",
            [("x" if i % 2 else "y", 10 * (line - i), 10 * (line - i) + 4 + (i + shift) % 3) for i in range(line)],
            [[i + 1] if i + 1 < line else [] for i in range(line)],
        ),
        case("times with fractions", moved([("a", 0.25, 1.5), ("a", 1.25, 2.0), ("b", 0.5, 0.75)]), [[], [], [0, 1]]),
    ]


def _account(events, needs):
    if not events:
        return {}, 0
    start, span = min(e[1] for e in events), max(e[2] for e in events) - min(e[1] for e in events)
    busy = {}
    for unit in sorted({e[0] for e in events}):
        covered, reach = 0, start
        for begin, end in sorted((b, e) for u, b, e in events if u == unit):
            covered += max(0, end - max(begin, reach))
            reach = max(reach, end)
        busy[unit] = covered / span if span else 0.0
    left = [len(set(n)) for n in needs]
    after = [[] for _ in events]
    for i, wanted in enumerate(needs):
        for n in set(wanted):
            after[n].append(i)
    chain = [end - begin for _, begin, end in events]
    ready = [i for i, n in enumerate(left) if not n]
    for i in ready:
        for follower in after[i]:
            own = events[follower][2] - events[follower][1]
            chain[follower] = max(chain[follower], chain[i] + own)
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)
    return busy, max(chain)


ACCOUNT = Exercise(
    id="9.4",
    title="Busy shares and the longest chain",
    name="account",
    cases=_account_cases,
    reference=_account,
    outputs=(Output("busy"), Output("chain")),
    difficulty=2,
    minutes=50,
    tol=1e-9,
    hints=(
        "Busy: sort a unit's events by their start and keep how far the time is covered. An event adds only what lies beyond.",
        "Chain: the longest chain that ends in event i is its duration plus the longest among its needs. Compute each once and keep it.",
        "Needs may point forward, and chains may be thousands long: use a list of events whose needs are done, or your own stack, not a recursion.",
    ),
    mutants=(
        Mutant(
            "overlaps counted twice",
            "Cycles in which two events of a unit overlap were counted twice.",
            edit=("covered += max(0, stop - max(start, reach))", "covered += stop - start"),
        ),
        Mutant(
            "an event inside another ends it",
            "An event that lies inside an earlier one set the covered end back.",
            edit=("reach = max(reach, stop)", "reach = stop"),
        ),
        Mutant(
            "time from zero",
            "The time was counted from 0, not from the first start.",
            edit=("begin, end = min(e[1] for e in events), max", "begin, end = 0, max"),
        ),
        Mutant(
            "waits in the chain",
            "The chain holds the time between events: only their durations count.",
            edit=(
                "                chain[i] = before + events[i][2] - events[i][1]\n",
                "                first_start = min((events[n][1] for n in needs[i]), default=events[i][1])\n"
                "                chain[i] = max(before + events[i][2] - events[i][1], events[i][2] - first_start)\n",
            ),
        ),
        Mutant(
            "shortest of the needs",
            "An event waits for all its needs: the longest chain among them counts.",
            edit=("before = max((chain[n]", "before = min((chain[n]"),
        ),
        Mutant(
            "sum of the needs",
            "The chains of all needs were added: they run at the same time.",
            edit=("before = max((chain[n] for n in needs[i]), default=0)", "before = sum(chain[n] for n in needs[i])"),
        ),
        Mutant(
            "last event's chain",
            "It returned the chain of the last event in the list: the longest may end anywhere.",
            edit=("return busy, max(chain)", "return busy, chain[-1]"),
        ),
        Mutant(
            "in the order of the list",
            "Needs that come later in the list were taken as 0: they may stand in any order.",
            source="""
def account(events, needs):
    if not events:
        return {}, 0
    begin, end = min(e[1] for e in events), max(e[2] for e in events)
    busy = {}
    for unit in {e[0] for e in events}:
        covered, reach = 0, begin
        for start, stop in sorted(e[1:] for e in events if e[0] == unit):
            covered += max(0, stop - max(start, reach))
            reach = max(reach, stop)
        busy[unit] = covered / (end - begin) if end > begin else 0.0
    chain = [0] * len(events)
    for i, (_, start, stop) in enumerate(events):
        chain[i] = max((chain[n] for n in needs[i]), default=0) + stop - start
    return busy, max(chain)
""",
        ),
        Mutant(
            "every path",
            "it walks every path: there are 2 to the power of 40.",
            caught_by="runs",
            source="""
def account(events, needs):
    if not events:
        return {}, 0
    begin, end = min(e[1] for e in events), max(e[2] for e in events)
    busy = {}
    for unit in {e[0] for e in events}:
        covered, reach = 0, begin
        for start, stop in sorted(e[1:] for e in events if e[0] == unit):
            covered += max(0, stop - max(start, reach))
            reach = max(reach, stop)
        busy[unit] = covered / (end - begin) if end > begin else 0.0
    def chain(i):
        return events[i][2] - events[i][1] + max((chain(n) for n in needs[i]), default=0)
    return busy, max(chain(i) for i in range(len(events)))
""",
            expect="Time limit",
            recognise=False,
        ),
        Mutant(
            "division by no time",
            "no time may pass at all.",
            caught_by="runs",
            edit=("covered / (end - begin) if end > begin else 0.0", "covered / (end - begin)"),
            expect="ZeroDivisionError",
            recognise=False,
        ),
    ),
    variants=(
        """
def account(events, needs):
    if len(events) == 0:
        return dict(), 0
    t0, t1 = min(s for _, s, _ in events), max(e for _, _, e in events)
    marks = {}
    for unit, s, e in events:
        marks.setdefault(unit, []).extend([(s, 0, 1), (e, 1, -1)])
    shares = {}
    for unit, found in marks.items():
        depth, since, total = 0, 0, 0
        for t, _, change in sorted(found):
            if depth == 0 and change == 1:
                since = t
            depth += change
            if depth == 0:
                total += t - since
        shares[unit] = total / (t1 - t0) if t1 > t0 else 0.0
    best = [None] * len(events)
    left = set(range(len(events)))
    waiting = {i: set(needs[i]) for i in left}
    users = {i: [] for i in left}
    for i in left:
        for n in waiting[i]:
            users[n].append(i)
    ready = [i for i in left if not waiting[i]]
    while ready:
        i = ready.pop()
        best[i] = events[i][2] - events[i][1] + max([best[n] for n in needs[i]] or [0])
        for u in users[i]:
            waiting[u].discard(i)
            if not waiting[u]:
                ready.append(u)
    return shares, max(best)
""",
        """
import functools
from graphlib import TopologicalSorter

def account(events, needs):
    if not events:
        return {}, 0.0
    lo, hi = min(e[1] for e in events), max(e[2] for e in events)
    def union(spans):
        merged = functools.reduce(
            lambda done, s: done[:-1] + [(done[-1][0], max(done[-1][1], s[1]))] if done and s[0] <= done[-1][1] else done + [s],
            sorted(spans), [],
        ) if len(spans) < 200 else sorted(spans)
        return sum(b - a for a, b in merged)
    length = max(hi - lo, 1e-300)
    busy = {u: union([e[1:] for e in events if e[0] == u]) / length for u in {e[0] for e in events}}
    chain = {}
    for i in TopologicalSorter({i: set(n) for i, n in enumerate(needs)}).static_order():
        chain[i] = max((chain[n] for n in needs[i]), default=0) + events[i][2] - events[i][1]
    return busy, max(chain.values())
""",
    ),
)

# -- 9.5 ---------------------------------------------------------------------------------------------------------------


def _sums_cases(seed):
    g = kinds.generator(seed)

    def case(name, blocks, rows=128, keys=128, dim=128, **scale):
        q, k = (torch.randn(n, dim, generator=g).to(torch.bfloat16) for n in (rows, keys * blocks))
        return Case(name, (q, k, keys), scale)

    several = [case(f"{n} block{'s' * (n > 1)} of 128 keys", n) for n in (1, 2, 3, 8)]
    return [
        *several,
        case("2 blocks of 128 keys, a scale of 0.05", 2, scale=0.05),
        case("3 blocks of 128 keys, 64 queries, D = 32", 3, rows=64, dim=32),
        case("2 blocks of 64 keys, 128 queries, D = 128", 2, keys=64),
    ]


def _sums_launch(kernel, q, k, block, scale=None):
    import math

    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, dim = q.shape
    out = unwritten(rows)
    boxes = [TensorDescriptor.from_tensor(x, [n, dim]) for x, n in ((q, rows), (k, block))]
    scale = math.log2(math.e) * (scale or 1 / math.sqrt(dim))
    kernel[(1,)](*boxes, out, k.shape[0] // block, scale, M=rows, N=block, D=dim)
    return out


def _sums(q, k, block, scale=None):
    return torch.exp(q @ k.T * (scale or 1 / math.sqrt(q.shape[1]))).sum(1)


def _sums_limit(case):
    return 3_500 + 1_700 * (len(case.args[1]) // case.args[2])


_WAIT = "        if j > 0:\n            tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n"
_DOT = "            tlx.async_dot(q[0], keys, s[now], use_acc=False, mBarriers=[s_fulls[now]])\n"
_EXPS = "        if j > 0:\n            total += tl.sum(tl.math.exp2(tlx.local_load(s[other]) * scale_log2), axis=1)\n"

SUMS = Exercise(
    id="9.5",
    title="Bug hunt: a wait that comes too early",
    name="sums_kernel",
    kind="kernel",
    hunt=True,
    call=_sums_launch,
    cases=_sums_cases,
    reference=_sums,
    outputs=(Output("sums", ("row",)),),
    difficulty=2,
    minutes=25,
    tol=1e-5,
    time_limit=20.0,
    schedules=(("lazy", 1), ("random", 1)),
    limits=(
        Limit(
            "in time",
            "cycles",
            at_most=_sums_limit,
            text="at most 3,500 modelled cycles, and 1,700 more per block of keys",
        ),
    ),
    hints=(
        "The wait stands right behind the product that it waits for. Who needs that product's result first, and when?",
        "S of block j is needed one round later. But the product also reads k[now], and one round later that buffer is loaded again.",
        "Wait at the top of the round, before the load: if j > 0, for s_fulls[other], with the phase of block j - 1: ((j - 1) // 2) & 1.",
    ),
    mutants=(
        Mutant(
            "bytes of 128 x 128",
            "the announced bytes depend on N and D.",
            caught_by="runs",
            edit=("tlx.barrier_expect_bytes(k_fulls[0], 2 * N * D)", "tlx.barrier_expect_bytes(k_fulls[0], 32768)"),
            expect="k_fulls",
            recognise=False,
        ),
        Mutant(
            "the wait is deleted",
            "nothing orders the product and the loads of S.",
            caught_by="runs",
            edit=(_WAIT, ""),
            expect="Race",
            recognise=False,
        ),
        Mutant(
            "the wait just before S is loaded",
            "the load of the next K block overwrites a buffer that the product still reads.",
            caught_by="runs",
            edit=((_WAIT, ""), (_EXPS, _WAIT + _EXPS)),
            expect="k[",
            recognise=False,
        ),
        Mutant(
            "the phase of this block",
            "it waits for a phase that only comes with this round's own product.",
            caught_by="runs",
            edit=("((j - 1) // 2) & 1", "(j // 2) & 1"),
            expect="Error",
            recognise=False,
        ),
        Mutant(
            "both waits",
            "the early wait is still there: the two units take turns.",
            caught_by="in time",
            edit=(_DOT, _DOT + "            tlx.barrier_wait(s_fulls[now], (j // 2) & 1)\n"),
            expect="modelled cycles",
            recognise=False,
        ),
        Mutant(
            "exponentials before the product",
            "the product starts when the exponentials are done: they take turns in the other order.",
            caught_by="in time",
            edit=((_EXPS, ""), (_WAIT, _WAIT + _EXPS.removeprefix("        if j > 0:\n"))),
            expect="modelled cycles",
            recognise=False,
        ),
        Mutant(
            "one round too few",
            "the last block's exponentials come one round after its product, and that round is missing.",
            caught_by="runs",
            edit=("for j in range(blocks + 1)", "for j in range(blocks)"),
            expect="InFlightError",
            recognise=False,
        ),
        Mutant(
            "waits for the copy at once",
            "the copy is waited for as soon as it is asked for.",
            caught_by="in time",
            edit=(
                "[(j + 1) * N, 0], k_fulls[other])\n",
                "[(j + 1) * N, 0], k_fulls[other])\n            tlx.barrier_wait(k_fulls[other], ((j + 1) // 2) & 1)\n",
            ),
            expect="k_fulls",
            recognise=False,
        ),
        Mutant(
            "one S for all",
            "the next product overwrites the S that is still to be loaded.",
            caught_by="runs",
            edit=(("s[now], use_acc", "s[0], use_acc"), ("tlx.local_load(s[other])", "tlx.local_load(s[0])")),
            expect="s[0]",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def sums_kernel(q_desc, k_desc, out_ptr, blocks, scale_log2, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    # three buffers for K: the product of block j starts before anybody waits for that of block j - 1
    q = tlx.local_alloc((M, D), tl.bfloat16, 1)
    k = tlx.local_alloc((N, D), tl.bfloat16, 3)
    s = tlx.local_alloc((M, N), tl.float32, 2, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    k_fulls = tlx.alloc_barriers(3)
    s_fulls = tlx.alloc_barriers(2)
    tlx.barrier_expect_bytes(q_full[0], 2 * M * D)
    tlx.async_descriptor_load(q_desc, q[0], [0, 0], q_full[0])
    for j in range(2):
        if j < blocks:
            tlx.barrier_expect_bytes(k_fulls[j], 2 * N * D)
            tlx.async_descriptor_load(k_desc, k[j], [j * N, 0], k_fulls[j])
    tlx.barrier_wait(q_full[0], 0)
    total = tl.zeros((M,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(k_fulls[j % 3], (j // 3) & 1)
        tlx.async_dot(q[0], tlx.local_trans(k[j % 3]), s[j % 2], use_acc=False, mBarriers=[s_fulls[j % 2]])
        if j > 0:
            tlx.barrier_wait(s_fulls[(j - 1) % 2], ((j - 1) // 2) & 1)
        if j + 2 < blocks:
            tlx.barrier_expect_bytes(k_fulls[(j + 2) % 3], 2 * N * D)
            tlx.async_descriptor_load(k_desc, k[(j + 2) % 3], [(j + 2) * N, 0], k_fulls[(j + 2) % 3])
        if j > 0:
            total += tl.sum(tl.math.exp2(tlx.local_load(s[(j - 1) % 2]) * scale_log2), axis=1)
    tlx.barrier_wait(s_fulls[(blocks - 1) % 2], ((blocks - 1) // 2) & 1)
    total += tl.sum(tl.math.exp2(tlx.local_load(s[(blocks - 1) % 2]) * scale_log2), axis=1)
    tl.store(out_ptr + tl.arange(0, M), total)
""",
        """
@triton.jit
def sums_kernel(q_desc, k_desc, out_ptr, blocks, scale_log2, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    # workers that differ: loads and products in warps of their own, exponentials here
    q = tlx.local_alloc((M, D), tl.bfloat16, 1)
    k = tlx.local_alloc((N, D), tl.bfloat16, 2)
    s = tlx.local_alloc((M, N), tl.float32, 2, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    k_fulls = tlx.alloc_barriers(2)
    k_empties = tlx.alloc_barriers(2)
    s_fulls = tlx.alloc_barriers(2)
    s_empties = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            total = tl.zeros((M,), tl.float32)
            for j in range(blocks):
                tlx.barrier_wait(s_fulls[j % 2], (j // 2) & 1)
                scores = tlx.local_load(s[j % 2])
                tlx.barrier_arrive(s_empties[j % 2])
                total += tl.sum(tl.math.exp2(scores * scale_log2), axis=1)
            tl.store(out_ptr + tl.arange(0, M), total)
        with tlx.async_task(num_warps=1):
            tlx.barrier_wait(q_full[0], 0)
            for j in range(blocks):
                tlx.barrier_wait(k_fulls[j % 2], (j // 2) & 1)
                tlx.barrier_wait(s_empties[j % 2], ((j // 2) & 1) ^ 1)
                tlx.async_dot(q[0], tlx.local_trans(k[j % 2]), s[j % 2], use_acc=False, mBarriers=[s_fulls[j % 2], k_empties[j % 2]])
        with tlx.async_task(num_warps=1):
            tlx.barrier_expect_bytes(q_full[0], 2 * M * D)
            tlx.async_descriptor_load(q_desc, q[0], [0, 0], q_full[0])
            for j in range(blocks):
                tlx.barrier_wait(k_empties[j % 2], ((j // 2) & 1) ^ 1)
                tlx.barrier_expect_bytes(k_fulls[j % 2], 2 * N * D)
                tlx.async_descriptor_load(k_desc, k[j % 2], [j * N, 0], k_fulls[j % 2])
""",
    ),
)

# -- 9.6 ---------------------------------------------------------------------------------------------------------------

DIM, KEYS = 64, 64


def _early_cases(seed):
    g = kinds.generator(seed)

    def case(name, blocks, lift=1.0, rows=128, keys=KEYS, dim=DIM, **scale):
        q, k, v = (
            (torch.randn(n, dim, generator=g) * f).to(torch.bfloat16)
            for n, f in ((rows, lift), (keys * blocks, 1.0), (keys * blocks, 1.0))
        )
        return Case(name, (q, k, v, keys), scale)

    def hard(names):
        """Give row r scores of the kind names[r % len]: q picks a column of k, and 8 / sqrt(64) is 1."""
        k = torch.zeros(3 * KEYS, DIM)
        k[:, : len(names)] = kinds.score_rows(names, 3 * KEYS, KEYS, g).T
        q = torch.zeros(128, DIM)
        q[torch.arange(128), torch.arange(128) % len(names)] = 8.0
        v = torch.randn(3 * KEYS, DIM, generator=g)
        said = "scores of every kind, one kind per row" if len(names) > 1 else kinds.SCORES[names[0]].says
        return Case(said, tuple(x.to(torch.bfloat16) for x in (q, k, v)) + (KEYS,))

    return [
        case("one block", 1),
        case("two blocks", 2),
        case("three blocks", 3),
        hard(kinds.MODERATE),
        hard(["near -30000"]),
        case("eight blocks, large scores", 8, lift=3.0),
        case(f"two blocks, a scale of {kinds.OWN_SCALE}", 2, scale=kinds.OWN_SCALE),
        case("three blocks of 64 keys, 64 queries, D = 32", 3, rows=64, dim=32),
        case("three blocks of 32 keys, 128 queries, D = 64", 3, keys=32),
    ]


def _early_launch(kernel, q, k, v, block, scale=None):
    import math

    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, dim = q.shape
    out = unwritten(rows, dim)
    boxes = [TensorDescriptor.from_tensor(x, [n, dim]) for x, n in ((q, rows), (k, block), (v, block))]
    scale = math.log2(math.e) * (scale or 1 / math.sqrt(dim))
    kernel[(1,)](*boxes, out, k.shape[0] // block, scale, M=rows, N=block, D=dim)
    return out


def _attention(q, k, v, block, scale=None):
    return torch.softmax(q @ k.T * (scale or 1 / math.sqrt(q.shape[1])), 1) @ v


def _in_bf16(q, k, v, block, scale=None):
    """Compute it as a right kernel does: block by block in fp32, P rounded to bf16."""
    q, k, v = q.float(), k.float(), v.float()
    m, l, acc = q.new_full((len(q), 1), -math.inf), q.new_zeros(len(q), 1), torch.zeros_like(q)
    for start in range(0, len(k), block):
        s = q @ k[start : start + block].T * (scale or 1 / math.sqrt(q.shape[1]))
        new = torch.maximum(m, s.amax(1, keepdim=True))
        p, shrink = torch.exp(s - new), torch.exp(m - new)
        m, l, acc = new, l * shrink + p.sum(1, keepdim=True), acc * shrink + kinds.to_bf16(p) @ v[start : start + block]
    return acc / l


def _early_limit(case):
    return 3_000 + 1_700 * (len(case.args[1]) // case.args[3])


_K_AGAIN = (
    "        if j + 2 < blocks:  # that product was the last reader of k[now]\n"
    "            load_box(k_desc, k[now], k_fulls[now], (j + 2) * N, BYTES)\n"
)
_V_AGAIN = "        if j + 1 < blocks:\n            load_box(v_desc, v[nxt], v_fulls[nxt], (j + 1) * N, BYTES)\n"
_S_WAIT = "        tlx.barrier_wait(s_fulls[now], (j // 2) & 1)\n"
_PV = "        tlx.async_dot(p[0], v[now], acc[0], use_acc=j > 0, mBarriers=[acc_full[0]])\n"
_NEXT_S = (
    "        if j + 1 < blocks:  # its S buffer: the softmax of block j - 1 has loaded it\n"
    "            tlx.barrier_wait(k_fulls[nxt], ((j + 1) // 2) & 1)\n"
    "            keys = tlx.local_trans(k[nxt])\n"
    "            tlx.async_dot(q[0], keys, s[nxt], use_acc=False, mBarriers=[s_fulls[nxt]])\n"
)
_SOFTMAX = "        probs, alpha, m, l = softmax_step(tlx.local_load(s[now]), m, l, scale_log2)\n"
_PV_WAIT = "            tlx.barrier_wait(acc_full[0], (j - 1) & 1)\n"

EARLY = Exercise(
    id="9.6",
    title="The next product before this softmax",
    name="early_kernel",
    kind="kernel",
    call=_early_launch,
    cases=_early_cases,
    reference=_attention,
    arithmetic=_in_bf16,
    outputs=(Output("out", ("row", "dim")),),
    difficulty=3,
    minutes=40,
    tol=1e-4,
    slack=3.0,
    time_limit=30.0,
    schedules=(("random", 1),),
    limits=(
        Limit("one warp group", "tasks", at_most=0, text="no tasks"),
        Limit(
            "in time",
            "cycles",
            at_most=_early_limit,
            text="at most 3,000 modelled cycles, and 1,700 more per block of keys",
        ),
    ),
    hints=(
        "Before the loop: load K of block 1, wait for Q and K of block 0, start the S of block 0. In round j: start the S of block j + 1, then do the softmax of block j.",
        "k[now] is free when S of block j is there; acc, p and the other v when PV of block j - 1 is there. Load a buffer again right after the wait that freed it.",
        "In round j: wait k_fulls[nxt], start S of j + 1; wait s_fulls[now]; load k[now] for j + 2; softmax; if j > 0 wait acc_full with (j - 1) & 1 and rescale; "
        "load v[nxt] for j + 1; store P; wait v_fulls[now]; start PV. After the loop wait for the last PV.",
    ),
    mutants=(
        Mutant(
            "blocks of 64 keys for good",
            "Rows of a block were counted in blocks of 64 keys. A block has N keys.",
            edit=(
                ("k_fulls[now], (j + 2) * N, BYTES)", "k_fulls[now], (j + 2) * 64, BYTES)"),
                ("v_fulls[nxt], (j + 1) * N, BYTES)", "v_fulls[nxt], (j + 1) * 64, BYTES)"),
            ),
        ),
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=(_SOFTMAX, _SOFTMAX.replace("scale_log2)", "1.4426950408889634 / (D**0.5))")),
        ),
        Mutant(
            "PV is waited for at once",
            "the wait for PV stands right behind it.",
            caught_by="in time",
            edit=(
                (_PV_WAIT, ""),
                (_PV, _PV + "        tlx.barrier_wait(acc_full[0], j & 1)\n"),
                ("    tlx.barrier_wait(acc_full[0], (blocks - 1) & 1)\n", ""),
            ),
            expect="modelled cycles",
            recognise=False,
        ),
        Mutant(
            "S when it is needed",
            "S is asked for when its softmax is next.",
            caught_by="in time",
            edit=(
                (
                    "    tlx.barrier_wait(k_fulls[0], 0)\n    first = tlx.local_trans(k[0])\n"
                    "    tlx.async_dot(q[0], first, s[0], use_acc=False, mBarriers=[s_fulls[0]])\n",
                    "",
                ),
                (
                    "        if j + 1 < blocks:  # its S buffer: the softmax of block j - 1 has loaded it\n",
                    "        if True:\n",
                ),
                ("tlx.barrier_wait(k_fulls[nxt], ((j + 1) // 2) & 1)", "tlx.barrier_wait(k_fulls[now], (j // 2) & 1)"),
                ("keys = tlx.local_trans(k[nxt])", "keys = tlx.local_trans(k[now])"),
                (
                    "tlx.async_dot(q[0], keys, s[nxt], use_acc=False, mBarriers=[s_fulls[nxt]])",
                    "tlx.async_dot(q[0], keys, s[now], use_acc=False, mBarriers=[s_fulls[now]])",
                ),
            ),
            expect="s_fulls",
            recognise=False,
        ),
        Mutant(
            "a worker for the loads",
            "a task of its own was given to the loads: here one warp group orders everything.",
            caught_by="one warp group",
            edit=(
                (
                    "    if blocks > 1:\n",
                    '    with tlx.async_tasks():\n        with tlx.async_task("default"):\n            tlx.barrier_wait(q_full[0], 0)\n        with tlx.async_task(num_warps=1):\n            tlx.barrier_wait(k_fulls[0], 0)\n    if blocks > 1:\n',
                ),
            ),
            expect="2 async tasks",
            recognise=False,
        ),
        Mutant(
            "K loaded before its product is done",
            "the copy overwrites a K block that the product still reads.",
            caught_by="runs",
            edit=((_K_AGAIN, ""), (_S_WAIT, _K_AGAIN + _S_WAIT)),
            expect="k[",
            recognise=False,
        ),
        Mutant(
            "V loaded before PV is done",
            "the copy overwrites a V block that PV still reads.",
            caught_by="runs",
            edit=((_V_AGAIN, ""), (_K_AGAIN, _K_AGAIN + _V_AGAIN)),
            expect="v[",
            recognise=False,
        ),
        Mutant(
            "P stored before PV is done",
            "P is overwritten while PV of the block before reads it.",
            caught_by="runs",
            edit=(
                ("        tlx.local_store(p[0], probs.to(tl.bfloat16))\n", ""),
                (
                    "        if j > 0:  # only now",
                    "        tlx.local_store(p[0], probs.to(tl.bfloat16))\n        if j > 0:  # only now",
                ),
            ),
            expect="p[0]",
            recognise=False,
        ),
        Mutant(
            "the last PV is not waited for",
            "acc is loaded while the last PV still adds to it.",
            caught_by="runs",
            edit=("    tlx.barrier_wait(acc_full[0], (blocks - 1) & 1)\n", ""),
            expect="acc",
            recognise=False,
        ),
        Mutant(
            "forgets to rescale",
            "The accumulator is not rescaled when the maximum grows.",
            edit=("            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])\n", ""),
        ),
        Mutant(
            "one phase ahead",
            "It waits for this round's PV, which has not been started.",
            caught_by="runs",
            edit=(_PV_WAIT, _PV_WAIT.replace("(j - 1) & 1", "j & 1")),
            expect="Error",
            recognise=False,
        ),
        Mutant(
            "the first block added to nothing",
            "acc is fresh memory: the first product must not add to it.",
            caught_by="runs",
            edit=("use_acc=j > 0", "use_acc=True"),
            expect="acc",
            recognise=False,
        ),
        Mutant(
            "the same values twice",
            "V of the block before was used again.",
            edit=("v_fulls[nxt], (j + 1) * N, BYTES)", "v_fulls[nxt], j * N, BYTES)"),
        ),
    ),
    variants=(
        (  # one S buffer less in use at a time: the next S is started when this one is in registers
            (_NEXT_S, ""),
            (
                _SOFTMAX,
                "        scores = tlx.local_load(s[now])\n"
                + _NEXT_S
                + _SOFTMAX.replace("tlx.local_load(s[now])", "scores"),
            ),
        ),
        (
            # the next V in three buffers' worth of freedom: its load waits for nothing but PV of two blocks before
            ("v = tlx.local_alloc((N, D), tl.bfloat16, 2)", "v = tlx.local_alloc((N, D), tl.bfloat16, 3)"),
            ("v_fulls = tlx.alloc_barriers(2)", "v_fulls = tlx.alloc_barriers(3)"),
            (_V_AGAIN, ""),
            (
                _K_AGAIN,
                _K_AGAIN
                + "        if j + 1 < blocks:\n            at = (j + 1) % 3\n            load_box(v_desc, v[at], v_fulls[at], (j + 1) * N, BYTES)\n",
            ),
            ("tlx.barrier_wait(v_fulls[now], (j // 2) & 1)", "tlx.barrier_wait(v_fulls[j % 3], (j // 3) & 1)"),
            ("tlx.async_dot(p[0], v[now], acc[0]", "tlx.async_dot(p[0], v[j % 3], acc[0]"),
        ),
        (
            # the rescaling of the first block without a condition: alpha is 0 there, and acc is set to 0 first
            (
                "    l = tl.zeros((M,), tl.float32)\n    if blocks > 1:",
                "    l = tl.zeros((M,), tl.float32)\n    tlx.local_store(acc[0], tl.zeros((M, D), tl.float32))\n    if blocks > 1:",
            ),
            ("use_acc=j > 0", "use_acc=True"),
            (
                "        if j + 1 < blocks:  # its S buffer: the softmax of block j - 1 has loaded it\n",
                "        more = j < blocks - 1\n        if more:\n",
            ),
        ),
    ),
)

EXERCISES = [TILE, LIMIT, RING, ACCOUNT, SUMS, EARLY]
