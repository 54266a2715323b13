"""Calls of one shape between which something changes that shapes do not tell: none gets the launches of another.

Whatever the situation, numbers are compared with fp64, and what a call owes to its situation is asserted: types, gradients, an op
that is seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import jfa  # noqa: E402
from jfa import reference  # noqa: E402
from jfa.attention import op, prepared  # noqa: E402
from jfa.bench.stub import StubDriver, stubbed  # noqa: E402
from jfa.block_sparse import lists_from_mask  # noqa: E402
from jfa.kernels.common import launcher  # noqa: E402
from jfa.layout import offsets_from_lengths  # noqa: E402
from tests.kernels.emulated_driver import emulated  # noqa: E402

ROWS, HEADS, DIM = 24, 2, 32
LENGTHS = [[10, 0, 14], [1, 20, 3], [8, 8, 8], [24, 0, 0], [5, 7, 2]]  # the last leaves rows of no sequence


class Batch:
    """Inputs of one call, new in each: memory that was freed may come again under another's address."""

    def __init__(self, rng: random.Random):
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.inputs = [torch.randn(ROWS, HEADS, DIM, generator=generator).bfloat16() for _ in range(3)]
        self.offsets = offsets_from_lengths(rng.choice(LENGTHS))
        self.dout = torch.randn(ROWS, HEADS, DIM, generator=generator).bfloat16()

    def leaves(self, dtype=torch.bfloat16, grads=(True, True, True)) -> list[torch.Tensor]:
        return [x.to(dtype, copy=True).requires_grad_(g) for x, g in zip(self.inputs, grads)]

    def truth(self, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
        """Return out, dq, dk, dv of the inputs in fp64, rounded to ``dtype`` before."""
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [x.to(dtype).double().requires_grad_() for x in self.inputs]
            own = self.offsets.long()
            out = reference.attention(*leaves, own, own, dtype=torch.float64, block_lists=self.lists())
            return out, *torch.autograd.grad(out, leaves, self.dout.double())

    def lists(self):
        """Return the call's block lists, if it has some."""
        return None

    def attend(self, inputs, offsets=None, **options):
        offsets = self.offsets if offsets is None else offsets
        options = dict(block_lists=self.lists()) | options
        return jfa.jagged_flash_attention(*inputs, offsets, offsets, backend="portable", **options)

    def assert_right(self, out, inputs, which=(0, 1, 2)) -> None:
        """Compare an output and its gradients with fp64's."""
        expected = self.truth()
        near(out, expected[0])
        grads = torch.autograd.grad(out, [inputs[i] for i in which], self.dout.to(out.dtype))
        for i, grad in zip(which, grads):
            assert grad.dtype is inputs[i].dtype
            near(grad, expected[1 + i])


class ListBatch(Batch):
    """The same with block lists of its own, by blocks of 16: what each head's queries attend to changes from call to call."""

    BLOCK = 16

    def __init__(self, rng: random.Random):
        super().__init__(rng)
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.choose(rng.choice([0.3, 0.7, 1.0]))

    def choose(self, share: float, heads: int = HEADS) -> None:
        """Make other lists."""
        blocks = [-(-n // self.BLOCK) for n in self.offsets.diff().tolist()]
        masks = [torch.rand(heads, n, n, generator=self.generator) < share for n in blocks]
        sizes = dict(total_q=ROWS, total_kv=ROWS, block_q=self.BLOCK, block_kv=self.BLOCK)
        self._lists = lists_from_mask(masks, self.offsets, self.offsets, **sizes)

    def lists(self):
        """Return the lists; for offsets that changed in place since they are made anew, as a caller has to."""
        return self._lists


def near(found, expected) -> None:
    """Compare with fp64's numbers.

    A result is rounded once, and so is each factor of the products that it is the sum of (P or dS, and out in delta): three
    roundings of half a last place each, of numbers about as large as the largest result. Twice that is allowed.
    """
    last_place = (
        2.0**-10 if found.dtype is torch.float16 else 2.0**-8
    )  # under autocast fp32 gradients are bf16 products
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    allowed = dict(atol=3 * last_place * largest, rtol=0)
    torch.testing.assert_close(found.detach().double(), expected.detach().double(), **allowed)


def plain(b: Batch) -> None:
    q = b.leaves()
    b.assert_right(b.attend(q), q)


def with_lse(b: Batch) -> None:
    q = b.leaves()
    out, lse = b.attend(q, return_lse=True)
    assert lse.dtype is torch.float32 and lse.requires_grad
    b.assert_right(out, q)


def some_gradients(b: Batch) -> None:
    for grads in ((False, False, True), (True, False, False)):
        q = b.leaves(grads=grads)
        b.assert_right(b.attend(q), q, [grads.index(True)])


def without_gradients(b: Batch) -> None:
    out = b.attend(b.leaves(grads=(False,) * 3))
    assert not out.requires_grad
    near(out, b.truth()[0])


def grad_mode_off(b: Batch) -> None:
    with torch.no_grad():
        out = b.attend(b.leaves())
    assert not out.requires_grad and out.grad_fn is None
    near(out, b.truth()[0])


def inference_mode(b: Batch) -> None:
    with torch.inference_mode():
        inside = b.leaves(grads=(False,) * 3)
        for inputs in (inside, b.inputs):
            out = b.attend(inputs, b.offsets.clone())
            assert out.is_inference()
            near(out, b.truth()[0])
    offsets = inside[0].new_tensor(b.offsets.tolist(), dtype=torch.int32)
    q = b.leaves()
    b.assert_right(b.attend(q, offsets), q)


def autocast(b: Batch) -> None:
    q = b.leaves(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = b.attend(q)
    assert out.dtype is torch.bfloat16
    b.assert_right(out, q)
    q = b.leaves()
    with torch.autocast("cpu", dtype=torch.float16):
        out = b.attend(q)
    assert out.dtype is torch.float16
    b.assert_right(out, q)


def half(b: Batch) -> None:
    q = b.leaves(torch.float16)
    out = b.attend(q)
    assert out.dtype is torch.float16
    b.assert_right(out, q)


def wide_offsets(b: Batch) -> None:
    q = b.leaves()
    b.assert_right(b.attend(q, b.offsets.long()), q)


def offsets_in_steps(b: Batch) -> None:
    q = b.leaves()
    b.assert_right(b.attend(q, b.offsets.repeat_interleave(2)[::2]), q)


def offsets_changed_in_place(b: Batch) -> None:
    q, wanted = b.leaves(), b.offsets
    b.offsets = torch.tensor([0, 24, 24, 24], dtype=torch.int32)
    if isinstance(b, ListBatch):
        b.choose(0.6)
    b.assert_right(b.attend(q), q)
    b.offsets.copy_(wanted)
    if isinstance(b, ListBatch):
        b.choose(0.6)
    b.assert_right(b.attend(q), q)


def a_parameter(b: Batch) -> None:
    q = [torch.nn.Parameter(x) for x in b.inputs]
    b.assert_right(b.attend(q), q)


class Marked(torch.Tensor):
    """A subclass that notes the functions of torch it meets."""

    seen: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def a_subclass(b: Batch) -> None:
    Marked.seen.clear()
    q = [x.detach().as_subclass(Marked).requires_grad_() for x in b.inputs]
    out = b.attend(q)
    assert type(out) is Marked and any("jfa" in name for name in Marked.seen)
    near(out.as_subclass(torch.Tensor), b.truth()[0])


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def a_dispatch_mode(b: Batch) -> None:
    q = b.leaves()
    with Seen() as seen:
        out = b.attend(q)
        b.assert_right(out, q)
    assert "jfa.attention.default" in seen.names and "jfa.attention_backward.default" in seen.names


def a_profiler(b: Batch) -> None:
    q = b.leaves()
    with torch.autograd.profiler.profile() as seen:
        out = b.attend(q)
    assert any("jfa::attention" in event.name for event in seen.function_events)
    b.assert_right(out, q)


def func_grad(b: Batch) -> None:
    loss = lambda v: (b.attend((*b.inputs[:2], v)).float() * b.dout.float()).sum()
    near(torch.func.grad(loss)(b.inputs[2]), b.truth()[3])


def func_vmap(b: Batch) -> None:
    twice = [torch.stack([x, x]) for x in b.inputs]
    out = torch.func.vmap(lambda *inputs: b.attend(inputs))(*twice)
    near(out[1], b.truth()[0])


def fake(b: Batch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) for x in b.inputs]
        lists = b.lists()
        if lists is not None:
            lists = lists.__class__(*map(mode.from_tensor, lists.tensors), lists.heads, lists.rows, b.BLOCK, b.BLOCK)
        out = b.attend(inputs, mode.from_tensor(b.offsets), block_lists=lists)
    assert type(out).__name__ == "FakeTensor" and out.shape == b.inputs[0].shape


def compiled(b: Batch) -> None:
    step = torch.compile(lambda *inputs: b.attend(inputs) * 1, fullgraph=True, backend="aot_eager")
    q = b.leaves()
    b.assert_right(step(*q), q)


def by_the_op(b: Batch) -> None:
    q = b.leaves()
    problem = jfa.attention.make_problem(
        *q, b.offsets, b.offsets, None, DIM**-0.5, jfa.masks.Band.make(), False, False, 0, 0, b.lists()
    )
    out, _ = op.attend_by_op(*q, op.Call(problem, "portable", None, False, b.offsets))
    b.assert_right(out, q)


def contents_checked(b: Batch) -> None:
    q = b.leaves()
    b.assert_right(b.attend(q, check_offsets=True), q)


def hooks_on_launches(b: Batch) -> None:
    q, usual = b.leaves(), launcher.hooks
    launcher.hooks = lambda: True
    try:
        b.assert_right(b.attend(q), q)
    finally:
        launcher.hooks = usual


def deterministic_mode(b: Batch) -> None:
    q = b.leaves()
    torch.use_deterministic_algorithms(True)
    try:
        b.assert_right(b.attend(q), q)
    finally:
        torch.use_deterministic_algorithms(False)


def another_default_type(b: Batch) -> None:
    q = b.leaves()
    torch.set_default_dtype(torch.float64)
    try:
        out, lse = b.attend(q, return_lse=True)
        assert lse.dtype is torch.float32
        b.assert_right(out, q)
    finally:
        torch.set_default_dtype(torch.float32)


def another_default_device(b: Batch) -> None:
    q = b.leaves()
    with torch.device("meta"):
        out = b.attend(q)
    assert out.device.type == "cpu"
    b.assert_right(out, q)


def saved_elsewhere(b: Batch) -> None:
    q, saved = b.leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(1) or x.clone(), lambda x: x):
        out = b.attend(q)
    assert saved
    b.assert_right(out, q)


def a_repetition(b: Batch) -> None:
    from torch.utils.checkpoint import checkpoint

    q = b.leaves()
    b.assert_right(checkpoint(lambda *inputs: b.attend(inputs), *q, use_reentrant=False), q)


SITUATIONS = [
    *(plain, with_lse, some_gradients, without_gradients, grad_mode_off, inference_mode, autocast, half, wide_offsets),
    *(
        offsets_in_steps,
        offsets_changed_in_place,
        a_parameter,
        a_subclass,
        a_dispatch_mode,
        a_profiler,
        func_grad,
        func_vmap,
    ),
    *(fake, compiled, by_the_op, contents_checked, hooks_on_launches, deterministic_mode, another_default_type),
    *(another_default_device, saved_elsewhere, a_repetition),
]


# ------------------------------------------------------------------------------------------- situations of block lists
def lists_changed_in_place(b: ListBatch) -> None:
    q, share = b.leaves(), b.lists()
    b.assert_right(b.attend(q), q)
    starts = share.starts.clone()
    share.starts.zero_()  # nothing is listed
    out = b.attend(q)
    assert not out.any()
    b.assert_right(out, q)
    share.starts.copy_(starts)
    b.assert_right(b.attend(q), q)


def lists_changed_before_the_backward(b: ListBatch) -> None:
    for x in b.lists().tensors:
        q = b.leaves()
        out = b.attend(q)
        x.add_(0)
        with pytest.raises(RuntimeError, match="lists"):
            torch.autograd.grad(out, q, b.dout)


def lists_for_all_heads(b: ListBatch) -> None:
    for heads in (1, HEADS):
        b.choose(0.5, heads)
        q = b.leaves()
        b.assert_right(b.attend(q), q)


def lists_of_other_blocks(b: ListBatch) -> None:
    q = b.leaves()
    for block in (32, 16):
        b.BLOCK = block
        b.choose(0.6)
        b.assert_right(b.attend(q), q)


def lists_with_room(b: ListBatch) -> None:
    """Entries past the last start mean nothing."""
    q, lists = b.leaves(), b.lists()
    for more in (1, 7, 100):
        columns = torch.cat([lists.columns, torch.full((more,), 10**6, dtype=torch.int32)])
        b._lists = replace(lists, columns=columns, kinds=torch.cat([lists.kinds, torch.zeros(more, dtype=torch.int8)]))
        b.assert_right(b.attend(q), q)


def lists_not_at_whole_16_bytes(b: ListBatch) -> None:
    q, lists = b.leaves(), b.lists()
    moved = (torch.cat([x.new_zeros(1), x])[1:] for x in lists.tensors)
    b._lists = lists.__class__(*moved, lists.heads, lists.rows, lists.block, lists.other_block)
    b.assert_right(b.attend(q), q)


def lists_in_steps(b: ListBatch) -> None:
    lists = b.lists()
    for name in ("starts", "columns", "kinds"):
        x = getattr(lists, name)
        steps = x.repeat_interleave(2)[::2]
        if x.numel() < 2:
            continue
        with pytest.raises(ValueError, match=f"block_lists.{name} must be contiguous"):
            b.attend(b.leaves(), block_lists=replace(lists, **{name: steps}))


def lists_in_a_plan(b: ListBatch) -> None:
    facts = dict(rows_q=ROWS, rows_kv=ROWS, num_heads=HEADS, head_dim=DIM, backend="portable", block_lists=b.lists())
    made = jfa.plan(b.offsets, b.offsets, **facts)
    for given in ({"block_lists": None}, {}, {}):
        q = b.leaves()
        b.assert_right(b.attend(q, plan=made, **given), q)
    other = ListBatch(random.Random(1))
    with pytest.raises(ValueError, match="plan was built for other block_lists"):
        b.attend(b.leaves(), plan=made, block_lists=other.lists())


def none_after_lists(b: ListBatch) -> None:
    for batch in (b, Batch(random.Random(5)), b):
        plain(batch)


def shared_queries(b: ListBatch) -> None:
    """One query of all sequences; its gradient is a sum over them."""
    q, count = b.leaves(), len(b.offsets) - 1
    blocks = [-(-n // b.BLOCK) for n in b.offsets.diff().tolist()]
    masks = [torch.rand(HEADS, -(-ROWS // b.BLOCK), n, generator=b.generator) < 0.6 for n in blocks]
    sides = dict(total_q=ROWS, total_kv=ROWS, broadcast_q=True, block_q=b.BLOCK, block_kv=b.BLOCK)
    options = dict(block_lists=lists_from_mask(masks, None, b.offsets, **sides), broadcast_q=True)
    out = jfa.jagged_flash_attention(*q, None, b.offsets, backend="portable", **options)
    exact = [x.detach().double().requires_grad_() for x in q]
    expected = reference.attention(*exact, None, b.offsets.long(), dtype=torch.float64, **options)
    near(out, expected)
    dout = b.dout.repeat(count, 1, 1)
    grads = torch.autograd.grad(out, q, dout), torch.autograd.grad(expected, exact, dout.double())
    for found, wanted in zip(*grads):
        near(found, wanted)


LIST_SITUATIONS = [
    *(lists_changed_in_place, lists_changed_before_the_backward, lists_for_all_heads, lists_of_other_blocks),
    *(lists_with_room, lists_not_at_whole_16_bytes, lists_in_steps, lists_in_a_plan, none_after_lists, shared_queries),
]
ALL = [(Batch, f) for f in SITUATIONS] + [(ListBatch, f) for f in SITUATIONS + LIST_SITUATIONS]


@pytest.mark.parametrize("kind, situation", ALL, ids=lambda x: x.__name__)
def test_a_situation_among_plain_calls(kind, situation):
    """First of all calls, then among calls that are played, then twice in a row, and plain calls are right after it."""
    rng = random.Random(situation.__name__)
    with emulated():
        situation(kind(rng))
        for _ in range(3):
            plain(kind(rng))
        for _ in range(2):
            situation(kind(rng))
        plain(kind(rng))
        assert any(x.tape for kept in prepared._KNOWN.values() for x in kept.forward[True].forms)
        reasons = {x.why_not for kept in prepared._KNOWN.values() for x in kept.forward[True].forms if not x.tape}
        assert reasons <= {"offsets that have to be copied"}


@pytest.mark.parametrize("seed", range(3))
def test_situations_in_any_order(seed):
    rng = random.Random(seed)
    with emulated():
        for kind, situation in rng.choices([x for x in ALL if x[1] not in (compiled, func_vmap)], k=40):
            situation(kind(rng))


# ------------------------------------------------------------------------------------------------------ what launches get
@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_every_launch_goes_to_the_stream_that_is_current(backend, monkeypatch):
    current, streams = [0], []

    def launch(config, function, table, extra):
        streams.append(config._obj.stream or 0)
        return 0

    def fill(address, word, words, stream):
        streams.append(stream)
        return 0

    with stubbed(StubDriver(launch, fill)):
        monkeypatch.setattr(launcher, "stream_getter", lambda: lambda index: current[0])
        offsets = offsets_from_lengths([10, 0, 14])
        for step in range(12):
            q, k, v = (torch.ones(ROWS, HEADS, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            current[0] = stream = step % 3 * 1000
            streams.clear()
            out = jfa.jagged_flash_attention(q, k, v, offsets, offsets, backend=backend)
            current[0] = other = (step + 1) % 3 * 1000
            forward = len(streams)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            if step > 3:
                assert set(streams[:forward]) == {stream} and set(streams[forward:]) == {other}


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_launches_are_made_on_the_tensors_device(backend, monkeypatch):
    """Where another one is current, it is not while a call is played."""
    entered, current = [], [True]

    @contextlib.contextmanager
    def on_device(device):
        entered.append("in")
        yield
        entered.append("out")

    def launch(config, function, table, extra):
        entered.append("launch")
        return 0

    monkeypatch.setattr(op, "is_current", lambda device: current[0])
    monkeypatch.setattr(op, "on_device", on_device)
    with stubbed(StubDriver(launch, lambda *args: 0)):
        offsets = offsets_from_lengths([10, 0, 14])
        for step in range(8):
            current[0] = step % 2 == 0
            q, k, v = (torch.ones(ROWS, HEADS, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            entered.clear()
            out = jfa.jagged_flash_attention(q, k, v, offsets, offsets, backend=backend)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            if step > 3:
                inside = [x for x in entered if x != "launch"]
                assert inside == ([] if current[0] else ["in", "out"] * 2)
                assert current[0] or entered[0] == "in" and entered[-1] == "out"


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_addresses_are_those_of_the_call(backend, monkeypatch):
    """Tensors that are freed and made again, larger and smaller: every address that a launch gets lies in memory that lives."""
    rng = random.Random(backend)
    with emulated() as driver:
        find = driver.tensor_at

        def tensor_at(address, dtype):
            found = find(address, dtype)
            assert not address or found.numel() or address in ends(driver), "an address of no tensor of this call"
            return found

        monkeypatch.setattr(driver, "tensor_at", tensor_at)
        for _ in range(10):
            rows = rng.choice([24, 24, 30, 64])
            q, k, v = (torch.randn(rows, HEADS, DIM).bfloat16().requires_grad_() for _ in range(3))
            offsets = torch.tensor([0, rows // 3, rows // 2, rows], dtype=torch.int32)
            out = jfa.jagged_flash_attention(q, k, v, offsets, offsets, backend=backend)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert driver.launches > 10


def ends(driver) -> set[int]:
    """Addresses right behind memory that the driver knows: an empty tensor may begin there."""
    return {begin + storage.nbytes() for begin, storage in driver.memory.items()}


def test_parameters_are_read_when_a_launch_is_made():
    """A tape's memory is written again by the next call: what a launch was given is what the driver saw then."""
    seen = []

    def launch(config, function, table, extra):
        seen.append([ctypes.c_uint64.from_address(table[0]).value])
        return 0

    with stubbed(StubDriver(launch, lambda *args: 0)):
        offsets = offsets_from_lengths([10, 0, 14])
        kept = []
        for _ in range(6):
            q, k, v = (torch.ones(ROWS, HEADS, 128, dtype=torch.bfloat16) for _ in range(3))
            kept.append((q, k, v))
            seen.clear()
            jfa.jagged_flash_attention(q, k, v, offsets, offsets, backend="portable")
        assert [q.data_ptr()] in seen
