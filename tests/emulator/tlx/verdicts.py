"""TLX kernels that the compiler takes or refuses, as source text: the emulator must decide alike.

Each entry: name -> source of `kernel(x, o, n, N: tl.constexpr)`, with two float32 pointers, an int and N = 32. Run as a script,
this file compiles each for sm_100 and prints a line {name: "" or the error's kind}.
"""

import json
import linecache
import types

HEAD = "@triton.jit\ndef kernel(x, o, n, N: tl.constexpr):\n"
BLOCK = "    v = tl.load(x + tl.arange(0, N))\n"
USE = "tl.store(o, tl.sum(v, 0))"


def lines(*code, indent=1):
    return "".join(f"{'    ' * indent}{line}\n" for line in code)


def captured(*task, before=(), default=("tl.store(o + n, 1.0)",), kind="num_warps=4"):
    """A kernel whose block v is made before a default task and one other task."""
    tasks = (
        lines("with tlx.async_tasks():")
        + lines("with tlx.async_task('default'):", indent=2)
        + lines(*default, indent=3)
    )
    return (
        HEAD
        + BLOCK
        + lines(*before)
        + tasks
        + lines(f"with tlx.async_task({kind}):", indent=2)
        + lines(*task, indent=3)
    )


def tensor_memory(access, warps):
    """A default task fills tensor memory; a task of so many warps then accesses it."""
    alloc = lines("t = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)", "full = tlx.alloc_barriers(1)")
    fill = ("tlx.local_store(t[0], tl.zeros((128, N), tl.float32) + 1.0)", "tlx.barrier_arrive(full[0], 1)")
    tasks = (
        lines("with tlx.async_tasks():") + lines("with tlx.async_task('default'):", indent=2) + lines(*fill, indent=3)
    )
    code = ("tlx.barrier_wait(full[0], 0)", *access)
    return HEAD + alloc + tasks + lines(f"with tlx.async_task(num_warps={warps}):", indent=2) + lines(*code, indent=3)


def plain(*code):
    return HEAD + lines(*code)


def product(dtype="tl.bfloat16", acc="tl.float32", a=(128, 64), b=(64, 128), trans_a=False, trans_b=False):
    """One product on the tensor core of a B200; shapes are those of the buffers, before a transposed view."""
    take = {False: "{}[0]", True: "tlx.local_trans({}[0])"}
    return HEAD + lines(
        f"a = tlx.local_alloc({a}, {dtype}, 1)", f"b = tlx.local_alloc({b}, {dtype}, 1)",
        f"tlx.local_store(a[0], tl.zeros({a}, {dtype}))", f"tlx.local_store(b[0], tl.zeros({b}, {dtype}))",
        "tlx.fence('async_shared')",
        f"acc = tlx.local_alloc((128, 128), {acc}, 1, tlx.storage_kind.tmem)", "done = tlx.alloc_barriers(1)",
        f"tlx.async_dot({take[trans_a].format('a')}, {take[trans_b].format('b')}, acc[0], use_acc=False, mBarriers=[done[0]])",
        "tlx.barrier_wait(done[0], 0)",
    )  # fmt: skip


LOAD = ("w = tlx.local_load(t[0])", "tl.store(o + tl.arange(0, 128), tl.sum(w, 1))")
STORE = ("tlx.local_store(t[0], tl.zeros((128, N), tl.float32))",)
TILE, TMEM = (
    "a = tlx.local_alloc((N, N), tl.float32, 1)",
    "a = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)",
)
ZEROS, TALL = "tl.zeros((N, N), tl.float32)", "tl.zeros((128, N), tl.float32)"

VERDICTS = {
    "block read in a task": captured(USE),
    "block reassigned in a task": captured("v = v + 1", USE),
    "block carried by a task's loop": captured("for k in range(n):", "    v = v * 2", USE),
    "block's name assigned before it is read": captured("v = tl.zeros((64,), tl.float32) + n", USE),
    "block in a tuple": captured("tl.store(o, tl.sum(t[0], 0))", before=["t = (v, n)"]),
    "block read by replicas": captured(USE, kind="num_warps=4, replicate=2"),
    "block of pointers": captured("tl.store(p, 1.0)", before=["p = o + tl.arange(0, N)"]),
    "block read by the default task": captured("tl.store(o + n, 1.0)", default=[USE]),
    "block reassigned by the default task": captured("tl.store(o + n, 1.0)", default=["v = v + 1", USE]),
    "scalar read in a task": captured("tl.store(o, s)", before=["s = tl.sum(v, 0)"]),
    "scalar reassigned in a task": captured("s = s + 1", "tl.store(o, s)", before=["s = tl.sum(v, 0)"]),
    "scalars in a tuple": captured("tl.store(o, t[0])", before=["t = (tl.sum(v, 0), n)"]),
    "the same arange outside and in a task": captured("tl.store(o + tl.arange(0, N), 1.0)"),
    **{f"tensor memory loaded by {w} warps": tensor_memory(LOAD, w) for w in (1, 2, 4, 8)},
    **{f"tensor memory stored by {w} warps": tensor_memory(STORE, w) for w in (1, 2, 4)},
    "product of bf16 into fp32": product(),
    "product of bf16 into bf16": product(acc="tl.bfloat16"),
    "product of fp16 into fp16": product("tl.float16", acc="tl.float16"),
    "product of fp16 into fp32": product("tl.float16"),
    "product of bf16, both transposed": product(a=(64, 128), b=(128, 64), trans_a=True, trans_b=True),
    "product of fp32, B as [K, N]": product("tl.float32"),
    "product of fp32, B as [N, K] transposed": product("tl.float32", b=(128, 64), trans_b=True),
    "product of fp32, both transposed": product("tl.float32", a=(64, 128), b=(128, 64), trans_a=True, trans_b=True),
    "product of fp8, B as [K, N]": product("tl.float8e5"),
    "array of one buffer stored to": plain(TILE, f"tlx.local_store(a, {ZEROS})"),
    "array of one buffer loaded": plain(
        TILE, f"tlx.local_store(a[0], {ZEROS})", "tlx.local_store(a[0], tlx.local_load(a))"
    ),
    "array of one buffer in tensor memory": plain(TMEM, f"tlx.local_store(a, {TALL})"),
    "its only buffer stored to": plain(TILE, f"tlx.local_store(a[0], {ZEROS})"),
    "array of one barrier": plain("b = tlx.alloc_barriers(1)", "tlx.barrier_arrive(b, 1)", "tlx.barrier_wait(b, 0)"),
    "array of two barriers": plain("b = tlx.alloc_barriers(2)", "tlx.barrier_arrive(b, 1)"),
}


def load(name):
    """The module of one kernel, as a notebook would define it."""
    import triton
    import triton.language as tl
    import triton.language.extra.tlx as tlx

    file, source = f"verdict-{name}", VERDICTS[name]
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    module = types.ModuleType("verdict")
    module.__dict__.update(triton=triton, tl=tl, tlx=tlx)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def compile_one(name):
    """An empty text where the kernel compiles for sm_100, else the exception's class."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        source = ASTSource(load(name).kernel, {"x": "*fp32", "o": "*fp32", "n": "i32", "N": "constexpr"}, {"N": 32})
        triton.compile(source, target=GPUTarget("cuda", 100, 32))
    except Exception as error:
        return type(error).__name__
    return ""


if __name__ == "__main__":
    for name in VERDICTS:
        print(json.dumps({name: compile_one(name)}), flush=True)
