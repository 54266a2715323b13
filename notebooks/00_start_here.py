# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 Start here
#
# This course begins with a list of five numbers.
# It ends with a kernel that computes attention over sequences of different lengths on an NVIDIA Blackwell GPU.
# In that kernel each group of threads (a *warp*) has its own job.
# No GPU is needed: the course contains an emulator that runs the kernels on a CPU.
#
# **Goals.** After this chapter you
# * know what the course builds, and why it is useful,
# * can run a chapter, solve an exercise, and read a report,
# * have saved, restarted, reopened, graded and reset an exercise once.
#
# **Time** 15 minutes to read, 25 for the exercises.
# **You need** Python, a little PyTorch (indexing, `@` for matrix products), and a rough idea of attention.
#
# Press Shift+Enter to run a cell.
# Run the cells from the top, in order.

# %%
import importlib.util
import platform

import torch

from jfa import plots

has_triton = importlib.util.find_spec("triton") is not None
print("Python", platform.python_version(), "| torch", torch.__version__)
print("Triton:", "installed" if has_triton else "not installed; chapters 00 to 02 do not need it")
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none here, and none is needed"
print("GPU:", gpu)

# %% [markdown]
# ## The problem in one picture
#
# Sequences come in all lengths: sentences, user histories, protein chains.
# Tensors are rectangles.
# The simplest way to put the first into the second is to *pad*: every sequence gets as many places as the longest one.
#
# Here are five sequences: first as a rectangle, then as one row with nothing between them.
# The hatched places are stored, moved and multiplied like the others, and none of them changes a result.

# %%
lengths = [7, 3, 19, 5, 11]
plots.padded_and_packed(lengths)

# %% [markdown]
# The lower layout is called **packed**, or *jagged*.
# It needs a second, small tensor: the **offsets**, which hold the row at which each sequence begins.
# Everything in this course works on packed tensors.
#
# ## Attention, with shapes
#
# One sequence has n tokens.
# Each token has a query, a key and a value, each a row of D numbers:
#
# | | shape | meaning |
# |---|---|---|
# | Q | [n, D] | what each token asks for |
# | K | [n, D] | what each token offers |
# | V | [n, D] | what it hands over |
# | S = Q Kᵀ / √D | [n, n] | a score for each pair (query, key) |
# | P = softmax of each row of S | [n, n] | the weights, or *shares*; each row sums to 1 |
# | O = P V | [n, D] | for each query, the weighted mean of the values |
#
# The likely mistake is to think of [n, n] as small.
# For n = 8192 it has 67 million entries, per head.
# *Flash* attention never stores it.
# Chapter 02 shows how that is possible.
#
# ## The simplest correct version
#
# Start with something slow that cannot be misunderstood.
# One query, one key, one number at a time.


# %%
def attention_by_loops(q, k, v):
    """Attend within one sequence, one score at a time: q, k, v [n, D] -> [n, D]."""
    n, dim = q.shape
    out = torch.zeros_like(v)
    for i in range(n):
        scores = [float(q[i] @ k[j]) / dim**0.5 for j in range(n)]
        top = max(scores)
        weights = [2.718281828459045 ** (s - top) for s in scores]
        for j in range(n):
            out[i] += weights[j] / sum(weights) * v[j]
    return out


# %% [markdown]
# Now the same with matrices, and PyTorch's own function as a second opinion.
# In this course a result counts only after it has been compared with an independent one.


# %%
def attention_by_matrices(q, k, v):
    """Compute the same in three lines."""
    scores = q @ k.T / q.shape[1] ** 0.5
    weights = torch.softmax(scores, dim=1)
    return weights @ v


torch.manual_seed(0)
q, k, v = (torch.randn(19, 32) for _ in range(3))
by_loops, by_matrices = attention_by_loops(q, k, v), attention_by_matrices(q, k, v)
by_torch = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
print("loops against matrices:  ", float((by_loops - by_matrices).abs().max()))
print("matrices against PyTorch:", float((by_matrices - by_torch).abs().max()))

# %% [markdown]
# ## Five sequences at once
#
# Lay the five sequences one after another, 45 rows.
# A query may only see keys of its own sequence.
# So of the 45 x 45 pairs, only those in the five squares along the diagonal count.
# The others should not be computed at all.
#
# A padded batch computes a 19 x 19 square for each sequence.
# A good kernel on the packed batch computes only the blue squares.
# The coming chapters build that kernel.

# %%
owner = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
allowed = owner[:, None] == owner
plots.score_grids({"45 packed rows": allowed}, title="which pairs count")

# %%
padded_scores, packed_scores = 5 * 19 * 19, int(allowed.sum())
times = padded_scores / packed_scores
print(f"padded {padded_scores} scores, packed {packed_scores}: {times:.1f} times the work")

# %% [markdown]
# ## How the course works
#
# Three folders, the same numbers in each:
#
# | folder | what it is for |
# |---|---|
# | `notebooks/` | **read** and run: the chapters, with worked code and pictures |
# | `exercises/` | **do**: a few gaps to fill in, and a `check()` after each |
# | `solutions/` | **compare**, afterwards |
#
# The map of all chapters, with what each teaches and needs, is in the [README](../README.md).
#
# All are ordinary `.py` files that open as notebooks.
# No chapter contains the answer to an exercise: exercises change the chapter's code or go a step further.
#
# **check** runs your function in a separate process, on several inputs, and compares with an independent reference.
# Its report is in one of four states:
#
# | state | meaning |
# |---|---|
# | not started | the gap is not filled in yet |
# | not right yet | the report names the smallest case that fails, with its sequence and row |
# | right answer, wrong method | the numbers are right, but a limit is broken, for example "no tensor larger than ..." |
# | passed | done |
#
# **hint("0.1")** gives a hint.
# Call it again for a more detailed one; the last hint nearly gives the answer.
# **progress()** shows what is solved.
#
# In a terminal (File, New, Terminal):
#
# | command | what it does |
# |---|---|
# | `jfa grade 0` | judges the saved files of chapter 00, without a notebook |
# | `jfa progress` | what is solved so far |
# | `jfa reset 0.1` | restores an exercise to its initial state; your answer is kept in a backup |
# | `jfa doctor` | checks this installation and says how to repair it |
#
# ## Exercises
#
# Open [exercises/00_start_here.py](../exercises/00_start_here.py): double-click it in the file browser on the left.
#
# The minutes here and in all chapters are an estimate by a rule, not a measurement: no reader has been timed.
# The rule counts what is new: five minutes for an exercise's text and the report, two for each line of its solution that the chapter does not show, one for each other line, and half a minute for each line of a program that is given to be fixed.
# The sum is rounded to five minutes.
# You may need half of it, or twice as much.
#
# | | | minutes |
# |---|---|---|
# | 0.1 | edit and check | 5 |
# | 0.2 | read a report | 5 |
# | 0.3 | right answer, wrong method | 5 |
# | 0.4 | a value, and a round trip: save, restart, reopen, grade, reset | 10 |
#
# ## Checkpoint
#
# Answer in your head, then unfold.
#
# <details><summary>The batch gets a sixth sequence of length 1. How many padded places and how many packed rows are added?</summary>
#
# 19 places (a whole line of the rectangle), 1 row.
# </details>
#
# <details><summary>The batch gets a sixth sequence of length 38. And now?</summary>
#
# The rectangle grows from 5 x 19 = 95 to 6 x 38 = 228 places.
# The packed batch grows by 38 rows.
# </details>
#
# <details><summary>You changed a function and ran check without running the function's cell again. What was checked?</summary>
#
# The old function: the notebook's Python process knows only cells that were run.
# The report says so when the function, the cell and the saved file differ.
# </details>
#
# ## Try this
#
# Change `lengths` above to `[19, 19, 19, 19, 19]` and run the two pictures again.
# Predict first: how many padded places are wasted, and how many of the 95 x 95 pairs count?
#
# ## Pitfalls
#
# The first two raise no error; a cell below each shows what happens instead.
#
# **The softmax along the wrong axis.** Every query's shares must sum to 1: rows, not columns.
# The result has the right shape either way.

# %%
scores = q @ k.T / 32**0.5
for axis in (1, 0):
    weights = torch.softmax(scores, dim=axis)
    good = int(((weights.sum(1) - 1).abs() < 1e-5).sum())
    print(f"softmax(dim={axis}): {good} of 19 rows sum to 1")

# %% [markdown]
# **The forgotten 1/√D.** Without it the scores grow with D, and one key gets nearly all the weight.
# Where a share p is near 1 or 0, its derivative p (1 - p) is near 0, so the queries and keys get almost no gradient.
# Again the shapes are right either way.

# %%
dims = [8, 32, 128, 512]
shares = {"with 1/sqrt(D)": [], "without": []}
for dim in dims:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(64, dim, generator=generator) for _ in range(2))
    shares["with 1/sqrt(D)"].append(float(torch.softmax(a @ b.T / dim**0.5, 1).amax(1).mean()))
    shares["without"].append(float(torch.softmax(a @ b.T, 1).amax(1).mean()))
plots.lines(
    dims,
    shares,
    title="the largest share in a row of 64, on average",
    xlabel="D",
    ylabel="share",
    log_x=True,
)

# %% [markdown]
# **Cells run out of order.** The variables of a notebook depend on the order in which you ran the cells, not on their order in the file.
# When something is odd: Kernel menu, *Restart Kernel and Run All Cells*.
# The number in brackets to the left of a cell is the order in which it ran.
#
# ## What differs on a GPU
#
# In this chapter, nothing.
# In later chapters this section says what the emulator does not show, which is mostly time.
#
# ## What was verified here
#
# The cells above ran on a CPU: the loops, the matrices and PyTorch agree up to rounding, as printed.
# The numbers behind each picture can be unfolded below it.
# No GPU was used.
#
# ## Sources
#
# * Attention: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2.1.
# * Flash attention: Dao et al., *FlashAttention*, 2022.
#
# Next: [01 packing](01_packing.py).
