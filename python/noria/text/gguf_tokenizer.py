"""Tokenizers from the metadata of GGUF files: byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from noria.errors import ModelError, TokenizerError
from noria.loading.gguf_file import GgufFile
from noria.text.pre_tokenizers import PRE_TOKENIZERS
from noria.text.tokenizer import Tokenizer

T = TypeVar("T")

# llama_token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end a turn or a text, whatever model they are in. A GGUF file has room for one end of
sequence where `generation_config.json` lists several; llama.cpp, too, finds the others by name."""

_SPACE = "▁"

_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # so spelled in the format
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}


def load_gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer in a GGUF file.

    Raises:
        TokenizerError: it holds no tokenizer, or one of a kind that is not known.
    """
    path = file.path
    model = _value(file, "tokenizer.ggml.model", str)
    vocabulary = _read_vocabulary(file)
    if model == "gpt2":
        backend, adds_bos = _byte_level_bpe(file, vocabulary)
        special_ids = _special_ids(file, vocabulary, {})
    elif model == "llama":
        special_ids = _special_ids(file, vocabulary, {"unk_token": 0, "bos_token": 1, "eos_token": 2})
        backend, adds_bos = _sentencepiece_bpe(file, vocabulary, special_ids), True
    else:
        raise TokenizerError(
            f"{path}: tokenizers of the kind {model!r} (tokenizer.ggml.model) are not supported; "
            "'gpt2' and 'llama' are"
        )
    _add_tokens(backend, vocabulary)
    special_tokens = {name: vocabulary.tokens[token_id] for name, token_id in special_ids.items()}
    adds_bos = _value(file, "tokenizer.ggml.add_bos_token", bool, adds_bos)
    adds_eos = _value(file, "tokenizer.ggml.add_eos_token", bool, False)
    for name, adds in (("bos_token", adds_bos), ("eos_token", adds_eos)):
        if adds and name not in special_tokens:
            raise TokenizerError(
                f"{path}: a {name} is to be added to texts, but {_SPECIAL_KEYS[name]} is missing"
            )
    _add_ends(
        backend,
        special_tokens["bos_token"] if adds_bos else None,
        special_tokens["eos_token"] if adds_eos else None,
    )
    chat_template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos_token_ids=_eos_token_ids(file, vocabulary, special_ids),
        chat_template=chat_template if isinstance(chat_template, str) else None,
        special_tokens=special_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id.

    Attributes:
        tokens: as the file spells them, each once.
        types: one a token.
        ids: the inverse of `tokens`.
    """

    path: Path
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def _value(file: GgufFile, key: str, kind: type[T], default: T | None = None) -> T:
    try:
        return file.value(key, kind, default)
    except ModelError as error:
        raise TokenizerError(str(error)) from None


def _list(file: GgufFile, key: str, kind: type[T]) -> list[T]:
    """A metadata array, each element of it checked."""
    values = _value(file, key, list)
    for index, value in enumerate(values):
        if type(value) is not kind:
            raise TokenizerError(
                f"{file.path}: metadata key {key!r} should hold {kind.__name__} elements; "
                f"element {index} is {value!r}"
            )
    return values


def _read_vocabulary(file: GgufFile) -> _Vocabulary:
    tokens = _list(file, "tokenizer.ggml.tokens", str)
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        types = _list(file, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise TokenizerError(f"{file.path}: {len(tokens)} tokens, but {len(types)} token types")
    # Unnamed tokens fill a vocabulary up to a round number; llama.cpp names them so.
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        second = next(token_id for token_id, token in enumerate(tokens) if ids[token] != token_id)
        raise TokenizerError(
            f"{file.path}: token {tokens[second]!r} has two ids, {second} and {ids[tokens[second]]}"
        )
    return _Vocabulary(file.path, tokens, types, ids)


def _byte_level_bpe(file: GgufFile, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """A byte-level BPE, and whether its texts begin with a beginning of sequence."""
    if "tokenizer.ggml.pre" not in file.metadata:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.pre is missing, so how words are split is not known; "
            "convert the model again"
        )
    pre = _value(file, "tokenizer.ggml.pre", str)
    rule = PRE_TOKENIZERS.get(pre)
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(
            f"{file.path}: the rule {pre!r} for splitting words (tokenizer.ggml.pre) is not known; "
            f"known are {known}"
        )
    merges = [
        _split_merge(file.path, index, merge)
        for index, merge in enumerate(_list(file, "tokenizer.ggml.merges", str))
    ]
    try:
        model = models.BPE(vocabulary.ids, merges, ignore_merges=rule.ignores_merges)
    except Exception as error:  # tokenizers raises bare Exception: a merge of what is no token
        raise TokenizerError(f"{file.path}: merges and tokens do not match ({error})") from error
    backend = tokenizers.Tokenizer(model)
    if rule.normalizes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _split_merge(path: Path, index: int, merge: str) -> tuple[str, str]:
    # The first character may itself be a space.
    left, _, right = merge[1:].partition(" ")
    if not merge or not right:
        raise TokenizerError(
            f"{path}: merge {index} is {merge!r}; two tokens with a space between were expected"
        )
    return merge[0] + left, right


def _sentencepiece_bpe(
    file: GgufFile, vocabulary: _Vocabulary, special_ids: dict[str, int]
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the neighbours whose joint token has the best score are merged first."""
    scores = _list(file, "tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise TokenizerError(f"{file.path}: {len(vocabulary.tokens)} tokens, but {len(scores)} scores")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges_by_score(vocabulary, scores),
            unk_token=vocabulary.tokens[special_ids["unk_token"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_space_prefix = _value(file, "tokenizer.ggml.add_space_prefix", bool, True)
    escape = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), escape] if has_space_prefix else [escape]
    )
    whole = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_space_prefix:
        whole.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(whole)
    return backend


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that make a third; best score of the third first.

    Scores of a trained vocabulary differ, so this order is SentencePiece's; pairs that make the same token
    are in the order of their ids, as transformers has them. Control and user-defined tokens are never made
    by merging: they are found in the text before.
    """
    is_piece = [kind in (_NORMAL, _UNUSED) for kind in vocabulary.types]
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if is_piece[i]}
    merges = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[token_id], token_id, left, right))
    merges.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in merges]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Declares the tokens that are found in a text as they are spelled, before it is split."""
    by_type = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token, kind in by_type
            if kind in (_CONTROL, _UNKNOWN)
        ]
    )
    backend.add_tokens(
        [tokenizers.AddedToken(token, normalized=False) for token, kind in by_type if kind == _USER_DEFINED]
    )


def _add_ends(backend: tokenizers.Tokenizer, bos_token: str | None, eos_token: str | None) -> None:
    """Puts tokens around every text that is encoded with special tokens."""
    ends = [token for token in (bos_token, eos_token) if token is not None]
    if ends:
        # As a list, not as one string: a token may hold spaces.
        parts = [token for token in (bos_token, "$A", eos_token) if token is not None]
        ids = [(token, backend.token_to_id(token)) for token in ends]
        backend.post_processor = TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=ids)


def _special_ids(file: GgufFile, vocabulary: _Vocabulary, defaults: dict[str, int]) -> dict[str, int]:
    """Ids of special tokens, by transformers' names for them."""
    ids = {}
    for name, key in _SPECIAL_KEYS.items():
        token_id = _token_id(file, vocabulary, key, defaults.get(name))
        if token_id is not None:
            ids[name] = token_id
    return ids


def _token_id(file: GgufFile, vocabulary: _Vocabulary, key: str, default: int | None = None) -> int | None:
    if key not in file.metadata and default is None:
        return None
    token_id = _value(file, key, int, default)
    if not 0 <= token_id < len(vocabulary.tokens):
        raise TokenizerError(
            f"{file.path}: {key} is {token_id}, but there are {len(vocabulary.tokens)} tokens"
        )
    return token_id


def _eos_token_ids(file: GgufFile, vocabulary: _Vocabulary, special_ids: dict[str, int]) -> tuple[int, ...]:
    found = [special_ids.get("eos_token")]
    found += [
        _token_id(file, vocabulary, key)
        for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ]
    named = [vocabulary.ids.get(token) for token in _ENDS]
    found += [
        token_id for token_id in named if token_id is not None and vocabulary.types[token_id] == _CONTROL
    ]
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
