//! The optimizer's state in parts, under a strategy that shards.
//!
//! burn's learner holds a whole model and an optimizer of its own, whose state begins with a parameter's first
//! gradient. So each large parameter is *owned* by one replica of a shard group: only the owner's optimizer gets the
//! gradient and has the state. The others receive the updated value. That is stage 1 of ZeRO, by whole parameters, for
//! every optimizer.

use std::collections::{BTreeMap, HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, Tensor};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel};
use burn_flex::FlexTensor;
use distribute_collectives::{Rank, ReduceOp};
use distribute_device::{BufferRef, DType};
use distribute_strategy::{ReplicaContext, Strategy};
use distribute_types::with_dtype;

use super::ids::Ids;
use super::start::optimizer_state;
use super::values::{Place, Value, path_of, values};
use super::watch::trained;
use crate::backend::{has_same_bits, whole};
use crate::optimizer::state::State;
use crate::tensor::{dtype_of, made};
use crate::{Error, Result};

/// The owners of a model's large parameters, equal on all replicas, by this process's ids.
pub(super) struct Owners {
    part_of: HashMap<ParamId, usize>,
    of_types: Vec<OfType>,
    parts: usize,
    ids: Ids,
}

/// The owned parameters of one element type.
struct OfType {
    dtype: DType,
    /// In the order of their parts.
    parameters: Vec<(ParamId, Vec<usize>)>,
    /// The number of elements of each part.
    counts: Vec<usize>,
}

impl Owners {
    /// Divides a model's parameters so that parts have about equal sizes; `None` if the strategy does not shard.
    pub(super) fn new<M: Module>(strategy: &Strategy, model: &M) -> Result<Option<Owners>> {
        let Some(sharding) = strategy.sharding().filter(|sharding| sharding.parts > 1) else { return Ok(None) };
        let mut large: Vec<(ParamId, FlexTensor)> = trained(model)?;
        large.retain(|(_, value)| sharding.shards(value.layout().num_elements()));
        large.sort_by_key(|(_, value)| std::cmp::Reverse(value.bytes().len()));
        let mut sizes = vec![0; sharding.parts];
        let mut of_types: BTreeMap<String, OfType> = BTreeMap::new();
        let mut part_of = HashMap::new();
        for (id, value) in large {
            // The first of the smallest parts.
            let part = (0..sizes.len()).min_by_key(|part| sizes[*part]).unwrap_or_default();
            let (len, dtype) = (value.layout().num_elements(), dtype_of(value.dtype())?);
            sizes[part] += len * dtype.size_bytes();
            part_of.insert(id, part);
            let of_type = of_types.entry(format!("{dtype:?}")).or_insert_with(|| OfType {
                dtype,
                parameters: Vec::new(),
                counts: vec![0; sharding.parts],
            });
            of_type.parameters.push((id, value.layout().shape().as_slice().to_vec()));
            of_type.counts[part] += len;
        }
        let mut of_types: Vec<OfType> = of_types.into_values().collect();
        of_types.iter_mut().for_each(|of_type| of_type.parameters.sort_by_key(|(id, _)| part_of[id]));
        Ok(Some(Owners { part_of, of_types, parts: sharding.parts, ids: Ids::of(model) }))
    }

    /// Takes the gradients of the parameters that this replica updates.
    pub(super) fn own<M: Module>(&self, context: &ReplicaContext, model: &M, all: GradientsParams) -> Updates {
        let part = context.strategy().sharding().map_or(0, |sharding| sharding.part_of(context.replica_id()));
        let own = Updates { gradients: GradientsParams::new(), updated: HashSet::new() };
        let mut own = Own { owners: self, part, from: all, own };
        model.visit(&mut own);
        own.own
    }

    /// Checks that a step has changed no other values than those of the parameters that this replica has `updated`, and
    /// those that are exchanged.
    ///
    /// # Errors
    /// [`Error::Learner`] if `TrainStep::optimize` has changed another value: it may have computed it from parameters
    /// that only their owners have updated by then.
    pub(super) fn check_others<M: Module>(&self, before: &M, after: &M, updated: &HashSet<ParamId>) -> Result<()> {
        let is_other = |(id, visit)| visit > 0 || !(updated.contains(&id) || self.part_of.contains_key(&id));
        let values_before = values(before, is_other)?;
        for (place, (value, _)) in values(after, is_other)? {
            if values_before.get(&place).is_none_or(|(before, _)| !has_same_bits(before, &value)) {
                return Err(Error::Learner {
                    what: "the step of the optimizer".to_owned(),
                    problem: format!(
                        "TrainStep::optimize has changed parameter {}, which the optimizer does not update. Under a \
                         strategy that shards, a replica has new values of its own parameters only by then, and \
                         replicas could compute different values; use a strategy that does not shard",
                        path_of(after, place)
                    ),
                });
            }
        }
        Ok(())
    }

    /// Returns whether a replica with this part updates a parameter: it owns it, or every replica does.
    fn has(&self, part: usize, id: ParamId) -> bool {
        self.part_of.get(&id).is_none_or(|owner| *owner == part)
    }

    /// Returns the owners' values of all owned parameters.
    ///
    /// # Ordering
    /// All replicas of the shard group call this, after the same step.
    pub(super) fn exchange<M: Module>(&self, context: &ReplicaContext, model: &M) -> Result<HashMap<Place, Value>> {
        let groups = context.shard_groups().ok_or_else(|| failed("the strategy has no shard groups"))?;
        let part = groups.gathers().rank().index();
        // burn's optimizer updates the first parameter of an id, also if that is frozen and another is not.
        let values = values(model, |(id, visit)| visit == 0 && self.part_of.contains_key(&id))?;
        let mut received = HashMap::new();
        for OfType { dtype, parameters, counts } in &self.of_types {
            with_dtype!(*dtype, T => {
                let mut all: Vec<T> = Vec::with_capacity(counts.iter().sum());
                for (id, shape) in parameters {
                    match values.get(&(*id, 0)).filter(|_| self.has(part, *id)) {
                        Some((value, _)) => all.extend_from_slice(whole(value.clone()).storage::<T>()),
                        None => all.resize(all.len() + shape.iter().product::<usize>(), T::default()),
                    }
                }
                let all = groups.gathers().parts(counts).start().all_gather_in_place(all)?.wait()?;
                let mut rest = &all[..];
                for (id, shape) in parameters {
                    let (value, after) = rest.split_at(shape.iter().product());
                    rest = after;
                    let is_trained = values.get(&(*id, 0)).is_some_and(|(_, is_trained)| *is_trained);
                    received.insert((*id, 0), (made(shape, BufferRef::from(value))?, is_trained));
                }
            });
        }
        Ok(received)
    }

    /// Returns a part of an optimizer's state: that of the parameters which a replica with this part updates.
    pub(super) fn part_of_state(&self, state: &[u8], part: usize) -> Result<Vec<u8>> {
        joined([state], |id| self.has(part, id))
    }

    /// Returns the whole state of the optimizer, in the chief's process; `None` in others. `learners` are those of this
    /// process's replicas.
    ///
    /// # Ordering
    /// All processes call this, outside `run`.
    pub(super) fn whole_state<M: LearnerModel>(
        &self,
        strategy: &Strategy,
        learners: impl Iterator<Item = Learner<M>>,
        store: &EventStoreClient,
    ) -> Result<Option<Vec<u8>>> {
        let Some(sharding) = strategy.sharding() else { return Ok(None) };
        let (first, places) = (strategy.topology().first_replica(), self.ids.places());
        let mut own = Vec::new();
        for (local, learner) in learners.enumerate() {
            let replica = first + local;
            // Other shard groups mirror the first.
            own.push(match replica < self.parts {
                true => {
                    let state = self.part_of_state(&optimizer_state(&learner, store)?, sharding.part_of(replica))?;
                    self.ids.translated(&state, &places)?
                }
                false => Vec::new(),
            });
        }
        let lengths = strategy.on_shard_groups(|local, groups| {
            let mut lengths = vec![0; self.parts];
            lengths[groups.gathers().rank().index()] = own[local].len() as u64;
            Ok::<_, Error>(Some(groups.gathers().start().all_reduce(lengths, ReduceOp::Sum)?))
        })?;
        let counts =
            |local: usize| -> Vec<usize> { lengths[local].iter().flatten().map(|length| *length as usize).collect() };
        let gathered = strategy.on_shard_groups(|local, groups| {
            let (counts, state) = (counts(local), std::mem::take(&mut own[local]));
            let whole = if groups.gathers().rank() == Rank(0) { vec![0; counts.iter().sum()] } else { Vec::new() };
            Ok::<_, Error>(Some(groups.gathers().parts(&counts).start().gather(state, whole, Rank(0))?))
        })?;
        if !strategy.is_chief() {
            return Ok(None);
        }
        let mut gathered = gathered.into_iter().flatten().map(|[_, whole]| whole);
        let whole = gathered.next().ok_or_else(|| failed("nothing was gathered"))?;
        let mut rest = &whole[..];
        let states = counts(0).into_iter().map(|length| {
            let (state, after) = rest.split_at(length.min(rest.len()));
            rest = after;
            state
        });
        places.translated(&joined(states, |_| true)?, &self.ids).map(Some)
    }
}

/// Joins states of optimizers in burn's format, of the parameters that `is_kept` accepts. Of an entry that several
/// states have, the first is taken.
fn joined<'s>(states: impl IntoIterator<Item = &'s [u8]>, is_kept: impl Fn(ParamId) -> bool) -> Result<Vec<u8>> {
    let mut all = State::default();
    for state in states {
        all.add(State::read(Bytes::from_bytes_vec(state.to_vec()))?, |id| is_kept(ParamId::from(id)));
    }
    Ok(all.write()?.to_vec())
}

fn failed(problem: impl std::fmt::Display) -> Error {
    Error::Learner { what: "the optimizer's state, which is in parts".to_owned(), problem: problem.to_string() }
}

/// The gradients of the parameters that a replica updates, and the ids of these.
pub(super) struct Updates {
    pub(super) gradients: GradientsParams,
    pub(super) updated: HashSet<ParamId>,
}

struct Own<'a> {
    owners: &'a Owners,
    part: usize,
    from: GradientsParams,
    own: Updates,
}

impl ModuleVisitor for Own<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.from.remove::<D>(param.id).filter(|_| self.owners.has(self.part, param.id));
        if let Some(gradient) = gradient {
            self.own.gradients.register(param.id, gradient);
            self.own.updated.insert(param.id);
        }
    }
}
