"""`LLM`: prompts in, answers out."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from noria.answers import refused_output
from noria.assembly import Assembly
from noria.config import EngineConfig, model_text
from noria.engine import Engine
from noria.errors import ConfigError, NoriaError, RejectedError
from noria.hints import SchedulingHints, spread_hints
from noria.interrupts import HeldInterrupts
from noria.kv_stats import KvStats
from noria.models import Model
from noria.outputs import EventCollector, Events, RequestOutput
from noria.policy import PolicyFunction
from noria.progress import ProgressBar
from noria.prompts import (
    Prompt,
    PromptInput,
    chat_prompt,
    split_conversations,
    split_prompts,
    tokenize_prompts,
)
from noria.requests import Submitted
from noria.sampling.params import SamplingParams
from noria.scoring import ScoreOutput, score_output, scored_tokens, spread_continuations
from noria.stats import EngineStats
from noria.text.answer import AnswerText
from noria.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from noria.text.chat_template import Message

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
        kv_cache_dtype: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        max_moves: int = 64,
        contiguous: bool = False,
        num_swap_blocks: int = 0,
        scheduling_policy: str = "fcfs",
        policy: PolicyFunction | None = None,
        admission: str = "peak",
        peak_percent: int = 100,
        share: str = "decode-first",
        step_target_ms: float = 0.0,
        max_adapters: int = 0,
        max_prefix_waits: int = 4,
        max_queued_requests: int = 2**20,
        max_queued_tokens: int = 2**40,
        ageing_steps: int = 1024,
        max_bypasses: int = 64,
        max_preemptions: int = 4,
        fair_input_weight: int = 1,
        fair_output_weight: int = 2,
        batching: str = "continuous",
        depth: int = 2,
        max_partial_prefills: int = 1,
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.01,
        seed: int = 0,
        skip_tokenizer_init: bool = False,
    ) -> None:
        self.config = EngineConfig(
            model=model_text(model),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            backend=backend,
            quantization=quantization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            max_moves=max_moves,
            contiguous=contiguous,
            num_swap_blocks=num_swap_blocks,
            scheduling_policy=scheduling_policy,
            policy=policy,
            admission=admission,
            peak_percent=peak_percent,
            share=share,
            step_target_ms=step_target_ms,
            max_adapters=max_adapters,
            max_prefix_waits=max_prefix_waits,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            ageing_steps=ageing_steps,
            max_bypasses=max_bypasses,
            max_preemptions=max_preemptions,
            fair_input_weight=fair_input_weight,
            fair_output_weight=fair_output_weight,
            batching=batching,
            depth=depth,
            max_partial_prefills=max_partial_prefills,
            long_prefill_token_threshold=long_prefill_token_threshold,
            watermark=watermark,
            seed=seed,
            skip_tokenizer_init=skip_tokenizer_init,
        )
        self._assembly = Assembly(self.config)
        self.tokenizer: Tokenizer | None = self._assembly.tokenizer
        self.model: Model = self._assembly.model
        self.resolved_config = self._assembly.resolved_config
        self.engine: Engine = self._assembly.engine
        self._num_requests = 0
        self._generating_thread: int | None = None

    # ---- what a caller asks

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        hints: SchedulingHints | Sequence[SchedulingHints] | None = None,
        use_tqdm: bool = True,
        on_events: OnEvents | None = None,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """Answers prompts, and returns when the last answer is done.

        Ctrl-C ends all of them; the engine stays usable.

        Args:
            prompts: one or a list of them: a text, token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`.
            sampling_params: for all, or one for each; None: `default_sampling_params`.
            priority: one for each; lower runs first, but under `fcfs`.
            hints: for all, or one for each: whose they are, how long their answers may get, when they
                are due.
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
        return self._answer(
            split_prompts(prompts), sampling_params, priority, hints, use_tqdm, on_events, on_error
        )

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What a request is sampled with that brings no parameters: what the model's authors recommend."""
        return self._assembly.default_sampling_params

    def answer_text(self, params: SamplingParams) -> AnswerText | None:
        """What makes an answer's text of its tokens, as `on_events` gives them.

        Joined, what its `push` and the final `end` give is the text that `generate` gives.

        Args:
            params: with which the answer is sampled.

        Returns:
            None if there is no tokenizer, or no text is wanted.

        Raises:
            TokenizerError: the tokenizer decodes whole texts only.
        """
        return self._assembly.plan(params, ()).text(self.tokenizer)

    def chat(
        self,
        messages: "Sequence[Message] | Sequence[Sequence[Message]]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers conversations, put through the model's chat template; else as `generate`.

        Args:
            messages: one conversation or a list of them: the turns so far, oldest first, each with `role` and
                `content` (a text, or a list of text parts).
            sampling_params: as for `generate`.
            tools: JSON schemas of tools, if the template knows tools. The answers' `tool_calls` are then
                read out of their texts.
            add_generation_prompt: ends the prompts with what opens the assistant's turn.
            chat_template_kwargs: what else the template reads, by name.
            use_tqdm: as for `generate`.

        Returns:
            One `RequestOutput` a conversation, in their order.

        Raises:
            RejectedError: a conversation is bad; the text says which.
            TokenizerError: the model has no chat template, or a bad one.
        """
        conversations = split_conversations(messages)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            try:
                prompt, _ = chat_prompt(
                    self.tokenizer,
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    variables=chat_template_kwargs,
                )
            except RejectedError as error:
                message = f"prompt {index}: {error}"
                raise RejectedError(message, value=error.value, limit=error.limit) from error
            prompts.append(prompt)
        return self._answer(prompts, sampling_params, None, None, use_tqdm, None, "raise")

    def score(
        self,
        prompts: Sequence[PromptInput],
        continuations: Sequence[PromptInput] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """How likely the model finds continuations of prompts, or texts by themselves.

        A choice among answers is `llm.score([question] * 4, answers)`, and the largest `logprob`, or the
        largest a token. Each pair is a request of one step's time; prompts may have one token less than
        `max_model_len`.

        Args:
            prompts: texts or token ids.
            continuations: one for each prompt, of the same kind; None: the prompts themselves are scored,
                but for their first tokens.
            use_tqdm: as for `generate`.

        Returns:
            One `ScoreOutput` a prompt, in their order.

        Raises:
            RejectedError: a prompt is bad; the text says which.
        """
        given = split_prompts(prompts)
        scored = []
        for index, (prompt, more) in enumerate(
            zip(given, spread_continuations(continuations, len(given)), strict=True)
        ):
            try:
                scored.append(scored_tokens(prompt, more, self.tokenizer))
            except RejectedError as error:
                message = f"prompt {index}: {error}"
                raise type(error)(message, value=error.value, limit=error.limit) from error
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        ids = [one.token_ids for one in scored]
        outputs = self._answer(ids, params, None, None, use_tqdm, None, "raise")
        return [score_output(one, output) for one, output in zip(scored, outputs, strict=True)]

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
        self._assembly.close()

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

    def _answer(
        self,
        given: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        hints: SchedulingHints | Sequence[SchedulingHints] | None,
        use_tqdm: bool,
        on_events: OnEvents | None,
        on_error: str,
    ) -> list[RequestOutput]:
        """`generate`, of prompts in a list."""
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
        if sampling_params is None:
            sampling_params = self.default_sampling_params
        params = _spread_params(sampling_params, len(given))
        if priority is not None and not isinstance(priority, Sequence | np.ndarray):
            raise RejectedError(
                f"priority is {priority!r}; it must be a list of one integer for each prompt", value=priority
            )
        if priority is not None and len(priority) != len(given):
            raise RejectedError(
                f"{len(priority)} priorities were given for {len(given)} prompts",
                value=len(priority),
                limit=len(given),
            )
        told = spread_hints(hints, len(given))
        self._generating_thread = threading.get_ident()
        try:
            prompts_submitted = self._submit_all(given, params, priority, told, on_error)
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
                else self._assembly.writer.output(
                    [self._assembly.answer(request, next(finished)) for request in requests], collector.scores
                )
                for requests in prompts_submitted
            ]
            self.engine.add_text_time((time.perf_counter_ns() - started_ns) // 1000)
            return outputs
        finally:
            self._generating_thread = None

    def _submit_all(
        self,
        given: Sequence[object],
        params: Sequence[SamplingParams],
        priority: Sequence[int] | None,
        hints: Sequence[SchedulingHints],
        on_error: str,
    ) -> list[list[Submitted] | _Refused]:
        """Submits every prompt; with `raise`, all or none."""
        requests: list[list[Submitted] | _Refused] = []
        started_ns = time.perf_counter_ns()
        tokenized = tokenize_prompts(given, self.tokenizer)
        self.engine.add_text_time((time.perf_counter_ns() - started_ns) // 1000)
        try:
            for index, (prompt, token_ids) in enumerate(tokenized):
                number = self._num_requests
                self._num_requests += 1
                children: list[Submitted] = []
                try:
                    if isinstance(token_ids, RejectedError):
                        raise token_ids
                    rank = 0 if priority is None else priority[index]
                    asked = self._assembly.ask(
                        str(number), number, index, prompt, token_ids, params[index], rank, hints[index]
                    )
                    self._assembly.submit(asked, children)
                    requests.append(children)
                except RejectedError as error:
                    self._assembly.abandon(children, waits=False)
                    ids = [] if isinstance(token_ids, RejectedError) else token_ids
                    if on_error == "return":
                        requests.append(_Refused(str(number), prompt, ids, error))
                        continue
                    message = f"prompt {index}: {error}"
                    raise type(error)(message, value=error.value, limit=error.limit) from error
                except BaseException:
                    requests.append(children)
                    raise
        except BaseException:
            # Whatever it was (Ctrl-C too): those before it must not run with the next call's.
            self._assembly.abandon(
                [child for children in requests if isinstance(children, list) for child in children]
            )
            raise
        return requests

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
                    self._assembly.watch.unpark_compiled(self.engine)
                    events = self.engine.turn(while_waiting=interrupts.raise_second)
                    if events is None:
                        if not self._assembly.watch.is_compiling:
                            num_left = len(submitted) - collector.num_finished
                            raise NoriaError(f"{num_left} requests never finished")
                        self._assembly.watch.unpark_compiled(self.engine, timeout_s=1.0)
                        continue
                    self._assembly.watch.see(events, self.engine)
                    indices = collector.add(events)
                    progress.update(collector.num_finished, collector.num_tokens)
                    if on_events is not None:
                        on_events(events, prompt_indices[indices])
                    self.engine.raise_interrupt()
            except BaseException:
                # After a second Ctrl-C the step in flight is not waited for: the next call's first turn does.
                self._assembly.abandon(submitted, waits=not interrupts.has_second)
                raise
        return collector


def _spread_params(
    sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    """One a prompt."""
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
