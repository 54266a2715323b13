"""Checks of chapter 15: two CTAs. Every launch is repeated under several schedules, its first axis is the schedule."""

import re

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Kept, Limit, Mutant, Output, Property
from jfa.emulator.rates import B200

SCHEDULES = 4  # eager, lazy and two random ones: see the launch functions
BM = 128


def _each_schedule(out):
    """Return the reference's result once for each schedule that the launch functions go through."""
    return torch.stack([out] * SCHEDULES)


def _exactly(name, measure, each, text):
    """Require that in every launch the operation happens exactly ``each(case)`` times."""
    count = lambda case: SCHEDULES * each(case)
    return Limit(name, measure, at_most=count, at_least=count, text=text)


def _whole(g, *shape, most=2):
    """Return whole numbers from -most to most, bf16: their sums are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=g).to(torch.bfloat16)


# -- 15.1 --------------------------------------------------------------------------------------------------------------


def _traffic_cases(seed):
    k = 64 + 32 * (seed % 5)
    sizes = [
        ("S of a pair", 128, 128, 128, False),
        ("dV of a pair: A in tensor memory", 128, 128, 128, True),
        ("dQ of a pair: 64 rows per CTA", 64, 128, 256, False),
        ("64 rows, A in tensor memory", 64, 64, k, True),
        ("a narrow product", 128, 32, k, False),
        ("64 rows, narrow: less than can be allocated", 64, 32, 16, False),
        ("as wide as it can be", 128, 256, k, False),
        ("64 rows, as wide as it can be", 64, 256, 64, False),
        ("columns that are no power of two", 128, 96, k, False),
        ("64 rows, 96 columns", 64, 96, 48, True),
        ("just over a power of two", 128, 144, 32, False),
        ("64 rows, just over", 64, 144, k, False),
    ]
    return [Case(name, tuple(args)) for name, *args in sizes]


def _traffic(m, n, k, a_in_tmem):
    """Compute by the model's rates what it charges to shared memory."""
    facts = dict(n=n, k=k, a_space="tmem" if a_in_tmem else "smem")
    one, pair = (
        B200.demand("mma", m=rows, two_cta=two, **facts).needs["smem"] * B200["smem"]
        for rows, two in ((m, False), (2 * m, True))
    )
    columns = [n, n // 2 if m == 64 else n]
    return (round(one), round(pair), *(max(32, 1 << (c - 1).bit_length()) for c in columns))


TRAFFIC = Exercise(
    id="15.1",
    title="Predict: bytes and columns",
    name="traffic",
    cases=_traffic_cases,
    reference=_traffic,
    outputs=tuple(Output(name, dtype="int") for name in ("one", "pair", "one_columns", "pair_columns")),
    difficulty=1,
    minutes=20,
    hints=(
        "A is [m, k], B is [k, n], two bytes per number. Which of them does each SM read whole, which by half, and which is elsewhere?",
        "A's rows are per CTA: a pair changes nothing about them. Of B each SM reads half. An A in tensor memory is not read from shared memory at all.",
        "one = a + 2 n k, pair = a + n k, with a = 2 m k or 0. Columns: the next power of two of n, at least 32; a pair with m = 64 needs n / 2 of them.",
    ),
    mutants=(
        Mutant(
            "B whole in the pair",
            "In a pair each CTA holds and reads half of B's columns.",
            edit=("a + n * k, allocated", "a + 2 * n * k, allocated"),
        ),
        Mutant(
            "A by half as well",
            "Rows of A belong to one CTA: only B is shared.",
            edit=("a + n * k, allocated", "a // 2 + n * k, allocated"),
        ),
        Mutant(
            "both SMs together",
            "The second number is what one SM of the pair reads, not both.",
            edit=("a + n * k, allocated", "2 * a + 2 * n * k, allocated"),
        ),
        Mutant(
            "A in tensor memory counted",
            "An A in tensor memory is not read from shared memory.",
            edit=("0 if a_in_tmem else 2 * m * k", "2 * m * k"),
        ),
        Mutant(
            "elements",
            "A number in bf16 has two bytes.",
            edit=(
                ("else 2 * m * k", "else m * k"),
                ("a + 2 * n * k, a + n * k", "a + n * k, a + n * k // 2"),
            ),
        ),
        Mutant(
            "always folded",
            "Only 64 rows per CTA leave lanes free to fold into.",
            edit=("n // 2 if m == 64 else n", "n // 2"),
        ),
        Mutant(
            "never folded",
            "A pair with 64 rows per CTA folds its columns over both halves of the lanes.",
            edit=("n // 2 if m == 64 else n", "n"),
        ),
        Mutant(
            "the single CTA folds, too",
            "A single CTA with 64 rows does not fold: its other lanes stay empty.",
            edit=("allocated(n), allocated(folded)", "allocated(folded), allocated(folded)"),
        ),
        Mutant("no power of two", "Allocations are powers of two.", edit=("size *= 2", "size += 16")),
        Mutant("less than 32", "No allocation has fewer than 32 columns.", edit=("size = 32", "size = 16")),
        Mutant(
            "one power too many",
            "A width that is a power of two fits exactly.",
            edit=("size < columns", "size <= columns"),
        ),
    ),
    variants=(
        """
import math

def traffic(m, n, k, a_in_tmem):
    bf16 = 2
    own, shared = bf16 * m * k * (not a_in_tmem), bf16 * k * n
    power = lambda c: max(32, 2 ** math.ceil(math.log2(c)))
    return own + shared, own + shared // 2, power(n), power(n * min(m, 128) // 128)
""",
        """
def traffic(m, n, k, a_in_tmem):
    found = []
    for ctas in (1, 2):
        rows = [] if a_in_tmem else [k * 2] * m
        found.append(sum(rows) + sum([k * 2 // ctas] * n))
    sizes = (32, 64, 128, 256, 512)
    wide = n // 2 if m < 128 else n
    return (*found, next(s for s in sizes if s >= n), next(s for s in sizes if s >= wide))
""",
    ),
)


# -- 15.2 --------------------------------------------------------------------------------------------------------------


def _pair_cases(seed):
    g = kinds.generator(seed)

    def case(name, steps, stages, pairs=1, depth=16, half=32, rows=BM):
        x = _whole(g, 2 * rows * pairs, steps * depth)
        b = _whole(g, (steps + 1) * depth, 2 * half)
        b[steps * depth :] = float("nan")  # nobody's
        return Case(name, (x, b, steps, stages, depth, rows))

    return [
        case("one slice, one stage", 1, 1),
        case("three slices, one stage", 3, 1),
        case("four slices, two stages", 4, 2),
        case("five slices, two stages", 5, 2),
        case("seven slices, three stages", 7, 3),
        case("two slices, three stages: no stage is used twice", 2, 3),
        case("three pairs, a neighbor's NaN beyond the last slice", 4, 2, pairs=3),
        case("slices of 32", 3, 2, depth=32),
        case("64 rows and 64 columns per CTA", 3, 2, half=64, rows=64),
    ]


def _pair_launch(kernel, x, b, steps, stages, depth, rows):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results = []
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(len(x), b.shape[1])
        box = TensorDescriptor.from_tensor(b, [depth, b.shape[1] // 2])
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(len(x) // rows,)](x, box, out, steps, BM=rows, STAGES=stages, ctas_per_cga=(2, 1, 1))
        for warning in emulator.last().warnings:
            raise warning
        results.append(out)
    return torch.stack(results)


def _pair_reference(x, b, steps, stages, depth, rows):
    return _each_schedule(x.clamp(min=0) ** 2 @ b[: steps * depth])


_ARRIVE = "        tlx.barrier_arrive(fulls[slot], 1, remote_cta_rank=0)\n"
_ANNOUNCE = "tlx.barrier_expect_bytes(fulls[slot], 2 * 2 * BK * HALF, pred=rank == 0)"
_LOAD = "tlx.async_descriptor_load(b_desc, b[slot], box, fulls[slot], two_ctas=True)"
_FREE_B = "        tlx.barrier_wait(empties[slot], phase ^ 1)\n        tlx.barrier_expect"
_ISSUE = "tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k > 0, mBarriers=free, two_ctas=True)"

PAIR = Exercise(
    id="15.2",
    title="Who expects, who arrives where, who issues",
    name="pair_kernel",
    kind="kernel",
    call=_pair_launch,
    cases=_pair_cases,
    reference=_pair_reference,
    outputs=(Output("C", ("schedule", "row", "column")),),
    difficulty=2,
    minutes=25,
    tol=1e-6,
    time_limit=60.0,
    kept=Kept(("pair_kernel",), "The kernel pair_kernel stays as it is"),
    limits=(
        _exactly(
            "one product per slice",
            "mmas",
            lambda case: case.args[2] * len(case.args[0]) // (2 * case.args[5]),
            "one product per slice, for both CTAs",
        ),
    ),
    hints=(
        "Go through the three arrivals of fulls one by one: whose barrier is it, and how does each of the three get there from the peer? Then ask the same of empties.",
        "barrier_arrive has remote_cta_rank, a load and a product have two_ctas. The announcement is made by the leader alone and counts the bytes of both halves; where threads write the operand, a fence must come before the arrival.",
        'make_a: fence("async_shared"); barrier_arrive(fulls[slot], 1, remote_cta_rank=0). load_b: wait empties[slot], phase ^ 1; barrier_expect_bytes(fulls[slot], 2 * 2 * BK * HALF, pred=rank == 0); load with two_ctas=True. multiply, if rank == 0: wait fulls, async_dot(..., mBarriers=[empties[slot]], two_ctas=True); tcgen05_commit(done[0], two_ctas=True).',
    ),
    mutants=(
        Mutant(
            "both announce",
            "the peer announces bytes on its own barrier, where no copy counts.",
            caught_by="runs",
            edit=(", pred=rank == 0)", ")"),
            expect="of cta 1",
            recognise=False,
        ),
        Mutant(
            "announces its own half only",
            "the bytes of both CTAs count on the leader's barrier.",
            caught_by="runs",
            edit=("2 * 2 * BK * HALF", "2 * BK * HALF"),
            expect="bytes",
            recognise=False,
        ),
        Mutant(
            "arrives in its own CTA",
            "the peer arrives on its own barrier: the leader waits for that arrival forever.",
            caught_by="runs",
            edit=(_ARRIVE, "        tlx.barrier_arrive(fulls[slot], 1)\n"),
            expect="fulls[0] of cta 0",
            recognise=False,
        ),
        Mutant(
            "only the leader arrives",
            "both CTAs' A must be there.",
            caught_by="runs",
            edit=(
                _ARRIVE,
                "        tlx.barrier_arrive(fulls[slot], 1, pred=tlx.cluster_cta_rank() == 0)\n",
            ),
            expect="fulls[0] of cta 0",
            recognise=False,
        ),
        Mutant(
            "the copy counts in its own CTA",
            "without two_ctas the peer's bytes count on its own barrier.",
            caught_by="runs",
            edit=(_LOAD, _LOAD.replace(", two_ctas=True", "")),
            expect="fulls[0] of cta",
            recognise=False,
        ),
        Mutant(
            "the commit arrives in one CTA",
            "the peer waits for done as well.",
            caught_by="runs",
            edit=("tcgen05_commit(done[0], two_ctas=True)", "tcgen05_commit(done[0])"),
            expect="done[0] of cta 1",
            recognise=False,
        ),
        Mutant(
            "both wait for slices",
            "nothing ever arrives at the peer's fulls.",
            caught_by="runs",
            edit=("    if rank == 0:\n        for k", "    if rank >= 0:\n        for k"),
            expect="fulls[0] of cta 1",
            recognise=False,
        ),
        Mutant(
            "no fence",
            "the tensor core reads through another proxy than threads write.",
            caught_by="runs",
            edit=('        tlx.fence("async_shared")\n' + _ARRIVE, _ARRIVE),
            expect="never fenced",
            recognise=False,
        ),
        Mutant(
            "B is not waited for",
            "the slot of B may still be read by the product before.",
            caught_by="runs",
            edit=(_FREE_B, "        tlx.barrier_expect"),
            recognise=False,
        ),
        Mutant(
            "the phase itself",
            "on a fresh barrier parity 0 holds: the load role cannot begin.",
            caught_by="runs",
            edit=(_FREE_B, _FREE_B.replace("phase ^ 1", "phase")),
            expect="empties[0]",
            recognise=False,
        ),
        Mutant(
            "the same half twice",
            "Both CTAs hold the same columns of B: CTA rank has those from rank * HALF on.",
            edit=("[k * BK, rank * HALF]", "[k * BK, 0]"),
        ),
        Mutant(
            "halves exchanged",
            "The halves of B are exchanged: CTA 0 has the first columns.",
            edit=("[k * BK, rank * HALF]", "[k * BK, (1 - rank) * HALF]"),
        ),
        Mutant(
            "halves of 32 columns",
            "a half has HALF columns, and its bytes are announced.",
            caught_by="runs",
            edit=("2 * 2 * BK * HALF", "2 * 2 * BK * 32"),
            expect="2048 bytes more were delivered",
            recognise=False,
        ),
        Mutant(
            "announces before the slot is free",
            "the announcement counts in the phase before.",
            caught_by="runs",
            edit=(
                _FREE_B + "_bytes(fulls[slot], 2 * 2 * BK * HALF, pred=rank == 0)\n",
                "        " + _ANNOUNCE + "\n" + _FREE_B.removesuffix("        tlx.barrier_expect"),
            ),
            expect="fulls[0]",
            recognise=False,
        ),
        Mutant(
            "a product per CTA",
            "a product of one CTA cannot use the other's half of B.",
            caught_by="runs",
            edit=(_ISSUE, _ISSUE.replace(", two_ctas=True", "")),
            recognise=False,
        ),
        Mutant(
            "accumulates from the first slice",
            "the first product adds to memory that was never written.",
            caught_by="runs",
            edit=("use_acc=k > 0", "use_acc=True"),
            recognise=False,
        ),
    ),
    variants=(
        (
            (_ANNOUNCE, "if rank == 0:\n            tlx.barrier_expect_bytes(fulls[slot], 4 * HALF * BK)"),
            (
                "    if rank == 0:\n        for k in range(steps):\n            slot, phase = place(k, STAGES)\n            free",
                "    if tlx.cluster_cta_rank() % 2 == 0:\n        for k in range(steps):\n            slot, phase = k % STAGES, (k // STAGES) % 2\n            free",
            ),
        ),
        (
            ("    if rank == 0:\n        for k", "    if True:\n        for k"),
            ("tlx.barrier_wait(fulls[slot], phase)", "tlx.barrier_wait(fulls[slot], phase, pred=rank == 0)"),
        ),
        (
            (
                _ISSUE,
                "tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k > 0, force_async=True, two_ctas=True)\n"
                "            tlx.tcgen05_commit(free[0], two_ctas=True)",
            ),
        ),
    ),
)


# -- 15.3 --------------------------------------------------------------------------------------------------------------


def _neighbour_cases(seed):
    g = kinds.generator(seed)

    def case(name, blocks, columns, wide=32, rows=32):
        x = torch.randn(blocks * rows, columns, generator=g) - 5.0
        return Case(name, (x, blocks, wide))

    lengths = kinds.LENGTHS["lengths 5, 0, 33, 1, 17"]
    return [
        case("one block, all columns", 1, 64),
        case("three blocks", 3, 64),
        case("the second CTA has no columns", 2, 32),
        *(case(f"{n} columns", 2, n) for n in lengths if n),
        case("one column more than a CTA has", 3, 33),
        case("five blocks, the second CTA has none", 5, 20),
        case("blocks of 16 rows, 64 columns per CTA", 3, 100, wide=64, rows=16),
    ]


def _neighbour_launch(kernel, x, blocks, wide):
    import torch

    import jfa.emulator as emulator

    results = []
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(len(x))
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(2,)](x, out, blocks, x.shape[1], R=len(x) // blocks, C=wide, ctas_per_cga=(2, 1, 1))
        for warning in emulator.last().warnings:
            raise warning
        results.append(out)
    return torch.stack(results)


def _neighbour_reference(x, blocks, wide):
    return _each_schedule(x.max(1).values)


_INIT = '        tlx.local_store(inbox[0], tl.full((R,), float("-inf"), tl.float32))\n'
_ENTRY = _INIT + "        tlx.cluster_barrier()\n"
_SEND = "        if rank * C < columns:\n            tlx.remote_shmem_store(inbox[0], mine, 1 - rank)\n"
_ROWS = "        rows = j * R"

NEIGHBOUR = Exercise(
    id="15.3",
    title="Bug hunt: the neighbor's buffer",
    name="neighbour_kernel",
    kind="kernel",
    hunt=True,
    call=_neighbour_launch,
    cases=_neighbour_cases,
    reference=_neighbour_reference,
    outputs=(Output("out", ("schedule", "row")),),
    difficulty=2,
    minutes=5,
    tol=1e-6,
    time_limit=40.0,
    limits=(
        Limit(
            "through the inbox",
            "tlx:remote_shmem_store",
            at_most=lambda case: SCHEDULES * 2 * case.args[1],
            at_least=lambda case: SCHEDULES * case.args[1] * (case.args[0].shape[1] > case.args[2]),
            text="keep `remote_shmem_store`, one or none per CTA and block",
        ),
    ),
    hints=(
        "Write down the three accesses to one inbox in a block: the owner's fill, the peer's store, the owner's load. Which two does the barrier order?",
        "The fill and the peer's store are not ordered: the fill may come second and overwrite the maximum. And in the first block the peer may not even have started.",
        "A second tlx.cluster_barrier() in every block, directly behind the fill, and made by both CTAs.",
    ),
    mutants=(
        Mutant(
            "a barrier before the fill",
            "the fill itself must come before the peer's store.",
            caught_by="runs",
            edit=(_ENTRY, "        tlx.cluster_barrier()\n" + _INIT),
            expect="inbox[0]",
            recognise=False,
        ),
        Mutant(
            "a fence",
            "a fence orders nothing between two CTAs.",
            caught_by="runs",
            edit=(_ENTRY, _INIT + '        tlx.fence("async_shared")\n'),
            expect="inbox[0]",
            recognise=False,
        ),
        Mutant(
            "a barrier of one CTA's warps",
            "tl.debug_barrier joins the warps of one CTA.",
            caught_by="runs",
            edit=(_ENTRY, _INIT + "        tl.debug_barrier()\n"),
            expect="inbox[0]",
            recognise=False,
        ),
        Mutant(
            "once, before the loop",
            "the inbox is filled again in every block.",
            caught_by="runs",
            edit=(
                ("    for j in range(blocks):\n", "    tlx.cluster_barrier()\n    for j in range(blocks):\n"),
                (_ENTRY, _INIT),
            ),
            expect="inbox[0]",
            recognise=False,
        ),
        Mutant(
            "only the sender waits",
            "every CTA must arrive at a cluster barrier, also one with nothing to send.",
            caught_by="runs",
            edit=(
                (_ENTRY, _INIT),
                (
                    "            tlx.remote_shmem_store",
                    "            tlx.cluster_barrier()\n            tlx.remote_shmem_store",
                ),
            ),
            recognise=False,
        ),
        Mutant(
            "moved, not added",
            "now nothing orders the store and the load.",
            caught_by="runs",
            edit=("        tlx.cluster_barrier()\n        if rank == 0:\n", "        if rank == 0:\n"),
            expect="inbox[0]",
            recognise=False,
        ),
        Mutant(
            "not filled",
            "a CTA without columns sends nothing, so the inbox was never written.",
            caught_by="runs",
            edit=(_INIT, ""),
            expect="inbox[0]",
            recognise=False,
        ),
        Mutant(
            "filled with zeros",
            "Zero is larger than a negative maximum.",
            edit=('tl.full((R,), float("-inf"), tl.float32)', "tl.zeros((R,), tl.float32)"),
        ),
        Mutant(
            "sends twice",
            "one store per CTA and block carries its maximum.",
            caught_by="through the inbox",
            edit=(
                _SEND,
                _SEND + "            tlx.remote_shmem_store(inbox[0], mine, 1 - rank)\n",
            ),
            expect="remote_shmem_store",
            recognise=False,
        ),
        Mutant(
            "to itself",
            "Each CTA sends to itself: the other one's columns are left out.",
            edit=("mine, 1 - rank)", "mine, rank)"),
        ),
    ),
    variants=(
        (
            (_ENTRY, "        tlx.cluster_barrier()\n"),
            (_SEND, "        tlx.remote_shmem_store(inbox[0], mine, 1 - rank)\n"),
        ),
        (
            (_ENTRY, _INIT),
            (_SEND, "        tlx.cluster_barrier()\n" + _SEND),
        ),
        (
            ("        if rank * C < columns:\n", "        if (rank == 1) & (C < columns):\n"),
        ),  # nobody reads the second's inbox
        (
            (
                "    inbox = tlx.local_alloc((R,), tl.float32, 1)\n",
                "    inbox = tlx.local_alloc((R,), tl.float32, 2)\n",
            ),
            (_ENTRY, _ENTRY.replace("inbox[0]", "inbox[j % 2]")),
            (_SEND, _SEND.replace("inbox[0]", "inbox[j % 2]")),
            ("tlx.local_load(inbox[0])", "tlx.local_load(inbox[j % 2])"),
        ),
    ),
)


# -- 15.4 --------------------------------------------------------------------------------------------------------------


def _exchange_cases(seed):
    g = kinds.generator(seed)

    def case(name, blocks, keys, bn=64, half=64, dim=64):
        k = _whole(g, 2 * bn, dim)
        k[keys:] = 0
        return Case(name, (_whole(g, max(keys, 1), blocks * 2 * half), k, blocks, keys, half))

    return [
        case("one block", 1, 128),
        case("two blocks: each slot once", 2, 128),
        case("three blocks of 32 keys per CTA, head dim 128", 3, 64, bn=32, dim=128),
        case("six blocks, 100 keys", 6, 100),
        case("65 keys: one of them in the second CTA", 3, 65),
        case("64 keys: none in the second CTA", 3, 64),
        case("5 keys, halves of 128 queries", 2, 5, bn=16, half=128),
    ]


def _exchange_launch(kernel, ds, k, blocks, keys, half):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, (rows, dim) = [], k.shape
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(blocks * 2 * half, dim)
        box = TensorDescriptor.from_tensor(k, [rows, dim // 2])
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(2,)](ds, box, out, blocks, keys, BN=rows // 2, HALF=half, D=dim, ctas_per_cga=(2, 1, 1))
        for warning in emulator.last().warnings:
            raise warning
        results.append(out)
    return torch.stack(results)


def _exchange_reference(ds, k, blocks, keys, half):
    return _each_schedule(ds[:keys].T @ k[:keys])


_COPY = "tlx.async_remote_shmem_copy(parts[part], staging[slot], 1 - rank, come[slot])"
_TELL = "        tlx.barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0)\n"
_GIVEN = _COPY + "\n" + _TELL
_COME = "        tlx.barrier_wait(come[slot], phase)\n"
_EXPECT = "        tlx.barrier_expect_bytes(come[slot], 2 * BN * HALF)\n"
_FREE = "        tlx.barrier_wait(ds_empties[slot], phase ^ 1)\n"
_FENCE = '        tlx.fence("async_shared")\n'

EXCHANGE = Exercise(
    id="15.4",
    title="The exchange, with two buffers",
    name="exchange_kernel",
    kind="kernel",
    call=_exchange_launch,
    cases=_exchange_cases,
    reference=_exchange_reference,
    outputs=(Output("dq", ("schedule", "row", "column")),),
    difficulty=3,
    minutes=25,
    tol=1e-6,
    time_limit=90.0,
    kept=Kept(("exchange_kernel",), "the kernel stays as it is"),
    limits=(
        _exactly(
            "one copy per block and CTA",
            "tlx:async_remote_shmem_copy",
            lambda case: 2 * case.args[2],
            "Use one copy per block and CTA",
        ),
    ),
    hints=(
        "Take the chapter's version 4 and ask of each buffer and each barrier: which of the two is it for block j? Then check the parts: the tile of slot s has two, one per CTA whose keys it holds.",
        "place(j, 2) gives slot and phase. Own half and received half go to parts[2 * slot + r] with r the CTA that made them. The wait for ds_empties[slot] also protects staging[slot].",
        "give: wait ds_empties[slot], phase ^ 1; local_store(parts[2 * slot + rank], made(... (2 * j + rank) * HALF ...)); local_store(staging[slot], made(... (2 * j + 1 - rank) * HALF ...)); fence; async_remote_shmem_copy(parts[2 * slot + rank], staging[slot], 1 - rank, come[slot]); barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0). pass_on: expect, wait come[slot], phase; the same arrival.",
    ),
    mutants=(
        Mutant(
            "the own half is sent",
            "The half that is sent is the one that stays: the peer gets dS of your queries, not of its own.",
            edit=("(2 * j + 1 - rank) * HALF", "(2 * j + rank) * HALF"),
        ),
        Mutant(
            "the halves exchanged",
            "Each CTA keeps dS of the other's queries.",
            edit=(
                (
                    "mine = made(ds_ptr, keys, rank, (2 * j + rank) * HALF",
                    "mine = made(ds_ptr, keys, rank, (2 * j + 1 - rank) * HALF",
                ),
                (
                    "other = made(ds_ptr, keys, rank, (2 * j + 1 - rank) * HALF",
                    "other = made(ds_ptr, keys, rank, (2 * j + rank) * HALF",
                ),
            ),
        ),
        Mutant(
            "halves of 64 queries",
            "Half h of block j begins at query (2 j + h) * HALF, whatever HALF is: here it was 64 for good.",
            edit=(
                ("(2 * j + rank) * HALF", "(2 * j + rank) * 64"),
                ("(2 * j + 1 - rank) * HALF", "(2 * j + 1 - rank) * 64"),
            ),
        ),
        Mutant(
            "copies into the other part",
            "two CTAs write one part: yours belongs where your keys are.",
            caught_by="runs",
            edit=(_COPY, _COPY.replace("parts[part]", "parts[2 * slot + 1 - rank]")),
            expect="parts",
            recognise=False,
        ),
        Mutant(
            "the first tile for every block",
            "block j belongs in the tile of slot j % 2.",
            caught_by="runs",
            edit=("part = 2 * slot + rank", "part = rank"),
            recognise=False,
        ),
        Mutant(
            "tells itself",
            "the leader waits for four arrivals, two of them the peer's.",
            caught_by="runs",
            edit=(_GIVEN, _GIVEN.replace(", remote_cta_rank=0", "")),
            expect="ds_fulls",
            recognise=False,
        ),
        Mutant(
            "the relay arrives in its own CTA",
            "the leader does not learn that the peer has received its half.",
            caught_by="runs",
            edit=(_COME + _TELL.rstrip(), _COME + _TELL.replace(", remote_cta_rank=0", "")),
            recognise=False,
        ),
        Mutant(
            "the relay does not wait",
            "the leader's barrier completes before the half has come.",
            caught_by="runs",
            edit=(_COME, ""),
            recognise=False,
        ),
        Mutant(
            "bytes not announced",
            "bytes arrive that were not announced.",
            caught_by="runs",
            edit=(_EXPECT, ""),
            expect="come[0]",
            recognise=False,
        ),
        Mutant(
            "bytes of both halves",
            "only the other CTA's half comes through the copy.",
            caught_by="runs",
            edit=("2 * BN * HALF)", "4 * BN * HALF)"),
            expect="come[0]",
            recognise=False,
        ),
        Mutant(
            "no fence",
            "the copy engine and the tensor core read through another proxy than threads write.",
            caught_by="runs",
            edit=(_FENCE, ""),
            expect="never fenced",
            recognise=False,
        ),
        Mutant(
            "does not wait for the tile",
            "the tile, or staging, is overwritten while it is being read.",
            caught_by="runs",
            edit=(_FREE, ""),
            recognise=False,
        ),
        Mutant(
            "one staging tile",
            "the next block's half overwrites staging while it is being copied.",
            caught_by="runs",
            edit=(
                ("tlx.local_store(staging[slot], other)", "tlx.local_store(staging[0], other)"),
                (_COPY, _COPY.replace("staging[slot]", "staging[0]")),
            ),
            expect="staging[0]",
            recognise=False,
        ),
        Mutant(
            "the block's parity for a slot",
            "a slot is used every second block: its phase changes every second time.",
            caught_by="runs",
            edit=(_FREE, "        tlx.barrier_wait(ds_empties[slot], (j & 1) ^ 1)\n"),
            recognise=False,
        ),
        Mutant(
            "one barrier for both slots",
            "the peer's second half may come before the first one was waited for.",
            caught_by="runs",
            edit=(
                (_COPY, _COPY.replace("come[slot]", "come[0]")),
                (_EXPECT, _EXPECT.replace("come[slot]", "come[0]")),
                (_COME, "        tlx.barrier_wait(come[0], j & 1)\n"),
            ),
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "        tlx.local_store(parts[part], mine)\n        tlx.local_store(staging[slot], other)\n"
                + _FENCE
                + "        "
                + _GIVEN,
                "        tlx.local_store(staging[slot], other)\n" + _FENCE + "        " + _COPY + "\n"
                "        tlx.local_store(parts[part], mine)\n" + _FENCE + _TELL,
            ),
        ),
        (
            (
                "        slot, phase = place(j, 2)\n        part = 2 * slot + rank\n",
                "        slot, phase = j % 2, (j // 2) & 1\n        part = slot * 2 + rank\n",
            ),
            (_COME, _COME + _FENCE),
        ),
        (
            (
                "        slot, phase = place(j, 2)\n" + _EXPECT + _COME,
                "        slot = j & 1\n" + _EXPECT + "        tlx.barrier_wait(come[slot], (j >> 1) & 1)\n",
            ),
        ),
    ),
)


# -- 15.5 --------------------------------------------------------------------------------------------------------------


def _odd_cases(seed):
    g = kinds.generator(seed)

    def case(name, lengths, steps=2, stages=2, depth=32, half=32):
        """Return sequences with a row of NaN behind each; a record per tile of 256 rows."""
        a, records, begin, keep = [], [], 0, []
        for n in lengths:
            a += [_whole(g, n, steps * depth), torch.full((1, steps * depth), float("nan")).bfloat16()]
            records += [[begin + t, begin + n] for t in range(0, n, 256)]
            keep += [*range(begin, begin + n)]
            begin += n + 1
        b = _whole(g, steps * depth, 2 * half)
        rows = torch.zeros(begin, dtype=torch.bool)
        rows[keep] = True
        return Case(name, (torch.cat(a), b, torch.tensor(records, dtype=torch.int32), rows, steps, stages, depth))

    return [
        case("256 rows: two tiles", [256]),
        case("128 rows: one tile", [128]),
        case("129 rows: one row in the second CTA", [129]),
        case("lengths 5, 0, 33, 1, 17", list(kinds.LENGTHS["lengths 5, 0, 33, 1, 17"])),
        case("three tiles, slices of 16", [384], steps=3, depth=16),
        case("64 columns per CTA", [100, 140], half=64),
        case("odd and even numbers of tiles", [130, 100, 256], steps=5),
        case("five slices, one stage", [20], steps=5, stages=1),
        case("one slice", [300], steps=1, stages=3),
    ]


def _odd_launch(kernel, a, b, records, rows, steps, stages, depth):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results = []
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = torch.where(rows[:, None], unwritten(len(a), b.shape[1]), torch.tensor(7.0))
        half = b.shape[1] // 2
        boxes = [TensorDescriptor.from_tensor(t, box) for t, box in ((a, [128, depth]), (b, [depth, half]))]
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(2 * len(records),)](*boxes, out, records, steps, STAGES=stages, ctas_per_cga=(2, 1, 1))
        for warning in emulator.last().warnings:
            raise warning
        results.append(out)
    return torch.stack(results)


def _odd_reference(a, b, records, rows, steps, stages, depth):
    return _each_schedule(torch.where(rows[:, None], torch.nan_to_num(a) @ b, torch.tensor(7.0, dtype=a.dtype)))


_TURNS = "            turns = steps\n"
_ODD_A = "                tlx.async_descriptor_load(a_desc, a[slot], [row, k * BK], full, two_ctas=True)\n"

ODD = Exercise(
    id="15.5",
    title="Bug hunt: an odd number of tiles",
    name="odd_kernel",
    kind="kernel",
    hunt=True,
    call=_odd_launch,
    cases=_odd_cases,
    reference=_odd_reference,
    outputs=(Output("C", ("schedule", "row", "column")),),
    difficulty=2,
    minutes=25,
    tol=1e-6,
    time_limit=60.0,
    limits=(
        _exactly(
            "one product per slice",
            "mmas",
            lambda case: case.args[4] * len(case.args[2]),
            "each pair makes one product per slice, for both CTAs",
        ),
        Limit(
            "both CTAs stay",
            "tmem_loads",
            at_least=lambda case: SCHEDULES * 2 * len(case.args[2]),
            text="each CTA waits in leave until the products are done, with rows or without",
        ),
    ),
    hints=(
        "The report names a barrier, and bytes that are outstanding. Whose bytes are they, and why do they not come?",
        "The product needs the peer's half of B, whether or not the peer has rows. And it reads the peer's A, too. What does not exist may be loaded and need not be stored.",
        "turns = steps, for both CTAs. Rows behind the sequence's end are masked in leave already.",
    ),
    mutants=(
        Mutant(
            "the leader counts on itself",
            "the peer's half of B is needed, though it has no rows.",
            caught_by="runs",
            edit=(
                (_TURNS, "            turns = tl.where(row < end, steps, 0)\n"),
                (
                    "tlx.barrier_expect_bytes(full, 2 * 2 * (BM + HALF) * BK, pred=rank == 0)",
                    "both = row + BM < end\n"
                    "                tlx.barrier_expect_bytes(full, 4 * (BM + HALF) * BK, pred=(rank == 0) & both)\n"
                    "                tlx.barrier_expect_bytes(full, 2 * (BM + HALF) * BK, pred=(rank == 0) & (row + BM >= end))",
                ),
            ),
            recognise=False,
        ),
        Mutant(
            "the leader expects half",
            "the product starts before the peer's half is there.",
            caught_by="runs",
            edit=("2 * 2 * (BM + HALF) * BK", "2 * (BM + HALF) * BK"),
            recognise=False,
        ),
        Mutant(
            "the peer loads B only",
            "the product reads the peer's A as well, and it was never written.",
            caught_by="runs",
            edit=(_ODD_A, "                if row < end:\n    " + _ODD_A),
            recognise=False,
        ),
        Mutant(
            "one slice only",
            "every slice needs both halves of B.",
            caught_by="runs",
            edit=(_TURNS, "            turns = tl.where(row < end, steps, 1)\n"),
            recognise=False,
        ),
        Mutant(
            "the peer without rows does not wait",
            "a CTA whose memory the pair's product still reads goes on to its end.",
            caught_by="both CTAs stay",
            edit=(
                "            leave(c_ptr, acc[0], done[0], row, end)",
                "            if row < end:\n                leave(c_ptr, acc[0], done[0], row, end)",
            ),
            recognise=False,
        ),
        Mutant(
            "the pair does nothing",
            "A pair whose second CTA has no rows does nothing at all: the first one's rows are missing.",
            caught_by="returns",
            edit=(
                (_TURNS, "            turns = tl.where(tl.load(record) + BM < end, steps, 0)\n"),
                (
                    "            leave(c_ptr, acc[0], done[0], row, end)",
                    "            if tl.load(record) + BM < end:\n                leave(c_ptr, acc[0], done[0], row, end)",
                ),
                ("            if rank == 0:\n", "            if (rank == 0) & (tl.load(record) + BM < end):\n"),
            ),
            recognise=False,
        ),
        Mutant(
            "a product per CTA",
            "without two_ctas the peer's bytes count in its own CTA.",
            caught_by="runs",
            edit=(_ODD_A, _ODD_A.replace(", two_ctas=True", "")),
            recognise=False,
        ),
        Mutant(
            "rows of the neighbor",
            "A row past the sequence's end is written: it belongs to another sequence.",
            caught_by="runs",
            edit=("leave(c_ptr, acc[0], done[0], row, end)", "leave(c_ptr, acc[0], done[0], row, row + BM)"),
            recognise=False,
        ),
        Mutant(
            "the leader's rows twice",
            "The second CTA loads the first one's rows: its own are missing.",
            edit=("[row, k * BK]", "[row - rank * BM, k * BK]"),
        ),
    ),
    variants=(
        (
            (_TURNS, ""),
            ("for k in range(turns):", "for k in range(0, steps, 1):"),
        ),
        ((_TURNS, "            turns = tl.where(tl.load(record) < end, steps, 0)  # both CTAs, or none\n"),),
        (("[row, k * BK], full", "[tl.minimum(row, end - 1), k * BK], full"),),
    ),
)


# -- 15.6 --------------------------------------------------------------------------------------------------------------


def _form_cases(seed):
    g = kinds.generator(seed)
    n = int(torch.randint(600, 3000, (1,), generator=g))

    def case(name, lengths_q, lengths_kv, head_dim=128, group=1, shared=False, deterministic=False):
        return Case(name, (lengths_q, lengths_kv, head_dim, group, shared, deterministic))

    return [
        case("long self attention", [n, n], [n, n]),
        case("empty and long sequences", [n, 0, 0, 0], [n, 0, 0, 0]),
        case("many queries, few keys", [n, n], [64, 64]),
        case("short sequences", [100, 300], [100, 300]),
        case("exactly 512 keys", [512], [512]),
        case("511 keys", [511], [511]),
        case("a mean just below 512", [512, 511], [512, 511]),
        case("a mean of 700 and two thirds", [700, 701, 701], [700, 701, 701]),
        case("a mean of 400 and two thirds", [400, 401, 401], [400, 401, 401]),
        case("no keys at all", [3, 4], [0, 0]),
        case("few queries, many keys", [64, 64], [n, n]),
        case("lengths 5, 0, 33, 1, 17", [5, 0, 33, 1, 17], [5, 0, 33, 1, 17]),
        case("head dim 64", [n], [n], head_dim=64),
        case("head dim 64 and short keys", [n], [100], head_dim=64),
        case("head dim 80", [n], [n], head_dim=80),
        case("deterministic", [n], [n], deterministic=True),
        case("deterministic, and a small head", [n], [n], head_dim=32, deterministic=True),
        case("32 shared queries", [32], [n, n], group=4, shared=True),
        case("exactly 128 rows", [16], [40, 50], group=8, shared=True),
        case("one row too many", [43], [n, n], group=3, shared=True),
        case("shared, deterministic, resident", [32], [n], shared=True, deterministic=True),
        case("shared, resident, small head, short keys", [8], [5, 0, 7], head_dim=64, shared=True),
        case("200 shared queries, short keys", [200], [300, 310], shared=True),
        case(
            "200 shared queries, deterministic, head dim 64",
            [200],
            [n, 30],
            head_dim=64,
            shared=True,
            deterministic=True,
        ),
        case("few queries, but not shared", [32], [n], group=4),
    ]


def _form(lengths_q, lengths_kv, head_dim, group, broadcast_q, deterministic):
    """Return (form, words that the reason must contain)."""
    if broadcast_q and lengths_q[0] * group <= 128:
        return "resident", ("queries", str(lengths_q[0] * group))
    if deterministic:
        return "single", ("deterministic",)
    if head_dim <= 64:
        return "single", (str(head_dim),)
    lengths = [n for n in lengths_kv if n]
    mean = sum(lengths) // len(lengths) if lengths else 0
    return "single" if mean < 512 else "pair", ("keys", str(mean))


def _two_strings(case, result):
    if not (isinstance(result, tuple | list) and len(result) == 2 and all(isinstance(r, str) for r in result)):
        return "It must return two strings: the form and the reason."
    return None


def _right_form(case, result):
    if _two_strings(case, result):
        return None
    form, _ = _form(*case.args)
    return None if result[0] == form else f"The form {result[0]!r} is not what the table's first fitting line says."


def _right_reason(case, result):
    if _two_strings(case, result):
        return None
    _, words = _form(*case.args)
    for word in words:
        found = (
            re.search(rf"(?<!\d){word}(?!\d)", result[1].replace(",", ""))
            if word.isdigit()
            else word in result[1].replace(" ", "_").lower() or word in result[1].lower()
        )
        if not found:
            what = "the number that decides" if word.isdigit() else f"the word {word!r}"
            return f"The reason {result[1]!r} does not contain {what}."
    return None


FORM = Exercise(
    id="15.6",
    title="Which form, and why",
    name="backward_form",
    cases=_form_cases,
    outputs=(Output("form"), Output("reason")),
    properties=(
        Property("two strings", _two_strings),
        Property("the form", _right_form),
        Property("the reason", _right_reason),
    ),
    difficulty=1,
    minutes=30,
    hints=(
        "One if per line of the table, in its order, each with its return. Compute the number once and put it into the text.",
        "Resident counts lengths_q[0] * group, only if broadcast_q. The mean of the keys leaves empty sequences out, and must not divide by zero.",
        "lengths = [n for n in lengths_kv if n > 0]; keys = sum(lengths) // max(len(lengths), 1); < 512 is single. f-strings for the reasons.",
    ),
    mutants=(
        Mutant(
            "deterministic first",
            "the first line that fits decides, and resident stands first.",
            caught_by="the form",
            edit=("if broadcast_q and lengths_q[0]", "if broadcast_q and not deterministic and lengths_q[0]"),
        ),
        Mutant(
            "without the group",
            "the heads of a group share the block of 128 rows.",
            caught_by="the form",
            edit=("if broadcast_q and lengths_q[0] * group <= 128", "if broadcast_q and lengths_q[0] <= 128"),
        ),
        Mutant(
            "not only shared queries",
            "queries of one sequence are not shared by all.",
            caught_by="the form",
            edit=("if broadcast_q and lengths_q[0]", "if lengths_q[0]"),
        ),
        Mutant(
            "128 is too many",
            "exactly 128 rows fit.",
            caught_by="the form",
            edit=("* group <= 128", "* group < 128"),
        ),
        Mutant(
            "empty sequences counted",
            "sequences without keys make no tiles.",
            caught_by="the form",
            edit=("[n for n in lengths_kv if n > 0]", "list(lengths_kv)"),
        ),
        Mutant(
            "queries counted",
            "the keys are cut into tiles, not the queries.",
            caught_by="the form",
            edit=("for n in lengths_kv if", "for n in lengths_q if"),
        ),
        Mutant(
            "512 is too few",
            "fewer than 512 means 511 or less.",
            caught_by="the form",
            edit=("keys < 512", "keys <= 512"),
        ),
        Mutant(
            "head dim below 64",
            "at most 64 includes 64.",
            caught_by="the form",
            edit=("head_dim <= 64", "head_dim < 64"),
        ),
        Mutant(
            "head dim after the keys",
            "where head_dim and the keys both say single, the table's first line counts, and its reason.",
            caught_by="the reason",
            edit=(
                "    if head_dim <= 64:",
                "    if head_dim <= 64 and sum(lengths_kv) >= 512 * sum(n > 0 for n in lengths_kv):",
            ),
        ),
        Mutant(
            "rounded up",
            "the mean is rounded down.",
            caught_by="the form",
            edit=("sum(lengths) // max(len(lengths), 1)", "-(-sum(lengths) // max(len(lengths), 1))"),
        ),
        Mutant(
            "divides by nothing",
            "without any keys there is nothing to divide by.",
            caught_by="runs",
            edit=("// max(len(lengths), 1)", "// len(lengths)"),
            expect="ZeroDivisionError",
            recognise=False,
        ),
        Mutant(
            "no number in the reason",
            "a reader cannot check a reason without the number.",
            caught_by="the reason",
            edit=('f"{keys} keys per sequence fill tiles of 256"', '"many keys per sequence"'),
        ),
        Mutant(
            "a rounded mean in the reason",
            "the mean in the reason is rounded down, as the one that decides.",
            caught_by="the reason",
            edit=('f"{keys} keys per sequence fill', 'f"{sum(lengths) / len(lengths):.0f} keys per sequence fill'),
        ),
        Mutant(
            "the queries' number alone",
            "the number that decides is queries times heads.",
            caught_by="the reason",
            edit=('f"{lengths_q[0] * group} queries in', 'f"{lengths_q[0]} queries in'),
        ),
        Mutant(
            "the form only",
            "two strings are asked for.",
            caught_by="two strings",
            edit=('return "single", "deterministic: dQ has a kernel of its own"', 'return "single"'),
        ),
    ),
    variants=(
        """
def backward_form(lengths_q, lengths_kv, head_dim, group, broadcast_q, deterministic):
    rows = lengths_q[0] * group if broadcast_q else 10**9
    count = sum(n > 0 for n in lengths_kv)
    keys = sum(lengths_kv) // count if count else 0
    table = [
        (rows <= 128, "resident", f"queries x heads = {rows}"),
        (deterministic, "single", "it is to be deterministic"),
        (head_dim <= 64, "single", f"head_dim = {head_dim}"),
        (keys < 512, "single", f"a mean of {keys} keys"),
        (True, "pair", f"a mean of {keys} keys"),
    ]
    return next((form, why) for fits, form, why in table if fits)
""",
        """
def backward_form(lengths_q, lengths_kv, head_dim, group, broadcast_q, deterministic):
    shared_rows = None
    if broadcast_q:
        shared_rows = sum(lengths_q) * group
    if shared_rows is not None and not shared_rows > 128:
        return ["resident", "only " + str(shared_rows) + " queries, counting heads"]
    if deterministic is True:
        return ["single", "deterministic"]
    if not head_dim > 64:
        return ["single", "head_dim of " + str(head_dim)]
    with_keys = list(filter(None, lengths_kv))
    mean = int(sum(with_keys) / len(with_keys)) if with_keys else 0
    return ["pair" if mean >= 512 else "single", "keys: " + str(mean) + " on average"]
""",
    ),
)

EXERCISES = [TRAFFIC, PAIR, NEIGHBOUR, EXCHANGE, ODD, FORM]
