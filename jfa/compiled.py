"""Compile kernels for Hopper and Blackwell without a GPU, and report what the hardware would be asked for.

``compile_kernel(kernel, signature, constexprs, arch=100)`` returns a :class:`Report` that displays as a table in a notebook;
`jfa compile` (:mod:`jfa.workbench.compile`) is the command. Compiling happens in a child process: Triton cannot compile where
TRITON_INTERPRET is set, and a crash of the compiler must not take a notebook with it. Nothing here needs or touches a GPU.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import html
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jfa import sass
from jfa.kernels.compile_config import CompileConfig

# Limits of one CTA. SMEM: what a kernel can opt in to on these three (228 KiB of the SM less 1 KiB the system keeps).
SMEM_CAP = {90: 232_448, 100: 232_448, 103: 232_448}
TMEM_CAP = {90: 0, 100: 512, 103: 512}  # columns of 128 lanes x 32 bits; Hopper has none
REGISTER_FILE = 65_536  # 32-bit registers of one SM
MAX_THREADS = 1024
MARK = "REPORT "  # starts a child's line that carries a report; the compiler prints lines of its own

# What to count, and what one line of PTX must contain to count. Each is an instruction that decides about speed.
PTX_COUNTS = {
    "tcgen05.mma": r"\btcgen05\.mma\b",
    "tcgen05.ld": r"\btcgen05\.ld\b",
    "tcgen05.st": r"\btcgen05\.st\b",
    "tcgen05.commit": r"\btcgen05\.commit\b",
    "wgmma": r"\bwgmma\.mma_async\b",
    "tma.load": r"\bcp\.async\.bulk\.tensor\S*shared::\w+\.global",
    "tma.store": r"\bcp\.async\.bulk\.tensor\S*global\.shared::cta",
    "tma.reduce": r"\bcp\.reduce\.async\.bulk\.tensor",
    "dsmem.copy": r"\bcp\.async\.bulk\.shared::cluster\.shared::cta",
    "dsmem.store": r"\bst\.async\b",
    "barrier.cluster": r"\bbarrier\.cluster\.arrive",
    "setmaxnreg": r"\bsetmaxnreg\b",
    "clusterlaunchcontrol": r"\bclusterlaunchcontrol\.try_cancel",
    "mbarrier.init": r"\bmbarrier\.init\b",
    "mbarrier.wait": r"\bmbarrier\.try_wait\b",
    "mbarrier.arrive": r"\bmbarrier\.arrive\b",
    "bar.sync": r"\bbar\.sync\b|\bbarrier\.sync\b",
    "fence.proxy": r"\bfence\.proxy\.async\b",
    "ex2 (mufu)": r"\bex2\.approx",
    "mufu, others": r"\b(?:lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx",
    "fma.f32x2": r"\b(?:fma|mul|add|sub)\S*\.f32x2\b",
    "setp": r"\bsetp\.",
    "selp": r"\bselp\.",
    "st.global": r"\bst\.global\b",
    "ld.global": r"\bld\.global\b",
    "atomic": r"\b(?:atom|red)\.global\b",
}


@dataclass
class Role:
    """One warp group of the kernel: its warps and the registers a thread of it has (None where nothing sets them)."""

    name: str
    warps: int
    registers: int | None


@dataclass
class Report:
    """What one kernel variant asks of one target."""

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
    role_spills: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # {role: (stores, loads)}, of those that spill
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
        """(quantity, value) pairs, the order in which a reader asks for them."""
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


# ---------------------------------------------------------------------------------------------------- configurations


def shipped_configs() -> list[CompileConfig]:
    """Every configuration of every kernel module, in the order of their names.

    Raises:
        ValueError: if two share a name.
    """
    import jfa.kernels

    found: dict[str, CompileConfig] = {}
    for info in pkgutil.walk_packages(jfa.kernels.__path__, "jfa.kernels."):
        if info.ispkg:
            continue
        module = importlib.import_module(info.name)
        for config in getattr(module, "compile_configs", lambda: [])():
            if config.name in found:
                raise ValueError(f"two kernel configurations are called {config.name!r}")
            found[config.name] = config
    return [found[name] for name in sorted(found)]


def select(configs: Sequence[CompileConfig], patterns: Iterable[str]) -> list[CompileConfig]:
    """The configurations whose name matches any of the shell patterns; all, without patterns.

    Raises:
        ValueError: naming a pattern that matches none.
    """
    patterns = list(patterns)
    for p in patterns:
        if not fnmatch.filter([c.name for c in configs], p):
            raise ValueError(f"no kernel configuration matches {p!r}; `jfa compile --list` names them")
    return [c for c in configs if not patterns or any(fnmatch.fnmatch(c.name, p) for p in patterns)]


# ------------------------------------------------------------------------------------------------------- the parent


def compile_configs(
    configs: Sequence[CompileConfig], archs: Sequence[int] | None = None, folders: dict[str, str] | None = None
) -> list[Report]:
    """Compile each configuration for its targets (those among ``archs``, if given) in one child process.

    ``folders``: where to write NAME.sm_ARCH.ptx and .sass, by "ptx" and "sass"; what is not named is not written.
    """
    jobs, recorded = [], []
    for config in configs:
        for arch in config.targets:
            if archs is None or arch in archs:
                jobs.append(_job(config.kernel, config, arch) | {"folders": folders or {}})
                spill = config.max_spill_bytes
                recorded.append((spill[arch] if isinstance(spill, dict) else spill, config.serialized))
    reports = _run_worker(jobs)
    for report, (spill, serialized) in zip(reports, recorded):
        report.max_spill_bytes, report.may_serialize = spill, serialized
    return reports


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any] | None = None,
    *,
    arch: int = 100,
    num_warps: int = 4,
    roles: Sequence[str] = (),
    name: str | None = None,
    options: dict[str, Any] | None = None,
) -> Report:
    """Compile any ``@triton.jit`` function, one defined in a notebook cell too, for ``arch`` (90, 100 or 103).

    Args:
        signature: Triton types of the arguments that are no constexprs, as in :class:`CompileConfig`.
        constexprs: values of the constexprs; numbers, strings, booleans, None, ``tl.dtype``, dataclasses of those. Of a
            dataclass that a cell defines the compiler sees the fields only.
        roles: names for the warp groups in the report.
        options: further launch options: ``{"ctas_per_cga": (2, 1, 1)}`` for a kernel on pairs of CTAs.
    """
    config = CompileConfig(
        name=name or _plain_function(kernel).__name__,
        kernel="",
        signature=signature,
        constexprs=constexprs or {},
        targets=(arch,),
        num_warps=num_warps,
        roles=tuple(roles),
        options=options or {},
    )
    with tempfile.TemporaryDirectory(prefix="jfa-compile-") as folder:
        path = Path(folder) / "shipped_kernel.py"
        path.write_text(ship_source(kernel))
        return _run_worker([_job(f"{path}:{_plain_function(kernel).__name__}", config, arch)])[0]


def _job(kernel: str, config: CompileConfig, arch: int) -> dict[str, Any]:
    constexprs = {name: _encode(value) for name, value in config.constexprs.items()}
    data = dataclasses.asdict(dataclasses.replace(config, constexprs=constexprs))
    data.update(kernel=kernel, arch=arch, max_spill_bytes=None)
    return data


def _run_worker(jobs: list[dict[str, Any]]) -> list[Report]:
    """Reports of the jobs, from a child that has no interpreter switched on. A job that kills the child is named."""
    if not jobs:
        return []
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    env["PYTHONSAFEPATH"] = "1"  # this package, not another jfa that lies in the current folder
    env.setdefault("TRITON_CACHE_DIR", str(_state_folder() / "triton"))
    env["TRITON_ALWAYS_COMPILE"] = "1"  # a cached kernel would come without ptxas's log
    command = [sys.executable, "-m", "jfa.compiled"]
    child = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=env)
    lines = [line.removeprefix(MARK) for line in child.stdout.splitlines() if line.startswith(MARK)]
    reports = [Report.from_json(json.loads(line)) for line in lines]
    if len(reports) < len(jobs):
        job = jobs[len(reports)]
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        died = f"the compiler process died ({child.returncode}): {last}"
        reports.append(Report(job["name"], job["arch"], error=died))
        reports += _run_worker(jobs[len(reports) :])
    return reports


def _state_folder() -> Path:
    """Where generated files go: the course's ignored state folder, never the home directory."""
    return Path(os.environ.get("JFA_STATE", Path.cwd() / ".jfa"))


# ----------------------------------------------------------------------------------- shipping a notebook cell's kernel


def ship_source(kernel: Any) -> str:
    """One module's text that defines ``kernel`` and all it uses: jit functions, aggregates, modules, plain values."""
    parts: dict[str, str] = {}
    _collect(kernel, parts)
    header = "import triton\nimport triton.language as tl\n\n"
    return header + "\n".join(parts.values())


def _collect(kernel: Any, parts: dict[str, str]) -> None:
    fn = _plain_function(kernel)
    key = f"{fn.__module__}.{fn.__qualname__}"
    if key in parts:
        return
    parts[key] = ""  # marks it as being collected, for recursion
    for name, value in _used_names(fn).items():
        line = _ship_value(name, value, parts)
        if line:
            parts.setdefault(f"value {name}", line)
    source = textwrap.dedent(inspect.getsource(fn))
    body = source[source.index("def ") :] if "def " in source else source
    parts.pop(key)
    parts[key] = f"\n\n@triton.jit\n{body}"


def _used_names(fn: Any) -> dict[str, Any]:
    """What the names of a function mean outside it. No set of the values: a jit function's hash parses its whole source."""
    used = inspect.getclosurevars(fn)
    return {**used.globals, **used.nonlocals}


def _ship_value(name: str, value: Any, parts: dict[str, str]) -> str | None:
    """The line that makes ``name`` mean ``value`` in the shipped module; None where nothing is needed."""
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}"
    if _is_jit(value):
        fn = _plain_function(value)
        if fn.__module__ and fn.__module__ != "__main__" and importlib.util.find_spec(fn.__module__.split(".")[0]):
            return f"from {fn.__module__} import {fn.__name__} as {name}"
        _collect(value, parts)
        return None if fn.__name__ == name else f"{name} = {fn.__name__}"
    inner = getattr(value, "value", value)
    if isinstance(inner, bool | int | float | str | type(None)):
        return f"{name} = tl.constexpr({inner!r})"
    if getattr(value, "__triton_aggregate__", False) and value.__module__ == "__main__":
        _collect_aggregate(value, parts)
        return None if value.__name__ == name else f"{name} = {value.__name__}"
    module = getattr(value, "__module__", None)
    if module and hasattr(value, "__name__"):
        return f"from {module} import {value.__name__} as {name}"
    raise TypeError(
        f"cannot ship {name} = {value!r}: a kernel may use modules, jit functions, aggregates and plain constants"
    )


def _collect_aggregate(cls: Any, parts: dict[str, str]) -> None:
    """Add an aggregate of a notebook, built by :func:`jfa.kernels.common.nouns.aggregate`: fields and jit methods.

    Python finds no source of a class in a cell, so it is written again from its annotations.
    """
    key = f"aggregate {cls.__name__}"
    if key in parts:
        return
    parts[key] = ""
    lines = [f"\n\n@_aggregate\nclass {cls.__name__}:"]
    lines += [f"    {field}: {kind.__name__}" for field, kind in cls.__annotations__.items()]
    used = {kind.__name__: kind for kind in cls.__annotations__.values()}
    methods = [_plain_function(method) for method in vars(cls).values() if _is_jit(method)]
    for needed in (used, *map(_used_names, methods)):
        for name, value in needed.items():
            line = _ship_value(name, value, parts)
            if line:
                parts.setdefault(f"value {name}", line)
    for method in methods:
        source = textwrap.dedent(inspect.getsource(method))
        lines.append(textwrap.indent("\n@triton.jit\n" + source[source.index("def ") :], "    "))
    parts.setdefault("value _aggregate", "from jfa.kernels.common.nouns import aggregate as _aggregate")
    parts.pop(key)
    parts[key] = "\n".join(lines) + "\n"


def _is_jit(value: Any) -> bool:
    return type(value).__name__ in ("JITFunction", "InterpretedFunction") or hasattr(value, "fn")


def _plain_function(kernel: Any) -> Any:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


# -------------------------------------------------------------------------------------------------------- the child


def _worker() -> int:
    """Read jobs from stdin, write one ``REPORT {json}`` line each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Triton prints whole PTX files to stdout when ptxas fails
    for job in json.load(sys.stdin):
        print(MARK + json.dumps(_compile(job).to_json()), file=out, flush=True)
    return 0


def _compile(job: dict[str, Any]) -> Report:
    report = Report(job["name"], job["arch"])
    try:
        kernel = _load_kernel(job["kernel"])
        _require_tlx(kernel)
        compiled, log = _triton_compile(kernel, job)
    except BaseException as e:  # noqa: BLE001 - whatever the compiler raises is the answer
        report.error = _explain(e)
        return report
    meta, ptx = compiled.metadata, compiled.asm["ptx"]
    report.smem = meta.shared
    report.tmem = getattr(meta, "tmem_size", 0) or 0
    report.global_scratch = getattr(meta, "global_scratch_size", 0) or 0
    report.threads = _first_int(r"\.(?:req|max)ntid\s+(\d+)", ptx)
    report.registers = _first_int(r"Used (\d+) registers", log)
    report.spill_stores = _first_int(r"(\d+) bytes spill stores", log)
    report.spill_loads = _first_int(r"(\d+) bytes spill loads", log)
    report.serialized = "wgmma.mma_async instructions are serialized" in log
    report.setmaxnreg_ignored = "'setmaxnreg' ignored" in log
    report.stack = _first_int(r"(\d+) bytes stack frame", log)
    report.counts = {name: len(re.findall(pattern, ptx)) for name, pattern in PTX_COUNTS.items()}
    _look_at_roles(report, kernel, compiled.asm, job)
    return report


def _look_at_roles(report: Report, kernel: Any, asm: dict[str, Any], job: dict[str, Any]) -> None:
    """Fill in the roles and what each of them spills; write PTX and SASS where the job asks for them."""
    function, folders = _plain_function(kernel), job.get("folders", {})
    try:
        blocks = sass.blocks_of(function)
    except (OSError, SyntaxError):  # no source to read
        blocks = []
    report.roles = parse_roles(asm["ttgir"], asm["ptx"], job["num_warps"], job["roles"])
    if report.roles and not job["roles"]:
        for role, name in zip(report.roles, sass.names_of(blocks, len(report.roles))):
            role.name = name
    text = ""
    if report.spill_stores or report.spill_loads or "sass" in folders:
        try:
            text = sass.disassemble(asm["cubin"])
        except RuntimeError as error:
            report.note = str(error)
    labels = sass.labels_of(blocks, [role.name for role in report.roles])
    report.role_spills = sass.spills_by_role(text, function.__code__.co_filename, blocks, labels)
    for kind, content in (("ptx", asm["ptx"]), ("sass", text)):
        if kind in folders and content:
            path = Path(folders[kind]) / f"{report.name}.sm_{report.arch}.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            report.files[kind] = str(path)


def _explain(e: BaseException | None) -> str:
    """The chain of causes, outermost first: Triton names the call in one error and the reason in the next."""
    lines = []
    while e is not None:
        lines.append(f"{type(e).__name__}: {e}".strip())
        e = e.__cause__ or e.__context__
    return "\n".join(lines)


class NeedsTlxError(RuntimeError):
    """The kernel is written in TLX, and the installed Triton has none."""


def _require_tlx(kernel: Any) -> None:
    """Raises NeedsTlxError if the kernel, or a jit function that it calls, uses TLX where only the emulator's stand-in is there."""
    from jfa.emulator.frontend.standin import NAME, TlxStandIn

    if not isinstance(sys.modules.get(NAME), TlxStandIn):
        return
    import triton

    seen, todo = set(), [_plain_function(kernel)]
    while todo:
        fn = todo.pop()
        seen.add(fn)
        for value in _used_names(fn).values():
            if isinstance(value, TlxStandIn) or (getattr(value, "__module__", None) or "").startswith(
                "jfa.emulator.tlx"
            ):
                raise NeedsTlxError(
                    f"`{fn.__name__}` uses TLX, which Triton {triton.__version__} does not have: install fbtriton in its place "
                    "(`jfa doctor` prints the command). The emulator runs the kernel here all the same"
                )
            if _is_jit(value) and _plain_function(value) not in seen:
                todo.append(_plain_function(value))


def _triton_compile(kernel: Any, job: dict[str, Any]):
    """(compiled kernel, ptxas's log) of one job."""
    import contextlib
    import io

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    defaults = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
    constexprs = defaults | {k: _decode(v) for k, v in job["constexprs"].items()}
    written = {a: "constexpr" if a in constexprs else job["signature"][a] for a in kernel.arg_names}
    signature = {a: t.removesuffix(":16") for a, t in written.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(written.values()) if t.endswith(":16")}
    log = io.StringIO()
    with contextlib.redirect_stdout(log), triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            ASTSource(kernel, signature, constexprs, aligned),
            target=GPUTarget("cuda", job["arch"], 32),
            options={"num_warps": job["num_warps"], "num_stages": 1, **_as_launched(job["options"])},
        )
    return compiled, log.getvalue()


def _as_launched(options: dict[str, Any]) -> dict[str, Any]:
    """Return launch options as Triton takes them: JSON has no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}


def _load_kernel(path: str) -> Any:
    module_name, attribute = path.rsplit(":", 1)
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and aggregates look their module up
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    kernel = getattr(module, attribute)
    while not hasattr(kernel, "arg_names") or type(kernel).__name__ != "JITFunction":
        kernel = kernel.fn
    return kernel


def _encode(value: Any) -> Any:
    """Return a constexpr's value as JSON can carry it; a dataclass by its name and fields."""
    value = getattr(value, "value", value)
    if dataclasses.is_dataclass(value):
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": vars(value)}
    return value if isinstance(value, bool | int | float | str | type(None)) else f"dtype:{value}"


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        module, name = value["class"].split(":")
        if module == "__main__":  # of a notebook, which is not here: what a kernel reads are its fields
            return dataclasses.make_dataclass(name, list(value["fields"]), frozen=True)(**value["fields"])
        return getattr(importlib.import_module(module), name)(**value["fields"])
    if isinstance(value, str) and value.startswith("dtype:"):
        import triton.language as tl

        return tl.dtype(value[6:])
    return value


def _first_int(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def parse_roles(ttgir: str, ptx: str, num_warps: int, names: Sequence[str]) -> list[Role]:
    """The warp groups of a warp-specialized kernel; none for a plain one.

    Requested registers stand in TTGIR; what is left for the default task is the ``setmaxnreg`` that PTX executes
    between the two barriers at which the groups part.
    """
    warps = [int(w) for w in re.findall(r"^\s*partition\d+\(.*?\) num_warps\((\d+)\)", ttgir, re.M)]
    if not warps:
        return []
    asked = re.search(r"requestedRegisters = array<i32: ([\d, ]+)>", ttgir)
    registers: list[int | None] = [int(r) for r in asked.group(1).split(",")] if asked else [None] * len(warps)
    left = re.search(r"barrier\.sync\s+1;\s*setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)
    groups = zip([num_warps, *warps], [int(left.group(1)) if left else None, *registers])
    labels = list(names) + ["default" if i == 0 else f"task {i}" for i in range(len(names), len(warps) + 1)]
    return [Role(label, w, r) for label, (w, r) in zip(labels, groups)]


# ------------------------------------------------------------------------------------------------------------ output


TABLE_HEAD = (
    "kernel", "sm", "SMEM", "TMEM", "threads", "regs x warps by role", "spill st/ld", "bars", "mma", "ld/st",
    "TMA l/s/r", "ex2", "verdict",
)  # fmt: skip


def table(reports: Sequence[Report]) -> str:
    """One line per variant and target: what fits, what spills, what counts."""
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
    """The quantities in which two reports differ, side by side."""
    a, b = dict(before.rows()), dict(after.rows())
    changed = [(k, a.get(k, "-"), b.get(k, "-")) for k in [*a, *(k for k in b if k not in a)] if a.get(k) != b.get(k)]
    lines = [("", before.key, after.key), *(changed or [("no difference", "", "")])]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(_worker())
