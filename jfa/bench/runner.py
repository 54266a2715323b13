"""Time a call, and describe the machine it ran on.

On a GPU: CUDA events, the median of several runs, the L2 cache cleared before each, and a pause on the device before
the first event, so that the host has queued everything by the time the clock starts: device time is measured, not
Python. The backward is timed by itself on a kept graph. On a CPU: wall-clock time, for the reference; such numbers say
nothing about a GPU.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from jfa.bench.peers import Call, Unavailable
from jfa.bench.shapes import Inputs

FLUSH_BYTES = 128 << 20  # more than the L2 of any GPU so far
# About 4 ms: longer than the host takes to queue a forward or a backward. 1 ms was not always: a backward of 0.4 ms was once
# timed as 0.8 ms, on a host that took 0.6 ms to queue the forward.
PAUSE_CYCLES = 8_000_000


@dataclass
class Timing:
    """Median milliseconds of one implementation on one shape; ``note`` says why a number is missing.

    Memory, on a GPU, in MB of 10**6 bytes: ``forward_mb`` and ``backward_mb`` are the peak memory of a pass beyond its
    inputs and outputs; ``kept_mb`` is the part of it that a forward keeps for its backward.
    """

    shape: str
    name: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    note: str = ""
    forward_mb: float | None = None
    backward_mb: float | None = None
    kept_mb: float | None = None


def measure(
    inputs: Inputs, name: str, build: Callable[[Inputs], Call], runs: int = 20, backward: bool = True
) -> Timing:
    """Build, warm up and time an implementation; what it cannot do ends in the note."""
    timing = Timing(inputs.shape.name, name)
    try:
        call = build(inputs)
        call()
        timing.forward_ms = median_ms(call, inputs.key.device, runs)
        out, timing.forward_mb, timing.kept_mb = with_memory(call, inputs.key.device)
        if not isinstance(out, torch.Tensor):
            return timing  # blocks chosen, nothing multiplied
        timing.forward_tflops = inputs.shape.flops() / timing.forward_ms / 1e9
        if backward:
            grads = lambda: torch.autograd.grad(
                out, (inputs.query, inputs.key, inputs.value), inputs.grad_out.view_as(out), retain_graph=True
            )
            timing.backward_ms = median_ms(grads, inputs.key.device, runs)
            timing.backward_mb = with_memory(grads, inputs.key.device)[1]
            timing.backward_tflops = inputs.shape.flops(backward=True) / timing.backward_ms / 1e9
    except Unavailable as reason:
        timing.note = str(reason)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, ImportError) as error:
        timing.note = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return timing


def with_memory(call: Callable[[], object], device: torch.device) -> tuple[object, float | None, float | None]:
    """Return (what a call returns, the most MB that it had beyond that, the MB that it keeps beyond that); None on a CPU."""
    if device.type != "cuda":
        return call(), None, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    returned = before + _bytes(result)
    return result, (peak - returned) / 1e6, (after - returned) / 1e6


def _bytes(result: object) -> int:
    """Return the bytes of the memory behind the tensors that a call returns, each counted once."""
    tensors = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors)}.values())


def median_ms(call: Callable[[], object], device: torch.device, runs: int = 20, warmup: int = 3) -> float:
    """Return median time of one call."""
    for _ in range(warmup):
        call()
    return _median_cuda(call, runs) if device.type == "cuda" else _median_cpu(call, min(runs, 5))


def _median_cuda(call: Callable[[], object], runs: int) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(runs)] for _ in range(2))
    for start, end in zip(starts, ends):
        flush.zero_()
        torch.cuda._sleep(PAUSE_CYCLES)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in zip(starts, ends))


def _median_cpu(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Return what this GPU reaches at best: TB/s of a large copy, TFLOP/s of a large bf16 matrix product on random data."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), source.device, 10)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = median_ms(lambda: a @ b, a.device, 10)
    return {"copy_tb_per_s": 2 * source.numel() * 4 / copy_ms / 1e9, "bf16_tflops": 2 * 8192**3 / product_ms / 1e9}


def environment(device: torch.device) -> dict[str, str]:
    """Return where a result comes from: GPU, driver, versions, date."""
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = "not installed"
    import jfa

    facts = {
        "date": datetime.date.today().isoformat(),
        "jfa": jfa.__version__,
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": str(torch.version.cuda),
        "device": "CPU",
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["driver"] = _driver()
    return facts


def _driver() -> str:
    import subprocess

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
    except OSError:
        return "unknown"


def as_json(timings: list[Timing], device: torch.device, extra: dict | None = None) -> dict:
    """Return a result file's contents."""
    return {"environment": environment(device), **(extra or {}), "timings": [asdict(t) for t in timings]}
