//! Gradients sent to the servers.

use std::sync::Arc;

use bytes::Bytes;
use distribute_device::{BufferRef, DType};
use distribute_values::TensorStorage;

use super::table::{ShardInfo, VariableInfo};
use crate::numbers;
use crate::variable::ShardedVariable;
use crate::wire::proto::PushRequest;
use crate::{Error, Result};

/// A gradient to push.
#[derive(Clone, Debug)]
pub struct Gradient {
    variable: Arc<VariableInfo>,
    /// The rows of the elements, ascending; `None` for all.
    rows: Option<Vec<usize>>,
    dtype: DType,
    elements: Bytes,
}

impl Gradient {
    /// Creates the gradient of a whole variable.
    ///
    /// # Shapes
    /// `gradient`: the variable's shape.
    ///
    /// # Errors
    /// [`Error::Variable`] if the shape differs; [`Error::Values`] if the tensor cannot be read.
    pub fn new<L, T: TensorStorage<L>>(variable: &ShardedVariable, gradient: &T) -> Result<Gradient> {
        Gradient::of(variable, None, gradient)
    }

    /// Creates the gradient of some rows, ascending and distinct; the gradient of all others is zero and is not sent.
    ///
    /// # Shapes
    /// `gradient`: `[rows.len(), …]`, followed by the variable's shape without its first dimension.
    ///
    /// # Errors
    /// [`Error::Variable`] if the rows do not ascend, the variable has no such row, or the shape differs;
    /// [`Error::Values`] if the tensor cannot be read.
    pub fn of_rows<L, T: TensorStorage<L>>(
        variable: &ShardedVariable,
        rows: Vec<usize>,
        gradient: &T,
    ) -> Result<Gradient> {
        if rows.windows(2).any(|pair| pair[0] >= pair[1]) {
            let problem =
                "the rows of its gradient do not rise; sum those of a row that occurs more than once".to_owned();
            return Err(Error::Variable { name: variable.name().to_owned(), problem });
        }
        if let Some(row) = rows.last().filter(|row| **row >= variable.info().rows()) {
            let problem = format!("its gradient is of row {row}, and it has {}", variable.info().rows());
            return Err(Error::Variable { name: variable.name().to_owned(), problem });
        }
        Gradient::of(variable, Some(rows), gradient)
    }

    fn of<L, T: TensorStorage<L>>(
        variable: &ShardedVariable,
        rows: Option<Vec<usize>>,
        gradient: &T,
    ) -> Result<Gradient> {
        let (variable, dtype) = (variable.info().clone(), gradient.dtype()?);
        // As many elements in another order would be applied to the wrong ones.
        let of_row = variable.shape.get(1..).unwrap_or_default();
        let expected = match &rows {
            Some(rows) => [&[rows.len()], of_row].concat(),
            None => variable.shape.clone(),
        };
        let given = gradient.shape();
        if given != expected {
            let problem = format!("a gradient of shape {given:?} is given, and {expected:?} is expected");
            return Err(Error::Variable { name: variable.name.clone(), problem });
        }
        let mut elements = Bytes::new();
        gradient.read(&mut |buffer| elements = Bytes::copy_from_slice(buffer.as_bytes()))?;
        Ok(Gradient { variable, rows, dtype, elements })
    }

    /// Returns the parts for each shard, with the shard's server.
    pub(super) fn cut(&self, wire: Option<DType>) -> Result<Vec<(usize, PushRequest)>> {
        let Gradient { variable, rows, dtype, elements } = self;
        let (dtype, elements) = match BufferRef::from_bytes(*dtype, elements) {
            Ok(view) => numbers::to_wire(view, wire).unwrap_or_else(|| (*dtype, elements.clone())),
            Err(_) => (*dtype, elements.clone()),
        };
        let row_bytes = variable.row_len() * dtype.size_bytes();
        let count = rows.as_ref().map_or(variable.rows(), Vec::len);
        if elements.len() != count * row_bytes {
            let problem = format!(
                "a gradient of {} elements is given, and {} are expected",
                elements.len() / dtype.size_bytes(),
                count * variable.row_len()
            );
            return Err(Error::Variable { name: variable.name.clone(), problem });
        }
        let request = |shard: &ShardInfo, rows, payload| {
            let (shard, dtype) = (shard.number, u32::from(dtype.code()));
            PushRequest { shard, dtype, rows, payload, ..PushRequest::default() }
        };
        let Some(rows) = rows else {
            let whole = |shard: &ShardInfo| {
                let range = shard.rows.start * row_bytes..shard.rows.end * row_bytes;
                (shard.server, request(shard, None, elements.slice(range)))
            };
            return Ok(variable.shards.iter().map(whole).collect());
        };
        let mut parts = Vec::new();
        for shard in &variable.shards {
            let from = rows.partition_point(|row| *row < shard.rows.start);
            let to = rows.partition_point(|row| *row < shard.rows.end);
            if from < to {
                let numbers = numbers::rows_to_bytes(rows[from..to].iter().map(|row| (row - shard.rows.start) as u64));
                let payload = elements.slice(from * row_bytes..to * row_bytes);
                parts.push((shard.server, request(shard, Some(numbers), payload)));
            }
        }
        Ok(parts)
    }
}
