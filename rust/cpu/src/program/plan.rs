//! Cutting a step's attention into units of work, the largest first.

use std::sync::atomic::AtomicUsize;

use super::AttentionPlan;
use crate::attention::{Part, RANGE, Unit};
use crate::memory::Buffer;
use crate::step::Step;

impl AttentionPlan {
    /// Cuts a step. Costs a sort of its units; allocates only for the largest step so far.
    pub(super) fn prepare(&mut self, step: &Step<'_>, num_kv_heads: usize) {
        self.units.clear();
        let (mut num_parts, mut num_cut_rows) = (0, 0);
        for row in 0..step.num_rows() {
            let tokens = step.row(row);
            let context = step.context_lens[row] as usize;
            let is_padding = context == 0;
            let start = if is_padding {
                0
            } else {
                context - tokens.len()
            };
            let seat = if is_padding {
                0
            } else {
                step.row_seats[row] as usize
            };
            let unit = |first: usize, num_queries: usize, keys_from, keys_to, part| Unit {
                token: tokens.start + first,
                num_queries,
                position: start + first,
                seat,
                keys_from,
                keys_to,
                part,
            };
            if tokens.len() == 1 && context > RANGE {
                let count = context.div_ceil(RANGE);
                for place in 0..count {
                    let part = Part {
                        index: num_parts + place,
                        first: num_parts,
                        num_parts: count,
                        cut_row: num_cut_rows,
                    };
                    let from = place * RANGE;
                    let to = context.min(from + RANGE);
                    self.units.push(unit(0, 1, from, to, Some(part)));
                }
                num_parts += count;
                num_cut_rows += 1;
                continue;
            }
            for first in (0..tokens.len()).step_by(self.max_queries) {
                let num_queries = self.max_queries.min(tokens.len() - first);
                let to = if is_padding {
                    0
                } else {
                    start + first + num_queries
                };
                self.units.push(unit(first, num_queries, 0, to, None));
            }
        }
        self.units.sort_by_key(|unit| {
            std::cmp::Reverse(unit.num_queries * (unit.keys_to - unit.keys_from))
        });
        let num_done = num_cut_rows * num_kv_heads;
        if self.num_done.len() < num_done {
            self.num_done.resize_with(num_done, || AtomicUsize::new(0));
        }
        let size = num_parts * num_kv_heads * self.part_stride;
        if self
            .parts
            .as_ref()
            .is_none_or(|parts| parts.capacity() < size)
        {
            self.parts = Some(Buffer::zeroed(size));
        }
    }
}
