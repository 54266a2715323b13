"""Answers to chapter 11's exercises."""

from tests.course.answers import right, wrong

EXPECT = "tlx.barrier_expect_bytes(fulls[slot], 2 * (BM * BK + BK * BN))"
LOAD_A = "tlx.async_descriptor_load(a_desc, a[slot], [0, k * BK], fulls[slot])"
LOAD_B = "tlx.async_descriptor_load(b_desc, b[slot], [k * BK, 0], fulls[slot])"

EPILOGUE = """    count = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        values = tl.zeros((BM, BN), tl.float32)
        if tl.load(steps_ptr + tile) > 0:
            which, use = place(count, 2)
            tlx.barrier_wait(acc_fulls[which], use)
            values = tlx.local_load(accs[which])
            tlx.barrier_arrive(acc_empties[which], 1)
            count += 1
        tlx.async_descriptor_store_wait(0)
        leave(c_desc, staging, values, tile * BM)
    tlx.async_descriptor_store_wait(0)
"""
RELEASE = "            tlx.barrier_arrive(acc_empties[which], 1)\n"
STORE_WAIT = "        tlx.async_descriptor_store_wait(0)\n        leave(c_desc, staging, values, tile * BM)\n"
LAST_WAIT = "tile * BM)\n    tlx.async_descriptor_store_wait(0)\n"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 11.1
    wrong("11.1", "waits on the same parity", ("empties[slot], phase ^ 1)", "empties[slot], phase)")),
    wrong("11.1", "no wait", ("                tlx.barrier_wait(empties[slot], phase ^ 1)\n", "")),
    wrong(
        "11.1",
        "no wait in the first round, then the same parity",
        (
            "tlx.barrier_wait(empties[slot], phase ^ 1)",
            "if k >= STAGES:\n                    tlx.barrier_wait(empties[slot], phase)",
        ),
    ),
    wrong("11.1", "A's bytes only", (EXPECT, "tlx.barrier_expect_bytes(fulls[slot], 2 * BM * BK)")),
    wrong("11.1", "elements for bytes", (EXPECT, "tlx.barrier_expect_bytes(fulls[slot], BM * BK + BK * BN)")),
    wrong("11.1", "fp32 bytes", (EXPECT, "tlx.barrier_expect_bytes(fulls[slot], 4 * (BM * BK + BK * BN))")),
    wrong(
        "11.1",
        "two announcements",
        (
            EXPECT,
            "tlx.barrier_expect_bytes(fulls[slot], 2 * BM * BK)\n                tlx.barrier_expect_bytes(fulls[slot], 2 * BK * BN)",
        ),
    ),
    right(
        "11.1",
        "announces after the copies",
        (f"                {EXPECT}\n", ""),
        (LOAD_B, f"{LOAD_B}\n                {EXPECT}"),
    ),
    wrong("11.1", "A by rows", ("a[slot], [0, k * BK]", "a[slot], [k * BK, 0]")),
    wrong("11.1", "B by columns", ("b[slot], [k * BK, 0]", "b[slot], [0, k * BK]")),
    wrong(
        "11.1",
        "the slice's number for its element",
        ("a[slot], [0, k * BK]", "a[slot], [0, k]"),
        ("b[slot], [k * BK, 0]", "b[slot], [k, 0]"),
    ),
    wrong(
        "11.1",
        "one slice too many",
        (
            "registers=24):  # load\n            for k in range(steps):",
            "registers=24):  # load\n            for k in range(steps + 1):",
        ),
    ),
    wrong(
        "11.1",
        "the last slice left out",
        (
            "registers=24):  # load\n            for k in range(steps):",
            "registers=24):  # load\n            for k in range(steps - 1):",
        ),
    ),
    wrong("11.1", "always slot 0", (LOAD_A, LOAD_A.replace("a[slot]", "a[0]"))),
    wrong(
        "11.1",
        "16 columns for good",
        (EXPECT, "tlx.barrier_expect_bytes(fulls[slot], 2 * (128 * 16 + 16 * 32))"),
        ("a[slot], [0, k * BK]", "a[slot], [0, k * 16]"),
        ("b[slot], [k * BK, 0]", "b[slot], [k * 16, 0]"),
    ),
    wrong(
        "11.1",
        "two stages for good",
        (
            "                slot, phase = place(k, STAGES)\n                tlx.barrier_wait(empties",
            "                slot, phase = k % 2, (k // 2) & 1\n                tlx.barrier_wait(empties",
        ),
    ),
    wrong(
        "11.1",
        "load_slice",
        (
            f"                {EXPECT}\n                {LOAD_A}\n                {LOAD_B}",
            "                load_slice(a_desc, b_desc, a[slot], b[slot], fulls[slot], 0, k)\n                tlx.async_descriptor_load(a_desc, a[slot], [0, k * BK], fulls[slot])\n",
        ),
    ),
    wrong(
        "11.1", "arrives on fulls besides", (LOAD_B, f"{LOAD_B}\n                tlx.barrier_arrive(fulls[slot], 1)")
    ),
    wrong(
        "11.1",
        "waits on fulls instead",
        ("tlx.barrier_wait(empties[slot], phase ^ 1)", "tlx.barrier_wait(fulls[slot], phase ^ 1)"),
    ),
    right(
        "11.1",
        "one operand in a helper",
        (
            f"                {EXPECT}\n                {LOAD_A}\n                {LOAD_B}",
            "                full = fulls[slot]\n                tlx.barrier_expect_bytes(full, 2 * BK * (BN + BM))\n                tlx.async_descriptor_load(b_desc, b[slot], [BK * k, 0], full)\n                tlx.async_descriptor_load(a_desc, a[slot], [0, BK * k], full)\n",
        ),
    ),
    right(
        "11.1",
        "no wait in the first round",
        (
            "                tlx.barrier_wait(empties[slot], phase ^ 1)\n",
            "                if k >= STAGES:\n                    tlx.barrier_wait(empties[slot], ((k // STAGES) - 1) & 1)\n",
        ),
    ),
    right(
        "11.1",
        "bytes named, place written out",
        (
            "                slot, phase = place(k, STAGES)\n                tlx.barrier_wait(empties[slot], phase ^ 1)\n",
            "                slot = k % STAGES\n                turn = k // STAGES\n                tlx.barrier_wait(empties[slot], (turn & 1) ^ 1)\n",
        ),
        (
            EXPECT,
            "BYTES: tl.constexpr = BM * BK * 2 + BN * BK * 2\n                tlx.barrier_expect_bytes(fulls[slot], BYTES)",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 11.2
    wrong(
        "11.2",
        "every tile counted",
        ("            count += 1\n        tlx.async", "        count += 1\n        tlx.async"),
    ),
    wrong(
        "11.2",
        "never counted",
        (
            "            tlx.barrier_arrive(acc_empties[which], 1)\n            count += 1\n",
            "            tlx.barrier_arrive(acc_empties[which], 1)\n",
        ),
    ),
    wrong(
        "11.2",
        "place of the tile's number",
        (
            "            which, use = place(count, 2)\n            tlx.barrier_wait(acc_fulls",
            "            which, use = place(tile, 2)\n            tlx.barrier_wait(acc_fulls",
        ),
    ),
    wrong(
        "11.2",
        "empty tiles skipped",
        (
            STORE_WAIT,
            "        if tl.load(steps_ptr + tile) > 0:\n            tlx.async_descriptor_store_wait(0)\n            leave(c_desc, staging, values, tile * BM)\n",
        ),
    ),
    wrong(
        "11.2",
        "given back before the load",
        (RELEASE, ""),
        (
            "            values = tlx.local_load(accs[which])\n",
            f"{RELEASE}            values = tlx.local_load(accs[which])\n",
        ),
    ),
    wrong("11.2", "never given back", (RELEASE, "")),
    wrong(
        "11.2",
        "given back for empty tiles too",
        (
            f"{RELEASE}            count += 1\n",
            "            count += 1\n        tlx.barrier_arrive(acc_empties[count % 2], 1)\n",
        ),
    ),
    wrong(
        "11.2", "staging written while it leaves", (STORE_WAIT, "        leave(c_desc, staging, values, tile * BM)\n")
    ),
    wrong("11.2", "the last store not waited for", (LAST_WAIT, "tile * BM)\n")),
    wrong("11.2", "one store may be under way", (STORE_WAIT, STORE_WAIT.replace("wait(0)", "wait(1)"))),
    wrong("11.2", "the last wait allows one", (LAST_WAIT, LAST_WAIT.replace("wait(0)", "wait(1)"))),
    wrong(
        "11.2",
        "row of the count",
        ("leave(c_desc, staging, values, tile * BM)", "leave(c_desc, staging, values, count * BM)"),
    ),
    wrong(
        "11.2", "row without BM", ("leave(c_desc, staging, values, tile * BM)", "leave(c_desc, staging, values, tile)")
    ),
    wrong(
        "11.2",
        "one program for good",
        (EPILOGUE.splitlines()[1] + "\n        values", "    for tile in range(0, tiles):\n        values"),
    ),
    wrong(
        "11.2",
        "phase the other way",
        ("tlx.barrier_wait(acc_fulls[which], use)", "tlx.barrier_wait(acc_fulls[which], use ^ 1)"),
    ),
    wrong(
        "11.2",
        "stores the accumulator of an empty tile",
        (EPILOGUE, EPILOGUE.replace("values = tl.zeros((BM, BN), tl.float32)", "values = tlx.local_load(accs[0])")),
    ),
    wrong(
        "11.2",
        "old values for an empty tile",
        (
            EPILOGUE,
            "    values = tl.zeros((BM, BN), tl.float32)\n"
            + EPILOGUE.replace("        values = tl.zeros((BM, BN), tl.float32)\n", ""),
        ),
    ),
    wrong(
        "11.2",
        "no fence",
        (
            "        leave(c_desc, staging, values, tile * BM)\n",
            "        tlx.local_store(staging, values)\n        tlx.async_descriptor_store(c_desc, staging, [tile * BM, 0])\n",
        ),
    ),
    wrong(
        "11.2",
        "128 rows for good, waits once",
        (
            STORE_WAIT,
            "        leave(c_desc, staging, values, tile * 128)\n        tlx.async_descriptor_store_wait(1)\n",
        ),
    ),
    right(
        "11.2",
        "waits right after each store",
        (
            EPILOGUE,
            EPILOGUE.replace("        tlx.async_descriptor_store_wait(0)\n", "").replace(
                "tile * BM)\n", "tile * BM)\n    "
            ),
        ),
    ),
    right(
        "11.2",
        "two branches, a while loop",
        (
            EPILOGUE,
            """    tile = tl.program_id(0)
    used = 0
    while tile < tiles:
        n = tl.load(steps_ptr + tile)
        if n == 0:
            tlx.async_descriptor_store_wait(0)
            leave(c_desc, staging, tl.zeros((BM, BN), dtype=tl.float32), tile * BM)
        else:
            acc = accs[used % 2]
            tlx.barrier_wait(acc_fulls[used % 2], (used // 2) % 2)
            x = tlx.local_load(acc)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(acc_empties[used % 2])
            leave(c_desc, staging, x, tile * BM)
            used = used + 1
        tile += tl.num_programs(0)
    tlx.async_descriptor_store_wait(0)
""",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 11.3
    wrong(
        "11.3",
        "turns counted by the tile's number",
        ("place(count * steps + k, STAGES)", "place(_ * steps + k, STAGES)"),
    ),
    wrong(
        "11.3",
        "the load role starts anew as well",
        ("place(count * steps + k, STAGES)", "place(k, STAGES)"),
        (
            "slot, phase = place(turn, STAGES)\n                    tlx.barrier_wait(empties",
            "slot, phase = place(k, STAGES)\n                    tlx.barrier_wait(empties",
        ),
    ),
    wrong("11.3", "count counted per slice", ("place(count * steps + k, STAGES)", "place(count + k, STAGES)")),
    wrong("11.3", "a tile late", ("place(count * steps + k, STAGES)", "place((count + 1) * steps + k, STAGES)")),
    wrong("11.3", "STAGES for steps", ("place(count * steps + k, STAGES)", "place(count * STAGES + k, STAGES)")),
    wrong("11.3", "the consumer's wait removed", ("                    tlx.barrier_wait(fulls[slot], phase)\n", "")),
    wrong("11.3", "the load's wait removed", ("                    tlx.barrier_wait(empties[slot], phase ^ 1)\n", "")),
    wrong(
        "11.3",
        "accumulator's phase forgotten",
        ("tlx.barrier_wait(acc_empties[which], use ^ 1)", "tlx.barrier_wait(acc_empties[which], 1)"),
    ),
    wrong(
        "11.3",
        "parity by the slice",
        (
            "place(count * steps + k, STAGES)\n                    free = empties[slot]\n                    tlx.barrier_wait(fulls[slot], phase)",
            "place(count * steps + k, STAGES)\n                    free = empties[slot]\n                    tlx.barrier_wait(fulls[slot], k & 1)",
        ),
    ),
    wrong(
        "11.3",
        "each slice loaded twice",
        (
            "                    load_slice(a_desc",
            "                    load_slice(a_desc, b_desc, a[slot], b[slot], fulls[slot], tile * BM, k)\n                    tlx.barrier_wait(fulls[slot], phase)\n                    load_slice(a_desc",
        ),
    ),
    wrong(
        "11.3",
        "all in one task",
        source="""
@triton.jit
def second_tile_kernel(a_desc, b_desc, c_desc, tiles, steps, STAGES: tl.constexpr):
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    a = tlx.local_alloc((BM, BK), tl.bfloat16, 1)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, 1)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    acc = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    turn = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        for k in range(steps):
            load_slice(a_desc, b_desc, a[0], b[0], full[0], tile * BM, k)
            tlx.barrier_wait(full[0], turn & 1)
            tlx.async_dot(a[0], b[0], acc[0], use_acc=k > 0, mBarriers=[done[0]])
            tlx.barrier_wait(done[0], turn & 1)
            turn += 1
        leave(c_desc, staging[0], tlx.local_load(acc[0]), tile * BM)
        tlx.async_descriptor_store_wait(0)
""",
    ),
    wrong(
        "11.3",
        "the products do not free, the load does not wait",
        ("mBarriers=[free])", "mBarriers=[])"),
        ("                    tlx.barrier_wait(empties[slot], phase ^ 1)\n", ""),
    ),
    right(
        "11.3",
        "a counter of turns",
        (
            "            count = 0\n            for _ in",
            "            count = 0\n            done = 0\n            for _ in",
        ),
        ("place(count * steps + k, STAGES)", "place(done, STAGES)"),
        (
            "accs[which], use_acc=k > 0, mBarriers=[free])\n",
            "accs[which], use_acc=k > 0, mBarriers=[free])\n                    done += 1\n",
        ),
    ),
    right(
        "11.3",
        "a base per tile",
        (
            "            count = 0\n            for _ in",
            "            count = 0\n            base = 0\n            for _ in",
        ),
        ("place(count * steps + k, STAGES)", "place(base + k, STAGES)"),
        (
            "                tlx.tcgen05_commit(acc_fulls[which])\n                count += 1\n",
            "                tlx.tcgen05_commit(acc_fulls[which])\n                base += steps\n                count += 1\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 11.4
    wrong(
        "11.4",
        "an arrive of the MMA role",
        (
            "                tlx.tcgen05_commit(acc_fulls[which])\n",
            "                tlx.barrier_arrive(acc_fulls[which], 1)\n",
        ),
    ),
    wrong(
        "11.4",
        "a commit for each slice",
        (
            "                tlx.tcgen05_commit(acc_fulls[which])\n",
            "                    tlx.tcgen05_commit(acc_fulls[which])\n",
        ),
    ),
    wrong(
        "11.4",
        "a commit at the very end",
        (
            "                tlx.tcgen05_commit(acc_fulls[which])\n",
            "            tlx.tcgen05_commit(acc_fulls[which])\n",
        ),
    ),
    wrong(
        "11.4",
        "the commit before the loop",
        ("                tlx.tcgen05_commit(acc_fulls[which])\n", ""),
        (
            "                for k in range(steps):\n                    slot, phase = place(tile * steps + k, STAGES)\n                    free",
            "                tlx.tcgen05_commit(acc_fulls[which])\n                for k in range(steps):\n                    slot, phase = place(tile * steps + k, STAGES)\n                    free",
        ),
    ),
    wrong(
        "11.4",
        "commits the wrong accumulator",
        ("tlx.tcgen05_commit(acc_fulls[which])", "tlx.tcgen05_commit(acc_fulls[which ^ 1])"),
    ),
    wrong(
        "11.4",
        "the epilogue waits a phase late",
        ("tlx.barrier_wait(acc_fulls[which], use)", "tlx.barrier_wait(acc_fulls[which], use ^ 1)"),
    ),
    wrong(
        "11.4",
        "a fence in the epilogue, the commit as it was",
        ("                tlx.tcgen05_commit(acc_fulls[which])\n", ""),
        (
            "                    tlx.async_dot(a[slot]",
            "                    if k == steps - 1:\n                        tlx.tcgen05_commit(acc_fulls[which])\n                    tlx.async_dot(a[slot]",
        ),
        (
            "                values = tlx.local_load(accs[which])",
            '                tlx.fence("async_shared")\n                values = tlx.local_load(accs[which])',
        ),
    ),
    wrong(
        "11.4",
        "the MMA role waits for the last slice and arrives",
        (
            "                tlx.tcgen05_commit(acc_fulls[which])\n",
            "                last, round_ = place(tile * steps + steps - 1, STAGES)\n                tlx.barrier_wait(empties[last], round_)\n                tlx.barrier_arrive(acc_fulls[which], 1)\n",
        ),
    ),
    wrong(
        "11.4",
        "the product twice",
        (
            "                    tlx.async_dot(a[slot]",
            "                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=False)\n                    tlx.async_dot(a[slot]",
        ),
    ),
    wrong(
        "11.4",
        "commit and arrive",
        (
            "                tlx.tcgen05_commit(acc_fulls[which])\n",
            "                tlx.tcgen05_commit(acc_fulls[which])\n                tlx.barrier_arrive(acc_fulls[which], 1)\n",
        ),
    ),
    wrong(
        "11.4",
        "early for more than one slice only",
        (
            "                tlx.tcgen05_commit(acc_fulls[which])\n",
            "                if steps == 1:\n                    tlx.tcgen05_commit(acc_fulls[which])\n",
        ),
        (
            "                    tlx.async_dot(a[slot]",
            "                    if k == steps - 1 and steps > 1:\n                        tlx.tcgen05_commit(acc_fulls[which])\n                    tlx.async_dot(a[slot]",
        ),
    ),
    wrong(
        "11.4",
        "never waits for its accumulator",
        ("                tlx.barrier_wait(acc_empties[which], use ^ 1)\n", ""),
    ),
    right(
        "11.4",
        "the commit after the last product, inside the loop",
        (
            "                tlx.tcgen05_commit(acc_fulls[which])\n",
            "                    if k == steps - 1:\n                        tlx.tcgen05_commit(acc_fulls[which])\n",
        ),
    ),
    right(
        "11.4",
        "the last product carries the barrier",
        ("                tlx.tcgen05_commit(acc_fulls[which])\n", ""),
        (
            "                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])\n",
            "                    if k + 1 == steps:\n                        tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free, acc_fulls[which]])\n                    else:\n                        tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 11.5
    wrong(
        "11.5",
        "the barrier before the load",
        ("                tl.debug_barrier()\n", ""),
        (
            "                hidden = tl.maximum",
            "                tl.debug_barrier()\n                hidden = tl.maximum",
        ),
    ),
    wrong(
        "11.5",
        "the barrier after the store",
        ("                tl.debug_barrier()\n", ""),
        (
            "                tlx.barrier_arrive(p_full[0], 1)",
            "                tl.debug_barrier()\n                tlx.barrier_arrive(p_full[0], 1)",
        ),
    ),
    wrong("11.5", "another fence", ("tl.debug_barrier()", 'tlx.fence("gpu")')),
    wrong("11.5", "no barrier at all", ("                tl.debug_barrier()\n", "")),
    wrong("11.5", "P beside S", ("reuse_group_type.shared", "reuse_group_type.distinct")),
    wrong(
        "11.5",
        "P of its own",
        ("tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=spec)", "tl.bfloat16, 1, tlx.storage_kind.tmem)"),
        ("    spec.set_buffer_overlap(tlx.reuse_group(s, p, group_type=tlx.reuse_group_type.shared))\n", ""),
    ),
    wrong("11.5", "waits for s_full again", ("tl.debug_barrier()", "tlx.barrier_wait(s_full[0], j & 1)")),
    wrong("11.5", "relu forgotten", ("tl.maximum(tlx.local_load(s[0]), 0.0)", "tlx.local_load(s[0])")),
    wrong("11.5", "not squared", ("(hidden * hidden)", "hidden")),
    wrong(
        "11.5",
        "the barrier in the first block only",
        ("tl.debug_barrier()", "if j == 0:\n                    tl.debug_barrier()"),
    ),
    wrong(
        "11.5",
        "the barrier in odd blocks only",
        ("tl.debug_barrier()", "if j % 2 == 1:\n                    tl.debug_barrier()"),
    ),
    wrong(
        "11.5",
        "P arrives before its store",
        ("                tlx.barrier_arrive(p_full[0], 1)\n", ""),
        (
            "                tlx.local_store(p[0]",
            "                tlx.barrier_arrive(p_full[0], 1)\n                tlx.local_store(p[0]",
        ),
    ),
    wrong("11.5", "four named-barrier threads", ("tl.debug_barrier()", "tlx.named_barrier_wait(9, 128)")),
    right("11.5", "a named barrier of all eight warps", ("tl.debug_barrier()", "tlx.named_barrier_wait(9, 256)")),
    right(
        "11.5",
        "the square before the barrier",
        (
            "                tl.debug_barrier()\n                tlx.local_store(p[0], (hidden * hidden).to(tl.bfloat16))\n",
            "                squared = (hidden * hidden).to(tl.bfloat16)\n                tl.debug_barrier()\n                tlx.local_store(p[0], squared)\n",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 11.6
    wrong("11.6", "two announcements deadlock", ('"over-arrival"', '"deadlock"')),
    wrong("11.6", "slices of one tile", ("tiles * steps > stages", "steps > stages")),
    wrong("11.6", "as many slices as stages", ("tiles * steps > stages", "tiles * steps >= stages")),
    wrong("11.6", "a deadlock always", ('"deadlock" if tiles * steps > stages else "nothing"', '"deadlock"')),
    wrong("11.6", "the second tile comes back", ("tiles > 2 ", "tiles > 1 ")),
    wrong("11.6", "the fourth tile comes back", ("tiles > 2 ", "tiles > 3 ")),
    wrong("11.6", "double release is an over-arrival", ('"phase" if comes_back else "nothing"', '"over-arrival"')),
    wrong("11.6", "double release only later", ('"phase" if comes_back', '"phase" if tiles > 3')),
    wrong("11.6", "stores meet with the third tile", ('"race" if tiles > 1', '"race" if comes_back')),
    wrong("11.6", "a race for the fence", ('"no fence": "fence"', '"no fence": "race"')),
    wrong(
        "11.6",
        "the fence matters from the second tile on",
        ('"no fence": "fence"', '"no fence": "fence" if tiles > 1 else "nothing"'),
    ),
    wrong("11.6", "a key forgotten", ('        "no fence": "fence",\n', "")),
    wrong("11.6", "early release always", ('"race" if comes_back else', '"race" if True else')),
    right(
        "11.6",
        "if by if",
        source='''
def findings(tiles, steps, stages):
    """What is found."""
    found = {name: "nothing" for name in ("kept slices", "early release", "double release", "no store wait")}
    found["no fence"] = "fence"
    found["two announcements"] = "over-arrival"
    if steps * tiles >= stages + 1:
        found["kept slices"] = "deadlock"
    if tiles >= 3:
        found["early release"] = "race"
        found["double release"] = "phase"
    if tiles != 1:
        found["no store wait"] = "race"
    print(found)
    return found
''',
    ),
    right(
        "11.6",
        "a dict by zip",
        source="""
FAULTS = "two announcements", "kept slices", "early release", "double release", "no store wait", "no fence"

def findings(tiles: int, steps: int, stages: int) -> dict[str, str]:
    turns = tiles * steps
    again = (tiles - 1) // 2 >= 1
    said = ["over-arrival", ["nothing", "deadlock"][turns > stages], ["nothing", "race"][again], ["nothing", "phase"][again], ["nothing", "race"][tiles >= 2], "fence"]
    return dict(zip(FAULTS, said))
""",
    ),
]
