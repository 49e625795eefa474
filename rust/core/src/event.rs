//! What happened, for those outside: a flat log that is read after each `plan` and `commit`.

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
    events: Vec<Event>,
    is_reported: bool,
}

impl EventLog {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self {
            events: Vec::with_capacity(capacity),
            is_reported: false,
        }
    }

    /// A verb that reports begins: what the last one reported is dropped.
    pub(crate) fn begin(&mut self) {
        self.make_room();
        self.is_reported = true;
    }

    fn make_room(&mut self) {
        if self.is_reported {
            self.events.clear();
            self.is_reported = false;
        }
    }

    /// A verb that does not report begins.
    pub(crate) fn begin_silent(&mut self) {
        self.make_room();
    }

    pub(crate) fn push(&mut self, handle: Handle, kind: EventKind, first: i64, second: i64) {
        self.events.push(Event {
            handle,
            kind,
            first,
            second,
        });
    }

    pub(crate) fn as_slice(&self) -> &[Event] {
        &self.events
    }
}
