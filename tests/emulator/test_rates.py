"""The rates against what others published, and the whole model against three kernels that were timed on an H200."""

import pytest

from jfa.emulator.rates import B200, CHIPS, H200, Demand

FP4_SOURCE = "FlashAttention-4 paper, cycles per tile"


def _total(chip, *operations):
    total = Demand()
    for op, facts in operations:
        total = total + chip.demand(op, **facts)
    return total.needs


def _mma(a_space="smem", two_cta=False):
    return "mma", dict(m=256 if two_cta else 128, n=128, k=128, a_space=a_space, two_cta=two_cta)


EXP = ("alu", dict(kind="mufu", elements=128 * 128, warps=4))
STORE_DS = ("local_store", dict(space="smem", bytes=128 * 128 * 2))
STAGE_DQ = ("local_store", dict(space="smem", bytes=128 * 128 * 4)), ("tma_reduce", dict(bytes=128 * 128 * 4))

FORWARD = (_mma(), _mma("tmem"), EXP)
# S and dP read both operands from SMEM; dV and dK take P and dS from TMEM; dQ reads dS and K from SMEM
BACKWARD = (_mma(), _mma(), _mma("tmem"), _mma("tmem"), _mma(), EXP, STORE_DS, *STAGE_DQ)
BACKWARD_PAIR = tuple(
    (op, {**facts, "m": 256, "two_cta": True}) if op == "mma" else (op, facts) for op, facts in BACKWARD
)

PUBLISHED = [
    ("forward, 128 queries", FORWARD, dict(tensor=1024, smem=768, mufu=1024)),
    ("forward, 256 queries", FORWARD * 2, dict(tensor=2048, smem=1536, mufu=2048)),
    ("backward, one CTA", BACKWARD, dict(tensor=2560, smem=3328, mufu=1024)),
    ("backward, two CTAs", BACKWARD_PAIR, dict(tensor=2560, smem=2688, mufu=1024)),
]


@pytest.mark.parametrize("name, operations, published", PUBLISHED, ids=[p[0] for p in PUBLISHED])
def test_the_b200_rates_give_the_published_cycles_per_tile(name, operations, published):
    modelled = _total(B200, *operations)
    for unit, cycles in published.items():
        print(f"{name}: {unit} modelled {modelled[unit]:.0f}, published {cycles} ({FP4_SOURCE})")
        assert modelled[unit] == pytest.approx(cycles, rel=0.01), unit


@pytest.mark.parametrize("n", [64, 128, 256])
def test_64_rows_leave_half_of_the_array_empty_but_not_in_a_pair(n):
    full = B200.demand("mma", m=128, n=n, k=64).needs["tensor"]
    assert B200.demand("mma", m=64, n=n, k=64).needs["tensor"] == full
    assert B200.demand("mma", m=128, n=n, k=64, two_cta=True).needs["tensor"] == full / 2
    assert B200.demand("mma", m=256, n=n, k=64, two_cta=True).needs["tensor"] == full


def test_every_rate_names_its_source_and_unit():
    for chip in CHIPS.values():
        for name, rate in chip.rates.items():
            assert rate.value > 0 and rate.unit and rate.source, f"{chip.name}.{name}"


def test_both_chips_know_the_same_rates():
    assert set(B200.rates) == set(H200.rates)


def test_a_scaled_chip_differs_in_one_rate_and_says_so():
    slow = B200.scaled("tmem_read", 0.5)
    assert slow["tmem_read"] == B200["tmem_read"] / 2 and "times 0.5" in slow.rates["tmem_read"].source
    assert {n: r for n, r in slow.rates.items() if n != "tmem_read"} == {
        n: r for n, r in B200.rates.items() if n != "tmem_read"
    }


def test_the_peak_is_the_datasheet_times_the_sustained_clock():
    assert H200.peak_flops() == pytest.approx(790e12)


# TFLOP/s of fbtriton 3.7.4's Hopper tutorials on one H200: dense, full, fp16, D=128, L=8192
MEASURED = {
    "hopper_fa_ws": 551,
    "hopper_fa_ws_pipelined_pingpong": 637,
    "hopper_fa_ws_pipelined_pingpong_persistent": 647,
}
TWO_GROUPS = dict(BLOCK_M=128, BLOCK_N=128, NUM_BUFFERS=2, NUM_MMA_WARPS=8, NUM_MMA_GROUPS=2, num_stages=1, num_warps=4)


def modelled_tflops(name, length):
    """The whole chip's modelled TFLOP/s, from one SM that works through every tile of one head."""
    import jfa.emulator as emulator
    from jfa.emulator import tutorials

    # what autotuning picks on the GPU; the others have one config
    config = TWO_GROUPS if name == "hopper_fa_ws" else None
    with emulator.options(policy="timed", rates=H200, races=False, max_ctas=1):
        tutorials.hopper_attention(name, length, num_sms=1, config=config)
    return 4 * length**2 * 128 / H200.seconds(emulator.last().time) * H200["sms"] / 1e12


def _compare(length):
    modelled = {name: modelled_tflops(name, length) for name in MEASURED}
    for name, tflops in modelled.items():
        print(f"{name}: modelled {tflops:.0f} TFLOP/s at L={length}, measured {MEASURED[name]} at L=8192")
    return modelled


def test_the_model_ranks_the_hopper_tutorials_as_the_h200_does():
    pytest.importorskip("triton.language.extra.tlx")
    modelled = list(_compare(1024).values())
    assert modelled == sorted(modelled)


@pytest.mark.slow
def test_the_model_is_within_15_percent_of_the_h200():
    pytest.importorskip("triton.language.extra.tlx")
    modelled = _compare(8192)
    assert list(modelled.values()) == sorted(modelled.values())
    for name, tflops in modelled.items():
        assert tflops == pytest.approx(MEASURED[name], rel=0.15), name
