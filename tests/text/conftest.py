"""Texts in many scripts, the same on every run, and the real vocabulary that they are encoded with."""

import json
import random
import struct
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from noria.text import Tokenizer, load_tokenizer

WORDS = (
    "the quick brown fox don't it's we'll I'd they've CAN'T ISN'T y'all ’tis O’Neil naïve café Zürich œuvre",
    "cafe\u0301 e\u0301a\u0308o\u0302 Ångström Åse straße ẞ ŁódŹ İstanbul ıghdır ﬁne ǅungla",
    "Привет мир съешь ещё этих мягких булок українська їжак",
    "Ελλάδα ὁμοίως φιλοσοφία ἄνθρωπος",
    "مرحبا بالعالم السَّلامُ עברית שָׁלוֹם فارسی می‌خواهم",
    "नमस्ते दुनिया हिन्दी বাংলা தமிழ் తెలుగు ಕನ್ನಡ മലയാളം ਪੰਜਾਬੀ ગુજરાતી සිංහල",
    "สวัสดีชาวโลก ພາສາລາວ ភាសាខ្មែរ မြန်မာ ᠮᠣᠩᠭᠣᠯ བོད་སྐད",
    "你好世界 我們 漢字 龘 𠀀𠮷 こんにちは カタカナ ﾊﾝｶｸ 안녕하세요 한국어",
    "ქართული Հայերեն አማርኛ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ꦗꦮ 𐌰𐌱𐌲 𝔘𝔫𝔦 𝒜𝓫𝖈",
)
EMOJI = (
    "😀 😃🎉 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ ☃ ✈️ 🤷🏾‍♀️ 🫠 "
    "♠♥ → ⇒ ∑∫∂√ ≤≥≠ © ® ™ € £ ¥ ₿ … — – « » „“ ¿¡ § ¶ † ‡ • ◦ ■□▲ ░▒▓ │┌┐ ⠿"
)
SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    " \n",
    "\n ",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u2028",
)
ODD_SPACES = ("\u200b", "\ufeff", "\x0b", "\x0c", "\x1c", "\x85", "\u180e", "\u202f", "\u1680")
CODE = (
    "def f(x):\n    return x+y  # why?\n",
    'if (a&&b||!c) { s += "\\n\\t"; }',
    "SELECT * FROM t WHERE name='O''Brien';",
    '<div class="x">&nbsp;</div><!-- -->',
    "fn main() -> Result<(), Box<dyn Error>> {}",
    "a==b!=c<=d>=e<<f>>g**h//i%j^k~l@m",
    "https://example.org/a/b?c=d&e=f#g",
    "C:\\Users\\me\\file.txt",
    "{{ user['name'] }} ${HOME} $(ls -la) `x` ~~y~~",
    "\\begin{align} \\frac{a}{b} \\end{align}",
)
PUNCTUATION = (
    "...",
    "!!!",
    "?!",
    "--",
    "----",
    "(((",
    ")))",
    "''",
    "'",
    '"',
    "``",
    "’s",
    "'s",
    "'S",
    "'ll",
    "'LL",
    "'x",
    "#",
    "@",
    "&",
    "*",
    "_",
    "/",
    "\\",
    "|",
    "~",
    "^",
    "<",
    ">",
    "=",
    "+",
    "$",
    "%",
    ";",
    ":",
    ",",
    ".",
)
CONTROLS = tuple(
    chr(code) for code in [*range(0x20), 0x7F, 0x80, 0x9F, 0xAD, 0x200D, 0x2060, 0xFFFD, 0xE000, 0x10FFFF]
)
NUMBERS = (
    "1",
    "22",
    "333",
    "2024",
    "3.14",
    "1,000",
    "0x1F",
    "1e9",
    "²",
    "½",
    "Ⅷ",
    "٣٤",
    "१२",
    "①",
    "一",
    "𝟗",
    "〇",
    "a1",
    "1a",
    "v2",
)


def make_texts(num: int, seed: int, *, with_numbers: bool) -> list[str]:
    """Random mixtures; without numbers, no character of any Unicode category N."""
    rng = random.Random(seed)
    words = [word for line in WORDS for word in line.split()]
    pools: list[tuple[tuple[str, ...] | list[str], float]] = [
        (words, 10),
        (EMOJI.split(), 3),
        (SPACES, 8),
        (ODD_SPACES, 1),
        (CODE, 1),
        (PUNCTUATION, 4),
        (CONTROLS, 1),
        ([" "], 8),
    ]
    if with_numbers:
        pools.append((NUMBERS, 14))
    weights = [weight for _, weight in pools]
    texts = []
    while len(texts) < num:
        parts = [rng.choice(rng.choices(pools, weights)[0][0]) for _ in range(rng.randint(1, 24))]
        text = "".join(parts)
        if with_numbers or not any(unicodedata.category(c).startswith("N") for c in text):
            texts.append(text)
    return texts


@pytest.fixture(scope="session")
def texts_without_numbers() -> list[str]:
    return make_texts(1000, 0, with_numbers=False)


@pytest.fixture(scope="session")
def texts_with_numbers() -> list[str]:
    return make_texts(400, 1, with_numbers=True)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def _gguf_value(value: object) -> bytes:
    """A metadata value with its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    assert isinstance(value, list)
    assert value
    parts = [_gguf_value(element) for element in value]
    return (
        struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(value)) + b"".join(p[4:] for p in parts)
    )


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[[Mapping[str, object]], Path]:
    """Writes a GGUF file that holds metadata and no tensor."""

    def write(metadata: Mapping[str, object]) -> Path:
        path = tmp_path / "model.gguf"
        content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata))
        for key, value in metadata.items():
            content += struct.pack("<Q", len(key)) + key.encode() + _gguf_value(value)
        path.write_bytes(content)
        return path

    return write


def _golden(name: str) -> dict[str, object]:
    golden: dict[str, object] = json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return golden


@pytest.fixture(scope="session")
def golden_bpe() -> dict[str, object]:
    return _golden("golden_bpe.json")


@pytest.fixture(scope="session")
def golden_spm() -> dict[str, object]:
    return _golden("golden_spm.json")
