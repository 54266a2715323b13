"""Each way in which an installation goes wrong is produced on disk or in a process, and jfa doctor must name it.

The installations are copies of the running one made of links, so that a test can damage its own.
"""

from __future__ import annotations

import json
import os
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
            if entry.suffix != ".pth" and entry.name != "__pycache__":
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


def test_ptxas_that_does_not_start_is_broken(installation):
    installation.own("triton")
    installation.replace("triton/backends/nvidia/bin/ptxas", "no program")
    result = installation.run("-c", "from jfa.doctor import examine; print(*examine(), sep='\\n')")
    assert "broken   ptxas" in result.stdout


def test_this_installation_has_nothing_broken(capsys):
    assert doctor.main([]) == 0, capsys.readouterr().out
