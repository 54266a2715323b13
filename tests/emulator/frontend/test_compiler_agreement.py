"""What the compiler refuses, the emulator refuses, with the same kind of error; what it takes, the emulator runs.

The verdicts come from compiling every construct for sm_90 in a process of its own (no GPU is needed for that).
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
from triton.compiler.errors import CompilationError

import jfa.emulator as emulator

from . import constructs

emulator.install()

# The compiler fails on these before it comes to its own error (it hashes the function, or asserts): refused either way.
OTHER_KIND = {"python function", "multiple targets"}


@cache
def verdicts():
    """{construct: "" or the compiler's exception}, from a process without TRITON_INTERPRET."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    script = Path(constructs.__file__)
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    found = {}
    for line in result.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    assert found.keys() == constructs.CONSTRUCTS.keys(), result.stderr[-2000:]
    return found


@pytest.mark.parametrize("name", constructs.CONSTRUCTS)
def test_emulator_and_compiler_agree(name):
    compiler = verdicts()[name]
    try:
        with emulator.options(max_steps=500):
            constructs.load(name).kernel[(1,)](torch.randn(64), torch.empty(64), 10, N=64)
        emulated = None
    except Exception as error:
        emulated = error
    if not compiler:
        assert emulated is None, emulated
    else:
        assert emulated is not None, f"the compiler raises {compiler}"
        if name not in OTHER_KIND:
            assert isinstance(emulated, CompilationError), emulated
            assert "in kernel:" in str(emulated) or "in helper:" in str(emulated)


def test_the_same_kernel_compiles_in_this_process_too():
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles nothing where TRITON_INTERPRET is set")
    assert constructs.compile_all(["plain"]) == {"plain": ""}
