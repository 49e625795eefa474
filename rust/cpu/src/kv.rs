//! The KV cache, which belongs to somebody else.

use crate::simd::{Bf16, Element, F16};

/// How K and V are stored. A head of a token is one piece of memory, its numbers in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    /// 4 bytes a number.
    F32,
    /// bfloat16: 2 bytes.
    Bf16,
    /// float16: 2 bytes, infinite beyond 65,504.
    F16,
    /// Whole numbers from −127 to 127, and before them what they are multiplied by: a float32 for each head of a token.
    Int8,
}

impl KvFormat {
    /// Bytes of one head of a token.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            KvFormat::F32 => 4 * head_dim,
            KvFormat::Bf16 | KvFormat::F16 => 2 * head_dim,
            KvFormat::Int8 => <i8 as Stored>::SCALE_BYTES + head_dim,
        }
    }

    /// Numbers of a head of so many bytes; none where no head has so many.
    pub fn head_dim(self, head_bytes: usize) -> Option<usize> {
        let head_dim = match self {
            KvFormat::F32 => head_bytes / 4,
            KvFormat::Bf16 | KvFormat::F16 => head_bytes / 2,
            KvFormat::Int8 => head_bytes.checked_sub(<i8 as Stored>::SCALE_BYTES)?,
        };
        (head_dim > 0 && self.head_bytes(head_dim) == head_bytes).then_some(head_dim)
    }
}

/// Numbers as the cache holds them.
pub(crate) trait Stored: Element {
    /// What stands before a head's numbers: nothing, or their scale.
    const SCALE_BYTES: usize;

    /// What a head's numbers are multiplied by.
    ///
    /// # Safety
    /// `numbers` are those of a head in the cache, behind their scale.
    #[inline(always)]
    unsafe fn scale(numbers: *const Self) -> f32 {
        if Self::SCALE_BYTES == 0 {
            return 1.0;
        }
        // SAFETY: the caller's.
        unsafe {
            numbers
                .byte_sub(Self::SCALE_BYTES)
                .cast::<f32>()
                .read_unaligned()
        }
    }
}

impl Stored for f32 {
    const SCALE_BYTES: usize = 0;
}
impl Stored for Bf16 {
    const SCALE_BYTES: usize = 0;
}
impl Stored for F16 {
    const SCALE_BYTES: usize = 0;
}
impl Stored for i8 {
    const SCALE_BYTES: usize = size_of::<f32>();
}

/// `[num_layers, 2, num_blocks, block_size, num_kv_heads]` heads of [`KvFormat::head_bytes`] in one piece of memory.
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
    /// `base` points to so many initialised heads of the format, its numbers aligned. While a program runs with the
    /// view, they stay there and nobody else reads or writes them.
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

    /// Bytes of a token in K, or in V, of one layer.
    pub(crate) fn token_bytes(&self) -> usize {
        self.num_kv_heads * self.format.head_bytes(self.head_dim)
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
        let bytes = self.num_slots() * self.token_bytes();
        let keys = self.base.wrapping_add(2 * index * bytes);
        (keys, keys.wrapping_add(bytes))
    }
}
