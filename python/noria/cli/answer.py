"""One answer's text, as its tokens come."""

from typing import TYPE_CHECKING

from noria import _core

if TYPE_CHECKING:
    from noria.llm import LLM
    from noria.outputs import Events
    from noria.sampling.params import SamplingParams


class AnswerPieces:
    """The text of the one answer that an LLM is making, from its events.

    Args:
        llm: with a tokenizer.
        params: of the answer.
    """

    def __init__(self, llm: "LLM", params: "SamplingParams") -> None:
        text = llm.answer_text(params)
        assert text is not None  # the commands that show text load a tokenizer
        self._text = text

    def take(self, events: "Events") -> str:
        """What a turn adds to the text; joined, it is what `LLM.generate` gives."""
        ids = events.rows[events.kinds == _core.TOKEN, 2].tolist()
        piece = "".join([self._text.push(token_id) for token_id in ids])
        return piece + self._text.end() if (events.kinds == _core.FINISHED).any() else piece
