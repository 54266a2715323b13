"""The op as its users meet it: arguments, gradients, torch.compile, nested tensors. On the CPU, by the reference backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import jfa
from jfa.attention import arguments, jagged_flash_attention, op
from jfa.layout import offsets_from_lengths
from tests.attention_cases import Case, judge, random_case

LEN_Q, LEN_KV = [5, 0, 3, 17], [4, 6, 0, 9]


def call(len_q=LEN_Q, len_kv=LEN_KV, heads=4, kv_heads=2, dim=8, dim_v=None, shared=0, dtype=torch.float32, **options):
    """Keyword arguments of a random call."""
    torch.manual_seed(0)
    rows = lambda n, h, d: torch.randn(n, h, d, dtype=dtype, requires_grad=True)
    return dict(
        query=rows(shared or sum(len_q), heads, dim),
        key=rows(sum(len_kv), kv_heads, dim),
        value=rows(sum(len_kv), kv_heads, dim_v or dim),
        query_offset=None if shared else offsets_from_lengths(len_q),
        key_offset=offsets_from_lengths(len_kv),
        broadcast_q=bool(shared),
        **options,
    )


# --------------------------------------------------------------------------------------------------------------- numbers
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@hypothesis_settings(max_examples=30)
def test_random_problems_agree_with_fp64(seed, dtype):
    judge(random_case(seed, dtype))


def test_query_heads_read_their_groups_head():
    arguments = call([3], [4], heads=6, kv_heads=2)
    values = torch.stack([torch.full((4, 8), 1.0), torch.full((4, 8), 2.0)], 1)
    out = jagged_flash_attention(**{**arguments, "value": values})
    torch.testing.assert_close(out[0, :, 0], torch.tensor([1.0, 1, 1, 2, 2, 2]))


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (dict(window_size=2), [3, 4, 5, 5, 4, 3]),
        (dict(window_size=0), [1] * 6),
        (dict(causal=True), [1, 2, 3, 4, 5, 6]),
        (dict(causal=True, window_size=1), [1, 2, 2, 2, 2, 2]),
        (dict(window_size=(1, 0)), [1, 2, 2, 2, 2, 2]),
        (dict(window_size=(-1, 1)), [2, 3, 4, 5, 6, 6]),
        (dict(window_size=10_000), [6] * 6),
    ],
)
def test_masks_are_inclusive(options, seen):
    arguments = call([6], [6], heads=1, kv_heads=1, dim=6, sm_scale=0.0, **options)
    out = jagged_flash_attention(**{**arguments, "value": torch.eye(6)[:, None]})
    assert (out[:, 0] > 1e-6).sum(1).tolist() == seen


def test_causal_aligns_the_ends_and_top_left_the_starts():
    eye = torch.eye(5)[:, None]
    seen = {}
    for causal in (True, "bottom_right", "top_left"):
        arguments = call([2], [5], heads=1, kv_heads=1, dim=5, sm_scale=0.0, causal=causal)
        seen[causal] = (jagged_flash_attention(**{**arguments, "value": eye})[:, 0] > 1e-6).sum(1).tolist()
    assert seen == {True: [4, 5], "bottom_right": [4, 5], "top_left": [1, 2]}


def test_queries_without_keys_give_zero_and_minus_infinity():
    arguments = call([4, 3], [0, 5])
    out, lse = jagged_flash_attention(**arguments, return_lse=True)
    assert (out[:4] == 0).all() and (lse[:, :4] == -math.inf).all() and torch.isfinite(lse[:, 4:]).all()
    out.sum().backward()
    assert (arguments["query"].grad[:4] == 0).all()


def test_rows_past_the_last_offset_are_zero_and_get_no_gradient():
    arguments = call([3, 7], [4, 8])
    arguments.update(query_offset=torch.tensor([0, 3, 8]).int(), key_offset=torch.tensor([0, 4, 10]).int())
    out = jagged_flash_attention(**arguments)
    out.sum().backward()
    assert (out[8:] == 0).all()
    for name, end in (("query", 8), ("key", 10), ("value", 10)):
        assert (arguments[name].grad[end:] == 0).all()


def test_shared_query_places_its_rows_by_output_offset():
    plain = jagged_flash_attention(**call(shared=3))
    slots = torch.tensor([9, 0, 6, 3, 12]).int()
    moved = jagged_flash_attention(**call(shared=3), output_offset=slots)
    for b, start in enumerate(slots[:-1].tolist()):
        torch.testing.assert_close(moved[start : start + 3], plain[b * 3 : b * 3 + 3])


def test_merging_two_halves_by_their_lse_is_the_whole_with_gradients():
    arguments = call([4, 6], [10, 8])
    whole = jagged_flash_attention(**arguments)
    inputs = [arguments[n] for n in ("query", "key", "value")]
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, inputs, grad)
    halves = []
    for rows in (torch.tensor([0, 1, 2, 3, 4, 10, 11, 12]), torch.tensor([5, 6, 7, 8, 9, 13, 14, 15, 16, 17])):
        kv_offset = offsets_from_lengths([int((rows < 10).sum()), int((rows >= 10).sum())])
        query, key, value = inputs[0], inputs[1][rows], inputs[2][rows]
        halves.append(jagged_flash_attention(query, key, value, arguments["query_offset"], kv_offset, return_lse=True))
    lse = torch.stack([lse for _, lse in halves])
    weight = torch.softmax(lse, 0).permute(0, 2, 1)[..., None]
    merged = sum(w * out for w, (out, _) in zip(weight, halves))
    torch.testing.assert_close(merged, whole)
    for got, want in zip(torch.autograd.grad(merged, inputs, grad), expected):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------- autograd
@pytest.mark.parametrize("shared", [0, 3])
def test_gradcheck_in_fp64(shared):
    arguments = call([2, 3], [3, 2], heads=2, kv_heads=1, dim=4, shared=shared, dtype=torch.float64)
    inputs = [arguments.pop(n) for n in ("query", "key", "value")]
    assert torch.autograd.gradcheck(
        lambda q, k, v: jagged_flash_attention(q, k, v, **arguments, return_lse=True), inputs
    )


@pytest.mark.parametrize("wanted", ["query", "key", "value", "query key", "key value"])
def test_gradients_only_for_what_requires_them(wanted):
    arguments = call()
    names = ("query", "key", "value")
    full = jagged_flash_attention(**arguments)
    expected = dict(zip(names, torch.autograd.grad(full.sum(), [arguments[n] for n in names])))
    for name in expected:
        arguments[name] = arguments[name].detach().requires_grad_(name in wanted)
    jagged_flash_attention(**arguments).sum().backward()
    for name, grad in expected.items():
        if name in wanted:
            torch.testing.assert_close(arguments[name].grad, grad)
        else:
            assert arguments[name].grad is None


def test_an_input_used_twice_gets_both_gradients():
    x = torch.randn(12, 2, 8, requires_grad=True)
    offsets = offsets_from_lengths([5, 7])
    jagged_flash_attention(x, x, x, offsets, offsets).sum().backward()
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    jagged_flash_attention(*parts, offsets, offsets).sum().backward()
    torch.testing.assert_close(x.grad, sum(p.grad for p in parts))


def test_activation_checkpointing_gives_the_same_gradients():
    arguments = call()
    run = lambda q: jagged_flash_attention(**{**arguments, "query": q}).square().sum()
    (expected,) = torch.autograd.grad(run(arguments["query"]), arguments["query"])
    (got,) = torch.autograd.grad(checkpoint(run, arguments["query"], use_reentrant=False), arguments["query"])
    torch.testing.assert_close(got, expected)


def test_changing_an_input_in_place_before_backward_is_an_error():
    arguments = call()
    leaf = arguments["query"]
    arguments["query"] = leaf * 1.0
    out = jagged_flash_attention(**arguments)
    arguments["query"].mul_(3)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_only_lse_may_be_used():
    arguments = call()
    _, lse = jagged_flash_attention(**arguments, return_lse=True)
    lse[torch.isfinite(lse)].sum().backward()
    assert arguments["query"].grad.abs().sum() > 0 and (arguments["value"].grad == 0).all()


# ------------------------------------------------------------------------------------------------- compile, custom op
@pytest.mark.parametrize("shared", [0, 3])
def test_opcheck(shared):
    a = call(shared=shared)
    arguments = (
        a["query"], a["key"], a["value"], None if shared else a["query_offset"], a["key_offset"], None, [], [], 0.3,
        None, None, None, 0, bool(shared), False, "auto", False, "", 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.jfa.attention.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic):
    step = lambda a: jagged_flash_attention(**a, causal=True, check_offsets=True) * 2
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ((LEN_Q, LEN_KV), ([6, 2, 9, 1], [3, 3, 11, 2])):
        arguments = call(*lengths)
        inputs = [arguments[n] for n in ("query", "key", "value")]
        torch.testing.assert_close(compiled(arguments), step(arguments))
        for got, want in zip(*(torch.autograd.grad(f(arguments).sum(), inputs) for f in (compiled, step))):
            torch.testing.assert_close(got, want)


# --------------------------------------------------------------------------------------------------- nested tensors
def test_nested_tensors_in_and_out():
    arguments = call([5, 2, 3], [4, 6, 1], heads=2, kv_heads=2)
    names = ("query", "key", "value")
    offsets = {"query": arguments["query_offset"], "key": arguments["key_offset"], "value": arguments["key_offset"]}
    packed = jagged_flash_attention(**arguments)
    expected = torch.autograd.grad(packed.sum(), [arguments[n] for n in names])
    nested = [torch.nested.nested_tensor_from_jagged(arguments[n], offsets=offsets[n].long()) for n in names]
    out = jagged_flash_attention(*nested)
    assert out.is_nested and out.layout == torch.jagged
    torch.testing.assert_close(out.values(), packed)
    for got, want in zip(torch.autograd.grad(out.values().sum(), [arguments[n] for n in names]), expected):
        torch.testing.assert_close(got, want)


# --------------------------------------------------------------------------------------------------------- arguments
def _changed(name, value, **options):
    arguments = call(**options)
    arguments[name] = value(arguments[name]) if callable(value) else value
    return arguments


WRONG = [
    ("query", lambda x: x[0], "query"),
    ("query", lambda x: x.double(), "key"),
    ("key", lambda x: x[..., :4], "head dim"),
    ("value", lambda x: x[:-1], "value"),
    ("key", lambda x: x[:, :1].expand(-1, 3, -1), "heads"),
    ("query", lambda x: x.long(), "query"),
    ("key", None, "key"),
    ("query_offset", None, "query_offset"),
    ("query_offset", lambda x: x[:-1], "query_offset"),
    ("query_offset", lambda x: x.float(), "query_offset"),
    ("query_offset", lambda x: x + 2, "query_offset"),
    ("query_offset", lambda x: x.flip(0), "query_offset"),
    ("key_offset", lambda x: x * 3, "key_offset"),
    ("key_offset", lambda x: x[None], "key_offset"),
    ("window_size", -2, "window_size"),
    ("window_size", (1, -3), "window_size"),
    ("window_size", 1.5, "window_size"),
    ("causal", "left", "causal"),
    ("backend", "cuda", "backend"),
    ("max_seq_len_q", 3, "max_seq_len_q"),
    ("max_seq_len_kv", 5, "max_seq_len_kv"),
    ("output_offset", torch.tensor([0, 1, 2, 3, 4]).int(), "output_offset"),
    ("plan", "mine", "plan"),
    ("query", [1.0], "query"),
    ("max_seq_len_q", 17.0, "max_seq_len_q"),
    ("max_seq_len_kv", "9", "max_seq_len_kv"),
    ("sm_scale", "0.1", "sm_scale"),
    ("backend", None, "backend"),
    ("query_offset", [0, 5, 5, 8, 25], "query_offset"),
]


@pytest.mark.parametrize(("name", "value", "word"), WRONG, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WRONG)])
def test_errors_name_the_argument(name, value, word):
    arguments = call()
    arguments[name] = value(arguments[name]) if callable(value) else value
    with pytest.raises((ValueError, TypeError), match=word):
        jagged_flash_attention(**arguments)


@pytest.mark.parametrize("slots", [[0, 3], [0, 3, 6, 10, 13], [0, 1, 2, 3, 4]])
def test_output_slots_must_be_complete_inside_and_disjoint(slots):
    with pytest.raises(ValueError, match="output_offset"):
        jagged_flash_attention(**call(shared=3), output_offset=torch.tensor(slots).int())


def test_maxima_are_hints_and_int64_offsets_work():
    arguments = call()
    expected = jagged_flash_attention(**arguments)
    for maxima in ((4096, 4096), (torch.tensor(17), torch.tensor(9)), (17, 9)):
        torch.testing.assert_close(
            jagged_flash_attention(**arguments, max_seq_len_q=maxima[0], max_seq_len_kv=maxima[1]), expected
        )
    arguments.update(query_offset=arguments["query_offset"].long(), key_offset=arguments["key_offset"].long())
    torch.testing.assert_close(jagged_flash_attention(**arguments), expected)


def test_no_sequences_and_no_rows():
    empty = torch.zeros(0, 2, 8, requires_grad=True)
    for offsets in (torch.zeros(1).int(), torch.zeros(4).int()):
        for backend in ("reference", "portable"):
            out = jagged_flash_attention(empty, empty, empty, offsets, offsets, backend=backend)
            assert out.shape == (0, 2, 8)
            out.sum().backward()


def test_explain_names_the_backend_and_a_plan_belongs_to_one():
    arguments = call()
    explanation = jfa.explain(**arguments)
    assert explanation.backend == "reference" and "CPU" in str(explanation)
    offsets = arguments["query_offset"], arguments["key_offset"]
    plan = jfa.plan(*offsets, rows_q=25, rows_kv=19, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    torch.testing.assert_close(jagged_flash_attention(**arguments, plan=plan), jagged_flash_attention(**arguments))
    with pytest.raises(ValueError, match="plan"):
        jagged_flash_attention(**arguments, plan=plan, backend="portable")


def test_a_backend_that_cannot_says_which_can():
    with pytest.raises(ValueError, match="reference"):
        jagged_flash_attention(**call(dtype=torch.float64), backend="portable")


def test_one_long_sequence_and_scores_of_three_hundred():
    for scale_up in (1.0, 80.0):
        judge(Case([1, 200, 0], [3, 200, 1], dim=16, options=dict(causal=True), scale_up=scale_up, seed=3))


# ------------------------------------------------------------------------------------------------ what a model does to it
@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_offsets_may_have_any_stride(backend):
    arguments = call()
    expected = jagged_flash_attention(**arguments, backend=backend)
    for name in ("query_offset", "key_offset"):
        arguments[name] = torch.stack([arguments[name], arguments[name] * 0 + 1], 1)[:, 0]
    torch.testing.assert_close(jagged_flash_attention(**arguments, backend=backend), expected)
    shared = call(shared=3)
    slots = torch.tensor([9, 0, 6, 3, 12]).int()
    expected = jagged_flash_attention(**shared, backend=backend, output_offset=slots)
    strided = torch.stack([slots, slots * 0], 1)[:, 0]
    torch.testing.assert_close(jagged_flash_attention(**shared, backend=backend, output_offset=strided), expected)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (dict(dim=16), "head_dim"),
        (dict(heads=8), "num_heads"),
        (dict(dtype=torch.bfloat16), "dtype"),
        (dict(causal=True), "mask"),
    ],
)
def test_a_plan_for_another_call_is_refused(changed, word):
    arguments = call()
    plan = jfa.plan(
        arguments["query_offset"], arguments["key_offset"], rows_q=25, rows_kv=19, num_heads=4, num_kv_heads=2, head_dim=8,
        dtype=torch.float32, backend="portable",
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"plan was built for .*{word}"):
        jagged_flash_attention(**call(**changed), plan=plan)


def test_a_plan_brings_its_own_hints():
    """Tiles are sized by the hints, so a call with other hints than its plan's must follow the plan."""
    arguments = call(dtype=torch.bfloat16, dim=64)
    offsets = arguments["query_offset"], arguments["key_offset"]
    expected = jagged_flash_attention(**arguments)
    for backend in ("portable", "hopper"):
        plan = jfa.plan(*offsets, rows_q=25, rows_kv=19, num_heads=4, num_kv_heads=2, head_dim=64, backend=backend)
        out = jagged_flash_attention(**arguments, max_seq_len_q=17, max_seq_len_kv=9, plan=plan)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_a_second_derivative_is_an_error(backend):
    arguments = call()
    out = jagged_flash_attention(**arguments, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), arguments["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(grad.square().sum(), arguments["key"])


def test_forward_mode_is_an_error():
    arguments = call()
    query = arguments.pop("query").detach()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: jagged_flash_attention(q, **arguments), (query,), (query,))


def test_autocast_decides_the_type():
    arguments = call()
    arguments["key"] = arguments["key"].detach().bfloat16()  # what a linear layer gives there
    with torch.autocast("cpu", torch.bfloat16):
        out = jagged_flash_attention(**arguments)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert arguments["query"].grad.dtype == torch.float32


@pytest.mark.parametrize("shared", [0, 3])
def test_autocast_rounds_the_inputs_and_no_product(shared):
    arguments = call(shared=shared)
    narrow = dict(arguments)
    for name in ("query", "key", "value"):
        narrow[name] = arguments[name].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = jagged_flash_attention(**arguments)
        out.float().pow(2).sum().backward()
    want = jagged_flash_attention(**narrow)
    want.float().pow(2).sum().backward()
    assert torch.equal(out, want)
    for name in ("query", "key", "value"):
        assert torch.equal(arguments[name].grad, narrow[name].grad.float())


def test_nested_tensors_in_other_shapes():
    arguments = call([5, 2, 3], [5, 2, 3], heads=2, kv_heads=2)
    offsets = arguments["query_offset"].long()
    nested = [torch.nested.nested_tensor_from_jagged(arguments[n], offsets=offsets) for n in ("query", "key", "value")]
    expected = jagged_flash_attention(**arguments)
    out = jagged_flash_attention(*(x.transpose(1, 2) for x in nested))
    assert out.shape[:2] == (3, 2)
    torch.testing.assert_close(out.transpose(1, 2).values(), expected)
    other = torch.nested.nested_tensor_from_jagged(arguments["value"], offsets=offsets_from_lengths([2, 5, 3]).long())
    with pytest.raises(ValueError, match="value"):
        jagged_flash_attention(*nested[:2], other)
    with pytest.raises(TypeError, match="query.*jagged"):
        jagged_flash_attention(torch.nested.nested_tensor([torch.zeros(2, 1, 8)]), *nested[1:])


def test_tensors_on_meta_have_shapes_and_an_explanation():
    arguments = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in call().items()}
    assert jagged_flash_attention(**arguments).shape == (25, 4, 8)
    assert jfa.explain(**arguments).backend == "reference"


def test_numbers_may_come_from_numpy():
    expected = jagged_flash_attention(**call(), window_size=2, max_seq_len_q=17)
    got = jagged_flash_attention(
        **call(), window_size=np.int64(2), max_seq_len_q=np.int32(17), sm_scale=np.float64(8**-0.5)
    )
    torch.testing.assert_close(got, expected)


def test_offsets_beyond_int32_are_not_wrapped_into_valid_ones():
    tensors = [torch.randn(10, 2, 8) for _ in range(3)]
    good = torch.tensor([0, 3, 10])
    for name, wrong in (
        ("query_offset", [0, 3, 10 + 2**32]),
        ("key_offset", [0, 3 - 2**32, 10]),
        ("key_offset", [2**32, 3, 10]),
    ):
        offsets = {"query_offset": good, "key_offset": good} | {name: torch.tensor(wrong)}
        for backend in ("auto", "portable"):
            with pytest.raises(ValueError, match=name):
                jagged_flash_attention(*tensors, **offsets, backend=backend)


def test_int64_offsets_saturate_where_contents_are_not_checked():
    narrow = arguments.narrowed(torch.tensor([0, 5, 2**32 + 7, -(2**40)]))
    assert narrow.tolist() == [0, 5, 2**31 - 1, -(2**31)] and narrow.dtype == torch.int32


@pytest.mark.parametrize(
    "options, word",
    [
        ({"window_size": 2**40}, "window_size"),
        ({"window_size": (5, 2**31)}, "window_size"),
        ({"max_seq_len_q": 2**31}, "max_seq_len_q"),
        ({"max_seq_len_kv": 2**40}, "max_seq_len_kv"),
        ({"sm_scale": float("nan")}, "sm_scale"),
        ({"sm_scale": float("inf")}, "sm_scale"),
        ({"broadcast_q": 1}, "broadcast_q"),
        ({"deterministic": None}, "deterministic"),
    ],
)
def test_impossible_numbers_and_switches_name_themselves(options, word):
    tensors = [torch.randn(10, 2, 8) for _ in range(3)]
    offsets = torch.tensor([0, 3, 10])
    for call in (jagged_flash_attention, jfa.explain):
        with pytest.raises((TypeError, ValueError), match=word):
            call(*tensors, offsets, offsets, **options)


def test_sparse_tensors_are_named():
    dense = torch.randn(10, 2, 8)
    offsets = torch.tensor([0, 3, 10])
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        with pytest.raises((TypeError, ValueError), match="value"):
            jagged_flash_attention(dense, dense, sparse, offsets, offsets)


@pytest.mark.parametrize(
    "given, word", [([0, 4], None), ([0, 3], "query_offset"), ([1, 4], "query_offset"), ([0, 2, 4], "query_offset")]
)
def test_a_shared_query_takes_no_offsets_but_its_own(given, word):
    q, k, v = torch.randn(4, 2, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    offsets = torch.tensor([0, 3, 10])

    def call():
        return jagged_flash_attention(q, k, v, torch.tensor(given), offsets, broadcast_q=True)

    if word is None:
        assert torch.equal(call(), jagged_flash_attention(q, k, v, None, offsets, broadcast_q=True))
    else:
        with pytest.raises(ValueError, match=word):
            call()


@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_torch_func_transforms(backend):
    offsets = torch.tensor([0, 3, 3, 10])
    q, k, v = (torch.randn(10, 2, 16) for _ in range(3))

    def attend(x):
        return jagged_flash_attention(x, k, v, offsets, offsets, causal=True, backend=backend)

    start = q.clone().requires_grad_()
    want = torch.autograd.grad(attend(start).square().sum(), start)[0]
    assert torch.allclose(torch.func.grad(lambda x: attend(x).square().sum())(q), want, atol=1e-5)
    assert torch.allclose(torch.func.vjp(attend, q)[1](2 * attend(q))[0], want, atol=1e-5)
    both = torch.stack([q, q + 1])
    assert torch.allclose(torch.vmap(attend)(both)[1], attend(q + 1), atol=1e-6)
    per_sample = torch.vmap(torch.func.grad(lambda x: attend(x).square().sum()))(both)
    assert torch.allclose(per_sample[0], want, atol=1e-5)


def test_jacrev_and_functional_call():
    offsets = torch.tensor([0, 2, 5])
    layer, x = jfa.JaggedSelfAttention(8, 2), torch.randn(5, 8)
    layer(x, offsets).square().sum().backward()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    got = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x, offsets)).square().sum())(parameters)
    assert all(torch.allclose(got[name], p.grad, atol=1e-5) for name, p in layer.named_parameters())
    q = torch.randn(5, 2, 4)

    def attend(y):
        return jagged_flash_attention(y, q, q, offsets, offsets)

    assert torch.allclose(torch.func.jacrev(attend)(q), torch.autograd.functional.jacobian(attend, q), atol=1e-6)


@pytest.mark.parametrize(
    "transform", [torch.func.hessian, lambda f: torch.func.grad(torch.func.grad(f))], ids=["hessian", "grad"]
)
def test_transforms_that_cannot_work_name_the_operator(transform):
    offsets = torch.tensor([0, 2, 5])
    q = torch.randn(5, 2, 4)

    def loss(y):
        return jagged_flash_attention(y, q, q, offsets, offsets).sum()

    with pytest.raises((NotImplementedError, RuntimeError), match="jagged_flash_attention|scalar"):
        transform(loss)(q)


def test_the_way_past_the_dispatcher_and_the_op_agree():
    offsets = torch.tensor([0, 3, 3, 10])
    q, k, v = (torch.randn(10, 2, 16, requires_grad=True) for _ in range(3))
    results = []
    for way in (op.attend_eagerly, op.attend_by_op):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jfa.attention._way", lambda *_, way=way: way)
            out, lse = jagged_flash_attention(q, k, v, offsets, offsets, return_lse=True, backend="portable")
            results.append((out, lse, *torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_dispatch_mode_sees_the_op():
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    q = torch.randn(5, 2, 4)
    offsets = torch.tensor([0, 2, 5])
    with Spy():
        jagged_flash_attention(q, q, q, offsets, offsets)
    assert "jfa" in seen


@pytest.mark.parametrize("backend", ["portable", "hopper", "blackwell"])
def test_explain_names_the_form(backend):
    q, kv = torch.randn(16, 2, 64, dtype=torch.bfloat16), torch.randn(40, 2, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 10, 40])
    text = str(jfa.explain(q, kv, kv, None, offsets, broadcast_q=True, backend=backend))
    assert "forward: " in text and "backward: resident" in text


# ------------------------------------------------------------------------------------------- what users hand over by mistake
def _small(dtype=torch.float32):
    """Return q, k, v of two sequences and their offsets."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(rows, 2, 16, generator=g).to(dtype) for rows in (9, 11, 11))
    return q, k, v, torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 6, 11], dtype=torch.int32)


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize(
    "scale, kind",
    [
        (2j, TypeError),
        ([0.5], TypeError),
        ({}, TypeError),
        (torch.ones(3), (TypeError, ValueError, RuntimeError)),
        (torch.tensor(1j), (TypeError, ValueError, RuntimeError)),
        (-(10**309), OverflowError),
        (torch.tensor(0.5, requires_grad=True), ValueError),
        (torch.nn.Parameter(torch.ones(1)), ValueError),
    ],
    ids=str,
)
def test_a_scale_that_is_no_constant_number_is_named(backend, scale, kind):
    *tensors, qo, ko = _small()
    with pytest.raises(kind, match="sm_scale"):
        jfa.jagged_flash_attention(*tensors, qo, ko, sm_scale=scale, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_a_scale_may_be_a_number_in_a_tensor(backend):
    *tensors, qo, ko = _small()
    expected = jfa.jagged_flash_attention(*tensors, qo, ko, sm_scale=0.25, backend=backend)
    leaf = torch.tensor(0.25, requires_grad=True)
    with torch.no_grad():
        found = jfa.jagged_flash_attention(*tensors, qo, ko, sm_scale=leaf, backend=backend)
    assert torch.equal(found, expected)
    assert torch.equal(jfa.jagged_flash_attention(*tensors, qo, ko, sm_scale=leaf.detach(), backend=backend), expected)


@pytest.mark.parametrize("name", ["max_seq_len_q", "max_seq_len_kv"])
@pytest.mark.parametrize("told", [torch.tensor(6.9), torch.tensor([6, 7]), torch.tensor([]), torch.ones(1)], ids=str)
def test_a_hint_in_a_tensor_is_one_whole_number(name, told):
    *tensors, qo, ko = _small()
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        jfa.jagged_flash_attention(*tensors, qo, ko, **{name: told})


@pytest.mark.parametrize("name", ["query_offset", "key_offset", "output_offset"])
def test_sparse_offsets_are_named(name):
    q, k, v, qo, ko = _small()
    offsets = dict(query_offset=qo, key_offset=ko)
    if name == "output_offset":
        offsets = dict(key_offset=ko, output_offset=torch.tensor([0, 9, 18], dtype=torch.int32), broadcast_q=True)
    offsets[name] = offsets[name].to_sparse()
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor"):
        jfa.jagged_flash_attention(q, k, v, **offsets)


@pytest.mark.parametrize("backend", ["reference", "portable", "hopper"])
@pytest.mark.parametrize("which", range(5))
def test_a_minus_that_torch_keeps_apart_counts(backend, which):
    """``x.conj().imag`` shares x's memory and is its negative: kernels read memory. Inputs, and gradients of both outputs."""
    *inputs, qo, ko = _small(torch.float16)
    g = torch.Generator().manual_seed(4)
    gradients = [torch.randn(9, 2, 16, generator=g).half(), torch.randn(2, 9, generator=g)]
    results = []
    for negated in (lambda x: -x, torch._neg_view):
        given = [negated(x) if i == which else x for i, x in enumerate((*inputs, *gradients))]
        assert negated is not torch._neg_view or given[which].is_neg()
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        outputs = jfa.jagged_flash_attention(*leaves, qo, ko, return_lse=True, backend=backend)
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, given[3:])])
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def test_many_gradients_at_once_are_right_or_refused():
    *inputs, qo, ko = _small()
    gradients = torch.randn(3, 9, 2, 16, generator=torch.Generator().manual_seed(5))
    leaves = [x.requires_grad_() for x in inputs]
    single = jfa.jagged_flash_attention(*leaves, qo, ko)
    expected = torch.autograd.grad(single, leaves[0], gradients[2], retain_graph=True)[0]
    many = torch.autograd.grad(single, leaves[0], gradients, is_grads_batched=True)[0]
    torch.testing.assert_close(many[2], expected)
    out = jfa.jagged_flash_attention(*leaves, qo, ko, backend="portable")
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(out, leaves[0], gradients, is_grads_batched=True)
    _, back = torch.func.vjp(
        lambda q: jfa.jagged_flash_attention(q, *inputs[1:], qo, ko, backend="portable"), leaves[0].detach()
    )
    torch.testing.assert_close(torch.func.vmap(back)(gradients)[0][2], expected, rtol=1e-4, atol=1e-5)
