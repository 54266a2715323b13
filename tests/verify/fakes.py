"""Stand-ins for the jobs of `jfa verify`: a child process runs them where a GPU would run kernels."""

from __future__ import annotations

import os
import signal
import time

from jfa.verify.pool import Job, Refused

GOOD = {"first", "op", "lists", "repeat", "large", "sparse", "mxfp8", "quantize", "wide", "random"}


def run(job: Job):
    """Do what the job's item says; "wrong", "raise", "hang", "die", "lose the GPU", "refuse", else be right."""
    item = str(job.item)
    if item == "wrong":
        raise AssertionError("dquery: off by 3, allowed 0.1")
    if item == "raise":
        raise IndexError("no such tile")
    if item == "hang":
        time.sleep(600)
    if item == "die":
        print("illegal instruction in tile 7", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "lose the GPU":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if item == "refuse":
        raise Refused("backend 'portable' does not offer this")
    return os.getpid()


def suite(job: Job):
    """Answer the real suite's jobs as a sound GPU would, at once."""
    if job.kind in GOOD:
        return 10 if job.kind == "random" else 1
    if job.kind == "host":
        return {
            name: {"forward": 50.0, "both": 200.0} for name in ("FlashAttention 2", *job.options["timing"]["backends"])
        }
    if job.kind == "ceilings":
        return {"copy_tb_per_s": 4.0, "bf16_tflops": 800.0}
    if job.kind == "time":
        return [timing(job.item, name, 1.0 + i) for i, name in enumerate(job.options["timing"]["names"])]
    return ""


def broken_portable(job: Job):
    """As `suite`, but every call of the portable backend is wrong."""
    if job.backend == "portable":
        raise AssertionError("out: off by 1, allowed 0.01")
    return suite(job)


def one_wrong(job: Job):
    """As `suite`, but one random batch is wrong, and the preparation of one timing."""
    if job.key in ("random:portable:40", "prepare:portable:self/jfa:portable"):
        raise AssertionError(f"wrong in {job.key} in {os.path.expanduser('~')}/kernels.py")
    return suite(job)


def interrupted(job: Job):
    """As `suite`, but the fortieth random problem interrupts the parent, as Ctrl-C does."""
    if job.key == "random:portable:40":
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(30)
    return suite(job)


def timing(shape: str, name: str, ms: float) -> dict:
    """A timing as `jfa bench` writes it."""
    rate = {"forward_tflops": 100 / ms, "backward_tflops": 50 / ms}
    return dict(shape=shape, name=name, forward_ms=ms, backward_ms=2 * ms, note="", **rate)
