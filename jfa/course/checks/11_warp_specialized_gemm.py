"""Checks of chapter 11: a warp-specialized GEMM. Every launch is repeated under several schedules, its first axis is the schedule."""

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Kept, Limit, Mutant, Output

SCHEDULES = 4  # eager, lazy and two random ones: see the launch functions
ROWS, COLUMNS = 128, 32  # of a tile, unless a case says otherwise


def _rng(seed):
    return torch.Generator().manual_seed(seed)


def _each_schedule(out):
    """Return the reference's result once for each schedule that the launch functions go through."""
    return torch.stack([out] * SCHEDULES)


def _at_least(name, measure, each, text):
    """Require that in every launch the operation happens ``each`` times or more (a number, or a function of the case)."""
    return Limit(name, measure, at_least=lambda case: SCHEDULES * (each(case) if callable(each) else each), text=text)


def _exactly(name, measure, each, text):
    """Require that in every launch the operation happens exactly ``each(case)`` times."""
    count = lambda case: SCHEDULES * each(case)
    return Limit(name, measure, at_most=count, at_least=count, text=text)


def _operands(g, rows, depth, columns, beyond=0):
    """Return a [rows, depth + beyond] and B [depth + beyond, columns] in bf16; what lies beyond is NaN."""
    a = torch.randn(rows, depth + beyond, generator=g).to(torch.bfloat16)
    b = torch.randn(depth + beyond, columns, generator=g).to(torch.bfloat16)
    if beyond:
        a[:, depth:] = float("nan")
        b[depth:] = float("nan")
    return a, b


def _places(turns, stages):
    """Require that A and B each go through as many places as the ring has buffers, or turns; both are of one program."""
    count = lambda case: 2 * min(turns(case), stages(case))
    return Limit(
        "all the buffers",
        "loaded_places",
        at_most=count,
        at_least=count,
        text="the ring has STAGES buffers and uses them all",
    )


def _one_buffer(*edit):
    """Return the mutant of a ring whose turns all go through its first buffers."""
    return Mutant(
        "one buffer, whatever STAGES is",
        "every slice goes through one pair of buffers, so no copy runs ahead of the products.",
        caught_by="all the buffers",
        edit=edit,
        expect="the ring has STAGES buffers and uses them all",
        recognise=False,
    )


# -- 11.1 --------------------------------------------------------------------------------------------------------------


def _ring_cases(seed):
    g = _rng(seed)

    def case(name, steps, stages, depth=32, beyond=0, rows=ROWS, columns=COLUMNS):
        return Case(name, (*_operands(g, rows, steps * depth, columns, beyond), steps, stages, depth))

    return [
        case("one slice, one stage", 1, 1),
        case("three slices, one stage", 3, 1),
        case("four slices, two stages", 4, 2),
        case("five slices, two stages", 5, 2),
        case("seven slices, three stages", 7, 3),
        case("two slices, three stages: the ring never goes round", 2, 3),
        case("a neighbor's NaN beyond the last slice", 5, 3, depth=16, beyond=16),
        case("three slices, a tile of 64 x 64", 3, 2, rows=64, columns=64),
    ]


def _ring_launch(kernel, a, b, steps, stages, depth):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, rows, columns = [], a.shape[0], b.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(rows, columns)
        given = ((a, [rows, depth]), (b, [depth, columns]), (out, [rows, columns]))
        boxes = [TensorDescriptor.from_tensor(t, box) for t, box in given]
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(1,)](*boxes, steps, STAGES=stages)
        for warning in emulator.last().warnings:
            raise warning
        results.append(out)
    return torch.stack(results)


def _ring_reference(a, b, steps, stages, depth):
    return _each_schedule(a[:, : steps * depth] @ b[: steps * depth])


RING = Exercise(
    id="11.1",
    title="The producer of a ring",
    name="ring_kernel",
    kind="kernel",
    call=_ring_launch,
    cases=_ring_cases,
    reference=_ring_reference,
    outputs=(Output("C", ("schedule", "row", "column")),),
    difficulty=1,
    minutes=10,
    tol=1e-5,
    time_limit=60.0,
    limits=(
        _exactly(
            "two copies per slice",
            "tlx:async_descriptor_load",
            lambda case: 2 * case.args[2],
            "two copies per slice, and one announcement per slice",
        ),
        _exactly(
            "one announcement per slice",
            "tlx:barrier_expect_bytes",
            lambda case: case.args[2],
            "two copies per slice, and one announcement per slice",
        ),
        Limit("two tasks", "tasks", at_least=2, text="Do it with what is there"),
        _places(lambda case: case.args[2], lambda case: case.args[3]),
    ),
    hints=(
        "Four operations per turn: one wait, one announcement, two copies. The wait is for empties, and its first turn must pass on a fresh barrier.",
        "A fresh barrier lets parity 1 pass. The bytes are those of [BM, BK] and [BK, BN] in bf16, two bytes per element, in one number.",
        "barrier_wait(empties[slot], phase ^ 1); barrier_expect_bytes(fulls[slot], 2 * (BM * BK + BK * BN)); async_descriptor_load(a_desc, a[slot], [0, k * BK], fulls[slot]), and B likewise from [k * BK, 0].",
    ),
    mutants=(
        Mutant(
            "a tile of 128 x 32 for good",
            "the announced bytes depend on BM and BN.",
            caught_by="runs",
            edit=("2 * (BM * BK + BK * BN)", "2 * (128 + 32) * BK"),
            expect="fulls",
            recognise=False,
        ),
        _one_buffer(
            (
                "place(k, STAGES)\n                tlx.barrier_wait(fulls",
                "place(k, 1)\n                tlx.barrier_wait(fulls",
            ),
            (
                "place(k, STAGES)\n                tlx.barrier_wait(empties",
                "place(k, 1)\n                tlx.barrier_wait(empties",
            ),
        ),
        Mutant(
            "waits for the phase itself",
            "on a fresh barrier parity 0 blocks: no role can begin.",
            caught_by="runs",
            edit=("tlx.barrier_wait(empties[slot], phase ^ 1)", "tlx.barrier_wait(empties[slot], phase)"),
            expect="empties[0], parity 0",
            recognise=False,
        ),
        Mutant(
            "announces one operand",
            "the barrier is told of A's bytes and gets B's as well.",
            caught_by="runs",
            edit=("2 * (BM * BK + BK * BN)", "2 * BM * BK"),
            expect="bytes more were delivered",
            recognise=False,
        ),
        Mutant(
            "announces elements",
            "an element of bf16 has two bytes.",
            caught_by="runs",
            edit=("2 * (BM * BK + BK * BN)", "BM * BK + BK * BN"),
            expect="bytes",
            recognise=False,
        ),
        Mutant(
            "announces twice",
            "each announcement is an arrival, and the barrier counts one per phase.",
            caught_by="runs",
            edit=(
                "tlx.barrier_expect_bytes(fulls[slot], 2 * (BM * BK + BK * BN))",
                "tlx.barrier_expect_bytes(fulls[slot], 2 * BM * BK)\n"
                "                tlx.barrier_expect_bytes(fulls[slot], 2 * BK * BN)",
            ),
            expect="arrive_count=1",
            recognise=False,
        ),
        Mutant(
            "does not wait",
            "buffers are filled again while the tensor core reads them.",
            caught_by="runs",
            edit=("                tlx.barrier_wait(empties[slot], phase ^ 1)\n", ""),
            expect="a[0]",
            recognise=False,
        ),
        Mutant(
            "waits on another stage",
            "the buffer that it fills is another than the one it waited for.",
            caught_by="runs",
            edit=(
                "tlx.barrier_wait(empties[slot], phase ^ 1)",
                "tlx.barrier_wait(empties[(slot + 1) % STAGES], phase ^ 1)",
            ),
            expect="empties[0] can come two phases late",
            recognise=False,
        ),
        Mutant(
            "arrives as well",
            "the announcement is an arrival already.",
            caught_by="runs",
            edit=(
                "                tlx.async_descriptor_load(a_desc",
                "                tlx.barrier_arrive(fulls[slot], 1)\n                tlx.async_descriptor_load(a_desc",
            ),
            expect="arrive_count=1",
            recognise=False,
        ),
        Mutant(
            "always the first slice of B",
            "Every slice of A meets the first slice of B: the rows of B move with k.",
            edit=("b_desc, b[slot], [k * BK, 0]", "b_desc, b[slot], [0, 0]"),
        ),
        Mutant(
            "goes one slice too far",
            "the last copy reads beyond the last slice, and it is not waited for.",
            caught_by="runs",
            edit=(
                "            for k in range(steps):\n                slot, phase = place(k, STAGES)\n                tlx.barrier_wait(empties",
                "            for k in range(steps + 1):\n                slot, phase = place(k, STAGES)\n                tlx.barrier_wait(empties",
            ),
            expect="nobody waited",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "tlx.barrier_expect_bytes(fulls[slot], 2 * (BM * BK + BK * BN))",
                "tlx.barrier_expect_bytes(fulls[slot], (BM + BN) * BK * 2)",
            ),
            ("tlx.barrier_wait(empties[slot], phase ^ 1)", "tlx.barrier_wait(empties[slot], (k // STAGES + 1) % 2)"),
        ),
        (
            (
                "            for k in range(steps):\n                slot, phase = place(k, STAGES)\n                tlx.barrier_wait(empties[slot], phase ^ 1)",
                "            slot, free = 0, 1\n            for k in range(steps):\n                tlx.barrier_wait(empties[slot], free)",
            ),
            (
                "                tlx.async_descriptor_load(b_desc, b[slot], [k * BK, 0], fulls[slot])",
                "                tlx.async_descriptor_load(b_desc, b[slot], [k * BK, 0], fulls[slot])\n"
                "                slot += 1\n"
                "                if slot == STAGES:\n"
                "                    slot = 0\n"
                "                    free = free ^ 1",
            ),
        ),
        (
            (
                "                tlx.barrier_wait(empties[slot], phase ^ 1)",
                "                if k >= STAGES:  # the first turn needs no wait\n"
                "                    tlx.barrier_wait(empties[slot], phase ^ 1)",
            ),
        ),
    ),
)

# -- 11.2 --------------------------------------------------------------------------------------------------------------


def _blocks_of(lengths, block=16):
    return [-(-n // block) for n in lengths]


def _jagged_cases(seed):
    g = _rng(seed)

    def case(name, steps, stages=2, programs=1, depth=16, rows=ROWS, columns=COLUMNS):
        deepest = max(*steps, 1)
        a, b = _operands(g, rows * len(steps), deepest * depth, columns)
        for tile, n in enumerate(steps):  # what a tile must not read
            a[rows * tile : rows * (tile + 1), n * depth :] = float("nan")
        labels = tuple(f"{n} slices" for n in steps)
        offsets = tuple(rows * t for t in range(len(steps) + 1))
        steps = torch.tensor(steps, dtype=torch.int32)
        return Case(name, (a, b, steps, stages, programs, depth), labels=labels, extra=offsets)

    return [
        case("one tile of two slices", [2]),
        case("one tile without slices", [0]),
        case("three tiles: an accumulator comes back", [2, 1, 3]),
        case("lengths 5, 0, 33, 1, 17 in blocks of 16", _blocks_of(kinds.LENGTHS["lengths 5, 0, 33, 1, 17"])),
        case("empty ones at both ends", _blocks_of(kinds.LENGTHS["empty ones at both ends"], 4), stages=1),
        case("two programs, empty tiles between", [1, 0, 0, 2, 1, 3, 1, 1], stages=3, programs=2),
        case("no slices at all", [0, 0, 0]),
        case("tiles of 64 x 64, slices of 32", [2, 0, 1], depth=32, rows=64, columns=64),
    ]


def _jagged_launch(kernel, a, b, steps, stages, programs, depth):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, tiles = [], len(steps)
    rows, columns = a.shape[0] // tiles, b.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(len(a), columns)
        given = ((a, [rows, depth]), (b, [depth, columns]), (out, [rows, columns]))
        boxes = [TensorDescriptor.from_tensor(t, box) for t, box in given]
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(programs,)](*boxes, steps, tiles, STAGES=stages)
        for warning in emulator.last().warnings:
            raise warning
        results.append(out)
    return torch.stack(results)


def _jagged_reference(a, b, steps, stages, programs, depth):
    out, height = torch.zeros(len(a), b.shape[1], dtype=a.dtype), len(a) // len(steps)
    for tile, n in enumerate(int(n) for n in steps):
        rows = slice(height * tile, height * (tile + 1))
        out[rows] = a[rows, : n * depth] @ b[: n * depth]
    return _each_schedule(out)


_EPILOGUE_BODY = """    count = 0
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

JAGGED = Exercise(
    id="11.2",
    title="An epilogue for jagged tiles",
    name="jagged_kernel",
    kind="kernel",
    call=_jagged_launch,
    cases=_jagged_cases,
    reference=_jagged_reference,
    outputs=(Output("C", ("schedule", "row", "column")),),
    difficulty=3,
    minutes=20,
    tol=1e-5,
    time_limit=60.0,
    kept=Kept(("jagged_kernel", "jagged_load", "jagged_mma"), "The other roles and the kernel stay as they are"),
    limits=(
        _at_least(
            "tiles leave by TMA",
            "tlx:async_descriptor_store",
            lambda case: len(case.args[2]),
            "store the tile at row tile * BM with leave",
        ),
    ),
    hints=(
        "Mirror the MMA role: the same tiles, the same test for slices, the same count. Then ask of each buffer: who may still be using it?",
        "count goes up only for a tile with slices. Arrive on acc_empties after local_load: from then on the values are in registers. Before leave, wait for the store before.",
        "values = tl.zeros(...); if tl.load(steps_ptr + tile) > 0: which, use = place(count, 2); barrier_wait(acc_fulls[which], use); values = local_load(accs[which]); barrier_arrive(acc_empties[which], 1); count += 1. Then async_descriptor_store_wait(0), leave(...), and one more wait after the loop.",
    ),
    mutants=(
        Mutant(
            "tiles of 128 rows for good",
            "a tile has BM rows: it begins at tile * BM.",
            caught_by="returns",
            edit=("leave(c_desc, staging, values, tile * BM)", "leave(c_desc, staging, values, tile * 128)"),
            expect="Nothing was ever stored",
            recognise=False,
        ),
        Mutant(
            "counts empty tiles",
            "the MMA role does not count a tile without slices: the two disagree about the accumulator.",
            caught_by="runs",
            edit=(
                "            count += 1\n        tlx.async_descriptor_store_wait(0)\n        leave",
                "        count += 1\n        tlx.async_descriptor_store_wait(0)\n        leave",
            ),
            expect="acc_fulls",
            recognise=False,
        ),
        Mutant(
            "accumulator from the tile's number",
            "a tile's number says nothing about how often this program has used an accumulator.",
            caught_by="runs",
            edit=(
                "            tlx.barrier_arrive(acc_empties[which], 1)\n            count += 1",
                "            tlx.barrier_arrive(acc_empties[which], 1)\n            count = tile + 1",
            ),
            expect="acc_fulls",
            recognise=False,
        ),
        Mutant(
            "leaves empty tiles out",
            "No other role writes the rows of a tile without slices: store zeros there.",
            caught_by="returns",
            edit=(
                "        tlx.async_descriptor_store_wait(0)\n        leave(c_desc, staging, values, tile * BM)",
                "        if tl.load(steps_ptr + tile) > 0:\n"
                "            tlx.async_descriptor_store_wait(0)\n"
                "            leave(c_desc, staging, values, tile * BM)",
            ),
            expect="Nothing was ever stored",
            recognise=False,
        ),
        Mutant(
            "gives back before the load",
            "the next product may overwrite the accumulator while it is loaded.",
            caught_by="runs",
            edit=(
                "            values = tlx.local_load(accs[which])\n            tlx.barrier_arrive(acc_empties[which], 1)\n",
                "            tlx.barrier_arrive(acc_empties[which], 1)\n            values = tlx.local_load(accs[which])\n",
            ),
            expect="accs[0] that nothing orders",
            recognise=False,
        ),
        Mutant(
            "never gives back",
            "the third tile with slices waits for an accumulator forever.",
            caught_by="runs",
            edit=("            tlx.barrier_arrive(acc_empties[which], 1)\n", ""),
            expect="acc_empties[0]",
            recognise=False,
        ),
        Mutant(
            "gives back what it did not use",
            "an empty tile has no accumulator to give back.",
            caught_by="runs",
            edit=(
                (
                    "        values = tl.zeros((BM, BN), tl.float32)\n",
                    "        values = tl.zeros((BM, BN), tl.float32)\n        which, use = place(count, 2)\n",
                ),
                (
                    "            tlx.barrier_arrive(acc_empties[which], 1)\n            count += 1\n",
                    "            count += 1\n        tlx.barrier_arrive(acc_empties[which], 1)\n",
                ),
                (
                    "            which, use = place(count, 2)\n            tlx.barrier_wait(acc_fulls",
                    "            tlx.barrier_wait(acc_fulls",
                ),
            ),
            expect="acc_empties",
            recognise=False,
        ),
        Mutant(
            "waits for the other phase",
            "on a fresh barrier that wait passes at once, and the accumulator is read before it is made.",
            caught_by="runs",
            edit=("tlx.barrier_wait(acc_fulls[which], use)", "tlx.barrier_wait(acc_fulls[which], use ^ 1)"),
            expect="accs[0]",
            recognise=False,
        ),
        Mutant(
            "does not wait for the store before",
            "the TMA may still read the staging buffer.",
            caught_by="runs",
            edit=(
                "        tlx.async_descriptor_store_wait(0)\n        leave(c_desc",
                "        leave(c_desc",
            ),
            expect="staging",
            recognise=False,
        ),
        Mutant(
            "does not wait at the end",
            "the kernel ends while the TMA may still read its memory.",
            caught_by="runs",
            edit=(
                "        leave(c_desc, staging, values, tile * BM)\n    tlx.async_descriptor_store_wait(0)",
                "        leave(c_desc, staging, values, tile * BM)",
            ),
            expect="nobody waited for",
            recognise=False,
        ),
        Mutant(
            "a store of its own",
            "right numbers, but with a store by the threads: the tile did not leave through leave.",
            caught_by="runs",
            edit=(
                "        leave(c_desc, staging, values, tile * BM)",
                "        tlx.local_store(staging, values)\n"
                "        tlx.async_descriptor_store(c_desc, staging, [tile * BM, 0])\n"
                '        tlx.fence("async_shared")',
            ),
            expect="fence",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                _EPILOGUE_BODY.rstrip(),
                """    used = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if tl.load(steps_ptr + tile) == 0:
            leave(c_desc, staging, tl.zeros((BM, BN), tl.float32), tile * BM)
        else:
            tlx.barrier_wait(acc_fulls[used % 2], (used // 2) % 2)
            result = tlx.local_load(accs[used % 2])
            tlx.barrier_arrive(acc_empties[used % 2])
            leave(c_desc, staging, result, tile * BM)
            used += 1
        tlx.async_descriptor_store_wait(0)
""",
            ),
        ),
        (
            (
                _EPILOGUE_BODY.rstrip(),
                """    which, use = 0, 0
    tile = tl.program_id(0)
    while tile < tiles:
        full = tl.load(steps_ptr + tile) > 0
        values = tl.full((BM, BN), 0, tl.float32)
        if full:
            tlx.barrier_wait(acc_fulls[which], use)
            values = tlx.local_load(accs[which])
        tlx.async_descriptor_store_wait(0)
        leave(c_desc, staging, values, tile * BM)
        if full:
            tlx.barrier_arrive(acc_empties[which], 1)
            which = which ^ 1
            if which == 0:
                use = use ^ 1
        tile += tl.num_programs(0)
    tlx.async_descriptor_store_wait(0)
""",
            ),
        ),
    ),
)

# -- 11.3 --------------------------------------------------------------------------------------------------------------


def _tile_cases(shapes, seed):
    """Return the cases of ``shapes``: (name, tiles, steps, stages, programs, and rows, columns, depth if not 128, 32, 16)."""
    g = _rng(seed)

    def case(name, tiles, steps, stages, programs, rows=ROWS, columns=COLUMNS, depth=16):
        return Case(name, (*_operands(g, rows * tiles, steps * depth, columns), tiles, steps, stages, programs))

    return [case(*shape) for shape in shapes]


def _tiles_launch(kernel, a, b, tiles, steps, stages, programs):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, rows, columns, depth = [], a.shape[0] // tiles, b.shape[1], a.shape[1] // steps
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(len(a), columns)
        given = ((a, [rows, depth]), (b, [depth, columns]), (out, [rows, columns]))
        boxes = [TensorDescriptor.from_tensor(t, box) for t, box in given]
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(programs,)](*boxes, tiles, steps, STAGES=stages)
        for warning in emulator.last().warnings:
            raise warning
        results.append(out)
    return torch.stack(results)


def _product(a, b, *sizes):
    return _each_schedule(a @ b)


def _turns(case):
    """Return the turns of the ring of the program that has most tiles."""
    _, _, tiles, steps, _, programs = case.args
    return -(-tiles // programs) * steps


def _products_of_tiles(case):
    return case.args[2] * case.args[3]


SECOND_TILE = Exercise(
    id="11.3",
    title="Bug hunt: the second tile hangs",
    name="second_tile_kernel",
    kind="kernel",
    hunt=True,
    call=_tiles_launch,
    cases=lambda seed: _tile_cases(
        [
            ("two tiles of three slices, two stages", 2, 3, 2, 1),
            ("one tile", 1, 3, 2, 1),
            ("three tiles of two slices, two stages", 3, 2, 2, 1),
            ("two tiles of four slices, two stages", 2, 4, 2, 1),
            ("four tiles of one slice, three stages", 4, 1, 3, 1),
            ("five tiles of three slices on two programs", 5, 3, 2, 2),
            ("five tiles of two slices, one stage, on two programs", 5, 2, 1, 2),
            ("three tiles of 64 x 64, three slices of 32 each", 3, 3, 2, 1, 64, 64, 32),
        ],
        seed,
    ),
    reference=_product,
    outputs=(Output("C", ("schedule", "row", "column")),),
    difficulty=2,
    minutes=30,
    tol=1e-5,
    time_limit=60.0,
    limits=(
        Limit(
            "three tasks", "tasks", at_least=3, text="three async tasks, one wait per slice on each side of the ring"
        ),
        _exactly(
            "the waits as given",
            "tlx:barrier_wait",
            lambda case: 2 * case.args[2] * case.args[3] + 2 * case.args[2],
            "one wait per slice on each side of the ring",
        ),
        _exactly(
            "each slice copied once",
            "tlx:async_descriptor_load",
            lambda case: 2 * case.args[2] * case.args[3],
            "each slice copied once",
        ),
        _places(_turns, lambda case: case.args[4]),
    ),
    hints=(
        "Two roles walk round the same ring. Write down slot and phase of the first slice of the second tile, once for the load role and once for the MMA role, with 3 slices and 2 stages.",
        "The load role counts its turns through all tiles. The MMA role begins again with each: only by luck do the two agree.",
        "The MMA role's turn is count * steps + k. Not tile * steps + k: with two programs this one's tiles are 0, 2, 4, ...",
    ),
    mutants=(
        _one_buffer(
            ("place(count * steps + k, STAGES)", "place(count * steps + k, 1)"),
            ("place(turn, STAGES)", "place(turn, 1)"),
        ),
        Mutant(
            "counts from the tile's number",
            "with two programs the tiles of one are 0, 2, 4: the ring has seen half as many turns.",
            caught_by="runs",
            edit=(
                (
                    "            for _ in range(tl.program_id(0), tiles, tl.num_programs(0)):",
                    "            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):",
                ),
                ("place(count * steps + k, STAGES)", "place(tile * steps + k, STAGES)"),
            ),
            expect="fulls",
            recognise=False,
        ),
        Mutant(
            "both begin again",
            "the roles agree now, and the barriers do not: they remember the tile before.",
            caught_by="runs",
            edit=(
                ("place(count * steps + k, STAGES)", "place(k, STAGES)"),
                (
                    "            turn = 0\n            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):\n",
                    "            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):\n                turn = 0\n",
                ),
            ),
            expect="still be under way",
            recognise=False,
        ),
        Mutant(
            "flips the phase per tile",
            "that is right only if a tile goes round the ring an odd number of times.",
            caught_by="runs",
            edit=(
                "tlx.barrier_wait(fulls[slot], phase)",
                "tlx.barrier_wait(fulls[k % STAGES], ((k // STAGES) & 1) ^ (count & 1))",
            ),
            expect="fulls",
            recognise=False,
        ),
        Mutant(
            "waits for the other parity",
            "then the first turn passes before anything is there.",
            caught_by="runs",
            edit=("tlx.barrier_wait(fulls[slot], phase)", "tlx.barrier_wait(fulls[slot], phase ^ 1)"),
            expect="where nobody has written",
            recognise=False,
        ),
        Mutant(
            "does not wait",
            "without the wait nothing hangs, and the tensor core reads what is not there.",
            caught_by="runs",
            edit=("                    tlx.barrier_wait(fulls[slot], phase)\n", ""),
            expect="where nobody has written",
            recognise=False,
        ),
        Mutant(
            "right slot, phase of the tile",
            "the slot is carried over now, and the phase is not.",
            caught_by="runs",
            edit=(
                "slot, phase = place(count * steps + k, STAGES)",
                "slot = (count * steps + k) % STAGES\n                    phase = (k // STAGES) & 1",
            ),
            expect="fulls",
            recognise=False,
        ),
        Mutant(
            "takes the tiles one by one",
            "right numbers by one task: no role is left that could run ahead.",
            caught_by="three tasks",
            source="""
@triton.jit
def second_tile_kernel(a_desc, b_desc, c_desc, tiles, steps, STAGES: tl.constexpr):
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            total = tl.dot(a_desc.load([tile * BM, k * BK]), b_desc.load([k * BK, 0]), total)
        c_desc.store([tile * BM, 0], total)
""",
            expect="three async tasks",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "            count = 0\n            for _ in range",
                "            count = 0\n            turn = 0\n            for _ in range",
            ),
            ("place(count * steps + k, STAGES)", "place(turn, STAGES)"),
            (
                "                tlx.tcgen05_commit(acc_fulls[which])\n                count += 1",
                "                tlx.tcgen05_commit(acc_fulls[which])\n                turn += steps\n                count += 1",
            ),
            (
                "                    free = empties[slot]",
                "                    free = empties[(turn + k) % STAGES]",
            ),
            (
                "                    tlx.barrier_wait(fulls[slot], phase)",
                "                    slot, phase = place(turn + k, STAGES)\n                    tlx.barrier_wait(fulls[slot], phase)",
            ),
        ),
        (
            (
                "slot, phase = place(count * steps + k, STAGES)",
                "done = (tile - tl.program_id(0)) // tl.num_programs(0)\n"
                "                    slot, phase = place(done * steps + k, STAGES)",
            ),
            (
                "            for _ in range(tl.program_id(0), tiles, tl.num_programs(0)):",
                "            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):",
            ),
        ),
    ),
)

# -- 11.4 --------------------------------------------------------------------------------------------------------------

_LAST = (
    "                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])\n"
    "                tlx.tcgen05_commit(acc_fulls[which])\n"
)

EARLY = Exercise(
    id="11.4",
    title="Bug hunt: right whenever the tensor core is quick",
    name="early_kernel",
    kind="kernel",
    hunt=True,
    call=_tiles_launch,
    cases=lambda seed: _tile_cases(
        [
            ("one tile of three slices", 1, 3, 2, 1),
            ("one tile of one slice", 1, 1, 2, 1),
            ("three tiles of two slices", 3, 2, 2, 1),
            ("five tiles of three slices, one stage", 5, 3, 1, 1),
            ("four tiles of five slices, three stages", 4, 5, 3, 1),
            ("three tiles of 64 x 64, three slices of 32 each", 3, 3, 2, 1, 64, 64, 32),
        ],
        seed,
    ),
    reference=_product,
    outputs=(Output("C", ("schedule", "row", "column")),),
    difficulty=2,
    minutes=25,
    tol=1e-5,
    time_limit=60.0,
    limits=(
        Limit("three tasks", "tasks", at_least=3, text="three async tasks, one product per slice"),
        _exactly("one product per slice", "mmas", _products_of_tiles, "one product per slice"),
        Limit(
            "handed over by the tensor core",
            "tlx:barrier_arrive",
            at_most=lambda case: SCHEDULES * case.args[2],  # those of the epilogue
            text="the accumulator handed over by the tensor core itself, once per tile",
        ),
        _places(_turns, lambda case: case.args[4]),
    ),
    hints=(
        "The epilogue waits on acc_fulls, and rightly. Who arrives there, and what does that arrival promise?",
        "tcgen05_commit arrives when everything that this task has issued *so far* is done. Which product is not issued yet when it is called?",
        "Commit after the loop over k, once per tile: then the last product is among those it waits for.",
    ),
    mutants=(
        _one_buffer(
            ("steps + k, STAGES)\n                    free", "steps + k, 1)\n                    free"),
            (
                "steps + k, STAGES)\n                    tlx.barrier_wait",
                "steps + k, 1)\n                    tlx.barrier_wait",
            ),
        ),
        Mutant(
            "the role waits itself and arrives",
            "The MMA role waits for its last product and hands the accumulator over with an arrive of its own.",
            caught_by="handed over by the tensor core",
            edit=(
                "                tlx.tcgen05_commit(acc_fulls[which])\n",
                "                last, round_ = place(tile * steps + steps - 1, STAGES)\n"
                "                tlx.barrier_wait(empties[last], round_)\n"
                "                tlx.barrier_arrive(acc_fulls[which], 1)\n",
            ),
        ),
        Mutant(
            "commits with the next tile",
            "the last tile has no next one: the epilogue waits forever.",
            caught_by="runs",
            edit=(
                (
                    "                tlx.tcgen05_commit(acc_fulls[which])\n",
                    "",
                ),
                (
                    "                tlx.barrier_wait(acc_empties[which], use ^ 1)\n",
                    "                if tile > 0:\n"
                    "                    tlx.tcgen05_commit(acc_fulls[which ^ 1])\n"
                    "                tlx.barrier_wait(acc_empties[which], use ^ 1)\n",
                ),
            ),
            expect="acc_fulls[0]",
            recognise=False,
        ),
        Mutant(
            "arrives itself",
            "the arrival says that the last product was issued, not that it is done.",
            caught_by="runs",
            edit=(
                "                tlx.tcgen05_commit(acc_fulls[which])\n",
                "                tlx.barrier_arrive(acc_fulls[which], 1)\n",
            ),
            expect="accs[0]",
            recognise=False,
        ),
        Mutant(
            "every product hands over",
            "the barrier counts one arrival per tile, and gets one per slice.",
            caught_by="runs",
            edit=("mBarriers=[free])", "mBarriers=[free, acc_fulls[which]])"),
            expect="acc_fulls",
            recognise=False,
        ),
        Mutant(
            "commits before and after",
            "two arrivals per tile: the epilogue passes on the first.",
            caught_by="runs",
            edit=(
                _LAST,
                "                    if k == steps - 1:\n"
                "                        tlx.tcgen05_commit(acc_fulls[which])\n"
                "                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])\n"
                "                tlx.tcgen05_commit(acc_fulls[which])\n",
            ),
            expect="acc_fulls[0] can come two phases late",
            recognise=False,
        ),
        Mutant(
            "hands over with the first product",
            "the epilogue starts after the first slice.",
            caught_by="runs",
            edit=(
                _LAST,
                "                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])\n"
                "                    if k == 0:\n"
                "                        tlx.tcgen05_commit(acc_fulls[which])\n",
            ),
            expect="accs[0]",
            recognise=False,
        ),
        Mutant(
            "never hands over",
            "the epilogue waits forever.",
            caught_by="runs",
            edit=("                tlx.tcgen05_commit(acc_fulls[which])\n", ""),
            expect="acc_fulls[0]",
            recognise=False,
        ),
        Mutant(
            "commits the other accumulator",
            "the barrier that completes belongs to the accumulator of the next tile.",
            caught_by="runs",
            edit=("tlx.tcgen05_commit(acc_fulls[which])", "tlx.tcgen05_commit(acc_fulls[which ^ 1])"),
            expect="acc",
            recognise=False,
        ),
        Mutant(
            "the epilogue waits for a slice",
            "the slices' barriers go on without the epilogue: it may see one two phases late.",
            caught_by="runs",
            edit=(
                (
                    _LAST,
                    "                    if k == steps - 1:\n"
                    "                        tlx.tcgen05_commit(acc_fulls[which])\n"
                    "                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])\n",
                ),
                (
                    "                values = tlx.local_load(accs[which])",
                    "                last, then = place(tile * steps + steps - 1, STAGES)\n"
                    "                tlx.barrier_wait(empties[last], then)\n"
                    "                values = tlx.local_load(accs[which])",
                ),
            ),
            expect="empties",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                _LAST,
                "                    if k == steps - 1:\n"
                "                        both = acc_fulls[which]\n"
                "                        tlx.async_dot(\n"
                "                            a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free, both]\n"
                "                        )\n"
                "                    else:\n"
                "                        tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])\n",
            ),
        ),
        (
            (
                _LAST,
                "                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, force_async=True)\n"
                "                    tlx.tcgen05_commit(free)\n"
                "                    if k + 1 == steps:\n"
                "                        tlx.tcgen05_commit(acc_fulls[which])\n",
            ),
        ),
    ),
)

# -- 11.5 --------------------------------------------------------------------------------------------------------------


def _hidden_cases(seed):
    g = _rng(seed)

    def case(name, blocks, width, dim, depth=32, rows=ROWS):
        x = torch.randn(rows, depth, generator=g).to(torch.bfloat16)
        w = (torch.randn(depth, blocks * width, generator=g) / depth**0.5).to(torch.bfloat16)
        v = torch.randn(blocks * width, dim, generator=g).to(torch.bfloat16)
        return Case(name, (x, w, v, blocks))

    return [
        case("one block of 64", 1, 64, 32),
        case("three blocks of 64", 3, 64, 64),
        case("two blocks of 32", 2, 32, 32),
        case("four blocks of 64", 4, 64, 32, depth=16),
        case("three blocks of 32, 64 rows", 3, 32, 64, rows=64),
    ]


def _hidden_launch(kernel, x, w, v, blocks):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results = []
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(len(x), v.shape[1])
        width = w.shape[1] // blocks
        given = ((x, list(x.shape)), (w, [x.shape[1], width]), (v, [width, v.shape[1]]))
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(1,)](*(TensorDescriptor.from_tensor(*one) for one in given), out, blocks, num_warps=8)
        results.append(out)
    return torch.stack(results)


def _hidden_reference(x, w, v, blocks):
    return _each_schedule(torch.relu(x @ w) ** 2 @ v)


def _hidden_in_bf16(x, w, v, blocks):
    """Compute as a kernel does that rounds P to bf16 before the second product."""
    hidden = torch.relu(x.float() @ w.float())
    return _each_schedule((hidden * hidden).to(torch.bfloat16).float() @ v.float())


_OVER = """                tl.debug_barrier()
                tlx.local_store(p[0], (hidden * hidden).to(tl.bfloat16))
"""

HIDDEN = Exercise(
    id="11.5",
    title="Bug hunt: eight warps, one column",
    name="hidden_kernel",
    kind="kernel",
    hunt=True,
    call=_hidden_launch,
    cases=_hidden_cases,
    reference=_hidden_reference,
    arithmetic=_hidden_in_bf16,
    outputs=(Output("out", ("schedule", "row", "column")),),
    difficulty=3,
    minutes=30,
    tol=1e-5,
    slack=2.0,
    time_limit=60.0,
    limits=(
        Limit("two tasks", "tasks", at_least=2, text="both products read tensor memory as given, and two async tasks"),
        Limit("P over S", "tmem_columns", at_most=128, text="P stays over S (at most 128 columns of tensor memory)"),
        _exactly("both products", "mmas", lambda case: 2 * case.args[3], "both products read tensor memory as given"),
    ),
    hints=(
        "P has half as many columns of 32 bits as S. Which warps load the columns into which warps 4 to 7 store?",
        "What is missing is not visibility but order between warps of one task: all must have loaded before any stores. A fence and a wait are per warp.",
        "tl.debug_barrier() between the load and the store, in place of the fence. tlx.named_barrier_wait(9, 256) does it too.",
    ),
    mutants=(
        Mutant(
            "nothing instead of the fence",
            "the fence did nothing, and neither does its absence.",
            caught_by="runs",
            edit=("                tl.debug_barrier()\n", ""),
            expect="warps 4 to 7",
            recognise=False,
        ),
        Mutant(
            "barrier before the load",
            "the warps start the load together, and part again.",
            caught_by="runs",
            edit=(
                "                hidden = tl.maximum(tlx.local_load(s[0]), 0.0)\n                tl.debug_barrier()\n",
                "                tl.debug_barrier()\n                hidden = tl.maximum(tlx.local_load(s[0]), 0.0)\n",
            ),
            expect="warps 4 to 7",
            recognise=False,
        ),
        Mutant(
            "barrier after the store",
            "by then the columns have been overwritten.",
            caught_by="runs",
            edit=(
                _OVER,
                "                tlx.local_store(p[0], (hidden * hidden).to(tl.bfloat16))\n                tl.debug_barrier()\n",
            ),
            expect="warps 4 to 7",
            recognise=False,
        ),
        Mutant(
            "a barrier of half the warps",
            "128 threads are four warps: any four may pass before the others come.",
            caught_by="runs",
            edit=("tl.debug_barrier()", "tlx.named_barrier_wait(9, 128)"),
            expect="warps 4 to 7",
            recognise=False,
        ),
        Mutant(
            "waits for S once more",
            "each warp waits for itself: a wait does not join them.",
            caught_by="runs",
            edit=("tl.debug_barrier()", "tlx.barrier_wait(s_full[0], j & 1)"),
            expect="warps 4 to 7",
            recognise=False,
        ),
        Mutant(
            "columns of its own for P",
            "right, and it takes columns that a real kernel does not have.",
            caught_by="P over S",
            edit=(
                (
                    "    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)\n",
                    "",
                ),
                ("tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)", "tl.float32, 1, tlx.storage_kind.tmem)"),
                ("tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=spec)", "tl.bfloat16, 1, tlx.storage_kind.tmem)"),
                (
                    "    spec.set_buffer_overlap(tlx.reuse_group(s, p, group_type=tlx.reuse_group_type.shared))\n",
                    "",
                ),
                ("                tl.debug_barrier()\n", ""),
            ),
            expect="at most 128 columns",
            recognise=False,
        ),
        Mutant(
            "arrives between load and store",
            "it joins the warps, and tells the tensor core that P is there.",
            caught_by="runs",
            edit=(
                (_OVER, _OVER.replace("tl.debug_barrier()", "tlx.barrier_arrive(p_full[0], 1)")),
                (
                    "                tlx.barrier_arrive(p_full[0], 1)\n            tlx.barrier_wait(acc_full",
                    "            tlx.barrier_wait(acc_full",
                ),
            ),
            expect="p[0]",
            recognise=False,
        ),
        Mutant(
            "forgets the square",
            "P is relu(S), not its square.",
            edit=("(hidden * hidden).to(tl.bfloat16)", "hidden.to(tl.bfloat16)"),
        ),
    ),
    variants=(
        (("tl.debug_barrier()", "tlx.named_barrier_wait(9, 256)"),),
        (
            (
                "    p_full = tlx.alloc_barriers(1)\n",
                "    p_full = tlx.alloc_barriers(1)\n    joined = tlx.alloc_barriers(1)\n",
            ),
            (
                "tl.debug_barrier()",
                "tlx.barrier_arrive(joined[0], 1)\n                tlx.barrier_wait(joined[0], j & 1)",
            ),
        ),
        (
            (
                "                tl.debug_barrier()\n",
                "                top = tl.max(hidden, 1)  # a reduction over the columns joins the warps\n"
                "                hidden = tl.minimum(hidden, top[:, None])\n",
            ),
        ),
    ),
)

# -- 11.6 --------------------------------------------------------------------------------------------------------------

FAULTS = ("two announcements", "kept slices", "early release", "double release", "no store wait", "no fence")


def _findings(tiles, steps, stages):
    from jfa.course.broken_gemm import finding

    return {fault: finding(fault, int(tiles), int(steps), int(stages)) for fault in FAULTS}


SIZES = [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 1, 3), (3, 1, 3), (2, 2, 3), (4, 2, 2), (1, 3, 2), (5, 1, 2)]


def _sizes_cases(seed):
    return [Case(f"{t} tiles of {n} slices, {s} stages", (t, n, s)) for t, n, s in SIZES]


FINDINGS = Exercise(
    id="11.6",
    title="Six broken kernels: what happens?",
    name="findings",
    cases=_sizes_cases,
    reference=_findings,
    outputs=(Output("findings"),),
    difficulty=2,
    minutes=25,
    time_limit=5.0,
    hints=(
        "For each fault ask which role waits forever or passes too early, and from which turn on: a ring that never goes round and an accumulator that never comes back hide faults.",
        "kept slices: the load role's first wait that needs an arrival is turn number stages. early and double release: the first wait that needs one is the third tile's. no store wait: the second tile writes into staging.",
        "An arrival too many within one phase is an over-arrival; a whole phase too many, for arrive_count=1, lets a wait come two phases late: phase. A fence is missing whatever the sizes are.",
    ),
    mutants=(
        Mutant(
            "sizes do not matter",
            "With few tiles the kernel does not need what the fault breaks: a fault that is never reached is not found.",
            source="""
def findings(tiles, steps, stages):
    return {"two announcements": "over-arrival", "kept slices": "deadlock", "early release": "race",
            "double release": "phase", "no store wait": "race", "no fence": "fence"}
""",
        ),
        Mutant(
            "the ring fills one turn too early",
            "The ring has room for `stages` slices: the first wait that hangs is the one after.",
            edit=("tiles * steps > stages", "tiles * steps >= stages"),
        ),
        Mutant(
            "the ring per tile",
            "The ring does not know where a tile ends: count the slices of all tiles.",
            edit=("tiles * steps > stages", "steps > stages"),
        ),
        Mutant(
            "one accumulator",
            "There are two accumulators: the second tile has one of its own.",
            edit=("comes_back = tiles > 2", "comes_back = tiles > 1"),
        ),
        Mutant(
            "double release is an over-arrival",
            "Each of the two arrivals completes a phase: none is one too many, but a phase has gone by unseen.",
            edit=('"phase" if comes_back', '"over-arrival" if comes_back'),
        ),
        Mutant(
            "two announcements are bytes",
            "Before the bytes are counted the barrier has got one arrival too many: each announcement is one.",
            edit=('"over-arrival"', '"bytes"'),
        ),
        Mutant(
            "the store before the first",
            "With one tile nothing is written into staging twice.",
            edit=('"race" if tiles > 1 else "nothing"', '"race"'),
        ),
        Mutant(
            "staging counts as the accumulators do",
            "There is one staging buffer: the second tile writes into it while the TMA may read the first.",
            edit=('"race" if tiles > 1 else', '"race" if comes_back else'),
        ),
        Mutant(
            "an early release is a deadlock",
            "All roles continue: the accumulator is overwritten while it is loaded.",
            edit=('"early release": "race"', '"early release": "deadlock"'),
        ),
    ),
    variants=(
        """
def findings(tiles, steps, stages):
    third = "third tile" if tiles >= 3 else ""
    out = dict.fromkeys(
        ["two announcements", "kept slices", "early release", "double release", "no store wait", "no fence"], "nothing"
    )
    out["two announcements"], out["no fence"] = "over-arrival", "fence"
    if third:
        out["early release"], out["double release"] = "race", "phase"
    if tiles >= 2:
        out["no store wait"] = "race"
    if stages < steps * tiles:
        out["kept slices"] = "deadlock"
    return out
""",
        """
def findings(tiles, steps, stages):
    rules = {
        "no fence": (0, "fence"), "two announcements": (0, "over-arrival"), "no store wait": (1, "race"),
        "early release": (2, "race"), "double release": (2, "phase"),
    }
    out = {name: word if tiles > least else "nothing" for name, (least, word) in rules.items()}
    return out | {"kept slices": ["nothing", "deadlock"][min(1, max(0, tiles * steps - stages))]}
""",
    ),
)

EXERCISES = [RING, JAGGED, SECOND_TILE, EARLY, HIDDEN, FINDINGS]
