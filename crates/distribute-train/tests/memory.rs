//! The memory of checkpoints of sharded models, counted by the allocator. The only test of its process.
#![cfg(feature = "checkpoint")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use distribute_optim::backend::Variable;
use distribute_optim::{Adam, HostLoss, HostModel, Optimizer, Trainable};
use distribute_strategy::{FullyShardedStrategy, MirroredStrategy, Strategy};
use distribute_testkit::CountingAllocator;
use distribute_train::BoxError;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use distribute_values::{Host, HostTensor};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

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
fn peaks(strategy: &Strategy) -> [usize; 2] {
    let folder = tempfile::tempdir().unwrap();
    let (model, optimizer) = trained(strategy);
    let mut manager = CheckpointManager::new(folder.path()).max_shard_bytes(FILE);
    let before = ALLOCATOR.reset_peak();
    manager.save(strategy, 1, &[&model, &optimizer], &()).unwrap();
    manager.finish().unwrap();
    let saving = ALLOCATOR.peak() - before;
    let before = ALLOCATOR.reset_peak();
    manager.restore::<()>(strategy, &[&model, &optimizer]).unwrap().unwrap();
    [saving, ALLOCATOR.peak() - before]
}

#[test]
fn a_checkpoint_of_parts_takes_the_memory_of_a_file_and_a_few_variables() {
    let devices = || (0..4).map(|index| format!("CPU:{index}"));
    let sharded = FullyShardedStrategy::builder().devices(devices()).build().unwrap();
    let whole = peaks(&MirroredStrategy::builder().devices(["CPU:0"]).build().unwrap());
    let parts = peaks(&sharded);
    println!("of {WHOLE} bytes: {parts:?} in parts, {whole:?} whole");
    // The snapshot in memory; a file of it exists twice while it is read.
    assert!(whole.iter().all(|bytes| *bytes >= WHOLE), "{whole:?}");
    // The file that is written and the tensor that comes next; one that is gathered, of parts, and its bytes.
    assert!(parts[0] <= FILE + 5 * VARIABLE, "{parts:?}");
    // A tensor's bytes and the tensor. Files are checked through a buffer, which is smaller.
    assert!(parts[1] <= 3 * VARIABLE, "{parts:?}");
}
