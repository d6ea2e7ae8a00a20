//! The division of data between replicas and workers, and its resumption after a restart.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::PathBuf;

use distribute_input::read::{Lines, ReadOptions};
use distribute_input::{
    Array, AutoShardPolicy, Dataset, InputOptions, Topology, WorkerDataset, WorkerIterator, distribute_dataset,
};

mod distribution;
mod positions;

type Rows = Vec<i64>;

fn with(auto_shard_policy: AutoShardPolicy) -> InputOptions {
    InputOptions::default().auto_shard_policy(auto_shard_policy)
}

fn worker(data: &Dataset<Array<i64>>, at: (usize, usize, usize), options: InputOptions) -> WorkerDataset<Array<i64>> {
    distribute_dataset(data, Topology::new(at.0, at.1, at.2).unwrap(), options).unwrap()
}

/// Returns the rest of a pass, indexed by step and replica.
fn steps(pass: WorkerIterator<Array<i64>>) -> Vec<Vec<Rows>> {
    pass.map(|step| step.unwrap().iter().map(|part| part.as_slice().to_vec()).collect()).collect()
}

/// Returns the steps of each of `count` workers.
fn workers(data: &Dataset<Array<i64>>, count: usize, replicas: usize, options: InputOptions) -> Vec<Vec<Vec<Rows>>> {
    (0..count).map(|index| steps(worker(data, (count, index, replicas), options).iter())).collect()
}

fn flat(steps: &[Vec<Rows>]) -> Vec<Rows> {
    steps.iter().flatten().cloned().collect()
}

/// Writes one file of lines for each of `lengths`, with that number of integers.
fn files(folder: &std::path::Path, lengths: &[usize]) -> (Vec<PathBuf>, Rows) {
    let (mut paths, mut next) = (Vec::new(), 0);
    for (index, length) in lengths.iter().enumerate() {
        let path = folder.join(format!("{index}.txt"));
        let lines: String = (next..next + length).map(|number| format!("{number}\n")).collect();
        std::fs::write(&path, lines).unwrap();
        next += length;
        paths.push(path);
    }
    (paths, (0..next as i64).collect())
}

fn numbers(paths: &[PathBuf], cycle: usize) -> Dataset<Array<i64>> {
    let options = ReadOptions::default().cycle(cycle);
    Dataset::from_files(paths).read(Lines, options).map(|line| Ok(Array::scalar(line.parse::<i64>()?)))
}

fn plain() -> InputOptions {
    InputOptions::default()
}
