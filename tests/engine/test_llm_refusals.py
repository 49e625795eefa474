"""What `LLM` refuses, and what a request that fails leaves of the others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_harness import GREEDY, MakeLLM, assert_nothing_is_left, ids

from noria import (
    LLM,
    AsyncEngine,
    ConfigError,
    EmptyPromptError,
    EngineConfig,
    MaxTokensError,
    ModelError,
    PromptTooLongError,
    RejectedError,
    SamplingParams,
    SamplingParamsError,
    TokenizerError,
    TokenOutOfRangeError,
)

BAD = [
    ([], GREEDY, EmptyPromptError),
    ([5, 97], GREEDY, TokenOutOfRangeError),
    ([-1], GREEDY, TokenOutOfRangeError),
    ([2**33], GREEDY, TokenOutOfRangeError),
    ([2**80, 1], GREEDY, TokenOutOfRangeError),
    (np.array([2**63], dtype=np.uint64), GREEDY, TokenOutOfRangeError),
    ([5] * 100, GREEDY, PromptTooLongError),
    ({"prompt_token_ids": [5.5]}, GREEDY, RejectedError),
    ("lone \ud800 surrogate", GREEDY, RejectedError),
    ({"text": "w5"}, GREEDY, RejectedError),
]


@pytest.mark.parametrize(("prompt", "params", "error"), BAD)
def test_one_bad_prompt_is_named_and_none_is_run(
    make_llm: MakeLLM, prompt: Any, params: SamplingParams, error: type[RejectedError]
) -> None:
    llm = make_llm(max_model_len=100)
    with pytest.raises(error, match=r"^prompt 1: "):
        llm.generate([[5], prompt, [6]], [GREEDY, params, GREEDY])
    assert llm.stats().num_steps == 0
    assert_nothing_is_left(llm)
    outputs = llm.generate([[5], prompt, [6]], [GREEDY, params, GREEDY], on_error="return")
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error
    assert outputs[1].metrics is None
    assert ids([outputs[0], outputs[2]]) == ids(llm.generate([[5], [6]], GREEDY))


def test_an_id_that_no_core_can_hold_is_told_the_vocabulary(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for token_id in (97, 2**31, 2**80, -(2**80)):
        with pytest.raises(TokenOutOfRangeError, match=rf"^prompt 0: .* {token_id}.* ids 0 to 96") as caught:
            llm.generate([[5, token_id]], GREEDY)
        assert (caught.value.value, caught.value.limit) == (token_id, 97)


def test_a_kv_cache_is_not_announced_before_it_is_there(
    make_llm: MakeLLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise ConfigError("no memory", name="num_kv_blocks", value=1)

    with pytest.raises(ConfigError, match=r"num_kv_blocks is 536870912; .* 1 to 134217727"):
        make_llm(num_kv_blocks=2**29)
    with monkeypatch.context() as patched:
        patched.setattr("noria.assembly.KvCache", refuses)
        with pytest.raises(ConfigError, match="no memory"):
            make_llm()
    assert "KV cache" not in capsys.readouterr().err
    make_llm()
    assert "KV cache: 2 · " in capsys.readouterr().err


def test_numbers_of_arguments_must_agree(llm: LLM) -> None:
    with pytest.raises(RejectedError, match="2 sampling_params were given for 3 prompts"):
        llm.generate([[5], [6], [7]], [GREEDY, GREEDY])
    with pytest.raises(RejectedError, match="1 priorities were given for 2 prompts"):
        llm.generate([[5], [6]], GREEDY, priority=[1])
    with pytest.raises(RejectedError, match="priority is 1; it must be a list"):
        llm.generate([[5], [6]], GREEDY, priority=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_error is 'ignore'"):
        llm.generate([[5]], GREEDY, on_error="ignore")  # type: ignore[arg-type]


def test_what_cannot_be_a_model_is_named() -> None:
    with pytest.raises(ConfigError, match="model is None; it must be the path"):
        LLM(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model is 5; it must be the path"):
        EngineConfig(model=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"AsyncEngine takes no max_num_seqs; give it EngineConfig\(model"):
        AsyncEngine("model", max_num_seqs=2)  # type: ignore[arg-type]


def test_a_stop_token_outside_the_vocabulary_is_named(llm: LLM) -> None:
    with pytest.raises(SamplingParamsError, match="stop_token_ids has the token id 97; the model has 97"):
        llm.generate([[5]], SamplingParams(stop_token_ids=[3, 97]))


def test_a_request_that_breaks_its_step_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(llm.generate([[5], [6]], GREEDY))
    network = llm.model.network
    forward = network.forward

    def breaks_on_96(ops: Any) -> Any:
        if (ops.inputs.input_ids == 96).any():
            raise ValueError("token 96 is poison")
        return forward(ops)

    monkeypatch.setattr(network, "forward", breaks_on_96)
    outputs = llm.generate([[5], [96, 4], [6]], GREEDY)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].error == "its step failed: ValueError: token 96 is poison"
    kept = [answer for answer in ids([outputs[0], outputs[2]]) if 96 not in answer]
    assert kept == [answer for answer in expected if 96 not in answer]
    assert_nothing_is_left(llm)


def test_a_model_without_a_tokenizer_takes_ids_alone(make_llm: MakeLLM, tiny_directory: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        make_llm(tiny_directory)
    llm = make_llm(tiny_directory, skip_tokenizer_init=True)
    assert llm.tokenizer is None
    with pytest.raises(RejectedError, match=r"prompt 0: it is a text, but the engine has no tokenizer"):
        llm.generate("w5")
    output = llm.generate([5], GREEDY)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (8, "")


def test_a_model_that_is_none_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"model 'org/name' is (neither|not) a path"):
        LLM("org/name")
    with pytest.raises(ConfigError, match="model is ''; give a model's folder"):
        LLM("")
    with pytest.raises(ConfigError, match="depth is 9"):
        LLM("org/name", depth=9)


def test_max_tokens_below_one_is_refused_by_its_own_error() -> None:
    with pytest.raises(RejectedError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    assert issubclass(MaxTokensError, RejectedError)


@pytest.mark.parametrize("bad", ["a", 1.5, None, 2**31, True])
def test_a_bad_priority_is_refused_by_name_and_leaves_nothing_queued(llm: LLM, bad: object) -> None:
    with pytest.raises(RejectedError, match="prompt 1: its priority is"):
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5), priority=[0, bad])  # type: ignore[list-item]
    assert not llm.engine.has_work
