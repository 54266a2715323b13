"""Bind a kernel and every jit function it calls to the emulator, in copies of their globals: no module changes.

Each jit function becomes an `EmulatedFunction`: its rewritten code runs in a copy of its globals where Triton's language,
TLX and other jit functions are replaced. Once per launch, a function compares the globals it uses (and its source) with
what it bound, so re-run cells and edited helpers take effect.
"""

import enum
import functools
import inspect
import threading
import types

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ..context import context
from ..errors import NotSupported
from ..locations import MARK
from . import extension, language, owners, support
from .explain import cause_of, translate
from .rewrite import Source, compile_function
from .tensor import Tensor, fix, install_members

try:
    from triton.runtime.interpreter import InterpretedFunction
except ImportError:
    InterpretedFunction = JITFunction
try:
    from triton.runtime.jit import BoundConstexprFunction, ConstexprFunction
except ImportError:
    BoundConstexprFunction = ConstexprFunction = ()

_CONSTEXPR_FUNCTIONS = tuple(c for c in (BoundConstexprFunction, ConstexprFunction) if isinstance(c, type))


_rebinding = threading.RLock()  # launches of several threads share the emulated functions


def is_jit(value):
    return isinstance(value, JITFunction | InterpretedFunction)


class EmulatedFunction:
    """A jit function as kernels call it on the emulator."""

    is_jit_function = True

    def __init__(self, jit):
        self.jit, self.python = jit, jit.fn
        self.__name__ = self.python.__name__
        self._source, self.function = None, None
        self.globals, self._seen, self._cells, self.forbidden, self._tlx = {}, {}, (), {}, None

    def __repr__(self):
        return f"<emulated {self.__name__}>"

    @property
    def source(self):
        return self._source

    def _text(self):
        return getattr(self.jit, "_src", None)

    def refresh(self):
        """Bring the bindings up to date with the user's globals, closure and source, once in each launch."""
        context.launch.fresh.add(self)
        with _rebinding:
            self._rebind()

    def _rebind(self):
        cells = tuple(_cell_value(c) for c in self.python.__closure__ or ())
        fresh = self.function is None or self._text() is not self._bound_text
        if fresh or len(cells) != len(self._cells) or any(a is not b for a, b in zip(cells, self._cells)):
            self._build(cells)
        self._bind_globals()
        missing = frozenset(name for name in self._names if name not in self.globals and name not in _BUILTINS)
        if missing != self._missing:
            self._build(cells, missing)
            self._bind_globals()

    def _bind_globals(self):
        user = self.python.__globals__
        for name in self._names:
            value = user.get(name, _ABSENT)
            if value is not self._seen.get(name, _UNSEEN):
                self._bind_global(name, value)

    def _build(self, cells, missing=frozenset()):
        free = self.python.__code__.co_freevars
        try:
            self._source = Source.of(self.jit, self.python)
        except OSError as error:
            raise NotSupported(
                f"`{self.__name__}` has no source that Python can find",
                cause="it was made by exec from text: register the text with linecache, or define it in a file or a notebook cell.",
            ) from error
        self._bound_text = self._text()
        code, branches = compile_function(self._source, free, missing)
        self._missing = missing
        self.globals = {
            MARK: self,
            "__builtins__": _BUILTINS,
            "__name__": self.python.__globals__.get("__name__", "kernel"),
        }
        self.globals |= {f"__jfa_{k}": v for k, v in support.HELPERS.items()}
        self.globals["__jfa_register_task"] = register_task
        self.globals["__jfa_branches"] = branches
        self._seen, self.forbidden, self._cells, self._tlx = {}, {}, cells, None
        exec(code, self.globals)
        self._named = _global_names(code)
        self._names = sorted(self._named - self.globals.keys())
        self.function = self.globals["__jfa_make"](*[bind(c) for c in cells])
        self.function.__name__ = self.__name__
        self.function.__code__ = self.function.__code__.replace(co_name=self.__name__)
        self.function.__defaults__ = tuple(support.constexpr(bind(d)) for d in self.python.__defaults__ or ()) or None
        self.function.__kwdefaults__ = {
            k: support.constexpr(bind(d)) for k, d in (self.python.__kwdefaults__ or {}).items()
        } or None

    def _bind_global(self, name, value):
        """Bind a name to its current value in the user's module; an undefined one raises NameError where it is used."""
        self._seen[name], self._tlx = value, None
        self.forbidden.pop(name, None)
        if value is not _ABSENT and _may_be_global(value):
            self.globals[name] = bind(value)  # in one step: another thread's launch may be running this function
        elif name in language.BUILTINS:
            self.globals[name] = language.BUILTINS[name]
        else:
            self.globals.pop(name, None)
            if value is not _ABSENT:
                self.forbidden[name] = value

    @property
    def uses_tlx(self):
        """Whether this function or one it reaches names TLX (found once per set of bindings)."""
        if self._tlx is None:
            self._tlx = self._reaches_tlx()
        return self._tlx

    def written(self, path):
        """Return what a global or enclosing name and attributes of it stand for in the user's own module; None where nothing."""
        enclosing = dict(zip(self.python.__code__.co_freevars, self._cells))
        value = enclosing.get(path[0], self.python.__globals__.get(path[0], language.BUILTINS.get(path[0], _ABSENT)))
        value = _BUILTINS.get(path[0]) if value is _ABSENT else value
        for name in path[1:]:
            value = getattr(value, name, None)
        return value

    def names(self, name):
        """Return whether this function or one it reaches has that name, or an attribute of that name, in it."""
        return any(name in function._named for function in self._reached({}))

    def names_any(self, names):
        """Return whether this function or one it reaches has any of these names, a set, in it."""
        return any(names & function._named for function in self._reached({}))

    def _reaches_tlx(self):
        return any(
            isinstance(v, TlxNamespace) or extension.defines(v)
            for function in self._reached({})
            for v in function._values()
        )

    def _values(self):
        return [*self.globals.values(), *(_cell_value(c) for c in self.function.__closure__ or ())]

    def _reached(self, seen):
        """Yield this function and those it may call: by name, out of a module, or as a method of an aggregate."""
        if id(self) in seen:
            return
        seen[id(self)] = self
        if self not in context.launch.fresh:
            self.refresh()
        yield self
        for value in self._values():
            for callee in self._callees(value):
                if isinstance(callee, EmulatedFunction):
                    yield from callee._reached(seen)

    def _callees(self, value):
        if isinstance(value, Namespace) and not vars(value)["__jfa_keeps"]:
            module = vars(value)["__jfa_module"]
            return [getattr(value, n) for n in self._named & vars(module).keys()]
        if isinstance(value, type) and getattr(value, "__triton_aggregate__", False):
            return [emulated(m) for m in vars(_class_as_written(value)).values() if is_jit(m)]
        return [value]

    def __call__(self, *args, **kwargs):
        if self not in context.launch.fresh:
            self.refresh()
        args = [_argument(a) for a in args]
        if kwargs:
            kwargs.pop("_semantic", None)
            kwargs = {k: _argument(v) for k, v in kwargs.items()}
        _check_handed((*args, *kwargs.values()), False)
        result = self.function(*args, **kwargs)
        if result is not None:
            _check_handed((result,), True)
        return result


def _check_handed(values, returned):
    """Refuse what the compiler cannot hand to a jit function, or get back from one."""
    for value in values:
        kind = type(value)
        if kind in _TUPLES:
            _check_handed(value, returned)
        elif isinstance(value, enum.Enum) and not returned:
            name = f"{kind.__name__}.{value.name}"
            raise support.Refused(f"a jit function takes {name} as a constexpr only: write tl.constexpr({name})")
        elif kind in extension.Extension.handed:
            refusal = extension.Extension.handed[kind](value, returned)
            if refusal is not None:
                raise support.Refused(refusal)


_BUILTINS = {
    function.__name__: function
    for function in (
        len,
        list,
        float,
        int,
        isinstance,
        getattr,
        hasattr,
        locals,
        NameError,
    )  # the last two for rewritten code
}
"""The names of Python that a kernel finds in addition to `language.BUILTINS`."""
_TUPLES = (tuple, support.Sequence)
_ABSENT, _UNSEEN = object(), object()


def _argument(value):
    if type(value) is support.Fixed:
        value._refused()
    if type(value) is tl.constexpr:
        return value if isinstance(value.value, enum.Enum) else value.value
    return support.Sequence(value) if type(value) is tuple else value


def _cell_value(cell):
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _global_names(code):
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _may_be_global(value):
    """Return Triton's rule for what a kernel may read from its globals."""
    module = getattr(value, "__module__", None) or ""
    return (
        isinstance(value, types.ModuleType | tl.constexpr | tl.dtype | JITFunction | InterpretedFunction)
        or isinstance(value, _CONSTEXPR_FUNCTIONS)
        or getattr(value, "__triton_builtin__", False)
        or getattr(value, "__triton_aggregate__", False)
        or module.startswith(("triton.language", "triton.experimental.gluon.language", "jfa.emulator"))
        or (isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"))
        or triton.knobs.compilation.allow_non_constexpr_globals
    )


# ---- what stands for what


def emulated(jit):
    """Return the EmulatedFunction of a jit function (kept with it, so that it goes when the function goes)."""
    own = vars(jit).get("_jfa_emulated")
    if own is None or own.python is not jit.fn:
        own = vars(jit)["_jfa_emulated"] = EmulatedFunction(jit)
    return own


def bind(value):
    """Return the emulator's form of anything that a kernel can name."""
    if isinstance(value, types.ModuleType):
        return namespace(value)
    if isinstance(value, tl.constexpr):
        bound = bind(value.value)
        return tl.constexpr(bound) if isinstance(bound, enum.Enum) else bound
    if is_jit(value):
        return _bind_jit(value)
    if isinstance(value, _CONSTEXPR_FUNCTIONS):
        return _constexpr_function(value)
    if isinstance(value, type):
        return _bind_class(value)
    module = getattr(value, "__module__", None) or ""
    if module.startswith(extension.NAME):
        return _tlx_object(value)
    if getattr(value, "__triton_builtin__", False):
        direct = language.native(value.__name__) if module in _LANGUAGE_MODULES else None
        return direct or _bound(value, language.wrap_builtin)
    if module == "triton.language.extra.libdevice":
        return _libdevice(value.__name__)
    return value


_LANGUAGE_MODULES = {f"triton.language{m}" for m in ("", ".core", ".math", ".standard", ".random")}
_made = {}


def _bound(value, make):
    made = _made.get(value)
    if made is None:
        made = _made[value] = make(value)
    return made


def _bind_jit(jit):
    module = jit.fn.__module__ or ""
    if module.startswith(extension.NAME):
        direct = extension.attribute(jit.fn.__name__)
        if direct is not None:
            return direct
    if module in _LANGUAGE_MODULES:
        direct = language.native(jit.fn.__name__)
        if direct is not None:
            return direct
    return emulated(jit)


def _bind_class(cls):
    if cls is tl.constexpr:
        return support.constexpr
    if (cls.__module__ or "").startswith(extension.NAME):
        return _tlx_attribute(cls.__name__, cls)
    if getattr(cls, "__triton_aggregate__", False):
        return _bound(cls, _aggregate)
    if cls.__module__ == "triton.language.core":
        return language.native(cls.__name__) or cls
    return cls


def _constexpr_function(function):
    python, bound = getattr(function, "__func__", function).fn, getattr(function, "__self__", None)
    if bound is not None:
        python = functools.partial(python, bound)

    def call(*args, **kwargs):
        unwrap = tl.core._unwrap_if_constexpr
        kwargs.pop("_semantic", None)
        return support.constexpr(python(*[unwrap(a) for a in args], **{k: unwrap(v) for k, v in kwargs.items()}))

    call.__name__ = getattr(python, "__name__", "constexpr_function")
    return call


def _aggregate(cls):
    """Return an aggregate whose constexpr fields read as plain values and whose jit methods run emulated."""

    written = _class_as_written(cls)

    class Emulated(cls):
        holds = tuple(
            field
            for field, kind in cls.__annotations__.items()
            if isinstance(kind, type) and owners.may_hold(kind, bind(kind))
        )

        @classmethod
        def _get_instance(this):
            return object.__new__(Emulated)

        def __new__(this, *args, **kwargs):
            wrapped = [_as_field(a) for a in args]
            return cls.__new__(
                Emulated, *wrapped, _semantic=language.SEMANTIC, **{k: _as_field(v) for k, v in kwargs.items()}
            )

        def __setattr__(self, name, value):
            if _stands_in(value, cls.__annotations__.get(name)):
                object.__setattr__(self, name, value)
            else:
                super().__setattr__(name, value)
            if name in self.holds:
                owners.place(value, name)

        def __getattribute__(self, name):
            try:
                value = object.__getattribute__(self, name)
            except AttributeError:
                value = vars(written)[name] if name in vars(written) else None
                if not is_jit(value):
                    raise
            if type(value) is tl.constexpr:
                return value.value
            if is_jit(value):
                return owners.Method(emulated(value), self)
            if isinstance(value, _CONSTEXPR_FUNCTIONS):
                return _constexpr_function(value)
            return support.Sequence(fix(value)) if type(value) is tl.tuple and not value.type.fields else value

        @property
        def compiled_type(self):
            """What must not change from one iteration of a loop to the next; constexpr fields count with their value."""
            fields = {name: vars(self)[name] for name in cls.__annotations__}
            types = [
                f"{n}={v.value!r}" if type(v) is tl.constexpr else f"{n}: {support.type_of(v)}"
                for n, v in fields.items()
            ]
            return f"{cls.__name__}<{', '.join(types)}>"

    Emulated.__name__, Emulated.__qualname__, Emulated.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Emulated


def _class_as_written(cls):
    """Return the class under @aggregate: Triton, interpreting, does not copy its jit methods, but its constructor remembers it."""
    constructor = getattr(vars(cls).get("__new__"), "__func__", None)
    if constructor is None:
        return cls
    cells = dict(zip(constructor.__code__.co_freevars, constructor.__closure__ or ()))
    return _cell_value(cells["cls"]) if "cls" in cells else cls


def _as_field(value):
    if isinstance(value, tuple):
        items, names = [_as_field(v) for v in value], getattr(value, "_fields", None)
        return tl.tuple(items, tl.core.tuple_type([i.type for i in items], names) if names else None)
    return value if isinstance(value, tl.core.base_value) else tl.constexpr(value)


def _stands_in(value, annotation):
    """Return whether a field of that class may hold `value`: an instance of the emulator's class of that name."""
    if not isinstance(annotation, type) or isinstance(value, annotation):
        return False
    emulated = bind(annotation)
    return isinstance(emulated, type) and isinstance(value, emulated)


# ---- modules


class Namespace:
    """A module as a kernel sees it: its attributes in their emulated form."""

    def __init__(self, module, keeps):
        self.__dict__["__jfa_module"], self.__dict__["__jfa_keeps"] = module, keeps

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__dict__["__jfa_module"]
        value = bind(getattr(module, name))
        if self.__dict__["__jfa_keeps"]:
            self.__dict__[name] = value
        return value

    def __repr__(self):
        return f"<emulated {self.__dict__['__jfa_module'].__name__}>"


class LibdeviceNamespace:
    """libdevice: Triton's declarations on the emulator's table of functions."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.__dict__[name] = _libdevice(name)
        return value


class TlxNamespace:
    """`tlx`: the emulator's functions; jit functions of the installed TLX that it does not define run as jit functions."""

    def __init__(self, module):
        self.__dict__["__jfa_module"] = module

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _tlx_attribute(name, getattr(self.__dict__["__jfa_module"], name, None))
        self.__dict__[name] = value
        return value


_namespaces = {}


def namespace(module):
    name = module.__name__
    found = _namespaces.get(name)
    if found is not None and found[0] is module:
        return found[1]
    if name.startswith(extension.NAME):
        made = TlxNamespace(module)
    elif name.startswith("triton.language.extra") and name.endswith("libdevice"):
        made = LibdeviceNamespace()
    elif name.split(".")[0] == "triton":
        made = Namespace(module, keeps=True)
    else:
        return Namespace(module, keeps=False)
    _namespaces[name] = (module, made)
    return made


def _libdevice(name):
    """Return libdevice's functions: Triton's own declarations (types, symbols) on our table of symbols."""
    from triton.language.extra.cuda import libdevice

    function = getattr(libdevice, name, None)
    if function is None:
        return language.unsupported(f"libdevice.{name}")
    return language.wrap_builtin(function)


def _tlx_attribute(name, real):
    direct = extension.attribute(name)
    if direct is not None:
        return direct
    if real is None:
        raise AttributeError(f"module 'tlx' has no attribute '{name}'")
    if is_jit(real):
        return emulated(real)
    if isinstance(real, types.ModuleType):
        return TlxNamespace(real)
    if isinstance(real, _CONSTEXPR_FUNCTIONS):
        return _constexpr_function(real)
    return language.unsupported(f"tlx.{name}") if callable(real) else real


def _tlx_object(value):
    """Return something taken out of TLX: a function or class by its name, an enum's member by its class, else itself."""
    if isinstance(value, enum.Enum):
        owner = extension.attribute(type(value).__name__)
        return value if owner is None else getattr(owner, value.name, value)
    name = getattr(value, "__name__", None)
    return _tlx_attribute(name, value) if name else value


# ---- tasks


def register_task(spec, function, variables, names, name, line, owner=None):
    """Replace a `with tlx.async_task(…)`: pass its body to the emulated TLX."""
    tlx = owner if owner is not None else extension.module()
    private = {n: variables[n] for n in names if n in variables}
    _refuse_captured_blocks(spec, function, private)
    file = function.__code__.co_filename
    return tlx.register_task(spec, lambda: _run_task(function, private), name, (file, line))


def _run_task(function, private):
    """Run a task's body; what the compiler would refuse in it is raised as the compiler's error."""
    try:
        function(private)
    except Exception as error:
        translated = translate(error)
        if translated is error:
            raise
        raise translated from cause_of(error)


def _refuse_captured_blocks(spec, function, private):
    """Refuse blocks, which live in registers, to a task with warps of its own; scalars and buffers it gets.

    A name that the task assigns itself (``private``) counts as handed over, too, where it names a block outside.
    """
    if getattr(spec, "is_default", False) or not getattr(spec, "is_explict", True):
        return
    free = zip(function.__code__.co_freevars, map(_cell_value, function.__closure__ or ()))
    for name, value in [*free, *private.items()]:
        if _holds_a_block(value):
            raise support.Refused(
                f"WarpSpecializeOp should not capture RankedTensorType (`{name}`). "
                "Try moving tensor computation into specific async task."
            )


def _holds_a_block(value):
    if isinstance(value, tuple | tl.tuple):
        return any(map(_holds_a_block, value))
    return type(value) is Tensor


# ---- member functions of tensors


def _bind_member(name, member):
    if is_jit(member):
        return language.native(member.fn.__name__) or _lazy_member(member)
    if getattr(member, "__triton_builtin__", False) or inspect.isfunction(member):
        if name.startswith("_"):
            return None
        direct = language.native(name)
        if direct is not None:
            return direct
        free = getattr(tl, name, None)
        if free is not None and getattr(free, "__triton_builtin__", False):
            return language.wrap_builtin(free)
        if is_jit(free):
            return _lazy_member(free)
        return language.wrap_builtin(member)
    return None


def _lazy_member(jit):
    return lambda *args, **kwargs: emulated(jit)(*args, **kwargs)


install_members(_bind_member)
