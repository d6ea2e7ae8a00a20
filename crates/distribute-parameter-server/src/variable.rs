//! A variable, split into shards on several servers.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use distribute_device::{DType, Element};
use distribute_values::{HostTensor, Scatter, TensorStorage};

use crate::numbers;
use crate::parameters::{Parameters, ShardInfo, VariableInfo};
use crate::store::operation_of;
use crate::wire::proto::Origin;
use crate::{Error, Result};

/// A variable on parameter servers, split along its first dimension; it reads and writes as one.
///
/// Its own methods write as the coordinator. A function that workers run changes it by
/// [`WorkerContext`](crate::WorkerContext), which makes each change once even if the function runs twice; the methods
/// of the variable refuse that.
///
/// # Source
/// `tf.distribute`'s `ShardedVariable`.
#[derive(Clone, Debug)]
pub struct ShardedVariable {
    info: Arc<VariableInfo>,
    parameters: Arc<Parameters>,
}

impl ShardedVariable {
    pub(crate) fn new(info: Arc<VariableInfo>, parameters: Arc<Parameters>) -> ShardedVariable {
        ShardedVariable { info, parameters }
    }

    /// Returns the variable's name.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// Returns the length of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.info.shape
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.info.dtype
    }

    /// Returns the shards, in the order of their rows.
    pub fn shards(&self) -> &[ShardInfo] {
        &self.info.shards
    }

    /// Returns the description of the variable, with its shards.
    pub fn info(&self) -> &Arc<VariableInfo> {
        &self.info
    }

    /// Reads all elements.
    ///
    /// # Errors
    /// [`Error::Variable`] if `T` is not the variable's type or the elements do not fit in memory;
    /// [`Error::ServerLost`] if a server cannot be reached.
    pub fn read<T: Element>(&self) -> Result<HostTensor<T>> {
        self.check_type(T::DTYPE)?;
        let bytes = self.parameters.block_on(self.parameters.whole(&self.info, ""))?;
        Ok(HostTensor::new(&self.info.shape, numbers::whole::<T>(&bytes).into_owned())?)
    }

    /// Reads a range of rows.
    ///
    /// # Shapes
    /// `[rows, …]`, followed by the variable's shape without its first dimension.
    ///
    /// # Errors
    /// [`Error::Variable`] for a range outside the variable, or if `T` is not its type; [`Error::ServerLost`] if a
    /// server cannot be reached.
    pub fn slice<T: Element>(&self, rows: impl RangeBounds<usize>) -> Result<HostTensor<T>> {
        let start = match rows.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match rows.end_bound() {
            Bound::Included(end) => end.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.info.rows(),
        };
        if self.info.shape.is_empty() || start > end || end > self.info.rows() {
            return Err(self.wrong(format!("rows {start}..{end} are outside its shape {:?}", self.info.shape)));
        }
        self.embedding_lookup(&(start..end).collect::<Vec<_>>())
    }

    /// Reads the rows with these numbers, in order; only they are transferred, in the variable's own type.
    ///
    /// # Shapes
    /// `[rows.len(), …]`, followed by the variable's shape without its first dimension.
    ///
    /// # Errors
    /// [`Error::Variable`] for a row outside the variable, for a scalar, or if `T` is not its type;
    /// [`Error::ServerLost`] if a server cannot be reached.
    ///
    /// # Source
    /// `tf.nn.embedding_lookup` of a sharded variable.
    pub fn embedding_lookup<T: Element>(&self, rows: &[usize]) -> Result<HostTensor<T>> {
        self.rows(rows, false)
    }

    /// Reads rows as [`embedding_lookup`](ShardedVariable::embedding_lookup) does, for a step of training: in the type
    /// that [`wire`](crate::ParameterServerStrategyBuilder::wire) has set, which rounds the values, as
    /// [`WorkerContext::pull_into`](crate::WorkerContext::pull_into) does.
    ///
    /// # Errors
    /// The errors of [`embedding_lookup`](ShardedVariable::embedding_lookup).
    pub fn pull_rows<T: Element>(&self, rows: &[usize]) -> Result<HostTensor<T>> {
        self.rows(rows, true)
    }

    fn rows<T: Element>(&self, rows: &[usize], in_wire_type: bool) -> Result<HostTensor<T>> {
        self.check_type(T::DTYPE)?;
        let mut shape = self.info.shape.clone();
        match shape.first_mut() {
            Some(first) => *first = rows.len(),
            None => return Err(self.wrong("it has no rows, being a scalar; read it as a whole".to_owned())),
        }
        let row_len = self.info.row_len();
        let mut elements = Vec::new();
        let len = rows.len().checked_mul(row_len).filter(|len| elements.try_reserve_exact(*len).is_ok());
        let no_room = || self.wrong(format!("there is no room here for {} rows of {row_len} elements", rows.len()));
        elements.resize(len.ok_or_else(no_room)?, T::default());
        let mut fits = true;
        let mut show = |place: usize, inside: usize, dtype: DType, bytes: &[u8]| {
            let start = place * row_len + inside;
            let target = elements.get_mut(start..start + bytes.len() / dtype.size_bytes());
            fits &= target
                .is_some_and(|target| numbers::copy_into(bytes, dtype, bytemuck::cast_slice_mut(target), T::DTYPE));
            Ok(())
        };
        self.parameters.block_on(self.parameters.lookup(&self.info, rows, in_wire_type, &mut show))?;
        if !fits {
            return Err(self.wrong("a server sent elements that are none of it".to_owned()));
        }
        Ok(HostTensor::new(&shape, elements)?)
    }

    /// Replaces all elements.
    ///
    /// # Errors
    /// [`Error::Variable`] if shape or type differ, or in a function of a worker; [`Error::Values`] if `value` cannot
    /// be read; [`Error::ServerLost`] if a server cannot be reached.
    pub fn assign<L, T: TensorStorage<L>>(&self, value: &T) -> Result<()> {
        self.assign_as(&self.own_origin()?, Scatter::Update, None, value)
    }

    /// Adds to all elements.
    ///
    /// Servers are told one after another, and each call of this method counts: after [`Error::ServerLost`] some
    /// servers may have added already, and add twice if it is called again. Read the elements then, and
    /// [`assign`](ShardedVariable::assign) them.
    ///
    /// # Errors
    /// [`Error::Variable`] if shape or type differ, or in a function of a worker; [`Error::Values`] if `value` cannot
    /// be read; [`Error::ServerLost`] if a server cannot be reached.
    pub fn assign_add<L, T: TensorStorage<L>>(&self, value: &T) -> Result<()> {
        self.assign_as(&self.own_origin()?, Scatter::Add, None, value)
    }

    /// Subtracts from all elements. After [`Error::ServerLost`] some servers may have done so, as with
    /// [`assign_add`](ShardedVariable::assign_add).
    ///
    /// # Errors
    /// [`Error::Variable`] if shape or type differ, or in a function of a worker; [`Error::Values`] if `value` cannot
    /// be read; [`Error::ServerLost`] if a server cannot be reached.
    pub fn assign_sub<L, T: TensorStorage<L>>(&self, value: &T) -> Result<()> {
        self.assign_as(&self.own_origin()?, Scatter::Sub, None, value)
    }

    /// Changes some rows, in order; a row may be named more than once. After [`Error::ServerLost`] some servers may
    /// have done so, as with [`assign_add`](ShardedVariable::assign_add): only `Update`, `Min` and `Max` may be
    /// repeated.
    ///
    /// # Shapes
    /// `values`: `[rows.len(), …]`, followed by the variable's shape without its first dimension.
    ///
    /// # Errors
    /// [`Error::Variable`] for a row outside the variable, if shape or type differ, if whole numbers are divided by
    /// zero, or in a function of a worker; [`Error::Values`] if `values` cannot be read; [`Error::ServerLost`] if a
    /// server cannot be reached.
    pub fn scatter<L, T: TensorStorage<L>>(&self, scatter: Scatter, rows: &[usize], values: &T) -> Result<()> {
        self.assign_as(&self.own_origin()?, scatter, Some(rows), values)
    }

    pub(crate) fn assign_as<L, T: TensorStorage<L>>(
        &self,
        origin: &Origin,
        scatter: Scatter,
        rows: Option<&[usize]>,
        value: &T,
    ) -> Result<()> {
        self.check_type(value.dtype()?)?;
        let mut expected = self.info.shape.clone();
        if let Some(rows) = rows {
            let Some(first) = expected.first_mut() else {
                return Err(self.wrong("it has no rows, being a scalar; assign it".to_owned()));
            };
            *first = rows.len();
            if let Some(row) = rows.iter().find(|row| **row >= self.info.rows()) {
                return Err(self.wrong(format!("there is no row {row}; it has {}", self.info.rows())));
            }
        }
        if value.shape() != expected {
            return Err(self.wrong(format!("a value of shape {:?} is given and {expected:?} expected", value.shape())));
        }
        let mut bytes = Vec::new();
        value.read(&mut |elements| bytes = elements.as_bytes().to_vec())?;
        if scatter == Scatter::Div && numbers::has_integer_zero(&bytes, self.info.dtype) {
            return Err(self.wrong("a row of whole numbers to divide by has a zero; give others".to_owned()));
        }
        let (operation, bytes) = (operation_of(scatter), Bytes::from(bytes));
        self.parameters.block_on(self.parameters.assign(origin, &self.info, operation, rows, &bytes))
    }

    /// Returns the origin of changes that belong to no closure.
    ///
    /// # Errors
    /// [`Error::Variable`] on a worker, or if a coordinator that was restarted in place has not asked where training
    /// continues.
    fn own_origin(&self) -> Result<Origin> {
        if self.parameters.are_of_worker() {
            let problem = "a function of a worker would change it again whenever it runs again; change it by \
                           WorkerContext::assign, WorkerContext::assign_add, WorkerContext::assign_sub or \
                           WorkerContext::scatter";
            return Err(self.wrong(problem.to_owned()));
        }
        if self.parameters.sealed.load(Ordering::Acquire) {
            let problem = "the servers have kept its trained values, which this would change; where is_continued is \
                           true, leave initial changes out, and call first_step before others";
            return Err(self.wrong(problem.to_owned()));
        }
        Ok(Origin { session: self.parameters.session(), worker: u32::MAX, epoch: u64::MAX, ..Origin::default() })
    }

    fn check_type(&self, given: DType) -> Result<()> {
        if given == self.info.dtype {
            return Ok(());
        }
        Err(self.wrong(format!("it has elements of {}, and {given} was asked for", self.info.dtype)))
    }

    fn wrong(&self, problem: String) -> Error {
        Error::Variable { name: self.info.name.clone(), problem }
    }
}
