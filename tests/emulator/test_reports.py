"""The reports a learner reads, kept as golden texts: each names the line and the usual cause.

JFA_WRITE_GOLDEN=1 writes them anew; read the difference before committing it.
"""

import os
from pathlib import Path

import pytest
import torch

import jfa.emulator as emulator
from jfa.emulator import errors

pytest.importorskip("triton.language.extra.tlx")
from .reports import kernels  # noqa: E402

GOLDEN = Path(__file__).parent / "reports"
EXPECTED = {
    "dropped arrive": errors.DeadlockError,
    "dropped wait": errors.PoisonError,
    "flipped phase": errors.EmulatorError,
    "wrong expect-bytes": errors.ExpectBytesError,
    "missing fence": errors.MissingFenceError,
}


def _compare(name, text):
    path = GOLDEN / (name.replace(" ", "-") + ".txt")
    if os.environ.get("JFA_WRITE_GOLDEN"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


@pytest.mark.parametrize("policy", ["eager", "lazy", "random", "timed"])
def test_the_whole_pipeline_runs_clean(policy):
    with emulator.options(policy=policy, fences="strict"):
        out, expected = kernels.double()
    assert torch.equal(out, expected) and emulator.last().clean and not emulator.last().warnings


@pytest.mark.parametrize("name", kernels.FAULTS)
def test_report(name):
    with emulator.options(fences="strict"), pytest.raises(EXPECTED[name]) as error:
        kernels.double(name)
    text = f"{type(error.value).__name__}: {error.value}"
    assert "kernels.py:" in text and "Usual cause:" in text
    _compare(name, text)


@pytest.mark.parametrize("name", kernels.FAULTS)
@pytest.mark.parametrize("policy", ["lazy", "random", "timed"])
def test_every_policy_finds_it(name, policy):
    with emulator.options(policy=policy, fences="strict", seed=3), pytest.raises(errors.EmulatorError):
        kernels.double(name)


def test_tensor_memory_overflow():
    with emulator.options(), pytest.raises(errors.TensorMemoryError) as error:
        kernels.too_much_tensor_memory[(1,)](torch.zeros(1))
    _compare("tmem overflow", f"TensorMemoryError: {error.value}")


def test_a_missing_fence_alone_is_a_warning_that_says_the_same():
    with emulator.options(), pytest.warns(errors.EmulatorWarning, match="never fenced"):
        kernels.double("missing fence")


def test_collect_gathers_instead_of_raising():
    with emulator.options(report="collect", fences="strict"):
        kernels.double("missing fence")
    kinds = {type(f) for f in emulator.last().findings}
    assert kinds == {errors.MissingFenceError}
