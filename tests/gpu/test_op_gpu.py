"""The op on a GPU: what neither the reference nor the emulator can show. The checks are `jfa verify`'s."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

try:
    import pytest

    pytestmark = pytest.mark.gpu
    every_check = pytest.mark.parametrize
except ImportError:  # a GPU machine may lack pytest: run_op.py calls these functions itself
    every_check = lambda *ignored: lambda function: function
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run_op.py has no pytest to do it

from jfa.verify.cases import Case, judge, random_case  # noqa: E402
from jfa.verify.op_checks import CHECKS  # noqa: E402

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


@every_check("name", CHECKS)
def test_the_op(name):
    CHECKS[name](BACKEND)
