# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · First Triton kernels
#
# **Goals.** Read and write a Triton kernel: programs, blocks, pointers, masks, strides. See an out-of-bounds access and a missing `other` for what
# they are. Build a row softmax and a bf16 matrix product, the two halves of attention.
#
# **Time.** 60 minutes, and 90 for the exercises. **Needs.** Chapters 01 and 02. No GPU: every kernel here runs on jfa's emulator, from the same
# source that a GPU would compile.

# %%
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa import plots

torch.manual_seed(0)
print("Triton", triton.__version__)

# %% [markdown]
# ## The mental model: one program, one block
#
# In PyTorch you name a whole tensor and the library decides who computes what. In Triton you write what *one program* does to *one block*,
# and launch many programs at once. A program knows its number. From the number it works out which elements are its own.
#
# A block is a tile of numbers in registers. It has a fixed size, a power of two, known when the kernel is compiled. Arithmetic on a block happens to all its
# elements at once. There is no indexing into a block: you choose what to load, you compute, you choose where to store.
#
# The picture: 200 elements, blocks of 64, so four programs. The last block hangs over the end by 56.

# %%
n, block = 200, 64
owned = [plots.Segment(p * block, min(block, n - p * block), f"program {p}", p) for p in range(4)]
past_the_end = plots.Segment(n, 4 * block - n, "nobody's: mask them", None)
plots.segments(
    {"elements": [*owned, past_the_end]},
    title="200 elements, blocks of 64",
    xlabel="element number",
    ticks=[0, 64, 128, 192, 200, 256],
)

# %% [markdown]
# ## Version 1: a kernel that is right by luck
#
# A tensor argument arrives as a *pointer to its first element*. `x_ptr + i` with a block `i` of numbers is a block of pointers, one for each lane.
# `tl.load` fetches what they point to.
#
# `BLOCK: tl.constexpr` is a compile-time number. `kernel[grid](...)` launches `grid` programs.


# %%
@triton.jit
def double_v1(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, 2 * x)


x = torch.randn(256)
out = torch.empty_like(x)
double_v1[(4,)](x, out, BLOCK=64)
print("largest error on 256 elements:", (out - 2 * x).abs().max().item())

# %% [markdown]
# 256 is a multiple of 64. What happens with 200? On a GPU the last program reads and writes 56 elements behind the tensor. Often that memory
# exists and belongs to another tensor, so nothing complains, and somebody else's numbers change. The emulator knows where each tensor ends.
#
# Predict first: which elements will the report name, and which line, the load or the store?

# %%
x = torch.randn(200)
out = torch.empty_like(x)
try:
    double_v1[(4,)](x, out, BLOCK=64)
except emulator.EmulatorError as error:
    print(error)

# %% [markdown]
# **Read the report.** It names the argument, the first address that is outside, and the line. The cure is a mask: a block of booleans that says which lanes
# may touch memory.

# %% [markdown]
# ## Version 2: masks
#
# Each lane compares its element number with `n`. Masked lanes neither load nor store.


# %%
@triton.jit
def double_v2(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + i, mask=inside, other=0.0)
    tl.store(out_ptr + i, 2 * x, mask=inside)


out = torch.full_like(x, float("nan"))
double_v2[(triton.cdiv(200, 64),)](x, out, 200, BLOCK=64)
print("largest error on 200 elements:", (out - 2 * x).abs().max().item())

# %% [markdown]
# `other=0.0` is what a masked lane holds after the load. Leave it out and the lane holds *anything*: whatever was in that register. Elementwise work never
# notices, since the lane is not stored. A sum over the block does notice.
#
# Predict first: what happens to the sum of five ones in a block of eight, with and without `other`?


# %%
@triton.jit
def block_sum(x_ptr, out_ptr, n, WITH_OTHER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if WITH_OTHER:
        x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    else:
        x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr, tl.sum(x, axis=0))


ones, total = torch.ones(5), torch.zeros(1)
block_sum[(1,)](ones, total, 5, WITH_OTHER=True, BLOCK=8)
print("with other=0.0: sum of five ones =", total.item())
try:
    block_sum[(1,)](ones, total, 5, WITH_OTHER=False, BLOCK=8)
except emulator.EmulatorError as error:
    print("\nwithout other:", error)

# %% [markdown]
# The emulator poisons such lanes and follows them: when one reaches a store, the report names the *load* that lacks its `other`. On a GPU the lanes often hold zero by chance,
# and the fault sleeps until another register allocation wakes it. Triton's own interpreter always gives zero there, and never shows the fault.
#
# **The rule.** Give every masked load an `other` that is neutral for what comes next: 0 for a sum, minus infinity for a maximum.

# %% [markdown]
# ## Version 3: two dimensions are strides
#
# Memory is one line of elements. A matrix is an agreement about it: element `(r, c)` lies `r * row_stride + c * column_stride` elements after the first one. A
# transposed tensor or a slice has the same memory and other strides, so a kernel that takes strides works on any view without a copy.
#
# A 2-D block of addresses comes from a column of row numbers, `[:, None]`, and a row of column numbers, `[None, :]`.


# %%
@triton.jit
def scale_rows(
    x_ptr,
    factor_ptr,
    out_ptr,
    rows,
    cols,
    x_row,
    x_col,
    out_row,
    out_col,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """out[r, c] = factor[r] * x[r, c]: one program a tile of BR x BC."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    x = tl.load(x_ptr + r[:, None] * x_row + c[None, :] * x_col, mask=inside, other=0.0)
    factor = tl.load(factor_ptr + r, mask=r < rows, other=0.0)
    tl.store(
        out_ptr + r[:, None] * out_row + c[None, :] * out_col, x * factor[:, None], mask=inside
    )


def run_scale_rows(x, factor):
    out = torch.full(x.shape, float("nan"))
    grid = (triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 32))
    scale_rows[grid](x, factor, out, *x.shape, *x.stride(), *out.stride(), BR=16, BC=32)
    return out


for name, view in {
    "contiguous": torch.randn(33, 50),
    "transposed": torch.randn(50, 33).t(),
    "every second column": torch.randn(33, 100)[:, ::2],
}.items():
    factor = torch.randn(33)
    error = (run_scale_rows(view, factor) - factor[:, None] * view).abs().max().item()
    print(f"{name:<20} strides {view.stride()!s:<10} largest error {error:.1e}")

# %% [markdown]
# **The likely mistake.** Taking `cols` for the row stride. It is right for a contiguous tensor, and wrong for every slice of one. Tests on contiguous tensors never
# show it, so the checks of this course use views.

# %% [markdown]
# ## A row softmax
#
# One program a row. The block is the next power of two, so some lanes are masked; their neutral value is minus infinity, since `exp(-inf) = 0` adds nothing.
# The maximum is taken out before the exponential, as in chapter 02.


# %%
@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    """out[r] = softmax(x[r]); one program a row, BLOCK >= cols."""
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_row + c, e / tl.sum(e, axis=0), mask=c < cols)


def run_softmax(kernel, x):
    out = torch.full_like(x, float("nan"))
    kernel[(x.shape[0],)](
        x, out, x.shape[1], x.stride(0), out.stride(0), BLOCK=triton.next_power_of_2(x.shape[1])
    )
    return out


x = torch.randn(5, 33) * 4
x[1] += 500  # exp(500) overflows: only a maximum taken out first survives this row
want = torch.softmax(x.double(), dim=1)
print("largest error:", (run_softmax(softmax_kernel, x) - want).abs().max().item())

# %% [markdown]
# Two wrong versions, run beside it. The first forgets the maximum. The second fills the spare lanes with 0, so 31 phantom columns with score 0 join every
# row. Look at the row sums: a softmax that is not a distribution is the quickest sign.


# %%
@triton.jit
def softmax_no_max(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    e = tl.exp(tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf")))
    tl.store(out_ptr + row * out_row + c, e / tl.sum(e, axis=0), mask=c < cols)


@triton.jit
def softmax_zero_lanes(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=0.0)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_row + c, e / tl.sum(e, axis=0), mask=c < cols)


small = torch.randn(3, 33) - 2
small[1] += 500
for name, kernel in {
    "right": softmax_kernel,
    "no maximum": softmax_no_max,
    "spare lanes 0": softmax_zero_lanes,
}.items():
    sums = run_softmax(kernel, small).sum(dim=1).tolist()
    print(f"{name:<14} row sums: {', '.join(f'{s:.4f}' for s in sums)}")

# %% [markdown]
# ## A bf16 matrix product
#
# `tl.dot(a, b, acc)` multiplies two blocks on the tensor cores and adds to an accumulator. Its operands are bf16 here, 8 bits of mantissa; the accumulator is fp32.
# One program owns one tile of the result and walks along K.
#
# ```
#              K                     N                      N
#         +---------+            +---+---+---+         +---+---+---+
#       M |a a>a    |    x     K | b |   |   |   =   M |acc|   |   |
#         +---------+            | v |   |   |         +---+---+---+
#         |         |            | b |   |   |         |   |   |   |
#         +---------+            +---+---+---+         +---+---+---+
#           walk along K           walk down K           stays in registers
# ```


# %%
@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    a_row,
    b_row,
    out_row,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ACC: tl.constexpr,
):
    """out = A @ B; a: [M, K], b: [K, N] bf16, out: [M, N] fp32; the accumulator has the type ACC after every step."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(
            a_ptr + m[:, None] * a_row + k[None, :],
            mask=(m[:, None] < M) & (k[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + k[:, None] * b_row + n[None, :],
            mask=(k[:, None] < K) & (n[None, :] < N),
            other=0.0,
        )
        acc = tl.dot(a, b, acc).to(ACC).to(tl.float32)
    tl.store(
        out_ptr + m[:, None] * out_row + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N)
    )


def run_matmul(a, b, acc=tl.float32, block=16):
    (M, K), N = a.shape, b.shape[1]
    out = torch.full((M, N), float("nan"))
    grid = (triton.cdiv(M, block), triton.cdiv(N, block))
    matmul_kernel[grid](
        a,
        b,
        out,
        M,
        N,
        K,
        a.stride(0),
        b.stride(0),
        out.stride(0),
        BM=block,
        BN=block,
        BK=block,
        ACC=acc,
    )
    return out


a, b = torch.randn(37, 300).bfloat16(), torch.randn(300, 21).bfloat16()
print(
    "largest error, fp32 accumulator:",
    (run_matmul(a, b) - a.double() @ b.double()).abs().max().item(),
)

# %% [markdown]
# Why keep the accumulator in fp32? Predict the shape of the curve before you run the cell: the error of a sum of K products, kept in fp32 and kept in bf16, as K grows.


# %%
def error_curve():
    """Median relative error over a 16 x 16 tile, for growing K, with an fp32 and with a bf16 accumulator."""
    lengths, curves = [32, 64, 128, 256, 512, 1024], {"fp32": [], "bf16": []}
    for K in lengths:
        a, b = torch.rand(16, K).bfloat16(), torch.rand(K, 16).bfloat16()
        want = a.double() @ b.double()
        for name, acc in (("fp32", tl.float32), ("bf16", tl.bfloat16)):
            curves[name].append(((run_matmul(a, b, acc) - want).abs() / want).median().item())
    return lengths, curves


lengths, curves = error_curve()
print(
    f"at K = 1024 the bf16 accumulator is off by {curves['bf16'][-1]:.1e}, the fp32 one by {curves['fp32'][-1]:.1e}"
)
plots.lines(
    lengths, {f"{name} accumulator": errors for name, errors in curves.items()}, log_x=True, log_y=True,
    title="bf16 operands: what the accumulator costs", xlabel="K, products in the sum", ylabel="median relative error",
)  # fmt: skip

# %% [markdown]
# The bf16 curve climbs: once the sum is large, each new product is smaller than half a unit in its last place, and is lost. The gradient `dQ` of attention is such a
# sum over many blocks, and so is the output. Both are kept in fp32 in every kernel of this course.

# %% [markdown]
# ## Exercises
#
# Open [exercises/03_first_triton_kernels.py](../exercises/03_first_triton_kernels.py): scale and add, a transpose of any view, a row's log-sum-exp, a softmax of rows longer than a block, `A @ B^T`,
# and the first jagged kernel, a mean for each sequence.
#
# ## Checkpoint
#
# 1. A kernel uses blocks of 128 on 1000 elements. How many programs, and how many masked lanes?
# 2. Why is `other=0.0` right in the matrix product and wrong in the softmax?
# 3. `x` has shape `[8, 64]` and strides `(64, 1)`. What are the strides of `x[:, ::4]`, and of `x.t()`?
# 4. A kernel passes all tests in Triton's interpreter and gives NaN on a GPU once a week. What do you look for first?
#
# <details><summary>Answers</summary>
#
# 1. `ceil(1000 / 128) = 8` programs, `8 * 128 - 1000 = 24` masked lanes.
# 2. A zero adds nothing to a sum of products. In a softmax it is a score: `exp(0 - max)` joins the sum. Minus infinity is neutral there.
# 3. `(64, 4)` and `(1, 64)`. Neither moved an element.
# 4. A masked load without `other` whose lanes reach a reduction or a dot.
#
# </details>
#
# ## Try this
#
# - Give `double_v2` a grid of 5 programs for 200 elements. Is anything wrong? Why not?
# - Remove `other` from `b`'s load in `matmul_kernel`, keep it in `a`'s. `0 * NaN` is NaN: run it and see. Chapter 04 meets the same trap at the border of two sequences.
# - Change `BK` to 64. How many loads does the product make now? `with emulator.counting() as counts:` around the launch tells: `counts.loads`.
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | no mask on the last block | version 1: the emulator's report |
# | masked load without `other`, then a reduction | the sum of five ones |
# | `cols` taken for the row stride | version 3, and exercise 3.2 |
# | 0 as neutral value of a maximum | the row sums |
# | accumulating in bf16 | the error curve |
#
# ## What differs on a real GPU
#
# - The programs run at the same time, in no order you can rely on. The emulator runs them one after another, unless told otherwise.
# - `tl.dot` needs blocks of at least 16 on each side. fp32 operands are rounded to TF32 unless `input_precision="ieee"` is asked for.
# - Registers are finite. A block of 128 x 128 fp32 is 64 KB: spread over 4 warps that is 128 registers a thread.
#
# ## Verified here, and not
#
# Every kernel above ran on the emulator when this notebook ran, against fp64 where an error is printed. Nothing in this chapter was timed; the emulator's speed says nothing about a GPU's.
#
# ## Sources
#
# - Triton language reference, `tl.load`, `tl.dot` (version 3.7).
# - Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740: why sums are kept in fp32.
