"""An answer's text as its tokens come, cut at its stop string."""

from collections.abc import Collection

from noria.text.detokenizer import TextStream
from noria.text.stops import StopSearch, stop_automaton


class AnswerText:
    """The text of one answer.

    Joined, what `push` and the final `end` give is the answer's text.

    Args:
        stream: of the answer's tokens.
        stops: texts that end it.
        stop_token_ids: tokens that end it; their own text is no part of it.
        keeps_stop: what ends it is a part of its text after all.
        min_tokens: a text that ends within so many tokens does not stop it.

    Attributes:
        num_tokens: tokens that it has; those after its end are not counted.
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        stops: tuple[str, ...] = (),
        stop_token_ids: Collection[int] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self._stream = stream
        self._search = StopSearch(stop_automaton(stops), keeps_stop=keeps_stop)
        self._stop_token_ids = stop_token_ids
        self._keeps_stop = keeps_stop
        self._min_tokens = min_tokens
        self._is_ended = False

    @property
    def stop(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._search.found

    def push(self, token_id: int) -> str:
        """Adds a token; what became certain by it."""
        if self._is_ended:
            return ""
        self.num_tokens += 1
        is_last = token_id in self._stop_token_ids
        text = "" if is_last and not self._keeps_stop else self._stream.push(token_id)
        if text:
            text = self._search.push(text, may_stop=self.num_tokens > self._min_tokens)
        self._is_ended = is_last or self._search.found is not None
        return text

    def end(self) -> str:
        """Ends the text: what was held back, and U+FFFD for a character that stayed incomplete."""
        if self._search.found is not None:
            return ""
        self._is_ended = True
        text = self._search.push(self._stream.flush(), may_stop=self.num_tokens > self._min_tokens)
        return text + self._search.flush()
