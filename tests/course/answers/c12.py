"""Answers to chapter 12's exercises 12.7 to 12.9."""

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

ATTEMPTS = [
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
