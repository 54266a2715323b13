"""The Blackwell host side: what it does between a call and its launches, and what it never does."""

import dataclasses
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa  # noqa: E402
from jfa.block_sparse import lists_from_mask  # noqa: E402
from jfa.kernels.blackwell import launch, mxfp8_launch  # noqa: E402
from jfa.kernels.blackwell.config import backward_config  # noqa: E402
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


@pytest.mark.parametrize("form", ["single", "pair", "resident"])
def test_rows_in_two_boxes_have_one_form_of_backward(form):
    problem, *_ = make([140], [150], head_dim=192, head_dim_v=128)
    assert backward_config(problem).form == "wide"
    with pytest.raises(ValueError, match="'wide' is for head dims beyond 128, and only it"):
        backward_config(problem, form=form)
    with pytest.raises(ValueError, match="'wide' is for head dims beyond 128, and only it"):
        backward_config(dataclasses.replace(problem, head_dim=128), form="wide")


@pytest.mark.parametrize("head_dim, head_dim_v", [(193, 128), (128, 129), (256, 256), (64, 192)])
def test_head_dims_beyond_tensor_memory_are_refused(head_dim, head_dim_v):
    problem, *_ = make([5], [9], head_dim=head_dim, head_dim_v=head_dim_v)
    assert f"got {head_dim} and {head_dim_v}" in launch.supports(problem)


def test_mxfp8_rows_lie_in_one_box():
    problem, *_ = make([5], [9], head_dim=192, head_dim_v=128)
    assert launch.supports(problem) is None and "head dims up to 128" in mxfp8_launch.supports(problem)


def test_block_lists_walk_rows_in_two_boxes():
    problem, q, k, v, _ = make([300, 40], [500, 140], head_dim=192, head_dim_v=128)
    masks = [torch.tensor([[[1, 0, 0, 1], [0, 0, 1, 0], [1, 1, 1, 0]]]).bool(), torch.ones(1, 1, 2).bool()]
    lists = lists_from_mask(masks, problem.query_offset, problem.key_offset, total_q=len(q), total_kv=len(k))
    listed = dataclasses.replace(problem, block_lists=lists)
    out, _ = launch.forward(listed, q, k, v)
    for b, (mask, (q0, k0)) in enumerate(zip(masks, ((0, 0), (300, 500)))):
        rows, keys = [300, 40][b], [500, 140][b]
        pairs = mask[0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :keys]
        scores = (q[q0 : q0 + rows, 0].double() @ k[k0 : k0 + keys, 0].double().T) * problem.sm_scale
        weights = scores.masked_fill(~pairs, -torch.inf).softmax(1)
        assert_close("out", out[q0 : q0 + rows, 0], weights @ v[k0 : k0 + keys, 0].double(), problem.dtype)
