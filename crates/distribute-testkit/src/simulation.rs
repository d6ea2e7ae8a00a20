//! Scenarios that follow from seeds, for deterministic simulations.
//!
//! A simulation draws a [`Scenario`] from each seed and runs it. [`run_seeds`] reports the first one in which something
//! is wrong, with the fewest faults that show it, and [`find_planted`] shows that it finds a defect. Set
//! `DISTRIBUTE_TEST_SEED` to `7` to replay a seed, or to `0..100000` to run many.

use std::fmt::Debug;
use std::ops::Range;

/// The course of a simulation, including its faults.
pub trait Scenario: Clone + Debug {
    /// Draws the scenario of a seed, the same on every machine.
    fn draw(seed: u64) -> Self;

    /// Returns scenarios that lack one of this one's faults or actions.
    fn shorter(&self) -> impl Iterator<Item = Self> + '_;
}

/// Returns the lists that lack one element of `all`, for [`Scenario::shorter`].
pub fn without_each<T: Clone>(all: &[T]) -> impl Iterator<Item = Vec<T>> + '_ {
    (0..all.len()).map(|place| [&all[..place], &all[place + 1..]].concat())
}

/// Returns the seeds that `DISTRIBUTE_TEST_SEED` names, one as `7` or several as `0..100`; otherwise `0..count`.
///
/// # Panics
/// If it names something else.
pub fn seeds_or(count: u64) -> Range<u64> {
    match std::env::var("DISTRIBUTE_TEST_SEED").ok().filter(|given| !given.is_empty()) {
        None => 0..count,
        Some(given) => seeds(&given),
    }
}

fn seeds(given: &str) -> Range<u64> {
    let number =
        |text: &str| text.trim().parse::<u64>().expect("DISTRIBUTE_TEST_SEED is a number, or two as in 0..100");
    match given.split_once("..") {
        None => number(given)..number(given) + 1,
        Some((first, end)) => number(first)..number(end),
    }
}

/// Runs the scenarios of seeds; `run` returns an outcome, or what is wrong.
///
/// # Panics
/// If something is wrong in one of them, with the seed and the shortest scenario in which that is so.
pub fn run_seeds<S: Scenario, O>(seeds: Range<u64>, run: impl Fn(&S) -> Result<O, String>) -> Vec<O> {
    let outcome = |seed| {
        let scenario = S::draw(seed);
        run(&scenario).unwrap_or_else(|problem| {
            let (scenario, shortest) = shrink(scenario, problem.clone(), &run);
            panic!("DISTRIBUTE_TEST_SEED={seed}: {problem}\nwith the fewest faults: {shortest}\n{scenario:#?}")
        })
    };
    seeds.map(outcome).collect()
}

/// Leaves out faults and actions as long as something is still wrong.
fn shrink<S: Scenario, O>(mut scenario: S, mut problem: String, run: impl Fn(&S) -> Result<O, String>) -> (S, String) {
    loop {
        let shorter = scenario.shorter().find_map(|fewer| run(&fewer).err().map(|problem| (fewer, problem)));
        match shorter {
            Some(found) => (scenario, problem) = found,
            None => return (scenario, problem),
        }
    }
}

/// Returns one of the seeds `0..within` in which a defect shows that `planted` has and `run` has not, with the first
/// line of what is wrong. Seeds are tried from `from` on, where the defect was found last, and then from 0.
///
/// # Panics
/// If the defect is not found, or something is wrong in that scenario without it.
pub fn find_planted<S: Scenario, O>(
    defect: &impl Debug,
    (from, within): (u64, u64),
    planted: impl Fn(&S) -> Result<O, String>,
    run: impl Fn(&S) -> Result<O, String>,
) -> (u64, String) {
    let found = (from..within)
        .chain(0..from.min(within))
        .find_map(|seed| planted(&S::draw(seed)).err().map(|problem| (seed, problem)));
    let (seed, problem) = found.unwrap_or_else(|| panic!("{defect:?} is not found"));
    if let Err(problem) = run(&S::draw(seed)) {
        panic!("seed {seed} without a defect: {problem}");
    }
    (seed, problem.lines().next().unwrap_or_default().to_owned())
}

/// A generator of random numbers that are the same on every machine.
///
/// # Source
/// SplitMix64: G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators" (2014).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the generator of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from `low` up to `high`, without that.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.number() % (high - low).max(1)
    }

    /// Returns whether something of this probability happens.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.number() % 100 < percent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers, of which a large and an odd one together are wrong.
    #[derive(Clone, Debug, PartialEq)]
    struct Numbers(Vec<u64>);

    impl Scenario for Numbers {
        fn draw(seed: u64) -> Numbers {
            let random = &mut Random::new(seed);
            Numbers((0..8).map(|_| random.between(10, 20)).collect())
        }

        fn shorter(&self) -> impl Iterator<Item = Numbers> + '_ {
            without_each(&self.0).map(Numbers)
        }
    }

    fn run(Numbers(all): &Numbers) -> Result<u64, String> {
        match (all.iter().find(|number| **number > 17), all.iter().find(|number| *number % 2 == 1)) {
            (Some(large), Some(odd)) => Err(format!("{large} and {odd}\nsecond line")),
            _ => Ok(all.iter().sum()),
        }
    }

    #[test]
    fn the_shortest_scenario_still_shows_what_is_wrong() {
        let scenario = Numbers(vec![18, 10, 12, 11, 13]);
        let problem = run(&scenario).unwrap_err();
        let (shortest, problem) = shrink(scenario, problem, run);
        assert_eq!((shortest, problem.as_str()), (Numbers(vec![18, 13]), "18 and 13\nsecond line"));
        assert_eq!(run_seeds::<Numbers, _>(0..3, |_| Ok::<_, String>(7)), [7; 3]);
    }

    #[test]
    #[should_panic(expected = "DISTRIBUTE_TEST_SEED=")]
    fn a_seed_in_which_something_is_wrong_is_named() {
        run_seeds::<Numbers, _>(0..100, run);
    }

    #[test]
    fn a_planted_defect_is_found_where_nothing_is_wrong_without_it() {
        let (seed, problem) = find_planted::<Numbers, _>(&"defect", (90, 100), run, |_| Ok(0));
        assert_eq!(problem, run(&Numbers::draw(seed)).unwrap_err().lines().next().unwrap());
        let unfound = std::panic::catch_unwind(|| find_planted::<Numbers, _>(&"defect", (0, 9), |_| Ok(0), |_| Ok(0)));
        let always = std::panic::catch_unwind(|| find_planted::<Numbers, _>(&"defect", (90, 100), run, run));
        assert!(unfound.is_err() && always.is_err());
    }

    #[test]
    fn seeds_are_one_number_or_two() {
        assert_eq!((seeds("7"), seeds("0..100")), (7..8, 0..100));
        assert_eq!(Random::new(0).number(), 0xe220_a839_7b1d_cdaf);
    }
}
