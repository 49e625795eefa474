"""The sampler against the plainest reading of its parameters, and what a token may depend on."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from noria import _core
from noria.sampling import SamplingParams, sampler
from noria.sampling.draw import chunk_masses, draw
from noria.sampling.noise import uniform
from noria.sampling.sampler import SampledTokens, Sampler
from noria.sampling.thresholds import Weighing, largest

CPU = torch.device("cpu")
Row = npt.NDArray[np.float64]


def reference_weights(logits: Row, params: SamplingParams) -> Row:
    """Probabilities of one row, in vLLM's order; a token at a time where that is plainer."""
    scaled = logits / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0.0
    if params.top_k > 0:
        last = sorted(logits)[-min(params.top_k, len(logits))]
        probs[logits < last] = 0.0
    probs /= probs.sum()
    likelier = np.array([probs[logits > logit].sum() for logit in logits])
    probs[likelier >= params.top_p] = 0.0
    return probs / probs.sum()


class ReferenceRow:
    """Draws by inverse transform in id order; draws what top-p drops again, from what is likelier."""

    def __init__(self, logits: torch.Tensor, params: SamplingParams) -> None:
        self._logits = logits.double().numpy()
        self._is_greedy = params.is_greedy
        if not params.is_greedy:
            self._probs = reference_weights(self._logits, dataclasses.replace(params, top_p=1.0))
            self._kept = reference_weights(self._logits, params) > 0

    def token(self, seed: int, position: int) -> int:
        if self._is_greedy:
            return int(np.argmax(self._logits))
        probs = self._probs
        for attempt in itertools.count():
            u = float(uniform(torch.tensor([seed]), torch.tensor([position]), attempt)[0])
            token = int(np.searchsorted(np.cumsum(probs), u * probs.sum(), side="right"))
            if self._kept[token]:
                return token
            probs = np.where(self._logits > self._logits[token], probs, 0.0)
        raise AssertionError


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> SampledTokens:
    """Row i on seat i."""
    its_sampler = Sampler(len(params), logits.shape[1], CPU)
    its_sampler.set_seats(range(len(params)), params, seeds)
    return its_sampler.sample(logits, torch.arange(len(params)), torch.tensor(positions))


def random_logits(num_rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64) * scale


ASKS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=300),
    SamplingParams(top_k=10**9),
    SamplingParams(top_p=0.05),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.02),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.7, top_k=40, top_p=0.8),
    SamplingParams(temperature=0.6, top_k=1000, top_p=0.95, min_p=0.001),
    SamplingParams(temperature=3.0, top_p=0.95, min_p=0.01),
    SamplingParams(top_k=2, min_p=0.3),
]


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 255, 256, 257, 1000, 2001])
def test_every_parameter_gives_the_token_of_the_plain_reading(vocab_size: int) -> None:
    params = ASKS * 2
    logits = random_logits(len(params), vocab_size, seed=vocab_size)
    logits[len(ASKS) :] *= 0.2  # flatter, so that top-p needs many tokens
    references = [ReferenceRow(row, asked) for row, asked in zip(logits, params, strict=True)]
    seeds = list(range(len(params)))
    for position in range(10):
        sampled = sample(logits, params, seeds, [position] * len(params))
        assert sampled.ids.tolist() == [row.token(seeds[i], position) for i, row in enumerate(references)]
        assert sampled.ok.all()


@pytest.mark.parametrize("vocab_size", [7, 300, 1000])
def test_ties_are_kept_or_dropped_together(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 3, (len(ASKS), vocab_size), generator=generator).double()
    references = [ReferenceRow(row, asked) for row, asked in zip(logits, ASKS, strict=True)]
    for position in range(20):
        sampled = sample(logits, ASKS, [9] * len(ASKS), [position] * len(ASKS))
        assert sampled.ids.tolist() == [row.token(9, position) for row in references]


def test_greedy_takes_the_lowest_of_the_most_likely_ids() -> None:
    for vocab_size, dtype in itertools.product((1, 100, 256, 1023, 5000), (torch.float32, torch.float64)):
        generator = torch.Generator().manual_seed(vocab_size)
        logits = torch.randint(-2, 3, (30, vocab_size), generator=generator).to(dtype)
        sampled = sample(logits, [SamplingParams(temperature=0.0)] * 30, [0] * 30, [0] * 30)
        assert sampled.ids.tolist() == np.argmax(logits.numpy(), axis=1).tolist()


def test_the_largest_values_are_those_of_a_sort() -> None:
    for size, k in itertools.product((1, 64, 65, 1000, 8192, 8200), (1, 2, 30, 64, 1000)):
        if k > size:
            continue
        values = torch.randint(-50, 50, (9, size), generator=torch.Generator().manual_seed(size + k)).double()
        assert torch.equal(largest(values, k), values.sort(dim=1, descending=True).values[:, :k])


def chi_square(ids: torch.Tensor, probs: Row) -> float:
    """In standard deviations; cells of few expected draws are counted as one."""
    counts = np.bincount(ids.numpy(), minlength=len(probs)).astype(np.float64)
    assert counts[probs == 0.0].sum() == 0
    expected = probs * len(ids)
    is_rare = expected < 8
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = max(len(counts) - 1, 1)
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize(
    ("params", "dtype"),
    [
        (params, (torch.float32, torch.float64)[i % 2])
        for i, params in enumerate(params for params in ASKS if not params.is_greedy)
    ],
)
def test_many_draws_have_the_asked_for_distribution(params: SamplingParams, dtype: torch.dtype) -> None:
    num_seeds, num_positions, vocab_size = 100, 150, 110
    logits = random_logits(1, vocab_size, seed=5, scale=2.0).to(dtype)
    probs = reference_weights(logits[0].double().numpy(), params)
    its_sampler = Sampler(num_seeds, vocab_size, CPU)
    its_sampler.set_seats(range(num_seeds), [params] * num_seeds, range(num_seeds))
    seats = torch.arange(num_seeds).repeat_interleave(num_positions)
    positions = torch.arange(num_positions).repeat(num_seeds)
    ids = its_sampler.sample(logits.expand(len(seats), -1), seats, positions).ids
    assert chi_square(ids, probs) < 5
    if (probs > 0).sum() > 1:
        wrong = np.roll(probs[probs > 0], 1)
        shifted = np.zeros_like(probs)
        shifted[probs > 0] = wrong
        assert chi_square(ids, shifted) > 50 or np.allclose(shifted, probs)


def test_a_flat_row_of_a_real_vocabulary_keeps_exactly_its_top_p() -> None:
    logits = random_logits(2, 49152, seed=1, scale=0.5)
    params = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.9, top_k=20000, temperature=0.8)]
    num = 300
    its_sampler = Sampler(2, 49152, CPU)
    its_sampler.set_seats([0, 1], params, [3, 4])
    for row in range(2):
        row_logits = logits[row].numpy()
        order = np.argsort(-row_logits)
        weights = np.exp((row_logits - row_logits.max()) / params[row].temperature)
        if params[row].top_k:
            weights[order[params[row].top_k :]] = 0.0
        before = np.cumsum(weights[order]) - weights[order]
        kept = np.zeros(49152, dtype=bool)
        kept[order[before < params[row].top_p * weights.sum()]] = True
        seats = torch.full((num,), row)
        ids = its_sampler.sample(logits[row].expand(num, -1), seats, torch.arange(num)).ids.numpy()
        assert kept[ids].all()
        rank = np.empty(49152)
        rank[order] = np.cumsum(np.where(kept, weights, 0.0)[order]) / weights[kept].sum()
        deciles = np.bincount((rank[ids] * 10).astype(int).clip(0, 9), minlength=10)
        assert ((deciles - num / 10) ** 2 / (num / 10)).sum() < 27.9  # chi-square, 9 degrees, 1 in 1,000


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_row_alone_gives_the_token_that_it_gives_in_a_batch(threads: None) -> None:
    num_rows, vocab_size = 64, 20011
    logits = random_logits(num_rows, vocab_size, seed=2).float()
    logits[::3] *= 0.1
    params = [ASKS[i % len(ASKS)] for i in range(num_rows)]
    seeds = [i * 7919 for i in range(num_rows)]
    positions = [i % 5 for i in range(num_rows)]
    batch = sample(logits, params, seeds, positions).ids.tolist()
    alone = [
        int(sample(logits[i : i + 1], [params[i]], [seeds[i]], [positions[i]]).ids[0])
        for i in range(num_rows)
    ]
    assert alone == batch
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(3))
    shuffled = sample(
        logits[order],
        [params[i] for i in order],
        [seeds[i] for i in order],
        [positions[i] for i in order],
    )
    assert shuffled.ids.tolist() == [batch[i] for i in order]
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert sample(logits, params, seeds, positions).ids.tolist() == batch


@pytest.mark.parametrize("vocab_size", [49152, 20011, 300])
def test_the_sums_behind_a_draw_are_the_same_bits_in_any_batch_and_on_any_threads(
    vocab_size: int, threads: None
) -> None:
    logits = random_logits(33, vocab_size, seed=4).float()

    def masses_of(rows: torch.Tensor) -> torch.Tensor:
        weighing = Weighing(rows.amax(1, keepdim=True), torch.full((len(rows), 1), 1 / 0.7), None, None)
        return chunk_masses(weighing.weights(rows, torch.empty_like(rows)))

    batch = masses_of(logits)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(masses_of(logits), batch)
        for size in (1, 2, 5):
            for start in range(0, 33 - size, 7):
                assert torch.equal(masses_of(logits[start : start + size]), batch[start : start + size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_without_meaning_is_reported_and_harms_no_other(dtype: torch.dtype) -> None:
    params = ASKS * 2
    num_rows, vocab_size = len(params), 700
    logits = random_logits(num_rows, vocab_size, seed=6).to(dtype)
    clean = sample(logits, params, [1] * num_rows, [0] * num_rows)
    for bad in ([torch.nan], [-torch.inf], [torch.inf], [torch.nan, torch.inf, -torch.inf]):
        for whole in (True, False):
            broken = logits.clone()
            for i, row in enumerate(range(0, num_rows, 2)):
                value = bad[i % len(bad)]
                if whole or value == -torch.inf:
                    broken[row] = value
                else:
                    broken[row, 650] = value
            sampled = sample(broken, params, [1] * num_rows, [0] * num_rows)
            assert sampled.ok.tolist() == [False, True] * (num_rows // 2)
            assert sampled.ids[::2].eq(0).all()
            assert torch.equal(sampled.ids[1::2], clean.ids[1::2])


def test_a_masked_token_is_never_drawn() -> None:
    vocab_size = 600
    logits = torch.full((1, vocab_size), -torch.inf)
    allowed = [3, 255, 256, 511, 599]
    logits[0, allowed] = torch.tensor([0.0, -1.0, 0.0, -2.0, 0.0])
    params = [
        SamplingParams(temperature=t, top_p=p, top_k=k)
        for t in (1e-4, 1.0, 1e30, 1e300)
        for p in (1.0, 0.99)
        for k in (0, 100)
    ]
    its_sampler = Sampler(len(params), vocab_size, CPU)
    its_sampler.set_seats(range(len(params)), params, range(len(params)))
    seats = torch.arange(len(params)).repeat_interleave(300)
    positions = torch.arange(300).repeat(len(params))
    sampled = its_sampler.sample(logits.expand(len(seats), -1), seats, positions)
    assert sampled.ok.all()
    assert set(sampled.ids.tolist()) == set(allowed)


def test_logits_of_any_size_are_taken() -> None:
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=2e-5, top_k=3)]
    for scale in (1e-38, 1e30, 3e38):
        logits = torch.tensor([[0.0, 0.5, 1.0, -1.0, 0.25]]).expand(3, -1) * scale
        sampled = sample(logits, params, [0, 1, 2], [0, 0, 0])
        assert sampled.ok.all()
        if scale > 1.0:
            assert sampled.ids.tolist() == [2, 2, 2]


def test_the_smallest_temperature_takes_the_most_likely_token() -> None:
    logits = random_logits(50, 1000, seed=8)
    sampled = sample(logits, [SamplingParams(temperature=1.1e-5)] * 50, range(50), [0] * 50)
    assert torch.equal(sampled.ids, logits.argmax(1))


def test_a_seat_keeps_its_parameters_until_it_is_gained_again() -> None:
    logits = random_logits(1, 500, seed=9).expand(3, -1)
    its_sampler = Sampler(8, 500, CPU)
    its_sampler.set_seats([5, 2], [SamplingParams(), SamplingParams(temperature=0.0)], [11, 12])
    seats, positions = torch.tensor([2, 5, 5]), torch.tensor([4, 4, 6])
    first = its_sampler.sample(logits, seats, positions).ids.tolist()
    random = ReferenceRow(logits[0], SamplingParams())
    assert first == [int(logits[0].argmax()), random.token(11, 4), random.token(11, 6)]
    its_sampler.set_seats([2], [SamplingParams(top_k=3)], [77])
    second = its_sampler.sample(logits, seats, positions).ids.tolist()
    assert second == [ReferenceRow(logits[0], SamplingParams(top_k=3)).token(77, 4), *first[1:]]


def test_a_row_that_asks_for_nothing_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[int]] = {"draw": [], "top_k_threshold": [], "draw_nucleus": []}
    for name, calls in asked.items():
        original = getattr(sampler, name)

        def counting(first: torch.Tensor, *rest: object, original=original, calls=calls) -> torch.Tensor:  # type: ignore[no-untyped-def]
            calls.append(len(first))
            return original(first, *rest)

        monkeypatch.setattr(sampler, name, counting)
    logits = random_logits(6, 300, seed=1)
    greedy = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5, seed=3)
    sample(logits, [greedy] * 6, [0] * 6, [0] * 6)
    assert not any(asked.values())
    plain = SamplingParams()
    sample(logits, [greedy, plain, plain, greedy, plain, plain], [0] * 6, [0] * 6)
    assert asked == {"draw": [4], "top_k_threshold": [], "draw_nucleus": []}
    some = [greedy, SamplingParams(top_k=3), plain, SamplingParams(top_p=0.5), SamplingParams(top_k=9), plain]
    sample(logits, some, [0] * 6, [0] * 6)
    assert asked == {"draw": [4, 5], "top_k_threshold": [2], "draw_nucleus": [1]}


def test_the_logits_are_not_modified() -> None:
    logits = random_logits(len(ASKS), 900, seed=10)
    before = logits.clone()
    sample(logits, ASKS, range(len(ASKS)), [0] * len(ASKS))
    sample(logits[:1], [SamplingParams(top_p=0.5)], [1], [0])
    assert torch.equal(logits, before)


def test_the_same_seed_and_position_give_the_same_token_whatever_happened_between() -> None:
    logits = random_logits(4, 800, seed=11, scale=1.0)
    params = [dataclasses.replace(ASKS[i], seed=42) for i in (0, 3, 10, 14)]
    its_sampler = Sampler(4, 800, CPU)
    its_sampler.set_seats(range(4), params, [42] * 4)
    seats = torch.arange(4)
    first = [its_sampler.sample(logits, seats, torch.full((4,), p)).ids for p in range(6)]
    again = [its_sampler.sample(logits, seats, torch.full((4,), p)).ids for p in reversed(range(6))]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    assert len({tuple(ids.tolist()) for ids in first}) > 1


def test_an_empty_step_samples_nothing() -> None:
    its_sampler = Sampler(4, 100, CPU)
    sampled = its_sampler.sample(torch.empty(0, 100), torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert sampled.ids.shape == sampled.ok.shape == (0,)


def test_logits_of_the_wrong_shape_or_dtype_are_named() -> None:
    its_sampler = Sampler(4, 100, CPU)
    seats = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits must be \[n, 100\], one column a token; got \[2, 99\]"):
        its_sampler.sample(torch.zeros(2, 99), seats, seats)
    with pytest.raises(ValueError, match=r"must be float32 or float64; got torch\.bfloat16"):
        its_sampler.sample(torch.zeros(2, 100, dtype=torch.bfloat16), seats, seats)
    with pytest.raises(ValueError, match="1 seats, 2 params and 1 seeds"):
        its_sampler.set_seats([0], [SamplingParams()] * 2, [0])


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 5000])
def test_a_draw_on_the_host_is_the_other_devices_to_the_bit(vocab_size: int) -> None:
    num = 400
    weights = (random_logits(num, vocab_size, seed=vocab_size).float() - 12.0).clamp_max_(0.0).exp_()
    weights[: num // 2] *= torch.rand(num // 2, vocab_size, generator=torch.Generator().manual_seed(1)) > 0.5
    weights[:, vocab_size // 2] = 1.0  # some weight is above 0
    floor = torch.where(torch.arange(num) % 3 == 0, 0.5, 0.0)[:, None]
    chunks = chunk_masses(weights * (weights > floor))
    rows = torch.arange(num).flip(0)
    seeds, positions = torch.arange(-200, 200) * 2**40, torch.arange(num)
    for attempt in (0, 1, 7):
        for asked in ((None, floor), (rows, floor[rows])):
            drawn = [
                draw(of, chunks if asked[0] is None else chunks[rows], seeds, positions, attempt, *asked)
                for of in (weights, weights.double())
            ]
            assert drawn[0].equal(drawn[1])
            assert drawn[0].max() < vocab_size


def test_a_draw_from_what_is_no_number_is_some_id_of_the_row() -> None:
    for weights in (torch.full((1, 300), torch.nan), torch.zeros(1, 300)):
        chunks = chunk_masses(weights)
        assert 0 <= int(draw(weights, chunks, torch.tensor([1]), torch.tensor([0]))) < 300


def test_weights_and_masses_that_do_not_fit_are_refused() -> None:
    weights, masses = np.ones((2, 300), np.float32), np.ones((2, 2), np.int64)
    longs = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=r"masses has shape \[2, 2\], which does not fit 300 weights a row"):
        _core.draw(weights, masses, longs, longs[:1], 0)
    with pytest.raises(ValueError, match="weights has no row 2, which is to be drawn from"):
        _core.draw(weights, masses, longs, longs, 0, longs + 2)
