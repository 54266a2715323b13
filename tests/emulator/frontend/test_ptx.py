"""Inline PTX and libdevice."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

import jfa.emulator as emulator
from jfa.emulator.errors import NotSupported

emulator.install()


@triton.jit
def packed(x, y, z, o, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, c = tl.load(x + i), tl.load(y + i), tl.load(z + i)
    if OP == "fma":
        r = tl.inline_asm_elementwise(
            """
            {
                .reg .b64 ra, rb, rc, rd;
                mov.b64 ra, { $2, $3 };
                mov.b64 rb, { $4, $5 };
                mov.b64 rc, { $6, $7 };
                fma.rn.f32x2 rd, ra, rb, rc;
                mov.b64 { $0, $1 }, rd;
            }
            """,
            "=r,=r,r,r,r,r,r,r", [a, b, c], dtype=tl.float32, is_pure=True, pack=2)  # fmt: skip
    else:
        r = tl.inline_asm_elementwise(
            "{ .reg .b64 p, q, s; mov.b64 p, {$2, $3}; mov.b64 q, {$5, $4}; mul.f32x2 s, p, q; mov.b64 {$0, $1}, s; }",
            "=r,=r,r,r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=2)  # fmt: skip
    tl.store(o + i, r)


def test_packed_arithmetic_and_wiring():
    x, y, z, out = torch.randn(64), torch.randn(64), torch.randn(64), torch.empty(64)
    packed[(1,)](x, y, z, out, "fma", 64)
    assert torch.equal(out, (x.double() * y.double() + z.double()).float())
    packed[(1,)](x, y, z, out, "crossed", 64)
    assert torch.equal(out, x * y.reshape(-1, 2).flip(1).reshape(-1))


@triton.jit
def snippet(x, o, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr, OUT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.inline_asm_elementwise(ASM, CONSTRAINTS, [tl.load(x + i)], dtype=OUT, is_pure=True, pack=PACK))


def run_snippet(x, asm, constraints="=f,f", pack=1, out=torch.float32, triton_out=tl.float32):
    result = torch.empty(x.shape, dtype=out)
    snippet[(1,)](x, result, asm, constraints, pack, triton_out, x.numel())
    return result


def test_ex2_and_friends():
    x = torch.rand(32) + 0.5
    for op, reference in (("ex2.approx.ftz.f32", torch.exp2), ("lg2.approx.f32", torch.log2), ("rcp.approx.f32", torch.reciprocal),
                          ("tanh.approx.f32", torch.tanh), ("rsqrt.approx.f32", torch.rsqrt)):  # fmt: skip
        torch.testing.assert_close(run_snippet(x, f"{op} $0, $1;"), reference(x), rtol=2e-6, atol=1e-6)


def test_integer_snippets():
    x = torch.randint(0, 2**31 - 1, (32,), dtype=torch.int32)
    bits = x.numpy().view(np.uint32)
    got = run_snippet(x, "shr.b32 $0, $1, 3;", "=r,r", out=torch.int32, triton_out=tl.int32)
    assert torch.equal(got, torch.from_numpy((bits >> 3).view(np.int32)))
    asm = "{ .reg .pred p; .reg .b32 t; setp.gt.s32 p, $1, 1000000; and.b32 t, $1, 0xff; selp.b32 $0, t, 7, p; }"
    got = run_snippet(x, asm, "=r,r", out=torch.int32, triton_out=tl.int32)
    assert torch.equal(got, torch.where(x > 1000000, x & 255, 7))
    got = run_snippet(x, "lop3.b32 $0, $1, 0x0000ffff, 0xff00ff00, 0xf8;", "=r,r", out=torch.int32, triton_out=tl.int32)
    assert torch.equal(got, x | torch.tensor(0x0000FF00, dtype=torch.int32))


def test_conversion_of_pairs_to_fp8():
    x = torch.randn(32)
    asm = """
    {
        .reg .b16 a, b;
        cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
        mov.b32 $0, {a, b};
    }
    """
    got = run_snippet(x, asm, "=r,r,r,r,r", 4, torch.float8_e4m3fn, tl.float8e4nv)
    assert torch.equal(got.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


@triton.jit
def numbers(o):
    here = tl.inline_asm_elementwise("mov.u32 $0, %ctaid.y;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    count = tl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(o + tl.program_id(1) * 2 + tl.program_id(0), here * 10 + count)


def test_a_cta_may_ask_for_its_number():
    out = torch.zeros(6, dtype=torch.int32)
    numbers[(2, 3)](out)
    assert out.tolist() == [2, 2, 12, 12, 22, 22]


def test_other_ptx_is_refused_by_name():
    with pytest.raises(NotSupported, match="shfl.sync.bfly.b32"):
        run_snippet(torch.randn(32), "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, -1;")


@triton.jit
def library(x, o, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    if OP == "tanh":
        r = libdevice.tanh(v)
    elif OP == "pow":
        r = libdevice.pow(v, 2.0)
    elif OP == "log1p":
        r = libdevice.log1p(v)
    elif OP == "rint":
        r = libdevice.rint(v)
    elif OP == "fast_dividef":
        r = libdevice.fast_dividef(v, v + 1.0)
    elif OP == "isnan":
        r = libdevice.isnan(v).to(tl.float32)
    else:
        r = libdevice.erfinv(v)
    tl.store(o + i, r)


@pytest.mark.parametrize("op", ["tanh", "pow", "log1p", "rint", "fast_dividef", "isnan", "erfinv"])
def test_libdevice(op):
    x, out = torch.rand(64) * 0.9, torch.empty(64)
    library[(1,)](x, out, op, 64)
    references = {
        "pow": lambda v: v**2,
        "rint": torch.round,
        "fast_dividef": lambda v: v / (v + 1),
        "isnan": lambda v: v.isnan().float(),
    }
    torch.testing.assert_close(out, references.get(op, getattr(torch, op, None))(x), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("function", ["min", "max"])
@pytest.mark.parametrize("propagates", [False, True])
def test_a_minimum_of_pairs_with_and_without_nan(function, propagates):
    x = torch.tensor([0.5, 2.0, float("nan"), 1.5, float("inf"), float("nan"), -3.0, 1.0])
    nan = ".NaN" if propagates else ""
    asm = "{ .reg .b32 pair, one; cvt.rn.bf16x2.f32 pair, $2, $1; mov.b32 one, 0x3F803F80;"
    asm += f" {function}{nan}.bf16x2 $0, pair, one; }}"
    got = run_snippet(x, asm, "=r,r,r", 2, torch.bfloat16, tl.bfloat16)
    want = (torch.minimum if function == "min" else torch.maximum)(x, torch.ones(8))
    want = torch.where(x.isnan() & (not propagates), 1.0, want).bfloat16()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
