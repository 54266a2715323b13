"""What counts as a new tensor: results with memory of their own, by whatever way they came; views of any kind do not."""

import pytest
import torch

from jfa.course.guard import Violations
from jfa.course.measure import Meter

VIEWS = {
    "reshape": lambda x: x.reshape(4, 2, 8),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x[None].expand(50, 8, 8),
    "rows in turn": lambda x: list(x),
    "transposed slice": lambda x: x.t()[:, ::2],
    "diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(0, 4, 1),
    "flattened twice": lambda x: x.flatten().view(2, 32),
}
NEW = {
    "a copy of an expanded view": (lambda x: x[None].expand(5, 8, 8).contiguous(), 320),
    "a product": (lambda x: x @ x, 64),
    "an outer sum": (lambda x: x[:, :, None] + x[:, None, :], 512),
    "a table of zeros": (lambda x: torch.zeros(10, 10), 100),
    "a reshape that copies": (lambda x: x.t().reshape(64), 64),
}


def largest(function) -> int:
    """peak_numel of one call on an [8, 8] tensor."""
    meter = Meter((), Violations())
    x = torch.arange(64.0).reshape(8, 8)
    with meter:
        function(x)
    return meter.take()["peak_numel"]


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_no_new_tensor(name):
    assert largest(VIEWS[name]) == 0


@pytest.mark.parametrize("name", NEW)
def test_what_has_memory_of_its_own_counts(name):
    function, elements = NEW[name]
    assert largest(function) == elements


def test_a_result_written_into_the_input_is_not_new():
    assert largest(lambda x: x.add_(1).mul_(2)) == 0
