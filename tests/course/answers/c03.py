"""Answers to chapter 03's exercises on addresses and on the best key."""

from tests.course.answers import right, wrong

STORE = "    tl.store(out_ptr + i * tiles_across + j, largest)\n"
BLOCK = """        s = tl.where(n[None, :] < N, tl.dot(q, kt), float("-inf"))
        top = tl.max(s, axis=1)
        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)
        best = tl.maximum(best, top)
"""

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 3.7
    wrong(
        "3.7",
        "a mask on the store",
        ("tl.num_programs(1)", "tl.num_programs(0)"),
        (STORE, STORE.replace(", largest)", ", largest, mask=j < tiles_across)")),
    ),
    wrong("3.7", "j down the rows", (STORE, "    tl.store(out_ptr + j * tl.num_programs(0) + i, largest)\n")),
    wrong("3.7", "columns for tiles", ("tl.num_programs(1)", "cols")),
    wrong("3.7", "rounded down", ("tl.num_programs(1)", "cols // BC")),
    wrong("3.7", "tiles of rows' width", ("tl.num_programs(1)", "tl.cdiv(cols, BR)")),
    wrong("3.7", "by the stride", ("tl.num_programs(1)", "tl.cdiv(x_row, BC)")),
    wrong("3.7", "the larger of both", ("tl.num_programs(1)", "tl.maximum(tl.num_programs(0), tl.num_programs(1))")),
    wrong(
        "3.7",
        "programs exchanged",
        ("i, j = tl.program_id(0), tl.program_id(1)", "i, j = tl.program_id(1), tl.program_id(0)"),
    ),
    wrong("3.7", "0 in masked places", ('other=float("-inf")', "other=0.0")),
    wrong("3.7", "-1e9 in masked places", ('other=float("-inf")', "other=-1000.0")),
    wrong("3.7", "rows cols apart", ("r[:, None] * x_row", "r[:, None] * cols")),
    wrong(
        "3.7",
        "no mask on the columns",
        ("(r[:, None] < rows) & (c[None, :] < cols)", "(r[:, None] < rows) & (c[None, :] < x_row)"),
    ),
    wrong(
        "3.7",
        "largest of absolute values",
        ("tl.max(tl.max(x, axis=1), axis=0)", "tl.max(tl.max(tl.abs(x), axis=1), axis=0)"),
    ),
    wrong(
        "3.7",
        "every program stores row i",
        (
            STORE,
            "    for t in range(0, tiles_across):\n        tl.store(out_ptr + i * tiles_across + t, largest, mask=t >= j)\n",
        ),
    ),
    right("3.7", "counted from the columns", ("tl.num_programs(1)", "tl.cdiv(cols, BC)")),
    right("3.7", "one maximum of a flat block", ("tl.max(tl.max(x, axis=1), axis=0)", "tl.max(tl.max(x, axis=0))")),
    # ------------------------------------------------------------------------------------------ 3.8
    wrong(
        "3.8", "best from 0", ('best = tl.full((BM,), float("-inf"), tl.float32)', "best = tl.zeros((BM,), tl.float32)")
    ),
    wrong(
        "3.8",
        "best from -1e4",
        ('best = tl.full((BM,), float("-inf"), tl.float32)', "best = tl.full((BM,), -1.0e4, tl.float32)"),
    ),
    wrong("3.8", "a later equal one wins", ("top > best", "top >= best")),
    wrong(
        "3.8",
        "keys behind the end",
        (BLOCK, BLOCK.replace('tl.where(n[None, :] < N, tl.dot(q, kt), float("-inf"))', "tl.dot(q, kt)")),
    ),
    wrong("3.8", "0 behind the end", (BLOCK, BLOCK.replace('float("-inf"))', "0.0)"))),
    wrong("3.8", "position inside the block", ("start + tl.argmax(s, axis=1)", "tl.argmax(s, axis=1)")),
    wrong("3.8", "block's number", ("start + tl.argmax(s, axis=1)", "start // BN + tl.argmax(s, axis=1)")),
    wrong(
        "3.8",
        "the last block only",
        ("which = tl.where(top > best, start + tl.argmax(s, axis=1), which)", "which = start + tl.argmax(s, axis=1)"),
    ),
    wrong(
        "3.8",
        "best first",
        (
            BLOCK,
            BLOCK.replace(
                "        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)\n        best = tl.maximum(best, top)\n",
                "        best = tl.maximum(best, top)\n        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)\n",
            ),
        ),
    ),
    wrong(
        "3.8",
        "one best for the whole tile",
        (BLOCK, BLOCK.replace("tl.max(s, axis=1)\n", "tl.max(s, axis=1) * 0 + tl.max(tl.max(s, axis=1), axis=0)\n")),
    ),
    wrong("3.8", "argmin", ("tl.argmax(", "tl.argmin(")),
    wrong("3.8", "over the queries", ("tl.argmax(s, axis=1)", "tl.argmax(s, axis=0)")),
    wrong("3.8", "whole blocks only", ("range(0, N, BN)", "range(0, N // BN * BN, BN)")),
    wrong(
        "3.8",
        "rows that do not exist stored",
        ("tl.store(which_ptr + m, which, mask=m < M)", "tl.store(which_ptr + m, which)"),
    ),
    wrong(
        "3.8",
        "ties to the higher position",
        ("start + tl.argmax(s, axis=1)", "start + BN - 1 - tl.argmax(tl.flip(s, 1), axis=1)"),
    ),
    wrong("3.8", "largest magnitude", (BLOCK, BLOCK.replace("tl.dot(q, kt), float", "tl.abs(tl.dot(q, kt)), float"))),
    wrong(
        "3.8",
        "best rounded to bf16",
        ("tl.store(best_ptr + m, best,", "tl.store(best_ptr + m, best.to(tl.bfloat16).to(tl.float32),"),
    ),
    wrong(
        "3.8",
        "all scores in one block",
        (
            "    for start in range(0, N, BN):\n        n = start + tl.arange(0, BN)\n",
            "    for start in range(0, N, 8 * BN):\n        n = start + tl.arange(0, 8 * BN)\n",
        ),
    ),
    wrong("3.8", "16 columns for good", ("    d = tl.arange(0, D)\n", "    d = tl.arange(0, 16)\n")),
    right(
        "3.8",
        "max with its indices",
        (
            BLOCK,
            BLOCK.replace(
                "        top = tl.max(s, axis=1)\n        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)\n",
                "        top, place = tl.max(s, axis=1, return_indices=True)\n        better = top > best\n        which = tl.where(better, place + start, which)\n",
            ),
        ),
    ),
    right(
        "3.8",
        "from the last block backwards",
        (
            "    for start in range(0, N, BN):\n",
            "    blocks = tl.cdiv(N, BN)\n    for t in range(0, blocks):\n        start = (blocks - 1 - t) * BN\n",
        ),
        ("top > best", "top >= best"),
    ),
]
