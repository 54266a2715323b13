"""Strategies that make longer kernels of more of the language: values of every dtype and several shapes, a few statements each.

The generator tracks shapes and dtypes roughly, so that most statements compile and every few do not; `triton_kernels` and `tlx_kernels`
give source text.
"""

# ruff: noqa: E501
from __future__ import annotations

import math

from hypothesis import strategies as st

HEAD = """@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)
@triton.jit
def branching(a, b):
    if a > b:
        return a
    return b
@triton.jit
def both(a, b, c, d):
    return a + c, tl.maximum(b, d)
@triton.jit
def scaled(v, K: tl.constexpr, how=None):
    if how is None:
        return v
    return v + v if K > 1 else v
@triton.jit
def leaves(v, n):
    if n > 2:
        return v
    return v * 2
@tl.core._aggregate
class Inner:
    value: tl.tensor
    size: tl.constexpr
    @triton.constexpr_function
    def __init__(self, value, size):
        self.value = value
        self.size = tl.constexpr(size)
    @triton.jit
    def times(self, k):
        return Inner(self.value * k, self.size)
    @triton.constexpr_function
    def twice(self):
        return self.size * 2
@tl.core._aggregate
class Outer:
    inner: Inner
    parts: tl.tuple
    count: tl.tensor
    @triton.jit
    def total(self):
        return self.inner.value + self.count
@triton.jit
def opened(a, how: tl.constexpr):
    if how > 1:
        return a.value
    return a
@triton.jit
def kernel(x, o, n, N: tl.constexpr):
"""
DTYPES = "int1 int8 int16 int32 int64 uint8 uint32 float16 bfloat16 float32 float64 float8e4nv float8e5".split()
SHAPES = [(16,), (64,), (16, 16), (4, 16), (2, 8, 4)]
FLOATS = "float16 bfloat16 float32 float64".split()
MATH = "exp exp2 log sqrt abs floor sin sigmoid rsqrt erf".split()
BINARY = "+ - * / // % & | ^ << >> < <= == != > >=".split()


def _pick(draw, values):
    return draw(st.sampled_from(list(values)))


class _Body:
    """A kernel under construction: lines, and the blocks (name -> shape, dtype), scalars and constants that they may use."""

    def __init__(self, draw, depth=0):
        self.draw, self.lines, self.blocks, self.depth = draw, [], {}, depth
        self.scalars, self.constants, self.count = {"n": "int32"}, {"N": 64}, 0

    def fresh(self, stem):
        self.count += 1
        return f"{stem}{self.count}"

    def pick(self, *values):
        return _pick(self.draw, values)

    def often(self, usual, rare):
        return usual if self.draw(st.integers(0, 9)) else rare

    def block(self, shape=None, dtype=None):
        """The name of a block, of that shape and dtype if there is one."""
        names = [n for n, (s, d) in self.blocks.items() if shape in (None, s) and dtype in (None, d)]
        return self.pick(*names) if names else self.make(shape, dtype)

    def make(self, shape=None, dtype=None):
        shape, dtype = shape or self.pick(*SHAPES), dtype or self.pick(*DTYPES)
        name, count = self.fresh("v"), math.prod(shape)
        source = self.pick(
            f"tl.arange(0, {count})", f"tl.load(x + tl.arange(0, {count}))", f"tl.full(({count},), 3, tl.float32)"
        )
        value = source if len(shape) == 1 else f"tl.reshape({source}, {shape})"
        self.lines.append(f"{name} = {value}.to(tl.{dtype})")
        self.blocks[name] = shape, dtype
        return name

    def give(self, text, shape, dtype, name=None):
        name = name or self.fresh("v")
        self.lines.append(f"{name} = {text}")
        self.blocks[name] = tuple(shape), dtype
        return name


def _unary(b):
    v = b.block()
    shape, dtype = b.blocks[v]
    kind = b.pick("math", "neg", "invert", "cast", "bits", "call", "clamp", "method")
    if kind == "math":
        v = b.block(dtype=b.often(b.pick(*FLOATS), dtype))
        b.give(f"tl.{b.pick(*MATH)}({v})", *b.blocks[v])
    elif kind == "cast":
        to = b.pick(*DTYPES)
        b.give(f"{v}.to(tl.{to})", shape, to)
    elif kind == "bits":
        to = b.pick(*DTYPES)
        b.give(f"{v}.to(tl.{to}, bitcast=True)", shape, to)
    elif kind == "call":
        b.give(
            f"scaled({v}, {b.pick('1', '2', 'N', 'n')}, {b.pick('None', 'how=None', repr('twice'), '1')})", shape, dtype
        )
    elif kind == "clamp":
        b.give(f"tl.clamp({v}, {b.pick('-1.0', '0', 'n', v)}, {b.pick('1.0', '5', v)})", shape, dtype)
    elif kind == "method":
        b.give(
            f"{v}{b.pick('.T', '.trans()', '.sum(0)', '.abs()', '.to(tl.float32).exp()', '[None]', '.shape', '.dtype')}",
            shape,
            dtype,
        )
    else:
        b.give({"neg": "-", "invert": "~"}[kind] + v, shape, dtype)


def _binary(b):
    v = b.block()
    shape, dtype = b.blocks[v]
    w = b.pick(
        b.block(shape), b.block(shape), b.block(), "n", "2", "2.5", "N", "-1", "300", "True", "n > 2", "1e10", "None"
    )
    if w.isidentifier() and w[0] == "v" and b.draw(st.booleans()):
        b.lines.append(f"{w}c = {w}.to(tl.{dtype})")
        w += "c"
    text = b.pick(f"{v} {b.pick(*BINARY)} {w}", f"{w} {b.pick(*BINARY)} {v}", f"tl.maximum({v}, {w})", f"tl.minimum({w}, {v})",
                  f"tl.where({v} > 1, {v}, {w})", f"tl.where({w}, {v}, {v})", f"tl.fma({v}, {v}, {w})", f"tl.cdiv({v}, {w})",
                  f"tl.umulhi({v}, {w})", f"tl.div_rn({v}, {w})", f"({v} > 0) and ({w} > 0)", f"({v} > 0).logical_or({w})")  # fmt: skip
    b.give(text, shape, dtype)


def _reduce(b):
    v = b.block()
    shape, dtype = b.blocks[v]
    axis = b.often(b.draw(st.integers(-1, len(shape) - 1)), b.pick(len(shape), None))
    left = [s for k, s in enumerate(shape) if axis is not None and k != axis % len(shape)]
    name = b.pick("sum", "max", "min", "argmax", "argmin", "xor_sum", "reduce", "two", "keep", "indices", "or")
    text = {
        "reduce": f"tl.reduce({v}, {axis}, {b.pick('larger', 'branching', 'both')})", "two": f"tl.reduce(({v}, {v}), {axis}, both)",
        "keep": f"tl.sum({v}, {axis}, keep_dims=True)", "indices": f"tl.max({v}, {axis}, return_indices=True)", "or": f"tl.reduce_or({v}, {axis})",
    }.get(name, f"tl.{name}({v}, {axis})")  # fmt: skip
    result = b.fresh("r")
    if name in ("two", "indices"):
        text += b.pick("[0]", "[1]", "", "[2]")
    b.lines.append(f"{result} = {text}")
    if left and name not in ("keep", "two", "indices"):
        b.blocks[result] = tuple(left), dtype
    elif name not in ("keep", "two", "indices"):
        b.scalars[result] = dtype


def _scan(b):
    v = b.block()
    shape, dtype = b.blocks[v]
    axis = b.often(b.draw(st.integers(0, len(shape) - 1)), len(shape))
    b.give(b.pick(f"tl.cumsum({v}, {axis})", f"tl.cumprod({v}, {axis}, reverse=True)", f"tl.associative_scan({v}, {axis}, larger)",
                  f"tl.associative_scan({v}, {axis}, branching, reverse=True)", f"tl.associative_scan(({v}, {v}), {axis}, both)[1]",
                  f"tl.sort({v})", f"tl.sort({v}, {axis})", f"tl.flip({v}, {axis})", f"tl.topk({v}, 4)", f"tl.softmax({v})",
                  f"tl.cumsum({v}, {axis}, dtype=tl.{b.pick(*DTYPES)})"), shape, dtype)  # fmt: skip


def _shape(b):
    v = b.block()
    shape, dtype = b.blocks[v]
    count = math.prod(shape)
    two = (count // 4, 4)
    kind = b.draw(st.integers(0, 11))
    if kind == 0:
        b.give(f"tl.reshape({v}, {b.often(two, (count, 2))})", two, dtype)
    elif kind == 1 and len(shape) > 1:
        b.give(
            f"tl.trans({v})" if len(shape) == 2 else f"tl.permute({v}, {b.pick('2, 0, 1', '(1, 0, 2)', '0, 1')})",
            shape[::-1],
            dtype,
        )
    elif kind == 2:
        b.give(f"{v}[{b.pick('None, :', ':, None', 'None', '0', '...')}]", (1, *shape), dtype)
    elif kind == 3:
        b.give(f"tl.join({v}, {b.block(shape)})", (*shape, 2), dtype)
    elif kind == 4:
        b.lines.append(f"{b.fresh('s')}, {b.fresh('s')} = tl.split(tl.reshape({v}, ({count // 2}, 2)))")
    elif kind == 5:
        b.give(
            f"tl.cat({v}, {b.block(shape)}, can_reorder={b.pick(True, False, 'n')})", (shape[0] * 2, *shape[1:]), dtype
        )
    elif kind == 6:
        b.give(f"tl.interleave({v}, {b.block(shape)})", (*shape[:-1], shape[-1] * 2), dtype)
    elif kind == 7:
        b.give(f"tl.broadcast_to({v}[None], {b.often((2, *shape), (2, 7))})", (2, *shape), dtype)
    elif kind == 8:
        b.give(f"tl.expand_dims({v}, {b.pick(0, -1, 1, 9)})", (1, *shape), dtype)
    elif kind == 9:
        b.give(f"tl.ravel({v})", (count,), dtype)
    elif kind == 10:
        b.give(f"tl.zeros_like({v})", shape, dtype)
    else:
        b.give(f"tl.full({v}.shape, {b.pick('1', '2.5', 'n', 'None')}, {v}.dtype)", shape, dtype)


def _memory(b):
    v = b.block(dtype=b.often("float32", None))
    shape, dtype = b.blocks[v]
    count = math.prod(shape)
    at = f"tl.reshape(tl.arange(0, {count}), {shape})" if len(shape) > 1 else f"tl.arange(0, {count})"
    mask = b.pick("", f", mask={at} < n", ", mask=None", ", mask=n > 2", ", mask=True")
    hint = b.pick(
        "",
        "",
        ", cache_modifier='.cg'",
        ", eviction_policy='evict_last'",
        ", eviction_policy='x'",
        ", cache_modifier=None",
    )
    atomic = b.pick("", "", ", sem='relaxed'", ", sem='x'", ", scope='gpu'", ", scope=None")
    kind = b.draw(st.integers(0, 5))
    if kind == 0:
        other = b.pick("", "", ", other=0.0", ", other=None", ", other=n")
        b.give(f"tl.load(x + {at}{mask}{other}{hint})", shape, "float32")
    elif kind <= 2:
        b.lines.append(f"tl.store(o + {at}, {b.often(v, b.pick('1', 'n', 'None'))}{mask}{hint})")
    elif kind == 3:
        b.lines.append(f"tl.atomic_{b.pick('add', 'max', 'xchg', 'and')}(o + {at}, {v}{mask}{atomic})")
    elif kind == 4:
        b.give(f"tl.gather({v}, tl.full({shape}, 0, tl.int32), {b.pick(0, len(shape) - 1, 3)})", shape, dtype)
    else:
        b.lines.append(f"{b.fresh('h')} = tl.histogram({v}, {b.pick(8, 16, 7, 'n')})")


def _dot(b):
    dtype = b.pick("float16", "bfloat16", "float32", "float8e5", "int8", "float64", "int32")
    v, w = b.block((16, 16), dtype), b.block((16, 16), b.often(dtype, None))
    extra = b.pick("", "", ", input_precision='ieee'", ", input_precision='x'", ", acc=None", ", out_dtype=tl.float16", ", allow_tf32=False",
                   ", acc=tl.zeros((16, 16), tl.float32)", ", out_dtype=tl.int32", ", acc=n")  # fmt: skip
    b.give(f"tl.dot({v}, {w}{extra})", (16, 16), "float32")


def _constant(b):
    name = b.fresh("K")
    value = b.pick("N // 2", "N % 7", "N * 1.0", "N > 3", "min(N, 5)", "'text'", "None", "(1, 2)", "tl.float16", "N / 4", "2 ** 3", "-N", "not N",
                   "tl.cdiv(N, 3)", "n", "N and 3", "N if N > 3 else None", "len((1, 2))", "N is None", "N.bit_length()")  # fmt: skip
    b.lines.append(f"{name}: tl.constexpr = {value}")
    v = b.block()
    b.lines.append(b.pick(f"tl.static_assert({name} == {name})", f"{v} = {v} + {name}", f"c{name} = tl.arange(0, {name})", "tl.static_assert(True, 'text')",
                          f"if {name}:\n    {v} = {v} * 2", f"c{name} = {name}[0]", f"c{name} = {v}.to({name})",
                          f"if {name} is None:\n    return", f"c{name} = tl.zeros(({name}, 4), tl.float32)"))  # fmt: skip


def _tuple(b):
    v, w, t = b.block(), b.block(), b.fresh("t")
    b.lines.append(f"{t} = ({v}, {b.pick(w, 'n', '1', 'N', 'None')})")
    b.lines.append(b.pick(f"{v}, {w} = {w}, {v}", f"{v} = {t}[0]", f"{w} = {t}[1]", f"q{t} = {t}[n]", f"q{t}, p{t} = {t}", f"q{t} = {t} + {t}",
                          f"q{t} = {t}[0:1]", f"q{t} = ({t}, {v})[0][1]", f"q{t} = len({t})", f"{t}[0] = {v}"))  # fmt: skip


def _control(b):
    inner = _Body(b.draw, b.depth + 1)
    inner.blocks, inner.count = dict(b.blocks), b.count + 20 * (b.depth + 1)
    if b.blocks:
        v = b.block()
        inner.lines.append(
            b.pick(
                f"{v} = {v} + {v}", f"{v} = tl.where({v} > 1, {v}, {v})", f"{v} = leaves({v}, n)", f"{v} += 1", "pass"
            )
        )
    _statements(inner, b.draw(st.integers(0, 2)))
    head = b.pick("if n > 2:", "if N > 2:", "if n > 90:", "for k in range(2):", "for k in range(n):", "for k in tl.static_range(2):",
                  "for k in range(0):", "while n < 0:", "if n > 1 and N > 2:", "for k in tl.range(0, n, 2, num_stages=2):",
                  "if n is None:")  # fmt: skip
    b.count = inner.count
    b.lines += [head, *("    " + line for text in inner.lines or ["pass"] for line in text.split("\n"))]
    if head.startswith("if") and b.draw(st.integers(0, 3)) == 0:
        b.lines += [
            "else:",
            b.pick(
                "    pass", "    return", f"    {b.pick(*b.blocks)} = {b.pick(*b.blocks)}" if b.blocks else "    pass"
            ),
        ]


def _leave(b):
    b.lines.append(b.pick("if n > 7:\n    return", "if N > 700:\n    return", "assert N > 2, 'text'", "tl.device_assert(n > 2)",
                          "n = n + 1", "n += 0.5", "tl.device_print('n', n)", "s = 1 if n > 2 else 2", "s = tl.program_id(0) * n",
                          "s = n // 2 + n % 3", "s = max(n, 2)", "s = -n", "s = n ** 2", "s = float(n)", "s = tl.num_programs(0)"))  # fmt: skip


def _aggregate(b):
    v, name = b.block(), b.fresh("a")
    size, other = b.pick("4", "N", "4", "None", "2.5"), b.pick("4", "N", "8")
    b.lines.append(f"{name} = Inner({b.often(v, b.pick('n', '1', 'None', '(n, 1)'))}, {size})")
    if b.draw(st.booleans()):
        parts, count = b.pick("(n, 7)", f"({v}, n)", "n", "()"), b.pick("n", "n + 0.5", "3", v)
        b.lines.append(f"{name}o = Outer({name}, {parts}, {count})")
        b.lines.append(b.pick(f"q{name} = {name}o.total()", f"q{name} = {name}o.parts[{b.pick('0', '1', '2', 'n')}] + 1", f"q{name} = {name}o.inner.twice()",
                              f"{name}o = Outer({name}o.inner.times(2), {name}o.parts, n)", f"for j in range(n):\n    {name}o = Outer({name}, {parts}, {count})",
                              f"{name}o.count = n", f"q{name} = {name}o.nothing", f"q{name}, p{name} = {name}o.parts"))  # fmt: skip
    shape, dtype = b.blocks[v]
    loop, way = (
        b.pick("for j in range(2):", "for j in tl.static_range(2):"),
        b.pick("if n > 2:", "if n > 90:", "if N > 2:"),
    )
    b.lines.append(b.pick(f"{loop}\n    {name} = {name}.times({b.pick('2', 'n', 'j', '0.5')})", f"{loop}\n    {name} = Inner({name}.value, {other})",
                          f"{way}\n    {name} = Inner({name}.value + {name}.value, {other})", f"{way}\n    {name} = {name}.times(3)",
                          f"c{name} = tl.arange(0, {name}.size)", f"q = {name}.twice() + n", f"q = opened({name}, {b.pick('1', '2', 'n')})",
                          f"q = {name}.times", f"q = Inner({name}, 4)", f"q = {name} == {name}", f"q = {name} + 1", f"{name}.size = 3",
                          f"q = ({name}, n)[0].value + 1", f"c{name}: tl.constexpr = {name}.size", f"q = {name} if n > 2 else {name}", "q = Inner(n)",
                          f"q = Inner(size=4, value={v})", f"tl.static_assert({name}.size == 4)", f"q = tl.full((4,), {name}.size, tl.int32)"))  # fmt: skip
    b.give(f"{name}.value", shape, dtype)


def _descriptor(b):
    name = b.fresh("d")
    box = b.pick((16, 16), (4, 16), (8, 64), (64,), (16, 2), (3, 16), (1, 1, 32), (256,), (16, 4))
    rank = len(box)
    extents = ["64", "N", "n * 8", "64"][:rank] if b.draw(st.integers(0, 4)) else ["64"] * b.pick(1, 2, 3)
    strides = {1: ["1"], 2: [b.pick("64", "N", "n * 16"), "1"], 3: ["64", "32", "1"]}[rank]
    strides = b.often(strides, strides[:-1] + [b.pick("2", "n", "1.0", "tl.constexpr(1)")])
    base, shape = (
        b.often(b.pick("x", "o"), b.pick("n", "x + tl.arange(0, 16)", "o + 16")),
        b.often(box, b.pick((16, 16), ("n", 16))),
    )
    text = ", ".join(map(str, shape))
    b.lines.append(f"{name} = tl.make_tensor_descriptor({base}, [{', '.join(extents)}], [{', '.join(strides)}], [{text}]"
                   f"{b.pick('', '', '', ', padding_option=' + repr(b.pick('zero', 'nan', 'x')))})")  # fmt: skip
    at = [
        b.often(b.pick("0", "16", "n * 4", "4"), b.pick("n * 0.5", "n > 2", "None", "48", "n.to(tl.int64)"))
        for _ in range(rank)
    ]
    at = ", ".join(b.often(at, at[:-1]))
    load = f"{name}.load([{at}])"
    if b.draw(st.booleans()):
        b.give(load, box, "float32")
        return
    value = b.often(
        f"tl.zeros(({text},), tl.{b.often('float32', b.pick('float16', 'int32'))})", b.pick("1.0", "n", "None", load)
    )
    b.lines.append(b.pick(f"{name}.store([{at}], {value})", f"{name}.atomic_add([{at}], {value})", f"{name}.atomic_{b.pick('min', 'max', 'and', 'xor')}([{at}], {value})",
                          f"tl.store_tensor_descriptor({name}, [{at}], {value})", f"q = tl.load_tensor_descriptor({name}, [{at}])",
                          f"q = {name}.{b.pick('shape', 'strides', 'dtype', 'nothing')}", f"q = {name}[0]", f"tl.store({name}, 1.0)",
                          f"q = {name}.gather(tl.arange(0, 16), 0)", f"for j in range(2):\n    q = {name}.load([{at}]) + j",
                          f"if n > 2:\n    {name}.store([{at}], {value})", f"{name} = ({name}, n)[0]"))  # fmt: skip


OBJECTS = [_aggregate, _descriptor]
STATEMENTS = [
    _unary,
    _unary,
    _binary,
    _binary,
    _reduce,
    _scan,
    _shape,
    _shape,
    _memory,
    _memory,
    _dot,
    _constant,
    _tuple,
    _control,
    _leave,
]


def _statements(body, count):
    for _ in range(count):
        kinds = STATEMENTS if body.depth < 2 else [s for s in STATEMENTS if s is not _control]
        _pick(body.draw, kinds)(body)


@st.composite
def triton_kernels(draw):
    """Source text of a kernel of two to five statements, and what they need."""
    body = _Body(draw)
    _statements(body, draw(st.integers(2, 5)))
    return HEAD + "".join(f"    {line}\n" for text in body.lines for line in text.split("\n"))


@st.composite
def object_kernels(draw):
    """Source text of a kernel of aggregates and descriptors, among other statements."""
    body = _Body(draw)
    for _ in range(draw(st.integers(1, 3))):
        _statements(body, draw(st.integers(0, 1)))
        _pick(draw, OBJECTS)(body)
    return HEAD + "".join(f"    {line}\n" for text in body.lines for line in text.split("\n"))


# ---------------------------------------------------------------- TLX

TILES = [(64, 64), (128, 64), (64, 32), (128, 128), (64,), (128,)]
TILE_DTYPES = "float32 float16 bfloat16 int8 float8e5 float64 int32 uint8 int64".split()


def _tile(b):
    tmem = b.draw(st.integers(0, 3)) == 0
    shape = b.pick(*TILES) if not tmem else b.pick((128, 64), (64, 64), (128, 128), (128,))
    dtype = b.pick(*TILE_DTYPES) if not tmem else b.pick("float32", "bfloat16", "float16", "float8e5", "int8")
    extra = (
        b.pick("", "", ", layout=None", ", reuse=None", ", storage=tlx.storage_kind.smem")
        if not tmem
        else ", tlx.storage_kind.tmem"
    )
    name = b.fresh("t")
    b.lines.append(f"{name} = tlx.local_alloc({shape}, tl.{dtype}, {b.pick('1', '2', '2', 'N // 32', 'n')}{extra})")
    b.tiles[name] = shape, dtype, tmem
    return name


def _view(b):
    name = b.pick(*b.tiles) if b.tiles else _tile(b)
    shape, dtype, tmem = b.tiles[name]
    part = f"{name}[{b.often('0', b.pick('n & 1', '1', 'N - 63', '0.5', 'None'))}]"
    for _ in range(b.draw(st.integers(0, 2))):
        how = b.pick("slice", "trans", "reshape", "retype", "sub")
        if how == "slice" and len(shape) == 2:
            shape = shape[0] // b.pick(1, 1, 2), shape[1] // b.pick(1, 2)
            part = f"tlx.local_slice({part}, [{b.pick('0', '0', '8', '32')}, {b.pick('0', '32', 'n')}], [{shape[0]}, {shape[1]}])"
        elif how == "trans" and len(shape) == 2:
            shape, part = shape[::-1], f"tlx.local_trans({part}{b.pick('', '', ', (1, 0)', ', None')})"
        elif how == "reshape":
            shape, part = (math.prod(shape),), f"tlx.local_reshape({part}, [{math.prod(shape)}])"
        elif how == "retype":
            dtype = b.pick("int32", "float32", "int8", "float16")
            part = f"tlx.local_reinterpret({part}, tl.{dtype}{b.pick('', '', ', None', f', {list(shape)}')})"
        elif how == "sub" and len(shape) == 2:
            shape = shape[0], 32
            part = f"tlx.subslice({part}, {b.pick('0', '32', 'n')}, 32)"
    return part, shape, dtype


def _access(b):
    part, shape, dtype = _view(b)
    if b.draw(st.booleans()):
        b.give(f"tlx.local_load({part}{b.pick('', '', ', None', ', layout=None', ', relaxed=True')})", shape, dtype)
    else:
        b.lines.append(f"tlx.local_store({part}, tl.zeros({shape}, tl.{b.often(dtype, b.pick(*TILE_DTYPES))}))")


def _wait(b):
    name = b.fresh("b")
    b.lines.append(
        f"{name} = tlx.alloc_barriers({b.pick('2', '2', 'N // 32', 'n')}{b.pick('', ', arrive_count=2', ', arrive_count=None')})"
    )
    part, pred = f"{name}[{b.pick('0', '1', 'n & 1')}]", b.pick("", "", ", pred=n > 100", ", pred=None", ", pred=True")
    b.lines.append(b.pick(f"tlx.barrier_arrive({part}, 1{pred})", f"tlx.barrier_wait({part}, {b.pick('1', '1', 'n & 1')}{pred})",
                          f"tlx.barrier_expect_bytes({part}, {b.pick('64', 'N * 4', 'n')}, pred=n > 100)", f"tlx.barrier_arrive({part})",
                          "tlx.fence('async_shared')", "tlx.fence()", "tl.debug_barrier()", "tlx.named_barrier_wait(9, 128)",
                          f"tlx.barrier_wait({part}, None)", f"tlx.barrier_arrive({part}, 1, None)"))  # fmt: skip


def _copy(b):
    name = _tile(b)
    shape, dtype, _ = b.tiles[name]
    count = math.prod(shape)
    b.lines.append(b.pick(f"g = tlx.async_load(x + tl.arange(0, {count}), {name}[0]{b.pick('', ', mask=n > 2', ', other=0.0', ', mask=None')})",
                          f"d = tl.make_tensor_descriptor(x, (N, N), (N, 1), {shape})", "d = tl.make_tensor_descriptor(o, [N, n], [N, 1], [16, 16])",
                          "tlx.async_load_commit_group()", "tlx.async_load_wait_group(0)", "tlx.async_descriptor_store_wait(0)",
                          "tlx.async_descriptor_store_wait(n)"))  # fmt: skip


def _product(b):
    dtype, (m, k, n) = (
        b.pick("bfloat16", "float16", "int8", "float8e5"),
        b.pick((128, 64, 64), (64, 32, 64), (128, 64, 24)),
    )
    b.lines += [f"pa = tlx.local_alloc(({m}, {k}), tl.{dtype}, 1)", f"pb = tlx.local_alloc(({k}, {n}), tl.{b.often(dtype, 'bfloat16')}, 1)",
                f"pc = tlx.local_alloc(({m}, {n}), tl.{b.often('float32', 'bfloat16')}, 1, tlx.storage_kind.tmem)",
                f"tlx.local_store(pa[0], tl.zeros(({m}, {k}), tl.{dtype}))", f"tlx.local_store(pb[0], tl.zeros(({k}, {n}), tl.{dtype}))",
                f"tlx.async_dot(pa[0], pb[0], pc[0]{b.pick(', use_acc=False', ', use_acc=n > 9', ', use_acc=False, mBarriers=[]', ', False')})"]  # fmt: skip


def _around(b):
    inner = _Tiles(b.draw, b.depth + 1)
    inner.tiles, inner.blocks, inner.count = dict(b.tiles), dict(b.blocks), b.count + 20 * (b.depth + 1)
    _pieces(inner, b.draw(st.integers(1, 2)))
    b.count = inner.count
    body = [line for text in inner.lines for line in text.split("\n")]
    if b.depth == 0 and b.draw(st.booleans()):
        b.lines += ["with tlx.async_tasks():", "    with tlx.async_task('default'):", *("        " + line for line in body),
                    f"    with tlx.async_task(num_warps={b.pick(1, 4, 4, 3)}{b.pick('', ', registers=40', ', registers=41', ', replicate=2')}):",
                    "        tl.store(o + 3000, 1.0)"]  # fmt: skip
    else:
        b.lines += [
            b.pick("if n > 2:", "for k in range(2):", "for k in tl.static_range(2):", "if N > 2:"),
            *("    " + line for line in body),
        ]


class _Tiles(_Body):
    def __init__(self, draw, depth=0):
        super().__init__(draw, depth)
        self.tiles = {}


PIECES = [_tile, _access, _access, _access, _wait, _wait, _copy, _product, _around, _reduce, _unary]


def _pieces(body, count):
    for _ in range(count):
        _pick(body.draw, PIECES if body.depth < 2 else PIECES[:6])(body)


@st.composite
def tlx_kernels(draw):
    """Source text of a kernel of two to four pieces of TLX."""
    body = _Tiles(draw)
    _pieces(body, draw(st.integers(2, 4)))
    return HEAD + "".join(f"    {line}\n" for text in body.lines for line in text.split("\n"))
