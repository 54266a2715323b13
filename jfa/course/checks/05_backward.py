"""Checks of chapter 05: the backward."""

import math

import torch

from jfa.course import kinds
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output, Property


def _spans(offsets):
    bounds = offsets.tolist()
    return list(zip(bounds, bounds[1:]))


# -- 5.1 ---------------------------------------------------------------------------------------------------------------


def _delta_cases(seed):
    g = kinds.generator(seed)

    def case(name, rows, heads, dim, dtype=torch.float32, with_lse=True, shift=0.0, lift=1.0):
        out, dout = (lift * torch.randn(rows, heads, dim, generator=g) + shift for _ in range(2))
        dlse = torch.randn(heads, rows, generator=g) if with_lse else None
        return Case(name, (out.to(dtype), dout.to(dtype), dlse))

    return [
        case("three rows, one head", 3, 1, 4),
        case("lse is not used: dlse is None", 7, 2, 8, with_lse=False),
        case("56 rows, three heads", 56, 3, 16),
        case("bf16 rows whose products are all near 9", 20, 2, 128, torch.bfloat16, shift=3.0),
        case("bf16, as many heads as rows", 5, 5, 64, torch.bfloat16),
        case("bf16 numbers whose products fp16 cannot hold", 6, 2, 16, torch.bfloat16, lift=2.0**10),
        case("no rows at all", 0, 2, 8),
    ]


def _delta(out, dout, dlse):
    delta = torch.einsum("thd,thd->ht", out, dout)
    return delta if dlse is None else delta - dlse


DELTA = Exercise(
    id="5.1",
    title="Delta of every packed row",
    name="row_constants",
    cases=_delta_cases,
    reference=_delta,
    arithmetic=lambda out, dout, dlse: _delta(out.float(), dout.float(), dlse),
    outputs=(Output("delta", ("head", "token"), dtype="float32"),),
    difficulty=1,
    minutes=10,
    tol=2e-6,
    hints=(
        "Multiply dout and out element by element and sum over the head dimension. Which axis order has the result?",
        "Convert both to fp32 before the product, not after it: a product of two bf16 numbers needs 16 bits.",
        "delta = (out.float() * dout.float()).sum(2).T, and minus dlse where it is not None.",
    ),
    mutants=(
        Mutant("adds dlse", "The gradient of lse is added; it is subtracted.", edit=("delta - dlse", "delta + dlse")),
        Mutant(
            "forgets dlse",
            "The gradient of lse is left out: delta is dout . out minus dlse.",
            edit=("delta.contiguous() if dlse is None else delta - dlse", "delta.contiguous()"),
        ),
        Mutant(
            "product in bf16",
            "The product was rounded to bf16 before the sum: convert out and dout to fp32 first.",
            edit=("(out.float() * dout.float())", "(out * dout).float()"),
        ),
        Mutant(
            "sum rounded to bf16",
            "The sum was rounded to bf16 on its way.",
            edit=(
                "(out.float() * dout.float()).sum(2).T",
                "(out.float() * dout.float()).sum(2).to(out.dtype).float().T",
            ),
        ),
        Mutant(
            "mean over the head dim",
            "delta is the mean over the head dimension; it must be the sum.",
            edit=(".sum(2)", ".mean(2)"),
        ),
        Mutant(
            "scaled like a score",
            "delta carries a factor 1/sqrt(Dv); it has no scale, since out and dout are no scores.",
            edit=(
                "(out.float() * dout.float()).sum(2).T",
                "(out.float() * dout.float()).sum(2).T / out.shape[2] ** 0.5",
            ),
        ),
        Mutant(
            "token first",
            "the axes are [total_q, H].",
            caught_by="returns",
            edit=(
                "return delta.contiguous() if dlse is None else delta - dlse",
                "return delta.T.contiguous() if dlse is None else (delta - dlse).T",
            ),
            expect="axes are in another order",
            recognise=False,
        ),
        Mutant(
            "reshape instead of a transpose",
            "The numbers are right and their places are not: [total_q, H] was read as [H, total_q] without a transpose.",
            edit=(
                "(out.float() * dout.float()).sum(2).T",
                "(out.float() * dout.float()).sum(2).reshape(out.shape[1], out.shape[0])",
            ),
        ),
    ),
    variants=(
        """
def row_constants(out, dout, dlse):
    delta = torch.einsum("thd,thd->ht", out.to(torch.float32), dout.to(torch.float32))
    if dlse is not None:
        delta -= dlse
    return delta
""",
        """
def row_constants(out, dout, dlse):
    rows, heads, dim = out.shape
    a = out.double().transpose(0, 1).reshape(heads * rows, 1, dim)
    b = dout.double().transpose(0, 1).reshape(heads * rows, dim, 1)
    delta = torch.bmm(a, b).view(heads, rows)
    return (delta - (0 if dlse is None else dlse)).to(torch.float32)
""",
    ),
)

# -- 5.2 ---------------------------------------------------------------------------------------------------------------


def _block_cases(seed):
    g = kinds.generator(seed)

    def block(name, q, k, dim_v, first, n, scale, blind=()):
        """Return the block of ``n`` keys from ``first`` on, of the rows over all keys. ``blind``: rows that see no key."""
        v, dout = torch.randn(len(k), dim_v, generator=g) + 0.3, torch.randn(len(q), dim_v, generator=g)
        s = scale * q.double() @ k.double().T
        lse = torch.logsumexp(s, 1)
        out = torch.exp(s - lse[:, None]) @ v.double()
        delta = ((out * dout).sum(1) - torch.randn(len(q), generator=g)).float()
        lse = lse.float()
        if blind:
            lse[list(blind)] = float("-inf")
            for x in (q, dout, delta):
                kinds.poison(x, torch.tensor(blind))
        keys = slice(first, first + n)
        return Case(name, (q, k[keys].contiguous(), v[keys].contiguous(), dout, lse, delta, scale))

    def tame(name, m, n, total, dim=8, dim_v=8, first=0, blind=(), scale=None):
        q, k = torch.randn(m, dim, generator=g), torch.randn(total, dim, generator=g)
        return block(name, q, k, dim_v, first, n, scale or 1 / math.sqrt(dim), blind)

    def hard(kind):
        q, k = kinds.query_and_key(kind, 12, 40, 16, 16, g)
        return block(f"keys 16 to 31 of 40; {kinds.SCORES[kind].says}", q, k, 8, 16, 16, 0.25)

    return [
        tame("all keys in one block", 5, 6, 6),
        tame("16 of 200 keys", 7, 16, 200, first=90),
        tame("D 8 and Dv 12", 9, 4, 30, dim_v=12),
        tame(f"a scale of {kinds.OWN_SCALE}", 9, 4, 30, scale=kinds.OWN_SCALE),
        *map(hard, kinds.SCORES),
        tame("rows 1 and 4 see no key and hold NaN", 6, 8, 20, blind=(1, 4)),
    ]


def _block(q, k, v, dout, lse, delta, scale):
    alive = lse > float("-inf")
    dq = torch.zeros_like(q)
    q, dout, lse, delta = q[alive], dout[alive], lse[alive], delta[alive]
    p = torch.exp(scale * q @ k.T - lse[:, None])
    ds = p * (dout @ v.T - delta[:, None])
    dq[alive] = scale * ds @ k
    return dq, scale * ds.T @ q, p.T @ dout


BLOCK = Exercise(
    id="5.2",
    title="One block's contributions",
    name="block_gradients",
    cases=_block_cases,
    reference=_block,
    outputs=(Output("dq", ("query", "dim")), Output("dk", ("key", "dim")), Output("dv", ("key", "dim"))),
    difficulty=2,
    minutes=15,
    tol=2e-6,
    forbid=("softmax",),
    hints=(
        "P of this block is exp(scale q kᵀ - lse), with lse as a column. It need not sum to 1 over the block.",
        "For a row that sees no key: make lse plus infinity, so that P is 0, and clear its q, dout and delta with torch.where. "
        "Multiplying by 0 does not remove a NaN.",
        "ds = p * (dout @ v.T - delta[:, None]); dq = scale ds @ k, dk = scale ds.T @ q, dv = p.T @ dout.",
    ),
    limits=(Limit("five products", "op:mm", at_most=5, text="at most 5 matrix products"),),
    mutants=(
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=(("alive = lse > -torch.inf", "alive, scale = lse > -torch.inf, q.shape[1] ** -0.5"),),
        ),
        Mutant(
            "scale on dq only",
            "dk lacks the scale: S is scale q kᵀ, so both of its factors carry it.",
            edit=(
                ("ds = scale * p * (dout", "ds = p * (dout"),
                ("return ds @ k, ds.T @ q", "return scale * ds @ k, ds.T @ q"),
            ),
        ),
        Mutant(
            "scale twice",
            "dq and dk carry the scale twice.",
            edit=("return ds @ k, ds.T @ q", "return scale * ds @ k, scale * ds.T @ q"),
        ),
        Mutant(
            "scale in delta",
            "delta is multiplied by the scale; it is subtracted from dP as it is.",
            edit=("delta[:, None])", "scale * delta[:, None])"),
        ),
        Mutant(
            "natural lse in exp2",
            "The scores were converted to base 2 and lse was not.",
            edit=(
                "p = torch.exp(scale * (q @ k.T) - lse[:, None])",
                "p = torch.exp2(scale * 1.4426950408889634 * (q @ k.T) - lse[:, None])",
            ),
        ),
        Mutant(
            "no delta",
            "delta is left out of dS.",
            edit=("(dout @ v.T - delta[:, None])", "(dout @ v.T)"),
        ),
        Mutant(
            "delta added",
            "delta is added to dP; it is subtracted.",
            edit=("(dout @ v.T - delta[:, None])", "(dout @ v.T + delta[:, None])"),
        ),
        Mutant(
            "delta of this block's keys",
            "delta was computed from this block's P and dP. The sum over the row needs all keys, and that is the delta you were given.",
            edit=(
                "ds = scale * p * (dout @ v.T - delta[:, None])",
                "dp = dout @ v.T\n    ds = scale * p * (dp - (p * dp).sum(1, keepdim=True))",
            ),
        ),
        Mutant(
            "softmax over the block",
            "P sums to 1 over this block's keys. The row has more keys than you were given: lse knows them.",
            edit=(
                "p = torch.exp(scale * (q @ k.T) - lse[:, None])",
                "s = scale * (q @ k.T)\n    p = torch.exp(s - s.logsumexp(1, keepdim=True)) * alive[:, None]",
            ),
        ),
        Mutant(
            "dV from dS",
            "dv is made from dS; it is Pᵀ dO.",
            edit=("p.T @ dout", "(ds / scale).T @ dout"),
        ),
        Mutant(
            "division of exponentials",
            "exp(S) and exp(lse) overflow one by one.",
            caught_by="returns",
            edit=(
                "p = torch.exp(scale * (q @ k.T) - lse[:, None])",
                "p = torch.exp(scale * (q @ k.T)) / torch.exp(lse[:, None])",
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "blind rows only masked in P",
            "0 * NaN is NaN.",
            caught_by="returns",
            edit=("q, dout = (torch.where(alive[:, None], x, 0.0) for x in (q, dout))", "pass"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "blind rows forgotten",
            "exp(S + inf) is infinite.",
            caught_by="returns",
            edit=(
                "lse, delta = torch.where(alive, lse, torch.inf), torch.where(alive, delta, 0.0)",
                "delta = torch.where(alive, delta, 0.0)",
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "by autograd over a recomputed forward",
            "autograd multiplies once more.",
            caught_by="five products",
            source="""
def block_gradients(q, k, v, dout, lse, delta, scale):
    alive = lse > -torch.inf
    q, dout = (torch.where(alive[:, None], x, 0.0) for x in (q, dout))
    lse, delta = torch.where(alive, lse, torch.inf), torch.where(alive, delta, 0.0)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    p = torch.exp(scale * (q @ k.T) - lse[:, None])
    loss = (p @ v * dout).sum() - (p * delta[:, None]).sum()
    return torch.autograd.grad(loss, (q, k, v))
""",
            expect="torch's mm ran",
            recognise=False,
        ),
    ),
    variants=(
        """
def block_gradients(q, k, v, dout, lse, delta, scale):
    seen = torch.nonzero(lse != float("-inf")).flatten()
    dq = torch.zeros_like(q)
    q, dout = q.index_select(0, seen), dout.index_select(0, seen)
    pt = torch.exp2((torch.mm(k, (q * scale).T) - lse[seen]) * 1.4426950408889634)   # P transposed, as on Blackwell
    dst = pt * (torch.mm(v, dout.T) - delta[seen])
    dq[seen] = torch.mm(dst.T, k * scale)
    return dq, torch.mm(dst, q * scale), torch.mm(pt, dout)
""",
        """
def block_gradients(q, k, v, dout, lse, delta, scale):
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i in range(len(q)):                     # one query after another, no matrix product at all
        if lse[i] == -torch.inf:
            continue
        p = torch.exp((k * q[i]).sum(1) * scale - lse[i])
        ds = p * ((v * dout[i]).sum(1) - delta[i]) * scale
        dq[i] = (ds[:, None] * k).sum(0)
        dk += ds[:, None] * q[i]
        dv += p[:, None] * dout[i]
    return dq, dk, dv
""",
    ),
)

# -- the packed kernels ------------------------------------------------------------------------------------------------


def _tame(g, name, len_q, len_kv, heads=2, group=1, dim=16, poison=False, scale=None, **tile):
    """Return a packed backward on normal numbers."""
    q = torch.randn(sum(len_q), heads, dim, generator=g)
    k = torch.randn(sum(len_kv), heads // group, dim, generator=g)
    return _backward_case(g, name, len_q, len_kv, q, k, scale or 1 / math.sqrt(dim), poison, tile)


def _hard(g, names, len_q, len_kv, heads=2, group=1):
    """Return a packed backward with one sequence of each of these kinds of scores."""
    parts = [kinds.query_and_key(name, len_q, len_kv, 16, 16, g, heads=heads) for name in names]
    q, k = torch.cat([q for q, _ in parts]), torch.cat([k[:, : heads // group] for _, k in parts])
    said = kinds.SCORES[names[0]].says if len(names) == 1 else f"sequences with hard scores: {', '.join(names)}"
    return _backward_case(g, said, [len_q] * len(names), [len_kv] * len(names), q, k.contiguous(), 0.25)


FAR_BELOW = ["near -30000"]  # alone: its roundings would widen the tolerance of the others
HARD = [kind for kind in kinds.SCORES if kind not in FAR_BELOW]


def _backward_case(g, name, len_q, len_kv, q, k, scale, poison=False, tile=None):
    """Return inputs of a packed backward. ``poison``: NaN and infinities in queries without keys, which must not reach any gradient."""
    q_offsets, k_offsets = kinds.offsets(len_q), kinds.offsets(len_kv)
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    v, dout = torch.randn(k.shape, generator=g), torch.randn(q.shape, generator=g)
    dlse = torch.randn(heads, sum(len_q), generator=g) / 2
    lse, delta = torch.full((heads, sum(len_q)), float("-inf")), torch.zeros(heads, sum(len_q))
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
        if k1 > k0 and q1 > q0:
            keys, values = (x[k0:k1].double().repeat_interleave(group, 1) for x in (k, v))
            s = torch.einsum("qhd,khd->hqk", q[q0:q1].double(), keys) * scale
            lse[:, q0:q1] = torch.logsumexp(s, 2)
            out = torch.einsum("hqk,khd->qhd", torch.softmax(s, 2), values)
            delta[:, q0:q1] = torch.einsum("qhd,qhd->hq", out, dout[q0:q1].double()) - dlse[:, q0:q1]
        elif poison:
            for x in (q, dout, delta.T):
                kinds.poison(x, slice(q0, q1))
    return Case(
        name, (q, k, v, dout, lse, delta, q_offsets, k_offsets, group, scale), tile or {}, tuple(k_offsets.tolist())
    )


def _packed_gradients(q, k, v, dout, lse, delta, q_offsets, k_offsets, group, scale, **tile):
    """Return dq, dk, dv by the formulas, sequence by sequence."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets)):
        if k1 > k0 and q1 > q0:
            keys, values = (x[k0:k1].repeat_interleave(group, 1) for x in (k, v))
            p = torch.exp(torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * scale - lse[:, q0:q1, None])
            ds = p * (torch.einsum("qhd,khd->hqk", dout[q0:q1], values) - delta[:, q0:q1, None])
            dq[q0:q1] = scale * torch.einsum("hqk,khd->qhd", ds, keys)
            grads = scale * torch.einsum("hqk,qhd->khd", ds, q[q0:q1]), torch.einsum("hqk,qhd->khd", p, dout[q0:q1])
            dk[k0:k1], dv[k0:k1] = (x.unflatten(1, (-1, group)).sum(2) for x in grads)
    return dq, dk, dv


# -- 5.3 ---------------------------------------------------------------------------------------------------------------


def _dkdv_cases(seed):
    g = kinds.generator(seed)
    return [
        _tame(g, "one sequence, one head", [7], [9], heads=1),
        _tame(g, "one sequence, four heads on two key heads", [20], [18], heads=4, group=2),
        _tame(g, "lengths 5, 0, 33, 1, 17; one without keys", kinds.RAGGED, [17, 4, 40, 0, 21], heads=2, dim=32),
        _hard(g, HARD, 5, 19, heads=2, group=2),
        _hard(g, FAR_BELOW, 17, 5),
        _tame(g, "a neighbor of NaN, which has no keys", [5, 18, 6], [20, 0, 19], heads=3, group=3, poison=True),
        _tame(g, "32 queries at a time", [35], [20], heads=1, BM=32),
        _tame(g, f"32 keys per tile, a scale of {kinds.OWN_SCALE}", [9, 5], [40, 3], 1, scale=kinds.OWN_SCALE, BN=32),
    ]


def _dkdv_launch(kernel, q, k, v, dout, lse, delta, q_offsets, k_offsets, group, scale, BM=16, BN=16):
    import torch

    lengths = (k_offsets[1:] - k_offsets[:-1]).tolist()
    tiles = torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n, BN)], dtype=torch.int32)
    total, heads, dim = q.shape
    dk, dv = torch.full(k.shape, float("nan")), torch.full(v.shape, float("nan"))
    kernel[(len(tiles), heads // group)](
        q,
        k,
        v,
        dout,
        lse,
        delta,
        q_offsets,
        k_offsets,
        tiles,
        dk,
        dv,
        scale,
        total,
        heads,
        D=dim,
        GROUP=group,
        BM=BM,
        BN=BN,
    )
    return dk, dv


def _dkdv_loads(case):
    q, k, *_, q_offsets, k_offsets, group, _ = case.args
    rows, columns = case.kwargs.get("BM", 16), case.kwargs.get("BN", 16)
    steps = [-(-(q1 - q0) // rows) for q0, q1 in _spans(q_offsets)]
    tiles = [-(-(k1 - k0) // columns) for k0, k1 in _spans(k_offsets)]
    return k.shape[1] * sum(t * (8 + 4 * n * group) for t, n in zip(tiles, steps))


DKDV = Exercise(
    id="5.3",
    title="The jagged dK/dV kernel",
    name="dkdv_kernel",
    kind="kernel",
    call=_dkdv_launch,
    cases=_dkdv_cases,
    reference=lambda *args, **tile: _packed_gradients(*args)[1:],
    outputs=(Output("dk", ("token", "head", "dim")), Output("dv", ("token", "head", "dim"))),
    difficulty=2,
    minutes=35,
    tol=3e-6,
    time_limit=20.0,
    hints=(
        "Load K and V of your tile once, before any loop. Two loops follow: over the heads of the group, and inside it over the sequence's queries.",
        "dk and dv are made before the outer loop and stored after it. Mask q, dout, lse and delta with rows < q_end; "
        "other=float('inf') for lse makes P 0 there.",
        "p = exp(q kᵀ scale - lse[:, None]); dv += pᵀ do; ds = p * (do vᵀ - delta[:, None]); dk += dsᵀ q; at the end store dk * scale and dv.",
    ),
    limits=(
        Limit("tiled", "peak_tile", at_most=512, text="no block larger than 512 elements"),
        Limit(
            "loads",
            "loads",
            at_most=_dkdv_loads,
            text="at most 8 loads per program, and 4 more for each block of queries and head of the group",
        ),
    ),  # fmt: skip
    mutants=(
        Mutant(
            "group overwritten",
            "Only the last head of each group is in dk and dv: the sums start again at each head.",
            edit=(
                "        head = kv_head * GROUP + member\n",
                "        head = kv_head * GROUP + member\n        dk = tl.zeros((BN, D), tl.float32)\n        dv = tl.zeros((BN, D), tl.float32)\n",
            ),
        ),
        Mutant(
            "only the first head of a group",
            "Only the first head of each group is in dk and dv.",
            edit=("range(GROUP)", "range(1)"),
        ),
        Mutant(
            "lse along the keys",
            "lse and delta were subtracted along the keys; they belong to queries, the rows of S.",
            edit=(("scale - lse[:, None])", "scale - lse[None, :])"), ("- delta[:, None])", "- delta[None, :])")),
        ),
        Mutant(
            "heads of a group apart",
            "The heads of a group are taken as kv_head, kv_head + H_kv, ...; a group is GROUP neighbors.",
            edit=("head = kv_head * GROUP + member", "head = kv_head + member * (H // GROUP)"),
        ),
        Mutant(
            "mean over the group",
            "dk and dv are divided by the size of the group; they are sums.",
            edit=(
                ("dk * scale, mask", "dk * (scale / GROUP), mask"),
                ("at_keys, dv, mask", "at_keys, dv / GROUP, mask"),
            ),
        ),
        Mutant(
            "queries of the neighbor",
            "The tail of a query block reaches into the next sequence: its rows are bounded by total_q instead of q_end.",
            edit=("mine = rows < q_end", "mine = rows < total_q"),
        ),
        Mutant(
            "one lse for every head",
            "lse and delta of head 0 are used for all heads.",
            edit=(
                ("lse_ptr + head * total_q + rows", "lse_ptr + rows"),
                ("delta_ptr + head * total_q + rows", "delta_ptr + rows"),
            ),
        ),
        Mutant(
            "lse of the key head",
            "lse and delta are read with the key head's number; they belong to query heads.",
            edit=(
                ("lse_ptr + head * total_q + rows", "lse_ptr + kv_head * total_q + rows"),
                ("delta_ptr + head * total_q + rows", "delta_ptr + kv_head * total_q + rows"),
            ),
        ),
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=(
                ('input_precision="ieee") * scale - lse', 'input_precision="ieee") * (1.0 / (D**0.5)) - lse'),
                ("dk * scale, mask", "dk * (1.0 / (D**0.5)), mask"),
            ),
        ),
        Mutant("dk without the scale", "dk lacks the scale.", edit=("dk * scale, mask", "dk, mask")),
        Mutant(
            "scale on dv",
            "dv carries the scale; O = P V has none.",
            edit=("at_keys, dv, mask", "at_keys, dv * scale, mask"),
        ),
        Mutant(
            "products in TF32",
            "tl.dot rounded its fp32 operands to TF32, 10 bits of mantissa. Ask for input_precision='ieee'.",
            edit=(
                ('tl.dot(q, tl.trans(k), input_precision="ieee")', "tl.dot(q, tl.trans(k))"),
                ('dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")', "dk = tl.dot(tl.trans(ds), q, dk)"),
            ),
        ),
        Mutant(
            "P rounded to bf16",
            "P was rounded to bf16 before the products. Here everything is fp32.",
            edit=("dv = tl.dot(tl.trans(p), do,", "dv = tl.dot(tl.trans(p.to(tl.bfloat16).to(tl.float32)), do,"),
        ),
        Mutant(
            "tail queries masked by a product with 0",
            "0 * NaN is NaN.",
            caught_by="returns",
            edit=(
                (
                    "q = tl.load(q_ptr + at_rows, mask=mine[:, None], other=0.0)",
                    "q = tl.load(q_ptr + at_rows, mask=rows[:, None] < total_q, other=0.0)",
                ),
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "tail keys stored",
            "the tail of the last tile is written over the next sequence's keys.",
            caught_by="runs",
            edit=(
                "tl.store(dk_ptr + at_keys, dk * scale, mask=keys[:, None] < k_end)",
                "tl.store(dk_ptr + at_keys, dk * scale)",
            ),
            expect="dk_ptr",
            recognise=False,
        ),
        Mutant(
            "keys loaded in every step",
            "K and V are loaded again for each block of queries.",
            caught_by="loads",
            edit=(
                "            rows = start + tl.arange(0, BM)\n",
                "            rows = start + tl.arange(0, BM)\n            k = tl.load(k_ptr + at_keys, mask=keys[:, None] < k_end, other=0.0)\n",
            ),
            expect="loads",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, dk_ptr, dv_ptr,
    scale, total_q, H, D: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    seq, g = tl.load(tiles_ptr + 2 * tl.program_id(0)), tl.program_id(1)
    j = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BN)
    q0, k0 = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)
    nq, nk = tl.load(q_offsets_ptr + seq + 1) - q0, tl.load(k_offsets_ptr + seq + 1) - k0
    d = tl.arange(0, D)[None, :]
    keys = ((k0 + j) * (H // GROUP) + g)[:, None] * D + d
    k = tl.load(k_ptr + keys, mask=(j < nk)[:, None], other=0.0) * scale
    v = tl.load(v_ptr + keys, mask=(j < nk)[:, None], other=0.0)
    dk, dv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for r0 in range(0, nq * GROUP, BM):           # position and head of the group packed into one row number, as chapter 07 does
        r = r0 + tl.arange(0, BM)
        ok = r < nq * GROUP
        i, h = q0 + r // GROUP, g * GROUP + r % GROUP
        at = (i * H + h)[:, None] * D + d
        q = tl.load(q_ptr + at, mask=ok[:, None], other=0.0)
        do = tl.load(dout_ptr + at, mask=ok[:, None], other=0.0)
        lse = tl.load(lse_ptr + h * total_q + i, mask=ok, other=0.0)
        delta = tl.load(delta_ptr + h * total_q + i, mask=ok, other=0.0)
        pt = tl.exp(tl.dot(k, tl.trans(q), input_precision="ieee") - lse[None, :])      # [BN, BM]
        pt = tl.where(ok[None, :], pt, 0.0)
        dv += tl.dot(pt, do, input_precision="ieee")
        dst = pt * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
        dk += tl.dot(dst, q, input_precision="ieee")
    tl.store(dk_ptr + keys, dk * scale, mask=(j < nk)[:, None])
    tl.store(dv_ptr + keys, dv, mask=(j < nk)[:, None])
""",
        """
@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, dk_ptr, dv_ptr,
    scale, total_q, H, D: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    seq, g = tl.load(tiles_ptr + 2 * tl.program_id(0)), tl.program_id(1)
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    q0, q1 = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    begin, end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    d = tl.arange(0, D)
    key = begin + first + tl.arange(0, BN)
    at = (key[:, None] * (H // GROUP) + g) * D + d[None, :]
    k = tl.load(k_ptr + at, mask=key[:, None] < end, other=0.0)
    v = tl.load(v_ptr + at, mask=key[:, None] < end, other=0.0)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for start in range(q0, q1, BM):               # loops exchanged, and the queries from the last block to the first
        row = q0 + (q1 - 1 - start) // BM * BM + tl.arange(0, BM)
        for head in range(g * GROUP, (g + 1) * GROUP):
            here = (row[:, None] * H + head) * D + d[None, :]
            q = tl.load(q_ptr + here, mask=row[:, None] < q1, other=0.0)
            do = tl.load(dout_ptr + here, mask=row[:, None] < q1, other=0.0)
            lse = tl.load(lse_ptr + head * total_q + row, mask=row < q1, other=1e38) * 1.4426950408889634
            delta = tl.load(delta_ptr + head * total_q + row, mask=row < q1, other=0.0)
            s = tl.dot(q * (scale * 1.4426950408889634), tl.trans(k), input_precision="ieee")
            p = tl.exp2(s - lse[:, None])
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            dv = tl.dot(tl.trans(p), do, dv, input_precision="ieee")
            dk = tl.dot(tl.trans(p * (dp - delta[:, None]) * scale), q, dk, input_precision="ieee")
    tl.store(dk_ptr + at, dk, mask=key[:, None] < end)
    tl.store(dv_ptr + at, dv, mask=key[:, None] < end)
""",
    ),
)

# -- 5.4 ---------------------------------------------------------------------------------------------------------------


def _one_pass_cases(seed):
    g = kinds.generator(seed)
    return [
        _tame(g, "one sequence of 16, no tail", [16], [16], heads=1),
        _tame(g, "one sequence of 20", [20], [18], heads=1),
        _tame(g, "two sequences of 20 and 12", [20, 12], [18, 9]),
        _tame(g, "lengths 5, 0, 33, 1, 17; one without keys", kinds.RAGGED, [17, 4, 40, 0, 21]),
        _hard(g, HARD, 5, 19, heads=1),
        _hard(g, FAR_BELOW, 17, 5, heads=1),
        _tame(g, "a neighbor of NaN, which has no keys", [5, 18, 6], [20, 0, 19], poison=True),
        _tame(g, "D 32, 32 queries at a time", [35], [20], heads=1, dim=32, BM=32),
        _tame(g, f"32 keys per tile, a scale of {kinds.OWN_SCALE}", [9, 5], [40, 3], 1, scale=kinds.OWN_SCALE, BN=32),
        _tame(g, "D 32, 16 queries at a time", [18], [20], heads=1, dim=32),
    ]


def _one_pass_launch(kernel, q, k, v, dout, lse, delta, q_offsets, k_offsets, group, scale, BM=16, BN=16):
    import torch

    lengths = (k_offsets[1:] - k_offsets[:-1]).tolist()
    tiles = torch.tensor([(b, r) for b, n in enumerate(lengths) for r in range(0, n, BN)], dtype=torch.int32)
    total, heads, dim = q.shape
    dq, dk, dv = torch.zeros(q.shape), torch.full(k.shape, float("nan")), torch.full(v.shape, float("nan"))
    kernel[(len(tiles), heads)](
        q, k, v, dout, lse, delta, q_offsets, k_offsets, tiles, dq, dk, dv, scale, total, heads, D=dim, BM=BM, BN=BN
    )
    return dq, dk, dv


_ATOMIC = "tl.atomic_add(dq_ptr + at_rows, part, mask=mine[:, None])"

ONE_PASS = Exercise(
    id="5.4",
    title="Bug hunt: right for one sequence",
    name="one_pass_kernel",
    kind="kernel",
    hunt=True,
    call=_one_pass_launch,
    cases=_one_pass_cases,
    reference=_packed_gradients,
    outputs=(
        Output("dq", ("row", "head", "dim")),
        Output("dk", ("token", "head", "dim")),
        Output("dv", ("token", "head", "dim")),
    ),
    difficulty=2,
    minutes=30,
    tol=3e-6,
    time_limit=20.0,
    hints=(
        "The report names the addition to dq. Which rows does it add to, beyond the end of the tensor? The same rows exist when another sequence follows.",
        "Which rows belong to this sequence? One line decides that for four loads. It names the end of the wrong thing.",
        "mine = rows < q_end, and the addition takes mask=mine[:, None].",
    ),
    mutants=(
        Mutant(
            "bounds the addition by the tensor",
            "Right for one sequence: the addition stays inside the tensor, but the tail's rows are still the next sequence's, in the loads as well.",
            edit=("mine = rows < q_end", "mine = rows < total_q"),
        ),
        Mutant(
            "bounds the addition alone",
            "dq is right, dk and dv are not: the loads still bring the next sequence's queries into this one's sums.",
            edit=(
                ("mine = rows < q_end", "mine = rows < total_q"),
                ("part, mask=mine[:, None])", "part, mask=rows[:, None] < q_end)"),
            ),
        ),
        Mutant(
            "bounds the loads alone",
            "the addition still reaches past the end of the tensor.",
            caught_by="runs",
            edit=("part, mask=mine[:, None])", "part)"),
            expect="dq_ptr",
            recognise=False,
        ),
        Mutant(
            "masks dS instead of the rows",
            "dS is 0 in the tail, but P is not: dv still gets the next sequence's dO.",
            edit=(
                ("mine = rows < q_end", "mine = rows < total_q"),
                (
                    'ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])',
                    'ds = tl.where(rows[:, None] < q_end, p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None]), 0.0)',
                ),
            ),
        ),
        Mutant(
            "masks P and dS by a product",
            "a product with 0 does not remove a NaN.",
            caught_by="returns",
            edit=(
                ("mine = rows < q_end", "mine = rows < total_q\n        own = (rows[:, None] < q_end).to(tl.float32)"),
                ("* scale - lse[:, None])", "* scale - lse[:, None]) * own"),
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "scale made from D",
            "The scale is handed over; a caller may want another than 1/sqrt(D).",
            edit=(
                'tl.dot(ds, k, input_precision="ieee") * scale',
                'tl.dot(ds, k, input_precision="ieee") * (1.0 / (D**0.5))',
            ),
        ),
        Mutant(
            "stops at the last full tile",
            "The queries of the last, partly filled tile are left out.",
            edit=("range(q_begin, q_end, BM)", "range(q_begin, q_end - (q_end - q_begin) % BM, BM)"),
        ),
        Mutant(
            "drops the mask of the keys",
            "0 * infinity is NaN.",
            caught_by="returns",
            edit=("        ds = tl.where(keys[None, :] < k_end, ds, 0.0)\n", ""),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "adds with load and store",
            "programs of one sequence overwrite each other's part.",
            caught_by="runs",
            edit=(
                _ATOMIC,
                "old = tl.load(dq_ptr + at_rows, mask=mine[:, None], other=0.0)\n"
                "        tl.store(dq_ptr + at_rows, old + part, mask=mine[:, None])",
            ),
            expect="two programs",
            recognise=False,
        ),
    ),
    variants=(
        # rows past the end repeat the last row instead of being masked; lse makes their P 0
        (
            (
                "        mine = rows < q_end\n",
                "        mine = rows < q_end\n        rows = tl.minimum(rows, q_end - 1)\n",
            ),
            ("q = tl.load(q_ptr + at_rows, mask=mine[:, None], other=0.0)", "q = tl.load(q_ptr + at_rows)"),
            ("do = tl.load(dout_ptr + at_rows, mask=mine[:, None], other=0.0)", "do = tl.load(dout_ptr + at_rows)"),
        ),
        # the mask as a count of rows that are left
        (
            ("mine = rows < q_end", "mine = tl.arange(0, BM) < q_end - start"),
            (
                _ATOMIC,
                "tl.atomic_add(dq_ptr + at_rows, tl.where(mine[:, None], part, 0.0), mask=rows[:, None] < q_end)",
            ),
        ),
    ),
)

# -- 5.5 ---------------------------------------------------------------------------------------------------------------


def _cost_cases(seed):
    shift = 3 * (seed % 5)

    def case(name, strategy, len_q, len_kv, heads, dim, block):
        return Case(name, (strategy, [n + shift * (n > 0) for n in len_q], len_kv, heads, dim, block))

    short, long = [5, 0, 33, 1, 17], [17, 4, 40, 0, 21]
    return [
        case("two kernels, one sequence, one head", "two kernels", [64], [64], 1, 64, 64),
        case("atomics, one sequence, one head", "atomics", [64], [64], 1, 64, 64),
        case("stored, one sequence, one head", "stored", [64], [64], 1, 64, 64),
        case("atomics, a tail tile of keys", "atomics", [100, 30], [130, 64], 2, 32, 64),
        case("two kernels, lengths 5, 0, 33, 1, 17; one without keys", "two kernels", short, long, 4, 128, 16),
        case("atomics, lengths 5, 0, 33, 1, 17; one without keys", "atomics", short, long, 4, 128, 16),
        case("stored, lengths 5, 0, 33, 1, 17; one without keys", "stored", short, long, 4, 128, 16),
        case("stored, one of 4096", "stored", [4096, 2], [4096, 9], 8, 128, 128),
    ]


def _cost(strategy, len_q, len_kv, heads, D, BN):
    pairs = heads * sum(n * m for n, m in zip(len_q, len_kv))
    rows, keys = heads * sum(len_q), heads * sum(len_kv)
    numbers, constants = D * rows, 4 * rows
    read_once = 2 * (2 * numbers + 2 * D * keys) + constants
    written = 2 * (numbers + 2 * D * keys)
    adds = 0
    if strategy == "stored":
        products, moved = 4, read_once + 2 * pairs + written
    elif strategy == "atomics":
        products, moved = 5, read_once + constants + 8 * numbers + written
        adds = heads * D * sum(n * ((m + BN - 1) // BN) for n, m in zip(len_q, len_kv))
    else:
        products, moved = 7, 2 * (read_once + constants) + written
    return products * pairs * 2 * D, moved, adds


COST = Exercise(
    id="5.5",
    title="Predict products, bytes and additions",
    name="cost",
    cases=_cost_cases,
    reference=_cost,
    outputs=tuple(Output(name, dtype="int") for name in ("FLOPs", "bytes", "additions")),
    difficulty=2,
    minutes=30,
    hints=(
        "Pairs: the sum over sequences of len_q times len_kv, times the heads. Not the square of the sums.",
        "Count tensor by tensor. Two kernels read q, k, v, dout, lse and delta twice, and write each gradient once.",
        "Additions: each key tile of a sequence adds to all D numbers of each of its queries: heads * D * len_q * ceil(len_kv / BN), summed over the sequences.",
    ),
    mutants=(
        Mutant(
            "pairs across sequences",
            "The pairs are those of all queries with all keys; a query sees the keys of its own sequence only.",
            edit=(
                "pairs = heads * sum(n * m for n, m in zip(len_q, len_kv))",
                "pairs = heads * sum(len_q) * sum(len_kv)",
            ),
        ),
        Mutant(
            "five products for two kernels",
            "Two kernels do seven products: S and dP are computed in both.",
            edit=('"two kernels": 7', '"two kernels": 5'),
        ),
        Mutant(
            "stored P still multiplies Q and K",
            "With P stored, S is not computed again: four products are left.",
            edit=('"stored": 4', '"stored": 5'),
        ),
        Mutant(
            "one multiply-add is one FLOP",
            "A multiplication and an addition are two FLOPs.",
            edit=("return 2 * D * products * pairs", "return D * products * pairs"),
        ),
        Mutant(
            "bytes as a float",
            "a size in bytes is a whole number.",
            caught_by="returns",
            edit=("return 2 * D * products * pairs, moved,", "return 2 * D * products * pairs, moved / 1,"),
            expect="a whole number",
        ),
        Mutant(
            "tail key tile dropped",
            "The last, partly filled key tile adds to dq as well.",
            edit=("n * -(-m // BN)", "n * (m // BN)"),
        ),
        Mutant(
            "tiles of all keys together",
            "Key tiles were counted over the packed keys; each sequence has its own, and its queries meet only these.",
            edit=(
                "tiles = sum(n * -(-m // BN) for n, m in zip(len_q, len_kv))",
                "tiles = sum(len_q) * -(-sum(len_kv) // BN)",
            ),
        ),
        Mutant(
            "inputs read once by two kernels",
            "Each of the two kernels reads all inputs: they count twice.",
            edit=("moved = 2 * (inputs + 4 * rows) + results", "moved = (inputs + 4 * rows) + results"),
        ),
        Mutant(
            "accumulator counted once, or in bf16",
            "The accumulator is fp32. It is written once with zeros and read once: 8 bytes per number in all.",
            edit=("2 * 4 * D * rows", "4 * D * rows"),
        ),
        Mutant(
            "dq not written",
            "With atomics, dq itself is written as well, in bf16, after the accumulator has been read.",
            edit=("+ 2 * 4 * D * rows + results", "+ 2 * 4 * D * rows + results - 2 * D * rows"),
        ),
        Mutant(
            "one lse for all heads",
            "lse and delta hold one number for each row and head.",
            edit=(
                ("+ 4 * rows  # q", "+ 4 * sum(len_q)  # q"),
                ("inputs + 4 * rows + 2 * 4", "inputs + 4 * sum(len_q) + 2 * 4"),
                ("2 * (inputs + 4 * rows)", "2 * (inputs + 4 * sum(len_q))"),
            ),
        ),
    ),
    variants=(
        """
def cost(strategy, len_q, len_kv, heads, D, BN):
    flops = moved = adds = 0
    per_pair = {"stored": 8, "atomics": 10, "two kernels": 14}
    for n, m in zip(len_q, len_kv):
        flops += per_pair[strategy] * D * n * m
        query_side, key_side = 4 * n * D, 4 * m * D            # q and dout; k and v
        gradients = 2 * n * D + 4 * m * D
        if strategy == "stored":
            moved += query_side + key_side + 4 * n + 2 * n * m + gradients
        elif strategy == "atomics":
            moved += query_side + key_side + 8 * n + gradients + 4 * n * D + 4 * n * D
            adds += n * D * len(range(0, m, BN))
        else:
            moved += 2 * (query_side + key_side + 8 * n) + gradients
    return heads * flops, heads * moved, heads * adds
""",
        """
def cost(strategy, len_q, len_kv, heads, D, BN):
    import math
    q, kv = (torch.tensor(x, dtype=torch.int64) for x in (len_q, len_kv))
    kind = ["stored", "atomics", "two kernels"].index(strategy)
    pairs, rows, keys = int((q * kv).sum()) * heads, int(q.sum()) * heads, int(kv.sum()) * heads
    reads = (2 if kind == 2 else 1) * (4 * D * (rows + keys) + (4 if kind == 0 else 8) * rows)
    writes = 2 * D * (rows + 2 * keys)
    extra = (2 * pairs, 8 * D * rows, 0)[kind]
    tiles = sum(a * math.ceil(b / BN) for a, b in zip(len_q, len_kv))
    return 2 * D * pairs * (4, 5, 7)[kind], reads + writes + extra, (0, tiles * heads * D, 0)[kind]
""",
    ),
)

# -- 5.6 ---------------------------------------------------------------------------------------------------------------


def _merge_cases(seed):
    g = kinds.generator(seed)

    def case(name, rows, heads, dim, spread=1.0, level=0.0, no_lse=False, empty=()):
        """Return inputs of parts; ``empty``: (part, rows without keys) pairs."""
        out1, out2, dout = (torch.randn(rows, heads, dim, generator=g) + 0.2 for _ in range(3))
        lse1, lse2 = (torch.randn(heads, rows, generator=g) * spread + level for _ in range(2))
        dlse = torch.zeros(heads, rows) if no_lse else torch.randn(heads, rows, generator=g)
        for part, where in empty:
            (out1, out2)[part][where] = 0.0
            (lse1, lse2)[part][:, where] = float("-inf")
        return Case(name, (out1, lse1, out2, lse2, dout, dlse))

    return [
        case("two rows, one head", 2, 1, 4),
        case("nobody uses the merged lse: dlse is 0", 9, 2, 8, no_lse=True),
        case("lse hundreds apart", 12, 3, 8, spread=200.0),
        case("lse near 300", 8, 2, 8, level=300.0),
        case("lse near -300", 8, 2, 8, level=-300.0),
        case("rows without keys in one part, in the other, in both", 12, 2, 8, empty=((0, [1, 5]), (1, [2, 5]))),
    ]


def _merge_gradients(out1, lse1, out2, lse2, dout, dlse):
    top = torch.maximum(lse1, lse2)
    top = torch.where(torch.isfinite(top), top, 0.0)
    weight1, weight2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = weight1 + weight2
    total = torch.where(total > 0, total, 1.0)
    s1, s2 = weight1 / total, weight2 / total
    apart = torch.einsum("thd,thd->ht", dout, out1 - out2)
    return (
        s1.T[..., None] * dout, s1 * (s2 * apart + dlse), s2.T[..., None] * dout, s2 * (dlse - s1 * apart)
    )  # fmt: skip


def _through_the_merged_lse(out1, lse1, out2, lse2, dout, dlse):
    """Return the same with the shares made from a merged lse that was rounded once, as the exercise's text defines them."""
    lse = torch.logaddexp(lse1.double(), lse2.double())
    rounded = torch.where(lse == -math.inf, 0.0, lse * (1 + 2.0**-24)).float()
    shares = [torch.exp(x - rounded) for x in (lse1, lse2)]
    out = shares[0].T[..., None] * out1 + shares[1].T[..., None] * out2
    grads = []
    for part, share in zip((out1, out2), shares):
        grads += [share.T[..., None] * dout, share * (torch.einsum("thd,thd->ht", dout, part - out) + dlse)]
    return tuple(grads)


def _shares(case, result):
    """Check that where a part has keys the two gradients of lse sum to dlse, and those of out to dout."""
    lse1, lse2, dout, dlse = case.args[1], case.args[3], case.args[4], case.args[5]
    some = torch.maximum(lse1, lse2) > float("-inf")
    if ((result[1] + result[3] - dlse).abs() > 1e-3)[some].any():
        return "dlse1 + dlse2 is not dlse: raising both lse by the same amount raises the merged lse by it, and moves no share."
    if ((result[0] + result[2] - dout).abs() > 1e-3)[some.T].any():
        return "dout1 + dout2 is not dout: the shares of the two parts sum to 1."
    return None


MERGE = Exercise(
    id="5.6",
    title="Back through a merge",
    name="merge_backward",
    cases=_merge_cases,
    reference=_merge_gradients,
    arithmetic=_through_the_merged_lse,
    outputs=tuple(
        Output(name, axes)
        for name, axes in zip(
            ("dout1", "dlse1", "dout2", "dlse2"),
            (("row", "head", "dim"), ("head", "row"), ("row", "head", "dim"), ("head", "row")),
        )
    ),
    difficulty=3,
    minutes=25,
    tol=2e-6,
    hints=(
        "Call the shares w1 = exp(lse1 - lse) and w2. dout1 is w1 dout. For dlse1: how does w1 move with lse1, and how does w2?",
        "dw1/dlse1 = w1 (1 - w1) and dw2/dlse1 = -w1 w2. So dlse1 = w1 (dout . out1 - dout . out + dlse), with the merged out.",
        "torch.logaddexp gives lse; where it is -inf put 0, and exp(-inf - 0) makes the shares 0. "
        "out = w1 out1 + w2 out2; delta = dout . out; dlse1 = w1 * (dout . out1 - delta + dlse).",
    ),
    properties=(Property("the gradients of the parts sum up", _shares),),
    mutants=(
        Mutant(
            "shares taken as constants",
            "dlse1 and dlse2 hold the part of dlse only: the shares of the two outputs depend on lse1 and lse2, too.",
            edit=("share * ((dout * part).sum(2).T - delta + dlse)", "share * dlse"),
        ),
        Mutant(
            "merged lse without a gradient",
            "The gradient of the merged lse is left out.",
            edit=("- delta + dlse)", "- delta)"),
        ),
        Mutant(
            "dlse not shared out",
            "Each part got the whole dlse; it is shared like dout.",
            edit=("share * ((dout * part).sum(2).T - delta + dlse)", "share * ((dout * part).sum(2).T - delta) + dlse"),
        ),
        Mutant(
            "delta forgotten",
            "Only the part's own share was differentiated: raising lse1 also lowers the other part's share.",
            edit=("(dout * part).sum(2).T - delta + dlse", "(dout * part).sum(2).T + dlse"),
        ),
        Mutant(
            "delta of the part",
            "The sign of the change is wrong: a part whose output agrees with dout more than the merged one has a positive gradient.",
            edit=("(dout * part).sum(2).T - delta + dlse", "delta - (dout * part).sum(2).T + dlse"),
        ),
        Mutant(
            "shares of the other part",
            "The two shares are exchanged.",
            edit=("((out1, share1), (out2, share2)):", "((out1, share2), (out2, share1)):"),
        ),
        Mutant(
            "out gradients not shared",
            "dout1 and dout2 are dout itself; each part gets its share of it.",
            edit=("grads += [share.T[..., None] * dout,", "grads += [dout.clone(),"),
        ),
        Mutant(
            "exponentials without a maximum",
            "exp(lse) overflows, or all shares are 0.",
            expect="wrong at",
            edit=("lse = torch.logaddexp(lse1, lse2)", "lse = torch.log(torch.exp(lse1) + torch.exp(lse2))"),
            recognise=False,
        ),
        Mutant(
            "both parts empty",
            "-inf minus -inf is NaN.",
            caught_by="returns",
            edit=("    lse = torch.where(lse == -torch.inf, 0.0, lse)  # both empty: the shares below become 0\n", ""),
            expect="NaN",
            recognise=False,
        ),
    ),
    variants=(
        """
def merge_backward(out1, lse1, out2, lse2, dout, dlse):
    difference = torch.where(torch.isinf(lse1) & torch.isinf(lse2), 0.0, lse1 - lse2)
    w1 = torch.sigmoid(difference)               # two shares: a softmax of two is a sigmoid of the difference
    w2 = torch.sigmoid(-difference)
    w1, w2 = torch.where(torch.isinf(lse1), 0.0, w1), torch.where(torch.isinf(lse2), 0.0, w2)
    moved = w1 * w2 * torch.einsum("thd,thd->ht", dout, out1 - out2)
    return w1.t().unsqueeze(2) * dout, moved + w1 * dlse, w2.t().unsqueeze(2) * dout, w2 * dlse - moved
""",
        """
def merge_backward(out1, lse1, out2, lse2, dout, dlse):
    result = [torch.zeros_like(x) for x in (out1, lse1, out2, lse2)]
    inputs = [x.transpose(0, 1) for x in (out1, out2, dout)]           # [H, T, D]
    for keep in (torch.isfinite(lse1) | torch.isfinite(lse2),):
        o1, o2, do = (x[keep] for x in inputs)                          # [rows, D]
        pair = torch.stack([lse1[keep], lse2[keep]], 1)
        w = torch.exp(pair - torch.logsumexp(pair, 1, keepdim=True))    # [rows, 2]
        dw = torch.stack([(do * o1).sum(1), (do * o2).sum(1)], 1)
        dl = w * (dw - (w * dw).sum(1, keepdim=True)) + w * dlse[keep][:, None]
        for part in range(2):
            result[2 * part].transpose(0, 1)[keep] = w[:, part : part + 1] * do
            result[2 * part + 1][keep] = dl[:, part]
    return tuple(result)
""",
    ),
)

EXERCISES = [DELTA, BLOCK, DKDV, ONE_PASS, COST, MERGE]
