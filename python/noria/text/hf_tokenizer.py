"""Tokenizers of Hugging Face directories: `tokenizer.json`, and what the files beside it add."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers

from noria.errors import TokenizerError
from noria.text.tokenizer import Tokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Config = Mapping[str, object]


def load_hf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a directory.

    Read are `tokenizer.json`, and where they exist `tokenizer_config.json`, `chat_template.jinja` (else
    `chat_template.json`, else the template in `tokenizer_config.json`), `generation_config.json` and
    `config.json`. What is put around a text is what `tokenizer.json` says: `add_bos_token` and
    `add_eos_token` of `tokenizer_config.json` are passed over, as in transformers.

    Raises:
        TokenizerError: `tokenizer.json` is missing, or a file is not as it must be.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{path}: tokenizer.json is missing, so there is no tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{file}: not a tokenizer ({' '.join(str(error).split())})") from error
    config = _read_json(path / "tokenizer_config.json")
    _add_tokens(backend, config, path)
    special_tokens = {}
    for name in _SPECIAL_TOKENS:
        token = _token_text(config.get(name))
        if token is not None:
            special_tokens[name] = token
    for name in ("bos_token", "eos_token"):
        if name in special_tokens and backend.token_to_id(special_tokens[name]) is None:
            raise TokenizerError(
                f"{path}: {name} {special_tokens[name]!r} of tokenizer_config.json is not in the vocabulary"
            )
    return Tokenizer(
        backend,
        eos_token_ids=_eos_token_ids(path, backend, special_tokens),
        chat_template=_chat_template(path, config),
        special_tokens=special_tokens,
    )


def _read_json(file: Path) -> Config:
    """A JSON object; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file}: not valid JSON ({error})") from error
    except RecursionError:
        raise TokenizerError(f"{file}: its JSON is nested too deeply to be read") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{file}: a JSON object was expected, found {type(content).__name__}")
    return content


def _token_text(token: object) -> str | None:
    """A special token is written as its text or as a serialised `AddedToken`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_tokens(backend: tokenizers.Tokenizer, config: Config, path: Path) -> None:
    """Adds tokens that only `tokenizer_config.json` lists."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    known = backend.get_added_tokens_decoder()
    wrong = [key for key in listed if not (key.isascii() and key.isdigit() and len(key) < 11)]
    if wrong:
        raise TokenizerError(
            f"{path}: added_tokens_decoder of tokenizer_config.json has the key {wrong[0]!r}; "
            "it must be a token id"
        )
    entries = sorted(((int(key), entry) for key, entry in listed.items()), key=lambda item: item[0])
    for token_id, entry in entries:
        if token_id in known:
            continue
        text = _token_text(entry)
        if text is None or not isinstance(entry, Mapping):
            raise TokenizerError(f"{path}: added token {token_id} of tokenizer_config.json has no content")
        flags = {
            name: bool(entry.get(name, False))
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        backend.add_tokens([tokenizers.AddedToken(text, **flags)])
        if backend.token_to_id(text) != token_id:
            raise TokenizerError(
                f"{path}: tokenizer_config.json gives {text!r} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(text)}"
            )


def _eos_token_ids(
    path: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    """The tokenizer's end of sequence, and the model's: there may be several, such as an end of turn."""
    of_tokenizer = backend.token_to_id(special_tokens.get("eos_token", ""))
    ids = list(_ids(path / "generation_config.json")) or list(_ids(path / "config.json"))
    return tuple(dict.fromkeys(ids if of_tokenizer is None else [of_tokenizer, *ids]))


def _ids(file: Path) -> Iterator[int]:
    value = _read_json(file).get("eos_token_id")
    for token_id in value if isinstance(value, list) else [value]:
        if token_id is None:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise TokenizerError(f"{file}: eos_token_id must be token ids; got {value!r}")
        yield token_id


def _chat_template(path: Path, config: Config) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{file}: not UTF-8 ({error.reason} at byte {error.start})") from error
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        # Several, by name; the others are for tools and retrieval.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{path}: the chat template must be a string, found {type(template).__name__}")
    return template
