"""Every shipped variant compiles for sm_90, fits, spills no more than recorded, and its products run asynchronously."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
if not triton.__version__.endswith("+fb"):
    pytest.skip("compiling TLX needs fbtriton", allow_module_level=True)

from jfa.compiled import compile_configs, select, shipped_configs  # noqa: E402


@pytest.mark.parametrize("family", ["forward-*", "backward-d*", "backward-resident-*", "both-*", "[!fb]*"])
def test_shipped_variants_compile_as_recorded(family):
    reports = compile_configs(select(shipped_configs(), [f"hopper-{family}"]))
    assert {r.key: r.problems for r in reports if r.problems} == {}
