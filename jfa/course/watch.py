"""``jfa watch``: check the exercise whose file was just saved, and show the next one as soon as it passes.

Files are polled by name a few times per second, so a save that replaces the file (JupyterLab, vim, most editors) is
noticed like one that writes into it, on network drives and in containers too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from jfa.course import answers, catalog, grade, notebook, report, state
from jfa.course.answers import Pristine
from jfa.course.notebook import Notebook, Unreadable
from jfa.course.paths import Course
from jfa.course.report import Result
from jfa.course.spec import Exercise

PAUSE = 0.3  # seconds between two looks at the files
SETTLED = 0.15  # a save counts as finished when the file has not changed for so long
PATIENCE = 5.0  # seconds after which a file that goes on changing is read all the same

Stamp = tuple[int, int, int]  # of a file: time of its last change in ns, size in bytes, inode


class Watch:
    """The watched exercises, and the contents of their files at the last poll.

    Args:
        exercises: in the order in which they are shown.
        say: called with each line or report that a learner should see.
    """

    def __init__(self, course: Course, exercises: Iterable[Exercise], say: Callable[[str], None]):
        self.course, self.exercises, self.say = course, list(exercises), say
        self.stems = {e.chapter: catalog.chapter(e.chapter).stem for e in self.exercises}
        self.stamps = {path: _stamp(path) for path in self._files()}
        self.contents = {path: _open(path)[0] for path in self.stamps}
        self.current: Exercise | None = self._first_open()

    # -- what a learner sees -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Say what is watched, check exercises from the first open one to one that does not pass, and show that."""
        files = ", ".join(f"{stem[:2]}" for stem in self.stems.values())
        self.say(f"watching chapters {files} in {self.course.exercises}; save a file to check it, Ctrl-C ends this")
        before = None
        while (
            self.current is not None and self.current is not before
        ):  # answers from before this was started may pass already
            before = self.current
            self._check([before], quietly=True)
        self._show_next()

    def look(self) -> bool:
        """Poll the files once and check those that were saved; returns whether any was."""
        saved = [path for path in self._files() if self._was_saved(path)]
        for path in saved:
            self._settle(path)
            self._handle(path)
        return bool(saved)

    def end(self) -> None:
        """Say how far the learner has come."""
        self.say(f"\nstopped; {self._count()}")

    # -- files ---------------------------------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        """Return the existing files of a chapter: .py, .ipynb or both."""
        candidates = (
            self.course.exercises / f"{stem}{end}" for stem in self.stems.values() for end in (".py", ".ipynb")
        )
        return [path for path in candidates if path.is_file()]

    def _was_saved(self, path: Path) -> bool:
        """Return whether a file differs from the last look; one that is away for a moment (being replaced) does not."""
        stamp = _stamp(path)
        return stamp is not None and stamp != self.stamps.get(path)

    def _settle(self, path: Path) -> None:
        """Wait until a file is no longer being written, and remember its stamp."""
        until = time.monotonic() + PATIENCE
        stamp = _stamp(path)
        while time.monotonic() < until:
            time.sleep(SETTLED)
            before, stamp = stamp, _stamp(path)
            if stamp is not None and stamp == before:
                break
        self.stamps[path] = stamp or self.stamps.get(path)

    # -- checking ------------------------------------------------------------------------------------------------------

    def _handle(self, path: Path) -> None:
        """Check what a save has changed; a save that changed no answer checks the current exercise again."""
        content, why = _open(path)
        self.say(f"\n{datetime.now():%H:%M:%S} {path.name} was saved")
        if content is None:
            self.say(f"  {why}")
            return
        before, self.contents[path] = self.contents.get(path), content
        here = [e for e in self.exercises if self.stems[e.chapter] == path.stem]
        changed = self._changed(here, before, content)
        again = [self.current] if self.current in here else []
        if changed or again:
            self._check(changed or again)
        self._show_next()

    def _changed(self, here: list[Exercise], before: Notebook | None, after: Notebook) -> list[Exercise]:
        """Return the exercises whose answers differ between two versions of their file."""
        pristine = Pristine.load(self.course, self.stems[here[0].chapter])
        was = {e.id: _answer(before, e, pristine) for e in here}
        return [e for e in here if _answer(after, e, pristine) != was[e.id]]

    def _check(self, exercises: list[Exercise], quietly: bool = False) -> None:
        """Judge exercises as `jfa grade` does, one after another, and keep the progress; ``quietly`` says only what was tried."""
        source = grade.Source(self.course, "exercises")

        def told(result: Result) -> None:
            if not (quietly and result.state == report.NOT_STARTED):
                self.say(result.text())

        results = grade.grade(exercises, source, workers=1, done=told)
        remark = state.record(self.course, *(r for r in results if r.state != report.MISSING))
        if remark:
            self.say(f"Note: {remark}")
        for chapter in dict.fromkeys(e.chapter for e in exercises):
            state.keep_pristine(self.course, self.stems[chapter])
        worked_on = next(
            (e for e, r in zip(exercises, results) if not r.passed and r.state != report.NOT_STARTED), exercises[0]
        )
        self.current = self._next_after(worked_on)

    # -- which one is next ---------------------------------------------------------------------------------------------

    def _passed(self) -> set[str]:
        known = state.states(self.course)
        return {e.id for e in self.exercises if known.get(e.id) == report.PASSED}

    def _first_open(self) -> Exercise | None:
        passed = self._passed()
        return next((e for e in self.exercises if e.id not in passed), None)

    def _next_after(self, exercise: Exercise) -> Exercise | None:
        """Return the exercise itself while it has not passed, then the next open one, then those left open before it."""
        at, passed = self.exercises.index(exercise), self._passed()
        return next((e for e in self.exercises[at:] + self.exercises[:at] if e.id not in passed), None)

    def _show_next(self) -> None:
        if self.current is None:
            self.say(f"\nall done: {self._count()}")
            return
        e = self.current
        self.say(f"\n{self._count()}; now {e.id} {e.title} (difficulty {e.difficulty} of 3, {e.minutes} minutes)")
        self.say(f"  {self._place(e)}    a hint: jfa hint {e.id}")

    def _count(self) -> str:
        return f"{len(self._passed())} of {len(self.exercises)} exercises passed"

    def _place(self, exercise: Exercise) -> str:
        """Return FILE:LINE of an exercise's cell, as editors and terminals open it; of an .ipynb the file."""
        path, _ = catalog.exercise_file(self.course, self.stems[exercise.chapter])
        if path is None:
            return f"{self.course.exercises / self.stems[exercise.chapter]}.py is not there"
        place = path.relative_to(self.course.root).as_posix()
        content = self.contents.get(path)
        if content is None or content.is_json:
            return place
        line = content.head.count("\n") + 1
        for cell in content.cells:
            if cell.exercise == exercise.id:
                return f"{place}:{line}"
            line += (cell.marker + cell.body + cell.tail).count("\n")
        return place


def _stamp(path: Path) -> Stamp | None:
    """Return a stamp that identifies the version of a file, None while the file does not exist."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino


def _open(path: Path) -> tuple[Notebook | None, str]:
    """Return (a file's notebook, why it cannot be read)."""
    try:
        return notebook.read(path), ""
    except Unreadable as error:
        return None, str(error)


def _answer(content: Notebook | None, exercise: Exercise, pristine: Pristine) -> tuple | None:
    """Return what an answer consists of, for a comparison."""
    found = answers.from_notebook(content, exercise, pristine) if content is not None else None
    return None if found is None else (found.source, found.helpers)


def run(watch: Watch) -> None:
    """Watch until Ctrl-C; raises nothing for it."""
    try:
        watch.begin()
        while True:
            watch.look()
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        watch.end()
