//! Attention over a paged cache, against a dense reference in double precision.

use noria_cpu::{
    AttentionOptions, Builder, Format, Heads, Isa, KvFormat, KvView, Matrix, Program, Step,
};
use proptest::prelude::*;

use crate::kv_formats::{FORMATS, packed, rounded};
use crate::support::{Numbers, assert_close, isas};

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

    /// Of a token in the step, one head of K (part 0) or V.
    fn new_head(&self, token: usize, part: usize, head: usize) -> &[f32] {
        let Heads {
            num_heads,
            num_kv_heads,
            head_dim,
        } = self.heads;
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let at = token * width + (num_heads + part * num_kv_heads + head) * head_dim;
        &self.qkv[at..at + head_dim]
    }

    /// Of a row's token, one head of K or V, as a format rounds it.
    fn stored(
        &self,
        format: KvFormat,
        (row, first): (usize, usize),
        position: usize,
        (part, head): (usize, usize),
    ) -> Vec<f64> {
        let start = self.rows[row].0;
        if position >= start {
            return rounded(format, self.new_head(first + position - start, part, head));
        }
        let earlier = &self.earlier[row];
        let earlier = if part == 0 { &earlier.0 } else { &earlier.1 };
        let at = position * self.size() + head * self.heads.head_dim;
        rounded(format, &earlier[at..at + self.heads.head_dim])
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
        let mut cache = self.cache(format);
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
        let heads = self.heads;
        // SAFETY: the bytes of a layer's K and V, which nobody else uses until the step has run.
        let kv = unsafe {
            KvView::new(
                cache.as_mut_ptr().cast(),
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
        self.check_stored(format, &cache, &slots);
        out
    }

    /// Bytes, in words, of what came before; all others are 255, which is NaN in every format.
    fn cache(&self, format: KvFormat) -> Vec<u32> {
        let Heads {
            num_kv_heads,
            head_dim,
            ..
        } = self.heads;
        let token_bytes = num_kv_heads * format.head_bytes(head_dim);
        let half = self.num_blocks * self.block_size * token_bytes;
        let mut bytes = vec![255u8; (2 * half).next_multiple_of(4)];
        for (row, (keys, values)) in self.earlier.iter().enumerate() {
            for position in 0..self.rows[row].0 {
                for (part, numbers) in [keys, values].into_iter().enumerate() {
                    let token = &numbers[position * self.size()..][..self.size()];
                    let stored: Vec<u8> = token
                        .chunks_exact(head_dim)
                        .flat_map(|head| packed(format, head))
                        .collect();
                    let at = part * half + self.slot(row, position) * token_bytes;
                    bytes[at..at + token_bytes].copy_from_slice(&stored);
                }
            }
        }
        bytes
            .chunks_exact(4)
            .map(|word| u32::from_ne_bytes(word.try_into().unwrap()))
            .collect()
    }

    /// The step's K and V lie in their slots, to the bit.
    fn check_stored(&self, format: KvFormat, cache: &[u32], slots: &[i64]) {
        let bytes: Vec<u8> = cache.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let head_bytes = format.head_bytes(self.heads.head_dim);
        let token_bytes = self.heads.num_kv_heads * head_bytes;
        for (token, &slot) in slots.iter().enumerate() {
            for part in 0..2 {
                for head in 0..self.heads.num_kv_heads {
                    let first = part * self.num_blocks * self.block_size * token_bytes;
                    let at = first + slot as usize * token_bytes + head * head_bytes;
                    let wanted = packed(format, self.new_head(token, part, head));
                    assert_eq!(bytes[at..at + head_bytes], wanted, "{format:?}");
                }
            }
        }
    }

    fn reference(&self, format: KvFormat, options: AttentionOptions) -> Vec<f64> {
        let Heads {
            num_heads,
            num_kv_heads,
            head_dim,
        } = self.heads;
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let mut out = Vec::new();
        let mut first = 0;
        for (row, &(start, count)) in self.rows.iter().enumerate() {
            let heads: Vec<Vec<Vec<f64>>> = (0..2 * num_kv_heads)
                .map(|at| {
                    let which = (at / num_kv_heads, at % num_kv_heads);
                    (0..start + count)
                        .map(|position| self.stored(format, (row, first), position, which))
                        .collect()
                })
                .collect();
            for query in 0..count {
                let position = start + query;
                for head in 0..num_heads {
                    let kv_head = head / (num_heads / num_kv_heads);
                    let (keys, values) = (&heads[kv_head], &heads[num_kv_heads + kv_head]);
                    let from = options
                        .window
                        .map_or(0, |window| (position + 1).saturating_sub(window));
                    let q = &self.qkv[(first + query) * width + head * head_dim..][..head_dim];
                    let scores: Vec<f64> = (from..=position)
                        .map(|at| {
                            let dot: f64 = q
                                .iter()
                                .enumerate()
                                .map(|(d, &q)| f64::from(q) * keys[at][d])
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
                    out.extend((0..head_dim).map(|d| {
                        let weighted = weights.iter().zip(&values[from..]);
                        weighted
                            .map(|(weight, value)| weight * value[d])
                            .sum::<f64>()
                            / total
                    }));
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
            for format in FORMATS {
                let found = batch.run(isa, format, options, 2);
                assert_close(&found, &batch.reference(format, options), 2e-5, isa.name());
            }
        }
    }
}

#[test]
fn a_score_that_is_no_number_shows_in_the_queries_that_see_it() {
    let heads = Heads {
        num_heads: 3,
        num_kv_heads: 1,
        head_dim: 18,
    };
    for count in [1, 7] {
        let mut batch = Batch::new(heads, 4, vec![(0, count)], 3);
        let last = (count - 1) * 5 * 18;
        batch.qkv[last + 3 * 18] = f32::NAN; // of its key
        for isa in isas() {
            for options in [
                PLAIN,
                AttentionOptions {
                    softcap: Some(3.0),
                    ..PLAIN
                },
            ] {
                let found = batch.run(isa, KvFormat::F32, options, 1);
                let (before, at) = found.split_at((count - 1) * 3 * 18);
                assert!(before.iter().all(|x| x.is_finite()), "{}", isa.name());
                assert!(at.iter().all(|x| x.is_nan()), "{}", isa.name());
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
        for format in [KvFormat::F32, KvFormat::Int8] {
            let wanted = batch.reference(format, options);
            for isa in isas() {
                let found = batch.run(isa, format, options, 3);
                assert_close(&found, &wanted, 2e-5, isa.name());
            }
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
    for (isa, format) in isas()
        .into_iter()
        .flat_map(|isa| FORMATS.map(|format| (isa, format)))
    {
        let mut alone = Vec::new();
        let together = Batch::new(heads, 16, rows.to_vec(), 3);
        let width = 8 * 16;
        let mut first = 0;
        for (row, &(start, count)) in rows.iter().enumerate() {
            let mut batch = Batch::new(heads, 8, vec![(start, count)], 4);
            batch.earlier = vec![together.earlier[row].clone()];
            batch.qkv = together.qkv[first * width..(first + count) * width].to_vec();
            alone.extend(batch.run(isa, format, PLAIN, 1));
            first += count;
        }
        assert_eq!(together.run(isa, format, PLAIN, 3), alone, "{}", isa.name());
    }
}

#[test]
fn a_token_has_the_same_bits_alone_and_in_any_chunk() {
    let heads = Heads {
        num_heads: 6,
        num_kv_heads: 2,
        head_dim: 20, // whole vectors and a rest
    };
    let num_tokens = 1100;
    let whole = Batch::new(heads, 16, vec![(0, num_tokens)], 5);
    let width = 10 * 20;
    // Alone, at the edges of tiles and ranges; in short chunks across them; a chunk that leaves one query to its last unit.
    let rows = [
        (0, 1),
        (3, 1),
        (63, 1),
        (64, 1),
        (127, 3),
        (511, 1),
        (512, 1),
        (500, 30),
        (575, 129),
        (900, 1),
        (1023, 1),
        (1024, 1),
        (1020, 65),
        (1099, 1),
    ];
    let mut parts = Batch::new(heads, 16, rows.to_vec(), 6);
    parts.qkv.clear();
    for (row, &(start, count)) in rows.iter().enumerate() {
        let tokens = start * width..(start + count) * width;
        parts.qkv.extend_from_slice(&whole.qkv[tokens]);
        let earlier = |part: usize| {
            let heads = (0..start).flat_map(|token| [(token, 0), (token, 1)]);
            heads
                .flat_map(|(token, head)| whole.new_head(token, part, head).to_vec())
                .collect()
        };
        parts.earlier[row] = (earlier(0), earlier(1));
    }
    let out = 6 * 20;
    let windows = [
        AttentionOptions {
            window: Some(77),
            softcap: Some(3.0),
            ..PLAIN
        },
        AttentionOptions {
            window: Some(600),
            ..PLAIN
        },
    ];
    let mut cases = FORMATS.map(|format| (format, PLAIN)).to_vec();
    cases.extend(windows.map(|options| (KvFormat::Int8, options)));
    for (format, options) in cases {
        for isa in isas() {
            let together = whole.run(isa, format, options, 2);
            let cut = parts.run(isa, format, options, 2);
            let mut first = 0;
            for &(start, count) in &rows {
                assert_eq!(
                    cut[first * out..(first + count) * out],
                    together[start * out..(start + count) * out],
                    "{} {format:?} {options:?}: {count} from {start}",
                    isa.name()
                );
                first += count;
            }
        }
    }
}

/// What rounding K and V can do: a score moves by at most `ε = scale · Σ|q| · |K's error|`, so a weight by a factor of
/// e^2ε, and a sum of V by its own error besides.
#[test]
fn rounded_kv_moves_attention_by_no_more_than_its_rounding_can() {
    let heads = Heads {
        num_heads: 6,
        num_kv_heads: 2,
        head_dim: 64,
    };
    let batch = Batch::new(heads, 16, vec![(200, 1), (90, 7), (0, 40)], 11);
    let options = AttentionOptions {
        scale: 0.125,
        ..PLAIN
    };
    let exact = batch.reference(KvFormat::F32, options);
    // Numbers are below 3; a query's magnitudes sum to at most 3 · 64.
    let largest = 3.0;
    for (format, error) in [
        (KvFormat::Int8, largest / 127.0 / 2.0),
        (KvFormat::F16, largest / 2048.0),
    ] {
        let epsilon = f64::from(options.scale) * 3.0 * 64.0 * error;
        let bound = (2.0 * epsilon).exp_m1() * largest + error;
        for isa in isas() {
            let found = batch.run(isa, format, options, 1);
            let errors = found
                .iter()
                .zip(&exact)
                .map(|(&found, exact)| (f64::from(found) - exact).abs());
            let (worst, total) = errors.fold((0.0f64, 0.0), |(worst, total), error| {
                (worst.max(error), total + error)
            });
            assert!(worst <= bound, "{format:?}: {worst} above {bound}");
            // Errors of many dimensions mostly cancel out.
            let mean = total / exact.len() as f64;
            assert!(mean <= error, "{format:?}: {mean} on average");
            assert!(worst > 0.0, "{format:?} rounds nothing");
        }
    }
}
