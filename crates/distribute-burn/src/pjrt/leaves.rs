//! The tensors of a batch: their elements on the host, and what stands for them in a record.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use burn_backend::DType as BurnType;
use burn_flex::{Flex, FlexTensor};
use distribute_device::HostBuffer;

use super::program::one_byte_each;
use super::trace;
use crate::backend::is_whole;
use crate::tensor::{flex_of, not_flex, refused};
use crate::trainer::{Inputs, TensorMap};
use crate::{Error, Result};

/// One tensor of a batch, in host memory. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Leaf {
    pub(crate) dtype: BurnType,
    pub(crate) shape: Vec<usize>,
    /// The elements; truth values have a byte each.
    pub(crate) memory: Arc<HostBuffer>,
}

impl Leaf {
    pub(crate) fn of(tensor: &FlexTensor) -> Result<Leaf> {
        let copy;
        let tensor = if is_whole(tensor) {
            tensor
        } else {
            copy = tensor.to_contiguous();
            &copy
        };
        let shape = tensor.layout().shape().as_slice().to_vec();
        Leaf::new(tensor.dtype(), shape, &one_byte_each(tensor.dtype(), tensor.bytes()))
    }

    pub(crate) fn floats(values: &[f32]) -> Result<Leaf> {
        Leaf::new(BurnType::F32, vec![values.len()], bytemuck::cast_slice(values))
    }

    fn new(dtype: BurnType, shape: Vec<usize>, bytes: &[u8]) -> Result<Leaf> {
        let memory = HostBuffer::from_slice(bytes).map_err(Error::Accelerator)?;
        Ok(Leaf { dtype, shape, memory: Arc::new(memory) })
    }

    pub(crate) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Returns the shape of a row, and the type of its elements.
    pub(crate) fn row(&self) -> (&[usize], BurnType) {
        (self.shape.get(1..).unwrap_or_default(), self.dtype)
    }

    /// Returns the tensor with `rows` rows, of which those that it lacks repeat its first row. If it has none, the
    /// result has rows like the first one of `other`.
    pub(crate) fn padded(&self, rows: usize, other: &Leaf) -> Result<Leaf> {
        let model = if self.rows() > 0 { self } else { other };
        let given = model.rows();
        if given == 0 || self.rows() >= rows {
            return Ok(self.clone());
        }
        let all = model.memory.as_bytes();
        let row = &all[..all.len() / given];
        let mut bytes = self.memory.as_bytes().to_vec();
        bytes.extend((self.rows()..rows).flat_map(|_| row));
        let mut shape = model.shape.clone();
        shape[0] = rows;
        Leaf::new(model.dtype, shape, &bytes)
    }
}

/// The tensors of a batch in the order in which they are mapped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Collected {
    pub(crate) leaves: Vec<Leaf>,
    problem: Option<String>,
}

impl Collected {
    fn push(&mut self, tensor: &FlexTensor) {
        match Leaf::of(tensor) {
            Ok(leaf) => self.leaves.push(leaf),
            Err(error) => self.problem = Some(error.to_string()),
        }
    }
}

impl TensorMap for Collected {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        match flex_of(tensor.clone()) {
            Ok(flex) => self.push(&flex),
            Err(error) => self.problem = Some(error.to_string()),
        }
        tensor
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        match tensor.clone().without_autodiff().try_into_primitive::<Flex>() {
            Ok(flex) => self.push(&flex),
            Err(error) => self.problem = Some(not_flex(error)),
        }
        tensor
    }
}

/// Reads the tensors of a batch.
pub(crate) fn collect<X: Inputs>(tensors: X) -> Result<Vec<Leaf>> {
    let mut collected = Collected::default();
    let _ = tensors.map_tensors(&mut collected);
    match collected.problem {
        None => Ok(collected.leaves),
        Some(problem) => Err(refused("read a batch", problem).into()),
    }
}

/// Replaces the tensors of a batch by inputs of the record that is being made on this thread.
pub(crate) struct Feed {
    /// Whether they are on the device with automatic differentiation.
    pub(crate) autodiff: bool,
    /// The shape and type of the leaves that follow.
    pub(crate) leaves: std::vec::IntoIter<Leaf>,
}

impl TensorMap for Feed {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.leaves.next().and_then(|leaf| trace::float_input(leaf, self.autodiff)).unwrap_or(tensor)
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.leaves.next().and_then(|leaf| trace::int_input(leaf, self.autodiff)).unwrap_or(tensor)
    }
}

/// Puts the outputs of a program in the places of the tensors that a step has returned.
pub(crate) struct Fill(pub(crate) std::vec::IntoIter<FlexTensor>);

impl TensorMap for Fill {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0.next().map_or(tensor, Tensor::from_primitive::<Flex>)
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.0.next().map_or(tensor, Tensor::from_primitive::<Flex>)
    }
}
