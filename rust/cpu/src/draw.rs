//! A draw by inverse transform over a row of weights: `noria.sampling.draw`, to the bit, for rows on the host.
//!
//! There it is dozens of small tensor operations, which on a CPU cost more than what they compute.

/// Places whose weights are summed for [`draw`]; the chunk is found first, then the place inside it.
pub const DRAW_CHUNK: usize = 256;
/// Units to a weight of 1.
const SCALE: f64 = (1_u64 << 42) as f64;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const SEED_TWEAK: u64 = 0xD1B5_4A32_D192_ED03;
const ATTEMPT_TWEAK: u64 = 0xA076_1D64_78BD_642F;

/// The finaliser of splitmix64, Stafford's variant 13.
fn mix64(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// A number in [0, 1) that is a function of these three alone.
#[must_use]
pub fn noise(seed: i64, position: i64, attempt: u64) -> f64 {
    let mut key = mix64(seed.cast_unsigned() ^ SEED_TWEAK);
    if attempt > 0 {
        key = mix64(key.wrapping_add(attempt.wrapping_mul(ATTEMPT_TWEAK)));
    }
    let place = position.cast_unsigned().wrapping_add(1);
    let bits = mix64(key.wrapping_add(place.wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// A place of the row, with a probability in proportion to its weight.
///
/// Where the masses mean nothing, so does the place, but it is one of the row's.
///
/// # Arguments
/// * `weights` - from 0 to 1, one at least.
/// * `masses` - of each chunk of them, in units of 2^-42, without those that do not count.
/// * `noise` - in [0, 1).
/// * `floor` - weights that are not above it do not count.
#[must_use]
pub fn draw(weights: &[f32], masses: &[i64], noise: f64, floor: f32) -> usize {
    let total = masses
        .iter()
        .fold(0, |sum: i64, &mass| sum.wrapping_add(mass));
    // The noise is below 1, but the product may round up to the total.
    let target = ((noise * total as f64) as i64).min(total.saturating_sub(1));
    let (chunk, before) = place_of(masses.iter().copied(), target);
    let mass = masses[chunk];

    let first = chunk * DRAW_CHUNK;
    let members = &weights[first..weights.len().min(first + DRAW_CHUNK)];
    let counted = |weight: f32| {
        if weight > floor {
            f64::from(weight)
        } else {
            0.0
        }
    };
    // A chunk may hold little of its row, so its own largest weight is the unit inside it.
    let largest = members
        .iter()
        .fold(0.0, |largest: f64, &weight| largest.max(counted(weight)));
    let units = members
        .iter()
        .map(|&weight| (counted(weight) / largest * SCALE).round_ties_even() as i64);
    let total: i64 = units.clone().sum();
    let inside = target.wrapping_sub(before);
    let target = ((inside as f64 + 0.5) / mass as f64 * total as f64) as i64;
    first + place_of(units, target.min(total - 1)).0
}

/// The first place up to which, it included, lies more than `target`, else the last one; and what lies before it.
fn place_of(masses: impl ExactSizeIterator<Item = i64>, target: i64) -> (usize, i64) {
    let last = masses.len() - 1;
    let mut before: i64 = 0;
    for (place, mass) in masses.enumerate() {
        let upto = before.wrapping_add(mass);
        if upto > target || place == last {
            return (place, before);
        }
        before = upto;
    }
    unreachable!("a row has a place")
}
