//! What happened, for those outside: a flat log that is read after each `plan` and `commit`.

use alloc::vec;
use alloc::vec::Vec;

use crate::ids::Handle;

/// What an [`Event`] tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    /// First scheduled. Values: prompt tokens found in the prefix cache, step.
    Admitted = 0,
    /// An output token. Values: its id, its output position.
    Token = 1,
    /// Ended. Values: [`FinishReason`](crate::FinishReason), output tokens.
    Finished = 2,
    /// Its seat and blocks were taken. Values: tokens whose KV was given up, step.
    Preempted = 3,
    /// Scheduled again. Values: tokens found in the prefix cache, step.
    Resumed = 4,
}

/// One thing that happened to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// To whom.
    pub handle: Handle,
    /// What.
    pub kind: EventKind,
    /// See [`EventKind`].
    pub first: i64,
    /// See [`EventKind`].
    pub second: i64,
}

/// Events since the last verb that reports. Those that `finish` and `fail` make wait for the next one that does.
#[derive(Debug)]
pub(crate) struct EventLog {
    /// The first `len` are events, the rest is room.
    slots: Vec<Event>,
    len: usize,
    is_reported: bool,
}

/// What an unused slot holds.
const NO_EVENT: Event = Event {
    handle: Handle::NONE,
    kind: EventKind::Token,
    first: 0,
    second: 0,
};

impl EventLog {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self {
            slots: vec![NO_EVENT; capacity],
            len: 0,
            is_reported: false,
        }
    }

    /// A verb that reports begins: what the last one reported is dropped.
    pub(crate) fn begin(&mut self) {
        self.drop_reported();
        self.is_reported = true;
    }

    /// A verb that does not report begins.
    pub(crate) fn begin_silent(&mut self) {
        self.drop_reported();
    }

    fn drop_reported(&mut self) {
        if self.is_reported {
            self.len = 0;
            self.is_reported = false;
        }
    }

    /// Makes room for `num` events more.
    pub(crate) fn reserve(&mut self, num: usize) {
        if self.slots.len() < self.len + num {
            self.slots.resize(self.len + num, NO_EVENT);
        }
    }

    pub(crate) fn push(&mut self, handle: Handle, kind: EventKind, first: i64, second: i64) {
        self.reserve(1);
        self.slots[self.len] = Event {
            handle,
            kind,
            first,
            second,
        };
        self.len += 1;
    }

    /// Where the next events go, as many as there is room for; `take_room` says how many were written.
    pub(crate) fn room(&mut self) -> &mut [Event] {
        &mut self.slots[self.len..]
    }

    pub(crate) fn take_room(&mut self, num: usize) {
        self.len += num;
    }

    pub(crate) fn as_slice(&self) -> &[Event] {
        &self.slots[..self.len]
    }
}
