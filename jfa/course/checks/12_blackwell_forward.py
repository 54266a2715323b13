"""Checks of chapter 12: the Blackwell forward. Kernels run under several schedules; the first axis of a result is the schedule."""

import math
import random

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Kept, Limit, Mutant, Output, Property

SCHEDULES = 4  # eager, lazy, random, and the timed one


def _rng(seed):
    return torch.Generator().manual_seed(seed)


def _qkv(g, rows, keys, dim, lift=1.0):
    return tuple(
        (torch.randn(n, dim, generator=g) * f).to(torch.bfloat16) for n, f in ((rows, lift), (keys, 1.0), (keys, 1.0))
    )


def _attention(q, k, v, block=0, scale=None, **launch):
    """Return (out, lse) in float64, whatever the tensors' type; ``scale`` is 1 / sqrt(D) if the case has none of its own."""
    scores = q.double() @ k.double().t() * _scale(q, scale)
    return torch.softmax(scores, dim=1) @ v.double(), torch.logsumexp(scores, dim=1)


def _scale(q, scale):
    return 1 / math.sqrt(q.shape[1]) if scale is None else scale


def _in_bf16(q, k, v, block, scale=None, **launch):
    """Return (out, lse) as a right kernel computes them: block by block in fp32, P rounded to bf16 before the second product."""
    q, k, v = q.float(), k.float(), v.float()
    m, l, acc = q.new_full((len(q), 1), -math.inf), q.new_zeros(len(q), 1), torch.zeros_like(q)
    for start in range(0, len(k), block):
        scores = q @ k[start : start + block].T * _scale(q, scale)
        new = torch.maximum(m, scores.amax(1, keepdim=True))
        p, shrink = torch.exp(scores - new), torch.exp(m - new)
        m, l, acc = new, l * shrink + p.sum(1, keepdim=True), acc * shrink + kinds.to_bf16(p) @ v[start : start + block]
    return acc / l, (m + torch.log(l))[:, 0]


def _four_times(function):
    """Return the function's results once for each schedule."""

    def again(q, k, v, block, **launch):
        found = function(q, k, v, block, **launch)
        return (
            tuple(torch.stack([x] * SCHEDULES) for x in found)
            if isinstance(found, tuple)
            else torch.stack([found] * SCHEDULES)
        )

    return again


TOL, SLACK = 1e-4, 3.0  # of out: three times what rounding P to bf16 explains; 1 percent is more than that


# -- 12.1 --------------------------------------------------------------------------------------------------------------


def _lazy_cases(seed):
    g = _rng(seed)

    def case(name, rows, blocks, width, threshold, rising=0.0):
        scores = (
            3.0 * torch.randn(rows, blocks, width, generator=g) + rising * torch.arange(blocks)[None, :, None] - 20.0
        )
        return Case(name, (scores, torch.randn(blocks * width, 8, generator=g), threshold))

    edge = -torch.rand(3, 3, 4, generator=g) - 1.0
    edge[:, 0, 1] = 0.0
    edge[:, 1, 2] = torch.tensor(kinds.around(8.0))
    hard = kinds.score_rows(kinds.MODERATE, 40, 8, g).reshape(-1, 5, 8)
    return [
        case("one block", 2, 1, 4, 8.0),
        case("two blocks, threshold 0", 3, 2, 8, 0.0),
        case("maxima that rise by about 3 per block, threshold 8", 5, 9, 16, 8.0, rising=3.0),
        case("maxima that rise by about 30 per block, threshold 8", 4, 5, 16, 8.0, rising=30.0),
        Case(
            "maxima that grow by just below, exactly and just above the threshold",
            (edge, torch.randn(12, 8, generator=g), 8.0),
        ),
        Case(
            "scores of every kind, one kind per row",
            (hard, torch.randn(40, 8, generator=g), 8.0),
            labels=tuple(kinds.MODERATE),
        ),
        case("many blocks", 64, 40, 16, 8.0, rising=1.0),
    ]


def _lazy(scores, values, threshold):
    rows, blocks, width = scores.shape
    reference = scores[:, 0].amax(dim=1)
    raised = torch.zeros(rows, dtype=torch.int64)
    for j in range(1, blocks):
        grew = scores[:, j].amax(dim=1) - reference > threshold
        reference = torch.where(grew, scores[:, j].amax(dim=1), reference)
        raised += grew
    p = torch.softmax(scores.reshape(rows, -1) * math.log(2), dim=1)
    return p @ values, raised


def _stale(case):
    """Return 1 if some row keeps a reference below a block's maximum, so that an exponential is larger than 1."""
    scores, _, threshold = case.args
    reference = scores[:, 0].amax(1)
    for j in range(1, scores.shape[1]):
        top = scores[:, j].amax(1)
        if bool(((top > reference + 0.1) & (top - reference <= threshold)).any()):
            return 1
        reference = torch.where(top - reference > threshold, top, reference)
    return 0


LAZY = Exercise(
    id="12.1",
    title="Rescale only when it matters",
    name="lazy_attention",
    cases=_lazy_cases,
    reference=_lazy,
    outputs=(Output("out", ("row", "dim")), Output("raised", ("row",), dtype="int64")),
    difficulty=2,
    minutes=40,
    tol=1e-5,
    forbid=("softmax",),
    hints=(
        "Keep three things for each row: the reference maximum, the sum, the output. All exponentials of a block use the reference, whether it was raised or not.",
        "grew = block_max - reference > threshold. Where it did not grow alpha is 1, because the reference stays.",
        "new = torch.where(grew, block_max, reference); alpha = torch.exp2(reference - new); p = torch.exp2(s - new[:, None]); sum and output are rescaled by alpha; out / total at the end.",
    ),
    limits=(
        Limit(
            "block by block",
            "peak_numel",
            at_most=lambda case: max(
                case.args[0].shape[0] * case.args[0].shape[2], case.args[0].shape[0] * case.args[1].shape[1]
            ),
            text="at most `rows * BN`",
        ),
        Limit(
            "little memory",
            "live_numel",
            at_most=lambda case: (
                12 * case.args[0].shape[0] * case.args[0].shape[2] if case.args[0].shape[1] > 20 else None
            ),
            text="no more than 12 times that alive at the same time",
        ),
        Limit("stale references", "exp_above_one", at_least=_stale, text="some exponentials are larger than 1"),
    ),
    mutants=(
        Mutant(
            "raises at any growth",
            "The reference follows every larger maximum: it may only move when the growth exceeds the threshold.",
            edit=("> threshold", "> 0"),
        ),
        Mutant(
            "raises at exactly the threshold",
            "The reference moved where the growth was exactly the threshold: it must exceed it.",
            edit=("> threshold", ">= threshold"),
        ),
        Mutant(
            "lazy in the count only",
            "right numbers, but the exponentials use the true maximum: nothing was saved.",
            caught_by="stale references",
            source="""
def lazy_attention(scores, values, threshold):
    rows, blocks, width = scores.shape
    reference = m = scores[:, 0].amax(1)
    total, out = torch.zeros(rows), torch.zeros(rows, values.shape[1])
    raised = torch.zeros(rows, dtype=torch.int64)
    for j in range(blocks):
        s = scores[:, j]
        top = s.amax(1)
        grew = top - reference > threshold
        raised += grew
        reference = torch.where(grew, top, reference)
        new = torch.maximum(m, top)
        p, alpha = torch.exp2(s - new[:, None]), torch.exp2(m - new)
        total = total * alpha + p.sum(1)
        out = out * alpha[:, None] + p @ values[j * width : (j + 1) * width]
        m = new
    return out / total[:, None], raised
""",
            expect="larger than 1",
            recognise=False,
        ),
        Mutant(
            "compares with the last block",
            "The growth is measured from the block before; it must be measured from the reference that is in use.",
            edit=(
                (
                    "grew = block_max - reference > threshold",
                    "grew = block_max - (reference if j == 0 else scores[:, j - 1].amax(dim=1)) > threshold",
                ),
            ),
        ),
        Mutant(
            "sum not rescaled",
            "When the reference rose, the sum was not multiplied by alpha.",
            edit=("total = total * alpha +", "total = total +"),
        ),
        Mutant(
            "output not rescaled",
            "When the reference rose, the output so far was not multiplied by alpha.",
            edit=("out = out * alpha[:, None] +", "out = out +"),
        ),
        Mutant(
            "counts the first block",
            "The first block sets the reference; that is no raise.",
            edit=("if j > 0:\n            raised", "if j >= 0:\n            raised"),
        ),
        Mutant(
            "all blocks at once",
            "right numbers, but the whole row is exponentiated at once.",
            caught_by="block by block",
            source="""
def lazy_attention(scores, values, threshold):
    rows, blocks, width = scores.shape
    top = scores.amax(dim=2)
    reference, raised = top[:, 0], torch.zeros(rows, dtype=torch.int64)
    for j in range(1, blocks):
        grew = top[:, j] - reference > threshold
        reference = torch.where(grew, top[:, j], reference)
        raised += grew
    p = torch.exp2(scores - scores.amax(dim=(1, 2), keepdim=True)).reshape(rows, -1)
    return p @ values / p.sum(1, keepdim=True), raised
""",
            expect="at most `rows * BN`",
            recognise=False,
        ),
    ),
    variants=(
        """
def lazy_attention(scores, values, threshold):
    rows, blocks, width = scores.shape
    parts = values.reshape(blocks, width, -1)
    top = scores[:, 0].max(1).values
    p = torch.exp2(scores[:, 0] - top.unsqueeze(1))
    total, out, raised = p.sum(1), p @ parts[0], torch.zeros(rows).long()
    for j in range(1, blocks):
        jump = (scores[:, j].max(1).values - top).clamp(min=0)
        jump = torch.where(jump > threshold, jump, torch.zeros_like(jump))
        raised = raised + (jump > 0).long()
        shrink = torch.exp2(-jump)
        top = top + jump
        p = torch.exp2(scores[:, j] - top.unsqueeze(1))
        total = torch.addcmul(p.sum(1), total, shrink)
        out = out * shrink.unsqueeze(1) + p.matmul(parts[j])
    return out / total.unsqueeze(1), raised
""",
        """
def lazy_attention(scores, values, threshold):
    outs, counts = [], []
    width = scores.shape[2]
    for row in scores:                         # a row at a time
        reference, total, out, count = None, 0.0, 0.0, 0
        for j, s in enumerate(row):
            top = s.max()
            if reference is None or top - reference > threshold:
                if reference is not None:
                    total, out, count = total * torch.exp2(reference - top), out * torch.exp2(reference - top), count + 1
                reference = top
            p = torch.exp2(s - reference)
            total, out = total + p.sum(), out + p @ values[j * width : (j + 1) * width]
        outs.append(out / total)
        counts.append(count)
    return torch.stack(outs), torch.tensor(counts)
""",
    ),
)

# -- kernels -----------------------------------------------------------------------------------------------------------


def _kernel_cases(rows, block, dim, counts, *others):
    """Return an exercise's cases: ``counts`` key blocks at its usual sizes, and ``others`` as (name, block, dim, count, launch)."""

    def cases(seed):
        g = _rng(seed)
        found = [Case(f"{n} key block{'s' * (n > 1)}", (*_qkv(g, rows, n * block, dim), block)) for n in counts]
        found.append(
            Case("scores up to 60: the maximum moves", (*_qkv(g, rows, counts[-1] * block, dim, lift=12.0), block))
        )
        for name, width, columns, n, launch in others:
            found.append(Case(name, (*_qkv(g, rows, n * width, columns), width), launch))
        return found

    return cases


def _out(q, k, v, block, **launch):
    return _attention(q, k, v, **launch)[0]


def _out_in_bf16(q, k, v, block, **launch):
    return _in_bf16(q, k, v, block, **launch)[0]


def _right(case, result):
    """Return a property's view of the values: as near to fp64 as a P rounded to bf16 allows."""
    want = _out(*case.args, **case.kwargs)
    allowed = max(TOL, SLACK * (_out_in_bf16(*case.args, **case.kwargs) - want).abs().max().item())
    for schedule, out in enumerate(result[0]):
        off = (out.double() - want).abs().max().item()
        if not off <= allowed:
            return f"schedule {schedule}: out differs from fp64 by up to {off:.3g}; rounding to bf16 explains {allowed:.2g}."
    return None


def _within(limit):
    """Apply the limit to the cases of several key blocks at the exercise's usual sizes; a single block overlaps with nothing."""

    def test(case, result):
        q, k, v, block = case.args
        cycles = int(result[1])
        limited = len(k) > block and not case.kwargs
        return f"{cycles:,} modelled cycles; the limit is {limit:,}." if limited and cycles > limit else None

    return test


# -- 12.2 --------------------------------------------------------------------------------------------------------------


def _crowded_launch(kernel, q, k, v, block, scale=None):
    import math

    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, dim = [], q.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(*q.shape)
        boxes = [TensorDescriptor.from_tensor(t, [128, dim]) for t in (q, k, v)]
        with emulator.options(policy=policy, seed=seed):
            kernel[(1,)](
                *boxes,
                out,
                math.log2(math.e) * (1 / math.sqrt(dim) if scale is None else scale),
                len(k) // block,
                D=dim,
                BM=128,
                BN=block,
            )
        results.append(out)
    return torch.stack(results)


CROWDED = Exercise(
    id="12.2",
    title="Six buffers into 512 columns",
    name="crowded_kernel",
    kind="kernel",
    hunt=True,
    call=_crowded_launch,
    cases=_kernel_cases(256, 128, 128, (1, 2), ("D = 64, another scale", 128, 64, 2, {"scale": 0.25})),
    reference=_four_times(_out),
    arithmetic=_four_times(_out_in_bf16),
    slack=SLACK,
    outputs=(Output("out", ("schedule", "row", "dim")),),
    difficulty=2,
    minutes=30,
    tol=TOL,
    kept=Kept(
        ("crowded_kernel", "crowded_softmax"),
        "the body stays as it is",
        free=("local_alloc", "storage_alias_spec", "set_buffer_overlap", "reuse_group"),
    ),
    limits=(
        Limit(
            "P in tensor memory",
            "shared_bytes",
            at_most=4 * 128 * 128 * 2 + 1024,
            text="all six buffers stay in tensor memory",
        ),
    ),
    time_limit=60.0,
    hints=(
        "A storage_alias_spec is a piece of tensor memory that several local_allocs share: pass it as reuse=.",
        "set_buffer_overlap says how they lie in it: a reuse_group of type shared puts its members at the same place. Give both allocs the same count of buffers.",
        "storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem); s and p_tiles with reuse=storage; storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared)).",
    ),
    mutants=(
        Mutant(
            "one after the other",
            "distinct members lie side by side: nothing is saved.",
            caught_by="runs",
            edit=(
                "tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared)",
                "tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.distinct)",
            ),
            expect="704 columns",
            recognise=False,
        ),
        Mutant(
            "P in shared memory",
            "right numbers, but P moved to shared memory, where K and V need the space.",
            caught_by="P in tensor memory",
            edit=(
                ("tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)", "tl.bfloat16, 2)"),
                (
                    "    storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))\n",
                    "",
                ),
            ),
            expect="shared memory",
            recognise=False,
        ),
        Mutant(
            "one half after the other",
            "right numbers, but the body was rewritten for one S and one P.",
            caught_by="given code kept",
            edit=(
                (
                    "s[1], use_acc=False, mBarriers=[done[0]])\n        tlx.barrier_wait(done[0], 0)\n        m_0,",
                    "s[1], use_acc=False, mBarriers=[done[0]])\n        tlx.barrier_wait(done[0], 0)\n        m_1, l_1 = m_1, l_1\n        m_0,",
                ),
            ),
            expect="stays as it is",
            recognise=False,
        ),
        Mutant(
            "only one P",
            "both halves would share one P.",
            caught_by="runs",
            edit=(
                "p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2,",
                "p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 1,",
            ),
            expect="p_tiles",
            recognise=False,
        ),
        Mutant(
            "accumulators inside S",
            "an accumulator is live for the whole tile: it can share its columns with no other buffer.",
            caught_by="returns",
            edit=(
                (
                    "    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)\n    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)\n",
                    "    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)\n    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)\n",
                ),
                ("tlx.reuse_group(s, p_tiles, group", "tlx.reuse_group(s, accs, p_tiles, group"),
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "one accumulator for both halves",
            "Half 1 is computed into half 0's accumulator.",
            caught_by="runs",
            edit=(
                "tlx.async_dot(p_tiles[1], kv[1], accs[1], use_acc=j > 0",
                "tlx.async_dot(p_tiles[1], kv[1], accs[0], use_acc=j > 0",
            ),
            expect="accs",
            recognise=False,
        ),
        Mutant(
            "accumulators of 128 columns",
            "O has D columns, whatever D is.",
            caught_by="runs",
            edit=("accs = tlx.local_alloc((BM, D), tl.float32, 2,", "accs = tlx.local_alloc((BM, 128), tl.float32, 2,"),
            expect="128",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)\n    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)",
                "    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)",
            ),
            (
                "tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)",
                "tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=s)",
            ),
            (
                "    storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))\n",
                "",
            ),
        ),
        (
            (
                "    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)\n",
                "    columns = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)\n",
            ),
            (
                "s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)",
                "s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=columns)",
            ),
            (
                "tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)",
                "tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=columns)",
            ),
            (
                "storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))",
                "columns.set_buffer_overlap(tlx.reuse_group(p_tiles, s, group_type=tlx.reuse_group_type.shared))",
            ),
        ),
    ),
)

# -- 12.3 --------------------------------------------------------------------------------------------------------------


def _all_buffers(halves, given):
    """Require that K and V go through all BUFFERS places; Q has one for each half. ``given``: BUFFERS unless a case has its own."""

    def places(case):
        return halves + min(case.kwargs.get("buffers", given), 2 * len(case.args[1]) // case.args[3])

    text = "the ring of K and V has `BUFFERS` buffers and uses them all"
    return Limit("all the buffers", "loaded_places", at_most=places, at_least=places, text=text)


def _early_launch(kernel, q, k, v, block, scale=None, buffers=4):
    import math

    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator
    from jfa.emulator.rates import B200

    results, dim = [], q.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("timed", 0)):
        out = unwritten(*q.shape)
        boxes = [
            TensorDescriptor.from_tensor(q, [128, dim]),
            *(TensorDescriptor.from_tensor(t, [block, dim]) for t in (k, v)),
        ]
        with emulator.options(policy=policy, seed=seed, rates=B200):
            kernel[(1,)](
                *boxes,
                out,
                math.log2(math.e) * (1 / math.sqrt(dim) if scale is None else scale),
                len(k) // block,
                D=dim,
                BM=128,
                BN=block,
                BUFFERS=buffers,
            )
        results.append(out)
    return torch.stack(results), int(emulator.last().time)


EARLY = Exercise(
    id="12.3",
    title="Bug hunt: scores that come too early",
    name="early_kernel",
    kind="kernel",
    hunt=True,
    call=_early_launch,
    cases=_kernel_cases(
        128,
        64,
        64,
        (1, 6, 3),
        ("D = 128, BN = 32, three buffers, another scale", 32, 128, 5, {"scale": 0.2, "buffers": 3}),
        ("BN = 128, two buffers", 128, 64, 4, {"buffers": 2}),
    ),
    outputs=(Output("out", ("schedule", "row", "dim")), Output("cycles")),
    difficulty=2,
    minutes=40,
    time_limit=60.0,
    hints=(
        "The softmax may still read S while the tensor core writes the next S into it. One role must arrive when S has been read, and another must wait for that.",
        "A barrier for that exists and is not used yet: s_empty. The scores are in registers right after local_load.",
        "softmax: tlx.barrier_arrive(s_empty[0], 1) right after the local_load; mma: tlx.barrier_wait(s_empty[0], (j & 1) ^ 1) before the S product.",
    ),
    properties=(Property("right numbers", _right), Property("overlap", _within(13_500))),
    limits=(_all_buffers(1, 4),),
    mutants=(
        Mutant(
            "a ring of four buffers for good",
            "the ring has as many buffers as the launch asks for.",
            caught_by="all the buffers",
            edit=(
                (
                    "kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)",
                    "kv = tlx.local_alloc((BN, D), tl.bfloat16, 4)",
                ),
                ("kv_fulls = tlx.alloc_barriers(BUFFERS)", "kv_fulls = tlx.alloc_barriers(4)"),
                ("kv_empties = tlx.alloc_barriers(BUFFERS)", "kv_empties = tlx.alloc_barriers(4)"),
                ("ring(2 * j, BUFFERS)", "ring(2 * j, 4)"),
                ("ring(2 * j - 1, BUFFERS)", "ring(2 * j - 1, 4)"),
                ("1, D, BM, BN, BUFFERS,", "1, D, BM, BN, 4,"),
            ),
            expect="places",
            recognise=False,
        ),
        Mutant(
            "waits but no role arrives",
            "the tensor core waits forever.",
            caught_by="runs",
            edit=("                tlx.barrier_arrive(s_empty[0], 1)\n", ""),
            expect="s_empty",
            recognise=False,
        ),
        Mutant(
            "arrives but no role waits",
            "the arrivals accumulate, and no product waits for them.",
            caught_by="runs",
            edit=("                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n", ""),
            expect="s_full[0] can come two phases late",
            recognise=False,
        ),
        Mutant(
            "waits for the wrong parity",
            "before the first S no role has arrived.",
            caught_by="runs",
            edit=("tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)", "tlx.barrier_wait(s_empty[0], j & 1)"),
            expect="s_empty",
            recognise=False,
        ),
        Mutant(
            "gives S back before it has read it",
            "the arrival comes before the load: the next S may overwrite what is being read.",
            caught_by="runs",
            edit=(
                "                scores = tlx.local_load(s[0]) * scale_log2\n                tlx.barrier_arrive(s_empty[0], 1)\n",
                "                tlx.barrier_arrive(s_empty[0], 1)\n                scores = tlx.local_load(s[0]) * scale_log2\n",
            ),
            expect="s[0]",
            recognise=False,
        ),
        Mutant(
            "gives S back after P",
            "right numbers, but S is held until P is written: the tensor core idles meanwhile.",
            caught_by="overlap",
            edit=(
                ("                tlx.barrier_arrive(s_empty[0], 1)\n", ""),
                (
                    "                tlx.barrier_arrive(p_full[0], 1)\n",
                    "                tlx.barrier_arrive(p_full[0], 1)\n                tlx.barrier_arrive(s_empty[0], 1)\n",
                ),
            ),
            expect="the limit is 13,500",
            recognise=False,
        ),
        Mutant(
            "never rescales",
            "the accumulator keeps the old maximum's scale.",
            caught_by="right numbers",
            edit=(
                "tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])",
                "tlx.local_store(acc[0], tlx.local_load(acc[0]))",
            ),
            expect="fp64",
            recognise=False,
        ),
        Mutant(
            "four buffers for good",
            "with other BUFFERS the tensor core looks for K and V in buffers where they are not.",
            caught_by="runs",
            edit=(
                ("slot, phase = ring(2 * j, BUFFERS)", "slot, phase = ring(2 * j, 4)"),
                ("slot, phase = ring(2 * j - 1, BUFFERS)", "slot, phase = ring(2 * j - 1, 4)"),
            ),
            expect="kv_fulls",
            recognise=False,
        ),
        Mutant(
            "64 columns for good",
            "O has D columns, whatever D is.",
            caught_by="runs",
            edit=("tlx.local_load(acc[0]) / l[:, None], D, BM)", "tlx.local_load(acc[0]) / l[:, None], 64, BM)"),
            expect="64",
            recognise=False,
        ),
        Mutant(
            "the scale of D = 64 for good",
            "scores are multiplied by scale_log2, whatever it is.",
            caught_by="right numbers",
            edit=("tlx.local_load(s[0]) * scale_log2", "tlx.local_load(s[0]) * 0.18033688011112042"),
            expect="fp64",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "                tlx.barrier_arrive(s_empty[0], 1)\n                m_new",
                "                top = tl.max(scores, axis=1)\n                tlx.barrier_arrive(tlx.local_view(s_empty, 0))\n                m_new",
            ),
            ("tl.maximum(m, tl.max(scores, axis=1))", "tl.maximum(m, top)"),
            (
                "                if j < blocks:\n                    slot, phase = ring(2 * j, BUFFERS)\n                    tlx.barrier_wait(kv_fulls[slot], phase)\n                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n",
                "                if j < blocks:\n                    slot, phase = ring(2 * j, BUFFERS)\n                    if j > 0:\n                        tlx.barrier_wait(s_empty[0], (j - 1) & 1)\n                    tlx.barrier_wait(kv_fulls[slot], phase)\n",
            ),
        ),
        (  # two buffers for S: the one that is overwritten has long been read, as P of that block shows
            (
                "s = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)",
                "s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)",
            ),
            ("s_full = tlx.alloc_barriers(1)", "s_full = tlx.alloc_barriers(2)"),
            (
                "tlx.barrier_wait(s_full[0], j & 1)\n                scores = tlx.local_load(s[0])",
                "tlx.barrier_wait(s_full[j % 2], (j // 2) & 1)\n                scores = tlx.local_load(s[j % 2])",
            ),
            ("                tlx.barrier_arrive(s_empty[0], 1)\n", ""),
            ("                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n", ""),
            (
                "s[0], use_acc=False, mBarriers=[s_full[0], k_read])",
                "s[j % 2], use_acc=False, mBarriers=[s_full[j % 2], k_read])",
            ),
        ),
    ),
)

# -- 12.4 --------------------------------------------------------------------------------------------------------------


def _corrected_launch(kernel, q, k, v, block, scale=None, buffers=3):
    import math

    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    outs, lses, dim = [], [], q.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out, lse = unwritten(*q.shape), unwritten(len(q))
        boxes = [
            TensorDescriptor.from_tensor(q, [128, dim]),
            *(TensorDescriptor.from_tensor(t, [block, dim]) for t in (k, v)),
        ]
        with emulator.options(policy=policy, seed=seed):
            kernel[(1,)](
                *boxes,
                out,
                lse,
                math.log2(math.e) * (1 / math.sqrt(dim) if scale is None else scale),
                len(k) // block,
                D=dim,
                BM=128,
                BN=block,
                BUFFERS=buffers,
            )
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _out_and_lse(q, k, v, block, **launch):
    return _attention(q, k, v, **launch)


def _stores(case):
    """Return the stores to tensor memory of all launches if no row ever asks for a rescale: P and alpha of each block, sums, maxima."""
    q, k, _, block = case.args
    scores = q.float() @ k.float().T * math.log2(math.e) * _scale(q, case.kwargs.get("scale"))
    tops = scores.reshape(len(q), -1, block).amax(2)
    if bool((tops[:, 1:] - tops[:, :1] > 7.9).any()):
        return None
    return SCHEDULES * 2 * (2 * (len(k) // block) - 1 + 2)


CORRECTED = Exercise(
    id="12.4",
    title="A role to write: the correction",
    name="corrected_kernel",
    kind="kernel",
    call=_corrected_launch,
    cases=_kernel_cases(
        256,
        64,
        64,
        (1, 3, 2, 4, 5),
        ("D = 128, BN = 128, another scale", 128, 128, 2, {"scale": 0.2, "buffers": 2}),
    ),
    reference=_four_times(_out_and_lse),
    arithmetic=_four_times(_in_bf16),
    slack=SLACK,
    tol=TOL,
    kept=Kept(("corrected_kernel", "publish"), "the kernel and its softmax role stay as they are"),
    limits=(
        Limit(
            "left alone at a factor of 1",
            "tmem_stores",
            at_most=_stores,
            text="multiplies the accumulator by alpha if any row needs it",
        ),
    ),
    outputs=(Output("out", ("schedule", "row", "dim")), Output("lse", ("schedule", "row"), tol=1e-5)),
    difficulty=3,
    minutes=35,
    time_limit=90.0,
    hints=(
        "Three parts: let the first products through, a loop over the blocks 1 .. blocks - 1 with both halves inside, and the end. alpha of block j is phase j - 1 of alpha_fulls.",
        "Before you touch the accumulator the product of block j - 1 must be done: acc_fulls[half], parity (j - 1) & 1. One answer for all rows: tl.min(tl.reshape(alpha, [BM]), 0) < 1.0.",
        "End: wait sum_fulls[half] (parity 0), load sums and maxima, lse = (top + tl.math.log2(total)) * 0.6931471805599453, wait acc_fulls[half] at (blocks - 1) & 1, store_rows(out_ptr, half * BM, tlx.local_load(accs[half]) / total, D, BM).",
    ),
    mutants=(
        Mutant(
            "never lets the first product through",
            "the tensor core waits for acc_readys.",
            caught_by="runs",
            edit=(
                "    for half in tl.static_range(2):\n        tlx.barrier_arrive(acc_readys[half])\n    for j in range(1, blocks):",
                "    for j in range(1, blocks):",
            ),
            expect="acc_readys",
            recognise=False,
        ),
        Mutant(
            "lets products through before rescaling",
            "the next product adds to an accumulator that is being rescaled.",
            caught_by="runs",
            edit=(
                (
                    "                tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)\n            tlx.barrier_arrive(acc_readys[half])\n",
                    "                tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)\n",
                ),
                (
                    "            alpha = tlx.local_load(alphas[half])\n",
                    "            alpha = tlx.local_load(alphas[half])\n            tlx.barrier_arrive(acc_readys[half])\n",
                ),
            ),
            expect="accs",
            recognise=False,
        ),
        Mutant(
            "never rescales",
            "The accumulator is never multiplied by alpha: rows whose maximum grew are wrong.",
            edit=("if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:", "if tl.min(tl.reshape(alpha, [BM]), 0) < -1.0:"),
        ),
        Mutant(
            "rescales always",
            "right numbers, but the accumulator goes through the registers for every block, also where every factor is 1.",
            caught_by="left alone at a factor of 1",
            edit=(
                "            if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:\n                tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)\n",
                "            tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)\n",
            ),
            expect="if any row needs",
            recognise=False,
        ),
        Mutant(
            "waits for parity 0 of the last product",
            "with an even number of blocks the last product's phase has parity 1.",
            caught_by="runs",
            edit=(
                "        tlx.barrier_wait(acc_fulls[half], (blocks - 1) & 1)\n        store_rows",
                "        tlx.barrier_wait(acc_fulls[half], 0)\n        store_rows",
            ),
            expect="acc",
            recognise=False,
        ),
        Mutant(
            "one half after the other",
            "the tensor core alternates between the halves, and half 1 is not let through while half 0 is not done.",
            caught_by="runs",
            edit=(
                "    for j in range(1, blocks):\n        for half in tl.static_range(2):\n",
                "    for half in tl.static_range(2):\n        for j in range(1, blocks):\n",
            ),
            expect="acc_readys",
            recognise=False,
        ),
        Mutant(
            "1 percent off",
            "The output is 1 percent too small: divide by the row sums alone.",
            edit=("tlx.local_load(accs[half]) / total, D, BM)", "tlx.local_load(accs[half]) / (total * 1.01), D, BM)"),
        ),
        Mutant(
            "lse in base 2",
            "lse is left in log2 units: multiply by ln 2.",
            edit=("(top + tl.math.log2(total)) * 0.6931471805599453", "(top + tl.math.log2(total))"),
        ),
        Mutant(
            "forgets to divide",
            "The output is not divided by the row sums.",
            edit=("tlx.local_load(accs[half]) / total, D, BM)", "tlx.local_load(accs[half]), D, BM)"),
        ),
        Mutant(
            "reads the accumulator too early",
            "the last product may still be running.",
            caught_by="runs",
            edit=(
                "        tlx.barrier_wait(acc_fulls[half], (blocks - 1) & 1)\n        store_rows",
                "        store_rows",
            ),
            expect="accs",
            recognise=False,
        ),
        Mutant(
            "64 columns for good",
            "O has D columns, whatever D is.",
            caught_by="runs",
            edit=("tlx.local_load(accs[half]) / total, D, BM)", "tlx.local_load(accs[half]) / total, 64, BM)"),
            expect="64",
            recognise=False,
        ),
    ),
    variants=(
        (  # S of block j is done, so the product before it is: the tensor core works in order, and no wait is needed in the loop
            ("            tlx.barrier_wait(acc_fulls[half], (j - 1) & 1)\n", ""),
            (
                "                tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)\n",
                "                for part in tl.static_range(2):\n                    columns = tlx.subslice(accs[half], part * (D // 2), D // 2)\n                    tlx.local_store(columns, tlx.local_load(columns) * alpha)\n",
            ),
        ),
        (
            (
                "            if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:\n",
                "            if tl.sum((tl.reshape(alpha, [BM]) != 1.0).to(tl.int32), 0) > 0:\n",
            ),
            (
                "lse = (top + tl.math.log2(total)) * 0.6931471805599453",
                "lse = top * 0.6931471805599453 + tl.log(total)",
            ),
        ),
    ),
)

# -- 12.5 --------------------------------------------------------------------------------------------------------------


def _ping_launch(kernel, q, k, v, block, scale=None, buffers=3):
    import math

    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator
    from jfa.emulator.rates import B200

    results, dim = [], q.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("timed", 0)):
        out = unwritten(*q.shape)
        boxes = [
            TensorDescriptor.from_tensor(q, [128, dim]),
            *(TensorDescriptor.from_tensor(t, [block, dim]) for t in (k, v)),
        ]
        with emulator.options(policy=policy, seed=seed, rates=B200):
            kernel[(1,)](
                *boxes,
                out,
                math.log2(math.e) * (1 / math.sqrt(dim) if scale is None else scale),
                len(k) // block,
                D=dim,
                BM=128,
                BN=block,
                BUFFERS=buffers,
            )
        results.append(out)
    return torch.stack(results), int(emulator.last().time)


_HALF_0 = """        with tlx.async_task("default"):  # softmax of half 0
            m = tl.full((BM,), float("-inf"), tl.float32)
            l = tl.zeros((BM,), tl.float32)
            for j in range(blocks):
                m, l = half_step(
                    s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
                    0, j, m, l, scale_log2,
                )  # fmt: skip
            half_end(accs, acc_fulls, out_ptr, 0, blocks, l, D, BM)
"""
_HALF_1 = _HALF_0.replace('"default"', "num_warps=4").replace("half 0", "half 1").replace("0, j, m, l", "1, j, m, l")
_HALF_1 = _HALF_1.replace("out_ptr, 0, blocks", "out_ptr, 1, blocks")
_BOTH = """        with tlx.async_task("default"):
            m = tl.full((BM,), float("-inf"), tl.float32)
            l = tl.zeros((BM,), tl.float32)
            m_1, l_1 = m, l
            for j in range(blocks):
                m, l = half_step(
                    s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
                    0, j, m, l, scale_log2,
                )  # fmt: skip
                m_1, l_1 = half_step(
                    s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
                    1, j, m_1, l_1, scale_log2,
                )  # fmt: skip
            half_end(accs, acc_fulls, out_ptr, 0, blocks, l, D, BM)
            half_end(accs, acc_fulls, out_ptr, 1, blocks, l_1, D, BM)
"""

PING_PONG = Exercise(
    id="12.5",
    title="Ping-pong",
    name="ping_pong_kernel",
    kind="kernel",
    hunt=True,
    call=_ping_launch,
    cases=_kernel_cases(
        256,
        128,
        128,
        (1, 4),
        ("D = BN = 64, five buffers, another scale", 64, 64, 3, {"scale": 0.25, "buffers": 5}),
        ("two buffers", 128, 128, 3, {"buffers": 2}),
    ),
    outputs=(Output("out", ("schedule", "row", "dim")), Output("cycles")),
    difficulty=3,
    minutes=55,
    time_limit=90.0,
    hints=(
        "The tensor core already alternates between the halves. It is the softmax that does them one after the other.",
        "Two async tasks, each with its own m and l: one is the default task, the other one has num_warps=4. Each loops over all blocks of its half.",
        "In a task of its own: for j in range(blocks): m, l = half_step(..., half, j, m, l, scale_log2); then half_end(accs, acc_fulls, out_ptr, half, blocks, l, D, BM).",
    ),
    properties=(Property("right numbers", _right), Property("overlap", _within(25_000))),
    limits=(
        Limit("a task for each half", "tasks", at_least=4, text="Give each half a task of its own"),
        _all_buffers(2, 3),
    ),
    mutants=(
        Mutant(
            "a ring of three buffers for good",
            "the ring has as many buffers as the launch asks for.",
            caught_by="all the buffers",
            edit=(
                (
                    "kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)",
                    "kv = tlx.local_alloc((BN, D), tl.bfloat16, 3)",
                ),
                ("kv_fulls = tlx.alloc_barriers(BUFFERS)", "kv_fulls = tlx.alloc_barriers(3)"),
                ("kv_empties = tlx.alloc_barriers(BUFFERS)", "kv_empties = tlx.alloc_barriers(3)"),
                ("acc_readys, acc_fulls, blocks, BUFFERS,", "acc_readys, acc_fulls, blocks, 3,"),
                ("2, D, BM, BN, BUFFERS,", "2, D, BM, BN, 3,"),
            ),
            expect="places",
            recognise=False,
        ),
        Mutant(
            "still one task",
            "the given kernel in another form.",
            caught_by="overlap",
            edit=((_HALF_0, _BOTH), (_HALF_1, "")),
            expect="the limit is 25,000",
            recognise=False,
        ),
        Mutant(
            "half 1 is 1 percent off",
            "the second half's rows are 1 percent too small.",
            caught_by="right numbers",
            edit=(
                "half_end(accs, acc_fulls, out_ptr, 1, blocks, l, D, BM)",
                "half_end(accs, acc_fulls, out_ptr, 1, blocks, l * 1.01, D, BM)",
            ),
            expect="fp64",
            recognise=False,
        ),
        Mutant(
            "both tasks do half 0",
            "both tasks use the buffers of half 0.",
            caught_by="runs",
            edit=("1, j, m, l, scale_log2,\n", "0, j, m, l, scale_log2,\n"),
            expect="s[0]",
            recognise=False,
        ),
        Mutant(
            "half 1 is not stored",
            "the second half's rows stay as they were.",
            caught_by="right numbers",
            edit=(
                "            half_end(accs, acc_fulls, out_ptr, 1, blocks, l, D, BM)\n",
                "            tlx.barrier_wait(acc_fulls[1], (blocks - 1) & 1)\n",
            ),
            expect="fp64",
            recognise=False,
        ),
        Mutant(
            "half 1 ends a block too soon",
            "the second task leaves its last block out: no role publishes that P.",
            caught_by="runs",
            edit=(_HALF_1, _HALF_1.replace("in range(blocks):", "in range(blocks - 1):")),
            expect="p_fulls[1]",
            recognise=False,
        ),
        Mutant(
            "too few warps",
            "tensor memory belongs to groups of four warps: one warp reaches a quarter of its lanes.",
            caught_by="runs",
            edit=(
                "with tlx.async_task(num_warps=4):  # softmax of half 1",
                "with tlx.async_task(num_warps=1):  # softmax of half 1",
            ),
            expect="it takes four",
            recognise=False,
        ),
        Mutant(
            "three buffers for good",
            "with other BUFFERS the roles look for K and V in buffers where they are not.",
            caught_by="runs",
            edit=("acc_readys, acc_fulls, blocks, BUFFERS,\n", "acc_readys, acc_fulls, blocks, 3,\n"),
            expect="kv",
            recognise=False,
        ),
        Mutant(
            "128 columns for good",
            "O has D columns, whatever D is.",
            caught_by="runs",
            edit=("out_ptr, 1, blocks, l, D, BM)", "out_ptr, 1, blocks, l, 128, BM)"),
            expect="128",
            recognise=False,
        ),
        Mutant(
            "the scale of D = 128 for good",
            "scores are multiplied by scale_log2, whatever it is.",
            caught_by="right numbers",
            edit=("1, j, m, l, scale_log2,\n", "1, j, m, l, 0.12751743082459868,\n"),
            expect="fp64",
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                'with tlx.async_task("default"):  # softmax of half 0',
                'with tlx.async_task("default"):  # softmax of half 1',
            ),
            (
                "with tlx.async_task(num_warps=4):  # softmax of half 1",
                "with tlx.async_task(num_warps=4, registers=128):  # softmax of half 0",
            ),
            ("0, j, m, l, scale_log2,\n", "1 - 0, j, m, l, scale_log2,\n"),
            ("out_ptr, 0, blocks, l, D, BM)\n        with", "out_ptr, 1 - 0, blocks, l, D, BM)\n        with"),
            ("1, j, m, l, scale_log2,\n", "0, j, m, l, scale_log2,\n"),
            (
                "half_end(accs, acc_fulls, out_ptr, 1, blocks, l, D, BM)",
                "half_end(accs, acc_fulls, out_ptr, 0, blocks, l, D, BM)",
            ),
            (
                "        with tlx.async_task(num_warps=1):  # mma",
                "        with tlx.async_task(num_warps=1, registers=48):  # mma",
            ),
            (
                "        with tlx.async_task(num_warps=1):  # load",
                "        with tlx.async_task(num_warps=1, registers=48):  # load",
            ),
        ),
        (
            (_HALF_0, '        with tlx.async_task("default"):  # nothing to do\n            pass\n'),
            (
                "with tlx.async_task(num_warps=4):  # softmax of half 1",
                "with tlx.async_task(num_warps=4, replicate=2):  # softmax\n            half = tlx.async_task_replica_id()",
            ),
            ("1, j, m, l, scale_log2,\n", "half, j, m, l, scale_log2,\n"),
            (
                "half_end(accs, acc_fulls, out_ptr, 1, blocks, l, D, BM)",
                "half_end(accs, acc_fulls, out_ptr, half, blocks, l, D, BM)",
            ),
        ),
    ),
)

# -- 12.6 --------------------------------------------------------------------------------------------------------------


def _peel_cases(seed):
    shift = 2 * (seed % 5)
    wide = 1 << 30
    return [
        Case("no mask, keys a multiple of the block", (0, 15, 64, -wide, wide, 16)),
        Case("no mask, a tail of keys", (16, 31, 70 + shift, -wide, wide, 16)),
        Case("causal, the tile on the diagonal", (32, 47, 64 + shift, -wide, 0, 16)),
        Case("causal, the tile reaches one key into a block", (1, 16, 64 + shift, -wide, 0, 16)),
        Case("causal, more keys than queries", (16, 31, 100 + shift, -wide, 52, 16)),
        Case("a window on both sides", (64, 95, 200 + shift, -40, 40, 16)),
        Case("a window smaller than a block", (64, 95, 200 + shift, -3, 3, 32)),
        Case("a window that ends before the keys do not begin", (0, 15, 40 + shift, -90, -60, 16)),
        Case("a window past the last key", (300, 331, 100 + shift, -20, 20, 16)),
        *(  # every bound once in front of a block's edge, on it and behind it
            Case(f"a window moved by {by} keys", (64, 79, 200 + shift, by - 48, by + 31, 16)) for by in (-1, 0, 1, 2)
        ),
    ]


def _visible(case):
    """Return [blocks, 2]: whether any pair of the block is visible, and whether all are."""
    first, last, len_kv, lo, hi, block = case.args
    i = torch.arange(first, last + 1)[:, None]
    blocks = -(-len_kv // block)
    found = []
    for b in range(blocks):
        j = torch.arange(b * block, (b + 1) * block)[None, :]
        seen = (j >= i + lo) & (j <= i + hi) & (j < len_kv)
        found.append((bool(seen.any()), bool(seen.all())))
    return found


def _four_numbers(case, result):
    if not (isinstance(result, tuple) and len(result) == 4 and all(isinstance(x, int) for x in result)):
        return "Return four whole numbers."
    return None


def _covers(case, result):
    begin, _, _, end = result
    some = [b for b, (any_, _) in enumerate(_visible(case)) if any_]
    if not some:
        return None if (begin, end) == (0, 0) else "Nothing is visible here, and yet there are blocks."
    if begin > some[0] or end < some[-1] + 1:
        return "A block with a visible pair is left out."
    if begin < some[0] or end > some[-1] + 1:
        return "A block without a visible pair is visited."
    return None


def _bulk(case, result):
    begin, bulk_begin, bulk_end, end = result
    if not begin <= bulk_begin <= bulk_end <= end:
        return "The bulk must lie inside begin .. end, and must not end before it begins."
    full = [b for b, (_, all_) in enumerate(_visible(case)) if all_]
    if any(b not in full for b in range(bulk_begin, bulk_end)):
        return "A block in the bulk has a pair that must be masked."
    if bulk_end - bulk_begin < len(full):
        return "A block that needs no mask is treated as an edge."
    return None


PEEL = Exercise(
    id="12.6",
    title="Peel the loop",
    name="peel",
    cases=_peel_cases,
    outputs=(Output("begin"), Output("bulk_begin"), Output("bulk_end"), Output("end")),
    difficulty=2,
    minutes=25,
    forbid=("jfa.masks", "jfa.schedule"),
    hints=(
        "Which keys does *some* query of the tile see? From the first query's lower bound to the last query's upper bound. Which keys does *every* query see? The other two.",
        "some: [first + lo, last + hi]; every: [last + lo, first + hi]. Cut both to 0 .. len_kv - 1, round the first outwards to blocks and the second inwards.",
        "begin = key_begin // block, end = ceil(key_end / block); bulk_begin = ceil(full_begin / block), bulk_end = full_end // block, both kept inside begin .. end and bulk_end >= bulk_begin.",
    ),
    properties=(
        Property("four numbers", _four_numbers),
        Property("visits what is visible", _covers),
        Property("bulk needs no mask", _bulk),
    ),
    mutants=(
        Mutant(
            "bulk rounded outwards",
            "edge blocks count as bulk.",
            caught_by="bulk needs no mask",
            edit=("full_end // block, bulk_begin)", "-(-full_end // block), bulk_begin)"),
            expect="masked",
        ),
        Mutant(
            "bulk of the wrong query",
            "the last query's upper bound says nothing of the first query.",
            caught_by="bulk needs no mask",
            edit=("full_end = min(len_kv, first + hi + 1)", "full_end = min(len_kv, last + hi + 1)"),
            expect="masked",
        ),
        Mutant(
            "the bulk's hi is exclusive",
            "a block whose last key is the first query's last one needs no mask.",
            caught_by="bulk needs no mask",
            edit=("full_end = min(len_kv, first + hi + 1)", "full_end = min(len_kv, first + hi)"),
            expect="treated as an edge",
        ),
        Mutant(
            "forgets the tail",
            "the last, partly filled block is left out.",
            caught_by="visits what is visible",
            edit=("-(-key_end // block)", "key_end // block"),
            expect="left out",
        ),
        Mutant(
            "window ignored on the left",
            "all blocks from 0 on are visited.",
            caught_by="visits what is visible",
            edit=("key_begin = max(0, first + lo)", "key_begin = max(0, min(0, first + lo))"),
            expect="visited",
        ),
        Mutant(
            "empty tiles have blocks",
            "a tile that sees nothing still gets a block.",
            caught_by="visits what is visible",
            edit=("        return 0, 0, 0, 0", "        return 0, 0, 0, 1"),
            expect="Nothing is visible",
        ),
        Mutant(
            "hi is exclusive",
            "key i + hi itself is visible.",
            caught_by="visits what is visible",
            edit=("min(len_kv, last + hi + 1)\n    if", "min(len_kv, last + hi)\n    if"),
            expect="left out",
        ),
    ),
    variants=(
        """
def peel(first, last, len_kv, lo, hi, block):
    blocks = range(-(-len_kv // block))
    some, every = [], []
    for b in blocks:
        j0, j1 = b * block, min((b + 1) * block, len_kv) - 1
        if j1 >= first + lo and j0 <= last + hi and any(max(j0, i + lo) <= min(j1, i + hi) for i in range(first, last + 1)):
            some.append(b)
        if (b + 1) * block <= len_kv and j0 >= last + lo and j1 <= first + hi:
            every.append(b)
    if not some:
        return 0, 0, 0, 0
    if not every:
        return some[0], some[0], some[0], some[-1] + 1
    return some[0], every[0], every[-1] + 1, some[-1] + 1
""",
        """
def peel(first, last, len_kv, lo, hi, block):
    def clip(x):
        return min(max(x, 0), len_kv)
    a, b = clip(first + lo), clip(last + hi + 1)
    if a >= b:
        return (0,) * 4
    begin, end = a // block, (b + block - 1) // block
    x, y = (clip(last + lo) + block - 1) // block, clip(first + hi + 1) // block
    if x >= y:
        x = y = begin
    return begin, x, y, end
""",
    ),
)

# -- 12.7 --------------------------------------------------------------------------------------------------------------


def _near(exact, rounded, slack=4.0):
    """Return a property's test: under each schedule as near to fp64 as a P rounded to bf16 allows, under a stale maximum too."""

    def test(case, result):
        want = exact(*case.args, **case.kwargs)
        allowed = max(TOL, slack * (rounded(*case.args, **case.kwargs) - want).abs().max().item())
        for schedule, out in enumerate(result[0]):
            off = (out.double() - want).abs().max().item()
            if not off <= allowed:
                return f"schedule {schedule}: out differs from fp64 by up to {off:.3g}; rounding to bf16 explains {allowed:.2g}."
        return None

    return test


def _within_its_limit(case, result):
    """Apply the case's own limit of modelled cycles, where it has one."""
    cycles = int(result[1])
    if case.extra and cycles > case.extra:
        return f"{cycles:,} modelled cycles; the limit is {case.extra:,}."
    return None


def _sliced_cases(seed):
    g = _rng(seed)
    falling = tuple(x.to(torch.bfloat16) for x in kinds.query_and_key("falling", 128, 256, 64, 128, g))
    return [
        Case("1 key block", (*_qkv(g, 128, 128, 128), 128)),
        Case("6 key blocks", (*_qkv(g, 128, 768, 128), 128), extra=21_500),
        Case("3 key blocks, scores up to 60: the maximum moves", (*_qkv(g, 128, 384, 128, lift=12.0), 128)),
        Case("2 key blocks, D = 64", (*_qkv(g, 128, 256, 64), 128)),
        Case("2 key blocks, D = 64, scores fall along the keys", (*falling, _qkv(g, 1, 256, 64)[1], 128)),
    ]


def _sliced_launch(kernel, q, k, v, block):
    import math

    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator
    from jfa.emulator.rates import B200

    results, dim = [], q.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("timed", 0)):
        out = unwritten(*q.shape)
        boxes = [TensorDescriptor.from_tensor(t, [128, dim]) for t in (q, k, v)]
        with emulator.options(policy=policy, seed=seed, rates=B200):
            kernel[(1,)](
                *boxes, out, math.log2(math.e) / math.sqrt(dim), len(k) // block, D=dim, BM=128, BN=block, BUFFERS=4
            )
        results.append(out)
    return torch.stack(results), int(emulator.last().time)


_PUT_LEFT = """    p_left = tl.math.exp2(left)
    tlx.local_store(tlx.subslice(p_tile, 0, 64), p_left.to(tl.bfloat16))
    tlx.barrier_arrive(p_fulls[0])
"""
_PUT_MIDDLE = """    p_middle = tl.math.exp2(middle)
    tlx.local_store(tlx.subslice(p_tile, 64, 32), p_middle.to(tl.bfloat16))
    tlx.barrier_arrive(p_fulls[1])
"""
_PUT_LAST = """    p_last = tl.math.exp2(last)
    tlx.local_store(tlx.subslice(p_tile, 96, 32), p_last.to(tl.bfloat16))
    tlx.barrier_arrive(p_fulls[2])
"""
_SUMS = "    return tl.sum(p_left, axis=1) + tl.sum(p_middle, axis=1) + tl.sum(p_last, axis=1)\n"
_PUBLISH = f"""    left, right = halves(exponents)
    middle, last = halves(right)
{_PUT_LEFT}{_PUT_MIDDLE}{_PUT_LAST}{_SUMS}"""
_MULTIPLY = """    tlx.barrier_wait(p_fulls[0], j & 1)
    p, rows = tlx.subslice(p_tile, 0, 64), tlx.local_slice(v, [0, 0], [64, D])
    tlx.async_dot(p, rows, acc, use_acc=j > 0, force_async=True)
    tlx.barrier_wait(p_fulls[1], j & 1)
    p, rows = tlx.subslice(p_tile, 64, 32), tlx.local_slice(v, [64, 0], [32, D])
    tlx.async_dot(p, rows, acc, use_acc=True, force_async=True)
    tlx.barrier_wait(p_fulls[2], j & 1)
    p, rows = tlx.subslice(p_tile, 96, 32), tlx.local_slice(v, [96, 0], [32, D])
    tlx.async_dot(p, rows, acc, use_acc=True, mBarriers=[done])"""

SLICED = Exercise(
    id="12.7",
    title="Slice P",
    name="sliced_kernel",
    kind="kernel",
    hunt=True,
    call=_sliced_launch,
    cases=_sliced_cases,
    outputs=(Output("out", ("schedule", "row", "dim")), Output("cycles")),
    difficulty=3,
    minutes=55,
    time_limit=90.0,
    kept=Kept(("sliced_kernel", "softmax_role", "one_half_mma"), "The kernel and its roles stay as they are"),
    hints=(
        "halves(exponents) gives the first slice and the rest, halves of the rest the other two. Exponentials, store and arrive of a slice come before the exponentials of the next.",
        "P's columns 64 .. 95 meet V's rows 64 .. 95: tlx.subslice(p_tile, 64, 32) and tlx.local_slice(v, [64, 0], [32, D]). Row sums can wait until all of P is published.",
        "multiply_slices, per slice: wait for its p_fulls, parity j & 1, then async_dot. Only the very first product of all overwrites O: use_acc=j > 0 for slice 0, True for the others. force_async=True for the first two, mBarriers=[done] for the last.",
    ),
    properties=(Property("right numbers", _near(_out, _out_in_bf16)), Property("overlap", _within_its_limit)),
    mutants=(
        Mutant(
            "stores all, then publishes all",
            "three slices, but the first is published only after the last has been made.",
            caught_by="overlap",
            edit=(
                (_PUT_LEFT, _PUT_LEFT.replace("    tlx.barrier_arrive(p_fulls[0])\n", "")),
                (_PUT_MIDDLE, _PUT_MIDDLE.replace("    tlx.barrier_arrive(p_fulls[1])\n", "")),
                (
                    _PUT_LAST,
                    _PUT_LAST
                    + "    tlx.barrier_arrive(p_fulls[0])\n".replace("0", "1")
                    + "    tlx.barrier_arrive(p_fulls[0])\n",
                ),
            ),
            expect="the limit is 21,500",
            recognise=False,
        ),
        Mutant(
            "waits for all slices first",
            "the products are sliced, but the first waits for the last slice.",
            caught_by="overlap",
            edit=(
                (
                    "    tlx.barrier_wait(p_fulls[0], j & 1)\n    p,",
                    "    for i in tl.static_range(3):\n        tlx.barrier_wait(p_fulls[i], j & 1)\n    p,",
                ),
                ("    tlx.barrier_wait(p_fulls[1], j & 1)\n    p,", "    p,"),
                ("    tlx.barrier_wait(p_fulls[2], j & 1)\n    p,", "    p,"),
            ),
            expect="the limit is 21,500",
            recognise=False,
        ),
        Mutant(
            "two equal slices",
            "two slices of 64: after the last exponential there is more to store and to multiply than with 32.",
            caught_by="overlap",
            edit=(
                (
                    _PUBLISH,
                    _PUBLISH.replace("    middle, last = halves(right)\n", "")
                    .replace(_PUT_MIDDLE, "")
                    .replace("exp2(last)", "exp2(right)")
                    .replace("p_tile, 96, 32", "p_tile, 64, 64")
                    .replace("p_fulls[2]", "p_fulls[1]")
                    .replace(" + tl.sum(p_middle, axis=1)", ""),
                ),
                (
                    _MULTIPLY,
                    "".join(_MULTIPLY.splitlines(True)[:3])
                    + "".join(_MULTIPLY.splitlines(True)[6:])
                    .replace("p_fulls[2]", "p_fulls[1]")
                    .replace("p_tile, 96, 32", "p_tile, 64, 64")
                    .replace("[96, 0], [32, D]", "[64, 0], [64, D]"),
                ),
            ),
            expect="the limit is 21,500",
            recognise=False,
        ),
        Mutant(
            "row sums on the way",
            "the row sums are made between the slices: every slice that follows is later by that.",
            caught_by="overlap",
            edit=(
                (
                    _PUT_LEFT,
                    _PUT_LEFT.replace("    tlx.barrier", "    total = tl.sum(p_left, axis=1)\n    tlx.barrier"),
                ),
                (
                    _PUT_MIDDLE,
                    _PUT_MIDDLE.replace("    tlx.barrier", "    total += tl.sum(p_middle, axis=1)\n    tlx.barrier"),
                ),
                (
                    _PUT_LAST,
                    _PUT_LAST.replace("    tlx.barrier", "    total += tl.sum(p_last, axis=1)\n    tlx.barrier"),
                ),
                (_SUMS, "    return total\n"),
            ),
            expect="the limit is 21,500",
            recognise=False,
        ),
        Mutant(
            "every slice overwrites O in block 0",
            "in block 0 each product overwrites O: only the last of the three is left.",
            caught_by="right numbers",
            edit=(
                (
                    "p, rows = tlx.subslice(p_tile, 64, 32), tlx.local_slice(v, [64, 0], [32, D])\n    tlx.async_dot(p, rows, acc, use_acc=True,",
                    "p, rows = tlx.subslice(p_tile, 64, 32), tlx.local_slice(v, [64, 0], [32, D])\n    tlx.async_dot(p, rows, acc, use_acc=j > 0,",
                ),
            ),
            expect="fp64",
            recognise=False,
        ),
        Mutant(
            "the same rows of V for every slice",
            "columns 64 and up of P belong to rows 64 and up of V.",
            caught_by="right numbers",
            edit=("tlx.local_slice(v, [64, 0], [32, D])", "tlx.local_slice(v, [0, 0], [32, D])"),
            expect="fp64",
            recognise=False,
        ),
        Mutant(
            "one barrier for three slices",
            "all slices arrive at one barrier: its phases run ahead of the wait.",
            caught_by="runs",
            edit=(
                ("    tlx.barrier_arrive(p_fulls[1])\n", "    tlx.barrier_arrive(p_fulls[0])\n"),
                ("    tlx.barrier_arrive(p_fulls[2])\n", "    tlx.barrier_arrive(p_fulls[0])\n"),
                ("    tlx.barrier_wait(p_fulls[1], j & 1)\n", ""),
                ("    tlx.barrier_wait(p_fulls[2], j & 1)\n", ""),
            ),
            expect="p_fulls[0]",
            recognise=False,
        ),
        Mutant(
            "publishes before it stores",
            "the arrival comes before the store: the product may read what is not there yet.",
            caught_by="runs",
            edit=(
                _PUT_LAST,
                "    p_last = tl.math.exp2(last)\n    tlx.barrier_arrive(p_fulls[2])\n"
                "    tlx.local_store(tlx.subslice(p_tile, 96, 32), p_last.to(tl.bfloat16))\n",
            ),
            expect="p_tile",
            recognise=False,
        ),
        Mutant(
            "done after the first slice",
            "the barrier completes after the first product: O lacks the rest.",
            caught_by="runs",
            edit=(
                ("use_acc=j > 0, force_async=True)", "use_acc=j > 0, mBarriers=[done])"),
                ("use_acc=True, mBarriers=[done])", "use_acc=True, force_async=True)"),
            ),
            expect="acc",
            recognise=False,
        ),
        Mutant(
            "the last slice is left out of the row sums",
            "the row sums lack the last 32 columns.",
            caught_by="right numbers",
            edit=(" + tl.sum(p_last, axis=1)", ""),
            expect="fp64",
            recognise=False,
        ),
    ),
    variants=(
        (  # a loop over slices in tuples
            (
                _PUBLISH,
                """    left, right = halves(exponents)
    middle, last = halves(right)
    parts = (left, middle, last)
    total = tl.zeros((exponents.shape[0],), tl.float32)
    made = ()
    for i in tl.static_range(3):
        p = tl.math.exp2(parts[i])
        tlx.local_store(tlx.subslice(p_tile, 0 if i == 0 else 32 + 32 * i, parts[i].shape[1]), p.to(tl.bfloat16))
        tlx.barrier_arrive(p_fulls[i], 1)
        made = made + (p,)
    for i in tl.static_range(3):
        total += tl.sum(made[i], 1)
    return total
""",
            ),
            (
                _MULTIPLY,
                """    for i in tl.static_range(3):
        tlx.barrier_wait(tlx.local_view(p_fulls, i), j % 2)
        add = (j != 0) if i == 0 else True
        p = tlx.subslice(p_tile, 0 if i == 0 else 32 + 32 * i, 64 if i == 0 else 32)
        rows = tlx.local_slice(v, [0 if i == 0 else 32 + 32 * i, 0], [64 if i == 0 else 32, D])
        tlx.async_dot(p, rows, acc, use_acc=add, force_async=True)
    tlx.tcgen05_commit(done)""",
            ),
        ),
        (  # the columns of P as slices of slices, and one sum of the joined middle and last slices
            (
                _PUT_MIDDLE,
                _PUT_MIDDLE.replace(
                    "tlx.subslice(p_tile, 64, 32)", "tlx.subslice(tlx.subslice(p_tile, 64, 64), 0, 32)"
                ),
            ),
            (_SUMS, "    return tl.sum(p_left, axis=1) + tl.sum(p_middle + p_last, axis=1)\n"),
            (
                "    tlx.async_dot(p, rows, acc, use_acc=True, mBarriers=[done])",
                "    tlx.async_dot(p, rows, acc, mBarriers=[done])",
            ),
        ),
    ),
)

# -- 12.8 --------------------------------------------------------------------------------------------------------------


def _tiles_cases(seed):
    g = _rng(seed)

    def case(name, counts, lift=1.0, limit=None, **launch):
        q, k, v = _qkv(g, 256 * len(counts), 64 * max(1, sum(counts)), 64, lift)
        return Case(name, (q, k, v, list(counts), 64), launch, extra=limit)

    return [
        case("one tile of one block", [1]),
        case("four tiles of two blocks", [2, 2, 2, 2], limit=18_900),
        case("four tiles of one block", [1, 1, 1, 1], limit=13_600),
        case("tiles of 2, 0, 0, 0, 1 and 3 blocks", [2, 0, 0, 0, 1, 3]),
        case("no blocks in the first and the last tile, scores up to 60", [0, 3, 1, 0], lift=12.0),
        case("no blocks at all", [0, 0]),
        case("tiles of 3, 1 and 2 blocks, three buffers", [3, 1, 2], buffers=3),
    ]


def _by_tile(function):
    """Return (q, k, v, counts, block) -> out: each tile of 256 queries with its own key blocks, zeros without any."""

    def whole(q, k, v, counts, block, **launch):
        outs, first = [], 0
        for tile, blocks in enumerate(counts):
            rows, keys = slice(256 * tile, 256 * tile + 256), slice(first * block, (first + blocks) * block)
            out = function(q[rows], k[keys], v[keys], block) if blocks else torch.zeros(256, q.shape[1])
            outs.append(out.double())
            first += blocks
        return torch.cat(outs)

    return whole


def _tiles_launch(kernel, q, k, v, counts, block, buffers=4):
    import math

    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator
    from jfa.emulator.rates import B200

    results, dim = [], q.shape[1]
    firsts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("timed", 0)):
        out = unwritten(*q.shape)
        boxes = [
            TensorDescriptor.from_tensor(q, [128, dim]),
            *(TensorDescriptor.from_tensor(t, [block, dim]) for t in (k, v)),
        ]
        with emulator.options(policy=policy, seed=seed, rates=B200):
            kernel[(1,)](
                *boxes,
                out,
                firsts,
                math.log2(math.e) / math.sqrt(dim),
                len(counts),
                D=dim,
                BM=128,
                BN=block,
                BUFFERS=buffers,
            )
        results.append(out)
    return torch.stack(results), int(emulator.last().time)


_DUE = """                if step > 0:
                    issue_pv(
                        p_tiles, kv, accs, p_fulls, acc_readys, kv_fulls, kv_empties,
                        half, step - 1, place > 0, BUFFERS,
                    )  # fmt: skip
                    if j == 0:
                        tlx.tcgen05_commit(acc_fulls[half])
"""
_NEXT = """                if j == 0:
                    tlx.barrier_wait(q_fulls[half], worked & 1)
                issue_s(q, kv, s, s_fulls, kv_fulls, kv_empties, half, step, BUFFERS)
                if j + 1 == blocks:
                    tlx.tcgen05_commit(q_empties[half])
"""
_COUNT = """        if blocks > 0:
            worked += 1
    if step > 0:
"""
_LAST = """    if step > 0:
        for half in tl.static_range(2):
            issue_pv(
                p_tiles, kv, accs, p_fulls, acc_readys, kv_fulls, kv_empties,
                half, step - 1, place > 0, BUFFERS,
            )  # fmt: skip
            tlx.tcgen05_commit(acc_fulls[half])"""
_ISSUE_S = "issue_s(q, kv, s, s_fulls, kv_fulls, kv_empties, half, {}, BUFFERS)"
_ISSUE_PV = """issue_pv(
                            p_tiles, kv, accs, p_fulls, acc_readys, kv_fulls, kv_empties,
                            half, step, j > 0, BUFFERS,
                        )  # fmt: skip"""
_LOOKS_AHEAD = f"""    step, worked, blocks, tile = 0, 0, 0, 0
    while tile < tiles and blocks == 0:
        blocks = tl.load(firsts_ptr + tile + 1) - tl.load(firsts_ptr + tile)
        tile += 1
    for half in tl.static_range(2):
        if blocks > 0:
            tlx.barrier_wait(q_fulls[half], 0)
            {_ISSUE_S.format("0")}
            if blocks == 1:
                tlx.tcgen05_commit(q_empties[half])
    while blocks > 0:
        coming = 0
        while tile < tiles and coming == 0:
            coming = tl.load(firsts_ptr + tile + 1) - tl.load(firsts_ptr + tile)
            tile += 1
        for j in range(blocks):
            for half in tl.static_range(2):
                {_ISSUE_PV}
                if j + 1 < blocks:
                    {_ISSUE_S.format("step + 1")}
                    if j + 2 == blocks:
                        tlx.tcgen05_commit(q_empties[half])
                else:
                    tlx.tcgen05_commit(acc_fulls[half])
                    if coming > 0:
                        tlx.barrier_wait(q_fulls[half], (worked + 1) & 1)
                        {_ISSUE_S.format("step + 1")}
                        if coming == 1:
                            tlx.tcgen05_commit(q_empties[half])
            step += 1
        worked += 1
        blocks = coming
"""
_BEGIN = """    step, worked, place = 0, 0, 0  # place: of the step before, in its tile
    for tile in range(tiles):
        blocks = tl.load(firsts_ptr + tile + 1) - tl.load(firsts_ptr + tile)
        for j in range(blocks):
            for half in tl.static_range(2):
"""
_STEPS = """            place = j
            step += 1
"""

AHEAD = Exercise(
    id="12.8",
    title="The next tile's S, early",
    name="tiles_kernel",
    kind="kernel",
    hunt=True,
    call=_tiles_launch,
    cases=_tiles_cases,
    outputs=(Output("out", ("schedule", "row", "dim")), Output("cycles")),
    difficulty=3,
    minutes=65,
    time_limit=120.0,
    kept=Kept(("tiles_kernel",), "the kernel stays as it is"),
    hints=(
        "Let the loop be over steps, not over tiles: at every step of every half first the P V of the step before, whichever tile that belongs to, then this step's S. What is left at the end is one P V per half.",
        "Two things of the step before must be carried along: its number, step - 1, and whether it was the first of its tile (then its P V overwrites O). At a tile's first step the P V that is due was the last of its own tile: commit acc_fulls[half] behind it.",
        "for j in range(blocks), for half: if step > 0: issue_pv(..., half, step - 1, place > 0, BUFFERS) and, where j == 0, the commit on acc_fulls; where j == 0 wait for q_fulls[half], parity worked & 1; issue_s(..., half, step, BUFFERS); where j + 1 == blocks the commit on q_empties. Then place = j, step += 1. Behind all tiles, if step > 0: the last issue_pv and commit of both halves.",
    ),
    properties=(
        Property("right numbers", _near(_by_tile(_out), _by_tile(_out_in_bf16))),
        Property("no seam", _within_its_limit),
    ),
    mutants=(
        Mutant(
            "both P V, then both S",
            "right numbers, but S of half 0 waits for the P V of half 1, at every step.",
            caught_by="no seam",
            edit=(_DUE + _NEXT, _DUE + "            for half in tl.static_range(2):\n" + _NEXT),
            expect="the limit is",
            recognise=False,
        ),
        Mutant(
            "S before the P V that is due",
            "P lies inside S: this S overwrites a P that has not been multiplied yet.",
            caught_by="runs",
            edit=(_DUE + _NEXT, _NEXT + _DUE),
            expect="s_fulls",
            recognise=False,
        ),
        Mutant(
            "every tile counts, empty ones too",
            "a tile without blocks completes no phase of q_fulls.",
            caught_by="runs",
            edit=(_COUNT, "        worked += 1\n    if step > 0:\n"),
            expect="q_fulls",
            recognise=False,
        ),
        Mutant(
            "the last products are forgotten",
            "behind the last tile one P V per half is still due.",
            caught_by="runs",
            edit=(_LAST, ""),
            expect="acc_fulls",
            recognise=False,
        ),
        Mutant(
            "last products even without any step",
            "no tile had a block, and yet a P V is issued.",
            caught_by="runs",
            edit=("            worked += 1\n    if step > 0:\n", "            worked += 1\n    if step >= 0:\n"),
            expect="kv_fulls",
            recognise=False,
        ),
        Mutant(
            "adds by this step's place",
            "whether the P V that is due overwrites O depends on its own place in its tile, not on this step's.",
            caught_by="runs",
            edit=(_DUE, _DUE.replace("place > 0", "j > 0")),
            expect="accs",
            recognise=False,
        ),
        Mutant(
            "O is never overwritten",
            "every product adds: a tile's O begins with the tile before's, or with what was there.",
            caught_by="runs",
            edit=(_DUE, _DUE.replace("place > 0", "True")),
            expect="accs",
            recognise=False,
        ),
        Mutant(
            "Q is given back at a tile's first step",
            "later steps of the tile still read Q.",
            caught_by="runs",
            edit=(_NEXT, _NEXT.replace("if j + 1 == blocks:", "if j == 0:")),
            expect="q[",
            recognise=False,
        ),
        Mutant(
            "O is committed as complete at every step",
            "acc_fulls takes one commit per tile, behind its last P V.",
            caught_by="runs",
            edit=(
                _DUE,
                _DUE.replace("                    if j == 0:\n                        tlx", "                    tlx"),
            ),
            expect="acc",
            recognise=False,
        ),
        Mutant(
            "waits for Q at every step",
            "Q comes once per tile: a second wait for it waits forever, or passes on an old phase.",
            caught_by="runs",
            edit=(
                _NEXT,
                _NEXT.replace(
                    "                if j == 0:\n                    tlx.barrier_wait(q_fulls[half], worked & 1)\n",
                    "                tlx.barrier_wait(q_fulls[half], step & 1)\n",
                ),
            ),
            expect="q_fulls",
            recognise=False,
        ),
        Mutant(
            "four buffers for good",
            "with other BUFFERS K is looked for in buffers where it is not.",
            caught_by="runs",
            edit=(_NEXT, _NEXT.replace("BUFFERS", "4")),
            expect="kv",
            recognise=False,
        ),
    ),
    variants=(
        ((_BEGIN + _DUE + _NEXT + _STEPS + _COUNT.replace("    if step > 0:\n", "") + _LAST, _LOOKS_AHEAD),),
        (
            (
                "    step, worked, place = 0, 0, 0  # place: of the step before, in its tile\n",
                "    step, worked, opens = 0, 0, True\n",
            ),
            (_DUE, _DUE.replace("place > 0", "opens == 0")),
            (_LAST, _LAST.replace("place > 0", "opens == 0")),
            ("            place = j\n", "            opens = j == 0\n"),
            (
                _COUNT,
                _COUNT.replace(
                    "        if blocks > 0:\n            worked += 1\n",
                    "        worked += tl.where(blocks > 0, 1, 0)\n",
                ),
            ),
        ),
    ),
)

# -- 12.9 --------------------------------------------------------------------------------------------------------------


def _split(roles, spills=None, **other):
    """Return a report as `jfa compile --json` gives it, shortened; ``roles``: {name: warps}, ``spills`` as role_spills."""
    fields = dict(error=None, setmaxnreg_ignored=False, smem=180_684, tmem=512, threads=512, registers=128)
    names = [dict(name=name, warps=warps, registers=None) for name, warps in roles.items()]
    return dict(fields, roles=names, role_spills=dict(spills or {})) | other


_FIVE = {"correction": 4, "softmax 0": 4, "softmax 1": 4, "mma": 1, "load": 1}
_BUSY = {"correction": 192, "softmax 0": 2022, "softmax 1": 1961, "mma": 280, "load": 80}
_TWO = "softmax 0, softmax 1"


def _over(rng):
    """Return one report for each limit that it exceeds by the least there is, and one that spills and fits."""
    low = dict(smem=232_449), dict(tmem=513), dict(threads=1056, registers=32), dict(threads=1024, registers=65)
    bad = [*low, dict(setmaxnreg_ignored=True), dict(error="ptxas fatal: ...")]
    reports = [_split(_FIVE, {}, **fields) for fields in bad]
    reports.insert(rng.randrange(len(reports)), _split(_FIVE, {_TWO: (40, 4 * rng.randint(20, 80))}))
    return reports


def _random_splits(rng, n):
    def spill(most):
        return 4 * rng.randint(0, most), 4 * rng.randint(0, most)

    found = []
    for _ in range(n):
        spills = {"before the roles part": spill(20), "correction": spill(250), _TWO: spill(60), "load": spill(30)}
        faults = rng.choice([{}, {}, {}, dict(setmaxnreg_ignored=True), dict(smem=240_000), dict(error="ptxas fatal")])
        found.append(_split(_FIVE, spills, **faults))
    return found


def _split_cases(seed):
    rng = random.Random(seed)
    jitter = 4 * rng.randint(0, 9)
    hidden = [
        _split(_FIVE, {_TWO: (20, 28 + jitter)}),
        _split(_FIVE, {"correction": (300 + jitter, 600), _TWO: (0, 8)}),
        _split(_FIVE, {"correction": (900, 1700 + jitter), _TWO: (0, 4)}),
    ]
    three = {"compute 0": 4, "compute 1": 4, "reduce": 4, "load": 1}
    path = [
        _split(three, {"compute 0": (400, 500 + jitter), "compute 1": (400, 500), "reduce": (500, 500)}),
        _split(three, {"compute 0": (600, 700 + jitter)}),
    ]
    warps = {"store": 1, "compute": 8, "load": 1}
    wide = [_split(warps, {"compute": (100, 100 + jitter)}), _split(warps, {"store": (300, 500)})]
    together = {"a": 4, "b": 4, "c": 4, "mma": 1}
    key = [_split(together, {"a, b, c": (60, 60 + jitter)}), _split(together, {"a": (80, 80 + jitter)})]
    equal = [
        _split(_FIVE, {"correction": (200, 200 + jitter)}),
        _split(_FIVE, {"correction": (100, 100)}),
        _split(_FIVE, {"correction": (120, 80)}),
    ]
    before = [_split(_FIVE, {_TWO: (0, 8)}), _split(_FIVE, {"before the roles part": (400, 400 + jitter)})]
    exact = [
        _split(_FIVE, {_TWO: (8, 8 + jitter)}),
        _split(_FIVE, {}, smem=232_448, tmem=512, threads=1024, registers=64),
    ]
    unknown = [_split(_FIVE | {"store": 4}, {"store": (1100, 1100 + jitter)}), _split(_FIVE, {_TWO: (40, 40)})]
    none = [_split(_FIVE, {}, error="ptxas fatal"), _split(_FIVE, {}, setmaxnreg_ignored=True)]
    return [
        Case("one split", ([_split(_FIVE, {_TWO: (0, jitter)})], _BUSY)),
        Case("a role with time to spare spills most", (hidden, _BUSY)),
        Case("limits that are just reached", (exact, _BUSY)),
        Case("limits that are exceeded by the least", (_over(rng), _BUSY)),
        Case("none may ship", (none, _BUSY)),
        Case("an empty list", ([], _BUSY)),
        Case("many spills, each role's own hidden", (path, dict.fromkeys(three, 1000 + jitter))),
        Case("roles of one warp and of eight", (wide, dict.fromkeys(warps, 200))),
        Case("three roles of one code", (key, dict(dict.fromkeys(together, 300), a=290))),
        Case("equally fast splits", (equal, _BUSY)),
        Case("spills before the roles part", (before, _BUSY)),
        Case("a role that work does not name", (unknown, _BUSY)),
        *(Case(f"{n} splits", (_random_splits(rng, n), _BUSY)) for n in (6, 12, 25)),
    ]


def _may_ship(report):
    over = report["smem"] > 232_448 or report["tmem"] > 512 or report["threads"] > 1024
    over = over or report["registers"] * report["threads"] > 65_536
    return not (over or report["error"] or report["setmaxnreg_ignored"])


def _estimate(report, work):
    """Return (cycles of a step, cycles of all spills) of a report."""
    own = []
    for role in report["roles"]:
        per_thread = sum(
            sum(both) for names, both in report["role_spills"].items() if role["name"] in names.split(", ")
        )
        own.append((work.get(role["name"], 0), per_thread * role["warps"] / 4))
    path = sum(spill for _, spill in own)
    return max(path, *(busy + spill for busy, spill in own)), path


def _a_place(case, result):
    reports, _ = case.args
    is_place = isinstance(result, int) and not isinstance(result, bool) and -1 <= result < len(reports)
    return None if is_place else "Return a place in the list, or -1."


def _ships(case, result):
    reports, _ = case.args
    if result >= 0:
        return None if _may_ship(reports[result]) else "The split that was chosen may not ship."
    return "There is a split that may ship." if any(map(_may_ship, reports)) else None


def _is_fastest(case, result):
    reports, work = case.args
    if result < 0:
        return None
    mine = _estimate(reports[result], work)
    for place, report in enumerate(reports):
        if _may_ship(report):
            other = _estimate(report, work)
            if other[0] < mine[0]:
                return "Another split that may ship is faster."
            if other < mine:
                return "Another split that may ship is as fast, and its roles spill fewer bytes."
            if other == mine and place < result:
                return "A split before the chosen one is as good: take the first."
    return None


_FITS = 'fits = report["smem"] <= 232_448 and report["tmem"] <= 512 and report["threads"] <= 1024'
_STEP = "step = max([path, *(work.get(name, 0) + cycles for name, cycles in spills.items())])"

REGISTERS = Exercise(
    id="12.9",
    title="Registers from a compile report",
    name="choose_split",
    cases=_split_cases,
    outputs=(Output("place", dtype="int"),),
    difficulty=2,
    minutes=40,
    hints=(
        "Two steps: leave out what may not ship, then compare estimates. Of a split's spills only those count that make its slowest role slower, or that fill the path to memory.",
        "Per role: cycles = (stored + loaded) * 32 * warps / 128. A key of role_spills may name several roles: names.split(', '), and each of them moves those bytes; leave out names that are no role.",
        "path = sum of all roles' cycles; step = max(path, work.get(role, 0) + cycles of each role). Compare (step, path) of the splits that may ship with a strict <, so that the first of equals stays; start with best = None, place = -1.",
    ),
    properties=(
        Property("a place", _a_place),
        Property("may ship", _ships),
        Property("the fastest", _is_fastest),
    ),
    mutants=(
        Mutant(
            "fewest bytes in all",
            "spills of a role that has time to spare cost nothing: this takes the split that spills least.",
            caught_by="the fastest",
            edit=(
                ("(step, path) < best", "path < best"),
                ("best, place = (step, path), i", "best, place = path, i"),
            ),
            expect="is faster",
        ),
        Mutant(
            "bytes per thread without warps",
            "a role of eight warps moves eight times what one warp does.",
            caught_by="the fastest",
            edit=(" * 32 * warps[name] / 128", " * 32 * 4 / 128"),
            expect="is faster",
        ),
        Mutant(
            "a shared key counts once",
            "roles that stand under one key each move those bytes.",
            caught_by="the fastest",
            edit=('for name in names.split(", "):', 'for name in names.split(", ")[-1:]:'),
            expect="faster",
        ),
        Mutant(
            "shared keys are skipped",
            "a key that names several roles is the name of none.",
            caught_by="the fastest",
            edit=('for name in names.split(", "):', "for name in [names]:"),
            expect="faster",
        ),
        Mutant(
            "the path to memory is not shared",
            "roles that work side by side still share one path to memory.",
            caught_by="the fastest",
            edit=(_STEP, _STEP.replace("[path, *(", "[0, *(")),
            expect="is faster",
        ),
        Mutant(
            "roles one after the other",
            "roles work side by side: the slowest one counts, not the sum.",
            caught_by="the fastest",
            edit=(_STEP, "step = sum(work.get(name, 0) + cycles for name, cycles in spills.items())"),
            expect="is faster",
        ),
        Mutant(
            "less than the limits",
            "a split that reaches a limit exactly fits.",
            caught_by="may ship",
            edit=(
                (_FITS, _FITS.replace("<=", "<")),
                (
                    'report["registers"] * report["threads"] <= 65_536',
                    'report["registers"] * report["threads"] < 65_536',
                ),
            ),
            expect="There is a split",
            recognise=False,
        ),
        Mutant(
            "does not ask whether the split is in force",
            "where setmaxnreg has no effect all roles have the same registers.",
            caught_by="may ship",
            edit=(' and not report["setmaxnreg_ignored"]', ""),
            expect="may not ship",
        ),
        Mutant(
            "registers at launch are not looked at",
            "1,024 threads of 65 registers are more than an SM has.",
            caught_by="may ship",
            edit=('compiled and fits and report["registers"] * report["threads"] <= 65_536', "compiled and fits"),
            expect="may not ship",
        ),
        Mutant(
            "the last of equals",
            "of equals the first is asked for.",
            caught_by="the fastest",
            edit=("(step, path) < best", "(step, path) <= best"),
            expect="take the first",
        ),
        Mutant(
            "spills before the roles count",
            "what is spilled before the roles part is met once per launch.",
            caught_by="the fastest",
            edit=(
                "        path = sum(spills.values())\n",
                '        path = sum(spills.values())\n        start = report["role_spills"].get("before the roles part", (0, 0))\n'
                "        spills = {name: cycles + sum(start) for name, cycles in spills.items()}\n",
            ),
            expect="is faster",
        ),
    ),
    variants=(
        """
def choose_split(reports, work):
    def ships(r):
        if r["error"] is not None or r["setmaxnreg_ignored"]:
            return False
        return not (r["smem"] > 232448 or r["tmem"] > 512 or r["threads"] > 1024 or r["registers"] * r["threads"] > 65536)

    def cost(i):
        r = reports[i]
        quarter = {x["name"]: 0 for x in r["roles"]}          # quarters of a cycle
        for key, (a, b) in r["role_spills"].items():
            for x in r["roles"]:
                if x["name"] in key.split(", "):
                    quarter[x["name"]] += (a + b) * x["warps"]
        total = sum(quarter.values())
        slowest = max((4 * work.get(n, 0) + c for n, c in quarter.items()), default=0)
        return max(total, slowest), total, i

    legal = [i for i, r in enumerate(reports) if ships(r)]
    return min(legal, key=cost) if legal else -1
""",
        """
def choose_split(reports, work):
    ranked = []
    for place, one in enumerate(reports):
        if one["error"] is None and one["setmaxnreg_ignored"] is False:
            if max(one["smem"] / 232448, one["tmem"] / 512, one["threads"] / 1024, one["registers"] * one["threads"] / 65536) <= 1:
                moved = 0.0
                longest = 0.0
                for role in one["roles"]:
                    own = sum(s + l for k, (s, l) in one["role_spills"].items() if role["name"] in k.split(", "))
                    cycles = own * role["warps"] * 32 / 128
                    moved += cycles
                    longest = max(longest, work.get(role["name"], 0) + cycles)
                ranked.append((max(longest, moved), moved, place))
    ranked.sort()
    return ranked[0][2] if ranked else -1
""",
    ),
)

EXERCISES = [LAZY, CROWDED, EARLY, CORRECTED, PING_PONG, PEEL, SLICED, AHEAD, REGISTERS]
