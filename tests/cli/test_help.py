"""Help teaches, and costs nothing heavy."""

import subprocess
import sys

import pytest

COMMANDS = [
    ("generate",),
    ("demo",),
    ("env",),
    ("bench", "throughput"),
    ("bench", "scheduler"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_of_each_command_has_an_example_that_calls_it(noria, command):
    finished = noria(*command, "--help")
    assert finished.code == 0
    assert f"  noria {' '.join(command)}" in finished.out


def test_the_first_help_names_every_command(noria):
    out = noria("--help").out
    for name in ("generate", "demo", "bench", "env"):
        assert name in out


def test_help_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from noria.cli import main; code = main(['--help']); "
        "heavy = [name for name in ('torch', 'numpy', 'transformers', 'tokenizers') if name in sys.modules]; "
        "print(code, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "0 []"


def test_the_version_is_one_line(noria):
    finished = noria("--version")
    assert finished.code == 0
    assert len(finished.out.splitlines()) == 1
