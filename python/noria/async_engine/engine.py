"""`AsyncEngine`: prompts in, streams out."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Never, Self, get_args

from noria.assembly import Assembly
from noria.async_engine.desk import Desk, Outbox, Refused
from noria.async_engine.growing import GrowingOutput, OutputKind
from noria.async_engine.stream import OutputStream
from noria.async_engine.thread import CLOSED, Abort, Commands, EngineThread, Stop, Submit, Tell, Wake
from noria.config import EngineConfig, model_text
from noria.errors import ConfigError, NoriaError, RejectedError
from noria.hints import NO_HINTS, SchedulingHints
from noria.prompts import Prompt, PromptInput, chat_prompt, tokenize_prompts
from noria.sampling.params import SamplingParams
from noria.stats import EngineStats

if TYPE_CHECKING:
    from noria.text.chat_template import Message

_QUICK_CHARS = 4096
"""A prompt of so many characters is read in a millisecond, on the loop; a longer one would hold it up."""

_Read = Callable[[], tuple[Prompt, list[int]]]


class AsyncEngine:
    """A model that answers prompts as streams, all of them at once.

        async with AsyncEngine("path/to/model") as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    The engine turns on a thread of its own. A stream costs no thread. Leaving the `async for`, or cancelling
    its task, aborts the request. An engine belongs to the event loop that uses it first.

    Args:
        config: a model, or a model and how it is run.
        options: none; those that `LLM` takes are fields of `EngineConfig`.

    Raises:
        ConfigError: a value does not fit the model.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig | str | Path, **options: Never) -> None:
        for name in options:
            raise ConfigError(
                f"AsyncEngine takes no {name}; give it EngineConfig(model=..., {name}=...)",
                name="config",
                value=config,
            )
        self.config = config if isinstance(config, EngineConfig) else EngineConfig(model=model_text(config))
        commands = Commands()
        self._commands = commands
        self._assembly = Assembly(self.config, wakes_engine=lambda: commands.put(Wake()))
        self.tokenizer = self._assembly.tokenizer
        self.resolved_config = self._assembly.resolved_config
        self._desk = Desk(self._assembly.writer)
        self._outbox = Outbox(self._desk.deliver)
        self._texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noria-text")
        self._num_requests = 0
        # Nothing that the thread runs refers to this object, so that one that is dropped is finalized.
        runs = EngineThread(self._assembly, commands, self._outbox, self._texts)
        self._thread = threading.Thread(target=runs.run, name="noria-engine", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, commands, self._thread)

    # ---- what a caller asks

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What a request is sampled with that brings no parameters: what the model's authors recommend."""
        return self._assembly.default_sampling_params

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        hints: SchedulingHints = NO_HINTS,
        output_kind: OutputKind = "cumulative",
    ) -> OutputStream:
        """Begins to answer a prompt, whether the stream is read or not.

        Args:
            prompt: a text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: None: `default_sampling_params`.
            request_id: a name that no open request has; None: a number.
            priority: lower runs first, but under `fcfs`.
            hints: whose it is, how long its answers may get, when they are due.
            output_kind: what each output holds. `cumulative`: all so far; `delta`: what is new; `final`:
                all, given out once, at the end.

        Returns:
            Its outputs. What is wrong with the prompt is raised by the stream.

        Raises:
            RejectedError: the name is taken, or `output_kind` is none.
            EngineDeadError: the engine was closed, or has died.
            NoriaError: no event loop runs here, or not the engine's.
        """
        tokenizer = self.tokenizer

        def read() -> tuple[Prompt, list[int]]:
            ((given, token_ids),) = tokenize_prompts([prompt], tokenizer)
            if isinstance(token_ids, RejectedError):
                raise token_ids
            return given, token_ids

        return self._begin(
            read,
            _num_chars(prompt) <= _QUICK_CHARS,
            sampling_params,
            request_id,
            priority,
            hints,
            output_kind,
        )

    def chat(
        self,
        messages: "Sequence[Message]",
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        hints: SchedulingHints = NO_HINTS,
        output_kind: OutputKind = "cumulative",
    ) -> OutputStream:
        """Begins to answer a conversation, put through the model's chat template.

        Args:
            messages: the turns so far, oldest first, each with `role` and `content`.
            sampling_params: as for `generate`.
            tools: JSON schemas of tools, if the template knows tools. Outputs' `content` and `tool_calls` are
                then read out of their text: a call is given out when it is whole.
            add_generation_prompt: ends the prompt with what opens the assistant's turn.
            chat_template_kwargs: what else the template reads, by name.
            request_id: as for `generate`.
            priority: as for `generate`.
            hints: as for `generate`.
            output_kind: as for `generate`.

        Raises:
            RejectedError: as for `generate`, as all others.
        """
        tokenizer = self.tokenizer

        def read() -> tuple[Prompt, list[int]]:
            return chat_prompt(
                tokenizer,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                variables=chat_template_kwargs,
            )

        return self._begin(read, False, sampling_params, request_id, priority, hints, output_kind)

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream ends with what it has, and `finish_reason` `abort`.

        Returns:
            False if there is no such request.
        """
        self._bind()
        output = self._desk.outputs.get(request_id)
        if output is None:
            return False
        output.is_aborted = True
        self._commands.put(Abort(output))
        return True

    async def stats(self) -> EngineStats:
        """Sums since the engine started.

        Raises:
            EngineDeadError: the engine was closed, or has died.
        """
        loop = self._bind()
        self._desk.require_open()
        asked: asyncio.Future[EngineStats] = loop.create_future()
        self._desk.asked.add(asked)
        self._commands.put(Tell(asked))
        return await asked

    async def aclose(self, *, drain: bool = False) -> None:
        """Stops the engine, which takes no more work from now on. Idempotent.

        Args:
            drain: waits until all requests have finished; else they are aborted, and their streams end
                with what they have.
        """
        self._bind()
        if self._desk.cause is None:
            self._desk.cause = CLOSED
        if not self._desk.ended.is_set():
            self._commands.put(Stop(drain))
            await self._desk.ended.wait()
        self._finalizer.detach()
        self._thread.join()  # it has nothing left to do

    async def __aenter__(self) -> Self:
        self._bind()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # ---- in

    def _bind(self) -> asyncio.AbstractEventLoop:
        """The event loop that runs here, which must be the engine's own."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise NoriaError("AsyncEngine is used inside a running event loop; elsewhere use LLM") from None
        if self._outbox.loop is None:
            self._outbox.loop = loop
        elif self._outbox.loop is not loop:
            raise NoriaError("the engine belongs to another event loop; make one AsyncEngine for each loop")
        return loop

    def _begin(
        self,
        read: _Read,
        is_quick: bool,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        hints: SchedulingHints,
        output_kind: OutputKind,
    ) -> OutputStream:
        self._bind()
        self._desk.require_open()
        if output_kind not in get_args(OutputKind):
            raise ConfigError(
                f"output_kind is {output_kind!r}; it must be cumulative, delta or final",
                name="output_kind",
                value=output_kind,
            )
        number = self._num_requests
        name = str(number) if request_id is None else request_id
        if name in self._desk.outputs:
            raise RejectedError(f"request_id {name!r} is taken by a request that has not ended", value=name)
        self._num_requests += 1
        output = GrowingOutput(name, output_kind, self._assembly.writer)
        self._desk.outputs[name] = output
        submit = partial(
            _submit,
            self._assembly,
            self._commands,
            self._outbox,
            output,
            read,
            number,
            self.default_sampling_params if sampling_params is None else sampling_params,
            priority,
            hints,
        )
        if is_quick:
            submit()
        else:
            self._texts.submit(submit)
        return OutputStream(output, self._commands, self)


def _submit(
    assembly: Assembly,
    commands: Commands,
    outbox: Outbox,
    output: GrowingOutput,
    read: _Read,
    number: int,
    params: SamplingParams,
    priority: int,
    hints: SchedulingHints,
) -> None:
    """Reads a prompt, on any thread, and passes it on to the engine's; what is wrong with it goes back."""
    started_ns = time.perf_counter_ns()
    try:
        prompt, token_ids = read()
        asked = assembly.ask(output.request_id, number, 0, prompt, token_ids, params, priority, hints)
    except Exception as error:  # noqa: BLE001  whatever it is concerns this request alone
        outbox.put(Refused(output, error))
        return
    commands.put(Submit(output, asked, (time.perf_counter_ns() - started_ns) // 1000))


def _num_chars(prompt: object) -> int:
    """How long a prompt's text is; 0 for anything else, which is soon read."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt")
    return len(prompt) if isinstance(prompt, str) else 0


def _stop(commands: Commands, thread: threading.Thread) -> None:
    commands.put(Stop(drains=False))
    # A collector may run on a thread that the engine's waits for. At exit it is the main one, and there the
    # engine's must not be in the middle of anything.
    if threading.current_thread() is threading.main_thread():
        thread.join()
