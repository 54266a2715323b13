"""Control flow, functions, closures, tuples, aggregates, launches: a kernel as Python sees it and as Triton means it."""

import collections
import gc
import linecache
import types
import warnings

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

import jfa.emulator as emulator

emulator.install()
OFFSET = tl.constexpr(3)
PLAIN = 5


@triton.jit
def collatz(x, steps):
    """A while loop with a branch on a run-time value."""
    v = tl.load(x + tl.program_id(0))
    count = 0
    while v != 1:
        if v % 2 == 0:
            v = v // 2
        else:
            v = 3 * v + 1
        count += 1
    tl.store(steps + tl.program_id(0), count)


def test_while_and_if():
    x, steps = torch.arange(1, 20, dtype=torch.int32), torch.zeros(19, dtype=torch.int32)

    def length(v):
        n = 0
        while v != 1:
            v, n = v // 2 if v % 2 == 0 else 3 * v + 1, n + 1
        return n

    collatz[(19,)](x, steps)
    assert steps.tolist() == [length(v) for v in x.tolist()]


@triton.jit
def early(x, o, n):
    i = tl.program_id(0)
    if i >= n:
        return
    tl.store(o + i, tl.load(x + i))


def test_early_return_of_a_kernel():
    x, out = torch.randn(4), torch.zeros(4)
    early[(10,)](x, out, 3)
    assert torch.equal(out[:3], x[:3]) and out[3] == 0


@triton.jit
def absolute(v):
    if v < 0:
        return -v
    return v


@triton.jit
def pair(v, FACTOR: tl.constexpr = 2):
    return v * FACTOR, v + OFFSET


@triton.jit
def calls(x, o, N: tl.constexpr):
    for i in range(N):
        v = tl.load(x + i)
        doubled, moved = pair(absolute(v))
        tl.store(o + i, doubled + moved)
        tripled, _ = pair(v, FACTOR=3)
        tl.store(o + N + i, tripled)


def test_functions_return_early_and_several_values():
    x, out = torch.randn(8), torch.empty(16)
    calls[(1,)](x, out, 8)
    torch.testing.assert_close(out, torch.cat([3 * x.abs() + 3, 3 * x]))


@triton.jit
def loops(o, n, step: tl.constexpr):
    total = 0
    for i in range(n, 0, -1):
        total += i
    for i in tl.range(0, n, step, num_stages=2):
        total += i
    for i in tl.static_range(1, 4):
        for j in tl.static_range(2):
            total += i * j
    tl.store(o, total)


def test_ranges():
    out = torch.zeros(1, dtype=torch.int32)
    loops[(1,)](out, 10, 3)
    assert out.item() == sum(range(1, 11)) + sum(range(0, 10, 3)) + 6


@triton.jit
def reused_name(o, n):
    """`acc` ends each outer iteration with another type, but the compiler does not carry it: it starts anew inside."""
    k = 0
    while k < n:
        acc = 0
        for i in range(n):
            acc += i
        acc = acc * 0.5
        tl.store(o + k, acc)
        k += 1


def test_a_name_that_starts_anew_in_each_iteration_is_not_carried():
    out = torch.zeros(3)
    reused_name[(1,)](out, 3)
    assert out.tolist() == [1.5] * 3


@triton.jit
def logic(o, a, b, FLAG: tl.constexpr, NOTHING: tl.constexpr):
    r = 0
    if a > 0 and b > 0:
        r += 1
    if a > 0 or b > 0:
        r += 10
    if not (a > b):
        r += 100
    if FLAG and a > 1:
        r += 1000
    if NOTHING is None:
        r += 10000
    if NOTHING is not None and NOTHING > 3:
        r += 100000
    r += 5 if a > 3 else 7
    tl.store(o, r)


@pytest.mark.parametrize("a,b", [(2, 3), (-2, 3), (5, -1), (-1, -1)])
def test_boolean_operators(a, b):
    out = torch.zeros(1, dtype=torch.int32)
    logic[(1,)](out, a, b, True, None)
    expected = (a > 0 and b > 0) + 10 * (a > 0 or b > 0) + 100 * (a <= b) + 1000 * (a > 1) + 10000 + (5 if a > 3 else 7)
    assert out.item() == expected


Pointers = collections.namedtuple("Pointers", ["source", "target"])


@triton.jit
def with_tuples(pointers, sizes, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(pointers.target + i, tl.load(pointers.source + i) * sizes[0] + sizes[1])
    t = (sizes[1], sizes[0])
    a, b = t
    tl.store(o, a * 10 + b)
    tl.store(o + 1, len(t))


def test_tuple_and_namedtuple_arguments():
    x, y, out = torch.randn(16), torch.empty(16), torch.zeros(2, dtype=torch.int32)
    with_tuples[(1,)](Pointers(x, y), (3, 4), out, 16)
    torch.testing.assert_close(y, x * 3 + 4)
    assert out.tolist() == [43, 2]


@triton.constexpr_function
def next_power(n):
    return 1 << (n - 1).bit_length()


@triton.jit
def compile_time(o, N: tl.constexpr, DTYPE: tl.constexpr):
    P: tl.constexpr = next_power(N)
    WIDTH: tl.constexpr = DTYPE.primitive_bitwidth
    tl.static_assert(P >= N, "P must hold N")
    tl.static_print("P", P)
    v = tl.full((P,), 1, DTYPE)
    tl.static_assert(v.shape[0] == P and v.dtype == DTYPE)
    tl.store(o, tl.sum(v, 0) + WIDTH)
    tl.store(o + 1, N.value if N is None else P)


def test_constexpr_functions_and_values(capsys):
    out = torch.zeros(2)
    compile_time[(1,)](out, 50, tl.float32)
    assert out.tolist() == [96.0, 64.0]
    assert capsys.readouterr().out == "P 64\n"


def make_kernel(helper, scale):
    SCALE = tl.constexpr(scale)

    @triton.jit
    def kernel(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, helper(tl.load(x + i)) * SCALE)

    return kernel


@triton.jit
def negated(v):
    return -v


@triton.jit
def squared(v):
    return v * v


def test_closures_over_jit_functions_and_constants():
    x, out = torch.randn(16), torch.empty(16)
    first, second = make_kernel(negated, 2), make_kernel(squared, 3)
    first[(1,)](x, out, 16)
    assert torch.equal(out, -x * 2)
    second[(1,)](x, out, 16)
    assert torch.equal(out, x * x * 3)


@triton.jit
def takes_function(x, o, FN: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, FN(tl.load(x + i)))


def test_a_jit_function_as_argument():
    x, out = torch.randn(16), torch.empty(16)
    takes_function[(1,)](x, out, squared, 16)
    assert torch.equal(out, x * x)


def cell(source, name="cell-1"):
    """What a notebook does: the text of a cell registered with linecache, then executed."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = types.ModuleType("notebook")
    module.__dict__.update(triton=triton, tl=tl)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


NOTEBOOK = """
@triton.jit
def helper(v):
    return v + 1

@triton.jit
def kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, helper(tl.load(x + i)))
"""


def test_kernels_of_notebook_cells_and_edited_helpers():
    x, out = torch.randn(16), torch.empty(16)
    module = cell(NOTEBOOK)
    module.kernel[(1,)](x, out, 16)
    assert torch.equal(out, x + 1)
    edited = cell(NOTEBOOK.replace("v + 1", "v + 2"), "cell-2")
    module.helper = edited.helper  # a re-run cell rebinds the name that the kernel reads
    module.kernel[(1,)](x, out, 16)
    assert torch.equal(out, x + 2)


def test_callable_grid_keyword_arguments_and_hooks():
    seen = []

    @triton.jit
    def fill(o, n, BLOCK: tl.constexpr = 32):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(o + i, i, i < n)

    out = torch.empty(100, dtype=torch.int32)
    fill.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs["n"]))
    fill[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](o=out, n=100, num_warps=2)
    assert torch.equal(out, torch.arange(100, dtype=torch.int32)) and seen == [100]


def test_an_unknown_keyword_is_refused():
    with pytest.raises(KeyError, match="BLOK"):
        calls[(1,)](torch.empty(1), torch.empty(1), 1, BLOK=3)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32}, num_warps=8)],
    key=["n"],
    prune_configs_by={
        "early_config_prune": lambda configs, args, **kw: [c for c in configs if c.kwargs["BLOCK"] == 32]
    },
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(o, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + i, BLOCK + EVEN, i < n)


def test_autotune_takes_the_first_pruned_config_and_heuristics_run():
    out = torch.zeros(64, dtype=torch.int32)
    tuned[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](out, 64)
    assert (out == 33).all()


def test_printing(capsys):
    @triton.jit
    def talk(x):
        tl.device_print("value", tl.load(x))
        print("twice", tl.load(x) * 2)

    talk[(1,)](torch.tensor([1.5]))
    assert capsys.readouterr().out == "pid (0, 0, 0) value 1.5\npid (0, 0, 0) twice 3.0\n"


def test_device_assert():
    @triton.jit
    def checked(x):
        tl.device_assert(tl.load(x) > 0, "x must be positive")

    checked[(1,)](torch.tensor([1.0]))
    with pytest.raises(emulator.EmulatorError, match="x must be positive"):
        checked[(1,)](torch.tensor([-1.0]))


def test_static_assert_is_a_compile_error():
    @triton.jit
    def checked(N: tl.constexpr):
        tl.static_assert(N > 3, "N too small")

    with pytest.raises(CompilationError, match="N too small"):
        checked[(1,)](2)


def test_globals_must_be_constexpr():
    @triton.jit
    def reads(o):
        tl.store(o, PLAIN)

    with pytest.raises(CompilationError, match="Cannot access global variable PLAIN"):
        reads[(1,)](torch.empty(1))


def test_int_arguments_keep_their_width():
    @triton.jit
    def widths(o, small, large, annotated: tl.int64):
        tl.store(o, small.dtype.primitive_bitwidth)
        tl.store(o + 1, large.dtype.primitive_bitwidth)
        tl.store(o + 2, annotated.dtype.primitive_bitwidth)

    out = torch.zeros(3, dtype=torch.int32)
    widths[(1,)](out, 7, 2**40, 7)
    assert out.tolist() == [32, 64, 64]


if hasattr(tl.core, "_aggregate"):

    @tl.core._aggregate
    class Window:
        lo: tl.tensor
        size: tl.constexpr

        @triton.constexpr_function
        def __init__(self, lo, size):
            self.lo = lo
            self.size = tl.constexpr(size)

        @triton.jit
        def offsets(self):
            return self.lo + tl.arange(0, self.size)

    @triton.jit
    def windowed(o, lo):
        window = Window(lo, 8)
        tl.store(o + window.offsets(), window.size)

    def test_aggregates():
        out = torch.zeros(16, dtype=torch.int32)
        windowed[(1,)](out, 4)
        assert out.tolist() == [0] * 4 + [8] * 8 + [0] * 4


def test_ten_thousand_small_loops_agree_with_python():
    @triton.jit
    def mix(o, n):
        a = 12345
        for i in range(n):
            a = (a * 1103515245 + i) & 0x7FFFFFFF
        tl.store(o, a)

    out = torch.zeros(1, dtype=torch.int32)
    mix[(1,)](out, 10000)
    a = 12345
    for i in range(10000):
        a = ((a * 1103515245 + i + 2**31) % 2**32 - 2**31) & 0x7FFFFFFF
    assert out.item() == a


def test_an_interrupted_launch_leaves_the_next_one_sound():
    @triton.jit
    def endless(x):
        while tl.load(x) == 0:
            pass

    with pytest.raises(emulator.EmulatorError), emulator.options(max_steps=200):
        endless[(1,)](torch.zeros(1))
    out = torch.empty(16)
    takes_function[(1,)](torch.ones(16), out, negated, 16)
    assert (out == -1).all()


@pytest.mark.skipif(
    bool(triton.knobs.runtime.interpret), reason="Triton compiles nothing where TRITON_INTERPRET is set"
)
def test_a_launch_returns_a_kernel_that_compiles_when_looked_at():
    kernel = takes_function[(1,)](torch.ones(16), torch.empty(16), negated, 16, num_warps=2)
    assert "tt.store" in kernel.asm["ttir"] and kernel.metadata.num_warps == 2
    assert kernel.run.stats["ctas"] == 1


def test_num_ctas_of_a_plain_kernel_changes_nothing():
    x, out = torch.randn(16), torch.empty(16)
    takes_function[(1,)](x, out, negated, 16, num_ctas=2)
    assert torch.equal(out, -x)
    with pytest.raises(AssertionError, match="power of 2"):
        takes_function[(1,)](x, out, negated, 16, num_warps=3)


@triton.jit
def faulty_helper(v):
    if v > 0:
        return v
    return -v


@triton.jit
def calls_faulty_helper(x, o):
    tl.store(o, faulty_helper(tl.load(x + tl.arange(0, 4))))


def test_an_error_in_a_helper_tells_who_called_it():
    with pytest.raises(CompilationError, match=r"in faulty_helper \(called at test_language.py:\d+\)"):
        calls_faulty_helper[(1,)](torch.zeros(4), torch.zeros(4))


def test_launches_leave_nothing_behind():
    x, out = torch.ones(16), torch.empty(16)

    def objects_after(launches):
        for _ in range(launches):
            takes_function[(3,)](x, out, negated, 16)
        gc.collect()
        return len(gc.get_objects())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three programs write the same values
        before = objects_after(50)
        assert objects_after(300) - before < 100


@pytest.mark.skipif(
    bool(triton.knobs.runtime.interpret), reason="Triton compiles nothing where TRITON_INTERPRET is set"
)
def test_warmup_compiles_and_runs_nothing():
    out = torch.zeros(16)
    kernel = takes_function.warmup(torch.ones(16), out, negated, 16, grid=(1,))
    assert "tt.store" in kernel.asm["ttir"] and (out == 0).all()
