"""`LLM`: prompts in, answers out."""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from noria import _core
from noria.config import EngineConfig, model_path, torch_device
from noria.engine import Engine, start_engine
from noria.errors import ConfigError, NoriaError, RejectedError
from noria.interrupts import HeldInterrupts
from noria.kv_cache import KvCache
from noria.memory import kv_memory_budget
from noria.models import Model, load_model
from noria.outputs import (
    FINISH_REASONS,
    CompletionOutput,
    EventCollector,
    Events,
    FinishedRequest,
    RequestMetrics,
    RequestOutput,
)
from noria.progress import ProgressBar
from noria.prompts import Prompt, PromptInput, split_prompts, tokenize_prompts
from noria.runner.base import SeatInit
from noria.runner.torch_runner import TorchExecutor
from noria.sampling.params import SamplingParams
from noria.stats import EngineStats
from noria.text.tokenizer import Tokenizer, load_tokenizer

OnEvents = Callable[[Events, npt.NDArray[np.int64]], None]
"""Called after each turn with its events, and for each of them the index of its prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Submitted:
    """A request on its way.

    Attributes:
        request_id: its name.
        handle: the engine's.
        prompt: as given.
        token_ids: of the prompt.
        params: its own.
        arrival_us: when it was submitted.
    """

    request_id: str
    handle: int
    prompt: Prompt
    token_ids: list[int]
    params: SamplingParams
    arrival_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """A request that was not submitted, and why."""

    request_id: str
    prompt: Prompt
    token_ids: list[int]
    error: RejectedError


class LLM:
    """A model, its tokenizer and an engine.

    It ends with `close`, at the end of a `with` block, or when nothing refers to it any more; no
    thread stays behind.

    Args:
        model: a folder with `config.json` and safetensors, or a `.gguf` file.
        dtype: see `EngineConfig`, as for every argument after this one.

    Raises:
        ConfigError: a value is out of its range, or does not fit the model.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fcfs",
        batching: str = "continuous",
        depth: int = 2,
        max_partial_prefills: int = 1,
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.01,
        seed: int = 0,
        skip_tokenizer_init: bool = False,
    ) -> None:
        self.config = EngineConfig(
            model=str(model),
            dtype=dtype,
            device=device,
            backend=backend,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            batching=batching,
            depth=depth,
            max_partial_prefills=max_partial_prefills,
            long_prefill_token_threshold=long_prefill_token_threshold,
            watermark=watermark,
            seed=seed,
            skip_tokenizer_init=skip_tokenizer_init,
        )
        if not self.config.model.strip():
            raise ConfigError(
                f"model is {self.config.model!r}; give a model's folder or a .gguf file",
                name="model",
                value=self.config.model,
            )
        path = model_path(self.config.model)
        where = torch_device(self.config.device)
        # The tokenizer is read first: it takes no time, and its errors need not wait for the weights.
        self.tokenizer: Tokenizer | None = None if skip_tokenizer_init else load_tokenizer(path)
        self.model: Model = load_model(
            path,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            device=where,
            max_model_len=max_model_len,
            backend=self.config.backend,
        )
        self.resolved_config = self.config.resolve(
            self.model.config, self.model.dtype, kv_memory_budget(where)
        )
        for note in (f"backend: {self.model.backend_reason}", *self.resolved_config.notes):
            print(note, file=sys.stderr)
        self._eos_token_ids = set(self.model.config.eos_token_ids)
        if self.tokenizer is not None:
            self._eos_token_ids.update(self.tokenizer.eos_token_ids)
        self._num_requests = 0
        self._generating_thread: int | None = None
        self.engine: Engine = self._start_engine(where)

    def _start_engine(self, device: torch.device) -> Engine:
        core = self.resolved_config.core()
        kv = KvCache(
            self.model.config,
            self.resolved_config.num_kv_blocks,
            self.config.block_size,
            self.model.dtype,
            device,
        )
        return start_engine(core, TorchExecutor(self.model, kv, core.layout), depth=self.config.depth)

    # ---- what a caller asks

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
        on_events: OnEvents | None = None,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """Answers prompts, and returns when the last answer is done.

        Ctrl-C ends all of them; the engine stays usable.

        Args:
            prompts: one or a list of them: a text, token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`.
            sampling_params: for all, or one for each; None: the defaults.
            priority: one for each; lower runs first under the `priority` policy.
            use_tqdm: whether a progress bar is shown, if standard error is a terminal and it takes
                longer than a second.
            on_events: called after each turn of the engine with its events, and for each event the
                index of its prompt.
            on_error: what becomes of a bad prompt. `raise`: none is run, and its error is raised.
                `return`: its answer has `finish_reason` `error`, and the others are run.

        Returns:
            One `RequestOutput` a prompt, in their order.

        Raises:
            RejectedError: a prompt is bad; the text says which.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(
                f"on_error is {on_error!r}; it must be raise or return", name="on_error", value=on_error
            )
        if self._generating_thread is not None:
            is_own = self._generating_thread == threading.get_ident()
            raise NoriaError(
                "generate is already running; it cannot be called from on_events"
                if is_own
                else "generate is already running in another thread; one LLM answers one call at a time"
            )
        given = split_prompts(prompts)
        params = _spread_params(sampling_params, len(given))
        if priority is not None and len(priority) != len(given):
            raise RejectedError(
                f"{len(priority)} priorities were given for {len(given)} prompts",
                value=len(priority),
                limit=len(given),
            )
        self._generating_thread = threading.get_ident()
        try:
            requests = self._submit_all(given, params, priority, on_error)
            submitted = [request for request in requests if isinstance(request, _Submitted)]
            finished = iter(self._run(requests, submitted, use_tqdm, on_events))
            started_ns = time.perf_counter_ns()
            outputs = [
                _refused_output(request)
                if isinstance(request, _Refused)
                else self._output(request, next(finished))
                for request in requests
            ]
            self.engine.add_text_time((time.perf_counter_ns() - started_ns) // 1000)
            return outputs
        finally:
            self._generating_thread = None

    def stats(self) -> EngineStats:
        """Sums since the engine started."""
        return self.engine.stats()

    def close(self) -> None:
        """Stops the engine. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- in

    def _submit_all(
        self,
        given: Sequence[object],
        params: Sequence[SamplingParams],
        priority: Sequence[int] | None,
        on_error: str,
    ) -> list[_Submitted | _Refused]:
        """Submits every prompt; with `raise`, all or none."""
        requests: list[_Submitted | _Refused] = []
        started_ns = time.perf_counter_ns()
        tokenized = tokenize_prompts(given, self.tokenizer)
        self.engine.add_text_time((time.perf_counter_ns() - started_ns) // 1000)
        try:
            for index, (prompt, token_ids) in enumerate(tokenized):
                request_id = str(self._num_requests)
                self._num_requests += 1
                try:
                    if isinstance(token_ids, RejectedError):
                        raise token_ids
                    rank = 0 if priority is None else _checked_priority(priority[index])
                    requests.append(self._submit(request_id, prompt, token_ids, params[index], rank))
                except RejectedError as error:
                    ids = [] if isinstance(token_ids, RejectedError) else token_ids
                    if on_error == "return":
                        requests.append(_Refused(request_id, prompt, ids, error))
                        continue
                    message = f"prompt {index}: {error}"
                    raise type(error)(message, value=error.value, limit=error.limit) from error
        except BaseException:
            # Whatever it was (Ctrl-C too): those before it must not run with the next call's.
            self._abandon(requests)
            raise
        return requests

    def _submit(
        self, request_id: str, prompt: Prompt, token_ids: list[int], params: SamplingParams, priority: int
    ) -> _Submitted:
        seed = params.seed
        if seed is None:
            seed = _request_seed(self.config.seed, int(request_id))
        stop_token_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        # The core cuts it to what the prompt leaves.
        max_tokens = self.resolved_config.max_model_len
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        arrival_us = time.perf_counter_ns() // 1000
        handle = self.engine.submit(
            token_ids,
            SeatInit(params, seed, len(token_ids)),
            max_tokens,
            stop_token_ids=sorted(stop_token_ids),
            priority=priority,
        )
        return _Submitted(request_id, handle, prompt, token_ids, params, arrival_us)

    # ---- through

    def _run(
        self,
        requests: Sequence[_Submitted | _Refused],
        submitted: Sequence[_Submitted],
        use_tqdm: bool,
        on_events: OnEvents | None,
    ) -> list[FinishedRequest]:
        """Turns the engine until all have finished and nothing is in flight."""
        collector = EventCollector([request.handle for request in submitted])
        prompt_indices = np.array(
            [index for index, request in enumerate(requests) if isinstance(request, _Submitted)] + [-1]
        )
        with HeldInterrupts() as interrupts, ProgressBar(len(submitted), is_shown=use_tqdm) as progress:
            try:
                while collector.num_finished < len(submitted) or self.engine.has_work:
                    interrupts.raise_pending()
                    events = self.engine.turn(while_waiting=interrupts.raise_second)
                    if events is None:
                        raise NoriaError(f"{len(submitted) - collector.num_finished} requests never finished")
                    indices = collector.add(events)
                    progress.update(collector.num_finished, collector.num_tokens)
                    if on_events is not None:
                        on_events(events, prompt_indices[indices])
            except BaseException:
                # After a second Ctrl-C the step in flight is not waited for: the next call's first turn does.
                self._abandon(submitted, waits=not interrupts.has_second)
                raise
        return collector.finished()

    def _abandon(self, requests: Sequence[_Submitted | _Refused], *, waits: bool = True) -> None:
        """Aborts what was submitted, and lets what is in flight end if it `waits`."""
        if not self.engine.is_usable:
            return
        for request in requests:
            if isinstance(request, _Submitted):
                self.engine.abort(request.handle)
        while waits and self.engine.has_work:
            self.engine.turn()

    # ---- out

    def _output(self, request: _Submitted, finished: FinishedRequest) -> RequestOutput:
        token_ids: list[int] = finished.token_ids.tolist()
        has_stopped = finished.reason == _core.STOP and bool(token_ids)
        text = ""
        if self.tokenizer is not None and request.params.detokenize:
            # The token that stopped it is no part of the answer's text.
            shown = token_ids[:-1] if has_stopped else token_ids
            text = self.tokenizer.decode(
                shown, skip_special_tokens=request.params.skip_special_tokens, after_prompt=True
            )
        is_asked = has_stopped and (request.params.ignore_eos or token_ids[-1] not in self._eos_token_ids)
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=token_ids,
            finish_reason=FINISH_REASONS[finished.reason],
            stop_reason=token_ids[-1] if is_asked else None,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt.text,
            prompt_token_ids=request.token_ids,
            outputs=[completion],
            finished=True,
            metrics=RequestMetrics(
                arrival_time=request.arrival_us / 1e6,
                first_scheduled_time=_seconds(finished.first_scheduled_us),
                first_token_time=_seconds(finished.first_token_us),
                finished_time=_seconds(finished.finished_us),
                num_preemptions=finished.num_preemptions,
                num_cached_tokens=finished.num_cached_tokens,
            ),
            error=self.engine.take_cause(request.handle),
        )


def _refused_output(request: _Refused) -> RequestOutput:
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error", stop_reason=None)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt.text,
        prompt_token_ids=request.token_ids,
        outputs=[completion],
        finished=True,
        metrics=None,
        error=str(request.error),
    )


def _spread_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """One a prompt."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence) or not all(
        isinstance(params, SamplingParams) for params in sampling_params
    ):
        raise RejectedError(
            f"sampling_params is {sampling_params!r}; "
            "it must be SamplingParams, or a list of one for each prompt",
            value=sampling_params,
        )
    if len(sampling_params) != num_prompts:
        raise RejectedError(
            f"{len(sampling_params)} sampling_params were given for {num_prompts} prompts",
            value=len(sampling_params),
            limit=num_prompts,
        )
    return sampling_params


def _checked_priority(priority: object) -> int:
    """A band that the core can hold."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise RejectedError(
            f"its priority is {priority!r}; it must be an integer from -2**31 to 2**31 - 1",
            value=priority,
            limit=2**31 - 1,
        )
    return priority


def _request_seed(seed: int, number: int) -> int:
    """A seed for the engine's request `number`: splitmix64 of both; 0 to 2**63 − 1."""
    x = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) >> 1


def _seconds(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1e6
