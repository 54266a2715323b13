"""Every backward variant compiles for sm_90, fits, spills no more than recorded, and its products run asynchronously."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
if not triton.__version__.endswith("+fb"):
    pytest.skip("compiling TLX needs fbtriton", allow_module_level=True)

from jfa.compiled import compile_configs  # noqa: E402
from jfa.kernels.hopper import backward, backward_dq, backward_shared_q  # noqa: E402


@pytest.mark.parametrize("module", [backward, backward_dq, backward_shared_q], ids=lambda m: m.__name__.rsplit(".", 1)[1])
def test_shipped_variants_compile_as_recorded(module):
    assert {r.key: r.problems for r in compile_configs(module.compile_configs()) if r.problems} == {}
