"""One answer's text, as its tokens come."""

from typing import TYPE_CHECKING

from noria import _core

if TYPE_CHECKING:
    from noria.llm import LLM
    from noria.outputs import Events
    from noria.sampling.params import SamplingParams
    from noria.text.tokenizer import Tokenizer


class AnswerText:
    """Text of tokens: joined, what `push` gives is the text that `LLM.generate` gives."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._stream = tokenizer.stream(after_prompt=True)
        self.num_tokens = 0

    def push(self, token_ids: list[int], finish_reason: int | None) -> str:
        """New text for new tokens.

        Args:
            token_ids: what came; of an answer that has stopped, the last one is no part of its text.
            finish_reason: `noria._core.STOP`, ... with the last tokens, else None.
        """
        self.num_tokens += len(token_ids)
        text = self._stream.push_all(token_ids[:-1] if finish_reason == _core.STOP else token_ids)
        return text if finish_reason is None else text + self._stream.flush()


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
