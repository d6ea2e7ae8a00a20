//! Examples for training.

use burn::tensor::{Int, Tensor, TensorData};
use distribute_input::{AUTOTUNE, Arrays, Dataset, Element, InputOptions};
use distribute_strategy::{DistributedDataset, Strategy};
use distribute_train::metrics;
use distribute_train::trainer::{self, Batching, class_of};
use distribute_types::Classified;

use crate::backend::device_of;
use crate::data::numbers;
use crate::{Error, FromElement, Items, Result, ToArray};

/// Examples of one replica, one per row: inputs, targets, and optional weights.
///
/// A batch of a program's own type becomes examples by `impl From<MyBatch> for Examples<Tensor<2>, Tensor<1, Int>>`.
#[derive(Clone, Debug)]
pub struct Examples<X, Y> {
    /// The inputs of the model.
    pub inputs: X,
    /// The targets of the outputs.
    pub targets: Y,
    /// The weight of each example.
    pub weights: Option<Tensor<1>>,
}

impl<X, Y> From<(X, Y)> for Examples<X, Y> {
    fn from((inputs, targets): (X, Y)) -> Examples<X, Y> {
        Examples { inputs, targets, weights: None }
    }
}

impl<X, Y> From<(X, Y, Tensor<1>)> for Examples<X, Y> {
    fn from((inputs, targets, weights): (X, Y, Tensor<1>)) -> Examples<X, Y> {
        Examples { inputs, targets, weights: Some(weights) }
    }
}

/// Inputs of a model: a tensor whose rows are examples, or a tuple of such tensors.
pub trait Inputs: Clone + Send + 'static {
    /// Replaces each tensor by what `map` makes of it, always in the same order.
    fn map_tensors<T: TensorMap>(self, map: &mut T) -> Self;
}

/// A function of the tensors of a batch.
pub trait TensorMap {
    /// Returns the replacement of a tensor of floating-point numbers.
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;

    /// Returns the replacement of a tensor of integers.
    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int>;
}

/// Removes automatic differentiation, for evaluation.
pub(super) struct WithoutAutodiff;

impl TensorMap for WithoutAutodiff {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        tensor.without_autodiff()
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        tensor.without_autodiff()
    }
}

/// Returns the shape of each tensor.
pub(super) fn shapes_of<X: Inputs>(inputs: X) -> Vec<Vec<usize>> {
    let mut shapes = Shapes(Vec::new());
    inputs.map_tensors(&mut shapes);
    shapes.0
}

/// Collects the shapes of tensors.
struct Shapes(Vec<Vec<usize>>);

impl TensorMap for Shapes {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0.push(tensor.dims().to_vec());
        tensor
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.0.push(tensor.dims().to_vec());
        tensor
    }
}

/// Targets of a model: a tensor whose rows are examples, of classes or of values.
pub trait Targets: Inputs {
    /// Returns the number of examples.
    fn examples(&self) -> usize;

    /// Copies the targets to host memory, for metrics.
    ///
    /// # Errors
    /// [`Error::NotClass`] for an integer that is negative or does not fit into 32 bits; [`Error::Values`] if the
    /// elements cannot be read.
    fn to_host(&self) -> Result<HostTargets>;
}

/// Targets in host memory, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTargets {
    /// Classes.
    Classes(Vec<u32>),
    /// Values.
    Values(Vec<f32>),
}

impl HostTargets {
    pub(super) fn borrowed(&self) -> metrics::Targets<'_> {
        match self {
            HostTargets::Classes(classes) => metrics::Targets::Classes(classes),
            HostTargets::Values(values) => metrics::Targets::Values(values),
        }
    }

    /// Returns each target as a class.
    pub(super) fn classes(&self) -> Result<Vec<usize>> {
        match self {
            HostTargets::Classes(classes) => Ok(classes.iter().map(|class| *class as usize).collect()),
            HostTargets::Values(values) => Ok(values.iter().map(|value| class_of(*value)).collect::<Result<_, _>>()?),
        }
    }
}

/// Returns integers as classes.
fn classes(data: TensorData) -> Result<Vec<u32>> {
    let class = |(at, class): (usize, i64)| u32::try_from(class).map_err(|_| Error::NotClass { at, class });
    numbers::<i64>(data)?.into_iter().enumerate().map(class).collect()
}

macro_rules! tensors {
    ($($kind:ty, $of:path, $read:path, $map:ident);*) => {$(
        impl<const D: usize> Inputs for Tensor<D, $kind> {
            fn map_tensors<T: TensorMap>(self, map: &mut T) -> Self {
                map.$map(self)
            }
        }

        impl<const D: usize> Targets for Tensor<D, $kind> {
            fn examples(&self) -> usize {
                self.dims()[0]
            }

            fn to_host(&self) -> Result<HostTargets> {
                Ok($of($read(self.clone().without_autodiff().into_data())?))
            }
        }

        impl<const D: usize> PredictionData<Tensor<D, $kind>> for Tensor<D, $kind> {
            fn distribute(
                &self,
                strategy: &Strategy,
                batch_size: usize,
            ) -> Result<DistributedDataset<Tensor<D, $kind>>> {
                Dataset::from_tensor_slices(self.to_array()?).batch(batch_size).distribute(strategy, batch_size)
            }
        }
    )*};
}

tensors!(burn::tensor::Float, HostTargets::Values, numbers, float; Int, HostTargets::Classes, classes, int);

impl Inputs for () {
    fn map_tensors<T: TensorMap>(self, _: &mut T) -> Self {}
}

impl<A: Inputs, B: Inputs> Inputs for (A, B) {
    fn map_tensors<T: TensorMap>(self, map: &mut T) -> Self {
        (self.0.map_tensors(map), self.1.map_tensors(map))
    }
}

impl<A: Inputs, B: Inputs, C: Inputs> Inputs for (A, B, C) {
    fn map_tensors<T: TensorMap>(self, map: &mut T) -> Self {
        (self.0.map_tensors(map), self.1.map_tensors(map), self.2.map_tensors(map))
    }
}

/// Training data: batched datasets of inputs and targets, or of inputs, targets and weights; tensors in memory whose
/// rows are examples; and [`Items`] of burn's datasets.
pub trait TrainingData<X, Y>: trainer::TrainingData<Examples<X, Y>, Error> {}

impl<X, Y, T: trainer::TrainingData<Examples<X, Y>, Error>> TrainingData<X, Y> for T {}

/// Distributes arrays, which become tensors on the replicas' devices.
fn on_devices<T, L, U, V>(strategy: &Strategy, data: DistributedDataset<T>) -> DistributedDataset<V>
where
    T: Element<L>,
    U: FromElement<T> + Into<V>,
    V: Send + 'static,
{
    let replicas = strategy.clone();
    data.map_replicas(move |local, element| {
        let device = device_of(&replicas, local).map_err(Classified::new)?;
        Ok(U::from_element(&element, &device).map_err(Classified::new)?.into())
    })
}

macro_rules! training_data {
    ($(($($array:ident),*), ($($tensor:ty),*);)*) => {$(
        impl<$($array: Element<Arrays>,)* X, Y> trainer::TrainingData<Examples<X, Y>, Error> for Dataset<($($array,)*)>
        where
            X: Inputs + FromElement<A>,
            Y: Targets + FromElement<B>,
            ($($tensor,)*): FromElement<($($array,)*)>,
        {
            fn distribute(
                &self,
                strategy: &Strategy,
                batching: Batching,
            ) -> Result<(DistributedDataset<Examples<X, Y>>, usize)> {
                batching.of_batched()?;
                let batches = on_devices::<_, _, ($($tensor,)*), _>(strategy, strategy.distribute_dataset(self)?);
                Ok((batches, self.batch_size().unwrap_or(1)))
            }
        }
    )*};
}

training_data! {
    (A, B), (X, Y);
    (A, B, W), (X, Y, Tensor<1>);
}

/// Batches elements in memory, shuffled for training.
fn batched<T: Element<L> + Sync, L>(elements: T, batching: Batching) -> Result<Dataset<T>> {
    let rows = elements.rows()?;
    let data = Dataset::from_tensor_slices(elements);
    let data = if batching.shuffle { data.shuffle(rows, 0) } else { data };
    Ok(data.batch(batching.batch_size).prefetch(AUTOTUNE))
}

impl<X, Y> trainer::TrainingData<Examples<X, Y>, Error> for (X, Y)
where
    X: Inputs + ToArray<Array: Sync> + FromElement<X::Array>,
    Y: Targets + ToArray<Array: Sync> + FromElement<Y::Array>,
{
    fn distribute(
        &self,
        strategy: &Strategy,
        batching: Batching,
    ) -> Result<(DistributedDataset<Examples<X, Y>>, usize)> {
        let batches = batched((self.0.to_array()?, self.1.to_array()?), batching)?;
        batches.distribute(strategy, Batching { is_set: false, ..batching })
    }
}

impl<X, Y> trainer::TrainingData<Examples<X, Y>, Error> for (X, Y, Tensor<1>)
where
    X: Inputs + ToArray<Array: Sync> + FromElement<X::Array>,
    Y: Targets + ToArray<Array: Sync> + FromElement<Y::Array>,
{
    fn distribute(
        &self,
        strategy: &Strategy,
        batching: Batching,
    ) -> Result<(DistributedDataset<Examples<X, Y>>, usize)> {
        let arrays = (self.0.to_array()?, self.1.to_array()?, self.2.to_array()?);
        batched(arrays, batching)?.distribute(strategy, Batching { is_set: false, ..batching })
    }
}

impl<I, B, X, Y> trainer::TrainingData<Examples<X, Y>, Error> for Items<I, B>
where
    I: 'static,
    B: Into<Examples<X, Y>> + Clone + Send + 'static,
    X: Inputs,
    Y: Targets,
{
    fn distribute(
        &self,
        strategy: &Strategy,
        batching: Batching,
    ) -> Result<(DistributedDataset<Examples<X, Y>>, usize)> {
        batching.of_batched()?;
        let batches = Items::distribute(self, strategy)?.map_replicas(|_, batch| Ok(batch.into()));
        Ok((batches, self.indices().batch_size().unwrap_or(1)))
    }
}

/// Data for prediction: a batched dataset of inputs, a tensor of them, or [`Items`] of burn's datasets.
pub trait PredictionData<X> {
    /// Distributes batches over all replicas, whose outputs are returned in the data's order.
    ///
    /// # Errors
    /// [`Error::Strategy`] if the data cannot be distributed.
    fn distribute(&self, strategy: &Strategy, batch_size: usize) -> Result<DistributedDataset<X>>;
}

/// Options under which all workers read the data together, so that rows are given to replicas in order, and outputs are
/// returned in it.
fn in_order() -> InputOptions {
    InputOptions::default().deterministic(true)
}

impl<T: Element<Arrays>, X: Inputs + FromElement<T>> PredictionData<X> for Dataset<T> {
    fn distribute(&self, strategy: &Strategy, _: usize) -> Result<DistributedDataset<X>> {
        Ok(on_devices::<_, _, X, _>(strategy, strategy.distribute_dataset_with(self, in_order())?))
    }
}

impl<I: 'static, X: Inputs> PredictionData<X> for Items<I, X> {
    fn distribute(&self, strategy: &Strategy, _: usize) -> Result<DistributedDataset<X>> {
        Ok(self.fetched(strategy, strategy.distribute_dataset_with(self.indices(), in_order())?))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::*;

    #[test]
    fn targets_that_are_no_classes_are_refused_in_words() {
        let refused = |data: TensorData| {
            let dtype = data.dtype();
            let targets = Tensor::<1, Int>::from_data(data, (&Device::flex(), dtype));
            targets.to_host().unwrap_err().to_string()
        };
        let told = refused(TensorData::from([7i64, -1]));
        assert!(told.starts_with("target 1 of a batch is -1, and metrics"), "{told}");
        let told = refused(TensorData::from([1i64 << 32]));
        assert!(told.starts_with("target 0 of a batch is 4294967296, and metrics"), "{told}");
        let told = refused(TensorData::from([0u64, u64::MAX]));
        assert!(told.contains("element 1 is 18446744073709551615"), "{told}");
        let most = Tensor::<1, Int>::from_data([0i64, i64::from(u32::MAX)], (&Device::flex(), DType::I64));
        assert_eq!(most.to_host().unwrap(), HostTargets::Classes(vec![0, u32::MAX]));
    }

    #[test]
    fn only_whole_numbers_from_0_on_are_classes() {
        assert_eq!(HostTargets::Values(vec![0.0, 2.0]).classes().unwrap(), [0, 2]);
        for target in [0.5, -1.0, f32::NAN, f32::INFINITY] {
            let error = HostTargets::Values(vec![1.0, target]).classes().unwrap_err().to_string();
            assert!(error.contains("class_weights are by class"), "{error}");
        }
    }
}
