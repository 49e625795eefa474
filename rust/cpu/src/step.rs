//! A step, as a model reads it, and what is checked of it before any kernel trusts it.

use std::fmt;

use crate::kv::KvView;

/// One step's arrays; DESIGN.md chapter 2.2 defines them.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// `[num_tokens]`.
    pub input_ids: &'a [i64],
    /// `[num_tokens]`.
    pub positions: &'a [i64],
    /// `[num_tokens]`; −1 where nothing is stored.
    pub slot_mapping: &'a [i64],
    /// `[num_rows + 1]`.
    pub cu_seqlens_q: &'a [i32],
    /// `[num_rows]`; 0 for padding.
    pub context_lens: &'a [i32],
    /// `[num_rows]`.
    pub row_seats: &'a [i64],
    /// `[num_seats, max_blocks]`, row by row.
    pub block_tables: &'a [i32],
    /// Entries of a seat's table.
    pub max_blocks: usize,
    /// `[num_logits]`: tokens whose logits are wanted.
    pub logits_indices: &'a [i64],
}

/// What is wrong with a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepError {
    /// An array is not as long as another says.
    Length {
        /// Which.
        name: &'static str,
        /// How long it is.
        found: usize,
        /// How long it has to be.
        expected: usize,
    },
    /// A number is outside of what it may be.
    Range {
        /// In which array.
        name: &'static str,
        /// The number.
        value: i64,
        /// It has to be below this.
        limit: i64,
    },
    /// Two tokens would be stored in one slot.
    SameSlot {
        /// Which.
        slot: i64,
    },
    /// The cache is of another model.
    Cache {
        /// Layers, KV heads, head size of the cache.
        found: [usize; 3],
        /// Of the program.
        expected: [usize; 3],
    },
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StepError::Length {
                name,
                found,
                expected,
            } => {
                write!(
                    f,
                    "{name} has {found} entries, but the step needs {expected}."
                )
            }
            StepError::Range { name, value, limit } => {
                write!(
                    f,
                    "{name} has a {value}, but must be from 0 to {}.",
                    limit - 1
                )
            }
            StepError::SameSlot { slot } => {
                write!(
                    f,
                    "slot_mapping has slot {slot} twice, but a slot holds one token."
                )
            }
            StepError::Cache { found, expected } => write!(
                f,
                "The KV cache has {} layers of {} heads of {} numbers, but the program needs {}, {} and {}.",
                found[0], found[1], found[2], expected[0], expected[1], expected[2]
            ),
        }
    }
}

impl std::error::Error for StepError {}

fn has_length(name: &'static str, found: usize, expected: usize) -> Result<(), StepError> {
    if found == expected {
        Ok(())
    } else {
        Err(StepError::Length {
            name,
            found,
            expected,
        })
    }
}

fn below(name: &'static str, value: i64, limit: usize) -> Result<(), StepError> {
    let limit = limit as i64;
    if (0..limit).contains(&value) {
        Ok(())
    } else {
        Err(StepError::Range { name, value, limit })
    }
}

impl Step<'_> {
    pub(crate) fn num_tokens(&self) -> usize {
        self.input_ids.len()
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.context_lens.len()
    }

    /// Tokens of a row, by its first and one beyond its last.
    pub(crate) fn row(&self, row: usize) -> std::ops::Range<usize> {
        self.cu_seqlens_q[row] as usize..self.cu_seqlens_q[row + 1] as usize
    }

    /// A row's blocks.
    pub(crate) fn table(&self, seat: usize) -> &[i32] {
        &self.block_tables[seat * self.max_blocks..][..self.max_blocks]
    }

    /// Refuses what would read or write outside of a table, the cache or a buffer, or one slot from two threads.
    ///
    /// `slots` is scratch.
    pub(crate) fn check(
        &self,
        vocab_size: usize,
        kv: &KvView,
        slots: &mut Vec<i64>,
    ) -> Result<(), StepError> {
        let (num_tokens, num_rows) = (self.num_tokens(), self.num_rows());
        has_length("positions", self.positions.len(), num_tokens)?;
        has_length("slot_mapping", self.slot_mapping.len(), num_tokens)?;
        has_length("cu_seqlens_q", self.cu_seqlens_q.len(), num_rows + 1)?;
        has_length("row_seats", self.row_seats.len(), num_rows)?;
        for &id in self.input_ids {
            below("input_ids", id, vocab_size)?;
        }
        for &token in self.logits_indices {
            below("logits_indices", token, num_tokens)?;
        }
        slots.clear();
        slots.extend(self.slot_mapping.iter().filter(|&&slot| slot != -1));
        for &slot in &*slots {
            below("slot_mapping", slot, kv.num_slots())?;
        }
        slots.sort_unstable();
        if let Some(pair) = slots.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(StepError::SameSlot { slot: pair[0] });
        }
        self.check_rows(kv)
    }

    fn check_rows(&self, kv: &KvView) -> Result<(), StepError> {
        let num_tokens = self.num_tokens();
        below("cu_seqlens_q", self.cu_seqlens_q[0].into(), 1)?;
        for row in 0..self.num_rows() {
            let (first, last) = (self.cu_seqlens_q[row], self.cu_seqlens_q[row + 1]);
            if last < first {
                let name = "the count of a row in cu_seqlens_q";
                return Err(StepError::Range {
                    name,
                    value: i64::from(last - first),
                    limit: num_tokens as i64 + 1,
                });
            }
            let context = self.context_lens[row];
            if context == 0 {
                continue; // padding
            }
            let capacity = self.max_blocks * kv.block_size;
            below("context_lens", context.into(), capacity + 1)?;
            below(
                "a row's count less its context",
                i64::from(context) - i64::from(last - first),
                capacity,
            )?;
            let num_seats = self.block_tables.len() / self.max_blocks.max(1);
            below("row_seats", self.row_seats[row], num_seats)?;
            let num_blocks = (context as usize).div_ceil(kv.block_size);
            for &block in &self.table(self.row_seats[row] as usize)[..num_blocks] {
                below("block_tables", block.into(), kv.num_blocks)?;
            }
        }
        has_length(
            "cu_seqlens_q's last entry",
            self.cu_seqlens_q[self.num_rows()] as usize,
            num_tokens,
        )
    }
}
