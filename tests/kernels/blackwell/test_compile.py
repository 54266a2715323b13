"""The shipped Blackwell configurations compile for sm_100 and sm_103, fit, and spill no more than recorded. No GPU needed."""

from concurrent.futures import ThreadPoolExecutor

import pytest

triton = pytest.importorskip("triton")
if not triton.__version__.endswith("+fb"):
    pytest.skip("compiling TLX needs fbtriton", allow_module_level=True)

from jfa.compiled import compile_configs, select  # noqa: E402
from jfa.kernels.blackwell import variants  # noqa: E402

# One of each kernel, both head dims, both schedulers; the others differ from these in a mask.
MAIN = [
    "blackwell-forward-d128-full-static",
    "blackwell-forward-d128-causal-clc",
    "blackwell-forward-d64-pma-static",
    "blackwell-backward-d128-causal-static",
    "blackwell-backward-d64-full-static",
    "blackwell-backward-pair-d128-full-clc",
    "blackwell-backward-resident-d128",
    "blackwell-dq-d128-causal",
    "blackwell-backward-wide-d192-causal",
    "blackwell-dq-wide-d192-window",
    "blackwell-mxfp8-forward-d128-full-clc",
    "blackwell-mxfp8-forward-d64-causal-static",
    "blackwell-mxfp8-backward-d128-causal-clc",
    "blackwell-list-keys",
    "blackwell-blocks",
]


def check(names: list[str]) -> None:
    chosen = select(variants.compile_configs(), names)
    with ThreadPoolExecutor(2) as two:  # a compiler each
        reports = [r for half in two.map(compile_configs, (chosen[::2], chosen[1::2])) for r in half]
    problems = {r.key: r.problems for r in reports if r.problems}
    assert not problems, problems
    # So no launch needs an allocator, whichever thread it comes from.
    assert not [r.key for r in reports if r.global_scratch]


def test_main_configurations():
    check(MAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        "forward",
        "backward-d64",
        "backward-d128",
        "backward-pair",
        "backward-resident",
        "backward-wide",
        "dq",
        "mxfp8-forward",
        "mxfp8-backward",
        "plain",
        "list",
    ],
)
def test_all_configurations(kernel):
    check([f"blackwell-{kernel}-*"])


def test_every_kernel_ships_a_configuration():
    kernels = {c.kernel.split(":")[0].rsplit(".", 1)[1] for c in variants.compile_configs()}
    assert kernels == {
        "forward",
        "backward_1cta",
        "backward_2cta",
        "backward_resident",
        "backward_dq",
        "backward_dq_wide",
        "backward_wide",
        "mxfp8_forward",
        "mxfp8_backward",
        "plain",
        "tile_list",
        "padded_rows",
    }
