//! Workers in pid namespaces of their own, as in containers of one host.

use super::stage::{Stage, Task, addresses, start, with_namespaces};
use super::verdict::{Held, Verdict, all_done, as_accurate, text};

const PID: [&str; 3] = ["--pid", "--fork", "--mount-proc"];
const ARGS: [&str; 2] = ["--epochs", "1"];

pub(super) fn alone(stage: &Stage) -> Verdict {
    with_namespaces(&PID, || {
        let expected = stage.undisturbed(&ARGS)?;
        let (tasks, _) = stage.workers(&[&ARGS[..]; 4])?;
        let outcomes = stage.outcomes(tasks.into_iter().map(Task::contained).collect())?;
        all_done(&outcomes)?;
        let accuracy = as_accurate(&outcomes[0].stdout, expected)?;
        Held::yes(format!("4 workers ended with 0, accuracy {accuracy:.2} % (alone {expected:.2} %)"))
    })
}

pub(super) fn ring(stage: &Stage) -> Verdict {
    with_namespaces(&PID, || {
        let expected = stage.undisturbed(&ARGS)?;
        let port = addresses(1)?.remove(0).rsplit(':').next().unwrap_or_default().to_owned();
        let container = |ranks: [u32; 3]| {
            let task = stage.mnist(&ARGS);
            let one = |rank: &u32| format!("RANK={rank} {} & pid{rank}=$!; ", task.command());
            let wait = |rank: &u32| format!("wait $pid{rank}; echo rank {rank} ended with $?; ");
            let script: String = ranks.iter().map(one).chain(ranks.iter().map(wait)).collect();
            let task = task.scripted(&script).contained();
            let env = [("WORLD_SIZE", "6"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
            let task = env.iter().fold(task, |task, (name, value)| task.env(name, *value));
            task.env("DISTRIBUTE_PORT", port.clone()).env("DISTRIBUTE_ALGORITHM", "ring")
        };
        let mut job = start(vec![container([0, 2, 4]), container([1, 3, 5])])?;
        let outcomes = job.wait_all(stage.left()).map_err(text)?;
        for rank in 0..6 {
            let line = format!("rank {rank} ended with 0");
            if !outcomes.iter().any(|outcome| outcome.stdout.contains(&line)) {
                return Err(format!("no {line:?} in what the containers printed: {outcomes:?}"));
            }
        }
        let accuracy = as_accurate(&outcomes[0].stdout, expected)?;
        Held::yes(format!("6 ranks ended with 0, accuracy {accuracy:.2} % (alone {expected:.2} %)"))
    })
}
