"""Answers to chapter 18's exercises."""

from tests.course.answers import right, wrong


def _function(name, parameters, body):
    lines = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    return f"import math\nimport statistics\n\nimport torch\n\n\ndef {name}({parameters}):\n{lines}"


def _flops(body):
    return _function("causal_flops", "len_q, len_kv, heads, head_dim, backward=False", body)


def _bytes(body):
    return _function("pooling_bytes", "len_kv, len_q, heads, kv_heads, head_dim, itemsize", body)


def _predict(body):
    return _function("predict", "flops, least_bytes, exponentials, chip", body)


def _ratio(body):
    return _function("ratio_to_best_peer", "result, shape", body)


def _bounds(body):
    return _function("what_bounds", "active_cycles, dram, tensor, xu", body)


def _makespan(body):
    return _function("makespan_bound", "costs, workers", body)


MEDIANS = "m = {t['name']: statistics.median(t['ms']) for t in result['timings'] if t['shape'] == shape and t['ms']}\n"
BUSY = "b = float(active_cycles.mean() / active_cycles.max())\nbusy = {'bytes': dram / b, 'tensor': tensor / b, 'exp': xu / b}\ntop = max(busy, key=busy.get)\n"

TIMES = "t = {'bytes': least_bytes / chip['tb_per_s'], 'tensor': flops / chip['tflops'], 'exp': exponentials / chip['texp_per_s']}\n"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 18.1
    wrong("18.1", "half of all pairs", source=_flops("return int(sum(n * m for n, m in zip(len_q.tolist(), len_kv.tolist())) // 2 * heads * head_dim * (10 if backward else 4))")),
    wrong("18.1", "in int32", source=_flops("p = sum(max(i + 1 + m - n, 0) for n, m in zip(len_q.tolist(), len_kv.tolist()) for i in range(n))\nf = torch.tensor(p, dtype=torch.int32) * heads * head_dim * (10 if backward else 4)\nreturn int(f)")),
    wrong("18.1", "in fp32", source=_flops("p = sum(max(i + 1 + m - n, 0) for n, m in zip(len_q.tolist(), len_kv.tolist()) for i in range(n))\nreturn int(torch.tensor(float(p)) * heads * head_dim * (10 if backward else 4))")),
    wrong("18.1", "never backward", source=_flops("p = sum(max(i + 1 + m - n, 0) for n, m in zip(len_q.tolist(), len_kv.tolist()) for i in range(n))\nreturn p * heads * head_dim * 4")),
    wrong("18.1", "one head", source=_flops("p = sum(max(i + 1 + m - n, 0) for n, m in zip(len_q.tolist(), len_kv.tolist()) for i in range(n))\nreturn p * head_dim * (10 if backward else 4)")),
    wrong("18.1", "the triangle of self-attention", source=_flops("p = sum(n * (n + 1) // 2 for n in len_q.tolist())\nreturn p * heads * head_dim * (10 if backward else 4)")),
    wrong("18.1", "a sequence with more queries sees nothing", source=_flops("p = sum(n * m - n * (n - 1) // 2 for n, m in zip(len_q.tolist(), len_kv.tolist()) if m >= n)\nreturn p * heads * head_dim * (10 if backward else 4)")),
    wrong("18.1", "the sums of lengths", source=_flops("n, m = int(len_q.sum()), int(len_kv.sum())\nreturn sum(max(i + 1 + m - n, 0) for i in range(n)) * heads * head_dim * (10 if backward else 4)")),
    right("18.1", "columns instead of rows", source=_flops("p = 0\nfor n, m in zip(len_q.tolist(), len_kv.tolist()):\n    p += sum(min(n, m - j) for j in range(m))\nreturn p * heads * head_dim * 2 * (5 if backward else 2)")),
    right("18.1", "dense masks", source=_flops("p = sum(int(torch.ones(n, m).tril(m - n).sum(dtype=torch.int64)) for n, m in zip(len_q.tolist(), len_kv.tolist()))\nreturn (p * heads * head_dim * 4, p * heads * head_dim * 10)[bool(backward)]")),
    wrong("18.1", "the first query's keys for all", source=_flops("p = sum(n * max(1 + m - n, 0) for n, m in zip(len_q.tolist(), len_kv.tolist()))\nreturn p * heads * head_dim * (10 if backward else 4)")),
    wrong("18.1", "forward and backward together", source=_flops("p = sum(max(i + 1 + m - n, 0) for n, m in zip(len_q.tolist(), len_kv.tolist()) for i in range(n))\nreturn p * heads * head_dim * (14 if backward else 4)")),
    wrong("18.1", "at least one key", source=_flops("p = sum(max(i + 1 + m - n, 1) for n, m in zip(len_q.tolist(), len_kv.tolist()) for i in range(n))\nreturn p * heads * head_dim * (10 if backward else 4)")),
    wrong("18.1", "the triangle's half without its diagonal", source=_flops("p = sum(n * (m - n) + n * (n - 1) // 2 if m >= n else m * (m - 1) // 2 for n, m in zip(len_q.tolist(), len_kv.tolist()))\nreturn p * heads * head_dim * (10 if backward else 4)")),
    wrong("18.1", "head dim 128", source=_flops("p = sum(max(i + 1 + m - n, 0) for n, m in zip(len_q.tolist(), len_kv.tolist()) for i in range(n))\nreturn p * heads * 128 * (10 if backward else 4)")),
    # ------------------------------------------------------------------------------------------ 18.2
    wrong("18.2", "in int32", source=_bytes("B, t = len(len_kv), len_kv.sum().int()\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn int(n * itemsize + 4 * B * len_q * heads)")),
    wrong("18.2", "padded keys", source=_bytes("B, t = len(len_kv), len(len_kv) * int(len_kv.max())\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn n * itemsize + 4 * B * len_q * heads")),
    wrong("18.2", "always two bytes", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn n * 2 + 4 * B * len_q * heads")),
    wrong("18.2", "lse of key heads", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn n * itemsize + 4 * B * len_q * kv_heads")),
    wrong("18.2", "query of key heads", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + len_q * kv_heads * head_dim + B * len_q * heads * head_dim\nreturn n * itemsize + 4 * B * len_q * heads")),
    wrong("18.2", "offsets, too", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn n * itemsize + 4 * B * len_q * heads + 4 * (B + 1)")),
    wrong("18.2", "a float", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn n * itemsize + 4.0 * B * len_q * heads")),
    wrong("18.2", "in gigabytes", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn (n * itemsize + 4 * B * len_q * heads) // 10**9")),
    right("18.2", "empty tensors of these shapes", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nmade = [torch.empty(s, device='meta', dtype=torch.int8) for s in ((len_q, heads, head_dim), (t, kv_heads, head_dim), (t, kv_heads, head_dim), (B * len_q, heads, head_dim))]\nreturn sum(x.numel() * itemsize for x in made) + B * len_q * heads * 4")),
    wrong("18.2", "the query is not read", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + B * len_q * heads * head_dim\nreturn n * itemsize + 4 * B * len_q * heads")),
    wrong("18.2", "sequences with keys only", source=_bytes("B, t = len([n for n in len_kv.tolist() if n]), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn n * itemsize + 4 * B * len_q * heads")),
    wrong("18.2", "one lse for all heads", source=_bytes("B, t = len(len_kv), int(len_kv.sum())\nn = 2 * t * kv_heads * head_dim + (1 + B) * len_q * heads * head_dim\nreturn n * itemsize + 4 * B * len_q")),
    right("18.2", "row by row", source=_bytes("per_key = 2 * kv_heads * head_dim * itemsize\nper_row = heads * (head_dim * itemsize + 4)\nreturn len_q * heads * head_dim * itemsize + sum(n * per_key + len_q * per_row for n in len_kv.tolist())")),
    # ------------------------------------------------------------------------------------------ 18.3
    wrong("18.3", "microseconds", source=_predict("t = {'bytes': least_bytes / chip['tb_per_s'], 'tensor': flops / chip['tflops'], 'exp': exponentials / chip['texp_per_s']}\nw = max(t, key=t.get)\nreturn t[w] / 1e6, w")),
    wrong("18.3", "the speed decides", source=_predict("t = {'bytes': least_bytes / chip['tb_per_s'], 'tensor': flops / chip['tflops'], 'exp': exponentials / chip['texp_per_s']}\nreturn max(t.values()) / 1e9, min({'bytes': 'tb_per_s', 'tensor': 'tflops', 'exp': 'texp_per_s'}.items(), key=lambda x: chip[x[1]])[0]")),
    wrong("18.3", "binary units", source=_predict("t = {'bytes': least_bytes / chip['tb_per_s'] / 2**40, 'tensor': flops / chip['tflops'] / 2**40, 'exp': exponentials / chip['texp_per_s'] / 2**40}\nw = max(t, key=t.get)\nreturn t[w] * 1e3, w")),
    wrong("18.3", "always the same chip", source=_predict("t = {'bytes': least_bytes / 4.24, 'tensor': flops / 790.0, 'exp': exponentials / 3.1}\nw = max(t, key=t.get)\nreturn t[w] / 1e9, w")),
    wrong("18.3", "the key instead of the word", source=_predict("t = {'tb_per_s': least_bytes / chip['tb_per_s'], 'tflops': flops / chip['tflops'], 'texp_per_s': exponentials / chip['texp_per_s']}\nw = max(t, key=t.get)\nreturn t[w] / 1e9, w")),
    wrong("18.3", "word first", source=_predict("t = {'bytes': least_bytes / chip['tb_per_s'], 'tensor': flops / chip['tflops'], 'exp': exponentials / chip['texp_per_s']}\nw = max(t, key=t.get)\nreturn w, t[w] / 1e9")),
    wrong("18.3", "whole milliseconds", source=_predict("t = {'bytes': least_bytes / chip['tb_per_s'], 'tensor': flops / chip['tflops'], 'exp': exponentials / chip['texp_per_s']}\nw = max(t, key=t.get)\nreturn round(t[w] / 1e9, 2), w")),
    right("18.3", "sorted pairs", source=_predict("work = zip(('bytes', 'tensor', 'exp'), (least_bytes, flops, exponentials), ('tb_per_s', 'tflops', 'texp_per_s'))\nt, w = sorted((n * 1e-9 / chip[c], name) for name, n, c in work)[-1]\nreturn t, w")),
    wrong("18.3", "the mean of the three", source=_predict(TIMES + "w = max(t, key=t.get)\nreturn sum(t.values()) / 3e9, w")),
    wrong("18.3", "bytes or tensor only", source=_predict("a, b = least_bytes / chip['tb_per_s'], flops / chip['tflops']\nreturn (a / 1e9, 'bytes') if a > b else (b / 1e9, 'tensor')")),
    wrong("18.3", "the second slowest", source=_predict(TIMES + "w = sorted(t, key=t.get)[1]\nreturn t[w] / 1e9, w")),
    wrong("18.3", "a multiply-add as one", source=_predict(TIMES.replace("flops /", "flops / 2 /") + "w = max(t, key=t.get)\nreturn t[w] / 1e9, w")),
    right("18.3", "a chain of comparisons", source=_predict("slowest, word = 0.0, ''\nfor name, amount, ceiling in (('exp', exponentials, chip['texp_per_s']), ('tensor', flops, chip['tflops']), ('bytes', least_bytes, chip['tb_per_s'])):\n    ms = amount / ceiling * 1e-12 * 1000\n    if ms > slowest:\n        slowest, word = ms, name\nreturn slowest, word")),
    # ------------------------------------------------------------------------------------------ 18.4
    wrong("18.4", "the lower of two middle runs", source=_ratio("m = {t['name']: statistics.median_low(t['ms']) for t in result['timings'] if t['shape'] == shape and t['ms']}\no = m.pop('jfa')\nb = min(m, key=m.get)\nreturn b, m[b] / o")),
    wrong("18.4", "the last run", source=_ratio("m = {t['name']: t['ms'][-1] for t in result['timings'] if t['shape'] == shape and t['ms']}\no = m.pop('jfa')\nb = min(m, key=m.get)\nreturn b, m[b] / o")),
    wrong("18.4", "the first peer", source=_ratio(MEDIANS + "o = m.pop('jfa')\nb = next(iter(m))\nreturn b, m[b] / o")),
    wrong("18.4", "the peer that was installed first by name", source=_ratio(MEDIANS + "o = m.pop('jfa')\nb = min(m)\nreturn b, m[b] / o")),
    wrong("18.4", "in percent", source=_ratio(MEDIANS + "o = m.pop('jfa')\nb = min(m, key=m.get)\nreturn b, 100 * m[b] / o")),
    wrong("18.4", "never better than a peer", source=_ratio(MEDIANS + "o = m.pop('jfa')\nb = min(m, key=m.get)\nreturn b, min(m[b] / o, 1.0)")),
    wrong("18.4", "the middle entry, not sorted", source=_ratio("m = {t['name']: t['ms'][len(t['ms']) // 2] for t in result['timings'] if t['shape'] == shape and t['ms']}\no = m.pop('jfa')\nb = min(m, key=m.get)\nreturn b, m[b] / o")),
    wrong("18.4", "sorts the file's runs", source=_ratio("for t in result['timings']:\n    if t['ms']:\n        t['ms'].sort()\n" + MEDIANS + "o = m.pop('jfa')\nb = min(m, key=m.get)\nreturn b, m[b] / o")),
    right("18.4", "numpy", source=_ratio("import numpy as np\n\nm = {t['name']: float(np.median(t['ms'])) for t in result['timings'] if (t['shape'], t['ms'] is None) == (shape, False)}\nb = min((n for n in m if n != 'jfa'), key=m.__getitem__)\nreturn b, m[b] / m['jfa']")),
    wrong("18.4", "the higher of two middle runs", source=_ratio("m = {t['name']: statistics.median_high(t['ms']) for t in result['timings'] if t['shape'] == shape and t['ms']}\no = m.pop('jfa')\nb = min(m, key=m.get)\nreturn b, m[b] / o")),
    wrong("18.4", "ratio of the means", source=_ratio(MEDIANS + "b = min((n for n in m if n != 'jfa'), key=m.get)\nms = {t['name']: statistics.mean(t['ms']) for t in result['timings'] if t['shape'] == shape and t['ms']}\nreturn b, ms[b] / ms['jfa']")),
    wrong("18.4", "all peers' median", source=_ratio(MEDIANS + "o = m.pop('jfa')\nb = min(m, key=m.get)\nreturn b, statistics.median(m.values()) / o")),
    wrong("18.4", "ratio first", source=_ratio(MEDIANS + "o = m.pop('jfa')\nb = min(m, key=m.get)\nreturn m[b] / o, b")),
    right("18.4", "sorted, by hand", source=_ratio("times = {}\nfor t in result['timings']:\n    if t['shape'] == shape and t['ms'] is not None:\n        s = sorted(t['ms'])\n        times[t['name']] = 0.5 * (s[(len(s) - 1) // 2] + s[len(s) // 2])\npeers = [n for n in times if n != 'jfa']\npeers.sort(key=times.get)\nreturn peers[0], times[peers[0]] / times['jfa']")),
    # ------------------------------------------------------------------------------------------ 18.5
    wrong("18.5", "the first that is busy", source=_bounds(BUSY + "if b < 0.75:\n    return b, 'imbalance'\nreturn b, next((w for w, x in busy.items() if x >= 30), 'waiting')")),
    wrong("18.5", "times the balance", source=_bounds(BUSY + "busy = {'bytes': dram * b, 'tensor': tensor * b, 'exp': xu * b}\nif b < 0.75:\n    return b, 'imbalance'\nreturn b, top if busy[top] >= 70 else 'waiting'")),
    wrong("18.5", "shares for percent", source=_bounds(BUSY + "if b < 0.75:\n    return b, 'imbalance'\nreturn b, top if busy[top] >= 0.7 else 'waiting'")),
    wrong("18.5", "median over largest", source=_bounds("b = float(active_cycles.median() / active_cycles.max())\nbusy = {'bytes': dram / b, 'tensor': tensor / b, 'exp': xu / b}\ntop = max(busy, key=busy.get)\nif b < 0.75:\n    return b, 'imbalance'\nreturn b, top if busy[top] >= 70 else 'waiting'")),
    wrong("18.5", "waiting before imbalance", source=_bounds(BUSY + "if busy[top] < 70:\n    return b, 'waiting'\nreturn b, 'imbalance' if b < 0.75 else top")),
    wrong("18.5", "all three together", source=_bounds(BUSY + "if b < 0.75:\n    return b, 'imbalance'\nreturn b, top if sum(busy.values()) >= 70 else 'waiting'")),
    wrong("18.5", "the word alone", source=_bounds(BUSY + "return 'imbalance' if b < 0.75 else top if busy[top] >= 70 else 'waiting'")),
    wrong("18.5", "a balance in percent", source=_bounds(BUSY + "w = 'imbalance' if b < 0.75 else top if busy[top] >= 70 else 'waiting'\nreturn 100 * b, w")),
    right("18.5", "match on a tuple", source=_bounds("x = active_cycles.double()\nb = (x.sum() / (len(x) * x.max())).item()\nshare, word = max(zip((dram, tensor, xu), ('bytes', 'tensor', 'exp')))\nmatch b < 0.75, share >= 70 * b:\n    case True, _:\n        return b, 'imbalance'\n    case _, True:\n        return b, word\nreturn b, 'waiting'")),
    wrong("18.5", "balance of the busy SMs only", source=_bounds("x = active_cycles[active_cycles > active_cycles.max() / 2]\n" + BUSY.replace("active_cycles.mean()", "x.mean()") + "if b < 0.75:\n    return b, 'imbalance'\nreturn b, top if busy[top] >= 70 else 'waiting'")),
    wrong("18.5", "75 for 0.75", source=_bounds(BUSY + "if b < 75:\n    return b, 'imbalance'\nreturn b, top if busy[top] >= 70 else 'waiting'")),
    wrong("18.5", "imbalance below 0.7", source=_bounds(BUSY + "if b < 0.7:\n    return b, 'imbalance'\nreturn b, top if busy[top] >= 70 else 'waiting'")),
    wrong("18.5", "imbalance below 0.8", source=_bounds(BUSY + "if b < 0.8:\n    return b, 'imbalance'\nreturn b, top if busy[top] >= 70 else 'waiting'")),
    wrong("18.5", "busy from 60", source=_bounds(BUSY + "if b < 0.75:\n    return b, 'imbalance'\nreturn b, top if busy[top] >= 60 else 'waiting'")),
    right("18.5", "numpy, early returns", source=_bounds("import numpy as np\n\nx = active_cycles.numpy().astype(np.float64)\nbalance = float(np.mean(x / x.max()))\nnames = ['bytes', 'tensor', 'exp']\nshare = np.array([dram, tensor, xu]) / balance\nif balance < 0.75:\n    return balance, 'imbalance'\nif share.max() < 70:\n    return balance, 'waiting'\nreturn balance, names[int(share.argmax())]")),
    # ------------------------------------------------------------------------------------------ 18.6
    wrong("18.6", "no more workers than tiles", source=_makespan("s = sum(costs) / min(workers, len(costs))\nreturn max(max(costs), s), max(1, math.ceil(max(costs) / s))")),
    wrong("18.6", "the first tile is the largest", source=_makespan("s = sum(costs) / workers\nreturn max(costs[0], s), max(1, math.ceil(costs[0] / s))")),
    wrong("18.6", "rounded to the nearest", source=_makespan("s = sum(costs) / workers\nreturn max(max(costs), s), max(1, round(max(costs) / s))")),
    wrong("18.6", "a whole share", source=_makespan("s = max(1, sum(costs) // workers)\nreturn max(max(costs), s), max(1, math.ceil(max(costs) / s))")),
    wrong("18.6", "pieces as a float", source=_makespan("s = sum(costs) / workers\nreturn max(max(costs), s), float(max(1, math.ceil(max(costs) / s)))")),
    wrong("18.6", "an actual schedule", source=_makespan("import heapq\n\nends = [0.0] * workers\nfor c in sorted(costs, reverse=True):\n    heapq.heapreplace(ends, ends[0] + c)\ns = sum(costs) / workers\nreturn max(ends), max(1, math.ceil(max(costs) / s))")),
    wrong("18.6", "every tile is cut", source=_makespan("s = sum(costs) / workers\nreturn max(max(costs), s), sum(max(1, math.ceil(c / s)) for c in costs)")),
    wrong("18.6", "sorts the caller's list", source=_makespan("costs.sort()\ns = sum(costs) / workers\nreturn max(costs[-1], s), max(1, math.ceil(costs[-1] / s))")),
    right("18.6", "fractions", source=_makespan("from fractions import Fraction\n\ns = Fraction(sum(costs), workers)\nreturn float(max(max(costs), s)), max(1, math.ceil(max(costs) / s))")),
    wrong("18.6", "the mean of both bounds", source=_makespan("s = sum(costs) / workers\nreturn (max(costs) + s) / 2, max(1, math.ceil(max(costs) / s))")),
    wrong("18.6", "strictly smaller parts", source=_makespan("s, p = sum(costs) / workers, 1\nwhile max(costs) / p >= s:\n    p += 1\nreturn max(max(costs), s), p")),
    wrong("18.6", "even share of the others", source=_makespan("s = (sum(costs) - max(costs)) / max(1, workers - 1)\nreturn max(max(costs), s), max(1, math.ceil(max(costs) / s))")),
    wrong("18.6", "no pieces", source=_makespan("s = sum(costs) / workers\nreturn max(max(costs), s), math.floor(max(costs) / s)")),
    right("18.6", "whole numbers", source=_makespan("top, total = max(costs), sum(costs)\nshare = total / workers\nquotient, rest = divmod(top * workers, total)\nreturn (top if top > share else share), max(1, quotient + (rest > 0))")),
]  # fmt: skip
