//! Averages of parameters over steps.

use std::sync::atomic::{AtomicU64, Ordering};

use distribute_device::{BufferMut, Element};
use distribute_rules::check_setting;
use distribute_values::{TensorStorage, with_storage};

use crate::library::{dtype, wide};
use crate::parameters::overwrite;
use crate::{Error, TensorLibrary, Trainable, Variable, is_short};

/// The exponential moving average of a model's trainable variables, which often evaluates better than the last values.
///
/// Replicas' copies are equal, so one average per process is kept, and no communication is needed. The averages of
/// sharded variables are sharded too, and those of variables that are split among tensor ranks are split.
///
/// Save it in checkpoints as a part of its own, after the model and the optimizer: an average that is created again
/// begins with the values that the variables have then.
///
/// # Examples
/// ```
/// use distribute_optim::{Ema, HostError, HostModel};
/// use distribute_strategy::MirroredStrategy;
/// use distribute_values::HostTensor;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[3], vec![0.5; 3])?)])?;
/// let mut ema = Ema::new(&model, 0.999)?;
/// // After each step, outside of run:
/// ema.update(&model)?;
/// // To evaluate with the averages, and then to continue training:
/// ema.swap(&model)?;
/// ema.swap(&model)?;
/// # Ok::<(), HostError>(())
/// ```
///
/// # Source
/// `tf.train.ExponentialMovingAverage` with `num_updates`: the decay of the first updates is at most (1 + n) / (10 +
/// n).
#[derive(Debug)]
pub struct Ema<L: TensorLibrary> {
    decay: f64,
    updates: AtomicU64,
    /// The averages by variable, named `VARIABLE/ema`, with one component; with one for each local replica's part of a
    /// sharded variable, and for each part of a split one; with none for variables that are not trained.
    averages: Vec<Variable<L>>,
    /// The values of averaged variables while the averages take their place, in the same form.
    held: Option<Vec<Vec<L::Tensor>>>,
}

impl<L: TensorLibrary> Ema<L> {
    /// Starts averages from the current values. A decay of 0.999 averages over about a thousand steps.
    ///
    /// # Errors
    /// [`Error::Setting`] for a decay that is negative or not below 1; [`Error::Torn`] or [`Error::Apart`] if replicas
    /// do not have equal variables; the library's error if a variable cannot be copied.
    pub fn new(model: &impl Trainable<Library = L>, decay: f64) -> Result<Ema<L>, L::Error> {
        check_setting("the decay of Ema", decay, (0.0..1.0).contains(&decay), "from 0 to below 1")
            .map_err(Error::from)?;
        model.parameters().check_equal()?;
        let average = |variable: &Variable<L>| -> Result<Variable<L>, L::Error> {
            let mut average = like(variable, format!("{}/ema", variable.name()));
            for value in different(variable).iter().filter(|_| variable.is_trainable()) {
                average.push(copy::<L>(value)?);
            }
            Ok(average)
        };
        let averages = model.parameters().variables().iter().map(average).collect::<Result<Vec<_>, L::Error>>()?;
        Ok(Ema { decay, updates: AtomicU64::new(0), averages, held: None })
    }

    /// Updates the averages with the current values. Every process calls this, outside `run`.
    ///
    /// # Errors
    /// [`Error::Swapped`] while the averages are in the variables; [`Error::Torn`] or [`Error::Apart`] if replicas do
    /// not have equal variables; the library's error if a variable cannot be read.
    pub fn update(&mut self, model: &impl Trainable<Library = L>) -> Result<(), L::Error> {
        self.check_not_swapped()?;
        model.parameters().check_equal()?;
        let n = self.updates() as f64;
        let decay = self.decay.min((1.0 + n) / (10.0 + n));
        let all = model.parameters().variables().iter().zip(&self.averages);
        // Everything that may fail comes first, so that all averages are updated or none is.
        let pairs: Result<Vec<[L::Tensor; 2]>, L::Error> = all
            .flat_map(|(variable, average)| variable.components().iter().zip(average.components()))
            .map(|(value, average)| Ok([average.clone(), L::cast(&L::detach(value), dtype::<L>(average)?)?]))
            .collect();
        for pair in pairs? {
            with_storage::<L, L::Tensor>(&pair, &mut |buffers| {
                if let [average, value] = buffers {
                    blend::<f32>(average, value, |a, v| (decay * f64::from(a) + (1.0 - decay) * f64::from(v)) as f32);
                    blend::<f64>(average, value, |a, v| decay * a + (1.0 - decay) * v);
                }
            })?;
        }
        *self.updates.get_mut() += 1;
        Ok(())
    }

    /// Swaps averages and values: puts the averages into the variables of all replicas of this process, or, on the
    /// second call, the values back. Training continues from what the variables have. Call outside `run`.
    ///
    /// # Errors
    /// On the first call [`Error::Torn`] or [`Error::Apart`] if replicas do not have equal variables, of which one
    /// would replace all others on the second call; the library's error if a variable cannot be read or written.
    pub fn swap(&mut self, model: &impl Trainable<Library = L>) -> Result<(), L::Error> {
        let variables = model.parameters().variables();
        let (given, held) = match &self.held {
            // The values are kept until all variables are restored.
            Some(values) => (values.clone(), None),
            None => {
                model.parameters().check_equal()?;
                let values = |(variable, average): (&Variable<L>, &Variable<L>)| {
                    let values = variable.components().iter().zip(average.components());
                    values.map(|(value, _)| L::detach(value).copied()).collect()
                };
                let values: distribute_values::Result<Vec<Vec<_>>> =
                    variables.iter().zip(&self.averages).map(values).collect();
                let averages = self.averages.iter().map(|average| average.components().to_vec()).collect();
                (averages, Some(values?))
            }
        };
        for (variable, given) in variables.iter().zip(&given) {
            let parts = given.len();
            for (place, given) in given.iter().enumerate() {
                let value = L::cast(given, dtype::<L>(&variable.components()[0])?)?;
                for component in variable.components().iter().skip(place).step_by(parts) {
                    overwrite::<L>(std::slice::from_ref(component), &value)?;
                }
            }
        }
        self.held = held;
        model.parameters().note_written();
        Ok(())
    }

    /// Returns the number of updates.
    pub fn updates(&self) -> u64 {
        self.updates.load(Ordering::Acquire)
    }

    /// Continues after a number of updates, which determines the decay of the first ones. Call between updates; the
    /// averages are restored by [`overwrite`](crate::backend::Variable::overwrite) of each.
    pub fn set_updates(&self, updates: u64) {
        self.updates.store(updates, Ordering::Release);
    }

    /// Returns the averages of trained variables, named `VARIABLE/ema`, in f32 for variables of 16 bits. Their
    /// components are live handles, and are divided as those of the variables.
    ///
    /// # Examples
    /// ```
    /// use distribute_optim::{Ema, HostModel};
    /// use distribute_strategy::Strategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = Strategy::default_strategy()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[3], vec![0.5; 3])?)])?;
    /// let ema = Ema::new(&model, 0.999)?;
    /// assert!(ema.averages().map(|average| average.name()).eq(["w/ema"]));
    /// # Ok::<(), distribute_optim::HostError>(())
    /// ```
    pub fn averages(&self) -> impl Iterator<Item = &Variable<L>> {
        self.averages.iter().filter(|average| !average.components().is_empty())
    }

    /// Returns an error while the averages are in the variables.
    ///
    /// # Errors
    /// [`Error::Swapped`] after the first of two calls of [`swap`](Ema::swap).
    pub fn check_not_swapped(&self) -> Result<(), Error> {
        if self.held.is_some() { Err(Error::Swapped) } else { Ok(()) }
    }
}

/// Returns a variable without components whose value is divided as another's.
fn like<L: TensorLibrary>(variable: &Variable<L>, name: String) -> Variable<L> {
    match (variable.tensor_split(), variable.layout()) {
        (Some(split), Some(layout)) => Variable::split_among(name, split).with_sharded_parts(layout.clone()),
        (Some(split), None) => Variable::split_among(name, split),
        (None, Some(layout)) => Variable::sharded(name, layout.clone()),
        (None, None) => Variable::new(name, false),
    }
}

/// Returns the components of a variable whose values may differ: all of a sharded one, those of one tensor group of a
/// split one, else the first.
fn different<L: TensorLibrary>(variable: &Variable<L>) -> &[L::Tensor] {
    let all = variable.components();
    let first = variable.tensor_split().map_or(1, |split| split.parts());
    if variable.layout().is_some() { all } else { all.get(..first).unwrap_or(all) }
}

/// Returns a copy, widened to f32 if the elements have 16 bits.
fn copy<L: TensorLibrary>(tensor: &L::Tensor) -> Result<L::Tensor, L::Error> {
    if is_short(dtype::<L>(tensor)?) { wide::<L>(tensor) } else { Ok(L::detach(tensor).copied()?) }
}

/// Replaces the elements of `target` by `f(target, other)` if both have this type.
fn blend<T: Element>(target: &mut BufferMut<'_>, other: &BufferMut<'_>, f: impl Fn(T, T) -> T) {
    if let (Ok(target), Ok(other)) = (target.as_mut_slice::<T>(), other.as_slice::<T>()) {
        target.iter_mut().zip(other).for_each(|(a, b)| *a = f(*a, *b));
    }
}
