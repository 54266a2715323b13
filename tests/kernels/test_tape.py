"""Calls that come again: the same results as the long way, whatever moved, and the long way where a tape would be wrong."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.utils.checkpoint

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa  # noqa: E402
from jfa import reference  # noqa: E402
from jfa.attention import arguments, forms, op, prepared  # noqa: E402
from jfa.kernels import registry  # noqa: E402
from jfa.kernels.common import driver as cuda  # noqa: E402
from jfa.kernels.common import launcher, planner  # noqa: E402
from jfa.kernels.preference import kind_of  # noqa: E402
from jfa.layout import offsets_from_lengths  # noqa: E402
from tests.attention_cases import Case, judge  # noqa: E402
from tests.kernels.emulated_driver import emulated  # noqa: E402


@pytest.fixture
def driver():
    with emulated() as made:
        yield made


KINDS = {
    "self": {},
    "causal": dict(options=dict(causal=True)),
    "window": dict(options=dict(window_size=(3, 5))),
    "grouped": dict(heads=4),
    "head dims": dict(dim=48, dim_v=32),
    "shared": dict(shared_q=9),
    "scale 0": dict(options=dict(sm_scale=0.0)),
}


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_come_again_agree_with_fp64(driver, backend, kind):
    """Other numbers, lengths and addresses in each round; rows past the last sequence hold NaN."""
    lengths = [5, 0, 20, 3], [9, 17, 0, 2], [28, 0, 0, 0], [7, 7, 7, 7], [0, 1, 26, 1], [3, 9, 9, 7]
    for seed, (len_q, len_kv) in enumerate(zip(lengths, lengths[::-1])):
        judge(Case(len_q, len_kv, dtype=torch.bfloat16, seed=seed, **{"dim": 32, **KINDS[kind]}), backend=backend)
    assert all_taped() and driver.launches >= 6


def tensors(rows: int = 24, heads: int = 2, dim: int = 32, seed: int = 0, **more):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, heads, dim, generator=generator).to(torch.bfloat16).requires_grad_(more.get("grad", True))
        for _ in range(3)
    ]


OFFSETS = offsets_from_lengths([10, 0, 14])


def attend(q, k, v, offsets=OFFSETS, **options):
    return jfa.jagged_flash_attention(q, k, v, offsets, offsets, backend=options.pop("backend", "hopper"), **options)


def truth(q, k, v, offsets=OFFSETS, **options):
    return reference.attention(
        *(x.detach().double() for x in (q, k, v)), offsets, offsets, dtype=torch.float64, **options
    )


def assert_near(found, expected):
    torch.testing.assert_close(found.detach().double(), expected, atol=2e-2, rtol=2e-2)


def only() -> prepared.Prepared:
    (kept,) = prepared._KNOWN.values()
    return kept


def form(grad: bool = True) -> forms.Form:
    """The one form of the one signature."""
    (found,) = only().forward[grad].forms
    return found


def backwards() -> list[forms.Form]:
    """All forms of backwards of the one signature."""
    return [x for made in only().forward[True].forms for lesson in made.backward.values() for x in lesson.forms]


def all_taped() -> bool:
    """Whether there are forms of both passes, and a tape for each."""
    made = [*only().forward[True].forms, *backwards()]
    assert all(x.tape is not None for x in made), [x.why_not for x in made]
    return bool(only().forward[True].forms and backwards())


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_without_gradients(driver, backend):
    for seed in range(4):
        with torch.no_grad():
            q, k, v = tensors(seed=seed)
            assert_near(attend(q, k, v, backend=backend), truth(q, k, v))
    assert form(False).tape is not None and not only().forward[True].forms
    q, k, v = tensors(seed=9, grad=False)
    out = attend(q, k, v, backend=backend)
    assert not out.requires_grad
    assert_near(out, truth(q, k, v))


def test_one_tensor_in_three_roles_and_then_three(driver):
    for seed in range(3):
        q, _, _ = tensors(seed=seed)
        assert_near(attend(q, q, q), truth(q, q, q))
    q, k, v = tensors(seed=7)
    assert form().tape is not None
    assert_near(attend(q, k, v), truth(q, k, v))


def test_slices_of_one_tensor(driver):
    for seed in range(4):
        whole = torch.randn(24, 3, 2, 32, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        q, k, v = (x.requires_grad_() for x in whole.unbind(1))
        assert_near(attend(q, k, v), truth(q, k, v))
    assert form().tape is not None


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_a_kept_graph_is_walked_again_and_again(driver, backend):
    for seed in range(5):
        q, k, v = tensors(seed=seed)
        out = attend(q, k, v, backend=backend)
        grads = [torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True) for _ in range(4)]
        for other in grads[1:]:
            for a, b in zip(grads[0], other):
                assert torch.equal(a, b)
    assert all_taped() and len(backwards()) == 2  # the first walk of a graph, and all others


def test_gradients_that_nobody_needs(driver):
    for seed in range(4):
        q, k, v = tensors(seed=seed)
        k, v = k.detach(), v.detach()
        out = attend(q, k, v, backend="portable")
        (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
        fp64 = q.detach().double().requires_grad_()
        expected = reference.attention(fp64, k.double(), v.double(), OFFSETS, OFFSETS, dtype=torch.float64)
        assert_near(dq, torch.autograd.grad(expected, fp64, torch.ones_like(expected))[0])
    assert [x.present for x in backwards()] == [(True, False, False)]


def test_only_the_gradient_of_the_lse(driver):
    for seed in range(4):
        q, k, v = tensors(seed=seed)
        _, lse = attend(q, k, v, return_lse=True)
        grads = torch.autograd.grad(lse[:, :10].sum(), (q, k, v))
        fp64 = [x.detach().double().requires_grad_() for x in (q, k, v)]
        _, expected = reference.attention(*fp64, OFFSETS, OFFSETS, dtype=torch.float64, return_lse=True)
        for found, other in zip(grads[:2], torch.autograd.grad(expected[:, :10].sum(), fp64[:2])):
            assert_near(found, other)
        assert not grads[2].any()


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_with_plans(driver, backend):
    sizes = dict(rows_q=24, rows_kv=24, num_heads=2, head_dim=32, backend=backend)
    for seed, lengths in enumerate(([10, 0, 14], [1, 20, 3], [8, 8, 8], [24, 0, 0], [0, 0, 24])):
        offsets = offsets_from_lengths(lengths)
        plan = jfa.plan(offsets, offsets, **sizes)
        q, k, v = tensors(seed=seed)
        for _ in range(2):
            out = attend(q, k, v, offsets, backend="auto", plan=plan)
            assert_near(out, truth(q, k, v, offsets))
            dv = torch.autograd.grad(out, v, torch.ones_like(out))[0]
            assert torch.isfinite(dv).all()
    assert form().tape is not None
    with pytest.raises(ValueError, match="plan was built for num_heads"):
        attend(*tensors(heads=1), plan=plan, backend="auto")
    with pytest.raises(TypeError, match="plan must come from"):
        attend(*tensors(), plan=[1])


def test_offsets_changed_before_the_backward_are_an_error(driver):
    for seed in range(4):
        offsets = OFFSETS.clone()
        q, k, v = tensors(seed=seed)
        out = attend(q, k, v, offsets)
        offsets.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_second_derivative_is_an_error(driver):
    for seed in range(5):
        q, k, v = tensors(seed=seed)
        (dq,) = torch.autograd.grad(attend(q, k, v).float().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="no double backward"):
            torch.autograd.grad(dq.float().sum(), q)


def test_wrong_arguments_stay_wrong_after_right_ones(driver):
    q, k, v = tensors()
    for _ in range(4):
        attend(q, k, v, sm_scale=1.0, max_seq_len_q=1, window_size=1, causal=True)
    with pytest.raises(TypeError, match="sm_scale"):
        attend(q, k, v, sm_scale=True, max_seq_len_q=1, window_size=1, causal=True)
    usual = dict(sm_scale=1.0, max_seq_len_q=1, window_size=1, causal=True)
    for name, value in dict(window_size=True, max_seq_len_q=1.0, broadcast_q=0, deterministic=0, return_lse=0).items():
        wrong = {name: value}
        with pytest.raises((TypeError, ValueError)):
            attend(q, k, v, **(usual | wrong))
    with pytest.raises(ValueError, match="sequences"):
        jfa.jagged_flash_attention(q, k, v, OFFSETS[:-1], OFFSETS, backend="hopper")
    with pytest.raises(ValueError, match="head dim"):
        attend(q, k[..., :16], v)


def test_what_has_to_see_an_op_sees_it(driver):
    q, k, v = tensors()
    for _ in range(4):
        attend(q, k, v)
    before = driver.launches
    with torch.autograd.profiler.profile() as seen:
        attend(q, k, v)
    assert any("jfa::attention" in event.name for event in seen.function_events)
    assert driver.launches >= before


def test_who_hooks_into_triton_s_launches_sees_them(driver, monkeypatch):
    def watch():
        asked.append(True)
        return True

    asked, usual = [], launcher.hooks
    monkeypatch.setattr(launcher, "hooks", watch)
    for seed in range(3):
        attend(*tensors(seed=seed))
    assert driver.launches == 0 and not only().forward[True].forms  # Triton's own way, which compiles at each call here
    monkeypatch.setattr(launcher, "hooks", usual)
    for seed in range(3):
        attend(*tensors(seed=seed))
    assert form().tape is not None
    before, asked[:] = driver.launches, []
    monkeypatch.setattr(launcher, "hooks", watch)
    q, k, v = tensors(seed=5)
    assert_near(attend(q, k, v), truth(q, k, v))
    assert asked and driver.launches == before


def test_autocast_and_nested_tensors_come_again(driver):
    for seed in range(4):
        q, k, v = (x.detach().float().requires_grad_() for x in tensors(seed=seed))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attend(q, k, v)
        assert out.dtype is torch.bfloat16
        assert_near(out, truth(*(x.to(torch.bfloat16) for x in (q, k, v))))
    assert form().tape is not None
    for seed in range(4):
        parts = [torch.nested.nested_tensor_from_jagged(x.detach(), OFFSETS.long()) for x in tensors(seed=seed)]
        out = jfa.jagged_flash_attention(*parts, backend="hopper")
        assert out.is_nested
        assert_near(out.values(), truth(*(x.values() for x in parts)))


def test_a_tape_that_is_played_already_lets_the_call_take_the_long_way(driver):
    for seed in range(5):
        q, k, v = tensors(seed=seed)
        attend(q, k, v).sum().backward()
    deck = form().tape._deck
    q, k, v = tensors(seed=8)
    with deck.lock:
        out = attend(q, k, v)
    assert_near(out, truth(q, k, v))
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    again = attend(q, k, v)
    for a, b in zip(grads, torch.autograd.grad(again, (q, k, v), torch.ones_like(out))):
        assert torch.equal(a, b)


def test_many_threads_at_once(driver):
    found, lock = {}, threading.Lock()

    def work(seed):
        for _ in range(4):
            with lock:  # the emulator runs one launch at a time
                q, k, v = tensors(seed=seed)
                found[seed] = q, k, v, attend(q, k, v)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for q, k, v, out in found.values():
        assert_near(out, truth(q, k, v))


@pytest.mark.parametrize("call", ["launch", "fill", "replace_address"])
@pytest.mark.parametrize("comes_again", [True, False])
def test_a_thread_without_a_context_is_given_one(driver, monkeypatch, call, comes_again):
    """Whichever call of the driver is the first of the thread, on a tape and on the long way."""
    for seed in range(5):
        q, k, v = tensors(seed=seed)
        out = attend(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    made, usual = [], getattr(driver, call)
    monkeypatch.setattr(driver, call, lambda *args: usual(*args) if made else cuda.INVALID_CONTEXT)
    monkeypatch.setattr(driver, "make_current", made.append)
    if not comes_again:
        if call == "fill":
            return  # torch's own on the long way
        prepared.forget()
    elif call == "replace_address":
        return  # a tape stores addresses itself
    q, k, v = tensors(seed=6)
    out = attend(q, k, v)
    assert_near(out, truth(q, k, v))
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert made == [q.device.index] and all(torch.isfinite(x).all() for x in grads)


def test_a_refused_launch_is_an_error(driver):
    for seed in range(4):
        attend(*tensors(seed=seed))
    driver.code = 719
    with pytest.raises(RuntimeError, match="CUresult 719"):
        attend(*tensors(seed=6))


def test_signatures_are_forgotten_when_there_are_many(driver, monkeypatch):
    monkeypatch.setattr(prepared, "MOST_SIGNATURES", 3)
    for dim in range(16, 72, 8):
        attend(*tensors(dim=dim))
        assert len(prepared._KNOWN) <= 3


def test_what_is_kept_holds_no_tensor_of_a_call(driver):
    import gc
    import weakref

    alive = []
    for seed in range(5):
        q, k, v = tensors(seed=seed)
        offsets = OFFSETS.clone()
        out = attend(q, k, v, offsets)
        out.sum().backward()
        alive += [weakref.ref(x) for x in (q, k, v, offsets, out)]
        del q, k, v, offsets, out
    gc.collect()
    assert not any(ref() is not None for ref in alive)


# ---------------------------------------------------------------------------------------------------------- other sizes
def problem_of_sizes(
    rows_q: int, rows_kv: int, sequences: int, seed: int, heads=(2, 2), dim: int = 32, shared: bool = False
):
    """Return q, k, v that end with rows of no sequence where that leaves some, and offsets of random lengths."""
    generator = torch.Generator().manual_seed(seed)

    def offsets(rows):
        inner = torch.randint(0, rows + 1, (sequences,), generator=generator).sort().values
        return torch.cat([torch.zeros(1, dtype=torch.int64), inner])

    shapes = (rows_q, heads[0], dim), (rows_kv, heads[1], dim), (rows_kv, heads[1], dim)
    q, k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_() for shape in shapes)
    return (q, k, v), (None if shared else offsets(rows_q), offsets(rows_kv))


def results(inputs, offsets, **options):
    """Return out, LSE and gradients."""
    out, lse = jfa.jagged_flash_attention(*inputs, *offsets, return_lse=True, **options)
    seen = torch.isfinite(lse)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return (out, lse, *torch.autograd.grad((out, lse), inputs, (dout, seen.float() * 0.5)))


def the_long_way(monkeypatch, *args, **options):
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "find", lambda *args: (None, ()))
        return results(*args, **options)


# (rows of queries, rows of keys, sequences): odd, 1, whole blocks, one more than those, fewer keys than queries and none.
SIZES = (24, 24, 3), (37, 50, 4), (1, 33, 1), (64, 64, 2), (65, 16, 5), (17, 1, 3), (40, 72, 7), (16, 0, 2), (23, 31, 3)


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("kind", ["self", "causal", "grouped", "shared", "int64"])
def test_other_sizes_in_every_call_give_what_the_long_way_gives(driver, monkeypatch, backend, kind):
    heads, dtype = (4, 2) if kind == "grouped" else (2, 2), torch.int64 if kind == "int64" else torch.int32
    options = dict(backend=backend, causal=kind == "causal", broadcast_q=kind == "shared")
    for seed, (rows_q, rows_kv, sequences) in enumerate(SIZES):
        rows_q = 9 if kind == "shared" else rows_q
        inputs, offsets = problem_of_sizes(rows_q, rows_kv, sequences, seed, heads, shared=kind == "shared")
        offsets = [None if x is None else x.to(dtype) for x in offsets]
        for found, expected in zip(
            results(inputs, offsets, **options), the_long_way(monkeypatch, inputs, offsets, **options)
        ):
            assert torch.equal(found, expected)
    made = only().forward[True].forms
    assert all(x.tape is not None for x in made) and 1 <= len(made) <= 3, [x.why_not for x in made]
    assert only().forward[True].tries <= 3


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_plans_for_other_sizes(driver, monkeypatch, backend):
    for seed, (rows_q, rows_kv, sequences) in enumerate(SIZES[:6]):
        inputs, offsets = problem_of_sizes(rows_q, rows_kv, sequences, seed)
        offsets = [x.int() for x in offsets]
        sizes = dict(rows_q=rows_q, rows_kv=rows_kv, num_heads=2, head_dim=32, backend=backend)
        plan = jfa.plan(*offsets, **sizes)
        for _ in range(2):
            found = results(inputs, offsets, plan=plan)
            for a, b in zip(found, the_long_way(monkeypatch, inputs, offsets, plan=plan)):
                assert torch.equal(a, b)
        with pytest.raises(ValueError, match="plan was built for rows_kv"):
            short = [x[: max(1, len(x) - 1)] if i else x for i, x in enumerate(inputs)]
            results(short if rows_kv > 1 else [inputs[0], *[torch.cat([x, x]) for x in inputs[1:]]], offsets, plan=plan)
    assert any(x.tape is not None for x in only().forward[True].forms)


def test_a_hint_that_changes_the_tile_gets_a_form_of_its_own(driver, monkeypatch):
    """Hopper's tiles have 64 queries where no sequence is longer, else 128 or two heads."""
    for seed, hint in enumerate((64, 65, 1, 2000, 63, 64, 128, None, 0)):
        inputs, offsets = problem_of_sizes(30 + seed, 40, 3, seed, dim=128)
        offsets = [x.int() for x in offsets]
        options = dict(backend="hopper", max_seq_len_q=hint, max_seq_len_kv=hint)
        for a, b in zip(results(inputs, offsets, **options), the_long_way(monkeypatch, inputs, offsets, **options)):
            assert torch.equal(a, b)
    tiles = {frozenset(x for step in form.tape.steps if hasattr(step, "variant") for x in [step.variant.options.get("cfg")])
             for form in only().forward[True].forms}  # fmt: skip
    assert len(tiles) == 2 and len(only().forward[True].forms) == 3  # no hint is compared with 64, 0 is


def test_the_backend_that_auto_takes_follows_from_sizes(driver, monkeypatch):
    """One query per sequence and many keys: the portable backend; else Hopper's."""
    monkeypatch.setattr(registry, "pick", pick_as_on_a_gpu)
    for seed, (rows_q, rows_kv) in enumerate(((3, 220), (40, 40), (3, 230), (50, 40), (2, 250), (1, 40))):
        inputs, offsets = problem_of_sizes(rows_q, rows_kv, 3, seed)
        offsets = [x.int() for x in offsets]
        for a, b in zip(results(inputs, offsets), the_long_way(monkeypatch, inputs, offsets)):
            assert torch.equal(a, b)
    assert {x.backend for x in only().forward[True].forms} == {"portable", "hopper"}


def pick_as_on_a_gpu(problem, backend):
    assert backend == "auto"
    return next(name for name in kind_of(problem).order if name in ("portable", "hopper"))


def test_sizes_that_are_wrong_stay_wrong_after_right_ones(driver):
    for rows in (24, 30, 31):
        inputs, offsets = problem_of_sizes(rows, rows, 3, rows)
        results(inputs, [x.int() for x in offsets], backend="hopper", max_seq_len_q=7)
    q, k, v = inputs
    offset = offsets[0].int()
    call = dict(backend="hopper", max_seq_len_q=7)
    with pytest.raises(ValueError, match="same rows"):
        jfa.jagged_flash_attention(q, k, v[:-1], offset, offset, **call)
    with pytest.raises(ValueError, match="sequences"):
        jfa.jagged_flash_attention(q, k, v, offset, offset[:-1], **call)
    with pytest.raises(ValueError, match="1-D"):
        jfa.jagged_flash_attention(q, k, v, offset, offset[:0], **call)
    with pytest.raises(ValueError, match="negative"):
        jfa.jagged_flash_attention(q, k, v, offset, offset, backend="hopper", max_seq_len_q=-1)
    with pytest.raises(ValueError, match="fit int32"):
        jfa.jagged_flash_attention(q, k, v, offset, offset, backend="hopper", max_seq_len_q=2**31)
    with pytest.raises(ValueError, match="3-D"):
        jfa.jagged_flash_attention(q[0], k, v, offset, offset, **call)


def test_int64_offsets_past_int32_never_become_others(driver, monkeypatch):
    """2**32 + 7 is 7 in int32; in the packed tensor it is past the end."""
    inputs, _ = problem_of_sizes(24, 24, 2, 0)
    for step in range(4):
        wide = torch.tensor([0, 9 + step, 2**32 + 7])
        whole = torch.tensor([0, 9 + step, 24], dtype=torch.int32)
        found = results(inputs, (wide, wide), backend="portable")
        for a, b in zip(found, results(inputs, (whole, whole), backend="portable")):
            assert torch.equal(a, b)
    assert len(prepared._KNOWN) == 2 and all(x.forward[True].forms for x in prepared._KNOWN.values())


def test_forms_have_an_end(driver, monkeypatch):
    monkeypatch.setattr(forms, "MOST_FORMS", 2)
    for seed, hint in enumerate((64, 64, None, None, 2000, 2000)):
        inputs, offsets = problem_of_sizes(30, 40, 3, seed, dim=128)
        offsets = [x.int() for x in offsets]
        found = results(inputs, offsets, backend="hopper", max_seq_len_q=hint)
        for a, b in zip(found, the_long_way(monkeypatch, inputs, offsets, backend="hopper", max_seq_len_q=hint)):
            assert torch.equal(a, b)
    assert len(only().forward[True].forms) == 2


# ------------------------------------------------------------------------------------------------------ through the op
def by_graph(query, key, value, call) -> tuple:
    """Return what a compiled graph's forward and backward give: two calls of ops, without autograd."""

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            out, lse = op.attend_by_op(*inputs, call)
            ctx.save_for_backward(*inputs, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, *gradients):
            p = call.problem
            arguments = op.op_arguments(call, call.query_offset, p.key_offset, p.output_offset)
            with torch.no_grad():
                return torch.ops.jfa.attention_backward(*gradients, *ctx.saved_tensors, [True] * 3, *arguments)

    return Graph.apply(query, key, value)


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_the_registered_op_comes_again_as_well(driver, monkeypatch, backend, shared, graph):
    """Called by itself it is as an eager call; in torch.compile's graphs its forward leaves no lists, and its backward is a
    call of its own."""
    monkeypatch.setattr(jfa.attention, "_way", lambda *tensors: by_graph if graph else op.attend_by_op)
    unfound = lambda *args: (None, ())
    for seed, (rows_q, rows_kv, sequences) in enumerate(SIZES[:6]):
        inputs, offsets = problem_of_sizes(9 if shared else rows_q, rows_kv, sequences, seed, shared=shared)
        offsets = [x if x is None or seed % 2 else x.int() for x in offsets]
        options = dict(backend=backend, causal=True, broadcast_q=shared)
        with monkeypatch.context() as patch:
            patch.setattr(prepared, "find", unfound)
            found, others = launches_of(monkeypatch, lambda: results(inputs, offsets, **options))
            patch.setattr(prepared, "find_checked", unfound)
            expected = results(inputs, offsets, **options)
        assert others == 0 or seed < 4
        for a, b in zip(found, expected):
            assert torch.equal(a, b)
    assert len(prepared._KNOWN) == 2  # int32 and int64 offsets
    for kept in prepared._KNOWN.values():
        made = kept.forward[not graph].forms
        owners = [kept.alone] if graph else made
        backwards = [x for owner in owners for lesson in owner.backward.values() for x in lesson.forms]
        assert made and backwards and all(x.tape for x in (*made, *backwards)), [x.why_not for x in (*made, *backwards)]


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("shared", [False, True])
def test_offsets_are_checked_in_every_call_that_asks_for_it(driver, monkeypatch, backend, shared):
    """The launches are played, after the offsets have been read; wrong ones in a call that comes again are an error."""
    read = []
    monkeypatch.setattr(op, "check_contents", lambda *args: read.append(1) or arguments.check_contents(*args))
    inputs, offsets = problem_of_sizes(9 if shared else 24, 30, 3, 3, shared=shared)
    offsets = [x if x is None else x.int() for x in offsets]
    options = dict(backend=backend, broadcast_q=shared, check_offsets=True)
    played_as_the_long_way(monkeypatch, inputs, offsets, **options)
    assert len(read) == 4
    for wrong in ([0, 12, 9, 30], [1, 2, 3, 30], [0, 12, 20, 31]):
        with pytest.raises(ValueError, match="key_offset"):
            results(inputs, [offsets[0], torch.tensor(wrong, dtype=torch.int32)], **options)
    if shared:
        with pytest.raises(ValueError, match="query_offset"):
            results(inputs, [torch.tensor([0, 8], dtype=torch.int32), offsets[1]], **options)
    played_as_the_long_way(monkeypatch, inputs, offsets, **options)
    with pytest.raises(ValueError, match="max_seq_len_kv"):
        results(inputs, offsets, max_seq_len_kv=1, **options)


def test_a_compiled_function_plays(driver):
    offsets = OFFSETS.clone()

    def step(q, k, v):
        return jfa.jagged_flash_attention(q, k, v, offsets, offsets, causal=True, backend="portable") * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in range(4):
        q, k, v = tensors(seed=seed)
        for a, b in zip(*(torch.autograd.grad(f(q, k, v).float().sum(), (q, k, v)) for f in (compiled, step))):
            assert_near(a, b.double())
    played = [kept for kept in prepared._KNOWN.values() if kept.alone.backward]
    assert len(played) == 1 and played[0].forward[False].forms[0].tape is not None
    (lesson,) = played[0].alone.backward.values()
    assert lesson.forms[0].tape is not None


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_a_checkpoint_s_repetition_saves_what_its_forward_saved(driver, backend, return_lse):
    """The forward of a signature's first call takes the long way, its repetition in the backward is played."""
    for seed in range(4):
        q, k, v = tensors(seed=seed)

        def call(q, k, v):
            found = attend(q, k, v, backend=backend, return_lse=return_lse)
            return found if return_lse else (found,)

        plain = torch.autograd.grad(sum(x[:, :2].float().sum() for x in call(q, k, v)), (q, k, v)) if seed else None
        repeated = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
        grads = torch.autograd.grad(sum(x[:, :2].float().sum() for x in repeated), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(grads, plain or grads))
    assert all_taped()


# ------------------------------------------------------------------------------------------------------------ left to torch
def laid(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return the values of ``x`` in memory of another layout, as a leaf."""
    x = x.detach()
    if how == "every other column":
        x = x.repeat_interleave(2, -1)[..., ::2]
    elif how == "odd rows":  # rows of heads are 2 bytes more than whole 16
        x = torch.cat([x, x.new_zeros(*x.shape[:2], 1)], 2)[..., :-1]
    elif how == "not at whole 16 bytes":
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        assert x.data_ptr() % 16
    return x.requires_grad_()


def launches_of(monkeypatch, call):
    """Return what a call returns, and how many launches were no tape's."""
    others, launch = [], launcher.Variant._launch
    with monkeypatch.context() as patch:
        patch.setattr(launcher.Variant, "_launch", lambda *args: others.append(args[0]) or launch(*args))
        return call(), len(others)


def played_as_the_long_way(monkeypatch, inputs, offsets, calls: int = 2, **options) -> None:
    """Make a call often enough, and compare what is played with the long way, bit by bit."""
    for _ in range(calls):
        results(inputs, offsets, **options)
    found, others = launches_of(monkeypatch, lambda: results(inputs, offsets, **options))
    assert others == 0, "the long way launched"
    for a, b in zip(found, the_long_way(monkeypatch, inputs, offsets, **options), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("how", ["every other column", "odd rows", "not at whole 16 bytes"])
@pytest.mark.parametrize("which", [(0,), (1, 2)])
def test_layouts_that_no_kernel_takes_are_played(driver, monkeypatch, backend, how, which):
    for seed, sizes in enumerate([(24, 24, 3), (37, 30, 4)]):
        inputs, offsets = problem_of_sizes(*sizes, seed)
        inputs = [laid(x, how) if i in which else x for i, x in enumerate(inputs)]
        played_as_the_long_way(monkeypatch, inputs, [x.int() for x in offsets], backend=backend)
    assert only().forward[True].tries <= 2


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("how", ["every other column", "odd rows", "not at whole 16 bytes", "one number"])
def test_gradients_of_any_layout_are_played(driver, monkeypatch, backend, how):
    q, k, v = tensors(seed=3)

    def both():
        out = attend(q, k, v, backend=backend)
        dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        dout = dout[:1, :1, :1].expand(out.shape) if how == "one number" else laid(dout, how).detach()
        return torch.autograd.grad(out, (q, k, v), dout)

    for _ in range(4):
        both()
    found, others = launches_of(monkeypatch, both)
    assert others == 0
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "find", lambda *args: (None, ()))
        for a, b in zip(found, both()):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_alignment_is_looked_at_in_every_call(driver, monkeypatch, backend):
    """Calls of one signature whose tensors begin at whole 16 bytes or not, in turn: none takes the other's record."""
    inputs, offsets = problem_of_sizes(37, 50, 4, 5)
    moved = [laid(x, "not at whole 16 bytes") for x in inputs]
    where = [x.int() for x in offsets]
    shifted = [torch.cat([x.new_zeros(1), x])[1:] for x in where]
    expected = the_long_way(monkeypatch, inputs, where, backend=backend)
    for step in range(18):
        q, k, v = ((moved if step >> i & 1 else inputs)[i] for i in range(3))
        for a, b in zip(results((q, k, v), shifted if step % 5 == 4 else where, backend=backend), expected):
            assert torch.equal(a, b)
    assert len(prepared._KNOWN) == 1


@pytest.mark.parametrize("scale", [-0.3, -1.0])
@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_negative_scales_are_played(driver, monkeypatch, backend, scale):
    inputs, offsets = problem_of_sizes(37, 50, 4, 2)
    played_as_the_long_way(monkeypatch, inputs, [x.int() for x in offsets], backend=backend, sm_scale=scale)
    assert_near(results(inputs, offsets, backend=backend, sm_scale=scale)[0], truth_of(inputs, offsets, sm_scale=scale))


def truth_of(inputs, offsets, **options):
    return reference.attention(*(x.detach().double() for x in inputs), *offsets, dtype=torch.float64, **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_long_shared_queries_are_played(driver, monkeypatch, deterministic, slots):
    """More than Hopper keeps on chip: their dQ is summed over the batches by torch, or unpacked by it."""
    inputs, offsets = problem_of_sizes(130, 20, 2, 4, shared=True)
    options = dict(broadcast_q=True, deterministic=deterministic, backend="hopper")
    if slots:
        options["output_offset"] = torch.tensor([130, 0, 260], dtype=torch.int32)
    played_as_the_long_way(monkeypatch, inputs, [None, offsets[1].int()], **options)


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("causal", [False, True])
def test_lists_that_torch_sorts_are_played(driver, monkeypatch, backend, causal):
    """Where there are very many sequences; here from three on."""
    monkeypatch.setattr(planner, "SORT_FROM", 2)
    for seed, sizes in enumerate([(24, 24, 3), (37, 50, 5), (60, 60, 7)]):
        inputs, offsets = problem_of_sizes(*sizes, seed)
        played_as_the_long_way(monkeypatch, inputs, [x.int() for x in offsets], backend=backend, causal=causal)


@pytest.mark.parametrize("dim", [20, 36])
def test_head_dims_that_are_padded_are_played(driver, monkeypatch, dim):
    inputs, offsets = problem_of_sizes(37, 50, 4, 2, dim=dim)
    played_as_the_long_way(monkeypatch, inputs, [x.int() for x in offsets], backend="hopper")
