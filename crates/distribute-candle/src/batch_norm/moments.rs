//! Moments of channels, over the elements of all replicas.

use candle_core::{D, DType, Device, Error, Result, Tensor};
use distribute_strategy::ReplicaContext;

use super::channels_first;
use super::fused::{has_planes, moments};
use crate::all_reduce::gather_numbers;
use crate::exchange::Exchange;
use crate::host::by_type;

/// The moments of each channel over a set of elements: tensors of f64, on the device of the elements.
#[derive(Clone, Debug)]
pub(super) struct Moments {
    /// The number of elements of a channel.
    pub(super) count: f64,
    /// One element of each channel. The mean is stored as its difference from this element, so that a large mean loses
    /// no precision.
    pub(super) origins: Tensor,
    /// The means minus the origins.
    pub(super) offsets: Tensor,
    /// Sums of squared deviations from the mean.
    pub(super) deviations: Tensor,
}

impl Moments {
    /// Returns the moments of an empty batch.
    pub(super) fn none(channels: usize, device: &Device) -> Result<Moments> {
        let zeros = Tensor::zeros(channels, DType::F64, device)?;
        Ok(Moments { count: 0.0, origins: zeros.clone(), offsets: zeros.clone(), deviations: zeros })
    }

    /// Returns the moments of a tensor that is not empty, with channels in axis 1.
    pub(super) fn of(x: &Tensor) -> Result<Moments> {
        if has_planes(x) {
            return by_type!(x.dtype(), moments(x));
        }
        let flat = channels_first(x)?;
        let (_, count) = flat.dims2()?;
        let origin = flat.narrow(1, 0, 1)?.squeeze(1)?;
        let near = flat.broadcast_sub(&origin.unsqueeze(1)?)?;
        let offset = (near.sum(D::Minus1)? / count as f64)?;
        let deviations = near.broadcast_sub(&offset.unsqueeze(1)?)?.sqr()?.sum(D::Minus1)?;
        let wide = |numbers: Tensor| numbers.to_dtype(DType::F64);
        let (origins, offsets, deviations) = (wide(origin)?, wide(offset)?, wide(deviations)?);
        Ok(Moments { count: count as f64, origins, offsets, deviations })
    }

    /// Merges the moments of two sets of elements.
    ///
    /// # Source
    /// Chan, Golub and LeVeque, 1979, equations 2.1.
    fn merge(self, other: Moments) -> Result<Moments> {
        if self.count == 0.0 {
            return Ok(other);
        }
        if other.count == 0.0 {
            return Ok(self);
        }
        let count = self.count + other.count;
        let apart = (((other.origins - &self.origins)? + other.offsets)? - &self.offsets)?;
        let offsets = (self.offsets + (&apart * (other.count / count))?)?;
        let between = (apart.sqr()? * (self.count * (other.count / count)))?;
        let deviations = (self.deviations + (other.deviations + between)?)?;
        Ok(Moments { count, origins: self.origins, offsets, deviations })
    }

    /// Merges the moments of all replicas. Every replica calls this, and each gets the same bits.
    pub(super) fn over_replicas(self, context: &ReplicaContext, exchange: Exchange) -> Result<Moments> {
        let (channels, device) = (self.origins.dim(0)?, self.origins.device().clone());
        let count = Tensor::new(&[self.count], &device)?;
        let own = Tensor::cat(&[&count, &self.origins, &self.offsets, &self.deviations], 0)?;
        let all = gather_numbers(context, &own, exchange)?;
        let counts: Vec<f64> = match context.graph_device_group().map_err(Error::wrap)? {
            // The host knows its count without waiting for the GPU.
            Some(_) => {
                let group = context.graph_group().map_err(Error::wrap)?;
                exchange.all_gather(&group, &[self.count], &vec![1; group.world_size()])?
            }
            None => all.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?,
        };
        let mut merged = Moments::none(channels, &device)?;
        for (replica, count) in counts.into_iter().enumerate() {
            let row = all.get(replica)?;
            let numbers = |at: usize| row.narrow(0, 1 + at * channels, channels);
            let (origins, offsets, deviations) = (numbers(0)?, numbers(1)?, numbers(2)?);
            merged = merged.merge(Moments { count, origins, offsets, deviations })?;
        }
        Ok(merged)
    }

    pub(super) fn means(&self) -> Result<Tensor> {
        &self.origins + &self.offsets
    }
}
