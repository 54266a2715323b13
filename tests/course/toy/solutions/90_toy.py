# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 90: a chapter for the engine's own tests

# %% tags=["setup"]
import torch

from jfa.course import check, progress

progress()

# %% [markdown]
# ## 90.1 Row sums of packed sequences
# Limit: no tensor larger than 64 elements.


# %% tags=["ex-90.1"]
def row_means(x, offsets):
    """Mean of each sequence: x [total, D], offsets list [B+1] -> (means [B, D], lengths [B] int64)."""
    ### BEGIN SOLUTION
    lengths = torch.tensor([offsets[b + 1] - offsets[b] for b in range(len(offsets) - 1)])
    means = torch.stack([x[offsets[b] : offsets[b + 1]].sum(0) / max(int(lengths[b]), 1) for b in range(len(lengths))])
    return means, lengths
    ### END SOLUTION


# %%
check("90.1", row_means)

# %% [markdown]
# ## 90.2 Twice

# %% tags=["ex-90.2"]
factor = 2


def twice(x):
    # BEGIN SOLUTION
    return x * factor
    # END SOLUTION


# %%
check("90.2", twice)

# %% [markdown]
# ## 90.3 A value

# %% tags=["ex-90.3"]
### BEGIN SOLUTION
answer = 42
### END SOLUTION

# %%
check("90.3", answer)

# %% [markdown]
# ## 90.4 Refuse bad offsets


# %% tags=["ex-90.4"]
def lengths_of(offsets):
    ### BEGIN SOLUTION
    if any(b < a for a, b in zip(offsets, offsets[1:])):
        raise ValueError("offsets must not decrease")
    return [b - a for a, b in zip(offsets, offsets[1:])]
    ### END SOLUTION


# %%
check("90.4", lengths_of)
