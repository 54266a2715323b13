"""Calls that come again: the same results as the long way, whatever moved, and the long way where a tape would be wrong."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa  # noqa: E402
from jfa import reference  # noqa: E402
from jfa.attention import prepared  # noqa: E402
from jfa.kernels.common import driver as cuda  # noqa: E402
from jfa.kernels.common.tape import Recorder, Tape, Unrepeatable  # noqa: E402
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
    (kept,) = prepared._KNOWN.values()
    (backward,) = kept.backward.values()
    assert kept.forward[True].tape is not None and backward.tape is not None, (
        kept.forward[True].why_not,
        backward.why_not,
    )
    assert driver.launches >= 6


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


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_without_gradients(driver, backend):
    for seed in range(4):
        with torch.no_grad():
            q, k, v = tensors(seed=seed)
            assert_near(attend(q, k, v, backend=backend), truth(q, k, v))
    assert only().forward[False].tape is not None and only().forward[True].tape is None
    q, k, v = tensors(seed=9, grad=False)
    out = attend(q, k, v, backend=backend)
    assert not out.requires_grad
    assert_near(out, truth(q, k, v))


def test_one_tensor_in_three_roles_and_then_three(driver):
    for seed in range(3):
        q, _, _ = tensors(seed=seed)
        assert_near(attend(q, q, q), truth(q, q, q))
    q, k, v = tensors(seed=7)
    assert only().forward[True].tape is not None
    assert_near(attend(q, k, v), truth(q, k, v))


def test_slices_of_one_tensor(driver):
    for seed in range(4):
        whole = torch.randn(24, 3, 2, 32, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        q, k, v = (x.requires_grad_() for x in whole.unbind(1))
        assert_near(attend(q, k, v), truth(q, k, v))
    assert only().forward[True].tape is not None


def test_strides_that_need_a_copy_take_the_long_way(driver):
    for seed in range(4):
        q, k, v = (x.detach().repeat_interleave(2, -1)[..., ::2] for x in tensors(seed=seed))
        assert_near(attend(q, k, v), truth(q, k, v))
    assert only().forward[False].tape is None and "copy_" in only().forward[False].why_not


def test_an_input_that_is_not_at_whole_16_bytes_takes_the_long_way(driver):
    for seed in range(3):
        attend(*tensors(seed=seed))
    q, k, v = tensors(seed=5)
    moved = torch.cat([q.new_zeros(1), q.detach().flatten()])[1:].view(q.shape).requires_grad_()
    assert moved.data_ptr() % 16
    out = attend(moved, k, v)
    assert_near(out, truth(q, k, v))
    grads = torch.autograd.grad(out, (moved, k, v), torch.ones_like(out))
    assert all(torch.isfinite(g).all() for g in grads)
    assert len(prepared._KNOWN) == 1


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_a_kept_graph_is_walked_again_and_again(driver, backend):
    for seed in range(5):
        q, k, v = tensors(seed=seed)
        out = attend(q, k, v, backend=backend)
        grads = [torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True) for _ in range(4)]
        for other in grads[1:]:
            for a, b in zip(grads[0], other):
                assert torch.equal(a, b)
    tapes = [x for x in only().backward.values() if x.tape is not None]
    assert len(tapes) == 2  # the first walk of a graph, and all others


def test_gradients_that_nobody_needs(driver):
    for seed in range(4):
        q, k, v = tensors(seed=seed)
        k, v = k.detach(), v.detach()
        out = attend(q, k, v, backend="portable")
        (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
        fp64 = q.detach().double().requires_grad_()
        expected = reference.attention(fp64, k.double(), v.double(), OFFSETS, OFFSETS, dtype=torch.float64)
        assert_near(dq, torch.autograd.grad(expected, fp64, torch.ones_like(expected))[0])
    assert [x.present for x in only().backward.values()] == [(True, False, False)]


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
    assert only().forward[True].tape is not None
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
    from jfa.kernels.common import launcher

    def watch():
        asked.append(True)
        return True

    asked, usual = [], launcher.hooks
    monkeypatch.setattr(launcher, "hooks", watch)
    for seed in range(3):
        attend(*tensors(seed=seed))
    assert (
        driver.launches == 0 and only().forward[True].tape is None
    )  # Triton's own way, which compiles at each call here
    monkeypatch.setattr(launcher, "hooks", usual)
    for seed in range(3):
        attend(*tensors(seed=seed))
    assert only().forward[True].tape is not None
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
    assert only().forward[True].tape is not None
    for seed in range(4):
        parts = [torch.nested.nested_tensor_from_jagged(x.detach(), OFFSETS.long()) for x in tensors(seed=seed)]
        out = jfa.jagged_flash_attention(*parts, backend="hopper")
        assert out.is_nested
        assert_near(out.values(), truth(*(x.values() for x in parts)))


def test_a_tape_that_is_played_already_lets_the_call_take_the_long_way(driver):
    for seed in range(5):
        q, k, v = tensors(seed=seed)
        attend(q, k, v).sum().backward()
    deck = only().forward[True].tape._deck
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
    for rows in range(24, 30):
        attend(*tensors(rows))
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


# ---------------------------------------------------------------------------------------------------------------- tapes
def recorded(run, **inputs):
    with Recorder(inputs) as seen:
        results = run(**inputs)
    return Tape(seen, results)


def test_fills_are_done_again():
    def run(x):
        out, rest = torch.zeros(6, 2, dtype=torch.bfloat16), torch.empty(4)
        return out, rest.fill_(-float("inf"))

    tape = recorded(run, x=torch.ones(2))
    (out, rest), kept = tape.play_by_views(torch.device("cpu"), [torch.ones(2)])
    assert not out.any() and (rest == -float("inf")).all() and kept is None


@pytest.mark.parametrize(
    "run, why",
    [
        (lambda x: [x + 1], "aten.add"),
        (lambda x: [torch.empty(4, 4)[:, :2]], "allocation of its own"),
        (lambda x: [torch.empty(4)[1:]], "allocation of its own"),
        (lambda x: [x], "allocation of its own"),
        (lambda x: [torch.empty(3, dtype=torch.bfloat16).zero_()], "whole words"),
        (lambda x: [torch.empty(4, dtype=torch.bfloat16).fill_(1.0)], "fill with 1.0"),
        (lambda x: [torch.empty(4).copy_(x)], "copy_"),
        (lambda x: [torch.empty(2, 3).t().zero_()], "side by side"),
        (lambda x: [torch.empty(4)] * 2, "allocation of its own"),
    ],
)
def test_what_cannot_be_done_again(run, why):
    with pytest.raises(Unrepeatable, match=why):
        recorded(run, x=torch.ones(4))


def test_a_tape_in_a_tape_is_refused():
    with Recorder({}):
        with Recorder({}) as inner:
            torch.empty(3)
    with pytest.raises(Unrepeatable, match="already"):
        Tape(inner, [])
