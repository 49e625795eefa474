"""How K and V are rounded, by torch and by noria-cpu, and what a cache of each format takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noria._core import CpuBuilder, CpuProgram
from noria.backends.cpu.program import RecordedForward
from noria.backends.ops import Heads, Scope, StepInputs
from noria.backends.torch.attention import SdpaAttention
from noria.backends.torch.ops import TorchOps
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.kv_cache import KvCache, kv_bytes_per_block
from noria.kv_format import kv_dtype, packed, stored_size, unpacked
from noria.models import ModelConfig, RopeConfig

CPU = torch.device("cpu")
FORMATS = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
EDGES = [
    0.0,
    -0.0,
    1e-45,
    -6e-8,
    5.9e-8,
    6.1e-5,
    1.0,
    -1.00048828125,
    1.5,
    2049.0,
    65503.0,
    65519.9,
    -65520.0,
    1e38,
]


def config_of(num_layers: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=3 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


CONFIG = config_of(30, 3, 64)


def bits(stored: torch.Tensor) -> torch.Tensor:
    """Bytes; every NaN is one and the same."""
    if stored.is_floating_point():
        stored = torch.where(torch.isnan(stored), torch.full_like(stored, torch.nan), stored)
    return stored.contiguous().view(torch.uint8)


def test_8_bits_are_the_nearest_multiples_of_a_heads_own_scale() -> None:
    head = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [1e-44, 0.0, -1e-42, 0.0]])
    stored = packed(head, torch.int8)
    assert stored.shape == (3, stored_size(4, torch.int8)) == (3, 8)
    assert stored[:2, 4:].tolist() == [[64, -127, 32, 0], [0, 0, 0, 0]]
    read = unpacked(stored, torch.float64)
    assert torch.allclose(read[0], head[0].double(), atol=2 / 127 / 2 + 1e-9, rtol=0)
    assert not read[1].any()
    assert torch.isfinite(read).all()  # also of numbers below the smallest normal one


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_seen_in_its_own_head_alone(bad: float) -> None:
    heads = torch.ones(2, 6)
    heads[1, 3] = bad
    for dtype in FORMATS:
        read = unpacked(packed(heads, dtype), torch.float32)
        assert torch.equal(read[0], heads[0])
        assert not torch.isfinite(read[1]).all()
    assert torch.isnan(unpacked(packed(heads, torch.int8), torch.float32)[1]).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.integers(-30, 30),
)
def test_8_bits_are_off_by_half_a_step_at_most(numbers: list[float], exponent: int) -> None:
    head = torch.tensor(numbers).mul(2.0**exponent).nan_to_num(0, 3e38, -3e38)
    read = unpacked(packed(head, torch.int8), torch.float64)
    step = max(float(head.abs().max()) / 127, 1.1754944e-38)
    assert float((read - head.double()).abs().max()) <= step * 0.5001
    # A head's bits do not depend on its neighbours.
    beside = torch.stack((head, torch.full_like(head, 7e4), head))
    assert torch.equal(packed(beside, torch.int8)[0], packed(head, torch.int8))


def step_of(counts: list[int], starts: list[int], kv: KvCache) -> StepInputs:
    """Rows over blocks that lie one behind the other; token i of the stream has the id i."""
    needed = [-(-(start + count) // kv.block_size) for start, count in zip(starts, counts, strict=True)]
    tables = torch.zeros(len(counts), max(needed), dtype=torch.int32)
    slots, positions, first = [], [], 1
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        tables[row, : needed[row]] = torch.arange(first, first + needed[row])
        positions += range(start, start + count)
        slots += [first * kv.block_size + position for position in range(start, start + count)]
        first += needed[row]
    num_tokens = sum(counts)
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    return StepInputs(
        input_ids=torch.arange(num_tokens),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        row_seats=torch.arange(len(counts)),
        block_tables=tables,
        logits_indices=torch.arange(num_tokens),
        num_tokens=num_tokens,
        num_rows=len(counts),
        num_decode_rows=0,
        max_context=max(contexts),
        block_size=kv.block_size,
        num_padding_tokens=0,
    )


def attention_program(qkv: torch.Tensor, heads: Heads, scope: Scope) -> CpuProgram:
    """Attends with rows of a table; a product with the identity shows what comes of it."""
    builder = CpuBuilder()
    numbers = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
    width = heads.num_heads * heads.head_dim
    x = builder.embed(builder.table(qkv.numpy()))
    out = builder.attention(x, 0, numbers, scale=scope.scale, window=scope.window, softcap=scope.softcap)
    head = builder.matrix(torch.eye(width).numpy(), None, storage="float32")
    return builder.build(builder.logits(out, head), num_threads=2)


def cache_of(heads: Heads, num_blocks: int, block_size: int, dtype: torch.dtype) -> KvCache:
    return KvCache(config_of(1, heads.num_kv_heads, heads.head_dim), num_blocks, block_size, dtype, CPU)


@pytest.mark.parametrize("isa", ["portable", ""])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "block_size", "window", "softcap"),
    [
        ((9, 3, 64), 16, None, None),
        ((4, 4, 32), 1, 7, None),
        ((8, 1, 128), 32, None, 20.0),
        ((6, 2, 20), 5, 30, 5.0),
        ((2, 1, 256), 64, 64, None),
    ],
)
def test_both_backends_store_the_same_bits_and_attend_alike(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    isa: str,
) -> None:
    monkeypatch.setenv("NORIA_CPU_ISA", isa)
    heads, scope = Heads(*shape), Scope(shape[2] ** -0.5, window, softcap)
    counts, starts = [90, 1, 1, 33], [0, 0, 0, 0]
    generator = torch.Generator().manual_seed(1)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    first = torch.randn(sum(counts), width, generator=generator)
    second = torch.randn(4, width, generator=generator)
    found, wanted = (cache_of(heads, 240, block_size, dtype) for _ in range(2))
    for qkv, (now, before) in ((first, (counts, starts)), (second, ([1, 1, 1, 1], counts))):
        inputs = step_of(now, before, found)
        ours = RecordedForward(attention_program(qkv, heads, scope)).run(inputs, found)
        ops = TorchOps(inputs, wanted, SdpaAttention())
        theirs = ops.attention(qkv.double(), 0, heads, scope)
        assert torch.equal(bits(found.memory), bits(wanted.memory))
        assert torch.allclose(ours.double(), theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("isa", ["portable", ""])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_numbers_at_the_edges_are_stored_alike(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, isa: str
) -> None:
    monkeypatch.setenv("NORIA_CPU_ISA", isa)
    heads = Heads(1, 1, 22)
    rows = []
    for index, edge in enumerate([*EDGES, torch.nan, torch.inf, -torch.inf]):
        row = torch.zeros(3, 22)
        row[1, index % 22] = edge
        row[2, :14] = torch.tensor(EDGES).nan_to_num() * (edge if abs(edge) < 1e4 else 1)
        rows.append(row.flatten())
    qkv = torch.stack(rows)
    found, wanted = (cache_of(heads, 10, 4, dtype) for _ in range(2))
    inputs = step_of([len(rows)], [0], found)
    scope = Scope(1.0)
    RecordedForward(attention_program(qkv, heads, scope)).run(inputs, found)
    TorchOps(inputs, wanted, SdpaAttention()).attention(qkv, 0, heads, scope)
    assert torch.equal(bits(found.memory), bits(wanted.memory))


def test_a_format_is_taken_by_name_and_sizes_the_cache() -> None:
    assert kv_dtype("auto", torch.float64) == torch.float64
    assert kv_dtype("int8", torch.bfloat16) == torch.int8
    assert kv_bytes_per_block(CONFIG, 16, torch.float16) == 2 * 30 * 3 * 64 * 2 * 16
    assert kv_bytes_per_block(CONFIG, 16, torch.int8) == 2 * 30 * 3 * (64 + 4) * 16
    kv = KvCache(CONFIG, 10, 16, torch.int8, CPU, num_swap_blocks=2)
    assert kv.nbytes == 11 * kv_bytes_per_block(CONFIG, 16, torch.int8) == kv.memory.numel()
    config = EngineConfig(model="tiny", kv_cache_dtype="int8", kv_cache_memory_bytes=kv.nbytes)
    resolved = config.resolve(CONFIG, torch.float32)
    assert (resolved.num_kv_blocks, resolved.kv_dtype) == (10, torch.int8)
    formula = (
        "KV cache: 2 · 30 layers · 3 kv heads · (64 + 4) bytes · 160 tokens = 1.87 MiB (int8, as asked for)"
    )
    assert formula in resolved.notes
    plain = EngineConfig(model="tiny", num_kv_blocks=10).resolve(CONFIG, torch.float16)
    assert plain.kv_dtype == torch.float16
    assert "KV cache: 2 · 30 layers · 3 kv heads · 64 · 2 bytes · 160 tokens = 3.52 MiB" in plain.notes


def test_another_format_is_refused_by_its_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^kv_cache_dtype is 'fp8'; it must be one of auto, float32, bfloat16, float16, int8$",
    ):
        EngineConfig(model="tiny", kv_cache_dtype="fp8")
    heads, scope = Heads(1, 1, 8), Scope(1.0)
    kv = cache_of(heads, 2, 4, torch.float64)
    program = RecordedForward(attention_program(torch.ones(1, 24), heads, scope))
    inputs = step_of([1], [0], kv)
    with pytest.raises(
        ConfigError, match=r"^kv_dtype is float64, but must be float32, bfloat16, float16 or int8"
    ):
        program.run(inputs, kv)
    step = {name: getattr(inputs, name).numpy() for name in StepInputs.__slots__[:8]}
    logits = torch.empty(1, 8).numpy()
    odd = torch.zeros(1, 2, 3, 4, 1, 7, dtype=torch.uint8).numpy()
    with pytest.raises(ValueError, match="no head of its number format has so many bytes"):
        program.core.run(**step, kv=odd, kv_dtype="float16", logits=logits)
