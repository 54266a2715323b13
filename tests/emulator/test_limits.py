"""Where emulator and compiler part, as the emulator's README says: what the compiler does there, and what the emulator does."""

import pytest
import triton

import jfa.emulator as emulator

from . import generated
from .test_generated import emulated
from .verdict import Kernel, compiled

emulator.install()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="these are limits beside fbtriton"),
]
HELPER = "@triton.jit\ndef lowest(m):\n    return tl.min(m, 0)\n\n"
TILE = (
    "t = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)",
    "tlx.local_store(t[0], tl.zeros((128, N), tl.float32))",
    "v = tlx.local_load(t[0])",
    "j = tl.arange(0, 128)",
)
REFUSED = {
    "a sum of row maxima": ("tl.store(o, tl.sum(tl.max(v, 1), 0))",),
    "with arithmetic between": ("m = tl.exp(tl.max(v, 1)) + tl.load(x + j)", "tl.store(o, tl.min(m, 0))"),
    "of column sums": ("tl.store(o, tl.max(tl.sum(v, 0), 0))",),
    "in a function": ("tl.store(o, lowest(tl.max(v, 1)))",),
    "of a flat tile": ("tl.store(o, tl.max(tl.reshape(v, (128 * N,)) + 1.0, 0))",),
    "in a branch": ("m = tl.max(v, 1)", "if n > 2:", "    tl.store(o, tl.sum(m, 0))"),
    "of a tile and what was loaded": ("w = v * tl.load(x + j[:, None] % 8 + i[None, :])", "tl.store(o, tl.min(tl.max(w, 1), 0))"),
}  # fmt: skip
COMPILED = {
    "all of it at once": ("tl.store(o, tl.max(v))",),
    "row maxima": ("tl.store(o + j, tl.max(v, 1))",),
    "a scan of row maxima": ("tl.store(o + j, tl.cumsum(tl.max(v, 1), 0))",),
    "a sort of row maxima": ("tl.store(o + j, tl.sort(tl.max(v, 1)))",),
    "all of the row maxima": ("tl.store(o, tl.sum(tl.max(v, 1)))",),
    "through shared memory": ("s = tlx.local_alloc((128,), tl.float32, 1)", "tlx.local_store(s[0], tl.max(v, 1))",
                              "tl.store(o, tl.min(tlx.local_load(s[0]), 0))"),
    "carried by a loop": ("m = tl.zeros((128,), tl.float32)", "for k in range(n):", "    m = tl.maximum(m, tl.max(v, 1))",
                          "tl.store(o, tl.min(m, 0))"),
}  # fmt: skip


def _kernel(lines):
    return HELPER + generated.HEAD + "".join(f"    {line}\n" for line in (*TILE, *lines))


@pytest.mark.slow
def test_one_dimensional_reductions_of_what_was_in_tensor_memory():
    texts = [_kernel(lines) for lines in (*REFUSED.values(), *COMPILED.values())]
    said = compiled(Kernel(text, generated.SIGNATURE, generated.CONSTANTS, arch=100, stage="ttgir") for text in texts)
    for name, refusal in zip(REFUSED, said):
        assert "parent layout must have at least rank >= 2" in refusal, name
    assert said[len(REFUSED) :] == [""] * len(COMPILED)
    for text in texts:
        assert emulated(text)[0] == ""


@pytest.mark.parametrize("storage", ["smem", "tmem", "registers"])
def test_a_storage_that_is_a_text_is_refused(storage):
    """The compiler takes it, for tensor memory."""
    lines = (
        f"t = tlx.local_alloc((128, N), tl.float32, 1, {storage!r})",
        "tlx.local_store(t[0], tl.zeros((128, N), tl.float32))",
    )
    text = generated.HEAD + "".join(f"    {line}\n" for line in lines)
    refusal = _refusal(text)
    assert f"storage must be a tlx.storage_kind, got '{storage}'" in refusal
    kernels = [Kernel(text, generated.SIGNATURE, generated.CONSTANTS, arch=a, stage="ttgir") for a in (100,)]
    assert compiled(kernels) == [""]


def _refusal(text):
    import torch

    from .verdict import load

    with pytest.raises(Exception) as error, emulator.options(arch=100):
        load(text)[(1,)](torch.zeros(4096), torch.zeros(4096), generated.RUN_TIME, N=generated.N)
    return str(error.value)


# ---------------------------------------------------------------- code that does not run

BAD = "tl.reshape(i, (8, 4))"
NOT_RUN = {
    "a branch": ("if n > 100:", f"    c = {BAD}"),
    "a branch that stores": ("if n > 100:", f"    tl.store(o + i, {BAD})"),
    "a loop": ("for k in range(0):", f"    tl.store(o + i, {BAD})"),
    "a loop that changes a type": ("c = i", "for k in range(0):", "    c = 2.5"),
    "a while loop": ("k = n", "while k > 100:", f"    tl.store(o + i, {BAD})", "    k -= 1"),
}
CHECKED = {
    "a name": ("if n > 100:", "    tl.store(o, nope)"),
    "a name in a loop": ("for k in range(0):", "    tl.store(o, nope)"),
    "a type in a branch": ("c = i", "if n > 100:", "    c = 2.5"),
}


def _plain(lines):
    return generated.HEAD + "".join(f"    {line}\n" for line in lines)


def _compiler_says(texts, arch=90):
    return compiled(Kernel(t, generated.SIGNATURE, generated.CONSTANTS, arch=arch, stage="ttir") for t in texts)


def test_code_that_does_not_run_is_not_checked_further():
    texts = [_plain(lines) for lines in (*NOT_RUN.values(), *CHECKED.values())]
    assert all(_compiler_says(texts))
    assert [bool(emulated(text)[0]) for text in texts] == [False] * len(NOT_RUN) + [True] * len(CHECKED)


# ---------------------------------------------------------------- threads

THREADS = {
    "a block": (("if t < 3:", "    tl.store(o + i, 1.0)"), [1, 1, 1, 0]),
    "no thread": (("if t > 500:", "    tl.store(o + i, 1.0)"), [0, 0, 0, 0]),
    "no thread, else": (("if t > 500:", "    tl.store(o + i, 1.0)", "else:", "    tl.store(o + i, 2.0)"), [2, 2, 2, 2]),
    "else is left out": (("if t < 3:", "    tl.store(o + i, 1.0)", "else:", "    tl.store(o + i, 2.0)"), [1, 1, 1, 0]),
    "a number is the first thread's": (("if t == 1:", "    tl.store(o, 1.0)"), [0, 0, 0, 0]),
    "a name changes for all": (("v = 1.0", "if t == 1:", "    v = 2.0", "tl.store(o + i, v)"), [2, 2, 2, 2]),
    "the first thread's elsewhere": (("tl.store(o + i, t + 1)",), [1, 1, 1, 1]),
    "a ballot": (("m = tlx.vote_ballot_sync(0xffffffff, t % 32 < 5)", "tl.store(o, m)"), [31, 0, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", THREADS)
def test_what_an_if_on_threads_does(name):
    lines, stored = THREADS[name]
    with pytest.warns(emulator.errors.EmulatorWarning, match="runs tiles, not threads"):
        refusal, out, _ = emulated(_plain(("t = tlx.thread_id(0)", *lines)), 90)
    assert refusal == "" and out[:4].tolist() == stored


# ---------------------------------------------------------------- swizzles, 8-bit integers


def test_a_reinterpreted_tile_is_in_logical_order():
    lines = (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(t[0], (i[:, None] * N + i[None, :]).to(tl.float32))",
        "v = tlx.local_load(tlx.local_reinterpret(t[0], tl.float32, [N // 2, 2 * N]))",
        "j = tl.arange(0, 2 * N)",
        "tl.store(o + j, tl.max(v, 0))",
    )
    refusal, out, _ = emulated(_plain(lines), 90)
    assert refusal == "" and out.tolist() == [generated.N * (generated.N - 2) + k for k in range(generated.N)]


@pytest.mark.parametrize("dtype, refused", [("int8", True), ("uint8", True), ("int16", False), ("int32", False)])
def test_8_bit_integers_in_tensor_memory(dtype, refused):
    alloc = f"t = tlx.local_alloc((128, N), tl.{dtype}, 1, tlx.storage_kind.tmem)"
    store = f"tlx.local_store(t[0], tl.zeros((128, N), tl.{dtype}))"
    texts = [_plain((alloc, store)), _plain((alloc,))]
    kernels = [Kernel(t, generated.SIGNATURE, generated.CONSTANTS, arch=100, stage="llir") for t in texts]
    assert [bool(said) for said in compiled(kernels)] == [refused, False]
    assert [bool(emulated(text, 100)[0]) for text in texts] == [refused, False]
