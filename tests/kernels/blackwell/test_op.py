"""The op through backend="blackwell": random problems, forward, LSE and all gradients, judged as on every other backend."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from tests.attention_cases import judge, random_case  # noqa: E402
from tests.kernels.blackwell.cases import DEVICE  # noqa: E402


@pytest.mark.parametrize("seed", range(12))
def test_random_problem(seed):
    dtype = torch.bfloat16 if seed % 2 else torch.float16
    with emulator.options(policy=("eager", "lazy", "random")[seed % 3], seed=seed, contract=seed // 3 % 2 == 1):
        judge(random_case(seed, dtype, longest=300), DEVICE, backend="blackwell", deterministic=seed % 4 == 3)
