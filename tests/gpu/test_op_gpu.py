"""The op on a GPU: what neither the reference nor the emulator can show."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:  # a GPU machine may lack pytest: run_op.py calls these functions itself
    pass
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run_op.py has no pytest to do it

import jfa  # noqa: E402
from jfa.layout import offsets_from_lengths  # noqa: E402
from tests.attention_cases import Case, judge, random_case  # noqa: E402

BACKEND = "portable"


def test_random_cases_agree_with_fp64(seeds=range(24)):
    for seed in seeds:
        dtype = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)[seed % 4]
        judge(random_case(seed, dtype), "cuda", backend=BACKEND)


def test_large_random_cases_agree_with_fp64(seeds=range(18)):
    for seed in seeds:
        rng = random.Random(seed)
        case = random_case(
            1000 + seed, rng.choice([torch.bfloat16, torch.bfloat16, torch.float16]), longest=1500, most=9
        )
        case.dim = (64, 128, 128, 80, 96, 256)[seed % 6]
        case.dim_v = rng.choice([None, None, 64, 128])
        case.scale_up = 1.0
        judge(case, "cuda", backend=BACKEND)


def test_every_type_and_head_dim_has_tiles_that_fit(seeds=range(12)):
    """Tiles follow from shapes: what is rarely asked for must launch as well."""
    for seed in seeds:
        dim = (40, 64, 128, 256)[seed % 4]
        for dtype in (torch.float32, torch.bfloat16):
            shared = (0, 16, 64)[seed // 4]
            case = Case(
                [30, 0, 90], [100, 70, 3], heads=4, kv_heads=2, dim=dim, dtype=dtype, shared_q=shared, seed=seed
            )
            judge(case, "cuda", backend=BACKEND)


def test_split_mega_sequences_agree_with_fp64():
    for shared, len_q in ((32, [1] * 4), (128, [1] * 4), (0, [40, 3, 200, 64])):
        case = Case(len_q, [9000, 30, 500, 64], heads=2, kv_heads=2, dim=128, dtype=torch.bfloat16, shared_q=shared)
        judge(case, "cuda", backend=BACKEND)


def _tensors(len_q, len_kv, heads=4, kv_heads=4, dim=64, shared_q=0, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = lambda n, h: torch.randn(n, h, dim, device="cuda", dtype=dtype, generator=generator).requires_grad_()
    q, k, v = rows(shared_q or sum(len_q), heads), rows(sum(len_kv), kv_heads), rows(sum(len_kv), kv_heads)
    return q, k, v, offsets_from_lengths(len_q, device="cuda"), offsets_from_lengths(len_kv, device="cuda")


def test_graph_capture_follows_offsets_changed_in_place():
    q, k, v, qo, ko = _tensors([100, 30, 70], [60, 90, 50])
    other_q, other_k = (offsets_from_lengths(n, device="cuda") for n in ([10, 150, 40], [100, 20, 80]))
    grad = torch.randn(200, 4, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        out = jfa.jagged_flash_attention(q, k, v, qo, ko, backend=BACKEND, causal=True)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
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


def test_deterministic_gradients_repeat_bit_by_bit():
    for shared in (0, 32, 128, 300):
        q, k, v, qo, ko = _tensors([300, 5, 900, 77] * 8, [500, 64, 900, 3000] * 8, heads=8, shared_q=shared)
        first = None
        for _ in range(5):
            out = jfa.jagged_flash_attention(
                q, k, v, None if shared else qo, ko, broadcast_q=bool(shared), deterministic=True, backend=BACKEND
            )
            got = (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
            first = first or got
            assert all(torch.equal(a, b) for a, b in zip(first, got))


def test_more_elements_than_an_int32_counts():
    batches, length = 131_080, 128
    rows = batches * length
    q, k, v = (torch.randn(rows, 1, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    offsets = (torch.arange(batches + 1, device="cuda") * length).int()
    wide = torch.empty(2000 * length, 9728, device="cuda", dtype=torch.bfloat16)
    for grad_view, count in ((None, batches), (wide, 2000)):
        n = count * length
        out = jfa.jagged_flash_attention(
            q[:n], k[:n], v[:n], offsets[: count + 1], offsets[: count + 1], backend=BACKEND
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


def test_seventy_thousand_sequences():
    for count in (70_000, 7_000):
        offsets = torch.arange(count + 1, device="cuda", dtype=torch.int32)
        q, k, v = (torch.randn(count, 1, 16, device="cuda", requires_grad=True) for _ in range(3))
        out = jfa.jagged_flash_attention(q, k, v, offsets, offsets, backend=BACKEND)
        torch.testing.assert_close(out, v.detach(), atol=1e-6, rtol=0)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.testing.assert_close(grads[2], torch.ones_like(v))


def test_offsets_that_lie_touch_nothing_outside():
    rng = random.Random(0)
    for seed in range(12):
        shared = rng.choice([0, 7, 200])
        room = torch.full((3, 900, 2, 64), 7.0, device="cuda", dtype=torch.bfloat16)
        q, k, v = (room[i, 300 : 300 + (shared if shared and i == 0 else 300)].requires_grad_() for i in range(3))
        lie = lambda: torch.tensor(
            [rng.choice([-50, 0, 100, 299, 300, 5000, 1 << 30]) for _ in range(6)], device="cuda"
        ).int()
        slots = lie() if shared else None
        out = jfa.jagged_flash_attention(
            q, k, v, None if shared else lie(), lie(), broadcast_q=bool(shared), output_offset=slots, backend=BACKEND,
            causal=bool(seed % 2),
        )  # fmt: skip
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()
        assert (room == 7).all()


def test_any_strides():
    len_q = [70, 0, 33, 200]
    torch.manual_seed(0)
    qkv = torch.randn(sum(len_q), 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    layouts = {
        "slices of one tensor": [qkv[:, i] for i in range(3)],
        "head-major": [qkv[:, i].transpose(0, 1).contiguous().transpose(0, 1) for i in range(3)],
        "last stride 2": [torch.stack([qkv[:, i]] * 2, -1)[..., 0] for i in range(3)],
        "offset by one element": [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in qkv.unbind(1)],
    }
    offsets = offsets_from_lengths(len_q, device="cuda")
    results = {}
    for name, inputs in layouts.items():
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = jfa.jagged_flash_attention(*inputs, offsets, offsets, backend=BACKEND)
        grad = torch.ones((), device="cuda", dtype=out.dtype).expand(out.shape)
        results[name] = (out, *torch.autograd.grad(out, inputs, grad))
    first = results["slices of one tensor"]
    for name, got in results.items():
        for a, b in zip(first, got):
            torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


def test_offsets_may_have_any_stride():
    q, k, v, qo, ko = _tensors([100, 30, 70], [60, 90, 50])
    expected = jfa.jagged_flash_attention(q, k, v, qo, ko, backend=BACKEND)
    strided = (torch.stack([x, x * 0 + 7], 1)[:, 0] for x in (qo, ko))
    assert torch.equal(jfa.jagged_flash_attention(q, k, v, *strided, backend=BACKEND), expected)


def test_compiles_into_one_graph():
    q, k, v, qo, ko = _tensors([100, 30, 70], [60, 90, 50])
    step = lambda: jfa.jagged_flash_attention(q, k, v, qo, ko, 100, 90, causal=True, check_offsets=True) * 2
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), step())
    for a, b in zip(*(torch.autograd.grad(f().sum(), (q, k, v)) for f in (compiled, step))):
        torch.testing.assert_close(a, b)


def test_plan_gives_the_same_result_again_and_again():
    for shared in (0, 32):
        q, k, v, qo, ko = _tensors([100, 30, 70], [60, 9000, 50], shared_q=shared)
        plan = jfa.plan(
            None if shared else qo,
            ko,
            rows_q=q.shape[0],
            rows_kv=k.shape[0],
            num_heads=4,
            head_dim=64,
            broadcast_q=bool(shared),
            backend=BACKEND,
        )
        expected = jfa.jagged_flash_attention(
            q, k, v, None if shared else qo, ko, broadcast_q=bool(shared), backend=BACKEND
        )
        for _ in range(3):
            out = jfa.jagged_flash_attention(q, k, v, None if shared else qo, ko, broadcast_q=bool(shared), plan=plan)
            torch.testing.assert_close(out, expected)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
