"""`AsyncEngine` on a tiny model: its streams."""

import asyncio
import shutil
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
)

from noria import (
    LLM,
    AsyncEngine,
    ConfigError,
    EngineConfig,
    NoriaError,
    OutputStream,
    RejectedError,
    RequestOutput,
    SamplingParams,
    TokenizerError,
    TokenOutOfRangeError,
)
from noria.hints import SchedulingHints


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
def test_a_stream_grows_to_what_generate_gives(
    run_async: Run, expected: list[RequestOutput], depth: int
) -> None:
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

    run_async(use, depth=depth)


def test_deltas_join_to_what_generate_gives(run_async: Run, expected: list[RequestOutput]) -> None:
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

    run_async(use)


def test_final_is_one_output(run_async: Run, expected: list[RequestOutput]) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = [engine.generate(*ask, output_kind="final") for ask in asks()]
        for stream, other in zip(streams, expected, strict=True):
            outputs = [output async for output in stream]
            assert len(outputs) == 1
            assert_same_answers(outputs[0], other)
            with pytest.raises(NoriaError, match="was read to its end, or closed"):
                await stream.last()

    run_async(use)


def test_a_long_text_is_read_beside_the_loop(run_async: Run, worded_directory: Path) -> None:
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

    run_async(use)


def test_a_thousand_open_streams_cost_no_thread_and_one_wake_up_a_turn(run_async: Run) -> None:
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

    run_async(use, max_num_seqs=64, num_kv_blocks=600)


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(run_async: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        slow = engine.generate([5], ENDLESS)
        first = await anext(slow)
        for _ in range(3):
            await engine.generate([6], ENDLESS).last()
        (rest,) = [output async for output in slow]
        assert len(rest.outputs[0].token_ids) == 100
        assert rest.outputs[0].text.startswith(first.outputs[0].text)

    run_async(use)


def test_a_bad_request_is_the_error_of_its_own_stream(run_async: Run) -> None:
    def breaks(_ids: list[int], _logits: Any) -> Any:
        raise ValueError("a processor of the user's")

    def interrupts(_ids: list[int], _logits: Any) -> Any:
        raise KeyboardInterrupt

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
        for fails in (breaks, interrupts):
            broken = await engine.generate([5], SamplingParams(logits_processors=[fails])).last()
            assert broken.outputs[0].finish_reason == "error"
            assert broken.error is not None
            assert broken.error.startswith("its logits processor failed: ")
        with pytest.raises(TokenizerError, match="no chat template"):
            await engine.chat([{"role": "user", "content": "w5"}]).last()
        outputs = await asyncio.gather(*(stream.last() for stream in good))
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        with pytest.raises(
            ConfigError, match="output_kind is 'chunks'; it must be cumulative, delta or final"
        ):
            engine.generate([5], output_kind="chunks")  # type: ignore[arg-type]

    run_async(use)


def test_a_name_is_taken_until_its_request_has_ended(run_async: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        first = engine.generate([5], GREEDY, request_id="a", hints=SchedulingHints(tenant="b"))
        with pytest.raises(RejectedError, match="request_id 'a' is taken"):
            engine.generate([6], GREEDY, request_id="a")
        assert (await first.last()).request_id == "a"
        assert (await engine.generate([6], GREEDY, request_id="a").last()).request_id == "a"
        assert not engine.abort("a")

    run_async(use)


def test_one_task_reads_a_stream(run_async: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.generate([5], SamplingParams(max_tokens=8, temperature=0), output_kind="final")
        reading = asyncio.create_task(stream.last())
        await asyncio.sleep(0)
        with pytest.raises(NoriaError, match="request '0' is being read by another task"):
            await anext(stream)
        assert (await reading).finished

    run_async(use)


def test_a_token_that_no_vocabulary_has_is_named(run_async: Run) -> None:
    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(TokenOutOfRangeError):
            await engine.generate([10**9]).last()

    run_async(use)


def test_a_request_without_parameters_is_sampled_as_the_library_does(
    worded_directory: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(worded_directory, directory)
    (directory / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 5, "do_sample": true}')
    with LLM(directory, **OPTIONS) as llm:
        params = llm.default_sampling_params
        (expected,) = llm.generate([5, 6])

    async def main() -> RequestOutput:
        async with AsyncEngine(EngineConfig(model=str(directory), **OPTIONS)) as engine:
            assert engine.default_sampling_params == params
            return await engine.generate([5, 6]).last()

    assert (params.temperature, params.top_k) == (0.7, 5)
    assert asyncio.run(main()).outputs == expected.outputs
