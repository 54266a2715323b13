"""Kernels that the compiler takes or refuses, as source text: the emulator must decide alike.

Each entry: name -> (source of `kernel(x, o, n, N: tl.constexpr)` and its helpers). Both sides call it with two float32
pointers, an int and N = 64. Run as a script, this file compiles each for sm_90 and prints a line {name: "" or error kind}.
"""

import json
import linecache
import types

HEAD = "@triton.jit\ndef kernel(x, o, n, N: tl.constexpr):\n    i = tl.arange(0, N)\n    v = tl.load(x + i)\n"
HELPER = "@triton.jit\ndef helper(a, b):\n    return a + b\n\n"
GLOBALS = "SIZE = 4\nCONST = tl.constexpr(4)\n"
END = "    tl.store(o + i, v)\n"


def body(*lines, before="", end=END):
    return before + HEAD + "".join(f"    {line}\n" for line in lines) + end


CONSTRUCTS = {
    "plain": body("v = v + 1"),
    "break": body("for k in range(n):", "    if k > 3:", "        break", "    v += 1"),
    "continue": body("for k in range(n):", "    if k > 3:", "        continue", "    v += 1"),
    "list append": body("xs = [v]", "xs.append(v)"),
    "small dot": body("a = tl.zeros((8, 8), tl.float16)", "d = tl.dot(a, a)"),
    "smallest dot": body("a = tl.zeros((16, 16), tl.float16)", "d = tl.dot(a, a)"),
    "if on a block": body("if v > 0:", "    v = -v"),
    "where on a block": body("v = tl.where(v > 0, -v, v)"),
    "while on a scalar": body("k = 0", "while k < n:", "    k += 1"),
    "while True": body("while True:", "    v += 1"),
    "not a power of two": body("j = tl.arange(0, 48)"),
    "run-time arange": body("j = tl.arange(0, n)"),
    "run-time shape": body("z = tl.zeros((n,), tl.float32)"),
    "undefined name": body("v = v + missing"),
    "plain global": body("v = v + SIZE", before=GLOBALS),
    "constexpr global": body("v = v + CONST", before=GLOBALS),
    "nested def": body("def inner(a):", "    return a", "v = inner(v)"),
    "lambda": body("f = lambda a: a", "v = v + 1"),
    "try": body("try:", "    v = v + 1", "except ValueError:", "    v = v"),
    "chained comparison": body("m = 0 < n < 5"),
    "and of scalars": body("if n > 0 and n < 5:", "    v = -v"),
    "item assignment": body("v[0] = 1.0"),
    "block index": body("w = v[0]"),
    "shape mismatch": body("w = v + tl.zeros((32,), tl.float32)"),
    "type change in a loop": body("acc = 0", "for k in range(n):", "    acc += 0.5"),
    "shape change in a loop": body("acc = 0.0", "for k in range(n):", "    acc += v"),
    "type change in a branch": body("acc = 0", "if n > 3:", "    acc = 0.5"),
    "return in a loop": body("for k in range(n):", "    if k > 3:", "        return", "    v += 1"),
    "value returned": body("tl.store(o + i, v)", end="    return v\n"),
    "sum returned": body(end="    return tl.sum(v, 0)\n"),
    "constant returned": body("tl.store(o + i, v)", end="    return 1\n"),
    "None returned": body("tl.store(o + i, v)", end="    return None\n"),
    "pointer index": body("w = x[0]"),
    "pointer index at run time": body("w = x[n]"),
    "pointer block index": body("w = (x + i)[0]"),
    "axis added to a scalar": body("w = n[None]"),
    "early return": body("if n > 100:", "    return"),
    "store without pointer": body("tl.store(v, v)"),
    "load of an integer": body("w = tl.load(i)"),
    "float offset": body("w = tl.load(x + v)"),
    "other without mask": body("w = tl.load(x + i, other=0.0)"),
    "bitwise on floats": body("w = v & v"),
    "pointer sum": body("w = x + o"),
    "int division of floats": body("w = v // 2.0"),
    "mixed dot": body("a = tl.zeros((16, 16), tl.float16)", "b = tl.zeros((16, 16), tl.bfloat16)", "d = tl.dot(a, b)"),
    "helper call": body("v = helper(v, 1)", before=HELPER),
    "wrong argument count": body("v = helper(v)", before=HELPER),
    "python function": body("v = plain(v)", before="def plain(a):\n    return a\n\n"),
    "static_assert holds": body("tl.static_assert(N == 64)"),
    "static_assert fails": body("tl.static_assert(N == 65, 'no')"),
    "constexpr from run time": body("k: tl.constexpr = n", "j = tl.arange(0, k)"),
    "reshape to another size": body("w = tl.reshape(v, (32,))"),
    "reduction axis": body("w = tl.sum(v, 1)"),
    "power operator": body("w = v ** 2"),
    "matmul operator": body("w = v @ v"),
    "in operator": body("if n in (1, 2):", "    v = -v"),
    "is operator": body("if n is None:", "    v = -v"),
    "string argument": body("tl.store(o + i, v, eviction_policy='sometimes')"),
    "wrong keyword": body("w = tl.load(x + i, maks=i < n)"),
    "iterate a tuple": body("for k in (1, 2):", "    v += k"),
    "static_range": body("for k in tl.static_range(3):", "    v += k"),
    "static_range of a run-time value": body("for k in tl.static_range(n):", "    v += k"),
    "large block": body("z = tl.zeros((2048, 1024), tl.float32)"),
    "fp8 arithmetic cast": body("w = v.to(tl.float8e4nv).to(tl.float32)"),
    "bitcast to another width": body("w = v.to(tl.int16, bitcast=True)"),
    "dict": body("d = {'a': 1}", "v = v + 1"),
    "assert": body("assert N == 64, 'N'"),
    "print": body("tl.static_print('x')"),
    "with": body("with open('x'):", "    v = v + 1"),
    "import": body("import math", "v = v + 1"),
    "global": body("global w", "v = v + 1"),
    "star unpacking": body("a, b = (v, v)", "v = a + b"),
    "multiple targets": body("a = b = v"),
    "walrus": body("v = (w := v) + w"),
    "ternary": body("k = 1 if n > 3 else 2", "v = v + k"),
    "unused return": body("tl.sum(v, 0)"),
}  # fmt: skip


def load(name):
    """The module of one construct, as a notebook would define it."""
    source = CONSTRUCTS[name]
    import triton
    import triton.language as tl

    file = f"construct-{name}"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    module = types.ModuleType("construct")
    module.__dict__.update(triton=triton, tl=tl)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def compile_all(names):
    """{name: "" where it compiles for sm_90, else the exception's class}."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    verdicts = {}
    for name in names:
        try:
            signature = {"x": "*fp32", "o": "*fp32", "n": "i32", "N": "constexpr"}
            source = ASTSource(load(name).kernel, signature, {"N": 64})
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
            verdicts[name] = ""
        except Exception as error:
            verdicts[name] = type(error).__name__
    return verdicts


if __name__ == "__main__":
    for construct in CONSTRUCTS:
        print(json.dumps(compile_all([construct])), flush=True)
