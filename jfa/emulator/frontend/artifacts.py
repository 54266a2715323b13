"""The return value of a launch: like Triton's compiled kernel, but compiled only when an attribute needs it.

`kernel[grid](…)` gives a `Kernel`. `.run` is the emulator's Run. `.asm`, `.metadata` … compile the kernel for the GPU
that it is written for (which needs no GPU) with the types and constants of this launch.
"""

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


class _Like:
    """Stand-in for a tensor argument after the launch: keeps its type and alignment, not its memory."""

    def __init__(self, tensor):
        self.dtype, self._address = tensor.dtype, tensor.data_ptr()

    def data_ptr(self):
        return self._address


def _forget_memory(value):
    """Return the argument without a hold on its memory."""
    if isinstance(value, torch.Tensor):
        return _Like(value)
    if isinstance(value, TensorDescriptor):
        copy = object.__new__(TensorDescriptor)
        copy.__dict__.update(vars(value), base=_forget_memory(value.base))
        return copy
    if isinstance(value, tuple):
        items = [_forget_memory(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class Kernel:
    """The result of an emulated launch."""

    def __init__(self, jit, args, kwargs, run):
        self.run = run
        self.name = jit.fn.__name__
        self._jit = jit
        self._args = tuple(_forget_memory(a) for a in args)
        self._kwargs = {k: _forget_memory(v) for k, v in kwargs.items()}
        self._compiled = None

    def compile(self, arch=None):
        """Compile with this launch's types and constants; `arch` such as 90 or 100, default whichever takes the kernel."""
        if self._compiled is None:
            self._compiled = self._first_that_compiles([arch] if arch else [100, 90])
        return self._compiled

    def _first_that_compiles(self, architectures):
        failure = None
        for arch in architectures:
            try:
                return self._compile_for(arch)
            except Exception as error:
                failure = failure or error
        raise failure

    def _compile_for(self, arch):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.runtime.jit import JITFunction, create_function_from_signature

        if not isinstance(self._jit, JITFunction):
            raise RuntimeError("TRITON_INTERPRET is set in this process, so Triton cannot compile here; unset it")
        target = GPUTarget("cuda", arch, 32)
        backend = make_backend(target)
        kwargs = {**self._kwargs, "debug": self._kwargs.get("debug", False)}
        binder = create_function_from_signature(self._jit.signature, self._jit.params, backend)
        bound, specialization, options = binder(*self._args, **kwargs)
        options, signature, constexprs, attrs = self._jit._pack_args(backend, kwargs, bound, specialization, options)
        source = ASTSource(self._jit, signature, constexprs, attrs)
        return triton.compile(source, target=target, options=options.__dict__)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("n_regs", "n_spills"):
            return 0
        return getattr(self.compile(), name)
