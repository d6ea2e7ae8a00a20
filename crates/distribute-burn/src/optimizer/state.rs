//! The state of burn's own optimizers in checkpoints: whole, also if replicas have parts of it.
//!
//! burn keeps the state of a parameter as tensors and scalars, and writes all of them to bytes. Where the parameter is
//! in parts, a tensor with as many elements as a part is a part itself, and everything else is equal on all replicas.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_flex::FlexTensor;
use burn_pack::{Reader, Scalar, Writer};
use distribute_optim::backend::Variable;
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;

use crate::tensor::burn_type;
use crate::{Burn, BurnTensor, Error, Result};

/// One replica's state of all parameters.
#[derive(Default)]
pub(crate) struct State {
    /// In the order of their names, which is the same on all replicas.
    tensors: BTreeMap<String, Entry>,
    scalars: BTreeMap<String, Scalar>,
    metadata: BTreeMap<String, String>,
}

/// A tensor of a state.
#[derive(Clone)]
struct Entry {
    dtype: DType,
    shape: Shape,
    /// The parameter that it belongs to.
    id: Option<u64>,
    bytes: Bytes,
}

impl Entry {
    fn len(&self) -> usize {
        self.shape.num_elements()
    }

    fn to_tensor(&self) -> BurnTensor {
        BurnTensor::new(FlexTensor::from_data(TensorData::from_bytes(
            self.bytes.clone(),
            self.shape.clone(),
            self.dtype,
        )))
    }

    /// Returns the entry with other elements.
    fn with(&self, tensor: &BurnTensor, shape: Vec<usize>) -> Result<Entry> {
        let mut bytes = Vec::new();
        tensor.read(&mut |buffer| bytes.extend_from_slice(buffer.as_bytes()))?;
        let (dtype, bytes) = (burn_type(tensor.dtype()?), Bytes::from_bytes_vec(bytes));
        Ok(Entry { dtype, shape: shape.into(), id: self.id, bytes })
    }
}

impl State {
    pub(crate) fn read(bytes: Bytes) -> Result<State> {
        let reader = Reader::from_bytes(bytes).map_err(|error| refused("read", error))?;
        let (scalars, metadata) = (reader.scalars().clone(), reader.metadata().clone());
        let mut tensors = BTreeMap::new();
        for tensor in reader.into_tensors().map_err(|error| refused("read", error))? {
            let (name, dtype, shape, id, bytes) = tensor.into_parts().map_err(|error| refused("read", error))?;
            tensors.insert(name, Entry { dtype, shape, id, bytes });
        }
        Ok(State { tensors, scalars, metadata })
    }

    /// Adds entries of another state that this one does not have; those of the parameters that `is_kept` accepts, by
    /// their ids.
    #[cfg(feature = "learner")]
    pub(crate) fn add(&mut self, other: State, is_kept: impl Fn(u64) -> bool) {
        // An entry's name begins with the parameter's id.
        let is_kept = |name: &str| name.split('.').next().and_then(|id| id.parse().ok()).is_none_or(&is_kept);
        for (name, tensor) in other.tensors.into_iter().filter(|(name, _)| is_kept(name)) {
            self.tensors.entry(name).or_insert(tensor);
        }
        for (name, scalar) in other.scalars.into_iter().filter(|(name, _)| is_kept(name)) {
            self.scalars.entry(name).or_insert(scalar);
        }
        for (name, path) in other.metadata.into_iter().filter(|(name, _)| is_kept(name)) {
            self.metadata.entry(name).or_insert(path);
        }
    }

    /// Returns the state with other ids of parameters, in the names of its entries too.
    #[cfg(feature = "learner")]
    pub(crate) fn with_ids(self, id_of: impl Fn(u64) -> u64) -> State {
        // An entry's name begins with the parameter's id.
        let renamed = |name: String| {
            let end = name.find('.').unwrap_or(name.len());
            let id = name[..end].parse().ok().map(&id_of);
            id.map_or_else(|| name.clone(), |id| format!("{id}{}", &name[end..]))
        };
        let tensor = |(name, entry): (String, Entry)| (renamed(name), Entry { id: entry.id.map(&id_of), ..entry });
        State {
            tensors: self.tensors.into_iter().map(tensor).collect(),
            scalars: self.scalars.into_iter().map(|(name, value)| (renamed(name), value)).collect(),
            metadata: self.metadata.into_iter().map(|(name, path)| (renamed(name), path)).collect(),
        }
    }

    /// Returns tensors with the ids of their names, for a record of a model, in which names are paths. A tensor of
    /// which `id_of` has no id keeps its own.
    #[cfg(feature = "learner")]
    pub(crate) fn with_ids_of_tensors(mut self, id_of: impl Fn(&str) -> Option<u64>) -> State {
        for (name, entry) in &mut self.tensors {
            entry.id = id_of(name).or(entry.id);
        }
        self
    }

    pub(crate) fn write(self) -> Result<Bytes> {
        let tensor = |(name, Entry { dtype, shape, id, bytes })| burn_pack::Tensor::new(name, dtype, shape, id, bytes);
        let mut writer = Writer::new(self.tensors.into_iter().map(tensor).collect());
        for (name, value) in &self.scalars {
            writer = writer.with_scalar(name, *value);
        }
        for (name, value) in &self.metadata {
            writer = writer.with_metadata(name, value);
        }
        writer.into_bytes().map_err(|error| refused("saved", error))
    }

    /// Joins the states of this process's replicas to the whole, in the chief's process; other processes send it their
    /// parts and get `None`. `variable_of` returns a parameter's variable if that is in parts.
    pub(super) fn whole_on_chief<'v>(
        strategy: &Strategy,
        replicas: Vec<State>,
        variable_of: impl Fn(Option<u64>) -> Option<&'v Variable<Burn>>,
    ) -> Result<Option<State>> {
        let mut joined = Vec::new();
        for (name, entry) in &replicas[0].tensors {
            let Some(variable) = variable_of(entry.id) else { continue };
            if entry.len() != part_len(variable) {
                check_common("saved", name, entry, variable)?;
                continue;
            }
            let mut parts = like(variable, name);
            for replica in &replicas {
                let part = replica.tensors.get(name).map(Entry::to_tensor);
                parts.push(part.ok_or_else(|| refused("saved", format!("a replica has no {name}")))?);
            }
            joined.push((name.clone(), parts, variable));
        }
        // From here on every process takes part in each gather.
        let mut wholes = Vec::new();
        for (name, parts, variable) in joined {
            if let Some(whole) = parts.whole_on_chief(strategy)? {
                wholes.push((name, whole, variable.shape()));
            }
        }
        if !strategy.is_chief() {
            return Ok(None);
        }
        let first = replicas.into_iter().next();
        let Some(mut state) = first else { return Ok(None) };
        for (name, whole, shape) in wholes {
            if let Some(entry) = state.tensors.get_mut(&name) {
                *entry = entry.with(&whole, shape)?;
            }
        }
        Ok(Some(state))
    }

    /// Cuts a whole state for the replicas of this process.
    pub(super) fn parts<'v>(
        self,
        replicas: usize,
        variable_of: impl Fn(Option<u64>) -> Option<&'v Variable<Burn>>,
    ) -> Result<Vec<State>> {
        let mut cut: Vec<State> = (0..replicas)
            .map(|_| State { tensors: BTreeMap::new(), scalars: self.scalars.clone(), metadata: self.metadata.clone() })
            .collect();
        for (name, entry) in self.tensors {
            let variable = variable_of(entry.id);
            let of_replicas = match variable {
                Some(variable) if entry.len() == variable.shape().iter().product::<usize>() => {
                    cut_entry(&name, &entry, variable)?
                }
                Some(variable) => {
                    check_common("restored", &name, &entry, variable)?;
                    vec![entry; replicas]
                }
                None => vec![entry; replicas],
            };
            for (state, entry) in cut.iter_mut().zip(of_replicas) {
                state.tensors.insert(name.clone(), entry);
            }
        }
        Ok(cut)
    }
}

/// Returns the names of all tensors and scalars of a state.
pub(crate) fn names(bytes: Bytes) -> Result<BTreeSet<String>> {
    let reader = Reader::from_bytes(bytes).map_err(|error| refused("read", error))?;
    let tensors = reader.tensor_names().into_iter().map(str::to_owned);
    Ok(tensors.chain(reader.scalars().keys().cloned()).collect())
}

/// Returns the parts of a whole tensor, in the shapes in which burn's optimizers see the parameter's parts.
fn cut_entry(name: &str, entry: &Entry, variable: &Variable<Burn>) -> Result<Vec<Entry>> {
    let whole = entry.to_tensor();
    let mut parts = like(variable, name);
    for component in variable.components() {
        let bytes = vec![0; part_len(variable) * entry.dtype.size()];
        let zeros = TensorData::from_bytes(Bytes::from_bytes_vec(bytes), component.shape(), entry.dtype);
        parts.push(BurnTensor::new(FlexTensor::from_data(zeros)));
    }
    parts.overwrite(&whole)?;
    let rank = entry.shape.num_dims();
    parts.components().iter().map(|part| entry.with(part, super::shape_in_rank(&part.shape(), rank))).collect()
}

/// Returns a variable without components, which is divided as another.
fn like(variable: &Variable<Burn>, name: &str) -> Variable<Burn> {
    match (variable.layout(), variable.tensor_split()) {
        (Some(layout), Some(split)) => Variable::split_among(name, split).with_sharded_parts(layout.clone()),
        (Some(layout), None) => Variable::sharded(name, layout.clone()),
        (None, Some(split)) => Variable::split_among(name, split),
        (None, None) => Variable::new(name, false),
    }
}

fn part_len(variable: &Variable<Burn>) -> usize {
    variable.components().first().map_or(0, |part| part.shape().iter().product())
}

/// Refuses a tensor of which it is not known how it follows from the parameter's parts; one element is common to all.
fn check_common(action: &'static str, name: &str, entry: &Entry, variable: &Variable<Burn>) -> Result<()> {
    if entry.len() == 1 {
        return Ok(());
    }
    let problem = format!(
        "its tensor {name} of {} elements is neither one number nor as large as the parameter {} of shape {:?}, which \
         is in parts; restore it under a strategy that does not divide parameters, or use an optimizer of this crate, \
         such as Adam",
        entry.len(),
        variable.name(),
        variable.shape()
    );
    Err(Error::OptimizerState { action, problem })
}

fn refused(action: &'static str, problem: impl std::fmt::Display) -> Error {
    Error::OptimizerState { action, problem: problem.to_string() }
}
