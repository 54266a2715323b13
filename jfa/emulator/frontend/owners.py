"""Name the buffers and barriers that aggregates hold as the kernel does: ``kv.fulls``.

An array that a kernel assigns to a variable has that variable's name. An array created in a constructor call has no
variable, and a local variable of another function is less informative than the field that holds the array. So an array
in an aggregate is named by its path of fields, preceded by the aggregate's variable where the path is a single field.
"""


def place(value, field):
    """Name what a field of an aggregate holds after the field, unless it is in an older aggregate already."""
    for handle, array, depth in _arrays(value, 0):
        if len(array.fields) == depth:
            array.fields = (field, *array.fields)
            array.variable = ""
            handle.rename(".".join(array.fields))


def assigned(value, variable):
    """Put the name of an aggregate's variable before those of the arrays that are its fields."""
    for handle, array, depth in _arrays(value, 0):
        if depth == len(array.fields) == 1 and not array.variable:
            array.variable = variable
            handle.rename(f"{variable}.{array.fields[0]}")


def may_hold(annotation, bound):
    """Return whether a field of that class leads to buffers or barriers; ``bound``: the emulator's class for it."""
    return getattr(annotation, "__name__", "") in ("buffered_tensor", "mbarrier") or bool(getattr(bound, "holds", ()))


def _arrays(value, depth):
    """Return (handle, array, fields that lead to it) of each whole array of buffers or barriers in a value."""
    array = getattr(value, "whole_array", None)
    if array is not None:
        return [(value, array, depth)]
    held = vars(value) if getattr(type(value), "holds", ()) else {}
    return [found for name in getattr(type(value), "holds", ()) for found in _arrays(held.get(name), depth + 1)]


class Method:
    """A jit method of an aggregate: to be called, not to be kept under a plain name."""

    def __init__(self, function, owner):
        self.function, self.owner = function, owner

    def __repr__(self):
        return f"<method {self.function.__name__}>"

    def __call__(self, *args, **kwargs):
        return self.function(self.owner, *args, **kwargs)
