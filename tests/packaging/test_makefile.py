"""The Makefile says what it can do, and its first lines are what README promises."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make(*args: str) -> str:
    # A make that runs these tests hands its own flags down.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *args]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_make_alone_lists_every_target_with_a_line_about_it() -> None:
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {name for line in phony for name in line.split()} - {"FORCE"}
    assert {"install", "demo", "test", "bench", "wheel"} <= targets
    listed = dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", make(), re.MULTILINE))
    assert set(listed) == targets


def test_ci_runs_what_make_test_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^make test\b", script, re.MULTILINE)
