"""What the clock's model says of the forward: the tensor cores' share, beside the public kernels in the same model."""

import json
import re

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("greenlet")

from jfa.emulator.rates import B200  # noqa: E402
from jfa.kernels.blackwell import modelled  # noqa: E402
from jfa.verify import predictions  # noqa: E402
from tests.emulator import perfetto  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_long_tiles_keep_the_tensor_cores_busy():
    assert modelled.measures()["forward, long tile"](B200) >= 0.71


@pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="only fbtriton ships the TLX tutorials")
def test_short_tiles_in_a_row_are_ahead_of_the_public_kernels():
    measures = modelled.measures()
    best = max(measures[name](B200) for name in ("tutorial, pipelined persistent", "tutorial, stealing"))
    assert min(measures["forward, static"](B200), measures["forward, stealing"](B200)) > best


def test_doubtful_rates_are_those_without_a_source():
    assert {"barrier", "wakeup", "tmem_read", "tma_latency"} <= set(modelled.uncertain(B200))
    assert not {"mufu", "tensor_2", "smem"} & set(modelled.uncertain(B200))


@pytest.mark.parametrize(
    "launch, roles",
    [
        (
            lambda: modelled.forward_launch(512, 256, clc=True),
            ("correction", "softmax[1]", "mma", "load", "store", "CLC"),
        ),
        (lambda: modelled.backward_launch("pair", 256, 512), ("reduce", "compute[1]", "mma", "load_rows")),
    ],
    ids=["forward", "pair"],
)
def test_the_trace_of_a_kernel_of_two_ctas_is_one_that_perfetto_reads(tmp_path, launch, roles):
    drawn = modelled.record_two_sms(launch(), B200)
    trace = json.loads(drawn.chrome_trace(tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert len({e["pid"] for e in events}) == len(drawn.ctas()) >= 2 and not perfetto.faults(trace)
    names = {e["args"]["name"].partition(" (")[0] for e in events if e["name"] == "thread_name"}
    assert {*roles, "TMA", "MMA"} <= names
    assert {"tensor occupied", "tma occupied", "mufu occupied"} <= {e["name"] for e in events if e["ph"] == "C"}
    ended = [e for e in drawn.events if e.kind == "wait" and e.args["barrier"] != "store"]
    assert len(drawn.signals()) >= 0.9 * len(ended) > 20
    sources = [e["args"].get("src", "") for e in events if e["ph"] == "X" and e["name"].startswith(("wait", "arrive"))]
    assert sources and all(".py:" in source for source in sources)


def both_forms(len_q: int, len_kv: int, causal: bool = False):
    """Timelines of the backward on two SMs, on single CTAs and on a pair."""
    runs = (modelled.backward_launch(form, len_q, len_kv, causal) for form in ("single", "pair"))
    return [modelled.record_two_sms(run, B200) for run in runs]


def test_a_pair_keeps_the_tensor_cores_busier():
    single, pair = both_forms(512, 512)
    assert pair.busy() >= 1.15 * single.busy() and pair.cycles < single.cycles


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_a_pair_is_ahead_from_1024_keys_on(causal):
    single, pair = both_forms(1024, 1024, causal)
    assert pair.busy() >= 1.15 * single.busy()
    assert single.cycles >= 1.1 * pair.cycles  # tiles of 256 keys have more blocks that causality masks


def test_a_pair_reads_less_shared_memory():
    """Per block and SM: operands 64 + 64 + 32 + 64 + 64 KiB and 48 + 48 + 16 + 16 + 64; the other lines are the same or half."""
    single, pair = (modelled.smem_cycles_per_block(form, B200, queries=256) for form in ("single", "pair"))
    per_kib = 1024 / B200["smem"]
    loads, constants = 64, 2 * 0.5
    assert single == pytest.approx((288 + loads + constants + 32 + 2 * 64 + constants) * per_kib, rel=0.01)
    assert pair == pytest.approx((192 + loads + constants + 16 + 3 * 16 + 2 * 32 + constants) * per_kib, rel=0.01)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_mxfp8_backward_is_not_slower(head_dim):
    assert modelled.mxfp8_backward_speedup(B200, head_dim=head_dim) >= 1.03


def cycles(run) -> float:
    return modelled.record_one_sm(run, B200).cycles


SEALED = {  # what an entry's `how` gives as "modelled A / B": functions, since each launch builds its tensors
    "mxfp8-forward-quarter": lambda: (
        modelled.mxfp8_forward_launch(256, 2048, fma_parts=8),
        modelled.mxfp8_forward_launch(256, 2048),
    ),
    "mxfp8-forward-margin": lambda: (
        modelled.mxfp8_forward_launch(256, 2048, margin=0),
        modelled.mxfp8_forward_launch(256, 2048),
    ),
    "mxfp8-backward": lambda: (
        modelled.backward_launch("single", 1024, 128),
        modelled.backward_launch("mxfp8", 1024, 128),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEALED)
def test_a_sealed_prediction_quotes_the_model_as_it_is(name):
    how = next(p.how for p in predictions.read() if p.id == name)
    quoted = [int(n.replace(",", "")) for n in re.search(r"modelled ([\d,]+) / ([\d,]+) =", how).groups()]
    assert [cycles(run) for run in SEALED[name]()] == pytest.approx(quoted, rel=0.005)


@pytest.mark.parametrize("len_q, len_kv", [(256, 2048), (1024, 1024)], ids=["long tile", "four tiles"])
def test_mxfp8_is_a_quarter_faster(len_q, len_kv):
    assert modelled.mxfp8_speedup(B200, len_q, len_kv) >= 1.25
