"""Carrying a learner's answers, notes and cells into a chapter's new text."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from jfa.course.files import Refusal
from jfa.course.notebook import Cell, Notebook, as_percent, dump, join_percent, json_entry


def carry(mine: Notebook, skeleton: Notebook, seen: list[Notebook]) -> tuple[str, int] | None:
    """Return (text of the new file, exercises whose answers it has), or None where the file has all that the skeleton has.

    Whatever no skeleton ever shipped is the learner's own, and stays: answers by their tag, other cells beside the neighbor
    they had. ``seen`` are older skeletons; a cell of theirs gives way to what the present one has in its place.
    """
    plan = _Plan(mine, skeleton, seen)
    if plan.is_up_to_date():
        return None
    cells = plan.cells()
    text = _as_json(mine, cells) if mine.is_json else _as_percent(mine, skeleton, cells)
    return text, plan.answered()


class _Plan:
    """The place of each cell of the learner's file in the new one."""

    def __init__(self, mine: Notebook, skeleton: Notebook, seen: list[Notebook]):
        self.mine, self.skeleton = mine.cells, skeleton.cells
        self.shipped = {_key(c) for n in [skeleton, *seen] for c in n.cells}
        self.homes = self._find_homes()  # index in mine -> index in the skeleton
        self.own = {i for i in range(len(self.mine)) if i not in self.homes and self._is_own(self.mine[i])}

    def _find_homes(self) -> dict[int, int]:
        tagged = {c.exercise: k for k, c in enumerate(self.skeleton) if _is_exercise(c)}
        homes = {i: tagged[c.exercise] for i, c in enumerate(self.mine) if _is_exercise(c) and c.exercise in tagged}
        for fits in (lambda c, s: _key(c) == _key(s), self._extends):
            free = [k for k in range(len(self.skeleton)) if k not in homes.values()]
            for i, cell in enumerate(self.mine):
                home = next((k for k in free if i not in homes and fits(cell, self.skeleton[k])), None)
                if home is not None:
                    homes[i] = home
                    free.remove(home)
        return homes

    def _extends(self, cell: Cell, shipped: Cell) -> bool:
        """Return whether the learner added lines to a shipped cell and took none away."""
        lines = iter(_lines(cell))
        same_kind = (cell.kind, cell.tags) == (shipped.kind, shipped.tags) and not _is_exercise(shipped)
        return (
            same_kind
            and _key(cell) not in self.shipped
            and bool(_lines(shipped))
            and all(s in lines for s in _lines(shipped))
        )

    def _is_own(self, cell: Cell) -> bool:
        if not cell.source.strip() or _key(cell) in self.shipped:
            return False
        setup = [line for c in self.skeleton if "setup" in c.tags for line in _lines(c)]
        return not ("setup" in cell.tags and set(_lines(cell)) <= set(setup))  # an older set-up cell adds nothing

    def is_up_to_date(self) -> bool:
        """Return whether every shipped cell is there and no outdated one."""
        outdated = [
            i
            for i in range(len(self.mine))
            if i not in self.own and self.mine[i].source.strip() and self._is_outdated(i)
        ]
        return not outdated and set(self.homes.values()) == set(range(len(self.skeleton)))

    def _is_outdated(self, i: int) -> bool:
        """Return a cell that is as an older skeleton had it, not as the present one has it in its place."""
        cell = self.mine[i]
        if i not in self.homes:
            return True
        return _key(cell) != _key(self.skeleton[self.homes[i]]) and _key(cell) in self.shipped

    def answered(self) -> int:
        """Return how many exercises of the skeleton have an answer that differs from the skeleton."""
        return len(
            {k for i, k in self.homes.items() if _is_exercise(self.mine[i]) and _key(self.mine[i]) not in self.shipped}
        )

    def cells(self) -> list[Cell]:
        """Return the new file's cells: each the learner's object where it is theirs or unchanged, else the skeleton's."""
        slots: list[list[Cell]] = [[] for _ in self.skeleton]
        before: list[list[Cell]] = [[] for _ in self.skeleton]
        after: list[list[Cell]] = [[] for _ in self.skeleton]
        last: list[Cell] = []
        for i, cell in enumerate(self.mine):
            if i in self.homes:
                slots[self.homes[i]].append(cell)
            elif i in self.own:
                self._anchor(i, slots, before, after, last).append(cell)
        result = []
        for k, shipped in enumerate(self.skeleton):
            result += before[k] + self._slot(shipped, slots[k]) + after[k]
        return result + last

    def _anchor(self, i: int, slots: list, before: list, after: list, last: list) -> list[Cell]:
        """Return the list that an own cell joins: beside the nearer neighbor, rather above an exercise than below a cell."""
        above = max((j for j in self.homes if j < i), default=None)
        below = min((j for j in self.homes if j > i), default=None)
        if below is None:
            return (
                last
                if above is None or above != i - 1 and self.homes[above] == len(slots) - 1
                else after[self.homes[above]]
            )
        if above is None:
            return before[self.homes[below]]
        if self.homes[above] == self.homes[below]:
            return slots[self.homes[above]]  # between the parts of one answer
        first, end = i, i  # own cells in a row stay together
        while first - 1 in self.own:
            first -= 1
        while end + 1 in self.own:
            end += 1
        nearer = (below - end) - (first - above)
        to_next = nearer < 0 or nearer == 0 and _is_exercise(self.mine[below])
        return before[self.homes[below]] if to_next else after[self.homes[above]]

    def _slot(self, shipped: Cell, mine: list[Cell]) -> list[Cell]:
        """Return the cells for this cell of the skeleton: the learner's version of it if there is one, else the
        cell."""
        worked = [c for c in mine if _key(c) not in self.shipped]
        same = [c for c in mine if _key(c) == _key(shipped) and c.tags == shipped.tags]
        return worked or same[:1] or [shipped]


def _key(cell: Cell) -> tuple[str, str]:
    return cell.kind, "\n".join(line.rstrip() for line in re.split(r"\r\n|\r|\n", cell.source)).strip()


def _lines(cell: Cell) -> list[str]:
    return [line.strip() for line in cell.source.split("\n") if line.strip()]


def _is_exercise(cell: Cell) -> bool:
    return cell.kind == "code" and cell.exercise is not None


def _as_percent(mine: Notebook, skeleton: Notebook, cells: list[Cell]) -> str:
    """Return the cells as a .py file with the learner's header and line ends; the learner's cells keep every byte."""
    newline, theirs = mine.newline(), {id(c) for c in mine.cells}
    blocks = []
    for cell in cells:
        if id(cell) not in theirs:
            blocks.append(re.sub(r"\r\n|\r|\n", newline, as_percent(cell)))
        else:
            blocks.append(as_percent(cell if cell.marker else replace(cell, marker=f"# %%{newline}")))
    mark = "\ufeff" if mine.text.startswith("\ufeff") else ""
    head = mine.head if mine.head.strip("\ufeff\r\n\t ") else mark + re.sub(r"\r\n|\r|\n", newline, skeleton.head)
    result = join_percent(head, blocks, newline)
    if [_key(c) for c in result.cells] != [_key(c) for c in cells]:
        raise Refusal(
            "your cells cannot be put into the new text without cutting one of them (an open string?): left alone"
        )
    return result.text.removesuffix(newline) + re.search(r"[\r\n]*$", mine.text)[0]


def _as_json(mine: Notebook, cells: list[Cell]) -> str:
    """Return the cells as an .ipynb with the learner's metadata; the learner's cells keep outputs and attachments."""
    content = json.loads(mine.text.removeprefix("\ufeff"))
    named = (content.get("nbformat", 4), content.get("nbformat_minor", 5)) >= (4, 5)
    taken = {c.entry.get("id") for c in cells if c.entry}
    content["cells"] = []
    for i, cell in enumerate(cells):
        entry = cell.entry or json_entry(
            cell, next(n for n in (f"cell-{i}", f"shipped-{i}", f"shipped-{i}-jfa") if n not in taken)
        )
        content["cells"].append({k: v for k, v in entry.items() if named or k != "id"})
    indent = re.match(r"\ufeff?\s*\{\r?\n([ \t]*)", mine.text)
    step = indent[1] if indent else None
    text = json.dumps(content, indent=step) if mine.text.isascii() else dump(content, step)
    newline = "\r\n" if "\r\n" in mine.text else "\n"
    mark = "\ufeff" if mine.text.startswith("\ufeff") else ""
    return mark + text.replace("\n", newline) + re.search(r"\s*$", mine.text)[0]
