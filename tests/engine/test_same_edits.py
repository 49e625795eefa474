"""Edited logits, seeds and log probabilities do not depend on batch, chunks, preemption or depth either."""

from pathlib import Path

import numpy as np
import pytest
import torch
from dense_reference import dense_logits
from tiny_llama import VOCAB_SIZE
from torch_harness import (
    Answer,
    Ask,
    TorchBench,
    TorchRun,
    answers_alone,
    expected_reason,
    reference_answer,
    tiny_config,
)

from noria.models import Model
from noria.sampling.params import SamplingParams
from noria.scores import TokenLogprobs

WORDS = tuple((token,) for token in range(20)) + tuple((token, token + 1) for token in range(30, 60))


def make_ask(index: int) -> Ask:
    rng = np.random.default_rng(index)
    prompt = tuple(rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 120))).tolist())
    kind = index % 8
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.8, 1.5])),
        top_p=float(rng.choice([1.0, 0.6, 0.9])),
        seed=index * 77,
        max_tokens=40,
        repetition_penalty=1.3 if kind in (0, 1) else 1.0,
        presence_penalty=0.8 if kind in (1, 2) else 0.0,
        frequency_penalty=-0.4 if kind in (2, 3) else 0.0,
        logit_bias={int(token): 3.0 for token in rng.integers(0, VOCAB_SIZE, 5)} if kind == 4 else None,
        allowed_token_ids=range(40, 80) if kind == 5 else None,
        min_tokens=25 if kind == 6 else 0,
        logprobs=3 if index % 3 == 0 else None,
        prompt_logprobs=2 if index % 6 == 0 else None,
    )
    stop = tuple(range(0, VOCAB_SIZE, 3)) if kind == 6 else ()
    return Ask(prompt, params, stop, bad_words=WORDS if kind == 7 else ())


ASKS = [make_ask(index) for index in range(24)]


def logprobs_of(run: TorchRun) -> list[tuple[list[TokenLogprobs], list[TokenLogprobs | None]]]:
    told = []
    for handle, ask, answer in zip(run.handles, ASKS, run.finished, strict=True):
        output = prompt = []
        if ask.params.logprobs is not None:
            output = run.scores.output(handle, len(answer.token_ids), ask.params.logprobs, str)
        if ask.params.prompt_logprobs is not None:
            prompt = run.scores.prompt(handle, len(ask.prompt), ask.params.prompt_logprobs, str)
        told.append((output, prompt))
    return told


@pytest.fixture(scope="module")
def alone(tiny_model: Model) -> list[Answer]:
    return answers_alone(tiny_model, ASKS)


@pytest.fixture(scope="module")
def references(tiny_directory: Path, alone: list[Answer]) -> list[torch.Tensor]:
    """Log probabilities of all places of each prompt and its answer but the first: `[n, vocab_size]`."""
    return [
        dense_logits(tiny_directory, [*ask.prompt, *ids][:-1]).log_softmax(-1)
        for ask, (ids, _) in zip(ASKS, alone, strict=True)
    ]


def test_one_at_a_time_they_are_the_dense_references(
    tiny_directory: Path, tiny_model: Model, alone: list[Answer]
) -> None:
    for ask, (ids, reason) in zip(ASKS, alone, strict=True):
        assert ids == reference_answer(tiny_directory, tiny_model, ask, ids)
        assert reason == expected_reason(ask, ids)
        if ask.params.min_tokens:
            assert len(ids) > ask.params.min_tokens
        if ask.bad_words:
            assert not any(
                tuple(ids[at : at + len(word)]) == word for word in WORDS for at in range(len(ids))
            )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("how", ["batch", "chunked", "preempted"])
def test_nothing_about_the_schedule_changes_a_token_or_a_logprob(
    tiny_model: Model, alone: list[Answer], references: list[torch.Tensor], how: str, depth: int
) -> None:
    changes: dict[str, object] = {
        "batch": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
        "chunked": {"long_prefill_token_threshold": 7, "max_partial_prefills": 3},
        "preempted": {"num_kv_blocks": 18, "watermark": 0.0, "max_num_seqs": 12},
    }[how]
    run = TorchBench(tiny_model, tiny_config(depth=depth, **changes)).run(ASKS)  # type: ignore[arg-type]
    assert run.answers == alone
    assert (run.stats.num_preemptions > 10) == (how == "preempted")
    num_told = 0
    for ask, (ids, _), reference, (output, prompt) in zip(
        ASKS, alone, references, logprobs_of(run), strict=True
    ):
        text = [*ask.prompt, *ids]
        for at, told in [*enumerate(output, start=len(ask.prompt)), *enumerate(prompt)]:
            if told is None:
                assert at == 0
                continue
            row, token = reference[at - 1], text[at]
            num = 3 if at >= len(ask.prompt) else 2
            best = row.topk(num).indices.tolist()
            assert list(told) == list(dict.fromkeys([token, *best]))
            assert told[token].rank == 1 + int((row > row[token]).sum())
            for token_id, logprob in told.items():
                assert abs(logprob.logprob - float(row[token_id])) < 1e-5
                assert logprob.decoded_token == str(token_id)
            num_told += 1
    assert num_told > 300


def test_the_same_seed_draws_the_same_alone_and_among_64(tiny_model: Model) -> None:
    mine = Ask((5, 6, 7), SamplingParams(temperature=1.0, top_p=0.9, seed=-5, max_tokens=30))
    others = [
        Ask((index, 6, 7), SamplingParams(temperature=1.0, seed=index, max_tokens=10 + index % 30))
        for index in range(63)
    ]
    config = tiny_config(max_num_seqs=64)
    alone = TorchBench(tiny_model, config).run([mine]).answers[0]
    among = TorchBench(tiny_model, config).run([*others[:31], mine, *others[31:]]).answers[31]
    assert among == alone
    assert len(set(alone[0])) > 10


def test_what_is_sampled_follows_the_models_distribution(tiny_directory: Path, tiny_model: Model) -> None:
    prompt = (3, 1, 4)
    num = 1500
    asks = [Ask(prompt, SamplingParams(temperature=0.7, top_p=0.8, seed=s, max_tokens=1)) for s in range(num)]
    run = TorchBench(tiny_model, tiny_config(max_num_seqs=64, max_num_batched_tokens=512)).run(asks)
    probs = (dense_logits(tiny_directory, list(prompt))[-1] / 0.7).softmax(0).double()
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(0) - probs[order]
    kept = torch.zeros_like(probs)
    kept[order[before < 0.8]] = probs[order[before < 0.8]]
    kept /= kept.sum()
    counts = torch.bincount(torch.tensor([ids[0] for ids, _ in run.answers]), minlength=VOCAB_SIZE).double()
    assert (counts[kept == 0] == 0).all()
    likely = kept * num >= 5
    expected = torch.cat((kept[likely] * num, kept[~likely].sum()[None] * num))
    seen = torch.cat((counts[likely], counts[~likely].sum()[None]))
    statistic = float(((seen - expected) ** 2 / expected.clamp_min(1e-9)).sum())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
