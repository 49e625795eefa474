"""`noria batch`: a file of requests in, a file of answers out."""

import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from noria.cli.batch_files import AskedLine, ResultFile, asked_lines
from noria.cli.options import MODEL_HELP, EngineFlags, ModelFlags, resolve_model
from noria.errors import ConfigError, NoriaError

if TYPE_CHECKING:
    from noria.async_engine import AsyncEngine, OutputStream
    from noria.outputs import RequestOutput
    from noria.progress import ProgressBar

EXAMPLES = """Examples:

  noria batch smollm2 requests.jsonl answers.jsonl
  noria batch ./model requests.jsonl answers.jsonl --max-num-seqs 64

A line of the input (one line; broken here to be read):

  {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body":
   {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}}
"""

_NO_MODEL_FLAGS = ModelFlags()
_NO_ENGINE_FLAGS = EngineFlags()
_REQUESTS_A_SEAT = 4
"""So many are handed to the engine at once: no seat waits for the next, and a long file is not held whole."""


def batch(
    model: Annotated[str, Parameter(help=MODEL_HELP)],
    requests: Annotated[
        Path,
        Parameter(
            help="A file of requests in OpenAI's batch format: a JSON object a line, with custom_id, method, "
            "url (/v1/chat/completions or /v1/completions) and body."
        ),
    ],
    results: Annotated[
        Path,
        Parameter(help="Where the answers go, a line each, as they are done. What is there already is kept."),
    ],
    /,
    *,
    model_flags: ModelFlags = _NO_MODEL_FLAGS,
    engine_flags: EngineFlags = _NO_ENGINE_FLAGS,
) -> None:
    """Answer a file of requests.

    Requests share the model under continuous batching, and each answer is written when it is done, so that
    their order is not that of the requests: custom_id says which is which. A bad line gets a line with its
    error, and stops no other. A run that was stopped goes on when the same command is given again.
    """
    if requests.exists() and results.exists() and requests.samefile(results):
        raise ConfigError(
            f"REQUESTS and RESULTS are the same file, {requests}", name="RESULTS", value=str(results)
        )
    next(asked_lines(requests), None)  # one that is not there is said before RESULTS is made
    path = resolve_model(model)
    with ResultFile(results) as file:
        counts = _Counts()
        for line in asked_lines(requests):
            counts.num_lines += 1
            counts.num_before += file.has(line)
        if counts.num_before < counts.num_lines:
            from noria.progress import ProgressBar

            engine = _engine(path, model_flags, engine_flags)
            bar = ProgressBar(counts.num_lines, is_shown=True)
            # It is read a second time, as it is answered: a long one is never held whole.
            left = (line for line in asked_lines(requests) if not file.has(line))
            answerer = _Answerer(engine, file, path.stem, counts, bar)
            try:
                with bar:
                    asyncio.run(answerer.answer_all(left, _REQUESTS_A_SEAT * engine_flags.max_num_seqs))
            except KeyboardInterrupt:
                print(f"\n{counts}; the same command goes on from there", end="", file=sys.stderr)
                raise
    print(f"{counts}: {results}", file=sys.stderr)


@dataclass(slots=True)
class _Counts:
    """How far a batch has come.

    Attributes:
        num_lines: of the input.
        num_before: done by earlier runs.
        num_done: done by this one, errors included.
        num_errors: of these.
        num_tokens: of answers.
    """

    num_lines: int = 0
    num_before: int = 0
    num_done: int = 0
    num_errors: int = 0
    num_tokens: int = 0

    def __str__(self) -> str:
        text = f"{self.num_before + self.num_done} of {self.num_lines} requests are done"
        if self.num_before:
            text += f", {self.num_before} of them before"
        if self.num_errors:
            text += f", {self.num_errors} with an error"
        return text


def _engine(path: Path, model_flags: ModelFlags, engine_flags: EngineFlags) -> "AsyncEngine":
    from noria.async_engine import AsyncEngine
    from noria.config import EngineConfig

    return AsyncEngine(
        EngineConfig(
            model=str(path),
            dtype=model_flags.dtype,
            kv_cache_dtype=model_flags.kv_cache_dtype,
            device=model_flags.device,
            backend=model_flags.backend,
            quantization=model_flags.quantization,
            max_model_len=model_flags.max_model_len,
            max_num_seqs=engine_flags.max_num_seqs,
            max_num_batched_tokens=engine_flags.max_num_batched_tokens,
            block_size=engine_flags.block_size,
            num_kv_blocks=engine_flags.num_kv_blocks,
            enable_prefix_caching=engine_flags.enable_prefix_caching,
            depth=engine_flags.depth,
        )
    )


class _Answerer:
    """Answers lines on an engine; closes it."""

    def __init__(
        self, engine: "AsyncEngine", file: ResultFile, model_name: str, counts: _Counts, bar: "ProgressBar"
    ) -> None:
        self._engine = engine
        self._file = file
        self._model_name = model_name
        self._counts = counts
        self._bar = bar

    async def answer_all(self, lines: Iterable[AskedLine], max_open: int) -> None:
        """Answers lines, at most so many at once, and writes each when it is done."""
        free = asyncio.Semaphore(max_open)

        async def answer(line: AskedLine) -> None:
            try:
                result = await self._result(line)
            finally:
                free.release()
            self._file.write(result)
            self._counts.num_done += 1
            self._bar.update(self._counts.num_before + self._counts.num_done, self._counts.num_tokens)

        async with self._engine:
            try:
                async with asyncio.TaskGroup() as group:
                    for line in lines:
                        await free.acquire()
                        group.create_task(answer(line))
            except BaseExceptionGroup as errors:
                # One is as good as all: the engine is dead, or the file cannot be written.
                raise errors.exceptions[0] from None

    async def _result(self, line: AskedLine) -> dict[str, object]:
        """The line of the output."""
        from noria.engine import EngineDeadError
        from noria.openai_api import error_body

        result: dict[str, object] = {"id": line.name, "custom_id": line.custom_id, "response": None}
        if line.problem is not None:
            self._counts.num_errors += 1
            return result | {"error": {"code": "invalid_line", "message": line.problem}}
        try:
            status, body = 200, await self._body(line)
        except EngineDeadError:
            raise
        except NoriaError as error:
            status, body = 400, error_body(error)
        except _FailedError as error:
            status, body = 500, error_body(error)
        self._counts.num_errors += status != 200
        response = {"status_code": status, "request_id": f"req_{line.number}", "body": body}
        return result | {"response": response, "error": None}

    async def _body(self, line: AskedLine) -> dict[str, object]:
        if line.url == "/v1/chat/completions":
            return await self._chat_body(line)
        return await self._completion_body(line)

    async def _chat_body(self, line: AskedLine) -> dict[str, object]:
        from noria.openai_api import chat_body, read_chat

        asked = read_chat(line.body, self._engine.default_sampling_params)
        stream = self._engine.chat(
            asked.messages,
            asked.params,
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt,
            chat_template_kwargs=asked.template_kwargs,
            output_kind="final",
        )
        (output,) = await self._answers([stream])
        return chat_body(
            output,
            name=str(line.number),
            created=int(time.time()),
            model=asked.model or self._model_name,
            num_top_logprobs=asked.params.logprobs,
        )

    async def _completion_body(self, line: AskedLine) -> dict[str, object]:
        from noria.openai_api import completion_body, read_completion

        asked = read_completion(line.body, self._engine.default_sampling_params)
        streams = [
            self._engine.generate(prompt, asked.params, output_kind="final") for prompt in asked.prompts
        ]
        return completion_body(
            await self._answers(streams),
            name=str(line.number),
            created=int(time.time()),
            model=asked.model or self._model_name,
        )

    async def _answers(self, streams: "Sequence[OutputStream]") -> "list[RequestOutput]":
        try:
            outputs = [await stream.last() for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        for output in outputs:
            if output.error is not None:
                raise _FailedError(output.error)
            self._counts.num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        return outputs


class _FailedError(Exception):
    """A request was good, and could not be computed."""
