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

WAIT_B, EXPECT_B, BOX_B, FETCH_B = LOAD_B.splitlines(True)
COPY = "        tlx.async_remote_shmem_copy(parts[part], staging[slot], 1 - rank, come[slot])\n"
TELL = "        tlx.barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0)\n"
FENCE = '        tlx.fence("async_shared")\n'
TURNS5 = "            turns = steps\n"
LOADS5 = """                tlx.async_descriptor_load(a_desc, a[slot], [row, k * BK], full, two_ctas=True)
                box = [k * BK, rank * HALF]
                tlx.async_descriptor_load(b_desc, b[slot], box, full, two_ctas=True)
"""
COMMIT5 = "                tlx.tcgen05_commit(done[0], two_ctas=True)\n"
FILLED = 'tlx.local_store(inbox[0], tl.full((R,), float("-inf"), tl.float32))\n'

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
    wrong("15.1", "folds below 64 rows", ("m == 64", "m < 64")),
    wrong("15.1", "the leader reads both CTAs' B", ("a + n * k, allocated", "a + 4 * n * k, allocated")),
    wrong("15.1", "half of B for the single CTA, too", ("a + 2 * n * k, a", "a + n * k, a")),
    wrong("15.1", "C read as well", ("a + 2 * n * k, a + n * k", "a + 2 * n * k + 4 * m * n, a + n * k + 4 * m * n")),
    wrong("15.1", "a depth of 64", ("2 * m * k\n", "2 * m * 64\n"), ("2 * n * k, a + n * k", "2 * n * 64, a + n * 64")),
    wrong("15.1", "128 rows for A", ("2 * m * k\n", "2 * 128 * k\n")),
    wrong("15.1", "columns of two CTAs", ("allocated(n), allocated(folded)", "allocated(n), 2 * allocated(folded)")),
    wrong(
        "15.1",
        "the nearest power",
        (
            "        size = 32\n        while size < columns:\n            size *= 2\n        return size\n",
            "        return max(32, 2 ** round(__import__('math').log2(columns)))\n",
        ),
    ),
    wrong(
        "15.1",
        "the bit length, also of a power",
        (
            "        size = 32\n        while size < columns:\n            size *= 2\n        return size\n",
            "        return max(32, 1 << columns.bit_length())\n",
        ),
    ),
    wrong(
        "15.1",
        "A in tensor memory takes columns of C",
        (
            "allocated(n), allocated(folded)",
            "allocated(n + a_in_tmem * k // 2), allocated(folded + a_in_tmem * k // 2)",
        ),
    ),
    wrong("15.1", "pair and one exchanged", ("a + 2 * n * k, a + n * k", "a + n * k, a + 2 * n * k")),
    right(
        "15.1",
        "half of the allocation, at least 32",
        ("allocated(n), allocated(folded)", "allocated(n), max(32, allocated(n) * m // 128)"),
    ),
    right(
        "15.1",
        "torch, and a list of sizes",
        source='''
def traffic(m, n, k, a_in_tmem):
    """Rows, columns, depth: bytes by numel."""
    sizes = torch.tensor([32, 64, 128, 256, 512])
    elements = {"a": torch.Size([m, k]).numel(), "b": torch.Size([k, n]).numel()}
    if a_in_tmem:
        elements["a"] -= elements["a"]
    one = sum(elements.values()) * 2
    pair = one - elements["b"]
    columns = [int(sizes[torch.searchsorted(sizes, c)]) for c in (n, n if m > 64 else n // 2)]
    return one, pair, *columns
''',
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
    right(
        "15.2",
        "arrives in both CTAs: nobody waits in the second",
        (A_END, A_END + "        tlx.barrier_arrive(fulls[slot], 1, remote_cta_rank=1)\n"),
    ),
    wrong("15.2", "the phase by turns, not by rounds", (LOAD_B, LOAD_B.replace("phase ^ 1", "(k & 1) ^ 1"))),
    wrong("15.2", "two stages for good", (LOAD_B, "        slot, phase = place(k, 2)\n" + LOAD_B)),
    wrong("15.2", "slices of 16", (LOAD_B, LOAD_B.replace("BK", "16"))),
    wrong("15.2", "halves of 32 columns", (LOAD_B, LOAD_B.replace("HALF", "32"))),
    wrong("15.2", "announces before the slot is free", (WAIT_B + EXPECT_B, EXPECT_B + WAIT_B)),
    wrong("15.2", "the next slice", (BOX_B, BOX_B.replace("k * BK", "(k + 1) * BK"))),
    wrong("15.2", "only the leader loads", (FETCH_B, "        if rank == 0:\n    " + FETCH_B)),
    wrong("15.2", "the peer announces", (EXPECT_B, EXPECT_B.replace("rank == 0", "rank == 1"))),
    wrong(
        "15.2",
        "announced twice, a half each",
        (EXPECT_B, EXPECT_B.replace("2 * 2 *", "2 *") + EXPECT_B.replace("2 * 2 *", "2 *")),
    ),
    wrong(
        "15.2",
        "waits for the other phase of a slice",
        (MULTIPLY, MULTIPLY.replace("fulls[slot], phase)", "fulls[slot], phase ^ 1)")),
    ),
    wrong("15.2", "the first slice does not count", (MULTIPLY, MULTIPLY.replace("k > 0", "k > 1"))),
    wrong("15.2", "one slice short", (MULTIPLY, MULTIPLY.replace("range(steps)", "range(steps - 1)"))),
    wrong("15.2", "the first slot's A", (MULTIPLY, MULTIPLY.replace("a[slot]", "a[0]"))),
    wrong(
        "15.2",
        "slots freed at home only",
        (
            MULTIPLY,
            MULTIPLY.replace(
                "mBarriers=free, two_ctas=True)\n",
                "two_ctas=True, force_async=True)\n            tlx.tcgen05_commit(free[0])\n",
            ),
        ),
    ),
    right(
        "15.2",
        "both CTAs commit done: only the leader's counts",
        (MULTIPLY, MULTIPLY.replace("        tlx.tcgen05_commit", "    tlx.tcgen05_commit")),
    ),
    wrong(
        "15.2",
        "done after the first slice",
        (
            MULTIPLY,
            MULTIPLY.replace(
                "        tlx.tcgen05_commit(", "            if k == 0:\n                tlx.tcgen05_commit("
            ),
        ),
    ),
    right(
        "15.2",
        "done with the last slice, counters by hand",
        (
            MULTIPLY,
            """    if rank == 0:
        slot, phase, k = 0, 0, 0
        while k < steps:
            tlx.barrier_wait(fulls[slot], phase)
            if k + 1 < steps:
                told = [empties[slot]]
                tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k != 0, mBarriers=told, two_ctas=True)
            else:
                last = [empties[slot], done[0]]
                tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k != 0, mBarriers=last, two_ctas=True)
            k += 1
            slot += 1
            if slot == STAGES:
                slot, phase = 0, phase ^ 1
""",
        ),
        (LOAD_B, LOAD_B.replace("2 * 2 * BK * HALF", "BK * 4 * HALF").replace("phase ^ 1", "1 - phase")),
    ),
    right(
        "15.2",
        "helpers, and no wait in the first round",
        (
            LOAD_B,
            """        if k >= STAGES:
            tlx.barrier_wait(empties[slot], phase ^ 1)
        bring_half(b_desc, b[slot], fulls[slot], k, rank)
""",
        ),
        (
            MULTIPLY,
            MULTIPLY
            + '''

@triton.jit
def bring_half(desc, tile, full, k, rank):
    """One CTA's half of a slice; the leader's barrier counts both."""
    ROWS: tl.constexpr = desc.block_shape[0]
    COLUMNS: tl.constexpr = desc.block_shape[1]
    BOTH: tl.constexpr = 2 * ROWS * COLUMNS * 2
    if rank == 0:
        tlx.barrier_expect_bytes(full, BOTH)
    tlx.async_descriptor_load(desc, tile, [ROWS * k, COLUMNS * rank], full, two_ctas=True)
''',
        ),
        (A_END, "        arrives_at = fulls[slot]\n" + A_END.replace("fulls[slot], 1, ", "arrives_at, ")),
    ),
    # ------------------------------------------------------------------------------------------ 15.3
    wrong("15.3", "only the first barrier", (SECOND, SECOND.splitlines(True)[0])),
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
    wrong(
        "15.3",
        "two inboxes in turn, still one barrier",
        ("(R,), tl.float32, 1)", "(R,), tl.float32, 2)"),
        (FIRST, FIRST.splitlines(True)[0].replace("inbox[0]", "inbox[j % 2]")),
        (SECOND, SECOND.replace("inbox[0]", "inbox[j % 2]")),
        ("tlx.local_load(inbox[0])", "tlx.local_load(inbox[j % 2])"),
    ),
    wrong("15.3", "sends twice", (SECOND, SECOND.splitlines(True)[0] + SECOND)),
    wrong(
        "15.3",
        "sends behind both barriers",
        (
            "        if rank * C < columns:\n" + SECOND,
            "        tlx.cluster_barrier()\n        if rank * C < columns:\n" + SECOND.splitlines(True)[0],
        ),
    ),
    wrong(
        "15.3",
        "fills the other's inbox",
        (
            FIRST,
            FIRST.replace("tlx.local_store(inbox[0], ", "tlx.remote_shmem_store(inbox[0], ").replace(
                "tl.float32))\n", "tl.float32), 1 - rank)\n"
            ),
        ),
    ),
    wrong(
        "15.3",
        "32 columns for good",
        ("at = rank * C + tl.arange(0, C)", "at = rank * 32 + tl.arange(0, 32)"),
        ("if rank * C < columns", "if rank * 32 < columns"),
    ),
    wrong(
        "15.3",
        "blocks of 32 rows for good",
        ("rows = j * R + tl.arange(0, R)", "rows = j * 32 + tl.arange(0, 32)"),
        ("(R,), tl.float32, 1)", "(32,), tl.float32, 1)"),
        (FIRST, FIRST.replace("(R,)", "(32,)")),
    ),
    wrong(
        "15.3",
        "reads before the second barrier",
        (
            SECOND,
            SECOND.splitlines(True)[0] + "        theirs = tlx.local_load(inbox[0])\n        tlx.cluster_barrier()\n",
        ),
        ("tlx.local_load(inbox[0]))", "theirs)"),
    ),
    wrong(
        "15.3",
        "a barrier for odd blocks",
        (
            FIRST,
            FIRST.replace(
                "        tlx.cluster_barrier()\n", "        if j % 2 == 1:\n            tlx.cluster_barrier()\n"
            ),
        ),
    ),
    wrong(
        "15.3",
        "filled before the loop only, sends nothing",
        (FIRST, ""),
        ("    for j in range(blocks):\n", "    " + FILLED + "    for j in range(blocks):\n"),
    ),
    wrong("15.3", "the block before", ("tl.store(out_ptr + rows, ", "tl.store(out_ptr + rows - (j > 0) * R, ")),
    wrong(
        "15.3", "the own maximum is lost", ("tl.maximum(mine, tlx.local_load(inbox[0])))", "tlx.local_load(inbox[0]))")
    ),
    right(
        "15.3",
        "two inboxes, filled again behind the reading",
        source='''
@triton.jit
def neighbour_kernel(x_ptr, out_ptr, blocks, columns, R: tl.constexpr, C: tl.constexpr):
    """One barrier per block: between a reading and the next store into that inbox lies the other inbox's block."""
    rank = tlx.cluster_cta_rank()
    inbox = tlx.local_alloc((R,), tl.float32, 2)
    nothing = tl.full((R,), float("-inf"), tl.float32)
    for n in tl.static_range(2):
        tlx.local_store(inbox[n], nothing)
    tlx.cluster_barrier()
    for j in range(blocks):
        rows = j * R + tl.arange(0, R)
        at = rank * C + tl.arange(0, C)
        x = tl.load(x_ptr + rows[:, None] * columns + at[None, :], mask=at[None, :] < columns, other=float("-inf"))
        mine = tl.max(x, 1)
        if rank * C < columns:
            tlx.remote_shmem_store(inbox[j % 2], mine, 1 - rank)
        tlx.cluster_barrier()
        theirs = tlx.local_load(inbox[j % 2])
        tlx.local_store(inbox[j % 2], nothing)
        if rank == 0:
            tl.store(out_ptr + rows, tl.maximum(mine, theirs))
''',
    ),
    right(
        "15.3",
        "only the second CTA sends: nobody reads its inbox",
        ("        if rank * C < columns:\n", "        if (rank == 1) & (C < columns):\n"),
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
    wrong("15.4", "halves of 64 queries", (GIVE, GIVE.replace("rank) * HALF", "rank) * 64"))),
    wrong("15.4", "64 keys for the bytes", (PASS, PASS.replace("BN * HALF", "64 * 64"))),
    wrong("15.4", "told of the other slot", (PASS, PASS.replace("ds_fulls[slot]", "ds_fulls[slot ^ 1]"))),
    wrong("15.4", "waits for the other slot", (PASS, PASS.replace("come[slot]", "come[1 - slot]"))),
    wrong("15.4", "announces behind the wait", (PASS, "".join(PASS.splitlines(True)[i] for i in (1, 0, 2)))),
    wrong("15.4", "the copy before the fence", (FENCE + COPY, COPY + FENCE)),
    wrong("15.4", "copied to the leader", (COPY, COPY.replace("1 - rank", "0"))),
    wrong("15.4", "the own part is copied", (COPY, COPY.replace("staging[slot], 1", "parts[part], 1"))),
    wrong("15.4", "counted at the leader's barrier at once", (COPY, COPY.replace("come[slot]", "ds_fulls[slot]"))),
    wrong(
        "15.4",
        "the other CTA is told",
        (
            TELL.rstrip("\n") + "\n\n\n@triton.jit\ndef pass_on",
            TELL.rstrip("\n").replace("rank=0", "rank=1") + "\n\n\n@triton.jit\ndef pass_on",
        ),
    ),
    wrong("15.4", "the other CTA's keys", (GIVE, GIVE.replace("keys, rank, (2 * j + 1", "keys, 1 - rank, (2 * j + 1"))),
    wrong(
        "15.4",
        "one block short",
        (
            "    for j in range(blocks):\n        slot, phase = place(j, 2)\n        part",
            "    for j in range(blocks - 1):\n        slot, phase = place(j, 2)\n        part",
        ),
    ),
    wrong("15.4", "waits from the fourth block on", (FREE, "        if j > 2:\n    " + FREE)),
    wrong("15.4", "the queries of one half", (GIVE, GIVE.replace("HALF, queries", "HALF, queries // 2"))),
    wrong(
        "15.4",
        "the relay of the leader only",
        (
            PASS,
            PASS.replace(
                "        tlx.barrier_arrive", "        if tlx.cluster_cta_rank() == 0:\n            tlx.barrier_arrive"
            ),
        ),
    ),
    right(
        "15.4",
        "told first, then copied; no wait in the first round",
        (FREE, "        if j >= 2:\n    " + FREE),
        (COPY + TELL, TELL + COPY),
    ),
    right(
        "15.4",
        "bytes announced by the role that gives",
        (FREE, FREE + "        tlx.barrier_expect_bytes(come[slot], 2 * BN * HALF)\n"),
        (PASS, PASS.split("\n", 1)[1]),
    ),
    right(
        "15.4",
        "a loop over the slots, and a helper",
        (
            "    for j in range(blocks):\n        slot, phase = place(j, 2)\n        part = 2 * slot + rank\n"
            + FREE
            + GIVE,
            """    turn = 0
    while turn < blocks:
        which = turn & 1
        tlx.barrier_wait(ds_empties[which], ((turn >> 1) + 1) & 1)
        keep = (rank * BN + tl.arange(0, BN))[:, None] < keys
        theirs = tl.load(place_of(ds_ptr, turn, 1 - rank, rank, queries, BN, HALF), mask=keep, other=0.0)
        tlx.local_store(staging[which], theirs)
        ours = tl.load(place_of(ds_ptr, turn, rank, rank, queries, BN, HALF), mask=keep, other=0.0)
        tlx.local_store(parts[which + which + rank], ours)
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds_fulls[which], 1, remote_cta_rank=0)
        tlx.async_remote_shmem_copy(parts[which + which + rank], staging[which], 1 - rank, come[which])
        turn += 1
""",
        ),
        (
            "    for j in range(blocks):\n        slot, phase = place(j, 2)\n" + PASS,
            """    for turn in range(0, blocks, 1):
        which = turn % 2
        tlx.barrier_expect_bytes(come[which], BN * HALF * 2)
        tlx.barrier_wait(come[which], turn // 2 % 2)
        tlx.barrier_arrive(ds_fulls[which], remote_cta_rank=0)


@triton.jit
def place_of(ds_ptr, turn, half, rank, width, BN: tl.constexpr, HALF: tl.constexpr):
    rows = rank * BN + tl.arange(0, BN)
    columns = (turn * 2 + half) * HALF + tl.arange(0, HALF)
    return ds_ptr + rows[:, None] * width + columns[None, :]
""",
        ),
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
    wrong(
        "15.5", "one turn at least", (TURNS5, "            turns = tl.where(row < end, steps, tl.minimum(steps, 1))\n")
    ),
    wrong(
        "15.5",
        "the leader's rows decide, but the peer's end too",
        (TURNS5, "            turns = tl.where(row <= end, steps, 0)\n"),
    ),
    wrong(
        "15.5",
        "the absent CTA brings no B",
        (
            LOADS5,
            LOADS5.replace(
                "                tlx.async_descriptor_load(b_desc",
                "                if row < end:\n                    tlx.async_descriptor_load(b_desc",
            ),
        ),
    ),
    wrong("15.5", "B counted at home", (LOADS5, LOADS5.replace("box, full, two_ctas=True", "box, full"))),
    wrong("15.5", "the first columns twice", (LOADS5, LOADS5.replace("rank * HALF]", "0]"))),
    wrong("15.5", "done at home", (COMMIT5, COMMIT5.replace(", two_ctas=True", ""))),
    wrong("15.5", "slices of 32", (LOADS5, LOADS5.replace("k * BK", "k * 32"))),
    wrong("15.5", "bytes of slices of 32", (EXPECT5, EXPECT5.replace("BK", "32"))),
    wrong("15.5", "boxes of 32 columns", (LOADS5, LOADS5.replace("rank * HALF]", "rank * 32]"))),
    wrong(
        "15.5",
        "two stages for good",
        (
            "            for k in range(turns):\n                slot, phase = place(k, STAGES)",
            "            for k in range(turns):\n                slot, phase = place(k, 2)",
        ),
    ),
    wrong("15.5", "the last row belongs to the next sequence", ("done[0], row, end)", "done[0], row, end - 1)")),
    wrong("15.5", "the parity of the turn", ("empties[slot], phase ^ 1)", "empties[slot], (k & 1) ^ 1)")),
    wrong(
        "15.5",
        "only the leader stores",
        (
            "            leave(c_ptr, acc[0], done[0], row, end)",
            "            if rank == 0:\n                leave(c_ptr, acc[0], done[0], row, end)",
        ),
    ),
    wrong("15.5", "commits per slice, done after the first", (COMMIT5, "    " + COMMIT5)),
    right(
        "15.5",
        "A and B by a role each",
        (
            TURNS5 + "            for k in range(turns):\n",
            "            for k in range(steps):\n",
        ),
        (
            LOADS5,
            """                tlx.async_descriptor_load(a_desc, a[slot], [row, k * BK], full, two_ctas=True)
        with tlx.async_task(num_warps=1, registers=24):  # load of B
            for k in range(steps):
                slot, phase = place(k, STAGES)
                tlx.barrier_wait(empties[slot], phase ^ 1)
                tlx.async_descriptor_load(b_desc, b[slot], [k * BK, HALF * rank], fulls[slot], two_ctas=True)
""",
        ),
    ),
    right(
        "15.5",
        "a while loop, and a helper that brings a slice",
        source='''
@triton.jit
def bring(a_desc, b_desc, a, b, full, row, k, rank):
    """Both halves of the pair's slice k, counted by the leader."""
    ROWS: tl.constexpr = a_desc.block_shape[0]
    DEPTH: tl.constexpr = b_desc.block_shape[0]
    COLUMNS: tl.constexpr = b_desc.block_shape[1]
    if rank == 0:
        tlx.barrier_expect_bytes(full, 4 * DEPTH * ROWS + 4 * DEPTH * COLUMNS)
    tlx.async_descriptor_load(b_desc, b, [k * DEPTH, rank * COLUMNS], full, two_ctas=True)
    tlx.async_descriptor_load(a_desc, a, [row, k * DEPTH], full, two_ctas=True)


@triton.jit
def odd_kernel(a_desc, b_desc, c_ptr, records_ptr, steps, STAGES: tl.constexpr):
    """C = A B for each tile; records [pairs, 2]: its first row, and its sequence's end."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    HALF: tl.constexpr = b_desc.block_shape[1]
    rank = tlx.cluster_cta_rank()
    pair = tl.program_id(0) // 2
    first, end = tl.load(records_ptr + 2 * pair), tl.load(records_ptr + 2 * pair + 1)
    row = first + rank * BM
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, HALF), tl.bfloat16, STAGES)
    acc = tlx.local_alloc((BM, 2 * HALF), tl.float32, 1, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            leave(c_ptr, acc[0], done[0], row, end)
        with tlx.async_task(num_warps=1, registers=24):
            k, slot, phase = 0, 0, 1
            while k < steps:
                tlx.barrier_wait(empties[slot], phase)
                bring(a_desc, b_desc, a[slot], b[slot], fulls[slot], row, k, rank)
                k, slot = k + 1, slot + 1
                if slot == STAGES:
                    slot, phase = 0, phase ^ 1
        with tlx.async_task(num_warps=1, registers=24):
            if rank == 0:
                for k in range(steps):
                    at = k % STAGES
                    tlx.barrier_wait(fulls[at], k // STAGES % 2)
                    tlx.async_dot(a[at], b[at], acc[0], use_acc=k != 0, mBarriers=[empties[at]], two_ctas=True)
                tlx.tcgen05_commit(done[0], two_ctas=True)
''',
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
    wrong("15.6", "all keys together", ("sum(lengths) // max(len(lengths), 1)", "sum(lengths)")),
    wrong(
        "15.6",
        "the median",
        ("sum(lengths) // max(len(lengths), 1)", "sorted(lengths)[len(lengths) // 2] if lengths else 0"),
    ),
    wrong("15.6", "the first sequence", ("sum(lengths) // max(len(lengths), 1)", "(lengths or [0])[0]")),
    wrong(
        "15.6",
        "head_dim after the keys",
        (
            '    if head_dim <= 64:\n        return "single", f"head_dim {head_dim}: the pair\'s kernel is for 128"\n',
            "",
        ),
        (
            '    return "pair"',
            '    if head_dim <= 64:\n        return "single", f"head_dim {head_dim}: the pair\'s kernel is for 128"\n    return "pair"',
        ),
    ),
    wrong(
        "15.6", "head_dim before deterministic", ("    if deterministic:", "    if deterministic and head_dim > 64:")
    ),
    wrong("15.6", "below 128 head dims", ("head_dim <= 64", "head_dim < 128")),
    wrong("15.6", "capital letters", ('return "pair"', 'return "Pair"')),
    wrong("15.6", "no word for the keys", ('f"{keys} keys per sequence fill', 'f"{keys} per sequence fill')),
    wrong("15.6", "no word for the queries", ("queries in all heads", "rows in all heads")),
    wrong(
        "15.6", "heads alone in the reason", ('f"{lengths_q[0] * group} queries', 'f"{group} x {lengths_q[0]} queries')
    ),
    wrong(
        "15.6",
        "the whole tile for one row too many",
        ("lengths_q[0] * group <= 128", "lengths_q[0] <= 128 // group + (128 % group > 0)"),
    ),
    wrong(
        "15.6",
        "nothing for no keys",
        ("    if keys < 512:", "    if not lengths:\n        return None\n    if keys < 512:"),
    ),
    wrong(
        "15.6", "1000 in thousands", ('f"{keys} keys per sequence fill', 'f"{keys / 1000:.1f}k keys per sequence fill')
    ),
    wrong(
        "15.6",
        "a dictionary",
        (
            'return "pair", f"{keys} keys per sequence fill tiles of 256"',
            'return {"form": "pair", "reason": f"{keys} keys"}',
        ),
    ),
    right(
        "15.6",
        "match, and a mean of fractions",
        source='''
import math
from fractions import Fraction

def backward_form(lengths_q, lengths_kv, head_dim, group, broadcast_q, deterministic):
    """The first row that fits."""
    filled = [Fraction(n) for n in lengths_kv if n]
    mean = math.floor(sum(filled) / len(filled)) if filled else 0
    rows = group * lengths_q[0] if broadcast_q else math.inf
    match (rows <= 128, bool(deterministic), head_dim > 64, mean >= 512):
        case (True, _, _, _):
            return ("resident", f"{rows} Queries (times heads)")
        case (_, True, _, _):
            return ("single", "Deterministic")
        case (_, _, False, _):
            return ("single", f"D={head_dim}")
        case (_, _, _, long):
            return ("pair" if long else "single", f"{mean:,} keys")
''',
    ),
    right(
        "15.6",
        "numpy, other names",
        source="""
import numpy as np

def _why(form, **facts):
    return form, ", ".join(f"{name}: {value}" for name, value in facts.items())

def backward_form(lengths_q, lengths_kv, head_dim, group, broadcast_q, deterministic):
    kv = np.asarray(lengths_kv, dtype=np.int64)
    present = np.count_nonzero(kv)
    keys = int(kv.sum() // present) if present else 0
    if broadcast_q and (queries := lengths_q[0] * group) < 129:
        return _why("resident", queries=queries)
    if deterministic:
        return _why("single", deterministic=deterministic)
    if head_dim < 65:
        return _why("single", head_dim=head_dim)
    return _why("single" if keys < 512 else "pair", keys=keys)
""",
    ),
]
