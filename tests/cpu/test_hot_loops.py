"""What the compiler made of noria-cpu's kernels, seen in the built extension."""

import re
import shutil
import subprocess

import pytest

from noria import _core

PRODUCT = re.compile(r"(vfmadd|vpmaddwd|vpdpbusd).*%[yz]mm")
JUMP = re.compile(r"j\w+\s+([0-9a-f]+)\b")
STORED_TO_STACK = re.compile(r"%[yz]mm\d+,(0x[0-9a-f]+)?\(%rsp")
INSTRUCTION = re.compile(r"^\s+([0-9a-f]+):\s+(.*)$")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
OPTIMISED = {"avx2", "avx_vnni", "avx512", "avx512_vnni"}

Code = list[tuple[int, str]]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Code]:
    """Addresses and instructions by kernel."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("there is no objdump to disassemble with")
    command = [objdump, "-d", "-C", "--no-show-raw-insn", _core.__file__]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, Code] = {}
    current: Code | None = None
    for line in text.splitlines():
        if name := FUNCTION.match(line):
            parts = name[1].split("::")
            is_kernel = parts[:2] == ["noria_cpu", "kernels"] and parts[2] in OPTIMISED
            current = found.setdefault("::".join(parts[2:4]), []) if is_kernel else None
        elif current is not None and (instruction := INSTRUCTION.match(line)):
            current.append((int(instruction[1], 16), instruction[2]))
    if not found:
        pytest.skip("the extension has no kernels of vectors, or its symbols were stripped")
    return found


def hot_loops(code: Code) -> list[list[str]]:
    """Innermost loops that multiply: those have four products or more."""
    loops = [
        (int(jump[1], 16), at)
        for at, text in code
        if (jump := JUMP.match(text)) and code[0][0] <= int(jump[1], 16) <= at
    ]
    innermost = [
        loop
        for loop in loops
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    bodies = [[text for at, text in code if first <= at <= last] for first, last in innermost]
    return [body for body in bodies if sum(bool(PRODUCT.match(text)) for text in body) >= 4]


def test_no_hot_loop_spills_a_sum(kernels: dict[str, Code]) -> None:
    """A sum that goes through the stack waits for it at each step; constants read from there cost nothing."""
    num_loops = 0
    for name, code in kernels.items():
        for body in hot_loops(code):
            num_loops += 1
            assert not [text for text in body if STORED_TO_STACK.search(text)], f"{name}: {body}"
    assert num_loops > 50, "few loops were found: the search is wrong"


def test_no_kernel_calls_an_intrinsic(kernels: dict[str, Code]) -> None:
    """A function without the kernel's instruction set cannot inline its intrinsics, and calls each."""
    for name, code in kernels.items():
        calls = [text for _, text in code if text.startswith("call") and "core_arch" in text]
        assert not calls, f"{name}: {calls}"
        assert not [text for _, text in code if text.startswith("call") and "{{closure}}" in text], name
