"""Kernels that nobody here wrote: fbtriton's own tutorials, unmodified, against torch, under every scheduling policy.

What the tutorials themselves get wrong, so that the cases avoid it:
- blackwell_gemm_ws with SPLIT_K > 1 needs M to be a multiple of BLOCK_SIZE_M: the tail rows of one split's last tile lie
in the next
  split's part of the workspace, and two CTAs write them (GlobalRaceError);
- blackwell-grouped-gemm's host code checks B as if it were transposed, so only square B passes it;
- blackwell_multi_cta_layernorm_ws stores to its peers before it knows that they have started (its sibling without roles has a
  cluster barrier there); compiled for sm_100, nothing comes before the store either;
- blackwell_gemm_pipelined ends without waiting for its TMA store: the PTX of its end has no cp.async.bulk.wait_group;
- blackwell-gdpa does not compile with this wheel (registers on the default task) and commits an MMA that nobody waits for.
"""

import os

import pytest

import jfa.emulator as emulator

from . import tutorials

if not os.path.isdir(tutorials.TUTORIALS):
    pytest.skip("needs fbtriton's tutorials", allow_module_level=True)

POLICIES = {
    "eager": dict(policy="eager"),
    "lazy": dict(policy="lazy", seed=1),
    "random-1": dict(policy="random", seed=1),
    "random-2": dict(policy="random", seed=2),
    "random-3": dict(policy="random", seed=3),
    "timed": dict(policy="timed"),
}
ATTENTION = [
    "fa_ws",
    "fa_ws_persistent",
    "fa_ws_pipelined",
    "fa_ws_pipelined_persistent",
    "fa_clc",
    "fa backward 1-CTA",
    "fa backward 2-CTA",
    "mxfp8 forward",
    "hopper fa_ws",
    "hopper fa ping-pong persistent",
]
_UNSTARTED = {emulator.errors.UnstartedCtaError}  # see above; the first one launches the second's kernel for this shape
FLAWS = {
    "layernorm multi-cta": _UNSTARTED,
    "layernorm multi-cta ws": _UNSTARTED,
    "gemm_pipelined": {emulator.errors.InFlightError},
}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", tutorials.CASES)
def test_tutorial(name, policy):
    tutorials.run(name, report="collect", **POLICIES[policy])
    findings = emulator.last().findings
    assert {type(f) for f in findings} == FLAWS.get(name, set()), [str(f) for f in findings]


def _bits(outputs):
    return [t.contiguous().numpy().tobytes() for t in outputs]


@pytest.mark.parametrize("policy", ["lazy", "random-1", "timed"])
@pytest.mark.parametrize("name", ["gemm_ws", "fa_ws_pipelined_persistent", "fa backward 2-CTA", "fa_clc"])
def test_the_same_schedule_gives_the_same_bits(name, policy):
    assert _bits(tutorials.run(name, **POLICIES[policy])) == _bits(tutorials.run(name, **POLICIES[policy]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION)
def test_no_schedule_gives_a_false_alarm(name):
    for seed in range(24):
        tutorials.run(name, policy="random", seed=100 + seed)


def test_a_split_of_k_with_a_ragged_m_writes_into_its_neighbour():
    """The tutorial's own fault, found here: see the top of this file."""
    a, b = tutorials._matrices(208, 136, 416)
    module = tutorials.load("blackwell_gemm_ws")
    with emulator.options(), tutorials.no_gpu(), pytest.raises(emulator.errors.GlobalRaceError):
        module.matmul(a, b, config=tutorials.GEMM_WS | dict(SPLIT_K=2))
