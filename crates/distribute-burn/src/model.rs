//! Models with one copy per replica.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use burn::module::{Module, ParamId};
use burn::tensor::Device;
use distribute_optim::Trainable;
use distribute_optim::backend::{Parameters, Tape, Variable, check_and_share, compare, is_short};
use distribute_strategy::{Recoverable, ReplicaArgs, ReplicaContext, Strategy, counted};
use distribute_train::from_chief;
use distribute_types::{ErrorClass, FNV64, fnv1a_64};
use distribute_values::{PerReplica, TensorStorage};

use crate::backend::{SEED_STEP, device_of, drawn_seed};
use crate::extract::extract;
use crate::hook::{Attach, Copy, Uses, UsesOfReplicas, with_whole};
use crate::integers::{self, Modules};
use crate::precision::as_type_of;
use crate::statistics::Statistics;
use crate::visit::{check_alike, describe, described_lines, drawing_layer, read};
use crate::{Burn, BurnTensor, Error, Inputs, Result};

/// Construction of burn models under a strategy.
pub trait BurnStrategy {
    /// Builds a model once per replica of this process. All replicas get equal initial values: those of the first
    /// replica, and with several workers the chief's. Parameters of integers and of truth values are frozen variables.
    ///
    /// Parameters of equal ids, as clones have, are tied, and one variable, if they are trained alike and have equal
    /// values. A frozen clone, such as the teacher of a student, is a variable of its own.
    ///
    /// `build` takes the replica's device, on which automatic differentiation is enabled, and returns the model. burn
    /// draws initial values from its device's generator, so [`Device::seed`] makes them reproducible.
    ///
    /// Dropout draws from the same generator, of which each process has one. So that workers which set equal seeds do
    /// not drop the same elements, each worker but the chief sets another seed, drawn from its generator and mixed with
    /// its rank, once a model with dropout, Gaussian noise or randomized ReLUs is built. A later [`Device::seed`]
    /// undoes this, and random numbers that the forward pass of another model draws itself are equal on workers of
    /// equal seeds. The replicas of one process draw in the order in which their threads come to it.
    ///
    /// # Errors
    /// [`Error::ReplicasDiffer`] or [`Error::Optim`] with [`ModelDiffers`](distribute_optim::Error::ModelDiffers) if
    /// replicas or workers build different models; [`Error::Reparameterized`] for a model with LoRA or another
    /// reparameterization; [`Error::Device`] if a replica is not on a CPU; [`Error::Optim`] with
    /// [`Indivisible`](distribute_optim::Error::Indivisible) or
    /// [`SplitDiffers`](distribute_optim::Error::SplitDiffers) if a parameter of a tensor-parallel layer cannot be
    /// split among the ranks of a tensor group; [`Error::DrawnByRanks`] if the strategy has tensor groups and the model
    /// has dropout; [`Error::Collective`] if a worker is missing or fails, with the reason of the one that cannot build
    /// the model.
    fn scope<M: Module + Sync + 'static>(&self, build: impl FnMut(&Device) -> M) -> Result<Model<M>>;

    /// Runs `body` once on each replica as [`run_with`](Strategy::run_with) does, for a step whose results are tensors.
    /// Under `TpuStrategy` the step is compiled; under other strategies this is `run_with`.
    ///
    /// There `body` is called in each step to record what it computes, without values; a step that equals an earlier
    /// one is not compiled again. All replicas must compute the same, from arrays of equal shapes that
    /// [`BurnContext::tensor`](crate::BurnContext::tensor) makes tensors. `body` must not read tensors, may call
    /// `minimize` once, and may use one model, without running statistics. Results are on the host.
    ///
    /// # Errors
    /// [`Error::Strategy`] and the errors of `body` in the cases of [`run_with`](Strategy::run_with). Under
    /// `TpuStrategy` also [`Error::Trace`] if a step cannot be recorded, or differs between replicas,
    /// [`Error::Lowering`] if it has an operation that cannot be compiled, and [`Error::Accelerator`] if a device
    /// fails.
    ///
    /// # Examples
    /// ```
    /// use burn::nn::LinearConfig;
    /// use distribute_burn::{BurnContext, BurnStrategy, Error, Sgd};
    /// use distribute_input::{Array, Dataset};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = strategy.scope(|device| LinearConfig::new(2, 1).init(device))?;
    /// let optimizer = Sgd::new(0.1).build(&model)?;
    /// let data = Dataset::from_tensor_slices(Array::new([8, 2], vec![0.5f32; 16])?).batch(4);
    /// for batch in strategy.distribute_dataset(&data)? {
    ///     let losses = strategy.run_step((&model, &optimizer, batch?), |context, (model, optimizer, x)| {
    ///         let loss = context.average_loss(model.forward(context.tensor::<2>(&x)?).square(), 4);
    ///         optimizer.minimize(context, &loss)?;
    ///         Ok::<_, Error>(loss)
    ///     })?;
    ///     assert_eq!(losses.len(), 2);
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.distribute.Strategy.run` inside a `tf.function`.
    fn run_step<A, R, E>(
        &self,
        args: A,
        body: impl Fn(&ReplicaContext, A::Local) -> Result<R, E> + Sync,
    ) -> Result<PerReplica<R>, E>
    where
        A: ReplicaArgs,
        R: Inputs,
        E: From<distribute_strategy::Error> + From<Error> + std::fmt::Display + Send;
}

impl BurnStrategy for Strategy {
    fn run_step<A, R, E>(
        &self,
        args: A,
        body: impl Fn(&ReplicaContext, A::Local) -> Result<R, E> + Sync,
    ) -> Result<PerReplica<R>, E>
    where
        A: ReplicaArgs,
        R: Inputs,
        E: From<distribute_strategy::Error> + From<Error> + std::fmt::Display + Send,
    {
        #[cfg(feature = "pjrt")]
        if self.pjrt().is_some() {
            return step::compiled(self, args, body);
        }
        self.run_with(args, body)
    }

    fn scope<M: Module + Sync + 'static>(&self, mut build: impl FnMut(&Device) -> M) -> Result<Model<M>> {
        let ranks = self.tensor_parallel();
        let built = self.within(|| {
            let replicas = self.num_local_replicas();
            let mut models = Vec::with_capacity(replicas);
            for local in 0..replicas {
                models.push(build(&device_of(self, local)?));
            }
            if let (true, Some(path)) = (ranks > 1, drawing_layer(&models[0])) {
                return Err(Error::DrawnByRanks { path, ranks });
            }
            let described = describe(&models[0])?;
            let lines = described_lines(&described, &models[0]);
            for (replica, model) in models.iter().enumerate().skip(1) {
                check_alike(&lines, &described_lines(&describe(model)?, model), replica)?;
            }
            // Before values are exchanged; check_and_share also compares their types.
            compare::<Burn>(self, &lines)?;
            let (first, mut variables, of_path) = extract(self, models.remove(0), &described)?;
            models.insert(0, first);
            variables.extend(integers::variables(self, &models[0])?);
            check_and_share(self, &variables)?;
            let models = integers::with_variables(models, &variables)?;
            draw_apart(self, &models[0])?;
            let trained: Vec<Arc<AtomicBool>> =
                variables.iter().map(|variable| Arc::new(AtomicBool::new(variable.is_trainable()))).collect();
            let untracked = variables.iter().filter(|variable| !variable.is_trainable());
            let untracked = untracked.map(|variable| variable.name().to_owned()).collect();
            let tapes: Vec<Arc<Tape<BurnTensor>>> = (0..replicas).map(|_| Tape::new()).collect();
            let (number, is_compiled) = (MODELS.fetch_add(1, Ordering::Relaxed), is_compiled(self));
            let uses: Vec<Arc<Uses>> = tapes.iter().map(|tape| Uses::new(tape.clone(), of_path.len())).collect();
            let attached = models.into_iter().zip(&uses).enumerate().map(|(local, (model, uses))| {
                let copies = copies(&variables, &trained, (local, ranks), uses, (number, is_compiled));
                let used = of_path.iter().filter_map(|(path, index)| Some((path.clone(), copies[*index].clone()?)));
                model.apply_reparameterization(Attach { copies: &used.collect() })
            });
            let replicas = Arc::new(attached.collect::<Vec<M>>());
            let of_visits: Vec<usize> = described.iter().filter_map(|one| of_path.get(&one.path).copied()).collect();
            let statistics = Statistics::of(&replicas, &variables, &of_visits).map(Arc::new);
            if let Some(statistics) = &statistics {
                statistics.write_all();
                let recoverable: Arc<dyn Recoverable> = statistics.clone();
                self.recover(Arc::downgrade(&recoverable));
            }
            let uses = Arc::new(UsesOfReplicas(uses));
            let recoverable: Arc<dyn Recoverable> = uses.clone();
            self.recover(Arc::downgrade(&recoverable));
            // A failed run is undone in these as long as this lives.
            let held: Arc<dyn Any + Send + Sync> = Arc::new((uses, statistics.clone()));
            let parameters = Arc::new(Parameters::new(self, variables, tapes, Some(held)));
            Ok(Model {
                replicas: Modules::new(replicas),
                parameters,
                trained,
                untracked,
                statistics,
                is_compiled,
                #[cfg(feature = "pjrt")]
                number,
                #[cfg(feature = "pjrt")]
                programs: crate::pjrt::Programs::default(),
            })
        });
        told(self, built)
    }
}

/// Reports a failure of this worker to the others, which wait for its variables.
fn told<M>(strategy: &Strategy, built: Result<M>) -> Result<M> {
    match built {
        // All workers have it.
        Err(Error::Optim(distribute_optim::Error::ModelDiffers { .. })) => built,
        built => strategy.report_failure_as(built, ErrorClass::failure_kind),
    }
}

#[cfg(feature = "pjrt")]
mod step;

/// Sets burn's generator to another seed on every worker but the chief if the model has layers that draw random
/// numbers, so that they draw different ones on workers that have set the same seed. Called when initial values exist.
pub(crate) fn draw_apart<M: Module>(strategy: &Strategy, model: &M) -> Result<()> {
    let worker = strategy.topology().worker() as u64;
    if worker > 0 && drawing_layer(model).is_some() {
        Device::flex().seed(drawn_seed()?.wrapping_add(worker.wrapping_mul(SEED_STEP)));
    }
    Ok(())
}

/// Returns one replica's copies by variable, without those of running statistics, which layers hold themselves.
fn copies(
    variables: &[Variable<Burn>],
    trained: &[Arc<AtomicBool>],
    (local, ranks): (usize, usize),
    uses: &Arc<Uses>,
    of_model: (u64, bool),
) -> Vec<Option<Arc<Copy>>> {
    let copy = |(index, (variable, trained)): (usize, (&Variable<Burn>, &Arc<AtomicBool>))| {
        let copy = Copy {
            index,
            name: variable.name().to_owned(),
            id: id_of(variable.name()),
            value: variable.components()[local].clone(),
            layout: variable.layout().cloned(),
            is_split: variable.tensor_split().is_some(),
            parts: parts(variable, local % ranks, ranks).unwrap_or_default(),
            trained: trained.clone(),
            uses: uses.clone(),
            is_compiled: of_model.1,
            #[cfg(feature = "pjrt")]
            model: of_model.0,
            #[cfg(feature = "pjrt")]
            has_statistics: variables.iter().any(Variable::is_statistic),
        };
        (!variable.is_statistic()).then(|| Arc::new(copy))
    };
    let copies: Vec<Option<Arc<Copy>>> = variables.iter().zip(trained).enumerate().map(copy).collect();
    uses.gathers.set_copies(copies.iter().map(|copy| copy.as_ref().map_or_else(Weak::new, Arc::downgrade)).collect());
    copies
}

/// Returns the parts of a sharded variable in the order of its layout: of its slice, for the ranks at one place of
/// their tensor groups. Returns `None` if it is not sharded, or if this process lacks one.
fn parts(variable: &Variable<Burn>, place: usize, ranks: usize) -> Option<Vec<BurnTensor>> {
    let (layout, components) = (variable.layout()?, variable.components());
    let component = |part: usize| {
        let mut of_place = (place..components.len()).step_by(ranks);
        of_place.find(|local| layout.part_of(*local) == part).map(|local| components[local].clone())
    };
    (0..layout.parts()).map(component).collect()
}

/// Returns the id of the parameters of a variable. burn draws ids at random; these are equal on all replicas and in all
/// processes, so that the state of an optimizer of burn can be saved by one and restored by another.
pub(crate) fn id_of(name: &str) -> ParamId {
    ParamId::from(fnv1a_64(FNV64, name.bytes()))
}

/// A model with one copy per replica of this process.
///
/// Pass a reference to it to `run`; each replica then gets its own copy, a plain module of burn. Its parameters are
/// used by [`val`](burn::module::Param::val), as burn's modules do; the values that the module itself holds are
/// placeholders of NaN. [`to_module`](Model::to_module) returns a module with the values inside, to be saved by burn.
///
/// Under a strategy that shards parameters, a large one is gathered when it is used, dropped afterwards, and gathered
/// again when backward needs it. Under one with tensor groups, each rank has its slice of the parameters of
/// tensor-parallel layers. A strategy that does both shards each slice.
pub struct Model<M> {
    replicas: Modules<M>,
    parameters: Arc<Parameters<Burn>>,
    /// Whether a variable gets gradients, by index.
    trained: Vec<Arc<AtomicBool>>,
    /// The names of the variables to which burn gave no gradients when the model was built.
    untracked: HashSet<String>,
    statistics: Option<Arc<Statistics<M>>>,
    /// Whether it runs in compiled programs only, which read and write its variables.
    is_compiled: bool,
    #[cfg(feature = "pjrt")]
    number: u64,
    #[cfg(feature = "pjrt")]
    programs: crate::pjrt::Programs,
}

/// The number of models that were made.
static MODELS: AtomicU64 = AtomicU64::new(0);

/// Returns whether models of a strategy run in compiled programs only.
fn is_compiled(strategy: &Strategy) -> bool {
    #[cfg(feature = "pjrt")]
    return strategy.pjrt().is_some();
    #[cfg(not(feature = "pjrt"))]
    {
        let _ = strategy;
        false
    }
}

impl<M> Trainable for Model<M> {
    type Library = Burn;

    fn parameters(&self) -> &Arc<Parameters<Burn>> {
        &self.parameters
    }
}

impl<M: Module + Sync + 'static> Model<M> {
    /// Returns the copy of one local replica. After training all copies are equal, up to statistics. References from
    /// before a checkpoint or a module with other integers was loaded have the former ones.
    pub fn replica(&self, local: usize) -> Option<&M> {
        self.replicas().get(local)
    }

    /// Returns the copy of this process's first replica.
    pub fn first(&self) -> &M {
        &self.replicas()[0]
    }

    /// Returns the variables, in the order in which burn visits the model's parameters; those of integers and of truth
    /// values come last.
    pub fn variables(&self) -> &[Variable<Burn>] {
        self.parameters.variables()
    }

    /// Returns a module of burn that is independent of the strategy, with the values of this moment, to be saved by
    /// burn or to be used elsewhere. Running statistics are the first replica's. Every process calls this, outside
    /// `run`.
    ///
    /// Under a strategy of local updates, such as `DilocoStrategy`, first call
    /// [`Optimizer::synchronize`](distribute_optim::Optimizer::synchronize), unless the last step was one that
    /// synchronizes.
    ///
    /// # Errors
    /// [`Error::Optim`] with [`Apart`](distribute_optim::Error::Apart) if replicas have made steps of their own since
    /// their variables were equal, or [`Torn`](distribute_optim::Error::Torn) if a failed step has left no whole
    /// variables. If weights are in parts, these errors of one process are errors of all: the others have its message,
    /// as [`Error::Train`] with [`Chief`](distribute_train::Error::Chief) or
    /// [`OnWorker`](distribute_train::Error::OnWorker); [`Error::Collective`] if a process is missing or fails.
    ///
    /// # Examples
    /// ```
    /// use burn::module::Module;
    /// use burn::nn::{Linear, LinearConfig};
    /// use distribute_burn::{BurnStrategy, Error};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = strategy.scope(|device| LinearConfig::new(3, 1).init(device))?;
    /// let module: Linear = model.to_module(&strategy)?.valid();
    /// assert_eq!(module.num_params(), 4);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn to_module(&self, strategy: &Strategy) -> Result<M> {
        let mut wholes = HashMap::new();
        let in_parts = |variable: &Variable<Burn>| variable.layout().is_some() || variable.tensor_split().is_some();
        let equal = self.parameters.check_equal().map_err(Error::from);
        match self.variables().iter().any(in_parts) {
            // Workers that find nothing wrong do not wait for the parts of one that does.
            true => from_chief(strategy, equal)?,
            false => equal?,
        }
        for (index, variable) in self.variables().iter().enumerate().filter(|(_, variable)| in_parts(variable)) {
            wholes.insert(index, variable.whole(strategy)?.flex());
        }
        if self.is_compiled {
            for (index, variable) in self.variables().iter().enumerate() {
                wholes.insert(index, variable.components()[0].fetched()?);
            }
            self.write_statistics();
        }
        // Validation has running statistics of its own.
        Ok(with_whole(wholes, || self.first().valid().materialize().train()))
    }

    /// Copies the values of a module, such as a pretrained one that burn has loaded, to all replicas. Values of another
    /// type are converted. Every process calls this with the same values, which [`audit`](Model::audit) compares.
    ///
    /// # Errors
    /// [`Error::ReplicasDiffer`] if the module has other parameters; [`Error::Range`] if one has values that the
    /// variable's type cannot hold; [`Error::LoadedLate`] if variables have 16 bits and the model has an optimizer. No
    /// value has then changed.
    pub fn load_module(&self, module: &M) -> Result<()> {
        let (mut own, given) = (describe(self.first())?, describe(module)?);
        let index_of = self.index_of_ids();
        for described in &mut own {
            if let Some(index) = index_of.get(&described.id.val()) {
                described.shape = self.variables()[*index].shape();
            }
        }
        check_alike(&described_lines(&own, self.first()), &described_lines(&given, module), 0)?;
        let has_16_bits = |variable: &&Variable<Burn>| variable.components()[0].dtype().is_ok_and(is_short);
        if let (Some(variable), true) = (self.variables().iter().find(has_16_bits), self.has_optimizer()) {
            return Err(Error::LoadedLate { name: variable.name().to_owned() });
        }
        let mut converted = Vec::new();
        for (described, value) in given.iter().zip(read(module)?) {
            if let Some(variable) = self.variables().iter().find(|variable| variable.name() == described.path) {
                converted.push((variable, as_type_of(variable, &value)?));
            }
        }
        let own = self.variables().iter().filter(|variable| integers::is_integers(variable));
        for (variable, (_, value)) in own.zip(integers::read(module)?) {
            converted.push((variable, integers::as_type_of(variable, &value)?));
        }
        for (variable, value) in converted {
            variable.overwrite(&value)?;
        }
        self.parameters().note_loaded();
        self.write_statistics();
        self.write_integers()
    }

    /// Compares the variables of all replicas in all processes, bit for bit, except running statistics. They are equal
    /// unless the program has written one of them without the optimizer. Every process calls this, outside `run`.
    ///
    /// # Errors
    /// [`Error::Optim`] with [`Diverged`](distribute_optim::Error::Diverged) for the first variable that differs;
    /// [`Error::Collective`] if a process is missing or fails.
    pub fn audit(&self, strategy: &Strategy) -> Result<()> {
        distribute_optim::audit(strategy, &self.parameters)
    }

    /// Excludes the variables whose names `frozen` accepts from training: no optimizer updates them, no gradient of
    /// theirs is computed. Returns their number. Call it while the model has no optimizer, with the same effect on
    /// every worker. Parameters that were frozen by burn before the model was built are excluded already.
    ///
    /// # Errors
    /// [`Error::FrozenLate`] while the model has an optimizer.
    ///
    /// # Source
    /// `trainable = False` of tf.keras's layers.
    pub fn freeze(&mut self, frozen: impl Fn(&str) -> bool) -> Result<usize> {
        self.set_trainable(true, frozen)
    }

    /// Includes frozen variables whose names `thawed` accepts in training again, if burn gave them gradients when the
    /// model was built. Returns their number. Call it while the model has no optimizer, with the same effect on every
    /// worker.
    ///
    /// # Errors
    /// [`Error::FrozenLate`] while the model has an optimizer.
    pub fn unfreeze(&mut self, thawed: impl Fn(&str) -> bool) -> Result<usize> {
        self.set_trainable(false, thawed)
    }

    fn has_optimizer(&self) -> bool {
        Arc::strong_count(&self.parameters) > 1
    }

    fn set_trainable(&mut self, from: bool, chosen: impl Fn(&str) -> bool) -> Result<usize> {
        let parameters = Arc::get_mut(&mut self.parameters).ok_or(Error::FrozenLate)?;
        let changed = parameters.set_trainable(from, |name| !self.untracked.contains(name) && chosen(name));
        for (variable, trained) in parameters.variables().iter().zip(&self.trained) {
            trained.store(variable.is_trainable(), Ordering::Release);
        }
        Ok(changed)
    }

    /// Returns the number of elements of all trainable variables.
    pub fn num_parameters(&self) -> usize {
        let trainable = self.variables().iter().filter(|variable| variable.is_trainable());
        trainable.map(|variable| variable.shape().iter().product::<usize>()).sum()
    }

    /// Brings the variables of running statistics up to date with the layers, which write their own.
    pub(crate) fn read_statistics(&self) -> Result<()> {
        // Programs write the variables themselves.
        let of_layers = self.statistics.as_ref().filter(|_| !self.is_compiled);
        of_layers.map_or(Ok(()), |statistics| statistics.read_all())
    }

    /// Brings the layers' running statistics up to date with the variables.
    pub(crate) fn write_statistics(&self) {
        if let Some(statistics) = &self.statistics {
            statistics.write_all();
        }
    }

    /// Brings the replicas' modules up to date with the variables of integers and of truth values.
    pub(crate) fn write_integers(&self) -> Result<()> {
        if !integers::are_equal(self.first(), self.variables())? {
            self.replicas.replace(integers::with_variables(self.replicas().to_vec(), self.variables())?);
        }
        Ok(())
    }

    /// Returns the index of each parameter's variable, by the parameter's id.
    pub(crate) fn index_of_ids(&self) -> HashMap<u64, usize> {
        self.variables().iter().enumerate().map(|(index, variable)| (id_of(variable.name()).val(), index)).collect()
    }

    #[cfg(feature = "pjrt")]
    pub(crate) fn programs(&self) -> &crate::pjrt::Programs {
        &self.programs
    }

    #[cfg(feature = "pjrt")]
    pub(crate) fn has_statistics(&self) -> bool {
        self.statistics.is_some()
    }

    /// Runs the model in the record that is being made, and returns the new values of its running statistics too, by
    /// the index of their variables, if it `trains`.
    #[cfg(feature = "pjrt")]
    pub(crate) fn recorded<R>(
        &self,
        trains: bool,
        run: impl FnOnce(&M) -> Result<R>,
    ) -> Result<(R, std::collections::BTreeMap<usize, burn_capture::TensorId>)> {
        crate::pjrt::begin_statistics();
        // A copy with running statistics of its own, in which those of the record are.
        let copy = if trains { self.first().valid().train() } else { self.first().valid() };
        let of_variable = |(index, variable): (usize, &Variable<Burn>)| variable.is_statistic().then_some(index);
        let variables: Vec<usize> = self.variables().iter().enumerate().filter_map(of_variable).collect();
        let places = self.statistics.as_ref().map(|statistics| statistics.places());
        let of_model =
            crate::statistics::OfModel { number: self.number, places, variables: &variables, all: self.variables() };
        crate::statistics::record(&copy, of_model);
        let result = run(&copy)?;
        if !trains {
            return Ok((result, std::collections::BTreeMap::new()));
        }
        let new = crate::statistics::recorded(&copy, of_model)?;
        Ok((result, variables.into_iter().zip(new).collect()))
    }

    pub(crate) fn replicas(&self) -> &Arc<Vec<M>> {
        self.replicas.last()
    }
}

impl<'a, M: Sync> ReplicaArgs for &'a Model<M> {
    type Local = &'a M;

    fn split(self, replicas: usize) -> distribute_strategy::Result<Vec<&'a M>> {
        counted(self.replicas.last().iter().collect(), replicas)
    }
}

#[cfg(test)]
mod tests;
