"""What newcomers are told: their line, the cause and the fix, in at most 12 lines. Golden texts in newcomers.txt.

After a change that is meant, write them anew: `python -m tests.emulator.frontend.test_newcomers`.
"""

from pathlib import Path

import pytest
import triton

import jfa.emulator as emulator

emulator.install()

from .newcomers import MISTAKES  # noqa: E402  (kernels are decorated after the hook is in, or before: both work)

GOLDEN = Path(__file__).with_name("newcomers.txt")


def message(name):
    try:
        MISTAKES[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{name} was not noticed")


def golden():
    sections = GOLDEN.read_text().split("=== ")[1:]
    return {s.split("\n", 1)[0]: s.split("\n", 1)[1].rstrip("\n") for s in sections}


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name):
    text = message(name)
    assert len(text.splitlines()) <= 12
    if triton.__version__.endswith("+fb"):  # the golden texts quote this Triton's own words
        assert text == golden()[name]
    else:
        assert golden()[name].split("\n")[0] == text.split("\n")[0]


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"=== {name}\n{message(name)}\n" for name in MISTAKES))
