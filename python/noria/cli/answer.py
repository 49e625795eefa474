"""One answer's text, as its tokens come."""

from typing import TYPE_CHECKING

from noria import _core

if TYPE_CHECKING:
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
