"""Each edit of logits against the plainest reading of its name, token by token over whole outputs."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from noria.sampling import SamplingParams
from noria.sampling.context import SeatContext
from noria.sampling.sampler import Sampler

VOCAB_SIZE = 23
CPU = torch.device("cpu")
Row = list[float]
Reference = Callable[[Row, SamplingParams, SeatContext, list[int]], Row]


def allowed(row: Row, params: SamplingParams, context: SeatContext, output: list[int]) -> Row:
    if params.allowed_token_ids is None:
        return row
    return [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(row)]


def bad_words(row: Row, params: SamplingParams, context: SeatContext, output: list[int]) -> Row:
    row = list(row)
    for *start, last in context.bad_words:
        if len(start) <= len(output) and output[len(output) - len(start) :] == start:
            row[last] = -math.inf
    return row


def min_tokens(row: Row, params: SamplingParams, context: SeatContext, output: list[int]) -> Row:
    row = list(row)
    for token in context.stop_token_ids if len(output) < params.min_tokens else ():
        row[token] = -math.inf
    return row


def bias(row: Row, params: SamplingParams, context: SeatContext, output: list[int]) -> Row:
    return [value + (params.logit_bias or {}).get(token, 0.0) for token, value in enumerate(row)]


def penalties(row: Row, params: SamplingParams, context: SeatContext, output: list[int]) -> Row:
    row = list(row)
    for token in {*context.prompt_token_ids.tolist(), *output}:
        row[token] = (
            row[token] / params.repetition_penalty
            if row[token] > 0
            else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


VLLM_ORDER: Sequence[Reference] = (allowed, bad_words, min_tokens, bias, penalties)


def expected(row: Row, params: SamplingParams, context: SeatContext, output: list[int]) -> Row:
    for edit in VLLM_ORDER:
        row = edit(row, params, context, output)
    return row


def context_of(seed: int, params: SamplingParams, **fields: tuple[object, ...]) -> SeatContext:
    prompt = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 5 + seed % 7)
    return SeatContext(prompt_token_ids=prompt, **fields)  # type: ignore[arg-type]


WORDS = ((4,), (5, 6), (1, 2, 3), (9, 2, 3), (2, 3), (7, 7, 7, 7))
GREEDY = {"temperature": 0.0}
ASKS = [
    (SamplingParams(**GREEDY), {}),
    (SamplingParams(**GREEDY, allowed_token_ids=[3, 1, 22]), {}),
    (SamplingParams(**GREEDY, logit_bias={3: 5.0, 4: -100.0, 0: 2.5}), {}),
    (SamplingParams(**GREEDY, min_tokens=4), {"stop_token_ids": (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)}),
    (SamplingParams(**GREEDY, bad_words=["x"]), {"bad_words": WORDS}),
    (SamplingParams(**GREEDY, bad_words=["x"]), {"bad_words": ((3,),)}),
    (SamplingParams(**GREEDY, repetition_penalty=1.7), {}),
    (SamplingParams(**GREEDY, repetition_penalty=0.5), {}),
    (SamplingParams(**GREEDY, presence_penalty=1.5), {}),
    (SamplingParams(**GREEDY, frequency_penalty=0.7), {}),
    (SamplingParams(**GREEDY, frequency_penalty=-0.2, presence_penalty=-1.0), {}),
    (
        SamplingParams(
            **GREEDY,
            allowed_token_ids=range(2, 20),
            bad_words=["x"],
            min_tokens=6,
            logit_bias={token: token / 10 for token in range(VOCAB_SIZE)},
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.4,
        ),
        {"bad_words": WORDS, "stop_token_ids": (12, 13, 14)},
    ),
]


def rows_of(num_rows: int, position: int) -> torch.Tensor:
    """Few distinct logits that drift slowly, so that tokens come again."""
    generator = torch.Generator().manual_seed(position // 3)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator, dtype=torch.float64).round(decimals=2)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_every_edit_gives_the_logits_of_the_plain_reading(order: int) -> None:
    places = np.random.default_rng(order).permutation(len(ASKS)).tolist()
    asks = [ASKS[place] for place in places]
    contexts = [context_of(seed, params, **fields) for seed, (params, fields) in enumerate(asks)]
    its_sampler = Sampler(len(asks) + 3, VOCAB_SIZE, CPU)
    seats = np.random.default_rng(order + 9).permutation(len(asks) + 3)[: len(asks)].tolist()
    for index in range(len(asks)):  # one by one, so that later ones widen what earlier ones have
        its_sampler.set_seats([seats[index]], [asks[index][0]], [0], [contexts[index]])
    outputs: list[list[int]] = [[] for _ in asks]
    num_edited = 0
    for position in range(40):
        logits = rows_of(len(asks), position)
        wanted = [
            expected(row, params, context, output)
            for row, (params, _), context, output in zip(
                logits.tolist(), asks, contexts, outputs, strict=True
            )
        ]
        num_edited += int((torch.tensor(wanted, dtype=torch.float64) != logits).any(1).sum())
        # Not all rows are in every step: some wait.
        rows = [row for row in range(len(asks)) if (row + position) % 5 or len(outputs[row]) == 0]
        step = logits[rows].clone()
        sampled = its_sampler.sample(
            step,
            torch.tensor([seats[row] for row in rows]),
            torch.tensor([len(outputs[row]) for row in rows]),
        )
        torch.testing.assert_close(
            step, torch.tensor([wanted[row] for row in rows], dtype=torch.float64), rtol=1e-12, atol=1e-12
        )
        for row, token in zip(rows, sampled.ids.tolist(), strict=True):
            outputs[row].append(token)
    assert num_edited > 300
    assert max(output.count(token) for output in outputs for token in set(output)) > 3


def test_a_seat_gained_again_takes_up_where_its_output_was() -> None:
    contexts = [context_of(seed, params, **fields) for seed, (params, fields) in enumerate(ASKS)]
    params = [asked for asked, _ in ASKS]
    whole = Sampler(len(ASKS), VOCAB_SIZE, CPU)
    whole.set_seats(range(len(ASKS)), params, [0] * len(ASKS), contexts)
    outputs: list[list[int]] = [[] for _ in ASKS]
    for position in range(30):
        again = Sampler(len(ASKS) + 1, VOCAB_SIZE, CPU)
        again.set_seats(
            range(len(ASKS)),
            params,
            [0] * len(ASKS),
            [
                SeatContext(
                    c.stop_token_ids, c.bad_words, c.prompt_token_ids, np.array(output, dtype=np.int64)
                )
                for c, output in zip(contexts, outputs, strict=True)
            ],
        )
        logits = rows_of(len(ASKS), position)
        positions = torch.full((len(ASKS),), position)
        one = whole.sample(logits.clone(), torch.arange(len(ASKS)), positions).ids.tolist()
        assert one == again.sample(logits.clone(), torch.arange(len(ASKS)), positions).ids.tolist()
        for output, token in zip(outputs, one, strict=True):
            output.append(token)


def test_a_gained_seat_forgets_the_request_before() -> None:
    its_sampler = Sampler(1, VOCAB_SIZE, CPU)
    logits = rows_of(1, 0)
    for params, fields in ASKS:
        its_sampler.set_seats([0], [params], [0], [context_of(1, params, **fields)])
        its_sampler.sample(logits.clone(), torch.tensor([0]), torch.tensor([0]))
        its_sampler.set_seats([0], [SamplingParams(temperature=0.0)], [0])
        step = logits.clone()
        its_sampler.sample(step, torch.tensor([0]), torch.tensor([0]))
        assert torch.equal(step, logits)


def test_logprobs_are_those_of_the_unedited_logits() -> None:
    params = [
        SamplingParams(temperature=0.0, logprobs=3, logit_bias={5: 100.0}),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, logprobs=0, seed=1),
        SamplingParams(temperature=2.0, logprobs=-1, seed=1),
    ]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    its_sampler = Sampler(4, VOCAB_SIZE, CPU)
    its_sampler.set_seats(range(4), params, range(4))
    sampled = its_sampler.sample(logits.clone(), torch.arange(4), torch.zeros(4, dtype=torch.int64))
    assert sampled.logprobs is not None
    assert sampled.logprob_rows is not None
    assert sampled.logprob_rows.tolist() == [0, 2, 3]
    assert sampled.ids[0] == 5
    reference = logits.log_softmax(1)
    for place, row in enumerate([0, 2, 3]):
        ids = sampled.logprobs.ids[place]
        assert ids[0] == sampled.ids[row]
        assert ids[1:].tolist() == reference[row].argsort(descending=True).tolist()
        torch.testing.assert_close(sampled.logprobs.values[place], reference[row][ids].float())
        rank = 1 + int((logits[row] > logits[row, ids[0]]).sum())
        assert sampled.logprobs.ranks[place] == rank


@pytest.mark.parametrize("size", [20, 64 * 40, 64 * 40 + 17])
def test_the_most_likely_tokens_are_those_of_a_sort(size: int) -> None:
    from noria.sampling.thresholds import largest_with_ids

    values = torch.randn(7, size, generator=torch.Generator().manual_seed(size))
    for k in (1, 5, 20):
        top, ids = largest_with_ids(values, k)
        order = values.argsort(dim=1, descending=True)[:, :k]
        assert torch.equal(ids, order)
        assert torch.equal(top, values.gather(1, order))
