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
    /// With room for so many bytes, and more when they are used up.
    pub(crate) fn new(num_bytes: usize) -> LargePages {
        let mapping = MmapOptions::new()
            .len(num_bytes + LARGE_PAGE)
            .map_anon()
            .unwrap_or_else(|error| {
                panic!("the system does not give {num_bytes} bytes for weights: {error}")
            });
        if num_bytes >= LARGE_PAGE {
            // A system without large pages, or that gives none, has small ones.
            #[cfg(target_os = "linux")]
            let _ = mapping.advise(memmap2::Advice::HugePage);
        }
        let used = mapping.as_ptr().align_offset(LARGE_PAGE);
        LargePages {
            mapping: Arc::new(MmapRaw::from(mapping)),
            used,
        }
    }

    /// So many bytes, zeros, from a cache line on.
    pub(crate) fn take(&mut self, num_bytes: usize) -> Piece {
        if self.mapping.len() - self.used < num_bytes {
            *self = LargePages::new(num_bytes.max(RESERVED));
        }
        let start = self.mapping.as_mut_ptr().wrapping_add(self.used);
        self.used = (self.used + num_bytes)
            .next_multiple_of(size_of::<Line>())
            .min(self.mapping.len());
        Piece {
            start,
            num_bytes,
            _mapping: Arc::clone(&self.mapping),
        }
    }
}

/// Some bytes of large pages, nobody else's.
pub(crate) struct Piece {
    start: *mut u8,
    num_bytes: usize,
    /// Lives as long.
    _mapping: Arc<MmapRaw>,
}

// SAFETY: the bytes are its own.
unsafe impl Send for Piece {}
// SAFETY: as above, and they are written by who has the piece alone.
unsafe impl Sync for Piece {}

impl Piece {
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: the mapping has so many bytes from there on, all written, by the system at first.
        unsafe { std::slice::from_raw_parts(self.start, self.num_bytes) }
    }

    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.num_bytes) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zeros_and_keep_their_bytes_whatever_comes_after_them() {
        let mut pages = LargePages::new(0);
        let sizes = [1, 64, 100_000, RESERVED - 100_000, RESERVED + 1, 3 << 20, 0];
        let mut pieces = Vec::new();
        for (number, &size) in (1..).zip(&sizes) {
            let mut piece = pages.take(size);
            assert!(piece.as_ptr().addr().is_multiple_of(size_of::<Line>()));
            assert!(piece.as_bytes().iter().all(|&byte| byte == 0));
            piece.as_bytes_mut().fill(number);
            pieces.push(piece);
        }
        drop(pages);
        for ((number, piece), &size) in (1..).zip(&pieces).zip(&sizes) {
            assert_eq!(piece.as_bytes().len(), size);
            assert!(
                piece.as_bytes().iter().all(|&byte| byte == number),
                "{size}"
            );
        }
    }
}
