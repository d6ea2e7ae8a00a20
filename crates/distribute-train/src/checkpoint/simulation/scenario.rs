//! The actions of a run and the faults meanwhile, which follow from a seed.

use distribute_testkit::simulation::{self, Random, without_each};

/// A run that saves, and the faults meanwhile.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    /// Whether changes of names reach the disk in their order, as in a journal.
    pub(super) ordered: bool,
    /// Whether the file system can exchange two names.
    pub(super) exchanges: bool,
    pub(super) keep: usize,
    pub(super) max_shard_bytes: usize,
    /// The length of the larger tensor, in bytes.
    pub(super) tensor_bytes: usize,
    /// Whether checkpoints are checked first, and their tensors read one by one.
    pub(super) streams: bool,
    pub(super) actions: Vec<Action>,
    /// By the number of the file operation at which they occur.
    pub(super) faults: Vec<(u64, Fault)>,
    /// By how many operations have changed names before, the next operation of any kind.
    pub(super) after_renames: Vec<(u64, Fault)>,
}

/// An action; they are done one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The run saves after this many further steps; after none, it replaces its newest checkpoint.
    Save { steps: u64 },
    /// It saves while another process reads the newest checkpoint again and again.
    SaveAmidReads { steps: u64 },
    /// Its process ends, and is started again.
    Restart,
    /// Another run begins in the folder, and does not set this one aside.
    Stranger,
    /// A new run begins in the folder, and sets this one aside; the scenario continues with the new one.
    SetAside,
    /// A bit changes in one of the files of a checkpoint.
    Rot,
    /// Another run begins in the folder, and saves, at the same time as this one. It is the last action.
    Rivals,
    /// A second process of the same run starts and saves at the same time, as when a launcher takes the first for dead.
    /// It is the last action.
    Twins,
}

/// A fault that occurs at an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The machine stops; what was not synced may be lost.
    Power,
    /// The process is killed; the machine stays.
    Kill,
    /// The operation fails.
    Error,
    /// The disk is full for this many operations.
    Full { operations: u64 },
}

/// The trouble that an operation is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Error,
    Full,
    /// A write is cut by the end of its process.
    Cut,
}

/// About how many operations an action takes.
const OPERATIONS: u64 = 45;

impl simulation::Scenario for Scenario {
    fn draw(seed: u64) -> Scenario {
        let random = &mut Random::new(seed);
        let mut scenario = Scenario {
            seed,
            ordered: random.percent(50),
            exchanges: random.percent(60),
            keep: random.between(1, 4) as usize,
            max_shard_bytes: if random.percent(30) { 4000 } else { 1 << 20 },
            tensor_bytes: 4 * random.between(1, 4000) as usize,
            streams: random.percent(30),
            actions: Vec::new(),
            faults: Vec::new(),
            after_renames: Vec::new(),
        };
        for _ in 0..random.between(2, 9) {
            let steps = if random.percent(25) { 0 } else { random.between(1, 4) };
            scenario.actions.push(match random.between(0, 20) {
                0..=8 => Action::Save { steps },
                9 | 10 => Action::SaveAmidReads { steps },
                11..=13 => Action::Restart,
                14 | 15 => Action::Stranger,
                16 => Action::SetAside,
                _ => Action::Rot,
            });
        }
        match random.between(0, 10) {
            0 => scenario.actions.push(Action::Rivals),
            1 => scenario.actions.push(Action::Twins),
            _ => {}
        }
        let operations = scenario.actions.len() as u64 * OPERATIONS;
        for _ in 0..random.between(0, 5) {
            let at = random.between(1, operations + 1);
            let fault = match random.between(0, 10) {
                0..=3 => Fault::Power,
                4 | 5 => Fault::Kill,
                6..=8 => Fault::Error,
                _ => Fault::Full { operations: random.between(1, 60) },
            };
            scenario.faults.push((at, fault));
        }
        if random.percent(25) {
            // Faults soon after each other: in a recovery, or in the removal of what a failure has left.
            let at = random.between(1, operations + 1);
            for _ in 0..random.between(2, 5) {
                let at = at + random.between(0, 40);
                let fault = [Fault::Power, Fault::Kill, Fault::Error][random.between(0, 3) as usize];
                scenario.faults.push((at, fault));
            }
        }
        if random.percent(30) {
            // Between two steps of a replacement, or before its names are synced.
            let fault = [Fault::Power, Fault::Kill, Fault::Error][random.between(0, 3) as usize];
            scenario.after_renames.push((random.between(1, 3 * scenario.actions.len() as u64), fault));
        }
        scenario
    }

    /// Returns the scenarios that have one action or fault less.
    fn shorter(&self) -> impl Iterator<Item = Scenario> + '_ {
        let without_fault = without_each(&self.faults).map(|faults| Scenario { faults, ..self.clone() });
        let without_action = without_each(&self.actions).map(|actions| Scenario { actions, ..self.clone() });
        let without_renames =
            (!self.after_renames.is_empty()).then(|| Scenario { after_renames: Vec::new(), ..self.clone() });
        without_fault.chain(without_renames).chain(without_action)
    }
}
