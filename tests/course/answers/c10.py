"""Answers to chapter 10's exercises."""

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
    # ------------------------------------------------------------------------------------------ 10.1
    wrong("10.1", "squares", ("x * factor)", "x * x)")),
    wrong("10.1", "not scaled", ("x * factor)", "x)")),
    wrong("10.1", "three for good", ("x * factor)", "x * 3.0)")),
    wrong("10.1", "1,024 bytes for good", ("ROWS * COLS * 4)", "1024)")),
    wrong(
        "10.1",
        "the load is announced behind it",
        (
            "    tlx.barrier_expect_bytes(loaded[0], ROWS * COLS * 4)\n    tlx.async_descriptor_load(x_desc, source[0], [0, 0], loaded[0])\n    tlx.barrier_wait(loaded[0], 0)\n",
            "    tlx.async_descriptor_load(x_desc, source[0], [0, 0], loaded[0])\n    tlx.barrier_wait(loaded[0], 0)\n    tlx.barrier_expect_bytes(loaded[0], ROWS * COLS * 4)\n",
        ),
    ),
    wrong(
        "10.1",
        "the store waits for one that may be under way",
        ("async_descriptor_store_wait(0)", "async_descriptor_store_wait(1)"),
    ),
    wrong(
        "10.1",
        "stored by the threads",
        (
            '    tlx.fence("async_shared")\n    tlx.async_descriptor_store(out_desc, result[0], [0, 0])\n    tlx.async_descriptor_store_wait(0)',
            "    out_desc.store([0, 0], tlx.local_load(result[0]))",
        ),
    ),
    wrong("10.1", "loaded by the threads", ("x = tlx.local_load(source[0])", "x = x_desc.load([0, 0])")),
    right(
        "10.1",
        "in halves of columns",
        ("    tlx.local_store(result[0], x * factor)\n", "    y = x * factor\n    tlx.local_store(result[0], y)\n"),
    ),
    # ------------------------------------------------------------------------------------------ 10.2
    wrong("10.2", "two buffers for good", ("turn = k // stages", "turn = k // 2")),
    wrong("10.2", "parities exchanged", ("turn % 2, (turn + 1) % 2", "(turn + 1) % 2, turn % 2")),
    wrong("10.2", "a turn begins at its last buffer", ("turn = k // stages", "turn = (k + 1) // stages")),
    wrong("10.2", "rounds from 1", ("    turn =", "    k = k + 1\n    turn =")),
    wrong("10.2", "parity of the buffer", ("turn % 2, (turn + 1) % 2", "k % stages % 2, (k % stages + 1) % 2")),
    wrong("10.2", "booleans the wrong way round", ("(turn + 1) % 2", "bool(turn % 2)")),
    wrong("10.2", "always passes", ("(turn + 1) % 2", "1")),
    right(
        "10.2",
        "bits",
        ("return k % stages, turn % 2, (turn + 1) % 2", "return k - turn * stages, turn & 1, (turn & 1) ^ 1"),
    ),
    right(
        "10.2",
        "itertools",
        source="""
from itertools import cycle, islice, product


def ring_round(k: int, stages: int) -> tuple[int, int, int]:
    rounds = ((slot, parity, 1 - parity) for parity, slot in product((0, 1), range(stages)))
    return next(islice(cycle(rounds), k, None))
""",
    ),
    # ------------------------------------------------------------------------------------------ 10.3
    wrong(
        "10.3",
        "parity of the round",
        ("(k // STAGES) & 1)\n                largest", "k & 1)\n                largest"),
    ),
    wrong(
        "10.3",
        "the producer's parity",
        ("(k // STAGES) & 1)\n                largest", "((k // STAGES) & 1) ^ 1)\n                largest"),
    ),
    wrong(
        "10.3",
        "two stages for good",
        (
            "                slot = k % STAGES\n                tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)\n",
            "                slot = k % 2\n                tlx.barrier_wait(fulls[slot], (k // 2) & 1)\n",
        ),
    ),
    wrong(
        "10.3",
        "one chunk too few",
        (
            "            for k in range(chunks):\n                slot = k % STAGES\n                tlx.barrier_wait(fulls",
            "            for k in range(chunks - 1):\n                slot = k % STAGES\n                tlx.barrier_wait(fulls",
        ),
    ),
    wrong(
        "10.3",
        "one chunk too many",
        (
            "            for k in range(chunks):\n                slot = k % STAGES\n                tlx.barrier_wait(fulls",
            "            for k in range(chunks + 1):\n                slot = k % STAGES\n                tlx.barrier_wait(fulls",
        ),
    ),
    wrong(
        "10.3",
        "gives the next buffer back",
        ("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(empties[(k + 1) % STAGES], 1)"),
    ),
    wrong("10.3", "arrives at fulls", ("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(fulls[slot], 1)")),
    wrong(
        "10.3",
        "gives back all but the last turn's",
        (
            "                tlx.barrier_arrive(empties[slot], 1)\n",
            "                if k + 2 * STAGES < chunks:\n                    tlx.barrier_arrive(empties[slot], 1)\n",
        ),
    ),
    wrong(
        "10.3",
        "largest magnitude",
        ("tl.max(tlx.local_load(tiles[slot]), axis=1)", "tl.max(tl.abs(tlx.local_load(tiles[slot])), axis=1)"),
    ),
    wrong("10.3", "at least 0", ("tl.maximum(largest, tl.max(", "tl.maximum(tl.maximum(largest, 0.0), tl.max(")),
    right(
        "10.3",
        "not given back in the last turn",
        (
            "                tlx.barrier_arrive(empties[slot], 1)\n",
            "                if k + STAGES < chunks:\n                    tlx.barrier_arrive(empties[slot])\n",
        ),
    ),
    right(
        "10.3",
        "turn and slot as two loops",
        (
            "            for k in range(chunks):\n                slot = k % STAGES\n                tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)\n                largest",
            "            turn, slot = 0, -1\n            for k in range(chunks):\n                slot += 1\n                if slot == STAGES:\n                    turn, slot = turn ^ 1, 0\n                tlx.barrier_wait(fulls[slot], turn)\n                largest",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 10.4
    wrong(
        "10.4",
        "gives back the next",
        ("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(empties[(slot + 1) % STAGES], 1)"),
    ),
    wrong(
        "10.4",
        "gives back all",
        (
            "                tlx.barrier_arrive(empties[slot], 1)\n",
            "                for i in tl.static_range(STAGES):\n                    tlx.barrier_arrive(empties[i], 1)\n",
        ),
    ),
    wrong(
        "10.4",
        "gives back by parity",
        ("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(empties[k & 1], 1)"),
    ),
    wrong(
        "10.4",
        "buffer 0 alone",
        (
            "                tlx.barrier_arrive(empties[slot], 1)\n",
            "                if slot == 0:\n                    tlx.barrier_arrive(empties[slot], 1)\n",
        ),
    ),
    wrong(
        "10.4",
        "the producer waits for buffer 0",
        ("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(empties[0], 1)"),
        (
            "tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)",
            "tlx.barrier_wait(empties[0], ((k // STAGES) & 1) ^ 1)",
        ),
    ),
    wrong(
        "10.4",
        "a barrier for as many arrivals as stages",
        ("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(empties[0], 1)"),
        (
            "empties = tlx.alloc_barriers(STAGES, arrive_count=1)",
            "empties = tlx.alloc_barriers(STAGES, arrive_count=STAGES)",
        ),
    ),
    wrong(
        "10.4",
        "given back before it is read",
        (
            "                total += tl.sum(tlx.local_load(tiles[slot]), axis=1)\n                tlx.barrier_arrive(empties[slot], 1)\n",
            "                tlx.barrier_arrive(empties[slot], 1)\n                total += tl.sum(tlx.local_load(tiles[slot]), axis=1)\n",
        ),
    ),
    right(
        "10.4",
        "a view of the barrier",
        (
            "tlx.barrier_arrive(empties[slot], 1)",
            "tlx.barrier_arrive(tlx.local_view(empties, k - k // STAGES * STAGES))",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 10.5
    wrong(
        "10.5",
        "arrives and commits",
        ("mBarriers=[empty[0]])", "mBarriers=[empty[0]])\n                tlx.barrier_arrive(empty[0], 1)"),
    ),
    wrong(
        "10.5",
        "commits in front of the product",
        (
            "                tlx.async_dot(a[0], b[0], acc[0], use_acc=k > 0, mBarriers=[empty[0]])",
            "                tlx.tcgen05_commit(empty[0])\n                tlx.async_dot(a[0], b[0], acc[0], use_acc=k > 0, force_async=True)",
        ),
    ),
    wrong("10.5", "adds from the second slice only when even", ("use_acc=k > 0", "use_acc=k > 1")),
    wrong("10.5", "the load no longer waits", ("                tlx.barrier_wait(empty[0], (k & 1) ^ 1)\n", "")),
    wrong("10.5", "the epilogue no longer waits", ("            tlx.barrier_wait(done[0], 0)\n", "")),
    wrong(
        "10.5",
        "done is told when issued",
        ("            tlx.tcgen05_commit(done[0])", "            tlx.barrier_arrive(done[0], 1)"),
    ),
    wrong("10.5", "64 columns for good", ("m[:, None] * N + n[None, :]", "m[:, None] * 64 + n[None, :]")),
    right(
        "10.5",
        "done with the last product",
        ("use_acc=k > 0, mBarriers=[empty[0]])", "use_acc=k >= 1, mBarriers=[empty[0]])"),
    ),
    # ------------------------------------------------------------------------------------------ 10.6
    wrong(
        "10.6",
        "64 columns for good",
        ("acc = tlx.local_alloc((M, N), tl.float32, 1,", "acc = tlx.local_alloc((M, 64), tl.float32, 1,"),
    ),
    wrong("10.6", "C is subtracted", ("tl.load(c_ptr + at))", "-tl.load(c_ptr + at))")),
    wrong("10.6", "C in bf16", ("tl.load(c_ptr + at))", "tl.load(c_ptr + at).to(tl.bfloat16).to(tl.float32))")),
    wrong(
        "10.6",
        "C twice",
        (
            "tl.store(out_ptr + at, tlx.local_load(acc[0]))",
            "tl.store(out_ptr + at, tlx.local_load(acc[0]) + tl.load(c_ptr + at))",
        ),
    ),
    wrong(
        "10.6",
        "multiplied twice",
        (
            "    tlx.async_dot(a[0], b[0], acc[0], use_acc=True, mBarriers=[done[0]])\n",
            "    tlx.async_dot(a[0], b[0], acc[0], use_acc=True, force_async=True)\n    tlx.async_dot(a[0], b[0], acc[0], use_acc=True, mBarriers=[done[0]])\n",
        ),
    ),
    wrong("10.6", "waits for the other parity", ("tlx.barrier_wait(done[0], 0)", "tlx.barrier_wait(done[0], 1)")),
    wrong("10.6", "A's bytes counted with N", ("2 * (M * K + K * N)", "2 * (M * N + K * N)")),
    wrong(
        "10.6",
        "C is put there behind the product",
        ("    tlx.local_store(acc[0], tl.load(c_ptr + at))\n", ""),
        (
            "    tlx.barrier_wait(done[0], 0)\n",
            "    tlx.barrier_wait(done[0], 0)\n    tlx.local_store(acc[0], tlx.local_load(acc[0]) + tl.load(c_ptr + at))\n",
        ),
        ("use_acc=True", "use_acc=False"),
    ),
    wrong(
        "10.6",
        "loaded by the threads",
        (
            "    tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])\n    tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])\n",
            "    tlx.local_store(a[0], a_desc.load([0, 0]))\n    tlx.local_store(b[0], b_desc.load([0, 0]))\n    tlx.barrier_arrive(loaded[0], 1)\n",
        ),
        ("    tlx.barrier_expect_bytes(loaded[0], 2 * (M * K + K * N))\n", ""),
    ),
    right(
        "10.6",
        "B first, and C in two halves",
        (
            "    tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])\n    tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])\n",
            "    tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])\n    tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])\n",
        ),
        ("use_acc=True, mBarriers=[done[0]])", "mBarriers=[done[0]])"),
    ),
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
