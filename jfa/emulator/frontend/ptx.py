"""Inline PTX: a small interpreter for the straight-line snippets that kernels write in tl.inline_asm_elementwise.

Registers are arrays of bits, one entry per group of `pack` elements; an instruction's type suffix says how to interpret
them. Instructions that have no meaning at the level of blocks (shuffles, loads, barriers, branches) or are not
implemented are refused by name.
"""

import functools
import re

import numpy as np

from .. import dtypes
from ..context import context
from ..errors import NotSupported
from ..locations import here, show
from ..undefined import union
from . import carry, mathlib
from .tensor import wrap

_WIDTH = re.compile(r"(\d+)(x2)?$")
_NO_OPS = ("griddepcontrol", "membar", "fence", "nanosleep", "prefetch", "applypriority", "discard")


def refuse(what):
    raise NotSupported(f"inline PTX `{what}` is not modelled", [f"at {show(here())}"], where=here())


# ---- parsing


class Instruction:
    def __init__(self, text):
        guard = re.match(r"@(!?)([\w%$]+)\s+(.*)", text, re.S)
        self.guard = (guard.group(2), bool(guard.group(1))) if guard else None
        text = guard.group(3) if guard else text
        head, _, rest = text.strip().partition(" ")
        if "\t" in head or "\n" in head:
            head, rest = re.split(r"\s", text.strip(), maxsplit=1)
        self.name, *self.modifiers = head.split(".")
        self.opcode = head
        self.operands = _split_operands(rest)


def _split_operands(text):
    """Return operands of an instruction; `{a, b}` and `p|q` become lists."""
    out = []
    for part in re.findall(r"\{[^}]*\}|[^,\s][^,{]*", text.strip()):
        part = part.strip()
        if part.startswith("{"):
            out.append([p.strip() for p in part[1:-1].split(",")])
        elif part:
            out.append(part)
    return out


@functools.lru_cache(512)
def parse(asm):
    """Return the instructions of a snippet."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", asm, flags=re.S).replace("\\n", "\n")
    program = []
    for statement in text.split(";"):
        statement = re.sub(r"^[\s{}]+", "", statement)
        statement = (
            statement.rstrip()
            if statement.count("{") == statement.count("}")
            else statement.rstrip().rstrip("}").rstrip()
        )
        if not statement or statement.startswith((".reg", ".pragma", ".loc")):
            continue
        if re.match(r"[\w$]+:", statement):
            refuse("a label or branch")
        program.append(Instruction(statement))
    return tuple(program)


# ---- types


def _bits(kind):
    match = _WIDTH.search(kind)
    if kind.startswith(("e4m3", "e5m2", "e2m1", "ue8m0")):
        return 16 if kind.endswith("x2") else 8
    return int(match.group(1)) * (2 if match.group(2) else 1)


def _as_bits(register, width):
    return np.asarray(register).astype(f"uint{width}", copy=False)


def read(register, kind):
    """Return a register's value under a PTX type: a numpy array; packed types get a last axis of 2."""
    if kind == "pred":
        return np.asarray(register).astype(bool)
    width = _bits(kind)
    bits = np.ascontiguousarray(_as_bits(register, width))
    if kind.endswith("x2") and not kind.startswith(("e4m3", "e5m2", "ue8m0")):
        halves = bits[..., None].view(f"uint{width // 2}")
        return _decode(halves, kind[:-2])
    return _decode(bits, kind)


def _decode(bits, kind):
    if kind == "bf16":
        return dtypes.decode(bits, "bf16")
    if kind.startswith("f"):
        value = bits.view(f"float{8 * bits.itemsize}")
        return value.astype(np.float32) if value.dtype == np.float16 else value
    if kind.startswith("s"):
        return bits.view(f"int{8 * bits.itemsize}")
    return bits


def write(value, kind):
    """Return a computed value as register bits under a PTX type."""
    if kind == "pred":
        return np.asarray(value).astype(bool)
    packed = kind.endswith("x2")
    single = kind[:-2] if packed else kind
    width = _bits(single)
    value = np.asarray(value)
    if single == "bf16":
        bits = dtypes.encode(value.astype(np.float32), "bf16")
    elif single == "f16":
        bits = dtypes.encode(value.astype(np.float32), "fp16").view(np.uint16)
    elif single.startswith("f"):
        bits = np.ascontiguousarray(value.astype(f"float{width}")).view(f"uint{width}")
    else:
        bits = value.astype(f"int{width}" if value.dtype.kind in "ib" else f"uint{width}").view(f"uint{width}")
    return np.ascontiguousarray(bits).view(f"uint{2 * width}")[..., 0] if packed else bits


# ---- instructions


def _lop3(a, b, c, table):
    result = np.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def _prmt(a, b, selector):
    joined = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    selector, result = selector.astype(np.uint64), np.zeros(np.broadcast(a, b, selector).shape, np.uint64)
    for i in range(4):
        pick = (selector >> np.uint64(4 * i)) & np.uint64(15)
        byte = (joined >> ((pick & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        byte = np.where(pick & np.uint64(8), np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
        result |= byte << np.uint64(8 * i)
    return result.astype(np.uint32)


def _divide(a, b):
    return np.divide(a, b) if a.dtype.kind == "f" else np.floor_divide(a, np.where(b == 0, 1, b))


_BINARY = {
    "add": np.add, "sub": np.subtract, "div": _divide, "min": np.fmin, "max": np.fmax, "rem": np.fmod, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip
_PROPAGATING = {"min": np.minimum, "max": np.maximum}
_UNARY = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt, "rsqrt": lambda v: 1 / np.sqrt(v), "sin": np.sin,
    "cos": np.cos, "tanh": np.tanh, "abs": np.abs, "neg": np.negative, "not": np.invert, "popc": np.bitwise_count,
    "clz": lambda v: mathlib.leading_zeros(v), "brev": lambda v: mathlib.reverse_bits(v),
}  # fmt: skip
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
            "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}  # fmt: skip
_MUFU = {"ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh", "div"}


class Execution:
    """One evaluation of a snippet over all groups of elements."""

    def __init__(self, inputs, outputs):
        self.registers = {f"${outputs + i}": r for i, r in enumerate(inputs)}

    def get(self, operand, kind):
        """Return an operand's bits."""
        if isinstance(operand, list):
            width = _bits(kind) // len(operand)
            total = np.uint64(0)
            for i, part in enumerate(operand):
                total = total | (_as_bits(self.get(part, f"b{width}"), 64) << np.uint64(i * width))
            return _as_bits(total, _bits(kind))
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("%"):
            return self._special(operand)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return np.uint32(int(operand[2:], 16))
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return np.uint64(int(operand[2:], 16))
        if re.fullmatch(r"[+-]?\d+\.\d*(e[+-]?\d+)?", operand):
            return write(np.array(float(operand)), kind)
        if re.fullmatch(r"[+-]?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return np.uint64(int(operand.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF)
        refuse(f"operand {operand}")

    @staticmethod
    def _special(name):
        if name in ("%globaltimer", "%clock64", "%clock"):
            from .. import machine

            task = machine.current()
            return np.uint64(int(getattr(task, "time", 0)))
        if name in ("%smid", "%warpid", "%laneid"):
            return np.uint64(0)
        axis = re.fullmatch(r"%(n?ctaid)\.([xyz])", name)
        if axis:
            from .. import machine

            cta = machine.current().cta
            return np.uint64((cta.pid if axis[1] == "ctaid" else cta.grid)["xyz".index(axis[2])])
        refuse(f"special register {name}")

    def put(self, operand, bits, guard):
        if isinstance(operand, list):
            width = 8 * np.asarray(bits).itemsize // len(operand)
            for i, part in enumerate(operand):
                if part != "_":
                    self.put(part, _as_bits(_as_bits(bits, 64) >> np.uint64(i * width), width), guard)
            return
        if guard is not None:
            old = self.registers.get(operand, np.zeros_like(bits))
            bits = np.where(guard, bits, old)
        self.registers[operand] = bits

    def run(self, program):
        for instruction in program:
            guard = None
            if instruction.guard is not None:
                name, negated = instruction.guard
                guard = read(self.registers[name], "pred") ^ negated
            self.step(instruction, guard)

    def step(self, ins, guard):
        name, mods, operands = ins.name, ins.modifiers, ins.operands
        kind = mods[-1] if mods else "b32"
        if name in _NO_OPS:
            return
        handler = getattr(self, f"_{name}", None)
        if handler is not None:
            result = handler(ins, kind)
        elif name in _BINARY:
            a, b = (read(self.get(o, kind), kind) for o in operands[1:3])
            function = _PROPAGATING.get(name) if "NaN" in mods else None
            result = write(self._saturated((function or _BINARY[name])(a, b), mods), kind)
        elif name in _UNARY:
            value = _UNARY[name](read(self.get(operands[1], kind), kind))
            result = write(value, "u32" if name in ("popc", "clz") else kind)
        else:
            refuse(ins.opcode)
        self.put(operands[0], result, guard)

    @staticmethod
    def _saturated(value, modifiers):
        return np.clip(value, 0, 1) if "sat" in modifiers else value

    def _values(self, operands, kind):
        return [read(self.get(o, kind), kind) for o in operands]

    def _mov(self, ins, kind):
        target = ins.operands[0]
        width = _bits(kind) if kind != "pred" else 1
        if isinstance(target, list):
            return _as_bits(self.get(ins.operands[1], kind), width)
        return self.get(ins.operands[1], kind) if kind == "pred" else _as_bits(self.get(ins.operands[1], kind), width)

    def _mul(self, ins, kind):
        a, b = self._values(ins.operands[1:3], kind)
        if "wide" in ins.modifiers:
            wide = f"{kind[0]}{2 * _bits(kind)}"
            return write(a.astype(np.int64 if kind[0] == "s" else np.uint64) * b, wide)
        if "hi" in ins.modifiers:
            if kind[0] == "s":
                return write((a.astype(np.int64) * b) >> _bits(kind), kind)
            return write(mathlib.multiply_high(*np.broadcast_arrays(a, b)), kind)
        return write(self._saturated(a * b, ins.modifiers), kind)

    def _fma(self, ins, kind):
        a, b, c = self._values(ins.operands[1:4], kind)
        result = mathlib.fused_multiply_add(np.asarray(a), np.asarray(b), np.asarray(c))
        return write(self._saturated(result, ins.modifiers), kind)

    def _mad(self, ins, kind):
        if kind.startswith(("f", "bf")):
            return self._fma(ins, kind)
        a, b, c = self._values(ins.operands[1:4], kind)
        return write(a * b + c, kind)

    def _shl(self, ins, kind):
        value, amount = (
            _as_bits(self.get(ins.operands[1], kind), _bits(kind)),
            _as_bits(self.get(ins.operands[2], "u32"), 64),
        )
        shifted = _as_bits(value, 64) << np.minimum(amount, np.uint64(63))
        return np.where(amount >= _bits(kind), np.uint64(0), shifted).astype(f"uint{_bits(kind)}")

    def _shr(self, ins, kind):
        value, amount = read(self.get(ins.operands[1], kind), kind), _as_bits(self.get(ins.operands[2], "u32"), 64)
        limit = np.minimum(amount, np.uint64(_bits(kind) - 1)).astype(value.dtype)
        shifted = value >> limit
        if kind[0] != "s":
            shifted = np.where(amount >= _bits(kind), value.dtype.type(0), shifted)
        return write(shifted, kind)

    def _lop3(self, ins, kind):
        a, b, c = (_as_bits(self.get(o, kind), 32) for o in ins.operands[1:4])
        return _lop3(*np.broadcast_arrays(a, b, c), self.get(ins.operands[4], "u32"))

    def _prmt(self, ins, kind):
        return _prmt(*(_as_bits(self.get(o, "b32"), 32) for o in ins.operands[1:4]))

    def _bfe(self, ins, kind):
        value, position, length = (_as_bits(self.get(o, "u32"), 64) for o in ins.operands[1:4])
        return ((value >> position) & ((np.uint64(1) << length) - np.uint64(1))).astype(f"uint{_bits(kind)}")

    def _bfi(self, ins, kind):
        source, base, position, length = (_as_bits(self.get(o, "u32"), 64) for o in ins.operands[1:5])
        mask = ((np.uint64(1) << length) - np.uint64(1)) << position
        return ((base & ~mask) | ((source << position) & mask)).astype(f"uint{_bits(kind)}")

    def _setp(self, ins, kind):
        a, b = self._values(ins.operands[1:3], kind)
        comparison = next((m for m in ins.modifiers if m in _COMPARE), None)
        if comparison is None or kind.endswith("x2"):
            refuse(ins.opcode)
        return _COMPARE[comparison](a, b)

    def _selp(self, ins, kind):
        a, b = (self.get(o, kind) for o in ins.operands[1:3])
        return np.where(read(self.get(ins.operands[3], "pred"), "pred"), a, b).astype(f"uint{_bits(kind)}")

    def _cvta(self, ins, kind):
        return self.get(ins.operands[1], kind)

    def _cvt(self, ins, kind):
        target, source = ins.modifiers[-2], ins.modifiers[-1]
        if target.endswith("x2") and not source.endswith("x2"):
            high, low = self._values(ins.operands[1:3], source)
            return self._join(self._convert(low, target[:-2], ins), self._convert(high, target[:-2], ins))
        if source.endswith("x2") and source[:4] in ("e4m3", "e5m2"):
            bits = _as_bits(self.get(ins.operands[1], source), 16)
            values = [dtypes.decode((bits >> s).astype(np.uint8), _FP8[source[:4]]) for s in (0, 8)]
            return self._join(*(write(v, target[:-2]) for v in values))
        value = read(self.get(ins.operands[1], source), source)
        return self._convert(value, target, ins)

    @staticmethod
    def _join(low, high):
        width = 8 * low.itemsize
        return low.astype(f"uint{2 * width}") | (
            high.astype(f"uint{2 * width}") << np.uint64(width).astype(f"uint{2 * width}")
        )

    def _convert(self, value, target, ins):
        mods = ins.modifiers
        value = np.asarray(value)
        if "relu" in mods:
            value = np.fmax(value, 0)
        if target in _FP8:
            return dtypes.encode(value.astype(np.float32), _FP8[target])
        if target == "ue8m0":
            return _to_ue8m0(value, "rp" in mods)
        if target.startswith(("f", "bf")):
            if value.dtype.kind == "f" and any(m in mods for m in ("rni", "rzi", "rmi", "rpi")):
                value = self._round(value, mods)
            if "rz" in mods and target in ("f16", "bf16"):
                value = dtypes.round_toward_zero(value.astype(np.float32), {"f16": "fp16", "bf16": "bf16"}[target])
            return write(self._saturated(value, mods), target)
        if value.dtype.kind == "f":
            value = mathlib.float_to_integer(
                self._round(value, mods), np.dtype(f"{'u' if target[0] == 'u' else ''}int{_bits(target)}")
            )
        return write(value, target)

    @staticmethod
    def _round(value, mods):
        for modifier, function in (("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)):
            if modifier in mods:
                return function(value)
        return np.trunc(value)


_FP8 = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}


def _to_ue8m0(value, up):
    """Convert float32 to the exponent byte of a power of two, rounded up (or to zero), saturating."""
    bits = np.ascontiguousarray(value.astype(np.float32)).view(np.uint32)
    exponent = ((bits >> 23) & 255).astype(np.int32)
    if up:
        exponent = exponent + ((bits & 0x7FFFFF) != 0)
    return np.where(np.isnan(value), 255, np.clip(exponent, 0, 254)).astype(np.uint8)


# ---- from blocks to registers and back


def _input_registers(value, pack):
    """Return one argument's registers: elements narrower than 4 bytes share one."""
    bits = (
        dtypes.bits_of(np.atleast_1d(value.data), value.dtype.name)
        if not value.dtype.is_ptr()
        else value.data.view(np.uint64)
    )
    bits = bits.reshape(-1)
    short = -bits.size % pack
    if short:
        bits = np.concatenate([bits, np.repeat(bits[-1:], short)])
    groups = bits.reshape(-1, pack)
    per = _elements_per_register(8 * bits.itemsize, pack)
    return [_joined(groups[:, i : i + per]) for i in range(0, pack, per)]


def _elements_per_register(width, pack):
    per = max(1, 32 // width)
    while pack % per:
        per //= 2
    return per


def _joined(columns):
    count = columns.shape[1]
    if count == 1:
        return columns[:, 0].copy()
    return np.ascontiguousarray(columns).view(f"uint{8 * columns.itemsize * count}")[:, 0]


def _output_value(registers, dtype, pack, shape):
    size = int(np.prod(shape)) if shape else 1
    width = max(8, dtype.primitive_bitwidth)
    per = _elements_per_register(width, pack)
    groups = -(-size // pack)
    columns = []
    for register in registers:
        bits = np.broadcast_to(_as_bits(register, width * per), (groups,))
        columns.append(np.ascontiguousarray(bits)[:, None].view(f"uint{width}"))
    bits = np.concatenate(columns, axis=1).reshape(-1)[:size]
    return wrap(dtypes.from_bits(bits, dtype.name).reshape(shape), dtype)


class Call:
    """The interface that Triton's language layer expects of an inline assembly operation."""

    def __init__(self, results):
        self.results = results

    def get_result(self, index):
        return self.results[index]


def evaluate(asm, constraints, arguments, types, pack):
    """Run a snippet on block arguments; `types`: result types (blocks or scalars)."""
    program = parse(asm)
    kinds = [c.strip() for c in constraints.split(",") if c.strip() and not c.strip().startswith("~")]
    outputs = sum(c.startswith("=") for c in kinds)
    shape = tuple(types[0].shape) if types[0].is_block() else ()
    scalars = [t.scalar for t in types]
    if context.launch.charge and shape:
        for instruction in program:
            if instruction.name != "mov":
                context.launch.charge("mufu" if instruction.name in _MUFU else "alu", int(np.prod(shape)))
    direct = _packed_arithmetic(asm, outputs, len(arguments), pack)
    if direct is not None and all(a.dtype.name == "fp32" for a in arguments):
        return Call(_marked([wrap(direct(*[a.data for a in arguments]), scalars[0])], arguments, 1))
    run = Execution([r for a in arguments for r in _input_registers(a, pack)], outputs)
    run.run(program)
    results, used = [], 0
    for dtype in scalars:
        count = max(1, pack // _elements_per_register(max(8, dtype.primitive_bitwidth), pack))
        registers = [run.registers.get(f"${used + i}", np.uint64(0)) for i in range(count)]
        results.append(_output_value(registers, dtype, pack, shape))
        used += count
    return Call(_marked(results, arguments, pack))


def _marked(results, arguments, pack):
    """Return the results with marks: of the `pack` elements that share a run of the snippet, one undefined makes all undefined."""
    marks = union(*[a.undefined for a in arguments]) if context.launch.has_undefined else None
    if marks is not None and pack > 1 and marks.ndim:
        flat = np.pad(marks.reshape(-1), (0, -marks.size % pack)).reshape(-1, pack)
        marks = np.repeat(flat.max(axis=1), pack)[: marks.size].reshape(marks.shape)
    return carry.put(results, marks)


@functools.lru_cache(512)
def _packed_arithmetic(asm, outputs, arguments, pack):
    """Return the numpy function of a snippet that packs pairs, does one f32x2 operation, unpacks: the common case, at once."""
    if pack != 2 or outputs != 2:
        return None
    pairs, result = {}, None
    for ins in parse(asm):
        if ins.guard is not None:
            return None
        if ins.opcode == "mov.b64" and isinstance(ins.operands[1], list):
            pairs[ins.operands[0]] = tuple(ins.operands[1])
        elif ins.modifiers[-1:] == ["f32x2"] and result is None:
            result = (ins.name, ins.operands[0], [pairs.get(o) for o in ins.operands[1:]])
        elif not (ins.opcode == "mov.b64" and result is not None and ins.operands == [["$0", "$1"], result[1]]):
            return None
    if result is None or result[2] != [(f"${2 * i + 2}", f"${2 * i + 3}") for i in range(arguments)]:
        return None
    return {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": mathlib.fused_multiply_add}.get(result[0])
