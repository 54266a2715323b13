"""Answers to chapter 04's exercises."""

from tests.course.answers import right, wrong

MERGE = """        m_new = tl.maximum(m, part)
        anchor = tl.where(m_new > float("-inf"), m_new, 0.0)
        alpha, share = tl.exp(m - anchor), tl.exp(part - anchor)
        l = l * alpha + share
        acc = acc * alpha[:, None] + share[:, None] * out
        m = m_new
"""
LSE = "    tl.store(lse_ptr + head * total_q + rows, m + tl.log(l), mask=rows < total_q)\n"
KEYS = "k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 4.1
    wrong("4.1", "int64", ("dtype=torch.int32).reshape", "dtype=torch.int64).reshape")),
    wrong("4.1", "no shape for no tiles", (".reshape(-1, 2)", "")),
    wrong("4.1", "blocks of 16 for good", ("range(0, n, block)", "range(0, n, 16)")),
    wrong("4.1", "one row more begins no tile", ("range(0, n, block)", "range(0, n - 1, block)")),
    wrong("4.1", "rows first", ("[(b, row) for", "[(row, b) for")),
    wrong(
        "4.1",
        "longest first",
        (
            "    return torch.tensor(tiles",
            "    tiles.sort(key=lambda t: (-lengths[t[0]], t))\n    return torch.tensor(tiles",
        ),
    ),
    wrong(
        "4.1",
        "numbered without empty ones",
        (
            "lengths = (offsets[1:] - offsets[:-1]).tolist()",
            "lengths = [n for n in (offsets[1:] - offsets[:-1]).tolist() if n]",
        ),
    ),
    wrong(
        "4.1",
        "every sequence as long as the longest",
        ("    tiles = [", "    lengths = [max(lengths)] * len(lengths)\n    tiles = ["),
    ),
    wrong(
        "4.1",
        "the package's list",
        source="import torch\n\n\ndef tile_list(offsets, block):\n    from jfa.schedule import tiles\n\n    return tiles(offsets, block)\n",
    ),
    right(
        "4.1",
        "a rectangle of candidates",
        source="""
import torch


def tile_list(offsets: torch.Tensor, block: int = 16) -> torch.Tensor:
    n = torch.diff(offsets)
    first = torch.arange(0, max(int(n.max()), 1), block, dtype=torch.int32)
    seq, at = torch.nonzero(first < n[:, None], as_tuple=True)
    return torch.stack((seq.int(), first[at]), -1)
""",
    ),
    # ------------------------------------------------------------------------------------------ 4.2
    wrong("4.2", "heads side by side", ("lse_ptr + head * total_q + rows", "lse_ptr + rows * H + head")),
    wrong("4.2", "queries' ends for the keys", ("mask=cols[None, :] < k_end,", "mask=cols[None, :] < k_end + BN,")),
    wrong("4.2", "two heads for good", ("k_ptr + (cols[None, :] * H + head)", "k_ptr + (cols[None, :] * 2 + head)")),
    wrong("4.2", "columns of 16", ("    d = tl.arange(0, D)\n", "    d = tl.arange(0, 16)\n")),
    wrong("4.2", "keys of head 0", ("(cols[None, :] * H + head) * D", "(cols[None, :] * H) * D")),
    wrong("4.2", "the scale of D = 16", ('input_precision="ieee") * scale', 'input_precision="ieee") * 0.25')),
    wrong(
        "4.2",
        "whole blocks of keys",
        ("range(k_begin, k_end, BN)", "range(k_begin, k_begin + (k_end - k_begin) // BN * BN, BN)"),
    ),
    wrong(
        "4.2",
        "0 where there is no key",
        (
            "lse_ptr + head * total_q + rows, m + tl.log(l),",
            "lse_ptr + head * total_q + rows, tl.where(l > 0, m, 0.0) + tl.log(tl.where(l > 0, l, 1.0)),",
        ),
    ),
    wrong(
        "4.2",
        "maximum from -1e4",
        ('m = tl.full((BM,), float("-inf"), tl.float32)', "m = tl.full((BM,), -1.0e4, tl.float32)"),
    ),
    wrong("4.2", "in base 2", ("m + tl.log(l),", "m + tl.log2(l),")),
    wrong("4.2", "rows of the next sequence stored, too", ("mask=rows < q_end)", "mask=rows < total_q)")),
    right(
        "4.2",
        "base 2 throughout, a bias for a mask",
        (
            '        s = tl.dot(q, kt, input_precision="ieee") * scale\n        s = tl.where(cols[None, :] < k_end, s, float("-inf"))\n',
            '        s = tl.dot(q, kt, input_precision="ieee") * (scale * 1.4426950408889634)\n        s += tl.where(cols < k_end, 0.0, float("-inf"))[None, :]\n',
        ),
        (
            "l * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new[:, None]), axis=1)",
            "l * tl.exp2(m - m_new) + tl.sum(tl.exp2(s - m_new[:, None]), axis=1)",
        ),
        ("m + tl.log(l),", "(m + tl.log2(l)) * 0.6931471805599453,"),
    ),
    right(
        "4.2",
        "a maximum far below instead of -inf",
        ('m = tl.full((BM,), float("-inf"), tl.float32)', "m = tl.full((BM,), -1.0e30, tl.float32)"),
        ("m + tl.log(l),", 'tl.where(l > 0.0, m + tl.log(l), float("-inf")),'),
    ),
    # ------------------------------------------------------------------------------------------ 4.3
    wrong("4.3", "one key too many", ("mask=j[:, None] < valid,", "mask=j[:, None] <= valid,")),
    wrong(
        "4.3",
        "NaN alone is replaced",
        (
            "mask=j[:, None] < valid, other=0.0)\n",
            "mask=j[:, None] < KEYS, other=0.0)\n    v = tl.where(v == v, v, 0.0)\n",
        ),
    ),
    wrong(
        "4.3",
        "cut at a large number",
        (
            "mask=j[:, None] < valid, other=0.0)\n",
            "mask=j[:, None] < KEYS, other=0.0)\n    v = tl.minimum(tl.maximum(v, -10.0), 10.0)\n",
        ),
    ),
    wrong(
        "4.3",
        "P masked instead of V",
        (
            "mask=j[:, None] < valid, other=0.0)\n",
            "mask=j[:, None] < KEYS, other=0.0)\n    p = tl.where(j[None, :] < valid, p, 0.0)\n",
        ),
    ),
    wrong("4.3", "only the first key", ("mask=j[:, None] < valid,", "mask=(j[:, None] < valid) & (j[:, None] < 4),")),
    wrong("4.3", "added twice", ("acc = tl.dot(p, v, acc, ", "acc = acc + tl.dot(p, v, acc, ")),
    wrong(
        "4.3",
        "in bf16",
        ('acc = tl.dot(p, v, acc, input_precision="ieee")', "acc = tl.dot(p.to(tl.bfloat16), v.to(tl.bfloat16), acc)"),
    ),
    wrong(
        "4.3",
        "key by key",
        source="""
@triton.jit
def pv_kernel(p_ptr, v_ptr, acc_ptr, valid, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    at = acc_ptr + r[:, None] * D + d[None, :]
    acc = tl.load(at)
    for j in range(valid):
        acc += tl.load(p_ptr + r * KEYS + j)[:, None] * tl.load(v_ptr + j * D + d)[None, :]
    tl.store(at, acc)
""",
    ),
    right(
        "4.3",
        "a sum of products",
        source="""
@triton.jit
def pv_kernel(p_ptr, v_ptr, acc_ptr, valid, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    r, j, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    live = (j < valid)[:, None]
    at = r[:, None] * D + d[None, :]
    v = tl.load(v_ptr + (j[:, None] * D + d[None, :]), live, 0.0)
    p = tl.load(p_ptr + (r[:, None] * KEYS + j[None, :]))
    tl.store(acc_ptr + at, tl.load(acc_ptr + at) + tl.sum(p[:, :, None] * v[None, :, :], 1))
""",
    ),
    # ------------------------------------------------------------------------------------------ 4.4
    wrong(
        "4.4",
        "Dv is D",
        ("    d, dv = tl.arange(0, D), tl.arange(0, DV)\n", "    d, dv = tl.arange(0, D), tl.arange(0, D)\n"),
        ("tl.zeros((BM, DV), tl.float32)", "tl.zeros((BM, D), tl.float32)"),
    ),
    wrong(
        "4.4",
        "rows of V D apart",
        ("v_ptr + (keys[:, None] * H + head) * DV", "v_ptr + (keys[:, None] * H + head) * D"),
    ),
    wrong(
        "4.4", "distance in tiles", ("tl.abs(i[:, None] - j[None, :])", "tl.abs(i[:, None] // BM - j[None, :] // BN)")
    ),
    wrong(
        "4.4",
        "the penalty is scaled, too",
        (
            "* scale - slope * tl.abs(i[:, None] - j[None, :])",
            "* scale - scale * slope * tl.abs(i[:, None] - j[None, :])",
        ),
    ),
    wrong(
        "4.4",
        "penalty behind the maximum",
        (" - slope * tl.abs(i[:, None] - j[None, :])\n", "\n"),
        (
            "p = tl.exp(s - m_new[:, None])",
            "p = tl.exp(s - m_new[:, None]) * tl.exp(-1.01 * slope * tl.abs(i[:, None] - j[None, :]))",
        ),
    ),
    wrong("4.4", "a penalty that is added", ("* scale - slope *", "* scale + slope *")),
    wrong(
        "4.4",
        "queries counted within the tile",
        (
            "i = first + tl.arange(0, BM)\n    rows = q_begin + i",
            "i = tl.arange(0, BM)\n    rows = q_begin + first + i",
        ),
    ),
    wrong("4.4", "the tail's scores are kept", ('s = tl.where(mine[None, :], s, float("-inf"))', "s = s * 1.0")),
    wrong("4.4", "l is not rescaled", ("l = l * alpha +", "l = l +")),
    wrong(
        "4.4",
        "scale 1 percent off",
        ('kt, input_precision="ieee") * scale', 'kt, input_precision="ieee") * (1.01 * scale)'),
    ),
    right(
        "4.4",
        "positions as floats, a bias for a mask",
        (
            "slope * tl.abs(i[:, None] - j[None, :])",
            "slope * tl.abs(i.to(tl.float32)[:, None] - j.to(tl.float32)[None, :])",
        ),
        ('s = tl.where(mine[None, :], s, float("-inf"))', 's += tl.where(mine, 0.0, float("-inf"))[None, :]'),
    ),
    # ------------------------------------------------------------------------------------------ 4.5
    wrong(
        "4.5",
        "scores of the tail are 0",
        (
            's = tl.where(mine, tl.sum(q[None, :] * k, axis=1), float("-inf"))',
            "s = tl.where(mine, tl.sum(q[None, :] * k, axis=1), 0.0)",
        ),
    ),
    wrong("4.5", "not scaled", ("tl.load(q_ptr + head * D + d) * scale", "tl.load(q_ptr + head * D + d)")),
    wrong(
        "4.5",
        "scaled twice",
        ("tl.sum(q[None, :] * k, axis=1), float", "tl.sum(q[None, :] * k, axis=1) * scale, float"),
    ),
    wrong(
        "4.5", "a query per sequence", ("tl.load(q_ptr + head * D + d)", "tl.load(q_ptr + ((b + head) % H) * D + d)")
    ),
    wrong("4.5", "l is not rescaled", ("l = l * alpha +", "l = l +")),
    wrong("4.5", "the mean of the values", ("p = tl.exp(s - m_new)", "p = tl.where(mine, 1.0, 0.0)")),
    wrong("4.5", "the tail is not walked", ("range(begin, end, BN)", "range(begin, end - BN + 1, BN)")),
    wrong(
        "4.5",
        "empty sequences store nothing",
        (
            "    if end > begin:\n        acc = acc / l\n    tl.store(out_ptr + (b * H + head) * D + d, acc)",
            "    if end > begin:\n        tl.store(out_ptr + (b * H + head) * D + d, acc / l)",
        ),
    ),
    wrong(
        "4.5",
        "K loaded twice",
        (
            "        v = tl.load(v_ptr",
            "        k = k + tl.load(k_ptr + at, mask=mine[:, None], other=0.0) * 0.0\n        v = tl.load(v_ptr",
        ),
    ),
    wrong(
        "4.5",
        "stored head by head",
        ("out_ptr + (b * H + head) * D + d", "out_ptr + (head * tl.num_programs(0) + b) * D + d"),
    ),
    right(
        "4.5",
        "an anchor and a last where",
        ('m = float("-inf")', "m = -1.0e30"),
        (
            "    if end > begin:\n        acc = acc / l\n",
            "    acc = tl.where(l > 0, acc / tl.where(l > 0, l, 1.0), 0.0)\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 4.6
    wrong(
        "4.6",
        "the mean of the parts",
        (
            MERGE,
            "        l = l + tl.where(written, 1.0, 0.0)\n        acc = acc + out\n        m = tl.maximum(m, part)\n",
        ),
    ),
    wrong(
        "4.6",
        "no maximum",
        (
            MERGE,
            "        share = tl.exp(part)\n        l = l + share\n        acc = acc + share[:, None] * out\n        m = tl.zeros((BM,), tl.float32)\n",
        ),
    ),
    wrong(
        "4.6", "maximum from 0", ('m = tl.full((BM,), float("-inf"), tl.float32)', "m = tl.zeros((BM,), tl.float32)")
    ),
    wrong("4.6", "sum not rescaled", ("l = l * alpha + share", "l = l + share")),
    wrong("4.6", "output not rescaled", ("acc = acc * alpha[:, None] +", "acc = acc +")),
    wrong(
        "4.6",
        "one maximum for the tile",
        ("m_new = tl.maximum(m, part)", "m_new = tl.maximum(m, tl.max(part, axis=0))"),
    ),
    wrong("4.6", "no anchor", ('anchor = tl.where(m_new > float("-inf"), m_new, 0.0)', "anchor = m_new")),
    wrong(
        "4.6",
        "unwritten parts times 0",
        ("mask=written[:, None], other=0.0)", "mask=rows[:, None] < total_q, other=0.0)"),
    ),
    wrong("4.6", "unwritten by a threshold", ('written = part > float("-inf")', "written = part > -1000.0")),
    wrong("4.6", "NaN without any key", ("acc / tl.where(l > 0, l, 1.0)[:, None]", "acc / l[:, None]")),
    wrong("4.6", "lse without its maximum", (LSE, LSE.replace("m + tl.log(l)", "tl.log(l)"))),
    wrong("4.6", "the largest lse", (LSE, LSE.replace("m + tl.log(l)", "m"))),
    wrong("4.6", "base 2", (LSE, LSE.replace("m + tl.log(l)", "m + tl.math.log2(l)"))),
    wrong("4.6", "0 for no lse", (LSE, LSE.replace("m + tl.log(l)", "tl.where(l > 0, m + tl.log(l), 0.0)"))),
    wrong("4.6", "lse as rows by heads", (LSE, LSE.replace("head * total_q + rows", "rows * H + head"))),
    wrong(
        "4.6",
        "lses as rows by heads",
        ("at = (p * H + head) * total_q + rows\n", "at = (p * total_q + rows) * H + head\n"),
    ),
    wrong(
        "4.6",
        "outs as heads by rows",
        ("((p * total_q + rows[:, None]) * H + head) * D", "((p * H + head) * total_q + rows[:, None]) * D"),
    ),
    wrong("4.6", "two parts for good", ("range(parts)", "range(2)")),
    wrong("4.6", "the first part left out", ("range(parts)", "range(1, parts)")),
    wrong("4.6", "rows that do not exist", (LSE, LSE.replace(", mask=rows < total_q", ""))),
    wrong(
        "4.6",
        "two passes over the parts",
        (
            "    for p in range(parts):\n",
            '    for p in range(parts):\n        at = (p * H + head) * total_q + rows\n        m = tl.maximum(m, tl.load(lses_ptr + at, mask=rows < total_q, other=float("-inf")))\n    for p in range(parts):\n',
        ),
    ),
    wrong("4.6", "not divided", ("out = acc / tl.where(l > 0, l, 1.0)[:, None]", "out = acc")),
    right(
        "4.6",
        "running lse",
        (
            MERGE,
            """        top = tl.maximum(m, part)
        safe = tl.where(top > float("-inf"), top, 0.0)
        both = safe + tl.log(tl.exp(m - safe) + tl.exp(part - safe))
        known = tl.where(both > float("-inf"), both, 0.0)
        acc = acc * tl.exp(m - known)[:, None] + out * tl.exp(part - known)[:, None]
        m = both
""",
        ),
        ("    out = acc / tl.where(l > 0, l, 1.0)[:, None]\n", "    out = acc\n"),
        (LSE, LSE.replace("m + tl.log(l)", "m")),
    ),
    right(
        "4.6",
        "empty parts selected",
        (
            MERGE,
            """        bigger = tl.maximum(m, part)
        old = tl.where(m == float("-inf"), 0.0, tl.exp(m - bigger))
        new = tl.where(written, tl.exp(part - bigger), 0.0)
        acc = acc * old[:, None]
        acc += out * new[:, None]
        l = old * l + new
        m = bigger
""",
        ),
        (LSE, LSE.replace("m + tl.log(l)", 'tl.where(l > 0, m + tl.log(tl.where(l > 0, l, 1.0)), float("-inf"))')),
    ),
    # ------------------------------------------------------------------------------------------ 4.7
    wrong(
        "4.7",
        "begin only",
        (KEYS, KEYS.replace("tl.load(k_offsets_ptr + seq + 1)", "tl.load(q_offsets_ptr + seq + 1)")),
    ),
    wrong("4.7", "end only", (KEYS, KEYS.replace("tl.load(k_offsets_ptr + seq),", "tl.load(q_offsets_ptr + seq),"))),
    wrong(
        "4.7",
        "a second mask",
        (KEYS, KEYS.replace("k_offsets_ptr", "q_offsets_ptr")),
        ("mine = keys < k_end", "mine = (keys < k_end) & (keys < tl.load(k_offsets_ptr + seq + 1))"),
    ),
    wrong(
        "4.7",
        "rows of the queries' number",
        (KEYS, "k_begin = tl.load(k_offsets_ptr + seq)\n    k_end = k_begin + q_end - q_begin"),
    ),
    wrong(
        "4.7",
        "the next sequence",
        (KEYS, KEYS.replace("seq + 1", "seq + 2").replace("(k_offsets_ptr + seq)", "(k_offsets_ptr + seq + 1)")),
    ),
    wrong("4.7", "all keys", (KEYS, "k_begin, k_end = 0, tl.load(k_offsets_ptr + seq + 1)")),
    wrong(
        "4.7",
        "queries by the keys' offsets",
        (
            "q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)",
            "q_begin, q_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)",
        ),
    ),
    wrong(
        "4.7",
        "keys end with the queries",
        ("mine = keys < k_end", "mine = keys < tl.minimum(k_end, k_begin + q_end - q_begin)"),
    ),
    wrong(
        "4.7",
        "scale twice",
        ('tl.dot(q, kt, input_precision="ieee"), float', 'tl.dot(q, kt, input_precision="ieee") * scale, float'),
    ),
    wrong("4.7", "no keys: NaN", ("acc / tl.where(l > 0, l, 1.0)[:, None]", "acc / l[:, None]")),
    wrong(
        "4.7",
        "loads unmasked",
        (" mask=mine[:, None], other=0.0\n", " mask=mine[:, None] | (keys[:, None] >= 0), other=0.0\n"),
    ),
    right(
        "4.7",
        "by length",
        (
            KEYS,
            "k_begin = tl.load(k_offsets_ptr + seq)\n    len_kv = tl.load(k_offsets_ptr + seq + 1) - k_begin\n    k_end = k_begin + len_kv",
        ),
    ),
    right(
        "4.7",
        "scale at the scores",
        ("other=0.0) * scale\n", "other=0.0)\n"),
        ('tl.dot(q, kt, input_precision="ieee"), float', 'scale * tl.dot(q, kt, input_precision="ieee"), float'),
    ),
]
