"""Generated kernels: the emulator takes and refuses what the compiler takes and refuses, and computes what torch computes.

A batch is compiled in one process. A disagreement prints the kernel: mend it and keep it in agreed.py.
"""

import pytest
import torch
import triton

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, settings, strategies  # noqa: E402

import jfa.emulator as emulator  # noqa: E402

from . import agreed, generated, generated_wide  # noqa: E402
from .verdict import Kernel, compiled, load  # noqa: E402

emulator.install()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="the generator knows fbtriton"),
]
BATCH = 25


def sample(batches):
    """Settings for so many batches, the same ones each time; no shrinking, for a batch that fails names its kernels."""
    return settings(
        max_examples=batches, derandomize=True, deadline=None, phases=[Phase.generate], database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def emulated(text, arch=100):
    """(refusal or "", what the kernel stored, its x).

    A finding at run time is no refusal, for the compiler runs no kernels; what stands after it is not known: None.
    """
    x, out = torch.randn(4096, generator=torch.Generator().manual_seed(1)), torch.zeros(4096)
    try:
        with emulator.options(arch=arch, max_steps=3000):
            emulator.run(load(text), (1,), x, out, generated.RUN_TIME, N=generated.N, report="raise")
    except emulator.EmulatorError as error:
        refusals = emulator.errors.LimitError, emulator.errors.ClusterError
        limit = isinstance(error, refusals) and not isinstance(error, emulator.errors.BufferIndexError)
        return (type(error).__name__ if limit else None), None, x
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[-1][-200:]}", None, x
    return "", out[: generated.N], x


def disagreements(kernels, stage, arch):
    """Texts of the (source, reference) pairs on which the two differ, with what each said."""
    asked = [Kernel(text, generated.SIGNATURE, generated.CONSTANTS, arch=arch, stage=stage) for text, _ in kernels]
    found = []
    for (text, reference), refusal in zip(kernels, compiled(asked)):
        said, out, x = emulated(text, arch)
        if bool(said) != bool(refusal) and not (said is None and refusal):
            found.append(f"{text}compiler: {refusal[-300:] or 'compiles'}\nemulator: {said or 'runs'}")
        elif reference is not None and out is not None and not torch.allclose(out, reference(x), atol=1e-3, rtol=1e-4):
            found.append(f"{text}other numbers than torch's")
    return found


def _test(strategy, batches, stage, arch):
    @sample(batches)
    @given(strategies.lists(strategy, min_size=BATCH, max_size=BATCH))
    def check(kernels):
        found = disagreements(kernels, stage, arch)
        assert not found, "\n\n".join(found)

    check()


WIDE_TRITON, WIDE_TLX = (
    made.map(lambda text: (text, None)) for made in (generated_wide.triton_kernels(), generated_wide.tlx_kernels())
)
OBJECTS = generated_wide.object_kernels().map(lambda text: (text, None))
TRITON, TLX = generated.triton_kernels(), generated.tlx_kernels().map(lambda text: (text, None))


def test_a_sample_of_triton_kernels():
    _test(TRITON, 2, "ttir", 90)


@pytest.mark.slow
def test_a_sample_of_tlx_kernels():
    _test(TLX, 1, "ttgir", 100)


def test_a_sample_of_longer_kernels():
    _test(WIDE_TRITON, 1, "ttir", 90)
    _test(WIDE_TLX, 1, "ttgir", 100)


def test_a_sample_of_kernels_of_aggregates_and_descriptors():
    _test(OBJECTS, 1, "ttir", 90)


@pytest.mark.slow
def test_many_kernels_of_aggregates_and_descriptors():
    _test(OBJECTS, 12, "ttir", 90)


@pytest.mark.slow
def test_many_longer_triton_kernels():
    _test(WIDE_TRITON, 14, "ttir", 90)


@pytest.mark.slow
def test_many_longer_tlx_kernels():
    _test(WIDE_TLX, 6, "ttgir", 100)


@pytest.mark.slow
def test_many_triton_kernels():
    _test(TRITON, 14, "ttir", 90)


@pytest.mark.slow
def test_many_tlx_kernels():
    _test(TLX, 6, "ttgir", 100)


# What the compiler knows of a tuple that becomes a constant in both branches is its own secret.
UNLIKE = "k = (1, n)\n    if n > 1:\n        for k in tl.static_range(1):"


def _agree_on_names(step, start=0):
    texts = [text for text in generated.names_through_control_flow() if UNLIKE not in text][start::step]
    found = disagreements([(text, None) for text in texts], "ttir", 90)
    assert not found, "\n\n".join(found)


def test_a_sample_of_names_through_branches_and_loops():
    _agree_on_names(step=29)


@pytest.mark.slow
def test_names_through_branches_and_loops():
    _agree_on_names(step=1)


def _agree(lines, stage, arch):
    kernels = [(generated.HEAD + "".join(f"    {line}\n" for line in body), None) for body in lines.values()]
    found = disagreements(kernels, stage, arch)
    assert not found, "\n\n".join(found)


def test_constants_branches_and_names_that_once_differed():
    _agree(agreed.LANGUAGE, "ttir", 90)


@pytest.mark.slow
def test_tlx_calls_that_once_differed():
    _agree(agreed.TLX, "ttgir", 100)
