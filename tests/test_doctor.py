"""Each way in which an installation goes wrong is produced on disk or in a process, and jfa doctor must name it.

The installations are copies of the running one made of links, so that a test can damage its own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from jfa import doctor

pytest.importorskip("triton")
SITE = Path(str(metadata.distribution("fbtriton").locate_file(""))).resolve()


FLAVOUR = "import json; from dataclasses import asdict; from jfa import doctor; print(json.dumps(asdict(doctor.triton_flavour())))"


class Installation:
    """A site-packages folder of links to the running one's; ``own(package)`` makes one package's files its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        for entry in SITE.iterdir():
            if not entry.name.startswith("__editable__") and entry.name != "__pycache__":
                (folder / entry.name).symlink_to(entry)

    def own(self, package: str) -> Path:
        """The package as a real folder tree whose files are links: to delete or replace."""
        target = self.folder / package
        target.unlink()
        shutil.copytree(SITE / package, target, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
        return target

    def replace(self, path: str, text: str) -> None:
        """A file with other contents (the link goes, the running installation's file stays)."""
        (self.folder / path).unlink(missing_ok=True)
        (self.folder / path).write_text(text)

    def remove(self, pattern: str) -> None:
        """Delete links or folders of links."""
        for path in self.folder.glob(pattern):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)

    def run(self, *words: str, first: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
        """Python on this installation alone (-S: no other site-packages)."""
        root = Path(doctor.__file__).parent.parent
        env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_INTERPRET")}
        env["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, [first, self.folder, root])))
        return subprocess.run([sys.executable, "-S", *words], env=env | variables, capture_output=True, text=True)

    def flavour(self, **options) -> doctor.Line:
        """What the doctor says of Triton here."""
        result = self.run("-c", FLAVOUR, **options)
        assert result.returncode == 0, result.stderr
        return doctor.Line(**json.loads(result.stdout))

    def packages(self) -> list[doctor.Line]:
        """What the doctor says of packages that are not as they were installed."""
        program = "import json; from dataclasses import asdict; from jfa import doctor\n"
        result = self.run("-c", program + "print(json.dumps([asdict(x) for x in doctor.check_packages()]))")
        assert result.returncode == 0, result.stderr
        return [doctor.Line(**line) for line in json.loads(result.stdout)]


@pytest.fixture
def installation(tmp_path):
    return Installation(tmp_path / "site-packages")


def overwrite_with_upstream(installation: Installation) -> None:
    """What `pip install triton` after fbtriton leaves: upstream's files, fbtriton's record."""
    installation.own("triton")
    original = (SITE / "triton" / "__init__.py").read_text()
    installation.replace("triton/__init__.py", original.replace("+fb", ""))


def gut(installation: Installation) -> None:
    """What `pip uninstall triton` leaves of fbtriton: the few files that upstream does not have."""
    package = installation.own("triton")
    for path in sorted(package.rglob("*"), reverse=True):
        if path.is_symlink() and "tlx" not in path.parts:
            path.unlink()


def test_a_sound_installation_is_ok(installation):
    line = installation.flavour()
    assert line.status == "ok" and "+fb" in line.text


def test_upstream_over_fbtriton_is_broken(installation):
    overwrite_with_upstream(installation)
    line = installation.flavour()
    assert line.status == "broken"
    assert "installed over fbtriton" in line.text
    assert "--no-deps --force-reinstall fbtriton==" in line.repair


def test_gutted_fbtriton_is_broken(installation):
    gut(installation)
    line = installation.flavour()
    assert line.status == "broken"
    assert "does not import" in line.text and "is missing" in line.text
    assert "--force-reinstall fbtriton==" in line.repair


def test_one_missing_file_is_broken(installation):
    installation.own("triton")
    installation.remove("triton/testing.py")
    line = installation.flavour()
    assert line.status == "broken" and "testing.py is missing" in line.text


def test_one_foreign_file_is_broken(installation):
    installation.own("triton")
    installation.replace("triton/runtime/build.py", "# another version's\n")
    line = installation.flavour()
    assert line.status == "broken" and "build.py is another package's" in line.text


def test_a_module_left_by_another_package_is_broken_and_the_repair_removes_it(installation):
    """fbtriton put back over upstream: all its files fit, and upstream's folder _ops hides fbtriton's module _ops.py."""
    package = installation.own("triton")
    (package / "runtime" / "build").mkdir()
    (package / "runtime" / "build" / "__init__.py").write_text("")
    line = installation.flavour()
    assert line.status == "broken" and "build/__init__.py is another package's" in line.text
    assert line.repair.startswith(f"rm -rf {package} && ")


def test_an_upstream_triton_that_comes_first_is_broken_and_the_path_is_named(installation, tmp_path):
    other = Installation(tmp_path / "other")
    overwrite_with_upstream(other)
    other.remove("fbtriton-*")
    line = installation.flavour(first=other.folder)
    assert line.status == "broken"
    assert "comes first on sys.path" in line.text and "PYTHONPATH" in line.repair


def test_upstream_triton_alone_is_a_warning(installation):
    overwrite_with_upstream(installation)
    installation.remove("fbtriton-*")
    line = installation.flavour()
    assert line.status == "warning" and "no TLX" in line.text


def test_no_triton_is_a_warning_and_the_other_checks_go_on(installation):
    installation.remove("triton")
    installation.remove("fbtriton-*")
    result = installation.run("-m", "jfa", "doctor", "--json")
    lines = {line["name"]: line for line in json.loads(result.stdout)}
    assert lines["triton"]["status"] == "warning" and "chapters 00-02 run" in lines["triton"]["text"]
    assert lines["torch"]["status"] == "ok"
    assert result.returncode == 0, result.stdout


def test_doctor_exits_1_on_a_gutted_triton_and_prints_the_repair(installation):
    gut(installation)
    result = installation.run("-m", "jfa", "doctor")
    assert result.returncode == 1
    assert "repair: " in result.stdout and "Run the repair of the first broken line" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


LATE = "import os, triton; os.environ['TRITON_INTERPRET'] = '{}'; from jfa.doctor import doctor; print(doctor())"


def test_interpret_set_after_the_import_is_broken(installation):
    result = installation.run("-c", LATE.format(1))
    assert "broken   interpret   TRITON_INTERPRET was set after Triton was imported" in result.stdout
    assert result.stdout.rstrip().endswith("False")


def test_interpret_unset_after_the_import_is_broken(installation):
    result = installation.run("-c", LATE.format(0), TRITON_INTERPRET="1")
    assert "broken   interpret   TRITON_INTERPRET was unset after Triton was imported" in result.stdout


def test_a_numpy_that_breaks_the_interpreter_is_broken(installation):
    # A release that dropped a function the interpreter calls, as numpy's major releases do.
    installation.own("numpy")
    text = (SITE / "numpy" / "__init__.py").read_text()
    installation.replace("numpy/__init__.py", text + "\ndel full\n")
    result = installation.run("-m", "jfa", "doctor")
    assert result.returncode == 1
    broken = [line for line in result.stdout.splitlines() if line.startswith("broken")]
    assert any("kernel" in line and "full" in line for line in broken), result.stdout
    assert "--force-reinstall numpy" in result.stdout


def test_an_old_numpy_is_broken(installation):
    installation.own("numpy")
    text = (SITE / "numpy" / "__init__.py").read_text()
    installation.replace("numpy/__init__.py", text + "\n__version__ = '1.21.0'\n")
    result = installation.run("-c", "from jfa.doctor import check_numpy; print(*check_numpy())")
    assert result.stdout.startswith("broken   numpy       1.21.0; 1.26 or newer is needed")


def test_a_package_that_does_not_import_is_a_line_not_a_traceback(installation):
    installation.remove("torch")
    result = installation.run("-m", "jfa", "doctor")
    assert result.returncode == 1
    assert "broken   torch       ModuleNotFoundError: No module named 'torch'" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_missing_course_packages_are_named_with_their_locked_versions(installation):
    installation.remove("greenlet*")
    result = installation.run("-c", "from jfa.doctor import check_course; print(*check_course())")
    assert result.stdout.startswith("warning  course      not installed: greenlet")
    assert "pip install greenlet==" in result.stdout


BROKEN_NUMPYS = {
    "raises": "raise ImportError('an own sentence')",
    "ends Python": "raise SystemExit(7)",
    "kills Python": "import os; os.kill(os.getpid(), 11)",
    "is empty": "",
    "has another version scheme": "__version__ = None",
}


@pytest.mark.parametrize("text", BROKEN_NUMPYS.values(), ids=BROKEN_NUMPYS.keys())
def test_a_broken_numpy_is_a_line_and_the_doctor_goes_on(installation, text):
    installation.own("numpy")
    installation.replace("numpy/__init__.py", text + "\n")
    result = installation.run("-m", "jfa", "doctor", "--json")
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    lines = json.loads(result.stdout)
    numpy = next(line for line in lines if line["name"] == "numpy")
    assert numpy["status"] == "broken" and "--force-reinstall numpy==" in numpy["repair"]
    assert lines[-1]["name"] == "package" and "numpy/__init__.py" in lines[-1]["text"]
    assert not any("torch" in (line["repair"] or "") for line in lines)


def test_a_torch_that_kills_python_is_a_line(installation):
    installation.own("torch")
    installation.replace("torch/__init__.py", "import os; os.abort()\n")
    result = installation.run("-m", "jfa", "doctor", "--json")
    lines = {line["name"]: line for line in json.loads(result.stdout)}
    assert lines["torch"]["status"] == "broken" and "SIGABRT" in lines["torch"]["text"]
    assert lines["numpy"]["status"] == "ok" and "torch does not work" in lines["triton"]["text"]


@pytest.mark.parametrize(
    "pattern, package",
    [("tornado", "tornado"), ("jedi/inference", "jedi"), ("nbformat/v4", "nbformat"), ("six.py", "six")],
)
def test_files_that_a_package_lost_are_named_with_what_brings_them_back(installation, pattern, package):
    if "/" in pattern:
        installation.own(package)
    installation.remove(pattern)
    lines = installation.packages()
    assert [line.status for line in lines] == ["broken"]
    assert f"{package} " in lines[0].text and "missing" in lines[0].text
    assert f"--no-deps --force-reinstall {package}==" in lines[0].repair


def test_a_file_cut_short_is_named(installation):
    installation.own("jinja2")
    installation.replace("jinja2/lexer.py", "# the disk was full\n")
    (line,) = installation.packages()
    assert (
        "jinja2/lexer.py is not the file that was installed" in line.text and "force-reinstall jinja2==" in line.repair
    )


def test_a_package_that_another_needs_is_missed(installation):
    installation.remove("traitlets*")
    lines = installation.packages()
    assert lines and all("needs traitlets" in line.text and "pip install traitlets==" in line.repair for line in lines)


def test_files_beside_the_packages_count_in_a_whole_environment(monkeypatch, tmp_path):
    """JupyterLab's pages lie in share/, beside lib/."""
    site = tmp_path / "lib" / "site-packages"
    info = site / "lab-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "../../share/static/main.js,sha256=x,4\n../../bin/lab,sha256=x,99\nlab.py,sha256=x,0\n"
    )
    (site / "lab.py").write_text("")
    for path in ("share/static/main.js", "bin/lab"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("1234")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda key: str(site))
    assert doctor._lost_files("lab") is None  # a script's size is this machine's
    (tmp_path / "share/static/main.js").unlink()
    assert doctor._lost_files("lab") == "../../share/static/main.js is missing"


def test_a_module_hidden_by_pythonpath_is_said_to_be(installation, tmp_path):
    other = tmp_path / "my $(work) files"
    (other / "numpy").mkdir(parents=True)
    (other / "numpy" / "__init__.py").write_text("x = 1\n")
    (other / "jupyter").mkdir()  # a folder without __init__.py hides nothing
    (other / "colorsys.py").write_text("")
    result = installation.run("-m", "jfa", "doctor", "--json", first=other)
    lines = [line for line in json.loads(result.stdout) if line["name"] == "path"]
    assert {line["text"].split(" of ")[0] for line in lines} == {"the module numpy", "the module colorsys"}
    for line in lines:
        assert line["status"] == "broken" and f"PYTHONPATH leads there first: {other}" in line["text"]
        assert line["repair"].startswith("unset PYTHONPATH") and shlex.quote(str(other)) in line["repair"]
    numpy = next(line for line in json.loads(result.stdout) if line["name"] == "numpy")
    assert numpy["status"] == "broken" and numpy["repair"] == "unset PYTHONPATH"


def test_a_doctor_that_does_not_start_names_pythonpath(installation, tmp_path):
    (tmp_path / "random.py").write_text("")
    result = installation.run("-m", "jfa", "doctor", first=tmp_path)
    assert result.returncode == 1 and "repair: unset PYTHONPATH" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["a b", "it's", "$HOME", "x;y", "-rf", 'a"b', "new\nline", "ü"])
def test_every_repair_is_what_a_shell_needs(name, monkeypatch, tmp_path):
    root = Path("/nowhere") / name
    monkeypatch.setattr(doctor, "_root", lambda: root)
    monkeypatch.setattr(doctor, "_home", lambda package: root / "site-packages")
    monkeypatch.setattr(doctor.sys, "executable", str(root / "bin" / "python"))
    repairs = [doctor.reinstall_fbtriton(), doctor.pip_command("numpy"), doctor._make("setup")]
    words = [shlex.split(repair) for repair in repairs]
    python = str(root / "bin" / "python")
    assert words[0][:5] == ["rm", "-rf", str(root / "site-packages" / "triton"), "&&", python]
    assert words[1][0] == python and words[2] == ["make", "-C", str(root), "setup"]


def test_ptxas_that_does_not_start_is_broken(installation):
    installation.own("triton")
    installation.replace("triton/backends/nvidia/bin/ptxas", "no program")
    result = installation.run("-c", "from jfa.doctor import examine; print(*examine(), sep='\\n')")
    assert "broken   ptxas" in result.stdout


def test_this_installation_has_nothing_broken(capsys):
    assert doctor.main([]) == 0, capsys.readouterr().out


def test_a_plain_installation_without_greenlet_is_not_broken(monkeypatch):
    """The op on CPU tensors needs neither greenlet nor the emulator: no repair of Triton is offered for it."""
    find = doctor.PathFinder.find_spec
    monkeypatch.setattr(
        doctor.PathFinder, "find_spec", lambda name, *rest: None if name == "greenlet" else find(name, *rest)
    )
    lines = [*doctor.check_backends(), *doctor.check_known_value()]
    assert not [line for line in lines if line.status == "broken"]
    assert any("the emulator needs greenlet" in line.text for line in lines if line.text.startswith("portable"))
    assert any(line.text.startswith("reference: CPU") for line in lines)
