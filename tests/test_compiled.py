"""`jfa compile`: kernels compile without a GPU, and the report says what fits and what does not."""

import dataclasses
import json
import sys

import pytest

triton = pytest.importorskip("triton")
tlx = pytest.importorskip("triton.language.extra.tlx")
if not triton.__version__.endswith("+fb"):
    pytest.skip("compiling TLX needs fbtriton", allow_module_level=True)

import triton.language as tl  # noqa: E402

from jfa import compiled  # noqa: E402
from jfa.compiled import Report, Role, compile_kernel, worker  # noqa: E402
from jfa.kernels.common.nouns import aggregate  # noqa: E402
from jfa.kernels.compile_config import CompileConfig  # noqa: E402

SCALE = tl.constexpr(2.0)


@triton.jit
def _scaled(x):
    return x * SCALE


@triton.jit
def _scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, tl.exp2(_scaled(x)), mask=offs < n)


@triton.jit
def _two_role_kernel(desc, out_ptr, BUFFERS: tl.constexpr):
    tiles = tlx.local_alloc((128, 128), tl.bfloat16, BUFFERS)
    fulls = tlx.alloc_barriers(BUFFERS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(fulls[0], 0)
            x = tlx.local_load(tiles[0])
            tl.store(out_ptr + tl.arange(0, 128), tl.sum(x.to(tl.float32), 1))
        with tlx.async_task(num_warps=1, registers=24):
            tlx.barrier_expect_bytes(fulls[0], 128 * 128 * 2)
            tlx.async_descriptor_load(desc, tiles[0], [0, 0], fulls[0])


POINTWISE = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
TWO_ROLES = {"desc": "tensordesc<bf16[128, 128]>", "out_ptr": "*fp32"}


def test_a_kernel_of_this_file_compiles_with_its_helpers_and_constants():
    report = compile_kernel(_scale_kernel, POINTWISE, {"BLOCK": 256}, arch=90)
    assert report.error is None and report.problems == []
    assert report.counts["ex2 (mufu)"] > 0 and report.threads == 128
    assert "_scale_kernel" in report._repr_html_() and "fits" in report.to_text()


def test_compiling_works_while_the_interpreter_is_switched_on(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compile_kernel(_scale_kernel, POINTWISE, {"BLOCK": 128}, arch=100).error is None


def test_compiling_uses_this_package_in_a_folder_that_has_another_jfa(monkeypatch, tmp_path):
    (tmp_path / "jfa.py").write_text("raise RuntimeError('the wrong jfa')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JFA_STATE", str(tmp_path / "state"))
    chosen = compiled.select(compiled.shipped_configs(), ["blackwell-finish"])
    assert [r.problems for r in compiled.compile_configs(chosen, [100])] == [[]]


def test_roles_carry_their_warps_and_registers():
    report = compile_kernel(_two_role_kernel, TWO_ROLES, {"BUFFERS": 2}, arch=100, roles=("consumer", "load"))
    assert [(r.name, r.warps) for r in report.roles] == [("consumer", 4), ("load", 1)]
    assert report.roles[1].registers == 24 and report.roles[0].registers > 24
    assert report.counts["tma.load"] > 0 and report.counts["mbarrier.init"] >= 2


@triton.jit
def _neighbour_kernel(out_ptr):
    inbox = tlx.local_alloc((128,), tl.int32, 1)
    come = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(come[0], 512)
    tlx.cluster_barrier()
    tlx.async_remote_shmem_store(inbox[0], tl.arange(0, 128), tlx.cluster_cta_rank() ^ 1, come[0])
    tlx.barrier_wait(come[0], 0)
    tl.store(out_ptr + tl.program_id(0) * 128 + tl.arange(0, 128), tlx.local_load(inbox[0]))


def test_a_kernel_on_pairs_of_ctas_compiles_with_its_cluster():
    pair = compile_kernel(_neighbour_kernel, {"out_ptr": "*i32"}, arch=100, options={"ctas_per_cga": (2, 1, 1)})
    assert pair.error is None and pair.counts["dsmem.store"] > 0 and pair.counts["barrier.cluster"] > 0
    alone = compile_kernel(_two_role_kernel, TWO_ROLES, {"BUFFERS": 2}, arch=100)
    assert alone.counts["barrier.cluster"] == 0


def test_too_much_shared_memory_is_a_problem_though_triton_compiles_it():
    report = compile_kernel(_two_role_kernel, TWO_ROLES, {"BUFFERS": 8}, arch=90)
    assert any("SMEM" in p and "exceeds" in p for p in report.problems)


def test_a_compile_error_is_reported_not_raised():
    report = compile_kernel(_scale_kernel, POINTWISE, {"BLOCK": 3}, arch=90)
    assert report.error and "does not compile" in report.problems[0]


def test_problems_cover_every_cap():
    r = Report("k", 100, smem=300_000, tmem=640, threads=2048, registers=64, spill_stores=8, max_spill_bytes=0)
    assert [p.split()[0] for p in r.problems] == ["SMEM", "TMEM", "2048", "64", "spills"]


def test_wgmmas_that_wait_are_a_problem_unless_recorded():
    (problem,) = Report("k", 90, serialized=True).problems
    assert "C7512" in problem
    assert Report("k", 90, serialized=True, may_serialize=True).problems == []


def test_report_survives_json():
    r = Report("k", 90, roles=[Role("load", 1, 24)], counts={"wgmma": 3})
    assert Report.from_json(json.loads(json.dumps(r.to_json()))) == r


def test_diff_shows_only_what_differs():
    a, b = Report("a", 90, smem=10), Report("b", 90, smem=20)
    text = compiled.diff(a, b)
    assert "SMEM" in text and "TMEM" not in text
    assert "no difference" in compiled.diff(a, a)


def test_a_pattern_without_match_is_named():
    config = CompileConfig("one", "m:k", {}, {}, (90,))
    assert compiled.select([config], ["o*"]) == [config]
    with pytest.raises(ValueError, match="two"):
        compiled.select([config], ["two"])


@pytest.fixture
def stand_in(monkeypatch):
    """The emulator's TLX in this file's kernels, as it is everywhere where Triton has none."""
    from jfa.emulator.frontend.standin import NAME, TlxStandIn

    module = TlxStandIn(NAME)
    monkeypatch.setitem(globals(), "tlx", module)
    monkeypatch.setitem(sys.modules, NAME, module)


@triton.jit
def _calls_a_tlx_kernel(desc, out_ptr):
    _two_role_kernel(desc, out_ptr, 2)


@pytest.mark.parametrize("kernel", [_two_role_kernel, _calls_a_tlx_kernel], ids=["itself", "through a helper"])
def test_where_triton_has_no_tlx_the_error_names_what_to_install(stand_in, kernel):
    with pytest.raises(worker.NeedsTlxError, match=r"`_two_role_kernel` uses TLX, .*fbtriton.*jfa doctor"):
        worker.require_tlx(kernel)


def test_a_plain_kernel_needs_no_tlx(stand_in):
    worker.require_tlx(_scale_kernel)


def test_a_kernel_of_a_notebook_is_shipped_where_triton_has_no_tlx(stand_in):
    assert "_two_role_kernel(desc, out_ptr, 2)" in compiled.ship_source(_calls_a_tlx_kernel)


# ------------------------------------------------------------------------------------- a notebook's aggregates and cfg
@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int
    stages: int = 2


def as_in_a_notebook(cls):
    """A class of a cell: nothing can be imported from its module."""
    cls.__module__ = "__main__"
    return cls


FIRST = tl.constexpr(0)


@as_in_a_notebook
@aggregate
class Totals:
    tile: tlx.buffered_tensor
    fulls: tlx.mbarrier

    @triton.jit
    def wait(self):
        tlx.barrier_wait(self.fulls[0], FIRST)


@as_in_a_notebook
@aggregate
class Room:
    totals: Totals
    scale: tl.tensor


@triton.jit
def _fill_room(room, cfg: tl.constexpr):
    tlx.local_store(room.totals.tile[0], tl.full((cfg.rows,), 0.0, tl.float32) + room.scale)
    tlx.barrier_arrive(room.totals.fulls[0], 1)


@triton.jit
def _noun_kernel(out_ptr, scale, cfg: tl.constexpr):
    tile = tlx.local_alloc((cfg.rows,), tl.float32, tl.constexpr(cfg.stages))
    room = Room(Totals(tile, tlx.alloc_barriers(1)), scale)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            room.totals.wait()
            tl.store(out_ptr + tl.arange(0, cfg.rows), tlx.local_load(room.totals.tile[0]))
        with tlx.async_task(num_warps=4):
            _fill_room(room, cfg)


def test_a_notebook_s_aggregates_and_dataclasses_are_compiled():
    sizes = as_in_a_notebook(Sizes)(rows=128)
    report = compiled.compile_kernel(_noun_kernel, {"out_ptr": "*fp32", "scale": "fp32"}, {"cfg": sizes}, arch=100)
    assert not report.error, report.error
    assert report.smem >= 2 * 128 * 4 and report.counts["mbarrier.wait"] >= 1


def test_a_shipped_aggregate_stands_before_the_kernel_that_builds_it():
    text = compiled.ship_source(_noun_kernel)
    places = [text.index(word) for word in ("class Totals", "def wait", "class Room", "def _noun_kernel")]
    assert places == sorted(places) and text.count("class Totals") == 1 and "FIRST = tl.constexpr(0)" in text
