"""Stop strings in a text that grows.

All of a request's stop strings are searched at once (Aho and Corasick, 1975): the search's state after a
character is the longest end of the text that begins a stop string. So a character takes constant time on
average whatever the strings are, and the state says how much of the text may not be given out yet.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """The states of a search for several strings.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._match.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][char]
            self._match[state] = stop
        self._link(depth)

    def _link(self, depth: list[int]) -> None:
        """Adds to each state where to go on when a character does not fit: breadth first."""
        self._fail = [0] * len(self._next)
        # Text that has to wait: the longest end that may still become a stop string.
        self._num_held = [at if self._next[state] else 0 for state, at in enumerate(depth)]
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            # Of the strings that end here the longest: this state's own, or that of its longest proper end.
            if self._match[state] is None:
                self._match[state] = self._match[fail]
            if not self._next[state]:
                self._num_held[state] = self._num_held[fail]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(fail, char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character; 0 is the first."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def match(self, state: int) -> str | None:
        """The longest string that ends here."""
        return self._match[state]

    def num_held(self, state: int) -> int:
        """How many of the last characters may belong to a string that has not ended yet."""
        return self._num_held[state]


@lru_cache(maxsize=256)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of some strings; requests of one kind share it."""
    return StopAutomaton(stops)


class StopSearch:
    """A text that grows until one of its stop strings ends.

    Args:
        automaton: of the stop strings.
        keeps_stop: the text that is given out has the stop string at its end.

    Attributes:
        found: the string that ended the text; of several that end at one place the longest.
    """

    def __init__(self, automaton: StopAutomaton, *, keeps_stop: bool) -> None:
        self.found: str | None = None
        self._automaton = automaton
        self._keeps_stop = keeps_stop
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Adds text.

        Args:
            text: what comes next.
            may_stop: if not, a string that ends in it is passed over.

        Returns:
            What may be given out: all but the longest end that may become a stop string, and nothing after
            one was found.
        """
        if self.found is not None:
            return ""
        automaton, state = self._automaton, self._state
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.step(state, char)
            stop = automaton.match(state)
            if stop is not None and may_stop:
                self.found, self._held = stop, ""
                return whole[:end] if self._keeps_stop else whole[: end - len(stop)]
        self._state = state
        kept = len(whole) - automaton.num_held(state)
        self._held = whole[kept:]
        return whole[:kept]

    def flush(self) -> str:
        """Ends the text: what was held back."""
        held, self._held = self._held, ""
        return held
