//! Exponential moving averages of values that replicas compute.

use distribute_device::{DType, Element};
use distribute_values::{Aggregation, Assignment, CallContext, DistributedVariable, TensorStorage, VariableOptions};

use crate::{Error, Result, Strategy};

/// The exponential moving average of any value that replicas compute, such as a loss or a statistic of a batch:
/// `average = decay * average + (1 - decay) * value`, where the value is the mean over all replicas.
///
/// It consists of variables with equal components, so every replica must make each update, and reading it takes no
/// communication. The mean counts each replica once: where replicas have different numbers of examples, reduce the
/// value by examples first and pass the same result on all of them. A failed run's updates are undone.
///
/// # Examples
/// ```
/// use distribute_strategy::{MirroredStrategy, MovingAverage};
/// use distribute_values::{HostTensor, TensorStorage};
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let average = MovingAverage::debiased(&strategy, "norm", &HostTensor::scalar(0.0), 0.9)?;
/// strategy.run_with((), |context, ()| {
///     // 3 on the first replica, 5 on the second one.
///     let norm = HostTensor::scalar(3.0 + 2.0 * context.replica_id() as f64);
///     average.update(context.call_context(), &norm)
/// })?;
/// let value = strategy.with_call_context(|context| average.value(context))?;
/// assert!((value.to_elements::<f64>()?[0] - 4.0).abs() < 1e-12);
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
///
/// # Source
/// `moving_averages.assign_moving_average` in a replica context, and `tf.train.ExponentialMovingAverage` of tensors.
#[derive(Clone, Debug)]
pub struct MovingAverage<T> {
    decay: f64,
    average: DistributedVariable<T>,
    /// The average of ones, by which the average of zero and the values is divided.
    weight: Option<DistributedVariable<T>>,
}

impl<T> MovingAverage<T> {
    /// Creates an average that begins with the initial value: on several workers, the chief's. Every worker must call
    /// this, outside replicas. A decay of 0.99 averages over about a hundred updates.
    ///
    /// # Errors
    /// [`Error::Decay`] if the decay is not from 0 to below 1; [`Error::Values`] if the elements are neither f32 nor
    /// f64; and the errors of [`Strategy::variable`].
    pub fn new<L>(strategy: &Strategy, name: &str, initial: &T, decay: f64) -> Result<MovingAverage<T>>
    where
        T: TensorStorage<L>,
    {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::Decay { name: name.to_owned(), given: decay });
        }
        let dtype = initial.dtype()?;
        if !matches!(dtype, DType::F32 | DType::F64) {
            let problem = "a moving average adds small parts of values; give an initial value of f32 or f64";
            return Err(distribute_values::Error::VariableOptions { name: name.to_owned(), dtype, problem }.into());
        }
        let average = strategy.variable(name, initial, VariableOptions::on_write(Aggregation::Mean))?;
        Ok(MovingAverage { decay, average, weight: None })
    }

    /// Creates an average without an initial value, of the shape and type of `like`: after n updates it is the weighted
    /// mean of the n values, and 0 before the first one. Every worker must call this, outside replicas.
    ///
    /// # Errors
    /// The errors of [`new`](MovingAverage::new).
    ///
    /// # Source
    /// `zero_debias` of `moving_averages.assign_moving_average`; Kingma and Ba, "Adam: a method for stochastic
    /// optimization", 2015, section 3.
    pub fn debiased<L>(strategy: &Strategy, name: &str, like: &T, decay: f64) -> Result<MovingAverage<T>>
    where
        T: TensorStorage<L>,
    {
        let zeros = like.copied()?;
        zeros.write(&mut |mut buffer| buffer.as_bytes_mut().fill(0))?;
        let average = MovingAverage::new(strategy, name, &zeros, decay)?;
        let options = VariableOptions::on_write(Aggregation::Mean);
        let weight = strategy.variable(&format!("{name}/weight"), &zeros, options)?;
        Ok(MovingAverage { weight: Some(weight), ..average })
    }

    /// Updates the average with a value. Inside replicas every replica must call this, each with its own value;
    /// outside, every process, with the same value.
    ///
    /// # Errors
    /// [`Error::Values`] if the value has another shape or type than the average, or if a replica is missing or fails.
    pub fn update<L>(&self, context: CallContext<'_>, value: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        let new = 1.0 - self.decay;
        // All replicas have the same average, so the mean of the differences is that from the mean of the values.
        let difference = combine(&self.average.live(context)?, value, |average, value| (average - value) * new)?;
        self.average.assign(context, Assignment::Sub, &difference)?;
        if let Some(weight) = &self.weight {
            let old = weight.live(context)?;
            let difference = combine(&old, &old, |weight, _| (weight - 1.0) * new)?;
            weight.assign(context, Assignment::Sub, &difference)?;
        }
        Ok(())
    }

    /// Returns the average, as a value that later updates do not change.
    ///
    /// # Errors
    /// [`Error::Values`] if it cannot be read.
    pub fn value<L>(&self, context: CallContext<'_>) -> Result<T>
    where
        T: TensorStorage<L>,
    {
        let average = self.average.read_value(context)?;
        match &self.weight {
            None => Ok(average),
            Some(weight) => {
                let unbiased = |average, weight| if weight == 0.0 { 0.0 } else { average / weight };
                combine(&average, &weight.live(context)?, unbiased)
            }
        }
    }

    /// Returns the variables of which it consists, for checkpoints: the average, and the weight of a debiased one.
    pub fn variables(&self) -> impl Iterator<Item = &DistributedVariable<T>> {
        std::iter::once(&self.average).chain(&self.weight)
    }
}

/// Returns `f` of the elements of two tensors of one shape and type, which is f32 or f64.
fn combine<L, T: TensorStorage<L>>(a: &T, b: &T, f: impl Fn(f64, f64) -> f64) -> Result<T> {
    let (expected, got) = (a.shape(), b.shape());
    if got != expected {
        let remedy = "give values of the average's shape";
        let error = distribute_values::Error::Shape { what: "moving average", replica: 0, got, expected, remedy };
        return Err(error.into());
    }
    match a.dtype()? {
        DType::F64 => combine_as::<f64, L, T>(a, b, f, |wide| wide),
        _ => combine_as::<f32, L, T>(a, b, f, |wide| wide as f32),
    }
}

fn combine_as<E, L, T>(a: &T, b: &T, f: impl Fn(f64, f64) -> f64, narrow: impl Fn(f64) -> E) -> Result<T>
where
    E: Element + Into<f64>,
    T: TensorStorage<L>,
{
    let pairs = a.to_elements::<E>()?.into_iter().zip(b.to_elements::<E>()?);
    let elements = pairs.map(|(a, b)| narrow(f(a.into(), b.into()))).collect();
    Ok(a.of_elements::<E>(&a.shape(), elements)?)
}

#[cfg(test)]
mod tests {
    use distribute_values::HostTensor;

    use super::*;
    use crate::{CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy};

    fn strategies() -> Vec<Strategy> {
        vec![
            OneDeviceStrategy::builder("CPU:0").build().unwrap(),
            MirroredStrategy::builder().devices(["CPU:0", "CPU:1", "CPU:2"]).build().unwrap(),
            CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap(),
        ]
    }

    fn value(strategy: &Strategy, average: &MovingAverage<HostTensor>) -> Vec<f64> {
        let value = strategy.with_call_context(|context| average.value(context)).unwrap();
        value.to_elements::<f64>().unwrap()
    }

    /// The value of a replica in a step.
    fn seen(step: usize, replica: usize) -> [f64; 2] {
        [(step * step) as f64 + replica as f64, 1.0 / (1 + step + replica) as f64]
    }

    fn step(strategy: &Strategy, average: &MovingAverage<HostTensor>, step: usize) {
        let update = |context: &crate::ReplicaContext, ()| {
            let value = HostTensor::new(&[2], seen(step, context.replica_id()).to_vec())?;
            average.update(context.call_context(), &value)?;
            Ok::<_, Error>(average.value(context.call_context())?.to_elements::<f64>()?)
        };
        let values = strategy.run_with((), update).unwrap();
        // All replicas see the same.
        assert!(values.values().iter().all(|value| *value == self::value(strategy, average)), "{values:?}");
    }

    #[test]
    fn averages_are_those_of_a_sequential_program() {
        let decay = 0.75;
        for strategy in strategies() {
            let replicas = strategy.num_replicas_in_sync();
            let initial = HostTensor::new(&[2], vec![2.0, -1.0]).unwrap();
            let plain = MovingAverage::new(&strategy, "plain", &initial, decay).unwrap();
            let debiased = MovingAverage::debiased(&strategy, "debiased", &initial, decay).unwrap();
            assert_eq!(value(&strategy, &debiased), [0.0, 0.0]);
            let (mut expected, mut sums, mut weight) = ([2.0, -1.0], [0.0, 0.0], 0.0);
            for number in 0..6 {
                step(&strategy, &plain, number);
                step(&strategy, &debiased, number);
                weight = decay * weight + 1.0 - decay;
                for at in 0..2 {
                    let mean = (0..replicas).map(|replica| seen(number, replica)[at]).sum::<f64>() / replicas as f64;
                    expected[at] = decay * expected[at] + (1.0 - decay) * mean;
                    sums[at] = decay * sums[at] + (1.0 - decay) * mean;
                }
                for at in 0..2 {
                    assert!((value(&strategy, &plain)[at] - expected[at]).abs() < 1e-12);
                    assert!((value(&strategy, &debiased)[at] - sums[at] / weight).abs() < 1e-12);
                }
            }
            let names: Vec<&str> = debiased.variables().map(DistributedVariable::name).collect();
            assert_eq!(names, ["debiased", "debiased/weight"]);
        }
    }

    #[test]
    fn a_failed_run_changes_nothing() {
        for strategy in strategies() {
            let average = MovingAverage::debiased(&strategy, "a", &HostTensor::scalar(0.0), 0.5).unwrap();
            let update = |fails: bool| {
                strategy.run_with((), |context, ()| {
                    average.update(context.call_context(), &HostTensor::scalar(8.0))?;
                    match fails {
                        true => Err(Error::NoData),
                        false => Ok(()),
                    }
                })
            };
            update(false).unwrap();
            assert!(update(true).is_err());
            let variables: Vec<f64> =
                average.variables().map(|v| v.components()[0].to_elements::<f64>().unwrap()[0]).collect();
            assert_eq!((value(&strategy, &average), variables), (vec![8.0], vec![4.0, 0.5]));
        }
    }

    #[test]
    fn averages_are_updated_outside_replicas_too_and_in_f32() {
        let strategy = &strategies()[1];
        let average = MovingAverage::new(strategy, "a", &HostTensor::new(&[1], vec![1.0f32]).unwrap(), 0.5).unwrap();
        let two = HostTensor::new(&[1], vec![2.0f32]).unwrap();
        strategy.with_call_context(|context| average.update(context, &two)).unwrap();
        let value = strategy.with_call_context(|context| average.value(context)).unwrap();
        assert_eq!(value.to_elements::<f32>().unwrap(), [1.5]);
    }

    #[test]
    fn what_does_not_fit_is_refused_in_words() {
        let strategy = &strategies()[1];
        let scalar = HostTensor::scalar(0.0);
        for decay in [-0.1, 1.0, f64::NAN] {
            let error = MovingAverage::new(strategy, "norm", &scalar, decay).unwrap_err().to_string();
            assert!(error.contains("\"norm\"") && error.contains("from 0 to below 1"), "{error}");
        }
        let integers = HostTensor::new(&[2], vec![1i64, 2]).unwrap();
        let error = MovingAverage::new(strategy, "norm", &integers, 0.9).unwrap_err().to_string();
        assert!(error.contains("f32 or f64"), "{error}");
        let average = MovingAverage::new(strategy, "norm", &scalar, 0.9).unwrap();
        let update = |value: &HostTensor| strategy.with_call_context(|context| average.update(context, value));
        let error = update(&HostTensor::new(&[2], vec![1.0, 2.0]).unwrap()).unwrap_err().to_string();
        assert!(error.contains("[2]") && error.contains("[]"), "{error}");
    }
}
