"""Warps of one task in tensor memory: groups of four split a tile's columns and run apart until something joins them.

What joins was read off PTX: test_the_compiler_joins_there_too compiles and looks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa.emulator import errors

from .. import tutorials

tlx = pytest.importorskip("triton.language.extra.tlx")
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore")


@triton.jit
def overlay(
    x_ptr, out_ptr, BETWEEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, NARROW: tl.constexpr, SLICES: tl.constexpr
):
    shared = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem, reuse=shared)
    p = tlx.local_alloc((M, N), NARROW, 1, tlx.storage_kind.tmem, reuse=shared)
    shared.set_buffer_overlap(tlx.reuse_group(s, p, group_type=tlx.reuse_group_type.shared))
    bars = tlx.alloc_barriers(2)
    per_thread = tlx.alloc_warp_barrier(num_barriers=1, num_warps=8)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tlx.local_store(s[0], tl.load(x_ptr + at))
    row = tl.load(x_ptr + tl.arange(0, N))
    if SLICES == 1:
        value = tlx.local_load(s[0])
    else:
        value = tlx.local_load(tlx.local_slice(s[0], [0, N // 2], [M, N // 2]))
    if BETWEEN == "debug_barrier":
        tl.debug_barrier()
    if BETWEEN == "arrive":
        tlx.barrier_arrive(bars[0])
    if BETWEEN == "expect":
        tlx.barrier_expect_bytes(bars[0], 0)
    if BETWEEN == "named":
        tlx.named_barrier_wait(9, 256)
    if BETWEEN == "named, half of the threads":
        tlx.named_barrier_wait(9, 128)
    if BETWEEN == "row maximum":
        value -= tl.max(value, 1)[:, None]
    if BETWEEN == "column sum":
        value -= tl.sum(value, 0)[None, :]
    if BETWEEN == "through shared memory":
        value = tl.trans(value)
    if BETWEEN == "wait":
        tlx.barrier_wait(bars[1], 1)
    if BETWEEN == "fence":
        tlx.fence("async_shared")
    if BETWEEN == "every thread arrives":
        tlx.barrier_arrive(per_thread[0])
    if BETWEEN == "row from memory":
        value -= row[None, :]
    narrow = (value * 2).to(NARROW)
    if SLICES == 1:
        tlx.local_store(p[0], narrow)
    else:
        tlx.local_store(tlx.local_slice(p[0], [0, N // 2], [M, N // 2]), narrow)
    tl.store(out_ptr + tl.arange(0, 2), tl.arange(0, 2).to(tl.float32))


def _findings(between, warps=8, m=128, n=128, narrow=tl.bfloat16, slices=1, policy="eager"):
    x, out = torch.randn(m, n), torch.empty(m, n)
    run = emulator.run(overlay, (1,), x, out, between, m, n, narrow, slices, num_warps=warps, policy=policy)
    return [type(f) for f in run.findings]


JOINS = ["debug_barrier", "arrive", "expect", "named", "row maximum", "column sum", "through shared memory"]
APART = ["", "wait", "fence", "every thread arrives", "row from memory", "named, half of the threads"]


@pytest.mark.parametrize("policy", ["eager", "lazy", "random", "timed"])
@pytest.mark.parametrize("between", JOINS)
def test_what_joins_the_warps(between, policy):
    assert _findings(between, policy=policy) == []


@pytest.mark.parametrize("policy", ["eager", "lazy", "random", "timed"])
@pytest.mark.parametrize("between", APART)
def test_what_leaves_them_apart(between, policy):
    assert errors.RaceError in _findings(between, policy=policy)


@pytest.mark.parametrize("between", APART)
def test_four_warps_are_one_group(between):
    assert _findings(between, warps=4) == []


@pytest.mark.parametrize("m, n, narrow, warps", [(128, 64, tl.float16, 8), (128, 256, tl.bfloat16, 16), (64, 64, tl.float16, 8),
                                                 (128, 32, tl.float8e5, 8)])  # fmt: skip
def test_other_shapes_and_types(m, n, narrow, warps):
    assert errors.RaceError in _findings("", warps, m, n, narrow)
    assert _findings("debug_barrier", warps, m, n, narrow) == []


def test_a_tile_stored_over_itself_is_each_groups_own():
    assert _findings("", narrow=tl.float32) == []


def test_slices_that_lie_in_other_columns_do_not_meet():
    """The right half of S is loaded; the right half of P lies where the left half of S was."""
    assert _findings("", slices=2) == []


def test_the_report_names_the_warps_and_the_mend():
    with emulator.options(), pytest.raises(errors.RaceError) as error:
        overlay[(1,)](torch.randn(128, 128), torch.empty(128, 128), "", 128, 128, tl.bfloat16, 1, num_warps=8)
    text = str(error.value)
    assert "warps 0 to 3 of main" in text and "warps 4 to 7 of main" in text and "tl.debug_barrier()" in text


@triton.jit
def handed_on(x_ptr, PER_THREAD: tl.constexpr, BOTH: tl.constexpr):
    tile = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    if PER_THREAD:
        loaded = tlx.alloc_warp_barrier(num_barriers=1, num_warps=8)
    else:
        loaded = tlx.alloc_barriers(1)
    tlx.local_store(tile[0], tl.zeros((128, 64), tl.float32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if BOTH:
                tlx.barrier_wait(loaded[0], 0)
            tlx.local_store(tile[0], tl.zeros((128, 64), tl.float32))
        with tlx.async_task(num_warps=8):  # reader
            value = tlx.local_load(tile[0])
            tlx.barrier_arrive(loaded[0])
            tl.store(x_ptr, tl.sum(value))


@pytest.mark.parametrize("per_thread", [False, True])
def test_an_arrival_of_every_thread_covers_all_groups_for_others(per_thread):
    run = emulator.run(handed_on, (1,), torch.zeros(1), per_thread, True)
    assert run.clean
    run = emulator.run(handed_on, (1,), torch.zeros(1), per_thread, False)
    assert errors.RaceError in {type(f) for f in run.findings}


@pytest.mark.skipif(not os.path.isdir(tutorials.TUTORIALS), reason="needs fbtriton's tutorials")
@pytest.mark.parametrize("ctas", [1, 2])
def test_the_public_backward_needs_its_barrier_between_s_and_p(ctas):
    """Fork issue 1992 at its source: the tutorial with its barrier is clean (test_conformance), without it is not."""
    launch, _, _ = tutorials.CASES[f"fa backward {ctas}-CTA"]()

    def drop(kind, name, task, where):
        return "drop" if kind == "named_barrier_wait" and name == "10" else None

    with tutorials.no_gpu(), emulator.options(fault=drop), pytest.raises(errors.RaceError, match="warps 4 to 7"):
        launch()


NOT_COMPILED = ("arrive", "expect", "every thread arrives", "named, half of the threads")
"""Their barriers are unused and dropped by the compiler; the last has a bar.sync, of four warps."""
COMPILED = [b for b in (*JOINS, *APART) if b not in NOT_COMPILED]
SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from tests.emulator.tlx.test_warps import COMPILED, overlay
names = overlay.arg_names
for between in COMPILED:
    constants = dict(BETWEEN=between, M=128, N=128, NARROW=tl.bfloat16, SLICES=1)
    signature = {n: "constexpr" if n in constants else "*fp32" for n in names}
    source = ASTSource(overlay, signature, constexprs={(names.index(n),): v for n, v in constants.items()})
    ptx = triton.compile(source, target=GPUTarget("cuda", 100, 32), options=dict(num_warps=8)).asm["ptx"]
    lines = [l for l in ptx.splitlines() if "tcgen05.ld" in l or "tcgen05.st" in l or "bar.sync" in l]
    load = next(k for k, l in enumerate(lines) if "tcgen05.ld" in l)
    store = next(k for k, l in enumerate(lines) if k > load and "tcgen05.st" in l)
    print("rows" if "16x32bx2" in lines[load] else "joined" if store > load + 1 else "apart")
"""


def test_the_compiler_joins_there_too(tmp_path):
    """In the PTX for sm_100 a bar.sync stands between the load of S and the store of P just where the emulator joins.

    A row maximum needs none: the compiler then gives each warp whole rows, and the store goes where that warp has loaded.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    child = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, cwd=ROOT)
    expected = ["rows" if b == "row maximum" else "joined" if b in JOINS else "apart" for b in COMPILED]
    assert child.stdout.split() == expected, child.stderr[-2000:]
