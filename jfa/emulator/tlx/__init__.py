"""TLX on the emulated machine: the module that a kernel sees as `tlx` during a launch on CPU tensors.

Every NVIDIA name of fbtriton 3.7.4's `tlx.__all__` is here; AMD's names raise NotSupported when used.
"""

# ruff: noqa: F401
from __future__ import annotations

import sys as _sys
from collections.abc import Callable
from typing import Any

from .. import errors
from ..frontend.extension import register as _register
from ..locations import here, show
from .barriers import (
    alloc_barriers,
    alloc_warp_barrier,
    barrier_arrive,
    barrier_expect_bytes,
    barrier_wait,
    cluster_barrier,
    fence,
    fence_async_shared,
    fence_mbarrier_init_cluster,
    mbarrier,
    named_barrier_arrive,
    named_barrier_wait,
    remote_view,
)
from .buffers import (
    buffered_tensor,
    local_alloc,
    local_gather,
    local_load,
    local_reinterpret,
    local_reshape,
    local_scatter,
    local_slice,
    local_store,
    local_trans,
    local_view,
    reuse_group,
    storage_alias_spec,
    subslice,
)
from .clc import (
    CLCPipelineContext,
    _alloc_clc_responses,
    _clc_issue,
    _clc_query,
    clc_consumer,
    clc_create_context,
    clc_producer,
    clc_response,
)
from .copies import (
    allocate_tensor_descriptor,
    async_descriptor_load,
    async_descriptor_prefetch_tensor,
    async_descriptor_store,
    async_descriptor_store_wait,
    async_load,
    async_load_commit_group,
    async_load_wait_group,
    async_remote_shmem_copy,
    async_remote_shmem_store,
    async_store,
    async_token,
    make_tensor_descriptor,
    prefetch,
    reinterpret_tensor_descriptor,
    remote_shmem_store,
    tensor_descriptor_ptr,
)
from .mma import async_dot, async_dot_scaled, async_dot_wait, require_layout, tcgen05_commit, tmem_copy
from .mxfp8 import _to_mxfp8_block
from .tasks import async_task, async_task_replica_id, async_tasks, register_task, warp_pipeline_stage
from .types import (
    DummyRegisterLayoutEncoding,
    TMemCTAMode,
    layout,
    layout_encoding,
    nv_mma_shared_layout_encoding,
    padded_shared_layout_encoding,
    reuse_group_type,
    shared_layout_encoding,
    storage_kind,
    swizzled_layout,
    swizzled_shared_layout_encoding,
    tensor_memory_layout_encoding,
)
from .utility import (
    assert_same_layout,
    clock64,
    cluster_cta_rank,
    cluster_size_1d,
    dtype_of,
    dump_layout,
    get_fp8_format_name,
    size_of,
    stoch_round,
    thread_id,
    vote_ballot_sync,
    warp_redux,
)


class _TypeOnly:
    """A type of TLX's compiler that a kernel cannot use but may name in an annotation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise errors.NotSupported(f"tlx.{type(self).__name__} is a type of the compiler, not a value of a kernel")


buffered_tensor_type = type("buffered_tensor_type", (_TypeOnly,), {})
storage_alias_spec_type = type("storage_alias_spec_type", (_TypeOnly,), {})
mbarrier_type = type("mbarrier_type", (_TypeOnly,), {})
clc_response_type = type("clc_response_type", (_TypeOnly,), {})
tensor_descriptor_ptr_type = type("tensor_descriptor_ptr_type", (_TypeOnly,), {})
reuse_group_ir_type = type("reuse_group_ir_type", (_TypeOnly,), {})
storage_alias_spec_type_class = storage_alias_spec
CLCPipeliner = CLCPipelineContext

AMD_ONLY = (
    "buffer_load",
    "buffer_load_to_local",
    "buffer_store",
    "async_amd_descriptor_load",
    "async_amd_descriptor_store",
    "async_amd_descriptor_wait",
    "amd_descriptor_prefetch_tensor",
    "warp_pipeline_stage",
)


def _refuse(name: str) -> Callable[..., None]:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise errors.NotSupported(
            f"tlx.{name} exists on AMD only; the emulator models NVIDIA's machine", [f"at {show(here())}"]
        )

    refused.__name__ = name
    return refused


for _name in AMD_ONLY[:-1]:
    globals()[_name] = _refuse(_name)

__all__ = [name for name in dir() if not name.startswith("__")]

_register(_sys.modules[__name__])
