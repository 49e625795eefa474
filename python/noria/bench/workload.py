"""What a benchmark asks for: token ids in, a fixed number of tokens out.

A workload file is a JSON list of `{"prompt_token_ids": [id, ...], "max_tokens": n}`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from noria.bench.lengths import LogNormalLengths
from noria.errors import ConfigError

DEFAULT_OUTPUT_LENGTHS = LogNormalLengths(median=64, sigma=0.8, low=8, high=256)
DEFAULT_PROMPT_LENGTHS = LogNormalLengths(median=64, sigma=0.6, low=16, high=256)

_FIELDS = ("prompt_token_ids", "max_tokens")
_MAX_ID = 2**31 - 1
_MAX_REQUESTS = 1_000_000
"""Their ids are all in memory: a million of the usual length are 300 MB."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    Attributes:
        prompt_token_ids: `[num_prompt_tokens]` int32.
        max_tokens: output tokens; all of them are made, as the end-of-sequence token is ignored.
    """

    prompt_token_ids: npt.NDArray[np.int32]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival; all arrive at once.

    Attributes:
        source: where they come from, in words.
        requests: at least one.
    """

    source: str
    requests: tuple[WorkloadRequest, ...]

    @property
    def prompt_lengths(self) -> npt.NDArray[np.int64]:
        """`[num_requests]` tokens."""
        return np.array([len(request.prompt_token_ids) for request in self.requests], dtype=np.int64)

    @property
    def output_lengths(self) -> npt.NDArray[np.int64]:
        """`[num_requests]` tokens."""
        return np.array([request.max_tokens for request in self.requests], dtype=np.int64)

    @property
    def longest_request(self) -> int:
        """Tokens, prompt and output, of the request that needs most."""
        return int((self.prompt_lengths + self.output_lengths).max())

    @property
    def static_reservation(self) -> int:
        """Tokens a static batch of any of these may reserve for a row: longest prompt + longest output."""
        return int(self.prompt_lengths.max() + self.output_lengths.max())

    def check_fits(self, *, max_model_len: int, vocab_size: int) -> None:
        """Refuses a request that a model cannot answer in full, before anything runs.

        Raises:
            ConfigError: prompt and output exceed `max_model_len`, or a token id is not in the
                vocabulary; the text names the entry (from 0).
        """
        lengths = self.prompt_lengths + self.output_lengths
        if int(lengths.max()) > max_model_len:
            number = int(np.argmax(lengths > max_model_len))
            request = self.requests[number]
            raise ConfigError(
                f"workload entry {number} needs {lengths[number]} tokens ({len(request.prompt_token_ids)} of "
                f"prompt, {request.max_tokens} of output); the context is {max_model_len}",
                name="workload",
                value=number,
            )
        for number, request in enumerate(self.requests):
            largest = int(request.prompt_token_ids.max())
            if largest >= vocab_size:
                raise ConfigError(
                    f"workload entry {number}: prompt_token_ids has {largest}; ids end at {vocab_size - 1}",
                    name="workload",
                    value=number,
                )


def synthetic_workload(
    num_requests: int,
    *,
    vocab_size: int,
    seed: int = 0,
    prompt_lengths: LogNormalLengths = DEFAULT_PROMPT_LENGTHS,
    output_lengths: LogNormalLengths = DEFAULT_OUTPUT_LENGTHS,
) -> Workload:
    """Random token ids with lognormal lengths.

    Prompt lengths, output lengths and ids have a stream of random numbers each, so that a change of
    one distribution leaves the others as they were.

    Raises:
        ConfigError: `num_requests` is not 1 to 1,000,000, `seed` is below 0, or `vocab_size` is not 2 to
            2**31 - 1.
    """
    if not 1 <= num_requests <= _MAX_REQUESTS:
        raise ConfigError(
            f"num_requests is {num_requests}; it must be 1 to {_MAX_REQUESTS}",
            name="num_requests",
            value=num_requests,
        )
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or more", name="seed", value=seed)
    if not 2 <= vocab_size <= _MAX_ID:
        raise ConfigError(
            f"vocab_size is {vocab_size}; it must be 2 to {_MAX_ID}", name="vocab_size", value=vocab_size
        )
    outputs = output_lengths.sample(np.random.default_rng(seed), num_requests)
    prompts = prompt_lengths.sample(np.random.default_rng([seed, 1]), num_requests)
    id_stream = np.random.default_rng([seed, 2])
    ids = id_stream.integers(0, vocab_size, size=int(prompts.sum()), dtype=np.int32)
    pieces = np.split(ids, np.cumsum(prompts)[:-1])
    requests = tuple(
        WorkloadRequest(piece, int(num_outputs)) for piece, num_outputs in zip(pieces, outputs, strict=True)
    )
    source = (
        f"seed {seed}: prompts lognormal (median {prompt_lengths.median:g}, sigma {prompt_lengths.sigma:g}, "
        f"{prompt_lengths.low}-{prompt_lengths.high}), outputs lognormal (median {output_lengths.median:g}, "
        f"sigma {output_lengths.sigma:g}, {output_lengths.low}-{output_lengths.high})"
    )
    return Workload(source, requests)


def read_workload(path: Path) -> Workload:
    """Reads and checks a workload file.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or an entry is wrong; the text names the
            entry (from 0) and its field.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}") from None
    try:
        entries: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise _error(path, f"line {error.lineno}, column {error.colno} is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise _error(path, f"is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise _error(path, f"holds {_kind(entries)}; it must hold a list of requests")
    if not entries:
        raise _error(path, "holds an empty list; it must hold at least one request")
    requests = tuple(_request(path, number, entry) for number, entry in enumerate(entries))
    return Workload(f"file {path.name}", requests)


def _request(path: Path, number: int, entry: object) -> WorkloadRequest:
    if not isinstance(entry, dict):
        raise _error(
            path, f"entry {number} is {_kind(entry)}; it must be an object with {' and '.join(_FIELDS)}"
        )
    for field in _FIELDS:
        if field not in entry:
            raise _error(path, f"entry {number} has no field {field}")
    for field in entry:
        if field not in _FIELDS:
            raise _error(
                path, f"entry {number} has a field {field!r}; only {' and '.join(_FIELDS)} are known"
            )
    max_tokens = entry["max_tokens"]
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
        raise _error(path, f"entry {number}: max_tokens is {_kind(max_tokens)}; it must be an integer")
    if not 1 <= max_tokens <= _MAX_ID:
        raise _error(path, f"entry {number}: max_tokens is {max_tokens}; it must be 1 to {_MAX_ID}")
    ids = entry["prompt_token_ids"]
    if not isinstance(ids, list):
        raise _error(path, f"entry {number}: prompt_token_ids is {_kind(ids)}; it must be a list of integers")
    if not ids:
        raise _error(path, f"entry {number}: prompt_token_ids is empty; a prompt has at least one token")
    for place, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise _error(
                path, f"entry {number}: prompt_token_ids[{place}] is {_kind(token_id)}; it must be an integer"
            )
        if not 0 <= token_id <= _MAX_ID:
            raise _error(
                path, f"entry {number}: prompt_token_ids[{place}] is {token_id}; it must be 0 to {_MAX_ID}"
            )
    return WorkloadRequest(np.array(ids, dtype=np.int32), max_tokens)


def _error(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"workload {path}: {problem}", name="workload", value=str(path))


def _kind(value: object) -> str:
    """The JSON kind of a value, with the value where it is short."""
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the string {json.dumps(value[:40])}"
        case list():
            return "a list"
        case _:
            return "an object"
