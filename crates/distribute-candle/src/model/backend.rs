//! The backend of the `VarBuilder`s that models are built with.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use distribute_optim::backend::{ShardLayout, Tape, TensorSplit};
use distribute_strategy::Strategy;
use parking_lot::Mutex;

use super::is_statistic;
use crate::hook::{hooked, hooked_at_rest};
use crate::host::is_fused;
use crate::sharded::{self, Leaf, Replica};
use crate::table::{self, Gate};
use crate::tensor_parallel::{Request, take_request};
use crate::{Error, Variable, initial};

/// The variables that the replicas of a model have created so far.
#[derive(Default)]
pub(super) struct Registry {
    pub(super) variables: Vec<Variable>,
    by_name: HashMap<String, usize>,
    /// The sharded variables as models have them, by index and replica.
    leaves: HashMap<(usize, usize), Arc<Leaf>>,
    /// The gates of variables of which rows are looked up, by index and replica.
    gates: HashMap<(usize, usize), Arc<Gate>>,
    /// The parts of sharded variables for the replicas that are still to be built, by index, the last replica's first.
    parts: HashMap<usize, Vec<Tensor>>,
}

/// The backend that gives one replica of a model its copies of the variables.
pub(super) struct ReplicaBackend {
    pub(super) strategy: Strategy,
    pub(super) registry: Arc<Mutex<Registry>>,
    pub(super) replica: usize,
    pub(super) tape: Arc<Tape<Tensor>>,
    pub(super) shared: bool,
    pub(super) seed: u64,
    /// The number of ranks of each tensor group.
    pub(super) tensor_ranks: usize,
    /// The replica's blocks, under a strategy that shards parameters.
    pub(super) blocks: Option<Arc<Replica>>,
}

impl ReplicaBackend {
    fn split(&self, name: &str, whole: &Shape, request: Request) -> candle_core::Result<TensorSplit> {
        let split = TensorSplit::new(name, whole.dims(), request.axis, request.blocks, self.tensor_ranks);
        split.map_err(candle_core::Error::wrap)
    }
}

impl SimpleBackend for ReplicaBackend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let tensor = self.component(shape, name, init, dtype, device)?;
        if is_statistic(name) {
            sharded::note_statistic(&tensor);
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let registry = self.registry.lock();
        let known = registry.by_name.get(name).and_then(|index| registry.leaves.get(&(*index, self.replica)));
        if let Some(leaf) = known {
            if let Some(unit) = sharded::current_unit() {
                unit.add(leaf);
            }
            return Ok(leaf.whole().clone());
        }
        let variable = registry.by_name.get(name).map(|index| &registry.variables[*index]);
        let tensor = variable.and_then(|variable| variable.components().get(self.replica));
        let missing = || candle_core::Error::wrap(Error::UnknownVariable { name: name.to_owned() });
        let tensor = tensor.cloned().ok_or_else(missing)?;
        if is_statistic(name) {
            sharded::note_statistic(&tensor);
        }
        Ok(tensor)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.registry.lock().by_name.contains_key(name)
    }
}

impl ReplicaBackend {
    /// Returns the replica's component of a variable, which it creates if there is none.
    fn component(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let request = take_request().filter(|_| self.tensor_ranks > 1);
        let split = request.map(|request| self.split(name, &shape, request)).transpose()?;
        let of_rank: Shape = split.map_or_else(|| shape.clone(), |split| split.part_shape(shape.dims()).into());
        let mut registry = self.registry.lock();
        let known = registry.by_name.get(name).copied();
        if known.is_some_and(|index| registry.variables[index].tensor_split() != split) {
            return Err(candle_core::Error::wrap(distribute_optim::Error::SplitDiffers { name: name.to_owned() }));
        }
        if let Some(sharded) = self.sharded(&mut registry, (&shape, split, &of_rank), name, init, dtype, device)? {
            return Ok(sharded);
        }
        let registry = &mut *registry;
        let index = match known {
            Some(index) => index,
            None => {
                let index = registry.variables.len();
                let variable = match split {
                    Some(split) => Variable::split_among(name, split),
                    None => Variable::new(name, is_statistic(name)),
                };
                registry.by_name.insert(name.to_owned(), index);
                registry.variables.push(variable);
                index
            }
        };
        let variable = &mut registry.variables[index];
        if let Some(tensor) = variable.components().get(self.replica) {
            check_shape(name, tensor.shape(), &of_rank)?;
            let tensor = tensor.clone();
            if let Some(gate) = registry.gates.get(&(index, self.replica)) {
                table::answer(|| Ok(gate.clone()))?;
            }
            return Ok(tensor);
        }
        if let (true, true, Some(first)) =
            (self.shared, variable.is_trainable(), variable.components().first().cloned())
        {
            check_shape(name, first.shape(), &shape)?;
            variable.push(first.clone());
            return Ok(first);
        }
        if let Some(first) = variable.components().first() {
            check_shape(name, first.shape(), &of_rank)?;
        }
        // The component with the same values: the first, or that of the same place in the first tensor group.
        let place = self.replica % self.tensor_ranks;
        let values = match variable.components().get(split.map_or(0, |_| place)) {
            // The copy goes through the host, which can copy to every device.
            Some(same) => same.detach().copy()?.to_device(&Device::Cpu)?.to_device(device)?,
            None => {
                let drawn = |device| initial::initial(self.seed, name, init, &shape, dtype, device);
                match split {
                    Some(split) => own_part(&drawn(&Device::Cpu)?, split, place)?.to_device(device)?,
                    None => drawn(device)?.contiguous()?,
                }
            }
        };
        let tensor = match variable.is_trainable() {
            true if !self.shared => {
                let gate = match is_fused(&values) && values.rank() == 2 {
                    true => table::answer(|| Gate::new(index, &self.tape))?,
                    false => None,
                };
                if let Some(gate) = &gate {
                    registry.gates.insert((index, self.replica), gate.clone());
                }
                hooked(&values, index, &self.tape, gate.as_ref())?
            }
            _ => Var::from_tensor(&values)?.as_tensor().clone(),
        };
        variable.push(tensor.clone());
        Ok(tensor)
    }
}

/// Returns the part of a whole value on the host that the rank at `place` of a tensor group has.
fn own_part(whole: &Tensor, split: TensorSplit, place: usize) -> candle_core::Result<Tensor> {
    let shape = whole.dims();
    macro_rules! cut {
        ($($dtype:ident => $t:ty),*) => {
            match whole.dtype() {
                $(DType::$dtype => {
                    let part = split.cut(&whole.flatten_all()?.to_vec1::<$t>()?, shape, place);
                    Tensor::from_vec(part, split.part_shape(shape), &Device::Cpu)
                })*
                other => candle_core::bail!("a variable of {other:?} cannot be split among tensor ranks; give floats"),
            }
        };
    }
    cut!(F32 => f32, F64 => f64, F16 => distribute_device::f16, BF16 => distribute_device::bf16)
}

impl ReplicaBackend {
    /// Returns a variable of a block whose parameters are sharded; `None` for all others. Of one that is split among
    /// tensor ranks, each rank has its part in parts.
    fn sharded(
        &self,
        registry: &mut Registry,
        (shape, split, of_rank): (&Shape, Option<TensorSplit>, &Shape),
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Option<Tensor>> {
        let (Some(blocks), unit) = (&self.blocks, sharded::current_unit()) else { return Ok(None) };
        let known = registry.by_name.get(name).copied();
        if let Some(leaf) = known.and_then(|index| registry.leaves.get(&(index, self.replica))) {
            check_shape(name, leaf.whole().shape(), of_rank)?;
            if let Some(unit) = unit {
                unit.add(leaf);
            }
            return Ok(Some(leaf.whole().clone()));
        }
        let is_sharded = known.is_some_and(|index| registry.variables[index].layout().is_some());
        let (Some(unit), true) = (unit, is_sharded || known.is_none()) else { return Ok(None) };
        let is_float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
        let layout = ShardLayout::of(&self.strategy, of_rank.dims()).filter(|_| is_float && !is_statistic(name));
        let Some(layout) = layout else { return Ok(None) };
        let index = match known {
            Some(index) => {
                check_shape(name, &Shape::from(registry.variables[index].shape()), shape)?;
                index
            }
            None => {
                let index = registry.variables.len();
                let whole = initial::initial(self.seed, name, init, shape, dtype, &Device::Cpu)?;
                let wholes: Vec<Tensor> = match split {
                    Some(split) => (0..split.parts()).map(|place| own_part(&whole, split, place)).collect(),
                    None => Ok(vec![whole]),
                }?;
                let mut parts = Vec::new();
                for local in (0..self.strategy.num_local_replicas()).rev() {
                    let range = layout.range(layout.part_of(local));
                    let of_place = wholes[local % wholes.len()].flatten_all()?;
                    let part = of_place.narrow(0, range.start, range.len())?;
                    parts.push(part.pad_with_zeros(0, 0, layout.part_len() - range.len())?.force_contiguous()?);
                }
                let variable = match split {
                    Some(split) => Variable::split_among(name, split),
                    None => Variable::new(name, false),
                };
                registry.by_name.insert(name.to_owned(), index);
                registry.variables.push(variable.with_sharded_parts(layout.clone()));
                registry.parts.insert(index, parts);
                index
            }
        };
        let missing =
            || candle_core::Error::Msg(format!("variable {name:?} was made more often than for each replica"));
        let part = registry.parts.get_mut(&index).and_then(Vec::pop).ok_or_else(missing)?.to_device(device)?;
        let slot: Arc<OnceLock<(Weak<Leaf>, Weak<Replica>)>> = Arc::default();
        let fired = {
            let slot = slot.clone();
            Box::new(move || {
                let (leaf, replica) = slot.get().map(|(leaf, replica)| (leaf.upgrade(), replica.upgrade())).unzip();
                match (leaf.flatten(), replica.flatten()) {
                    (Some(leaf), Some(replica)) => leaf.fired(&replica),
                    _ => Ok(()),
                }
            })
        };
        let whole = hooked_at_rest((dtype, of_rank, device), index, &self.tape, fired)?;
        sharded::rest(&whole)?;
        let leaf = Leaf::new(name, layout, part.clone(), whole.clone());
        // No other function sets it.
        let _ = slot.set((Arc::downgrade(&leaf), Arc::downgrade(blocks)));
        registry.variables[index].push(part);
        registry.leaves.insert((index, self.replica), leaf.clone());
        blocks.add(leaf.clone());
        unit.add(&leaf);
        Ok(Some(whole))
    }
}

fn check_shape(name: &str, held: &Shape, asked: &Shape) -> candle_core::Result<()> {
    if held == asked {
        return Ok(());
    }
    let problem =
        format!("variable {name:?} has shape {held:?}, but {asked:?} was asked for; give layers different paths");
    Err(candle_core::Error::Msg(problem))
}
