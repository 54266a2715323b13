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

MEAN = "rows.mean(0)"
WHOLE = "(q_begin + block <= len_q) & (k_begin + block <= len_kv)"
COUNT = "torch.maximum((n * share + parts - 1) // parts, kept.sum(1))"
TARGET = "head * k_blocks + k_first.long()[seq] + columns"
CHOSEN = "[(percent * n + 99) // 100 for n in candidates]"
ENTRY = "    for entry in range(begin, end):\n"
OPENING = """def choose(scores, candidates, always, share, parts):
    H, R, W = scores.shape
"""
CLOSING = """    starts = torch.zeros(H * R + 1, dtype=torch.int32)
    starts[1:] = chosen.sum(2).flatten().cumsum(0)
    columns = torch.full((H * R * W,), -1, dtype=torch.int32)
    found = chosen.nonzero()[:, 2]
    columns[: len(found)] = found.int()
    return starts, columns
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
    wrong("17.1", "1 / sqrt(D) as well", ("b) * scale", "b) * scale / q.shape[2] ** 0.5")),
    wrong(
        "17.1",
        "8 numbers per head",
        ('torch.einsum("ihd,jhd->hij", a, b)', 'torch.einsum("ihd,jhd->hij", a[..., :8], b[..., :8])'),
    ),
    wrong("17.1", "blocks of 16", (".split(block)", ".split(16)")),
    wrong("17.1", "two heads per key head", ("group = q.shape[1], q.shape[1] // k.shape[1]", "group = q.shape[1], 2")),
    wrong(
        "17.1",
        "an empty sequence has a block",
        ("for rows in x[begin:end].split(block) if len(rows)]", "for rows in x[begin:end].split(block)]"),
    ),
    wrong("17.1", "-1e30 for no block", ('float("-inf"))', "-1e30)")),
    wrong("17.1", "NaN for no block", ('float("-inf"))', 'float("nan"))')),
    wrong("17.1", "one row too many per sequence", ("x[begin:end].split", "x[begin : end + 1].split")),
    wrong("17.1", "the last row of a tail left out", (MEAN, "(rows[:-1] if 1 < len(rows) < block else rows).mean(0)")),
    wrong("17.1", "the middle of a block", (MEAN, "rows.median(0).values")),
    wrong("17.1", "unit means", (MEAN, "torch.nn.functional.normalize(rows.mean(0), dim=-1)")),
    wrong(
        "17.1",
        "the mean of heads of a group",
        (
            "b = b.repeat_interleave(group, 1)",
            "a = a.unflatten(1, (-1, group)).mean(2).repeat_interleave(group, 1); b = b.repeat_interleave(group, 1)",
        ),
    ),
    wrong("17.1", "the first key blocks are the last", ("a, b) * scale", "a, b.flip(0)) * scale")),
    wrong(
        "17.1",
        "running sums: a neighbour's NaN stays in them",
        source="""
def block_scores(q, k, q_offsets, k_offsets, scale, block):
    heads, group = q.shape[1], q.shape[1] // k.shape[1]

    def pooled(x, offsets):
        run = torch.cat([x.new_zeros(1, *x.shape[1:]), x[: int(offsets[-1])].cumsum(0)])
        bounds, found = offsets.tolist(), []
        for begin, end in zip(bounds, bounds[1:]):
            edges = torch.tensor([*range(begin, end, block), end])
            found.append(run[edges].diff(dim=0) / edges.diff()[:, None, None])
        return found

    queries, keys = pooled(q, q_offsets), pooled(k, k_offsets)
    out = torch.full((heads, sum(map(len, queries)), max(map(len, keys))), float("-inf"))
    row = 0
    for a, b in zip(queries, keys):
        b = b.repeat_interleave(group, 1)
        out[:, row : row + len(a), : len(b)] = torch.einsum("ihd,jhd->hij", a, b) * scale
        row += len(a)
    return out
""",
    ),
    right(
        "17.1",
        "blocks filled up with zeros, one product for all",
        source='''
def filled(x, offsets, block):
    """[blocks, H, D] means, and the sequence of each block and its number in it."""
    lengths = offsets.diff().tolist()
    count = [(n + block - 1) // block for n in lengths]
    room = x.new_zeros(sum(count) * block, *x.shape[1:])
    size = torch.zeros(sum(count))
    at, first = 0, offsets.tolist()
    for n, c, begin in zip(lengths, count, first):
        room[at * block : at * block + n] = x[begin : begin + n]
        for b in range(c):
            size[at + b] = min(block, n - b * block)
        at += c
    seq = [s for s, c in enumerate(count) for _ in range(c)]
    place = [b for c in count for b in range(c)]
    return room.unflatten(0, (-1, block)).sum(1) / size[:, None, None], torch.tensor(seq), torch.tensor(place)


def block_scores(q, k, q_offsets, k_offsets, scale, block):
    a, seq_a, _ = filled(q, q_offsets, block)
    b, seq_b, place = filled(k, k_offsets, block)
    of_head = torch.arange(q.shape[1]).div(q.shape[1] // k.shape[1], rounding_mode="floor")
    out = torch.full((q.shape[1], len(a), int(place.max()) + 1), float("-inf"))
    for h in range(q.shape[1]):
        all_pairs = a[:, h] @ b[:, of_head[h]].mT * scale
        rows, cols = (seq_a[:, None] == seq_b[None, :]).nonzero(as_tuple=True)
        out[h, rows, place[cols]] = all_pairs[rows, cols]
    return out
''',
    ),
    right(
        "17.1",
        "numpy's reduceat",
        source="""
import numpy as np


def cut(offsets, block):
    edges, owners = [], []
    for s in range(len(offsets) - 1):
        for start in range(int(offsets[s]), int(offsets[s + 1]), block):
            edges.append((start, min(start + block, int(offsets[s + 1]))))
            owners.append(s)
    return edges, owners


def means(x, edges):
    rows = x.numpy().astype(np.float64)
    starts = np.array([e[0] for e in edges])
    total = np.add.reduceat(rows[: edges[-1][1]], starts, axis=0)
    return total / np.array([e[1] - e[0] for e in edges])[:, None, None]


def block_scores(q, k, q_offsets, k_offsets, scale, block):
    (qe, qs), (ke, ks) = cut(q_offsets, block), cut(k_offsets, block)
    a, b = means(q, qe), means(k, ke)
    H = q.shape[1]
    width = max(ks.count(s) for s in set(ks))
    out = np.full((H, len(qe), width), -np.inf, dtype=np.float32)
    for r, s in enumerate(qs):
        mine = [n for n, owner in enumerate(ks) if owner == s]
        for h in range(H):
            for c, n in enumerate(mine):
                out[h, r, c] = scale * float(a[r, h] @ b[n, h * k.shape[1] // H])
    return torch.from_numpy(out)
""",
    ),
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
    wrong(
        "17.2",
        "all that reach the last score of the share",
        source=OPENING
        + """    x = torch.where(scores.isnan(), float("inf"), scores).masked_fill(~candidates, float("-inf"))
    kept = always & candidates
    n = candidates.sum(1)
    count = torch.maximum((n * share + parts - 1) // parts, kept.sum(1))
    ranked = x.sort(dim=2, descending=True).values
    least = ranked.gather(2, (count - 1).clamp(min=0)[None, :, None].expand(H, R, 1))
    chosen = (x >= least) & candidates & (count > 0)[:, None] | kept
"""
        + CLOSING,
    ),
    wrong(
        "17.2",
        "half a block counts as none",
        (COUNT, "torch.maximum((2 * n * share + parts - 1) // (2 * parts), kept.sum(1))"),
    ),
    wrong("17.2", "one more than the ratio", (COUNT, "torch.maximum(n * share // parts + 1, kept.sum(1)).minimum(n)")),
    wrong(
        "17.2",
        "the share of what always leaves",
        (COUNT, "((n - kept.sum(1)) * share + parts - 1) // parts + kept.sum(1)"),
    ),
    wrong(
        "17.2", "always counted where it is no candidate", ("parts, kept.sum(1))", "parts, always.sum(1)).minimum(n)")
    ),
    wrong(
        "17.2",
        "starts without the zero",
        (
            "starts = torch.zeros(heads * rows + 1, dtype=torch.int32)\n    starts[1:] = chosen.sum(2).flatten().cumsum(0)",
            "starts = chosen.sum(2).flatten().cumsum(0).int()",
        ),
    ),
    wrong(
        "17.2",
        "empty lists have no start",
        ("    columns = torch.full", "    starts = starts.unique()\n    columns = torch.full"),
    ),
    wrong(
        "17.2",
        "counts for starts",
        ("starts[1:] = chosen.sum(2).flatten().cumsum(0)", "starts[1:] = chosen.sum(2).flatten()"),
    ),
    wrong(
        "17.2",
        "no places behind the last list",
        ("    return starts, columns", "    return starts, columns[: len(found)]"),
    ),
    wrong(
        "17.2",
        "columns over the whole table",
        ("found = chosen.nonzero()[:, 2]", "found = chosen.flatten().nonzero()[:, 0]"),
    ),
    wrong(
        "17.2",
        "falling lists",
        ("found = chosen.nonzero()[:, 2]", "found = width - 1 - chosen.flip(2).nonzero()[:, 2]"),
    ),
    wrong(
        "17.2",
        "a block of always twice",
        ("    starts = torch.zeros(heads", "    twice = (chosen & kept).flatten(0, 1)\n    starts = torch.zeros(heads"),
        ("chosen.sum(2).flatten().cumsum(0)", "(chosen.sum(2).flatten() + twice.sum(1)).cumsum(0)"),
        (
            "found = chosen.nonzero()[:, 2]",
            "found = chosen.flatten(0, 1).nonzero().repeat_interleave(1 + twice[chosen.flatten(0, 1)].long(), 0)[: heads * rows * width, 1]",
        ),
    ),
    wrong(
        "17.2",
        "NaN is the largest finite score",
        (
            'torch.where(scores.isnan(), float("inf"), scores)',
            "torch.where(scores.isnan(), torch.finfo(scores.dtype).max, scores)",
        ),
    ),
    wrong(
        "17.2",
        "infinity is the largest finite score",
        ('torch.where(scores.isnan(), float("inf"), scores)', 'scores.nan_to_num(nan=float("inf"))'),
    ),
    wrong(
        "17.2",
        "changes the scores",
        (
            'rank = torch.where(scores.isnan(), float("inf"), scores)',
            'scores[scores.isnan()] = float("inf")\n    rank = scores',
        ),
    ),
    wrong("17.2", "the absolute score", ('float("inf"), scores)', 'float("inf"), scores.abs())')),
    right(
        "17.2",
        "the best again and again",
        source=OPENING
        + """    chosen = torch.zeros(H, R, W, dtype=torch.bool)
    for r in range(R):
        able = candidates[r]
        must = able & always[r]
        total = int(able.sum())
        want = max(-(-total * share // parts), int(must.sum()))
        for h in range(H):
            chosen[h, r] = must
            left = able & ~must
            for _ in range(want - int(must.sum())):
                best = None
                for j in range(W):
                    if left[j]:
                        x = float(scores[h, r, j])
                        x = float("inf") if x != x else x
                        if best is None or x > best[0]:
                            best = (x, j)
                left[best[1]] = False
                chosen[h, r, best[1]] = True
"""
        + CLOSING,
    ),
    right(
        "17.2",
        "ranks by two argsorts, a heap of columns",
        source='''
import heapq
import math

def choose(scores, candidates, always, share, parts):
    """Lists of (tier, -score, column), the smallest first."""
    H, R, W = scores.shape
    lengths, flat = [], []
    for s in scores.flatten(0, 1).split(R):
        for row, able, must in zip(s.tolist(), candidates.tolist(), always.tolist()):
            keys = [(not must[j], -(math.inf if math.isnan(x) else x), j) for j, x in enumerate(row) if able[j]]
            least = sum(1 for key in keys if not key[0])
            count, rest = divmod(len(keys) * share, parts)
            picked = heapq.nsmallest(max(least, count + bool(rest)), keys)
            flat.extend(sorted(key[2] for key in picked))
            lengths.append(len(picked))
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    out = torch.empty(H * R * W, dtype=torch.int32).fill_(-1)
    out[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
    return starts, out
''',
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
    wrong(
        "17.3",
        "lists per query block",
        ("heads * k_blocks + 1, dtype=torch.int64)", "heads * rows + heads * k_blocks + 1, dtype=torch.int64)"),
        ("counts[:-1].cumsum(0)", "counts[: heads * k_blocks].cumsum(0).flip(0)"),
    ),
    wrong(
        "17.3",
        "the last list forgotten",
        ("new_starts[1:] = counts[:-1].cumsum(0)", "new_starts[1:-1] = counts[:-2].cumsum(0)"),
    ),
    wrong("17.3", "the last entry forgotten", ("entries < starts[-1]", "entries < starts[-1] - 1")),
    wrong(
        "17.3",
        "the capacity cut to what is real",
        ("inside[order].int(), new_kinds[order]", "inside[order][: columns.numel() - 1].int(), new_kinds[order]"),
    ),
    wrong("17.3", "the first key block of the next sequence", ("k_first.long()[seq]", "k_first.long()[seq + 1]")),
    wrong("17.3", "query blocks for key blocks", ("k_first.long()[seq]", "q_first.long()[seq]")),
    wrong("17.3", "heads by key blocks of the batch without head", ("head * k_blocks", "head * (k_blocks - 1)")),
    wrong("17.3", "head last", (TARGET, "(k_first.long()[seq] + columns) * heads + head")),
    wrong(
        "17.3",
        "the same number of blocks per sequence",
        (
            "torch.searchsorted(q_first[1:].long(), row, right=True).clamp(max=q_first.numel() - 2)",
            "(row * (q_first.numel() - 1)) // max(rows, 1)",
        ),
    ),
    wrong(
        "17.3",
        "sorted by kind as well",
        ("order = target.argsort(stable=True)", "order = (target * 4 + new_kind(real, kinds)).argsort(stable=True)"),
        (
            "    lists = starts.numel() - 1\n",
            "    new_kind = lambda real, kinds: torch.where(real, kinds, 0).long()\n    lists = starts.numel() - 1\n",
        ),
    ),
    wrong(
        "17.3", "kinds of PARTIAL only", ("torch.where(real, kinds, 0)", "torch.where(real, torch.ones_like(kinds), 0)")
    ),
    wrong(
        "17.3",
        "rubbish clamped into the last list",
        ("torch.where(real, target, heads * k_blocks)", "torch.where(real, target, heads * k_blocks - 1)"),
    ),
    wrong(
        "17.3",
        "starts as int64",
        (
            "new_starts = torch.zeros(heads * k_blocks + 1, dtype=torch.int32)",
            "new_starts = torch.zeros(heads * k_blocks + 1, dtype=torch.int64)",
        ),
    ),
    wrong(
        "17.3",
        "duplicates: each list counted once",
        ("torch.ones_like(target))", "torch.ones_like(target))\n    counts.clamp_(max=1)"),
    ),
    right(
        "17.3",
        "counting sort: a place by pairs",
        source='''
def turn(starts, columns, kinds, q_first, k_first, heads, k_blocks):
    """Each entry's place is the number of entries that come before it."""
    n_rows = q_first[-1].long()
    size = columns.numel()
    e = torch.arange(size)
    lists = starts.numel() - 1
    rows = lists // heads
    here = e < starts[-1]
    begun = (e.view(-1, 1) >= starts[:-1].view(1, -1)).long()
    ended = (e.view(-1, 1) >= starts[1:].view(1, -1)).long()
    index = torch.arange(lists).view(1, -1)
    owner = ((begun - ended) * index).sum(1)
    head = torch.div(owner, rows, rounding_mode="trunc")
    row = owner - head * rows
    before = (row.view(-1, 1) >= q_first.view(1, -1)).sum(1) - 1
    seq = before.clamp(0, q_first.numel() - 2)
    to = head * k_blocks + torch.take(k_first.long(), seq) + columns.long()
    to = torch.where(here, to, torch.full_like(to, heads * k_blocks))
    key = to * size + e
    place = (key.view(1, -1) < key.view(-1, 1)).sum(1)
    out = torch.zeros(size, dtype=torch.int32)
    out[place] = torch.where(here, row - torch.take(q_first.long(), seq), -torch.ones_like(row)).int()
    sort = torch.zeros(size, dtype=torch.int8)
    sort[place] = torch.where(here, kinds, torch.zeros_like(kinds)).to(torch.int8)
    bounds = torch.arange(heads * k_blocks + 1)
    return (to.view(1, -1) < bounds.view(-1, 1)).sum(1).to(torch.int32), out, sort
''',
    ),
    right(
        "17.3",
        "kind and row packed into the sorted key",
        source="""
def turn(starts, columns, kinds, q_first, k_first, heads, k_blocks):
    lists = len(starts) - 1
    rows = max(lists // heads, 1)
    room = len(columns)
    position = torch.arange(room)
    owner = torch.bucketize(position, starts[1:].long(), right=True)
    garbage = position >= starts[-1:].long()
    head, row = owner.div(rows, rounding_mode="floor"), owner.remainder(rows)
    seq = torch.bucketize(row, q_first[1:].long(), right=True).clamp_(max=len(q_first) - 2)
    inside = row - q_first.long().index_select(0, seq)
    new_list = head.mul(k_blocks).add(k_first.long().index_select(0, seq)).add(columns.long())
    packed = (new_list * (rows + 1) + inside) * 4 + kinds
    nobody = heads * k_blocks * (rows + 1) * 4
    packed = packed.masked_fill(garbage, nobody).sort()[0]
    kind, pair = packed % 4, packed // 4
    empty = packed >= nobody
    firsts = torch.arange(heads * k_blocks + 1) * (rows + 1) * 4
    return (
        torch.searchsorted(packed, firsts).to(torch.int32),
        torch.where(empty, -1, pair % (rows + 1)).to(torch.int32),
        torch.where(empty, 0, kind).to(torch.int8),
    )
""",
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
    wrong("17.4", "the last entry left out", (ENTRY, ENTRY.replace("end)", "end - 1)"))),
    wrong("17.4", "the first entry left out", (ENTRY, ENTRY.replace("begin,", "begin + 1,"))),
    wrong("17.4", "one entry too many", (ENTRY, ENTRY.replace("end)", "end + 1)"))),
    wrong(
        "17.4",
        "only the last entry is masked",
        (MASK, MASK.replace("tl.load(kinds_ptr + entry) == 1", "entry == end - 1")),
    ),
    right("17.4", "the diagonal hides what lies behind the keys", (MASK, MASK.replace(" & (j < len_kv)[None, :]", ""))),
    wrong("17.4", "one key per row is enough to be FULL", (MASK, MASK.replace("== 1", "== 1 + (BM > BN)"))),
    wrong("17.4", "the tile's number for its row", ("i = row0 + tl.arange(0, BM)", "i = tile * BM + tl.arange(0, BM)")),
    wrong("17.4", "blocks of BM keys", ("tl.load(columns_ptr + entry) * BN", "tl.load(columns_ptr + entry) * BM")),
    wrong("17.4", "two heads per key head", ("head // GROUP)[:, None]", "head // 2)[:, None]")),
    wrong(
        "17.4",
        "16 numbers per row",
        (
            's = tl.dot(q, tl.trans(k), input_precision="ieee") * scale',
            's = tl.dot(tl.where((d < 16)[None, :], q, 0.0), tl.trans(k), input_precision="ieee") * scale',
        ),
    ),
    wrong(
        "17.4", "1 / sqrt(D)", ('input_precision="ieee") * scale', 'input_precision="ieee") * (1.0 / tl.sqrt(D * 1.0))')
    ),
    wrong("17.4", "a scale of a quarter", ('input_precision="ieee") * scale', 'input_precision="ieee") * 0.25')),
    wrong(
        "17.4",
        "lse heads first",
        (
            "tl.store(lse_ptr + at_rows, lse",
            "tl.store(lse_ptr + head * tl.load(q_offsets_ptr + seq + 1) + q_begin + i, lse",
        ),
    ),
    wrong(
        "17.4",
        "values of the query's head",
        (
            "v = tl.load(v_ptr + at,",
            "v = tl.load(v_ptr + ((k_begin + j) * (H // GROUP) + head % (H // GROUP))[:, None] * D + d[None, :],",
        ),
    ),
    wrong(
        "17.4",
        "keys of the queries' sequence begin",
        (
            "k_begin = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)",
            "k_begin = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq)",
        ),
    ),
    wrong("17.4", "the lengths exchanged", ("<= len_kv - len_q) & (j < len_kv)", "<= len_kv - len_q) & (j < len_q)")),
    wrong("17.4", "nothing for rows that see little", ("    some = l > 0\n", "    some = l > 1\n")),
    wrong(
        "17.4",
        "the list of the next tile",
        ("starts_ptr + head * T + tile)", "starts_ptr + head * T + tile + 1)"),
        ("head * T + tile + 1)\n    for", "head * T + tile + 2)\n    for"),
    ),
    right(
        "17.4",
        "FULL blocks first, then PARTIAL ones, in a helper",
        source='''
@triton.jit
def one_block(q, k_ptr, v_ptr, at, real, hide, m, l, acc, scale):
    """Online softmax over one block of keys; `hide` is added to the scores."""
    k = tl.load(k_ptr + at, mask=real, other=0.0)
    v = tl.load(v_ptr + at, mask=real, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + hide
    top = tl.maximum(tl.max(s, 1), m)
    base = tl.maximum(top, -1e38)
    p = tl.exp(s - base[:, None])
    shrink = tl.exp(tl.maximum(m, -3e38) - base)
    l = l * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
    return top, l, acc


@triton.jit
def sparse_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr,
    starts_ptr, columns_ptr, kinds_ptr, out_ptr, lse_ptr, scale, T, H,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Two walks over the list."""
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    row0 = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, k_begin = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)
    len_q = tl.load(q_offsets_ptr + seq + 1) - q_begin
    len_kv = tl.load(k_offsets_ptr + seq + 1) - k_begin
    kv_heads = H // GROUP
    d = tl.arange(0, D)
    i = row0 + tl.arange(0, BM)
    is_row = i < len_q
    rows = (q_begin + i) * H + head
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=is_row[:, None], other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    mine = starts_ptr + head * T + tile
    first, last = tl.load(mine), tl.load(mine + 1)
    last_key = i + len_kv - len_q
    for kind in tl.static_range(2, 0, -1):
        for n in range(first, last):
            if tl.load(kinds_ptr + n) == kind:
                j = tl.load(columns_ptr + n) * BN + tl.arange(0, BN)
                at = (k_begin + j)[:, None] * (kv_heads * D) + (head // GROUP) * D + d[None, :]
                if kind == 1:
                    hide = tl.where((j[None, :] <= last_key[:, None]) & (j < len_kv)[None, :], 0.0, float("-inf"))
                    m, l, acc = one_block(q, k_ptr, v_ptr, at, (j < len_kv)[:, None], hide, m, l, acc, scale)
                else:
                    m, l, acc = one_block(q, k_ptr, v_ptr, at, (j < len_kv)[:, None], 0.0, m, l, acc, scale)
    empty = l == 0.0
    safe = tl.where(empty, 1.0, l)
    tl.store(lse_ptr + rows, tl.where(empty, float("-inf"), m + tl.log(safe)), mask=is_row)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], acc / safe[:, None], mask=is_row[:, None])
''',
    ),
    right(
        "17.4",
        "log-sum-exp carried, no sum",
        source='''
@triton.jit
def sparse_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr,
    starts_ptr, columns_ptr, kinds_ptr, out_ptr, lse_ptr, scale, T, H,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The output stays normalised: each block is mixed in by its share of the sum."""
    tile, head = tl.program_id(0), tl.program_id(1)
    record = tiles_ptr + tile * 2
    seq, row0 = tl.load(record), tl.load(record + 1)
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    row = q_begin + row0 + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + (row[:, None] * H + head) * D + d[None, :], mask=row[:, None] < q_end, other=0.0)
    lse = tl.full((BM,), float("-inf"), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    begin, end = tl.load(starts_ptr + head * T + tile), tl.load(starts_ptr + head * T + tile + 1)
    for entry in range(begin, end):
        key = k_begin + tl.load(columns_ptr + entry) * BN + tl.arange(0, BN)
        at = (key[:, None] * (H // GROUP) + head // GROUP) * D + d[None, :]
        k = tl.load(k_ptr + at, mask=key[:, None] < k_end, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale
        if tl.load(kinds_ptr + entry) != 2:
            s = tl.where((key[None, :] < k_end) & (key[None, :] - k_end <= row[:, None] - q_end), s, float("-inf"))
        top = tl.max(s, 1)
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp(s - base[:, None])
        total = tl.sum(p, 1)
        new = base + tl.log(total)
        high = tl.maximum(new, lse)
        high = tl.where(high == float("-inf"), 0.0, high)
        a, b = tl.exp(lse - high), tl.exp(new - high)
        both = tl.maximum(a + b, 1e-30)
        v = tl.load(v_ptr + at, mask=key[:, None] < k_end, other=0.0)
        here = tl.dot(p, v, input_precision="ieee") / tl.maximum(total, 1e-30)[:, None]
        out = (out * a[:, None] + here * b[:, None]) / both[:, None]
        lse = high + tl.log(a + b)
    tl.store(out_ptr + (row[:, None] * H + head) * D + d[None, :], out, mask=row[:, None] < q_end)
    tl.store(lse_ptr + row * H + head, lse, mask=row < q_end)
''',
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
    wrong("17.5", "blocks of 16", ("q_begin, k_begin = i * block, j * block", "q_begin, k_begin = i * 16, j * 16")),
    wrong("17.5", "the bounds' lower side inclusive only", ("(k_last - q_begin <= hi)", "(k_last - q_begin < hi)")),
    wrong("17.5", "the lower bound exclusive", ("(k_begin - q_last >= lo)", "(k_begin - q_last > lo)")),
    wrong(
        "17.5",
        "query minus key",
        ("(k_begin - q_last >= lo) & (k_last - q_begin <= hi)", "(q_begin - k_last >= lo) & (q_last - k_begin <= hi)"),
    ),
    wrong(
        "17.5",
        "the first rows decide",
        (
            "(k_begin - q_last >= lo) & (k_last - q_begin <= hi)",
            "(k_begin - q_begin >= lo) & (k_begin - q_begin <= hi)",
        ),
    ),
    wrong("17.5", "a row past the block", ("(k_last - q_begin <= hi)", "(k_last + 1 - q_begin <= hi)")),
    wrong("17.5", "PARTIAL and FULL exchanged", ("torch.where(full, 2, 1)", "torch.where(full, 1, 2)")),
    wrong("17.5", "bool plus one, as int64", ("torch.where(full, 2, 1).to(torch.int8)", "1 + full.long()")),
    wrong("17.5", "both in one sum", (WHOLE, "(q_begin + k_begin + 2 * block <= len_q + len_kv)")),
    wrong(
        "17.5", "the longer one", (WHOLE, "(torch.maximum(q_begin, k_begin) + block <= torch.maximum(len_q, len_kv))")
    ),
    wrong(
        "17.5", "the first entry's lengths", (WHOLE, "(q_begin + block <= len_q[0]) & (k_begin + block <= len_kv[0])")
    ),
    wrong("17.5", "cut only where a sequence is short", (WHOLE, "(len_q >= block) & (len_kv >= block)")),
    right(
        "17.5",
        "missing rows counted",
        (WHOLE, "((q_begin + block - len_q).clamp(min=0) + (k_begin + block - len_kv).clamp(min=0)) == 0"),
    ),
    right(
        "17.5",
        "a Python loop over entries",
        source="""
def pair_kinds(i, j, len_q, len_kv, lo, hi, block):
    found = []
    for a, b, n, m, least, most in zip(*(x.tolist() for x in (i, j, len_q, len_kv, lo, hi))):
        rows, keys = range(a * block, (a + 1) * block), range(b * block, (b + 1) * block)
        inside = rows.stop <= n and keys.stop <= m
        band = keys.start - (rows.stop - 1) >= least and (keys.stop - 1) - rows.start <= most
        found.append(2 if inside and band else 1)
    return torch.tensor(found, dtype=torch.int8)
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
    wrong("17.6", "one more than the whole part", (CHOSEN, "[percent * n // 100 + 1 for n in candidates]")),
    wrong("17.6", "one more, none of none", (CHOSEN, "[(percent * n // 100 + 1) if n else 0 for n in candidates]")),
    wrong("17.6", "a share, not percent", (CHOSEN, "[percent * n for n in candidates]")),
    wrong("17.6", "as a fraction", ("max(paying, default=0)", "max(paying, default=0) / 100")),
    wrong("17.6", "up to 50 percent", ("range(1, 101)", "range(1, 51)")),
    wrong("17.6", "in steps of five", ("range(1, 101)", "range(5, 101, 5)")),
    wrong("17.6", "the key blocks twice", ("kv_heads * key_blocks", "2 * kv_heads * key_blocks")),
    wrong("17.6", "key blocks by their candidates", ("kv_heads * key_blocks", "kv_heads * max(candidates, default=0)")),
    wrong("17.6", "tiles by key blocks", ("heads * len(candidates) +", "heads * key_blocks +")),
    wrong("17.6", "sparse pays no step", ("(step + lost) * c", "lost * c")),
    wrong("17.6", "a dense tile loses as well", ("start + step * n for n", "start + (step + lost) * n for n")),
    wrong(
        "17.6",
        "choosing only for what is chosen",
        (
            "        return choice + heads",
            "        return pool * (heads * len(candidates) + kv_heads * key_blocks) + score * heads * sum(chosen) + heads",
        ),
    ),
    wrong(
        "17.6",
        "start once per head",
        (
            "dense = heads * sum(start + step * n for n in candidates)",
            "dense = heads * (start + step * sum(candidates))",
        ),
    ),
    wrong(
        "17.6",
        "solved for r without rounding",
        (
            "    return dense, choice, max(paying, default=0)",
            "    room = dense - choice - heads * start * len(candidates)\n    r = int(100 * room / max(1, heads * (step + lost) * sum(candidates)))\n    return dense, choice, max(0, min(r, 100))",
        ),
    ),
    right(
        "17.6",
        "counted by multiplicity, a generator",
        source='''
from collections import Counter
from itertools import takewhile

def predict(candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score):
    """Equal tiles together."""
    tiles = Counter(candidates)
    dense = heads * sum(times * (start + n * step) for n, times in tiles.items())
    pooled = heads * len(candidates) + kv_heads * key_blocks
    choice = pooled * pool + heads * score * sum(n * times for n, times in tiles.items())
    cost = lambda r: heads * sum(t * (start + (step + lost) * ((r * n) // 100 + ((r * n) % 100 > 0))) for n, t in tiles.items())
    return dense, choice, sum(1 for _ in takewhile(lambda r: cost(r) + choice < dense, range(1, 101)))
''',
    ),
    right(
        "17.6",
        "fractions and bisect",
        source="""
import bisect
import math
from fractions import Fraction

def predict(candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score):
    dense, choice = 0, key_blocks * pool * kv_heads
    for n in candidates:
        dense += (start + step * n) * heads
        choice += (pool + score * n) * heads
    def too_dear(r):
        total = choice
        for n in candidates:
            total += heads * (start + math.ceil(Fraction(r * n, 100)) * (step + lost))
        return total >= dense
    return dense, choice, bisect.bisect_left(range(1, 101), True, key=too_dear)
""",
    ),
]
