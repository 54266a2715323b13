"""Reading a tensor's numbers on the host: every way is noticed, and what stays on the device is let through."""

import copy
import io
import math
import operator
import pickle

import numpy as np
import pytest
import torch

from jfa.course import host_reads
from jfa.course.guard import Violations
from jfa.course.measure import Meter, Watch
from jfa.course.spec import Exercise

READS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "tolist of .data": lambda x: x.data.tolist(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x[0]),
    "if": lambda x: 1 if x.any() else 0,
    "an index into a list": lambda x: [1, 2, 3, 4, 5, 6][x[0]],
    "operator.index": lambda x: operator.index(x[0]),
    "range": lambda x: range(x[0]),
    "a list times a number": lambda x: [0] * x[0],
    "a slice's end": lambda x: x[: x[0]],
    "a tensor of one number as an index": lambda x: x[x[1]],
    "a number among several indices": lambda x: x[None][0, x[1]],
    "numpy": lambda x: x.numpy(),
    "np.asarray": lambda x: np.asarray(x),
    "np.array": lambda x: np.array([x]),
    "dlpack": lambda x: np.from_dlpack(x),
    "repr": lambda x: repr(x),
    "a format string": lambda x: f"{x[0]:d}",
    "in": lambda x: 3 in x,
    "max of Python": lambda x: max(x[0], x[1]),
    "sorted": lambda x: sorted(x),
    "math.ceil": lambda x: math.ceil(x[0] / 2),
    "nonzero": lambda x: x.nonzero(),
    "where of one argument": lambda x: torch.where(x > 0),
    "argwhere": lambda x: torch.argwhere(x),
    "a mask as an index": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "values put in by a mask": lambda x: operator.setitem(x.clone(), x > 0, torch.tensor([1, 2], dtype=x.dtype)),
    "repeat_interleave": lambda x: torch.repeat_interleave(torch.arange(3), x),
    "repeat_interleave of one argument": lambda x: torch.repeat_interleave(x),
    "repeat_interleave as a method": lambda x: torch.arange(3).repeat_interleave(x),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.bincount(minlength=20),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
    "arange": lambda x: torch.arange(x[0]),
    "zeros": lambda x: torch.zeros(2, x[0]),
    "full": lambda x: torch.full((3,), x[0]),
    "tensor of numbers": lambda x: torch.tensor([x[0], x[1]]),
    "tensor of rows of numbers": lambda x: torch.as_tensor([[x[0]], [x[1]]]),
    "narrow": lambda x: x.narrow(0, x[1], 1),
    "split at numbers of a tensor": lambda x: torch.tensor_split(x, torch.tensor([1, 2])),
    "pad": lambda x: torch.nn.functional.pad(x, (x[0], 0)),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to cpu by keyword": lambda x: x.to(device="cpu"),
    "storage": lambda x: bytes(x.untyped_storage()),
    "pointer": lambda x: x.data_ptr(),
    "pickle": lambda x: pickle.dumps(x),
    "torch.save": lambda x: torch.save(x, io.BytesIO()),
    "map_": lambda x: x.clone().map_(x, lambda a, b: a + b),
}
STAYS = {
    "shapes": lambda x: torch.arange(x.numel() + len(x) + x.shape[0], device=x.device),
    "differences and sums": lambda x: x.diff().cumsum(0),
    "sort, search, gather": lambda x: torch.searchsorted(x.sort().values, x)[None][:, x.long() % 2],
    "two-sided where": lambda x: torch.where(x > 1, x, -1),
    "a number put in by a mask": lambda x: operator.setitem(x.clone(), x > 0, 7),
    "a tensor as an index": lambda x: x[(x % 3).long()],
    "repeat_interleave of a known size": lambda x: torch.repeat_interleave(torch.arange(3), x, output_size=8),
    "repeat_interleave by a number": lambda x: x.repeat_interleave(2),
    "scatter": lambda x: torch.zeros(9, dtype=x.dtype).scatter_add(0, x.long(), x),
    "bounds that are tensors": lambda x: x.clamp(max=x[0]).minimum(x.max()),
    "rows in turn": lambda x: torch.stack([r * 2 for r in x]),
    "a new dtype": lambda x: x.to(torch.int64).to(x.device),
    "histogram by comparison": lambda x: (x[None] == torch.arange(9)[:, None]).sum(1),
    "numbers of Python": lambda x: torch.tensor([1, 2]) + torch.full((2,), 3),
    "a copy": lambda x: copy.deepcopy(x),
}


def noticed(function) -> list[str]:
    """What the watchers write down while a function runs on [3, 0, 5]."""
    violations = Violations()
    x = torch.tensor([3, 0, 5], dtype=torch.int32)
    meter = Meter([host_reads.WORD], violations)
    with meter, Watch(meter):
        function(x)
    return violations.words


@pytest.mark.parametrize("name", READS)
def test_a_read_on_the_host_is_noticed_once(name):
    words = noticed(READS[name])
    assert len(words) == 1 and words[0].startswith("numbers of a tensor on the host ("), words


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_on_the_device_is_let_through(name):
    assert noticed(STAYS[name]) == []


def test_an_exercise_may_forbid_it():
    exercise = Exercise(id="1.1", title="t", name="f", cases=lambda seed: [], forbid=("host reads",))
    assert host_reads.WORD in exercise.forbidden
