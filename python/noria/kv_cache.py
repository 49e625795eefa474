"""The KV cache: every layer's blocks in one piece of memory."""

import mmap
import sys

import torch

from noria.errors import ConfigError
from noria.models.config import ModelConfig


def kv_bytes_per_block(model_config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block, all layers together: 2 · layers · kv_heads · head_dim · bytes · block_size."""
    c = model_config
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * dtype.itemsize * block_size


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
    cache may be larger than what is in use.

    Attributes:
        num_blocks: usable blocks, which are 1 to `num_blocks`.
        block_size: tokens of a block.
        nbytes: of the whole, block 0 included.
        dtype: of K and V.
        device: where it lies.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserves the memory.

        Raises:
            ConfigError: `num_blocks` or `block_size` is below 1, or the system does not give so much memory.
        """
        for name, value in (("num_kv_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", name=name, value=value)
        c = model_config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.nbytes = kv_bytes_per_block(c, block_size, dtype) * (num_blocks + 1)
        shape = (c.num_layers, 2, num_blocks + 1, block_size, c.num_kv_heads, c.head_dim)
        try:
            memory = _mapped(self.nbytes, dtype) if device.type == "cpu" else None
            self._all = (
                memory.view(shape) if memory is not None else torch.zeros(shape, dtype=dtype, device=device)
            )
        except (OSError, OverflowError, ValueError, MemoryError, torch.OutOfMemoryError):
            raise ConfigError(
                f"num_kv_blocks is {num_blocks}: the system does not give {self.nbytes} bytes for a KV cache",
                name="num_kv_blocks",
                value=num_blocks,
            ) from None
        self._layers = [(layer[0], layer[1]) for layer in self._all]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each `[num_blocks + 1, block_size, num_kv_heads, head_dim]`."""
        return self._layers[index]

    @property
    def memory(self) -> torch.Tensor:
        """All of it, `[num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim]`."""
        return self._all

    def move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies blocks `src[i]` over blocks `dst[i]`, in every layer; all are read before one is written.

        Args:
            src: `[num_moves]` int64, on this device.
            dst: likewise; each block once, and never block 0.
        """
        blocks = self._all.flatten(0, 1).flatten(2)  # [2 * layers, num_blocks + 1, block elements]
        blocks.index_copy_(1, dst, blocks.index_select(1, src))


def _mapped(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in an anonymous mapping, which lives as long as a view of it does."""
    if sys.platform == "win32":
        mapping = mmap.mmap(-1, nbytes)
    else:
        # Python maps shared by default: such pages are not given back by MADV_DONTNEED.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype, count=nbytes // dtype.itemsize)
