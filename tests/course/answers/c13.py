"""Answers to chapter 13's exercises."""

from tests.course.answers import right, wrong

HEAD = """    q_tiles, q_fulls, q_empties = queries
    k_tiles, k_fulls, k_empties = keys
    o_tiles, o_fulls, o_empties = outs
    unit, done, steps_done = tl.program_id(0), 0, 0
"""
LOOP = """        for j in range(steps):
            stage, phase = ring(steps_done + j, STAGES)
            tlx.barrier_wait(k_fulls[stage], phase)
            block = tlx.local_load(k_tiles[stage])
            tlx.barrier_arrive(k_empties[stage])
            real = j * BM + tl.arange(0, BM) < k_len
            total += tl.sum(tl.where(real[:, None], block, 0.0), axis=0)
"""
QUERY = """        tlx.barrier_wait(q_fulls[half], done & 1)
        x = tl.sum(tlx.local_load(q_tiles[half]) * total[None, :], axis=1)
        tlx.barrier_arrive(q_empties[half])
"""
OUT = """        tlx.barrier_wait(o_empties[half], (done & 1) ^ 1)
        tlx.local_store(o_tiles[half], x)
        tlx.barrier_arrive(o_fulls[half])
"""
STORE = """            unit, done = tl.program_id(0), 0
            while unit >= 0:
                store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                done += 1
"""
COMPUTE = """            unit, done, steps_done = tl.program_id(0), 0, 0
            while unit >= 0:
                record = read_record(records_ptr, unit)
                compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                steps_done += steps_of(record[2], BM)
                done += 1
"""
LOAD = """            unit, done, steps_done = tl.program_id(0), 0, 0
            while unit >= 0:
                tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)
                record = read_record(records_ptr, unit)
                load_tile(q_desc, k_desc, queries, keys, record, done, steps_done, BM, D, STAGES)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                steps_done += steps_of(record[2], BM)
                done += 1
"""
ASK = "                tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)\n"
ANSWER = "                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)\n"
SKIP_STORE = """            while (unit >= 0) & (unit < count):
                store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)
"""
SKIP_COMPUTE = """            while (unit >= 0) & (unit < count):
                record = read_record(records_ptr, unit)
                compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                steps_done += steps_of(record[2], BM)
                done += 1
"""
SKIP_LOAD = """            while (unit >= 0) & (unit < count):
                tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)
                record = read_record(records_ptr, unit)
                load_tile(q_desc, k_desc, queries, keys, record, done, steps_done, BM, D, STAGES)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                steps_done += steps_of(record[2], BM)
                done += 1
"""
TWO_COUNTERS_COMPUTE = """            used = 0
            while unit >= 0:
                if unit < count:
                    record = read_record(records_ptr, unit)
                    compute_tile(queries, keys, outs, half, record, used, steps_done, BM, D, STAGES)
                    steps_done += steps_of(record[2], BM)
                    used += 1
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                done += 1
"""
TWO_COUNTERS_LOAD = """            used = 0
            while unit >= 0:
                tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)
                if unit < count:
                    record = read_record(records_ptr, unit)
                    load_tile(q_desc, k_desc, queries, keys, record, used, steps_done, BM, D, STAGES)
                    steps_done += steps_of(record[2], BM)
                    used += 1
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                done += 1
"""
TWO_COUNTERS_STORE = """            used = 0
            while unit >= 0:
                if unit < count:
                    store_tile(out_ptr, outs, read_record(records_ptr, unit), used, BM)
                    used += 1
"""
O_WAIT = "                tlx.barrier_wait(o_empties[slot], phase ^ 1)\n                tlx.barrier_expect_bytes"
O_EPI = "                tlx.barrier_wait(o_empties[slot], phase ^ 1)\n                tlx.local_store"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 13.1
    wrong("13.1", "the ring starts anew with each tile", ("ring(steps_done + j, STAGES)", "ring(j, STAGES)")),
    wrong(
        "13.1", "steps counted after the first", ("        steps_done += steps\n", "        steps_done += steps - 1\n")
    ),
    wrong(
        "13.1", "steps counted by keys", ("        steps_done += steps\n", "        steps_done += tl.cdiv(k_len, BM)\n")
    ),
    wrong("13.1", "no step without keys", ("steps = steps_of(k_len, BM)", "steps = tl.cdiv(k_len, BM)")),
    wrong("13.1", "masked by a product", ("tl.where(real[:, None], block, 0.0)", "block * real[:, None]")),
    wrong("13.1", "not masked", ("tl.where(real[:, None], block, 0.0)", "block")),
    wrong("13.1", "one key too many", ("tl.arange(0, BM) < k_len", "tl.arange(0, BM) <= k_len")),
    wrong(
        "13.1",
        "every block masked like the first",
        ("real = j * BM + tl.arange(0, BM) < k_len", "real = tl.arange(0, BM) < k_len"),
    ),
    wrong(
        "13.1",
        "one half arrives for both",
        (
            "            tlx.barrier_arrive(k_empties[stage])\n",
            "            if half == 0:\n                tlx.barrier_arrive(k_empties[stage], 2)\n",
        ),
    ),
    wrong(
        "13.1",
        "only one half arrives",
        (
            "            tlx.barrier_arrive(k_empties[stage])\n",
            "            if half == 0:\n                tlx.barrier_arrive(k_empties[stage])\n",
        ),
    ),
    wrong(
        "13.1",
        "the block given back before it is read",
        (
            "            block = tlx.local_load(k_tiles[stage])\n            tlx.barrier_arrive(k_empties[stage])\n",
            "            tlx.barrier_arrive(k_empties[stage])\n            block = tlx.local_load(k_tiles[stage])\n",
        ),
    ),
    wrong(
        "13.1", "Q's phase stays", ("tlx.barrier_wait(q_fulls[half], done & 1)", "tlx.barrier_wait(q_fulls[half], 0)")
    ),
    wrong(
        "13.1",
        "phase of the unit",
        ("tlx.barrier_wait(q_fulls[half], done & 1)", "tlx.barrier_wait(q_fulls[half], unit & 1)"),
    ),
    wrong("13.1", "Q not given back", ("        tlx.barrier_arrive(q_empties[half])\n", "")),
    wrong(
        "13.1",
        "Q given back before it is read",
        (
            QUERY,
            QUERY.replace("        tlx.barrier_arrive(q_empties[half])\n", "").replace(
                "        x =", "        tlx.barrier_arrive(q_empties[half])\n        x ="
            ),
        ),
    ),
    wrong("13.1", "o not waited for", ("        tlx.barrier_wait(o_empties[half], (done & 1) ^ 1)\n", "")),
    wrong("13.1", "o's phase the other way", ("(done & 1) ^ 1", "done & 1")),
    wrong(
        "13.1",
        "arrives on o before the store",
        (OUT, OUT.splitlines(True)[0] + OUT.splitlines(True)[2] + OUT.splitlines(True)[1]),
    ),
    wrong(
        "13.1",
        "every unit",
        (
            "        steps_done += steps\n        unit, done = unit + tl.num_programs(0), done + 1\n",
            "        steps_done += steps\n        unit, done = unit + 1, done + 1\n",
        ),
    ),
    wrong(
        "13.1",
        "sum over the wrong axis",
        (
            "x = tl.sum(tlx.local_load(q_tiles[half]) * total[None, :], axis=1)",
            "x = tl.sum(tlx.local_load(q_tiles[half]) * total[None, :], axis=0)",
        ),
    ),
    wrong(
        "13.1",
        "total goes on from tile to tile",
        ("        total = tl.zeros((D,), tl.float32)\n", ""),
        (HEAD, HEAD + "    total = tl.zeros((D,), tl.float32)\n"),
    ),
    wrong("13.1", "both halves read half 0", ("tlx.local_load(q_tiles[half])", "tlx.local_load(q_tiles[0])")),
    right(
        "13.1",
        "a running turn, Q first",
        (
            "            stage, phase = ring(steps_done + j, STAGES)\n",
            "            stage, phase = ring(steps_done, STAGES)\n",
        ),
        (
            "            total += tl.sum(tl.where(real[:, None], block, 0.0), axis=0)\n",
            "            total += tl.sum(tl.where(real[:, None], block, 0.0), axis=0)\n            steps_done += 1\n",
        ),
        ("        steps_done += steps\n", ""),
    ),
    right(
        "13.1",
        "dot products block by block",
        (
            LOOP,
            "        x = tl.zeros((BM,), tl.float32)\n        tlx.barrier_wait(q_fulls[half], done & 1)\n        q = tlx.local_load(q_tiles[half])\n        tlx.barrier_arrive(q_empties[half])\n"
            + LOOP.replace(
                "total += tl.sum(tl.where(real[:, None], block, 0.0), axis=0)",
                "block = tl.where(real[:, None], block, 0.0)\n            x += tl.sum(q * tl.sum(block, axis=0)[None, :], axis=1)",
            ),
        ),
        (QUERY, ""),
    ),
    # ------------------------------------------------------------------------------------------ 13.2
    wrong(
        "13.2", "heads apart", ("tile, head = unit // heads, unit % heads", "tile, head = unit % tiles, unit // tiles")
    ),
    wrong("13.2", "key heads in turn", ("kv_head = head // (heads // kv_heads)", "kv_head = head % kv_heads")),
    wrong("13.2", "key head by kv_heads", ("kv_head = head // (heads // kv_heads)", "kv_head = head // kv_heads")),
    wrong("13.2", "one surplus unit taken", ("if tile >= tiles:", "if tile > tiles:")),
    wrong("13.2", "surplus by the list's room", ("if tile >= tiles:", "if tile >= len(records):")),
    wrong("13.2", "surplus by unit", ("if tile >= tiles:", "if unit >= tiles:")),
    wrong("13.2", "rows that do not exist", ("q_begin + min(row + 2 * block, q_len)", "q_begin + row + 2 * block")),
    wrong("13.2", "middle not clipped", ("middle = min(begin + block, end)", "middle = begin + block")),
    wrong(
        "13.2",
        "clipped at the packed row",
        ("q_begin + min(row + 2 * block, q_len)", "min(q_begin + row + 2 * block, q_len)"),
    ),
    wrong(
        "13.2", "a block of one half", ("q_begin + min(row + 2 * block, q_len)", "q_begin + min(row + block, q_len)")
    ),
    wrong("13.2", "out_row without the row", ("out_begin + row, int", "out_begin, int")),
    wrong("13.2", "out_row is begin", ("out_begin + row, int", "begin, int")),
    wrong("13.2", "shared if the second half is not full", ("int(middle == end)", "int(end - begin < 2 * block)")),
    wrong("13.2", "shared if less than a block", ("int(middle == end)", "int(end - begin < block)")),
    wrong("13.2", "shared where out_row differs", ("int(middle == end)", "int(out_begin != q_begin)")),
    wrong("13.2", "begin without the sequence", ("begin, end = q_begin + row,", "begin, end = row,")),
    right("13.2", "tensors back", ("records[tile, :4].tolist()", "records[tile, :4]")),
    right(
        "13.2",
        "divmod, typed",
        source="""
def locate(unit: int, records, tiles: int, heads: int, kv_heads: int, block: int):
    tile, head = divmod(unit, heads)
    if not tile < tiles:
        return tuple(-1 for _ in range(7))
    r = [int(x) for x in records[tile]]
    exists = max(0, min(2 * block, r[1] - r[2]))
    first = min(block, exists)
    start = r[0] + r[2]
    shared = 1 if exists <= block else 0
    return [head, head * kv_heads // heads, start, start + first, start + exists, r[3] + r[2], shared]
""",
    ),
    right(
        "13.2",
        "by names",
        source="""
NAMES = "q_begin q_len row out_begin k_begin k_len lo hi pad_begin".split()

def locate(unit, records, tiles, heads, kv_heads, block):
    t = unit // heads
    if t >= tiles:
        return -1, -1, -1, -1, -1, -1, -1
    r = dict(zip(NAMES, records[t].tolist()))
    last = r["q_begin"] + r["q_len"]
    begin = r["q_begin"] + r["row"]
    middle, end = min(begin + block, last), min(begin + 2 * block, last)
    h = unit - t * heads
    return h, h // (heads // kv_heads), begin, middle, end, begin - r["q_begin"] + r["out_begin"], 1 if middle >= end else 0
""",
    ),
    # ------------------------------------------------------------------------------------------ 13.3
    wrong("13.3", "three consumers", ("num_consumers=4", "num_consumers=3")),
    wrong("13.3", "five consumers", ("num_consumers=4", "num_consumers=5")),
    wrong("13.3", "one stage used as two", ("num_stages=2", "num_stages=1")),
    wrong(
        "13.3",
        "store's phase by every tile",
        (STORE, STORE.replace("(done >> 1) & 1, k=done & 1", "done & 1, k=done & 1")),
    ),
    wrong(
        "13.3",
        "always stage 0",
        (STORE, STORE.replace("k=done & 1", "k=0")),
        (COMPUTE, COMPUTE.replace("k=done & 1", "k=0")),
        (LOAD, LOAD.replace("k=done & 1", "k=0")),
    ),
    wrong("13.3", "producer's phase like a consumer's", ("((done >> 1) & 1) ^ 1", "(done >> 1) & 1")),
    wrong(
        "13.3",
        "both load and store ask",
        (STORE, STORE.replace("                store_tile", ASK + "                store_tile")),
    ),
    wrong("13.3", "nobody asks", (ASK, "")),
    wrong("13.3", "asks only on even tiles", (ASK, "                if done % 2 == 0:\n    " + ASK)),
    wrong(
        "13.3",
        "asks once more after the end",
        (LOAD, LOAD + "            tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)\n"),
    ),
    wrong(
        "13.3",
        "asks before the first tile and after it",
        (LOAD, LOAD.replace("            while", "            tlx.clc_producer(queue, 1, k=0)\n            while")),
    ),
    wrong(
        "13.3",
        "starts with the queue's first answer",
        (STORE, STORE.replace("unit, done = tl.program_id(0), 0", "unit, done = tlx.clc_consumer(queue, 0, k=0), 1")),
    ),
    wrong(
        "13.3",
        "steps counted before the tile",
        (
            COMPUTE,
            COMPUTE.replace("                steps_done += steps_of(record[2], BM)\n", "").replace(
                "                compute_tile",
                "                steps_done += steps_of(record[2], BM)\n                compute_tile",
            ),
        ),
    ),
    wrong(
        "13.3",
        "steps of the next tile",
        (
            LOAD,
            LOAD.replace(
                "steps_done += steps_of(record[2], BM)",
                "steps_done += steps_of(read_record(records_ptr, tl.maximum(unit, 0))[2], BM)",
            ),
        ),
    ),
    wrong(
        "13.3",
        "steps never counted",
        (LOAD, LOAD.replace("                steps_done += steps_of(record[2], BM)\n", "")),
        (COMPUTE, COMPUTE.replace("                steps_done += steps_of(record[2], BM)\n", "")),
    ),
    wrong("13.3", "done stays in compute", (COMPUTE, COMPUTE.replace("                done += 1\n", ""))),
    wrong("13.3", "unit 0 ends", (STORE, STORE.replace("while unit >= 0", "while unit > 0"))),
    wrong(
        "13.3",
        "static instead",
        ("    queue = tlx.clc_create_context(num_consumers=4, num_stages=2)\n", ""),
        (STORE, STORE.replace(ANSWER, "                unit = -1\n")),
        (COMPUTE, COMPUTE.replace(ANSWER, "                unit = -1\n")),
        (LOAD, LOAD.replace(ANSWER, "                unit = -1\n").replace(ASK, "")),
    ),
    wrong(
        "13.3",
        "only replica 0 reads",
        (COMPUTE, COMPUTE.replace(ANSWER, "                if half == 0:\n    " + ANSWER)),
    ),
    right("13.3", "asks after the loads", (LOAD, LOAD.replace(ASK, "").replace(ANSWER, ASK + ANSWER))),
    right(
        "13.3",
        "one stage",
        ("num_stages=2", "num_stages=1"),
        (STORE, STORE.replace("(done >> 1) & 1, k=done & 1", "done & 1, k=0")),
        (COMPUTE, COMPUTE.replace("(done >> 1) & 1, k=done & 1", "done & 1, k=0")),
        (LOAD, LOAD.replace("(done >> 1) & 1", "done & 1").replace("k=done & 1", "k=0")),
    ),
    right(
        "13.3",
        "three stages",
        ("num_stages=2", "num_stages=3"),
        (STORE, STORE.replace("(done >> 1) & 1, k=done & 1", "(done // 3) & 1, k=done % 3")),
        (COMPUTE, COMPUTE.replace("(done >> 1) & 1, k=done & 1", "(done // 3) & 1, k=done % 3")),
        (LOAD, LOAD.replace("(done >> 1) & 1", "(done // 3) & 1").replace("k=done & 1", "k=done % 3")),
    ),
    # ------------------------------------------------------------------------------------------ 13.4
    right(
        "13.4",
        "all walk on and count surplus units as done: none is used after them",
        (
            SKIP_STORE,
            "            while unit >= 0:\n                if unit < count:\n                    store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)\n",
        ),
        (SKIP_COMPUTE, TWO_COUNTERS_COMPUTE.replace("used, steps_done", "done, steps_done")),
        (SKIP_LOAD, TWO_COUNTERS_LOAD.replace("used, steps_done", "done, steps_done")),
    ),
    wrong("13.4", "load walks on as well", (SKIP_STORE, TWO_COUNTERS_STORE), (SKIP_LOAD, TWO_COUNTERS_LOAD)),
    right(
        "13.4",
        "one role counts all",
        (SKIP_STORE, TWO_COUNTERS_STORE.replace("used, BM", "done, BM")),
        (SKIP_COMPUTE, TWO_COUNTERS_COMPUTE),
        (SKIP_LOAD, TWO_COUNTERS_LOAD),
    ),
    wrong(
        "13.4",
        "up to count and one more",
        (SKIP_STORE, SKIP_STORE.replace("unit < count", "unit <= count")),
        (SKIP_COMPUTE, SKIP_COMPUTE.replace("unit < count", "unit <= count")),
        (SKIP_LOAD, SKIP_LOAD.replace("unit < count", "unit <= count")),
    ),
    wrong(
        "13.4",
        "no queue",
        (SKIP_STORE, SKIP_STORE.replace("while (unit >= 0) & (unit < count)", "if unit < count")),
        (
            SKIP_COMPUTE,
            SKIP_COMPUTE.replace("while (unit >= 0) & (unit < count)", "if unit < count").replace(ANSWER, ""),
        ),
        (
            SKIP_LOAD,
            SKIP_LOAD.replace("while (unit >= 0) & (unit < count)", "if unit < count")
            .replace(ANSWER, "")
            .replace(ASK, ""),
        ),
        (
            "                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)\n                done += 1\n        with tlx.async_task(num_warps=4",
            "                done += 1\n        with tlx.async_task(num_warps=4",
        ),
    ),
    wrong(
        "13.4",
        "clipped to the last tile",
        (
            SKIP_STORE,
            SKIP_STORE.replace("while (unit >= 0) & (unit < count):", "while unit >= 0:").replace(
                "read_record(records_ptr, unit)", "read_record(records_ptr, tl.minimum(unit, count - 1))"
            ),
        ),
        (
            SKIP_COMPUTE,
            SKIP_COMPUTE.replace("while (unit >= 0) & (unit < count):", "while unit >= 0:").replace(
                "read_record(records_ptr, unit)", "read_record(records_ptr, tl.minimum(unit, count - 1))"
            ),
        ),
        (
            SKIP_LOAD,
            SKIP_LOAD.replace("while (unit >= 0) & (unit < count):", "while unit >= 0:").replace(
                "read_record(records_ptr, unit)", "read_record(records_ptr, tl.minimum(unit, count - 1))"
            ),
        ),
    ),
    wrong(
        "13.4",
        "the store's loop only ends at -1",
        (SKIP_STORE, SKIP_STORE.replace("(unit >= 0) & (unit < count)", "unit >= 0")),
    ),
    wrong("13.4", "static tiles", source="def surplus_kernel(*a, **k):\n    return None\n"),
    wrong(
        "13.4",
        "the load asks for surplus units and drops them",
        (SKIP_LOAD, SKIP_LOAD.replace("while (unit >= 0) & (unit < count)", "while unit >= 0")),
    ),
    right(
        "13.4",
        "all walk on, with two counters",
        (SKIP_STORE, TWO_COUNTERS_STORE),
        (SKIP_COMPUTE, TWO_COUNTERS_COMPUTE),
        (SKIP_LOAD, TWO_COUNTERS_LOAD),
    ),
    right(
        "13.4",
        "surplus becomes -1 as it is read",
        (
            SKIP_STORE,
            SKIP_STORE.replace(
                "            while", "            unit = tl.where(unit < count, unit, -1)\n            while"
            ).replace("(unit >= 0) & (unit < count)", "unit >= 0"),
        ),
        (
            "                done += 1\n        with tlx.async_task(num_warps=4",
            "                unit = tl.where(unit < count, unit, -1)\n                done += 1\n        with tlx.async_task(num_warps=4",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 13.5
    wrong(
        "13.5",
        "the load waits for O only",
        (
            "                tlx.barrier_wait(q_empties[slot], phase ^ 1)\n" + O_WAIT,
            O_WAIT.replace("phase ^ 1", "phase"),
        ),
    ),
    wrong("13.5", "O's phase the other way", (O_WAIT, O_WAIT.replace("phase ^ 1", "phase"))),
    wrong(
        "13.5",
        "waits for O after Q's load",
        (O_WAIT, "                tlx.barrier_expect_bytes"),
        (
            "[unit * BM, 0], q_fulls[slot])\n",
            "[unit * BM, 0], q_fulls[slot])\n                tlx.barrier_wait(o_empties[slot], phase ^ 1)\n",
        ),
    ),
    wrong("13.5", "waits on acc_empties", (O_WAIT, O_WAIT.replace("o_empties", "acc_empties"))),
    wrong("13.5", "waits on o_fulls", (O_WAIT, O_WAIT.replace("o_empties", "o_fulls"))),
    wrong(
        "13.5",
        "a buffer for O",
        ("    accs = tlx", "    o_tiles = tlx.local_alloc((BM, D), tl.bfloat16, 2)\n    accs = tlx"),
        ("tlx.local_store(q_tiles[slot], o", "tlx.local_store(o_tiles[slot], o"),
        ("o_desc, q_tiles[slot]", "o_desc, o_tiles[slot]"),
        (O_WAIT, "                tlx.barrier_expect_bytes"),
    ),
    wrong("13.5", "no wait for the store", ("                tlx.async_descriptor_store_wait(0)\n", "")),
    wrong("13.5", "no fence", ('                tlx.fence("async_shared")\n', "")),
    wrong(
        "13.5",
        "the load waits for the tile before too",
        (O_WAIT, "                tlx.barrier_wait(o_empties[slot ^ 1], phase)\n" + O_WAIT),
    ),
    wrong(
        "13.5",
        "one Q at a time",
        (
            O_WAIT,
            "                if done > 0:\n                    tlx.barrier_wait(o_empties[(done - 1) % 2], ((done - 1) // 2) & 1)\n                tlx.barrier_expect_bytes",
        ),
    ),
    wrong(
        "13.5",
        "the store gives Q back instead",
        ("                tlx.tcgen05_commit(q_empties[slot])\n", ""),
        (O_WAIT, "                tlx.barrier_expect_bytes"),
        (
            "                tlx.barrier_arrive(o_empties[slot])\n",
            "                tlx.barrier_arrive(q_empties[slot])\n",
        ),
    ),
    right(
        "13.5",
        "the store gives both back",
        ("                tlx.tcgen05_commit(q_empties[slot])\n", ""),
        (O_WAIT, "                tlx.barrier_expect_bytes"),
        (
            "                tlx.barrier_arrive(o_empties[slot])\n",
            "                tlx.barrier_arrive(o_empties[slot])\n                tlx.barrier_arrive(q_empties[slot])\n",
        ),
    ),
    right(
        "13.5",
        "waits from the third tile on",
        (
            "                tlx.barrier_wait(q_empties[slot], phase ^ 1)\n" + O_WAIT,
            "                if done >= 2:\n                    tlx.barrier_wait(o_empties[slot], ((done - 2) // 2) & 1)\n                tlx.barrier_wait(q_empties[slot], phase ^ 1)\n                tlx.barrier_expect_bytes",
        ),
    ),
    # ------------------------------------------------------------------------------------------ 13.6
    wrong(
        "13.6",
        "early forgotten",
        ("upcoming[sm] = next(answers, -1) if early else None", "upcoming[sm] = None"),
        ("failed += early and upcoming[sm] < 0", "failed += 0"),
    ),
    wrong("13.6", "late forgotten", ("if early else None", ""), ("failed += early and upcoming", "failed += upcoming")),
    wrong("13.6", "every SM is told -1", ("return owner, int(failed)", "return owner, sms")),
    wrong("13.6", "-1 not counted", ("return owner, int(failed)", "return owner, 0")),
    wrong("13.6", "larger SM first", ("now, sm = min(free)", "now, sm = min(free, key=lambda f: (f[0], -f[1]))")),
    wrong("13.6", "ties by cost", ("now, sm = min(free)", "now, sm = min(free, key=lambda f: f[0])")),
    wrong("13.6", "round robin for zigzag", ("sms - 1 - worker if turn % 2 else worker", "worker")),
    right(
        "13.6",
        "zigzag from the top: the same loads, mirrored",
        ("sms - 1 - worker if turn % 2 else worker", "worker if turn % 2 else sms - 1 - worker"),
    ),
    wrong("13.6", "end of the last tile in the list", ("max(ends), max(loads)", "ends[owner[-1]], max(loads)")),
    wrong("13.6", "mean load", ("max(ends), max(loads)", "max(ends), sum(loads) / sms")),
    wrong("13.6", "costs sorted first", ("    started =", "    costs = sorted(costs, reverse=True)\n    started =")),
    wrong("13.6", "costs sorted in place", ("    started =", "    costs.sort(reverse=True)\n    started =")),
    wrong(
        "13.6", "asks at the end's whole number", ("free.append((ends[sm], sm))", "free.append((round(ends[sm]), sm))")
    ),
    right(
        "13.6",
        "a heap of events",
        source="""
import heapq

def predict(costs, sms, early):
    n = len(costs)
    owner = [None] * n
    pending = min(n, sms)
    failed = 0
    end = 0.0
    heap = []
    nxt = {}
    def ask():
        nonlocal pending, failed
        if pending < n:
            pending += 1
            return pending - 1
        failed += 1
        return -1
    for sm in range(min(n, sms)):
        nxt[sm] = sm
        heapq.heappush(heap, (0.0, sm))
    while heap:
        t, sm = heapq.heappop(heap)
        tile = nxt[sm] if nxt[sm] is not None else ask()
        if tile == -1:
            end = max(end, t)
            continue
        owner[tile] = sm
        nxt[sm] = ask() if early else None
        heapq.heappush(heap, (t + costs[tile], sm))
    zig = [0] * sms
    order = list(range(sms)) + list(range(sms))[::-1]
    for i in range(n):
        zig[order[i % (2 * sms)]] += costs[i]
    return owner, failed, end, max(zig)
""",
    ),
    right(
        "13.6",
        "free times in an array",
        source="""
import numpy as np

def predict(costs, sms, early):
    n, used = len(costs), min(len(costs), sms)
    time = np.full(sms, np.inf)
    time[:used] = 0
    held = list(range(used)) + [None] * (sms - used)
    owner, lost, stop = [0] * n, 0, 0.0
    queue = list(range(used, n))
    while np.isfinite(time).any():
        s = int(np.argmin(time))
        tile = held[s]
        if tile is None:
            tile = queue.pop(0) if queue else -1
            lost += tile < 0
        if tile < 0:
            time[s] = np.inf
            continue
        owner[tile] = s
        time[s] += costs[tile]
        stop = max(stop, float(time[s]))
        held[s] = None
        if early:
            held[s] = queue.pop(0) if queue else -1
            lost += held[s] < 0
    rounds = [costs[i : i + sms] for i in range(0, n, sms)]
    loads = [0.0] * sms
    for r, group in enumerate(rounds):
        for i, c in enumerate(group):
            loads[-1 - i if r % 2 else i] += c
    return owner, int(lost), stop, max(loads)
""",
    ),
    # ------------------------------------------------------------------------------------------ by a tired expert
    wrong(
        "13.1",
        "flipped phase of K",
        ("tlx.barrier_wait(k_fulls[stage], phase)", "tlx.barrier_wait(k_fulls[stage], phase ^ 1)"),
    ),
    wrong("13.1", "Q's parity as in a ring of two", ("q_fulls[half], done & 1)", "q_fulls[half], (done >> 1) & 1)")),
    wrong(
        "13.1",
        "o waited for after its store",
        (OUT, OUT.splitlines(True)[1] + OUT.splitlines(True)[0] + OUT.splitlines(True)[2]),
    ),
    wrong(
        "13.1",
        "K given back once per tile",
        ("            tlx.barrier_arrive(k_empties[stage])\n", ""),
        (QUERY, "        tlx.barrier_arrive(k_empties[(steps_done + steps - 1) % STAGES])\n" + QUERY),
    ),
    wrong(
        "13.1", "masked by the blocks, not by the keys", ("tl.arange(0, BM) < k_len", "tl.arange(0, BM) < steps * BM")
    ),
    wrong(
        "13.1",
        "mask on the wrong axis",
        ("real = j * BM + tl.arange(0, BM) < k_len", "real = j * BM + tl.arange(0, D) < k_len"),
        ("real[:, None]", "real[None, :]"),
    ),
    wrong("13.1", "16 columns for good", ("tl.zeros((D,), tl.float32)", "tl.zeros((16,), tl.float32)")),
    wrong("13.1", "masked in blocks of 16", ("real = j * BM +", "real = j * 16 +")),
    wrong("13.1", "two stages for good", ("ring(steps_done + j, STAGES)", "ring(steps_done + j, 2)")),
    wrong("13.1", "1 % too much", ("total[None, :], axis=1)", "total[None, :], axis=1) * 1.01")),
    wrong(
        "13.1",
        "steps counted before the tile",
        ("        steps_done += steps\n", ""),
        (
            "        steps = steps_of(k_len, BM)\n        total",
            "        steps = steps_of(k_len, BM)\n        steps_done += steps\n        total",
        ),
    ),
    wrong(
        "13.1",
        "tiles without keys skipped",
        (QUERY + OUT, "        if k_len > 0:\n" + "".join("    " + line for line in (QUERY + OUT).splitlines(True))),
    ),
    wrong(
        "13.1",
        "only one half waits for K",
        (
            "            tlx.barrier_wait(k_fulls[stage], phase)\n",
            "            if half == 0:\n                tlx.barrier_wait(k_fulls[stage], phase)\n",
        ),
    ),
    right(
        "13.1",
        "a helper per block, a for loop",
        (
            "@triton.jit\ndef compute_role(",
            """@triton.jit
def add_block(total, keys, turn, left, BM: tl.constexpr, STAGES: tl.constexpr):
    tiles, fulls, empties = keys
    tlx.barrier_wait(fulls[turn % STAGES], (turn // STAGES) % 2)
    rows = tlx.local_load(tiles[turn % STAGES])
    tlx.barrier_arrive(empties[turn % STAGES], 1)
    return total + tl.sum(tl.where(tl.arange(0, BM)[:, None] < left, rows, 0.0), axis=0)


@triton.jit
def compute_role(""",
        ),
        (
            HEAD + "    while unit < units:\n",
            """    q_tiles, q_fulls, q_empties = queries
    o_tiles, o_fulls, o_empties = outs
    steps_done = 0
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        done = unit // tl.num_programs(0)
""",
        ),
        (
            LOOP,
            "        for j in range(steps):\n            total = add_block(total, keys, steps_done + j, k_len - j * BM, BM, STAGES)\n",
        ),
        (
            "        steps_done += steps\n        unit, done = unit + tl.num_programs(0), done + 1\n",
            "        steps_done += steps\n",
        ),
    ),
    wrong(
        "13.2",
        "head and tile exchanged",
        ("tile, head = unit // heads, unit % heads", "head, tile = unit // heads, unit % heads"),
    ),
    wrong(
        "13.2", "two halves of 2 * block", ("middle = min(begin + block, end)", "middle = min(begin + 2 * block, end)")
    ),
    wrong("13.2", "surplus from one unit on", ("if tile >= tiles:", "if unit > tiles * heads:")),
    wrong(
        "13.2",
        "halves of 16 rows for good",
        ("min(row + 2 * block, q_len)", "min(row + 32, q_len)"),
        ("min(begin + block, end)", "min(begin + 16, end)"),
    ),
    wrong("13.2", "the length twice", ("min(row + 2 * block, q_len)", "min(row + 2 * block, q_len + row)")),
    wrong("13.2", "out_row scaled by the heads", ("out_begin + row, int", "(out_begin + row) * heads + head, int")),
    wrong("13.2", "-1 once", ("return (-1,) * 7", "return -1")),
    wrong("13.2", "0 for a surplus unit's shared", ("return (-1,) * 7", "return (-1,) * 6 + (0,)")),
    wrong("13.2", "key head by the tile", ("kv_head = head // (heads // kv_heads)", "kv_head = tile % kv_heads")),
    wrong(
        "13.2",
        "end is the last row",
        ("return head, kv_head, begin, middle, end,", "return head, kv_head, begin, middle, end - 1,"),
    ),
    right(
        "13.2",
        "two helpers, rows as ranges",
        source="""
def halves(first, stop, block):
    rows = range(first, stop)
    return len(rows[:block]), len(rows[block : 2 * block])

def locate(unit, records, tiles, heads, kv_heads, block):
    if unit >= tiles * heads:
        return [-1] * 7
    tile = unit // heads
    record = [int(records[tile, column]) for column in range(4)]
    upper, lower = halves(record[2], record[1], block)
    head = unit - heads * tile
    begin = record[0] + record[2]
    return head, kv_heads * head // heads, begin, begin + upper, begin + upper + lower, record[3] + record[2], int(lower == 0)
""",
    ),
    right(
        "13.2",
        "NumPy, clipped at once",
        source="""
import numpy as np

def locate(unit, records, tiles, heads, kv_heads, block):
    tile, head = np.divmod(unit, heads)
    if tile not in range(tiles):
        return tuple(np.full(7, -1).tolist())
    q_begin, q_len, row, out_begin = records.numpy().astype(np.int64)[tile, :4]
    edges = q_begin + np.minimum(row + block * np.arange(3), q_len)
    begin, middle, end = (int(e) for e in edges)
    kv_head = next(g for g in range(kv_heads) if head < (g + 1) * (heads // kv_heads))
    return int(head), kv_head, begin, middle, end, int(out_begin + row), 1 - int(end > middle)
""",
    ),
    wrong("13.3", "a stage per half", (COMPUTE, COMPUTE.replace("k=done & 1", "k=half"))),
    wrong("13.3", "the producer a stage ahead", (ASK, ASK.replace("k=done & 1", "k=(done + 1) & 1"))),
    wrong(
        "13.3",
        "the compute role guesses the next unit",
        (COMPUTE, COMPUTE.replace(ANSWER, "                unit = unit + 1\n")),
    ),
    wrong("13.3", "one group of consumers", ("num_consumers=4", "num_consumers=1")),
    wrong(
        "13.3",
        "the record of the answer",
        (
            COMPUTE,
            COMPUTE.replace("                record = read_record(records_ptr, unit)\n", "")
            .replace(ANSWER, ANSWER + "                record = read_record(records_ptr, tl.maximum(unit, 0))\n")
            .replace("            while", "            record = read_record(records_ptr, unit)\n            while"),
        ),
    ),
    wrong("13.3", "ends when the answer is 0", (LOAD, LOAD.replace("while unit >= 0", "while unit > 0"))),
    wrong("13.3", "done counts by two", (STORE, STORE.replace("done += 1", "done += 2"))),
    wrong(
        "13.3",
        "the load role's phase of one stage",
        (
            LOAD,
            LOAD.replace("unit = tlx.clc_consumer(queue, (done >> 1) & 1", "unit = tlx.clc_consumer(queue, done & 1"),
        ),
    ),
    wrong(
        "13.3",
        "asks two ahead",
        (
            LOAD,
            LOAD.replace("            while", "            tlx.clc_producer(queue, 1, k=0)\n            while").replace(
                "((done >> 1) & 1) ^ 1, k=done & 1", "(((done + 1) >> 1) & 1) ^ 1, k=(done + 1) & 1"
            ),
        ),
    ),
    wrong(
        "13.3",
        "steps of a tile without keys are none",
        (LOAD, LOAD.replace("steps_done += steps_of(record[2], BM)", "steps_done += tl.cdiv(record[2], BM)")),
    ),
    wrong(
        "13.3",
        "the store role's done stays",
        (
            STORE,
            STORE.replace(
                "store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)",
                "store_tile(out_ptr, outs, read_record(records_ptr, unit), 0, BM)",
            ),
        ),
    ),
    right(
        "13.3",
        "the store role asks",
        (STORE, STORE.replace("                store_tile", ASK + "                store_tile")),
        (LOAD, LOAD.replace(ASK, "")),
    ),
    wrong(
        "13.4",
        "the compute role goes on to count itself",
        (SKIP_COMPUTE, SKIP_COMPUTE.replace("unit < count", "unit <= count")),
    ),
    wrong(
        "13.4",
        "the compute role walks on",
        (SKIP_COMPUTE, SKIP_COMPUTE.replace("(unit >= 0) & (unit < count)", "unit >= 0")),
    ),
    wrong(
        "13.4",
        "the list is as long as the grid",
        (SKIP_STORE, SKIP_STORE.replace("(unit >= 0) & (unit < count)", "(unit >= 0) & (unit < tl.num_programs(0))")),
        (
            SKIP_COMPUTE,
            SKIP_COMPUTE.replace("(unit >= 0) & (unit < count)", "(unit >= 0) & (unit < tl.num_programs(0))"),
        ),
        (SKIP_LOAD, SKIP_LOAD.replace("(unit >= 0) & (unit < count)", "(unit >= 0) & (unit < tl.num_programs(0))")),
    ),
    wrong(
        "13.4",
        "asks only if there is one more in the list",
        (SKIP_LOAD, SKIP_LOAD.replace(ASK, "                if unit + 1 < count:\n    " + ASK)),
    ),
    wrong(
        "13.4",
        "a surplus unit's record is loaded",
        (SKIP_STORE, TWO_COUNTERS_STORE),
        (SKIP_COMPUTE, TWO_COUNTERS_COMPUTE),
        (
            SKIP_LOAD,
            TWO_COUNTERS_LOAD.replace("                if unit < count:\n", "                if unit < count + 1:\n"),
        ),
    ),
    wrong(
        "13.4",
        "one counter in the compute role, two elsewhere, done late",
        (SKIP_STORE, TWO_COUNTERS_STORE),
        (
            SKIP_COMPUTE,
            TWO_COUNTERS_COMPUTE.replace(
                "                done += 1\n", "                if unit < count:\n                    done += 1\n"
            ),
        ),
        (SKIP_LOAD, TWO_COUNTERS_LOAD),
    ),
    wrong(
        "13.4",
        "a surplus unit stored as zeros",
        (
            SKIP_STORE,
            TWO_COUNTERS_STORE
            + "                else:\n                    tl.store(out_ptr + unit * BM + tl.arange(0, BM), tl.zeros((BM,), tl.float32))\n",
        ),
        (SKIP_COMPUTE, TWO_COUNTERS_COMPUTE),
        (SKIP_LOAD, TWO_COUNTERS_LOAD),
    ),
    wrong(
        "13.4",
        "the first unit not compared",
        (
            SKIP_STORE,
            SKIP_STORE.replace("(unit >= 0) & (unit < count)", "(unit >= 0) & ((unit < count) | (done == 0))"),
        ),
        (
            SKIP_COMPUTE,
            SKIP_COMPUTE.replace("(unit >= 0) & (unit < count)", "(unit >= 0) & ((unit < count) | (done == 0))"),
        ),
        (SKIP_LOAD, SKIP_LOAD.replace("(unit >= 0) & (unit < count)", "(unit >= 0) & ((unit < count) | (done == 0))")),
    ),
    wrong(
        "13.4",
        "the count as seen by the store role alone",
        (SKIP_COMPUTE, SKIP_COMPUTE.replace("(unit >= 0) & (unit < count)", "unit >= 0")),
        (SKIP_LOAD, SKIP_LOAD.replace("(unit >= 0) & (unit < count)", "unit >= 0")),
    ),
    right(
        "13.4",
        "a surplus unit's record is read and dropped",
        (SKIP_STORE, TWO_COUNTERS_STORE),
        (SKIP_COMPUTE, TWO_COUNTERS_COMPUTE),
        (
            SKIP_LOAD,
            TWO_COUNTERS_LOAD.replace(
                "                if unit < count:\n                    record = read_record(records_ptr, unit)\n",
                "                record = read_record(records_ptr, unit)\n                if unit < count:\n",
            ),
        ),
    ),
    wrong(
        "13.5",
        "O waited for on even tiles only",
        (
            O_WAIT,
            "                if slot == 0:\n                    tlx.barrier_wait(o_empties[slot], phase ^ 1)\n                tlx.barrier_expect_bytes",
        ),
    ),
    wrong(
        "13.5",
        "one store may be under way",
        ("tlx.async_descriptor_store_wait(0)", "tlx.async_descriptor_store_wait(1)"),
    ),
    wrong(
        "13.5",
        "the fence behind the arrival",
        (
            '                tlx.fence("async_shared")\n                tlx.barrier_arrive(o_fulls[slot])\n',
            '                tlx.barrier_arrive(o_fulls[slot])\n                tlx.fence("async_shared")\n',
        ),
    ),
    right(
        "13.5",
        "the accumulator given back before it is read: the next product there waits for Q, and Q for this O",
        (
            "                o = tlx.local_load(accs[slot])\n                tlx.barrier_arrive(acc_empties[slot])\n",
            "                tlx.barrier_arrive(acc_empties[slot])\n                o = tlx.local_load(accs[slot])\n",
        ),
    ),
    wrong("13.5", "the accumulator goes on", ("use_acc=j > 0", "use_acc=(j > 0) | (done > 1)")),
    right(
        "13.5",
        "Q given back before the products: its buffer waits for this O as well",
        ("                tlx.tcgen05_commit(q_empties[slot])\n", ""),
        (
            "                for j in range(steps):\n                    stage, k_phase = ring(steps_done + j, STAGES)\n                    tlx.barrier_wait(k_fulls",
            "                tlx.tcgen05_commit(q_empties[slot])\n                for j in range(steps):\n                    stage, k_phase = ring(steps_done + j, STAGES)\n                    tlx.barrier_wait(k_fulls",
        ),
    ),
    wrong(
        "13.5",
        "rows of 64 for good",
        (
            "tlx.async_descriptor_store(o_desc, q_tiles[slot], [unit * BM, 0])",
            "tlx.async_descriptor_store(o_desc, q_tiles[slot], [unit * 64, 0])",
        ),
    ),
    wrong(
        "13.5",
        "rows by the turn",
        (
            "tlx.async_descriptor_store(o_desc, q_tiles[slot], [unit * BM, 0])",
            "tlx.async_descriptor_store(o_desc, q_tiles[slot], [done * BM, 0])",
        ),
    ),
    wrong(
        "13.5",
        "waits for the O of the other buffer",
        (O_WAIT, O_WAIT.replace("o_empties[slot], phase ^ 1", "o_empties[slot ^ 1], phase ^ 1")),
    ),
    wrong(
        "13.5",
        "from the fourth tile on",
        (
            O_WAIT,
            "                if done > 2:\n                    tlx.barrier_wait(o_empties[slot], phase ^ 1)\n                tlx.barrier_expect_bytes",
        ),
    ),
    wrong(
        "13.5",
        "one buffer of K",
        ("tl.bfloat16, STAGES)", "tl.bfloat16, 1)"),
        ("k_fulls = tlx.alloc_barriers(STAGES)", "k_fulls = tlx.alloc_barriers(1)"),
        ("k_empties = tlx.alloc_barriers(STAGES)", "k_empties = tlx.alloc_barriers(1)"),
        (
            "ring(steps_done + j, STAGES)\n                    tlx.barrier_wait(k_fulls",
            "ring(steps_done + j, 1)\n                    tlx.barrier_wait(k_fulls",
        ),
        (
            "ring(steps_done + j, STAGES)\n                    tlx.barrier_wait(k_empties",
            "ring(steps_done + j, 1)\n                    tlx.barrier_wait(k_empties",
        ),
    ),
    right("13.5", "the epilogue does not wait: the load did", (O_EPI, "                tlx.local_store")),
    wrong("13.6", "empty SMs ask as well", ("return owner, int(failed)", "return owner, int(failed) + sms - started")),
    wrong(
        "13.6",
        "the first tiles from the end of the list",
        ("upcoming = list(range(started))", "upcoming = list(range(started))[::-1]"),
    ),
    wrong("13.6", "zigzag over sorted costs", ("enumerate(costs)", "enumerate(sorted(costs))")),
    wrong("13.6", "work divided evenly", ("max(ends), max(loads)", "sum(costs) / sms, max(loads)")),
    wrong(
        "13.6",
        "zigzag's turns by the SM",
        ("sms - 1 - worker if turn % 2 else worker", "sms - 1 - worker if worker % 2 else worker"),
    ),
    wrong(
        "13.6",
        "asks again after -1",
        ("failed += early and upcoming[sm] < 0", "failed += 2 * (early and upcoming[sm] < 0)"),
    ),
    wrong(
        "13.6", "the queue ends with its first SM", ("max(ends), max(loads)", "min(e for e in ends if e), max(loads)")
    ),
    wrong(
        "13.6",
        "148 SMs for good",
        ("started = min(len(costs), sms)", "started = min(len(costs), 148)"),
        ("[0.0] * sms, 0", "[0.0] * 148, 0"),
    ),
    wrong(
        "13.6", "the tile's own SM every time", ("owner[tile], ends[sm] = sm,", "owner[tile], ends[sm] = tile % sms,")
    ),
    wrong(
        "13.6", "early asks count as late ones", ("failed += upcoming[sm] is None and tile < 0", "failed += tile < 0")
    ),
    right(
        "13.6",
        "an SM as a generator",
        source="""
import heapq

def program(sm, tile, costs, take, early, log):
    now = 0.0
    while tile >= 0:
        log[tile] = sm
        following = take() if early else None
        now += costs[tile]
        yield now
        tile = take() if following is None else following

def predict(costs, sms, early):
    count, lost = len(costs), [0]
    waiting = list(range(min(sms, count), count))
    def take():
        if waiting:
            return waiting.pop(0)
        lost[0] += 1
        return -1
    log, last = {}, 0.0
    running = []
    for sm in range(min(sms, count)):
        life = program(sm, sm, costs, take, early, log)
        running.append((next(life), sm, life))
    heapq.heapify(running)
    while running:
        now, sm, life = heapq.heappop(running)
        last = max(last, now)
        then = next(life, None)
        if then is not None:
            heapq.heappush(running, (then, sm, life))
    zig = {}
    for place in range(count):
        turn, at = divmod(place, sms)
        at = at if turn % 2 == 0 else sms - at - 1
        zig[at] = zig.get(at, 0.0) + costs[place]
    return [log[t] for t in range(count)], lost[0], last, max(zig.values())
""",
    ),
    right(
        "13.6",
        "the failures counted at the end",
        source="""
def predict(costs, sms, early):
    used = min(sms, len(costs))
    busy_until = [0.0] * used
    held = [[s] for s in range(used)]
    owner = list(range(used)) + [-1] * (len(costs) - used)
    following = used
    alive = set(range(used))
    while alive:
        s = min(alive, key=lambda a: (busy_until[a], a))
        if not held[s] and not early:
            if following < len(costs):
                held[s].append(following)
                following += 1
        if not held[s]:
            alive.remove(s)
            continue
        tile = held[s].pop()
        owner[tile] = s
        if early and following < len(costs):
            held[s].append(following)
            following += 1
        busy_until[s] = busy_until[s] + costs[tile]
    loads = [sum(costs[i] for i in range(len(costs)) if (i % sms if i // sms % 2 == 0 else sms - 1 - i % sms) == w) for w in range(sms)]
    return owner, used, max(busy_until), max(loads)
""",
    ),
]
