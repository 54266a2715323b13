"""What the tools' arguments name, and one sentence for each that names nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.language.extra.tlx")

from jfa.workbench import targets  # noqa: E402
from jfa.workbench.recording import launches_of  # noqa: E402
from jfa.workbench.targets import TargetError  # noqa: E402
from tests.support import ROOT  # noqa: E402

OWN = str(ROOT / "tests" / "workbench" / "own.py")


def test_a_file_and_a_module_name_kernels_and_launches():
    assert targets.find(f"{OWN}:scale").kernel is not None and targets.find(f"{OWN}:launch").launch is not None
    assert targets.find("tests.workbench.own:scale").kernel is not None
    assert targets.launch_of(f"{OWN}:launch").launch()[4] == 2.0


@pytest.mark.parametrize(
    "what, sentence",
    [
        ("nothing", "'nothing' is none of FILE.py:FUNCTION, MODULE:FUNCTION"),
        ("missing.py:launch", "there is no file missing.py"),
        ("no_such_module:launch", "there is no module no_such_module"),
        (f"{OWN}:lunch", "has no lunch; did you mean launch?"),
        (f"{OWN}:zzz", "has no zzz; it has scale, first_box"),
        (f"{OWN}:SOME_NUMBER", "is a int, not a kernel or a function"),
        (f"{OWN}:needs", r"needs arguments \(size\)"),
    ],
)
def test_what_names_nothing_is_told_in_a_sentence(what, sentence):
    with pytest.raises(TargetError, match=sentence) as error:
        targets.find(what)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("import triton\nx = 1 / 0\n", r"mine.py raises ZeroDivisionError, line 2: division by zero"),
        ("def f(:\n    pass\n", r"mine.py raises SyntaxError, line 1"),
        ("import missing_one\n", r"mine.py raises ModuleNotFoundError, line 1: No module named 'missing_one'"),
    ],
)
def test_a_file_that_fails_names_its_line(tmp_path, text, sentence):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(TargetError, match=sentence):
        targets.find(f"{tmp_path}/mine.py:f")


def test_a_file_may_import_what_lies_beside_it_and_bear_any_name(tmp_path):
    (tmp_path / "beside_it.py").write_text("VALUE = 7\n")
    (tmp_path / "json.py").write_text("from beside_it import VALUE\n\n\ndef launch():\n    return VALUE\n")
    assert targets.find(f"{tmp_path}/json.py:launch").launch() == 7
    import json

    assert json.loads("[1]") == [1], "the standard library's module is still there"


def test_a_kernel_is_no_launch_but_the_file_has_some():
    with pytest.raises(TargetError, match="scale is a kernel: name a function .* such as launch, launch_box"):
        targets.launch_of(f"{OWN}:scale")


def test_several_shipped_names_are_not_one():
    with pytest.raises(TargetError, match="matches .* configurations, .* first: name one"):
        targets.launch_of("hopper-forward-*")


def test_launches_are_noted_without_running_the_kernel():
    first, second = launches_of(targets.find(f"{OWN}:launch_two").launch)
    assert (first.kernel.fn.__name__, second.kernel.fn.__name__) == ("scale", "first_box")
    types = {name: text.removesuffix(":16") for name, text in first.signature.items()}
    assert types == {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "factor": "fp32"}
    assert first.constexprs == {"BLOCK": 128, "POWER": 1} and first.options == {"num_warps": 2}
    assert second.signature["x_desc"] == "tensordesc<bf16[64, 64]>"


def test_what_a_function_raises_after_its_launch_does_not_matter():
    (only,) = launches_of(targets.find(f"{OWN}:reads_its_result").launch)
    assert only.kernel.fn.__name__ == "scale"
    with pytest.raises(IndexError):
        launches_of(targets.find(f"{OWN}:fails").launch)


def test_numbers_that_triton_makes_constant_are_constants():
    import torch

    from tests.workbench import own

    def launch(n):
        own.scale[(1,)](torch.ones(8), torch.empty(8), n, 1.0, BLOCK=8)

    one, sixteen, seven = (launches_of(lambda n=n: launch(n))[0] for n in (1, 16, 7))
    assert one.constexprs["n"] == 1 and "n" not in one.signature
    assert (sixteen.signature["n"], seven.signature["n"]) == ("i32:16", "i32")
