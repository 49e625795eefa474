"""The decision core across the Python boundary, a call at a time.

Steady decode as in `benches/core`: each running sequence decodes a token a step, 1% of the rows end in each
and are replaced by requests with new prompts. A bench times one call of a turn; the others are its setup.
Each group's name gives the peer or the limit.
"""

from collections import deque

import numpy as np
import numpy.typing as npt
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from noria import _core

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 100
BLOCK_SIZE = 16
DEPTH = 2
VOCAB_SIZE = 49_152
STOP_IDS = np.array([2], dtype=np.int32)
FIRST_ID = 3  # no stop id is ever sampled
LONG_PROMPT_TOKENS = 2048
ROUNDS = 50

VLLM = "vLLM 0.32, stored, AMD EPYC"
VLLM_SCHEDULE_US = {64: 362, 256: 1389, 1024: 5753, 4096: 24009}
VLLM_UPDATE_US = {64: 141, 256: 546, 1024: 2471, 4096: 10893}
VLLM_INPUT_US = {64: 250, 256: 576, 1024: 2078, 4096: 10961}
VLLM_BLOCK_NS = "180 to 520 ns a block, 800 to 950 where each allocation evicts"


class SteadyDecode:
    """A core in steady decode, and a turn of it in four calls: `submit`, `plan`, `expand`, `commit`."""

    def __init__(self, running: int) -> None:
        self.running = running
        self.rng = np.random.default_rng(running)
        blocks = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE)
        self.core = _core.Core(
            num_blocks=running * blocks + 64,
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_num_batched_tokens=running + PROMPT_TOKENS * max(4, running // 50),
            vocab_size=VOCAB_SIZE,
            depth=DEPTH,
        )
        self.layout = self.core.layout
        self.expander = _core.Expander(self.layout)
        self.spare = deque(np.zeros(self.layout.size, dtype=np.int32) for _ in range(DEPTH + 1))
        self.in_flight: deque[tuple[int, npt.NDArray[np.int32]]] = deque()
        for turn in range(1, 3 * OUTPUT_TOKENS + 1):
            # As many join in each turn of the first lives, so that as many end in each turn for ever.
            self.submit(min(running, -(-running * turn // OUTPUT_TOKENS)))
            while len(self.in_flight) < DEPTH:
                self.plan()
                self.expand()
            self.sample()
            self.commit()

    def submit(self, num_wanted: int | None = None) -> None:
        missing = (num_wanted or self.running) - self.core.num_running - self.core.num_waiting
        prompts = self.rng.integers(FIRST_ID, VOCAB_SIZE, (missing, PROMPT_TOKENS), dtype=np.int32)
        for prompt in prompts:
            self.core.submit(0, prompt, OUTPUT_TOKENS, stop_token_ids=STOP_IDS)

    def plan(self) -> None:
        buffer = self.spare.popleft()
        plan = self.core.plan(0, buffer)
        assert plan.kind == _core.Plan.STEP
        self.in_flight.append((plan.step, buffer))

    def expand(self) -> None:
        self.expander.expand(self.in_flight[-1][1])

    def sample(self) -> None:
        """Ids for the oldest step."""
        _, buffer = self.in_flight[0]
        num_rows = int(buffer[_core.H_NUM_ROWS])
        first = self.layout.offset_row_flags
        self.num_ids = buffer[first : first + num_rows] & _core.SAMPLES
        num_sampled = int(self.num_ids.sum())
        self.ids = self.rng.integers(FIRST_ID, VOCAB_SIZE, num_sampled, dtype=np.int32)

    def commit(self) -> None:
        step, buffer = self.in_flight.popleft()
        self.core.commit(step, self.num_ids, self.ids, 0, 0)
        self.spare.append(buffer)


@pytest.fixture
def steady(running: int) -> SteadyDecode:
    return SteadyDecode(running)


def test_plan(benchmark: BenchmarkFixture, steady: SteadyDecode, running: int) -> None:
    benchmark.group = f"plan, {running} running; peer: {VLLM_SCHEDULE_US[running]} us ({VLLM}: schedule)"

    def finish_turn() -> None:
        if len(steady.in_flight) == DEPTH:
            steady.expand()
            steady.sample()
            steady.commit()
        steady.submit()

    benchmark.pedantic(steady.plan, setup=finish_turn, rounds=ROUNDS)


def test_commit(benchmark: BenchmarkFixture, steady: SteadyDecode, running: int) -> None:
    benchmark.group = f"commit, {running} running; peer: {VLLM_UPDATE_US[running]} us ({VLLM}: update)"

    def begin_turn() -> None:
        steady.submit()
        steady.plan()
        steady.expand()
        steady.sample()

    benchmark.pedantic(steady.commit, setup=begin_turn, rounds=ROUNDS)


def test_expand(benchmark: BenchmarkFixture, steady: SteadyDecode, running: int) -> None:
    benchmark.group = (
        f"expand, {running} running; the peer takes {VLLM_INPUT_US[running]} us ({VLLM}: input preparation); "
        "the limit is a copy of as many bytes"
    )

    def next_step() -> None:
        if len(steady.in_flight) == DEPTH:
            steady.sample()
            steady.commit()
        steady.submit()
        steady.plan()

    benchmark.pedantic(steady.expand, setup=next_step, rounds=ROUNDS)


def test_copy_of_as_many_bytes(benchmark: BenchmarkFixture, steady: SteadyDecode, running: int) -> None:
    benchmark.group = (
        f"expand, {running} running; the peer takes {VLLM_INPUT_US[running]} us ({VLLM}: input preparation); "
        "the limit is a copy of as many bytes"
    )
    _, buffer = steady.in_flight[-1]
    num_words = 3 * int(buffer[_core.H_NUM_TOKENS]) + 4 * int(buffer[_core.H_NUM_ROWS])
    source, target = np.ones(num_words, dtype=np.int64), np.zeros(num_words, dtype=np.int64)
    benchmark.pedantic(np.copyto, args=(target, source), rounds=ROUNDS, iterations=100)


def idle_core() -> tuple[_core.Core, npt.NDArray[np.int32]]:
    """A core with room for two long prompts, and a buffer of its."""
    core = _core.Core(
        num_blocks=2 * (LONG_PROMPT_TOKENS // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        max_num_seqs=2,
        max_num_batched_tokens=2 * LONG_PROMPT_TOKENS,
        max_model_len=LONG_PROMPT_TOKENS + BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        depth=1,
    )
    return core, np.zeros(core.layout.size, dtype=np.int32)


def run_prompt(core: _core.Core, buffer: npt.NDArray[np.int32], prompt: npt.NDArray[np.int32]) -> None:
    """Admits a prompt, and lets it end: it holds blocks, and gives them up."""
    core.submit(0, prompt, 1)
    plan = core.plan(0, buffer)
    core.commit(plan.step, np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32), 0, 0)


def test_block_pool(benchmark: BenchmarkFixture) -> None:
    """128 blocks reserved by eviction, hashed, registered and released, a prompt of 2,048 tokens each."""
    benchmark.group = f"128 blocks for a new prompt, submit to finish; peer: {VLLM_BLOCK_NS} ({VLLM})"
    core, buffer = idle_core()
    rng = np.random.default_rng(0)

    def new_prompt() -> tuple[tuple[object, ...], dict[str, object]]:
        return (core, buffer, rng.integers(0, VOCAB_SIZE, LONG_PROMPT_TOKENS, dtype=np.int32)), {}

    for _ in range(4):
        run_prompt(*new_prompt()[0])  # until the pool is full of cached blocks
    benchmark.pedantic(run_prompt, setup=new_prompt, rounds=ROUNDS)


def test_prefix_lookup(benchmark: BenchmarkFixture) -> None:
    """127 blocks of the same prompt found in the cache, hashed and compared."""
    benchmark.group = f"127 blocks found in the cache, submit to finish; peer: {VLLM_BLOCK_NS} ({VLLM})"
    core, buffer = idle_core()
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, LONG_PROMPT_TOKENS, dtype=np.int32)
    run_prompt(core, buffer, prompt)
    benchmark.pedantic(run_prompt, args=(core, buffer, prompt), rounds=ROUNDS, iterations=10)


def test_submit_and_finish(benchmark: BenchmarkFixture) -> None:
    benchmark.group = (
        f"submit and abort among 10000 that wait; the peer takes 2600 us among 100000 ({VLLM}); "
        "the limit is a copy of the prompt, about 100 ns"
    )
    core, _ = idle_core()
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32)
    for _ in range(10_000):
        core.submit(0, prompt, OUTPUT_TOKENS)

    def submit_and_finish() -> None:
        core.finish(core.submit(0, prompt, OUTPUT_TOKENS), 0, _core.ABORT, 0)

    benchmark.pedantic(submit_and_finish, rounds=ROUNDS, iterations=100)
