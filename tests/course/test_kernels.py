"""Kernel exercises: they run on the emulator, whose reports are the message, and loads and blocks are counted."""

import sys
import types

import pytest

pytest.importorskip("triton")

from jfa.course import catalog  # noqa: E402
from jfa.course.answers import Pristine, from_source  # noqa: E402
from jfa.course.grade import Source, grade  # noqa: E402
from jfa.course.judge import judge  # noqa: E402
from jfa.course.mutant_table import run_mutants  # noqa: E402

HEAD = "@triton.jit\ndef twice_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):\n    rows = tl.program_id(0) * BLOCK + "
TAIL = "\n    tl.store(out_ptr + rows, 2 * tl.load(x_ptr + rows, mask=rows < n, other=0.0), mask=rows < n)\n"


@pytest.fixture
def kernel(toy_kernels):
    pristine = Pristine.load(toy_kernels, "91_kernels")

    def run(source):
        exercise = catalog.exercise("91.1")
        return judge(exercise, from_source(source, exercise, pristine), toy_kernels)

    return run


def test_solutions_variants_and_stubs(toy_kernels, kernel):
    exercises = catalog.select(["91"])
    results = grade(exercises, Source(toy_kernels, "solutions"))
    assert all(r.passed and not r.notes for r in results), [r.text() for r in results]
    assert [r.state for r in grade(exercises, Source(toy_kernels))] == ["not started"] * 3
    for variant in exercises[0].variants:
        assert kernel(variant).passed, kernel(variant).text()


def test_mutants_are_caught_as_declared(toy_kernels):
    assert [row.fault for row in run_mutants(catalog.select(["91"]), toy_kernels) if row.fault] == []


@pytest.mark.parametrize(
    "source, words",
    [
        ("BLK = 16\n" + HEAD + "tl.arange(0, BLK)" + TAIL, "global variable BLK"),
        (HEAD + "tl.arange(0, BLOCK)\n    a = tl.zeros([4, 4], tl.float32)\n    b = tl.dot(a, a)" + TAIL, "dot"),
        (HEAD + "tl.arange(0, 200)" + TAIL, "power of 2"),
        (HEAD + "tl.arange(0, BLOCK)\n    for i in range(2):\n        break" + TAIL, "Break"),
    ],
    ids=["plain global", "4x4 dot", "block of 200", "break"],
)
def test_what_a_gpu_refuses_is_said_not_to_compile(kernel, source, words):
    """TR-7"""
    result = kernel(source)
    assert result.failed.name == "runs" and "It will not compile on a GPU" in result.message and words in result.message


@pytest.mark.parametrize(
    "source, what",
    [
        ("def twice_kernel(*a, **k):\n    return None", "a plain function"),
        ("class Host:\n    def __getitem__(self, grid):\n        return self.run\n    def run(self, x, out, *a, **k):\n"
         "        out.copy_(2 * x)\n\ntwice_kernel = Host()", "a Host"),
        (HEAD.replace("twice_kernel", "inner") + "tl.arange(0, BLOCK)" + TAIL + "\nimport functools\n"
         "twice_kernel = functools.partial(inner)", "a partial"),
        ("class Kernel(triton.runtime.JITFunction):\n    pass\n\n" + HEAD + "tl.arange(0, BLOCK)" + TAIL
         + "\ntwice_kernel = Kernel(twice_kernel.fn)", "a Kernel"),
    ],
    ids=["function", "object with a grid", "partial", "subclass"],
)  # fmt: skip
def test_what_computes_on_the_host_is_no_kernel(kernel, source, what):
    result = kernel(source)
    assert result.failed.name == "runs" and f"`twice_kernel` is {what}, and no kernel" in result.message, result.text()


def test_a_tuned_kernel_is_a_kernel(kernel):
    tuned = "@triton.heuristics({})\n" + HEAD + "tl.arange(0, BLOCK)" + TAIL
    assert kernel(tuned).passed, kernel(tuned).text()


@pytest.mark.parametrize("interpret", [None, "1"])
def test_a_kernel_in_a_cell_needs_no_file(toy_kernels, monkeypatch, interpret):
    """TR-8"""
    from jfa.course import nursery_client

    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    nursery_client.close_nursery()
    try:
        result = grade([catalog.exercise("91.1")], Source(toy_kernels, "solutions"))[0]
        assert result.passed, result.text()
    finally:
        nursery_client.close_nursery()


def test_an_out_of_bounds_access_is_the_emulators_report(kernel):
    result = kernel(HEAD + "tl.arange(0, BLOCK)\n    tl.store(out_ptr + rows, 2 * tl.load(x_ptr + rows))\n")
    assert result.failed.name == "runs" and "OutOfBoundsError" in result.message and "x_ptr" in result.message


@pytest.mark.parametrize("left", [None, "an empty folder"])
def test_a_broken_triton_is_not_the_answers_fault(kernel, monkeypatch, left):
    """None in sys.modules: no Triton at all. An uninstall of another Triton's package leaves an empty folder of fbtriton's."""
    monkeypatch.setitem(sys.modules, "triton", left and types.ModuleType("triton"))
    (note,) = [n for n in kernel(HEAD + "0" + TAIL).notes if "Triton does not work here" in n]
    assert "no fault of your answer" in note and "jfa doctor" in note
