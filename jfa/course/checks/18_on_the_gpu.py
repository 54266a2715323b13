"""Checks of chapter 18: on the GPU. All exercises are about numbers, so no GPU is needed."""

import random
import statistics

import torch

from jfa.course import kinds
from jfa.course.spec import Case, Exercise, Mutant, Output

COUNTERS = ("jfa.masks", "jfa.bench")  # the package's own counting is no answer


def _lengths(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


# -- 18.1 --------------------------------------------------------------------------------------------------------------


def _flops_cases(seed):
    s = seed % 5
    return [
        Case("one sequence, 3 queries and more keys", (_lengths(3), _lengths(6 + s), 1, 16, False)),
        Case("as many queries as keys", (_lengths(4, 7 + s), _lengths(4, 7 + s), 2, 32, False)),
        Case("backward", (_lengths(6, 2), _lengths(9 + s, 2), 4, 64, True)),
        Case("more queries than keys", (_lengths(8 + s, 5), _lengths(3, 1), 1, 16, False)),
        Case("empty sequences on either side", (_lengths(0, 5, 3), _lengths(4, 0, 6 + s), 3, 128, False)),
        Case(
            "lengths 5, 0, 33, 1 and one of 200",
            (_lengths(5, 0, 33, 1, 200), _lengths(17, 4, 40, 0, 200 + s), 4, 128, False),
        ),
        Case("more than 2**31 FLOPs", (_lengths(700, 3), _lengths(701 + s, 5), 41, 257, True)),
    ]


def _flops(len_q, len_kv, heads, head_dim, backward=False):
    pairs = 0
    for n, m in zip(len_q.tolist(), len_kv.tolist()):
        i = torch.arange(n)[:, None]
        j = torch.arange(m)[None, :]
        pairs += int((j <= i + m - n).sum())
    return (10 if backward else 4) * head_dim * heads * pairs


FLOPS = Exercise(
    id="18.1",
    title="The FLOPs of a causal batch",
    name="causal_flops",
    cases=_flops_cases,
    reference=_flops,
    outputs=(Output("flops", dtype="int"),),
    difficulty=1,
    minutes=15,
    forbid=COUNTERS,
    hints=(
        "How many keys does query i see? Write it down for the first and the last query of a sequence with 3 queries and 5 keys.",
        "Query i sees i + 1 + m - n keys, and none where that is negative. Add this up over the queries of every sequence.",
        "pairs += sum(max(i + 1 + m - n, 0) for i in range(n)); then 2 or 5 products, each 2 * head_dim FLOPs per pair and head.",
    ),
    mutants=(
        Mutant(
            "aligned at the beginning",
            "Query i was given the keys 0 .. i: that aligns the mask at the beginning of the sequence, not at its end.",
            edit=("max(i + 1 + m - n, 0)", "min(i + 1, m)"),
        ),
        Mutant(
            "the diagonal is missing",
            "Every query was given one key too few: query i sees key i + m - n itself, too.",
            edit=("max(i + 1 + m - n, 0)", "max(i + m - n, 0)"),
        ),
        Mutant(
            "no mask",
            "All pairs of a sequence were counted, also those that the mask forbids.",
            edit=("sum(max(i + 1 + m - n, 0) for i in range(n))", "n * m"),
        ),
        Mutant(
            "negative numbers of keys",
            "A query that sees no key was counted with a negative number of keys.",
            edit=("max(i + 1 + m - n, 0)", "i + 1 + m - n"),
        ),
        Mutant(
            "a multiply-add is one",
            "A multiplication and an addition were counted as one FLOP; they are two.",
            edit=("products * 2 * head_dim", "products * head_dim"),
        ),
        Mutant(
            "backward twice the forward",
            "The backward was counted as four products. It has five: the scores are computed again.",
            edit=("5 if backward", "4 if backward"),
        ),
        Mutant(
            "a float",
            "The FLOPs came as a float. Beyond 2**53 that is no longer exact: a whole number is asked for.",
            caught_by="returns",
            edit=("return products * 2", "return 1.0 * products * 2"),
            expect="whole number",
        ),
        Mutant(
            "padded",
            "Every sequence was counted as long as the longest one.",
            edit=("zip(len_q.tolist(), len_kv.tolist())", "[(int(len_q.max()), int(len_kv.max()))] * len(len_q)"),
        ),
    ),
    variants=(
        """
def causal_flops(len_q, len_kv, heads, head_dim, backward=False):
    n, m = len_q.long(), len_kv.long()
    rows = torch.minimum(n, m)  # queries that see at least one key
    pairs = int((rows * m - rows * (rows - 1) // 2).sum())
    flops = 4 * pairs * heads * head_dim
    return flops * 5 // 2 if backward else flops
""",
        """
def causal_flops(len_q, len_kv, heads, head_dim, backward=False):
    pairs = 0
    for n, m in zip(len_q, len_kv):
        seen = torch.arange(int(n)) + 1 + int(m) - int(n)
        pairs += seen.clamp(min=0).sum().item()
    return int((2.5 if backward else 1) * 4 * heads * head_dim * pairs)
""",
    ),
)

# -- 18.2 --------------------------------------------------------------------------------------------------------------


def _bytes_cases(seed):
    s = seed % 5
    return [
        Case("one sequence", (_lengths(7 + s), 2, 1, 1, 16, 2)),
        Case("three sequences, two heads", (_lengths(3, 9 + s, 4), 4, 2, 2, 32, 2)),
        Case("four query heads share a key head", (_lengths(20, 5 + s), 8, 4, 1, 64, 2)),
        Case("a sequence without keys", (_lengths(6, 0, 13 + s), 16, 2, 2, 32, 2)),
        Case("fp32", (_lengths(12, 30 + s), 8, 2, 1, 16, 4)),
        Case("lengths 5, 0, 33, 1 and one of 200", (_lengths(5, 0, 33, 1, 200 + s), 32, 4, 4, 128, 2)),
        Case("more than 2**31 bytes", (_lengths(2_000_001, 3, 1_000_000 + s), 7, 3, 3, 129, 2)),
    ]


def _bytes(len_kv, len_q, heads, kv_heads, head_dim, itemsize):
    rows, total = len(len_kv) * len_q, int(len_kv.sum())
    return itemsize * head_dim * (len_q * heads + 2 * total * kv_heads + rows * heads) + 4 * rows * heads


BYTES = Exercise(
    id="18.2",
    title="The fewest bytes of attention pooling",
    name="pooling_bytes",
    cases=_bytes_cases,
    reference=_bytes,
    outputs=(Output("bytes", dtype="int"),),
    difficulty=2,
    minutes=15,
    forbid=COUNTERS,
    hints=(
        "Write down the shape of each tensor that is read or written, then how many bytes one of its numbers has.",
        "Shapes: query [len_q, heads, head_dim], K and V [total_kv, kv_heads, head_dim], out [B * len_q, heads, head_dim], lse [heads, B * len_q].",
        "itemsize * head_dim * (len_q * heads + 2 * total_kv * kv_heads + B * len_q * heads) + 4 * B * len_q * heads.",
    ),
    mutants=(
        Mutant(
            "a query for every sequence",
            "The query was counted once for every sequence. It is shared: one copy is read.",
            edit=("query = len_q * heads * head_dim", "query = batches * len_q * heads * head_dim"),
        ),
        Mutant(
            "keys only",
            "Keys and values are two tensors; only one of them was counted.",
            edit=("keys_and_values = 2 * total_kv", "keys_and_values = total_kv"),
        ),
        Mutant(
            "keys for every query head",
            "Keys and values were counted with the query's heads. They have kv_heads.",
            edit=("2 * total_kv * kv_heads * head_dim", "2 * total_kv * heads * head_dim"),
        ),
        Mutant(
            "one output for all",
            "The output was counted once. Every sequence has len_q rows of its own.",
            edit=("out_rows = batches * len_q", "out_rows = len_q"),
        ),
        Mutant(
            "empty sequences write nothing",
            "A sequence without keys has output rows as well: zeros, which must be written.",
            edit=("batches, total_kv = len(len_kv)", "batches, total_kv = int((len_kv > 0).sum())"),
        ),
        Mutant(
            "lse in the low precision",
            "The log-sum-exp was counted with itemsize bytes per number. It is fp32: 4 bytes.",
            edit=("out_rows * heads * 4", "out_rows * heads * itemsize"),
        ),
        Mutant(
            "no lse",
            "The log-sum-exp is missing.",
            edit=("numbers * itemsize + out_rows * heads * 4", "numbers * itemsize"),
        ),
    ),
    variants=(
        """
def pooling_bytes(len_kv, len_q, heads, kv_heads, head_dim, itemsize):
    shapes = [(len_q, heads, head_dim), (len(len_kv) * len_q, heads, head_dim)]
    shapes += [(int(len_kv.sum()), kv_heads, head_dim)] * 2
    total = sum(math.prod(shape) * itemsize for shape in shapes)
    return total + math.prod((heads, len(len_kv) * len_q)) * 4
""",
        """
def pooling_bytes(len_kv, len_q, heads, kv_heads, head_dim, itemsize):
    row = head_dim * itemsize
    total = len_q * heads * row
    for length in len_kv.tolist():
        total += 2 * length * kv_heads * row  # K, V
        total += len_q * heads * (row + 4)  # out, lse
    return total
""",
    ),
)

# -- 18.3 --------------------------------------------------------------------------------------------------------------


def _predict_cases(seed):
    r = random.Random(seed)

    def chip(tb_per_s, tflops, texp_per_s):
        return {"tb_per_s": tb_per_s * r.uniform(0.98, 1.02), "tflops": tflops, "texp_per_s": texp_per_s}

    def number(x):
        return int(x * r.uniform(0.98, 1.02))

    return [
        Case("bytes decide", (number(18e9), number(597e6), number(35e6), chip(4.24, 790.0, 3.1))),
        Case("tensor cores decide", (number(2199e9), number(537e6), number(4.3e9), chip(4.24, 790.0, 3.1))),
        Case("exponentials decide", (number(350e9), number(372e6), number(1.4e9), chip(7.0, 2380.0, 4.6))),
        Case("bytes and FLOPs nearly equal", (number(880e9), number(4.2e9), number(0.4e9), chip(4.24, 790.0, 3.1))),
        Case("another chip", (number(176e9), number(372e6), number(0.7e9), chip(2.0, 300.0, 3.4))),
    ]


def _predict(flops, least_bytes, exponentials, chip):
    floors = [
        (1e3 * least_bytes / 1e12 / chip["tb_per_s"], "bytes"),
        (1e3 * flops / 1e12 / chip["tflops"], "tensor"),
        (1e3 * exponentials / 1e12 / chip["texp_per_s"], "exp"),
    ]
    return max(floors)


PREDICT = Exercise(
    id="18.3",
    title="Predict before you measure",
    name="predict",
    cases=_predict_cases,
    reference=_predict,
    outputs=(Output("milliseconds"), Output("limit")),
    difficulty=1,
    minutes=20,
    forbid=COUNTERS,
    hints=(
        "Three times: work divided by speed, each with the same unit. Which of the three counts if they run at the same time?",
        "seconds = bytes / (tb_per_s * 1e12), and so on. The largest is the floor; a millisecond is 1e-3 seconds.",
        'floors = {"bytes": ..., "tensor": ..., "exp": ...}; limit = max(floors, key=floors.get); return floors[limit] * 1e3, limit.',
    ),
    mutants=(
        Mutant(
            "one after another",
            "The three times were added, as if memory, tensor cores and exponential units took turns.",
            edit=("return seconds[limit] * 1e3", "return sum(seconds.values()) * 1e3"),
        ),
        Mutant(
            "the fastest of the three",
            "The smallest of the three times was taken. The kernel must wait for the slowest.",
            edit=("max(seconds", "min(seconds"),
        ),
        Mutant(
            "seconds",
            "The time is in seconds; milliseconds are asked for.",
            edit=("seconds[limit] * 1e3", "seconds[limit]"),
        ),
        Mutant(
            "exponentials forgotten",
            "The exponentials were left out, and here they take longest.",
            edit=('"exp": exponentials / (chip["texp_per_s"] * 1e12)', '"exp": 0.0'),
        ),
        Mutant(
            "bits instead of bytes",
            "The bytes were multiplied by 8. The memory's speed is in bytes per second.",
            edit=("least_bytes / (chip", "8 * least_bytes / (chip"),
        ),
        Mutant(
            "names swapped",
            "The time is right, but bytes and tensor cores have each other's name.",
            edit=("* 1e3, limit", '* 1e3, {"bytes": "tensor", "tensor": "bytes", "exp": "exp"}[limit]'),
        ),
    ),
    variants=(
        """
def predict(flops, least_bytes, exponentials, chip):
    memory = least_bytes / chip["tb_per_s"] / 1e9
    tensor = flops / chip["tflops"] / 1e9
    exps = exponentials / chip["texp_per_s"] / 1e9
    if memory >= tensor and memory >= exps:
        return memory, "bytes"
    return (tensor, "tensor") if tensor >= exps else (exps, "exp")
""",
        """
def predict(flops, least_bytes, exponentials, chip):
    work = torch.tensor([least_bytes, flops, exponentials], dtype=torch.float64)
    speed = torch.tensor([chip["tb_per_s"], chip["tflops"], chip["texp_per_s"]], dtype=torch.float64)
    value, index = (work / speed / 1e9).max(0)
    return value.item(), ("bytes", "tensor", "exp")[index.item()]
""",
    ),
)

# -- 18.4 --------------------------------------------------------------------------------------------------------------


def _entry(r, shape, name, ms, runs=5, outlier=None):
    times = [ms * r.uniform(0.99, 1.01) for _ in range(runs)]
    if outlier is not None:
        times[outlier] *= 9.0
    return {"shape": shape, "name": name, "ms": times, "note": ""}


def _missing(shape, name):
    return {"shape": shape, "name": name, "ms": None, "note": f"{name} is not installed"}


def _result_cases(seed):
    r = random.Random(seed)

    def case(name, shape, *entries):
        return Case(name, ({"environment": {"device": "some GPU"}, "timings": list(entries)}, shape))

    return [
        case("one peer", "self", _entry(r, "self", "jfa", 0.8), _entry(r, "self", "fa2", 1.2)),
        case(
            "three peers",
            "pma32",
            _entry(r, "pma32", "fa2", 0.46),
            _entry(r, "pma32", "jfa", 0.17),
            _entry(r, "pma32", "flex", 0.40),
            _entry(r, "pma32", "fa4", 0.48),
        ),
        case(
            "a peer that is not installed",
            "self",
            _missing("self", "fa4"),
            _entry(r, "self", "fa2", 1.2),
            _entry(r, "self", "jfa", 1.5),
        ),
        case(
            "one run of the best peer was disturbed",
            "cross",
            _entry(r, "cross", "jfa", 0.30, runs=4),
            _entry(r, "cross", "fa2", 0.40, runs=4, outlier=1),
            _entry(r, "cross", "fa4", 0.70, runs=4),
        ),
        case(
            "two shapes in one file",
            "dense",
            _entry(r, "dense", "fa2", 6.3),
            _entry(r, "dense", "fa4", 3.4),
            _entry(r, "dense", "jfa", 3.5, outlier=2),
            _entry(r, "self", "fa2", 1.1),
            _entry(r, "self", "jfa", 0.8),
        ),
    ]


def _ratio(result, shape):
    medians = {}
    for t in result["timings"]:
        if t["shape"] == shape and t["ms"]:
            medians[t["name"]] = statistics.median(t["ms"])
    best = sorted((ms, name) for name, ms in medians.items() if name != "jfa")[0]
    return best[1], best[0] / medians["jfa"]


READ = Exercise(
    id="18.4",
    title="Read a result",
    name="ratio_to_best_peer",
    cases=_result_cases,
    reference=_ratio,
    outputs=(Output("peer"), Output("ratio")),
    difficulty=2,
    minutes=15,
    forbid=COUNTERS,
    hints=(
        "First leave out what does not belong: other shapes, and entries without times. Then one number per name.",
        "statistics.median(t['ms']) for each name. The best peer is the one with the smallest median, and ours is not a peer.",
        "medians = {name: median}; ours = medians.pop('jfa'); best = min(medians, key=medians.get); return best, medians[best] / ours.",
    ),
    mutants=(
        Mutant(
            "mean",
            "These are means. One disturbed run moves a mean; the median stays.",
            edit=("statistics.median(t", "statistics.mean(t"),
        ),
        Mutant(
            "upside down",
            "The ratio is upside down: above 1 should mean that we are faster.",
            edit=("medians[best] / ours", "ours / medians[best]"),
        ),
        Mutant(
            "the worst peer",
            "This compares with the slowest peer. The best one counts.",
            edit=("min(medians", "max(medians"),
        ),
        Mutant(
            "against ourselves",
            "Our own time was among the peers, so we were compared with ourselves.",
            edit=('medians.pop("jfa")', 'medians["jfa"]'),
        ),
        Mutant(
            "the luckiest run",
            "The fastest run of each was taken. A single run says little; compare medians.",
            edit=("statistics.median(t", "min(t"),
        ),
        Mutant(
            "all shapes together",
            "Entries of other shapes were mixed in.",
            edit=('t["shape"] == shape and ', ""),
        ),
        Mutant(
            "trips over a missing peer",
            "An entry without times was not left out.",
            caught_by="runs",
            edit=(' and t["ms"] is not None', ""),
            expect="TypeError",
        ),
    ),
    variants=(
        """
def ratio_to_best_peer(result, shape):
    ours, best_name, best_ms = None, None, math.inf
    for entry in result["timings"]:
        if entry["shape"] != shape or not entry["ms"]:
            continue
        median = statistics.median(entry["ms"])
        if entry["name"] == "jfa":
            ours = median
        elif median < best_ms:
            best_name, best_ms = entry["name"], median
    return best_name, best_ms / ours
""",
        """
def _median(times):
    ordered, half = sorted(times), len(times) // 2
    return ordered[half] if len(times) % 2 else (ordered[half - 1] + ordered[half]) / 2


def ratio_to_best_peer(result, shape):
    pairs = [(_median(t["ms"]), t["name"]) for t in result["timings"] if t["shape"] == shape and t["ms"]]
    (ours,) = [ms for ms, name in pairs if name == "jfa"]
    ms, name = min(pair for pair in pairs if pair[1] != "jfa")
    return name, ms / ours
""",
    ),
)

# -- 18.5 --------------------------------------------------------------------------------------------------------------


def _bounds_cases(seed):
    g = torch.Generator().manual_seed(seed)

    def case(name, cycles, dram, tensor, xu):
        jitter = lambda: float(torch.empty(1).uniform_(-1.0, 1.0, generator=g))
        cycles = torch.tensor(cycles) * torch.empty(len(cycles)).uniform_(0.99, 1.01, generator=g)
        return Case(name, (cycles, dram + jitter(), tensor + jitter(), xu + jitter()))

    even, edges = torch.full((4,), 2.0**15), ("just below", "at exactly", "just above")
    return [
        case("all SMs equally busy, memory busy", [9e4, 9.2e4, 8.9e4, 9.1e4], 90.0, 31.0, 14.0),
        case("tensor cores busy", [5e5] * 8, 12.0, 84.0, 44.0),
        case("exponential units busy", [3e5] * 8, 9.0, 55.0, 81.0),
        case("no unit is busy", [2e5] * 8, 33.0, 47.0, 20.0),
        case("one SM works, the others wait", [2e4] * 7 + [1e5], 24.0, 12.0, 5.0),
        case("one SM works, and no unit is busy", [2e4] * 7 + [1e5], 8.0, 6.0, 5.0),
        case("a little uneven", [8e4] * 3 + [6e4] * 4 + [9e4], 16.0, 61.0, 30.0),
        *(Case(f"a unit {where} 70 percent", (even, 20.0, x, 30.0)) for where, x in zip(edges, kinds.around(70.0))),
        Case("a balance just below 0.75", (torch.tensor([2.0**16, 2.0**15 - 64]), 10.0, 60.0, 20.0)),
        Case("a balance of exactly 0.75", (torch.tensor([2.0**16, 2.0**15]), 10.0, 54.0, 20.0)),
        Case("exactly 70 percent while SMs had work", (torch.tensor([2.0**16, 2.0**15]), 52.5, 20.0, 10.0)),
    ]


def _bounds(active_cycles, dram, tensor, xu):
    balance = float(active_cycles.double().mean() / active_cycles.double().max())
    if balance < 0.75:
        return balance, "imbalance"
    share, word = max((dram, "bytes"), (tensor, "tensor"), (xu, "exp"))
    return balance, word if share >= 70 * balance else "waiting"


BOUNDS = Exercise(
    id="18.5",
    title="What bounds it?",
    name="what_bounds",
    cases=_bounds_cases,
    reference=_bounds,
    outputs=(Output("balance"), Output("limit")),
    difficulty=3,
    minutes=15,
    forbid=COUNTERS,
    hints=(
        "The order matters: with idle SMs every unit looks idle. So the balance comes first.",
        "balance = mean / max of the active cycles. Units are compared with 70 after dividing by it.",
        'busy = {"bytes": dram / balance, ...}; busiest = max(busy, key=busy.get); "waiting" if busy[busiest] < 70.',
    ),
    mutants=(
        Mutant(
            "percent of the whole kernel",
            "The percentages were compared with 70 as they are. SMs without work count in them: divide by the balance.",
            edit=(
                '{"bytes": dram / balance, "tensor": tensor / balance, "exp": xu / balance}',
                '{"bytes": dram, "tensor": tensor, "exp": xu}',
            ),
        ),
        Mutant(
            "always a culprit",
            "The busiest unit was named although it is not busy. If no unit reaches 70, all of them are waiting.",
            edit=('busiest if busy[busiest] >= 70 else "waiting"', "busiest"),
        ),
        Mutant(
            "more than 70",
            "A unit at exactly 70 percent counts as busy: 70 or more.",
            edit=("busy[busiest] >= 70", "busy[busiest] > 70"),
        ),
        Mutant(
            "at most 0.75",
            "A balance of exactly 0.75 is no imbalance: below 0.75.",
            edit=("if balance < 0.75:", "if balance <= 0.75:"),
        ),
        Mutant(
            "0.7 for both",
            "A balance below 0.75 is an imbalance; 70 is the units' bound.",
            edit=("if balance < 0.75:", "if balance < 0.7:"),
        ),
        Mutant(
            "imbalance overlooked",
            "The balance was not looked at first. A unit that is busy on a few SMs is not the limit of the kernel.",
            edit=("if balance < 0.75:", "if balance < 0.0:"),
        ),
        Mutant(
            "min over max",
            "The balance was taken as smallest / largest. One early SM does no harm: it is mean / largest.",
            edit=("active_cycles.mean() / active_cycles.max()", "active_cycles.min() / active_cycles.max()"),
        ),
        Mutant(
            "exponentials forgotten",
            "The exponential units were left out.",
            edit=(', "exp": xu / balance}', "}"),
        ),
        Mutant(
            "upside down",
            "The balance is upside down: it cannot be larger than 1.",
            edit=("active_cycles.mean() / active_cycles.max()", "active_cycles.max() / active_cycles.mean()"),
        ),
        Mutant(
            "busy units first",
            "The balance comes first: where most SMs wait for a few, that is the answer, whether a unit is busy or not.",
            edit=("if balance < 0.75:", "if balance < 0.75 and max(dram, tensor, xu) >= 70 * balance:"),
        ),
    ),
    variants=(
        """
def what_bounds(active_cycles, dram, tensor, xu):
    cycles = active_cycles.tolist()
    balance = sum(cycles) / len(cycles) / max(cycles)
    if balance < 0.75:
        word = "imbalance"
    elif max(dram, tensor, xu) < 70 * balance:
        word = "waiting"
    elif dram >= tensor and dram >= xu:
        word = "bytes"
    else:
        word = "tensor" if tensor >= xu else "exp"
    return balance, word
""",
        """
def what_bounds(active_cycles, dram, tensor, xu):
    balance = (active_cycles / active_cycles.max()).mean().item()
    shares = torch.tensor([dram, tensor, xu]) / balance
    if balance < 0.75:
        return balance, "imbalance"
    if bool((shares < 70).all()):
        return balance, "waiting"
    return balance, ["bytes", "tensor", "exp"][int(shares.argmax())]
""",
    ),
)

# -- 18.6 --------------------------------------------------------------------------------------------------------------


def _makespan_cases(seed):
    r = random.Random(seed)

    def few(low, high, count):
        return [r.randint(low, high) for _ in range(count)]

    return [
        Case("two workers, three tiles", ([3, 4, 12 + seed % 4], 2)),
        Case("many small tiles", (few(4, 9, 40), 4)),
        Case("one mega-tile", (few(4, 9, 40) + [r.randint(301, 349)], 8)),
        Case("the mega-tile is exactly twice the even share", ([16, 8, 8, 32], 4)),
        Case("fewer tiles than workers", (few(10, 20, 3), 8)),
        Case("888 tiles on 148 SMs, a heavy tail", ([int(10 * r.paretovariate(1.2)) for _ in range(888)], 148)),
    ]


def _makespan(costs, workers):
    largest, total = max(costs), sum(costs)
    return max(largest, total / workers), max(1, -(-largest * workers // total))


MAKESPAN = Exercise(
    id="18.6",
    title="No schedule beats this",
    name="makespan_bound",
    cases=_makespan_cases,
    reference=_makespan,
    outputs=(Output("bound"), Output("pieces", dtype="int")),
    difficulty=2,
    minutes=10,
    forbid=("jfa.schedule", *COUNTERS),
    hints=(
        "Two lower bounds, and both hold. Which of them is the stronger statement?",
        "The even share is sum(costs) / workers. A part of the largest tile is largest / pieces: how large must pieces be?",
        "bound = max(max(costs), even_share); pieces = ceil(max(costs) / even_share), at least 1.",
    ),
    mutants=(
        Mutant(
            "the mean tile",
            "The costs were divided by the number of tiles. The even share is the work divided by the number of workers.",
            edit=("sum(costs) / workers", "sum(costs) / len(costs)"),
        ),
        Mutant(
            "only the even share",
            "A tile larger than the even share was overlooked: no schedule finishes before its largest tile.",
            edit=("return max(largest, even_share)", "return even_share"),
        ),
        Mutant(
            "only the largest tile",
            "The work itself was overlooked: all workers together need at least the even share.",
            edit=("return max(largest, even_share)", "return largest"),
        ),
        Mutant(
            "both added",
            "The two bounds were added. That is what an unlucky order may take, not what every order must.",
            edit=("return max(largest, even_share)", "return largest + even_share"),
        ),
        Mutant(
            "one piece too few",
            "The number of pieces was rounded down, so a piece is still larger than the even share.",
            edit=("math.ceil(largest / even_share)", "int(largest / even_share)"),
        ),
        Mutant(
            "one piece too many",
            "One piece too many where the largest tile is an exact multiple of the even share.",
            edit=("math.ceil(largest / even_share)", "int(largest / even_share) + 1"),
        ),
    ),
    variants=(
        """
def makespan_bound(costs, workers):
    share = sum(costs) / workers
    pieces = 1
    while max(costs) / pieces > share:
        pieces += 1
    return max(max(costs), share), pieces
""",
        """
def makespan_bound(costs, workers):
    x = torch.tensor(costs, dtype=torch.float64)
    share = x.sum() / workers
    pieces = torch.ceil(x.max() / share).clamp(min=1)
    return torch.maximum(x.max(), share).item(), int(pieces)
""",
    ),
)

EXERCISES = [FLOPS, BYTES, PREDICT, READ, BOUNDS, MAKESPAN]
