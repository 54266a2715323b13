"""Shapes, reductions, scans, matrix products and gathers against torch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import jfa  # noqa: F401


@triton.jit
def reduce_2d(x, o, OP: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "sum":
        r = tl.sum(v, AXIS, keep_dims=KEEP)
    elif OP == "max":
        r = tl.max(v, axis=AXIS, keep_dims=KEEP)
    elif OP == "min":
        r = v.min(AXIS, keep_dims=KEEP)
    elif OP == "argmax":
        r = tl.argmax(v, AXIS, keep_dims=KEEP)
    elif OP == "argmin":
        r = tl.argmin(v, AXIS, keep_dims=KEEP)
    else:
        r = tl.xor_sum(v, AXIS, keep_dims=KEEP)
    r = tl.reshape(r, (r.numel,))
    tl.store(o + tl.arange(0, r.numel), r)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max", "min", "argmax", "argmin", "xor_sum"])
def test_reductions(op, axis, keep):
    dtype = torch.int32 if op == "xor_sum" else torch.float32
    x = torch.randint(-99, 99, (16, 32)).to(dtype)
    indices = op.startswith("arg")
    out = torch.empty((32, 16)[axis], dtype=torch.int32 if indices else dtype)
    reduce_2d[(1,)](x, out, op, axis, keep, 16, 32)
    if op == "xor_sum":
        expected = torch.from_numpy(np.bitwise_xor.reduce(x.numpy(), axis))
    else:
        expected = {
            "sum": torch.sum,
            "max": torch.amax,
            "min": torch.amin,
            "argmax": torch.argmax,
            "argmin": torch.argmin,
        }[op](x, axis)
    assert torch.equal(out, expected.to(out.dtype))


@triton.jit
def combine_pairs(a_value, a_index, b_value, b_index):
    take = a_value * a_value > b_value * b_value
    return tl.where(take, a_value, b_value), tl.where(take, a_index, b_index)


@triton.jit
def linear_recurrence(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def custom_functions(x, o, index, scanned, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    value, at = tl.reduce((v, i), 0, combine_pairs)
    tl.store(o, value)
    tl.store(index, at)
    _, s = tl.associative_scan((v, v * 2), 0, linear_recurrence)
    tl.store(scanned + i, s)


def test_reduce_and_scan_with_a_users_function():
    x = torch.randn(64) * 0.5
    out, index, scanned = torch.empty(1), torch.empty(1, dtype=torch.int32), torch.empty(64)
    custom_functions[(1,)](x, out, index, scanned, 64)
    assert index.item() == x.abs().argmax() and out.item() == x[index.item()]
    state, expected = 0.0, []
    for v in x.tolist():
        state = state * v + 2 * v
        expected.append(state)
    torch.testing.assert_close(scanned, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@triton.jit
def scans(x, o, OP: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + at)
    if OP == "cumsum":
        r = tl.cumsum(v, AXIS, reverse=REVERSE)
    else:
        r = tl.cumprod(v, AXIS, reverse=REVERSE)
    tl.store(o + at, r)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
def test_scans(op, axis, reverse):
    x, out = torch.randn(8, 16), torch.empty(8, 16)
    scans[(1,)](x, out, op, axis, reverse, 8, 16)
    forward = x.flip(axis) if reverse else x
    expected = getattr(torch, op)(forward, axis)
    torch.testing.assert_close(out, expected.flip(axis) if reverse else expected, rtol=1e-5, atol=1e-6)


@triton.jit
def sorts(x, up, down, top, flipped, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)[:, None]
    at = rows * N + tl.arange(0, N)[None, :]
    v = tl.load(x + at)
    tl.store(up + at, tl.sort(v))
    tl.store(down + at, tl.sort(v, descending=True))
    tl.store(top + rows * 4 + tl.arange(0, 4)[None, :], tl.topk(v, 4))
    tl.store(flipped + at, tl.flip(v, 1))


def test_sort_topk_flip():
    x = torch.randn(4, 32)
    up, down, top, flipped = (torch.empty(s) for s in ((4, 32), (4, 32), (4, 4), (4, 32)))
    sorts[(1,)](x, up, down, top, flipped, 4, 32)
    assert torch.equal(up, x.sort(1).values) and torch.equal(down, x.sort(1, descending=True).values)
    assert torch.equal(top, x.topk(4).values) and torch.equal(flipped, x.flip(1))


@triton.jit
def shapes(x, transposed, joined, halves, back, inter, catted, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(transposed + n[:, None] * M + m[None, :], tl.trans(v))
    j = tl.join(v, -v)
    tl.static_assert(j.shape[2] == 2)
    tl.store(joined + (m[:, None, None] * N + n[None, :, None]) * 2 + tl.arange(0, 2)[None, None, :], j)
    left, right = tl.split(tl.permute(v.reshape(M, 2, N // 2), (0, 2, 1)))
    k = tl.arange(0, N // 2)
    tl.store(halves + m[:, None] * (N // 2) + k[None, :], left + right)
    again = tl.join(left, right).permute(0, 2, 1).reshape((M, N))
    tl.store(back + m[:, None] * N + n[None, :], again)
    tl.store(inter + m[:, None] * (2 * N) + tl.arange(0, 2 * N)[None, :], tl.interleave(v, v + 1))
    flat = v.ravel()
    tl.store(catted + tl.arange(0, 2 * M * N), tl.cat(flat, flat, can_reorder=True))


def test_shape_functions():
    x = torch.randn(8, 16)
    t, j, h, b, i, c = (torch.empty(s) for s in ((16, 8), (8, 16, 2), (8, 8), (8, 16), (8, 32), (256,)))
    shapes[(1,)](x, t, j, h, b, i, c, 8, 16)
    assert torch.equal(t, x.T) and torch.equal(j, torch.stack([x, -x], -1)) and torch.equal(h, x[:, :8] + x[:, 8:])
    assert torch.equal(b, x) and torch.equal(i, torch.stack([x, x + 1], -1).reshape(8, 32))
    assert torch.equal(c.sort().values, torch.cat([x.ravel(), x.ravel()]).sort().values)


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    r = tl.dot(x, y, out_dtype=OUT, input_precision=PRECISION)
    tl.store(c + m[:, None] * N + n[None, :], r)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str
)
def test_dot_of_narrow_types_accumulates_in_32_bits(dtype):
    a, b = (torch.randint(-4, 5, s).to(dtype) for s in ((32, 64), (64, 16)))
    out = torch.empty(32, 16, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    product[(1,)](a, b, out, 32, 16, 64, tl.float32 if dtype != torch.int8 else tl.int32, None)
    assert torch.equal(out, (a.float() @ b.float()).to(out.dtype))


def test_dot_into_float16_rounds_the_result():
    a, b = torch.randn(16, 32).half(), torch.randn(32, 16).half()
    out = torch.empty(16, 16, dtype=torch.float16)
    product[(1,)](a, b, out, 16, 16, 32, tl.float16, None)
    torch.testing.assert_close(out, (a.float() @ b.float()).half(), rtol=1e-3, atol=1e-3)


def test_input_precision_of_float32():
    a, b = torch.randn(16, 32), torch.randn(32, 16)
    exact, tf32 = torch.empty(16, 16), torch.empty(16, 16)
    product[(1,)](a, b, exact, 16, 16, 32, tl.float32, "ieee")
    product[(1,)](a, b, tf32, 16, 16, 32, tl.float32, "tf32")
    torch.testing.assert_close(exact, a @ b, rtol=1e-5, atol=1e-5)
    cut = [torch.from_numpy((v.numpy().view(np.uint32) & 0xFFFFE000).view(np.float32)) for v in (a, b)]
    torch.testing.assert_close(tf32, cut[0] @ cut[1], rtol=1e-5, atol=1e-5)
    assert (tf32 - a @ b).abs().max() > 1e-4


@triton.jit
def batched(a, b, c, B: tl.constexpr, M: tl.constexpr):
    i = tl.arange(0, B)[:, None, None] * M * M + tl.arange(0, M)[None, :, None] * M + tl.arange(0, M)[None, None, :]
    acc = tl.zeros((B, M, M), tl.float32)
    tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i), acc))


def test_dot_of_three_dimensions():
    a, b, c = torch.randn(4, 16, 16).half(), torch.randn(4, 16, 16).half(), torch.empty(4, 16, 16)
    batched[(1,)](a, b, c, 4, 16)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def scaled(
    a, a_scale, b, b_scale, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FA: tl.constexpr, FB: tl.constexpr
):
    pa: tl.constexpr = 2 if FA == "e2m1" else 1
    pb: tl.constexpr = 2 if FB == "e2m1" else 1
    m, n, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    x = tl.load(a + m[:, None] * (K // pa) + tl.arange(0, K // pa)[None, :])
    y = tl.load(b + tl.arange(0, K // pb)[:, None] * N + n[None, :])
    sx = tl.load(a_scale + m[:, None] * (K // 32) + g[None, :])
    sy = tl.load(b_scale + n[:, None] * (K // 32) + g[None, :])
    r = tl.dot_scaled(x, sx, FA, y, sy, FB)
    tl.store(c + m[:, None] * N + n[None, :], r)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6.0])


def random_operand(fmt, rows, k, seed):
    """(stored tensor [rows, k or k/2], float values [rows, k])."""
    generator = torch.Generator().manual_seed(seed)
    if fmt == "e2m1":
        packed = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
        return packed, torch.stack([E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]], -1).reshape(rows, k)
    dtype = torch.float8_e4m3fn if fmt == "e4m3" else torch.float8_e5m2
    values = torch.randn(rows, k, generator=generator).to(dtype)
    return values, values.float()


@pytest.mark.parametrize("left,right", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e2m1"), ("e2m1", "e4m3")])
def test_dot_scaled(left, right):
    m, n, k = 32, 16, 64
    a, av = random_operand(left, m, k, 0)
    b, bv = random_operand(right, n, k, 1)
    generator = torch.Generator().manual_seed(2)
    sa, sb = (torch.randint(120, 132, (r, k // 32), generator=generator, dtype=torch.uint8) for r in (m, n))
    out = torch.empty(m, n)
    stored_b = b.view(torch.uint8).T.contiguous().view(b.dtype)
    scaled[(1,)](a, sa, stored_b, sb, out, m, n, k, left, right)
    left, right = (v.double() * torch.exp2(s.double() - 127).repeat_interleave(32, 1) for v, s in ((av, sa), (bv, sb)))
    error = 2**-21 * (left.abs() @ right.abs().T)  # sums are fp32: a few roundings of what is added
    assert ((out.double() - left @ right.T).abs() <= error).all()


@triton.jit
def gathers(x, at, o, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(o + i, tl.gather(tl.load(x + i), tl.load(at + i), AXIS))


@pytest.mark.parametrize("axis", [0, 1])
def test_gather(axis):
    x, at = torch.randn(8, 16), torch.randint(0, 8, (8, 16), dtype=torch.int32)
    out = torch.empty(8, 16)
    gathers[(1,)](x, at, out, axis, 8, 16)
    assert torch.equal(out, x.gather(axis, at.long()))


@triton.jit
def counts(x, o, N: tl.constexpr, BINS: tl.constexpr):
    tl.store(o + tl.arange(0, BINS), tl.histogram(tl.load(x + tl.arange(0, N)), BINS))


def test_histogram():
    x, out = torch.randint(0, 16, (128,), dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    counts[(1,)](x, out, 128, 16)
    assert torch.equal(out, torch.bincount(x, minlength=16).int())


@triton.jit
def branching(v, limit):
    if v > limit:
        return v * 2
    else:
        return -v


@triton.jit
def mapped(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.map_elementwise(branching, tl.load(x + i), 0.5))


def test_map_elementwise_may_branch():
    x, out = torch.randn(32), torch.empty(32)
    mapped[(1,)](x, out, 32)
    assert torch.equal(out, torch.where(x > 0.5, x * 2, -x))


@triton.jit
def swizzled(o, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.swizzle2d(i, j, M, N, G)
    tl.store(o + a * N + b, i * N + j)


def test_swizzle2d_is_a_permutation():
    out = torch.empty(4, 4, dtype=torch.int32)
    swizzled[(1,)](out, 4, 4, 2)
    assert out.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
