"""Kernels of the kinds that people write: each exercises many features at once and is checked against torch."""

import math

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator

emulator.install()


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.autotune(
    configs=[triton.Config({"BM": 32, "BN": 64, "BK": 32, "GROUP": 4}, num_stages=3, num_warps=4)], key=["M", "N", "K"]
)
@triton.jit
def grouped_matmul(
    a, b, c, M, N, K, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One tile of C, tiles visited in groups of rows so that B's columns stay in L2."""
    pid = tl.program_id(axis=0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    per_group = GROUP * columns
    first = pid // per_group * GROUP
    height = min(rows - first, GROUP)
    pm = first + (pid % per_group) % height
    pn = (pid % per_group) // height
    m, n, k = (pm * BM + tl.arange(0, BM)) % M, (pn * BN + tl.arange(0, BN)) % N, tl.arange(0, BK)
    pa, pb = a + (m[:, None] * sam + k[None, :] * sak), b + (k[:, None] * sbk + n[None, :] * sbn)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        x = tl.load(pa, mask=k[None, :] < K - step * BK, other=0.0)
        y = tl.load(pb, mask=k[:, None] < K - step * BK, other=0.0)
        acc = tl.dot(x, y, acc)
        pa += BK * sak
        pb += BK * sbk
    if ACTIVATION == "leaky_relu":
        acc = leaky_relu(acc)
    cm, cn = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN)
    where = (cm[:, None] < M) & (cn[None, :] < N)
    tl.store(c + scm * cm[:, None] + scn * cn[None, :], acc.to(tl.float16), mask=where)


@pytest.mark.parametrize("activation", ["", "leaky_relu"])
def test_matmul_with_grouped_order_and_activation(activation):
    m, n, k = 100, 150, 70
    a, b, c = torch.randn(m, k).half(), torch.randn(k, n).half(), torch.empty(m, n, dtype=torch.float16)
    grid = lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)  # noqa: E731
    grouped_matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), ACTIVATION=activation)
    expected = a.float() @ b.float()
    if activation:
        expected = torch.nn.functional.leaky_relu(expected, 0.01)
    torch.testing.assert_close(c.float(), expected, rtol=2e-3, atol=2e-2)


@triton.jit
def norm_forward(x, y, w, b, mean, rstd, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, N, BLOCK):
        c = off + tl.arange(0, BLOCK)
        total += tl.load(x + row * stride + c, mask=c < N, other=0.0).to(tl.float32)
    mu = tl.sum(total, axis=0) / N
    square = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, N, BLOCK):
        c = off + tl.arange(0, BLOCK)
        v = tl.load(x + row * stride + c, mask=c < N, other=0.0).to(tl.float32)
        v = tl.where(c < N, v - mu, 0.0)
        square += v * v
    r = 1 / tl.sqrt(tl.sum(square, axis=0) / N + eps)
    tl.store(mean + row, mu)
    tl.store(rstd + row, r)
    for off in range(0, N, BLOCK):
        c = off + tl.arange(0, BLOCK)
        v = tl.load(x + row * stride + c, mask=c < N, other=0.0).to(tl.float32)
        out = (v - mu) * r * tl.load(w + c, mask=c < N) + tl.load(b + c, mask=c < N)
        tl.store(y + row * stride + c, out, mask=c < N)


@triton.jit
def norm_backward(dx, dy, dw, db, x, w, mean, rstd, lock, stride, N, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """dx of one row, and its share of dw and db added under a spin lock to one of GROUPS partial sums."""
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < N
    xv = tl.load(x + row * stride + c, mask=inside, other=0).to(tl.float32)
    dyv = tl.load(dy + row * stride + c, mask=inside, other=0).to(tl.float32)
    wv = tl.load(w + c, mask=inside).to(tl.float32)
    mu, r = tl.load(mean + row), tl.load(rstd + row)
    xhat = tl.where(inside, (xv - mu) * r, 0.0)
    wdy = tl.where(inside, wv * dyv, 0.0)
    c1, c2 = tl.sum(xhat * wdy, axis=0) / N, tl.sum(wdy, axis=0) / N
    tl.store(dx + row * stride + c, (wdy - (xhat * c1 + c2)) * r, mask=inside)
    group = row % GROUPS
    mine = lock + group
    count = mine + GROUPS
    pw, pb = dw + group * N + c, db + group * N + c
    part_w, part_b = (dyv * xhat).to(wv.dtype), dyv.to(wv.dtype)
    while tl.atomic_cas(mine, 0, 1) == 1:
        pass
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        part_w += tl.load(pw, mask=inside)
        part_b += tl.load(pb, mask=inside)
    tl.store(pw, part_w, mask=inside)
    tl.store(pb, part_b, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(mine, 0)


@pytest.mark.parametrize("policy", ["eager", "random"])
def test_layer_norm_and_its_backward_with_locks(policy):
    rows, n, groups = 11, 50, 4
    x, w, b = (
        torch.randn(rows, n, requires_grad=True),
        torch.rand(n, requires_grad=True),
        torch.rand(n, requires_grad=True),
    )
    y, mean, rstd = torch.empty(rows, n), torch.empty(rows), torch.empty(rows)
    with emulator.options(policy=policy, seed=1):
        norm_forward[(rows,)](x.detach(), y, w.detach(), b.detach(), mean, rstd, n, n, 1e-5, BLOCK=32)
        expected = torch.nn.functional.layer_norm(x, (n,), w, b, 1e-5)
        torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-5)
        dy = torch.randn(rows, n)
        dx, dw, db = torch.empty(rows, n), torch.zeros(groups, n), torch.zeros(groups, n)
        locks = torch.zeros(2 * groups, dtype=torch.int32)
        norm_backward[(rows,)](dx, dy, dw, db, x.detach(), w.detach(), mean, rstd, locks, n, n, GROUPS=groups, BLOCK=64)
    expected.backward(dy)
    for got, leaf in ((dx, x), (dw.sum(0), w), (db.sum(0), b)):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-4, atol=1e-4)


@triton.jit
def attention_step(acc, l, m, q, k_desc, v_desc, start, scale, BN: tl.constexpr):
    k = k_desc.load([start, 0])
    s = tl.dot(q, k.T) * scale
    new = tl.maximum(m, tl.max(s, 1))
    p = tl.math.exp2(s - new[:, None])
    alpha = tl.math.exp2(m - new)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(q.dtype), v_desc.load([start, 0]), acc)
    return acc, l, new


@triton.jit
def attention(q, k, v, o, L, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1)
    base = head * L * D
    qd = tl.make_tensor_descriptor(q + base, shape=[L, D], strides=[D, 1], block_shape=[BM, D])
    kd = tl.make_tensor_descriptor(k + base, shape=[L, D], strides=[D, 1], block_shape=[BN, D])
    vd = tl.make_tensor_descriptor(v + base, shape=[L, D], strides=[D, 1], block_shape=[BN, D])
    od = tl.make_tensor_descriptor(o + base, shape=[L, D], strides=[D, 1], block_shape=[BM, D])
    start = tl.program_id(0) * BM
    acc, l, m = tl.zeros([BM, D], tl.float32), tl.zeros([BM], tl.float32), tl.full([BM], -float("inf"), tl.float32)
    tile = qd.load([start, 0])
    for n in tl.range(0, L, BN, num_stages=2):
        acc, l, m = attention_step(acc, l, m, tile, kd, vd, n, scale, BN)
    od.store([start, 0], (acc / l[:, None]).to(tile.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_through_device_descriptors(dtype):
    heads, length, dim = 2, 128, 64
    q, k, v = (torch.randn(heads, length, dim).to(dtype) for _ in range(3))
    out = torch.empty_like(q)
    attention[(length // 32, heads)](q, k, v, out, length, dim**-0.5 * math.log2(math.e), D=dim, BM=32, BN=64)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)


@triton.jit
def grouped_problems(table, sizes, PROGRAMS: tl.constexpr, PROBLEMS: tl.constexpr, B: tl.constexpr):
    """Persistent programs walk the tiles of several products whose pointers and sizes are read from memory."""
    tile, done = tl.program_id(0), 0
    for g in range(PROBLEMS):
        m, n, k = tl.load(sizes + 3 * g), tl.load(sizes + 3 * g + 1), tl.load(sizes + 3 * g + 2)
        columns = tl.cdiv(n, B)
        count = tl.cdiv(m, B) * columns
        while tile >= done and tile < done + count:
            a = tl.load(table + 3 * g).to(tl.pointer_type(tl.float32))
            b = tl.load(table + 3 * g + 1).to(tl.pointer_type(tl.float32))
            c = tl.load(table + 3 * g + 2).to(tl.pointer_type(tl.float32))
            local = tile - done
            i, j = local // columns * B + tl.arange(0, B), local % columns * B + tl.arange(0, B)
            acc = tl.zeros((B, B), tl.float32)
            for step in range(0, k, B):
                r = step + tl.arange(0, B)
                x = tl.load(a + i[:, None] * k + r[None, :], (i[:, None] < m) & (r[None, :] < k), 0.0)
                y = tl.load(b + r[:, None] * n + j[None, :], (r[:, None] < k) & (j[None, :] < n), 0.0)
                acc += tl.dot(x, y, input_precision="ieee")
            tl.store(c + i[:, None] * n + j[None, :], acc, (i[:, None] < m) & (j[None, :] < n))
            tile += PROGRAMS
        done += count


def test_grouped_matmul_through_a_table_of_pointers():
    shapes = [(40, 30, 20), (16, 70, 33), (50, 16, 16)]
    operands = [(torch.randn(m, k), torch.randn(k, n), torch.zeros(m, n)) for m, n, k in shapes]
    table = torch.tensor([t.data_ptr() for group in operands for t in group])
    sizes = torch.tensor(shapes, dtype=torch.int32).reshape(-1)
    grouped_problems[(3,)](table, sizes, PROGRAMS=3, PROBLEMS=3, B=16)
    for a, b, c in operands:
        torch.testing.assert_close(c, a @ b, rtol=1e-5, atol=1e-5)


@triton.jit
def dropout(x, o, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, i) > p
    tl.store(o + i, tl.where(keep, tl.load(x + i, i < n) / (1 - p), 0.0), mask=i < n)


def test_seeded_dropout_repeats_and_keeps_the_mean():
    x, first, second = torch.ones(5000), torch.empty(5000), torch.empty(5000)
    for out in (first, second):
        dropout[(5,)](x, out, 5000, 0.5, 123, BLOCK=1024)
    assert torch.equal(first, second) and set(first.tolist()) == {0.0, 2.0} and abs(first.mean() - 1) < 0.1


@triton.jit
def cross_entropy(logits, labels, loss, gradient, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    y = tl.load(labels + row)
    m, d = -float("inf"), 0.0
    for off in range(0, V, BLOCK):
        c = off + tl.arange(0, BLOCK)
        v = tl.load(logits + row * V + c, mask=c < V, other=-float("inf"))
        new = tl.maximum(m, tl.max(v))
        d = d * tl.exp(m - new) + tl.sum(tl.exp(v - new))
        m = new
    for off in range(0, V, BLOCK):
        c = off + tl.arange(0, BLOCK)
        v = tl.load(logits + row * V + c, mask=c < V, other=-float("inf"))
        tl.store(gradient + row * V + c, tl.exp(v - m) / d - (c == y), mask=c < V)
    tl.store(loss + row, tl.log(d) + m - tl.load(logits + row * V + y))


def test_online_cross_entropy():
    rows, vocabulary = 6, 100
    x = torch.randn(rows, vocabulary, requires_grad=True)
    y = torch.randint(0, vocabulary, (rows,))
    loss, gradient = torch.empty(rows), torch.empty(rows, vocabulary)
    cross_entropy[(rows,)](x.detach(), y, loss, gradient, vocabulary, BLOCK=32)
    expected = torch.nn.functional.cross_entropy(x, y, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, x.grad, rtol=1e-5, atol=1e-6)


class Doubled(torch.autograd.Function):
    """A kernel launched from autograd's own thread."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        out = torch.empty_like(gradient)
        twice[(1,)](gradient.contiguous(), out, N=gradient.numel())
        return out


@triton.jit
def twice(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i) * 2)


def test_launches_in_an_autograd_backward():
    x = torch.randn(16, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert (x.grad == 2).all()
