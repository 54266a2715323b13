"""The launches that `jfa timeline` is pointed at run, each ending with the kernel it is named after."""

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from jfa.kernels.blackwell import examples  # noqa: E402

KERNELS = {
    examples.forward: "forward_kernel",
    examples.split_keys: "forward_kernel",
    examples.mxfp8: "mxfp8_forward_kernel",
    examples.plain: "plain_forward_kernel",
    examples.backward: "backward_kernel",
    examples.backward_before: "backward_kernel",
    examples.wide_backward: "wide_backward_kernel",
    examples.wide_dq: "wide_dq_kernel",
}


@pytest.mark.parametrize("launch", KERNELS, ids=lambda f: f.__name__)
def test_example(launch):
    launch()
    assert emulator.last().kernel == KERNELS[launch] and not emulator.last().findings
