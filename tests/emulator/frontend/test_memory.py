"""Global memory: masks, bounds, poison, races between programs, atomics, descriptors."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.emulator.errors import GlobalRaceError, OutOfBoundsError, PoisonError

emulator.install()


@triton.jit
def copy(x, o, n, MASK_LOAD: tl.constexpr, MASK_STORE: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASK_LOAD:
        v = tl.load(x + i, mask=i < n) if OTHER is None else tl.load(x + i, mask=i < n, other=OTHER)
    else:
        v = tl.load(x + i)
    if MASK_STORE:
        tl.store(o + i, v, mask=i < n)
    else:
        tl.store(o + i, v)


def test_unmasked_load_past_the_end_is_named():
    x, out = torch.randn(100), torch.empty(128)
    with pytest.raises(OutOfBoundsError, match=r"load of `x` outside the tensor") as error:
        copy[(1,)](x, out, 100, False, False, None, 128)
    assert "elements 0 … 99" in str(error.value) and "v = tl.load(x + i)" in str(error.value)


@triton.jit
def copy_from(x, o, START: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + START + STEP * i))


@pytest.mark.parametrize(
    ("start", "step", "block", "said"),
    [
        (192, 1, 64, "elements 192 … 255, of which 200 is the first outside;"),
        (0, 3, 128, "elements 0 … 381, of which 201 is the first outside;"),  # 200 itself is not touched
        (-3, 1, 8, "elements -3 … 4, of which -3 is the first outside;"),
        (210, -1, 16, "elements 195 … 210, of which 200 is the first outside;"),  # falling addresses
        (200, 1, 1, "element 200;"),
    ],
)
def test_the_first_element_outside_is_named(start, step, block, said):
    with pytest.raises(OutOfBoundsError) as error:
        copy_from[(1,)](torch.randn(200), torch.empty(128), start, step, block)
    assert said in str(error.value)


def test_unmasked_store_past_the_end_is_named_even_where_another_tensor_lies():
    both = torch.zeros(256)
    with pytest.raises(OutOfBoundsError, match="store of `o`"):
        copy[(1,)](both, torch.empty(100), 100, True, False, 0.0, 128)


def test_masked_copy_is_exact():
    x, out = torch.randn(100), torch.full((100,), 7.0)
    copy[(1,)](x, out, 100, True, True, None, 128)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64], ids=str)
def test_masked_lanes_without_other_are_poison(dtype):
    x, out = torch.ones(100).to(dtype), torch.zeros(128, dtype=dtype)
    with pytest.raises(PoisonError, match="28 value"):
        copy[(1,)](x, out, 100, True, False, None, 128)
    copy[(1,)](x, out, 100, True, False, 0, 128)
    assert out.sum() == 100


def test_poison_reaches_a_sum():
    @triton.jit
    def total(x, o, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(o, tl.sum(tl.load(x + i, mask=i < n), 0))

    with pytest.raises(PoisonError):
        total[(1,)](torch.ones(10), torch.empty(1), 10, 16)
    with emulator.options(poison=False):
        out = torch.empty(1)
        total[(1,)](torch.ones(10), out, 10, 16)
        assert out.item() == 10


@triton.jit
def overlapping(o, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(o + i, tl.program_id(0) + i)


def test_two_programs_that_write_one_place_differently_are_a_race():
    with pytest.raises(GlobalRaceError, match="`o` element 0"):
        overlapping[(2,)](torch.empty(64, dtype=torch.int32), 64)
    overlapping[(1,)](torch.empty(64, dtype=torch.int32), 64)


@triton.jit
def locked_sum(o, lock, BLOCK: tl.constexpr):
    """Read, add, write under a spin lock: ordered by the atomics, so no race."""
    i = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(o + i, tl.load(o + i) + tl.program_id(0))
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@pytest.mark.parametrize("policy", ["eager", "random"])
def test_a_lock_orders_programs(policy):
    out, lock = torch.zeros(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with emulator.options(policy=policy):
        locked_sum[(7,)](out, lock, 32)
    assert (out == 21).all()


@triton.jit
def atomics(o, old, x, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    if OP == "add":
        r = tl.atomic_add(o + i % 4, v)
    elif OP == "max":
        r = tl.atomic_max(o + i % 4, v)
    elif OP == "min":
        r = tl.atomic_min(o + i % 4, v)
    elif OP == "xchg":
        r = tl.atomic_xchg(o + i % 4, v)
    elif OP == "and":
        r = tl.atomic_and(o + i % 4, v)
    elif OP == "or":
        r = tl.atomic_or(o + i % 4, v)
    else:
        r = tl.atomic_xor(o + i % 4, v)
    tl.store(old + i, r)


@pytest.mark.parametrize("op", ["add", "max", "min", "xchg", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_atomics_with_colliding_lanes(op, dtype):
    if dtype.is_floating_point and op in ("and", "or", "xor"):
        pytest.skip("bits of a float")
    x, out = torch.randint(-9, 9, (32,)).to(dtype), torch.ones(4, dtype=dtype)
    old, expected = torch.empty(32, dtype=dtype), [1] * 4
    functions = {"add": lambda a, b: a + b, "max": max, "min": min, "xchg": lambda a, b: b, "and": lambda a, b: a & b,
                 "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}  # fmt: skip
    atomics[(1,)](out, old, x, op, 32)
    before = []
    for lane, value in enumerate(x.tolist()):
        before.append(expected[lane % 4])
        expected[lane % 4] = functions[op](expected[lane % 4], value)
    assert out.tolist() == expected and old.tolist() == before


def test_bf16_atomics_round_to_nearest_even():
    @triton.jit
    def add(o, x, N: tl.constexpr):
        for i in range(N):
            tl.atomic_add(o, tl.load(x + i))

    x, out = torch.randn(50).bfloat16(), torch.zeros(1, dtype=torch.bfloat16)
    add[(1,)](out, x, 50)
    total = torch.zeros((), dtype=torch.bfloat16)
    for v in x:
        total = total + v
    assert out.item() == total.item()


@triton.jit
def described(x_desc, o_desc, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    o_desc.store([m, n], x_desc.load([m, n]) * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_host_descriptors_clip_and_fill(dtype):
    x, out = torch.randn(40, 48).to(dtype), torch.zeros(40, 48, dtype=dtype)
    described[(2, 2)](TensorDescriptor.from_tensor(x, [32, 32]), TensorDescriptor.from_tensor(out, [32, 32]), 32, 32)
    assert torch.equal(out, x * 2)


@triton.jit
def device_made(x, o, M, N, BM: tl.constexpr, BN: tl.constexpr, PADDING: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[BM, BN], padding_option=PADDING)
    target = tl.make_tensor_descriptor(o, shape=[2 * BM, 2 * BN], strides=[2 * BN, 1], block_shape=[BM, BN])
    for i in range(0, 2):
        for j in range(0, 2):
            target.store([i * BM, j * BN], source.load([i * BM, j * BN]))


@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_device_descriptors_pad(padding):
    x, out = torch.randn(20, 24), torch.full((32, 32), 5.0)
    device_made[(1,)](x, out, 20, 24, 16, 16, padding)
    assert torch.equal(out[:20, :24], x)
    outside = torch.cat([out[20:].ravel(), out[:20, 24:].ravel()])
    assert outside.isnan().all() if padding == "nan" else (outside == 0).all()


def test_descriptors_must_keep_the_16_byte_rules():
    x = torch.randn(64, 66)
    with pytest.raises(Exception, match="16"):
        described[(1, 1)](
            TensorDescriptor(x, [64, 66], [66, 1], [32, 32]), TensorDescriptor.from_tensor(x, [32, 32]), 32, 32
        )


@triton.jit
def reducing(o_desc, N: tl.constexpr):
    o_desc.atomic_add([0, 0], tl.full((8, N), 1.0, tl.float32))


def test_descriptor_atomic_add():
    out = torch.zeros(8, 32)
    reducing[(5,)](TensorDescriptor.from_tensor(out, [8, 32]), 32)
    assert (out == 5).all()


@triton.jit
def rows(x_desc, at, o, N: tl.constexpr, W: tl.constexpr):
    i = tl.arange(0, N)
    v = x_desc.gather(tl.load(at + i), 0)
    tl.store(o + i[:, None] * W + tl.arange(0, W)[None, :], v)


def test_descriptor_gather():
    x, at, out = torch.randn(64, 32), torch.randint(0, 64, (16,), dtype=torch.int32), torch.empty(16, 32)
    rows[(1,)](TensorDescriptor(x, [64, 32], [32, 1], [1, 32]), at, out, 16, 32)
    assert torch.equal(out, x[at.long()])


@triton.jit
def block_pointers(x, o, M, N, BM: tl.constexpr, BN: tl.constexpr):
    p = tl.make_block_ptr(x, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    q = tl.make_block_ptr(o, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    for _ in range(0, tl.cdiv(N, BN)):
        v = tl.load(p, boundary_check=(0, 1), padding_option="zero")
        tl.store(q, v + 1, boundary_check=(0, 1))
        p = tl.advance(p, (0, BN))
        q = tl.advance(q, (0, BN))


@pytest.mark.skipif(not hasattr(tl, "advance"), reason="this Triton has no tl.advance")
@pytest.mark.filterwarnings("ignore")
def test_block_pointers():
    x, out = torch.randn(20, 50), torch.zeros(20, 50)
    block_pointers[(1,)](x, out, 20, 50, 32, 16)
    assert torch.equal(out, x + 1)


@triton.jit
def through_table(table, o, N: tl.constexpr):
    i = tl.arange(0, N)
    p = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(o + tl.program_id(0) * N + i, tl.load(p + i))


def test_pointers_read_from_memory():
    xs = [torch.randn(16) for _ in range(3)]
    table, out = torch.tensor([x.data_ptr() for x in xs]), torch.empty(3, 16)
    through_table[(3,)](table, out, 16)
    assert torch.equal(out, torch.stack(xs))


def test_a_null_pointer_is_reported():
    with pytest.raises(OutOfBoundsError, match="null pointer"):
        through_table[(1,)](torch.zeros(1, dtype=torch.int64), torch.empty(16), 16)


@triton.jit
def meet(count, o, PROGRAMS: tl.constexpr):
    """A barrier over the grid: every program waits for the last."""
    tl.atomic_add(count, 1)
    while tl.atomic_add(count, 0) < PROGRAMS:
        pass
    tl.store(o + tl.program_id(0), tl.load(count))


@pytest.mark.parametrize("programs,options", [(20, {}), (100, {"launch_cooperative_grid": True})])
def test_programs_can_wait_for_each_other(programs, options):
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(programs, dtype=torch.int32)
    meet[(programs,)](count, out, programs, **options)
    assert (out == programs).all()
