"""Costs of operations: cycles, and bytes per clock, of a B200 and an H200, each number with its source.

The machine's *timed* policy asks a :class:`Chip` for the :class:`Demand` of every operation: how long it occupies each
resource of one SM, and the latency that follows. Resources are servers that all tasks of an SM share, so two warp
groups that both need the exponential unit wait for each other, as on the chip. All results are *modelled*, never
measured.

Sources: "fa4" is the FlashAttention-4 paper (arXiv 2603.05451), "micro" SemiAnalysis' microbench-blackwell, "b300"
public notes on the B300, "h200" our own measurement on one H200 (the ceilings of
jfa/bench/results/h200-2026-11-29-hopper.json), "public" NVIDIA's data sheets and programming guides, "derived"
arithmetic on the others, "assumed" no source at all: vary those before you believe a conclusion (:meth:`Chip.scaled`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Rate:
    """One number: its value, unit and where it comes from."""

    value: float
    unit: str
    source: str

    @property
    def assumed(self) -> bool:
        """Whether no source gives this number for this chip, so that conclusions must survive halving and doubling it."""
        return self.source.startswith("assumed")


@dataclass(frozen=True)
class Demand:
    """The demand of one operation: cycles on each resource of its SM, then ``latency`` cycles until it is complete."""

    needs: dict[str, float] = field(default_factory=dict)
    latency: float = 0.0

    def __add__(self, other: Demand) -> Demand:
        needs = dict(self.needs)
        for name, cycles in other.needs.items():
            needs[name] = needs.get(name, 0.0) + cycles
        return Demand(needs, max(self.latency, other.latency))


def _r(value: float, unit: str, source: str) -> Rate:
    return Rate(float(value), unit, source)


_COMMON = {
    "mufu": _r(16, "exp/clk/SM", "fa4"),
    "alu": _r(128, "fp32 operations/clk/SM", "public"),
    "cvt": _r(
        64, "conversions/clk/SM", "public: CUDA programming guide, arithmetic throughput of narrowing conversions"
    ),
    "smem": _r(128, "B/clk/SM", "fa4"),
    "barrier": _r(20, "cycles to arrive, or to pass a completed phase", "assumed"),
    "wakeup": _r(40, "cycles from phase completion to a waiting warp's next instruction", "assumed"),
    "fence": _r(30, "cycles", "assumed"),
    "named_barrier": _r(30, "cycles", "assumed"),
    "commit": _r(10, "cycles", "assumed"),
    "smem_latency": _r(33, "cycles", "public: microbenchmark papers on Hopper shared memory"),
    "global_latency": _r(600, "cycles, L2 hit and miss mixed", "assumed"),
    "clc": _r(900, "cycles for one cancellation request", "assumed"),
    "launch": _r(1500, "cycles from launch to the first instruction, and between two CTAs of one SM", "assumed"),
    "tma_issue": _r(128, "B/clk/SM through one SM's TMA unit", "assumed: as fast as SMEM takes it"),
}

B200_RATES = _COMMON | {
    "sms": _r(148, "SMs", "public"),
    "clock": _r(1.965e9, "Hz", "micro"),
    "clock_sustained": _r(1.965e9, "Hz under tensor load", "assumed: no throttling figure for a B200"),
    "tensor_2": _r(8192, "FLOP/clk/SM, 16-bit", "fa4"),
    "tensor_1": _r(16384, "FLOP/clk/SM, FP8 and MXFP8", "micro"),
    "tensor_4": _r(4096, "FLOP/clk/SM, TF32", "derived: half of 16-bit"),
    "tmem_read": _r(228, "B/clk/SM", "assumed: b300, no B200 figure"),
    "tmem_write": _r(228, "B/clk/SM", "assumed: as the read"),
    "mma_latency": _r(200, "cycles, 128x128 SMEM-SMEM (168 TMEM-SMEM)", "micro"),
    "mma_latency_pair": _r(298, "cycles, two CTAs SMEM-SMEM (266 TMEM-SMEM)", "micro"),
    "tma_latency": _r(
        1000, "cycles, L2 hit; twice that from HBM", "assumed: micro has about 2000 for a small box from memory"
    ),
    "l2": _r(20.5e12 / 148 / 1.965e9, "B/clk/SM", "derived: 20.5 TB/s measured (TileSight)"),
    "hbm": _r(7.0e12 / 148 / 1.965e9, "B/clk/SM", "derived: 7.0 TB/s measured (TileSight)"),
}

H200_RATES = _COMMON | {
    "sms": _r(132, "SMs", "public"),
    "clock": _r(1.83e9, "Hz", "micro"),
    "clock_sustained": _r(
        790e12 / 132 / 4096, "Hz under tensor load", "derived: an 8192^3 bf16 matmul ran at 790 TFLOP/s (h200)"
    ),
    "tensor_2": _r(4096, "FLOP/clk/SM, 16-bit", "fa4"),
    "tensor_1": _r(8192, "FLOP/clk/SM, FP8", "micro"),
    "tensor_4": _r(2048, "FLOP/clk/SM, TF32", "derived: half of 16-bit"),
    "tmem_read": _r(128, "B/clk/SM", "no such memory: as SMEM"),
    "tmem_write": _r(128, "B/clk/SM", "no such memory: as SMEM"),
    "mma_latency": _r(128, "cycles, m64n256k16 wgmma", "assumed"),
    "mma_latency_pair": _r(128, "cycles", "assumed"),
    "tma_latency": _r(700, "cycles, L2 hit", "assumed"),
    "l2": _r(9.2e12 / 132 / 1.83e9, "B/clk/SM", "derived: 9.2 TB/s measured (TileSight)"),
    "hbm": _r(4.24e12 / 132 / 1.83e9, "B/clk/SM", "derived: a device copy moved 4.24 TB/s (h200)"),
}


@dataclass(frozen=True)
class Chip:
    """One GPU as the timed policy sees it."""

    name: str
    rates: dict[str, Rate]

    def __getitem__(self, name: str) -> float:
        return self.rates[name].value

    def scaled(self, name: str, factor: float) -> Chip:
        """Return the same chip with one rate multiplied by ``factor``: how much does a conclusion lean on that number?"""
        old = self.rates[name]
        return replace(
            self, rates=self.rates | {name: Rate(old.value * factor, old.unit, f"{old.source}, times {factor:g}")}
        )

    def assumed(self) -> list[str]:
        """Return names of the rates that no source gives for this chip."""
        return [n for n, r in self.rates.items() if r.assumed]

    def demand(self, op: str, **facts) -> Demand:
        """Return the :class:`Demand` of one operation; ``facts`` are the sizes that the operation's method below names."""
        return getattr(self, f"_{op}")(**facts)

    def seconds(self, cycles: float) -> float:
        """Return cycles as seconds at the clock sustained under tensor load."""
        return cycles / self["clock_sustained"]

    def peak_flops(self, itemsize: int = 2) -> float:
        """Return tensor FLOP/s of the whole chip at the sustained clock."""
        return self["sms"] * self[f"tensor_{itemsize}"] * self["clock_sustained"]

    # -- one method an operation -----------------------------------------------------------------------------------------

    def _alu(self, kind: str, elements: int, warps: int = 4, itemsize: int = 4) -> Demand:
        if elements <= 1:
            return Demand()
        # each of the SM's four schedulers has a quarter of every unit, and one warp lives on one scheduler
        share = min(warps, 4) / 4
        if kind == "mufu":
            return Demand({"mufu": elements / (self["mufu"] * share)})
        if kind == "move":
            return Demand()
        rate = self["cvt"] if kind == "cvt" else self["alu"]
        return Demand({"alu": elements / (rate * share)})

    def _local(self, space: str, bytes: int, warps: int, direction: str) -> Demand:
        share = min(warps, 4) / 4
        if space == "tmem":
            name = f"tmem_{direction}"
            return Demand({name: bytes / (self[name] * share)}, latency=self["smem_latency"])
        return Demand({"smem": bytes / self["smem"]}, latency=self["smem_latency"])

    def _local_load(self, space: str, bytes: int, warps: int = 4) -> Demand:
        return self._local(space, bytes, warps, "read")

    def _local_store(self, space: str, bytes: int, warps: int = 4) -> Demand:
        return self._local(space, bytes, warps, "write")

    def _global_load(self, bytes: int, warps: int = 4, **_) -> Demand:
        return Demand({"l2": bytes / self["l2"]}, latency=self["global_latency"])

    def _global_store(self, bytes: int, warps: int = 4, **_) -> Demand:
        # a store does not wait for memory; it only takes its share of the path there
        return Demand({"l2": bytes / self["l2"]})

    def _tma(self, bytes: int) -> dict[str, float]:
        return {"tma": bytes / self["tma_issue"], "l2": bytes / self["l2"], "smem": bytes / self["smem"]}

    def _tma_load(self, bytes: int, multicast: int = 1, cold: bool = False, **_) -> Demand:
        needs = self._tma(bytes)
        if cold:
            needs["hbm"] = bytes / self["hbm"]
        return Demand(needs, latency=self["tma_latency"] * (2 if cold else 1))

    def _remote_store(self, bytes: int, **_) -> Demand:
        # what a copy out of another CTA takes of the CTA that it writes to
        return Demand({"smem": bytes / self["smem"]})

    def _tma_store(self, bytes: int, **_) -> Demand:
        return Demand(self._tma(bytes), latency=self["tma_latency"] / 2)

    def _tma_reduce(self, bytes: int, **_) -> Demand:
        # the L2 reads, adds and writes: twice the traffic of a store
        needs = self._tma(bytes)
        needs["l2"] *= 2
        return Demand(needs, latency=self["tma_latency"])

    def _mma(
        self, m: int, n: int, k: int, itemsize_a: int = 2, a_space: str = "smem", two_cta: bool = False, **_
    ) -> Demand:
        """Return one CTA's share: a pair (``two_cta``) computes m x n together, each CTA half of the rows and of B in SMEM."""
        rows = m / 2 if two_cta else m
        flops = 2 * rows * n * k
        # below 128 rows the array is half empty, and takes as long as if it were full; a pair with 64 rows in each CTA folds its
        # columns over both halves of the lanes (PTX ISA, tcgen05 data path layout B)
        half_empty = a_space != "reg" and rows < 128 and self.name == "B200" and not two_cta
        fill = 128 / rows if half_empty else 1.0
        b_bytes = n * k * itemsize_a / (2 if two_cta else 1)
        a_bytes = rows * k * itemsize_a if a_space == "smem" else 0
        needs = {
            "tensor": flops * fill / self[f"tensor_{max(1, itemsize_a)}"],
            "smem": (a_bytes + b_bytes) / self["smem"],
        }
        if a_space == "tmem":
            needs["tmem_read"] = rows * k * itemsize_a / (2 * self["tmem_read"])
        return Demand(needs, latency=self["mma_latency_pair" if two_cta else "mma_latency"])

    def _barrier_arrive(self, **_) -> Demand:
        return Demand(latency=self["barrier"])

    def _barrier_wait(self, waited: bool = True, **_) -> Demand:
        return Demand(latency=self["wakeup" if waited else "barrier"])

    def _named_barrier(self, **_) -> Demand:
        return Demand(latency=self["named_barrier"])

    def _fence(self, **_) -> Demand:
        return Demand(latency=self["fence"])

    def _commit(self, **_) -> Demand:
        return Demand(latency=self["commit"])

    def _clc(self, **_) -> Demand:
        return Demand(latency=self["clc"])

    def _task_start(self, **_) -> Demand:
        return Demand(latency=self["barrier"])

    def _launch(self, **_) -> Demand:
        return Demand(latency=self["launch"])


B200 = Chip("B200", B200_RATES)
H200 = Chip("H200", H200_RATES)
CHIPS = {"B200": B200, "H200": H200}
