"""`LLM.score` against transformers, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import save_model, tiny_config, token_ids
from transformers import PreTrainedModel

from noria import LLM, PromptTooLongError, RejectedError


@pytest.fixture(scope="module", params=["torch", "cpu"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, PreTrainedModel]]:
    directory = tmp_path_factory.mktemp("scored")
    peer = save_model(directory, tiny_config("llama"))
    with LLM(
        directory,
        dtype="float64" if request.param == "torch" else "float32",
        backend=request.param,
        skip_tokenizer_init=True,
        num_kv_blocks=40,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    ) as llm:
        yield llm, peer


def logprobs(peer: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[len(ids) - 1, vocab_size]`."""
    with torch.inference_mode():
        return peer(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


def test_continuations_are_scored_as_transformers_does(made: tuple[LLM, PreTrainedModel]) -> None:
    llm, peer = made
    prompts = [token_ids(50, 0), token_ids(7, 1), token_ids(1, 2)]
    more = [token_ids(9, 3), token_ids(40, 4), token_ids(1, 5)]
    best = int(logprobs(peer, [*prompts[1], 0])[-1].argmax())
    prompts.append(prompts[1])
    more.append([best])
    for prompt, continuation, scored in zip(prompts, more, llm.score(prompts, more), strict=True):
        rows = logprobs(peer, prompt + continuation)[len(prompt) - 1 :]
        expected = rows.gather(1, torch.tensor(continuation)[:, None]).flatten()
        assert (scored.prompt_token_ids, scored.token_ids) == (prompt, continuation)
        assert scored.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert scored.logprob == pytest.approx(float(expected.sum()), abs=1e-3)
        assert scored.is_greedy == (rows.argmax(-1).tolist() == continuation)
    assert scored.is_greedy


def test_texts_are_scored_by_themselves(made: tuple[LLM, PreTrainedModel]) -> None:
    llm, peer = made
    ids = token_ids(45, 6)
    (scored,) = llm.score(ids)
    expected = logprobs(peer, ids).gather(1, torch.tensor(ids[1:])[:, None])
    assert (scored.prompt_token_ids, scored.token_ids) == (ids[:1], ids[1:])
    assert scored.logprob == pytest.approx(float(expected.sum()), abs=1e-3)


def test_joined_texts_are_split_where_their_tokens_part(worded_directory: Path) -> None:
    with LLM(worded_directory, dtype="float64", num_kv_blocks=20) as llm:
        by_text, spanning = llm.score(["w5 w6", "w5 w"], [" w7 w8", "6 w7"])
        by_ids, whole = llm.score([[5, 6], [5]], [[7, 8], [6, 7]])
    assert by_text == by_ids
    assert spanning == whole  # the prompt's last token was another: w6 is what follows w5


def test_what_cannot_be_scored_is_named(made: tuple[LLM, PreTrainedModel], worded_directory: Path) -> None:
    llm, _ = made
    for prompts, more, text in (
        ([[5], [6]], [[7]], "1 continuations were given for 2 prompts"),
        ([[5]], "a", "continuations is of type str"),
        ([[5, 6], [7]], None, "prompt 1: it has 1 tokens; at least 2 are needed"),
        ([[5]], [[]], "prompt 0: the continuation has no token"),
        ([[5]], [["a", "b"]], "prompt 0: token id 0 of its continuation is 'a'; it must be an integer"),
        ([[5], [6]], [[5], 3], "prompt 1: its continuation is of type int"),
        ([["a"]], [[5]], "prompt 0: token id 0 of a prompt is 'a'"),
        ([[]], [[5]], "prompt 0: the prompt has no token"),
        (["w5"], ["w6"], "prompt 0: it is a text, but the engine has no tokenizer"),
        ([[5]], [[10**6]], "prompt 0: .*1000000"),
    ):
        with pytest.raises(RejectedError, match=text):
            llm.score(prompts, more)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError, match="prompt 0"):
        llm.score([token_ids(10**4, 0)])
    with (
        LLM(worded_directory, dtype="float64", num_kv_blocks=20) as other,
        pytest.raises(RejectedError, match="prompt 0: the prompt and its continuation must both be texts"),
    ):
        other.score(["w5"], [[6]])
