"""Which TLX kernels fbtriton's compiler takes for sm_100, and that the emulator takes and refuses the same ones."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

import jfa.emulator as emulator

from . import verdicts

emulator.install()
pytestmark = pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="compiling TLX needs fbtriton")


@cache
def compiled():
    """{kernel: "" or the compiler's exception}, from a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    result = subprocess.run(
        [sys.executable, str(Path(verdicts.__file__))], env=environment, capture_output=True, text=True, timeout=300
    )
    found = {}
    for line in result.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    assert found.keys() == verdicts.VERDICTS.keys(), result.stderr[-2000:]
    return found


@pytest.mark.parametrize("name", verdicts.VERDICTS)
def test_emulator_and_compiler_agree(name):
    refusal = None
    try:
        verdicts.load(name).kernel[(1,)](torch.randn(64), torch.zeros(128), 3, N=32)
    except Exception as error:
        refusal = error
    assert (refusal is not None) == bool(compiled()[name]), (
        f"compiler: {compiled()[name] or 'compiles'}; emulator: {refusal}"
    )


REFUSALS = {
    "block reassigned in a task": r"should not capture RankedTensorType \(`v`\)",
    "block in a tuple": r"should not capture RankedTensorType \(`t`\)",
    "tensor memory loaded by 1 warps": r"loads tensor memory t\[0\] with 1 warp; it takes four\n.*num_warps=4",
    "tensor memory stored by 2 warps": r"stores to tensor memory t\[0\] with 2 warps; it takes four",
    "array of one buffer stored to": r"a is an array of 1 buffer: index it first, a\[0\]",
    "product of bf16 into bf16": "a product of bf16 operands accumulates in fp32, the accumulator is bf16",
    "product of fp32, B as [K, N]": r"fp32 operands lie K-major in shared memory, b\[0\] does not: keep B as \[N, K\]",
    "array of two barriers": "is an array of 2 barriers: index it first",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_the_refusal_says_why(name):
    with pytest.raises(Exception, match=f"(?s){REFUSALS[name]}"):
        verdicts.load(name).kernel[(1,)](torch.randn(64), torch.zeros(128), 3, N=32)


@triton.jit
def _refused(out, n, KIND: tl.constexpr):
    rows: tl.constexpr = 256 if KIND == "rows" else 128
    scores = tlx.local_alloc((rows, 64), tl.float32, 1, tlx.storage_kind.tmem)
    scales = tlx.local_alloc((128, 4), tl.uint8, 1, tlx.storage_kind.tmem)
    bars = tlx.alloc_barriers(1)
    if KIND == "trans":
        tlx.local_load(tlx.local_trans(scores[0]))
    elif KIND == "scales":
        tlx.local_load(scales[0])
    elif KIND == "columns":
        tlx.local_load(tlx.subslice(scores[0], 16, 32))
    elif KIND == "phase":
        tlx.barrier_wait(bars[0], n.to(tl.int64))


@pytest.mark.parametrize(
    "kind, fix",
    [
        ("rows", "cut the tile along its rows"),
        ("trans", "transpose in registers"),
        ("scales", "keep the scales in shared memory"),
        ("columns", "slice at multiples of the width"),
        ("phase", "add .to"),
    ],
)
def test_a_refusal_says_how_to_mend_it(kind, fix):
    with pytest.raises(triton.CompilationError, match=f"Fix: {fix}") as caught:
        _refused[(1,)](torch.zeros(1), 3, kind)
    assert "test_compiler_verdicts.py" in str(caught.value)
