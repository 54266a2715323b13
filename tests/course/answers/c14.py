"""Answers to chapter 14's exercises."""

from tests.course.answers import right, wrong

WAIT1 = "            tlx.async_descriptor_store_wait(1)\n"
STORE1 = "            tlx.local_store(stages[i % 2], part)\n"
LAST1 = "        tlx.barrier_arrive(dq_empties[0])\n    tlx.async_descriptor_store_wait(0)\n"
ARRIVE1 = "        tlx.barrier_arrive(dq_empties[0])\n"
ROLE = """    SLICES: tl.constexpr = D // NCOL
    for j in range(blocks):
        real = j * BM + tl.arange(0, BM) < q_len
        tlx.barrier_wait(dq_fulls[0], j & 1)
        for i in tl.static_range(SLICES):
            part = tlx.local_load(tlx.subslice(dq[0], i * NCOL, NCOL))
            part = tl.where(real[:, None], part, 0.0)
            stage = stages[(j * SLICES + i) % STAGES]
            tlx.async_descriptor_store_wait(STAGES - 1)
            tlx.local_store(stage, part)
            tlx.fence("async_shared")
            at = [q_begin + j * BM, i * NCOL]
            tlx.async_descriptor_store(dq_desc, stage, at, store_reduce="add")
        tlx.barrier_arrive(dq_empties[0])
    tlx.async_descriptor_store_wait(0)"""
EARLY = """        for i in tl.static_range(SLICES - HELD):
            part = tlx.local_load(tlx.subslice(dq[0], i * 16, 16))
            tlx.async_descriptor_store_wait(STAGES - 1)
            tlx.local_store(stages[i % STAGES], part)
            tlx.fence("async_shared")
            at = [j * B, i * 16]
            tlx.async_descriptor_store(dq_desc, stages[i % STAGES], at, store_reduce="add")
"""
HOLD = """        held = ()
        for i in tl.static_range(SLICES - HELD, SLICES):
            held = held + (tlx.local_load(tlx.subslice(dq[0], i * 16, 16)),)
        tlx.barrier_arrive(dq_empties[0])
"""
LATE = """        for n in tl.static_range(HELD):
            tlx.async_descriptor_store_wait(STAGES - 1)
            tlx.local_store(stages[(SLICES - HELD + n) % STAGES], held[n])
            tlx.fence("async_shared")
            tlx.async_descriptor_store(
                dq_desc,
                stages[(SLICES - HELD + n) % STAGES],
                [j * B, (SLICES - HELD + n) * 16],
                store_reduce="add",
            )
"""
DQ = "        tlx.async_dot(ds[slot], k[slot], dq[0], use_acc=n > 0, force_async=True)\n"
DK_WAIT = "        tlx.barrier_wait(dk_empties[0], (n & 1) ^ 1)\n"
DK = "        tlx.async_dot(ds_t, q[0], dk[0], use_acc=False, mBarriers=[dk_fulls[0]])\n"
FREE = "        tlx.tcgen05_commit(empties[slot])\n"
DONE = "    if begin < end:\n        tlx.tcgen05_commit(dq_full[0])"
SEAT_WAIT = "        tlx.barrier_wait(dq_empties[0], (j & 1) ^ 1)\n"
SKETCH = """    SLICES: tl.constexpr = D // NCOL
    for j in range(blocks):
        tlx.barrier_wait(dq_fulls[0], j & 1)
        for i in tl.static_range(SLICES):
            part = tlx.local_load(tlx.subslice(dq[0], i * NCOL, NCOL))
            tlx.async_descriptor_store_wait(1)
            tlx.local_store(stages[i % 2], part)
            tlx.fence("async_shared")
            tlx.async_descriptor_store(
                dq_desc, stages[i % 2], [row + j * BM, i * NCOL], store_reduce="add"
            )
        tlx.barrier_arrive(dq_empties[0])
    tlx.async_descriptor_store_wait(0)
"""
SEAT = """    k, v, kv_full = kv
    do, do_fulls, do_empties = dos
    tlx.barrier_wait(kv_full[0], 0)
    for j in range(blocks):
        tlx.barrier_wait(do_fulls[j % 2], (j // 2) & 1)
        do_t = tlx.local_trans(do[j % 2])
        tlx.barrier_wait(dq_empties[0], (j & 1) ^ 1)
        tlx.async_dot(v[0], do_t, dp[0], use_acc=False, mBarriers=[dp_fulls[0]])
        tlx.tcgen05_commit(do_empties[j % 2])
        tlx.barrier_wait(ds_fulls[0], j & 1)
        ds_rows = tlx.local_trans(ds[0])
        tlx.async_dot(ds_rows, k[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])
"""
RESIDENT = """    ds, k, fulls, empties = tiles
    if begin < end:
        tlx.barrier_wait(q_full[0], 0)
    for n in range(end - begin):
        slot = n % 2
        tlx.barrier_wait(fulls[slot], (n // 2) & 1)
        tlx.async_dot(ds[slot], k[slot], dq[0], use_acc=n > 0, force_async=True)
        tlx.barrier_wait(dk_empties[0], (n & 1) ^ 1)
        ds_t = tlx.local_trans(ds[slot])
        tlx.async_dot(ds_t, q[0], dk[0], use_acc=False, mBarriers=[dk_fulls[0]])
        tlx.tcgen05_commit(empties[slot])
    if begin < end:
        tlx.tcgen05_commit(dq_full[0])
"""

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 14.1
    wrong("14.1", "the wait still after the store", (WAIT1 + STORE1, STORE1 + WAIT1)),
    wrong("14.1", "always column 0", ("[row + j * BM, i * NCOL]", "[row + j * BM, 0]")),
    wrong("14.1", "no last wait", (LAST1, ARRIVE1)),
    wrong("14.1", "the last wait allows one", (LAST1, LAST1.replace("wait(0)", "wait(1)"))),
    wrong("14.1", "waits for all stores", (WAIT1, WAIT1.replace("(1)", "(0)"))),
    wrong(
        "14.1",
        "waits for all stores after each",
        (WAIT1, ""),
        (
            'store_reduce="add"\n            )\n',
            'store_reduce="add"\n            )\n            tlx.async_descriptor_store_wait(0)\n',
        ),
    ),
    right(
        "14.1",
        "the last wait within the loop: slower, within the limit",
        (LAST1, "        tlx.async_descriptor_store_wait(0)\n" + ARRIVE1),
    ),
    wrong("14.1", "overwrites", (', store_reduce="add"', "")),
    wrong("14.1", "the slice's number for its column", ("[row + j * BM, i * NCOL]", "[row + j * BM, i]")),
    wrong(
        "14.1",
        "given back before the slices",
        (LAST1, "    tlx.async_descriptor_store_wait(0)\n"),
        ("        for i in tl", ARRIVE1 + "        for i in tl"),
    ),
    wrong(
        "14.1",
        "given back once per slice",
        (LAST1, "            tlx.barrier_arrive(dq_empties[0])\n    tlx.async_descriptor_store_wait(0)\n"),
    ),
    wrong(
        "14.1", "one stage", (STORE1, STORE1.replace("i % 2", "0")), ("dq_desc, stages[i % 2]", "dq_desc, stages[0]")
    ),
    wrong("14.1", "no fence", ('            tlx.fence("async_shared")\n', "")),
    wrong("14.1", "rows of the first block", ("[row + j * BM, i * NCOL]", "[row, i * NCOL]")),
    wrong("14.1", "parity of the slice", ("tlx.barrier_wait(dq_fulls[0], j & 1)", "tlx.barrier_wait(dq_fulls[0], 0)")),
    wrong(
        "14.1",
        "the kernel's stages changed",
        ("stages = tlx.local_alloc((BM, NCOL), tl.float32, 2)", "stages = tlx.local_alloc((BM, NCOL), tl.float32, 3)"),
    ),
    right(
        "14.1",
        "waits first, then loads",
        (
            "            part = tlx.local_load(tlx.subslice(dq[0], i * NCOL, NCOL))\n" + WAIT1,
            WAIT1 + "            part = tlx.local_load(tlx.subslice(dq[0], i * NCOL, NCOL))\n",
        ),
    ),
    right(
        "14.1",
        "waits after the store, for the one before",
        (WAIT1, ""),
        (
            'store_reduce="add"\n            )\n',
            'store_reduce="add"\n            )\n            tlx.async_descriptor_store_wait(1)\n',
        ),
    ),
    # ------------------------------------------------------------------------------------------ 14.2
    wrong("14.2", "nothing clipped", ("            part = tl.where(real[:, None], part, 0.0)\n", "")),
    wrong(
        "14.2", "clipped by a product", ("tl.where(real[:, None], part, 0.0)", "part * real[:, None].to(tl.float32)")
    ),
    wrong("14.2", "the last row clipped too", ("tl.arange(0, BM) < q_len", "tl.arange(0, BM) < q_len - 1")),
    wrong("14.2", "one row too many", ("tl.arange(0, BM) < q_len", "tl.arange(0, BM) <= q_len")),
    wrong(
        "14.2",
        "every block clipped like the first",
        ("real = j * BM + tl.arange(0, BM) < q_len", "real = tl.arange(0, BM) < q_len"),
    ),
    wrong(
        "14.2",
        "the last block clipped by the remainder",
        (
            "real = j * BM + tl.arange(0, BM) < q_len",
            "real = tl.arange(0, BM) < tl.where(j == blocks - 1, q_len % BM, BM)",
        ),
    ),
    wrong(
        "14.2",
        "clipped by the packed row",
        ("real = j * BM + tl.arange(0, BM) < q_len", "real = q_begin + j * BM + tl.arange(0, BM) < q_len"),
    ),
    wrong("14.2", "the stage by the slice", ("(j * SLICES + i) % STAGES", "i % STAGES")),
    wrong("14.2", "the stage by block and slice", ("(j * SLICES + i) % STAGES", "(j + i) % STAGES")),
    wrong(
        "14.2",
        "two stages for good",
        ("(j * SLICES + i) % STAGES", "(j * SLICES + i) % 2"),
        ("store_wait(STAGES - 1)", "store_wait(1)"),
    ),
    wrong("14.2", "waits with one store too many under way", ("store_wait(STAGES - 1)", "store_wait(STAGES)")),
    wrong("14.2", "overwrites", (', store_reduce="add"', "")),
    wrong("14.2", "no last wait", ("\n    tlx.async_descriptor_store_wait(0)", "")),
    wrong(
        "14.2",
        "the last wait lets one go",
        ("\n    tlx.async_descriptor_store_wait(0)", "\n    tlx.async_descriptor_store_wait(STAGES - 1)"),
    ),
    wrong("14.2", "rows without q_begin", ("[q_begin + j * BM, i * NCOL]", "[j * BM, i * NCOL]")),
    wrong(
        "14.2",
        "one more block",
        ("    for j in range(blocks):\n        real", "    for j in range(blocks + 1):\n        real"),
    ),
    wrong(
        "14.2",
        "at least one block",
        ("    for j in range(blocks):\n        real", "    for j in range(tl.maximum(blocks, 1)):\n        real"),
    ),
    wrong("14.2", "the last slice left out", ("tl.static_range(SLICES)", "tl.static_range(SLICES - 1)")),
    wrong(
        "14.2",
        "released before the last slice is read",
        ("        tlx.barrier_arrive(dq_empties[0])\n    tlx", "    tlx"),
        (
            "            part = tlx.local_load",
            "            if i == SLICES - 1:\n                tlx.barrier_arrive(dq_empties[0])\n            part = tlx.local_load",
        ),
    ),
    wrong(
        "14.2",
        "the whole tile by plain atomics of the box",
        (
            ROLE,
            ROLE.replace("(j * SLICES + i) % STAGES", "0")
            .replace("store_wait(STAGES - 1)", "store_wait(0)")
            .replace("tl.where(real[:, None], part, 0.0)", "tl.where(part == part, part, 0.0)"),
        ),
    ),
    wrong(
        "14.2",
        "NaN made zero, rubbish kept",
        ("tl.where(real[:, None], part, 0.0)", "tl.where(part == part, part, 0.0)"),
    ),
    right(
        "14.2",
        "a counter of turns",
        ("    for j in range(blocks):\n        real", "    turn = 0\n    for j in range(blocks):\n        real"),
        ("stages[(j * SLICES + i) % STAGES]", "stages[turn % STAGES]"),
        ('store_reduce="add")\n', 'store_reduce="add")\n            turn += 1\n'),
    ),
    right(
        "14.2",
        "released as soon as the last slice is read",
        ("        tlx.barrier_arrive(dq_empties[0])\n    tlx", "    tlx"),
        (
            "            part = tl.where",
            "            if i == SLICES - 1:\n                tlx.barrier_arrive(dq_empties[0])\n            part = tl.where",
        ),
    ),
    right(
        "14.2",
        "waits for every store",
        ("store_wait(STAGES - 1)", "store_wait(0)"),
        ("real = j * BM + tl.arange(0, BM) < q_len", "left = q_len - j * BM\n        real = tl.arange(0, BM) < left"),
    ),
    # ------------------------------------------------------------------------------------------ 14.3
    wrong("14.3", "before the second product", (SEAT_WAIT, ""), ("        ds_rows =", SEAT_WAIT + "        ds_rows =")),
    wrong("14.3", "phase of this block", (SEAT_WAIT, SEAT_WAIT.replace("(j & 1) ^ 1", "j & 1"))),
    wrong(
        "14.3",
        "waits on dq_fulls",
        (SEAT_WAIT, "        if j > 0:\n            tlx.barrier_wait(dq_fulls[0], (j - 1) & 1)\n"),
    ),
    wrong(
        "14.3",
        "waits at the end of the block for its dQ",
        (SEAT_WAIT, ""),
        (
            "        tlx.async_dot(ds_rows, k[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])",
            "        tlx.async_dot(ds_rows, k[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])\n        tlx.barrier_wait(dq_fulls[0], j & 1)",
        ),
    ),
    wrong(
        "14.3", "waits on do_empties", (SEAT_WAIT, "        tlx.barrier_wait(do_empties[j % 2], ((j // 2) & 1) ^ 1)\n")
    ),
    wrong(
        "14.3",
        "only every second block",
        (SEAT_WAIT, "        if j % 2 == 0:\n            tlx.barrier_wait(dq_empties[0], (j & 1) ^ 1)\n"),
    ),
    wrong("14.3", "slot's phase", (SEAT_WAIT, "        tlx.barrier_wait(dq_empties[0], ((j // 2) & 1) ^ 1)\n")),
    wrong(
        "14.3",
        "after dP",
        (SEAT_WAIT, ""),
        (
            "        tlx.tcgen05_commit(do_empties[j % 2])\n",
            SEAT_WAIT + "        tlx.tcgen05_commit(do_empties[j % 2])\n",
        ),
    ),
    wrong(
        "14.3",
        "waits for dS twice",
        (SEAT_WAIT, ""),
        (
            "        tlx.barrier_wait(ds_fulls[0], j & 1)\n",
            "        tlx.barrier_wait(ds_fulls[0], j & 1)\n        tlx.barrier_wait(ds_fulls[0], j & 1)\n",
        ),
    ),
    wrong("14.3", "a seat of its own", (SEAT_WAIT, ""), ("tlx.storage_kind.tmem, reuse=dp)", "tlx.storage_kind.tmem)")),
    wrong(
        "14.3",
        "dO given back before it is read",
        (SEAT_WAIT, SEAT_WAIT + "        tlx.barrier_arrive(do_empties[j % 2])\n"),
        ("        tlx.tcgen05_commit(do_empties[j % 2])\n", ""),
    ),
    wrong("14.3", "a fence", (SEAT_WAIT, '        tlx.fence("async_shared")\n')),
    right(
        "14.3",
        "waits at the end of the block",
        (SEAT_WAIT, ""),
        (
            "        tlx.async_dot(ds_rows, k[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])",
            "        tlx.async_dot(ds_rows, k[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])\n        tlx.barrier_wait(dq_empties[0], j & 1)",
        ),
    ),
    right(
        "14.3",
        "from the second block, at its start",
        (SEAT_WAIT, ""),
        (
            "        tlx.barrier_wait(do_fulls[j % 2], (j // 2) & 1)\n",
            "        if j > 0:\n            tlx.barrier_wait(dq_empties[0], (j + 1) % 2)\n        tlx.barrier_wait(do_fulls[j % 2], (j // 2) & 1)\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 14.4
    wrong(
        "14.4",
        "given back at the end",
        (HOLD, HOLD.replace("        tlx.barrier_arrive(dq_empties[0])\n", "")),
        (LATE, LATE + "        tlx.barrier_arrive(dq_empties[0])\n"),
    ),
    wrong(
        "14.4",
        "given back before the held slices are read",
        (
            HOLD,
            "        tlx.barrier_arrive(dq_empties[0])\n"
            + HOLD.replace("        tlx.barrier_arrive(dq_empties[0])\n", ""),
        ),
    ),
    wrong("14.4", "the held ones never stored", (LATE, "")),
    wrong("14.4", "held slices in the first columns", ("[j * B, (SLICES - HELD + n) * 16]", "[j * B, n * 16]")),
    wrong("14.4", "held slices from stage 0", (LATE, LATE.replace("(SLICES - HELD + n) % STAGES", "n % STAGES"))),
    wrong("14.4", "held slices waited for one by one", (LATE, LATE.replace("store_wait(STAGES - 1)", "store_wait(0)"))),
    wrong(
        "14.4",
        "every slice waited for",
        (EARLY, EARLY.replace("store_wait(STAGES - 1)", "store_wait(0)")),
        (LATE, LATE.replace("store_wait(STAGES - 1)", "store_wait(0)")),
    ),
    wrong(
        "14.4",
        "no wait for the held",
        (LATE, LATE.replace("            tlx.async_descriptor_store_wait(STAGES - 1)\n", "")),
    ),
    wrong("14.4", "no last wait", ("            )\n    tlx.async_descriptor_store_wait(0)", "            )")),
    wrong("14.4", "waits for stages before it holds", (HOLD, "        tlx.async_descriptor_store_wait(0)\n" + HOLD)),
    wrong(
        "14.4",
        "all slices held",
        (EARLY, ""),
        (HOLD, HOLD.replace("tl.static_range(SLICES - HELD, SLICES)", "tl.static_range(SLICES)")),
        (LATE, LATE.replace("SLICES - HELD + n", "n").replace("range(HELD)", "range(SLICES)")),
    ),
    wrong(
        "14.4",
        "one slice too few held",
        ("tl.static_range(SLICES - HELD):", "tl.static_range(SLICES - HELD + 1):"),
        ("held = ()", "held = (tlx.local_load(tlx.subslice(dq[0], 0, 16)),)"),
        ("tl.static_range(SLICES - HELD, SLICES)", "tl.static_range(SLICES - HELD + 1, SLICES)"),
    ),
    wrong(
        "14.4",
        "the first HELD are held",
        (
            EARLY + HOLD,
            HOLD.replace("SLICES - HELD, SLICES", "HELD").replace("        tlx.barrier_arrive(dq_empties[0])\n", "")
            + EARLY.replace("range(SLICES - HELD)", "range(HELD, SLICES)")
            + "        tlx.barrier_arrive(dq_empties[0])\n",
        ),
        (LATE, LATE.replace("SLICES - HELD + n", "n")),
    ),
    wrong("14.4", "no fence for the held", (LATE, LATE.replace('            tlx.fence("async_shared")\n', ""))),
    wrong(
        "14.4",
        "given back twice with none held",
        (HOLD, HOLD + "        if HELD == 0:\n            tlx.barrier_arrive(dq_empties[0])\n"),
    ),
    right(
        "14.4",
        "one loop, the held in a second tuple",
        (LATE, LATE.replace("range(HELD)", "range(0, HELD)")),
        (
            EARLY + HOLD,
            "        held = ()\n"
            + EARLY
            + HOLD.replace("        held = ()\n", "").replace(
                "held = held + (tlx.local_load(tlx.subslice(dq[0], i * 16, 16)),)",
                "one = tlx.local_load(tlx.subslice(dq[0], i * 16, 16))\n            held += (one,)",
            ),
        ),
    ),
    right(
        "14.4",
        "a helper that sends one slice",
        (
            EARLY,
            "        for i in tl.static_range(SLICES - HELD):\n            send(dq_desc, stages, tlx.local_load(tlx.subslice(dq[0], 16 * i, 16)), j * B, i, STAGES)\n",
        ),
        (
            LATE,
            "        for n in tl.static_range(HELD):\n            send(dq_desc, stages, held[n], j * B, SLICES - HELD + n, STAGES)\n",
        ),
        (
            "@triton.jit\ndef reduce_early(",
            '@triton.jit\ndef send(desc, stages, part, row, i: tl.constexpr, STAGES: tl.constexpr):\n    tlx.async_descriptor_store_wait(STAGES - 1)\n    tlx.local_store(stages[i % STAGES], part)\n    tlx.fence("async_shared")\n    tlx.async_descriptor_store(desc, stages[i % STAGES], [row, i * 16], store_reduce="add")\n\n\n@triton.jit\ndef reduce_early(',
        ),
    ),
    # ------------------------------------------------------------------------------------------ 14.5
    wrong("14.5", "K and V once", ("(2 + q_slots + do_slots)", "(1 + q_slots + do_slots)")),
    wrong("14.5", "lse and delta per slot of dO", ("q_slots * 2 * 128 * 4", "do_slots * 2 * 128 * 4")),
    wrong("14.5", "lse alone", ("q_slots * 2 * 128 * 4", "q_slots * 128 * 4")),
    wrong("14.5", "lse and delta once", ("q_slots * 2 * 128 * 4", "2 * 128 * 4")),
    wrong("14.5", "stages in bf16", ("stages * 128 * columns * 4", "stages * 128 * columns * 2")),
    wrong("14.5", "dS in fp32", ("128 * 128 * 2 + q", "128 * 128 * 4 + q")),
    wrong("14.5", "dS of head_dim", ("128 * 128 * 2 + q", "128 * head_dim * 2 + q")),
    wrong("14.5", "no 1,024", (" + 1024\n", "\n")),
    wrong("14.5", "one compute group", ("8 * 32 * compute", "4 * 32 * compute")),
    wrong("14.5", "two warps of mma and load", ("4 * 32 * 40", "2 * 32 * 40")),
    wrong("14.5", "two groups for mma and load", ("4 * 32 * 40", "8 * 32 * 40")),
    wrong("14.5", "the slice on its way forgotten", ("(left - 8 - columns)", "(left - 8)")),
    wrong("14.5", "the 8 forgotten", ("(left - 8 - columns)", "(left - columns)")),
    wrong(
        "14.5",
        "more slices than there are",
        ("min((left - 8 - columns) // columns, head_dim // columns)", "(left - 8 - columns) // columns"),
    ),
    wrong("14.5", "0 for what does not fit", ("shared > 232448 or most < 0", "shared > 232448")),
    wrong(
        "14.5",
        "never below 0",
        ("(left - 8 - columns) // columns, head", "max(0, left - 8 - columns) // columns, head"),
    ),
    wrong("14.5", "exactly full does not fit", ("shared > 232448", "shared >= 232448")),
    wrong("14.5", "rounds towards zero", ("(left - 8 - columns) // columns", "int((left - 8 - columns) / columns)")),
    wrong("14.5", "held as well as on its way", ("head_dim // columns)", "head_dim // columns - 1)")),
    wrong(
        "14.5",
        "multiples of 8 registers",
        ("left = (65536 - others) // 128", "left = (65536 - others) // 128 // 8 * 8"),
    ),
    right(
        "14.5",
        "bytes by name",
        source="""
def budget(head_dim, q_slots, do_slots, stages, columns, compute):
    tile = 2 * 128 * head_dim
    parts = {"k": tile, "v": tile, "q": q_slots * tile, "do": do_slots * tile, "ds": 2 * 128 * 128}
    parts["lse"] = parts["delta"] = q_slots * 4 * 128
    parts["stages"] = 128 * columns * 4 * stages
    shared = 1024 + sum(parts.values())
    left = 65536 // 128 - 2 * compute - 40
    slices = head_dim // columns
    most = -1
    for held in range(slices + 1):
        if held * columns + columns + 8 <= left and shared <= 232448:
            most = held
    return shared, left, most
""",
    ),
    right(
        "14.5",
        "numpy integers",
        source="""
import numpy as np

def budget(head_dim: int, q_slots: int, do_slots: int, stages: int, columns: int, compute: int):
    per_row = np.int64(2 * head_dim * (q_slots + do_slots + 2) + 2 * 128 + 8 * q_slots + 4 * columns * stages)
    shared = int(128 * per_row + 1024)
    left = (65536 - 2 * 128 * compute - 128 * 40) // 128
    if shared > 232448 or left < columns + 8:
        return shared, left, -1
    return shared, left, min(head_dim // columns, (left - 8) // columns - 1)
""",
    ),
    # ------------------------------------------------------------------------------------------ 14.6
    wrong("14.6", "dQ starts anew with each tile", ("dq[0], use_acc=n > 0", "dq[0], use_acc=False")),
    wrong("14.6", "dQ never starts", ("dq[0], use_acc=n > 0", "dq[0], use_acc=True")),
    wrong("14.6", "dQ starts with tile 0 of all", ("dq[0], use_acc=n > 0", "dq[0], use_acc=begin + n > 0")),
    wrong("14.6", "dK accumulates", ("dk[0], use_acc=False", "dk[0], use_acc=n > 0")),
    wrong("14.6", "slot of the tile's number", ("        slot = n % 2\n", "        slot = (begin + n) % 2\n")),
    wrong(
        "14.6",
        "phase of the tile's number",
        ("tlx.barrier_wait(fulls[slot], (n // 2) & 1)", "tlx.barrier_wait(fulls[slot], n & 1)"),
    ),
    wrong("14.6", "dK not waited for", (DK_WAIT, "")),
    wrong("14.6", "dK's phase the other way", (DK_WAIT, DK_WAIT.replace(" ^ 1", ""))),
    wrong(
        "14.6",
        "slot given back after dK only, by mBarriers, before dQ's product",
        (FREE, ""),
        (DQ, ""),
        (DK, DK.replace("mBarriers=[dk_fulls[0]]", "mBarriers=[dk_fulls[0], empties[slot]]") + DQ),
    ),
    wrong("14.6", "dQ announced with each tile", (DONE, ""), (FREE, FREE + "        tlx.tcgen05_commit(dq_full[0])\n")),
    right("14.6", "dQ announced without tiles: nobody is hurt", (DONE, "    tlx.tcgen05_commit(dq_full[0])")),
    right(
        "14.6",
        "dQ announced by an arrive: nobody is hurt",
        (DONE, DONE.replace("tlx.tcgen05_commit(dq_full[0])", "tlx.barrier_arrive(dq_full[0])")),
    ),
    wrong("14.6", "dQ never announced", ("\n" + DONE, "")),
    wrong(
        "14.6",
        "Q waited for without tiles",
        ("    if begin < end:\n        tlx.barrier_wait(q_full[0], 0)\n", "    tlx.barrier_wait(q_full[0], 0)\n"),
    ),
    wrong("14.6", "Q not waited for", ("    if begin < end:\n        tlx.barrier_wait(q_full[0], 0)\n", "")),
    wrong("14.6", "dS not transposed for dK", ("ds_t = tlx.local_trans(ds[slot])", "ds_t = ds[slot]")),
    wrong("14.6", "K for Q in dK", ("ds_t, q[0], dk[0]", "ds_t, k[slot], dk[0]")),
    wrong("14.6", "slot freed by an arrive", (FREE, "        tlx.barrier_arrive(empties[slot])\n")),
    wrong("14.6", "the last tile left out", ("for n in range(end - begin)", "for n in range(end - begin - 1)")),
    wrong(
        "14.6", "dQ waits for the store of dK", (DQ + DK_WAIT, DK_WAIT + DQ.replace("use_acc=n > 0", "use_acc=(n > 1)"))
    ),
    right("14.6", "dK first, tiles by number", (DQ, ""), (FREE, FREE), (DK, DK + DQ)),
    right(
        "14.6",
        "barriers in the products",
        (FREE, ""),
        (DK, DK.replace("mBarriers=[dk_fulls[0]]", "mBarriers=[dk_fulls[0], empties[slot]]")),
    ),
    # ------------------------------------------------------------------------------------------ tried later
    right(
        "14.3",
        "guarded wait",
        (
            "        tlx.barrier_wait(dq_empties[0], (j & 1) ^ 1)\n",
            "        if j > 0:\n            tlx.barrier_wait(dq_empties[0], (j - 1) % 2)\n",
        ),
    ),
    wrong("14.5", "limit 228 K", ("232448", "233472")),
    right(
        "14.6",
        "dk first",
        ("        tlx.async_dot(ds[slot], k[slot], dq[0], use_acc=n > 0, force_async=True)\n", ""),
        (
            "        tlx.tcgen05_commit(empties[slot])\n",
            "        tlx.async_dot(ds[slot], k[slot], dq[0], use_acc=n > 0, mBarriers=[empties[slot]])\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ by a tired expert
    wrong("14.1", "flipped phase", ("dq_fulls[0], j & 1)", "dq_fulls[0], (j & 1) ^ 1)")),
    wrong(
        "14.1",
        "the stage by the block",
        (STORE1, STORE1.replace("i % 2", "j % 2")),
        ("dq_desc, stages[i % 2]", "dq_desc, stages[j % 2]"),
    ),
    wrong("14.1", "stored from the other stage", ("dq_desc, stages[i % 2]", "dq_desc, stages[(i + 1) % 2]")),
    wrong("14.1", "slices of 16 in memory", ("[row + j * BM, i * NCOL]", "[row + j * BM, i * 16]")),
    wrong("14.1", "four slices for good", ("SLICES: tl.constexpr = D // NCOL", "SLICES: tl.constexpr = 4")),
    wrong(
        "14.1",
        "slices of 16 in tensor memory",
        ("tlx.subslice(dq[0], i * NCOL, NCOL)", "tlx.subslice(dq[0], i * 16, NCOL)"),
    ),
    wrong("14.1", "no wait at the start of a block", (WAIT1, "            if i >= 2:\n    " + WAIT1)),
    wrong(
        "14.1",
        "the fence before the store",
        (STORE1 + '            tlx.fence("async_shared")\n', '            tlx.fence("async_shared")\n' + STORE1),
    ),
    wrong("14.1", "the largest of both", ('store_reduce="add"', 'store_reduce="max"')),
    wrong("14.1", "the first block is skipped", ("    for j in range(blocks):", "    for j in range(1, blocks):")),
    wrong("14.1", "1 % too much", (STORE1, "            part = part * 1.01\n" + STORE1)),
    right(
        "14.1",
        "a helper, a running turn, a while loop",
        (
            "@triton.jit\ndef reduce_sketch(",
            """@triton.jit
def send_slice(desc, stage, values, row, column):
    tlx.async_descriptor_store_wait(1)
    tlx.local_store(stage, values)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, stage, [row, column], store_reduce="add")


@triton.jit
def reduce_sketch(""",
        ),
        (
            SKETCH,
            """    block, turn = 0, 0
    while block < blocks:
        tlx.barrier_wait(dq_fulls[0], block % 2)
        for column in tl.static_range(0, D, NCOL):
            part = tlx.local_load(tlx.subslice(dq[0], column, NCOL))
            send_slice(dq_desc, stages[turn & 1], part, row + block * BM, column)
            turn += 1
        tlx.barrier_arrive(dq_empties[0], 1)
        block += 1
    tlx.async_descriptor_store_wait(0)
""",
        ),
    ),
    right(
        "14.1",
        "both stages by name, two slices a turn",
        (
            """        for i in tl.static_range(SLICES):
            part = tlx.local_load(tlx.subslice(dq[0], i * NCOL, NCOL))
            tlx.async_descriptor_store_wait(1)
            tlx.local_store(stages[i % 2], part)
            tlx.fence("async_shared")
            tlx.async_descriptor_store(
                dq_desc, stages[i % 2], [row + j * BM, i * NCOL], store_reduce="add"
            )
""",
            """        for pair in tl.static_range(0, SLICES, 2):
            left = tlx.local_load(tlx.subslice(dq[0], pair * NCOL, NCOL))
            right = tlx.local_load(tlx.subslice(dq[0], (pair + 1) * NCOL, NCOL))
            tlx.async_descriptor_store_wait(1)
            tlx.local_store(stages[0], left)
            tlx.fence("async_shared")
            tlx.async_descriptor_store(dq_desc, stages[0], [row + j * BM, pair * NCOL], store_reduce="add")
            tlx.async_descriptor_store_wait(1)
            tlx.local_store(stages[1], right)
            tlx.fence("async_shared")
            tlx.async_descriptor_store(dq_desc, stages[1], [row + j * BM, (pair + 1) * NCOL], store_reduce="add")
""",
        ),
    ),
    wrong("14.2", "flipped phase", ("dq_fulls[0], j & 1)", "dq_fulls[0], (j & 1) ^ 1)")),
    wrong(
        "14.2",
        "mask on the wrong axis",
        ("real = j * BM + tl.arange(0, BM)", "real = j * BM + tl.arange(0, NCOL)"),
        ("real[:, None]", "real[None, :]"),
    ),
    wrong("14.2", "the stage by block times STAGES", ("(j * SLICES + i) % STAGES", "(j * STAGES + i) % STAGES")),
    wrong(
        "14.2",
        "stored from the next stage",
        (
            "tlx.async_descriptor_store(dq_desc, stage,",
            "tlx.async_descriptor_store(dq_desc, stages[(j * SLICES + i + 1) % STAGES],",
        ),
    ),
    wrong("14.2", "slices of 16 for good", ("at = [q_begin + j * BM, i * NCOL]", "at = [q_begin + j * BM, i * 16]")),
    wrong(
        "14.2", "blocks of 128 in memory", ("at = [q_begin + j * BM, i * NCOL]", "at = [q_begin + j * 128, i * NCOL]")
    ),
    wrong("14.2", "four slices for good", ("SLICES: tl.constexpr = D // NCOL", "SLICES: tl.constexpr = 4")),
    wrong(
        "14.2", "one stage for good", ("(j * SLICES + i) % STAGES", "0"), ("store_wait(STAGES - 1)", "store_wait(0)")
    ),
    wrong(
        "14.2",
        "as many stages as are even",
        ("(j * SLICES + i) % STAGES", "(j * SLICES + i) % (2 if STAGES > 1 else 1)"),
        ("store_wait(STAGES - 1)", "store_wait(0)"),
    ),
    wrong(
        "14.2",
        "whole blocks overwrite, the tail adds",
        (
            '            tlx.async_descriptor_store(dq_desc, stage, at, store_reduce="add")\n',
            '            if (j + 1) * BM > q_len:\n                tlx.async_descriptor_store(dq_desc, stage, at, store_reduce="add")\n            else:\n                tlx.async_descriptor_store(dq_desc, stage, at)\n',
        ),
    ),
    wrong(
        "14.2",
        "the fence after the copy",
        ('            tlx.fence("async_shared")\n', ""),
        ('store_reduce="add")\n', 'store_reduce="add")\n            tlx.fence("async_shared")\n'),
    ),
    wrong(
        "14.2", "the add is scaled", ("tl.where(real[:, None], part, 0.0)", "tl.where(real[:, None], part, 0.0) * 1.01")
    ),
    wrong("14.2", "filled with a small number", ("part, 0.0)", "part, 1e-3)")),
    wrong(
        "14.2",
        "waits for the last block only if it is whole",
        (
            "\n    tlx.async_descriptor_store_wait(0)",
            "\n    if q_len % BM == 0:\n        tlx.async_descriptor_store_wait(0)",
        ),
    ),
    right(
        "14.2",
        "only the tail is clipped, by a helper",
        (
            "            part = tl.where(real[:, None], part, 0.0)\n",
            "            if q_len < (j + 1) * BM:\n                part = tl.where(real[:, None], part, 0.0)\n",
        ),
        ("real = j * BM + tl.arange(0, BM) < q_len", "real = tl.arange(0, BM) + 1 <= q_len - BM * j"),
        ("(j * SLICES + i) % STAGES", "(i + SLICES * j) % STAGES"),
    ),
    right(
        "14.2",
        "the wait behind the copy, a slot that wraps",
        ("            tlx.async_descriptor_store_wait(STAGES - 1)\n", ""),
        (
            'store_reduce="add")\n',
            'store_reduce="add")\n            slot += 1\n            if slot == STAGES:\n                slot = 0\n            tlx.async_descriptor_store_wait(STAGES - 1)\n',
        ),
        ("stages[(j * SLICES + i) % STAGES]", "stages[slot]"),
        ("    for j in range(blocks):\n        real", "    slot = 0\n    for j in range(0, blocks):\n        real"),
    ),
    wrong(
        "14.3",
        "waits for dP's barrier",
        (SEAT_WAIT, "        if j > 0:\n            tlx.barrier_wait(dp_fulls[0], (j - 1) & 1)\n"),
    ),
    wrong(
        "14.3",
        "in the second block only",
        (SEAT_WAIT, "        if j == 1:\n            tlx.barrier_wait(dq_empties[0], 0)\n"),
    ),
    wrong(
        "14.3",
        "the wait twice in a block",
        (SEAT_WAIT, SEAT_WAIT),
        (
            "        tlx.barrier_wait(ds_fulls[0], j & 1)\n",
            "        tlx.barrier_wait(ds_fulls[0], j & 1)\n        tlx.barrier_wait(dq_empties[0], j & 1)\n",
        ),
    ),
    wrong(
        "14.3",
        "the reduction of two blocks ago",
        (SEAT_WAIT, "        if j > 1:\n            tlx.barrier_wait(dq_empties[0], (j - 2) & 1)\n"),
    ),
    wrong("14.3", "dQ is added to what is there", ("dq[0], use_acc=False", "dq[0], use_acc=j > 0")),
    wrong("14.3", "dP is added to what is there", ("dp[0], use_acc=False", "dp[0], use_acc=j > 0")),
    wrong(
        "14.3",
        "flipped phase of dS",
        ("tlx.barrier_wait(ds_fulls[0], j & 1)", "tlx.barrier_wait(ds_fulls[0], (j & 1) ^ 1)"),
    ),
    wrong("14.3", "K and V not waited for", ("    tlx.barrier_wait(kv_full[0], 0)\n", "")),
    wrong(
        "14.3",
        "an arrival for a commit",
        ("tlx.tcgen05_commit(do_empties[j % 2])", "tlx.barrier_arrive(do_empties[j % 2])"),
    ),
    wrong(
        "14.3",
        "the parity of blocks in pairs",
        (SEAT_WAIT, "        if j % 2 == 1:\n            tlx.barrier_wait(dq_empties[0], (j // 2) & 1)\n"),
    ),
    wrong("14.3", "dS as it lies", ("ds_rows = tlx.local_trans(ds[0])", "ds_rows = ds[0]")),
    right(
        "14.3",
        "the next dP behind this dQ",
        (
            "@triton.jit\ndef seat_mma(",
            """@triton.jit
def score_block(v, do, do_fulls, do_empties, dp, dp_fulls, j):
    tlx.barrier_wait(do_fulls[j % 2], (j // 2) & 1)
    tlx.async_dot(v[0], tlx.local_trans(do[j % 2]), dp[0], use_acc=False, mBarriers=[dp_fulls[0], do_empties[j % 2]])


@triton.jit
def seat_mma(""",
        ),
        (
            SEAT,
            """    keys, values, loaded = kv
    do, do_fulls, do_empties = dos
    tlx.barrier_wait(loaded[0], 0)
    score_block(values, do, do_fulls, do_empties, dp, dp_fulls, 0)
    for j in range(blocks):
        tlx.barrier_wait(ds_fulls[0], j & 1)
        tlx.async_dot(tlx.local_trans(ds[0]), keys[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])
        if j + 1 < blocks:
            tlx.barrier_wait(dq_empties[0], j & 1)
            score_block(values, do, do_fulls, do_empties, dp, dp_fulls, j + 1)
""",
        ),
    ),
    right(
        "14.3",
        "a parity that is turned by hand",
        (SEAT_WAIT, "        tlx.barrier_wait(dq_empties[0], free)\n        free ^= 1\n"),
        (
            "    for j in range(blocks):\n        tlx.barrier_wait(do_fulls",
            "    free = 1\n    for j in range(blocks):\n        tlx.barrier_wait(do_fulls",
        ),
    ),
    wrong("14.4", "flipped phase", ("dq_fulls[0], j & 1)", "dq_fulls[0], (j & 1) ^ 1)")),
    wrong("14.4", "one store too many under way", (EARLY, EARLY.replace("STAGES - 1)", "STAGES)"))),
    wrong("14.4", "one store too many for the held", (LATE, LATE.replace("STAGES - 1)", "STAGES)"))),
    wrong(
        "14.4",
        "blocks of 128 for the held",
        ("[j * B, (SLICES - HELD + n) * 16]", "[j * 128, (SLICES - HELD + n) * 16]"),
    ),
    wrong(
        "14.4",
        "the held slices by one column block too far",
        ("[j * B, (SLICES - HELD + n) * 16]", "[j * B, (SLICES - HELD + n + 1) * 16]"),
    ),
    wrong("14.4", "no fence in the first loop", (EARLY, EARLY.replace('            tlx.fence("async_shared")\n', ""))),
    wrong("14.4", "the held ones overwrite", (LATE, LATE.replace('                store_reduce="add",\n', ""))),
    wrong("14.4", "held in bf16", ("held[n])", "held[n].to(tl.bfloat16).to(tl.float32))")),
    wrong(
        "14.4",
        "given back in the middle of the loads",
        (
            HOLD,
            HOLD.replace(
                "        tlx.barrier_arrive(dq_empties[0])\n",
                "            if i == SLICES - 1:\n                tlx.barrier_arrive(dq_empties[0])\n",
            ),
        ),
    ),
    wrong("14.4", "four slices for good", ("SLICES: tl.constexpr = D // 16", "SLICES: tl.constexpr = 4")),
    wrong(
        "14.4",
        "two held for good",
        (EARLY, EARLY.replace("SLICES - HELD", "SLICES - 2")),
        (HOLD, HOLD.replace("SLICES - HELD", "SLICES - 2")),
        (LATE, LATE.replace("SLICES - HELD", "SLICES - 2").replace("range(HELD)", "range(2)")),
    ),
    wrong(
        "14.4",
        "the last wait allows all stages but one",
        ("    tlx.async_descriptor_store_wait(0)", "    tlx.async_descriptor_store_wait(STAGES - 1)"),
    ),
    right(
        "14.4",
        "one loop with a constexpr branch",
        (
            EARLY + HOLD,
            """        kept = ()
        for i in tl.static_range(SLICES):
            one = tlx.local_load(tlx.subslice(dq[0], i * 16, 16))
            if i == SLICES - 1:
                tlx.barrier_arrive(dq_empties[0], 1)
            if i < SLICES - HELD:
                tlx.async_descriptor_store_wait(STAGES - 1)
                tlx.local_store(stages[i % STAGES], one)
                tlx.fence("async_shared")
                tlx.async_descriptor_store(dq_desc, stages[i % STAGES], [j * B, i * 16], store_reduce="add")
            else:
                kept += (one,)
""",
        ),
        ("held[n])", "kept[n])"),
    ),
    right(
        "14.4",
        "stages counted over all blocks",
        (EARLY, EARLY.replace("stages[i % STAGES]", "stages[(j * SLICES + i) % STAGES]")),
        (LATE, LATE.replace("stages[(SLICES - HELD + n) % STAGES]", "stages[((j + 1) * SLICES - HELD + n) % STAGES]")),
    ),
    wrong("14.5", "warps of 64 threads", ("8 * 32 * compute", "8 * 64 * compute")),
    wrong("14.5", "left per warp", ("(65536 - others) // 128", "(65536 - others) // 32")),
    wrong("14.5", "scaled twice: both groups already in compute", ("8 * 32 * compute", "2 * 8 * 32 * compute")),
    wrong("14.5", "Q's slots for dO's", ("(2 + q_slots + do_slots)", "(2 + 2 * q_slots)")),
    wrong("14.5", "dQ's slices of 16", ("(left - 8 - columns) // columns", "(left - 8 - columns) // 16")),
    wrong("14.5", "head_dim of 128", ("128 * head_dim * 2", "128 * 128 * 2")),
    wrong("14.5", "1,000 bytes", ("+ 1024\n", "+ 1000\n")),
    wrong("14.5", "one slot of stages", ("stages * 128 * columns * 4", "128 * columns * 4")),
    wrong("14.5", "at least one must fit", ("most < 0", "most < 1")),
    wrong("14.5", "memory in KiB, rounded", ("shared > 232448", "shared // 1024 > 227 - 1")),
    right(
        "14.5",
        "helpers and early returns",
        source="""
LIMIT = 227 * 1024

def bytes_of(rows, columns, each):
    return rows * columns * each

def budget(head_dim, q_slots, do_slots, stages, columns, compute):
    one = bytes_of(128, head_dim, 2)
    shared = one + one + one * q_slots + one * do_slots
    shared += bytes_of(128, 128, 2)
    shared += q_slots * (bytes_of(128, 1, 4) + bytes_of(128, 1, 4))
    shared += sum(bytes_of(128, columns, 4) for _ in range(stages)) + 1024
    pool = 65536 - 2 * 4 * 32 * compute - 4 * 32 * 40
    left = pool // (4 * 32)
    spare = left - 8 - columns
    if shared > LIMIT or spare < 0:
        return shared, left, -1
    return shared, left, min(spare // columns, head_dim // columns)
""",
    ),
    right(
        "14.5",
        "fractions, a search from above",
        source="""
from fractions import Fraction
from math import floor

def budget(head_dim, q_slots, do_slots, stages, columns, compute):
    kib = Fraction(head_dim, 4) * (2 + q_slots + do_slots) + 32 + q_slots + Fraction(stages * columns, 2) + 1
    shared = int(kib * 1024)
    left = floor(Fraction(65536 - 256 * compute - 5120, 128))
    held = head_dim // columns
    while held >= 0 and (held + 1) * columns + 8 > left:
        held -= 1
    return shared, left, held if kib <= 227 else -1
""",
    ),
    wrong(
        "14.6",
        "flipped phase of the slots",
        ("tlx.barrier_wait(fulls[slot], (n // 2) & 1)", "tlx.barrier_wait(fulls[slot], ((n // 2) & 1) ^ 1)"),
    ),
    wrong("14.6", "one slot", ("slot = n % 2", "slot = 0")),
    wrong("14.6", "slots in the other order", ("slot = n % 2", "slot = (n + 1) % 2")),
    right(
        "14.6",
        "dQ announced before its last product: dK is announced behind both, nobody is hurt",
        (DONE, ""),
        (DQ, "        if n == end - begin - 1:\n            tlx.tcgen05_commit(dq_full[0])\n" + DQ),
    ),
    wrong(
        "14.6",
        "dQ announced by an arrival, dQ's product last",
        (DQ, ""),
        (DK, DK + DQ.replace("force_async=True", "mBarriers=[empties[slot]]")),
        (FREE, ""),
        (DONE, DONE.replace("tlx.tcgen05_commit(dq_full[0])", "tlx.barrier_arrive(dq_full[0])")),
    ),
    wrong(
        "14.6",
        "dK's barrier on dQ's product",
        (DQ, DQ.replace("force_async=True", "mBarriers=[dk_fulls[0]]")),
        (DK, DK.replace("mBarriers=[dk_fulls[0]]", "force_async=True")),
    ),
    wrong("14.6", "dK waited for after its product", (DK_WAIT, ""), (DK, DK + DK_WAIT)),
    wrong("14.6", "dK waited for every second tile", (DK_WAIT, "        if n % 2 == 0:\n    " + DK_WAIT)),
    wrong("14.6", "dQ starts again every second tile", ("dq[0], use_acc=n > 0", "dq[0], use_acc=n % 2 > 0")),
    wrong("14.6", "dQ from the second tile on", ("dq[0], use_acc=n > 0", "dq[0], use_acc=n > 1")),
    wrong("14.6", "the tiles of the list", ("for n in range(end - begin)", "for n in range(begin, end)")),
    wrong(
        "14.6",
        "Q waited for with each tile",
        ("    if begin < end:\n        tlx.barrier_wait(q_full[0], 0)\n", ""),
        ("        slot = n % 2\n", "        slot = n % 2\n        tlx.barrier_wait(q_full[0], n & 1)\n"),
    ),
    wrong("14.6", "the slot freed before dK's product", (FREE, ""), (DK_WAIT, FREE + DK_WAIT)),
    right(
        "14.6",
        "the first tile begins dQ, a slot and a phase that turn",
        (
            RESIDENT,
            """    ds, k, fulls, empties = tiles
    slot, phase, turn = 0, 0, 0
    while begin + turn < end:
        if turn == 0:
            tlx.barrier_wait(q_full[0], 0)
        tlx.barrier_wait(fulls[slot], phase)
        tlx.barrier_wait(dk_empties[0], 1 - turn % 2)
        tlx.async_dot(tlx.local_trans(ds[slot]), q[0], dk[0], use_acc=False, mBarriers=[dk_fulls[0]])
        tlx.async_dot(ds[slot], k[slot], dq[0], use_acc=turn != 0, mBarriers=[empties[slot]])
        phase ^= slot
        slot ^= 1
        turn += 1
    if turn > 0:
        tlx.tcgen05_commit(dq_full[0])
""",
        ),
    ),
    right(
        "14.6",
        "the last product of dQ carries its barrier",
        (DONE, ""),
        (
            DQ,
            "        if n + 1 == end - begin:\n            tlx.async_dot(ds[slot], k[slot], dq[0], use_acc=n > 0, mBarriers=[dq_full[0]])\n        else:\n            tlx.async_dot(ds[slot], k[slot], dq[0], use_acc=n > 0, force_async=True)\n",
        ),
    ),
]
