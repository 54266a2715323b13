"""The Hopper and Blackwell kernels over block lists, on the emulator, against the fp64 reference over the same lists."""

import random
from dataclasses import replace

import pytest
import torch

import jfa
from jfa import emulator
from jfa.attention.arguments import make_problem
from jfa.block_sparse import lists_from_mask, select_blocks
from jfa.kernels import registry
from tests.kernels.blackwell import test_sweep_backward as blackwell_sweep
from tests.kernels.hopper import test_sweep as hopper_sweep
from tests.kernels.sparse_cases import judge, tensors
from tests.kernels.sweeping import clean_mutants

BACKENDS = pytest.mark.parametrize("backend", ["hopper", "blackwell"])
TOL = 1.5e-2  # bf16 probabilities and outputs


def random_case(seed):
    """Lengths with zeros and tails, any mask, any list heads, some lists empty, now and then a shared query."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3])
    lengths = lambda: [rng.choice([0, 1, 128, 130, rng.randint(1, 400)]) for _ in range(count)]
    kv_heads, group = rng.choice([(1, 1), (1, 2), (2, 1)])
    shared = rng.choice([0, 0, 40, 150])
    len_q, len_kv = [shared] * count if shared else lengths(), lengths()
    band = rng.choice([{}, dict(causal=True), dict(window_size=(200, 20))])
    case = tensors(len_q, len_kv, kv_heads * group, kv_heads, 64, 64, torch.bfloat16, shared, seed, rng.choice([0, 9]))
    q, k, _, qo, ko = case
    g = torch.Generator().manual_seed(seed)
    heads = rng.choice([1, kv_heads, kv_heads * group])
    masks = [torch.rand(heads, -(-n // 128), -(-m // 128), generator=g) < 0.5 for n, m in zip(len_q, len_kv)]
    lists = lists_from_mask(masks, qo, ko, total_q=len(q), total_kv=len(k), broadcast_q=bool(shared), **band)
    return *case, lists, dict(band, sm_scale=rng.choice([None, -0.1]), broadcast_q=bool(shared))


@BACKENDS
@pytest.mark.parametrize("seed", range(6))
def test_random_lists(seed, backend):
    *case, options = random_case(seed)
    with emulator.options(policy=("eager", "lazy", "random")[seed % 3], seed=seed, contract=seed % 2 == 1):
        judge(*case, tol=TOL, backend=backend, **options)


@BACKENDS
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 60))
def test_many_random_lists(seed, backend):
    *case, options = random_case(seed)
    with emulator.options(policy=("eager", "lazy", "random")[seed % 3], seed=seed, contract=seed % 2 == 1):
        judge(*case, tol=TOL, backend=backend, **options)


@BACKENDS
def test_head_dim_128_and_several_blocks_per_list(backend):
    q, k, v, qo, ko = tensors([300, 0, 20], [700, 50, 300], 2, 1, 128, 128, torch.bfloat16)
    lists = select_blocks(q, k, qo, ko, ratio=0.5, causal=True)
    judge(q, k, v, qo, ko, lists, tol=TOL, backend=backend, causal=True)


@BACKENDS
def test_shared_queries_in_slots_of_their_own(backend):
    q, k, v, _, ko = tensors([130] * 3, [300, 0, 140], 2, 1, 64, 64, torch.bfloat16, shared=130)
    slots = torch.tensor([260, 0, 130, 390], dtype=torch.int32)
    lists = select_blocks(q, k, None, ko, ratio=0.5, broadcast_q=True)
    judge(q, k, v, None, ko, lists, tol=TOL, backend=backend, broadcast_q=True, output_offset=slots)


@BACKENDS
def test_two_launches_repeat_bit_by_bit_where_that_is_asked(backend):
    q, k, v, qo, ko = tensors([300, 20], [300, 140], 2, 1, 64, 64, torch.bfloat16)
    lists = select_blocks(q, k, qo, ko, ratio=0.5)
    grads = []
    for seed in range(2):
        with emulator.options(policy="random", seed=seed):
            call = dict(backend=backend, deterministic=True, block_lists=lists)
            grads.append(torch.autograd.grad(jfa.jagged_flash_attention(q, k, v, qo, ko, **call).sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


WRONG = [
    dict(columns=(0, 10**6)),
    dict(columns=(1, -5)),
    dict(starts=(1, 10**6)),
    dict(starts=(0, -9)),
    dict(starts=(2, 0)),
]


@BACKENDS
@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_wrong_lists_touch_nothing_outside(changes, backend):
    """On the emulator an access outside a tensor is an error; the op's own check is passed by."""
    q, k, v, qo, ko = (x.detach() for x in tensors([300, 130], [250, 40], 1, 1, 64, 64, torch.bfloat16))
    lists = select_blocks(q, k, qo, ko, ratio=1.0)
    for field, (at, value) in changes.items():
        x = getattr(lists, field).clone()
        x[at] = value
        lists = replace(lists, **{field: x})
    problem = make_problem(q, k, v, qo, ko, None, 0.125, jfa.Band(), False, False, 0, 0, lists)
    backend = registry.load(backend)
    out, lse = backend.forward(problem, q, k, v)
    backend.backward(problem, torch.ones_like(out), None, q, k, v, out, lse)


@BACKENDS
def test_other_blocks_and_head_dims_are_refused_by_name(backend):
    q, k, v, qo, ko = tensors([300], [300], 1, 1, 64, 64, torch.bfloat16)
    small = select_blocks(q, k, qo, ko, ratio=0.5, block_q=64, block_kv=128)
    with pytest.raises(ValueError, match="blocks of 128, not of 64 queries and 128 keys; backend 'portable' can"):
        jfa.jagged_flash_attention(q, k, v, qo, ko, backend=backend, block_lists=small)
    q, k, v, qo, ko = tensors([300], [300], 1, 1, 160, 160, torch.bfloat16)
    lists = select_blocks(q, k, qo, ko, ratio=0.5)
    with pytest.raises(ValueError, match="head dims .*up to 128.*; backend 'portable' can"):
        jfa.jagged_flash_attention(q, k, v, qo, ko, backend=backend, block_lists=lists)


# Where a kernel's synchronisation stands, and what its own sweep argues away.
LATE_LOADS = {
    ("late", f"tlx.barrier_wait({x}.fulls[slot], phase)"): hopper_sweep.LATE for x in "kq"
}  # the next operation is another wait
SWEPT = {
    ("hopper", "forward"): (
        hopper_sweep.files_of("forward"),
        hopper_sweep.ARGUED["forward"] | LATE_LOADS,
    ),
    ("hopper", "backward"): (hopper_sweep.files_of("backward"), hopper_sweep.ARGUED["backward"]),
    ("blackwell", "backward"): (("blackwell/backward_1cta.py", "common/ring.py"), blackwell_sweep.ARGUED["general"]),
}


def swept_launch(len_q, len_kv, chosen, backend, way):
    """A function that runs one pass over the chosen blocks of every sequence, and returns what it writes."""
    dim = 128 if way == "forward" else 64
    q, k, v, qo, ko = tensors(len_q, len_kv, 2, 1, dim, dim, torch.bfloat16)
    masks = [torch.tensor([blocks]).bool() for blocks in chosen]
    lists = lists_from_mask(masks, qo, ko, total_q=len(q), total_kv=len(k))
    dout = torch.randn(len(q), 2, dim, generator=torch.Generator().manual_seed(0)).bfloat16()

    def launch():
        given = [x.detach().clone().requires_grad_(way == "backward") for x in (q, k, v)]
        out = jfa.jagged_flash_attention(*given, qo, ko, backend=backend, block_lists=lists)
        return [out] if way == "forward" else list(torch.autograd.grad(out, given, dout))

    return launch


@pytest.mark.slow
@pytest.mark.parametrize("backend, way", SWEPT)
def test_every_broken_synchronisation_over_lists_is_found_or_argued(backend, way, monkeypatch):
    """Lists of several, one and no entries, and a grouped head; one program takes all tiles, so that every ring wraps."""
    monkeypatch.setattr(registry.load(backend), "EMULATED_SMS", 1)
    chosen = [[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], [[1, 1]]
    # Twelve units of one block: the queue goes round, and nothing but its own barriers holds the producer back.
    short = [[[1]]] * 6
    launches = [
        swept_launch([300, 40], [400, 200], chosen, backend, way),
        swept_launch([100] * 6, [120] * 6, short, backend, way),
    ]
    files, argued = SWEPT[backend, way]
    judged, clean = clean_mutants(launches, where=files)
    assert len(judged) > 20
    assert clean <= argued.keys()
