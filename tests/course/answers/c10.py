"""Answers to chapter 10's exercises on a ring of two consumers, on stores, and on a wait."""

from tests.course.answers import right, wrong

FULLS = (
    "    fulls = tlx.alloc_barriers(STAGES, arrive_count=1)\n    empties = tlx.alloc_barriers(STAGES, arrive_count=2)\n"
)
PRODUCER = """                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * (4 + 2))
                tlx.async_descriptor_load(x_desc, xs[slot], [0, k * COLS], fulls[slot])
                tlx.async_descriptor_load(y_desc, ys[slot], [0, k * COLS], fulls[slot])
"""
STEP = """        tlx.async_descriptor_store_wait(STAGES - 1)
        tlx.local_store(staging[k % STAGES], tl.exp(x))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(out_desc, staging[k % STAGES], [0, k * COLS])
"""
WALK = """                slot = slot + 1
                phase = phase ^ (slot == STAGES)
                slot = slot % STAGES
"""

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 10.7
    wrong("10.7", "one arrival", (FULLS, FULLS.replace("arrive_count=2", "arrive_count=1"))),
    wrong("10.7", "three arrivals", (FULLS, FULLS.replace("arrive_count=2", "arrive_count=3"))),
    wrong("10.7", "two arrivals at fulls", (FULLS, FULLS.replace("arrive_count=1", "arrive_count=2"))),
    wrong(
        "10.7",
        "arrivals exchanged",
        (
            FULLS,
            FULLS.replace("arrive_count=1", "arrive_count=x")
            .replace("arrive_count=2", "arrive_count=1")
            .replace("arrive_count=x", "arrive_count=2"),
        ),
    ),
    wrong("10.7", "one barrier each", (FULLS, FULLS.replace("STAGES,", "1,"))),
    wrong("10.7", "fp32 bytes for both", (PRODUCER, PRODUCER.replace("(4 + 2)", "8"))),
    wrong("10.7", "bf16 bytes for both", (PRODUCER, PRODUCER.replace("(4 + 2)", "4"))),
    wrong(
        "10.7",
        "two announcements",
        (
            PRODUCER,
            PRODUCER.replace(
                "                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * (4 + 2))\n",
                "                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * 4)\n                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * 2)\n",
            ),
        ),
    ),
    wrong("10.7", "the same parity", (PRODUCER, PRODUCER.replace(" ^ 1)", ")"))),
    wrong("10.7", "parity of the chunk", (PRODUCER, PRODUCER.replace("((k // STAGES) & 1) ^ 1", "(k & 1) ^ 1"))),
    wrong("10.7", "no wait", (PRODUCER, PRODUCER.split("\n", 1)[1])),
    wrong(
        "10.7", "rows for columns", (PRODUCER, PRODUCER.replace("ys[slot], [0, k * COLS]", "ys[slot], [k * COLS, 0]"))
    ),
    wrong("10.7", "chunk 0 of y", (PRODUCER, PRODUCER.replace("ys[slot], [0, k * COLS]", "ys[slot], [0, 0]"))),
    wrong(
        "10.7",
        "the last chunk left out",
        (
            "        with tlx.async_task(num_warps=1):  # producer\n            for k in range(chunks):",
            "        with tlx.async_task(num_warps=1):  # producer\n            for k in range(chunks - 1):",
        ),
    ),
    wrong(
        "10.7",
        "waits twice, once per consumer",
        (PRODUCER, PRODUCER.split("\n", 1)[0] + "\n" + PRODUCER),
        (FULLS, FULLS.replace("arrive_count=2", "arrive_count=1")),
    ),
    wrong(
        "10.7",
        "y by a wait of its own",
        (
            PRODUCER,
            PRODUCER.replace("ROWS * COLS * (4 + 2)", "ROWS * COLS * 4").replace(
                "[0, k * COLS], fulls[slot])\n" + " " * 16 + "tlx.async_descriptor_load(y",
                "[0, k * COLS], fulls[slot])\n"
                + " " * 16
                + "tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)\n"
                + " " * 16
                + "tlx.async_descriptor_load(y",
            ),
        ),
    ),
    right(
        "10.7",
        "from the second round on",
        (
            PRODUCER,
            PRODUCER.replace(
                "                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)\n",
                "                if k >= STAGES:\n                    tlx.barrier_wait(empties[slot], (k // STAGES - 1) & 1)\n",
            ),
        ),
    ),
    right(
        "10.7",
        "y first, bytes named",
        (FULLS, "    BOTH: tl.constexpr = 6 * ROWS * COLS\n" + FULLS.replace(", arrive_count=1", "")),
        (
            PRODUCER,
            """                tlx.barrier_wait(empties[slot], 1 - (k // STAGES) % 2)
                full = fulls[slot]
                tlx.barrier_expect_bytes(full, BOTH)
                tlx.async_descriptor_load(y_desc, ys[slot], [0, COLS * k], full)
                tlx.async_descriptor_load(x_desc, xs[slot], [0, COLS * k], full)
""",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 10.8
    wrong("10.8", "waits for STAGES", (STEP, STEP.replace("STAGES - 1", "STAGES"))),
    wrong("10.8", "waits for all", (STEP, STEP.replace("STAGES - 1", "0"))),
    wrong(
        "10.8",
        "waits for all behind the store",
        (STEP, STEP.split("\n", 1)[1] + "        tlx.async_descriptor_store_wait(0)\n"),
    ),
    wrong("10.8", "waits for one", (STEP, STEP.replace("STAGES - 1", "1"))),
    wrong("10.8", "no wait", (STEP, STEP.split("\n", 1)[1])),
    wrong(
        "10.8",
        "the wait behind the local store",
        (STEP, STEP.splitlines(True)[1] + STEP.splitlines(True)[0] + "".join(STEP.splitlines(True)[2:])),
    ),
    wrong("10.8", "no last wait", ("    tlx.async_descriptor_store_wait(0)\n", "")),
    wrong(
        "10.8",
        "the last wait lets one go",
        ("    tlx.async_descriptor_store_wait(0)\n", "    tlx.async_descriptor_store_wait(STAGES - 1)\n"),
    ),
    wrong("10.8", "no fence", (STEP, STEP.replace('        tlx.fence("async_shared")\n', ""))),
    wrong(
        "10.8",
        "the fence before the store",
        (
            STEP,
            STEP.replace('        tlx.fence("async_shared")\n', "").replace(
                "        tlx.local_store", '        tlx.fence("async_shared")\n        tlx.local_store'
            ),
        ),
    ),
    wrong("10.8", "one buffer", (STEP, STEP.replace("staging[k % STAGES]", "staging[0]"))),
    wrong("10.8", "exp2", (STEP, STEP.replace("tl.exp(x)", "tl.math.exp2(x)"))),
    wrong("10.8", "the chunk's number for its column", (STEP, STEP.replace("k * COLS]", "k]"))),
    wrong("10.8", "rows for columns", (STEP, STEP.replace("[0, k * COLS]", "[k * COLS, 0]"))),
    wrong("10.8", "adds", (STEP, STEP.replace("[0, k * COLS])", '[0, k * COLS], store_reduce="add")'))),
    right(
        "10.8",
        "the wait behind the store, one earlier",
        (STEP, STEP.split("\n", 1)[1] + "        tlx.async_descriptor_store_wait(STAGES - 1)\n"),
    ),
    right(
        "10.8",
        "waits only when the ring is full",
        (
            STEP,
            """        y = tl.exp(x)
        slot = k - k // STAGES * STAGES
        if k >= STAGES:
            tlx.async_descriptor_store_wait(STAGES - 1)
        buffer = staging[slot]
        tlx.local_store(buffer, y)
        tlx.fence("async_shared")
        tlx.async_descriptor_store(out_desc, buffer, [0, COLS * k])
""",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 10.9
    wrong(
        "10.9", "the phase after the slot is 0", (WALK, WALK.replace("phase ^ (slot == STAGES)", "phase ^ (slot == 0)"))
    ),
    wrong("10.9", "the phase never turns", (WALK, WALK.replace("phase ^ (slot == STAGES)", "phase"))),
    wrong("10.9", "the phase turns a chunk early", (WALK, WALK.replace("slot == STAGES", "slot == STAGES - 1"))),
    wrong("10.9", "two stages for good", (WALK, WALK.replace("slot == STAGES", "slot == 2"))),
    wrong("10.9", "no wait", ("                tlx.barrier_wait(fulls[slot], phase)\n", "")),
    wrong(
        "10.9",
        "given back before it is read",
        (
            "                tile = tlx.local_load(tiles[slot])\n                tlx.barrier_arrive(empties[slot], 1)\n",
            "                tlx.barrier_arrive(empties[slot], 1)\n                tile = tlx.local_load(tiles[slot])\n",
        ),
    ),
    wrong(
        "10.9",
        "waits for every second chunk",
        (
            "                tlx.barrier_wait(fulls[slot], phase)\n",
            "                if slot == 0:\n                    tlx.barrier_wait(fulls[slot], phase)\n",
        ),
    ),
    wrong(
        "10.9",
        "the producer turns its phase each chunk as well",
        (WALK, WALK.replace("phase ^ (slot == STAGES)", "phase ^ 1")),
        ("((k // STAGES) & 1) ^ 1)", "(k & 1) ^ 1)"),
    ),
    wrong("10.9", "absolute values", ("tile * tile", "tl.abs(tile)")),
    wrong(
        "10.9",
        "tl.load",
        source="""
@triton.jit
def square_sum_kernel(
    x_desc, out_ptr, chunks, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):
    total = tl.zeros((ROWS,), tl.float32)
    for k in range(chunks):
        tile = x_desc.load([0, k * COLS])
        total += tl.sum(tile * tile, axis=1)
    tl.store(out_ptr + tl.arange(0, ROWS), total)
""",
    ),
    right(
        "10.9",
        "the phase of the number",
        (
            "            for _ in range(chunks):\n                tlx.barrier_wait(fulls[slot], phase)\n",
            "            for n in range(chunks):\n                slot, phase = n % STAGES, (n // STAGES) & 1\n                tlx.barrier_wait(fulls[slot], phase)\n",
        ),
        (WALK, ""),
    ),
    right(
        "10.9",
        "an if",
        (
            WALK,
            "                slot += 1\n                if slot == STAGES:\n                    slot = 0\n                    phase = 1 - phase\n",
        ),
    ),
]
