//! The memory of checkpoints of sharded models, counted by the allocator, in one process and in four.
#![cfg(feature = "checkpoint")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use distribute_optim::backend::Variable;
use distribute_optim::{Adam, HostLoss, HostModel, Optimizer, Trainable};
use distribute_strategy::{FullyShardedStrategy, MirroredStrategy, Strategy};
use distribute_testkit::{CountingAllocator, Job, Ports};
use distribute_train::BoxError;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use distribute_values::{Host, HostTensor, TensorStorage};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Held while bytes are counted.
static COUNTING: Mutex<()> = Mutex::new(());

/// Set in the processes of a job.
const FOLDER: &str = "DISTRIBUTE_TEST_MEMORY_FOLDER";

const DEADLINE: Duration = Duration::from_secs(120);

const LAYERS: usize = 24;
const ELEMENTS: usize = 128 << 10;
/// The bytes of one variable, and of one of its slots.
const VARIABLE: usize = ELEMENTS * 4;
/// The bytes of the files: with Adam's slots there are three tensors for each variable.
const WHOLE: usize = 3 * LAYERS * VARIABLE;
/// Two variables.
const FILE: usize = 2 * VARIABLE;

struct Layers(HostModel);

impl Layers {
    fn variables(&self) -> &[Variable<Host>] {
        self.0.parameters().variables()
    }
}

impl Checkpointed for Layers {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        for variable in self.variables() {
            snapshot.put_whole::<Host, _>(strategy, "model", variable.name(), variable.whole_on_chief(strategy)?)?;
        }
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for variable in self.variables() {
            let like = &variable.components()[0];
            let saved = snapshot.get_shaped::<Host, _>("model", variable.name(), like, &variable.shape())?;
            variable.overwrite(&saved)?;
        }
        Ok(())
    }
}

fn trained(strategy: &Strategy) -> (Layers, Optimizer<Host>) {
    let names: Vec<String> = (0..LAYERS).map(|index| format!("layer.{index}")).collect();
    let value = |index: usize| HostTensor::new(&[ELEMENTS], vec![index as f32; ELEMENTS]).unwrap();
    let variables = names.iter().enumerate().map(|(index, name)| (name.as_str(), value(index)));
    let model = HostModel::new(strategy, variables).unwrap();
    let optimizer = Adam::new(0.1).build(&model).unwrap();
    let run = strategy.run_with(&optimizer, |context, optimizer| {
        optimizer.minimize(context, &HostLoss((0..LAYERS).map(|index| Some(value(index + 1))).collect()))
    });
    run.unwrap();
    (Layers(model), optimizer)
}

/// Returns the bytes that a save and a restore take, above those of the model and the optimizer.
fn peaks(strategy: &Strategy, folder: &Path) -> [usize; 2] {
    let (model, optimizer) = trained(strategy);
    let mut manager = CheckpointManager::new(folder).max_shard_bytes(FILE);
    let before = ALLOCATOR.reset_peak();
    manager.save(strategy, 1, &[&model, &optimizer], &()).unwrap();
    manager.finish_everywhere(strategy).unwrap();
    let saving = ALLOCATOR.peak() - before;
    let before = ALLOCATOR.reset_peak();
    manager.restore::<()>(strategy, &[&model, &optimizer]).unwrap().unwrap();
    // Adam moves each variable by the rate, whatever the gradient is.
    let first = model.variables()[0].components()[0].to_elements::<f32>().unwrap()[0];
    assert!((first + 0.1).abs() < 1e-3, "{first}");
    [saving, ALLOCATOR.peak() - before]
}

#[test]
fn a_checkpoint_of_parts_takes_the_memory_of_a_file_and_a_few_variables() {
    let _guard = COUNTING.lock().unwrap();
    let devices = || (0..4).map(|index| format!("CPU:{index}"));
    let sharded = FullyShardedStrategy::builder().devices(devices()).build().unwrap();
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = peaks(&MirroredStrategy::builder().devices(["CPU:0"]).build().unwrap(), one.path());
    let parts = peaks(&sharded, other.path());
    println!("of {WHOLE} bytes: {parts:?} in parts, {whole:?} whole");
    // The snapshot in memory.
    assert!(whole.iter().all(|bytes| *bytes >= WHOLE), "{whole:?}");
    // The file that is written and the tensor that comes next; one that is gathered, of parts, and its bytes.
    assert!(parts[0] <= FILE + 5 * VARIABLE, "{parts:?}");
    // A tensor's bytes and the tensor. Files are checked through a buffer, which is smaller.
    assert!(parts[1] <= 3 * VARIABLE, "{parts:?}");
}

/// One process of the job below.
#[test]
#[ignore = "a process that other tests start"]
fn worker() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let strategy = FullyShardedStrategy::builder().build().unwrap();
    let [saving, restoring] = peaks(&strategy, Path::new(&folder));
    println!("of {WHOLE} bytes: {saving} and {restoring}");
    let file = if strategy.is_chief() { FILE } else { 0 };
    // Messages on their way take more than in one process.
    assert!(saving <= file + 6 * VARIABLE, "{saving}");
    assert!(restoring <= 5 * VARIABLE, "{restoring}");
}

#[test]
fn no_process_of_four_takes_more() {
    let _guard = COUNTING.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let port = Ports::reserve(1).unwrap().release()[0];
    let variables = move |rank: u32| {
        let fields = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", "4".to_owned()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("DISTRIBUTE_PORT", port.to_string()),
            ("MASTER_PORT", "1".to_owned()),
        ];
        fields.map(|(name, value)| (name.to_owned(), value)).to_vec()
    };
    let job = Job::of_test("worker").unwrap();
    let job = job.tasks(4).task_env(variables).env(FOLDER, folder.path().to_str().unwrap());
    for outcome in job.start().unwrap().wait_all(DEADLINE).unwrap() {
        println!("{}", outcome.stdout);
        assert!(outcome.passed(), "{outcome:?}");
    }
}
