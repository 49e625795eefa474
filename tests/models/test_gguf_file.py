"""The GGUF header reader: what it reads, and that nothing but ModelError comes of a corrupt file."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from noria.errors import ModelError
from noria.loading.gguf_file import GgufFile


def write(path: Path, fill: Callable[[gguf.GGUFWriter], object]) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fill_small(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(77)
    writer.add_string("text", "blå")
    writer.add_bool("flag", True)
    writer.add_float32("number", 1.5)
    writer.add_float64("wide", 0.1)
    writer.add_int8("tiny", -3)
    writer.add_uint64("big", 2**63)
    writer.add_array("strings", ["a", "", "ccc"])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("numbers", [0.5, 1.5])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("first", np.arange(128, dtype=np.float32).reshape(2, 64))
    writer.add_tensor("second", np.ones((3,), np.float16))
    quantised = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("third", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf", fill_small)


def refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_every_kind_of_metadata_is_read(small: Path) -> None:
    assert GgufFile(small).metadata == {
        "general.architecture": "llama",
        "llama.context_length": 77,
        "text": "blå",
        "flag": True,
        "number": 1.5,
        "wide": 0.1,
        "tiny": -3,
        "big": 2**63,
        "strings": ["a", "", "ccc"],
        "integers": [1, -2, 3],
        "numbers": [0.5, 1.5],
        "nested": [[1, 2], [3]],
    }


def test_tensors_lie_where_the_gguf_package_finds_them(small: Path) -> None:
    file = GgufFile(small)
    peer = {tensor.name: tensor for tensor in gguf.GGUFReader(small).tensors}
    assert list(file.tensors) == list(peer) == ["first", "second", "third"]
    for name, info in file.tensors.items():
        assert info.offset == peer[name].data_offset
        assert info.nbytes == peer[name].n_bytes
        assert info.ggml_type == peer[name].tensor_type
        assert bytes(file.tensor_bytes(name)) == peer[name].data.tobytes()
    assert file.tensors["first"].shape == (2, 64)
    with pytest.raises(ModelError, match="tensor 'fourth' is missing"):
        file.tensor_bytes("fourth")


def test_a_value_is_checked_to_be_of_its_kind(small: Path) -> None:
    file = GgufFile(small)
    assert file.value("tiny", int) == -3
    assert file.value("tiny", float) == -3.0
    assert file.value("absent", str, "x") == "x"
    for key, kind, message in [
        ("absent", int, "'absent' is missing"),
        ("text", int, "'text' should be an integer, found a string"),
        ("number", int, "'number' should be an integer, found a number"),
        ("flag", int, "'flag' should be an integer, found a boolean"),
        ("strings", str, "'strings' should be a string, found an array"),
    ]:
        with pytest.raises(ModelError, match=message):
            file.value(key, kind)


def test_a_file_that_is_none_of_ours_is_refused(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    refused(small, b"", "the file is empty")
    refused(
        small, b"PK\x03\x04" + whole[4:], r"not a GGUF file: it starts with b'PK\\x03\\x04', expected b'GGUF'"
    )
    refused(
        small,
        whole[:4] + struct.pack("<I", 1) + whole[8:],
        "version 1 is not supported; versions 2 and 3 are",
    )
    refused(small, whole[:4] + struct.pack(">I", 3) + whole[8:], "big-endian")
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")


def test_a_file_cut_anywhere_is_refused(small: Path) -> None:
    whole = small.read_bytes()
    for length in range(1, len(whole) - 64, 3):  # the last tensor ends in padding
        refused(small, whole[:length], "truncated or corrupt|not a GGUF file")


def test_a_huge_count_is_refused_before_anything_is_made_of_it(small: Path) -> None:
    whole = small.read_bytes()
    huge = struct.pack("<Q", 2**62)
    refused(small, whole[:8] + huge + whole[16:], f"{2**62} tensors announced")
    refused(small, whole[:16] + huge + whole[24:], f"{2**62} metadata keys announced")
    refused(small, whole[:24] + huge + whole[32:], f"a metadata key needs {2**62} bytes")
    for key in (b"strings", b"integers", b"nested"):
        at = whole.index(key) + len(key) + 8
        refused(small, whole[:at] + huge + whole[at + 8 :], f"truncated or corrupt: .*'{key.decode()}'")


def test_tensors_that_cannot_be_are_refused(small: Path) -> None:
    whole = small.read_bytes()
    at = whole.index(b"third") + 5  # rank, 2 dimensions, type, offset

    def changed(offset: int, kind: str, value: int) -> bytes:
        packed = struct.pack(kind, value)
        return whole[: at + offset] + packed + whole[at + offset + len(packed) :]

    refused(small, changed(0, "<I", 5), "'third' has 5 dimensions; 1 to 4 are allowed")
    refused(small, changed(4, "<Q", 0), "'third' has an empty dimension")
    refused(small, changed(4, "<Q", 33), "'third' has rows of 33 elements; Q8_0 needs a multiple of 32")
    refused(small, changed(12, "<Q", 2**61), "'third' ends at byte")
    refused(small, changed(20, "<I", 99), "'third' has the unknown type 99")
    refused(small, changed(24, "<Q", 33), "'third' starts at 33, not a multiple of 32")
    refused(small, changed(24, "<Q", 2**40), "'third' ends at byte")
    renamed = whole.replace(b"third", b"first")
    refused(small, renamed, "tensor 'first' occurs twice")


def test_metadata_that_cannot_be_is_refused(small: Path) -> None:
    whole = small.read_bytes()
    at = whole.index(b"number") + 6
    refused(
        small, whole[:at] + struct.pack("<I", 77) + whole[at + 4 :], "'number' has the unknown value type 77"
    )
    at = whole.index(b"integers") + 8 + 4
    refused(
        small, whole[:at] + struct.pack("<I", 77) + whole[at + 4 :], "'integers' has the unknown element type"
    )
    refused(small, whole.replace(b"ccc", b"\xffcc"), "string 2 of 'strings' is not valid UTF-8")
    refused(
        small,
        whole.replace(b"\x04\x00\x00\x00\x00\x00\x00\x00flag", b"\x04\x00\x00\x00\x00\x00\x00\x00text"),
        "twice",
    )


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    array = struct.pack("<IQ", 9, 1) * 5 + struct.pack("<IQ", 4, 0)
    key = struct.pack("<Q", 4) + b"deep" + struct.pack("<I", 9)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    refused(tmp_path / "deep.gguf", header + key + array + bytes(64), "'deep' nests arrays deeper than 4")


@pytest.mark.parametrize("alignment", [0, 3, "32"])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: int | str) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        if isinstance(alignment, str):
            writer.add_string("general.alignment", alignment)
        else:
            writer.add_uint32("general.alignment", alignment)

    path = write(tmp_path / "odd.gguf", fill)
    with pytest.raises(ModelError, match=r"'general\.alignment' should be a power of two"):
        GgufFile(path)


def test_flipped_bytes_raise_nothing_but_model_errors(small: Path) -> None:
    whole = small.read_bytes()
    header_size = GgufFile(small).tensors["first"].offset
    generator = random.Random(0)
    num_refused = 0
    for _ in range(1000):
        content = bytearray(whole)
        for _ in range(generator.choice([1, 1, 2, 4])):
            value = generator.choice([0, 255, 128, 9, 8, generator.randrange(256)])
            content[generator.randrange(header_size)] = value
        small.write_bytes(content)
        try:
            GgufFile(small)
        except ModelError:
            num_refused += 1
    assert 300 < num_refused < 1000
