"""What counts as a new tensor: results with memory of their own, by whatever way they came; views of any kind do not."""

import array
import builtins
import math
import operator
import pickle
import struct

import numpy as np
import pytest
import torch

from jfa.course import arrays
from jfa.course.guard import Violations
from jfa.course.measure import Meter, Watch

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


def counted(function, *tensors, forbidden=(), python=False):
    """(counts, violations) of one call, as an answer's call is counted."""
    meter = Meter(forbidden, Violations(), watch_python=python)
    with arrays.counted(meter, globals()), meter, Watch(meter):
        function(*tensors)
    return meter.take(), meter.violations.words


def _rows(n=50):
    return torch.rand(n, n, generator=torch.Generator().manual_seed(2)) + 0.1


FEW = {
    "einsum": (lambda w: torch.einsum("ij,i->ij", w, w[:, 0]), 2),
    "a function of many operations": (lambda w: torch.nn.functional.normalize(w, p=1, dim=1), 1),
    "a module": (lambda w: torch.nn.Softplus()(w), 1),
    "attributes and sizes": (lambda w: (w.T.shape, w.dtype, len(w), w.numel(), w.dim()), 0),
    "a loop that torch makes": (lambda w: torch.vmap(lambda r: r / r.sum())(w), 2),
    "one NumPy operation": (lambda w: torch.from_numpy(w.numpy() / w.numpy().sum(1, keepdims=True)), 4),
}


@pytest.mark.parametrize("name", FEW)
def test_what_the_learner_writes_counts_once(name):
    function, most = FEW[name]
    counts, _ = counted(function, _rows())
    assert counts["ops"] <= most


def _numpy_rows(w):
    a = w.numpy().copy()
    for i in range(len(a)):
        a[i] /= a[i].sum()
    return torch.from_numpy(a)


LOOPS = {
    "torch": lambda w: torch.stack([row / row.sum() for row in w]),
    "torch, by index": lambda w: torch.stack([w[i] / w[i].sum() for i in range(len(w))]),
    "numpy": _numpy_rows,
    "numpy, in a function that numpy calls": lambda w: np.apply_along_axis(lambda r: r / r.sum(), 1, w.numpy()),
    "numpy, by np.asarray": lambda w: np.stack([row / row.sum() for row in np.asarray(w)]),
    "numpy, by dlpack": lambda w: [row * 2 for row in np.from_dlpack(w)],
    "numpy, into an array of its own": lambda w: [
        operator.setitem(out, i, i) for out in [np.zeros(50)] for i in range(50)
    ],
    "lists": lambda w: torch.tensor([[x / sum(row) for x in row] for row in w.tolist()]),
    "numbers": lambda w: [x.item() for x in w[0]],
    "NumPy's numbers": lambda w: [x + 1 for x in w.numpy()[0].tolist()],
    "NumPy's numbers, one by one": lambda w: [w.numpy().item(0, i) for i in range(50)],
    "a flat iterator": lambda w: sum(w.numpy()[0].flat),
    "an iterator over cells": lambda w: [float(x) for x in np.nditer(w.numpy()[0])],
    "places and numbers": lambda w: [x for _, x in np.ndenumerate(w.numpy()[0])],
    "bytes": lambda w: struct.unpack("50f", w.numpy()[0].tobytes()),
    "bytes, by the built-in": lambda w: array.array("f", bytes(w.numpy()[0])),
    "a memoryview": lambda w: list(memoryview(w.numpy()[0])),
    "the array's memory": lambda w: w.numpy()[0].data.tolist(),
    "a pickle": lambda w: pickle.dumps(w.numpy()[0]),
    "a plain view": lambda w: [row.sum() for row in w.numpy().view(np.ndarray)],
    "the base of a view": lambda w: [row.sum() for row in w.numpy()[:].base],
    "a buffer read again": lambda w: [x for x in np.frombuffer(w.numpy()[0], np.float32)],
    "a function that NumPy calls per number": lambda w: np.vectorize(lambda x: x + 1)(w.numpy()[0]),
    "a universal function of one's own": lambda w: np.frompyfunc(lambda x: x + 1, 1, 1)(w.numpy()[0]),
    "a function that torch calls per number": lambda w: w[0].clone().apply_(lambda x: x + 1),
    "a function of two tensors": lambda w: w[0].clone().map_(w[1], lambda x, y: x + y),
    "aten": lambda w: [torch.ops.aten.mul(w[i], 2) for i in range(50)],
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_a_loop_in_any_library(name):
    assert counted(LOOPS[name], _rows())[0]["ops"] >= 50


INSIDE = {
    "a subclass": """
class T(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            x = args[0].as_subclass(torch.Tensor)
            return torch.stack([x[i] / x[i].sum() for i in range(len(x))])
answer = lambda w: w.as_subclass(T) + 0
""",
    "a gradient of its own": """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.stack([x[i] / x[i].sum() for i in range(len(x))])
def answer(w):
    y = w.clone().requires_grad_()
    return torch.autograd.grad(F.apply(y).sum(), y)[0]
""",
    "a hook": """
def answer(w):
    y = w.clone().requires_grad_()
    z = y * 1
    z.register_hook(lambda g: torch.stack([w[i] / w[i].sum() for i in range(len(w))]))
    z.sum().backward()
    return y.grad
""",
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_loop_inside_one_operation_is_a_loop(name):
    names = {"torch": torch}
    exec(compile(INSIDE[name], "<your answer>", "exec"), names)
    counts, _ = counted(names["answer"], _rows())
    assert counts["ops"] >= 50


def test_a_gradient_that_torch_makes_counts_once():
    source = "answer = lambda w: torch.autograd.grad((w.requires_grad_() @ w).exp().sum(), w)"
    names = {"torch": torch}
    exec(compile(source, "<your answer>", "exec"), names)
    assert counted(names["answer"], _rows())[0]["ops"] <= 4


HELD = {
    "a list of tensors": lambda w: [torch.exp(w - w[i]) for i in range(50)],
    "numpy arrays": lambda w: [w.numpy() - i for i in range(50)],
    "Python lists": lambda w: [w.tolist() for _ in range(20)],
    "one large array": lambda w: w.numpy()[:, :, None] + w.numpy()[:, None],
}


@pytest.mark.parametrize("name", HELD)
def test_memory_is_what_is_alive_together(name):
    counts, _ = counted(HELD[name], _rows(), python=True)
    assert counts["live_numel"] >= 0.8 * 50 * 2500


def test_what_is_gone_does_not_count():
    def one_after_the_other(w):
        for i in range(50):
            total = torch.exp(w - i) * 2
        return total

    counts, _ = counted(one_after_the_other, _rows(), python=True)
    assert counts["peak_numel"] == 2500 and counts["live_numel"] <= 5 * 2500


FEW_OF_NUMPY = {
    "a flat assignment": (lambda w: operator.setitem(w.numpy().copy().flat, slice(None, None, 51), 0), 3),
    "integers": (lambda w: (np.arange(50).tolist(), bytes(np.arange(50))), 1),
    "text and other memory": (lambda w: (bytes("ab", "ascii"), bytearray(3), memoryview(b"abc"), bytes([1, 2])), 0),
    "kinds": (lambda w: (isinstance(b"a", bytes), issubclass(bytearray, bytearray), bytes.fromhex("00")), 0),
    "a view of another shape": (lambda w: w.numpy().reshape(-1).view(), 2),
}


@pytest.mark.parametrize("name", FEW_OF_NUMPY)
def test_what_reads_no_floats_counts_as_what_it_is(name):
    function, most = FEW_OF_NUMPY[name]
    counts, _ = counted(function, _rows())
    assert counts["ops"] <= most and counts["python_floats"] == 0


def test_builtins_are_as_they_were_when_counting_ends():
    before = bytes, memoryview, bytearray, np.nditer, np.array
    seen = []
    counted(lambda w: seen.append((bytes, builtins.bytes)), _rows())
    assert seen[0][0] is not seen[0][1] is bytes  # of this file alone
    assert (bytes, memoryview, bytearray, np.nditer, np.array) == before and "bytes" not in globals()


LEAVING = {
    "a list": lambda w: w.numpy()[0].tolist(),
    "an index": lambda w: [w.numpy()[0, i] for i in range(50)],
    "Python's own exp": lambda w: np.frompyfunc(math.exp, 1, 1)(w.numpy()[0]),
    "apply_": lambda w: w[0].clone().apply_(math.exp),
    "memory": lambda w: memoryview(w.numpy()[0]),
}


@pytest.mark.parametrize("name", LEAVING)
def test_floats_that_leave_numpy_count_as_those_that_leave_torch(name):
    assert counted(LEAVING[name], _rows())[0]["python_floats"] == 50


EXPONENTIALS = {
    "exp and exp2": lambda w: (torch.exp(w), torch.exp2(w)),
    "powers of e": lambda w: (2.718**w, torch.pow(torch.tensor(2.718), w)),
    "in place": lambda w: (w.clone().exp_(), w.clone().exp2_()),
    "numpy": lambda w: (np.exp(w.numpy()), np.exp2(np.asarray(w))),
    "other names": lambda w: (w.sigmoid(), torch.special.expm1(w)),
    "several at once": lambda w: torch._foreach_exp([w, w + 1]),
    "several in place": lambda w: torch._foreach_exp_([w.clone(), w.clone()]),
    "of matrices": lambda w: (torch.linalg.matrix_exp(w), torch.matrix_exp(w)),
    "of a plain view": lambda w: [np.exp(w.numpy().view(np.ndarray)) for _ in range(2)],
}


@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials_count_under_any_name(name):
    counts, _ = counted(EXPONENTIALS[name], _rows())
    assert counts["exponentials"] == 2 and counts["exp_axis:50"] == 2
    assert counted(lambda w: w**2 + w.pow(3.0), _rows())[0]["exponentials"] == 0


def test_exponentials_above_one_and_floats_that_leave_torch_are_counted():
    x = torch.tensor([-1.0, 0.0, 2.0, 3.0])
    assert counted(torch.exp, x)[0]["exp_above_one"] == 2
    assert counted(lambda x: (x.tolist(), x[0].item(), float(x[1])), x)[0]["python_floats"] == 6
    assert counted(lambda x: x.long().tolist(), x)[0]["python_floats"] == 0


SOFTMAXES = {
    "softmax": lambda w: torch.softmax(w, 1),
    "a method": lambda w: w.softmax(1),
    "nn.functional": lambda w: torch.nn.functional.softmax(w, 1),
    "a module": lambda w: torch.nn.Softmax(1)(w),
    "special": lambda w: torch.special.softmax(w, 1),
    "log_softmax": lambda w: torch.log_softmax(w, 1).exp(),
    "softmin": lambda w: torch.nn.functional.softmin(-w, 1),
    "aten": lambda w: torch.ops.aten._softmax(w, 1, False),
    "sparse": lambda w: torch.sparse.softmax(w.to_sparse(), 1),
    "masked": lambda w: torch.masked.softmax(w, 1),
    "logsumexp": lambda w: torch.exp(w - torch.logsumexp(w, 1, keepdim=True)),
    "special logsumexp": lambda w: torch.special.logsumexp(w, 1),
    "cross entropy": lambda w: torch.nn.functional.cross_entropy(w, torch.zeros(50, dtype=torch.long)),
    "a distribution": lambda w: torch.distributions.Categorical(logits=w).probs,
    "numpy's logaddexp": lambda w: np.logaddexp.reduce(w.numpy(), axis=1),
    "gumbel": lambda w: torch.nn.functional.gumbel_softmax(w, 1),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_every_way_to_a_softmax_is_noticed(name):
    assert counted(SOFTMAXES[name], _rows(), forbidden=["softmax"])[1] == ["softmax"]


def test_the_parts_of_a_softmax_are_allowed():
    def by_hand(w):
        e = torch.exp(w - w.amax(1, keepdim=True))
        return e / e.sum(1, keepdim=True), torch.logcumsumexp(w, 1), np.exp(w.numpy())

    assert counted(by_hand, _rows(), forbidden=["softmax"])[1] == []
