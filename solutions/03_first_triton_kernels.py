# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 03: first Triton kernels
#
# Read [notebooks/03_first_triton_kernels.py](../notebooks/03_first_triton_kernels.py) first.
# Every answer here is a kernel.
# It runs on the emulator, on your CPU; the same source compiles for a GPU.
# Write the body below the docstring, then run the check cell under it.
#
# A kernel returns nothing: it stores its result through the pointers it was given.
# Each exercise shows how the check launches it.
#
# Every program does its own share of the work and no other: **each element of a result is stored once**.
# Numbers that go into a softmax or a log-sum-exp may lie anywhere between -50,000 and 50,000, in any order.

# %% tags=["setup"]
import triton
import triton.language as tl

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 3.1 Scale and add, any length
#
# (difficulty 1 of 3, 15 minutes) Compute `out[i] = a * x[i] + y[i]` for `0 <= i < n`.
# Program `p` owns the elements `p * BLOCK .. (p + 1) * BLOCK - 1`, so the last program's block may hang over the end.
#
# Launched as `axpy_kernel[(triton.cdiv(n, BLOCK),)](x, y, out, a, n, BLOCK=64)`, and with other blocks.
# The three tensors end exactly at element `n`.
# Limit: no block larger than `BLOCK` elements.


# %% tags=["ex-3.1"]
@triton.jit
def axpy_kernel(x_ptr, y_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    """Compute out = a * x + y; x, y, out: [n] fp32, contiguous."""
    ### BEGIN SOLUTION
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < n
    x = tl.load(x_ptr + i, mask=valid, other=0.0)
    y = tl.load(y_ptr + i, mask=valid, other=0.0)
    tl.store(out_ptr + i, a * x + y, mask=valid)
    ### END SOLUTION


# %%
check("3.1", axpy_kernel)

# %% [markdown]
# ## 3.2 Transpose, whatever the strides
#
# (difficulty 1 of 3, 15 minutes) Write `out[c, r] = x[r, c]`.
# Program `(i, j)` moves the tile of `x` whose rows start at `i * BLOCK` and whose columns start at `j * BLOCK`.
# Both tensors may be views: element `(r, c)` of `x` is `x_row * r + x_col * c` elements after `x_ptr`.
#
# Launched on a grid of `(cdiv(rows, BLOCK), cdiv(cols, BLOCK))` with `BLOCK=16`, and with other blocks.
# Limits: at most 1 load for each program, and no block larger than `BLOCK * BLOCK` elements.


# %% tags=["ex-3.2"]
@triton.jit
def transpose_kernel(
    x_ptr, out_ptr, rows, cols, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr
):
    """Transpose x to out; x: [rows, cols], out: [cols, rows], fp32, any strides (in elements)."""
    ### BEGIN SOLUTION
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (c < cols)
    tile = tl.load(x_ptr + r * x_row + c * x_col, mask=inside, other=0.0)
    tl.store(out_ptr + c * out_row + r * out_col, tile, mask=inside)
    ### END SOLUTION


# %%
check("3.2", transpose_kernel)

# %% [markdown]
# ## 3.3 Log-sum-exp of a row
#
# (difficulty 2 of 3, 10 minutes) One program per row: `out[r] = log(sum over c of exp(x[r, c]))`, natural logarithm.
# Some rows hold only numbers near -200, some only numbers near +200: neither may overflow or underflow.
# `BLOCK` is a power of two and at least `cols`.
#
# Launched as `row_lse_kernel[(rows,)](x, out, cols, x.stride(0), BLOCK=triton.next_power_of_2(cols))`.
# Limit: no block larger than `BLOCK` elements.


# %% tags=["ex-3.3"]
@triton.jit
def row_lse_kernel(x_ptr, out_ptr, cols, x_row, BLOCK: tl.constexpr):
    """Store out[r] = log sum_c exp(x[r, c]); x: [rows, cols], row stride x_row; out: [rows]."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
    m = tl.max(x, axis=0)
    tl.store(out_ptr + row, m + tl.log(tl.sum(tl.exp(x - m), axis=0)))
    ### END SOLUTION


# %%
check("3.3", row_lse_kernel)

# %% [markdown]
# ## 3.4 Softmax of rows longer than a block
#
# (difficulty 2 of 3, 25 minutes) The same softmax as in the chapter, but a row may be much longer than `BLOCK`, so the program goes through it in steps of `BLOCK` columns.
# Do so twice: once for the row's maximum `m` and the sum `l` of `exp(x - m)`, and once to write the result.
# When a step raises the maximum, the sum so far belongs to the old one: multiply it by `exp(old - new)`.
# That is the recurrence of chapter 02.
#
# Launched as `long_softmax_kernel[(rows,)](x, out, cols, x.stride(0), out.stride(0), BLOCK=32)`.
# Limits: no block larger than 32 elements, and at most 2 loads for each block of a row.


# %% tags=["ex-3.4"]
@triton.jit
def long_softmax_kernel(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    """Store out[r] = softmax(x[r]); x, out: [rows, cols] fp32, row strides x_row and out_row."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    m = float("-inf")
    l = 0.0
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(x, axis=0))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
        tl.store(out_ptr + row * out_row + c, tl.exp(x - m) / l, mask=c < cols)
    ### END SOLUTION


# %%
check("3.4", long_softmax_kernel)

# %% [markdown]
# ## 3.5 Scores: A times B transposed
#
# (difficulty 3 of 3, 25 minutes) The product that attention starts with: `out = A @ B^T`, so `out[m, n]` is the dot product of row `m` of A and row `n` of B.
# A and B are bf16; the sum over K is kept in fp32, and the result is fp32.
# The numbers may be as large as bf16 allows.
# Program `(i, j)` computes one `BM x BN` tile of the result.
# M, N and K need not be multiples of the block sizes.
# All three tensors are contiguous.
#
# Launched on `(cdiv(M, BM), cdiv(N, BN))` with `BM=BN=BK=16`, and with other tiles.
# Limit: no block larger than the largest of these tiles: `BM x BK`, `BN x BK`, `BM x BN`.


# %% tags=["ex-3.5"]
@triton.jit
def scores_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Compute out = A @ B^T; a: [M, K] bf16, b: [N, K] bf16, out: [M, N] fp32, all contiguous."""
    ### BEGIN SOLUTION
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(
            a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0
        )
        bt = tl.load(
            b_ptr + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0
        )
        acc = tl.dot(a, bt, acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))
    ### END SOLUTION


# %%
check("3.5", scores_kernel)

# %% [markdown]
# ## 3.6 The mean of every sequence
#
# (difficulty 3 of 3, 25 minutes) Your first jagged kernel.
# `x` holds the rows of all sequences, one sequence after another; sequence `b` owns the rows `offsets[b] .. offsets[b + 1] - 1`.
# Program `b` writes the mean of its rows to `out[b]`.
# A sequence without rows gets zeros.
# Rows of other sequences may hold NaN: what you load and do not use must not reach your sum.
#
# Launched as `mean_pool_kernel[(num_sequences,)](x, offsets, out, D, BLOCK_L=16, BLOCK_D=triton.next_power_of_2(D))`.
# Limit: no block larger than 16 rows of `BLOCK_D` columns.


# %% tags=["ex-3.6"]
@triton.jit
def mean_pool_kernel(x_ptr, offsets_ptr, out_ptr, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store means in out: [B, D] fp32; x: [total, D] fp32, contiguous; offsets: [B + 1] int32."""
    ### BEGIN SOLUTION
    b = tl.program_id(0)
    begin = tl.load(offsets_ptr + b)
    end = tl.load(offsets_ptr + b + 1)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(begin, end, BLOCK_L):
        r = start + tl.arange(0, BLOCK_L)
        inside = (r[:, None] < end) & (d[None, :] < D)
        total += tl.sum(
            tl.load(x_ptr + r[:, None] * D + d[None, :], mask=inside, other=0.0), axis=0
        )
    count = tl.maximum(end - begin, 1)
    tl.store(out_ptr + b * D + d, total / count, mask=d < D)
    ### END SOLUTION


# %%
check("3.6", mean_pool_kernel)

# %% [markdown]
# ## 3.7 Bug hunt: an innocent line
#
# (difficulty 2 of 3, 10 minutes) Program `(i, j)` of a grid of `(cdiv(rows, BR), cdiv(cols, BC))` writes the largest number of its tile of `x` to `out[i, j]`; `out` is contiguous.
# On square grids the kernel below is right.
# On other grids the report names the line with the store, but that line is innocent: one other line is wrong.
# Run the check, read which program accesses which elements, then work out where the number in the address comes from.
# A mask on the store would silence the report, but leave results unwritten.


# %% tags=["ex-3.7"]
@triton.jit
def tile_max_kernel(x_ptr, out_ptr, rows, cols, x_row, BR: tl.constexpr, BC: tl.constexpr):
    """Store the maximum of tile (i, j) in out[i, j]; x: [rows, cols] fp32, row stride x_row."""
    # YOUR CODE: one line below is wrong
    i, j = tl.program_id(0), tl.program_id(1)
    ### BEGIN SOLUTION
    tiles_across = tl.num_programs(1)
    ### STARTER
    # tiles_across = tl.num_programs(0)
    ### END SOLUTION
    r = i * BR + tl.arange(0, BR)
    c = j * BC + tl.arange(0, BC)
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    x = tl.load(x_ptr + r[:, None] * x_row + c[None, :], mask=inside, other=float("-inf"))
    largest = tl.max(tl.max(x, axis=1), axis=0)
    tl.store(out_ptr + i * tiles_across + j, largest)


# %%
check("3.7", tile_max_kernel)

# %% [markdown]
# ## 3.8 The best key of each query
#
# (difficulty 3 of 3, 30 minutes) For each row `m` of `q`, find the row of `k` with the largest dot product: store the product in `best[m]` and the number of the row of `k` in `which[m]`, the lowest one if several are equal.
# The scores `[M, N]` are never stored: a program owns `BM` queries, loops over the keys in blocks of `BN`, and carries the best so far.
# `N` is at least 1 and need not be a multiple of `BN`; all products of a query may be negative.
#
# Launched as `best_key_kernel[(cdiv(M, BM),)](q, k, best, which, M, N, D=D, BM=16, BN=16)`.
# All tensors are contiguous, and D is 16 or 32.
# `tl.argmax` gives the position inside a block.
# Limit: no block larger than 512 elements.


# %% tags=["ex-3.8"]
@triton.jit
def best_key_kernel(
    q_ptr, k_ptr, best_ptr, which_ptr, M, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Find the best keys; best: [M] fp32, which: [M] int32; q: [M, D], k: [N, D] bf16."""
    ### BEGIN SOLUTION
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :], mask=m[:, None] < M, other=0.0)
    best = tl.full((BM,), float("-inf"), tl.float32)
    which = tl.zeros((BM,), tl.int32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        kt = tl.load(k_ptr + n[None, :] * D + d[:, None], mask=n[None, :] < N, other=0.0)
        s = tl.where(n[None, :] < N, tl.dot(q, kt), float("-inf"))
        top = tl.max(s, axis=1)
        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)
        best = tl.maximum(best, top)
    tl.store(best_ptr + m, best, mask=m < M)
    tl.store(which_ptr + m, which, mask=m < M)
    ### END SOLUTION


# %%
check("3.8", best_key_kernel)
