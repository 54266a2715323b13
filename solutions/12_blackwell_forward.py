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
# They run on the emulator under several schedules, and an answer passes when the numbers are right and the emulator reports nothing.
#
# Buffers and barriers are passed one by one here, not in the chapter's aggregates, so a role that you write names each of them.

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
    """Return (buffer, phase) of the count-th use of a ring of buffers."""
    return count % BUFFERS, (count // BUFFERS) & 1


@triton.jit
def store_rows(out_ptr, row, values, D: tl.constexpr, BM: tl.constexpr):
    """Store values [BM, D] to the rows row .. row + BM - 1 of out."""
    rows, d = row + tl.arange(0, BM), tl.arange(0, D)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], values)


@triton.jit
def load_role(
    q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, blocks, HALVES: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """Load each half's Q once, then K0 V0 K1 V1 ... through one ring."""
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
    """Issue S of block 0 for both halves; then per block and half P V and its next S."""
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
# (difficulty 2 of 3, 40 minutes) No kernel: the idea in PyTorch.
# `scores: [rows, blocks, BN]` are in log2 units, `values: [blocks * BN, D]`.
# Loop over the blocks.
# A row raises its reference maximum only if the block's maximum exceeds the *current reference* by more than `threshold`; otherwise it keeps the stale one, and some exponentials are larger than 1.
# The first block always sets it.
# The output is exact nevertheless.
#
# Return `out: [rows, D]` and `raised: [rows]`, how often each row raised its reference after the first block (int64).
# Use `torch.exp2`.
# Work block by block: no exponential of more than one block at a time (at most `rows * BN` elements in any new tensor, or the size of `out` if that is larger), and no more than 12 times that alive at the same time, lists included.
# Build the softmax yourself: `torch.softmax` and similar functions are forbidden.


# %% tags=["ex-12.1"]
def lazy_attention(scores, values, threshold):
    """Return (out [rows, D], raised [rows] int64)."""
    ### BEGIN SOLUTION
    rows, blocks, width = scores.shape
    reference = torch.full((rows,), float("-inf"), dtype=scores.dtype)
    total = torch.zeros(rows, dtype=scores.dtype)
    out = torch.zeros(rows, values.shape[1], dtype=scores.dtype)
    raised = torch.zeros(rows, dtype=torch.int64)
    for j in range(blocks):
        s = scores[:, j]
        block_max = s.amax(dim=1)
        grew = block_max - reference > threshold
        new = torch.where(grew, block_max, reference)
        alpha = torch.exp2(reference - new)
        if j > 0:
            raised += grew
        p = torch.exp2(s - new[:, None])
        total = total * alpha + p.sum(dim=1)
        out = out * alpha[:, None] + p @ values[j * width : (j + 1) * width]
        reference = new
    return out / total[:, None], raised
    ### END SOLUTION


# %%
check("12.1", lazy_attention)

# %% [markdown]
# ## 12.2 Six buffers into 512 columns
#
# (difficulty 2 of 3, 30 minutes) This kernel needs S, P and an accumulator for each of two halves: 2 x 128 + 2 x 64 + 2 x 128 = 640 columns.
# Tensor memory has 512.
# P of a half is written only after its S has been read, so P may be inside S.
# Change the allocations so that it does; all six buffers stay in tensor memory, and the body stays as it is.
# Which S a P lies in is up to you, for this body makes both S before it writes either P.
# So `set_buffer_overlap` is optional here: without it the members of one `storage_alias_spec` all begin at the same column.
#
# Launched on one program with `D=64` or `D=128`, `BM=BN=128` and any scale.


# %% tags=["ex-12.2"]
@triton.jit
def crowded_kernel(
    q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend with two halves, one after the other in one task; out: [256, D] fp32."""
    # YOUR CODE: the buffers below do not fit
    q = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, 2)
    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)
    ### BEGIN SOLUTION
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))
    ### STARTER
    # s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)
    # p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2, tlx.storage_kind.tmem)
    ### END SOLUTION
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
    """Make P of one half from S, rescale its accumulator, and return the new m and l."""
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
# (difficulty 2 of 3, 40 minutes) One half, and S and P in columns of their own.
# That allows a trick: the tensor core starts the *next* S before it waits for P, so it works while the softmax does.
# The synchronization that this needs is missing.
# Run the check before you change anything: the report says that one S can be overtaken by the next.
# On another schedule it reports two accesses to one buffer that nothing orders.
# Fix the kernel and keep the trick: the limit is 13,500 modelled cycles.
#
# The limit is for `D=BN=64, BUFFERS=4` and six key blocks.
# Launched on one program with these and with other sizes and scales: `D` is 64 or 128, `BN` 32 to 128, `BUFFERS` at least 2, and there is at least one key block.
# `BM` is always 128.
# As given, the ring of K and V has `BUFFERS` buffers and uses them all.


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
                ### BEGIN SOLUTION
                tlx.barrier_arrive(s_empty[0], 1)
                ### STARTER
                ### END SOLUTION
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
                    ### BEGIN SOLUTION
                    tlx.barrier_wait(s_empty[0], (j & 1) ^ 1)
                    ### STARTER
                    ### END SOLUTION
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
# 2. for every further block and half waits for `alpha_fulls[half]`, multiplies the accumulator by alpha *if any row needs it*, and lets the product through;
# 3. at the end writes `out = acc / sum` and the natural log-sum-exp `lse = (maximum + log2(sum)) * ln 2`, once the last product is done.
#
# Only `correct` is yours; the kernel and its softmax role stay as they are.
# There are 1 to 5 key blocks, `D` and `BN` are 64 or 128, `BM` is always 128.
#
# `alphas`, `sums` and `maxima` are `[BM, 1]` buffers.
# A column has one element: `tl.reshape(x, [BM])` makes a vector of it.
# Each block's product completes one phase of `acc_fulls[half]`.


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
    """Compute the softmax of one half, with a stale maximum until it grows by more than 8."""
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
    """Rescale between products, divide at the end, write out and lse."""
    ### BEGIN SOLUTION
    for half in tl.static_range(2):
        tlx.barrier_arrive(acc_readys[half])
    for j in range(1, blocks):
        for half in tl.static_range(2):
            tlx.barrier_wait(alpha_fulls[half], (j - 1) & 1)
            alpha = tlx.local_load(alphas[half])
            tlx.barrier_wait(acc_fulls[half], (j - 1) & 1)
            if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:
                tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)
            tlx.barrier_arrive(acc_readys[half])
    for half in tl.static_range(2):
        tlx.barrier_wait(sum_fulls[half], 0)
        total = tlx.local_load(sums[half])
        top = tlx.local_load(maxima[half])
        lse = (top + tl.math.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + half * BM + tl.arange(0, BM), tl.reshape(lse, [BM]))
        tlx.barrier_wait(acc_fulls[half], (blocks - 1) & 1)
        store_rows(out_ptr, half * BM, tlx.local_load(accs[half]) / total, D, BM)
    ### END SOLUTION


# %%
check("12.4", corrected_kernel)

# %% [markdown]
# ## 12.5 Ping-pong
#
# (difficulty 3 of 3, 55 minutes) The kernel below has two halves, and one softmax task that serves them in turn.
# So the exponentials of one half never overlap with the products of the other.
# Give each half a task of its own.
# The limit is 25,000 modelled cycles; the given kernel takes about 29,500.
#
# The limit is for `D=BN=128, BUFFERS=3` and four key blocks.
# Launched on one program with these and with other sizes and scales: `D` and `BN` are 64 or 128, `BUFFERS` is at least 2, and there is at least one key block.
# `BM` is always 128.
# As given, the ring of K and V has `BUFFERS` buffers and uses them all.


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
        ### BEGIN SOLUTION
        with tlx.async_task("default"):  # softmax of half 0
            m = tl.full((BM,), float("-inf"), tl.float32)
            l = tl.zeros((BM,), tl.float32)
            for j in range(blocks):
                m, l = half_step(
                    s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
                    0, j, m, l, scale_log2,
                )  # fmt: skip
            half_end(accs, acc_fulls, out_ptr, 0, blocks, l, D, BM)
        with tlx.async_task(num_warps=4):  # softmax of half 1
            m = tl.full((BM,), float("-inf"), tl.float32)
            l = tl.zeros((BM,), tl.float32)
            for j in range(blocks):
                m, l = half_step(
                    s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
                    1, j, m, l, scale_log2,
                )  # fmt: skip
            half_end(accs, acc_fulls, out_ptr, 1, blocks, l, D, BM)
        ### STARTER
        # with tlx.async_task("default"):  # softmax of both halves
        #     m_0 = tl.full((BM,), float("-inf"), tl.float32)
        #     l_0 = tl.zeros((BM,), tl.float32)
        #     m_1 = tl.full((BM,), float("-inf"), tl.float32)
        #     l_1 = tl.zeros((BM,), tl.float32)
        #     for j in range(blocks):
        #         m_0, l_0 = half_step(
        #             s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
        #             0, j, m_0, l_0, scale_log2,
        #         )  # fmt: skip
        #         m_1, l_1 = half_step(
        #             s, p_tiles, accs, s_fulls, p_fulls, acc_readys, acc_fulls,
        #             1, j, m_1, l_1, scale_log2,
        #         )  # fmt: skip
        #     half_end(accs, acc_fulls, out_ptr, 0, blocks, l_0, D, BM)
        #     half_end(accs, acc_fulls, out_ptr, 1, blocks, l_1, D, BM)
        ### END SOLUTION
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
    """Make P of one block of one half, rescale its accumulator, and return m and l."""
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
    """Store the result of one half, once its last product is done."""
    tlx.barrier_wait(acc_fulls[half], (blocks - 1) & 1)
    store_rows(out_ptr, half * BM, tlx.local_load(accs[half]) / l[:, None], D, BM)


# %%
check("12.5", ping_pong_kernel)

# %% [markdown]
# ## 12.6 Peel the loop
#
# (difficulty 2 of 3, 25 minutes) No kernel (and `jfa.masks` and `jfa.schedule` are closed).
# Query `i` of a sequence sees the keys `i + lo <= j <= i + hi` with `0 <= j < len_kv`.
# A tile holds the queries `first .. last`.
# Which key blocks of `block` keys does it need, and which of them need no mask, because *every* query of the tile sees *all* `block` keys of it?
#
# Return four block numbers `(begin, bulk_begin, bulk_end, end)`: blocks `begin .. end - 1` hold at least one visible pair, blocks `bulk_begin .. bulk_end - 1` need no mask.
# Where nothing is visible return `(0, 0, 0, 0)`; where there is no bulk let `bulk_begin == bulk_end`, anywhere in `begin .. end`.


# %% tags=["ex-12.6"]
def peel(first, last, len_kv, lo, hi, block):
    """Return (begin, bulk_begin, bulk_end, end), in blocks of keys."""
    ### BEGIN SOLUTION
    key_begin = max(0, first + lo)
    key_end = min(len_kv, last + hi + 1)
    if key_begin >= key_end:
        return 0, 0, 0, 0
    begin, end = key_begin // block, -(-key_end // block)
    full_begin = max(0, last + lo)
    full_end = min(len_kv, first + hi + 1)
    bulk_begin = min(max(-(-full_begin // block), begin), end)
    bulk_end = min(max(full_end // block, bulk_begin), end)
    return begin, bulk_begin, bulk_end, end
    ### END SOLUTION


# %%
check("12.6", peel)

# %% [markdown]
# ## 12.7 Slice P
#
# (difficulty 3 of 3, 55 minutes) One half of 128 queries, and P inside S as in version 3.
# So the exponentials, the store of P, P V and the next S come one after the other, and nothing fills the gaps.
# But P V is a sum over keys: its first part may begin while the last exponentials are still being computed.
#
# Publish P in three slices: 64, 32 and 32 columns from left to right, `p_fulls[0]`, `[1]` and `[2]`, each as soon as it is stored.
# They get shorter because only what follows the last exponential cannot be hidden.
# `publish_slices` makes them from exponents that are in registers; `multiply_slices` multiplies each with its rows of V as soon as it is there.
# The products arrive on `done` once per block, when all of O is there.
# The kernel and its roles stay as they are.
#
# As given both functions take P whole: 22,800 modelled cycles for six key blocks at `D=128`.
# The limit is 21,500.
# Launched on one program with `D=64` or `D=128`, `BM=BN=128` and `BUFFERS=4`.


# %% tags=["ex-12.7"]
@triton.jit
def sliced_kernel(
    q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """out: [128, D] fp32; roles: softmax (default), mma, load."""
    q = tlx.local_alloc((BM, D), tl.bfloat16, 1)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem, reuse=storage)
    p_tile = tlx.local_alloc((BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(s, p_tile, group_type=tlx.reuse_group_type.shared))
    acc = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_full = tlx.alloc_barriers(1)
    p_fulls = tlx.alloc_barriers(3)
    acc_ready = tlx.alloc_barriers(1)
    acc_full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax
            softmax_role(
                s, p_tile, acc, s_full, p_fulls, acc_ready, acc_full, out_ptr, scale_log2, blocks,
                D, BM,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):  # mma
            one_half_mma(
                q, kv, s, p_tile, acc, q_full, kv_fulls, kv_empties, s_full, p_fulls, acc_ready,
                acc_full, blocks, D, BUFFERS,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):  # load
            load_role(
                q_desc, k_desc, v_desc, q, kv, q_full, kv_fulls, kv_empties, blocks,
                1, D, BM, BN, BUFFERS,
            )  # fmt: skip


@triton.jit
def softmax_role(
    s, p_tile, acc, s_full, p_fulls, acc_ready, acc_full, out_ptr, scale_log2, blocks,
    D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute the softmax with a stale maximum; rescale O, and arrive on acc_ready before P."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(s_full[0], j & 1)
        scores = tlx.local_load(s[0]) * scale_log2
        top = tl.max(scores, axis=1)
        m_new = tl.where(top - m > 8.0, top, m)
        alpha = tl.math.exp2(m - m_new)
        m = m_new
        if j > 0:
            column = alpha[:, None]
            if tl.min(tl.reshape(column, [BM]), 0) < 1.0:
                tlx.barrier_wait(acc_full[0], (j - 1) & 1)
                tlx.local_store(acc[0], tlx.local_load(acc[0]) * column)
        tlx.barrier_arrive(acc_ready[0])
        l = l * alpha + publish_slices(scores - m[:, None], p_tile[0], p_fulls)
    tlx.barrier_wait(acc_full[0], (blocks - 1) & 1)
    store_rows(out_ptr, 0, tlx.local_load(acc[0]) / l[:, None], D, BM)


@triton.jit
def one_half_mma(
    q, kv, s, p_tile, acc, q_full, kv_fulls, kv_empties, s_full, p_fulls, acc_ready, acc_full,
    blocks, D: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """Issue S of block 0; then per block P V, followed by the next S, which overwrites P."""
    tlx.barrier_wait(q_full[0], 0)
    for j in range(blocks + 1):
        if j > 0:
            slot, phase = ring(2 * j - 1, BUFFERS)
            tlx.barrier_wait(kv_fulls[slot], phase)
            tlx.barrier_wait(acc_ready[0], (j - 1) & 1)
            multiply_slices(p_tile[0], kv[slot], acc[0], p_fulls, acc_full[0], j - 1, D)
            tlx.tcgen05_commit(kv_empties[slot])
        if j < blocks:
            slot, phase = ring(2 * j, BUFFERS)
            tlx.barrier_wait(kv_fulls[slot], phase)
            k_t, k_read = tlx.local_trans(kv[slot]), kv_empties[slot]
            tlx.async_dot(q[0], k_t, s[0], use_acc=False, mBarriers=[s_full[0], k_read])


@triton.jit
def halves(x):
    """Return the left and right half of the columns of x [M, N], in registers."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@triton.jit
def publish_slices(exponents, p_tile, p_fulls):
    """Store P = 2 ** exponents [BM, BN] to p_tile; return P's row sums [BM]."""
    # YOUR CODE: P is published whole
    ### BEGIN SOLUTION
    left, right = halves(exponents)
    middle, last = halves(right)
    p_left = tl.math.exp2(left)
    tlx.local_store(tlx.subslice(p_tile, 0, 64), p_left.to(tl.bfloat16))
    tlx.barrier_arrive(p_fulls[0])
    p_middle = tl.math.exp2(middle)
    tlx.local_store(tlx.subslice(p_tile, 64, 32), p_middle.to(tl.bfloat16))
    tlx.barrier_arrive(p_fulls[1])
    p_last = tl.math.exp2(last)
    tlx.local_store(tlx.subslice(p_tile, 96, 32), p_last.to(tl.bfloat16))
    tlx.barrier_arrive(p_fulls[2])
    return tl.sum(p_left, axis=1) + tl.sum(p_middle, axis=1) + tl.sum(p_last, axis=1)
    ### STARTER
    # p = tl.math.exp2(exponents)
    # tlx.local_store(p_tile, p.to(tl.bfloat16))
    # tlx.barrier_arrive(p_fulls[0])
    # return tl.sum(p, axis=1)
    ### END SOLUTION


@triton.jit
def multiply_slices(p_tile, v, acc, p_fulls, done, j, D: tl.constexpr):
    """Issue O += P V of block j (O = P V in block 0); done: O has this block's share."""
    # YOUR CODE: the product waits for all of P
    ### BEGIN SOLUTION
    tlx.barrier_wait(p_fulls[0], j & 1)
    p, rows = tlx.subslice(p_tile, 0, 64), tlx.local_slice(v, [0, 0], [64, D])
    tlx.async_dot(p, rows, acc, use_acc=j > 0, force_async=True)
    tlx.barrier_wait(p_fulls[1], j & 1)
    p, rows = tlx.subslice(p_tile, 64, 32), tlx.local_slice(v, [64, 0], [32, D])
    tlx.async_dot(p, rows, acc, use_acc=True, force_async=True)
    tlx.barrier_wait(p_fulls[2], j & 1)
    p, rows = tlx.subslice(p_tile, 96, 32), tlx.local_slice(v, [96, 0], [32, D])
    tlx.async_dot(p, rows, acc, use_acc=True, mBarriers=[done])
    ### STARTER
    # tlx.barrier_wait(p_fulls[0], j & 1)
    # tlx.async_dot(p_tile, v, acc, use_acc=j > 0, mBarriers=[done])
    ### END SOLUTION


# %%
check("12.7", sliced_kernel)

# %% [markdown]
# The next cell is given: the roles around the products of 12.8, for tiles that have different numbers of key blocks.
# Tile `t` has 256 queries and the key blocks `firsts[t]` to `firsts[t + 1] - 1`; it may have none.
# Each role counts for itself: `step` counts blocks and `worked` counts tiles that had any, both from the launch's beginning.


# %%
@triton.jit
def load_tiles(
    q_desc, k_desc, v_desc, q, kv, q_fulls, q_empties, kv_fulls, kv_empties, firsts_ptr, tiles,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """Load per tile with blocks K of the first, Q of both halves, then V0 K1 V1 ..."""
    step, worked = 0, 0
    for tile in range(tiles):
        first = tl.load(firsts_ptr + tile)
        blocks = tl.load(firsts_ptr + tile + 1) - first
        for j in range(blocks):
            row = (first + j) * BN
            slot, phase = ring(2 * step, BUFFERS)
            tlx.barrier_wait(kv_empties[slot], phase ^ 1)
            tlx.barrier_expect_bytes(kv_fulls[slot], 2 * BN * D)
            tlx.async_descriptor_load(k_desc, kv[slot], [row, 0], kv_fulls[slot])
            if j == 0:
                for half in tl.static_range(2):
                    tlx.barrier_wait(q_empties[half], (worked & 1) ^ 1)
                    tlx.barrier_expect_bytes(q_fulls[half], 2 * BM * D)
                    box = [(2 * tile + half) * BM, 0]
                    tlx.async_descriptor_load(q_desc, q[half], box, q_fulls[half])
                worked += 1
            slot, phase = ring(2 * step + 1, BUFFERS)
            tlx.barrier_wait(kv_empties[slot], phase ^ 1)
            tlx.barrier_expect_bytes(kv_fulls[slot], 2 * BN * D)
            tlx.async_descriptor_load(v_desc, kv[slot], [row, 0], kv_fulls[slot])
            step += 1


@triton.jit
def softmax_tiles(
    s, p_tiles, alphas, sums, s_fulls, p_fulls, alpha_fulls, sum_fulls, sum_empties, firsts_ptr,
    half, scale_log2, tiles, BM: tl.constexpr,
):  # fmt: skip
    """Make P of one half of every tile; hand alpha and the row sums to the correction."""
    step, worked = 0, 0
    for tile in range(tiles):
        blocks = tl.load(firsts_ptr + tile + 1) - tl.load(firsts_ptr + tile)
        m = tl.full((BM,), float("-inf"), tl.float32)
        l = tl.zeros((BM,), tl.float32)
        for j in range(blocks):
            tlx.barrier_wait(s_fulls[half], step & 1)
            scores = tlx.local_load(s[half]) * scale_log2
            top = tl.max(scores, axis=1)
            m_new = tl.where(top - m > 8.0, top, m)
            alpha = tl.math.exp2(m - m_new)
            m = m_new
            if j > 0:
                tlx.local_store(alphas[half], alpha[:, None])
                tlx.barrier_arrive(alpha_fulls[half])
            p = tl.math.exp2(scores - m[:, None])
            tlx.local_store(p_tiles[half], p.to(tl.bfloat16))
            tlx.barrier_arrive(p_fulls[half])
            l = l * alpha + tl.sum(p, axis=1)
            step += 1
        if blocks > 0:
            tlx.barrier_wait(sum_empties[half], (worked & 1) ^ 1)
            tlx.local_store(sums[half], l)
            tlx.barrier_arrive(sum_fulls[half])
            worked += 1


@triton.jit
def correct_tiles(
    accs, alphas, sums, alpha_fulls, sum_fulls, sum_empties, acc_readys, acc_fulls, firsts_ptr,
    out_ptr, tiles, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rescale O between products; at a tile's end divide, free the accumulator and store O."""
    for half in tl.static_range(2):
        tlx.barrier_arrive(acc_readys[half])
    rescales, worked = 0, 0
    for tile in range(tiles):
        blocks = tl.load(firsts_ptr + tile + 1) - tl.load(firsts_ptr + tile)
        for _ in range(1, blocks):
            for half in tl.static_range(2):
                tlx.barrier_wait(alpha_fulls[half], rescales & 1)
                alpha = tlx.local_load(alphas[half])
                if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:
                    tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)
                tlx.barrier_arrive(acc_readys[half])
            rescales += 1
        for half in tl.static_range(2):
            row = (2 * tile + half) * BM
            if blocks > 0:
                tlx.barrier_wait(sum_fulls[half], worked & 1)
                total = tlx.local_load(sums[half])
                tlx.barrier_arrive(sum_empties[half])
                tlx.barrier_wait(acc_fulls[half], worked & 1)
                out = tlx.local_load(accs[half]) / total[:, None]
                tlx.barrier_arrive(acc_readys[half])
                store_rows(out_ptr, row, out, D, BM)
            else:
                store_rows(out_ptr, row, tl.zeros((BM, D), tl.float32), D, BM)
        if blocks > 0:
            worked += 1


@triton.jit
def issue_s(q, kv, s, s_fulls, kv_fulls, kv_empties, half, step, BUFFERS: tl.constexpr):
    """Issue S of a half's step: half 0 waits for K, half 1 frees it."""
    slot, phase = ring(2 * step, BUFFERS)
    if half == 0:
        tlx.barrier_wait(kv_fulls[slot], phase)
    k_t = tlx.local_trans(kv[slot])
    tlx.async_dot(q[half], k_t, s[half], use_acc=False, mBarriers=[s_fulls[half]])
    if half == 1:
        tlx.tcgen05_commit(kv_empties[slot])


@triton.jit
def issue_pv(
    p_tiles, kv, accs, p_fulls, acc_readys, kv_fulls, kv_empties, half, step, add,
    BUFFERS: tl.constexpr,
):  # fmt: skip
    """Issue O = P V of a half's step (O += P V where ``add``), once V, P and O are ready."""
    slot, phase = ring(2 * step + 1, BUFFERS)
    if half == 0:
        tlx.barrier_wait(kv_fulls[slot], phase)
    tlx.barrier_wait(acc_readys[half], step & 1)
    tlx.barrier_wait(p_fulls[half], step & 1)
    tlx.async_dot(p_tiles[half], kv[slot], accs[half], use_acc=add, force_async=True)
    if half == 1:
        tlx.tcgen05_commit(kv_empties[slot])


# %% [markdown]
# ## 12.8 The next tile's S, early
#
# (difficulty 3 of 3, 65 minutes) A program takes one tile after another, as in version 8, but here each tile has its own number of key blocks, and some have none.
# Version 8's loop assumes equal numbers.
# `multiply_tiles` below is right and has a seam: a tile's first S is issued behind the last P V of the tile before, of both halves.
# Until then the softmax groups have nothing to do.
#
# Issue each tile's first S as early as the memory allows: P is inside S, so S of a half may follow the P V of that half, and need not wait for the other half's.
# The order at every step of every half is: the P V that is due, maybe of the tile before, then the S that comes next.
# Only `multiply_tiles` is yours; the kernel stays as it is.
#
# The other roles rely on this:
#
# - `q_fulls[half]` completes once per tile that has blocks, and the mma role commits on `q_empties[half]` when the tile's last S of this half has read Q;
# - the mma role commits on `acc_fulls[half]` once per tile that has blocks, when its last P V is done: `tlx.tcgen05_commit`.
#
# The limits are 18,900 modelled cycles for four tiles of two blocks (as given: 20,700), and 13,600 for four tiles of one block (14,300).
# Launched on one program with `D=BN=64, BM=128`, and with `BUFFERS=4` or `3`.


# %% tags=["ex-12.8"]
@triton.jit
def tiles_kernel(
    q_desc, k_desc, v_desc, out_ptr, firsts_ptr, scale_log2, tiles,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """out: [256 * tiles, D] fp32; roles: correction (default), softmax x 2, mma, load."""
    q = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)
    alphas = tlx.local_alloc((BM, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(p_tiles, alphas, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)
    sums = tlx.local_alloc((BM,), tl.float32, 2)
    q_fulls = tlx.alloc_barriers(2)
    q_empties = tlx.alloc_barriers(2)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_fulls = tlx.alloc_barriers(2)
    p_fulls = tlx.alloc_barriers(2)
    alpha_fulls = tlx.alloc_barriers(2)
    sum_fulls = tlx.alloc_barriers(2)
    sum_empties = tlx.alloc_barriers(2)
    acc_readys = tlx.alloc_barriers(2)
    acc_fulls = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            correct_tiles(
                accs, alphas, sums, alpha_fulls, sum_fulls, sum_empties, acc_readys, acc_fulls,
                firsts_ptr, out_ptr, tiles, D, BM,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, replicate=2):  # softmax
            softmax_tiles(
                s, p_tiles, alphas, sums, s_fulls, p_fulls, alpha_fulls, sum_fulls, sum_empties,
                firsts_ptr, tlx.async_task_replica_id(), scale_log2, tiles, BM,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):  # mma
            multiply_tiles(
                q, kv, s, p_tiles, accs, q_fulls, q_empties, kv_fulls, kv_empties, s_fulls,
                p_fulls, acc_readys, acc_fulls, firsts_ptr, tiles, BUFFERS,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):  # load
            load_tiles(
                q_desc, k_desc, v_desc, q, kv, q_fulls, q_empties, kv_fulls, kv_empties,
                firsts_ptr, tiles, D, BM, BN, BUFFERS,
            )  # fmt: skip


@triton.jit
def multiply_tiles(
    q, kv, s, p_tiles, accs, q_fulls, q_empties, kv_fulls, kv_empties, s_fulls,
    p_fulls, acc_readys, acc_fulls, firsts_ptr, tiles, BUFFERS: tl.constexpr,
):  # fmt: skip
    """Issue all products, of both halves of every tile."""
    # YOUR CODE: a tile's first S waits for the last P V of the tile before
    ### BEGIN SOLUTION
    step, worked, place = 0, 0, 0  # place: of the step before, in its tile
    for tile in range(tiles):
        blocks = tl.load(firsts_ptr + tile + 1) - tl.load(firsts_ptr + tile)
        for j in range(blocks):
            for half in tl.static_range(2):
                if step > 0:
                    issue_pv(
                        p_tiles, kv, accs, p_fulls, acc_readys, kv_fulls, kv_empties,
                        half, step - 1, place > 0, BUFFERS,
                    )  # fmt: skip
                    if j == 0:
                        tlx.tcgen05_commit(acc_fulls[half])
                if j == 0:
                    tlx.barrier_wait(q_fulls[half], worked & 1)
                issue_s(q, kv, s, s_fulls, kv_fulls, kv_empties, half, step, BUFFERS)
                if j + 1 == blocks:
                    tlx.tcgen05_commit(q_empties[half])
            place = j
            step += 1
        if blocks > 0:
            worked += 1
    if step > 0:
        for half in tl.static_range(2):
            issue_pv(
                p_tiles, kv, accs, p_fulls, acc_readys, kv_fulls, kv_empties,
                half, step - 1, place > 0, BUFFERS,
            )  # fmt: skip
            tlx.tcgen05_commit(acc_fulls[half])
    ### STARTER
    # step, worked = 0, 0
    # for tile in range(tiles):
    #     blocks = tl.load(firsts_ptr + tile + 1) - tl.load(firsts_ptr + tile)
    #     if blocks > 0:
    #         for half in tl.static_range(2):
    #             tlx.barrier_wait(q_fulls[half], worked & 1)
    #             issue_s(q, kv, s, s_fulls, kv_fulls, kv_empties, half, step, BUFFERS)
    #             if blocks == 1:
    #                 tlx.tcgen05_commit(q_empties[half])
    #         for j in range(blocks):
    #             for half in tl.static_range(2):
    #                 issue_pv(
    #                     p_tiles, kv, accs, p_fulls, acc_readys, kv_fulls, kv_empties,
    #                     half, step, j > 0, BUFFERS,
    #                 )  # fmt: skip
    #                 if j + 1 < blocks:
    #                     issue_s(q, kv, s, s_fulls, kv_fulls, kv_empties, half, step + 1, BUFFERS)
    #                     if j + 2 == blocks:
    #                         tlx.tcgen05_commit(q_empties[half])
    #                 else:
    #                     tlx.tcgen05_commit(acc_fulls[half])
    #             step += 1
    #         worked += 1
    ### END SOLUTION


# %%
check("12.8", tiles_kernel)

# %% [markdown]
# ## 12.9 Registers from a compile report
#
# (difficulty 2 of 3, 40 minutes) No kernel.
# The emulator counts cycles and has no registers; the compiler has registers and counts no cycles.
# To divide registers among the roles you need both.
#
# `reports` is a list of dicts as `jfa compile --json` prints them, of one kernel with its registers split in different ways.
# `work` has the modelled cycles per step of each role if nothing spills; a role that is not in it is busy for 0.
# Return the index of the fastest split that may ship, or -1 if none may.
#
# A split may ship if it compiled (`error` is None), if its split is in force (`setmaxnreg_ignored` is False: else all roles have the same registers), and if it fits, limits included:
# 232,448 bytes of `smem`, 512 columns of `tmem`, 1,024 `threads`, and 65,536 registers for all threads together at launch, when each thread has `registers`.
#
# How fast it is we estimate:
#
# - `role_spills` holds bytes per thread as (stored, loaded).
#   Assume that a role moves them once per step: an upper bound, since the report does not say where they are.
# - A warp has 32 threads, and the path to memory moves 128 bytes per cycle.
# - Roles that share their code share a key, such as `"softmax 0, softmax 1"`: each of them moves those bytes.
#   `"before the roles part"` belongs to no role and is executed once per launch: leave it out.
# - A role's step takes its work and its own spills, one after the other.
#   Roles work at the same time, so the slowest one counts; but they share the path, so a step takes at least all their spills together.
# - Of splits that are equally fast take the one whose roles spill fewer bytes, all their threads together; of those the first.
#
# The cell below holds five real reports, shortened, of the chapter's version 6 (sm_100, fbtriton 3.7.4, November 2026); its own split, 184 for the softmax, is left out, since it hardly spills.
# The work is from version 6's timeline.
# Before you write the function: which of the five would you take?

# %%
ROLES = ("correction", "softmax 0", "softmax 1", "mma", "load")


def report(registers, role_spills, **other):
    """Return what this exercise needs of `jfa compile --json` for a split of version 6."""
    warps = (4, 4, 4, 1, 1)
    roles = [dict(name=n, warps=w, registers=r) for n, w, r in zip(ROLES, warps, registers)]
    fields = dict(error=None, setmaxnreg_ignored=False, smem=180_684, tmem=512, threads=512)
    return dict(fields, registers=128, roles=roles, role_spills=role_spills) | other


BEFORE, BOTH = "before the roles part", "softmax 0, softmax 1"
WORK = {"correction": 192, "softmax 0": 2022, "softmax 1": 1961, "mma": 280, "load": 80}
SPLITS = [
    report(
        (184, 152, 152, 24, 24),
        {BEFORE: (36, 16), "correction": (0, 20), BOTH: (280, 284), "load": (0, 40)},
    ),
    report(
        (152, 168, 168, 24, 24),
        {BEFORE: (36, 16), "correction": (0, 20), BOTH: (20, 28), "load": (0, 40)},
    ),
    report(
        (96, 192, 192, 32, 32),
        {BEFORE: (36, 16), "correction": (292, 616), BOTH: (0, 8), "load": (0, 40)},
    ),
    report(
        (88, 200, 200, 24, 24),
        {BEFORE: (36, 16), "correction": (492, 964), BOTH: (0, 8), "load": (0, 40)},
    ),
    report(
        (72, 208, 208, 24, 24),
        {BEFORE: (32, 16), "correction": (916, 1744), BOTH: (0, 8), "load": (0, 36)},
    ),
]


# %% tags=["ex-12.9"]
def choose_split(reports, work):
    """Return the index in reports of the fastest split that may ship, -1 if none may."""
    ### BEGIN SOLUTION
    best, place = None, -1
    for i, report in enumerate(reports):
        compiled = report["error"] is None and not report["setmaxnreg_ignored"]
        fits = report["smem"] <= 232_448 and report["tmem"] <= 512 and report["threads"] <= 1024
        if not (compiled and fits and report["registers"] * report["threads"] <= 65_536):
            continue
        spills = {role["name"]: 0.0 for role in report["roles"]}  # cycles
        warps = {role["name"]: role["warps"] for role in report["roles"]}
        for names, (stored, loaded) in report["role_spills"].items():
            for name in names.split(", "):
                if name in spills:
                    spills[name] += (stored + loaded) * 32 * warps[name] / 128
        path = sum(spills.values())
        step = max([path, *(work.get(name, 0) + cycles for name, cycles in spills.items())])
        if best is None or (step, path) < best:
            best, place = (step, path), i
    return place
    ### END SOLUTION


# %%
check("12.9", choose_split)
