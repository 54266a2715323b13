"""Layouts and enumerations: TLX's own classes where Triton has TLX, stand-ins with the same names and checks
elsewhere."""

from __future__ import annotations

import enum
from typing import Any

try:
    from triton.language.extra.tlx.types import (  # the wheel's own classes: host code and kernels share them
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
except ImportError:

    class storage_kind(enum.Enum):
        smem = "smem"
        tmem = "tmem"
        smemCluster = "smemCluster"

    class reuse_group_type(enum.Enum):
        shared = "shared"
        distinct = "distinct"

    class TMemCTAMode:
        DEFAULT, TwoCTA_LHS, TwoCTA_RHS = 0, 1, 2

    class layout_encoding:
        """Any layout: the emulator stores tiles in logical order, so a layout is passed on without effect."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.arguments = (args, kwargs)

        @classmethod
        def make_default(cls, *args: Any, **kwargs: Any) -> layout_encoding:
            return cls(*args, **kwargs)

        def make_permute(self, dims: Any) -> layout_encoding:
            return self

        def __repr__(self) -> str:
            return type(self).__name__

    class shared_layout_encoding(layout_encoding):
        pass

    class swizzled_shared_layout_encoding(shared_layout_encoding):
        pass

    class padded_shared_layout_encoding(shared_layout_encoding):
        with_bases = with_identity_for = classmethod(lambda cls, *args, **kwargs: cls(*args, **kwargs))

    class tensor_memory_layout_encoding(shared_layout_encoding):
        pass

    class nv_mma_shared_layout_encoding(shared_layout_encoding):
        pass

    class swizzled_layout(layout_encoding):
        pass

    class layout(layout_encoding):
        pass

    class DummyRegisterLayoutEncoding(layout_encoding):
        pass


_swizzled: Any = swizzled_shared_layout_encoding


class _SwizzledInKernels(_swizzled):
    """The class as kernels name it: a number that a kernel gives by keyword stays a constexpr, which it cannot repeat a list by."""

    @classmethod
    def make_default(cls, *args: Any, **kwargs: Any) -> layout_encoding:
        if kwargs:
            raise TypeError("object of type 'constexpr' has no len(): give make_default the rank by position")
        return _swizzled.make_default(*args)


_SwizzledInKernels.__name__ = _swizzled.__name__
swizzled_shared_layout_encoding = _SwizzledInKernels

__all__ = [
    *("DummyRegisterLayoutEncoding", "TMemCTAMode", "layout", "layout_encoding", "nv_mma_shared_layout_encoding"),
    *("padded_shared_layout_encoding", "reuse_group_type", "shared_layout_encoding", "storage_kind", "swizzled_layout"),
    *("swizzled_shared_layout_encoding", "tensor_memory_layout_encoding"),
]
