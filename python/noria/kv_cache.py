"""The KV cache: every layer's blocks in one piece of memory."""

import math
import mmap
import sys

import numpy as np
import numpy.typing as npt
import torch

from noria.errors import ConfigError
from noria.kv_format import stored_size
from noria.models.config import ModelConfig


def kv_bytes_per_block(model_config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block, all layers together: 2 · layers · kv_heads · bytes of a head · block_size."""
    c = model_config
    return 2 * c.num_layers * c.num_kv_heads * stored_size(c.head_dim, dtype) * dtype.itemsize * block_size


def num_blocks_in(memory_bytes: int, model_config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Usable blocks of a cache of at most `memory_bytes`; block 0, which is for padding, takes one more.

    Raises:
        ConfigError: not even one block fits.
    """
    block_bytes = kv_bytes_per_block(model_config, block_size, dtype)
    num_blocks = memory_bytes // block_bytes - 1
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes is {memory_bytes}; two blocks, the least, need {2 * block_bytes}",
            name="kv_cache_memory_bytes",
            value=memory_bytes,
        )
    return num_blocks


class KvCache:
    """K and V of every layer, by block; block 0 is for padding, zeroed, and never stored to.

    On a CPU it is one anonymous private mapping, whose pages the system gives as they are first touched, so a
    cache may be larger than what is in use; `resize` gives them back.

    Beside it lie blocks of the host's memory, to which the KV of preempted requests is copied. Both hold
    heads as `noria.kv_format.packed` makes them, so a block that is copied keeps its bits.

    Attributes:
        num_blocks: usable blocks, which are 1 to `num_blocks`.
        num_swap_blocks: blocks of the host's memory, from 0.
        block_size: tokens of a block.
        nbytes: of those and block 0.
        dtype: of K and V; int8: with a scale for each head of a token.
        dtype_name: as `noria._core` names it.
        device: where it lies.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_swap_blocks: int = 0,
    ) -> None:
        """Reserves the memory.

        Raises:
            ConfigError: `num_blocks` or `block_size` is below 1, or the system does not give so much memory.
        """
        for name, value in (("num_kv_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", name=name, value=value)
        c = model_config
        self.block_size = block_size
        self.dtype = dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.device = device
        self._block_bytes = kv_bytes_per_block(c, block_size, dtype)
        self._pieces = (c.num_layers, 2)
        self._block_shape = (block_size, c.num_kv_heads, stored_size(c.head_dim, dtype))
        self._all, self._mapping = self._reserved(num_blocks)
        self._use(num_blocks)
        self.num_swap_blocks = num_swap_blocks
        self._host = self._reserved_on_host(num_swap_blocks)

    def _reserved(self, num_blocks: int) -> tuple[torch.Tensor, mmap.mmap | None]:
        """Zeros, as `memory` has them for `num_blocks`, and their mapping."""
        nbytes = self._block_bytes * (num_blocks + 1)
        shape = (*self._pieces, num_blocks + 1, *self._block_shape)
        try:
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=self.dtype, device=self.device), None
            mapping = _mapped(nbytes)
            count = nbytes // self.dtype.itemsize
            return torch.frombuffer(mapping, dtype=self.dtype, count=count).view(shape), mapping
        except (OSError, OverflowError, ValueError, MemoryError, torch.OutOfMemoryError):
            raise ConfigError(
                f"num_kv_blocks is {num_blocks}: the system does not give {nbytes} bytes for a KV cache",
                name="num_kv_blocks",
                value=num_blocks,
            ) from None

    def _reserved_on_host(self, num_blocks: int) -> torch.Tensor:
        """Zeros `[2 * num_layers, num_blocks, block elements]`, on the host."""
        nbytes = self._block_bytes * num_blocks
        shape = (self._pieces[0] * self._pieces[1], num_blocks, math.prod(self._block_shape))
        if not num_blocks:
            return torch.empty(shape, dtype=self.dtype)
        try:
            if self.device.type == "cuda":
                return torch.zeros(shape, dtype=self.dtype, pin_memory=True)
            return torch.frombuffer(_mapped(nbytes), dtype=self.dtype).view(shape)
        except (OSError, OverflowError, ValueError, MemoryError, RuntimeError):
            raise ConfigError(
                f"num_swap_blocks is {num_blocks}: the system does not give {nbytes} bytes for them",
                name="num_swap_blocks",
                value=num_blocks,
            ) from None

    def _use(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.nbytes = self._block_bytes * (num_blocks + 1)
        self._layers = [(layer[0], layer[1]) for layer in self._all[:, :, : num_blocks + 1]]
        self._host_bytes = self._all.view(torch.uint8).numpy() if self.device.type == "cpu" else None

    def resize(self, num_blocks: int) -> None:
        """Keeps blocks up to `num_blocks`, and gives the memory of others back to the system, or takes more.

        No step may be on its way. Growing beyond the largest size so far copies what is kept.

        Args:
            num_blocks: usable blocks from now on.

        Raises:
            ConfigError: it is below 1, or the system does not give so much memory; nothing has changed.
        """
        if num_blocks < 1:
            raise ConfigError(
                f"num_kv_blocks is {num_blocks}; it must be at least 1",
                name="num_kv_blocks",
                value=num_blocks,
            )
        num_reserved = self._all.shape[2] - 1
        # What was mapped stays mapped; elsewhere memory only goes back as a whole.
        if num_blocks > num_reserved or (num_blocks < self.num_blocks and self._mapping is None):
            self._move_to(num_blocks)
        elif num_blocks < self.num_blocks:
            self._give_back(num_blocks)
        self._use(num_blocks)

    def _move_to(self, num_blocks: int) -> None:
        num_kept = min(num_blocks, self.num_blocks) + 1
        memory, mapping = self._reserved(num_blocks)
        for layer in range(self._pieces[0]):
            for part in range(self._pieces[1]):
                memory[layer, part, :num_kept] = self._all[layer, part, :num_kept]
        self._all, self._mapping = memory, mapping

    def _give_back(self, num_blocks: int) -> None:
        """Gives pages behind block `num_blocks` back to the system; they are zeros when next read."""
        if self._mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        piece_bytes = self._all.stride(1) * self.dtype.itemsize
        kept_bytes = self._all.stride(2) * self.dtype.itemsize * (num_blocks + 1)
        for piece in range(self._pieces[0] * self._pieces[1]):
            start = -(-(piece * piece_bytes + kept_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (piece + 1) * piece_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                self._mapping.madvise(mmap.MADV_DONTNEED, start, end - start)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each `[num_blocks + 1, block_size, num_kv_heads, stored_size]`."""
        return self._layers[index]

    @property
    def memory(self) -> torch.Tensor:
        """All of it, `[num_layers, 2, num_blocks + 1, block_size, num_kv_heads, stored_size]`."""
        return self._all

    @property
    def host_bytes(self) -> npt.NDArray[np.uint8]:
        """`memory` as an array of bytes, where it lies on a CPU; another one after `resize`."""
        assert self._host_bytes is not None, "a device's memory cannot be read here"
        return self._host_bytes

    def move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies blocks `src[i]` over blocks `dst[i]`, in every layer; all are read before one is written.

        Args:
            src: `[num_moves]` int64, on the host.
            dst: likewise; each block once, and never block 0.
        """
        blocks = self._blocks()
        blocks.index_copy_(1, dst.to(self.device), blocks.index_select(1, src.to(self.device)))

    def swap_out(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies blocks `src[i]` to host blocks `dst[i]`, in every layer; both as in `move`."""
        copied = self._blocks().index_select(1, src.to(self.device))
        self._host.index_copy_(1, dst, copied.cpu())

    def swap_in(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies host blocks `src[i]` to blocks `dst[i]`, in every layer; both as in `move`."""
        copied = self._host.index_select(1, src)
        self._blocks().index_copy_(1, dst.to(self.device), copied.to(self.device))

    def _blocks(self) -> torch.Tensor:
        """A view, `[2 * num_layers, num_blocks + 1, block elements]`."""
        return self._all.flatten(0, 1).flatten(2)


def _mapped(nbytes: int) -> mmap.mmap:
    """Zeros in an anonymous mapping, which lives as long as a view of it does."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    # Python maps shared by default: such pages are not given back by MADV_DONTNEED.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
