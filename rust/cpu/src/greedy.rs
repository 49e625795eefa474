//! The most likely token of a row of logits.

/// Logits that are looked through at once for the largest, and again only if it is among them.
const CHUNK: usize = 256;
/// Running maxima beside one another: the compiler makes vectors of them.
const LANES: usize = 32;

/// The place of the largest logit, the first of equals; None where it means nothing, being NaN or infinite.
///
/// A NaN anywhere in the row counts as its largest.
#[must_use]
pub fn most_likely(logits: &[f32]) -> Option<usize> {
    let mut largest = f32::NEG_INFINITY;
    let mut place = 0;
    for (index, chunk) in logits.chunks(CHUNK).enumerate() {
        let in_chunk = maximum(chunk)?;
        if in_chunk > largest {
            largest = in_chunk;
            place = index * CHUNK;
        }
    }
    let inside = logits[place..].iter().position(|&logit| logit >= largest);
    inside
        .filter(|_| largest.is_finite())
        .map(|inside| place + inside)
}

/// None if a NaN is among them.
fn maximum(logits: &[f32]) -> Option<f32> {
    let mut maxima = [f32::NEG_INFINITY; LANES];
    let mut nans = [0_u32; LANES];
    let (whole, rest) = logits.as_chunks::<LANES>();
    for part in whole {
        for lane in 0..LANES {
            maxima[lane] = if part[lane] > maxima[lane] {
                part[lane]
            } else {
                maxima[lane]
            };
            nans[lane] |= u32::from(part[lane].is_nan());
        }
    }
    let has_nan = nans.iter().any(|&nan| nan != 0) || rest.iter().any(|logit| logit.is_nan());
    let numbers = maxima.iter().chain(rest);
    (!has_nan).then(|| numbers.copied().fold(f32::NEG_INFINITY, f32::max))
}
