//! How K and V are stored, said a second time, in other words than noria-cpu's; and numbers at the edges.

use noria_cpu::KvFormat;

use crate::support::bf16;

pub(crate) const FORMATS: [KvFormat; 4] =
    [KvFormat::F32, KvFormat::Bf16, KvFormat::F16, KvFormat::Int8];

/// The nearest float16, ties to even.
fn f16(x: f32) -> f64 {
    let x = f64::from(x);
    let exponent = (x.abs().log2().floor()).clamp(-14.0, 16.0);
    let unit = (exponent - 10.0).exp2();
    let rounded = (x / unit).round_ties_even() * unit;
    if rounded.abs() > 65504.0 {
        f64::INFINITY.copysign(x)
    } else {
        rounded
    }
}

fn f16_bits(x: f32) -> u16 {
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = f16(x).abs();
    let bits = if x.is_nan() {
        0x7e00
    } else if magnitude.is_infinite() {
        0x7c00
    } else if magnitude < 2f64.powi(-14) {
        (magnitude * 2f64.powi(24)) as u16
    } else {
        let exponent = magnitude.log2().floor();
        let fraction = (magnitude / exponent.exp2() - 1.0) * 1024.0;
        ((exponent as i32 + 15) as u16) << 10 | fraction as u16
    };
    sign | bits
}

/// A head's scale and whole numbers.
fn whole(head: &[f32]) -> (f32, Vec<i8>) {
    if head.iter().any(|x| !x.is_finite()) {
        return (f32::NAN, vec![0; head.len()]);
    }
    let largest = head.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let scale = (largest * (1.0 / 127.0)).max(f32::MIN_POSITIVE);
    let numbers = head.iter().map(|x| (x * (1.0 / scale)).round_ties_even());
    (scale, numbers.map(|x| x as i8).collect())
}

/// A head's bytes in the cache.
pub(crate) fn packed(format: KvFormat, head: &[f32]) -> Vec<u8> {
    match format {
        KvFormat::F32 => head.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        KvFormat::Bf16 => head
            .iter()
            .flat_map(|&x| ((bf16(x).to_bits() >> 16) as u16).to_ne_bytes())
            .collect(),
        KvFormat::F16 => head
            .iter()
            .flat_map(|&x| f16_bits(x).to_ne_bytes())
            .collect(),
        KvFormat::Int8 => {
            let (scale, numbers) = whole(head);
            let numbers = numbers.into_iter().map(|x| x as u8);
            scale.to_ne_bytes().into_iter().chain(numbers).collect()
        }
    }
}

/// A head's numbers, as they are read again.
pub(crate) fn rounded(format: KvFormat, head: &[f32]) -> Vec<f64> {
    match format {
        KvFormat::F32 => head.iter().map(|&x| x.into()).collect(),
        KvFormat::Bf16 => head.iter().map(|&x| bf16(x).into()).collect(),
        KvFormat::F16 => head.iter().map(|&x| f16(x)).collect(),
        KvFormat::Int8 => {
            let (scale, numbers) = whole(head);
            let scale = f64::from(scale);
            numbers.iter().map(|&x| f64::from(x) * scale).collect()
        }
    }
}

#[test]
fn a_heads_bytes_tell_how_many_numbers_it_has() {
    for format in FORMATS {
        for head_dim in [2, 6, 64] {
            assert_eq!(format.head_dim(format.head_bytes(head_dim)), Some(head_dim));
        }
        assert_eq!(format.head_dim(0), None);
    }
    assert_eq!(KvFormat::Int8.head_bytes(64), 68);
    assert_eq!(KvFormat::Int8.head_dim(3), None);
    assert_eq!(KvFormat::F16.head_dim(7), None);
}
