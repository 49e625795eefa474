//! What the tests share: seeded numbers, and the instruction sets of this machine.

use noria_cpu::{ISA_VARIABLE, Isa};

/// The instruction sets to test: all that are here, and the others are named; where `NORIA_CPU_ISA` names one, that.
pub(crate) fn isas() -> Vec<Isa> {
    if std::env::var_os(ISA_VARIABLE).is_some() {
        return vec![Isa::chosen().unwrap()];
    }
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_here()) {
        println!("skipped: this CPU has no {}", isa.name());
    }
    Isa::ALL.into_iter().filter(|isa| isa.is_here()).collect()
}

/// Numbers from −1 to 1, by a seed.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Numbers {
        Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.next();
        (self.0 >> 33) as usize % limit
    }

    pub(crate) fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// Rounded to the nearest bfloat16, ties to even.
pub(crate) fn bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

pub(crate) fn assert_close(found: &[f32], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (place, (&found, &wanted)) in found.iter().zip(wanted).enumerate() {
        let error = (f64::from(found) - wanted).abs();
        assert!(
            error <= tolerance * wanted.abs().max(1.0),
            "{what}: {found} for {wanted} at {place}"
        );
    }
}
