"""`Tokenizer`: text to token ids and back, and a model's chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from noria.errors import RejectedError, TokenizerError
from noria.text.detokenizer import Detokenizer, TextStream
from noria.text.tool_calls import ToolCallFormat, tool_call_format

if TYPE_CHECKING:
    from noria.loading.gguf_file import GgufFile
    from noria.text.chat_template import ChatTemplate, Message


def load_tokenizer(path: Path, file: "GgufFile | None" = None) -> "Tokenizer":
    """The tokenizer of a model.

    Args:
        path: a Hugging Face directory (with `tokenizer.json`) or a GGUF file.
        file: that GGUF file, where its header is read already.

    Raises:
        TokenizerError: a file is missing or is not as it must be.
        ModelError: a GGUF file is not whole.
    """
    # Each way needs the class below; and who loads a directory needs no GGUF reader.
    if path.is_dir():
        from noria.text.hf_tokenizer import load_hf_tokenizer

        return load_hf_tokenizer(path)
    from noria.loading.gguf_file import GgufFile
    from noria.text.gguf_tokenizer import load_gguf_tokenizer

    return load_gguf_tokenizer(GgufFile(path) if file is None else file)


class Tokenizer:
    """A vocabulary, the rules that split text into its tokens, and what the model's makers say of them.

    Args:
        backend: encodes.
        eos_token_ids: tokens that end a text or a turn.
        chat_template: Jinja source, if the model has one.
        special_tokens: texts of `bos_token`, `eos_token`, … where known.

    Attributes:
        eos_token_ids: as given.
        chat_template: as given.
        special_tokens: as given.
        vocab_size: number of tokens; a model may have more logits.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        # What is set in tokenizer.json for training would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._detokenizer = Detokenizer(backend)
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        token = self.special_tokens.get("bos_token")
        return None if token is None else self.token_id(token)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if there is none."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """The vocabulary and its rules, as `tokenizer.json` has them."""
        return self._backend.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in it are taken as such.

        Args:
            text: of any length.
            add_special_tokens: adds what the model wants around a text, such as its beginning of sequence. A
                chat template writes these itself.

        Raises:
            RejectedError: it is no text, or holds a lone surrogate.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each, on all cores."""
        for text in texts:
            _check_text(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, *, after_prompt: bool = False
    ) -> str:
        """The text of tokens; U+FFFD where their bytes are no UTF-8.

        Args:
            ids: a text's tokens. An id past the vocabulary, as padded logits may give, is nothing.
            skip_special_tokens: leaves special tokens out.
            after_prompt: the text goes on after another one. Some tokenizers put a space before every text
                and take it off again; then such a space belongs to the text.

        Raises:
            TokenOutOfRangeError: a negative id.
        """
        return self._detokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, after_prompt=after_prompt
        )

    def stream(self, skip_special_tokens: bool = True, *, after_prompt: bool = False) -> TextStream:
        """A text that grows by tokens: what it gives, joined, is `decode` of them.

        Args:
            skip_special_tokens: as for `decode`.
            after_prompt: as for `decode`.

        Raises:
            TokenizerError: the tokenizer's decoder is of a kind that no Llama-like model uses.
        """
        return self._detokenizer.stream(skip_special_tokens=skip_special_tokens, after_prompt=after_prompt)

    def apply_chat_template(
        self,
        messages: "Sequence[Message]",
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for a chat; encode it with `add_special_tokens=False`.

        Args:
            messages: the turns so far, oldest first, each with `role` and `content`.
            add_generation_prompt: ends with what opens the assistant's next turn.
            tools: JSON schemas of tools, if the template knows tools.
            variables: what else the template reads, by name.

        Raises:
            TokenizerError: the model has no chat template, or one that is not valid.
            RejectedError: the messages are not what the template takes.
        """
        return self._compiled_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    @cached_property
    def tool_call_format(self) -> ToolCallFormat | None:
        """How the model writes tool calls; None if its chat template tells of no way that is known."""
        return tool_call_format(self.chat_template)

    @cached_property
    def _compiled_template(self) -> "ChatTemplate":
        # Not at load: a model with a broken template still completes prompts, and Jinja takes time to import.
        from noria.text.chat_template import ChatTemplate

        if self.chat_template is None:
            raise TokenizerError("the model has no chat template; give it whole prompts")
        return ChatTemplate(self.chat_template, self.special_tokens)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RejectedError(f"a text must be a string; got {type(text).__name__}", value=text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RejectedError(
            f"character {error.start} of the text, {text[error.start]!r}, is half of a surrogate pair, "
            "which UTF-8 cannot hold",
            value=text,
        ) from None
