//! The contents of a parameter server: shards of variables, and the optimizers that update them.
//!
//! This module does not deal with connections. Calls belong to a session, which is one run of a coordinator; the next
//! one has a greater number, and starts empty or keeps the contents.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use distribute_device::DType;
use parking_lot::{Mutex, RwLock};
use tonic::Status;

mod answer;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod optimizer;
mod session;
mod shard;
mod tokens;

#[cfg(test)]
mod tests;

pub(crate) use self::answer::Answer;
use self::optimizer::{Counted, Gradients, Optimizer, PushMode};
pub(crate) use self::session::TAKEN_OVER;
pub(crate) use self::shard::operation_of;
use self::shard::{Extent, Gradient, Shard, invalid};
use crate::numbers;
use crate::steps::EndedSteps;
use crate::wire::proto::{
    AssignRequest, CreateShard, Description, Elements, FenceRequest, OptimizerOfShards, Origin, PullRequest, PushReply,
    PushRequest, Wanted,
};
use crate::wire::{MAX_ANSWER_BYTES, Parts};

/// All contents of a server.
#[derive(Debug)]
pub(crate) struct Store {
    /// Drawn when the process started.
    incarnation: u64,
    /// The last version of any shard; one never recurs within this process, even in another session.
    versions: Arc<AtomicU64>,
    held: RwLock<Held>,
    /// For each worker, the last attendance that is refused. Locked for reading during a change, so that no refused one
    /// is made afterwards.
    fences: RwLock<HashMap<u32, u64>>,
}

/// Lock order: `fences`, then `held`, then an optimizer, then a shard.
#[derive(Debug, Default)]
struct Held {
    /// The greatest session so far.
    session: u64,
    /// The session in which the contents were made.
    lineage: u64,
    /// Whether only numbered steps change variables.
    numbered: bool,
    /// Whether everything that the coordinator makes is here.
    complete: bool,
    /// Whether the contents are being restored: a part of them may be missing, and slots may be zero, so that they are
    /// neither changed nor read meanwhile.
    restoring: bool,
    /// Numbered steps that are known to have ended. Locked last.
    steps: Mutex<EndedSteps>,
    shards: BTreeMap<u32, Arc<Shard>>,
    optimizers: BTreeMap<u32, Arc<Mutex<Optimizer>>>,
}

/// The incoming gradients of one closure.
pub(crate) struct Push {
    origin: Origin,
    optimizer: Arc<Mutex<Optimizer>>,
    turn: PushMode,
    kept: Gradients,
    /// Shards whose gradients have begun to arrive.
    seen: BTreeSet<u32>,
    coming: Option<Coming<PushRequest>>,
}

/// A message whose payload arrives in parts.
struct Coming<M> {
    /// The first part, without its payload.
    about: M,
    rows: Option<Parts>,
    payload: Parts,
}

/// A shard that is being created.
#[derive(Default)]
pub(crate) struct Creating(Option<Coming<CreateShard>>);

/// An assignment that is being received.
#[derive(Default)]
pub(crate) struct Assigning(Option<Coming<AssignRequest>>);

impl Creating {
    /// Returns whether the last message was complete.
    pub(crate) fn is_done(&self) -> bool {
        self.0.is_none()
    }
}

impl Assigning {
    /// Returns whether the last message was complete.
    pub(crate) fn is_done(&self) -> bool {
        self.0.is_none()
    }
}

impl Store {
    /// Creates an empty store.
    pub(crate) fn new(incarnation: u64) -> Store {
        Store { incarnation, versions: Arc::default(), held: RwLock::default(), fences: RwLock::default() }
    }

    /// Returns the number that identifies this process.
    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Creates a shard, or sets one of its slots, once all parts have arrived.
    pub(crate) fn create(&self, creating: &mut Creating, mut message: CreateShard) -> Result<(), Status> {
        let (part, more) = (std::mem::take(&mut message.payload), message.more);
        let mut coming = match creating.0.take() {
            Some(coming) if coming.about.shard == message.shard => coming,
            Some(coming) => return Err(mixed(coming.about.shard, message.shard)),
            None => {
                self.check_session(message.session)?;
                let payload = Parts::up_to(Extent::of(&message)?.len_bytes);
                Coming { about: CreateShard { more: false, ..message }, rows: None, payload }
            }
        };
        coming.payload.push(part)?;
        if more {
            creating.0 = Some(coming);
            return Ok(());
        }
        let Coming { about, payload, .. } = coming;
        if !about.slot.is_empty() {
            // No other session begins while it is set.
            let _fences = self.fences.read();
            self.held.write().begin_to_make(about.session)?;
            return self.shard(about.shard)?.set_slot(&about.slot, payload);
        }
        let (session, number, shard) = (about.session, about.shard, Shard::new(about, payload, &self.versions)?);
        let mut held = self.held.write();
        // Another coordinator may have attached while the parts arrived.
        held.check_session(session)?;
        held.complete = false;
        held.shards.insert(number, Arc::new(shard));
        Ok(())
    }

    /// Creates an optimizer with its slots, or changes one.
    pub(crate) fn set_optimizer(&self, about: &OptimizerOfShards) -> Result<(), Status> {
        let _fences = self.fences.read();
        self.check_session(about.session)?;
        if !about.shards.is_empty() {
            self.held.write().begin_to_make(about.session)?;
        }
        let optimizer = Optimizer::new(about)?;
        for number in &about.shards {
            self.shard(*number)?.make_slots(&optimizer.description)?;
        }
        let mut held = self.held.write();
        held.check_session(about.session)?;
        match held.optimizers.get(&about.optimizer) {
            Some(known) if about.shards.is_empty() => known.lock().description = optimizer.description,
            _ => {
                held.optimizers.insert(about.optimizer, Arc::new(Mutex::new(optimizer)));
            }
        }
        Ok(())
    }

    /// Describes the contents.
    pub(crate) fn describe(&self, session: u64) -> Result<Description, Status> {
        let held = self.held.read();
        held.check_restored(session)?;
        Ok(Description {
            incarnation: self.incarnation,
            shards: held.shards.values().map(|shard| shard.about.clone()).collect(),
            optimizers: held.optimizers.values().map(|optimizer| optimizer.lock().about(session)).collect(),
        })
    }

    /// Checks, before any answer is made, that a request can be answered: each shard or slot is named once, and the
    /// rows do not exceed the limit.
    pub(crate) fn check_pull(&self, request: &PullRequest) -> Result<(), Status> {
        self.held.read().check_restored(request.session)?;
        let mut whole = BTreeSet::new();
        let (mut bytes, mut rows) = (0u64, 0);
        for wanted in &request.wanted {
            match self.shard(wanted.shard)?.picked_bytes(wanted) {
                None if !whole.insert((wanted.shard, &wanted.slot)) => {
                    return Err(invalid(format!("shard {} is asked for twice in one call", wanted.shard)));
                }
                None => {}
                Some(picked) => {
                    bytes = bytes.saturating_add(picked);
                    rows += wanted.rows.len() / size_of::<u64>();
                }
            }
        }
        if bytes > MAX_ANSWER_BYTES && rows > 1 {
            return Err(invalid(format!(
                "{rows} rows of {bytes} bytes together are asked for; ask for at most {MAX_ANSWER_BYTES} bytes in one \
                call"
            )));
        }
        Ok(())
    }

    /// Answers one item of a request; `None` if the caller has this version already.
    pub(crate) fn pull(&self, request: &PullRequest, wanted: &Wanted) -> Result<Option<Answer>, Status> {
        self.held.read().check_restored(request.session)?;
        let wire = request.wire.and_then(numbers::dtype);
        let same_server = request.incarnation == self.incarnation;
        let answer = self.shard(wanted.shard)?.pull(wanted, same_server, wire)?;
        Ok(answer.map(|answer| answer.in_parts_of(request.part_bytes)))
    }

    /// Completes a message of an answer.
    pub(crate) fn signed(&self, elements: Elements) -> Elements {
        Elements { incarnation: self.incarnation, ..elements }
    }

    /// Changes elements, once all parts have arrived.
    pub(crate) fn assign(&self, assigning: &mut Assigning, mut message: AssignRequest) -> Result<(), Status> {
        let (part, rows, more) = (std::mem::take(&mut message.payload), message.rows.take(), message.more);
        let mut coming = match assigning.0.take() {
            Some(coming) if coming.about.shard == message.shard => coming,
            Some(coming) => return Err(mixed(coming.about.shard, message.shard)),
            None => {
                let origin = message.origin.as_ref().ok_or_else(|| invalid("an assignment without origin"))?;
                drop(self.admit(origin)?);
                let most = self.shard(message.shard)?.most_bytes();
                Coming { about: message, rows: rows.is_some().then(|| Parts::up_to(most)), payload: Parts::up_to(most) }
            }
        };
        coming.take(rows, part)?;
        if more {
            assigning.0 = Some(coming);
            return Ok(());
        }
        let request = AssignRequest { rows: coming.rows.map(Parts::join), ..coming.about };
        let payload = coming.payload.join();
        let _admitted = request.origin.as_ref().map(|origin| self.admit(origin)).transpose()?;
        if request.origin.as_ref().is_some_and(|origin| self.has_ended(origin)) {
            return Ok(());
        }
        self.shard(request.shard)?.assign(&request, &payload)
    }

    /// Begins to receive the gradients of a closure.
    pub(crate) fn begin_push(&self, head: &PushRequest) -> Result<Push, Status> {
        let origin = head.origin.clone().ok_or_else(|| invalid("gradients without origin"))?;
        let _admitted = self.admit(&origin)?;
        let held = self.held.read();
        let optimizer = held.optimizers.get(&head.optimizer).cloned();
        let optimizer = optimizer.ok_or_else(|| invalid(format!("there is no optimizer {}", head.optimizer)))?;
        let turn = match held.has_ended(&origin) {
            true => PushMode::Done(Counted::Earlier),
            false => optimizer.lock().begin(&origin),
        };
        drop(held);
        Ok(Push { origin: origin.clone(), optimizer, turn, kept: Vec::new(), seen: BTreeSet::new(), coming: None })
    }

    /// Receives the gradient of a shard, or a part of it.
    pub(crate) fn push(&self, push: &mut Push, mut message: PushRequest) -> Result<(), Status> {
        let (part, rows, more) = (std::mem::take(&mut message.payload), message.rows.take(), message.more);
        let mut coming = match push.coming.take() {
            Some(coming) if coming.about.shard == message.shard => coming,
            Some(coming) => return Err(mixed(coming.about.shard, message.shard)),
            None => {
                let number = message.shard;
                let most = self.shard(number)?.most_bytes();
                push.optimizer.lock().check(number, rows.is_some())?;
                if !push.seen.insert(number) {
                    return Err(invalid(format!("shard {number} has two gradients in one push; send their sum")));
                }
                Coming { about: message, rows: rows.is_some().then(|| Parts::up_to(most)), payload: Parts::up_to(most) }
            }
        };
        coming.take(rows, part)?;
        if more {
            push.coming = Some(coming);
            return Ok(());
        }
        let request = PushRequest { rows: coming.rows.map(Parts::join), ..coming.about };
        let shard = self.shard(request.shard)?;
        let dtype = numbers::dtype(request.dtype).ok_or_else(|| invalid("an unknown data type"))?;
        let rows = request.rows.map(|rows| shard.rising_rows(&rows)).transpose()?;
        let gradient = Gradient { dtype, rows, payload: coming.payload.join() };
        match &push.turn {
            PushMode::Apply(description, step) => {
                let _admitted = self.admit(&push.origin)?;
                shard.step(&push.origin, description, *step, &gradient)
            }
            PushMode::Keep => {
                // A mismatch is reported to the sender, not to the closure that completes the round.
                match shard.dtype {
                    DType::F64 => drop(shard.values::<f64>(&gradient)?),
                    _ => drop(shard.values::<f32>(&gradient)?),
                }
                push.kept.push((request.shard, gradient));
                Ok(())
            }
            PushMode::Done(_) => Ok(()),
        }
    }

    /// Processes the gradients once all have arrived.
    pub(crate) fn end_push(&self, push: Push) -> Result<PushReply, Status> {
        if let Some(coming) = &push.coming {
            return Err(invalid(format!("the gradient of shard {} has no end", coming.about.shard)));
        }
        let counted = match push.turn {
            PushMode::Apply(..) => Counted::Yes,
            PushMode::Done(counted) => counted,
            PushMode::Keep => {
                let _admitted = self.admit(&push.origin)?;
                let shards = self.held.read().shards.clone();
                // Held while the round is applied, so that it has ended before the next one begins.
                let mut optimizer = push.optimizer.lock();
                let (round, counted) = optimizer.contribute(&push.origin, push.kept);
                if let Some(round) = round {
                    round.apply(&shards)?;
                }
                counted
            }
        };
        let steps = push.optimizer.lock().steps;
        Ok(PushReply { counted: counted != Counted::No, steps, earlier: counted == Counted::Earlier })
    }

    /// Refuses changes of a lost worker from the time this returns.
    pub(crate) fn fence(&self, request: &FenceRequest) -> Result<(), Status> {
        self.check_session(request.session)?;
        let mut fences = self.fences.write();
        let epoch = fences.entry(request.worker).or_default();
        *epoch = (*epoch).max(request.epoch);
        Ok(())
    }

    /// Admits a change unless its worker was given up.
    fn admit(&self, origin: &Origin) -> Result<impl Sized, Status> {
        // In this order, so that no other session begins while the change is made.
        let fences = self.fences.read();
        self.held.read().admit(origin)?;
        match fences.get(&origin.worker) {
            Some(epoch) if origin.epoch <= *epoch => {
                Err(Status::aborted("this worker was given up, and what it computes is computed by another one"))
            }
            _ => Ok(fences),
        }
    }

    /// Checks that a call belongs to the current coordinator.
    pub(crate) fn check_session(&self, session: u64) -> Result<(), Status> {
        self.held.read().check_session(session)
    }

    fn shard(&self, number: u32) -> Result<Arc<Shard>, Status> {
        let held = self.held.read();
        let shard = held.shards.get(&number).cloned();
        // The session is right, so the coordinator is about to create its shards.
        shard.ok_or_else(|| Status::unavailable(format!("shard {number} is not on this server yet")))
    }
}

impl<M> Coming<M> {
    fn take(&mut self, rows: Option<Bytes>, part: Bytes) -> Result<(), Status> {
        match (&mut self.rows, rows) {
            (Some(known), Some(rows)) => known.push(rows)?,
            (None, None) => {}
            _ => return Err(invalid("one part names rows and another does not")),
        }
        self.payload.push(part)
    }
}

fn mixed(first: u32, second: u32) -> Status {
    invalid(format!("a message of shard {second} arrived before all parts of shard {first}"))
}
