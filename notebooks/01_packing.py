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
# * can go from lengths to offsets, from a list to a packed tensor, and back, with as few copies as possible,
# * can say what padding costs, in tokens and in FLOPs (floating-point operations), and why it costs more FLOPs than tokens,
# * know four mistakes of padding and packing that raise no error.
#
# **Time** 30 minutes to read, 85 for the exercises.
# **You need** chapter 00.
#
# ## Mental model: a tape with marks
#
# A packed batch is a tape with the sequences on it, one after another.
# The **offsets** are marks on the tape: one where each sequence begins, and a last one at the end.
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
# It owns no row, but it still counts when sequences are numbered.
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
# The likely mistake is to read o[b + 1] as the last row of sequence b.
# It is the first row *after* sequence b.
#
# Padded to the longest length M, the batch has B·M places.
# So the share of places that hold no token is
#
# $$ \text{token waste} = 1 - \frac{\sum_b n_b}{B\,M}. $$
#
# Attention computes a score for each *pair*.
# A padded batch computes M² scores per sequence, and only n² of them are needed:
#
# $$ \text{pair waste} = 1 - \frac{\sum_b n_b^2}{B\,M^2}. $$
#
# A sequence half as long as the longest wastes half of its places, but three quarters of its pairs.
# The FLOPs of attention are proportional to the pairs.

# %%
total, longest, batches = sum(lengths), max(lengths), len(lengths)
places = batches * longest
print(f"{total} tokens in {places} places: token waste {100 * (1 - total / places):.1f} %")
pairs = sum(n * n for n in lengths)
computed = batches * longest**2
print(f"{pairs} pairs of {computed}: pair waste {100 * (1 - pairs / computed):.1f} %")

# %% [markdown]
# The same as a picture: the square that each of the five sequences computes, and the part of it that counts.

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
# The simplest correct way: keep the sequences in a list and attend to one after another.
# Nothing is wasted, but there is a loop in Python, and on a GPU a few kernel launches per sequence, however short it is.

# %%
generator = torch.Generator().manual_seed(0)
D = 16


def one_sequence(q, k, v):
    """Attend within one sequence: q [n, D], k, v [m, D] -> [n, D]."""
    return torch.softmax(q @ k.T / q.shape[1] ** 0.5, dim=1) @ v


queries = [torch.randn(n, D, generator=generator) for n in lengths]
keys = [torch.randn(n, D, generator=generator) for n in lengths]
values = [torch.randn(n, D, generator=generator) for n in lengths]
by_list = [one_sequence(q, k, v) for q, k, v in zip(queries, keys, values)]

# %% [markdown]
# ## Version 2: a padded rectangle and a mask
#
# All sequences at once, but with B·M places and B·M² scores.
# The reference below *really pads*: it computes every score and masks afterwards.

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
# The same inputs as one tape with its marks.
# The result is packed in the same way.
# `reference.attention` is this course's reference: it computes in float64 if its inputs are float64, and every kernel to come is compared with it.

# %%
by_packing = reference.attention(q[:, None], k[:, None], v[:, None], offsets, offsets)[:, 0]
print("offsets", offsets.tolist(), offsets.dtype)
print("against the list:", float((by_packing - torch.cat(by_list)).abs().max()))

# %% [markdown]
# `layout.unpack` returns views: if you write into one, the tape changes.

# %%
tape = q.clone()
sequences = layout.unpack(tape, offsets)
sequences[1].zero_()
print("rows of the tape that are zero now:", torch.nonzero((tape == 0).all(1)).flatten().tolist())

# %% [markdown]
# ## Version 4: PyTorch's nested tensors
#
# PyTorch has this layout built in: a *nested tensor* with `layout=torch.jagged` is a tape and its offsets in one object.
# Converting to it and back copies nothing, as the memory addresses show.

# %%
nested = layout.to_nested(q, offsets)
tape_again, offsets_again = layout.from_nested(nested)
print("shape", nested.shape, "(the name is the ragged dimension)")
print("same memory there:   ", nested.values().data_ptr() == q.data_ptr())
print("same memory and back:", tape_again.data_ptr() == q.data_ptr())
print("offsets inside are", nested.offsets().dtype, "and come back as", offsets_again.dtype)

# %% [markdown]
# A nested tensor made by `torch.nested.narrow` has gaps between its sequences.
# Then there is no tape to share, and `from_nested` copies the rows into a new one.
#
# ## Cross-attention: two tapes
#
# Queries and keys may come from different places: a decoder looks at an encoder, a pooling query looks at a history.
# Then there are two tapes, and two sets of marks for the same sequences: `query_offset` and `key_offset`.
# A sequence may have no queries, or no keys.
# A query without keys has nothing to average; its output is defined as 0.

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
# That depends on the distribution of the lengths.
# Here are four of them, all seeded.
#
# * *Uniform*: every length is equally likely.
# * *Log-uniform*: as many lengths between 16 and 32 as between 2048 and 4096.
# * *Pareto*: most are short, a few are very long.
# * *Sparsity*: the rule of the TritonBench benchmarks.
#   For a parameter s of at least 0.5 it draws lengths from [(2s − 1)·M, M), so at s = 0.95 every length is within 10 % of the largest.
#
# Predict first: which one wastes most, and which one hardly anything?
#
# The axis of lengths is logarithmic, and each bin covers the same ratio of lengths.
# So the log-uniform lengths look flat, and the uniform ones pile up on the right.

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
# With Pareto lengths nearly all places and practically all pairs are waste: one long sequence sets the size of the rectangle for all of them.
# Where all lengths are within 10 % of each other, padding wastes 5 % of the tokens and 10 % of the pairs.
# Packing never has more tokens or pairs than padding.
#
# **The usual remedy** is to sort by length and pad each group of similar lengths to its own maximum.
# It helps, and more groups help more.
# But the waste is zero only if each group has a single length, and sorting training data by length changes which samples share a batch.


# %%
def waste_in_groups(sample, groups):
    """Return the pair waste in % of a sorted batch in equal groups, each padded to its longest."""
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
# A padded batch also needs a mask, and the mask is data: a boolean tensor [B, M, M] must be made, stored and read.
# Compare it with the offsets, which are B + 1 numbers of 4 bytes:

# %%
rows = []
for name, sample in samples.items():
    b, m = len(sample), int(sample.max())
    pairs = int(masks.allowed_pairs(masks.Band(), sample, sample).sum())
    rows.append([name, b * m * m / 2**30, 4 * (b + 1) / 2**10, b * m * m / pairs])
print(plots.table(["lengths", "mask GiB", "offsets KiB", "scores computed / wanted"], rows))

# %% [markdown]
# A mask is cheap only if the kernel *computes* it from two lengths and never stores it.
# Chapters 04 and 06 do that.
#
# ## Summary
#
# * A packed batch is one tensor of rows plus B + 1 offsets; sequence b is `values[o[b] : o[b + 1]]`, a view.
# * Padding wastes places in proportion to the length and pairs in proportion to its square, and the FLOPs of attention follow the pairs.
# * Sorting into groups reduces the waste; packing removes it.
# * An empty sequence is legal, and a query without keys has output 0.
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
# Close to 50 % of the tokens and close to 75 % of the pairs.
# </details>
#
# <details><summary>Why do offsets have B + 1 entries, when the last one is just the number of rows?</summary>
#
# So that the end of every sequence is found in the same way, without a special case for the last one.
# And the tensor may have more rows than the last offset says: rows that belong to no sequence.
# </details>
#
# <details><summary>A packed batch is permuted within each sequence. Does attention notice?</summary>
#
# Without a causal mask or positions, the output rows are permuted in the same way, and nothing else changes.
# A row that moves to another *sequence* changes every output there.
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
# A cell shows each of them.
#
# **Offsets that are off by one.** Shift every inner offset by one row, and each sequence loses its first row to the sequence before it.
# Nothing crashes.
# Count the rows whose output changed:

# %%
shifted = offsets.clone()
shifted[1:-1] += 1
wrong = reference.attention(q[:, None], k[:, None], v[:, None], shifted, shifted)[:, 0]
changed = (wrong - by_packing).abs().amax(1) > 1e-4
print(int(changed.sum()), "of", len(q), "rows are wrong, and no error was raised")

# %% [markdown]
# **NaN in a place that has weight 0.** The free places of a padded tensor hold whatever was in memory before.
# Their weight is exactly 0, but 0 · NaN is NaN, and it reaches every output row of the sequence.

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
# A GPU kernel has the same problem in another form: its last block of keys reaches into the *next sequence*.
# Chapter 04 returns to it.
#
# **A mask value of -1e9.** It works like minus infinity until all keys of a row are masked.
# Then all scores are equal, and the row becomes the average of everything that was forbidden.

# %%
for mask_value in (-1e9, -torch.inf):
    row = torch.softmax(torch.full((1, 4), mask_value), 1)
    print(f"four masked keys with {mask_value}: weights {row[0].tolist()}")

# %% [markdown]
# With -inf the row is NaN, which is at least noticed.
# Neither is right: a query that may see no key must give 0.
# Chapter 02 shows how.
#
# **A maximum read from the device.** `int(lengths.max())` looks harmless.
# On a GPU it makes the CPU wait until the GPU has finished all earlier work.
# In a training step that is one stall per layer.
# So in this package sizes come from shapes or are passed in, and lists of work (one entry per block of rows) are built on the GPU with an *upper bound* on their size.
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
# The bound is at most 34 % above the number of blocks that exist; the padded batch has up to 24 times as many.
#
# ## What differs on a GPU
#
# * Reading an offset on the host (`int(offsets[-1])`, `.tolist()`) waits for the device.
#   Every helper in `jfa.layout` says in its docstring whether it does.
# * Offsets are int32: kernels do arithmetic with them for every row, and 32 bits are cheaper.
#   A product such as row times row size may need 64 bits.
# * The waste above is counted, not timed.
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
