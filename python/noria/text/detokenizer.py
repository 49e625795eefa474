"""Tokens to text, whole or one token at a time.

Both ways go through the same table of bytes: each token stands for some bytes, and a text is the bytes of
its tokens read as UTF-8, with U+FFFD for what is none. A stream is therefore equal to decoding everything at
once, by construction, and a token costs a dictionary look-up.

`tokenizers.decoders.DecodeStream` is not used. It holds back every invalid sequence until a valid character
follows, and decodes all that it holds again at each token, so 4,000 stray bytes take seconds; it has no way
to end, so a text that stops inside a character loses its tail; started from a prompt's last tokens, it gives
out what the prompt left unfinished.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import tokenizers

from noria.errors import TokenizerError, TokenOutOfRangeError


def byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_SYMBOLS = byte_symbols()


@dataclass(frozen=True, slots=True)
class _Rule:
    """How tokens become bytes, read from a tokenizer's decoder.

    Attributes:
        replacements: characters replaced in each token, in order.
        is_byte_level: a token's characters are `byte_symbols`.
        has_byte_fallback: `<0xAB>` is that byte.
        num_stripped: up to so many spaces are taken off the start of a text.
        dropped_at_start: a character that the first token loses, every time it occurs.
        separator: stands before every token but the first.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    is_byte_level: bool = False
    has_byte_fallback: bool = False
    num_stripped: int = 0
    dropped_at_start: str = ""
    separator: bytes = b""

    def piece(self, token: str, *, is_first: bool) -> bytes:
        """The bytes that a token stands for."""
        if self.is_byte_level:
            try:
                return bytes([_BYTE_SYMBOLS[symbol] for symbol in token])
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        if self.has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        if is_first and self.dropped_at_start:
            token = token.replace(self.dropped_at_start, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode() if is_first else self.separator + token.encode()


def _read_rule(decoder: object) -> _Rule | None:
    """The rule of a decoder as `tokenizer.json` describes it; None for one that this module does not know."""
    if decoder is None:
        return _Rule(separator=b" ")
    if not isinstance(decoder, dict):
        return None
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    rule, is_fused = _Rule(), False
    for part in parts:
        kind = part.get("type")
        if is_fused:
            # What follows works on the whole text; of that only this is known.
            if kind != "Strip" or part["content"] != " " or part["stop"] != 0 or rule.num_stripped:
                return None
            rule = replace(rule, num_stripped=part["start"])
        elif kind == "Fuse":
            is_fused = True
        elif rule.is_byte_level:
            return None
        elif kind == "ByteLevel" and rule == _Rule():
            rule = replace(rule, is_byte_level=True)
        elif kind == "Metaspace" and rule == _Rule():
            drops = part.get("prepend_scheme", "always") != "never"
            rule = replace(
                rule,
                replacements=((part["replacement"], " "),),
                dropped_at_start=part["replacement"] if drops else "",
            )
        elif kind == "Replace" and "String" in part["pattern"]:
            change = (part["pattern"]["String"], part["content"])
            rule = replace(rule, replacements=(*rule.replacements, change))
        elif kind == "ByteFallback":
            rule = replace(rule, has_byte_fallback=True)
        else:
            return None
    return rule


class Detokenizer:
    """The bytes of each token of a vocabulary, found when first asked for.

    A tokenizer whose decoder is of a kind that no Llama-like model uses is still decoded as a whole, by
    `tokenizers`; it cannot be streamed.

    Args:
        backend: with its decoder and its added tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        # A component's pickled state is its part of tokenizer.json, without the vocabulary.
        self._decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._rule = _read_rule(self._decoder)
        self._special_ids = {
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._pieces: dict[int, bytes] = {}

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, after_prompt: bool = False
    ) -> str:
        """Text of whole token sequences; see `Tokenizer.decode`."""
        if self._rule is None:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        stream = self.stream(skip_special_tokens=skip_special_tokens, after_prompt=after_prompt)
        return stream.push_all(ids) + stream.flush()

    def stream(self, *, skip_special_tokens: bool = True, after_prompt: bool = False) -> "TextStream":
        """Text of a sequence that grows; see `Tokenizer.stream`."""
        if self._rule is None:
            kind = self._decoder.get("type") if isinstance(self._decoder, dict) else self._decoder
            raise TokenizerError(f"the tokenizer's decoder, {kind!r}, cannot be streamed; decode whole texts")
        return TextStream(self, self._rule, skip_special_tokens, after_prompt)

    def is_special(self, token_id: int) -> bool:
        """Such a token is left out of a text where special tokens are skipped."""
        return token_id in self._special_ids

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token that is not the first; none for an id that no token has.

        Models have more logits than their tokenizer has tokens, padded to a round number: such an id can be
        sampled, and says nothing.

        Raises:
            TokenOutOfRangeError: a negative id.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id, is_first=False)
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """The bytes of a token at the start of a text."""
        return self._piece(token_id, is_first=True)

    def _piece(self, token_id: int, *, is_first: bool) -> bytes:
        if token_id < 0:
            raise TokenOutOfRangeError(
                f"a token id must be 0 or more; got {token_id}", value=token_id, limit=0
            )
        token = self._backend.id_to_token(token_id)
        if token is None or self._rule is None:
            return b""
        return self._rule.piece(token, is_first=is_first)


class TextStream:
    """A text that grows by tokens.

    Joined, what `push` and the final `flush` give is what `decode` gives for the same tokens.
    """

    __slots__ = ("_detokenizer", "_is_started", "_num_to_strip", "_skips_special", "_utf8")

    def __init__(
        self, detokenizer: Detokenizer, rule: _Rule, skip_special_tokens: bool, after_prompt: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._skips_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # A text that goes on after a prompt has neither a first token nor a start.
        self._is_started = after_prompt
        self._num_to_strip = 0 if after_prompt else rule.num_stripped

    def push(self, token_id: int) -> str:
        """Adds a token; what became certain by it. An incomplete character is held back.

        Raises:
            TokenOutOfRangeError: a negative id.
        """
        return self._decoded(self._bytes_of(token_id))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Adds tokens; the texts of all of them."""
        return self._decoded(b"".join([self._bytes_of(token_id) for token_id in token_ids]))

    def flush(self) -> str:
        """Ends the text: U+FFFD for a character that stayed incomplete."""
        return self._decoded(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        if self._skips_special and self._detokenizer.is_special(token_id):
            return b""
        if self._is_started:
            return self._detokenizer.piece(token_id)
        self._is_started = True
        return self._detokenizer.first_piece(token_id)

    def _decoded(self, data: bytes, *, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        while self._num_to_strip and text:
            if text[0] != " ":
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text
