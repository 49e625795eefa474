//! Whole programs: ops row by row, values that share memory, and steps that do not fit.

use noria_cpu::{Builder, Format, Heads, Isa, KvFormat, KvView, Matrix, Step, StepError};

use crate::support::{Numbers, assert_close, isas};

const WIDTH: usize = 37;
const ROWS: usize = 11;

/// Runs one op on `[ROWS, WIDTH]` numbers; an identity shows what it makes.
fn shown(
    isa: Isa,
    x: &[f32],
    width: usize,
    op: impl Fn(&mut Builder, noria_cpu::Value) -> noria_cpu::Value,
    out_width: usize,
) -> Vec<f32> {
    let mut builder = Builder::new(isa).unwrap();
    let table = builder.table(x.to_vec(), width);
    let embedded = builder.embed(table);
    let made = op(&mut builder, embedded);
    let identity: Vec<f32> = (0..out_width * out_width)
        .map(|i| if i % (out_width + 1) == 0 { 1.0 } else { 0.0 })
        .collect();
    let head = builder.matrix(Matrix::pack(isa, Format::F32, &identity, out_width, None));
    let result = builder.logits(made, head);
    let mut program = builder.build(result, 2).unwrap();
    let mut out = vec![f32::NAN; x.len() / width * out_width];
    let ids: Vec<i64> = (0..(x.len() / width) as i64).collect();
    program
        .run(&step(&ids, &vec![-1; ids.len()]), &no_cache(), &mut out)
        .unwrap();
    out
}

fn step<'a>(ids: &'a [i64], slots: &'a [i64]) -> Step<'a> {
    Step {
        input_ids: ids,
        positions: ids,
        slot_mapping: slots,
        cu_seqlens_q: Box::leak(Box::new([0, ids.len() as i32])),
        context_lens: &[0],
        row_seats: &[0],
        block_tables: &[],
        max_blocks: 0,
        logits_indices: ids,
    }
}

fn no_cache() -> KvView {
    // SAFETY: a cache of no numbers.
    unsafe {
        KvView::new(
            std::ptr::NonNull::dangling().as_ptr(),
            KvFormat::F32,
            0,
            0,
            1,
            0,
            0,
        )
    }
}

/// Applies `f` to each number.
fn each(x: &[f32], f: impl Fn(f64) -> f64) -> Vec<f64> {
    x.iter().map(|&x| f(f64::from(x))).collect()
}

#[test]
fn ops_on_rows_are_their_formulas() {
    let mut numbers = Numbers::new(5);
    let x: Vec<f32> = numbers.take(ROWS * WIDTH).iter().map(|x| 6.0 * x).collect();
    let weight = numbers.take(WIDTH);
    for isa in isas() {
        let found = shown(isa, &x, WIDTH, |b, v| b.scale(v, 1.7), WIDTH);
        assert_close(&found, &each(&x, |x| x * f64::from(1.7f32)), 1e-6, "scale");
        let found = shown(isa, &x, WIDTH, |b, v| b.softcap(v, 2.0), WIDTH);
        assert_close(
            &found,
            &each(&x, |x| 2.0 * (x / 2.0).tanh()),
            1e-6,
            "softcap",
        );
        let found = shown(isa, &x, WIDTH, |b, v| b.add(v, v), WIDTH);
        assert_close(&found, &each(&x, |x| x + x), 1e-6, "add");
        let found = shown(
            isa,
            &x,
            WIDTH,
            |b, v| {
                let weight = b.vector(weight.clone());
                let sum = b.add(v, v);
                let normed = b.rms_norm(sum, weight, 1e-5);
                b.add(sum, normed) // the sum is read again after it was normed
            },
            WIDTH,
        );
        let mut wanted = Vec::new();
        for row in x.chunks(WIDTH) {
            let row = each(row, |x| 2.0 * x);
            let mean = row.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
            let scale = 1.0 / (mean + 1e-5).sqrt();
            wanted.extend(
                row.iter()
                    .zip(&weight)
                    .map(|(x, &w)| x + x * scale * f64::from(w)),
            );
        }
        assert_close(&found, &wanted, 1e-5, "rms_norm");
    }
}

#[test]
fn a_sum_that_is_normed_while_it_is_there_has_the_bits_of_one_normed_later() {
    let mut numbers = Numbers::new(17);
    for width in [1, 5, WIDTH, 48] {
        let (x, weight) = (numbers.take(ROWS * width), numbers.take(width));
        for isa in isas() {
            let normed = |is_later: bool| {
                let op = |b: &mut Builder, v| {
                    let weight = b.vector(weight.clone());
                    let other = b.scale(v, 0.3);
                    let sum = b.add(v, other);
                    if is_later {
                        b.scale(v, 2.0); // a stage in between
                    }
                    let normed = b.rms_norm(sum, weight, 1e-5);
                    b.add(sum, normed)
                };
                shown(isa, &x, width, op, width)
            };
            assert_eq!(normed(false), normed(true), "{} {width}", isa.name());
        }
    }
}

#[test]
fn rounded_values_are_read_by_several_products_and_by_other_ops() {
    let mut numbers = Numbers::new(16);
    let (x, weight) = (numbers.take(ROWS * WIDTH), numbers.take(WIDTH));
    let identity: Vec<f32> = (0..WIDTH * WIDTH)
        .map(|i| if i % (WIDTH + 1) == 0 { 1.0 } else { 0.0 })
        .collect();
    for isa in isas() {
        for also_added in [false, true] {
            let op = |b: &mut Builder, v| {
                let mut v = v;
                for _ in 0..3 {
                    let weight = b.vector(weight.clone());
                    let normed = b.rms_norm(v, weight, 1e-5);
                    let map = |b: &mut Builder, format| {
                        let map = b.matrix(Matrix::pack(isa, format, &identity, WIDTH, None));
                        b.linear(normed, map)
                    };
                    let (first, second) = (map(b, Format::Int8), map(b, Format::Int8));
                    let third = map(b, Format::F32);
                    let sum = b.add(first, second);
                    let sum = b.add(sum, third);
                    v = if also_added { b.add(sum, normed) } else { sum };
                }
                v
            };
            let found = shown(isa, &x, WIDTH, op, WIDTH);
            let mut wanted = Vec::new();
            for (place, row) in x.chunks(WIDTH).enumerate() {
                let mut row = each(row, |x| x);
                for _ in 0..3 {
                    let mean = row.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
                    let factor = if also_added { 4.0 } else { 3.0 } / (mean + 1e-5).sqrt();
                    for (x, &w) in row.iter_mut().zip(&weight) {
                        *x *= factor * f64::from(w);
                    }
                }
                wanted.extend(row);
                let alone = shown(isa, &x[place * WIDTH..][..WIDTH], WIDTH, op, WIDTH);
                assert_eq!(alone, found[place * WIDTH..][..WIDTH], "{}", isa.name());
            }
            assert_close(&found, &wanted, 2e-4, isa.name());
        }
    }
}

#[test]
fn what_is_no_number_stays_none() {
    let x = vec![f32::NAN; ROWS * 2 * WIDTH];
    for isa in isas() {
        for found in [
            shown(isa, &x, 2 * WIDTH, |b, v| b.softcap(v, 2.0), 2 * WIDTH),
            shown(isa, &x, 2 * WIDTH, Builder::silu_mul, WIDTH),
            shown(isa, &x, 2 * WIDTH, Builder::gelu_mul, WIDTH),
        ] {
            assert!(found.iter().all(|x| x.is_nan()), "{}", isa.name());
        }
    }
}

#[test]
fn gates_are_their_formulas_also_far_from_zero() {
    let mut numbers = Numbers::new(6);
    let half = 19;
    let mut x = numbers.take(ROWS * 2 * half);
    for (place, x) in x.iter_mut().enumerate() {
        *x *= [1.0, 10.0, 100.0][place % 3];
    }
    for isa in isas() {
        let silu = shown(isa, &x, 2 * half, Builder::silu_mul, half);
        let gelu = shown(isa, &x, 2 * half, Builder::gelu_mul, half);
        let (mut wanted_silu, mut wanted_gelu) = (Vec::new(), Vec::new());
        for row in x.chunks(2 * half) {
            for (g, u) in row[..half].iter().zip(&row[half..]) {
                let (g, u) = (f64::from(*g), f64::from(*u));
                wanted_silu.push(g / (1.0 + (-g).exp()) * u);
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g * g * g);
                wanted_gelu.push(0.5 * g * (1.0 + inner.tanh()) * u);
            }
        }
        assert_close(&silu, &wanted_silu, 1e-5, "silu");
        assert_close(&gelu, &wanted_gelu, 2e-5, "gelu");
    }
}

/// What gates make of products with one matrix: in a program that may gate them while they are made, or (`apart`) not.
fn gated(isa: Isa, format: Format, apart: bool, half: usize, x: &[f32]) -> Vec<f32> {
    let mut numbers = Numbers::new(8);
    let weight = numbers.take(2 * half * WIDTH);
    let bias = numbers.take(2 * half);
    shown(
        isa,
        x,
        WIDTH,
        |b, v| {
            let matrix = b.matrix(Matrix::pack(isa, format, &weight, WIDTH, Some(&bias)));
            let product = |b: &mut Builder| {
                let made = b.linear(v, matrix);
                if apart { b.scale(made, 1.0) } else { made }
            };
            let first = product(b);
            let first = b.silu_mul(first);
            let second = product(b);
            let second = b.gelu_mul(second);
            b.add(first, second)
        },
        half,
    )
}

#[test]
fn products_that_are_gated_while_they_are_made_have_the_bits_of_ones_gated_later() {
    let mut numbers = Numbers::new(9);
    let x = numbers.take(601 * WIDTH);
    for isa in isas() {
        for format in [Format::F32, Format::Bf16, Format::Int8] {
            // Whole panels of any instruction set, and none.
            for half in [48, 7 * 48, 40] {
                for num_rows in [1, 2, 11, 601] {
                    let x = &x[..num_rows * WIDTH];
                    let found = gated(isa, format, false, half, x);
                    let wanted = gated(isa, format, true, half, x);
                    assert_eq!(found, wanted, "{} {format:?} {half} {num_rows}", isa.name());
                }
            }
        }
    }
}

#[test]
fn a_matrix_that_also_makes_a_plain_product_is_not_gated_in_place() {
    let mut numbers = Numbers::new(10);
    let (x, weight) = (numbers.take(ROWS * WIDTH), numbers.take(96 * WIDTH));
    for isa in isas() {
        let both = |apart: bool| {
            shown(
                isa,
                &x,
                WIDTH,
                |b, v| {
                    let matrix = b.matrix(Matrix::pack(isa, Format::F32, &weight, WIDTH, None));
                    let plain = b.linear(v, matrix);
                    let mut made = b.linear(v, matrix);
                    if apart {
                        made = b.scale(made, 1.0);
                    }
                    let made = b.silu_mul(made);
                    let plain = b.gelu_mul(plain);
                    b.add(made, plain)
                },
                48,
            )
        };
        assert_eq!(both(false), both(true), "{}", isa.name());
    }
}

#[test]
#[should_panic(expected = "a matrix of gated products serves no others")]
fn a_plain_product_with_a_matrix_of_gated_ones_is_refused() {
    let isa = Isa::Portable;
    let mut b = Builder::new(isa).unwrap();
    let table = b.table(vec![1.0; 32], 32);
    let x = b.embed(table);
    let matrix = b.matrix(Matrix::pack(isa, Format::F32, &[1.0; 64 * 32], 32, None));
    let made = b.linear(x, matrix);
    let made = b.silu_mul(made);
    let result = b.logits(made, matrix);
    let _ = b.build(result, 1);
}

#[test]
fn heads_of_q_and_k_are_normed_and_part_of_them_rotated() {
    check_norm_and_rope(10, &[1.0, 0.37, 0.01]); // 6 of 10 dimensions: no whole vector
    let frequencies: Vec<f32> = (0..35).map(|i| 0.8f32.powi(i)).collect();
    check_norm_and_rope(74, &frequencies); // whole vectors and a rest
}

fn check_norm_and_rope(head_dim: usize, frequencies: &[f32]) {
    let heads = Heads {
        num_heads: 4,
        num_kv_heads: 2,
        head_dim,
    };
    let width = 8 * head_dim;
    let mut numbers = Numbers::new(8);
    let x = numbers.take(ROWS * width);
    let (q_weight, k_weight) = (numbers.take(head_dim), numbers.take(head_dim));
    for isa in isas() {
        let found = shown(
            isa,
            &x,
            width,
            |b, v| {
                let (q, k) = (b.vector(q_weight.clone()), b.vector(k_weight.clone()));
                let frequencies = b.vector(frequencies.to_vec());
                let normed = b.qk_norm(v, q, k, 1e-6, heads);
                b.rope(normed, frequencies, 1.25, heads)
            },
            width,
        );
        let mut wanted = Vec::new();
        for (position, row) in x.chunks(width).enumerate() {
            for (index, head) in row.chunks(head_dim).enumerate() {
                let mut head = each(head, |x| x);
                let half = frequencies.len();
                if index < 6 {
                    let mean = head.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
                    let weight = if index < 4 { &q_weight } else { &k_weight };
                    for (x, &w) in head.iter_mut().zip(weight) {
                        *x = *x / (mean + 1e-6).sqrt() * f64::from(w);
                    }
                    for (pair, &frequency) in frequencies.iter().enumerate() {
                        let angle = position as f64 * f64::from(frequency);
                        let (sin, cos) = (1.25 * angle.sin(), 1.25 * angle.cos());
                        let (a, b) = (head[pair], head[pair + half]);
                        (head[pair], head[pair + half]) = (a * cos - b * sin, b * cos + a * sin);
                    }
                }
                wanted.extend(head);
            }
        }
        assert_close(&found, &wanted, 1e-5, isa.name());
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "one bad step after another")]
fn a_step_that_does_not_fit_is_refused_by_name() {
    let mut builder = Builder::new(Isa::widest()).unwrap();
    let table = builder.table(vec![0.5; 3 * 4], 4);
    let matrix = builder.matrix(Matrix::pack(Isa::widest(), Format::F32, &[1.0; 8], 4, None));
    let x = builder.embed(table);
    let result = builder.logits(x, matrix);
    let mut program = builder.build(result, 1).unwrap();
    let mut cache = vec![0.0f32; 2 * 4 * 2];
    // SAFETY: 1 layer of K and V of 2 blocks of 4 slots of one number, used here alone.
    let kv = unsafe { KvView::new(cache.as_mut_ptr().cast(), KvFormat::F32, 1, 2, 4, 1, 1) };
    let good = Step {
        input_ids: &[1, 2],
        positions: &[0, 1],
        slot_mapping: &[4, 5],
        cu_seqlens_q: &[0, 2],
        context_lens: &[2],
        row_seats: &[0],
        block_tables: &[1],
        max_blocks: 1,
        logits_indices: &[1],
    };
    let mut logits = [0.0; 2];
    assert_eq!(program.run(&good, &kv, &mut logits), Ok(()));
    assert_eq!(logits, [2.0; 2]);
    let mut error = |step: Step<'_>| {
        program
            .run(&step, &kv, &mut [0.0; 2])
            .unwrap_err()
            .to_string()
    };
    for (bad, wanted) in [
        (
            Step {
                input_ids: &[1, 3],
                ..good
            },
            "input_ids has a 3, but must be from 0 to 2.",
        ),
        (
            Step {
                slot_mapping: &[4, 8],
                ..good
            },
            "slot_mapping has a 8, but must be from 0 to 7.",
        ),
        (
            Step {
                slot_mapping: &[4, 4],
                ..good
            },
            "slot_mapping has slot 4 twice, but a slot holds one token.",
        ),
        (
            Step {
                block_tables: &[2],
                ..good
            },
            "block_tables has a 2, but must be from 0 to 1.",
        ),
        (
            Step {
                context_lens: &[5],
                ..good
            },
            "context_lens has a 5, but must be from 0 to 4.",
        ),
        (
            Step {
                row_seats: &[1],
                ..good
            },
            "row_seats has a 1, but must be from 0 to 0.",
        ),
        (
            Step {
                logits_indices: &[2],
                ..good
            },
            "logits_indices has a 2, but must be from 0 to 1.",
        ),
        (
            Step {
                positions: &[0],
                ..good
            },
            "positions has 1 entries, but the step needs 2.",
        ),
        (
            Step {
                cu_seqlens_q: &[0, 1],
                ..good
            },
            "cu_seqlens_q's last entry has 1 entries, but the step needs 2.",
        ),
        (
            Step {
                context_lens: &[1],
                ..good
            },
            "a row's count less its context has a -1, but must be from 0 to 3.",
        ),
    ] {
        assert_eq!(error(bad), wanted);
    }
    let length = StepError::Length {
        name: "logits",
        found: 1,
        expected: 2,
    };
    assert_eq!(program.run(&good, &kv, &mut [0.0]), Err(length));
}
