"""precision="mxfp8" through the public call: numbers, gradients, tracers, plans, explanations, errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import jfa
from jfa import reference
from jfa.attention import op
from jfa.kernels import registry
from jfa.kernels.registry import UnsupportedError
from jfa.layout import offsets_from_lengths
from tests.test_mxfp8_reference import CASES, problem


def call(case: str, seed: int = 0):
    """Return (arguments, options, dout, dlse) of a case; the three tensors require gradients."""
    (q, k, v, *offsets), options, dout, dlse = problem(**CASES[case], seed=seed)
    return (*(x.requires_grad_() for x in (q, k, v)), *offsets), options, dout, dlse


def loss(out, lse, dout, dlse):
    return (out.double() * dout).sum() + (torch.where(torch.isfinite(lse), lse, 0).double() * dlse).sum()


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_reference(case):
    arguments, options, dout, dlse = call(case)
    out, lse = jfa.jagged_flash_attention(*arguments, **options, precision="mxfp8", return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    exact, exact_lse = reference.mxfp8_attention(*arguments, **options, return_lse=True, dtype=torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=2e-3 * exact.abs().max().item())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(loss(out, lse, dout, dlse), arguments[:3])
    wanted = reference.mxfp8_attention_backward(dout, dlse, *arguments[:3], out, lse, *arguments[3:], **options)
    for a, b in zip(found, wanted):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() <= 4e-3 * b.norm() + 1e-9  # bf16 rounds by 2e-3


def test_it_is_another_precision_than_none():
    arguments, options, dout, dlse = call("self")
    plain = jfa.jagged_flash_attention(*arguments, **options)
    rounded = jfa.jagged_flash_attention(*arguments, **options, precision="mxfp8")
    error = (plain - rounded).norm() / plain.norm()
    assert 0.02 < error < 0.07


def test_only_what_is_needed_gets_a_gradient():
    (q, k, v, *offsets), options, dout, _ = call("causal")
    whole = torch.autograd.grad(
        jfa.jagged_flash_attention(q, k, v, *offsets, **options, precision="mxfp8"), (q, k, v), dout
    )
    out = jfa.jagged_flash_attention(q, k.detach(), v, *offsets, **options, precision="mxfp8")
    for a, b in zip(torch.autograd.grad(out, (q, v), dout), (whole[0], whole[2])):
        assert torch.equal(a, b)


def test_tracers_see_the_same_op():
    (q, k, v, *offsets), options, dout, _ = call("window")
    options = dict(window_size=options["window_size"], precision="mxfp8")
    attend = lambda q, k, v: jfa.jagged_flash_attention(q, k, v, *offsets, **options)
    expected = attend(q, k, v)
    grads = torch.autograd.grad(expected, (q, k, v), dout)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    assert torch.equal(out, expected)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), grads):
        assert torch.equal(a, b)
    by_func = torch.func.grad(lambda x: (attend(x, k.detach(), v.detach()) * dout).sum())(q.detach())
    torch.testing.assert_close(by_func, grads[0])
    found = problem_of(q, k, v, *offsets, "mxfp8")
    arguments = (q, k, v, *op.op_arguments(op.Call(found, "auto", None, True, offsets[0]), *offsets, None))
    torch.library.opcheck(torch.ops.jfa.attention, arguments)


def problem_of(q, k, v, query_offset, key_offset, precision, device=None):
    """Return a plain call as backends see it, as if on another device."""
    given = q, k, v, query_offset, key_offset, None, 0.2, jfa.Band(), False, False, 0, 0, None, precision
    found = jfa.attention.make_problem(*given)
    return dataclasses.replace(found, device=torch.device(device)) if device else found


def test_nested_tensors_and_autocast():
    (q, k, v, offsets, _), _, _, _ = call("self")
    packed = jfa.jagged_flash_attention(q, k, v, offsets, offsets, precision="mxfp8")
    nested = [torch.nested.nested_tensor_from_jagged(x.detach(), offsets=offsets) for x in (q, k, v)]
    assert torch.equal(jfa.jagged_flash_attention(*nested, precision="mxfp8").values(), packed)
    with torch.autocast("cpu", torch.bfloat16):
        wide = [x.detach().float() for x in (q, k, v)]
        assert torch.equal(jfa.jagged_flash_attention(*wide, offsets, offsets, precision="mxfp8"), packed)


def test_a_plan_knows_its_precision():
    (q, k, v, *offsets), _, _, _ = call("self")
    shapes = dict(rows_q=len(q), rows_kv=len(k), num_heads=q.shape[1], head_dim=q.shape[2])
    plan = jfa.plan(*offsets, **shapes, precision="mxfp8")
    want = jfa.jagged_flash_attention(q, k, v, *offsets, precision="mxfp8")
    assert torch.equal(jfa.jagged_flash_attention(q, k, v, *offsets, precision="mxfp8", plan=plan), want)
    with pytest.raises(ValueError, match="plan was built for precision = mxfp8"):
        jfa.jagged_flash_attention(q, k, v, *offsets, plan=plan)


# ------------------------------------------------------------------------------------------------- explanations, errors
def test_explain_says_that_it_is_simulated():
    (q, k, v, *offsets), _, _, _ = call("self")
    told = str(jfa.explain(q, k, v, *offsets, precision="mxfp8"))
    assert told.startswith("backend: reference") and "forward: MXFP8 simulated" in told and "backward: MXFP8" in told
    assert "MXFP8" not in str(jfa.explain(q, k, v, *offsets))


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_a_backend_without_it_says_so(backend):
    (q, k, v, *offsets), _, _, _ = call("self")
    for f in (jfa.jagged_flash_attention, jfa.explain):
        with pytest.raises(UnsupportedError, match=f"backend '{backend}' has no MXFP8 kernels"):
            f(q, k, v, *offsets, backend=backend, precision="mxfp8")


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_a_gpu_without_it_gets_an_error_and_no_simulation(device, monkeypatch):
    (q, k, v, *offsets), _, _, _ = call("self")
    monkeypatch.setattr("jfa.kernels.base._capability", lambda device: (9, 0))
    found = problem_of(q, k, v, *offsets, "mxfp8", device)
    with pytest.raises(UnsupportedError, match="precision='mxfp8': .*backend='reference' simulates it"):
        registry.pick(found, "auto")
    assert registry.pick(found, "reference") == "reference"


def test_blackwell_gets_its_kernels(monkeypatch):
    """As if on a B200; a head dim that its kernels lack is an error, not a simulation."""
    (q, k, v, *offsets), _, _, _ = call("self")
    monkeypatch.setattr("jfa.kernels.base._capability", lambda device: (10, 0))
    monkeypatch.setattr("jfa.kernels.base._triton_version", lambda: "3.7.4+fb")
    told = registry.choose(problem_of(q, k, v, *offsets, "mxfp8", "cuda"), "auto")
    assert told.backend == "blackwell" and dict(told.forms)["forward"].startswith("MXFP8")
    wide = torch.zeros(len(q), 2, 256).bfloat16()
    with pytest.raises(UnsupportedError, match="precision='mxfp8': .*head dim.*backend='reference' simulates it"):
        registry.pick(problem_of(wide, wide, wide, *offsets, "mxfp8", "cuda"), "auto")


def test_explain_says_which_forms_of_the_bf16_backward_it_lacks():
    """Long sequences would be a pair's, few shared queries would stay on chip."""
    pytest.importorskip("triton")
    long, few = torch.zeros(1024, 2, 128).bfloat16(), torch.zeros(32, 2, 128).bfloat16()
    offsets = offsets_from_lengths([1024])
    call = dict(backend="blackwell", precision="mxfp8")
    told = dict(jfa.explain(long, long, long, offsets, offsets, **call).forms)
    assert "one CTA per key tile (not two: " in told["backward"]
    told = dict(jfa.explain(few, long, long, None, offsets, broadcast_q=True, **call).forms)
    assert "queries do not stay on chip" in told["backward"]
    short = dict(jfa.explain(few, few, few, offsets_from_lengths([32]), offsets_from_lengths([32]), **call).forms)
    assert "one CTA per key tile; dQ" in short["backward"]
    exact = dict(jfa.explain(long, long, long, offsets, offsets, deterministic=True, **call).forms)
    assert exact["backward"].startswith("bf16 products of the operands that the forward rounded")


@pytest.mark.parametrize(
    "precision, error, message",
    [
        ("fp8", ValueError, "precision must be None"),
        ("", ValueError, "precision must be None"),
        (torch.float8_e4m3fn, TypeError, "precision must be None"),
        (True, TypeError, "precision must be None"),
    ],
)
def test_other_precisions_are_refused(precision, error, message):
    (q, k, v, *offsets), _, _, _ = call("self")
    for f in (jfa.jagged_flash_attention, jfa.explain):
        with pytest.raises(error, match=message):
            f(q, k, v, *offsets, precision=precision)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_inputs_are_refused(dtype):
    (q, k, v, *offsets), _, _, _ = call("self")
    q, k, v = (x.detach().to(dtype) for x in (q, k, v))
    with pytest.raises(TypeError, match="precision='mxfp8' takes bfloat16 inputs"):
        jfa.jagged_flash_attention(q, k, v, *offsets, precision="mxfp8")


def test_block_lists_are_refused():
    (q, k, v, offsets, _), _, _, _ = call("self")
    lists = jfa.block_sparse.select_blocks(q, k, offsets, offsets, ratio=0.5, block_q=16, block_kv=16)
    with pytest.raises(ValueError, match="does not take block_lists"):
        jfa.jagged_flash_attention(q, k, v, offsets, offsets, precision="mxfp8", block_lists=lists)


def test_offsets_are_checked_as_ever():
    (q, k, v, *_), _, _, _ = call("self")
    with pytest.raises(ValueError, match="query_offset ends at"):
        jfa.jagged_flash_attention(q, k, v, offsets_from_lengths([100]), offsets_from_lengths([56]), precision="mxfp8")
