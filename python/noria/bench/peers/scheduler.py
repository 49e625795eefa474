"""vLLM's scheduler under the scripts of `noria bench cases`, run by its own environment's Python."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from noria.bench.peers.case_scripts import SCRIPTS, Figures
from noria.errors import NoriaError

_DRIVER = Path(__file__).parent / "drive_vllm_scheduler.py"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a peer's scheduler did.

    Attributes:
        about: its name and version.
        figures: by script.
    """

    about: str
    figures: Mapping[str, Figures]


def measure_vllm(python: str, tell: Callable[[str], None] = lambda _text: None) -> Measured:
    """Runs every script on vLLM's scheduler.

    Args:
        python: the interpreter of its environment.
        tell: told what comes next.

    Raises:
        NoriaError: the driver ended before its last script; the text ends with what it said last.
    """
    tell("starting vLLM's scheduler")
    about = ""
    figures: dict[str, Figures] = {}
    # A file, not a pipe: one that says much never waits for a reader.
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen([python, str(_DRIVER)], stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                told = json.loads(line)
                if "about" in told:
                    about = told["about"]
                else:
                    figures[told["script"]] = told["figures"]
                if missing := [script for script in SCRIPTS if script not in figures]:
                    tell(f"{about}, case {missing[0]}")
        finally:
            # Where all is well it has ended by itself.
            process.terminate()
        if len(figures) < len(SCRIPTS):
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
            raise NoriaError(f"vLLM's scheduler ended: {said[-1] if said else 'it said nothing'}")
    return Measured(about, figures)
