"""How a driver talks to `noria bench peers`: settings come in, results go out, a JSON object a line.

A driver is a script that runs in its engine's own environment, so this file imports the standard library
alone.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids in, a fixed number of tokens out."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What to load and run.

    Attributes:
        model: a folder or file.
        options: of this run of the engine: a number format, `eager`, a number of slots.
        num_seqs: sequences that run at once.
        max_model_len: tokens of the longest request.
        num_threads: that compute.
        requests: the workload.
    """

    model: str
    options: tuple[str, ...]
    num_seqs: int
    max_model_len: int
    num_threads: int
    requests: tuple[Request, ...]

    def chosen(self, names: dict[str, str], default: str) -> str:
        """What `names` gives for the one of the options that it has."""
        return next((names[option] for option in self.options if option in names), default)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready.

    Attributes:
        about: its version and how it runs, in words.
        run: answers the requests; how many tokens came.
    """

    about: str
    run: Callable[[tuple[Request, ...]], int]


def drive(load: Callable[[Settings], Loaded]) -> None:
    """Loads, warms up, and runs the workload each time that it is asked to, until its input ends."""
    # What the engine prints goes to the errors, so that the results stand alone.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    given = json.loads(sys.stdin.readline())
    requests = tuple(Request(**request) for request in given.pop("requests"))
    settings = Settings(requests=requests, **{**given, "options": tuple(given["options"])})
    loaded = load(settings)
    warm = tuple(Request(request.prompt_token_ids[::-1], 4) for request in requests[:2])
    loaded.run(warm)
    print(json.dumps({"about": loaded.about}), file=results, flush=True)
    for _line in sys.stdin:
        started = perf_counter()
        num_tokens = loaded.run(requests)
        result = {"wall_s": perf_counter() - started, "num_output_tokens": num_tokens}
        print(json.dumps(result), file=results, flush=True)
