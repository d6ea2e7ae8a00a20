//! Copies between many tensors and one bucket at once.

use super::source::Module;
use super::stream::{CudaStream, MemoryRange};
use crate::{DeviceBuffer, Error, Result};

/// Bytes of a bucket that one block packs; the same in `pack.cu`.
const PACK_CHUNK_BYTES: usize = 32768;

/// The number of tensors that fit into 4 KiB of parameters, which every GPU supports, and into the 32 KiB that CUDA
/// 12.1 introduced.
pub(super) const PACK_CAPACITIES: [usize; 2] = [168, 1360];

#[repr(C)]
#[derive(Clone, Copy)]
struct Piece {
    tensor: u64,
    bucket_offset: u64,
    bytes: u64,
}

#[repr(C)]
struct PackParams<const CAPACITY: usize> {
    bucket: u64,
    start: u64,
    pieces: u32,
    piece: [Piece; CAPACITY],
}

impl CudaStream {
    /// Copies tensors into a bucket, each to its byte offset.
    ///
    /// # Shapes
    /// The destinations lie within the bucket, in ascending order, and do not overlap; offsets that are multiples of 16
    /// are fastest. Bytes between tensors are left unchanged.
    ///
    /// # Cost
    /// One launch for up to 1,360 tensors, and another for each further 1,360; each byte is read once and written once.
    ///
    /// # Errors
    /// The errors of [`CudaStream::reduce`].
    pub fn pack(&self, tensors: &[(&DeviceBuffer, usize)], bucket: &DeviceBuffer) -> Result<()> {
        self.pieces("packing a bucket", "pack", tensors, bucket)
    }

    /// Copies tensors out of a bucket: the inverse of [`CudaStream::pack`].
    ///
    /// # Errors
    /// The errors of [`CudaStream::reduce`].
    pub fn unpack(&self, bucket: &DeviceBuffer, tensors: &[(&DeviceBuffer, usize)]) -> Result<()> {
        self.pieces("unpacking a bucket", "unpack", tensors, bucket)
    }

    fn pieces(
        &self,
        what: &'static str,
        kernel: &'static str,
        tensors: &[(&DeviceBuffer, usize)],
        bucket: &DeviceBuffer,
    ) -> Result<()> {
        let whole = self.any(bucket)?;
        let mut end = 0;
        let mut pieces = Vec::with_capacity(tensors.len());
        let mut places = vec![self.any(bucket)?];
        for (index, (tensor, offset)) in tensors.iter().enumerate() {
            let place = self.any(tensor)?;
            if *offset < end || offset.checked_add(place.len_bytes).is_none_or(|end| end > whole.len_bytes) {
                let problem = format!(
                    "tensor {index} of {} bytes is to lie at byte {offset}, where {end} to {} are free; give places in \
                     rising order, inside the bucket",
                    place.len_bytes, whole.len_bytes
                );
                return Err(Error::Operands { operation: what, problem });
            }
            end = offset + place.len_bytes;
            if place.len_bytes > 0 {
                pieces.push(Piece {
                    tensor: place.pointer,
                    bucket_offset: *offset as u64,
                    bytes: place.len_bytes as u64,
                });
                places.push(place);
            }
        }
        let [small, large] = PACK_CAPACITIES;
        let capacity = if pieces.len() > small && self.takes_large_parameters() { large } else { small };
        for pieces in pieces.chunks(capacity) {
            if capacity == small {
                self.launch_pieces::<{ PACK_CAPACITIES[0] }>(what, kernel, whole.pointer, pieces, &places)?;
            } else {
                self.launch_pieces::<{ PACK_CAPACITIES[1] }>(what, kernel, whole.pointer, pieces, &places)?;
            }
        }
        Ok(())
    }

    fn launch_pieces<const CAPACITY: usize>(
        &self,
        what: &'static str,
        kernel: &'static str,
        bucket: u64,
        pieces: &[Piece],
        places: &[MemoryRange<'_>],
    ) -> Result<()> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return Ok(()) };
        let start = first.bucket_offset / 16 * 16;
        let blocks = (last.bucket_offset + last.bytes - start).div_ceil(PACK_CHUNK_BYTES as u64);
        let mut params = PackParams::<CAPACITY> {
            bucket,
            start,
            pieces: pieces.len() as u32,
            piece: [Piece { tensor: 0, bucket_offset: 0, bytes: 0 }; CAPACITY],
        };
        params.piece[..pieces.len()].copy_from_slice(pieces);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        self.launch(what, Module::Pack { capacity: CAPACITY }, kernel, blocks, &params, places)
    }
}
