"""SmolLM2-135M's forward with random weights, as a program of noria-cpu, and this machine's limits."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from noria import kv_format
from noria._core import CpuBuilder, CpuProgram, measure_bandwidth, measure_fma, measure_int8

HIDDEN, QKV, INTERMEDIATE, VOCAB, NUM_LAYERS = 576, 960, 1536, 49152, 30
HEADS = (9, 3, 64)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_1": 20 / 32}


def weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Seeded numbers of a size that keeps activations near 1."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5


def shapes(num_layers: int, vocab: int) -> list[tuple[int, int]]:
    """Outputs and inputs of all linear maps, in order."""
    layer = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    return layer * num_layers + [(vocab, HIDDEN)]


def recorded(storage: str, num_layers: int, vocab: int, num_threads: int) -> CpuProgram:
    """The forward over weights stored so."""
    builder = CpuBuilder()
    maps = [packed(builder, storage, *shape, seed) for seed, shape in enumerate(shapes(num_layers, vocab))]
    norm = builder.vector(np.ones(HIDDEN, np.float32))
    frequencies = builder.vector((1e5 ** -(np.arange(0, 64, 2) / 64)).astype(np.float32))
    table = builder.table(np.random.default_rng(0).standard_normal((vocab, HIDDEN), np.float32))
    x = builder.embed(table)
    for layer in range(num_layers):
        qkv, output, gate_up, down = maps[4 * layer : 4 * layer + 4]
        rotated = builder.rope(builder.linear(builder.rms_norm(x, norm, 1e-5), qkv), frequencies, 1.0, HEADS)
        attended = builder.attention(rotated, layer, HEADS, scale=0.125, window=None, softcap=None)
        x = builder.add(x, builder.linear(attended, output))
        gate = builder.silu_mul(builder.linear(builder.rms_norm(x, norm, 1e-5), gate_up))
        x = builder.add(x, builder.linear(gate, down))
    return builder.build(builder.logits(builder.rms_norm(x, norm, 1e-5), maps[-1]), num_threads=num_threads)


def packed(builder: CpuBuilder, storage: str, rows: int, columns: int, seed: int) -> int:
    """One map's number in the builder."""
    if storage not in ("Q8_0", "Q4_0", "Q4_1"):
        return builder.matrix(weight(rows, columns, seed).numpy(), None, storage=storage)
    head = 4 if storage == "Q4_1" else 2
    size = 2 + 32 if storage == "Q8_0" else head + 16
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // 32, size), np.uint8)
    blocks[:, :, :2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
    blocks[:, :, 2:head] = np.frombuffer(np.float16(-0.02).tobytes(), np.uint8)[: head - 2]
    return builder.matrix_of_blocks(blocks.reshape(rows, -1), columns, None, storage=storage)


@dataclass(frozen=True, slots=True)
class Rows:
    """A step of equal rows.

    Attributes:
        num_rows: so many sequences.
        num_tokens: of each, in this step.
        context: of each, after this step.
        block_size: of the cache.
    """

    num_rows: int
    num_tokens: int
    context: int
    block_size: int = 16

    def cache(self, num_layers: int, kv_dtype: str) -> npt.NDArray[np.uint8]:
        """A cache of a number format that holds them, filled."""
        head = kv_format.packed(torch.full((HEADS[2],), 0.5), kv_format.kv_dtype(kv_dtype, torch.float32))
        stored = head.view(torch.uint8).numpy()
        blocks = self.num_rows * self._blocks + 1
        kv = np.empty((num_layers, 2, blocks, self.block_size, HEADS[1], len(stored)), np.uint8)
        kv[...] = stored
        return kv

    @property
    def _blocks(self) -> int:
        return -(-self.context // self.block_size)

    def run(
        self,
        program: CpuProgram,
        kv: npt.NDArray[np.uint8],
        logits: npt.NDArray[np.float32],
        kv_dtype: str = "float32",
    ) -> None:
        """Runs the step: every row's last token is sampled. Blocks lie in random order."""
        order = np.random.default_rng(1).permutation(self.num_rows * self._blocks).astype(np.int32) + 1
        tables = order.reshape(self.num_rows, self._blocks)
        positions = np.arange(self.context - self.num_tokens, self.context)
        slots = tables[:, positions // self.block_size] * self.block_size + positions % self.block_size
        ends = np.arange(self.num_rows + 1) * self.num_tokens
        program.run(
            input_ids=np.arange(ends[-1]) % 1000,
            positions=np.tile(positions, self.num_rows),
            slot_mapping=slots.reshape(-1).astype(np.int64),
            cu_seqlens_q=ends.astype(np.int32),
            context_lens=np.full(self.num_rows, self.context, np.int32),
            row_seats=np.arange(self.num_rows),
            block_tables=tables,
            logits_indices=ends[1:] - 1,
            kv=kv,
            kv_dtype=kv_dtype,
            logits=logits,
        )


@dataclass(slots=True)
class Limits:
    """The best that this machine has shown so far, a second."""

    num_threads: int
    num_bytes: float = 0.0
    rates: dict[str, float] = field(default_factory=lambda: {"float32": 0.0, "int8": 0.0})

    def measure(self) -> None:
        """Looks again: a machine drifts."""
        self.num_bytes = max(self.num_bytes, measure_bandwidth(0.1, self.num_threads) * 1e9)
        for name, measured in (("float32", measure_fma), ("int8", measure_int8)):
            self.rates[name] = max(self.rates[name], measured(0.05, self.num_threads) * 1e9)

    @classmethod
    def now(cls, num_threads: int) -> "Limits":
        """A short look, for what runs beside it: this machine's CPUs may be another's at times."""
        rates = {
            "float32": measure_fma(0.005, num_threads) * 1e9,
            "int8": measure_int8(0.005, num_threads) * 1e9,
        }
        return cls(num_threads, measure_bandwidth(0.02, num_threads) * 1e9, rates)

    def seconds(self, storage: str, num_bytes: float, num_operations: float) -> float:
        """The least time of so many bytes and operations."""
        rate = self.rates["float32" if storage in ("float32", "bfloat16") else "int8"]
        return max(num_bytes / self.num_bytes, num_operations / rate)

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 1e9:.1f} GB/s, {self.rates['float32'] / 1e9:.0f} GFLOP/s, "
            f"int8 {self.rates['int8'] / 1e9:.0f} GOP/s"
        )
