# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 Packing and waste
#
# **Goals.** After this chapter you
# * can go from lengths to offsets, from a list to a packed tensor, and back, without copying more than you must,
# * can say what padding costs, in tokens and in FLOPs (floating-point operations), and why the second number is the worse one,
# * know four mistakes of padding and packing that raise no error.
#
# **Time** 30 minutes to read, 85 for the exercises.
# **You need** chapter 00.
#
# ## Mental model: a tape with marks
#
# A packed batch is a tape.
# Sequences lie on it one after another.
# The **offsets** are marks on the tape: where each sequence begins, and one last mark at the end.
# B sequences have B + 1 marks.

# %%
import torch

from jfa import layout, masks, plots, reference

lengths = [7, 3, 19, 5, 11]
plots.padded_and_packed(lengths)

# %% [markdown]
# Read the lower strip: sequence 2 occupies the rows from mark 10 up to, but not including, mark 29.
# Its length is the difference of its two marks.
# A sequence of length 0 has two equal marks.
# It owns no row, and keeps its number.
#
# ## The math
#
# | name | shape | meaning |
# |---|---|---|
# | lengths n | [B] | tokens of each sequence |
# | offsets o | [B + 1] | o₀ = 0, oᵦ₊₁ = oᵦ + nᵦ |
# | values | [o_B, ...] | all rows, no gaps |
#
# Sequence b is `values[o[b] : o[b + 1]]`.
# That slice is a *view*: nothing is copied.
#
# The likely mistake: to take o[b + 1] for the last row of sequence b.
# It is the first row *after* it.
#
# Padded to the longest length M, the batch has B·M places.
# So the share of places that hold nothing is
#
# $$ \text{token waste} = 1 - \frac{\sum_b n_b}{B\,M}. $$
#
# Attention computes a score for each *pair*.
# Padded that is M² per sequence, and only n² of them are wanted:
#
# $$ \text{pair waste} = 1 - \frac{\sum_b n_b^2}{B\,M^2}. $$
#
# A sequence half as long as the longest wastes half of its tokens, and three quarters of its pairs.
# FLOPs follow the pairs.

# %%
total, longest, batches = sum(lengths), max(lengths), len(lengths)
places = batches * longest
print(f"{total} tokens in {places} places: token waste {100 * (1 - total / places):.1f} %")
pairs = sum(n * n for n in lengths)
computed = batches * longest**2
print(f"{pairs} pairs of {computed}: pair waste {100 * (1 - pairs / computed):.1f} %")

# %% [markdown]
# The same as a picture: what each of the five sequences computes, and what of it counts.

# %%
squares = {}
for b, n in enumerate(lengths):
    square = torch.zeros(longest, longest, dtype=torch.bool)
    square[:n, :n] = True
    squares[f"sequence {b}, length {n}"] = square
plots.score_grids(squares, title="the padded batch computes every square; the blue part counts")

# %% [markdown]
# ## Version 1: a list and a loop
#
# The simplest right thing: keep the sequences in a list and attend one after another.
# No waste, but a loop in Python, and on a GPU a few launches for each sequence, however short it is.

# %%
generator = torch.Generator().manual_seed(0)
D = 16


def one_sequence(q, k, v):
    """q [n, D], k, v [m, D] -> [n, D]."""
    return torch.softmax(q @ k.T / q.shape[1] ** 0.5, dim=1) @ v


queries = [torch.randn(n, D, generator=generator) for n in lengths]
keys = [torch.randn(n, D, generator=generator) for n in lengths]
values = [torch.randn(n, D, generator=generator) for n in lengths]
by_list = [one_sequence(q, k, v) for q, k, v in zip(queries, keys, values)]

# %% [markdown]
# ## Version 2: a padded rectangle and a mask
#
# One launch, but B·M places and B·M² scores.
# The reference below *really pads*: it forms every score and masks afterwards.

# %%
q, offsets = layout.pack(queries)
k, _ = layout.pack(keys)
v, _ = layout.pack(values)
n = layout.lengths_from_offsets(offsets)

padded = [layout.pad(x[:, None], offsets) for x in (q, k, v)]  # [B, M, heads = 1, D]
by_padding, _ = reference.padded_attention(*padded, n, n)
print("padded shapes:", tuple(padded[0].shape), "->", tuple(by_padding.shape))

by_padding = layout.unpad(by_padding, offsets)[:, 0]
print("against the list:", float((by_padding - torch.cat(by_list)).abs().max()))

# %% [markdown]
# ## Version 3: packed
#
# The same inputs as one tape and its marks.
# The result is packed as well, row for row.
# `reference.attention` is the judge of this whole course: it computes in float64 if you like, and every kernel to come is compared with it.

# %%
by_packing = reference.attention(q[:, None], k[:, None], v[:, None], offsets, offsets)[:, 0]
print("offsets", offsets.tolist(), offsets.dtype)
print("against the list:", float((by_packing - torch.cat(by_list)).abs().max()))

# %% [markdown]
# Unpacking gives views.
# Write into one, and the tape changes.

# %%
tape = q.clone()
sequences = layout.unpack(tape, offsets)
sequences[1].zero_()
print("rows of the tape that are zero now:", torch.nonzero((tape == 0).all(1)).flatten().tolist())

# %% [markdown]
# ## Version 4: PyTorch's nested tensors
#
# PyTorch has this layout built in: a *nested tensor* with `layout=torch.jagged` is a tape and its offsets in one object.
# Going there and back copies nothing.
# The address of the memory says so.

# %%
nested = layout.to_nested(q, offsets)
tape_again, offsets_again = layout.from_nested(nested)
print("shape", nested.shape, "where the word with a letter is the ragged dimension")
print("same memory there:   ", nested.values().data_ptr() == q.data_ptr())
print("same memory and back:", tape_again.data_ptr() == q.data_ptr())
print("offsets inside are", nested.offsets().dtype, "and come back as", offsets_again.dtype)

# %% [markdown]
# A nested tensor that was *narrowed* has holes between its sequences.
# Then there is no tape to share, and `from_nested` gathers the rows.
#
# ## Cross-attention: two tapes
#
# Queries and keys may come from different places: a decoder looks at an encoder, a pooling query looks at a history.
# Then there are two tapes and two sets of marks, `query_offset` and `key_offset`, with the same number of sequences.
# Either length may be 0.
# A query without keys has nothing to average, and its output is 0.

# %%
query_offset = layout.offsets_from_lengths([2, 1, 0, 3])
key_offset = layout.offsets_from_lengths([4, 0, 2, 5])
cross_q = torch.randn(6, 1, D, generator=generator)
cross_k, cross_v = (torch.randn(11, 1, D, generator=generator) for _ in range(2))
cross = reference.attention(cross_q, cross_k, cross_v, query_offset, key_offset)
zeros = torch.nonzero((cross[:, 0] == 0).all(1)).flatten().tolist()
print("rows of the output that are 0:", zeros, "(sequence 1 has a query and no key)")

# %% [markdown]
# ## How bad is it, really?
#
# That depends on how lengths are spread.
# Four generators, all seeded.
# *Uniform*: every length equally likely.
# *Log-uniform*: as many between 16 and 32 as between 2048 and 4096.
# *Pareto*: most are short, a few are enormous.
# *Sparsity*: the rule of the TritonBench benchmarks, which draws from [(2 s - 1) M, M) for s of 0.5 or more: at s = 0.95 every length is within 10 % of the largest.
#
# Predict first: which one wastes most, and which one hardly anything?
#
# The axis of lengths is logarithmic, with bins of equal ratio: there the log-uniform lengths are level, and the uniform ones pile up at the right.

# %%
samples = {
    "uniform": layout.uniform_lengths(1024, 16, 4096, seed=0),
    "log-uniform": layout.log_uniform_lengths(1024, 16, 4096, seed=0),
    "Pareto": layout.pareto_lengths(1024, 16, 4096, seed=0),
    "sparsity 0.95": layout.sparsity_lengths(1024, 4096, 0.95, seed=0),
}
plots.histograms(samples, title="1024 lengths from each", xlabel="length", log_x=True)

# %%
shares = {
    "tokens": [100 * layout.padding_waste(s) for s in samples.values()],
    "pairs": [100 * masks.flop_waste(s) for s in samples.values()],
}
plots.bars(
    list(samples),
    shares,
    title="waste of one padded batch of 1024",
    xlabel="lengths",
    ylabel="waste in %",
    form="{:.1f}",
)

# %% [markdown]
# With a Pareto tail nearly all places and practically all pairs are waste: one long sequence sets the size of the rectangle for everybody.
# Where all lengths are within 10 % of each other, padding wastes 5 % of the tokens and 10 % of the pairs.
# Counted in tokens or in pairs, packing never loses.
#
# **The usual remedy** is to sort by length and pad each group to its own maximum.
# It helps, more with every group.
# But the waste is zero only when each group has a single length, and sorting training data by length changes what a batch holds.


# %%
def waste_in_groups(sample, groups):
    """Pair waste in %: the sorted batch is cut into equal groups, each padded to its own longest."""
    parts = torch.sort(sample).values.long().chunk(groups)
    computed = sum(len(p) * int(p.max()) ** 2 for p in parts)
    return 100 * (1 - int((sample.long() ** 2).sum()) / computed)


groups = [1, 2, 4, 8, 16, 32, 64]
plots.lines(
    groups,
    {name: [waste_in_groups(s, g) for g in groups] for name, s in samples.items()},
    title="sorting into groups: pair waste that is left",
    xlabel="groups",
    ylabel="waste in %",
    log_x=True,
)

# %% [markdown]
# ## What a mask on padded data costs
#
# The mask itself is data.
# A boolean mask [B, M, M] must be made, stored and read.
# Compare with the marks: B + 1 numbers of 4 bytes.

# %%
rows = []
for name, sample in samples.items():
    b, m = len(sample), int(sample.max())
    pairs = int(masks.allowed_pairs(masks.Band(), sample, sample).sum())
    rows.append([name, b * m * m / 2**30, 4 * (b + 1) / 2**10, b * m * m / pairs])
print(plots.table(["lengths", "mask GiB", "offsets KiB", "scores computed / wanted"], rows))

# %% [markdown]
# A mask can be cheap only where it is *computed* inside the kernel from two lengths, and never stored.
# Chapters 04 and 06 do that.
#
# ## Exercises
#
# Open [exercises/01_packing.py](../exercises/01_packing.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 1.1 | offsets from lengths | 1 | 10 |
# | 1.2 | whose row is it? | 2 | 15 |
# | 1.3 | from packed to padded | 2 | 15 |
# | 1.4 | the waste of a cross-attention batch | 2 | 15 |
# | 1.5 | shuffle a packed batch | 3 | 15 |
# | 1.6 | attention on padded data, with garbage in the free places | 3 | 15 |
#
# ## Checkpoint
#
# <details><summary>Offsets [0, 4, 4, 9]. How many sequences, how long, and which one owns row 4?</summary>
#
# Three, of lengths 4, 0 and 5.
# Row 4 belongs to sequence 2.
# Sequence 1 owns none.
# </details>
#
# <details><summary>All sequences of a batch have half the length of the longest, except the longest itself. For a large batch, what are the two wastes?</summary>
#
# Near 50 % of the tokens and near 75 % of the pairs.
# </details>
#
# <details><summary>Why do offsets have B + 1 entries, when the last one is just the number of rows?</summary>
#
# So that every sequence finds its end in the same way, without a special case.
# And the tensor may have more rows than the last offset says: rows that belong to nobody.
# </details>
#
# <details><summary>A packed batch is permuted within each sequence. Does attention notice?</summary>
#
# Without a causal mask or positions: the output rows are permuted along, nothing else changes.
# A row that moves to another *sequence* changes everything there.
# </details>
#
# ## Try this
#
# * Give `pareto_lengths` an `alpha` of 3 (a thinner tail) and run the two pictures again.
#   Which alpha brings the pair waste under 90 %?
# * Add one sequence of 4096 tokens to a batch of 1023 sequences of 16.
#   Predict both wastes, then compute them.
#
# ## Pitfalls
#
# Each is run, not told.
#
# **Marks that are off by one.** Shift every inner mark by one row, and each sequence hands its first row to its neighbour.
# Nothing crashes.
# Count the rows whose output changed:

# %%
shifted = offsets.clone()
shifted[1:-1] += 1
wrong = reference.attention(q[:, None], k[:, None], v[:, None], shifted, shifted)[:, 0]
changed = (wrong - by_packing).abs().amax(1) > 1e-4
print(int(changed.sum()), "of", len(q), "rows are wrong, and no error was raised")

# %% [markdown]
# **NaN in a place that has weight 0.** Free places of a padded tensor hold whatever was there before.
# Their weight is exactly 0.
# But 0 · NaN is NaN, and it reaches every row of its sequence.

# %%
M = longest
scores = torch.randn(1, M, generator=generator)
scores[:, 7:] = -torch.inf  # sequence 0: seven keys
weights = torch.softmax(scores, 1)
dirty = torch.randn(M, D, generator=generator)
dirty[7:] = torch.nan
clean = torch.where(torch.arange(M)[:, None] < 7, dirty, 0)
print("weights of the free places:", weights[0, 7:].unique().tolist())
print("with dirty values:  ", int((weights @ dirty).isnan().sum()), "of", D, "outputs are NaN")
print("with cleaned values:", int((weights @ clean).isnan().sum()), "of", D, "outputs are NaN")

# %% [markdown]
# A GPU kernel has the same trap in another form: its last block of keys reaches into the *next sequence*.
# Chapter 04 meets it again.
#
# **A mask value of -1e9.** It looks like minus infinity until a row has nothing but masked keys.
# Then all scores are equal, and the row becomes the average of everything that was forbidden.

# %%
for mask_value in (-1e9, -torch.inf):
    row = torch.softmax(torch.full((1, 4), mask_value), 1)
    print(f"four masked keys with {mask_value}: weights {row[0].tolist()}")

# %% [markdown]
# With -inf it is NaN, which at least is loud.
# Right is neither: a query that may see nothing gives 0.
# Chapter 02 builds that in.
#
# **A maximum read from the device.** `int(lengths.max())` looks innocent.
# On a GPU it makes the CPU wait until the GPU has finished everything before.
# In a training step that is a stall in each layer.
# So sizes here come from shapes, or are passed in, and lists of work are built on the device with an *upper bound* for their size.
# For the lengths above and blocks of 64 rows:

# %%
from jfa.schedule import max_tiles

rows = []
for name, sample in samples.items():
    exact = int(((sample + 63) // 64).sum())
    bound = max_tiles(int(sample.sum()), 64, len(sample))
    padded_tiles = len(sample) * -(-int(sample.max()) // 64)
    rows.append([name, exact, bound, padded_tiles])
headers = ["lengths", "blocks that exist", "bound from shapes", "blocks of the padded batch"]
print(plots.table(headers, rows))

# %% [markdown]
# The bound costs a little, the rectangle costs everything.
#
# ## What differs on a GPU
#
# * Reading an offset on the host (`int(offsets[-1])`, `.tolist()`) waits for the device.
#   Every helper in `jfa.layout` says in its docstring whether it does.
# * Offsets are int32: kernels do arithmetic on them for every row, and 32 bits are cheaper.
#   Products such as row times row size need 64 bits.
# * Time.
#   The waste above is counted, not timed.
#   How much of it turns into time depends on what a kernel skips.
#
# ## What was verified here
#
# Versions 1, 2 and 3 agree on this batch, on a CPU, up to rounding, as printed; the tests of `jfa.layout` and `jfa.reference` do the same on random lengths with empty sequences.
# Waste and block counts are exact counts.
# Nothing was timed, and no GPU was used.
#
# ## Sources
#
# * TritonBench, the rule for sparse lengths: github.com/meta-pytorch/tritonbench, commit db2155c.
# * PyTorch nested tensors, layout `torch.jagged`: PyTorch documentation, `torch.nested`, version 2.13.
# * The lengths [7, 3, 19, 5, 11] and their 52.6 %: the chapter this course grew from.
#
# Next: [02 online softmax](02_online_softmax.py).
