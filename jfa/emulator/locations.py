"""Where in a kernel's source the emulator is, without Triton.

Code that the frontend rewrote keeps its file and line numbers, and its globals carry the mark `__jfa_kernel__`: walking the Python
frames and keeping those with the mark gives the kernel's own call stack.
"""

import linecache
import os
import sys

MARK = "__jfa_kernel__"


def here(depth=3):
    """((file, line), …), innermost kernel frame first, at most `depth` of them; () outside a kernel."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if MARK in frame.f_globals:
            found.append((frame.f_code.co_filename, frame.f_lineno))
            if len(found) == depth:
                break
        frame = frame.f_back
    return tuple(found)


def source(location):
    """The text of a (file, line), stripped."""
    return linecache.getline(*location).strip()


def show(locations):
    """'file.py:12  `text of the line`' for the innermost of `locations`."""
    if not locations:
        return "?"
    file, line = locations[0]
    return f"{os.path.basename(file)}:{line}  `{source(locations[0])[:100]}`"
