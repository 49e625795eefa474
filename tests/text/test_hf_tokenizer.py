"""Tokenizers of Hugging Face directories: which file says what, and what is wrong with one."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from noria.errors import RejectedError, TokenizerError
from noria.text import Tokenizer, load_tokenizer

CORPUS = [
    "the cat sat on the mat",
    "<s> is not </s>",
    "naïve café 漢字 😀",
    "def f(x):\n    return x + 1",
] * 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A byte-level BPE whose tokenizer.json begins every text with <s>."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|eot|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    # What training leaves behind, and what must not touch a prompt.
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(
        content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
    )


def test_a_directory_with_nothing_but_tokenizer_json_has_a_tokenizer(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    text = "the café 漢字 😀 sat on the mat again and again"
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert len(ids) > 8
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.encode_batch([text, ""]) == [ids, [0]]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.vocab_size == tokenizer._backend.get_vocab_size()
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.chat_template) == ((), None, None)
    assert tokenizer.token_id("</s>") == 1
    assert tokenizer.token_id("no such token") is None


def test_every_end_of_sequence_is_found(directory: Path) -> None:
    write(directory, "config.json", {"eos_token_id": 5})
    assert load_tokenizer(directory).eos_token_ids == (5,)
    write(directory, "tokenizer_config.json", {"eos_token": {"content": "</s>", "__type": "AddedToken"}})
    assert load_tokenizer(directory).eos_token_ids == (1, 5)
    # What generates wins over what the model was trained with.
    write(directory, "generation_config.json", {"eos_token_id": [2, 1]})
    assert load_tokenizer(directory).eos_token_ids == (1, 2)
    write(directory, "generation_config.json", {"temperature": 0.6})
    assert load_tokenizer(directory).eos_token_ids == (1, 5)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<s>", "eos_token": "</s>"},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True},
        {"bos_token": "<|eot|>", "add_bos_token": True},
        {
            "bos_token": "<s>",
            "added_tokens_decoder": {
                "300": {"content": "<tool>", "special": False, "normalized": False},
                "301": {"content": "<|pad|>", "special": True, "normalized": False},
                "0": {"content": "<s>", "special": True},
            },
        },
    ],
)
def test_ids_are_those_of_transformers(directory: Path, config: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    assert tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size() == 300
    write(directory, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    ours = load_tokenizer(directory)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))
    for text in ["the cat", "", "x<tool>y<|pad|>z</s>", "naïve 😀\n\n"]:
        for adds in (True, False):
            expected = theirs.encode(text, add_special_tokens=adds, truncation=False, padding=False)
            assert ours.encode(text, add_special_tokens=adds) == expected
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_chat_template_is_found_wherever_it_is(directory: Path) -> None:
    chat = [{"role": "user", "content": "x"}]

    def rendered() -> str:
        return load_tokenizer(directory).apply_chat_template(chat)

    with pytest.raises(TokenizerError, match="the model has no chat template; give it whole prompts"):
        rendered()
    config: dict[str, Any] = {"bos_token": "<s>", "chat_template": "{{ bos_token }}config"}
    write(directory, "tokenizer_config.json", config)
    assert rendered() == "<s>config"
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    write(directory, "tokenizer_config.json", {**config, "chat_template": named})
    assert rendered() == "default"
    write(directory, "chat_template.json", {"chat_template": "json"})
    assert rendered() == "json"
    write(directory, "chat_template.jinja", "jinja {{ bos_token }}")
    assert rendered() == "jinja <s>"
    write(directory, "chat_template.jinja", "{% nope %}")
    tokenizer = load_tokenizer(directory)  # which still completes prompts
    with pytest.raises(TokenizerError, match="the chat template is not valid"):
        tokenizer.apply_chat_template(chat)


def test_a_sentencepiece_like_tokenizer_loses_the_space_that_it_added(tmp_path: Path) -> None:
    vocabulary = {
        "<unk>": 0,
        "▁the": 1,
        "▁cat": 2,
        "▁": 3,
        "t": 4,
        "h": 5,
        "e": 6,
        "c": 7,
        "a": 8,
        "▁th": 9,
        "▁t": 10,
    }
    vocabulary |= {"▁c": 11, "▁ca": 12, **{f"<0x{byte:02X}>": 13 + byte for byte in range(256)}}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the cat é")
    assert ids[:3] == [1, 2, 3]
    assert tokenizer.decode(ids) == "the cat é"
    assert tokenizer.decode(ids[1:], after_prompt=True) == " cat é"
    stream = tokenizer.stream(after_prompt=True)
    assert [stream.push(token_id) for token_id in ids[1:]] == [" cat", " ", "", "é"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing, so there is no tokenizer"),
        ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer \(EOF"),
        ("tokenizer.json", {"model": {"type": "Magic"}}, r"tokenizer\.json: not a tokenizer"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: a JSON object was expected, found list"),
        ("tokenizer_config.json", "{'a'}", r"tokenizer_config\.json: not valid JSON"),
        ("tokenizer_config.json", {"eos_token": "<gone>"}, "eos_token '<gone>' .* is not in the vocabulary"),
        ("tokenizer_config.json", {"chat_template": 3}, "the chat template must be a string, found int"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"999": {"content": "<x>"}}},
            "gives '<x>' the id 999, tokenizer.json 300",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"999": {}}}, "added token 999 .* has no content"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"a": {}}},
            "has the key 'a'; it must be a token id",
        ),
        ("tokenizer_config.json", "[" * 100_000, "nested too deeply"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id must be token ids; got '2'"),
        ("config.json", {"eos_token_id": [1, -1]}, r"eos_token_id must be token ids; got \[1, -1\]"),
        ("generation_config.json", "\ufeff{", "not valid JSON"),
    ],
)
def test_a_file_that_is_not_as_it_must_be_is_named(
    directory: Path, name: str, content: object, expected: str
) -> None:
    if content is None:
        (directory / name).unlink()
    else:
        write(directory, name, content)
    with pytest.raises(TokenizerError, match=expected) as raised:
        load_tokenizer(directory)
    assert str(directory) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_chat_template_that_is_not_utf8_is_named(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(
        TokenizerError, match=r"chat_template\.jinja: not UTF-8 \(invalid start byte at byte 2\)"
    ):
        load_tokenizer(directory)


def test_text_that_utf8_cannot_hold_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(
        RejectedError, match=r"character 2 of the text, '\\ud83d', is half of a surrogate pair"
    ):
        smollm2.encode("ab\ud83d")
    with pytest.raises(RejectedError, match="is half of a surrogate pair"):
        smollm2.encode_batch(["fine", "\udc00"])
    with pytest.raises(RejectedError, match="a text must be a string; got bytes"):
        smollm2.encode(b"ab")  # type: ignore[arg-type]
