"""What the clock's model says of the forward: the tensor cores' share, beside the public kernels in the same model."""

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("greenlet")

from jfa.emulator.rates import B200  # noqa: E402
from jfa.kernels.blackwell import modelled  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_long_tiles_keep_the_tensor_cores_busy():
    assert modelled.measures()["forward, long tile"](B200) >= 0.71


@pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="only fbtriton ships the TLX tutorials")
def test_short_tiles_in_a_row_are_ahead_of_the_public_kernels():
    measures = modelled.measures()
    best = max(measures[name](B200) for name in ("tutorial, pipelined persistent", "tutorial, stealing"))
    assert min(measures["forward, static"](B200), measures["forward, stealing"](B200)) > best


def test_doubtful_rates_are_those_without_a_source():
    assert {"barrier", "wakeup", "tmem_read", "tma_latency"} <= set(modelled.uncertain(B200))
    assert not {"mufu", "tensor_2", "smem"} & set(modelled.uncertain(B200))
