# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 First Triton kernels
#
# **Goals.** After this chapter you
# * can read and write a Triton kernel: programs, blocks, pointers, masks, strides, loops over blocks,
# * can recognize an out-of-bounds access and a missing `other` in a report,
# * have built a row softmax and a bf16 matrix product, the two halves of attention.
#
# **Time** 60 minutes to read, 155 for the exercises.
# **You need** chapters 01 and 02.
# No GPU: every kernel here runs on jfa's emulator, from the same source that a GPU would compile.

# %%
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa import plots

torch.manual_seed(0)
print("Triton", triton.__version__)

# %% [markdown]
# ## Mental model: one program, one block
#
# In PyTorch you operate on whole tensors and the library decides how the work is divided.
# In Triton you write what *one program* does to *one block*, and launch many programs at once.
# Each program knows its number, and computes from it which elements are its own.
#
# A block is a tile of numbers in registers, the storage closest to the arithmetic units.
# It has a fixed size, a power of two, known when the kernel is compiled.
# Arithmetic on a block happens to all its elements, its *lanes*, at once.
# There is no indexing into a block: you choose what to load, you compute, you choose where to store.
#
# The picture: 200 elements, blocks of 64, so four programs.
# The last block extends past the end by 56 elements.

# %%
n, block = 200, 64
owned = [plots.Segment(p * block, min(block, n - p * block), f"program {p}", p) for p in range(4)]
past_the_end = plots.Segment(n, 4 * block - n, "past the end: mask", None)
plots.segments(
    {"elements": [*owned, past_the_end]},
    title="200 elements, blocks of 64",
    xlabel="element number",
    ticks=[0, 64, 128, 192, 200, 256],
)

# %% [markdown]
# ## The math, and the words for it
#
# Program p owns the elements p · BLOCK + i for i = 0 ... BLOCK − 1, and those below n exist.
# So a launch over n elements needs ceil(n / BLOCK) programs.
#
# The table lists everything that this chapter and its exercises use.
# (*Host* is the CPU side, the Python code that launches kernels. *Tensor cores* are the GPU's units for matrix products.)
#
# | you write | it is |
# |---|---|
# | `tl.program_id(a)`, `tl.num_programs(a)` | this program's number on axis a of the grid, and how many there are |
# | `tl.arange(0, N)` | the block 0, 1, ... N − 1; N is a power of two |
# | `tl.load(ptrs, mask=, other=)` | what the pointers point to; lanes where the mask is False get `other` |
# | `tl.store(ptrs, values, mask=)` | stores to where the pointers point; lanes where the mask is False are not stored |
# | `x[:, None]`, `x[None, :]` | a column [N, 1] and a row [1, N]; combined they broadcast to [N, N] |
# | `tl.sum(x, axis=)`, `tl.max`, `tl.min` | reduces one axis |
# | `tl.argmax(x, axis=)` | the *position* of the largest; of several equal ones the first |
# | `tl.maximum(a, b)`, `tl.minimum` | element by element, of two blocks or two numbers |
# | `tl.where(c, a, b)` | a where c is True, else b |
# | `tl.exp(x)`, `tl.log(x)` | natural, element by element |
# | `tl.zeros((R, C), tl.float32)`, `tl.full(shape, value, dtype)` | a new block |
# | `tl.dot(a, b, acc)` | acc + a @ b on the tensor cores |
# | `triton.cdiv(n, b)`, `triton.next_power_of_2(n)` | on the host: ceil(n / b), and the smallest power of two that is at least n |
#
# The likely mistake is `tl.max` in place of `tl.maximum`.
# The first reduces one block, the second compares two.
#
# ## Version 1: a kernel that is right by luck
#
# A tensor argument arrives as a *pointer to its first element*.
# `x_ptr + i` with a block `i` of numbers is a block of pointers, one per lane.
#
# `BLOCK: tl.constexpr` is a number that is known when the kernel is compiled.
# `kernel[grid](...)` launches `grid` programs.


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
# 256 is a multiple of 64.
# What happens with 200?
# On a GPU the last program reads and writes 56 elements past the end of the tensor.
# If that memory belongs to another tensor, no error is raised, and that tensor's numbers change.
# The emulator knows where each tensor ends.
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
# **Read the report.**
# It names the argument, the line, the elements that the last program touches (192 to 255), and the first of them that does not exist: 200.
# The fix is a mask: a block of booleans that says which lanes may access memory.
#
# ## Version 2: masks
#
# Each lane compares its element number with `n`.
# Masked lanes neither load nor store.


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
# A masked lane holds the value of `other` after the load, here 0.
# Without `other` it holds an *undefined* value: whatever was in that register.
# That does not matter to elementwise work, since the lane is not stored.
# It does matter to a sum over the block.
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
# The emulator tracks undefined lanes: when one influences a stored value, the report names the *load* that lacks its `other`.
# On a GPU such a lane may hold zero by chance, and the bug shows only when the compiler allocates registers differently.
#
# **The rule.**
# Give every masked load an `other` that is neutral for what comes next: 0 for a sum, minus infinity for a maximum.
#
# ## Version 3: two dimensions are strides
#
# Memory is one line of elements.
# A matrix is a rule for reading it: element (r, c) is `r * row_stride + c * column_stride` elements after the first one.
# A transposed tensor or a slice uses the same memory with other strides.
#
# The picture shows four views of the same twelve elements.
# The number in a cell is its place in memory, and the color is its row in the contiguous view.

# %%
memory = torch.arange(12)
square = memory.view(3, 4)
views = {
    f"{name}\nstrides {tuple(view.stride())}": view
    for name, view in {
        "x": square,
        "x.t()": square.t(),
        "x[:, ::2]": square[:, ::2],
        "x[1:, 1:3]": square[1:, 1:3],
    }.items()
}
plots.number_grids(
    views,
    title="four views of the same memory: the number is the place in memory",
    looks={name: (view // 4).numpy() for name, view in views.items()},
)

# %% [markdown]
# The last view begins at place 5, and its strides are those of `x`.
# In a kernel its pointer already points to that element, so addresses are relative to it.
#
# A 2-D block of addresses comes from a column of row numbers, `[:, None]`, and a row of column numbers, `[None, :]`.
# Here is the second tile of a contiguous [6, 50] tensor, cut into tiles of 4 x 4: rows 4 to 7, columns 0 to 3.
# Rows 6 and 7 do not exist; their lanes are masked.

# %%
r, c = torch.arange(4, 8), torch.arange(4)
column, row = (r * 50)[:, None], c[None, :]
plots.number_grids(
    {
        "r[:, None] * 50\n[4, 1]": column,
        "c[None, :] * 1\n[1, 4]": row,
        "addresses\n[4, 4]": column + row,
        "(r[:, None] < 6) & (c[None, :] < 50)\n1: may access memory": (r[:, None] < 6)
        * torch.ones_like(row),
    },
    title="a block of addresses, and its mask",
    signs=("+", "=", ""),
    masked={"addresses\n[4, 4]": (r[:, None] >= 6).numpy()},
)


# %%
@triton.jit
def scale_rows(
    x_ptr, factor_ptr, out_ptr, rows, cols, x_row, x_col, out_row, out_col,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute out[r, c] = factor[r] * x[r, c]; one program per tile of BR x BC."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    x = tl.load(x_ptr + r[:, None] * x_row + c[None, :] * x_col, mask=inside, other=0.0)
    factor = tl.load(factor_ptr + r, mask=r < rows, other=0.0)
    at = r[:, None] * out_row + c[None, :] * out_col
    tl.store(out_ptr + at, x * factor[:, None], mask=inside)


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
# A kernel that takes strides works on any view without a copy.
#
# **The likely mistake** is to use `cols` as the row stride.
# It is right for a contiguous tensor, and wrong for a slice of columns.
# Tests on contiguous tensors never show it, so the checks of this course use views.
#
# ## Version 4: a row softmax
#
# One program per row.
# The block size is the next power of two, so some lanes are masked; their neutral value is minus infinity, since exp(−∞) = 0 adds nothing.
# The maximum is subtracted before the exponential, as in chapter 02.


# %%
@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    """Compute out[r] = softmax(x[r]); one program per row, BLOCK >= cols."""
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_row + c, e / tl.sum(e, axis=0), mask=c < cols)


def run_softmax(kernel, x):
    out = torch.full_like(x, float("nan"))
    block = triton.next_power_of_2(x.shape[1])
    kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), out.stride(0), BLOCK=block)
    return out


x = torch.randn(5, 33) * 4
x[1] += 500  # exp(500) overflows unless the maximum is subtracted first
want = torch.softmax(x.double(), dim=1)
print("largest error:", (run_softmax(softmax_kernel, x) - want).abs().max().item())

# %% [markdown]
# Now compare it with two wrong versions.
# The first forgets the maximum.
# The second fills the spare lanes with 0, which adds 31 columns with score 0 to every row.
# Look at the row sums: if they are not 1, the softmax is wrong.


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
versions = {
    "right": softmax_kernel,
    "no maximum": softmax_no_max,
    "spare lanes 0": softmax_zero_lanes,
}
for name, kernel in versions.items():
    sums = run_softmax(kernel, small).sum(dim=1).tolist()
    print(f"{name:<14} row sums: {', '.join(f'{s:.4f}' for s in sums)}")

# %% [markdown]
# ## Version 5: a row longer than a block
#
# A block has a size limit, a row has none.
# So the program loops over blocks and carries a few numbers from one step to the next.
# The bounds of the loop may be arguments.
# The kernel below carries two numbers per row, the largest and the smallest value so far.
#
# The likely mistake is an `other` that is neutral for only one of the two.
# A masked lane of −∞ is harmless for the maximum and ruins the minimum.


# %%
@triton.jit
def row_range(x_ptr, out_ptr, cols, x_row, BLOCK: tl.constexpr):
    """Compute out[r] = largest - smallest of x[r]; one program per row of any length."""
    row = tl.program_id(0)
    largest, smallest = float("-inf"), float("inf")
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.where(c < cols, x, float("-inf")), axis=0))
        smallest = tl.minimum(smallest, tl.min(tl.where(c < cols, x, float("inf")), axis=0))
    tl.store(out_ptr + row, largest - smallest)


x, out = torch.randn(3, 150), torch.empty(3)
row_range[(3,)](x, out, 150, x.stride(0), BLOCK=32)
print("largest error:", (out - (x.amax(1) - x.amin(1))).abs().max().item())

# %% [markdown]
# ## Version 6: bounds that come from memory
#
# A load from a single pointer gives one number, and that number may bound a loop, choose a row or skip the work.
# A kernel that loads the offsets of chapter 01 in this way works on jagged data.
# Here each program copies the *last* row of its sequence, or stores zeros if the sequence is empty.


# %%
@triton.jit
def last_rows(x_ptr, offsets_ptr, out_ptr, D, BLOCK: tl.constexpr):
    """Copy the last row of sequence b to out[b]; x: [total, D], offsets: [B + 1]."""
    b = tl.program_id(0)
    begin, end = tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)
    d = tl.arange(0, BLOCK)
    row = tl.zeros((BLOCK,), tl.float32)
    if end > begin:
        row = tl.load(x_ptr + (end - 1) * D + d, mask=d < D, other=0.0)
    tl.store(out_ptr + b * D + d, row, mask=d < D)


x, offsets = torch.randn(9, 6), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
out = torch.full((3, 6), float("nan"))
last_rows[(3,)](x, offsets, out, 6, BLOCK=8)
print(
    "rows 3 and 8:", torch.equal(out[[0, 2]], x[[3, 8]]), "| sequence 1 is empty:", out[1].tolist()
)

# %% [markdown]
# ## Version 7: a bf16 matrix product
#
# `tl.dot(a, b, acc)` multiplies two blocks on the tensor cores and adds to an accumulator.
# Its operands are bf16 here, with a mantissa of 8 bits; the accumulator is fp32.
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
    a_ptr, b_ptr, out_ptr, M, N, K, a_row, b_row, out_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute out = A @ B; a: [M, K], b: [K, N] bf16, out: [M, N] fp32; acc is rounded to ACC."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a_mask = (m[:, None] < M) & (k[None, :] < K)
        b_mask = (k[:, None] < K) & (n[None, :] < N)
        a = tl.load(a_ptr + m[:, None] * a_row + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * b_row + n[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc).to(ACC).to(tl.float32)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptr + m[:, None] * out_row + n[None, :], acc, mask=inside)


def run_matmul(a, b, acc=tl.float32, block=16):
    (M, K), N = a.shape, b.shape[1]
    out = torch.full((M, N), float("nan"))
    grid = (triton.cdiv(M, block), triton.cdiv(N, block))
    strides = a.stride(0), b.stride(0), out.stride(0)
    matmul_kernel[grid](a, b, out, M, N, K, *strides, BM=block, BN=block, BK=block, ACC=acc)
    return out


a, b = torch.randn(37, 300).bfloat16(), torch.randn(300, 21).bfloat16()
error = (run_matmul(a, b) - a.double() @ b.double()).abs().max().item()
print("largest error, fp32 accumulator:", error)

# %% [markdown]
# ## Why the accumulator is fp32
#
# The next cell sums K products of positive numbers, with the accumulator in fp32 and in bf16.
# The kernel rounds its accumulator once per step, so once per 16 products.
# Predict how each error changes as K grows.


# %%
def error_curve():
    """Return K values and, per accumulator type, the median relative error of a 16 x 16 tile."""
    lengths, curves = [32, 64, 128, 256, 512, 1024], {"fp32": [], "bf16": []}
    for K in lengths:
        a, b = torch.rand(16, K).bfloat16(), torch.rand(K, 16).bfloat16()
        want = a.double() @ b.double()
        for name, acc in (("fp32", tl.float32), ("bf16", tl.bfloat16)):
            curves[name].append(((run_matmul(a, b, acc) - want).abs() / want).median().item())
    return lengths, curves


lengths, curves = error_curve()
plots.lines(
    lengths,
    {f"{name} accumulator": errors for name, errors in curves.items()},
    log_x=True,
    log_y=True,
    title="bf16 operands: what the accumulator costs",
    xlabel="K, products in the sum",
    ylabel="median relative error",
)

# %% [markdown]
# In bf16 the sum is rounded to 8 bits after every step, and that causes its error.
# It can be worse.
# If the sum is large and the addend is less than half a unit in the sum's last place, the addition changes nothing at all.
# How often that happens depends on how many products are added at a time.
# The next cell counts it in PyTorch, for a sum of 1024 products, added 1, 2, 4, 8 or 16 at a time to a bf16 accumulator.


# %%
def summed_in_bf16(a, b, step):
    """Return (share of additions that change nothing, median relative error), both in %."""
    acc, lost, additions = torch.zeros(len(a), b.shape[1]), 0, 0
    for k in range(0, a.shape[1], step):
        products = a[:, k : k + step].float() @ b[k : k + step].float()
        new = (acc + products).bfloat16().float()
        lost += int(((new == acc) & (products > 0)).sum())
        additions += acc.numel()
        acc = new
    want = a.double() @ b.double()
    return 100 * lost / additions, 100 * ((acc - want).abs() / want).median().item()


a, b = torch.rand(16, 1024).bfloat16(), torch.rand(1024, 16).bfloat16()
steps = [1, 2, 4, 8, 16]
lost, errors = zip(*(summed_in_bf16(a, b, step) for step in steps))
plots.lines(
    steps,
    {"additions that change nothing": lost, "median error of the sum": errors},
    log_x=True,
    from_zero=True,
    title="1024 products into a bf16 accumulator",
    xlabel="products added at a time",
    ylabel="%",
)

# %% [markdown]
# If products are added one at a time, more than half of the additions are lost, and with them a fifth of the sum.
# If they are added 16 at a time, as in the kernel above, none is lost, and rounding alone costs half a percent.
# The output of attention is a sum over all blocks of keys, and so is the gradient dQ (chapter 05).
# Every kernel of this course accumulates both in fp32.
#
# ## What `TRITON_INTERPRET=1` does here
#
# Triton has its own interpreter, which this environment variable enables if it is set before `import triton`.
# You do not need it: once `jfa.emulator` is imported, kernels on CPU tensors run on jfa's emulator, with or without the variable.
#
# | with `TRITON_INTERPRET=1` | what happens |
# |---|---|
# | CPU tensors | jfa's emulator, as without it |
# | CUDA tensors | jfa's emulator too; without the variable, the GPU |
# | after `emulator.uninstall()` | Triton's own interpreter |
# | `triton.compile` in this process | refused; `jfa compile` works, because it runs in a separate process |
#
# Triton's own interpreter (fbtriton 3.7.4, tried November 2026) does not find the errors of this chapter.
# It reads past a tensor's end without an error, gives 0 for a masked lane without `other`, computes 2.5 + 2.5 = −5.9e-39 in bf16, and raises a TypeError at `tl.dot`.
# It has no TLX, the Triton extension used from chapter 10 on.
#
# ## Summary
#
# * A program computes one block; its number says which one, and masks protect the elements that do not exist.
# * Each masked load that feeds a reduction needs an `other` that is neutral for it.
# * Strides, not shapes, give addresses.
# * Loop bounds may come from memory: this is what makes a kernel jagged.
# * Operands are bf16; accumulators are fp32.
#
# ## Exercises
#
# Open [exercises/03_first_triton_kernels.py](../exercises/03_first_triton_kernels.py).
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 3.1 | scale and add, any length | 1 | 15 |
# | 3.2 | transpose, whatever the strides | 1 | 15 |
# | 3.3 | log-sum-exp of a row | 2 | 10 |
# | 3.4 | softmax of rows longer than a block | 2 | 25 |
# | 3.5 | scores: A times B transposed | 3 | 25 |
# | 3.6 | the mean of every sequence | 3 | 25 |
# | 3.7 | bug hunt: the report names an innocent line | 2 | 10 |
# | 3.8 | the best key of each query, without the scores | 3 | 30 |
#
# ## Checkpoint
#
# <details><summary>A kernel uses blocks of 128 on 1000 elements. How many programs, and how many masked lanes?</summary>
#
# ceil(1000 / 128) = 8 programs, 8 · 128 − 1000 = 24 masked lanes.
# </details>
#
# <details><summary>Why is other=0.0 right in the matrix product and wrong in the softmax?</summary>
#
# A zero adds nothing to a sum of products.
# In a softmax it is a score: exp(0 − max) joins the sum.
# Minus infinity is neutral there.
# </details>
#
# <details><summary>x has shape [8, 64] and strides (64, 1). What are the strides of x[:, ::4], and of x.t()?</summary>
#
# (64, 4) and (1, 64).
# Neither moves an element.
# </details>
#
# <details><summary>A kernel passes all tests in Triton's interpreter and gives NaN on a GPU about once a week. What do you look for first?</summary>
#
# A masked load without `other` whose lanes reach a reduction or a dot.
# </details>
#
# <details><summary>In version 5, what does a row of 150 columns and BLOCK = 32 do in its last step?</summary>
#
# It loads columns 128 to 149 and masks the other ten lanes.
# Without the two `tl.where` calls, a 0 would take part in the maximum and in the minimum.
# </details>
#
# ## Try this
#
# * Give `double_v2` a grid of 5 programs for 200 elements.
#   Is anything wrong?
#   Why not?
# * Remove `other` from `b`'s load in `matmul_kernel`, and keep it in `a`'s.
#   0 · NaN is NaN: run it and see.
#   In chapter 04 the same happens at the border of two sequences.
# * Change `BK` to 64.
#   How many loads does the product make now?
#   Launch it inside `with emulator.counting() as counts:` and read `counts.loads`.
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | no mask on the last block | version 1: the emulator's report |
# | masked load without `other`, then a reduction | the sum of five ones |
# | `cols` used as the row stride | version 3, and exercise 3.2 |
# | 0 as the neutral value of a maximum | the row sums, and version 5 |
# | accumulating in bf16 | the two error pictures |
#
# ## What differs on a GPU
#
# * The programs run at the same time, in no order you can rely on.
#   The emulator runs them one after another, unless told otherwise.
# * `tl.dot` needs a K of at least 16 for 16-bit operands and 32 for 8-bit ones.
#   M and N may be as small as 1 in Triton 3.7; the hardware's tile is larger, and the rest of it is wasted.
# * fp32 operands of `tl.dot` are rounded to TF32 (11 bits of mantissa) unless you pass `input_precision="ieee"`.
# * Registers are finite.
#   A block of 128 x 128 fp32 is 64 KB: spread over 4 warps (128 threads), that is 128 registers per thread.
#
# ## What was verified here
#
# Every kernel above ran on the emulator when this notebook ran, against fp64 where an error is printed.
# The limits of `tl.dot` were tried with the pinned compiler for sm_90 (Hopper) and sm_100 (Blackwell): (1, 1, 16) compiles in bf16, K = 8 does not.
# The rows on `TRITON_INTERPRET` were tried on a CPU; the row on CUDA tensors was not run.
# Nothing in this chapter was timed; the emulator's speed says nothing about a GPU's.
#
# ## Sources
#
# * Triton language reference, `tl.load`, `tl.dot` (version 3.7).
# * Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740: why sums are kept in fp32.
#
# Next: [04 the jagged forward](04_jagged_forward.py).
