"""Help teaches, and costs nothing heavy."""

import subprocess
import sys

import pytest

from noria.cli.app import build_app
from noria.cli.overview import SUMMARIES

COMMANDS = [
    ("chat",),
    ("generate",),
    ("batch",),
    ("demo",),
    ("models",),
    ("env",),
    ("bench", "throughput"),
    ("bench", "scheduler"),
    ("bench", "cases"),
    ("bench", "peers"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_of_each_command_has_an_example_that_calls_it(noria, command):
    finished = noria(*command, "--help")
    assert finished.code == 0
    assert f"  noria {' '.join(command)}" in finished.out


@pytest.mark.parametrize("argv", [(), ("-h",), ("--help",)], ids=str)
def test_the_first_help_names_every_command(noria, argv):
    finished = noria(*argv)
    assert finished.code == 0
    for command in COMMANDS:
        assert f"  {' '.join(command)} " in finished.out


def test_the_first_help_says_of_each_command_what_its_own_help_says_first(noria):
    assert set(SUMMARIES) == {" ".join(command) for command in COMMANDS}
    for name, summary in SUMMARIES.items():
        assert summary in " ".join(noria(*name.split(), "--help").out.split())


def test_every_registered_command_is_in_the_first_help():
    app = build_app()
    found = set()
    for name in app:
        below = [f"{name} {inner}" for inner in app[name] if not inner.startswith("-")]
        found |= set(below or [name])
    assert {name for name in found if not name.startswith("-")} == set(SUMMARIES)


def test_the_first_help_imports_nothing_heavy():
    code = (
        "import sys; from noria.cli import main; code = main(['--help']); "
        "names = ('torch', 'numpy', 'transformers', 'cyclopts', 'rich'); "
        "heavy = [name for name in names if name in sys.modules]; "
        "print(code, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "0 []"


def test_the_version_is_one_line(noria):
    finished = noria("--version")
    assert finished.code == 0
    assert len(finished.out.splitlines()) == 1
