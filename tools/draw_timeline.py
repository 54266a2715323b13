"""Draw docs/timeline.png, the timeline of README.md: the plain kernel and the warp-specialized one on the emulator's clock.

    python tools/draw_timeline.py

Modelled with a B200's rates (jfa/emulator/rates.py), not measured. Prints the numbers that the README quotes.
"""

import re
from pathlib import Path

from jfa import plots
from jfa.emulator.rates import B200
from jfa.kernels.blackwell.modelled import busy_share, forward_launch, plain_launch, record_one_sm

TARGET = Path(__file__).resolve().parent.parent / "docs" / "timeline.png"
CYCLES = 4500  # shown of each, from the middle of its run
COLOURS = 64  # of the file: a few flat colors and their edges


def lines():
    """Return both timelines, one SM each: 256 queries (the plain kernel: 128) of head dim 128 attend to 2048 keys."""
    return {
        "one role does everything": record_one_sm(plain_launch(128, 2048), B200),
        "a role per unit": record_one_sm(forward_launch(256, 2048), B200),
    }


def shift(line, start):
    """Return the timeline with ``start`` as its cycle 0, and the softmax's two groups (named by their line) called so."""
    line.events = [
        e._replace(track=re.sub(r"^task_L\d+", "softmax", e.track), start=e.start - start, end=e.end - start)
        for e in line.events
    ]
    line.occupied = {
        key: [(a - start, b - start, *rest) for a, b, *rest in spans] for key, spans in line.occupied.items()
    }
    return line


def picture(drawn):
    """Draw both, one below the other, over equally many cycles."""
    shown = {}
    for name, line in drawn.items():
        middle = line.start + line.cycles / 2
        busy = busy_share(line, 0.35, 0.8)
        shown[f"{name}: tensor core busy {busy:.0%} of the time"] = shift(line, middle - CYCLES / 2)
    return plots.timelines(shown, (0, CYCLES))


if __name__ == "__main__":
    from io import BytesIO

    from PIL import Image

    drawn = picture(lines())
    Image.open(BytesIO(drawn.png())).convert("RGB").quantize(COLOURS).save(TARGET, optimize=True)
    print(drawn.text)
    print(f"wrote {TARGET}, {TARGET.stat().st_size / 1000:.0f} kB")
