"""The two files of a batch, in OpenAI's format: what is asked, a line each, and what came of it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from noria.errors import ConfigError

_KEYS = ("custom_id", "method", "url", "body")
URLS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class AskedLine:
    """One line of the input.

    Attributes:
        number: from 1.
        custom_id: its name; None if it has none.
        url: one of `URLS`.
        body: what is asked.
        problem: what is wrong with the line; None if nothing is.
        is_again: an earlier line has its name.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: object = None
    problem: str | None = None
    is_again: bool = False

    @property
    def name(self) -> str:
        """Of its line in the output."""
        return f"batch_req_{self.number}"


def asked_lines(path: Path) -> Iterator[AskedLine]:
    """The lines of the input that are not empty.

    Raises:
        ConfigError: it cannot be read.
    """
    first_lines: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _asked_line(number, line, first_lines)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", name="REQUESTS", value=str(path)) from error


def _asked_line(number: int, line: bytes, first_lines: dict[str, int]) -> AskedLine:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        return AskedLine(number, None, problem=f"line {number} is not valid JSON ({error})")
    if not isinstance(given, dict):
        return AskedLine(number, None, problem=f"line {number} must be an object with {', '.join(_KEYS)}")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return AskedLine(number, None, problem=f"line {number}: custom_id must be a text; got {custom_id!r}")
    first = first_lines.setdefault(custom_id, number)
    if first != number:
        again = f"line {number}: custom_id {custom_id!r} is that of line {first} too"
        return AskedLine(number, custom_id, problem=again, is_again=True)
    problem: str | None = None
    unknown = [key for key in given if key not in _KEYS]
    if unknown:
        problem = f"line {number} has the key {unknown[0]!r}; it may have {', '.join(_KEYS)}"
    elif given.get("method") != "POST":
        problem = f"line {number}: method is {given.get('method')!r}; it must be POST"
    elif given.get("url") not in URLS:
        problem = f"line {number}: url is {given.get('url')!r}; it must be {' or '.join(URLS)}"
    elif not isinstance(given.get("body"), dict):
        problem = f"line {number}: body must be an object"
    return AskedLine(number, custom_id, str(given.get("url")), given.get("body"), problem)


class ResultFile:
    """The output: one line a result, each written whole as soon as it is there.

    What an earlier run has left is kept, but for a last line that it could not write to its end.

    Args:
        path: may exist.

    Raises:
        ConfigError: it cannot be written, or is no output of a batch.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._custom_ids: set[str] = set()
        self._names: set[str] = set()
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}", name="RESULTS", value=str(path)
            ) from error
        try:
            self._file.truncate(self._read())
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> int:
        """What is done; the length of what is whole."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break  # torn: whoever wrote it was stopped in the middle
            end += len(line)
            if not line.strip():
                continue
            try:
                result = json.loads(line)
                name, custom_id = result["id"], result["custom_id"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ConfigError(
                    f"{self._path}: line {number} is no result of a batch; give another RESULTS",
                    name="RESULTS",
                    value=str(self._path),
                ) from None
            self._names.add(name)
            if custom_id is not None:
                self._custom_ids.add(custom_id)
        return end

    def has(self, asked: AskedLine) -> bool:
        """Whether a line's result is there."""
        if asked.custom_id is None or asked.is_again:
            return asked.name in self._names
        return asked.custom_id in self._custom_ids

    def write(self, result: dict[str, object]) -> None:
        """Adds a result."""
        self._file.write(json.dumps(result, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
