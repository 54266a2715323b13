"""Block lists: selection, transposition, checks, and the reference's attention over them, against loops in plain Python."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import jfa
from jfa import block_select, reference
from jfa.attention import op
from jfa.block_sparse import (
    check_lists,
    dense_mask,
    grid_of,
    lists_from_mask,
    pool_blocks,
    select_blocks,
    selection,
    transpose,
)
from jfa.kernels.common import transposing
from jfa.layout import offsets_from_lengths
from jfa.masks import Band, Block, block_kinds

LENGTHS = [([5, 0, 33, 1, 17], [5, 0, 33, 1, 17]), ([40, 7, 0, 64], [100, 0, 9, 64]), ([0, 0], [0, 3]), ([200], [170])]
BANDS = [dict(), dict(causal=True), dict(causal="top_left"), dict(window_size=20), dict(window_size=(30, 5))]


def inputs(len_q, len_kv, heads=4, kv_heads=2, dim=8, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    make = lambda n, h: torch.randn(n, h, dim, generator=g, dtype=dtype)
    return (
        make(sum(len_q), heads),
        make(sum(len_kv), kv_heads),
        make(sum(len_kv), kv_heads),
        offsets_from_lengths(len_q),
        offsets_from_lengths(len_kv),
    )


def lists_of(lists, grid):
    """{(head, sequence, block): [(column, kind), ...]} of lists on ``grid``'s side."""
    found = {}
    for h in range(lists.heads):
        for b in range(grid.length.numel()):
            for i in range(int(grid.blocks[b])):
                at = h * lists.rows + int(grid.first[b]) + i
                part = slice(int(lists.starts[at]), int(lists.starts[at + 1]))
                found[h, b, i] = list(zip(lists.columns[part].tolist(), lists.kinds[part].tolist()))
    return found


def expected_selection(q, k, len_q, len_kv, band, ratio, keep, block, scale):
    """The rule of select_blocks, one pair of blocks at a time."""
    found, group = {}, q.shape[1] // k.shape[1]
    q_parts, k_parts = q.split(len_q), k.split(len_kv)
    for h in range(q.shape[1]):
        for b, (n, m) in enumerate(zip(len_q, len_kv)):
            kinds = block_kinds(band, n, m, block, block)
            for i, rows in enumerate(q_parts[b][:, h].split(block) if n else []):
                scores = {}
                for j, keys in enumerate(k_parts[b][:, h // group].split(block) if m else []):
                    if kinds[i, j] != Block.EMPTY:
                        scores[j] = float(rows.mean(0) @ keys.mean(0)) * scale
                aligned = range(i * block + m - n, i * block + m - n + len(rows))
                always = {j for j in scores if "first" in keep and j == 0 or "last" in keep and j == (m - 1) // block}
                always |= {x // block for x in aligned if "diagonal" in keep} & scores.keys()
                count = max(math.ceil(ratio * len(scores) - 1e-9), len(always), 1)
                order = sorted(scores, key=lambda j: (j not in always, -scores[j], j))
                found[h, b, i] = [
                    (j, Block.FULL if kinds[i, j] == Block.FULL and len(rows) == block else Block.PARTIAL)
                    for j in sorted(order[:count])
                ]
    return found


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(
    "ratio, keep", [(0.5, ()), (0.25, ("diagonal",)), (1.0, ()), (0.1, ("first", "last", "diagonal"))]
)
@pytest.mark.parametrize("len_q, len_kv", LENGTHS, ids=str)
def test_the_best_blocks_are_chosen(len_q, len_kv, ratio, keep, band):
    q, k, _, qo, ko = inputs(len_q, len_kv)
    lists = select_blocks(q, k, qo, ko, ratio=ratio, keep=keep, block_q=16, block_kv=16, **band)
    got = lists_of(lists, grid_of(qo, q.shape[0], 16))
    expected = expected_selection(q, k, len_q, len_kv, Band.make(**band), ratio, keep, 16, 8**-0.5)
    assert got == expected
    check_lists(lists, qo, ko, total_q=len(q), total_kv=len(k), num_heads=4, num_kv_heads=2, **band)


@pytest.mark.parametrize(
    "ratio, candidates, share", [(0.7, 10, 7), (0.1, 3, 1), (0.5, 3, 2), (0.3, 10, 3), (1 / 3, 9, 3)]
)
def test_a_share_that_is_an_integer_is_not_rounded_up(ratio, candidates, share):
    q, k, _, qo, ko = inputs([16], [16 * candidates], heads=1, kv_heads=1)
    assert select_blocks(q, k, qo, ko, ratio=ratio, block_q=16, block_kv=16).counts.tolist()[0][0] == share


@pytest.mark.parametrize("shared", [0, 40])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("ratio, keep", [(0.5, ()), (0.3, ("diagonal",)), (0.1, ("first", "last", "diagonal"))])
@pytest.mark.parametrize("len_q, len_kv", LENGTHS, ids=str)
def test_the_kernels_choose_the_same_blocks(len_q, len_kv, ratio, keep, band, shared):
    """What a GPU runs, here on the emulator."""
    q, k, _, qo, ko = inputs([shared] if shared else len_q, len_kv, dtype=torch.float32, dim=12)
    call = dict(ratio=ratio, keep=keep, broadcast_q=bool(shared), block_q=32, block_kv=16, **band)
    expected = select_blocks(q, k, None if shared else qo, ko, **call)
    width, batches = -(-len(k) // 16), len(len_kv)
    rows = batches * -(-shared // 32) if shared else len(q) // 32 + batches
    if not (width and rows):
        return
    starts, columns, kinds = block_select.choose(
        q, k, None if shared else qo, ko, Band.make(**band), 12**-0.5, selection.fraction(ratio), keep, bool(shared),
        (32, 16), width, (rows, len(k) // 16 + batches), expected.columns.numel(),
    )  # fmt: skip
    end = int(expected.starts[-1])
    assert torch.equal(starts, expected.starts)
    assert torch.equal(columns[:end], expected.columns[:end]) and torch.equal(kinds[:end], expected.kinds[:end])


def test_the_kernels_know_ties_zeros_and_nan():
    q, k, _, qo, ko = inputs([20, 40], [90, 200], heads=1, kv_heads=1, dtype=torch.float32)
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[16:32], k[64:80], k[90:106], k[122:138], k[283] = 1.0, -0.0, -1.0, float("inf"), float("nan")
    expected = select_blocks(q, k, qo, ko, ratio=0.4, block_q=16, block_kv=16)
    starts, columns, _ = block_select.choose(
        q, k, qo, ko, Band(), 1.0, (2, 5), (), False, (16, 16), 19, (60 // 16 + 2, 290 // 16 + 2), expected.columns.numel()
    )  # fmt: skip
    assert torch.equal(starts, expected.starts) and torch.equal(columns[: starts[-1]], expected.columns[: starts[-1]])


def test_equal_scores_prefer_the_lower_block():
    q, k, _, qo, ko = inputs([20], [80], heads=1, kv_heads=1)
    lists = select_blocks(q, torch.ones_like(k), qo, ko, ratio=0.5, block_q=16, block_kv=16)
    assert lists.columns[:6].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_neighbours_nan_stays_there_and_ones_own_is_chosen():
    q, k, _, qo, ko = inputs([40, 40], [90, 90], heads=1, kv_heads=1)
    clean = select_blocks(q, k, qo, ko, ratio=0.3, block_q=16, block_kv=16)
    q, k = q.clone(), k.clone()
    q[40:], k[90 + 85] = float("nan"), float("nan")
    dirty = select_blocks(q, k, qo, ko, ratio=0.3, block_q=16, block_kv=16)
    grid = grid_of(qo, 80, 16)
    before, after = lists_of(clean, grid), lists_of(dirty, grid)
    assert all(before[at] == after[at] for at in before if at[1] == 0)
    q = torch.nan_to_num(q)
    assert all(
        5 in dict(x)
        for at, x in lists_of(select_blocks(q, k, qo, ko, ratio=0.3, block_q=16, block_kv=16), grid).items()
        if at[1] == 1
    )


def test_pooling_counts_existing_rows_only():
    q, *_, qo, _ = inputs([5, 0, 33], [1, 1, 1])
    pooled = pool_blocks(q, grid_of(qo, 38, 16))
    assert pooled.shape == (5, 4, 8)
    torch.testing.assert_close(
        pooled[[0, 2, 3, 4]], torch.stack([q[:5].mean(0), q[5:21].mean(0), q[21:37].mean(0), q[37:].mean(0)])
    )
    assert not pooled[1].any()


def test_a_shared_query_chooses_per_sequence():
    len_kv = [40, 0, 90, 17]
    q, k, v, _, ko = inputs([24], len_kv)
    lists = select_blocks(q, k, None, ko, ratio=0.5, broadcast_q=True, block_q=16, block_kv=16)
    grid = grid_of(ko, 24, 16, shared_by=4)
    copies = q.repeat(4, 1, 1)
    assert lists_of(lists, grid) == expected_selection(copies, k, [24] * 4, len_kv, Band(), 0.5, (), 16, 8**-0.5)
    shared = reference.attention(q, k, v, None, ko, broadcast_q=True, block_lists=lists)
    own = offsets_from_lengths([24] * 4)
    same = select_blocks(copies, k, own, ko, ratio=0.5, block_q=16, block_kv=16)
    torch.testing.assert_close(shared, reference.attention(copies, k, v, own, ko, block_lists=same), rtol=0, atol=0)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("len_q, len_kv", LENGTHS, ids=str)
def test_the_transpose_says_the_same(len_q, len_kv, band):
    q, k, _, qo, ko = inputs(len_q, len_kv)
    sides = dict(total_q=len(q), total_kv=len(k))
    lists = select_blocks(q, k, qo, ko, ratio=0.4, block_q=32, block_kv=16, **band)
    turned = transpose(lists, qo, ko, **sides)
    grid_q, grid_k = grid_of(qo, len(q), 32), grid_of(ko, len(k), 16)
    forward = {(h, b, i, j, kind) for (h, b, i), x in lists_of(lists, grid_q).items() for j, kind in x}
    backward = {(h, b, i, j, kind) for (h, b, j), x in lists_of(turned, grid_k).items() for i, kind in x}
    assert forward == backward and len(forward) == int(turned.starts[-1])
    assert all(x == sorted(x) for x in lists_of(turned, grid_k).values())
    again = transpose(turned, ko, qo, total_q=len(k), total_kv=len(q))
    end = int(lists.starts[-1])
    assert torch.equal(again.starts, lists.starts) and torch.equal(again.columns[:end], lists.columns[:end])
    assert torch.equal(again.kinds[:end], lists.kinds[:end])


@pytest.mark.parametrize("shared", [0, 40])
@pytest.mark.parametrize("band", BANDS[:3], ids=str)
@pytest.mark.parametrize("len_q, len_kv", LENGTHS, ids=str)
def test_the_kernels_transpose_alike(len_q, len_kv, band, shared):
    q, k, _, qo, ko = inputs([shared] if shared else len_q, len_kv)
    qo = None if shared else qo
    sides = dict(total_q=len(q), total_kv=len(k), broadcast_q=bool(shared))
    lists = select_blocks(q, k, qo, ko, ratio=0.4, block_q=32, block_kv=16, broadcast_q=bool(shared), **band)
    expected = transpose(lists, qo, ko, **sides)
    if not (expected.rows and lists.columns.numel()):
        return
    given = qo, ko, len(q), len(k), bool(shared), (32, 16), expected.rows
    starts, columns, kinds = block_select.transposed(lists.tensors, lists.heads, lists.rows, *given)
    end = int(expected.starts[-1])
    assert torch.equal(starts, expected.starts)
    assert torch.equal(columns[:end], expected.columns[:end]) and torch.equal(kinds[:end], expected.kinds[:end])


@pytest.mark.parametrize("band", BANDS[:4], ids=str)
@pytest.mark.parametrize("len_q, len_kv", LENGTHS, ids=str)
def test_attention_over_lists_is_attention_under_their_mask(len_q, len_kv, band):
    q, k, v, qo, ko = (x.requires_grad_() if x.is_floating_point() else x for x in inputs(len_q, len_kv))
    lists = select_blocks(q, k, qo, ko, ratio=0.4, block_q=16, block_kv=32, **band)
    out, lse = reference.attention(q, k, v, qo, ko, block_lists=lists, return_lse=True, **band)
    chosen = dense_mask(lists, grid_of(qo, len(q), 16), 8)
    expected, expected_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for b, (n, m) in enumerate(zip(len_q, len_kv)):
        rows, keys = slice(sum(len_q[:b]), sum(len_q[: b + 1])), slice(sum(len_kv[:b]), sum(len_kv[: b + 1]))
        for h in range(4):
            pairs = chosen[h, b].repeat_interleave(16, 0)[:n].repeat_interleave(32, 1)[:, :m]
            pairs = pairs & Band.make(**band).dense(n, m)
            scores = (q[rows, h] @ k[keys, h // 2].T * 8**-0.5).masked_fill(~pairs, -math.inf)
            expected_lse[h, rows] = torch.logsumexp(scores, 1) if m else -math.inf
            weights = torch.softmax(scores, 1).nan_to_num() if m else scores
            expected[rows, h] = weights @ v[keys, h // 2]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_gradients_follow_the_lists():
    q, k, v, qo, ko = inputs([20, 0, 5], [40, 3, 16], dim=4, heads=2, kv_heads=1)
    lists = select_blocks(q, k, qo, ko, ratio=0.4, block_q=16, block_kv=16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda *t: reference.attention(*t, qo, ko, block_lists=lists, return_lse=True)[0], leaves, fast_mode=True
    )


def test_ones_own_masks_become_lists():
    len_q, len_kv = [40, 0, 20], [50, 10, 20]
    g = torch.Generator().manual_seed(3)
    masks = [torch.rand(2, -(-n // 16), -(-m // 16), generator=g) < 0.5 for n, m in zip(len_q, len_kv)]
    qo, ko = offsets_from_lengths(len_q), offsets_from_lengths(len_kv)
    sides = dict(total_q=60, total_kv=80)
    lists = lists_from_mask(masks, qo, ko, **sides, causal=True, block_q=16, block_kv=16)
    check_lists(lists, qo, ko, **sides, num_heads=4, num_kv_heads=2, causal=True)
    found = lists_of(lists, grid_of(qo, 60, 16))
    for (h, b, i), listed in found.items():
        kinds = block_kinds(Band.make(True), len_q[b], len_kv[b], 16, 16)
        assert [j for j, _ in listed] == [j for j in range(kinds.shape[1]) if masks[b][h, i, j] and kinds[i, j]]
    with pytest.raises(ValueError, match=r"masks\[2\] must be \[2, 2, 2\]"):
        lists_from_mask([*masks[:2], masks[0]], qo, ko, **sides, block_q=16, block_kv=16)


BAD = {
    "twice": (dict(columns={1: 0}), "key block 0 is listed twice .head 0, sequence 0, query block 0."),
    "falling": (dict(columns={0: 2, 1: 1}), "key block 1 follows a later one"),
    "outside": (dict(columns={2: 4}), "key block 4 is outside the sequence, which has 4"),
    "negative": (dict(columns={0: -1}), "key block -1 is outside"),
    "starts fall": (dict(starts={1: 9}), "starts must begin at 0, never fall"),
    "starts too far": (dict(starts={-1: 99}), "starts must begin at 0"),
    "full though cut": (dict(kinds={3: 2}), "key block 3 is marked FULL, but needs a mask"),
    "no such kind": (dict(kinds={0: 7}), "neither PARTIAL nor FULL"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lists_are_refused_by_name(name):
    changes, message = BAD[name]
    q, k, _, qo, ko = inputs([20, 30], [50, 40], heads=1, kv_heads=1)
    sides = dict(total_q=50, total_kv=90, num_heads=1, num_kv_heads=1)
    lists = select_blocks(q, k, qo, ko, ratio=1.0, block_q=16, block_kv=16)
    check_lists(lists, qo, ko, **sides)
    for field, values in changes.items():
        x = getattr(lists, field).clone()
        for at, value in values.items():
            x[at] = value
        lists = replace(lists, **{field: x})
    with pytest.raises(ValueError, match=message):
        check_lists(lists, qo, ko, **sides)
    check_lists(lists, qo, ko, **sides, contents=False)


def test_lists_of_another_shape_are_refused():
    q, k, _, qo, ko = inputs([20, 30], [50, 40])
    lists = select_blocks(q, k, qo, ko, ratio=1.0, block_q=16, block_kv=16)
    sides = dict(total_q=50, total_kv=90, num_heads=4, num_kv_heads=2)
    with pytest.raises(ValueError, match="rows = 7"):
        check_lists(lists, qo, ko, **sides | dict(total_q=90), contents=False)
    with pytest.raises(ValueError, match="heads must be 1, 2 or 6, got 4"):
        check_lists(lists, qo, ko, **sides | dict(num_heads=6), contents=False)
    with pytest.raises(TypeError, match="columns must be a 1-D torch.int32 tensor, got torch.int64"):
        check_lists(replace(lists, columns=lists.columns.long()), qo, ko, **sides, contents=False)
    with pytest.raises(TypeError, match="must be a jfa.block_sparse.BlockLists, got dict"):
        check_lists({}, qo, ko, **sides)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ratio=0), "ratio must be a number in"),
        (dict(ratio=1.5), "ratio must be a number in"),
        (dict(ratio=True), "ratio must be a number in"),
        (dict(keep=("middle",)), "keep must be a sequence of 'diagonal', 'first', 'last', got 'middle'"),
        (dict(keep="first"), "keep must be a sequence"),
        (dict(block_q=24), "block_q must be a power of two from 16 on, got 24"),
    ],
)
def test_bad_wishes_are_named(change, message):
    q, k, _, qo, ko = inputs([20], [50])
    with pytest.raises(ValueError, match=message):
        select_blocks(q, k, qo, ko, **dict(ratio=0.5) | change)


def test_wrong_offsets_stay_inside():
    q, k, v, _, _ = inputs([50], [90])
    for lies in ([-5, 70, 20, 200], [0, 1 << 30, 3, 50], [50, 40, 30, 20]):
        offsets = torch.tensor(lies, dtype=torch.int32)
        lists = select_blocks(q, k, offsets, offsets, ratio=0.5, block_q=16, block_kv=16)
        grid = grid_of(offsets, 50, 16)
        assert (grid.begin >= 0).all() and (grid.begin + grid.exist <= 50).all()
        turned = transpose(lists, offsets, offsets, total_q=50, total_kv=90)
        assert int(turned.starts[-1]) <= lists.columns.numel()


# ------------------------------------------------------------------------------------------------------------------ the op
def call(q, k, v, qo, ko, lists, **options):
    return jfa.jagged_flash_attention(q, k, v, qo, ko, block_lists=lists, return_lse=True, **options)


def problem(dtype=torch.float64):
    q, k, v, qo, ko = inputs([40, 0, 20], [50, 9, 40], dtype=dtype)
    return (
        *(x.requires_grad_() for x in (q, k, v)),
        qo,
        ko,
        select_blocks(q, k, qo, ko, ratio=0.4, block_q=16, block_kv=16),
    )


def test_the_op_attends_over_lists_and_so_does_its_backward():
    q, k, v, qo, ko, lists = problem()
    out, lse = call(q, k, v, qo, ko, lists)
    expected, expected_lse = reference.attention(q, k, v, qo, ko, block_lists=lists, return_lse=True)
    torch.testing.assert_close((out, lse), (expected, expected_lse))
    assert not torch.allclose(out, jfa.jagged_flash_attention(q, k, v, qo, ko))
    grad, finite = torch.randn_like(out), torch.isfinite(lse)
    got = torch.autograd.grad((out, lse[finite]), (q, k, v), (grad, torch.ones_like(lse[finite])))
    want = torch.autograd.grad((expected, expected_lse[finite]), (q, k, v), (grad, torch.ones_like(lse[finite])))
    torch.testing.assert_close(got, want)


def test_tracers_see_the_same_op():
    q, k, v, qo, ko, lists = problem()
    expected = call(q, k, v, qo, ko, lists)
    grads = torch.autograd.grad(expected[0].sum(), (q, k, v))
    arguments = (
        q,
        k,
        v,
        *op.op_arguments(op.Call(_problem_of(q, k, v, qo, ko, lists), "reference", None, True, qo), qo, ko, None),
    )
    torch.library.opcheck(torch.ops.jfa.attention, arguments)
    out, _ = torch.ops.jfa.attention(*arguments)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), grads)
    by_func = torch.func.grad(lambda x: call(x, k.detach(), v.detach(), qo, ko, lists)[0].sum())(q.detach())
    torch.testing.assert_close(by_func, grads[0])
    compiled = torch.compile(lambda *x: call(*x, qo, ko, lists)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), expected[0])


def _problem_of(q, k, v, qo, ko, lists):
    return jfa.attention.make_problem(q, k, v, qo, ko, None, 8**-0.5, Band(), False, False, 0, 0, lists)


def test_lists_changed_before_the_backward_are_an_error():
    q, k, v, qo, ko, lists = problem()
    out, _ = call(q, k, v, qo, ko, lists)
    lists.columns.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_op_names_bad_lists_and_backends_without_them():
    q, k, v, qo, ko, lists = problem()
    lists.columns[0] = 77
    with pytest.raises(ValueError, match="block_lists: key block 77 is outside"):
        call(q, k, v, qo, ko, lists)
    with pytest.raises(TypeError, match="block_lists must be a jfa.block_sparse.BlockLists, got list"):
        call(q, k, v, qo, ko, [lists])
    with pytest.raises(ValueError, match="rows = 6"):
        call(q, k, v, qo, ko, replace(lists, rows=9))
    with pytest.raises(ValueError, match="backend 'blackwell' walks block_lists with blocks of 128, not of 16 queries"):
        jfa.explain(*(x.detach().bfloat16() for x in (q, k, v)), qo, ko, backend="blackwell", block_lists=problem()[-1])


def test_lists_and_the_reference_need_no_triton():
    """Chapters 00 to 02 run without Triton, and the op's path for CPU tensors imports this module."""
    code = "import sys; sys.modules['triton'] = None; import jfa.block_sparse, jfa.reference, jfa.kernels.reference"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_plan_made_without_lists_is_refused_beside_them():
    """A dense plan's tiles have other sizes than the lists' blocks: walking them would give wrong numbers."""
    q, k, v, qo, ko, lists = problem(torch.float32)
    made = jfa.plan(qo, ko, rows_q=len(q), rows_kv=len(k), num_heads=4, num_kv_heads=2, head_dim=8, dtype=q.dtype)
    for function in (jfa.jagged_flash_attention, jfa.explain):
        with pytest.raises(ValueError, match="plan was built for block_lists = None, but this call has some"):
            function(q, k, v, qo, ko, plan=made, block_lists=lists)


@pytest.mark.parametrize("backend", ["reference", "portable", "hopper", "blackwell"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_carries_its_lists_and_their_transpose(backend, deterministic, monkeypatch):
    """A call with the plan says the same as one with the lists, and does not transpose them again."""
    q, k, v, qo, ko = inputs([140, 0, 20], [150, 9, 40], heads=2, kv_heads=1, dim=64, dtype=torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    lists = select_blocks(q, k, qo, ko, ratio=0.5)
    facts = dict(rows_q=len(q), rows_kv=len(k), num_heads=2, num_kv_heads=1, head_dim=64, deterministic=deterministic)
    made = jfa.plan(qo, ko, **facts, backend=backend, block_lists=lists)
    results = []
    for given in (dict(plan=made), dict(plan=made, block_lists=lists), dict(backend=backend, block_lists=lists)):
        out, lse = jfa.jagged_flash_attention(q, k, v, qo, ko, deterministic=deterministic, return_lse=True, **given)
        if "plan" in given:
            monkeypatch.setattr(transposing, "transpose", _no_more)
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
        monkeypatch.undo()
    for result in results[:2]:
        torch.testing.assert_close(result, results[2], equal_nan=True)
    assert jfa.explain(q, k, v, qo, ko, deterministic=deterministic, plan=made).backend == backend


def _no_more(*args, **options):
    raise AssertionError("the plan's transpose was there")


def test_a_plan_refuses_other_lists_and_bad_ones():
    q, k, v, qo, ko, lists = problem(torch.float32)
    facts = dict(rows_q=len(q), rows_kv=len(k), num_heads=4, num_kv_heads=2, head_dim=8, dtype=q.dtype)
    made = jfa.plan(qo, ko, **facts, block_lists=lists)
    other = select_blocks(q, k, qo, ko, ratio=1.0, block_q=16, block_kv=16)
    for function in (jfa.jagged_flash_attention, jfa.explain):
        with pytest.raises(ValueError, match="plan was built for other block_lists"):
            function(q, k, v, qo, ko, plan=made, block_lists=other)
    with pytest.raises(ValueError, match="rows = 6"):
        jfa.plan(qo, ko, **facts, block_lists=replace(lists, rows=9))
    with pytest.raises(TypeError, match="block_lists must be"):
        jfa.plan(qo, ko, **facts, block_lists=[lists])


@pytest.mark.parametrize("name", ["block", "other_block"])
@pytest.mark.parametrize("rows", [0, -16, None, 16.0, True, "16"])
def test_blocks_without_rows_are_named(name, rows):
    q, k, v, qo, ko, lists = problem(torch.float32)
    with pytest.raises(ValueError, match=f"block_lists.{name} must be a positive number of rows"):
        call(q, k, v, qo, ko, replace(lists, **{name: rows}))


@pytest.mark.parametrize("block_q, block_kv", [(8, 16), (16, 24), (48, 16), (1, 16)])
def test_the_portable_kernels_name_blocks_that_they_cannot_walk(block_q, block_kv):
    q, k, v, qo, ko, _ = problem(torch.float32)
    sizes = [[-(-n // block) for n in o.diff().tolist()] for o, block in ((qo, block_q), (ko, block_kv))]
    masks = [torch.ones(n, m, dtype=torch.bool) for n, m in zip(*sizes)]
    lists = lists_from_mask(masks, qo, ko, total_q=len(q), total_kv=len(k), block_q=block_q, block_kv=block_kv)
    torch.testing.assert_close(call(q, k, v, qo, ko, lists)[0], jfa.jagged_flash_attention(q, k, v, qo, ko))
    with pytest.raises(ValueError, match="walks block_lists with blocks of a power of two from 16 on"):
        call(q, k, v, qo, ko, lists, backend="portable")
