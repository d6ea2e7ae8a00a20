//! Two workers that were told different things. Training must not continue with settings that differ.

use distribute_testkit::Outcome;

use super::stage::Stage;
use super::verdict::{CONFIGURATION, Held, PERMANENT, Verdict, ended, error_line, says};

const ARGS: [&str; 2] = ["--epochs", "1"];

pub(super) fn algorithm(stage: &Stage) -> Verdict {
    option(stage, "DISTRIBUTE_ALGORITHM", ["ring", "tree"], "algorithm")
}

pub(super) fn link(stage: &Stage) -> Verdict {
    option(stage, "DISTRIBUTE_LINK", ["30,1.2", "2,9"], "link")
}

pub(super) fn transport(stage: &Stage) -> Verdict {
    option(stage, "DISTRIBUTE_TRANSPORT", ["tcp", "grpc"], "transport")
}

/// Both end as wrong configurations do, and say what the one and the other was given.
fn option(stage: &Stage, variable: &str, values: [&str; 2], name: &str) -> Verdict {
    let (tasks, _) = stage.workers(&[&ARGS[..]; 2])?;
    let tasks =
        tasks.into_iter().zip(values).map(|(task, value)| task.env(variable, value).env("DISTRIBUTE_TIMEOUT", "8"));
    let outcomes = stage.outcomes(tasks.collect())?;
    for outcome in &outcomes {
        ended(&format!("worker:{}", outcome.rank), outcome, &[CONFIGURATION])?;
        let sentence = error_line(outcome)?;
        says(sentence, &[name, "worker:0", "worker:1"])?;
        let values = both_values(sentence);
        if values.is_none_or(|[one, other]| one == other) {
            return Err(format!("no two values, as in \"A on worker:0, B on worker:1\", in: {sentence}"));
        }
    }
    Held::yes(format!("both ended with 2: {}", error_line(&outcomes[0])?))
}

/// The values in `differs: A on worker:0, B on worker:1`.
fn both_values(sentence: &str) -> Option<[&str; 2]> {
    let (_, rest) = sentence.split_once(": ").and_then(|(_, rest)| rest.split_once(": "))?;
    let (one, rest) = rest.split_once(" on worker:")?;
    let (other, _) = rest.split_once(", ")?.1.split_once(" on worker:")?;
    Some([one, other])
}

pub(super) fn model(stage: &Stage) -> Verdict {
    setting(stage, &["--model", "mlp"], &["--model", "cnn"], "model")
}

pub(super) fn learning_rate(stage: &Stage) -> Verdict {
    setting(stage, &["--learning-rate", "0.001"], &["--learning-rate", "0.003"], "learning rate")
}

pub(super) fn batch(stage: &Stage) -> Verdict {
    setting(stage, &["--batch", "128"], &["--batch", "64"], "batch")
}

pub(super) fn seed(stage: &Stage) -> Verdict {
    setting(stage, &["--seed", "1"], &["--seed", "2"], "seed")
}

pub(super) fn epochs(stage: &Stage) -> Verdict {
    setting(stage, &["--epochs", "1"], &["--epochs", "2"], "epochs")
}

pub(super) fn compress(stage: &Stage) -> Verdict {
    setting(stage, &["--compress", "none"], &["--compress", "f16"], "compress")
}

pub(super) fn zero1(stage: &Stage) -> Verdict {
    setting(stage, &[], &["--zero1"], "zero1")
}

/// Both end in a way that no job manager restarts, and name the field.
fn setting(stage: &Stage, one: &[&'static str], other: &[&'static str], field: &str) -> Verdict {
    let whole = |own: &[&'static str]| if own.contains(&"--epochs") { own.to_vec() } else { [&ARGS, own].concat() };
    let [one, other] = [whole(one), whole(other)];
    let (tasks, _) = stage.workers(&[&one, &other])?;
    let tasks = tasks.into_iter().map(|task| task.env("DISTRIBUTE_TIMEOUT", "8")).collect();
    let outcomes = stage.outcomes(tasks)?;
    outcomes.iter().try_for_each(|outcome| permanent(outcome, field))?;
    if outcomes[0].code != outcomes[1].code {
        return Err(format!("worker:0 ended with {:?} and worker:1 with {:?}", outcomes[0].code, outcomes[1].code));
    }
    Held::yes(format!("both ended with {:?}: {}", outcomes[0].code.unwrap_or_default(), error_line(&outcomes[0])?))
}

fn permanent(outcome: &Outcome, field: &str) -> Result<(), String> {
    ended(&format!("worker:{}", outcome.rank), outcome, &[PERMANENT, CONFIGURATION])?;
    says(error_line(outcome)?, &[field])
}
