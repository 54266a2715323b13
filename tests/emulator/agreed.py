"""Lines of kernels on which the emulator and the compiler once differed, or could: name -> lines after `i = tl.arange(0, N)`."""

# ruff: noqa: E501
# fmt: off
_TUPLES = (
    ("q = t + (None,)",), ("q = t[:1] + (1, None)",), ("u = (n, None)", "q = u + t"), ("u = (n, None)", "q = t + u"), ("u = (n, None)", "q = u + u"),
    ("u = (n, (1, None))", "q = u + u"), ("a, b = t", "tl.store(o + i, a + b)"), ("a, b, c, d = t",), ("a, (b, c) = (i, t)",), ("a, *b = t",), ("q = (*t, 1)",),
    ("q = t.count(1)",), ("q = t.index(1)",), ("assert t",), ("assert len(t) == 3",), ("u = (t, 1)", "(a, b), c = u", "tl.store(o + i, a + b + c)"),
)  # fmt: skip
LANGUAGE = {
    **{
        f"{what} under a plain name": (f"q = {what}",)
        for what in (
            "tl.exp",
            "tl",
            "(tl.exp, 1)",
            "[tl.cdiv, i]",
            "(tl.float32, i)",
            "tl.float32",
            "i.to",
            "i.sum",
            "N.bit_length",
            "tl.constexpr",
            "triton.jit",
            "i.shape",
            "(None, 1)",
        )
    },
    **{
        f"shape: {code}": (f"c = {code}",)
        for code in (
            "tl.reshape(i, N)",
            "tl.reshape(i, (N))",
            "i.reshape(64, can_reorder=True)",
            "tl.view(i, 64)",
            "i.view([64])",
            "tl.reshape(i, 63)",
            "tl.reshape(i, 64.0)",
            "tl.reshape(i, None)",
            "tl.reshape(i, n)",
            "tl.reshape(i, True)",
            "tl.zeros((N > 3, 4), tl.float32)",
            "tl.zeros((N > 3,), tl.float32)",
            "tl.zeros((N < 3, 4), tl.float32)",
            "tl.full((True,), 2, tl.int32)",
            "tl.full([4, True], 2, tl.int32)",
            "tl.full((False,), 2, tl.int32)",
            "tl.reshape(i, (N > 3, N))",
            "tl.broadcast_to(i[None, :], (N > 3, N))",
            "i.reshape(True, N)",
            "tl.arange(0, True)",
            "tl.arange(False, 4)",
            "tl.arange(N < 3, 4)",
            "tl.reshape(i)",
            "tl.zeros(64, tl.float32)",
            "tl.full(N, 1, tl.int32)",
            "tl.broadcast_to(i, N)",
            "tl.permute(i, 0)",
        )
    },
    "function as a constant": ("q: tl.constexpr = tl.maximum", "tl.store(o + i, q(i, 1))"),
    "rt": (
        "c: tl.constexpr = n",
        "tl.store(o + i, i + c)",
    ),
    "rt left": (
        "c: tl.constexpr = n",
        "tl.store(o + i, c + i)",
    ),
    "rt times const": (
        "c: tl.constexpr = n * 2",
        "tl.store(o + i, i + c)",
    ),
    "rt*rt": (
        "c: tl.constexpr = n * n",
        "tl.store(o + i, i + c)",
    ),
    "const+const": (
        "c: tl.constexpr = N * 2",
        "tl.store(o + i, i + c)",
    ),
    "c op const": (
        "c: tl.constexpr = n",
        "d = c * 2",
        "tl.store(o + i, i + d)",
    ),
    "c op rt": (
        "c: tl.constexpr = n",
        "d = c * n",
        "tl.store(o + i, i + d)",
    ),
    "rt op c": (
        "c: tl.constexpr = n",
        "d = n * c",
        "tl.store(o + i, i + d)",
    ),
    "const op c": (
        "c: tl.constexpr = n",
        "d = 2 * c",
        "tl.store(o + i, i + d)",
    ),
    "N op c": (
        "c: tl.constexpr = n",
        "d = N * c",
        "tl.store(o + i, i + d)",
    ),
    "c compare": (
        "c: tl.constexpr = n",
        "if c > 2:",
        "    tl.store(o, 1.0)",
    ),
    "compare c": (
        "c: tl.constexpr = n",
        "if n > c:",
        "    tl.store(o, 1.0)",
    ),
    "block<c": (
        "c: tl.constexpr = n",
        "tl.store(o + i, 1.0, mask=i < c)",
    ),
    "c as mask": (
        "c: tl.constexpr = i < n",
        "tl.store(o + i, 1.0, mask=c)",
    ),
    "block": (
        "c: tl.constexpr = i * 2",
        "tl.store(o + i, i + c)",
    ),
    "block left": (
        "c: tl.constexpr = i * 2",
        "tl.store(o + c, 1.0)",
    ),
    "block idx": (
        "c: tl.constexpr = i * 2",
        "d = c[None, :]",
    ),
    "attr": (
        "c: tl.constexpr = i * 2",
        "tl.store(o + i, c.to(tl.float32))",
    ),
    "neg": (
        "c: tl.constexpr = n",
        "d = -c",
    ),
    "not": (
        "c: tl.constexpr = n > 2",
        "d = not c",
    ),
    "and": (
        "c: tl.constexpr = n > 2",
        "d = c and n > 1",
    ),
    "and right": (
        "c: tl.constexpr = n > 2",
        "d = n > 1 and c",
    ),
    "if bare": (
        "c: tl.constexpr = n > 2",
        "if c:",
        "    tl.store(o, 1.0)",
    ),
    "while": (
        "c: tl.constexpr = n",
        "k = 0",
        "while k < c:",
        "    k += 1",
        "tl.store(o, k)",
    ),
    "range": (
        "c: tl.constexpr = n",
        "for k in range(c):",
        "    tl.store(o, 1.0)",
    ),
    "range2": (
        "c: tl.constexpr = n",
        "for k in range(0, c):",
        "    tl.store(o+k, 1.0)",
    ),
    "static_range": (
        "c: tl.constexpr = n",
        "for k in tl.static_range(c):",
        "    tl.store(o, 1.0)",
    ),
    "arange": (
        "c: tl.constexpr = n",
        "d = tl.arange(0, c)",
    ),
    "shape": (
        "c: tl.constexpr = n",
        "d = tl.zeros((c,), tl.float32)",
    ),
    "assign": (
        "c: tl.constexpr = n",
        "d = c",
        "tl.store(o + i, i + d)",
    ),
    "assign then op": (
        "c: tl.constexpr = n",
        "d = c",
        "e = d * 2",
        "tl.store(o + i, i + e)",
    ),
    "to builtin": (
        "c: tl.constexpr = n",
        "tl.store(o, tl.maximum(c, 2))",
    ),
    "to cdiv": (
        "c: tl.constexpr = n",
        "tl.store(o, tl.cdiv(c, 2))",
    ),
    "to cdiv r": (
        "c: tl.constexpr = n",
        "tl.store(o, tl.cdiv(n, c))",
    ),
    "to where": (
        "c: tl.constexpr = n",
        "tl.store(o+i, tl.where(i < c, c, 0))",
    ),
    "ptr": (
        "c: tl.constexpr = x + n",
        "tl.store(o, tl.load(c))",
    ),
    "ptr add": (
        "c: tl.constexpr = x",
        "tl.store(o + i, tl.load(c + i))",
    ),
    "load": (
        "c: tl.constexpr = tl.load(x + i)",
        "tl.store(o + i, c)",
    ),
    "pid": (
        "c: tl.constexpr = tl.program_id(0) * N",
        "tl.store(o + c + i, 1.0)",
    ),
    "pid left": (
        "c: tl.constexpr = tl.program_id(0) * N",
        "tl.store(o + (c + i), 1.0)",
    ),
    "cdiv": (
        "c: tl.constexpr = tl.cdiv(n, N)",
        "tl.store(o + i, i + c)",
    ),
    "sum": (
        "c: tl.constexpr = tl.sum(tl.load(x+i), 0)",
        "tl.store(o + i, c)",
    ),
    "tuple": (
        "c: tl.constexpr = (n, N)",
        "tl.store(o + i, i + c[0])",
    ),
    "tuple const": (
        "c: tl.constexpr = (1, N)",
        "tl.store(o + i, i + c[1])",
    ),
    "str": (
        "c: tl.constexpr = 'a'",
        "if c == 'a':",
        "    tl.store(o, 1.0)",
    ),
    "dtype": (
        "c: tl.constexpr = tl.float16",
        "tl.store(o + i, i.to(c))",
    ),
    "none": (
        "c: tl.constexpr = None",
        "if c is None:",
        "    tl.store(o, 1.0)",
    ),
    "re-annot": (
        "c: tl.constexpr = 1",
        "c: tl.constexpr = 2",
        "tl.store(o + i, i + c)",
    ),
    "re-assign": (
        "c: tl.constexpr = 1",
        "c = 2",
        "tl.store(o + i, i + c)",
    ),
    "re-assign aug": (
        "c: tl.constexpr = 1",
        "c += 2",
        "tl.store(o + i, i + c)",
    ),
    "plain then annot": (
        "c = 1",
        "c: tl.constexpr = 2",
        "tl.store(o + i, i + c)",
    ),
    "param": (
        "N: tl.constexpr = N * 2",
        "tl.store(o, N)",
    ),
    "param2": (
        "n: tl.constexpr = 2",
        "tl.store(o, n)",
    ),
    "in static_range": (
        "for k in tl.static_range(2):",
        "    c: tl.constexpr = k",
        "    tl.store(o + k + i, i + c)",
    ),
    "in static_range 1": (
        "for k in tl.static_range(1):",
        "    c: tl.constexpr = k",
        "    tl.store(o + k + i, i + c)",
    ),
    "in range": (
        "for k in range(2):",
        "    c: tl.constexpr = N",
        "    tl.store(o + k, c)",
    ),
    "in range rt": (
        "for k in range(2):",
        "    c: tl.constexpr = k * 2",
        "    tl.store(o + k, 1.0 + k + c)",
    ),
    "in range twice": (
        "for k in range(2):",
        "    c: tl.constexpr = N",
        "    c: tl.constexpr = N",
        "    tl.store(o + k, c)",
    ),
    "in range after": (
        "for k in range(2):",
        "    c: tl.constexpr = N",
        "    tl.store(o + k, c)",
        "c: tl.constexpr = 3",
        "tl.store(o + i, i + c)",
    ),
    "in range used after": (
        "for k in range(2):",
        "    c: tl.constexpr = N",
        "    tl.store(o + k, c)",
        "tl.store(o, c)",
    ),
    "in range before": (
        "c: tl.constexpr = 3",
        "for k in range(2):",
        "    c: tl.constexpr = N",
        "    tl.store(o + k, c)",
    ),
    "in if": (
        "if n > 1:",
        "    c: tl.constexpr = N",
        "    tl.store(o, c)",
    ),
    "in if else": (
        "if n > 1:",
        "    c: tl.constexpr = N",
        "    tl.store(o, c)",
        "else:",
        "    c: tl.constexpr = 2",
        "    tl.store(o, c)",
    ),
    "in if else used after": (
        "if n > 1:",
        "    c: tl.constexpr = 2",
        "else:",
        "    c: tl.constexpr = 2",
        "tl.store(o, c)",
    ),
    "in if then after": (
        "if n > 1:",
        "    c: tl.constexpr = N",
        "    tl.store(o, c)",
        "c: tl.constexpr = 3",
        "tl.store(o + i, i + c)",
    ),
    "in const if": (
        "if N > 1:",
        "    c: tl.constexpr = N",
        "else:",
        "    c: tl.constexpr = 2",
        "tl.store(o, c)",
    ),
    "in const if then": (
        "if N > 1:",
        "    c: tl.constexpr = N",
        "c: tl.constexpr = 3",
        "tl.store(o + i, i + c)",
    ),
    "in while": (
        "k = 0",
        "while k < 2:",
        "    c: tl.constexpr = N",
        "    tl.store(o + k, c)",
        "    k += 1",
    ),
    "loop var": (
        "for c in range(2):",
        "    tl.store(o + c, 1.0)",
        "c: tl.constexpr = 3",
        "tl.store(o + i, i + c)",
    ),
    "loop var static": (
        "for c in tl.static_range(2):",
        "    tl.store(o + c, 1.0)",
        "c: tl.constexpr = 3",
        "tl.store(o + i, i + c)",
    ),
    "static in dyn": (
        "for k in range(2):",
        "    for j in tl.static_range(2):",
        "        c: tl.constexpr = j",
        "        tl.store(o + j, c)",
    ),
    "dyn in static": (
        "for j in tl.static_range(2):",
        "    for k in range(2):",
        "        c: tl.constexpr = j",
        "        tl.store(o + j, c)",
    ),
    "used after loop plain": (
        "for k in range(2):",
        "    w = k * 2",
        "tl.store(o, w)",
    ),
    "used after if plain": (
        "if n > 1:",
        "    w = n * 2",
        "tl.store(o, w)",
    ),
    "used after if both": (
        "if n > 1:",
        "    w = n * 2",
        "else:",
        "    w = n",
        "tl.store(o, w)",
    ),
    "annot string": (
        "c: 'tl.constexpr' = 3",
        "tl.store(o + i, i + c)",
    ),
    "annot int": (
        "c: tl.int32 = 3",
        "tl.store(o + i, i + c)",
    ),
    "used after loop var": (
        "for k in range(2):",
        "    tl.store(o + k, 1.0)",
        "tl.store(o, k)",
    ),
    "tern num": (
        "v = 1 if n > 1 else 2",
        "tl.store(o, v)",
    ),
    "tern none": ("v = None if n > 1 else 2",),
    "tern tuple": ("v = (1, 2) if n > 1 else (2, 3)",),
    "tern block": (
        "v = (i if n > 1 else i + 1)",
        "tl.store(o+i, v)",
    ),
    "tern mixed": (
        "v = (i if n > 1 else 0)",
        "tl.store(o+i, v)",
    ),
    "tern types": (
        "v = (1 if n > 1 else 0.5)",
        "tl.store(o, v)",
    ),
    "tern types2": (
        "v = (n if n > 1 else 0.5)",
        "tl.store(o, v)",
    ),
    "tern const": (
        "v = (i if N > 1 else 0)",
        "tl.store(o+i, v)",
    ),
    "loop var, no turn, changed": (
        "for k in range(0):",
        "    tl.store(o + k, 1.0)",
        "k += 1",
        "tl.store(o + N, 1.0)",
    ),
    "loop var, no turn, constexpr": (
        "for k in range(0):",
        "    tl.store(o + k, 1.0)",
        "k: tl.constexpr = 2",
        "tl.store(o, k)",
    ),
    "loop var, no turn, other type": (
        "for k in range(0):",
        "    tl.store(o + k, 1.0)",
        "if n > 1:",
        "    k = 2.5",
    ),
    "loop var, no turn, static": (
        "for k in range(0):",
        "    tl.store(o + k, 1.0)",
        "for j in range(2):",
        "    for k in tl.static_range(1):",
        "        tl.store(o, 1.0)",
    ),
    "static then dyn in if": (
        "for k in tl.static_range(2):",
        "    tl.store(o + k, 1.0)",
        "if n > 1:",
        "    for k in range(1):",
        "        tl.store(o, 1.0)",
    ),
    "const becomes value in if": (
        "c: tl.constexpr = 1",
        "if n > 1:",
        "    c = 2",
    ),
    "both branches, other type": (
        "c = 1",
        "if n > 1:",
        "    c = 2.5",
        "else:",
        "    c = 3.5",
    ),
    "both branches, same name": (
        "c = 1",
        "d = 2.5",
        "if n > 1:",
        "    c = d",
        "else:",
        "    c = d",
    ),
    "static in both branches": (
        "if n > 1:",
        "    for k in tl.static_range(2):",
        "        tl.store(o + k, 1.0)",
        "else:",
        "    for k in tl.static_range(2):",
        "        tl.store(o + k, 2.0)",
        "tl.store(o, k)",
    ),
    "loop in loop, float before": (
        "k = 1.0",
        "for j in range(1):",
        "    for k in range(0):",
        "        tl.store(o, 1.0)",
    ),
    "name bound after its use": (
        "if n > 5:",
        "    tl.store(o, w)",
        "w = n",
    ),
    "name bound after its use 2": (
        "for j in range(2):",
        "    if n > 5:",
        "        tl.store(o + j, w)",
        "    w = n + j",
    ),
    "name bound after its use 3": (
        "if n > 5:",
        "    c = w + 1",
        "    w = c",
    ),
    "name bound after its use 4": (
        "tl.store(o, 1.0, mask=n > w)",
        "w = 2",
    ),
    "name bound after its use 5": (
        "if N > 500:",
        "    tl.store(o, w)",
        "w = 2",
    ),
    "name bound after its use 6": (
        "for j in range(0):",
        "    tl.store(o, w)",
        "w = 2",
    ),
    "no such name, two ifs deep": (
        "if n > 5:",
        "    if n > 6:",
        "        tl.store(o, foo)",
    ),
    "no such name, two ifs deep 2": (
        "if n > 1:",
        "    if n > 6:",
        "        tl.store(o, foo)",
    ),
    "no such name, two ifs deep 3": (
        "if n > 1:",
        "    if N > 6:",
        "        if n > 6:",
        "            tl.store(o, foo)",
    ),
    "no such name, two ifs deep 4": (
        "if n > 5:",
        "    for j in range(n):",
        "        if n > 6:",
        "            tl.store(o, foo)",
    ),
    "no such name, two ifs deep 5": (
        "if n > 5:",
        "    for j in range(n):",
        "        while j < 3:",
        "            tl.store(o, foo)",
    ),
    "block pointer carried": (
        "p = tl.make_block_ptr(x, (N, N), (N, 1), (0, 0), (16, 16), (1, 0))",
        "for j in range(2):",
        "    v = tl.load(p)",
        "    p = tl.make_block_ptr(x, (N, N), (N, 1), (0, 0), (8, 8), (1, 0))",
    ),
    "block pointer carried 2": (
        "p = tl.make_block_ptr(x, (N, N), (N, 1), (0, 0), (16, 16), (1, 0))",
        "for j in range(2):",
        "    v = tl.load(p)",
        "    p = tl.advance(p, (0, 16))",
    ),
    "block pointer carried 3": (
        "p = tl.make_block_ptr(x, (N, N), (N, 1), (0, 0), (16, 16), (1, 0))",
        "if n > 1:",
        "    p = tl.make_block_ptr(x, (N, N), (N, 1), (0, 0), (8, 8), (1, 0))",
    ),
    "descriptor carried": (
        "p = tl.make_tensor_descriptor(x, (N, N), (N, 1), (16, 16))",
        "for j in range(2):",
        "    v = p.load([0, 0])",
        "    p = tl.make_tensor_descriptor(x, (N, N), (N, 1), (8, 8))",
    ),
    "descriptor carried 2": (
        "p = tl.make_tensor_descriptor(x, (N, N), (N, 1), (16, 16))",
        "if n > 1:",
        "    p = tl.make_tensor_descriptor(x, (N, N), (N, 1), (8, 8))",
    ),
    "name that may be bound 1": (
        "if n > 1:",
        "    w = n",
        "else:",
        "    w = n + 1",
        "if n > 5:",
        "    tl.store(o, w)",
    ),
    "name that may be bound 2": (
        "if N > 1:",
        "    w = n",
        "if n > 5:",
        "    tl.store(o, w)",
    ),
    "name that may be bound 3": (
        "if N > 100:",
        "    w = n",
        "if n > 5:",
        "    tl.store(o, w)",
    ),
    "name that may be bound 4": (
        "for j in tl.static_range(2):",
        "    w = n",
        "if n > 5:",
        "    tl.store(o, w)",
    ),
    "name that may be bound 5": (
        "for j in range(2):",
        "    w = n",
        "if n > 5:",
        "    tl.store(o, w)",
    ),
    "name that may be bound 6": (
        "for j in range(n):",
        "    if j > 0:",
        "        tl.store(o, w)",
        "    w = j",
    ),
    "name that may be bound 7": (
        "w = 0",
        "for j in range(n):",
        "    if j > 20:",
        "        tl.store(o, w)",
        "    w = j",
    ),
    "name that may be bound 8": (
        "if n > 5:",
        "    for j in range(2):",
        "        tl.store(o, j)",
        "    tl.store(o, j)",
    ),
    "name that may be bound 9": (
        "if n > 5:",
        "    w = 1",
        "    if n > 6:",
        "        tl.store(o, w)",
        "    else:",
        "        q = w",
        "    tl.store(o, w)",
    ),
    "name that may be bound 10": (
        "if n > 5:",
        "    if n > 6:",
        "        q = 1",
        "    tl.store(o, q)",
    ),
    "name that may be bound 11": (
        "if n > 5:",
        "    if n > 6:",
        "        q = 1",
        "    else:",
        "        q = 2",
        "    tl.store(o, q)",
    ),
    "name that may be bound 12": (
        "if n > 5:",
        "    if N > 6:",
        "        q = 1",
        "    tl.store(o, q)",
    ),
    "name that may be bound 13": (
        "if n > 5:",
        "    if N > 600:",
        "        q = 1",
        "    tl.store(o, q)",
    ),
    "name that may be bound 14": (
        "if n > 5:",
        "    for j in tl.static_range(2):",
        "        q = j",
        "    tl.store(o, q)",
    ),
    "name that may be bound 15": (
        "if n > 5:",
        "    for j in range(2):",
        "        q = j",
        "    tl.store(o, q)",
    ),
    "name that may be bound 16": (
        "if n > 5:",
        "    w = n",
        "    while w > 0:",
        "        w -= 1",
        "        q = w",
        "        tl.store(o, q)",
    ),
    "name that may be bound 17": (
        "if n > 5:",
        "    w += 1",
    ),
    "name that may be bound 18": (
        "if n > 5:",
        "    return",
        "    tl.store(o, w)",
        "w = 1",
    ),
    "name that may be bound 19": (
        "for j in range(0, 0):",
        "    q = tl.zeros((N,), tl.float32)",
        "    for k in range(0):",
        "        q += r",
        "    r = q",
    ),
    "name that may be bound 21": (
        "if n > 5:",
        "    q = tl.load(x + i) if N > 4 else zz",
        "    zz = q",
    ),
    "name that may be bound 24": (
        "for j in range(0):",
        "    if n > 5:",
        "        q = 1.0",
        "    else:",
        "        q = 2.0",
        "    tl.store(o, q)",
    ),
    "name that may be bound 25": (
        "w = n > 5",
        "if w and n > 7:",
        "    tl.store(o, yy)",
        "yy = 1",
    ),
    "name that may be bound 26": (
        "for j in range(0):",
        "    u = tl.load(x + j)",
        "    for k in range(j):",
        "        u += tl.load(x + k)",
        "    tl.store(o + j, u)",
    ),
    "name that may be bound 27": (
        "a = tl.load(x)",
        "if a > 1e9:",
        "    b = a",
        "    if b > 2e9:",
        "        c = b",
        "        tl.store(o, c)",
        "    tl.store(o, b)",
    ),
    "block pointer, other order": (
        "p = tl.make_block_ptr(x, (N, N), (N, 1), (0, 0), (16, 16), (1, 0))",
        "for j in range(2):",
        "    v = tl.load(p)",
        "    p = tl.make_block_ptr(x, (N, N), (N, 1), (0, 0), (16, 16), (0, 1))",
    ),
    "descriptor carried, other shape": (
        "p = tl.make_tensor_descriptor(x, (N, N), (N, 1), (16, 16))",
        "for j in range(2):",
        "    v = p.load([0, 0])",
        "    p = tl.make_tensor_descriptor(x, (n, N), (N, 1), (16, 16))",
    ),
    "descriptor carried 3": (
        "p = tl.make_tensor_descriptor(x, (N, N), (N, 1), (16, 16))",
        "for j in range(2):",
        "    v = p.load([0, 0])",
        "    p = tl.make_tensor_descriptor(o, (N, N), (N, 1), (16, 16))",
    ),
    "descriptor carried, other rank": (
        "p = tl.make_tensor_descriptor(x, (N, N), (N, 1), (16, 16))",
        "if n > 2:",
        "    p = tl.make_tensor_descriptor(o, (N,), (1,), (256,))",
    ),
    "atomic, constant mask": ("tl.atomic_add(o + i, 1.0, mask=True)",),
    "atomic of one, constant mask": ("tl.atomic_xor(o, 1.0, mask=N > 2)",),
    "atomic maximum of one float, constant mask": ("tl.atomic_max(o, 1.0, mask=True)",),
    "atomic minimum of one integer, constant mask": ("tl.atomic_min(o.to(tl.pointer_type(tl.int32)), 1, mask=True)",),
    "atomic minimum of floats, constant mask": ("tl.atomic_min(o + i, i * 1.0, mask=False)",),
    "cat, reordered, of two dimensions": ("c = tl.cat(i[None, :], i[None, :], can_reorder=True)",),
    "cat, reordered by position": ("c = tl.cat(i[:, None], i[:, None], True)",),
    "cat of two dimensions": ("c = tl.cat(i[None, :], i[None, :])",),
    "dot of halves into integers": (
        "z = tl.zeros((16, 16), tl.float16)",
        "c = tl.dot(z, z, out_dtype=tl.int32)",
    ),
    "dot of fp8 into doubles": (
        "z = tl.zeros((32, 32), tl.float8e5)",
        "c = tl.dot(z, z, out_dtype=tl.float64)",
    ),
    "dot of halves into halves": (
        "z = tl.zeros((16, 16), tl.float16)",
        "c = tl.dot(z, z, out_dtype=tl.float16)",
    ),
    "variable of a comprehension": (
        "q = [z * 2 for z in (1, 2)]",
        "if n > 5:",
        "    tl.store(o, q[0])",
    ),
    **{f"tuple {number}": ("t = (i, n, 2)", *body) for number, body in enumerate(_TUPLES)},
}

_DEFAULT, _OTHER = (
    ("with tlx.async_task('default'):", "    pass"),
    ("with tlx.async_task(num_warps=4):", "    tl.store(o, 1.0)"),
)
_REGIONS = (
    (*_DEFAULT, *_OTHER), _DEFAULT, ("pass",), ("pass", *_DEFAULT, *_OTHER), ("'a text'", *_DEFAULT, *_OTHER),
    (*_DEFAULT, "k = n + 1", *_OTHER), (*_DEFAULT, *_OTHER, "    return"), (_DEFAULT[0], "    return", *_OTHER),
    (*_DEFAULT, *_OTHER, "    if n > 1:", "        return"), (*_DEFAULT, *_OTHER, "    if n > 9:", "        return"),
    (*_DEFAULT, *_OTHER, "    if N > 1:", "        return"), (*_DEFAULT, *_OTHER, "    if N > 99:", "        return"),
    (*_DEFAULT, "for j in tl.static_range(2):", *("    " + line for line in _OTHER)),
    (*_DEFAULT, "if N > 1:", *("    " + line for line in _OTHER)), (*_DEFAULT, *_OTHER, "if N > 1:", "    pass"),
    (*_DEFAULT, *_OTHER, "if N > 99:", "    pass"), (*_DEFAULT, *_OTHER, "if N > 1:", "    if N > 2:", *(8 * " " + line for line in _OTHER)),
    (*_DEFAULT, *_OTHER, "    with tlx.async_tasks():", *(8 * " " + line for line in (*_DEFAULT, *_OTHER))),
    (*_DEFAULT, *_OTHER, "    with tlx.async_tasks():", *(8 * " " + line for line in _DEFAULT)),
    (*_DEFAULT, "with tlx.async_task(num_warps=4), tlx.async_task(num_warps=4):", "    pass"),
)  # fmt: skip
TLX = {
    "reinterpret, a wider type": (
        "t = tlx.local_alloc((64, 64), tl.int8, 2)",
        "v = tlx.local_reinterpret(t[0], tl.int32)",
        "tlx.local_store(v, tl.full((64, 64), 7, tl.int32))",
    ),
    "reinterpret, rows cut below the swizzle": (
        "t = tlx.local_alloc((64, 64), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.float32, [64, 32])",
    ),
    "reinterpret, rows as wide as the swizzle": (
        "t = tlx.local_alloc((64, 64), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.float32, [32, 64])",
    ),
    "reinterpret, rows of a narrow swizzle": (
        "t = tlx.local_alloc((64, 16), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.int8, [128, 16])",
    ),
    "reinterpret, rows below a narrow swizzle": (
        "t = tlx.local_alloc((64, 16), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.int8, [256, 8])",
    ),
    "reinterpret, too few rows for a swizzle": (
        "t = tlx.local_alloc((4, 64), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.int8, [64, 8])",
    ),
    "reinterpret, a tile as a vector": (
        "t = tlx.local_alloc((64, 64), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.float16, [4096])",
    ),
    "reinterpret, a vector as a tile": (
        "t = tlx.local_alloc((64,), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.float32, [4, 8])",
    ),
    "reinterpret, a vector as three dimensions": (
        "t = tlx.local_alloc((64,), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.float32, [1, 4, 8])",
    ),
    "reinterpret, three dimensions as two": (
        "t = tlx.local_alloc((1, 4, 64), tl.float16, 1)",
        "v = tlx.local_reinterpret(t[0], tl.float16, [4, 64])",
    ),
    "reinterpret, two tiles as one": (
        "t = tlx.local_alloc((64, 64), tl.float16, 2)",
        "v = tlx.local_reinterpret(t, tl.float16, [128, 64])",
    ),
    "reinterpret, two tiles as one of short rows": (
        "t = tlx.local_alloc((64, 64), tl.float16, 2)",
        "v = tlx.local_reinterpret(t, tl.float16, [256, 32])",
    ),
    "reinterpret, a slice": (
        "t = tlx.local_alloc((64, 64), tl.float16, 1)",
        "v = tlx.local_reinterpret(tlx.local_slice(t[0], [0, 0], [32, 64]), tl.float16, [64, 32])",
    ),
    "reinterpret, shape None": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "v = tlx.local_reinterpret(t[0], tl.int32, None)",
    ),
    "reinterpret, no shape": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "v = tlx.local_reinterpret(t[0], tl.int32)",
    ),
    "layout None, load": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(t[0], tl.zeros((N, N), tl.float32))",
        "v = tlx.local_load(t[0], layout=None)",
    ),
    "layout None, alloc": (
        "t = tlx.local_alloc((N, N), tl.float32, 1, layout=None)",
        "tlx.local_store(t[0], tl.zeros((N, N), tl.float32))",
    ),
    "t[0][0] 2d": (
        "t = tlx.local_alloc((N, N), tl.float32, 2)",
        "tlx.local_store(t[0], tl.zeros((N,N), tl.float32))",
        "v = tlx.local_load(t[0][0])",
    ),
    "t[0][0] 1d": (
        "t = tlx.local_alloc((N,), tl.float32, 2)",
        "tlx.local_store(t[0], tl.zeros((N,), tl.float32))",
        "v = tlx.local_load(t[0][0])",
    ),
    "tmem t[0][0]": (
        "t = tlx.local_alloc((128, N), tl.float32, 2, tlx.storage_kind.tmem)",
        "tlx.local_store(t[0], tl.zeros((128,N), tl.float32))",
        "v = tlx.local_load(t[0][0])",
    ),
    "bar[0][0]": (
        "b = tlx.alloc_barriers(2)",
        "tlx.barrier_arrive(b[0][0], 1)",
    ),
    "index runtime": (
        "t = tlx.local_alloc((N,), tl.float32, 2)",
        "tlx.local_store(t[n%2], tl.zeros((N,), tl.float32))",
    ),
    "index float": (
        "t = tlx.local_alloc((N,), tl.float32, 2)",
        "tlx.local_store(t[0.0], tl.zeros((N,), tl.float32))",
    ),
    "index bool": (
        "t = tlx.local_alloc((N,), tl.float32, 2)",
        "tlx.local_store(t[n > 2], tl.zeros((N,), tl.float32))",
    ),
    "index i64": (
        "t = tlx.local_alloc((N,), tl.float32, 2)",
        "tlx.local_store(t[n.to(tl.int64)], tl.zeros((N,), tl.float32))",
    ),
    "33 cols": ("t = tlx.local_alloc((N, 33), tl.float32, 1)",),
    "24xN": ("t = tlx.local_alloc((24, N), tl.bfloat16, 1)",),
    "3 bufs": ("t = tlx.local_alloc((N,), tl.bfloat16, 3)",),
    "float bufs": ("t = tlx.local_alloc((N,), tl.bfloat16, 2.0)",),
    "rt bufs": ("t = tlx.local_alloc((N,), tl.bfloat16, n)",),
    "shape float": ("t = tlx.local_alloc((N, 16.0), tl.bfloat16, 1)",),
    "shape int": ("t = tlx.local_alloc(N, tl.bfloat16, 1)",),
    "shape list": ("t = tlx.local_alloc([N, 16], tl.bfloat16, 1)",),
    "shape rt": ("t = tlx.local_alloc([N, n], tl.bfloat16, 1)",),
    "tmem 192 rows": ("t = tlx.local_alloc((192, N), tl.float32, 1, tlx.storage_kind.tmem)",),
    "i1 alloc": ("t = tlx.local_alloc((N,), tl.int1, 1)",),
    "expect float": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_expect_bytes(b[0], N*4.0)",
    ),
    "expect rt": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_expect_bytes(b[0], n*4)",
    ),
    "expect div": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_expect_bytes(b[0], N*4/2)",
    ),
    "arrive float": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], 1.0)",
    ),
    "arrive 0": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], 0)",
    ),
    "arrive rt": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], n)",
    ),
    "bars float": ("b = tlx.alloc_barriers(2.0)",),
    "bars 0": ("b = tlx.alloc_barriers(0)",),
    "bars count float": ("b = tlx.alloc_barriers(1, arrive_count=1.0)",),
    "bars count 0": ("b = tlx.alloc_barriers(1, arrive_count=0)",),
    "wait float": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], 1.0)",
    ),
    "wait bool": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], True)",
    ),
    "wait i64": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], (n & 0).to(tl.int64) + 1)",
    ),
    "wait str": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], 'x')",
    ),
    "wait none": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], None)",
    ),
    "wait block": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], i)",
    ),
    "named float": ("tlx.named_barrier_wait(9.0, 128)",),
    "named rt": ("tlx.named_barrier_wait(n, 128)",),
    "named cnt float": ("tlx.named_barrier_wait(9, 128.0)",),
    "wait pred": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], 1, pred=n > 1)",
    ),
    "wait pred const": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], 1, pred=True)",
    ),
    "wait pred int": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], 1, pred=n)",
    ),
    "slice rt": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_slice(t[0], [0, n], [N, N//2]), tl.zeros((N, N//2), tl.float32))",
    ),
    "slice const": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_slice(t[0], [0, N//2], [N, N//2]), tl.zeros((N, N//2), tl.float32))",
    ),
    "slice rows": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_slice(t[0], [N//2, 0], [N//2, N]), tl.zeros((N//2, N), tl.float32))",
    ),
    "slice off 8": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_slice(t[0], [0, 8], [N, 16]), tl.zeros((N, 16), tl.float32))",
    ),
    "slice off 5": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_slice(t[0], [0, 5], [N, 16]), tl.zeros((N, 16), tl.float32))",
    ),
    "slice 24": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "v = tlx.local_slice(t[0], [0, 0], [N, 24])",
    ),
    "slice 1d": (
        "t = tlx.local_alloc((N,), tl.float32, 1)",
        "tlx.local_store(tlx.local_slice(t[0], [N//2], [N//2]), tl.zeros((N//2,), tl.float32))",
    ),
    "slice loop static": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "for k in tl.static_range(2):",
        "    tlx.local_store(tlx.local_slice(t[0], [0, k*32], [N, 32]), tl.zeros((N, 32), tl.float32))",
    ),
    "slice loop": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "for k in range(2):",
        "    tlx.local_store(tlx.local_slice(t[0], [0, k*32], [N, 32]), tl.zeros((N, 32), tl.float32))",
    ),
    "slice local var": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "k = 32",
        "tlx.local_store(tlx.local_slice(t[0], [0, k], [N, 32]), tl.zeros((N, 32), tl.float32))",
    ),
    "slice float": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_slice(t[0], [0, 0.0], [N, 32]), tl.zeros((N, 32), tl.float32))",
    ),
    "slice tuple": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_slice(t[0], (0, 0), (N, 32)), tl.zeros((N, 32), tl.float32))",
    ),
    "subslice rt": (
        "t = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)",
        "v = tlx.subslice(t[0], n, 32)",
    ),
    "tmem slice": (
        "t = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)",
        "tlx.local_store(tlx.local_slice(t[0], [0, 32], [128, 32]), tl.zeros((128, 32), tl.float32))",
    ),
    "tmem slice rows": (
        "t = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)",
        "tlx.local_store(tlx.local_slice(t[0], [64, 0], [64, 32]), tl.zeros((64, 32), tl.float32))",
    ),
    "subslice smem": (
        "t = tlx.local_alloc((128, N), tl.float32, 1)",
        "v = tlx.subslice(t[0], 0, 32)",
    ),
    "reshape": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_reshape(t[0], (N*N,)), tl.zeros((N*N,), tl.float32))",
    ),
    "reshape bad": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "v = tlx.local_reshape(t[0], (N,))",
    ),
    "trans 1d": (
        "t = tlx.local_alloc((N,), tl.float32, 1)",
        "v = tlx.local_trans(t[0])",
    ),
    "trans dims": (
        "t = tlx.local_alloc((N, 32), tl.float32, 1)",
        "v = tlx.local_trans(t[0], (0, 0))",
    ),
    "reinterpret": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_reinterpret(t[0], tl.bfloat16, [N, 2*N]), tl.zeros((N, 2*N), tl.bfloat16))",
    ),
    "reinterpret smaller": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(tlx.local_reinterpret(t[0], tl.bfloat16, [N, N]), tl.zeros((N, N), tl.bfloat16))",
    ),
    "store dtype": (
        "t = tlx.local_alloc((N, N), tl.bfloat16, 1)",
        "tlx.local_store(t[0], tl.zeros((N, N), tl.float32))",
    ),
    "store shape": (
        "t = tlx.local_alloc((N, N), tl.bfloat16, 1)",
        "tlx.local_store(t[0], tl.zeros((N, 32), tl.bfloat16))",
    ),
    "store scalar": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(t[0], 0.0)",
    ),
    "store broadcast": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "tlx.local_store(t[0], tl.zeros((N, 1), tl.float32))",
    ),
    "fence bad": ("tlx.fence('cta')",),
    "fence": ("tlx.fence('async_shared')",),
    "load arr arith": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "v = t[0] + 1.0",
    ),
    "load buf tl": (
        "t = tlx.local_alloc((N, N), tl.float32, 1)",
        "v = tl.load(t[0])",
    ),
    "remote view": (
        "b = tlx.alloc_barriers(1)",
        "v = tlx.remote_view(b[0], 1)",
    ),
    "buf in if": (
        "t = tlx.local_alloc((N,), tl.float32, 2)",
        "b = t[0]",
        "if n > 1:",
        "    b = t[1]",
        "tlx.local_store(b, tl.zeros((N,), tl.float32))",
    ),
    "buf in loop": (
        "t = tlx.local_alloc((N,), tl.float32, 2)",
        "b = t[0]",
        "for k in range(n):",
        "    b = t[k % 2]",
        "tlx.local_store(b, tl.zeros((N,), tl.float32))",
    ),
    "buf ternary": (
        "t = tlx.local_alloc((N,), tl.float32, 2)",
        "b = t[0] if n > 1 else t[1]",
        "tlx.local_store(b, tl.zeros((N,), tl.float32))",
    ),
    "alloc in loop": (
        "for k in range(n):",
        "    t = tlx.local_alloc((N,), tl.float32, 2)",
        "    tlx.local_store(t[0], tl.zeros((N,), tl.float32))",
    ),
    "alloc in if": (
        "if n > 1:",
        "    t = tlx.local_alloc((N,), tl.float32, 2)",
        "    tlx.local_store(t[0], tl.zeros((N,), tl.float32))",
    ),
    "bar in loop": (
        "for k in range(n):",
        "    b = tlx.alloc_barriers(1)",
        "    tlx.barrier_arrive(b[0], 1)",
    ),
    "arrive r0 1cta": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], 1, 0)",
    ),
    "expect pred true": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_expect_bytes(b[0], 0, pred=True)",
    ),
    "expect pred int": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_expect_bytes(b[0], 0, pred=n)",
    ),
    "expect pred": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_expect_bytes(b[0], 0, pred=n>1)",
    ),
    "arrive pred true": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], 1, pred=True)",
    ),
    "arrive pred int": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], 1, pred=n)",
    ),
    "arrive pred": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], 1, pred=n>1)",
    ),
    "wait u32": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], (n.to(tl.uint32)*0)+1)",
    ),
    "wait i8": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], (n.to(tl.int8)*0)+1)",
    ),
    "tmem 64 rows": (
        "t = tlx.local_alloc((64, N), tl.float32, 1, tlx.storage_kind.tmem)",
        "tlx.local_store(t[0], tl.zeros((64,N), tl.float32))",
    ),
    "tmem bf16 128": (
        "t = tlx.local_alloc((128, N), tl.bfloat16, 1, tlx.storage_kind.tmem)",
        "tlx.local_store(t[0], tl.zeros((128,N), tl.bfloat16))",
    ),
    "arrive 2": (
        "b = tlx.alloc_barriers(1, arrive_count=2)",
        "tlx.barrier_arrive(b[0], 2)",
    ),
    "arrive N": (
        "b = tlx.alloc_barriers(1, arrive_count=N)",
        "tlx.barrier_arrive(b[0], N)",
    ),
    "named bool": ("tlx.named_barrier_wait(True, 128)",),
    "named cnt bool": ("tlx.named_barrier_arrive(9, True)",),
    "named i64": ("tlx.named_barrier_arrive(n.to(tl.int64), 128)",),
    "named cnt i16": ("tlx.named_barrier_arrive(9, n.to(tl.int16))",),
    "tmem 32 rows": (
        "t = tlx.local_alloc((32, N), tl.float32, 1, tlx.storage_kind.tmem)",
        "tlx.local_store(t[0], tl.zeros((32,N), tl.float32))",
    ),
    "tmem 256 rows": ("t = tlx.local_alloc((256, N), tl.bfloat16, 1, tlx.storage_kind.tmem)",),
    "tmem trans": (
        "t = tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem)",
        "v = tlx.local_load(tlx.local_trans(t[0]))",
    ),
    "tmem trans store": (
        "t = tlx.local_alloc((64, N), tl.bfloat16, 1, tlx.storage_kind.tmem)",
        "tlx.local_store(tlx.local_trans(t[0]), tl.zeros((N,64), tl.bfloat16))",
    ),
    "scales load": (
        "t = tlx.local_alloc((128, 4), tl.uint8, 1, tlx.storage_kind.tmem)",
        "v = tlx.local_load(t[0])",
        "tl.store(o + tl.arange(0, 128)[:, None] * 4 + tl.arange(0, 4)[None, :], v)",
    ),
    "arrive rank none": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], 1, None)",
    ),
    "arrive pred none": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_arrive(b[0], 1, pred=None)",
    ),
    "wait pred none": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_wait(b[0], 1, pred=None)",
    ),
    "expect pred none": (
        "b = tlx.alloc_barriers(1)",
        "tlx.barrier_expect_bytes(b[0], 0, None)",
    ),
    "prefetch pred none": (
        "d = tl.make_tensor_descriptor(x, [N, N], [N, 1], [64, 64])",
        "tlx.async_descriptor_prefetch_tensor(d, [0, 0], None)",
    ),
    "commit none": ("tlx.async_load_commit_group(None)",),
    "commit of none": ("tlx.async_load_commit_group([None])",),
    "wait group none": ("tlx.async_load_wait_group(0, None)",),
    **{
        f"product {extra}": (
            "a = tlx.local_alloc((64, 64), tl.float16, 1)",
            "c = tlx.local_alloc((64, 64), tl.float32, 1, tlx.storage_kind.tmem)",
            "tlx.local_store(a[0], tl.zeros((64, 64), tl.float16))",
            f"tlx.async_dot(a[0], a[0], c[0], use_acc=False, {extra})",
        )
        for extra in ("pred=None", "pred=n > 1", "mBarriers=[]")
    },
    **{
        f"tasks {number}": ("with tlx.async_tasks():", *("    " + line for line in body))
        for number, body in enumerate(_REGIONS)
    },
}
