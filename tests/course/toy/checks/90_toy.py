# ruff: noqa: E501  the answers of a test chapter, quoted whole
"""A chapter for the engine's own tests."""

import torch

from jfa.course.spec import Case, Exercise, Limit, Mutant, Output, Property

OFFSETS = ((0, 2, 5), (0, 3, 3, 7))


def _cases(seed):
    g = torch.Generator().manual_seed(seed)
    return [Case(f"{len(o) - 1} sequences", (torch.randn(o[-1], 4, generator=g), list(o)), offsets=o) for o in OFFSETS]


def _means(x, offsets):
    lengths = torch.tensor([b - a for a, b in zip(offsets, offsets[1:])])
    parts = [x[a:b].sum(0) / max(b - a, 1) for a, b in zip(offsets, offsets[1:])]
    return torch.stack(parts), lengths


def _twice_cases(seed):
    g = torch.Generator().manual_seed(seed)
    return [
        Case("three tokens in two sequences", (torch.randn(3, 2, 4, generator=g),), offsets=(0, 1, 3)),
        Case("an empty sequence in the middle", (torch.randn(7, 2, 4, generator=g),), offsets=(0, 3, 3, 7)),
    ]


def _refusals(seed):
    start = 3 + seed % 7
    return [
        Case("two sequences", ([0, start, start + 4],)),
        Case("decreasing offsets", ([0, 5, 3],), raises="ValueError", mentions="offsets"),
    ]


EXERCISES = [
    Exercise(
        id="90.1",
        title="Means of packed sequences",
        name="row_means",
        cases=_cases,
        reference=_means,
        outputs=(Output("means", ("sequence", "dim")), Output("lengths", ("sequence",), dtype="int64")),
        hints=("Slice.", "Divide by the length."),
        forbid=("softmax", "numpy", "nested"),
        limits=(Limit("small tensors", "peak_numel", at_most=64, text="no tensor larger than 64 elements"),),
        properties=(
            Property("lengths add up", lambda case, r: None if int(r[1].sum()) == case.offsets[-1] else "They do not."),
        ),
        mutants=(
            Mutant(
                "forgets to divide", "The sums are not divided by the lengths.", edit=(" / max(int(lengths[b]), 1)", "")
            ),
            Mutant(
                "off by one",
                "Each sequence's last row is left out.",
                edit=("x[offsets[b] : offsets[b + 1]]", "x[offsets[b] : offsets[b + 1] - 1]"),
            ),
            Mutant(
                "int32",
                "-",
                caught_by="returns",
                edit=("return means, lengths", "return means, lengths.int()"),
                expect="int64",
            ),
            Mutant(
                "big",
                "-",
                caught_by="small tensors",
                edit=("    return means", "    torch.zeros(65)\n    return means"),
                expect="65 elements",
            ),
        ),
        variants=(
            """
def row_means(x, offsets):
    means, lengths = [], []
    for a, b in zip(offsets, offsets[1:]):
        lengths.append(b - a)
        means.append(x[a:b].mean(0) if b > a else torch.zeros(x.shape[1]))
    return torch.stack(means), torch.tensor(lengths)
""",
            """
def row_means(x, offsets):
    total = torch.cat([torch.zeros(1, x.shape[1], dtype=torch.float64), x.double().cumsum(0)])
    o = torch.tensor(offsets)
    lengths = o.diff()
    return [(total[o[1:]] - total[o[:-1]]) / lengths.clamp(min=1)[:, None], lengths]
""",
        ),
    ),
    Exercise(
        id="90.2",
        title="Twice",
        name="twice",
        cases=_twice_cases,
        reference=lambda x: 2 * x,
        outputs=(Output("out", ("token", "head", "dim")),),
        hints=("Multiply.", "x * 2"),
        time_limit=2.0,
        memory_mb=256,
        mutants=(
            Mutant("three times", "It is three times the input.", edit=("factor = 2", "factor = 3")),
            Mutant("plus", "Two is added.", edit=("x * factor", "x + factor")),
            Mutant("halves", "It is half of the input.", edit=("x * factor", "x / factor")),
            Mutant("view", "-", caught_by="returns", edit=("x * factor", "x"), expect="view"),
        ),
        variants=(
            "def twice(x):\n    return x + x\n",
            "def twice(x):\n    return (2 * x.double()).transpose(0, 1).contiguous().transpose(0, 1)\n",
        ),
    ),
    Exercise(
        id="90.3",
        title="A value",
        name="answer",
        kind="value",
        cases=lambda seed: [Case("the value")],
        reference=lambda: 42,
        hints=("A number.", "Forty-two."),
        mutants=tuple(Mutant(f"is {n}", f"{n} is only a part of it.", source=f"answer = {n}\n") for n in (1, 2, 3))
        + (Mutant("text", "-", caught_by="returns", source="answer = '42'\n", expect="a string"),),
        variants=("answer = 6 * 7\n", "answer = 40\nanswer += 2\n"),
    ),
    Exercise(
        id="90.4",
        title="Refuse bad offsets",
        name="lengths_of",
        cases=_refusals,
        reference=lambda offsets: [b - a for a, b in zip(offsets, offsets[1:])],
        hints=("Compare neighbours.", "Raise ValueError that names the offsets."),
        mutants=(
            Mutant("never refuses", "-", edit=("b < a for", "False for"), recognise=False, expect="must be refused"),
            Mutant(
                "wrong exception",
                "-",
                edit=("raise ValueError", "raise TypeError"),
                recognise=False,
                expect="TypeError",
            ),
            Mutant(
                "says nothing",
                "-",
                edit=('"offsets must not decrease"', '"no"'),
                recognise=False,
                expect="must name `offsets`",
            ),
            Mutant(
                "reverses the caller's list",
                "-",
                caught_by="inputs kept",
                edit=("    return [b - a", "    offsets.reverse()\n    offsets = offsets[::-1]\n    return [b - a"),
                expect="`offsets`",
            ),
            Mutant(
                "one length too few",
                "The last length is missing.",
                caught_by="returns",
                edit=(
                    "return [b - a for a, b in zip(offsets, offsets[1:])]",
                    "return [b - a for a, b in zip(offsets, offsets[1:-1])]",
                ),
                expect="list of 2",
            ),
        ),
        variants=(
            "def lengths_of(offsets):\n    lengths = [offsets[i + 1] - offsets[i] for i in range(len(offsets) - 1)]\n    if min(lengths) < 0:\n        raise ValueError(f'bad offsets {offsets}')\n    return lengths\n",
            "def lengths_of(offsets):\n    assert offsets\n    out = []\n    for i, o in enumerate(offsets[1:]):\n        if o < offsets[i]:\n            raise ValueError('offsets')\n        out.append(o - offsets[i])\n    return tuple(out)\n",
        ),
    ),
]
