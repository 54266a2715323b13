"""Every name of triton.language works on the emulator or is refused by name; this test keeps the list of refusals honest."""

import inspect
import re

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core, math, random, semantic, standard

import jfa.emulator as emulator
from jfa.emulator.errors import NotSupported
from jfa.emulator.frontend import binding, language
from jfa.emulator.frontend.access import MemoryBuilder

emulator.install()

REFUSED = {"_experimental_reinterpret_tensor_descriptor"}
# Builder operations that the emulator's own tl functions make unnecessary (reductions, scans, descriptors), or that only IR needs.
REPLACED = {
    "create_block_with_parent", "create_descriptor_gather", "create_descriptor_reduce", "create_descriptor_scatter",
    "create_make_tensor_descriptor", "create_map_elementwise", "create_map_elementwise_ret", "create_name_loc", "create_reduce",
    "create_reduce_ret", "create_scan", "create_scan_ret", "create_tensor_descriptor_type", "create_atomic_load",
    "create_atomic_poll", "create_atomic_store", "get_cache_policy", "get_insertion_point", "get_loc",
    # descriptors in a workspace, of the experimental API: refused by name
    "create_reinterpret_tensor_descriptor", "create_tensormap_create", "create_tensormap_fenceproxy_acquire",
}  # fmt: skip


def public_names():
    names = set(tl.__all__) | {n for n in dir(tl) if n.startswith("_experimental")}
    return sorted(n for n in names if hasattr(tl, n))


@pytest.mark.parametrize("name", public_names())
def test_every_name_binds(name):
    bound = binding.bind(getattr(tl, name))
    assert bound is not None
    if name in REFUSED:
        with pytest.raises(NotSupported, match=name):
            bound()
    else:
        assert getattr(bound, "__name__", "") != "refused"


def test_the_builder_has_every_operation_of_the_language():
    used = set()
    for module in (core, math, random, semantic, standard):
        used |= set(re.findall(r"builder\.(create_\w+|get_\w+)", inspect.getsource(module)))
    missing = {n for n in used if not n.endswith("_ty") and not hasattr(MemoryBuilder, n)}
    assert missing <= REPLACED


def test_member_functions_of_tensors_are_emulated():
    for name in dir(tl.tensor):
        if name.startswith("__"):
            continue  # operators have tests of their own
        member = getattr(tl.tensor, name)
        if getattr(member, "__triton_builtin__", False) or binding.is_jit(member):
            assert getattr(binding.Tensor, name) is not member, name


def test_an_unknown_builder_operation_is_refused_by_name():
    with pytest.raises(NotSupported, match="elementwise_teleport"):
        language.BUILDER.create_elementwise_teleport()


@triton.jit
def every_dtype(o, x):
    v = tl.load(x + tl.arange(0, 16))
    r = v.to(tl.float16).to(tl.bfloat16).to(tl.float8e5).to(tl.float8e4nv).to(tl.float32)
    r += v.to(tl.int8).to(tl.int16).to(tl.int32).to(tl.int64).to(tl.float64).to(tl.float32)
    r += v.to(tl.uint8).to(tl.uint16).to(tl.uint32).to(tl.uint64).to(tl.float32)
    r += v.to(tl.float8e4b15).to(tl.float32)
    r += (v > 0).to(tl.int1).to(tl.float32)
    tl.store(o + tl.arange(0, 16), r)


def test_every_dtype():
    x, out = torch.full((16,), 1.5), torch.empty(16)
    every_dtype[(1,)](out, x)
    assert (out == 1.5 + 1 + 1 + 1.5 + 1).all()


@triton.jit
def of_another_vendor(x, TO: tl.constexpr):
    tl.load(x + tl.arange(0, 16)).to(TO)


@pytest.mark.parametrize("dtype", [tl.float8e4b8, tl.float8e5b16], ids=str)
def test_types_that_nvidia_has_not_are_refused(dtype):
    with pytest.raises(triton.CompilationError, match="not supported in this architecture"):
        of_another_vendor[(1,)](torch.zeros(16), dtype)
