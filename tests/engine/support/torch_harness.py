"""Engines over a tiny float64 Llama, and what its requests must answer whatever shares their batch."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dense_reference import dense_logits
from tiny_llama import VOCAB_SIZE

from noria import _core
from noria.config import EngineConfig
from noria.engine import Engine
from noria.kv_cache import KvCache
from noria.models import Model
from noria.outputs import EventCollector, Events, FinishedRequest
from noria.runner.base import Executor, HostMasks, MaskProvider, PendingIds, SeatInit
from noria.runner.step import StepView
from noria.runner.thread import ThreadRunner
from noria.runner.torch_runner import TorchExecutor
from noria.sampling.context import SeatContext
from noria.sampling.params import SamplingParams
from noria.sampling.sampler import Sampler
from noria.scores import ScoreBook
from noria.stats import EngineStats

Answer = tuple[list[int], int]
"""Token ids and the reason of the end."""

Wrap = Callable[[TorchExecutor], Executor]


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    host_masked: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()

    def context(self, output: Sequence[int] = ()) -> SeatContext:
        return SeatContext(
            self.stop_token_ids if self.params.min_tokens else (),
            self.bad_words,
            np.array(self.prompt, dtype=np.int64),
            np.array(output, dtype=np.int64),
        )

    @property
    def seed(self) -> int:
        assert self.params.seed is not None
        return self.params.seed


def make_asks(num: int, *, longest: int, max_tokens: int, seed: int) -> list[Ask]:
    """Prompts of 1 to `longest` tokens, greedy and sampled; a third shares a prefix, and one comes twice."""
    rng = np.random.default_rng(seed)
    lengths = np.unique(np.geomspace(1, longest, num).astype(int))
    lengths = np.concatenate([lengths, rng.integers(1, longest, num - len(lengths))])
    prefix = rng.integers(0, VOCAB_SIZE, longest)
    asks = []
    for index, length in enumerate(lengths.tolist()):
        ids = rng.integers(0, VOCAB_SIZE, length)
        if index % 3 == 2:
            ids[: length * 3 // 4] = prefix[: length * 3 // 4]
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            seed=int(rng.integers(2**62)),
            max_tokens=int(rng.integers(1, max_tokens + 1)),
        )
        stop = tuple(rng.integers(0, VOCAB_SIZE, 2).tolist()) if index % 4 == 1 else ()
        asks.append(Ask(tuple(ids.tolist()), params, stop))
    asks.append(Ask(asks[-1].prompt, SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)))
    order = rng.permutation(len(asks))
    return [asks[place] for place in order]


@dataclass
class TorchRun:
    """What came of a run."""

    finished: list[FinishedRequest]
    stats: EngineStats
    causes: list[str | None]
    scores: ScoreBook
    handles: list[int]

    @property
    def answers(self) -> list[Answer]:
        return [(answer.token_ids.tolist(), answer.reason) for answer in self.finished]


class TorchBench:
    """One engine over a model. `wrap` stands between its runner and the executor."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        wrap: Wrap | None = None,
        mask_provider: MaskProvider | None = None,
        fill_kv: float | None = None,
        forced_moves: int = 0,
        num_kv_events: int = 0,
    ) -> None:
        resolved = config.resolve(model.config, model.dtype, 64 * 2**20)
        self.num_blocks = resolved.num_kv_blocks
        self.core = resolved.core(forced_moves=forced_moves, num_kv_events=num_kv_events)
        self.kv = KvCache(
            model.config,
            self.num_blocks,
            config.block_size,
            resolved.kv_dtype or model.dtype,
            model.device,
            config.num_swap_blocks,
        )
        if fill_kv is not None:
            # Of 8-bit numbers whose scale is NaN every byte is −1.
            self.kv.memory[:, :, 1:] = -1 if self.kv.dtype == torch.int8 else fill_kv
        executor: Executor = TorchExecutor(model, self.kv, self.core.layout)
        if wrap is not None:
            executor = wrap(executor)  # type: ignore[arg-type]
        ring = tuple(StepView(self.core.layout) for _ in range(config.depth + 1))
        self.engine = Engine(
            self.core,
            ThreadRunner(executor, ring),
            ring,
            mask_provider=mask_provider,
            kv_memory=self.kv,
        )
        self.handles: list[int] = []

    def submit(self, ask: Ask) -> int:
        handle = self.engine.submit(
            ask.prompt,
            SeatInit(ask.params, ask.seed, len(ask.prompt), ask.context()),
            ask.params.max_tokens or 0,
            stop_token_ids=ask.stop_token_ids,
            host_masked=ask.host_masked,
            reads_prefix_cache=ask.params.prompt_logprobs is None,
        )
        self.handles.append(handle)
        return handle

    def run(self, asks: Sequence[Ask], on_turn: Callable[[int, Events], None] | None = None) -> TorchRun:
        """Answers all; `on_turn` is called after each turn, with its number. Nothing may be left over."""
        before = threading.active_count() - 1
        for ask in asks:
            self.submit(ask)
        seen: list[Events] = []
        while self.engine.has_work:
            events = self.engine.turn()
            assert events is not None
            self.core.check()
            if on_turn is not None:
                on_turn(len(seen), events)
            seen.append(events)
        core = self.core
        assert (core.num_running, core.num_waiting, core.num_in_flight, core.num_held_blocks) == (0, 0, 0, 0)
        assert core.num_free_blocks + core.num_cached_blocks == self.num_blocks
        collector = EventCollector(self.handles)
        for events in seen:
            collector.add(events)
        causes = [self.engine.take_cause(handle) for handle in self.handles]
        self.engine.close()
        assert threading.active_count() == before
        return TorchRun(
            collector.finished(), self.engine.stats(), causes, collector.scores, list(self.handles)
        )


def tiny_config(**changes: object) -> EngineConfig:
    """Six seats, 64 tokens a step, blocks of 16; admission lets a small pool preempt."""
    values: dict[str, object] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 200,
        "admission": "optimistic",
    }
    return EngineConfig(model="tiny", **(values | changes))  # type: ignore[arg-type]


class Watched:
    """An executor in front of another; subclasses interfere."""

    def __init__(self, inner: TorchExecutor) -> None:
        self.inner = inner

    def expand(self, view: StepView, inits: Sequence[SeatInit]) -> None:
        self.inner.expand(view, inits)

    def forward(self, view: StepView) -> None:
        self.inner.forward(view)

    def sample(self, view: StepView, masks: HostMasks | None) -> PendingIds:
        return self.inner.sample(view, masks)


def answers_alone(model: Model, asks: Sequence[Ask], **changes: object) -> list[Answer]:
    """Each request by itself: whole prompt, one step at a time, no prefix cache."""
    alone = {"depth": 1, "max_num_seqs": 1, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    config = tiny_config(**(alone | changes))
    return [TorchBench(model, config).run([ask]).answers[0] for ask in asks]


def reference_answer(directory: object, model: Model, ask: Ask, answer: Sequence[int]) -> list[int]:
    """What the dense reference says at each place of `answer`, given what comes before it.

    It is `answer` itself if, and only if, generating with the reference token by token gives it.
    """
    text = [*ask.prompt, *answer]
    logits = dense_logits(directory, text[:-1])[len(ask.prompt) - 1 :]  # type: ignore[arg-type]
    sampler = Sampler(1, model.config.vocab_size, torch.device("cpu"))
    sampler.set_seats([0], [ask.params], [ask.seed])
    ids = []
    for position in range(len(answer)):
        sampler.set_seats([0], [ask.params], [ask.seed], [ask.context(answer[:position])])
        sampled = sampler.sample(logits[position : position + 1], torch.tensor([0]), torch.tensor([position]))
        ids.append(int(sampled.ids[0]))
    return ids


def expected_reason(ask: Ask, answer: Sequence[int]) -> int:
    return _core.STOP if answer and answer[-1] in ask.stop_token_ids else _core.LENGTH


def cut(answer: Answer, num_tokens: int, reason: int) -> Answer:
    return answer[0][:num_tokens], reason
