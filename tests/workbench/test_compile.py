"""`jfa compile` on kernels of one's own: types from --args or from a launch, spills by role, files, comparison, mistakes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.language.extra.tlx")
if not triton.__version__.endswith("+fb"):
    pytest.skip("compiling TLX needs fbtriton", allow_module_level=True)

from jfa import sass  # noqa: E402
from jfa.compiled import Report, Role  # noqa: E402
from jfa.workbench import compile as tool  # noqa: E402
from tests.support import ROOT  # noqa: E402
from tests.workbench import own  # noqa: E402

OWN = str(ROOT / "tests" / "workbench" / "own.py")


def reports(capsys, *argv: str) -> list[dict]:
    """The reports that a call prints as JSON."""
    assert tool.main([*argv, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_a_kernel_in_a_file_with_types_and_constants(capsys):
    types = ["x_ptr=*fp32:16", "y_ptr=*fp32:16", "n=i32", "factor=fp32", "BLOCK=WIDTH"]
    (found,) = reports(capsys, f"{OWN}:scale", "--arch", "sm_90", "--args", *types)
    assert (found["name"], found["arch"], found["threads"], found["error"]) == ("scale", 90, 128, None)
    assert found["counts"]["st.global"] == 1


def test_a_launch_gives_types_constants_and_warps(capsys):
    first, second = reports(capsys, f"{OWN}:launch_two", "--arch", "100")
    assert (first["name"], first["threads"]) == ("scale", 64)
    assert second["counts"]["tma.load"] > 0
    assert [role["name"] for role in second["roles"]] == ["reader", "loader", "task 2", "task 3"]


def test_spills_are_told_by_role_and_ptx_and_sass_are_written(capsys, tmp_path):
    types = ["x_ptr=*fp32", "y_ptr=*fp32"]
    argv = [f"{OWN}:spills", "--arch", "sm_100", "--args", *types, "--ptx", str(tmp_path), "--sass", str(tmp_path)]
    (found,) = reports(capsys, *argv)
    assert found["spill_stores"] > 0, "24 registers cannot hold what this role holds"
    assert set(found["role_spills"]) <= {"greedy", sass.BEFORE} and "greedy" in found["role_spills"]
    for index, name in ((0, "spill_stores"), (1, "spill_loads")):
        assert sum(both[index] for both in found["role_spills"].values()) == found[name], "as much as ptxas says"
    assert ".entry spills" in (tmp_path / "spills.sm_100.ptx").read_text()
    assert "STL" in (tmp_path / "spills.sm_100.sass").read_text()
    assert found["files"] == {kind: str(tmp_path / f"spills.sm_100.{kind}") for kind in ("ptx", "sass")}


def test_the_text_says_what_each_role_spills():
    report = Report("k", 100, spill_stores=8, spill_loads=4, role_spills={"mma": (8, 4)}, roles=[Role("mma", 1, 24)])
    text = report.to_text()
    assert text.index("spills") < text.index("  mma") < text.index("barriers") and "8 B stored, 4 B loaded" in text
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_two_versions_are_compared(capsys):
    types = ["x_ptr=*fp32", "y_ptr=*fp32", "n=i32", "factor=fp32", "BLOCK=128"]
    assert tool.main(["--diff", f"{OWN}:scale", f"{OWN}:launch", "--arch", "90", "--args", *types]) == 2
    assert "leave --args out" in capsys.readouterr().err
    assert tool.main(["--diff", f"{OWN}:launch", "tests.workbench.own:launch_box", "--arch", "90"]) == 0
    said = capsys.readouterr().out
    assert "scale@90" in said and "first_box@90" in said and "SMEM" in said


def test_saved_reports_are_compared(tmp_path, capsys):
    for name, smem in (("before", 1), ("after", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps([Report("k", 100, smem=smem).to_json()]))
    assert tool.main(["--diff", str(tmp_path / "before.json"), str(tmp_path / "after.json")]) == 0
    assert "k A@100" in capsys.readouterr().out
    (tmp_path / "other.json").write_text(json.dumps([Report("k", 90).to_json()]))
    assert tool.main(["--diff", str(tmp_path / "before.json"), str(tmp_path / "other.json")]) == 2
    assert "A is for sm_100 and B for sm_90" in capsys.readouterr().err


def test_a_kernel_that_does_not_compile_says_what_the_compiler_says(capsys):
    types = ["x_ptr=*fp32", "y_ptr=*fp32", "n=i32", "factor=fp32", "BLOCK=100"]
    assert tool.main([f"{OWN}:scale", "--args", *types]) == 1
    said = capsys.readouterr().out
    assert said.startswith("scale on sm_100 does not compile:") and "power of 2" in said


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ([f"{OWN}:scale"], "scale needs types or constants: --args x_ptr=*fp32 y_ptr=*fp32 n=i32 factor=i32 BLOCK=128"),
        ([f"{OWN}:scale", "--args", "m=i32"], "'m=i32': scale takes x_ptr, y_ptr, n, factor, BLOCK, POWER"),
        ([f"{OWN}:scale", "--args", "n=integer"], "'integer' is no type: types read fp32"),
        ([f"{OWN}:launches_nothing"], "launches_nothing launches no kernel"),
        ([f"{OWN}:fails"], "fails raises IndexError, line"),
        (["missing.json"], "there is no file missing.json"),
        (["no-such-kernel"], "no kernel configuration matches 'no-such-kernel'"),
        (["blackwell-finish@70"], "'70' is none of sm_90, sm_100, sm_103"),
    ],
)
def test_a_mistake_is_one_sentence(argv, sentence, capsys):
    assert tool.main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("jfa compile: ") and sentence in line


@pytest.mark.parametrize("text, type_", [("1024", "i32:16"), ("7", "i32"), ("0.5", "fp32"), ("*bf16:16", "*bf16:16")])
def test_a_number_stands_for_its_type(text, type_):
    assert tool.type_of(text) == type_


@pytest.mark.parametrize(
    "text, value",
    [("128", 128), ("True", True), ("None", None), ("WIDTH", 128), ("bf16", "dtype:bf16"), ("tf32", "tf32")],
)
def test_a_constant_is_a_literal_a_name_a_dtype_or_text(text, value):
    assert tool.constant(text, own) == value


# ---------------------------------------------------------------------------------------------------------------- roles


def test_blocks_of_roles_and_their_names():
    blocks = sass.blocks_of(own.first_box.fn)
    assert [(b.default, b.replicas, b.comment) for b in blocks] == [
        (True, 1, "reader"), (False, 1, "loader"), (False, None, ""),
    ]  # fmt: skip
    assert sass.names_of(blocks, 4) == ["reader", "loader", "task 2", "task 3"]
    assert sass.labels_of(blocks, ["reader", "loader", "task 2", "task 3"]) == ["reader", "loader", "task 2, task 3"]
    assert sass.blocks_of(own.scale.fn) == []


LISTING = """
\t//## File "/x/k.py", line 10
        /*0010*/                   STL.64 [R1], R4 ;
\t//## File "/x/k.py", line 11
        /*0020*/                   LDL R4, [R1] ;
\t//## File "/x/ring.py", line 3 inlined at "/x/k.py", line 21
\t//## File "/x/k.py", line 21
        /*0030*/                   LDL.128 R4, [R1] ;
        /*0040*/                   STL.U16 [R1], R4 ;
\t//## File "/x/ring.py", line 22
        /*0050*/                   LDL R4, [R1] ;
"""


def test_a_spill_belongs_to_the_role_in_whose_lines_it_lies():
    blocks = [sass.Block(20, 29, True)]
    found = sass.spills_by_role(LISTING, "/x/k.py", blocks, ["mma"])
    # the load at line 11 comes right before the role's first line; line 22 is another file's
    assert found == {sass.BEFORE: (8, 4), "mma": (2, 20)}
    assert sass.spills_by_role(LISTING, "/x/k.py", [], []) == {sass.WHOLE: (10, 24)}
    assert sass.spills_by_role("", "/x/k.py", blocks, ["mma"]) == {}


def test_without_a_disassembler_the_report_says_so(monkeypatch):
    from jfa.compiled import worker

    def none(cubin):
        raise sass.NoDisassembler("no nvdisasm here")

    monkeypatch.setattr(sass, "disassemble", none)
    report = Report("k", 90, spill_stores=8)
    asm = {"ttgir": "", "ptx": "", "cubin": b""}
    worker.look_at_roles(report, own.scale, asm, {"num_warps": 4, "roles": (), "folders": {}})
    assert report.note == "no nvdisasm here" and report.role_spills == {} and "no nvdisasm here" in report.to_text()
    assert SimpleNamespace(**report.to_json()).note == report.note
