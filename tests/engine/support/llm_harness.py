"""What several tests of `LLM` ask and look at."""

from collections.abc import Callable

from noria import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

MakeLLM = Callable[..., LLM]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_nothing_is_left(llm: LLM) -> None:
    core = llm.engine.core
    core.check()
    assert (core.num_running, core.num_waiting, core.num_in_flight, core.num_held_blocks) == (0, 0, 0, 0)
    assert not llm.engine.has_work
