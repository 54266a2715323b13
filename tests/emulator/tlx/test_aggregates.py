"""Triton aggregates (small classes of values) with fields of TLX's types: as the compiler takes and refuses them."""

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

import jfa.emulator as emulator
from jfa.emulator import errors

tlx = pytest.importorskip("triton.language.extra.tlx")
if not hasattr(tl.core, "_aggregate"):
    pytest.skip("this Triton has no aggregates", allow_module_level=True)
aggregate = tl.core._aggregate
emulator.install()


@aggregate
class Ring:
    tiles: tlx.buffered_tensor
    fulls: tlx.mbarrier
    depth: tl.constexpr

    @triton.constexpr_function
    def __init__(self, tiles, fulls, depth):
        self.tiles = tiles
        self.fulls = fulls
        self.depth = tl.constexpr(depth)

    @triton.constexpr_function
    def last(self):
        return self.depth - 1

    @triton.jit
    def put(self, k, block):
        slot = k % self.depth
        tlx.local_store(self.tiles[slot], block)
        tlx.barrier_arrive(self.fulls[slot], 1)

    @triton.jit
    def get(self, k):
        slot = k % self.depth
        tlx.barrier_wait(self.fulls[slot], (k // self.depth) & 1)
        return tlx.local_load(self.tiles[slot])


@aggregate
class State:
    ring: Ring
    parts: tl.tuple
    total: tl.tensor


@triton.jit
def _ring(N: tl.constexpr, DEPTH: tl.constexpr):
    return Ring(tlx.local_alloc((N,), tl.float32, DEPTH), tlx.alloc_barriers(DEPTH, arrive_count=1), DEPTH)


@triton.jit
def _through_tasks(x, o, N: tl.constexpr, DEPTH: tl.constexpr):
    ring = _ring(N, DEPTH)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for k in tl.static_range(DEPTH):
                ring.put(k, tl.load(x + k * N + tl.arange(0, N)))
        with tlx.async_task(num_warps=4):
            i = tl.arange(0, N)
            total = tl.zeros((N,), tl.float32)
            for k in range(ring.last() + 1):
                total += (k + 1) * ring.get(k)
            tl.store(o + i, total)


@pytest.mark.parametrize("policy", ["eager", "lazy", "random", "timed"])
def test_buffers_and_barriers_travel_in_an_aggregate(policy):
    x, out = torch.randn(3, 32), torch.zeros(32)
    with emulator.options(policy=policy, seed=2):
        _through_tasks[(1,)](x, out, 32, 3)
    assert torch.allclose(out, (x * torch.tensor([1.0, 2, 3])[:, None]).sum(0))


@triton.jit
def _nested(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    ring = _ring(N, 2)
    state = State(ring, (n, 7, ring.fulls), 0.0 + n)
    for k in range(2):
        state.ring.put(k, tl.load(x + i) + k)
        state = State(state.ring, state.parts, state.total + tl.sum(state.ring.get(k), 0))
    tl.store(o, state.total)
    tl.store(o + 1, state.parts[0] + state.parts[1])


def test_aggregates_nest_and_are_carried_by_loops():
    x, out = torch.randn(32), torch.zeros(2)
    _nested[(1,)](x, out, 5, 32)
    assert torch.allclose(out, torch.stack([5 + 2 * x.sum() + 32, torch.tensor(12.0)]), atol=1e-4)


@triton.jit
def _refused(x, o, n, HOW: tl.constexpr):
    ring = _ring(32, 2)
    if HOW == "a barrier for a buffer":
        Ring(ring.fulls, ring.fulls, 2)
    if HOW == "a number for a tensor":
        State(ring, (n,), 1.0)
    if HOW == "a scalar for a tuple":
        State(ring, n, n)
    if HOW == "another depth in a loop":
        for _ in range(n):
            ring = Ring(ring.tiles, ring.fulls, 3)
    if HOW == "another type in a loop":
        state = State(ring, (n,), n)
        for _ in range(n):
            state = State(ring, (n,), state.total + 0.5)
    if HOW == "assignment to a field":
        ring.depth = 3
    if HOW == "right":
        ring.put(0, tl.zeros((32,), tl.float32))


@pytest.mark.parametrize(
    "how, message",
    [
        ("a barrier for a buffer", "for attribute 'tiles', got"),
        ("a number for a tensor", "for attribute 'total', got"),
        ("a scalar for a tuple", "for attribute 'parts', got"),
        ("another depth in a loop", "Ring<.*depth=2> but is re-assigned to Ring<.*depth=3> in loop"),
        ("another type in a loop", "total: int32> but is re-assigned to .*total: fp32>"),
        ("assignment to a field", "Attribute assignment is not supported"),
    ],
)
def test_what_the_compiler_refuses_of_aggregates(how, message):
    with pytest.raises(CompilationError, match=message):
        _refused[(1,)](torch.zeros(32), torch.zeros(32), 2, how)
    _refused[(1,)](torch.zeros(32), torch.zeros(32), 2, "right")


@aggregate
class Pair:
    near: Ring
    far: Ring
    done: tlx.mbarrier
    count: tl.tensor


@triton.jit
def _pair(n, N: tl.constexpr):
    first = _ring(N, 2)
    done = tlx.alloc_barriers(1)
    return Pair(first, Ring(tlx.local_alloc((N,), tl.float32, 3), tlx.alloc_barriers(3), 3), done, n)


@triton.jit
def _waits(x, n, WHERE: tl.constexpr):
    mine = _ring(32, 2)
    pair = _pair(n, 32)
    for k in range(2):
        pair = Pair(pair.near, Ring(pair.far.tiles, pair.far.fulls, 3), pair.done, pair.count + k)
    if WHERE == "mine":
        tlx.barrier_wait(mine.fulls[0], 0)
    if WHERE == "near":
        tlx.barrier_wait(pair.near.fulls[1], 0)
    if WHERE == "far":
        tlx.barrier_wait(pair.far.fulls[2], 0)
    if WHERE == "done":
        tlx.barrier_wait(pair.done[0], 0)
    if WHERE == "tile":
        tlx.barrier_arrive(pair.far.fulls[0], 1)
        tl.store(x + tl.arange(0, 32), tlx.local_load(pair.far.tiles[1]))


@pytest.mark.parametrize(
    "where, name",
    [
        ("mine", "mine.fulls[0]"),
        ("near", "near.fulls[1]"),
        ("far", "far.fulls[2]"),
        ("done", "pair.done[0]"),
        ("tile", "far.tiles[1]"),
    ],
)
def test_reports_call_what_an_aggregate_holds_by_its_fields(where, name):
    """An aggregate's variable comes first where one field leads to the array; building it anew changes no name."""
    with pytest.raises((errors.DeadlockError, errors.PoisonError)) as caught:
        _waits[(1,)](torch.zeros(32), 2, where)
    assert f" {name}" in str(caught.value)


@aggregate
class Scaled:
    value: tl.tensor
    factor: tl.constexpr

    @triton.constexpr_function
    def __init__(self, value, factor):
        self.value = value
        self.factor = tl.constexpr(factor)

    @triton.jit
    def product(self):
        return self.value * self.factor


@triton.jit
def _not_taken(o, n, HOW: tl.constexpr):
    scaled = Scaled(n, 2)
    if n > 90:
        if HOW == "another factor":
            scaled = Scaled(n + 1, 3)
        if HOW == "another type":
            scaled = Scaled(n * 1.5, 2)
        if HOW == "right":
            scaled = Scaled(scaled.product(), 2)
    if HOW == "a method under a name":
        product = scaled.product
        scaled = Scaled(product(), 2)
    tl.store(o, scaled.product())


@pytest.mark.parametrize(
    "how, message",
    [
        (
            "another factor",
            "initial value for `scaled` is of type Scaled<.*factor=2>, but the then block redefines it as .*factor=3>",
        ),
        ("another type", "but the then block redefines it as Scaled<value: fp32"),
        ("a method under a name", "cannot convert <method product>"),
    ],
)
def test_a_branch_that_is_not_taken_keeps_an_aggregates_type(how, message):
    with pytest.raises(CompilationError, match=message):
        _not_taken[(1,)](torch.zeros(1), 5, how)
    out = torch.zeros(1)
    _not_taken[(1,)](out, 5, "right")
    assert out.item() == 10
