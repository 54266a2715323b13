"""The set-up script: what it says where a machine does not fit, and a whole set-up from tiny wheels without a network."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.xdist_group("set-up")  # one environment, made once

SCRIPT = ROOT / "tools" / "setup_env.py"


@pytest.fixture(scope="module")
def setup_env():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "machine, words",
    [
        (("Darwin", "arm64", ""), "this is macOS. Use a Linux container. The Dockerfile"),
        (("Windows", "AMD64", ""), "this is Windows. Use a Linux container or WSL. The Dockerfile"),
        (("Linux", "riscv64", "glibc"), "no Triton for the processor riscv64"),
        (("Linux", "x86_64", ""), "another C library than glibc"),
    ],
)
def test_a_platform_that_does_not_fit_is_told_what_to_do(setup_env, machine, words):
    with pytest.raises(setup_env.SetupError, match=words.replace(".", r"\.")):
        setup_env.check_platform(*machine)


def test_linux_with_glibc_fits(setup_env):
    for machine in ("x86_64", "aarch64"):
        setup_env.check_platform("Linux", machine, "glibc")


def test_the_pythons_that_fit(setup_env):
    fits = [minor for minor in range(8, 18) if setup_env.python_fits((3, minor))]
    assert fits == [11, 12, 13, 14]


def test_the_script_parses_as_python_3_6():
    import ast

    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


def test_a_python_that_does_not_fit_hands_over_to_one_that_does(setup_env, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: sys.executable if name == "python3.12" else None)
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    with pytest.raises(setup_env.SetupError):  # execv does not return; its stand-in does
        setup_env.use_fitting_python()
    assert started == [[sys.executable, *sys.argv]]


def test_no_python_that_fits_is_told_which_ones_do(setup_env, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=r"Python 3\.11 to 3\.14 is needed, and .* is 3\.9"):
        setup_env.use_fitting_python()


def test_a_missing_ensurepip_names_the_package_to_install(setup_env, monkeypatch, tmp_path):
    # Debian's python3 without python3-venv: the module is simply not there.
    (tmp_path / "ensurepip.py").write_text("raise ModuleNotFoundError('No module named ensurepip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(setup_env.SetupError, match=r"has no ensurepip.*\n.*sudo apt install python3\.\d+-venv"):
        setup_env.check_ensurepip()


def test_pip_failures_are_explained(setup_env):
    log = "Collecting torch\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert "The disk is full" in setup_env.explain_failure(log)
    log = (
        "WARNING: Retrying: NewConnectionError('Failed to establish a new connection')\nERROR: No matching distribution"
    )
    assert "Is there a network?" in setup_env.explain_failure(log)


# -- does an index answer? -------------------------------------------------------------------------------------------


def test_an_index_that_accepts_but_never_answers_is_given_up(setup_env):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        assert not setup_env.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/torch/", 0.5)
        assert time.monotonic() - started < 30  # it ended; the limit itself is not what is tested


def test_an_index_that_is_not_there_does_not_answer(setup_env):
    assert not setup_env.answers("http://127.0.0.1:9/torch/", 5)


def test_an_index_that_answers(setup_env, tmp_path):
    (tmp_path / "torch").mkdir()
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            port = server.stdout.readline().split("port ")[1].split()[0]
            assert setup_env.answers(f"http://127.0.0.1:{port}/torch/", 30)
            assert not setup_env.answers(f"http://127.0.0.1:{port}/nothing/", 30)
        finally:
            server.terminate()


# -- a whole set-up, offline, from tiny wheels -----------------------------------------------------------------------


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """A wheel with these files and a proper record."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


# Stands for setuptools, which is no tiny wheel: an editable install that writes a .pth file.
BACKEND = """
import os, zipfile

def build_editable(directory, settings=None, metadata=None):
    name = "jfa-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.writestr("jfa.pth", os.getcwd())
        wheel.writestr("jfa-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: jfa\\nVersion: 0.1.0\\n")
        wheel.writestr("jfa-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("jfa-0.1.0.dist-info/RECORD", "")
    return name
"""


class Checkout:
    """A miniature checkout with the real script, a lock of three tiny packages, and pip told where their wheels are."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.wheels = folder / "wheels"
        for name in ("tools", "jfa", "wheels"):
            (folder / name).mkdir(parents=True)
        shutil.copy(SCRIPT, folder / "tools")
        (folder / "jfa" / "__init__.py").write_text("")
        (folder / "backend.py").write_text(BACKEND)
        (folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "jfa"\nversion = "0.1.0"\n'
        )
        self.lock(numpy="1.0")
        make_wheel(self.wheels, "numpy", "1.0", {"numpy/__init__.py": ""})
        make_wheel(self.wheels, "fbtriton", "3.7.4", {"triton/__init__.py": "fb = 1\n", "triton/tlx.py": "tlx = 1\n"})
        make_wheel(self.wheels, "triton", "3.7.1", {"triton/__init__.py": "upstream = 1\n"})
        self.serve_torch("cpu")

    def lock(self, **versions: str) -> None:
        rows = {"torch": "2.13.0", "fbtriton": "3.7.4", **versions}
        (self.folder / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in rows.items()))

    def serve_torch(self, kind: str) -> None:
        """Which build pip's index has."""
        cuda = "None" if kind == "cpu" else "'13.0'"
        files = {
            "torch/__init__.py": "",
            "torch/version.py": f"from typing import Optional\ncuda: Optional[str] = {cuda}\n",
        }
        make_wheel(self.wheels, "torch", "2.13.0", files)

    def setup(self, *words: str, index: bool = True) -> subprocess.CompletedProcess:
        """Run the script; without ``index`` pip finds nothing anywhere."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        env |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels) if index else str(self.folder / "nowhere"),
            "JFA_TORCH_INDEX": "http://127.0.0.1:9",
        }
        command = [sys.executable, str(self.folder / "tools" / "setup_env.py"), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def triton(self) -> str:
        """What the module triton on disk says it is."""
        (file,) = (self.folder / ".venv").glob("lib/*/site-packages/triton/__init__.py")
        return file.read_text()

    def pip(self, *words: str) -> None:
        command = [str(self.folder / ".venv/bin/python"), "-m", "pip", "--isolated", *words]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A checkout after its first set-up, and what that printed. Tests leave it ready."""
    checkout = Checkout(tmp_path_factory.mktemp("checkouts") / "jfa")
    result = checkout.setup()
    assert result.returncode == 0, result.stdout + result.stderr
    return checkout, result.stdout


def test_the_first_set_up_says_what_it_does(ready):
    checkout, printed = ready
    assert "PyTorch's CPU index did not answer" in printed
    assert "torch 2.13.0: the CPU build" in printed
    assert [line[:5] for line in printed.splitlines() if line.startswith("[")] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "Ready after" in printed


def test_a_later_run_does_nothing_and_needs_no_index(ready):
    checkout, _ = ready
    result = checkout.setup(index=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_nothing_but_ignored_folders_is_written(ready):
    checkout, _ = ready
    written = {path.name for path in checkout.folder.iterdir()} - {"__pycache__"}
    assert written == {"tools", "jfa", "wheels", "backend.py", "pyproject.toml", "requirements.txt", ".venv", ".jfa"}


def test_a_changed_lock_is_installed(ready):
    checkout, _ = ready
    make_wheel(checkout.wheels, "numpy", "1.1", {"numpy/__init__.py": ""})
    checkout.lock(numpy="1.1")
    result = checkout.setup()
    assert result.returncode == 0 and "keeping PyTorch's CPU build" in result.stdout
    assert list((checkout.folder / ".venv").glob("lib/*/site-packages/numpy-1.1.dist-info"))


def test_the_books_packages_come_only_when_asked_for_and_not_into_the_environment(ready):
    checkout, _ = ready
    make_wheel(checkout.wheels, "sphinx", "9.0", {"sphinx/__init__.py": ""})
    (checkout.folder / "requirements-book.txt").write_text("sphinx==9.0\n")
    place = checkout.folder / ".jfa" / "cache" / "book-packages"
    try:
        assert checkout.setup().returncode == 0 and not place.exists()
        result = checkout.setup("--book")
        assert result.returncode == 0 and "what builds the book" in result.stdout
        assert (place / "sphinx" / "__init__.py").exists()
        assert not list((checkout.folder / ".venv").glob("lib/*/site-packages/sphinx"))
        assert checkout.setup("--book", index=False).stdout == "", "a second run has nothing to do"
        (checkout.folder / "requirements-book.txt").write_text("sphinx==9.1\n")
        assert "pip failed" in checkout.setup("--book", index=False).stderr, "a changed lock is installed"
    finally:
        (checkout.folder / "requirements-book.txt").unlink()
        shutil.rmtree(place, ignore_errors=True)


def test_triton_installed_over_fbtriton_is_repaired(ready):
    checkout, _ = ready
    checkout.pip("install", "--no-index", "--no-deps", str(checkout.wheels / "triton-3.7.1-py3-none-any.whl"))
    assert checkout.triton() == "upstream = 1\n"
    result = checkout.setup()
    assert result.returncode == 0 and "repairing" in result.stdout
    assert checkout.triton() == "fb = 1\n"


def test_what_another_triton_has_more_is_removed(ready):
    """A repair by pip alone leaves it there, and a folder of a module's name hides the module."""
    checkout, _ = ready
    (package,) = (checkout.folder / ".venv").glob("lib/*/site-packages/triton")
    (package / "tlx").mkdir()
    (package / "tlx" / "__init__.py").write_text("upstream = 1\n")
    result = checkout.setup()
    assert "repairing it" in result.stdout
    assert not (package / "tlx").exists() and checkout.triton() == "fb = 1\n"


def test_fbtriton_gutted_by_an_uninstall_is_repaired(ready):
    checkout, _ = ready
    checkout.pip("install", "--no-index", "--no-deps", str(checkout.wheels / "triton-3.7.1-py3-none-any.whl"))
    checkout.pip("uninstall", "-y", "triton")
    assert not list((checkout.folder / ".venv").glob("lib/*/site-packages/triton/__init__.py"))
    assert checkout.setup().returncode == 0
    assert checkout.triton() == "fb = 1\n"


def test_a_failed_repair_says_why(ready):
    checkout, _ = ready
    (file,) = (checkout.folder / ".venv").glob("lib/*/site-packages/triton/tlx.py")
    file.unlink()
    result = checkout.setup(index=False)
    assert result.returncode == 1
    assert "set-up stopped: pip failed" in result.stderr and "no such version" in result.stderr
    assert checkout.setup().returncode == 0


def test_gpu_1_replaces_the_cpu_build_and_a_later_start_keeps_the_cuda_build(ready):
    checkout, _ = ready
    result = checkout.setup("--gpu")
    assert result.returncode == 1 and "pip's index gave its CPU build" in result.stderr
    checkout.serve_torch("cuda")
    result = checkout.setup("--gpu")
    assert result.returncode == 0, result.stderr
    assert "torch 2.13.0: the CUDA build, " in result.stdout
    assert checkout.setup("--gpu", index=False).stdout == ""
    assert checkout.setup(index=False).stdout == ""


def test_the_size_told_of_a_cuda_build_counts_its_libraries(setup_env, monkeypatch, tmp_path, capsys):
    for name, size in (
        ("torch-2.13.0+cu130", 500_000_000),
        ("nvidia_cublas-13.1", 600_000_000),
        ("nvidia_nvtx-13", 100_000_000),
    ):
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "RECORD").write_text(f"some/file.so,sha256=x,{size}\nRECORD,,\n")
    monkeypatch.setattr(setup_env, "site_packages", lambda: tmp_path)
    setup_env.report_torch("cuda")
    assert capsys.readouterr().out.strip() == "torch 2.13.0+cu130: the CUDA build, 1.2 GB on disk"


def test_a_moved_checkout_gets_a_new_environment(tmp_path):
    checkout = Checkout(tmp_path / "before")
    assert checkout.setup().returncode == 0
    checkout.folder.rename(tmp_path / "after")
    checkout.folder, checkout.wheels = tmp_path / "after", tmp_path / "after" / "wheels"
    result = checkout.setup()
    assert result.returncode == 0 and "[1/4]" in result.stdout
    assert str(checkout.folder) in (checkout.folder / ".venv" / "bin" / "pip").read_text()


# -- the lock --------------------------------------------------------------------------------------------------------


def test_the_lock_is_complete_and_fits_every_build(setup_env):
    locked = setup_env.locked()
    assert locked["torch"] == "2.13.0" and locked["fbtriton"] == "3.7.4"
    rows = [row for row in (ROOT / "requirements.txt").read_text().splitlines() if row and not row.startswith("#")]
    assert len(rows) == len(locked), "every row is pinned"
    assert not any("+" in row or "@" in row or "://" in row for row in rows)


def test_the_lock_satisfies_the_ranges_of_the_package(setup_env):
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + [row for rows in project["optional-dependencies"].values() for row in rows]
    locked = setup_env.locked(setup_env.BOOK_LOCK) | setup_env.locked()
    for requirement in map(Requirement, requirements):
        if requirement.name != "jfa":
            name = setup_env.normal_name(requirement.name)
            assert requirement.specifier.contains(locked[name]), requirement


def test_the_books_lock_is_pinned_and_adds_only_what_the_course_does_not_have(setup_env):
    locked = setup_env.locked(setup_env.BOOK_LOCK)
    rows = [row for row in (ROOT / "requirements-book.txt").read_text().splitlines() if row and not row.startswith("#")]
    assert len(rows) == len(locked) > 0
    assert not locked.keys() & setup_env.locked().keys()


def test_conda_users_get_the_same(setup_env):
    import yaml

    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (by_pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert by_pip == ["-r requirements.txt", "-e ."]
    assert [entry.split("=")[0] for entry in environment["dependencies"] if isinstance(entry, str)] == ["python", "pip"]
