"""Answers to chapter 07's exercises."""

from tests.course.answers import right, wrong

ROWS = """
def packed_rows(first, rows, len_q, group, kv_head):
    r = torch.arange(first, first + rows)
    exists = EXISTS
    position, head = POSITION, HEAD
    return torch.where(exists, position, -1), torch.where(exists, head, -1), exists
"""


def rows(exists="r < len_q * group", position="r // group", head="kv_head * group + r % group"):
    """Return 7.1's source with these parts."""
    return ROWS.replace("EXISTS", exists).replace("POSITION", position).replace("HEAD", head)


K_LOAD = """            k_ptr + (j[None, :] * H_KV + kv_head) * D + d[:, None],
            mask=j[None, :] < k_end,
"""
V_LOAD = """            v_ptr + (j[:, None] * H_KV + kv_head) * D + d[None, :],
            mask=j[:, None] < k_end,
"""
SLOT = "    if (slot >= 0) & (slot + LQ <= ROWS):\n"

TRAFFIC = """
def dq_traffic(way, lengths, block, workers, len_q, heads, dim):
    one = len_q * heads * dim
    some = [n for n in lengths if n > 0]
    if way == "contended":
        adds = sum((n + block - 1) // block for n in some)
        return CONTENDED
    count = len(some) if way == "partials" else WORKERS
    return 0, count * one, MOVED
"""


def traffic(contended="adds, 0, adds * one", workers="min(workers, len(some))", moved="count * one + one"):
    """Return 7.4's source with these parts."""
    return TRAFFIC.replace("CONTENDED", contended).replace("WORKERS", workers).replace("MOVED", moved)


TOTAL = "        total += tl.load(part_ptr + b * N + at).to(tl.float32)\n"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 7.1
    wrong("7.1", "heads before positions", source=rows(position="r % len_q", head="kv_head * group + r // len_q")),
    wrong("7.1", "position and head exchanged", source=rows(position="r % group", head="kv_head * group + r // group")),
    wrong("7.1", "the head of the group", source=rows(head="r % group")),
    wrong("7.1", "heads by stride", source=rows(head="kv_head + r % group")),
    wrong("7.1", "rows without the group", source=rows(exists="r < len_q")),
    wrong("7.1", "one row too many", source=rows(exists="r <= len_q * group")),
    wrong(
        "7.1",
        "the tile counted from 0",
        source=rows().replace("torch.arange(first, first + rows)", "torch.arange(rows)"),
    ),
    wrong(
        "7.1",
        "first in positions",
        source=rows().replace("torch.arange(first, first + rows)", "torch.arange(first * group, first * group + rows)"),
    ),
    wrong("7.1", "-1 in the position only", source=rows().replace("torch.where(exists, head, -1)", "head")),
    wrong("7.1", "0 where nothing is", source=rows().replace("position, -1)", "position, 0)")),
    wrong(
        "7.1",
        "rows that exist only",
        source=rows().replace(
            "torch.where(exists, position, -1), torch.where(exists, head, -1), exists",
            "position[exists], head[exists], exists",
        ),
    ),
    wrong("7.1", "floats", source=rows(position="r / group")),
    wrong("7.1", "exists as integers", source=rows().replace(", -1), exists", ", -1), exists.long()")),
    wrong("7.1", "two heads for good", source=rows(position="r // 2", head="kv_head * 2 + r % 2")),
    right(
        "7.1",
        "lists",
        source="""
def packed_rows(first, rows, len_q, group, kv_head):
    position, head, exists = [], [], []
    for r in range(first, first + rows):
        p, g = divmod(r, group)
        there = p < len_q
        exists.append(there)
        position.append(p if there else -1)
        head.append(group * kv_head + g if there else -1)
    return torch.tensor(position), torch.tensor(head), torch.tensor(exists, dtype=torch.bool)
""",
    ),
    right(
        "7.1",
        "filled tensors",
        source="""
def packed_rows(first: int, rows: int, len_q: int, group: int, kv_head: int):
    left = max(0, min(rows, len_q * group - first))
    position = torch.full((rows,), -1, dtype=torch.int32)
    head = position.clone()
    r = torch.arange(first, first + left, dtype=torch.int32)
    position[:left] = torch.div(r, group, rounding_mode="floor")
    head[:left] = kv_head * group + torch.remainder(r, group)
    return position, head, torch.arange(rows) < left
""",
    ),
    # ------------------------------------------------------------------------------------------ 7.2
    wrong("7.2", "heads in turn", ("kv_head * GROUP + r % GROUP", "kv_head + r % GROUP * H_KV")),
    right(
        "7.2",
        "heads before positions: every row is there once",
        (
            "((q_begin + r // GROUP) * H + kv_head * GROUP + r % GROUP)",
            "((q_begin + r % (q_end - q_begin)) * H + kv_head * GROUP + r // (q_end - q_begin))",
        ),
    ),
    wrong("7.2", "rows without the group", ("exists = r < (q_end - q_begin) * GROUP", "exists = r < q_end - q_begin")),
    wrong("7.2", "rows of the tensor", ("exists = r < (q_end - q_begin) * GROUP", "exists = r < q_end * GROUP")),
    wrong("7.2", "keys with H heads", (K_LOAD, K_LOAD.replace("H_KV", "H")), (V_LOAD, V_LOAD.replace("H_KV", "H"))),
    wrong("7.2", "head 0 of the keys", (K_LOAD, K_LOAD.replace(" + kv_head", ""))),
    wrong(
        "7.2",
        "values of the neighbour",
        (V_LOAD, V_LOAD.replace("            mask=j[:, None] < k_end,\n", "            mask=j[:, None] >= 0,\n")),
    ),
    wrong("7.2", "scores behind the end", ('        s = tl.where(j[None, :] < k_end, s, float("-inf"))\n', "")),
    wrong(
        "7.2",
        "-250 behind the end",
        ('s = tl.where(j[None, :] < k_end, s, float("-inf"))', "s = tl.where(j[None, :] < k_end, s, -250.0)"),
    ),
    wrong(
        "7.2", "maximum from 0", ('m = tl.full((BM,), float("-inf"), tl.float32)', "m = tl.zeros((BM,), tl.float32)")
    ),
    wrong(
        "7.2",
        "no maximum",
        ("        m_new = tl.maximum(m, tl.max(s, 1))\n", "        m_new = tl.zeros((BM,), tl.float32)\n"),
    ),
    wrong("7.2", "one maximum per tile", ("tl.maximum(m, tl.max(s, 1))", "tl.maximum(m, tl.max(tl.max(s, 1), 0))")),
    wrong("7.2", "sum not rescaled", ("l = l * alpha + tl.sum", "l = l + tl.sum")),
    wrong("7.2", "output not rescaled", ("acc * alpha[:, None], input", "acc, input")),
    wrong("7.2", "scale forgotten", ('input_precision="ieee") * scale', 'input_precision="ieee")')),
    wrong("7.2", "0 / 0", ("acc / tl.where(l > 0, l, 1.0)[:, None]", "acc / l[:, None]")),
    wrong("7.2", "the last block of keys", ("range(k_begin, k_end, BN)", "range(k_begin, k_end - BN + 1, BN)")),
    wrong(
        "7.2",
        "keys loaded for each head",
        (
            '        s = tl.dot(q, kt, input_precision="ieee") * scale\n',
            '        for g in range(1, GROUP):\n            v = tl.load(\n                v_ptr + (j[:, None] * H_KV + kv_head) * D + d[None, :], mask=j[:, None] < k_end, other=0.0\n            )\n        s = tl.dot(q, kt, input_precision="ieee") * scale\n',
        ),
    ),
    wrong("7.2", "rows that do not exist stored", ("out, mask=exists[:, None])", "out)")),
    wrong(
        "7.2",
        "bf16 products",
        ('tl.dot(q, kt, input_precision="ieee")', "tl.dot(q.to(tl.bfloat16), kt.to(tl.bfloat16))"),
    ),
    right(
        "7.2",
        "keys by rows, base 2",
        (
            '        s = tl.dot(q, kt, input_precision="ieee") * scale\n',
            '        s = tl.dot(q, kt, input_precision="ieee") * (scale * 1.4426950408889634)\n',
        ),
        ("alpha = tl.exp(m - m_new)", "alpha = tl.math.exp2(m - m_new)"),
        ("p = tl.exp(s - m_new[:, None])", "p = tl.math.exp2(s - m_new[:, None])"),
    ),
    right(
        "7.2",
        "positions and heads apart",
        (
            "at = ((q_begin + r // GROUP) * H + kv_head * GROUP + r % GROUP)[:, None] * D + d[None, :]",
            "position, member = r // GROUP, r - r // GROUP * GROUP\n    row = (q_begin + position) * (H_KV * GROUP) + GROUP * kv_head + member\n    at = row[:, None] * D + d[None, :]",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 7.3
    wrong("7.3", "negative slots written", (SLOT, "    if slot + LQ <= ROWS:\n")),
    wrong("7.3", "slots too far behind written", (SLOT, "    if slot >= 0:\n")),
    wrong("7.3", "a slot partly inside", (SLOT, "    if (slot >= 0) & (slot < ROWS):\n")),
    wrong(
        "7.3",
        "rows masked one by one",
        (SLOT, "    if slot > -LQ:\n"),
        (
            "d[None, :], out, mask=mine)",
            "d[None, :], out, mask=mine & (slot + i[:, None] >= 0) & (slot + i[:, None] < ROWS))",
        ),
    ),
    wrong("7.3", "the last slot not written", ("slot + LQ <= ROWS", "slot + LQ < ROWS")),
    wrong("7.3", "slot 0 not written", ("(slot >= 0)", "(slot > 0)")),
    wrong("7.3", "slots in steps of LQ", ("((slot + i[:, None]) * H + head)", "((slot * LQ + i[:, None]) * H + head)")),
    wrong(
        "7.3",
        "sequence b's own query",
        ("q_ptr + (i[:, None] * H + head)", "q_ptr + ((b * LQ + i[:, None]) * H + head)"),
    ),
    wrong(
        "7.3",
        "answers one behind the other",
        ("((slot + i[:, None]) * H + head)", "((b * LQ + i[:, None]) * H + head)"),
    ),
    wrong("7.3", "all BL rows written", ("d[None, :], out, mask=mine)", "d[None, :], out)")),
    wrong("7.3", "nothing for no keys", (SLOT, "    if (slot >= 0) & (slot + LQ <= ROWS) & (begin < end):\n")),
    wrong("7.3", "NaN for no keys", ("acc / tl.where(l > 0, l, 1.0)[:, None]", "acc / l[:, None]")),
    wrong("7.3", "scores behind the end", ('            s = tl.where(j[None, :] < end, s, float("-inf"))\n', "")),
    wrong(
        "7.3", "maximum from 0", ('m = tl.full((BL,), float("-inf"), tl.float32)', "m = tl.zeros((BL,), tl.float32)")
    ),
    wrong("7.3", "sum not rescaled", ("l = l * alpha + tl.sum", "l = l + tl.sum")),
    wrong("7.3", "output not rescaled", ("acc * alpha[:, None], input", "acc, input")),
    wrong("7.3", "keys of the neighbour", ("range(begin, end, BN)", "range(begin // BN * BN, end, BN)")),
    wrong("7.3", "head-major", ("v_ptr + (j[:, None] * H + head)", "v_ptr + (head * H + j[:, None])")),
    wrong("7.3", "one query for all rows", ("q_ptr + (i[:, None] * H + head)", "q_ptr + (i[:, None] * 0 + head)")),
    right(
        "7.3",
        "a return at the top",
        (SLOT, "    if slot < 0:\n        return\n    if slot > ROWS - LQ:\n        return\n    if True:\n"),
    ),
    right(
        "7.3",
        "scale at the query",
        ("mask=mine, other=0.0)\n        m =", "mask=mine, other=0.0) * scale\n        m ="),
        ('input_precision="ieee") * scale', 'input_precision="ieee")'),
    ),
    # ------------------------------------------------------------------------------------------ 7.4
    wrong("7.4", "one add per sequence", source=traffic().replace("(n + block - 1) // block", "1")),
    wrong("7.4", "tiles rounded down", source=traffic().replace("(n + block - 1) // block", "n // block")),
    wrong(
        "7.4",
        "tiles of all keys",
        source=traffic().replace("sum((n + block - 1) // block for n in some)", "-(-sum(some) // block)"),
    ),
    wrong("7.4", "adds of all elements", source=traffic(contended="adds * one, 0, adds * one")),
    wrong("7.4", "adds per head", source=traffic(contended="adds * heads, 0, adds * one")),
    wrong("7.4", "dQ written besides", source=traffic(contended="adds, 0, adds * one + one")),
    wrong("7.4", "a copy of dQ", source=traffic(contended="adds, one, adds * one")),
    wrong("7.4", "empty sequences leave partials", source=traffic().replace("if n > 0]", "]")),
    wrong("7.4", "every worker leaves a partial", source=traffic(workers="workers")),
    wrong("7.4", "min of workers and all sequences", source=traffic(workers="min(workers, len(lengths))")),
    wrong("7.4", "the pass forgotten", source=traffic(moved="count * one")),
    wrong("7.4", "partials read as well", source=traffic(moved="2 * count * one + one")),
    wrong("7.4", "no pass without partials", source=traffic(moved="count * one + one if count else 0")),
    wrong("7.4", "partials added by atomics", source=traffic().replace("return 0, count", "return count, count")),
    wrong("7.4", "heads forgotten", source=traffic().replace("len_q * heads * dim", "len_q * dim")),
    right("7.4", "one formula each", source=traffic()),
    right(
        "7.4",
        "counted",
        source='''
def dq_traffic(way: str, lengths: list, block: int, workers: int, len_q: int, heads: int, dim: int):
    """Walks."""
    size = len_q * heads * dim
    adds, leaves = 0, set()
    for b, n in enumerate([n for n in lengths if n]):
        for first in range(0, n, block):
            adds += 1
        leaves.add(b if way == "partials" else b % workers)
    if way == "contended":
        return adds, 0, adds * size
    return 0, len(leaves) * size, (len(leaves) + 1) * size
''',
    ),
    # ------------------------------------------------------------------------------------------ 7.5
    wrong(
        "7.5",
        "total in fp16",
        ("tl.zeros((BLOCK,), tl.float32)", "tl.zeros((BLOCK,), tl.float16)"),
        (TOTAL, "        total = (total + tl.load(part_ptr + b * N + at)).to(tl.float16)\n"),
        ("tl.store(dq_ptr + at, total)", "tl.store(dq_ptr + at, total.to(tl.float32))"),
    ),
    wrong(
        "7.5",
        "rounded each time",
        (
            TOTAL,
            "        total = (total + tl.load(part_ptr + b * N + at).to(tl.float32)).to(tl.bfloat16).to(tl.float32)\n",
        ),
    ),
    wrong(
        "7.5",
        "added in bf16, kept in fp32",
        (TOTAL, "        total = (total.to(tl.bfloat16) + tl.load(part_ptr + b * N + at)).to(tl.float32)\n"),
    ),
    wrong(
        "7.5",
        "rounded at the end",
        ("tl.store(dq_ptr + at, total)", "tl.store(dq_ptr + at, total.to(tl.bfloat16).to(tl.float32))"),
    ),
    wrong("7.5", "one part left out", ("range(parts)", "range(1, parts)")),
    wrong("7.5", "the last left out", ("range(parts)", "range(parts - 1)")),
    wrong(
        "7.5",
        "each part twice, halved",
        (TOTAL, TOTAL + "        total += tl.load(part_ptr + b * N + at).to(tl.float32)\n"),
        ("tl.store(dq_ptr + at, total)", "tl.store(dq_ptr + at, total * 0.5)"),
    ),
    right(
        "7.5",
        "atomics of one program: the order is fixed",
        ("    total = tl.zeros((BLOCK,), tl.float32)\n", "    tl.store(dq_ptr + at, tl.zeros((BLOCK,), tl.float32))\n"),
        (TOTAL, "        tl.atomic_add(dq_ptr + at, tl.load(part_ptr + b * N + at).to(tl.float32))\n"),
        ("    tl.store(dq_ptr + at, total)", "    pass"),
    ),
    wrong("7.5", "parts by N blocks", ("part_ptr + b * N + at", "part_ptr + b * BLOCK + at")),
    wrong(
        "7.5",
        "a chunk of eight in bf16 first",
        (
            TOTAL,
            "        total += tl.load(part_ptr + b * N + at).to(tl.float32)\n        total = tl.where(b % 8 == 7, total.to(tl.bfloat16).to(tl.float32), total)\n",
        ),
    ),
    wrong("7.5", "the mean", ("tl.store(dq_ptr + at, total)", "tl.store(dq_ptr + at, total / parts)")),
    right(
        "7.5",
        "backwards",
        ("for b in range(parts):", "for n in range(parts):\n        b = parts - 1 - n"),
        (TOTAL, "        total = total + tl.load(part_ptr + b * N + at)\n"),
    ),
    right(
        "7.5",
        "with what was lost",
        (
            "    total = tl.zeros((BLOCK,), tl.float32)\n",
            "    total = tl.zeros((BLOCK,), tl.float32)\n    lost = tl.zeros((BLOCK,), tl.float32)\n",
        ),
        (
            TOTAL,
            "        y = tl.load(part_ptr + b * N + at).to(tl.float32) - lost\n        t = total + y\n        lost = (t - total) - y\n        total = t\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 7.6
    wrong(
        "7.6",
        "atomics into dq",
        (
            "    tl.store(partial_ptr + worker * LQ * D + row, dq, mask=i[:, None] < LQ)\n",
            "    tl.atomic_add(partial_ptr + row, dq, mask=i[:, None] < LQ)\n",
        ),
        ("torch.empty(workers, len_q, dim)", "torch.zeros(workers, len_q, dim)"),
    ),
    wrong(
        "7.6",
        "a partial per sequence",
        ("torch.empty(workers, len_q, dim)", "torch.empty(len(k_offsets) - 1, len_q, dim)"),
        ("walk_kernel[(workers,)]", "walk_kernel[(len(k_offsets) - 1,)]"),
        ("add_kernel[(len_q,)](partials, dq, workers,", "add_kernel[(len_q,)](partials, dq, len(k_offsets) - 1,"),
    ),
    wrong(
        "7.6",
        "blocks of sequences, the rest forgotten",
        (
            "for b in range(worker, B, workers):",
            "for b in range(worker * (B // workers), (worker + 1) * (B // workers)):",
        ),
    ),
    wrong("7.6", "one worker does all", ("for b in range(worker, B, workers):", "for b in range(0, B):")),
    right(
        "7.6",
        "lse of missing rows minus infinity: their dq goes nowhere",
        (
            "lse = tl.load(lse_ptr + b * LQ + i, mask=i < LQ, other=0.0)",
            'lse = tl.load(lse_ptr + b * LQ + i, mask=i < LQ, other=float("-inf"))',
        ),
    ),
    wrong("7.6", "dout of sequence 0", ("dout_ptr + b * LQ * D + row", "dout_ptr + row")),
    wrong("7.6", "delta by rows", ("delta_ptr + b * LQ + i", "delta_ptr + i")),
    wrong("7.6", "keys of the neighbour", ("j < end, scale)", "j >= 0, scale)")),
    wrong(
        "7.6",
        "keys loaded from the neighbour",
        ("k = tl.load(k_ptr + at, mask=j[:, None] < end, other=0.0)", "k = tl.load(k_ptr + at)"),
    ),
    wrong(
        "7.6",
        "partials of other workers",
        ("partial_ptr + worker * LQ * D + row", "partial_ptr + worker * BL * D + row"),
    ),
    wrong(
        "7.6",
        "a partial left as it was",
        ("    tl.store(partial_ptr + worker", "    if worker < B:\n        tl.store(partial_ptr + worker"),
    ),
    wrong("7.6", "the last partial left out", ("for w in range(workers)", "for w in range(workers - 1)")),
    wrong(
        "7.6",
        "dq starts anew with each sequence",
        (
            "        begin, end = tl.load(k_offsets_ptr + b)",
            "        dq = tl.zeros((BL, D), tl.float32)\n        begin, end = tl.load(k_offsets_ptr + b)",
        ),
    ),
    wrong("7.6", "16 rows stored", ("dq, mask=i[:, None] < LQ)", "dq)")),
    wrong(
        "7.6",
        "summed by torch's matrix products",
        source="""
def resident_dq(q, k, v, dout, lse, delta, k_offsets, scale, workers):
    dq = torch.zeros_like(q)
    o = k_offsets.tolist()
    for b in range(len(o) - 1):
        kk, vv = k[o[b] : o[b + 1]], v[o[b] : o[b + 1]]
        p = torch.exp(q @ kk.T * scale - lse[b][:, None])
        dq += (p * (dout[b] @ vv.T - delta[b][:, None])) @ kk * scale
    return dq
""",
    ),
    right(
        "7.6",
        "sequences in runs",
        ("for b in range(worker, B, workers):", "for b in range(worker * B // workers, (worker + 1) * B // workers):"),
    ),
    right(
        "7.6",
        "empty ones skipped",
        (
            "        dout = tl.load(dout_ptr + b * LQ * D + row, mask=i[:, None] < LQ, other=0.0)\n",
            "        dout = tl.load(dout_ptr + b * LQ * D + row, mask=(i[:, None] < LQ) & (begin < end), other=0.0)\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ tried later
    wrong("7.2", "scale from D", ('input_precision="ieee") * scale', 'input_precision="ieee") * (D ** -0.5)')),
    right(
        "7.2",
        "block pointers and an early return",
        source="""
@triton.jit
def grouped_kernel(q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, H, H_KV, GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    t, c = tl.program_id(0), tl.program_id(1)
    b = tl.load(tiles_ptr + 2 * t)
    r = tl.load(tiles_ptr + 2 * t + 1) + tl.arange(0, BM)
    q0 = tl.load(q_offsets_ptr + b)
    n = (tl.load(q_offsets_ptr + b + 1) - q0) * GROUP
    k0 = tl.load(k_offsets_ptr + b)
    m_len = tl.load(k_offsets_ptr + b + 1) - k0
    ok = (r < n)[:, None]
    row = (q0 + r // GROUP) * H + c * GROUP + r % GROUP
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    if m_len == 0:
        tl.store(out_ptr + at, tl.zeros((BM, D), tl.float32), mask=ok)
        return
    q = tl.load(q_ptr + at, mask=ok, other=0.0) * scale * 1.4426950408889634
    kb = tl.make_block_ptr(k_ptr + (k0 * H_KV + c) * D, (D, m_len), (1, H_KV * D), (0, 0), (D, BN), (0, 1))
    vb = tl.make_block_ptr(v_ptr + (k0 * H_KV + c) * D, (m_len, D), (H_KV * D, 1), (0, 0), (BN, D), (1, 0))
    top = tl.full([BM], value=-float("inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    for start in tl.range(0, m_len, BN):
        s = tl.dot(q, tl.load(kb, boundary_check=(1,), padding_option="zero"), input_precision="ieee")
        s += tl.where(start + tl.arange(0, BN) < m_len, 0.0, -float("inf"))[None, :]
        new = tl.maximum(top, tl.max(s, axis=1))
        p = tl.math.exp2(s - new[:, None])
        shrink = tl.math.exp2(top - new)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p, tl.load(vb, boundary_check=(0,), padding_option="zero"), input_precision="ieee")
        top = new
        kb = tl.advance(kb, (0, BN))
        vb = tl.advance(vb, (BN, 0))
    tl.store(out_ptr + at, acc / total[:, None], mask=ok)
""",
    ),
    wrong("7.3", "scale from D", ('input_precision="ieee") * scale', 'input_precision="ieee") * (D ** -0.5)')),
    right(
        "7.3",
        "return at once, additive mask",
        (
            "    if (slot >= 0) & (slot + LQ <= ROWS):\n",
            "    if slot < 0:\n        return\n    if slot > ROWS - LQ:\n        return\n    if True:\n",
        ),
        ('s = tl.where(j[None, :] < end, s, float("-inf"))', 's += tl.where(j < end, 0.0, float("-inf"))[None, :]'),
    ),
    wrong("7.4", "floats", ("return 0, partials * one, ", "return 0, float(partials * one), ")),
    right(
        "7.5",
        "kahan, backwards",
        (
            "    for b in range(parts):\n        total += tl.load(part_ptr + b * N + at).to(tl.float32)\n",
            "    lost = tl.zeros((BLOCK,), tl.float32)\n    for step in range(parts):\n        x = tl.load(part_ptr + (parts - 1 - step) * N + at).to(tl.float32) - lost\n        new = total + x\n        lost = (new - total) - x\n        total = new\n",
        ),
    ),
    wrong("7.6", "scale from D", ("    len_q, dim = q.shape\n", "    len_q, dim = q.shape\n    scale = dim ** -0.5\n")),
    right(
        "7.6",
        "contiguous shares",
        (
            "for b in range(worker, B, workers):",
            "share = (B + workers - 1) // workers\n    for b in range(worker * share, min((worker + 1) * share, B)):",
        ),
    ),
]
