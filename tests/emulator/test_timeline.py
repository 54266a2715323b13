"""The timeline of a small stream through a ring of buffers: table, picture, trace, and the shares they show."""

import json

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("triton.language.extra.tlx")
import triton.language as tl  # noqa: E402
import triton.language.extra.tlx as tlx  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import jfa.emulator as emulator  # noqa: E402
from jfa.emulator import cli  # noqa: E402
from jfa.emulator.rates import B200  # noqa: E402
from jfa.emulator.timeline import Timeline  # noqa: E402


@triton.jit
def stream(x_desc, out_ptr, chunks, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    tiles = tlx.local_alloc((ROWS, COLS), tl.float32, STAGES)
    fulls = tlx.alloc_barriers(STAGES, arrive_count=1)
    empties = tlx.alloc_barriers(STAGES, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer
            total = tl.zeros((ROWS,), tl.float32)
            for k in range(chunks):
                tlx.barrier_wait(fulls[k % STAGES], (k // STAGES) & 1)
                total += tl.sum(tl.exp(tlx.local_load(tiles[k % STAGES])), axis=1)
                tlx.barrier_arrive(empties[k % STAGES], 1)
            tl.store(out_ptr + tl.arange(0, ROWS), total)
        with tlx.async_task(num_warps=1):  # producer
            for k in range(chunks):
                tlx.barrier_wait(empties[k % STAGES], ((k // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(fulls[k % STAGES], ROWS * COLS * 4)
                tlx.async_descriptor_load(x_desc, tiles[k % STAGES], [0, k * COLS], fulls[k % STAGES])


def launch(stages=2, chunks=6, rows=64, cols=64):
    x, out = torch.randn(rows, chunks * cols), torch.empty(rows)
    stream[(1,)](TensorDescriptor.from_tensor(x, [rows, cols]), out, chunks, ROWS=rows, COLS=cols, STAGES=stages)


def test_more_buffers_shorten_the_modelled_time_and_the_waits():
    one, three = (cli.record(lambda n=n: launch(stages=n), B200) for n in (1, 3))
    assert three.cycles < one.cycles
    assert sum(three.waits().values()) < sum(one.waits().values())


def test_the_exponentials_occupy_the_unit_for_the_cycles_that_the_rates_say():
    drawn = cli.record(launch, B200)
    busy = sum(end - begin for begin, end in drawn.occupied[(0, 0, 0), "mufu"])
    assert busy == pytest.approx(6 * 64 * 64 / B200["mufu"])
    assert drawn.busy("mufu") == pytest.approx(busy / drawn.cycles)


def test_a_span_leaves_out_what_lies_outside():
    drawn = cli.record(launch, B200)
    first = drawn.occupied[(0, 0, 0), "mufu"][0]
    assert drawn.busy("mufu", first) == pytest.approx(1.0)
    assert drawn.busy("mufu", (0.0, first[0])) == 0.0


def test_the_table_names_roles_barriers_and_that_it_is_modelled():
    table = cli.record(launch, B200).table()
    assert table.startswith("modelled on B200")
    for word in ("consumer", "producer", "TMA", "fulls[0]", "unit: mufu"):
        assert word in table


def test_the_picture_has_a_lane_for_each_role_and_engine():
    figure = cli.record(launch, B200).plot()
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["producer", "consumer", "TMA"]
    assert "modelled" in axes.get_xlabel()
    kinds = [text.get_text() for text in axes.get_legend().get_texts()]
    assert kinds == ["compute", "wait", "async"]
    hatches = [patch.get_hatch() for patch in axes.get_legend().get_patches()]
    assert len(set(hatches)) == 3  # told apart without colour


def test_the_chrome_trace_loads_and_names_its_threads(tmp_path):
    path = cli.record(launch, B200).chrome_trace(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"producer", "consumer", "TMA"} <= names
    assert trace["otherData"] == {"chip": "B200", "times": "modelled"}
    assert all(e["dur"] > 0 for e in trace["traceEvents"] if e["ph"] == "X")


def test_a_run_without_a_trace_is_refused():
    launch()
    with pytest.raises(ValueError, match="trace=True"):
        Timeline.of(emulator.last())


def test_the_command_writes_picture_and_trace(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli.timeline(["blackwell_fa_ws", "--out", str(tmp_path)]) == 0
    assert "modelled on B200" in capsys.readouterr().out
    assert (tmp_path / "blackwell_fa_ws.png").stat().st_size > 1000
    assert json.loads((tmp_path / "blackwell_fa_ws.json").read_text())["traceEvents"]


def test_the_command_says_what_it_cannot_find(capsys):
    assert cli.timeline(["nowhere.module:launch"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_an_engines_arithmetic_costs_no_task_time_and_wakes_nobody():
    """A public backward whose products convert their operands: its roles were once resumed while they still waited."""
    from jfa.emulator import rates
    from tests.emulator import tutorials

    tutorials.run("fa backward 1-CTA", policy="timed", rates=rates.B200)
    assert emulator.last().clean


def test_cold_boxes_come_from_hbm_once():
    """The stream reads every box once: cold, its bytes pass HBM's share of one SM; warm, HBM is not asked."""
    warm, cold = (cli.record(launch, B200, cold=flag) for flag in (False, True))
    assert warm.busy("hbm") == 0.0
    fetched = sum(end - begin for begin, end in cold.occupied[(0, 0, 0), "hbm"])
    assert fetched == pytest.approx(6 * 64 * 64 * 4 / B200["hbm"])
    assert cold.cycles > warm.cycles
