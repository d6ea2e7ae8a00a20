//! The same settings and the same initial state on all replicas.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use burn::module::{Flag, Module, ModuleVisitor, Param, ParamId};
use burn::optim::OptimizerRecord;
use burn::optim::lr_scheduler::LrSchedulerRecord;
use burn::store::ModuleRecord;
use burn::tensor::{Bool, Bytes, Device, Int, Tensor};
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, LearningCheckpointer};
use distribute_device::DeviceKind;
use distribute_strategy::Strategy;
use distribute_values::{HostTensor, TensorStorage};
use parking_lot::Mutex;

use super::ids::Ids;
use crate::backend::device_of;
use crate::{Error, Result, visit};

/// Refuses tensor groups, since the learner's replicas have whole models, local updates, since it saves and evaluates
/// one replica's model without a synchronization, and a process of an elastic job that has not joined the others.
pub(super) fn check_replicas(strategy: &Strategy) -> Result<()> {
    strategy.check_joined()?;
    if strategy.devices().iter().any(|device| device.kind() == Some(DeviceKind::Tpu)) {
        return Err(Error::Learner {
            what: "burn's learner".to_owned(),
            problem: "its steps run backward themselves, and cannot be compiled for a TPU; train by Trainer or by \
                run_step"
                .to_owned(),
        });
    }
    if strategy.extended().local_updates().is_some() {
        return Err(Error::Learner {
            what: "burn's learner".to_owned(),
            problem: format!(
                "under {} replicas update their own models, and the learner would save and evaluate one of them; train \
                 by Trainer or by an Optimizer",
                strategy.name()
            ),
        });
    }
    match strategy.tensor_parallel() {
        1 => Ok(()),
        ranks => Err(Error::Learner {
            what: "burn's learner".to_owned(),
            problem: format!(
                "the strategy has groups of {ranks} tensor ranks, and the learner's models are not split; leave \
                 tensor_parallel out, or train by Trainer or by an Optimizer"
            ),
        }),
    }
}

/// Returns the device of a local replica: the model's, if that is one of Flex, since it knows whether activations are
/// recomputed.
pub(super) fn device<M: Module>(strategy: &Strategy, model: &M, local: usize) -> Result<Device> {
    let flex = device_of(strategy, local)?;
    match model.devices().into_iter().find(|own| own.clone().inner() != flex.clone().inner()) {
        Some(other) => Err(Error::Learner {
            what: "burn's learner".to_owned(),
            problem: format!("the model is on {other:?}; build it on Device::flex().autodiff()"),
        }),
        None => Ok(model.devices().into_iter().next().filter(Device::is_autodiff).unwrap_or(flex)),
    }
}

/// Warns of trained parameters that are clones of another one: burn does not tie them.
pub(super) fn warn_of_clones<M: Module>(model: &M) {
    for (first, clone) in clones(model) {
        distribute_notice::warn!(
            "parameters {first} and {clone} have one id, as clones have, and burn's optimizer makes one update for \
             each id: {first} is updated, by the gradient of its last clone that has one, and {clone} stays as it is. \
             To tie weights, keep one parameter and use its val() in both places"
        );
    }
}

/// Returns the paths of the trained parameters whose id another one has that is visited earlier, after the path of that
/// one.
fn clones<M: Module>(model: &M) -> Vec<(String, String)> {
    let (mut firsts, mut found) = (HashMap::new(), Vec::new());
    visit::each_float(model, |path, id, is_trained| match firsts.entry(id) {
        Entry::Occupied(first) if is_trained() => found.push((String::clone(first.get()), path.to_owned())),
        Entry::Occupied(_) => {}
        Entry::Vacant(place) => drop(place.insert(path.to_owned())),
    });
    found
}

/// Returns the ids of a model's running statistics, each once.
///
/// # Errors
/// [`Error::Learner`] if layers share a statistic, and the process has several replicas: each of these needs statistics
/// of its own, and burn offers no way to give layers one of another model in common.
pub(super) fn statistics(described: Vec<visit::Described>, locals: usize) -> Result<Vec<ParamId>> {
    let mut first: Vec<(ParamId, String)> = Vec::new();
    for one in described.into_iter().filter(|one| one.is_statistic) {
        match first.iter().find(|(id, _)| *id == one.id) {
            Some((_, path)) if locals > 1 => {
                return Err(Error::Learner {
                    what: "burn's learner".to_owned(),
                    problem: format!(
                        "{path} and {} are one running statistic, of a layer and its clone, and the {locals} replicas \
                         of this process need their own; give each layer its own normalization, or start a process \
                         for each replica",
                        one.path
                    ),
                });
            }
            Some(_) => {}
            None => first.push((one.id, one.path)),
        }
    }
    Ok(first.into_iter().map(|(id, _)| id).collect())
}

/// Compares settings, one per line, and the model with those of the other workers.
///
/// # Errors
/// [`SettingsDiffer`](distribute_strategy::Error::SettingsDiffer) names the first that differs.
pub(super) fn compare<M: Module>(strategy: &Strategy, model: &M, mut settings: Vec<String>) -> Result<()> {
    if strategy.topology().workers() == 1 {
        return Ok(());
    }
    let mut described = Described::default();
    model.visit(&mut described);
    settings.extend(described.lines);
    strategy.run_with((), |context, ()| Ok::<_, Error>(context.compare_settings(settings.clone())?))?;
    Ok(())
}

/// Gives a learner the chief's parameters, and its states of optimizer and scheduler. `is_restored` says whether burn
/// has restored this worker's learner from a checkpoint; only the chief's matters.
///
/// Parameters keep their ids, which groups of the optimizer and of the scheduler may have. If the chief is restored,
/// its ids are the checkpoint's, and all workers take these, so that groups act alike on all of them.
pub(super) fn equalise<M: LearnerModel>(
    strategy: &Strategy,
    learner: &mut Learner<M>,
    store: &EventStoreClient,
    is_restored: bool,
) -> Result<()> {
    if strategy.topology().workers() == 1 {
        return Ok(());
    }
    let ids = Ids::of(&learner.model());
    let own = if strategy.is_chief() {
        let [model, optimizer, scheduler] = states(learner, store)?;
        [model, ids.translated(&optimizer, &ids.places())?, scheduler]
    } else {
        Default::default()
    };
    let mut header: Vec<u64> = own.iter().map(|state| state.len() as u64).collect();
    header.push(u64::from(is_restored));
    let header = first(strategy, &HostTensor::new(&[header.len()], header)?)?.to_elements::<u64>()?;
    let [lengths @ .., is_restored] = &header[..] else { return Ok(()) };
    let total = lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(usize::try_from(*length).ok()?));
    let mut all = own.concat();
    let room = total.ok_or(()).and_then(|total| {
        all.try_reserve_exact(total.saturating_sub(all.len())).map_err(drop)?;
        all.resize(total, 0);
        Ok(total)
    });
    let Ok(total) = room else {
        return Err(failed(format!("its sizes are {lengths:?} bytes, which this worker has no memory for")));
    };
    let all = first(strategy, &HostTensor::new(&[total], all)?)?.to_elements::<u8>()?;
    if !strategy.is_chief() {
        let mut rest = &all[..];
        let mut next = |length: u64| {
            let (state, after) = rest.split_at((length as usize).min(rest.len()));
            rest = after;
            state
        };
        let [model, optimizer, scheduler] = lengths[..] else { return Ok(()) };
        let model = next(model);
        let model = if *is_restored == 1 { model.to_vec() } else { ids.of_model(model)? };
        learner.load_model(record::<ModuleRecord>(&model)?);
        let ids = Ids::of(&learner.model());
        learner.load_optim(record::<OptimizerRecord>(&ids.places().translated(next(optimizer), &ids)?)?);
        learner.load_scheduler(record::<LrSchedulerRecord>(next(scheduler))?);
    }
    Ok(())
}

/// Returns the learning rate of each parameter, one per line, after a step of the scheduler.
pub(super) fn learning_rates<M: LearnerModel>(learner: &Learner<M>) -> Vec<String> {
    let (rates, mut lines) = (learner.lr_current(), Vec::new());
    visit::each_float(&learner.model(), |path, id, _| {
        lines.push(format!("learning rate of {path}: {}", rates.lr_from_param(id, Some(path))));
    });
    lines
}

/// Returns the chief's value.
fn first<T: distribute_device::Element>(strategy: &Strategy, value: &HostTensor<T>) -> Result<HostTensor<T>>
where
    HostTensor<T>: TensorStorage<distribute_values::Host>,
{
    let copies = strategy.broadcast_to(value)?;
    Ok(copies.values()[0].clone())
}

pub(super) fn record<R: Checkpoint>(bytes: &[u8]) -> Result<R> {
    R::checkpoint_from_bytes(Bytes::from_bytes_vec(bytes.to_vec())).map_err(|error| failed(format!("{error:?}")))
}

fn failed(problem: String) -> Error {
    Error::Learner { what: "the chief's state".to_owned(), problem }
}

/// Returns the bytes of a learner's parameters, optimizer and scheduler.
pub(super) fn states<M: LearnerModel>(learner: &Learner<M>, store: &EventStoreClient) -> Result<[Vec<u8>; 3]> {
    let (model, optimizer, scheduler) = records(learner, store);
    Ok([model.bytes()?, optimizer.bytes()?, scheduler.bytes()?])
}

/// Returns the bytes of the state of a learner's optimizer.
pub(super) fn optimizer_state<M: LearnerModel>(learner: &Learner<M>, store: &EventStoreClient) -> Result<Vec<u8>> {
    records(learner, store).1.bytes()
}

/// Returns a learner's records. burn gives those of optimizer and scheduler to checkpointers only.
fn records<M: LearnerModel>(
    learner: &Learner<M>,
    store: &EventStoreClient,
) -> (Kept<ModuleRecord>, Kept<OptimizerRecord>, Kept<LrSchedulerRecord>) {
    let kept = (Kept::default(), Kept::default(), Kept::default());
    let mut checkpointer = LearningCheckpointer::new(
        AsyncCheckpointer::new(kept.0.clone()),
        AsyncCheckpointer::new(kept.1.clone()),
        AsyncCheckpointer::new(kept.2.clone()),
        Box::new(Save),
    );
    checkpointer.checkpoint(learner, 0, store);
    // Waits for its threads.
    drop(checkpointer);
    kept
}

/// A checkpointer that keeps a record in memory.
struct Kept<R>(Arc<Mutex<Option<R>>>);

impl<R> Default for Kept<R> {
    fn default() -> Kept<R> {
        Kept(Arc::default())
    }
}

impl<R> Clone for Kept<R> {
    fn clone(&self) -> Kept<R> {
        Kept(self.0.clone())
    }
}

impl<R: Checkpoint> Kept<R> {
    fn bytes(&self) -> Result<Vec<u8>> {
        let record = self.0.lock().take().ok_or_else(|| failed("burn has not saved it".to_owned()))?;
        Ok(record.checkpoint_into_bytes().map_err(|error| failed(format!("{error:?}")))?.to_vec())
    }
}

impl<R: Checkpoint> Checkpointer<R> for Kept<R> {
    fn save(&self, _: usize, record: R) -> Result<(), CheckpointerError> {
        *self.0.lock() = Some(record);
        Ok(())
    }

    fn delete(&self, _: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _: usize) -> Result<R, CheckpointerError> {
        self.0.lock().take().ok_or_else(|| CheckpointerError::Unknown("nothing was saved".to_owned()))
    }
}

struct Save;

impl CheckpointingStrategy for Save {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

/// The paths, shapes and types of a model's tensors, and its layers' flags.
#[derive(Default)]
struct Described {
    path: Vec<String>,
    /// The path of the first floating-point parameter of each id.
    first: HashMap<ParamId, String>,
    lines: Vec<String>,
}

impl Described {
    fn add(&mut self, shape: &[usize], dtype: impl std::fmt::Debug, kind: &str) {
        self.lines.push(format!("parameter {}: {shape:?} of {dtype:?}{kind}", self.path.join(".")));
    }
}

impl ModuleVisitor for Described {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let mut kind = if value.is_require_grad() { "" } else { ", not trained" }.to_owned();
        match self.first.entry(param.id) {
            Entry::Occupied(first) => kind += &format!(", a clone of {}", first.get()),
            Entry::Vacant(place) => drop(place.insert(self.path.join("."))),
        }
        self.add(&value.dims(), value.dtype(), &kind);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(&param.dims(), param.dtype(), "");
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(&param.dims(), param.dtype(), "");
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.lines.push(format!("flag {}: {}", self.path.join("."), flag.is_enabled()));
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
    use distribute_strategy::MirroredStrategy;

    use super::*;

    #[derive(Module, Debug)]
    struct Layers {
        first: Linear,
        dropout: Dropout,
        tied: Linear,
        teacher: Linear,
    }

    fn layers() -> Layers {
        let first = LinearConfig::new(2, 1).with_bias(false).init(&Device::flex().autodiff());
        // Clones of a parameter without a value would be frozen with it.
        let _ = first.weight.val();
        let (tied, teacher) = (first.clone(), first.clone().no_grad());
        Layers { first, dropout: DropoutConfig::new(0.5).init(), tied, teacher }
    }

    #[test]
    fn descriptions_tell_clones_frozen_parameters_and_flags() {
        let mut described = Described::default();
        layers().visit(&mut described);
        let expected = [
            "parameter first.weight: [2, 1] of F32",
            "flag dropout.training: true",
            "parameter tied.weight: [2, 1] of F32, a clone of first.weight",
            "parameter teacher.weight: [2, 1] of F32, not trained, a clone of first.weight",
        ];
        assert_eq!(described.lines, expected);
    }

    #[test]
    fn clones_are_told_unless_they_are_frozen() {
        assert_eq!(clones(&layers()), [("first.weight".to_owned(), "tied.weight".to_owned())]);
    }

    #[test]
    fn the_device_of_the_model_decides_whether_activations_are_recomputed() {
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let chosen = |on: &Device| {
            let chosen = device(&strategy, &LinearConfig::new(2, 2).init(on), 1).unwrap();
            assert!(chosen.is_autodiff());
            chosen.gradient_checkpointing_strategy()
        };
        let plain = chosen(&Device::flex());
        assert_eq!(chosen(&Device::flex().autodiff()), plain);
        assert_ne!(chosen(&Device::flex().autodiff().gradient_checkpointing()), plain);
    }
}
