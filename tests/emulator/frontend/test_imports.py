"""Any import order works, and `import jfa` alone costs nothing: each case in a fresh process."""

import os
import subprocess
import sys

import pytest

KERNEL = """
import linecache
source = '''
@triton.jit
def double(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i) * 2)
'''
linecache.cache["cell"] = (len(source), None, source.splitlines(True), "cell")
exec(compile(source, "cell", "exec"))
"""
LAUNCH = """
import torch
x, out = torch.randn(16), torch.empty(16)
double[(1,)](x, out, 16)
assert torch.equal(out, x * 2)
print("ran")
"""
ORDERS = {
    "jfa first": "import jfa\nimport triton, triton.language as tl\n" + KERNEL + LAUNCH,
    "triton and the kernel first": "import triton, triton.language as tl\n" + KERNEL + "import jfa\n" + LAUNCH,
    "the emulator by itself": "import jfa.emulator as e\ne.install()\nimport triton, triton.language as tl\n"
    + KERNEL
    + LAUNCH,
    "somebody looked for triton before": "import jfa, importlib.util\nassert importlib.util.find_spec('triton')\n"
    "import triton, triton.language as tl\n" + KERNEL + LAUNCH,
    "a frontend module first": "import jfa.emulator.frontend.values\nimport triton, triton.language as tl\n"
    + KERNEL
    + LAUNCH,
}


def python(code, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_imports(order):
    result = python(ORDERS[order])
    assert result.stdout == "ran\n", result.stderr[-2000:]


def test_without_greenlet_a_launch_says_what_to_install():
    missing = "import sys\nsys.modules['greenlet'] = None\n"
    result = python(missing + ORDERS["jfa first"])
    assert "needs greenlet: pip install 'jfa[emulator]'" in result.stderr.splitlines()[-1]


def test_with_tritons_own_variable_set():
    result = python(ORDERS["jfa first"], TRITON_INTERPRET="1")
    assert result.stdout == "ran\n", result.stderr[-2000:]


def test_import_jfa_loads_neither_torch_nor_triton():
    result = python("import sys, jfa\nprint({'torch', 'triton', 'numpy', 'greenlet'} & set(sys.modules))")
    assert result.stdout == "set()\n", result.stdout + result.stderr[-2000:]


def test_uninstall_gives_the_launches_back():
    code = ORDERS["jfa first"] + (
        "import jfa.emulator as e\ne.uninstall()\n"
        "try:\n    double[(1,)](x, out, 16)\nexcept Exception as error:\n    print(type(error).__name__)\n"
    )
    result = python(code)
    assert result.stdout.startswith("ran\n") and len(result.stdout.splitlines()) == 2, (
        result.stdout + result.stderr[-2000:]
    )
