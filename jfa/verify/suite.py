"""The table of jobs of `jfa verify`, and the function that a child process calls with one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from jfa.attention import make_problem
from jfa.bench import host_time, peers, runner, shapes
from jfa.kernels import registry
from jfa.verify import list_checks, mxfp8_checks, numbers, op_checks, sparse_checks
from jfa.verify.pool import Job, Refused
from jfa.verify.predictions import Prediction

RUNNER = "jfa.verify.suite:run"
NATIVE = ("blackwell", "hopper")  # written for one kind of GPU each
BACKENDS = (*NATIVE, "portable")
PEERS = ("fa2", "fa4", "cudnn")
LARGEST = "more_elements_than_an_int32_counts"  # takes tens of GB, so it runs alone
TIMES = "times"


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        run: called with (item, backend, device); returns how many problems it judged, raises AssertionError where one is wrong.
        items: what it is called with on the backend written for this GPU.
        portable: the same for the portable backend, where that is fewer.
        seconds: limit of one job, compiling included.
        early: whether it runs before the shapes are timed; the others follow as long as there is time.
        help: what it shows, for ``--list``.
    """

    run: Callable[[Any, str, str], int]
    items: Sequence[Any]
    portable: Sequence[Any] | None
    seconds: float
    early: bool
    help: str


def _named(checks: dict[str, Callable]) -> Callable[[str, str, str], int]:
    def run(name: str, backend: str, device: str) -> int:
        checks[name](backend, device)
        return 1

    return run


def _sparse(seed: int, backend: str, device: str) -> int:
    found = sparse_checks.wrong(seed, backend, device)
    assert not found, "; ".join(found)
    return 1


def _mxfp8(seed: int, backend: str, device: str) -> int:
    found = mxfp8_checks.wrong_attention(seed, backend, device)
    assert not found, "; ".join(found)
    return 1


def _quantize(seed: int, backend: str, device: str) -> int:
    found = mxfp8_checks.wrong_bytes(seed, device)
    assert not found, "; ".join(found)
    return 1


def _lists(name: str, backend: str, device: str) -> int:
    list_checks.CHECKS[name]()
    return 1


CHECKS = {
    "first": Check(numbers.first, tuple(numbers.FIRST), None, 200, True, "the simplest problems, forward and backward"),
    "op": Check(
        _named(op_checks.CHECKS),
        tuple(op_checks.CHECKS),
        None,
        240,
        True,
        "graph capture, wrong offsets, strides, plans",
    ),
    "lists": Check(_lists, (), tuple(list_checks.CHECKS), 120, True, "tile lists built on the device"),
    "repeat": Check(numbers.repeat, numbers.REPEATED, None, 200, True, "deterministic gradients, bit by bit"),
    "large": Check(numbers.large, range(40), range(12), 120, True, "sequences of up to 1500 tokens"),
    "sparse": Check(_sparse, range(40), range(12), 120, True, "block lists"),
    "mxfp8": Check(_mxfp8, range(20), (), 120, True, "attention in MXFP8 against the same roundings in fp64"),
    "quantize": Check(_quantize, (), range(20), 120, True, "the MXFP8 quantizer, byte by byte"),
    "wide": Check(numbers.wide, range(12), range(4), 120, True, "head sizes of 160 to 256"),
    "random": Check(
        numbers.random_batch, range(0, 1000, 10), range(0, 200, 10), 200, False, "ten random problems each"
    ),
}
"""Checks by kind, in the order in which they run."""


def run(job: Job) -> Any:
    """Run one job in a child. Raises AssertionError where a result is wrong, Refused where the backend does not offer it."""
    device = job.options.get("device", "cuda")
    work = CHECKS[job.kind].run if job.kind in CHECKS else partial(TIMED[job.kind], **job.options.get("timing", {}))
    try:
        value = work(job.item, job.backend, device)
        if device == "cuda":
            torch.cuda.synchronize()  # errors of a kernel come out here
        return value
    except registry.UnsupportedError as reason:
        raise Refused(str(reason)) from None
    except torch.OutOfMemoryError:
        raise Refused("this GPU's memory does not suffice, or other jobs hold it: try --processes 1") from None
    finally:
        if device == "cuda" and (job.kind in TIMED or job.item == LARGEST):
            _release()


def _release() -> None:
    """Give cached memory back; after an error of CUDA there is nothing to give."""
    try:
        torch.cuda.empty_cache()
    except RuntimeError:
        pass


# --------------------------------------------------------------------------------------------------------------- timing


def implementation(name: str) -> Callable[[shapes.Inputs], peers.Call]:
    """Return the builder of "fa2", "jfa", "jfa:BACKEND" or "jfa:BACKEND:OPTION=VALUE...".

    Options are those of the op, and ``form``: of Blackwell's backward, in place of the one that it would choose.

    Raises:
        KeyError: if there is no peer of that name.
        ValueError: if an option has no value.
    """
    first, *rest = name.split(":")
    if first != "jfa":
        return peers.PEERS[name]
    options = {}
    for part in rest[1:]:
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{name!r}: an option reads NAME=VALUE, not {part!r}")
        options[key] = {"True": True, "False": False}.get(value, value)
    return partial(ours, backend=rest[0] if rest else "auto", **options)


def ours(inputs: shapes.Inputs, backend: str, form: str | None = None, **options: Any) -> peers.Call:
    """Build the op's call; ``form`` then holds in this process until the next call is built.

    Raises:
        ValueError: for a form of another backend than Blackwell's.
    """
    if form and backend != "blackwell":
        raise ValueError(f"only backend 'blackwell' takes a form, not {backend!r}")
    force_form(form)
    return peers.jfa(inputs, backend=backend, **options)


def force_form(form: str | None) -> None:
    """Let Blackwell's backward take a form; None: let it choose. A form that a problem cannot have raises when it is called."""
    from jfa.kernels.blackwell import launch

    choose = getattr(launch.backward_config, "func", launch.backward_config)
    launch.backward_config = partial(choose, form=form) if form else choose


def prepare(item: str, backend: str, device: str) -> str:
    """Run one implementation once on a shape, forward and backward: its kernels are then in Triton's cache on disk.

    ``item`` is "SHAPE/IMPLEMENTATION". Returns why it cannot run, "" where it can.
    """
    shape, name = item.split("/", 1)
    return runner.measure(_inputs(shape, device), name, implementation(name), runs=1).note


def time_shape(shape: str, backend: str, device: str, names: Sequence[str] = (), runs: int = 20) -> list[dict]:
    """Time every implementation on a shape, one after the other in this process; what cannot run says so in its note."""
    inputs = _inputs(shape, device)
    return [asdict(runner.measure(inputs, name, implementation(name), runs)) for name in names]


def _inputs(shape: str, device: str) -> shapes.Inputs:
    return shapes.make_inputs(numbers.known_shape(shape), device, torch.bfloat16 if device == "cuda" else torch.float32)


def measure_host(item: str, backend: str, device: str, backends: Sequence[str] = BACKENDS, **bounds: int) -> dict:
    """Return the host's microseconds per small call, by implementation."""
    return host_time.measure(tuple(backends), device, **bounds)


def measure_ceilings(item: str, backend: str, device: str) -> dict[str, float]:
    """Return what this GPU reaches at best: see :func:`jfa.bench.runner.ceilings`."""
    return runner.ceilings()


TIMED = {"prepare": prepare, "host": measure_host, "ceilings": measure_ceilings, "time": time_shape}
"""Measurements by kind. All but "prepare" run alone on the machine."""


# --------------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Stage:
    """Jobs that may run side by side, or one after the other where ``alone``."""

    name: str
    jobs: tuple[Job, ...]
    alone: bool = False


def offered(device: str = "cuda") -> dict[str, str | None]:
    """Return for each backend None, or the sentence why a plain call cannot use it here."""
    q = torch.empty(1, 1, 64, dtype=torch.bfloat16, device=device)
    offsets = torch.zeros(2, dtype=torch.int32, device=device)
    problem = make_problem(q, q, q, offsets, offsets, None, 0.125, shapes.SHAPES["self"].band, False, False, 0, 0)
    return {name: registry.objection(name, problem) for name in BACKENDS}


def stages(
    backends: Sequence[str],
    chosen: Sequence[str] = shapes.DEFAULT,
    other: Sequence[str] = PEERS,
    predicted: Iterable[Prediction] = (),
    device: str = "cuda",
) -> list[Stage]:
    """Return the whole suite for some backends.

    Args:
        backends: the first is the one written for this GPU, if there is one.
        chosen: names of the shapes to time.
        other: peers to time beside ours.
        predicted: predictions for this GPU: what they compare is timed as well, on their shapes.
    """
    first = _checks(backends, device, lambda job: job.kind == "first")
    early = _checks(
        backends, device, lambda job: CHECKS[job.kind].early and job.kind != "first" and job.item != LARGEST
    )
    late = _checks(backends, device, lambda job: not CHECKS[job.kind].early)
    largest = _checks(backends, device, lambda job: job.item == LARGEST)
    names = {shape: _implementations(shape, backends, other, predicted) for shape in _shapes(chosen, predicted)}
    compiled = [
        Job("prepare", _backend_of(name), f"{shape}/{name}", 300, {"device": device})
        for shape, several in names.items()
        for name in several
    ]
    host = Job("host", "all", "small", 300, {"device": device, "timing": {"backends": tuple(backends)}})
    ceilings = Job("ceilings", "all", "copy and product", 120, {"device": device})
    timed = [
        Job("time", "all", shape, 400, {"device": device, "timing": {"names": tuple(several)}})
        for shape, several in names.items()
    ]
    return [
        Stage("the simplest calls", tuple(first)),
        Stage("checks, and compiling what is timed", (*compiled, *early)),
        Stage(TIMES, (host, ceilings, *timed), alone=True),
        Stage("random problems", tuple(late)),
        Stage("tensors beyond an int32", tuple(largest), alone=True),
    ]


def without(job: Job, backends: set[str], failed: set[str]) -> Job:
    """Return a measurement without some backends and without the implementations whose preparation failed.

    Args:
        failed: keys of jobs.
    """
    timing = dict(job.options.get("timing", {}))
    if "backends" in timing:
        timing["backends"] = tuple(b for b in timing["backends"] if b not in backends)
    if "names" in timing:
        hidden = lambda name: (
            _backend_of(name) in backends or f"prepare:{_backend_of(name)}:{job.item}/{name}" in failed
        )
        timing["names"] = tuple(name for name in timing["names"] if not hidden(name))
    return replace(job, options=job.options | {"timing": timing}) if timing else job


def _backend_of(name: str) -> str:
    """Return the backend that an implementation names, "all" for a peer."""
    return name.split(":")[1] if name.startswith("jfa:") else "all"


def _checks(backends: Sequence[str], device: str, wanted: Callable[[Job], bool]) -> list[Job]:
    jobs = []
    for kind, check in CHECKS.items():
        for backend in backends:
            items = check.portable if backend == "portable" and check.portable is not None else check.items
            if kind == "sparse" and not getattr(registry.load(backend), "BLOCK_LISTS", False):
                items = ()
            if kind == "mxfp8" and not getattr(registry.load(backend, "mxfp8"), "MXFP8", False):
                items = ()
            jobs += [Job(kind, backend, item, check.seconds, {"device": device}) for item in items]
    return [job for job in jobs if wanted(job)]


def _shapes(chosen: Sequence[str], predicted: Iterable[Prediction]) -> list[str]:
    wanted = [p.timed_on for p in predicted if p.measurable and p.timed_on in shapes.SHAPES]
    return list(dict.fromkeys([*chosen, *wanted]))


def _implementations(
    shape: str, backends: Sequence[str], other: Sequence[str], predicted: Iterable[Prediction]
) -> list[str]:
    wanted = [name for p in predicted if p.timed_on == shape for name in p.implementations]
    return list(dict.fromkeys([*(f"jfa:{name}" for name in backends), *other, *wanted]))
