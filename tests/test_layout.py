"""Packed layouts: offsets and lengths, padding there and back, nested tensors, generators."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jfa import layout

LENGTHS = st.lists(st.integers(0, 40), max_size=12)


@given(LENGTHS)
def test_offsets_and_lengths_are_inverse(lengths):
    offsets = layout.offsets_from_lengths(lengths)
    assert offsets.dtype == torch.int32 and offsets[0] == 0 and offsets[-1] == sum(lengths)
    assert layout.lengths_from_offsets(offsets).tolist() == lengths
    layout.check_offsets(offsets, sum(lengths), batches=len(lengths))


@given(LENGTHS.filter(len), st.integers(0, 2**31))
def test_pack_unpack_pad_unpad_keep_every_row(lengths, seed):
    g = torch.Generator().manual_seed(seed)
    sequences = [torch.randn(n, 2, 3, generator=g) for n in lengths]
    values, offsets = layout.pack(sequences)
    assert all(torch.equal(a, b) for a, b in zip(layout.unpack(values, offsets), sequences))
    padded = layout.pad(values, offsets, fill=7.0)
    assert padded.shape == (len(lengths), max(lengths), 2, 3)
    for b, n in enumerate(lengths):
        assert torch.equal(padded[b, :n], sequences[b]) and (padded[b, n:] == 7.0).all()
    assert torch.equal(layout.unpad(padded, offsets), values)


@given(LENGTHS)
def test_every_row_knows_its_sequence_and_position(lengths):
    offsets = layout.offsets_from_lengths(lengths)
    total = sum(lengths)
    assert layout.sequence_ids(offsets, total).tolist() == [b for b, n in enumerate(lengths) for _ in range(n)]
    assert layout.positions(offsets, total).tolist() == [i for n in lengths for i in range(n)]


def test_rows_past_the_last_offset_belong_to_no_sequence():
    offsets = layout.offsets_from_lengths([2, 3])
    assert layout.sequence_ids(offsets, 7).tolist() == [0, 0, 1, 1, 1, 2, 2]


def test_unpack_gives_views():
    values, offsets = torch.zeros(5, 2), layout.offsets_from_lengths([2, 3])
    layout.unpack(values, offsets)[1].fill_(1.0)
    assert values[2:].eq(1).all() and values[:2].eq(0).all()


def test_padding_is_differentiable_and_never_reads_a_neighbour():
    offsets = layout.offsets_from_lengths([2, 0, 3])
    values = torch.randn(5, 2, requires_grad=True)
    layout.pad(values, offsets).sum().backward()
    assert torch.equal(values.grad, torch.ones(5, 2))
    poisoned = torch.full((5, 2), float("nan"))
    poisoned[:2] = 1.0
    assert layout.pad(poisoned, offsets)[0].isfinite().all()


def test_pad_drops_rows_past_max_len():
    values, offsets = torch.arange(5.0)[:, None], layout.offsets_from_lengths([4, 1])
    assert layout.pad(values, offsets, 2)[..., 0].tolist() == [[0, 1], [4, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_check_accepts_both_integer_widths_and_slack_rows(dtype):
    layout.check_offsets(torch.tensor([0, 3, 8], dtype=dtype), 10)


@pytest.mark.parametrize(
    "offsets, error, words",
    [
        (torch.tensor([2, 5, 9]), ValueError, "start at 0"),
        (torch.tensor([0, 5, 4, 9]), ValueError, r"key_offset\[2\] = 4 < key_offset\[1\] = 5"),
        (torch.tensor([0, 5, 12]), ValueError, "ends at 12.*only 10 rows"),
        (torch.tensor([[0, 5]]), ValueError, "1-D"),
        (torch.zeros(0, dtype=torch.int32), ValueError, "1-D"),
        (torch.tensor([0.0, 5.0]), TypeError, "int32"),
        ([0, 5], TypeError, "torch.Tensor"),
    ],
)
def test_bad_offsets_are_refused_by_name(offsets, error, words):
    with pytest.raises(error, match=words) as caught:
        layout.check_offsets(offsets, 10, name="key_offset")
    assert "key_offset" in str(caught.value)


def test_wrong_number_of_sequences_names_both_counts():
    with pytest.raises(ValueError, match="key_offset has 4 entries, but 2 sequences need 3"):
        layout.check_offsets(torch.tensor([0, 1, 2, 3]), name="key_offset", batches=2)


def test_contents_are_not_read_unless_asked():
    layout.check_offsets(torch.tensor([5, 1]), 3, contents=False)


@pytest.mark.parametrize(
    "lengths, error", [([3, -1], ValueError), ([[1]], ValueError), ([1.5], TypeError), ([2**31], ValueError)]
)
def test_bad_lengths_are_refused_by_name(lengths, error):
    with pytest.raises(error, match="lengths"):
        layout.offsets_from_lengths(lengths)


def test_pack_needs_sequences_of_one_row_shape():
    with pytest.raises(ValueError, match="sequences"):
        layout.pack([])
    with pytest.raises(ValueError, match="sequences"):
        layout.pack([torch.zeros(2, 3), torch.zeros(2, 4)])


# ------------------------------------------------------------------------------------------------------------- nested
def test_nested_round_trip_shares_memory():
    values, offsets = torch.randn(8, 2, 4), layout.offsets_from_lengths([3, 0, 5])
    nested = layout.to_nested(values, offsets)
    assert [t.shape[0] for t in nested.unbind()] == [3, 0, 5]
    back, back_offsets = layout.from_nested(nested)
    assert back.data_ptr() == values.data_ptr() and torch.equal(back, values)
    assert back_offsets.dtype == torch.int32 and torch.equal(back_offsets, offsets)


def test_nested_with_int64_offsets_and_transposed_heads():
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], layout=torch.jagged)
    back, offsets = layout.from_nested(nested.transpose(1, 2))  # [B, H, j, D], as scaled_dot_product_attention wants it
    assert torch.equal(back, nested.values()) and offsets.tolist() == [0, 3, 8] and offsets.dtype == torch.int32


def test_nested_with_holes_is_gathered():
    dense = torch.randn(3, 6, 2)
    nested = torch.nested.narrow(dense, 1, torch.tensor([1, 0, 2]), torch.tensor([3, 0, 4]), layout=torch.jagged)
    back, offsets = layout.from_nested(nested)
    assert offsets.tolist() == [0, 3, 3, 7]
    assert torch.equal(back, torch.cat([dense[0, 1:4], dense[2, 2:6]]))


def test_nested_gradients_reach_the_packed_values():
    values = torch.randn(8, 4, requires_grad=True)
    nested = layout.to_nested(values, layout.offsets_from_lengths([3, 5]))
    (layout.from_nested(nested * 2)[0] ** 2).sum().backward()
    torch.testing.assert_close(values.grad, 8 * values.detach())


def test_from_nested_refuses_plain_tensors():
    with pytest.raises(TypeError, match="nested"):
        layout.from_nested(torch.zeros(3))


# --------------------------------------------------------------------------------------------------------- generators
def test_seed_lengths_waste_half_their_places():
    lengths = [7, 3, 19, 5, 11]
    assert (sum(lengths), len(lengths) * max(lengths)) == (45, 95)
    assert round(100 * layout.padding_waste(lengths), 1) == 52.6


def test_no_places_no_waste():
    assert layout.padding_waste([]) == 0.0 and layout.padding_waste([0, 0]) == 0.0


@pytest.mark.parametrize("name", ["uniform", "log-uniform", "pareto"])
@pytest.mark.parametrize("seed", [0, 1])
def test_generated_lengths_stay_in_range_and_repeat(name, seed):
    make = layout.GENERATORS[name]
    lengths = make(2000, 16, 4096, seed=seed)
    assert lengths.dtype == torch.int32 and lengths.min() >= 16 and lengths.max() <= 4096
    assert torch.equal(lengths, make(2000, 16, 4096, seed=seed))
    assert not torch.equal(lengths, make(2000, 16, 4096, seed=seed + 1))


def test_generators_have_their_shapes():
    names = ("uniform", "log-uniform", "pareto")
    uniform, log_uniform, pareto = (layout.GENERATORS[n](20000, 16, 4096, seed=3).float() for n in names)
    assert abs(uniform.median() - 2056) < 60
    assert abs(log_uniform.median() - 256) < 20  # the geometric mean of 16 and 4096
    tail = [(pareto > x).float().mean().item() for x in (32, 64, 128)]
    np.testing.assert_allclose(tail, [(16 / x) ** 1.5 for x in (32, 64, 128)], rtol=0.15)  # each doubling keeps 35 %


@pytest.mark.parametrize("sparsity, low, high", [(1.0, 1000, 1000), (0.75, 500, 999), (0.5, 0, 999), (0.25, 1, 499)])
def test_sparsity_rule_of_tritonbench(sparsity, low, high):
    lengths = layout.sparsity_lengths(20000, 1000, sparsity, seed=0)
    assert (lengths.min().item(), lengths.max().item()) == (low, high)
    assert abs(lengths.float().mean() / 1000 - sparsity) < 0.01


@pytest.mark.parametrize("call", [
    lambda: layout.uniform_lengths(3, 5, 4, seed=0),
    lambda: layout.log_uniform_lengths(3, 0, 4, seed=0),
    lambda: layout.pareto_lengths(3, 1, 4, alpha=0, seed=0),
    lambda: layout.sparsity_lengths(3, 10, 0.0, seed=0),
])  # fmt: skip
def test_generators_refuse_impossible_ranges(call):
    with pytest.raises(ValueError):
        call()
