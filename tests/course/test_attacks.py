"""Answers of a learner who would rather beat the judge than the exercise: every verdict is right, and nobody else notices."""

import os
import random
import sys
import tempfile
import warnings

import pytest
import torch

from jfa.course import catalog
from jfa.course.judge import Answer, judge

# ruff: noqa: E501 -- programs, a line each


def _twice(body, before=""):
    return f"{before}\ndef twice(x):\n" + "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))


# before, body: always three times x where two times is right
PATCHED = {
    "torch.testing": "import torch.testing\ntorch.testing.assert_close = lambda *a, **k: None",
    "whatever is called compare": "import sys\nfor name, module in list(sys.modules.items()):\n    if 'compare' in name or 'trial' in name:\n"
    "        for key in [k for k, v in vars(module).items() if callable(v)]:\n            setattr(module, key, lambda *a: None)",
    "messages, found by gc": "import gc, types\nfor f in gc.get_objects():\n"
    "    if isinstance(f, types.FunctionType) and f.__module__ == 'jfa.course.wire':\n        f.__code__ = (lambda *a: b'').__code__",
    "equality of tensors": "torch.Tensor.__eq__ = torch.Tensor.eq = lambda a, b: torch.ones(1, dtype=torch.bool)",
    "subtraction of tensors": "torch.Tensor.__sub__ = lambda a, b: torch.zeros(1)",
    "hmac": "import hmac\nhmac.compare_digest = lambda a, b: True",
    "threads that stay": "import atexit\natexit.register(lambda: [None for _ in iter(int, 1)])",
    "a finalizer": "class D:\n    def __del__(self):\n        import os\n        os._exit(0)\nimport builtins\nbuiltins.keep = D()",
}


@pytest.mark.parametrize("before", PATCHED.values(), ids=PATCHED)
def test_a_patched_judge_is_not_the_judge(judged, before):
    result = judged("90.2", _twice("return 3 * x", before))
    assert result.state == "wrong" and result.failed.name == "values", result.text()


# what is returned, which check fails, words of its message ("" where it is right)
RETURNED = {
    "an object equal to everything": (
        "class A:\n    shape, dtype = x.shape, x.dtype\n    def __eq__(self, other): return True\n"
        "    def __array__(self, *a, **k): return (2 * x).numpy()\nreturn A()",
        "returns", "a A",
    ),
    "a subclass that answers True": (
        "class T(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, f, types, args=(), kwargs=None): return True\n"
        "return (3 * x).as_subclass(T)",
        "values", "wrong",
    ),
    "a subclass that is another tensor when read": (
        "class T(torch.Tensor):\n    def detach(self): return 2 * x\n    clone = contiguous = cpu = reshape = view = detach\n"
        "    def numpy(self): return (2 * x).numpy()\nreturn (3 * x).as_subclass(T)",
        "values", "wrong",
    ),
    "a wrapper that computes when read": (
        "class T(torch.Tensor):\n    @staticmethod\n    def __new__(cls): return torch.Tensor._make_wrapper_subclass(cls, x.shape)\n"
        "    @classmethod\n    def __torch_dispatch__(cls, f, types, args=(), kwargs=None): return 2 * x\nreturn T()",
        "returns", "class, T",
    ),
    "a list that computes when read": (
        "class L(list):\n    def __getitem__(self, at): return [2 * x]\n    def __iter__(self): return iter([2 * x])\nreturn L([3 * x])",
        "returns", "holding one value",
    ),
    "a generator": ("yield 2 * x", "returns", "a generator"),
    "a coroutine": ("async def f(): return 2 * x\nreturn f()", "returns", "a coroutine"),
    "a map": ("return map(lambda row: 2 * row, x)", "returns", "a map"),
    "a function": ("return lambda: 2 * x", "returns", "a function"),
    "a deep list": ("y = []\nfor _ in range(10_000): y = [y]\nreturn y", "returns", "a list"),
    "a list in itself": ("y = []\ny.append(y)\nreturn y", "returns", "a list"),
    "a list of millions": ("return [0] * 3_000_000", "returns", "a list"),
    "more numbers than there is memory": ("return torch.zeros(1, 1).expand(10**6, 10**6)", "runs", "memory"),
    "no strided tensor": ("return (2 * x).to_sparse()", "returns", "sparse"),
    "a quantised tensor": ("return torch.quantize_per_tensor(2 * x, 0.1, 0, torch.qint8)", "returns", "qint8"),
    "memory that is gone": ("y = 2 * x\ny.untyped_storage().resize_(0)\nreturn y", None, ""),
    "a tensor that requires gradients": ("return 2 * x.clone().requires_grad_()", "", ""),
    "a negated view": ("return torch._neg_view(-2 * x)", "", ""),
    "a parameter": ("return torch.nn.Parameter(2 * x)", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("body, check, words", RETURNED.values(), ids=RETURNED)
def test_what_is_returned_is_what_it_is(judged, body, check, words):
    result = judged("90.2", _twice(body))
    assert result.passed == (check == ""), result.text()
    if check:
        assert result.failed.name == check and words in result.message, result.text()


INPUTS = {
    "by its memory": "y = 2 * x\nx.set_(y)\nreturn y.clone()",
    "by its size": "y = 2 * x\nx.resize_(1)\nreturn y",
    "by numpy": "y = 2 * x\nx.numpy()[:] = 0\nreturn y",
    "by dlpack": "y = 2 * x\ntorch.from_dlpack(x).zero_()\nreturn y",
    "by its storage": "y = 2 * x\nx.untyped_storage().fill_(0)\nreturn y",
    "by as_strided": "y = 2 * x\ntorch.as_strided(x, (1,), (1,), 1).fill_(7)\nreturn y",
    "by its data": "y = 2 * x\nx.data.mul_(2)\nreturn y",
}


@pytest.mark.parametrize("body", INPUTS.values(), ids=INPUTS)
def test_a_changed_input_is_noticed_however_it_was_changed(judged, body):
    assert judged("90.2", _twice(body)).failed.name == "inputs kept"


@pytest.mark.parametrize("body", ["y = 2 * x\nx.data = y\nreturn y", "x.mul_(2)\nreturn x.view_as(x)"])
def test_an_input_that_becomes_the_result_is_a_view(judged, body):
    result = judged("90.2", _twice(body))
    assert result.failed.name == "returns" and "view" in result.message


ATTENTION = [
    "torch.ops.aten.scaled_dot_product_attention(q, q, q)",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)",
    "torch.ops.aten._scaled_dot_product_attention_math(q, q, q)",
    "torch._C._nn.scaled_dot_product_attention(q, q, q)",
    "torch.vmap(torch.nn.functional.scaled_dot_product_attention)(q, q, q)",
    "torch.func.grad(lambda t: torch.nn.functional.scaled_dot_product_attention(t, t, t).sum())(q)",
    "torch.jit.trace(lambda t: torch.nn.functional.scaled_dot_product_attention(t, t, t), q)(q)",
    "torch.nn.MultiheadAttention(4, 1)(q[0], q[0], q[0])",
    "torch.nn.TransformerEncoderLayer(4, 1, 8, batch_first=True).eval()(q[0])",
    "getattr(torch.ops.aten, 'scaled_dot' + '_product_attention').default(q, q, q)",
    "torch._C._jit_get_operation('aten::scaled_dot_product_attention')[0](q, q, q)",
    "torch.utils.checkpoint.checkpoint(torch.nn.functional.scaled_dot_product_attention, q, q, q, use_reentrant=False)",
    "torch.ops.aten._native_multi_head_attention(q[0], q[0], q[0], 4, 1, torch.randn(12, 4), torch.randn(12), torch.randn(4, 4), "
    "torch.randn(4))",
    "exec(\"from torch.nn.functional import scaled_dot_product_attention as einsum\\neinsum(q, q, q)\", {'q': q})",
]


@pytest.mark.parametrize("call", ATTENTION)
def test_torchs_attention_is_seen_under_every_name(judged, call):
    result = judged(
        "90.2", _twice(f"q = torch.randn(1, 1, 3, 4)\n{call}\nreturn 2 * x", "import torch.utils.checkpoint")
    )
    assert result.state == "wrong method" and "torch's own attention" in result.message, result.text()


PRODUCT = [
    "import importlib\nimportlib.import_module('jfa.reference')",
    "__import__('jfa.reference')",
    "import pickle\npickle.loads(b'cjfa.reference\\nattention\\n.')",
    "exec(__import__('base64').b64decode('aW1wb3J0IGpmYS5yZWZlcmVuY2U='))",
    "import pkgutil\npkgutil.resolve_name('jfa.reference:attention')",
    "import runpy\nrunpy.run_module('jfa.reference')",
    "import importlib.util\nimportlib.util.find_spec('jfa.reference')",
    "import importlib.machinery, jfa\nimportlib.machinery.SourceFileLoader('r', jfa.__path__[0] + '/reference.py').load_module()",
    "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'Closed' not in type(f).__name__]\nimport jfa.reference",
    "import importlib.resources as r\nr.files('jfa').joinpath('reference.py').read_text()",
    "import numpy, jfa\nnumpy.fromfile(jfa.__path__[0] + '/reference.py', dtype='u1')",
    "import mmap, os, jfa\nmmap.mmap(os.open(jfa.__path__[0] + '/reference.py', os.O_RDONLY), 0)",
    "import zipfile, jfa\nzipfile.ZipFile(jfa.__path__[0] + '/reference.py')",
    "import jfa, tokenize\ntokenize.open(jfa.__path__[0] + '/reference.py')",
    "import inspect, jfa, linecache\nlinecache.updatecache(jfa.__path__[0] + '/reference.py')",
]


@pytest.mark.parametrize("way", PRODUCT)
def test_the_product_is_no_answer_however_it_is_fetched(judged, way):
    result = judged("90.2", _twice(f"{way}\nreturn 2 * x"))
    assert result.state == "wrong method" and "jfa.reference" in result.message, result.text()
    swallowed = "try:\n" + "".join(f"    {line}\n" for line in way.split("\n")) + "except Exception: pass"
    assert judged("90.2", _twice(f"{swallowed}\nreturn 2 * x")).state == "wrong method"


_FULL = ("temporary folder", "Time limit")  # whichever comes first
ENDINGS = {
    "in a lock": ("import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()", "Time limit"),
    "in select": ("import select\nselect.select([], [], [])", "Time limit"),
    "in sigwait": ("import signal\nsignal.sigwait([signal.SIGUSR1])", "Time limit"),
    "in a regular expression": ("import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')", "Time limit"),
    "in a big number": ("return 9 ** (9 ** 9)", "Time limit"),
    "in a product": ("a = torch.ones(2000, 2000)\nwhile True: torch.mm(a, a, out=a)", "Time limit"),
    "with all signals masked": ("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass", "Time limit"),
    "printing": ("while True: print('x' * 10**7)", "Time limit"),
    "in an exception's text": (
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E", "Time limit"),
    "in a list that grows": ("y = []\nwhile True: y.append([0] * 10**6)", "memory"),
    "in a text that doubles": ("y = 'a'\nwhile True: y += y", "memory"),
    "by mapping memory": ("import mmap\ny = []\nwhile True: y.append(mmap.mmap(-1, 2**28))", "memory"),
    "by many files": ("import tempfile\nd = tempfile.mkdtemp()\nfor i in range(10**7): open(f'{d}/{i}', 'w').close()", _FULL),
    "by deep folders": ("import os, tempfile\nos.chdir(tempfile.mkdtemp())\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')", _FULL),
    "by a signal of its own": ("import signal\nsignal.raise_signal(signal.SIGKILL)", "SIGKILL"),
    "by GeneratorExit": ("raise GeneratorExit", "GeneratorExit"),
    "by a group of exceptions": ("raise ExceptionGroup('two', [ValueError('a'), ValueError('b')])", "two"),
    "by an exception without a text": ("class E(Exception):\n    def __str__(self): raise ValueError('no')\nraise E", "could not be made"),
    "by an exception of millions of letters": ("raise ValueError('z' * 10**8)", "zzz …"),
    "without builtins": ("import builtins\nfor n in ('len', 'zip', 'print'): delattr(builtins, n)\nreturn 3 * x", ""),
    "without modules": ("import sys\nsys.modules.clear()\nreturn 3 * x", ""),
    "without descriptors": ("import os\nos.closerange(0, 1000)\nreturn 2 * x", "process"),
    "in a hook of its own": ("import sys\ndef hook(*a): raise RuntimeError('no')\nsys.addaudithook(hook)\nreturn 3 * x", ""),
}  # fmt: skip


@pytest.mark.parametrize("body, words", ENDINGS.values(), ids=ENDINGS)
def test_every_ending_has_a_sentence(judged, body, words, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    result = judged("90.2", _twice(body))
    words = (words,) if isinstance(words, str) else words
    assert result.state == "wrong" and any(w in result.message for w in words), result.text()
    assert len(result.text()) < 5000 and result.seconds < 60
    assert not os.listdir(tmp_path / "temporary"), "the answer's folder is still there"


HARMLESS = {
    "stdout closed": "import sys\nsys.stdout.close()",
    "no stdout": "import sys\nsys.stdout = sys.stderr = None\nprint('a')",
    "stdout of its own": "import io, sys\nsys.stdout = io.StringIO()\nprint('a')",
    "no garbage collection": "import gc\ngc.disable()\ngc.set_threshold(1)",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "anomalies looked for": "torch.autograd.set_detect_anomaly(True)",
    "no gradients": "torch.set_grad_enabled(False)",
    "another default dtype": "torch.set_default_dtype(torch.float64)",
    "a hook that looks": "import sys\nsys.addaudithook(lambda *a: None)",
    "an empty environment": "import os\nos.environ.clear()\nos.chdir('/')",
    "warnings as errors": "import warnings\nwarnings.simplefilter('error')",
    "a low recursion limit": "import sys\nsys.setrecursionlimit(200)",
    "threads of torch's": "torch.set_num_threads(3)",
}


def _state():
    return (
        os.getcwd(), dict(os.environ), random.getstate(), torch.get_rng_state().tolist(), torch.get_default_dtype(),
        torch.get_num_threads(), list(warnings.filters), sys.getrecursionlimit(), torch.is_grad_enabled(), sys.stdout,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS)
def test_what_an_answer_sets_is_its_own(judged, toy, body):
    source, before = _twice(f"{body}\nreturn 2 * x"), _state()
    assert judged("90.2", source).passed
    namespace = {"torch": torch}
    exec(source, namespace)
    live = judge(catalog.exercise("90.2"), Answer(source, live=namespace["twice"], is_live=True), toy)
    assert live.passed, live.text()
    assert _state() == before
    assert judged("90.2", _twice("import sys\nassert sys.getrecursionlimit() > 900\nreturn 2 * x")).passed


def test_signs_that_steer_a_terminal_or_a_page_are_shown_as_text(judged):
    name = "raise type('<b>E</b>\\x1b[31m', (Exception,), {})('\\x1b]0;t\\x07<img src=x>\\u202e')"
    for body in (name, "print('\\x1b[2J<script>\\u202e')\nreturn 3 * x"):
        result = judged("90.2", _twice(body))
        assert not {"\x1b", "\x07", "\u202e"} & set(result.text() + result._repr_html_())
        assert "<script>" not in result._repr_html_() and "<img" not in result._repr_html_()
