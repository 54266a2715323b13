"""Recorded results are read, compared and drawn as they are; quoted figures are marked; source lines are counted right."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch

from jfa.bench import lines, peers, recorded, shapes
from jfa.bench.cli import table

CEILINGS = {"copy_tb_per_s": 4.0, "bf16_tflops": 800.0}


def timing(shape, name, forward, backward=None, note=""):
    return {"shape": shape, "name": name, "forward_ms": 1.0, "backward_ms": 1.0, "note": note} | {
        "forward_tflops": forward,
        "backward_tflops": backward,
    }


@pytest.fixture
def result():
    versions = {"driver": "580", "torch": "2.11", "triton": "3.7.4", "cuda": "None"}
    environment = {"device": "NVIDIA H200", "date": "2026-01-02"} | versions
    timings = [
        timing("pma32", "jfa:portable", 100.0, 90.0),
        timing("pma32", "jfa:hopper", 110.0, 80.0),
        timing("pma32", "fa2", 40.0, 20.0),
        timing("pma32", "fa4", 44.0, 34.0),
        timing("dense", "jfa:hopper", 640.0),
        timing("dense", "fa4", None, note="flash-attn-4 is not installed"),
    ]
    return recorded.Recorded("h200", {"environment": environment, "ceilings": CEILINGS, "timings": timings})


def test_the_fastest_of_ours_meets_the_fastest_peer(result):
    assert result.fastest("pma32") == ("jfa:hopper", 110.0)
    assert result.fastest("pma32", "backward") == ("jfa:portable", 90.0)
    assert result.fastest("pma32", ours=False) == ("fa4", 44.0)
    assert result.fastest("dense", ours=False) is None


def test_a_missing_peer_leaves_no_ratio(result):
    pma, dense = result.comparison("forward")
    assert pma[:6] == ["pma32", "jfa:hopper", 110.0, "fa4", 44.0, 2.5]
    assert dense[3:6] == ["-", "-", "-"]
    assert dense[6] == pytest.approx(80.0)  # 640 of 800: dense is under the flat part of the roof


def test_the_bound_is_the_lower_roof():
    assert recorded.bound_tflops("pma32", (4.0, 800.0)) == pytest.approx(4.0 * recorded.intensity("pma32"))
    assert recorded.bound_tflops("dense", (4.0, 800.0)) == 800.0


def test_the_newest_ceilings_of_a_gpu(tmp_path):
    def write(name, gpu, date, **ceilings):
        content = {"environment": {"device": f"NVIDIA {gpu}", "date": date}, "timings": [], **ceilings}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    write("a", "H200", "2026-01-02", ceilings=CEILINGS)
    write("b", "H200", "2026-03-01", ceilings=CEILINGS | {"bf16_tflops": 790.0})
    write("c", "H200", "2026-03-01", ceilings=CEILINGS | {"bf16_tflops": 700.0})  # the same day: the first by name
    write("d", "H200", "2026-04-01")  # measured none
    write("e", "B200", "2026-05-01", ceilings=CEILINGS)
    assert recorded.newest_ceilings("H200", tmp_path) == (4.0, 790.0)
    with pytest.raises(LookupError, match="H100"):
        recorded.newest_ceilings("H100", tmp_path)


def test_where_names_gpu_driver_versions_and_date(result):
    assert result.on_gpu and result.gpu == "H200"
    assert result.where == "NVIDIA H200, driver 580, torch 2.11, triton 3.7.4, 2026-01-02"


def test_files_of_another_kind_are_left_out(tmp_path, result):
    (tmp_path / "h200.json").write_text(json.dumps(result.content))
    (tmp_path / "facts.json").write_text("[1, 2]")
    assert [r.name for r in recorded.read_all(tmp_path)] == ["h200"]
    assert recorded.read_all(tmp_path / "missing") == []


def test_every_committed_result_is_complete():
    for result in recorded.read_all():
        assert result.on_gpu and {"device", "driver", "torch", "triton", "date"} <= result.content["environment"].keys()
        assert set(result.shapes()) <= set(shapes.SHAPES), result.name
        assert table(result.content)


def test_the_roofline_draws_shapes_roofs_and_results(result):
    picture = recorded.roofline([result], roofs={"a B200, modelled": (7.0, 2383.0)})
    assert picture.png().startswith(b"\x89PNG")
    assert "h200: ours" in picture.text and "a B200, modelled" in picture.text
    assert all(name in picture.text for name in shapes.DEFAULT)
    assert recorded.roofline([], roofs={"x": (4.0, 800.0)}).png()


def test_a_result_from_a_cpu_is_not_drawn(result):
    result.content["environment"]["device"] = "CPU"
    assert "h200: ours" not in recorded.roofline([result], roofs={"x": (4.0, 800.0)}).text


def test_quoted_figures_name_their_source():
    assert all(q.gpu and q.claim and q.source for q in recorded.QUOTED)


def test_code_lines_leave_out_blanks_comments_and_docstrings():
    source = '''
        """A module.

        Two lines more."""

        # a comment
        X = (
            1,  # why
        )


        def f(x):
            """What it does."""
            text = """not a
            docstring"""
            return text
    '''
    assert lines.code_lines(textwrap.dedent(source)) == 7


def test_every_kernel_package_has_lines():
    assert {"portable", "hopper", "blackwell", "common"} <= {package for package, _, _ in lines.kernel_files()}
    assert all(count > 0 for _, _, count in lines.kernel_files())


PEER = """
from helper_beside_it import scale

def jagged_flash_attention(query, key, value, query_offset, key_offset, max_seq_len_q, max_seq_len_kv, sm_scale=None,
                           window_size=None, broadcast_q=False, output_offset=None):
    from jfa.reference import attention
    out = attention(query, key, value, query_offset, key_offset, window_size=window_size, broadcast_q=broadcast_q,
                    output_offset=output_offset)
    return [out * scale]
"""


@pytest.mark.parametrize("shape", shapes.ON_CPU, ids=lambda s: s.name)
def test_a_peer_from_a_path_finds_its_neighbours_and_its_slots(tmp_path, shape, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "helper_beside_it.py").write_text("scale = 1.0\n")
    (tmp_path / "theirs.py").write_text(PEER)
    inputs = shapes.make_inputs(shape, "cpu", torch.float32)
    out = peers.from_path(str(tmp_path / "theirs.py"))(inputs)()
    torch.testing.assert_close(out, peers.jfa(inputs)())
