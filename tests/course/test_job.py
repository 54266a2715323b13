"""A job crosses to the answer's process whole, and its key stays there no longer than it is needed."""

import dataclasses

import pytest
import torch

from jfa.course import catalog, wire
from jfa.course.answers import Pristine, from_source
from jfa.course.job import Job
from jfa.course.judge import job_for


@pytest.fixture
def job(toy):
    exercise = catalog.exercise("90.1")
    answer = from_source("def row_means(x, offsets): pass", exercise, Pristine.load(toy, "90_toy"))
    cases = exercise.cases(3)
    return dataclasses.replace(job_for(exercise, answer, toy, cases, 3), key=bytes(range(32)).hex(), scratch="/tmp/x")


def test_a_job_crosses_over_whole(job):
    there = Job.unpack(job.pack())
    for field in dataclasses.fields(Job):
        if field.name != "cases":
            assert getattr(there, field.name) == getattr(job, field.name), field.name
    for here, other in zip(job.cases, there.cases, strict=True):
        assert other["raises"] == here["raises"] and list(other["kwargs"]) == list(here["kwargs"])
        for a, b in zip(here["args"], other["args"], strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_the_key_is_given_once_and_printed_never(job):
    assert bytes(range(32)).hex() not in repr(job)
    assert job.take_key() == bytes(range(32))
    assert job.key == "" and job.take_key() == b"" and bytes(range(32)).hex().encode() not in job.pack()


@pytest.mark.parametrize("data", [b"", b"\0" * 40, wire.pack(["no", "job"]), wire.pack({"source": "x"})])
def test_bytes_that_are_no_job_are_refused(data):
    with pytest.raises((wire.WireError, TypeError)):
        Job.unpack(data)


def test_a_field_that_nobody_knows_is_refused(job):
    with pytest.raises(TypeError, match="solution"):
        Job.unpack(wire.pack(vars(job) | {"solution": "def row_means(x, offsets): ..."}))
