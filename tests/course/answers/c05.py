"""Answers to chapter 05's exercises."""

from tests.course.answers import right, wrong

TAIL = """        ds = tl.where(keys[None, :] < k_end, ds, 0.0)
        part = tl.dot(ds, k, input_precision="ieee") * scale
        tl.atomic_add(dq_ptr + at_rows, part, mask=mine[:, None])
"""

BLOCK = """
def block_gradients(q, k, v, dout, lse, delta, scale):
    dead = lse == float("-inf")
    q, dout = q.masked_fill(dead[:, None], 0.0), dout.masked_fill(dead[:, None], 0.0)
    p = torch.exp(q @ k.T * scale - lse.masked_fill(dead, float("inf"))[:, None])
    dp = dout @ v.T
    ds = p * (dp - delta.masked_fill(dead, 0.0)[:, None])
    return DQ, DK, DV
"""


def block(dq="ds @ k * scale", dk="ds.T @ q * scale", dv="p.T @ dout"):
    """Return the block's source with these results."""
    return BLOCK.replace("DQ", dq).replace("DK", dk).replace("DV", dv)


MERGE = """
def merge_backward(out1, lse1, out2, lse2, dout, dlse):
    top = torch.maximum(lse1, lse2)
    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    w1, w2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = w1 + w2
    total = torch.where(total == 0, 1.0, total)
    w1, w2 = w1 / total, w2 / total
    up = lambda x: x.transpose(0, 1).unsqueeze(-1)
    difference = ((out1 - out2) * dout).sum(-1).transpose(0, 1)
    return D1, L1, D2, L2
"""


def merge(
    d1="up(w1) * dout", l1="w1 * (dlse + w2 * difference)", d2="up(w2) * dout", l2="w2 * (dlse - w1 * difference)"
):
    """Return the merge's source with these results."""
    return MERGE.replace("D1", d1).replace("L1", l1).replace("D2", d2).replace("L2", l2)


ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 5.1
    wrong("5.1", "product in bf16", ("(out.float() * dout.float())", "(out * dout).float()")),
    wrong(
        "5.1",
        "sum in bf16",
        ("(out.float() * dout.float()).sum(2).T", "(out.float() * dout.float()).to(out.dtype).sum(2).float().T"),
    ),
    wrong("5.1", "dlse added", ("delta - dlse", "delta + dlse")),
    wrong("5.1", "dlse forgotten", ("delta.contiguous() if dlse is None else delta - dlse", "delta.contiguous()")),
    wrong("5.1", "dlse must be there", ("delta.contiguous() if dlse is None else delta - dlse", "delta - dlse")),
    wrong("5.1", "rows before heads", (".sum(2).T", ".sum(2)"), ("delta - dlse", "delta - dlse.T")),
    wrong("5.1", "a view reshaped, not transposed", (".sum(2).T", ".sum(2).reshape(out.shape[1], out.shape[0])")),
    wrong("5.1", "over the heads", (".sum(2).T", ".sum(1).T")),
    wrong("5.1", "the mean", (".sum(2).T", ".mean(2).T")),
    wrong("5.1", "bf16 back", ("    return delta", "    delta = delta.to(out.dtype)\n    return delta")),
    wrong("5.1", "out squared", ("out.float() * dout.float()", "out.float() * out.float()")),
    wrong("5.1", "dout changed in place", ("(out.float() * dout.float())", "dout.mul_(out).float()")),
    wrong("5.1", "dlse times out", ("delta - dlse", "delta * (1 - dlse)")),
    right(
        "5.1",
        "einsum",
        source='def row_constants(out, dout, dlse):\n    delta = torch.einsum("thd,thd->ht", out.to(torch.float32), dout.to(torch.float32))\n    if dlse is not None:\n        delta -= dlse\n    return delta\n',
    ),
    right(
        "5.1",
        "a loop over heads",
        source="""
def row_constants(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    T, H, _ = out.shape
    delta = torch.zeros(H, T)
    for h in range(H):
        delta[h] = torch.linalg.vecdot(out[:, h].float(), dout[:, h].float())
        if dlse is not None:
            delta[h] -= dlse[h]
    return delta
""",
    ),
    # ------------------------------------------------------------------------------------------ 5.2
    wrong(
        "5.2",
        "a softmax of this block",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    s = q @ k.T * scale
    p = torch.exp(s - torch.logsumexp(s, 1, keepdim=True))
    ds = p * (dout @ v.T - delta[:, None])
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout
""",
    ),
    wrong("5.2", "scale in dq only", source=block(dk="ds.T @ q")),
    wrong("5.2", "scale in dk only", source=block(dq="ds @ k")),
    wrong("5.2", "scale twice", source=block(dq="ds @ k * scale * scale")),
    wrong("5.2", "scale in dv", source=block(dv="p.T @ dout * scale")),
    wrong(
        "5.2",
        "delta of this block",
        source=block().replace("delta.masked_fill(dead, 0.0)[:, None]", "(p * dp).sum(1, keepdim=True)"),
    ),
    wrong("5.2", "delta added", source=block().replace("dp - delta", "dp + delta")),
    wrong("5.2", "delta forgotten", source=block().replace("(dp - delta.masked_fill(dead, 0.0)[:, None])", "dp")),
    wrong(
        "5.2",
        "delta of keys",
        source=block().replace(
            "delta.masked_fill(dead, 0.0)[:, None]", "delta.masked_fill(dead, 0.0)[None, : k.shape[0]]"
        ),
    ),
    wrong("5.2", "base 2", source=block().replace("torch.exp(", "torch.exp2(")),
    wrong(
        "5.2",
        "empty rows give NaN",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    p = torch.exp(q @ k.T * scale - lse[:, None])
    ds = p * (dout @ v.T - delta[:, None])
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout
""",
    ),
    wrong(
        "5.2",
        "empty rows: P is 0",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    p = torch.exp(q @ k.T * scale - lse[:, None])
    p = torch.where(lse[:, None] == -torch.inf, 0.0, p)
    ds = p * (dout @ v.T - delta[:, None])
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout
""",
    ),
    wrong(
        "5.2",
        "nan_to_num at the end",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    p = torch.nan_to_num(torch.exp(q @ k.T * scale - lse[:, None]), 0.0, 0.0, 0.0)
    ds = p * (dout @ v.T - delta[:, None])
    return tuple(torch.nan_to_num(x) for x in (ds @ k * scale, ds.T @ q * scale, p.T @ dout))
""",
    ),
    wrong(
        "5.2",
        "empty rows cut off dq",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    alive = lse > -torch.inf
    q, dout, lse, delta = q[alive], dout[alive], lse[alive], delta[alive]
    p = torch.exp(q @ k.T * scale - lse[:, None])
    ds = p * (dout @ v.T - delta[:, None])
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout
""",
    ),
    wrong("5.2", "empty rows by lse < -100", source=block().replace('lse == float("-inf")', "lse < -100.0")),
    wrong(
        "5.2",
        "autograd of everything",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    a, b, c = (x.clone().requires_grad_() for x in (q, k, v))
    p = torch.exp(a @ b.T * scale - lse[:, None])
    loss = ((p @ c) * dout).sum() - (p.sum(1) * delta).sum()
    return torch.autograd.grad(loss, (a, b, c))
""",
    ),
    wrong("5.2", "six products", source=block(dv="(p.T @ dout + 0 * (p.T @ dout))")),
    wrong(
        "5.2",
        "a huge exponential, then divided",
        source=block().replace(
            'torch.exp(q @ k.T * scale - lse.masked_fill(dead, float("inf"))[:, None])',
            "torch.exp(q @ k.T * scale) / torch.exp(lse.masked_fill(dead, float('inf')))[:, None]",
        ),
    ),
    wrong(
        "5.2",
        "inputs cleaned in place",
        source=block().replace(
            "    q, dout = q.masked_fill(dead[:, None], 0.0), dout.masked_fill(dead[:, None], 0.0)\n",
            "    q[dead] = 0.0\n    dout[dead] = 0.0\n",
        ),
    ),
    right("5.2", "masked copies", source=block()),
    right(
        "5.2",
        "scattered rows",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    rows = torch.nonzero(torch.isfinite(lse)).flatten()
    a, g = q[rows], dout[rows]
    p = (torch.einsum("id,jd->ij", a, k).mul_(scale) - lse[rows].unsqueeze(1)).exp()
    ds = p.mul(g.matmul(v.mT) - delta[rows].unsqueeze(1)) * scale
    dq = torch.zeros_like(q)
    dq[rows] = torch.mm(ds, k)
    return dq, torch.mm(ds.t(), a), torch.mm(p.t(), g)
""",
    ),
    # ------------------------------------------------------------------------------------------ 5.3
    wrong(
        "5.3",
        "heads of the group in turn",
        ("head = kv_head * GROUP + member", "head = kv_head + member * (H // GROUP)"),
    ),
    wrong("5.3", "one head of the group", ("for member in range(GROUP)", "for member in range(1)")),
    wrong("5.3", "key head's stride H", ("(keys[:, None] * (H // GROUP) + kv_head)", "(keys[:, None] * H + kv_head)")),
    wrong("5.3", "dk without scale", ("dk * scale, mask", "dk, mask")),
    wrong("5.3", "dv with scale", (", dv, mask", ", dv * scale, mask")),
    wrong("5.3", "scale twice", ("ds = p * (tl.dot", "ds = scale * p * (tl.dot")),
    wrong("5.3", "delta added", ("- delta[:, None])", "+ delta[:, None])")),
    wrong("5.3", "rows of the neighbour", ("mine = rows < q_end", "mine = rows < total_q")),
    right(
        "5.3", "lse filled with 0: dO is 0 there as well", ('mask=mine, other=float("inf"))', "mask=mine, other=0.0)")
    ),
    wrong(
        "5.3", "lse filled with minus infinity", ('mask=mine, other=float("inf"))', 'mask=mine, other=float("-inf"))')
    ),
    wrong(
        "5.3",
        "keys of the neighbour stored",
        (
            "tl.store(dk_ptr + at_keys, dk * scale, mask=keys[:, None] < k_end)",
            "tl.store(dk_ptr + at_keys, dk * scale)",
        ),
    ),
    wrong("5.3", "lse by rows", ("lse_ptr + head * total_q + rows", "lse_ptr + rows * H + head")),
    wrong("5.3", "delta of head 0", ("delta_ptr + head * total_q + rows", "delta_ptr + rows")),
    wrong("5.3", "first not added", ("keys = k_begin + first + tl", "keys = k_begin + tl")),
    wrong("5.3", "whole blocks of queries only", ("range(q_begin, q_end, BM)", "range(q_begin, q_end - BM + 1, BM)")),
    wrong("5.3", "base 2", ("p = tl.exp(", "p = tl.math.exp2(")),
    wrong("5.3", "P not transposed", ("tl.dot(tl.trans(p), do, dv,", "tl.dot(p, do, dv,")),
    wrong(
        "5.3",
        "bf16 products",
        (
            'tl.dot(tl.trans(p), do, dv, input_precision="ieee")',
            "tl.dot(tl.trans(p).to(tl.bfloat16), do.to(tl.bfloat16), dv)",
        ),
    ),
    wrong(
        "5.3",
        "nothing stored without queries",
        (
            "    tl.store(dv_ptr + at_keys, dv, mask=keys[:, None] < k_end)",
            "    if q_end > q_begin:\n        tl.store(dv_ptr + at_keys, dv, mask=keys[:, None] < k_end)",
        ),
    ),
    wrong(
        "5.3",
        "dk overwritten by each head",
        (
            "    for member in range(GROUP):\n",
            "    for member in range(GROUP):\n        dk = tl.zeros((BN, D), tl.float32)\n",
        ),
    ),
    wrong(
        "5.3",
        "masked by a product",
        (
            "q = tl.load(q_ptr + at_rows, mask=mine[:, None], other=0.0)",
            "q = tl.load(q_ptr + at_rows, mask=rows[:, None] < total_q, other=0.0) * mine[:, None]",
        ),
    ),
    wrong(
        "5.3",
        "K and V loaded for each block",
        (
            "            p = tl.exp(",
            "            k = tl.load(k_ptr + at_keys, mask=keys[:, None] < k_end, other=0.0)\n            p = tl.exp(",
        ),
    ),
    right(
        "5.3",
        "transposed scores",
        (
            '            p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])\n            dv = tl.dot(tl.trans(p), do, dv, input_precision="ieee")\n',
            '            pt = tl.exp(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :])\n            dv += tl.dot(pt, do, input_precision="ieee")\n            p = tl.trans(pt)\n',
        ),
    ),
    right(
        "5.3",
        "heads outside by a static loop",
        ("for member in range(GROUP)", "for member in tl.static_range(GROUP)"),
        ("dk * scale, mask", "scale * dk, mask"),
    ),
    # ------------------------------------------------------------------------------------------ 5.4
    wrong("5.4", "masked atomics only", ("mine = rows < q_end", "mine = rows < total_q")),
    wrong(
        "5.4",
        "atomics of the tensor",
        ("part, mask=mine[:, None])", "part, mask=rows[:, None] < total_q)"),
        ("        mine = rows < q_end", "        mine = rows < total_q"),
    ),
    wrong("5.4", "no mask at the atomic", (", part, mask=mine[:, None])", ", part)")),
    wrong(
        "5.4",
        "a plain store",
        (
            "tl.atomic_add(dq_ptr + at_rows, part, mask=mine[:, None])",
            "tl.store(dq_ptr + at_rows, part, mask=mine[:, None])",
        ),
    ),
    wrong(
        "5.4",
        "load, add, store",
        (
            "tl.atomic_add(dq_ptr + at_rows, part, mask=mine[:, None])",
            "tl.store(dq_ptr + at_rows, part + tl.load(dq_ptr + at_rows, mask=mine[:, None]), mask=mine[:, None])",
        ),
    ),
    wrong("5.4", "rows up to the last", ("mine = rows < q_end", "mine = rows < q_end - 1")),
    wrong("5.4", "rows by count", ("mine = rows < q_end", "mine = rows < q_end - q_begin")),
    wrong(
        "5.4",
        "keys not hidden in dq",
        ("        ds = tl.where(keys[None, :] < k_end, ds, 0.0)\n        part", "        part"),
        ("k = tl.load(k_ptr + at_keys, mask=keys[:, None] < k_end, other=0.0)", "k = tl.load(k_ptr + at_keys)"),
    ),
    wrong(
        "5.4",
        "queries without keys",
        (
            "    for start in range(q_begin, q_end, BM):\n",
            "    if k_begin == k_end:\n        q_end = q_begin\n    for start in range(q_begin, q_end, BM):\n",
        ),
        ("mine = rows < q_end", "mine = rows < total_q"),
    ),
    wrong(
        "5.4",
        "dq without scale",
        ('tl.dot(ds, k, input_precision="ieee") * scale', 'tl.dot(ds, k, input_precision="ieee")'),
    ),
    right(
        "5.4", "lse filled with 0: dO is 0 there as well", ('mask=mine, other=float("inf"))', "mask=mine, other=0.0)")
    ),
    right(
        "5.4", "rows counted within the sequence", ("mine = rows < q_end", "mine = rows - q_begin < q_end - q_begin")
    ),
    wrong(
        "5.4",
        "dq's part without a selection: infinity times 0",
        (TAIL, TAIL.replace("        ds = tl.where(keys[None, :] < k_end, ds, 0.0)\n", "")),
    ),
    # ------------------------------------------------------------------------------------------ 5.5
    wrong("5.5", "five stored products", ('"stored": 4', '"stored": 5')),
    wrong("5.5", "six for two kernels", ('"two kernels": 7', '"two kernels": 6')),
    wrong("5.5", "five for two kernels", ('"two kernels": 7', '"two kernels": 5')),
    wrong(
        "5.5", "padded pairs", ("sum(n * m for n, m in zip(len_q, len_kv))", "len(len_q) * max(len_q) * max(len_kv)")
    ),
    wrong("5.5", "pairs of all", ("sum(n * m for n, m in zip(len_q, len_kv))", "sum(len_q) * sum(len_kv)")),
    wrong("5.5", "one FLOP", ("return 2 * D * products", "return D * products")),
    wrong(
        "5.5",
        "lse read by stored",
        ("moved = inputs + 2 * pairs + results", "moved = inputs + 4 * rows + 2 * pairs + results"),
    ),
    wrong("5.5", "P in fp32", ("inputs + 2 * pairs + results", "inputs + 4 * pairs + results")),
    wrong("5.5", "accumulator once", ("2 * 4 * D * rows + results", "4 * D * rows + results")),
    wrong("5.5", "accumulator in place of dq", ("2 * 4 * D * rows + results", "2 * 4 * D * rows + 4 * D * keys")),
    wrong(
        "5.5",
        "two kernels read once",
        ("moved = 2 * (inputs + 4 * rows) + results", "moved = inputs + 4 * rows + results"),
    ),
    wrong(
        "5.5",
        "two kernels write twice",
        ("moved = 2 * (inputs + 4 * rows) + results", "moved = 2 * (inputs + 4 * rows + results)"),
    ),
    wrong("5.5", "lse in bf16", ("2 * keys) + 4 * rows  #", "2 * keys) + 2 * rows  #")),
    wrong("5.5", "out read as well", ("2 * D * (2 * rows + 2 * keys)", "2 * D * (3 * rows + 2 * keys)")),
    wrong("5.5", "tiles rounded down", ("-(-m // BN)", "(m // BN)")),
    wrong(
        "5.5",
        "tiles of all keys together",
        ("sum(n * -(-m // BN) for n, m in zip(len_q, len_kv))", "sum(len_q) * -(-sum(len_kv) // BN)"),
    ),
    wrong("5.5", "additions of every strategy", (' if strategy == "atomics" else 0', "")),
    wrong("5.5", "additions per pair", ("heads * D * tiles if", "heads * D * (pairs // heads) if")),
    wrong("5.5", "heads forgotten in the additions", ("heads * D * tiles if", "D * tiles if")),
    right(
        "5.5",
        "loops",
        source="""
def cost(strategy, len_q, len_kv, heads, D, BN):
    flops = size = adds = 0
    for nq, nk in zip(len_q, len_kv):
        for _ in range(heads):
            flops += 2 * D * nq * nk * (4 if strategy == "stored" else 5 if strategy == "atomics" else 7)
            row, key = 2 * D * nq, 2 * D * nk
            read = row + row + key + key + 4 * nq
            write = row + key + key
            if strategy == "stored":
                size += read + write + 2 * nq * nk
            if strategy == "atomics":
                size += read + 4 * nq + write + 4 * D * nq + 4 * D * nq
                for k in range(0, nk, BN):
                    adds += nq * D
            if strategy == "two kernels":
                size += read + 4 * nq + row
                size += read + 4 * nq + key + key
    return flops, size, adds
""",
    ),
    right(
        "5.5",
        "torch sums",
        source="""
def cost(strategy: str, len_q: list, len_kv: list, heads: int, D: int, BN: int) -> tuple:
    q, k = torch.tensor(len_q, dtype=torch.int64), torch.tensor(len_kv, dtype=torch.int64)
    pairs, rows, keys = int((q * k).sum()) * heads, int(q.sum()) * heads, int(k.sum()) * heads
    reads = 4 * D * (rows + keys) + 4 * rows
    writes = 2 * D * rows + 4 * D * keys
    if strategy == "stored":
        return 8 * D * pairs, reads + writes + 2 * pairs, 0
    if strategy == "atomics":
        tiles = torch.div(k + BN - 1, BN, rounding_mode="floor")
        return 10 * D * pairs, reads + writes + 4 * rows + 8 * D * rows, int((q * tiles).sum()) * heads * D
    return 14 * D * pairs, 2 * reads + writes + 8 * rows, 0
""",
    ),
    # ------------------------------------------------------------------------------------------ 5.6
    wrong("5.6", "shares of the lse alone", source=merge(l1="w1 * dlse", l2="w2 * dlse")),
    wrong("5.6", "the difference twice", source=merge(l1="w1 * (dlse + difference)", l2="w2 * (dlse - difference)")),
    wrong(
        "5.6",
        "sign of the difference",
        source=merge(l1="w1 * (dlse - w2 * difference)", l2="w2 * (dlse + w1 * difference)"),
    ),
    wrong("5.6", "both plus", source=merge(l2="w2 * (dlse + w1 * difference)")),
    wrong("5.6", "dout as it came", source=merge(d1="dout.clone()", d2="dout.clone()")),
    wrong("5.6", "shares exchanged", source=merge(d1="up(w2) * dout", d2="up(w1) * dout")),
    wrong("5.6", "half each", source=merge(d1="0.5 * dout", d2="0.5 * dout")),
    wrong(
        "5.6",
        "exp without a maximum",
        source=merge().replace("torch.exp(lse1 - top), torch.exp(lse2 - top)", "torch.exp(lse1), torch.exp(lse2)"),
    ),
    wrong(
        "5.6",
        "both empty: NaN",
        source=merge().replace('    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)\n', ""),
    ),
    wrong(
        "5.6",
        "both empty: half each",
        source=merge()
        .replace("    total = torch.where(total == 0, 1.0, total)\n", "")
        .replace(
            "    w1, w2 = w1 / total, w2 / total\n",
            "    w1, w2 = (w1 / total).nan_to_num(0.5), (w2 / total).nan_to_num(0.5)\n",
        ),
    ),
    wrong(
        "5.6",
        "a maximum from 0",
        source=merge().replace("torch.maximum(lse1, lse2)", "torch.maximum(lse1, lse2).clamp(min=0)"),
    ),
    wrong("5.6", "base 2", source=merge().replace("torch.exp(", "torch.exp2(")),
    wrong("5.6", "dlse in dout's gradient", source=merge(d1="up(w1) * (dout + up(dlse))")),
    wrong("5.6", "dlse forgotten", source=merge(l1="w1 * w2 * difference", l2="-w1 * w2 * difference")),
    wrong(
        "5.6",
        "heads and rows exchanged",
        source=merge().replace("x.transpose(0, 1).unsqueeze(-1)", "x.reshape(x.shape[1], x.shape[0], 1)"),
    ),
    wrong(
        "5.6",
        "order of results",
        source=merge().replace("    return ", "    a, b, c, d = ").rstrip() + "\n    return a, c, b, d\n",
    ),
    right("5.6", "shares and difference", source=merge()),
    right(
        "5.6",
        "sigmoid",
        source="""
def merge_backward(out1, lse1, out2, lse2, dout, dlse):
    gap = lse1 - lse2
    gone = torch.isneginf(lse1) & torch.isneginf(lse2)
    gap = torch.where(gone, 0.0, gap)
    a = torch.where(gone, 0.0, torch.sigmoid(gap))
    b = torch.where(gone, 0.0, torch.sigmoid(-gap))
    g1 = torch.einsum("thd,thd->ht", out1, dout)
    g2 = torch.einsum("thd,thd->ht", out2, dout)
    da, db = a * b * (g1 - g2), a * b * (g2 - g1)
    return (
        torch.einsum("ht,thd->thd", a, dout), a * dlse + da,
        torch.einsum("ht,thd->thd", b, dout), b * dlse + db,
    )
""",
    ),
    right(
        "5.6",
        "by autograd",
        source="""
def merge_backward(out1, lse1, out2, lse2, dout, dlse):
    x = [t.detach().clone().requires_grad_() for t in (out1, lse1, out2, lse2)]
    empty = [torch.isneginf(lse1), torch.isneginf(lse2)]
    with torch.enable_grad():
        safe = [torch.where(e, -1e30, l) for e, l in zip(empty, (x[1], x[3]))]
        lse = torch.logaddexp(*safe)
        w = [torch.where(e, 0.0, torch.exp(l - lse)) for e, l in zip(empty, safe)]
        out = w[0].T[..., None] * x[0] + w[1].T[..., None] * x[2]
        loss = (out * dout).sum() + (torch.where(empty[0] & empty[1], 0.0, lse) * dlse).sum()
        return torch.autograd.grad(loss, x)
""",
    ),
    # ------------------------------------------------------------------------------------------ tried later
    wrong(
        "5.1",
        "stacks rows: fails at no rows",
        source="""
def row_constants(out, dout, dlse):
    delta = torch.stack([(out[t].float() * dout[t].float()).sum(1) for t in range(len(out))], 1)
    return delta if dlse is None else delta - dlse
""",
    ),
    wrong(
        "5.2",
        "scale from D",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    dead = lse == float("-inf")
    q, dout = q.masked_fill(dead[:, None], 0.0), dout.masked_fill(dead[:, None], 0.0)
    lse, delta = lse.masked_fill(dead, float("inf")), delta.masked_fill(dead, 0.0)
    p = torch.exp(q @ k.T * q.shape[1] ** -0.5 - lse[:, None])
    dp = dout @ v.T
    ds = p * (dp - delta[:, None])
    return ds @ k * q.shape[1] ** -0.5, ds.T @ q * q.shape[1] ** -0.5, p.T @ dout
""",
    ),
    wrong(
        "5.2",
        "zeros when any row is dead",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    dead = lse == float("-inf")
    q, dout = q.masked_fill(dead[:, None], 0.0), dout.masked_fill(dead[:, None], 0.0)
    lse, delta = lse.masked_fill(dead, float("inf")), delta.masked_fill(dead, 0.0)
    if dead.any():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    p = torch.exp(q @ k.T * scale - lse[:, None])
    dp = dout @ v.T
    ds = p * (dp - delta[:, None])
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout
""",
    ),
    right(
        "5.2",
        "lse as one more column",
        source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    alive = torch.isfinite(lse)
    zero = lambda x: torch.where(alive.view(-1, *[1] * (x.ndim - 1)), x, torch.zeros_like(x))
    qz, do, de, ls = zero(q), zero(dout), zero(delta), zero(lse)
    scores = torch.matmul(qz, k.transpose(0, 1)).mul(scale).sub(ls.unsqueeze(-1))
    bias = torch.zeros(len(q), 1).masked_fill(~alive[:, None], float("-inf"))
    p = (scores + bias).exp()
    ds = p.mul(torch.matmul(do, v.transpose(0, 1)).sub(de.unsqueeze(-1)))
    dq = torch.matmul(ds, k).mul_(scale)
    dk = torch.matmul(ds.transpose(0, 1), qz).mul_(scale)
    return dq, dk, torch.matmul(p.transpose(0, 1), do)
""",
    ),
    right(
        "5.2",
        "two helpers, dict of rows",
        source="""
def _probabilities(q, k, lse, scale):
    return torch.exp(torch.addmm(-lse[:, None], q, k.T, alpha=scale))

def block_gradients(q, k, v, dout, lse, delta, scale):
    keep = (lse != -float("inf")).nonzero(as_tuple=True)[0]
    if keep.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    live = {name: x[keep] for name, x in dict(q=q, dout=dout, lse=lse, delta=delta).items()}
    p = _probabilities(live["q"], k, live["lse"], scale)
    ds = scale * p * torch.addmm(-live["delta"][:, None], live["dout"], v.T)
    return torch.zeros_like(q).index_copy(0, keep, ds @ k), ds.T @ live["q"], p.T @ live["dout"]
""",
    ),
    wrong(
        "5.3",
        "scale from D",
        ('k), input_precision="ieee") * scale', 'k), input_precision="ieee") * (1.0 / (D ** 0.5))'),
        ("dk * scale", "dk * (1.0 / (D ** 0.5))"),
    ),
    wrong(
        "5.3",
        "delta of the neighbour",
        (
            "delta = tl.load(delta_ptr + head * total_q + rows, mask=mine, other=0.0)",
            "delta = tl.load(delta_ptr + head * total_q + rows, mask=rows < total_q, other=0.0)",
        ),
    ),
    right(
        "5.3",
        "block pointers",
        source="""
@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_offsets_ptr, k_offsets_ptr,
    tiles_ptr, dk_ptr, dv_ptr, scale, total_q, H,
    D: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    tile, g = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    q0 = tl.load(q_offsets_ptr + seq)
    nq = tl.load(q_offsets_ptr + seq + 1) - q0
    k0 = tl.load(k_offsets_ptr + seq)
    nk = tl.load(k_offsets_ptr + seq + 1) - k0
    HK = H // GROUP
    at = (k0 * HK + g) * D
    kb = tl.make_block_ptr(k_ptr + at, (nk, D), (HK * D, 1), (first, 0), (BN, D), (1, 0))
    vb = tl.make_block_ptr(v_ptr + at, (nk, D), (HK * D, 1), (first, 0), (BN, D), (1, 0))
    k = tl.load(kb, boundary_check=(0,), padding_option="zero")
    v = tl.load(vb, boundary_check=(0,), padding_option="zero")
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for m in range(GROUP):
        h = g * GROUP + m
        qb = tl.make_block_ptr(q_ptr + (q0 * H + h) * D, (nq, D), (H * D, 1), (0, 0), (BM, D), (1, 0))
        ob = tl.make_block_ptr(dout_ptr + (q0 * H + h) * D, (nq, D), (H * D, 1), (0, 0), (BM, D), (1, 0))
        for s in range(0, nq, BM):
            i = s + tl.arange(0, BM)
            q = tl.load(qb, boundary_check=(0,), padding_option="zero")
            do = tl.load(ob, boundary_check=(0,), padding_option="zero")
            lse = tl.load(lse_ptr + h * total_q + q0 + i, mask=i < nq, other=0.0)
            de = tl.load(delta_ptr + h * total_q + q0 + i, mask=i < nq, other=0.0)
            p = tl.exp(tl.dot(q, k.T, input_precision="ieee") * scale - lse[:, None])
            dv += tl.dot(p.T, do, input_precision="ieee")
            ds = p * (tl.dot(do, v.T, input_precision="ieee") - de[:, None])
            dk += tl.dot(ds.T, q, input_precision="ieee") * scale
            qb = tl.advance(qb, (BM, 0))
            ob = tl.advance(ob, (BM, 0))
    tl.store(tl.make_block_ptr(dk_ptr + at, (nk, D), (HK * D, 1), (first, 0), (BN, D), (1, 0)), dk, boundary_check=(0,))
    tl.store(tl.make_block_ptr(dv_ptr + at, (nk, D), (HK * D, 1), (first, 0), (BN, D), (1, 0)), dv, boundary_check=(0,))
""",
    ),
    right(
        "5.3",
        "early return, while loop, helper",
        source="""
@triton.jit
def _rows(ptr, rows, head, H, D: tl.constexpr, end):
    return tl.load(ptr + (rows[:, None] * H + head) * D + tl.arange(0, D)[None, :], mask=(rows < end)[:, None], other=0.0)

@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_offsets_ptr, k_offsets_ptr,
    tiles_ptr, dk_ptr, dv_ptr, scale, total_q, H,
    D: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    seq = tl.load(tiles_ptr + 2 * tl.program_id(0))
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    g, HK = tl.program_id(1), H // GROUP
    keys = k_begin + tl.load(tiles_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BN)
    at = (keys[:, None] * HK + g) * D + tl.arange(0, D)[None, :]
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    if q_begin == q_end:
        tl.store(dk_ptr + at, dk, mask=(keys < k_end)[:, None])
        tl.store(dv_ptr + at, dv, mask=(keys < k_end)[:, None])
        return
    k, v = _rows(k_ptr, keys, g, HK, D, k_end), _rows(v_ptr, keys, g, HK, D, k_end)
    head = g * GROUP
    while head < (g + 1) * GROUP:
        start = q_begin
        while start < q_end:
            rows = start + tl.arange(0, BM)
            q, do = _rows(q_ptr, rows, head, H, D, q_end), _rows(dout_ptr, rows, head, H, D, q_end)
            lse = tl.load(lse_ptr + head * total_q + rows, mask=rows < q_end, other=0.0)
            de = tl.load(delta_ptr + head * total_q + rows, mask=rows < q_end, other=0.0)
            p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
            dv = tl.dot(tl.trans(p), do, acc=dv, input_precision="ieee")
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - de[:, None]) * scale
            dk = tl.dot(tl.trans(ds), q, acc=dk, input_precision="ieee")
            start += BM
        head += 1
    tl.store(dk_ptr + at, dk, mask=(keys < k_end)[:, None])
    tl.store(dv_ptr + at, dv, mask=(keys < k_end)[:, None])
""",
    ),
    wrong(
        "5.4",
        "scale from D",
        ('tl.dot(ds, k, input_precision="ieee") * scale', 'tl.dot(ds, k, input_precision="ieee") * (1.0 / (D ** 0.5))'),
    ),
    wrong(
        "5.5", "float bytes", ("return 2 * D * products * pairs, moved,", "return 2 * D * products * pairs, moved / 1,")
    ),
    right(
        "5.6",
        "softmax of two",
        source="""
def merge_backward(out1, lse1, out2, lse2, dout, dlse):
    lse = torch.stack([lse1, lse2])
    w = torch.softmax(lse, 0).nan_to_num(0.0)
    outs = torch.stack([out1, out2])
    dots = torch.einsum("pthd,thd->pht", outs, dout)
    dl = w * (dots - (w * dots).sum(0) + dlse)
    do = w.permute(0, 2, 1)[..., None] * dout
    return do[0], dl[0], do[1], dl[1]
""",
    ),
    right(
        "5.6",
        "early returns row by row",
        source="""
def _one(o1, l1, o2, l2, do, dl):
    if l1 == -torch.inf and l2 == -torch.inf:
        return torch.zeros_like(do), torch.zeros(()), torch.zeros_like(do), torch.zeros(())
    if l1 == -torch.inf:
        return torch.zeros_like(do), torch.zeros(()), do, dl
    if l2 == -torch.inf:
        return do, dl, torch.zeros_like(do), torch.zeros(())
    a = 1 / (1 + torch.exp(l2 - l1))
    b = 1 / (1 + torch.exp(l1 - l2))
    g = a * b * ((o1 - o2) @ do)
    return a * do, a * dl + g, b * do, b * dl - g

def merge_backward(out1, lse1, out2, lse2, dout, dlse):
    a, b, c, d = (torch.empty_like(x) for x in (out1, lse1, out2, lse2))
    for t in range(out1.shape[0]):
        for h in range(out1.shape[1]):
            a[t, h], b[h, t], c[t, h], d[h, t] = _one(out1[t, h], lse1[h, t], out2[t, h], lse2[h, t], dout[t, h], dlse[h, t])
    return a, b, c, d
""",
    ),
]
