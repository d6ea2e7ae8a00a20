//! Embeddings of which a worker fetches only the rows that it needs.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::{Device, Module, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use distribute_parameter_server::{Gradient, ShardedVariable};
use distribute_values::TensorStorage;
use parking_lot::Mutex;

use super::backends::wrapped;
use crate::context::check_rows;
use crate::{Candle, Embedding, embedding_with};

/// A table of vectors by index. On a worker of a parameter-server cluster, a lookup fetches only the rows that it
/// needs, and only their gradient is sent. Elsewhere the table is an ordinary variable.
///
/// A worker keeps the rows of each lookup until the function computes gradients, or gets its model again: a function
/// that evaluates many batches should call [`CandleWorker::model`](crate::CandleWorker::model) for each.
#[derive(Clone)]
pub struct ShardedEmbedding(Kind);

#[derive(Clone)]
enum Kind {
    Here(Embedding),
    OnServers(Arc<Table>, usize),
}

/// Creates a table of `rows` vectors of `width` elements, normally distributed with standard deviation 1 like candle's
/// `embedding`.
///
/// # Errors
/// [`candle_core::Error`] if the variable cannot be created or exists with another shape.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use distribute_candle::{CandleStrategy, Error, sharded_embedding};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().build()?;
/// let table = strategy.scope(|vb| sharded_embedding(100, 8, vb.pp("words")))?;
/// let vectors = table.first().forward(&Tensor::new(&[[3u32, 4, 3]], &Device::Cpu)?)?;
/// assert_eq!(vectors.dims(), [1, 3, 8]);
/// # Ok::<(), Error>(())
/// ```
pub fn sharded_embedding(rows: usize, width: usize, vb: VarBuilder<'_>) -> Result<ShardedEmbedding> {
    sharded_embedding_with(rows, width, Init::Randn { mean: 0.0, stdev: 1.0 }, vb)
}

/// Creates a table like [`sharded_embedding`], with other initial values.
///
/// # Errors
/// The errors of [`sharded_embedding`] occur in the same cases.
///
/// # Examples
/// ```
/// use candle_nn::Init;
/// use distribute_candle::{CandleStrategy, Error, sharded_embedding_with};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().build()?;
/// let init = Init::Randn { mean: 0.0, stdev: 0.01 };
/// let table = strategy.scope(|vb| sharded_embedding_with(100, 8, init, vb.pp("words")))?;
/// # Ok::<(), Error>(())
/// ```
pub fn sharded_embedding_with(rows: usize, width: usize, init: Init, vb: VarBuilder<'_>) -> Result<ShardedEmbedding> {
    WANTED.set(true);
    let table = embedding_with((rows, width), "weight", init, vb);
    // Backends without servers do not read the flag.
    WANTED.set(false);
    let kind = match (HANDED.take(), table?) {
        (Some(table), _) => Kind::OnServers(table, width),
        (None, table) => Kind::Here(table),
    };
    Ok(ShardedEmbedding(kind))
}

#[cfg(test)]
impl ShardedEmbedding {
    /// Returns the number of lookups that are kept for a gradient.
    pub(super) fn kept_lookups(&self) -> usize {
        match &self.0 {
            Kind::Here(_) => 0,
            Kind::OnServers(table, _) => table.fetched.lock().len(),
        }
    }
}

thread_local! {
    /// Whether the next variable that is requested is a table; candle's `VarBuilder` cannot express that.
    static WANTED: Cell<bool> = const { Cell::new(false) };
    /// The table that the backend created for it.
    static HANDED: RefCell<Option<Arc<Table>>> = const { RefCell::new(None) };
}

/// Returns whether the requested variable is a table, and resets the flag.
pub(super) fn is_wanted() -> bool {
    WANTED.take()
}

pub(super) fn hand_over(table: Arc<Table>) {
    HANDED.set(Some(table));
}

/// A worker's view of a table on the servers.
pub(super) struct Table {
    pub(super) variable: ShardedVariable,
    /// The rows that were looked up in the current step, and their fetched vectors.
    fetched: Mutex<Vec<(Vec<usize>, Var)>>,
}

impl Table {
    pub(super) fn new(variable: ShardedVariable) -> Table {
        Table { variable, fetched: Mutex::default() }
    }

    /// Drops lookups that never ran backward, such as those of an earlier step.
    pub(super) fn begin_step(&self) {
        self.fetched.lock().clear();
    }

    /// Returns the gradient of all rows that were looked up.
    pub(super) fn gradient(&self, of: &candle_core::backprop::GradStore) -> crate::Result<Option<Gradient>> {
        self.rows_gradient(of)?.map(|rows| self.gradient_of(rows)).transpose()
    }

    /// Returns the rows that were looked up, in order, and their gradients.
    pub(super) fn rows_gradient(&self, of: &candle_core::backprop::GradStore) -> crate::Result<Option<RowsGradient>> {
        let fetched = std::mem::take(&mut *self.fetched.lock());
        let with_gradient = |(rows, vectors): (Vec<usize>, Var)| Some((rows, of.get(vectors.as_tensor())?.clone()));
        let mut sum = None;
        for part in fetched.into_iter().filter_map(with_gradient) {
            sum = add_rows(sum, Some(part))?;
        }
        Ok(sum)
    }

    /// Makes a gradient for the servers.
    pub(super) fn gradient_of(&self, (rows, gradient): RowsGradient) -> crate::Result<Gradient> {
        Ok(Gradient::of_rows::<Candle, _>(&self.variable, rows, &gradient)?)
    }

    fn forward(&self, ids: &Tensor, width: usize) -> Result<Tensor> {
        let wanted = check_rows(&ids.to_device(&Device::Cpu)?, self.variable.info().rows())?;
        let mut rows = wanted.clone();
        rows.sort_unstable();
        rows.dedup();
        let fetched = match self.variable.dtype() {
            distribute_device::DType::F64 => self.fetch::<f64>(&rows, width, ids.device())?,
            _ => self.fetch::<f32>(&rows, width, ids.device())?,
        };
        let vectors = fetched.as_tensor().index_select(&places(&wanted, &rows)?, 0)?;
        self.fetched.lock().push((rows, fetched));
        let shape: Vec<usize> = ids.dims().iter().copied().chain([width]).collect();
        vectors.reshape(shape)
    }

    fn fetch<T: distribute_device::Element + candle_core::WithDType>(
        &self,
        rows: &[usize],
        width: usize,
        device: &Device,
    ) -> Result<Var> {
        let vectors = self.variable.pull_rows::<T>(rows).map_err(wrapped)?;
        let elements = vectors.to_elements::<T>().map_err(candle_core::Error::wrap)?;
        Var::from_vec(elements, (rows.len(), width), device)
    }
}

/// Rising indices of rows, and the gradient of each.
pub(super) type RowsGradient = (Vec<usize>, Tensor);

/// Adds gradients by rows; those of common rows are summed.
pub(super) fn add_rows(sum: Option<RowsGradient>, more: Option<RowsGradient>) -> Result<Option<RowsGradient>> {
    let ((rows, sum), (others, more)) = match (sum, more) {
        (Some(sum), Some(more)) => (sum, more),
        (one, other) => return Ok(one.or(other)),
    };
    let mut all: Vec<usize> = rows.iter().chain(&others).copied().collect();
    all.sort_unstable();
    all.dedup();
    let zeros = Tensor::zeros((all.len(), sum.dim(1)?), sum.dtype(), sum.device())?;
    let sum = zeros.index_add(&places(&rows, &all)?, &sum, 0)?;
    let sum = sum.index_add(&places(&others, &all)?, &more.to_device(sum.device())?, 0)?;
    Ok(Some((all, sum)))
}

/// Returns the position of each of `wanted` in the sorted `rows`.
fn places(wanted: &[usize], rows: &[usize]) -> Result<Tensor> {
    let place = |row: &usize| rows.binary_search(row).unwrap_or(0) as u32;
    Tensor::new(wanted.iter().map(place).collect::<Vec<u32>>(), &Device::Cpu)
}

impl Module for ShardedEmbedding {
    /// # Shapes
    /// `ids`: u32, i64 or u8 of any shape; the result has one dimension more.
    ///
    /// # Errors
    /// [`candle_core::Error`] if an index is not that of a row, or a server is lost.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.0 {
            Kind::Here(table) => table.forward(ids),
            Kind::OnServers(table, width) => table.forward(ids, *width),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use distribute_cluster::TaskType;
    use distribute_parameter_server::{ParameterServerStrategy, Program, Server};
    use distribute_values::HostTensor;

    use super::super::local_cluster::resolver;
    use super::*;

    #[test]
    fn indices_that_are_no_row_are_refused() {
        let task = resolver();
        let _server = Server::start(&task(TaskType::Ps), Program::new()).unwrap();
        let strategy = ParameterServerStrategy::builder(&task(TaskType::Chief)).build().unwrap();
        let values = HostTensor::new(&[6, 1], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0f32]).unwrap();
        let table = Table::new(strategy.variable("table", &values).unwrap());
        let ids = |ids: &[i64], dtype| Tensor::new(ids, &Device::Cpu)?.to_dtype(dtype);
        let vectors = |dtype| table.forward(&ids(&[5, 0, 5], dtype)?, 1)?.flatten_all()?.to_vec1::<f32>();
        for dtype in [DType::I64, DType::U32, DType::U8] {
            assert_eq!(vectors(dtype).unwrap(), [5.0, 0.0, 5.0]);
        }
        assert!(vectors(DType::F32).unwrap_err().to_string().contains("u32, i64 or u8"));
        for wrong in [(1 << 32) + 5, -1, 6] {
            let error = table.forward(&ids(&[0, wrong], DType::I64).unwrap(), 1).unwrap_err().to_string();
            assert!(error.contains(&format!("index 1 is {wrong}")), "{error}");
        }
    }
}
