"""Explain errors in kernel code briefly: Triton's error class, the line in the user's file, the cause, a fix."""

import ast
import re

from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure, UnsupportedLanguageConstruct

from .. import errors
from ..locations import MARK, place, source
from . import language, support

# What usually fixes the cause of a message of Triton's front end: (pattern, advice). The first that matches is shown.
FIXES = (
    (
        r"Boolean value of Tensor with more than one",
        "`if` needs one truth value: use tl.where(condition, a, b) on blocks.",
    ),
    (
        r"must be a power of 2|power of two",
        "extents are powers of 2: round up (triton.next_power_of_2) and mask the rest.",
    ),
    (
        r"must be of type tl.constexpr|must have type `constexpr",
        "annotate the parameter, BLOCK: tl.constexpr, and pass a Python int.",
    ),
    (r"Cannot access global variable \w+ .*plain Python function", "decorate the function with @triton.jit."),
    (
        r"Cannot access global variable",
        "write NAME = tl.constexpr(value) in the module, or pass the value as an argument.",
    ),
    (r"Loop.carried variable|initial value for", "start with the type it ends with: 0.0 or tl.zeros(…, tl.float32)."),
    (
        r"AST node type: (Break|Continue)",
        "put the condition into the loop: `while i < n and …`, or mask with tl.where.",
    ),
    (r"nested function", "move the function to the module and decorate it with @triton.jit."),
    (r"AST node type", "kernels are compiled: only the part of Python that Triton knows is available inside them."),
    (r"Input shapes should have M", "tl.dot needs larger blocks: pad with zeros, or multiply and tl.sum."),
    (r"Unsupported ptr type|operands of type pointer", "loads and stores take pointers: x_ptr + offsets, not values."),
    (
        r"incompatible dimensions|make_shape_compatible",
        "shapes must match or be 1: add an axis, x[:, None] or x[None, :].",
    ),
    (r"__setitem__", "blocks are values: build a new one with tl.where(index == k, new, old)."),
    (r"'NoneType' object has no attribute", "a name is None in this launch: `if x is not None:` leaves the lines out."),
    (r"has no attribute 'append'", "lists are tuples in kernels: write xs = xs + (value,) in an unrolled loop."),
    (r"must be a tl.constexpr|is a run-time value", "only what is known at compile time can be a tl.constexpr."),
    (r"`other` cannot be provided without `mask`", "pass mask=… as well, or drop other."),
    (r"Mask must have boolean", "a mask is a comparison such as offsets < n."),
    (r"unsupported tensor index", "an index only adds axes, x[:, None]; to read memory: tl.load(x_ptr + i)."),
    (r"a kernel returns nothing", "tl.store(out_ptr + i, value)."),
    (r"return` statements inside", "compute a flag and use it after the loop."),
    (r"is not defined", "names must be parameters, locals, tl.… or constexpr globals."),
    (
        r"must be (real number|Tensor), not (Scalar|Tensor)|ufunc",
        "Python's math, numpy and torch cannot take values of a kernel: use tl.exp, tl.sqrt, tl.math.…",
    ),
    (r"has 64 or 128 rows", "cut the tile along its rows: several tiles of 128 rows, each with its own MMA."),
    (
        r"local_trans takes a tile in shared",
        "transpose in registers, tl.trans(tlx.local_load(tile)), or swap the MMA's operands.",
    ),
    (r"are block scales", "keep the scales in shared memory and load them from there."),
    (r"a slice has 2\^n columns", "slice at multiples of the width: [0, w], [w, w], [2 w, w], …"),
    (r"must be a 32-bit integer", "add .to(tl.int32)."),
    (r"missing \d+ required|positional argument", "compare the call with the function's parameters."),
    (r"unexpected keyword", "compare the keyword with the function's parameters."),
    (r"change total number", "a reshape keeps the number of elements."),
)
_CONTEXT = 3  # lines of source before the one at fault


class _Explained:
    """A Triton error that shows a few lines of source, their place in the file, and a way to fix it."""

    source_line_count_max_in_message = _CONTEXT
    place = ""

    def _format_message(self):
        text = super()._format_message()
        lines = [f"{self.place}", *text.splitlines()[1:]] if self.place else [text]
        return "\n".join(lines) + advice(self.error_message or "")


def advice(message: str) -> str:
    """Return a line "Fix: …" for a message of the compiler, "" where no fix is known."""
    fix = next((advice for pattern, advice in FIXES if re.search(pattern, message)), None)
    return f"\n  Fix: {fix}" if fix else ""


def _explained(kind):
    return type(kind.__name__, (_Explained, kind), {"__module__": kind.__module__})


_KINDS = {k: _explained(k) for k in (CompilationError, CompileTimeAssertionFailure, UnsupportedLanguageConstruct)}


class _Node:
    """The attributes of an AST node that CompilationError reads."""

    def __init__(self, lineno, col_offset):
        self.lineno, self.col_offset = lineno, col_offset


def _kernel_frames(traceback):
    """Return (frame, line, instruction) of the kernel frames of a traceback, outermost first."""
    frames = []
    while traceback is not None:
        if MARK in traceback.tb_frame.f_globals:
            frames.append((traceback.tb_frame, traceback.tb_lineno, traceback.tb_lasti))
        traceback = traceback.tb_next
    return frames


def _callers(frames):
    """Return ' (called at k.py:12)' for an error inside a helper: where the kernel called it."""
    if not frames:
        return ""
    frame, line, _ = frames[-1]
    return f" (called at {place(frame.f_code.co_filename, line)})"


def _column(frame, instruction):
    positions = list(frame.f_code.co_positions())
    column = positions[instruction // 2][2] if instruction // 2 < len(positions) else 0
    return column or 0


def translate(error):
    """Return an exception of kernel code as the error that Triton's compiler raises for it; ours pass as they are."""
    if isinstance(error, errors.EmulatorError | CompilationError):
        return error
    frames = _kernel_frames(error.__traceback__)
    if not frames:
        return error
    frame, line, instruction = frames[-1]
    function = frame.f_globals[MARK]
    kind, message = _message(error, function)
    cls = _KINDS[kind]
    translated = cls.__new__(cls)
    column, text = _column(frame, instruction), function.source.text
    other = getattr(error, "kernel_line", None)  # another line of the same function
    if other is not None:
        line, code = other, text.splitlines()[other - function.source.first_line]
        column = len(code) - len(code.lstrip())
    file = frame.f_code.co_filename
    where = place(file, line) if source((file, line)) else f"line {line}"
    translated.place = f"{where}, in {function.__name__}{_callers(frames[:-1])}:"
    translated.__init__(text, _Node(line - function.source.first_line + 1, column), message)
    return translated


def returned(function):
    """Return the error for a kernel that returned a value, at the first line that does."""
    returns = (
        n for n in ast.walk(ast.parse(function.source.text)) if isinstance(n, ast.Return) and n.value is not None
    )
    node = next(returns, None)
    line = node.lineno if node is not None else 1
    error = CompilationError.__new__(_KINDS[CompilationError])
    place_of = place(function.source.filename, function.source.first_line + line - 1)
    error.place = f"{place_of}, in {function.__name__}:"
    column = node.col_offset if node is not None else 0
    error.__init__(
        function.source.text, _Node(line, column), "a kernel returns nothing: its results leave through pointers"
    )
    return error


def _message(error, function):
    text = str(error)
    if isinstance(error, support.UnsupportedConstruct):
        return UnsupportedLanguageConstruct, text
    if isinstance(error, support.Refused):
        return CompilationError, text
    if isinstance(error, language.StaticAssertion):
        return CompileTimeAssertionFailure, text
    if isinstance(error, UnboundLocalError | NameError):
        name = getattr(error, "name", None) or (text.split("'")[1] if "'" in text else None)
        if name in function.forbidden:
            return CompilationError, _forbidden_global(name, function.forbidden[name])
        return CompilationError, repr(NameError(f"{name} is not defined"))
    return CompilationError, text if isinstance(error, ValueError | TypeError | AssertionError) and text else repr(
        error
    )


def _forbidden_global(name, value):
    if callable(value):
        return f"Cannot access global variable {name} from within @jit'ed function: it is a plain Python function."
    return (
        f"Cannot access global variable {name} from within @jit'ed function. "
        f"Triton kernels can only access global variables that are instantiated as constexpr (`{name} = tl.constexpr({value!r})`)."
    )


def cause_of(error):
    """Return the exception to chain to: None where ours says it all."""
    silent = support.UnsupportedConstruct | support.Refused | language.StaticAssertion | NameError
    return None if isinstance(error, silent) else error
