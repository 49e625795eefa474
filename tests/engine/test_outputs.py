"""Events are sorted into answers."""

import numpy as np
import pytest

from noria import _core
from noria.outputs import EventCollector, Events


def events(*rows: tuple[int, int, int, int], at: int = 0) -> Events:
    return Events(np.array(rows, dtype=np.int64).reshape(-1, 4), np.full(len(rows), at, dtype=np.int64))


def test_answers_come_in_the_order_of_the_handles() -> None:
    high = 3 << 32 | 1
    collector = EventCollector([high, 5, 2])
    indices = collector.add(
        events((5, _core.ADMITTED, 16, 1), (high, _core.ADMITTED, 0, 1), (2, _core.ADMITTED, 0, 1), at=100)
    )
    assert indices.tolist() == [1, 0, 2]
    collector.add(events((high, _core.TOKEN, 40, 0), (5, _core.TOKEN, 50, 0), at=200))
    collector.add(events((5, _core.PREEMPTED, 17, 2), (high, _core.TOKEN, 41, 1), at=250))
    collector.add(events((high, _core.FINISHED, _core.LENGTH, 2), at=300))
    collector.add(
        events((5, _core.RESUMED, 16, 3), (5, _core.TOKEN, 51, 1), (5, _core.FINISHED, _core.STOP, 1), at=400)
    )
    assert (collector.num_finished, collector.num_tokens) == (2, 4)
    collector.add(events((2, _core.FINISHED, _core.ABORT, 2**31 - 1), at=500))
    first, second, third = collector.finished()
    assert (first.token_ids.tolist(), first.reason, first.num_cached_tokens) == ([40, 41], _core.LENGTH, 0)
    assert (first.first_scheduled_us, first.first_token_us, first.finished_us) == (100, 200, 300)
    assert (second.token_ids.tolist(), second.reason) == ([50], _core.STOP)  # cut at its stop
    assert (second.num_preemptions, second.num_cached_tokens) == (1, 16)
    assert (third.token_ids.tolist(), third.reason, third.first_token_us) == ([], _core.ABORT, None)


def test_a_strangers_events_are_left_out() -> None:
    collector = EventCollector([7])
    assert collector.add(events((6, _core.TOKEN, 1, 0), (7, _core.FINISHED, _core.STOP, 0))).tolist() == [
        -1,
        0,
    ]
    assert collector.num_tokens == 0
    assert collector.finished()[0].first_scheduled_us is None


def test_no_requests_have_no_answers() -> None:
    collector = EventCollector([])
    assert collector.add(events((6, _core.TOKEN, 1, 0))).tolist() == [-1]
    assert collector.finished() == []


def test_answers_are_not_given_before_all_have_finished() -> None:
    collector = EventCollector([1, 2])
    collector.add(events((1, _core.FINISHED, _core.STOP, 0)))
    with pytest.raises(AssertionError, match="1 of 2"):
        collector.finished()


def test_a_token_that_is_missing_is_noticed() -> None:
    collector = EventCollector([1])
    collector.add(events((1, _core.TOKEN, 9, 1), (1, _core.FINISHED, _core.STOP, 1)))
    with pytest.raises(AssertionError, match="gap"):
        collector.finished()
