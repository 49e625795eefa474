"""Prompts in every shape that vLLM's users know, and in none other."""

import numpy as np
import pytest

from noria.errors import RejectedError
from noria.prompts import Prompt, read_prompt, split_prompts


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", [Prompt("a", None)]),
        (["a", "b"], [Prompt("a", None), Prompt("b", None)]),
        ([1, 2], [Prompt(None, [1, 2])]),
        ([[1, 2], [3]], [Prompt(None, [1, 2]), Prompt(None, [3])]),
        ((1, 2), [Prompt(None, [1, 2])]),
        ([(1, 2)], [Prompt(None, [1, 2])]),
        (np.array([1, 2]), [Prompt(None, [1, 2])]),
        (np.array([[1, 2], [3, 4]]), [Prompt(None, [1, 2]), Prompt(None, [3, 4])]),
        ({"prompt": "a"}, [Prompt("a", None)]),
        ({"prompt_token_ids": [1]}, [Prompt(None, [1])]),
        ([{"prompt": "a", "prompt_token_ids": (1,)}, "b"], [Prompt("a", [1]), Prompt("b", None)]),
        ([], []),
        ("", [Prompt("", None)]),
        ([[]], [Prompt(None, [])]),
    ],
)
def test_a_prompt_is_read(prompts: object, expected: list[Prompt]) -> None:
    assert [read_prompt(prompt) for prompt in split_prompts(prompts)] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        (3, "of type int"),
        (np.array(5), "an array of no dimension"),
        ([np.array(5)], "of type int"),
        (b"bytes", "of type bytes"),
        ([b"bytes"], "of type bytes"),
        ([None], "of type NoneType"),
        ([[1, 2.5]], "token id 1 of a prompt is 2.5"),
        ([[True]], "token id 0 of a prompt is True"),
        ([1, "a"], "token id 1 of a prompt is 'a'"),
        ({}, "none of the keys"),
        ({"prompt": 3}, "prompt is of type int"),
        ({"prompt": "a", "multi_modal_data": {}}, "has the key 'multi_modal_data'"),
        ({"prompt_token_ids": "12"}, "of type str"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: object, text: str) -> None:
    with pytest.raises(RejectedError, match=text):
        [read_prompt(prompt) for prompt in split_prompts(prompts)]  # type: ignore[arg-type]
