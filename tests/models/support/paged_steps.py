"""Hand-built steps: sequences with shuffled block tables over one KV cache, and any mix of their rows."""

from dataclasses import dataclass, field

import torch

from noria.backends.ops import StepInputs
from noria.kv_cache import KvCache
from noria.models import Model


@dataclass
class Sequence:
    """A sequence on a seat: its tokens, its blocks, and how many tokens the cache holds."""

    token_ids: list[int]
    seat: int
    blocks: list[int]
    num_computed: int = 0


@dataclass
class Harness:
    """A model, a KV cache, and the seats of the sequences in it."""

    model: Model
    num_seats: int = 8
    max_blocks: int = 64
    block_size: int = 4
    seed: int = 0
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_blocks = self.num_seats * self.max_blocks
        self.kv = KvCache(self.model.config, num_blocks, self.block_size, self.model.dtype, self.model.device)
        for layer in range(self.model.config.num_layers):
            for tensor in self.kv.layer(layer):  # what an earlier owner left must not matter
                tensor[1:] = torch.nan
        generator = torch.Generator().manual_seed(self.seed)
        self.free = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
        self.tables = torch.zeros(self.num_seats, self.max_blocks, dtype=torch.int32)

    def add(
        self, token_ids: list[int], *, shared: Sequence | None = None, num_shared_blocks: int = 0
    ) -> Sequence:
        """A new sequence; it may share another's first blocks, which are then computed already."""
        seat = len(self.sequences)
        blocks = list(shared.blocks[:num_shared_blocks]) if shared else []
        while len(blocks) * self.block_size < len(token_ids):
            blocks.append(self.free.pop())
        sequence = Sequence(token_ids, seat, blocks, num_shared_blocks * self.block_size)
        self.sequences.append(sequence)
        self.tables[seat, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return sequence

    def extend(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        if len(sequence.blocks) * self.block_size < len(sequence.token_ids):
            sequence.blocks.append(self.free.pop())
            self.tables[sequence.seat, len(sequence.blocks) - 1] = sequence.blocks[-1]

    def inputs(
        self,
        decodes: list[Sequence],
        chunks: list[tuple[Sequence, int]],
        padding: list[int],
        logits: str = "all",
    ) -> StepInputs:
        """One step: decode rows, then chunks of (sequence, count), then padding rows of these counts."""
        rows = [(sequence, 1) for sequence in decodes] + chunks
        ids, positions, slots, counts, contexts, seats, last = [], [], [], [], [], [], []
        for sequence, count in rows:
            span = range(sequence.num_computed, sequence.num_computed + count)
            ids += [sequence.token_ids[position] for position in span]
            positions += span
            slots += [
                sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size
                for position in span
            ]
            counts.append(count)
            contexts.append(span.stop)
            seats.append(sequence.seat)
            last.append(len(ids) - 1)
            sequence.num_computed += count
        num_stored = len(ids)
        for count in padding:
            ids += [0] * count
            positions += range(count)
            slots += [-1] * count
            counts.append(count)
            contexts.append(0)
            seats.append(0)
        wanted = list(range(num_stored)) if logits == "all" else last if logits == "last" else []
        return StepInputs(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            row_seats=torch.tensor(seats),
            block_tables=self.tables.clone(),
            logits_indices=torch.tensor(wanted, dtype=torch.int64),
            num_tokens=len(ids),
            num_rows=len(counts),
            num_decode_rows=len(decodes),
            max_context=max(contexts),
            block_size=self.block_size,
            num_padding_tokens=len(ids) - num_stored,
        )

    def step(
        self,
        decodes: list[Sequence] | None = None,
        chunks: list[tuple[Sequence, int]] | None = None,
        padding: list[int] | None = None,
    ) -> list[torch.Tensor]:
        """Runs a step; logits `[count, vocab_size]` of each row that is no padding, in float64."""
        decodes, chunks = decodes or [], chunks or []
        logits = self.model.forward(self.inputs(decodes, chunks, padding or []), self.kv)
        assert torch.isfinite(logits).all()
        counts = [1] * len(decodes) + [count for _, count in chunks]
        return [part.double() for part in logits.split(counts)]

    def prefill(self, sequence: Sequence, chunk: int | None = None) -> torch.Tensor:
        """Runs what is left of one sequence, in chunks; its logits `[tokens run, vocab_size]`."""
        parts = []
        while left := len(sequence.token_ids) - sequence.num_computed:
            parts += self.step(chunks=[(sequence, min(left, chunk or left))])
        return torch.cat(parts)
