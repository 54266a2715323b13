"""Find the line of the kernel's source that is running, without Triton.

Code that the frontend rewrote keeps its file and line numbers, and its globals carry the mark `__jfa_kernel__`: walking the Python
frames and keeping those with the mark gives the kernel's own call stack.
"""

import linecache
import os
import sys

MARK = "__jfa_kernel__"

Where = tuple[tuple[str, int], ...]
"""A place in a kernel: (file, line) of it and of its callers, innermost first; () outside kernels."""


def here(depth: int = 3, frame=None) -> Where:
    """Return ((file, line), …), innermost kernel frame first, at most `depth` of them; () outside a kernel.

    frame: where to start; the caller's if None. A suspended task's is `task.greenlet.gr_frame`.
    """
    frame, found = frame or sys._getframe(1), []
    while frame is not None:
        if MARK in frame.f_globals:
            found.append((frame.f_code.co_filename, frame.f_lineno))
            if len(found) == depth:
                break
        frame = frame.f_back
    return tuple(found)


def source(location):
    """Return the text of a (file, line), stripped."""
    return linecache.getline(*location).strip()


def place(file, line):
    """Return 'file.py:12'; 'cell In[3], line 12' where the file is a notebook's cell, whose own name is a meaningless number."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kind, name = (shell.compile.format_code_name(file) if shell is not None else None) or ("File", file)
    return f"{os.path.basename(file)}:{line}" if kind == "File" else f"{kind.lower()} {name}, line {line}"


def show(locations):
    """Return 'file.py:12  `text of the line`' for the innermost of `locations`."""
    return f"{place(*locations[0])}  `{source(locations[0])[:100]}`" if locations else "?"


def turn(turns) -> str:
    """Return ' (tile = 1, k = 2)': the turn of the two innermost loops around an access; '' outside loops."""
    said = []
    while turns is not None and len(said) < 2:
        name, value, turns, _ = turns
        said.append(f"{name if name.strip('_') else 'turn'} = {getattr(value, 'value', value)}")
    return f" ({', '.join(said[::-1])})" if said else ""
