"""Sealed predictions: read, matched with times by shape and implementation, judged by their error bars."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jfa.bench import shapes
from jfa.verify import predictions, suite
from jfa.verify.predictions import Prediction
from tests.verify.fakes import timing

RATIO = Prediction(
    "pair", "backward of a pair over a single CTA", "self", "x", 1.2, 1.1, 1.3,
    measure={"way": "backward", "of": "jfa:blackwell:form=pair", "over": "jfa:blackwell:form=single"},
)  # fmt: skip
TIME = Prediction("time", "forward", "gqa", "ms", 0.5, 0.4, 0.6, measure={"way": "forward", "of": "jfa:blackwell"})
BY_HAND = Prediction("busy", "tensor core busy", "self", "%", 70, 65, 75)


def verdicts(rows):
    return {row["id"]: (row["measured"], row["verdict"]) for row in rows}


def test_a_ratio_is_the_other_time_over_ours():
    times = [timing("self", "jfa:blackwell:form=pair", 2.0), timing("self", "jfa:blackwell:form=single", 2.4)]
    assert verdicts(predictions.compare([RATIO], times, "NVIDIA B200"))["pair"] == (pytest.approx(1.2), "inside")


@pytest.mark.parametrize("ms, verdict", [(0.5, "inside"), (0.4, "inside"), (0.39, "below"), (0.61, "above")])
def test_a_time_is_judged_by_the_error_bars(ms, verdict):
    rows = predictions.compare([TIME], [timing("gqa", "jfa:blackwell", ms)], "NVIDIA B200")
    assert verdicts(rows)["time"] == (ms, verdict)


def test_what_was_not_measured_says_why():
    failed = timing("self", "jfa:blackwell:form=pair", 1.0) | dict(
        backward_ms=None, note="TypeError: no argument 'form'"
    )
    rows = verdicts(predictions.compare([RATIO, TIME, BY_HAND], [failed], "NVIDIA B200"))
    assert rows["pair"] == (None, "jfa:blackwell:form=pair was not timed: TypeError: no argument 'form'")
    assert rows["time"] == (None, "jfa:blackwell was not timed: not yet run")
    assert rows["busy"] == (None, "to be measured by hand")


def test_a_prediction_for_another_gpu_is_not_judged():
    rows = predictions.compare([TIME], [timing("gqa", "jfa:blackwell", 0.5)], "NVIDIA H200")
    assert verdicts(rows)["time"] == (None, "for a B200")


def test_a_file_is_read_with_fields_that_are_not_known_yet(tmp_path):
    entry = dict(
        id="a", what="b", shape="self", unit="ms", predicted=1, low=0.5, high=2, how="model", date="2026-11-30"
    )
    path = tmp_path / "p.json"
    for content in ([entry | {"new": 1}], {"predictions": [entry]}):
        path.write_text(json.dumps(content))
        (found,) = predictions.read(path)
        assert (found.id, found.gpu, found.measurable) == ("a", "B200", False)
    path.write_text('[{"id": "a"}]')
    with pytest.raises(ValueError, match="not a list of predictions"):
        predictions.read(path)


def test_the_file_of_the_package_is_sound_or_absent():
    for p in predictions.read():
        assert p.low <= p.predicted <= p.high, p.id
        assert not p.measurable or p.timed_on in shapes.SHAPES, p.id
        for name in p.implementations:
            suite.implementation(name)


def test_a_prediction_may_name_the_shape_apart():
    apart = replace(RATIO, shape="self, 256 x 1024", measure=RATIO.measure | {"shape": "self-1024"})
    times = [timing("self-1024", name, ms) for name, ms in zip(apart.implementations, (2.0, 2.4))]
    assert verdicts(predictions.compare([apart], times, "NVIDIA B200"))["pair"][1] == "inside"
    timed = {job.item for s in suite.stages(["blackwell"], [], [], [apart]) for job in s.jobs if job.kind == "time"}
    assert timed == {"self-1024"}


def test_absent_predictions_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr(predictions, "PLACES", (tmp_path / "none.json",))
    assert predictions.read() == []


def test_what_a_prediction_compares_is_timed_on_its_shape():
    jobs = {job.item: job for s in suite.stages(["blackwell"], ["pma32"], ["fa2"], [RATIO, BY_HAND]) for job in s.jobs}
    assert jobs["pma32"].options["timing"]["names"] == ("jfa:blackwell", "fa2")
    assert jobs["self"].options["timing"]["names"] == (
        "jfa:blackwell", "fa2", "jfa:blackwell:form=pair", "jfa:blackwell:form=single",
    )  # fmt: skip


def test_the_table_has_a_line_per_prediction():
    rows = predictions.compare([TIME, BY_HAND], [timing("gqa", "jfa:blackwell", 0.7)], "NVIDIA B200")
    lines = predictions.table(rows).splitlines()
    assert "0.5 (0.4 to 0.6) ms" in lines[1] and lines[1].endswith("above") and "by hand" in lines[2]
