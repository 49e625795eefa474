"""The command `noria`. `main` is its entry point; nothing heavy is imported before a command needs it."""

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from noria.errors import NoriaError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_OUTPUT_LOST = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit code: 0; 1 if an answer failed, or what was to be written could not be; 2 for a bad flag,
        file or model (one line on stderr); 130 after Ctrl-C.
    """
    # Closed by `>&-` or `2>&-`: what is written there goes nowhere.
    if sys.stdout is None:
        sys.stdout = _sink()
    if sys.stderr is None:
        sys.stderr = _sink()
    for stream in (sys.stdout, sys.stderr):
        # A model may say what the terminal's encoding cannot: a question mark there, not a traceback.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        # The reader has left (`noria ... | head`), or the disk is full. Python flushes stdout once more at
        # exit: give it a sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
        return EXIT_OUTPUT_LOST


def _run(words: list[str]) -> int:
    if words in ([], ["--help"], ["-h"]):
        from noria.cli.overview import overview

        print(overview(), end="", flush=True)
        return 0
    from cyclopts import CycloptsError

    from noria.cli.app import build_app

    try:
        code = build_app()(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        return _complain(f"{error} Try --help.")
    except NoriaError as error:
        return _complain(str(error))
    return code if isinstance(code, int) else 0


def _sink() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _complain(message: str) -> int:
    one_line = " ".join(message.split())
    print(f"noria: {one_line}", file=sys.stderr)
    return EXIT_BAD_INPUT
