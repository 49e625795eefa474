"""Seeded lengths, the longest of a batch, and workload files."""

import itertools
import json

import numpy as np
import pytest

from noria.bench.lengths import (
    LogNormalLengths,
    expected_longest,
    longest_over_mean,
    longest_over_mean_in_order,
)
from noria.bench.workload import read_workload, synthetic_workload
from noria.errors import ConfigError


@pytest.mark.parametrize("num_drawn", range(1, 9))
def test_the_expected_longest_is_the_mean_over_every_draw(num_drawn):
    lengths = np.array([5, 1, 3, 3, 9, 2])
    draws = itertools.combinations(lengths, min(num_drawn, len(lengths)))
    assert expected_longest(lengths, num_drawn) == pytest.approx(np.mean([max(draw) for draw in draws]))


def test_equal_lengths_lose_nothing_in_a_static_batch():
    assert longest_over_mean(np.full(100, 40), 16) == pytest.approx(1)
    assert longest_over_mean_in_order(np.full(96, 40), 16) == pytest.approx(1)


def test_in_order_the_longest_of_each_batch_counts():
    assert longest_over_mean_in_order(np.array([4, 2, 1, 1, 8]), 2) == pytest.approx((4 + 1 + 8) * 2 / 16)


def test_an_empty_sample_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        expected_longest(np.array([], dtype=np.int64), 4)


def test_lengths_keep_to_their_clip_and_near_their_median():
    lengths = LogNormalLengths(64, 0.8, 8, 256).sample(np.random.default_rng(0), 4000)
    assert lengths.min() == 8
    assert lengths.max() == 256
    assert 60 <= np.median(lengths) <= 68


def test_a_longer_sample_begins_with_the_shorter_one():
    short, long = (synthetic_workload(num, vocab_size=1000, seed=7) for num in (20, 40))
    assert short.output_lengths.tolist() == long.output_lengths[:20].tolist()
    assert short.prompt_lengths.tolist() == long.prompt_lengths[:20].tolist()


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    first, again, other = (synthetic_workload(8, vocab_size=1000, seed=seed) for seed in (3, 3, 4))
    for left, right in zip(first.requests, again.requests, strict=True):
        assert left.prompt_token_ids.tolist() == right.prompt_token_ids.tolist()
    assert first.output_lengths.tolist() != other.output_lengths.tolist()


def test_a_change_of_outputs_leaves_the_prompts_alone():
    plain = synthetic_workload(16, vocab_size=1000)
    longer = synthetic_workload(16, vocab_size=1000, output_lengths=LogNormalLengths(100, 0.1, 50, 200))
    assert [request.prompt_token_ids.tolist() for request in plain.requests] == [
        request.prompt_token_ids.tolist() for request in longer.requests
    ]


def test_ids_lie_within_the_vocabulary():
    synthetic_workload(50, vocab_size=11).check_fits(max_model_len=512, vocab_size=11)
    with pytest.raises(ConfigError, match=r"entry 0: .* has 10; ids end at 9"):
        synthetic_workload(50, vocab_size=11).check_fits(max_model_len=512, vocab_size=10)


def test_a_workload_file_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "workload.json"
    path.write_text(
        json.dumps(
            [{"prompt_token_ids": [3, 1], "max_tokens": 5}, {"max_tokens": 1, "prompt_token_ids": [2]}]
        )
    )
    workload = read_workload(path)
    assert [request.prompt_token_ids.tolist() for request in workload.requests] == [[3, 1], [2]]
    assert workload.output_lengths.tolist() == [5, 1]
    assert workload.longest_request == 7
    assert workload.static_reservation == 7
