"""The Blackwell host side: what it does between a call and its launches, and what it never does."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa  # noqa: E402
from jfa.kernels.blackwell import launch  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.kernels.blackwell.cases import assert_close, make, reference  # noqa: E402

WAITS_FOR_THE_DEVICE = {"_local_scalar_dense", "nonzero", "unique2", "masked_select", "equal", "is_nonzero"}
SHAPES = {
    "jagged": dict(len_q=[150, 0, 20], len_kv=[140, 30, 0], band=Band.make(causal=True), heads=2, kv_heads=1),
    "deterministic": dict(len_q=[40, 20], len_kv=[30, 60], deterministic=True),
    "shared": dict(len_q=20, len_kv=[150, 0, 30], heads=2),
    "shared, deterministic": dict(len_q=20, len_kv=[150, 30], heads=2, kv_heads=1, deterministic=True),
}


class Operations(TorchDispatchMode):
    """Notes the name of every torch operation."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_step_waits_for_the_device(shape):
    problem, q, k, v, dout = make(**SHAPES[shape])
    with Operations() as operations:
        out, lse = launch.forward(problem, q, k, v)
        launch.backward(problem, dout, None, q, k, v, out, lse)
    assert not WAITS_FOR_THE_DEVICE & set(operations.names)


def test_a_list_is_one_launch():
    problem, *_ = make(**SHAPES["jagged"])
    with Operations() as operations:
        launch.key_list(problem)
    assert set(operations.names) <= {
        "empty",
        "detach",
    }  # the kernel's outputs; what the emulator does with its arguments


@pytest.mark.parametrize("shape", SHAPES)
def test_offsets_changed_in_place_are_seen(shape):
    """Nothing is remembered about a tensor of offsets: a captured step is replayed with new lengths."""
    case = SHAPES[shape]
    problem, q, k, v, dout = make(**case)
    out, lse = launch.forward(problem, q, k, v)
    launch.backward(problem, dout, None, q, k, v, out, lse)
    problem.key_offset.copy_(torch.tensor([0, 10, *problem.key_offset.tolist()[2:]], dtype=torch.int32))
    want_out, want_lse, *want = reference(problem, q, k, v, dout)
    out, lse = launch.forward(problem, q, k, v)
    assert_close("out", out, want_out, problem.dtype)
    for name, g, w in zip(("dq", "dk", "dv"), launch.backward(problem, dout, None, q, k, v, out, lse), want):
        assert_close(name, g, w, problem.dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_serves_several_calls(shape):
    problem, q, k, v, dout = make(**SHAPES[shape])
    plan = launch.plan(problem)
    for _ in range(2):
        want_out, want_lse, *want = reference(problem, q, k, v, dout)
        out, lse = launch.forward(problem, q, k, v, plan)
        assert_close("out", out, want_out, problem.dtype)
        for name, g, w in zip(("dq", "dk", "dv"), launch.backward(problem, dout, None, q, k, v, out, lse, plan), want):
            assert_close(name, g, w, problem.dtype)


def test_a_batch_of_nothing():
    problem, q, k, v, dout = make([4], [5])
    offsets = torch.zeros(1, dtype=torch.int32)
    out = jfa.jagged_flash_attention(q, k, v, offsets, offsets, 0, 0, backend="blackwell")
    assert not out.any()


def test_the_backward_runs_in_a_thread_of_its_own():
    """Autograd's threads know no allocator that was set in the caller's: these kernels need none (test_compile sees to that)."""
    problem, q, k, v, dout = make([20, 10], [30, 15], dtype=torch.float16)
    rows_q, rows_kv = int(problem.query_offset[-1]), int(problem.key_offset[-1])
    inputs = [x[:n].clone().requires_grad_() for x, n in ((q, rows_q), (k, rows_kv), (v, rows_kv))]
    out = jfa.jagged_flash_attention(*inputs, problem.query_offset, problem.key_offset, 20, 30, backend="blackwell")
    failures = []

    def work():
        try:
            out.backward(torch.ones_like(out))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to name it
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures and all(x.grad is not None for x in inputs)
