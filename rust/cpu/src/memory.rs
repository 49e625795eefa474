//! Memory that workers share: aligned buffers, and pointers into them that threads may hold.

use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

const LINE_FLOATS: usize = 16;

/// Zeroed numbers that begin at a cache line.
pub(crate) struct Buffer {
    lines: Vec<Line>,
}

impl Buffer {
    pub(crate) fn zeroed(num_floats: usize) -> Buffer {
        Buffer {
            lines: vec![Line([0.0; LINE_FLOATS]); num_floats.div_ceil(LINE_FLOATS)],
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.lines.len() * LINE_FLOATS
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        // SAFETY: lines are numbers side by side.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.capacity()) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.capacity()) }
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.lines.as_ptr().cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.lines.as_mut_ptr().cast()
    }

    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        let num_bytes = self.lines.len() * size_of::<Line>();
        // SAFETY: the lines are that many initialised bytes, any bytes are lines, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), num_bytes) }
    }
}

/// Bytes of a large page, on all CPUs that have kernels here.
const LARGE_PAGE: usize = 2 << 20;
/// Bytes that are reserved at once; they become memory when they are written.
const RESERVED: usize = 64 << 20;

/// Memory of large pages, where the system has them, for what is written once and then streams by each step: each page's
/// address has to be looked up, and with small ones a core waits for that as long as for the memory.
pub(crate) struct LargePages {
    mapping: Arc<MmapRaw>,
    /// From the mapping's first byte.
    used: usize,
}

impl LargePages {
    /// None so far.
    pub(crate) fn new() -> LargePages {
        LargePages::with_room(0)
    }

    fn with_room(num_bytes: usize) -> LargePages {
        let mapping = MmapOptions::new()
            .len(num_bytes + LARGE_PAGE)
            .map_anon()
            .unwrap_or_else(|error| {
                panic!("the system does not give {num_bytes} bytes for weights: {error}")
            });
        // A system without large pages, or that gives none, has small ones.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise(memmap2::Advice::HugePage);
        let used = mapping.as_ptr().align_offset(LARGE_PAGE);
        LargePages {
            mapping: Arc::new(MmapRaw::from(mapping)),
            used,
        }
    }

    /// A copy of some bytes, from a cache line on.
    pub(crate) fn copy_of(&mut self, bytes: &[u8]) -> Piece {
        if self.mapping.len() - self.used < bytes.len() {
            *self = LargePages::with_room(bytes.len().max(RESERVED));
        }
        let start = self.mapping.as_mut_ptr().wrapping_add(self.used);
        // SAFETY: so many bytes are left from there on, and nobody has seen them.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.used = (self.used + bytes.len())
            .next_multiple_of(size_of::<Line>())
            .min(self.mapping.len());
        Piece {
            start,
            _mapping: Arc::clone(&self.mapping),
        }
    }
}

/// Bytes that are only read.
pub(crate) struct Piece {
    start: *const u8,
    /// Lives as long.
    _mapping: Arc<MmapRaw>,
}

// SAFETY: nobody writes the bytes.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Piece {
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start
    }
}

/// Rows of numbers that several workers read, and write where they have agreed to.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    base: *mut f32,
    stride: usize,
}

// SAFETY: it is a pointer; whoever follows it (an unsafe function) answers for who else does.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    pub(crate) fn new(base: *mut f32, stride: usize) -> Rows {
        Rows { base, stride }
    }

    pub(crate) fn stride(self) -> usize {
        self.stride
    }

    pub(crate) fn at(self, row: usize) -> *mut f32 {
        self.base.wrapping_add(row * self.stride)
    }

    /// # Safety
    /// The row exists, and nobody writes it while the slice lives.
    pub(crate) unsafe fn row<'a>(self, row: usize, width: usize) -> &'a [f32] {
        debug_assert!(width <= self.stride);
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(self.at(row), width) }
    }

    /// # Safety
    /// The row exists, and nobody else reads or writes it while the slice lives.
    pub(crate) unsafe fn row_mut<'a>(self, row: usize, width: usize) -> &'a mut [f32] {
        debug_assert!(width <= self.stride);
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.at(row), width) }
    }
}
