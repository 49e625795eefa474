//! Memory that workers share: aligned buffers, and pointers into them that threads may hold.

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
