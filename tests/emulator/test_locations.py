"""A report says where it is in words that its reader knows: a file's line, or a notebook's cell."""

from __future__ import annotations

import pytest

from jfa.emulator import errors, locations

CELL = """
import torch, triton, triton.language as tl
import jfa

@triton.jit
def double(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, 2 * tl.load(x + i))

double[(1,)](torch.randn(5), torch.empty(5), N=8)
"""


def test_a_file_is_named_without_its_folder():
    assert locations.place("/somewhere/kernels.py", 12) == "kernels.py:12"


def test_a_cell_is_named_by_its_number(monkeypatch):
    InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = InteractiveShell.instance()
    try:
        shell.run_cell("1 + 1", store_history=True)
        run = shell.run_cell(CELL, store_history=True)
        assert isinstance(run.error_in_exec, errors.EmulatorError)
        assert "at cell In[2], line 7 " in str(run.error_in_exec)
    finally:
        InteractiveShell.clear_instance()
