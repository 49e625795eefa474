"""`AsyncEngine` on a tiny model: streams, their ends, and what they leave behind."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria import (
    LLM,
    AsyncEngine,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    NoriaError,
    OutputStream,
    RejectedError,
    RequestOutput,
    SamplingParams,
    TokenizerError,
    TokenOutOfRangeError,
)
from noria.hints import SchedulingHints
from noria.runner.base import DeviceLostError

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


@pytest.fixture
def run(worded_directory: Path) -> Iterator[Run]:
    """Runs something with an engine; asserts that no request, block, seat, task or thread stays behind."""
    before = set(threading.enumerate())

    def with_engine(use: Use, *, is_dead: bool = False, **options: Any) -> None:
        async def main() -> None:
            config = EngineConfig(model=str(worded_directory), **(OPTIONS | options))
            async with AsyncEngine(config) as engine:
                await use(engine)
                if not is_dead:
                    await idle(engine)
                    assert_nothing_is_left(engine)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(main())

    yield with_engine
    gc.collect()
    assert set(threading.enumerate()) <= before


async def idle(engine: AsyncEngine) -> None:
    """Waits until nothing runs any more."""
    async with asyncio.timeout(120):
        while engine._desk.outputs:
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


def asks() -> list[tuple[list[int], SamplingParams]]:
    """Prompts and parameters of many kinds, whose answers do not depend on their number."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 97, length).tolist() for length in (1, 3, 9, 17, 40, 5, 6, 7, 30, 12)]
    kinds: list[Options] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 4, "n": 3},
        {"stop": ["w1"], "temperature": 1.0, "seed": 5},
        {"stop": ["w4 w"], "include_stop_str_in_output": True, "temperature": 1.0, "seed": 6},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"logprobs": 0, "n": 2, "temperature": 1.0, "seed": 7, "stop": ["7"]},
        {"detokenize": False},
        {"repetition_penalty": 1.3, "bad_words": ["w5"], "min_tokens": 3},
        {"stop_token_ids": list(range(20, 60)), "temperature": 1.0, "seed": 8, "logprobs": 1},
    ]
    defaults: Options = {"temperature": 0.0, "max_tokens": 20}
    params = [SamplingParams(**(defaults | kind)) for kind in kinds]
    return list(zip(prompts, params, strict=True))


@pytest.fixture(scope="module")
def expected(worded_directory: Path) -> list[RequestOutput]:
    with LLM(worded_directory, **OPTIONS) as llm:
        prompts, params = zip(*asks(), strict=True)
        return llm.generate(list(prompts), list(params))


def assert_same_answers(output: RequestOutput, other: RequestOutput) -> None:
    assert output.finished
    assert output.outputs == other.outputs
    assert (output.prompt, output.prompt_token_ids) == (other.prompt, other.prompt_token_ids)
    assert output.prompt_logprobs == other.prompt_logprobs
    assert output.metrics is not None
    assert output.metrics.finished_time is not None


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_grows_to_what_generate_gives(run: Run, expected: list[RequestOutput], depth: int) -> None:
    async def read(stream: OutputStream) -> RequestOutput:
        last: RequestOutput | None = None
        async for output in stream:
            for index, answer in enumerate(output.outputs):
                assert answer.index == index
                if last is not None and index < len(last.outputs):
                    old = last.outputs[index]
                    assert answer.text.startswith(old.text)
                    assert answer.token_ids[: len(old.token_ids)] == old.token_ids
                    if old.logprobs is not None and answer.logprobs is not None:
                        assert answer.logprobs[: len(old.logprobs)] == old.logprobs
            last = output
        assert last is not None
        return last

    async def use(engine: AsyncEngine) -> None:
        streams = [engine.generate(prompt, params) for prompt, params in asks()]
        for output, other in zip(await asyncio.gather(*map(read, streams)), expected, strict=True):
            assert_same_answers(output, other)
        assert [stream.request_id for stream in streams] == [str(number) for number in range(len(streams))]

    run(use, depth=depth)


def test_deltas_join_to_what_generate_gives(run: Run, expected: list[RequestOutput]) -> None:
    async def read(stream: OutputStream, other: RequestOutput) -> int:
        texts, ids, logprobs, reasons = {}, {}, {}, {}
        num_outputs = 0
        async for output in stream:
            num_outputs += 1
            assert output.outputs, "an output without news"
            for answer in output.outputs:
                index = answer.index
                assert index not in reasons, "an answer went on after its end"
                texts[index] = texts.get(index, "") + answer.text
                ids[index] = [*ids.get(index, []), *answer.token_ids]
                logprobs[index] = [*logprobs.get(index, []), *(answer.logprobs or [])]
                if answer.finish_reason is not None:
                    reasons[index] = (answer.finish_reason, answer.stop_reason, answer.cumulative_logprob)
        for whole in other.outputs:
            assert texts[whole.index] == whole.text
            assert ids[whole.index] == whole.token_ids
            assert logprobs[whole.index] == (whole.logprobs or [])
            assert reasons[whole.index][:2] == (whole.finish_reason, whole.stop_reason)
            assert reasons[whole.index][2] == pytest.approx(whole.cumulative_logprob)
        return num_outputs

    async def use(engine: AsyncEngine) -> None:
        streams = [engine.generate(*ask, output_kind="delta") for ask in asks()]
        counts = await asyncio.gather(*map(read, streams, expected))
        assert max(counts) > 10  # they did come in pieces

    run(use)


def test_final_is_one_output(run: Run, expected: list[RequestOutput]) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = [engine.generate(*ask, output_kind="final") for ask in asks()]
        for stream, other in zip(streams, expected, strict=True):
            outputs = [output async for output in stream]
            assert len(outputs) == 1
            assert_same_answers(outputs[0], other)
            with pytest.raises(NoriaError, match="was read to its end, or closed"):
                await stream.last()

    run(use)


def test_a_long_text_is_read_beside_the_loop(run: Run, worded_directory: Path) -> None:
    text = "w5 " * 30 + " " * 5000 + "w6"
    with LLM(worded_directory, **OPTIONS) as llm:
        other = llm.generate(text, GREEDY)[0]

    async def use(engine: AsyncEngine) -> None:
        stream = engine.generate(text, GREEDY)
        assert any(thread.name.startswith("noria-text") for thread in threading.enumerate())
        assert_same_answers(await stream.last(), other)
        dropped = engine.generate(text + "w7", GREEDY)
        dropped.close()
        kept = engine.generate({"prompt": text + " w8"}, GREEDY, request_id="kept")
        assert engine.abort("kept")
        assert (await kept.last()).outputs[0].finish_reason == "abort"

    run(use)


def test_a_thousand_open_streams_cost_no_thread_and_one_wake_up_a_turn(run: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        loop, num_wakes = asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **options: Any) -> asyncio.Handle:
            nonlocal num_wakes
            num_wakes += 1
            return wake(*args, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        num_threads = threading.active_count()
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        streams = [engine.generate([5, 6, index % 97], params) for index in range(1000)]
        assert len(engine._desk.outputs) == 1000
        outputs = await asyncio.gather(*(stream.last() for stream in streams))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [5] * 1000
        assert threading.active_count() == num_threads
        # What a turn says, and what is said before it: a submit's outcome.
        assert num_wakes <= 2 * (await engine.stats()).num_steps + 2 < 1000

    run(use, max_num_seqs=64, num_kv_blocks=600)


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(run: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        slow = engine.generate([5], ENDLESS)
        first = await anext(slow)
        for _ in range(3):
            await engine.generate([6], ENDLESS).last()
        (rest,) = [output async for output in slow]
        assert len(rest.outputs[0].token_ids) == 100
        assert rest.outputs[0].text.startswith(first.outputs[0].text)

    run(use)


def test_a_bad_request_is_the_error_of_its_own_stream(run: Run) -> None:
    def breaks(_ids: list[int], _logits: Any) -> Any:
        raise ValueError("a processor of the user's")

    async def use(engine: AsyncEngine) -> None:
        good = [engine.generate([5, index], GREEDY) for index in range(3, 6)]
        bad = {
            "id 97": engine.generate([97], GREEDY),
            "it must be a text": engine.generate(5.0, GREEDY),  # type: ignore[arg-type]
            "The prompt is empty": engine.generate([], GREEDY),
            "token id 97; the model has 97": engine.generate([5], SamplingParams(allowed_token_ids=[97])),
            "its priority is 'high'": engine.generate([5], priority="high"),  # type: ignore[arg-type]
        }
        for text, stream in bad.items():
            with pytest.raises(RejectedError, match=text):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        broken = await engine.generate([5], SamplingParams(logits_processors=[breaks])).last()
        assert broken.outputs[0].finish_reason == "error"
        assert broken.error is not None
        with pytest.raises(TokenizerError, match="no chat template"):
            await engine.chat([{"role": "user", "content": "w5"}]).last()
        outputs = await asyncio.gather(*(stream.last() for stream in good))
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        with pytest.raises(
            ConfigError, match="output_kind is 'chunks'; it must be cumulative, delta or final"
        ):
            engine.generate([5], output_kind="chunks")  # type: ignore[arg-type]

    run(use)


def test_a_name_is_taken_until_its_request_has_ended(run: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        first = engine.generate([5], GREEDY, request_id="a", hints=SchedulingHints(tenant="b"))
        with pytest.raises(RejectedError, match="request_id 'a' is taken"):
            engine.generate([6], GREEDY, request_id="a")
        assert (await first.last()).request_id == "a"
        assert (await engine.generate([6], GREEDY, request_id="a").last()).request_id == "a"
        assert not engine.abort("a")

    run(use)


def test_abort_ends_a_stream_with_what_it_has(run: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.generate([5], ENDLESS, request_id="a")
        first = await anext(stream)
        assert engine.abort("a")
        last = await stream.last()
        assert last.outputs[0].finish_reason == "abort"
        assert last.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
        assert len(last.outputs[0].token_ids) < 100

    run(use)


def test_300_abandoned_streams_and_cancelled_tasks_leave_nothing_behind(run: Run) -> None:
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
        assert all(not task.cancelled() or task.done() for task in tasks)
        del stream
        kept.clear()
        await idle(engine)
        assert_nothing_is_left(engine)
        # And it goes on as if nothing had been.
        assert len((await engine.generate([5], ENDLESS).last()).outputs[0].token_ids) == 100

    run(use)


@pytest.mark.parametrize("seed", range(2))
def test_cancellations_at_random_points_change_no_other_answer(
    run: Run, worded_directory: Path, seed: int
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

    run(use, depth=2, **tight)


def test_closing_aborts_or_drains(run: Run) -> None:
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

    run(aborts, is_dead=True)
    run(drains, is_dead=True)


def test_a_lost_device_ends_every_stream_with_its_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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

    run(use, is_dead=True)


def test_a_turn_cut_short_ends_every_stream_with_its_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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

    run(use, is_dead=True)


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


def test_one_task_reads_a_stream(run: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.generate([5], SamplingParams(max_tokens=8, temperature=0), output_kind="final")
        reading = asyncio.create_task(stream.last())
        await asyncio.sleep(0)
        with pytest.raises(NoriaError, match="request '0' is being read by another task"):
            await anext(stream)
        assert (await reading).finished

    run(use)


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


def test_a_token_that_no_vocabulary_has_is_named(run: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(TokenOutOfRangeError):
            await engine.generate([10**9]).last()

    run(use)
