"""Answers to chapter 04's exercises on merging and on offsets."""

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
