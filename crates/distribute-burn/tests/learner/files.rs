//! Checkpoints and logs, which only the chief writes and reads.

use std::path::Path;

use burn::train::metric::LossMetric;
use burn::train::{Learner, SupervisedTraining};
use distribute_burn::learner::DistributedTraining;
use distribute_strategy::Strategy;

use crate::common::*;

/// Trains with a checkpoint for each epoch; `from` is the one to resume from.
pub(crate) fn train(strategy: &Strategy, folder: &Path, epochs: usize, from: Option<usize>) -> Vec<f32> {
    values(&trained(strategy, folder, epochs, from))
}

pub(crate) fn trained(strategy: &Strategy, folder: &Path, epochs: usize, from: Option<usize>) -> Net {
    trained_by(learner(Net::new(true)), strategy, folder, epochs, from)
}

pub(crate) fn trained_by(
    learner: Learner<Net>,
    strategy: &Strategy,
    folder: &Path,
    epochs: usize,
    from: Option<usize>,
) -> Net {
    let mut training = SupervisedTraining::new(folder, loader(rows(64), 8), loader(rows(20), 20))
        .metrics((LossMetric::new(),))
        .with_default_checkpointers()
        .num_epochs(epochs);
    if let Some(from) = from {
        training = training.checkpoint(from);
    }
    let result = training.distributed(strategy).launch(learner);
    assert_eq!(error_of(&result), "no error");
    result.model
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Two epochs, and two more from the checkpoint, are four, bit for bit: parameters, running statistics, the states of
/// the optimizer and of the scheduler. Only the chief has the files.
#[test]
fn workers_resume_from_the_files_of_the_chief() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, rank: u32| folder.path().join(format!("{name}-{rank}"));
    let whole = on_workers(2, 1, |strategy, rank| train(&strategy, &of("whole", rank), 4, None));
    on_workers(2, 1, |strategy, rank| train(&strategy, &of("parts", rank), 2, None));
    let parts = on_workers(2, 1, |strategy, rank| train(&strategy, &of("parts", rank), 4, Some(2)));
    assert_eq!(whole[0], whole[1]);
    assert_eq!(parts[0], whole[0]);
    assert_eq!(parts[1], whole[0]);
    let chief = of("parts", 0);
    assert!(names(&chief).contains(&"train".to_owned()) && names(&chief).contains(&"valid".to_owned()));
    assert!(names(&chief.join("checkpoint")).contains(&"model-4.bpk".to_owned()));
    // burn makes the folder of its checkpoints when it is told of them.
    assert_eq!(names(&of("parts", 1)), ["checkpoint"]);
    assert!(names(&of("parts", 1).join("checkpoint")).is_empty());
}
