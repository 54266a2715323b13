"""Exercise 11.6: each fault has one finding, whatever the schedule; and the kernel without a fault is right."""

import pytest
import torch

from jfa.course import catalog
from jfa.emulator import explore

pytest.importorskip("triton.language.extra.tlx")
from jfa.course import broken_gemm  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
(EXERCISE,) = [e for c in catalog.chapters() for e in c.exercises if e.id == "11.6"]
SIZES = [case.args for case in EXERCISE.cases(0)]
FAULTS = list(EXERCISE.reference(1, 1, 1))
SOME = [(1, 1, 1), (2, 1, 2), (3, 1, 3)]


def outcomes(fault, sizes, **bounds):
    """The words for what all schedules of a launch end in, and whether all were run."""
    found = explore.explore(
        lambda: broken_gemm.launch_broken(fault, *sizes),
        expected=broken_gemm.launch_broken("", *sizes),
        stop=False,
        fences="strict",
        **bounds,
    )
    return {broken_gemm.WORDS.get(kind, kind) for kind in found.outcomes}, found.exhausted


def test_without_a_fault_it_is_a_product():
    g = torch.Generator().manual_seed(0)
    a = torch.randn(3 * 128, 2 * 16, generator=g).to(torch.bfloat16)
    b = torch.randn(2 * 16, 32, generator=g).to(torch.bfloat16)
    (c,) = broken_gemm.launch_broken("", 3, 2, 2)
    assert torch.allclose(c.double(), a.double() @ b.double(), atol=1e-5)
    assert outcomes("", (3, 2, 2)) == ({explore.OK}, True)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_one_finding_under_all_schedules(fault):
    for sizes in SOME:
        word = broken_gemm.finding(fault, *sizes)
        assert outcomes(fault, sizes) == ({"ok" if word == "nothing" else word}, True), sizes


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [s for s in SIZES if s not in SOME], ids=str)
def test_the_other_sizes_of_the_exercise_too(sizes):
    for fault in FAULTS:
        word = broken_gemm.finding(fault, *sizes)
        assert outcomes(fault, sizes) == ({"ok" if word == "nothing" else word}, True), fault


def test_the_sizes_show_every_finding_and_its_absence():
    """No fault that depends on the sizes has the same finding for all of them."""
    words = {fault: {broken_gemm.finding(fault, *sizes) for sizes in SIZES} for fault in FAULTS}
    assert {fault for fault, found in words.items() if len(found) == 1} == {"two announcements", "no fence"}
    assert set().union(*words.values()) == {*broken_gemm.WORDS.values(), "nothing"}
