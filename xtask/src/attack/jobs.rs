//! Two jobs that were given the same addresses.

use distribute_testkit::Outcome;

use super::stage::{Stage, Task, start};
use super::verdict::{CONFIGURATION, Held, PERMANENT, Verdict, all_done, as_accurate, ended, error_line, says, text};

/// A worker of job `attack-b` comes while job `attack-a` still waits for its own, and again while that trains.
pub(super) fn two(stage: &Stage) -> Verdict {
    const ARGS: [&str; 2] = ["--epochs", "4"];
    let expected = stage.undisturbed(&ARGS)?;
    let (mut tasks, _) = stage.workers(&[&ARGS[..]; 2])?;
    let stranger = tasks[1].clone().env("DISTRIBUTE_JOB_ID", "attack-b").env("DISTRIBUTE_TIMEOUT", "8");
    let second: Vec<Task> =
        tasks.split_off(1).into_iter().map(|task| task.env("DISTRIBUTE_JOB_ID", "attack-a")).collect();
    let first = tasks.into_iter().map(|task| task.env("DISTRIBUTE_JOB_ID", "attack-a")).collect();
    let mut first = start(first)?;
    first.wait_for_line(0, "waiting for", stage.left()).map_err(text)?;
    let before = refused(stage, &stranger)?;
    let mut second = start(second)?;
    first.wait_for_line(0, "epoch=1/", stage.left()).map_err(text)?;
    let within = refused(stage, &stranger)?;
    let outcomes = [first.wait(0, stage.left()).map_err(text)?, second.wait(0, stage.left()).map_err(text)?];
    all_done(&outcomes)?;
    let accuracy = as_accurate(&outcomes[0].stdout, expected)?;
    Held::yes(format!(
        "refused with {} before and {} within training; job A's accuracy {accuracy:.2} %: {}",
        before.code.unwrap_or_default(),
        within.code.unwrap_or_default(),
        error_line(&before)?
    ))
}

fn refused(stage: &Stage, stranger: &Task) -> Result<Outcome, String> {
    let outcome = stage.outcomes(vec![stranger.clone()])?.remove(0);
    ended("the worker of job attack-b", &outcome, &[PERMANENT, CONFIGURATION])?;
    says(error_line(&outcome)?, &["attack-a", "attack-b"])?;
    Ok(outcome)
}
