"""Every name of fbtriton's tlx.__all__ works or is refused by name; only AMD's are refused."""

import inspect

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator
from jfa.emulator import errors
from jfa.emulator import tlx as emulated
from jfa.emulator.tlx.api import LEFT_OUT

wheel = pytest.importorskip("triton.language.extra.tlx")
if not triton.__version__.endswith("+fb"):
    pytest.skip("this Triton has no TLX of its own to compare with", allow_module_level=True)


def test_every_name_is_there():
    missing = [name for name in wheel.__all__ if not hasattr(emulated, name)]
    assert missing == []


def test_only_amd_names_are_refused():
    assert set(emulated.AMD_ONLY) == {
        "amd_descriptor_prefetch_tensor",
        "async_amd_descriptor_load",
        "async_amd_descriptor_store",
        "async_amd_descriptor_wait",
        "buffer_load",
        "buffer_load_to_local",
        "buffer_store",
        "warp_pipeline_stage",
    }


@pytest.mark.parametrize("name", emulated.AMD_ONLY)
def test_amd_names_say_so(name):
    with jfa.emulator.options(), pytest.raises(errors.NotSupported, match="AMD"):
        getattr(emulated, name)()


FUNCTIONS = [n for n in wheel.__all__ if inspect.isfunction(getattr(wheel, n, None)) and n not in emulated.AMD_ONLY]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_the_wheel_s(name):
    """Same parameter names in the same order (but the compiler's own), same defaults."""
    theirs = inspect.signature(inspect.unwrap(getattr(wheel, name))).parameters
    ours = inspect.signature(inspect.unwrap(getattr(emulated, name))).parameters
    expected = [p for p in theirs if p not in ("_semantic", "_builder")]
    assert [p for p in ours if not p.startswith("_")] == expected
    for parameter in expected:
        want, got = theirs[parameter].default, ours[parameter].default
        if want is inspect.Parameter.empty:
            continue  # ours may be more generous: async_descriptor_store_wait() is fine
        want = getattr(want, "value", want)
        got = None if got is LEFT_OUT else getattr(got, "value", got)
        assert (list(got) if isinstance(got, (list, tuple)) else got) == (
            list(want) if isinstance(want, (list, tuple)) else want
        )


def test_tlx_outside_a_kernel_says_where_it_belongs():
    with pytest.raises(RuntimeError, match="inside a kernel"):
        emulated.cluster_cta_rank()


@triton.jit
def _uses_amd(out):
    wheel.async_amd_descriptor_wait(0)
    tl.store(out, 1)


def test_an_amd_name_in_a_kernel_is_refused_by_name():
    with jfa.emulator.options(), pytest.raises(errors.NotSupported, match="async_amd_descriptor_wait"):
        _uses_amd[(1,)](torch.zeros(1))
