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
]
