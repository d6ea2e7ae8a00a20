//! The backends of `VarBuilder`: variables that are created on the servers, read from them once, or copied from them
//! repeatedly.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use distribute_device::Element;
use distribute_parameter_server::{ParameterServerStrategy, ShardedVariable, WorkerContext};
use distribute_values::TensorStorage;
use parking_lot::Mutex;

use super::embedding::{self, Table};
use crate::model::is_statistic;
use crate::sharded::note_statistic;
use crate::tensor::dtype_of;
use crate::{Error, Result, dropout, initial};

/// The variables that were created, by path, each with whether it is trained.
pub(super) type Made = BTreeMap<String, (ShardedVariable, bool)>;

/// The backend that creates variables on the servers.
pub(super) struct Making {
    pub(super) strategy: ParameterServerStrategy,
    pub(super) seed: u64,
    pub(super) made: Arc<Mutex<Made>>,
}

/// The backend that reads variables once.
pub(super) struct Reading {
    pub(super) strategy: ParameterServerStrategy,
}

/// The variables that a worker has so far.
#[derive(Default)]
pub(super) struct Registry {
    /// Copies of variables, by path.
    pub(super) copies: BTreeMap<String, Copied>,
    /// Tables of which only needed rows are fetched, by path.
    pub(super) tables: BTreeMap<String, Arc<Table>>,
}

/// A variable of which the worker has a copy.
#[derive(Clone)]
pub(super) struct Copied {
    pub(super) variable: ShardedVariable,
    pub(super) copy: Var,
    /// Whether its layer writes it.
    pub(super) statistic: bool,
}

/// The backend that copies variables.
struct Copying {
    /// All variables on the servers, by path.
    variables: BTreeMap<String, ShardedVariable>,
    registry: Arc<Mutex<Registry>>,
}

impl Copying {
    fn find(&self, name: &str) -> candle_core::Result<ShardedVariable> {
        let unknown = || candle_core::Error::wrap(Error::UnknownVariable { name: name.to_owned() });
        self.variables.get(name).cloned().ok_or_else(unknown)
    }
}

/// Returns the seed of the dropout layers of a worker's model, which is another one in each process: workers that drop
/// the same elements, or a worker that is started again and drops the same once more, would average less noise away.
pub(super) fn seed(worker: &WorkerContext) -> u64 {
    RandomState::new().hash_one(worker.worker_index())
}

/// Builds a worker's model, or one replica of it, on a device; its dropout layers draw from streams of this seed.
/// Returns its variables too.
pub(super) fn build_on_worker<M>(
    worker: &WorkerContext,
    device: Device,
    seed: u64,
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) -> Result<(M, Registry)> {
    let registry: Arc<Mutex<Registry>> = Arc::default();
    let backend = Copying { variables: worker.variables()?, registry: registry.clone() };
    let vb = VarBuilder::from_backend(Box::new(backend), DType::F32, device);
    let (model, _) = dropout::building(seed, || build(vb));
    let model = model?;
    let registry = std::mem::take(&mut *registry.lock());
    Ok((model, registry))
}

impl Registry {
    /// Returns the number of the optimizer that updates the variables on the servers.
    pub(super) fn optimizer(&self, worker: &WorkerContext) -> Result<u32> {
        let trained = self.copies.values().filter(|copied| !copied.statistic).map(|copied| &copied.variable);
        let mut variables = trained.chain(self.tables.values().map(|table| &table.variable));
        let first = variables.next().ok_or(distribute_optim::Error::NoGradient)?;
        worker.optimizer_of(first)?.ok_or_else(|| Error::UnknownVariable { name: first.name().to_owned() })
    }
}

impl SimpleBackend for Making {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let remote = embedding::is_wanted();
        let mut made = self.made.lock();
        let values = initial::initial(self.seed, name, init, &shape, dtype, device)?;
        if let Some((variable, _)) = made.get(name) {
            check(variable, &shape, dtype)?;
            return Ok(values);
        }
        let trained = !is_statistic(name);
        let variable = match trained {
            true => self.strategy.variable(name, &values),
            false => self.strategy.untrained(name, &values),
        };
        made.insert(name.to_owned(), (variable.map_err(wrapped)?, trained));
        // This model is never called, so its tables need no second copy.
        if remote { Tensor::zeros((0, shape.dims().get(1).copied().unwrap_or(0)), dtype, device) } else { Ok(values) }
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        Err(candle_core::Error::wrap(Error::UnknownVariable { name: name.to_owned() }))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.made.lock().contains_key(name)
    }
}

impl SimpleBackend for Reading {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let _ = embedding::is_wanted();
        let unknown = || candle_core::Error::wrap(Error::UnknownVariable { name: name.to_owned() });
        let variable = self.strategy.find(name).ok_or_else(unknown)?;
        check(&variable, &shape, dtype)?;
        read(&variable)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let unknown = || candle_core::Error::wrap(Error::UnknownVariable { name: name.to_owned() });
        read(&self.strategy.find(name).ok_or_else(unknown)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.strategy.find(name).is_some()
    }
}

impl SimpleBackend for Copying {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let remote = embedding::is_wanted();
        let mut registry = self.registry.lock();
        if let Some(copied) = registry.copies.get(name) {
            check(&copied.variable, &shape, dtype)?;
            note(copied);
            return Ok(copied.copy.as_tensor().clone());
        }
        let variable = self.find(name)?;
        check(&variable, &shape, dtype)?;
        if remote {
            let table = registry.tables.entry(name.to_owned()).or_insert_with(|| Arc::new(Table::new(variable)));
            embedding::hand_over(table.clone());
            return Tensor::zeros((0, shape.dims().get(1).copied().unwrap_or(0)), dtype, device);
        }
        let copy = Var::zeros(shape, dtype, device)?;
        let tensor = copy.as_tensor().clone();
        let copied = Copied { variable, copy, statistic: is_statistic(name) };
        note(&copied);
        registry.copies.insert(name.to_owned(), copied);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let variable = self.find(name)?;
        self.get(Shape::from(variable.shape()), name, Init::Const(0.0), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.variables.contains_key(name)
    }
}

/// Notes a running statistic for the block that is being built.
fn note(copied: &Copied) {
    if copied.statistic {
        note_statistic(copied.copy.as_tensor());
    }
}

fn check(variable: &ShardedVariable, shape: &Shape, dtype: DType) -> candle_core::Result<()> {
    if variable.shape() == shape.dims() && variable.dtype() == dtype_of(dtype)? {
        return Ok(());
    }
    let problem = format!(
        "variable {:?} is {} {:?} on the servers, and the model asks for {} {shape:?}; build the same model on every \
         task",
        variable.name(),
        variable.dtype(),
        variable.shape(),
        dtype.as_str()
    );
    Err(candle_core::Error::Msg(problem))
}

fn read(variable: &ShardedVariable) -> candle_core::Result<Tensor> {
    fn typed<T: Element + candle_core::WithDType>(variable: &ShardedVariable) -> candle_core::Result<Tensor> {
        let values = variable.read::<T>().map_err(wrapped)?;
        let elements = values.to_elements::<T>().map_err(candle_core::Error::wrap)?;
        Tensor::from_vec(elements, variable.shape(), &Device::Cpu)
    }
    match variable.dtype() {
        distribute_device::DType::F64 => typed::<f64>(variable),
        _ => typed::<f32>(variable),
    }
}

pub(super) fn wrapped(error: distribute_parameter_server::Error) -> candle_core::Error {
    candle_core::Error::wrap(Error::from(error))
}
