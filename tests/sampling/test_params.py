"""`SamplingParams`: what is taken, what is refused, and with which words."""

import dataclasses
import math

import numpy as np
import pytest

from noria.errors import RejectedError, SamplingParamsError
from noria.sampling import SamplingParams
from noria.sampling.params import default_params


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.stop_token_ids) == (None, 16, ())
    assert (params.ignore_eos, params.skip_special_tokens, params.detokenize) == (False, True, True)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", math.nan, "temperature must be a finite number, 0 or more; got nan"),
        ("temperature", math.inf, "temperature must be a finite number, 0 or more; got inf"),
        ("temperature", -0.5, "temperature must be a finite number, 0 or more; got -0.5"),
        ("temperature", "hot", "temperature must be a finite number, 0 or more; got 'hot'"),
        ("temperature", True, "temperature must be a finite number, 0 or more; got True"),
        ("temperature", None, "temperature must be a finite number, 0 or more; got None"),
        ("temperature", 10**400, "temperature must be a finite number, 0 or more; got 1000"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1; got 0.0"),
        ("top_p", 1.0001, "top_p must be above 0 and at most 1; got 1.0001"),
        ("top_p", math.nan, "top_p must be above 0 and at most 1; got nan"),
        ("top_p", [0.9], r"top_p must be a number above 0, up to 1; got \[0.9\]"),
        ("min_p", -0.1, "min_p must be from 0 to 1; got -0.1"),
        ("min_p", 1.5, "min_p must be from 0 to 1; got 1.5"),
        ("min_p", math.nan, "min_p must be from 0 to 1; got nan"),
        ("top_k", -2, r"top_k must be 1 or more \(0 or -1 turns it off\); got -2"),
        ("top_k", 2.0, r"top_k must be an integer, 1 or more \(0 or -1 turns it off\); got 2.0"),
        ("top_k", False, r"top_k must be an integer, 1 or more \(0 or -1 turns it off\); got False"),
        ("max_tokens", 0, "max_tokens must be 1 or more; got 0"),
        ("max_tokens", -3, "max_tokens must be 1 or more; got -3"),
        ("max_tokens", 1.5, "max_tokens must be an integer, 1 or more, or None; got 1.5"),
        ("seed", 2**63, "seed must be a signed 64-bit integer .* got 9223372036854775808"),
        ("seed", -(2**63) - 1, "seed must be a signed 64-bit integer .* got -9223372036854775809"),
        ("seed", "7", "seed must be a signed 64-bit integer or None; got '7'"),
        ("stop_token_ids", 5, "stop_token_ids must be a sequence of token ids; got 5"),
        ("stop_token_ids", "12", "stop_token_ids must be a sequence of token ids; got '12'"),
        ("stop_token_ids", [3, -1], r"stop_token_ids\[1\] must be from 0 to 2147483647; got -1"),
        ("stop_token_ids", [3, "4"], r"stop_token_ids\[1\] must be a token id; got '4'"),
        ("n", 0, "n must be 1 or more; got 0"),
        ("n", 16385, "n must be at most 16384; got 16385"),
        ("n", 1.5, "n must be an integer, 1 or more; got 1.5"),
        ("repetition_penalty", 0.0, "repetition_penalty must be a finite number above 0; got 0.0"),
        ("repetition_penalty", math.inf, "repetition_penalty must be a finite number above 0; got inf"),
        ("presence_penalty", 2.5, "presence_penalty must be from -2 to 2; got 2.5"),
        ("frequency_penalty", math.nan, "frequency_penalty must be from -2 to 2; got nan"),
        ("frequency_penalty", "1", "frequency_penalty must be a number from -2 to 2; got '1'"),
        ("logit_bias", [1], r"logit_bias must be a mapping from token ids to biases; got \[1\]"),
        ("logit_bias", {3: 101}, r"logit_bias\[3\] must be from -100 to 100; got 101"),
        ("logit_bias", {-3: 1}, "a key of logit_bias must be from 0 to 2147483647; got -3"),
        ("logit_bias", {"a": 1}, "a key of logit_bias must be a token id; got 'a'"),
        ("allowed_token_ids", [], r"allowed_token_ids must be at least one token id, or None; got \[\]"),
        ("allowed_token_ids", [-1], r"allowed_token_ids\[0\] must be from 0 to 2147483647; got -1"),
        ("bad_words", ["a", ""], r"bad_words\[1\] must be a text that is not empty; got ''"),
        ("stop", 5, "stop must be a text or a list of texts; got 5"),
        ("stop", [""], r"stop\[0\] must be a text that is not empty; got ''"),
        ("min_tokens", -1, "min_tokens must be 0 or more; got -1"),
        ("min_tokens", 17, "min_tokens must be at most max_tokens, 16; got 17"),
        ("logprobs", -2, r"logprobs must be 0 or more \(-1 tells all\), or None; got -2"),
        ("prompt_logprobs", True, "prompt_logprobs must be an integer, 0 or more .* got True"),
        ("logits_processors", [5], r"logits_processors must be a list of functions, or None; got \[5\]"),
        ("structured_outputs", {}, "structured_outputs must be StructuredOutputsParams or None; got {}"),
        ("include_stop_str_in_output", 1, "include_stop_str_in_output must be True or False; got 1"),
        ("ignore_eos", 1, "ignore_eos must be True or False; got 1"),
        ("detokenize", None, "detokenize must be True or False; got None"),
    ],
)
def test_a_bad_value_is_named_with_its_limit(name: str, value: object, expected: str) -> None:
    with pytest.raises(SamplingParamsError, match=f"^{expected}") as raised:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert isinstance(raised.value, RejectedError)
    assert "\n" not in str(raised.value)
    if isinstance(value, int | float | str):
        assert raised.value.value is value or raised.value.value == value or value != value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e300),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("min_p", 1),
        ("top_k", -1),
        ("top_k", 10**9),
        ("max_tokens", None),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("stop_token_ids", [1, 2]),
    ],
)
def test_a_value_at_its_limit_is_taken(name: str, value: object) -> None:
    taken = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
    assert taken == (tuple(value) if isinstance(value, list) else value)


def test_numbers_of_numpy_are_taken_as_python_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        stop_token_ids=[np.int32(7)],  # type: ignore[list-item]
    )
    assert (type(params.temperature), params.temperature) == (float, 0.5)
    assert (type(params.top_k), params.top_k) == (int, 3)
    assert params.stop_token_ids == (7,)
    assert type(params.stop_token_ids[0]) is int


def test_lists_are_taken_as_they_are_meant() -> None:
    params = SamplingParams(
        stop="a", bad_words=None, logit_bias={"5": 1, 6: -2}, max_tokens=None, min_tokens=99
    )  # type: ignore[dict-item]
    assert (params.stop, params.bad_words, params.logit_bias) == (("a",), (), {5: 1.0, 6: -2.0})
    with pytest.raises(SamplingParamsError, match="detokenize must be True where stop has texts; got False"):
        SamplingParams(stop="a", detokenize=False)


def test_the_defaults_of_a_model_are_checked() -> None:
    assert default_params({"temperature": 0.6, "top_k": 20.0}) == SamplingParams(temperature=0.6, top_k=20)
    assert default_params({}) == SamplingParams()
    with pytest.raises(
        SamplingParamsError, match=r"generation_config\.json of the model: top_p must be above 0"
    ):
        default_params({"top_p": 0})


def test_parameters_are_frozen_and_hashable() -> None:
    params = SamplingParams(stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop_token_ids=(1,)))
    assert dataclasses.replace(params, temperature=0.0).is_greedy


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1.1e-5).is_greedy
