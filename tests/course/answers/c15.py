"""Answers to chapter 15's exercises."""

from tests.course.answers import right, wrong

A_END = """        tlx.fence("async_shared")
        tlx.barrier_arrive(fulls[slot], 1, remote_cta_rank=0)
"""
LOAD_B = """        tlx.barrier_wait(empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(fulls[slot], 2 * 2 * BK * HALF, pred=rank == 0)
        box = [k * BK, rank * HALF]
        tlx.async_descriptor_load(b_desc, b[slot], box, fulls[slot], two_ctas=True)
"""
MULTIPLY = """    if rank == 0:
        for k in range(steps):
            slot, phase = place(k, STAGES)
            free = [empties[slot]]
            tlx.barrier_wait(fulls[slot], phase)
            tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k > 0, mBarriers=free, two_ctas=True)
        tlx.tcgen05_commit(done[0], two_ctas=True)
"""
FIRST = '        tlx.local_store(inbox[0], tl.full((R,), float("-inf"), tl.float32))\n        tlx.cluster_barrier()\n'
SECOND = "            tlx.remote_shmem_store(inbox[0], mine, 1 - rank)\n        tlx.cluster_barrier()\n"
GIVE = """        mine = made(ds_ptr, keys, rank, (2 * j + rank) * HALF, queries, BN, HALF)
        other = made(ds_ptr, keys, rank, (2 * j + 1 - rank) * HALF, queries, BN, HALF)
        tlx.local_store(parts[part], mine)
        tlx.local_store(staging[slot], other)
        tlx.fence("async_shared")
        tlx.async_remote_shmem_copy(parts[part], staging[slot], 1 - rank, come[slot])
        tlx.barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0)
"""
PASS = """        tlx.barrier_expect_bytes(come[slot], 2 * BN * HALF)
        tlx.barrier_wait(come[slot], phase)
        tlx.barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0)
"""
FREE = "        tlx.barrier_wait(ds_empties[slot], phase ^ 1)\n"
EXPECT5 = "tlx.barrier_expect_bytes(full, 2 * 2 * (BM + HALF) * BK, pred=rank == 0)"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 15.1
    wrong("15.1", "A halved as well", ("a + n * k, alloc", "a // 2 + n * k, alloc")),
    wrong("15.1", "B whole in the pair", ("a + n * k, alloc", "a + 2 * n * k, alloc")),
    wrong("15.1", "both CTAs' A", ("a + n * k, alloc", "2 * a + n * k, alloc")),
    wrong("15.1", "A from tensor memory counted", ("0 if a_in_tmem else 2 * m * k", "2 * m * k")),
    wrong("15.1", "a_in_tmem the other way", ("0 if a_in_tmem else 2 * m * k", "2 * m * k if a_in_tmem else 0")),
    wrong("15.1", "elements", ("2 * m * k\n", "m * k\n"), ("a + 2 * n * k, a + n * k", "a + n * k, a + n * k // 2")),
    wrong("15.1", "fp32", ("2 * m * k\n", "4 * m * k\n"), ("a + 2 * n * k, a + n * k", "a + 4 * n * k, a + 2 * n * k")),
    wrong("15.1", "no least allocation", ("size = 32", "size = 1")),
    wrong("15.1", "no powers of two", ("allocated(n), allocated(folded)", "max(32, n), max(32, folded)")),
    wrong("15.1", "the next power, even where it fits", ("while size < columns", "while size <= columns")),
    wrong("15.1", "multiples of 32", ("allocated(n), allocated(folded)", "-(-n // 32) * 32, -(-folded // 32) * 32")),
    wrong("15.1", "folds with 128 rows", ("n // 2 if m == 64 else n", "n // 2")),
    wrong("15.1", "never folds", ("n // 2 if m == 64 else n", "n")),
    wrong("15.1", "one CTA folds as well", ("allocated(n), allocated(folded)", "allocated(folded), allocated(folded)")),
    wrong("15.1", "half of what is allocated", ("allocated(folded)", "allocated(n) // (2 if m == 64 else 1)")),
    right(
        "15.1",
        "bit lengths",
        source="""
def traffic(m: int, n: int, k: int, a_in_tmem: bool):
    of_a = int(not a_in_tmem) * m * k * 2
    of_b = n * k * 2
    power = lambda c: max(32, 1 << (c - 1).bit_length())
    return (of_a + of_b, of_a + of_b // 2, power(n), power(-(-n // (128 // m))))
""",
    ),
    right(
        "15.1",
        "math.log2",
        source="""
import math

def columns(n):
    return max(32, 2 ** math.ceil(math.log2(n)))

def traffic(m, n, k, a_in_tmem):
    a = 0
    if not a_in_tmem:
        a = m * k * 2
    print(a)
    if m == 64:
        pair = columns(n / 2)
    else:
        pair = columns(n)
    return [a + n * k * 2, a + n * k, columns(n), pair]
""",
    ),
    # ------------------------------------------------------------------------------------------ 15.2
    wrong("15.2", "arrives at home", (A_END, A_END.replace(", 1, remote_cta_rank=0", ", 1"))),
    wrong("15.2", "arrives at the peer", (A_END, A_END.replace("remote_cta_rank=0", "remote_cta_rank=1"))),
    wrong(
        "15.2",
        "only the leader arrives",
        (
            A_END,
            A_END.replace(
                "        tlx.barrier_arrive",
                "        if row == tl.program_id(0) // 2 * 2 * BM:\n            tlx.barrier_arrive",
            ),
        ),
    ),
    wrong("15.2", "arrives with 2 each", (A_END, A_END.replace("fulls[slot], 1", "fulls[slot], 2"))),
    wrong("15.2", "no fence", (A_END, A_END.splitlines(True)[1])),
    wrong("15.2", "the fence after the arrival", (A_END, A_END.splitlines(True)[1] + A_END.splitlines(True)[0])),
    wrong("15.2", "both CTAs announce", (LOAD_B, LOAD_B.replace(", pred=rank == 0", ""))),
    wrong("15.2", "bytes of one half", (LOAD_B, LOAD_B.replace("2 * 2 * BK", "2 * BK"))),
    wrong(
        "15.2", "each announces its own", (LOAD_B, LOAD_B.replace("2 * 2 * BK * HALF, pred=rank == 0", "2 * BK * HALF"))
    ),
    wrong("15.2", "not as a pair", (LOAD_B, LOAD_B.replace(", two_ctas=True", ""))),
    wrong("15.2", "both load the first half", (LOAD_B, LOAD_B.replace("rank * HALF", "0"))),
    wrong("15.2", "the other half", (LOAD_B, LOAD_B.replace("rank * HALF", "(1 - rank) * HALF"))),
    wrong("15.2", "rows without BK", (LOAD_B, LOAD_B.replace("k * BK, rank", "k, rank"))),
    wrong("15.2", "B does not wait", (LOAD_B, LOAD_B.split("\n", 1)[1])),
    wrong("15.2", "B waits on the same parity", (LOAD_B, LOAD_B.replace("phase ^ 1", "phase"))),
    wrong("15.2", "both CTAs multiply", (MULTIPLY, MULTIPLY.replace("if rank == 0:", "if True:"))),
    wrong("15.2", "the other CTA multiplies", (MULTIPLY, MULTIPLY.replace("if rank == 0:", "if rank == 1:"))),
    wrong(
        "15.2", "not a pair's product", (MULTIPLY, MULTIPLY.replace("mBarriers=free, two_ctas=True", "mBarriers=free"))
    ),
    wrong("15.2", "slots never freed", (MULTIPLY, MULTIPLY.replace("mBarriers=free, ", ""))),
    wrong(
        "15.2",
        "done told at home only",
        (MULTIPLY, MULTIPLY.replace("commit(done[0], two_ctas=True)", "commit(done[0])")),
    ),
    wrong(
        "15.2",
        "done told with each slice",
        (MULTIPLY, MULTIPLY.replace("        tlx.tcgen05_commit", "            tlx.tcgen05_commit")),
    ),
    wrong(
        "15.2",
        "done by an arrival",
        (
            MULTIPLY,
            MULTIPLY.replace(
                "tlx.tcgen05_commit(done[0], two_ctas=True)",
                "tlx.barrier_arrive(done[0], 1, remote_cta_rank=0)\n        tlx.barrier_arrive(done[0], 1, remote_cta_rank=1)",
            ),
        ),
    ),
    wrong("15.2", "adds from the first slice", (MULTIPLY, MULTIPLY.replace("use_acc=k > 0", "use_acc=True"))),
    wrong("15.2", "never adds", (MULTIPLY, MULTIPLY.replace("use_acc=k > 0", "use_acc=False"))),
    right(
        "15.2",
        "the leader by an if, B's box in place",
        (
            LOAD_B,
            "        tlx.barrier_wait(empties[slot], phase ^ 1)\n        full = fulls[slot]\n        if rank == 0:\n            tlx.barrier_expect_bytes(full, 4 * BK * HALF)\n        tlx.async_descriptor_load(b_desc, b[slot], [k * BK, HALF * rank], full, two_ctas=True)\n",
        ),
    ),
    right(
        "15.2",
        "commit for each slot",
        (
            MULTIPLY,
            MULTIPLY.replace(
                "mBarriers=free, two_ctas=True)\n",
                "two_ctas=True, force_async=True)\n            tlx.tcgen05_commit(empties[slot], two_ctas=True)\n",
            ).replace("            free = [empties[slot]]\n", ""),
        ),
    ),
    # ------------------------------------------------------------------------------------------ 15.3
    wrong("15.3", "only the first barrier", (SECOND, SECOND.splitlines(True)[0])),
    wrong("15.3", "as it was", (FIRST, FIRST.splitlines(True)[0] + "        pass\n")),
    wrong(
        "15.3",
        "barriers before the filling and before the reading",
        (FIRST, "        tlx.cluster_barrier()\n" + FIRST.splitlines(True)[0]),
    ),
    wrong(
        "15.3",
        "a barrier after the reading instead",
        (FIRST, FIRST.splitlines(True)[0]),
        (
            "tl.maximum(mine, tlx.local_load(inbox[0])))\n",
            "tl.maximum(mine, tlx.local_load(inbox[0])))\n        tlx.cluster_barrier()\n",
        ),
    ),
    right(
        "15.3",
        "the filling once: who sends nothing never sends",
        (FIRST, "        tlx.cluster_barrier()\n"),
        (
            "    for j in range(blocks):\n",
            '    tlx.local_store(inbox[0], tl.full((R,), float("-inf"), tl.float32))\n    for j in range(blocks):\n',
        ),
    ),
    wrong(
        "15.3",
        "barrier in the first block only",
        (
            FIRST,
            FIRST.replace("        tlx.cluster_barrier()\n", "        if j == 0:\n            tlx.cluster_barrier()\n"),
        ),
    ),
    wrong(
        "15.3",
        "only one CTA at the barrier",
        (
            FIRST,
            FIRST.replace(
                "        tlx.cluster_barrier()\n", "        if rank == 0:\n            tlx.cluster_barrier()\n"
            ),
        ),
    ),
    wrong("15.3", "filled with zero", (FIRST, FIRST.replace('float("-inf")', "0.0"))),
    wrong("15.3", "a CTA barrier", (FIRST, FIRST.replace("tlx.cluster_barrier()", "tl.debug_barrier()"))),
    right(
        "15.3",
        "sends always: minus infinity where no column exists",
        ("        if rank * C < columns:\n            tlx.remote", "        if True:\n            tlx.remote"),
        (FIRST, "        tlx.cluster_barrier()\n"),
    ),
    wrong(
        "15.3",
        "everything by one CTA",
        source="""
@triton.jit
def neighbour_kernel(x_ptr, out_ptr, blocks, columns, R: tl.constexpr, C: tl.constexpr):
    rank = tlx.cluster_cta_rank()
    at = tl.arange(0, 2 * C)
    for j in range(blocks):
        rows = j * R + tl.arange(0, R)
        x = tl.load(x_ptr + rows[:, None] * columns + at[None, :], mask=at[None, :] < columns, other=float("-inf"))
        if rank == 0:
            tl.store(out_ptr + rows, tl.max(x, 1))
""",
    ),
    right("15.3", "three barriers", (FIRST, "        tlx.cluster_barrier()\n" + FIRST)),
    right(
        "15.3",
        "fills after the reading",
        (FIRST, ""),
        (
            "    for j in range(blocks):\n",
            '    tlx.local_store(inbox[0], tl.full((R,), float("-inf"), tl.float32))\n    tlx.cluster_barrier()\n    for j in range(blocks):\n',
        ),
        (
            "tl.maximum(mine, tlx.local_load(inbox[0])))\n",
            'tl.maximum(mine, tlx.local_load(inbox[0])))\n        tlx.local_store(inbox[0], tl.full((R,), float("-inf"), tl.float32))\n        tlx.cluster_barrier()\n',
        ),
    ),
    # ------------------------------------------------------------------------------------------ 15.4
    wrong("15.4", "slot not waited for", (FREE, "")),
    wrong("15.4", "the same parity", (FREE, FREE.replace("phase ^ 1", "phase"))),
    wrong(
        "15.4",
        "halves exchanged",
        (
            GIVE,
            GIVE.replace("(2 * j + rank)", "(2 * j + 1 - rank)", 1).replace(
                "other = made(ds_ptr, keys, rank, (2 * j + 1 - rank)", "other = made(ds_ptr, keys, rank, (2 * j + rank)"
            ),
        ),
    ),
    wrong("15.4", "the peer's part", (GIVE, GIVE.replace("copy(parts[part]", "copy(parts[2 * slot + 1 - rank]"))),
    wrong("15.4", "part without the slot", ("part = 2 * slot + rank", "part = rank")),
    wrong("15.4", "part by rank first", ("part = 2 * slot + rank", "part = 2 * rank + slot")),
    wrong("15.4", "copied to itself", (GIVE, GIVE.replace("1 - rank, come", "rank, come"))),
    wrong("15.4", "one staging tile", (GIVE, GIVE.replace("staging[slot]", "staging[0]"))),
    wrong("15.4", "no fence", (GIVE, GIVE.replace('        tlx.fence("async_shared")\n', ""))),
    wrong("15.4", "tells at home", (GIVE, GIVE.replace(", 1, remote_cta_rank=0", ", 1"))),
    wrong(
        "15.4",
        "tells twice, the relay never",
        (GIVE, GIVE.replace("ds_fulls[slot], 1", "ds_fulls[slot], 2")),
        (PASS, PASS.replace("        tlx.barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0)\n", "")),
    ),
    wrong("15.4", "the relay does not wait", (PASS, PASS.replace("        tlx.barrier_wait(come[slot], phase)\n", ""))),
    wrong("15.4", "the relay announces nothing", (PASS, PASS.split("\n", 1)[1])),
    wrong("15.4", "bytes of both halves", (PASS, PASS.replace("2 * BN * HALF", "4 * BN * HALF"))),
    wrong("15.4", "elements for bytes", (PASS, PASS.replace("2 * BN * HALF", "BN * HALF"))),
    wrong("15.4", "the relay's phase by j", (PASS, PASS.replace("come[slot], phase", "come[slot], j & 1"))),
    wrong("15.4", "the relay tells at home", (PASS, PASS.replace(", 1, remote_cta_rank=0", ", 1"))),
    wrong(
        "15.4",
        "a CTA without keys stays out",
        (GIVE, "        if rank * BN < keys:\n" + "".join("    " + x for x in GIVE.splitlines(True))),
    ),
    wrong(
        "15.4",
        "all blocks from slot 0",
        ("        slot, phase = place(j, 2)\n        part", "        slot, phase = place(j, 1)\n        part"),
        (
            "        slot, phase = place(j, 2)\n        tlx.barrier_expect",
            "        slot, phase = place(j, 1)\n        tlx.barrier_expect",
        ),
    ),
    wrong(
        "15.4",
        "two copies per block",
        (
            GIVE,
            GIVE.replace(
                "        tlx.async_remote",
                "        tlx.async_remote_shmem_copy(parts[part], staging[slot], 1 - rank, come[slot])\n        tlx.async_remote",
            ),
        ),
        (PASS, PASS.replace("2 * BN * HALF", "4 * BN * HALF")),
    ),
    wrong(
        "15.4",
        "store by threads",
        (
            GIVE,
            GIVE.replace(
                "tlx.async_remote_shmem_copy(parts[part], staging[slot], 1 - rank, come[slot])",
                "tlx.remote_shmem_store(parts[part], other.to(tl.bfloat16), 1 - rank)\n        tlx.barrier_arrive(come[slot], 1, remote_cta_rank=1 - rank)",
            ),
        ),
        (PASS, PASS.split("\n", 1)[1]),
    ),
    right(
        "15.4",
        "the other half first",
        (
            GIVE,
            """        other = made(ds_ptr, keys, rank, (2 * j + 1 - rank) * HALF, queries, BN, HALF)
        tlx.local_store(staging[slot], other)
        tlx.fence("async_shared")
        tlx.async_remote_shmem_copy(parts[part], staging[slot], 1 - rank, come[slot])
        mine = made(ds_ptr, keys, rank, (2 * j + rank) * HALF, queries, BN, HALF)
        tlx.local_store(parts[part], mine)
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0)
""",
        ),
    ),
    right(
        "15.4",
        "made before the slot is free",
        (FREE, ""),
        (GIVE, GIVE.replace("        tlx.local_store(parts", FREE + "        tlx.local_store(parts")),
    ),
    # ------------------------------------------------------------------------------------------ 15.5
    wrong(
        "15.5",
        "as many turns, no bytes of the absent",
        ("            turns = steps\n", "            turns = steps\n            real = tl.where(row < end, 2, 1)\n"),
        (EXPECT5, EXPECT5.replace("2 * 2 *", "2 * real *")),
    ),
    wrong(
        "15.5",
        "only A left out",
        (
            "                tlx.async_descriptor_load(a_desc, a[slot], [row, k * BK], full, two_ctas=True)\n",
            "                if row < end:\n                    tlx.async_descriptor_load(a_desc, a[slot], [row, k * BK], full, two_ctas=True)\n",
        ),
    ),
    wrong(
        "15.5",
        "rows of the next sequence written",
        ("leave(c_ptr, acc[0], done[0], row, end)", "leave(c_ptr, acc[0], done[0], row, row + BM)"),
    ),
    wrong(
        "15.5",
        "rows of the pair",
        ("leave(c_ptr, acc[0], done[0], row, end)", "leave(c_ptr, acc[0], done[0], row, tl.load(record) + 2 * BM)"),
    ),
    wrong("15.5", "bytes announced by both", (EXPECT5, EXPECT5.replace(", pred=rank == 0", ""))),
    wrong("15.5", "bytes of one CTA", (EXPECT5, EXPECT5.replace("2 * 2 *", "2 *"))),
    wrong("15.5", "single products for odd tiles", ("mBarriers=free, two_ctas=True", "mBarriers=free, two_ctas=False")),
    wrong(
        "15.5",
        "the leader's length for both, one slice short",
        ("            turns = steps\n", "            turns = tl.where(row < end, steps, steps - 1)\n"),
    ),
    wrong(
        "15.5",
        "both CTAs multiply",
        ("            if rank == 0:\n                for k", "            if True:\n                for k"),
    ),
    wrong("15.5", "slots not waited for", ("                tlx.barrier_wait(empties[slot], phase ^ 1)\n", "")),
    right(
        "15.5",
        "rows clipped to a real one",
        ("            turns = steps\n            for k in range(turns):\n", "            for k in range(steps):\n"),
        ("[row, k * BK]", "[tl.where(row < end, row, end - 1), k * BK]"),
    ),
    right(
        "15.5",
        "loads by the record's row",
        (
            "            turns = steps\n            for k in range(turns):\n",
            "            first = tl.load(record)\n            for k in range(0, steps):\n",
        ),
        ("[row, k * BK]", "[first + BM * rank, k * BK]"),
    ),
    # ------------------------------------------------------------------------------------------ 15.6
    wrong(
        "15.6",
        "deterministic first",
        ("    if deterministic:\n        return", "    if False:\n        return"),
        (
            "    if broadcast_q and",
            '    if deterministic:\n        return "single", "deterministic: a kernel of its own"\n    if broadcast_q and',
        ),
    ),
    wrong("15.6", "fewer than 128", ("group <= 128", "group < 128")),
    wrong("15.6", "the group forgotten", ("lengths_q[0] * group <= 128", "lengths_q[0] <= 128")),
    wrong(
        "15.6", "resident without shared queries", ("if broadcast_q and lengths_q[0]", "if lengths_q and lengths_q[0]")
    ),
    wrong("15.6", "resident by sharing alone", ("if broadcast_q and lengths_q[0] * group <= 128", "if broadcast_q")),
    wrong("15.6", "head_dim below 64", ("head_dim <= 64", "head_dim < 64")),
    wrong("15.6", "at most 512 keys", ("keys < 512", "keys <= 512")),
    wrong("15.6", "empty sequences in the mean", ("[n for n in lengths_kv if n > 0]", "lengths_kv")),
    wrong("15.6", "mean of the queries", ("[n for n in lengths_kv if n > 0]", "[n for n in lengths_q if n > 0]")),
    wrong(
        "15.6", "mean rounded", ("sum(lengths) // max(len(lengths), 1)", "round(sum(lengths) / max(len(lengths), 1))")
    ),
    wrong(
        "15.6",
        "mean rounded in the words",
        ('f"{keys} keys per sequence fill', 'f"{sum(lengths) / len(lengths):.0f} keys per sequence fill'),
    ),
    wrong("15.6", "no keys: an error", ("max(len(lengths), 1)", "len(lengths)")),
    wrong("15.6", "the longest", ("sum(lengths) // max(len(lengths), 1)", "max(lengths, default=0)")),
    wrong(
        "15.6",
        "the queries' number for the product",
        ('f"{lengths_q[0] * group} queries in all', 'f"{lengths_q[0]} queries in all'),
    ),
    wrong("15.6", "no number", ('f"{keys} keys per sequence would leave', '"too few keys per sequence would leave')),
    wrong("15.6", "head_dim as a word", ('f"head_dim {head_dim}: the', '"head_dim small: the')),
    wrong(
        "15.6",
        "long reason of everything",
        ('return "pair", f"{keys} keys', 'return "pair", f"{keys // 1024 * 1024} keys'),
    ),
    right(
        "15.6",
        "a table",
        source="""
def backward_form(lengths_q, lengths_kv, head_dim, group, broadcast_q, deterministic):
    there = [n for n in lengths_kv if n]
    mean = int(sum(there) / len(there)) if there else 0
    product = lengths_q[0] * group if broadcast_q else None
    table = [
        (product is not None and product <= 128, "resident", f"only {product} queries share a key head"),
        (deterministic, "single", "it must be deterministic"),
        (head_dim <= 64, "single", f"narrow heads: {head_dim}"),
        (mean < 512, "single", f"on average {mean} keys"),
        (True, "pair", f"on average {mean} keys"),
    ]
    return next((form, why) for fits, form, why in table if fits)
""",
    ),
    right(
        "15.6",
        "torch means",
        source='''
import torch

def backward_form(lengths_q: list, lengths_kv: list, head_dim: int, group: int, broadcast_q: bool, deterministic: bool) -> tuple[str, str]:
    """Nested."""
    if broadcast_q:
        shared = group * lengths_q[0]
        if not shared > 128:
            return "resident", "queries: " + str(shared)
    k = torch.tensor(lengths_kv, dtype=torch.int64)
    k = k[k > 0]
    mean = int(k.sum()) // k.numel() if k.numel() else 0
    if deterministic or head_dim <= 64 or mean < 512:
        why = "deterministic" if deterministic else f"D = {head_dim}" if head_dim <= 64 else f"{mean} keys"
        return "single", why
    return "pair", f"{mean} keys"
''',
    ),
]
