"""The emulator gives what an H200 gave: the same kernels, the same small problems, element by element."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.hopper.same_problems import PROBLEMS, results

RECORDED = Path(__file__).with_name("h200_results.pt")  # made by: python tests/gpu/run_hopper.py record --out FILE
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}  # half a step at the largest value
STEPS = {
    torch.bfloat16: 1.0,
    torch.float16: 1.0,
    torch.float32: 4.0,
}  # fp32 sums of exponentials are added in another order


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_differ_by_a_rounding_at_most(name):
    case, options = PROBLEMS[name]
    recorded = torch.load(RECORDED)[name]
    for what, found in results(case, "cpu", options).items():
        expected = recorded[what]
        finite = torch.isfinite(expected)
        assert torch.equal(finite, torch.isfinite(found)), what
        largest = float(expected[finite].abs().max())
        error = float((found[finite].double() - expected[finite].double()).abs().max())
        assert error <= STEPS[found.dtype] * ROUNDING[found.dtype] * largest, f"{what}: off by {error} of {largest}"
        if what != "lse":
            same = float((found == expected).double().mean())
            assert same > 0.97, f"{what}: {same:.1%} of the elements are equal"
