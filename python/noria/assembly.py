"""All that answers prompts, put together: a model, its tokenizer, an engine, and what goes in and out of it.

`LLM` turns the engine on its caller's thread, `AsyncEngine` on one of its own; the rest they share is here.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from noria.answers import Answer, AnswerWriter
from noria.config import EngineConfig, model_path, torch_device
from noria.engine import Engine, start_engine
from noria.errors import ConfigError, RejectedError, TokenOutOfRangeError
from noria.hints import NO_HINTS, SchedulingHints
from noria.kv_cache import KvCache
from noria.loading import is_gguf, read_model_config
from noria.loading.gguf_file import GgufFile
from noria.memory import kv_memory_budget
from noria.models import Model, load_model
from noria.outputs import FinishedRequest
from noria.prompts import Prompt
from noria.requests import RequestPlan, Submitted, child_seed, plan_request, request_seed
from noria.runner.torch_runner import TorchExecutor
from noria.sampling.params import SamplingParams, default_params
from noria.text.tokenizer import Tokenizer, load_tokenizer
from noria.text.tool_calls import shows_special_tokens
from noria.watch import AnswerWatch, WakesEngine

if TYPE_CHECKING:
    from noria.sampling.grammar import GrammarEngine


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that was read and found good; the engine may still refuse it.

    Attributes:
        request_id: its name.
        number: of the prompt, in this engine; the seed of one that brings none comes from it.
        prompt_index: which prompt of the call.
        prompt: as given.
        token_ids: of the prompt.
        plan: how it is answered.
        priority: its band.
        hints: what order and admission may go by.
    """

    request_id: str
    number: int
    prompt_index: int
    prompt: Prompt
    token_ids: list[int]
    plan: RequestPlan
    priority: int
    hints: SchedulingHints = NO_HINTS


class Assembly:
    """A loaded model and an engine that is ready for its requests.

    Args:
        config: what to load, and how to run it.
        wakes_engine: called, on another thread, when a request can be put in line that waited for its
            grammar.

    Attributes:
        config: as given.
        resolved_config: the same, fitted to the model and the machine.
        tokenizer: None if it was not to be read.
        model: with its weights.
        engine: one thread owns it.
        watch: what reads requests' tokens while they run; the engine's thread owns it.
        writer: makes outputs.

    Raises:
        ConfigError: a value does not fit the model.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, *, wakes_engine: WakesEngine | None = None) -> None:
        if not config.model.strip():
            raise ConfigError(
                f"model is {config.model!r}; give a model's folder or a .gguf file",
                name="model",
                value=config.model,
            )
        self.config = config
        path = model_path(config.model)
        where = torch_device(config.device)
        # A header holds the whole vocabulary: it is read once, for both.
        file = GgufFile(path) if is_gguf(path) else None
        if file is None:
            read_model_config(path)  # without which a folder is no model: that comes first
        # The tokenizer is read first: it takes no time, and its errors need not wait for the weights.
        self.tokenizer: Tokenizer | None = None if config.skip_tokenizer_init else load_tokenizer(path, file)
        self.model: Model = load_model(
            path,
            dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
            device=where,
            max_model_len=config.max_model_len,
            backend=config.backend,
            quantization=config.quantization,
            file=file,
        )
        self.resolved_config = config.resolve(self.model.config, self.model.dtype, kv_memory_budget(where))
        notes = (
            f"model: run by {self.model.implementation}",
            f"backend: {self.model.backend_reason}; {self.model.linear_kernel}",
            *self.resolved_config.notes,
        )
        self._eos_token_ids = frozenset(self.model.config.eos_token_ids)
        if self.tokenizer is not None:
            self._eos_token_ids |= set(self.tokenizer.eos_token_ids)
        self.writer = AnswerWriter(self.tokenizer, self._eos_token_ids)
        self.watch = AnswerWatch(
            partial(_grammar_engine, self.tokenizer, self.model.config.vocab_size, self._eos_token_ids),
            wakes_engine,
        )
        self.engine: Engine = self._start_engine(where)
        for note in notes:  # they say what is, so not before a KV cache is found too large
            print(note, file=sys.stderr)

    def _start_engine(self, device: torch.device) -> Engine:
        core = self.resolved_config.core()
        kv = KvCache(
            self.model.config,
            self.resolved_config.num_kv_blocks,
            self.config.block_size,
            self.resolved_config.kv_dtype or self.model.dtype,
            device,
            self.config.num_swap_blocks,
        )
        executor = TorchExecutor(self.model, kv, core.layout)
        return start_engine(
            core,
            executor,
            depth=self.config.depth,
            mask_provider=self.watch.masks,
            kv_memory=kv,
            policy=self.config.policy,
        )

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What a request is sampled with that brings no parameters: what the model's authors recommend."""
        return default_params(self.model.config.default_sampling_params)

    def plan(self, params: SamplingParams, token_ids: Sequence[int]) -> RequestPlan:
        """What all answers to a prompt have in common.

        Raises:
            SamplingParamsError: the model or its tokenizer cannot do it.
        """
        return plan_request(
            params,
            token_ids,
            tokenizer=self.tokenizer,
            eos_token_ids=sorted(self._eos_token_ids),
            vocab_size=self.model.config.vocab_size,
        )

    def ask(
        self,
        request_id: str,
        number: int,
        prompt_index: int,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        priority: object,
        hints: SchedulingHints = NO_HINTS,
    ) -> Asked:
        """Reads what is asked for one prompt; on any thread. The arguments are those of `Asked`.

        Raises:
            RejectedError: the model or its tokenizer cannot do it.
        """
        kind = None if self.tokenizer is None else self.tokenizer.tool_call_format
        if prompt.offers_tools and kind is not None and shows_special_tokens(kind):
            params = replace(params, skip_special_tokens=False)
        plan = self.plan(params, token_ids)
        rank = _checked_priority(priority)
        return Asked(request_id, number, prompt_index, prompt, token_ids, plan, rank, hints)

    def submit(self, asked: Asked, children: list[Submitted]) -> None:
        """Submits a prompt once for each of its answers; adds them to `children` one by one.

        Raises:
            RejectedError: it can never run.
            EngineDeadError: the engine takes no more work.
        """
        try:
            self._submit(asked, children)
        except TokenOutOfRangeError as error:
            if error.limit is not None or not isinstance(error.value, int):
                raise
            # An id that no core can hold, so that the engine refused it.
            size = self.model.config.vocab_size
            message = f"{error}, which has ids 0 to {size - 1}"
            raise TokenOutOfRangeError(message, value=error.value, limit=size) from None

    def _submit(self, asked: Asked, children: list[Submitted]) -> None:
        plan, token_ids = asked.plan, asked.token_ids
        params = plan.params
        seed = request_seed(self.config.seed, asked.number) if params.seed is None else params.seed
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
                priority=asked.priority,
                hints=asked.hints,
                parked=plan.grammar is not None,
                host_masked=params.edits_on_host,
                reads_prefix_cache=params.prompt_logprobs is None,
            )
            children.append(
                Submitted(
                    asked.request_id,
                    asked.prompt_index,
                    index,
                    handle,
                    asked.prompt,
                    token_ids,
                    params,
                    plan.stop_token_ids,
                    arrival_us,
                )
            )
            watched = plan.watched(self.tokenizer)
            if watched is not None:
                self.watch.add(handle, watched)

    def answer(self, request: Submitted, finished: FinishedRequest) -> Answer:
        """What became of a request that has ended; asked once."""
        watched = self.watch.take(request.handle)
        return Answer(request, finished, watched, self.engine.take_cause(request.handle))

    def abandon(self, requests: Sequence[Submitted], *, waits: bool = True) -> None:
        """Aborts what was submitted, and lets what is in flight end if it `waits`."""
        for request in requests:
            self.watch.take(request.handle)
        if not self.engine.is_usable:
            return
        for request in requests:
            self.engine.abort(request.handle)
        while waits and self.engine.has_work:
            self.engine.turn()

    def close(self) -> None:
        """Stops the engine. Idempotent."""
        self.watch.close()
        self.engine.close()


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
