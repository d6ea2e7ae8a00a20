//! What a parameter server holds: shards of variables, and the optimizers that update them.
//!
//! Nothing here knows connections. All of it belongs to one session, which is one run of a coordinator; the next one begins
//! with nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use distribute_device::DType;
use tonic::Status;

mod optimizer;
mod shard;
mod tokens;

#[cfg(test)]
mod tests;

use self::optimizer::{Gradients, Optimizer, Turn};
pub(crate) use self::shard::operation_of;
use self::shard::{Gradient, Shard, invalid};
use crate::lock::lock;
use crate::numbers;
use crate::wire::proto::{
    AssignRequest, CreateShard, Description, Elements, FenceRequest, OptimizerOfShards, Origin, PullRequest, PushReply,
    PushRequest, Wanted,
};

/// Everything a server holds.
#[derive(Debug)]
pub(crate) struct Store {
    /// Drawn when the process began.
    incarnation: u64,
    held: RwLock<Held>,
    /// For each worker, up to which attendance it is refused. Read while a change is made, so that none is made afterwards.
    fences: RwLock<HashMap<u32, u64>>,
}

/// Lock order: `fences`, then `held`, then an optimizer, then a shard.
#[derive(Debug, Default)]
struct Held {
    session: u64,
    /// Sessions that others have taken the place of.
    over: Vec<u64>,
    shards: BTreeMap<u32, Arc<Shard>>,
    optimizers: BTreeMap<u32, Arc<Mutex<Optimizer>>>,
}

/// Gradients of one closure that are coming in.
pub(crate) struct Push {
    origin: Origin,
    optimizer: Arc<Mutex<Optimizer>>,
    turn: Turn,
    kept: Gradients,
}

impl Store {
    /// An empty one.
    pub(crate) fn new(incarnation: u64) -> Store {
        Store { incarnation, held: RwLock::default(), fences: RwLock::default() }
    }

    /// Whose process this is.
    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Begins a session; what another one left is dropped. One that was over before is refused: its coordinator was given up.
    pub(crate) fn begin_session(&self, session: u64) -> Result<(), Status> {
        let mut fences = self.fences.write().unwrap_or_else(PoisonError::into_inner);
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        if held.over.contains(&session) {
            return Err(Status::failed_precondition(TAKEN_OVER));
        }
        if held.session != session {
            let mut over = std::mem::take(&mut held.over);
            over.push(held.session);
            *held = Held { session, over, ..Held::default() };
            fences.clear();
        }
        Ok(())
    }

    /// Makes a shard, or sets one of its slots.
    pub(crate) fn create(&self, about: CreateShard) -> Result<(), Status> {
        self.check_session(about.session)?;
        if !about.slot.is_empty() {
            return self.shard(about.shard)?.set_slot(&about.slot, &about.payload);
        }
        let (number, shard) = (about.shard, Shard::new(about)?);
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        held.shards.insert(number, Arc::new(shard));
        Ok(())
    }

    /// Makes an optimizer, with the slots that it needs, or changes one.
    pub(crate) fn set_optimizer(&self, about: &OptimizerOfShards) -> Result<(), Status> {
        self.check_session(about.session)?;
        let optimizer = Optimizer::new(about)?;
        for number in &about.shards {
            self.shard(*number)?.make_slots(&optimizer.description)?;
        }
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        match held.optimizers.get(&about.optimizer) {
            Some(known) if about.shards.is_empty() => lock(known).description = optimizer.description,
            _ => {
                held.optimizers.insert(about.optimizer, Arc::new(Mutex::new(optimizer)));
            }
        }
        Ok(())
    }

    /// What is here.
    pub(crate) fn describe(&self, session: u64) -> Result<Description, Status> {
        self.check_session(session)?;
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        Ok(Description {
            incarnation: self.incarnation,
            shards: held.shards.values().map(|shard| shard.about.clone()).collect(),
            optimizers: held.optimizers.values().map(|optimizer| lock(optimizer).about(session)).collect(),
        })
    }

    /// One of the things that a request asks for; `None` where the caller has it already.
    pub(crate) fn pull(&self, request: &PullRequest, wanted: &Wanted) -> Result<Option<Elements>, Status> {
        self.check_session(request.session)?;
        let wire = request.wire.and_then(numbers::dtype);
        let same_server = request.incarnation == self.incarnation;
        let elements = self.shard(wanted.shard)?.pull(wanted, same_server, wire)?;
        Ok(elements.map(|elements| Elements { incarnation: self.incarnation, ..elements }))
    }

    /// Changes elements.
    pub(crate) fn assign(&self, request: &AssignRequest) -> Result<(), Status> {
        let origin = request.origin.as_ref().ok_or_else(|| invalid("an assignment without origin"))?;
        let _admitted = self.admit(origin)?;
        self.shard(request.shard)?.assign(origin, request)
    }

    /// Begins to take the gradients of a closure.
    pub(crate) fn begin_push(&self, head: &PushRequest) -> Result<Push, Status> {
        let origin = head.origin.clone().ok_or_else(|| invalid("gradients without origin"))?;
        drop(self.admit(&origin)?);
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        let optimizer = held.optimizers.get(&head.optimizer).cloned();
        let optimizer = optimizer.ok_or_else(|| invalid(format!("there is no optimizer {}", head.optimizer)))?;
        let turn = lock(&optimizer).begin(&origin);
        Ok(Push { origin, optimizer, turn, kept: Vec::new() })
    }

    /// Takes the gradient of a shard.
    pub(crate) fn push(&self, push: &mut Push, request: PushRequest) -> Result<(), Status> {
        let shard = self.shard(request.shard)?;
        let dtype = numbers::dtype(request.dtype).ok_or_else(|| invalid("an unknown data type"))?;
        let rows = request.rows.map(|rows| shard.rising_rows(&rows)).transpose()?;
        let gradient = Gradient { dtype, rows, payload: request.payload };
        match &push.turn {
            Turn::Apply(description, step) => {
                if gradient.rows.is_some() && !description.rule.is_elementwise() {
                    return Err(invalid(
                        "this optimizer looks at whole variables, so it cannot update rows; use AdamW",
                    ));
                }
                let _admitted = self.admit(&push.origin)?;
                shard.step(&push.origin, description, *step, &gradient)
            }
            Turn::Keep => {
                // What does not fit is said to whom it belongs, not to whom completes the round.
                match shard.dtype {
                    DType::F64 => drop(shard.values::<f64>(&gradient)?),
                    _ => drop(shard.values::<f32>(&gradient)?),
                }
                push.kept.push((request.shard, gradient));
                Ok(())
            }
            Turn::Done { .. } => Ok(()),
        }
    }

    /// All gradients have come.
    pub(crate) fn end_push(&self, push: Push) -> Result<PushReply, Status> {
        let counted = match push.turn {
            Turn::Apply(..) => true,
            Turn::Done { counted } => counted,
            Turn::Keep => {
                let _admitted = self.admit(&push.origin)?;
                let shards = self.held.read().unwrap_or_else(PoisonError::into_inner).shards.clone();
                // Held while the round is applied: whoever begins the next round finds this one done.
                let mut optimizer = lock(&push.optimizer);
                let (round, counted) = optimizer.contribute(&push.origin, push.kept);
                if let Some(round) = round {
                    round.apply(&shards)?;
                }
                counted
            }
        };
        let steps = lock(&push.optimizer).steps;
        Ok(PushReply { counted, steps })
    }

    /// Refuses a worker that was lost, from when this returns.
    pub(crate) fn fence(&self, request: &FenceRequest) -> Result<(), Status> {
        self.check_session(request.session)?;
        let mut fences = self.fences.write().unwrap_or_else(PoisonError::into_inner);
        let epoch = fences.entry(request.worker).or_default();
        *epoch = (*epoch).max(request.epoch);
        Ok(())
    }

    /// Lets a change in, unless it comes from somebody who was given up.
    fn admit(&self, origin: &Origin) -> Result<impl Sized, Status> {
        self.check_session(origin.session)?;
        let fences = self.fences.read().unwrap_or_else(PoisonError::into_inner);
        match fences.get(&origin.worker) {
            Some(epoch) if origin.epoch <= *epoch => {
                Err(Status::aborted("this worker was given up, and what it computes is computed by another one"))
            }
            _ => Ok(fences),
        }
    }

    /// Lets the present coordinator's calls in.
    pub(crate) fn check_session(&self, session: u64) -> Result<(), Status> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        match held.session == session {
            true => Ok(()),
            // A server that was started again knows no session.
            false if held.session == 0 => Err(Status::unavailable("this server was started again and holds nothing")),
            false => Err(Status::aborted("this server belongs to another coordinator by now")),
        }
    }

    fn shard(&self, number: u32) -> Result<Arc<Shard>, Status> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        let shard = held.shards.get(&number).cloned();
        // It knows its session, so the coordinator is about to make its shards.
        shard.ok_or_else(|| Status::unavailable(format!("shard {number} is not on this server yet")))
    }
}

/// What a coordinator is told whose place another one has taken.
pub(crate) const TAKEN_OVER: &str = "another coordinator has taken over; there can be one at a time";
