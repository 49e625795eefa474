//! Products with packed matrices: right for every shape, and a row's bits its own.

use noria_cpu::{
    AttentionOptions, Builder, Format, Heads, Isa, KvFormat, KvView, Matrix, Program, Step,
};
use proptest::prelude::*;

use crate::support::{Numbers, assert_close, bf16, isas};

const FORMATS: [Format; 2] = [Format::F32, Format::Bf16];

/// `x · weightᵀ + bias` by a program of one product: row i of the table is row i of `x`.
fn product(
    isa: Isa,
    format: Format,
    x: &[f32],
    weight: &[f32],
    num_in: usize,
    bias: Option<&[f32]>,
    num_workers: usize,
) -> Vec<f32> {
    let packed = Matrix::pack(isa, format, weight, num_in, bias);
    product_with(isa, packed, x, num_in, num_workers)
}

fn product_with(
    isa: Isa,
    packed: Matrix,
    x: &[f32],
    num_in: usize,
    num_workers: usize,
) -> Vec<f32> {
    let num_rows = x.len() / num_in;
    let num_out = packed.num_out();
    let mut builder = Builder::new(isa).unwrap();
    let table = builder.table(x.to_vec(), num_in);
    let matrix = builder.matrix(packed);
    let embedded = builder.embed(table);
    let result = builder.logits(embedded, matrix);
    let mut program = builder.build(result, num_workers).unwrap();
    let mut out = vec![f32::NAN; num_rows * num_out];
    run_all(&mut program, num_rows, &mut out);
    out
}

/// A step of one padding row with tokens 0, 1, 2, …, all of whose logits are wanted.
fn run_all(program: &mut Program, num_rows: usize, out: &mut [f32]) {
    let ids: Vec<i64> = (0..num_rows as i64).collect();
    let slots = vec![-1; num_rows];
    let step = Step {
        input_ids: &ids,
        positions: &ids,
        slot_mapping: &slots,
        cu_seqlens_q: &[0, num_rows as i32],
        context_lens: &[0],
        row_seats: &[0],
        block_tables: &[],
        max_blocks: 0,
        logits_indices: &ids,
    };
    // SAFETY: a cache of no numbers.
    let kv = unsafe {
        KvView::new(
            std::ptr::NonNull::dangling().as_ptr(),
            KvFormat::F32,
            0,
            0,
            1,
            0,
            0,
        )
    };
    program.run(&step, &kv, out).unwrap();
}

fn reference(
    format: Format,
    x: &[f32],
    weight: &[f32],
    num_in: usize,
    bias: Option<&[f32]>,
) -> Vec<f64> {
    let stored = |w: f32| f64::from(if format == Format::Bf16 { bf16(w) } else { w });
    let mut out = Vec::new();
    for row in x.chunks(num_in) {
        for (column, weights) in weight.chunks(num_in).enumerate() {
            let sum: f64 = row
                .iter()
                .zip(weights)
                .map(|(&x, &w)| f64::from(x) * stored(w))
                .sum();
            out.push(sum + bias.map_or(0.0, |bias| f64::from(bias[column])));
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn every_shape_is_right_on_every_path(
        num_rows in 1usize..20, num_in in 1usize..90, num_out in 1usize..110, has_bias: bool, seed: u64
    ) {
        let mut numbers = Numbers::new(seed);
        let (x, weight) = (numbers.take(num_rows * num_in), numbers.take(num_out * num_in));
        let bias = numbers.take(num_out);
        let bias = has_bias.then_some(&bias[..]);
        for isa in isas() {
            for format in FORMATS {
                let found = product(isa, format, &x, &weight, num_in, bias, 1);
                let wanted = reference(format, &x, &weight, num_in, bias);
                assert_close(&found, &wanted, 1e-5, isa.name());
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_beside_any_others_and_for_any_number_of_workers() {
    // Panels for streams of two and some more, with any instruction set.
    let (num_in, num_out) = (200, 450);
    let mut numbers = Numbers::new(1);
    let (x, weight) = (numbers.take(23 * num_in), numbers.take(num_out * num_in));
    for isa in isas() {
        for format in FORMATS {
            let together = product(isa, format, &x, &weight, num_in, None, 3);
            for count in 1..=9 {
                let some = product(isa, format, &x[..count * num_in], &weight, num_in, None, 1);
                assert_eq!(some, together[..count * num_out], "{} {count}", isa.name());
            }
        }
    }
}

#[test]
fn a_large_product_is_right_with_many_panels_and_workers() {
    let (num_rows, num_in, num_out) = (70, 576, 1000);
    let mut numbers = Numbers::new(2);
    let (x, weight) = (
        numbers.take(num_rows * num_in),
        numbers.take(num_out * num_in),
    );
    let wanted = reference(Format::F32, &x, &weight, num_in, None);
    for isa in isas() {
        let found = product(isa, Format::F32, &x, &weight, num_in, None, 4);
        assert_close(&found, &wanted, 2e-5, isa.name());
    }
}

#[test]
fn a_forced_instruction_set_that_does_not_exist_is_named() {
    let error = Isa::named("sse").unwrap_err();
    assert_eq!(
        error.to_string(),
        "NORIA_CPU_ISA is \"sse\", but must be portable, avx2, avx-vnni, avx512 or avx512-vnni."
    );
    assert_eq!(Isa::named("portable").unwrap(), Isa::Portable);
}

#[test]
#[should_panic(expected = "a matrix of as many inputs as x has columns")]
fn an_op_that_does_not_fit_is_refused_when_it_is_recorded() {
    let mut builder = Builder::new(Isa::Portable).unwrap();
    let table = builder.table(vec![0.0; 8], 4);
    let matrix = builder.matrix(Matrix::pack(Isa::Portable, Format::F32, &[0.0; 6], 3, None));
    let x = builder.embed(table);
    builder.linear(x, matrix);
}

#[test]
#[should_panic(expected = "whole groups of heads")]
fn heads_that_do_not_group_are_refused() {
    let mut builder = Builder::new(Isa::Portable).unwrap();
    let heads = Heads {
        num_heads: 3,
        num_kv_heads: 2,
        head_dim: 2,
    };
    let table = builder.table(vec![0.0; 14], 14);
    let qkv = builder.embed(table);
    builder.attention(
        qkv,
        0,
        heads,
        AttentionOptions {
            scale: 1.0,
            window: None,
            softcap: None,
        },
    );
}

/// Random blocks of rows, and their numbers by the format's formula.
fn blocks(
    format: Format,
    num_rows: usize,
    num_in: usize,
    numbers: &mut Numbers,
) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for _ in 0..num_rows * num_in / 32 {
        // float16 from 2^-7 to 2^-3, and its value
        let mut scale = || {
            let (fraction, exponent) = (numbers.below(1024), 8 + numbers.below(4));
            let value = (1.0 + fraction as f32 / 1024.0) * 2.0f32.powi(exponent as i32 - 15);
            (((exponent << 10) | fraction) as u16, value)
        };
        let (scale_bits, scale_value) = scale();
        let (minimum_bits, minimum) = scale();
        bytes.extend(scale_bits.to_le_bytes());
        if format == Format::Q4_1 {
            bytes.extend(minimum_bits.to_le_bytes());
        }
        let raw: Vec<u8> = (0..32).map(|_| numbers.below(256) as u8).collect();
        if format == Format::Q8_0 {
            bytes.extend(&raw);
            values.extend(raw.iter().map(|&b| f32::from(b as i8) * scale_value));
            continue;
        }
        let raw = &raw[..16];
        bytes.extend(raw);
        for nibble in raw.iter().map(|b| b & 15).chain(raw.iter().map(|b| b >> 4)) {
            values.push(match format {
                Format::Q4_0 => (f32::from(nibble) - 8.0) * scale_value,
                _ => f32::from(nibble) * scale_value + minimum,
            });
        }
    }
    (bytes, values)
}

#[test]
fn gguf_blocks_give_their_numbers_and_a_row_the_same_bits_beside_any_others() {
    let mut numbers = Numbers::new(9);
    for isa in isas() {
        for format in [Format::Q8_0, Format::Q4_0, Format::Q4_1] {
            for (num_in, num_out) in [(32, 49), (96, 16), (64, 450), (576, 100)] {
                let (bytes, values) = blocks(format, num_out, num_in, &mut numbers);
                let mut x = numbers.take(19 * num_in);
                x[..num_in].iter_mut().for_each(|x| *x *= 1000.0); // a row's scale is its own
                let bias = numbers.take(num_out);
                let wanted = reference(Format::F32, &x, &values, num_in, Some(&bias));
                let multiply = |count: usize, num_workers: usize| {
                    let packed = Matrix::pack_blocks(isa, format, &bytes, num_in, Some(&bias));
                    product_with(isa, packed, &x[..count * num_in], num_in, num_workers)
                };
                let together = multiply(19, 3);
                // Inputs are rounded to 16 bits of their row's largest: half a unit of each is off at most, mostly less.
                for (row, (found, wanted)) in together
                    .chunks(num_out)
                    .zip(wanted.chunks(num_out))
                    .enumerate()
                {
                    let x = &x[row * num_in..][..num_in];
                    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    for (column, (found, wanted)) in found.iter().zip(wanted).enumerate() {
                        let weights = &values[column * num_in..][..num_in];
                        let size: f64 = weights.iter().map(|w| f64::from(w.abs())).sum();
                        let error = (f64::from(*found) - wanted).abs();
                        let limit = size * f64::from(largest) / 65_000.0 + wanted.abs() * 1e-5;
                        assert!(error <= limit, "{} {found} for {wanted}", isa.name());
                    }
                }
                for count in (1..=9).chain([16, 17]) {
                    let some = multiply(count, 1);
                    assert_eq!(some, together[..count * num_out], "{} {count}", isa.name());
                }
            }
        }
    }
}

#[test]
fn fours_of_bytes_give_the_bits_of_pairs() {
    for (isa, like) in [(Isa::AvxVnni, Isa::Avx2), (Isa::Avx512Vnni, Isa::Avx512)] {
        if !isa.is_here() {
            println!("skipped: this CPU has no {}", isa.name());
            continue;
        }
        let mut numbers = Numbers::new(15);
        let (num_in, num_out) = (96, 50);
        let x = numbers.take(13 * num_in);
        for format in [Format::Q8_0, Format::Q4_0, Format::Q4_1] {
            let (bytes, _) = blocks(format, num_out, num_in, &mut numbers);
            for count in [1, 2, 13] {
                let multiply = |isa| {
                    let packed = Matrix::pack_blocks(isa, format, &bytes, num_in, None);
                    product_with(isa, packed, &x[..count * num_in], num_in, 1)
                };
                assert_eq!(multiply(isa), multiply(like), "{format:?} {count}");
            }
        }
    }
}

#[test]
fn rows_of_any_number_have_the_bits_of_each_alone() {
    let mut numbers = Numbers::new(13);
    // The second has so many inputs that several tiles go through parts of them.
    for (num_in, num_out) in [(70, 50), (601, 50)] {
        let (x, weight) = (numbers.take(67 * num_in), numbers.take(num_out * num_in));
        for isa in isas() {
            for format in [Format::F32, Format::Bf16, Format::Int8] {
                let alone: Vec<f32> = x
                    .chunks(num_in)
                    .flat_map(|row| product(isa, format, row, &weight, num_in, None, 1))
                    .collect();
                for count in [2, 5, 10, 11, 13, 16, 17, 31, 64, 67] {
                    let some = product(isa, format, &x[..count * num_in], &weight, num_in, None, 2);
                    let name = isa.name();
                    assert_eq!(some, alone[..count * num_out], "{name} {format:?} {count}");
                }
            }
        }
    }
}

#[test]
fn more_rows_than_are_multiplied_at_once_are_right() {
    let (num_rows, num_in, num_out) = (1030, 32, 30);
    let mut numbers = Numbers::new(14);
    let (x, weight) = (
        numbers.take(num_rows * num_in),
        numbers.take(num_out * num_in),
    );
    let wanted = reference(Format::F32, &x, &weight, num_in, None);
    for isa in isas() {
        let found = product(isa, Format::F32, &x, &weight, num_in, None, 3);
        assert_close(&found, &wanted, 1e-5, isa.name());
    }
}

#[test]
fn eight_bit_products_are_the_same_on_every_path_and_beside_any_rows_and_near_the_exact_ones() {
    let mut numbers = Numbers::new(10);
    for (num_in, num_out) in [(1, 5), (31, 20), (576, 130), (1536, 48)] {
        let mut x = numbers.take(13 * num_in);
        x[..num_in].iter_mut().for_each(|x| *x *= 1000.0); // a row's scale is its own
        let (weight, bias) = (numbers.take(num_out * num_in), numbers.take(num_out));
        let exact = reference(Format::F32, &x, &weight, num_in, Some(&bias));
        let portable = product(
            Isa::Portable,
            Format::Int8,
            &x,
            &weight,
            num_in,
            Some(&bias),
            1,
        );
        for (row, (found, wanted)) in portable
            .chunks(num_out)
            .zip(exact.chunks(num_out))
            .enumerate()
        {
            let unit = if row == 0 { 1000.0 } else { 1.0 };
            for (found, wanted) in found.iter().zip(wanted) {
                let error = (f64::from(*found) - wanted).abs();
                assert!(
                    error < unit * 0.006 * (num_in as f64).sqrt(),
                    "{found} for {wanted}"
                );
            }
        }
        for isa in isas() {
            let together = product(isa, Format::Int8, &x, &weight, num_in, Some(&bias), 3);
            assert_eq!(together, portable, "{}", isa.name());
            for count in 1..=7 {
                let some = &x[..count * num_in];
                let alone = product(isa, Format::Int8, some, &weight, num_in, Some(&bias), 1);
                assert_eq!(alone, together[..count * num_out], "{}", isa.name());
            }
        }
    }
}

#[test]
fn the_largest_whole_numbers_have_the_same_sums_on_every_path() {
    // Each number is rounded to the largest, of either sign; weights, too: sums reach what fits in 32 bits.
    for num_in in [32, 576, 1536] {
        let weight: Vec<f32> = (0..6 * num_in)
            .map(|i| if i / num_in % 2 == 0 { 1.0 } else { -1.0 })
            .collect();
        let x: Vec<f32> = (0..5 * num_in)
            .map(|i| if i / num_in % 2 == 0 { 1.0 } else { -1.0 })
            .collect();
        for isa in isas() {
            let found = product(isa, Format::Int8, &x, &weight, num_in, None, 1);
            for (place, found) in found.iter().enumerate() {
                let sign = if (place / 6 + place % 6).is_multiple_of(2) {
                    1.0
                } else {
                    -1.0
                };
                let wanted = sign * num_in as f32;
                let (close, name) = (wanted.abs() * 1e-6, isa.name());
                assert!(
                    (found - wanted).abs() <= close,
                    "{name} {num_in} {place}: {found}"
                );
            }
        }
    }
}

#[test]
fn a_row_too_small_to_be_scaled_is_nothing_on_every_path() {
    let weight = Numbers::new(17).take(20 * 33);
    let mut x = vec![1e-36; 33];
    x[7] = 0.0;
    for isa in isas() {
        let found = product(isa, Format::Int8, &x, &weight, 33, None, 1);
        assert!(found.iter().all(|y| y.abs() < 1e-34), "{}", isa.name());
    }
}

#[test]
fn a_number_that_is_not_finite_is_seen_in_an_8_bit_product_and_in_its_row_alone() {
    let weight = Numbers::new(11).take(20 * 33);
    for isa in isas() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = Numbers::new(12).take(3 * 33);
            x[33 + 7] = bad;
            let found = product(isa, Format::Int8, &x, &weight, 33, None, 1);
            let is_nan: Vec<bool> = found
                .chunks(20)
                .map(|row| row.iter().all(|y| y.is_nan()))
                .collect();
            assert_eq!(is_nan, [false, true, false]);
        }
    }
}
