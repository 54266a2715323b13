"""Checks of chapter 02: masked softmax, merging, blockwise attention alone, packed, with GQA, shared queries."""

import math

import torch

from jfa.course import kinds
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output

FORBID = ("softmax", "jfa.layout", "nested")


def _offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def _dense(q, k, v, allowed=None):
    """Return reference for one sequence and head: (out [n, D], lse [n]); rows without keys 0 and -inf."""
    scores = q @ k.T / q.shape[1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if not k.shape[0]:
        return torch.zeros(len(q), v.shape[1], dtype=q.dtype), torch.full((len(q),), -math.inf, dtype=q.dtype)
    return torch.softmax(scores, 1) @ v, torch.logsumexp(scores, 1)


# ------------------------------------------------------------------------------------------------------------ 2.1
def _softmax_cases(seed):
    g = _generator(seed)

    def case(name, rows, columns, scale=1.0, lift=0.0, share=0.7, poison=0.0, empty=()):
        scores = scale * torch.randn(rows, columns, generator=g) + lift
        allowed = torch.rand(rows, columns, generator=g) < share
        allowed[torch.arange(rows), torch.arange(rows) % columns] = True  # no row is empty by accident
        allowed[list(empty)] = False
        scores = torch.where(allowed, scores, scores + poison)
        return Case(name, (scores, allowed))

    names = kinds.MODERATE
    hard = kinds.score_rows(names, 40, 16, g)
    mask = torch.rand(hard.shape, generator=g) < 0.7
    wild = torch.randn(4, 6, generator=g)
    seen = torch.tensor([[True, False, True, False, True, False], [False] * 5 + [True], [False] * 6, [True] * 6])
    for r in range(3):
        kinds.poison(wild[r], ~seen[r])

    return [
        case("two rows, everything allowed", 2, 3, share=2.0),
        case("a mask", 4, 6),
        case("scores near 300", 3, 8, lift=300.0),
        case("scores of thousands", 5, 9, scale=3000.0),
        case("all scores near -300", 3, 8, lift=-300.0),
        case("forbidden scores far larger than all others", 5, 7, poison=1000.0),
        case("rows with nothing allowed", 6, 5, empty=(1, 4)),
        case("a row of 200", 3, 200, scale=4.0),
        Case("scores that need the maximum, one kind per row", (hard, mask), labels=tuple(names)),
        Case("forbidden scores of NaN and infinities", (wild, seen)),
        case("all scores near -9,997", 4, 9, scale=0.5, lift=-9997.0),
    ]


def _softmax_reference(scores, allowed):
    scores = scores.masked_fill(~allowed, -math.inf)
    weights = torch.softmax(scores, 1).masked_fill(~allowed, 0.0)
    return weights, torch.logsumexp(scores, 1)


_SOFTMAX = Exercise(
    id="2.1",
    title="A softmax with a mask, and its LSE",
    name="masked_softmax",
    cases=_softmax_cases,
    reference=_softmax_reference,
    outputs=(Output("weights", ("row", "column")), Output("lse", ("row",))),
    difficulty=1,
    minutes=20,
    hints=(
        "Set the scores that are not allowed to -inf before you look for the maximum: exp(-inf) is 0.",
        "A row with nothing allowed has the maximum -inf, and -inf - (-inf) is NaN. Which number could stand in "
        "for it?",
        "top = row maximum of the masked scores, with 0 where it is -inf; weights = exp(scores - top); lse = top + "
        "log(sum); divide "
        "by the sum, or by 1 where it is 0.",
    ),
    forbid=FORBID,
    mutants=(
        Mutant(
            "maximum over forbidden scores",
            "The maximum was taken before masking. A forbidden score far above the others makes every exponential "
            "vanish.",
            edit=(
                "scores = torch.where(allowed, scores, -torch.inf)\n    top = scores.amax(1, keepdim=True)",
                "top = scores.amax(1, keepdim=True)\n    scores = torch.where(allowed, scores, -torch.inf)",
            ),
        ),
        Mutant(
            "maximum never below 0",
            "The maximum cannot go below 0 here. Where all scores are very negative, every exponential vanishes.",
            edit=("top = torch.where(top == -torch.inf, 0.0, top)", "top = top.clamp(min=0.0)"),
        ),
        Mutant(
            "no maximum taken off",
            "exp of a large score is infinite in float32, and inf / inf is NaN.",
            caught_by="returns",
            edit=(("torch.exp(scores - top)", "torch.exp(scores)"), ("top + torch.log(total)", "torch.log(total)")),
            expect="NaN",
        ),
        Mutant(
            "the mask is added",
            "The mask was added. A forbidden score may be NaN or infinite, and NaN - inf is NaN: it must be replaced.",
            caught_by="returns",
            edit=("torch.where(allowed, scores, -torch.inf)", "scores + torch.where(allowed, 0.0, -torch.inf)"),
            expect="NaN",
        ),
        Mutant(
            "-1e9 instead of -inf",
            "A row with nothing allowed became an average over everything: -1e9 is a score like any other once all "
            "are -1e9.",
            edit=("scores, -torch.inf)", "scores, -1e9)"),
        ),
        Mutant(
            "LSE without the maximum",
            "The LSE lacks the maximum that was taken off the scores.",
            edit=("lse = top + torch.log(total)", "lse = torch.log(total)"),
        ),
        Mutant(
            "LSE to the base 2",
            "The LSE is a logarithm to the base 2 in part. It is natural throughout.",
            edit=("torch.log(total)", "torch.log2(total)"),
        ),
        Mutant(
            "empty rows are NaN",
            "A row with nothing allowed divides 0 by 0.",
            caught_by="returns",
            edit=("torch.where(total > 0, total, 1.0)", "total"),
            expect="NaN",
        ),
        Mutant(
            "-1e4 in masked places",
            "Forbidden scores became -1e4, which is a score like any other once all are nearly as low.",
            edit=("scores, -torch.inf)", "scores, -1e4)"),
        ),
    ),
    variants=(
        """
def masked_softmax(scores, allowed):
    weights, lse = torch.zeros_like(scores), torch.full((len(scores),), -torch.inf)
    for r in range(len(scores)):
        s = scores[r][allowed[r]]
        if len(s):
            e = torch.exp(s - s.max())
            weights[r, allowed[r]] = e / e.sum()
            lse[r] = s.max() + torch.log(e.sum())
    return weights, lse
""",
        """
def masked_softmax(scores, allowed):
    s = scores.double().masked_fill(~allowed, float("-inf"))
    top = s.max(dim=1).values.clamp(min=-1e30)
    lse = top + (s - top[:, None]).exp().sum(1).log()
    return (s - lse.clamp(min=-1e30)[:, None]).exp().float(), lse.float()
""",
        """
def masked_softmax(scores, allowed):
    s = scores.masked_fill(~allowed, -torch.inf)
    lse = torch.logcumsumexp(s, 1)[:, -1]
    return torch.where(allowed, torch.exp(s - lse[:, None]), 0.0), lse
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 2.2
def _merge_cases(seed):
    g = _generator(seed)

    def part(rows, dim, lift=0.0, empty=()):
        m = torch.randn(rows, generator=g) + lift
        l, acc = torch.rand(rows, generator=g) + 1.0, torch.randn(rows, dim, generator=g)
        for r in empty:
            m[r], l[r], acc[r] = -math.inf, 0.0, 0.0
        return m, l, acc

    return [
        Case("one query", (*part(1, 2), *part(1, 2))),
        Case("four queries", (*part(4, 3), *part(4, 3, 1.0))),
        Case("scores near 300 and near -300", (*part(3, 4, 300.0), *part(3, 4, -300.0))),
        Case("both near -300", (*part(3, 4, -300.0), *part(3, 4, -301.0))),
        Case("one above 90, one near 0", (*part(3, 4, 95.0), *part(3, 4))),
        Case("near -30,000 and near -30,100", (*part(3, 4, -30000.0), *part(3, 4, -30100.0))),
        Case("one half saw no key for some queries", (*part(5, 4, empty=(0, 2)), *part(5, 4, empty=(4,)))),
        Case("neither half saw a key", (*part(3, 4, empty=(1,)), *part(3, 4, empty=(1,)))),
        Case("two hundred queries", (*part(200, 8, 3.0), *part(200, 8))),
    ]


def _merge_reference(m1, l1, acc1, m2, l2, acc2):
    m = torch.maximum(m1, m2)
    safe = m.masked_fill(m == -math.inf, 0.0)
    a, b = torch.exp(m1 - safe), torch.exp(m2 - safe)
    return m, l1 * a + l2 * b, acc1 * a[:, None] + acc2 * b[:, None]


_MERGE = Exercise(
    id="2.2",
    title="Merge two halves",
    name="merge",
    cases=_merge_cases,
    reference=_merge_reference,
    outputs=(Output("m", ("query",)), Output("l", ("query",)), Output("acc", ("query", "dim"))),
    difficulty=2,
    minutes=15,
    hints=(
        "Which maximum is right for both halves together? Each half was summed with its own.",
        "A half's sum is made for its own maximum. To move it to the common one, multiply by exp(its maximum - the "
        "common one).",
        "m = maximum of both; share1 = exp(m1 - m), share2 = exp(m2 - m); l and acc are weighted sums with those "
        "shares. Where m is -inf, "
        "use 0 in its place inside exp.",
    ),
    forbid=FORBID,
    limits=(
        Limit("few exponentials", "exponentials", at_most=2, text="at most 2 exponentials"),
        Limit("stays in torch", "python_floats", at_most=0, text="no number leaves torch as a Python float"),
    ),
    mutants=(
        Mutant(
            "sums added as they are",
            "l1 and l2 were added as they are, though each was made with its own maximum.",
            edit=("l1 * share1 + l2 * share2", "l1 + l2"),
        ),
        Mutant(
            "acc not rescaled",
            "l is right, but the two acc were added without rescaling.",
            edit=("acc1 * share1[:, None] + acc2 * share2[:, None]", "acc1 + acc2"),
        ),
        Mutant(
            "shares exchanged",
            "Each half was multiplied with the other half's share.",
            edit=("torch.exp(m1 - anchor), torch.exp(m2 - anchor)", "torch.exp(m2 - anchor), torch.exp(m1 - anchor)"),
        ),
        Mutant(
            "normalized too early",
            "acc was divided by l. The merged acc stays unnormalized, as those of the halves are.",
            edit=("return m, l, acc", "return m, l, acc / torch.where(l > 0, l, 1.0)[:, None]"),
        ),
        Mutant(
            "no care for -inf",
            "Where neither half saw a key, -inf - (-inf) is NaN.",
            caught_by="returns",
            edit=("torch.where(m == -torch.inf, 0.0, m)", "m"),
            expect="NaN",
        ),
        Mutant(
            "no common maximum",
            "l and acc were moved to the maximum 0, not to the m that is returned (and exp of a score of 300 is "
            "infinite).",
            edit=("torch.where(m == -torch.inf, 0.0, m)", "torch.zeros_like(m)"),
        ),
        Mutant(
            "an exponential for each sum",
            "Right, with twice the exponentials that are needed.",
            caught_by="few exponentials",
            edit=(
                "acc1 * share1[:, None] + acc2 * share2[:, None]",
                "acc1 * torch.exp(m1 - anchor)[:, None] + acc2 * torch.exp(m2 - anchor)[:, None]",
            ),
            expect="2",
        ),
        Mutant(
            "exponentials by other names",
            "exp2 and powers of e are exponentials, too.",
            caught_by="few exponentials",
            edit=(
                "acc1 * share1[:, None] + acc2 * share2[:, None]",
                "acc1 * 2.718281828459045 ** (m1 - anchor)[:, None] + acc2 * torch.exp2((m2 - anchor) * 1.4426950408889634)[:, None]",
            ),
            expect="2",
        ),
        Mutant(
            "query by query in Python",
            "Right, with math.exp of Python floats.",
            caught_by="stays in torch",
            source="""
import math


def merge(m1, l1, acc1, m2, l2, acc2):
    m, l, acc = torch.maximum(m1, m2), torch.zeros_like(l1), torch.zeros_like(acc1)
    for i, (a, b) in enumerate(zip(m1.tolist(), m2.tolist())):
        top = max(a, b) if max(a, b) > -math.inf else 0.0
        l[i] = math.exp(a - top) * l1[i] + math.exp(b - top) * l2[i]
        acc[i] = math.exp(a - top) * acc1[i] + math.exp(b - top) * acc2[i]
    return m, l, acc
""",
            expect="Python float",
        ),
    ),
    variants=(
        """
def merge(m1, l1, acc1, m2, l2, acc2):
    both = torch.stack([m1, m2])
    m = both.max(0).values
    share = torch.exp(both - m.clamp(min=-1e30))
    l = (torch.stack([l1, l2]) * share).sum(0)
    acc = (torch.stack([acc1, acc2]) * share[..., None]).sum(0)
    return m, l, acc
""",
        """
def merge(m1, l1, acc1, m2, l2, acc2):
    swap = m2 > m1
    big, small = torch.where(swap, m2, m1), torch.where(swap, m1, m2)
    factor = torch.exp(small - torch.where(big.isinf(), torch.zeros_like(big), big))
    one, zero = torch.where(swap, factor, 1.0), torch.where(swap, 1.0, factor)
    return big, one * l1 + zero * l2, one[:, None] * acc1 + zero[:, None] * acc2
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 2.3
def _causal_cases(seed):
    g = _generator(seed)

    def case(name, n, dim, block, scale=1.0, lift=0.0):
        q, k, v = (torch.randn(n, dim, generator=g) for _ in range(3))
        if lift:
            q, k = q * 0.1 + 4.0, k * 0.1 + lift
        return Case(name, (q * scale, k * scale, v, block))

    def hard(kind):
        q, k = kinds.query_and_key(kind, 40, 40, 8, 16, g)
        return Case(kinds.SCORES[kind].says, (q, k, torch.randn(40, 8, generator=g), 16))

    return [
        case("one token", 1, 4, 4),
        case("one block", 4, 4, 4),
        case("a last block of one key", 9, 4, 4),
        case("blocks of one key", 5, 8, 1),
        case("33 tokens, large scores", 33, 8, 16, scale=6.0),
        case("all scores near -100", 33, 8, 16, lift=-9.0),
        case("200 tokens", 200, 8, 16),
        *map(hard, kinds.SCORES),
    ]


def _whole_blocks(case):
    return len(case.args[0]) // case.args[3]


def _alive(columns):
    """Return LIVE times the elements that one tensor of scores or of the output may have; small cases say nothing about memory."""
    return lambda case: LIVE * columns(case) if columns(case) >= 1000 else None


LIVE = 12
ALIVE = "no more than 12 times that alive at the same time"


def _causal_reference(q, k, v, block):
    n = len(q)
    return _dense(q, k, v, torch.ones(n, n, dtype=torch.bool).tril())


_CAUSAL = Exercise(
    id="2.3",
    title="Blockwise causal attention",
    name="causal_attention",
    cases=_causal_cases,
    reference=_causal_reference,
    outputs=(Output("out", ("query", "dim")), Output("lse", ("query",))),
    difficulty=2,
    minutes=35,
    tol=2e-5,
    hints=(
        "Keep m, l and acc for all queries. For each block of keys: scores, mask, new maximum, rescale what you "
        "have, add.",
        "The mask of a block compares the key's number, start + 0, 1, 2, ..., with the query's number. It is n x "
        "block, not n x n.",
        "shrink = exp(m - new_m) multiplies both l and acc before the block's own sums are added. In the end out = "
        "acc / l and lse = m + log(l).",
    ),
    forbid=FORBID,
    limits=(
        Limit(
            "blockwise",
            "peak_numel",
            at_most=lambda case: len(case.args[0]) * max(case.args[3], case.args[0].shape[1]),
            text="no tensor with more than n x max(block, D) elements",
        ),
        Limit(
            "little memory",
            "live_numel",
            at_most=_alive(lambda case: len(case.args[0]) * max(case.args[3], case.args[0].shape[1])),
            text=ALIVE,
        ),
        Limit(
            "whole blocks",
            lambda case: f"exp_axis:{case.args[3]}",
            at_least=_whole_blocks,
            text="one exponential for the scores of a whole block of keys",
        ),
    ),
    mutants=(
        Mutant(
            "the whole matrix of scores",
            "Right, but all n x n scores exist at once.",
            caught_by="blockwise",
            source="""
def causal_attention(q, k, v, block):
    n = len(q)
    scores = q @ k.T / q.shape[1] ** 0.5
    scores = torch.where(torch.arange(n) <= torch.arange(n)[:, None], scores, -torch.inf)
    top = scores.amax(1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(1, keepdim=True)
    return weights @ v / total, (top + torch.log(total))[:, 0]
""",
            expect="n x max(block, D)",
        ),
        Mutant(
            "scores in a list of rows",
            "Right, but a list of n rows of n scores is the whole matrix as well.",
            caught_by="little memory",
            source="""
def causal_attention(q, k, v, block):
    n = len(q)
    scores = [torch.where(torch.arange(n) >= j, q @ k[j] / q.shape[1] ** 0.5, -torch.inf) for j in range(n)]
    top = scores[0]
    for s in scores:
        top = torch.maximum(top, s)
    weights = [torch.exp(s - top) for s in scores]
    total = sum(weights)
    return sum(w[:, None] * v[j] for j, w in enumerate(weights)) / total[:, None], top + total.log()
""",
            expect="at the same time",
        ),
        Mutant(
            "one key at a time",
            "Right, but block is not used: every step takes a single key.",
            caught_by="whole blocks",
            edit=("n, dim = q.shape", "n, dim = q.shape\n    block = 1"),
            expect="whole block",
        ),
        Mutant(
            "query by query, all keys at once",
            "Right, but there are no blocks of keys: each query takes all its keys at once.",
            caught_by="whole blocks",
            source="""
def causal_attention(q, k, v, block):
    out, lse = torch.empty_like(v), torch.empty(len(q))
    for i in range(len(q)):
        s = k[: i + 1] @ q[i] / q.shape[1] ** 0.5
        e = torch.exp(s - s.max())
        out[i], lse[i] = e @ v[: i + 1] / e.sum(), s.max() + e.sum().log()
    return out, lse
""",
            expect="whole block",
        ),
        Mutant(
            "maximum starts at 0",
            "The running maximum starts at 0. Where all scores are very negative, every exponential vanishes.",
            edit=("m = q.new_full((n, 1), -torch.inf)", "m = q.new_zeros(n, 1)"),
        ),
        Mutant(
            "acc not rescaled",
            "acc was not rescaled when the maximum rose, so early keys weigh too much.",
            edit=("acc * shrink + weights", "acc + weights"),
        ),
        Mutant(
            "l not rescaled",
            "l was not rescaled when the maximum rose, so the output is too small.",
            edit=("l * shrink + weights", "l + weights"),
        ),
        Mutant(
            "no mask",
            "Queries see keys that come after them.",
            edit=("torch.where(column <= row, scores, -torch.inf)", "scores + 0.0"),
        ),
        Mutant(
            "key numbers restart in each block",
            "The mask counts the keys of each block from 0 again.",
            edit=("torch.arange(start, min(start + block, n))", "torch.arange(0, min(block, n - start))"),
        ),
        Mutant(
            "the diagonal is masked",
            "A query must see the key at its own place: with < in place of <= the first query sees nothing.",
            caught_by="returns",
            edit=("column <= row", "column < row"),
            expect="NaN",
        ),
        Mutant(
            "no scale",
            "The scores were not scaled by 1/sqrt(D).",
            edit=(" / dim**0.5", ""),
        ),
        Mutant(
            "each block a softmax of its own",
            "Every block was normalized by itself and the results were added.",
            source="""
def causal_attention(q, k, v, block):
    n, dim = q.shape
    out, lse = torch.zeros_like(v), q.new_full((n,), -torch.inf)
    for start in range(0, n, block):
        column = torch.arange(start, min(start + block, n))
        scores = q @ k[column].T / dim**0.5
        scores = torch.where(column <= torch.arange(n)[:, None], scores, -1e30)
        top = scores.amax(1, keepdim=True)
        weights = torch.exp(scores - top) * (scores > -1e29)
        total = weights.sum(1, keepdim=True)
        out = out + weights @ v[column] / total.clamp(min=1e-30)
        lse = torch.logaddexp(lse, (top + torch.log(total))[:, 0])
    return out, lse
""",
        ),
    ),
    variants=(
        """
def causal_attention(q, k, v, block):
    n, dim = q.shape
    q = q * dim ** -0.5
    m, l, acc = torch.full((n,), -1e30), torch.zeros(n), torch.zeros(n, dim)
    for start in range(0, n, block):
        seen = slice(start, n)                      # queries before the block see none of it
        cols = torch.arange(start, min(start + block, n))
        s = q[seen] @ k[cols].T
        s = s.masked_fill(cols > torch.arange(start, n)[:, None], -1e30)
        new = torch.maximum(m[seen], s.max(1).values)
        p, f = torch.exp(s - new[:, None]), torch.exp(m[seen] - new)
        l[seen] = l[seen] * f + p.sum(1)
        acc[seen] = acc[seen] * f[:, None] + p @ v[cols]
        m[seen] = new
    return acc / l[:, None], m + l.log()
""",
        """
def causal_attention(q, k, v, block):
    n, dim = q.shape
    out, lse = torch.empty_like(v), torch.empty(n)
    for i in range(n):                              # one query at a time, its own keys only
        m, l, acc = float("-inf"), torch.tensor(0.0), torch.zeros(dim)
        for start in range(0, i + 1, block):
            end = min(start + block, i + 1)
            s = k[start:end] @ q[i] / dim ** 0.5
            new = max(m, float(s.max()))
            f = torch.exp(torch.tensor(m - new))
            p = torch.exp(s - new)
            l, acc, m = l * f + p.sum(), acc * f + p @ v[start:end], new
        out[i], lse[i] = acc / l, m + torch.log(l)
    return out, lse
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 2.4
def _packed_cases(seed):
    g = _generator(seed)

    def case(name, len_q, len_kv, dim=8, block=16, slack=0, wild=None, scale=1.0):
        q = torch.randn(sum(len_q), dim, generator=g) * scale
        k, v = (torch.randn(sum(len_kv) + slack, dim, generator=g) for _ in range(2))
        q_offsets, k_offsets = _offsets(len_q), _offsets(len_kv)
        if slack:
            k[-slack:] = v[-slack:] = float("nan")
        if wild is not None:  # a neighbor whose numbers would be seen anywhere
            mine = slice(int(k_offsets[wild]), int(k_offsets[wild + 1]))
            k[mine], v[mine] = k[mine] * 30, v[mine] * 30
        return Case(name, (q, k, v, q_offsets, k_offsets, block), offsets=tuple(q_offsets.tolist()))

    def hard(name, names):
        q, k, q_offsets, k_offsets = kinds.packed(names, 10, 40, 8, 16, g)
        v = torch.randn(len(k), 8, generator=g)
        return Case(name, (q, k, v, q_offsets, k_offsets, 16), offsets=tuple(q_offsets.tolist()), labels=tuple(names))

    return [
        case("two sequences", [2, 3], [3, 2], dim=4, block=2),
        case("an empty query side", [3, 0, 2], [2, 4, 3], dim=4, block=2),
        case("an empty key side", [3, 2], [0, 5], dim=4, block=2),
        case("poisoned rows behind the last offset", [3, 4], [5, 3], block=4, slack=3),
        case("a loud neighbor", [4, 3, 5], [6, 7, 5], block=4, wild=1),
        case("ragged, large scores", [5, 0, 33, 1, 17], [17, 3, 20, 0, 33], scale=20.0),
        case("one of 200", [5, 200, 1], [9, 200, 0], slack=5),
        case("blocks of 3", [2, 3, 1], [7, 0, 8], dim=4, block=3),
        case("sequences of one key", [3, 1, 2], [1, 5, 1], dim=4, block=4),
        case("blocks of one key", [3, 2], [4, 3], dim=4, block=1),
        hard("scores that need the maximum, one kind per sequence", kinds.MODERATE),
        hard("scores near -30,000", ["near -30000"]),
    ]


def _whole_packed_blocks(case):
    """Return the whole blocks of the sequences that have queries."""
    queries, keys, block = case.args[3].diff(), case.args[4].diff(), case.args[5]
    return int((keys // block * (queries > 0)).sum())


def _packed_reference(q, k, v, q_offsets, k_offsets, block):
    outs, lses = [], []
    for b in range(len(q_offsets) - 1):
        keys = slice(int(k_offsets[b]), int(k_offsets[b + 1]))
        out, lse = _dense(q[int(q_offsets[b]) : int(q_offsets[b + 1])], k[keys], v[keys])
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


_PACKED = Exercise(
    id="2.4",
    title="A packed batch, two lengths each",
    name="packed_attention",
    cases=_packed_cases,
    reference=_packed_reference,
    outputs=(Output("out", ("token", "dim")), Output("lse", ("token",))),
    difficulty=2,
    minutes=45,
    tol=2e-5,
    hints=(
        "An outer loop over sequences, an inner one over blocks of that sequence's keys. Two pairs of bounds: one "
        "for the queries, one for the keys.",
        "Start the inner loop at the sequence's first key and end each block at its last key at the latest, "
        "whatever stands behind it.",
        "range(first, last, block) with end = min(start + block, last). A sequence without keys leaves out at 0 "
        "and lse at -inf, so start from those.",
    ),
    forbid=FORBID,
    limits=(
        Limit(
            "blockwise",
            "peak_numel",
            at_most=lambda case: len(case.args[0]) * max(case.args[5], case.args[0].shape[1]),
            text="no tensor with more than total_q x max(block, D) elements",
        ),
        Limit(
            "little memory",
            "live_numel",
            at_most=_alive(lambda case: len(case.args[0]) * max(case.args[5], case.args[0].shape[1])),
            text=ALIVE,
        ),
        Limit(
            "whole blocks",
            lambda case: f"exp_axis:{case.args[5]}",
            at_least=_whole_packed_blocks,
            text="one exponential for the scores of a whole block of keys",
        ),
    ),
    mutants=(
        Mutant(
            "every sequence from row 0",
            "Every sequence used the first keys of the tensor: its own beginning was not added.",
            edit=(
                "first, last = int(k_offsets[b]), int(k_offsets[b + 1])",
                "first, last = 0, int(k_offsets[b + 1]) - int(k_offsets[b])",
            ),
        ),
        Mutant(
            "the queries' offsets for the keys",
            "The keys were found with the queries' offsets.",
            caught_by="values",
            edit=("int(k_offsets[b]), int(k_offsets[b + 1])", "int(q_offsets[b]), min(int(q_offsets[b + 1]), len(k))"),
        ),
        Mutant(
            "blocks run into the neighbor",
            "The last block of a sequence goes on into the next sequence's keys.",
            edit=("end = min(start + block, last)", "end = min(start + block, len(k))"),
        ),
        Mutant(
            "one softmax over the whole batch",
            "Queries see the keys of all sequences.",
            edit=("first, last = int(k_offsets[b]), int(k_offsets[b + 1])", "first, last = 0, int(k_offsets[-1])"),
        ),
        Mutant(
            "sequences without keys are NaN",
            "A sequence without keys divides 0 by 0.",
            caught_by="returns",
            edit=("if last > first:", "if True:"),
            expect="NaN",
        ),
        Mutant(
            "all scores of a sequence at once",
            "Right, but each sequence's whole matrix of scores exists at once.",
            caught_by="blockwise",
            edit=(
                "for start in range(first, last, block):",
                "block = max(block, len(k))\n        for start in range(first, last, block):",
            ),
            expect="total_q x max(block, D)",
        ),
        Mutant(
            "blocks of 16 whatever block is",
            "Right, but the blocks have 16 keys whatever block says.",
            caught_by="whole blocks",
            edit=("out = torch.zeros_like(q)", "out = torch.zeros_like(q)\n    block = min(16, 4 * block)"),
            expect="whole block",
        ),
        Mutant(
            "acc not rescaled",
            "acc was not rescaled when the maximum rose.",
            edit=("acc * shrink[:, None] + weights", "acc + weights"),
        ),
        Mutant(
            "nothing for a single key",
            "Sequences of one key were taken for sequences without any.",
            edit=("if last > first:", "if last > first + 1:"),
        ),
    ),
    variants=(
        """
def one(q, k, v, block):
    m, l, acc = torch.full((len(q), 1), -1e30), torch.zeros(len(q), 1), torch.zeros_like(q)
    for kb, vb in zip(k.split(block), v.split(block)):
        s = q @ kb.T * q.shape[1] ** -0.5
        new = torch.maximum(m, s.max(1, keepdim=True).values) if kb.shape[0] else m
        p, f = torch.exp(s - new), torch.exp(m - new)
        m, l, acc = new, l * f + p.sum(1, keepdim=True), acc * f + p @ vb
    return acc / l.clamp(min=1e-30), torch.where(l > 0, m + l.log(), -torch.inf)[:, 0]


def packed_attention(q, k, v, q_offsets, k_offsets, block):
    outs, lses = [], []
    qb, kb = q_offsets.tolist(), k_offsets.tolist()
    for i in range(len(qb) - 1):
        o, s = one(q[qb[i]:qb[i + 1]], k[kb[i]:kb[i + 1]], v[kb[i]:kb[i + 1]], block)
        outs.append(o)
        lses.append(s)
    return torch.cat(outs), torch.cat(lses)
""",
        """
def packed_attention(q, k, v, q_offsets, k_offsets, block):
    total, dim = q.shape
    rows = torch.arange(total)
    owner = torch.searchsorted(q_offsets[1:], rows, right=True)
    first, last = k_offsets[:-1][owner], k_offsets[1:][owner]
    m, l, acc = torch.full((total,), -1e30), torch.zeros(total), torch.zeros(total, dim)
    for start in range(0, int(k_offsets[-1]), block):  # every query masks what is not its own
        cols = torch.arange(start, min(start + block, int(k_offsets[-1])))
        s = q @ k[cols].T * dim ** -0.5
        ok = (cols >= first[:, None]) & (cols < last[:, None])
        s = torch.where(ok, s, -torch.inf)
        new = torch.maximum(m, s.max(1).values)
        p, f = torch.exp(s - new[:, None]), torch.exp(m - new)
        m, l, acc = new, l * f + p.sum(1), acc * f[:, None] + p @ v[cols]
    return acc / torch.where(l > 0, l, 1.0)[:, None], torch.where(l > 0, m + torch.log(l), -torch.inf)
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 2.5
def _gqa_cases(seed):
    g = _generator(seed)

    def case(name, n_q, n_kv, heads, kv_heads, dim, block, scale=1.0):
        q = torch.randn(n_q, heads, dim, generator=g) * scale
        k, v = (torch.randn(n_kv, kv_heads, dim, generator=g) for _ in range(2))
        return Case(name, (q, k, v, block))

    def hard(kind):
        q, _ = kinds.query_and_key(kind, 8, 40, 8, 16, g, heads=4)
        _, k = kinds.query_and_key(kind, 8, 40, 8, 16, g, heads=2)
        return Case(kinds.SCORES[kind].says, (q, k, torch.randn(40, 2, 8, generator=g), 16))

    apart = hard("rising")
    apart.args[0][:, 1::2, 1] -= 150.0 * 8**0.5 / 8  # meets 8 in every key
    return [
        case("two heads, two key heads", 4, 8, 2, 2, 4, 4),
        case("four heads, two key heads", 4, 8, 4, 2, 4, 4),
        case("six heads, two key heads, a short last block", 4, 9, 6, 2, 8, 4),
        case("all heads share one", 16, 33, 4, 1, 8, 16, scale=20.0),
        case("200 keys", 16, 200, 8, 2, 8, 16),
        case("blocks of one key", 3, 5, 4, 2, 4, 1),
        Case("every second head's scores lie 150 lower", apart.args),
        *map(hard, kinds.SCORES),
    ]


def _gqa_reference(q, k, v, block):
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    parts = [_dense(q[:, h], k[:, h // group], v[:, h // group]) for h in range(heads)]
    return torch.stack([p[0] for p in parts], 1), torch.stack([p[1] for p in parts], 1)


_GQA = Exercise(
    id="2.5",
    title="Shared key heads (GQA)",
    name="gqa_attention",
    cases=_gqa_cases,
    reference=_gqa_reference,
    outputs=(Output("out", ("query", "head", "dim")), Output("lse", ("query", "head"))),
    difficulty=3,
    minutes=35,
    tol=2e-5,
    hints=(
        "Give the query heads two indices: the key/value head they read, and their number inside that group. Then "
        "K needs no repeating.",
        "q.reshape(n, H_kv, H // H_kv, D) is that split. A loop over the key/value heads with small products is "
        "fine as well.",
        'torch.einsum("ihgd,jhd->ihgj", q_grouped, k_block) gives the scores of a block; "ihgj,jhd->ihgd" with the '
        "weights gives acc.",
    ),
    forbid=FORBID,
    limits=(
        Limit(
            "K and V stay small",
            "peak_numel",
            at_most=lambda case: len(case.args[0]) * case.args[0].shape[1] * max(case.args[3], case.args[0].shape[2]),
            text="no tensor with more than n_q x H x max(block, D) elements",
        ),
        Limit(
            "little memory",
            "live_numel",
            at_most=_alive(
                lambda case: len(case.args[0]) * case.args[0].shape[1] * max(case.args[3], case.args[0].shape[2])
            ),
            text=ALIVE,
        ),
        Limit(
            "whole blocks",
            lambda case: f"exp_axis:{case.args[3]}",
            at_least=lambda case: len(case.args[1]) // case.args[3],
            text="one exponential for the scores of a whole block of keys",
        ),
    ),
    mutants=(
        Mutant(
            "blocks of 4, whatever block is",
            "Right, but block does not decide how many keys are taken together.",
            caught_by="whole blocks",
            edit=("    n, heads, dim = q.shape\n", "    n, heads, dim = q.shape\n    block = 4\n"),
        ),
        Mutant(
            "head h reads h % H_kv",
            "Query head h read key/value head h % H_kv. Neighboring query heads share one: h // (H // H_kv).",
            edit=(
                (
                    "q.reshape(n, kv_heads, heads // kv_heads, dim)",
                    "q.reshape(n, heads // kv_heads, kv_heads, dim).transpose(1, 2)",
                ),
                (
                    "return out.reshape(n, heads, dim), lse.reshape(n, heads)",
                    "return out.transpose(1, 2).reshape(n, heads, dim), lse.transpose(1, 2).reshape(n, heads)",
                ),
            ),
        ),
        Mutant(
            "everybody reads head 0",
            "All query heads read key/value head 0.",
            edit=(
                (
                    "grouped, k[start : start + block])",
                    "grouped, k[start : start + block, :1].expand(-1, kv_heads, -1))",
                ),
                (
                    "weights, v[start : start + block])",
                    "weights, v[start : start + block, :1].expand(-1, kv_heads, -1))",
                ),
            ),
        ),
        Mutant(
            "K repeated for every query head",
            "Right, but K and V were copied once for each query head.",
            caught_by="K and V stay small",
            source="""
def gqa_attention(q, k, v, block):
    n, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    m = q.new_full((n, heads), -torch.inf)
    l, acc = torch.zeros_like(m), torch.zeros_like(q)
    for start in range(0, len(k), block):
        scores = torch.einsum("ihd,jhd->ihj", q, k[start:start + block]) / dim**0.5
        new = torch.maximum(m, scores.amax(-1))
        weights, shrink = torch.exp(scores - new[..., None]), torch.exp(m - new)
        l = l * shrink + weights.sum(-1)
        acc = acc * shrink[..., None] + torch.einsum("ihj,jhd->ihd", weights, v[start:start + block])
        m = new
    return acc / l[..., None], m + torch.log(l)
""",
            expect="n_q x H x max(block, D)",
        ),
        Mutant(
            "heads mixed when joined",
            "The heads came out in another order than they went in.",
            edit=("return out.reshape(n, heads, dim)", "return out.transpose(1, 2).reshape(n, heads, dim)"),
        ),
        Mutant(
            "one maximum, nothing converted",
            "The running maximum moves, but l and acc were never converted to the new one.",
            source="""
def gqa_attention(q, k, v, block):
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    q = q.reshape(n, k.shape[1], group, dim)
    m = q.new_full((n, 1, 1), -torch.inf)
    l, acc = q.new_zeros(n, k.shape[1], group), torch.zeros_like(q)
    for start in range(0, len(k), block):
        scores = torch.einsum("ihgd,jhd->ihgj", q, k[start:start + block]) / dim**0.5
        m = torch.maximum(m, scores.amax((1, 2, 3), keepdim=True)[..., 0])
        weights = torch.exp(scores - m[..., None])
        l = l + weights.sum(-1)
        acc = acc + torch.einsum("ihgj,jhd->ihgd", weights, v[start:start + block])
    return (acc / l[..., None]).reshape(n, heads, dim), (m + torch.log(l)).reshape(n, heads)
""",
        ),
        Mutant(
            "no scale",
            "The scores were not scaled by 1/sqrt(D).",
            edit=(" / dim**0.5", ""),
        ),
        Mutant(
            "one maximum for all heads",
            "All heads of a query share one maximum: a head whose scores lie far below it loses every weight.",
            caught_by="returns",
            edit=(
                "new_m = torch.maximum(m, scores.amax(-1))",
                "new_m = torch.maximum(m, scores.amax((1, 2, 3))[:, None, None].expand_as(m))",
            ),
            expect="NaN",
            recognise=False,
        ),
    ),
    variants=(
        """
def gqa_attention(q, k, v, block):
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    out, lse = torch.empty_like(q), torch.empty(n, heads)
    for h in range(heads):
        m, l, acc = torch.full((n, 1), -1e30), torch.zeros(n, 1), torch.zeros(n, dim)
        for start in range(0, len(k), block):
            s = q[:, h] @ k[start:start + block, h // group].T * dim ** -0.5
            new = torch.maximum(m, s.max(1, keepdim=True).values)
            p, f = torch.exp(s - new), torch.exp(m - new)
            m, l, acc = new, l * f + p.sum(1, keepdim=True), acc * f + p @ v[start:start + block, h // group]
        out[:, h], lse[:, h] = acc / l, (m + l.log())[:, 0]
    return out, lse
""",
        """
def gqa_attention(q, k, v, block):
    n, H, D = q.shape
    G = H // k.shape[1]
    rows = q.view(n, k.shape[1], G, D).permute(1, 0, 2, 3).reshape(k.shape[1], n * G, D) * D ** -0.5
    m = torch.full((k.shape[1], n * G, 1), -1e30)
    l, acc = torch.zeros_like(m), torch.zeros_like(rows)
    for start in range(0, len(k), block):
        kb, vb = (x[start:start + block].transpose(0, 1) for x in (k, v))
        s = rows @ kb.transpose(1, 2)
        new = torch.maximum(m, s.amax(2, keepdim=True))
        p, f = torch.exp(s - new), torch.exp(m - new)
        m, l, acc = new, l * f + p.sum(2, keepdim=True), acc * f + p @ vb

    def back(x):
        return x.reshape(k.shape[1], n, G, -1).permute(1, 0, 2, 3).reshape(n, H, -1)

    return back(acc / l), back(m + l.log())[..., 0]
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 2.6
def _pool_cases(seed):
    g = _generator(seed)

    def case(name, queries, lengths, dim=4, lift=()):
        q = torch.randn(queries, dim, generator=g)
        k, v = (torch.randn(sum(lengths), dim, generator=g) for _ in range(2))
        offsets = _offsets(lengths)
        for b, amount in lift:  # all of a sequence's scores for query 0 move together
            k[int(offsets[b]) : int(offsets[b + 1])] += amount * dim**0.5 * q[0] / (q[0] @ q[0])
        return Case(name, (q, k, v, offsets), offsets=tuple(range(0, queries * len(lengths) + 1, queries)))

    def hard(name, names):
        _, k, _, offsets = kinds.packed(names, 3, 40, 8, 16, g)
        q, _ = kinds.query_and_key("rows 150 apart", 3, 1, 8, 16, g)  # shared by all: rows that differ add to each kind
        labels = tuple(names)
        return Case(
            name,
            (q, k, torch.randn(len(k), 8, generator=g), offsets),
            offsets=tuple(range(0, 3 * len(names) + 1, 3)),
            labels=labels,
        )

    return [
        case("one query, two sequences", 1, [2, 3]),
        case("three queries, two sequences", 3, [4, 2]),
        case("sequences without keys", 2, [0, 3, 0, 4, 0]),
        case("scores of one sequence far above the others'", 2, [3, 4, 5], dim=8, lift=((1, 130.0),)),
        case("ragged", 4, [5, 0, 33, 1, 17], dim=8),
        case("one of 200", 3, [3, 200, 2], dim=8),
        case("three hundred sequences", 2, [(5 * b) % 4 for b in range(300)]),
        hard("scores that need the maximum, one kind per sequence", kinds.MODERATE),
        hard("scores near -30,000", ["near -30000", "near -30000"]),
    ]


def _pool_reference(q, k, v, k_offsets):
    parts = []
    for b in range(len(k_offsets) - 1):
        keys = slice(int(k_offsets[b]), int(k_offsets[b + 1]))
        parts.append(_dense(q, k[keys], v[keys])[0])
    return torch.cat(parts)


_POOL = Exercise(
    id="2.6",
    title="One set of queries for all sequences (broadcast-Q)",
    name="pool",
    cases=_pool_cases,
    reference=_pool_reference,
    outputs=(Output("out", ("token", "dim")),),
    difficulty=3,
    minutes=25,
    tol=1e-4,
    hints=(
        "All scores at once: k @ q.T is [total_kv, L]. Every key row knows its sequence. You need a maximum, a sum "
        "and a weighted sum for each sequence.",
        "m starts as -inf of shape [B, L]; m.scatter_reduce(0, owner[:, None].expand_as(scores), scores, 'amax') "
        "takes the maxima. m[owner] "
        "brings each key row its sequence's maximum.",
        "l = zeros[B, L].index_add(0, owner, weights); acc = zeros[B, L, D].index_add(0, owner, weights[:, :, "
        "None] * v[:, None, :]); divide by l, by "
        "1 where l is 0; reshape to [B * L, D].",
    ),
    forbid=("softmax", "nested"),
    limits=(
        Limit(
            "no loop over sequences",
            "ops",
            at_most=50,
            text="at most 50 torch operations, however many sequences there are",
        ),
    ),
    mutants=(
        Mutant(
            "loops over the sequences",
            "Right, but the number of operations grows with the batch.",
            caught_by="no loop over sequences",
            source="""
def pool(q, k, v, k_offsets):
    bounds, parts = k_offsets.tolist(), []
    for a, b in zip(bounds[:-1], bounds[1:]):
        if a == b:
            parts.append(torch.zeros_like(q))
            continue
        scores = q @ k[a:b].T / q.shape[1] ** 0.5
        weights = torch.exp(scores - scores.amax(1, keepdim=True))
        parts.append(weights @ v[a:b] / weights.sum(1, keepdim=True))
    return torch.cat(parts)
""",
            expect="50",
        ),
        Mutant(
            "one maximum for the whole batch",
            "All sequences were measured against the largest score of the whole batch, so those far below it vanish.",
            edit=("torch.exp(scores - m[owner])", "torch.exp(scores - m.max(0).values)"),
        ),
        Mutant(
            "sequences without keys are NaN",
            "A sequence without keys divides 0 by 0.",
            caught_by="returns",
            edit=("torch.where(l > 0, l, 1.0)", "l"),
            expect="NaN",
        ),
        Mutant(
            "maximum starts at 0",
            "The maxima start at 0 and so never go below it: where all scores are very negative, every exponential vanishes.",
            edit=("m = scores.new_full((batches, length), -torch.inf)", "m = scores.new_zeros(batches, length)"),
        ),
        Mutant(
            "rows in the wrong order",
            "The output lists query 0 of all sequences first. Sequence b's L rows belong together, from row b * L on.",
            edit=("out.reshape(batches * length, dim)", "out.transpose(0, 1).reshape(batches * length, dim)"),
        ),
        Mutant(
            "one softmax over the whole batch",
            "Every sequence got the same answer, made from the keys of all.",
            source="""
def pool(q, k, v, k_offsets):
    scores = q @ k.T / q.shape[1] ** 0.5
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    out = weights @ v / weights.sum(1, keepdim=True)
    return out.repeat(len(k_offsets) - 1, 1)
""",
        ),
        Mutant(
            "not normalized",
            "The weighted sums were not divided by the sum of their weights.",
            edit=("acc / torch.where(l > 0, l, 1.0)[:, :, None]", "acc + 0.0"),
        ),
    ),
    variants=(
        """
from jfa.layout import gather_index


def pool(q, k, v, k_offsets):
    longest = int(k_offsets.diff().max())
    rows, inside = gather_index(k_offsets, longest, len(k))
    scores = torch.einsum("ld,bjd->blj", q, k[rows]) * q.shape[1] ** -0.5
    scores = scores.masked_fill(~inside[:, None], -1e30)
    weights = torch.exp(scores - scores.amax(2, keepdim=True)) * inside[:, None]
    out = torch.einsum("blj,bjd->bld", weights, v[rows]) / weights.sum(2, keepdim=True).clamp(min=1e-30)
    return out.reshape(-1, q.shape[1])
""",
        """
def pool(q, k, v, k_offsets):
    B, (L, D) = len(k_offsets) - 1, q.shape
    owner = torch.repeat_interleave(torch.arange(B), k_offsets.diff())
    s = (k @ q.T) * D ** -0.5
    top = torch.full((B, L), -1e30).index_reduce(0, owner, s, "amax")
    p = torch.exp(s - top[owner])
    both = torch.cat([p[:, :, None] * v[:, None, :], p[:, :, None]], 2)
    sums = torch.zeros(B, L, D + 1).index_add(0, owner, both)
    return (sums[..., :D] / sums[..., D:].clamp(min=1e-30)).reshape(B * L, D)
""",
    ),
)

EXERCISES = [_SOFTMAX, _MERGE, _CAUSAL, _PACKED, _GQA, _POOL]
