"""Find a small problem that launches a given configuration of `jfa compile --list`, by trying problems without running
kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from jfa import emulator
from jfa.attention import make_problem
from jfa.block_sparse import lists_from_mask
from jfa.compiled import select, shipped_configs
from jfa.kernels import registry
from jfa.kernels.base import Problem
from jfa.kernels.compile_config import CompileConfig
from jfa.layout import offsets_from_lengths
from jfa.masks import Band
from jfa.workbench.recording import Launched, recorded
from jfa.workbench.targets import FORMS, Target, TargetError, plain

LENGTHS = (300, 140)
BANDS = {
    "": Band(),
    "causal": Band.make(causal=True),
    "window": Band.make(causal=True, window_size=2048),
    "narrow": Band.make(causal=True, window_size=64),
}
HEADS = ((4, 4), (4, 1), (3, 3), (8, 8), (16, 4))
BLOCK = 128  # of block lists
# Of the portable kernels, block-sparse and others, smaller on the emulator unless they are asked for.
TILES = ("BLOCK_M", "BLOCK_N", "block_m", "block_n")


@dataclass(frozen=True)
class Setting:
    """The properties of a problem that select a kernel; the first value of each in CHOICES is the usual one."""

    heads: tuple[int, int] = HEADS[0]
    shared: int = 0
    band: str = ""
    deterministic: bool = False
    dlse: bool = False
    lists: bool = False
    unaligned: bool = False
    slots: bool = False
    longest: int = 0

    def unusual(self) -> int:
        """Return how many values are not the usual ones."""
        return sum(getattr(self, f.name) != f.default for f in dataclasses.fields(self))


CHOICES = {
    "heads": HEADS,
    "shared": (0, 32, 64, 128),
    "band": tuple(BANDS),
    **dict.fromkeys(("deterministic", "dlse", "lists", "unaligned", "slots"), (False, True)),
    "longest": (0, 8192),
}
MOST_UNUSUAL = 3
MOST_MISSED = 1
WAYS = ("forward", "backward")


def named(name: str, lengths: Sequence[int] = LENGTHS) -> Target:
    """Return a launch of the shipped configuration of that name, with keys (and queries, unless shared) of some lengths.

    Raises:
        TargetError: there is no such configuration, several match, or no small problem is known that launches it.
    """
    try:
        found = select(shipped_configs(), [name])
    except ValueError as error:
        raise TargetError(f"{error}, and {name!r} is no FILE.py:FUNCTION" if ":" not in name else str(error)) from None
    if len(found) > 1:
        raise TargetError(f"{name!r} matches {len(found)} configurations, {found[0].name} first: name one")
    (config,) = found
    emulator.install()
    launch = _search(config, lengths)
    return Target(name, launch=launch, runs=config.kernel.rpartition(":")[2])


def _search(config: CompileConfig, lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
    backend = config.name.split("-")[0]
    if backend not in registry.MODULES:
        raise TargetError(f"no small problem is known that launches {config.name}: name a function of yours ({FORMS})")
    for missed in range(MOST_MISSED + 1):
        settings = _settings(config, missed)
        for forced in (False, True):
            ways = WAYS
            for setting in settings:
                for way in ways:
                    call = Call(backend, config, setting, tuple(lengths), way, forced)
                    distance = call.distance()
                    if distance is not None:
                        ways = (way,)  # the other pass launches other kernels
                    if distance == 0:
                        return call.run
    raise TargetError(f"no small problem is known that launches {config.name} on the emulator")


def _settings(config: CompileConfig, wanted: int) -> list[Setting]:
    """Return settings that miss ``wanted`` of the things that the configuration's name says, the usual ones first."""
    names = config.name.split("-")
    said = {
        "band": next(
            (b for b in BANDS if b and b in names),
            "narrow" if "has_lo" in names else "causal" if "has_hi" in names else "",
        ),
        "deterministic": "deterministic" in names or "dq" in names and names[0] == "blackwell" or "no" in names,
        "lists": "sparse" in names,
        "unaligned": "pointers" in names,
    }
    shared = {"pma", "resident", "shared", *(["short"] if names[0] == "hopper" else [])} & set(names)
    grouped = any(n == "gqa" or n.startswith("group") for n in names)
    found = []
    for values in itertools.product(*CHOICES.values()):
        setting = Setting(**dict(zip(CHOICES, values)))
        if setting.unusual() > MOST_UNUSUAL - wanted or (setting.slots and not setting.shared):
            continue
        missed = sum(getattr(setting, key) != value for key, value in said.items())
        missed += (setting.shared > 0) != bool(shared) or (setting.heads[0] != setting.heads[1]) != grouped
        if missed == wanted:
            found.append(setting)
    return sorted(found, key=Setting.unusual)


@dataclass(frozen=True)
class Call:
    """One pass of a backend on one problem; ``forced``: with the configuration's choices in place of the backend's own."""

    backend: str
    config: CompileConfig
    setting: Setting
    lengths: tuple[int, ...]
    way: str
    forced: bool = False

    def distance(self) -> int | None:
        """Return how many of a configuration's choices a backend makes otherwise; None if it refuses or launches other kernels."""
        with recorded() as launches:
            try:
                if self.forced and not self._agrees():
                    return None
                self._pass(dry=True)
            except ValueError:  # the backend, or TMA's rules, refuse the problem
                return None
        mine = [launch for launch in launches if _same_kernel(launch, self.config)]
        return min((_distance(launch, self.config, self.forced) for launch in mine), default=None)

    def _agrees(self) -> bool:
        """Return whether the configuration's facts about a problem are those of this one, so that it may be forced on it."""
        problem = self._problem()[0]
        facts = {
            "group": (problem.group_size,),
            "has_lo": (problem.band.has_lo,),
            "has_hi": (problem.band.has_hi,),
            "broadcast_q": (problem.broadcast_q,),
            "with_dq": (not problem.deterministic,),
            "list_heads": (problem.num_heads if problem.block_lists is not None else 0,),
            "rows_q": (problem.rows_q,),
        }
        if self.backend == "blackwell":  # hopper's heads are those of one tile
            facts["heads"] = (problem.num_heads, problem.num_kv_heads)
        chosen = [value for value in self.config.constexprs.values() if dataclasses.is_dataclass(value)]
        return all(getattr(c, name, values[0]) in values for c in chosen for name, values in facts.items())

    def run(self) -> list[Tensor]:
        """Run the pass on the emulator; its output tensors."""
        return self._pass(dry=False)

    def _pass(self, dry: bool) -> list[Tensor]:
        module = registry.load(self.backend)
        if isinstance(module, str):
            raise TargetError(module)
        problem, q, k, v = self._problem()
        why = module.supports(problem)
        if why or problem.block_lists is not None and not getattr(module, "BLOCK_LISTS", False):
            raise ValueError(why or "no block lists")
        with _choosing(self.backend, self.config) if self.forced else contextlib.nullcontext():
            if self.way == "forward":
                plainly = self.config.kernel.endswith(":plain_forward_kernel")
                return list(
                    module.plain_forward(problem, q, k, v) if plainly else module.forward(problem, q, k, v, None)
                )
            g = torch.Generator().manual_seed(1)
            out, lse = (_empty_answer if dry else registry.load("reference").forward)(problem, q, k, v, None)
            dout = torch.randn(out.shape, generator=g).to(out.dtype)
            dlse = torch.randn(lse.shape, generator=g).where(lse.isfinite(), 0) if self.setting.dlse else None
            grads = module.backward(problem, dout, dlse, q, k, v, out, lse, None)
            return [x for x in grads if x is not None]

    def _problem(self) -> tuple[Problem, Tensor, Tensor, Tensor]:
        s, (dim, dim_v) = self.setting, _head_dims(self.config)
        g = torch.Generator().manual_seed(0)

        def rows(n: int, heads: int, columns: int) -> Tensor:
            x = torch.randn(n, heads, columns + s.unaligned, generator=g).bfloat16()
            return x[..., s.unaligned :]

        total, (heads, kv_heads) = sum(self.lengths), s.heads
        q, k, v = rows(s.shared or total, heads, dim), rows(total, kv_heads, dim), rows(total, kv_heads, dim_v)
        offsets, batches = offsets_from_lengths(self.lengths), len(self.lengths)
        slots = torch.arange(batches + 1, dtype=torch.int32) * s.shared if s.slots else None
        longest = s.longest or max(self.lengths)
        problem = make_problem(
            q, k, v, offsets, offsets, slots, dim**-0.5, BANDS[s.band], bool(s.shared), s.deterministic,
            s.shared or longest, longest, self._lists(offsets, total),
        )  # fmt: skip
        return problem, q, k, v

    def _lists(self, offsets: Tensor, total: int):
        s = self.setting
        if not s.lists:
            return None
        g = torch.Generator().manual_seed(2)
        blocks = lambda n: -(-n // BLOCK)
        masks = [torch.rand(s.heads[0], blocks(s.shared or n), blocks(n), generator=g) < 0.7 for n in self.lengths]
        band = dict(causal=True) if s.band == "causal" else dict(causal=True, window_size=64) if s.band else {}
        sides = dict(total_q=s.shared or total, total_kv=total, broadcast_q=bool(s.shared))
        return lists_from_mask(masks, None if s.shared else offsets, offsets, **sides, **band)


def _empty_answer(problem: Problem, q: Tensor, k: Tensor, v: Tensor, plan: None) -> tuple[Tensor, Tensor]:
    return q.new_zeros(problem.rows_out, problem.num_heads, problem.head_dim_v), torch.zeros(
        problem.num_heads, problem.rows_out
    )


def _head_dims(config: CompileConfig) -> tuple[int, int]:
    """Return (of query and key, of value), from the configuration's choices."""
    facts = _facts(config)
    dim = next((facts[n] for n in ("head_dim", "D", "DIM") if n in facts), 128)
    if facts.get("tail_dim"):
        return dim + facts["tail_dim"], dim
    return dim, next((facts[n] for n in ("head_dim_v", "DV") if n in facts), dim)


def _facts(config: CompileConfig) -> dict:
    """Return the configuration's constexprs, and the fields of those that are dataclasses."""
    facts = dict(config.constexprs)
    for value in config.constexprs.values():
        facts |= vars(value) if dataclasses.is_dataclass(value) else {}
    return facts


def _same_kernel(launch: Launched, config: CompileConfig) -> bool:
    function = plain(launch.kernel)
    return f"{function.__module__}:{function.__name__}" == config.kernel


def _distance(launch: Launched, config: CompileConfig, with_tiles: bool) -> int:
    """Return choices in which a launch differs from a configuration."""
    count = 0
    for name, wanted in config.constexprs.items():
        got = launch.arguments.get(name)
        got = getattr(got, "value", got)
        if dataclasses.is_dataclass(wanted) and type(got) is type(wanted):
            names = [f.name for f in dataclasses.fields(wanted) if with_tiles or not _is_tile(f.name, config)]
            count += sum(getattr(got, name) != getattr(wanted, name) for name in names)
        elif with_tiles or not _is_tile(name, config):
            wanted = wanted.removeprefix("dtype:") if isinstance(wanted, str) else wanted
            count += str(got) != wanted if isinstance(wanted, str) else got != wanted
    return (
        count
        + (launch.options.get("num_warps", 4) != config.num_warps and with_tiles)
        + _not_forced(config, with_tiles)
    )


def _not_forced(config: CompileConfig, with_tiles: bool) -> int:
    """Return 1 for tiles that the emulator takes only where they are asked for."""
    return int(not with_tiles and any(_is_tile(name, config) for name in _facts(config)))


def _is_tile(name: str, config: CompileConfig) -> bool:
    return name in TILES and config.name.startswith("portable-")


# --------------------------------------------------------------------------------------------------- the choices, forced


@contextlib.contextmanager
def _choosing(backend: str, config: CompileConfig) -> Iterator[None]:
    """Let the backend's functions that choose a configuration return this one."""
    with contextlib.ExitStack() as stack:
        for value in config.constexprs.values():
            if dataclasses.is_dataclass(value):
                for module, name in _choosers(backend, type(value).__name__):
                    stack.enter_context(mock.patch.object(module, name, lambda *a, value=value, **k: value))
        if backend == "portable":
            _force_tile(stack, config)
        yield


def _choosers(backend: str, kind: str) -> Iterator[tuple[ModuleType, str]]:
    """Yield (module, name) of every function of a backend that returns a ``kind``."""
    package = importlib.import_module(f"jfa.kernels.{backend}")
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in list(vars(module).items()):
            if callable(value) and getattr(value, "__annotations__", {}).get("return") == kind:
                yield module, name


def _force_tile(stack: contextlib.ExitStack, config: CompileConfig) -> None:
    from jfa.kernels.portable import config as chosen

    tiles = [value for name, value in _facts(config).items() if name in TILES]  # queries, then keys
    if not tiles:
        return
    keep, step = reversed(tiles) if "dkdv" in config.name else tiles
    options = config.options
    tile = chosen.Tile(keep, step, config.num_warps, options.get("num_stages", 1), options.get("maxnreg"))
    if "chunks" in config.constexprs:  # None: nothing is split
        stack.enter_context(mock.patch.object(chosen, "split_workers", lambda problem: 0))
    from jfa.kernels.portable import block_sparse_launch

    stack.enter_context(mock.patch.object(block_sparse_launch, "EMULATED", tile))
    for name in ("forward_tile", "dq_tile", "dkdv_tile", "resident_tile"):
        stack.enter_context(mock.patch.object(chosen, name, lambda *a, **k: tile))
