//! The assignment of tensors to buckets.

use distribute_device::DType;
use distribute_types::{FNV32, fnv1a_32};

use crate::engine::memory::OwnedBuffers;
use crate::{Error, Result};

/// Type and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedTensor {
    /// The type of its elements.
    pub dtype: DType,
    /// Its dimensions; their product is its length.
    pub dims: Vec<usize>,
}

impl FusedTensor {
    /// Describes a tensor of this type and shape.
    pub fn new(dtype: DType, dims: impl Into<Vec<usize>>) -> FusedTensor {
        FusedTensor { dtype, dims: dims.into() }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Tensors that are reduced in one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The type of all its tensors.
    pub dtype: DType,
    /// The indices of its tensors, in the order in which they are expected.
    pub members: Vec<usize>,
}

/// Buckets in the order in which they are launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    pub(crate) tensors: Vec<FusedTensor>,
    pub(crate) buckets: Vec<Bucket>,
    /// For each tensor its bucket and its position in the bucket; `None` if it is in no bucket.
    place: Vec<Option<(usize, usize)>>,
    /// For each bucket the digest that ranks compare.
    digests: Vec<u32>,
}

impl BucketPlan {
    /// Assigns the tensors in `order` to buckets, one after another. A bucket holds one type, and is closed when it has
    /// at least `bucket_bytes` bytes. Tensors that are not in `order` are in no bucket.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{BucketPlan, DType, FusedTensor};
    /// let layers = [1000, 10, 1000, 10].map(|len| FusedTensor::new(DType::F32, [len]));
    /// let plan = BucketPlan::new(&layers, &[3, 2, 1, 0], 4000);
    /// let members: Vec<&[usize]> = plan.buckets().iter().map(|bucket| &bucket.members[..]).collect();
    /// assert_eq!(members, [[3, 2], [1, 0]]);
    /// ```
    pub fn new(tensors: &[FusedTensor], order: &[usize], bucket_bytes: usize) -> BucketPlan {
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut place = vec![None; tensors.len()];
        let mut bytes = 0;
        for index in order.iter().copied() {
            let Some((tensor, None)) = tensors.get(index).zip(place.get(index).copied()) else { continue };
            if !buckets.last().is_some_and(|bucket| bucket.dtype == tensor.dtype && bytes < bucket_bytes) {
                buckets.push(Bucket { dtype: tensor.dtype, members: Vec::new() });
                bytes = 0;
            }
            bytes += tensor.len() * tensor.dtype.size_bytes();
            let at = buckets.len() - 1;
            place[index] = Some((at, buckets[at].members.len()));
            buckets[at].members.push(index);
        }
        let digests = buckets.iter().map(|bucket| digest(bucket, tensors)).collect();
        BucketPlan { tensors: tensors.to_vec(), buckets, place, digests }
    }

    /// Returns the buckets.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Returns all tensors, whether in buckets or not.
    pub fn tensors(&self) -> &[FusedTensor] {
        &self.tensors
    }

    /// Returns whether the tensor is in a bucket.
    pub fn contains(&self, index: usize) -> bool {
        self.place.get(index).is_some_and(Option::is_some)
    }

    /// Returns the bucket of a tensor, and its position among the bucket's members.
    pub fn position(&self, index: usize) -> Option<(usize, usize)> {
        self.place.get(index).copied().flatten()
    }

    /// Returns the digest of a bucket's tensors. It is part of the calls that reduce the bucket, so that ranks whose
    /// plans differ get [`Error::Mismatch`] instead of sums of different tensors.
    pub(crate) fn digest(&self, bucket: usize) -> u32 {
        self.digests[bucket]
    }

    pub(super) fn place(&self, index: usize) -> Result<(usize, usize)> {
        self.position(index).ok_or_else(|| Error::Tensor {
            index,
            problem: format!("it is in no bucket of the plan, which knows {} tensors", self.tensors.len()),
        })
    }

    /// Checks that memory has the type and length that the plan gives its tensor.
    pub(super) fn check<B: OwnedBuffers>(&self, index: usize, memory: &mut B) -> Result<()> {
        let expected = &self.tensors[index];
        let dtype = memory.dtype().unwrap_or(expected.dtype);
        let mut bytes = 0;
        memory.visit(&mut |slice| bytes += slice.len());
        let len = bytes / dtype.size_bytes();
        if dtype == expected.dtype && len == expected.len() {
            return Ok(());
        }
        let problem =
            format!("it came with {len} elements of {dtype}, planned were {} of {}", expected.len(), expected.dtype);
        Err(Error::Tensor { index, problem })
    }
}

/// Returns the digest of the type of a bucket, and of the indices and shapes of its tensors in their order.
fn digest(bucket: &Bucket, tensors: &[FusedTensor]) -> u32 {
    let words = bucket.members.iter().flat_map(|index| {
        let dims = &tensors[*index].dims;
        [*index, dims.len()].into_iter().chain(dims.iter().copied())
    });
    let bytes = words.flat_map(|word| (word as u64).to_le_bytes());
    fnv1a_32(FNV32, std::iter::once(bucket.dtype.code()).chain(bytes))
}
