//! The KV cache, which belongs to somebody else.

use crate::attention::KvFormat;

/// `[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]` numbers in one piece of memory.
#[derive(Clone, Copy, Debug)]
pub struct KvView {
    base: *mut u8,
    pub(crate) format: KvFormat,
    pub(crate) num_layers: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

// SAFETY: it is a pointer with sizes; `KvView::new` has its caller promise who uses the memory.
unsafe impl Send for KvView {}
// SAFETY: as above; workers write distinct slots only.
unsafe impl Sync for KvView {}

impl KvView {
    /// A view of a cache.
    ///
    /// # Safety
    /// `base` points to so many initialised numbers of the format, aligned for it. While a program runs with the view,
    /// they stay there and nobody else reads or writes them.
    pub unsafe fn new(
        base: *mut u8,
        format: KvFormat,
        num_layers: usize,
        num_blocks: usize,
        block_size: usize,
        num_kv_heads: usize,
        head_dim: usize,
    ) -> KvView {
        KvView {
            base,
            format,
            num_layers,
            num_blocks,
            block_size,
            num_kv_heads,
            head_dim,
        }
    }

    pub(crate) fn element_bytes(&self) -> usize {
        match self.format {
            KvFormat::F32 => 4,
            KvFormat::Bf16 => 2,
        }
    }

    /// Numbers of a token in K, or in V, of one layer.
    pub(crate) fn token_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    pub(crate) fn num_slots(&self) -> usize {
        self.num_blocks * self.block_size
    }

    /// K and V of one layer.
    pub(crate) fn layer(&self, index: usize) -> (*mut u8, *mut u8) {
        assert!(
            index < self.num_layers,
            "layer {index} of {}",
            self.num_layers
        );
        let bytes = self.num_slots() * self.token_size() * self.element_bytes();
        let keys = self.base.wrapping_add(2 * index * bytes);
        (keys, keys.wrapping_add(bytes))
    }
}
