"""Answers to chapter 12's exercises."""

from tests.course.answers import right, wrong

ARRIVE_0 = "    tlx.barrier_arrive(p_fulls[0])\n"
ARRIVE_1 = "    tlx.barrier_arrive(p_fulls[1])\n"
ARRIVE_2 = "    tlx.barrier_arrive(p_fulls[2])\n"
WAIT_1 = "    tlx.barrier_wait(p_fulls[1], j & 1)\n"
PV_0 = "    tlx.async_dot(p, rows, acc, use_acc=j > 0, force_async=True)\n"
PV_2 = "    tlx.async_dot(p, rows, acc, use_acc=True, mBarriers=[done])\n"
SUMS = "    return tl.sum(p_left, axis=1) + tl.sum(p_middle, axis=1) + tl.sum(p_last, axis=1)\n"
HALVES = "    left, right = halves(exponents)\n    middle, last = halves(right)\n"
LEFT = "    p_left = tl.math.exp2(left)\n"
MIDDLE = "    p_middle = tl.math.exp2(middle)\n"
LAST = "    p_last = tl.math.exp2(last)\n"

DUE_ADD = "half, step - 1, place > 0, BUFFERS,\n                    )  # fmt: skip\n                    if j == 0:"
NEXT_S = "                issue_s(q, kv, s, s_fulls, kv_fulls, kv_empties, half, step, BUFFERS)\n"
GIVE_Q = "                if j + 1 == blocks:\n                    tlx.tcgen05_commit(q_empties[half])\n"
WAIT_Q = "                if j == 0:\n                    tlx.barrier_wait(q_fulls[half], worked & 1)\n"
TOLD = "                    if j == 0:\n                        tlx.tcgen05_commit(acc_fulls[half])\n"
PLACE = "            place = j\n"
STEP = "            step += 1\n"
WORKED = "        if blocks > 0:\n            worked += 1\n"

COMPILED = 'compiled = report["error"] is None and not report["setmaxnreg_ignored"]'
CYCLES = "spills[name] += (stored + loaded) * 32 * warps[name] / 128"
TIME = "step = max([path, *(work.get(name, 0) + cycles for name, cycles in spills.items())])"
BETTER = "if best is None or (step, path) < best:"

OVERLAP = "    storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))\n"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 12.1
    wrong("12.1", "8 for good", ("> threshold", "> 8.0")),
    wrong(
        "12.1",
        "the reference of the block before",
        (
            "        reference = new\n",
            "        reference = torch.where(grew, block_max, block_max.minimum(reference))\n",
        ),
    ),
    wrong("12.1", "the sum is not rescaled", ("total = total * alpha +", "total = total +")),
    wrong(
        "12.1",
        "raised by all or by none",
        ("grew = block_max - reference > threshold", "grew = (block_max - reference > threshold).any().expand(rows)"),
    ),
    wrong("12.1", "natural exponentials", ("p = torch.exp2(s - new[:, None])", "p = torch.exp(s - new[:, None])")),
    wrong("12.1", "whether, not how often", ("raised += grew", "raised |= grew")),
    wrong("12.1", "counts as int32", ("dtype=torch.int64", "dtype=torch.int32")),
    wrong(
        "12.1",
        "starts at 0",
        ('torch.full((rows,), float("-inf"), dtype=scores.dtype)', "torch.zeros(rows, dtype=scores.dtype)"),
    ),
    wrong(
        "12.1",
        "growth of the magnitude",
        ("block_max - reference > threshold", "(block_max - reference).abs() > threshold"),
    ),
    wrong(
        "12.1",
        "exact in the end, by a second walk",
        (
            "    return out / total[:, None], raised",
            "    flat = scores.reshape(rows, -1)\n    p = torch.exp2(flat - flat.amax(1, keepdim=True))\n    return p @ values / p.sum(1, keepdim=True), raised",
        ),
    ),
    wrong(
        "12.1",
        "torch's softmax in the end",
        (
            "    return out / total[:, None], raised",
            "    return torch.softmax(scores.reshape(rows, -1) * 0.6931471805599453, 1) @ values, raised",
        ),
    ),
    right(
        "12.1",
        "in place, by masks",
        source="""
import torch


def lazy_attention(scores, values, threshold=8.0):
    rows, blocks, width = scores.shape
    ref = scores[:, 0].amax(-1)
    count = torch.zeros_like(ref, dtype=torch.long)
    acc, norm = scores.new_zeros(rows, values.size(1)), scores.new_zeros(rows)
    for s, v in zip(scores.unbind(1), values.split(width)):
        top = s.amax(-1)
        up = top > ref + threshold
        up &= top - ref > threshold
        factor = torch.exp2(torch.where(up, ref - top, 0))
        ref = ref.masked_scatter(up, top[up])
        count.add_(up)
        p = torch.exp2(s - ref[:, None])
        norm.mul_(factor).add_(p.sum(-1))
        torch.addmm(acc * factor[:, None], p, v, out=acc)
    return acc.div_(norm[:, None]), count
""",
    ),
    wrong("12.1", "at least the threshold", ("reference > threshold", "reference >= threshold")),
    wrong(
        "12.1",
        "the first block counts",
        ("        if j > 0:\n            raised += grew\n", "        raised += grew\n"),
    ),
    wrong("12.1", "alpha of the sum alone", ("out = out * alpha[:, None] + p", "out = out + p")),
    wrong(
        "12.1",
        "the mean reference of all rows",
        (
            "new = torch.where(grew, block_max, reference)",
            "new = torch.where(grew, block_max, reference).mean().expand(rows)",
        ),
    ),
    wrong(
        "12.1",
        "raised to just the threshold",
        (
            "torch.where(grew, block_max, reference)",
            "torch.where(grew, (block_max - threshold).maximum(reference), reference)",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 12.2
    wrong(
        "12.2",
        "P of both halves in one place",
        ("p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2,", "p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 1,"),
    ),
    wrong(
        "12.2",
        "S of both halves in one place",
        ("s = tlx.local_alloc((BM, BN), tl.float32, 2,", "s = tlx.local_alloc((BM, BN), tl.float32, 1,"),
    ),
    wrong(
        "12.2",
        "P in fp8",
        ("p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2,", "p_tiles = tlx.local_alloc((BM, BN), tl.float8e5, 2,"),
    ),
    wrong(
        "12.2",
        "O in bf16",
        ("accs = tlx.local_alloc((BM, D), tl.float32, 2,", "accs = tlx.local_alloc((BM, D), tl.bfloat16, 2,"),
    ),
    right(
        "12.2",
        "no overlap is set",
        ("    storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))\n", ""),
    ),
    wrong(
        "12.2",
        "P inside O",
        ("tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)", "tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=accs)"),
        ("    storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))\n", ""),
    ),
    wrong(
        "12.2",
        "half the queries",
        ("accs = tlx.local_alloc((BM, D), tl.float32, 2,", "accs = tlx.local_alloc((BM // 2, D), tl.float32, 2,"),
    ),
    wrong(
        "12.2",
        "one half of Q",
        ("q = tlx.local_alloc((BM, D), tl.bfloat16, 2)", "q = tlx.local_alloc((BM, D), tl.bfloat16, 1)"),
    ),
    right("12.2", "P first", ("tlx.reuse_group(s, p_tiles, group", "tlx.reuse_group(p_tiles, s, group")),
    wrong(
        "12.2",
        "S and O inside one another",
        ("    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)\n", ""),
        (OVERLAP, "    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem, reuse=s)\n"),
    ),
    wrong(
        "12.2",
        "S and P one after the other, S in bf16",
        ("s = tlx.local_alloc((BM, BN), tl.float32, 2,", "s = tlx.local_alloc((BM, BN), tl.bfloat16, 2,"),
    ),
    wrong(
        "12.2",
        "everything in one place",
        ("    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)\n", ""),
        (
            OVERLAP,
            "    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)\n"
            + OVERLAP.replace("(s, p_tiles", "(s, p_tiles, accs"),
        ),
    ),
    right(
        "12.2",
        "P lies in S, said by reuse",
        ("    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)\n", ""),
        ("tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)", "tl.float32, 2, tlx.storage_kind.tmem)"),
        ("tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)", "tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=s)"),
        (OVERLAP, ""),
    ),
    # ------------------------------------------------------------------------------------------ 12.3
    wrong(
        "12.3",
        "S is given back when P is wanted",
        ("                tlx.barrier_arrive(s_empty[0], 1)\n", ""),
        (
            "                p = tl.math.exp2(scores - m_new[:, None])\n                l =",
            "                p = tl.math.exp2(scores - m_new[:, None])\n                if j > 0:\n                    tlx.barrier_arrive(s_empty[0], 1)\n                l =",
        ),
    ),
    wrong(
        "12.3",
        "P V before the next S",
        (
            "                if j < blocks:\n                    slot, phase = ring(2 * j, BUFFERS)",
            "                if j > 0:\n                    tlx.barrier_wait(p_full[0], (j - 1) & 1)\n                if j < blocks:\n                    slot, phase = ring(2 * j, BUFFERS)",
        ),
        (
            "                    tlx.barrier_wait(p_full[0], (j - 1) & 1)\n                    p, v",
            "                    p, v",
        ),
    ),
    wrong("12.3", "given back twice", ("tlx.barrier_arrive(s_empty[0], 1)", "tlx.barrier_arrive(s_empty[0], 2)")),
    wrong(
        "12.3",
        "waits from the second block, its own parity",
        ("tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)", "tlx.barrier_wait(s_empty[0], j & 1)"),
    ),
    wrong(
        "12.3",
        "waits at even blocks only",
        (
            "                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n",
            "                    if j % 2 == 0:\n                        tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n",
        ),
    ),
    wrong(
        "12.3",
        "waits for O instead",
        ("tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)", "tlx.barrier_wait(acc_full[0], (j & 1) ^ 1)"),
    ),
    wrong(
        "12.3",
        "waits behind the product",
        ("                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n", ""),
        (
            "mBarriers=[s_full[0], k_read])\n",
            "mBarriers=[s_full[0], k_read])\n                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n",
        ),
    ),
    wrong(
        "12.3",
        "the first block's maximum",
        (
            "m_new = tl.maximum(m, tl.max(scores, axis=1))",
            'm_new = tl.where(m == float("-inf"), tl.max(scores, axis=1), m)',
        ),
    ),
    right(
        "12.3",
        "waits from the second block on",
        (
            "                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n",
            "                    if j > 0:\n                        tlx.barrier_wait(s_empty[0], (j + 1) & 1)\n",
        ),
    ),
    wrong(
        "12.3",
        "given back once per two blocks",
        (
            "                tlx.barrier_arrive(s_empty[0], 1)\n",
            "                if j & 1:\n                    tlx.barrier_arrive(s_empty[0], 1)\n",
        ),
    ),
    wrong(
        "12.3",
        "given back with P",
        ("                tlx.barrier_arrive(s_empty[0], 1)\n", ""),
        (
            "                tlx.barrier_arrive(p_full[0], 1)\n",
            "                tlx.barrier_arrive(p_full[0], 1)\n                tlx.barrier_arrive(s_empty[0], 1)\n",
        ),
    ),
    right(
        "12.3",
        "the next S behind the P V before last",
        (
            "            for j in range(blocks + 1):\n",
            "            for j in range(blocks + 1):\n                if j > 1:\n                    tlx.barrier_wait(acc_full[0], (j - 2) & 1)\n",
        ),
    ),
    wrong(
        "12.3",
        "two slots for good",
        ("ring(2 * j, BUFFERS)", "ring(2 * j, 2)"),
        ("ring(2 * j - 1, BUFFERS)", "ring(2 * j - 1, 2)"),
        ("1, D, BM, BN, BUFFERS,", "1, D, BM, BN, 2,"),
    ),
    # ------------------------------------------------------------------------------------------ 12.4
    wrong(
        "12.4",
        "only half 0 asks",
        (
            "if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:",
            "if (tl.min(tl.reshape(alpha, [BM]), 0) < 1.0) & (half == 0):",
        ),
    ),
    wrong(
        "12.4",
        "asks the largest",
        ("tl.min(tl.reshape(alpha, [BM]), 0) < 1.0", "tl.max(tl.reshape(alpha, [BM]), 0) < 1.0"),
    ),
    wrong(
        "12.4",
        "asks for a large change",
        ("tl.min(tl.reshape(alpha, [BM]), 0) < 1.0", "tl.min(tl.reshape(alpha, [BM]), 0) < 1e-6"),
    ),
    wrong("12.4", "divides by alpha", ("tlx.local_load(accs[half]) * alpha)", "tlx.local_load(accs[half]) / alpha)")),
    wrong(
        "12.4",
        "lse in log2 units of the maximum",
        ("(top + tl.math.log2(total)) * 0.6931471805599453", "top + tl.log(total)"),
    ),
    wrong("12.4", "lse without the maximum", ("(top + tl.math.log2(total))", "tl.math.log2(total)")),
    wrong(
        "12.4",
        "alphas waited for one phase later",
        ("tlx.barrier_wait(alpha_fulls[half], (j - 1) & 1)", "tlx.barrier_wait(alpha_fulls[half], j & 1)"),
    ),
    wrong("12.4", "one block too few", ("for j in range(1, blocks):", "for j in range(1, blocks - 1):")),
    wrong("12.4", "stored into half 0's rows", ("store_rows(out_ptr, half * BM,", "store_rows(out_ptr, 0 * half,")),
    wrong(
        "12.4",
        "lets P V through twice",
        (
            "    for half in tl.static_range(2):\n        tlx.barrier_arrive(acc_readys[half])\n    for j",
            "    for half in tl.static_range(2):\n        tlx.barrier_arrive(acc_readys[half], 2)\n    for j",
        ),
    ),
    right(
        "12.4",
        "lse by natural logarithms, a loop over both halves' sums",
        ("(top + tl.math.log2(total)) * 0.6931471805599453", "top * 0.6931471805599453 + tl.log(total)"),
        ("tlx.local_load(accs[half]) / total,", "tlx.local_load(accs[half]) * (1.0 / total),"),
    ),
    wrong(
        "12.4",
        "waits for the block before that",
        ("tlx.barrier_wait(acc_fulls[half], (j - 1) & 1)", "tlx.barrier_wait(acc_fulls[half], j & 1)"),
    ),
    wrong(
        "12.4",
        "does not wait for the last product",
        ("        tlx.barrier_wait(acc_fulls[half], (blocks - 1) & 1)\n", ""),
    ),
    wrong("12.4", "lse of half 0 twice", ("lse_ptr + half * BM + tl.arange(0, BM)", "lse_ptr + tl.arange(0, BM)")),
    # ------------------------------------------------------------------------------------------ 12.5
    wrong("12.5", "half 1 keeps half 0's rows", ("out_ptr, 1, blocks, l, D, BM)", "out_ptr, 0, blocks, l, D, BM)")),
    wrong(
        "12.5",
        "half 1 stops before the last block",
        (
            "            half_end(accs, acc_fulls, out_ptr, 1, blocks, l, D, BM)\n",
            "            half_end(accs, acc_fulls, out_ptr, 1, blocks - 1, l, D, BM)\n",
        ),
    ),
    wrong(
        "12.5",
        "half 1 begins with a maximum of 0",
        (
            'softmax of half 1\n            m = tl.full((BM,), float("-inf"), tl.float32)',
            "softmax of half 1\n            m = tl.full((BM,), 1.0e4, tl.float32)",
        ),
    ),
    wrong("12.5", "block 0 in every step of half 1", ("1, j, m, l, scale_log2,", "1, 0 * j, m, l, scale_log2,")),
    wrong(
        "12.5",
        "l of half 1 starts at 1",
        (
            'softmax of half 1\n            m = tl.full((BM,), float("-inf"), tl.float32)\n            l = tl.zeros((BM,), tl.float32)',
            "softmax of half 1\n            m = tl.full((BM,), 0.0, tl.float32)\n            l = tl.zeros((BM,), tl.float32) + 1.0",
        ),
    ),
    wrong(
        "12.5",
        "both tasks replicated",
        (
            "with tlx.async_task(num_warps=4):  # softmax of half 1",
            "with tlx.async_task(num_warps=4, replicate=2):  # softmax of half 1",
        ),
    ),
    wrong(
        "12.5",
        "two groups of two warps",
        (
            "with tlx.async_task(num_warps=4):  # softmax of half 1",
            "with tlx.async_task(num_warps=2):  # softmax of half 1",
        ),
    ),
    right(
        "12.5",
        "half 1 in the default task",
        ("0, j, m, l, scale_log2,", "1, j, m, l, scale_log2 * 1.0,"),
        ("out_ptr, 0, blocks, l, D, BM)", "out_ptr, 1, blocks, l * 1.0, D, BM)"),
        ("1, j, m, l, scale_log2,\n", "0, j, m, l, scale_log2,\n"),
        ("out_ptr, 1, blocks, l, D, BM)", "out_ptr, 0, blocks, l, D, BM)"),
    ),
    wrong(
        "12.5",
        "two buffers for good",
        ("acc_readys, acc_fulls, blocks, BUFFERS,", "acc_readys, acc_fulls, blocks, 2,"),
        ("2, D, BM, BN, BUFFERS,", "2, D, BM, BN, 2,"),
    ),
    wrong(
        "12.5",
        "half 1 walks the blocks from the last",
        ("1, j, m, l, scale_log2,", "1, blocks - 1 - j, m, l, scale_log2,"),
    ),
    wrong(
        "12.5",
        "a block too many in half 1",
        (
            'with tlx.async_task(num_warps=4):  # softmax of half 1\n            m = tl.full((BM,), float("-inf"), tl.float32)\n            l = tl.zeros((BM,), tl.float32)\n            for j in range(blocks):',
            'with tlx.async_task(num_warps=4):  # softmax of half 1\n            m = tl.full((BM,), float("-inf"), tl.float32)\n            l = tl.zeros((BM,), tl.float32)\n            for j in range(blocks + 1):',
        ),
    ),
    # ------------------------------------------------------------------------------------------ 12.6
    wrong("12.6", "empty only by the window", ("    if key_begin >= key_end:\n", "    if first + lo > last + hi:\n")),
    wrong("12.6", "bulk of some queries", ("full_begin = max(0, last + lo)", "full_begin = max(0, first + lo)")),
    wrong(
        "12.6",
        "the tail needs no mask",
        ("full_end = min(len_kv, first + hi + 1)", "full_end = min(-(-len_kv // block) * block, first + hi + 1)"),
    ),
    wrong(
        "12.6", "no bulk at all", ("bulk_end = min(max(full_end // block, bulk_begin), end)", "bulk_end = bulk_begin")
    ),
    wrong(
        "12.6",
        "a bulk that ends before it begins",
        ("bulk_end = min(max(full_end // block, bulk_begin), end)", "bulk_end = min(full_end // block, end)"),
    ),
    wrong(
        "12.6",
        "blocks of 16",
        ("begin, end = key_begin // block, -(-key_end // block)", "begin, end = key_begin // 16, -(-key_end // 16)"),
    ),
    wrong(
        "12.6",
        "in keys",
        (
            "return begin, bulk_begin, bulk_end, end",
            "return begin * block, bulk_begin * block, bulk_end * block, end * block",
        ),
    ),
    wrong(
        "12.6",
        "floats",
        (
            "begin, end = key_begin // block, -(-key_end // block)",
            "begin, end = key_begin / block // 1, -(-key_end / block // 1)",
        ),
    ),
    wrong(
        "12.6",
        "the package's own",
        source="def peel(first, last, len_kv, lo, hi, block):\n    from jfa.masks import Band\n\n    return Band(lo, hi).blocks(first, last, len_kv, block)\n",
    ),
    right(
        "12.6",
        "numpy over pairs",
        source="""
import numpy as np


def peel(first, last, len_kv, lo, hi, block):
    keys = np.arange(-(-len_kv // block) * block)
    real = keys < len_kv
    ends = np.array([first, last])[:, None]
    both = real & (keys >= ends + lo) & (keys <= ends + hi)
    some = real & (keys >= first + lo) & (keys <= last + hi)
    some, every = (x.reshape(-1, block) for x in (some, both.all(0)))
    some, every = np.flatnonzero(some.any(1)).tolist(), np.flatnonzero(every.all(1)).tolist()
    if not some:
        return 0, 0, 0, 0
    bulk = (every[0], every[-1] + 1) if every else (some[0], some[0])
    return some[0], *bulk, some[-1] + 1
""",
    ),
    wrong("12.6", "the window's upper side exclusive", ("last + hi + 1)", "last + hi)")),
    wrong("12.6", "the bulk's upper side exclusive", ("first + hi + 1)", "first + hi)")),
    wrong("12.6", "the last query excluded", ("full_begin = max(0, last + lo)", "full_begin = max(0, last - 1 + lo)")),
    wrong("12.6", "negative blocks", ("key_begin = max(0, first + lo)", "key_begin = first + lo")),
    wrong("12.6", "rounded down at the end", ("-(-key_end // block)", "key_end // block")),
    wrong("12.6", "one block more at the end", ("-(-key_end // block)", "key_end // block + 1")),
    # ------------------------------------------------------------------------------------------ 12.7
    wrong(
        "12.7",
        "all exponentials first",
        (HALVES + LEFT, HALVES + LEFT + MIDDLE + LAST),
        (ARRIVE_0 + MIDDLE, ARRIVE_0),
        (ARRIVE_1 + LAST, ARRIVE_1),
    ),
    wrong("12.7", "the middle slice arrives behind the last", (ARRIVE_1, ""), (ARRIVE_2, ARRIVE_2 + ARRIVE_1)),
    wrong("12.7", "the middle slice is never announced", (ARRIVE_1, "")),
    wrong("12.7", "the last slice arrives twice", (ARRIVE_2, ARRIVE_2 + ARRIVE_2)),
    wrong("12.7", "the middle slice is not waited for", (WAIT_1, "")),
    wrong("12.7", "parity of the next block", (WAIT_1, WAIT_1.replace("j & 1", "(j & 1) ^ 1"))),
    wrong("12.7", "always adds", (PV_0, PV_0.replace("j > 0", "True"))),
    wrong("12.7", "never adds", (PV_0, PV_0.replace("j > 0", "False"))),
    wrong("12.7", "O complete is told with each slice", (PV_0, PV_0.replace("force_async=True", "mBarriers=[done]"))),
    wrong(
        "12.7", "nobody is told", (PV_2.rstrip("\n"), PV_2.rstrip("\n").replace("mBarriers=[done]", "force_async=True"))
    ),
    wrong("12.7", "V in halves", ("tlx.local_slice(v, [64, 0], [32, D])", "tlx.local_slice(v, [32, 0], [32, D])")),
    wrong("12.7", "128 columns of V", ("tlx.local_slice(v, [0, 0], [64, D])", "tlx.local_slice(v, [0, 0], [64, 128])")),
    wrong("12.7", "right half first", ("left, right = halves(exponents)", "right, left = halves(exponents)")),
    wrong("12.7", "only the first slice is summed", (SUMS, "    return tl.sum(p_left, axis=1)\n")),
    wrong("12.7", "natural exponentials", (LAST, LAST.replace("tl.math.exp2", "tl.exp"))),
    right(
        "12.7", "the sum of slices added up", (SUMS, "    return tl.sum(p_left, 1) + tl.sum(p_middle + p_last, 1)\n")
    ),
    right(
        "12.7",
        "rows of V in slices of slices, and a commit",
        (
            "tlx.local_slice(v, [96, 0], [32, D])",
            "tlx.local_slice(tlx.local_slice(v, [64, 0], [64, D]), [32, 0], [32, D])",
        ),
        (
            PV_2.rstrip("\n"),
            "    tlx.async_dot(p, rows, acc, use_acc=True, force_async=True)\n    tlx.tcgen05_commit(done)",
        ),
    ),
    right(
        "12.7",
        "the slices' exponents of two halvings",
        (HALVES, "    pair = halves(exponents)\n    left = pair[0]\n    middle, last = halves(pair[1])\n"),
    ),
    # ------------------------------------------------------------------------------------------ 12.8
    wrong("12.8", "adds what the tile before left", (DUE_ADD, DUE_ADD.replace("place > 0", "step > 1"))),
    wrong(
        "12.8",
        "place of the tile, not of the step",
        (PLACE + STEP, STEP),
        (WORKED, f"        place = blocks - 1\n{WORKED}"),
    ),
    wrong("12.8", "place is never moved on", (PLACE, "")),
    wrong("12.8", "the step is not counted", (STEP, "")),
    wrong(
        "12.8",
        "counts tiles at their first block only for half 0",
        (WAIT_Q, WAIT_Q.replace("worked & 1", "(worked + half) & 1")),
    ),
    wrong("12.8", "never waits for Q", (WAIT_Q, "")),
    wrong("12.8", "never gives Q back", (GIVE_Q, "")),
    wrong("12.8", "gives Q back before the last S", (NEXT_S + GIVE_Q, GIVE_Q + NEXT_S)),
    wrong("12.8", "never says that O is complete", (TOLD, "")),
    wrong("12.8", "says it at the last step, before its P V", (TOLD, TOLD.replace("j == 0", "j + 1 == blocks"))),
    wrong(
        "12.8",
        "P V of this step",
        (
            "half, step - 1, place > 0, BUFFERS,\n                    )",
            "half, step, place > 0, BUFFERS,\n                    )",
        ),
    ),
    wrong("12.8", "S of the next step", (NEXT_S, NEXT_S.replace("half, step,", "half, step + 1,"))),
    wrong(
        "12.8",
        "one half behind the other",
        (
            "        for j in range(blocks):\n            for half in tl.static_range(2):\n",
            "        for half in tl.static_range(2):\n            for j in range(blocks):\n",
        ),
        (PLACE + STEP, "            place = blocks - 1\n            step += 1\n"),
    ),
    right(
        "12.8",
        "Q's wait ahead of the P V",
        (
            "                if step > 0:\n                    issue_pv(",
            f"{WAIT_Q}                if step > 0:\n                    issue_pv(",
        ),
        (
            f"                        tlx.tcgen05_commit(acc_fulls[half])\n{WAIT_Q}",
            "                        tlx.tcgen05_commit(acc_fulls[half])\n",
        ),
    ),
    right(
        "12.8",
        "counts worked tiles with their first block",
        (WORKED, ""),
        (PLACE, f"            if j == 0:\n                worked += 1\n{PLACE}"),
    ),
    # ------------------------------------------------------------------------------------------ 12.9
    wrong(
        "12.9",
        "always the third",
        source="def choose_split(reports, work):\n    return 2 if len(reports) > 2 else -1\n",
    ),
    wrong(
        "12.9",
        "most registers for the softmax",
        source="""
def choose_split(reports, work):
    legal = [i for i, r in enumerate(reports) if r["error"] is None and not r["setmaxnreg_ignored"]]
    return max(legal, key=lambda i: max(x["registers"] or 0 for x in reports[i]["roles"]), default=-1)
""",
    ),
    wrong("12.9", "whether there are spills at all", (BETTER, "if best is None or (path > 0, 0) < best:")),
    wrong("12.9", "loads only", (CYCLES, CYCLES.replace("(stored + loaded)", "loaded"))),
    wrong("12.9", "one thread's bytes", (CYCLES, CYCLES.replace(" * 32 * warps[name]", ""))),
    wrong("12.9", "128 threads for every role", (CYCLES, CYCLES.replace("32 * warps[name]", "128"))),
    wrong("12.9", "work alone", (TIME, "step = max(work.values())")),
    wrong("12.9", "slowest spill alone", (TIME, "step = max([path, *spills.values()])")),
    wrong("12.9", "equally fast: any", (BETTER, "if best is None or step < best[0]:")),
    wrong("12.9", "errors are not looked at", (COMPILED, 'compiled = not report["setmaxnreg_ignored"]')),
    wrong("12.9", "tensor memory is not looked at", (' and report["tmem"] <= 512', "")),
    wrong("12.9", "threads are not looked at", (' and report["threads"] <= 1024', "")),
    wrong("12.9", "shared memory of an SM", ("232_448", "233_472")),
    wrong("12.9", "None where none may ship", ("best, place = None, -1", "best, place = None, None")),
    wrong("12.9", "the first where none may ship", ("best, place = None, -1", "best, place = None, 0")),
    wrong(
        "12.9",
        "sorts the list it was given",
        ("    best, place = None, -1\n", '    reports.sort(key=lambda r: r["threads"])\n    best, place = None, -1\n'),
    ),
    right(
        "12.9",
        "in thousandths",
        (CYCLES, "spills[name] += 1000 * (stored + loaded) * warps[name] / 4"),
        (TIME, "step = max([path, *(1000 * work.get(name, 0) + cycles for name, cycles in spills.items())])"),
    ),
    right(
        "12.9",
        "spills as fractions",
        ("    best, place = None, -1\n", "    from fractions import Fraction\n\n    best, place = None, -1\n"),
        (CYCLES, "spills[name] += Fraction((stored + loaded) * warps[name], 4)"),
    ),
]
