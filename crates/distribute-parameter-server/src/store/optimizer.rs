//! When gradients are applied: each on arrival, or several together.

use std::collections::BTreeMap;
use std::sync::Arc;

use distribute_device::DType;
use distribute_rules::OptimizerDescription;
use tonic::Status;

use super::shard::{Gradient, Shard, invalid};
use super::tokens::Tokens;
use crate::numbers::{self, Float};
use crate::wire::proto::{OptimizerOfShards, Origin};

/// An optimizer's state on one server.
#[derive(Debug)]
pub(super) struct Optimizer {
    pub(super) number: u32,
    pub(super) description: OptimizerDescription,
    /// The description with which the coordinator has made it, as JSON.
    made_as: String,
    /// The shards that it updates, ascending.
    pub(super) shards: Vec<u32>,
    /// The number of steps made.
    pub(super) steps: u64,
    /// The number of closures whose gradients make one step together; 0 if each makes its own.
    pub(super) contributions: usize,
    tokens: Tokens,
    round: u64,
    /// The contributions to this round, by closure. Their changes have its number as a note.
    gathered: BTreeMap<u64, Contribution>,
}

/// The gradients of a closure that wait for the others of their round.
#[derive(Debug)]
struct Contribution {
    origin: Origin,
    gradients: Gradients,
}

/// The gradients of one closure, by shard.
pub(super) type Gradients = Vec<(u32, Gradient)>;

/// How a closure's gradients are treated.
pub(super) enum PushMode {
    /// Apply each on arrival, as part of this step.
    Apply(OptimizerDescription, u64),
    /// Keep them until all have arrived.
    Keep,
    /// They are too late for their round, or were counted before.
    Done(Counted),
}

/// Whether a closure's gradients count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// In their round.
    Yes,
    /// In an earlier round, as those of a step that failed afterwards and was scheduled again.
    Earlier,
    /// They are too late for their round.
    No,
}

/// A complete round: gradients of a step, in the order of their closures.
pub(super) struct Round {
    pub(super) description: OptimizerDescription,
    pub(super) step: u64,
    pub(super) contributions: usize,
    pub(super) gradients: BTreeMap<u32, Vec<Gradient>>,
    /// The origin of a change by the server itself.
    pub(super) origin: Origin,
}

impl Optimizer {
    pub(super) fn new(about: &OptimizerOfShards) -> Result<Optimizer, Status> {
        let description: OptimizerDescription =
            serde_json::from_str(&about.description).map_err(|error| invalid(error.to_string()))?;
        description.check().map_err(|error| invalid(error.to_string()))?;
        let mut shards = about.shards.clone();
        shards.sort_unstable();
        Ok(Optimizer {
            number: about.optimizer,
            description,
            made_as: about.made_as.clone(),
            shards,
            steps: about.steps,
            contributions: about.contributions as usize,
            tokens: Tokens::default(),
            round: 0,
            gathered: BTreeMap::new(),
        })
    }

    pub(super) fn about(&self, session: u64) -> OptimizerOfShards {
        OptimizerOfShards {
            session,
            optimizer: self.number,
            // A description that was parsed from JSON can be serialized.
            description: serde_json::to_string(&self.description).unwrap_or_default(),
            steps: self.steps,
            shards: self.shards.clone(),
            contributions: self.contributions as u32,
            made_as: self.made_as.clone(),
        }
    }

    /// Prepares it for another coordinator, whose closures and rounds are numbered anew.
    pub(super) fn keep_steps(&mut self) {
        self.abandon();
        self.tokens.keep_steps();
        self.round = 0;
    }

    /// Drops what has arrived for this round. Its closures are steps that may be scheduled again, and then count.
    fn abandon(&mut self) {
        for Contribution { origin, .. } in std::mem::take(&mut self.gathered).into_values() {
            self.tokens.forget(&origin, 0);
        }
    }

    /// Checks that it can update this shard, or some rows of it.
    pub(super) fn check(&self, shard: u32, by_rows: bool) -> Result<(), Status> {
        if self.shards.binary_search(&shard).is_err() {
            return Err(invalid(format!("this optimizer does not update shard {shard}")));
        }
        if by_rows && !self.description.rule.is_elementwise() {
            return Err(invalid("this optimizer looks at whole variables, so it cannot update rows; use AdamW"));
        }
        Ok(())
    }

    /// Returns how to treat a closure's gradients, which begin to arrive.
    pub(super) fn begin(&mut self, origin: &Origin) -> PushMode {
        if self.contributions > 0 {
            return match self.tokens.find(origin, 0) {
                // Its contribution to this round is dropped when the next one begins.
                Some(round) if round == self.round && round < origin.round => PushMode::Keep,
                Some(round) => PushMode::Done(Counted::of(round, origin)),
                None if origin.round < self.round => PushMode::Done(Counted::No),
                None => PushMode::Keep,
            };
        }
        // A closure that runs again continues the step that it began.
        let step = self.tokens.find(origin, 0).unwrap_or_else(|| {
            self.steps = self.steps.saturating_add(1);
            self.tokens.note(origin, 0, self.steps);
            self.steps
        });
        PushMode::Apply(self.description, step)
    }

    /// Adds all gradients of a closure. Returns the round if it is complete with them, and whether they counted.
    pub(super) fn contribute(&mut self, origin: &Origin, gradients: Gradients) -> (Option<Round>, Counted) {
        if origin.round > self.round {
            // This server was restarted meanwhile, or rounds were abandoned.
            if !self.gathered.is_empty() {
                tracing::warn!(
                    "{} of {} gradients of a step of optimizer {} have arrived, and are dropped: a function has \
                     failed, or some of them have not pushed to this optimizer",
                    self.gathered.len(),
                    self.contributions,
                    self.number
                );
            }
            self.abandon();
            self.round = origin.round;
        }
        if let Some(round) = self.tokens.find(origin, 0) {
            return (None, Counted::of(round, origin));
        }
        if origin.round < self.round {
            return (None, Counted::No);
        }
        self.tokens.note(origin, 0, self.round);
        self.gathered.insert(origin.closure, Contribution { origin: origin.clone(), gradients });
        if self.gathered.len() < self.contributions {
            return (None, Counted::Yes);
        }
        self.steps = self.steps.saturating_add(1);
        self.round = self.round.saturating_add(1);
        let mut by_shard: BTreeMap<u32, Vec<Gradient>> = BTreeMap::new();
        let gathered = std::mem::take(&mut self.gathered).into_values();
        for (shard, gradient) in gathered.flat_map(|contribution| contribution.gradients) {
            by_shard.entry(shard).or_default().push(gradient);
        }
        let (description, step, contributions) = (self.description, self.steps, self.contributions);
        (Some(Round { description, step, contributions, gradients: by_shard, origin: Origin::default() }), Counted::Yes)
    }
}

impl Counted {
    /// Describes gradients that have counted in a round.
    fn of(round: u64, origin: &Origin) -> Counted {
        if round == origin.round { Counted::Yes } else { Counted::Earlier }
    }
}

impl Round {
    /// Applies the mean of all contributions; one without a gradient of a shard counts as zero.
    pub(super) fn apply(self, shards: &BTreeMap<u32, Arc<Shard>>) -> Result<(), Status> {
        for (number, gradients) in &self.gradients {
            let Some(shard) = shards.get(number) else { continue };
            let mean = match shard.dtype {
                DType::F64 => mean::<f64>(shard, gradients, self.contributions)?,
                _ => mean::<f32>(shard, gradients, self.contributions)?,
            };
            shard.step(&self.origin, &self.description, self.step, &mean)?;
        }
        Ok(())
    }
}

/// Computes the mean of gradients of a shard; it is of rows if all of them are.
fn mean<T: Float>(shard: &Shard, gradients: &[Gradient], contributions: usize) -> Result<Gradient, Status> {
    let (len, share) = (shard.row_len().max(1), T::from_f64(1.0 / contributions as f64));
    let mut rows: BTreeMap<u64, Vec<T>> = BTreeMap::new();
    let mut dense: Option<Vec<T>> = None;
    for gradient in gradients {
        let values = shard.values::<T>(gradient)?;
        match (&gradient.rows, &mut dense) {
            (None, None) => dense = Some(values.into_owned()),
            (None, Some(sum)) => add(sum, &values),
            (Some(of), _) => {
                for (row, values) in of.iter().zip(values.chunks_exact(len)) {
                    match rows.get_mut(row) {
                        Some(sum) => add(sum, values),
                        None => drop(rows.insert(*row, values.to_vec())),
                    }
                }
            }
        }
    }
    if let Some(sum) = &mut dense {
        for (row, values) in std::mem::take(&mut rows) {
            add(&mut sum[row as usize * len..(row as usize + 1) * len], &values);
        }
    }
    let (of, mut sum): (Option<Vec<u64>>, Vec<T>) = match dense {
        Some(sum) => (None, sum),
        None => (Some(rows.keys().copied().collect()), rows.into_values().flatten().collect()),
    };
    sum.iter_mut().for_each(|x| *x = *x * share);
    Ok(Gradient { dtype: T::DTYPE, rows: of, payload: numbers::to_bytes(sum) })
}

fn add<T: Float>(sum: &mut [T], values: &[T]) {
    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += *value);
}
