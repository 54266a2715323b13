"""Checks of chapter 01: offsets, rows and their owners, padding, waste, and attention on padded data."""

import random

import torch

from jfa.course import kinds
from jfa.course.kinds import RAGGED
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output, Property


def _offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def _dtype_kept(case, result):
    """Check that the values of the result have the dtype of the values given."""
    values = result[0] if isinstance(result, tuple) else result
    wanted = case.args[0].dtype
    return (
        None
        if values.dtype == wanted
        else f"The values came as {wanted} and went as {values.dtype}: the dtype must stay."
    )


DTYPE_KEPT = Property("dtype kept", _dtype_kept)


def _numbers_kept(moved):
    """Return a property: values are moved, so each bit of them stays. ``moved`` is the reference, run in the values' own dtype."""

    def test(case, result):
        values = result[0] if isinstance(result, tuple) else result
        want = moved(*case.args)
        want = want[0] if isinstance(want, tuple) else want
        if values.dtype != want.dtype or values.shape != want.shape or torch.equal(_bits(values), _bits(want)):
            return None  # another dtype or shape has a sentence of its own
        if bool(((values == want) | ((values != values) & (want != want))).all()):
            return "Some values came out with other bits (0.0 where -0.0 was, or another NaN): move them as they are."
        return f"Some values came out rounded. {str(want.dtype)[6:]} holds them exactly: move them as they are."

    return Property("numbers kept", test)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(values):
    """Return values as integers of their width, so -0.0 differs from 0.0 and a NaN equals itself."""
    return values.contiguous().view(_INTEGERS[values.element_size()])


def _with_odd_bits(values):
    """Put -0.0, NaN and both infinities among the values, in place; return them."""
    odd = torch.tensor([-0.0, torch.nan, -0.0, torch.inf, -torch.inf], dtype=values.dtype)
    values.view(-1)[::2] = odd.repeat(values.numel())[: (values.numel() + 1) // 2]
    return values


def _typed(dtype, rows, columns, g):
    """Return numbers of a dtype that use all of its bits."""
    if dtype.is_floating_point:
        return torch.randn(rows, columns, generator=g, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**62), 2**62, (rows, columns), generator=g)


# ------------------------------------------------------------------------------------------------------------ 1.1
def _length_cases(seed):
    g = _generator(seed)

    def draw(n, low=1):
        return torch.randint(low, 50, (n,), generator=g)

    return [
        Case("one sequence", (draw(1),)),
        Case("three sequences", (draw(3),)),
        Case(
            "empty sequences first, in the middle and last",
            (torch.cat([x for n in draw(2) for x in (n[None] * 0, n[None])] + [draw(1) * 0]),),
        ),
        Case("a batch without sequences", (draw(0),)),
        Case("two hundred sequences", (draw(200, 0),)),
        Case("sums beyond 2**24", (torch.tensor(kinds.LARGE_COUNTS) + draw(len(kinds.LARGE_COUNTS)),)),
    ]


def _offsets_reference(lengths):
    return _offsets(lengths.tolist())


_OFFSETS = Exercise(
    id="1.1",
    title="Offsets from lengths",
    name="offsets_from_lengths",
    cases=_length_cases,
    reference=_offsets_reference,
    outputs=(Output("offsets", ("entry",), dtype="int32"),),
    difficulty=1,
    minutes=10,
    hints=(
        "Sequence b begins where all sequences before it have ended. What sum is that?",
        "torch.cumsum gives the running sum, which is where each sequence *ends*. One entry is missing at the front.",
        "Make B+1 zeros of dtype torch.int32 and write torch.cumsum(lengths, 0) into all but the first.",
    ),
    forbid=("jfa.layout", "nested"),
    mutants=(
        Mutant(
            "summed in fp32",
            "The running sum was made in fp32, which knows no odd numbers beyond 2**24 (16 million).",
            edit=("torch.cumsum(lengths, 0)", "torch.cumsum(lengths.float(), 0)"),
        ),
        Mutant(
            "summed in int16",
            "The running sum was made in int16 and overflowed.",
            edit=("torch.cumsum(lengths, 0)", "torch.cumsum(lengths, 0, dtype=torch.int16)"),
        ),
        Mutant(
            "lengths as they are",
            "These are the lengths behind a 0. An offset is the sum of all lengths before it.",
            edit=("torch.cumsum(lengths, 0)", "lengths"),
        ),
        Mutant(
            "the sum one place too early",
            "The running sums stand one place too early: the 0 belongs in front of them.",
            edit=("offsets[1:] =", "offsets[:-1] ="),
        ),
        Mutant(
            "the 0 is missing",
            "B entries: the ends of the sequences without the 0 where the first begins.",
            caught_by="returns",
            edit=("return offsets", "return offsets[1:].clone()"),
            expect="shape",
        ),
        Mutant(
            "int64",
            "The running sum of int64 lengths is int64.",
            caught_by="returns",
            edit=("dtype=torch.int32", "dtype=torch.int64"),
            expect="int32",
        ),
        Mutant(
            "sums in place",
            "The lengths of the caller are overwritten.",
            caught_by="inputs kept",
            edit=("torch.cumsum(lengths, 0)", "lengths.cumsum_(0)"),
            expect="lengths",
        ),
        Mutant(
            "leaves out empty sequences",
            "Empty sequences were dropped, but they keep their entry: two equal offsets in a row.",
            caught_by="returns",
            edit=("offsets = torch", "lengths = lengths[lengths > 0]\n    offsets = torch"),
            expect="shape",
        ),
    ),
    variants=(
        """
def offsets_from_lengths(lengths):
    first = torch.zeros(1, dtype=torch.int64)
    return torch.cumsum(torch.cat([first, lengths]), 0).to(torch.int32)
""",
        """
def offsets_from_lengths(lengths):
    ends, total = [0], 0
    for n in lengths.tolist():
        total += n
        ends.append(total)
    return torch.tensor(ends, dtype=torch.int32)
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 1.2
def _offset_cases(seed):
    g = _generator(seed)

    def draw(n):
        return torch.randint(1, 9, (n,), generator=g).tolist()

    a, b, c = draw(3)
    shapes = [
        ("two sequences", [3, 2]),
        ("an empty sequence in the middle", [2, 0, 3]),
        ("empty ones at both ends", [0, a, 0, 0, b, c, 0]),
    ]
    shapes += [("a long one among short ones", RAGGED), ("one of 200", [4, 200, 1])]
    shapes += [("three hundred sequences", [(3 * b) % 4 for b in range(300)])]
    cases = [Case(name, (_offsets(x),)) for name, x in shapes]
    return [*cases, Case("no tokens at all", (_offsets([0, 0]),))]


def _locate_reference(offsets):
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    sequence = [b for b, n in enumerate(lengths) for _ in range(n)]
    position = [i for n in lengths for i in range(n)]
    return torch.tensor(sequence, dtype=torch.int64), torch.tensor(position, dtype=torch.int64)


_LOCATE = Exercise(
    id="1.2",
    title="Whose row is it?",
    name="locate_rows",
    cases=_offset_cases,
    reference=_locate_reference,
    outputs=(Output("sequence", ("row",)), Output("position", ("row",))),
    difficulty=2,
    minutes=15,
    hints=(
        "Row r belongs to the sequence whose beginning is at or before r and whose end is after r. How many "
        "sequences have ended by then?",
        "offsets[1:] are the ends, sorted. torch.searchsorted counts how many of them are <= r, if you tell it "
        "which side.",
        "sequence = torch.searchsorted(offsets[1:], rows, right=True), and position = rows - offsets[sequence].",
    ),
    forbid=("jfa.layout", "nested"),
    mutants=(
        Mutant(
            "first row given to the sequence before",
            "The first row of a sequence is counted to the one before. An end is one past a sequence's last row.",
            edit=("right=True", "right=False"),
        ),
        Mutant(
            "sequences counted from one",
            "The sequences are numbered from 1.",
            edit=("offsets[1:], rows, right=True)", "offsets, rows, right=True)"),
        ),
        Mutant(
            "position in the whole tensor",
            "The position is the row's number in the whole tensor. It should start at 0 in each sequence.",
            edit=("rows - offsets[sequence]", "rows.clone()"),
        ),
        Mutant(
            "counts back from the end",
            "The position is counted from the end of the sequence.",
            edit=("rows - offsets[sequence]", "offsets[sequence + 1] - 1 - rows"),
        ),
        Mutant(
            "empty sequences lose their number",
            "Empty sequences were skipped in the numbering. They own no row, but the sequence behind one keeps its "
            "own number.",
            source="""
def locate_rows(offsets):
    offsets = torch.unique(offsets)
    rows = torch.arange(int(offsets[-1]))
    sequence = torch.searchsorted(offsets[1:], rows, right=True)
    return sequence, rows - offsets[sequence]
""",
        ),
        Mutant(
            "sequence numbers in 8 bits",
            "The sequences' numbers were kept in 8 bits: from 128 on they are wrong.",
            edit=("return sequence, position", "return sequence.to(torch.int8), position"),
        ),
    ),
    variants=(
        """
def locate_rows(offsets):
    lengths = offsets.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return sequence, torch.arange(len(sequence)) - offsets[:-1][sequence]
""",
        """
def locate_rows(offsets):
    bounds = offsets.tolist()
    sequence, position = [], []
    for b, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        for r in range(start, end):
            sequence.append(b)
            position.append(r - start)
    return torch.tensor(sequence, dtype=torch.int64), torch.tensor(position, dtype=torch.int64)
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 1.3
def _packed_cases(seed):
    g = _generator(seed)

    def packed(lengths, dim):
        return torch.randn(sum(lengths), dim, generator=g), _offsets(lengths)

    def typed(dtype, fill):
        values = _typed(dtype, 7, 3, g)
        return Case(f"values of {str(dtype).removeprefix('torch.')}", (values, _offsets([2, 0, 5]), fill))

    wild, bounds = packed([4, 2, 5], 3)
    return [
        Case("two sequences, free places 0", (*packed([3, 1], 2), 0.0)),
        Case("free places -1", (*packed([1, 4, 2], 3), -1.0)),
        Case("an empty sequence first", (*packed([0, 3, 2], 4), 0.5)),
        Case("a long one among short ones", (*packed(RAGGED, 4), 7.0)),
        Case("one of 200, last", (*packed([3, 0, 200], 2), -2.0)),
        Case(
            "zeros among the values",
            (*(f(x) for f, x in zip((kinds.with_true_zeros, lambda x: x), packed([1, 4, 2], 3))), 9.0),
        ),
        Case("a neighbor of NaN and infinities", (kinds.poison(wild, slice(4, 6)), bounds, 1.0)),
        *(typed(dtype, 7) for dtype in kinds.DTYPES),
        Case("all sequences of one length", (*packed([4, 4, 4], 3), 2.0)),
        Case("only empty sequences", (*packed([0, 0], 3), 1.0)),
        Case(
            "-0.0, NaN and infinities among the values", (_with_odd_bits(packed([3, 2], 3)[0]), _offsets([3, 2]), 2.0)
        ),
    ]


def _pad_reference(values, offsets, fill):
    bounds = offsets.tolist()
    parts = [values[a:b] for a, b in zip(bounds[:-1], bounds[1:])]
    longest = max(len(p) for p in parts)
    return torch.stack(
        [torch.cat([p, torch.full((longest - len(p), values.shape[1]), fill, dtype=values.dtype)]) for p in parts]
    )


_PAD = Exercise(
    id="1.3",
    title="From packed to padded",
    name="to_padded",
    cases=_packed_cases,
    reference=_pad_reference,
    outputs=(Output("padded", ("sequence", "position", "dim")),),
    properties=(DTYPE_KEPT, _numbers_kept(_pad_reference)),
    difficulty=2,
    minutes=15,
    hints=(
        "Start with a rectangle of the right size in which every place holds fill. Then copy one sequence after "
        "another.",
        "Sequence b is values[offsets[b]:offsets[b + 1]]; it goes to the first places of line b.",
        "padded = values.new_full((B, longest, D), fill), then padded[b, :n] = values[offsets[b]:offsets[b] + n] "
        "for each b.",
    ),
    forbid=("jfa.layout", "nested"),
    mutants=(
        Mutant(
            "free places are 0",
            "The free places hold 0 instead of fill.",
            edit=("values.shape[1]), fill)", "values.shape[1]), 0)"),
        ),
        Mutant(
            "every sequence from row 0",
            "Every line holds the first rows of the tensor: the sequence's own beginning was not added.",
            edit=("values[offsets[b] : offsets[b + 1]]", "values[: lengths[b]]"),
        ),
        Mutant(
            "moved to the end of the line",
            "The sequences stand at the end of their lines. They should begin at position 0.",
            edit=("padded[b, : lengths[b]]", "padded[b, len(padded[b]) - lengths[b] :]"),
        ),
        Mutant(
            "free places hold the neighbor",
            "Behind the end of a sequence the line goes on with the next sequence's rows.",
            source="""
def to_padded(values, offsets, fill):
    longest = int(offsets.diff().max())
    rows = offsets[:-1, None] + torch.arange(longest)
    return values[rows.clamp(max=len(values) - 1)]
""",
        ),
        Mutant(
            "multiplied by a mask",
            "Free places are NaN where the neighbor is: a product with 0 does not remove NaN.",
            caught_by="returns",
            source="""
def to_padded(values, offsets, fill):
    lengths = offsets.diff()
    place = torch.arange(int(lengths.max()))
    inside = (place < lengths[:, None])[:, :, None]
    rows = (offsets[:-1, None] + place).clamp(max=len(values) - 1)
    return (values[rows] * inside + fill * ~inside).to(values.dtype)
""",
            expect="NaN",
        ),
        Mutant(
            "a true zero becomes fill",
            "Zeros among the values were taken for free places.",
            source="""
def to_padded(values, offsets, fill):
    lengths = offsets.diff()
    padded = values.new_zeros(len(lengths), int(lengths.max()), values.shape[1])
    padded[torch.arange(padded.shape[1]) < lengths[:, None]] = values
    return torch.where(padded == 0, torch.tensor(fill, dtype=values.dtype), padded)
""",
        ),
        Mutant(
            "always fp32",
            "The rectangle is fp32 whatever the values are.",
            caught_by="dtype kept",
            edit=(
                "values.new_full((len(lengths), int(lengths.max()), values.shape[1]), fill)",
                "torch.full((len(lengths), int(lengths.max()), values.shape[1]), float(fill))",
            ),
            expect="the dtype must stay",
        ),
        Mutant(
            "the last row is missing",
            "The last row of each sequence is missing: offsets[b + 1] is one past the last row already.",
            edit=(
                "padded[b, : lengths[b]] = values[offsets[b] : offsets[b + 1]]",
                "padded[b, : max(lengths[b] - 1, 0)] = values[offsets[b] : max(offsets[b + 1] - 1, offsets[b])]",
            ),
        ),
        Mutant(
            "through fp32",
            "The values went through fp32, which cannot hold all numbers of float64.",
            caught_by="numbers kept",
            edit=(
                "    padded = values.new_full(",
                "    dtype = values.dtype\n    values = values.float().to(dtype) if dtype.is_floating_point else values\n    padded = values.new_full(",
            ),
            expect="rounded",
            recognise=False,
        ),
        Mutant(
            "adds 0",
            "A sum with 0 turned -0.0 into 0.0: the values are to be moved, not computed.",
            caught_by="numbers kept",
            edit=("= values[offsets[b] : offsets[b + 1]]", "= values[offsets[b] : offsets[b + 1]] + 0"),
            expect="other bits",
            recognise=False,
        ),
        Mutant(
            "at least one place",
            "A batch of only empty sequences got a place each: its longest sequence has length 0.",
            caught_by="returns",
            edit=("int(lengths.max())", "max(1, int(lengths.max()))"),
            expect="shape [2, 1, 3] instead of [2, 0, 3]",
            recognise=False,
        ),
        Mutant(
            "a view where all are as long",
            "Where all sequences are equally long, values itself came back in another shape: a result has memory of its own.",
            caught_by="returns",
            edit=(
                "    padded = values.new_full(",
                "    if len(set(lengths.tolist())) == 1:\n        return values.view(len(lengths), -1, values.shape[1])\n    padded = values.new_full(",
            ),
            expect="shares its memory",
            recognise=False,
        ),
    ),
    variants=(
        """
def to_padded(values, offsets, fill):
    lengths = offsets.diff()
    place = torch.arange(int(lengths.max()))
    inside = place < lengths[:, None]
    padded = torch.full((*inside.shape, values.shape[1]), fill, dtype=values.dtype)
    padded[inside] = values
    return padded
""",
        """
def to_padded(values, offsets, fill):
    parts = torch.split(values, offsets.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=fill)
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 1.4
def _cross_cases(seed):
    rng = random.Random(seed)

    def draw(n, low, high):
        return [rng.randint(low, high) for _ in range(n)]

    return [
        Case("two sequences", ([3, 1], [2, 4])),
        Case("ten sequences", (draw(10, 1, 30), draw(10, 1, 200))),
        Case("empty queries and empty keys", ([4, 0, 2, 5], [0, 3, 6, 1])),
        Case("no keys at all", ([4, 2], [0, 0])),
        Case("a batch without sequences", ([], [])),
        Case("one of 200 among short ones", (draw(20, 1, 5) + [200], draw(20, 1, 5) + [200])),
    ]


def _cross_reference(len_q, len_kv):
    places = sum(max(x, default=0) * len(x) for x in (len_q, len_kv))
    scores = len(len_q) * max(len_q, default=0) * max(len_kv, default=0)
    used = sum(len_q) + sum(len_kv)
    pairs = sum(a * b for a, b in zip(len_q, len_kv))
    return (1 - used / places if places else 0.0), (1 - pairs / scores if scores else 0.0)


_WASTE = Exercise(
    id="1.4",
    title="The waste of a cross-attention batch",
    name="cross_waste",
    cases=_cross_cases,
    reference=_cross_reference,
    outputs=(Output("token waste"), Output("pair waste")),
    difficulty=2,
    minutes=15,
    hints=(
        "Waste is 1 - used / computed. Write down both numbers for tokens, then both for pairs.",
        "Pairs that count: sequence b alone has len_q[b] * len_kv[b] of them. Scores computed: B times the product "
        "of the two maxima.",
        "tokens: 1 - (sum(len_q) + sum(len_kv)) / (B * (max_q + max_kv)); pairs: 1 - sum(q * kv) / (B * max_q * "
        "max_kv); "
        "0.0 wherever the denominator is 0.",
    ),
    mutants=(
        Mutant(
            "product of the sums",
            "The pair count multiplies all queries with all keys of the batch. A query only meets the keys of its "
            "own sequence.",
            edit=("sum(q * kv for q, kv in zip(len_q, len_kv))", "sum(len_q) * sum(len_kv) // max(batches, 1)"),
        ),
        Mutant(
            "largest product",
            "The padded score matrix was sized by the sequence with the most pairs. Padding takes the longest "
            "query and the longest "
            "key, which may be in two different sequences.",
            edit=("batches * max_q * max_kv", "batches * max([q * kv for q, kv in zip(len_q, len_kv)], default=0)"),
        ),
        Mutant(
            "one rectangle only",
            "The token waste counts the query rectangle alone.",
            edit=(("batches * (max_q + max_kv)", "batches * max_q"), ("sum(len_q) + sum(len_kv)", "sum(len_q)")),
        ),
        Mutant(
            "used instead of wasted",
            "This is the share that is used, not the share that is wasted.",
            edit=(("(1 - tokens / places", "(tokens / places"), ("(1 - pairs / scores", "(pairs / scores")),
        ),
        Mutant(
            "no answer where nothing is computed",
            "A batch without scores divides by 0.",
            caught_by="runs",
            edit=("(1 - pairs / scores if scores else 0.0)", "1 - pairs / scores"),
            expect="ZeroDivisionError",
        ),
        Mutant(
            "self-attention's formula",
            "The pair waste is computed from the queries' lengths alone, as in self-attention.",
            edit=(("sum(q * kv for", "sum(q * q for"), ("batches * max_q * max_kv", "batches * max_q * max_q")),
        ),
    ),
    variants=(
        """
import torch

def cross_waste(len_q, len_kv):
    q, kv = torch.tensor(len_q, dtype=torch.float64), torch.tensor(len_kv, dtype=torch.float64)
    if not len(q):
        return 0.0, 0.0
    places = len(q) * (q.max() + kv.max())
    scores = len(q) * q.max() * kv.max()
    tokens = 1 - (q.sum() + kv.sum()) / places if places > 0 else 0.0
    pairs = 1 - (q @ kv) / scores if scores > 0 else 0.0
    return float(tokens), float(pairs)
""",
        """
def cross_waste(len_q, len_kv):
    def share(wasted, computed):
        return wasted / computed if computed else 0.0

    mq, mk = max([0, *len_q]), max([0, *len_kv])
    free = sum(mq - a for a in len_q) + sum(mk - b for b in len_kv)
    idle = sum(mq * mk - a * b for a, b in zip(len_q, len_kv))
    return share(free, len(len_q) * (mq + mk)), share(idle, len(len_q) * mq * mk)
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 1.5
def _take_cases(seed):
    g = _generator(seed)

    def case(name, lengths, order, dtype=torch.float32):
        ends = torch.tensor([0] + [lengths[b] for b in order]).cumsum(0)
        values = _typed(dtype, sum(lengths), 3, g)
        return Case(
            name, (values, _offsets(lengths), torch.tensor(order, dtype=torch.int64)), offsets=tuple(ends.tolist())
        )

    odd = case("-0.0, NaN and infinities among the values", [2, 0, 3], [2, 1, 0, 2])
    _with_odd_bits(odd.args[0])
    many = [(7 * b) % 5 for b in range(200)]
    return [
        case("two sequences exchanged", [2, 3], [1, 0]),
        case("one left out", [2, 3, 1], [2, 0]),
        case("one taken twice", [2, 0, 3], [2, 1, 2]),
        case("ragged, all moved", RAGGED, [3, 4, 2, 0, 1]),
        case("nothing taken", [2, 3], []),
        case("values of float64", [2, 0, 4], [2, 1, 0, 0], torch.float64),
        case("values of bfloat16", [2, 0, 4], [2, 1, 0, 0], torch.bfloat16),
        case("values of int64", [2, 0, 4], [2, 1, 0, 0], torch.int64),
        case("all in their old order", [2, 0, 3, 1], [0, 1, 2, 3]),
        case("two hundred sequences", many, [(37 * b) % 200 for b in range(200)]),
        odd,
    ]


def _take_reference(values, offsets, order):
    bounds = offsets.tolist()
    parts = [values[bounds[b] : bounds[b + 1]] for b in order.tolist()]
    return torch.cat([values[:0], *parts]), _offsets([len(p) for p in parts])


_TAKE = Exercise(
    id="1.5",
    title="Shuffle a packed batch",
    name="take_sequences",
    cases=_take_cases,
    reference=_take_reference,
    outputs=(Output("values", ("token", "dim")), Output("offsets", ("entry",), dtype="int32")),
    properties=(DTYPE_KEPT, _numbers_kept(_take_reference)),
    difficulty=3,
    minutes=15,
    hints=(
        "The new lengths are the old lengths in the new order. From them come the new offsets. What is left is one "
        "question: from "
        "which old row does each new row come?",
        "Within one sequence, old row minus new row is the same for all rows: the old beginning minus the new "
        "beginning.",
        "shift = offsets[:-1][order] - new_offsets[:-1]; give every row its sequence's shift with "
        "torch.repeat_interleave(shift, "
        "new_lengths), add torch.arange, and index values with the sum.",
    ),
    forbid=("jfa.layout", "nested"),
    limits=(
        Limit(
            "no loop over sequences",
            "ops",
            at_most=60,
            text="at most 60 torch operations, however many sequences there are",
        ),
    ),
    mutants=(
        Mutant(
            "loops over the sequences",
            "One slice per sequence: right, but the number of operations grows with the batch.",
            caught_by="no loop over sequences",
            source="""
def take_sequences(values, offsets, order):
    bounds = offsets.tolist()
    parts = [values[bounds[b]:bounds[b + 1]] for b in order.tolist()]
    ends = torch.tensor([0] + [len(p) for p in parts]).cumsum(0).to(torch.int32)
    return torch.cat([values[:0], *parts]), ends
""",
            expect="60",
        ),
        Mutant(
            "loops over the sequences in NumPy",
            "One NumPy slice per sequence: the number of operations grows with the batch all the same.",
            caught_by="no loop over sequences",
            source="""
def take_sequences(values, offsets, order):
    rows, bounds = torch.arange(len(values)).numpy(), offsets.tolist()
    parts = [rows[bounds[b]:bounds[b + 1]].copy() for b in order.tolist()]
    ends = torch.tensor([0] + [len(p) for p in parts]).cumsum(0).to(torch.int32)
    return values[torch.cat([torch.zeros(0, dtype=torch.int64), *map(torch.from_numpy, parts)])], ends
""",
            expect="60",
        ),
        Mutant(
            "old offsets",
            "The rows are right, but the offsets are made from the lengths in their old order.",
            source="""
def take_sequences(values, offsets, order):
    lengths = (offsets[1:] - offsets[:-1])[order]
    new = torch.zeros(len(order) + 1, dtype=torch.int32)
    new[1:] = torch.cumsum(lengths, 0)
    rows = torch.arange(int(new[-1])) + torch.repeat_interleave(offsets[:-1][order] - new[:-1], lengths)
    wrong = torch.zeros(len(order) + 1, dtype=torch.int32)
    wrong[1:] = torch.cumsum((offsets[1:] - offsets[:-1])[:len(order)], 0)
    return values[rows], wrong
""",
        ),
        Mutant(
            "keeps the old order",
            "The right sequences were taken, but in their old order.",
            edit=("lengths = (", "order = torch.sort(order).values\n    lengths = ("),
        ),
        Mutant(
            "shift of the wrong sequence",
            "The shift uses the beginnings in their old order: offsets[:-1] was not indexed with order.",
            edit=("offsets[:-1][order] - new_offsets[:-1]", "offsets[: len(order)] - new_offsets[:-1]"),
        ),
        Mutant(
            "order taken as rows",
            "order was used to index rows. It names sequences.",
            caught_by="returns",
            edit=("values[rows], new_offsets", "values[order], new_offsets"),
            expect="shape",
        ),
        Mutant(
            "int64 offsets",
            "The new offsets are int64.",
            caught_by="returns",
            edit=("dtype=torch.int32", "dtype=torch.int64"),
            expect="int32",
        ),
        Mutant(
            "through fp32",
            "The values went through fp32, which cannot hold all numbers of float64.",
            caught_by="numbers kept",
            edit=(
                "return values[rows], new_offsets",
                "dtype = values.dtype\n    values = values.float().to(dtype) if dtype.is_floating_point else values\n    return values[rows], new_offsets",
            ),
            expect="rounded",
            recognise=False,
        ),
        Mutant(
            "the batch itself where nothing moves",
            "Where order changes nothing, the batch itself came back: a result has memory of its own.",
            caught_by="returns",
            edit=(
                "    lengths = (",
                "    if order.tolist() == list(range(len(offsets) - 1)):\n        return values, offsets\n    lengths = (",
            ),
            expect="shares its memory",
            recognise=False,
        ),
    ),
    variants=(
        """
def take_sequences(values, offsets, order):
    start, end = offsets[:-1][order].long(), offsets[1:][order].long()
    ends = torch.cumsum(end - start, 0)
    new_offsets = torch.cat([ends.new_zeros(1), ends]).int()
    rows = torch.arange(int(new_offsets[-1]))
    owner = torch.searchsorted(ends, rows, right=True)
    return values[start[owner] + rows - new_offsets[:-1].long()[owner]], new_offsets
""",
        """
def take_sequences(values, offsets, order):
    lengths = offsets.diff()[order]
    new_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max()) if len(order) else 0
    place = torch.arange(longest)
    rows = offsets[:-1][order][:, None] + place
    return values[rows[place < lengths[:, None]].long()], new_offsets
""",
    ),
)


# ------------------------------------------------------------------------------------------------------------ 1.6
def _garbage(x, lengths, g):
    """Fill the places past each length with huge numbers and NaN."""
    for b, n in enumerate(lengths):
        x[b, n:] = 1e4 * torch.randn(x.shape[1] - n, x.shape[2], generator=g)
        x[b, n + 1 :: 2] = float("nan")
    return x


def _padded_cases(seed):
    g = _generator(seed)

    def case(name, lengths, places, dim, scale=1.0, dirty=True):
        q, k, v = (torch.randn(len(lengths), places, dim, generator=g) for _ in range(3))
        q, k = q * scale, k * scale
        if dirty:
            q, k, v = (_garbage(x, lengths, g) for x in (q, k, v))
        return Case(name, (q, k, v, torch.tensor(lengths)))

    def hard(name, names):
        pairs = [kinds.query_and_key(kind, 20, 20, 16, 16, g) for kind in names]
        q, k = (torch.stack(x) for x in zip(*pairs))
        lengths = [20 - b for b in range(len(names))]
        q, k, v = (_garbage(x, lengths, g) for x in (q, k, torch.randn(q.shape, generator=g)))
        return Case(name, (q, k, v, torch.tensor(lengths)), labels=tuple(names))

    return [
        case("one sequence that fills its line", [3], 3, 4),
        case("a shorter one, zeros in free places", [3, 2], 3, 4, dirty=False),
        case("garbage in free places", [4, 2, 1], 4, 8),
        case("an empty sequence", [3, 0, 5], 5, 8),
        case("scores of several hundred", [6, 3, 17], 17, 16, scale=10.0),
        case("one of 200", [5, 200], 200, 8),
        hard("scores that need the maximum, one kind per line", kinds.MODERATE),
        hard("scores near -30,000, the second line not full", ["near -30000", "near -30000"]),
    ]


def _padded_reference(q, k, v, lengths):
    out = torch.zeros_like(q)
    for b, n in enumerate(lengths.tolist()):
        scores = q[b, :n] @ k[b, :n].T / q.shape[2] ** 0.5
        out[b, :n] = torch.softmax(scores, -1) @ v[b, :n]
    return out


_PADDED = Exercise(
    id="1.6",
    title="Attention on padded data",
    name="padded_attention",
    cases=_padded_cases,
    reference=_padded_reference,
    outputs=(Output("out", ("sequence", "position", "dim")),),
    difficulty=3,
    minutes=15,
    tol=2e-5,
    hints=(
        "Make one boolean table first: which places of each line hold a token? Use it three times.",
        "Keys without a token get a score of -inf before the softmax. The values need care of their own: 0 * NaN "
        "is NaN.",
        "real = torch.arange(M) < lengths[:, None]; scores = torch.where(real[:, None, :], scores, -torch.inf); v "
        "= torch.where(real[..., "
        "None], v, 0); and the same where on the output.",
    ),
    mutants=(
        Mutant(
            "NaN through the values",
            "A weight of 0 times NaN is NaN: the values' free places were not cleaned.",
            caught_by="returns",
            edit=("clean = torch.where(real[:, :, None], v, 0)", "clean = v"),
            expect="NaN",
        ),
        Mutant(
            "output places not cleared",
            "The output's free places hold whatever the queries there attended to. They should be 0.",
            edit=("return torch.where(real[:, :, None], out, 0)", "return out"),
        ),
        Mutant(
            "masked with 0",
            "Keys in free places still get a share: a score of 0 is not the absence of a score, for exp(0) is 1.",
            edit=("scores, -torch.inf)", "scores, 0.0)"),
        ),
        Mutant(
            "masked after the softmax",
            "The weights were masked after the softmax, so those that are left no longer sum to 1.",
            source="""
def padded_attention(q, k, v, lengths):
    real = torch.arange(q.shape[1]) < lengths[:, None]
    v = torch.where(real[:, :, None], v, 0)
    weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[2] ** 0.5, -1)
    weights = torch.where(real[:, None, :], weights, 0)
    return torch.where(real[:, :, None], weights @ v, 0)
""",
        ),
        Mutant(
            "no scale",
            "The scores were not scaled by 1/sqrt(D).",
            edit=(" / q.shape[2] ** 0.5", ""),
        ),
        Mutant(
            "no mask",
            "Nothing masks the keys in free places: the zeros there take part in the softmax.",
            source="""
def padded_attention(q, k, v, lengths):
    real = torch.arange(q.shape[1]) < lengths[:, None]
    q, k, v = (torch.where(real[:, :, None], x, 0) for x in (q, k, v))
    weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[2] ** 0.5, -1)
    return torch.where(real[:, :, None], weights @ v, 0)
""",
            expect="Keys in free places still get a share",
        ),
        Mutant(
            "-1e4 in masked places",
            "Keys in free places have the score -1e4, which is a score like any other once all are lower.",
            edit=("scores, -torch.inf)", "scores, -1e4)"),
        ),
    ),
    variants=(
        """
def padded_attention(q, k, v, lengths):
    out = torch.zeros_like(q)
    for b in range(len(q)):
        n = int(lengths[b])
        if n:
            scores = (q[b, :n] @ k[b, :n].T) * q.shape[2] ** -0.5
            weights = torch.exp(scores - scores.max(1, keepdim=True).values)
            out[b, :n] = weights @ v[b, :n] / weights.sum(1, keepdim=True)
    return out
""",
        """
def padded_attention(q, k, v, lengths):
    B, M, D = q.shape
    gone = torch.arange(M)[None, :] >= lengths[:, None]
    q, k, v = (x.masked_fill(gone[..., None], 0.0) for x in (q, k, v))
    scores = torch.einsum("bid,bjd->bij", q, k) * D ** -0.5
    scores = scores.masked_fill(gone[:, None, :], -1e30)
    return torch.einsum("bij,bjd->bid", scores.softmax(-1), v).masked_fill(gone[..., None], 0.0)
""",
    ),
)

EXERCISES = [_OFFSETS, _LOCATE, _PAD, _WASTE, _TAKE, _PADDED]
