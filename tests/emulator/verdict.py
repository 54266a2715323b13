"""The compiler's verdict on many small kernels, and the emulator's.

`compiled` compiles in a process of its own, forked again for each batch: it imports Triton once, and a kernel on which the
compiler aborts costs that kernel only. Up to `stage` (ttir, ttgir, llir, ptx, cubin): most refusals are found in ttir, in
milliseconds; what the tensor core or tensor memory cannot do, in ttgir and llir.
"""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

STAGES = ("source", "ttir", "ttgir", "llir", "ptx", "cubin")


@dataclass
class Kernel:
    """Source text that defines `kernel` (and its helpers), and how to compile it."""

    text: str
    signature: dict[str, str]
    constexprs: dict[str, object] = field(default_factory=dict)
    arch: int = 90
    options: dict[str, object] = field(default_factory=dict)
    stage: str = "ttgir"


def load(text: str, name: str = "kernel"):
    """The jit function called `name` out of source text, as a notebook would define it."""
    import triton
    import triton.language as tl

    try:
        import triton.language.extra.tlx as tlx
    except ImportError:  # Triton without TLX
        tlx = None
    file = f"verdict-{hash(text):x}"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    module = types.ModuleType("verdict")
    module.__dict__.update(triton=triton, tl=tl, tlx=tlx)
    exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
    return getattr(module, name)


def compiled(kernels: Iterable[Kernel], timeout: float = 900) -> list[str]:
    """For each kernel "" where it compiles, else what the compiler said."""
    kernels = list(kernels)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "asked"), Path(folder, "answered")
        asked.write_text(json.dumps([asdict(k) for k in kernels]))
        command = [sys.executable, __file__, str(asked), str(answered)]
        subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": folder}, check=True, timeout=timeout, cwd=folder)
        verdicts = [json.loads(line) for line in answered.read_text().splitlines()]
    assert len(verdicts) == len(kernels)
    return verdicts


# ---------------------------------------------------------------- the child


class _Driver:
    """What the compiler asks a GPU's driver: which GPU it compiles for (TLX does, to refuse what AMD has not)."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target


def _compile(kernel: Kernel) -> None:
    """Compile up to the kernel's stage; raises what the compiler raises."""
    import torch  # noqa: F401  (the driver's helpers look for it)
    from triton import runtime
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    function = load(kernel.text)
    signature = {name: kernel.signature.get(name, "constexpr") for name in function.arg_names}
    target = GPUTarget("cuda", kernel.arch, 32)
    runtime.driver.set_active(_Driver(target))
    backend = make_backend(target)
    source = ASTSource(function, signature, kernel.constexprs)
    options = backend.parse_options(kernel.options | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    stages, metadata = {}, {"target": target, "hash": "", **options.__dict__}
    backend.add_stages(stages, options, source.language)
    for stage in STAGES[1 : STAGES.index(kernel.stage) + 1]:
        module = stages[stage](module, metadata)


def _verdict(kernel: Kernel) -> str:
    try:
        _compile(kernel)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        cause = f" <- {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ is not None else ""
        return f"{type(error).__name__}: {' | '.join(lines[-3:])}{cause}"
    return ""


def _work(kernels, answered: Path) -> None:
    """Answer what is not answered yet, line by line, in a child of its own."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    with answered.open("a") as out:
        for kernel in kernels:
            out.write(json.dumps(_verdict(kernel)) + "\n")
            out.flush()


def main(asked: str, answered: str) -> None:
    import triton.language.extra.tlx  # noqa: F401  (once, before the forks)

    kernels, out = [Kernel(**k) for k in json.loads(Path(asked).read_text())], Path(answered)
    out.touch()
    while (done := len(out.read_text().splitlines())) < len(kernels):
        child = os.fork()
        if not child:
            _work(kernels[done:], out)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            with out.open("a") as file:
                file.write(json.dumps(f"the compiler ends with {os.waitstatus_to_exitcode(status)}") + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
