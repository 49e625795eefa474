"""Runs something with an `AsyncEngine` of a tiny model, and says what must be left of it: nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from noria import AsyncEngine, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=1, max_tokens=100, ignore_eos=True, seed=1)

Options = dict[str, Any]
Use = Callable[[AsyncEngine], Awaitable[None]]
Run = Callable[..., None]

OPTIONS: Options = {
    "dtype": "float64",
    "max_num_seqs": 4,
    "num_kv_blocks": 60,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}


def run_engine(directory: Path, use: Use, *, is_dead: bool = False, **options: Any) -> None:
    """Gives an engine to `use`; asserts that no request, block, seat or task stays behind."""

    async def main() -> None:
        config = EngineConfig(model=str(directory), **(OPTIONS | options))
        async with AsyncEngine(config) as engine:
            await use(engine)
            if not is_dead:
                await idle(engine)
                assert_nothing_is_left(engine)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def idle(engine: AsyncEngine) -> None:
    """Waits until nothing runs any more, nor a step that was planned before the last answer's end."""
    async with asyncio.timeout(120):
        while engine._desk.outputs or engine._assembly.engine.has_work:
            await engine.stats()


def assert_nothing_is_left(engine: AsyncEngine) -> None:
    """Of an engine that is idle: its thread waits for a command, and touches nothing."""
    core = engine._assembly.engine.core
    core.check()
    assert (core.num_running, core.num_waiting, core.num_parked, core.num_in_flight) == (0, 0, 0, 0)
    assert core.num_held_blocks == 0
    assert core.num_free_blocks + core.num_cached_blocks == engine.resolved_config.num_kv_blocks
    assert engine._assembly.engine.num_requests == 0
    assert not engine._desk._answers
    assert not engine._desk._scores._of
    assert not engine._assembly.watch._watched
