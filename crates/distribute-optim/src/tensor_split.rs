//! The parts of variables that are split among the ranks of tensor groups.

use std::sync::Arc;

use distribute_collectives::ProcessGroup;
use distribute_device::BufferRef;
use distribute_strategy::get_replica_context;
use distribute_values::TensorStorage;

use crate::Error;

/// How a variable is split among the ranks of each tensor group.
///
/// Along one axis the whole consists of `blocks` blocks of equal length, each of which consists of `parts` pieces. The
/// rank at place p of its tensor group has the p-th piece of every block, one after another. With one block, that is
/// the p-th slice of the whole. Queries, keys and values of attention in one matrix are three blocks, so that a rank
/// has all three of its heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSplit {
    axis: usize,
    blocks: usize,
    parts: usize,
}

impl TensorSplit {
    /// Splits the variable of this name and whole shape along an axis.
    ///
    /// # Errors
    /// [`Error::Indivisible`] if the shape lacks the axis, or its length is not a multiple of `blocks * parts`.
    pub fn new(name: &str, whole: &[usize], axis: usize, blocks: usize, parts: usize) -> Result<TensorSplit, Error> {
        let pieces = blocks.checked_mul(parts).filter(|pieces| *pieces > 0);
        match (whole.get(axis), pieces) {
            (Some(len), Some(pieces)) if len.is_multiple_of(pieces) => Ok(TensorSplit { axis, blocks, parts }),
            _ => Err(Error::Indivisible { name: name.to_owned(), shape: whole.to_vec(), axis, blocks, parts }),
        }
    }

    /// Returns the number of ranks that have a part.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Returns the shape of a part of a tensor of this shape.
    pub fn part_shape(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        shape[self.axis] /= self.parts;
        shape
    }

    /// Returns the shape of the tensor whose parts have this shape.
    pub fn whole_shape(&self, part: &[usize]) -> Vec<usize> {
        let mut shape = part.to_vec();
        shape[self.axis] *= self.parts;
        shape
    }

    /// Returns the pieces in memory, for elements that are `units` numbers each.
    fn pieces(&self, part: &[usize], units: usize) -> Pieces {
        let width = part[self.axis..].iter().product::<usize>() / self.blocks * units;
        Pieces { parts: self.parts, width }
    }

    /// Returns the elements of one part of a whole tensor of this shape.
    pub fn cut<T: Copy>(&self, whole: &[T], shape: &[usize], place: usize) -> Vec<T> {
        self.pieces(&self.part_shape(shape), 1).cut(whole, place)
    }
}

/// Returns the tensor group of the replica that runs a layer whose variables are in `parts` parts; `None` if they are
/// whole.
///
/// # Errors
/// [`Error::OtherTensorGroup`] if the replica's group has another number of ranks, and [`Error::OutsideTensorGroup`]
/// outside replicas and where there are no tensor groups.
pub fn tensor_group_of(layer: &'static str, parts: usize) -> Result<Option<Arc<ProcessGroup>>, Error> {
    if parts == 1 {
        return Ok(None);
    }
    match get_replica_context().and_then(|context| context.tensor_group()) {
        Some(group) if group.world_size() == parts => Ok(Some(group)),
        Some(group) => Err(Error::OtherTensorGroup { layer, parts, ranks: group.world_size() }),
        None => Err(Error::OutsideTensorGroup { layer, parts }),
    }
}

/// Memory that consists of blocks of `parts` pieces each; a piece has `width` numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// The number of parts.
    pub parts: usize,
    /// The length of a piece.
    pub width: usize,
}

impl Pieces {
    /// Returns the numbers of the part at `place`.
    pub fn cut<T: Copy>(&self, whole: &[T], place: usize) -> Vec<T> {
        let mut part = Vec::with_capacity(whole.len() / self.parts.max(1));
        for block in whole.chunks_exact((self.parts * self.width).max(1)) {
            part.extend_from_slice(&block[place * self.width..(place + 1) * self.width]);
        }
        part
    }

    /// Returns the whole of all parts, which are given one after another.
    pub fn join<T: Copy>(&self, parts: &[T]) -> Vec<T> {
        let mut whole = Vec::with_capacity(parts.len());
        let of_part = parts.len() / self.parts.max(1);
        for start in (0..of_part).step_by(self.width.max(1)) {
            for part in 0..self.parts {
                let start = part * of_part + start;
                whole.extend_from_slice(&parts[start..start + self.width]);
            }
        }
        whole
    }
}

/// Returns the whole of a tensor that a process's ranks have components of: the first component, or its parts on the
/// first tensor group.
///
/// # Errors
/// [`distribute_values::Error::Tensor`] if a part cannot be read or the whole cannot be created.
pub(crate) fn whole<L, T: TensorStorage<L>>(
    components: &[T],
    split: Option<TensorSplit>,
) -> distribute_values::Result<T> {
    let Some(split) = split else { return Ok(components[0].clone()) };
    let first = &components[0];
    let (dtype, shape) = (first.dtype()?, first.shape());
    let mut parts = Vec::new();
    for component in &components[..split.parts] {
        component.read(&mut |buffer| parts.extend_from_slice(buffer.as_bytes()))?;
    }
    let whole = split.pieces(&shape, dtype.size_bytes()).join(&parts);
    first.beside(&split.whole_shape(&shape), BufferRef::from_bytes(dtype, &whole)?)
}

/// Joins the tensors of the ranks at each place to the whole that they are parts of.
pub(crate) fn joined<L, T: TensorStorage<L>>(split: TensorSplit, parts: &[T]) -> distribute_values::Result<T> {
    whole(parts, Some(split))
}

/// Returns the part of a whole value that the rank at `place` has; `shape` is that of a part.
pub(crate) fn part<L, T: TensorStorage<L>>(
    split: TensorSplit,
    value: &T,
    shape: &[usize],
    place: usize,
) -> distribute_values::Result<T> {
    check_whole(split, &value.shape(), shape)?;
    let dtype = value.dtype()?;
    let mut part = Vec::new();
    value.read(&mut |buffer| part = split.pieces(shape, dtype.size_bytes()).cut(buffer.as_bytes(), place))?;
    value.beside(shape, BufferRef::from_bytes(dtype, &part)?)
}

fn check_whole(split: TensorSplit, given: &[usize], part: &[usize]) -> distribute_values::Result<()> {
    let (got, expected) = (given.to_vec(), split.whole_shape(part));
    if got == expected {
        return Ok(());
    }
    let remedy = "write a value of the variable's whole shape";
    Err(distribute_values::Error::Shape { what: "overwrite", replica: 0, got, expected, remedy })
}

/// Writes their parts of a whole value, of the same type and of the whole shape, to a process's components.
pub(crate) fn overwrite_parts<L, T: TensorStorage<L>>(
    components: &[T],
    split: TensorSplit,
    value: &T,
) -> distribute_values::Result<()> {
    let (shape, units) = (components[0].shape(), value.dtype()?.size_bytes());
    check_whole(split, &value.shape(), &shape)?;
    let pieces = split.pieces(&shape, units);
    let mut parts: Vec<Vec<u8>> = Vec::new();
    value.read(&mut |buffer| {
        parts = (0..split.parts).map(|place| pieces.cut(buffer.as_bytes(), place)).collect();
    })?;
    for (component, part) in components.iter().zip(parts.iter().cycle()) {
        component.write(&mut |mut buffer| buffer.as_bytes_mut().copy_from_slice(part))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_cut_and_joined_along_every_axis() {
        let whole: Vec<u32> = (0..2 * 12 * 3).collect();
        for (shape, axis) in [([12, 2, 3], 0), ([2, 12, 3], 1), ([2, 3, 12], 2)] {
            for (blocks, parts) in [(1, 1), (1, 2), (1, 4), (3, 2), (3, 4), (2, 3)] {
                let split = TensorSplit::new("w", &shape, axis, blocks, parts).unwrap();
                let cut: Vec<Vec<u32>> = (0..parts).map(|place| split.cut(&whole, &shape, place)).collect();
                let of_part = split.part_shape(&shape);
                assert_eq!(split.whole_shape(&of_part), shape);
                assert!(cut.iter().all(|part| part.len() == of_part.iter().product::<usize>()));
                assert_eq!(split.pieces(&of_part, 1).join(&cut.concat()), whole, "{shape:?} {axis} {blocks} {parts}");
            }
        }
        let split = TensorSplit::new("qkv", &[6, 1], 0, 3, 2).unwrap();
        assert_eq!(split.cut(&[0, 1, 2, 3, 4, 5], &[6, 1], 1), [1, 3, 5]);
    }

    #[test]
    fn what_cannot_be_divided_is_refused() {
        let told =
            |axis, blocks, parts| TensorSplit::new("head", &[97, 8], axis, blocks, parts).unwrap_err().to_string();
        let text = told(0, 1, 2);
        assert!(text.contains("head") && text.contains("[97, 8]") && text.contains("multiple of 2"), "{text}");
        assert!(told(1, 3, 4).contains("multiple of 12"));
        assert!(told(2, 1, 2).contains("axis 2"));
    }
}
