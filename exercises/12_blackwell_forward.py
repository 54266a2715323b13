# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 12: the Blackwell forward
#
# Read [notebooks/12_blackwell_forward.py](../notebooks/12_blackwell_forward.py) first.
# Kernels here are dense and small: one head, `q: [256, D]`, `k, v: [blocks * BN, D]`, bf16, and every length a multiple of the block.
# They run on the emulator under several schedules, and an answer passes when the numbers are right and nothing is found.
#
# Buffers and barriers are passed one by one here, not in the chapter's nouns: a role that you write names each of them.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# The next cell is given: two roles and two helpers that the kernels below use.
# Read it once.


# %%
@triton.jit
def ring(count, BUFFERS: tl.constexpr):
    """(buffer, phase) of the count-th use of a ring of buffers."""
    return count % BUFFERS, (count // BUFFERS) & 1


@triton.jit
def store_rows(out_ptr, row, values, D: tl.constexpr, BM: tl.constexpr):
    """values [BM, D] to the rows row .. row + BM - 1 of out."""
    rows, d = row + tl.arange(0, BM), tl.arange(0, D)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], values)


@triton.jit
def load_role(
    q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, blocks, HALVES: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """Each half's Q once, then K0 V0 K1 V1 ... through one ring."""
    for half in tl.static_range(HALVES):
        tlx.barrier_expect_bytes(q_fulls[half], 2 * BM * D)
        tlx.async_descriptor_load(q_desc, q[half], [half * BM, 0], q_fulls[half])
    for i in range(2 * blocks):
        slot, phase = ring(i, BUFFERS)
        tlx.barrier_wait(kv_empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(kv_fulls[slot], 2 * BN * D)
        if i % 2 == 0:
            tlx.async_descriptor_load(k_desc, kv[slot], [i // 2 * BN, 0], kv_fulls[slot])
        else:
            tlx.async_descriptor_load(v_desc, kv[slot], [i // 2 * BN, 0], kv_fulls[slot])


@triton.jit
def mma_role(
    q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties, s_fulls, p_fulls, acc_readys, acc_fulls,
    blocks, BUFFERS: tl.constexpr,
):  # fmt: skip
    """S of block 0 for both halves; then per block P V of a half, followed by its next S."""
    k_slot, k_phase = ring(0, BUFFERS)
    tlx.barrier_wait(kv_fulls[k_slot], k_phase)
    for half in tl.static_range(2):
        tlx.barrier_wait(q_fulls[half], 0)
        k_t = tlx.local_trans(kv[k_slot])
        tlx.async_dot(q[half], k_t, s[half], use_acc=False, mBarriers=[s_fulls[half]])
    tlx.tcgen05_commit(kv_empties[k_slot])
    for j in range(blocks):
        v_slot, v_phase = ring(2 * j + 1, BUFFERS)
        k_slot, k_phase = ring(2 * j + 2, BUFFERS)
        tlx.barrier_wait(kv_fulls[v_slot], v_phase)
        for half in tl.static_range(2):
            tlx.barrier_wait(p_fulls[half], j & 1)
            tlx.barrier_wait(acc_readys[half], j & 1)
            v, done = kv[v_slot], acc_fulls[half]
            tlx.async_dot(p_tiles[half], v, accs[half], use_acc=j > 0, mBarriers=[done])
            if j + 1 < blocks:
                if half == 0:
                    tlx.barrier_wait(kv_fulls[k_slot], k_phase)
                k_t = tlx.local_trans(kv[k_slot])
                tlx.async_dot(q[half], k_t, s[half], use_acc=False, mBarriers=[s_fulls[half]])
        tlx.tcgen05_commit(kv_empties[v_slot])
        if j + 1 < blocks:
            tlx.tcgen05_commit(kv_empties[k_slot])


# %% [markdown]
# ## 12.1 Rescale only when it matters
#
# (difficulty 2 of 3, 20 minutes) No kernel: the idea in PyTorch.
# `scores: [rows, blocks, BN]` are in log2 units, `values: [blocks * BN, D]`.
# Walk the blocks.
# A row raises its reference maximum only if the block's maximum exceeds the *current reference* by more than `threshold`; otherwise it keeps the stale one, and some exponentials are larger than 1.
# The first block always sets it.
# In the end the output is exact all the same.
#
# Return `out: [rows, D]` and `raised: [rows]`, how often each row raised its reference after the first block (int64).
# Use `torch.exp2`.
# Walk block by block: no exponential of more than one block at a time (at most `rows * BN` elements in any new tensor, or the size of `out` if that is larger), and no more than 12 times that alive at the same time, lists included.
# Build the softmax yourself: `torch.softmax` and its kin are forbidden.


# %% tags=["ex-12.1"]
def lazy_attention(scores, values, threshold):
    """-> (out [rows, D], raised [rows] int64)."""
    raise NotImplementedError("12.1: not started")  # YOUR CODE


# %%
check("12.1", lazy_attention)

# %% [markdown]
# ## 12.2 Six buffers into 512 columns
#
# (difficulty 2 of 3, 15 minutes) This kernel wants S, P and an accumulator for each of two halves: 2 x 128 + 2 x 64 + 2 x 128 = 640 columns.
# Tensor memory has 512.
# P of a half is written only after its S has been read, so P may live inside S.
# Change the allocations so that it does; all six buffers stay in tensor memory, and the body stays as it is.
#
# Launched on one program with `D=128, BM=BN=128`.


# %% tags=["ex-12.2"]
@triton.jit
def crowded_kernel(
    q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Two halves, one after the other in one task; out: [256, D] fp32."""
    # YOUR CODE: the buffers below do not fit
    q = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, 2)
    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2, tlx.storage_kind.tmem)
    loaded = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(loaded[0], 4 * BM * D)
    for half in tl.static_range(2):
        tlx.async_descriptor_load(q_desc, q[half], [half * BM, 0], loaded[0])
    tlx.barrier_wait(loaded[0], 0)
    m_0 = tl.full((BM,), float("-inf"), tl.float32)
    m_1 = tl.full((BM,), float("-inf"), tl.float32)
    l_0 = tl.zeros((BM,), tl.float32)
    l_1 = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_expect_bytes(loaded[0], 4 * BN * D)
        tlx.async_descriptor_load(k_desc, kv[0], [j * BN, 0], loaded[0])
        tlx.async_descriptor_load(v_desc, kv[1], [j * BN, 0], loaded[0])
        tlx.barrier_wait(loaded[0], (j & 1) ^ 1)
        tlx.async_dot(q[0], tlx.local_trans(kv[0]), s[0], use_acc=False, force_async=True)
        tlx.async_dot(q[1], tlx.local_trans(kv[0]), s[1], use_acc=False, mBarriers=[done[0]])
        tlx.barrier_wait(done[0], 0)
        m_0, l_0 = crowded_softmax(s[0], p_tiles[0], accs[0], m_0, l_0, scale_log2, j)
        m_1, l_1 = crowded_softmax(s[1], p_tiles[1], accs[1], m_1, l_1, scale_log2, j)
        tlx.async_dot(p_tiles[0], kv[1], accs[0], use_acc=j > 0, force_async=True)
        tlx.async_dot(p_tiles[1], kv[1], accs[1], use_acc=j > 0, mBarriers=[done[0]])
        tlx.barrier_wait(done[0], 1)
    store_rows(out_ptr, 0, tlx.local_load(accs[0]) / l_0[:, None], D, BM)
    store_rows(out_ptr, BM, tlx.local_load(accs[1]) / l_1[:, None], D, BM)


@triton.jit
def crowded_softmax(s_tile, p_tile, acc, m, l, scale_log2, j):
    """S -> P of one half, and its accumulator rescaled; returns the new m and l."""
    scores = tlx.local_load(s_tile) * scale_log2
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    alpha = tl.math.exp2(m - m_new)
    p = tl.math.exp2(scores - m_new[:, None])
    tlx.local_store(p_tile, p.to(tl.bfloat16))
    if j > 0:
        tlx.local_store(acc, tlx.local_load(acc) * alpha[:, None])
    return m_new, l * alpha + tl.sum(p, axis=1)


# %%
check("12.2", crowded_kernel)

# %% [markdown]
# ## 12.3 Bug hunt: scores that come too early
#
# (difficulty 2 of 3, 20 minutes) One half, and S and P in columns of their own.
# That allows a trick: the tensor core starts the *next* S before it waits for P, so it works while the softmax does.
# Somebody forgot what this needs.
# Run the check before you change anything: the report says that one S can be overtaken by the next.
# On another schedule it is two accesses to one buffer that nothing orders.
# Mend the kernel without giving the trick up: the limit is 13,500 modelled cycles.
#
# Launched on one program with `D=64, BM=128, BN=64, BUFFERS=4` and six key blocks.


# %% tags=["ex-12.3"]
@triton.jit
def early_kernel(
    q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """out: [128, D] fp32; roles: softmax (default), mma, load."""
    # YOUR CODE: two roles below do not agree on when S may be overwritten
    q = tlx.local_alloc((BM, D), tl.bfloat16, 1)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    s = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    p_tile = tlx.local_alloc((BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_full = tlx.alloc_barriers(1)
    s_empty = tlx.alloc_barriers(1)
    p_full = tlx.alloc_barriers(1)
    acc_full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax
            m = tl.full((BM,), float("-inf"), tl.float32)
            l = tl.zeros((BM,), tl.float32)
            for j in range(blocks):
                tlx.barrier_wait(s_full[0], j & 1)
                scores = tlx.local_load(s[0]) * scale_log2
                m_new = tl.maximum(m, tl.max(scores, axis=1))
                alpha = tl.math.exp2(m - m_new)
                p = tl.math.exp2(scores - m_new[:, None])
                l = l * alpha + tl.sum(p, axis=1)
                m = m_new
                if j > 0:
                    tlx.barrier_wait(acc_full[0], (j - 1) & 1)
                    tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
                tlx.local_store(p_tile[0], p.to(tl.bfloat16))
                tlx.barrier_arrive(p_full[0], 1)
            tlx.barrier_wait(acc_full[0], (blocks - 1) & 1)
            store_rows(out_ptr, 0, tlx.local_load(acc[0]) / l[:, None], D, BM)
        with tlx.async_task(num_warps=1):  # mma
            tlx.barrier_wait(q_full[0], 0)
            for j in range(blocks + 1):
                if j < blocks:
                    slot, phase = ring(2 * j, BUFFERS)
                    tlx.barrier_wait(kv_fulls[slot], phase)
                    k_t, k_read = tlx.local_trans(kv[slot]), kv_empties[slot]
                    tlx.async_dot(q[0], k_t, s[0], use_acc=False, mBarriers=[s_full[0], k_read])
                if j > 0:
                    slot, phase = ring(2 * j - 1, BUFFERS)
                    tlx.barrier_wait(kv_fulls[slot], phase)
                    tlx.barrier_wait(p_full[0], (j - 1) & 1)
                    p, v, done = p_tile[0], kv[slot], [acc_full[0], kv_empties[slot]]
                    tlx.async_dot(p, v, acc[0], use_acc=j > 1, mBarriers=done)
        with tlx.async_task(num_warps=1):  # load
            load_role(
                q_desc, k_desc, v_desc, q, kv, q_full, kv_fulls, kv_empties, blocks,
                1, D, BM, BN, BUFFERS,
            )  # fmt: skip


# %%
check("12.3", early_kernel)

# %% [markdown]
# ## 12.4 A role to write: the correction
#
# (difficulty 3 of 3, 35 minutes) The softmax groups below publish, for each half: `alphas` (for every block after the first), at the end `sums` (the row sums) and `maxima` (the row's reference maximum, in log2 units).
# Write the role that
#
# 1. lets the first product of each half through: arrive on `acc_readys[half]`;
# 2. for every further block and half waits for `alpha_fulls[half]`, multiplies the accumulator by alpha *if any row asks for it*, and lets the product through;
# 3. at the end writes `out = acc / sum` and the natural log-sum-exp `lse = (maximum + log2(sum)) * ln 2`, once the last product is done.
#
# Only `correct` is yours; the kernel and its softmax role stay as they are.
# There are 1 to 5 key blocks.
#
# `alphas`, `sums` and `maxima` are `[BM, 1]` buffers.
# A column has one element: `tl.reshape(x, [BM])` makes a vector of it.
# The products complete `acc_fulls[half]`, one phase per block.


# %% tags=["ex-12.4"]
@triton.jit
def corrected_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, scale_log2, blocks,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """out: [256, D] fp32, lse: [256] fp32; roles: correction (default), softmax x 2, mma, load."""
    q = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)
    alphas = tlx.local_alloc((BM, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    sums = tlx.local_alloc((BM, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    maxima = tlx.local_alloc((BM, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(
                p_tiles, alphas, sums, maxima, group_type=tlx.reuse_group_type.distinct
            ),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)
    q_fulls = tlx.alloc_barriers(2)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_fulls = tlx.alloc_barriers(2)
    p_fulls = tlx.alloc_barriers(2)
    alpha_fulls = tlx.alloc_barriers(2)
    sum_fulls = tlx.alloc_barriers(2)
    acc_readys = tlx.alloc_barriers(2)
    acc_fulls = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            correct(
                accs, alphas, sums, maxima, alpha_fulls, sum_fulls, acc_readys, acc_fulls,
                out_ptr, lse_ptr, blocks, D, BM,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, replicate=2):  # softmax
            half = tlx.async_task_replica_id()
            publish(
                s, p_tiles, alphas, sums, maxima, s_fulls, p_fulls, alpha_fulls, sum_fulls,
                half, scale_log2, blocks, BM,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):  # mma
            mma_role(
                q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties,
                s_fulls, p_fulls, acc_readys, acc_fulls, blocks, BUFFERS,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):  # load
            load_role(
                q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, blocks,
                2, D, BM, BN, BUFFERS,
            )  # fmt: skip


@triton.jit
def publish(
    s, p_tiles, alphas, sums, maxima, s_fulls, p_fulls, alpha_fulls, sum_fulls,
    half, scale_log2, blocks, BM: tl.constexpr,
):  # fmt: skip
    """The softmax of one half, with a stale maximum until it grows by more than 8."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(s_fulls[half], j & 1)
        scores = tlx.local_load(s[half]) * scale_log2
        block_max = tl.max(scores, axis=1)
        m_new = tl.where(block_max - m > 8.0, block_max, m)
        alpha = tl.math.exp2(m - m_new)
        m = m_new
        if j > 0:
            tlx.local_store(alphas[half], alpha[:, None])
            tlx.barrier_arrive(alpha_fulls[half])
        p = tl.math.exp2(scores - m[:, None])
        tlx.local_store(p_tiles[half], p.to(tl.bfloat16))
        tlx.barrier_arrive(p_fulls[half])
        l = l * alpha + tl.sum(p, axis=1)
    tlx.local_store(sums[half], l[:, None])
    tlx.local_store(maxima[half], m[:, None])
    tlx.barrier_arrive(sum_fulls[half])


@triton.jit
def correct(
    accs, alphas, sums, maxima, alpha_fulls, sum_fulls, acc_readys, acc_fulls,
    out_ptr, lse_ptr, blocks, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rescales between products, divides at the end, writes out and lse."""
    pass  # YOUR CODE


# %%
check("12.4", corrected_kernel)

# %% [markdown]
# ## 12.5 Ping-pong
#
# (difficulty 3 of 3, 25 minutes) The kernel below has two halves, and one softmax task that serves them in turn.
# So the exponentials of one half never overlap with the other half's waiting.
# Give each half a task of its own.
# The limit is 25,000 modelled cycles; the given kernel takes about 29,500.
#
# Launched on one program with `D=128, BM=BN=128, BUFFERS=3` and four key blocks.


# %% tags=["ex-12.5"]
@triton.jit
def ping_pong_kernel(
    q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """out: [256, D] fp32."""
    # YOUR CODE: one softmax task serves both halves
    q = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))
    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)
    q_fulls = tlx.alloc_barriers(2)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_fulls = tlx.alloc_barriers(2)
    p_fulls = tlx.alloc_barriers(2)
    acc_readys = tlx.alloc_barriers(2)
    acc_fulls = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax of both halves
            m_0 = tl.full((BM,), float("-inf"), tl.float32)
            l_0 = tl.zeros((BM,), tl.float32)
            m_1 = tl.full((BM,), float("-inf"), tl.float32)
            l_1 = tl.zeros((BM,), tl.float32)
            for j in range(blocks):
                m_0, l_0 = half_step(
                    s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
                    0, j, m_0, l_0, scale_log2,
                )  # fmt: skip
                m_1, l_1 = half_step(
                    s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
                    1, j, m_1, l_1, scale_log2,
                )  # fmt: skip
            half_end(accs, acc_fulls, out_ptr, 0, blocks, l_0, D, BM)
            half_end(accs, acc_fulls, out_ptr, 1, blocks, l_1, D, BM)
        with tlx.async_task(num_warps=1):  # mma
            mma_role(
                q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties,
                s_fulls, p_fulls, acc_readys, acc_fulls, blocks, BUFFERS,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):  # load
            load_role(
                q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, blocks,
                2, D, BM, BN, BUFFERS,
            )  # fmt: skip


@triton.jit
def half_step(s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls, half, j, m, l, scale_log2):
    """One block of one half: S -> P, accumulator rescaled; returns m and l."""
    tlx.barrier_wait(s_fulls[half], j & 1)
    scores = tlx.local_load(s[half]) * scale_log2
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    alpha = tl.math.exp2(m - m_new)
    p = tl.math.exp2(scores - m_new[:, None])
    if j > 0:
        tlx.barrier_wait(acc_fulls[half], (j - 1) & 1)
        tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha[:, None])
    tlx.barrier_arrive(acc_readys[half])
    tlx.local_store(p_tiles[half], p.to(tl.bfloat16))
    tlx.barrier_arrive(p_fulls[half])
    return m_new, l * alpha + tl.sum(p, axis=1)


@triton.jit
def half_end(accs, acc_fulls, out_ptr, half, blocks, l, D: tl.constexpr, BM: tl.constexpr):
    """The result of one half, once its last product is done."""
    tlx.barrier_wait(acc_fulls[half], (blocks - 1) & 1)
    store_rows(out_ptr, half * BM, tlx.local_load(accs[half]) / l[:, None], D, BM)


# %%
check("12.5", ping_pong_kernel)

# %% [markdown]
# ## 12.6 Peel the loop
#
# (difficulty 2 of 3, 20 minutes) No kernel (and `jfa.masks` and `jfa.schedule` are closed).
# Query `i` of a sequence sees the keys `i + lo <= j <= i + hi` with `0 <= j < len_kv`.
# A tile holds the queries `first .. last`.
# Which key blocks of `block` keys does it need, and which of them need no mask, because *every* query of the tile sees *all* `block` keys of it?
#
# Return four block numbers `(begin, bulk_begin, bulk_end, end)`: blocks `begin .. end - 1` hold at least one visible pair, blocks `bulk_begin .. bulk_end - 1` need no mask.
# Where nothing is visible return `(0, 0, 0, 0)`; where there is no bulk let `bulk_begin == bulk_end`, anywhere in `begin .. end`.


# %% tags=["ex-12.6"]
def peel(first, last, len_kv, lo, hi, block):
    """-> (begin, bulk_begin, bulk_end, end), in blocks of keys."""
    raise NotImplementedError("12.6: not started")  # YOUR CODE


# %%
check("12.6", peel)
