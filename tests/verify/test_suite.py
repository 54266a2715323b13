"""The checks themselves: right on a sound op on this CPU, and each finds an op that is wrong in its way."""

from __future__ import annotations

import pytest
import torch

import jfa
from jfa.verify import mxfp8_checks, numbers, op_checks, sparse_checks, suite
from jfa.verify.pool import Job, Refused

ON_CPU = {"device": "cpu"}


def job(kind, item, backend="reference", **options):
    return Job(kind, backend, item, options=ON_CPU | options)


@pytest.mark.parametrize("name", numbers.FIRST)
def test_the_simplest_problems_are_right_on_the_emulator(name):
    assert suite.run(job("first", name, "portable")) == 1


def test_random_and_large_problems_are_right():
    assert suite.run(job("random", 30)) == numbers.BATCH
    assert suite.run(job("large", 3)) == suite.run(job("wide", 2)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "plan_gives_the_same_result_again_and_again",
        "any_strides",
        "offsets_may_have_any_stride",
        "deterministic_gradients_repeat_bit_by_bit",
        "compiles_into_one_graph",
        "calls_of_other_totals_agree_with_the_long_way",
    ],
)
def test_checks_of_the_op_pass_on_a_sound_op(name, monkeypatch):
    monkeypatch.setattr(op_checks, "_tensors", small(op_checks._tensors))
    assert suite.run(job("op", name)) == 1


def small(tensors):
    """The checks' tensors with lengths that a CPU is quick with."""
    shorter = lambda lengths: [min(n, 120) for n in lengths[:6]]
    return lambda device, len_q, len_kv, *more, **options: tensors(
        device, shorter(len_q), shorter(len_kv), *more, **options
    )


def wrong(change):
    """The op with something done to its output."""
    right = jfa.jagged_flash_attention

    def attend(*inputs, **options):
        out = right(*inputs, **options)
        return (change(out[0], inputs, options), out[1]) if isinstance(out, tuple) else change(out, inputs, options)

    return attend


CALLS = []


def every_second_call(out, inputs, options):
    """A race: the result depends on when the call comes."""
    CALLS.append(1)
    return out * (1 + 0.01 * (len(CALLS) % 2))


def by_stride(out, inputs, options):
    """A kernel that takes every last stride for 1."""
    return out if inputs[0].stride(-1) == 1 else out * 1.1


def by_offset_stride(out, inputs, options):
    return out if inputs[3].is_contiguous() else out * 0


@pytest.mark.parametrize(
    "name, change",
    [
        ("plan_gives_the_same_result_again_and_again", lambda out, i, o: out * 1.1 if o.get("plan") else out),
        ("any_strides", by_stride),
        ("offsets_may_have_any_stride", by_offset_stride),
        ("deterministic_gradients_repeat_bit_by_bit", every_second_call),
        ("calls_of_other_totals_agree_with_the_long_way", every_second_call),
    ],
)
def test_checks_of_the_op_find_what_they_are_for(name, change, monkeypatch):
    monkeypatch.setattr(op_checks, "_tensors", small(op_checks._tensors))
    monkeypatch.setattr(jfa, "jagged_flash_attention", wrong(change))
    with pytest.raises(AssertionError):
        suite.run(job("op", name))


def test_block_lists_are_compared_with_the_reference(monkeypatch):
    assert suite.run(job("sparse", 1)) == 1
    monkeypatch.setattr(sparse_checks.jfa, "jagged_flash_attention", wrong(lambda out, i, o: out * 1.05))
    with pytest.raises(AssertionError, match="out: "):
        suite.run(job("sparse", 1))


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_mxfp8_is_compared_with_the_same_roundings(seed):
    """Seed 3 has shared queries, seed 5 a mask."""
    assert suite.run(job("mxfp8", seed)) == 1


def test_a_wrong_mxfp8_kernel_is_found(monkeypatch):
    monkeypatch.setattr(mxfp8_checks.jfa, "jagged_flash_attention", wrong(lambda out, i, o: out * 1.005))
    with pytest.raises(AssertionError, match="out: "):
        suite.run(job("mxfp8", 0))
    with pytest.raises(Refused, match="has no MXFP8 kernels"):
        monkeypatch.undo()
        suite.run(job("mxfp8", 0, "portable"))


def test_the_quantiser_is_compared_byte_by_byte(monkeypatch):
    assert suite.run(job("quantize", 4)) == 1
    right = mxfp8_checks.quantize.quantize_both
    monkeypatch.setattr(mxfp8_checks.quantize, "quantize_both", lambda x, *a, **k: right(x * 1.01, *a, **k))
    with pytest.raises(AssertionError, match="bytes"):
        suite.run(job("quantize", 4))


def test_what_a_backend_does_not_offer_is_refused_not_wrong():
    with pytest.raises(Refused, match="bfloat16 or float16"):
        suite.run(job("op", "seventy_thousand_sequences", "hopper"))


@pytest.mark.parametrize("name, options", [("jfa", {"backend": "auto"}), ("jfa:hopper", {"backend": "hopper"})])
def test_names_of_ours(name, options):
    assert suite.implementation(name).keywords == options


def test_names_with_options_and_of_peers():
    made = suite.implementation("jfa:blackwell:form=pair:deterministic=True").keywords
    assert made == {"backend": "blackwell", "form": "pair", "deterministic": True}
    assert suite.implementation("fa2") is suite.peers.fa2
    with pytest.raises(ValueError, match="NAME=VALUE"):
        suite.implementation("jfa:blackwell:pair")
    with pytest.raises(KeyError):
        suite.implementation("fa9")


def test_a_form_holds_until_the_next_call_is_built():
    from jfa.kernels.blackwell import launch
    from jfa.kernels.common.example import example_problem

    inputs = suite.shapes.make_inputs(numbers.known_shape("tiny-self"), "cpu")
    forms = []
    for name in ("jfa:blackwell:form=single", "jfa:blackwell:form=pair", "jfa:blackwell:form=single", "jfa:blackwell"):
        suite.implementation(name)(inputs)
        forms.append(launch.backward_config(example_problem(128)).form)
    assert forms[:3] == ["single", "pair", "single"]
    assert forms[3] == launch.backward_form(example_problem(128))[0]
    suite.implementation("jfa:blackwell:form=triple")(inputs)
    try:
        with pytest.raises(ValueError, match="form 'triple' is not one of"):
            launch.backward_config(example_problem(128))
    finally:
        suite.force_form(None)


def test_a_shape_is_timed_with_all_its_names():
    names = ("jfa:reference", "fa4", "jfa:reference:form=pair")
    found = suite.run(job("time", "tiny-self", timing={"names": names, "runs": 1}))
    assert [t["name"] for t in found] == list(names)
    assert found[0]["forward_ms"] > 0 and found[0]["backward_ms"] > 0
    assert "form" in found[2]["note"]
    assert suite.run(job("prepare", "tiny-pma/jfa:reference")) == ""


def test_host_time_is_measured_without_waiting_for_a_device():
    found = suite.run(job("host", "small", timing={"backends": ("reference",), "per_round": 1, "rounds": 1}))
    assert set(found) == {"reference", "reference, with a plan"}
    assert all(value > 0 for times in found.values() for value in times.values())


def test_a_repetition_that_differs_is_found(monkeypatch):
    assert suite.run(job("repeat", "tiny-self")) == 10
    monkeypatch.setattr(suite.peers, "jagged_flash_attention", wrong(every_second_call))
    with pytest.raises(AssertionError, match="differ from run to run"):
        suite.run(job("repeat", "tiny-self"))


def test_the_suite_covers_every_check_on_every_backend_that_offers_it():
    keys = {job.key for stage in suite.stages(suite.BACKENDS) for job in stage.jobs}
    for backend in suite.BACKENDS:
        assert {f"op:{backend}:{name}" for name in op_checks.CHECKS} <= keys
        assert {f"first:{backend}:{name}" for name in numbers.FIRST} <= keys
    assert {f"random:hopper:{n}" for n in range(0, 1000, 10)} <= keys
    assert {"sparse:hopper:0", "sparse:portable:0", "quantize:portable:0", "host:all:small", "time:all:self"} <= keys
    assert not {"mxfp8:hopper:0", "mxfp8:portable:0"} & keys


def test_offered_says_why_a_backend_is_not_there(monkeypatch):
    monkeypatch.setitem(suite.registry.MODULES, "hopper", "jfa.kernels.no_such_module")
    suite.registry.load.cache_clear()
    try:
        found = suite.offered("cpu")
    finally:
        suite.registry.load.cache_clear()
    assert found["portable"] is None and "could not be imported" in found["hopper"]


def test_measurements_leave_out_what_failed():
    timed = next(job for s in suite.stages(["hopper", "portable"], ["self"]) for job in s.jobs if job.kind == "time")
    left = suite.without(timed, {"portable"}, {"prepare:all:self/fa4", "prepare:all:gqa/fa2"})
    assert left.options["timing"]["names"] == ("jfa:hopper", "fa2", "cudnn")
    assert torch.device(left.options["device"]).type == "cuda" and left.key == timed.key
