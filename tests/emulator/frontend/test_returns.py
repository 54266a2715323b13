"""What a function returns has one type: the compiler looks at every `return`, and so does the emulator."""

import pytest
import torch
import triton

import jfa.emulator as emulator

from ..test_generated import disagreements
from ..verdict import load

emulator.install()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="compared with fbtriton"),
]


def kernel(helper, use="tl.store(o + i, i)", call="r = h(v, n)", before=""):
    """A kernel that calls h(v, n), of these lines, with a block of 64 fp32 and an int."""
    body = "".join(f"    {line}\n" for line in helper)
    return (
        f"{before}@triton.jit\ndef h(v, n):\n{body}"
        "@triton.jit\ndef kernel(x, o, n, N: tl.constexpr):\n    i = tl.arange(0, N)\n    v = tl.load(x + i)\n"
        f"    {call}\n    {use}\n"
    )


def two(a, b, condition="n > 2", otherwise="else"):
    """A kernel whose helper returns one of two."""
    rest = ["else:", f"    return {b}"] if otherwise == "else" else [f"return {b}"]
    return kernel([f"if {condition}:", f"    return {a}", *rest])


VALUES = (
    "v", "v.to(tl.float16)", "tl.zeros((32,), tl.float32)", "n", "n.to(tl.int64)", "1", "2", "2.5", "True", "None",
    "(v, n)", "(1, 2)", "(v, n, n)",
)  # fmt: skip
PAIRS = [(a, b) for k, a in enumerate(VALUES) for b in VALUES[k % 3 :: 3]]
KERNELS = {
    **{f"{a} or {b}": two(a, b, "n > 2" if k % 2 else "n > 90") for k, (a, b) in enumerate(PAIRS)},
    **{f"{a}, then {b}, {c}": two(a, b, c, "behind") for a, b in PAIRS[::7] for c in ("n > 2", "N > 1", "N > 99")},
    "a size": kernel(["if n > 2:", "    return 16", "return 32"], "tl.zeros((h(v, n),), tl.float32)", "pass"),
    "a size, the same": kernel(["if n > 2:", "    return 16", "return 16"], "tl.zeros((h(v, n),), tl.float32)", "pass"),
    "a size, chosen": kernel(["if 2 > 1:", "    return 16", "else:", "    return v"], "tl.zeros((h(v, n),), tl.float32)"),
    "three ways": kernel(["if n > 20:", "    return v", "elif n > 10:", "    return v * 2", "else:", "    return n"]),
    "three ways, one type": kernel(["if n > 20:", "    return v", "elif n > 10:", "    return v * 2", "else:", "    return -v"]),
    "within another": kernel(["if n > 20:", "    if n > 5:", "        return v", "    return v * 2", "return v.to(tl.float16)"]),
    "behind a loop": kernel(["a = 0.0", "for k in range(n):", "    a += 1.0", "if n > 2:", "    return a", "return 1"]),
    "behind a loop, one type": kernel(["a = 0.0", "for k in range(n):", "    a += 1.0", "if n > 2:", "    return a", "return 1.0"]),
    "a name of each way": kernel(["if n > 2:", "    w = v.to(tl.int32)", "    return w", "w = v", "return w"]),
    "a name of each way, one type": kernel(["if n > 2:", "    w = v * 2", "    return w", "w = v", "return w"]),
    "in an unrolled loop": kernel(["for s in tl.static_range(2):", "    if n > s:", "        return v", "return n"]),
    "in an unrolled loop, one type": kernel(["for s in tl.static_range(2):", "    if n > s:", "        return v * s", "return v"]),
    "in a loop": kernel(["for s in range(2):", "    return v", "return v"]),
    "in a while": kernel(["while n < 9:", "    return v", "return v"]),
    "of a pointer": kernel(["if n > 2:", "    return v", "return v + n"], call="r = h(x, n)"),
    "of a pointer and of pointers": kernel(["if n > 2:", "    return v", "return v + tl.arange(0, 16)"], call="r = h(x, n)"),
    "of a load": kernel(["if n > 20:", "    return tl.load(v)", "return 0"], call="r = h(x, n)"),
    "of a load, one type": kernel(["if n > 20:", "    return tl.load(v)", "return 0.0"], call="r = h(x, n)"),
    "of a call": kernel(["if n > 20:", "    return g(v)", "return v"], before="@triton.jit\ndef g(a):\n    return a > 0\n"),
    "numbers of two sizes": kernel(["if n > 20:", "    return 5000000000", "return 0"]),
    "constants within a tuple": kernel(["if n > 2:", "    return v, 1", "return v, 2"], "tl.zeros((r[1],), tl.int32)"),
    "three elements of two": kernel(["if n > 2:", "    return v, n, n", "return v, n"], "a, b, c = r"),
    "nothing, and a value": kernel(["if n > 20:", "    return", "return v"]),
    "behind both": kernel(["if n > 20:", "    return v", "else:", "    return v", "return n"]),
    "a choice of two types": kernel(["return v if n > 2 else n"]),
    "a choice of two types, otherwise": kernel(["return n if n > 20 else v * 2"]),
    "a choice of one type": kernel(["return -v if n > 2 else v * 2"]),
    "a choice within a choice": kernel(["return (v if n > 3 else v * 2) if n > 20 else (v.to(tl.int32) if n > 1 else v)"]),
}  # fmt: skip


def test_emulator_and_compiler_agree():
    found = disagreements([(text, None) for text in KERNELS.values()], "ttir", 90)
    assert not found, "\n\n".join(found)


def _run(text, n=3):
    x, out = torch.randn(64), torch.zeros(64)
    load(text)[(1,)](x, out, n, N=64)
    return x, out


def test_the_refusal_shows_the_return_that_differs():
    text = kernel(["if n > 90:", "    return v", "w = v + 1", "return w.to(tl.int32)"])
    with pytest.raises(
        triton.CompilationError, match=r"(?s):6, in h \(called at .*:11\).*\n    return w.to.*Return type mismatch"
    ) as caught:
        _run(text)
    assert "<['64'], fp32> and <['64'], int32>" in str(caught.value)


@pytest.mark.parametrize("n, value", [(2, 9), (3, 7)])
def test_constants_that_differ_become_run_time_values(n, value):
    text = kernel(["if n > 2:", "    return v, 7", "return v, 9"], "tl.store(o + i, r[0] + r[1].to(tl.float32))")
    x, out = _run(text, n)
    assert torch.equal(out, x + value)


def test_a_function_without_a_return_at_its_end_returns_what_is_undefined():
    text = kernel(["if n > 2:", "    return v * 2"], "tl.store(o + i, tl.where(i < 64, r, 0.0))")
    x, out = _run(text)
    assert torch.equal(out, x * 2)
    with pytest.raises(
        emulator.EmulatorError,
        match="(?s)64 value.s. of a function that ended without a `return`.*:10 .*the function ends at .*:3 ",
    ):
        _run(text, n=2)
    _, out = _run(kernel(["if n > 2:", "    return v * 2"], "tl.store(o + i, tl.where(i < 64, i, r))"), n=2)
    assert torch.equal(out, torch.arange(64.0))
