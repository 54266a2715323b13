"""Answers to chapter 09's exercises."""

from tests.course.answers import right, wrong

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 9.1
    wrong("9.1", "no whole groups", ('groups = -(-M // rates["rows"])', 'groups = M / rates["rows"]')),
    wrong("9.1", "groups rounded down", ('groups = -(-M // rates["rows"])', 'groups = max(1, M // rates["rows"])')),
    wrong("9.1", "a group too many where M is a multiple", ('-(-M // rates["rows"])', '(M // rates["rows"] + 1)')),
    wrong("9.1", "a multiply-add is one FLOP", ("2 * 2 * groups", "2 * groups")),
    wrong("9.1", "one product", ("2 * 2 * groups", "2 * groups"), ("groups * 2 * N * D", "groups * N * D")),
    wrong("9.1", "P read from shared memory as well", ("(M * D + groups", "(M * D + M * N + groups")),
    wrong("9.1", "rows of Q that do not exist", ("(M * D + groups", '(groups * rates["rows"] * D + groups')),
    wrong("9.1", "always the rate of 16 bits", ('rates[f"tensor_{itemsize}"]', 'rates["tensor_2"]')),
    wrong("9.1", "bytes forgotten", ("groups * 2 * N * D) * itemsize", "groups * 2 * N * D)")),
    wrong(
        "9.1",
        "128 rows for good",
        ('groups * rates["rows"] * N', "groups * 128 * N"),
        ('-(-M // rates["rows"])', "-(-M // 128)"),
    ),
    wrong("9.1", "whole groups of exponentials", ("M * N / rates", 'groups * rates["rows"] * N / rates')),
    wrong("9.1", "K and V once", ("groups * 2 * N * D", "2 * N * D")),
    wrong("9.1", "Q again for each group", ("(M * D + groups", "(groups * M * D + groups")),
    wrong("9.1", "whole cycles", ('operands / rates["smem"]', 'operands // rates["smem"]')),
    wrong(
        "9.1",
        "order of the results",
        ('M * N / rates["mufu"], operands / rates["smem"]', 'operands / rates["smem"], M * N / rates["mufu"]'),
    ),
    right(
        "9.1",
        "a loop over groups",
        source="""
def tile_cycles(M, N, D, itemsize, rates):
    tensor, smem = 0, M * D * itemsize / rates["smem"]
    left = M
    while left > 0:
        tensor += 2 * 2 * rates["rows"] * N * D / rates["tensor_%d" % itemsize]
        smem += 2 * N * D * itemsize / rates["smem"]
        left -= rates["rows"]
    return [tensor, N * M / rates["mufu"], smem]
""",
    ),
    right(
        "9.1",
        "numpy, typed",
        source="""
import numpy as np

def padded(m: int, rows: int) -> int:
    return int(np.ceil(m / rows)) * rows

def tile_cycles(M: int, N: int, D: int, itemsize: int, rates: dict) -> tuple[float, float, float]:
    full = padded(M, rates["rows"])
    rate = rates["tensor_2"] if itemsize == 2 else rates["tensor_1"]
    print("rows", full)
    b = itemsize * (M * D + full / rates["rows"] * (N * D + D * N))
    return np.float64(4 * full * N * D) / rate, np.float64(M) * N / rates["mufu"], b / rates["smem"]
""",
    ),
    # ------------------------------------------------------------------------------------------ 9.2
    wrong("9.2", "more than 0.95", ("c >= 0.95 * slowest", "c > 0.95 * slowest")),
    wrong("9.2", "5 % the other way round", ("c >= 0.95 * slowest", "1.05 * c >= slowest")),
    wrong("9.2", "10 %", ("c >= 0.95 * slowest", "c >= 0.9 * slowest")),
    wrong("9.2", "the slowest only", ("c >= 0.95 * slowest", "c == slowest")),
    wrong(
        "9.2",
        "slowest first",
        ("for name, c in cycles.items() if", "for name, c in sorted(cycles.items(), key=lambda x: -x[1]) if"),
    ),
    wrong("9.2", "names joined by a comma", ('" and ".join', '", ".join')),
    wrong("9.2", "dQ once through shared memory", ("+ 2 * M * D * 4", "+ M * D * 4")),
    wrong("9.2", "dQ in the inputs' bytes", ("+ 2 * M * D * 4", "+ 2 * M * D * itemsize")),
    wrong("9.2", "dS forgotten", ("other = M * N * itemsize + 2", "other = 2")),
    wrong("9.2", "dS in fp32", ("other = M * N * itemsize + 2", "other = M * N * 4 + 2")),
    wrong("9.2", "four products", ("        products.append((M, D, N, True))\n", "")),
    wrong(
        "9.2",
        "dV and dK from shared memory",
        ("(N, D, M, False), (N, D, M, False)]", "(N, D, M, True), (N, D, M, True)]"),
    ),
    wrong(
        "9.2",
        "P from shared memory in the forward",
        ("(M, D, N, False)]\n        other", "(M, D, N, True)]\n        other"),
    ),
    wrong(
        "9.2",
        "128 rows for good",
        ("groups = -(-m // rows)", "groups = -(-m // 128)"),
        ("2 * groups * rows * n", "2 * groups * 128 * n"),
    ),
    wrong("9.2", "128 queries in the forward", ("(256, 128) if", "(128, 128) if")),
    wrong(
        "9.2",
        "two exponentials per score in the backward",
        ('M * N / rates["mufu"]', 'M * N * (1 if direction == "forward" else 2) / rates["mufu"]'),
    ),
    wrong("9.2", "whole cycles", (" if c >= 0.95 * slowest), slowest", " if c >= 0.95 * slowest), round(slowest)")),
    wrong("9.2", "tensor rate of 16 bits", ('rates[f"tensor_{itemsize}"]', 'rates["tensor_2"]')),
    right(
        "9.2",
        "formulas written out",
        source="""
import math

def limit(direction, D, itemsize, rates):
    r = rates["rows"]
    g = lambda m: math.ceil(m / r)
    t = rates["tensor_2" if itemsize == 2 else "tensor_1"]
    if direction == "forward":
        exp = 256 * 128 / rates["mufu"]
        tensor = 2 * 2 * g(256) * r * 128 * D / t
        smem = (256 * D + g(256) * 2 * 128 * D) * itemsize / rates["smem"]
    else:
        exp = 128 * 128 / rates["mufu"]
        tensor = 5 * 2 * g(128) * r * 128 * D / t
        inputs = 2 * 128 * D + 128 * 128 + 5 * g(128) * 128 * D
        smem = ((inputs + 128 * 128) * itemsize + 8 * 128 * D) / rates["smem"]
    worst = max(exp, tensor, smem)
    names = [n for n, c in (("tensor", tensor), ("exp", exp), ("smem", smem)) if c >= 0.95 * worst]
    return " and ".join(sorted(names)), worst
""",
    ),
    right("9.2", "quotients compared", ("c >= 0.95 * slowest", "c / slowest >= 0.95")),
    # ------------------------------------------------------------------------------------------ 9.3
    wrong(
        "9.3",
        "a buffer too many where trips fit exactly",
        ("-int(-round_trip // period)", "int(round_trip // period) + 1"),
    ),
    wrong("9.3", "rounded down", ("-int(-round_trip // period)", "max(1, int(round_trip // period))")),
    wrong("9.3", "rounded to the nearest", ("-int(-round_trip // period)", "max(1, round(round_trip / period))")),
    wrong("9.3", "64 rows take half as long", ("2 * 128 * N * K", "2 * M * N * K")),
    wrong("9.3", "the load's bytes are no work of shared memory", ('operands + moved / rates["smem"]', "operands")),
    wrong(
        "9.3",
        "the loads never limit the period",
        ('operands + moved / rates["smem"], transfer)', 'operands + moved / rates["smem"])'),
    ),
    wrong("9.3", "wakes once", (' + transfer + rates["wakeup"]', " + transfer")),
    wrong("9.3", "A is not read", ("(2 * M * K + moved)", "moved")),
    wrong(
        "9.3",
        "operands and product one after the other",
        ("max(tensor, operands) + rates", "tensor + operands + rates"),
    ),
    wrong(
        "9.3",
        "shared memory does not limit the transfer",
        ('min(rates["tma_issue"], rates["l2"], rates["smem"])', 'min(rates["tma_issue"], rates["l2"])'),
    ),
    wrong(
        "9.3",
        "transfers one after the other",
        (
            'moved / min(rates["tma_issue"], rates["l2"], rates["smem"])',
            'moved / rates["l2"] + moved / rates["tma_issue"]',
        ),
    ),
    wrong("9.3", "fp32 bytes", ("moved = 2 * K * N", "moved = 4 * K * N")),
    wrong("9.3", "latency of the product forgotten", (' + rates["mma_latency"]', "")),
    wrong("9.3", "latencies in the period", ("period = max(tensor,", 'period = max(rates["mma_latency"] + tensor,')),
    wrong(
        "9.3",
        "a float",
        ("return round_trip, period, -int(-round_trip // period)", "return round_trip, period, round_trip / period"),
    ),
    wrong("9.3", "two buffers at least", ("-int(-round_trip // period)", "max(2, -int(-round_trip // period))")),
    wrong("9.3", "one more for safety", ("-int(-round_trip // period)", "1 - int(-round_trip // period)")),
    right("9.3", "math.ceil", ("-int(-round_trip // period)", '__import__("math").ceil(round_trip / period)')),
    right(
        "9.3",
        "counts buffers",
        source="""
def ring(M, N, K, rates):
    b_bytes = N * K * 2
    a_bytes = M * K * 2
    load = max(b_bytes / rates[u] for u in ("tma_issue", "l2", "smem"))
    mma = max(128 * N * K * 2 / rates["tensor_2"], (a_bytes + b_bytes) / rates["smem"])
    trip = sum([rates["tma_latency"], load, rates["wakeup"], mma, rates["mma_latency"], rates["wakeup"]])
    per = max(128 * N * K * 2 / rates["tensor_2"], (a_bytes + 2 * b_bytes) / rates["smem"], b_bytes / rates["l2"], b_bytes / rates["tma_issue"])
    n = 1
    while n * per < trip:
        n += 1
    return trip, per, n
""",
    ),
    # ------------------------------------------------------------------------------------------ 9.4
    wrong("9.4", "overlaps count twice", ("max(0, stop - max(start, reach))", "stop - start")),
    wrong("9.4", "span from zero", ("min(e[1] for e in events), max", "0, max")),
    wrong(
        "9.4",
        "each unit's own span",
        ("covered / (end - begin) if", "covered / (reach - min(e[1] for e in events if e[0] == unit)) if"),
    ),
    wrong("9.4", "an inner event ends the outer one", ("reach = max(reach, stop)", "reach = stop")),
    wrong("9.4", "the last event's end", ("max(e[2] for e in events)", "events[-1][2]")),
    wrong("9.4", "the first event's start", ("min(e[1] for e in events), max", "events[0][1], max")),
    wrong("9.4", "chain with the gaps", ("return busy, max(chain)", "return busy, end - begin")),
    wrong("9.4", "chain to the last event", ("return busy, max(chain)", "return busy, chain[-1]")),
    wrong("9.4", "no events", ("    if not events:\n        return {}, 0\n", "")),
    wrong("9.4", "no time", (" if end > begin else 0.0", "")),
    wrong(
        "9.4", "sum of the needs", ("max((chain[n] for n in needs[i]), default=0)", "sum(chain[n] for n in needs[i])")
    ),
    wrong(
        "9.4",
        "the first need only",
        ("max((chain[n] for n in needs[i]), default=0)", "chain[needs[i][0]] if needs[i] else 0"),
    ),
    wrong(
        "9.4", "events sorted in place", ("    begin, end =", "    events.sort(key=lambda e: e[1])\n    begin, end =")
    ),
    wrong(
        "9.4",
        "recursion",
        source="""
from functools import lru_cache

def account(events, needs):
    if not events:
        return {}, 0
    lo, hi = min(e[1] for e in events), max(e[2] for e in events)
    busy = {}
    for u in {e[0] for e in events}:
        at, total = lo, 0
        for s, e in sorted((s, e) for v, s, e in events if v == u):
            total += max(0, e - max(s, at))
            at = max(at, e)
        busy[u] = total / (hi - lo) if hi > lo else 0

    @lru_cache(None)
    def longest(i):
        return events[i][2] - events[i][1] + max([longest(n) for n in needs[i]], default=0)

    return busy, max(longest(i) for i in range(len(events)))
""",
    ),
    wrong(
        "9.4",
        "every path",
        source="""
def account(events, needs):
    if not events:
        return {}, 0
    lo, hi = min(e[1] for e in events), max(e[2] for e in events)
    busy = {}
    for u in {e[0] for e in events}:
        at, total = lo, 0
        for s, e in sorted((s, e) for v, s, e in events if v == u):
            total += max(0, e - max(s, at))
            at = max(at, e)
        busy[u] = total / (hi - lo) if hi > lo else 0
    best = 0
    stack = [(i, events[i][2] - events[i][1]) for i in range(len(events))]
    while stack:
        i, length = stack.pop()
        best = max(best, length)
        stack += [(n, length + events[n][2] - events[n][1]) for n in needs[i]]
    return busy, best
""",
    ),
    wrong(
        "9.4",
        "needs come before",
        source="""
def account(events, needs):
    if not events:
        return {}, 0
    lo, hi = min(e[1] for e in events), max(e[2] for e in events)
    busy = {}
    for u in {e[0] for e in events}:
        at, total = lo, 0
        for s, e in sorted((s, e) for v, s, e in events if v == u):
            total += max(0, e - max(s, at))
            at = max(at, e)
        busy[u] = total / (hi - lo) if hi > lo else 0
    chain = [0] * len(events)
    for i, (_, s, e) in enumerate(events):
        chain[i] = e - s + max([chain[n] for n in needs[i]], default=0)
    return busy, max(chain)
""",
    ),
    wrong(
        "9.4",
        "in the order of starts",
        source="""
def account(events, needs):
    if not events:
        return {}, 0
    lo, hi = min(e[1] for e in events), max(e[2] for e in events)
    busy = {}
    for u in {e[0] for e in events}:
        at, total = lo, 0
        for s, e in sorted((s, e) for v, s, e in events if v == u):
            total += max(0, e - max(s, at))
            at = max(at, e)
        busy[u] = total / (hi - lo) if hi > lo else 0
    chain = [0] * len(events)
    for i in sorted(range(len(events)), key=lambda i: -events[i][1]):
        _, s, e = events[i]
        chain[i] = e - s + max([chain[n] for n in needs[i]], default=0)
    return busy, max(chain)
""",
    ),
    right(
        "9.4",
        "Kahn's order, events of borders",
        source="""
from collections import defaultdict, deque

def account(events, needs):
    if len(events) == 0:
        return {}, 0
    first = min(start for _, start, _ in events)
    last = max(stop for _, _, stop in events)
    borders = defaultdict(list)
    for unit, start, stop in events:
        borders[unit] += [(start, 1), (stop, -1)]
    busy = {}
    for unit, list_ in borders.items():
        depth, used, before = 0, 0, first
        for at, step in sorted(list_, key=lambda b: (b[0], -b[1])):
            used += (at - before) * (depth > 0)
            before, depth = at, depth + step
        busy[unit] = used / (last - first) if last != first else 0.0
    followers, waits = defaultdict(list), [len(n) for n in needs]
    for i, n in enumerate(needs):
        for j in n:
            followers[j].append(i)
    finish = [stop - start for _, start, stop in events]
    todo = deque(i for i, w in enumerate(waits) if w == 0)
    while todo:
        i = todo.popleft()
        for j in followers[i]:
            finish[j] = max(finish[j], finish[i] + events[j][2] - events[j][1])
            waits[j] -= 1
            if not waits[j]:
                todo.append(j)
    return busy, max(finish)
""",
    ),
    # ------------------------------------------------------------------------------------------ 9.5
    wrong(
        "9.5",
        "the wait just before its load",
        ("        if j > 0:\n            tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n", ""),
        (
            "            total += tl.sum",
            "            tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n            total += tl.sum",
        ),
    ),
    wrong("9.5", "block j's parity", ("((j - 1) // 2) & 1", "(j // 2) & 1")),
    wrong("9.5", "parity of j", ("((j - 1) // 2) & 1", "(j - 1) & 1")),
    wrong(
        "9.5",
        "waits for the S being made",
        ("tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)", "tlx.barrier_wait(s_fulls[now], (j // 2) & 1)"),
    ),
    wrong(
        "9.5", "no wait", ("        if j > 0:\n            tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n", "")
    ),
    wrong(
        "9.5",
        "both waits",
        (
            "mBarriers=[s_fulls[now]])",
            "mBarriers=[s_fulls[now]])\n            tlx.barrier_wait(s_fulls[now], (j // 2) & 1)",
        ),
    ),
    wrong(
        "9.5",
        "waits after the sum too",
        (
            "            total += tl.sum(",
            "            tlx.barrier_wait(s_fulls[now], (j // 2) & 1) if j < blocks else None\n            total += tl.sum(",
        ),
    ),
    wrong("9.5", "the last block left out", ("for j in range(blocks + 1)", "for j in range(blocks)")),
    wrong(
        "9.5",
        "the first block left out",
        ("        if j > 0:\n            total", "        if j > 1:\n            total"),
    ),
    wrong("9.5", "scale forgotten", ("tlx.local_load(s[other]) * scale_log2", "tlx.local_load(s[other])")),
    wrong("9.5", "K waits dropped", ("            tlx.barrier_wait(k_fulls[now], (j // 2) & 1)\n", "")),
    wrong(
        "9.5",
        "tl.dot",
        (
            "            tlx.async_dot(q[0], keys, s[now], use_acc=False, mBarriers=[s_fulls[now]])\n",
            "            tlx.local_store(s[now], tl.dot(tlx.local_load(q[0]), tlx.local_load(keys)))\n",
        ),
        ("        if j > 0:\n            tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n", ""),
    ),
    wrong("9.5", "one more load than blocks", ("        if j + 1 < blocks:\n", "        if j < blocks:\n")),
    right(
        "9.5",
        "the wait inside the refill, and before the load for the rest",
        ("        if j > 0:\n            tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n", ""),
        (
            "        if j + 1 < blocks:\n",
            "        if j + 1 < blocks:\n            if j > 0:\n                tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n",
        ),
        (
            "            total += tl.sum",
            "            if j + 1 >= blocks:\n                tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n            total += tl.sum",
        ),
    ),
    wrong(
        "9.5",
        "the next K asked for only after the product",
        (
            "        if j + 1 < blocks:\n            tlx.barrier_expect_bytes(k_fulls[other], 2 * N * D)\n            tlx.async_descriptor_load(k_desc, k[other], [(j + 1) * N, 0], k_fulls[other])\n",
            "",
        ),
        ("        if j > 0:\n            tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)\n", ""),
        (
            "        if j > 0:\n            total",
            "        if j > 0:\n            previous = j - 1\n            tlx.barrier_wait(s_fulls[previous % 2], (previous // 2) % 2)\n"
            "        if j + 1 < blocks:\n            tlx.barrier_expect_bytes(k_fulls[other], 2 * N * D)\n            tlx.async_descriptor_load(k_desc, k[other], [(j + 1) * N, 0], k_fulls[other])\n"
            "        if j > 0:\n            total",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 9.6
    wrong(
        "9.6",
        "K again before its product is done",
        (
            "        tlx.barrier_wait(s_fulls[now], (j // 2) & 1)\n        if j + 2 < blocks:  # that product was the last reader of k[now]\n            load_box(k_desc, k[now], k_fulls[now], (j + 2) * N, BYTES)\n",
            "        if j + 2 < blocks:\n            load_box(k_desc, k[now], k_fulls[now], (j + 2) * N, BYTES)\n        tlx.barrier_wait(s_fulls[now], (j // 2) & 1)\n",
        ),
    ),
    wrong(
        "9.6",
        "the accumulator's phase by j",
        ("tlx.barrier_wait(acc_full[0], (j - 1) & 1)", "tlx.barrier_wait(acc_full[0], j & 1)"),
    ),
    wrong("9.6", "the last PV not waited for", ("    tlx.barrier_wait(acc_full[0], (blocks - 1) & 1)\n", "")),
    wrong("9.6", "the last PV's phase", ("(blocks - 1) & 1", "blocks & 1")),
    wrong(
        "9.6", "no rescaling", ("            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])\n", "")
    ),
    wrong(
        "9.6",
        "rescaled before PV is done",
        (
            "            tlx.barrier_wait(acc_full[0], (j - 1) & 1)\n            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])\n",
            "            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])\n            tlx.barrier_wait(acc_full[0], (j - 1) & 1)\n",
        ),
    ),
    wrong(
        "9.6",
        "V again while PV reads it",
        ("        if j + 1 < blocks:\n            load_box(v_desc, v[nxt], v_fulls[nxt], (j + 1) * N, BYTES)\n", ""),
        (
            "        probs, alpha",
            "        if j + 1 < blocks:\n            load_box(v_desc, v[nxt], v_fulls[nxt], (j + 1) * N, BYTES)\n        probs, alpha",
        ),
    ),
    wrong(
        "9.6",
        "P stored before PV is done",
        ("        tlx.local_store(p[0], probs.to(tl.bfloat16))\n", ""),
        (
            "        if j > 0:  # only",
            "        tlx.local_store(p[0], probs.to(tl.bfloat16))\n        if j > 0:  # only",
        ),
    ),
    wrong(
        "9.6",
        "the second K loaded always",
        ("    if blocks > 1:\n        load_box(k_desc, k[1]", "    if True:\n        load_box(k_desc, k[1]"),
    ),
    wrong(
        "9.6",
        "V's phase of the next",
        ("tlx.barrier_wait(v_fulls[now], (j // 2) & 1)", "tlx.barrier_wait(v_fulls[now], ((j + 1) // 2) & 1)"),
    ),
    wrong(
        "9.6",
        "K's phase of this block",
        ("tlx.barrier_wait(k_fulls[nxt], ((j + 1) // 2) & 1)", "tlx.barrier_wait(k_fulls[nxt], (j // 2) & 1)"),
    ),
    wrong("9.6", "adds to what acc holds", ("acc[0], use_acc=j > 0,", "acc[0], use_acc=True,")),
    wrong("9.6", "every PV starts anew", ("acc[0], use_acc=j > 0,", "acc[0], use_acc=False,")),
    wrong(
        "9.6", "maximum starts at 0", ('m = tl.full((M,), float("-inf"), tl.float32)', "m = tl.zeros((M,), tl.float32)")
    ),
    wrong(
        "9.6",
        "maximum starts at -1e4",
        ('m = tl.full((M,), float("-inf"), tl.float32)', "m = tl.full((M,), -1e4, tl.float32)"),
    ),
    wrong(
        "9.6",
        "divides twice",
        ("out = tlx.local_load(acc[0]) / l[:, None]", "out = tlx.local_load(acc[0]) / l[:, None] / l[:, None]"),
    ),
    wrong(
        "9.6",
        "version 1's waits",
        (
            "            tlx.async_dot(q[0], keys, s[nxt], use_acc=False, mBarriers=[s_fulls[nxt]])\n",
            "            tlx.async_dot(q[0], keys, s[nxt], use_acc=False, mBarriers=[s_fulls[nxt]])\n            tlx.barrier_wait(s_fulls[nxt], ((j + 1) // 2) & 1)\n",
        ),
    ),
    wrong(
        "9.6",
        "PV waited for at once",
        (
            "use_acc=j > 0, mBarriers=[acc_full[0]])\n",
            "use_acc=j > 0, mBarriers=[acc_full[0]])\n        tlx.barrier_wait(acc_full[0], j & 1)\n",
        ),
        ("            tlx.barrier_wait(acc_full[0], (j - 1) & 1)\n", ""),
        ("    tlx.barrier_wait(acc_full[0], (blocks - 1) & 1)\n", ""),
    ),
    wrong(
        "9.6",
        "scale twice",
        ("softmax_step(tlx.local_load(s[now]), m", "softmax_step(tlx.local_load(s[now]) * scale_log2, m"),
    ),
    wrong(
        "9.6",
        "the next S into this block's buffer",
        (
            "keys, s[nxt], use_acc=False, mBarriers=[s_fulls[nxt]]",
            "keys, s[now], use_acc=False, mBarriers=[s_fulls[nxt]]",
        ),
    ),
    right(
        "9.6",
        "S of the next block at the loop's end",
        source="""
@triton.jit
def issue(q, k, s, k_fulls, s_fulls, j):
    tlx.barrier_wait(k_fulls[j % 2], (j // 2) & 1)
    tlx.async_dot(q[0], tlx.local_trans(k[j % 2]), s[j % 2], use_acc=False, mBarriers=[s_fulls[j % 2]])


@triton.jit
def early_kernel(
    q_desc, k_desc, v_desc, out_ptr, blocks, scale_log2,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):
    q = tlx.local_alloc((M, D), tl.bfloat16, 1)
    k = tlx.local_alloc((N, D), tl.bfloat16, 2)
    v = tlx.local_alloc((N, D), tl.bfloat16, 2)
    s = tlx.local_alloc((M, N), tl.float32, 2, tlx.storage_kind.tmem)
    p = tlx.local_alloc((M, N), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((M, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    k_fulls = tlx.alloc_barriers(2)
    v_fulls = tlx.alloc_barriers(2)
    s_fulls = tlx.alloc_barriers(2)
    acc_full = tlx.alloc_barriers(1)
    BYTES: tl.constexpr = 2 * N * D
    load_box(q_desc, q[0], q_full[0], 0, 2 * M * D)
    load_box(k_desc, k[0], k_fulls[0], 0, BYTES)
    load_box(v_desc, v[0], v_fulls[0], 0, BYTES)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    if 1 < blocks:
        load_box(k_desc, k[1], k_fulls[1], N, BYTES)
        load_box(v_desc, v[1], v_fulls[1], N, BYTES)
    tlx.barrier_wait(q_full[0], 0)
    issue(q, k, s, k_fulls, s_fulls, 0)
    j = 0
    while j < blocks:
        at = j & 1
        tlx.barrier_wait(s_fulls[at], (j >> 1) & 1)
        if j + 1 < blocks:
            issue(q, k, s, k_fulls, s_fulls, j + 1)
        if j + 2 < blocks:
            load_box(k_desc, k[at], k_fulls[at], (j + 2) * N, BYTES)
        x = tlx.local_load(s[at])
        probs, alpha, m, l = softmax_step(x, m, l, scale_log2)
        if j > 0:
            tlx.barrier_wait(acc_full[0], (j + 1) & 1)
            if j + 1 < blocks:
                load_box(v_desc, v[at ^ 1], v_fulls[at ^ 1], (j + 1) * N, BYTES)
            o = tlx.local_load(acc[0])
            tlx.local_store(acc[0], o * alpha[:, None])
        tlx.local_store(p[0], probs.to(tl.bfloat16))
        tlx.barrier_wait(v_fulls[at], (j >> 1) & 1)
        tlx.async_dot(p[0], v[at], acc[0], use_acc=j != 0, mBarriers=[acc_full[0]])
        j += 1
    tlx.barrier_wait(acc_full[0], (blocks + 1) & 1)
    rows, d = tl.arange(0, M), tl.arange(0, D)
    out = tlx.local_load(acc[0]) / l[:, None]
    tl.store(out_ptr + rows[:, None] * D + d[None, :], out)
""",
    ),
    right(
        "9.6",
        "PV's wait after P's numbers, V's load after the store of P",
        (
            "        if j + 1 < blocks:\n            load_box(v_desc, v[nxt], v_fulls[nxt], (j + 1) * N, BYTES)\n        tlx.local_store(p[0], probs.to(tl.bfloat16))\n",
            "        rounded = probs.to(tl.bfloat16)\n        tlx.local_store(p[0], rounded)\n        if j + 1 < blocks:\n            load_box(v_desc, v[nxt], v_fulls[nxt], (j + 1) * N, BYTES)\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ tried later
    right(
        "9.4",
        "Kahn's order and merged intervals",
        source="""
from collections import defaultdict, deque
def account(events, needs):
    busy, chain = {}, 0
    if len(events) == 0:
        return busy, chain
    t0, t1 = min(s for _, s, _ in events), max(e for *_, e in events)
    lanes = defaultdict(list)
    for unit, s, e in events:
        lanes[unit].append((s, e))
    for unit, spans in lanes.items():
        spans.sort()
        total, (a, b) = 0, spans[0]
        for s, e in spans[1:]:
            if s > b:
                total += b - a
                a, b = s, e
            elif e > b:
                b = e
        total += b - a
        busy[unit] = total / (t1 - t0) if t1 != t0 else 0
    waits = [len(set(n)) for n in needs]
    users = defaultdict(set)
    for i, n in enumerate(needs):
        for j in n:
            users[j].add(i)
    best = [0] * len(events)
    ready = deque(i for i, w in enumerate(waits) if w == 0)
    while ready:
        i = ready.popleft()
        best[i] += events[i][2] - events[i][1]
        for u in users[i]:
            best[u] = max(best[u], best[i])
            waits[u] -= 1
            if waits[u] == 0:
                ready.append(u)
    return busy, max(best)
""",
    ),
    wrong(
        "9.6", "wait acc parity 0", ("tlx.barrier_wait(acc_full[0], (j - 1) & 1)", "tlx.barrier_wait(acc_full[0], 0)")
    ),
    wrong(
        "9.6",
        "scale of D",
        ("m, l, scale_log2)\n        if j > 0:", "m, l, 1.4426950408889634 / (D ** 0.5))\n        if j > 0:"),
    ),
]
