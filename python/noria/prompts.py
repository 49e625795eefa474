"""The shapes in which prompts may be given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from noria.errors import RejectedError

if TYPE_CHECKING:
    from noria.text.chat_template import Message
    from noria.text.tokenizer import Tokenizer

PromptInput = str | Sequence[int] | npt.NDArray[np.integer] | Mapping[str, object]
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

_KEYS = ("prompt", "prompt_token_ids")
_SHAPES = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; at least one of its fields is given, and token ids win.

    Attributes:
        text: as given.
        token_ids: as given.
        offers_tools: a conversation that tells the model of tools, whose calls are read out of its answers.
    """

    text: str | None
    token_ids: list[int] | None
    offers_tools: bool = False


def split_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[object]:
    """What was given, as a list of prompts that `read_prompt` takes; one prompt alone is a list of one.

    Raises:
        RejectedError: it is nothing of the kind.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        if prompts.ndim == 0:
            raise RejectedError(
                f"prompts is an array of no dimension, {prompts!r}; it must be {_SHAPES}", value=prompts
            )
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RejectedError(
            f"prompts is of type {type(prompts).__name__}; it must be {_SHAPES}, or a list of them"
        )
    if len(prompts) and _is_int(prompts[0]):
        return [prompts]
    return list(prompts)


def read_prompt(prompt: object, what: str = "a prompt") -> Prompt:
    """One prompt, in one of its shapes, or as it was read before.

    Args:
        prompt: of any kind.
        what: what an error calls it.

    Raises:
        RejectedError: it has none of them.
    """
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt, token_ids=None)
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt, what)
    return Prompt(text=None, token_ids=_read_ids(prompt, what))


def tokenize_prompts(
    prompts: Sequence[object], tokenizer: "Tokenizer | None"
) -> list[tuple[Prompt, list[int] | RejectedError]]:
    """Each prompt with its token ids, or with why it has none; texts are encoded together.

    Args:
        prompts: as `split_prompts` gives them.
        tokenizer: None if there is none, so that a text is refused.
    """
    read: list[tuple[Prompt, list[int] | RejectedError]] = []
    texts: list[tuple[int, str]] = []
    for index, given in enumerate(prompts):
        try:
            prompt = read_prompt(given)
            if prompt.token_ids is None and tokenizer is None:
                raise RejectedError(
                    "it is a text, but the engine has no tokenizer (skip_tokenizer_init is set)", value=given
                )
        except RejectedError as error:
            read.append((Prompt(text=given if isinstance(given, str) else None, token_ids=None), error))
            continue
        if prompt.token_ids is None and prompt.text is not None:
            texts.append((index, prompt.text))
        read.append((prompt, prompt.token_ids or []))
    if tokenizer is not None:
        for (index, _), encoded in zip(texts, _encoded(tokenizer, texts), strict=True):
            read[index] = (read[index][0], encoded)
    return read


def split_conversations(messages: object) -> "list[Sequence[Message]]":
    """What was given, as a list of conversations; one alone is a list of one.

    Raises:
        RejectedError: it is nothing of the kind.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RejectedError(
            f"messages is of type {type(messages).__name__}; it must be a list of messages, or of such lists",
            value=messages,
        )
    if messages and all(isinstance(message, Mapping) for message in messages):
        return [messages]
    for index, conversation in enumerate(messages):
        if isinstance(conversation, str | bytes | Mapping) or not isinstance(conversation, Sequence):
            raise RejectedError(
                f"prompt {index} is of type {type(conversation).__name__}; it must be a list of messages",
                value=conversation,
            )
    return list(messages)


def chat_prompt(
    tokenizer: "Tokenizer | None",
    messages: "Sequence[Message]",
    *,
    tools: Sequence[Mapping[str, object]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, object] | None,
) -> tuple[Prompt, list[int]]:
    """A conversation as a prompt, and its token ids; see `Tokenizer.apply_chat_template`.

    Raises:
        RejectedError: there is no tokenizer, or the messages are not what the template takes.
        TokenizerError: the model has no chat template, or a bad one.
    """
    if tokenizer is None:
        raise RejectedError(
            "it is a conversation, but the engine has no tokenizer (skip_tokenizer_init is set)",
            value=messages,
        )
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
    )
    # The template writes the special tokens itself.
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return Prompt(text=text, token_ids=token_ids, offers_tools=bool(tools)), token_ids


def _encoded(tokenizer: "Tokenizer", texts: Sequence[tuple[int, str]]) -> list[list[int] | RejectedError]:
    """Each text's token ids, or why it has none."""
    try:
        return [*tokenizer.encode_batch([text for _, text in texts])]
    except RejectedError:  # it does not say which
        return [_encoded_alone(tokenizer, text) for _, text in texts]


def _encoded_alone(tokenizer: "Tokenizer", text: str) -> list[int] | RejectedError:
    try:
        return tokenizer.encode(text)
    except RejectedError as error:
        return error


def _read_mapping(prompt: Mapping[object, object], what: str) -> Prompt:
    unknown = [key for key in prompt if key not in _KEYS]
    if unknown:
        raise RejectedError(
            f"{what} has the key {unknown[0]!r}; it may have {' and '.join(_KEYS)}", value=unknown[0]
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise RejectedError(f"{what} has none of the keys {' and '.join(_KEYS)}", value=dict(prompt))
    if text is not None and not isinstance(text, str):
        raise RejectedError(f"prompt is of type {type(text).__name__}; it must be a text", value=text)
    return Prompt(text=text, token_ids=None if ids is None else _read_ids(ids, what))


def _read_ids(ids: object, what: str) -> list[int]:
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise RejectedError(f"{what} is of type {type(ids).__name__}; it must be {_SHAPES}", value=ids)
    for place, token_id in enumerate(ids):
        if not _is_int(token_id):
            raise RejectedError(
                f"token id {place} of {what} is {token_id!r}; it must be an integer", value=token_id
            )
    return [int(token_id) for token_id in ids]


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
