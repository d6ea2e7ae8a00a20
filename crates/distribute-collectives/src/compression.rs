//! Lossy compression of gradients, with error feedback.
//!
//! The error that a compressor makes in one step's values is added to the next step's (error feedback), so over many
//! steps nothing is lost. Every rank decodes the same messages, so ranks agree bit for bit, but results depend on the
//! number of ranks more than uncompressed ones do.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, MutexGuard};

use bytemuck::cast_slice;
use distribute_arithmetic::{self as arithmetic, Combine, ShortFloat};
use distribute_device::DType;
use distribute_types::fnv1a_32;
use half::{bf16, f16};

use crate::engine::memory::OwnedBuffers;
use crate::fusion::{Batch, FusedTensor};
use crate::{Error, ProcessGroup, ReduceOp, Result, Work};

mod power_sgd;
mod short;
mod top_k;

use power_sgd::PowerSgd;
use short::Short;
use top_k::TopK;

/// Compression of `f32` values. Values of other types are not compressed.
///
/// # Examples
/// ```
/// use distribute_collectives::{Compression, FusionOptions};
/// let options = FusionOptions::default().compression(Compression::Bf16);
/// assert_eq!(options.compression.name(), "bf16");
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// Half the bytes, with 11 significant bits; values above 65504 become infinite, and so do sums. Each rank sends
    /// its share of a mean, so that a mean of values up to 65504 does not overflow.
    F16,
    /// Half the bytes, with 8 significant bits and the range of `f32`.
    Bf16,
    /// Only the values of greatest magnitude: this share of each bucket, above 0 and at most 1.
    ///
    /// Every rank receives the values that every rank has chosen, so it pays if share × ranks is well below 1.
    ///
    /// # Source
    /// Aji and Heafield, "Sparse communication for distributed gradient descent", 2017.
    TopK(f64),
    /// Matrices are sent as products of two narrow ones of this rank; tensors of one dimension are sent unchanged. A
    /// rank of 1 to 4 is common.
    ///
    /// # Source
    /// Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression", 2019, algorithm 1.
    PowerSgd(usize),
    /// A custom compressor.
    Custom(CustomCompression),
}

/// A factory of custom [`Compressor`]s.
#[derive(Clone)]
pub struct CustomCompression {
    name: Arc<str>,
    make: Arc<Make>,
}

type Make = dyn Fn(&[FusedTensor]) -> Box<dyn Compressor> + Send + Sync;

impl fmt::Debug for CustomCompression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Compression {
    /// Uses a custom compressor. `make` is called once for each bucket, with the tensors that it holds, in order.
    pub fn custom(
        name: &str,
        make: impl Fn(&[FusedTensor]) -> Box<dyn Compressor> + Send + Sync + 'static,
    ) -> Compression {
        Compression::Custom(CustomCompression { name: name.into(), make: Arc::new(make) })
    }

    /// Returns the lower-case name.
    pub fn name(&self) -> &str {
        match self {
            Compression::None => "none",
            Compression::F16 => "f16",
            Compression::Bf16 => "bf16",
            Compression::TopK(_) => "top-k",
            Compression::PowerSgd(_) => "power-sgd",
            Compression::Custom(custom) => &custom.name,
        }
    }

    pub(crate) fn check(&self, op: ReduceOp) -> Result<()> {
        let refuse = |problem: String| Err(Error::Compression { name: self.name().to_owned(), problem });
        match self {
            Compression::None => Ok(()),
            _ if !matches!(op, ReduceOp::Sum | ReduceOp::Mean) => {
                refuse(format!("the reduction is {op}; what is left out can only be made up for in sums and means"))
            }
            Compression::TopK(share) if !(*share > 0.0 && *share <= 1.0) => {
                refuse(format!("the share is {share}; give one above 0 and at most 1, such as 0.01"))
            }
            Compression::PowerSgd(0) => refuse("the rank is 0; give at least 1, such as 2".to_owned()),
            _ => Ok(()),
        }
    }

    /// Checks the number of elements of a bucket, before memory is allocated for them.
    pub(crate) fn check_bucket(&self, elements: usize) -> Result<()> {
        match self {
            Compression::TopK(_) if u32::try_from(elements).is_err() => {
                let (name, most) = (self.name().to_owned(), u32::MAX);
                let problem = format!(
                    "a bucket has {elements} elements, and their places are sent in 32 bits, which is enough for \
                     {most}; choose a smaller bucket_bytes, and cut tensors of more elements"
                );
                Err(Error::Compression { name, problem })
            }
            _ => Ok(()),
        }
    }

    /// Creates the compressor of a bucket that holds these tensors, whose digest is equal on all ranks.
    pub(crate) fn bucketed(&self, tensors: &[FusedTensor], digest: u32) -> Option<Bucketed> {
        let compressor: Box<dyn Compressor> = match self {
            Compression::None => return None,
            Compression::F16 => Box::new(Short(ShortFloat::F16)),
            Compression::Bf16 => Box::new(Short(ShortFloat::Bf16)),
            Compression::TopK(share) => Box::new(TopK { share: *share }),
            Compression::PowerSgd(rank) => Box::new(PowerSgd::new(*rank, tensors)),
            Compression::Custom(custom) => (custom.make)(tensors),
        };
        let len = tensors.iter().map(FusedTensor::len).sum();
        Some(Bucketed {
            compressor,
            tag: fnv1a_32(digest, self.name().bytes()),
            sends_shares: matches!(self, Compression::F16 | Compression::Bf16),
            left: vec![0.0; len],
            before: Vec::new(),
            begun: false,
            sum: vec![0.0; len],
        })
    }
}

impl FromStr for Compression {
    type Err = Error;

    /// Parses `none`, `f16`, `bf16`, `top-k:SHARE` or `power-sgd:RANK`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, setting) = text.split_once(':').map_or((text, None), |(name, setting)| (name, Some(setting)));
        let compression = match (name, setting) {
            ("none", None) => Some(Compression::None),
            ("f16", None) => Some(Compression::F16),
            ("bf16", None) => Some(Compression::Bf16),
            ("top-k", Some(share)) => share.parse().ok().map(Compression::TopK),
            ("power-sgd", Some(rank)) => rank.parse().ok().map(Compression::PowerSgd),
            _ => None,
        };
        compression.ok_or_else(|| Error::UnknownName {
            what: "compression",
            given: text.to_owned(),
            expected: "none, f16, bf16, top-k:SHARE (such as top-k:0.01) or power-sgd:RANK (such as power-sgd:2)",
        })
    }
}

/// Compressed values, as they are sent, and as they are returned after being combined over ranks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Payload {
    /// Summed over ranks.
    SumF32(Vec<f32>),
    /// Summed over ranks.
    SumF16(Vec<f16>),
    /// Summed over ranks.
    SumBf16(Vec<bf16>),
    /// Equal numbers of 32-bit values from every rank, gathered in rank order.
    Gather(Vec<u32>),
}

/// Compresses the values of one bucket to a smaller payload, and decodes the combined payloads of all ranks to their
/// sum. For a mean the decoded sum is divided by the number of ranks.
///
/// Each bucket has one on each rank. All ranks must send payloads of one kind and length, and must decode the same
/// payload to the same bits.
///
/// # Examples
/// Signs and one scale, as in signSGD:
/// ```
/// use distribute_collectives::{Compression, Compressor, Payload};
///
/// struct Signs;
///
/// impl Compressor for Signs {
///     fn begin(&mut self, values: &mut [f32]) -> Payload {
///         let scale = values.iter().map(|x| x.abs()).sum::<f32>() / values.len().max(1) as f32;
///         let sent: Vec<f32> = values.iter().map(|x| scale.copysign(*x)).collect();
///         values.iter_mut().zip(&sent).for_each(|(value, sent)| *value -= sent);   // added to the next step's values
///         let mut words = vec![scale.to_bits()];
///         words.extend(sent.chunks(32).map(|chunk| {
///             chunk.iter().enumerate().fold(0, |word, (bit, x)| word | u32::from(x.is_sign_negative()) << bit)
///         }));
///         Payload::Gather(words)
///     }
///
///     fn go_on(&mut self, received: Payload, _: &mut [f32], sum: &mut [f32]) -> Option<Payload> {
///         if let Payload::Gather(words) = received {
///             for rank in words.chunks_exact(1 + sum.len().div_ceil(32)) {
///                 let scale = f32::from_bits(rank[0]);
///                 for (index, sum) in sum.iter_mut().enumerate() {
///                     let negative = rank[1 + index / 32] >> (index % 32) & 1 == 1;
///                     *sum += if negative { -scale } else { scale };
///                 }
///             }
///         }
///         None
///     }
/// }
///
/// let compression = Compression::custom("signs", |_| Box::new(Signs));
/// assert_eq!(compression.name(), "signs");
/// ```
pub trait Compressor: Send {
    /// Compresses `values`, which hold this step's values plus the error of earlier steps. The error that it leaves in
    /// them is added to the next step's values.
    fn begin(&mut self, values: &mut [f32]) -> Payload;

    /// Adds the decoded values of all ranks to `sum`, which starts with zeros, or returns the next payload to send.
    /// `left` is the error that [`begin`](Compressor::begin) has left.
    fn go_on(&mut self, received: Payload, left: &mut [f32], sum: &mut [f32]) -> Option<Payload>;

    /// Undoes the last [`begin`](Compressor::begin) and its following calls, because the step has failed. Needed by
    /// compressors that keep state between steps in addition to the error. Default: does nothing.
    fn take_back(&mut self) {}
}

/// A bucket's compressor and its state.
pub(crate) struct Bucketed {
    compressor: Box<dyn Compressor>,
    /// Digest of the bucket's tensors and of the compression, which ranks compare in every message.
    tag: u32,
    /// Whether each rank sends its share of a mean, so that the sum of the shares does not overflow 16 bits. Otherwise
    /// the sum is divided.
    sends_shares: bool,
    /// The error of earlier steps: in units of the mean, if shares are sent.
    left: Vec<f32>,
    /// The error before the current step.
    before: Vec<f32>,
    /// Whether a step has begun that could be rolled back.
    begun: bool,
    sum: Vec<f32>,
}

impl fmt::Debug for Bucketed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucketed").field("elements", &self.left.len()).finish_non_exhaustive()
    }
}

impl Bucketed {
    #[cfg(test)]
    pub(crate) fn left(&self) -> &[f32] {
        &self.left
    }

    /// Commits the last step.
    pub(crate) fn settle(&mut self) {
        self.begun = false;
    }

    /// Restores the error from before the current step.
    pub(crate) fn take_back(&mut self) {
        if std::mem::take(&mut self.begun) {
            self.left.copy_from_slice(&self.before);
            self.compressor.take_back();
        }
    }

    /// Restores the error of some elements from before the current step.
    pub(crate) fn discard(&mut self, elements: Range<usize>) {
        if self.begun {
            self.left[elements.clone()].copy_from_slice(&self.before[elements]);
        }
    }

    /// Adds the tensors, or their shares of a mean over `divisor` ranks, to the error and compresses the sum. The
    /// tensors' values are unspecified afterwards.
    fn begin<B: OwnedBuffers>(&mut self, tensors: &mut [B], divisor: Option<u32>) -> Payload {
        self.before.clone_from(&self.left);
        self.begun = true;
        let divisor = divisor.filter(|_| self.sends_shares);
        let left: &mut [u8] = bytemuck::cast_slice_mut(&mut self.left);
        let mut start = 0;
        for tensor in tensors {
            tensor.visit(&mut |slice| {
                let end = start + slice.len();
                if let Some(n) = divisor {
                    arithmetic::divide(DType::F32, slice, n);
                }
                arithmetic::combine(DType::F32, Combine::Sum, &mut left[start..end], slice);
                start = end;
            });
        }
        self.compressor.begin(&mut self.left)
    }

    /// Writes the sum, or mean, to the tensors, or returns the next payload to send.
    fn go_on<B: OwnedBuffers>(
        &mut self,
        received: Payload,
        tensors: &mut [B],
        divisor: Option<u32>,
    ) -> Option<Payload> {
        self.sum.fill(0.0);
        if let Some(next) = self.compressor.go_on(received, &mut self.left, &mut self.sum) {
            return Some(next);
        }
        if let Some(n) = divisor.filter(|_| !self.sends_shares) {
            arithmetic::divide(DType::F32, bytemuck::cast_slice_mut(&mut self.sum), n);
        }
        let sum: &[u8] = cast_slice(&self.sum);
        let mut start = 0;
        for tensor in tensors {
            tensor.visit(&mut |slice| {
                let end = start + slice.len();
                slice.copy_from_slice(&sum[start..end]);
                start = end;
            });
        }
        None
    }
}

/// A bucket whose operation is in progress.
#[derive(Debug)]
pub(crate) enum Launched<B: OwnedBuffers> {
    Plain(Work<Batch<B>>),
    Compressed { tensors: Vec<B>, message: Message },
}

/// A payload whose operation is in progress.
#[derive(Debug)]
pub(crate) enum Message {
    F32(Work<Vec<f32>>),
    F16(Work<Vec<f16>>),
    Bf16(Work<Vec<bf16>>),
    Gather(Work<[Vec<u32>; 2]>),
}

impl<B: OwnedBuffers> Launched<B> {
    pub(crate) fn begin(
        group: &ProcessGroup,
        mut batch: Batch<B>,
        digest: u32,
        bucketed: Option<MutexGuard<'_, Bucketed>>,
        op: ReduceOp,
    ) -> Result<Launched<B>> {
        match bucketed {
            None => Ok(Launched::Plain(group.start().tag(digest).all_reduce(batch, op)?)),
            Some(mut bucketed) => {
                let payload = bucketed.begin(&mut batch.tensors, divisor(group, op));
                let message = Message::send(group, payload, bucketed.tag, op)?;
                Ok(Launched::Compressed { tensors: batch.tensors, message })
            }
        }
    }

    pub(crate) fn wait(
        self,
        group: &ProcessGroup,
        bucketed: Option<MutexGuard<'_, Bucketed>>,
        op: ReduceOp,
    ) -> Result<Vec<B>> {
        match (self, bucketed) {
            (Launched::Plain(work), _) => Ok(work.wait()?.tensors),
            // Compressed values have a compressor.
            (Launched::Compressed { tensors, .. }, None) => Ok(tensors),
            (Launched::Compressed { mut tensors, mut message }, Some(mut bucketed)) => {
                let divisor = divisor(group, op);
                while let Some(next) = bucketed.go_on(message.receive()?, &mut tensors, divisor) {
                    message = Message::send(group, next, bucketed.tag, op)?;
                }
                Ok(tensors)
            }
        }
    }
}

impl Message {
    /// Sends a part of a reduction by `op`, which is a sum or a concatenation itself, to ranks with the same `tag` and
    /// `op`.
    fn send(group: &ProcessGroup, payload: Payload, tag: u32, op: ReduceOp) -> Result<Message> {
        let tag = tag ^ op as u32;
        let start = group.start().tag(tag);
        Ok(match payload {
            Payload::SumF32(values) => Message::F32(start.all_reduce(values, ReduceOp::Sum)?),
            Payload::SumF16(values) => Message::F16(start.all_reduce(values, ReduceOp::Sum)?),
            Payload::SumBf16(values) => Message::Bf16(start.all_reduce(values, ReduceOp::Sum)?),
            Payload::Gather(words) => {
                let (counts, all) = (vec![words.len(); group.world_size()], vec![0; words.len() * group.world_size()]);
                Message::Gather(group.parts(&counts).tag(tag).start().all_gather(words, all)?)
            }
        })
    }

    fn receive(self) -> Result<Payload> {
        Ok(match self {
            Message::F32(work) => Payload::SumF32(work.wait()?),
            Message::F16(work) => Payload::SumF16(work.wait()?),
            Message::Bf16(work) => Payload::SumBf16(work.wait()?),
            Message::Gather(work) => {
                let [_, all] = work.wait()?;
                Payload::Gather(all)
            }
        })
    }
}

/// Returns the divisor of a mean.
fn divisor(group: &ProcessGroup, op: ReduceOp) -> Option<u32> {
    (op == ReduceOp::Mean).then(|| u32::try_from(group.world_size()).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests;
