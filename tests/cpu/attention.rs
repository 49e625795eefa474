//! Attention over a paged cache, against a dense reference in double precision.

use noria_cpu::{
    AttentionOptions, Builder, Format, Heads, Isa, KvFormat, KvView, Matrix, Program, Step,
};
use proptest::prelude::*;

use crate::support::{Numbers, assert_close, bf16, isas};

/// A ragged batch over a cache that holds what came before, and NaN everywhere else.
struct Batch {
    heads: Heads,
    block_size: usize,
    num_blocks: usize,
    max_blocks: usize,
    /// (start, count) of each row.
    rows: Vec<(usize, usize)>,
    tables: Vec<i32>,
    /// By row: K and V of the tokens before it.
    earlier: Vec<(Vec<f32>, Vec<f32>)>,
    /// `[num_tokens, (heads + 2 · kv heads) · dim]`.
    qkv: Vec<f32>,
}

impl Batch {
    fn new(heads: Heads, block_size: usize, rows: Vec<(usize, usize)>, seed: u64) -> Batch {
        let mut numbers = Numbers::new(seed);
        let needed = |&(start, count): &(usize, usize)| (start + count).div_ceil(block_size);
        let max_blocks = rows.iter().map(needed).max().unwrap() + 1;
        let num_blocks = rows.iter().map(needed).sum::<usize>() + 1;
        let mut free: Vec<i32> = (1..num_blocks as i32).collect();
        let mut tables = vec![0; rows.len() * max_blocks];
        for (row, spans) in rows.iter().enumerate() {
            for column in 0..needed(spans) {
                let block = free.swap_remove(numbers.below(free.len()));
                tables[row * max_blocks + column] = block;
            }
        }
        let size = heads.num_kv_heads * heads.head_dim;
        let earlier = rows
            .iter()
            .map(|&(start, _)| (numbers.take(start * size), numbers.take(start * size)))
            .collect();
        let num_tokens: usize = rows.iter().map(|&(_, count)| count).sum();
        let width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
        let qkv = numbers
            .take(num_tokens * width)
            .into_iter()
            .map(|x| 3.0 * x)
            .collect();
        Batch {
            heads,
            block_size,
            num_blocks,
            max_blocks,
            rows,
            tables,
            earlier,
            qkv,
        }
    }

    fn size(&self) -> usize {
        self.heads.num_kv_heads * self.heads.head_dim
    }

    fn slot(&self, row: usize, position: usize) -> usize {
        let block = self.tables[row * self.max_blocks + position / self.block_size] as usize;
        block * self.block_size + position % self.block_size
    }

    /// What comes of it: one product with the identity shows attention's output.
    fn run(
        &self,
        isa: Isa,
        format: KvFormat,
        options: AttentionOptions,
        num_workers: usize,
    ) -> Vec<f32> {
        let width = self.heads.num_heads * self.heads.head_dim;
        let mut builder = Builder::new(isa).unwrap();
        let table = builder.table(
            self.qkv.clone(),
            (self.heads.num_heads + 2 * self.heads.num_kv_heads) * self.heads.head_dim,
        );
        let identity: Vec<f32> = (0..width * width)
            .map(|i| if i % (width + 1) == 0 { 1.0 } else { 0.0 })
            .collect();
        let head = builder.matrix(Matrix::pack(isa, Format::F32, &identity, width, None));
        let qkv = builder.embed(table);
        let attended = builder.attention(qkv, 0, self.heads, options);
        let result = builder.logits(attended, head);
        let mut program = builder.build(result, num_workers).unwrap();
        let mut out = Vec::new();
        for _ in 0..2 {
            out = self.run_program(&mut program, format, width); // twice: a step leaves nothing behind
        }
        out
    }

    fn run_program(&self, program: &mut Program, format: KvFormat, width: usize) -> Vec<f32> {
        let num_numbers = 2 * self.num_blocks * self.block_size * self.size();
        let mut wide = vec![f32::NAN; num_numbers];
        let half = num_numbers / 2;
        for (row, (keys, values)) in self.earlier.iter().enumerate() {
            for position in 0..self.rows[row].0 {
                let (at, from) = (
                    self.slot(row, position) * self.size(),
                    position * self.size(),
                );
                wide[at..at + self.size()].copy_from_slice(&keys[from..from + self.size()]);
                wide[half + at..half + at + self.size()]
                    .copy_from_slice(&values[from..from + self.size()]);
            }
        }
        let mut narrow: Vec<u16> = wide
            .iter()
            .map(|&x| (bf16(x).to_bits() >> 16) as u16)
            .collect();
        let (mut ids, mut positions, mut slots, mut contexts, mut cumulated) =
            (vec![], vec![], vec![], vec![], vec![0]);
        for (row, &(start, count)) in self.rows.iter().enumerate() {
            for position in start..start + count {
                ids.push(ids.len() as i64);
                positions.push(position as i64);
                slots.push(self.slot(row, position) as i64);
            }
            contexts.push((start + count) as i32);
            cumulated.push(ids.len() as i32);
        }
        let seats: Vec<i64> = (0..self.rows.len() as i64).collect();
        let step = Step {
            input_ids: &ids,
            positions: &positions,
            slot_mapping: &slots,
            cu_seqlens_q: &cumulated,
            context_lens: &contexts,
            row_seats: &seats,
            block_tables: &self.tables,
            max_blocks: self.max_blocks,
            logits_indices: &ids,
        };
        let base = match format {
            KvFormat::F32 => wide.as_mut_ptr().cast(),
            KvFormat::Bf16 => narrow.as_mut_ptr().cast::<u8>(),
        };
        let heads = self.heads;
        // SAFETY: the numbers of a layer's K and V, which nobody else uses until the step has run.
        let kv = unsafe {
            KvView::new(
                base,
                format,
                1,
                self.num_blocks,
                self.block_size,
                heads.num_kv_heads,
                heads.head_dim,
            )
        };
        let mut out = vec![f32::NAN; ids.len() * width];
        program.run(&step, &kv, &mut out).unwrap();
        out
    }

    fn reference(&self, format: KvFormat, options: AttentionOptions) -> Vec<f64> {
        let Heads {
            num_heads,
            num_kv_heads,
            head_dim,
        } = self.heads;
        let stored = |x: f32| f64::from(if format == KvFormat::Bf16 { bf16(x) } else { x });
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let mut out = Vec::new();
        let mut first = 0;
        for (row, &(start, count)) in self.rows.iter().enumerate() {
            let (keys, values) = &self.earlier[row];
            let key = |position: usize, at: usize, part: usize| -> f64 {
                if position < start {
                    let earlier = if part == 0 { keys } else { values };
                    return stored(earlier[position * self.size() + at]);
                }
                let token = first + position - start;
                stored(self.qkv[token * width + (num_heads + part * num_kv_heads) * head_dim + at])
            };
            for query in 0..count {
                let position = start + query;
                for head in 0..num_heads {
                    let offset = head / (num_heads / num_kv_heads) * head_dim;
                    let from = options
                        .window
                        .map_or(0, |window| (position + 1).saturating_sub(window));
                    let q = &self.qkv[(first + query) * width + head * head_dim..][..head_dim];
                    let scores: Vec<f64> = (from..=position)
                        .map(|at| {
                            let dot: f64 = q
                                .iter()
                                .enumerate()
                                .map(|(d, &q)| f64::from(q) * key(at, offset + d, 0))
                                .sum();
                            let score = dot * f64::from(options.scale);
                            options.softcap.map_or(score, |cap| {
                                f64::from(cap) * (score / f64::from(cap)).tanh()
                            })
                        })
                        .collect();
                    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> =
                        scores.iter().map(|score| (score - largest).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for d in 0..head_dim {
                        let sum: f64 = weights
                            .iter()
                            .zip(from..)
                            .map(|(weight, at)| weight * key(at, offset + d, 1))
                            .sum();
                        out.push(sum / total);
                    }
                }
            }
            first += count;
        }
        out
    }
}

const PLAIN: AttentionOptions = AttentionOptions {
    scale: 0.3,
    window: None,
    softcap: None,
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    #[test]
    fn ragged_batches_are_the_dense_references(
        rows in prop::collection::vec((0usize..90, prop_oneof![Just(1usize), 1usize..50]), 1..5),
        group in 1usize..6,
        num_kv_heads in 1usize..3,
        half_dim in 1usize..20,
        block_size in 1usize..40,
        window in prop::option::of(1usize..60),
        softcap in prop::option::of(0.5f32..4.0),
        seed: u64,
    ) {
        let heads = Heads { num_heads: group * num_kv_heads, num_kv_heads, head_dim: 2 * half_dim };
        let batch = Batch::new(heads, block_size, rows, seed);
        let options = AttentionOptions { scale: 0.3, window, softcap };
        for isa in isas() {
            for format in [KvFormat::F32, KvFormat::Bf16] {
                let found = batch.run(isa, format, options, 2);
                assert_close(&found, &batch.reference(format, options), 2e-5, isa.name());
            }
        }
    }
}

#[test]
fn long_rows_that_are_cut_in_ranges_are_the_dense_references() {
    let heads = Heads {
        num_heads: 6,
        num_kv_heads: 2,
        head_dim: 8,
    };
    let rows = vec![(1500, 1), (511, 1), (512, 1), (3, 1), (1100, 40), (0, 300)];
    let batch = Batch::new(heads, 16, rows, 7);
    for options in [
        PLAIN,
        AttentionOptions {
            window: Some(600),
            ..PLAIN
        },
    ] {
        let wanted = batch.reference(KvFormat::F32, options);
        for isa in isas() {
            let found = batch.run(isa, KvFormat::F32, options, 3);
            assert_close(&found, &wanted, 2e-5, isa.name());
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_beside_any_others() {
    let heads = Heads {
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
    };
    let rows = [(700, 1), (20, 33), (0, 5), (64, 1)];
    for isa in isas() {
        let mut alone = Vec::new();
        let together = Batch::new(heads, 16, rows.to_vec(), 3);
        let width = 8 * 16;
        let mut first = 0;
        for (row, &(start, count)) in rows.iter().enumerate() {
            let mut batch = Batch::new(heads, 8, vec![(start, count)], 4);
            batch.earlier = vec![together.earlier[row].clone()];
            batch.qkv = together.qkv[first * width..(first + count) * width].to_vec();
            alone.extend(batch.run(isa, KvFormat::F32, PLAIN, 1));
            first += count;
        }
        assert_eq!(
            together.run(isa, KvFormat::F32, PLAIN, 3),
            alone,
            "{}",
            isa.name()
        );
    }
}
