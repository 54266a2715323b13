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
# This course ends at attention over sequences of different lengths on an NVIDIA Blackwell GPU, in a kernel where groups of threads (*warps*) each have a job of their own.
# It begins with a list of five numbers.
# No GPU is needed: where a chapter needs the machine, it runs on an emulator that is part of the course.
#
# **Goals.** After this chapter you
# * know what the course builds, and why anybody wants it,
# * can run a chapter, solve an exercise, and read a report,
# * have saved, restarted, reopened, graded and reset an exercise once.
#
# **Time** 15 minutes to read, 25 for the exercises.
# **You need** Python, a little PyTorch (indexing, `@` for matrix products), and to have met attention once.
#
# Run a cell with Shift+Enter.
# Run them from the top, in order.

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
# Its price is a second, small tensor: the **offsets**, the rows at which the sequences begin.
# Everything in this course works on packed tensors.
#
# ## Attention, with shapes
#
# One sequence has n tokens.
# Each token has a query, a key and a value, rows of D numbers:
#
# | | shape | meaning |
# |---|---|---|
# | Q | [n, D] | what each token asks for |
# | K | [n, D] | what each token offers |
# | V | [n, D] | what it hands over |
# | S = Q Kᵀ / √D | [n, n] | a score for each pair (query, key) |
# | P = softmax of each row of S | [n, n] | shares; each row sums to 1 |
# | O = P V | [n, D] | for each query a mixture of values |
#
# The likely mistake: to read [n, n] and think of it as small.
# For n = 8192 it has 67 million entries, per head.
# *Flash* attention never stores it.
# Chapter 02 shows how that is possible.
#
# ## The simplest right version
#
# Start with something slow that cannot be misunderstood.
# One query, one key, one number at a time.


# %%
def attention_by_loops(q, k, v):
    """One sequence, one score at a time: q, k, v [n, D] -> [n, D]."""
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
# Now the same with matrices.
# And a second opinion: PyTorch's own function.
# A result counts here only after it was compared with something else.


# %%
def attention_by_matrices(q, k, v):
    """The same in three lines."""
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
# A query may only meet keys of its own sequence.
# Of the 45 x 45 pairs, those in five squares along the diagonal count.
# The rest must not even be looked at.
#
# Padded, each sequence computes a 19 x 19 square.
# Packed *and* done right, only the blue squares are computed.
# That is the work of the chapters to come.

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
# Nothing in a chapter answers an exercise: exercises vary it or go a step further.
#
# **check** runs your function in a separate process, on several inputs, and compares with an independent reference.
# Its report is in one of four states:
#
# | state | meaning |
# |---|---|
# | not started | the gap is still a gap |
# | not right yet | it names the smallest case that fails, and the sequence and row where |
# | right answer, wrong method | the numbers are right, but a limit is broken, say "no tensor larger than ..." |
# | passed | done |
#
# **hint("0.1")** gives a hint.
# Call it again for a closer one; the last is near the answer.
# **progress()** shows what is solved.
#
# In a terminal (File, New, Terminal):
#
# | command | what it does |
# |---|---|
# | `jfa grade 0` | judges the saved files of chapter 00, without a notebook |
# | `jfa progress` | what is solved so far |
# | `jfa reset 0.1` | puts an exercise back to its start; your answer is kept in a backup |
# | `jfa doctor` | looks at this installation and says how to repair it |
#
# ## Exercises
#
# Open [exercises/00_start_here.py](../exercises/00_start_here.py) by a double click in the file browser on the left.
#
# The minutes here and in all chapters are an estimate by a rule, not a measurement: nobody has timed readers.
# The rule counts what is new: five minutes for an exercise's text and the report, two for each line of its solution that the chapter does not show, one for each other line, and half a minute for each line of a program that is given to be mended.
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
# The function as it was: the kernel knows only cells that were run.
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
# Neither of the first two raises an error.
# Each is shown by a cell.
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
# **The forgotten 1/√D.** Without it scores grow with D, and one key takes nearly everything.
# Where a share p is near 1 or 0, its derivative p (1 - p) is near 0, and so is what the queries and keys learn from it.
# Again the shapes do not tell.

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
# **Cells run out of order.** A notebook shows code in one order and remembers it in another.
# When something is odd: Kernel menu, *Restart Kernel and Run All Cells*.
# The number in brackets left of a cell is the order in which it ran.
#
# ## What differs on a GPU
#
# Nothing in this chapter.
# Later chapters end with a section like this one.
# It says what the emulator does not show: time, mostly.
#
# ## What was verified here
#
# The cells above ran on a CPU: the loops, the matrices and PyTorch agree up to rounding, as printed.
# The numbers of the pictures are folded below them.
# No GPU was used.
#
# ## Sources
#
# * Attention: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2.1.
# * Flash attention: Dao et al., *FlashAttention*, 2022.
#
# Next: [01 packing](01_packing.py).
