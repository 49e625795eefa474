//! Cutting a step's attention into units of work, the largest first.

use std::sync::atomic::AtomicUsize;

use super::AttentionPlan;
use crate::attention::{Part, RANGE, Unit};
use crate::memory::Buffer;
use crate::step::Step;

impl AttentionPlan {
    /// Cuts a step. Costs a sort of its units; allocates only for the largest step so far.
    ///
    /// A row that decodes takes all KV heads at once, for then K and V are read in order, unless there are too few such
    /// rows for all workers; what is computed is the same.
    pub(super) fn prepare(&mut self, step: &Step<'_>, num_kv_heads: usize, num_workers: usize) {
        self.units.clear();
        let num_decode_units: usize = (0..step.num_rows())
            .filter(|&row| step.row(row).len() == 1)
            .map(|row| (step.context_lens[row] as usize).div_ceil(RANGE))
            .sum();
        let heads_of_decode = if num_decode_units >= 2 * num_workers {
            num_kv_heads
        } else {
            1
        };
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
                kv_head: 0,
                num_kv_heads: if num_queries == 1 { heads_of_decode } else { 1 },
                part,
            };
            let units = &mut self.units;
            let mut push = |unit: Unit| {
                let heads = (0..num_kv_heads).step_by(unit.num_kv_heads);
                units.extend(heads.map(|kv_head| Unit { kv_head, ..unit }));
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
                    push(unit(0, 1, from, to, Some(part)));
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
                push(unit(first, num_queries, 0, to, None));
            }
        }
        self.units.sort_by_key(|unit| {
            let num_scores = unit.num_queries * (unit.keys_to - unit.keys_from);
            std::cmp::Reverse(num_scores * unit.num_kv_heads)
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
