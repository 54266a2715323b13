"""``jfa doctor``: check this installation. It prints one line per check, with the command that repairs a fault.

Each check imports the modules it needs itself, so a torch or Triton that fails to import gives a line, not a traceback.
In a notebook, ``from jfa.doctor import doctor; doctor()`` looks at the running process.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

OK, WARNING, BROKEN = "ok", "warning", "broken"

FBTRITON = "3.7.4"  # where there is no checkout with a lock to ask
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
OLDEST_TORCH, OLDEST_NUMPY = (2, 10), (1, 26)
KERNEL_SECONDS = 120  # a cold first launch on a busy two-core machine takes about ten

# What must work in a fresh process before this one imports it: a broken numpy can kill the process that does.
PROBES = {
    "numpy": "import numpy as m; m.__version__; m.zeros(3).sum()",
    "torch": "import torch as m; m.__version__; m.zeros(3).sum()",
    "triton": "import triton",
}
PROBE_SECONDS = 120

COURSE_PACKAGES = ("greenlet", "jupyterlab", "jupytext", "nbclient", "ipykernel", "matplotlib")


@dataclass(frozen=True)
class Line:
    """The result of one check: ``status`` is "ok", "warning" or "broken"; ``repair`` a command, or None."""

    name: str
    status: str
    text: str
    repair: str | None = None

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.name:<11} {self.text}"
        return line if self.repair is None else f"{line}\n{'':<21}repair: {self.repair}"


def examine() -> Iterator[Line]:
    """Yield every check's lines, each as soon as it is known. A check that itself fails is a broken line."""
    for check in CHECKS:
        try:
            yield from check()
        except Unusable as error:
            name = check.__name__.removeprefix("check_")
            yield Line(name, WARNING, f"not looked at, because {error.module} does not work")
        except (Exception, SystemExit) as error:
            name = check.__name__.removeprefix("check_")
            yield Line(name, BROKEN, _first_line(f"{type(error).__name__}: {error}"), _repair_of(error))


def doctor() -> bool:
    """Print every line; True if nothing is broken. For notebooks: it sees the process that it is called in."""
    lines = []
    for line in examine():
        print(line, flush=True)
        lines.append(line)
    print(_summary(lines))
    return all(line.status != BROKEN for line in lines)


def main(argv: list[str]) -> int:
    """Run the subcommand: exit status 1 if anything is broken."""
    parser = argparse.ArgumentParser(prog="jfa doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="the lines as JSON")
    if not parser.parse_args(argv).json:
        return 0 if doctor() else 1
    lines = list(examine())
    print(json.dumps([asdict(line) for line in lines], indent=1))
    return 1 if any(line.status == BROKEN for line in lines) else 0


def _summary(lines: list[Line]) -> str:
    broken, warnings = (sum(line.status == status for line in lines) for status in (BROKEN, WARNING))
    if broken:
        return f"\n{broken} broken, {warnings} with a warning. Run the repair of the first broken line, then jfa doctor again."
    return f"\nNothing is broken{f', {warnings} with a warning' if warnings else ''}."


# -- the checks ------------------------------------------------------------------------------------------------------


def check_python() -> Iterator[Line]:
    """Check for a Python and a platform that Triton with TLX has wheels for."""
    version = sys.version_info[:2]
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.prefix}"
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        wanted = f"{_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
        remove = f"rm -r {shlex.quote(str(_root() / '.venv'))} && " if (_root() / ".venv").exists() else ""
        yield Line("python", BROKEN, f"{text}; {wanted} is needed", remove + _make("lab PYTHON=python3.12"))
    elif platform.system() != "Linux":
        yield Line(
            "python", WARNING, f"{text}; Triton exists for Linux only: chapters 00-02 run, the rest in a container"
        )
    else:
        yield Line("python", OK, text)


def check_path() -> Iterator[Line]:
    """Check that no file in a folder of PYTHONPATH, or in the current folder, hides a module of Python or of a locked package."""
    found = list(_hidden())
    for module, owner, folder in found[:5]:
        if folder in _python_path():
            text, repair = f"PYTHONPATH leads there first: {folder}", "unset PYTHONPATH"
            if len(_python_path()) > 1:
                repair += f" (or take {shlex.quote(folder)} out of it)"
        else:
            text = "that folder comes first on sys.path"
            repair = f"rename {module} in {shlex.quote(folder)}, or work in another folder"
        yield Line("path", BROKEN, f"the module {module} of {owner} is hidden by one in another folder; {text}", repair)
    if not found:
        yield Line("path", OK, "no folder hides a module of Python or of a locked package")


def check_numpy() -> Iterator[Line]:
    """Check that numpy imports, calculates, and is not older than what jfa asks for."""
    why = _probe("numpy")
    if why is not None:
        yield Line("numpy", BROKEN, why, _reinstall("numpy"))
        return
    import numpy

    if _numbers(numpy.__version__) < OLDEST_NUMPY:
        text = f"{numpy.__version__}; {_dotted(OLDEST_NUMPY)} or newer is needed"
        yield Line("numpy", BROKEN, text, _blame_path("numpy") or pip_command(_locked("numpy")))
    else:
        yield Line("numpy", OK, numpy.__version__)


def check_torch() -> Iterator[Line]:
    """Check that torch imports, is new enough, and is the build that fits the driver."""
    _require("numpy")
    why = _probe("torch")
    if why is not None:
        yield Line("torch", BROKEN, why, _reinstall("torch"))
        return
    import torch

    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    text = f"{torch.__version__}, {build}"
    if _numbers(torch.__version__) < OLDEST_TORCH:
        yield Line("torch", BROKEN, f"{text}; {_dotted(OLDEST_TORCH)} or newer is needed", _reinstall("torch"))
    elif torch.version.cuda is None and os.path.exists("/proc/driver/nvidia/version"):
        yield Line("torch", WARNING, f"{text}, although there is an NVIDIA driver", _make("lab GPU=1"))
    else:
        yield Line("torch", OK, text)


def check_triton() -> Iterator[Line]:
    """Check that the module ``triton`` is the one with TLX, complete, and not half overwritten by another package."""
    _require("numpy", "torch")  # importing Triton imports jfa's emulator, and that imports them
    yield triton_flavour()


def check_tlx() -> Iterator[Line]:
    """Check that TLX's Python half imports and Triton's compiled half has what it calls."""
    _require("numpy", "torch")
    if triton_flavour().status != OK:
        return
    import triton.language.extra.tlx as tlx
    from triton._C.libtriton import ir

    if not hasattr(ir.builder, "make_nv_mma_shared_encoding_attr") or not hasattr(tlx, "async_tasks"):
        text = "its Python files import, but Triton's compiled half does not know TLX: files of two packages are mixed"
        yield Line("tlx", BROKEN, text, reinstall_fbtriton())
    else:
        yield Line("tlx", OK, f"{sum(not name.startswith('_') for name in dir(tlx))} names")


def check_interpret() -> Iterator[Line]:
    """Check that TRITON_INTERPRET has the value that it had when Triton was imported."""
    _require("numpy", "torch")
    if _import_triton()[0] is None:
        return
    import triton.language as tl

    wanted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    imported = type(tl.sum).__name__ == "InterpretedFunction"
    if wanted != imported:
        change = "set after Triton was imported" if wanted else "unset after Triton was imported"
        text = f"TRITON_INTERPRET was {change}: one half of this process interprets, the other compiles"
        repair = f"restart the process (a notebook: its kernel) with it {'set' if wanted else 'unset'} from the start"
        yield Line("interpret", BROKEN, text, f"{repair}; jfa needs it in neither case")
    elif wanted:
        text = "TRITON_INTERPRET is set: Triton's own interpreter, which has no TLX; `jfa compile` works in a process apart"
        yield Line("interpret", WARNING, text, "unset TRITON_INTERPRET (jfa runs kernels on CPU tensors without it)")
    else:
        yield Line("interpret", OK, "TRITON_INTERPRET is not set, and need not be")


def check_ptxas() -> Iterator[Line]:
    """Check that the assemblers that Triton compiles with exist and start."""
    _require("numpy", "torch")
    if _import_triton()[0] is None:
        return
    from triton import knobs

    for attribute in ("ptxas", "ptxas_blackwell"):
        tool = getattr(knobs.nvidia, attribute, None)
        if tool is None:
            continue
        run = subprocess.run([tool.path, "--version"], capture_output=True, text=True, timeout=30)
        release = re.search(r"release ([\d.]+)", run.stdout)
        if run.returncode or not release:
            yield Line("ptxas", BROKEN, f"{tool.path} does not run: {_first_line(run.stderr)}", reinstall_fbtriton())
        else:
            yield Line("ptxas", OK, f"{Path(tool.path).name} of CUDA {release.group(1)}")


def check_gpu() -> Iterator[Line]:
    """Report each GPU with its architecture; none is fine."""
    _require("numpy", "torch")
    import torch

    if not torch.cuda.is_available():
        yield Line("gpu", OK, "none here: kernels run on the emulator, or are compiled only")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        yield Line("gpu", OK, f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}")


def check_backends() -> Iterator[Line]:
    """Report where each backend of the op runs on this machine."""
    _require("numpy", "torch")
    import torch

    from jfa.kernels import registry

    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    emulator = _emulator_objection()
    for name in registry.MODULES:
        places = []
        for device in devices:
            objection = registry.objection(name, _small_problem(device))
            if objection is None and device == "cpu" and name != "reference":
                objection = emulator
            where = "GPU" if device == "cuda" else ("CPU" if name == "reference" else "CPU (emulator)")
            places.append(where if objection is None else f"not on the {device.upper()[:3]}: {objection}")
        works = any(not place.startswith("not on") for place in places)
        yield Line("backend", OK if works else WARNING, f"{name}: {'; '.join(places)}")


def check_known_value() -> Iterator[Line]:
    """Check that a small kernel gives the right number in each way of running it, in a process of its own."""
    _require("numpy", "torch")
    if _import_triton()[0] is None:
        return
    import torch

    ways = {"interpreter": "Triton's interpreter"}
    if _emulator_objection() is None:
        ways["emulator"] = "jfa's emulator"
    if torch.cuda.is_available():
        ways["gpu"] = "the GPU"
    for way, words in ways.items():
        failure = _run_known_value(way)
        if failure is None:
            yield Line("kernel", OK, f"right number on {words}")
        else:
            yield Line("kernel", BROKEN, f"on {words}: {_last_line(failure)}", _kernel_repair(failure))


def check_course() -> Iterator[Line]:
    """Check the packages that the course needs besides, and whether they are the locked ones."""
    versions = {name: _version(name) for name in COURSE_PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        repair = pip_command(" ".join(_locked(name) for name in missing))
        yield Line("course", WARNING, f"not installed: {', '.join(missing)}", repair)
        return
    other = [name for name, version in _lock().items() if _plain(_version(name) or version) != _plain(version)]
    if other:
        text = f"not the locked versions: {', '.join(f'{name} {_version(name)}' for name in other)}"
        yield Line("course", WARNING, text, pip_command("--no-deps " + " ".join(_locked(name) for name in other)))
    else:
        yield Line("course", OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_packages() -> Iterator[Line]:
    """Check that every locked package has the files that its own record lists, and what it needs in turn is installed."""
    installed = [name for name in _lock() or COURSE_PACKAGES if _version(name) is not None]
    sound = 0
    for name in installed:
        damage = None if name == "fbtriton" else _lost_files(name)  # its own check looks closer
        lacking = [other for other in _needs(name) if _version(other) is None]
        if damage:
            yield Line("package", BROKEN, f"{name} {_version(name)}: {damage}", _reinstall(name))
        elif lacking:
            repair = pip_command(" ".join(_locked(other) for other in lacking))
            yield Line("package", BROKEN, f"{name} needs {', '.join(lacking)}, not installed here", repair)
        else:
            sound += 1
    if sound == len(installed):
        yield Line(
            "package", OK, f"{sound} of the {len(_lock())} locked packages are installed, each as its record says"
        )


CHECKS: tuple[Callable[[], Iterator[Line]], ...] = (
    check_python,
    check_path,
    check_numpy,
    check_torch,
    check_triton,
    check_tlx,
    check_interpret,
    check_ptxas,
    check_gpu,
    check_backends,
    check_known_value,
    check_course,
    check_packages,
)


# -- Triton's flavours -----------------------------------------------------------------------------------------------


def triton_flavour() -> Line:
    """Return which package's files the module ``triton`` consists of.

    Three packages install this one module. pip lets the last one win and an uninstall of one take the files of all, so
    what pip lists says little: the version string and fbtriton's own record of files decide.
    """
    installed = _version("fbtriton")
    version, place = _import_triton()
    if version is None and installed is None:
        text = f"none ({place}): chapters 00-02 run, kernels do not"
        return Line("triton", WARNING, text, pip_command(_locked("fbtriton")))
    if version is None:
        why = _damage("fbtriton") or place
        text = (
            f"fbtriton {installed} is listed as installed, but does not import: {why} (pip uninstall triton does that)"
        )
        return Line("triton", BROKEN, text, reinstall_fbtriton())
    if not version.endswith("+fb"):
        return _upstream_triton(version, place, installed)
    damage = None
    if installed is not None and _home("fbtriton") == Path(place).parent.resolve():  # else unpacked without a record
        damage = _damage("fbtriton")
    if damage is not None:
        return Line("triton", BROKEN, f"{version} (fbtriton), but {damage}", reinstall_fbtriton())
    return Line("triton", OK, f"{version} (fbtriton, with TLX) at {place}")


def _upstream_triton(version: str, place: str, installed: str | None) -> Line:
    if installed is None:
        text = f"{version}, upstream: no TLX, so Hopper and Blackwell kernels run on the emulator and do not compile"
        return Line("triton", WARNING, text, reinstall_fbtriton())
    if Path(place).parent.resolve() != _home("fbtriton"):
        text = f"upstream {version} at {place} hides fbtriton {installed}: it comes first on sys.path"
        first = str(Path(place).parent)
        elsewhere = f"take {shlex.quote(first)} out of sys.path: it is neither PYTHONPATH's nor this environment's"
        return Line("triton", BROKEN, text, "unset PYTHONPATH" if _on_python_path(first) else elsewhere)
    text = f"upstream {version} was installed over fbtriton {installed}: importing TLX may work, compiling it fails"
    return Line("triton", BROKEN, text, reinstall_fbtriton())


def _import_triton() -> tuple[str | None, str]:
    """Return (version, folder) of the module; (None, why) if it does not import or is an empty shell."""
    if (why := _probe("triton")) is not None:
        return None, why
    try:
        import triton
    except Exception as error:
        return None, _first_line(f"{type(error).__name__}: {error}")
    version = getattr(triton, "__version__", None)
    if version is None or not hasattr(triton, "jit"):
        return None, "an empty folder is left"
    return version, str(Path(triton.__file__).parent)


def _home(package: str) -> Path:
    """Return the folder that a package is installed in."""
    return Path(str(metadata.distribution(package).locate_file(""))).resolve()


def _damage(package: str) -> str | None:
    """Return the first file that differs from the package's own record, or is not in it, in words; None where all fit."""
    distribution = metadata.distribution(package)
    # Not distribution.files: from Python 3.12 on it leaves out the files that are missing.
    rows = list(csv.reader((distribution.read_text("RECORD") or "").splitlines()))
    for name, _, size in rows:
        if not size or not name.startswith("triton/"):
            continue  # its scripts are not what runs kernels
        path = Path(str(distribution.locate_file(name)))
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != int(size):
            return f"{name} is another package's"
    return _stray(Path(str(distribution.locate_file(""))), {name for name, _, _ in rows})


def _stray(home: Path, recorded: set[str]) -> str | None:
    """Return a module that the record does not have: upstream's, left by a repair. A folder of a module's name hides the module."""
    names = (path.relative_to(home).as_posix() for path in sorted((home / "triton").rglob("*.py")))
    return next((f"{name} is another package's" for name in names if recorded and name not in recorded), None)


# -- packages and folders --------------------------------------------------------------------------------------------


class Unusable(Exception):
    """A check needs a module that does not work; the module's own check says why."""

    def __init__(self, module: str):
        super().__init__(module)
        self.module = module


def _require(*modules: str) -> None:
    """Raise Unusable for the first of these modules that does not work."""
    for module in modules:
        if _probe(module) is not None:
            raise Unusable(module)


@cache
def _probe(module: str) -> str | None:
    """Return why a module does not import or does nothing, tried in its own process; None where it works (or is imported here)."""
    if module in sys.modules:
        return None
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-c", PROBES[module]]
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"importing it took longer than {PROBE_SECONDS} s"
    if run.returncode == 0:
        return None
    if run.returncode < 0:
        return f"importing it kills Python ({signal.Signals(-run.returncode).name})"
    lines = [
        line for line in run.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt|Warning)\b", line)
    ]
    return _shorten(lines[-1]) if lines else f"importing it ends Python with status {run.returncode}"


def _python_path() -> list[str]:
    return [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _on_python_path(folder: str) -> bool:
    return os.path.realpath(folder) in map(os.path.realpath, _python_path())


def _hidden() -> Iterator[tuple[str, str, str]]:
    """Yield (module, whose it is, the folder that hides it) for what is found on sys.path before the module itself."""
    homes = {os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    owners = dict.fromkeys(sys.stdlib_module_names, "Python") | _modules()
    for entry in dict.fromkeys(sys.path):
        folder = os.path.realpath(entry or os.getcwd())
        if folder in homes or folder.endswith(("lib-dynload", ".zip")):
            homes.add(folder)
            continue
        installed_there = {owner for owner in set(_modules().values()) if str(_home(owner)) == folder}
        for module in sorted(_names_in(folder) & set(owners)):
            if owners[module] not in installed_there and _found_in(module, folder):
                yield module, owners[module], os.path.abspath(entry or os.getcwd())


def _names_in(folder: str) -> set[str]:
    """Return what could be imported from a folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return set()
    packages = {name for name in names if os.path.isfile(os.path.join(folder, name, "__init__.py"))}
    return packages | {name.split(".")[0] for name in names if name.endswith((".py", ".so", ".pyc"))}


def _found_in(module: str, folder: str) -> bool:
    """Return whether importing the module takes it from this very folder."""
    if module in sys.builtin_module_names:
        return False
    spec = PathFinder.find_spec(module)
    if spec is None or not spec.origin:
        return False
    place = os.path.dirname(spec.origin)
    return os.path.realpath(os.path.dirname(place) if spec.submodule_search_locations else place) == folder


@cache
def _modules() -> dict[str, str]:
    """Return {top-level module: package} of the locked packages that are installed."""
    found = {}
    for package in _lock() or COURSE_PACKAGES:
        for name, _, _ in _record(package):
            top = name.split("/")[0]
            if "/" in name and (top.isidentifier() and name.count("/") == 1 and name.endswith("/__init__.py")):
                found[top] = package
            elif "/" not in name and name.endswith(".py"):
                found[name.removesuffix(".py")] = package
    return found


def _blame_path(package: str) -> str | None:
    """Return the repair where a package is hidden by a folder of PYTHONPATH, None where it is not."""
    hidden = [folder for _, owner, folder in _hidden() if owner == package]
    return "unset PYTHONPATH" if hidden and _on_python_path(hidden[0]) else None


def _record(package: str) -> list[list[str]]:
    """Return [name, hash, size] of each file that a package says it installed; [] where it is not installed or says nothing.

    Not distribution.files: from Python 3.12 on it leaves out the files that are missing.
    """
    try:
        text = metadata.distribution(package).read_text("RECORD") or ""
    except metadata.PackageNotFoundError:
        return []
    return [row for row in csv.reader(text.splitlines()) if len(row) == 3]


def _lost_files(package: str) -> str | None:
    """Return which of its files a package lacks or has in another size, in words; None where its record is right."""
    home, lost, other = metadata.distribution(package), [], []
    complete = str(_home(package)) in {os.path.realpath(sysconfig.get_path(key)) for key in ("purelib", "platlib")}
    for name, _, size in _record(package):
        if not size or name.startswith("..") and not complete:
            continue  # compiled while it was installed; or beside a folder of packages that is no whole environment
        try:
            actual = os.stat(str(home.locate_file(name))).st_size
        except OSError:
            lost.append(name)
            continue
        if actual != int(size) and not name.startswith(".."):  # scripts begin with a path of this machine
            other.append(name)
    if lost:
        return f"{len(lost)} of its files are missing, such as {lost[0]}" if len(lost) > 1 else f"{lost[0]} is missing"
    return f"{other[0]} is not the file that was installed" if other else None


def _needs(package: str) -> list[str]:
    """Return the packages that a package needs here, without extras; [] where nothing here can read its conditions."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return []
    needed = []
    for text in metadata.distribution(package).requires or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed.append(requirement.name)
    return [name for name in needed if name.lower() != "triton"]  # fbtriton stands for it


# -- running a kernel ------------------------------------------------------------------------------------------------


def _run_known_value(way: str) -> str | None:
    """Run jfa/known_value.py in a child process; None, or what it printed when it went wrong."""
    here = Path(__file__).resolve().parent
    env = dict(os.environ)
    env.pop("TRITON_INTERPRET", None)
    if way == "interpreter":
        env["TRITON_INTERPRET"] = "1"
    # Last, so that it adds jfa where it is not installed and hides nothing.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(here.parent)]))
    command = [sys.executable, "-P", str(here / "known_value.py"), way]
    try:
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=KERNEL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {KERNEL_SECONDS} s"
    if run.returncode == 0:
        return None
    return (run.stderr + run.stdout).strip() or f"the process ended with status {run.returncode}"


def _kernel_repair(failure: str) -> str:
    """Return numpy's repair where a traceback names it, else Triton's: both ways of running on a CPU calculate with numpy."""
    if triton_flavour().status != BROKEN and re.search(r"numpy|\bnp\.", failure):
        return _blame_path("numpy") or pip_command(f"--force-reinstall {_locked('numpy')}")
    return reinstall_fbtriton()


def _emulator_objection() -> str | None:
    """Return why the emulator cannot run here; None where it can."""
    try:
        from jfa.emulator import run  # noqa: F401
    except Exception as error:
        return _first_line(f"the emulator does not import: {error}")
    return "the emulator needs greenlet" if PathFinder.find_spec("greenlet") is None else None


def _small_problem(device: str):
    """Return one sequence of two tokens: enough to ask a backend whether it runs on this device."""
    import torch

    from jfa.kernels.base import Problem
    from jfa.masks import Band

    offsets = torch.tensor([0, 2], dtype=torch.int32, device=device)
    return Problem(
        num_batches=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        head_dim_v=64,
        rows_q=2,
        rows_kv=2,
        rows_out=2,
        dtype=torch.bfloat16,
        device=torch.device(device),
        sm_scale=0.125,
        band=Band(),
        broadcast_q=False,
        deterministic=False,
        query_offset=offsets,
        key_offset=offsets,
    )


# -- words and versions ----------------------------------------------------------------------------------------------


def pip_command(arguments: str) -> str:
    """Return a pip command for the Python that is running, not for the first on PATH; ``arguments`` are quoted already."""
    return f"{shlex.quote(sys.executable)} -m pip install {arguments}"


def reinstall_fbtriton() -> str:
    """Return the repair of every clash of Triton's packages. The folder goes first: pip leaves what another package has more."""
    home = Path(sysconfig.get_path("purelib")) if _version("fbtriton") is None else _home("fbtriton")
    remove = f"rm -rf {shlex.quote(str(home / 'triton'))}"
    return f"{remove} && {pip_command('--no-deps --force-reinstall ' + _locked('fbtriton'))}"


def _reinstall(package: str) -> str:
    """Return the repair of a package whose files are not what they were: pip takes it for installed, so it must be forced."""
    if package == "fbtriton":
        return reinstall_fbtriton()
    blame = _blame_path(package)
    if blame:
        return blame
    stamp = _root() / ".venv" / "jfa-stamp.json"
    if package == "torch" and stamp.exists() and Path(sys.prefix) == _root() / ".venv":
        # Set-up knows which of PyTorch's builds this machine wants; pip alone would fetch the CUDA build.
        remove = f"{shlex.quote(sys.executable)} -m pip uninstall -y torch; rm -f {shlex.quote(str(stamp))}"
        return f"{remove} && {_make('setup')}"
    return pip_command(f"--no-deps --force-reinstall {_locked(package)}")


def _make(words: str) -> str:
    return f"make -C {shlex.quote(str(_root()))} {words}"


def _root() -> Path:
    """Return the checkout (or release) that this file belongs to."""
    return Path(__file__).resolve().parent.parent


def _repair_of(error: BaseException) -> str:
    """Return the likeliest repair where a check failed in an unforeseen way."""
    missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
    if isinstance(missing, str) and _lock().get(package := missing.split(".")[0]):
        return _reinstall(package)
    lock = _root() / "requirements.txt"
    return pip_command(f"-r {shlex.quote(str(lock))}" if lock.is_file() else f"--force-reinstall {_locked('torch')}")


@cache
def _lock() -> dict[str, str]:
    """Return {package: version} of this checkout's lock, {} without one; names as pip writes them, in lower case."""
    lock = _root() / "requirements.txt"
    if not lock.is_file():
        return {}
    return {
        name.lower(): version
        for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock.read_text(encoding="utf-8"), re.M)
    }


def _locked(package: str) -> str:
    """Return ``package==version`` of this checkout's lock, else the bare name (fbtriton: the version that was tested)."""
    version = _lock().get(package.lower()) or (FBTRITON if package == "fbtriton" else None)
    return f"{package}=={version}" if version else package


def _plain(version: str) -> str:
    """Return a version without the build it names: 2.13.0+cpu is 2.13.0."""
    return version.split("+")[0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _first_line(text: str) -> str:
    return _shorten(text.strip().splitlines()[0]) if text.strip() else "no message"


def _last_line(text: str) -> str:
    return _shorten(text.strip().splitlines()[-1])


def _shorten(line: str) -> str:
    return line if len(line) <= 200 else line[:197] + "..."
