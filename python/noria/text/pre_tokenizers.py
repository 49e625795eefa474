"""How each family of byte-level vocabularies cuts text before it merges tokens.

A GGUF file names its rule and does not hold it: `tokenizer.ggml.pre`. The rules are the models' own, as
published in their `tokenizer.json`; which name means which is read from llama.cpp (`src/llama-vocab.cpp`). A
name that is not here is an error: text cut by a wrong rule still encodes, into more tokens and worse answers.

llama.cpp gives the same tokens but where it departs from the models: it does not compose characters for
`qwen2`, and does not count combining marks as letters for `tekken` and `gpt-4o`.
"""

from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"

# Words split where capitals begin.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}"
_GPT4O = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHED}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """One family's rule.

    Attributes:
        patterns: each cuts the pieces that the one before left into what it matches and what lies between.
        ignores_merges: a piece that is a token is taken whole, even if no merges lead to it.
        adds_bos: a text begins with the beginning of sequence, unless the file says otherwise.
        normalizes: characters are composed first (NFC).
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The rule, and bytes written as symbols."""
        splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_RULES: tuple[tuple[PreTokenizerRule, tuple[str, ...]], ...] = (
    (
        PreTokenizerRule((_DIGIT, _GPT2)),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (
        PreTokenizerRule((_GPT2,)),
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0", "mellum"),
    ),
    (PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), ("default",)),
    (
        PreTokenizerRule((_LLAMA3,), ignores_merges=True, adds_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (PreTokenizerRule((_LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (PreTokenizerRule((_QWEN2,), normalizes=True), ("qwen2",)),
    (
        PreTokenizerRule((_QWEN2,)),
        ("deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    ),
    (PreTokenizerRule((_TEKKEN,), ignores_merges=True, adds_bos=True), ("tekken",)),
    (PreTokenizerRule((_GPT4O,)), ("gpt-4o", "llama4", "kanana2")),
)

PRE_TOKENIZERS = {name: rule for rule, names in _RULES for name in names}
"""By the value of `tokenizer.ggml.pre`."""
