"""The mistakes that newcomers make, one kernel each; test_newcomers.py keeps what they are told."""

import torch
import triton
import triton.language as tl

MISTAKES = {}
FACTOR = 3


def mistake(launch):
    MISTAKES[launch.__name__] = launch
    return launch


@triton.jit
def copy(x, o, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets)
    tl.store(o + offsets, values, mask=offsets < n)


@mistake
def no_mask():
    copy[(2,)](torch.zeros(100), torch.zeros(100), 100, BLOCK=64)


@mistake
def no_grid():
    copy(torch.zeros(100), torch.zeros(100), 100, BLOCK=64)


@mistake
def numpy_argument():
    copy[(2,)](torch.zeros(100).numpy(), torch.zeros(100), 100, BLOCK=64)


@triton.jit
def garbage(x, o, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n)
    tl.store(o, tl.sum(values, axis=0))


@mistake
def no_other():
    garbage[(1,)](torch.zeros(100), torch.zeros(1), 100, BLOCK=128)


@triton.jit
def relu(x, o, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    v = tl.load(x + offsets)
    if v < 0:
        v = 0.0
    tl.store(o + offsets, v)


@mistake
def if_on_a_block():
    relu[(1,)](torch.zeros(64), torch.zeros(64), BLOCK=64)


@mistake
def block_of_100():
    relu[(1,)](torch.zeros(100), torch.zeros(100), BLOCK=100)


@triton.jit
def untyped(x, o, BLOCK):
    offsets = tl.arange(0, BLOCK)
    tl.store(o + offsets, tl.load(x + offsets))


@mistake
def block_is_no_constexpr():
    untyped[(1,)](torch.zeros(64), torch.zeros(64), 64)


@triton.jit
def total(x, o, n):
    acc = 0
    for i in range(n):
        acc += tl.load(x + i)
    tl.store(o, acc)


@mistake
def accumulator_changes_type():
    total[(1,)](torch.zeros(64), torch.zeros(1), 64)


@triton.jit
def scaled(x, o):
    tl.store(o, tl.load(x) * FACTOR)


@mistake
def plain_global():
    scaled[(1,)](torch.zeros(1), torch.zeros(1))


@triton.jit
def same_place(x, o, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(o + offsets, tl.load(x + offsets) + tl.program_id(0))


@mistake
def offsets_without_program_id():
    same_place[(4,)](torch.zeros(64), torch.zeros(64), BLOCK=64)


@triton.jit
def tiny_product(a, b, c):
    i = tl.arange(0, 8)
    at = i[:, None] * 8 + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@mistake
def dot_too_small():
    tiny_product[(1,)](*(torch.zeros(8, 8, dtype=torch.float16) for _ in range(3)))


@triton.jit
def search(x, o, n):
    found = -1
    for i in range(n):
        if tl.load(x + i) > 0:
            found = i
            break
    tl.store(o, found)


@mistake
def break_in_a_loop():
    search[(1,)](torch.zeros(8), torch.zeros(1, dtype=torch.int32), 8)


@triton.jit
def value_as_pointer(x, o, BLOCK: tl.constexpr):
    v = tl.load(x + tl.arange(0, BLOCK))
    tl.store(v, v)


@mistake
def store_to_a_value():
    value_as_pointer[(1,)](torch.zeros(64), torch.zeros(64), BLOCK=64)


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x, o, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


@mistake
def tuned_block_at_the_launch():
    tuned[(2,)](torch.zeros(100), torch.zeros(100), 100, BLOCK=64)


@mistake
def grid_of_a_division():
    copy[(128 / 64,)](torch.zeros(128), torch.zeros(128), 128, BLOCK=64)


@mistake
def grid_too_long_in_its_second_axis():
    copy[(1, 70000)](torch.zeros(64), torch.zeros(64), 64, BLOCK=64)


@mistake
def block_size_as_a_float():
    copy[(1,)](torch.ones(64), torch.zeros(64), 64, BLOCK=128 / 2)


@mistake
def argument_that_is_none():
    copy[(1,)](None, torch.zeros(64), 64, BLOCK=64)


@mistake
def list_as_an_argument():
    copy[(1,)]([1.0, 2.0], torch.zeros(64), 2, BLOCK=64)


@mistake
def name_as_an_argument():
    copy[(1,)]("x", torch.zeros(64), 64, BLOCK=64)


@mistake
def sparse_argument():
    copy[(1,)](torch.ones(64).to_sparse(), torch.zeros(64), 64, BLOCK=64)


@mistake
def meta_argument():
    copy[(1,)](torch.ones(64, device="meta"), torch.zeros(64), 64, BLOCK=64)


@mistake
def number_as_a_grid():
    copy[2](torch.ones(64), torch.zeros(64), 64, BLOCK=64)


@mistake
def empty_grid():
    copy[()](torch.ones(64), torch.zeros(64), 64, BLOCK=64)
