"""What an answer did is known to the judge when it happened; and no answer holds up, fills or blinds the machine it runs on."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from jfa.course import catalog, seccomp
from jfa.course.answers import Pristine, from_source
from jfa.course.judge import judge

needs_filter = pytest.mark.skipif(not seccomp.is_known(), reason="no system-call filter here")


def _twice(body, before=""):
    return f"{before}\ndef twice(x):\n" + "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))


@pytest.fixture
def strictly(toy):
    """Judges an answer to 90.2, which may not use softmax here."""
    exercise = replace(catalog.exercise("90.2"), forbid=("softmax", "numpy"))
    pristine = Pristine.load(toy, "90_toy")
    return lambda source: judge(exercise, from_source(source, exercise, pristine), toy)


AFTERWARDS = {
    "nothing": "pass",
    "the judge's objects": "import gc\nfor o in gc.get_objects():\n    w = getattr(o, '_words', getattr(o, 'words', None))\n"
    "    if isinstance(w, list): w.clear()",
    "the modules": "import sys\nfor m in list(sys.modules.values()):\n    v = getattr(m, 'Violations', None)\n"
    "    if v: v.words = []",
    "the modes": "import torch.overrides as o\nfor m in o._get_current_function_mode_stack():\n"
    "    for v in list(vars(m).values()):\n        w = getattr(getattr(v, 'violations', v), '_words', None)\n"
    "        if w: w.clear()",
    "the pipe": "import os\nos.write = lambda fd, data: len(data)",
    "all descriptors": "import os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass",
    "the end": "import os\nos._exit(0)",
    "a crash": "import os\nos.abort()",
}


@pytest.mark.parametrize("way", AFTERWARDS)
def test_a_violation_is_not_taken_back(strictly, way):
    body = f"y = torch.softmax(x, -1)\n{AFTERWARDS[way]}\nreturn 2 * x"
    result = strictly(_twice(body))
    assert not result.passed
    assert "softmax" in result.message or any("softmax" in note for note in result.notes), result.text()


FRAMES = [
    "import sys\nf = sys._getframe(1)",
    "import inspect\nf = inspect.currentframe().f_back",
    "import inspect\nf = inspect.stack()[1].frame",
    "try: 1 / 0\nexcept Exception as e: f = e.__traceback__.tb_frame.f_back",
    "try: 1 / 0\nexcept Exception as e:\n    import traceback\n    f = next(traceback.walk_tb(e.__traceback__))[0].f_back",
    "f = (i for i in [1]).gi_frame",
    "import sys\nf = list(sys._current_frames().values())[0]",
    "import sys\nsys.settrace(lambda *a: None)",
    "import sys\nsys.setprofile(lambda *a: None)",
]


@pytest.mark.parametrize("look", FRAMES)
def test_frames_of_the_judges_code_are_not_shown(judged, look):
    result = judged("90.2", _twice(f"{look}\nreturn 2 * x"))
    assert not result.passed and "frames" in result.message, result.text()


@pytest.mark.parametrize(
    "body",
    [
        "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nreturn 2 * x",
        "import warnings, logging\nwarnings.warn('w')\nlogging.getLogger('a').warning('b')\nreturn 2 * x",
        "import collections, dataclasses, typing\nP = collections.namedtuple('P', 'a')\nreturn P(2 * x).a",
        "import gc\nprint(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))\nreturn 2 * x",
        "import tempfile, os\nwith tempfile.TemporaryDirectory() as d:\n    p = os.path.join(d, 'a')\n    torch.save(x, p)\n"
        "    y = torch.load(p)\nreturn 2 * y",
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('2')\n    f.seek(0)\n"
        "    n = int(f.read())\nreturn n * x",
        "import os\nwith open(os.devnull, 'w') as f: print('x', file=f)\nreturn 2 * x",
    ],
)
def test_honest_habits_are_let_through(judged, body):
    result = judged("90.2", _twice(body))
    assert result.passed, result.text()


THREADS = [
    "import threading\nt = threading.Thread(target=lambda: out.append(torch.softmax(x, -1)))\nt.start()\nt.join()",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor() as p: p.submit(torch.softmax, x, -1).result()",
    "import _thread, time\n_thread.start_new_thread(lambda: out.append(torch.softmax(x, -1)), ())\ntime.sleep(0.1)",
]


@pytest.mark.parametrize("way", THREADS)
def test_nothing_is_computed_where_nobody_counts(strictly, way):
    result = strictly(_twice(f"out = []\n{way}\nreturn 2 * x"))
    assert not result.passed and "threads" in result.message, result.text()


@pytest.mark.parametrize("name", ["SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"])
def test_a_stopped_answer_is_a_sleeping_one(strictly, toy, name):
    exercise = replace(catalog.exercise("90.2"), time_limit=0.5)
    source = _twice(f"import signal\nsignal.raise_signal(signal.{name})\nreturn 2 * x")
    result = judge(exercise, from_source(source, exercise, Pristine.load(toy, "90_toy")), toy)
    if name == "SIGSTOP":
        assert not result.passed and "Time limit" in result.message, result.text()
    else:  # ignored in a process group that nobody waits for: the right answer is given
        assert result.passed, result.text()


BOMBS = {
    "large files": "import tempfile, os\nd = tempfile.mkdtemp()\nfor i in range(400):\n    with open(f'{d}/{i}', 'wb') as f:\n"
    "        f.write(bytes(4 << 20))\nimport time\ntime.sleep(2)",
    "many files": "import tempfile\nd = tempfile.mkdtemp()\nfor i in range(6_000): open(f'{d}/{i}', 'w').close()\n"
    "import time\ntime.sleep(2)",
    "deep folders": "import tempfile, os\nos.chdir(tempfile.mkdtemp())\nfor i in range(1500):\n"
    "    os.mkdir('d')\n    os.chdir('d')",
    "closed folders": "import tempfile, os\nd = tempfile.mkdtemp()\nos.makedirs(f'{d}/a/b')\nos.mkdir(f'{d}/c', 0)",
    "files without memory": "import os\nfds = [os.memfd_create('m') for _ in range(64)]\nfor fd in fds: os.truncate(fd, 1 << 25)",
    "one huge file": "import tempfile\nwith open(tempfile.mkdtemp() + '/f', 'wb') as f:\n"
    "    for _ in range(400): f.write(bytes(1 << 20))",
}


@needs_filter
@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_leave_nothing_behind(judged, kind, tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    result = judged("90.2", _twice(f"{BOMBS[kind]}\nreturn 3 * x"))
    assert not result.passed
    if kind in ("large files", "many files"):
        assert "wrote more than" in result.message, result.text()
    assert list(Path(place).iterdir()) == []


@pytest.mark.parametrize(
    "cell",
    [
        "import jfa.reference\n\ndef twice(x):\n    raise NotImplementedError('90.2: not started')",
        "torch.softmax(torch.ones(2), 0)\n\ndef twice(x):\n    torch.softmax(x, -1)\n"
        "    raise NotImplementedError('90.2: not started')",
    ],
)
def test_a_stub_is_not_started_whatever_ran_before_it(strictly, cell):
    result = strictly(
        cell.replace("import jfa.reference\n", "try:\n    import jfa.reference\nexcept RuntimeError: pass\n")
    )
    assert result.state == "not started", result.text()
