//! The example `elastic` for long: its workers are killed or frozen every two seconds, and others join.

use std::time::Duration;

use distribute_testkit::Job;

use super::Flags;
use crate::bench::spread;
use crate::error::text;

/// Seconds of silence after which a worker counts as lost.
const HEARTBEAT: f64 = 1.0;

pub(super) fn run(flags: &Flags, programs: &std::path::Path, seed: u64, time: Duration) -> Result<(), String> {
    let seconds = time.as_secs_f64().to_string();
    let job = Job::builder(programs.join("elastic"));
    let job = job.args(["--workers", "4", "--every", "2", "--verify", "--seconds", &seconds]);
    let job = job.args(["--seed", &seed.to_string(), "--heartbeat", &HEARTBEAT.to_string()]);
    let job = if flags.freeze { job.arg("--freeze") } else { job };
    println!(
        "four workers for {seconds} s, one {} every 2 s, seed {seed}",
        if flags.freeze { "killed or frozen" } else { "killed" }
    );
    // The training is made once more without faults, by processes that start for each change of the members.
    let limit = time * 4 + Duration::from_secs(300);
    let outcome = job.start().map_err(text)?.wait(0, limit).map_err(text)?;
    let told = &outcome.stdout;
    told.lines().filter(|line| !line.contains(" in generation ")).for_each(|line| println!("{line}"));
    if !outcome.success() {
        return Err(format!("the example failed: {}", outcome.stderr.trim()));
    }
    for needed in ["each with all of its examples", "equal bit for bit"] {
        if !told.contains(needed) {
            return Err(format!("the example does not say {needed:?}"));
        }
    }
    let faults: Vec<(&str, Option<u64>)> = told.lines().filter_map(recovery).collect();
    let slack = flags.slack();
    let mut broken = Vec::new();
    for (what, promised) in [("killed", 250), ("frozen", 250 + (HEARTBEAT * 1000.0) as u64)] {
        let of_kind: Vec<f64> =
            faults.iter().filter(|(of, _)| *of == what).filter_map(|(_, took)| took.map(|took| took as f64)).collect();
        if of_kind.is_empty() {
            continue;
        }
        let words = percentiles(of_kind.clone());
        println!("{what}: {} faults, next step after {words} ms; promised: {promised} ms in the middle", of_kind.len());
        if spread::spread(of_kind).0 > (promised * slack) as f64 {
            broken.push(format!("after a worker was {what} the next step took longer than promised"));
        }
    }
    let unanswered = faults.iter().rev().skip(1).filter(|(_, took)| took.is_none()).count();
    if unanswered > 0 {
        // The last one may find the training at its end.
        broken.push(format!("{unanswered} faults were followed by no step"));
    }
    if let Some(middle) = told.lines().find_map(joined) {
        if middle > 2000 * slack {
            broken.push(format!("workers joined after {middle} ms in the middle, promised: 2000 ms"));
        }
    } else {
        broken.push("no worker has joined".to_owned());
    }
    if broken.is_empty() { Ok(()) } else { Err(broken.join("; ")) }
}

/// Reads a line such as `killed in generation 3 after step 7: the next step 31 ms later`.
fn recovery(line: &str) -> Option<(&str, Option<u64>)> {
    let (what, rest) = line.split_once(" in generation ")?;
    let took = rest.strip_suffix(" ms later").and_then(|rest| rest.rsplit(' ').next()?.parse().ok());
    Some((what, took))
}

/// Reads the middle one of the times at which workers joined.
fn joined(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once(" joined: first step after ")?;
    rest.split_once(" at least, ")?.1.split(' ').next()?.parse().ok()
}

fn percentiles(mut times: Vec<f64>) -> String {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    format!(
        "{:.0} (10 %), {:.0} (50 %), {:.0} (90 %), {:.0} (99 %), {:.0} (most)",
        at(0.1),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_example_prints_is_read() {
        let line = "killed in generation 3 after step 71: the next step 31 ms later";
        assert_eq!(recovery(line), Some(("killed", Some(31))));
        assert_eq!(recovery("frozen in generation 3 after step 7: the next step never later"), Some(("frozen", None)));
        assert_eq!(recovery("13 faults: next step after 26 ms at least"), None);
        let line = "12 joined: first step after 300 ms at least, 412 ms in the middle, 900 ms at most";
        assert_eq!(joined(line), Some(412));
        assert_eq!(percentiles(vec![3.0, 1.0, 2.0]), "1 (10 %), 2 (50 %), 3 (90 %), 3 (99 %), 3 (most)");
    }
}
