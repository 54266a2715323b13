"""README.md tells the truth: its map agrees with the folders, its example runs, its links lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAP = {row[0]: row for row in re.findall(r"^\| (\d\d) \| ([^|]+) \|.*\| ([^|]*) \|$", README, flags=re.M)}
NEEDS = dict(re.findall(r"^\| (\d\d) \|.*\| ([^|]*) \| [^|]* \|$", README, flags=re.M))
CHAPTERS = {path.name[:2]: path for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.py")}


def test_the_map_has_every_chapter_once():
    assert sorted(MAP) == [f"{number:02}" for number in range(19)]
    assert set(CHAPTERS) <= set(MAP)


@pytest.mark.parametrize("number", MAP)
def test_a_chapter_is_to_come_exactly_if_it_is_not_there(number):
    there = "to come" not in MAP[number][2]
    assert there == (number in CHAPTERS)
    if there:
        assert CHAPTERS[number].name in MAP[number][2], "the last column links the chapter"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in target or (ROOT / target).exists(), target


def test_the_table_of_the_seed_names_tests_that_exist():
    text = CONTRIBUTING.split("## From the seed's chapters")[1]
    rows = re.findall(r"^\| [^|]+ \| (\d\d) \| ([^|]+) \|$", text, flags=re.M)
    assert rows
    for number, test in rows:
        assert number in MAP
        assert (ROOT / test.split("::")[0]).exists(), test


def test_the_map_of_the_house_has_every_module():
    modules = [path.name for path in (ROOT / "jfa").glob("*.py") if not path.name.startswith("__")]
    assert [name for name in modules if name not in CONTRIBUTING] == []


def numbers(text):
    """The chapters that a sentence names."""
    return re.findall(r"\b\d\d\b", text)


@pytest.mark.parametrize("number", CHAPTERS)
def test_what_a_chapter_needs_is_what_the_map_says(number):
    text = CHAPTERS[number].read_text(encoding="utf-8")
    (sentence,) = re.findall(r"\*\*(?:You need|Needs\.)\*\*([^.]*)\.", text)
    assert numbers(sentence) == numbers(NEEDS[number])


def test_the_tests_that_contributing_names_exist():
    named = re.findall(r"tests/[\w/]+(?:\.py)?", CONTRIBUTING)
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names: dict = {}
    exec(example, names)
    assert names["out"].shape == (45, 4, 64)
    assert names["offsets"].tolist() == [0, 7, 10, 29, 34, 45]
    assert names["query"].grad.abs().sum() > 0


def test_the_picture_is_the_one_its_script_draws():
    import runpy

    drawn = "\n".join(runpy.run_path(str(ROOT / "tools" / "draw_readme_picture.py"))["picture"]()) + "\n"
    assert (ROOT / "docs" / "jagged.svg").read_text(encoding="utf-8") == drawn


def test_the_commands_of_the_readme_exist():
    from jfa.cli import COMMANDS

    text = README + CONTRIBUTING
    used = set(re.findall(r"(?:^|`|, )jfa ([a-z]+)", text, flags=re.M))
    assert used <= set(COMMANDS), used - set(COMMANDS)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(re.findall(r"make ([a-z-]+)", README)) <= {*targets, "sure"}
