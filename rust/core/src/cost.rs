//! What a step takes: a fixed time, a time a token, and a time for each key that a query attends to, fitted by least
//! squares to the device times of committed steps. None is ever negative; old steps fade. All of it is integer arithmetic
//! and comes from commits alone, so that a replay agrees on every machine.
//!
//! Before the second fact about a step is known, all of its time is put down to its tokens: a step is rather too short.
//! Costs: O(1) a commit and a question.

/// Steps, when sums are halved.
const WINDOW: u32 = 512;
/// Rounds over the coefficients a step; each goes on where the last one stopped.
const NUM_ROUNDS: usize = 4;
/// Parts of a microsecond in which coefficients are held, as a power of two.
const FRACTION: u32 = 20;
/// Attended keys are counted by so many.
const KEYS: u64 = 64;

/// In the order in which they are fitted: tokens, attended keys, the step itself.
const NUM_TERMS: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct CostModel {
    /// Sums of products of terms.
    products: [[i128; NUM_TERMS]; NUM_TERMS],
    /// Sums of products of a term and the time.
    times: [i128; NUM_TERMS],
    num_seen: u32,
    coefficients: [i128; NUM_TERMS],
}

/// A step's size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Size {
    pub(crate) num_tokens: u64,
    /// Keys that its queries attend to, in all.
    pub(crate) num_attended: u64,
}

impl Size {
    /// Of a row.
    pub(crate) fn of(count: u32, end: u32) -> Self {
        Self {
            num_tokens: count.into(),
            num_attended: u64::from(count) * u64::from(end),
        }
    }
}

impl CostModel {
    /// A step of this size took `device_us`; 0 is no time that it can have taken.
    #[cold] // off the path of a commit that learns nothing
    pub(crate) fn learn(&mut self, size: Size, device_us: u64) {
        if device_us == 0 {
            return;
        }
        if self.num_seen >= WINDOW {
            self.num_seen /= 2;
            for sum in self.products.iter_mut().flatten().chain(&mut self.times) {
                *sum /= 2;
            }
        }
        self.num_seen += 1;
        let time = i128::from(device_us.min(1 << 32));
        let terms = [
            size.num_tokens.min(1 << 31),
            (size.num_attended / KEYS).min(1 << 40),
            1,
        ]
        .map(i128::from);
        for (i, &term) in terms.iter().enumerate() {
            self.times[i] += term * time;
            for (sum, &other) in self.products[i].iter_mut().zip(&terms) {
                *sum += term * other;
            }
        }
        for _ in 0..NUM_ROUNDS {
            for i in 0..NUM_TERMS {
                self.fit(i);
            }
        }
    }

    /// Makes one coefficient the best that it can be beside the others.
    fn fit(&mut self, i: usize) {
        let products = &self.products[i];
        let others: i128 = (0..NUM_TERMS)
            .filter(|&j| j != i)
            .map(|j| products[j] * self.coefficients[j])
            .sum();
        if products[i] > 0 {
            let left = (self.times[i] << FRACTION) - others;
            self.coefficients[i] = (left / products[i]).max(0);
        }
    }

    /// What is left of `target_us` beside a step of this size; `None` before any step was seen.
    pub(crate) fn left_of(&self, target_us: u32, size: Size) -> Option<i128> {
        let fixed = self.coefficients[NUM_TERMS - 1];
        (self.num_seen > 0)
            .then(|| ((i128::from(target_us) << FRACTION) - fixed - self.cost(size)).max(0))
    }

    /// What a row adds.
    pub(crate) fn cost(&self, size: Size) -> i128 {
        let keys = i128::from(size.num_attended) * self.coefficients[1] / i128::from(KEYS);
        i128::from(size.num_tokens) * self.coefficients[0] + keys
    }

    /// The longest row from `start` on, of up to `most` tokens, that adds no more than `left`; none before any step was
    /// seen.
    pub(crate) fn affordable(&self, start: u32, most: u32, left: i128) -> u32 {
        if self.num_seen == 0 {
            return 0;
        }
        let fits = |count: u32| self.cost(Size::of(count, start + count)) <= left;
        if fits(most) {
            return most;
        }
        let (mut low, mut high) = (0, most);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Nanoseconds that a step takes whatever its size, that a token adds, and that 1,024 attended keys add.
    pub(crate) fn figures(&self) -> [u64; 3] {
        let ns = |coefficient: i128, num: i128| ((coefficient * num * 1000) >> FRACTION) as u64;
        let [token, keys, fixed] = self.coefficients;
        [
            ns(fixed, 1),
            ns(token, 1),
            ns(keys, 1024 / i128::from(KEYS)),
        ]
    }
}
