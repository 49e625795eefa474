"""Stop strings in a stream, against a search of the whole text."""

import itertools
import random

import pytest

from noria.text.stops import StopAutomaton, StopSearch


def whole_search(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first stop string ends, and which one: of several that end there the longest."""
    for end in range(1, len(text) + 1):
        ends_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ends_here:
            return end, max(ends_here, key=len)
    return None


def held_of(text: str, stops: tuple[str, ...]) -> int:
    """The longest end of a text that begins a stop string and is not all of it."""
    return max(
        (num for stop in stops for num in range(1, len(stop)) if text.endswith(stop[:num])),
        default=0,
    )


def random_stops(rng: random.Random) -> tuple[str, ...]:
    return tuple("".join(rng.choices("ab日", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4)))


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_stream_gives_out_what_a_whole_search_cuts_and_holds_back_no_more(keeps_stop: bool) -> None:
    rng = random.Random(1)
    num_found = 0
    for _ in range(3000):
        stops = random_stops(rng)
        text = "".join(rng.choices("ab日x", weights=(4, 4, 2, 1), k=rng.randint(0, 25)))
        search = StopSearch(StopAutomaton(stops), keeps_stop=keeps_stop)
        given, taken, place = "", "", 0
        while place < len(text) and search.found is None:
            piece = text[place : place + rng.randint(1, 5)]
            place += len(piece)
            taken += piece
            given += search.push(piece)
            if search.found is None:
                assert given == taken[: len(taken) - held_of(taken, stops)]
        found = whole_search(text, stops)
        if found is None:
            assert search.found is None
            assert given + search.flush() == text
            continue
        end, stop = found
        assert search.found == stop
        assert given == text[: end if keeps_stop else end - len(stop)]
        assert search.push("more") == search.flush() == ""
        num_found += 1
    assert 1000 < num_found < 2900


def test_a_stop_that_may_not_stop_yet_is_passed_over_and_not_held_back() -> None:
    search = StopSearch(StopAutomaton(["end", "nd of"]), keeps_stop=False)
    assert search.push("the end", may_stop=False) == "the e"  # "nd" may become "nd of"
    assert search.push(" is", may_stop=False) == "nd is"
    assert search.push(" the end") == " the "
    assert search.found == "end"


def test_a_match_may_begin_before_it_may_stop() -> None:
    search = StopSearch(StopAutomaton(["abc"]), keeps_stop=False)
    assert search.push("xab", may_stop=False) == "x"
    assert search.push("cd") == ""
    assert search.found == "abc"


def test_every_split_of_a_text_gives_the_same() -> None:
    text, stops = "aabaab!", ("ab!", "aaa", "b!")
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        search = StopSearch(StopAutomaton(stops), keeps_stop=False)
        pieces, piece = [], text[0]
        for char, is_cut in zip(text[1:], cuts, strict=True):
            if is_cut:
                pieces.append(piece)
                piece = ""
            piece += char
        assert "".join(search.push(part) for part in [*pieces, piece]) == "aaba"
        assert search.found == "ab!"
