//! Tables that are saved and restored piece by piece, by a coordinator that could not hold them.
//!
//! By hand, with a table of 400 MB and as much of momentum:
//! `TEST_TABLE_MIB=400 cargo test -p distribute-parameter-server --test all large_tables -- --nocapture`

use std::ops::Range;
use std::path::Path;

use distribute_cluster::{ClusterResolver, TfConfigResolver};
use distribute_parameter_server::{ClusterCoordinator, FixedShardsPartitioner, ParameterServerStrategy};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_strategy::Strategy;
use distribute_testkit::{Job, Signal};
use distribute_train::checkpoint::{CheckpointManager, Snapshot};
use distribute_types::ErrorClass;
use distribute_values::{HostTensor, Scatter, TensorStorage};

use crate::harness::{Cluster, SOON, program, server, until};

const COLUMNS: usize = 256;
/// The rows of 1 MiB.
const ROWS: usize = (1 << 20) / 4 / COLUMNS;

/// The most memory that a save or a restore may take: some pieces of 4 MiB, and two windows of HTTP/2.
const MOST_MIB: u64 = 60;

fn table_mib() -> usize {
    std::env::var("TEST_TABLE_MIB").map_or(48, |mib| mib.parse().unwrap())
}

/// Creates the table with its momentum, in shards of which each server has one or two.
fn table(strategy: &ParameterServerStrategy, value: fn(usize) -> f32) {
    let rows = |rows: Range<usize>| Ok(rows.flat_map(|row| [value(row); COLUMNS]).collect());
    let table = strategy.variable_by_parts("table", &[table_mib() * ROWS, COLUMNS], rows).unwrap();
    let rule = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
    strategy.optimizer(OptimizerDescription { learning_rate: 0.1, rule }, &[&table]).unwrap();
}

fn of_row(row: usize) -> f32 {
    row as f32 - 100.0
}

fn built(resolver: &impl ClusterResolver, folder: &Path, shards: usize) -> ParameterServerStrategy {
    let options = Cluster::options().restore_servers_from(folder.to_owned());
    let builder = ParameterServerStrategy::builder(resolver).options(options);
    builder.partitioner(FixedShardsPartitioner::new(shards)).build().unwrap()
}

/// Returns the largest memory of this process since `work` began, above that of its beginning, in MiB.
fn growth_mib(work: impl FnOnce()) -> u64 {
    let kib = |field: &str| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap().to_owned();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    // Sets the peak to what is in memory now.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = kib("VmRSS:");
    work();
    kib("VmHWM:").saturating_sub(before) >> 10
}

/// The body of a started process: a coordinator that saves the table, twice, or restores it.
#[test]
#[ignore = "a process that other tests start"]
fn coordinating() {
    let (Ok(config), Ok(folder)) = (std::env::var("TEST_CLUSTER"), std::env::var("TEST_FOLDER")) else { return };
    let (resolver, folder) = (TfConfigResolver::from_json(&config).unwrap(), Path::new(&folder));
    let restores = folder.join("latest").exists();
    let strategy = built(&resolver, folder, if restores { 3 } else { 2 });
    table(&strategy, if restores { |_| 0.0 } else { of_row });
    let (local, mut checkpoints) = (Strategy::default_strategy().unwrap(), CheckpointManager::new(folder));
    if restores {
        let mut restored = None;
        let grown = growth_mib(|| restored = checkpoints.restore::<u64>(&local, &[&strategy]).unwrap());
        println!("restored {:?} with {grown} MiB", restored.unwrap());
        let (table, rows) = (strategy.find("table").unwrap(), table_mib() * ROWS);
        // The ends of shards and of pieces.
        let places = [0, 1, rows / 3, rows / 3 + 1, rows / 2 - 1, rows / 2, 4 * ROWS - 1, 4 * ROWS, rows - 1];
        let found = table.embedding_lookup::<f32>(&places).unwrap().to_elements::<f32>().unwrap();
        let expected: Vec<f32> = places.iter().flat_map(|row| [of_row(*row); COLUMNS]).collect();
        assert!(found == expected);
        println!("as saved");
        return;
    }
    let grown = growth_mib(|| {
        checkpoints.save(&local, 1, &[&strategy], &1u64).unwrap();
        checkpoints.finish().unwrap();
    });
    println!("saved with {grown} MiB");
    let (table, _coordinator) =
        (strategy.find("table").unwrap(), ClusterCoordinator::new(&strategy, program()).unwrap());
    let rows = table_mib() * ROWS;
    let last = || table.embedding_lookup::<f32>(&[rows - 1, rows / 2, rows - 4 * ROWS - 1]);
    table.scatter(Scatter::Update, &[rows - 1], &HostTensor::new(&[1, COLUMNS], vec![0f32; COLUMNS]).unwrap()).unwrap();
    let grown = growth_mib(|| {
        println!("lose the second server");
        until("the server is lost", || last().is_err());
        until("the server is restored", || last().is_ok());
    });
    let expected = [rows - 1, rows / 2, rows - 4 * ROWS - 1].map(|row| [of_row(row); COLUMNS]).concat();
    assert!(last().unwrap().to_elements::<f32>().unwrap() == expected);
    println!("restored a server with {grown} MiB");
    until("the test wants a second one", || folder.join("go").exists());
    checkpoints.save(&local, 2, &[&strategy], &2u64).unwrap();
    checkpoints.finish().unwrap();
    println!("saved again");
}

/// Returns the bytes of the files of a checkpoint that is being written.
fn bytes_under_way(folder: &Path) -> u64 {
    let folders = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = folders.filter(|path| path.to_string_lossy().contains(".tmp-")).filter_map(|path| path.read_dir().ok());
    files.flatten().filter_map(|file| file.ok()?.metadata().ok()).map(|about| about.len()).sum()
}

/// Waits until the first shard of the table is in a checkpoint that is being written.
fn until_half_is_written(folder: &Path) {
    let half = (table_mib() as u64) << 19;
    // The pieces in between are with the writer.
    until("half of the table is written", || bytes_under_way(folder) + (8 << 20) > half);
}

fn mib(line: &str) -> u64 {
    let number = line.split_whitespace().rev().nth(1).unwrap();
    number.parse().unwrap()
}

#[test]
fn a_coordinator_saves_and_restores_more_than_it_holds_and_one_that_is_killed_leaves_the_earlier_checkpoint() {
    let mut cluster = Cluster::start(2, 1);
    let folder = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "cluster": cluster.resolver().spec.to_json(),
        "task": {"type": "chief", "index": 0},
    });
    let start = || {
        let job = Job::of_test("large_tables::coordinating").unwrap().env("TEST_CLUSTER", config.to_string());
        job.env("TEST_FOLDER", folder.path().to_str().unwrap()).start().unwrap()
    };
    let mut first = start();
    let saved = first.wait_for_line(0, "saved with", SOON).unwrap();
    let size: u64 = std::fs::read_dir(folder.path().join("step-00000001"))
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    println!("of {} MiB: {saved}", size >> 20);
    assert!(size >> 20 >= 2 * table_mib() as u64 && mib(&saved) < MOST_MIB, "{size} bytes, {saved}");
    first.wait_for_line(0, "lose the second server", SOON).unwrap();
    cluster.signal(server(1), Signal::KILL);
    cluster.restart(server(1));
    let restored = first.wait_for_line(0, "restored a server", SOON).unwrap();
    println!("{restored}");
    assert!(mib(&restored) < MOST_MIB, "{restored}");
    // The second server does not answer, so that the save is not done.
    cluster.signal(server(1), Signal::STOP);
    std::fs::write(folder.path().join("go"), "").unwrap();
    until_half_is_written(folder.path());
    first.kill(0, Signal::KILL).unwrap();
    first.wait(0, SOON).unwrap();
    cluster.signal(server(1), Signal::CONT);
    let said = start().wait(0, SOON).unwrap().stdout;
    let restored = said.lines().find(|line| line.contains("restored (1, 1)")).unwrap_or_else(|| panic!("{said}"));
    println!("{restored}");
    assert!(mib(restored) < MOST_MIB && said.contains("as saved"), "{said}");
    assert_eq!(bytes_under_way(folder.path()), 0);
}

#[test]
fn a_server_that_dies_while_its_rows_are_saved_fails_that_save_alone() {
    let mut cluster = Cluster::start(2, 1);
    let folder = tempfile::tempdir().unwrap();
    let strategy = built(&cluster.resolver(), folder.path(), 2);
    table(&strategy, of_row);
    let (local, mut checkpoints) = (Strategy::default_strategy().unwrap(), CheckpointManager::new(folder.path()));
    checkpoints.save(&local, 1, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    let second = server(strategy.find("table").unwrap().shards()[1].server as u32);
    cluster.signal(second, Signal::STOP);
    let told = std::thread::scope(|scope| {
        let save = scope.spawn(|| checkpoints.save(&local, 2, &[&strategy], &()).unwrap_err());
        until_half_is_written(folder.path());
        cluster.signal(second, Signal::KILL);
        save.join().unwrap()
    });
    assert!(told.to_string().starts_with(&format!("lost ps:{}", second.index)), "{told}");
    // The job is to be started again: the checkpoint before is whole.
    assert_eq!((told.is_retryable(), told.exit_code()), (true, 138), "{told}");
    let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["latest", "run", "step-00000001"]);
    Snapshot::read(folder.path().join("step-00000001")).unwrap();
}
