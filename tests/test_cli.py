"""The command line finds its subcommands, imports only the one asked for, and tells a wrong name."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from jfa import cli


def test_usage_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in printed and command.help in printed


def test_usage_has_every_command_in_one_group():
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(cli.COMMANDS)
    lines = cli.usage().splitlines()
    for title, names in cli.GROUPS.items():
        at = lines.index(title)
        assert [line.split()[0] for line in lines[at + 1 : at + 1 + len(names)]] == list(names)


def test_a_wrong_name_exits_2_and_suggests(capsys):
    assert cli.main(["gradd", "1.1"]) == 2
    assert "did you mean 'grade'?" in capsys.readouterr().err


def test_no_command_exits_2(capsys):
    assert cli.main([]) == 2


def test_help_imports_neither_torch_nor_triton():
    program = "import sys; from jfa.cli import main; main(['--help']); print({'torch', 'triton'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("set()")


def test_a_command_gets_its_arguments_and_gives_the_exit_status(monkeypatch):
    seen = []
    monkeypatch.setattr("jfa.lab.main", lambda argv: seen.append(argv) or 7)
    assert cli.main(["lab", "--no-browser"]) == 7
    assert seen == [["--no-browser"]]


def test_a_reader_that_stops_reading_is_no_error():
    program = "import sys; from jfa import cli, lab; lab.main = lambda argv: print('x' * 1000000); sys.exit(cli.main(['lab']))"
    result = subprocess.run(
        f"'{sys.executable}' -c \"{program}\" | head -c 10", shell=True, capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("x" * 10, "")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_leads_to_a_function_with_help(name, capsys):
    module, function = cli.COMMANDS[name].target.split(":")
    assert callable(getattr(import_module(module), function))
    try:
        status = cli.main([name, "--help"])
    except SystemExit as ended:  # argparse's way
        status = ended.code
    printed = capsys.readouterr()
    assert status == 0 and "usage:" in printed.out + printed.err


@pytest.mark.parametrize(
    "module, words",
    [
        ("triton.language.extra.tlx", "pip install 'jfa[tlx]' (jfa doctor"),
        ("triton", "pip install 'jfa[tlx]'"),
        ("greenlet", "pip install 'jfa[emulator]'"),
        ("matplotlib.pyplot", "pip install 'jfa[course]'"),
    ],
)
def test_what_a_plain_installation_lacks_is_one_sentence(module, words, monkeypatch, capsys):
    def lacks(argv):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("jfa.lab.main", lacks)
    assert cli.main(["lab"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("jfa lab: this needs") and words in printed and printed.count("\n") == 1


def test_another_missing_module_is_a_fault_and_stays_one(monkeypatch):
    def lacks(argv):
        raise ModuleNotFoundError("No module named 'tritonic'", name="tritonic")

    monkeypatch.setattr("jfa.lab.main", lacks)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["lab"])
