# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 00: start here
#
# Four small exercises, to practice *how* this course works.
# The chapter is `notebooks/00_start_here.py`; keep it open next to this file.
#
# Run the first cell now (Shift+Enter).
# It shows what you have solved so far.

# %% tags=["setup"]
from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 0.1 Edit and check
#
# *Difficulty 1 of 3, 5 minutes.*
#
# A batch holds several sequences.
# `lengths` says how many tokens each one has, for example `[7, 3, 19, 5, 11]`.
# Return the number of tokens in the whole batch.
#
# 1. Run the two cells below as they are.
#    The report says **not started**: that is a state, not an error.
# 2. Replace the line marked `YOUR CODE` and run both cells again.


# %% tags=["ex-0.1"]
def count_tokens(lengths):
    """Return the number of tokens, an int; lengths: list of B ints."""
    raise NotImplementedError("0.1: not started")  # YOUR CODE


# %%
check("0.1", count_tokens)

# %% [markdown]
# ## 0.2 Read a report
#
# *Difficulty 1 of 3, 5 minutes.*
#
# Return the length of the longest sequence.
# For a batch without any sequence return 0.
#
# Write `return max(lengths)` first, even if you already see what is wrong with it.
# Read the report: it names the smallest case that goes wrong.
# Then fix it.
# `hint("0.2")` gives a first hint; call it again for a more detailed one.


# %% tags=["ex-0.2"]
def longest(lengths):
    """Return the largest length, an int, or 0 for an empty list; lengths: list of B ints."""
    raise NotImplementedError("0.2: not started")  # YOUR CODE


# %%
check("0.2", longest)

# %% [markdown]
# ## 0.3 Right answer, wrong method
#
# *Difficulty 1 of 3, 5 minutes.*
#
# `weights` is a tensor [n, n] of positive numbers.
# Return the shares: every row divided by its own sum, so that each row sums to 1.
#
# Some exercises limit *how* you get there.
# Here the limit is: **at most 6 torch operations**, whatever n is.
# Write a Python loop over the rows first, and read what the report says about it.
# Then do it without a loop: sums along one axis, and broadcasting, do all rows at once.
#
# Each call that you write counts as one operation, whatever torch does inside (`torch.einsum(...)` is one).
# NumPy's operations count as torch's do, and so does each number that is read out of a tensor as a Python float: a loop is a loop in any library.
#
# Two rules hold in every exercise, unless its text says otherwise.
# A result is a tensor of its own: it shares no memory with an input, and the inputs stay as they are.
# And ready-made implementations are not allowed: torch's attention (`scaled_dot_product_attention`, `flex_attention`), this package's attention and reference, and the solutions are out of bounds everywhere.

# %% tags=["ex-0.3"]
import torch


def shares(weights):
    """Divide each row by its sum; weights: [n, n] float, all positive -> [n, n]."""
    raise NotImplementedError("0.3: not started")  # YOUR CODE


# %%
check("0.3", shares)

# %% [markdown]
# ## 0.4 A value instead of a function, and a round trip
#
# *Difficulty 1 of 3, 10 minutes.*
#
# Sequences of lengths `[7, 3, 19, 5, 11]` are stored one after another in one tensor of 45 rows.
# Row 0 is the first token of sequence 0.
# Which sequence does **row 30** belong to, and at which position inside that sequence is it?
# Count everything from 0.
# Assign the pair of ints `(sequence, position)` to `where`: work it out on paper, or compute it.
#
# Then make the round trip once:
#
# 1. **Save** (Ctrl+S).
#    The file on disk is an ordinary Python file: open it in any editor.
# 2. **Restart** the kernel (Kernel menu, *Restart Kernel*).
#    All variables are gone.
#    Your code is not.
# 3. **Close** the tab and open the file again with a double click.
# 4. Run all cells (Run menu, *Run All Cells*).
#    The reports are back.
# 5. In a terminal (File, New, Terminal): `jfa grade 0`.
#    It judges the *saved file*, without a notebook.
# 6. `jfa reset 0.1` restores exercise 0.1 to its initial state, and prints where your answer is kept.
#    In the notebook: File, *Reload Notebook from Disk*.

# %% tags=["ex-0.4"]
lengths = [7, 3, 19, 5, 11]
row = 30
starts = ...  # YOUR CODE
sequence = ...  # YOUR CODE
where = ...  # YOUR CODE


# %%
check("0.4", where)
