"""Tokenizers of GGUF files, against transformers, llama.cpp and the plainest BPE."""

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from noria.errors import ModelError, TokenizerError
from noria.loading.gguf_file import GgufFile
from noria.text import Tokenizer, load_tokenizer
from noria.text.detokenizer import byte_symbols
from noria.text.gguf_tokenizer import load_gguf_tokenizer
from noria.text.pre_tokenizers import PRE_TOKENIZERS

transformers = pytest.importorskip("transformers")

Golden = dict[str, Any]
WriteGguf = Callable[[Mapping[str, object]], Path]


@pytest.fixture(scope="module")
def peer(smollm2_path: Path) -> Any:
    """transformers' own reading of the same file."""
    return transformers.AutoTokenizer.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name, local_files_only=True
    )


def test_a_thousand_texts_without_numbers_are_those_of_transformers(
    smollm2: Tokenizer, peer: Any, texts_without_numbers: list[str]
) -> None:
    assert len(set(texts_without_numbers)) > 950
    ours = smollm2.encode_batch(texts_without_numbers)
    assert sum(map(len, ours)) > 20_000
    for text, ids in zip(texts_without_numbers, ours, strict=True):
        assert ids == peer.encode(text), repr(text)
        assert ids == smollm2.encode(text)
        decoded = peer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert smollm2.decode(ids, skip_special_tokens=False) == decoded


def test_spaces_before_a_digit_stay_together(smollm2: Tokenizer) -> None:
    # transformers' loader has no rule named "smollm" and tells the two spaces apart.
    assert smollm2.encode("x  1") == [104, 256, 33]


def with_rule(tokenizer: Tokenizer, name: str) -> Any:
    """A backend with SmolLM2's vocabulary and another family's rule."""
    backend = copy.deepcopy(tokenizer._backend)
    backend.pre_tokenizer = PRE_TOKENIZERS[name].build()
    model = backend.model
    model.ignore_merges = PRE_TOKENIZERS[name].ignores_merges
    backend.model = model
    return backend


@pytest.mark.parametrize("rule", ["smollm", "llama-bpe", "gpt-2", "default", "qwen2"])
def test_ids_are_those_that_llama_cpp_gives(smollm2: Tokenizer, golden_bpe: Golden, rule: str) -> None:
    golden = golden_bpe["ids"][rule]
    texts = golden_bpe["texts"][: len(golden)]
    assert len(texts) >= 80
    backend = with_rule(smollm2, rule)
    for text, ids in zip(texts, golden, strict=True):
        assert backend.encode(text).ids == ids, repr(text)
        if rule == "smollm":
            assert smollm2.encode(text) == ids


def plain_bpe(
    text: str, patterns: tuple[str, ...], ids: dict[str, int], ranks: dict[tuple[str, str], int]
) -> list[int]:
    """Cuts, then merges the pair of lowest rank that comes first, until there is none."""
    pieces = [text]
    for pattern in patterns:
        cut = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece):
                cut += [piece[end : match.start()], match.group()]
                end = match.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    symbol_of = {byte: symbol for symbol, byte in byte_symbols().items()}
    found = []
    for piece in pieces:
        parts = [symbol_of[byte] for byte in piece.encode()]
        parts = [part for part in parts if part in ids]  # SmolLM2's vocabulary lacks some control characters
        while True:
            pairs = [(ranks.get(pair, 10**9), i) for i, pair in enumerate(pairwise(parts))]
            if not pairs or min(pairs)[0] == 10**9:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [ids[part] for part in parts]
    return found


@pytest.fixture(scope="module")
def vocabulary(smollm2_path: Path) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    metadata: dict[str, Any] = GgufFile(smollm2_path).metadata
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    return ids, {pair: rank for rank, pair in enumerate(merges)}


def test_every_rule_gives_the_tokens_of_the_plainest_bpe(
    smollm2: Tokenizer,
    texts_with_numbers: list[str],
    texts_without_numbers: list[str],
    vocabulary: tuple[dict[str, int], dict[tuple[str, str], int]],
) -> None:
    ids, ranks = vocabulary
    rules = {rule: name for name, rule in PRE_TOKENIZERS.items()}
    assert len(rules) == 9
    for rule, name in rules.items():
        if rule.ignores_merges:
            continue  # which shortens the same pieces; llama.cpp's ids are the test of it
        backend = with_rule(smollm2, name)
        for text in texts_with_numbers[:40] + texts_without_numbers[:20]:
            assert backend.encode(text).ids == plain_bpe(text, rule.patterns, ids, ranks), (name, text)


def test_smollm_cuts_at_every_digit_of_any_script(
    smollm2: Tokenizer,
    texts_with_numbers: list[str],
    vocabulary: tuple[dict[str, int], dict[tuple[str, str], int]],
) -> None:
    # The rule as llama.cpp states it, not as our table does.
    patterns = (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    for text in texts_with_numbers:
        assert smollm2.encode(text) == plain_bpe(text, patterns, *vocabulary), repr(text)


def test_special_tokens_in_a_text_are_taken_as_such(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\n<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert smollm2.decode(ids) == "user\n"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\n<|im_end|>"


def test_what_the_file_says_of_itself_is_read(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2, 0)  # <|im_end|> by its key, <|endoftext|> by its name
    assert smollm2.bos_token_id == 1
    assert smollm2.encode("a") == smollm2.encode("a", add_special_tokens=False)  # add_bos_token is false
    assert smollm2.chat_template is not None
    assert smollm2.chat_template.startswith("{% for message in messages %}")


def spm_metadata(golden: Golden, **changes: object) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": golden["tokens"],
        "tokenizer.ggml.token_type": golden["types"],
        "tokenizer.ggml.scores": golden["scores"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_ids_are_those_that_llama_cpp_gives(
    golden_spm: Golden, write_gguf: WriteGguf, has_prefix: bool
) -> None:
    changes = {} if has_prefix else {"add_space_prefix": False}
    tokenizer = load_tokenizer(write_gguf(spm_metadata(golden_spm, **changes)))
    golden = golden_spm["ids"]["with space prefix" if has_prefix else "without"]
    assert len(golden) == len(golden_spm["texts"]) > 100
    for text, ids in zip(golden_spm["texts"], golden, strict=True):
        assert tokenizer.encode(text) == ids, repr(text)
        assert ids[0] == 1
        if not any(token in text for token in ("<s>", "</s>", "<tool>", "▁")):
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(ids[1:], after_prompt=True) == (" " if has_prefix and text else "") + text


def test_what_is_added_around_a_text_is_what_the_file_says(golden_spm: Golden, write_gguf: WriteGguf) -> None:
    def encode(**changes: object) -> list[int]:
        return load_tokenizer(write_gguf(spm_metadata(golden_spm, **changes))).encode("the")

    plain = encode(add_bos_token=False)
    assert 1 not in plain
    assert encode() == [1, *plain]
    assert encode(add_eos_token=True) == [1, *plain, 2]
    assert encode(add_bos_token=False, add_eos_token=True) == [*plain, 2]


def test_a_user_defined_token_is_text_and_a_control_token_is_not(
    golden_spm: Golden, write_gguf: WriteGguf
) -> None:
    tokenizer = load_tokenizer(write_gguf(spm_metadata(golden_spm)))
    tool = golden_spm["tokens"].index("<tool>")
    ids = tokenizer.encode("<tool>the</s>")
    assert tool in ids
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "<tool> the"


BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["<|begin|>", "a", "b", "ab", "Ġ", "<|eot_id|>", "<|eom_id|>", "c", ""],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 3, 3, 4, 5],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 5,
}


def test_a_rule_may_want_a_beginning_of_sequence(write_gguf: WriteGguf) -> None:
    assert load_tokenizer(write_gguf(BPE)).encode("ab") == [0, 3]
    quiet = {**BPE, "tokenizer.ggml.add_bos_token": False}
    assert load_tokenizer(write_gguf(quiet)).encode("ab c") == [3, 4, 7]


def test_every_token_that_ends_a_turn_is_found(write_gguf: WriteGguf) -> None:
    assert load_tokenizer(write_gguf(BPE)).eos_token_ids == (5, 6)
    more = {**BPE, "tokenizer.ggml.eot_token_id": 7}
    assert load_tokenizer(write_gguf(more)).eos_token_ids == (5, 7, 6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "wordpiece"}, "kind 'wordpiece' .* not supported; 'gpt2' and 'llama' are"),
        ({"model": None}, "'tokenizer.ggml.model' is missing"),
        (
            {"pre": "brand-new"},
            "the rule 'brand-new' for splitting words .* is not known; known are .*smollm",
        ),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokens": ["a", "b"]}, "2 tokens, but 9 token types"),
        ({"tokens": [1, 2]}, "should hold str elements; element 0 is 1"),
        (
            {"tokens": ["x", "a", "b", "ab", "a", "c", "d", "e", "f"]},
            "token 'a' has two ids, 1 and 4",
        ),
        ({"merges": ["a  b"]}, "merges and tokens do not match"),
        ({"merges": ["ab"]}, "merge 0 is 'ab'; two tokens with a space between were expected"),
        ({"merges": ["a z"]}, "merges and tokens do not match .*z"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        (
            {"bos_token_id": None},
            "a bos_token is to be added to texts, but tokenizer.ggml.bos_token_id is missing",
        ),
        ({"eos_token_id": 9}, "tokenizer.ggml.eos_token_id is 9, but there are 9 tokens"),
        ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' should be a boolean"),
        ({"model": "llama"}, "'tokenizer.ggml.scores' is missing"),
        ({"model": "llama", "scores": [0.0]}, "9 tokens, but 1 scores"),
    ],
)
def test_a_file_without_a_usable_tokenizer_is_told_in_one_sentence(
    write_gguf: WriteGguf, changes: dict[str, object], expected: str
) -> None:
    metadata = {**BPE, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}
    path = write_gguf({key: value for key, value in metadata.items() if value is not None})
    with pytest.raises(TokenizerError, match=expected) as raised:
        load_tokenizer(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_truncated_file_is_named(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(100_000))
    with pytest.raises(ModelError, match=r"half\.gguf: the file is truncated"):
        load_gguf_tokenizer(GgufFile(path))


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
