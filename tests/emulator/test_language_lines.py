"""A thousand lines of Triton: what the compiler refuses the emulator refuses, what it compiles runs; conversions, bit by bit."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator

from . import language_lines
from .test_generated import emulated
from .verdict import Kernel, compiled

emulator.install()
pytestmark = pytest.mark.filterwarnings("ignore")
needs_fb = pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="the lines were judged by fbtriton")


def _disagreements(names):
    texts = language_lines.kernels()
    asked = [
        Kernel(texts[name], {"x": "*fp32", "o": "*fp32", "n": "i32"}, {"N": 64}, arch=100, stage="llir")
        for name in names
    ]
    found = []
    for name, refusal in zip(names, compiled(asked)):
        said, _, _ = emulated(texts[name])
        if bool(said) != bool(refusal) and not (said is None and refusal):
            found.append(f"{name}\n  compiler: {refusal[-200:] or 'compiles'}\n  emulator: {said or 'runs'}")
    return found


@needs_fb
def test_a_sample_of_the_lines():
    names = list(language_lines.kernels())
    assert len(names) > 900
    assert _disagreements(names[::17]) == []


@needs_fb
@pytest.mark.slow
def test_all_lines():
    found = _disagreements(list(language_lines.kernels()))
    assert not found, "\n".join(found)


@triton.jit
def _converted(x, o, N: tl.constexpr, TO: tl.constexpr, VIA: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i).to(VIA).to(TO))


_EDGES = [0.0, -0.5, 1.9, -1.9, 127.5, 128.0, 129.0, -129.0, 255.0, 256.0, 300.0, -300.0, 32767.0, 32768.0, 40000.0, -40000.0,
          65535.0, 65536.0, 1e9, -1e9, 2.0**31, -(2.0**31), 3e9, 2.0**32, 1e12, -1e12, 2.0**63, -(2.0**63), 1e19, 1e20,
          float("inf"), float("-inf")]  # fmt: skip


def _truncated(value, kind, bits):
    """cvt.rzi to `bits` bits, at least 16: towards zero, saturating; 8 bits are the lower half of 16."""
    wide = max(bits, 16)
    lo, hi = (0, 2**wide - 1) if kind == "uint" else (-(2 ** (wide - 1)), 2 ** (wide - 1) - 1)
    whole = hi if value == float("inf") else lo if value == float("-inf") else min(max(int(value), lo), hi)
    whole &= 2**bits - 1
    return whole - 2**bits if kind == "int" and whole >> (bits - 1) else whole


@pytest.mark.parametrize("via", [tl.float32, tl.float64], ids=str)
@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_floats_that_no_integer_holds(bits, kind, via):
    x = torch.tensor(_EDGES, dtype=torch.float32)
    out = torch.zeros(len(_EDGES), dtype=getattr(torch, f"{kind}{bits}"))
    _converted[(1,)](x, out, len(_EDGES), getattr(tl, f"{kind}{bits}"), via)
    assert out.tolist() == [_truncated(v, kind, bits) for v in x.tolist()]


@triton.jit
def _bitwise(o, v, N: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, N)
    if HOW == "and":
        tl.atomic_and(o + i, tl.load(v + i))
    elif HOW == "or":
        tl.atomic_or(o + i, tl.load(v + i), mask=i % 2 == 0)
    else:
        tl.atomic_xor(o + i % 8, tl.load(v + i))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["and", "or", "xor"])
def test_bitwise_atomics_of_floats_work_on_their_bits(how, dtype):
    old, v = (torch.randn(16, dtype=dtype, generator=torch.Generator().manual_seed(k)) for k in range(2))
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    a, b, out = old.view(bits).numpy(), v.view(bits).numpy(), old.clone()
    _bitwise[(1,)](out, v, 16, how)
    if how == "and":
        expected = a & b
    elif how == "or":
        expected = np.where(np.arange(16) % 2 == 0, a | b, a)
    else:
        expected = np.concatenate([a[:8] ^ b[:8] ^ b[8:], a[8:]])
    assert np.array_equal(out.view(bits).numpy(), expected)
