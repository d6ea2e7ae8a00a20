//! Training in simulated generations: states are sent from one process to others, and steps are made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::scenario::{Defect, Fault};
use super::world::{Item, World};
use crate::elastic::core::Event;
use crate::elastic::generation::Generation;
use crate::{HeldState, MemberStates, Missing, StateVersion};

/// The training of a process, which looks at what others have sent every now and then.
pub(super) struct Training {
    held: HeldState,
    /// Whether it has a state.
    exists: bool,
    commits: u64,
    /// Stands for the values of all variables.
    values: u64,
    /// The generation that it is in, or was in last.
    generation: Arc<Generation>,
    phase: Phase,
}

#[derive(Clone)]
enum Phase {
    Outside,
    Meeting,
    Forming(MemberStates),
    Sending {
        until: u64,
        states: MemberStates,
    },
    /// It has the state with which its generation begins.
    Beginning(MemberStates),
    Starting,
    Stepping,
    /// Its generation lacks the newest state.
    Outdated,
}

/// The messages of a generation's members to each other, by the numbers of their processes.
#[derive(Default)]
struct Board {
    versions: BTreeMap<usize, StateVersion>,
    formed: BTreeSet<usize>,
    sent: Option<u64>,
    /// The processes that have computed each step.
    steps: BTreeMap<u64, BTreeSet<usize>>,
}

/// The messages and steps of all generations.
#[derive(Default)]
pub(super) struct Trained {
    boards: BTreeMap<u64, Board>,
    /// The values after each step of each generation.
    values: BTreeMap<(u64, u64), u64>,
    /// The generations in which steps were made, with the first and the last.
    made: BTreeMap<u64, (u64, u64)>,
    /// How many states were begun to be sent.
    transfers: u64,
    /// The generations that lacked the newest state.
    pub(super) outdated: BTreeSet<u64>,
}

impl Training {
    pub(super) fn new(values: u64) -> Training {
        let (generation, phase) = (Arc::new(Generation::of_seeds(&[])), Phase::Outside);
        Training { held: HeldState::default(), exists: false, commits: 0, values, generation, phase }
    }

    fn version(&self) -> StateVersion {
        self.held.version(self.commits, self.exists.then_some(0))
    }
}

/// Returns the number of a process.
fn node_of(identity: u128) -> usize {
    (identity >> 64) as usize - 1
}

fn mixed(values: u64, generation: u64, step: u64) -> u64 {
    (values ^ generation << 40 ^ step).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

impl Trained {
    /// Takes note of a step that a process has made.
    ///
    /// # Errors
    /// A sentence, if another process has other values after it, or if steps were lost.
    fn step(&mut self, generation: u64, step: u64, values: u64) -> Result<(), String> {
        if *self.values.entry((generation, step)).or_insert(values) != values {
            return Err(format!("two processes have different values after step {step} of generation {generation}"));
        }
        let earlier = self.made.range(..generation).map(|(_, (_, last))| *last).max().unwrap_or(0);
        let (first, last) = self.made.entry(generation).or_insert((step, step));
        *last = step.max(*last);
        match *first == step && step < earlier {
            true => Err(format!("generation {generation} begins with step {step}, after step {earlier} was made")),
            false => Ok(()),
        }
    }

    /// Checks that generations know which ones before them have trained.
    pub(super) fn is_known_to<'a>(&self, mut decided: impl Iterator<Item = &'a Arc<Generation>>) -> Result<(), String> {
        let newest = |before: u64| self.made.range(..before).next_back().map_or(0, |(number, _)| *number);
        let unknown = decided.find(|generation| generation.trained < newest(generation.number));
        unknown.map_or(Ok(()), |generation| {
            let Generation { number, trained, .. } = **generation;
            let made = newest(number);
            Err(format!("generation {number} follows on {trained}, although steps were made in {made}"))
        })
    }
}

impl World<'_> {
    /// Lets a process continue its training as far as the others' messages allow, and again after a while.
    pub(super) fn train(&mut self, node: usize) -> Result<(), String> {
        if !self.nodes[node].alive {
            return Ok(());
        }
        let at = self.now.max(self.nodes[node].frozen_until) + self.random.between(5_000, 60_000);
        self.put(at, Item::Train { node });
        // The thread that trains learns of the end of its generation a little later.
        let is_late = self.random.percent(40);
        let of = &mut self.nodes[node];
        if of.frozen_until > self.now {
            return Ok(());
        }
        let (newest, is_active) = (of.core.newest().clone(), of.core.is_active());
        let is_present = is_active && newest.number == of.training.generation.number;
        if is_active && newest.number > of.training.generation.number && !is_late {
            (of.training.generation, of.training.phase) = (newest.clone(), Phase::Meeting);
            let board = self.trained.boards.entry(newest.number).or_default();
            board.versions.insert(node, of.training.version());
        } else if !is_present && !is_late {
            of.training.phase = Phase::Outside;
        }
        self.advance(node)
    }

    fn advance(&mut self, node: usize) -> Result<(), String> {
        let now = self.now;
        let training = &mut self.nodes[node].training;
        let (number, phase) = (training.generation.number, training.phase.clone());
        let members: Vec<usize> = training.generation.members.iter().map(|member| node_of(member.identity)).collect();
        let board = self.trained.boards.entry(number).or_default();
        let next = match phase {
            Phase::Outside | Phase::Outdated => return Ok(()),
            Phase::Meeting if board.versions.len() < members.len() => return Ok(()),
            Phase::Meeting => self.meet(node, &members),
            Phase::Forming(_) if board.formed.len() < members.len() => return Ok(()),
            Phase::Forming(states) if states.most_missing() == Missing::Nothing => Phase::Beginning(states),
            Phase::Forming(states) if states.rank() == states.source() => {
                let until = now + self.random.between(1_000, self.scenario.transfer);
                self.begin_sending(node);
                Phase::Sending { until, states }
            }
            Phase::Forming(states) => {
                let Some(values) = board.sent else { return Ok(()) };
                if states.missing(states.rank()) != Missing::Nothing {
                    let newest = states.newest();
                    (training.commits, training.values) = (newest.commits, values);
                    training.exists |= newest.exists;
                }
                Phase::Beginning(states)
            }
            Phase::Sending { until, .. } if now < until => return Ok(()),
            Phase::Sending { states, .. } => {
                board.sent = Some(training.values);
                Phase::Beginning(states)
            }
            Phase::Beginning(states) => {
                training.held.take(&states, training.commits);
                let begins = self.nodes[node].core.begin_training(number);
                if !begins && self.scenario.defect != Some(Defect::Unfenced) {
                    self.nodes[node].training.phase = Phase::Outside;
                    return self.handle(node, Event::Suspect { generation: number, ranks: Vec::new() });
                }
                Phase::Starting
            }
            Phase::Starting => {
                training.exists = true;
                Phase::Stepping
            }
            Phase::Stepping => {
                let step = training.commits + 1;
                let computed = board.steps.entry(step).or_default();
                computed.insert(node);
                if computed.len() == members.len() {
                    (training.commits, training.values) = (step, mixed(training.values, number, step));
                    self.trained.step(number, step, training.values)?;
                    self.trained.is_known_to(self.invariants.decided.range(number..).map(|(_, later)| later))?;
                }
                Phase::Stepping
            }
        };
        self.nodes[node].training.phase = next;
        Ok(())
    }

    /// Lets a process find out whose state its generation continues with.
    fn meet(&mut self, node: usize, members: &[usize]) -> Phase {
        let training = &mut self.nodes[node].training;
        let mut generation = Generation::clone(&training.generation);
        let Some(board) = self.trained.boards.get_mut(&generation.number) else { return Phase::Outside };
        let Some(rank) = members.iter().position(|of| *of == node) else { return Phase::Outside };
        let all = |board: &Board| members.iter().map(|of| board.versions[of]).collect::<Vec<StateVersion>>();
        match self.scenario.defect {
            Some(Defect::Unchecked) => generation.trained = 0,
            Some(Defect::StepsAlone) => {
                let is_there = all(board).iter().any(|version| version.generation >= generation.trained);
                let same = if is_there { generation.trained } else { 0 };
                board.versions.values_mut().for_each(|version| version.generation = same);
            }
            _ => {}
        }
        let Ok(states) = MemberStates::new(&generation, rank, all(board)) else {
            self.trained.outdated.insert(generation.number);
            return Phase::Outdated;
        };
        training.held.meet(&states, training.commits);
        board.formed.insert(node);
        Phase::Forming(states)
    }

    /// Kills or freezes a process that begins to send its state, if the scenario says so.
    fn begin_sending(&mut self, node: usize) {
        self.trained.transfers += 1;
        let sends = self.trained.transfers;
        for fault in self.scenario.faults.clone() {
            match fault {
                Fault::KillSending { transfer } if transfer == sends => self.kill(node),
                Fault::FreezeSending { transfer, pause } if transfer == sends => {
                    self.freeze(node, self.now + pause);
                }
                _ => {}
            }
        }
    }

    /// Returns whether the newest generation trains, or has no member with the newest state.
    pub(super) fn trains(&self) -> bool {
        let Some((number, newest)) = self.invariants.decided.last_key_value() else { return false };
        let mut members = newest.members.iter().map(|member| &self.nodes[node_of(member.identity)].training);
        self.trained.made.contains_key(number) || members.all(|training| training.version().generation < newest.trained)
    }

    pub(super) fn steps(&self) -> u64 {
        self.trained.made.values().map(|(first, last)| last - first + 1).sum()
    }
}
