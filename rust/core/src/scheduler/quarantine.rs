//! Groups of requests whose step failed. The first group runs by itself, one step at a time, until each of it has got
//! past where it was; a group that fails again is split, so that a request that breaks steps is found in log₂ tries.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::arena::Arena;
use crate::ids::Handle;
use crate::sequence::{Confinement, Sequence};

#[derive(Debug)]
struct Group {
    id: u64,
    /// In key order; some may have left.
    members: Vec<Handle>,
}

#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    groups: VecDeque<Group>,
    next_id: u64,
    /// No group runs by itself in this plan.
    is_suspended: bool,
}

impl Quarantine {
    /// Confines `members` behind the other groups, each until its given token is computed.
    pub(crate) fn confine(&mut self, arena: &mut Arena<Sequence>, members: &[(Handle, u32)]) {
        if let Some(group) = self.group(arena, members) {
            self.groups.push_back(group);
        }
    }

    /// Confines `members` in two groups before the others.
    pub(crate) fn split(&mut self, arena: &mut Arena<Sequence>, members: &[(Handle, u32)]) {
        let (first, second) = members.split_at(members.len().div_ceil(2));
        for half in [second, first] {
            if let Some(group) = self.group(arena, half) {
                self.groups.push_front(group);
            }
        }
    }

    fn group(&mut self, arena: &mut Arena<Sequence>, members: &[(Handle, u32)]) -> Option<Group> {
        let id = self.next_id;
        self.next_id += 1;
        for &(handle, end) in members {
            let sequence = &mut arena[handle.slot()];
            let until = sequence.confinement.map_or(end, |old| old.until.max(end));
            sequence.quiet_until = 0;
            sequence.confinement = Some(Confinement { group: id, until });
        }
        let mut members: Vec<Handle> = members.iter().map(|&(handle, _)| handle).collect();
        members.sort_unstable_by_key(|handle| arena[handle.slot()].key);
        (!members.is_empty()).then_some(Group { id, members })
    }

    /// The group that runs by itself now; those that have emptied are dropped.
    pub(crate) fn settle(&mut self, arena: &Arena<Sequence>) -> Option<u64> {
        self.is_suspended = false;
        while let Some(group) = self.groups.front_mut() {
            let id = group.id;
            group.members.retain(|&handle| {
                arena.slot(handle).is_some_and(|slot| {
                    arena[slot]
                        .confinement
                        .is_some_and(|confinement| confinement.group == id)
                })
            });
            if !group.members.is_empty() {
                return Some(id);
            }
            self.groups.pop_front();
        }
        None
    }

    /// Lets others run until the next `settle`.
    pub(crate) fn suspend(&mut self) {
        self.is_suspended = true;
    }

    fn front(&self) -> Option<&Group> {
        self.groups.front().filter(|_| !self.is_suspended)
    }

    /// The group that runs, as `settle` said.
    pub(crate) fn active(&self) -> Option<u64> {
        self.front().map(|group| group.id)
    }

    /// The members of the group that runs, in key order.
    pub(crate) fn active_members(&self) -> &[Handle] {
        self.front().map_or(&[], |group| &group.members)
    }
}
