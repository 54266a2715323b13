"""Answers to chapter 02's exercises."""

from tests.course.answers import right, wrong


def _function(name, parameters, body):
    return f"import torch\n\n\ndef {name}({parameters}):\n" + "".join(
        f"    {line}\n" for line in body.strip("\n").split("\n")
    )


def _softmax(body):
    return _function("masked_softmax", "scores, allowed", body)


def _merge(body):
    return _function("merge", "m1, l1, acc1, m2, l2, acc2", body)


def _pool(body):
    return "from jfa.layout import sequence_ids\n" + _function("pool", "q, k, v, k_offsets", body)


STEP = """        new_m = torch.maximum(m, scores.amax(1, keepdim=True))
        weights = torch.exp(scores - new_m)
        shrink = torch.exp(m - new_m)
        l = l * shrink + weights.sum(1, keepdim=True)
        acc = acc * shrink + weights @ v[start : start + block]
        m = new_m
"""
PACKED_NEW = "new_m = torch.maximum(m, scores.amax(1))"
GQA_NEW = "new_m = torch.maximum(m, scores.amax(-1))"
OWNER = "B, (L, D) = len(k_offsets) - 1, q.shape\nowner = sequence_ids(k_offsets, len(k))\ns = k @ q.T * D**-0.5\n"
TOP = "top = torch.full((B, L), -torch.inf).index_reduce_(0, owner, s, 'amax')\n"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 2.1
    wrong("2.1", "-1e4 in masked places", source=_softmax("s = torch.where(allowed, scores, -1e4)\ntop = s.amax(1, keepdim=True)\nw = torch.exp(s - top)\nt = w.sum(1, keepdim=True)\nseen = allowed.any(1, keepdim=True)\nreturn torch.where(seen, w / t, 0), torch.where(seen, top + t.log(), -torch.inf)[:, 0]")),
    wrong("2.1", "torch's log-softmax", source=_softmax("s = scores.masked_fill(~allowed, -torch.inf)\nw = torch.log_softmax(s, 1).exp().nan_to_num(0)\nreturn w, torch.where(allowed.any(1), s.amax(1) - torch.log(w.amax(1)), -torch.inf)")),
    wrong("2.1", "a categorical distribution", source=_softmax("s = scores.masked_fill(~allowed, -1e30)\nw = torch.distributions.Categorical(logits=s).probs * allowed\ntop = s.amax(1)\nreturn w, torch.where(allowed.any(1), top - torch.log(w.amax(1)), -torch.inf)")),
    right("2.1", "logaddexp along the row", source=_softmax("s = scores.masked_fill(~allowed, -torch.inf)\nlse = s[:, 0]\nfor c in range(1, s.shape[1]):\n    lse = torch.logaddexp(lse, s[:, c])\nreturn torch.where(allowed, torch.exp(s - lse[:, None]), 0), lse")),
    wrong("2.1", "softmin of the negative", source=_softmax("s = scores.masked_fill(~allowed, -torch.inf)\nw = torch.nn.functional.softmin(-s, 1).nan_to_num(0)\nreturn w, torch.where(allowed.any(1), s.amax(1) - w.amax(1).log(), -torch.inf)")),
    wrong("2.1", "one maximum for all rows", source=_softmax("s = scores.masked_fill(~allowed, -torch.inf)\ntop = s.max()\nw = torch.exp(s - top)\nt = w.sum(1)\nreturn w / torch.where(t > 0, t, 1)[:, None], top + t.log()")),
    wrong("2.1", "replaces the caller's scores", source=_softmax("scores[~allowed] = -torch.inf\ntop = scores.amax(1, keepdim=True).clamp(min=-1e30)\nw = torch.exp(scores - top)\nt = w.sum(1, keepdim=True)\nreturn w / t.clamp(min=1e-30), (top + t.log())[:, 0]")),
    wrong("2.1", "the mask multiplies", source=_softmax("top = (scores * allowed).amax(1, keepdim=True)\nw = torch.exp(scores - top) * allowed\nt = w.sum(1, keepdim=True)\nreturn w / torch.where(t > 0, t, 1), (top + t.log())[:, 0]")),
    wrong("2.1", "lse of a row without any is 0", source=_softmax("s = scores.masked_fill(~allowed, -torch.inf)\ntop = s.amax(1).clamp(min=-1e30)\nw = torch.exp(s - top[:, None])\nt = w.sum(1)\nsafe = torch.where(t > 0, t, 1)\nreturn w / safe[:, None], torch.where(t > 0, top, 0) + safe.log()")),
    wrong("2.1", "a constant beside the sum", source=_softmax("s = scores.masked_fill(~allowed, -torch.inf)\ntop = s.amax(1).clamp(min=-1e30)\nw = torch.exp(s - top[:, None])\nt = w.sum(1) + 1e-3\nreturn w / t[:, None], torch.where(allowed.any(1), top + t.log(), -torch.inf)")),
    right("2.1", "columns one by one, online", source=_softmax("m = torch.full((len(scores),), -1e30)\nl = torch.zeros(len(scores))\nfor c in range(scores.shape[1]):\n    s = torch.where(allowed[:, c], scores[:, c], -1e30)\n    n = torch.maximum(m, s)\n    l = l * torch.exp(m - n) + torch.where(allowed[:, c], torch.exp(s - n), 0)\n    m = n\nlse = torch.where(l > 0, m + torch.log(l), -torch.inf)\nreturn torch.where(allowed, torch.exp(scores - lse[:, None]), 0), lse")),
    right("2.1", "base 2 and out=", source=_softmax("import math\n\ns = scores.masked_fill(~allowed, float('-inf')) / math.log(2)\ntop = s.amax(1, keepdim=True)\ntop.masked_fill_(top.isinf(), 0)\nw = torch.empty_like(s)\ntorch.exp2(s - top, out=w)\nt = w.sum(1, keepdim=True)\nlse = (top + t.log2()) * math.log(2)\nreturn w.div_(t + (t == 0)), lse.squeeze(1)")),
    # ------------------------------------------------------------------------------------------ 2.2
    wrong("2.2", "in place", source=_merge("m = torch.maximum(m1, m2)\na, b = torch.exp(m1 - m.clamp(min=-1e30)), torch.exp(m2 - m.clamp(min=-1e30))\nacc1 *= a[:, None]\nacc1 += b[:, None] * acc2\nreturn m, l1 * a + l2 * b, acc1.clone()")),
    wrong("2.2", "three in one call", source=_merge("m = torch.maximum(m1, m2)\na = m.clamp(min=-1e30)\ns, t, _ = torch._foreach_exp([m1 - a, m2 - a, m - a])\nreturn m, l1 * s + l2 * t, acc1 * s[:, None] + acc2 * t[:, None]")),
    wrong("2.2", "Python's exp in a ufunc", source=_merge("import math\n\nimport numpy as np\n\nexp = np.frompyfunc(math.exp, 1, 1)\nm = torch.maximum(m1, m2)\na = m.clamp(min=-1e30)\ns, t = (torch.from_numpy(exp((x - a).numpy()).astype('float32')) for x in (m1, m2))\nreturn m, l1 * s + l2 * t, acc1 * s[:, None] + acc2 * t[:, None]")),
    right("2.2", "vmap over the queries", source=_merge("def one(m1, l1, a1, m2, l2, a2):\n    m = torch.maximum(m1, m2)\n    x = torch.where(m == -torch.inf, 0.0, m)\n    s, t = torch.exp(m1 - x), torch.exp(m2 - x)\n    return m, l1 * s + l2 * t, a1 * s + a2 * t\nreturn torch.vmap(one)(m1, l1, acc1, m2, l2, acc2)")),
    wrong("2.2", "the larger one as it is", source=_merge("if bool((m1 >= m2).all()):\n    s = torch.exp(m2 - m1.clamp(min=-1e30))\n    return m1, l1 + s * l2, acc1 + s[:, None] * acc2\nm = torch.maximum(m1, m2)\na, b = torch.exp(torch.stack([m1, m2]) - m.clamp(min=-1e30))\nreturn m, a * l1 + b * l2, a[:, None] * acc1 + b[:, None] * acc2")),
    wrong("2.2", "the first half's maximum", source=_merge("m = torch.where(m1 > -torch.inf, m1, m2)\nx = torch.where(m > -torch.inf, m, 0)\na, b = torch.exp(m1 - x), torch.exp(m2 - x)\nreturn m, a * l1 + b * l2, a[:, None] * acc1 + b[:, None] * acc2")),
    wrong("2.2", "merged means", source=_merge("m = torch.maximum(m1, m2)\nx = m.clamp(min=-1e30)\na, b = torch.exp(m1 - x), torch.exp(m2 - x)\nl = a * l1 + b * l2\nreturn m, l, (a[:, None] * acc1 + b[:, None] * acc2) / l.clamp(min=1e-30)[:, None]")),
    wrong("2.2", "logaddexp of both", source=_merge("lse = torch.logaddexp(m1 + l1.log(), m2 + l2.log())\nm = torch.maximum(m1, m2)\nx = m.clamp(min=-1e30)\nreturn m, torch.exp(lse - x), torch.exp(m1 - x)[:, None] * acc1 + torch.exp(m2 - x)[:, None] * acc2")),
    wrong("2.2", "differences cut at -20", source=_merge("m = torch.maximum(m1, m2)\nx = m.clamp(min=-1e30)\na, b = torch.exp((m1 - x).clamp(min=-5)), torch.exp((m2 - x).clamp(min=-5))\nreturn m, a * l1 + b * l2, a[:, None] * acc1 + b[:, None] * acc2")),
    wrong("2.2", "one maximum for all queries", source=_merge("m = torch.maximum(m1, m2)\nx = m.max().clamp(min=-1e30)\na, b = torch.exp(m1 - x), torch.exp(m2 - x)\nreturn x.expand_as(m).clone(), a * l1 + b * l2, a[:, None] * acc1 + b[:, None] * acc2")),
    wrong("2.2", "nobody's maximum is 0", source=_merge("m = torch.maximum(m1, m2)\nm = torch.where(m == -torch.inf, 0, m)\na, b = torch.exp(m1 - m), torch.exp(m2 - m)\nreturn m, a * l1 + b * l2, a[:, None] * acc1 + b[:, None] * acc2")),
    right("2.2", "einsum over both", source=_merge("m = torch.stack((m1, m2))\ntop = m.amax(0)\nw = (m - torch.nan_to_num(top, neginf=0.0)).exp()\nreturn top, torch.einsum('pn,pn->n', w, torch.stack((l1, l2))), torch.einsum('pn,pnd->nd', w, torch.stack((acc1, acc2)))")),
    right("2.2", "with masks by where", source=_merge("m = m1.maximum(m2)\na = torch.where(l1 > 0, torch.exp(m1 - m), 0)\nb = torch.where(l2 > 0, torch.exp(m2 - m), 0)\nreturn m, torch.addcmul(l1 * a, l2, b), torch.lerp(acc1 * a[:, None], acc1 * a[:, None] + acc2 * b[:, None], 1.0)")),
    # ------------------------------------------------------------------------------------------ 2.3
    wrong("2.3", "-1e4 in masked places", ("torch.where(column <= row, scores, -torch.inf)", "torch.where(column <= row, scores, -1e4)"), ("m = q.new_full((n, 1), -torch.inf)", "m = q.new_full((n, 1), -1e4)")),
    wrong("2.3", "a triangle of n x n", ("    m = q.new_full", "    lower = torch.ones(n, n, dtype=torch.bool).tril()\n    m = q.new_full"), ("column <= row", "lower[:, start : start + block]")),
    wrong("2.3", "lse in base 2", ("m + torch.log(l)", "m + torch.log2(l)")),
    wrong("2.3", "whole blocks only", ("range(0, n, block)", "range(0, max(n // block, 1) * block, block)")),
    wrong("2.3", "the block before the diagonal sees all", ("column <= row", "column < (row // block + 1) * block")),
    right("2.3", "shrinks by what the block's maximum is larger", ("shrink = torch.exp(m - new_m)", "shrink = torch.exp(torch.minimum(m - scores.amax(1, keepdim=True), torch.zeros(())))")),
    wrong("2.3", "scale 1 percent off", (" / dim**0.5", " / dim**0.5 * 1.01")),
    wrong("2.3", "in bf16", ("scores = q @ k[start : start + block].T", "scores = (q.bfloat16() @ k[start : start + block].T.bfloat16()).float()")),
    wrong("2.3", "a divisor that cannot vanish", ("return acc / l,", "return acc / (l + 1e-3),")),
    wrong("2.3", "scaled twice", ("    n, dim = q.shape\n", "    n, dim = q.shape\n    q = q / dim**0.5\n")),
    right("2.3", "transposed blocks and a bias", (STEP, """        bias = torch.zeros(len(column), n).masked_fill_(column[:, None] > row.T, -1e38)
        s = torch.where(bias < 0, bias, scores.T)
        top = torch.maximum(m[:, 0], s.max(0)[0])
        p = torch.exp(s - top)
        r = torch.exp(m[:, 0] - top)
        l.mul_(r[:, None]).add_(p.sum(0)[:, None])
        acc.mul_(r[:, None]).addmm_(p.T, v[column])
        m = top[:, None]
""")),
    right("2.3", "helpers and type hints", source="""
import math

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def absorb(state: State, s: Tensor, v: Tensor) -> State:
    m, l, acc = state
    top = torch.maximum(m, s.amax(dim=-1))
    p = (s - top.unsqueeze(-1)).exp_()
    old = (m - top).exp()
    return top, torch.addcmul(p.sum(-1), l, old), torch.addmm(acc * old.unsqueeze(-1), p, v)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, block: int = 16) -> tuple[Tensor, Tensor]:
    n, d = q.shape
    state = torch.full((n,), float("-inf")), torch.zeros(n), torch.zeros(n, d)
    positions = torch.arange(n)
    for kb, vb, at in zip(k.split(block), v.split(block), positions.split(block), strict=True):
        s = torch.einsum("id,jd->ij", q * (1 / math.sqrt(d)), kb)
        state = absorb(state, s.masked_fill(at > positions[:, None], float("-inf")), vb)
    m, l, acc = state
    return acc.div(l[:, None]), m.add(l.log())
"""),
    # ------------------------------------------------------------------------------------------ 2.4
    wrong("2.4", "blocks of two at least", ("        for start in range(first", "        block = max(block, 2)\n        for start in range(first")),
    wrong("2.4", "out is never cleared", ("out = torch.zeros_like(q)", "out = torch.empty_like(q)")),
    wrong("2.4", "lse of no keys is 0", ("lse = q.new_full((len(q),), -torch.inf)", "lse = q.new_zeros(len(q))")),
    wrong("2.4", "blocks counted over the whole batch", ("for start in range(first, last, block):", "for start in range(first // block * block, last, block):")),
    wrong("2.4", "stops where there are no queries", ("        queries = q[mine]", "        if mine.start == mine.stop:\n            break\n        queries = q[mine]")),
    wrong("2.4", "the neighbour times 0", ("            end = min(start + block, last)\n            scores = queries @ k[start:end].T\n", "            end = min(start + block, len(k))\n            scores = torch.where(torch.arange(start, end) < last, queries @ k[start:end].T, -torch.inf)\n")),
    wrong("2.4", "the first block's maximum", (PACKED_NEW, "new_m = torch.where(m == -torch.inf, scores.amax(1), m)")),
    wrong("2.4", "maximum from -1e4", ("m = q.new_full((len(queries),), -torch.inf)", "m = q.new_full((len(queries),), -1e4)")),
    wrong("2.4", "one maximum for all queries", (PACKED_NEW, "new_m = torch.maximum(m, scores.max().expand_as(m)) if len(m) else m")),
    wrong("2.4", "scale of the block", ("q[mine] / q.shape[1] ** 0.5", "q[mine] / block**0.5")),
    wrong("2.4", "no output for a single key", ("if last > first:", "if last > first + 1:")),
    right("2.4", "sequences as slices of split tensors", source="""
import torch


def packed_attention(q, k, v, q_offsets, k_offsets, block):
    nq, nk = torch.diff(q_offsets).tolist(), torch.diff(k_offsets).tolist()
    end = int(k_offsets[-1])
    outs, lses = [], []
    for x, y, z in zip(q.split(nq), k[:end].split(nk), v[:end].split(nk)):
        top, total, out = x.new_full((len(x), 1), -1e38), x.new_zeros(len(x), 1), torch.zeros_like(x)
        for at in range(0, len(y), block):
            s = torch.mm(x, y[at : at + block].mT).mul_(x.shape[-1] ** -0.5)
            new = torch.max(top, s.max(-1, keepdim=True).values)
            e, keep = s.sub_(new).exp_(), (top - new).exp_()
            total, out, top = total * keep + e.sum(-1, True), out * keep + e @ z[at : at + block], new
        seen = len(y) > 0
        outs.append(out / total if seen else out)
        lses.append((top + total.log())[:, 0] if seen else top.new_full((len(x),), float("-inf")))
    return torch.vstack(outs), torch.hstack(lses)
"""),
    # ------------------------------------------------------------------------------------------ 2.5
    wrong("2.5", "blocks of two at least", ("    n, heads, dim = q.shape\n", "    n, heads, dim = q.shape\n    block = max(block, 2)\n")),
    wrong("2.5", "lse with heads first", ("return out.reshape(n, heads, dim), lse.reshape(n, heads)", "return out.reshape(n, heads, dim), lse.reshape(n, heads).T.contiguous()")),
    wrong("2.5", "grouped the other way round", ("grouped = q.reshape(n, kv_heads, heads // kv_heads, dim)", "grouped = q.reshape(n, heads // kv_heads, kv_heads, dim).transpose(1, 2)"), ("out.reshape(n, heads, dim), lse.reshape(n, heads)", "out.transpose(1, 2).reshape(n, heads, dim), lse.transpose(1, 2).reshape(n, heads)")),
    wrong("2.5", "one maximum per query", (GQA_NEW, "new_m = torch.maximum(m, scores.amax((1, 2, 3))[:, None, None].expand_as(m))")),
    wrong("2.5", "the first block's maximum", (GQA_NEW, "new_m = torch.where(m == -torch.inf, scores.amax(-1), m)")),
    wrong("2.5", "whole blocks only", ("range(0, len(k), block)", "range(0, len(k) // block * block, block)")),
    wrong("2.5", "K copied for every head", ("    grouped = q.", "    k, v = k.repeat_interleave(heads // kv_heads, 1), v.repeat_interleave(heads // kv_heads, 1)\n    k, v = k[:, :: heads // kv_heads], v[:, :: heads // kv_heads]\n    grouped = q.")),
    wrong("2.5", "maximum from -1e4", ("m = q.new_full((n, kv_heads, heads // kv_heads), -torch.inf)", "m = q.new_full((n, kv_heads, heads // kv_heads), -1e4)")),
    wrong("2.5", "lse without the maximum", ("m + torch.log(l)", "torch.log(l)")),
    wrong("2.5", "scale 1 percent off", ("/ dim**0.5", "* 1.01 / dim**0.5")),
    right("2.5", "a loop over groups, in place", source="""
import torch


def gqa_attention(q, k, v, block):
    n, h, d = q.shape
    g = h // k.size(1)
    out = torch.zeros(n, h, d)
    top, total = torch.full((n, h, 1), -1e38), torch.zeros(n, h, 1)
    for kb, vb in zip(torch.split(k, block), torch.split(v, block)):
        for c in range(k.size(1)):
            mine = slice(c * g, (c + 1) * g)
            s = torch.tensordot(q[:, mine], kb[:, c], dims=([2], [1])) * d**-0.5
            new = torch.maximum(top[:, mine], s.amax(2, True))
            p, keep = torch.exp(s - new), torch.exp(top[:, mine] - new)
            total[:, mine] = total[:, mine] * keep + p.sum(2, True)
            out[:, mine] = out[:, mine] * keep + p @ vb[:, c]
            top[:, mine] = new
    return out / total, (top + torch.log(total)).squeeze(-1)
"""),
    # ------------------------------------------------------------------------------------------ 2.6
    wrong("2.6", "maximum over the whole batch", source=_pool(OWNER + "p = torch.exp(s - s.amax(0)) if len(s) else s\nl = torch.zeros(B, L).index_add(0, owner, p)\nacc = torch.zeros(B, L, D).index_add(0, owner, p[..., None] * v[:, None])\nreturn (acc / torch.where(l > 0, l, 1)[..., None]).reshape(B * L, D)")),
    wrong("2.6", "one maximum for all queries", source=_pool(OWNER + TOP + "top = top.amax(1, keepdim=True).expand(B, L)\np = torch.exp(s - top[owner])\nl = torch.zeros(B, L).index_add(0, owner, p)\nacc = torch.zeros(B, L, D).index_add(0, owner, p[..., None] * v[:, None])\nreturn (acc / torch.where(l > 0, l, 1)[..., None]).reshape(B * L, D)")),
    wrong("2.6", "queries first", source=_pool(OWNER + TOP + "p = torch.exp(s - top[owner])\nl = torch.zeros(B, L).index_add(0, owner, p)\nacc = torch.zeros(B, L, D).index_add(0, owner, p[..., None] * v[:, None])\nreturn (acc / torch.where(l > 0, l, 1)[..., None]).transpose(0, 1).reshape(B * L, D)")),
    wrong("2.6", "a softmax on padded rows", source=_pool("n = k_offsets.diff()\nB, (L, D) = len(n), q.shape\ninside = torch.arange(int(n.max())) < n[:, None]\nk2, v2 = torch.zeros(*inside.shape, D), torch.zeros(*inside.shape, D)\nk2[inside], v2[inside] = k, v\ns = (q @ k2.mT * D**-0.5).masked_fill(~inside[:, None], -1e30)\nreturn (s.softmax(-1) @ v2).reshape(B * L, D)")),
    wrong("2.6", "sequence by sequence", source=_pool("B, (L, D) = len(k_offsets) - 1, q.shape\nout = q.new_zeros(B, L, D)\nb = k_offsets.tolist()\nfor i in range(B):\n    if b[i + 1] > b[i]:\n        s = q @ k[b[i] : b[i + 1]].T * D**-0.5\n        p = torch.exp(s - s.amax(1, keepdim=True))\n        out[i] = p @ v[b[i] : b[i + 1]] / p.sum(1, keepdim=True)\nreturn out.view(B * L, D)")),
    wrong("2.6", "maximum at least 0", source=_pool(OWNER + "top = torch.zeros(B, L).index_reduce_(0, owner, s, 'amax')\np = torch.exp(s - top[owner])\nl = torch.zeros(B, L).index_add(0, owner, p)\nacc = torch.zeros(B, L, D).index_add(0, owner, p[..., None] * v[:, None])\nreturn (acc / torch.where(l > 0, l, 1)[..., None]).reshape(B * L, D)")),
    wrong("2.6", "no maximum", source=_pool(OWNER + "p = torch.exp(s)\nl = torch.zeros(B, L).index_add(0, owner, p)\nacc = torch.zeros(B, L, D).index_add(0, owner, p[..., None] * v[:, None])\nreturn (acc / torch.where(l > 0, l, 1)[..., None]).reshape(B * L, D)")),
    wrong("2.6", "a loop that numpy hides", source=_pool("import numpy as np\n\nB, (L, D) = len(k_offsets) - 1, q.shape\nx, y, b = (k @ q.T * D**-0.5).numpy(), v.numpy(), k_offsets.numpy()\n\ndef one(i):\n    s, w = x[b[i[0]] : b[i[0] + 1]], y[b[i[0]] : b[i[0] + 1]]\n    if not len(s):\n        return np.zeros((L, D), np.float32)\n    p = np.exp(s - s.max(0))\n    return (p.T @ w) / p.sum(0)[:, None]\n\nout = np.apply_along_axis(one, 1, np.arange(B)[:, None])\nreturn torch.from_numpy(np.ascontiguousarray(out, dtype=np.float32).reshape(B * L, D))")),
    right("2.6", "segments", source=_pool("B, (L, D) = len(k_offsets) - 1, q.shape\nn = k_offsets.diff().long()\ns = torch.einsum('ld,td->tl', q, k) / D**0.5\ntop = torch.segment_reduce(s, 'max', lengths=n, axis=0)\nwho = torch.arange(B).repeat_interleave(n)\np = torch.exp(s - top.index_select(0, who))\nboth = torch.cat([p.unsqueeze(2) * v.unsqueeze(1), p.unsqueeze(2)], dim=2)\nt = torch.zeros(B, L, D + 1).index_add_(0, who, both)\nreturn (t[..., :D] / (t[..., D:] + (t[..., D:] == 0))).flatten(0, 1)")),
    right("2.6", "products with a table of owners", source=_pool(OWNER + "mine = torch.arange(B)[:, None] == owner\ntop = torch.where(mine[:, :, None], s[None], -1e30).amax(1)\np = torch.exp(s - top[owner])\ntable = mine.float()\nl = table @ p\nacc = torch.einsum('bt,tl,td->bld', table, p, v)\nreturn (acc / l.clamp(min=1e-30)[..., None]).reshape(B * L, D)")),
]  # fmt: skip
