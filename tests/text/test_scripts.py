"""Random texts in twenty scripts: encoded, decoded token by token, and searched for stop strings."""

import random

import pytest

from noria.text.answer import AnswerText
from noria.text.tokenizer import Tokenizer

SCRIPTS = {
    "latin": (0x20, 0x17F),
    "greek": (0x391, 0x3C9),
    "cyrillic": (0x410, 0x44F),
    "armenian": (0x531, 0x556),
    "hebrew": (0x5D0, 0x5EA),
    "arabic": (0x621, 0x64A),
    "devanagari": (0x904, 0x94D),
    "bengali": (0x985, 0x9B9),
    "tamil": (0xB85, 0xBB9),
    "thai": (0xE01, 0xE3A),
    "georgian": (0x10A0, 0x10FF),
    "ethiopic": (0x1200, 0x1248),
    "khmer": (0x1780, 0x17B3),
    "hiragana": (0x3041, 0x3096),
    "katakana": (0x30A1, 0x30FA),
    "cjk": (0x4E00, 0x9FA5),
    "hangul": (0xAC00, 0xD7A3),
    "gothic": (0x10330, 0x1034A),
    "mathematical": (0x1D400, 0x1D454),
    "emoji": (0x1F300, 0x1F64F),
}
JOINTS = (" ", "  ", "\n", "\t", "́", "‍", "️", "\x00", "1", "a")


def random_text(rng: random.Random, script: tuple[int, int]) -> str:
    chars = [chr(rng.randint(*script)) for _ in range(rng.randint(1, 40))]
    return "".join(char + (rng.choice(JOINTS) if rng.random() < 0.2 else "") for char in chars)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_and_its_stop_search_are_those_of_the_whole_text(smollm2: Tokenizer, name: str) -> None:
    rng = random.Random(name)
    num_stopped = 0
    for _ in range(50):
        text = random_text(rng, SCRIPTS[name])
        ids = smollm2.encode(text, add_special_tokens=False)
        assert smollm2.decode(ids) == text
        stream = smollm2.stream()
        assert "".join([*(stream.push(token_id) for token_id in ids), stream.flush()]) == text

        start = rng.randrange(len(text))
        stops = (text[start : start + rng.randint(1, 4)], "no such text")
        answer = AnswerText(smollm2.stream(), stops=stops)
        given = "".join([*(answer.push(token_id) for token_id in ids), answer.end()])
        assert answer.stop == stops[0]
        assert given == text[: text.index(stops[0])]
        assert "�" not in given
        # It ends with the token that completes the stop string, and not a token later.
        end = text.index(stops[0]) + len(stops[0])
        assert len(smollm2.decode(ids[: answer.num_tokens]).rstrip("�")) >= end
        before = smollm2.decode(ids[: answer.num_tokens - 1]).rstrip("�")
        assert len(before) < end
        num_stopped += answer.num_tokens < len(ids)
    assert num_stopped > 10
