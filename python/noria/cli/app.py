"""The tree of commands. Each command's module imports torch, and all that needs it, when it runs."""

import inspect
from collections.abc import Callable
from importlib import metadata

from cyclopts import App

from noria.cli import batch, bench, bench_cases, bench_peers, chat, demo, env, generate, models
from noria.cli.overview import START_HERE, TITLE
from noria.cli.values import check_values


def build_app() -> App:
    """The command `noria`."""
    app = App(
        name="noria",
        help=TITLE,
        help_epilogue=START_HERE,
        help_format="plaintext",
        help_flags=["--help", "-h"],
        version=version,
        config=check_values,
        suppress_keyboard_interrupt=False,  # `main` has an answer to it
    )
    _add(app, generate.generate, generate.EXAMPLES)
    _add(app, chat.chat, chat.EXAMPLES)
    _add(app, batch.batch, batch.EXAMPLES)
    _add(app, demo.demo, demo.EXAMPLES)
    _add(app, models.models, models.EXAMPLES)
    _add(app, env.env, env.EXAMPLES)
    benches = App(name="bench", help="Measure throughput and the cost of scheduling.")
    _add(benches, bench.throughput, bench.THROUGHPUT_EXAMPLES)
    _add(benches, bench.scheduler, bench.SCHEDULER_EXAMPLES)
    _add(benches, bench_cases.cases, bench_cases.EXAMPLES)
    _add(benches, bench_peers.peers, bench_peers.EXAMPLES)
    app.command(benches)
    return app


def version() -> str:
    """The installed version."""
    try:
        return metadata.version("noria")
    except metadata.PackageNotFoundError:
        return "not installed"


def _add(app: App, command: Callable[..., int | None], examples: str) -> None:
    # A docstring's lines are broken for the source; the terminal breaks a paragraph where it has to.
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(command, help=text, help_epilogue=examples)
