"""Every portable variant of the tile table compiles, fits, and spills no more than recorded. No GPU needed."""

import pytest

triton = pytest.importorskip("triton")
if not triton.__version__.endswith("+fb"):
    pytest.skip("the records were made with fbtriton's compiler", allow_module_level=True)

from jfa.compiled import compile_configs, select, shipped_configs  # noqa: E402


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_shipped_variants_compile_as_recorded(arch):
    reports = compile_configs(select(shipped_configs(), ["portable-*"]), [arch])
    assert reports and {r.key: r.problems for r in reports if r.problems} == {}
