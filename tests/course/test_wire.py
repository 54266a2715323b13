"""The wire: every value that exercises use arrives as it was, and no bytes can do more than be numbers."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfa.course.wire import Other, WireError, pack, unpack

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
]
DTYPES += [torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
DTYPES += [torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_tensors_arrive_bit_for_bit(dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 5).to(dtype)
    again = unpack(pack(tensor))
    assert again.dtype == dtype and again.shape == tensor.shape
    if tensor.numel():
        assert torch.equal(again.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_views_and_gradients():
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    again = unpack(pack({"t": x.T, "leaf": x}))
    assert torch.equal(again["t"], x.T) and again["leaf"].requires_grad


def test_a_lone_element_of_stride_0():
    lone = torch.tensor(2.5).expand(1, 1)
    assert lone.stride() == (0, 0)
    assert torch.equal(unpack(pack(lone)), torch.tensor([[2.5]]))


def test_nested_tensors():
    parts = [torch.randn(2, 4), torch.randn(0, 4), torch.randn(3, 4)]
    for layout in (torch.jagged, torch.strided):
        again = unpack(pack(torch.nested.nested_tensor(parts, layout=layout)))
        assert again.layout == layout and all(torch.equal(a, b) for a, b in zip(again.unbind(), parts))


_TEXT = st.text(st.characters(exclude_categories=("Cs",)))
_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(_PLAIN)
def test_plain_values_arrive_as_they_were(value):
    assert repr(unpack(pack(value))) == repr(value)


def test_arrays_tuples_and_strangers():
    again = unpack(pack((np.arange(3, dtype=np.int16), np.float32(2.5), object(), lambda: 0)))
    assert isinstance(again, tuple) and again[0].dtype == np.int16 and float(again[1]) == 2.5
    assert isinstance(again[2], Other) and again[3].type_name == "function"


def _message(tree, blob=b""):
    text = json.dumps(tree).encode()
    return struct.pack("<QQ", len(text), len(blob)) + text + blob


BAD = [
    b"", b"\x80\x04K\x01.", _message({"t": "nonsense"}),
    _message({"t": "tensor", "dtype": "float32", "shape": [2**60], "at": 0, "grad": False}),
    _message({"t": "tensor", "dtype": "float32", "shape": [-1], "at": 0, "grad": False}),
    _message({"t": "tensor", "dtype": "float32", "shape": [1.5], "at": 0, "grad": False}),
    _message({"t": "tensor", "dtype": "object", "shape": [1], "at": 0, "grad": False}, b"12345678"),
    _message({"t": "array", "dtype": "O", "shape": [1], "at": 0}, b"12345678"),
    _message({"t": "tensor", "dtype": "float32", "shape": [2], "at": 4, "grad": False}, b"12345678"),
    _message({"t": "nested", "jagged": True, "v": [None, None]}),
    _message([1, 2]), _message(3.5), _message({"t": "int", "v": "9" * 10000}), struct.pack("<QQ", 2**63, 2**63),
]  # fmt: skip


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_malformed_messages_are_refused(data):
    with pytest.raises(WireError):
        unpack(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_noise_is_refused_or_plain(data):
    try:
        unpack(data)
    except WireError:
        pass
