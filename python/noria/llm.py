"""`LLM`: prompts in, answers out."""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from noria.answers import Answer, AnswerWriter, refused_output
from noria.config import EngineConfig, model_path, torch_device
from noria.engine import Engine, start_engine
from noria.errors import ConfigError, NoriaError, RejectedError
from noria.interrupts import HeldInterrupts
from noria.kv_cache import KvCache
from noria.kv_stats import KvStats
from noria.memory import kv_memory_budget
from noria.models import Model, load_model
from noria.outputs import EventCollector, Events, FinishedRequest, RequestOutput
from noria.progress import ProgressBar
from noria.prompts import Prompt, PromptInput, split_prompts, tokenize_prompts
from noria.requests import Submitted, child_seed, plan_request, request_seed
from noria.runner.torch_runner import TorchExecutor
from noria.sampling.params import SamplingParams
from noria.stats import EngineStats
from noria.text.tokenizer import Tokenizer, load_tokenizer
from noria.watch import AnswerWatch

if TYPE_CHECKING:
    from noria.sampling.grammar import GrammarEngine

OnEvents = Callable[[Events, npt.NDArray[np.int64]], None]
"""Called after each turn with its events, and for each of them the index of its prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """A prompt that was not submitted, and why."""

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
        )
        self.resolved_config = self.config.resolve(
            self.model.config, self.model.dtype, kv_memory_budget(where)
        )
        for note in self.resolved_config.notes:
            print(note, file=sys.stderr)
        self._eos_token_ids = frozenset(self.model.config.eos_token_ids)
        if self.tokenizer is not None:
            self._eos_token_ids |= set(self.tokenizer.eos_token_ids)
        self._writer = AnswerWriter(self.tokenizer, self._eos_token_ids)
        self._watch = AnswerWatch(
            partial(_grammar_engine, self.tokenizer, self.model.config.vocab_size, self._eos_token_ids)
        )
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
        executor = TorchExecutor(self.model, kv, core.layout)
        return start_engine(
            core, executor, depth=self.config.depth, mask_provider=self._watch.masks, kv_memory=kv
        )

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
            prompts_submitted = self._submit_all(given, params, priority, on_error)
            submitted = [
                request
                for requests in prompts_submitted
                if isinstance(requests, list)
                for request in requests
            ]
            collector = self._run(submitted, use_tqdm, on_events)
            started_ns = time.perf_counter_ns()
            finished = iter(collector.finished())
            outputs = [
                refused_output(requests.request_id, requests.prompt, requests.token_ids, requests.error)
                if isinstance(requests, _Refused)
                else self._writer.output(
                    [self._answer(request, next(finished)) for request in requests], collector.scores
                )
                for requests in prompts_submitted
            ]
            self.engine.add_text_time((time.perf_counter_ns() - started_ns) // 1000)
            return outputs
        finally:
            self._generating_thread = None

    def stats(self) -> EngineStats:
        """Sums since the engine started."""
        return self.engine.stats()

    def resize_kv_cache(self, num_blocks: int) -> None:
        """Gives the KV cache another size; see `Engine.resize_kv_cache`. May be called from `on_events`.

        Raises:
            ConfigError: out of range, less than a request that was accepted may need, batches are static,
                or the system does not give so much memory; nothing has changed.
        """
        self.engine.resize_kv_cache(num_blocks)

    def kv_stats(self) -> KvStats:
        """How the KV cache lies now."""
        return self.engine.kv_stats()

    def close(self) -> None:
        """Stops the engine. Idempotent."""
        self._watch.close()
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
    ) -> list[list[Submitted] | _Refused]:
        """Submits every prompt; with `raise`, all or none."""
        requests: list[list[Submitted] | _Refused] = []
        started_ns = time.perf_counter_ns()
        tokenized = tokenize_prompts(given, self.tokenizer)
        self.engine.add_text_time((time.perf_counter_ns() - started_ns) // 1000)
        try:
            for index, (prompt, token_ids) in enumerate(tokenized):
                request_id = str(self._num_requests)
                self._num_requests += 1
                children: list[Submitted] = []
                try:
                    if isinstance(token_ids, RejectedError):
                        raise token_ids
                    rank = 0 if priority is None else _checked_priority(priority[index])
                    self._submit(children, request_id, index, prompt, token_ids, params[index], rank)
                    requests.append(children)
                except RejectedError as error:
                    self._abandon(children, waits=False)
                    ids = [] if isinstance(token_ids, RejectedError) else token_ids
                    if on_error == "return":
                        requests.append(_Refused(request_id, prompt, ids, error))
                        continue
                    message = f"prompt {index}: {error}"
                    raise type(error)(message, value=error.value, limit=error.limit) from error
                except BaseException:
                    requests.append(children)
                    raise
        except BaseException:
            # Whatever it was (Ctrl-C too): those before it must not run with the next call's.
            self._abandon(
                [child for children in requests if isinstance(children, list) for child in children]
            )
            raise
        return requests

    def _submit(
        self,
        children: list[Submitted],
        request_id: str,
        prompt_index: int,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        priority: int,
    ) -> None:
        """Submits a prompt once for each of its answers; adds them to `children` one by one."""
        plan = plan_request(
            params,
            token_ids,
            tokenizer=self.tokenizer,
            eos_token_ids=sorted(self._eos_token_ids),
            vocab_size=self.model.config.vocab_size,
        )
        seed = request_seed(self.config.seed, int(request_id)) if params.seed is None else params.seed
        # The core cuts it to what the prompt leaves.
        max_tokens = self.resolved_config.max_model_len
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        for index in range(params.n):
            arrival_us = time.perf_counter_ns() // 1000
            handle = self.engine.submit(
                token_ids,
                plan.seat_init(child_seed(seed, index), len(token_ids)),
                max_tokens,
                stop_token_ids=plan.stop_token_ids,
                priority=priority,
                parked=plan.grammar is not None,
                host_masked=params.edits_on_host,
                reads_prefix_cache=params.prompt_logprobs is None,
            )
            children.append(
                Submitted(
                    request_id,
                    prompt_index,
                    index,
                    handle,
                    prompt,
                    token_ids,
                    params,
                    plan.stop_token_ids,
                    arrival_us,
                )
            )
            watched = plan.watched(self.tokenizer)
            if watched is not None:
                self._watch.add(handle, watched)

    # ---- through

    def _run(
        self, submitted: Sequence[Submitted], use_tqdm: bool, on_events: OnEvents | None
    ) -> EventCollector:
        """Turns the engine until all have finished and nothing is in flight."""
        collector = EventCollector([request.handle for request in submitted])
        prompt_indices = np.array([*(request.prompt_index for request in submitted), -1])
        with HeldInterrupts() as interrupts, ProgressBar(len(submitted), is_shown=use_tqdm) as progress:
            try:
                while collector.num_finished < len(submitted) or self.engine.has_work:
                    interrupts.raise_pending()
                    self._watch.unpark_compiled(self.engine)
                    events = self.engine.turn(while_waiting=interrupts.raise_second)
                    if events is None:
                        if not self._watch.is_compiling:
                            num_left = len(submitted) - collector.num_finished
                            raise NoriaError(f"{num_left} requests never finished")
                        self._watch.unpark_compiled(self.engine, timeout_s=1.0)
                        continue
                    self._watch.see(events, self.engine)
                    indices = collector.add(events)
                    progress.update(collector.num_finished, collector.num_tokens)
                    if on_events is not None:
                        on_events(events, prompt_indices[indices])
            except BaseException:
                # After a second Ctrl-C the step in flight is not waited for: the next call's first turn does.
                self._abandon(submitted, waits=not interrupts.has_second)
                raise
        return collector

    def _abandon(self, requests: Sequence[Submitted], *, waits: bool = True) -> None:
        """Aborts what was submitted, and lets what is in flight end if it `waits`."""
        for request in requests:
            self._watch.take(request.handle)
        if not self.engine.is_usable:
            return
        for request in requests:
            self.engine.abort(request.handle)
        while waits and self.engine.has_work:
            self.engine.turn()

    # ---- out

    def _answer(self, request: Submitted, finished: FinishedRequest) -> Answer:
        watched = self._watch.take(request.handle)
        return Answer(request, finished, watched, self.engine.take_cause(request.handle))


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


def _grammar_engine(
    tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
) -> "GrammarEngine":
    from noria.sampling.grammar import GrammarEngine  # only who asks for a grammar needs it

    assert tokenizer is not None  # `plan_request` refuses a grammar without one
    return GrammarEngine(tokenizer, vocab_size, sorted(eos_token_ids))
