"""What is plain Python to the compiler and no constexpr, storage and aliases: both verdicts, and what the emulator says."""

import functools

import pytest
import torch
import triton

import jfa.emulator as emulator

from .. import verdict

emulator.install()
pytestmark = pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="compiling TLX needs fbtriton")

_HEAD = """
import enum
from dataclasses import dataclass, field
from triton.language.core import _aggregate as aggregate


class Mode(enum.Enum):
    fast = 1
    slow = 2


@dataclass(frozen=True)
class Tile:
    shape: tuple = (32, 16)
    stages: int = 2
    sizes: tuple = ((2, 4), 8)


@dataclass(frozen=True)
class Config:
    tile: Tile = Tile()
    extents: tuple = (16, 32)
    title: str = "wide"
    mode: Mode = Mode.fast


the_config: tl.constexpr = tl.constexpr(Config())
SLOW: tl.constexpr = tl.constexpr(Mode.slow)


@aggregate
class Holder:
    value: tl.tensor
    cfg: tl.constexpr

    @triton.constexpr_function
    def __init__(self, value, cfg):
        self.value = value
        self.cfg = tl.constexpr(cfg)

    @triton.jit
    def rows(self):
        return tl.zeros((self.cfg.tile.stages * 16, 16), tl.float32)

    @triton.jit
    def rows_refused(self):
        return tl.zeros((self.cfg.extents[0], 16), tl.float32)


@triton.jit
def three(anything):
    return 3

@triton.jit
def mode_of(mode: tl.constexpr):
    v = 1.0
    if mode == SLOW:
        v = 2.0
    return v

@triton.jit
def first_of(pair):
    return pair[0]

@triton.jit
def fill(tile, M: tl.constexpr, K: tl.constexpr):
    tlx.local_store(tile, tl.zeros((M, K), tl.float32))

@triton.jit
def made(kind: tl.constexpr, N: tl.constexpr):
    return tlx.local_alloc((N, N), tl.float32, 1, kind)

@triton.jit
def used(kind: tl.constexpr, N: tl.constexpr):
    tiles = tlx.local_alloc((N, N), tl.float32, 1, kind)
    tlx.local_store(tiles[0], tl.zeros((N, N), tl.float32))

@triton.jit
def kernel(x, o, n, N: tl.constexpr):
    cfg: tl.constexpr = the_config
"""
_SUM = "tl.store(o, tl.sum(tl.sum(v, 1), 0))"
_SPEC = ("spec = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)",)
_MEMBERS = (
    "a = tlx.local_alloc((N, N), tl.float32, 1, reuse=spec)",
    "b = tlx.local_alloc((N, N), tl.bfloat16, 2, reuse=spec)",
)
_USE = "tlx.local_store(a[0], tl.zeros((N, N), tl.float32))"


def _reuse(first, second, kind=""):
    """A buffer (shape, dtype) that reuses another one, stored to."""
    return (
        f"a = tlx.local_alloc({first[0]}, {first[1]}, 1{kind})",
        f"b = tlx.local_alloc({second[0]}, {second[1]}, 1{kind}, reuse=a)",
        f"tlx.local_store(b[0], tl.zeros({second[0]}, {second[1]}))",
    )


def _in_tmem(dtype, rows=128):
    return (
        f"t = tlx.local_alloc(({rows}, 32), {dtype}, 1, tlx.storage_kind.tmem)",
        f"tlx.local_store(t[0], tl.zeros(({rows}, 32), {dtype}))",
    )


_SCALED = (
    "p = tlx.local_alloc((128, 128), tl.float8e5, 2)", "acc = tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem)",
    "tlx.local_store(p[0], tl.zeros((128, 128), tl.float8e5))", "tlx.local_store(p[1], tl.zeros((128, 128), tl.float8e5))",
    "s = tlx.local_alloc((128, 4), tl.uint8, 2, tlx.storage_kind.tmem)", "done = tlx.alloc_barriers(1)",
    "tlx.local_store(s[0], tl.zeros((128, 4), tl.uint8))", "tlx.local_store(s[1], tl.zeros((128, 4), tl.uint8))",
    "tlx.fence('async_shared')",
    "tlx.async_dot_scaled(p[0], p[1], acc[0], s[0], 'e5m2', s[1], 'e5m2', use_acc=False, mBarriers=[done[0]])",
    "tlx.barrier_wait(done[0], 0)",
)  # fmt: skip


def _layout(text):
    return f"a = tlx.local_alloc((N, N), tl.float32, 1, layout={text})", _USE


REFUSED = {  # lines -> what the emulator's sentence must say
    ("v = tl.zeros((cfg.extents[1], 16), tl.float32)", _SUM): r"cfg.extents\[1\] is a plain int .* write tl.constexpr\(cfg.ext",
    ("v = tl.zeros([16, cfg.tile.shape[0]], tl.float32)", _SUM): r"cfg.tile.shape\[0\] is a plain int",
    ("v = tl.zeros([cfg.tile.stages, 16], tl.float32)", _SUM): "cfg.tile.stages is a plain int",
    ("v = tl.zeros(cfg.tile.shape, tl.float32)", _SUM): "cfg.tile.shape is a plain tuple .* for a jit function",
    ("tl.store(o, three(cfg.extents))",): "cfg.extents is a plain tuple",
    ("tl.store(o, three(cfg.tile.sizes[0]))",): r"cfg.tile.sizes\[0\] is a plain tuple",
    ("tl.store(o, three(anything=cfg.title))",): "cfg.title is a plain str",
    ("tl.store(o, three(cfg.mode))",): "cfg.mode is a plain Mode",
    ("tl.store(o, three((n, tlx.storage_kind.tmem)))",): r"storage_kind.tmem as a constexpr only: write tl.constexpr\(stor",
    ("tl.store(o, three(anything=tlx.reuse_group_type.distinct))",): "reuse_group_type.distinct as a constexpr only",
    ("used(tlx.storage_kind.smem, N)",): "storage_kind.smem as a constexpr only",
    _layout("tlx.swizzled_shared_layout_encoding.make_default(rank=2)"): "give make_default the rank by position",
    ("k: tl.constexpr = tlx.swizzled_shared_layout_encoding.make_default(rank=2)", *_layout("k")): "the rank by position",
    ("k = tlx.swizzled_shared_layout_encoding.make_default(2)", *_layout("k")): "annotate the name as tl.constexpr",
    _layout("tlx.swizzled_layout.make_default(1)"): "has 2 dimensions, its layout 1",
    _layout("tlx.tensor_memory_layout_encoding.make_default((N, N))"): "is in shared memory",
    ("tl.store(o, three(tlx.local_alloc))",): "cannot hand tlx.local_alloc to a jit function",
    ("tl.store(o, three((n, tlx)))",): "cannot hand tlx to a jit function",
    ("a = tlx.local_alloc((N, N), tl.float32, cfg.extents[0])", _USE): r"cfg.extents\[0\] is a plain int .* where local_alloc",
    ("a = tlx.alloc_barriers(cfg.tile.sizes[1])",): "where alloc_barriers takes a constexpr",
    ("for i in tl.static_range(cfg.tile.shape[1]):", "    tl.store(o + i, 1.0)"): "where static_range takes a constexpr",
    ("v = tl.zeros([N] + [16], tl.float32)", _SUM): r"\[16\] is a plain tuple .* write the tuples as one",
    ("v = tl.zeros((N,) + (4,) + (2,), tl.float32)", "tl.store(o, tl.sum(v))"): r"\(2,\) is a plain tuple",
    ("s = (n,)", "tl.store(o, first_of(s + (2,)))"): "in a tuple for a jit function",
    ("s: tl.constexpr = cfg.tile.shape", "v = tl.zeros((s[0], 16), tl.float32)", _SUM): r"s\[0\] is a plain int",
    ("s = cfg.extents", "tl.store(o, 1.0)"): "cfg.extents is a plain tuple .* neither assign nor slice",
    ("v = tl.zeros(cfg.extents[:1], tl.float32)",): "neither assign nor slice",
    ("h = Holder(tl.load(x), cfg)", "v = h.rows_refused()", _SUM): r"self.cfg.extents\[0\] is a plain int",
    ("k: tl.constexpr = tlx.storage_kind.smem", "a = tlx.local_alloc((N, N), tl.float32, 2, k)", "fill(a[1], N, N)"):
        "cannot take a.1., whose storage is a constexpr",
    ("a = made(tl.constexpr(tlx.storage_kind.smem), N)", _USE): "cannot return buffer, whose storage is a constexpr",
    ("k: tl.constexpr = tlx.storage_kind.smem", "spec = tlx.storage_alias_spec(storage=k)", *_MEMBERS, _USE): "storage must be a",
    (*_SPEC, *_MEMBERS, "g: tl.constexpr = tlx.reuse_group_type.shared",
     "spec.set_buffer_overlap(tlx.reuse_group(a, b, group_type=g))", _USE): "group_type of a reuse_group must not be a constexpr",
    (*_SPEC, *_MEMBERS, "g = tlx.reuse_group(a, b)", _USE): "annotate the name as tl.constexpr",
    _reuse(("(64, 64)", "tl.bfloat16"), ("(64, 32)", "tl.float32")): "b has 32 elements in a row; it reuses a, .* needs 64",
    _reuse(("(16, 128)", "tl.int8"), ("(16, 64)", "tl.float16")): "needs 128",
    _reuse(("(32, 32)", "tl.float32"), ("(32, 16)", "tl.float32")): "needs 32",
    _reuse(("(64, 64)", "tl.float32"), ("(16,)", "tl.float32")): "b has 16 elements in a row",
    ("a = tlx.local_alloc((N, N), tl.float32, 2)", "b = tlx.local_alloc((N, N), tl.float32, 1, reuse=a[1])",
     "tlx.local_store(b[0], tl.zeros((N, N), tl.float32))"): r"b reuses a\[1\], which is a view: reuse the array, a",
    _in_tmem("tl.int8"): r"t\[0\] holds int8 in tensor memory, where the compiler can lay out block scales only",
    _in_tmem("tl.uint8", 64): "keep 8-bit integers in shared memory",
}  # fmt: skip
TAKEN = [
    ("D: tl.constexpr = cfg.extents[1]", "v = tl.zeros((D, 16), tl.float32)", _SUM),
    ("v = tl.zeros((tl.constexpr(cfg.extents[1]), 16), tl.float32)", _SUM),
    ("v = tl.zeros((cfg.extents[1] * 2, 16), tl.float32)", _SUM),
    ("v = tl.full((cfg.extents[1], 16), 1.0, tl.float32)", _SUM),
    ("v = tl.full(cfg.tile.shape, 1.0, tl.float32)", _SUM),
    ("S: tl.constexpr = cfg.tile.shape", "v = tl.zeros(S, tl.float32)", _SUM),
    ("s = (N, 16)", "v = tl.zeros((16, 16), tl.float32)", _SUM),
    ("s: tl.constexpr = (N, 16)", "v = tl.zeros((s[1], 16), tl.float32)", _SUM),
    ("v = tl.zeros((16,) * 2, tl.float32)", _SUM),
    ("v = tl.zeros((16, 16, 2)[:2], tl.float32)", _SUM),
    ("w = tl.zeros((16, 32), tl.float32)", "v = tl.zeros((w.shape[1], 16), tl.float32)", _SUM),
    ("w = tl.zeros((16, 32), tl.float32)", "s = w.shape", "v = tl.zeros(w.shape[:2], tl.float32)", _SUM),
    ("s = (n,) + (4,)", "tl.store(o, first_of(s))"),
    ("tl.store(o, first_of((n,) + (n,)))",),
    ("tl.store(o, cfg.extents[0])", "a = cfg.tile.stages", "tl.store(o + 1, a)"),
    ("tl.store(o, three(cfg.extents[0]))",),
    ("tl.store(o, three(tl.float32))", "tl.store(o + 1, three(None))", "tl.store(o + 2, three('wide'))"),
    ("h = Holder(tl.load(x), cfg)", "v = h.rows()", _SUM),
    ("k: tl.constexpr = tlx.storage_kind.smem", "a = tlx.local_alloc((N, N), tl.float32, 1, k)", _USE),
    ("used(tl.constexpr(tlx.storage_kind.smem), N)",),
    ("k: tl.constexpr = tlx.storage_kind.smem", "used(k, N)", "if k.name == 'smem':", "    tl.store(o, 1.0)"),
    ("k: tl.constexpr = tlx.storage_kind.tmem", "a = tlx.local_alloc((N, N), tl.float32, 1, tlx.storage_kind.smem if N > 1 else k)",
     _USE),
    (*_SPEC, *_MEMBERS, "g: tl.constexpr = tlx.reuse_group(a, b)", "spec.set_buffer_overlap(g)", _USE),
    _reuse(("(64, 64)", "tl.bfloat16"), ("(32, 64)", "tl.float32")),
    _reuse(("(64, 64)", "tl.float32"), ("(64, 64)", "tl.bfloat16")),
    _reuse(("(64, 64)", "tl.float32"), ("(64, 32)", "tl.bfloat16")),
    _reuse(("(4, 64)", "tl.bfloat16"), ("(4, 16)", "tl.float32")),
    _reuse(("(4096,)", "tl.bfloat16"), ("(64, 8)", "tl.float32")),
    _reuse(("(128, 32)", "tl.bfloat16"), ("(128, 16)", "tl.float32"), ", tlx.storage_kind.tmem"),
    _reuse(("(64, 64)", "tl.bfloat16"), ("(64, 32)", "tl.float32"))[:-1],
    (*_SPEC, "a = tlx.local_alloc((64, 64), tl.bfloat16, 1, reuse=spec)", "b = tlx.local_alloc((64, 8), tl.float32, 1, reuse=a)",
     "tlx.local_store(b[0], tl.zeros((64, 8), tl.float32))"),
    _layout("tlx.swizzled_shared_layout_encoding.make_default(2)"), _layout("tlx.swizzled_layout.make_default(rank=2)"),
    _layout("tlx.swizzled_layout(3, 3, 3)"),
    _in_tmem("tl.float8e5"), _in_tmem("tl.int16", 64), _in_tmem("tl.int8")[:1], _SCALED,
]  # fmt: skip


def _source(lines):
    return _HEAD + "".join(f"    {line}\n" for line in lines)


@functools.cache
def _compiled():
    """{lines: "" or what the compiler says}."""
    asked = [*REFUSED, *TAKEN]
    signature = {"x": "*fp32", "o": "*fp32", "n": "i32"}
    kernels = [verdict.Kernel(_source(lines), signature, {"N": 32}, 100, stage="llir") for lines in asked]
    return dict(zip(asked, verdict.compiled(kernels)))


def _launch(lines):
    with emulator.options(arch=100):
        verdict.load(_source(lines))[(1,)](torch.randn(64), torch.zeros(128), 3, N=32)


def _name(lines):
    return lines[-2] if len(lines) > 1 else lines[0]


@pytest.mark.parametrize("lines", REFUSED, ids=_name)
def test_both_refuse(lines):
    assert _compiled()[lines]
    with pytest.raises(triton.CompilationError, match=f"(?s){REFUSED[lines]}"):
        _launch(lines)


@pytest.mark.parametrize("lines", TAKEN, ids=_name)
def test_both_take(lines):
    assert not _compiled()[lines]
    _launch(lines)


_STORED = "tlx.local_store(t[0], tl.zeros((128, 4), tl.uint8))"
_SPARE = "t = tlx.local_alloc((128, 4), tl.uint8, 1, tlx.storage_kind.tmem"


@pytest.mark.parametrize(
    ("lines", "runs"),
    [
        ((_SPARE + ")", *_SCALED), True),
        ((_SPARE + ")", _STORED, *_SCALED), False),
        ((*_SCALED, _SPARE + ")", _STORED), False),
        ((*_SCALED, _SPARE + ", reuse=s)", _STORED), False),
    ],
    ids=["allocated only", "stored before", "stored after", "stored over the scales"],
)
def test_scales_that_no_product_takes(lines, runs):
    signature = {"x": "*fp32", "o": "*fp32", "n": "i32"}
    (refusal,) = verdict.compiled([verdict.Kernel(_source(lines), signature, {"N": 32}, 100, stage="llir")])
    assert bool(refusal) is not runs
    if runs:
        _launch(lines)
        return
    with pytest.raises(
        emulator.errors.TensorMemoryError, match="t holds uint8 in tensor memory, and no async_dot_scaled"
    ):
        _launch(lines)


_METHODS = """
from triton.language.core import _aggregate as aggregate

@triton.jit
def get(a):
    return a * 100

@triton.jit
def add(a, b):
    return get(a) + b

@aggregate
class Pair:
    a: tl.tensor
    b: tl.tensor

    @triton.constexpr_function
    def __init__(self, a, b):
        self.a = a
        self.b = b

    @triton.jit
    def get(self):
        return get(self.a) + self.b

    @triton.jit
    def add(self, c):
        return add(self.get(), get(c))

@triton.jit
def kernel(x, o, n, N: tl.constexpr):
    p = Pair(tl.load(x), tl.load(x + 1))
    tl.store(o, p.get())
    tl.store(o + 1, p.add(tl.load(x + 2)))
    tl.store(o + 2, get(p.b))
"""


def test_a_method_may_have_the_name_of_a_function():
    """In its body the name is the module's function, as for the compiler."""
    kernel = verdict.load(_METHODS)
    x, out = torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.zeros(4)
    kernel[(1,)](x, out, 3, N=32)
    assert out.tolist() == [102.0, 10500.0, 200.0, 0.0]
    asked = verdict.Kernel(_METHODS, {"x": "*fp32", "o": "*fp32", "n": "i32"}, {"N": 32}, 100, stage="ttir")
    assert verdict.compiled([asked]) == [""]


def test_a_constexpr_enum_decides_as_one():
    lines = ["tl.store(o, mode_of(SLOW))", "fast: tl.constexpr = cfg.mode", "tl.store(o + 1, mode_of(fast))"]
    kernel = verdict.load(_source(lines))
    out = torch.zeros(4)
    kernel[(1,)](torch.zeros(4), out, 3, N=32)
    assert out.tolist() == [2.0, 1.0, 0.0, 0.0]
