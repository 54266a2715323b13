"""Checks of chapter 12: the Blackwell forward. Kernels run under several schedules; the first axis of a result is the schedule."""

import math

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


def _attention(q, k, v):
    """Return (out, lse) in float64, whatever the tensors' type."""
    scores = q.double() @ k.double().t() / math.sqrt(q.shape[1])
    return torch.softmax(scores, dim=1) @ v.double(), torch.logsumexp(scores, dim=1)


def _in_bf16(q, k, v, block):
    """Return (out, lse) as a right kernel computes them: block by block in fp32, P rounded to bf16 before the second product."""
    q, k, v = q.float(), k.float(), v.float()
    m, l, acc = q.new_full((len(q), 1), -math.inf), q.new_zeros(len(q), 1), torch.zeros_like(q)
    for start in range(0, len(k), block):
        scores = q @ k[start : start + block].T / math.sqrt(q.shape[1])
        new = torch.maximum(m, scores.amax(1, keepdim=True))
        p, shrink = torch.exp(scores - new), torch.exp(m - new)
        m, l, acc = new, l * shrink + p.sum(1, keepdim=True), acc * shrink + kinds.to_bf16(p) @ v[start : start + block]
    return acc / l, (m + torch.log(l))[:, 0]


def _four_times(function):
    """Return the function's results once for each schedule."""

    def again(q, k, v, block):
        found = function(q, k, v, block)
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
        case("maxima that rise by about 3 a block, threshold 8", 5, 9, 16, 8.0, rising=3.0),
        case("maxima that rise by about 30 a block, threshold 8", 4, 5, 16, 8.0, rising=30.0),
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
    minutes=20,
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


def _kernel_cases(rows, block, dim, counts):
    def cases(seed):
        g = _rng(seed)
        found = [Case(f"{n} key block{'s' * (n > 1)}", (*_qkv(g, rows, n * block, dim), block)) for n in counts]
        found.append(
            Case("scores up to 60: the maximum moves", (*_qkv(g, rows, counts[-1] * block, dim, lift=12.0), block))
        )
        return found

    return cases


def _out(q, k, v, block):
    return _attention(q, k, v)[0]


def _out_in_bf16(q, k, v, block):
    return _in_bf16(q, k, v, block)[0]


def _right(case, result):
    """Return a property's view of the values: as near to fp64 as a P rounded to bf16 allows."""
    want = _out(*case.args)
    allowed = max(TOL, SLACK * (_out_in_bf16(*case.args) - want).abs().max().item())
    for schedule, out in enumerate(result[0]):
        off = (out.double() - want).abs().max().item()
        if not off <= allowed:
            return f"schedule {schedule}: out differs from fp64 by up to {off:.3g}; rounding to bf16 explains {allowed:.2g}."
    return None


def _within(limit):
    """Apply the limit to the cases of several key blocks; a single block has nothing to overlap with."""

    def test(case, result):
        q, k, v, block = case.args
        cycles = int(result[1])
        return f"{cycles:,} modelled cycles; the limit is {limit:,}." if len(k) > block and cycles > limit else None

    return test


# -- 12.2 --------------------------------------------------------------------------------------------------------------


def _crowded_launch(kernel, q, k, v, block):
    import math

    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, dim = [], q.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(*q.shape)
        boxes = [TensorDescriptor.from_tensor(t, [128, dim]) for t in (q, k, v)]
        with emulator.options(policy=policy, seed=seed):
            kernel[(1,)](*boxes, out, math.log2(math.e) / math.sqrt(dim), len(k) // block, D=dim, BM=128, BN=block)
        results.append(out)
    return torch.stack(results)


CROWDED = Exercise(
    id="12.2",
    title="Six buffers into 512 columns",
    name="crowded_kernel",
    kind="kernel",
    hunt=True,
    call=_crowded_launch,
    cases=_kernel_cases(256, 128, 128, (1, 2)),
    reference=_four_times(_out),
    arithmetic=_four_times(_out_in_bf16),
    slack=SLACK,
    outputs=(Output("out", ("schedule", "row", "dim")),),
    difficulty=2,
    minutes=15,
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
            "right numbers, but P moved to shared memory, where K and V want the room.",
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
            "an accumulator lives as long as the tile: it may share with nobody.",
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


def _early_launch(kernel, q, k, v, block):
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
                *boxes, out, math.log2(math.e) / math.sqrt(dim), len(k) // block, D=dim, BM=128, BN=block, BUFFERS=4
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
    cases=_kernel_cases(128, 64, 64, (1, 6, 3)),
    outputs=(Output("out", ("schedule", "row", "dim")), Output("cycles")),
    difficulty=2,
    minutes=20,
    time_limit=60.0,
    hints=(
        "The softmax may still read S while the tensor core writes the next S into it. Somebody must say that S has been read, and somebody must wait for it.",
        "A barrier for that is there already and nobody uses it: s_empty. The scores are in registers right after local_load.",
        "softmax: tlx.barrier_arrive(s_empty[0], 1) right after the local_load; mma: tlx.barrier_wait(s_empty[0], (j & 1) ^ 1) before the S product.",
    ),
    properties=(Property("right numbers", _right), Property("overlap", _within(13_500))),
    mutants=(
        Mutant(
            "waits but nobody arrives",
            "the tensor core waits for ever.",
            caught_by="runs",
            edit=("                tlx.barrier_arrive(s_empty[0], 1)\n", ""),
            expect="s_empty",
            recognise=False,
        ),
        Mutant(
            "arrives but nobody waits",
            "the arrivals pile up and hold nobody back.",
            caught_by="runs",
            edit=("                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)\n", ""),
            expect="s_full[0] can come two phases late",
            recognise=False,
        ),
        Mutant(
            "waits for the wrong parity",
            "before the first S nobody has arrived.",
            caught_by="runs",
            edit=("tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)", "tlx.barrier_wait(s_empty[0], j & 1)"),
            expect="s_empty",
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


def _corrected_launch(kernel, q, k, v, block):
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
                math.log2(math.e) / math.sqrt(dim),
                len(k) // block,
                D=dim,
                BM=128,
                BN=block,
                BUFFERS=3,
            )
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _out_and_lse(q, k, v, block):
    return _attention(q, k, v)


def _stores(case):
    """Return the stores to tensor memory of all launches if no row ever asks for a rescale: P and alpha of each block, sums, maxima."""
    q, k, _, block = case.args
    scores = q.float() @ k.float().T * (math.log2(math.e) / math.sqrt(q.shape[1]))
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
    cases=_kernel_cases(256, 64, 64, (1, 3, 2, 4, 5)),
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
            text="multiplies the accumulator by alpha if any row asks for it",
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
            expect="if any row asks",
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


def _ping_launch(kernel, q, k, v, block):
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
                *boxes, out, math.log2(math.e) / math.sqrt(dim), len(k) // block, D=dim, BM=128, BN=block, BUFFERS=3
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
    cases=_kernel_cases(256, 128, 128, (1, 4)),
    outputs=(Output("out", ("schedule", "row", "dim")), Output("cycles")),
    difficulty=3,
    minutes=25,
    time_limit=90.0,
    hints=(
        "The tensor core already alternates between the halves. It is the softmax that does them one after the other.",
        "Two async tasks, each with its own m and l: one is the default task, the other one has num_warps=4. Each loops over all blocks of its half.",
        "In a task of its own: for j in range(blocks): m, l = half_step(..., half, j, m, l, scale_log2); then half_end(accs, acc_fulls, out_ptr, half, blocks, l, D, BM).",
    ),
    properties=(Property("right numbers", _right), Property("overlap", _within(25_000))),
    limits=(Limit("a task for each half", "tasks", at_least=4, text="Give each half a task of its own"),),
    mutants=(
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
    minutes=20,
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

EXERCISES = [LAZY, CROWDED, EARLY, CORRECTED, PING_PONG, PEEL]
