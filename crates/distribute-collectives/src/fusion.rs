//! Fused all-reduce: many tensors in few operations. Gradients are reduced in buckets, each as soon as its last tensor
//! arrives.

use std::sync::{Arc, Mutex};

use distribute_device::DType;

use crate::compression::{Bucketed, Compression, Launched};
use crate::engine::memory::OwnedBuffers;
use crate::sync::lock;
use crate::{Error, ProcessGroup, ReduceOp, Result};

mod batch;
mod plan;

pub(crate) use batch::Batch;
pub use plan::{Bucket, BucketPlan, FusedTensor};

/// One rank's side of a repeated fused all-reduce.
///
/// In every step each rank [pushes](FusedStep::push) the same tensors, in any order and while it still computes others.
/// Full buckets are launched in the order of the plan, so ranks agree on the order of operations whatever the order of
/// their tensors.
///
/// # Examples
/// ```
/// use distribute_collectives::{DType, FusedAllReduce, FusedTensor, FusionOptions, ProcessGroup, ReduceOp};
///
/// let layers = [FusedTensor::new(DType::F32, [8, 4]), FusedTensor::new(DType::F32, [4])];
/// let ranks = ProcessGroup::local(2)?;
/// std::thread::scope(|scope| {
///     for group in &ranks {
///         let layers = &layers;
///         scope.spawn(move || {
///             let fused = FusedAllReduce::new(layers, &FusionOptions::default().op(ReduceOp::Mean))?;
///             for step in 0..3 {
///                 let mut gradients = fused.begin();
///                 gradients.push(group, 1, vec![step as f32; 4])?;     // backward: the last layer first
///                 gradients.push(group, 0, vec![1.0; 32])?;
///                 let gradients = gradients.finish(group)?;            // in the order of `layers`
///                 assert_eq!(gradients[1], [step as f32; 4]);
///             }
///             Ok::<(), distribute_collectives::Error>(())
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
///
/// # Source
/// The buckets of PyTorch's `DistributedDataParallel` (Li and others, "PyTorch Distributed", 2020) and Horovod's tensor
/// fusion.
/// Clones are the same side: they share the errors of compression.
#[derive(Clone, Debug)]
pub struct FusedAllReduce {
    plan: Arc<BucketPlan>,
    op: ReduceOp,
    /// One per compressed bucket; each keeps its compression error for the next step.
    compressors: Arc<Vec<Option<Mutex<Bucketed>>>>,
}

/// Options of a [`FusedAllReduce`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FusionOptions {
    /// A bucket is closed when it holds at least this many bytes. Smaller buckets start earlier, larger ones need fewer
    /// operations; between processes an operation costs about as much as moving 64 KiB. Default: 1 MiB.
    pub bucket_bytes: usize,
    /// The reduction; `Sum` or `Mean` if values are compressed. Default: `Sum`.
    pub op: ReduceOp,
    /// The compression of the exchanged values. Default: none.
    pub compression: Compression,
}

impl Default for FusionOptions {
    fn default() -> Self {
        FusionOptions { bucket_bytes: 1 << 20, op: ReduceOp::Sum, compression: Compression::None }
    }
}

distribute_types::setters! {
    FusionOptions {
        bucket_bytes: usize,
        op: ReduceOp,
        compression: Compression,
    }
}

impl FusedAllReduce {
    /// Plans buckets for tensors that arrive in reverse order, like gradients in backward.
    ///
    /// # Errors
    /// The errors of [`with_plan`](FusedAllReduce::with_plan).
    pub fn new(tensors: &[FusedTensor], options: &FusionOptions) -> Result<FusedAllReduce> {
        let order: Vec<usize> = (0..tensors.len()).rev().collect();
        FusedAllReduce::with_plan(BucketPlan::new(tensors, &order, options.bucket_bytes), options)
    }

    /// Uses a given plan, which must be equal on all ranks: a bucket that holds other tensors, or the same in another
    /// order, is [`Error::Mismatch`] in the step.
    ///
    /// # Errors
    /// [`Error::Compression`] if the settings of the compression are invalid, or a bucket has too many elements for it.
    pub fn with_plan(plan: BucketPlan, options: &FusionOptions) -> Result<FusedAllReduce> {
        options.compression.check(options.op)?;
        for bucket in plan.buckets.iter().filter(|bucket| bucket.dtype == DType::F32) {
            options.compression.check_bucket(bucket.members.iter().map(|index| plan.tensors[*index].len()).sum())?;
        }
        let compressor = |(index, bucket): (usize, &Bucket)| -> Option<Mutex<Bucketed>> {
            let tensors: Vec<FusedTensor> = bucket.members.iter().map(|index| plan.tensors[*index].clone()).collect();
            let is_compressed = bucket.dtype == DType::F32;
            let bucketed = is_compressed.then(|| options.compression.bucketed(&tensors, plan.digest(index))).flatten();
            bucketed.map(Mutex::new)
        };
        let compressors = Arc::new(plan.buckets.iter().enumerate().map(compressor).collect());
        Ok(FusedAllReduce { plan: Arc::new(plan), op: options.op, compressors })
    }

    /// Returns the plan.
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// Rolls back the last step after it has failed on some rank: restores the compression error from before it. Call
    /// it on every rank, once, when the step is dropped, and only if no rank has used its results.
    pub fn take_back(&self) {
        self.compressors.iter().flatten().for_each(|compressor| lock(compressor).take_back());
    }

    /// Restores the compression error of one tensor from before the last step, because the rank does not use its sum:
    /// what the step has sent of the error is sent again in the next one. Call it on every rank or on none.
    ///
    /// # Examples
    /// A tensor for which all ranks push zeros, only to complete its bucket:
    /// ```
    /// use distribute_collectives::{Compression, DType, FusedAllReduce, FusedTensor, FusionOptions, ProcessGroup};
    ///
    /// let group = ProcessGroup::local(1)?.remove(0);
    /// let options = FusionOptions::default().compression(Compression::TopK(0.5));
    /// let tensors = [FusedTensor::new(DType::F32, [1]), FusedTensor::new(DType::F32, [1])];
    /// let fused = FusedAllReduce::new(&tensors, &options)?;
    /// let step = |values: [f32; 2]| {
    ///     let mut step = fused.begin();
    ///     step.push(&group, 1, vec![values[1]])?;
    ///     step.push(&group, 0, vec![values[0]])?;
    ///     step.finish(&group)
    /// };
    /// assert_eq!(step([8.0, 1.0])?, [[8.0], [0.0]]);               // the second is an error of 1
    /// assert_eq!(step([0.5, 0.0])?, [[0.0], [1.0]]);               // which is sent, and not used
    /// fused.discard(1);
    /// assert_eq!(step([0.0, 0.0])?, [[0.0], [1.0]]);
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn discard(&self, index: usize) {
        let Some((bucket, place)) = self.plan.position(index) else { return };
        let Some(compressor) = &self.compressors[bucket] else { return };
        let len = |index: &usize| self.plan.tensors[*index].len();
        let members = &self.plan.buckets[bucket].members;
        let start: usize = members[..place].iter().map(len).sum();
        lock(compressor).discard(start..start + len(&members[place]));
    }

    #[cfg(test)]
    pub(crate) fn left(&self) -> Vec<f32> {
        self.compressors.iter().flatten().flat_map(|compressor| lock(compressor).left().to_vec()).collect()
    }

    /// Starts a step. Only one step at a time: compression errors carry over from one step to the next.
    pub fn begin<B: OwnedBuffers>(&self) -> FusedStep<B> {
        self.compressors.iter().flatten().for_each(|compressor| lock(compressor).settle());
        FusedStep {
            plan: self.plan.clone(),
            op: self.op,
            compressors: self.compressors.clone(),
            waiting: self.plan.buckets.iter().map(|bucket| bucket.members.iter().map(|_| None).collect()).collect(),
            missing: self.plan.buckets.iter().map(|bucket| bucket.members.len()).collect(),
            launched: Vec::with_capacity(self.plan.buckets.len()),
        }
    }
}

/// One step of a [`FusedAllReduce`].
#[derive(Debug)]
pub struct FusedStep<B: OwnedBuffers> {
    plan: Arc<BucketPlan>,
    op: ReduceOp,
    compressors: Arc<Vec<Option<Mutex<Bucketed>>>>,
    /// Tensors that have been pushed, by bucket and position.
    waiting: Vec<Vec<Option<B>>>,
    /// Number of tensors of each bucket that are still missing.
    missing: Vec<usize>,
    launched: Vec<Launched<B>>,
}

impl<B: OwnedBuffers> FusedStep<B> {
    /// Adds a tensor. When its bucket is full, starts to reduce it, and then later buckets that waited for it.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the index is not in the plan or was pushed already, or the memory has another type or
    /// length; the errors of [`Start::all_reduce`](crate::Start::all_reduce).
    pub fn push(&mut self, group: &ProcessGroup, index: usize, mut tensor: B) -> Result<()> {
        let (bucket, place) = self.plan.place(index)?;
        self.plan.check(index, &mut tensor)?;
        if self.waiting[bucket][place].is_some() || bucket < self.launched.len() {
            return Err(Error::Tensor { index, problem: "it was given before in this step".to_owned() });
        }
        self.waiting[bucket][place] = Some(tensor);
        self.missing[bucket] -= 1;
        while self.missing.get(self.launched.len()) == Some(&0) {
            self.launch(group)?;
        }
        Ok(())
    }

    /// Returns whether this tensor has been pushed.
    pub fn has(&self, index: usize) -> bool {
        let Ok((bucket, place)) = self.plan.place(index) else { return false };
        bucket < self.launched.len() || self.waiting[bucket][place].is_some()
    }

    /// Waits for all buckets and returns the reduced tensors, in the order of their indices.
    ///
    /// # Errors
    /// [`Error::Tensor`] if a tensor was not pushed; the errors of [`Work::wait`](crate::Work::wait), such as
    /// [`Error::Mismatch`] if ranks have different plans.
    pub fn finish(mut self, group: &ProcessGroup) -> Result<Vec<B>> {
        let absent = (0..self.plan.tensors.len()).find(|index| self.plan.place(*index).is_ok() && !self.has(*index));
        if let Some(index) = absent {
            return Err(Error::Tensor { index, problem: "it has not come when the step was finished".to_owned() });
        }
        let mut all: Vec<(usize, B)> = Vec::with_capacity(self.plan.tensors.len());
        for (index, launched) in std::mem::take(&mut self.launched).into_iter().enumerate() {
            let compressor = self.compressors[index].as_ref();
            let tensors = launched.wait(group, compressor.map(lock), self.op)?;
            all.extend(self.plan.buckets[index].members.iter().copied().zip(tensors));
        }
        all.sort_by_key(|(index, _)| *index);
        Ok(all.into_iter().map(|(_, tensor)| tensor).collect())
    }

    fn launch(&mut self, group: &ProcessGroup) -> Result<()> {
        let index = self.launched.len();
        let tensors: Vec<B> = self.waiting[index].iter_mut().filter_map(Option::take).collect();
        let batch = Batch { tensors, dtype: self.plan.buckets[index].dtype };
        let compressor = self.compressors[index].as_ref().map(lock);
        self.launched.push(Launched::begin(group, batch, self.plan.digest(index), compressor, self.op)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
