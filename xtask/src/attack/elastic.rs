//! Workers of an elastic job that are killed and frozen while the others train.

use super::stage::Stage;
use super::verdict::{Held, Verdict, all_done};

pub(super) fn killed(stage: &Stage) -> Verdict {
    disturbed(stage, &[], "killed", 250)
}

/// The heartbeat timeout is 1 s.
pub(super) fn frozen(stage: &Stage) -> Verdict {
    disturbed(stage, &["--freeze"], "frozen", 1250)
}

/// Runs the example that disturbs its own workers, and trains once more without faults; then all bits must be equal.
fn disturbed(stage: &Stage, more: &[&str], what: &str, at_most_ms: u64) -> Verdict {
    let seed = ((stage.random() * 1e6) as u64).to_string();
    let args = [&["--seconds", "16", "--every", "2", "--verify", "--seed", &seed], more].concat();
    let outcomes = stage.outcomes(vec![stage.elastic(&args)])?;
    all_done(&outcomes)?;
    let told = &outcomes[0].stdout;
    if !told.contains("each with all of its examples") || !told.contains("equal bit for bit") {
        return Err(format!("the example does not say that nothing was lost: {told}"));
    }
    let faults = told.lines().filter(|line| line.starts_with(what));
    let times = faults.filter_map(|line| line.strip_suffix(" ms later")?.rsplit(' ').next()?.parse::<u64>().ok());
    let mut times: Vec<u64> = times.collect();
    times.sort_unstable();
    let (Some(middle), Some(most)) = (times.get(times.len() / 2), times.last()) else {
        return Err(format!("no worker was {what}: {told}"));
    };
    let words = format!(
        "{} workers {what}, no step and no example lost, weights as without faults; the next step after {middle} ms in \
         the middle, {most} ms at most",
        times.len()
    );
    if *middle <= at_most_ms {
        Held::yes(words)
    } else {
        Err(format!("{words}; expected {at_most_ms} ms in the middle"))
    }
}
