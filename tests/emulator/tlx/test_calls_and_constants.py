"""Constants out of a config, slices and alias trees: the emulator takes and refuses what the compiler does."""

import functools

import pytest
import torch
import triton

import jfa.emulator as emulator

from .. import verdict

emulator.install()
pytestmark = pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="compiling TLX needs fbtriton")

_HEAD = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    d: int = 64
    stages: int = 2
    scale: float = 2.0

the_config: tl.constexpr = tl.constexpr(Config())

@triton.jit
def fill(tile, M: tl.constexpr, K: tl.constexpr):
    tlx.local_store(tile, tl.zeros((M, K), tl.float32))

@triton.jit
def left_half(tile):
    return tlx.local_slice(tile, [0, 0], [64, 32])

@triton.jit
def right_columns(tile):
    return tlx.subslice(tile, 32, 32)

@triton.jit
def second(tiles):
    return tiles[1]

@triton.jit
def fill_left(tile):
    tlx.local_store(tlx.local_slice(tile, [0, 0], [64, 32]), tl.zeros((64, 32), tl.float32))

@triton.jit
def overlap(a, b):
    return tlx.reuse_group(a, b)

@triton.jit
def lay_out(spec, a, b):
    spec.set_buffer_overlap(tlx.reuse_group(a, b))

@triton.jit
def product_of(pair):
    return pair[0] * pair[1]

@triton.jit
def zeros_of(rows: tl.constexpr, cfg: tl.constexpr):
    return tl.zeros((rows, cfg.d), tl.float32)

@triton.jit
def kernel(x, o, n, N: tl.constexpr):
    cfg: tl.constexpr = the_config
"""
_SUM = "tl.store(o + tl.arange(0, N), tl.sum(v, 1))"
_SMEM = "t = tlx.local_alloc((64, 64), tl.float32, 2)"
_TMEM = "t = tlx.local_alloc((128, 64), tl.float32, 2, tlx.storage_kind.tmem)"
_ALIASES = (
    "spec = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)",
    "a = tlx.local_alloc((N, N), tl.float32, 1, reuse=spec)",
    "b = tlx.local_alloc((N, N), tl.bfloat16, 2, reuse=spec)",
)
_USE = "tlx.local_store(a[0], tl.zeros((N, N), tl.float32))"


def _dot(dtype, space=""):
    return (
        f"a = tlx.local_alloc((128, 64), {dtype}, 1{space})", f"b = tlx.local_alloc((64, 128), {dtype}, 1)",
        "acc = tlx.local_alloc((128, 128), tl.float32 if tl.constexpr(FLOAT) else tl.int32, 1, tlx.storage_kind.tmem)"
        .replace("FLOAT", str("float" in dtype)),
        f"tlx.local_store(a[0], tl.zeros((128, 64), {dtype}))", f"tlx.local_store(b[0], tl.zeros((64, 128), {dtype}))",
        "tlx.fence('async_shared')", "done = tlx.alloc_barriers(1)",
        "tlx.async_dot(a[0], b[0], acc[0], use_acc=False, mBarriers=[done[0]])", "tlx.barrier_wait(done[0], 0)",
    )  # fmt: skip


_IN_TMEM = ", tlx.storage_kind.tmem"
REFUSED = {  # lines -> what the emulator's sentence must say
    ("v = tl.zeros([N, cfg.d], tl.float32)", _SUM): r"in a tuple for a jit function: write tl\.constexpr\(cfg\.d\)",
    ("v = tl.zeros((cfg.d, 16), tl.float32)", "tl.store(o + tl.arange(0, 64), tl.sum(v, 1))"): "cfg.d is a plain int",
    ("v = zeros_of(N, cfg)", _SUM): "cfg.d is a plain int",
    ("tl.store(o, product_of((n, cfg.scale)))",): "cfg.scale is a plain float",
    ("tl.store(o, product_of(pair=(n, cfg.d)))",): "cfg.d is a plain int",
    ("a = tlx.local_alloc((N, N), tl.float32, cfg.stages)", _USE): r"takes a constexpr: write tl.constexpr\(cfg.stages\)",
    ("a = tlx.local_alloc((N, N), tl.float32, num=cfg.stages)", _USE): "where local_alloc takes a constexpr",
    ("a = tlx.alloc_barriers(cfg.stages)",): "where alloc_barriers takes a constexpr",
    ("a = tlx.alloc_barriers(1, arrive_count=cfg.stages)",): "where alloc_barriers takes a constexpr",
    ("a = tlx.alloc_barriers(1, arrive_count=2)", "tlx.barrier_arrive(a[0], cfg.stages)"): "where barrier_arrive takes",
    ("for i in tl.static_range(cfg.stages):", "    tl.store(o + i, 1.0)"): "where static_range takes a constexpr",
    (*_ALIASES, "tree = tlx.reuse_group(a, b)", "spec.set_buffer_overlap(tree)", _USE): "annotate the name as tl.constexpr",
    (*_ALIASES, "spec.set_buffer_overlap(overlap(a, b))", _USE): "cannot return a reuse_group: write it as",
    (*_ALIASES, "lay_out(spec, a, b)", _USE): "cannot take a storage_alias_spec: allocate",
    ("kind = tlx.storage_kind.smem", "a = tlx.local_alloc((N, N), tl.float32, 1, kind)", _USE): "annotate the name",
    (_SMEM, "v = left_half(t[1])", "fill(v, 64, 32)"): r"cannot return a slice, .*hand over the whole buffer, t\[1\],",
    (_SMEM, "fill(tlx.local_slice(t[0], [32, 0], [32, 64]), 32, 64)"): r"cannot take a slice, .*whole buffer, t\[0\],",
    (_SMEM, "fill(tlx.local_trans(tlx.local_slice(t[0], [0, 32], [64, 32])), 32, 64)"): "cannot take a slice",
    (_TMEM, "fill(tlx.subslice(t[0], 0, 32), 128, 32)"): "cannot take a slice",
    (_TMEM, "v = right_columns(t[0])", "tlx.local_store(v, tl.zeros((128, 32), tl.float32))"): "cannot return a slice",
    _dot("tl.int8", _IN_TMEM): r"a\[0\] holds int8 in tensor memory",
    _dot("tl.uint8"): r"async_dot does not multiply uint8 here, which a\[0\] holds: convert",
}  # fmt: skip
TAKEN = [
    ("v = tl.zeros([N, cfg.d // 2], tl.float32)", _SUM),
    ("D: tl.constexpr = cfg.d", "v = tl.zeros([N, D], tl.float32)", _SUM),
    ("v = tl.zeros((N, tl.constexpr(cfg.d)), tl.float32)", _SUM),
    ("v = tl.full([N, cfg.d], cfg.scale, tl.float32)", _SUM),
    ("v = tl.zeros((64 * N,), tl.float32).reshape([N, cfg.d])", _SUM),
    ("tl.store(o, product_of((n, cfg.d + 1)))",),
    ("tl.store(o + tl.arange(0, cfg.d), 1.0)",),
    ("a = tlx.local_alloc((N, cfg.d), tl.float32, cfg.stages * 2)", "fill(a[0], N, cfg.d)"),
    ("a = tlx.alloc_barriers(tl.constexpr(cfg.stages))", "tlx.barrier_arrive(a[cfg.stages - 1], 1)"),
    ("for i in tl.static_range(cfg.stages + 1):", "    tl.store(o + i, 1.0)"),
    ("for i in range(cfg.stages):", "    tl.store(o + i, 1.0)"),
    (*_ALIASES, "spec.set_buffer_overlap(tlx.reuse_group(a, b))", _USE),
    (*_ALIASES, "tree: tl.constexpr = tlx.reuse_group(a, b)", "spec.set_buffer_overlap(tree)", _USE),
    ("kind: tl.constexpr = tlx.storage_kind.smem", "a = tlx.local_alloc((N, N), tl.float32, 1, kind)", _USE),
    (_SMEM, "v = tlx.local_slice(t[0], [0, 0], [64, 32])", "tlx.local_store(v, tl.zeros((64, 32), tl.float32))"),
    (_SMEM, "fill(second(t), 64, 64)", "fill_left(t[0])"),
    (_SMEM, "fill(tlx.local_slice(t[0], [0, 0], [64, 64]), 64, 64)"),
    (_TMEM, "fill(tlx.subslice(t[0], 0, 64), 128, 64)"),
    _dot("tl.float8e5", _IN_TMEM),
]


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


@pytest.mark.parametrize("lines", REFUSED, ids=lambda lines: lines[-2] if len(lines) > 1 else lines[0])
def test_both_refuse(lines):
    assert _compiled()[lines]
    with pytest.raises(triton.CompilationError, match=f"(?s){REFUSED[lines]}"):
        _launch(lines)


@pytest.mark.parametrize("lines", TAKEN, ids=lambda lines: lines[-2] if len(lines) > 1 else lines[0])
def test_both_take(lines):
    assert not _compiled()[lines]
    _launch(lines)
