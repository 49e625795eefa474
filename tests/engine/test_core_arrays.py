"""An array that the core would not read as it is meant is refused in one sentence; nothing has changed."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from noria import _core
from noria.errors import ArrayError

INTS, LONGS = np.zeros(3, np.int32), np.zeros(3, np.int64)
NOT_INTS = "must be an array of int32 of 1 dimension, in C order."


def make_core() -> _core.Core:
    return _core.Core(num_blocks=8, scheduling_policy="own")


def buffer_of(core: _core.Core) -> np.ndarray:
    return np.zeros(core.layout.size, np.int32)


@pytest.mark.parametrize(
    ("array", "given"),
    [
        ([1, 2], "of type list"),
        (None, "of type NoneType"),
        (np.zeros(3), "an array of float64, shape [3]"),
        (np.zeros(3, ">i4"), "an array of >i4, shape [3]"),
        (np.zeros((2, 3), np.int32), "an array of int32, shape [2, 3]"),
        (np.int32(7), "of type int32"),
        (np.array(7, np.int32), "an array of int32, shape []"),
        (np.zeros(8, np.int32)[::2], "an array of int32, shape [4], not in C order"),
    ],
)
def test_tokens_to_pin_are_32_bit_numbers_in_a_row(array: object, given: str) -> None:
    core = make_core()
    with pytest.raises(ArrayError) as caught:
        core.pin(0, array)  # type: ignore[arg-type]
    assert str(caught.value) == f"token_ids is {given}, but {NOT_INTS}"
    assert (caught.value.name, caught.value.value) == ("token_ids", given)
    assert isinstance(caught.value, TypeError)
    core.check()


def calls(core: _core.Core) -> dict[str, Callable[[object], object]]:
    """By argument: a call with that one given, and the others right."""
    buffer = buffer_of(core)
    return {
        "prompt_token_ids": lambda given: core.submit(0, given, 1),
        "stop_token_ids": lambda given: core.submit(0, INTS, 1, stop_token_ids=given),
        "buffer": lambda given: core.plan(0, given),
        "draft_handles": lambda given: core.plan(0, buffer, given, INTS),
        "draft_counts": lambda given: core.plan(0, buffer, LONGS, given),
        "draft_ids": lambda given: core.plan(0, buffer, LONGS, INTS, given),
        "num_ids": lambda given: core.commit(1, given, INTS, 0, 0),
        "ids": lambda given: core.commit(1, INTS, given, 0, 0),
        "handles": lambda given: core.set_scores(given, LONGS, 0),
        "scores": lambda given: core.set_scores(LONGS, given, 0),
        "token_ids": partial(core.pin, 0),
    }


@pytest.mark.parametrize("name", calls(make_core()))
def test_every_array_of_a_verb_is_named_where_it_is_of_other_numbers(name: str) -> None:
    core = make_core()
    with pytest.raises(ArrayError, match=rf"^{name} is an array of float32, shape \[3\], but must be"):
        calls(core)[name](np.zeros(3, np.float32))
    assert (core.num_waiting, core.num_in_flight) == (0, 0)
    core.check()


def test_a_buffer_that_cannot_be_written_is_refused() -> None:
    core = make_core()
    buffer = buffer_of(core)
    buffer.flags.writeable = False
    with pytest.raises(ArrayError, match=r"^buffer is an array of int32, .* that is read-only, but must be"):
        core.plan(0, buffer)
    buffer.flags.writeable = True
    with pytest.raises(ArrayError, match=r"^draft_ids is an array of int32, .* that is in use elsewhere"):
        core.plan(0, buffer, LONGS, INTS, buffer)


def test_an_expander_reads_a_buffer_of_32_bit_numbers() -> None:
    core = make_core()
    expander = _core.Expander(core.layout)
    with pytest.raises(ArrayError, match=r"^buffer is an array of int64, shape \[\d+\], but must be"):
        expander.expand(buffer_of(core).astype(np.int64))  # type: ignore[arg-type]


def build_program() -> _core.CpuProgram:
    builder = _core.CpuBuilder()
    table = builder.table(np.ones((8, 4), np.float32))
    head = builder.matrix(np.ones((8, 4), np.float32), None, storage="float32")
    return builder.build(builder.logits(builder.embed(table), head), num_threads=1)


STEP = {
    "input_ids": np.array([1, 2], np.int64),
    "positions": np.array([0, 1], np.int64),
    "slot_mapping": np.array([2, 3], np.int64),
    "cu_seqlens_q": np.array([0, 2], np.int32),
    "context_lens": np.array([2], np.int32),
    "row_seats": np.array([0], np.int64),
    "block_tables": np.array([[1]], np.int32),
    "logits_indices": np.array([1], np.int64),
    "kv": np.zeros((1, 2, 2, 2, 1, 16), np.uint8),
    "logits": np.zeros((1, 8), np.float32),
}


def test_every_array_of_a_cpu_step_is_named_where_it_is_of_other_numbers() -> None:
    program = build_program()
    program.run(**STEP, kv_dtype="float32")  # type: ignore[arg-type]
    for name in STEP:
        arrays = STEP | {name: np.zeros(3, np.float64)}
        with pytest.raises(ArrayError, match=rf"^{name} is an array of float64, shape \[3\], but must be"):
            program.run(**arrays, kv_dtype="float32")  # type: ignore[arg-type]


def test_block_tables_and_weights_are_read_row_by_row() -> None:
    order = np.asfortranarray(np.zeros((2, 3), np.int32))
    with pytest.raises(ArrayError, match=r"^block_tables is .*, shape \[2, 3\], not in C order, but must be"):
        build_program().run(**STEP | {"block_tables": order}, kv_dtype="float32")  # type: ignore[arg-type]
    builder = _core.CpuBuilder()
    with pytest.raises(ArrayError, match=r"^weight is an array of float32, shape \[4, 8\], not in C order"):
        builder.matrix(np.ones((8, 4), np.float32).T, None, storage="float32")
    with pytest.raises(ArrayError, match=r"^bias is an array of float64"):
        builder.matrix(np.ones((8, 4), np.float32), np.ones(8), storage="float32")  # type: ignore[arg-type]
    with pytest.raises(ArrayError, match=r"^numbers is an array of float64"):
        builder.vector(np.ones(8))  # type: ignore[arg-type]
    with pytest.raises(ArrayError, match=r"^numbers is an array of float32, shape \[8\]"):
        builder.table(np.ones(8, np.float32))
    with pytest.raises(ArrayError, match=r"^rows is an array of int8"):
        builder.matrix_of_blocks(np.zeros((1, 18), np.int8), 32, None, storage="Q4_0")  # type: ignore[arg-type]
