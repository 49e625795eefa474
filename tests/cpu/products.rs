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
    let num_rows = x.len() / num_in;
    let mut builder = Builder::new(isa).unwrap();
    let table = builder.table(x.to_vec(), num_in);
    let matrix = builder.matrix(Matrix::pack(isa, format, weight, num_in, bias));
    let embedded = builder.embed(table);
    let result = builder.logits(embedded, matrix);
    let mut program = builder.build(result, num_workers).unwrap();
    let mut out = vec![f32::NAN; num_rows * weight.len() / num_in];
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
    let (num_in, num_out) = (200, 130);
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
        "NORIA_CPU_ISA is \"sse\", but must be portable, avx2 or avx512."
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
