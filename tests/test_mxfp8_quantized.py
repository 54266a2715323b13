"""Inputs in MXFP8 as they are: the bits of precision="mxfp8" in both passes, nothing encoded again, tracers, plans,
explanations, errors."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import jfa
from jfa import mxfp8, reference
from jfa.attention import op, quantized
from jfa.kernels import registry
from jfa.kernels.registry import UnsupportedError
from jfa.mxfp8 import quantize_jagged
from tests.test_mxfp8_op import problem_of
from tests.test_mxfp8_reference import CASES, problem

AXES = {"query": "head_dim", "key": "head_dim", "value": "tokens"}
EVERY = tuple(AXES)
SUBSETS = [names for n in (1, 2, 3) for names in itertools.combinations(EVERY, n)]


def encoded(inputs, names=EVERY, both=False):
    """Return q, k, v, those of ``names`` quantized for their offsets, and the offsets."""
    q, k, v, query_offset, key_offset = inputs
    where = [
        torch.tensor([0, len(q)], dtype=torch.int32) if query_offset is None else query_offset,
        key_offset,
        key_offset,
    ]
    given = zip(AXES.items(), (q, k, v), where)
    three = [quantize_jagged(x, offsets, axis, both=both) if name in names else x for (name, axis), x, offsets in given]
    return *three, query_offset, key_offset


def attend(inputs, options, **more):
    return jfa.jagged_flash_attention(*inputs, **options, **more, return_lse=True)


def same(found, wanted):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_inputs_encoded_by_the_call(case):
    inputs, options, *_ = problem(**CASES[case])
    wanted = attend(inputs, options, precision="mxfp8")
    given = encoded(inputs)
    assert same(attend(given, options), wanted)
    assert same(attend(given, options, precision="mxfp8"), wanted)
    out, lse = reference.mxfp8_attention(*given, **options, return_lse=True, dtype=torch.float32)
    assert same((out.bfloat16(), lse), wanted)


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_each_input_may_come_in_either_form(names):
    for case in ("lengths differ", "shared queries"):
        inputs, options, *_ = problem(**CASES[case], seed=2)
        assert same(attend(encoded(inputs, names), options), attend(inputs, options, precision="mxfp8"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_it_was_encoded_from_does_not_matter(dtype):
    """Values that both types hold: the output is bf16 either way."""
    inputs, options, *_ = problem(**CASES["window"])
    wide = [x.to(dtype) for x in inputs[:3]]
    assert same(attend(encoded((*wide, *inputs[3:])), options), attend(inputs, options, precision="mxfp8"))


def test_offsets_may_be_left_out_or_come_again():
    (q, k, v, q_offset, k_offset), options, *_ = problem(**CASES["lengths differ"])
    three = encoded((q, k, v, q_offset, k_offset))[:3]
    wanted = attend((*three, q_offset, k_offset), {})
    assert same(attend(three, {}), wanted)
    assert same(attend((q, *three[1:], q_offset), {}), wanted)
    assert same(attend((*three, q_offset.clone(), k_offset.long()), {}), wanted)


def test_heads_may_be_cut_off():
    """Scales lie by head, so the heads of one rank are a slice of them."""
    inputs, options, *_ = problem(**CASES["self"], heads=6, kv_heads=6)
    given = encoded(inputs)
    some = [dataclasses.replace(x, data=x.data[:, 1:4], scales=x.scales[1:4]) for x in given[:3]]
    out, lse = attend((*some, *given[3:]), options)
    whole, whole_lse = attend(given, options)
    assert torch.equal(out, whole[:, 1:4]) and torch.equal(lse, whole_lse[1:4])


# ------------------------------------------------------------------------------------------------ nothing is encoded again
def counted(monkeypatch) -> list[str]:
    """Return a list to which every encoding of a tensor adds its axis."""
    from jfa.kernels.common import quantize

    seen: list[str] = []
    by_torch, by_kernel = mxfp8._quantize, quantize._quantize

    def of_torch(x, offsets, axis, length):
        seen.append(axis)
        return by_torch(x, offsets, axis, length)

    def of_kernel(x, offsets, axes, length, records):
        seen.extend(axes)
        return by_kernel(x, offsets, axes, length, records)

    monkeypatch.setattr(mxfp8, "_quantize", of_torch)
    monkeypatch.setattr(quantize, "_quantize", of_kernel)
    return seen


@pytest.mark.parametrize("backend", ["reference", "blackwell"])
def test_nothing_is_encoded_that_came_encoded(backend, monkeypatch):
    pytest.importorskip("greenlet")
    inputs, options, *_ = problem([40, 3], [33, 70], heads=1, kv_heads=1)
    given, mixed = encoded(inputs), encoded(inputs, ("key", "value"))
    seen = counted(monkeypatch)
    wanted = attend(inputs, options, precision="mxfp8", backend=backend)
    assert sorted(seen) == ["head_dim", "head_dim", "tokens"]
    seen.clear()
    assert same(attend(given, options, backend=backend), wanted) and seen == []
    assert same(attend(mixed, options, backend=backend), wanted) and seen == ["head_dim"]


KERNEL_CASES = {
    "jagged": dict(len_q=[140, 0, 5], len_kv=[130, 9, 200], heads=2, kv_heads=1, dim=64, dim_v=64),
    "shared queries": dict(len_q=35, len_kv=[40, 0, 150], heads=1, kv_heads=1, dim=64, dim_v=64),
    "other dims, causal": dict(len_q=[70, 33], len_kv=[90, 70], heads=1, kv_heads=1, dim=24, dim_v=40, causal=True),
}


@pytest.mark.parametrize("case", KERNEL_CASES)
@pytest.mark.parametrize("names", [EVERY, ("key", "value"), ("value",), ("query", "key")], ids="-".join)
def test_the_kernel_multiplies_them_as_they_are(case, names):
    pytest.importorskip("greenlet")
    inputs, options, *_ = problem(**KERNEL_CASES[case], seed=3)
    wanted = attend(inputs, options, precision="mxfp8", backend="blackwell")
    assert same(attend(encoded(inputs, names), options, backend="blackwell"), wanted)


def test_the_kernels_encodings_serve_as_well():
    quantize = pytest.importorskip("jfa.kernels.common.quantize")
    (q, k, v, *offsets), options, *_ = problem(**CASES["lengths differ"])
    three = (
        quantize.quantize_jagged(q, offsets[0], "head_dim"),
        quantize.quantize_both(k, offsets[1])[0],
        quantize.quantize_jagged(v, offsets[1], "tokens"),
    )
    assert same(attend(three, options), attend((q, k, v, *offsets), options, precision="mxfp8"))


# ---------------------------------------------------------------------------------------------------------------- backward
def gradients(inputs, options, dout, dlse, names=(), **more):
    """Return (out, lse, dq, dk, dv); those of ``names`` are encoded first, along both axes."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    given = encoded((*leaves, *inputs[3:]), names, both=True)
    out, lse = attend(given, options, **more)
    loss = (out.float() * dout.float()).sum() + (torch.where(torch.isfinite(lse), lse, 0) * dlse).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_inputs_encoded_by_the_call(case):
    call = problem(**CASES[case])
    assert same(gradients(*call, EVERY), gradients(*call, precision="mxfp8"))


@pytest.mark.parametrize("names", SUBSETS[:-1], ids="-".join)
def test_gradients_of_inputs_in_either_form(names):
    for case in ("causal", "shared queries in slots", "grouped heads"):
        call = problem(**CASES[case], seed=4)
        assert same(gradients(*call, names), gradients(*call, precision="mxfp8"))


BACKWARD_CASES = {
    "grouped heads": dict(len_q=[140, 0, 5], len_kv=[130, 9, 160], heads=2, kv_heads=1, dim=64, dim_v=64),
    "shared queries": dict(len_q=35, len_kv=[40, 0, 130], heads=1, kv_heads=1, dim=64, dim_v=64),
    "other dims, window": dict(
        len_q=[70, 33], len_kv=[90, 70], heads=1, kv_heads=1, dim=24, dim_v=40, window_size=(20, 9)
    ),
}


@pytest.mark.parametrize("case", BACKWARD_CASES)
@pytest.mark.parametrize("names", [EVERY, ("value",), ("query", "key")], ids="-".join)
def test_the_kernels_multiply_them_as_they_are_in_the_backward(case, names):
    """Under one schedule every bit is the same: the kernels get the same bytes."""
    pytest.importorskip("greenlet")
    call = problem(**BACKWARD_CASES[case], seed=5)
    wanted = gradients(*call, precision="mxfp8", backend="blackwell")
    assert same(gradients(*call, names, backend="blackwell"), wanted)
    simulated = gradients(*call, names, backend="reference")
    for a, b in zip(wanted, simulated):  # from here P and dS differ where the forward's output was rounded otherwise
        finite = torch.isfinite(b)
        assert (a[finite].double() - b[finite].double()).norm() <= 0.01 * b[finite].double().norm()


def test_the_deterministic_backward_takes_them_too():
    pytest.importorskip("greenlet")
    call = problem([40, 5], [33, 70], heads=1, kv_heads=1, dim=64, dim_v=64, causal=True)
    options = dict(backend="blackwell", deterministic=True)
    assert same(gradients(*call, EVERY, **options), gradients(*call, precision="mxfp8", **options))


@pytest.mark.parametrize("backend", ["reference", "blackwell"])
def test_the_backward_encodes_the_outputs_gradient_only(backend, monkeypatch):
    pytest.importorskip("greenlet")
    (q, k, v, *offsets), options, dout, _ = problem([40, 3], [33, 70], heads=1, kv_heads=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given = encoded((*leaves, *offsets), both=True)
    seen = counted(monkeypatch)
    out, _ = attend(given, options, backend=backend)
    assert seen == []
    out.backward(dout)
    assert sorted(seen) == ["head_dim", "tokens"] and all(x.grad.any() for x in leaves)


def test_the_kernels_encodings_have_a_gradient_as_well():
    quantize = pytest.importorskip("jfa.kernels.common.quantize")
    inputs, options, dout, dlse = problem([40, 3], [33, 70], heads=1, kv_heads=1)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    given = zip(leaves, (inputs[3], inputs[4], inputs[4]), AXES.values())
    three = [quantize.quantize_jagged(x, offsets, axis, both=True) for x, offsets, axis in given]
    out, lse = attend((*three, *inputs[3:]), options)
    grads = torch.autograd.grad(((out * dout).float().sum() + (lse * dlse).sum()), leaves)
    wanted = gradients(inputs, options, dout, dlse, precision="mxfp8")
    for a, b in zip(grads, wanted[2:]):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-2)  # the losses' gradients are rounded differently


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gradient_has_the_type_of_what_was_encoded(dtype):
    inputs, options, dout, dlse = problem(**CASES["window"])
    wide = [x.to(dtype) for x in inputs[:3]]
    found = gradients((*wide, *inputs[3:]), options, dout, dlse, EVERY)
    wanted = gradients(inputs, options, dout, dlse, precision="mxfp8")
    assert all(x.dtype == dtype for x in found[2:])
    assert same([x.bfloat16() for x in found[2:]], wanted[2:])


def test_some_may_require_a_gradient_and_others_not():
    (q, k, v, *offsets), options, dout, _ = problem(**CASES["causal"])
    wanted = gradients((q, k, v, *offsets), options, dout, torch.zeros(1), precision="mxfp8")
    q.requires_grad_()
    k, v = encoded((q, k, v, *offsets), ("key", "value"), both=True)[1:3]
    assert k.source is None
    jfa.jagged_flash_attention(q, k, v, *offsets, **options).backward(dout)
    assert torch.equal(q.grad, wanted[2])
    with torch.no_grad():
        kept = quantize_jagged(q, offsets[0], "head_dim", both=True)
    assert kept.source is None and not jfa.jagged_flash_attention(kept, k, v, *offsets, **options).requires_grad


def test_gradients_under_torch_compile_and_a_profiler():
    inputs, options, dout, _ = problem(**CASES["window"])
    wanted = gradients(inputs, options, dout, torch.zeros(1), EVERY)[2:]
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]

    def call(q, k, v):
        return jfa.jagged_flash_attention(*encoded((q, k, v, *inputs[3:]), both=True), **options)

    torch.compile(call, backend="aot_eager")(*leaves).backward(dout)
    assert same([x.grad for x in leaves], wanted)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call(*leaves).backward(dout)
    assert "jfa::quantized_attention_backward" in {event.key for event in seen.key_averages()}
    assert same([x.grad for x in leaves], wanted)


def test_the_backwards_op_has_a_right_fake():
    inputs, options, dout, dlse = problem(**CASES["shared queries"])
    q, k, v, *offsets = encoded(inputs, both=True)
    out, lse = attend((q, k, v, *offsets), options)
    parts = [part for x in (q, k, v) for part in quantized._parts(x)]
    found = jfa.attention.make_problem(q, k, v, *offsets, None, 0.2, jfa.Band(), True, False, 0, 0, None, "mxfp8")
    arguments = op.op_arguments(op.Call(found, "auto", None, True, offsets[0]), *offsets, None)
    given = (dout, dlse, parts, out, lse, [True, False, True], *arguments)
    torch.library.opcheck(torch.ops.jfa.quantized_attention_backward, given, test_utils="test_faketensor")


def test_gradients_cannot_be_differentiated_again():
    (q, k, v, *offsets), options, dout, _ = problem(**CASES["self"])
    q.requires_grad_()
    given = encoded((q, k, v, *offsets), both=True)
    (dq,) = torch.autograd.grad(jfa.jagged_flash_attention(*given), q, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        dq.float().square().sum().backward()


def test_a_transform_of_torch_func_is_refused():
    inputs, *_ = problem(**CASES["self"])
    k, v, *offsets = encoded(inputs, ("key", "value"), both=True)[1:]
    with pytest.raises(NotImplementedError, match=r"torch\.func cannot differentiate a call with quantized inputs"):
        torch.func.grad(lambda q: jfa.jagged_flash_attention(q, k, v, *offsets).float().sum())(inputs[0])


def test_an_encoding_changed_before_the_backward_is_an_error():
    (q, k, v, *offsets), _, dout, _ = problem(**CASES["self"])
    q.requires_grad_()
    given = encoded((q, k, v, *offsets), both=True)
    out = jfa.jagged_flash_attention(*given)
    given[1].other.scales.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


# --------------------------------------------------------------------------------------------------- tracers, plans, types
@pytest.mark.parametrize("names", [EVERY, ("key", "value")], ids="-".join)
def test_tracers_see_one_op(names):
    inputs, options, *_ = problem(**CASES["window"])
    q, k, v, *offsets = encoded(inputs, names)
    call = lambda q, k, v: jfa.jagged_flash_attention(q, k, v, *offsets, window_size=(9, 3), return_lse=True)
    wanted = call(q, k, v)
    assert same(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), wanted)
    found = jfa.attention.make_problem(q, k, v, *offsets, None, 0.2, jfa.Band(), False, False, 0, 0, None, "mxfp8")
    assert found.quantized == names
    parts = [part for x in (q, k, v) for part in quantized._parts(x)]
    arguments = op.op_arguments(op.Call(found, "auto", None, True, offsets[0]), *offsets, None)
    torch.library.opcheck(torch.ops.jfa.quantized_attention, (parts, *arguments), test_utils="test_faketensor")


def test_encoding_and_attention_compile_as_one():
    (q, k, v, *offsets), options, *_ = problem(**CASES["self"])

    def call(q, k, v):
        return jfa.jagged_flash_attention(*encoded((q, k, v, *offsets)))

    with torch.no_grad():
        wanted = call(q, k, v)
        assert torch.equal(torch.compile(call, backend="aot_eager")(q, k, v), wanted)


def test_a_profiler_sees_the_op():
    inputs, options, *_ = problem(**CASES["self"])
    given = encoded(inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        found = attend(given, options)
    assert "jfa::quantized_attention" in {event.key for event in seen.key_averages()}
    assert same(found, attend(given, options))


def test_queries_in_a_batch_of_batches():
    """vmap over what is not quantized."""
    inputs, options, *_ = problem(**CASES["self"])
    q, k, v, *offsets = encoded(inputs, ("key", "value"))
    call = lambda q: jfa.jagged_flash_attention(q, k, v, *offsets)
    many = torch.stack([q, 2 * q])
    assert torch.equal(torch.func.vmap(call)(many), torch.stack([call(q), call(2 * q)]))


def test_a_plan_serves_them():
    inputs, options, *_ = problem(**CASES["self"])
    given = encoded(inputs)
    shapes = dict(rows_q=len(inputs[0]), rows_kv=len(inputs[1]), num_heads=2, head_dim=48)
    plan = jfa.plan(*inputs[3:], **shapes, precision="mxfp8")
    assert same(attend(given, {}, plan=plan), attend(inputs, {}, precision="mxfp8"))
    other = jfa.plan(*inputs[3:], **shapes)
    with pytest.raises(ValueError, match="plan was built for precision = None, but this call has mxfp8"):
        attend(given, {}, plan=other)


def test_nested_queries_and_autocast():
    inputs, options, *_ = problem(**CASES["self"])
    q, k, v, *offsets = encoded(inputs, ("key", "value"))
    wanted, _ = attend((q, k, v, *offsets), {})
    nested = torch.nested.nested_tensor_from_jagged(q, offsets=offsets[0])
    assert torch.equal(jfa.jagged_flash_attention(nested, k, v).values(), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(jfa.jagged_flash_attention(q.float(), k, v, *offsets), wanted)
        first = encoded(inputs, ("query",))[0]
        some = jfa.jagged_flash_attention(first, inputs[1].float(), inputs[2].float(), *offsets)
    assert torch.equal(some, wanted)


def test_explain_names_what_came_quantized(monkeypatch):
    inputs, options, *_ = problem(**CASES["self"])
    told = dict(jfa.explain(*encoded(inputs)).forms)
    assert "query and key and value as given, quantized already" in told["forward"]
    assert told["backward"].startswith("none: query and key and value quantized along one axis only")
    told = dict(jfa.explain(*encoded(inputs, both=True)).forms)
    assert "as given" in told["forward"] and told["backward"].startswith("MXFP8 simulated")
    told = dict(jfa.explain(*encoded(inputs, ("key", "value"))).forms)
    assert "key and value as given" in told["forward"] and "query" not in told["forward"]
    assert "as given" not in str(jfa.explain(*inputs, precision="mxfp8"))
    monkeypatch.setattr("jfa.kernels.base._capability", lambda device: (10, 0))
    monkeypatch.setattr("jfa.kernels.base._triton_version", lambda: "3.7.4+fb")
    told = registry.choose(problem_of(*encoded(inputs), "mxfp8", "cuda"), "auto")
    assert told.backend == "blackwell" and "as given" in dict(told.forms)["forward"]
    assert dict(told.forms)["backward"].startswith("none")
    told = registry.choose(problem_of(*encoded(inputs, both=True), "mxfp8", "cuda"), "auto")
    assert dict(told.forms)["backward"].startswith("MXFP8, one CTA per key tile")


# ------------------------------------------------------------------------------------------------------------------ errors
def test_a_gradient_that_is_asked_for_is_an_error():
    inputs, options, *_ = problem(**CASES["self"])
    for names, asks in ((("key", "value"), 0), (("query",), 1), (("query", "key"), 2)):
        given = list(encoded(inputs, names))
        given[asks] = given[asks].clone().requires_grad_()
        for f in (jfa.jagged_flash_attention, jfa.explain):
            with pytest.raises(
                ValueError, match=f"{EVERY[asks]} requires a gradient next to .* along the other axis, too"
            ):
                f(*given)
        with torch.no_grad():
            out = jfa.jagged_flash_attention(*given)
        assert not out.requires_grad and torch.equal(out, jfa.jagged_flash_attention(*inputs, precision="mxfp8"))
    with pytest.raises(ValueError, match="query requires a gradient"):
        k, v, *offsets = encoded(inputs, ("key", "value"))[1:]
        torch.func.grad(lambda q: jfa.jagged_flash_attention(q, k, v, *offsets).sum())(inputs[0])


def wrong(change):
    """Return a call's five arguments, changed: ``change`` takes q, k, v quantized, and the inputs."""
    inputs, *_ = problem(**CASES["lengths differ"])
    given = list(encoded(inputs))
    return change(given, inputs) or given


def turned(given, inputs):
    given[1] = quantize_jagged(inputs[1], inputs[4], "tokens")


def value_by_dim(given, inputs):
    given[2] = quantize_jagged(inputs[2], inputs[4], "head_dim")


def other_lengths(given, inputs):
    given[1] = quantize_jagged(inputs[1], torch.tensor([0, 4, 12, 12, 82], dtype=torch.int32), "head_dim")


def queries_of_others(given, inputs):
    given[0] = quantize_jagged(inputs[0], torch.tensor([0, 40, 41, 47, 80], dtype=torch.int32), "head_dim")


def fewer_sequences(given, inputs):
    given[2] = quantize_jagged(inputs[2], torch.tensor([0, 12, 82], dtype=torch.int32), "tokens")


def slots(given, inputs):
    given[0] = quantize_jagged(inputs[0], torch.tensor([0, 20, 40, 60, 80], dtype=torch.int32), "head_dim", length=20)


def another_dim(given, inputs):
    given[1] = quantize_jagged(inputs[1][..., :32], inputs[4], "head_dim")


def other_heads(given, inputs):
    given[2] = quantize_jagged(inputs[2][:, :1], inputs[4], "tokens")


def fewer_rows(given, inputs):
    given[2] = quantize_jagged(inputs[2][:-1], torch.tensor([0, 3, 12, 12, 81], dtype=torch.int32), "tokens")


def scales_of_another(given, inputs):
    given[1] = dataclasses.replace(given[1], scales=given[1].scales[:, :-1])


def scales_as_words(given, inputs):
    given[1] = dataclasses.replace(given[1], scales=given[1].scales.view(torch.int32))


def data_in_bytes(given, inputs):
    given[0] = dataclasses.replace(given[0], data=given[0].data.view(torch.uint8))


def elsewhere(given, inputs):
    given[2] = dataclasses.replace(given[2], scales=given[2].scales.to("meta"))


def all_elsewhere(given, inputs):
    parts = {name: getattr(given[2], name).to("meta") for name in ("data", "scales", "offsets")}
    given[2] = dataclasses.replace(given[2], **parts)


def half_beside(given, inputs):
    given[0] = inputs[0].half()


def data_alone(given, inputs):
    given[1] = given[1].data


def a_tuple(given, inputs):
    given[0] = (given[0].data, given[0].scales)


def other_turned(given, inputs):
    given[0] = dataclasses.replace(given[0], other=given[0])


def other_of_other_rows(given, inputs):
    other = quantize_jagged(inputs[1][:-1], torch.tensor([0, 3, 12, 12, 81], dtype=torch.int32), "tokens")
    given[1] = dataclasses.replace(given[1], other=other)


def other_for_other_lengths(given, inputs):
    other = quantize_jagged(inputs[1], torch.tensor([0, 4, 12, 12, 82], dtype=torch.int32), "tokens")
    given[1] = dataclasses.replace(given[1], other=other)


def other_as_data(given, inputs):
    given[2] = dataclasses.replace(given[2], other=given[2].data)


def others_scales(given, inputs):
    other = quantize_jagged(inputs[2], inputs[4], "head_dim")
    given[2] = dataclasses.replace(given[2], other=dataclasses.replace(other, scales=other.scales[:, 1:]))


def another_source(given, inputs):
    given[2] = dataclasses.replace(given[2], source=inputs[2][:, :, :5])


WRONG = {
    other_turned: (ValueError, r"query\.other is quantized along 'head_dim', as query is"),
    other_of_other_rows: (ValueError, r"key\.other is of \(81, 2, 48\)"),
    other_for_other_lengths: (ValueError, r"key\.other is quantized for other offsets than the call's"),
    other_as_data: (TypeError, r"value\.other must come from quantize_jagged, got Tensor"),
    others_scales: (ValueError, r"value\.other\.scales must be uint8"),
    another_source: (ValueError, r"value\.source must be the tensor \(82, 2, 48\) that was quantized"),
    turned: (ValueError, r"key is quantized along 'tokens', but its product contracts 'head_dim'"),
    value_by_dim: (ValueError, r"value is quantized along 'head_dim', but its product contracts 'tokens'"),
    other_lengths: (ValueError, r"key is quantized for other offsets than the call's"),
    queries_of_others: (ValueError, r"query is quantized for other offsets than the call's"),
    fewer_sequences: (ValueError, r"value is quantized for 2 sequences, but the call has 4"),
    slots: (ValueError, r"query is quantized with length=20"),
    another_dim: (ValueError, r"query and key must have the same head dim, got 48 and 32"),
    other_heads: (ValueError, r"key and value must have the same rows and heads"),
    fewer_rows: (ValueError, r"key and value must have the same rows and heads"),
    scales_of_another: (ValueError, r"key\.scales must be uint8 \(2, 5, 1, 32, 16\)"),
    scales_as_words: (ValueError, r"key\.scales must be uint8"),
    data_in_bytes: (ValueError, r"query\.data must be 3-D float8_e4m3fn"),
    elsewhere: (ValueError, r"value\.scales is on meta, but value\.data is on cpu"),
    all_elsewhere: (ValueError, r"value is torch\.bfloat16 on meta, but query is torch\.bfloat16 on cpu"),
    half_beside: (
        TypeError,
        r"query must be bfloat16, or quantized, too, next to quantized key and value; got torch\.float16",
    ),
    data_alone: (TypeError, r"key must be bfloat16, .*got torch\.float8_e4m3fn"),
    a_tuple: (TypeError, r"query must be a torch\.Tensor, got tuple"),
}


@pytest.mark.parametrize("change", WRONG, ids=lambda f: f.__name__)
def test_what_is_wrong_is_named(change):
    kind, message = WRONG[change]
    given = wrong(change)
    with pytest.raises(kind, match=message):
        jfa.jagged_flash_attention(*given)
    if "other offsets" not in message:  # explain reads no contents
        with pytest.raises(kind, match=message):
            jfa.explain(*given)


def test_shared_queries_are_one_sequence():
    inputs, options, *_ = problem(**CASES["shared queries"])
    given = list(encoded(inputs))
    given[0] = quantize_jagged(inputs[0], torch.tensor([0, 20, 35], dtype=torch.int32), "head_dim")
    with pytest.raises(ValueError, match="query is quantized for 2 sequences, but the call has 1"):
        jfa.jagged_flash_attention(*given, broadcast_q=True)
    given[0] = quantize_jagged(inputs[0], torch.tensor([0, 34], dtype=torch.int32), "head_dim")
    with pytest.raises(ValueError, match="query is quantized for other offsets"):
        jfa.jagged_flash_attention(*given, broadcast_q=True)


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_other_backends_have_no_products_for_them(backend):
    inputs, options, *_ = problem(**CASES["self"])
    with pytest.raises(UnsupportedError, match=f"backend '{backend}' has no MXFP8 kernels"):
        jfa.jagged_flash_attention(*encoded(inputs), backend=backend)


def test_layers_take_what_they_project():
    x = quantize_jagged(torch.randn(9, 1, 32), torch.tensor([0, 9]), "head_dim")
    with pytest.raises(TypeError, match="x must be a torch.Tensor, got BlockScaled; .* encodes what it projects"):
        jfa.JaggedSelfAttention(32, 2)(x, torch.tensor([0, 9]))


def test_another_precision_is_still_refused():
    inputs, options, *_ = problem(**CASES["self"])
    with pytest.raises(ValueError, match="precision must be None"):
        jfa.jagged_flash_attention(*encoded(inputs), precision="fp8")
    lists = jfa.block_sparse.select_blocks(*inputs[:2], *inputs[3:], ratio=0.5, block_q=16, block_kv=16)
    with pytest.raises(ValueError, match="does not take block_lists"):
        jfa.jagged_flash_attention(*encoded(inputs), block_lists=lists)
