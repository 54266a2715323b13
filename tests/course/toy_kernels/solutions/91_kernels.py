# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 91: kernels for the engine's own tests

# %% tags=["setup"]
import triton
import triton.language as tl

from jfa.course import check, progress

progress()

# %% [markdown]
# ## 91.1 Twice, in tiles
# No block larger than 16 elements; at most 3 loads.


# %% tags=["ex-91.1"]
@triton.jit
def twice_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = 2 x for x [n]; program i takes the elements from i * BLOCK on."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ### BEGIN SOLUTION
    inside = rows < n
    x = tl.load(x_ptr + rows, mask=inside, other=0.0)
    tl.store(out_ptr + rows, 2 * x, mask=inside)
    ### END SOLUTION


# %%
check("91.1", twice_kernel)

# %% [markdown]
# ## 91.2 A host function that launches


# %% tags=["ex-91.2"]
@triton.jit
def _copy(x_ptr, out_ptr, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    tl.store(out_ptr + rows, tl.load(x_ptr + rows))


def copied(x):
    import torch

    ### BEGIN SOLUTION
    out = torch.empty_like(x)
    _copy[(1,)](x, out, BLOCK=x.numel())
    return out
    ### END SOLUTION


# %%
check("91.2", copied)

# %% [markdown]
# ## 91.3 A sum that is the same whatever comes first


# %% tags=["ex-91.3"]
@triton.jit
def sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """out[0] = the sum of x; one program works, the others return at once."""
    ### BEGIN SOLUTION
    if tl.program_id(0) == 0:
        total = 0.0
        for block in range(tl.num_programs(0)):
            total += tl.sum(tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK)), 0)
        tl.store(out_ptr, total)
    ### END SOLUTION


# %%
check("91.3", sum_kernel)
