"""Strategies that make small Triton and TLX kernels as source text, many of them wrong, for compiler and emulator to judge.

`triton_kernels` gives (text, reference): the reference computes in torch what the kernel stores, for those that run.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

N = 64
HEAD = "@triton.jit\ndef kernel(x, o, n, N: tl.constexpr):\n    i = tl.arange(0, N)\n"
SIGNATURE, CONSTANTS, RUN_TIME = {"x": "*fp32", "o": "*fp32", "n": "i32"}, {"N": N}, 3


def _lines(*code: str) -> str:
    return "".join(f"    {line}\n" for line in code)


# ---------------------------------------------------------------- Triton: values and control flow

# (source with a and b for two blocks, the same in torch): fp32 blocks of N, deterministic to the last bit or nearly so.
BINARY = [
    ("a + b", lambda a, b: a + b),
    ("a - b", lambda a, b: a - b),
    ("a * b", lambda a, b: a * b),
    ("tl.maximum(a, b)", torch.maximum),
    ("tl.minimum(a, b)", torch.minimum),
    ("tl.where(a > b, a, b * 0.5)", lambda a, b: torch.where(a > b, a, b * 0.5)),
    ("tl.where(a > b, a, 1.0)", lambda a, b: torch.where(a > b, a, torch.ones(()))),
]
UNARY = [
    ("-a", lambda a: -a),
    ("tl.abs(a)", torch.abs),
    ("tl.cumsum(a, 0)", lambda a: a.cumsum(0)),
    ("a - tl.max(a, 0)", lambda a: a - a.max()),
    ("a + tl.sum(a, 0)", lambda a: a + a.sum()),
    ("tl.reshape(tl.trans(tl.reshape(a, (8, 8))), (N,))", lambda a: a.reshape(8, 8).T.reshape(-1)),
    ("a.to(tl.bfloat16).to(tl.float32)", lambda a: a.bfloat16().float()),
    ("tl.floor(a).to(tl.int32).to(tl.float32)", torch.floor),
    ("a + n", lambda a: a + RUN_TIME),
    ("a * (i % 4)", lambda a: a * (torch.arange(N) % 4)),
]
# Each of these the compiler takes or refuses by itself; what they compute is not stored.
ODD = [
    "c: tl.constexpr = n", "c: tl.constexpr = N // 2", "c: tl.constexpr = i * 2", "c = i + c", "c = c + 1", "c = n > 2 and n < 9",
    "c = i if n > 1 else 0", "c = 1 if n > 1 else 2", "c = 1 if n > 1 else 2.5", "c = None if n > 1 else 1", "c = i[None, :]",
    "c = i[:, None] + i[None, :]", "c = tl.zeros((n,), tl.float32)", "c = tl.zeros((N, 3), tl.float32)", "c = tl.arange(0, c)",
    "c = tl.reshape(i, (8, 8))", "c = tl.reshape(i, (8, 4))", "c = i & 1.0", "c = i // 2", "c = i.to(tl.float32) // 2",
    "c = tl.sum(i, 1)", "c = tl.sum(i, 0)", "c = (i, n)", "c = c[0]", "c = tl.dot(i, i)", "c = not n", "c = -n", "c = ~i",
    "c = tl.load(x + i, mask=i < n)", "c = tl.load(x + i, other=0.0)", "c = tl.load(i)", "c = x[0]", "c = tl.where(i, i, 0)",
    "c = min(n, 4)", "c = i ** 2", "c = n << 1", "c = 'a'", "c = tl.broadcast_to(i, (N, N))", "c = tl.expand_dims(i, 1)",
    "c = tl.cat(i, i, can_reorder=True)", "c = i == n", "c = tl.sort(i)", "c = tl.cdiv(n, N)", "c = tl.program_id(3)",
]  # fmt: skip


@st.composite
def _statements(draw, depth: int):
    """(lines, function on the values by name): straight code, loops and branches that keep the types of a and b."""
    code, steps = [], []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("unary", "binary", "loop", "static loop", "if") if depth else ("unary", "binary")))
        target = draw(st.sampled_from(("a", "b")))
        if kind == "unary":
            text, function = draw(st.sampled_from(UNARY))
            code.append(f"{target} = {text}")
            steps.append(lambda v, t=target, f=function: v.__setitem__(t, f(v["a"])))
        elif kind == "binary":
            text, function = draw(st.sampled_from(BINARY))
            code.append(f"{target} = {text}")
            steps.append(lambda v, t=target, f=function: v.__setitem__(t, f(v["a"], v["b"])))
        else:
            inner, step = draw(_statements(depth - 1))
            count, at_least = draw(st.integers(0, 2)), draw(st.integers(1, 5))
            # names of their own: in a branch that is not taken the compiler would see one change its type, the emulator not
            head = {"loop": f"for k in range({count}):", "static loop": f"for s in tl.static_range({count}):"}
            code += [head.get(kind, f"if n >= {at_least}:"), *("    " + line for line in inner)]
            turns = (RUN_TIME >= at_least) if kind == "if" else count
            steps.append(lambda v, s=step, turns=turns: [s(v) for _ in range(turns)])

    def run(values):
        for step in steps:
            step(values)

    return code, run


@st.composite
def triton_kernels(draw):
    """(source, reference): reference(x) is what the kernel stores, or None where odd lines make that another matter."""
    code, run = draw(_statements(2))
    odd = draw(st.lists(st.sampled_from(ODD), max_size=3))
    place = draw(st.sampled_from(("before", "after", "in a loop", "in a branch")))
    if odd and place == "in a loop":
        odd = ["for k in range(n):", *("    " + line for line in odd)]
    elif odd and place == "in a branch":
        odd = ["if n > 2:", *("    " + line for line in odd)]
    body = ["a = tl.load(x + i)", "b = tl.load(x + N + i)"]
    body += code + odd if place != "before" else odd + code
    body.append(draw(st.sampled_from(("tl.store(o + i, a + b)",) * 4 + ("tl.store(o + i, a + c)",))))

    def reference(x):
        values = {"a": x[:N], "b": x[N : 2 * N]}
        run(values)
        return values["a"] + values["b"]

    return HEAD + _lines(*body), reference if body[-1].endswith("a + b)") else None


# ---------------------------------------------------------------- Triton: one name through branches and loops

BEFORE = {
    "new": [], "int": ["k = 1"], "float": ["k = 1.5"], "constant": ["k: tl.constexpr = 1"], "block": ["k = i"], "value": ["k = n"],
    "loop without a turn": ["for k in range(0):", "    pass"], "loop": ["for k in range(2):", "    pass"],
    "unrolled loop": ["for k in tl.static_range(2):", "    pass"], "tuple": ["k = (1, n)"],
}  # fmt: skip
INSIDE = {
    "int": ["k = 2"], "float": ["k = 2.5"], "constant": ["k: tl.constexpr = 2"], "block": ["k = i"], "value": ["k = n"],
    "loop without a turn": ["for k in range(0):", "    pass"], "loop": ["for k in range(1):", "    pass"],
    "unrolled loop": ["for k in tl.static_range(1):", "    pass"], "more": ["k += 1"], "tuple": ["k = (2, n)"],
}  # fmt: skip
AROUND = {
    "if": lambda code: ["if n > 1:", *code], "both branches": lambda code: ["if n > 1:", *code, "else:", *code],
    "loop": lambda code: ["for j in range(2):", *code], "unrolled": lambda code: ["for j in tl.static_range(2):", *code],
    "while": lambda code: ["w = n", "while w < 4:", *code, "    w += 1"], "known if": lambda code: ["if N > 1:", *code],
}  # fmt: skip


def names_through_control_flow():
    """Sources: every pair of what a name is before and becomes inside, around it what branches or loops, used afterwards or not.

    All of it runs: code in a branch that is not taken the emulator does not see.
    """
    for before in BEFORE.values():
        for inside in INSIDE.values():
            for around in AROUND.values():
                for after in ([], ["tl.store(o + i, i + k)"]):
                    yield HEAD + _lines(*before, *around(["    " + line for line in inside]), *after)


# ---------------------------------------------------------------- TLX: shapes, indices, slices, barriers

EXTENTS = st.sampled_from((8, 16, 32, 64, 64, 32, 24, 33))
DTYPES = st.sampled_from(("tl.float32", "tl.bfloat16", "tl.int8", "tl.float16"))
INDEX = st.sampled_from(("0", "1", "n % 2", "k", "0.0", "n > 2"))
NUMBER = st.sampled_from(("0", "1", "n & 1", "k", "1.0", "True", "n > 9", "(n & 1).to(tl.int64)"))


@st.composite
def _buffer(draw):
    """Lines that allocate t and store to it, or to a part of it."""
    rows, columns, dtype = draw(EXTENTS), draw(EXTENTS), draw(DTYPES)
    tmem = draw(st.sampled_from((False, False, False, True)))
    rows, dtype = (draw(st.sampled_from((128, 64))), "tl.float32") if tmem and dtype == "tl.int8" else (rows, dtype)
    part, shape = f"t[{draw(INDEX)}]", (rows, columns)
    how = draw(st.sampled_from(("whole", "whole", "row", "slice", "slice", "trans", "array", "reshape")))
    if how == "row":
        part, shape = part + "[0]", (columns,)
    elif how == "slice":
        shape = (draw(st.sampled_from((rows, rows // 2, 8))), draw(st.sampled_from((columns, columns // 2, 8))))
        offset = (
            draw(st.sampled_from(("0", "8", "4"))) if not tmem else "0",
            draw(st.sampled_from(("0", "8", "n", "k"))),
        )
        part = f"tlx.local_slice({part}, [{', '.join(offset)}], [{shape[0]}, {shape[1]}])"
    elif how == "trans":
        part, shape = f"tlx.local_trans({part})", (columns, rows)
    elif how == "array":
        part = "t"
    elif how == "reshape":
        part, shape = f"tlx.local_reshape({part}, ({rows * columns},))", (rows * columns,)
    stored = draw(st.sampled_from((dtype, dtype, dtype, "tl.float32")))
    kind = ", tlx.storage_kind.tmem" if tmem else ""
    return [
        f"t = tlx.local_alloc(({rows}, {columns}), {dtype}, 2{kind})",
        f"tlx.local_store({part}, tl.zeros({shape}, {stored}))",
    ]


@st.composite
def _barrier(draw):
    """Lines that make a barrier pass, or use it in a way that the compiler refuses."""
    count = draw(st.sampled_from(("1", "1", "2", "1.0", "N", "n")))
    number, pred = draw(NUMBER), draw(st.sampled_from(("", "", ", pred=n > 100", ", pred=True", ", pred=n")))
    expect = draw(st.sampled_from(("0", "N * 4", "N * 4.0", "n")))
    return draw(
        st.sampled_from(
            (
                [f"b = tlx.alloc_barriers({count})", f"tlx.barrier_wait(b[0], 1{pred})"],
                ["b = tlx.alloc_barriers(1)", f"tlx.barrier_wait(b[0], {number}, pred=n > 100)"],
                [f"b = tlx.alloc_barriers({count})", f"tlx.barrier_arrive(b[{draw(INDEX)}], 1{pred})"],
                ["b = tlx.alloc_barriers(1)", f"tlx.barrier_expect_bytes(b[0], {expect}, pred=n > 100)"],
                ["b = tlx.alloc_barriers(1, arrive_count=2)", f"tlx.barrier_arrive(b[0], {count})"],
                [f"tlx.named_barrier_wait({draw(st.sampled_from(('9', '9.0', 'n')))}, 128)"],
                ["tlx.fence('" + draw(st.sampled_from(("async_shared", "gpu", "cta"))) + "')"],
            )
        )
    )


@st.composite
def tlx_kernels(draw):
    """Source of a kernel of buffers and barriers; `k` is a number known to the compiler, a loop's, or a local."""
    code = draw(st.one_of(_buffer(), _buffer(), _barrier()))
    heads = ("k: tl.constexpr = 0", "k = 0", "for k in range(1):", "for k in tl.static_range(1):", "if n > 2:")
    head = draw(st.sampled_from(heads))
    known = ["k: tl.constexpr = 0"] if head.startswith("if") else []
    body = [head, *("    " + line for line in code)] if head.endswith(":") else [head, *code]
    return HEAD + _lines(*known, *body)
