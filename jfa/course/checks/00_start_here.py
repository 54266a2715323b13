"""Checks of chapter 00: small exercises, in which only the workflow is new."""

import random

import torch

from jfa.course.spec import Case, Exercise, Limit, Mutant, Output


def _length_cases(seed):
    """Return lists of lengths, an empty one among them; the numbers depend on the seed, how many there are does not."""
    rng = random.Random(seed)

    def draw(n, low=1):
        return [rng.randint(low, 40) for _ in range(n)]

    return [
        Case("a batch without sequences", ([],)),
        Case("one sequence", (draw(1),)),
        Case("five sequences", (draw(5),)),
        Case("an empty sequence in the middle", ([*draw(2), 0, *draw(2)],)),
        Case("two hundred sequences", (draw(200, 0),)),
    ]


def _weight_cases(seed):
    g = torch.Generator().manual_seed(seed)
    sizes = (("two rows", 2), ("five rows", 5), ("two hundred rows", 200))
    return [Case(name, (torch.rand(n, n, generator=g) + 0.1,)) for name, n in sizes]


def _where():
    return 3, 1


EXERCISES = [
    Exercise(
        id="0.1",
        title="Edit and check",
        name="count_tokens",
        cases=_length_cases,
        reference=lambda lengths: sum(lengths),
        outputs=(Output("number of tokens"),),
        difficulty=1,
        minutes=5,
        hints=(
            "Each length counts the tokens of one sequence. The batch holds them all.",
            "Python's built-in sum adds the numbers of a list: return sum(lengths).",
        ),
        mutants=(
            Mutant(
                "counts sequences",
                "This is the number of sequences. Each of them holds several tokens.",
                edit=("sum(lengths)", "len(lengths)"),
            ),
            Mutant(
                "the longest only",
                "This is the length of the longest sequence, not of all together.",
                edit=("sum(lengths)", "max(lengths, default=0)"),
            ),
            Mutant(
                "forgets the last sequence",
                "The last sequence is not counted.",
                edit=("sum(lengths)", "sum(lengths[:-1])"),
            ),
            Mutant(
                "counts padding",
                "This counts the places of the padded batch: every sequence as if it were as long as the longest.",
                edit=("sum(lengths)", "len(lengths) * max(lengths, default=0)"),
            ),
            Mutant(
                "prints instead of returning",
                "The number is printed, not returned.",
                caught_by="returns",
                edit=("return sum(lengths)", "print(sum(lengths))"),
                expect="None",
            ),
        ),
        variants=(
            """
def count_tokens(lengths):
    total = 0
    for n in lengths:
        total += n
    return total
""",
            """
def count_tokens(lengths):
    return lengths[0] + count_tokens(lengths[1:]) if lengths else 0
""",
        ),
    ),
    Exercise(
        id="0.2",
        title="Read a report",
        name="longest",
        cases=_length_cases,
        reference=lambda lengths: max(lengths, default=0),
        outputs=(Output("longest length"),),
        difficulty=1,
        minutes=5,
        hints=(
            "The report names the case that fails. What does max() do with a list that holds nothing?",
            "max() can be told what to return for an empty list: look at help(max).",
            "return max(lengths, default=0)",
        ),
        mutants=(
            Mutant(
                "no answer for an empty batch",
                "max() of an empty list raises.",
                caught_by="runs",
                edit=("max(lengths, default=0)", "max(lengths)"),
                expect="ValueError",
            ),
            Mutant(
                "the shortest",
                "This is the shortest sequence, not the longest.",
                edit=("max(lengths, default=0)", "min(lengths, default=0)"),
            ),
            Mutant(
                "the first one",
                "This is the first sequence's length. The longest may stand anywhere.",
                edit=("max(lengths, default=0)", "lengths[0] if lengths else 0"),
            ),
            Mutant(
                "where instead of how long",
                "This is the position of the longest sequence in the list, not its length.",
                edit=("max(lengths, default=0)", "lengths.index(max(lengths)) if lengths else 0"),
            ),
            Mutant(
                "sorts the caller's list",
                "lengths.sort() changes the list that the caller still needs.",
                caught_by="inputs kept",
                edit=("return max(lengths, default=0)", "lengths.sort()\n    return lengths[-1] if lengths else 0"),
                expect="lengths",
            ),
        ),
        variants=(
            """
def longest(lengths):
    best = 0
    for n in lengths:
        if n > best:
            best = n
    return best
""",
            """
def longest(lengths):
    if not lengths:
        return 0
    return sorted(lengths)[-1]
""",
        ),
    ),
    Exercise(
        id="0.3",
        title="Right answer, wrong method",
        name="shares",
        cases=_weight_cases,
        reference=lambda weights: weights / weights.sum(1, keepdim=True),
        outputs=(Output("shares", ("row", "column")),),
        difficulty=1,
        minutes=5,
        hints=(
            "weights.sum(dim=...) sums all rows, or all columns, at once. Which of the two is one number per row?",
            "weights.sum(dim=1) has shape [n]. To divide row by row it must have shape [n, 1]: look at keepdim.",
            "return weights / weights.sum(dim=1, keepdim=True)",
        ),
        limits=(Limit("no loop over rows", "ops", at_most=6, text="at most 6 torch operations"),),
        mutants=(
            Mutant(
                "a loop over the rows",
                "Right, with a few operations for each row.",
                caught_by="no loop over rows",
                edit=(
                    "return weights / weights.sum(dim=1, keepdim=True)",
                    "return torch.stack([row / row.sum() for row in weights])",
                ),
                expect="the limit is 6",
            ),
            Mutant(
                "a loop in NumPy",
                "Right, with a few NumPy operations for each row. They count as torch's do.",
                caught_by="no loop over rows",
                source="""
import torch


def shares(weights):
    rows = weights.numpy().copy()
    for i in range(len(rows)):
        rows[i] /= rows[i].sum()
    return torch.from_numpy(rows)
""",
                expect="the limit is 6",
            ),
            Mutant(
                "Python lists",
                "Right, with every number taken out of torch and divided by itself.",
                caught_by="no loop over rows",
                source="""
import torch


def shares(weights):
    return torch.tensor([[x / sum(row) for x in row] for row in weights.tolist()])
""",
                expect="the limit is 6",
            ),
            Mutant(
                "columns instead of rows",
                "Every column sums to 1, not every row.",
                edit=("dim=1", "dim=0"),
            ),
            Mutant(
                "one sum for everything",
                "Everything was divided by the sum of the whole tensor. Each row has a sum of its own.",
                edit=("weights.sum(dim=1, keepdim=True)", "weights.sum()"),
            ),
            Mutant(
                "row sums laid along the columns",
                "The right sums, laid along the wrong axis: a tensor of shape [n] counts as one row. Each column "
                "was divided by a row's sum.",
                edit=("dim=1, keepdim=True", "dim=1"),
            ),
            Mutant(
                "changes its input",
                "/= changes the caller's tensor.",
                caught_by="inputs kept",
                edit=(
                    "return weights / weights.sum(dim=1, keepdim=True)",
                    "weights /= weights.sum(dim=1, keepdim=True)\n    return weights.clone()",
                ),
                expect="weights",
            ),
        ),
        variants=(
            """
def shares(weights):
    return weights * (1 / weights.sum(1))[:, None]
""",
            """
import torch


def shares(weights):
    return torch.nn.functional.normalize(weights, p=1, dim=1)
""",
            """
import torch


def shares(weights):
    return torch.einsum("ij,i->ij", weights, 1 / torch.einsum("ij->i", weights))
""",
        ),
    ),
    Exercise(
        id="0.4",
        title="A value, and a round trip",
        name="where",
        kind="value",
        cases=lambda seed: [Case("row 30")],
        reference=_where,
        outputs=(Output("sequence"), Output("position")),
        difficulty=1,
        minutes=10,
        hints=(
            "Write down the row at which each sequence begins: 0, 7, 10, ...",
            "The sequences begin at rows 0, 7, 10, 29 and 34. Row 30 belongs to the last one that begins at or "
            "before it; "
            "its position is how far it lies behind that beginning.",
        ),
        mutants=(
            Mutant(
                "sequences counted from one",
                "The position is right, but sequences count from 0.",
                edit=("where = (sequence,", "where = (sequence + 1,"),
            ),
            Mutant(
                "positions counted from one",
                "The sequence is right, but positions count from 0: the first token of a sequence has position 0.",
                edit=("row - starts[sequence])", "row - starts[sequence] + 1)"),
            ),
            Mutant(
                "one sequence early",
                "Row 30 lies past the end of that sequence: its last row is the one before the next sequence's first.",
                source="where = (2, 20)\n",
            ),
            Mutant(
                "the pair swapped",
                "The two numbers are right, in the wrong order: first the sequence, then the position.",
                edit=("where = (sequence, row - starts[sequence])", "where = (row - starts[sequence], sequence)"),
            ),
            Mutant(
                "the row itself",
                "The position is counted inside the sequence, not in the whole tensor.",
                edit=("row - starts[sequence])", "row)"),
            ),
        ),
        variants=(
            "where = (3, 1)\n",
            """
lengths = [7, 3, 19, 5, 11]
sequence, position = 0, 30
while position >= lengths[sequence]:
    position -= lengths[sequence]
    sequence += 1
where = (sequence, position)
""",
        ),
    ),
]
