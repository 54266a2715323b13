"""Compile kernels for Hopper and Blackwell without a GPU, and report the resources that they need.

``compile_kernel(kernel, signature, constexprs, arch=100)`` returns a :class:`Report` that displays as a table in a notebook;
`jfa compile` (:mod:`jfa.workbench.compile`) is the command. Compiling happens in a child process: Triton cannot compile where
TRITON_INTERPRET is set, and a crash of the compiler must not take a notebook with it. Nothing here needs or touches a GPU.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jfa.compiled.report import MARK, SMEM_CAP, TMEM_CAP, Report, Role, diff, table
from jfa.compiled.shipping import encode, plain_function, ship_source
from jfa.kernels.compile_config import CompileConfig

__all__ = [
    "SMEM_CAP", "TMEM_CAP", "Report", "Role", "compile_configs", "compile_kernel", "diff", "select", "ship_source",
    "shipped_configs", "table",
]  # fmt: skip

# ---------------------------------------------------------------------------------------------------- configurations


def shipped_configs() -> list[CompileConfig]:
    """Return every configuration of every kernel module, in the order of their names.

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
    """Return the configurations whose name matches any of the shell patterns; all, without patterns.

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
        name=name or plain_function(kernel).__name__,
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
        return _run_worker([_job(f"{path}:{plain_function(kernel).__name__}", config, arch)])[0]


def _job(kernel: str, config: CompileConfig, arch: int) -> dict[str, Any]:
    constexprs = {name: encode(value) for name, value in config.constexprs.items()}
    data = dataclasses.asdict(dataclasses.replace(config, constexprs=constexprs))
    data.update(kernel=kernel, arch=arch, max_spill_bytes=None)
    return data


def _run_worker(jobs: list[dict[str, Any]]) -> list[Report]:
    """Return reports of the jobs, from a child that has no interpreter switched on. A job that kills the child is named."""
    if not jobs:
        return []
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path])
    env["PYTHONSAFEPATH"] = "1"  # this package, not another jfa that lies in the current folder
    env.setdefault("TRITON_CACHE_DIR", str(_state_folder() / "triton"))
    env["TRITON_ALWAYS_COMPILE"] = "1"  # a cached kernel would come without ptxas's log
    command = [sys.executable, "-m", "jfa.compiled.worker"]
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
    """Return where generated files go: the course's ignored state folder, never the home directory."""
    return Path(os.environ.get("JFA_STATE", Path.cwd() / ".jfa"))
