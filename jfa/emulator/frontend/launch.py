"""Launch a kernel: convert its arguments, run its programs on the machine, turn Python errors into Triton's."""

import gc
import inspect
import operator

import numpy as np
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import dtypes
from ..context import Launch, context, running
from ..errors import LaunchError
from ..memory import Allocation, GlobalMemory, TensorMap
from . import access, extension, support
from .access import Descriptor
from .binding import EmulatedFunction, bind, emulated, is_jit
from .explain import cause_of, returned, translate
from .semantic import full_value
from .tensor import BOOL, FP32, canonical, literal, scalar

try:
    from triton.runtime.jit import TensorWrapper
except ImportError:
    TensorWrapper = ()

TORCH_TYPES = {
    torch.bool: tl.int1, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64,
    torch.uint8: tl.uint8, torch.uint16: tl.uint16, torch.uint32: tl.uint32, torch.uint64: tl.uint64, torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64, torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5, torch.float8_e4m3fnuz: tl.float8e4b8, torch.float8_e5m2fnuz: tl.float8e5b16,
}  # fmt: skip
for _name, _type in (("float8_e8m0fnu", tl.uint8), ("float4_e2m1fn_x2", tl.uint8)):
    if hasattr(torch, _name):
        TORCH_TYPES[getattr(torch, _name)] = _type

LAUNCH_OPTIONS = {
    "num_warps", "num_stages", "num_ctas", "ctas_per_cga", "cluster_dims", "maxnreg", "stream", "debug", "launch_cooperative_grid",
    "launch_pdl", "instrumentation_mode", "preferred_ctas_per_cga", "enable_fp_fusion", "launch_cluster", "warp_size", "arch",
    "sanitize_overflow", "ptx_options", "ir_override", "minRegAutoWS", "maxRegAutoWS", "pingpongAutoWS", "extern_libs", "device",
    "device_type", "allow_fp8e4nv", "max_num_imprecise_acc_default", "matrix_instr_nonkdim", "waves_per_eu", "kpack",
    "grf_mode", "fpsan_homomorphic_casts",
}  # fmt: skip


class Arguments:
    """Converts host arguments and collects the tensors' allocations."""

    def __init__(self):
        self.allocations, self._storages, self._keep = [], {}, []
        self.copied_back = []

    def pointer(self, value, name, const=False):
        """Return a tensor argument as a pointer value."""
        dtype, tensor = self._dtype(value), getattr(value, "base", value)
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            raise TypeError(
                f"argument `{name}` is a tensor of layout {tensor.layout}: pass its dense parts, as x.values()"
            )
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            tensor = self._to_host(tensor)
        allocation = self._allocation(tensor, name)
        pointer = tl.pointer_type(dtype, 1, True) if const else tl.pointer_type(dtype)
        return scalar(tensor.data_ptr(), pointer, allocation)

    def _to_host(self, tensor):
        """Take a GPU tensor of an interpreted launch: work on a copy, written back afterwards."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        host = next((h for s, h in self.copied_back if s.data_ptr() == key), None)
        if host is None:
            host = storage.cpu()
            self.copied_back.append((storage, host))
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())

    def write_back(self):
        for device_storage, host in self.copied_back:
            device_storage.copy_(host)

    @staticmethod
    def _dtype(value):
        dtype = value.dtype
        if isinstance(dtype, tl.dtype):
            return canonical(dtype)
        if dtype not in TORCH_TYPES:
            raise TypeError(f"the emulator does not take tensors of {dtype}")
        return TORCH_TYPES[dtype]

    def _allocation(self, tensor, name):
        storage = tensor.untyped_storage()
        lo, size = storage.data_ptr(), storage.nbytes()
        found = self._storages.get(lo)
        if found is None:
            found = self._storages[lo] = Allocation(name, lo, lo + size, tensor.element_size())
            self._keep.append(storage)
            self.allocations.append(found)
        return found

    def convert(self, value, name, parameter=None):
        """Return any host argument as a kernel value."""
        if value is None or isinstance(value, tl.dtype):
            return value
        if isinstance(value, tl.constexpr):
            return bind(value)
        if is_jit(value):
            return bind(value)
        if isinstance(value, bool):
            return scalar(value, BOOL)
        if isinstance(value, int):
            return self._integer(value, parameter)
        if isinstance(value, float):
            return self._float(value, parameter)
        if isinstance(value, TensorDescriptor):
            return self.descriptor(value, name)
        if hasattr(value, "data_ptr"):
            return self.pointer(value, name, bool(parameter is not None and parameter.is_const))
        if isinstance(value, tuple | tl.tuple):
            return self._tuple(value, name)
        if isinstance(value, np.generic):
            return self.convert(value.item(), name, parameter)
        if isinstance(value, np.ndarray):
            raise TypeError(f"argument `{name}` is a numpy array; pass a tensor: torch.from_numpy({name})")
        if isinstance(value, list):
            raise TypeError(
                f"argument `{name}` is a list, which Triton refuses: pass a tensor, or tuple({name}) of a few numbers"
            )
        if isinstance(value, str | bytes | dict | set | complex | torch.dtype | torch.device):
            raise TypeError(
                f"argument `{name}` is a {type(value).__name__}: without tl.constexpr it takes tensors, numbers, tuples"
            )
        return value

    def _tuple(self, value, name):
        items = [self.convert(v, f"{name}[{i}]") for i, v in enumerate(value)]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return support.Sequence(items)

    @staticmethod
    def _annotated(parameter):
        """Return the scalar type that an annotation such as `n: tl.int64` or "i64" names, or None."""
        name = parameter.annotation_type if parameter is not None else ""
        if not name or name.startswith("*"):
            return None
        return canonical(tl.dtype({"i1": "int1", "u1": "int1"}.get(name, _LONG_NAMES.get(name, name))))

    def _integer(self, value, parameter):
        dtype = self._annotated(parameter)
        if dtype is not None:
            return full_value(value, dtype)
        if value == 1 and parameter is not None and not parameter.do_not_specialize:
            return 1  # Triton specializes on the value 1: the parameter is a constexpr then
        return literal(value)

    def _float(self, value, parameter):
        dtype = self._annotated(parameter)
        return full_value(value, dtype if dtype is not None and dtype.is_floating() else FP32)

    def descriptor(self, value, name):
        """Return a host TensorDescriptor, under the hardware's rules."""
        base = self.pointer(value.base, name)
        dtype = base.dtype.element_ty
        shape, strides = [int(s) for s in value.shape], [int(s) for s in value.strides]
        block = [int(tl.core._unwrap_if_constexpr(b)) for b in value.block_shape]
        access.check_descriptor(base.value, shape, strides, block, dtypes.itemsize(dtype.name), f"descriptor `{name}`")
        padding = getattr(value, "padding", "zero") or "zero"
        box = TensorMap(self.memory, base.value, shape, strides, block, dtype.name, padding, base.allocation)
        return Descriptor(box, dtype, [literal(s) for s in shape], [scalar(s, tl.int64) for s in strides], name)


_LONG_NAMES = {f"{p}{n}": f"{full}{n}" for p, full in (("i", "int"), ("u", "uint")) for n in (8, 16, 32, 64)}


# ---- the launch itself


def split_options(jit, kwargs):
    """Return (kernel arguments, launch options) of a launch's keywords."""
    names = set(jit.arg_names)
    options = {k: v for k, v in kwargs.items() if k not in names}
    unknown = [k for k in options if k not in LAUNCH_OPTIONS]
    if unknown:
        known = _backend_options()
        for key in unknown:
            if key not in known:
                raise KeyError(f"Keyword argument {key} was specified but unrecognised")
    return {k: v for k, v in kwargs.items() if k in names}, options


def _backend_options():
    from triton.backends.nvidia.compiler import CUDAOptions

    return set(CUDAOptions.__dataclass_fields__)


def signature_of(jit):
    return getattr(jit, "signature", None) or inspect.signature(jit.fn)


def parameters_of(jit):
    """Name -> Triton's KernelParam (an interpreted function keeps none)."""
    params = getattr(jit, "params", None)
    if params is None:
        from triton.runtime.jit import KernelParam

        params = [KernelParam(i, p, False, False) for i, p in enumerate(inspect.signature(jit.fn).parameters.values())]
    return {p.name: p for p in params}


_MAX_GRID_YZ = 65535  # of every GPU so far; the first axis may have 2^31 - 1


def _three(values):
    values = tuple(int(v) for v in (values if isinstance(values, tuple | list) else (values,)))
    return values + (1,) * (3 - len(values))


def _checked_grid(grid):
    """Return the grid as three ints. A GPU's launcher takes no floats, and no number in place of a tuple."""
    if not isinstance(grid, tuple | list) or not grid:
        raise TypeError(f"the grid is {grid!r}, not a tuple of one to three numbers\n  Fix: kernel[(programs,)](...)")
    for extent in grid:
        try:
            operator.index(extent)
        except TypeError:
            raise TypeError(
                f"the grid {grid} has an extent that is no integer: {extent!r}\n"
                "  Fix: triton.cdiv(size, BLOCK), or //, in place of /."
            ) from None
    grid = _three(grid)
    if max(grid[1:]) > _MAX_GRID_YZ:
        raise LaunchError(
            f"the grid {grid} has more than {_MAX_GRID_YZ} programs along its second or third axis: put them on the first"
        )
    return grid


def cluster_of(function, options):
    """Return the cluster's shape that launch options ask for.

    Plain Triton's num_ctas spreads one program over several CTAs and changes nothing of what it computes; TLX sees the CTAs.
    """
    for key in ("ctas_per_cga", "cluster_dims"):
        if options.get(key):
            return _three(options[key])
    count = int(options.get("num_ctas") or 1)
    return _three(count if count > 1 and function.uses_tlx else 1)


def launch(jit, grid, args, kwargs, options):
    """Run a kernel. `options`: the emulator's Options."""
    arguments_by_name, launch_options = split_options(jit, kwargs)
    for hook in getattr(jit, "pre_run_hooks", ()):
        hook(*args, **kwargs)
    bound = signature_of(jit).bind(*args, **arguments_by_name)
    bound.apply_defaults()
    parameters = parameters_of(jit)
    options = _inner(options)
    arguments = Arguments()
    memory = arguments.memory = GlobalMemory(races=options.races)
    values = {
        name: _kernel_argument(arguments, name, value, parameters[name]) for name, value in bound.arguments.items()
    }
    memory.__init__(arguments.allocations, races=options.races)
    grid = _checked_grid(grid(dict(bound.arguments)) if callable(grid) else grid)
    if 0 in grid:
        return None
    run = _execute(emulated(jit), values, grid, launch_options, memory, options)
    arguments.write_back()
    return run


def _inner(options):
    """Return options of a launch that a host function makes while a kernel waits: schedule and faults stay the outer launch's."""
    outer = context.launch.task
    if outer is None:
        return options
    if options.control is not None and options.control is outer.machine.control:
        options = options.but(policy="eager")
    return options.but(fault=None) if options.fault is outer.machine.fault else options


def _kernel_argument(arguments, name, value, parameter):
    if parameter.is_constexpr:
        return bind(tl.constexpr(value)) if not isinstance(value, tuple | list) else value
    return arguments.convert(value, name, parameter)


def _execute(function, values, grid, launch_options, memory, options):
    from .. import machine

    num_warps = int(launch_options.get("num_warps") or 4)
    if num_warps & (num_warps - 1):
        raise AssertionError("num_warps must be a power of 2")
    memory.program = _program_index
    memory.report, memory.warn = _report, _warn
    memory.live_tensors = _live_tensors
    state = Launch(memory, num_warps, options.poison, _report)
    with running(state):
        function.refresh()
        handed = [v for v in values.values() if isinstance(v, EmulatedFunction)]
        state.names = lambda name: any(f.names(name) for f in (function, *handed))
        state.charge = machine.charge if options.policy == "timed" else None
        state.contracts = options.contract and bool(launch_options.get("enable_fp_fusion", True))
        state.exchange = machine.exchange if function.uses_tlx else None
        cluster = cluster_of(function, launch_options)
        options = _with_residents(function, options, grid, cluster, launch_options)
        return machine.launch(
            lambda: _run_program(function, values),
            grid=grid,
            cluster=cluster,
            num_warps=num_warps,
            options=options,
            kernel=function.__name__,
        )


PLAIN_RESIDENTS = 32  # programs of a plain kernel that run at once: those that wait for each other need company


def _with_residents(function, options, grid, cluster, launch_options):
    """Return options with the number of resident clusters that this launch needs, unless the user set one."""
    if options.max_ctas is not None:
        return options
    if launch_options.get("launch_cooperative_grid"):
        return options.but(max_ctas=grid[0] * grid[1] * grid[2] // (cluster[0] * cluster[1] * cluster[2]))
    return options if function.uses_tlx else options.but(max_ctas=PLAIN_RESIDENTS)


def _run_program(function, values):
    try:
        result = function(**values)
        if isinstance(result, tl.tensor):
            raise returned(function)
        if extension.Extension.at_end is not None:
            extension.Extension.at_end(context.launch.task.cta)
    except Exception as error:
        translated = translate(error)
        if translated is error:
            raise
        raise translated from cause_of(error)


def _live_tensors():
    """Return the storages of every tensor of the process: what an address out of a table of pointers may mean."""
    found = {}
    for tensor in (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)):
        try:
            storage = tensor.untyped_storage() if tensor.device.type == "cpu" else None
            lo, size = (storage.data_ptr(), storage.nbytes()) if storage is not None else (0, 0)
            shape = list(tensor.shape)
        except (RuntimeError, NotImplementedError):  # without memory of its own, or nested, without one shape
            continue
        if size:
            name = f"a tensor of {shape} that is no argument"
            found[lo] = Allocation(name, lo, lo + size, tensor.element_size())
    return list(found.values())


def _report(error):
    context.launch.task.machine.report(error)


def _warn(finding):
    context.launch.task.machine.warn(finding)


def _program_index():
    cta = context.launch.task.cta
    (x, y, z), (gx, gy, _) = cta.pid, cta.grid
    return x + gx * (y + gy * z)
