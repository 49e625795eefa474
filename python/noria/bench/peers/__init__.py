"""noria and its peers on the same workload, in turns.

Each engine is a process of its own that loads its model once and then runs when it is asked to, while the
others wait for their input: so a machine's drift meets all alike. A peer's environment is named by
`NORIA_PEERS`; its driver, a script of this folder, runs with that environment's Python.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from noria.bench.workload import Workload
from noria.errors import ConfigError, NoriaError

VARIABLE = "NORIA_PEERS"
"""`name=python` pairs, separated by commas: `vllm=/opt/vllm/bin/python,llama.cpp=/opt/llama/bin/python`."""

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine that there is a driver for.

    Attributes:
        driver: the script.
        options: what a run of it may choose; a number of slots beside, where `has_slots`.
        takes_gguf: its model is a GGUF file, not a folder.
        has_slots: a number is an option.
    """

    driver: str
    options: tuple[str, ...]
    takes_gguf: bool = False
    has_slots: bool = False


KINDS: Mapping[str, Kind] = {
    "noria": Kind("drive_noria.py", ("float32", "bfloat16", "int8", "torch", "cpu")),
    "vllm": Kind("drive_vllm.py", ("float32", "bfloat16", "eager")),
    "llama.cpp": Kind("drive_llama_cpp.py", (), takes_gguf=True, has_slots=True),
    "transformers": Kind("drive_transformers.py", ("float32", "bfloat16", "static")),
}


@dataclass(frozen=True, slots=True)
class Entrant:
    """One engine, run in one way.

    Attributes:
        name: as it was asked for: `vllm:float32:eager`.
        kind: whose driver it is.
        options: of this run.
        python: the interpreter of its environment.
        model: what it loads.
    """

    name: str
    kind: str
    options: tuple[str, ...]
    python: str
    model: str


@dataclass(frozen=True, slots=True)
class EntrantRuns:
    """What one entrant did.

    Attributes:
        name: as it was asked for.
        about: version, number format and the like, as its driver says.
        wall_s: of each round.
        tokens_per_s: output tokens a second, of each round.
    """

    name: str
    about: str
    wall_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]


def read_environments(text: str | None = None) -> dict[str, str]:
    """Each peer's interpreter, by `NORIA_PEERS`.

    Args:
        text: its value; None reads the environment.

    Raises:
        ConfigError: an entry is no `name=python`, names no engine, or an interpreter is not there.
    """
    value = os.environ.get(VARIABLE, "") if text is None else text
    environments = {"noria": sys.executable}
    for entry in filter(None, (part.strip() for part in value.split(","))):
        name, equals, python = entry.partition("=")
        if not equals or name not in KINDS:
            raise ConfigError(
                f"{VARIABLE} has {entry!r}; an entry is NAME=PYTHON, with a name of {', '.join(KINDS)}",
                name=VARIABLE,
                value=entry,
            )
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"{VARIABLE} has {entry!r}; {python} is no program that can be run",
                name=VARIABLE,
                value=entry,
            )
        environments[name] = python
    return environments


def parse_entrant(text: str, environments: Mapping[str, str], hf_model: str, gguf_model: str) -> Entrant:
    """An entrant from `name` or `name:option:option`.

    Args:
        text: as it was asked for.
        environments: of `read_environments`.
        hf_model: a folder, or "" where there is none.
        gguf_model: a GGUF file, or "".

    Raises:
        ConfigError: there is no such engine or option, it has no environment, or no model that it can load.
    """
    name, *options = text.split(":")
    kind = KINDS.get(name)
    if kind is None:
        raise ConfigError(
            f"entrant {text!r} names {name!r}; the engines are {', '.join(KINDS)}", name="run", value=text
        )
    for option in options:
        if option not in kind.options and not (kind.has_slots and option.isdigit() and int(option) > 0):
            known = [*kind.options, *(["a number of slots"] if kind.has_slots else [])]
            raise ConfigError(
                f"entrant {text!r} has {option!r}; options of {name} are {', '.join(known)}",
                name="run",
                value=text,
            )
    if name not in environments:
        raise ConfigError(
            f"entrant {text!r} has no environment: set {VARIABLE} to {name}=/path/to/its/python",
            name="run",
            value=text,
        )
    model = gguf_model if kind.takes_gguf or (name == "noria" and not hf_model) else hf_model
    if not model:
        flag, what = ("--gguf", "GGUF file") if kind.takes_gguf else ("--hf", "folder with config.json")
        raise ConfigError(f"entrant {text!r} loads a {what}: give it by {flag}", name=flag, value=None)
    return Entrant(text, name, tuple(options), environments[name], model)


def run_entrants(
    entrants: Sequence[Entrant],
    workload: Workload,
    *,
    num_seqs: int,
    num_threads: int,
    num_repeats: int,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> list[EntrantRuns]:
    """Starts all, then runs the workload with each in turn, `num_repeats` times.

    Raises:
        NoriaError: an engine ended, or did not make all tokens; the text ends with what it said last.
    """
    asked = int(workload.output_lengths.sum())
    running: list[_Running] = []
    try:
        for entrant in entrants:
            on_progress(f"loading {entrant.name}")
            running.append(_Running(entrant, workload, num_seqs, num_threads))
        for repeat in range(num_repeats):
            for process in running:
                on_progress(f"round {repeat + 1} of {num_repeats}: {process.name}")
                process.run(asked)
        return [process.runs() for process in running]
    finally:
        for process in running:
            process.close()


class _Running:
    """An entrant's process, its model loaded."""

    def __init__(self, entrant: Entrant, workload: Workload, num_seqs: int, num_threads: int) -> None:
        self.name = entrant.name
        self._wall_s: list[float] = []
        self._num_output_tokens = 0
        # A file, not a pipe: an engine that says much never waits for a reader.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        kind = KINDS[entrant.kind]
        self._process = subprocess.Popen(
            [entrant.python, str(_FOLDER / kind.driver)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        settings = {
            "model": entrant.model,
            "options": entrant.options,
            "num_seqs": num_seqs,
            "max_model_len": workload.longest_request,
            "num_threads": num_threads,
            "requests": [
                {"prompt_token_ids": request.prompt_token_ids.tolist(), "max_tokens": request.max_tokens}
                for request in workload.requests
            ],
        }
        try:
            self.about = str(self._ask(json.dumps(settings))["about"])
        except BaseException:
            self.close()
            raise

    def run(self, num_asked: int) -> None:
        """The workload, once."""
        result = self._ask("run")
        num_tokens = result["num_output_tokens"]
        if num_tokens != num_asked:
            raise NoriaError(f"{self.name} made {num_tokens} tokens; {num_asked} were asked for")
        self._num_output_tokens = num_asked
        self._wall_s.append(float(str(result["wall_s"])))

    def runs(self) -> EntrantRuns:
        """What it did so far."""
        rates = tuple(self._num_output_tokens / wall_s for wall_s in self._wall_s)
        return EntrantRuns(self.name, self.about, tuple(self._wall_s), rates)

    def close(self) -> None:
        """Ends the process: its input ends, and where that is not enough, it is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _ask(self, line: str) -> dict[str, object]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            raise NoriaError(f"{self.name} ended: {said[-1] if said else 'it said nothing'}")
        result: dict[str, object] = json.loads(answer)
        return result
