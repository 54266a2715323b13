"""Following an answer's process: what it wrote counts, and how it ended is asked for once, whenever it ends."""

import os
import struct
import subprocess
import sys

import pytest

from jfa.course import launch, wire
from jfa.course.job import Job

KEY = bytes(32)
NOTHING = dict.fromkeys(("helpers", "below", "cases", "parameters", "forbid", "allow", "schedules", "measures"), [])
JOB = Job(
    **NOTHING, source="", name="f", kind="function", call="", call_name="", closed={}, memory_mb=64, cpu_seconds=20,
    needs_triton=False, seed=0, key=KEY.hex(),
)  # fmt: skip


@pytest.fixture
def process():
    """A process group of its own that sleeps, to be killed by the judge."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield child
    child.kill()
    child.wait()


def message(number: int = 0, key: bytes = KEY, **fields) -> bytes:
    data = wire.pack(fields)
    return struct.pack("<Q", len(data)) + wire.seal(key, number, data) + data


class EndsWhileWeLook:
    """wait() of a process that ends just after the judge found its pipe empty; its status can be had once, as from the kernel."""

    def __init__(self, write: int, last_words: bytes, status: int):
        self.write, self.last_words, self.status = write, last_words, status

    def __call__(self, block: bool) -> int | None:
        if self.write >= 0:
            os.write(self.write, self.last_words)
            os.close(self.write)
            self.write = -1
        status, self.status = self.status, None
        return status


def follow(process, last_words: bytes, status: int) -> launch.Outcome:
    read, write = os.pipe()
    return launch._follow(JOB, process.pid, read, EndsWhileWeLook(write, last_words, status), launch.say_nothing)


def test_messages_written_just_before_the_end_are_read(process):
    outcome = follow(process, message(event="loaded") + message(1, event="end"), 0)
    assert [e["event"] for e in outcome.events] == ["loaded", "end"]
    assert outcome.ended == "done" and outcome.status == 0


def test_a_crash_keeps_its_signal(process):
    outcome = follow(process, message(event="loaded"), 11)
    assert outcome.ended != "done" and outcome.status == 11


def test_a_status_that_never_comes_is_a_kill(process):
    read, write = os.pipe()
    os.close(write)
    assert launch._follow(JOB, process.pid, read, lambda block: None, launch.say_nothing).status == 9
