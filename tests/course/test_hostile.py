"""Answers that do what learners' code does and worse: each is judged, named, and leaves nothing running."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from jfa.course import catalog, compare, landlock, launch, seccomp
from jfa.course.answers import Pristine, from_source
from jfa.course.judge import Answer, job_for, judge


def _twice(body, before=""):
    return f"{before}\ndef twice(x):\n" + "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))


# name, body of twice(x), the check that must fail, words its message must hold
ANSWERS = [
    ("endless loop", "while True: pass", "runs", "Time limit"),
    ("endless loop inside C", "(lambda: [None for _ in __import__('itertools').repeat(0)])()", "runs", ("Time limit", "memory")),
    ("endless loop in one C call", "sum(__import__('itertools').repeat(0))", "runs", "Time limit"),
    ("swallowed timeout", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    try:\n"
     "        while True: pass\n    except BaseException: pass", "runs", "Time limit"),
    ("sleeps", "import time\ntime.sleep(1000)", "runs", "Time limit"),
    ("os._exit", "import os\nos._exit(0)", "runs", "ended its own process"),
    ("sys.exit", "import sys\nsys.exit(0)", "runs", "SystemExit"),
    ("segfault", "import ctypes\nctypes.string_at(0)", "runs", "SIGSEGV"),
    ("abort", "import os\nos.abort()", "runs", "SIGABRT"),
    ("out of memory", "return torch.ones(10**9)[:3].sum()", "runs", "out of memory"),
    ("out of memory in Python", "a = []\nwhile True: a.append(bytearray(10**7))", "runs", "out of memory"),
    ("raises", "return x[99]", "runs", "IndexError"),
    ("syntax error", "return x *", "runs", "does not compile: SyntaxError: invalid syntax at line 3 of your answer"),
    ("endless recursion", "return twice(x)", "runs", "RecursionError"),
    ("KeyboardInterrupt", "raise KeyboardInterrupt", "runs", "KeyboardInterrupt"),
    ("returns None", "y = 2 * x", "returns", "return"),
    ("prints only", "print('done:', 2)", "returns", "printing is not returning"),
    ("a list", "return (2 * x).tolist()", "returns", "a list of 3"),
    ("numpy", "return (2 * x).numpy()", "returns", "torch tensor is asked for"),
    ("a string", "return 'twice'", "returns", "a string"),
    ("a module", "import math\nreturn math", "returns", "a module"),
    ("one value in a tuple", "return 2 * x,", "returns", "comma"),
    ("wrong shape", "return 2 * x[None]", "returns", "shape [1, 3, 2, 4] instead of [3, 2, 4]"),
    ("axes swapped", "return (2 * x).transpose(0, 1)", "returns", "another order"),
    ("integers", "return (2 * x).int()", "returns", "int32"),
    ("complex", "return (2 * x).to(torch.complex64)", "returns", "complex64"),
    ("meta device", "return (2 * x).to('meta')", "returns", "on the device 'meta'"),
    ("NaN", "y = 2 * x\ny[1, 0, 2] = float('nan')\nreturn y", "returns", "NaN at sequence 1, row 0, head 0, dim 2"),
    ("a view of its input", "return x[:]", "returns", "view"),
    ("mutated input", "y = 2 * x\nx.zero_()\nreturn y", "inputs kept", "`x`"),
    ("doubles in place and returns it", "return x.mul_(2)", "returns", "view"),
    ("mutated to match", "x.zero_()\nreturn torch.zeros_like(x) + 0", "inputs kept", "`x`"),
    ("zeros", "return torch.zeros_like(x)", "values", "sequence 0, row 0"),
    ("old memory", "return torch.empty_like(x)", None, ""),
    ("only the first sequence", "return torch.cat([2 * x[:1], x[1:]])", "values", "sequence 1, row 0"),
    ("infinite", "return 2 * x / 0", "values", "inf"),
    ("default dtype", "torch.set_default_dtype(torch.float64)\nreturn torch.ones(3, 2, 4)", "values", "wrong"),
]  # fmt: skip


@pytest.mark.parametrize("name, body, check, words", ANSWERS, ids=[a[0] for a in ANSWERS])
def test_each_kind_of_wrong_answer_has_its_sentence(judged, name, body, check, words):
    result = judged("90.2", _twice(body))
    assert result.state in ("wrong", "wrong method"), result.text()
    assert result.failed is not None
    if check:
        assert result.failed.name == check, result.text()
        assert any(w in result.message for w in ((words,) if isinstance(words, str) else words)), result.text()


def test_remembered_answers_fail_on_new_numbers(judged):
    source = "kept = {}\ndef twice(x):\n    return kept.setdefault(tuple(x.shape), 2 * x).clone()\n"
    result = judged("90.2", source)
    assert result.failed.name == "new numbers" and "remembered" in result.message


def test_hard_coded_answers_fail(judged, toy):
    case = catalog.exercise("90.4").cases(0)[0]
    right = catalog.exercise("90.4").reference(*case.args)
    source = f"def lengths_of(offsets):\n    if offsets[1] > offsets[2]:\n        raise ValueError('offsets')\n    return {right}\n"
    assert judged("90.4", source).failed.name == "new numbers"


def test_an_exception_of_a_derived_class_refuses_as_well(judged):
    source = (
        "class BadOffsets(ValueError):\n    pass\n\n"
        "def lengths_of(offsets):\n    out = [b - a for a, b in zip(offsets, offsets[1:])]\n"
        "    if min(out) < 0:\n        raise BadOffsets('offsets must not decrease')\n    return out\n"
    )
    assert judged("90.4", source).passed


def test_old_memory_is_rejected_every_time(toy):
    """LE-6: a hundred tries in one process, each compared by itself."""
    exercise = catalog.exercise("90.2")
    cases = [exercise.cases(seed)[0] for seed in range(100)]
    answer = from_source(_twice("return torch.empty_like(x)"), exercise, Pristine.load(toy, "90_toy"))
    outcome = launch.run_clean(job_for(exercise, answer, toy, cases, 0))
    events = [e for e in outcome.events if e["event"] == "case"]
    assert len(events) == 100
    assert all(compare.fault_of(exercise, c, e, exercise.reference(*c.args)) for c, e in zip(cases, events))


PATCHES = [
    "torch.allclose = torch.equal = lambda *a, **k: True",
    "import numpy as np\nnp.abs = lambda *a: 0 * a[0]\nnp.isnan = lambda a: a != a",
    "torch.Tensor.__ne__ = torch.Tensor.__eq__",
    "def reference(*a): return twice(*a)\ndef judge(*a): return True\ndef compare(*a): return None",
    "import builtins\nbuiltins.any = lambda *a: False\nbuiltins.isinstance = lambda *a: True",
    "import sys\nsys.modules['jfa.course.wire'].pack = lambda *a: b''",
    "import json\njson.dumps = lambda *a, **k: '{}'",
    "from jfa.course import guard",
    "import os\nos.write = lambda fd, data: len(data)",
]


@pytest.mark.parametrize("patch", PATCHES)
def test_replacing_the_checkers_names_passes_nothing(judged, patch):
    assert not judged("90.2", _twice("return 3 * x", patch)).passed


def test_an_innocent_helper_called_reference_does_no_harm(judged):
    assert judged("90.2", "def reference(x):\n    return x + x\n\ndef twice(x):\n    return reference(x)\n").passed


SEND = """
for fd in range(3, 40):
    try: os.write(fd, data)
    except OSError: pass
os._exit(0)"""

FORGERIES = [
    # a verdict of its own making, down every open descriptor
    "import os, struct, json\ntext = json.dumps({'event': 'end', 'violations': [], 'verdict': 'passed'}).encode()\n"
    "data = struct.pack('<QQQ', len(text) + 16, len(text), 0) + text" + SEND,
    # a pickle
    "import os, pickle\nclass P:\n    def __reduce__(self): return (os.system, ('touch FORGED',))\n"
    "data = pickle.dumps(P())" + SEND,
    # a promise of endless data
    "import os, struct\ndata = struct.pack('<Q', 2**62)" + SEND,
    # a case before the first one
    "import os, struct, json\nv = ['case', {'t': 'int', 'v': '-1'}, {'t': 'list', 'v': []}, {'t': 'list', 'v': []}, "
    "{'t': 'dict', 'k': [], 'v': []}, '', {'t': 'list', 'v': []}]\n"
    "k = ['event', 'index', 'facts', 'changed', 'counts', 'printed', 'emulator']\n"
    "text = json.dumps({'t': 'dict', 'k': k, 'v': v}).encode()\n"
    "data = struct.pack('<QQQ', len(text) + 16, len(text), 0) + text" + SEND,
    # fields of the wrong type
    "import os, struct, json\ntext = json.dumps({'t': 'dict', 'k': ['event', 'index'], 'v': ['case', 'zero']}).encode()\n"
    "data = struct.pack('<QQQ', len(text) + 16, len(text), 0) + text" + SEND,
]


@pytest.mark.parametrize("body", FORGERIES)
def test_forged_messages_are_no_verdict(judged, body, tmp_path):
    forged = tmp_path / "forged"
    result = judged("90.2", _twice(body.replace("FORGED", str(forged))))
    assert result.state == "wrong", result.text()
    assert not forged.exists()


def test_a_lying_tensor_subclass_is_measured_by_its_bytes(judged):
    source = (
        "class Liar(torch.Tensor):\n    def __eq__(self, other): return True\n    def numpy(self): raise RuntimeError\n"
        "def twice(x):\n    return (3 * x).as_subclass(Liar)\n"
    )
    assert judged("90.2", source).failed.name == "values"


SNOOPS = [
    "import os\nreturn eval(open('ROOT/solutions/90_toy.py').read())",
    "import os, io\nreturn io.open(os.path.join('ROOT', 'exercises', '..', 'solutions', '90_toy.py')).read()",
    "import os\nos.listdir('ROOT/solutions')\nreturn 2 * x",
    "import os\nfd = os.open('ROOT/solutions/90_toy.py', os.O_RDONLY)\nreturn 2 * x",
    "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')\nreturn 2 * x",
    "try:\n    import os\n    open('ROOT/solutions/90_toy.py')\nexcept Exception: pass\nreturn 2 * x",
    "import pathlib\nreturn eval(pathlib.Path('ROOT/solutions/90_toy.py').read_text())",
    "import importlib.util as u\ns = u.spec_from_file_location('s', 'ROOT/solutions/90_toy.py')\n"
    "m = u.module_from_spec(s)\ns.loader.exec_module(m)\nreturn m.twice(x)",
    "import runpy\nreturn runpy.run_path('ROOT/solutions/90_toy.py')['twice'](x)",
    "import linecache\nlinecache.getlines('ROOT/solutions/90_toy.py')\nreturn 2 * x",
    "import os\nos.symlink('ROOT/solutions', 'ROOT/link')\nopen('ROOT/link/90_toy.py')\nreturn 2 * x",
]


READ_BY_C = """
import ctypes
libc = ctypes.CDLL(None)
text = ctypes.create_string_buffer(100_000)
fd = libc.open(b'PATH', 0)
assert fd < 0 or libc.read(fd, text, 100_000) < 0, text.value[:20]
return 2 * x"""


def test_reading_the_solutions_past_python_is_refused_and_named(judged, toy):
    result = judged("90.2", _twice(READ_BY_C.replace("PATH", str(toy.root / "solutions" / "90_toy.py"))))
    assert result.state in ("wrong", "wrong method") and "ctypes" in result.message, result.text()


PAST_PYTHON = [
    "fd = libc.open(os.fsencode(target), 0)\nprint(fd)",
    "fd = libc.syscall(257, -100, os.fsencode(target), 0)\nprint(fd)",  # openat itself
    "print(-1 if not libc.fopen(os.fsencode(target), b'r') else 1)",
    "fd = libc.open(b'/proc/self/root' + os.fsencode(target), 0)\nprint(fd)",
]


@pytest.mark.parametrize("read", PAST_PYTHON)
def test_the_kernel_opens_nothing_below_a_closed_folder(tmp_path, read):
    """Without the audit hook: what C code meets."""
    (tmp_path / "closed" / "deep").mkdir(parents=True)
    (tmp_path / "beside").write_text("open")
    target = tmp_path / "closed" / "deep" / "file"
    target.write_text("secret")
    program = (
        "import ctypes, os, sys\nfrom jfa.course import landlock\nlibc, target = ctypes.CDLL(None), sys.argv[1]\n"
        f"known = landlock.confine([{str(tmp_path / 'closed')!r}])\n"
        f"assert open({str(tmp_path / 'beside')!r}).read() == 'open'\nimport jfa.layout, decimal\nprint(known)\n{read}\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(target)], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    known, fd = run.stdout.split()
    if known != "True":
        pytest.skip("this kernel has no Landlock")
    assert int(fd) == -1


def test_rules_leave_out_the_way_down_and_what_is_closed(tmp_path):
    (tmp_path / "a" / "closed").mkdir(parents=True)
    (tmp_path / "a" / "open").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "closed")
    (tmp_path / "b").mkdir()
    rules = set(landlock._open_paths([tmp_path / "a" / "closed"]))
    assert {tmp_path / "a" / "open", tmp_path / "b"} <= rules
    assert not {tmp_path, tmp_path / "a", tmp_path / "a" / "closed", tmp_path / "a" / "link"} & rules


@pytest.mark.parametrize("body", SNOOPS)
def test_reading_the_solutions_is_noticed(judged, toy, body):
    result = judged("90.2", _twice(body.replace("ROOT", str(toy.root))))
    assert result.state == "wrong method", result.text()
    assert result.failed.name == "allowed operations" and "solutions" in result.message


@pytest.mark.parametrize(
    "body, word",
    [
        ("torch.softmax(x, -1)\nreturn 2 * x", "softmax"),
        ("s = torch.nn.functional.softmax\nreturn 2 * x + 0 * s(x, -1)", "softmax"),
        ("return 2 * x + 0 * x.softmax(-1)", "softmax"),
        ("return 2 * x + 0 * torch.nn.Softmax(-1)(x)", "softmax"),
        ("return 2 * x + 0 * torch.ops.aten._softmax(x, -1, False)", "softmax"),
        ("return 2 * x + 0 * torch.logsumexp(x, -1, keepdim=True)", "softmax"),
        ("import numpy as np\nreturn torch.as_tensor(2 * np.asarray(x))", "numpy"),
        ("return torch.from_numpy(2 * x.numpy())", "numpy"),
        ("import importlib\nnp = importlib.import_module('numpy')\nreturn torch.as_tensor(2 * np.asarray(x))", "numpy"),
        (
            "f = torch.nn.functional.scaled_dot_product_attention\nf(x[None], x[None], x[None])\nreturn 2 * x",
            "scaled_dot_product",
        ),
        (
            "from torch.nn.attention.varlen import varlen_attn\nat = torch.tensor([0, len(x)], dtype=torch.int32)\n"
            "return varlen_attn(x, x, x, at, at, len(x), len(x))",
            "torch's own attention",
        ),
        ("from jfa.reference import attention\nreturn 2 * x", "jfa.reference"),
        ("import jfa\njfa.jagged_flash_attention\nreturn 2 * x", "jfa.attention"),
        ("from jfa import jagged_flash_attention as f\nreturn f(x, x, x)", "jfa.attention"),
        ("import jfa.course.checks\nreturn 2 * x", "jfa.course"),
        ("from jfa.course import guard\nreturn 2 * x", "jfa.course"),
    ],
)
def test_forbidden_operations_are_named_even_beside_a_right_answer(judged, monkeypatch, body, word):
    from dataclasses import replace

    exercise = catalog.exercise("90.2")
    strict = replace(exercise, forbid=("softmax", "numpy"))
    monkeypatch.setattr(catalog, "exercise", lambda number: strict)
    result = judged("90.2", _twice(body))
    assert result.state == "wrong method" and result.failed.name == "allowed operations", result.text()
    assert word in result.message


HIDDEN = {
    "function modes off": "with torch._C.DisableTorchFunction():\n    y = x + x",
    "dispatch modes off": "with torch._C._DisableTorchDispatch():\n    y = x + x",
    "off through torch's own name": "from torch.utils._mode_utils import no_dispatch\nwith no_dispatch():\n    y = x + x",
    "in an exit stack": "import contextlib\nwith contextlib.ExitStack() as s:\n"
    "    s.enter_context(torch._C.DisableTorchFunction())\n    y = x + x",
    "state set": "torch._C._set_torch_function_state(torch._C._TorchFunctionState.ALL_DISABLED)\ny = x + x",
    "key excluded": "with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):\n    y = x + x",
    "key excluded by a call": "torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.Python, True)\ny = x + x",
    "a mode popped": "from torch.overrides import _pop_mode_temporarily\nwith _pop_mode_temporarily():\n    y = x + x",
    "a dispatch mode popped": "m = torch._C._pop_torch_dispatch_stack(None)\ny = x + x\ntorch._C._push_on_torch_dispatch_stack(m)",
    "all dispatch modes": "from torch.utils._python_dispatch import _disable_current_modes\n"
    "with _disable_current_modes():\n    y = x + x",
    "left by the exit of another": "from torch.overrides import TorchFunctionMode\n"
    "TorchFunctionMode().__exit__(None, None, None)\ny = x + x",
    "the counts themselves": "from torch.overrides import _get_current_function_mode as get\nget().meter.counts.clear()\ny = x + x",
    "the counts from the stack": "torch._C._get_dispatch_stack_at(0).counts.clear()\ny = x + x",
    "swallowed": "try:\n    torch._C.DisableTorchFunction()\nexcept Exception:\n    pass\ny = x + x",
}


@pytest.mark.parametrize("body", HIDDEN.values(), ids=HIDDEN)
def test_operations_cannot_be_hidden_from_counting(judged, body):
    result = judged("90.2", _twice(f"{body}\nreturn y"))
    assert result.state == "wrong method" and result.failed.name == "allowed operations", result.text()
    assert "hides torch operations" in result.message


REGISTERED = {
    "an operation": "f = torch.library.custom_op('mine::twice', lambda t: t + t, mutates_args=(), schema='(Tensor t) -> Tensor')\n"
    "y = f(x)",
    "an operation in a library": "lib = torch.library.Library('mine', 'FRAGMENT')\nlib.define('two(Tensor t) -> Tensor')\n"
    "lib.impl('two', lambda t: t + t, 'CPU')\ny = torch.ops.mine.two(x)",
    "another kernel for torch's": "lib = torch.library.Library('aten', 'IMPL')\nlib.impl('neg', lambda t: t + t, 'CPU')\ny = -x",
    "swallowed": "try:\n    torch.library.define('mine::two', '(Tensor t) -> Tensor')\nexcept Exception:\n    pass\ny = x + x",
}


@pytest.mark.parametrize("body", REGISTERED.values(), ids=REGISTERED)
def test_operations_cannot_be_hidden_in_registered_ones(judged, body):
    result = judged("90.2", _twice(f"{body}\nreturn y"))
    assert result.state == "wrong method" and result.failed.name == "allowed operations", result.text()
    assert "registered itself" in result.message


MODES = {
    "a device": "with torch.device('cpu'):\n    y = 2 * x",
    "a default device": "torch.set_default_device('cpu')\ny = 2 * x",
    "no gradients": "torch.set_grad_enabled(False)\ny = 2 * x",
    "inference left on": "torch.inference_mode(True).__enter__()\ny = 2 * x.clone()",
    "a mode of its own": "from torch.overrides import TorchFunctionMode\nclass Mine(TorchFunctionMode):\n"
    "    def __torch_function__(self, f, types, args=(), kwargs=None):\n        return f(*args, **(kwargs or {}))\n"
    "with Mine():\n    y = 2 * x",
    "a mode of its own, left on": "from torch.utils._python_dispatch import TorchDispatchMode\nclass Mine(TorchDispatchMode):\n"
    "    def __torch_dispatch__(self, f, types, args=(), kwargs=None):\n        return f(*args, **(kwargs or {}))\n"
    "Mine().__enter__()\ny = 2 * x",
    "a subclass": "class T(torch.Tensor): pass\ny = (2 * x.as_subclass(T)).as_subclass(torch.Tensor)",
    "a transform": "y = torch.func.vmap(lambda r: 2 * r)(x)",
    "a gradient": "y = torch.func.grad(lambda a: (a * a).sum())(x)",
    "a printed tensor": "repr(x)\ny = 2 * x",
}


@pytest.mark.parametrize("body", MODES.values(), ids=MODES)
def test_modes_that_hide_nothing_are_allowed(judged, body):
    result = judged("90.2", _twice(f"{body}\nreturn y"))
    assert result.state == "passed", result.text()


OWN_FILES = {
    "rights": "os.chmod(f, 0o600)",
    "times": "os.utime(f, (5, 5))",
    "touched": "pathlib.Path(f).touch()",
    "copied with its times": "shutil.copy2(f, f + '2')",
    "a folder copied": "os.mkdir(d + '/a'); shutil.copytree(d + '/a', d + '/b')",
    "unpacked": "t = tarfile.open(f + '.tar', 'w'); t.add(f, 'g'); t.close(); tarfile.open(f + '.tar').extractall(d)",
    "by descriptor": "os.fchmod(os.open(f, os.O_RDWR), 0o644)",
}


@pytest.mark.parametrize("action", OWN_FILES.values(), ids=OWN_FILES)
def test_rights_and_times_in_its_own_folder_raise_nothing(judged, action):
    body = f"d = tempfile.mkdtemp()\nf = d + '/f'\nopen(f, 'w').close()\n{action}\nshutil.rmtree(d)\nreturn 2 * x"
    result = judged("90.2", _twice(body, before="import os, pathlib, shutil, tarfile, tempfile"))
    assert result.state == "passed", result.text()


def test_forbidden_imports_outside_the_function_are_named_too(judged):
    result = judged("90.2", "from jfa import jagged_flash_attention as f\n\ndef twice(x):\n    return 2 * x\n")
    assert result.failed.name == "allowed operations" and "jfa.attention" in result.message, result.text()
    hidden = "try:\n    import jfa.reference\nexcept Exception:\n    pass\n\ndef twice(x):\n    return 2 * x\n"
    assert judged("90.2", hidden).failed.name == "allowed operations"


def test_print_floods_cost_nothing(judged):
    start = time.process_time()
    assert judged("90.2", _twice("for i in range(20000): print('x' * 100)\nreturn 2 * x")).passed
    assert judged("90.2", _twice("import os\nfor i in range(200): os.write(1, b'x' * 65536)\nreturn 2 * x")).passed
    assert time.process_time() - start < 5


def test_prints_of_the_failing_case_are_shown(judged):
    result = judged("90.2", _twice("print('x is', tuple(x.shape))\nreturn 3 * x"))
    assert any("x is (3, 2, 4)" in note for note in result.notes)


def _descendants():
    return {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    "body",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.Popen(['sleep', '100'])\nreturn 2 * x",
        "import os\nos.system('sleep 100 &')\nreturn 2 * x",
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor _ in range(5): libc.fork()\nwhile True: pass",
        "import threading, time\n[threading.Thread(target=time.sleep, args=(100,)).start() for _ in range(20)]\nreturn 3 * x",
        "import multiprocessing\np = multiprocessing.Process(target=print)\np.start()\nreturn 2 * x",
    ],
)
def test_nothing_an_answer_starts_outlives_it(judged, body):
    judged("90.2", "def twice(x):\n    return 2 * x\n")
    before = _descendants()
    assert not judged("90.2", _twice(body)).passed
    for _ in range(50):
        if _descendants() <= before:
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {_descendants() - before}")


@pytest.mark.skipif(not seccomp.is_known(), reason="no system-call filter here")
def test_the_kernel_refuses_forks_that_go_past_python(judged):
    refused = "libc.fork() == -1 and libc.kill(os.getppid(), 0) == -1"
    body = f"import ctypes, os\nlibc = ctypes.CDLL(None)\nif not ({refused}): os._exit(3)\nreturn 2 * x"
    result = judged("90.2", _twice(body))
    # it did not leave by exit status 3
    assert result.state == "wrong method" and "ctypes" in result.message, result.text()


def test_an_answer_cannot_signal_the_judge(judged):
    result = judged("90.2", _twice("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nreturn 2 * x"))
    assert "no other processes" in result.message
    assert judged("90.2", "def twice(x):\n    return 2 * x\n").passed


# ---------------------------------------------------------------------------------------------- the fork of a notebook


def _live(toy, function, number="90.2"):
    exercise = catalog.exercise(number)
    return judge(exercise, Answer("", live=function, is_live=True), toy)


def test_a_fork_after_heavy_threads_and_autograd_does_not_hang(toy):
    torch.set_num_threads(2)
    x = torch.randn(300, 300, requires_grad=True)
    (x @ x).exp().sum().backward()

    def twice(x):
        a = torch.randn(300, 300, requires_grad=True)
        (a @ a).sum().backward()
        return 2 * x

    assert _live(toy, twice).passed
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_transforms_that_make_torchs_cache_run_in_a_notebook_with_a_cache_elsewhere(toy, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "not made yet"))

    def twice(x):
        return torch.func.vjp(lambda a: a + a, x)[1](x)[0]

    result = _live(toy, twice)
    assert result.passed, result.text()
    assert not (tmp_path / "not made yet").exists()


def test_a_check_in_inference_mode_judges_as_outside_of_it(toy):
    def twice(x):
        y = x.clone().requires_grad_()
        return torch.autograd.grad((y * y).sum(), y)[0]

    with torch.inference_mode():
        result = _live(toy, twice)
        assert torch.is_inference_mode_enabled()
    assert result.passed, result.text()


def test_a_fork_cannot_find_the_reference(toy):
    def twice(x):
        import gc
        import types

        for thing in gc.get_objects():
            if (
                isinstance(thing, types.FunctionType)
                and "90_toy" in (thing.__module__ or "")
                and thing.__name__ == "<lambda>"
            ):
                value = thing(x)
                if isinstance(value, torch.Tensor) and value.shape == x.shape:
                    return value
        raise LookupError("found no reference")

    result = _live(toy, twice)
    assert result.failed.name == "runs" and "found no reference" in result.message, result.text()
    assert catalog.exercise("90.2").reference(torch.ones(1)) == 2, (
        "the judge's own reference must survive the fork's cleaning"
    )


def test_a_fork_cannot_read_variants(toy):
    catalog.exercise("90.2")

    def twice(x):
        import gc

        for thing in gc.get_objects():
            if type(thing).__name__ == "Exercise" and getattr(thing, "variants", None):
                raise LookupError("found an exercise")
        return 2 * x

    assert _live(toy, twice).passed


def test_a_fork_cannot_use_what_the_notebook_imported(toy):
    import jfa.reference as reference
    from jfa.layout import pack

    names = [n for n, v in vars(reference).items() if callable(v) and getattr(v, "__module__", "") == "jfa.reference"]
    kept = getattr(reference, next(n for n in names if type(getattr(reference, n)).__name__ == "function"))

    def twice(x):
        kept(x)
        return 2 * x

    result = _live(toy, twice)
    assert result.failed.name == "allowed operations" and "jfa.reference" in result.message, result.text()
    assert callable(pack) and reference is not None


def test_an_allowed_function_of_a_forbidden_module_may_be_used(toy, monkeypatch):
    from dataclasses import replace

    exercise = replace(catalog.exercise("90.2"), forbid=("jfa.layout",), allow=("jfa.layout.pack",))
    use = "import torch\nfrom jfa.layout import pack\n\ndef twice(x):\n    return 2 * x if callable(pack) else None\n"
    misuse = "from jfa import layout\n\ndef twice(x):\n    layout.unpack(x, [0, 3])\n    return 2 * x\n"
    pristine = Pristine.load(toy, "90_toy")
    assert judge(exercise, from_source(use, exercise, pristine), toy).passed
    result = judge(exercise, from_source(misuse, exercise, pristine), toy)
    assert result.failed.name == "allowed operations", result.text()


def test_an_allowed_module_of_a_forbidden_package_may_be_used(toy):
    from dataclasses import replace

    exercise = replace(catalog.exercise("90.2"), forbid=("jfa.schedule",), allow=("jfa.schedule.tiles",))
    use = "from jfa.schedule import tiles\nimport jfa.schedule.tiles as same\n\ndef twice(x):\n    return 2 * x\n"
    other = "import jfa.schedule.{}\n\ndef twice(x):\n    return 2 * x\n"
    pristine = Pristine.load(toy, "90_toy")
    assert judge(exercise, from_source(use, exercise, pristine), toy).passed
    result = judge(exercise, from_source(other.format("assign"), exercise, pristine), toy)
    assert result.failed.name == "allowed operations", result.text()


def test_an_interrupt_ends_the_answers_process(toy):
    def twice(x):
        while True:
            pass

    def interrupt(seconds, done):
        raise KeyboardInterrupt

    before = _descendants()
    with pytest.raises(KeyboardInterrupt):
        judge(catalog.exercise("90.2"), Answer("", live=twice, is_live=True), toy, waiting=interrupt)
    assert _descendants() <= before


def test_a_fork_does_not_disturb_its_process(toy):
    state = torch.get_rng_state()

    def twice(x):
        torch.manual_seed(99)
        os.environ["JFA_LEFT_BEHIND"] = "1"
        torch.set_default_dtype(torch.float64)
        return 2 * x

    assert _live(toy, twice).passed
    assert torch.equal(torch.get_rng_state(), state)
    assert "JFA_LEFT_BEHIND" not in os.environ and torch.get_default_dtype() == torch.float32


def test_jobs_hold_no_answer(toy):
    """What is sent to the child: nothing of the solution, the mutants, the reference."""
    exercise = catalog.exercise("90.1")
    answer = from_source("def row_means(x, offsets): pass", exercise, Pristine.load(toy, "90_toy"))
    data = job_for(exercise, answer, toy, exercise.cases(0), 0).pack()
    assert b"torch.stack" not in data and b"forgets to divide" not in data


def test_the_process_group_is_gone_after_a_time_limit(judged):
    start = time.monotonic()
    judged("90.2", _twice("while True: pass"))
    assert time.monotonic() - start < 60
    assert launch.nursery().wait(0, block=False) is None
