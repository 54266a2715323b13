"""Report the resources of a compiled kernel and whether the target has them; as text, a table, or a comparison of
two."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Limits of one CTA. SMEM: what a kernel can opt in to on these three (228 KiB of the SM less 1 KiB the system keeps).
SMEM_CAP = {90: 232_448, 100: 232_448, 103: 232_448}
TMEM_CAP = {90: 0, 100: 512, 103: 512}  # columns of 128 lanes x 32 bits; Hopper has none
REGISTER_FILE = 65_536  # 32-bit registers of one SM
MAX_THREADS = 1024
MARK = "REPORT "  # starts a line of the compiling process that carries a report; the compiler prints lines of its own


@dataclass
class Role:
    """One warp group of the kernel: its warps and the registers per thread (None where nothing sets them)."""

    name: str
    warps: int
    registers: int | None


@dataclass
class Report:
    """Resources that one kernel variant needs on one target."""

    name: str
    arch: int
    smem: int = 0  # bytes
    tmem: int = 0  # columns
    threads: int = 0
    registers: int = 0  # per thread, as ptxas allots them at launch, before setmaxnreg moves them between roles
    spill_stores: int = 0  # bytes per thread
    spill_loads: int = 0
    stack: int = 0  # bytes per thread
    global_scratch: int = 0  # bytes per CTA; more than 0 means that a launch needs an allocator
    roles: list[Role] = field(default_factory=list)
    role_spills: dict[str, tuple[int, int]] = field(default_factory=dict)  # {role: (stores, loads)} where it spills
    counts: dict[str, int] = field(default_factory=dict)
    max_spill_bytes: int | None = None  # recorded; None: nothing recorded
    serialized: bool = False  # ptxas had too few registers to leave wgmmas in flight, and waits after each
    may_serialize: bool = False  # recorded as the fastest all the same
    setmaxnreg_ignored: bool = False  # a role needs more registers than it asks for, so all roles get the same
    files: dict[str, str] = field(default_factory=dict)  # {"ptx": path, "sass": path}, of those that were asked for
    note: str = ""  # why something is missing here that is no fault of the kernel
    error: str | None = None

    @property
    def problems(self) -> list[str]:
        """Why this variant must not ship on this target; empty if it may."""
        if self.error:
            return [f"does not compile: {self.error.strip().splitlines()[-1]}"]
        found = []
        if self.smem > SMEM_CAP[self.arch]:
            found.append(f"SMEM {self.smem} B exceeds the {SMEM_CAP[self.arch]} B of sm_{self.arch}")
        if self.tmem > TMEM_CAP[self.arch]:
            found.append(f"TMEM {self.tmem} columns exceed the {TMEM_CAP[self.arch]} of sm_{self.arch}")
        if self.threads > MAX_THREADS:
            found.append(f"{self.threads} threads exceed the {MAX_THREADS} of a CTA")
        if self.registers * self.threads > REGISTER_FILE:
            found.append(f"{self.registers} registers x {self.threads} threads exceed the file of {REGISTER_FILE}")
        spills = self.spill_stores + self.spill_loads
        if self.max_spill_bytes is not None and spills > self.max_spill_bytes:
            found.append(f"spills {spills} B per thread (stores + loads), recorded are {self.max_spill_bytes}")
        if self.serialized and not self.may_serialize:
            found.append(
                "wgmmas wait for each other: a role has too few registers to leave them in flight (ptxas C7512)"
            )
        if self.setmaxnreg_ignored:
            found.append("setmaxnreg has no effect: a role needs more registers than it asks for (ptxas C7507)")
        return found

    @property
    def key(self) -> str:
        return f"{self.name}@{self.arch}"

    def rows(self) -> list[tuple[str, str]]:
        """Return (quantity, value) pairs, the order in which a reader asks for them."""
        out = [
            ("SMEM", f"{self.smem:,} of {SMEM_CAP[self.arch]:,} B"),
            ("TMEM", f"{self.tmem} of {TMEM_CAP[self.arch]} columns"),
            ("threads", str(self.threads)),
            ("registers at launch", str(self.registers)),
            ("spills", f"{self.spill_stores} B stored, {self.spill_loads} B loaded per thread"),
            *((f"  {role}", f"{a} B stored, {b} B loaded") for role, (a, b) in self.role_spills.items()),
            ("barriers", str(self.counts.get("mbarrier.init", 0))),
            ("global scratch", f"{self.global_scratch} B"),
        ]
        out += [(f"role {r.name}", f"{r.warps} warps, {r.registers or '?'} registers per thread") for r in self.roles]
        out += [(k, str(v)) for k, v in self.counts.items() if v and k != "mbarrier.init"]
        return out

    def to_text(self) -> str:
        head = f"{self.name} on sm_{self.arch}: {'; '.join(self.problems) or 'fits'}"
        width = max(len(k) for k, _ in self.rows())
        more = [f"  {kind}: {path}" for kind, path in self.files.items()] + ([f"  {self.note}"] if self.note else [])
        return "\n".join([head] + [f"  {k:<{width}}  {v}" for k, v in self.rows()] + more)

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in self.rows())
        verdict = html.escape("; ".join(self.problems) or "fits")
        return f"<b>{html.escape(self.name)}</b> on sm_{self.arch}: {verdict}<table>{cells}</table>"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        data = dict(data)
        data["roles"] = [Role(**r) for r in data.get("roles", [])]
        data["role_spills"] = {role: tuple(both) for role, both in data.get("role_spills", {}).items()}
        return cls(**data)


TABLE_HEAD = (
    "kernel", "sm", "SMEM", "TMEM", "threads", "regs x warps by role", "spill st/ld", "bars", "mma", "ld/st",
    "TMA l/s/r", "ex2", "verdict",
)  # fmt: skip


def table(reports: Sequence[Report]) -> str:
    """Return one line per variant and target: what fits, what spills, what counts."""
    lines = [list(TABLE_HEAD)] + [_table_row(r) for r in reports]
    widths = [max(len(line[i]) for line in lines) for i in range(len(TABLE_HEAD))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)


def _table_row(r: Report) -> list[str]:
    c = r.counts.get
    mma = c("tcgen05.mma", 0) or c("wgmma", 0)
    return [
        r.name, str(r.arch), f"{r.smem:,}", str(r.tmem), str(r.threads),
        " ".join(f"{x.registers or '?'}x{x.warps}" for x in r.roles) or str(r.registers),
        f"{r.spill_stores}/{r.spill_loads}", str(c("mbarrier.init", 0)), str(mma),
        f"{c('tcgen05.ld', 0)}/{c('tcgen05.st', 0)}", f"{c('tma.load', 0)}/{c('tma.store', 0)}/{c('tma.reduce', 0)}",
        str(c("ex2 (mufu)", 0)), "; ".join(r.problems) or "fits",
    ]  # fmt: skip


def diff(before: Report, after: Report) -> str:
    """Return the quantities in which two reports differ, side by side."""
    a, b = dict(before.rows()), dict(after.rows())
    changed = [(k, a.get(k, "-"), b.get(k, "-")) for k in [*a, *(k for k in b if k not in a)] if a.get(k) != b.get(k)]
    lines = [("", before.key, after.key), *(changed or [("no difference", "", "")])]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)
