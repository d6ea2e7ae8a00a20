//! burn's own optimizers over all replicas.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use burn::grad_clipping::GradientClipping;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, Device, Tensor};
use burn_backend::ops::FloatTensorOps;
use burn_flex::{Flex, FlexTensor};
use distribute_device::DType;
use distribute_optim::Trainable;
use distribute_optim::backend::{LibraryOptimizer, Parameters, Reduced};
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;
use parking_lot::Mutex;

use crate::backend::{reshaped, whole};
use crate::hook::replaced;
use crate::model::id_of;
use crate::tensor::{flex_of, tensor_on};
use crate::{Burn, BurnTensor, Error, Model, Optimizer, Result, Variable};

pub(crate) mod state;

use state::State;

impl<M: Module + Sync + 'static> Model<M> {
    /// Builds an optimizer that reduces gradients over all replicas while backward runs, and updates parameters by one
    /// of burn's own optimizers. `describe` names it and its settings; workers compare them.
    ///
    /// Each replica has its own state, which is equal on all. The optimizers of this crate, such as
    /// [`Adam`](crate::Adam), write parameters in place and are faster.
    ///
    /// Under a strategy that shards parameters, the optimizer sees this replica's part of each large parameter, with
    /// all its elements in the last dimension, and its state is a part too. So it must treat every element alike; this
    /// is tried here for each such parameter, with the group of the optimizer that its path and id belong to. The same
    /// holds for parameters that are split among tensor ranks, in the shape of a part. Checkpoints have the whole
    /// state, which is restored on any number of replicas and under every strategy; checkpoints of parameters of
    /// another type than f32 are refused.
    ///
    /// # Errors
    /// [`Error::Optim`] if the learning rate is out of range; [`Error::NotElementwise`] for LAMB, Muon, burn's clipping
    /// by norm and others that compute with whole parameters, if these are sharded or split.
    ///
    /// # Examples
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::AdamWConfig;
    /// use burn::tensor::Tensor;
    /// use distribute_burn::{BurnContext, BurnStrategy, Error};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = strategy.scope(|device| LinearConfig::new(3, 1).init(device))?;
    /// let config = AdamWConfig::new().with_weight_decay(0.01);
    /// let optimizer = model.optimizer(config.init(), 1e-3, format!("{config:?}"))?;
    /// strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
    ///     let y = model.forward(Tensor::<2>::ones([2, 3], &context.burn_device()?));
    ///     optimizer.minimize(context, &context.average_loss(y.square(), 4))
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn optimizer(
        &self,
        optimizer: ModuleOptimizer,
        learning_rate: f64,
        describe: impl Into<String>,
    ) -> Result<Optimizer> {
        let description = describe.into();
        let divided = || self.variables().iter().filter(|variable| is_in_parts(variable));
        let is_divided = divided().next().is_some();
        let updated = divided().filter(|variable| variable.is_trainable());
        if let Some(parameter) = first_of_wholes(&optimizer, updated.map(Variable::name)) {
            return Err(Error::NotElementwise { optimizer: description, parameter: parameter.to_owned() });
        }
        let replicas = self.replicas().iter().map(|_| Mutex::new(optimizer.clone())).collect();
        let library = OwnOptimizer {
            description,
            is_divided,
            models: self.replicas().clone(),
            parameters: self.parameters().clone(),
            index_of: self.index_of_ids(),
            replicas,
        };
        Optimizer::of_library(self, learning_rate, Arc::new(library))
    }
}

/// One of burn's optimizers, with a state for each replica.
struct OwnOptimizer<M> {
    description: String,
    /// Whether parameters, and thus its state, are parts.
    is_divided: bool,
    models: Arc<Vec<M>>,
    parameters: Arc<Parameters<Burn>>,
    /// The index of each parameter's variable, by the parameter's id, which is equal on all replicas.
    index_of: HashMap<u64, usize>,
    replicas: Vec<Mutex<ModuleOptimizer>>,
}

impl<M: Module + Sync + 'static> LibraryOptimizer<Burn> for OwnOptimizer<M> {
    fn describe(&self) -> String {
        self.description.clone()
    }

    fn apply(&self, local: usize, learning_rate: f64, gradients: Vec<Reduced<Burn>>) -> Result<()> {
        let copies = Copies { optimizer: self, local };
        let model = self.models[local].clone().map(&mut Load { copies: &copies });
        let mut given = Give {
            copies: &copies,
            gradients: gradients.into_iter().map(|reduced| (reduced.index, reduced.gradient)).collect(),
            params: GradientsParams::new(),
        };
        model.visit(&mut given);
        let Give { params, .. } = given;
        let model = self.replicas[local].lock().step(learning_rate, model, params);
        let mut store = Store { copies: &copies, seen: HashSet::new(), outcome: Ok(()) };
        model.visit(&mut store);
        store.outcome
    }

    fn copy(&self, from: usize, to: usize) {
        let state = self.replicas[from].lock().clone();
        *self.replicas[to].lock() = state;
    }

    fn save(&self, strategy: &Strategy) -> Result<Option<Vec<u8>>> {
        self.check_types("saved")?;
        let problem = |error| Error::OptimizerState { action: "saved", problem: format!("{error:?}") };
        let bytes = |replica: &Mutex<ModuleOptimizer>| replica.lock().into_bytes().map_err(problem);
        if !self.is_divided {
            return Ok(Some(bytes(&self.replicas[0])?.to_vec()));
        }
        let states = self.replicas.iter().map(|replica| State::read(bytes(replica)?));
        let whole = State::whole_on_chief(strategy, states.collect::<Result<_>>()?, |id| self.divided(id))?;
        whole.map(|state| Ok(state.write()?.to_vec())).transpose()
    }

    fn load(&self, state: &[u8]) -> Result<()> {
        self.check_types("restored")?;
        let problem = |error| Error::OptimizerState { action: "restored", problem: format!("{error:?}") };
        let restored = |bytes: Bytes| {
            let saved = state::names(bytes.clone())?;
            let optimizer = self.replicas[0].lock().clone().from_bytes(bytes).map_err(problem)?;
            // burn leaves out what the optimizer cannot use.
            let kept = state::names(optimizer.into_bytes().map_err(problem)?)?;
            match saved.symmetric_difference(&kept).next() {
                None => Ok(optimizer),
                Some(name) => {
                    let has = if saved.contains(name) { "has" } else { "lacks" };
                    let problem = format!(
                        "it {has} {name}, as the state of another kind of optimizer than {} does; restore it with the \
                         optimizer that saved it",
                        self.description
                    );
                    Err(Error::OptimizerState { action: "restored", problem })
                }
            }
        };
        let whole = Bytes::from_bytes_vec(state.to_vec());
        let restored: Vec<ModuleOptimizer> = if self.is_divided {
            let parts = State::read(whole)?.parts(self.replicas.len(), |id| self.divided(id))?;
            parts.into_iter().map(|part| restored(part.write()?)).collect::<Result<_>>()?
        } else {
            vec![restored(whole)?; self.replicas.len()]
        };
        for (replica, restored) in self.replicas.iter().zip(restored) {
            *replica.lock() = restored;
        }
        Ok(())
    }
}

impl<M> OwnOptimizer<M> {
    /// Refuses the state of parameters of another type than f32: burn converts what it reads to its default type, and
    /// the next step would panic.
    fn check_types(&self, action: &'static str) -> Result<()> {
        for variable in self.parameters.variables().iter().filter(|variable| variable.is_trainable()) {
            let dtype = variable.components()[0].dtype()?;
            if dtype != DType::F32 {
                let problem = format!(
                    "burn restores it in f32, and parameter {} is of {dtype}; use an optimizer of this crate, such as \
                     Adam",
                    variable.name()
                );
                return Err(Error::OptimizerState { action, problem });
            }
        }
        Ok(())
    }

    /// Returns the variable of the parameter with this id if it is in parts.
    fn divided(&self, id: Option<u64>) -> Option<&Variable> {
        self.parameters.variables().get(*self.index_of.get(&id?)?).filter(|variable| is_in_parts(variable))
    }
}

fn is_in_parts(variable: &Variable) -> bool {
    variable.layout().is_some() || variable.tensor_split().is_some()
}

/// One replica's copies of the variables, by the parameters' ids.
struct Copies<'a, M> {
    optimizer: &'a OwnOptimizer<M>,
    local: usize,
}

impl<M> Copies<'_, M> {
    fn of<const D: usize>(&self, param: &Param<Tensor<D>>) -> Option<(usize, &BurnTensor)> {
        let index = *self.optimizer.index_of.get(&param.id.val())?;
        let variable = self.optimizer.parameters.variables().get(index).filter(|variable| variable.is_trainable())?;
        Some((index, &variable.components()[self.local]))
    }
}

/// Puts the copies' values into the parameters, where burn's optimizers read them.
struct Load<'a, M> {
    copies: &'a Copies<'a, M>,
}

impl<M> ModuleMapper for Load<'_, M> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.copies.of(&param) {
            Some((_, copy)) => {
                let device = param.lazy_device();
                replaced(param, tensor_on(in_rank::<D>(&copy.flex()), &device).require_grad())
            }
            None => param,
        }
    }
}

/// Registers the gradients for the parameters.
struct Give<'a, M> {
    copies: &'a Copies<'a, M>,
    gradients: HashMap<usize, BurnTensor>,
    params: GradientsParams,
}

impl<M> ModuleVisitor for Give<'_, M> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((index, copy)) = self.copies.of(param) else { return };
        if let Some(gradient) = self.gradients.remove(&index) {
            let (gradient, dtype) = (gradient.flex(), copy.flex().dtype());
            // Gradients of 16 bits come in 32.
            let gradient = if gradient.dtype() == dtype { gradient } else { Flex::float_cast(gradient, dtype.into()) };
            self.params.register(param.id, Tensor::<D>::from_primitive::<Flex>(in_rank::<D>(&gradient)));
        }
    }
}

/// Takes the updated values out of the parameters.
struct Store<'a, M> {
    copies: &'a Copies<'a, M>,
    /// Tied parameters are visited several times, and updated the first time.
    seen: HashSet<usize>,
    outcome: Result<()>,
}

impl<M> ModuleVisitor for Store<'_, M> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((index, copy)) = self.copies.of(param) else { return };
        if self.seen.insert(index) {
            match flex_of(param.base()) {
                Ok(updated) => {
                    let shape = copy.flex().layout().shape().clone();
                    copy.replace(reshaped(&whole(updated), shape));
                }
                Err(error) => self.outcome = Err(error.into()),
            }
        }
    }
}

/// Returns a part of a variable in the rank of the whole; a whole variable has it.
fn in_rank<const D: usize>(tensor: &FlexTensor) -> FlexTensor {
    if tensor.layout().shape().num_dims() == D {
        return tensor.clone();
    }
    reshaped(tensor, shape_in_rank(tensor.layout().shape(), D).into())
}

/// Returns the shape in which burn's optimizers see a part: its own, or all elements in the last of `rank` dimensions.
fn shape_in_rank(shape: &[usize], rank: usize) -> Vec<usize> {
    if shape.len() == rank {
        return shape.to_vec();
    }
    let mut shape_of_rank = vec![1; rank];
    if let Some(last) = shape_of_rank.last_mut() {
        *last = shape.iter().product();
    }
    shape_of_rank
}

/// A module of one parameter, at the path of another: by that and by its id an optimizer chooses among its groups.
#[derive(Clone, Debug)]
struct Trial {
    path: String,
    weight: Param<Tensor<2>>,
}

impl Trial {
    fn with(self, change: impl FnOnce(Param<Tensor<2>>) -> Param<Tensor<2>>) -> Trial {
        Trial { path: self.path, weight: change(self.weight) }
    }
}

impl Module for Trial {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.weight.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Trial {
        self.with(|weight| Module::fork(weight, device))
    }

    fn to_device(self, device: &Device) -> Trial {
        self.with(|weight| Module::to_device(weight, device))
    }

    fn train(self) -> Trial {
        self.with(Module::train)
    }

    fn valid(&self) -> Trial {
        self.clone().with(|weight| Module::valid(&weight))
    }

    fn materialize(self) -> Trial {
        self.with(Module::materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module(&self.path, "Trial");
        Module::visit(&self.weight, visitor);
        visitor.exit_module(&self.path, "Trial");
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Trial {
        mapper.enter_module(&self.path, "Trial");
        let mapped = Trial { weight: Module::map(self.weight, mapper), path: self.path };
        mapper.exit_module(&mapped.path, "Trial");
        mapped
    }
}

/// Returns the first path at which steps on a matrix give other values than steps on its halves.
fn first_of_wholes<'a>(optimizer: &ModuleOptimizer, mut paths: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    const ROWS: usize = 128;
    const LEN: usize = ROWS * ROWS;
    /// The factors of each step's gradients in the first and in the second half. They change the norms of the whole and
    /// of each half by factors of their own, so that scaling by norms cannot cancel out.
    const SCALES: [[f32; 2]; 3] = [[1.0, 1.0], [0.7, 7e5], [3e5, 0.4]];
    // No gradient of the trial may reach the norm.
    if matches!(optimizer.grad_clipping(), Some(GradientClipping::Norm(_))) {
        return paths.next();
    }
    // A state of the parameters would have their shapes.
    let optimizer = optimizer.clone().load_record(OptimizerRecord::default());
    let device = Device::flex();
    let ramp = |range: &Range<usize>, shape: [usize; 2], factor: &dyn Fn(usize) -> f32| {
        let element = |at: usize| factor(at) * ((at * 37 % 101) as f32 / 50.0 - 1.01);
        Tensor::<1>::from_floats(&range.clone().map(element).collect::<Vec<f32>>()[..], &device).reshape(shape)
    };
    let given = |range: Range<usize>, shape: [usize; 2]| {
        // The second half of the parameters is larger than the first, relative to its gradients.
        let weight = ramp(&range, shape, &|at| 0.5 + 2.0 * at as f32 / LEN as f32);
        (weight, SCALES.map(|scales| ramp(&range, shape, &|at| scales[usize::from(at >= LEN / 2)])))
    };
    let stepped = |path: &str, (weight, gradients): &(Tensor<2>, [Tensor<2>; 3])| {
        let weight = Param::initialized(id_of(path), Tensor::from_inner(weight.clone()).require_grad());
        let (mut optimizer, mut trial) = (optimizer.clone(), Trial { path: path.to_owned(), weight });
        let mut values = Vec::new();
        for gradient in gradients {
            let mut given = GradientsParams::new();
            given.register(trial.weight.id, gradient.clone());
            trial = optimizer.step(0.1, trial, given);
            values.push(trial.weight.val().inner().into_data().try_into_vec::<f32>().unwrap_or_default());
        }
        values
    };
    let (whole, half) = ([ROWS, ROWS], [1, LEN / 2]);
    let [whole, first, second] = [given(0..LEN, whole), given(0..LEN / 2, half), given(LEN / 2..LEN, half)];
    let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * (1.0 + a.abs());
    paths.find(|path| {
        let halves = stepped(path, &first).into_iter().zip(stepped(path, &second));
        !stepped(path, &whole).iter().zip(halves).all(|(whole, (first, second))| {
            whole.len() == first.len() + second.len() && whole.iter().zip(first.iter().chain(&second)).all(is_close)
        })
    })
}
