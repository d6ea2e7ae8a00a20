//! Loading and saving of plain safetensors files, to exchange values with other programs.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use candle_core::safetensors::BufferedSafetensors;
use candle_core::{DType, Device, Tensor};
use distribute_strategy::Strategy;
use distribute_train::checkpoint::write_safetensors;
use distribute_train::from_chief;
use distribute_values::TensorStorage;
use serde::{Deserialize, Serialize};

use crate::checkpoint::whole;
use crate::tensor::is_short;
use crate::{Candle, Error, Model, Result, Variable};

/// The result of [`Model::load_safetensors`]; lists are in the order of the model, or sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// The model's variables that were loaded.
    pub loaded: Vec<String>,
    /// The model's variables that are not in the file and keep their values.
    pub missing: Vec<String>,
    /// The file's tensors that the model does not use.
    pub unused: Vec<String>,
}

impl<M> Model<M> {
    /// Loads the values of all variables whose names are in a safetensors file, on all replicas. The file may come from
    /// candle, Python or [`save_safetensors`](Model::save_safetensors), and may be one shard of several. Every worker
    /// calls this, outside `run`; the chief reads for all, so other workers need no access to its files.
    ///
    /// Names are `VarBuilder` paths. Floats of another width are converted. If any tensor does not fit, nothing is
    /// changed.
    ///
    /// # Errors
    /// [`Error::Pretrained`] for a file that cannot be read, has a tensor of another shape, or has none of the model's
    /// variables; on other workers it has the chief's reason. [`Error::LoadedLate`] for variables of 16 bits after an
    /// optimizer was built.
    ///
    /// # Cost
    /// The chief holds the file in memory; each loaded variable is broadcast once.
    ///
    /// # Examples
    /// ```
    /// use candle_nn::linear;
    /// use distribute_candle::{CandleStrategy, Error};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("model.safetensors");
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let old = strategy.scope(|vb| Ok((linear(3, 4, vb.pp("body"))?, linear(4, 9, vb.pp("old_head"))?)))?;
    /// old.save_safetensors(&strategy, &path)?;
    ///
    /// let new = strategy.scope(|vb| Ok((linear(3, 4, vb.pp("body"))?, linear(4, 2, vb.pp("head"))?)))?;
    /// let report = new.load_safetensors(&strategy, &path)?;
    /// assert_eq!(report.loaded, ["body.weight", "body.bias"]);
    /// assert_eq!(report.missing, ["head.weight", "head.bias"]);
    /// assert_eq!(report.unused, ["old_head.bias", "old_head.weight"]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `load_state_dict(…, strict=False)` of PyTorch; `load_weights(…, skip_mismatch)` of tf.keras, which skips
    /// silently.
    pub fn load_safetensors(&self, strategy: &Strategy, path: impl AsRef<Path>) -> Result<Loaded> {
        self.load_safetensors_as(strategy, path, |name| Some(name.to_owned()))
    }

    /// Loads values like [`load_safetensors`](Model::load_safetensors), with a function from the model's names to the
    /// file's. For `None` a variable keeps its value and is not reported as missing. The chief's closure decides.
    ///
    /// # Errors
    /// The errors of [`load_safetensors`](Model::load_safetensors) occur in the same cases.
    ///
    /// # Examples
    /// ```
    /// use std::collections::HashMap;
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::linear;
    /// use distribute_candle::{CandleStrategy, Error};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("model.safetensors");
    /// let weight = Tensor::ones((4, 3), DType::F64, &Device::Cpu)?;
    /// candle_core::safetensors::save(&HashMap::from([("encoder.layer.weight", weight)]), &path)?;
    ///
    /// let strategy = MirroredStrategy::builder().build()?;
    /// let model = strategy.scope(|vb| linear(3, 4, vb.pp("body")))?;
    /// let report = model.load_safetensors_as(&strategy, &path, |name| Some(name.replace("body.", "encoder.layer.")))?;
    /// assert_eq!(report.missing, ["body.bias"]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn load_safetensors_as(
        &self,
        strategy: &Strategy,
        path: impl AsRef<Path>,
        name_in_file: impl Fn(&str) -> Option<String>,
    ) -> Result<Loaded> {
        let late = self.variables().iter().find(|variable| has_16_bits(variable) && self.has_optimizer());
        let late = late.map_or(Ok(()), |variable| Err(Error::LoadedLate { name: variable.name().to_owned() }));
        from_chief(strategy, late)?;
        let (outcome, values) = match strategy.is_chief().then(|| self.load_here(path.as_ref(), name_in_file)) {
            Some(Ok((report, values))) => (Ok(report), values),
            Some(Err(error)) => (Err(error), HashMap::new()),
            None => (Ok(Loaded::default()), HashMap::new()),
        };
        let report = from_chief(strategy, outcome)?;
        let loaded: BTreeSet<&str> = report.loaded.iter().map(String::as_str).collect();
        let taken = self.variables().iter().filter(|variable| loaded.contains(variable.name()));
        distribute_optim::backend::share::<Candle>(strategy, taken.clone())?;
        for variable in taken.filter(|variable| variable.layout().is_some()) {
            variable.overwrite_by_chief(strategy, values.get(variable.name()))?;
        }
        // On every worker: what an optimizer keeps of the values before is of no use to any of them.
        self.parameters.note_loaded();
        Ok(report)
    }

    /// Writes all variables to a safetensors file, each once, under its path, for candle's `VarMap::load` and Python's
    /// safetensors. Every worker calls this, outside `run`. The chief writes to a temporary file and renames it, so
    /// that readers never see an incomplete file. Statistics that replicas compute from their own examples are written
    /// as their mean.
    ///
    /// To resume training, save a checkpoint instead: it also has the optimizer's state and the position in the data.
    /// Under a strategy of local updates, such as `DilocoStrategy`, first call
    /// [`Optimizer::synchronize`](distribute_optim::Optimizer::synchronize), unless the last step was one that
    /// synchronizes; a checkpoint of the model and its optimizer does so too.
    ///
    /// # Cost
    /// Variables that are sharded, or split among tensor ranks, are joined one after another, so that one whole
    /// variable is in memory at a time.
    ///
    /// # Errors
    /// [`Error::Pretrained`] if the file cannot be written; [`Error::Optim`] with
    /// [`Apart`](distribute_optim::Error::Apart) if replicas have made steps of their own since their variables were
    /// equal, or [`Torn`](distribute_optim::Error::Torn) if a failed step has left no whole variables. These errors of
    /// one worker are errors of all: the others have its message, as [`Error::Train`] with
    /// [`Chief`](distribute_train::Error::Chief) or [`OnWorker`](distribute_train::Error::OnWorker), and an earlier
    /// file stays. [`Error::Collective`] if a worker is missing or fails.
    ///
    /// # Examples
    /// See [`load_safetensors`](Model::load_safetensors).
    pub fn save_safetensors(&self, strategy: &Strategy, path: impl AsRef<Path>) -> Result<()> {
        let (path, mut tensors) = (path.as_ref(), Vec::new());
        let described = self.parameters.check_equal().map_err(Error::from).and_then(|()| {
            for variable in self.variables() {
                let dtype = TensorStorage::dtype(&variable.components()[0])?;
                tensors.push((variable.name(), dtype, variable.shape()));
            }
            Ok(())
        });
        // Workers that find nothing wrong do not wait for one that does.
        from_chief(strategy, described)?;
        let gather = |index: usize| -> Result<_> { whole(strategy, &self.variables()[index]) };
        write_safetensors::<Candle, _, Error>(strategy, path, &tensors, gather).map_err(|error| match error {
            Error::Train(distribute_train::Error::File { source, .. }) => {
                Error::Pretrained { path: path.to_owned(), problem: source.to_string() }
            }
            other => other,
        })
    }

    fn has_optimizer(&self) -> bool {
        Arc::strong_count(&self.parameters) > 1
    }

    /// Writes the file's values to this process's replicas, and returns those of sharded variables instead.
    fn load_here(
        &self,
        path: &Path,
        name_in_file: impl Fn(&str) -> Option<String>,
    ) -> Result<(Loaded, HashMap<String, Tensor>)> {
        let wrong = |problem| Error::Pretrained { path: path.to_owned(), problem };
        let bytes = fs::read(path).map_err(|error| wrong(error.to_string()))?;
        let file = BufferedSafetensors::new(bytes).map_err(|error| {
            wrong(format!("it is not a safetensors file ({error}); give one, or convert what you have"))
        })?;
        let mut unused: BTreeSet<String> = file.tensors().into_iter().map(|(name, _)| name).collect();
        let names = unused.clone();
        let (mut report, mut values) = (Loaded::default(), Vec::new());
        for variable in self.variables() {
            match name_in_file(variable.name()) {
                Some(name) if names.contains(&name) => {
                    let value = file.load(&name, &Device::Cpu).map_err(|error| wrong(format!("{name:?}: {error}")))?;
                    values.push((variable, fitted(variable, &name, &value)?.map_err(wrong)?));
                    report.loaded.push(variable.name().to_owned());
                    unused.remove(&name);
                }
                Some(_) => report.missing.push(variable.name().to_owned()),
                None => {}
            }
        }
        if let (Some(asked), true) = (report.missing.first(), values.is_empty()) {
            let given =
                names.first().map_or_else(|| "it is empty".to_owned(), |name| format!("it has {name:?} and such"));
            return Err(wrong(format!(
                "{asked:?} is not in it, nor any other variable of the model: {given}; map names with \
                 load_safetensors_as"
            )));
        }
        let mut sharded = HashMap::new();
        for (variable, value) in values {
            match variable.layout() {
                Some(_) => drop(sharded.insert(variable.name().to_owned(), value)),
                None => variable.overwrite(&value)?,
            }
        }
        report.unused = unused.into_iter().collect();
        Ok((report, sharded))
    }
}

/// Converts a value to a variable's type, or returns why it does not fit.
fn fitted(variable: &Variable, name: &str, value: &Tensor) -> Result<Result<Tensor, String>> {
    let like = &variable.components()[0];
    let (given, wanted, shape) = (value.dtype(), like.dtype(), variable.shape());
    if value.dims() != shape {
        return Ok(Err(format!(
            "{name:?} has shape {:?}, and the model's {:?} {:?}; build the model with the file's shapes, or leave this \
             variable out with load_safetensors_as",
            value.dims(),
            variable.name(),
            shape
        )));
    }
    if given == wanted {
        return Ok(Ok(value.clone()));
    }
    if !given.is_float() || !wanted.is_float() {
        return Ok(Err(format!(
            "{name:?} is of type {given:?}, and the model's {:?} of {wanted:?}; only floats are converted",
            variable.name()
        )));
    }
    let converted = value.to_dtype(wanted)?;
    if wanted.size_in_bytes() < given.size_in_bytes() && !fits(value, &converted)? {
        return Ok(Err(format!("{name:?} has values that {wanted:?} cannot hold; build the model in a wider type")));
    }
    Ok(Ok(converted))
}

/// Returns whether conversion has kept all finite values finite.
fn fits(value: &Tensor, converted: &Tensor) -> Result<bool> {
    let elements = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (value, converted) = (elements(value)?, elements(converted)?);
    Ok(value.iter().zip(converted).all(|(value, converted)| converted.is_finite() || !value.is_finite()))
}

fn has_16_bits(variable: &Variable) -> bool {
    is_short(variable.components()[0].dtype())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_the_way_to_other_workers() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let report = Loaded { loaded: names(&["a.weight", "b"]), missing: names(&[]), unused: names(&["ü"]) };
        for report in [report, Loaded::default()] {
            let bytes = serde_json::to_vec(&report).unwrap();
            assert_eq!(serde_json::from_slice::<Loaded>(&bytes).unwrap(), report);
        }
    }
}
