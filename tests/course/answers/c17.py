"""Answers to chapter 17's exercises."""

from tests.course.answers import right, wrong

KEEP_ORDER = """    order = by_score.gather(2, by_tier)
"""
CHOOSE_LOOP = """
import math

def choose(scores, candidates, always, share, parts):
    H, R, W = scores.shape
    lists = []
    for h in range(H):
        for r in range(R):
            cand = [j for j in range(W) if candidates[r, j]]
            must = [j for j in cand if always[r, j]]
            count = max(COUNT, len(must))
            value = lambda j: VALUE
            rest = sorted((j for j in cand if j not in must), key=lambda j: (-value(j), TIE))
            lists.append(ORDER)
    starts = torch.zeros(H * R + 1, dtype=torch.int32)
    starts[1:] = torch.tensor([len(x) for x in lists], dtype=torch.int64).cumsum(0)
    columns = torch.full((H * R * W,), -1, dtype=torch.int32)
    flat = [j for x in lists for j in x]
    columns[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
    return starts, columns
"""


def loop(
    count="-(-len(cand) * share // parts)",
    value="float('inf') if scores[h, r, j].isnan() else scores[h, r, j].item()",
    tie="j",
    order="sorted((must + rest)[:count])",
):
    """Return the loop's source with these parts."""
    source = CHOOSE_LOOP
    for name, text in (("COUNT", count), ("VALUE", value), ("TIE", tie), ("ORDER", order)):
        source = source.replace(name, text)
    return source


TURN_HEAD = "    owner = torch.searchsorted(starts[1:].long(), entries, right=True).clamp(max=max(lists - 1, 0))\n"
MASK = """        if tl.load(kinds_ptr + entry) == 1:
            seen = (j[None, :] - i[:, None] <= len_kv - len_q) & (j < len_kv)[None, :]
            s = tl.where(seen, s, float("-inf"))
"""
SOFT = """        m_new = tl.maximum(m, tl.max(s, axis=1))
        anchor = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp(m - anchor)
        p = tl.exp(s - anchor[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
"""

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 17.1
    wrong("17.1", "key heads in turn", ("b = b.repeat_interleave(group, 1)", "b = b.repeat(1, group, 1)")),
    wrong(
        "17.1",
        "key head by key heads",
        ("b = b.repeat_interleave(group, 1)", "b = b[:, [min(h // k.shape[1], k.shape[1] - 1) for h in range(heads)]]"),
    ),
    wrong("17.1", "the sum for the mean", ("rows.mean(0)", "rows.sum(0)")),
    wrong("17.1", "mean over a whole block", ("rows.mean(0)", "(rows.sum(0) / block)")),
    wrong("17.1", "largest for mean", ("rows.mean(0)", "rows.amax(0)")),
    wrong("17.1", "scale forgotten", (", a, b) * scale", ", a, b)")),
    wrong("17.1", "scale twice", (", a, b) * scale", ", a * scale, b) * scale")),
    wrong("17.1", "zero where there is no block", ('float("-inf"))', "0.0)")),
    wrong("17.1", "the last block left out", ("if len(rows)]", "if len(rows) == block]")),
    wrong(
        "17.1",
        "blocks of the packed batch",
        (
            "bounds = offsets.tolist()",
            "bounds = [b // block * block for b in offsets.tolist()[:-1]] + [int(offsets[-1])]",
        ),
    ),
    wrong(
        "17.1", "rows to the tensor's end", ("bounds = offsets.tolist()", "bounds = offsets.tolist()[:-1] + [len(x)]")
    ),
    wrong(
        "17.1",
        "product before the pooling",
        source="""
def block_scores(q, k, q_offsets, k_offsets, scale, block):
    H, group = q.shape[1], q.shape[1] // k.shape[1]
    qo, ko = q_offsets.tolist(), k_offsets.tolist()
    parts, W = [], max(-(-(b - a) // block) for a, b in zip(ko, ko[1:]))
    for s in range(len(qo) - 1):
        a, b = q[qo[s] : qo[s + 1]], k[ko[s] : ko[s + 1]].repeat_interleave(group, 1)
        if not len(a):
            continue
        scores = torch.einsum("ihd,jhd->hij", a, b) * scale
        rows = torch.stack([x.mean(1) for x in scores.split(block, 1)], 1)
        out = torch.full((H, rows.shape[1], W), float("-inf"))
        if len(b):
            cols = torch.stack([x.mean(2) for x in rows.split(block, 2)], 2)
            out[:, :, : cols.shape[2]] = cols
        parts.append(out)
    return torch.cat(parts, 1)
""",
    ),
    wrong(
        "17.1",
        "keys of the first sequence",
        ("    for a, b in zip(queries, keys):\n", "    for a, b in zip(queries, [keys[0]] * len(keys)):\n"),
    ),
    wrong("17.1", "width of all blocks", ("width = max(map(len, keys))", "width = sum(map(len, keys))")),
    wrong("17.1", "width of the queries", ("width = max(map(len, keys))", "width = max(map(len, queries))")),
    wrong("17.1", "float64", ('float("-inf"))', 'float("-inf"), dtype=torch.float64)')),
    wrong(
        "17.1",
        "in bf16",
        (
            'torch.einsum("ihd,jhd->hij", a, b) * scale',
            'torch.einsum("ihd,jhd->hij", a.bfloat16(), b.bfloat16()).float() * scale',
        ),
    ),
    wrong("17.1", "head and block exchanged", ("    return out", "    return out.transpose(0, 1).contiguous()")),
    wrong(
        "17.1",
        "scales q in place",
        ("    heads, group", "    q *= scale\n    heads, group"),
        (", a, b) * scale", ", a, b)"),
    ),
    right(
        "17.1",
        "sums by index_add",
        source="""
def pool(x, offsets, block):
    bounds = offsets.tolist()
    ids, first, n = [], [], 0
    for a, b in zip(bounds, bounds[1:]):
        first.append(n)
        ids += [n + i // block for i in range(b - a)]
        n += -(-(b - a) // block)
    ids = torch.tensor(ids, dtype=torch.int64)
    total = torch.zeros(n, *x.shape[1:]).index_add_(0, ids, x[: bounds[-1]])
    return total / torch.bincount(ids, minlength=n)[:, None, None], first + [n]

def block_scores(q, k, q_offsets, k_offsets, scale, block):
    a, fa = pool(q, q_offsets, block)
    b, fb = pool(k, k_offsets, block)
    H, G = q.shape[1], q.shape[1] // k.shape[1]
    W = max(y - x for x, y in zip(fb, fb[1:]))
    out = torch.full((H, len(a), W), -float("inf"))
    for s in range(len(fa) - 1):
        for h in range(H):
            out[h, fa[s] : fa[s + 1], : fb[s + 1] - fb[s]] = a[fa[s] : fa[s + 1], h] @ b[fb[s] : fb[s + 1], h // G].T * scale
    return out
""",
    ),
    right("17.1", "scale at the queries", (", a, b) * scale", ", a * scale, b)")),
    # ------------------------------------------------------------------------------------------ 17.2
    wrong("17.2", "rounded down", source=loop(count="len(cand) * share // parts")),
    wrong("17.2", "rounded down, one at least", source=loop(count="max(1, len(cand) * share // parts) if cand else 0")),
    wrong("17.2", "a float's ceiling", source=loop(count="math.ceil(len(cand) * (share / parts))")),
    wrong("17.2", "rounded", source=loop(count="round(len(cand) * share / parts)")),
    wrong("17.2", "share of the width", source=loop(count="min(len(cand), -(-W * share // parts))")),
    wrong("17.2", "those of always besides", source=loop(count="-(-len(cand) * share // parts) + len(must)")),
    wrong(
        "17.2",
        "NaN is the lowest",
        source=loop(value="-float('inf') if scores[h, r, j].isnan() else scores[h, r, j].item()"),
    ),
    wrong("17.2", "NaN is zero", source=loop(value="scores[h, r, j].nan_to_num(0.0).item()")),
    wrong(
        "17.2",
        "NaN above infinity",
        source=loop(value="(1, 0.0) if scores[h, r, j].isnan() else (0, scores[h, r, j].item())").replace(
            "-value(j), j", "-value(j)[0], -value(j)[1], j"
        ),
    ),
    wrong("17.2", "ties prefer the higher block", source=loop(tie="-j")),
    wrong("17.2", "not rising", source=loop(order="(must + rest)[:count]")),
    wrong("17.2", "always forgotten", source=loop().replace("if always[r, j]]", "if False]")),
    wrong(
        "17.2",
        "always though no candidate",
        source=loop().replace(
            "must = [j for j in cand if always[r, j]]", "must = [j for j in range(W) if always[r, j]]"
        ),
    ),
    wrong(
        "17.2",
        "not more than the ratio",
        source=loop(count="-(-len(cand) * share // parts)").replace(
            "count = max(-(-len(cand) * share // parts), len(must))", "count = -(-len(cand) * share // parts)"
        ),
    ),
    wrong(
        "17.2",
        "head 0 chooses for all",
        source=loop(value="scores[0, r, j].item() if not scores[0, r, j].isnan() else float('inf')"),
    ),
    wrong(
        "17.2",
        "rows before heads",
        source=loop().replace(
            "    for h in range(H):\n        for r in range(R):\n",
            "    for r in range(R):\n        for h in range(H):\n",
        ),
    ),
    wrong("17.2", "lowest scores", source=loop().replace("(-value(j)", "(value(j)")),
    wrong("17.2", "zeros behind the lists", ("-1, dtype=torch.int32)\n    found", "0, dtype=torch.int32)\n    found")),
    wrong("17.2", "int64", ("-1, dtype=torch.int32)\n    found", "-1, dtype=torch.int64)\n    found")),
    wrong(
        "17.2",
        "topk of masked scores",
        source="""
def choose(scores, candidates, always, share, parts):
    H, R, W = scores.shape
    s = scores.masked_fill(scores.isnan(), float("inf")).masked_fill(~candidates, float("-inf")).masked_fill(always & candidates, float("inf"))
    n = candidates.sum(1)
    count = torch.maximum((n * share + parts - 1) // parts, (always & candidates).sum(1))
    order = s.argsort(dim=2, descending=True, stable=True)
    chosen = torch.zeros(H, R, W, dtype=torch.bool)
    chosen.scatter_(2, order, torch.arange(W) < count[:, None].expand(H, R, 1))
    starts = torch.zeros(H * R + 1, dtype=torch.int32)
    starts[1:] = chosen.sum(2).flatten().cumsum(0)
    columns = torch.full((H * R * W,), -1, dtype=torch.int32)
    found = chosen.nonzero()[:, 2]
    columns[: len(found)] = found.int()
    return starts, columns
""",
    ),
    wrong(
        "17.2",
        "an unstable sort",
        (
            "rank.sort(dim=2, descending=True, stable=True).indices",
            "rank.flip(2).sort(dim=2, descending=True, stable=True).indices.neg().add(width - 1)",
        ),
    ),
    right("17.2", "loops over lists", source=loop()),
    right(
        "17.2",
        "lexsort of numpy",
        source="""
import numpy as np

def choose(scores, candidates, always, share, parts):
    H, R, W = scores.shape
    s = scores.numpy().astype(np.float64)
    s = np.where(np.isnan(s), np.inf, s)
    c, a = candidates.numpy(), (always & candidates).numpy()
    starts, out = [0], []
    for h in range(H):
        for r in range(R):
            order = np.lexsort((np.arange(W), -s[h, r], ~a[r], ~c[r]))
            n = int(c[r].sum())
            take = max((n * share + parts - 1) // parts, int(a[r].sum()))
            out += sorted(order[:take].tolist())
            starts.append(len(out))
    out += [-1] * (H * R * W - len(out))
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(out, dtype=torch.int32)
""",
    ),
    # ------------------------------------------------------------------------------------------ 17.3
    wrong(
        "17.3",
        "host loops",
        source="""
def turn(starts, columns, kinds, q_first, k_first, heads, k_blocks):
    lists = len(starts) - 1
    rows = lists // heads
    got = [[] for _ in range(heads * k_blocks)]
    for n in range(lists):
        h, r = divmod(n, rows)
        s = int(torch.searchsorted(q_first[1:].contiguous(), r, right=True))
        for e in range(int(starts[n]), int(starts[n + 1])):
            got[h * k_blocks + int(k_first[s]) + int(columns[e])].append((r - int(q_first[s]), int(kinds[e])))
    new = torch.tensor([0] + [len(g) for g in got]).cumsum(0).int()
    flat = [x for g in got for x in g]
    pad = len(columns) - len(flat)
    return new, torch.tensor([x[0] for x in flat] + [-1] * pad, dtype=torch.int32), torch.tensor([x[1] for x in flat] + [0] * pad, dtype=torch.int8)
""",
    ),
    wrong(
        "17.3",
        "unstable",
        ("target.argsort(stable=True)", "target.flip(0).argsort(stable=True).neg().add(target.numel() - 1)"),
    ),
    wrong(
        "17.3",
        "rows of the whole batch",
        ("torch.where(real, row - q_first.long()[seq], -1)", "torch.where(real, row, -1)"),
    ),
    wrong(
        "17.3",
        "columns taken as global",
        ("head * k_blocks + k_first.long()[seq] + columns", "head * k_blocks + columns"),
    ),
    wrong(
        "17.3",
        "heads in one list",
        ("head * k_blocks + k_first.long()[seq] + columns", "k_first.long()[seq] + columns"),
    ),
    wrong(
        "17.3",
        "sequence from the left",
        ("torch.searchsorted(q_first[1:].long(), row, right=True)", "torch.searchsorted(q_first[1:].long(), row)"),
    ),
    wrong("17.3", "list from the left", (TURN_HEAD, TURN_HEAD.replace(", right=True", ""))),
    wrong("17.3", "what lies behind counts", ("    real = entries < starts[-1]\n", "    real = entries >= 0\n")),
    wrong("17.3", "what lies behind by its -1", ("    real = entries < starts[-1]\n", "    real = columns >= 0\n")),
    wrong("17.3", "one entry too many", ("entries < starts[-1]", "entries <= starts[-1]")),
    wrong("17.3", "kinds in the old order", ("new_kinds[order].to", "new_kinds.to")),
    wrong("17.3", "kinds behind kept", ("torch.where(real, kinds, 0)", "kinds")),
    wrong("17.3", "columns behind are 0", ("q_first.long()[seq], -1)", "q_first.long()[seq], 0)")),
    wrong(
        "17.3",
        "starts by one place",
        ("new_starts[1:] = counts[:-1].cumsum(0)", "new_starts[1:] = counts[1:].cumsum(0)"),
    ),
    wrong("17.3", "kinds turned round", ("torch.where(real, kinds, 0)", "torch.where(real, 3 - kinds, 0)")),
    wrong("17.3", "int64 columns", ("inside[order].int()", "inside[order]")),
    wrong(
        "17.3",
        "dense matrix of nonzero",
        (
            "    order = target.argsort(stable=True)\n",
            "    order = torch.cat((real.nonzero()[:, 0], (~real).nonzero()[:, 0]))\n    order = order[target[order].argsort(stable=True)]\n",
        ),
    ),
    wrong(
        "17.3",
        "an if on a tensor",
        ("    entries = torch", "    if starts[-1] == 0:\n        pass\n    entries = torch"),
    ),
    wrong(
        "17.3",
        "k_blocks asked of the tensor",
        ("    lists = starts", "    k_blocks = k_first[-1].item()\n    lists = starts"),
    ),
    wrong("17.3", "the first of two sequences at once", ("clamp(max=q_first.numel() - 2)", "clamp(max=0)")),
    right(
        "17.3",
        "counts before, no sort",
        source='''
def turn(starts, columns, kinds, q_first, k_first, heads, k_blocks):
    """A key of (target, row) for each entry, sorted."""
    capacity, lists = columns.shape[0], starts.shape[0] - 1
    R = max(lists // heads, 1)
    e = torch.arange(capacity)
    n = (e[:, None] >= starts[None, 1:]).sum(1).clamp(max=max(lists - 1, 0))
    there = e < starts[-1]
    row, head = n % R, torch.div(n, R, rounding_mode="floor")
    seq = (row[:, None] >= q_first[None, 1:]).sum(1).clamp(max=len(q_first) - 2)
    to = torch.where(there, head * k_blocks + k_first[seq] + columns, heads * k_blocks)
    key = to * (R + 1) + torch.where(there, row, R)
    _, order = torch.sort(key, stable=True)
    new = torch.searchsorted(to[order].contiguous(), torch.arange(heads * k_blocks + 1)).int()
    inside = torch.where(there, row - q_first[seq], -1)[order].to(torch.int32)
    return new, inside, torch.where(there, kinds, torch.zeros_like(kinds))[order].to(torch.int8)
''',
    ),
    # ------------------------------------------------------------------------------------------ 17.4
    wrong("17.4", "top left", ("<= len_kv - len_q)", "<= 0)")),
    wrong("17.4", "strictly before", ("<= len_kv - len_q)", "< len_kv - len_q)")),
    wrong("17.4", "one too many", ("<= len_kv - len_q)", "<= len_kv - len_q + 1)")),
    wrong("17.4", "sign of the difference", ("<= len_kv - len_q)", "<= len_q - len_kv)")),
    wrong(
        "17.4",
        "keys behind the end",
        (" & (j < len_kv)[None, :]\n", "\n"),
        ("<= len_kv - len_q)", "<= tl.maximum(len_kv - len_q, len_kv))"),
    ),
    wrong(
        "17.4",
        "FULL masked too",
        ("        if tl.load(kinds_ptr + entry) == 1:", "        if tl.load(kinds_ptr + entry) >= 1:"),
    ),
    wrong(
        "17.4",
        "PARTIAL not masked",
        ("        if tl.load(kinds_ptr + entry) == 1:", "        if tl.load(kinds_ptr + entry) == 0:"),
    ),
    wrong(
        "17.4",
        "kinds exchanged",
        ("        if tl.load(kinds_ptr + entry) == 1:", "        if tl.load(kinds_ptr + entry) == 2:"),
    ),
    wrong(
        "17.4",
        "list of head 0",
        ("begin = tl.load(starts_ptr + head * T + tile)", "begin = tl.load(starts_ptr + tile)"),
        ("end = tl.load(starts_ptr + head * T + tile + 1)", "end = tl.load(starts_ptr + tile + 1)"),
    ),
    wrong(
        "17.4",
        "tile by head",
        ("begin = tl.load(starts_ptr + head * T + tile)", "begin = tl.load(starts_ptr + tile * H + head)"),
        ("end = tl.load(starts_ptr + head * T + tile + 1)", "end = tl.load(starts_ptr + tile * H + head + 1)"),
    ),
    wrong(
        "17.4",
        "all blocks",
        (
            "    for entry in range(begin, end):\n        j = tl.load(columns_ptr + entry) * BN",
            "    for entry in range(0, tl.cdiv(len_kv, BN)):\n        j = entry * BN",
        ),
        ("        if tl.load(kinds_ptr + entry) == 1:", "        if True:"),
    ),
    wrong("17.4", "key heads in turn", ("+ head // GROUP)[:, None]", "+ head % (H // GROUP))[:, None]")),
    wrong("17.4", "H heads of keys", ("(k_begin + j) * (H // GROUP)", "(k_begin + j) * H")),
    wrong("17.4", "keys of the batch", ("((k_begin + j) * (H", "((j) * (H")),
    wrong("17.4", "scale forgotten", ('input_precision="ieee") * scale', 'input_precision="ieee")')),
    wrong("17.4", "lse in base 2", ("m + tl.log(tl", "m * 1.4426950408889634 + tl.math.log2(tl")),
    wrong("17.4", "lse without the maximum", ("m + tl.log(tl.where(some, l, 1.0))", "tl.log(tl.where(some, l, 1.0))")),
    wrong(
        "17.4",
        "NaN where nothing is seen",
        ('        anchor = tl.where(m_new == float("-inf"), 0.0, m_new)\n', "        anchor = m_new\n"),
    ),
    wrong(
        "17.4",
        "0 for the lse of nothing",
        ('tl.log(tl.where(some, l, 1.0)), float("-inf"))', "tl.log(tl.where(some, l, 1.0)), 0.0)"),
    ),
    wrong("17.4", "0 / 0", ("acc / tl.where(some, l, 1.0)[:, None]", "acc / l[:, None]")),
    wrong("17.4", "-1e4 for hidden scores", ('s = tl.where(seen, s, float("-inf"))', "s = tl.where(seen, s, -1.0e4)")),
    wrong("17.4", "one maximum for all rows", ("tl.max(s, axis=1))", "tl.max(tl.max(s, axis=1), axis=0))")),
    wrong(
        "17.4", "maximum from 0", ('m = tl.full((BM,), float("-inf"), tl.float32)', "m = tl.zeros((BM,), tl.float32)")
    ),
    wrong(
        "17.4",
        "no maximum",
        (
            SOFT,
            '        p = tl.exp(s)\n        l += tl.sum(p, axis=1)\n        acc = tl.dot(p, v, acc, input_precision="ieee")\n        m = tl.zeros((BM,), tl.float32)\n',
        ),
    ),
    wrong("17.4", "output not rescaled", ("acc * alpha[:, None], input", "acc, input")),
    wrong("17.4", "sum not rescaled", ("l = l * alpha + tl.sum", "l = l + tl.sum")),
    wrong(
        "17.4",
        "neighbour's keys loaded",
        ("v = tl.load(v_ptr + at, mask=(j < len_kv)[:, None], other=0.0)", "v = tl.load(v_ptr + at)"),
    ),
    wrong("17.4", "neighbour's queries stored", (", out, mask=(i < len_q)[:, None])", ", out)")),
    wrong(
        "17.4",
        "tf32",
        (
            's = tl.dot(q, tl.trans(k), input_precision="ieee")',
            "s = tl.dot(q.to(tl.bfloat16), tl.trans(k).to(tl.bfloat16))",
        ),
    ),
    wrong("17.4", "lse of one head", ("tl.store(lse_ptr + at_rows, lse", "tl.store(lse_ptr + (q_begin + i), lse")),
    wrong("17.4", "row in the batch for the mask", ("i = row0 + tl.arange(0, BM)", "i = tl.arange(0, BM)")),
    right(
        "17.4",
        "base 2 inside",
        (
            SOFT,
            """        m_new = tl.maximum(m, tl.max(s, axis=1))
        safe = tl.where(m_new > float("-inf"), m_new, 0.0)
        LOG2E: tl.constexpr = 1.4426950408889634
        p = tl.math.exp2((s - safe[:, None]) * LOG2E)
        alpha = tl.math.exp2((m - safe) * LOG2E)
        l = l * alpha
        l += tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc += tl.dot(p, v, input_precision="ieee")
        m = m_new
""",
        ),
    ),
    right(
        "17.4",
        "scale at q, a while loop",
        ("    for entry in range(begin, end):\n", "    q = q * scale\n    entry = begin\n    while entry < end:\n"),
        ('input_precision="ieee") * scale', 'input_precision="ieee")'),
        ("        m = m_new\n", "        m = m_new\n        entry += 1\n"),
    ),
    # ------------------------------------------------------------------------------------------ 17.5
    wrong(
        "17.5",
        "only keys whole",
        ("(q_begin + block <= len_q) & (k_begin + block <= len_kv)", "(k_begin + block <= len_kv)"),
    ),
    wrong(
        "17.5",
        "only queries whole",
        ("(q_begin + block <= len_q) & (k_begin + block <= len_kv)", "(q_begin + block <= len_q)"),
    ),
    wrong(
        "17.5",
        "strictly inside",
        (
            "(q_begin + block <= len_q) & (k_begin + block <= len_kv)",
            "(q_begin + block < len_q) & (k_begin + block < len_kv)",
        ),
    ),
    wrong(
        "17.5",
        "last row inside",
        (
            "(q_begin + block <= len_q) & (k_begin + block <= len_kv)",
            "(q_begin + block - 2 < len_q) & (k_begin + block - 2 < len_kv)",
        ),
    ),
    wrong("17.5", "either", ("(q_begin + block <= len_q) & (k", "(q_begin + block <= len_q) | (k")),
    wrong(
        "17.5",
        "by multiples of the block",
        ("(q_begin + block <= len_q) & (k_begin + block <= len_kv)", "(len_q % block == 0) & (len_kv % block == 0)"),
    ),
    wrong(
        "17.5",
        "the last block is never whole",
        (
            "(q_begin + block <= len_q) & (k_begin + block <= len_kv)",
            "(i < (len_q - 1) // block) & (j < (len_kv - 1) // block)",
        ),
    ),
    wrong("17.5", "strict bounds", (">= lo) & (k_last - q_begin <= hi)", "> lo) & (k_last - q_begin < hi)")),
    wrong(
        "17.5",
        "corners exchanged",
        ("(k_begin - q_last >= lo) & (k_last - q_begin <= hi)", "(k_last - q_begin >= lo) & (k_begin - q_last <= hi)"),
    ),
    wrong("17.5", "upper bound only", ("(k_begin - q_last >= lo) & ", "")),
    wrong("17.5", "lower bound only", (" & (k_last - q_begin <= hi)", "")),
    wrong("17.5", "int64", (".to(torch.int8)", "")),
    wrong("17.5", "0 for PARTIAL", ("torch.where(full, 2, 1)", "torch.where(full, 2, 0)")),
    wrong("17.5", "first begins", ("k_begin - q_last >= lo", "k_begin - q_begin >= lo")),
    wrong(
        "17.5",
        "inputs changed",
        ("q_begin, k_begin = i * block, j * block", "q_begin, k_begin = i.mul_(block), j.mul_(block)"),
    ),
    right(
        "17.5",
        "all rows looked at",
        source="""
def pair_kinds(i, j, len_q, len_kv, lo, hi, block):
    r = torch.arange(block)
    q = (i * block)[:, None, None] + r[None, :, None]
    k = (j * block)[:, None, None] + r[None, None, :]
    see = lambda x: x[:, None, None]
    counts = (q < see(len_q)) & (k < see(len_kv)) & (k - q >= see(lo)) & (k - q <= see(hi))
    return (1 + counts.flatten(1).all(1).long()).to(torch.int8)
""",
    ),
    right(
        "17.5",
        "whole by floor",
        source="""
def pair_kinds(i, j, len_q, len_kv, lo, hi, block):
    whole = torch.logical_and(i < len_q // block, j < len_kv // block)
    d = (j - i) * block
    inside = torch.logical_and(d - (block - 1) >= lo, d + (block - 1) <= hi)
    kinds = torch.ones_like(i, dtype=torch.int8)
    kinds[whole & inside] = 2
    return kinds
""",
    ),
    # ------------------------------------------------------------------------------------------ 17.6
    wrong("17.6", "at most", ("sparse(r) < dense", "sparse(r) <= dense")),
    wrong("17.6", "the smallest", ("max(paying, default=0)", "min(paying, default=0)")),
    wrong("17.6", "nothing pays", ("max(paying, default=0)", "max(paying)")),
    wrong("17.6", "rounded down", ("(percent * n + 99) // 100", "percent * n // 100")),
    wrong("17.6", "rounded", ("(percent * n + 99) // 100", "round(percent * n / 100)")),
    wrong(
        "17.6",
        "of the sum",
        (
            "chosen = [(percent * n + 99) // 100 for n in candidates]",
            "chosen = [-(-percent * sum(candidates) // 100)] + [0] * (len(candidates) - 1)",
        ),
    ),
    wrong("17.6", "a float's ceiling", ("(percent * n + 99) // 100", "__import__('math').ceil(percent / 100 * n)")),
    wrong("17.6", "at least one", ("(percent * n + 99) // 100", "max(1, (percent * n + 99) // 100)")),
    wrong("17.6", "one head", ("dense = heads * sum", "dense = sum")),
    wrong("17.6", "key blocks for every head", ("kv_heads * key_blocks", "heads * key_blocks")),
    wrong("17.6", "queries pooled once", ("pool * (heads * len(candidates)", "pool * (len(candidates)")),
    wrong("17.6", "scores of key heads", ("score * heads * sum", "score * kv_heads * sum")),
    wrong(
        "17.6",
        "scores of all pairs",
        ("score * heads * sum(candidates)", "score * heads * len(candidates) * key_blocks"),
    ),
    wrong(
        "17.6",
        "tiles without candidates skipped",
        ("start + step * n for n in candidates)", "start + step * n for n in candidates if n)"),
    ),
    wrong("17.6", "sparse tiles without start", ("sum(start + (step + lost) * c for c", "sum((step + lost) * c for c")),
    wrong("17.6", "lost per tile", ("start + (step + lost) * c", "start + lost + step * c")),
    wrong("17.6", "the choice for nothing", ("        return choice + heads", "        return heads")),
    right("17.6", "up to 99: all blocks never pay", ("range(1, 101)", "range(1, 100)")),
    right("17.6", "0 percent: it is the answer anyway", ("range(1, 101)", "range(0, 101)")),
    right(
        "17.6",
        "from above",
        source="""
def predict(candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score):
    n = len(candidates)
    dense = sum(heads * (start + c * step) for c in candidates)
    choice = pool * heads * n + pool * kv_heads * key_blocks + sum(score * c * heads for c in candidates)
    r = 100
    while r > 0:
        total = choice
        for c in candidates:
            total += heads * (start + -(-r * c // 100) * (step + lost))
        if total < dense:
            break
        r -= 1
    return dense, choice, r
""",
    ),
    right(
        "17.6",
        "numpy",
        source="""
import numpy as np

def predict(candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score):
    c = np.array(candidates, dtype=np.int64)
    dense = int(heads * (start * c.size + step * c.sum()))
    choice = int(pool * (heads * c.size + kv_heads * key_blocks) + score * heads * c.sum())
    r = np.arange(1, 101)
    chosen = -((-r[:, None] * c[None, :]) // 100)
    cost = choice + heads * (start * c.size + (step + lost) * chosen.sum(1))
    good = np.flatnonzero(cost < dense)
    return dense, choice, int(r[good[-1]]) if good.size else 0
""",
    ),
]
