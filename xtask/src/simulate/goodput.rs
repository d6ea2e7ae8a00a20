//! `cargo xtask goodput`: the share of a cluster's chips that train, when chips fail.
//!
//! A chip's failure takes its slice out for a while, and the other slices of its group pause until they have formed the
//! next generation; they pause again when the slice returns. Work counts once it is committed, at the end of a step or
//! by a checkpoint. Several groups that train apart, as in Decoupled DiLoCo (arXiv 2604.21428), do not pause for each
//! other; the time that they need to exchange parameters is left out.

use std::collections::VecDeque;

use clap::Args;
use fastrand::Rng;

#[derive(Args, Clone, Debug)]
pub(crate) struct Flags {
    /// Numbers of chips
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 10_000, 100_000, 300_000, 600_000, 1_200_000])]
    chips: Vec<u64>,
    /// Chips that fail together and are replaced together
    #[arg(long, default_value_t = 64)]
    slice: u64,
    /// Mean time between failures of one chip, in years
    #[arg(long, default_value_t = 1.0)]
    mtbf_years: f64,
    /// Seconds until a failed slice is replaced
    #[arg(long, default_value_t = 600.0)]
    replace: f64,
    /// Seconds that a group pauses when a slice is lost or joins
    #[arg(long, default_value_t = 10.0)]
    pause: f64,
    /// Seconds of a step, whose work is lost when it fails
    #[arg(long, default_value_t = 5.0)]
    step: f64,
    /// Seconds to start the whole job again, for the row without elasticity
    #[arg(long, default_value_t = 300.0)]
    restart: f64,
    /// Seconds between checkpoints, for the row without elasticity
    #[arg(long, default_value_t = 600.0)]
    checkpoint: f64,
    /// Groups that train apart
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32])]
    groups: Vec<u64>,
    /// Simulated hours
    #[arg(long, default_value_t = 24.0)]
    hours: f64,
    /// The seed of the failures
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

const SECONDS_PER_YEAR: f64 = 365.25 * 24.0 * 3600.0;

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    check(flags)?;
    if !flags.json {
        let groups = flags.groups.iter().map(|groups| match groups {
            1 => format!("{:>14}", "elastic"),
            groups => format!("{:>14}", format!("{groups} groups")),
        });
        println!("share of the chips' time that counts, in %, and failures per hour");
        println!("{:>10}{:>12}{:>14}{}", "chips", "failures/h", "restarted", groups.collect::<String>());
    }
    for chips in &flags.chips {
        let seconds = flags.hours * 3600.0;
        let per_second = *chips as f64 / (flags.mtbf_years * SECONDS_PER_YEAR);
        let restarted = Job { slices: 1, replace: 0.0, pause: flags.restart, commit: flags.checkpoint };
        let mut columns = vec![("restarted".to_owned(), restarted.goodput(per_second, seconds, flags.seed))];
        for groups in &flags.groups {
            let slices = (chips / flags.slice / groups).max(1);
            let job = Job { slices, replace: flags.replace, pause: flags.pause, commit: flags.step };
            let of_group =
                |group: u64| job.goodput(per_second / *groups as f64, seconds, flags.seed.wrapping_add(group));
            let mean = (0..*groups).map(of_group).sum::<f64>() / *groups as f64;
            columns.push((format!("{groups} groups"), mean));
        }
        if flags.json {
            for (job, goodput) in columns {
                let row = serde_json::json!({ "simulate": "goodput", "chips": chips, "job": job, "goodput": goodput });
                println!("{row}");
            }
        } else {
            let cells = columns.iter().map(|(_, goodput)| format!("{:>14.1}", goodput * 100.0));
            println!("{chips:>10}{:>12.1}{}", per_second * 3600.0, cells.collect::<String>());
        }
    }
    Ok(())
}

fn check(flags: &Flags) -> Result<(), String> {
    let positive = [
        ("--mtbf-years", flags.mtbf_years),
        ("--step", flags.step),
        ("--checkpoint", flags.checkpoint),
        ("--hours", flags.hours),
    ];
    let durations = [("--replace", flags.replace), ("--pause", flags.pause), ("--restart", flags.restart)];
    if let Some((name, given)) = positive.iter().find(|(_, given)| !(*given > 0.0 && given.is_finite())) {
        return Err(format!("{name} is {given}; give a number above 0"));
    }
    if let Some((name, given)) = durations.iter().find(|(_, given)| !(*given >= 0.0 && given.is_finite())) {
        return Err(format!("{name} is {given}; give a number of seconds, 0 or more"));
    }
    if flags.slice == 0 || flags.chips.contains(&0) || flags.groups.contains(&0) {
        return Err("--chips, --slice and --groups have a 0; give numbers above 0".to_owned());
    }
    // A failure takes about 100 ns to simulate.
    let most = flags.chips.iter().max().copied().unwrap_or(0) as f64;
    if most * flags.hours / (flags.mtbf_years * SECONDS_PER_YEAR / 3600.0) > 1e8 {
        return Err("these are more than 100 million failures; give fewer --chips or --hours".to_owned());
    }
    Ok(())
}

/// A group of slices that train together.
struct Job {
    slices: u64,
    /// Seconds until a failed slice is back; 0 if another one takes its place at once.
    replace: f64,
    /// Seconds without work after a slice was lost, or has returned. A change meanwhile begins the pause anew.
    pause: f64,
    /// Seconds of work after which it is kept.
    commit: f64,
}

impl Job {
    /// Returns the share of the slices' time that was spent on work that is kept, if failures of the whole group arrive
    /// at this rate while all slices are there.
    fn goodput(&self, failures_per_second: f64, seconds: f64, seed: u64) -> f64 {
        let mut random = Rng::with_seed(seed);
        let mut next_failure = exponential(&mut random, failures_per_second);
        let mut returns: VecDeque<f64> = VecDeque::new();
        let (mut works_from, mut kept) = (0.0, 0.0);
        loop {
            let up = self.slices - returns.len() as u64;
            let back = returns.front().copied().unwrap_or(f64::INFINITY);
            let at = next_failure.min(back).min(seconds);
            let fails = at == next_failure;
            if fails {
                next_failure += exponential(&mut random, failures_per_second);
                // Failures arrive as if all slices were there.
                if random.f64() >= up as f64 / self.slices as f64 {
                    continue;
                }
            }
            // A slice that returns waits for the end of a step; one that is lost interrupts it.
            let worked: f64 = (at - works_from).max(0.0);
            kept += up as f64 * if fails { (worked / self.commit).floor() * self.commit } else { worked };
            works_from = at + self.pause;
            if fails && self.replace > 0.0 {
                returns.push_back(at + self.replace);
            } else if at == back {
                returns.pop_front();
            } else if at == seconds {
                break;
            }
        }
        kept / (seconds * self.slices as f64)
    }
}

/// Returns the time until the next event of a Poisson process.
fn exponential(random: &mut Rng, per_second: f64) -> f64 {
    -(1.0 - random.f64()).ln() / per_second
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOURS: f64 = 3600.0 * 2000.0;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 0.01, "{found} is not {expected}");
    }

    #[test]
    fn pauses_alone_leave_what_poisson_processes_leave() {
        // Work at a time counts if no failure came in the pause before it.
        for (rate, pause) in [(1.0 / 60.0, 10.0), (1.0 / 60.0, 60.0), (1.0 / 30.0, 40.0)] {
            let job = Job { slices: 1, replace: 0.0, pause, commit: 1e-3 };
            close(job.goodput(rate, HOURS, 7), (-rate * pause).exp());
        }
    }

    #[test]
    fn work_since_the_last_checkpoint_is_lost() {
        // A segment of `c` seconds takes (e^(rate c) - 1) e^(rate pause) / rate on average.
        for (rate, pause, commit) in [(1.0f64 / 600.0, 100.0, 300.0), (1.0 / 600.0, 300.0, 900.0)] {
            let job = Job { slices: 1, replace: 0.0, pause, commit };
            let expected = commit * rate / (((rate * commit).exp() - 1.0) * (rate * pause).exp());
            close(job.goodput(rate, HOURS, 7), expected);
        }
    }

    #[test]
    fn slices_that_are_replaced_are_missing_meanwhile() {
        // Without pauses: each slice is there for mtbf / (mtbf + replace).
        let (slices, replace) = (100, 600.0);
        let job = Job { slices, replace, pause: 0.0, commit: 1e-3 };
        let mtbf_of_a_slice = 6000.0;
        close(job.goodput(slices as f64 / mtbf_of_a_slice, HOURS / 10.0, 7), 6000.0 / 6600.0);
    }

    #[test]
    fn groups_that_train_apart_lose_less() {
        let job = |slices| Job { slices, replace: 600.0, pause: 30.0, commit: 5.0 };
        let (whole, eighth) =
            (job(800).goodput(1.0 / 26.0, HOURS / 20.0, 3), job(100).goodput(1.0 / 208.0, HOURS / 20.0, 3));
        assert!(whole < 0.15 && eighth > 0.6, "{whole} {eighth}");
        assert_eq!(job(800).goodput(1.0 / 26.0, 36_000.0, 3), job(800).goodput(1.0 / 26.0, 36_000.0, 3));
    }
}
