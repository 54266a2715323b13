"""Every synchronisation of chapter 12's last version broken in turn: the emulator finds each, or it is argued here why it need not.

One CTA takes several tiles, so that every ring and every parity wraps; maxima move, so that the accumulator is rescaled.
"""

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")
pytest.importorskip("triton.language.extra.tlx")

import jfa.emulator as emulator  # noqa: E402
from tests.kernels.blackwell.ladder import load, problem, run_last  # noqa: E402
from tests.kernels.sweeping import clean_mutants, explored  # noqa: E402

TILES_AND_BLOCKS = ((2, 3), (3, 2), (3, 1))
# (how, the broken line): why nothing needs to find it.
ARGUED = {
    (
        "late",
        "tlx.barrier_wait(o.empties[part], ((2 * done + half) & 1) ^ 1)",
    ): "put off by one operation, the load of O from the accumulator, which does not touch the part's buffer",
}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """A function of (tiles, blocks) that returns a launch of the chapter's last version."""
    chapter = load(tmp_path_factory.mktemp("chapter"))

    def launcher(tiles, blocks):
        tensors = problem(tiles, blocks, seed=1, lift=6.0)
        return lambda: list(run_last(chapter, *tensors))

    return launcher


def test_a_sample_of_broken_synchronisations_is_found(launcher):
    judged, clean = clean_mutants([launcher(*TILES_AND_BLOCKS[2])], every=7)
    assert len(judged) > 5
    assert clean <= ARGUED.keys()


@pytest.mark.slow
def test_every_broken_synchronisation_is_found_or_argued(launcher):
    judged, clean = clean_mutants([launcher(*shape) for shape in TILES_AND_BLOCKS])
    assert len(judged) > 50
    assert clean == ARGUED.keys(), "either nothing finds a mutant, or one that was argued away is found after all"


@pytest.mark.slow
def test_what_is_argued_is_proved_for_an_instance(launcher):
    """No schedule of this launch goes wrong with an argued mutant: the argument holds here, whatever the clock does."""
    found = explored(launcher(1, 1), ARGUED)
    assert found.keys() == ARGUED.keys()
    assert {key: str(one) for key, one in found.items() if not one.proved} == {}


@pytest.mark.parametrize("fences", ["compiler", "strict"])
def test_the_last_version_needs_no_fence_of_the_compiler(launcher, fences):
    with emulator.options(fences=fences):
        launcher(2, 1)()
    assert emulator.last().clean
