//! Random numbers that follow from a seed on every machine.

/// A generator of random numbers.
///
/// # Source
/// SplitMix64: G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators" (2014).
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from `low` up to `high`, without that.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low).max(1)
    }

    /// Returns whether something of this probability happens.
    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

/// Returns the seeds that `DISTRIBUTE_TEST_SEED` names, one as `7` or several as `0..100`; otherwise `0..count`.
pub(crate) fn seeds_or(count: u64) -> std::ops::Range<u64> {
    let given = crate::environment::read(|variable| Ok(variable("DISTRIBUTE_TEST_SEED"))).unwrap_or_default();
    let number =
        |text: &str| text.trim().parse::<u64>().expect("DISTRIBUTE_TEST_SEED is a number, or two as in 0..100");
    match given.as_deref().map(|given| given.split_once("..").unwrap_or((given, ""))) {
        None => 0..count,
        Some((one, "")) => number(one)..number(one) + 1,
        Some((first, end)) => number(first)..number(end),
    }
}
