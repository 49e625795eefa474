"""The paged ragged forward against our dense float64 reference and against transformers."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from paged_steps import Harness, Sequence
from tiny_llama import token_ids

from noria.backends.ops import Scope
from noria.backends.torch import attention
from noria.models import Model, load_model

CPU = torch.device("cpu")
EXACT = 1e-9
"""Against our reference in float64: rounding alone."""
PEER = 2e-3
"""Against transformers, whose norm and RoPE compute in float32 even in float64."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "explicit head_dim": {"head_dim": 12},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
}

MakeCheckpoint = Callable[..., Checkpoint]


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float64) -> Model:
    return load_model(checkpoint.directory, dtype=dtype, device=CPU)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_prefill_gives_the_logits_of_both_references(checkpoint: MakeCheckpoint, shape: str) -> None:
    made = checkpoint(**SHAPES[shape])
    ids = token_ids(80, 0)
    harness = Harness(load(made))
    logits = harness.prefill(harness.add(ids))
    assert_close(logits, made.dense(ids), EXACT)
    assert_close(logits, made.transformers(ids), PEER)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_token_moves_the_last_logits_by_far_more_than_the_tolerance(
    checkpoint: MakeCheckpoint, shape: str
) -> None:
    made = checkpoint(**SHAPES[shape])
    ids = token_ids(80, 0)
    other = [(ids[0] + 1) % 97, *ids[1:]]
    moved = (made.transformers(ids)[-1] - made.transformers(other)[-1]).abs().max()
    assert moved > 10 * PEER


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_nothing(checkpoint: MakeCheckpoint, shape: str, chunk: int) -> None:
    made = checkpoint(**SHAPES[shape])
    ids = token_ids(80, 0)
    harness = Harness(load(made))
    assert_close(harness.prefill(harness.add(ids), chunk), made.dense(ids), EXACT)


def test_a_prompt_longer_than_a_tile_of_queries_is_right_whole_and_in_chunks(
    checkpoint: MakeCheckpoint,
) -> None:
    made = checkpoint()
    ids = token_ids(300, 1)
    harness = Harness(load(made), max_blocks=80)
    wanted = made.dense(ids)
    assert_close(harness.prefill(harness.add(ids)), wanted, EXACT)
    assert_close(wanted, made.transformers(ids), PEER)
    sequence = harness.add(ids)
    rows = harness.step(chunks=[(sequence, 4)]) + harness.step(
        chunks=[(sequence, 290), (harness.add(ids), 294)]
    )
    assert_close(torch.cat(rows[:2]), wanted[:294], EXACT)
    assert_close(rows[2], wanted[:294], EXACT)


def test_a_mix_of_decodes_chunks_and_padding_gives_each_row_its_own_logits(
    checkpoint: MakeCheckpoint,
) -> None:
    made = checkpoint()
    harness = Harness(load(made))
    lengths = [3, 40, 41, 9, 130, 17]
    final = [token_ids(length + 6, seed) for seed, length in enumerate(lengths)]
    sequences = [harness.add(ids[:length]) for ids, length in zip(final, lengths, strict=True)]
    for sequence in sequences[:4]:
        harness.prefill(sequence)
    for step in range(6):
        for sequence in sequences[:4]:
            harness.extend(sequence, final[sequence.seat][lengths[sequence.seat] + step])
        chunks = [(sequences[4], 20), (sequences[5], 2)]
        rows = harness.step(decodes=sequences[:4], chunks=chunks, padding=[3, 1])
        for sequence, logits in zip(sequences, rows, strict=True):
            wanted = made.dense(final[sequence.seat])[: sequence.num_computed][-len(logits) :]
            assert_close(logits, wanted, EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_rows_is_right(checkpoint: MakeCheckpoint, seed: int) -> None:
    """Random chunks, decodes and padding until every sequence is computed."""
    made = checkpoint()
    generator = random.Random(seed)
    harness = Harness(load(made), seed=seed, block_size=generator.choice([1, 3, 4, 16]), max_blocks=128)
    sequences = [harness.add(token_ids(generator.randint(1, 90), 10 * seed + index)) for index in range(8)]
    wanted = {sequence.seat: made.dense(list(sequence.token_ids)) for sequence in sequences}
    num_mixed = 0
    while left := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        generator.shuffle(left)
        decodes: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        for sequence in left[: generator.randint(1, 8)]:
            if sequence.num_computed and generator.random() < 0.5:
                decodes.append(sequence)
            else:
                most = len(sequence.token_ids) - sequence.num_computed
                chunks.append((sequence, generator.randint(1, min(most, generator.choice([1, 7, 64])))))
        padding = [generator.randint(1, 9) for _ in range(generator.choice([0, 0, 1, 3]))]
        num_mixed += bool(decodes and chunks and padding)
        rows = [*decodes, *(sequence for sequence, _ in chunks)]
        for sequence, logits in zip(rows, harness.step(decodes, chunks, padding), strict=True):
            end = sequence.num_computed
            assert_close(logits, wanted[sequence.seat][end - len(logits) : end], EXACT)
    assert num_mixed


def test_decode_rows_of_very_different_contexts_are_right_together(checkpoint: MakeCheckpoint) -> None:
    """Wide enough apart that they are not padded to the longest."""
    made = checkpoint()
    harness = Harness(load(made), num_seats=12, max_blocks=128)
    lengths = [2, 500, 3, 90, 1, 5, 80, 4, 6, 8, 7, 12]
    longest = token_ids(500, 3)
    sequences = [harness.add(longest[:length]) for length in lengths]
    for sequence in sequences:
        sequence.token_ids, last = sequence.token_ids[:-1], sequence.token_ids[-1]
        if sequence.token_ids:
            harness.prefill(sequence)
        sequence.token_ids = [*sequence.token_ids, last]
    rows = harness.step(decodes=sequences)
    wanted = made.dense(longest)
    for length, logits in zip(lengths, rows, strict=True):
        assert_close(logits[0], wanted[length - 1], EXACT)


def test_decode_rows_are_right_without_a_length_on_the_host(checkpoint: MakeCheckpoint) -> None:
    """As a GPU attends them, where reading lengths would wait for the device."""
    made = checkpoint()
    harness = Harness(load(made))
    sequences = [harness.add(token_ids(length, length)) for length in (33, 5, 1, 60)]
    harness.step(chunks=[(sequence, len(sequence.token_ids)) for sequence in sequences])
    for sequence in sequences:
        harness.extend(sequence, 7)
    inputs = harness.inputs(sequences, [], [])
    keys, values = harness.kv.layer(0)
    stored = inputs.slot_mapping
    for tensor in (keys, values):
        tensor.view(-1, 16)[stored] = torch.randn(4, 16, dtype=torch.float64)
    query = torch.randn(4, 6, 8, dtype=torch.float64)
    for window in (None, 1, 5, 34):
        scope = Scope(0.3, window)
        wanted = harness.model.attention.begin(inputs, harness.kv).attend(query, keys, values, scope)
        for size in (1, 3, 4):
            pieces = [slice(at, min(at + size, 4)) for at in range(0, 4, size)]
            groups = [attention._decode_group(inputs, torch.float64, rows, window) for rows in pieces]
            found = attention._Plan(groups, 4).attend(query, keys, values, scope)
            assert_close(found, wanted, EXACT)


def test_prompts_of_different_lengths_in_one_step_are_right(checkpoint: MakeCheckpoint) -> None:
    made = checkpoint()
    harness = Harness(load(made), num_seats=9)
    longest = token_ids(80, 0)
    lengths = [80, 79, 61, 5, 2, 1, 33, 64, 1]
    sequences = [harness.add(longest[:length]) for length in lengths]
    rows = harness.step(
        chunks=[(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]
    )
    for length, logits in zip(lengths, rows, strict=True):
        assert_close(logits, made.dense(longest)[:length], EXACT)


def test_a_sequence_on_shared_prefix_blocks_computes_what_it_would_have_alone(
    checkpoint: MakeCheckpoint,
) -> None:
    made = checkpoint()
    harness = Harness(load(made))
    first = harness.add(token_ids(30, 0))
    harness.prefill(first)
    ids = [*first.token_ids[:24], *token_ids(20, 9)]
    second = harness.add(ids, shared=first, num_shared_blocks=6)
    assert second.blocks[:6] == first.blocks[:6]
    assert_close(harness.prefill(second), made.dense(ids)[24:], EXACT)


def test_a_prefix_filled_in_the_same_step_is_found(checkpoint: MakeCheckpoint) -> None:
    """A layer stores K and V before it attends, so blocks planned in this very step can be shared."""
    made = checkpoint()
    harness = Harness(load(made))
    first = harness.add(token_ids(30, 0))
    ids = [*first.token_ids[:24], *token_ids(20, 9)]
    second = harness.add(ids, shared=first, num_shared_blocks=6)
    rows = harness.step(chunks=[(first, 30), (second, 20)])
    assert_close(rows[0], made.dense(first.token_ids), EXACT)
    assert_close(rows[1], made.dense(ids)[24:], EXACT)


def test_padding_is_stored_nowhere_and_block_0_stays_zero(checkpoint: MakeCheckpoint) -> None:
    made = checkpoint()
    harness = Harness(load(made))
    sequence = harness.add(token_ids(8, 0))
    before = [tensor.clone() for tensor in harness.kv.layer(0)]
    harness.step(chunks=[(sequence, 8)], padding=[5, 5])
    for tensor, old in zip(harness.kv.layer(0), before, strict=True):
        assert not tensor[0].any()
        changed = (tensor != old) & ~(tensor.isnan() & old.isnan())
        assert sorted(changed.flatten(1).any(1).nonzero().flatten().tolist()) == sorted(sequence.blocks)


def test_an_empty_row_attends_to_nothing_and_gives_zeros(checkpoint: MakeCheckpoint) -> None:
    made = checkpoint()
    harness = Harness(load(made))
    sequence = harness.add(token_ids(8, 0))
    inputs = harness.inputs([], [(sequence, 8)], [3])
    keys, values = harness.kv.layer(0)
    step = harness.model.attention.begin(inputs, harness.kv)
    keys[1:], values[1:] = 1.0, 1.0
    out = step.attend(torch.randn(11, 6, 8, dtype=torch.float64), keys, values, Scope(1.0))
    assert_close(out[:8], torch.ones_like(out[:8]), EXACT)
    assert not out[8:].any()


def test_a_step_that_wants_no_logits_gives_none_and_still_stores(checkpoint: MakeCheckpoint) -> None:
    made = checkpoint()
    harness = Harness(load(made))
    ids = token_ids(20, 0)
    sequence = harness.add(ids)
    logits = harness.model.forward(harness.inputs([], [(sequence, 12)], [], logits="none"), harness.kv)
    assert logits.shape == (0, 97)
    assert_close(harness.prefill(sequence), made.dense(ids)[12:], EXACT)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 1.0), (torch.float16, 0.15)]
)
def test_lower_precisions_stay_near_the_reference(
    checkpoint: MakeCheckpoint, dtype: torch.dtype, tolerance: float
) -> None:
    made = checkpoint()
    ids = token_ids(80, 0)
    harness = Harness(load(made, dtype))
    sequence, shorter = harness.add(ids), harness.add(ids[:30])
    harness.prefill(shorter)
    harness.extend(shorter, ids[30])
    decoded, whole = harness.step(decodes=[shorter], chunks=[(sequence, 80)], padding=[2])
    assert_close(whole, made.dense(ids), tolerance)
    assert_close(decoded[0], made.dense(ids)[30], tolerance)
    logits = harness.model.forward(harness.inputs([], [(harness.add([3]), 1)], []), harness.kv)
    assert logits.dtype == torch.float32


def test_float32_logits_are_those_of_transformers_in_float32(checkpoint: MakeCheckpoint) -> None:
    made = checkpoint()
    ids = token_ids(80, 0)
    harness = Harness(load(made, torch.float32))
    peer = made.peer.__class__.from_pretrained(made.directory, dtype=torch.float32)
    with torch.inference_mode():
        wanted = peer(torch.tensor([ids])).logits[0].double()
    assert_close(harness.prefill(harness.add(ids)), wanted, 5e-4)


def test_moved_blocks_hold_what_they_held(checkpoint: MakeCheckpoint) -> None:
    made = checkpoint()
    ids = token_ids(21, 0)
    harness = Harness(load(made))
    sequence = harness.add(ids)
    sequence.token_ids = ids[:20]
    harness.prefill(sequence)
    targets = [harness.free.pop() for _ in sequence.blocks]
    harness.kv.move(torch.tensor(sequence.blocks), torch.tensor(targets))
    sequence.blocks = targets
    harness.tables[sequence.seat, : len(targets)] = torch.tensor(targets, dtype=torch.int32)
    harness.extend(sequence, ids[20])
    assert_close(harness.step(decodes=[sequence])[0], made.dense(ids)[20:], EXACT)
