//! The most likely token of a row, and draws from weights.

use noria_cpu::{draw, most_likely, noise};
use proptest::prelude::*;

fn plain(logits: &[f32]) -> Option<usize> {
    let mut best = 0;
    for (place, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return None;
        }
        if logit > logits[best] {
            best = place;
        }
    }
    logits
        .get(best)
        .is_some_and(|logit| logit.is_finite())
        .then_some(best)
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -3_i8..3, // ties
        1 => Just(i8::MIN),
    ]
    .prop_map(|number| {
        if number == i8::MIN {
            f32::NEG_INFINITY
        } else {
            f32::from(number)
        }
    })
}

proptest! {
    #[test]
    fn the_first_of_the_largest_is_the_most_likely(
        mut logits in proptest::collection::vec(logit(), 0..1100),
        place in any::<prop::sample::Index>(),
        odd in prop_oneof![Just(None), Just(Some(f32::NAN)), Just(Some(f32::INFINITY)), Just(Some(3.5)), Just(Some(-0.0))],
    ) {
        if let (Some(odd), false) = (odd, logits.is_empty()) {
            let place = place.index(logits.len());
            logits[place] = odd;
        }
        prop_assert_eq!(most_likely(&logits), plain(&logits));
    }

    #[test]
    fn a_draw_is_the_place_that_holds_its_share_of_the_mass(
        weights in proptest::collection::vec(0_u8..4, 1..700),
        seed in any::<i64>(),
        position in 0_i64..1 << 40,
        floor in prop_oneof![Just(f32::NEG_INFINITY), Just(0.25)],
    ) {
        // Multiples of a quarter: all sums are exact.
        let weights: Vec<f32> = weights.iter().map(|&weight| f32::from(weight) / 4.0).collect();
        let counted = |weight: f32| if weight > floor { f64::from(weight) } else { 0.0 };
        let mass = |chunk: &[f32]| chunk.iter().map(|&weight| counted(weight)).sum::<f64>();
        prop_assume!(mass(&weights) > 0.0);
        let unit = (1_u64 << 42) as f64;
        let masses: Vec<i64> = weights.chunks(256).map(|chunk| (mass(chunk) * unit) as i64).collect();
        let noise = noise(seed, position, 0);
        prop_assert!((0.0..1.0).contains(&noise));
        let place = draw(&weights, &masses, noise, floor);
        let before = mass(&weights[..place]);
        let target = noise * mass(&weights);
        prop_assert!(counted(weights[place]) > 0.0);
        prop_assert!(before <= target + 1e-6 && target < before + counted(weights[place]) + 1e-6);
    }
}

#[test]
fn noise_is_a_function_of_seed_position_and_attempt() {
    let mut seen: Vec<u64> = (0..3)
        .flat_map(|seed| (0..3).map(move |position| (seed, position)))
        .flat_map(|(seed, position)| (0..3).map(move |attempt| noise(seed, position, attempt)))
        .map(f64::to_bits)
        .collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 27);
}
