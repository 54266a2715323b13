"""Check what calls of the op must do on a GPU besides right numbers: graph capture, wrong offsets, strides,
torch.compile, plans.

Each check takes the name of a backend and raises AssertionError where something is wrong. Most run with ``device="cpu"``, too.
"""

from __future__ import annotations

import concurrent.futures
import random
from functools import partial
from unittest import mock

import torch

import jfa
from jfa import attention
from jfa.attention import op, prepared
from jfa.layout import offsets_from_lengths
from jfa.verify.cases import Case, judge


def split_mega_sequences_agree_with_fp64(backend: str, device: str = "cuda") -> None:
    """Judge sequences so long that their keys are split over several CTAs."""
    for shared, len_q in ((32, [1] * 4), (128, [1] * 4), (0, [40, 3, 200, 64])):
        case = Case(len_q, [9000, 30, 500, 64], heads=2, kv_heads=2, dim=128, dtype=torch.bfloat16, shared_q=shared)
        judge(case, device, backend=backend)


def _tensors(device, len_q, len_kv, heads=4, kv_heads=4, dim=64, shared_q=0, dtype=torch.bfloat16, seed=0):
    """Return (q, k, v, query offsets, key offsets), random normal, differentiable."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = lambda n, h: torch.randn(n, h, dim, device=device, dtype=dtype, generator=generator).requires_grad_()
    q, k, v = rows(shared_q or sum(len_q), heads), rows(sum(len_kv), kv_heads), rows(sum(len_kv), kv_heads)
    return q, k, v, offsets_from_lengths(len_q, device=device), offsets_from_lengths(len_kv, device=device)


def graph_capture_follows_offsets_changed_in_place(backend: str, device: str = "cuda") -> None:
    """Capture a step in a CUDA graph, change the offsets in place, replay: as a call with those offsets.

    After two calls a third is captured as its backend launches it; after five, what the calls before did is done again.
    """
    for calls in (2, 5):
        _capture(backend, device, calls)


def _capture(backend: str, device: str, calls: int) -> None:
    q, k, v, qo, ko = _tensors(device, [100, 30, 70], [60, 90, 50])
    other_q, other_k = (offsets_from_lengths(n, device=device) for n in ([10, 150, 40], [100, 20, 80]))
    grad = torch.randn(200, 4, 64, device=device, dtype=torch.bfloat16)

    def step():
        out = jfa.jagged_flash_attention(q, k, v, qo, ko, backend=backend, causal=True)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(calls):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for offsets in ((qo.clone(), ko.clone()), (other_q, other_k)):
        qo.copy_(offsets[0])
        ko.copy_(offsets[1])
        graph.replay()
        torch.cuda.synchronize()
        for name, x, y in zip(("out", "dq", "dk", "dv"), captured, step()):
            torch.testing.assert_close(x, y, msg=lambda m, n=name: f"{n}: {m}")


def calls_that_come_again_agree_with_fp64(backend: str, device: str = "cuda") -> None:
    """Judge calls of one signature, other numbers and lengths in each: from the third on only addresses are moved."""
    lengths = [90, 0, 200, 30], [70, 130, 0, 120], [320, 0, 0, 0], [80, 80, 80, 80], [0, 1, 318, 1], [300, 9, 4, 7]
    masks = dict(causal=True), dict(window_size=(30, 50)), dict(sm_scale=-0.3)
    kinds = [{}, *(dict(options=x) for x in masks), dict(heads=4), dict(dim=80, dim_v=48), dict(dim=256)]
    for kind in [*kinds, dict(shared_q=40), dict(shared_q=150)]:
        for seed, (len_q, len_kv) in enumerate(zip(lengths, lengths[::-1])):
            case = Case(len_q, len_kv, dtype=torch.bfloat16, seed=seed, **{"dim": 64, **kind})
            judge(case, device, backend=backend)


def calls_of_other_totals_agree_with_the_long_way(backend: str, device: str = "cuda", calls: int = 12) -> None:
    """Give every call other totals, numbers of sequences and hints, some int64 offsets and a query at odd addresses.

    Results must be those of calls of which nothing is kept, bit by bit, but for gradients that are summed in any order; so
    must those of the registered op, which torch.compile's graphs call.
    """
    prepared.forget()
    kinds = [{}, dict(causal=True), dict(heads=8, deterministic=True), dict(dim=128), dict(shared_q=40), dict(dim=80)]
    for kind, options in enumerate(kinds):
        sizes = {name: options.pop(name) for name in ("heads", "dim", "shared_q") if name in options}
        rng = random.Random(kind)
        for number in range(calls):
            sequences = rng.choice([1, 3, 4, 6])
            lengths = [
                [rng.choice([0, 1, rng.randint(2, 20), rng.randint(21, 120)]) for _ in range(sequences)] for _ in "qk"
            ]
            q, k, v, *offsets = _tensors(device, *lengths, seed=number, **sizes)
            offsets = [x.long() if number % 2 else x for x in offsets]
            if sizes.get("shared_q"):
                options |= dict(broadcast_q=True)
                offsets[0] = None
            if number % 5 == 4:
                odd = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)[1:].view(q.shape)
                q = odd.copy_(q.detach()).requires_grad_()
            hints = dict(max_seq_len_kv=max(lengths[1])) if number % 3 else {}
            call = partial(_results, q, k, v, offsets, return_lse=number % 4 < 3, backend=backend, **options, **hints)
            found = {"eager": call()}
            with torch.no_grad():
                found["without gradients"] = call()
            with mock.patch.object(prepared, "find", lambda *args: (None, ())):
                expected = call()
                with mock.patch.object(attention, "_way", lambda *tensors: op.attend_by_op):
                    found["by the registered op"] = call()
            for way, results in found.items():
                for name, x in results.items():
                    what = f"{options | sizes}, call {number} {way}: {name} is another than on the long way"
                    if name == "dq" and not options.get("deterministic"):
                        say = lambda message, what=what: f"{what}: {message}"
                        torch.testing.assert_close(x, expected[name], atol=2e-3, rtol=2e-2, msg=say)
                    else:
                        assert torch.equal(x, expected[name]), what
    if device != "cpu" and backend in ("portable", "hopper"):
        for grad in (True, False):
            forms = [x for kept in prepared._KNOWN.values() for x in kept.forward[grad].forms]
            assert forms and all(x.tape is not None for x in forms), [x.why_not for x in forms]


def _results(q, k, v, offsets, return_lse: bool, **options) -> dict[str, torch.Tensor]:
    """Return the output, with ``return_lse`` the LSE, and in grad mode the gradients of all of it, by name."""
    found = jfa.jagged_flash_attention(q, k, v, *offsets, return_lse=return_lse, **options)
    out, *lse = found if return_lse else (found,)
    if not torch.is_grad_enabled():
        return dict(zip(("out", "lse"), (out, *lse)))
    gradients = [torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)]
    gradients += [torch.isfinite(x) * 0.5 for x in lse]
    names = "out", "dq", "dk", "dv", "lse"
    return dict(zip(names, (out, *torch.autograd.grad((out, *lse), (q, k, v), gradients), *lse)))


def calls_of_many_threads_share_what_is_kept(backend: str, device: str = "cuda") -> None:
    """Call from six threads at once, each new to the device: all results as those of the first calls."""
    offsets = offsets_from_lengths([100, 0, 28], device=device)
    inputs = [[torch.randn(128, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3)] for _ in range(6)]
    attend = lambda i: jfa.jagged_flash_attention(*inputs[i], offsets, offsets, backend=backend)
    wanted = [attend(i) for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for i, results in enumerate(pool.map(lambda i: [attend(i) for _ in range(200)], range(6))):
            assert all(torch.equal(x, wanted[i]) for x in results)


def deterministic_gradients_repeat_bit_by_bit(backend: str, device: str = "cuda") -> None:
    """Compute gradients five times with ``deterministic``; all bits must be equal."""
    for shared in (0, 32, 128, 300):
        q, k, v, qo, ko = _tensors(device, [300, 5, 900, 77] * 8, [500, 64, 900, 3000] * 8, heads=8, shared_q=shared)
        first = None
        for _ in range(5):
            out = jfa.jagged_flash_attention(
                q, k, v, None if shared else qo, ko, broadcast_q=bool(shared), deterministic=True, backend=backend
            )
            got = (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
            first = first or got
            assert all(torch.equal(a, b) for a, b in zip(first, got))


def more_elements_than_an_int32_counts(backend: str, device: str = "cuda") -> None:
    """Attend over tensors of more than 2**31 elements; the last sequences must be as the reference's."""
    batches, length = 131_080, 128
    rows = batches * length
    q, k, v = (torch.randn(rows, 1, 128, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    offsets = (torch.arange(batches + 1, device=device) * length).int()
    wide = torch.empty(2000 * length, 9728, device=device, dtype=torch.bfloat16)
    for grad_view, count in ((None, batches), (wide, 2000)):
        n = count * length
        out = jfa.jagged_flash_attention(
            q[:n], k[:n], v[:n], offsets[: count + 1], offsets[: count + 1], backend=backend
        )
        grad = torch.randn_like(out)
        if grad_view is not None:
            grad = grad_view[:, :128].copy_(grad[:, 0])[:, None]
        grads = torch.autograd.grad(out, (q, k, v), grad)
        tail = slice(n - 2 * length, n)
        x, y, z = (t.detach()[tail].double().requires_grad_() for t in (q, k, v))
        two = offsets[:3].cpu()
        truth = jfa.jagged_flash_attention(x.cpu(), y.cpu(), z.cpu(), two, two)
        expected = torch.autograd.grad(truth, (x, y, z), grad[tail].double().cpu())
        torch.testing.assert_close(out[tail].double().cpu(), truth.detach(), atol=2e-2, rtol=2e-2)
        for got, want in zip(grads, expected):
            torch.testing.assert_close(got[tail].double().cpu(), want.cpu(), atol=3e-2, rtol=3e-2)


def seventy_thousand_sequences(backend: str, device: str = "cuda") -> None:
    """Attend within 70,000 sequences of one token: the output is the value."""
    for count in (70_000, 7_000):
        offsets = torch.arange(count + 1, device=device, dtype=torch.int32)
        q, k, v = (torch.randn(count, 1, 16, device=device, requires_grad=True) for _ in range(3))
        out = jfa.jagged_flash_attention(q, k, v, offsets, offsets, backend=backend)
        torch.testing.assert_close(out, v.detach(), atol=1e-6, rtol=0)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.testing.assert_close(grads[2], torch.ones_like(v))


def offsets_that_lie_touch_nothing_outside(backend: str, device: str = "cuda") -> None:
    """Pass offsets that lead outside the tensors; the memory around them must not change."""
    rng = random.Random(0)
    for seed in range(12):
        shared = rng.choice([0, 7, 200])
        room = torch.full((3, 900, 2, 64), 7.0, device=device, dtype=torch.bfloat16)
        q, k, v = (room[i, 300 : 300 + (shared if shared and i == 0 else 300)].requires_grad_() for i in range(3))
        lie = lambda: torch.tensor(
            [rng.choice([-50, 0, 100, 299, 300, 5000, 1 << 30]) for _ in range(6)], device=device
        ).int()
        slots = lie() if shared else None
        out = jfa.jagged_flash_attention(
            q, k, v, None if shared else lie(), lie(), broadcast_q=bool(shared), output_offset=slots, backend=backend,
            causal=bool(seed % 2),
        )  # fmt: skip
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()
        assert (room == 7).all()


def any_strides(backend: str, device: str = "cuda") -> None:
    """Pass slices, head-major and misaligned tensors; results must be as those of contiguous ones."""
    len_q = [70, 0, 33, 200]
    torch.manual_seed(0)
    qkv = torch.randn(sum(len_q), 3, 4, 64, device=device, dtype=torch.bfloat16)
    layouts = {
        "slices of one tensor": [qkv[:, i] for i in range(3)],
        "head-major": [qkv[:, i].transpose(0, 1).contiguous().transpose(0, 1) for i in range(3)],
        "last stride 2": [torch.stack([qkv[:, i]] * 2, -1)[..., 0] for i in range(3)],
        "offset by one element": [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in qkv.unbind(1)],
    }
    offsets = offsets_from_lengths(len_q, device=device)
    results = {}
    for name, inputs in layouts.items():
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = jfa.jagged_flash_attention(*inputs, offsets, offsets, backend=backend)
        grad = torch.ones((), device=device, dtype=out.dtype).expand(out.shape)
        results[name] = (out, *torch.autograd.grad(out, inputs, grad))
    first = results["slices of one tensor"]
    for name, got in results.items():
        for a, b in zip(first, got):
            torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


def offsets_may_have_any_stride(backend: str, device: str = "cuda") -> None:
    """Pass offsets that are a column of a table."""
    q, k, v, qo, ko = _tensors(device, [100, 30, 70], [60, 90, 50])
    expected = jfa.jagged_flash_attention(q, k, v, qo, ko, backend=backend)
    strided = (torch.stack([x, x * 0 + 7], 1)[:, 0] for x in (qo, ko))
    assert torch.equal(jfa.jagged_flash_attention(q, k, v, *strided, backend=backend), expected)


def compiles_into_one_graph(backend: str, device: str = "cuda") -> None:
    """Run through torch.compile(fullgraph=True), forward and backward."""
    q, k, v, qo, ko = _tensors(device, [100, 30, 70], [60, 90, 50])
    step = lambda: jfa.jagged_flash_attention(q, k, v, qo, ko, 100, 90, causal=True, check_offsets=True) * 2
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), step())
    for a, b in zip(*(torch.autograd.grad(f().sum(), (q, k, v)) for f in (compiled, step))):
        torch.testing.assert_close(a, b)


def plan_gives_the_same_result_again_and_again(backend: str, device: str = "cuda") -> None:
    """Call three times with one plan; results must be as those without."""
    for shared in (0, 32):
        q, k, v, qo, ko = _tensors(device, [100, 30, 70], [60, 9000, 50], shared_q=shared)
        plan = jfa.plan(
            None if shared else qo,
            ko,
            rows_q=q.shape[0],
            rows_kv=k.shape[0],
            num_heads=4,
            head_dim=64,
            broadcast_q=bool(shared),
            backend=backend,
        )
        expected = jfa.jagged_flash_attention(
            q, k, v, None if shared else qo, ko, broadcast_q=bool(shared), backend=backend
        )
        for _ in range(3):
            out = jfa.jagged_flash_attention(q, k, v, None if shared else qo, ko, broadcast_q=bool(shared), plan=plan)
            torch.testing.assert_close(out, expected)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


CHECKS = {
    check.__name__: check
    for check in (
        plan_gives_the_same_result_again_and_again,
        any_strides,
        calls_that_come_again_agree_with_fp64,
        calls_of_other_totals_agree_with_the_long_way,
        calls_of_many_threads_share_what_is_kept,
        offsets_may_have_any_stride,
        offsets_that_lie_touch_nothing_outside,
        graph_capture_follows_offsets_changed_in_place,
        deterministic_gradients_repeat_bit_by_bit,
        compiles_into_one_graph,
        split_mega_sequences_agree_with_fp64,
        seventy_thousand_sequences,
        more_elements_than_an_int32_counts,
    )
}
"""Checks by name, the ones that a simple call meets first."""
