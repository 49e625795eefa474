"""How streams and engines end, and what they leave behind: nothing."""

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_harness import (
    ENDLESS,
    GREEDY,
    OPTIONS,
    Options,
    Run,
    assert_nothing_is_left,
    idle,
)

from noria import (
    LLM,
    AsyncEngine,
    EngineConfig,
    EngineDeadError,
    NoriaError,
    OutputStream,
    RequestOutput,
    SamplingParams,
)
from noria.runner.base import DeviceLostError


def test_abort_ends_a_stream_with_what_it_has(run_async: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.generate([5], ENDLESS, request_id="a")
        first = await anext(stream)
        assert engine.abort("a")
        last = await stream.last()
        assert last.outputs[0].finish_reason == "abort"
        assert last.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
        assert len(last.outputs[0].token_ids) < 100

    run_async(use)


def test_300_abandoned_streams_and_cancelled_tasks_leave_nothing_behind(run_async: Run) -> None:
    rng = np.random.default_rng(11)

    async def leaves(engine: AsyncEngine, prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, ENDLESS):
            break

    async def reads(engine: AsyncEngine, prompt: list[int]) -> None:
        await engine.generate(prompt, ENDLESS).last()

    async def use(engine: AsyncEngine) -> None:
        tasks: list[asyncio.Task[None]] = []
        kept: list[OutputStream] = []
        for number in range(300):
            prompt = rng.integers(3, 97, int(rng.integers(1, 20))).tolist()
            match number % 5:
                case 0:
                    tasks.append(asyncio.create_task(leaves(engine, prompt)))
                case 1 | 2:
                    tasks.append(asyncio.create_task(reads(engine, prompt)))
                case 3:
                    engine.generate(prompt, ENDLESS)  # dropped at once
                case 4:
                    kept.append(engine.generate(prompt, ENDLESS, request_id=f"kept {number}"))
            if number % 25 == 0:
                await asyncio.sleep(0.01)
        for index, task in enumerate(tasks):
            if index % 3:
                task.cancel()
        await anext(kept[0])
        for stream in kept[:50]:
            stream.close()
        for stream in kept[50:]:
            engine.abort(stream.request_id)
        for task in tasks[::3]:
            task.cancel() if task.get_coro().__name__ == "reads" else await task  # type: ignore[union-attr]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.done() for task in tasks)
        assert sum(task.cancelled() for task in tasks) > 50, "too few were cancelled to say anything"
        del stream
        kept.clear()
        await idle(engine)
        assert_nothing_is_left(engine)
        # And it goes on as if nothing had been.
        assert len((await engine.generate([5], ENDLESS).last()).outputs[0].token_ids) == 100

    run_async(use)


@pytest.mark.parametrize("seed", range(2))
def test_cancellations_at_random_points_change_no_other_answer(
    run_async: Run, worded_directory: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 97, int(rng.integers(1, 30))).tolist() for _ in range(40)]
    for prompt in prompts[::3]:
        prompt[: len(prompt) * 2 // 3] = ([7, 8, 9] * 10)[: len(prompt) * 2 // 3]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            seed=number,
            n=1 + number % 2,
            stop=["w33"] if number % 4 == 0 else None,
            logprobs=1 if number % 5 == 0 else None,
        )
        for number in range(40)
    ]
    quits_after = np.where(rng.random(40) < 0.5, rng.integers(0, 12, 40), 1000).tolist()
    tight: Options = {"num_kv_blocks": 14, "block_size": 8, "watermark": 0.0, "max_model_len": 80}
    tight["admission"] = "optimistic"  # others would not let it come to preemptions
    with LLM(worded_directory, **(OPTIONS | tight)) as llm:
        expected = llm.generate(prompts, params)

    async def read(engine: AsyncEngine, number: int) -> RequestOutput | None:
        await asyncio.sleep(0.002 * (number % 7))
        task = asyncio.current_task()
        assert task is not None
        num_outputs, last = 0, None
        async for output in engine.generate(prompts[number], params[number]):
            last, num_outputs = output, num_outputs + 1
            if num_outputs > quits_after[number]:
                if number % 2:
                    return None
                task.cancel()  # at the next wait
        return last

    async def use(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(read(engine, number)) for number in range(40)]
        outputs = await asyncio.gather(*tasks, return_exceptions=True)
        kept = 0
        for output, other in zip(outputs, expected, strict=True):
            if isinstance(output, RequestOutput):
                kept += 1
                assert output.outputs == other.outputs
            else:
                assert output is None or isinstance(output, asyncio.CancelledError)
        assert 10 <= kept <= 35
        await idle(engine)
        assert (await engine.stats()).num_preemptions > 0

    run_async(use, depth=2, **tight)


def test_closing_aborts_or_drains(run_async: Run) -> None:
    async def aborts(engine: AsyncEngine) -> None:
        streams = [engine.generate([5 + index], ENDLESS) for index in range(6)]
        await anext(streams[0])
        await engine.aclose()
        await engine.aclose()
        for stream in streams:
            output = await stream.last()
            assert output.outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="the engine takes no more work: it was closed"):
            engine.generate([5])
        with pytest.raises(EngineDeadError, match="it was closed"):
            await engine.stats()

    async def drains(engine: AsyncEngine) -> None:
        streams = [engine.generate([5 + index], ENDLESS) for index in range(6)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.aclose(drain=True), 0.01)
        with pytest.raises(EngineDeadError, match="it was closed"):
            engine.generate([5])
        await engine.aclose(drain=True)
        for stream in streams:
            output = await stream.last()
            assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 100)

    run_async(aborts, is_dead=True)
    run_async(drains, is_dead=True)


def test_a_lost_device_ends_every_stream_with_its_error(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = [engine.generate([5 + index], ENDLESS) for index in range(6)]
        await anext(streams[0])

        def lost(_ops: Any) -> Any:
            raise DeviceLostError("it is gone")

        monkeypatch.setattr(engine._assembly.model.network, "forward", lost)
        for stream in streams:
            output = await stream.last()
            assert output.outputs[0].finish_reason == "error"
            assert output.error is not None
            assert "it is gone" in output.error
        await engine._desk.ended.wait()
        with pytest.raises(EngineDeadError, match="it is gone"):
            engine.generate([5])

    run_async(use, is_dead=True)


def test_a_turn_cut_short_ends_every_stream_with_its_error(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = [engine.generate([5 + index], ENDLESS) for index in range(6)]
        await anext(streams[0])

        def breaks(*_args: object) -> Any:
            raise MemoryError("no room")

        monkeypatch.setattr(engine._assembly.engine, "_take_result", breaks)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="it has died of MemoryError: no room"):
                await stream.last()
        with pytest.raises(EngineDeadError, match="it has died of MemoryError: no room"):
            engine.generate([5])

    run_async(use, is_dead=True)


def test_an_engine_belongs_to_one_loop(worded_directory: Path) -> None:
    before = set(threading.enumerate())
    engine = AsyncEngine(EngineConfig(model=str(worded_directory), **OPTIONS))
    with pytest.raises(NoriaError, match="used inside a running event loop; elsewhere use LLM"):
        engine.generate([5])

    async def use(engine: AsyncEngine) -> None:
        await engine.generate([5], GREEDY).last()

    async def leave_open(engine: AsyncEngine) -> None:
        streams.append(engine.generate([5], ENDLESS))
        await anext(streams[0])

    streams: list[OutputStream] = []
    with asyncio.Runner() as runner:
        runner.run(use(engine))
        with pytest.raises(NoriaError, match="belongs to another event loop; make one AsyncEngine for each"):
            asyncio.run(use(engine))
        runner.run(leave_open(engine))
    # The loop was closed with a stream open: nobody can read it, and nothing runs on for it.
    streams.clear()
    del engine
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_a_stream_keeps_its_engine(worded_directory: Path) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        config = EngineConfig(model=str(worded_directory), **OPTIONS)
        stream = AsyncEngine(config).generate([5], GREEDY)
        gc.collect()
        assert len((await stream.last()).outputs[0].token_ids) == 8

    asyncio.run(main())
    gc.collect()
    assert set(threading.enumerate()) <= before
