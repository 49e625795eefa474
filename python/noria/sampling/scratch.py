"""Buffers as large as a step's logits, kept from one step to the next."""

from enum import IntEnum

import torch


class Use(IntEnum):
    """What a buffer is for; two uses are never the same memory."""

    LOGITS = 0
    """Logits of the rows that draw."""
    WEIGHTS = 1
    """Their weights."""
    LOGITS_OF_ROWS = 2
    """Logits of the rows among them that ask for one thing."""
    PART = 3
    """A part of those, or their weights."""
    MASK = 4


class Scratch:
    """On a CPU, memory freshly mapped costs several times the arithmetic that is done in it.

    Other devices have allocators that keep what is freed; there a buffer is made at each `take`.
    """

    __slots__ = ("_buffers", "_device", "_width")

    def __init__(self, width: int, device: torch.device) -> None:
        self._width = width
        self._device = device
        self._buffers: dict[tuple[Use, torch.dtype], torch.Tensor] = {}

    def take(self, use: Use, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """`[num_rows, width]`, not initialised; the same memory at each call for one use."""
        if self._device.type != "cpu":
            return torch.empty((num_rows, self._width), dtype=dtype, device=self._device)
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.shape[0] < num_rows:
            buffer = torch.empty((num_rows, self._width), dtype=dtype)
            self._buffers[use, dtype] = buffer
        return buffer[:num_rows]

    def take_chunks(self, use: Use, num: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """`[num, size]`, as `take`; together no larger than what the use has had, or will have, in rows."""
        rows = self.take(use, -(-num * size // self._width), dtype)
        return rows.view(-1)[: num * size].view(num, size)

    def select(self, use: Use, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Copies some rows of `values` `[n, width]`."""
        taken = self.take(use, len(rows), values.dtype)
        return torch.index_select(values, 0, rows, out=taken)
