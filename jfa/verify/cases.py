"""Random attention problems and their tolerances, shared by the tests of the op on CPU, emulator and GPU.

Results are compared with :mod:`jfa.reference` in fp64. The error may be at most twice the error of plain PyTorch with
the same mathematics in the same low precision, plus one rounding of the result.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from jfa import reference
from jfa.attention import jagged_flash_attention
from jfa.layout import offsets_from_lengths
from jfa.masks import Band

ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass
class Case:
    """One problem; lengths are lists, ``slack`` is how many rows follow the last sequence, ``scale_up`` stretches the scores."""

    len_q: list[int]
    len_kv: list[int]
    heads: int = 2
    kv_heads: int = 2
    dim: int = 16
    dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    shared_q: int = 0
    options: dict = field(default_factory=dict)
    slack: int = 0
    scale_up: float = 1.0
    seed: int = 0


def random_case(seed: int, dtype: torch.dtype = torch.float32, longest: int = 200, most: int = 6) -> Case:
    """Return lengths with zeros, tails and one long sequence; any mask, grouping, head dims; every fourth case shares its query."""
    rng = random.Random(seed)
    batches = rng.randint(1, most)
    some = lambda: rng.choice([0, 1, rng.randint(2, 20), rng.randint(21, 70)])
    len_q, len_kv = [some() for _ in range(batches)], [some() for _ in range(batches)]
    long = rng.randrange(batches)
    len_kv[long] = rng.randint(longest // 2, longest)
    len_q[rng.randrange(batches)] = rng.randint(1, longest)
    kv_heads = rng.choice([1, 2])
    options = dict(
        causal=rng.choice([False, False, True, "top_left"]),
        window_size=rng.choice([None, None, 0, 7, 40, (9, 3), (-1, 5)]),
        sm_scale=rng.choice([None, None, None, 0.0, -0.4]),
    )
    return Case(
        len_q,
        len_kv,
        heads=kv_heads * rng.choice([1, 2, 3]),
        kv_heads=kv_heads,
        dim=rng.choice([16, 24, 32]),
        dim_v=rng.choice([None, None, 16, 40]),
        dtype=dtype,
        shared_q=rng.choice([0, 0, 0, rng.randint(1, 90)]),
        options=options,
        slack=rng.choice([0, 0, 5]),
        scale_up=rng.choice([1.0, 1.0, 60.0]),
        seed=seed,
    )


def make(case: Case, device: str = "cpu") -> dict:
    """Return the call's tensors as keyword arguments; rows of no sequence hold NaN, which must reach nothing."""
    generator = torch.Generator().manual_seed(case.seed)
    total_q = case.shared_q or sum(case.len_q)
    total_kv = sum(case.len_kv)

    def rows(total: int, heads: int, dim: int, slack: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(total + slack, heads, dim, generator=generator) * scale
        x[total:] = float("nan")
        return x.to(case.dtype).to(device).requires_grad_()

    return dict(
        query=rows(total_q, case.heads, case.dim, 0 if case.shared_q else case.slack, case.scale_up),
        key=rows(total_kv, case.kv_heads, case.dim, case.slack),
        value=rows(total_kv, case.kv_heads, case.dim_v or case.dim, case.slack),
        query_offset=None if case.shared_q else offsets_from_lengths(case.len_q, device=device),
        key_offset=offsets_from_lengths(case.len_kv, device=device),
        broadcast_q=bool(case.shared_q),
        **case.options,
    )


def judge(case: Case, device: str = "cpu", **how) -> None:
    """Run the op forward and backward (LSE's gradient too) and compare all five results with the truth.

    Raises:
        AssertionError: naming the result, its error and what was allowed.
    """
    arguments = make(case, device)
    out, lse = jagged_flash_attention(**arguments, **how, return_lse=True)
    grad_out, grad_lse = _grads(out, lse, case)
    inputs = [arguments[n] for n in ("query", "key", "value")]
    got = [out, _finite(lse), *torch.autograd.grad([out, lse], inputs, [grad_out, grad_lse])]
    truth = _by_reference(arguments, torch.float64, grad_out, grad_lse)
    low = _by_torch(case, arguments, grad_out, grad_lse)
    problems = []
    floor = _cancelled(case, grad_out, *inputs)
    # Scores are rounded to fp32 before the exponential: an absolute error there is a relative one of P. The backward forms P
    # again from an LSE that was rounded as well.
    exponent = ROUNDING[torch.float32] * _largest(_finite(lse))
    share = {"out": 0.25, "lse": 0.0}
    for name, g, t, p in zip(("out", "lse", "dquery", "dkey", "dvalue"), got, truth, low):
        if not torch.isfinite(g).all():
            problems.append(f"{name}: {int((~torch.isfinite(g)).sum())} entries are not finite")
            continue
        error = _largest(g.double() - t)
        rounding = ROUNDING[case.dtype] + exponent * share.get(name, 1.0)
        allowed = 2 * _largest(p.double() - t) + rounding * max(1.0, _largest(t)) + floor.get(name, 0.0)
        if error > allowed:
            problems.append(f"{name}: off by {error:.3g}, allowed {allowed:.3g}")
    assert not problems, f"{'; '.join(problems)} in {case}"


def _grads(out: torch.Tensor, lse: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random output gradients; none for the LSE of rows without keys, which is a constant."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    grad_out = torch.randn(out.shape, generator=generator).to(out)
    grad_lse = torch.randn(lse.shape, generator=generator).to(lse)
    return grad_out, torch.where(torch.isfinite(lse), grad_lse, 0)


def _cancelled(case: Case, grad_out, query, key, value) -> dict[str, float]:
    """Return what fp32 leaves where dP - delta cancels (one visible key: the gradient is 0): its rounding times the operand."""
    scale = case.options.get("sm_scale")
    norm = lambda x: _largest(torch.nan_to_num(x.detach().float()).norm(dim=-1))
    left = ROUNDING[torch.float32] * norm(grad_out) * norm(value) * abs(case.dim**-0.5 if scale is None else scale)
    largest = lambda x: _largest(torch.nan_to_num(x.detach()))
    return {"dquery": left * largest(key) * case.heads, "dkey": left * largest(query) * case.heads}


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isinf(lse), 0, lse)


def _largest(x: torch.Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _by_reference(arguments: dict, dtype: torch.dtype, grad_out, grad_lse) -> list[torch.Tensor]:
    inputs = [arguments[n].detach().to(dtype).requires_grad_() for n in ("query", "key", "value")]
    options = {n: x for n, x in arguments.items() if n not in ("query", "key", "value", "query_offset", "key_offset")}
    out, lse = reference.attention(
        *inputs, arguments["query_offset"], arguments["key_offset"], **options, dtype=dtype, return_lse=True
    )
    return _with_grads(out, _finite(lse), inputs, grad_out.to(dtype), grad_lse.to(dtype))


def _with_grads(out, lse, inputs, grad_out, grad_lse) -> list[torch.Tensor]:
    """Return [out, lse, three gradients], zeros where nothing depends on an input."""
    outputs = [(x, g) for x, g in ((out, grad_out), (lse, grad_lse)) if x.requires_grad]
    grads = [None] * 3
    if outputs:
        grads = torch.autograd.grad([x for x, _ in outputs], inputs, [g for _, g in outputs], allow_unused=True)
    return [out.detach(), lse.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs))]


def _by_torch(case: Case, arguments: dict, grad_out, grad_lse) -> list[torch.Tensor]:
    """Return dense attention by sequence, every step rounded to the inputs' type: what the low precision costs anybody."""
    query, key, value = (arguments[n].detach().clone().requires_grad_() for n in ("query", "key", "value"))
    batches = len(case.len_kv)
    group = case.heads // case.kv_heads
    scale = case.options.get("sm_scale")
    scale = case.dim**-0.5 if scale is None else scale
    band = Band.make(case.options.get("causal", False), case.options.get("window_size"))
    rows_out = batches * query.shape[0] if case.shared_q else query.shape[0]
    out = query.new_zeros(rows_out, case.heads, value.shape[2])
    lse = torch.zeros(case.heads, rows_out, device=query.device)
    q0 = k0 = o0 = 0
    for len_q, len_kv in zip([case.shared_q] * batches if case.shared_q else case.len_q, case.len_kv):
        if len_q and len_kv:
            lo, hi = band.offsets(len_q, len_kv)
            i, j = torch.arange(len_q)[:, None], torch.arange(len_kv)[None, :]
            keep = ((j >= i + lo) & (j <= i + hi)).to(query.device)
            q = query[q0 : q0 + len_q].transpose(0, 1)
            k, v = (x[k0 : k0 + len_kv].transpose(0, 1).repeat_interleave(group, 0) for x in (key, value))
            scores = (torch.matmul(q, k.mT) * scale).float().masked_fill(~keep, -torch.inf)
            live = keep.any(1)
            scores = torch.where(live[:, None], scores, 0)
            p = torch.where(live[:, None], torch.softmax(scores, -1), 0).to(q.dtype)
            rows = slice(o0, o0 + len_q)
            out = out.index_copy(0, torch.arange(o0, o0 + len_q, device=q.device), torch.matmul(p, v).transpose(0, 1))
            row_lse = torch.where(live, torch.logsumexp(scores, -1), 0)
            lse = torch.cat([lse[:, : rows.start], row_lse, lse[:, rows.stop :]], 1)
        q0, k0, o0 = q0 + (0 if case.shared_q else len_q), k0 + len_kv, o0 + len_q
    return _with_grads(out, lse, [query, key, value], grad_out, grad_lse)
