# ruff: noqa: E501  the answers of a test chapter, quoted whole
"""Kernels for the engine's own tests."""

import torch

from jfa.course.spec import Case, Exercise, Limit, Mutant, Output


def _cases(seed):
    g = torch.Generator().manual_seed(seed)
    return [Case(f"{n} elements", (torch.randn(n, generator=g),)) for n in (5, 40)]


def _launch(kernel, x):
    import torch

    out = torch.full_like(x, float("nan"))
    n = x.numel()
    kernel[((n + 15) // 16,)](x, out, n, BLOCK=16)
    return out


def _even_cases(seed):
    return [Case("16 elements", (torch.randn(16, generator=torch.Generator().manual_seed(seed)),))]


def _sum_launch(kernel, x):
    import torch

    out = torch.zeros(1)
    kernel[(x.numel() // 4,)](x, out, BLOCK=4)
    return out


def _sum_cases(seed):
    g = torch.Generator().manual_seed(seed)
    return [Case(f"{n} elements", (torch.randn(n, generator=g),)) for n in (4, 256)]


EXERCISES = [
    Exercise(
        id="91.1",
        title="Twice, in tiles",
        name="twice_kernel",
        kind="kernel",
        call=_launch,
        cases=_cases,
        reference=lambda x: 2 * x,
        outputs=(Output("out", ("row",)),),
        hints=("Load.", "Store."),
        limits=(
            Limit("tiled", "peak_tile", at_most=16, text="No block larger than 16 elements"),
            Limit("few loads", "loads", at_most=3, text="at most 3 loads"),
        ),
        mutants=(
            Mutant("three times", "Three times the input.", edit=("2 * x", "3 * x")),
            Mutant(
                "forgets the last tile",
                "-",
                caught_by="returns",
                edit=("inside = rows < n", "inside = rows < n - 1"),
                recognise=False,
                expect="NaN",
            ),
            Mutant(
                "no mask",
                "-",
                caught_by="runs",
                edit=("tl.load(x_ptr + rows, mask=inside, other=0.0)", "tl.load(x_ptr + rows)"),
                expect="x_ptr",
            ),
            Mutant(
                "loads twice",
                "-",
                caught_by="few loads",
                edit=("    tl.store(", "    x += 0 * tl.load(x_ptr + rows, mask=inside, other=0.0)\n    tl.store("),
                expect="6 loads",
            ),
            Mutant(
                "one big tile",
                "-",
                caught_by="tiled",
                edit=("    tl.store(", "    y = tl.zeros([64], tl.float32)\n    x += tl.sum(y)\n    tl.store("),
                expect="64 elements",
            ),
        ),
        variants=(
            "@triton.jit\ndef twice_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):\n    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    x = tl.load(x_ptr + rows, mask=rows < n, other=0.0)\n    tl.store(out_ptr + rows, x + x, mask=rows < n)\n",
            "FACTOR: tl.constexpr = tl.constexpr(2)\n\n@triton.jit\ndef double(x):\n    return x * FACTOR\n\n@triton.jit\ndef twice_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):\n    start = tl.program_id(0) * BLOCK\n    for half in range(1):\n        rows = start + tl.arange(0, BLOCK)\n        keep = rows < n\n        tl.store(out_ptr + rows, double(tl.load(x_ptr + rows, keep, 0.0)), keep)\n",
        ),
        time_limit=20.0,
    ),
    Exercise(
        id="91.2",
        title="A host function that launches",
        name="copied",
        where="emulator",
        cases=_even_cases,
        reference=lambda x: x.clone(),
        outputs=(Output("out", ("row",)),),
        hints=("Allocate.", "Launch."),
        mutants=(
            Mutant(
                "never launches",
                "-",
                caught_by="values",
                source="import torch\ndef copied(x):\n    return torch.zeros_like(x)\n",
                recognise=False,
                expect="row",
            ),
            Mutant(
                "copies half",
                "-",
                caught_by="returns",
                edit=(
                    ("torch.empty_like(x)", "torch.full_like(x, float('nan'))"),
                    ("BLOCK=x.numel()", "BLOCK=x.numel() // 2"),
                ),
                expect="NaN",
            ),
            Mutant("returns the input", "-", caught_by="returns", edit=("return out", "return x"), expect="view"),
            Mutant("no grid", "-", caught_by="runs", edit=("_copy[(1,)](", "_copy("), expect="RuntimeError"),
        ),
        variants=(
            "@triton.jit\ndef k(x_ptr, out_ptr):\n    i = tl.program_id(0)\n    tl.store(out_ptr + i, tl.load(x_ptr + i))\n\ndef copied(x):\n    import torch\n    out = torch.zeros_like(x)\n    k[(x.numel(),)](x, out)\n    return out\n",
            "@triton.jit\ndef k(x_ptr, out_ptr, N: tl.constexpr):\n    i = tl.arange(0, N)\n    tl.store(out_ptr + i, tl.load(x_ptr + i))\n\ndef copied(x):\n    import torch\n    out = torch.zeros_like(x)\n    k[1,](x, out, x.numel())\n    return out\n",
        ),
        time_limit=20.0,
    ),
    Exercise(
        id="91.3",
        title="A sum that is the same whatever comes first",
        name="sum_kernel",
        kind="kernel",
        call=_sum_launch,
        cases=_sum_cases,
        reference=lambda x: x.sum()[None],
        outputs=(Output("sum", ("row",)),),
        hints=("One program.", "A loop."),
        schedules=(("lazy", 1), ("random", 1), ("random", 2)),
        mutants=(
            Mutant(
                "everybody adds",
                "-",
                caught_by="same bits",
                source="@triton.jit\ndef sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):\n    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + rows), 0))\n",
                expect="in another order",
            ),
            Mutant("doubles", "Twice the sum.", edit=("tl.store(out_ptr, total)", "tl.store(out_ptr, 2 * total)")),
        ),
        time_limit=20.0,
    ),
]
