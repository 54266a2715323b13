"""Jobs in child processes: what fails, hangs or dies is told apart and does not take the others with it."""

from __future__ import annotations

import time

import pytest

from jfa.verify.pool import Job, NoChild, Outcome, Pool, answer

RUNNER = "tests.verify.fakes:run"


def work(tmp_path, items, seconds=60.0, processes=1, runner=RUNNER, **bounds):
    """Run items as jobs; return ({item: outcome}, jobs that were not begun)."""
    found: dict[str, Outcome] = {}
    jobs = [Job("toy", "fake", item, seconds) for item in items]
    with Pool(runner, processes, tmp_path / "log", lambda job, outcome: found.setdefault(job.item, outcome)) as pool:
        left = pool.run(jobs, **bounds)
    return found, left


def test_every_way_to_fail_is_told_apart_and_the_rest_is_run(tmp_path):
    found, left = work(tmp_path, ["a", "wrong", "raise", "refuse", "die", "b", "lose the GPU", "c"])
    assert left == []
    states = {item: outcome.state for item, outcome in found.items()}
    assert states == {
        "a": "right",
        "wrong": "wrong",
        "raise": "error",
        "refuse": "refused",
        "die": "died",
        "b": "right",
        "lose the GPU": "error",
        "c": "right",
    }
    assert found["wrong"].message == "dquery: off by 3, allowed 0.1"
    assert found["raise"].message == "IndexError: no such tile" and "fakes.py" in found["raise"].detail
    assert found["refuse"].message == "backend 'portable' does not offer this" and not found["refuse"].bad
    assert "SIGKILL" in found["die"].message and "illegal instruction in tile 7" in found["die"].message


def test_a_child_is_replaced_after_it_died_or_lost_the_gpu_and_kept_otherwise(tmp_path):
    found, _ = work(tmp_path, ["a", "wrong", "b", "lose the GPU", "c"])
    children = [found[item].value for item in "abc"]
    assert children[0] == children[1] != children[2]


def test_a_job_that_hangs_is_ended_at_its_limit(tmp_path):
    start = time.time()
    found, left = work(tmp_path, ["hang", "a"], seconds=2.0)
    assert found["hang"].state == "hung" and "2 s" in found["hang"].message
    assert found["a"].state == "right" and left == []
    assert time.time() - start < 300  # the job itself would sleep for ten minutes


def test_nothing_is_begun_after_the_deadline(tmp_path):
    found, left = work(tmp_path, ["a", "b"], deadline=time.time() - 1)
    assert found == {} and [job.item for job in left] == ["a", "b"]


def test_children_that_do_not_start_are_a_sentence(tmp_path):
    with pytest.raises(NoChild, match="do not start.*no_such_module"):
        work(tmp_path, ["a"], runner="tests.verify.no_such_module:run")


def test_two_children_share_the_jobs(tmp_path):
    found, _ = work(tmp_path, [str(i) for i in range(8)], processes=2)
    assert len(found) == 8 and all(outcome.state == "right" for outcome in found.values())
    assert len({outcome.value for outcome in found.values()}) <= 2


def test_an_answer_carries_seconds_and_the_time_of_day():
    outcome = answer(lambda job: 7, Job("toy", "fake", "x"))
    assert (outcome.state, outcome.value) == ("right", 7)
    assert outcome.seconds >= 0 and abs(outcome.at - time.time()) < 60


def test_a_job_is_named_by_kind_backend_and_item():
    assert Job("random", "hopper", 40).key == "random:hopper:40"
