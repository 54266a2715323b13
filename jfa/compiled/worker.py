"""The process that compiles: it reads jobs from stdin and prints a ``REPORT {json}`` line per job. ``python -m
jfa.compiled.worker`` runs it.

Triton cannot compile where TRITON_INTERPRET is set, and a crash of the compiler must not take a notebook with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jfa import sass
from jfa.compiled.report import MARK, Report, Role
from jfa.compiled.shipping import decode, is_jit, plain_function, used_names

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


def main() -> int:
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
        require_tlx(kernel)
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
    look_at_roles(report, kernel, compiled.asm, job)
    return report


def look_at_roles(report: Report, kernel: Any, asm: dict[str, Any], job: dict[str, Any]) -> None:
    """Fill in the roles and what each of them spills; write PTX and SASS where the job asks for them."""
    function, folders = plain_function(kernel), job.get("folders", {})
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
    """Return the chain of causes, outermost first: Triton names the call in one error and the reason in the next."""
    lines = []
    while e is not None:
        lines.append(f"{type(e).__name__}: {e}".strip())
        e = e.__cause__ or e.__context__
    return "\n".join(lines)


class NeedsTlxError(RuntimeError):
    """The kernel is written in TLX, and the installed Triton has none."""


def require_tlx(kernel: Any) -> None:
    """Raise NeedsTlxError if the kernel, or a jit function that it calls, uses TLX where only the emulator's stand-in is."""
    from jfa.emulator.frontend.standin import NAME, TlxStandIn

    if not isinstance(sys.modules.get(NAME), TlxStandIn):
        return
    import triton

    seen, todo = set(), [plain_function(kernel)]
    while todo:
        fn = todo.pop()
        seen.add(fn)
        for value in used_names(fn).values():
            if isinstance(value, TlxStandIn) or (getattr(value, "__module__", None) or "").startswith(
                "jfa.emulator.tlx"
            ):
                raise NeedsTlxError(
                    f"`{fn.__name__}` uses TLX, which Triton {triton.__version__} does not have: install fbtriton in its place "
                    "(`jfa doctor` prints the command). The emulator runs the kernel here all the same"
                )
            if is_jit(value) and plain_function(value) not in seen:
                todo.append(plain_function(value))


def _triton_compile(kernel: Any, job: dict[str, Any]):
    """Return (compiled kernel, ptxas's log) of one job."""
    import contextlib
    import io

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    defaults = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
    constexprs = defaults | {k: decode(v) for k, v in job["constexprs"].items()}
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


def _first_int(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def parse_roles(ttgir: str, ptx: str, num_warps: int, names: Sequence[str]) -> list[Role]:
    """Return the warp groups of a warp-specialized kernel; none for a plain one.

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


if __name__ == "__main__":
    sys.exit(main())
