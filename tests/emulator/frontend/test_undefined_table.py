"""Undefined lanes of every type through every family of operations, in kernels: the report names the load they come from,
whichever operand they come by."""

import re

import pytest
import torch
import triton.language as tl

import jfa.emulator as emulator
from jfa.emulator.errors import PoisonError

from ..verdict import load

emulator.install()
pytestmark = pytest.mark.filterwarnings("ignore")

TYPES = {
    "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
INTEGERS, FP8 = {name for name in TYPES if "int" in name}, {"fp8e5", "fp8e4nv"}
FLOATS = TYPES.keys() - INTEGERS - FP8
NUMBERS = INTEGERS | FLOATS
# name -> (expression of u, with undefined lanes, and d, without; the types that the compiler takes for it)
FAMILIES = {
    "copy": ("u", NUMBERS | FP8),
    "negate": ("-u", NUMBERS), "add": ("u + d", NUMBERS), "add to": ("d + u", NUMBERS), "multiply": ("u * 0", NUMBERS),
    "subtract": ("d - u", NUMBERS), "divide": ("u / (d + 3)", NUMBERS), "compare": ("u > d", NUMBERS), "equal": ("d == u", NUMBERS),
    "and": ("u & d", INTEGERS), "xor": ("d ^ u", INTEGERS), "shift": ("u << 1", INTEGERS), "shift by": ("d >> u", INTEGERS),
    "remainder": ("u % 3", NUMBERS), "invert": ("~u", INTEGERS),
    "maximum": ("tl.maximum(d, u)", NUMBERS), "minimum": ("tl.minimum(u, d)", NUMBERS), "abs": ("tl.abs(u)", NUMBERS),
    "clamp": ("tl.clamp(u, -1.0, 1.0)", FLOATS), "exp": ("tl.exp(u)", {"fp32", "fp64"}), "fma": ("tl.fma(d, u, d)", FLOATS),
    "where": ("tl.where(d == d, u, d)", NUMBERS | FP8), "where by": ("tl.where(u > 0, d, d)", NUMBERS),
    "to fp32": ("u.to(tl.float32)", NUMBERS | FP8), "to int8": ("u.to(tl.int8)", NUMBERS), "to fp64": ("u.to(tl.float64)", NUMBERS),
    "to int1": ("u.to(tl.int1)", NUMBERS), "bits": ("u.to(BITS, bitcast=True)", NUMBERS | FP8),
    "sum": ("tl.sum(u, 0) + tl.zeros_like(d)", NUMBERS), "max": ("tl.max(u, 0) + tl.zeros_like(d)", NUMBERS),
    "argmax": ("tl.argmax(u, 0) + i", NUMBERS), "scan": ("tl.cumsum(u, 0)", NUMBERS), "sort": ("tl.sort(u)", NUMBERS),
    "flip": ("tl.flip(u, 0)", NUMBERS), "reshape": ("tl.ravel(tl.reshape(u, (4, 4)))", NUMBERS | FP8),
    "transpose": ("tl.ravel(tl.trans(tl.reshape(u, (4, 4))))", NUMBERS | FP8),
    "join": ("tl.split(tl.join(d, u))[1]", NUMBERS | FP8), "broadcast": ("tl.sum(tl.broadcast_to(u[None, :], (2, N)), 0)", NUMBERS),
    "gather": ("tl.gather(u, i, 0)", NUMBERS), "gather by": ("tl.gather(d, u.to(tl.int32) & 15, 0)", NUMBERS),
    "map": ("tl.map_elementwise(twice, u)", NUMBERS), "call": ("twice(u)", NUMBERS),
    "loop": ("looped(u)", NUMBERS), "tuple": ("(d, u)[1]", NUMBERS | FP8),
}  # fmt: skip
_TEXT = """
@triton.jit
def twice(a):
    return a + a

@triton.jit
def looped(a):
    for k in range(2):
        a = a + 1
    return a

@triton.jit
def kernel(x, y, o, n, N: tl.constexpr, BITS: tl.constexpr):
    i = tl.arange(0, N)
    d = tl.load(y + i)
    u = tl.load(x + i, mask=i < n)  # the origin
    r = EXPRESSION
    tl.store(o + i, r.to(tl.float32))
"""
_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def _run(text, dtype, **more):

    kind = TYPES[dtype]
    x = (torch.arange(16) % 5).to(torch.float32).to(kind)
    y, out = (1 + torch.arange(16) % 3).to(torch.float32).to(kind), torch.zeros(16)
    bits = getattr(tl, _BITS[x.element_size()])
    return emulator.run(load(text), (1,), x, y, out, 10, N=16, BITS=bits, **more).findings


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_names_the_load(family):
    expression, types = FAMILIES[family]
    text, seen = _TEXT.replace("EXPRESSION", expression), {}
    for dtype in sorted(types):
        found = _run(text, dtype)
        seen[dtype] = [type(f) for f in found] == [PoisonError] and "u = tl.load(x + i, mask=i < n)" in str(found[0])
    assert seen == dict.fromkeys(seen, True) and seen


@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_lanes_loaded_nothing_is_reported(family):
    expression, types = FAMILIES[family]
    text = _TEXT.replace("EXPRESSION", expression).replace("mask=i < n)", "mask=i < n + 6)")
    assert {dtype: _run(text, dtype) for dtype in types} == {dtype: [] for dtype in types}


_USES = {
    "atomic": ("tl.atomic_add(o + i, u.to(tl.float32))", "stores 6 value"),
    "exchange": ("tl.atomic_xchg(o + i, u.to(tl.float32))", "stores 6 value"),
    "branch": ("if tl.max(u.to(tl.float32), 0) > 0: tl.store(o, 1.0)", "branches on 1 value"),
    "address": ("tl.store(o + u.to(tl.float32).to(tl.int32), 1.0)", "6 value.* for an address"),
    "mask": ("tl.store(o + i, 1.0, mask=u.to(tl.float32) > 0)", "6 value.* for a mask"),
    "loop": ("for k in range(tl.max(u.to(tl.float32), 0).to(tl.int32)): tl.store(o, 1.0)", "loop bound"),
    "assert": ("tl.device_assert(u.to(tl.float32) < 100)", "asserts 6 value"),
}


@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("dtype", ["int8", "fp64", "fp8e5", "int64", "bf16"])
def test_uses_of_every_width(dtype, use):

    statement, phrase = _USES[use]
    lines = _TEXT.replace("    r = EXPRESSION\n    tl.store(o + i, r.to(tl.float32))\n", f"    {statement}\n")
    found = [str(f) for f in _run(lines, dtype)]
    assert len(found) == 1 and re.search(phrase, found[0]) and "u = tl.load(x + i, mask=i < n)" in found[0]


def test_an_undefined_offset_is_no_second_mistake():
    """The report is about the load; whether the offset that the register happens to hold is aligned says nothing."""
    lines = "e = tl.make_tensor_descriptor(y, [16], [1], [N])\n    tl.store(o + i, e.load([tl.sum(u.to(tl.int32), 0)]))"
    (found,) = _run(_TEXT.replace("r = EXPRESSION\n    tl.store(o + i, r.to(tl.float32))", lines), "fp32")
    assert type(found) is PoisonError and "descriptor's offset" in str(found) and "# the origin" in str(found)
