"""Draw docs/jagged.svg, the picture of README.md: padded, packed, and the score blocks that are left to compute.

    python tools/draw_readme_picture.py

Everything in it is computed from the five lengths, which are the course's running example.
"""

from itertools import accumulate
from pathlib import Path

LENGTHS = [7, 3, 19, 5, 11]
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]  # Okabe and Ito: distinct without color vision too
CELL = 13
BLOCK = 5  # tokens per tile, in this picture
WIDTH = 1040  # room for the widest sans-serif fonts


def rectangle(x, y, width, height, fill, stroke="#ffffff", extra=""):
    """Return one SVG rectangle."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{stroke}" {extra}/>'


def text(x, y, words, size=14, anchor="start", weight="normal", fill="#222222"):
    """Return one line of text."""
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


def padded(x, y):
    """Draw every sequence as long as the longest: the hatched cells are waste."""
    longest = max(LENGTHS)
    waste = 1 - sum(LENGTHS) / (longest * len(LENGTHS))
    yield text(x, y - 10, f"padded: {longest * len(LENGTHS)} tokens, {waste:.1%} of them waste", weight="bold")
    for row, (length, color) in enumerate(zip(LENGTHS, COLOURS)):
        for column in range(longest):
            fill = color if column < length else "url(#waste)"
            yield rectangle(x + column * CELL, y + row * (CELL + 4), CELL, CELL, fill)


def packed(x, y):
    """Yield the same tokens one after another, and where each sequence begins."""
    yield text(x, y - 10, f"packed: {sum(LENGTHS)} tokens and {len(LENGTHS) + 1} offsets", weight="bold")
    offsets = [0, *accumulate(LENGTHS)]
    for length, start, color in zip(LENGTHS, offsets, COLOURS):
        for token in range(start, start + length):
            yield rectangle(x + token * CELL, y, CELL, CELL + 6, color)
    for offset in offsets:
        yield f'<line x1="{x + offset * CELL}" y1="{y + 21}" x2="{x + offset * CELL}" y2="{y + 28}" stroke="#222222"/>'
        yield text(x + offset * CELL, y + 42, offset, size=12, anchor="middle")


def scores(x, y, cell):
    """Draw which tiles of the score matrix have work: one square per sequence, tiles that start where the sequence starts."""
    total = sum(LENGTHS)
    yield rectangle(x, y, total * cell, total * cell, "#f2f2f2", "#bbbbbb")
    for length, start, color in zip(LENGTHS, accumulate([0, *LENGTHS]), COLOURS):
        for row in range(0, length, BLOCK):
            for column in range(0, length, BLOCK):
                height, width = min(BLOCK, length - row), min(BLOCK, length - column)
                place = x + (start + column) * cell, y + (start + row) * cell
                yield rectangle(*place, width * cell, height * cell, color)


def picture():
    """Draw the whole SVG."""
    computed = sum(length * length for length in LENGTHS)
    dense = len(LENGTHS) * max(LENGTHS) ** 2
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 300" font-family="sans-serif" role="img">'
    yield "<title>Five sequences padded, packed, and the tiles of their scores</title>"
    yield (
        '<defs><pattern id="waste" width="5" height="5" patternUnits="userSpaceOnUse">'
        '<rect width="5" height="5" fill="#eeeeee"/><path d="M0 5L5 0" stroke="#999999"/></pattern></defs>'
    )
    yield rectangle(0, 0, WIDTH, 300, "#ffffff", "none")
    yield from padded(20, 40)
    yield from packed(20, 180)
    yield text(
        20, 258, "Offsets instead of padding: no token is stored, loaded or multiplied that is not there.", size=13
    )
    yield text(20, 278, "The kernels walk a list of tiles with work; empty tiles are not in it.", size=13)
    yield text(700, 30, "scores: the tiles that are computed", weight="bold")
    yield from scores(700, 42, 4.6)
    yield text(700, 268, f"{computed} pairs instead of {dense}:", size=13)
    yield text(700, 286, f"{1 - computed / dense:.1%} of padded attention's FLOPs are waste", size=13)
    yield "</svg>"


if __name__ == "__main__":
    target = Path(__file__).resolve().parent.parent / "docs" / "jagged.svg"
    target.write_text("\n".join(picture()) + "\n", encoding="utf-8")
    print(f"wrote {target}")
