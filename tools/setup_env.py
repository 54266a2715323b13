#!/usr/bin/env python3
"""Make .venv, the course's environment: what `make lab` and `make test` run first.

Standard library only, and written so that an old Python still parses it and can say that it is too old. A stamp in .venv
records what was installed; while it matches the lock, a later run looks at a few files, uses no network and is done.

    python3 tools/setup_env.py [--gpu] [--book]

JFA_TORCH_INDEX: another index to take torch's CPU build from.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STATE = ROOT / ".jfa"
LOCK = ROOT / "requirements.txt"
BOOK_LOCK = ROOT / "requirements-book.txt"
BOOK = STATE / "cache" / "book-packages"  # beside .venv, not in it: only who builds the book needs them
STAMP = VENV / "jfa-stamp.json"

OLDEST, NEWEST = (3, 11), (3, 14)  # the Pythons that fbtriton has wheels for and that jfa's syntax allows
MACHINES = ("x86_64", "aarch64")

# PyTorch's own index of CPU builds: the address its installation page gives. The default index has the CUDA build, thirty
# times as large, and pip cannot prefer the one over the other by itself.
CPU_INDEX = os.environ.get("JFA_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
CPU_INDEX_PATIENCE = 5  # seconds until we go on without it

CONTAINER_HINT = "The Dockerfile and .devcontainer/ in this checkout give you a Linux that fits."


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def main(argv=None):
    """Set up; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make .venv, the environment of the course.")
    parser.add_argument("--gpu", action="store_true", help="PyTorch's CUDA build, driver or not")
    parser.add_argument("--book", action="store_true", help="also what builds the book, in .jfa/cache/book-packages")
    args = parser.parse_args(argv)
    try:
        check_platform(platform.system(), platform.machine(), platform.libc_ver()[0])
        use_fitting_python()
        STATE.mkdir(exist_ok=True)
        with open(STATE / "setup.lock", "w") as lock:  # a second `make` waits for the first
            fcntl.flock(lock, fcntl.LOCK_EX)
            ensure_environment(args.gpu)
            if args.book:
                ensure_book_packages()
    except SetupError as error:
        print("\nset-up stopped: {}".format(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up stopped by you; run the same command again, it goes on where it was.", file=sys.stderr)
        return 130
    return 0


# -- does this machine fit? ------------------------------------------------------------------------------------------


def check_platform(system, machine, libc):
    """Raise SetupError where no wheel of Triton with TLX exists."""
    if system != "Linux":
        name = {"Darwin": "macOS"}.get(system, system)
        way = "Use a Linux container" + (" or WSL" if system == "Windows" else "")
        raise SetupError("the course needs Linux; this is {}. {}. {}".format(name, way, CONTAINER_HINT))
    if machine not in MACHINES:
        raise SetupError("there is no Triton for the processor {}; {} will do.".format(machine, " or ".join(MACHINES)))
    if libc != "glibc":
        raise SetupError("this Linux has another C library than glibc, which Triton's wheels need. " + CONTAINER_HINT)


def python_fits(version):
    """Return whether a Python of this (major, minor) can run the course."""
    return OLDEST <= tuple(version[:2]) <= NEWEST


def use_fitting_python():
    """Go on in another interpreter from PATH if this one is too old or too new; SetupError if there is none."""
    if python_fits(sys.version_info):
        return
    have = "{}.{}".format(*sys.version_info[:2])
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        other = shutil.which("python3.{}".format(minor))
        if other and subprocess.call([other, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL) == 0:
            print("python3 is {}; going on with {}".format(have, other), flush=True)
            os.execv(other, [other] + sys.argv)
    raise SetupError(
        "Python {}.{} to {}.{} is needed, and {} is {}.\nInstall one and name it: make lab PYTHON=python3.12".format(
            *OLDEST, *NEWEST, sys.executable, have
        )
    )


def check_ensurepip():
    """Raise SetupError if this Python cannot make a virtual environment (Debian and Ubuntu package that apart)."""
    if subprocess.call([sys.executable, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL) == 0:
        return
    package = "python{}.{}-venv".format(*sys.version_info[:2])
    raise SetupError(
        "{} has no ensurepip, so it cannot make a virtual environment.\n"
        "On Debian and Ubuntu: sudo apt install {}\nthen run the same command again.".format(sys.executable, package)
    )


def has_nvidia_driver():
    """Return whether an NVIDIA driver is loaded here (WSL shows its GPU as /dev/dxg)."""
    return any(os.path.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/dxg"))


# -- the environment -------------------------------------------------------------------------------------------------


def ensure_environment(gpu):
    """Bring .venv up to the lock; nothing to do if its stamp says that it is."""
    stamp = read_stamp()
    if stamp == expected_stamp(stamp.get("torch")) and not (gpu and stamp["torch"] == "cpu"):
        if triton_damage(site_packages()) is None:
            return
        print("The Triton on disk is not the locked one any more; repairing it.", flush=True)
        repair_triton(site_packages())
        print("Repaired.", flush=True)
        return
    check_ensurepip()
    started = time.time()
    print("Setting up the course in .venv (once; later starts skip this). Log: .jfa/setup.log", flush=True)
    open(STATE / "setup.log", "w").close()
    step(1, "a virtual environment with Python {}".format(platform.python_version()))
    make_venv(stamp)
    step(2, "PyTorch")
    want_cuda = gpu or has_nvidia_driver() or stamp.get("torch") == "cuda"
    choose_torch(want_cuda, gpu)
    step(3, "the locked packages")
    pip(["install", "-r", str(LOCK)], total=len(locked()))
    pip(["install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    kind = torch_kind(site_packages())
    report_torch(kind)
    if gpu and kind != "cuda":
        raise SetupError(
            "GPU=1 asks for PyTorch's CUDA build, but pip's index gave its CPU build (see pip config list)."
        )
    step(4, "Triton with TLX")
    if triton_damage(site_packages()) is not None:
        repair_triton(site_packages())
    STAMP.write_text(json.dumps(expected_stamp(kind), indent=1))
    forget_downloads()
    print("Ready after {:.0f} s.".format(time.time() - started), flush=True)


def step(number, what):
    """Announce one of the four steps."""
    print("[{}/4] {}".format(number, what), flush=True)


def locked(lock=LOCK):
    """Return {package: version} of a lock."""
    rows = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", lock.read_text(), flags=re.M)
    return {normal_name(name): version for name, version in rows}


def normal_name(name):
    """Return a package's name as its .dist-info folder spells it."""
    return re.sub(r"[-_.]+", "_", name).lower()


def read_stamp():
    """Return what .venv says was installed, {} if it says nothing or its Python does not start."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if os.path.exists(str(VENV / "bin" / "python")) else {}


def expected_stamp(torch):
    """Return what the stamp must be now. The folder is part of it: a moved .venv has scripts that point to the old place."""
    contents = b"".join(path.read_bytes() for path in (LOCK, ROOT / "pyproject.toml"))
    return {"lock": hashlib.sha256(contents).hexdigest(), "folder": str(ROOT), "torch": torch}


def make_venv(stamp):
    """Create .venv, or keep the one there if it works and was made here."""
    python = VENV / "bin" / "python"
    if python.exists() and stamp.get("folder", str(ROOT)) == str(ROOT):
        probe = [str(python), "-c", "import sys, pip; print(*sys.version_info[:2])"]
        result = subprocess.run(probe, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if result.returncode == 0 and python_fits([int(n) for n in result.stdout.split()]):
            return
    run([sys.executable, "-m", "venv", "--clear", str(VENV)], lambda: "making .venv")


def site_packages():
    """Return .venv's site-packages folder."""
    return next((VENV / "lib").glob("python3.*/site-packages"))


def ensure_book_packages():
    """Bring the book's packages up to their lock; nothing to do if their stamp says that they are."""
    stamp = BOOK / "stamp"
    python = site_packages().parent.name  # some of them are compiled for one Python
    expected = "{} {}".format(python, hashlib.sha256(BOOK_LOCK.read_bytes()).hexdigest())
    if stamp.exists() and stamp.read_text() == expected:
        return
    print("Installing what builds the book (once, 100 MB). Log: .jfa/setup.log", flush=True)
    shutil.rmtree(str(BOOK), ignore_errors=True)
    pip(["install", "--no-deps", "--target", str(BOOK), "-r", str(BOOK_LOCK)])
    stamp.write_text(expected)
    forget_downloads()


# -- PyTorch ---------------------------------------------------------------------------------------------------------


def choose_torch(want_cuda, gpu):
    """Install the CPU build from PyTorch's index if that is wanted and answers; otherwise the lock brings the default one."""
    kind = torch_kind(site_packages())
    if kind == "cuda":
        print("      keeping PyTorch's CUDA build", flush=True)
    elif want_cuda:
        why = "GPU=1" if gpu else "there is an NVIDIA driver"
        print("      {}: CUDA build from pip's default index (with its libraries several GB)".format(why), flush=True)
        if kind == "cpu":
            pip(["uninstall", "-y", "torch"])
    elif kind == "cpu":
        print("      keeping PyTorch's CPU build", flush=True)
    elif answers(CPU_INDEX + "/torch/", CPU_INDEX_PATIENCE):
        print("      no NVIDIA driver: CPU build from PyTorch's own index (about 0.2 GB)", flush=True)
        pip(["install", "--no-deps", "--index-url", CPU_INDEX, "torch==" + locked()["torch"]])
    else:
        print(
            "      no NVIDIA driver, and PyTorch's CPU index did not answer (asked for {} s at most): the build that pip's default "
            "index has.\n      If that is the CUDA build, it and its libraries take several GB; it works without a GPU "
            "too.".format(CPU_INDEX_PATIENCE),
            flush=True,
        )


def answers(url, seconds):
    """Return whether the address answers within so many seconds (name look-up included, which has no time-out of its own)."""
    result = []

    def ask():
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
            result.append(True)
        except (
            Exception
        ):  # no network, no such host, refused, an error page, a broken proxy: all mean "go on without it"
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(result)


def torch_kind(site):
    """Return "cpu", "cuda" or None where torch is not installed; read from torch's version file, not by importing it."""
    try:
        text = (site / "torch" / "version.py").read_text()
    except OSError:
        return None
    cuda = re.search(r"^cuda[^=\n]*=\s*(.+)$", text, flags=re.M)
    return "cuda" if cuda and cuda.group(1).strip() != "None" else "cpu"


def report_torch(kind):
    """Say which torch came and how big it is on disk, with the CUDA libraries if it has them."""
    (torch,) = site_packages().glob("torch-*.dist-info")
    libraries = site_packages().glob("nvidia_*.dist-info") if kind == "cuda" else []
    size = sum(installed_bytes(folder) for folder in [torch] + list(libraries))
    version = torch.name[len("torch-") : -len(".dist-info")]
    build = "CUDA" if kind == "cuda" else "CPU"
    print("      torch {}: the {} build, {:.1f} GB on disk".format(version, build, size / 1e9), flush=True)


def installed_files(dist_info):
    """Yield (path, bytes) of each file a package says it installed."""
    for line in (dist_info / "RECORD").read_text().splitlines():
        path, _, size = line.rsplit(",", 2)
        if size:
            yield dist_info.parent / path.strip('"'), int(size)


def installed_bytes(dist_info):
    """Return what a package takes on disk by its own record."""
    return sum(size for _, size in installed_files(dist_info))


# -- Triton ----------------------------------------------------------------------------------------------------------


def triton_damage(site):
    """Return None if the module `triton` is fbtriton's as installed, else one sentence.

    Another package installs the same module: a later `pip install triton` overwrites it, and `pip uninstall triton`
    empties it, while pip still lists fbtriton. So its files are compared with its own record; a file that is not in it
    may hide one that is (a folder of a module's name comes before the module).
    """
    folders = list(site.glob("fbtriton-*.dist-info"))
    if not folders:
        return "fbtriton is not installed"
    recorded = dict(installed_files(folders[0]))
    for path, size in recorded.items():
        if ".." in path.parts:
            continue  # its scripts, which are not what runs kernels
        if not path.exists():
            return "{} is missing".format(path.name)
        if path.stat().st_size != size:
            return "{} is another package's".format(path.name)
    strays = (path for path in sorted((site / "triton").rglob("*.py")) if path not in recorded)
    return next(("{} is another package's".format(path.name) for path in strays), None)


def repair_triton(site):
    """Put fbtriton's files back, and nothing else: pip leaves what the other package has more."""
    shutil.rmtree(str(site / "triton"), ignore_errors=True)
    requirement = "fbtriton==" + locked()["fbtriton"]
    pip(["install", "--no-deps", "--force-reinstall", requirement])
    damage = triton_damage(site)
    if damage is not None:
        raise SetupError("Triton is still not fbtriton: {}. Remove .venv and run again.".format(damage))


# -- running pip, with progress --------------------------------------------------------------------------------------


def pip(words, total=None):
    """Run .venv's pip; with ``total`` the progress line counts the packages on disk."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"] + words

    def progress():
        if total is None:
            return ""
        names = {f.name.split("-")[0].lower() for f in site_packages().glob("*.dist-info")}
        return "{} of {} packages".format(len(names & set(locked())), total)

    run(command, progress)


def run(command, progress):
    """Run a command into the log, a progress line meanwhile; SetupError with the log's end if it fails."""
    env = dict(os.environ)
    # Downloads stay inside the checkout until set-up has succeeded, so that a broken one need not start over.
    env.setdefault("PIP_CACHE_DIR", str(STATE / "cache" / "pip"))
    env.pop("PYTHONPATH", None)  # another Triton on it would be taken for the environment's own
    with open(STATE / "setup.log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=str(ROOT))
        try:
            watch(process, progress)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise SetupError(explain_failure((STATE / "setup.log").read_text()))


def watch(process, progress):
    """Print where the process is until it ends: one line rewritten on a terminal, else a line every ten seconds."""
    tty = sys.stdout.isatty()
    started = shown = time.time()
    while process.poll() is None:
        time.sleep(0.2)
        if time.time() - shown < (0.5 if tty else 10):
            continue
        shown = time.time()
        line = "      {:3.0f} s  {:<20}  {}".format(shown - started, progress(), last_log_line())
        if tty:
            print("\r" + line[: shutil.get_terminal_size().columns - 1], end="\033[K", flush=True)
        else:
            print(line[:110], flush=True)
    if tty:
        print("\r\033[K", end="", flush=True)


def last_log_line():
    """Return what pip is doing: the last line of its log that says so. Once it has everything, it unpacks and says nothing more."""
    lines = [line.strip() for line in (STATE / "setup.log").read_text().splitlines()]
    last = next((line for line in reversed(lines) if line and not line.startswith("WARNING")), "")
    return (
        "unpacking"
        if re.match(r"Installing collected|Attempting uninstall|Found existing|Successfully unin", last)
        else last
    )


def explain_failure(log):
    """Return the end of pip's log, and a sentence for the usual causes."""
    tail = "\n".join("    " + line for line in log.strip().splitlines()[-12:])
    causes = {
        r"No space left": "The disk is full: the course takes about 2.5 GB.",
        r"NewConnectionError|Temporary failure in name resolution|ConnectTimeout|ReadTimeout|Connection refused|ProxyError": (
            "pip could not reach its index. Is there a network? Behind a proxy, set https_proxy."
        ),
        r"No matching distribution|from versions: none": "pip's index has no such version for this Python and platform.",
    }
    hints = [hint for pattern, hint in causes.items() if re.search(pattern, log)]
    return "\n".join(
        ["pip failed; the end of .jfa/setup.log:", tail] + hints[:1] + ["Run the same command again to go on."]
    )


def forget_downloads():
    """Delete the wheels, which a successful set-up needs no more."""
    if "PIP_CACHE_DIR" not in os.environ:
        shutil.rmtree(str(STATE / "cache" / "pip"), ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
